"""Where the package lives, how to install the build for the installed torch, and why one that is there does not work.

Reads metadata; imports nothing but in `imported`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType
from typing import Any

import torch

__all__ = ["imported", "install_line", "requires"]

BUILT_FOR = {
    "2.6.": "0.0.29.post3", "2.7.0": "0.0.30", "2.7.1": "0.0.31.post1", "2.8.": "0.0.32.post2",
    "2.9.0": "0.0.33.post1", "2.9.1": "0.0.33.post2",
}  # fmt: skip
"""Torch versions by how they start, and the release that PyPI has for each. Later ones use torch's stable ABI."""

LATEST = "0.0.35"
ATTENTION, ATTENTION_IN_MSLK = "xformers.ops.fmha", "mslk.attention.fmha"


def version(distribution: str) -> str | None:
    """The installed version by metadata; None when absent or unreadable."""
    try:
        return importlib.metadata.version(distribution)
    except Exception:  # noqa: BLE001 - damaged metadata may raise anything
        return None


def requires() -> dict[str, str]:
    """The distribution that has the kernels: `xformers`, or `mslk`, their later home, where that alone is installed."""
    # 0.0.0 of mslk holds nothing but its name.
    return (
        {"mslk": ">0.0.0"}
        if version("xformers") is None and version("mslk") not in (None, "0.0.0")
        else {"xformers": ""}
    )


def install_line(torch_version: str) -> str:
    """The release built for this torch. Beside a torch for CUDA 13 the build needs the runtime of CUDA 12 as well."""
    number, _, local = torch_version.partition("+")
    release = next((built for start, built in BUILT_FOR.items() if f"{number}.".startswith(start)), LATEST)
    runtime = " nvidia-cuda-runtime-cu12  # and its lib folder on LD_LIBRARY_PATH" if local.startswith("cu13") else ""
    return f"pip install --no-deps xformers=={release}{runtime}"


def imported() -> ModuleType:
    """Import the package and return its module of attention.

    Raises:
        ImportError: It cannot be used; the text says why and what to do.
    """
    if "mslk" in requires():
        return importlib.import_module(ATTENTION_IN_MSLK)
    package = importlib.import_module("xformers")
    if not getattr(package, "_has_cpp_library", True):
        raise ImportError(_why_not_loaded(importlib.import_module("xformers._cpp_lib")))
    try:
        return importlib.import_module(ATTENTION)
    except ModuleNotFoundError as error:
        if error.name == ATTENTION:
            return importlib.import_module(ATTENTION_IN_MSLK)
        raise _explained(error) from error
    except ImportError as error:
        raise _explained(error) from error


def _explained(error: ImportError) -> ImportError:
    text = str(error).strip().partition("\n")[0]
    if (error.name or "").startswith("flash_attn") or "flash" in text.lower():
        # It imports any flash_attn that it finds, the empty namespace that flash-attn-4 leaves included.
        return ImportError(f"xformers does not take the flash_attn that is installed here ({text})")
    return error


def _why_not_loaded(library: Any) -> str:
    error = getattr(library, "_cpp_library_load_exception", None)
    built = getattr(library, "_build_metadata", None) or getattr(error, "build_info", None)
    cause = _first_cause(error)
    remedy = f"Install the one for this torch: {install_line(torch.__version__)}"
    if built is None and not cause:
        return f"xformers is installed without its compiled library. {remedy}"
    parts = [cause] if cause else []
    if built is not None:
        parts.append(f"built for torch {built.torch_version}{_cuda(built)}, here is {torch.__version__}")
    hint = ""
    if "libcudart.so.12" in cause:
        hint = ", or make that file loadable (package nvidia-cuda-runtime-cu12)"
    return f"the compiled library of xformers does not load ({'; '.join(parts)}). {remedy}{hint}"


def _first_cause(error: BaseException | None) -> str:
    """The first line of the error at the bottom: torch wraps what the loader says, and the package wraps that."""
    bottom = error
    while bottom is not None and (bottom.__cause__ or bottom.__context__) is not None:
        bottom = bottom.__cause__ or bottom.__context__
    return "" if bottom is error else str(bottom).strip().partition("\n")[0]


def _cuda(built: Any) -> str:
    number = getattr(built, "cuda_version", None)  # 1208 for 12.8
    return f" and CUDA {number // 100}.{number % 100}" if isinstance(number, int) else ""
