"""Every `FUSEBOARD_*` environment variable, parsed here and nowhere else.

| variable | values | meaning |
|---|---|---|
| `FUSEBOARD_DISABLE` | names, comma separated | backends or plugin distributions that must not be loaded |
| `FUSEBOARD_DEBUG` | `masks` | check on every call that `mask_info` describes its dense mask |
| `FUSEBOARD_TEST` | `count` | count every site's calls: a test can prove that each went through the dispatcher |
| `FUSEBOARD_PROBE` | `here`, `child` | where a kernel is imported and self-tested first; default `here` |
| `FUSEBOARD_PROBE_TIMEOUT` | seconds | how long importing and self-testing one kernel may take; default 300 |
| `FUSEBOARD_CACHE` | a folder, or `off` | where children's verdicts are kept; default the platform's cache folder |
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fuseboard.errors import SettingsError

PREFIX = "FUSEBOARD_"
DEBUG_VALUES = frozenset({"masks"})
TEST_VALUES = frozenset({"count"})
PROBE_VALUES = ("here", "child")
NO_CACHE = "off"

# A just-in-time compiled kernel takes seconds per configuration (2 to 3 s for FlashAttention 4), and the self-test asks
# for a few dozen; a hang takes for ever.
DEFAULT_PROBE_TIMEOUT = 300.0

log = logging.getLogger("fuseboard")


@dataclass(frozen=True)
class Settings:
    """What the environment asked for.

    Attributes:
        disable: Names of backends or distributions to leave alone, in lower case.
        debug_masks: Whether every call checks its `mask_info` against its dense mask.
        test_count: Whether every site counts its calls.
        probe_timeout: Seconds that one backend's import and self-test may take.
        probe: `here`, or `child`: a kernel meets the process only after a child process has survived it.
        cache: The folder of the verdicts that children gave; empty for the platform's, `off` for none.
    """

    disable: frozenset[str] = frozenset()
    debug_masks: bool = False
    test_count: bool = False
    probe_timeout: float = DEFAULT_PROBE_TIMEOUT
    probe: str = "here"
    cache: str = ""

    def __post_init__(self) -> None:
        if self.probe not in PROBE_VALUES:
            msg = f"{PREFIX}PROBE={self.probe!r}: expected {' or '.join(PROBE_VALUES)}."
            raise SettingsError(msg)


def read(environ: Mapping[str, str] | None = None) -> Settings:
    """Parse the settings from `environ` (default: `os.environ`).

    Raises:
        SettingsError: A variable holds a value that means nothing.
    """
    environ = os.environ if environ is None else environ
    known = {"DISABLE", "DEBUG", "TEST", "PROBE", "PROBE_TIMEOUT", "CACHE"}
    for name in environ:
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in known:
            near = difflib.get_close_matches(name.removeprefix(PREFIX), known, n=1)
            hint = f" Did you mean {PREFIX}{near[0]}?" if near else ""
            log.warning("%s is not a setting of fuseboard and does nothing.%s", name, hint)
    debug = _words(environ, "DEBUG", DEBUG_VALUES)
    test = _words(environ, "TEST", TEST_VALUES)
    return Settings(
        disable=_words(environ, "DISABLE", None),
        debug_masks="masks" in debug,
        test_count="count" in test,
        probe_timeout=_seconds(environ, "PROBE_TIMEOUT", DEFAULT_PROBE_TIMEOUT),
        probe=environ.get(PREFIX + "PROBE", "").strip().lower() or "here",
        cache=_folder(environ, "CACHE"),
    )


def _words(environ: Mapping[str, str], name: str, allowed: frozenset[str] | None) -> frozenset[str]:
    text = environ.get(PREFIX + name, "")
    words = frozenset(word.strip().lower() for word in text.split(",") if word.strip())
    if allowed is not None and not words <= allowed:
        wrong = ", ".join(sorted(words - allowed))
        means = f"allowed, comma separated: {', '.join(sorted(allowed))}"
        msg = f"{PREFIX}{name}={text!r}: {wrong} means nothing here; {means}."
        raise SettingsError(msg)
    return words


def _folder(environ: Mapping[str, str], name: str) -> str:
    text = environ.get(PREFIX + name, "").strip()
    try:
        Path(text).expanduser()
    except RuntimeError:
        msg = f"{PREFIX}{name}={text!r}: there is no such home folder; expected a folder, or {NO_CACHE}."
        raise SettingsError(msg) from None
    return NO_CACHE if text.lower() == NO_CACHE else text


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(PREFIX + name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        msg = f"{PREFIX}{name}={text!r}: expected a positive number of seconds."
        raise SettingsError(msg)
    return value
