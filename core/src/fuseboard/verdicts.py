"""What children found out about backends, kept on disk: one small file a verdict, readable by a person.

A file is named after its backend, its device and the hash of its key, and holds the key in clear: what the verdict
depends on and can be known without loading the plugin. What only the plugin knows, the packages it requires, stands
beside the key and is compared when the file is read. Nothing here raises: a cache that cannot be read is empty, one
that cannot be written is said once. Loads no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import os
import platform
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fuseboard
from fuseboard import settings
from fuseboard.registry import GROUP

__all__ = ["LASTS", "folder", "key", "packages", "path", "read", "surroundings", "write"]

LASTS = 24 * 60 * 60.0
"""Seconds that a no is believed: its cause may pass."""

_LARGEST = 1 << 20
_MANY_FILES = 4000
_CODE = re.compile(r"\.(py|pyd|dll|dylib|so)(\.\d+)*$")
_VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_HOME", "CUDA_PATH", "ROCM_HOME", "ROCM_PATH", "HIP_PATH",
              "HSA_OVERRIDE_GFX_VERSION", "TORCH_CUDA_ARCH_LIST")  # fmt: skip
_FAMILIES = ("DYLD_", "FLASH_ATTENTION_", "XFORMERS_", "CUTE_DSL_", "TRITON_")

log = logging.getLogger("fuseboard")
_told: set[str] = set()


def folder(cache: str) -> Path | None:
    """Where verdicts are kept, given the setting; None for nowhere."""
    if cache == settings.NO_CACHE:
        return None
    try:
        if cache:
            return Path(cache).expanduser().absolute()
        if sys.platform == "win32":
            base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = str(Path.home() / "Library" / "Caches")
        else:
            named = os.environ.get("XDG_CACHE_HOME", "")
            base = named if Path(named).is_absolute() else str(Path.home() / ".cache")
        return Path(base) / "fuseboard"
    except (RuntimeError, OSError):  # no home
        return None


# ---- what a verdict depends on


def key(name: str, distribution: str, device: str, machine: Mapping[str, Any]) -> dict[str, Any]:
    """What a verdict depends on, as far as it is known without loading the plugin.

    Args:
        name: The backend's.
        distribution: Who ships it.
        device: Such as `cuda:0`.
        machine: What torch says of this machine: `machine.facts()`, or a child's `survey()`.
    """
    here: Mapping[str, Any] = next((each for each in machine["devices"] if each["device"] == device), {})
    found = {
        "backend": name,
        "device": device,
        "device name": here.get("name"),
        "capability": here.get("capability"),
        "fuseboard": [fuseboard.__version__, _hash(list(_seen(_own(), whole=True)))],
        "plugin": [distribution, _version(distribution), _stamp(distribution, whole=True)],
        **{fact: machine.get(fact) for fact in ("torch", "cuda", "hip", "driver")},
        # A process that uses the CPU alone does not load cuDNN to ask for its version.
        "cudnn": machine.get("cudnn") if device.startswith("cuda") else None,
        "python": sys.version,
        "prefix": sys.prefix,
        "platform": platform.platform(),
        "environment": _environment(),
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))  # as it will be read: a tuple is a list there
    return plain


def packages(requires: Iterable[str]) -> dict[str, Any]:
    """Version and stamp of each distribution that a backend requires, by their metadata; nothing is imported."""
    return {name: [_version(name), _stamp(name, whole=False)] for name in sorted(requires)}


def surroundings() -> str:
    """A stamp of which distributions are installed: a package that a kernel missed may have been added since."""
    names = []
    for place in sys.path:
        with contextlib.suppress(OSError):
            names += [each.name for each in Path(place).iterdir() if each.suffix in (".dist-info", ".egg-info", ".pth")]
    return _hash(sorted(names))


def _environment() -> dict[str, str]:
    """Variables that decide which libraries a kernel loads, or how it is compiled."""
    exact = {*_VARIABLES, *(("PATH",) if sys.platform == "win32" else ())}
    # Where something is cached differs from process to process and decides nothing.
    wanted = (
        name for name in os.environ if name in exact or (name.startswith(_FAMILIES) and not name.endswith("_DIR"))
    )
    return {name: os.environ[name] for name in sorted(wanted)}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except Exception:  # noqa: BLE001 - absent, or damaged: both are no version
        return None


def _stamp(distribution: str, *, whole: bool) -> str | None:
    """A hash that changes when a distribution's code does, also behind one version; None when it is not installed.

    A list of the installed files with their hashes comes with a wheel, but says nothing of an editable install or of a
    library that was built again in place: so the code itself is looked at too, as a `whole` or by size and time.
    """
    try:
        found = importlib.metadata.distribution(distribution)
        names = {(found.read_text("top_level.txt") or "").strip() or re.sub(r"[-.]+", "_", distribution)}
        names = {name for text in names for name in text.split()}
        names |= {point.value.partition(":")[0].split(".")[0] for point in found.entry_points if point.group == GROUP}
        parts: list[Any] = [found.read_text("RECORD")]
    except Exception:  # noqa: BLE001 - a damaged file may raise anything
        return None
    for name in sorted(names):
        parts += _code(name, whole=whole)
    return _hash(parts)


def _code(module: str, *, whole: bool) -> Iterator[list[Any]]:
    """The code files of a module that is not imported for it: name and content, or size and time."""
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # noqa: BLE001 - an import hook may raise anything
        return
    if spec is None:
        return
    if spec.submodule_search_locations is None:
        yield from _seen([Path(spec.origin or "")], whole=whole)
    else:
        files = (each for place in spec.submodule_search_locations for each in _below(Path(place)))
        yield from _seen(itertools.islice(files, _MANY_FILES), whole=whole)


def _own() -> list[Path]:
    """Our own modules that a verdict may depend on; the folders beside them stand on these."""
    return sorted(Path(__file__).parent.glob("*.py"))


def _seen(files: Iterable[Path], *, whole: bool) -> Iterator[list[Any]]:
    for file in files:
        with contextlib.suppress(OSError):
            there = file.stat()
            content = whole and there.st_size < _LARGEST
            seen = hashlib.sha256(file.read_bytes()).hexdigest() if content else [there.st_size, there.st_mtime_ns]
            yield [str(file), seen]


def _below(place: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(place):
        folders[:] = sorted(each for each in folders if each != "__pycache__")
        yield from (Path(root, each) for each in sorted(files) if _CODE.search(each))


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


# ---- the files


def path(where: Path, wanted: Mapping[str, Any]) -> Path:
    """The file of a verdict."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "", f"{wanted['backend']}-{wanted['device']}")
    return where / f"{name}-{_hash(wanted)}.json"


