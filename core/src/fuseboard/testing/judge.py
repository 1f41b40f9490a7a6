"""What becomes of one case: one word, and why.

Cases go down the road of real calls: the chain of a strict policy decides, and the kernel it finds is called with what
it would be given. The result is held against float64. The tolerance is the rule of flash-attn's own tests: an exact
backend may be off by twice the error of attention by its definition in the same dtype plus one rounding, or by its
declared tolerance, whichever is more; an approximate one by its declared tolerance. Gradients likewise, at eight times
the declared tolerance, since they sum over rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from fuseboard import probe
from fuseboard.backend import Backend, Exactness
from fuseboard.call import Call, Sizes, describe
from fuseboard.chain import Table
from fuseboard.constraints import Guard
from fuseboard.context import bind
from fuseboard.dispatch import attention
from fuseboard.errors import DeclinedError, PolicyError, RefusedError
from fuseboard.failure import Meaning, classify
from fuseboard.masks import Form, MaskInfo, in_form
from fuseboard.policy import Policy, policy_for
from fuseboard.registry import first_line
from fuseboard.selftest import attention_fp64, definition, distance, gradient_tolerance, gradients, malformed
from fuseboard.site import Site
from fuseboard.testing.cases import HUGE, Case, Inputs, other_keys
from fuseboard.testing.process import Switches, switches

__all__ = ["SITE", "Answer", "Kit", "Outcome", "Via", "attend", "leaves", "reference", "refusal"]

SITE = Site("fuseboard.conformance")

MOVED = 20
"""A reference that moves by this many times the tolerance must take the output with it."""


@attrs.frozen
class Outcome:
    """One word, and why.

    Attributes:
        word: `ok`, `refused`, `wrong`, `raised`, `changed inputs`, `lost gradient` or `dropped argument`.
        about: The rule that refused, or the argument that was dropped.
        detail: What was found.
        form: How the kernel was given the mask.
    """

    word: str
    about: str = ""
    detail: str = ""
    form: Form = "plain"

    @property
    def failed(self) -> bool:
        """Admitted, and not ok."""
        return self.word not in ("ok", "refused")

    def __str__(self) -> str:
        word = f"{self.word} ({self.about})" if self.about else self.word
        return f"{word}: {self.detail}" if self.detail else word


@attrs.frozen
class Answer:
    """A kernel's output, and how it was given the mask."""

    out: Tensor
    form: Form = "plain"


Via = Callable[[Inputs], Answer]


