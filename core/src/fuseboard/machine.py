"""What torch says of this machine: versions, devices, and the state of its attention that all threads share."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fuseboard.registry import first_line

__all__ = ["KINDS", "devices", "facts", "lacks", "sdpa"]

KINDS = ("cpu", "cuda", "xpu", "mps")
"""The kinds of device that `devices` lists."""


def facts(of: Iterable[torch.device] | None = None) -> dict[str, Any]:
    """Versions of torch and of what it was built for, the driver, and the devices (`of`, or all there are)."""
    wanted = list(devices() if of is None else of)
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        # Asking for the version loads the library: only where a device may use it.
        "cudnn": _cudnn() if any(each.type == "cuda" for each in wanted) else None,
        "driver": _driver(),
        "devices": [_device(each) for each in wanted],
    }


def devices() -> list[torch.device]:
    """The devices that a backend may be asked about here."""
    found = [torch.device("cpu")]
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            found += [torch.device(kind, index) for index in range(module.device_count())]
    if torch.backends.mps.is_available():
        found.append(torch.device("mps"))
    return found


def lacks(device: torch.device) -> bool:
    """Whether a device is known not to be here. A kind that `devices` does not list may be."""
    here = {(each.type, each.index or 0) for each in devices()}
    return device.type in KINDS and (device.type, device.index or 0) not in here


def sdpa() -> dict[str, Any]:
    """The state of torch's attention that all threads share."""
    switches = {
        "flash": "flash_sdp_enabled",
        "mem_efficient": "mem_efficient_sdp_enabled",
        "math": "math_sdp_enabled",
        "cudnn": "cudnn_sdp_enabled",
        "reduced_precision_math": "fp16_bf16_reduction_math_sdp_allowed",
    }
    # Not every version of torch has each.
    has = {name: ask for name, switch in switches.items() if (ask := getattr(torch.backends.cuda, switch, None))}
    state: dict[str, Any] = {name: bool(ask()) for name, ask in has.items()}
    order = getattr(torch._C, "_get_sdp_priority_order", None)
    if order is not None:
        state["priority"] = [int(each) for each in order()]
    return state


def _cudnn() -> int | str | None:
    try:
        return torch.backends.cudnn.version()  # type: ignore[no-any-return, no-untyped-call]
    except Exception as error:  # noqa: BLE001 - a library that does not fit this torch
        return first_line(error)


def _device(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        try:
            of = torch.cuda.get_device_properties(device)
        except Exception as error:  # noqa: BLE001 - a driver or a device out of order
            return {"device": str(device), "name": None, "capability": None, "error": first_line(error)}
        return {"device": str(device), "name": of.name, "capability": [of.major, of.minor], "memory": of.total_memory}
    if device.type == "cpu":
        return {"device": "cpu", "name": _processor(), "capability": torch.backends.cpu.get_cpu_capability()}
    return {"device": str(device), "name": device.type, "capability": None}


def _processor() -> str:
    """The CPU's name: a home on a network is shared by machines, and an illegal instruction is one only on some."""
    found = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def _driver() -> str | None:
    found = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", _text("/proc/driver/nvidia/version"))
    if found:
        return found[1]
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    version = ask() if ask is not None and torch.version.cuda else 0
    return f"CUDA {version // 1000}.{version % 1000 // 10}" if version else None


def _text(file: str) -> str:
    try:
        return Path(file).read_text(errors="replace") if sys.platform != "win32" else ""
    except OSError:
        return ""
