"""What the kernels need of their inputs: packed and aligned, heads padded or repeated, masks laid out."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

__all__ = [
    "aligned",
    "binding",
    "expanded_bias",
    "hidden_as_bias",
    "needs_grad",
    "packed",
    "padded",
    "ready",
    "repeated",
    "scale_of",
]

ALIGNMENT = 16
"""Bytes. CUTLASS-based kernels load 128 bits at a time, and so want it of pointers and strides."""


def binding(name: str) -> Callable[..., object]:
    """The operator `aten::name` as the cheapest callable this torch has for it.

    The generated binding `torch.name` costs 2 to 10 µs less per call than the overload object, and is not public in
    every release.
    """
    found: Callable[..., object] | None = getattr(torch, name, None)
    if found is None:
        found = getattr(torch.ops.aten, name).default
    return found


def packed(tensor: Tensor) -> Tensor:
    """`tensor`, copied if its last dimension is strided. Kernels read past such rows without a check."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def aligned(tensor: Tensor) -> Tensor:
    """`tensor`, copied unless its last dimension is packed, and its pointer and other strides 16-byte aligned."""
    batch, heads, length, last = tensor.stride()
    # A number is a multiple of a power of two when its low bits are zero; of several at once, when their union's are.
    if (
        last == 1
        and (batch | heads | length) % (ALIGNMENT // tensor.element_size()) == 0
        and tensor.data_ptr() % ALIGNMENT == 0
    ):
        return tensor
    copy = tensor.contiguous()
    return copy.clone(memory_format=torch.contiguous_format) if copy.data_ptr() % ALIGNMENT else copy


def ready(q: Tensor, k: Tensor, v: Tensor, multiple: int) -> bool:
    """Whether nothing need be done to q, k and v: contiguous, aligned, one head dimension, a multiple of `multiple`.

    The common case, told in under a microsecond.
    """
    dim = q.shape[3]
    return (
        dim % multiple == 0
        and v.shape[3] == dim
        and q.is_contiguous()
        and k.is_contiguous()
        and v.is_contiguous()
        and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT == 0
    )


def padded(tensor: Tensor, dim: int) -> Tensor:
    """`tensor` with its head dimension padded with zeros to `dim`. Exact, if the scale stays the true dimension's."""
    missing = dim - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


def scale_of(q: Tensor, scale: float | None) -> float:
    """The scale as a number, from the true head dimension."""
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale


def repeated(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values repeated so that query head i finds its own at i: head i // (heads // kv_heads) of `tensor`."""
    groups = heads // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def hidden_as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as an additive one: 0 where True, -inf where False.

    As logarithms: log 1 is 0 and log 0 is -inf, exactly, in two kernels; filling zeros takes three, and `where` copies
    its numbers to the device, which a graph capture forbids.
    """
    return mask.to(dtype).log_()


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a backward may follow."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def expanded_bias(mask: Tensor, q: Tensor, k: Tensor, multiple: int = 16) -> Tensor:
    """An additive mask in q's dtype, `(batch, heads, q_length, k_length)`, strides multiples of `multiple` elements.

    A boolean mask becomes 0 and -inf. Rows are laid out with padded length and sliced, so that a kernel may load whole
    vectors; axes of size 1 are expanded with stride 0. Differentiable in an additive mask.
    """
    batch, heads, n_q, _ = q.shape
    n_k = k.shape[2]
    if mask.dtype == torch.bool:
        mask = hidden_as_bias(mask, q.dtype)
    if mask.shape[3] != n_k:  # an axis of 1 cannot be read with stride 0 along a row
        mask = mask.expand(-1, -1, -1, n_k)
    outer = mask.stride()[:3]
    fits = mask.stride(3) == 1 and all(stride % multiple == 0 for stride in outer) and mask.data_ptr() % ALIGNMENT == 0
    if not fits:
        width = -(-n_k // multiple) * multiple
        mask = F.pad(mask, (0, width - n_k))[..., :n_k] if width != n_k else mask.contiguous()
        if mask.data_ptr() % ALIGNMENT:
            mask = F.pad(mask, (0, multiple))[..., :n_k]
    return mask.expand(batch, heads, n_q, n_k)
