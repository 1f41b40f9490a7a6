"""`attention`: the one call that engines make, and the road of that call.

Nothing bound: one context variable is read and the site's reference answers. Otherwise a key is made of everything that
can change a decision; a key seen before has its route, and the kernel is called. The rest of this module is for keys
not seen before, for kernels that raise, and for autocast.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor
from torch.autograd import forward_ad

from fuseboard import context, settings
from fuseboard.backend import Kernel
from fuseboard.call import Sizes, describe, is_lowered, lowered
from fuseboard.chain import Chain, Route, Table
from fuseboard.context import BOUND, Binding
from fuseboard.errors import DeclinedError, InputChangedError, InputError, RefusedError
from fuseboard.explanation import of_refusal
from fuseboard.failure import Meaning, classify
from fuseboard.masks import MaskInfo, check_mask_info, in_form
from fuseboard.registry import first_line
from fuseboard.run import Counter
from fuseboard.site import Site, sites

__all__ = ["attention", "site_calls"]

TRIAL_BYTES = 64 * 1024 * 1024
"""A backend's first call of a kind is made on inputs that could be restored, up to this many bytes of them."""

_UNSAVABLE = "Inference tensors cannot be saved for backward"

_autocast = torch._C._is_any_autocast_enabled
_transform = torch._C._functorch.peek_interpreter_stack
_grad = torch.is_grad_enabled
# Not `is_compiling`, which costs three times as much and is true on every thread while one of them compiles or exports:
# only where dynamo traces is there a graph to break.
_tracing = torch.compiler.is_dynamo_compiling

_settings = settings.read()
_watched = _settings.debug_masks or _settings.test_count


