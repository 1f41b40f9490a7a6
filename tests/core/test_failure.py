from __future__ import annotations

import asyncio
import sys

import pytest
import torch

from fuseboard.failure import Meaning, classify

ADVICE = """CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be
incorrect. For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."""


class AcceleratorError(RuntimeError):
    """As torch.AcceleratorError: an error with the device's own number."""

    def __init__(self, text, code):
        super().__init__(text)
        self.error_code = code


def raised(error, *, cause=None, while_handling=None):
    """The error as it is after it was raised from a cause, or while another was handled."""
    try:
        if while_handling is not None:
            try:
                raise while_handling
            except type(while_handling):
                raise error from cause
        raise error from cause
    except BaseException as found:
        return found


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; ...)"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 99 bytes."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("HIP out of memory."),
    OSError(12, "Cannot allocate memory"),
]
BROKEN = [
    RuntimeError("Expected head_dim to be a multiple of 8"),
    ValueError("out of range"),
    AssertionError(),
    NotImplementedError("no kernel image is available"),
    RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376"),
    ValueError("this text says out of memory and the type does not"),
    AcceleratorError("CUDA error: invalid argument", 1),
    # As torch words it; the advice at its end comes with every error of a device.
    RuntimeError(f"CUDA error: invalid argument\n{ADVICE}"),
    AcceleratorError(f"CUDA error: operation not permitted when stream is capturing\n{ADVICE}", 900),
    RuntimeError(f"CUDA error: operation failed due to a previous error during capture\n{ADVICE}"),
    AcceleratorError("CUDA error: invalid configuration argument", 9),
    RuntimeError("Triton Error [CUDA]: invalid argument"),
    KeyError("x"),
    StopIteration(),
]
STICKY = [
    AcceleratorError("CUDA error: an illegal memory access was encountered", 700),
    AcceleratorError("no words", 700),
    AcceleratorError("no words", 710),
    AcceleratorError("no words", 719),
    RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError(f"CUDA error: device-side assert triggered\n{ADVICE}"),
    AcceleratorError(f"CUDA error: device-side assert triggered\n{ADVICE}", 710),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("Triton Error [CUDA]: misaligned address"),
    RuntimeError("HIP error: HSA_STATUS_ERROR_EXCEPTION: an HSAIL operation resulted in a hardware exception"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
def test_out_of_memory_is_known_in_every_form(error):
    assert classify(error) is Meaning.OUT_OF_MEMORY


@pytest.mark.parametrize("error", BROKEN, ids=repr)
def test_any_other_error_means_that_the_backend_is_broken(error):
    assert classify(error) is Meaning.BROKEN


@pytest.mark.parametrize("error", STICKY, ids=repr)
def test_errors_after_which_the_device_is_lost_are_sticky(error):
    assert classify(error) is Meaning.STICKY


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(), GeneratorExit(), asyncio.CancelledError()], ids=repr
)
def test_what_is_no_exception_is_cancellation(error):
    assert classify(error) is Meaning.CANCELLED


@pytest.mark.parametrize("inner", [OUT_OF_MEMORY[0], STICKY[0], asyncio.CancelledError()], ids=repr)
def test_an_error_means_what_lies_under_it(inner):
    expected = classify(inner)

    assert classify(raised(RuntimeError("kernel failed"), cause=inner)) is expected
    assert classify(raised(RuntimeError("kernel failed"), while_handling=inner)) is expected
    twice = raised(ValueError("outer"), cause=raised(RuntimeError("middle"), while_handling=inner))
    assert classify(twice) is expected


def test_a_hidden_context_tells_too():
    error = raised(RuntimeError("kernel failed"), while_handling=MemoryError())
    error.__suppress_context__ = True

    assert classify(error) is Meaning.OUT_OF_MEMORY


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_a_group_means_what_its_members_mean():
    group = ExceptionGroup("several", [ValueError(), ExceptionGroup("inner", [KeyError(), MemoryError()])])  # noqa: F821

    assert classify(group) is Meaning.OUT_OF_MEMORY
    assert classify(ExceptionGroup("several", [ValueError()])) is Meaning.BROKEN  # noqa: F821
    assert classify(BaseExceptionGroup("several", [KeyboardInterrupt()])) is Meaning.CANCELLED  # noqa: F821


def test_what_the_caller_was_handling_says_nothing_about_the_kernel():
    handled = raised(torch.OutOfMemoryError("CUDA out of memory"), while_handling=KeyError())
    error = raised(ValueError("head_dim"), while_handling=handled)

    assert error.__context__ is handled
    assert classify(error) is Meaning.OUT_OF_MEMORY
    assert classify(error, handled) is Meaning.BROKEN
    assert classify(raised(MemoryError(), while_handling=handled), handled) is Meaning.OUT_OF_MEMORY


def test_a_chain_that_bites_its_tail_ends():
    one, two = ValueError(), KeyError()
    one.__cause__, two.__context__ = two, one

    assert classify(one) is Meaning.BROKEN


def test_an_error_whose_text_or_number_makes_no_sense_means_broken():
    class Odd(RuntimeError):
        error_code = ()

        def __str__(self):
            raise ValueError

    assert classify(Odd()) is Meaning.BROKEN


def test_the_exception_by_which_checkpointing_stops_is_no_failure():
    from torch.utils import checkpoint

    assert classify(checkpoint._StopRecomputationError()) is Meaning.CANCELLED


class Odd(Exception):
    """As exceptions of other packages may be: `exceptions` is no tuple, and a property raises."""

    exceptions = None

    @property
    def error_code(self):
        raise LookupError


def test_an_exception_with_odd_attributes_means_broken():
    assert classify(Odd()) is Meaning.BROKEN
    assert classify(raised(RuntimeError("x"), cause=Odd())) is Meaning.BROKEN
