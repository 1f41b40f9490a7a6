"""`freeze`: what each site does, decided once, ahead of a compilation or a capture.

An example is run under the policy, and for each (site, kind of call) it is noted who answered. After that nothing is
chosen any more: such calls go to that kernel, and a call of another kind is refused, with what was frozen.

A compiled graph cannot read what is bound: reading a context variable breaks the graph, and a look at the frozen table
before it would cost every attention call of everybody. So there are three ways to use what was frozen:

* `with frozen:` for `fuseboard.attention` as it stands in an engine. The frozen routes lie where a policy's own lie, so
  the call takes the road that it always takes. Under dynamo the graph breaks there, as under any policy.
* `attend = frozen[SITE]`, or `frozen.attention` in place of `fuseboard.attention`: plain calls that read nothing
  of the process. Dynamo traces through them to the kernel, so that torch's own operators become part of the graph,
  under `fullgraph=True` too, and guards what it read on the way: another `Frozen` in its place is another graph.
* `with frozen.tracing():` for both: dynamo is told to trace, in place of `fuseboard.attention`, a function that looks
  up this thread's frozen call, in a thread's attribute, which a graph can read and guard. Eager calls never meet it.

In a graph the decision is made where it is traced, by the kind of call, lengths among it as far as the kind depends on
them (one query, equal lengths). Value guards become guards of the graph, and so do the checks of arguments: a call that
is an `InputError` breaks the graph, and is one. Not asked there: a kernel's own check, and whether it broke since. Not
counted: a `Run` is told nothing. A structure does not pass through dynamo: of a call with `mask_info` the same call
with its dense mask alone is traced. It is made beside the example's, and the report says who answers it. A call with
`mask_info` and no mask breaks the graph.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from fuseboard import context, dispatch
from fuseboard.backend import Kernel
from fuseboard.call import LONG, Call, Sizes, describe, lowered
from fuseboard.chain import REFERENCE, Chain, Route, Table
from fuseboard.constraints import Refusal
from fuseboard.context import Binding, bind
from fuseboard.errors import RefusedError
from fuseboard.masks import MaskInfo, in_form
from fuseboard.policy import Policy, policy_for
from fuseboard.run import Run
from fuseboard.site import Site, sites

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Frozen", "FrozenAttention", "FrozenSite", "NotFrozenError", "freeze"]


class NotFrozenError(RefusedError):
    """A call was made that what was frozen does not answer.

    Attributes:
        call: The kind of call, as text; None where the site was not frozen at all.
        frozen: What was frozen at the site: kinds of call, as text, and who answers them.
    """

    def __init__(
        self,
        policy: str,
        site: str,
        message: str,
        *,
        call: str | None = None,
        frozen: Mapping[str, str] | None = None,
        refusals: Iterable[Refusal] = (),
    ) -> None:
        super().__init__(policy, site, message, tuple(refusals))
        self.call = call
        self.frozen = dict(frozen or {})


def freeze(
    what: Site | Iterable[Site] | Callable[..., Any],
    policy: Policy | str | Mapping[str, Policy | str],
    example: Callable[[], Any] | tuple[Any, ...] | Mapping[str, Any],
) -> Frozen:
    """Run an example under a policy and keep who answered which kind of call at which site.

    `frozen = freeze(model, "exact", (ids,))`, or `freeze([SITE_A, SITE_B], "exact", lambda: model(ids))`.

    Args:
        what: A model, or the sites that the example has to call.
        policy: As for `fuseboard.bind`.
        example: Of a model, its arguments: a tuple of positional ones, or a mapping of named ones. Of sites, a function
            without arguments. It has to make every kind of call that is to be answered later: in the grad mode and
            under the autocast of later calls, with one query and with many, with each kind of mask.

    Raises:
        PolicyError: There is no such policy.
        NotFrozenError: The example called no site, or not one that was named.
        TypeError: `what` and `example` do not go together.
    """
    named, run = _example_of(what, example)
    frozen = Frozen(policy_for(policy))
    record = Run()
    with frozen.bind(record), context.tell_graphs(frozen_for=True):
        run()
    frozen._seal(named, record)
    return frozen


def _example_of(what: Any, example: Any) -> tuple[list[Site], Callable[[], Any]]:
    named = [what] if isinstance(what, Site) else None if callable(what) else list(what)
    if named is not None:
        wrong = next((each for each in named if not isinstance(each, Site)), None)
        if wrong is not None or not callable(example):
            given = wrong if wrong is not None else example
            msg = (
                f"freeze(sites, policy, example) was given {given!r}; expected sites and a function without arguments."
            )
            raise TypeError(msg)
        return named, example
    if isinstance(example, Mapping):
        return [], lambda: what(**example)
    if isinstance(example, tuple):
        return [], lambda: what(*example)
    given = type(example).__name__
    msg = (
        f"freeze(model, policy, example) was given a {given}; expected a tuple of the model's arguments, or a mapping."
    )
    raise TypeError(msg)


class _Choice:
    """Copies of a module that keeps one share it, as they share a function."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> _Choice:
        return self


