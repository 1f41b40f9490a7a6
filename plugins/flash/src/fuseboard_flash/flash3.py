"""`flash3`: FlashAttention 3 for Hopper, module `flash_attn_interface`.

Structures as in `flash`. It loads whole tiles of values, so that those of keys that are not real are first set to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuseboard import BackendInfo, Call, Constraints, Exactness, HeadDims, MaskInfo, Sizes, StructureRule, hookimpl
from fuseboard.tensors import GRID, aligned, needs_grad, scale_of
from fuseboard_flash import _cost, _layout, _limits, _package

RANGE = ">=3.0.0b1,<4"
_INSTALL = (
    "pip install --no-deps --no-build-isolation "
    '"flash-attn-3 @ git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper" einops'
)

LIMITS = Constraints(
    devices={"cuda"},
    capability=((9, 0), (9, 0)),
    dtypes={torch.float16, torch.bfloat16},
    head_dims=HeadDims(high=256),
    v_head_dims=HeadDims(high=256),
    gqa=True,
    causal={"equal", "fewer queries"},
    structures=(
        StructureRule(causal={True}, window={False, True}),
        StructureRule(causal={False}, window={False, True}, ahead={False, True}, lengths={"equal", "fewer queries"}),
        # Aligned to the last *real* key, the structure to the last key: the same only with left padding. Right padding
        # with causality takes two calls; with a window it cannot be said.
        StructureRule(keys={"right"}, causal={False, True}),
        StructureRule(keys={"left"}, causal={True}, window={False, True}),
        StructureRule(keys={"left"}, causal={False}),
        StructureRule(keys={"any"}, causal={False}),
    ),
    custom_scale=True,
    backward=True,
    any_stride=True,
    guards=(*GRID, _limits.ACCUMULATOR),
)
"""What it takes. No dense mask, no dropout."""


@hookimpl
def info() -> BackendInfo:
    """What it is."""
    return BackendInfo(
        "FlashAttention 3", requires={"flash-attn-3": RANGE}, homepage="https://github.com/Dao-AILab/flash-attention"
    )


@hookimpl
def constraints() -> Constraints:
    """Its limits."""
    return LIMITS


@hookimpl
def exactness() -> Exactness:
    """Rounding only."""
    return Exactness.EXACT


@hookimpl
def install_line(torch_version: str) -> str:
    """Built against the installed torch, which it keeps. No index has it."""
    return _INSTALL


@hookimpl
def rank(call: Call, sizes: Sizes) -> float:
    """Microseconds, from the rates of `_cost`."""
    keys = "none" if call.structure is None else call.structure.keys
    return _cost.microseconds(_cost.FLASH3, call, sizes, copies=0.0 if keys == "none" else 2.0 if call.grad else 0.5)


@hookimpl
def probe(device: torch.device) -> str | None:
    """What metadata cannot tell: whether its module is there."""
    if _package.missing("flash_attn_interface"):
        return f"flash-attn-3's metadata is there, and module flash_attn_interface is not. Install it again: {_INSTALL}"
    return None


@hookimpl
def kernel(device: torch.device) -> Flash3:
    """Import it, and try whether it was built for this GPU."""
    with _package.explained("FlashAttention 3", _INSTALL):
        import flash_attn_interface  # type: ignore[import-not-found]  # noqa: PLC0415 - only here

        made = Flash3(flash_attn_interface)
        token = torch.zeros(1, 1, 1, 64, dtype=torch.float16, device=device)
        made(token, token, token, mask=None, mask_info=None, causal=False, scale=None, dropout_p=0.0)
    return made


class Flash3:
    """`flash_attn_with_kvcache` without a gradient; `flash_attn_func` and `flash_attn_varlen_func` with one."""

    def __init__(self, package: Any) -> None:
        self._func: Callable[..., Any] = package.flash_attn_func
        self._varlen: Callable[..., Any] = package.flash_attn_varlen_func
        self._cached: Callable[..., Any] = package.flash_attn_with_kvcache

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
        """Pad, align, and call the function for the structure."""
        if causal and k.shape[2] > q.shape[2]:  # top-left: no query sees a key beyond the number of queries
            k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
        dim, v_dim = q.shape[3], v.shape[3]
        if dim % 8 or v_dim != dim:
            scale = scale_of(q, scale)
            q, k, v = _layout.heads_padded(q, k, v)
        q, k, v = aligned(q), aligned(k), aligned(v)
        function = self._func if needs_grad(q, k, v) else self._cached
        options: dict[str, Any] = {"softmax_scale": scale}
        if mask_info is not None:
            causal = mask_info.causal
            options |= _layout.window_size(mask_info)
        if mask_info is not None and mask_info.keys is not None:
            if function is self._func or mask_info.padding is None or (mask_info.padding == "right" and causal):
                out = _layout.attend_packed(self._varlen, q, k, v, mask_info, fill=True, **options)
                return out[..., :v_dim] if out.shape[3] != v_dim else out
            v = v.masked_fill(~mask_info.keys[:, None, :, None], 0)
            if mask_info.padding == "right":
                options["cache_seqlens"] = mask_info.lengths()
            else:
                options["cache_seqlens"], options["cache_leftpad"] = _layout.left_padding(mask_info, k.shape[2])
        out = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal, **options)
        out = _layout.first(out).transpose(1, 2)
        return out[..., :v_dim] if out.shape[3] != v_dim else out
