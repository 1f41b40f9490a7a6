"""`sage3`: SageAttention 3 for Blackwell cards of compute capability 12.x. Four-bit numbers, inference only.

Nobody has run it under fuseboard yet: its limits are what its source admits, less all that is in doubt.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from fuseboard import (
    BackendInfo,
    Call,
    Constraints,
    Exactness,
    Guard,
    HeadDims,
    Kernel,
    MaskInfo,
    Sizes,
    hookimpl,
)
from fuseboard.tensors import GRID, packed
from fuseboard_sage import _cost
from fuseboard_sage._limits import OFFSETS
from fuseboard_sage._tensors import in_range


def _keys_fit(_call: Call, sizes: Sizes) -> bool:
    # It pads lengths to 128, and whether padding is kept out of the softmax has not been seen.
    return sizes.k_length % 128 == 0


LIMITS = Constraints(
    devices={"cuda"},
    capability=((12, 0), (12, 1)),
    dtypes={torch.float16, torch.bfloat16},
    head_dims=HeadDims(only={64, 128}),
    custom_scale=True,
    any_stride=True,
    guards=(
        *GRID,
        OFFSETS,
        Guard("k_length", _keys_fit, "a multiple of 128", lambda sizes: sizes.k_length),
    ),
)
"""What it takes. Not causal calls: where a query sees few keys, four-bit values are off by half a unit (N(0, 1)), and
its causality is aligned on padded lengths. A mask is dropped in silence."""


@hookimpl
def info() -> BackendInfo:
    """What it is."""
    return BackendInfo(
        "SageAttention 3: four-bit floating point, approximate, no backward",
        requires={"sageattn3": "", "torch": ">=2.8"},
        homepage="https://github.com/thu-ml/SageAttention",
    )


@hookimpl
def constraints() -> Constraints:
    """Its limits."""
    return LIMITS


@hookimpl
def exactness() -> Exactness:
    """Scores, weights and values are quantised to four bits."""
    return Exactness.APPROXIMATE


@hookimpl
def tolerance(dtype: torch.dtype) -> float:
    """The error of the arithmetic, done in float32: up to 0.27 at 64 by 128, inputs from N(0, 1). Not measured."""
    return 0.3


@hookimpl
def rank(call: Call, sizes: Sizes) -> float:
    """Microseconds, by `_cost`, which was measured for another generation."""
    return _cost.sage(call, sizes)


@hookimpl
def kernel(device: torch.device) -> Kernel:
    """Import the package."""
    return Three(importlib.import_module("sageattn3").sageattn3_blackwell, device)


@hookimpl
def install_line() -> str:
    """Built from source against the installed torch."""
    return (
        "pip install --no-deps --no-build-isolation "
        '"git+https://github.com/thu-ml/SageAttention#subdirectory=sageattention3_blackwell"'
    )


class Three:
    """`sageattn3.sageattn3_blackwell`.

    Args:
        attend: The function.
        device: Which device is made the current one.
    """

    def __init__(self, attend: Callable[..., Tensor], device: torch.device) -> None:
        self._attend = attend
        self._device = device if device.type == "cuda" else -1  # -1 changes nothing

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
        """Bring values into range and call it with a copy of the keys, into which it writes."""
        with torch.cuda.device(self._device):
            values, back = in_range(v, q.shape[1])
            keys = k.clone(memory_format=torch.contiguous_format)
            return self._attend(packed(q), keys, values, is_causal=False) * back

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
        """It has one scale, and drops another in silence."""
        if scale is None or math.isclose(scale * math.sqrt(q.shape[-1]), 1.0, rel_tol=1e-6):
            return None
        return "a scale other than 1 / sqrt(head_dim)"