@attrs.define(eq=False)
class Kit:
    """One backend on one device, ready to be judged.

    Attributes:
        backend: Which.
        device: Where.
        policy: The strict policy of its name.
        lost: The case at which the device was lost; nothing can be judged after that.
        switches: How torch's were set before the kernel was first called.
    """

    backend: Backend
    device: torch.device
    policy: Policy
    lost: str = ""
    switches: Switches = attrs.field(factory=dict, init=False)
    _table: Table = attrs.field(init=False)
    _verdict: probe.Verdict | None = None

    def __attrs_post_init__(self) -> None:
        self._table = Table(self.policy, SITE)

    @classmethod
    def open(cls, name: str, device: str | None = None) -> Kit:
        """The kit for an installed backend.

        Raises:
            PolicyError: There is no such backend, or this machine has none of its devices.
        """
        policy = policy_for(name, strict=True)
        backend = policy.registry.resolve(name)
        if policy.backend_name is None or backend is None:
            why = policy.registry.why_missing(name) or "it names no backend."
            raise PolicyError(name, f"--fuseboard-backend {name}: {why}")
        here = [each for each in sorted(backend.constraints.devices) if _is_here(each)]
        if device is None and not here:
            devices = ", ".join(sorted(backend.constraints.devices))
            raise PolicyError(name, f"--fuseboard-backend {name}: it runs on {devices}, which this machine has not.")
        try:
            where = torch.empty(0, device=device or here[0]).device  # as tensors name it: cuda:0, not cuda
        except Exception as error:  # torch says it in many ways
            msg = f"--fuseboard-device {device}: there is no such device here ({first_line(error)})."
            raise PolicyError(name, msg) from error
        return cls(backend, where, policy)

    def verdict(self) -> probe.Verdict:
        """The probe's verdict. A kernel that fails its self-test is still given the cases, so that each is judged."""
        if self._verdict is None:
            self.switches = switches()
            verdicts = self.policy.registry.verdicts
            self._verdict = probe.verdict(self.policy.registry, self.backend, self.device)
            if self._verdict.stage == "self-test":
                kernel = self.backend.load(self.device)
                verdicts[self.backend.name, str(self.device)] = probe.Verdict(ok=True, kernel=kernel)
        return self._verdict

    def faults(self, cases: Iterable[Case]) -> list[str]:
        """What is wrong with the plugin's hooks and guards, asked about every case, refused ones too, as chains do.

        No case would tell: whoever asks one that raises or gives nonsense gets a cautious answer in its place.
        """
        raised: dict[str, str] = {}
        for case in cases:
            try:
                inputs = case.inputs(self.device)
            except torch.OutOfMemoryError:
                continue  # as its own test is skipped
            call, sizes = describe(inputs.q, inputs.k, inputs.v, enable_gqa=True, **inputs.arguments())
            self.backend.exactness(call)
            self.backend.rank(call, sizes)
            for limit in self.backend.constraints.guards:
                fault = _guard_fault(limit, call, sizes)
                if fault is not None:
                    raised.setdefault(limit.rule, fault)
        for dtype in self.backend.constraints.dtypes:
            self.backend.tolerance(dtype)
        self.backend.install(torch.__version__)
        return [*(each.message for each in self.policy.registry.faults_of(self.backend.name)), *raised.values()]

    def judge(self, case: Case, via: Via | None = None) -> Outcome:
        """Run a case and say what became of it."""
        self.verdict()
        if self.lost:
            return Outcome("raised", "device lost", f"at case {self.lost}")
        try:
            return self._judge(case, case.inputs(self.device), via or self.kernel)
        except Exception as error:  # one failure must not end the run
            meaning = classify(error)
            if meaning is Meaning.OUT_OF_MEMORY:
                raise
            if meaning is Meaning.STICKY:
                self.lost = str(case)
            return Outcome("raised", "", first_line(error))

    @contextlib.contextmanager
    def unmarked(self) -> Iterator[None]:
        """Forget afterwards which calls the backend broke at in the block, so that the next check is its own."""
        registry = self.policy.registry
        before = set(registry.broken)
        try:
            yield
        finally:
            with registry.lock:
                for mark in set(registry.broken) - before:
                    del registry.broken[mark]
                for table in list(registry.tables):
                    table.forget_routes()

    def try_call(self, inputs: Inputs, *, grad: bool, via: Via | None = None) -> Tensor | Outcome:
        """Call the kernel on inputs that are no case: its output, or why there is none."""
        self.verdict()
        try:
            answer = self._call(inputs, via or self.kernel, grad=grad)
        except Exception as error:
            if classify(error) is not Meaning.BROKEN:
                raise
            return Outcome("raised", "", first_line(error))
        return answer if isinstance(answer, Outcome) else answer.out

    # ---- the roads

    def kernel(self, inputs: Inputs) -> Answer:
        """Call the kernel as a strict policy's chain would."""
        q, k, v = inputs.q, inputs.k, inputs.v
        call, sizes = describe(q, k, v, enable_gqa=True, **inputs.arguments())
        route = self._table.chain(call).route(sizes, q, k, v, **inputs.arguments())
        assert route.kernel is not None, "a strict policy's chain ends in a kernel or in an error"
        mask, info = in_form(route.form, route.structure, inputs.mask, inputs.info, q, k)
        given: dict[str, Any] = {"causal": inputs.causal, "scale": inputs.scale, "dropout_p": inputs.dropout_p}
        return Answer(route.kernel(q, k, v, mask=mask, mask_info=info, **given), route.form)

    def attention(self, inputs: Inputs) -> Answer:
        """Make the call that engines make, under the strict policy."""
        with bind(self.policy):
            return Answer(attend(inputs.q, inputs.k, inputs.v, inputs.arguments()))

    # ---- the judgement

    def _call(self, inputs: Inputs, via: Via, *, grad: bool) -> Answer | Outcome:
        try:
            with torch.set_grad_enabled(grad):
                answer = via(inputs)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # so that a launch's error is this case's
        except (DeclinedError, RefusedError) as error:
            return refusal(error)
        if not isinstance(answer.out, Tensor):
            return Outcome("wrong", "", malformed(answer.out, inputs.q, inputs.q) or "")
        return answer

    def _judge(self, case: Case, inputs: Inputs, via: Via) -> Outcome:
        before = {name: _memory(each).clone() for name, each in inputs.tensors().items()}
        exact = self.exact(inputs, case.grad)
        answer = self._call(inputs, via, grad=bool(case.grad))
        if isinstance(answer, Outcome):
            return answer
        out = answer.out
        want = reference(exact)
        problem = self._changed(inputs, before) or _malformed(out, want, inputs.q)
        if problem is None:
            problem = self._misfit(inputs, exact, out, want, via)
        if problem is None and case.grad:
            problem = self._gradients(case, inputs, exact, out, want) or self._changed(inputs, before)
        if problem is None and not (case.grad or case.note or case.crossed):
            problem = self._moves(inputs, out, want, via)
        if problem is not None and problem.word == "wrong" and not problem.about and case.layout != "packed":
            return self._of_the_layout(case, inputs, problem, want, via)
        return problem or Outcome("ok", form=answer.form)

    def _of_the_layout(self, case: Case, inputs: Inputs, problem: Outcome, want: Tensor, via: Via) -> Outcome:
        """The same problem, laid to the inputs' layout if the call is right once they are contiguous."""
        q, k, v = (
            each.detach().clone(memory_format=torch.contiguous_format) for each in (inputs.q, inputs.k, inputs.v)
        )
        packed = attrs.evolve(inputs, q=q, k=k, v=v)
        answer = self._call(packed, via, grad=False)
        if isinstance(answer, Outcome) or _malformed(answer.out, want, q) is not None:
            return problem
        error = distance(answer.out, want)
        right = error <= self.allowed(packed, want, error)
        return attrs.evolve(problem, about=f"{case.layout} inputs") if right else problem

    def exact(self, inputs: Inputs, grad: str) -> Inputs:
        """Copies in float64, on the device where it has that."""
        where = torch.device("cpu") if self.device.type == "mps" else self.device

        def copy(tensor: Tensor, letter: str) -> Tensor:
            return tensor.detach().to(where, torch.float64, copy=True).requires_grad_(letter in grad)

        mask, info = inputs.mask, inputs.info
        if mask is not None:
            mask = mask.to(where, copy=True) if mask.dtype == torch.bool else copy(mask, "m")
        if info is not None and info.keys is not None:
            info = attrs.evolve(info, keys=info.keys.to(where, copy=True))
        q = copy(inputs.q, "q")
        k = q if inputs.k is inputs.q else copy(inputs.k, "k")
        v = q if inputs.v is inputs.q else copy(inputs.v, "v")
        return attrs.evolve(inputs, q=q, k=k, v=v, mask=mask, info=info)

    def _misfit(self, inputs: Inputs, exact: Inputs, out: Tensor, want: Tensor, via: Via) -> Outcome | None:
        error = distance(out, want)
        allowed = self.allowed(inputs, want, error)
        if error <= allowed:
            return None
        detail = f"its output is off by {error:.2g}, tolerance {allowed:.2g}"
        for misread, result in _misreadings(exact):
            if distance(out, result) <= allowed:
                return Outcome("wrong", misread, detail)
        moved = self._moves(inputs, out, want, via)
        return moved if moved is not None and moved.word == "dropped argument" else Outcome("wrong", "", detail)

    def allowed(self, inputs: Inputs, want: Tensor, error: float) -> float:
        """The tolerance. How far off attention by its definition is, is only asked where the declared one is passed."""
        declared = self.backend.tolerance(inputs.q.dtype)
        if error <= declared:
            return declared
        call, _ = describe(inputs.q, inputs.k, inputs.v, enable_gqa=True, **inputs.arguments())
        if self.backend.exactness(call) is not Exactness.EXACT:
            return declared
        with torch.no_grad():
            usual = distance(_definition(inputs), want)
        rounding = torch.finfo(inputs.q.dtype).eps * max(1.0, float(want.detach().abs().max()))
        return max(declared, 2 * usual + rounding)

    def _gradients(self, case: Case, inputs: Inputs, exact: Inputs, out: Tensor, want: Tensor) -> Outcome | None:
        if not out.requires_grad:
            return Outcome("lost gradient", "", "its output has no grad_fn")
        named, right = leaves(inputs, case.grad), leaves(exact, case.grad)
        tolerance = self.backend.tolerance(case.dtype)
        usual: dict[str, float] = {}
        try:
            found = list(gradients(out, want, named, right))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as raised:
            if classify(raised) is not Meaning.BROKEN:
                raise
            return Outcome("raised", "backward", first_line(raised))
        for name, mine, theirs in found:
            if mine is None:
                return Outcome("lost gradient", name, "there is none")
            error, allowed = distance(mine, theirs), gradient_tolerance(tolerance, theirs)
            if not error <= allowed:
                usual = usual or _usual_gradient_errors(case, self.device, exact)
                allowed = max(allowed, 2 * usual[name])
            if not error <= allowed:
                return Outcome("wrong", f"gradient of {name}", f"it is off by {error:.2g}, tolerance {allowed:.2g}")
        return None

    def _moves(self, inputs: Inputs, out: Tensor, want: Tensor, via: Via) -> Outcome | None:
        """Move one argument after the other: the output must move as the reference moves.

        One that is dropped goes before one that is not followed rightly: where an output is wrong, it tells why.
        """
        found: Outcome | None = None
        for name, moved in _moved(inputs):
            target = reference(self.exact(moved, ""))
            shift = distance(target, want)
            if shift <= MOVED * self.backend.tolerance(inputs.q.dtype):
                continue  # hides or changes nothing here
            answer = self._call(moved, via, grad=False)
            if isinstance(answer, Outcome):
                if answer.failed:
                    return attrs.evolve(answer, detail=f"after {name} was moved: {answer.detail}")
                continue  # the moved call is another call, and may be refused
            problem = _malformed(answer.out, target, moved.q)
            if problem is not None:
                found = found or problem
                continue
            error = distance(answer.out, target)
            allowed = self.allowed(moved, target, error)
            if error <= allowed:
                continue
            if distance(answer.out, out.detach().double()) <= shift / MOVED:
                return Outcome("dropped argument", name, f"{name} was moved, and the output stayed where it was")
            detail = f"its output is off by {error:.2g}, tolerance {allowed:.2g}"
            found = found or Outcome("wrong", f"after {name} was moved", detail)
        return found

    def _changed(self, inputs: Inputs, before: dict[str, Tensor]) -> Outcome | None:
        changed = [name for name, each in inputs.tensors().items() if not torch.equal(_memory(each), before[name])]
        return Outcome("changed inputs", " and ".join(changed), "the kernel wrote into them") if changed else None


