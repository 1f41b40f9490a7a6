"""The same call, made otherwise: captured, recomputed, compiled, repeated, under autocast, its inputs overwritten.

A case says what is called; a check here says how. Each makes one of the calls of `cases.few` through `attention`, under
the strict policy of the backend's name, and holds its numbers against those of the same call made plainly, which the
case by itself holds against float64. What the backend refuses is refused here too.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fuseboard.call import describe
from fuseboard.context import bind, bind_process
from fuseboard.errors import DeclinedError, RefusedError
from fuseboard.failure import Meaning, classify
from fuseboard.registry import first_line
from fuseboard.run import Run
from fuseboard.selftest import distance, gradient_tolerance
from fuseboard.testing.cases import Case, Inputs, few
from fuseboard.testing.judge import Kit, Outcome, attend, leaves, reference, refusal
from fuseboard.testing.process import held

__all__ = ["CHECKS", "UNASKED", "Check", "Graph", "captured", "checks", "judge", "recomputing"]


@attrs.frozen
class Check:
    """One way to make a call.

    Attributes:
        name: In test names and in the file of known failures.
        label: In the matrix.
        run: Makes a call of that case in this way, and says what became of it.
        wants: Whether a case is worth it.
        lacks: Why it cannot be asked of this backend here; None when it can.
    """

    name: str
    label: str
    run: Callable[[Kit, Case], Outcome]
    wants: Callable[[Case], bool] = attrs.field(default=lambda _case: True)
    lacks: Callable[[Kit], str | None] = attrs.field(default=lambda _kit: None)

    def cases(self, kit: Kit) -> list[Case]:
        """Its cases for a backend."""
        return [case for case in few(kit.backend.constraints, kit.device) if self.wants(case)]


def judge(kit: Kit, check: Check, case: Case) -> Outcome:
    """Make a case's call in that way and say what became of it."""
    kit.verdict()
    if kit.lost:
        return Outcome("raised", "device lost", f"at case {kit.lost}")
    with kit.unmarked():
        try:
            return check.run(kit, case)
        except (DeclinedError, RefusedError) as error:
            found = refusal(error)
            return attrs.evolve(found, about=check.label) if found.failed else found
        except Exception as error:  # one failure must not end the run
            meaning = classify(error)
            if meaning is Meaning.OUT_OF_MEMORY:
                raise
            if meaning is Meaning.STICKY:
                kit.lost = f"{check.name}:{case}"
            return Outcome("raised", check.label, first_line(error))


# ---- results


@attrs.frozen(eq=False)
class _Result:
    """An output and gradients, by name."""

    tensors: dict[str, Tensor]

    def copy(self) -> _Result:
        return _Result({name: each.detach().clone() for name, each in self.tensors.items()})


def _call(kit: Kit, inputs: Inputs, grad: str) -> Tensor:
    with bind(kit.policy), torch.set_grad_enabled(bool(grad)):
        return attend(inputs.q, inputs.k, inputs.v, inputs.arguments())


def _plain(kit: Kit, inputs: Inputs, grad: str) -> _Result:
    return _with_gradients(_call(kit, inputs, grad), inputs, grad)


def _with_gradients(out: Tensor, inputs: Inputs, grad: str, seed: Tensor | None = None) -> _Result:
    """The output and the gradients for one seed."""
    if not grad:
        return _Result({"output": out})
    if not out.requires_grad:
        msg = "it lost the gradient: its output has no grad_fn"
        raise RuntimeError(msg)
    named = leaves(inputs, grad)
    seed = _seed(out) if seed is None else seed
    found = torch.autograd.grad(out, list(named.values()), seed)
    return _Result({"output": out, **{f"gradient of {name}": each for name, each in zip(named, found, strict=True)}})


TILE = 128


def _longer(case: Case, by: int) -> Case:
    """The case at lengths that are odd too, or whole tiles too."""
    by = TILE if case.k_length % TILE == 0 else by
    return attrs.evolve(case, q_length=case.q_length + by, k_length=case.k_length + by)


