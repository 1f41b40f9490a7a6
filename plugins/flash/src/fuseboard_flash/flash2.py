"""`flash`: FlashAttention 2, from the package flash-attn.

Its causal flag is *bottom-right*: that structure is what it takes by itself, and the top-left flag is made of it by
cutting the keys to the queries. Without a gradient, calls go through its function for a key cache, which is cheapest to
call and is told each row's first and last real key: nothing is gathered, and keys that are not real are not read. Where
a gradient is needed, real keys are packed together instead. The packed size is never asked of the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fuseboard import (
    BackendInfo,
    Call,
    Constraints,
    Exactness,
    HeadDims,
    KnownBad,
    MaskInfo,
    Sizes,
    StructureRule,
    hookimpl,
)
from fuseboard.tensors import GRID, aligned, needs_grad, scale_of
from fuseboard_flash import _cost, _layout, _limits, _package

RANGE = ">=2.6,<3"
_INSTALL = f'pip install --no-deps --no-build-isolation "flash-attn{RANGE}" einops'
_CONSUMER = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))  # GPUs with about 100 KiB of shared memory a block

LIMITS = Constraints(
    devices={"cuda"},
    capability=((8, 0), (12, 1)),
    dtypes={torch.float16, torch.bfloat16},
    head_dims=HeadDims(high=256),
    v_head_dims=HeadDims(high=256),
    gqa=True,
    causal={"equal", "fewer queries"},
    structures=(
        StructureRule(causal={True}, window={False, True}),
        # A window open to the right is given the bound k_length inside, which cuts when the queries outnumber the keys.
        # So is a bound ahead beyond k_length; where the queries are no more than the keys, none that long is asked for.
        StructureRule(causal={False}, window={False, True}, ahead={False, True}, lengths={"equal", "fewer queries"}),
        # The kernel aligns causality and windows to the last *real* key, the structure to the last key: the same only
        # with left padding. Right padding with causality takes two calls; with a window it cannot be said.
        StructureRule(keys={"right"}, causal={False, True}),
        StructureRule(keys={"left"}, causal={True}, window={False, True}),
        StructureRule(keys={"left"}, causal={False}),
        StructureRule(
            keys={"left"},
            causal={False},
            window={False, True},
            ahead={False, True},
            lengths={"equal", "fewer queries"},
        ),
        StructureRule(keys={"any"}, causal={False}),
    ),
    custom_scale=True,
    dropout=True,
    backward=True,
    any_stride=True,
    guards=(*GRID, _limits.ACCUMULATOR),
)
"""What it takes. It has no dense mask at all. A scale below zero gives NaN, and sizes of zero a launch error."""


@hookimpl
def info() -> BackendInfo:
    """What it is."""
    return BackendInfo(
        "FlashAttention 2", requires={"flash-attn": RANGE}, homepage="https://github.com/Dao-AILab/flash-attention"
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
def known_bad() -> Iterator[KnownBad]:
    """Combinations known to fail with the flash-attn that is installed."""
    if (_package.version("flash-attn") or "").startswith("2.6."):
        yield KnownBad(
            "flash-attn 2.6 refuses to run beyond compute capability 9.0",
            "https://github.com/Dao-AILab/flash-attention/blob/v2.6.3/csrc/flash_attn/flash_api.cpp",
            call=lambda call: call.capability is not None and call.capability > (9, 0),
        )
    yield KnownBad(
        "no backward at these head dimensions on GPUs with 100 KiB of shared memory",
        "https://github.com/Dao-AILab/flash-attention#nvidia-cuda-support",
        call=_backward_lacks_shared_memory,
    )


def _backward_lacks_shared_memory(call: Call) -> bool:
    if call.capability not in _CONSUMER or not call.grad:
        return False
    dim = max(call.head_dim, call.v_head_dim)
    return 192 < dim <= 224 or (dim > 224 and call.dropout)  # noqa: PLR2004 - the head dimensions in question


@hookimpl
def install_line(torch_version: str) -> str:
    """Built against the installed torch, which it keeps."""
    return _INSTALL


@hookimpl
def rank(call: Call, sizes: Sizes) -> float:
    """Microseconds, from the rates of `_cost`."""
    keys = "none" if call.structure is None else call.structure.keys
    gathers = keys != "none" and (call.grad or call.dropout or keys == "any" or _is_two_calls(call))
    return _cost.microseconds(_cost.FLASH2, call, sizes, copies=2.0 if gathers else 0.0)


def _is_two_calls(call: Call) -> bool:
    return call.structure is not None and call.structure.keys == "right" and call.structure.causal


@hookimpl
def probe(device: torch.device) -> str | None:
    """What metadata cannot tell: whether its own files are there, and what they import."""
    folders, whole = _package.folders_of("flash_attn")
    if not folders:
        return f"flash-attn's metadata is there, and its files are not. Install it again: {_INSTALL}"
    if not whole:
        return (
            "flash_attn is an empty namespace: flash-attn's own files are missing, what is there belongs to "
            f"flash-attn-4. Install it again: {_INSTALL}"
        )
    if _package.missing("einops"):
        return "flash-attn imports einops, which is not installed: pip install --no-deps einops"
    return None


@hookimpl
def kernel(device: torch.device) -> Flash2:
    """Import flash-attn, and try whether it was built for this GPU."""
    with _package.explained("flash-attn", _INSTALL):
        import flash_attn  # type: ignore[import-not-found]  # noqa: PLC0415 - only here

        made = Flash2(flash_attn)
        token = torch.zeros(1, 1, 1, 64, dtype=torch.float16, device=device)
        made(token, token, token, mask=None, mask_info=None, causal=False, scale=None, dropout_p=0.0)
    return made


class Flash2:
    """`flash_attn_with_kvcache` without a gradient; `flash_attn_func` and `flash_attn_varlen_func` with one."""

    def __init__(self, package: Any) -> None:
        self._func: Callable[..., Any] = package.flash_attn_func
        self._varlen: Callable[..., Any] = package.flash_attn_varlen_func
        self._cached: Callable[..., Any] = package.flash_attn_with_kvcache
        self._leftpad = "cache_leftpad" in inspect.signature(self._cached).parameters  # since 2.6.1

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
        plain = not dropout_p and not needs_grad(q, k, v)
        if mask_info is None or mask_info.keys is None:
            options: dict[str, Any] = {}
            if mask_info is not None:
                causal, options = mask_info.causal, _layout.window_size(mask_info)
            out = self._dense(q, k, v, plain, causal, scale, dropout_p, options)
        elif plain and mask_info.padding == "right" and not mask_info.causal:
            out = self._dense(q, k, v, True, False, scale, 0.0, {"cache_seqlens": mask_info.lengths()})
        elif plain and mask_info.padding == "left" and self._leftpad:
            ends, padding = _layout.left_padding(mask_info, k.shape[2])
            options = {"cache_seqlens": ends, "cache_leftpad": padding, **_layout.window_size(mask_info)}
            out = self._dense(q, k, v, True, mask_info.causal, scale, 0.0, options)
        else:
            options = {"softmax_scale": scale, "dropout_p": dropout_p, **_layout.window_size(mask_info)}
            out = _layout.attend_packed(self._varlen, q, k, v, mask_info, fill=False, **options)
        return out[..., :v_dim] if out.shape[3] != v_dim else out

    def _dense(
        self, q: Tensor, k: Tensor, v: Tensor, plain: bool, causal: bool, scale: float | None, dropout_p: float,
        options: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """`(batch, length, heads, head_dim)`: the transposed views cost nothing."""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if plain:
            out: Tensor = self._cached(q, k, v, softmax_scale=scale, causal=causal, **options)
        else:
            out = self._func(q, k, v, dropout_p=dropout_p, softmax_scale=scale, causal=causal, **options)
        return out.transpose(1, 2)
