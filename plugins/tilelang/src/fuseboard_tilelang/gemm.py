"""`gemm_kernel`: a linear layer, its bias, activation and residual done before the result leaves the registers."""

from __future__ import annotations

from typing import Any

from fuseboard_tilelang._configs import Config, gemm_config
from fuseboard_tilelang._tile import ACCUMULATOR, Arg, Program, program, tile

__all__ = ["ACTIVATIONS", "activation", "gemm_kernel"]

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
"""`gelu` is torch's default, by erf."""


def activation(T: Any, act: str, value: Any) -> Any:  # noqa: N803
    """An activation of a float32 expression."""
    if act == "relu":
        return T.max(value, 0.0)
    if act == "gelu":
        return 0.5 * value * (1.0 + T.erf(value * 0.7071067811865476))
    if act == "gelu_tanh":
        return 0.5 * value * (1.0 + T.tanh(0.7978845608028654 * (value + 0.044715 * value * value * value)))
    if act == "silu":
        return value / (1.0 + T.exp(-value))
    return value


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
    c = config or gemm_config("gemm", None, cpu=cpu)
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
    return program(on, "gemm_kernel", gemm, args, sizes={"M": M})
