"""`Compiled`: torch.compile for one module or function of an engine, and eager from the first failure on.

`torch.compile(f)` compiles nothing: what can fail (no C++ compiler, no Triton, a bug) fails at the first call, or at a
later one whose inputs ask for another compilation, in the midst of a function that may have done something already. To
catch that around the call and to call the function again would do it twice. Three places are told apart instead:

* The backend (inductor) fails on a graph: caught where dynamo hands it the graph, and the graph is given back as it is.
  The call goes on in it, eagerly, from that very point; nothing was run, so nothing is run twice.
* Dynamo itself fails on a frame, before any of it ran. When the traceback shows no frame of the function between the
  call and dynamo, nothing of the call has run: it is made again, eagerly. What *that* raises is the function's own
  error, and compilation stays on. Otherwise the error passes up, once, and later calls are eager.
* A compiled graph fails while it runs. It is run again as it was traced when it only computes: the error that this
  raises is the function's own, and without one the compiled code was at fault. A graph that writes, draws, or calls
  somebody's own operators is not run again: its error passes up, and later calls are eager.

All other exceptions come from the function itself, and pass through unchanged. So does running out of memory, also
while compiling, and a lost device. A backward that torch compiles only when it is first run fails there, outside.
"""

from __future__ import annotations

import logging
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, TracebackType
from typing import Any

import attrs
import torch
from torch import Tensor, fx, nn

from fuseboard import context
from fuseboard.failure import Meaning, classify
from fuseboard.registry import first_line

__all__ = ["Compiled", "compile_module"]

log = logging.getLogger("fuseboard")

# Under a policy one compiled call at a time: dynamo's tables and what a trace reads are the process's, and a policy's
# first calls probe and mark backends.
_one_at_a_time = threading.RLock()


class _Running(threading.local):
    """Whose call this thread is in: dynamo shares graphs between equal modules, so a graph has no owner."""

    top: Compiled | None = None
    ran: bool = False
    """Whether it ran a graph."""


_running = _Running()


