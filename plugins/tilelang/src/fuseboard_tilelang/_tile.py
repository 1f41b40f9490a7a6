"""What differs between the two targets, and all that does: where tiles live and how a tile's elements are walked.

On a GPU tiles are shared memory and fragments spread over a block's threads, walked in parallel. On TileLang's target
`c` the same tiles are local buffers walked in nested loops. Every kernel takes its allocators and its loops from here,
so that its tiling, its predicates, its masks and its softmax are one source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs

from fuseboard_tilelang import _package

__all__ = ["ACCUMULATOR", "GPU_DTYPES", "Arg", "Factory", "Program", "Tile", "tile"]

GPU_DTYPES = ("bfloat16", "float16")
CPU_DTYPE = "float32"
ACCUMULATOR = "float32"
Size: TypeAlias = "int | str"


@attrs.frozen
class Tile:
    """One target's way with tiles.

    Attributes:
        T: TileLang's language.
        cpu: Which target.
        dtype: Of the tensors.
        shared: Allocates a tile that all threads of a block see.
        fragment: Allocates a tile spread over a block's registers.
        parallel: Walks a tile's elements.
        strided: Declares a tensor of which only the last dimension is dense.
    """

    T: Any
    cpu: bool
    dtype: str
    shared: Callable[..., Any]
    fragment: Callable[..., Any]
    parallel: Callable[..., Any]


def tile(dtype: str, *, cpu: bool) -> Tile:
    """The way of one target.

    Raises:
        ValueError: The target has no kernels of that dtype.
    """
    if cpu and dtype != CPU_DTYPE:
        msg = f"dtype is {dtype!r}; the CPU form takes {CPU_DTYPE!r} only."
        raise ValueError(msg)
    if not cpu and dtype not in GPU_DTYPES:
        msg = f"dtype is {dtype!r}; the GPU form takes {' or '.join(map(repr, GPU_DTYPES))}. Cast, or compile_cpu."
        raise ValueError(msg)
    T = _package.load().language  # noqa: N806 - as all its users write it
    if cpu:
        return Tile(T, cpu, dtype, T.alloc_local, T.alloc_local, T.grid)
    return Tile(T, cpu, dtype, T.alloc_shared, T.alloc_fragment, T.Parallel)


@attrs.frozen
class Arg:
    """One tensor of a kernel.

    Attributes:
        shape: Its sizes: a number, or the name of a size that is known with the call.
        dtype: As torch names it, without `torch.`.
        written: Whether the kernel writes it.
        strided: Whether rows, heads and batches may lie anywhere, on the GPU.
    """

    shape: tuple[Size, ...]
    dtype: str
    written: bool = False
    strided: bool = False


@attrs.frozen(eq=False)
class Program:
    """A kernel before it is compiled.

    Attributes:
        name: The factory's.
        func: TileLang's `PrimFunc`.
        args: The tensors by name, in order.
        scalars: The numbers that follow them.
        cpu: Its target.
        passes: Settings of TileLang's passes, by the names of its `PassConfigKey`.
    """

    name: str
    func: Any
    args: Mapping[str, Arg]
    scalars: tuple[str, ...]
    cpu: bool
    passes: Mapping[str, Any]


Factory: TypeAlias = "Callable[..., Program]"
"""One of the five, such as `gemm_kernel`."""


def program(
    on: Tile,
    name: str,
    body: Callable[..., None],
    args: Mapping[str, Arg | None],
    scalars: Mapping[str, str] | None = None,
    passes: Mapping[str, Any] | None = None,
    sizes: Mapping[str, Any] | None = None,
) -> Program:
    """Trace a kernel's body.

    Args:
        on: The target.
        name: The factory's name.
        body: A function of all tensors, then all numbers. TileLang reads its source.
        args: The tensors by the body's names for them. None is one that this kernel does without: it has no such
            argument, and the body must not touch it.
        scalars: The numbers by name, with their dtypes.
        passes: Settings of TileLang's passes on the GPU.
        sizes: What stands for the named sizes in the body.
    """
    T = on.T  # noqa: N806
    known = dict(sizes or {})

    def declared(arg: Arg | None, label: str) -> Any:
        if arg is None:
            return None
        shape = tuple(size if isinstance(size, int) else known[size] for size in arg.shape)
        if not arg.strided or on.cpu:
            return T.Tensor(shape, arg.dtype)
        strides = [T.dynamic(f"{label}_{axis}", "int64") for axis in range(len(shape) - 1)]
        return T.StridedTensor(shape, (*strides, 1), arg.dtype)

    annotations = {label: declared(arg, label) for label, arg in args.items()}
    annotations |= {label: getattr(T, dtype) for label, dtype in (scalars or {}).items()}
    body.__annotations__ = annotations
    kept = {label: arg for label, arg in args.items() if arg is not None}
    settings = {"TIR_DISABLE_VECTORIZE": True} if on.cpu else dict(passes or {})
    return Program(name, T.prim_func(body), kept, tuple(scalars or ()), on.cpu, settings)
