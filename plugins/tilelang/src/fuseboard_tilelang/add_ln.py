"""`add_ln_kernel`: a residual stream taken one step on, and the LayerNorm of it, in one pass over memory."""

from __future__ import annotations

from typing import Any

from fuseboard_tilelang._configs import RowConfig, row_config
from fuseboard_tilelang._tile import ACCUMULATOR, Arg, Program, program, tile

__all__ = ["add_ln_kernel"]

VECTOR = 8  # elements of 16 bits that a thread loads at once


def add_ln_kernel(  # noqa: C901 - a kernel is one function for TileLang, which reads its source
    D: int,  # noqa: N803
    *,
    residual: bool = True,
    bias: bool = True,
    eps: float = 1e-5,
    dtype: str = "bfloat16",
    cpu: bool = False,
    config: RowConfig | None = None,
) -> Program:
    """`residual += x`, and `out = layer_norm(residual) * weight + bias`; or the norm of x alone. Any number of rows.

    The kernel's tensors, in order: residual `(M, D)` where asked for, updated in place, x `(M, D)`, weight `(D,)`, bias
    `(D,)` where asked for, out `(M, D)`. The sum is rounded to the dtype, as torch rounds it, before it is normalised;
    the norm is in float32, its variance taken around the mean, so that large residuals keep their digits.

    A row is spread over the threads of one warp (on wide rows, of four) and stays in their registers.

    Args:
        D: Columns.
        residual: Whether there is one.
        bias: Whether there is one.
        eps: Added to the variance.
        dtype: Of all tensors: `bfloat16` or `float16`, on the CPU `float32`.
        cpu: Make the form for TileLang's target `c`.
        config: Rows a block, threads a row; None for those of the table.

    Raises:
        ValueError: No such dtype.
    """
    on = tile(dtype, cpu=cpu)
    c = config or row_config(D, cpu=cpu)
    T = on.T  # noqa: N806
    M = T.dynamic("M")  # noqa: N806
    rows, lanes = c.rows, c.lanes
    has_residual, has_bias = residual, bias
    width = D if cpu else -(-D // (lanes * VECTOR)) * lanes * VECTOR

    def add_ln(  # noqa: C901, PLR0912
        residual: Any, x: Any, weight: Any, bias: Any, out: Any
    ) -> None:
        with T.Kernel(T.ceildiv(M, rows), threads=rows * lanes) as bx:
            row = on.fragment((rows, width), ACCUMULATOR)
            square = on.fragment((rows, width), ACCUMULATOR)
            mean = on.fragment((rows,), ACCUMULATOR)
            spread = on.fragment((rows,), ACCUMULATOR)
            if not cpu:
                layout = T.Fragment(
                    (rows, width),
                    forward_thread_fn=lambda i, j: i * lanes + (j // VECTOR) % lanes,
                    forward_index_fn=lambda _, j: (j // (lanes * VECTOR)) * VECTOR + j % VECTOR,
                )
                T.annotate_layout({row: layout, square: layout})
            for i, j in on.parallel(rows, width):
                if bx * rows + i < M and j < D:
                    row[i, j] = T.cast(x[bx * rows + i, j], ACCUMULATOR)
                else:
                    row[i, j] = 0.0
            if has_residual:
                for i, j in on.parallel(rows, width):
                    if bx * rows + i < M and j < D:
                        row[i, j] = row[i, j] + T.cast(residual[bx * rows + i, j], ACCUMULATOR)
                for i, j in on.parallel(rows, width):
                    row[i, j] = T.cast(T.cast(row[i, j], dtype), ACCUMULATOR)
                for i, j in on.parallel(rows, width):
                    if bx * rows + i < M and j < D:
                        residual[bx * rows + i, j] = T.cast(row[i, j], dtype)
            T.reduce_sum(row, mean, dim=1)
            for i, j in on.parallel(rows, width):
                row[i, j] = T.if_then_else(j < D, row[i, j] - mean[i] / D, 0.0)
            for i, j in on.parallel(rows, width):
                square[i, j] = row[i, j] * row[i, j]
            T.reduce_sum(square, spread, dim=1)
            for i in on.parallel(rows):
                spread[i] = T.rsqrt(spread[i] / D + eps)
            for i, j in on.parallel(rows, width):
                if bx * rows + i < M and j < D:
                    if not has_bias:
                        out[bx * rows + i, j] = T.cast(row[i, j] * spread[i] * T.cast(weight[j], ACCUMULATOR), dtype)
                    else:
                        out[bx * rows + i, j] = T.cast(
                            row[i, j] * spread[i] * T.cast(weight[j], ACCUMULATOR) + T.cast(bias[j], ACCUMULATOR),
                            dtype,
                        )

    args = {
        "residual": Arg(("M", D), dtype, written=True) if residual else None,
        "x": Arg(("M", D), dtype),
        "weight": Arg((D,), dtype),
        "bias": Arg((D,), dtype) if bias else None,
        "out": Arg(("M", D), dtype, written=True),
    }
    return program(on, "add_ln_kernel", add_ln, args, sizes={"M": M})
