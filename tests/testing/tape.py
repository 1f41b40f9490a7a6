"""A graph for tests without CUDA: a call's operations are kept, and made again on the same tensors.

Like a captured graph it runs no Python when it is replayed, and cannot hold what waits for the device.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")


class Tape:
    """Keeps operations; `capturing` holds the tape that is running."""

    capturing: Tape | None = None

    def __init__(self, _device: torch.device) -> None:
        self._kept: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    def aside(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def record(self, make):
        Tape.capturing = self
        try:
            with _Keeping(self._kept):
                return make()
        finally:
            Tape.capturing = None

    def replay(self) -> None:
        with torch.no_grad():
            for function, given, named, outputs in self._kept:
                again = [each for each in tree_flatten(function(*given, **named))[0] if isinstance(each, torch.Tensor)]
                for old, new in zip(outputs, again, strict=True):
                    if old.data_ptr() != new.data_ptr():  # a view of what was recorded is up to date already
                        old.copy_(new)


class _Keeping(TorchDispatchMode):
    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.__name__.split(".")[0] in WAITS:
            msg = "operation not permitted when stream is capturing"
            raise RuntimeError(msg)
        result = function(*args, **(kwargs or {}))
        outputs = [each for each in tree_flatten(result)[0] if isinstance(each, torch.Tensor)]
        self._kept.append((function, args, kwargs or {}, outputs))
        return result
