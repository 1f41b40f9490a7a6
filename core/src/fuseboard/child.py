"""Ask a child process: a crash, an abort, an exit, a hang or a kill becomes a reason in words, and harms nobody.

This is the side of the process that asks; it loads no torch. `inside` is the child's. The two talk by one file of JSON
lines, one for each stage that the child reaches and one for its answer, so that what a kernel prints cannot be taken
for an answer and an end without an answer can be placed. A child never asks a child.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import platform
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from fuseboard import settings, verdicts
from fuseboard.registry import Entry, Registry, first_line, installed_entries
from fuseboard.settings import Settings

__all__ = ["Answer", "declare", "declare_together", "find", "possible", "probe", "survey"]

STAGES = {
    "start": "the import of torch",
    "plugin": "the import of its plugin",
    "probe": "its probe",
    "import": "its import",
    "self-test": "its self-test",
}
"""What a child is doing, in words."""

START_LIMIT = 120.0
"""Seconds that a child may take to start and to import torch, before the time limit of the question itself begins."""

LINES, LINE = 20, 300
"""How much of what a child printed is kept: its last lines, each cut at so many characters."""

_POLL = 0.05
_GRACE = 0.5  # for the child to say where it hangs, when its time is over
_TAIL = 1 << 16
_NOT_ASKED = "could not be asked in a process of its own"

# -c puts the current folder first on the path, where a json.py would be found; then the path becomes the parent's.
_BOOT = """
import sys
sys.path[:] = [each for each in sys.path if each]
import json
with open(sys.argv[1], encoding="utf-8") as file:
    asked = json.load(file)
sys.path[:] = asked["path"]
from fuseboard import inside
inside.main(asked)
"""


@attrs.frozen
class Answer:
    """What a child found out about one backend on one device.

    Attributes:
        ok: Whether it can run there.
        reason: Why not, in words; empty for yes.
        stage: As `Verdict.stage`; or `plugin` (its module could not be loaded, or declares wrongly), `crash`, `time
            limit`.
        seconds: How long the child took, be it now or when it was asked.
        cached: Read from disk; no child was started.
        detail: The last lines that the child printed, for a human.
        changed: What it left changed of the state of torch's attention that all threads of a process share.
        faults: What its plugin's hooks did wrong that is no reason not to run: each was answered cautiously.
    """

    ok: bool
    reason: str = ""
    stage: str = ""
    seconds: float = 0.0
    cached: bool = False
    detail: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


def possible() -> bool:
    """Whether a child can be started: not by a program that brings its interpreter along, which would start itself."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def find(name: str, distribution: str | None = None, config: Settings | None = None) -> Entry | None:
    """The entry point that a child would load for a backend's name, blocked or not; None when none is installed."""
    entries = [each for each in installed_entries() if each.name == name]
    entries = [each for each in entries if distribution in (None, each.distribution)]
    if len(entries) > 1:
        # A name clash is settled as the registry settles it, among those that are not blocked if there are any.
        for asked in (config or settings.read(), Settings()):
            chosen = Registry(installed_entries(), asked).entry(name)
            if chosen is not None and distribution in (None, chosen.distribution):
                return chosen
    return entries[0] if entries else None


