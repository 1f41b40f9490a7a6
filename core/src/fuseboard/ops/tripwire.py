"""Who changed the state of the process that decides torch's kernels: what, from what to what, in which line.

`watch()` compares: it reads the state when it is made and whenever `changes()` is asked, and touches nothing. A
culprit is then known as far as the state itself tells: a replacement of torch's attention has its code's file and
line, a kernel registered from Python the place of its registration, a flag nothing. What was changed and put back in
between is not seen.

`watch(trace=True)` names the caller, and sees what is put back. There is no event to listen to: torch's setters raise
no audit event, `sys.setprofile` slows every call of a thread and belongs to profilers, and `sys.monitoring` (Python
3.12) cannot be asked for one callee. So it puts wrappers around the setters in `torch._C` and gives two modules of
torch a class that sees assignments: itself a change of process-wide state, and the one exception to the rule that
nothing of fuseboard makes one. It is made only when asked for by name, meant for debugging, and undone by `close()`.
Code that took a setter of `torch._C` into a variable of its own before is not seen; comparing then still finds what
it changed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.nn.attention

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Change", "Tripwire", "state", "watch"]

log = logging.getLogger("fuseboard")

SDPA = "torch.nn.functional.scaled_dot_product_attention"
FLASH = "torch.nn.attention.current_flash_attention_impl"
OWN = "torch's own"


_C: Any = torch._C
_CUDA: Any = torch.backends.cuda

# Asked anew each time: a getter that a version lacks is left out, and one that somebody replaced is asked too.
_READERS: dict[str, Callable[[], Any]] = {
    **{
        f"torch.backends.cuda.{name}": functools.partial(lambda name: getattr(_CUDA, name)(), name)
        for name in (
            *("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled"),
            "fp16_bf16_reduction_math_sdp_allowed",
        )
    },
    "torch._C._get_overrideable_sdp_enabled": lambda: _C._get_overrideable_sdp_enabled(),  # noqa: PLW0108
    "torch._C._get_sdp_priority_order": lambda: [int(each) for each in _C._get_sdp_priority_order()],
    **{
        f"torch.backends.cuda.matmul.{name}": functools.partial(lambda name: getattr(_CUDA.matmul, name), name)
        for name in (
            *("allow_tf32", "fp32_precision", "allow_fp16_accumulation"),
            *("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"),
        )
    },
    **{
        f"torch.backends.cudnn.{name}": functools.partial(lambda name: getattr(torch.backends.cudnn, name), name)
        for name in ("enabled", "benchmark", "deterministic", "allow_tf32")
    },
    **{
        f"torch.{name}": functools.partial(lambda name: getattr(torch, name)(), name)
        for name in ("get_float32_matmul_precision", "are_deterministic_algorithms_enabled")
    },
    "torch.get_default_dtype": lambda: str(torch.get_default_dtype()),
    FLASH: lambda: torch.nn.attention.current_flash_attention_impl(),  # noqa: PLW0108 - absent before torch 2.10
    SDPA: lambda: _place(vars(torch.nn.functional)["scaled_dot_product_attention"]),  # fuseboard: allow(looks at it)
}

# The setters below the public ones: every way to a flag that Python has goes through them.
_SETTERS = (
    *("_set_sdp_use_flash", "_set_sdp_use_mem_efficient", "_set_sdp_use_math", "_set_sdp_use_cudnn"),
    *("_set_sdp_use_overrideable", "_set_sdp_priority_order", "_set_math_sdp_allow_fp16_bf16_reduction"),
    *("_set_cublas_allow_tf32", "_set_cublas_allow_fp16_accumulation", "_set_fp32_precision_setter"),
    *("_set_cublas_allow_fp16_reduced_precision_reduction", "_set_cublas_allow_bf16_reduced_precision_reduction"),
    *("_set_cudnn_enabled", "_set_cudnn_benchmark", "_set_cudnn_deterministic", "_set_cudnn_allow_tf32"),
    *(
        "_set_float32_matmul_precision",
        "_set_deterministic_algorithms",
        "_set_default_dtype",
        "_set_default_tensor_type",
    ),
)
_IMPLEMENTATIONS = ("activate_flash_attention_impl", "restore_flash_attention_impl")

_OPERATORS = (
    *("_flash_attention_forward", "_flash_attention_backward", "_efficient_attention_forward"),
    *("_efficient_attention_backward", "scaled_dot_product_attention", "_scaled_dot_product_flash_attention"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math"),
    *("_scaled_dot_product_fused_attention_overrideable", "_fused_sdp_choice"),
)
_REGISTERED = re.compile(r"^(\w+)(?:\[alias\])?: registered at (.+?\.py:\d+|/dev/null:\d+) ::", re.MULTILINE)
FROM_PYTHON = "a kernel from Python"
"""In place of where it was registered, which torch 2.6 does not say."""


@attrs.frozen
class Change:
    """One change of process-wide state.

    Attributes:
        what: The getter or attribute by which it is read.
        before: Its value before, as JSON has it.
        after: Its value after.
        who: `file:line in function()`, or None where it could not be seen.
        when: Seconds since 1970: of the change with `trace`, else of the comparison that found it.
    """

    what: str
    before: Any
    after: Any
    who: str | None
    when: float

    def __str__(self) -> str:
        by = (
            f" by {self.who}"
            if self.who
            else " (by whom was not seen: fuseboard.ops.tripwire.watch(trace=True) sees it)"
        )
        return f"{_sentence(self.what, self.before, self.after)}{by}; {_consequence(self.what)}"


def _sentence(what: str, before: Any, after: Any) -> str:
    match = re.fullmatch(r"torch\.backends\.cuda\.(\w+)_sdp_enabled", what)
    name = f"torch.backends.cuda {match[1]} SDP" if match else what
    if isinstance(before, bool) and isinstance(after, bool):
        return f"{name} was switched {'on' if after else 'off'} ({before} -> {after})"
    return f"{name} was changed ({before} -> {after})"


def _consequence(what: str) -> str:
    if "sdp" in what or what.startswith("aten::") or what in (SDPA, FLASH):
        return "every attention of this process is affected. Use fuseboard.bind(policy) instead."
    return "every model of this process is affected. Leave it to the host, once at its start."


def state() -> dict[str, Any]:
    """The present state by the names that read it, JSON-ready; what this torch does not have is left out."""
    return {**_flags(), **_overrides()}


def _flags() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, read in _READERS.items():
        with contextlib.suppress(AttributeError):  # another version of torch
            found[name] = _read(read)
    return found


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError as error:  # TF32 set by both of its interfaces
        return f"unreadable: {(str(error).splitlines() or [''])[0]}"


def _overrides() -> dict[str, str]:
    """Kernels of aten's attention that Python code registered, and where."""
    dump: Callable[[str], str] = _C._dispatch_dump
    found: dict[str, str] = {}
    for operator in _OPERATORS:
        with contextlib.suppress(RuntimeError):  # another version of torch
            for key, where in _REGISTERED.findall(dump(f"aten::{operator}")):
                if key != "Meta":  # shapes only, and torch's own
                    found[f"aten::{operator} on {key}"] = FROM_PYTHON if where.startswith("/dev/null") else where
    return found


