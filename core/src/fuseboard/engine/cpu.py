"""CPU settings that change no result, applied before torch is imported. Standard library only.

    from fuseboard.engine import cpu
    cpu.apply()                                              # first of all, before torch and before threads
    import torch
    subprocess.Popen(command, env=cpu.child_env())           # the same for a process that the host starts

glibc maps a large block anew each time and gives it back when it is freed, so that every tensor above 32 MiB costs a
page fault for each 4 KiB, every time; in a thread other than the main one, so does one above 64 MiB whatever the
threshold. `apply` lets freed memory stay with the process and gives all threads one arena. The cost: memory once used
is kept, until `release`.

Nothing here changes a number, except the thread count, which is touched only when a number is given. What the user has
set wins, and every answer says so. Elsewhere than on Linux with glibc nothing is done.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fuseboard.engine.cpu_limits import COUNTS, advice
from fuseboard.errors import InputError

__all__ = ["advice", "apply", "child_env", "release", "report"]

_GIB = 1 << 30
_MOST = (1 << 31) - 1  # mallopt takes C ints

# Of each parameter of malloc: mallopt's number, the variable and the tunable that set it at a process's start.
_MMAP = ("M_MMAP_THRESHOLD", -3, "MALLOC_MMAP_THRESHOLD_", "mmap_threshold")
_NO_MMAP = ("M_MMAP_MAX", -4, "MALLOC_MMAP_MAX_", "mmap_max")
_TRIM = ("M_TRIM_THRESHOLD", -1, "MALLOC_TRIM_THRESHOLD_", "trim_threshold")
_ARENAS = ("M_ARENA_MAX", -8, "MALLOC_ARENA_MAX", "arena_max")

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_OTHER_MALLOC = re.compile(r"lib(jemalloc|tcmalloc|mimalloc|snmalloc|hoard|tbbmalloc_proxy)[\w.-]*\.so")

_lock = threading.Lock()
_applied: dict[str, int | str] = {}
_last: dict[str, Any] = {}


def apply(*, threads: int | None = None) -> dict[str, Any]:
    """Set this process up for torch on the CPU. Call it once, at the start of the host, before torch is imported.

    Args:
        threads: How many threads torch shall compute with. None leaves that alone; **a number changes results** in the
            last bits, and the report says so.

    Returns:
        What `report` returns from then on. Called again, or too late, it is an answer like any other: what is done
        stays, and each setting says why nothing more was.

    Raises:
        InputError: `threads` is not a positive whole number.
    """
    _checked(threads)
    with _lock:
        reason = _unfit()
        rows: dict[str, dict[str, Any]] = {}
        notes: list[str] = []
        again = bool(_last)
        if not reason:
            rows |= _malloc_here(notes)
            rows |= _openmp_here(threads, notes)
        _last.clear()
        _last.update(
            applied=not reason, reason=reason, libc=_libc(), again=again, torch_loaded="torch" in sys.modules,
            settings=rows, changes_results="OMP_NUM_THREADS" in _applied, notes=notes,
        )  # fmt: skip
    return report()


def report() -> dict[str, Any]:
    """What `apply` did here, what `child_env` adds for children, and `advice`. JSON-ready.

    Returns:
        `applied` (False: never called, or nothing applies here) and `reason` why not, `libc`, `again` (it was called
        before), `torch_loaded` (when it was called), `settings` and `children` (name → `state`, `value`, `reason`),
        `changes_results`, `notes`, `advice`. States: `set`; `earlier`, set by an earlier `apply`; `yours`, set by the
        user and left alone; `left`, not asked for; `refused` by the C library; `too late`; `no effect` here.
    """
    never = {
        "applied": False, "reason": _unfit() or "apply() was not called", "libc": _libc(), "again": False,
        "torch_loaded": "torch" in sys.modules, "settings": {}, "changes_results": False, "notes": [],
    }  # fmt: skip
    found: dict[str, Any] = copy.deepcopy(_last) if _last else never
    return {**found, "children": _for_child(os.environ, None), "advice": advice()}


def child_env(environ: Mapping[str, str] | None = None, *, threads: int | None = None) -> dict[str, str]:
    """The environment for a process that the host starts: a copy, with these settings added.

    Variables of malloc are read when a process starts, so they are for children; a worker that gets no environment of
    its own (multiprocessing) calls `apply` first instead.

    Args:
        environ: What to add to; default `os.environ`. A variable that it has keeps its value.
        threads: As for `apply`; **a number changes results**. None adds none.

    Raises:
        InputError: `threads` is not a positive whole number.
    """
    environ = os.environ if environ is None else environ
    rows = _for_child(environ, _checked(threads))
    return {**environ, **{name: str(row["value"]) for name, row in rows.items() if row["state"] == "set"}}


def release() -> bool:
    """Give memory that is free but kept back to the system, as after a model was dropped; whether there was any."""
    trim = None if _unfit() else getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


def _checked(threads: int | None) -> int | None:
    if threads is None or (isinstance(threads, int) and not isinstance(threads, bool) and threads > 0):
        return threads
    msg = f"threads is {threads!r}, expected a positive whole number, or None to leave the count to torch."
    raise InputError("threads", msg)


def _row(state: str, value: object = None, reason: str = "") -> dict[str, Any]:
    return {"state": state, "value": value, "reason": reason}


# ---- this process


def _malloc_here(notes: list[str]) -> dict[str, dict[str, Any]]:
    """Set malloc's parameters by mallopt, for the variables are read only when a process starts."""
    taken = _malloc_taken(os.environ, _maps())
    if taken is not None:
        return {name: taken for name, *_ in (_MMAP, _TRIM, _ARENAS)}
    mallopt = ctypes.CDLL(None).mallopt
    others = _threads() - 1
    if others and _ARENAS[0] not in _applied:
        run = f"{others} thread{' runs' if others == 1 else 's run'} already"
        notes.append(f"{run}: the arenas of such threads stay, and threads started later may get one of them")
    rows = {_MMAP[0]: _mallopt(mallopt, _MMAP, _GIB)}
    if rows[_MMAP[0]]["state"] == "refused":
        # Before 2.35 the threshold ends at 32 MiB. Nothing mapped at all does the same for larger blocks.
        rows[_NO_MMAP[0]] = _mallopt(mallopt, _NO_MMAP, 0)
    if any(row["state"] != "refused" for row in rows.values()):
        rows[_TRIM[0]] = _mallopt(mallopt, _TRIM, _MOST)
    else:
        why = "it would end the growth of the threshold for mapping, which stays as it was"
        rows[_TRIM[0]] = _row("left", None, why)
    return {**rows, _ARENAS[0]: _mallopt(mallopt, _ARENAS, 1)}


