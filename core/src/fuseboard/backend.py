"""One backend: the frozen record that the registry makes of a plugin's hooks, and what a kernel looks like."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import attrs

from fuseboard.constraints import of_kind, version_terms

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fuseboard.call import Call, Sizes
    from fuseboard.constraints import Constraints, KnownBad
    from fuseboard.masks import MaskInfo

__all__ = ["Backend", "BackendInfo", "Exactness", "Kernel", "Later"]

DEFAULT_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Largest absolute error against float64 that a self-test accepts, inputs drawn from N(0, 1); half precision is the
format's own rounding (bfloat16 has 8 times fewer fractions than float16)."""


class Exactness(enum.Enum):
    """How a backend's numbers relate to the mathematical result."""

    EXACT = "exact"
    """Rounding only: the arithmetic of attention in the inputs' precision or better."""
    APPROXIMATE = "approximate"
    """Anything more: quantised scores, sparse keys. Never used where a site refuses it."""


def _valid_requires(_instance: object, _attribute: object, requires: Mapping[str, str]) -> None:
    if not isinstance(requires, Mapping):
        expected = "version ranges by distribution, such as {'flash-attn': '>=2.6'}"
        msg = f"BackendInfo.requires is {requires!r}; expected {expected}."
        raise TypeError(msg)
    for name, versions in requires.items():
        if not isinstance(name, str) or not name:
            msg = f"BackendInfo.requires has the name {name!r}; expected a distribution's, such as 'flash-attn'."
            raise TypeError(msg)
        version_terms(versions, "BackendInfo.requires")


@attrs.frozen
class BackendInfo:
    """What a backend is.

    Attributes:
        summary: One line for a table.
        requires: Version ranges of the distributions it needs, such as `{"flash-attn": ">=2.6"}`; read from metadata.
        homepage: Where to read about the kernel.
    """

    summary: str = attrs.field(validator=of_kind(str))
    requires: Mapping[str, str] = attrs.field(factory=dict, validator=_valid_requires)
    homepage: str = attrs.field(default="", validator=of_kind(str))


@attrs.frozen
class Later:
    """A kernel's answer to `declines`: able, but not worth it before such calls have been made this often.

    For kernels that prepare something for each combination of sizes (a plan, a compilation). A cache that grows by one
    key a step never repeats its sizes, and would pay the preparation at every step. With `calls` = preparation / gain
    per call, no more is ever lost than twice what the best choice in hindsight would have cost: the ski rental rule
    (https://en.wikipedia.org/wiki/Ski_rental_problem). A policy that names the backend does not wait.

    Attributes:
        reason: What is prepared, in words.
        calls: How many calls of these sizes others answer first; at least 1. A fraction is rounded up.
    """

    reason: str
    calls: int = attrs.field(converter=math.ceil, validator=attrs.validators.ge(1))


class Kernel(Protocol):
    """What the hook `kernel` returns. Called outside pluggy, with inputs that the declared constraints admit.

    May have a method `declines(q, k, v, *, mask, mask_info, causal, scale, dropout_p) -> str | Later | None`: asked
    once per combination of shapes, strides and flags, before the first such call, it gives a reason to refuse, or asks
    to be taken later, or None. That is the place for a package's own eligibility check.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None,
        mask_info: MaskInfo | None,
        causal: bool,
        scale: float | None,
        dropout_p: float,
    ) -> Tensor:
        """Attention of q, k, v, all `(batch, heads, length, head_dim)`; k and v may have fewer heads.

        Args:
            q: Queries.
            k: Keys.
            v: Values.
            mask: Boolean (True = attend) or additive, rank 4, each axis 1 or full; None where `mask_info` stands for
                it.
            mask_info: The structure, only when the constraints claim it.
            causal: Top-left, torch's `is_causal`.
            scale: None for 1 / sqrt(head_dim).
            dropout_p: Probability of dropping a weight.

        Returns:
            `(batch, heads, q_length, v_head_dim)` in q's dtype. No input is written.

        Raises:
            DeclinedError: The call cannot be taken after all: a refusal, not a failure.
        """


@attrs.frozen(eq=False)
class Backend:
    """A plugin's answers, resolved once. The hot path never asks the plugin again.

    Attributes:
        name: The entry point's name.
        distribution: Which distribution ships it, and that one's version.
        info: What it is.
        constraints: What it takes.
        load: Imports the kernel package and returns the kernel for a device.
        exactness: Per call.
        tolerance: Largest absolute error that the self-test accepts, per dtype.
        rank: Estimated microseconds of a call of given sizes; only the order matters.
        probe: A reason not to run on a device, or None.
        known_bad: Combinations known to be wrong.
        install: The install line, given torch's version.
    """

    name: str
    distribution: str
    version: str
    info: BackendInfo
    constraints: Constraints
    load: Callable[[torch.device], Kernel]
    exactness: Callable[[Call], Exactness]
    tolerance: Callable[[torch.dtype], float]
    rank: Callable[[Call, Sizes], float]
    probe: Callable[[torch.device], str | None]
    known_bad: tuple[KnownBad, ...]
    install: Callable[[str], str]

    def __repr__(self) -> str:
        return f"<Backend {self.name} of {self.distribution} {self.version}>"
