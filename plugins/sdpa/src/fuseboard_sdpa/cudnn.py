"""`sdpa-cudnn`: cuDNN's attention as PyTorch calls it. The fastest on Hopper, at a price for new sizes.

It builds a plan for each combination of sizes, which takes longer than thousands of small calls. It therefore asks to
be taken only after as many calls of the same sizes as the plan is worth: a cache that grows by one key a step never
makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    KnownBad,
    Later,
    MaskInfo,
    Sizes,
    StructureRule,
    describe,
    hookimpl,
)
from fuseboard.tensors import GRID, aligned, expanded_bias, needs_grad, padded, scale_of
from fuseboard_sdpa import _cost
from fuseboard_sdpa._limits import eligible
from fuseboard_sdpa._tensors import binding, ready

_PLAN_MICROSECONDS = 40_000.0  # measured on an H200, cuDNN 9.19, for forward calls of many sizes


def _version() -> tuple[int, int, int]:
    """cuDNN's version; zeros without cuDNN. Its number is major * 10000 + minor * 100 + patch since 9.0."""
    number = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    return number // 10000, number // 100 % 100, number % 100


def _dropout_fits(_call: Call, sizes: Sizes) -> bool:
    return (sizes.dropout_p * 16).is_integer()  # cuDNN keeps it in sixteenths


def _short_lengths_fit(_call: Call, sizes: Sizes) -> bool:
    # https://github.com/pytorch/pytorch/issues/169849
    return _version() >= (9, 15, 1) or (sizes.q_length % 128 == 0 and sizes.k_length % 128 == 0)


def _mask_gradient_fits(call: Call, sizes: Sizes) -> bool:
    # https://github.com/pytorch/pytorch/issues/196678: NaN in dQ when a length is 64 more than a multiple of 128.
    # Reported for that remainder; every other is refused with it, until somebody has shown them right.
    bad = (
        (9, 19, 0) <= _version() < (9, 21, 0)
        and call.capability == (9, 0)
        and call.grad
        and LIMITS.form(call) == "dense"
    )
    return not bad or (sizes.q_length % 128 == 0 and sizes.k_length % 128 == 0)


LIMITS = Constraints(
    devices={"cuda"},
    capability=((8, 0), (12, 1)),
    dtypes={torch.float16, torch.bfloat16},
    head_dims=HeadDims(high=256),
    v_head_dims=HeadDims(high=256),
    gqa=True,
    causal=ALL_LENGTHS,
    masks={"bool", "additive"},
    structures=(StructureRule(causal={True}, lengths={"equal"}),),
    custom_scale=True,
    dropout=True,
    backward=True,
    any_stride=True,
    guards=(
        *GRID,
        Guard("k_length", lambda _call, sizes: sizes.k_length > 1, "at least 2", lambda sizes: sizes.k_length),
        Guard("lengths", _short_lengths_fit, "multiples of 128 before cuDNN 9.15.1", None, "a newer cuDNN"),
        Guard("lengths", _mask_gradient_fits, "multiples of 128 for a backward with a mask on 9.0", None, "pad"),
        Guard("dropout_p", _dropout_fits, "a multiple of 1/16", lambda sizes: sizes.dropout_p),
    ),
)
"""What it takes. Called with float32 it returns NaN without an error, and reads a mask of another dtype bit by bit."""


@hookimpl
def info() -> BackendInfo:
    """What it is."""
    return BackendInfo("cuDNN's attention as PyTorch calls it", homepage="https://docs.nvidia.com/deeplearning/cudnn")


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
    """Combinations known to be wrong with the cuDNN that this torch has."""
    version = _version()
    if (9, 19, 0) <= version <= (9, 25, 0) and version != (9, 24, 1):
        yield KnownBad(
            "silent corruption with one query on compute capability 10 and 11",
            "https://github.com/pytorch/pytorch/issues/193893",
            call=lambda call: call.one_query and call.capability is not None and call.capability[0] in (10, 11),
        )


@hookimpl
def rank(call: Call, sizes: Sizes) -> float:
    """Microseconds, from the measured rates of `_cost`, once a plan exists; see `Cudnn.declines`."""
    return _cost.cudnn(call, sizes, dense=LIMITS.form(call) == "dense")


@hookimpl
def probe(device: torch.device) -> str | None:
    """cuDNN may be missing from a build."""
    return None if torch.backends.cudnn.is_available() else "this torch has no cuDNN"  # type: ignore[no-untyped-call]


@hookimpl
def kernel() -> Cudnn:
    """The operator."""
    return Cudnn()


class Cudnn:
    """`_scaled_dot_product_cudnn_attention`."""

    def __init__(self) -> None:
        self._op: Callable[..., Any] = binding("_scaled_dot_product_cudnn_attention")

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
        """Pad, align, lay the mask out, and call it. Its one structure, causal at equal lengths, is the flag."""
        v_dim, number = v.shape[3], scale
        if not ready(q, k, v, 8):
            number = scale_of(q, scale)
            q, k, v = self._prepared(q, k, v)
        bias = None if mask is None else expanded_bias(mask, q, k)
        causal = causal or mask_info is not None
        out: Tensor = self._op(q, k, v, bias, needs_grad(q, k, v), dropout_p, causal, scale=number)[0]
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
    ) -> str | Later | None:
        """Torch's own eligibility check; then, whether a plan for these very sizes pays yet."""
        call, sizes = describe(
            q, k, v, mask=mask, mask_info=mask_info, causal=causal, scale=scale, dropout_p=dropout_p, enable_gqa=True
        )
        q, k, v = self._prepared(q, k, v)
        bias = None if mask is None else expanded_bias(mask, q, k)
        causal = causal or mask_info is not None
        refused = eligible("cudnn", q, k, v, bias, dropout_p, causal, q.shape[1] != k.shape[1])
        return refused or _worth_a_plan(call, sizes)

    def _prepared(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dim, v_dim = (-(-each.shape[3] // 8) * 8 for each in (q, v))
        return aligned(padded(q, dim)), aligned(padded(k, dim)), aligned(padded(v, v_dim))


def _worth_a_plan(call: Call, sizes: Sizes) -> Later | None:
    """After how many calls of one combination of sizes a plan has paid for itself, against the next best kernel."""
    dense = LIMITS.form(call) == "dense"
    other = _cost.efficient(call, sizes, dense=True) if dense else _cost.flash(call, sizes)
    gain = max(other - _cost.cudnn(call, sizes, dense=dense), 0.001)
    calls = int(_PLAN_MICROSECONDS / gain)
    return Later("it builds a plan for each combination of sizes, about 40 ms", calls) if calls > 1 else None
