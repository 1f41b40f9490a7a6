"""What goes wrong with packages: making one, reading one, calling one."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from fuseboard.errors import FuseboardError, InputError

__all__ = ["ContractError", "ExportError", "PackageError", "Problem"]


@attrs.frozen
class Problem:
    """One thing that is wrong with a call.

    Attributes:
        input: Which input, by name; empty where it is about the call as a whole.
        given: What was given, as text.
        allowed: What the package takes, as text.
        advice: What to do.
    """

    input: str
    given: str
    allowed: str
    advice: str

    def __str__(self) -> str:
        name = f"{self.input}: " if self.input else ""
        advice = f" ({self.advice})" if self.advice else ""
        return f"{name}{self.given}; the package takes {self.allowed}{advice}"


class ContractError(InputError):
    """A call that the package was not made for; nothing of the package ran.

    Attributes:
        argument: The first input that is wrong.
        problems: Everything that is wrong.
    """

    def __init__(self, problems: Sequence[Problem], package: str = "") -> None:
        name = f" {package}" if package else ""
        body = "".join(f"\n    {each}" for each in problems)
        super().__init__(problems[0].input, f"package{name} refuses this call:{body}")
        self.problems = tuple(problems)


class ExportError(FuseboardError, RuntimeError):
    """A model, or its inputs, of which no package can be made that keeps its promises.

    Attributes:
        reason: `autocast`, `device`, `compiler`, `attention`, `input`, `output`, `state` or `sizes`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PackageError(FuseboardError, RuntimeError):
    """A file that is not loaded; nothing of it ran.

    Attributes:
        path: Which.
        reason: `missing`, `unreadable`, `foreign`, `altered`, `digest`, `schema`, `torch`, `cpu`, `gpu`, `device` or
            `load`.
    """

    def __init__(self, path: str, reason: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.reason = reason
