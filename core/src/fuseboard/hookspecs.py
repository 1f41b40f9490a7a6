"""The contract of a backend plugin: nine hooks and two markers, nothing else.

One entry point in group `fuseboard.backends` names one backend and points at one module (or object) that has some of
these functions, each marked `@fuseboard.hookimpl`. `info`, `constraints` and `kernel` are required; for the others a
missing hook means the cautious answer. An implementation may take fewer arguments than its specification. Hooks are
asked when the plugin is loaded, when a device is probed or when a chain is built, never per attention call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import torch

    from fuseboard.backend import BackendInfo, Exactness, Kernel
    from fuseboard.call import Call, Sizes
    from fuseboard.constraints import Constraints, KnownBad

__all__ = ["hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("fuseboard")
hookimpl = pluggy.HookimplMarker("fuseboard")
"""Marks a plugin's implementation of a hook."""

REQUIRED = ("info", "constraints", "kernel")


# ---- asked once, when the plugin is loaded: no kernel package may be imported here


@hookspec(firstresult=True)
def info() -> BackendInfo:  # type: ignore[empty-body]
    """Say what the backend is. Required."""


@hookspec(firstresult=True)
def constraints() -> Constraints:  # type: ignore[empty-body]
    """Give its limits and guards as data. Required."""


@hookspec(firstresult=True)
def known_bad() -> Iterable[KnownBad]:  # type: ignore[empty-body]
    """Give combinations known to be wrong, each with a link. Missing: none are known."""


@hookspec(firstresult=True)
def install_line(torch_version: str) -> str:  # type: ignore[empty-body]
    """Give the command that installs its kernel and keeps the installed torch. Missing: its own distribution's."""


# ---- asked once per device, the first time a policy wants the backend there


@hookspec(firstresult=True)
def probe(device: torch.device) -> str | None:
    """Give a reason not to run on `device`, or None. Missing: `info().requires` and the self-test decide."""


@hookspec(firstresult=True)
def kernel(device: torch.device) -> Kernel:  # type: ignore[empty-body]
    """Import the kernel package and return the kernel for `device`. Required; the one place that imports it."""


@hookspec(firstresult=True)
def tolerance(dtype: torch.dtype) -> float:  # type: ignore[empty-body]
    """Give the largest absolute self-test error for inputs from N(0, 1). Missing: the core's strict default."""


# ---- asked when a chain is built, once per kind of call, or (rank) per combination of sizes


@hookspec(firstresult=True)
def exactness(call: Call) -> Exactness:  # type: ignore[empty-body]
    """Say whether the numbers are exact but for rounding. Missing: approximate."""


@hookspec(firstresult=True)
def rank(call: Call, sizes: Sizes) -> float:  # type: ignore[empty-body]
    """Estimate the microseconds of such a call, launch included; only the order among backends matters.

    Asked for each new combination of sizes, since what is fastest depends on them: a launch dominates a small call,
    reading the keys a decode step, arithmetic a prefill. Missing: tried after all that say something.
    """