def probe(
    name: str,
    device: str,
    *,
    timeout: float | None = None,
    fresh: bool = False,
    on_stage: Callable[[str], None] | None = None,
    config: Settings | None = None,
    distribution: str | None = None,
    machine: Mapping[str, Any] | None = None,
) -> Answer:
    """Whether an installed backend can run on a device: read from disk, or else found out by a child and kept there.

    A backend that `FUSEBOARD_DISABLE` blocks is asked about all the same, in the child only.

    Args:
        name: The backend's name.
        device: Such as `cpu` or `cuda:0`.
        timeout: Seconds for import and self-test; default `FUSEBOARD_PROBE_TIMEOUT`.
        fresh: Ask a child whatever is on disk, and keep its answer.
        on_stage: Told each stage as a child reaches it: `plugin`, `probe`, `import`, `self-test`.
        config: Settings in place of the environment's.
        distribution: Who ships the backend, where two do.
        machine: `machine.facts()` of a process that has torch loaded; else a child is asked once.
    """
    config = settings.read() if config is None else config
    limit = config.probe_timeout if timeout is None else timeout
    entry = find(name, distribution, config)
    if entry is None:
        return Answer(ok=False, reason=f"no installed plugin has a backend called {name!r}", stage="plugin")
    if not possible():
        return Answer(ok=False, reason="this interpreter cannot start a child process", stage="plugin")
    where, key = verdicts.folder(config.cache), {}
    if where is not None:
        machine = survey() if machine is None else machine
        if machine["torch"] is None:
            return Answer(ok=False, reason=f"torch cannot be imported: {machine['error']}", stage="import")
        key = verdicts.key(name, entry.distribution, device, machine)
        kept = None if fresh else verdicts.read(where, key, limit=limit)
        if kept is not None:
            return Answer(
                kept["ok"], kept["reason"], kept["stage"], kept["seconds"], cached=True, detail=tuple(kept["detail"]),
                changed=tuple(kept.get("changed", ())), faults=tuple(kept.get("faults", ())),
            )  # fmt: skip
    requires: dict[str, Any] = {}

    def heard(line: Mapping[str, Any]) -> None:
        if "requires" in line:  # stamped before they are imported: what the answer will be about
            requires.update(verdicts.packages(line["requires"]))
        elif on_stage is not None and "stage" in line:
            on_stage(line["stage"])

    end = _ask({"task": "probe", "device": device, **_named(entry)}, limit, heard=heard)
    found = end.answer or {"ok": False, "reason": end.failure, "stage": end.kind}
    answer = Answer(
        found["ok"], found["reason"], found["stage"], end.seconds, detail=end.detail,
        changed=tuple(found.get("changed", ())), faults=tuple(found.get("faults", ())),
    )  # fmt: skip
    if where is not None and not _passes_soon(answer):
        verdicts.write(where, key, {
            "requires": requires, "limit": limit, "ok": answer.ok, "reason": answer.reason, "stage": answer.stage,
            "seconds": round(answer.seconds, 3), "detail": list(answer.detail), "changed": list(answer.changed),
            "faults": list(answer.faults),
        })  # fmt: skip
    return answer


def survey(*, timeout: float = 120) -> dict[str, Any]:
    """What torch says of this machine, asked in a child, once per process and environment.

    Returns:
        `torch` (its version, or None), `error` (why torch cannot be imported, or None), `cuda`, `hip`, `cudnn`,
        `driver`, `python`, `platform`, `devices` (each with `device`, and for a GPU `name`, `capability` and `memory`)
        and `sdpa` (the state of torch's attention that all threads share, as a fresh process has it).
    """
    with _survey_lock:
        asked = (tuple(sys.path), tuple(sorted(os.environ.items())))
        if _surveyed.get("asked") != asked:
            found: dict[str, Any] = {
                **dict.fromkeys(("torch", "error", "cuda", "hip", "cudnn", "driver")),
                "python": platform.python_version(), "platform": platform.platform(), "devices": [], "sdpa": {},
            }  # fmt: skip
            end = _ask({"task": "survey"}, timeout, start=timeout)
            found |= end.answer or {"error": f"a process that tried it {end.failure}", "detail": list(end.detail)}
            _surveyed.clear()
            _surveyed.update(asked=asked, found=found)
        answer: dict[str, Any] = copy.deepcopy(_surveyed["found"])
        return answer


_surveyed: dict[str, Any] = {}
_survey_lock = threading.Lock()


def declare(name: str, *, timeout: float = 60) -> dict[str, Any]:
    """What an installed plugin says of itself, asked in a child that loads its module and never its kernel package.

    Returns:
        `fault` (what is wrong with the plugin, or None), `distribution`, `version`, `info` (`summary`, `requires`,
        `homepage`), `constraints` (each field in words or plain data), `exactness` (`exact`, `approximate`, or
        `depends on the call`), `known_bad` (each with `package`, `versions`, `reason`, `link`, and `some_calls`: not
        the whole backend), `install` (the line that keeps the installed torch) and `detail` (what it printed).
    """
    entry = find(name)
    if entry is None:
        return _declared(None) | {"fault": f"no installed plugin has a backend called {name!r}"}
    end = _ask({"task": "declare", "backends": [_named(entry)]}, timeout)
    answer = next(iter((end.answer or {}).values()), {"fault": end.failure})
    return _declared(entry) | answer | {"detail": list(end.detail)}


