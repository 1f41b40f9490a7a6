"""`sdpa-cpu`: torch's flash attention for the CPU."""

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
    HeadDims,
    MaskInfo,
    Sizes,
    StructureRule,
    hookimpl,
)
from fuseboard.tensors import hidden_as_bias
from fuseboard_sdpa import _cost
from fuseboard_sdpa._tensors import binding

_FLASH = 1  # at::SDPBackend::flash_attention


LIMITS = Constraints(
    devices={"cpu"},
    dtypes={torch.float64, torch.float32, torch.bfloat16, torch.float16},
    head_dims=HeadDims(),
    gqa=True,
    causal=ALL_LENGTHS,
    masks={"bool", "additive"},
    mask_fp32=True,
    causal_and_mask=True,
    structures=(StructureRule(causal={True}, lengths={"equal"}),),
    custom_scale=True,
    negative_scale=True,
    backward=True,
    any_stride=True,
)
"""What it takes. Lengths of zero kill the process (SIGFPE), so they are refused; shapes are checked by the core."""


@hookimpl
def info() -> BackendInfo:
    """What it is."""
    return BackendInfo("torch's flash attention for the CPU", homepage="https://pytorch.org")


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
    """Microseconds, by `_cost`."""
    return _cost.cpu(call, sizes, told=LIMITS.form(call) == "structure")


@hookimpl
def kernel() -> Flash:
    """The operator."""
    return Flash()


class Flash:
    """`_scaled_dot_product_flash_attention_for_cpu`."""

    def __init__(self) -> None:
        self._op: Callable[..., Any] = binding("_scaled_dot_product_flash_attention_for_cpu")

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
        """Call it with only what differs from its defaults: each keyword costs it a tenth of a microsecond."""
        if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
            q, k, v = _rows_apart(q), _rows_apart(k), _rows_apart(v)
        if mask is None and scale is None:
            # The one structure it takes, bottom-right causal at equal lengths, is the top-left flag.
            return self._op(q, k, v, 0.0, True)[0] if causal or mask_info is not None else self._op(q, k, v)[0]  # type: ignore[no-any-return]
        out: Tensor = self._op(
            q, k, v, dropout_p, causal or mask_info is not None, attn_mask=_additive(mask, q), scale=scale
        )[0]
        return out

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
        """Torch's own choice for the call, asked without running a kernel."""
        # It scales its -inf, as public attention does; in float32, to which a smaller scale is zero.
        if scale is not None and scale < torch.finfo(torch.float32).tiny and (causal or mask_info is not None):
            return "a causal call whose scale is not positive gives NaN"
        choice = torch._fused_sdp_choice(
            _rows_apart(q), _rows_apart(k), _rows_apart(v), _additive(mask, q), dropout_p,
            causal or mask_info is not None,
            scale=scale, enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        if choice == _FLASH:
            return None
        on: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]  # the switch holds for the CPU as well
        return "torch's own check prefers another kernel" if on else "switched off in this process (enable_flash_sdp)"


def _rows_apart(tensor: Tensor) -> Tensor:
    """`tensor`, copied if its rows are strided, or lie over each other, as those of windows made by `unfold` do.

    The operator hands the distance of rows to a BLAS, which takes none below their width, and gives garbage or NaN.
    """
    _, _, row, last = tensor.stride()
    return tensor if last == 1 and row >= tensor.shape[3] else tensor.contiguous()


def _additive(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return hidden_as_bias(mask, q.dtype)
