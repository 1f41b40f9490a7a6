"""What `doctor` reads without importing anything: settings, metadata, the folder of verdicts. Loads no torch."""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fuseboard import settings, verdicts
from fuseboard.constraints import version_terms
from fuseboard.errors import SettingsError
from fuseboard.registry import INSTALL_HINTS, Entry, install_hint

__all__ = ["IN_FORCE", "cache", "in_range", "listened", "not_installed", "read_settings", "version", "without"]

IN_FORCE: dict[str, Callable[[settings.Settings], str]] = {
    "FUSEBOARD_DISABLE": lambda held: ", ".join(sorted(held.disable)) or "nothing",
    "FUSEBOARD_DEBUG": lambda held: "masks" if held.debug_masks else "off",
    "FUSEBOARD_TEST": lambda held: "count" if held.test_count else "off",
    "FUSEBOARD_PROBE": lambda held: held.probe,
    "FUSEBOARD_PROBE_TIMEOUT": lambda held: f"{held.probe_timeout:g}",
    "FUSEBOARD_CACHE": lambda held: str(verdicts.folder(held.cache) or settings.NO_CACHE),
}
"""How each variable's value in force is written."""


def read_settings(environ: Mapping[str, str]) -> tuple[settings.Settings, list[dict[str, Any]], list[dict[str, Any]]]:
    """The settings in force, where each comes from, and the variables that are none.

    A value that means nothing is an error for every program that loads fuseboard; here it is shown, and the default
    holds.
    """
    given = {name: text for name, text in environ.items() if name.startswith(settings.PREFIX)}
    problems = {name: why for name in IN_FORCE.keys() & given.keys() if (why := _problem(name, given[name]))}
    good = {name: text for name, text in given.items() if name in IN_FORCE and name not in problems}
    held = settings.read(good)
    listed = [
        {
            "name": name,
            "value": shown(held),
            "source": "environment" if good.get(name, "").strip() else "default",
            "given": given.get(name),
            "problem": problems.get(name),
        }
        for name, shown in IN_FORCE.items()
    ]
    unknown = [
        {"name": name, "nearest": next(iter(difflib.get_close_matches(name, IN_FORCE, n=1)), None)}
        for name in sorted(given.keys() - IN_FORCE.keys())
    ]
    return held, listed, unknown


def version(distribution: str) -> str | None:
    """The installed version by its metadata; None when it is absent, `unknown` when the metadata is damaged."""
    try:
        return importlib.metadata.version(distribution) or "unknown"
    except importlib.metadata.PackageNotFoundError:
        return None
    except Exception:  # noqa: BLE001 - a damaged file may raise anything
        return "unknown"


def _problem(name: str, text: str) -> str | None:
    try:
        settings.read({name: text})
    except SettingsError as error:
        return str(error)
    return None


_VERSION = re.compile(
    r"v?(?:\d+!)?(\d+(?:\.\d+)*)[-_.]?(?:(a|alpha|b|beta|rc|c|pre|preview|dev|post|rev|r)[-_.]?(\d*))?"
)
_PHASES = {"dev": -4, "a": -3, "alpha": -3, "b": -2, "beta": -2, "post": 1, "rev": 1, "r": 1}
_RC, _FINAL = -1, 0


def in_range(have: str, wanted: str) -> bool | None:
    """Whether a version lies in a range such as `>=2.6,<3`, as far as a table needs it; None when it cannot be read.

    What decides is the probe in the child, which has torch's own comparison.
    """
    mine = _comparable(have)
    for operator, bound in version_terms(wanted):
        other = _comparable(bound)
        if mine is None or other is None:
            return None
        holds = {
            ">=": mine >= other, "<=": mine <= other, "==": mine == other,
            "!=": mine != other, ">": mine > other, "<": mine < other,
        }[operator]  # fmt: skip
        if not holds:
            return False
    return True


def _comparable(version: str) -> tuple[tuple[int, ...], int, int] | None:
    found = _VERSION.match(version.partition("+")[0].strip().lower())
    if found is None:
        return None
    release = [int(part) for part in found[1].split(".")]
    while release and release[-1] == 0:
        release.pop()
    phase = _FINAL if found[2] is None else _PHASES.get(found[2], _RC)
    return tuple(release), phase, int(found[3] or 0)


def not_installed(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """Backends that fuseboard knows and that no installed distribution ships, with what to install."""
    here = {each.name for each in entries}
    return [{"name": name, "install": install_hint(name)} for name in sorted(INSTALL_HINTS) if name not in here]


def cache(held: settings.Settings) -> dict[str, Any]:
    """Where verdicts are kept and how many there are."""
    where = verdicts.folder(held.cache)
    if where is None:
        return {"folder": None, "verdicts": 0}
    try:
        count = sum(1 for each in where.iterdir() if each.suffix == ".json")
    except OSError:  # not there yet, or not ours to read
        count = 0
    return {"folder": str(where), "verdicts": count}


@contextlib.contextmanager
def without(names: Iterable[str]) -> Iterator[None]:
    """Take variables out of this process's environment for a while: with a wrong one, nobody can read the settings."""
    taken = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(taken)


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        # Faults and unknown variables have places of their own in the report.
        elsewhere = text.startswith("plugin ignored:") or "is not a setting of fuseboard" in text
        if not elsewhere and text not in self.lines:
            self.lines.append(text)


@contextlib.contextmanager
def listened() -> Iterator[list[str]]:
    """Keep fuseboard's own warnings for the report, instead of between its lines."""
    log, kept = logging.getLogger("fuseboard"), _Kept()
    propagate, log.propagate = log.propagate, False
    log.addHandler(kept)
    try:
        yield kept.lines
    finally:
        log.removeHandler(kept)
        log.propagate = propagate
