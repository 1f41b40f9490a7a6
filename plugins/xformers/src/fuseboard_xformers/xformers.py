"""`xformers`: memory-efficient attention, by its flash and its CUTLASS operators.

Both are pinned, in pairs of a forward and a backward: left to itself the package may pick FlashAttention 3, or a
split-key kernel in Triton, of which nothing here says what they can do. Flash takes half precision and structures,
CUTLASS what is left: dense masks, float32, wide heads, the top-left flag with more queries than keys.

CUTLASS's bottom-right mask is wrong when the queries outnumber the keys (error 3 at 128 by 65, inputs from N(0, 1)), so
it is never given one: a structure that flash cannot take is written out as a dense bias.

Padded keys are given without a wait, see `_biases`.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseboard import (
    BackendInfo,
    Call,
    Constraints,
    DeclinedError,
    Exactness,
    Guard,
    HeadDims,
    Kernel,
    KnownBad,
    MaskInfo,
    Sizes,
    StructureRule,
    hookimpl,
)
from fuseboard.tensors import GRID, aligned, as_tokens, expanded_bias, needs_grad, padded, repeated, scale_of
from fuseboard_xformers import _cost, _package
from fuseboard_xformers._biases import Biases
from fuseboard_xformers._tensors import grouped

FLASH_DIM = 256
NEWEST_CUTLASS = (9, 0)


def _needs_cutlass(call: Call) -> bool:
    return (
        call.dtype == torch.float32
        or max(call.head_dim, call.v_head_dim) > FLASH_DIM
        or LIMITS.form(call) == "dense"
        or (call.causal and call.lengths == "more queries")
    )


def _cutlass_fits(call: Call, _sizes: Sizes) -> bool:
    return call.capability is None or call.capability <= NEWEST_CUTLASS or not _needs_cutlass(call)


def _mask_fits(call: Call, sizes: Sizes) -> bool:
    # https://github.com/pytorch/pytorch/issues/187227: offsets into the mask are 32 bits wide, rows beyond read wrong
    # ones. CUTLASS is torch's kernel here too.
    dense = LIMITS.form(call) == "dense" or (LIMITS.form(call) == "structure" and _needs_cutlass(call))
    return not dense or sizes.q_length * sizes.k_length <= 2**32


def _backward_fits(call: Call, sizes: Sizes) -> bool:
    # Offsets into the padded accumulator of dQ are 32 bits wide; beyond that flash writes out of bounds.
    rows = -(-sizes.q_length // 128) * 128
    return not call.grad or sizes.batch * sizes.heads * rows * max(sizes.head_dim, sizes.v_head_dim, 32) <= 2**31


LIMITS = Constraints(
    devices={"cuda"},
    capability=((8, 0), (12, 1)),
    dtypes={torch.float16, torch.bfloat16, torch.float32},
    head_dims=HeadDims(),
    v_head_dims=HeadDims(),
    gqa=True,
    causal={"equal", "fewer queries", "more queries"},
    masks={"bool", "additive"},
    structures=(
        StructureRule(causal={True}, window={False, True}),
        # A window open to the right is given the bound k_length there, which cuts when the queries outnumber the keys.
        # So is a bound ahead beyond k_length; where the queries are no more than the keys, none that long is asked for.
        StructureRule(
            causal={False}, window={False, True}, ahead={False, True}, lengths={"equal", "fewer queries"}
        ),
        # Its biases for padded keys have no backward. With causality it aligns to the last *real* key, the structure
        # to the last key; the class that would be right for padding on the left has no operator.
        StructureRule(keys={"right", "left"}, causal={False}, backward=False),
    ),
    custom_scale=True,
    dropout=True,
    backward=True,
    any_stride=True,
    guards=(
        *GRID,  # https://github.com/facebookresearch/xformers/issues/845
        Guard(
            "operator", _cutlass_fits,
            f"beyond compute capability 9.0 half precision, heads up to {FLASH_DIM}, no dense mask",
        ),
        Guard(
            "mask size", _mask_fits, "at most 2**32 queries * keys", lambda sizes: sizes.q_length * sizes.k_length,
            "pass mask_info",
        ),
        Guard("backward size", _backward_fits, "2**31 accumulator elements", None, "split the batch"),
    ),
)  # fmt: skip
"""What it takes. It has a gradient of additive masks, which nobody has tried here, and so is not claimed."""


@hookimpl
def info() -> BackendInfo:
    """What it is."""
    return BackendInfo(
        "xFormers' memory-efficient attention: flash and CUTLASS operators, structured biases",
        requires=_package.requires(),
        homepage="https://github.com/facebookresearch/xformers",
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
def rank(call: Call, sizes: Sizes) -> float:
    """Microseconds, by `_cost`."""
    return _cost.cutlass(call, sizes) if _needs_cutlass(call) else _cost.flash(call, sizes)


@hookimpl
def known_bad() -> Iterator[KnownBad]:
    """Releases known to be wrong; all before 0.0.27 are."""
    issues = "https://github.com/facebookresearch/xformers"
    yield KnownBad(
        "a batch of 65536 and more fails at a later call", f"{issues}/issues/845", "xformers", ">=0.0.21,<0.0.27"
    )
    yield KnownBad("NaN beyond 32768 tokens", f"{issues}/issues/719", "xformers", "==0.0.18")
    yield KnownBad("wrong gradients with shared key heads", f"{issues}/blob/main/CHANGELOG.md", "xformers", "<0.0.23")


@hookimpl
def kernel(device: torch.device) -> Kernel:
    """Import the package, wherever its attention lives."""
    return Xformers(_package.imported())


@hookimpl
def install_line(torch_version: str) -> str:
    """The release that was built for this torch."""
    return _package.install_line(torch_version)


class _Ready(NamedTuple):
    """A call in the package's words."""

    forward: Any
    backward: Any
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Any
    scale: float