def _guard_fault(limit: Guard, call: Call, sizes: Sizes) -> str | None:
    try:
        limit.against(call, sizes)
    except Exception as error:  # noqa: BLE001 - a plugin's function may raise anything
        return f"guard {limit.rule!r} raised {first_line(error)}."
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> Tensor:
    """The call that engines make, under whatever is bound."""
    return attention(q, k, v, site=SITE, enable_gqa=q.shape[1] != k.shape[1], **arguments)


def refusal(error: DeclinedError | RefusedError) -> Outcome:
    """What became of a call that a strict policy refused."""
    if isinstance(error, DeclinedError):
        return Outcome("refused", "declined", str(error))
    first = error.refusals[0]
    if first.rule == "broken":  # what `attention` makes of a kernel that raised
        return Outcome("raised", "", first.actual)
    return Outcome("refused", first.rule, str(first).removeprefix(f"{first.rule}: "))


def _is_here(device: str) -> bool:
    if device == "cpu":
        return True
    module = getattr(torch, device, None)
    return bool(module is not None and module.is_available())


def _memory(tensor: Tensor) -> Tensor:
    """All bytes behind a tensor, those around a view included."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.detach().untyped_storage())


def reference(exact: Inputs) -> Tensor:
    """Attention in float64."""
    structure = {"mask_info": exact.info, "causal": exact.causal, "scale": exact.scale}
    return attention_fp64(exact.q, exact.k, exact.v, mask=exact.mask, **structure)  # type: ignore[arg-type]


def _definition(inputs: Inputs) -> Tensor:
    structure = {"mask_info": inputs.info, "causal": inputs.causal, "scale": inputs.scale}
    return definition(inputs.q, inputs.k, inputs.v, mask=inputs.mask, **structure)  # type: ignore[arg-type]


def _malformed(out: Tensor, want: Tensor, q: Tensor) -> Outcome | None:
    problem = malformed(out, want, q)
    if problem is None:
        return None
    if out.shape == want.shape and out.dtype == q.dtype:
        broken = ~out.detach().isfinite().all(-1).to(want.device)
        if not bool((broken & (want.detach() != 0).any(-1)).any()):
            return Outcome("wrong", "rows that see no key", problem)
    return Outcome("wrong", "", problem)


def leaves(inputs: Inputs, grad: str) -> dict[str, Tensor]:
    """The inputs that need a gradient, by the names that `attention` has for them."""
    named = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "m": inputs.mask}
    found = {letter: each for letter, each in named.items() if letter in grad and each is not None}
    return {"mask" if letter == "m" else letter: each for letter, each in found.items()}


def _usual_gradient_errors(case: Case, device: torch.device, exact: Inputs) -> dict[str, float]:
    """How far attention by its definition, in the same dtype, is off in each gradient."""
    fresh, again = case.inputs(device), reference(exact)
    found = gradients(_definition(fresh), again, leaves(fresh, case.grad), leaves(exact, case.grad))
    return {name: 0.0 if mine is None else distance(mine, theirs) for name, mine, theirs in found}


def _moved(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """The inputs with one argument moved each: its name, and the call."""
    still = attrs.evolve(inputs, q=inputs.q.detach(), k=inputs.k.detach(), v=inputs.v.detach())
    mask, info = None if inputs.mask is None else inputs.mask.detach(), inputs.info
    still = attrs.evolve(still, mask=mask)
    scale = inputs.q.shape[-1] ** -0.5 if inputs.scale is None else inputs.scale
    if inputs.scale is not None:
        yield "scale", attrs.evolve(still, scale=2 * scale + 0.25)
    if inputs.causal:
        yield "causal", attrs.evolve(still, causal=False)
    if info is not None and mask is None:
        if info.window is not None:
            yield "mask_info.window", attrs.evolve(still, info=attrs.evolve(info, window=info.window + 7))
        if info.ahead is not None:
            yield "mask_info.ahead", attrs.evolve(still, info=attrs.evolve(info, ahead=info.ahead + 7))
        if info.causal:
            yield "mask_info.causal", attrs.evolve(still, info=attrs.evolve(info, causal=False))
        if info.keys is not None:
            yield "mask_info.keys", attrs.evolve(still, info=attrs.evolve(info, keys=other_keys(info)))
    if info is None and mask is not None:
        other = ~mask if mask.dtype == torch.bool else mask.flip(-1)
        if all(stride or size < 2 for stride, size in zip(mask.stride(), mask.shape, strict=True)):  # noqa: PLR2004
            mask.copy_(other)  # into the same tensor: whoever remembers it by its identity is found out
            other = mask
        yield "mask", attrs.evolve(still, mask=other)


def _misreadings(exact: Inputs) -> Iterator[tuple[str, Tensor]]:
    """What kernels give that read an argument in another way, with the words for it."""
    info, mask = exact.info, exact.mask
    if info is not None and info.causal:
        top_left = attrs.evolve(exact, info=attrs.evolve(info, causal=False), causal=True, mask=None)
        yield "top-left for bottom-right", reference(top_left)
    if exact.causal:
        yield "bottom-right for top-left", reference(attrs.evolve(exact, info=MaskInfo(causal=True), causal=False))
    if mask is not None and mask.dtype != torch.bool:
        low = (mask <= HUGE / 2) & (mask > -torch.inf)
        if bool(low.any()):
            yield "low numbers for -inf", reference(attrs.evolve(exact, mask=mask.masked_fill(low, -torch.inf)))
    groups = exact.q.shape[1] // max(exact.k.shape[1], 1)
    if groups > 1:
        k, v = exact.k.repeat(1, groups, 1, 1), exact.v.repeat(1, groups, 1, 1)
        yield "key heads tiled, not repeated", reference(attrs.evolve(exact, k=k, v=v))
    if mask is not None and mask.dim() == 3 and mask.shape[0] == exact.q.shape[0]:  # noqa: PLR2004
        yield "rank 3 per row, not per head", reference(attrs.evolve(exact, mask=mask[:, None]))