class Compiled:
    """A module or function behind torch.compile. Not an `nn.Module`, so an attribute that holds it is no submodule.

    `(self.compiled or self.block)(x)`, with `self.compiled = compile_module(self.block, enabled, "block")`.

    The first failure to compile is logged once, with its cause; from then on, and on MPS, the target is called as it
    is. Under a policy other than `auto` one compiled call of the process runs at a time. Copied and pickled, it is its
    target and its options, and compiles anew. Results differ from eager ones in the last bits, as inductor's do.

    Attributes:
        target: What is compiled.
        name: What the log calls it.
        dynamic: Whether one graph serves all sizes; lengths 0 and 1 have one each anyway.
        backend: As for `torch.compile`; None for inductor.
        mode: Likewise.

    Raises:
        TypeError: The target cannot be called.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        name: str = "",
        *,
        dynamic: bool | None = True,
        backend: str | Callable[..., Any] | None = None,
        mode: str | None = None,
    ) -> None:
        if not callable(target):
            msg = f"Compiled was given {target!r}; expected a module or a function."
            raise TypeError(msg)
        self.__setstate__(
            {
                "target": target,
                "name": name or getattr(target, "__qualname__", type(target).__name__),
                "dynamic": dynamic,
                "backend": backend,
                "mode": mode,
            }
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("target", "name", "dynamic", "backend", "mode")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.target: Callable[..., Any] = state["target"]
        self.name: str = state["name"]
        self.dynamic: bool | None = state["dynamic"]
        self.backend: str | Callable[..., Any] | None = state["backend"]
        self.mode: str | None = state["mode"]
        self._compiled: Callable[..., Any] | None = None
        self._cause: str | None = None
        self._lock = threading.Lock()
        self._graphs = 0
        self._compilations: set[tuple[int, int]] = set()
        self._ran: bool | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The target's result; compiled, unless that has failed or cannot be."""
        # Within a function that is being traced, this is part of it.
        if torch.compiler.is_dynamo_compiling() or self._cause is not None or _on_mps(self.target, args, kwargs):
            return self.target(*args, **kwargs)
        binding = context.bound()
        if binding is None or binding.policy.name == "auto":
            return self._call(args, kwargs)
        with _one_at_a_time:
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        compiled = self._compiled or self._wrapped()
        if compiled is None:
            return self.target(*args, **kwargs)
        from torch._dynamo.exc import TorchDynamoException  # noqa: PLC0415 - two seconds, and loaded by now

        outer = _running.top, _running.ran
        _running.top, _running.ran = self, False
        try:
            out = compiled(*args, **kwargs)
        except TorchDynamoException as error:
            caught = error
        else:
            self._ran = _running.ran
            return out
        finally:
            _running.top, _running.ran = outer
        try:
            return self._after(caught, args, kwargs)
        finally:
            del caught  # its traceback holds this frame

    def _wrapped(self) -> Callable[..., Any] | None:
        try:
            self._compiled = self._wrap()
        except Exception as error:  # noqa: BLE001 - whatever torch.compile dislikes, the target can be called
            self._give_up(first_line(error))
        return self._compiled

    def _wrap(self) -> Callable[..., Any]:
        import torch._dynamo  # noqa: PLC0415 - two seconds, for those who compile

        function = self.target if isinstance(self.target, (FunctionType, MethodType)) else _entry(self.target)
        backend = _Backend(_resolved(self.backend, self.mode, self.dynamic))
        wrapped: Callable[..., Any] = torch.compile(function, dynamic=self.dynamic, backend=backend)
        return wrapped

    def _after(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Dynamo itself raised: answer eagerly if nothing has run yet, else raise it."""
        handled = sys.exc_info()[1]  # the caller's, which says nothing about this
        wrapped = [*_under(error, {id(handled)})]
        for each in wrapped:
            if classify(each, handled) is not Meaning.BROKEN:
                raise each
        cause = ": ".join(dict.fromkeys((first_line(error), first_line(wrapped[0]))))
        if _had_begun(error.__traceback__):
            self._give_up(f"{cause}; this call had begun and cannot be repeated")
            raise error
        out = self.target(*args, **kwargs)
        self._give_up(cause)
        return out

    def _give_up(self, cause: str) -> None:
        with self._lock:
            if self._cause is not None:
                return
            self._cause = cause
        log.warning("%s is not compiled (%s); it runs eagerly from now on.", self.name, cause)

    def _traced(self, compilation: tuple[int, int]) -> None:
        """Count a graph; `compilation` is dynamo's numbers of the frame that it is of, and of that frame's tracing."""
        with self._lock:
            self._graphs += 1
            self._compilations.add(compilation)

    @property
    def cause(self) -> str | None:
        """Why calls are eager, or None."""
        if self._cause is not None:
            return self._cause
        if _is_on_mps(self.target):
            return "torch.compile is not used on MPS"
        return (
            "dynamo found no graph in its last call, or was at its limit of recompiles" if self._ran is False else None
        )

    def report(self) -> dict[str, Any]:
        """Whether calls are compiled, why not, and how many graphs its calls had made, of them by recompiling.

        A graph is counted where it was made: equal modules, such as the layers of a stack, share theirs.
        """
        cause = self.cause
        with self._lock:
            recompiles = len(self._compilations) - len({frame for frame, _ in self._compilations})
        return {
            "name": self.name,
            "compiled": cause is None and self._ran is True,
            "cause": cause,
            "graphs": self._graphs,
            "recompiles": recompiles,
        }

    def __repr__(self) -> str:
        state = f"eager: {self.cause}" if self.cause else "compiled" if self._ran else "not called yet"
        return f"<Compiled {self.name} ({state})>"


def compile_module(module: Callable[..., Any], enabled: bool, name: str = "") -> Compiled | None:
    """`Compiled(module)` where compilation is asked for, else None: `(compiled or module)(x)` is right either way."""
    return Compiled(module, name) if enabled else None


# ---- what dynamo is given

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_codes: weakref.WeakValueDictionary[Any, CodeType] = weakref.WeakValueDictionary()


def _entry(target: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls the target: `torch.compile(module)` is a module, and would be a submodule where it is kept.

    `module.__call__` is torch's own function, which dynamo passes over, hooks and all. And dynamo keeps eight
    compilations for each code object, whatever calls it: so modules of one structure have one, and others another. One
    with hooks has its own: dynamo guards no hooks, and would run another's graph, without them.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    key: Any = object()
    if isinstance(target, nn.Module) and not any(getattr(each, hooks) for each in target.modules() for hooks in _HOOKS):
        weights = tuple((name, tuple(each.shape), each.dtype) for name, each in target.named_parameters())
        key = tuple(map(type, target.modules())), weights
    code = _codes.get(key)
    if code is None:
        code = _codes[key] = call.__code__.replace(co_name=f"call_{type(target).__name__}")
    return FunctionType(code, globals(), code.co_name, None, call.__closure__)


def _resolved(backend: str | Callable[..., Any] | None, mode: str | None, dynamic: bool | None) -> Callable[..., Any]:
    """The backend as torch.compile itself would make it, comparable where torch's is."""
    if backend in (None, "inductor"):
        made: Any = torch._TorchCompileInductorWrapper  # what torch.compile itself makes; untyped
        inductor: Callable[..., Any] = made(mode or "default", None, dynamic)
        return inductor
    function: Any = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend
    return function if mode in (None, "default") else _WithMode(function, mode)


@attrs.frozen
class _WithMode:
    function: Callable[..., Any]
    mode: str | None

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = self.function(graph, inputs, mode=self.mode)
        return compiled


class _Backend:
    """A backend that never fails: where the real one does, the graph is its own compilation.

    Equal for equal backends, since dynamo keeps what it has compiled for equal modules by code and backend. Without
    that, each layer of a stack would be compiled anew, and be eager past the eighth.
    """

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner

    def __call__(self, graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        # Before the backend rewrites the graph in place; `code` has the function made, which is else done when called.
        as_traced, repeatable = graph.forward if graph.code else graph, _only_computes(graph)
        handled = sys.exc_info()[1]
        try:
            made = _Graph(as_traced, self.inner(graph, inputs, **options), repeatable)
        except torch._dynamo.exc.RestartAnalysis:  # no failure: dynamo is to trace once more, numbers as constants
            raise
        except Exception as error:
            if classify(error, handled) is not Meaning.BROKEN:
                raise
            made = _Graph(as_traced, None, repeatable, first_line(error))
        owner, compile_id = _running.top, torch._guards.CompileContext.current_compile_id()
        if owner is not None:
            owner._traced((getattr(compile_id, "frame_id", 0), getattr(compile_id, "frame_compile_id", 0)))
        return made

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)  # dynamo asks some for `reset` and `get_compiler_config`

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Backend) and bool(self.inner == other.inner)

    def __hash__(self) -> int:
        return hash(type(self.inner))


