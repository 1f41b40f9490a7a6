"""SageAttention 1 (1.0.6, the one on PyPI): int8 scores and float16 values, in Triton."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from fuseboard import Call, Constraints, Guard, HeadDims, MaskInfo, Sizes, StructureRule
from fuseboard.tensors import GRID, GRID_LIMIT, packed, scale_of
from fuseboard_sage._limits import OFFSETS
from fuseboard_sage._tensors import centred_half, in_range, lengthened, scale_declined

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


class One:
    """`sageattention.sageattn` of the first generation.

    Args:
        package: `sageattention`.
        device: Triton launches on the current device, which is made this one.
    """

    def __init__(self, package: ModuleType, device: torch.device) -> None:
        self._attend: Callable[..., Tensor] = package.sageattn
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
        """Centre keys, bring values into range, lengthen where the kernel would read past its end, and call it."""
        length = q.shape[2]
        causal = causal or mask_info is not None
        # A causal block spans 128 queries and two blocks of 64 keys; where the second has no key at all, its scale is
        # read beyond the last one. Zeros behind all queries are seen by none of them.
        missing = -length % 128 if causal and -length % 128 >= 64 else 0  # noqa: PLR2004
        with torch.cuda.device(self._device):
            values, back = in_range(v, q.shape[1])
            out = self._attend(
                lengthened(packed(q), missing),
                lengthened(centred_half(k), missing),
                lengthened(values, missing),
                tensor_layout="HND",
                is_causal=causal,
                sm_scale=2.0 * scale_of(q, scale),
                smooth_k=False,  # it would write into k
            )
            return (out[:, :, :length] if missing else out) * back

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
        """Refuse scales at which its scores are too coarse."""
        return scale_declined(q, scale)