class Xformers:
    """`memory_efficient_attention`, its operators pinned.

    Args:
        package: Its module `fmha`.
    """

    def __init__(self, package: ModuleType) -> None:
        self._attend, self._forward = package.memory_efficient_attention, package.memory_efficient_attention_forward
        self._inputs = package.Inputs
        self._flash = (package.flash.FwOp, package.flash.BwOp)
        self._cutlass = (package.cutlass.FwOp, package.cutlass.BwOp)
        self._biases = Biases(package.attn_bias)

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
        """Say the call in the package's words, and its answer in ours."""
        grad = needs_grad(q, k, v)
        if grad and torch.are_deterministic_algorithms_enabled():
            msg = "its backward is not deterministic, which torch.use_deterministic_algorithms asks for"
            raise DeclinedError(msg)  # a pinned operator is not asked by the package itself
        ready = self._ready(q, k, v, mask, mask_info, causal=causal, scale=scale, grad=grad)
        words = (ready.q, ready.k, ready.v, ready.bias, dropout_p, ready.scale)
        if grad:
            out: Tensor = self._attend(*words, op=(ready.forward, ready.backward))
        else:
            out = self._forward(*words, op=ready.forward)
        batch, heads, n_q, _ = q.shape
        return out.reshape(batch, n_q, heads, -1).transpose(1, 2)[..., : v.shape[3]]

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
        """The operators' own word on the call."""
        grad = needs_grad(q, k, v)
        ready = self._ready(q, k, v, mask, mask_info, causal=causal, scale=scale, grad=grad)
        inputs = self._inputs(ready.q, ready.k, ready.v, ready.bias, dropout_p, ready.scale)
        reasons = list(ready.forward.not_supported_reasons(inputs))
        reasons += ready.backward.not_supported_reasons(inputs) if grad else []
        return "; ".join(dict.fromkeys(" ".join(str(each).split()) for each in reasons)) or None

    def _ready(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        info: MaskInfo | None,
        *,
        causal: bool,
        scale: float | None,
        grad: bool,
    ) -> _Ready:
        n_q, n_k = q.shape[2], k.shape[2]
        number = scale_of(q, scale)
        if (
            mask is not None
            or q.dtype == torch.float32
            or max(q.shape[3], v.shape[3]) > FLASH_DIM
            or (causal and n_q > n_k)
        ):
            if info is not None:
                mask = info.dense(n_q, n_k, q.device)
                k, v = _real(k, info), _real(v, info)
            bias = expanded_bias(mask, q, k) if mask is not None else self._biases.top_left() if causal else None
            multiple = 16 // q.element_size()
            dim, v_dim = (-(-each.shape[3] // multiple) * multiple for each in (q, v))
            q, k, v = padded(q, dim), repeated(padded(k, dim), q.shape[1]), repeated(padded(v, v_dim), q.shape[1])
            q, k, v = (aligned(each).transpose(1, 2) for each in (q, k, v))
            return _Ready(*self._cutlass, q, k, v, bias, number)
        if causal and n_k > n_q:  # top-left: no query sees a key beyond the number of queries
            k, v = k[:, :, :n_q], v[:, :, :n_q]
        dim = -(-max(q.shape[3], v.shape[3]) // 8) * 8
        q, k, v = (aligned(padded(each, dim)) for each in (q, k, v))
        if grad:  # the fifth axis has no backward
            k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
        if info is not None and info.keys is not None:
            bias = self._biases.padded(info, q.shape[0], n_q, n_k)
            q, k, v = as_tokens(q)[None], as_tokens(k)[None], as_tokens(v)[None]
        else:
            bias = self._biases.of(info, n_k) if info is not None else self._biases.top_left() if causal else None
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if q.shape[2] != k.shape[2]:
            q, k, v = grouped(q, k, v)
        return _Ready(*self._flash, q, k, v, bias, number)


def _real(tensor: Tensor, info: MaskInfo) -> Tensor:
    """Keys or values with zeros where a key is not real: CUTLASS reads those too, and 0 times NaN is NaN."""
    keys = info.keys
    if keys is None:
        return tensor
    return tensor.masked_fill(info.derived("hidden", lambda: ~keys[:, None, :, None]), 0)
