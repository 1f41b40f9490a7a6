"""The exceptions of fuseboard: one tree, every fact a field.

A message says what was given, what was expected and what to do. Whoever catches one of these can act on its fields
without reading the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fuseboard.constraints import Refusal
    from fuseboard.explanation import Explanation

__all__ = [
    "DeclinedError",
    "FuseboardError",
    "InputChangedError",
    "InputError",
    "MaskMismatchError",
    "PolicyError",
    "RefusedError",
    "SettingsError",
    "SiteError",
]


class FuseboardError(Exception):
    """Base of every error that fuseboard itself raises. It travels between processes with its fields."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild it without its constructor, whose arguments are not the message alone."""
        return _again, (type(self), self.args, {name: each for name, each in vars(self).items() if name[0] != "_"})


def _again(kind: type[FuseboardError], args: tuple[Any, ...], fields: dict[str, Any]) -> FuseboardError:
    error = kind.__new__(kind, *args)
    vars(error).update(fields)
    return error


class InputError(FuseboardError, ValueError):
    """An argument of `attention` cannot be right, whatever the backend.

    Attributes:
        argument: The argument's name, as the caller wrote it.
    """

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(message)
        self.argument = argument


class MaskMismatchError(InputError):
    """`mask_info` does not describe the dense mask that came with it (checked under `FUSEBOARD_DEBUG=masks`)."""


class PolicyError(FuseboardError, ValueError):
    """A policy was asked for that does not exist, or that needs a plugin which is not installed.

    Attributes:
        policy: The name asked for.
        nearest: Known names that resemble it, best first.
        install: The install line, where the name is of a known plugin that is not installed.
    """

    def __init__(self, policy: str, message: str, *, nearest: Sequence[str] = (), install: str | None = None) -> None:
        super().__init__(message)
        self.policy = policy
        self.nearest = tuple(nearest)
        self.install = install


class RefusedError(FuseboardError, RuntimeError):
    """A strict policy's backend cannot run a call; strict means no other may.

    Attributes:
        policy: The policy's name.
        site: The site's name.
        refusals: Every reason, not the first only.
    """

    def __init__(self, policy: str, site: str, message: str, refusals: Sequence[Refusal]) -> None:
        super().__init__(message)
        self.policy = policy
        self.site = site
        self.refusals = tuple(refusals)
        self._explain: Callable[[], Explanation] | None = None

    @property
    def explanation(self) -> Explanation | None:
        """What `fuseboard.explain` says of the call: every candidate, every reason, the nearest change.

        Made when it is read, for it probes every candidate. None in another process than the one that raised.
        """
        explain = getattr(self, "_explain", None)
        return explain() if explain is not None else None

    def explained_by(self, explain: Callable[[], Explanation]) -> None:
        """Say how the explanation is made."""
        self._explain = explain


class DeclinedError(FuseboardError):
    """Raised *by a kernel* that finds, with the tensors in hand, that it cannot take this call.

    A refusal, not a failure: the next backend answers and the kernel is not marked broken.
    """


class InputChangedError(FuseboardError, RuntimeError):
    """A backend raised after it had written into its inputs, so no other backend can be given them.

    Attributes:
        backend: The backend that did it.
        arguments: The names of the tensors that changed.
    """

    def __init__(self, backend: str, arguments: Sequence[str], message: str) -> None:
        super().__init__(message)
        self.backend = backend
        self.arguments = tuple(arguments)


class SettingsError(FuseboardError, ValueError):
    """A `FUSEBOARD_*` environment variable holds a value that means nothing."""


class SiteError(FuseboardError, ValueError):
    """A site was declared wrongly, or under a name that another site has."""
