"""Run: one request's record of what its attention used. Loads no torch.

Counting takes no lock: a tick of `itertools.count` is one step of the interpreter, so it is exact under threads.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from fuseboard.policy import Policy

__all__ = ["Counter", "Run"]


class Counted(Protocol):
    """What a Run counts: how a call was answered. A `chain.Route`."""

    @property
    def backend_name(self) -> str:
        """Who answered."""

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        """`(backend, reason)` of those passed over."""


class Counter:
    """Counts `tick()` calls, exactly under threads and without a lock.

    Attributes:
        tick: Call it to count one.
    """

    __slots__ = ("_lock", "_reads", "tick")

    def __init__(self) -> None:
        self.tick: Callable[[], int] = itertools.count().__next__
        self._reads = 0
        self._lock = threading.Lock()

    def value(self) -> int:
        """How often `tick` was called. Reading takes a tick itself, which is subtracted."""
        with self._lock:
            count = self.tick() - self._reads
            self._reads += 1
            return count


class Run:
    """What one request's attention used and why it did not use the rest.

    Bind it with a policy, `with fb.bind("fast", run=run):`, and put `run.report()` beside the output. Several threads
    may share one.
    """

    __slots__ = ("_counters", "_lock", "_policies", "_ticks")

    def __init__(self) -> None:
        self._ticks: dict[Counted, Callable[[], int]] = {}
        self._counters: dict[Counted, Counter] = {}
        self._policies: list[Any] = []
        self._lock = threading.Lock()

    def note_policy(self, policy: Policy) -> None:
        """Record that calls are made under `policy`."""
        name = policy.as_json()
        with self._lock:
            if name not in self._policies:
                self._policies.append(name)

    def tick(self, route: Counted) -> None:
        """Count one call answered by `route`."""
        try:
            self._ticks[route]()
        except KeyError:
            with self._lock:
                if route not in self._ticks:
                    self._counters[route] = counter = Counter()
                    self._ticks[route] = counter.tick
            self._ticks[route]()

    def _counts(self) -> list[tuple[Counted, int]]:
        with self._lock:
            counters = list(self._counters.items())
        return [(route, counter.value()) for route, counter in counters]

    def report(self) -> dict[str, Any]:
        """The record as JSON-ready data.

        ```
        {"attention": {"policy": "fast", "used": {"flash": 11264, "reference": 320},
                       "fallbacks": {"sage→flash": {"head dim 80": 11264}}}}
        ```

        `policy` is a list when several were bound. With fallbacks there is one entry `warnings` beside `attention`.
        """
        used: dict[str, int] = {}
        fallbacks: dict[str, dict[str, int]] = {}
        for route, count in self._counts():
            used[route.backend_name] = used.get(route.backend_name, 0) + count
            for name, reason in route.skipped:
                reasons = fallbacks.setdefault(f"{name}→{route.backend_name}", {})
                reasons[reason] = reasons.get(reason, 0) + count
        policy = self._policies[0] if len(self._policies) == 1 else list(self._policies)
        report: dict[str, Any] = {"attention": {"policy": policy, "used": used, "fallbacks": fallbacks}}
        if fallbacks:
            report["warnings"] = [_warning(fallbacks)]
        return report

    @property
    def warning(self) -> str | None:
        """The one sentence that belongs on an output whose attention fell back; None for one that did not."""
        warnings = self.report().get("warnings")
        return warnings[0] if warnings else None

    def __repr__(self) -> str:
        return f"<Run {self.report()['attention']}>"


def _warning(fallbacks: dict[str, dict[str, int]]) -> str:
    parts = (
        f"{pair} ({', '.join(f'{reason}: {count}' for reason, count in each.items())})"
        for pair, each in fallbacks.items()
    )
    return f"attention fell back: {'; '.join(parts)}"
