"""`fuseboard doctor`: what works on this machine, what does not and why, and what to do about it.

Everything that could crash, hang or print is asked of child processes with a time limit; this one reads metadata and
never loads torch, a plugin or a kernel package. `docs/doctor.md` describes the data that `--json` prints.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

import fuseboard
from fuseboard import child
from fuseboard.ops import environment, table
from fuseboard.ops.cli import Parser, UnusableError
from fuseboard.ops.parallel import Progress, run_all
from fuseboard.ops.row import BROKEN, FAULTY, WORKS, Row
from fuseboard.registry import Entry, Registry, install_hint, installed_entries, known_names
from fuseboard.settings import Settings

__all__ = ["SCHEMA", "examine", "main"]

SCHEMA = 1
"""Counts up when a key of the data is renamed, removed or means something else; a new key changes nothing."""

JOBS = 2
"""Children at once. The self-tests of kernels on one GPU share it, so that more would mostly wait for each other."""

SURVEY_LIMIT = 120.0
DECLARE_LIMIT = 60.0
"""Seconds for the children that only load torch, or a plugin's module after it, which is text."""

EPILOG = """\
states:
  works          imported and self-tested on a device of this machine
  other device   made for devices that this machine does not have
  not installed  the plugin is there, the kernel package that it calls is not
  broken         installed, and cannot run: the reason is shown
  faulty         the plugin cannot be loaded, or declares something wrong
  blocked        by FUSEBOARD_DISABLE

exit status:
  0  every installed backend that is meant for this machine's devices works
  1  something is broken or faulty, a hook fails, or a setting is wrong
  2  the question cannot be asked: wrong usage, or torch cannot be imported
"""


@attrs.frozen
class Asked:
    """What the command line asks for.

    Attributes:
        backends: Names; empty for all.
        devices: Such as `cuda:0` or `cuda`; empty for all.
        timeout: Seconds that one kernel's import and self-test may take; None for `FUSEBOARD_PROBE_TIMEOUT`.
        jobs: Children at once.
        fresh: Ask again what is known from disk.
    """

    backends: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    timeout: float | None = None
    jobs: int = JOBS
    fresh: bool = False


def main(argv: list[str]) -> int:
    """Run `fuseboard doctor`; its exit status."""
    args = _parser().parse_args(argv)
    asked = Asked(tuple(args.backend), tuple(args.device), args.timeout, args.jobs, args.fresh)
    progress = Progress(sys.stderr)
    try:
        found = examine(asked, progress)
    finally:
        progress.wipe()
    if args.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        table.show(found, sys.stdout, whole=bool(asked.backends))
    status: int = found["status"]
    return status


def _parser() -> Parser:
    parser = Parser(
        prog="fuseboard doctor",
        description="Show which backends work on this machine, and what keeps the others from it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--backend", action="append", default=[], metavar="NAME", help="only this one, in full; repeatable")
    add("--device", action="append", default=[], metavar="NAME", help="only this one, such as cuda:0; repeatable")
    add(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="limit for one kernel's import and self-test (FUSEBOARD_PROBE_TIMEOUT)",
    )
    add("--jobs", type=_jobs, default=JOBS, metavar="N", help=f"children at once ({JOBS})")
    add("--fresh", action="store_true", help="ask again what is known from disk")
    add("--json", action="store_true", help="print data; docs/doctor.md describes the keys")
    return parser


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    msg = f"{text!r} is not a positive number of seconds"
    raise argparse.ArgumentTypeError(msg)


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        msg = f"{text!r} is not a number of at least 1"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def examine(asked: Asked, progress: Progress) -> dict[str, Any]:
    """Everything that there is to know, as data in the order of `docs/doctor.md`.

    Raises:
        UnusableError: A backend or device is asked for that is not here.
    """
    if not child.possible():
        msg = "this interpreter cannot start a child process, so that nothing can be asked without harm."
        raise UnusableError(msg)
    held, listed, unknown = environment.read_settings(os.environ)
    problems = [each["name"] for each in listed if each["problem"]]
    with environment.listened() as notes, environment.without(problems):
        entries = installed_entries()
        board = Registry(entries, held)
        names = _names(asked.backends, entries)
        progress.expect(1)
        progress.say("torch and the devices")
        machine = child.survey(timeout=SURVEY_LIMIT)
        progress.step()
        rows = [Row(name, board, entries) for name in names]
        devices = _devices(asked.devices, machine)
        if machine["error"] is None:
            _ask(rows, devices, machine, held, asked, progress)
    backends = [row.as_dict() for row in rows]
    faults = [attrs.asdict(each) for each in board.faults if each.name in names]
    status, summary = _judged(machine, backends, faults, problems)
    return {
        "schema": SCHEMA,
        "status": status,
        "summary": summary,
        "fuseboard": fuseboard.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": {
            "version": machine["torch"],
            "error": machine["error"],
            **{key: machine[key] for key in ("cuda", "hip", "driver", "cudnn")},
            "sdpa": machine["sdpa"],
        },
        "devices": [
            {key: each.get(key) for key in ("device", "name", "capability", "memory")} for each in machine["devices"]
        ],
        "settings": listed,
        "unknown_settings": unknown,
        "backends": backends,
        "faults": faults,
        "available": [] if asked.backends else environment.not_installed(entries),
        "cache": environment.cache(held),
        "notes": notes,
    }


