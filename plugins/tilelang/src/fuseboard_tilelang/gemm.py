"""`gemm_kernel`: a linear layer, its bias, activation and residual done before the result leaves the registers."""

from __future__ import annotations

from typing import Any

from fuseboard_tilelang._configs import LOADING, Config, gemm_config
from fuseboard_tilelang._tile import ACCUMULATOR, Arg, Program, program, tile

__all__ = ["ACTIVATIONS", "PASSES", "activation", "gemm_kernel"]

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
"""`gelu` is torch's default, by erf."""


def activation(T: Any, act: str, value: Any) -> Any:  # noqa: N803
    """An activation of a float32 expression.

    An element of a tile costs as much here as it does in the product, and nothing is multiplied meanwhile: so erf is
    Abramowitz and Stegun's 7.1.26, off by 1.5e-7 at most, in half the instructions of CUDA's, and tanh is by exp.
    """
    if act == "relu":
        return T.if_then_else(value < 0.0, 0.0, value)  # a maximum would make zero of NaN
    if act == "gelu":
        # value * P(X < value) for a normal X, whose smaller tail is tail: no sum cancels. Beyond 32 it is zero, and
        # infinity times zero is none; NaN comes back by exp2.
        size = T.min(T.max(value, -value), 32.0)
        t = 1.0 / (1.0 + 0.23164188825 * size)
        tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
        return T.max(value, 0.0) - size * (tail * T.exp2(value * value * -0.7213475204444817))
    if act == "gelu_tanh":
        return value / (1.0 + T.exp(-1.5957691216057308 * (value + 0.044715 * value * value * value)))
    if act == "silu":
        return value / (1.0 + T.exp(-value))
    return value


PASSES = {"TL_ENABLE_FAST_MATH": True}
"""Division and exp2 by the hardware's own instructions, for the activations."""


def gemm_kernel(  # noqa: C901 - a kernel is one function for TileLang, which reads its source
    N: int,  # noqa: N803 - sizes are named as everywhere
    K: int,  # noqa: N803
    *,
    bias: bool = False,
    residual: bool = False,
    act: str = "none",
    dtype: str = "bfloat16",
    cpu: bool = False,
    config: Config | None = None,
) -> Program:
    """`out = act(x @ weight.T + bias) + residual`, any number of rows.

    The kernel's tensors, in order: x `(M, K)`, weight `(N, K)`, bias `(N,)` and residual `(M, N)` where asked for, out
    `(M, N)`. Sums are in float32 and rounded once.

    Args:
        N: Columns of the output.
        K: Columns of the input.
        bias: Whether there is one.
        residual: Whether there is one.
        act: One of `ACTIVATIONS`.
        dtype: Of all tensors: `bfloat16` or `float16`, on the CPU `float32`.
        cpu: Make the form for TileLang's target `c`.
        config: The tiles; None for those of the table.

    Raises:
        ValueError: No such activation or dtype.
    """
    if act not in ACTIVATIONS:
        msg = f"act is {act!r}; expected one of {', '.join(ACTIVATIONS)}."
        raise ValueError(msg)
    on = tile(dtype, cpu=cpu)
    c = config or gemm_config("gemm", None, N, cpu=cpu)
    T = on.T  # noqa: N806
    M = T.dynamic("M")  # noqa: N806
    bm, bn, bk = c.bm, c.bn, c.bk
    policy = T.GemmWarpPolicy[c.policy]
    has_bias, has_residual = bias, residual

    def gemm(  # noqa: C901
        x: Any, weight: Any, bias: Any, residual: Any, out: Any
    ) -> None:
        with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, bm), threads=c.threads) as (bx, by):
            xs = on.shared((bm, bk), dtype)
            ws = on.shared((bn, bk), dtype)
            ys = on.shared((bm, bn), dtype)
            y = on.fragment((bm, bn), ACCUMULATOR)
            if not cpu and c.swizzle:
                T.use_swizzle(c.swizzle)
            if not cpu and c.blocks > 1:
                T.annotate_min_blocks_per_sm(c.blocks)
                T.annotate_producer_reg_dealloc(LOADING)
                T.annotate_consumer_reg_alloc(c.registers)
            T.clear(y)
            for k in T.Pipelined(T.ceildiv(K, bk), num_stages=c.stages):
                T.copy(x[by * bm, k * bk], xs)
                T.copy(weight[bx * bn, k * bk], ws)
                T.gemm(xs, ws, y, transpose_B=True, policy=policy)
            if has_bias:
                for i, j in on.parallel(bm, bn):
                    if bx * bn + j < N:
                        y[i, j] = y[i, j] + T.cast(bias[bx * bn + j], ACCUMULATOR)
            if act != "none":
                for i, j in on.parallel(bm, bn):
                    y[i, j] = activation(T, act, y[i, j])
            if has_residual:
                for i, j in on.parallel(bm, bn):
                    if by * bm + i < M and bx * bn + j < N:
                        y[i, j] = y[i, j] + T.cast(residual[by * bm + i, bx * bn + j], ACCUMULATOR)
            T.copy(y, ys)
            T.copy(ys, out[by * bm, bx * bn])

    args = {
        "x": Arg(("M", K), dtype),
        "weight": Arg((N, K), dtype),
        "bias": Arg((N,), dtype) if bias else None,
        "residual": Arg(("M", N), dtype) if residual else None,
        "out": Arg(("M", N), dtype, written=True),
    }
    return program(on, "gemm_kernel", gemm, args, passes=PASSES, sizes={"M": M})