class Frozen(_Choice):
    """What `freeze` kept. A context manager that binds it, and plain calls for graphs.

    Holds for the sites that the example called. Drop it, or `close()` it, and nothing of it remains.

    Attributes:
        name: The policy under which the example ran, as text.
        attention: To be called as `fuseboard.attention` is; answered by what was frozen, and traceable.
    """

    def __init__(self, policy: Policy) -> None:
        self._held = _Held(policy)
        self._bind = bind(self._held.policy)
        self.name = str(policy)
        self.attention = FrozenAttention(self._held)

    def _seal(self, named: list[Site], record: Run) -> None:
        calls = self.attention.calls
        calls.update(self._held.seal({id(route) for route, _ in record._counts()}))
        missing = next((each.name for each in named if each.name not in calls), None)
        if missing is not None or not calls:
            what = f"did not call site {missing!r}" if missing is not None else "called no site of fuseboard's"
            msg = f"the example {what}: freeze with one that makes each call once."
            raise NotFrozenError(self._held.policy.name, missing or "", msg)

    def __getitem__(self, site: Site) -> FrozenSite:
        """The plain call of a site.

        Raises:
            NotFrozenError: The example did not call it.
        """
        return self.attention.at(site)

    def bind(self, run: Run | None = None) -> bind:
        """`with frozen.bind(run=run):` as `with frozen:`, and a Run counts."""
        return self._bind if run is None else bind(self._held.policy, run=run)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[Frozen]:
        """As `with frozen:`, and where dynamo traces meanwhile, on this thread, `fuseboard.attention` is `attention`.

        So compiled functions that call `fuseboard.attention` have the frozen kernels in their graphs. Graphs that were
        traced with another choice, or without, are not used meanwhile, nor this one's afterwards.
        """
        _told_to_dynamo()
        with self, context.tell_graphs(attention=self.attention):
            yield self

    def __enter__(self) -> Frozen:  # noqa: PYI034 - final in spirit; `Self` needs Python 3.11
        self._bind.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bind.__exit__(kind, error, trace)

    def close(self) -> None:
        """Forget it: calls under it are refused from now on. Safe to call twice."""
        self.attention.calls.clear()
        self._held.release()

    def report(self) -> dict[str, dict[str, str]]:
        """Site to kind of call to who answers it. A site of policy `auto` answers every kind by its reference."""
        return {name: dict(each.frozen) for name, each in sorted(self.attention.calls.items())}

    def __repr__(self) -> str:
        return f"<Frozen {self.name}: {', '.join(sorted(self.attention.calls)) or 'nothing'}>"


# ---- what dynamo traces in place of `fuseboard.attention`

_here = context.in_graphs


@functools.cache
def _told_to_dynamo() -> None:
    torch.compiler.substitute_in_graph(dispatch.attention)(_attention_in_graphs)


