"""`rope_kernel`: rotary embedding of queries and keys in place, inside the packed output of their projection."""

from __future__ import annotations

from typing import Any

from fuseboard_tilelang._configs import RopeConfig, rope_config
from fuseboard_tilelang._tile import ACCUMULATOR, Arg, Program, program, tile

__all__ = ["rope_kernel"]


def rope_kernel(
    H: int,  # noqa: N803
    D: int,  # noqa: N803
    *,
    positions: bool = False,
    dtype: str = "bfloat16",
    cpu: bool = False,
    config: RopeConfig | None = None,
) -> Program:
    """Rotate the first `2 * H * D` columns of qkv in place, pairing column `j` of a head with `j + D / 2`.

    The kernel's tensors, in order: qkv `(M, 3 * H * D)`, cos and sin `(P, D / 2)` in float32, positions `(M,)` in int32
    where asked for. Row `r` is at position `positions[r]` (without them, `r`) modulo P: a table of one sequence serves
    a batch of them. The values' columns are neither read nor written.

    Args:
        H: Heads.
        D: Columns of a head, an even number.
        positions: Whether they are given.
        dtype: Of qkv: `bfloat16` or `float16`, on the CPU `float32`.
        cpu: Make the form for TileLang's target `c`.
        config: Rows a block and threads; None for those of the table.

    Raises:
        ValueError: No such dtype, or an odd D.
    """
    if D % 2:
        msg = f"D is {D}; a head's columns are rotated in pairs, so that it must be even."
        raise ValueError(msg)
    on = tile(dtype, cpu=cpu)
    shape = config or rope_config(cpu=cpu)
    T = on.T  # noqa: N806
    M, P = T.dynamic("M"), T.dynamic("P")  # noqa: N806
    half, rows, has_positions = D // 2, shape.rows, positions

    def rope(qkv: Any, cos: Any, sin: Any, positions: Any) -> None:
        with T.Kernel(T.ceildiv(M, rows), threads=shape.threads) as bx:
            for i, pair in on.parallel(rows, 2 * H * half):
                if bx * rows + i < M:
                    first = pair // half * D + pair % half
                    place = T.floormod(positions[bx * rows + i] if has_positions else bx * rows + i, P)
                    # Both are read before either is written.
                    a = T.cast(qkv[bx * rows + i, first], ACCUMULATOR)
                    b = T.cast(qkv[bx * rows + i, first + half], ACCUMULATOR)
                    c = cos[place, pair % half]
                    s = sin[place, pair % half]
                    qkv[bx * rows + i, first] = T.cast(a * c - b * s, dtype)
                    qkv[bx * rows + i, first + half] = T.cast(b * c + a * s, dtype)

    args = {
        "qkv": Arg(("M", 3 * H * D), dtype, written=True),
        "cos": Arg(("P", half), ACCUMULATOR),
        "sin": Arg(("P", half), ACCUMULATOR),
        "positions": Arg(("M",), "int32") if positions else None,
    }
    return program(on, "rope_kernel", rope, args, sizes={"M": M, "P": P})