def _mallopt(mallopt: Callable[[int, int], int], parameter: tuple[str, int, str, str], value: int) -> dict[str, Any]:
    name, number, variable, tunable = parameter
    if name in _applied:
        return _row("earlier", _applied[name], "set by an earlier apply()")
    given = _given(os.environ, variable, tunable)
    if given is not None:
        return given
    if mallopt(number, value) != 1:
        return _row("refused", None, f"mallopt({name}, {value}) was refused by {_libc()}")
    _applied[name] = value
    return _row("set", value)


def _openmp_here(threads: int | None, notes: list[str]) -> dict[str, dict[str, Any]]:
    """Set what torch's OpenMP reads when it is loaded."""
    late = "torch is imported already, and its OpenMP has read its variables" if "torch" in sys.modules else ""
    rows = {"OMP_WAIT_POLICY": _openmp("OMP_WAIT_POLICY", "passive", _WAITING, late)}
    if rows["OMP_WAIT_POLICY"]["state"] == "set":
        os.environ["OMP_WAIT_POLICY"] = "passive"  # fuseboard: allow(before torch, by the host; changes no result)
    if threads is None and "OMP_NUM_THREADS" not in _applied:
        rows["OMP_NUM_THREADS"] = _row("left", None, "a count changes results; it is set when a number is given")
    else:
        late = late and f"{late}; torch.set_num_threads changes the count now"
        rows["OMP_NUM_THREADS"] = _openmp("OMP_NUM_THREADS", str(threads), COUNTS, late)
    if rows["OMP_NUM_THREADS"]["state"] == "set":
        os.environ["OMP_NUM_THREADS"] = str(threads)  # fuseboard: allow(the user's own number, before torch)
        notes.append(f"the thread count was set to {threads}: results differ in the last bits from those of another")
        usable = len(advice()["affinity"] or ())
        if threads is not None and usable and threads > usable:
            notes.append(f"{threads} threads were asked for and {usable} CPUs may be used: torch starts no more")
    library = "" if late else next(iter(re.findall(r"\S*/lib(?:gomp|iomp5|omp)[-.]\S*", _maps())), "")
    if library:
        notes.append(f"{library} is loaded already: if torch shares it, it has read its variables")
    return rows


