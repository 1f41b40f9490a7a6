"""`sdpa-cudnn`: cuDNN's attention as PyTorch calls it. The fastest for long prefills on Hopper and later, with many conditions."""

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
    MaskInfo,
    Sizes,
    StructureRule,
    hookimpl,
)
from fuseboard_sdpa._tensors import aligned, binding, expanded_bias, needs_grad, padded, scale_of, switched_off

GRID_LIMIT = 65_535


def _version() -> tuple[int, int, int]:
    """cuDNN's version; zeros without cuDNN. Its number is major * 10000 + minor * 100 + patch since 9.0."""
    number = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    return number // 10000, number // 100 % 100, number % 100


def _dropout_fits(_call: Call, sizes: Sizes) -> bool:
    return (sizes.dropout_p * 16).is_integer()  # cuDNN keeps it in sixteenths


def _short_lengths_fit(_call: Call, sizes: Sizes) -> bool:
    # https://github.com/pytorch/pytorch/issues/169849
    return _version() >= (9, 15, 1) or (sizes.q_length % 128 == 0 and sizes.k_length % 128 == 0)


@hookimpl
def info() -> BackendInfo:
    """What it is."""
    return BackendInfo("cuDNN's attention as PyTorch calls it", homepage="https://docs.nvidia.com/deeplearning/cudnn")


@hookimpl
def constraints() -> Constraints:
    """What it takes. Called with float32 it returns NaN without an error, and reads a mask of another dtype bit by bit."""
    return Constraints(
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
            Guard(
                "batch",
                lambda _call, sizes: sizes.batch <= GRID_LIMIT,
                f"at most {GRID_LIMIT}",
                lambda sizes: sizes.batch,
                "split the batch",
            ),
            Guard(
                "heads",
                lambda _call, sizes: sizes.heads <= GRID_LIMIT,
                f"at most {GRID_LIMIT}",
                lambda sizes: sizes.heads,
                "split the heads",
            ),
            Guard("k_length", lambda _call, sizes: sizes.k_length > 1, "at least 2", lambda sizes: sizes.k_length),
            Guard("lengths", _short_lengths_fit, "multiples of 128 before cuDNN 9.15.1", None, "a newer cuDNN"),
            Guard("dropout_p", _dropout_fits, "a multiple of 1/16", lambda sizes: sizes.dropout_p),
        ),
    )


@hookimpl
def exactness() -> Exactness:
    """Rounding only."""
    return Exactness.EXACT


@hookimpl
def known_bad() -> Iterator[KnownBad]:
    """Combinations known to be wrong with the cuDNN that this torch has."""
    version = _version()
    if (9, 19, 0) <= version < (9, 21, 0):
        yield KnownBad(
            "NaN in dQ with a mask on compute capability 9.0",
            "https://github.com/pytorch/pytorch/issues/196678",
            call=lambda call: call.grad and call.mask != "none" and call.capability == (9, 0),
        )
    if (9, 19, 0) <= version <= (9, 25, 0) and version != (9, 24, 1):
        yield KnownBad(
            "silent corruption with one query on compute capability 10 and 11",
            "https://github.com/pytorch/pytorch/issues/193893",
            call=lambda call: call.one_query and call.capability is not None and call.capability[0] in (10, 11),
        )


@hookimpl
def rank(call: Call) -> float:
    """Measured: see benchmarks/results. Every new length makes it build a plan, so a growing cache is not for it."""
    if call.one_query:
        return 1.5
    return 1.0


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
        """Pad, align, lay the mask out, and call it. Its one structure, bottom-right at equal lengths, is the top-left flag."""
        v_dim, number = v.shape[3], scale_of(q, scale)
        q, k, v = self._prepared(q, k, v)
        bias = None if mask is None else expanded_bias(mask, q, k)
        out: Tensor = self._op(
            q, k, v, bias, needs_grad(q, k, v), dropout_p, causal or mask_info is not None, scale=number
        )[0]
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
        gqa = q.shape[1] != k.shape[1]
        params = torch.backends.cuda.SDPAParams(q, k, v, bias, dropout_p, causal or mask_info is not None, gqa)
        with torch.cuda.device(q.device):  # the check asks about the current device
            able: bool = torch.backends.cuda.can_use_cudnn_attention(params, False)
        return None if able else switched_off("cudnn") or "torch's own check for cuDNN attention says no"

    def _prepared(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dim, v_dim = (-(-each.shape[3] // 8) * 8 for each in (q, v))
        return aligned(padded(q, dim)), aligned(padded(k, dim)), aligned(padded(v, v_dim))
