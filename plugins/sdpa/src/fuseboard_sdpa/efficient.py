"""`sdpa-efficient`: the memory-efficient (CUTLASS) kernel of PyTorch for CUDA: dense masks and float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuseboard import (
    ALL_LENGTHS,
    BackendInfo,
    Call,
    Constraints,
    Exactness,
    Guard,
    HeadDims,
    MaskInfo,
    Sizes,
    StructureRule,
    hookimpl,
)
from fuseboard.tensors import GRID, aligned, expanded_bias, needs_grad, padded, repeated, scale_of
from fuseboard_sdpa import _cost
from fuseboard_sdpa._limits import eligible
from fuseboard_sdpa._tensors import binding, ready

_BOTTOM_RIGHT = 2  # custom_mask_type of `_efficient_attention_forward`


def _mask_fits(call: Call, sizes: Sizes) -> bool:
    # https://github.com/pytorch/pytorch/issues/187227: offsets into the mask are 32 bits wide, rows beyond read wrong
    # ones.
    return LIMITS.form(call) != "dense" or sizes.q_length * sizes.k_length <= 2**32


LIMITS = Constraints(
    devices={"cuda"},
    capability=((5, 0), (12, 1)),
    dtypes={torch.float32, torch.float16, torch.bfloat16},
    head_dims=HeadDims(),
    v_head_dims=HeadDims(),
    gqa=True,
    causal=ALL_LENGTHS,
    masks={"bool", "additive"},
    mask_grad=True,
    causal_and_mask=True,
    structures=(
        StructureRule(causal={True}, lengths={"equal", "fewer queries"}),
        # The backward is not told of the window.
        StructureRule(causal={True}, window={True}, lengths={"equal", "fewer queries"}, backward=False),
    ),
    custom_scale=True,
    negative_scale=True,
    dropout=True,
    backward=True,
    any_stride=True,
    guards=(
        *GRID,
        Guard(
            "mask size",
            _mask_fits,
            "at most 2**32 queries * keys",
            lambda sizes: sizes.q_length * sizes.k_length,
            "pass mask_info",
        ),
    ),
)
"""What it takes. Its bottom-right mask is wrong when the queries outnumber the keys (seen: error 3 at 128 by 65)."""


@hookimpl
def info() -> BackendInfo:
    """What it is."""
    return BackendInfo("memory-efficient attention as PyTorch ships it", homepage="https://pytorch.org")


@hookimpl
def constraints() -> Constraints:
    """Its limits."""
    return LIMITS


@hookimpl
def exactness() -> Exactness:
    """Rounding only."""
    return Exactness.EXACT


@hookimpl
def rank(call: Call, sizes: Sizes) -> float:
    """Microseconds, from the measured rates of `_cost`."""
    return _cost.efficient(call, sizes, dense=LIMITS.form(call) == "dense")


@hookimpl
def kernel() -> Efficient:
    """The operators."""
    return Efficient()


class Efficient:
    """`_scaled_dot_product_efficient_attention`, and `_efficient_attention_forward` for bottom-right structures."""

    def __init__(self) -> None:
        self._op: Callable[..., Any] = binding("_scaled_dot_product_efficient_attention")
        self._forward: Callable[..., Any] = torch.ops.aten._efficient_attention_forward.default

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
        """Repeat shared heads, pad, align, lay the mask out, and call the operator for the structure."""
        v_dim, number = v.shape[3], scale
        if not ready(q, k, v, 16 // q.element_size()) or q.shape[1] != k.shape[1]:
            number = scale_of(q, scale)
            q, k, v = self._prepared(q, k, v)
        keep = needs_grad(q, k, v, mask)  # backward reads the row sums, which are otherwise not kept
        if mask_info is not None and (mask_info.window is not None or q.shape[2] != k.shape[2]):
            out: Tensor = self._forward(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, None, None, None, None, dropout_p,
                _BOTTOM_RIGHT, keep, scale=number, window_size=mask_info.window,
            )[0].transpose(1, 2)  # fmt: skip
        else:
            bias = None if mask is None else expanded_bias(mask, q, k)
            out = self._op(q, k, v, bias, keep, dropout_p, causal or mask_info is not None, scale=number)[0]
        return out[..., :v_dim] if out.shape[3] != v_dim else out

    def declines(
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
    ) -> str | None:
        """Torch's own eligibility check."""
        q, k, v = self._prepared(q, k, v)
        bias = None if mask is None else expanded_bias(mask, q, k)
        return eligible("mem_efficient", q, k, v, bias, dropout_p, causal or mask_info is not None, False)

    def _prepared(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        multiple = 16 // q.element_size()  # 16 bytes
        dim, v_dim = (-(-each.shape[3] // multiple) * multiple for each in (q, v))
        heads = q.shape[1]
        return (
            aligned(padded(q, dim)),
            aligned(repeated(padded(k, dim), heads)),
            aligned(repeated(padded(v, v_dim), heads)),
        )
