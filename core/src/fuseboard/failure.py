"""What an exception from a kernel means: fall back, or pass it up untouched."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator

import torch

__all__ = ["Meaning", "classify"]


class Meaning(enum.Enum):
    """What to do about an exception."""

    BROKEN = "broken"
    """The backend cannot do this kind of call: mark it, and let the next one answer."""
    OUT_OF_MEMORY = "out of memory"
    """Passed up: the next backend may need more, and the engine may have a plan (a smaller batch)."""
    CANCELLED = "cancelled"
    """Passed up: somebody stopped the work."""
    STICKY = "sticky device error"
    """Passed up: the device's context is gone, whatever is called next fails too."""


# Texts of allocators that raise a plain RuntimeError: CUDA and HIP, MPS, the CPU allocator, cuBLAS' workspace. Triton's
# "out of resource: shared memory" is none of them: a kernel that does not fit the device is broken.
_MEMORY_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "memoryallocation",
)

# The CUDA errors after which every call of the process fails (cudaError_t, "the process must be terminated"): by number
# where torch.AcceleratorError carries one, by text elsewhere. Invalid argument (1) and invalid configuration (9) are
# not: seen on a GPU, the next call works.
_STICKY_CODES = frozenset({214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721})
_ADVICE = "enable device-side assertions"
_STICKY_TEXTS = (
    "illegal memory access",
    "illegal address",
    "device-side assert",
    "unspecified launch failure",
    "misaligned address",
    "illegal instruction",
    "invalid address space",
    "invalid program counter",
    "hardware stack error",
    "launch timed out",
    "uncorrectable ecc",
    "uncorrectable nvlink",
    "device is lost",
    "device lost",
    "gpu is lost",
    "fallen off the bus",
    "hsa_status_error_exception",
    "memory access fault",
)


def classify(error: BaseException, handled: BaseException | None = None) -> Meaning:
    """Say what `error`, raised by a kernel, means; also when the telling exception is its cause or context.

    Args:
        error: What the kernel raised.
        handled: The exception that the *caller* was handling when it called: Python makes it the context of whatever is
            raised, but it says nothing about the kernel. An engine that retries after running out of memory is such a
            caller.
    """
    for each in _chain(error, handled):
        if not isinstance(each, Exception) or _is_end_of_recomputation(each):
            return Meaning.CANCELLED
        if _is_out_of_memory(each):
            return Meaning.OUT_OF_MEMORY
        if _is_sticky(each):
            return Meaning.STICKY
    return Meaning.BROKEN


def _chain(error: BaseException, handled: BaseException | None) -> Iterator[BaseException]:
    """The exception and what lies under it: causes, contexts, and the members of groups."""
    seen: set[int] = set() if handled is None else {id(handled)}
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        members = _fact(each, "exceptions")
        waiting += [each.__context__, each.__cause__]
        if isinstance(members, (tuple, list)):
            waiting += [member for member in members if isinstance(member, BaseException)]


def _is_end_of_recomputation(error: Exception) -> bool:
    """Gradient checkpointing stops its second forward by raising from a hook, in the midst of whichever kernel runs."""
    module = sys.modules.get("torch.utils.checkpoint")
    kind = getattr(module, "_StopRecomputationError", None)
    return kind is not None and isinstance(error, kind)


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(each in _text(error) for each in _MEMORY_TEXTS)


def _is_sticky(error: Exception) -> bool:
    code = _fact(error, "error_code")
    if isinstance(code, int) and code in _STICKY_CODES:
        return True
    # Every CUDA error of torch comes with the advice to "enable device-side assertions", and most are none.
    text = _text(error).replace(_ADVICE, "")
    return any(each in text for each in _STICKY_TEXTS)


def _fact(error: BaseException, name: str) -> object:
    """An attribute of an exception; other packages' classes may have anything under that name."""
    try:
        return getattr(error, name, None)
    except Exception:  # noqa: BLE001 - a property that raises says nothing
        return None


def _text(error: Exception) -> str:
    try:
        return str(error).lower()
    except Exception:  # noqa: BLE001 - an exception whose own text raises says nothing
        return ""
