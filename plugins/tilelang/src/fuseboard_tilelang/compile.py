"""Kernels made of programs, checked at every call, and kept: for TileLang's target `c`, or for a GPU.

TileLang's own call checks dtypes, ranks and fixed sizes. It does not check that two tensors agree on a size known only
with the call, and then writes out of bounds; a None in a tensor's place ends the process. `Compiled` checks them, once
for each kind of call, and leaves out TileLang's own checks where it can.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fuseboard_tilelang import _package
from fuseboard_tilelang._tile import Arg, Factory, Program

__all__ = ["Compiled", "compile_cpu", "compile_gpu", "lowered", "made", "rows_are_whole", "target_of"]

ALIGNMENT = 16  # bytes, of addresses and strides: loads are as wide, and the hardware's copies of tiles ask for it
CPU_FLAGS = ["-O2"]  # without any, g++ does not optimise: 6 times slower
KEPT = 512  # kinds of calls that a kernel knows to be right: shapes, strides and dtypes of all its tensors

_kept: dict[tuple[Any, ...], Compiled] = {}
_lock = threading.Lock()


class Compiled:
    """A kernel. It is called with its tensors in order, then its numbers, and writes what it is there to write.

    Args:
        program: What it was made of.
        kernel: TileLang's.
    """

    def __init__(self, program: Program, kernel: Any) -> None:
        self.program = program
        self._kernel = kernel
        self._call = _entry(kernel)
        self._args = tuple(program.args.items())
        self._count = len(self._args)
        self._dtypes = {label: getattr(torch, arg.dtype) for label, arg in self._args}
        self._written = tuple(place for place, (_, arg) in enumerate(self._args) if arg.written)
        self._device = "cpu" if program.cpu else "cuda"
        self._right: dict[Any, bool] = {}

    def __repr__(self) -> str:
        tensors = ", ".join(f"{label} {_shape(arg)}" for label, arg in self._args)
        return f"<{self.program.name} for {self._device}: {', '.join((tensors, *self.program.scalars))}>"

    @property
    def source(self) -> str:
        """The source that TileLang generated for the target."""
        text: str = self._kernel.get_kernel_source()
        return text

    def __call__(self, *given: Any) -> None:
        """Check everything, then run it on the current stream of the tensors' device.

        Raises:
            TypeError: Too many or too few arguments, or one that is no tensor.
            ValueError: A tensor of another dtype, shape, layout or device, sizes that disagree, or one that needs a
                gradient.
        """
        tensors = given[: self._count]
        kind = self._kind(given)
        empty = None if kind is None else self._right.get(kind)
        if empty is None:
            self._check(given, self._count)
            empty = not all(tensor.numel() for tensor in tensors)
            if kind is not None:
                if len(self._right) >= KEPT:
                    self._right.clear()
                self._right[kind] = empty
        if empty:
            for place in self._written:  # nothing to read: what is written is nothing, or attention to no keys
                tensors[place].zero_()
        elif self.program.cpu or tensors[0].device.index == torch.cuda.current_device():
            self._call(*given)
        else:
            with torch.cuda.device(tensors[0].device):
                self._call(*given)
        for place in self._written:
            tensor = tensors[place]
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)  # TileLang writes without saying so

    def _kind(self, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """All that the checks look at; None where one of the tensors is none, and where it has no strides."""
        grad = torch.is_grad_enabled()
        try:
            return (
                *[
                    (
                        type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(),
                        tensor.data_ptr() % ALIGNMENT, grad and tensor.requires_grad,
                    )
                    for tensor in given[: self._count]
                ],
                *map(type, given[self._count :]),
            )  # fmt: skip
        except (AttributeError, RuntimeError):
            return None

    def _check(self, given: tuple[Any, ...], count: int) -> None:
        if len(given) != count + len(self.program.scalars):
            names = ", ".join((*(label for label, _ in self._args), *self.program.scalars))
            msg = f"{self.program.name} was given {len(given)} arguments; expected {names}."
            raise TypeError(msg)
        known: dict[str, tuple[int, str]] = {}
        device: torch.device | None = None
        grad = torch.is_grad_enabled()
        for (label, arg), tensor in zip(self._args, given, strict=False):
            if not isinstance(tensor, Tensor):
                msg = f"{self.program.name}: {label} is a {type(tensor).__name__}; expected a torch.Tensor."
                raise TypeError(msg)
            self._check_kind(label, tensor, device, grad)
            device = tensor.device
            self._check_shape(label, arg, tensor.shape, known)
            self._check_layout(label, arg, tensor)
        for label, number in zip(self.program.scalars, given[count:], strict=True):
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                msg = f"{self.program.name}: {label} is a {type(number).__name__}; expected a number."
                raise TypeError(msg)

    def _check_kind(self, label: str, tensor: Tensor, device: torch.device | None, grad: bool) -> None:
        name = self.program.name
        if tensor.dtype != self._dtypes[label]:
            msg = f"{name}: {label} has dtype {tensor.dtype}; expected {self._dtypes[label]}."
            raise ValueError(msg)
        if tensor.device.type != self._device:
            msg = f"{name}: {label} is on {tensor.device}; this kernel was compiled for {self._device}."
            raise ValueError(msg)
        if device is not None and tensor.device != device:
            msg = f"{name}: {label} is on {tensor.device} and the tensors before it on {device}; move them together."
            raise ValueError(msg)
        if grad and tensor.requires_grad:
            msg = f"{name}: {label} needs a gradient, and these kernels have no backward; call under torch.no_grad()."
            raise ValueError(msg)

    def _check_shape(self, label: str, arg: Arg, shape: torch.Size, known: dict[str, tuple[int, str]]) -> None:
        name = self.program.name
        if len(shape) != len(arg.shape):
            msg = f"{name}: {label} has shape {tuple(shape)}; expected {_shape(arg)}."
            raise ValueError(msg)
        for size, want in zip(shape, arg.shape, strict=True):
            if isinstance(want, str):
                first, owner = known.setdefault(want, (size, label))
                if size != first:
                    msg = f"{name}: {label} has {want} = {size} and {owner} has {want} = {first}, as {_shape(arg)}."
                    raise ValueError(msg)
            elif size != want:
                msg = f"{name}: {label} has shape {tuple(shape)}; expected {_shape(arg)}."
                raise ValueError(msg)

    def _check_layout(self, label: str, arg: Arg, tensor: Tensor) -> None:
        name, gpu = self.program.name, not self.program.cpu
        if not (rows_are_whole(tensor) if arg.strided and gpu else tensor.is_contiguous()):
            rows = f" or, but for the last dimension, any strides of whole {ALIGNMENT} bytes" if arg.strided else ""
            msg = (
                f"{name}: {label} has strides {tensor.stride()}; expected a contiguous tensor{rows}. Call contiguous()."
            )
            raise ValueError(msg)
        if gpu and tensor.data_ptr() % ALIGNMENT:
            msg = f"{name}: {label} starts at an address that is no multiple of {ALIGNMENT} bytes; clone it."
            raise ValueError(msg)


def _entry(kernel: Any) -> Callable[..., Any]:
    """A call of TileLang's without its own looks at each tensor, which `Compiled` has checked: half of its time.

    Its C++ wrapper has an option for that. For a GPU it calls the function it compiled, which checks what it is given
    once more, by way of Python that looks it up and copies the arguments; the function itself is what that ends in.
    """
    call: Callable[..., Any] = kernel.torch_function
    if "skip_tensor_validation" in inspect.signature(call).parameters:
        return partial(call, skip_tensor_validation=True)
    if kernel.execution_backend == "tvm_ffi" and hasattr(kernel.adapter, "get_exportable_executable"):
        made = kernel.adapter.get_exportable_executable()
        function: Callable[..., Any] = (made.jit() if hasattr(made, "jit") else made)["main"]
        return function
    return call


def _shape(arg: Arg) -> str:
    return f"({', '.join(map(str, arg.shape))})"


def rows_are_whole(tensor: Tensor) -> bool:
    """Whether the last dimension is dense, and the others lie apart by whole units of what is loaded at once.

    Also those of one element, whose stride means nothing to torch, and which the hardware's copy checks all the same.
    """
    *strides, last = tensor.stride()
    unit = ALIGNMENT // tensor.element_size()
    return last == 1 and all(stride > 0 and stride % unit == 0 for stride in strides)


def compile_cpu(factory: Factory, *args: Any, **kwargs: Any) -> Compiled:
    """The kernel's CPU form, made once and kept: all its tensors are contiguous float32 ones, lengths int32.

    It is there to check the algorithm without a GPU, and for machines that have none; it is no fast one.

    Args:
        factory: One of the five, such as `gemm_kernel`.
        args: Its sizes.
        kwargs: Its options.

    Raises:
        ImportError: There is no TileLang here, or no C++ compiler.
    """
    key = (factory, args, tuple(sorted(kwargs.items())), "c")
    found = _kept.get(key)
    if found is not None:
        return found
    problem = _package.cpu_problem()
    if problem is not None:
        raise ImportError(problem, name="tilelang")
    with _lock:
        if key not in _kept:
            program = factory(*args, cpu=True, dtype="float32", **kwargs)
            _kept[key] = Compiled(program, made(program, "c", execution_backend="cython", compile_flags=CPU_FLAGS))
        return _kept[key]


def compile_gpu(factory: Factory, *args: Any, target: str | None = None, **kwargs: Any) -> Compiled:
    """The kernel for a GPU, made once and kept.

    Args:
        factory: One of the five.
        args: Its sizes.
        target: Such as `sm_90a`; None for the current device.
        kwargs: Its options; `dtype` among them.

    Raises:
        ImportError: There is no TileLang here, or no compiler for GPUs.
        ValueError: No such dtype on a GPU.
    """
    arch = target or target_of(None)
    key = (factory, args, tuple(sorted(kwargs.items())), arch)
    found = _kept.get(key)
    if found is not None:
        return found
    problem = _package.gpu_problem()
    if problem is not None:
        raise ImportError(problem, name="tilelang")
    with _lock:
        if key not in _kept:
            program = factory(*args, **kwargs)
            backend = "nvrtc" if _package.nvcc() is None else "tvm_ffi"
            _kept[key] = Compiled(program, made(program, _cuda(arch), execution_backend=backend))
        return _kept[key]


def lowered(factory: Factory, *args: Any, target: str = "sm_90a", **kwargs: Any) -> str:
    """The CUDA source of a kernel, for which neither a GPU nor a compiler is needed."""
    tilelang = _package.load()
    program = factory(*args, **kwargs)
    where = tilelang.tvm.target.Target(_cuda(target))
    with where, tilelang.tvm.transform.PassContext(opt_level=3, config=_passes(program)):
        text: str = tilelang.lower(program.func, target=where).kernel_source
    return text


def target_of(device: torch.device | int | None) -> str:
    """What a device's kernels are compiled for: from Hopper on its own instructions are in a target of their own."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"  # noqa: PLR2004


def _cuda(arch: str) -> dict[str, str]:
    return {"kind": "cuda", "arch": arch}


def _passes(program: Program) -> dict[Any, Any]:
    keys = _package.load().PassConfigKey
    return {keys[name].value: value for name, value in program.passes.items()}


def made(program: Program, target: Any, **options: Any) -> Any:
    """TileLang's kernel for a target as TileLang names it, unchecked and not kept."""
    return _package.load().compile(program.func, target=target, pass_configs=_passes(program), **options)