def attention(
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
    """Attention at one site: by its reference, or by the fastest backend that the bound policy admits.

    Args:
        q: Queries, `(batch, heads, q_length, head_dim)`, floating.
        k: Keys, `(batch, kv_heads, k_length, head_dim)`, in q's dtype and on its device.
        v: Values, `(batch, kv_heads, k_length, v_head_dim)`, likewise.
        site: Where in the engine this is.
        mask: Boolean (True = attend), or additive in q's dtype or float32; broadcastable to `(batch, heads, q_length,
            k_length)` from the right, so that rank 3 means per head.
        causal: Top-left, torch's `is_causal`: query i sees key j when j <= i. For the KV-cache case use `mask_info`.
        scale: Of the scores; None for 1 / sqrt(head_dim).
        enable_gqa: Allow fewer key heads: query head i uses key head i // (heads // kv_heads).
        dropout_p: Probability of dropping a weight.
        mask_info: The structure behind `mask`. Given alone, the dense mask is written out for whoever needs it.

    Returns:
        `(batch, heads, q_length, v_head_dim)`.

    Raises:
        InputError: `site` is no Site, `mask_info` no MaskInfo; or, under a policy other than `auto`, another argument
            cannot be right. No kernel was called.
        RefusedError: The bound policy is strict and its backend cannot answer.
        InputChangedError: A backend had written into its inputs, and their values could not be given back.
    """
    try:
        reference = site.reference
    except AttributeError:
        raise _no_site(site) from None
    binding = BOUND.get()
    if binding is None:
        binding = context.process
    if _watched:
        _watch(q, k, site, mask, mask_info)
    if binding is None:
        if mask is None and mask_info is None and scale is None and not causal and not enable_gqa and not dropout_p:
            return reference(q, k, v)
        return site.compute(q, k, v, mask, causal, scale, enable_gqa, dropout_p, mask_info)
    if _tracing():
        return _eagerly(binding, q, k, v, site, mask, causal, scale, enable_gqa, dropout_p, mask_info)
    return _bound(binding, q, k, v, site, mask, causal, scale, enable_gqa, dropout_p, mask_info)


def _no_site(given: object) -> InputError:
    msg = (
        f"site is {given!r}; expected the place in the engine, made once at module level: "
        'SITE = fuseboard.Site("engine.part").'
    )
    return InputError("site", msg)


def _bound(  # noqa: C901, PLR0912, PLR0915 - one road, and a call of its own would cost a tenth of a microsecond
    binding: Binding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    site: Site,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dropout_p: float,
    mask_info: MaskInfo | None,
    reference: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Answer under a binding. `reference` stands for the site's own where that must not see these very tensors."""
    table = site.tables.get(binding.policy)
    if table is None:
        table = site.tables.setdefault(binding.policy, Table(binding.policy, site))
    run = binding.run
    route = table.reference
    if route is not None:
        out = site.compute(q, k, v, mask, causal, scale, enable_gqa, dropout_p, mask_info)
        if run is not None:
            run.tick(route)
        return out
    if _autocast() and is_lowered(q):
        return _under_autocast(binding, q, k, v, site, mask, causal, scale, enable_gqa, dropout_p, mask_info)
    # Everything that can change the decision. What is equal here was looked at before and is answered alike. Strides
    # count for contiguous tensors too, whose axes of length 1 may have any. A number's type stands before it, so that
    # a tensor in its place is never compared, and waited for.
    grad = _grad()
    routes = table.routes
    latest_key, latest = routes.latest
    try:
        key: Hashable = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
            q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            type(q), type(k), type(v), forward_ad._current_level, _transform() is None,
            causal, type(scale), scale, enable_gqa, type(dropout_p), dropout_p,
            grad and (q.requires_grad or k.requires_grad or v.requires_grad),
            None if mask is None
            else (type(mask), mask.shape, mask.stride(), mask.dtype, mask.device, grad and mask.requires_grad),
            None if mask_info is None else mask_info.signature,
        )  # fmt: skip
        # The layers of a model ask alike in turn, and to compare a key takes a third of the time of hashing it.
        if latest_key == key:
            route = latest
        else:
            route = routes.get(key)
            if route is not None and not route.until:
                routes.latest = key, route
    except (AttributeError, RuntimeError, TypeError):  # no tensors, or without strides: `describe` says it better
        key = None
    if route is None:
        request = _Request(
            binding, table, q, k, v, site, mask, causal, scale, enable_gqa, dropout_p, mask_info, reference
        )
        return request.answer(key)
    if route.until:
        table.count_down(key, route)
    kernel = route.kernel
    if kernel is None:
        out = (
            site.compute(q, k, v, mask, causal, scale, enable_gqa, dropout_p, mask_info)
            if reference is None
            else reference()
        )
        if run is not None:
            run.tick(route)
        return out
    if mask_info is None and (mask is None or (mask.dim() == 4 and q.dtype is not torch.float64)):  # noqa: PLR2004
        given_mask, given_info = mask, None  # what `in_form` would answer, without the call
    else:
        given_mask, given_info = in_form(route.form, route.structure, mask, mask_info, q, k)
    before = _versions(q, k, v, mask)
    try:
        out = kernel(q, k, v, mask=given_mask, mask_info=given_info, causal=causal, scale=scale, dropout_p=dropout_p)
    except Exception as error:  # noqa: BLE001 - what it means is decided below, where sys.exc_info() is the caller's
        caught = error
    else:
        if run is not None:
            run.tick(route)
        return out
    try:
        request = _Request(
            binding, table, q, k, v, site, mask, causal, scale, enable_gqa, dropout_p, mask_info, reference
        )
        request.failed(route, caught, sys.exc_info()[1], before)
        return request.answer(key)
    finally:
        del caught  # its traceback holds this frame: the inputs would live until the next garbage collection


def _versions(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[int, int, int, int] | None:
    """Numbers that change when torch writes into a tensor; inference tensors have none."""
    if q.is_inference() or k.is_inference():
        return None
    try:
        return q._version, k._version, v._version, 0 if mask is None or mask.is_inference() else mask._version
    except RuntimeError:  # v alone is one: too rare to be asked every time
        return None


def _eagerly(*arguments: Any) -> Tensor:
    """Reached while torch.compile traces: break the graph, and select outside it, where context can be read."""
    import torch._dynamo  # noqa: PLC0415 - loaded already, since it is tracing; half a second otherwise

    answer: Tensor = torch._dynamo.disable(_bound)(*arguments)  # type: ignore[no-untyped-call]
    return answer


def _under_autocast(
    binding: Binding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    site: Site,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dropout_p: float,
    mask_info: MaskInfo | None,
) -> Tensor:
    """What torch's autocast does for its own attention: cast to the low dtype, then compute with autocast off.

    The reference is given the tensors and the autocast that its engine would have given it.
    """
    device = q.device.type
    dtype = torch.get_autocast_dtype(device)

    def reference() -> Tensor:
        with torch.autocast(device, dtype=dtype):
            return site.compute(q, k, v, mask, causal, scale, enable_gqa, dropout_p, mask_info)

    low_q, low_k, low_v, low_mask = lowered(q, k, v, mask)
    with torch.autocast(device, enabled=False):
        return _bound(
            binding, low_q, low_k, low_v, site, low_mask, causal, scale, enable_gqa, dropout_p, mask_info, reference
        )


_Snapshot: TypeAlias = tuple[Tensor, Any]
"""A copy of an input, and its `grad_fn`."""


@attrs.define(eq=False)
class _Request:
    """One call that has no remembered route, or whose kernel raised: described, walked down its chain, tried."""

    binding: Binding
    table: Table
    q: Tensor
    k: Tensor
    v: Tensor
    site: Site
    mask: Tensor | None
    causal: bool
    scale: float | None
    enable_gqa: bool
    dropout_p: float
    mask_info: MaskInfo | None
    reference: Callable[[], Tensor] | None
    declined: dict[str, str] = attrs.field(factory=dict)
    broke: list[tuple[str, str]] = attrs.field(factory=list)
    chain: Chain = attrs.field(init=False)
    sizes: Sizes = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        call, self.sizes = describe(
            self.q, self.k, self.v, mask=self.mask, causal=self.causal, scale=self.scale, enable_gqa=self.enable_gqa,
            dropout_p=self.dropout_p, mask_info=self.mask_info,
        )  # fmt: skip
        self.chain = self.table.chain(call)

    def answer(self, key: Hashable) -> Tensor:
        """Try links until one answers; remember which did."""
        while True:
            route = self._route(due=key is None or key in self.table.due)
            if route.kernel is None or route.link is None:
                out = self._reference()
                break
            snapshots = self._snapshots() if route.link not in self.chain.proven else {}
            before = _versions(self.q, self.k, self.v, self.mask)
            try:
                out = self._call(route.kernel, route)
                self._check(out, before)
            except Exception as error:  # noqa: BLE001 - what it means is decided below
                caught = error
            else:
                self.chain.proven.add(route.link)
                break
            try:
                self.failed(route, caught, sys.exc_info()[1], before, snapshots)
            finally:
                del caught
        if key is not None:
            self.table.remember(key, route)
        if self.binding.run is not None:
            self.binding.run.tick(route)
        return out

    def failed(
        self,
        route: Route,
        error: Exception,
        handled: BaseException | None,
        before: tuple[int, ...] | None,
        snapshots: dict[str, _Snapshot] | None = None,
    ) -> None:
        """Take in that a route's kernel raised: pass the error up, or see to it that the next link can answer.

        Args:
            route: Whose kernel.
            error: What it raised.
            handled: What the caller was handling when it called.
            before: The inputs' versions before the kernel ran.
            snapshots: Copies of the inputs from before, where they were made.

        Raises:
            InputChangedError: The inputs are no longer what they were, and cannot be made so.
        """
        try:
            name, reason = route.backend_name, first_line(error)
            unsavable = _UNSAVABLE in reason and self._has_inference_tensors()
            declined = unsavable or isinstance(error, DeclinedError)
            if not declined and classify(error, handled) is not Meaning.BROKEN:
                raise error
            changed = self._restore(before, snapshots or {})
            if declined and not changed:
                self.declined[name] = reason if unsavable else str(error) or "declined"
                self.table.forget_routes()
                return
            self.chain.registry.mark_broken(name, self.chain.call, reason)
            self.broke.append((name, reason))
            if not changed:
                return
            msg = (
                f"{name} raised at site {self.site.name!r} ({reason}) after it had written into "
                f"{' and '.join(changed)}, so that no other backend can answer this call. "
                "It is not used for such calls again: repeat from the inputs."
            )
            raise InputChangedError(name, changed, msg) from error
        finally:
            del error  # see `_bound`

    def _route(self, *, due: bool) -> Route:
        try:
            route = self.chain.route(
                self.sizes, self.q, self.k, self.v, mask=self.mask, causal=self.causal, scale=self.scale,
                dropout_p=self.dropout_p, mask_info=self.mask_info, declined=self.declined, due=due,
                fresh={name for name, _reason in self.broke},
            )  # fmt: skip
        except RefusedError as error:
            self._log("no other may")
            chain, sizes, refusals = self.chain, self.sizes, error.refusals
            error.explained_by(lambda: of_refusal(chain, sizes, refusals))
            raise error from None
        self._log(f"{route.backend_name} takes over")
        return route

    def _log(self, what_follows: str) -> None:
        for name, reason in self.broke:
            message = (
                f"{name} broke at site {self.site.name!r} for this kind of call ({reason}); {what_follows}. "
                f"The kind of call: {self.chain.call}. See fuseboard.explain."
            )
            self.chain.registry.log_once(logging.WARNING, self.site.name, name, reason, message)
        self.broke.clear()

    def _reference(self) -> Tensor:
        if self.reference is not None:
            return self.reference()
        return self.site.compute(
            self.q, self.k, self.v, self.mask, self.causal, self.scale, self.enable_gqa, self.dropout_p, self.mask_info
        )

    def _call(self, kernel: Kernel, route: Route) -> Tensor:
        mask, info = in_form(route.form, route.structure, self.mask, self.mask_info, self.q, self.k)
        return kernel(
            self.q,
            self.k,
            self.v,
            mask=mask,
            mask_info=info,
            causal=self.causal,
            scale=self.scale,
            dropout_p=self.dropout_p,
        )

    def _check(self, out: object, before: tuple[int, ...] | None) -> None:
        """Hold the first answer of a backend for such tensors against what it must be, and see what it wrote into."""
        written = self._written(before)
        if written:
            msg = f"it wrote into {' and '.join(written)}, and no input may be written"
            raise RuntimeError(msg)
        want = (*self.q.shape[:3], self.v.shape[3])
        if not isinstance(out, Tensor):
            msg = f"it returned a {type(out).__name__}, expected a tensor"
            raise TypeError(msg)
        if out.shape != want or out.dtype != self.q.dtype or out.device != self.q.device:
            got, wanted = f"{out.dtype} {tuple(out.shape)} on {out.device}", f"{self.q.dtype} {want} on {self.q.device}"
            msg = f"it returned {got}, expected {wanted}"
            raise ValueError(msg)
        if self.chain.call.grad and not out.requires_grad:
            msg = "it lost the gradient: its output has no grad_fn"
            raise RuntimeError(msg)

    def _inputs(self) -> dict[str, Tensor]:
        named = {"q": self.q, "k": self.k, "v": self.v, "mask": self.mask}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def _snapshots(self) -> dict[str, _Snapshot]:
        inputs = self._inputs()
        if sum(each.numel() * each.element_size() for each in inputs.values()) > TRIAL_BYTES:
            return {}
        if self.q.is_cuda and torch.cuda.is_current_stream_capturing():
            return {}
        with torch.no_grad():
            return {name: (each.detach().clone(), each.grad_fn) for name, each in inputs.items()}

    def _has_inference_tensors(self) -> bool:
        """Whether what autograd refuses is this very call's: ordinary tensors of the same kind are another matter."""
        return any(each is not None and each.is_inference() for each in (self.q, self.k, self.v, self.mask))

    def _restore(self, before: tuple[int, ...] | None, snapshots: dict[str, _Snapshot]) -> list[str]:
        """The inputs that were written into and could not be given their values back."""
        lost = []
        if snapshots:
            inputs = self._inputs()
            for name, (copy, node) in snapshots.items():
                try:
                    if not _same(inputs[name], copy):
                        with torch.no_grad():
                            inputs[name].copy_(copy)
                except RuntimeError:  # noqa: PERF203 - an expanded tensor, or a device that answers no more
                    lost.append(name)
                else:
                    # Written into with gradients recorded: its values are back, its history is not.
                    lost += [name] if inputs[name].grad_fn is not node else []
        else:
            lost = self._written(before)
        return lost

    def _written(self, before: tuple[int, ...] | None) -> list[str]:
        """The inputs that torch wrote into since they had these versions."""
        after = _versions(self.q, self.k, self.v, self.mask)
        if before is None or after is None:
            return []
        return [name for name, then, now in zip(("q", "k", "v", "mask"), before, after, strict=True) if then != now]


def _same(left: Tensor, right: Tensor) -> bool:
    """Equal values, NaN equal to NaN."""
    left, right = left.detach(), right.detach()
    return bool(((left == right) | ((left != left) & (right != right))).all())  # noqa: PLR0124


def _watch(q: Tensor, k: Tensor, site: Site, mask: Tensor | None, mask_info: MaskInfo | None) -> None:
    """What the two test settings ask for on every call."""
    if _settings.test_count:
        if site.calls is None:
            counter = Counter()
            site.calls = counter
        site.calls.tick()
    if _settings.debug_masks and mask_info is not None and not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        check_mask_info(mask, mask_info, q.shape[-2], k.shape[-2], q.device)


def site_calls() -> dict[str, int]:
    """How often each living site was called, under `FUSEBOARD_TEST=count`: a 0 is a site that bypasses the dispatcher.

    Raises:
        RuntimeError: The setting was not there when fuseboard was loaded, so that nothing was counted.
    """
    if not _settings.test_count:
        msg = "site_calls() needs FUSEBOARD_TEST=count in the environment before the first attention call or policy."
        raise RuntimeError(msg)
    return {name: 0 if site.calls is None else site.calls.value() for name, site in sites().items()}