def _attention_in_graphs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    site: Site,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    mask_info: MaskInfo | None = None,
) -> Tensor:
    attention: Any = getattr(_here, "attention", None)
    if attention is None:
        from torch import _dynamo  # noqa: PLC0415 - loaded already, since it is tracing

        attention = _dynamo.disable(dispatch.attention)  # type: ignore[no-untyped-call]
    answer: Tensor = attention(
        q, k, v, site=site, mask=mask, causal=causal, scale=scale, enable_gqa=enable_gqa, dropout_p=dropout_p,
        mask_info=mask_info,
    )  # fmt: skip
    return answer


# ---- where a policy's own selection would lie


class _FrozenPolicy(Policy):
    """A policy of its own for each freezing, so that no other's selection is seen or touched.

    Attributes:
        sealed: Nothing is chosen any more.
        held: Sites at which a frozen table lies.
    """

    __slots__ = ("_making", "held", "sealed")

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.name, strict=policy.strict, registry=policy.registry, patterns=policy.patterns)
        self.sealed = False
        self.held: list[weakref.ref[Site]] = []
        self._making: set[str] = set()

    def for_site(self, name: str) -> Policy:
        """Asked by a table that is made for a site: by one that the example made, too, which a frozen one replaces."""
        if self.sealed:
            raise _unknown_site(self, name)
        site = sites().get(name)
        if site is not None and self not in site.tables and name not in self._making:
            self.hold(site)
        return super().for_site(name)

    def hold(self, site: Site) -> None:
        self._making.add(site.name)
        try:
            site.tables.setdefault(self, _FrozenTable(self, site))
            self.held.append(weakref.ref(site))
        finally:
            self._making.discard(site.name)


def _unknown_site(policy: Policy, name: str) -> NotFrozenError:
    msg = (
        f"site {name!r} is not frozen under policy {policy.name!r}: the example did not call it, or it was made later."
    )
    return NotFrozenError(policy.name, name, msg)


