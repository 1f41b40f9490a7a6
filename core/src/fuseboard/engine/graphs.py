"""CUDA graphs of one model on one device: the kernels of a step are launched once, recorded, and replayed.

A replay launches the kernels that the eager step launches, with the same arguments, so its numbers are the eager ones
bit for bit, and it may be on by default. What it saves is the host's time to launch them: thousands of small kernels a
token in a GPU decoder. A graph holds addresses: of the weights (`signature` tells when they moved), of its inputs, and
of its outputs, which the next replay overwrites.

A capture that fails costs one log line. The step is eager from then on, and nothing of it remains: not in the request's
random numbers, not in the model's state, not in the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import attrs
import torch
from torch import Tensor, nn

from fuseboard.failure import Meaning, classify
from fuseboard.registry import first_line

__all__ = ["Graph", "Graphs", "Pool", "Signature", "signature", "unusable"]

T = TypeVar("T")
log = logging.getLogger("fuseboard")

# torch's captures share state of the process (the default generator until 2.12, the allocator), whatever their mode.
_one_capture = threading.RLock()
_SPARE = 4


def unusable(device: torch.device | str) -> str | None:
    """Why graphs cannot be used on a device, or None. They are for NVIDIA: HIP's are not verified here."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"{device.type} has no CUDA graphs"
    if torch.version.hip is not None:
        return "graphs are not verified on ROCm"
    return None if torch.cuda.is_available() else "there is no CUDA device"