@attrs.define(eq=False)
class _Graph:
    """One graph: compiled, or as it was traced.

    Attributes:
        as_traced: Runs it eagerly.
        compiled: None where it could not be compiled.
        repeatable: It only computes.
        failure: Why it is not compiled.
    """

    as_traced: Callable[..., Any]
    compiled: Callable[..., Any] | None
    repeatable: bool
    failure: str | None = None

    def __call__(self, *args: Any) -> Any:
        _running.ran = True
        compiled = self.compiled  # once: another thread may give it up meanwhile
        if compiled is None:
            self._tell()
            return self.as_traced(*args)
        try:
            return compiled(*args)
        except Exception as error:  # noqa: BLE001 - what it means is decided below, outside its handler
            caught = error
        try:
            if classify(caught, sys.exc_info()[1]) is not Meaning.BROKEN:
                raise caught
            if not self.repeatable:
                self._tell(f"{first_line(caught)}; this call had begun and cannot be repeated")
                raise caught
            out = self.as_traced(*args)
            self.compiled, self.failure = None, first_line(caught)
            self._tell()
            return out
        finally:
            del caught

    def _tell(self, why: str | None = None) -> None:
        owner = _running.top
        if owner is not None:
            owner._give_up(why or self.failure or "its graph could not be compiled")


