"""The child's side of `child`: it answers one question about a plugin or this machine, and ends.

Started by `child` in a process of its own; nothing else imports it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.metadata
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from fuseboard.constraints import Constraints, HeadDims
from fuseboard.registry import Fault, Registry, first_line, installed_entries
from fuseboard.settings import Settings

if TYPE_CHECKING:
    import torch

    from fuseboard.backend import Backend
    from fuseboard.call import Call, Sizes

Say = Callable[[dict[str, Any]], None]


def main(asked: Mapping[str, Any]) -> None:
    """Answer what was asked, and end the process there and then: what a kernel does at exit is not in question."""
    answers = asked["answers"]

    def say(line: dict[str, Any]) -> None:
        # Opened for each line: a kernel may close whatever is open.
        with Path(answers).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    _last_will()
    with contextlib.suppress(Exception):  # a host may run without standard error
        faulthandler.enable(all_threads=True)
        faulthandler.dump_traceback_later(asked["start"])
    say({"answer": _TASKS[asked["task"]](asked, say)})
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)


def _last_will() -> None:
    """A crash leaves no core file; where it can be had, this process ends with its parent, and before it in need."""
    with contextlib.suppress(Exception):
        resource = importlib.import_module("resource")  # POSIX only
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # out of memory, the system ends this process and not its parent
            Path("/proc/self/oom_score_adj").write_text("1000")
        with contextlib.suppress(Exception):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _begin(stage: str, asked: Mapping[str, Any], say: Say) -> None:
    """Say that the time limit begins; at its end the tracebacks are printed, which tell where a hang is."""
    say({"stage": stage})
    with contextlib.suppress(Exception):
        faulthandler.dump_traceback_later(asked["limit"])


# ---- probe


def _probe(asked: Mapping[str, Any], say: Say) -> dict[str, Any]:
    try:
        import torch  # noqa: PLC0415 - it may fail, or crash, and that is an answer

        from fuseboard import machine, probe  # noqa: PLC0415 - they import torch
    except Exception as error:  # noqa: BLE001 - a broken installation may raise anything
        return _no(f"torch cannot be imported: {first_line(error)}", "import")
    before = machine.sdpa()
    _begin("plugin", asked, say)
    backend, faults = _load(asked)
    if backend is None:
        return _no("; ".join(_texts(faults)), "plugin")
    say({"requires": sorted(backend.info.requires)})
    stage = "probe"

    def reached(now: str) -> None:
        nonlocal stage
        stage = now
        say({"stage": now})

    try:
        device = torch.device(asked["device"])
        if device.type in backend.constraints.devices and machine.lacks(device):
            return _no(f"there is no {device} here: torch sees {', '.join(map(str, machine.devices()))}", "device")
        found = probe.examine(backend, device, reached)
        if found.ok:
            for call, sizes in _calls(backend, device):
                backend.exactness(call)
                backend.rank(call, sizes)
    except SystemExit as error:
        return _no(f"its {stage} called sys.exit({error.code!r})", stage)
    except BaseException as error:  # noqa: BLE001 - there is nobody else to tell
        return _no(f"{stage} failed: {first_line(error)}", stage)
    after = machine.sdpa()
    changed = [f"{name}: {old} -> {after.get(name)}" for name, old in before.items() if after.get(name) != old]
    return {"ok": found.ok, "reason": found.reason, "stage": found.stage, "changed": changed, "faults": _texts(faults)}


def _no(reason: str, stage: str) -> dict[str, Any]:
    return {"ok": False, "reason": reason, "stage": stage}


def _load(asked: Mapping[str, Any]) -> tuple[Backend | None, list[Fault]]:
    """The backend, None when it cannot be loaded; and its plugin's faults, to which those of later hooks are added."""
    name, distribution = asked["name"], asked["distribution"]
    entries = [each for each in installed_entries() if (each.name, each.distribution) == (name, distribution)][:1]
    made = Registry(entries, Settings(probe_timeout=asked["limit"]))
    why = f"no installed plugin has a backend called {name!r}"
    try:
        backend = made.resolve(name)
    except BaseException as error:  # noqa: BLE001 - there is nobody else to tell
        backend, why = None, first_line(error)
    if backend is None and not made.faults:
        made.faults.append(Fault(name, distribution, "unknown", why))
    return backend, made.faults


