"""`sdpa-math`: torch's attention by its definition, matrix products and a softmax. Takes nearly everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuseboard import ALL_LENGTHS, BackendInfo, Call, Constraints, Exactness, HeadDims, MaskInfo, Sizes, hookimpl
from fuseboard.tensors import hidden_as_bias
from fuseboard_sdpa import _cost
from fuseboard_sdpa._tensors import binding

LIMITS = Constraints(
    devices={"cpu", "cuda"},
    dtypes={torch.float64, torch.float32, torch.bfloat16, torch.float16},
    head_dims=HeadDims(),
    v_head_dims=HeadDims(),
    gqa=True,
    causal=ALL_LENGTHS,
    masks={"bool", "additive"},
    mask_fp32=True,
    mask_grad=True,
    custom_scale=True,
    negative_scale=True,
    dropout=True,
    backward=True,
    empty=True,
    any_stride=True,
)
"""What it takes. The operator adds a boolean mask as numbers and raises for one beside the causal flag."""


@hookimpl
def info() -> BackendInfo:
    """What it is."""
    return BackendInfo("torch's attention by its definition", homepage="https://pytorch.org")


@hookimpl
def constraints() -> Constraints:
    """Its limits."""
    return LIMITS


@hookimpl
def exactness() -> Exactness:
    """Rounding only; half precision is computed in float32."""
    return Exactness.EXACT


@hookimpl
def rank(call: Call, sizes: Sizes) -> float:
    """Microseconds, from the measured rates of `_cost`."""
    return _cost.math(call, sizes)


@hookimpl
def kernel() -> Math:
    """The operator."""
    return Math()


class Math:
    """`_scaled_dot_product_attention_math`, a composite: every part of it is differentiable."""

    def __init__(self) -> None:
        self._op: Callable[..., Any] = binding("_scaled_dot_product_attention_math")

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None,
        mask_info: MaskInfo | None,
        causal: bool,
        scale: float | None,
        dropout_p: float,
    ) -> Tensor:
        """Call it; the structure is never claimed, so `mask_info` is None."""
        if mask is not None and mask.dtype == torch.bool:
            mask = hidden_as_bias(mask, q.dtype)
        out: tuple[Tensor, Tensor]
        if q.shape[1] == k.shape[1]:  # a branch: the comparison itself would be a symbol in a trace, and no flag
            out = self._op(q, k, v, mask, dropout_p, causal, None, scale=scale)
        else:
            out = self._op(q, k, v, mask, dropout_p, causal, None, scale=scale, enable_gqa=True)
        return out[0]
