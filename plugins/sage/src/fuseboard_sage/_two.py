"""SageAttention 2 (built from source): int8 scores; float16 or float8 values, by the device."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from fuseboard import Call, Constraints, Guard, HeadDims, Sizes, StructureRule
from fuseboard.tensors import GRID
from fuseboard_sage._call import Sage
from fuseboard_sage._limits import OFFSETS

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


class Two(Sage):
    """`sageattention.sageattn` of the second generation, which picks a kernel by the device.

    It centres keys in a copy of its own; its Triton kernel has the first generation's loop.

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
        super().__init__(package, device)
