"""Which policy and which Run are bound: here, for this block, in this task, or for the whole process. Loads no torch.

One context variable holds both, so that an attention call with nothing bound costs one read. A context variable belongs
to a thread or an asyncio task, so blocks never see each other's; a *generator* shares its consumer's context, so one
that binds and then yields would leave its policy bound in the consumer. `steps` is for those: it runs each step in a
context of its own.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from fuseboard.errors import InputError
from fuseboard.policy import Policy, policy_for
from fuseboard.run import Run

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Binding", "ProcessBinding", "bind", "bind_process", "bound", "steps"]

T = TypeVar("T")


class Binding:
    """A policy and a Run, bound together.

    Attributes:
        policy: Decides which backends are tried.
        run: Records what was used; None to record nothing.
    """

    __slots__ = ("policy", "run")

    def __init__(self, policy: Policy, run: Run | None) -> None:
        if run is not None and not isinstance(run, Run):
            msg = f"run is a {type(run).__name__}; expected a fuseboard.Run, or None to record nothing."
            raise InputError("run", msg)
        self.policy = policy
        self.run = run
        if run is not None:
            run.note_policy(policy)


BOUND: contextvars.ContextVar[Binding | None] = contextvars.ContextVar("fuseboard.bound", default=None)

# What graphs that this thread traces call in place of `attention`, as the attribute of that name, and `frozen_for`:
# whether it is now being decided what that is. Both may be missing. A graph reads and guards a thread's attribute, and
# cannot read a context variable. A plain `local`, with no default: dynamo of torch 2.6 takes the default of a subclass
# for the value, without a guard.
in_graphs = threading.local()


@contextlib.contextmanager
def tell_graphs(**values: Any) -> Iterator[None]:
    """Set attributes of `in_graphs` for a block, on this thread."""
    before = {name: getattr(in_graphs, name, None) for name in values}
    vars(in_graphs).update(values)
    try:
        yield
    finally:
        vars(in_graphs).update(before)


# For threads that have no context of their own: autograd runs backward, and gradient checkpointing re-runs forward,
# there.
process: Binding | None = None
_process_lock = threading.Lock()


def bound() -> Binding | None:
    """What the calling code would run under: its own binding, else the process's, else None."""
    return BOUND.get() or process


class bind:  # noqa: N801 - reads as a statement: `with fb.bind("fast"):`
    """Bind a policy, and optionally a Run, for a block: `with fb.bind("fast", run=run): ...`.

    Holds for the thread or asyncio task that enters it, nests, and may be entered again, by several at once too. Do not
    `yield` out of the block in a generator that others consume: use `steps`.

    Args:
        policy: A `Policy`, its name, or a mapping of site patterns to either (`{"vocoder.*": "auto", "*": "fast"}`).
        run: Records every call made under it.

    Raises:
        PolicyError: There is no such policy.
    """

    def __init__(self, policy: Policy | str | Mapping[str, Policy | str], *, run: Run | None = None) -> None:
        self._binding = Binding(policy_for(policy), run)
        self._tokens: list[contextvars.Token[Binding | None]] = []

    def __enter__(self) -> Run | None:
        self._tokens.append(BOUND.set(self._binding))
        return self._binding.run

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # One object may be entered by several threads and tasks at once: a token resets only the context it is of.
        for token in reversed(self._tokens):
            try:
                BOUND.reset(token)
            except ValueError:
                continue
            self._tokens.remove(token)
            return
        msg = "a block bound by fuseboard was left in another context than it was entered in; use fuseboard.steps."
        raise RuntimeError(msg)


class ProcessBinding:
    """A policy bound for the whole process; leave it by `with` or `close()`."""

    __slots__ = ("_binding",)

    def __init__(self, binding: Binding) -> None:
        self._binding: Binding | None = binding

    def close(self) -> None:
        """Unbind. Safe to call twice."""
        global process  # noqa: PLW0603 - this module owns the process's binding
        with _process_lock:
            if self._binding is not None and process is self._binding:
                process = None
            self._binding = None

    def __enter__(self) -> ProcessBinding:  # noqa: PYI034 - final in spirit; `Self` needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def bind_process(policy: Policy | str | Mapping[str, Policy | str], *, run: Run | None = None) -> ProcessBinding:
    """Bind for every thread of the process that has bound nothing itself.

    For training: autograd runs backward, and gradient checkpointing re-runs forward, on threads of its own. Takes hold
    at once. Only one may hold at a time, since two that overlap could not both be undone in order.

    Raises:
        PolicyError: There is no such policy.
        RuntimeError: Another is still bound.
    """
    global process  # noqa: PLW0603 - this module owns the process's binding
    binding = Binding(policy_for(policy), run)
    with _process_lock:
        if process is not None:
            msg = (
                f"policy {process.policy} is bound for the process already; close() it before binding {binding.policy}."
            )
            raise RuntimeError(msg)
        process = binding
    return ProcessBinding(binding)