def declare_together(names: Sequence[str], *, timeout: float = 60) -> dict[str, dict[str, Any]]:
    """`declare` for several backends of one distribution, in one child while all goes well.

    Where that child prints something, finds a fault or does not end well, each backend is asked again alone, so that
    it is known who it was.
    """
    entries = {name: find(name) for name in names}
    found = [entry for entry in entries.values() if entry is not None]
    if len(found) == len(names) > 1:
        end = _ask({"task": "declare", "backends": [_named(entry) for entry in found]}, timeout)
        answers = end.answer or {}
        if not end.detail and all("fault" not in answers.get(name, {"fault": ""}) for name in names):
            return {name: _declared(entries[name]) | answers[name] for name in names}
    return {name: declare(name, timeout=timeout) for name in names}


def _declared(entry: Entry | None) -> dict[str, Any]:
    return {
        "fault": None, "distribution": entry and entry.distribution, "version": entry and entry.version, "info": {},
        "constraints": {}, "exactness": None, "known_bad": [], "install": None, "faults": [], "detail": [],
    }  # fmt: skip


def _named(entry: Entry) -> dict[str, str]:
    return {"name": entry.name, "distribution": entry.distribution}


def _passes_soon(answer: Answer) -> bool:
    """Whether a no is about the moment and not about the backend: a device that is full, or taken by others."""
    about = ("out of memory", "outofmemory", "busy or unavailable", "keyboardinterrupt", _NOT_ASKED, STAGES["start"])
    return not answer.ok and any(each in answer.reason.lower() for each in about)


# ---- one child


@attrs.frozen
class _End:
    """How a child ended: with an answer, or with a failure in words and its kind, a stage of Verdict or Answer."""

    answer: dict[str, Any] | None
    failure: str
    kind: str
    seconds: float
    detail: tuple[str, ...]


def _ask(
    question: Mapping[str, Any],
    limit: float,
    *,
    start: float = START_LIMIT,
    heard: Callable[[Mapping[str, Any]], None] = lambda _line: None,
) -> _End:
    """Start a child, listen, and leave nothing of it behind, however it ends."""
    begun = time.monotonic()
    try:
        folder = Path(tempfile.mkdtemp(prefix="fuseboard-child-"))
    except OSError as error:
        return _End(None, f"{_NOT_ASKED}: {first_line(error)}", "crash", 0.0, ())
    try:
        asked = {**question, "limit": limit, "start": start, "answers": str(folder / "answers")}
        try:
            asked["path"] = _path()
            (folder / "question").write_text(json.dumps(asked), encoding="utf-8")
            child = _Child(folder / "question")
        except (OSError, RuntimeError) as error:  # of files and processes, or of threads, there are too many
            return _End(None, f"{_NOT_ASKED}: {first_line(error)}", "crash", time.monotonic() - begun, ())
        try:
            answer, failure, kind = _listen(child, folder / "answers", limit, start, heard)
        finally:
            child.end()
        return _End(answer, failure, kind, time.monotonic() - begun, child.printed())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _listen(
    child: _Child, answers: Path, limit: float, start: float, heard: Callable[[Mapping[str, Any]], None]
) -> tuple[dict[str, Any] | None, str, str]:
    """Wait for a child's answer, its end or the limit: the answer, or else what happened and its kind."""
    stage, known, allowed, since = "start", 0, start, time.monotonic()
    while True:
        code = child.wait(_POLL)
        lines = _lines(answers)
        for line in lines[known:]:
            heard(line)
            if "answer" in line:
                return line["answer"], "", ""
            if line.get("stage", stage) != stage:
                # The limit holds for plugin, probe, import and self-test together.
                if stage == "start":
                    allowed, since = limit, time.monotonic()
                stage = line["stage"]
        known = len(lines)
        if code is not None:
            return None, f"{_ended(code)} during {STAGES[stage]}", "crash"
        if time.monotonic() - since > allowed + _GRACE:
            return None, f"did not end within {allowed:g} s during {STAGES[stage]}", "time limit"


