"""Launching a Triton kernel by the compiled kernel that the last launch of its kind found.

`kernel[grid](...)` looks at every argument to find what it compiled for arguments like these, which takes the host
longer than the device has to do. What it found is kept here by what the search depends on, and launched by itself, as
Triton's own tutorials do. Where that does not work, as in the interpreter, every launch is the usual one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["Launcher", "compiling", "on", "power_of_two"]

_ALIGNMENT = 16
_MOST = 256
_here = threading.local()


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A GPU is the current device for a block, since Triton launches there; elsewhere nothing happens."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def power_of_two(size: int) -> int:
    """The least that is not below `size`: what a Triton block may have as its width."""
    return 1 << (size - 1).bit_length()


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """For a block, in this thread: kernels that were never launched are compiled, and not launched."""
    _here.compiling = True
    try:
        yield
    finally:
        _here.compiling = False


class Launcher:
    """One kernel on one device, which is the current one whenever it is launched.

    Attributes:
        direct: Whether compiled kernels are launched by themselves; None until it was tried.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        """Prepare.

        Args:
            kernel: A function of `triton.jit`, whose constants come last.
            **options: How to compile it, such as `num_warps`.
        """
        self.direct: bool | None = None
        self._kernel, self._options = kernel, options
        self._constants = sum(each.is_constexpr for each in getattr(kernel, "params", ()))
        self._taken: int | None = None  # how many of the arguments a compiled kernel takes; None for all
        self._found: dict[Any, Any] = {}

    def __call__(self, grid: tuple[int, int], *arguments: Any) -> None:
        """Launch.

        Args:
            grid: How many programs.
            *arguments: All that the kernel takes, in its order, constants included; numbers are Python's.
        """
        if self.direct is False:
            self._kernel[grid](*arguments, **self._options)
            return
        key = tuple(
            (each.dtype, each.data_ptr() % _ALIGNMENT) if isinstance(each, Tensor) else each for each in arguments
        )
        found = self._found.get(key)
        if found is None:
            self._first(key, grid, arguments)
        elif self.direct:
            found[grid[0], grid[1], 1](*arguments[: self._taken])
        elif not self._try(found, grid, arguments):
            self._kernel[grid](*arguments, **self._options)

    def _first(self, key: Any, grid: tuple[int, int], arguments: tuple[Any, ...]) -> None:
        """The usual launch, which finds the compiled kernel."""
        if getattr(_here, "compiling", False):
            self._kernel.warmup(*arguments, grid=grid, **self._options)
            return
        found = self._kernel[grid](*arguments, **self._options)
        if not hasattr(found, "packed_metadata"):
            self.direct = None if found is None else False  # the interpreter gives nothing, and is never slower
            return
        if len(self._found) >= _MOST:
            self._found.clear()
        self._found[key] = found

    def _try(self, found: Any, grid: tuple[int, int], arguments: tuple[Any, ...]) -> bool:
        """Whether a compiled kernel can be launched by itself: with all arguments, or in older Tritons with fewer.

        One that takes another number of arguments says so before it launches anything.
        """
        for taken in (None, len(arguments) - self._constants):
            try:
                found[grid[0], grid[1], 1](*arguments[:taken])
            except (TypeError, ValueError, AttributeError):
                continue
            self._taken, self.direct = taken, True
            return True
        self.direct = False
        return False