class _Held:
    """The tables at the sites, taken away again with the last who uses them.

    Attributes:
        policy: Under which they lie.
        release: Takes them away now.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = _FrozenPolicy(policy)
        for site in sites().values():
            self.policy.hold(site)
        self.release = weakref.finalize(self, _release, self.policy, self.policy.held)

    def seal(self, taken: set[int]) -> dict[str, FrozenSite]:
        """Choose no more. Gives the calls of the sites that the example called; `taken` are ids of routes it took."""
        self.policy.sealed = True
        calls = {}
        for site in sites().values():
            table = site.tables.get(self.policy)
            if isinstance(table, _FrozenTable):
                table.seal()
                if table.chains or id(table.reference) in taken:
                    calls[site.name] = FrozenSite(self, site, table)
        return calls


def _release(policy: Policy, held: list[weakref.ref[Site]]) -> None:
    for each in held:
        site = each()
        if site is not None:
            site.tables.pop(policy, None)


class _FrozenTable(Table):
    """A table whose chains are those that the example made."""

    __slots__ = ("binding", "sealed")

    def __init__(self, policy: Policy, site: Site) -> None:
        super().__init__(policy, site)
        self.binding = Binding(policy, None)
        self.sealed = False

    def seal(self) -> None:
        for call, chain in [*self.chains.items()]:
            assert isinstance(chain, _FrozenChain)
            if chain.kept is None:  # described, and never answered: the example raised, and went on
                del self.chains[call]
                continue
            chain.kept, chain.sealed = attrs.evolve(chain.kept, until=0, keep=True), True
        self.sealed = True
        self.forget_routes()

    def chain(self, call: Call) -> Chain:
        chain = self.chains.get(call)
        if chain is not None:
            return chain
        if not self.sealed:
            return self.chains.setdefault(call, _FrozenChain(self, call))
        frozen = self.frozen()
        body = "".join(f"\n    {kind}: {name}" for kind, name in frozen.items()) or " nothing"
        msg = (
            f"site {self.site.name!r} was not frozen for such a call: {call}. Frozen there, under policy "
            f"{self.policy.name!r}:{body}\nFreeze with an example that makes it."
        )
        raise NotFrozenError(self.policy.name, self.site.name, msg, call=str(call), frozen=frozen)

    def frozen(self) -> dict[str, str]:
        """Kinds of call, as text, and who answers them."""
        if self.reference is not None:
            return {"every call": REFERENCE}
        return {str(call): self._answer(chain) for call, chain in self.chains.items()}

    def _answer(self, chain: Chain) -> str:
        assert isinstance(chain, _FrozenChain)
        name, dense = _kept(chain).backend_name, self.chains.get(chain.dense) if chain.dense is not None else None
        return name if dense is None else f"{name} (traced: dense mask, {_kept(dense).backend_name})"


def _kept(chain: Chain) -> Route:
    assert isinstance(chain, _FrozenChain)
    assert chain.kept is not None
    return chain.kept


class _FrozenChain(Chain):
    """A chain that, once sealed, has one link: the one that answered last.

    Attributes:
        kept: Who that was.
        dense: The same call with its dense mask alone, which is what a graph has of it; None where there is none.
    """

    def __init__(self, table: _FrozenTable, call: Call) -> None:
        super().__init__(table.policy, table.site, call)
        self._binding = table.binding
        self.kept: Route | None = None
        self.dense: Call | None = None
        self.sealed = False

    def route(
        self,
        sizes: Sizes,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        declined: dict[str, str] | None = None,
        **arguments: Any,
    ) -> Route:
        if not self.sealed:
            self.kept = super().route(sizes, q, k, v, declined=declined, **arguments)
            if self.dense is None and arguments["mask"] is not None and arguments["mask_info"] is not None:
                self._make_dense(
                    q, k, v, arguments["mask"], *(arguments[key] for key in ("causal", "scale", "dropout_p"))
                )
            return self.kept
        kept = _kept(self)
        link = kept.link
        if link is None or kept.kernel is None:
            return kept
        name = link.backend.name
        refusals, _ = self.problems(link, sizes)
        if not refusals:
            asked = {key: arguments[key] for key in ("mask", "causal", "scale", "dropout_p", "mask_info")}
            said = (declined or {}).get(name) or self.declines(link, kept.kernel, q, k, v, **asked)
            if not isinstance(said, str):
                return kept
            refusals = (Refusal(name, "declined", said, "", None, said),)
        body = "".join(f"\n    {each}" for each in refusals)
        msg = (
            f"site {self.site.name!r} was frozen to {name} for such calls ({self.call}), which cannot answer "
            f"this one:{body}"
        )
        raise NotFrozenError(
            self.policy.name, self.site.name, msg, call=str(self.call), frozen={str(self.call): name}, refusals=refusals
        )

    def _make_dense(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool, scale: float | None, dropout_p: float
    ) -> None:
        """Make the call that a graph will have in place of this one, so that it is known who answers that."""
        gqa = q.shape[1] != k.shape[1]
        call, _ = describe(
            q, k, v, mask=mask, causal=causal, scale=scale, enable_gqa=gqa, dropout_p=dropout_p, mask_info=None
        )
        # A strict policy may have nobody for it, or memory not suffice: then it is not frozen, and breaks the graph.
        with contextlib.suppress(Exception):
            dispatch._bound(self._binding, q, k, v, self.site, mask, causal, scale, gqa, dropout_p, None)
            self.dense = call


# ---- plain calls


class FrozenAttention(_Choice):
    """`fuseboard.attention` with every choice made.

    An object and no method of `Frozen`: dynamo of torch 2.6 does not find out where the self of a method comes from
    that a module keeps, and so cannot guard it.

    Attributes:
        calls: The call of each site, by its name.
    """

    def __init__(self, held: _Held) -> None:
        self.calls: dict[str, FrozenSite] = {}
        self._held = held

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, site: Site, **arguments: Any) -> Tensor:
        """As `fuseboard.attention`.

        Raises:
            NotFrozenError: No such call was frozen.
        """
        return self.at(site)(q, k, v, **arguments)

    def at(self, site: Site) -> FrozenSite:
        """The plain call of a site.

        Raises:
            NotFrozenError: The example did not call it.
        """
        if site.name not in self.calls or self.calls[site.name].site is not site:
            raise _unknown_site(self._held.policy, site.name)
        return self.calls[site.name]


class _Entry:
    """One kind of call, in the terms in which a trace can compare it, and its kernel."""

    __slots__ = ("call", "form", "guards", "head_dim", "kernel", "kind", "v_head_dim")

    def __init__(self, call: Call, route: Route) -> None:
        self.call = call
        self.kernel: Kernel | None = route.kernel
        self.form = route.form
        self.guards = () if route.link is None else tuple(route.link.backend.constraints.guards)
        self.head_dim, self.v_head_dim = call.head_dim, call.v_head_dim
        self.kind: tuple[Hashable, ...] = (
            call.device_type, call.device_index, call.dtype, call.gqa, call.one_query, call.long_queries, call.lengths,
            call.empty, call.mask, call.mask_dtype, call.mask_grad, call.causal, call.custom_scale, call.negative_scale,
            call.dropout, call.grad, call.packed_last,
        )  # fmt: skip


class _TracedSizes:
    """`Sizes` for guards, of a trace's symbolic numbers; `attrs` classes cannot be made while dynamo traces."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float) -> None:
        self.batch, self.heads, self.q_length, self.head_dim = q.shape
        self.kv_heads, self.k_length, self.v_head_dim = k.shape[1], k.shape[2], v.shape[3]
        self.strides = (q.stride(), k.stride(), v.stride())
        self.mask_shape = None if mask is None else mask.shape
        self.dropout_p = dropout_p