def read(
    where: Path, wanted: Mapping[str, Any], *, limit: float, now: Callable[[], float] = time.time
) -> dict[str, Any] | None:
    """The verdict kept for a key, or None: there is none, it is damaged, or what it depends on has changed.

    Args:
        where: The folder.
        wanted: The key.
        limit: The time limit in force. A hang under a shorter one says nothing.
        now: The clock.
    """
    file = path(where, wanted)
    try:
        there = file.stat()
        if not stat.S_ISREG(there.st_mode) or there.st_size > _LARGEST:
            return None
        kept = json.loads(file.read_bytes())
        if not isinstance(kept, dict) or kept.pop("check", None) != _hash(kept) or kept.get("key") != wanted:
            return None
    except (OSError, ValueError, RecursionError):
        return None
    try:
        current = packages(kept["requires"]) == kept["requires"]
        if current and not kept["ok"]:
            age = now() - kept["written"]
            current = 0 <= age <= LASTS and kept["surroundings"] == surroundings()
            current = current and (kept["stage"] != "time limit" or limit <= kept["limit"])
    except (KeyError, TypeError):  # of another layout
        return None
    return kept if current else None


def write(where: Path, wanted: Mapping[str, Any], verdict: Mapping[str, Any]) -> None:
    """Keep a verdict. Readers see the old file or the new one, never half of it, however many write at once."""
    kept = {"key": dict(wanted), **verdict, "surroundings": surroundings(), "written": time.time()}
    kept = json.loads(json.dumps(kept))
    text = json.dumps(kept | {"check": _hash(kept)}, indent=1).encode() + b"\n"
    file = path(where, wanted)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        where.mkdir(parents=True, exist_ok=True)
        try:
            # The mode of any other file, so that what root found out when an image was built serves who runs it.
            temporary.write_bytes(text)
            temporary.replace(file)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        if str(where) not in _told:
            _told.add(str(where))
            text_ = f"verdicts are not kept: {where} cannot be written ({error.strerror or error})."
            log.warning("%s Set FUSEBOARD_CACHE to a folder that can be, or to off.", text_)