# ---- reading graphs, errors and arguments

_PURE_MODULES = ("torch", "torch._C", "torch._C._nn", "torch._C._linalg", "torch._C._fft", "torch._C._special", "math")
_IMPURE = ("batch_norm", "instance_norm", "embedding_bag", "rand", "bernoulli", "multinomial", "normal", "rrelu")


def _only_computes(graph: fx.GraphModule) -> bool:
    """Whether running it twice is running it once: torch's own operators, none that writes or draws."""
    return all(_computes(node) for node in graph.graph.nodes)


def _computes(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return node.op in ("placeholder", "get_attr", "output")
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        drawing = torch.Tag.nondeterministic_seeded in target.tags
        return target.namespace in ("aten", "prims") and not target._schema.is_mutable and not drawing
    name: str = target if isinstance(target, str) else getattr(target, "__name__", "_")
    if name.endswith("_") or any(each in name for each in _IMPURE) or not _reads_only(name, node):
        return False
    if isinstance(target, str):
        return hasattr(Tensor, name)
    module = getattr(target, "__module__", None)
    if module == "_operator":
        return name not in ("setitem", "delitem") and not _is_in_place(name)
    return module in _PURE_MODULES or target in (getattr(torch, name, None), getattr(nn.functional, name, None))


def _reads_only(name: str, node: fx.Node) -> bool:
    """By its arguments: it writes into none, and does not drop. A True among them may be torch's `inplace`."""
    if "out" in node.kwargs or node.kwargs.get("inplace") or any(each is True for each in node.args):
        return False
    if "dropout" in name:
        return node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True) is False  # noqa: PLR2004
    if name == "embedding":  # writes into the weights it looks up, when they are to be held below a norm
        return node.kwargs.get("max_norm", node.args[3] if len(node.args) > 3 else None) is None  # noqa: PLR2004
    return not node.kwargs.get("dropout_p")


def _is_in_place(name: str) -> bool:
    """`iadd` and its like, which are operators whose name without the `i` is one as well."""
    return name.startswith("i") and hasattr(operator, f"__{name}__")


def _under(error: BaseException, seen: set[int]) -> Iterator[BaseException]:
    """What dynamo wrapped, innermost first; `seen` are ids of those to leave out."""
    seen.add(id(error))
    for each in (getattr(error, "inner_exception", None), error.__cause__, error.__context__):
        if isinstance(each, BaseException) and id(each) not in seen:
            yield from _under(each, seen)
    yield error


_DYNAMO = Path(torch.__file__).parent / "_dynamo"
_DOORS = {str(_DYNAMO / "eval_frame.py"), str(_DYNAMO / "external_utils.py")}


def _had_begun(trace: TracebackType | None) -> bool:
    """Whether some of the function had run when dynamo raised: it, and not dynamo's converter, stands behind the door.

    A traceback that torch has cut off tells nothing: then it may have.
    """
    entered = False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file in _DOORS:
            entered = True
        elif entered:
            return not file.startswith(str(_DYNAMO))
        trace = trace.tb_next
    return True


def _on_mps(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for each in args:
        if isinstance(each, Tensor):
            return each.is_mps
    for each in kwargs.values():
        if isinstance(each, Tensor):
            return each.is_mps
    return _is_on_mps(target)


def _is_on_mps(target: Callable[..., Any]) -> bool:
    parameter = next(target.parameters(), None) if isinstance(target, nn.Module) else None
    return parameter is not None and parameter.is_mps