def _texts(faults: Sequence[Fault]) -> list[str]:
    return [each.message for each in faults]


def _calls(backend: Backend, device: torch.device) -> Iterator[tuple[Call, Sizes]]:
    """Plain calls of each dtype that it takes, causal or not, as a chain asks its hooks about them."""
    import torch  # noqa: PLC0415 - a child loads it when it is about to be asked for

    from fuseboard.call import Call, Sizes  # noqa: PLC0415 - it imports torch

    limits, length = backend.constraints, 64
    dim = 64 if limits.head_dims.admits(64) else limits.head_dims.nearest(0) or 64
    v_dims = limits.v_head_dims
    v_dim = dim if v_dims is None or v_dims.admits(dim) else v_dims.nearest(0) or dim
    capability = None
    if device.type == "cuda":  # of a device that is not here, what it declares to need
        low = limits.capability[0] if limits.capability is not None else (8, 0)
        capability = torch.cuda.get_device_capability(device) if device.index is not None else low
    q, v = ((length * each, length * each, each, 1) for each in (dim, v_dim))
    sizes = Sizes(1, 1, 1, length, length, dim, v_dim, (q, q, v))
    for dtype in sorted(limits.dtypes, key=str):
        for causal in (False, True):
            yield Call(device.type, device.index, capability, dtype, dim, v_dim, causal=causal), sizes


# ---- survey


def _survey(_asked: Mapping[str, Any], _say: Say) -> dict[str, Any]:
    try:
        from fuseboard import machine  # noqa: PLC0415 - it imports torch, which may fail, or crash
    except BaseException as error:  # noqa: BLE001 - a broken installation may raise anything
        return {"error": first_line(error)}
    return machine.facts() | {"sdpa": machine.sdpa()}


# ---- declare


def _declare(asked: Mapping[str, Any], say: Say) -> dict[str, Any]:
    with contextlib.suppress(Exception):  # a plugin that needs torch says so itself
        import torch  # noqa: F401, PLC0415 - before the time limit begins
    _begin("plugin", asked, say)
    return {each["name"]: _declaration({**asked, **each}) for each in asked["backends"]}


def _declaration(asked: Mapping[str, Any]) -> dict[str, Any]:
    backend, faults = _load(asked)
    if backend is None:
        return {"fault": "; ".join(_texts(faults))}
    return {
        "info": attrs.asdict(backend.info, recurse=False) | {"requires": dict(backend.info.requires)},
        "constraints": {
            each.name: _plain(getattr(backend.constraints, each.name)) for each in attrs.fields(Constraints)
        },
        "exactness": _exactness(backend),
        "known_bad": [
            {
                "package": each.package, "versions": each.versions, "reason": each.effect, "link": each.link,
                "some_calls": each.call is not None,
            }
            for each in backend.known_bad
        ],
        "install": backend.install(_torch_version()),
        "faults": _texts(faults),  # the last, as the hooks asked above may add to them
    }  # fmt: skip


def _plain(value: Any) -> Any:
    """A field of Constraints as data that a person can read."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, frozenset):
        return sorted((_plain(each) for each in value), key=str)
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if hasattr(value, "rule"):  # a Guard: its functions say nothing
        return {"rule": value.rule, "allowed": value.allowed, "nearest": value.nearest}
    if isinstance(value, HeadDims):
        return str(value)
    return str(value).removeprefix("torch.")


def _exactness(backend: Backend) -> str:
    """Its answer for plain calls of each dtype, causal or not."""
    import torch  # noqa: PLC0415 - loaded by `_declare`, if it can be

    devices = map(torch.device, sorted(backend.constraints.devices))
    answers = {backend.exactness(call).value for device in devices for call, _ in _calls(backend, device)}
    return answers.pop() if len(answers) == 1 else "depends on the call"


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


_TASKS: dict[str, Callable[[Mapping[str, Any], Say], dict[str, Any]]] = {
    "probe": _probe,
    "survey": _survey,
    "declare": _declare,
}
