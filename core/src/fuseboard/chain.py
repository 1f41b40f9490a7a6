"""The chain for one (site, Call): the backends to try in order, every refusal kept, the reference last.

`Chain.route` walks it for exact sizes and gives a `Route`: the link that answers, and what was skipped on the way.
Routes are remembered per combination of sizes (`Table.routes`), so that the walk is made once.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Hashable
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor

from fuseboard.backend import Backend, Exactness, Kernel, Later
from fuseboard.call import Call, Sizes
from fuseboard.constraints import Refusal, admit, guard, known_bad_for
from fuseboard.errors import RefusedError
from fuseboard.masks import Form, MaskInfo, Structure, in_form
from fuseboard.probe import PASSING, Verdict, precheck, verdict
from fuseboard.registry import Registry, first_line, shown

if TYPE_CHECKING:
    from fuseboard.policy import Policy
    from fuseboard.site import Site

__all__ = ["Chain", "Link", "Route", "Table"]

REFERENCE = "reference"
"""What reports call the site's reference."""

RECHECK = 256
"""A kernel that has declined a combination of sizes is asked again after so many calls of it."""

MAX_ROUTES = 4096
"""Combinations of sizes that a table remembers; past that it starts anew. A decode of 4096 tokens makes as many."""


@attrs.frozen(eq=False)
class Link:
    """One backend in a chain.

    Attributes:
        backend: Which.
        form: How it would be given the call's mask.
        refusals: Limits that keep it from ever answering this kind of call; empty for a candidate.
        wanted: Whether the policy would have used it, so that passing it over is a fallback: it is the policy's own
            choice, or it looks able to run on the device.
    """

    backend: Backend
    form: Form
    refusals: tuple[Refusal, ...]
    wanted: bool


@attrs.frozen(eq=False)
class Route:
    """How calls of some sizes are answered.

    Attributes:
        backend_name: What a report calls it.
        skipped: `(backend, reason)` of those passed over that count as fallbacks.
        kernel: What to call; None for the reference.
        form: How the kernel is given the mask.
        structure: What the call's `mask_info` asks, for the form `structure`.
        link: None for the reference.
        keep: Whether it may be remembered.
        until: After so many calls the chain is walked again, as a better link asked to be taken later; 0 for never.
    """

    backend_name: str
    skipped: tuple[tuple[str, str], ...] = ()
    kernel: Kernel | None = None
    form: Form = "plain"
    structure: Structure | None = None
    link: Link | None = None
    keep: bool = True
    until: int = 0


class Routes(dict[Hashable, Route]):
    """Combination of sizes and flags to the route. Read and written without a lock.

    Attributes:
        latest: A key that was answered lately, and its route.
    """

    __slots__ = ("latest",)

    def __init__(self) -> None:
        super().__init__()
        self.latest: tuple[Hashable, Route | None] = (None, None)


class Table:
    """What one policy has selected at one site.

    Attributes:
        policy: The one that holds at this site.
        reference: The route of a site that is not swapped; None when backends are tried.
        routes: What is answered without a walk down a chain.
        due: Combinations at which no link may ask to be taken later any more.
    """

    __slots__ = ("__weakref__", "_left", "chains", "due", "policy", "reference", "routes", "site")

    def __init__(self, policy: Policy, site: Site) -> None:
        self.policy = policy.for_site(site.name)
        # The site holds this table: a proxy, so that a site that is dropped is gone at once, and its name free.
        self.site: Site = weakref.proxy(site)
        self.chains: dict[Call, Chain] = {}
        self.routes = Routes()
        self.due: set[Hashable] = set()
        self._left: dict[Hashable, int] = {}
        self.reference = Route(REFERENCE) if self.policy.name == "auto" or not site.swappable else None
        registry = self.policy.registry
        with registry.lock:
            registry.tables.add(self)

    def chain(self, call: Call) -> Chain:
        """The chain for this kind of call, built on first use."""
        chain = self.chains.get(call)
        if chain is None:
            chain = self.chains.setdefault(call, Chain(self.policy, self.site, call))
        return chain

    def remember(self, key: Hashable, route: Route) -> None:
        """Answer such calls by `route` from now on."""
        if route.keep:
            if len(self.routes) >= MAX_ROUTES:
                self.forget_routes()
                self.due.clear()
            self.routes[key] = route

    def count_down(self, key: Hashable, route: Route) -> None:
        """Count a call answered by a route that holds for a while. Two threads at once may count one."""
        left = self._left.get(key, route.until) - 1
        self._left[key] = left
        if left <= 0:
            self.due.add(key)
            self.routes.pop(key, None)

    def forget_routes(self) -> None:
        """Walk the chains again: a backend was marked broken."""
        self.routes = Routes()  # a new one: whoever is about to write into the old one does no harm
        self._left.clear()


