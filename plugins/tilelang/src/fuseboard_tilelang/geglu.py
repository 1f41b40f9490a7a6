"""`gemm_geglu_kernel`: both halves of a gated linear layer in one pass, so that neither is written out."""

from __future__ import annotations

from typing import Any

from fuseboard_tilelang._configs import LOADING, Config, gemm_config
from fuseboard_tilelang._tile import ACCUMULATOR, Arg, Program, program, tile
from fuseboard_tilelang.gemm import PASSES, activation

__all__ = ["gemm_geglu_kernel"]


def gemm_geglu_kernel(
    N: int,  # noqa: N803
    K: int,  # noqa: N803
    *,
    bias: bool = False,
    dtype: str = "bfloat16",
    cpu: bool = False,
    config: Config | None = None,
) -> Program:
    """`out = gelu(x @ weight[:N].T + bias[:N]) * (x @ weight[N:].T + bias[N:])`, any number of rows.

    The kernel's tensors, in order: x `(M, K)`, weight `(2 * N, K)`, bias `(2 * N,)` where asked for, out `(M, N)`. gelu
    is by erf; all is in float32 and rounded once.

    Args:
        N: Columns of the output, half of the weight's rows.
        K: Columns of the input.
        bias: Whether there is one.
        dtype: Of all tensors: `bfloat16` or `float16`, on the CPU `float32`.
        cpu: Make the form for TileLang's target `c`.
        config: The tiles; None for those of the table.

    Raises:
        ValueError: No such dtype.
    """
    on = tile(dtype, cpu=cpu)
    c = config or gemm_config("geglu", None, N, cpu=cpu)
    T = on.T  # noqa: N806
    M = T.dynamic("M")  # noqa: N806
    bm, bn, bk = c.bm, c.bn, c.bk
    policy = T.GemmWarpPolicy[c.policy]
    has_bias = bias

    def gemm_geglu(x: Any, weight: Any, bias: Any, out: Any) -> None:
        with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, bm), threads=c.threads) as (bx, by):
            xs = on.shared((bm, bk), dtype)
            us = on.shared((bn, bk), dtype)
            vs = on.shared((bn, bk), dtype)
            ys = on.shared((bm, bn), dtype)
            u = on.fragment((bm, bn), ACCUMULATOR)
            v = on.fragment((bm, bn), ACCUMULATOR)
            if not cpu and c.swizzle:
                T.use_swizzle(c.swizzle)
            if not cpu and c.blocks > 1:
                T.annotate_min_blocks_per_sm(c.blocks)
                T.annotate_producer_reg_dealloc(LOADING)
                T.annotate_consumer_reg_alloc(c.registers)
            T.clear(u)
            T.clear(v)
            for k in T.Pipelined(T.ceildiv(K, bk), num_stages=c.stages):
                T.copy(x[by * bm, k * bk], xs)
                # A last tile reaches beyond its half: those columns are computed from the other half's rows, or from
                # zeros, and are not stored.
                T.copy(weight[bx * bn, k * bk], us)
                T.copy(weight[N + bx * bn, k * bk], vs)
                T.gemm(xs, us, u, transpose_B=True, policy=policy)
                T.gemm(xs, vs, v, transpose_B=True, policy=policy)
            if has_bias:
                for i, j in on.parallel(bm, bn):
                    if bx * bn + j < N:
                        u[i, j] = u[i, j] + T.cast(bias[bx * bn + j], ACCUMULATOR)
                        v[i, j] = v[i, j] + T.cast(bias[N + bx * bn + j], ACCUMULATOR)
            for i, j in on.parallel(bm, bn):
                u[i, j] = activation(T, "gelu", u[i, j]) * v[i, j]
            T.copy(u, ys)
            T.copy(ys, out[by * bm, bx * bn])

    args = {
        "x": Arg(("M", K), dtype),
        "weight": Arg((2 * N, K), dtype),
        "bias": Arg((2 * N,), dtype) if bias else None,
        "out": Arg(("M", N), dtype, written=True),
    }
    return program(on, "gemm_geglu_kernel", gemm_geglu, args, passes=PASSES, sizes={"M": M})
