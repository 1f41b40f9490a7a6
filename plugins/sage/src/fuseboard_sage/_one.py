"""SageAttention 1 (1.0.6, the one on PyPI): int8 scores and float16 values, in Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuseboard import Call, Constraints, Guard, HeadDims, Sizes, StructureRule
from fuseboard.tensors import GRID, GRID_LIMIT
from fuseboard_sage._call import Sage
from fuseboard_sage._limits import OFFSETS
from fuseboard_sage._tensors import centred_half

__all__ = ["LIMITS", "One"]

_NARROW = 96  # the head dimension with kernels of its own


def _is_causal(call: Call) -> bool:
    # A causal structure is admitted at equal lengths only, where it is what the flag says.
    return call.causal or LIMITS.form(call) == "structure"


def _keys_fit(call: Call, sizes: Sizes) -> bool:
    # Keys are loaded 64 at a time, and those beyond the last take part in the softmax as zeros (error 0.3 at 65 keys,
    # 4 at one key, inputs from N(0, 1)). Causality hides them. Seen with 1.0.6, the last release of that generation.
    return _is_causal(call) or sizes.k_length % 64 == 0


def _rows_fit(_call: Call, sizes: Sizes) -> bool:
    return sizes.head_dim != _NARROW or sizes.batch * sizes.heads <= GRID_LIMIT


LIMITS = Constraints(
    devices={"cuda"},
    capability=((8, 0), (12, 1)),
    dtypes={torch.float16, torch.bfloat16, torch.float32},
    head_dims=HeadDims(only={64, 96, 128}),
    gqa=True,
    causal={"equal"},
    structures=(StructureRule(causal={True}, lengths={"equal"}),),
    custom_scale=True,
    any_stride=True,
    guards=(
        *GRID,
        OFFSETS,
        Guard(
            "k_length", _keys_fit, "a multiple of 64, or causal with equal lengths", lambda sizes: sizes.k_length,
            "a kernel that takes any length",
        ),
        Guard(
            "batch * heads", _rows_fit, f"at most {GRID_LIMIT} at head_dim {_NARROW}",
            lambda sizes: sizes.batch * sizes.heads, "split the batch",
        ),
    ),
)  # fmt: skip
"""What it takes. It has no mask (one given is dropped in silence), no dropout and no backward."""


class One(Sage):
    """`sageattention.sageattn` of the first generation, in Triton."""

    def _keys(self, k: Tensor) -> Tensor:
        return centred_half(k)

    def _options(self, scale: float) -> dict[str, Any]:
        # Twice the scale for half of the keys; left to itself it would write their mean into k.
        return {"sm_scale": 2.0 * scale, "smooth_k": False}
