"""Entry points become Backends, or Faults: nothing that a plugin does wrong reaches the host. Loads no torch by itself.

A `Registry` also holds what the process has learnt about its backends: verdicts, broken marks, what has been logged.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.metadata
import inspect
import logging
import math
import os
import re
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import attrs
import pluggy

from fuseboard import hookspecs, settings
from fuseboard.backend import DEFAULT_TOLERANCE, Backend, BackendInfo, Exactness
from fuseboard.constraints import Constraints, KnownBad

if TYPE_CHECKING:
    from fuseboard.call import Call
    from fuseboard.chain import Table
    from fuseboard.policy import Policy
    from fuseboard.probe import Verdict

__all__ = ["GROUP", "Entry", "Fault", "Registry", "current", "install_hint", "use"]

GROUP = "fuseboard.backends"
"""The entry point group: one entry point is one backend."""

INSTALL_HINTS = {
    "flash": ("fuseboard-flash", "flash-attn"),
    "flash3": ("fuseboard-flash", "flash-attn-3"),
    "flash4": ("fuseboard-flash", "flash-attn-4"),
    "xformers": ("fuseboard-xformers", "xformers"),
    "sage": ("fuseboard-sage", "sageattention"),
    "sage3": ("fuseboard-sage", "sageattn3"),
    "tilelang": ("fuseboard-tilelang", "tilelang"),
    **{f"sdpa-{kind}": ("fuseboard-sdpa",) for kind in ("flash", "efficient", "cudnn", "math", "cpu")},
}
"""What to install for a name that no plugin here has. For messages only: no other line of the core knows a backend."""

RESERVED = frozenset({"auto", "exact", "fast", "tuned", "reference"})
"""Words that mean something else where a backend's name could stand."""

HOOKS = tuple(name for name, each in vars(hookspecs).items() if hasattr(each, "fuseboard_spec"))

_SHOWN = 120
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")

log = logging.getLogger("fuseboard")
T = TypeVar("T")


@attrs.frozen
class Entry:
    """One entry point, before it is loaded.

    Attributes:
        name: The backend's name.
        load: Imports the plugin's module.
        distribution: Who ships it.
        version: That distribution's version.
    """

    name: str
    load: Callable[[], object]
    distribution: str = "unknown"
    version: str = "unknown"


@attrs.frozen
class Fault:
    """A plugin that could not be loaded, or a hook of it that is wrong: kept and shown, never raised at the host.

    Attributes:
        name: The backend's name.
        distribution: Who ships it.
        version: That distribution's version.
        message: What is wrong and what to do.
    """

    name: str
    distribution: str
    version: str
    message: str

    def __str__(self) -> str:
        return f"{self.name!r} ({self.distribution} {self.version}): {self.message}"


def installed_entries() -> list[Entry]:
    """The entry points that the installed distributions declare. Reads metadata only."""
    found = []
    for point in _entry_points():
        # A damaged dist-info has no name or version; that must not hide the other plugins.
        name, version = "unknown", "unknown"
        with contextlib.suppress(Exception):
            if point.dist is not None:
                name, version = point.dist.metadata["Name"] or name, point.dist.version or version
        found.append(Entry(point.name, functools.partial(_loaded, point), name, version))
    return found


def _loaded(point: importlib.metadata.EntryPoint) -> object:
    if not point.pattern.match(point.value):  # importlib would raise an AttributeError of its own
        msg = f"its entry point is {point.value!r}; expected 'module' or 'module:object'."
        raise _HookError(msg)
    return point.load()


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    try:
        return list(importlib.metadata.entry_points(group=GROUP))
    except Exception:  # noqa: BLE001 - one unreadable entry_points.txt would hide the plugins of all distributions
        log.warning("an installed distribution has damaged metadata; plugins are looked up one distribution at a time.")
    points: dict[tuple[str, str], importlib.metadata.EntryPoint] = {}
    for distribution in importlib.metadata.distributions():
        with contextlib.suppress(Exception):
            for point in distribution.entry_points.select(group=GROUP):
                # As Python does it: what comes first on the path hides a later copy of the same distribution.
                points.setdefault((_normal(str(distribution.metadata["Name"])), point.name), point)
    return list(points.values())


