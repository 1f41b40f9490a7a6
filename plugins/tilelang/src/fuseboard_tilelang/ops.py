"""The kernels as functions of tensors. Everything is checked before a kernel sees it; nothing is differentiable.

bfloat16 and float16 on a GPU; on the CPU float32, by the CPU form. The first call of a kind compiles, for seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from fuseboard_tilelang import _configs
from fuseboard_tilelang.add_ln import add_ln_kernel
from fuseboard_tilelang.attn import OPEN, attn_kernel, for_few, hides
from fuseboard_tilelang.compile import compile_cpu, compile_gpu, target_of
from fuseboard_tilelang.geglu import gemm_geglu_kernel
from fuseboard_tilelang.gemm import gemm_kernel
from fuseboard_tilelang.rope import rope_kernel

__all__ = ["add_ln", "attention", "geglu", "gemm", "rope_"]

LOG2E = math.log2(math.e)
_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
gathered: ContextVar[list[Any] | None] = ContextVar("gathered", default=None)
"""While it has a list, kernels are noted there and not run: `warm.needed`."""
_targets: dict[torch.device, str] = {}


def gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    act: str = "none",
    out: Tensor | None = None,
) -> Tensor:
    """`act(x @ weight.T + bias) + residual`.

    Args:
        x: `(tokens, K)`.
        weight: `(N, K)`.
        bias: `(N,)`.
        residual: `(tokens, N)`.
        act: `none`, `relu`, `gelu` (by erf, torch's default), `gelu_tanh` or `silu`.
        out: Where to put the result, `(tokens, N)`; not x or weight. The residual itself is allowed.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: A dtype, shape, layout or device that the kernel does not take, or a gradient is needed.
        ImportError: There is no TileLang here, or no compiler for it.
    """
    _check("gemm", x, weight, 2)
    n = weight.shape[0]
    out = x.new_empty(x.shape[0], n) if out is None else out
    config = _gemm_config("gemm", x, n)
    options = {"bias": bias is not None, "residual": residual is not None, "act": act, "config": config}
    kernel = _kernel(x, gemm_kernel, n, weight.shape[1], **options)
    kernel(*(each for each in (x, weight, bias, residual) if each is not None), out)
    return out


def geglu(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """`gelu(x @ weight[:N].T + bias[:N]) * (x @ weight[N:].T + bias[N:])`.

    Args:
        x: `(tokens, K)`.
        weight: `(2 * N, K)`.
        bias: `(2 * N,)`.
        out: Where to put the result, `(tokens, N)`.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: A dtype, shape, layout or device that the kernel does not take, or a gradient is needed.
        ImportError: There is no TileLang here, or no compiler for it.
    """
    _check("geglu", x, weight, 2)
    if weight.shape[0] % 2:
        msg = f"geglu: weight has shape {tuple(weight.shape)}; expected (2 * N, K), two halves of rows."
        raise ValueError(msg)
    n = weight.shape[0] // 2
    out = x.new_empty(x.shape[0], n) if out is None else out
    kernel = _kernel(
        x, gemm_geglu_kernel, n, weight.shape[1], bias=bias is not None, config=_gemm_config("geglu", x, n)
    )
    kernel(*(each for each in (x, weight, bias) if each is not None), out)
    return out


def add_ln(residual: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """`residual += x` in place, exactly as torch adds them, and its LayerNorm; without a residual, that of x.

    Args:
        residual: `(tokens, D)`, updated.
        x: `(tokens, D)`.
        weight: `(D,)`.
        bias: `(D,)`.
        eps: Added to the variance.

    Returns:
        The norm, `(tokens, D)`.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: A dtype, shape, layout or device that the kernel does not take, or a gradient is needed.
        ImportError: There is no TileLang here, or no compiler for it.
    """
    _check("add_ln", x, weight, 1)
    out = torch.empty_like(x)
    options = {"residual": residual is not None, "bias": bias is not None, "eps": float(eps)}
    kernel = _kernel(x, add_ln_kernel, x.shape[1], **options)
    kernel(*(each for each in (residual, x, weight, bias) if each is not None), out)
    return out


def rope_(qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, heads: int, head_dim: int) -> Tensor:
    """Rotate the queries and keys in qkv in place; its values are untouched.

    Args:
        qkv: `(tokens, 3 * heads * head_dim)`: the queries of all heads, the keys of all heads, the values.
        cos: `(length, head_dim / 2)`, float32: cosines of column `j`'s angle, which column `j + head_dim / 2` shares.
        sin: The sines.
        positions: `(tokens,)`, int32, taken modulo length; None when token t is at t modulo length.
        heads: Heads.
        head_dim: Columns of a head.

    Returns:
        qkv.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: A dtype, shape, layout or device that the kernel does not take, or a gradient is needed.
        ImportError: There is no TileLang here, or no compiler for it.
    """
    _check("rope_", qkv, cos, 2)
    if cos.shape[0] == 0:
        msg = (
            "rope_: cos has shape (0, ...); expected a position at least, since positions are taken modulo its length."
        )
        raise ValueError(msg)
    kernel = _kernel(qkv, rope_kernel, heads, head_dim, positions=positions is not None)
    kernel(*(each for each in (qkv, cos, sin, positions) if each is not None))
    return qkv


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    *,
    top_left: bool = False,
) -> Tensor:
    """Attention; zeros for a query that sees no key.

    Query `i` stands at key `i + k_length - q_length`: at the bottom right, as with a key cache.

    Args:
        q: `(batch, heads, q_length, head_dim)`; on a GPU its rows may lie anywhere, such as in a packed projection.
        k: `(batch, kv_heads, k_length, head_dim)`, of which heads is a multiple of kv_heads.
        v: Likewise.
        lengths: `(batch,)`, int32: how many of each row's keys are real, the first ones. No other is read.
        causal: A query sees no key behind its own.
        window: How many keys a query sees before its own and how many behind it, `(before, behind)`, None for all. A
            number is both of them.
        scale: Of scores, above zero; None for 1 / sqrt(head_dim).
        top_left: Query `i` stands at key `i`.

    Returns:
        `(batch, heads, q_length, head_dim)`, laid out as q is where q is dense, else contiguous.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: A dtype, shape, layout or device that the kernel does not take, or a gradient is needed.
        ImportError: There is no TileLang here, or no compiler for it.
    """
    _check("attention", q, k, 4)
    heads, n_q, dim = q.shape[1:]
    kv_heads, n_k = k.shape[1:3]
    if kv_heads == 0 or heads % kv_heads:
        msg = f"attention: q has {heads} heads and k {kv_heads}; expected a multiple of the key heads."
        raise ValueError(msg)
    scale = 1.0 / math.sqrt(dim) if scale is None else float(scale)
    if not 0.0 < scale < math.inf:
        msg = f"attention: scale is {scale}; expected a number above zero."
        raise ValueError(msg)
    left, right = _bounds(window, causal)
    offset = 0 if top_left else n_k - n_q
    bounded = hides(n_q, n_k, offset, left, right)
    if q.is_cuda:
        out = torch.empty_like(q)  # of q's strides where those are dense, so that nothing is transposed afterwards
    else:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty_like(q)
    form = {"bounded": bounded, "lengths": lengths is not None, "few": for_few(q, bounded=bounded)}
    kernel = _kernel(q, attn_kernel, None, None, None, dim, **form)
    tensors = (q, k, v, out) if lengths is None else (q, k, v, lengths, out)
    kernel(*tensors, scale * LOG2E, heads // kv_heads, offset, left, right)
    return out


def _bounds(window: int | tuple[int | None, int | None] | None, causal: bool) -> tuple[int, int]:
    left, right = window if isinstance(window, tuple) else (window, window)
    for side in (left, right):
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 0):
            msg = f"attention: window is {window!r}; expected how many keys are seen before and behind, or None."
            raise ValueError(msg)
    before = OPEN if left is None else min(left, OPEN)
    return before, 0 if causal else OPEN if right is None else min(right, OPEN)


def _check(name: str, first: Any, second: Any, rank: int) -> None:
    """What a kernel's options are read from must be tensors of some rank; the kernel checks the rest."""
    for tensor in (first, second):
        if not isinstance(tensor, Tensor):
            msg = f"{name} was given a {type(tensor).__name__} in a tensor's place."
            raise TypeError(msg)
    if first.dim() != (rank if rank != 1 else 2) or second.dim() != rank:
        msg = f"{name} was given shapes {tuple(first.shape)} and {tuple(second.shape)}; see its documentation for them."
        raise ValueError(msg)
    if first.device.type == "cpu" and first.dtype != torch.float32:
        msg = f"{name}: on the CPU the dtype is {first.dtype}; expected torch.float32, such as x.float()."
        raise ValueError(msg)
    if first.device.type == "cuda" and first.dtype not in _NAMES:
        msg = f"{name}: on a GPU the dtype is {first.dtype}; expected torch.bfloat16 or torch.float16."
        raise ValueError(msg)
    if first.device.type not in ("cpu", "cuda"):
        msg = f"{name}: a tensor is on {first.device}; expected a CUDA device or the CPU."
        raise ValueError(msg)


def _gemm_config(kernel: str, x: Tensor, n: int) -> _configs.Config | None:
    return _configs.gemm_config(kernel, x.shape[0], n, cpu=False) if x.is_cuda else None


def _kernel(x: Tensor, factory: Any, *sizes: int | None, **options: Any) -> Callable[..., Any]:
    jobs = gathered.get()
    if jobs is not None:
        jobs.append((factory, sizes, {**options, "dtype": _NAMES[x.dtype]} if x.is_cuda else options))
        return _nothing
    if not x.is_cuda:
        return compile_cpu(factory, *sizes, **options)
    target = _targets.get(x.device)
    if target is None:
        target = _targets[x.device] = target_of(x.device)
    return compile_gpu(factory, *sizes, target=target, dtype=_NAMES[x.dtype], **options)


def _nothing(*_arguments: Any) -> None:
    """In the place of a kernel that is only gathered."""
