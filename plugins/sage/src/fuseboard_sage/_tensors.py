"""What the kernels need of their inputs: keys around zero, values within reach of half precision."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fuseboard.tensors import packed

__all__ = ["centred_half", "in_range", "lengthened", "scale_declined"]

LARGEST_SCALE = math.sqrt(2)
"""In units of 1 / sqrt(head_dim): what a head padded to at most twice its width keeps as its scale."""

_EXPONENT = 0x7F800000  # of a float32; without its other bits it is a power of two
_TARGET = 16.0  # values end up in [-32, 32): 64 of them still add up within float16, and small ones stay normal


def scale_declined(q: Tensor, scale: float | None) -> str | None:
    """A reason to refuse a scale at which quantised scores are too coarse, or None.

    A score is off by about 1 part in 250 of the largest, whatever the scale; the weight is off by e to that. At 4 times
    the default scale the output is off by 0.2 where it is off by 0.03 at the default (inputs from N(0, 1)).
    """
    if scale is None or scale * math.sqrt(q.shape[-1]) <= LARGEST_SCALE:
        return None
    return "a scale above sqrt(2) / sqrt(head_dim), at which quantised scores are too coarse"


def centred_half(k: Tensor) -> Tensor:
    """Half of the keys less half of their mean over the length, `(batch, kv_heads, k_length, head_dim)`, a new tensor.

    Quantisation wants keys around zero; a softmax does not see what is taken off all keys alike. The package would take
    it off in place, so that the caller's keys change, or raises for expanded ones. Half, with a scale twice as large,
    because the difference of two float16 numbers need not be one.
    """
    mean = k.mean(2, keepdim=True)
    return packed(torch.add(mean.mul_(-0.5), k, alpha=0.5))


def in_range(v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Values times a power of two for each key head, and what the output of each query head must be multiplied by.

    The kernels cast values to float16 and add up products of them there: bfloat16 values beyond 65504 turn into NaN,
    float16 ones beyond 1023 may, and those below 1e-7 into zero. Powers of two are exact, and found without waiting for
    the device. A value that is not finite makes the whole head NaN rather than a plausible number.

    Args:
        v: `(batch, kv_heads, k_length, head_dim)`.
        heads: Query heads.

    Returns:
        The values, a new tensor, and `(batch, heads, 1, 1)`.
    """
    largest = torch.linalg.vector_norm(v, torch.inf, (2, 3), keepdim=True, dtype=torch.float32)
    power = (largest.view(torch.int32) & _EXPONENT).view(torch.float32)
    power = power.clamp(min=2.0**-10 if v.dtype == torch.float16 else 2.0**-100)  # so that its inverse is a number
    back = (power / _TARGET).to(v.dtype)
    if heads != v.shape[1]:
        back = back.repeat_interleave(heads // v.shape[1], 1)
    return packed(v * (_TARGET / power).to(v.dtype)), back


def lengthened(tensor: Tensor, missing: int) -> Tensor:
    """`tensor` with `missing` rows of zeros behind the last token."""
    return F.pad(tensor, (0, 0, 0, missing)) if missing else tensor