class Registry:
    """The backends of a process, resolved once each, when first asked for.

    Attributes:
        faults: What is wrong with which plugin.
        broken: `(backend name, Call)` to the reason, for kinds of call at which a backend has raised.
        verdicts: `(backend name, device)` to the probe's verdict.
    """

    def __init__(self, entries: Iterable[Entry] | None = None, config: settings.Settings | None = None) -> None:
        self.settings = settings.read() if config is None else config
        self.faults: list[Fault] = []
        self.broken: dict[tuple[str, Call], str] = {}
        self.verdicts: dict[tuple[str, str], Verdict] = {}
        self.tables: weakref.WeakSet[Table] = weakref.WeakSet()
        self.disabled: dict[str, str] = {}
        self.lock = threading.RLock()
        self.probe_locks: dict[tuple[str, str], threading.Lock] = {}
        self._logged: set[tuple[str, str, str]] = set()
        self._policies: dict[Hashable, Policy] = {}
        self._backends: dict[str, Backend | None] = {}
        self._loading: set[str] = set()
        self._entries = self._choose(installed_entries() if entries is None else entries)
        _registries.add(self)

    def after_fork(self) -> None:
        """In a process that was forked: the thread that held a lock, while it imported or probed, is not here."""
        self.lock = threading.RLock()
        self.probe_locks = {}
        self._loading = set()

    def names(self) -> frozenset[str]:
        """The names of the backends that are installed, not blocked and not known to be faulty. Loads none."""
        with self.lock:
            return frozenset(name for name in self._entries if self._backends.get(name, ...) is not None)

    def entry(self, name: str) -> Entry | None:
        """The entry point that a name stands for, not loaded; None when there is none, or it is blocked."""
        return self._entries.get(name)

    def backends(self) -> list[Backend]:
        """Every backend that can be loaded. Loads the plugins' modules, not their kernel packages."""
        return [backend for name in sorted(self._entries) if (backend := self.resolve(name)) is not None]

    def resolve(self, name: str) -> Backend | None:
        """The backend of that name, or None when there is none or its plugin is at fault."""
        with self.lock:
            if name not in self._backends and name in self._entries and name not in self._loading:
                self._loading.add(name)  # its own import may ask for it: it is not there yet
                try:
                    self._backends[name] = self._load(self._entries[name])
                finally:
                    self._loading.discard(name)
            return self._backends.get(name)

    def why_missing(self, name: str) -> str | None:
        """Why a backend that is installed cannot be used, as a sentence; None when it is not installed at all."""
        if name in self.disabled:
            return self.disabled[name]
        faults = [str(fault) for fault in self.faults_of(name)]
        return f"its plugin is at fault: {'; '.join(faults)}" if faults and self.resolve(name) is None else None

    def faults_of(self, name: str) -> list[Fault]:
        """What is wrong with the plugin of that backend; of two that ship one name, with the one in use."""
        entry = self._entries.get(name)
        return [
            each
            for each in self.faults
            if each.name == name and (entry is None or each.distribution == entry.distribution)
        ]

    def keep_policy(self, value: Hashable, make: Callable[[], Policy]) -> Policy:
        """The policy kept for `value`, made on first use."""
        with self.lock:
            if value not in self._policies:
                self._policies[value] = make()
            return self._policies[value]

    def mark_broken(self, backend: str, call: Call, reason: str) -> bool:
        """Never offer `backend` such a call again. False when that was known already."""
        with self.lock:
            known = (backend, call) in self.broken
            self.broken.setdefault((backend, call), reason)
            for table in list(self.tables):
                table.forget_routes()
        return not known

    def log_once(self, level: int, site: str, backend: str, reason: str, message: str) -> None:
        """Log `message`, once per (site, backend, reason)."""
        with self.lock:
            if (site, backend, reason) in self._logged:
                return
            self._logged.add((site, backend, reason))
        log.log(level, "%s", message)

    def _choose(self, entries: Iterable[Entry]) -> dict[str, Entry]:
        """One entry a name. The distribution of the install hints wins a clash, else the first by name."""
        chosen: dict[str, Entry] = {}
        disable = {_normal(word): word for word in self.settings.disable}
        unknown = dict(disable)

        def precedence(entry: Entry) -> tuple[bool, str]:
            return _normal(entry.distribution) not in INSTALL_HINTS.get(entry.name, ()), _normal(entry.distribution)

        for entry in sorted(entries, key=precedence):
            distribution = _normal(entry.distribution)
            words = {_normal(entry.name), distribution, distribution.removeprefix("fuseboard-")}
            blocked = sorted(disable[word] for word in words & disable.keys())
            for word in words:
                unknown.pop(word, None)
            if blocked:
                self.disabled[entry.name] = f"it is blocked by FUSEBOARD_DISABLE={','.join(blocked)}."
            elif entry.name in RESERVED or not _NAME.fullmatch(entry.name):
                self._fault(
                    entry,
                    f"a backend cannot be called {entry.name!r}: use a word of a-z, 0-9 and '-_.' that is no policy.",
                )
            elif entry.name in chosen:
                other = chosen[entry.name]
                self._fault(
                    entry,
                    f"{other.distribution} {other.version} has a backend of that name, and is used; uninstall one.",
                )
            else:
                chosen[entry.name] = entry
        for name in chosen:  # another distribution's backend of that name is blocked, not the name
            self.disabled.pop(name, None)
        for word in sorted(unknown.values()):
            log.warning("FUSEBOARD_DISABLE names %r, which no installed plugin or backend is called.", word)
        return chosen

    def _fault(self, entry: Entry, message: str, *, effect: str = "plugin ignored") -> None:
        fault = Fault(entry.name, entry.distribution, entry.version, message)
        self.faults.append(fault)
        log.warning("%s: %s", effect, fault)

    def _load(self, entry: Entry) -> Backend | None:
        """Load, register and ask one plugin. Whatever it does wrong becomes a Fault; only cancellation passes."""
        # A manager for each plugin: a hook call then reaches that plugin alone, also when others are registered later,
        # and what `check_pending` finds is its fault.
        manager = pluggy.PluginManager("fuseboard")
        manager.add_hookspecs(hookspecs)
        try:
            manager.register(entry.load(), name=entry.name)
            manager.check_pending()
            return self._ask(entry, manager)
        except Exception as error:  # noqa: BLE001 - a plugin's import may raise anything
            self._fault(entry, _blame(error))
        except SystemExit as error:
            self._fault(entry, f"its import called sys.exit({error.code!r}).")
        return None

    def _ask(self, entry: Entry, manager: pluggy.PluginManager) -> Backend:
        plugin = manager.get_plugin(entry.name)
        implemented = {caller.name for caller in manager.get_hookcallers(plugin) or ()}
        for name in HOOKS:
            if name not in implemented and _is_own(plugin, name):
                place = _defined(getattr(plugin, name))
                msg = f"function {name} has a hook's name and no @fuseboard.hookimpl; mark it, or rename it{place}."
                raise _HookError(msg)
        missing = [name for name in hookspecs.REQUIRED if name not in implemented]
        if missing:
            msg = f"it lacks the required hook {' and '.join(missing)} (marked @fuseboard.hookimpl)."
            raise _HookError(msg)

        def hook(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
            if name not in implemented:
                return default
            caller = getattr(manager.hook, name)
            names = tuple(inspect.signature(getattr(hookspecs, name)).parameters)
            implementation = caller.get_hookimpls()[-1]
            named = functools.wraps(implementation.function)  # so that `_defined` finds the plugin's line
            if implementation.wrapper or implementation.hookwrapper:
                return named(lambda *given: caller(**dict(zip(names, given, strict=True))))
            # One plugin, one implementation: called directly with the arguments it takes, at a twentieth of the cost of
            # a hook call.
            function, taken = implementation.function, tuple(implementation.argnames)
            if taken == names:
                return function  # type: ignore[no-any-return]
            if not taken:
                return named(lambda *_: function())
            places = [names.index(each) for each in taken]
            return named(lambda *given: function(*[given[place] for place in places]))

        info = _answer("info", hook("info", _never), BackendInfo)
        constraints = _answer("constraints", hook("constraints", _never), Constraints)
        known_bad = _listed("known_bad", hook("known_bad", tuple), KnownBad)
        rank, exactness = hook("rank", lambda *_: math.inf), hook("exactness", lambda _call: Exactness.APPROXIMATE)
        tolerance = hook("tolerance", lambda dtype: DEFAULT_TOLERANCE.get(str(dtype).removeprefix("torch."), 0.0))
        probe = hook("probe", lambda _device: None)
        install = hook("install_line", lambda _version: f"pip install --no-deps {entry.distribution}")
        return Backend(
            name=entry.name,
            distribution=entry.distribution,
            version=entry.version,
            info=info,
            constraints=constraints,
            load=hook("kernel", _never),
            # A hook that raises or lies later must not harm the call that asked: it gets the cautious answer, and a
            # Fault.
            exactness=self._cautious(entry, "exactness", exactness, Exactness, Exactness.APPROXIMATE),
            tolerance=self._cautious(entry, "tolerance", tolerance, (int, float), 0.0, _TOLERANCES),
            rank=self._cautious(entry, "rank", rank, (int, float), math.inf, _RANKS),
            probe=probe,
            known_bad=known_bad,
            install=self._cautious(entry, "install_line", install, str, f"pip install --no-deps {entry.distribution}"),
        )

    def _cautious(
        self, entry: Entry, hook: str, ask: Callable[..., Any], kind: type | tuple[type, ...], default: T,
        among: _Range | None = None,
    ) -> Callable[..., T]:  # fmt: skip
        told = False

        def asked(*given: Any) -> T:
            nonlocal told
            try:
                answer: T = _answer(hook, ask, kind, *given, among=among)
            except Exception as error:  # noqa: BLE001 - a hook may raise anything
                if not told:
                    told = True
                    self._fault(entry, f"{_blame(error)} Taken instead: {default}.", effect="plugin at fault")
                return default
            return answer

        return asked


class _Range(NamedTuple):
    """What numbers a hook may give, and that in words."""

    admits: Callable[[Any], bool]
    words: str


# Outputs of inputs from N(0, 1) are hardly larger than 1, so that from there on nothing would be wrong.
_TOLERANCES = _Range(lambda value: 0.0 <= value < 1.0, "a number of 0 or more and below 1")
_RANKS = _Range(lambda value: value >= 0.0, "microseconds, 0 or more")


class _HookError(Exception):
    """A plugin's declaration is wrong; the text says how."""


def _never(*_arguments: object) -> Any:
    msg = "a required hook was asked for and is missing"
    raise AssertionError(msg)


def _answer(
    hook: str, ask: Callable[..., Any], kind: type | tuple[type, ...], *given: Any, among: _Range | None = None
) -> Any:
    """What a hook says. What it does wrong is told with the hook's name and the plugin's line."""
    try:
        value = ask(*given)
    except Exception as error:
        msg = f"hook {hook} raised {first_line(error).rstrip('.')}{_raised(error) or _defined(ask)}."
        raise _HookError(msg) from error
    _typed(hook, ask, value, kind)
    if among is not None and not among.admits(value):
        msg = f"hook {hook} gave {shown(value)}; expected {among.words}{_defined(ask)}."
        raise _HookError(msg)
    return value


def _listed(hook: str, ask: Callable[..., Any], kind: type) -> tuple[Any, ...]:
    """What a hook says that gives any number of things, or None."""

    @functools.wraps(ask)
    def all_of_it() -> tuple[Any, ...]:
        said = ask()
        return () if said is None else tuple(said)  # a generator raises here

    return tuple(_typed(hook, ask, each, kind) for each in _answer(hook, all_of_it, tuple))


def _typed(hook: str, ask: Callable[..., Any], value: Any, kind: type | tuple[type, ...]) -> Any:
    beyond = isinstance(value, int) and value.bit_length() >= sys.float_info.max_exp  # as a float it would raise
    if isinstance(value, kind) and not beyond:
        return value
    names = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
    msg = f"hook {hook} gave {shown(value)}; expected {names}{_defined(ask)}."
    raise _HookError(msg)


def shown(value: object) -> str:
    """What a plugin gave, on one line: a tensor's repr has many, and a repr may raise."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - as for a number of too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _blame(error: BaseException) -> str:
    """One line that says what the plugin's author must mend."""
    if isinstance(error, _HookError):
        return str(error)
    if isinstance(error, pluggy.PluginValidationError):
        return _misdeclared(error)
    place = _raised(error)
    advice = "; import the kernel package inside kernel(), not at the top of the module."
    return f"{first_line(error)}{place}{advice if place and isinstance(error, ImportError) else ''}"


def _misdeclared(error: pluggy.PluginValidationError) -> str:
    """What pluggy has against a hook, and what the hook should be."""
    found = re.search(r"hook '(\w+)'", str(error))
    name = found[1] if found else ""
    place = _defined(getattr(error.plugin, name, None))
    if name in HOOKS:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{' '.join(lines)}{place}. The hook is {name}{inspect.signature(getattr(hookspecs, name))}."
    near = difflib.get_close_matches(name, HOOKS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown hook {name!r}{place}.{hint} Hooks are {', '.join(HOOKS)}."


def _is_own(plugin: object, name: str) -> bool:
    """Whether the plugin has a function of that name which it did not import from elsewhere."""
    home = getattr(plugin, "__module__", None) or getattr(plugin, "__name__", None)
    function = getattr(plugin, name, None)
    return home is not None and inspect.isroutine(function) and getattr(function, "__module__", None) == home


_MACHINERY = frozenset({"fuseboard", "importlib", "pluggy"})


def _raised(error: BaseException) -> str:
    """` (file:line)` of the plugin's last line on the way to an error: its package is the first that was entered."""
    frames = [
        (str(frame.f_globals.get("__name__")).partition(".")[0], f" ({frame.f_code.co_filename}:{line})")
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    foreign = [each for each in frames if each[0] not in _MACHINERY]
    return [place for package, place in foreign if package == foreign[0][0]][-1] if foreign else ""


def _defined(function: Any) -> str:
    """` (file:line)` of a function of the plugin; empty for what was not written in Python."""
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""


def first_line(error: BaseException) -> str:
    """`Type: first line of its text`, for reasons and log lines."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # noqa: BLE001 - an exception whose own text raises
        lines = []
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def install_hint(name: str) -> str | None:
    """The install line of a known plugin that is not installed."""
    packages = INSTALL_HINTS.get(name)
    return f"pip install --no-deps {' '.join(packages)}" if packages else None


def known_names() -> list[str]:
    """Names that the install hints know."""
    return sorted(INSTALL_HINTS)


_current: Registry | None = None
_current_lock = threading.Lock()
_registries: weakref.WeakSet[Registry] = weakref.WeakSet()


def _after_fork() -> None:
    global _current_lock  # noqa: PLW0603 - this module owns the process's registry
    _current_lock = threading.Lock()
    for registry in list(_registries):
        registry.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def current() -> Registry:
    """The process's registry, made from the installed entry points on first use."""
    global _current  # noqa: PLW0603 - this module owns the process's registry
    if _current is None:
        with _current_lock:
            if _current is None:
                _current = Registry()
    return _current


@contextlib.contextmanager
def use(registry: Registry) -> Iterator[Registry]:
    """Make `registry` the process's while the block runs. For hosts that assemble their own, and for tests."""
    global _current  # noqa: PLW0603 - this module owns the process's registry
    with _current_lock:
        before, _current = _current, registry
    try:
        yield registry
    finally:
        with _current_lock:
            _current = before