class Signature:
    """Where the tensors of some modules lie, to be compared from step to step: graphs hold these addresses.

    Comparing walks a list made once, of the dictionaries that hold parameters and buffers: so one that was replaced,
    moved, or whose `.data` was swapped is seen. A submodule that is added or taken out later is not. The tensors are
    kept alive.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._held: list[dict[str, Any]] = []
        self._names: list[str] = []
        for module in modules:
            for each in module.modules():
                for held in (each._parameters, each._buffers):
                    names = [name for name, tensor in held.items() if tensor is not None]
                    self._held += [held] * len(names)
                    self._names += names
        self._tensors: list[Tensor] = [held[name] for held, name in zip(self._held, self._names, strict=True)]
        self._before = self._now()

    def changed(self) -> bool:
        """Whether anything lies elsewhere than when this was made."""
        # Asked at every step while the device has nothing to do: `map` of C functions takes a third of a loop's time.
        same = all(map(operator.is_, map(dict.get, self._held, self._names), self._tensors))
        return not same or self._now() != self._before

    def _now(self) -> tuple[list[int], list[torch.dtype], list[tuple[int, ...]]]:
        # Strides: a transposed weight lies where it lay. A device has addresses of its own.
        tensors = self._tensors
        return list(map(Tensor.data_ptr, tensors)), list(map(_DTYPE, tensors)), list(map(Tensor.stride, tensors))


_DTYPE: Callable[[Tensor], torch.dtype] = operator.attrgetter("dtype")


def signature(*modules: nn.Module) -> Signature:
    """Where the weights and buffers of these modules lie now."""
    return Signature(modules)


class Pool:
    """Memory that graphs share, and the stream that they are captured on, which is nobody else's.

    A captured matrix product holds the address of its workspace, which torch keeps for each stream and lets go when it
    likes: for all streams when inductor records a graph of its own, for a graph's stream when a graph ends
    (https://github.com/pytorch/pytorch/issues/193402). Replays would then read and write what is not theirs. On a
    stream on which nothing runs but captures, the workspace is made inside the capture, and so lies in this memory; and
    one graph that is never replayed keeps this memory, and usable for captures, while all others come and go.

    Attributes:
        device: Where.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle: Any = None
        self.stream: Any = None
        self._keeper: torch.cuda.CUDAGraph | None = None

    def prepare(self) -> None:
        """Take the stream and the memory, once, on the current device."""
        if self._keeper is not None:
            return
        torch.zeros(1, device=self.device)
        self.stream, self.handle = _own_stream(self.device), torch.cuda.graph_pool_handle()
        keeper = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self.record(keeper, lambda: torch.zeros(1, device=self.device))
        self._keeper = keeper

    def record(self, graph: torch.cuda.CUDAGraph, fn: Callable[[], T]) -> T:
        """Capture `fn` on this stream and into this memory."""
        collecting = gc.isenabled()
        gc.disable()  # what is finalised during a capture may end it: a module of kernels that is unloaded
        try:
            with torch.cuda.stream(self.stream):
                # `thread_local`: what other threads do meanwhile, such as other requests, does not end it.
                graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
                try:
                    return fn()
                finally:
                    graph.capture_end()
        finally:
            if collecting:
                gc.enable()


def _own_stream(device: torch.device) -> Any:
    """A stream that is nobody else's: torch's come in turn from 32 that the process shares. It is never given back."""
    torch.cuda.current_stream(device).query()  # the device's context is this thread's from here on
    made, non_blocking = ctypes.c_void_p(), 1
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        if driver.cuStreamCreate(ctypes.byref(made), non_blocking) == 0 and made.value:
            return torch.cuda.ExternalStream(made.value, device=device)  # type: ignore[no-untyped-call]
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@attrs.define(eq=False)
class Graph(Generic[T]):
    """One captured function.

    Attributes:
        outputs: What the function returned while it was captured. Every replay writes these very tensors.
        pool: Where they lie.
    """

    outputs: T
    pool: Pool
    _graph: torch.cuda.CUDAGraph
    _owner: Graphs

    def replay(self) -> T:
        """Launch its kernels on the current stream of its device; gives `outputs`.

        Streams that replay graphs of one model have to wait for each other, as for everything that they share.
        """
        with torch.cuda.device(self._owner.device):
            return self.launch()

    def launch(self) -> T:
        """`replay`, where its device is the current one already."""
        self._graph.replay()
        self._owner.replays += 1
        return self.outputs


class Graphs:
    """The graphs of one model on one device, with a stream and a generator of their own.

    Attributes:
        device: Where. Captures and replays happen there, whatever device is current.
        generator: What captured functions draw from; `drawing` lends it a request's state. Replaced after a failure:
            read it anew each time.
        captured: How many graphs were captured.
        replays: How often one was replayed.
        failure: Why a capture failed, in words; then nothing is captured any more.
        lock: Held by whoever uses the model's graphs: their memory and their generator are one request's at a time.
            A `turn` holds it.
    """

    def __init__(self, device: torch.device | str) -> None:
        """Prepare, without capturing.

        Raises:
            RuntimeError: There are no graphs on such a device; `unusable` says so beforehand.
        """
        why = unusable(device)
        if why is not None:
            msg = f"no graphs on {device}: {why}."
            raise RuntimeError(msg)
        device = torch.device(device)
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self.captured, self.replays = 0, 0
        self.failure: str | None = None
        self.lock = threading.RLock()
        with torch.cuda.device(self.device):
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self.generator = torch.Generator(self.device)
        self._last = torch.cuda.Event()  # type: ignore[no-untyped-call] # where the last turn ended
        self._pool, self._spare = Pool(self.device), list[Pool]()

    def pool(self) -> Pool:
        """Memory apart from the model's own, for graphs that go before others do or are replayed in any order."""
        with self.lock:
            return self._spare.pop() if self._spare else Pool(self.device)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """For a step: one at a time, after the one before, on whichever stream that was; on the graphs' device."""
        with self.lock, torch.cuda.device(self.device):
            self.follow()
            try:
                yield
            finally:
                self._last.record(torch.cuda.current_stream(self.device))

    def follow(self) -> None:
        """What the current stream does next comes after the last `turn`."""
        torch.cuda.current_stream(self.device).wait_event(self._last)

    def capture(
        self, fn: Callable[[], T], state: Iterable[Tensor] = (), *, pool: Pool | None = None
    ) -> Graph[T] | None:
        """Run `fn` once, put back what it changed, and capture it.

        Args:
            fn: The step, over tensors that stay where they are. It waits for nothing, and draws from `generator` alone.
            state: The tensors that `fn` writes and that outlive it, such as a cache: as they were, afterwards.
            pool: From `pool()`, in place of the model's own. Graphs of one pool must be replayed in the order in which
                they were captured, since one may use memory that an earlier one has done with.

        Returns:
            The graph; None when a capture has failed, this one or an earlier one: then run `fn` eagerly.
        """
        if self.failure is not None:
            return None
        with self.lock, _one_capture, torch.cuda.device(self.device):
            kept = [(each, each.detach().clone()) for each in state]
            drawn = self.generator.get_state()
            here = torch.cuda.current_stream(self.device)
            self._stream.wait_stream(here)
            try:
                # Handles, workspaces and kernels that compile at their first launch are made now: a capture forbids it.
                with torch.cuda.stream(self._stream):
                    fn()
            finally:
                here.wait_stream(self._stream)
                for tensor, before in kept:
                    # What was made in inference mode may be written in that mode only.
                    with torch.no_grad(), torch.inference_mode(mode=tensor.is_inference()):
                        tensor.copy_(before)
                self.generator.set_state(drawn)
            return self._record(fn, drawn, self._pool if pool is None else pool)

    def _record(self, fn: Callable[[], T], drawn: Tensor, pool: Pool) -> Graph[T] | None:
        graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream(self.device)
        try:
            pool.prepare()
            pool.stream.wait_stream(here)
            with torch.cuda.stream(pool.stream):
                if hasattr(graph, "register_generator_state"):
                    graph.register_generator_state(self.generator)
            outputs = pool.record(graph, fn)
        except BaseException as error:
            self._recover(error, drawn, pool)
            if not isinstance(error, Exception) or classify(error) is Meaning.STICKY:
                raise
            return None
        finally:
            # The capture begins with kernels that set the generator's seed and offset, on the capture's stream: a first
            # replay that came before them would draw from offset 0.
            if pool.stream is not None:
                here.wait_stream(pool.stream)
        self.generator.set_state(drawn)
        self.captured += 1
        return Graph(outputs, pool, graph, self)

    def _recover(self, error: BaseException, drawn: Tensor, pool: Pool) -> None:
        """After a capture that was broken off: new ones in place of all that it may have left unusable."""
        self.failure = first_line(error)
        log.warning("no CUDA graphs on %s: the capture failed (%s); steps run eagerly.", self.device, self.failure)
        if classify(error) is Meaning.STICKY:
            return  # nothing works on that device any more
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.generator = torch.Generator(self.device)
        self.generator.set_state(drawn)
        # Until torch 2.12 the end of a capture that was broken off leaves the allocator believing that it goes on; that
        # it does not is an error, and no news.
        if pool.handle is not None:
            with contextlib.suppress(AttributeError, RuntimeError):
                torch._C._cuda_endAllocateToPool(self.device.index, pool.handle)
        # Until torch 2.12 the capture leaves the *default* generator of the device believing that it is being captured,
        # so that every later draw in the process raises. A clone has the seed and the offset, and not the belief.
        default = torch.cuda.default_generators[self.device.index]
        with contextlib.suppress(RuntimeError):
            default.graphsafe_set_state(default.clone_state())

    @contextlib.contextmanager
    def drawing(self, generator: torch.Generator) -> Iterator[torch.Generator]:
        """For a step: captured functions draw what this generator would have drawn, and it goes on from there.

        Other requests wait meanwhile.

        Args:
            generator: The request's own, on this device. Not the process's: what others draw from it would be lost.

        Raises:
            ValueError: The generator is of another device.
        """
        if generator.device.type != "cuda" or generator.device.index not in (None, self.device.index):
            msg = f"the generator is of {generator.device}; graphs of {self.device} need one of that device."
            raise ValueError(msg)
        with self.lock:
            self.generator.set_state(generator.get_state())
            try:
                yield self.generator
            finally:
                generator.set_state(self.generator.get_state())

    def drop(self, graphs: list[Graph[Any]]) -> None:
        """Let go of graphs; their memory is for those to come.

        Waits for the device: up to torch 2.13 a graph that draws must not go while it is being replayed.

        Args:
            graphs: Emptied. Of a pool from `pool()`, all its graphs.
        """
        torch.cuda.synchronize(self.device)
        with self.lock:
            pools = {id(each.pool): each.pool for each in graphs if each.pool is not self._pool}
            graphs.clear()
            self._spare = [*self._spare, *pools.values()][-_SPARE:]

    def report(self) -> dict[str, Any]:
        """What was captured, how often it was replayed, and why a capture failed."""
        return {"captured": self.captured, "replays": self.replays, "failed": self.failure}
