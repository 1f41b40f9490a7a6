"""A few children at once, with a line that says what they are at. Loads no torch."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, TypeVar

__all__ = ["Progress", "run_all"]

T = TypeVar("T")
_GLANCE = 0.2


def run_all(work: Iterable[Callable[[], T]], jobs: int) -> list[T]:
    """The results of all, `jobs` at a time, in their order; the first error if there is one.

    The threads are daemons: an interrupt ends the command without waiting for a child that hangs.
    """
    todo = list(work)
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    waiting: Iterator[int] = iter(range(len(todo)))
    lock = threading.Lock()
    stop = threading.Event()

    def worker() -> None:
        while not stop.is_set():
            with lock:
                at = next(waiting, None)
            if at is None:
                return
            try:
                results[at] = todo[at]()
            except BaseException as error:  # noqa: BLE001 - raised again where the results are wanted
                errors.append(error)
                stop.set()

    threads = [threading.Thread(target=worker, daemon=True) for _ in range(min(jobs, len(todo)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(_GLANCE)  # without a limit, an interrupt would not be seen everywhere
    finally:
        stop.set()
    if errors:
        raise errors[0]
    return [results[at] for at in range(len(todo))]


class Progress:
    """One line on a terminal, written over and over, and wiped at the end; nothing anywhere else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = stream.isatty()
        self._width = shutil.get_terminal_size().columns - 1
        self._lock = threading.Lock()
        self._done = self._total = 0

    def expect(self, total: int) -> None:
        """So many steps are still to come."""
        self._total += total

    def say(self, text: str) -> None:
        """What is being done."""
        self._write(f"[{self._done}/{self._total}] {text}")

    def step(self) -> None:
        """One step is done."""
        with self._lock:
            self._done += 1

    def wipe(self) -> None:
        """Leave the line empty."""
        self._write("")

    def _write(self, text: str) -> None:
        if self._shown:
            with self._lock:
                self._stream.write(f"\r{text[: self._width].ljust(self._width)}\r")
                self._stream.flush()
