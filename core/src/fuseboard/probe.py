"""Can this backend run on this device? Asked the first time a policy wants it there, answered once.

The whole question runs on a thread of its own: with torch's default state whatever the caller has set (autocast, grad
mode, streams are the thread's), and so that an import that hangs becomes a reason after a while instead of a hang of
the host. Under `FUSEBOARD_PROBE=child` a child process is asked before, or the disk, where its answers are kept: only a
kernel that a process has survived is loaded here, and its self-test is not repeated.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import threading
from collections.abc import Callable

import attrs
import torch
from torch.torch_version import TorchVersion

from fuseboard import child, machine, selftest
from fuseboard.backend import Backend, Kernel
from fuseboard.constraints import version_terms
from fuseboard.registry import Registry, first_line, shown

__all__ = ["PASSING", "Verdict", "examine", "precheck", "verdict"]

PASSING = ("capture", "thread")
"""Stages whose no is about the moment: it is not kept."""


@attrs.frozen
class Verdict:
    """Whether a backend can run on a device.

    Attributes:
        ok: Yes or no.
        reason: Why not, in words; empty for yes.
        stage: Which step said no: `device`, `version`, `known bad`, `probe`, `import`, `self-test`, `time limit`,
            `capture` or `thread`; in a child also `plugin` or `crash`.
        kernel: What to call; None for no.
    """

    ok: bool
    reason: str = ""
    stage: str = ""
    kernel: Kernel | None = attrs.field(default=None, repr=False, eq=False)

    @property
    def installed(self) -> bool:
        """Whether the backend looks able to run there: a no beyond this point is worth a warning on every output."""
        return self.ok or self.stage not in ("device", "version")


def precheck(backend: Backend, device: torch.device) -> Verdict | None:  # noqa: PLR0911 - one return a reason
    """A no that costs nothing: the wrong device, a package absent or too old. Imports no kernel package."""
    limits = backend.constraints
    if device.type not in limits.devices:
        return Verdict(
            ok=False, reason=f"runs on {', '.join(sorted(limits.devices))}, not on {device.type}", stage="device"
        )
    if device.type == "cuda" and limits.capability is not None:
        capability = torch.cuda.get_device_capability(device)
        low, high = limits.capability
        if not low <= capability <= high:
            needs, has = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}", f"{capability[0]}.{capability[1]}"
            text = f"needs compute capability {needs}, {device} has {has}"
            return Verdict(ok=False, reason=text, stage="device")
    for package, versions in backend.info.requires.items():
        have = _version(package)
        if have == "":
            text = f"{package} is installed without a readable version, needed {versions or 'any'}"
            return Verdict(ok=False, reason=text, stage="version")
        if have is None:
            install = backend.install(torch.__version__)
            return Verdict(ok=False, reason=f"{package} is not installed. Install it: {install}", stage="version")
        if not _in_range(have, versions):
            return Verdict(ok=False, reason=f"{package} is {have}, needed {versions}", stage="version")
    for bad in backend.known_bad:
        have = _version(bad.package) if bad.package is not None else None
        applies = bad.package is None or (have is not None and _in_range(have, bad.versions or ""))
        if bad.call is None and applies:
            return Verdict(ok=False, reason=f"known bad: {bad.effect}, see {bad.link}", stage="known bad")
    return None


def verdict(registry: Registry, backend: Backend, device: torch.device) -> Verdict:
    """Whether `backend` can run on `device`, asked once per process; other threads wait for the one that asks.

    While a CUDA graph is being captured nothing new can be asked, since the self-test waits for the device: the answer
    is then a no of stage `capture`, which is not kept.
    """
    key = (backend.name, str(device))
    known = registry.verdicts.get(key)
    if known is not None:
        return known
    with registry.lock:
        lock = registry.probe_locks.setdefault(key, threading.Lock())
    with lock:
        known = registry.verdicts.get(key)
        if known is not None:
            return known
        answer = precheck(backend, device)
        if answer is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                text = "not probed yet, and a CUDA graph is being captured: make one such call before the capture"
                return Verdict(ok=False, reason=text, stage="capture")
            answer = _by_a_child(registry, backend, device) if registry.settings.probe == "child" else None
            if answer is None or answer.ok:
                tested = answer is not None
                answer = _on_a_thread(backend, device, registry.settings.probe_timeout, tested=tested)
        if answer.stage not in PASSING:
            registry.verdicts[key] = answer
        return answer


def examine(backend: Backend, device: torch.device, on_stage: Callable[[str], None]) -> Verdict:
    """Whether `backend` can run on `device`, asked here and now, on the calling thread and without a time limit.

    What a child process does: an exception that is no `Exception` is the caller's.
    """
    return precheck(backend, device) or _ask(backend, device, threading.Event(), on_stage)


def _by_a_child(registry: Registry, backend: Backend, device: torch.device) -> Verdict | None:
    """What a child said, now or earlier; None where none can be asked."""
    # A backend that a host or a test gave to its Registry by hand is no installed entry point: a child would not find
    # it, or would find another of that name.
    found = child.find(backend.name, backend.distribution, registry.settings)
    if found is None or found.version != backend.version or not child.possible():
        return None
    answer = child.probe(
        backend.name, str(device), distribution=backend.distribution, config=registry.settings,
        machine=machine.facts([device]),
    )  # fmt: skip
    return Verdict(ok=answer.ok, reason=answer.reason, stage=answer.stage)


def _on_a_thread(backend: Backend, device: torch.device, timeout: float, *, tested: bool) -> Verdict:
    answers: list[Verdict | BaseException] = []

    given_up = threading.Event()

    def ask() -> None:
        try:
            answers.append(_ask(backend, device, given_up, tested=tested))
        except BaseException as error:  # noqa: BLE001 - handed to the thread that asked
            answers.append(error)

    thread = threading.Thread(target=ask, name=f"fuseboard-probe-{backend.name}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # of threads there are too many, or the interpreter is about to end
        return Verdict(ok=False, reason=f"it could not be probed: {first_line(error)}", stage="thread")
    try:
        thread.join(min(timeout, threading.TIMEOUT_MAX))
    finally:
        if thread.is_alive():  # too late, or the wait was interrupted
            given_up.set()
            _given_up.append(thread)
    if not answers:
        text = f"its import or self-test did not end within {timeout:g} s (FUSEBOARD_PROBE_TIMEOUT)"
        return Verdict(ok=False, reason=text, stage="time limit")
    answer = answers[0]
    if isinstance(answer, SystemExit):  # a package that exits at import ends its own probe, not the host
        return Verdict(ok=False, reason=f"its import called sys.exit({answer.code!r})", stage="import")
    if isinstance(answer, (KeyboardInterrupt, GeneratorExit)):
        raise answer
    if isinstance(answer, BaseException):  # a panic in Rust is one: nobody cancels what runs on this thread
        return Verdict(ok=False, reason=f"its import or self-test raised {first_line(answer)}", stage="import")
    return answer


# An interpreter that ends while a thread is inside torch aborts. A probe that was given up ends before its next case,
# and the end of the process waits a little for it; one that truly hangs is left behind.
_given_up: list[threading.Thread] = []
_LAST_WAIT = 2.0


@atexit.register
def _leave() -> None:
    for thread in _given_up:
        thread.join(_LAST_WAIT)


def _ask(
    backend: Backend,
    device: torch.device,
    given_up: threading.Event,
    on_stage: Callable[[str], None] = lambda _stage: None,
    *,
    tested: bool = False,
) -> Verdict:
    """Probe, import, self-test unless it is `tested` already; an exception at each becomes its reason."""
    stage = "probe"
    try:
        with torch.inference_mode(mode=False), _current(device):
            on_stage(stage)
            reason = backend.probe(device)
            if reason is not None:
                said = isinstance(reason, str) and reason.strip()
                text = reason if said else f"hook probe gave {shown(reason)}; expected a reason in words, or None"
                return Verdict(ok=False, reason=text, stage=stage)
            on_stage(stage := "import")
            kernel = backend.load(device)
            if not callable(kernel):
                return Verdict(
                    ok=False, reason=f"hook kernel gave {shown(kernel)}, which cannot be called", stage=stage
                )
            if not tested:
                on_stage(stage := "self-test")
                reason = selftest.run(backend, kernel, device, given_up.is_set)
    except Exception as error:  # noqa: BLE001 - a package may raise anything at import or in a kernel
        return Verdict(ok=False, reason=f"{stage} failed: {first_line(error)}", stage=stage)
    return Verdict(ok=False, reason=reason, stage=stage) if reason is not None else Verdict(ok=True, kernel=kernel)


def _current(device: torch.device) -> torch.cuda.device:
    # Kernels that launch on the current device are asked on the right one. -1 changes nothing.
    return torch.cuda.device(device if device.type == "cuda" else -1)


def _version(package: str) -> str | None:
    """The installed version; None when the package is absent, empty when its metadata is damaged."""
    try:
        return importlib.metadata.version(package) or ""
    except importlib.metadata.PackageNotFoundError:
        return None
    except Exception:  # noqa: BLE001 - a damaged file may raise anything
        return ""


def _in_range(version: str, wanted: str) -> bool:
    """Whether a version lies in a range such as `>=2.6,<3`; an empty range holds all. Compared by PEP 440."""
    have = TorchVersion(version.split("+", maxsplit=1)[0])
    for operator, bound in version_terms(wanted):
        holds = {
            ">=": have >= bound, "<=": have <= bound, "==": have == bound,
            "!=": not have == bound, ">": have > bound, "<": have < bound,  # noqa: SIM201 - TorchVersion compares != as text
        }[operator]  # fmt: skip
        if not holds:
            return False
    return True
