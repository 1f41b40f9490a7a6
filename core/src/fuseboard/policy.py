"""Policies: which backends a call may try, and in which order. Loads no torch.

| name | tries |
|---|---|
| `auto` | the site's reference, nothing else |
| `fast` | every backend that fits the call, fastest first, then the reference |
| `exact` | as `fast`, exact backends only |
| a backend's name | that backend, then as `fast` |

`tuned` (measured order) is reserved: an ordering function given to `Policy.order` is its place.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from fuseboard import registry as registries
from fuseboard.errors import PolicyError

if TYPE_CHECKING:
    from fuseboard.backend import Backend
    from fuseboard.call import Call, Sizes
    from fuseboard.registry import Registry

__all__ = ["MODES", "Policy", "policy_for"]

MODES = ("auto", "exact", "fast")
"""The policies that name no backend."""

Order: TypeAlias = Callable[["Call", "Sizes", "list[Backend]"], "list[Backend]"]


class Policy:
    """One policy; `policy_for` makes one object per value, so that models share what it has selected.

    Attributes:
        name: `auto`, `exact`, `fast` or a backend's name; for a mapping, its text.
        strict: A backend that cannot answer is an error with every reason, not a fallback to the reference.
        patterns: Of a mapping: site patterns and their policies, the first that fits decides; a site that fits none has
            `auto`.
        registry: Where its backends come from.
    """

    __slots__ = ("__weakref__", "name", "patterns", "registry", "strict")

    def __init__(
        self, name: str, *, strict: bool, registry: Registry, patterns: tuple[tuple[str, Policy], ...] | None = None
    ) -> None:
        self.name = name
        self.strict = strict
        self.registry = registry
        self.patterns = patterns

    def for_site(self, name: str) -> Policy:
        """The policy that holds at the site of that name."""
        if self.patterns is None:
            return self
        for pattern, policy in self.patterns:
            if fnmatch.fnmatchcase(name, pattern):
                return policy.for_site(name)
        return policy_for("auto", registry=self.registry)

    @property
    def backend_name(self) -> str | None:
        """The backend it names, or None."""
        return None if self.name in MODES or self.patterns is not None else self.name

    def order(
        self, call: Call, sizes: Sizes, backends: Iterable[Backend], ordering: Order | None = None
    ) -> list[Backend]:
        """The backends in the order in which they are tried for a call: the named one, then by rank, then by name."""
        ranked = sorted(backends, key=lambda backend: (_rank(backend, call, sizes), backend.name))
        if ordering is not None:
            ranked = ordering(call, sizes, ranked)
        named = self.backend_name
        return sorted(ranked, key=lambda backend: backend.name != named)

    def as_json(self) -> Any:
        """Its name, or the mapping of patterns to names."""
        if self.patterns is not None:
            return {pattern: policy.as_json() for pattern, policy in self.patterns}
        return f"{self.name} (strict)" if self.strict else self.name

    def __repr__(self) -> str:
        return f"Policy({self.name!r}{', strict=True' if self.strict else ''})"

    def __str__(self) -> str:
        return repr(self.as_json())


def policy_for(
    name: Policy | str | Mapping[str, Policy | str], strict: bool = False, *, registry: Registry | None = None
) -> Policy:
    """The policy of that name, the same object each time.

    Args:
        name: `auto`, `exact`, `fast`, a backend's name, or a mapping of site patterns (`fnmatch`) to those, in order of
            precedence: `{"vocoder.*": "auto", "*": "fast"}`. A `Policy` is returned as it is, or as its strict twin.
        strict: For a backend's name: an error with every reason when it is blocked, refused, cannot run or breaks,
            instead of a fallback. For `fast` and `exact`: likewise when only the reference is left.
        registry: Where backends are looked up; default, the installed plugins.

    Raises:
        PolicyError: There is no such policy; the message names the nearest, and the install line of a known plugin.
    """
    if isinstance(name, Policy):
        if not strict or name.strict:
            return name
        return policy_for(name.name if name.patterns is None else dict(name.patterns), strict, registry=name.registry)
    registry = registry or registries.current()
    if isinstance(name, Mapping):
        wrong = [pattern for pattern in name if not isinstance(pattern, str)]
        if wrong:
            msg = f"a policy's site pattern is {wrong[0]!r}; expected text such as 'vocoder.*'."
            raise PolicyError(str(wrong[0]), msg)
        patterns = tuple((pattern, policy_for(each, strict, registry=registry)) for pattern, each in name.items())
        text = "{" + ", ".join(f"{pattern}: {policy.name}" for pattern, policy in patterns) + "}"
        return registry.keep_policy(
            (patterns, strict), lambda: Policy(text, strict=strict, registry=registry, patterns=patterns)
        )
    if not isinstance(name, str):
        msg = f"a policy is {name!r}; expected a name, a mapping of site patterns to names, or a Policy."
        raise PolicyError(str(name), msg)
    if name not in MODES and name not in registry.names():
        # What an operator blocks or a plugin's fault takes away is passed over by the chain, with its reason: no error.
        passed_over = not strict and name not in registries.RESERVED and registry.why_missing(name) is not None
        if not passed_over:
            raise _unknown(name, registry)
    return registry.keep_policy((name, strict), lambda: Policy(name, strict=strict, registry=registry))


def _unknown(name: str, registry: Registry) -> PolicyError:
    here = [*MODES, *sorted(registry.names())]
    listed = f"Available here: {', '.join(here)}."
    if name == "tuned":
        msg = f"policy 'tuned' needs measured times, which this version cannot take; use 'fast' or 'exact'. {listed}"
        return PolicyError(name, msg)
    reason = registry.why_missing(name)
    if reason is not None:
        return PolicyError(name, f"policy {name!r} cannot be used: {reason} {listed}")
    install = registries.install_hint(name)
    if install is not None:
        return PolicyError(
            name, f"policy {name!r} needs a plugin that is not installed. Install it: {install}", install=install
        )
    near = difflib.get_close_matches(name.lower(), [*dict.fromkeys([*here, *registries.known_names()])], n=2)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return PolicyError(name, f"unknown policy {name!r}.{hint} {listed}", nearest=near)


def _rank(backend: Backend, call: Call, sizes: Sizes) -> float:
    rank = backend.rank(call, sizes)
    return math.inf if math.isnan(rank) else rank
