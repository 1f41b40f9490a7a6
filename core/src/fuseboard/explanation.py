"""`explain`: the decision about one call, every candidate and every reason, as data and as text.

Makes the very Chain that `attention` makes, so it cannot say one thing while the dispatcher does another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fuseboard import context
from fuseboard.backend import Backend, Kernel, Later
from fuseboard.call import Call, Sizes, describe, is_lowered, lowered
from fuseboard.chain import REFERENCE, Chain, Link, Table
from fuseboard.constraints import Refusal
from fuseboard.errors import InputError, RefusedError
from fuseboard.masks import MaskInfo
from fuseboard.policy import Policy, policy_for
from fuseboard.registry import Fault
from fuseboard.site import Site

__all__ = ["Candidate", "Explanation", "explain"]


@attrs.frozen
class Candidate:
    """One backend and what was found about it for this call.

    Attributes:
        name: The backend.
        exactness: `exact` or `approximate` for such a call.
        rank: Estimated microseconds at these sizes; infinite when the plugin does not say.
        refusals: Every reason why it cannot answer; empty when it can.
        later: Its wish to be taken only after so many calls of these sizes, or None.
    """

    name: str
    exactness: str
    rank: float
    refusals: tuple[Refusal, ...]
    later: Later | None = None

    @property
    def changes(self) -> tuple[str, ...] | None:
        """What would admit the call, all of it together; None when for some refusal no change is known."""
        nearest = [each.nearest for each in self.refusals]
        return tuple(dict.fromkeys(each for each in nearest if each is not None)) if None not in nearest else None

    @property
    def elsewhere(self) -> Refusal | None:
        """The refusal of a backend that is not for this device at all, or None."""
        return next((each for each in self.refusals if each.rule in ("device", "capability")), None)


@attrs.frozen
class Explanation:
    """What `attention` would do with a call, and why.

    Attributes:
        site: The site's name.
        policy: The policy that holds there.
        call: The kind of call.
        chosen: Who would answer: a backend's name or `reference`; None when a strict policy lets nobody.
        why_reference: Why the site's reference answers whatever the backends can, or None.
        candidates: Every installed backend in the order in which it would be tried.
        faults: Plugins that could not be loaded.
        disabled: Backends blocked by a setting, and by which.
        named: The backend that the policy names, or None.
        shapes: Of the call's tensors, which the kind of call leaves out and the times are about.
    """

    site: str
    policy: str
    call: Call
    chosen: str | None
    why_reference: str | None
    candidates: tuple[Candidate, ...]
    faults: tuple[Fault, ...]
    disabled: dict[str, str]
    named: str | None = None
    shapes: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready data: text, numbers, lists and None. `docs/doctor.md` describes each key."""
        return {
            "site": self.site,
            "policy": self.policy,
            "call": str(self.call),
            "shapes": self.shapes,
            "chosen": self.chosen,
            "why_reference": self.why_reference,
            "candidates": [
                {
                    "name": each.name,
                    "exactness": each.exactness,
                    "rank": each.rank if each.rank < float("inf") else None,
                    "later": attrs.asdict(each.later) if each.later is not None else None,
                    "refusals": [attrs.asdict(refusal) for refusal in each.refusals],
                    "changes": None if each.changes is None else list(each.changes),
                }
                for each in self.candidates
            ],
            "faults": [attrs.asdict(fault) for fault in self.faults],
            "disabled": dict(self.disabled),
        }

    def __str__(self) -> str:
        lines = [
            f"site {self.site!r} under policy {self.policy!r}: {self.chosen or 'an error (strict)'}",
            f"  call: {self.call}; {self.shapes}",
        ]
        if self.why_reference:
            lines.append(f"  {self.why_reference}")
        elsewhere: dict[str, list[str]] = {}
        for each in self.candidates:
            # One line for all backends of other devices: on a machine without a GPU they are most of what is installed.
            if each.elsewhere is not None and each.name != self.named:
                elsewhere.setdefault(str(each.elsewhere), []).append(each.name)
                continue
            mark = "->" if each.name == self.chosen else "  "
            state = "refuses" if each.refusals else "can answer"
            if each.later is not None:
                state = f"answers after {each.later.calls} calls of these sizes ({each.later.reason})"
            rank = f", about {_duration(each.rank)}" if each.rank < float("inf") else ""
            lines.append(f"{mark} {each.name} ({each.exactness}{rank}): {state}")
            lines += [f"       {refusal}" for refusal in each.refusals]
            if each.changes is not None and len(each.changes) > 1:
                lines.append(f"       to admit it: {'; '.join(each.changes)}")
        lines.append(f"{'->' if self.chosen == REFERENCE else '  '} reference")
        lines += [f"   {', '.join(names)}: {why}" for why, names in elsewhere.items()]
        lines += [f"   fault: {fault}" for fault in self.faults]
        lines += [f"   {name}: {why}" for name, why in sorted(self.disabled.items())]
        return "\n".join(lines)