def _seed(out: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(out.shape, generator=generator).to(out.device, out.dtype)


def _difference(kit: Kit, dtype: torch.dtype, got: _Result, want: _Result, *, bits: bool = False) -> str | None:
    """What is another number than it should be; None for nothing. With `bits` every bit of the output counts.

    Not of gradients: a backward that adds up by atomics may agree with itself twice and not the third time.
    """
    tolerance = kit.backend.tolerance(dtype)
    for name, theirs in want.tensors.items():
        mine = got.tensors[name]
        if mine.shape != theirs.shape:
            return f"{name} has shape {tuple(mine.shape)}, expected {tuple(theirs.shape)}"
        right = theirs.detach().cpu().double()  # where every machine has float64
        if bits and name == "output" and not torch.equal(mine, theirs):
            return f"{name} is not the same, bit for bit: off by {distance(mine, right):.2g}"
        allowed = gradient_tolerance(tolerance, right)
        if name == "output":
            allowed /= 8  # the same kernel twice; a gradient sums over rows, in an order that may change
        off = distance(mine, right)
        if not off <= allowed:
            return f"{name} is off by {off:.2g}, tolerance {allowed:.2g}"
    return None


def _conclude(label: str, problem: str | None) -> Outcome:
    return Outcome("ok") if problem is None else Outcome("wrong", label, problem)


# ---- repeated


def _repeated(kit: Kit, case: Case) -> Outcome:
    first = _plain(kit, case.inputs(kit.device), case.grad)
    want = first.copy()
    for _ in range(2):
        problem = _difference(kit, case.dtype, _plain(kit, case.inputs(kit.device), case.grad), want)
        if problem is not None:
            return Outcome("wrong", "repeated", f"the same call again: {problem}")
    later = _plain(kit, case.inputs(kit.device, 1), case.grad)  # as the next layer of a model
    for name, kept in first.tensors.items():
        shared = kept.untyped_storage().data_ptr() == later.tensors[name].untyped_storage().data_ptr()
        if shared or not torch.equal(kept, want.tensors[name]):
            return Outcome("wrong", "repeated", f"it returned memory that an earlier {name} still uses")
    return Outcome("ok")


# ---- what all of a process shares


def _leaving(kit: Kit, case: Case) -> Outcome:
    """Torch's numeric switches and, without dropout, its default generators are after a call what they were before."""
    inputs = case.inputs(kit.device)
    wanted = {**kit.switches, "grad mode": bool(case.grad)}
    with bind(kit.policy), torch.set_grad_enabled(bool(case.grad)), held(wanted, kit.device) as changes:
        out, where = attend(inputs.q, inputs.k, inputs.v, inputs.arguments()), "it"
        changed = changes()
        if not changed:
            _with_gradients(out, inputs, case.grad)
            changed, where = changes(), "its backward"
    return _conclude("process state", f"{where} changed {' and '.join(changed)}" if changed else None)


# ---- overwritten


def _overwritten(kit: Kit, case: Case) -> Outcome:
    inputs, other = case.inputs(kit.device), case.inputs(kit.device, 1)
    if not _is_right(kit, case.inputs(kit.device), _plain(kit, inputs, case.grad)):
        return Outcome("refused", UNASKED, "it is wrong before anything is overwritten")
    _overwrite(inputs, other)
    info = inputs.info
    if info is not None:  # engines make one for each step, around a buffer that they keep
        inputs = attrs.evolve(inputs, info=attrs.evolve(info))
    got = _plain(kit, inputs, case.grad)
    # Held against float64: a kernel that remembers would give its memory for the plain call as well.
    right = kit.exact(other, "")
    want, error = reference(right), distance(got.tensors["output"], reference(right))
    allowed = kit.allowed(other, want, error)
    if error <= allowed:
        problem = _difference(kit, case.dtype, got, _plain(kit, other, case.grad))
        return _conclude("overwritten", problem)
    detail = f"its output is off by {error:.2g}, tolerance {allowed:.2g}"
    return _stale(kit, case, got) or Outcome("wrong", "overwritten", detail)


def _is_right(kit: Kit, inputs: Inputs, got: _Result) -> bool:
    """Whether an output is that of these inputs by float64."""
    want = reference(kit.exact(inputs, ""))
    error = distance(got.tensors["output"], want)
    return error <= kit.allowed(inputs, want, error)


def _overwrite(inputs: Inputs, other: Inputs) -> None:
    theirs = other.tensors()
    with torch.no_grad():
        for name, mine in inputs.tensors().items():
            mine.copy_(theirs[name])


def _stale(kit: Kit, case: Case, got: _Result) -> Outcome | None:
    """Whose old values an output still follows; None when that is not what is wrong with it."""
    old, new = case.inputs(kit.device), case.inputs(kit.device, 1)
    names = list(new.tensors())
    for stale in (names, *([name] for name in names)):
        if _is_right(kit, _mixed(old, new, stale), got):
            detail = "it was overwritten in place, and the output has its old values"
            return Outcome("dropped argument", " and ".join(stale), detail)
    return None


def _mixed(old: Inputs, new: Inputs, names: list[str]) -> Inputs:
    changes: dict[str, Any] = {name: getattr(old, name) for name in names if name != "mask_info.keys"}
    if "mask_info.keys" in names:
        changes["info"] = old.info
    return attrs.evolve(new, **changes)


# ---- modes of torch


def _inferred(kit: Kit, case: Case) -> Outcome:
    """In inference mode first, then as training does, with lengths that the kernel has not met before."""
    case = _longer(case, 5)
    inputs = case.inputs(kit.device)
    with torch.inference_mode():
        out = _call(kit, inputs if case.grad else case.inputs(kit.device), "")
        found = _Result({"output": out.clone()})
    with torch.no_grad():
        unrecorded = _call(kit, inputs, "")
    if unrecorded.requires_grad:
        return Outcome("wrong", "no_grad", "its output requires a gradient under torch.no_grad()")
    try:
        want = _plain(kit, inputs, case.grad)
    except RefusedError as error:
        return attrs.evolve(refusal(error), about="after inference mode")
    for name, each in (("in inference mode", found), ("under no_grad", _Result({"output": unrecorded}))):
        problem = _difference(kit, case.dtype, each, _Result({"output": want.tensors["output"]}))
        if problem is not None:
            return Outcome("wrong", "inference mode", f"{name}: {problem}")
    return Outcome("ok")


def _low_dtype(kit: Kit) -> torch.dtype | None:
    claimed = kit.backend.constraints.dtypes
    return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in claimed), None)


