"""What all of a process shares, and a kernel must leave as it was: torch's numeric switches and default generators."""

# fuseboard: allow-file(the kit puts back what a kernel has changed)

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

__all__ = ["Switches", "held", "switches"]

Switches: TypeAlias = dict[str, Any]
"""What each switch is set to, by what a message calls it."""

MIXED = "a mix of torch's old and new switches"
"""In place of a value that torch refuses to tell, since its newer switches say something else."""

SEED = 7_919_203_117
"""Before a call: none that a kernel would set, so that to set one again shows."""


def _field(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


_cuda, _cudnn = torch.backends.cuda, torch.backends.cudnn
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "allow_tf32 of matmul": _field(_cuda.matmul, "allow_tf32"),
    "allow_tf32 of cudnn": _field(_cudnn, "allow_tf32"),
    "cudnn.benchmark": _field(_cudnn, "benchmark"),
    "cudnn.deterministic": _field(_cudnn, "deterministic"),
    "deterministic algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "flash sdp": (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    "memory-efficient sdp": (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    "math sdp": (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    "cudnn sdp": (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
}


def switches() -> Switches:
    """How they are set."""
    return {name: _read(get) for name, (get, _) in _SWITCHES.items()}


def _read(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except RuntimeError:
        return MIXED


def _set(wanted: Switches) -> None:
    """Set those that are set otherwise: some warn, even when they are set to what they are."""
    for name, value in wanted.items():
        get, put = _SWITCHES[name]
        if value != MIXED and _read(get) != value:
            put(value)


@contextlib.contextmanager
def held(wanted: Switches, device: torch.device) -> Iterator[Callable[[], list[str]]]:
    """Set switches and generators for the block, which is given what finds its changes; undo those afterwards.

    They are set first: a kernel at fault has been called before, and would change nothing any more.
    """
    generators = {"cpu": torch.default_generator}
    if device.type == "cuda":
        generators[str(device)] = torch.cuda.default_generators[device.index]
    saved = {name: each.get_state() for name, each in generators.items()}
    try:
        _set(wanted)
        for each in generators.values():
            each.manual_seed(SEED)
        seeded = {name: each.get_state() for name, each in generators.items()}

        def changes() -> list[str]:
            now = switches()
            found = [f"{name} ({value} to {now[name]})" for name, value in wanted.items() if now[name] != value]
            moved = [name for name, each in generators.items() if not torch.equal(each.get_state(), seeded[name])]
            return [*found, *(f"the default generator of {name}" for name in moved)]

        yield changes
    finally:
        _set(wanted)
        for name, each in generators.items():
            each.set_state(saved[name])
