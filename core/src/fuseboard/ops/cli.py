"""The command `fuseboard`: finds the sub-command and ends cleanly. Loads no torch; imports only the one asked for.

A sub-command is a module with `main(argv) -> int`. To add one: a line in `COMMANDS`.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import sys
from typing import NoReturn, TextIO

import fuseboard
from fuseboard.errors import FuseboardError

__all__ = ["COMMANDS", "Parser", "UnusableError", "main"]

COMMANDS = {
    "doctor": ("fuseboard.ops.doctor", "which backends work on this machine, and why the others do not"),
    "explain": ("fuseboard.ops.explain", "who would answer one attention call, and why nobody else"),
    "exactness": ("fuseboard.ops.exactness", "what each speed-up does to results"),
    "lint": ("fuseboard.ops.lint", "find attention that bypasses the board, and writes to process-wide state"),
    "new-plugin": ("fuseboard.ops.scaffold", "start a backend: a folder with a plugin and its tests"),
}

INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
PIPE_CLOSED = 141
"""128 + SIGPIPE."""


class UnusableError(Exception):
    """What was asked cannot be answered: one line on stderr, status 2."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose error is one line. Python's own puts the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where to read more; exit with 2."""
        self.exit(2, f"{self.prog}: {message}. See: {self.prog} --help\n")


def usage() -> str:
    """The text of `fuseboard --help`."""
    lines = [
        "usage: fuseboard COMMAND ...",
        "",
        "Every speed-up for a PyTorch engine is a plugin; none changes a result unless it was asked to.",
        "",
        *(f"  {name:<12}{what}" for name, (_module, what) in COMMANDS.items()),
        "",
        "  --version   print the version",
        "",
        "fuseboard COMMAND --help says more.",
    ]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; its exit status.

    Args:
        argv: The arguments, without the program's name; default, the process's.
    """
    given = sys.argv[1:] if argv is None else argv
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this; the status still says what was found
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 - until the end
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")  # a terminal that knows only ASCII
    try:
        status = _run(given)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _forget(sys.stdout)
        return PIPE_CLOSED
    except OSError as error:  # a disk that is full, a current folder that is gone
        with contextlib.suppress(OSError):
            where = f"{error.filename}: " if error.filename else ""
            sys.stderr.write(f"fuseboard: {where}{error.strerror or error}.\n")
        _forget(sys.stdout)
        _forget(sys.stderr)
        return 2
    return status


def _run(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0
    if given[0] in ("-V", "--version"):
        sys.stdout.write(f"fuseboard {fuseboard.__version__}\n")
        return 0
    name = given[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        sys.stderr.write(f"fuseboard: no command is called {name!r}.{hint} Commands: {', '.join(COMMANDS)}.\n")
        return 2
    module = importlib.import_module(COMMANDS[name][0])
    try:
        status: int = module.main(given[1:])
    except (UnusableError, FuseboardError) as error:
        sys.stderr.write(f"fuseboard {name}: {error}\n")
        return 2
    except SystemExit as error:  # argparse, which has said why
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 2
    return status


def _forget(stream: TextIO) -> None:
    """Nobody reads this stream any more: let the interpreter's own flush at exit go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