class FrozenSite(_Choice):
    """The plain call of one site: `fuseboard.attention` with its site and its choice made.

    Attributes:
        site: Which.
        frozen: Kinds of call, as text, and who answers them.
    """

    def __init__(self, held: _Held, site: Site, table: _FrozenTable) -> None:
        policy = held.policy
        self._held = held
        self.site = site
        self.frozen = table.frozen()
        self._policy = policy
        self._binding = Binding(policy, None)
        self._reference_only = table.reference is not None
        self._entries = [_Entry(call, _kept(chain)) for call, chain in table.chains.items() if call.structure is None]
        devices = {call.device_type for call in table.chains}
        self._autocasts = [each for each in sorted(devices) if torch.amp.is_autocast_available(each)]

    def __call__(
        self,
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
    ) -> Tensor:
        """As `fuseboard.attention`.

        Raises:
            NotFrozenError: No such call was frozen. (While dynamo traces with `fullgraph=True`, its own error.)
        """
        if not torch.compiler.is_dynamo_compiling():
            return self._eager(q, k, v, mask, causal, scale, enable_gqa, dropout_p, mask_info)
        if mask_info is None or mask is not None:  # a dense mask says what its structure does
            if self._reference_only:
                return self.site.compute(q, k, v, mask, causal, scale, enable_gqa, dropout_p, None)
            if q.device.type in self._autocasts and torch.is_autocast_enabled(q.device.type):
                low_q, low_k, low_v, low_mask = lowered(q, k, v, mask)
                entry = self._entry(low_q, low_k, low_v, low_mask, causal, scale, enable_gqa, dropout_p)
                if entry is not None and entry.kernel is not None:
                    with torch.autocast(q.device.type, enabled=False):
                        return _called(entry, low_q, low_k, low_v, low_mask, causal, scale, dropout_p)
            else:
                entry = self._entry(q, k, v, mask, causal, scale, enable_gqa, dropout_p)
                if entry is not None and entry.kernel is not None:
                    return _called(entry, q, k, v, mask, causal, scale, dropout_p)
            if entry is not None:
                return self.site.compute(q, k, v, mask, causal, scale, enable_gqa, dropout_p, None)
        from torch import _dynamo  # noqa: PLC0415 - loaded already, since it is tracing

        # Breaks the graph: what is not known here is answered, or refused, outside.
        eagerly: Any = _dynamo.disable(self._eager)  # type: ignore[no-untyped-call]
        answer: Tensor = eagerly(q, k, v, mask, causal, scale, enable_gqa, dropout_p, mask_info)
        return answer

    def _eager(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
        enable_gqa: bool,
        dropout_p: float,
        mask_info: MaskInfo | None,
    ) -> Tensor:
        bound = context.bound()
        binding = self._binding
        if bound is not None and bound.run is not binding.run:
            binding = self._binding = Binding(self._policy, bound.run)
        elif bound is None and binding.run is not None:
            binding = self._binding = Binding(self._policy, None)
        return dispatch._bound(binding, q, k, v, self.site, mask, causal, scale, enable_gqa, dropout_p, mask_info)

    def _entry(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
        enable_gqa: bool,
        dropout_p: float,
    ) -> _Entry | None:
        """What was frozen for such a call, found while dynamo traces: every number is compared by a branch.

        A branch on a symbolic size is a guard of the graph; a symbolic truth value in a tuple is an error of dynamo's.
        """
        if not _fits(q, k, v, enable_gqa, dropout_p) or not _mask_fits(mask, q, k):
            return None
        n_q, n_k = q.shape[2], k.shape[2]
        grad = torch.is_grad_enabled()
        needs = grad and (q.requires_grad or k.requires_grad or v.requires_grad)
        mask_needs = grad and mask is not None and mask.requires_grad
        kind = (
            q.device.type, q.device.index, q.dtype,
            _decided(q.shape[1] != k.shape[1]), _decided(n_q == 1), _decided(n_q > LONG),
            "equal" if n_q == n_k else "fewer queries" if n_q < n_k else "more queries",
            _decided(q.numel() == 0 or k.numel() == 0 or v.numel() == 0),
            "none" if mask is None else "bool" if mask.dtype == torch.bool else "additive",
            None if mask is None or mask.dtype == torch.bool else mask.dtype,
            mask_needs, causal, scale is not None,
            _decided(scale is not None and scale <= 0), _decided(dropout_p > 0),
            needs or mask_needs,
            _packed(q) and _packed(k) and _packed(v),
        )  # fmt: skip
        for entry in self._entries:
            if entry.head_dim == q.shape[3] and entry.v_head_dim == v.shape[3] and entry.kind == kind:
                sizes: Any = _TracedSizes(q, k, v, mask, dropout_p) if entry.guards else None
                for guard in entry.guards:
                    if not guard.check(entry.call, sizes):
                        return None
                return entry
        return None


