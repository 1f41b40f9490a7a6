"""`attn_kernel`: attention in blocks of keys with an online softmax, bounded by lengths, causality and windows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fuseboard_tilelang._configs import LOADING, AttnConfig, attn_config
from fuseboard_tilelang._tile import ACCUMULATOR, Arg, Program, program, tile

__all__ = ["FEW", "OPEN", "SCALARS", "attn_kernel", "for_few", "hides"]

FEW = 16
"""Up to how many queries `few` is for: a step of decoding."""

OPEN = 2**30
"""A bound that bounds nothing: beyond any key, and its sum with one still fits 32 bits."""

HIDDEN = -1e30  # a finite score of a key that is not seen
FLOOR = -1e28  # what the largest score starts at: above HIDDEN, so that hidden keys weigh exp2(-1e30 * scale) = 0

SCALARS = {"scale": "float32", "groups": "int32", "offset": "int32", "left": "int32", "right": "int32"}
"""The numbers a kernel is given with a call.

scale times log2(e); query heads a key head; what a query's index is short of the key it stands at; how many keys before
and behind that one it sees.
"""


def hides(n_q: int, n_k: int, offset: int, left: int, right: int) -> bool:
    """Whether bounds keep any query from any key: causality at the bottom right hides none from one."""
    return right < n_k - 1 - offset or left < n_q - 1 + offset


def for_few(q: Tensor, *, bounded: bool) -> bool:
    """Whether a call is for `few`. One with bounds is not: decoding has none, and each kernel is compiled."""
    return q.is_cuda and q.shape[2] <= FEW and not bounded


def attn_kernel(  # noqa: C901, PLR0915 - a kernel is one function for TileLang, which reads its source
    B: int | None,  # noqa: N803
    S: int | None,  # noqa: N803
    H: int | None,  # noqa: N803
    D: int,  # noqa: N803
    *,
    keys: int | None = None,
    kv_heads: int | None = None,
    bounded: bool = False,
    lengths: bool = False,
    few: bool = False,
    dtype: str = "bfloat16",
    cpu: bool = False,
    config: AttnConfig | None = None,
) -> Program:
    """Attention of `(batch, heads, length, D)` tensors. A query that sees no key gives zeros.

    The kernel's tensors, in order: q `(B, H, S, D)`, k and v `(B, G, L, D)`, lengths `(B,)` in int32 where asked for,
    out `(B, H, S, D)`; then the numbers of `SCALARS`. With `bounded`, query `i` sees key `j` when
    `i + offset - left <= j <= i + offset + right`: causality is `right = 0`, at the bottom right with `offset = L - S`,
    at the top left with `offset = 0`; without it those numbers are not looked at. With `lengths`, row b sees its first
    `lengths[b]` keys, clamped to what there is, and reads no others: what lies behind them may be NaN.

    Blocks of keys that no query of a block sees are skipped; only blocks that some query sees in part are masked.

    With `few`, launches overlap (CUDA's programmatic dependent launch): a block begins while the kernel before it still
    runs, and waits for it before it reads anything; a kernel behind it that was launched for that begins as early. For
    a step of decoding that is as much as the arithmetic.

    Args:
        B: Rows; None for any number.
        S: Queries; None for any number.
        H: Query heads; None for any number.
        D: Columns of a head.
        keys: Keys; None for any number.
        kv_heads: Key heads; None for any number.
        bounded: Whether causality or a window hides keys.
        lengths: Whether rows have lengths.
        few: For few queries: tiles of fewer rows, which leave room on a multiprocessor. Of no use on the CPU.
        dtype: Of q, k, v and out: `bfloat16` or `float16`, on the CPU `float32`.
        cpu: Make the form for TileLang's target `c`.
        config: The tiles; None for those of the table.

    Raises:
        ValueError: No such dtype.
    """
    on = tile(dtype, cpu=cpu)
    c = config or attn_config(D, bounded=bounded, few=few, cpu=cpu)
    T = on.T  # noqa: N806
    sizes = {name: T.dynamic(name) for name in ("B", "H", "G", "S", "L")}
    named = {"B": B, "H": H, "G": kv_heads, "S": S, "L": keys}
    sizes |= {name: size for name, size in named.items() if size is not None}
    batch, heads, n_q, n_k = sizes["B"], sizes["H"], sizes["S"], sizes["L"]
    bm, bn, has_lengths = c.bm, c.bn, lengths
    policy = T.GemmWarpPolicy.FullRow

    @T.macro  # type: ignore[untyped-decorator]
    def hide(s: Any, k0: Any, q0: Any, n: Any, low: Any, high: Any) -> None:
        for i, j in on.parallel(bm, bn):
            if bounded:
                seen = (k0 + j < n) & (k0 + j <= q0 + i + high) & (k0 + j >= q0 + i + low)
                s[i, j] = T.if_then_else(seen, s[i, j], HIDDEN)
            else:
                s[i, j] = T.if_then_else(k0 + j < n, s[i, j], HIDDEN)

    def attn(  # noqa: C901, PLR0912, PLR0915
        q: Any, k: Any, v: Any, lengths: Any, out: Any, scale: Any, groups: Any, offset: Any, left: Any, right: Any
    ) -> None:
        with T.Kernel(T.ceildiv(n_q, bm), heads, batch, threads=c.threads) as (bx, by, bz):
            qs = on.shared((bm, D), dtype)
            ks = on.shared((bn, D), dtype)
            vs = on.shared((bn, D), dtype)
            outs = on.shared((bm, D), dtype)
            s = on.fragment((bm, bn), ACCUMULATOR)
            p = on.fragment((bm, bn), dtype)
            o = on.fragment((bm, D), ACCUMULATOR)
            largest = on.fragment((bm,), ACCUMULATOR)
            before = on.fragment((bm,), ACCUMULATOR)
            fade = on.fragment((bm,), ACCUMULATOR)
            total = on.fragment((bm,), ACCUMULATOR)
            part = on.fragment((bm,), ACCUMULATOR)
            if not cpu and c.blocks > 1:
                # The warps that multiply are else given all registers, which leaves a second block none.
                T.annotate_min_blocks_per_sm(c.blocks)
                T.annotate_producer_reg_dealloc(LOADING)
                T.annotate_consumer_reg_alloc(c.registers)
            if few and not cpu:
                T.pdl_sync()
                # Not before: what comes next would be resident first, and take what this kernel's blocks need.
                T.pdl_trigger()
            # The last queries first: under causality they have the most keys.
            q0 = ((n_q + bm - 1) // bm - 1 - bx) * bm if bounded else bx * bm
            n = T.max(0, T.min(lengths[bz], n_k)) if has_lengths else n_k
            low = offset - left
            high = offset + right
            start = T.max(0, q0 + low) // bn if bounded else 0
            stop = T.max(0, T.min(n, q0 + bm + high)) if bounded else n
            T.copy(q[bz, by, q0, 0], qs)
            T.fill(o, 0)
            T.fill(total, 0)
            T.fill(largest, FLOOR)
            # At least one round, hidden as a whole where nothing is seen: without it nobody waits for q to arrive in
            # the memory that the output is then put into.
            for kb in T.Pipelined(T.max(1, T.ceildiv(stop, bn) - start), num_stages=c.stages):
                k0 = (start + kb) * bn
                T.copy(k[bz, by // groups, k0, 0], ks)
                T.clear(s)
                T.gemm(qs, ks, s, transpose_B=True, policy=policy)
                if bounded:
                    if k0 + bn > T.min(n, q0 + high + 1) or k0 < q0 + bm - 1 + low:
                        hide(s, k0, q0, n, low, high)
                else:  # noqa: PLR5501 - the first `if` is decided here, the second in the kernel
                    if k0 + bn > n:
                        hide(s, k0, q0, n, low, high)
                T.copy(largest, before)
                T.reduce_max(s, largest, dim=1, clear=False)
                for i in on.parallel(bm):
                    fade[i] = T.exp2((before[i] - largest[i]) * scale)
                for i, j in on.parallel(bm, bn):
                    s[i, j] = T.exp2(s[i, j] * scale - largest[i] * scale)
                T.reduce_sum(s, part, dim=1)
                for i in on.parallel(bm):
                    total[i] = total[i] * fade[i] + part[i]
                T.copy(s, p)
                for i, j in on.parallel(bm, D):
                    o[i, j] = o[i, j] * fade[i]
                T.copy(v[bz, by // groups, k0, 0], vs)
                if has_lengths:  # noqa: SIM102
                    if k0 + bn > n:
                        # Read and written back: a tile that is only written is not waited for, and what arrives later
                        # wins. A weight of zero does not undo a value of NaN.
                        for i, j in on.parallel(bn, D):
                            vs[i, j] = T.if_then_else(k0 + i < n, vs[i, j], T.cast(0, dtype))
                T.gemm(p, vs, o, policy=policy)
            # No key, no weight; a total that is no number stays none.
            for i, j in on.parallel(bm, D):
                o[i, j] = T.if_then_else(total[i] == 0, 0.0, o[i, j] / total[i])
            T.copy(o, outs)
            T.copy(outs, out[bz, by, q0, 0])

    rows, memory = (_of(B, "B"), _of(H, "H"), _of(S, "S"), D), (_of(B, "B"), _of(kv_heads, "G"), _of(keys, "L"), D)
    args = {
        "q": Arg(rows, dtype, strided=True),
        "k": Arg(memory, dtype, strided=True),
        "v": Arg(memory, dtype, strided=True),
        "lengths": Arg((_of(B, "B"),), "int32") if lengths else None,
        "out": Arg(rows, dtype, written=True, strided=True),
    }
    # exp2 by the hardware's own instruction: a quarter of the time between two products is spent in it.
    passes = {"TL_ENABLE_FAST_MATH": True}
    return program(on, "attn_kernel", attn, args, SCALARS, passes, sizes)


def _of(size: int | None, name: str) -> int | str:
    return name if size is None else size
