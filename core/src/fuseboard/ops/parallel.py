"""A few children at once, with a line that says what they are at. Loads no torch."""

from __future__ import annotations

import ctypes
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, TypeVar

__all__ = ["Progress", "run_all"]

T = TypeVar("T")
_GLANCE = 0.2
_PATIENCE = 3.0


def run_all(work: Iterable[Callable[[], T]], jobs: int) -> list[T]:
    """The results of all, `jobs` at a time, in their order; the first error if there is one.

    An interrupt is handed on to the threads, so that each ends its child and cleans up; they are daemons, in case one
    does not.
    """
    todo = list(work)
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    waiting: Iterator[int] = iter(range(len(todo)))
    lock = threading.Lock()
    stop = threading.Event()

    def work_through(ended: threading.Event) -> None:
        try:
            while not stop.is_set():
                with lock:
                    at = next(waiting, None)
                if at is None:
                    return
                results[at] = todo[at]()
        except BaseException as error:  # noqa: BLE001 - raised again where the results are wanted
            errors.append(error)
            stop.set()
        finally:
            ended.set()

    ends = [threading.Event() for _ in range(min(jobs, len(todo)))]
    threads = [threading.Thread(target=work_through, args=(ended,), daemon=True) for ended in ends]
    for thread in threads:
        thread.start()
    try:
        _wait(ends)
    except BaseException:
        stop.set()
        _interrupt([thread for thread, ended in zip(threads, ends, strict=True) if not ended.is_set()])
        for ended in ends:
            ended.wait(_PATIENCE)
        raise
    if errors:
        raise errors[0]
    return [results[at] for at in range(len(todo))]


def _wait(ends: Iterable[threading.Event]) -> None:
    # Not by `join`: before Python 3.13 an interrupt makes it take a thread that runs for one that has ended
    # (https://github.com/python/cpython/issues/90882).
    for ended in ends:
        while not ended.wait(_GLANCE):  # without a limit, an interrupt would not be seen everywhere
            pass


def _interrupt(threads: Iterable[threading.Thread]) -> None:
    """Raise KeyboardInterrupt in threads, which Python itself does in the main one only."""
    for thread in threads:
        ident = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(KeyboardInterrupt))


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