class Chain:
    """The links for one (policy, site, Call).

    Attributes:
        policy: Whose order it is.
        site: Where.
        call: For which kind of call.
        proven: Links that have answered such a call with a tensor of the right kind.
    """

    def __init__(self, policy: Policy, site: Site, call: Call) -> None:
        self.policy = policy
        self.site = site
        self.call = call
        self._links = {backend: self._link(backend) for backend in policy.registry.backends()}
        self._heard = {
            backend: link for backend, link in self._links.items() if link.wanted or not link.refusals or policy.strict
        }
        self.proven: set[Link] = set()
        self._routes: dict[tuple[Any, ...], Route] = {}
        self._missing = self._named_missing()

    @property
    def registry(self) -> Registry:
        """Where its backends come from."""
        return self.policy.registry

    def links(self, sizes: Sizes, *, every: bool = True) -> list[Link]:
        """The installed backends in the order in which they are tried at these sizes.

        Without `every`, those alone that may answer or whose refusal is a fallback: the others cannot change a route.
        """
        links = self._links if every else self._heard
        return [links[backend] for backend in self.policy.order(self.call, sizes, links)]

    def _link(self, backend: Backend) -> Link:
        policy, call = self.policy, self.call
        form, refusals = admit(backend.constraints, backend.name, call)
        refusals = (*refusals, *known_bad_for(backend.known_bad, call, backend.name))
        approximate = backend.exactness(call) is not Exactness.EXACT
        named = backend.name == policy.backend_name
        if call.device_type in backend.constraints.by_name and not named:
            allowed, reason = f"its name on {call.device_type}", "answers to its name alone"
            refusal = Refusal(backend.name, "policy", policy.name, allowed, f"policy {backend.name!r}", reason)
            return Link(backend, form, (*refusals, refusal), wanted=False)
        if approximate and not self.site.approx_ok:
            reason = "site refuses approximate backends"
            refusals = (
                *refusals,
                Refusal(backend.name, "site", "approximate", "exact backends (approx_ok=False)", None, reason),
            )
        elif approximate and policy.name == "exact":
            refusals = (
                *refusals,
                Refusal(backend.name, "policy", "approximate", "exact backends", "policy 'fast'", "approximate"),
            )
            return Link(backend, form, refusals, wanted=False)
        return Link(backend, form, refusals, wanted=named or precheck(backend, call.device) is None)

    def _named_missing(self) -> Refusal | None:
        """The refusal of a policy's own backend that is blocked, or whose plugin turned out to be at fault at load."""
        named = self.policy.backend_name
        if named is None or self.registry.resolve(named) is not None:
            return None
        blocked = self.registry.disabled.get(named)
        if blocked is not None:
            return Refusal(named, "blocked", blocked, "", None, blocked.removeprefix("it is ").rstrip("."))
        why = self.registry.why_missing(named) or "no such backend."
        return Refusal(named, "plugin", why, "", None, "its plugin is at fault")

    def problems(self, link: Link, sizes: Sizes) -> tuple[tuple[Refusal, ...], Verdict | None]:
        """Why a link cannot answer calls of these sizes, its kernel not asked; and the verdict where it was."""
        refusals = (
            link.refusals or self._broken(link) or guard(link.backend.constraints, link.backend.name, self.call, sizes)
        )
        return (refusals, None) if refusals else self._probed(link)

    def reasons(self, link: Link, sizes: Sizes) -> tuple[tuple[Refusal, ...], Verdict | None]:
        """As `problems`, but every reason there is, for a person who asks: the probe is made whatever else refuses.

        But for a backend of another device, of which nothing need be imported to know.
        """
        name = link.backend.name
        refusals = (*link.refusals, *self._broken(link), *guard(link.backend.constraints, name, self.call, sizes))
        if any(each.rule in ("device", "capability") for each in refusals):
            return refusals, None
        probed, answer = self._probed(link)
        return (*refusals, *probed), answer

    def _broken(self, link: Link) -> tuple[Refusal, ...]:
        why = self.registry.broken.get((link.backend.name, self.call))
        return () if why is None else (Refusal(link.backend.name, "broken", why, "", None, f"broke ({why})"),)

    def _probed(self, link: Link) -> tuple[tuple[Refusal, ...], Verdict]:
        answer = verdict(self.registry, link.backend, self.call.device)
        if answer.ok:
            return (), answer
        why = f"cannot run: {answer.reason}"
        return (Refusal(link.backend.name, answer.stage, answer.reason, "", None, why),), answer

    def route(  # noqa: C901 - one walk, one reason to stop after the other
        self,
        sizes: Sizes,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
        dropout_p: float,
        mask_info: MaskInfo | None,
        declined: dict[str, str] | None = None,
        fresh: Collection[str] = (),
        due: bool = True,
    ) -> Route:
        """The first link that takes calls of these sizes. Probes a backend when its turn comes, not before.

        Args:
            sizes: The exact sizes.
            q: As given to `attention`, like the arguments that follow.
            k: Likewise.
            v: Likewise.
            mask: Likewise.
            causal: Likewise.
            scale: Likewise.
            dropout_p: Likewise.
            mask_info: Likewise.
            declined: Backends whose kernel has just declined this very call, and why.
            fresh: Backends that have just broken, of which the caller tells itself.
            due: Whether a kernel that asks to be taken later is taken now.

        Raises:
            RefusedError: The policy is strict and its backend cannot answer.
        """
        skipped: list[tuple[str, str]] = []
        refused: list[Refusal] = []
        keep, until = not declined, 0
        missing = self._missing
        if missing is not None:
            if self.policy.strict:
                raise self.refusal([missing])
            skipped.append((missing.backend, missing.reason))
            self._log(missing.backend, missing.reason, (missing,), fresh)
        for link in self.links(sizes, every=False):
            name = link.backend.name
            refusals, answer = self.problems(link, sizes)
            if not refusals and answer is not None and answer.kernel is not None:
                said = (declined or {}).get(name) or self.declines(
                    link,
                    answer.kernel,
                    q,
                    k,
                    v,
                    mask=mask,
                    causal=causal,
                    scale=scale,
                    dropout_p=dropout_p,
                    mask_info=mask_info,
                )
                if isinstance(said, Later):
                    if not due and self.policy.backend_name != name:
                        calls = 1 << (said.calls - 1).bit_length()  # few numbers, and so few routes, for many sizes
                        until = min(until or calls, calls)
                        continue  # it will answer, in a while: no fallback
                    said = None
                if said is None:
                    return self._route(link, answer.kernel, tuple(skipped), keep=keep, until=until)
                # What a kernel says may rest on state of the process, so that it is asked again after a while.
                until = min(until or RECHECK, RECHECK)
                refusals = (Refusal(name, "declined", said, "", None, said),)
            if answer is not None and answer.stage in PASSING:
                keep = False
            refused += refusals
            if self.policy.strict and self.policy.backend_name == name:
                raise self.refusal(
                    [*self.reasons(link, sizes)[0], *(each for each in refusals if each.rule == "declined")]
                )
            if link.wanted and (answer is None or answer.installed or self.policy.backend_name == name):
                reason = "; ".join(each.reason for each in refusals)
                skipped.append((name, reason))
                self._log(name, reason, refusals, fresh)
        if self.policy.strict:
            raise self.refusal(refused)
        return self._route(None, None, tuple(skipped), keep=keep, until=until)

    def refusal(self, refused: list[Refusal]) -> RefusedError:
        """The error of a strict policy, with every reason."""
        named = self.policy.backend_name
        lines = [
            f"    {each}" if named else f"    {each.backend}: {each}"
            for each in refused
            if named in (None, each.backend)
        ]
        body = "\n".join(lines) or "    no backend is installed"
        msg = f"policy {self.policy.name!r} (strict) cannot run site {self.site.name!r} on {self.call.device}:\n{body}"
        return RefusedError(self.policy.name, self.site.name, msg, refused)

    def declines(
        self, link: Link, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool,
        scale: float | None, dropout_p: float, mask_info: MaskInfo | None,
    ) -> str | Later | None:  # fmt: skip
        """What the kernel's own check says about this very call: a reason, a wish to be taken later, or None."""
        asks: Callable[..., str | Later | None] | None = getattr(kernel, "declines", None)
        if asks is None:
            return None
        given_mask, given_info = in_form(link.form, self.call.structure, mask, mask_info, q, k)
        try:
            said = asks(q, k, v, mask=given_mask, mask_info=given_info, causal=causal, scale=scale, dropout_p=dropout_p)
        except Exception as error:  # noqa: BLE001 - a check that fails cannot vouch for the call
            return f"its check failed ({first_line(error)})"
        if said is None or isinstance(said, (str, Later)):
            return said if said != "" else "declined"
        return f"its check gave {shown(said)}, expected a reason or None"

    def _route(
        self,
        link: Link | None,
        kernel: Kernel | None,
        skipped: tuple[tuple[str, str], ...],
        *,
        keep: bool,
        until: int,
    ) -> Route:
        # Equal routes are one object, so that a Run's counters do not grow with the sizes seen.
        key = (link, id(kernel), skipped, keep, until)  # a kernel need not be hashable
        if key not in self._routes:
            route = (
                Route(REFERENCE, skipped, keep=keep, until=until)
                if link is None
                else Route(link.backend.name, skipped, kernel, link.form, self.call.structure, link, keep, until)
            )
            self._routes.setdefault(key, route)
        return self._routes[key]

    def _log(self, name: str, reason: str, refusals: tuple[Refusal, ...], fresh: Collection[str]) -> None:
        if name in fresh:
            return  # said, louder, by whoever saw it break
        broken = [each.actual for each in refusals if each.rule == "broken"]
        if broken:
            message = f"{name} is not used at site {self.site.name!r}: it broke at such calls before ({broken[0]})."
            self.registry.log_once(logging.WARNING, self.site.name, name, broken[0], message)
            return
        message = f"{name} does not answer at site {self.site.name!r} ({reason}). See fuseboard.explain."
        self.registry.log_once(logging.INFO, self.site.name, name, reason, message)