def _path() -> list[str]:
    """The path, told apart from the current folder. What is no file is a name for an import hook."""
    return [os.path.abspath(each) if os.path.exists(each or ".") else str(each) for each in sys.path]  # noqa: PTH100, PTH110 - neither raises for a folder that may not be read


def _lines(answers: Path) -> list[dict[str, Any]]:
    """The lines that the child has written to the end: it may be killed in the middle of one."""
    try:
        text = answers.read_bytes()
    except OSError:
        return []
    found = []
    for line in text.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


_SIGNALS = {
    "SIGSEGV": "segmentation fault", "SIGABRT": "abort", "SIGILL": "illegal instruction", "SIGBUS": "bus error",
    "SIGFPE": "arithmetic error", "SIGSYS": "forbidden system call", "SIGTRAP": "trap",
}  # fmt: skip
_WINDOWS = {
    0xC0000005: "access violation", 0xC000001D: "illegal instruction", 0xC00000FD: "stack overflow",
    0xC0000094: "integer division by zero", 0xC0000409: "abort", 0xC0000135: "DLL not found",
}  # fmt: skip


def _ended(code: int) -> str:
    """How a process ended that gave no answer, in words."""
    if code >= 0:
        if code in _WINDOWS:
            return f"crashed (0x{code:X}, {_WINDOWS[code]})"
        return f"ended its process (exit status {code}) without an answer"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if name == "SIGKILL":
        return "was killed (SIGKILL), as the system does when memory runs out,"
    return f"crashed ({name}, {_SIGNALS[name]})" if name in _SIGNALS else f"was ended ({name})"


class _Child:
    """A process in a session of its own, whose output is read away and kept in part."""

    def __init__(self, question: Path) -> None:
        self._mark = secrets.token_hex(16)
        # The child's own settings are handed to it. `here`, so that an engine imported there does not ask a child.
        env = {name: value for name, value in os.environ.items() if not name.startswith(settings.PREFIX)}
        env |= {settings.PREFIX + "PROBE": "here", "PYTHONUNBUFFERED": "1", _MARK: self._mark}
        apart: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, and code of our own
            [sys.executable, "-c", _BOOT, str(question)], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, bufsize=0, **apart,
        )  # fmt: skip
        self._tail = b""
        self._reader = threading.Thread(target=self._read, name="fuseboard-child-output", daemon=True)
        try:
            self._reader.start()
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def wait(self, seconds: float) -> int | None:
        """Its exit code, or None while it runs."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """Kill it and whatever it started."""
        if sys.platform == "win32":
            if self._process.poll() is None:
                taskkill = ["taskkill", "/F", "/T", "/PID", str(self._process.pid)]
                subprocess.run(taskkill, check=False, capture_output=True)  # noqa: S603 - a number is no injection
                self._process.kill()
        else:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for _ in range(_SWEEPS):  # those that left for a session of their own, and what they start meanwhile
                left = list(_marked(self._mark))
                for pid in left:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                if not left:
                    break
        self._process.wait()
        self._reader.join(1.0)

    def printed(self) -> tuple[str, ...]:
        """The last lines of its output, harmless to a terminal."""
        lines = [line.strip("\r") for line in self._tail.decode(errors="replace").split("\n")]
        shown = ["".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in line[:LINE]) for line in lines]
        return tuple([line for line in shown if line.strip()][-LINES:])

    def _read(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        with pipe, contextlib.suppress(OSError):
            while chunk := pipe.read(_TAIL):
                self._tail = (self._tail + chunk)[-_TAIL:]


_MARK = "_FUSEBOARD_CHILD"
_SWEEPS = 5


def _marked(mark: str) -> Iterator[int]:
    """Processes that inherited a child's mark; found on Linux, elsewhere none."""
    wanted = f"{_MARK}={mark}".encode()
    for each in Path("/proc").glob("[0-9]*/environ") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):
            if wanted in each.read_bytes().split(b"\0"):
                yield int(each.parent.name)