def _fits(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool, dropout_p: float) -> bool:
    """Whether `describe` would let these pass. Where not, the graph breaks, and it raises outside.

    Kernels in a graph are not told what was checked: torch's own, called without their public function, read past the
    end of values that are fewer than the keys.
    """
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:  # noqa: PLR2004
        return False
    if k.dtype != q.dtype or v.dtype != q.dtype or k.device != q.device or v.device != q.device:
        return False
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        return False
    if v.shape[0] != k.shape[0] or v.shape[1] != k.shape[1] or v.shape[2] != k.shape[2]:
        return False
    if q.shape[1] != k.shape[1] and (not enable_gqa or k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0):
        return False
    return _decided(dropout_p >= 0) and _decided(dropout_p < 1)


def _mask_fits(mask: Tensor | None, q: Tensor, k: Tensor) -> bool:
    if mask is None:
        return True
    if mask.dim() > 4 or mask.device != q.device or mask.dtype not in (torch.bool, torch.float32, q.dtype):  # noqa: PLR2004
        return False
    want = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    for axis in range(-mask.dim(), 0):  # noqa: SIM110 - branches, as in `_entry`
        if mask.shape[axis] != 1 and mask.shape[axis] != want[axis]:
            return False
    return True


def _packed(tensor: Tensor) -> bool:
    return _decided(tensor.shape[3] < 2) or _decided(tensor.stride(3) == 1)  # noqa: PLR2004


def _decided(condition: object) -> bool:
    if condition:  # noqa: SIM103 - the branch is the point: see `_entry`
        return True
    return False


def _called(
    entry: _Entry,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout_p: float,
) -> Tensor:
    assert entry.kernel is not None
    given, _ = in_form(entry.form, None, mask, None, q, k)
    if not entry.call.dropout:
        dropout_p = 0.0  # a number, where dynamo made a symbol of the default
    return entry.kernel(q, k, v, mask=given, mask_info=None, causal=causal, scale=scale, dropout_p=dropout_p)
