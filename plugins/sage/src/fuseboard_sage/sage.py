"""`sage`: SageAttention 1 or 2, whichever is installed. Inference only, approximate.

Both are called `sageattention` and take unknown arguments without a word, so an argument that one lacks is never
passed: the installed version, read from metadata, decides which limits and which kernel hold, and the import checks it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator

import torch

from fuseboard import BackendInfo, Call, Constraints, Exactness, Kernel, KnownBad, Sizes, hookimpl
from fuseboard_sage import _cost, _one, _two

_OF_THE_SECOND = "sageattn_qk_int8_pv_fp16_cuda"  # an attribute that the first generation lacks


def installed_generation() -> int:
    """1 or 2 by the metadata of `sageattention`; 1, which is the one on PyPI, where it is not installed."""
    try:
        version = importlib.metadata.version("sageattention") or ""
    except Exception:  # noqa: BLE001 - absent, or metadata that cannot be read; the probe says so
        return 1
    return 2 if version.startswith("2") else 1


GENERATION = installed_generation()
LIMITS = _two.LIMITS if GENERATION == 2 else _one.LIMITS  # noqa: PLR2004
"""What the installed generation takes."""


@hookimpl
def info() -> BackendInfo:
    """What it is."""
    return BackendInfo(
        "SageAttention 1 and 2: int8 scores, approximate, no backward",
        requires={"sageattention": ">=1.0.6,<3"},
        homepage="https://github.com/thu-ml/SageAttention",
    )


@hookimpl
def constraints() -> Constraints:
    """Its limits."""
    return LIMITS


@hookimpl
def exactness() -> Exactness:
    """Scores are quantised to int8."""
    return Exactness.APPROXIMATE


@hookimpl
def tolerance(dtype: torch.dtype) -> float:
    """The error of int8 scores, whatever the dtype.

    Measured on an H200 with inputs from N(0, 1): 1e-2 to 3e-2, causal 3e-2 to 5e-2, where the first queries see few
    keys and rounding does not average out. The same arithmetic in float64, over 280 draws of up to 300 keys, reaches
    0.065. The faults that are known show as 0.2 and more.
    """
    return 8e-2


@hookimpl
def rank(call: Call, sizes: Sizes) -> float:
    """Microseconds, by `_cost`."""
    return _cost.sage(call, sizes)


@hookimpl
def known_bad() -> Iterator[KnownBad]:
    """What is reported upstream. The limits refuse all of it; these say where to read about it."""
    yield KnownBad(
        "causality with unequal lengths is aligned to the first key by some of its kernels, and raises in others",
        "https://github.com/thu-ml/SageAttention/pull/372",
        call=lambda call: _causal(call) and call.lengths != "equal",
    )


def _causal(call: Call) -> bool:
    return call.causal or (call.structure is not None and call.structure.causal)


@hookimpl
def probe(device: torch.device) -> str | None:
    """The second generation raises on devices that it has no kernel for."""
    if GENERATION != 2 or device.type != "cuda":  # noqa: PLR2004
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability in _two.CAPABILITIES:
        return None
    known = ", ".join(f"{major}.{minor}" for major, minor in _two.CAPABILITIES)
    return f"sageattention 2 has kernels for compute capability {known}, {device} has {capability[0]}.{capability[1]}"


@hookimpl
def kernel(device: torch.device) -> Kernel:
    """Import the package.

    Raises:
        ImportError: It is not what its metadata says.
    """
    package = importlib.import_module("sageattention")
    if hasattr(package, _OF_THE_SECOND) != (GENERATION == 2):  # noqa: PLR2004
        msg = f"the metadata of sageattention says version {GENERATION}.x and the module is another; reinstall it"
        raise ImportError(msg)
    return _two.Two(package, device) if GENERATION == 2 else _one.One(package, device)  # noqa: PLR2004


@hookimpl
def install_line() -> str:
    """The release on PyPI declares no dependencies; Triton comes with torch."""
    return "pip install --no-deps sageattention==1.0.6"
