"""For kernel authors: what most kernels need of their inputs. Padded, packed or aligned tensors, repeated heads, masks.

Nothing here reads a tensor's values, so nothing waits for the device and a CUDA graph can capture all of it. Everything
is differentiable, and gives its argument back, uncopied, where nothing needs doing.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - as torch's own documentation names it
from torch import Tensor

from fuseboard.constraints import Guard

__all__ = [
    "ALIGNMENT",
    "GRID",
    "GRID_LIMIT",
    "aligned",
    "as_tokens",
    "expanded_bias",
    "hidden_as_bias",
    "needs_grad",
    "packed",
    "padded",
    "repeated",
    "scale_of",
]

ALIGNMENT = 16
"""Bytes. Kernels built on CUTLASS load 128 bits at a time, and so want it of pointers and strides."""

GRID_LIMIT = 65_535
"""The most blocks in y and z of a CUDA launch grid, where many kernels put heads and batch; beyond, the launch fails.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#features-and-technical-specifications
"""

GRID = (
    Guard(
        "batch", lambda _call, sizes: sizes.batch <= GRID_LIMIT, f"at most {GRID_LIMIT}", lambda sizes: sizes.batch,
        "split the batch",
    ),
    Guard(
        "heads", lambda _call, sizes: sizes.heads <= GRID_LIMIT, f"at most {GRID_LIMIT}", lambda sizes: sizes.heads,
        "split the heads",
    ),
)  # fmt: skip
"""Guards for a kernel that launches a block for each row of the batch and each head."""


def packed(tensor: Tensor) -> Tensor:
    """`tensor`, copied if its last dimension is strided. Kernels read past such rows without a check, or assert."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def aligned(tensor: Tensor) -> Tensor:
    """`(batch, heads, length, dim)`, copied unless its last stride is 1, and its pointer and other strides aligned.

    Rows must fill whole units of `ALIGNMENT` bytes: pad the head dimension before.
    """
    batch, heads, length, last = tensor.stride()
    # A number is a multiple of a power of two when its low bits are zero; of several at once, when their union's are.
    if (
        last == 1
        and (batch | heads | length) % (ALIGNMENT // tensor.element_size()) == 0
        and tensor.data_ptr() % ALIGNMENT == 0
    ):
        return tensor
    # Not `contiguous()`: it gives back a view into the middle of an allocation, and odd strides of axes of size 1.
    return tensor.clone(memory_format=torch.contiguous_format)


def padded(tensor: Tensor, dim: int) -> Tensor:
    """`tensor` with its head dimension padded with zeros to `dim`. Exact, if the scale stays the true dimension's."""
    missing = dim - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


def scale_of(q: Tensor, scale: float | None) -> float:
    """The scale as a number: 1 / sqrt(head_dim) by default, which is to be taken before q is padded."""
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def repeated(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values repeated so that query head i finds its own at i: head i // (heads // kv_heads) of `tensor`."""
    groups = heads // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def as_tokens(tensor: Tensor) -> Tensor:
    """`(batch, heads, length, dim)` as `(batch * length, heads, dim)`; a view where the strides allow."""
    batch, heads, length, dim = tensor.shape
    return tensor.transpose(1, 2).reshape(batch * length, heads, dim)


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a backward may follow."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def hidden_as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as an additive one: 0 where True, -inf where False.

    As logarithms: log 1 is 0 and log 0 is -inf, exactly, in two kernels; filling zeros takes three, and `where` copies
    its numbers to the device, which a graph capture forbids.
    """
    return mask.to(dtype).log_()


def expanded_bias(mask: Tensor, q: Tensor, k: Tensor, multiple: int = 16) -> Tensor:
    """A mask of rank 4 as an additive one in q's dtype, `(batch, heads, q_length, k_length)`, for kernels that load it.

    A boolean mask becomes 0 and -inf. Rows are laid out with padded length and sliced, so that a kernel may load whole
    vectors; axes of size 1 are expanded with stride 0. Differentiable in an additive mask.

    Args:
        mask: Broadcastable to the result; boolean, or of q's dtype.
        q: `(batch, heads, q_length, head_dim)`.
        k: `(batch, kv_heads, k_length, head_dim)`.
        multiple: What strides are multiples of, in elements.
    """
    n_k = k.shape[2]
    if mask.dtype == torch.bool:
        mask = hidden_as_bias(mask, q.dtype)
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