def _openmp(name: str, value: str, names: tuple[str, ...], late: str) -> dict[str, Any]:
    if name in _applied:
        return _row("earlier", _applied[name], "set by an earlier apply(), which holds")
    given = _set_already(os.environ, names)
    if given is None and not late:
        _applied[name] = value
    return given or (_row("too late", None, late) if late else _row("set", value))


# ---- children


def _for_child(environ: Mapping[str, str], threads: int | None) -> dict[str, dict[str, Any]]:
    """What a child's environment gets, by variable."""
    if _unfit():
        return {}
    version = _version()
    # Before 2.35 a threshold above 32 MiB is ignored, while the trim threshold would pin it to 128 KiB.
    mapping = (_MMAP, _GIB) if version >= (2, 35) else (_NO_MMAP, 0)
    taken = _malloc_taken(environ, environ.get("LD_PRELOAD", ""))
    rows = {}
    for (_, _, variable, tunable), value in (mapping, (_TRIM, _MOST), (_ARENAS, 1)):
        rows[variable] = taken or _given(environ, variable, tunable) or _row("set", value)
    if mapping[0] is _NO_MMAP:  # a threshold of the user's would mean nothing
        rows[_NO_MMAP[2]] = _given(environ, *_MMAP[2:]) or rows[_NO_MMAP[2]]
    tunables = taken or _set_already(environ, ("GLIBC_TUNABLES",))
    if tunables is None and (version < (2, 35) or not _huge_pages_on_request()):
        tunables = _row("no effect", None, "huge pages need glibc 2.35 and a system set to madvise")
    rows["GLIBC_TUNABLES"] = tunables or _row("set", "glibc.malloc.hugetlb=1")
    rows["OMP_WAIT_POLICY"] = _set_already(environ, _WAITING) or _row("set", "passive")
    if threads is not None:
        changes = "changes results in the last bits"
        rows["OMP_NUM_THREADS"] = _set_already(environ, COUNTS) or _row("set", threads, changes)
    return rows


def _set_already(environ: Mapping[str, str], names: tuple[str, ...]) -> dict[str, Any] | None:
    name = next((each for each in names if each in environ), None)
    if name is None:
        return None
    if environ is os.environ and _applied.get(name) == environ[name]:
        return _row("earlier", environ[name], "set by apply(), and inherited")
    return _row("yours", environ[name], f"{name}={environ[name]} is set and holds")


def _given(environ: Mapping[str, str], variable: str, tunable: str) -> dict[str, Any] | None:
    """What the user has set a parameter of malloc to."""
    for part in environ.get("GLIBC_TUNABLES", "").split(":"):
        name, _, value = part.partition("=")
        if name == f"glibc.malloc.{tunable}":
            return _row("yours", value, f"{part} is set in GLIBC_TUNABLES and holds")
    return _set_already(environ, (variable,))


def _malloc_taken(environ: Mapping[str, str], libraries: str) -> dict[str, Any] | None:
    """Why malloc's parameters are to be left alone altogether."""
    other = _OTHER_MALLOC.search(libraries)
    if other:
        return _row("no effect", None, f"{other[1]} serves memory in place of glibc's malloc")
    if environ.get("THP_MEM_ALLOC_ENABLE", "").strip() == "1":
        both = "torch asks for huge pages, and keeping freed blocks as well takes the memory twice"
        return _row("yours", None, f"THP_MEM_ALLOC_ENABLE=1 is set: {both}")
    return None


# ---- where this runs


def _unfit() -> str:
    """Why nothing is done here; empty on Linux with glibc."""
    system = _system()
    if system != "linux":
        return f"these settings are for Linux with glibc; this is {system}"
    libc = _libc()
    return "" if libc.startswith("glibc") else f"these settings are for glibc; this system's C library is {libc}"


def _system() -> str:
    return {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)


def _libc() -> str:
    """The C library in words: `glibc 2.36`; `not glibc` for musl and others, which know no such name."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.confstr("CS_GNU_LIBC_VERSION") or "not glibc"
    return "not glibc"


def _version() -> tuple[int, int]:
    found = re.match(r"glibc (\d+)\.(\d+)", _libc())
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _maps() -> str:
    """The files that are mapped into this process, libraries among them."""
    return _text("/proc/self/maps")


def _huge_pages_on_request() -> bool:
    return "[madvise]" in _text("/sys/kernel/mm/transparent_hugepage/enabled")


def _threads() -> int:
    """Threads of this process, those of C libraries counted."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - a count
    return threading.active_count()


def _text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
