"""`fuseboard.attention` in a trace of torch.export: the kernels that the example was answered by, and no other.

`frozen.tracing()` is dynamo's; export traces without it, by running the model with fake tensors and symbolic sizes. So
the call takes its usual road here, with all its checks, which become conditions of the graph, up to the table of the
site: that one is of a trace. It finds what was frozen for a Call with symbolic truth values, by deciding each, asks
guards, and never a kernel's own check, which would look at tensors that are not there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils import _pytree as pytree

from fuseboard.call import Call, Sizes
from fuseboard.chain import REFERENCE, Chain, Route, Table
from fuseboard.context import bind
from fuseboard.engine.aot.errors import ExportError
from fuseboard.engine.freeze import Frozen, NotFrozenError, freeze
from fuseboard.policy import Policy
from fuseboard.site import Site, sites

__all__ = ["attention_in_trace"]


@contextlib.contextmanager
def attention_in_trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy
) -> Iterator[dict[str, dict[str, str]]]:
    """Run the example under the policy, and bind what answered it. Gives who; empty for a model without `attention`."""
    try:
        frozen = freeze(lambda: _run(model, args, kwargs), policy, ())
    except NotFrozenError as error:
        if error.site:
            raise
        with bind("auto"):
            yield {}
        return
    answers = frozen.report()
    traced = _TracePolicy(policy, answers)
    try:
        for name, site in sites().items():
            if name in answers:
                site.tables[traced] = _Traced(traced, site, answers[name], _chains(frozen, site))
        with bind(traced):
            yield answers
    finally:
        for site in sites().values():
            site.tables.pop(traced, None)
        frozen.close()


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Copies, since a model may write into its inputs.
    arguments = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    model(*arguments[0], **arguments[1])


def _chains(frozen: Frozen, site: Site) -> Mapping[Call, Any]:
    """The frozen chains of a site, which have the route that answered as `kept`."""
    return dict(site.tables[frozen._held.policy].chains)


class _TracePolicy(Policy):
    """The policy of one trace."""

    __slots__ = ("frozen",)

    def __init__(self, policy: Policy, frozen: Collection[str]) -> None:
        super().__init__(policy.name, strict=policy.strict, registry=policy.registry, patterns=policy.patterns)
        self.frozen = frozen

    def for_site(self, name: str) -> Policy:
        """Itself: a table of another kind would be made for a site that was not frozen."""
        if name not in self.frozen:
            msg = f"site {name!r} was not called by the example, but by the trace: they took different branches."
            raise NotFrozenError(self.name, name, msg)
        return self


class _Traced(Table):
    """A site's table while a model is traced."""

    __slots__ = ("answers", "frozen")

    def __init__(self, policy: Policy, site: Site, answers: Mapping[str, str], frozen: Mapping[Call, Any]) -> None:
        super().__init__(policy, site)
        self.answers = answers
        self.frozen = frozen
        self.reference = None if frozen else Route(REFERENCE)

    def chain(self, call: Call) -> Any:
        decided: dict[str, Any] = {
            each.name: bool(getattr(call, each.name))
            for each in attrs.fields(Call)
            if isinstance(getattr(call, each.name), torch.SymBool)
        }
        call = attrs.evolve(call, wrapped=None, **decided)
        found = self.frozen.get(call)
        if found is not None and found.kept is not None:
            return _TracedChain(found)
        body = "".join(f"\n    {kind}: {name}" for kind, name in self.answers.items())
        msg = f"site {self.site.name!r} was not called so by the example: {call}. It was frozen to:{body}"
        raise NotFrozenError(self.policy.name, self.site.name, msg, call=str(call), frozen=self.answers)


class _TracedChain:
    """What `dispatch` asks of a chain, while a model is traced."""

    def __init__(self, chain: Any) -> None:
        self._chain: Chain = chain
        self._kept: Route = chain.kept
        self.call = chain.call
        self.proven = chain.proven
        self.registry = self

    def route(self, sizes: Sizes, *_tensors: Any, **_arguments: Any) -> Route:
        kept = self._kept
        refusals = () if kept.link is None else self._chain.problems(kept.link, sizes)[0]
        if refusals:
            body = "".join(f"\n    {each}" for each in refusals)
            name, site = kept.backend_name, self._chain.site.name
            msg = f"site {site!r} was frozen to {name}, which cannot answer all sizes asked for:{body}"
            raise NotFrozenError(self._chain.policy.name, site, msg, call=str(self.call), refusals=refusals)
        return attrs.evolve(kept, keep=False, until=0)

    def mark_broken(self, backend: str, call: Call, reason: str) -> None:
        """A kernel that cannot be traced is not broken: it is not for packages."""
        msg = f"{backend} cannot be traced into a package ({reason}): export under another policy."
        raise ExportError("attention", msg)