def _lacks_autocast(kit: Kit) -> str | None:
    if not torch.amp.is_autocast_available(kit.device.type):
        return f"{kit.device.type} has no autocast"
    return None if _low_dtype(kit) is not None else f"{kit.backend.name} claims neither bfloat16 nor float16"


def _under_autocast(kit: Kit, case: Case) -> Outcome:
    """float32 tensors whose values the low dtype has exactly: the same numbers as in the low dtype."""
    dtype = _low_dtype(kit)
    assert dtype is not None, "asked of backends that have one"
    case = attrs.evolve(case, dtype=dtype)
    low = case.inputs(kit.device)
    want = _plain(kit, low, case.grad)

    def wide(tensor: Tensor, letter: str) -> Tensor:
        return tensor.detach().float().requires_grad_(letter in case.grad)

    mask = low.mask
    mask = mask if mask is None or mask.dtype == torch.bool else wide(mask, "m")
    inputs = attrs.evolve(low, q=wide(low.q, "q"), k=wide(low.k, "k"), v=wide(low.v, "v"), mask=mask)
    with torch.autocast(kit.device.type, dtype=dtype):
        out = _call(kit, inputs, case.grad)
    if out.dtype != dtype:
        return Outcome("wrong", "autocast", f"its output is {out.dtype} under autocast to {dtype}")
    return _conclude("autocast", _difference(kit, dtype, _with_gradients(out, inputs, case.grad), want))


# ---- recomputed


def recomputing(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any], *, reentrant: bool = False) -> Tensor:
    """The call under gradient checkpointing: made now, and again when its gradient is asked for."""
    mask, one = arguments["mask"], torch.ones((), dtype=q.dtype, device=q.device)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        # A recomputation stops at the last tensor that it must save: the product's, so that the call comes to its end.
        return attend(q, k, v, {**arguments, "mask": mask}) * one

    out: Tensor = checkpoint(run, q, k, v, mask, use_reentrant=reentrant)
    return out


def _recomputed(kit: Kit, case: Case) -> Outcome:
    want = _plain(kit, case.inputs(kit.device), case.grad)
    for reentrant in (False, True):
        problem = _recomputed_once(kit, case, want, reentrant=reentrant)
        if problem is not None:
            return attrs.evolve(
                problem, about="recomputed", detail=f"checkpoint(use_reentrant={reentrant}): {problem.detail}"
            )
    return Outcome("ok")


def _recomputed_once(kit: Kit, case: Case, want: _Result, *, reentrant: bool) -> Outcome | None:
    inputs, run = case.inputs(kit.device), Run()
    with bind_process(kit.policy, run=run), torch.enable_grad():
        out = recomputing(inputs.q, inputs.k, inputs.v, inputs.arguments(), reentrant=reentrant)
        try:
            # On another thread, as the backward of CUDA tensors is: what is bound must not be the caller's alone.
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                thread.submit(out.backward, _seed(out)).result()
        except (DeclinedError, RefusedError) as error:
            return attrs.evolve(refusal(error), word="raised")
        except Exception as error:
            if classify(error) is not Meaning.BROKEN:
                raise
            return Outcome("raised", "", first_line(error))
    named = leaves(inputs, case.grad)
    grads = {f"gradient of {name}": each.grad for name, each in named.items() if each.grad is not None}
    if len(grads) < len(named):
        return Outcome("lost gradient", "", f"only {', '.join(grads) or 'none'} came")
    problem = _difference(kit, case.dtype, _Result({"output": out, **grads}), want)
    used = run.report()["attention"]["used"]
    if problem is None and used != {kit.backend.name: 2}:
        problem = f"used {used}, expected {kit.backend.name} for the call and for its recomputation"
    return None if problem is None else Outcome("wrong", "", problem)