def _with_install_line(refusal: Refusal, backend: Backend) -> Refusal:
    """A package of the wrong version is mended by the plugin's install line; where it is absent, the text has it."""
    if refusal.rule != "version" or refusal.nearest is not None:
        return refusal
    line = backend.install(torch.__version__)
    return refusal if line in refusal.actual else attrs.evolve(refusal, nearest=line)


def _shapes(sizes: Sizes) -> str:
    shapes = {
        "q": (sizes.batch, sizes.heads, sizes.q_length, sizes.head_dim),
        "k": (sizes.batch, sizes.kv_heads, sizes.k_length, sizes.head_dim),
        "v": (sizes.batch, sizes.kv_heads, sizes.k_length, sizes.v_head_dim),
    }
    if shapes["k"] == shapes["v"]:
        shapes = {"q": shapes["q"], "k and v": shapes["k"]}
    masks = {} if sizes.mask_shape is None else {"mask": sizes.mask_shape}
    return ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in {**shapes, **masks}.items())


def _duration(microseconds: float) -> str:
    if microseconds < 1e3:  # noqa: PLR2004 - a unit's thousand, like the next
        return f"{microseconds:.3g} µs"
    return f"{microseconds / 1e3:.3g} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.3g} s"  # noqa: PLR2004


def explain(
    site: Site,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    mask_info: MaskInfo | None = None,
    policy: Policy | str | Mapping[str, Policy | str] | None = None,
) -> Explanation:
    """Say what `attention` would do with this call, and why, without computing it. Probes every candidate.

    Args:
        site: Where.
        q: As for `attention`, like the arguments that follow.
        k: Likewise.
        v: Likewise.
        mask: Likewise.
        causal: Likewise.
        scale: Likewise.
        enable_gqa: Likewise.
        dropout_p: Likewise.
        mask_info: Likewise.
        policy: Under which policy; default the bound one, or `auto`. With autocast on, what it would cast is cast.

    Raises:
        InputError: An argument cannot be right.
    """
    if not isinstance(site, Site):
        msg = f"site is {site!r}; expected a fuseboard.Site."
        raise InputError("site", msg)
    binding = context.bound()
    asked = policy_for(policy) if policy is not None else binding.policy if binding is not None else policy_for("auto")
    arguments: dict[str, Any] = {
        "mask": mask,
        "causal": causal,
        "scale": scale,
        "dropout_p": dropout_p,
        "mask_info": mask_info,
    }
    if is_lowered(q):
        q, k, v, arguments["mask"] = lowered(q, k, v, mask)
        with torch.autocast(q.device.type, enabled=False):
            return explain(site, q, k, v, enable_gqa=enable_gqa, policy=asked, **arguments)
    call, sizes = describe(q, k, v, enable_gqa=enable_gqa, **arguments)
    chain = Table(asked, site).chain(call)

    def said(link: Link, kernel: Kernel) -> str | Later | None:
        return chain.declines(link, kernel, q, k, v, **arguments)

    def answers() -> str | None:
        try:
            return chain.route(sizes, q, k, v, **arguments, due=False).backend_name
        except RefusedError:
            return None

    return _explained(chain, sizes, said, answers)


def of_refusal(chain: Chain, sizes: Sizes, refusals: Sequence[Refusal]) -> Explanation:
    """The whole decision behind a strict policy's error. Probes every candidate; needs no tensor.

    What kernels say with the tensors in hand is known of those that `refusals` name; others are not asked.
    """
    declined = {each.backend: each.reason for each in refusals if each.rule == "declined"}
    return _explained(chain, sizes, lambda link, _kernel: declined.get(link.backend.name), lambda: None)


def _explained(
    chain: Chain,
    sizes: Sizes,
    said: Callable[[Link, Kernel], str | Later | None],
    answers: Callable[[], str | None],
) -> Explanation:
    """Every candidate and its reasons; `said` are the kernels' own words, `answers` who would."""
    policy, registry = chain.policy, chain.registry
    candidates = []
    for link in chain.links(sizes):
        backend = link.backend
        found, answer = chain.reasons(link, sizes)
        refusals = tuple(_with_install_line(each, backend) for each in found)
        word = said(link, answer.kernel) if not refusals and answer is not None and answer.kernel is not None else None
        if isinstance(word, str):
            refusals = (Refusal(backend.name, "declined", word, "", None, word),)
        later = word if isinstance(word, Later) else None
        exactness, rank = backend.exactness(chain.call).value, backend.rank(chain.call, sizes)
        candidates.append(Candidate(backend.name, exactness, rank, refusals, later))
    why_reference = None
    if policy.name == "auto":
        why_reference = "policy 'auto' always takes the reference; what follows would hold under 'fast'"
    elif not chain.site.swappable:
        why_reference = "the site is declared swappable=False"
    return Explanation(
        chain.site.name,
        str(policy.as_json()),
        chain.call,
        answers() if why_reference is None else REFERENCE,
        why_reference,
        tuple(candidates),
        tuple(registry.faults),
        dict(registry.disabled),
        policy.backend_name,
        _shapes(sizes),
    )