def _names(wanted: Sequence[str], entries: Sequence[Entry]) -> list[str]:
    here = sorted({each.name for each in entries})
    for name in wanted:
        if name in here:
            continue
        install = install_hint(name)
        if install is not None:
            msg = f"backend {name!r} is not installed. Install it: {install}"
            raise UnusableError(msg)
        near = difflib.get_close_matches(name, [*here, *known_names()], n=1)
        install = install_hint(near[0]) if near and near[0] not in here else None
        hint = f" Did you mean {near[0]!r}?{f' Install it: {install}' if install else ''}" if near else ""
        msg = f"no backend is called {name!r}.{hint} Installed: {', '.join(here) or 'none'}."
        raise UnusableError(msg)
    return list(dict.fromkeys(wanted)) or here


def _devices(wanted: Sequence[str], machine: Mapping[str, Any]) -> list[dict[str, Any]]:
    here: list[dict[str, Any]] = machine["devices"]
    for name in wanted if machine["error"] is None else ():
        if not any(name in (each["device"], _type(each)) for each in here):
            msg = f"there is no device {name!r}; there are {', '.join(each['device'] for each in here)}."
            raise UnusableError(msg)
    return [each for each in here if not wanted or each["device"] in wanted or _type(each) in wanted]


def _type(device: Mapping[str, Any]) -> str:
    return str(device["device"]).partition(":")[0]


def _ask(
    rows: Sequence[Row],
    devices: Sequence[dict[str, Any]],
    machine: dict[str, Any],
    held: Settings,
    asked: Asked,
    progress: Progress,
) -> None:
    """Let every plugin that is not blocked declare itself, then try each on the devices that it is made for."""
    limit = min(asked.timeout or DECLARE_LIMIT, DECLARE_LIMIT)

    def declare(group: Sequence[Row]) -> None:
        progress.say(f"{', '.join(row.name for row in group)}: what it declares")
        declared = child.declare_together([row.name for row in group], timeout=limit)
        for row in group:
            row.take(declared[row.name], devices)
            progress.step()

    def probe(row: Row, device: str) -> None:
        def tell(stage: str) -> None:
            progress.say(f"{row.name} on {device}: {stage}")

        tell("start")
        answer = child.probe(
            row.name,
            device,
            timeout=asked.timeout,
            fresh=asked.fresh,
            on_stage=tell,
            config=held,
            distribution=row.distribution,
            machine=machine,
        )
        row.found(device, answer)
        progress.step()

    open_rows = [row for row in rows if row.state is None]
    progress.expect(len(open_rows))
    # Starting a child is mostly the import of torch, so what one distribution ships is asked of one child.
    groups: dict[str | None, list[Row]] = {}
    for row in open_rows:
        groups.setdefault(row.distribution, []).append(row)
    run_all([functools.partial(declare, group) for group in groups.values()], asked.jobs)
    # Device by device, so that children that run at once are on different devices as often as may be.
    pairs = [(row, at) for row in open_rows for at in row.unknown]
    pairs.sort(key=lambda pair: pair[0].unknown.index(pair[1]))
    progress.expect(len(pairs))
    run_all([functools.partial(probe, *pair) for pair in pairs], asked.jobs)


def _judged(
    machine: Mapping[str, Any], backends: list[dict[str, Any]], faults: list[dict[str, Any]], problems: list[str]
) -> tuple[int, str]:
    """The exit status and one sentence."""
    if machine["error"] is not None:
        return 2, f"torch cannot be imported: {machine['error']}"
    of = {state: [each["name"] for each in backends if each["state"] == state] for state in (WORKS, BROKEN, FAULTY)}
    wrong = [f"{state}: {', '.join(of[state])}" for state in (BROKEN, FAULTY) if of[state]]
    failing = [each["name"] for each in backends if each["faults"]]
    wrong += [f"failing hooks: {', '.join(failing)}"] if failing else []
    wrong += [f"ignored plugins: {', '.join(sorted({each['name'] for each in faults}))}"] if faults else []
    wrong += [f"wrong settings: {', '.join(problems)}"] if problems else []
    if wrong:
        return 1, "; ".join(wrong)
    if of[WORKS]:
        return 0, f"every installed backend that is meant for this machine works: {', '.join(of[WORKS])}"
    if not backends:
        return 0, "no backend is installed: every call is answered by the reference"
    return 0, "no installed backend is meant for this machine: every call is answered by the reference"