# ---- compiled

GROWN = 14
"""By how much the second call of a compiled function is longer than the first."""


def _layer(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Attention between operations that a compiler has something to do with, and that round nothing."""
    return attend(q * 2, k * 0.5, v * 4, arguments) * 0.25


def _compiled(kit: Kit, case: Case) -> Outcome:
    torch._dynamo.reset()
    traced = torch.compile(_layer, backend="aot_eager", dynamic=True)
    for each in (case, _longer(case, GROWN)):
        want = _layered(kit, each, _layer, Run())
        run = Run()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute")  # which it looks at where it breaks a graph
            got = _layered(kit, each, traced, run)
        problem = _difference(kit, case.dtype, got, want)
        if problem is not None:
            return Outcome("wrong", "compiled", f"at {each.q_length}x{each.k_length}: {problem}")
        used = run.report()["attention"]["used"]
        if used != {kit.backend.name: 1}:
            return Outcome("wrong", "compiled", f"used {used}, expected {kit.backend.name} once")
    return Outcome("ok")


def _layered(kit: Kit, case: Case, layer: Callable[..., Tensor], run: Run) -> _Result:
    inputs = case.inputs(kit.device)
    with bind(kit.policy, run=run), torch.set_grad_enabled(bool(case.grad)):
        out = layer(inputs.q, inputs.k, inputs.v, inputs.arguments())
    return _with_gradients(out, inputs, case.grad)


# ---- padding that is no number

UNASKED = "not asked"
"""What a refusal is about that is none of the backend's."""


def _unread(kit: Kit, case: Case) -> Outcome:
    """With the structure in the mask's place only real keys are read: what lies in the padding may be anything."""
    inputs = case.inputs(kit.device)
    assert inputs.info is not None, "asked of structures with keys"
    assert inputs.info.keys is not None, "asked of structures with keys"
    call, _sizes = describe(inputs.q, inputs.k, inputs.v, enable_gqa=True, **inputs.arguments())
    if kit.backend.constraints.form(call) != "structure":
        return Outcome("refused", UNASKED, "it is given the mask written out, and so reads every key")
    want = _plain(kit, inputs, case.grad)
    poisoned = case.inputs(kit.device)
    padding = ~inputs.info.keys[:, None, :, None]
    with torch.no_grad():
        poisoned.k.masked_fill_(padding, torch.nan)
        poisoned.v.masked_fill_(padding, torch.nan)
    return _conclude("padding read", _difference(kit, case.dtype, _plain(kit, poisoned, case.grad), want))


# ---- another device is current


def _lacks_devices(kit: Kit) -> str | None:
    if kit.device.type != "cuda":
        return f"{kit.device.type} has no current device"
    return None if torch.cuda.device_count() > 1 else "needs two CUDA devices"


def _elsewhere(kit: Kit, case: Case) -> Outcome:
    other = next(index for index in range(torch.cuda.device_count()) if index != kit.device.index)
    want = _plain(kit, case.inputs(kit.device), case.grad)
    inputs = case.inputs(kit.device)
    with torch.cuda.device(other):
        got = _plain(kit, inputs, case.grad)
        if torch.cuda.current_device() != other:
            return Outcome("wrong", "another device current", f"it changed the current device, cuda:{other}")
    torch.cuda.synchronize(kit.device)
    return _conclude("another device current", _difference(kit, case.dtype, got, want))


# ---- captured


class Graph(Protocol):
    """What a captured call is kept in."""

    def record(self, make: Callable[[], _Result]) -> _Result:
        """Capture the call, which was made before in the same surroundings."""

    def replay(self) -> None:
        """Make it again, into the same tensors."""

    def aside(self) -> contextlib.AbstractContextManager[object]:
        """The surroundings of the capture, for the calls before it."""


class _CudaGraph:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph = torch.cuda.CUDAGraph()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                yield
            torch.cuda.current_stream().wait_stream(self._stream)
            torch.cuda.synchronize(self._device)

    def record(self, make: Callable[[], _Result]) -> _Result:
        # The block around it puts the current stream back: a capture that fails forgets to.
        outside = torch.cuda.stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), outside, torch.cuda.graph(self._graph, stream=self._stream):
            return make()

    def replay(self) -> None:
        with torch.cuda.device(self._device):
            self._graph.replay()
            torch.cuda.synchronize(self._device)


