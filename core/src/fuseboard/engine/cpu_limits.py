"""What a process may use of this machine's CPUs: affinity, cpuset and quota, read and never changed.

Torch starts one thread per physical core that the process may run on, and knows nothing of quotas: a container with two
CPUs' worth of time on 64 cores runs 64 threads, and all of them are stopped when the time is used up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["advice"]

PINNING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
COUNTS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
"""What sets the number of torch's threads, the stronger first."""


def advice(*, root: str | os.PathLike[str] = "/", environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """How many threads fit this process's share of the machine, and why. Reads only; loads no torch.

    A number other than torch's own changes results in the last bits, so it is advice: `apply(threads=...)` takes it.

    Args:
        root: Where `/proc` and `/sys` are.
        environ: The variables to go by; default `os.environ`.

    Returns:
        `cpus` (of the machine), `affinity` and `cpuset` (CPU numbers; None where the system has none), `cores`
        (physical ones among those), `quota` (CPUs' worth of time, or None) and `quota_file`, `torch` (the threads that
        torch is expected to start with), `threads` (those that fit), `changes_results` (whether these two differ),
        `reason`, and `notes` on variables that harm. JSON-ready.
    """
    environ = os.environ if environ is None else environ
    base = Path(root)
    cpus = os.cpu_count() or 1
    affinity = _affinity()
    cpuset = _cpuset(base)
    usable = affinity if affinity is not None else set(range(cpus))
    usable = usable & cpuset if cpuset and usable & cpuset else usable
    cores = _cores(base, usable)
    quota, file = _quota(base)
    given = next((f"{name}={environ[name]}" for name in COUNTS if environ.get(name, "").strip()), "")
    first = given.partition("=")[2].split(",")[0].strip()
    torch = min(int(first), len(usable)) if first.isdecimal() and int(first) else cores
    threads = min(cores, max(1, int(quota))) if quota is not None else cores
    reason = f"one for each physical core that the process may use: {cores} of {cpus} CPUs"
    if threads < cores:
        limit = f"{file} allows {quota:g} CPUs' worth of time on {cores} cores"
        reason = f"{limit}: more threads would use it up sooner and then be stopped together"
    if given:
        reason += f"; {given} is set and holds"
    return {
        "cpus": cpus,
        "affinity": None if affinity is None else sorted(affinity),
        "cpuset": None if cpuset is None else sorted(cpuset),
        "cores": cores,
        "quota": quota,
        "quota_file": file,
        "torch": torch,
        "threads": threads,
        "changes_results": threads != torch,
        "reason": reason,
        "notes": list(_pinned(environ)),
    }


def _pinned(environ: Mapping[str, str]) -> Iterator[str]:
    off = environ.get("OMP_PROC_BIND", "").strip().lower() == "false"
    for name in () if off else PINNING:
        value = environ.get(name, "").strip()
        if value:
            does = "pins the main thread to one CPU when torch is imported"
            yield f"{name}={value} {does}; processes and threads started later inherit that and compute on it alone"


def _affinity() -> set[int] | None:
    ask = getattr(os, "sched_getaffinity", None)  # Linux alone
    return None if ask is None else set(ask(0))


def _cores(base: Path, usable: set[int]) -> int:
    """Physical cores among these CPUs; as many as CPUs where the system does not tell."""
    found = set()
    for cpu in usable:
        about = base / "sys/devices/system/cpu" / f"cpu{cpu}" / "topology"
        core = _text(about / "core_id")
        found.add((_text(about / "physical_package_id"), core) if core else cpu)
    return max(1, len(found))


# ---- cgroups


def _quota(base: Path) -> tuple[float | None, str | None]:
    """The smallest quota of the process's cgroup and those above it, in CPUs, and the file that sets it."""
    found: list[tuple[float, str]] = []
    for folder in _folders(base, "cpu"):
        file = folder / "cpu.max"
        words = _text(file).split()
        if not words:
            file = folder / "cpu.cfs_quota_us"
            words = [_text(file), _text(folder / "cpu.cfs_period_us")]
        quota, period = (_number(word) for word in [*words, "", ""][:2])
        if quota > 0 and period > 0:
            found.append((quota / period, _shown(file, base)))
    return min(found) if found else (None, None)


def _cpuset(base: Path) -> set[int] | None:
    """The CPUs of the process's cgroup: those of the nearest one that says."""
    for folder in _folders(base, "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            found = _listed(_text(folder / name))
            if found:
                return found
    return None


def _folders(base: Path, controller: str) -> Iterator[Path]:
    """The process's cgroup and those above it, nearest first, in every hierarchy that may hold the controller."""
    for root, point, version, controllers in _mounts(base):
        path = next(_paths(base, controller if version == 1 else ""), None)
        if path is None or (version == 1 and controller not in controllers):
            continue
        # In a container the path may be the host's, or lead out of what is mounted: then what is mounted is the group,
        # and folders that are not there have no files.
        inside = path.removeprefix(root) if root != "/" and f"{path}/".startswith(f"{root}/") else path
        top = base / point.lstrip("/")
        parts = [part for part in inside.split("/") if part]
        folder = top if ".." in parts else top.joinpath(*parts)
        yield folder
        yield from (each for each in folder.parents if each == top or top in each.parents)


def _mounts(base: Path) -> Iterator[tuple[str, str, int, tuple[str, ...]]]:
    """Of each cgroup hierarchy: the group that is mounted, where, the version, and the controllers of version 1."""
    for line in _text(base / "proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        about, kind = fields.split(), rest.split()
        if len(about) > 4 and len(kind) > 2 and kind[0] in ("cgroup", "cgroup2"):  # noqa: PLR2004 - proc(5)
            version = 2 if kind[0] == "cgroup2" else 1
            yield about[3], about[4].replace("\\040", " "), version, tuple(kind[2].split(","))


def _paths(base: Path, controller: str) -> Iterator[str]:
    """The process's path in a hierarchy of version 1, or of version 2 for no controller."""
    for line in _text(base / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            yield path


def _listed(text: str) -> set[int] | None:
    """The numbers of a list like `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        low, dash, high = part.partition("-")
        high = high if dash else low
        if not low.isdecimal() or not high.isdecimal():
            return None
        found.update(range(int(low), int(high) + 1))
    return found or None


def _number(word: str) -> int:
    """A positive number, or 0 for anything else: `max`, -1."""
    return int(word) if word.isdecimal() else 0


def _shown(file: Path, base: Path) -> str:
    return f"/{file.relative_to(base).as_posix()}" if base != Path("/") else str(file)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
