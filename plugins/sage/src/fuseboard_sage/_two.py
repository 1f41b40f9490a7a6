"""SageAttention 2 (built from source): int8 scores; float16 or float8 values, by the device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from fuseboard import Call, Constraints, Guard, HeadDims, MaskInfo, Sizes, StructureRule
from fuseboard.tensors import GRID, packed, scale_of
from fuseboard_sage._limits import OFFSETS
from fuseboard_sage._tensors import in_range, lengthened, scale_declined

__all__ = ["CAPABILITIES", "LIMITS", "Two"]

HOPPER = (9, 0)

CAPABILITIES = {
    (8, 0): "SM80_ENABLED", (8, 6): None, (8, 9): "SM89_ENABLED", (9, 0): "SM90_ENABLED", (12, 0): "SM89_ENABLED",
    (12, 1): "SM89_ENABLED",
}  # fmt: skip
"""Devices it dispatches on, and what its module `core` calls the kernels built for them; None for Triton's."""


def _keys_fit(call: Call, sizes: Sizes) -> bool:
    # Fewer keys than one block gives NaN in the CUDA kernels, as users report; a block is 128 keys on Hopper.
    return sizes.k_length >= (128 if call.capability == HOPPER else 64)


LIMITS = Constraints(
    devices={"cuda"},
    capability=((8, 0), (12, 1)),
    dtypes={torch.float16, torch.bfloat16},
    head_dims=HeadDims(high=128),
    gqa=True,
    # With unequal lengths some of its kernels align to the first key and others raise:
    # https://github.com/thu-ml/SageAttention/pull/372
    causal={"equal"},
    structures=(StructureRule(causal={True}, lengths={"equal"}),),
    custom_scale=True,
    any_stride=True,
    guards=(
        *GRID,
        OFFSETS,
        Guard("k_length", _keys_fit, "at least 64, on Hopper 128", lambda sizes: sizes.k_length),
    ),
)
"""What it takes. Only one of its kernels has a mask, boolean, and that averages values in rows that see no key."""


class Two:
    """`sageattention.sageattn` of the second generation, which picks a kernel by the device.

    Args:
        package: `sageattention`.
        device: Where it runs.

    Raises:
        ImportError: The package was built without kernels for the device.
    """

    def __init__(self, package: ModuleType, device: torch.device) -> None:
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            built = CAPABILITIES.get(capability)
            core = importlib.import_module(f"{package.__name__}.core")
            if built is not None and not getattr(core, built, True):
                shown = f"{capability[0]}.{capability[1]}"
                msg = f"sageattention was built without kernels for {shown}; rebuild with TORCH_CUDA_ARCH_LIST={shown}"
                raise ImportError(msg)
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
        """Bring values into range and call it. It centres keys in a copy of its own."""
        length = q.shape[2]
        causal = causal or mask_info is not None
        # As in `_one`: its Triton kernel has the same loop.
        missing = -length % 128 if causal and -length % 128 >= 64 else 0  # noqa: PLR2004
        with torch.cuda.device(self._device):  # it sets the current device and leaves it so; this puts it back
            values, back = in_range(v, q.shape[1])
            out = self._attend(
                lengthened(packed(q), missing),
                lengthened(packed(k), missing),
                lengthened(values, missing),
                tensor_layout="HND",
                is_causal=causal,
                sm_scale=scale_of(q, scale),
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