def _lacks_graphs(kit: Kit) -> str | None:
    return None if kit.device.type == "cuda" else f"{kit.device.type} has no CUDA graphs"


def captured(kit: Kit, case: Case, make_graph: Callable[[torch.device], Graph] = _CudaGraph) -> Outcome:
    """Capture a call on a stream of its own, replay it, overwrite its inputs, and replay it again.

    A backend that cannot be captured refuses: its kernel raises `DeclinedError` while a capture is under way.
    """
    inputs, other = case.inputs(kit.device), case.inputs(kit.device, 1)
    want, again = (_plain(kit, case.inputs(kit.device), case.grad).copy() for _ in range(2))
    bits = _difference(kit, case.dtype, again, want, bits=True) is None  # else it sums by atomics
    after = _plain(kit, other, case.grad).copy()
    graph = make_graph(kit.device)
    with graph.aside():
        seed = _seed(want.tensors["output"])
        for _ in range(2):
            _with_gradients(_call(kit, inputs, case.grad), inputs, case.grad, seed)
    try:
        with kit.unmarked():
            held = graph.record(lambda: _with_gradients(_call(kit, inputs, case.grad), inputs, case.grad, seed))
    except Exception as error:  # noqa: BLE001 - `_why_not` raises what is not the kernel's
        _check_alive(kit, case, want)
        return _why_not(error)
    graph.replay()
    problem = _difference(kit, case.dtype, held, want, bits=bits)
    if problem is not None:
        return Outcome("wrong", "captured", f"replayed: {problem}")
    _overwrite(inputs, other)
    graph.replay()
    problem = _difference(kit, case.dtype, held, after, bits=bits)
    if problem is None:
        return Outcome("ok")
    text = f"replayed after its inputs were overwritten: {problem}"
    return _stale(kit, case, held) or Outcome("wrong", "captured", text)


def _why_not(error: Exception) -> Outcome:
    """What became of a capture that did not end well: the kernel's word, beneath what the end of the capture says."""
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, (DeclinedError, RefusedError)):
            found = refusal(each)
            return attrs.evolve(found, about="captured") if found.failed else found
        each = each.__cause__ or each.__context__
    if classify(error) is not Meaning.BROKEN:
        raise error
    return Outcome("raised", "captured", first_line(error))


def _check_alive(kit: Kit, case: Case, want: _Result) -> None:
    """After a capture that failed, the device must still answer."""
    try:
        problem = _difference(kit, case.dtype, _plain(kit, case.inputs(kit.device), case.grad), want)
        if kit.device.type == "cuda":
            torch.cuda.synchronize(kit.device)
    except Exception as error:  # noqa: BLE001 - raised again, with what it means
        problem = first_line(error)
    if problem is not None:
        kit.lost = f"captured:{case}"
        msg = f"after a capture that failed, the same call: {problem}"
        raise RuntimeError(msg)


# ---- all of them


def _has_keys(case: Case) -> bool:
    return case.structure is not None and case.structure[0] != "none"


def _compiles(case: Case) -> bool:
    """The few that are worth most of a second, each compiled forward and backward; one claims nothing besides."""
    if case.grad:
        return case.grad == "qkv" and case.mask is None and case.kv_heads == case.heads and not _has_keys(case)
    if case.mask is None and case.structure is None and not case.causal:
        return case.layout == "packed" and case.q_length > 1
    return case.mask is not None and case.mask.kind == "bool"


CHECKS = {
    check.name: check
    for check in (
        Check("repeated", "repeated", _repeated),
        Check("process", "process state", _leaving),
        Check("overwritten", "inputs overwritten in place", _overwritten),
        Check("inferred", "inference mode", _inferred),
        Check("autocast", "autocast", _under_autocast, lacks=_lacks_autocast),
        Check("recomputed", "checkpoint", _recomputed, wants=lambda case: bool(case.grad)),
        Check("compiled", "torch.compile", _compiled, wants=_compiles),
        Check("unread", "NaN in the padding", _unread, wants=_has_keys),
        Check("elsewhere", "another device current", _elsewhere, lacks=_lacks_devices),
        Check("captured", "CUDA graph", captured, lacks=_lacks_graphs),
    )
}
"""By name. `captured` comes last, since what a kernel does in a capture may cost the device."""


def checks(kit: Kit) -> list[tuple[Check, Case]]:
    """Every check with each of its cases."""
    return [(check, case) for check in CHECKS.values() for case in check.cases(kit)]