def _place(function: Any) -> str:
    """Where a function is written, as `file:line in name()`; torch's own attention is written in C++."""
    if function is torch._C._nn.scaled_dot_product_attention:
        return OWN
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    code = getattr(inner, "__code__", None) or getattr(vars(type(inner)).get("__call__"), "__code__", None)
    if code is None:
        return f"{getattr(inner, '__module__', None)}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"
    return f"{_short(code.co_filename)}:{code.co_firstlineno} in {code.co_name}()"


def _short(path: str) -> str:
    """A path from here when it lies below."""
    here = os.getcwd() + os.sep  # noqa: PTH109
    return path.removeprefix(here)


_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120
_PASSED_OVER = (_TORCH, __file__, contextlib.__file__, functools.__file__, "<frozen")


def _caller() -> str | None:
    """The innermost frame that is neither torch's nor ours."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
        frame = frame.f_back
    return None if frame is None else f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}()"


class Tripwire:
    """What `watch` gives: the changes since it was made. A context manager; thread-safe."""

    def __init__(self, *, trace: bool) -> None:
        self._lock = threading.RLock()
        self._found: list[Change] = []
        self._said = 0
        self._closed = False
        self._trace = trace
        if trace:
            _trace.join(self)
        self._last = state()

    def changes(self) -> tuple[Change, ...]:
        """Every change so far, oldest first; each is logged as one warning when it is first given here."""
        with self._lock:
            if not self._closed:
                self._compare(None, everything=True)
            new, self._said = self._found[self._said :], len(self._found)
            found = tuple(self._found)
        for each in new:
            log.warning("%s", each)
        return found

    def close(self) -> None:
        """Stop watching; with `trace`, put back what it had put in place. What was found stays readable."""
        with _trace.lock, self._lock:
            if self._closed:
                return
            self._compare(None, everything=True)
            self._closed = True
            if self._trace:
                _trace.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compare(self, who: str | None, *, everything: bool) -> None:
        with self._lock:
            if self._closed or not hasattr(self, "_last"):
                return
            overrides = _overrides() if everything else {k: v for k, v in self._last.items() if k.startswith("aten::")}
            now = {**_flags(), **overrides}
            for what in (*self._last, *(each for each in now if each not in self._last)):
                before, after = self._last.get(what, OWN), now.get(what, OWN)
                if before != after:
                    seen = who
                    if seen is None and after not in (OWN, FROM_PYTHON) and (what == SDPA or what.startswith("aten::")):
                        seen = _short(after)
                    self._found.append(Change(what, before, after, seen, time.time()))
            self._last = now


class _Trace:
    """The wrappers, put in place for the first Tripwire that traces and taken away with the last."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._listeners: list[Tripwire] = []
        self._undo: list[Callable[[], None]] = []

    def join(self, tripwire: Tripwire) -> None:
        with self.lock:
            self._listeners.append(tripwire)
            if len(self._listeners) == 1:
                self._install()

    def leave(self, tripwire: Tripwire) -> None:
        self._listeners.remove(tripwire)
        if not self._listeners:
            while self._undo:
                self._undo.pop()()

    @contextlib.contextmanager
    def _seen(self, *, everything: bool = False) -> Iterator[None]:
        # One change at a time, so that each is put down to whoever made it.
        with self.lock:
            for each in self._listeners:
                each._compare(None, everything=everything)
            try:
                yield
            finally:
                who = _caller()
                for each in self._listeners:
                    each._compare(who, everything=everything)

    def _wrapped(self, original: Callable[..., Any], *, everything: bool = False) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self._seen(everything=everything):
                return original(*args, **kwargs)

        return wrapper

    def _install(self) -> None:
        for name in _SETTERS:
            if hasattr(torch._C, name):
                put = functools.partial(setattr, torch._C, name)  # fuseboard: allow(trace asks; close undoes)
                self._put(put, functools.partial(getattr, torch._C, name))
        attention = torch.nn.attention
        registry = getattr(attention, "_registry", attention)
        for name in _IMPLEMENTATIONS:
            if hasattr(attention, name):
                put = functools.partial(setattr, attention, name)  # fuseboard: allow(trace asks; close undoes)
                self._put(put, functools.partial(getattr, attention, name), everything=True)
            if hasattr(registry, name):
                put = functools.partial(setattr, registry, name)  # fuseboard: allow(trace asks; close undoes)
                self._put(put, functools.partial(getattr, registry, name), everything=True)
        library = torch.library.Library
        put = functools.partial(setattr, library, "impl")  # fuseboard: allow(trace asks; close undoes)
        self._put(put, functools.partial(getattr, library, "impl"), everything=True)
        # cuDNN's flags keep their setters to themselves, and a function of a module has no setter.
        cudnn, functional = torch.backends.cudnn, torch.nn.functional
        put = functools.partial(setattr, cudnn, "__class__")  # fuseboard: allow(trace asks; close undoes)
        self._put_class(put, cudnn)
        put = functools.partial(setattr, functional, "__class__")  # fuseboard: allow(trace asks; close undoes)
        self._put_class(put, functional)

    def _put(self, put: Callable[[Any], None], get: Callable[[], Any], *, everything: bool = False) -> None:
        original = get()
        wrapper = self._wrapped(original, everything=everything)
        put(wrapper)

        def undo() -> None:
            # Whoever has put something over ours since keeps it; ours only passes on then.
            if get() is wrapper:
                put(original)

        self._undo.append(undo)

    def _put_class(self, put: Callable[[Any], None], module: types.ModuleType) -> None:
        kind = type(module)
        seen = self._seen

        def setattr_(self: Any, attribute: str, value: Any) -> None:
            if attribute == "__class__":
                kind.__setattr__(self, attribute, value)
                return
            with seen():
                kind.__setattr__(self, attribute, value)

        def delattr_(self: Any, attribute: str) -> None:
            with seen():
                kind.__delattr__(self, attribute)

        body = {"__slots__": (), "__setattr__": setattr_, "__delattr__": delattr_, "__module__": kind.__module__}
        watched = type(kind.__name__, (kind,), body)
        put(watched)

        def undo() -> None:
            if type(module) is watched:
                put(kind)

        self._undo.append(undo)


_trace = _Trace()


def watch(*, trace: bool = False) -> Tripwire:
    """Watch the process from now on; for a host, after it has set what it sets.

    Args:
        trace: Name the line that made each change, and see changes that are undone. It wraps torch's setters until
            `close()`, so it is for finding a culprit and not for production.
    """
    return Tripwire(trace=trace)
