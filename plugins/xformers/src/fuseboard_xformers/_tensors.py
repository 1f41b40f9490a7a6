"""What the kernels need of their inputs: packed and aligned, heads padded or repeated, masks laid out."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

__all__ = ["aligned", "as_tokens", "expanded_bias", "grouped", "needs_grad", "padded", "repeated", "scale_of"]

ALIGNMENT = 16
"""Bytes. The kernels load 128 bits at a time, and so want it of pointers and strides."""


def aligned(tensor: Tensor) -> Tensor:
    """`tensor`, copied unless its last dimension is packed, and its pointer and other strides 16-byte aligned."""
    if (
        tensor.stride(-1) == 1
        and all(stride * tensor.element_size() % ALIGNMENT == 0 for stride in tensor.stride()[:-1])
        and tensor.data_ptr() % ALIGNMENT == 0
    ):
        return tensor
    copy = tensor.contiguous()
    return copy.clone(memory_format=torch.contiguous_format) if copy.data_ptr() % ALIGNMENT else copy


def padded(tensor: Tensor, dim: int) -> Tensor:
    """`tensor` with its head dimension padded with zeros to `dim`. Exact, if the scale stays the true dimension's."""
    missing = dim - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


def scale_of(q: Tensor, scale: float | None) -> float:
    """The scale as a number, from the true head dimension."""
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def repeated(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values repeated so that query head i finds its own at i: head i // (heads // kv_heads) of `tensor`."""
    groups = heads // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens `(rows, tokens, heads, head_dim)` with a fifth axis: `(rows, tokens, kv_heads, heads per key head, dim)`.

    Keys are shared by a stride of zero, and so are not repeated in memory. Queries must not have one: where they do,
    as expanded ones may, the package would take one head for all.
    """
    heads, kv_heads = q.shape[2], k.shape[2]
    q = q.contiguous() if q.stride(2) == 0 else q
    shared = [each.unsqueeze(3).expand(-1, -1, -1, heads // kv_heads, -1) for each in (k, v)]
    return q.view(*q.shape[:2], kv_heads, heads // kv_heads, q.shape[3]), shared[0], shared[1]


def as_tokens(tensor: Tensor) -> Tensor:
    """`(batch, heads, length, dim)` as one row, `(1, batch * length, heads, dim)`; a view where the strides allow."""
    batch, heads, length, dim = tensor.shape
    return tensor.transpose(1, 2).reshape(1, batch * length, heads, dim)


def needs_grad(*tensors: Tensor) -> bool:
    """Whether a backward may follow."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def expanded_bias(mask: Tensor, q: Tensor, k: Tensor, multiple: int = 16) -> Tensor:
    """An additive mask in q's dtype, `(batch, heads, q_length, k_length)`, strides multiples of `multiple` elements.

    A boolean mask becomes 0 and -inf, as logarithms: log 1 is 0 and log 0 is -inf, exactly. Rows are laid out with
    padded length and sliced; axes of size 1 are expanded with stride 0, since the package broadcasts nothing.
    """
    n_k = k.shape[2]
    if mask.dtype == torch.bool:
        mask = mask.to(q.dtype).log_()
    if mask.shape[3] != n_k:  # an axis of 1 cannot be read with stride 0 along a row
        mask = mask.expand(-1, -1, -1, n_k)
    fits = (
        mask.stride(3) == 1
        and all(stride % multiple == 0 for stride in mask.stride()[:3])
        and mask.data_ptr() % ALIGNMENT == 0
    )
    if not fits:
        width = -(-n_k // multiple) * multiple
        mask = F.pad(mask, (0, width - n_k))[..., :n_k] if width != n_k else mask.contiguous()
        if mask.data_ptr() % ALIGNMENT:
            mask = F.pad(mask, (0, multiple))[..., :n_k]
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], n_k)