@overload
def steps(
    generator: Iterator[T], policy: Policy | str | Mapping[str, Policy | str], *, run: Run | None = None
) -> Generator[T, Any, Any]: ...
@overload
def steps(
    generator: AsyncIterator[T], policy: Policy | str | Mapping[str, Policy | str], *, run: Run | None = None
) -> AsyncGenerator[T, Any]: ...
def steps(
    generator: Iterator[T] | AsyncIterator[T],
    policy: Policy | str | Mapping[str, Policy | str],
    *,
    run: Run | None = None,
) -> Generator[T, Any, Any] | AsyncGenerator[T, Any]:
    """Run every step of a generator with a policy bound, and none of its consumer's code.

    `for chunk in fb.steps(stream(), "fast"):`

    Between two steps nothing is bound, and the steps may come from different threads. A plain generator's steps share
    one context of their own, a copy of the context at this call; an async generator's run in the task that asks for
    them.

    Raises:
        PolicyError: There is no such policy.
        InputError: It is no iterator.
    """
    binding = Binding(policy_for(policy), run)
    if isinstance(generator, AsyncIterator):
        return _async_steps(generator, binding)
    if not isinstance(generator, Iterator):
        msg = f"generator is a {type(generator).__name__}; expected what a generator function gives when it is called."
        raise InputError("generator", msg)
    context = contextvars.copy_context()
    context.run(BOUND.set, binding)
    return _Steps(generator, context)


class _Steps(Generator[T, Any, Any], Generic[T]):
    def __init__(self, inner: Iterator[T], context: contextvars.Context) -> None:
        self._inner = inner
        self._context = context

    def __next__(self) -> T:
        return self._context.run(next, self._inner)

    def send(self, value: Any) -> T:
        if value is None:
            return next(self)
        return self._method("send")(value)

    def throw(self, typ: Any, val: Any = None, tb: TracebackType | None = None) -> T:
        error = typ if isinstance(typ, BaseException) else typ(val) if not isinstance(val, BaseException) else val
        return self._method("throw")(error if tb is None else error.with_traceback(tb))

    def close(self) -> None:
        close = getattr(self._inner, "close", None)
        if close is not None:
            self._context.run(close)

    def _method(self, name: str) -> Callable[[Any], T]:
        method = getattr(self._inner, name)
        return lambda argument: self._context.run(method, argument)


async def _async_steps(inner: AsyncIterator[T], binding: Binding) -> AsyncGenerator[T, Any]:
    step: Callable[[], Awaitable[T]] = inner.__anext__
    try:
        while True:
            try:
                item = await _awaited(step, binding)
            except StopAsyncIteration:
                return
            try:
                sent = yield item
            except GeneratorExit:
                raise
            except BaseException as error:
                if not isinstance(inner, AsyncGenerator):
                    raise
                step = functools.partial(inner.athrow, error)
            else:
                step = inner.__anext__ if sent is None else functools.partial(_generator(inner).asend, sent)
    finally:
        if isinstance(inner, AsyncGenerator):
            await _awaited(inner.aclose, binding)


async def _awaited(step: Callable[[], Awaitable[T]], binding: Binding) -> T:
    token = BOUND.set(binding)
    try:
        return await step()
    finally:
        with contextlib.suppress(ValueError):  # a task that was dropped is closed from elsewhere: its context is gone
            BOUND.reset(token)


def _generator(inner: AsyncIterator[T]) -> AsyncGenerator[T, Any]:
    if isinstance(inner, AsyncGenerator):
        return inner
    msg = f"a {type(inner).__name__} takes no values; only a generator does."
    raise TypeError(msg)
