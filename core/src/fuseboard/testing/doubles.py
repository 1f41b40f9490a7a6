"""Doubles for tests: backends that are not installed, and backends that lie. Public, for plugins' and engines' tests.

```python
from fuseboard.testing import doubles

mine = doubles.fake_backend("mine", my_kernel, head_dims=fb.HeadDims(only={64}))
with doubles.registered(mine), doubles.capture_run("mine") as run:
    engine(...)
assert run.report()["attention"]["used"] == {"mine": 12}
```
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fuseboard import registry
from fuseboard.backend import BackendInfo, Exactness, Kernel
from fuseboard.constraints import ALL_LENGTHS, Constraints, HeadDims, StructureRule
from fuseboard.context import bind
from fuseboard.hookspecs import hookimpl
from fuseboard.masks import MaskInfo
from fuseboard.policy import Policy
from fuseboard.registry import Entry, Registry
from fuseboard.run import Run
from fuseboard.selftest import attention_fp64, definition
from fuseboard.settings import Settings

__all__ = ["EVERYTHING", "Double", "capture_run", "fake_backend", "liars", "loopback", "registered"]

EVERYTHING = Constraints(
    devices={"cpu", "cuda"},
    dtypes={torch.float64, torch.float32, torch.bfloat16, torch.float16},
    v_head_dims=HeadDims(),
    gqa=True,
    causal=ALL_LENGTHS,
    masks={"bool", "additive"},
    mask_fp32=True,
    mask_grad=True,
    causal_and_mask=True,
    structures=(StructureRule(keys={"none", "right", "left", "any"}, window={False, True}, ahead={False, True}),),
    custom_scale=True,
    negative_scale=True,
    backward=True,
    empty=True,
    any_stride=True,
)
"""Constraints that claim all there is but dropout."""


class Double(SimpleNamespace):
    """A plugin made in memory: its hooks are attributes. An entry point may name one, as it may name a module.

    Attributes:
        name: What it is registered as.
    """

    name: str


def fake_backend(
    name: str,
    kernel: Kernel | None = None,
    *,
    constraints: Constraints | None = None,
    exactness: Exactness = Exactness.EXACT,
    hooks: Mapping[str, Callable[..., Any]] | None = None,
    **limits: Any,
) -> Double:
    """A backend for a test.

    Args:
        name: What a policy calls it.
        kernel: What it calls; default the reference in float64.
        constraints: What it claims; default everything but dropout.
        exactness: What it says of itself.
        hooks: Further hooks by name (`rank`, `probe`, ...), or others in place of these.
        limits: Fields of `Constraints` to claim otherwise than `constraints` does.
    """
    claimed = attrs.evolve(EVERYTHING if constraints is None else constraints, **limits)
    made: dict[str, Callable[..., Any]] = {
        "info": lambda: BackendInfo(f"a double called {name}"),
        "constraints": lambda: claimed,
        "exactness": lambda: exactness,
        "kernel": lambda: kernel or _attend,
        **(hooks or {}),
    }
    return Double(name=name, **{hook: hookimpl(function) for hook, function in made.items()})


@contextlib.contextmanager
def registered(*doubles: Double, settings: Settings | None = None) -> Iterator[Registry]:
    """Make a registry of these backends, and no others, the process's while the block runs."""
    entries = [Entry(double.name, lambda double=double: double, f"double-{double.name}", "1.0") for double in doubles]  # type: ignore[misc]
    with registry.use(Registry(entries, settings or Settings())) as made:
        yield made


@contextlib.contextmanager
def capture_run(policy: Policy | str | Mapping[str, Policy | str] = "fast") -> Iterator[Run]:
    """Bind a policy for the block, and give the Run that records what was used."""
    run = Run()
    with bind(policy, run=run):
        yield run


def _attend(
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
    assert not dropout_p, "no double claims dropout"
    if mask_info is not None and mask_info.keys is not None:
        real = mask_info.keys[:, None, :, None]
        k, v = (each.masked_fill(~real, 0.0) for each in (k, v))  # whatever is there: 0 * NaN is NaN
    return attention_fp64(q, k, v, mask=mask, mask_info=mask_info, causal=causal, scale=scale).to(q.dtype)


loopback = fake_backend("loopback")
"""The reference as a backend: runs the suite, and an engine end to end, where there is no kernel and no GPU."""


# ---- liars: each right but for one fault, which the kit must find, and name


def _lying(change: Callable[[dict[str, Any]], None]) -> Kernel:
    """The reference, given other arguments than it was called with."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        arguments = {"q": q, "k": k, "v": v, **given}
        change(arguments)
        return _attend(**arguments)

    return kernel


def _without_mask(given: dict[str, Any]) -> None:
    given["mask"] = None


def _top_left(given: dict[str, Any]) -> None:
    info = given["mask_info"]
    if info is not None and info.causal:
        given["mask_info"], given["causal"] = attrs.evolve(info, causal=False), True


def _bottom_right(given: dict[str, Any]) -> None:
    if given["causal"]:
        given["mask_info"], given["causal"] = MaskInfo(causal=True), False


def _without_window(given: dict[str, Any]) -> None:
    if given["mask_info"] is not None:
        given["mask_info"] = attrs.evolve(given["mask_info"], window=None)


def _without_ahead(given: dict[str, Any]) -> None:
    if given["mask_info"] is not None:
        given["mask_info"] = attrs.evolve(given["mask_info"], ahead=None)


def _one_further_ahead(given: dict[str, Any]) -> None:
    info = given["mask_info"]
    if info is not None and info.ahead is not None:
        given["mask_info"] = attrs.evolve(info, ahead=info.ahead + 1)


def _without_scale(given: dict[str, Any]) -> None:
    given["scale"] = None


def _tiled(given: dict[str, Any]) -> None:
    groups = given["q"].shape[1] // max(given["k"].shape[1], 1)
    given["k"], given["v"] = (given[name].repeat(1, groups, 1, 1) for name in "kv")


def _scaled_in_place(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    scale = q.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
    q.detach().mul_(scale)
    return _attend(q, k, v, **{**given, "scale": 1.0})


def _nan_on_empty_rows(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    out = _attend(q, k, v, **given)
    return out.masked_fill((out == 0).all(-1, keepdim=True), torch.nan)


def _off(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    return _attend(q, k, v, **given) + 1e-2


def _off_by_blocks(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """A kernel whose last block of keys is padded with zeros, and takes part."""
    if k.shape[2] % 64 and given["mask"] is None and given["mask_info"] is None and not given["causal"]:
        missing = -k.shape[2] % 64
        k, v = (torch.nn.functional.pad(each, (0, 0, 0, missing)) for each in (k, v))
    return _attend(q, k, v, **given)


def _without_gradient(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    return _attend(q, k, v, **given).detach()


def _in_float32(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    return _attend(q.float(), k.float(), v.float(), **given)


def _remembering(*_device: object) -> Kernel:
    """A kernel that keeps its first converted mask for every tensor at the same address."""
    seen: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def kernel(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, **given: Any) -> Tensor:
        if mask is not None and not mask.requires_grad:
            mask = seen.setdefault((mask.data_ptr(), tuple(mask.shape)), mask.clone())
        return _attend(q, k, v, mask=mask, **given)

    return kernel


def _failing_later(*_device: object) -> Kernel:
    calls = itertools.count(1)

    def kernel(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        if next(calls) > 1:
            msg = "the workspace of the first call is gone"
            raise RuntimeError(msg)
        return _attend(q, k, v, **given)

    return kernel


def _low_is_hidden(given: dict[str, Any]) -> None:
    mask = given["mask"]
    if mask is not None and mask.dtype != torch.bool:
        given["mask"] = mask.masked_fill(mask < -1e9, -torch.inf)  # noqa: PLR2004 - a threshold as kernels have one


def _without_strides(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """A kernel that is handed a pointer, and takes it that rows lie one behind the other."""
    if k.shape[0] > 1 and k.stride(0) == 0:
        k = k.clone()
        k[1:] = 0
    return _attend(q, k, v, **given)


def _remembering_outputs(*_device: object) -> Kernel:
    """A kernel whose cache asks for the shapes alone."""
    seen: dict[tuple[object, ...], Tensor] = {}

    def kernel(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        out = _attend(q, k, v, **given)
        if out.requires_grad:
            return out
        said = [value for value in given.values() if not isinstance(value, (Tensor, MaskInfo))]
        info, mask = given["mask_info"], given["mask"]
        key = (
            q.shape,
            k.shape,
            q.dtype,
            k.stride(),
            *said,
            info and (info.causal, info.window, info.padding, info.ahead),
        )
        return seen.setdefault((*key, None if mask is None else mask.shape), out).clone()

    return kernel


def _remembering_keys(*_device: object) -> Kernel:
    """A kernel that counts the real keys once for every tensor."""
    seen = WeakIdKeyDictionary()

    def kernel(q: Tensor, k: Tensor, v: Tensor, *, mask_info: MaskInfo | None, **given: Any) -> Tensor:
        if mask_info is not None and mask_info.keys is not None:
            keys = mask_info.keys
            kept = seen.setdefault(keys, keys.clone())  # type: ignore[no-untyped-call]
            mask_info = attrs.evolve(mask_info, keys=kept)
        return _attend(q, k, v, mask_info=mask_info, **given)

    return kernel


def _asking_for_lengths(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """A kernel that fetches the longest row's length, and so waits for the device."""
    info = given["mask_info"]
    if info is not None and info.padding == "right":
        longest = int(info.lengths().max())
        k, v = k[:, :, :longest], v[:, :, :longest]
        dense = info.dense(q.shape[2], info.keys.shape[1], q.device)[..., :longest]
        given |= {"mask": dense, "mask_info": None}
    return _attend(q, k, v, **given)


def _reading_padding(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """A kernel that gives padded keys a weight of zero, and multiplies their values with it."""
    given.pop("dropout_p")
    return attention_fp64(q, k, v, **given).to(q.dtype)


def _recomputed() -> bool:
    """Whether a backward is running: then it is gradient checkpointing that calls."""
    return bool(torch._C._current_graph_task_id() >= 0)


def _failing_when_recomputed(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    if _recomputed():
        msg = "the stream of the forward is gone"
        raise RuntimeError(msg)
    return _attend(q, k, v, **given)


def _otherwise_when_recomputed(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """A kernel that takes another path the second time, and so saves other tensors for its backward."""
    if _recomputed():
        given.pop("dropout_p")
        return definition(q, k, v, **given)
    return _attend(q, k, v, **given)


def _keeping_ones(*_device: object) -> Kernel:
    """A kernel that keeps a tensor made in inference mode, which no backward can use."""
    kept: dict[torch.Size, Tensor] = {}

    def kernel(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        return _attend(q * kept.setdefault(q.shape, torch.ones_like(q)), k, v, **given)

    return kernel


def _for_leaves_only(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """A kernel that takes a tensor somebody has computed for one without a gradient."""
    return _attend(*(each if each.is_leaf else each.detach() for each in (q, k, v)), **given)


def _behind_no_compiler(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    if "Compiled" in type(q.grad_fn).__name__:
        msg = "this kernel writes its own backward, and found another's"
        raise RuntimeError(msg)
    return _attend(q, k, v, **given)


def _on_the_current_device(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """A kernel whose workspace is on whichever device is current."""
    return _attend(q * torch.ones(1, dtype=q.dtype, device=q.device.type), k, v, **given)


def _drifting(*_device: object) -> Kernel:
    """A kernel whose workspace is not zeroed between calls."""
    workspace: dict[object, float] = {}

    def kernel(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        before = workspace.get(q.shape, 0.0)
        workspace[q.shape] = before + 0.05
        return _attend(q, k, v, **given) + before

    return kernel


def _liar(name: str, kernel: Kernel | None = None, **more: Any) -> Double:
    # Two dtypes tell as much as four, in half the time.
    return fake_backend(name, kernel, dtypes={torch.float32, torch.float16}, **more)


liars = SimpleNamespace(
    drops_the_mask=_liar("drops-the-mask", _lying(_without_mask)),
    top_left_for_bottom_right=_liar("top-left-for-bottom-right", _lying(_top_left)),
    bottom_right_for_top_left=_liar("bottom-right-for-top-left", _lying(_bottom_right)),
    ignores_the_window=_liar("ignores-the-window", _lying(_without_window)),
    ignores_the_bound_ahead=_liar("ignores-the-bound-ahead", _lying(_without_ahead)),
    sees_one_key_further_ahead=_liar("sees-one-key-further-ahead", _lying(_one_further_ahead)),
    ignores_the_scale=_liar("ignores-the-scale", _lying(_without_scale)),
    tiles_key_heads=_liar("tiles-key-heads", _lying(_tiled)),
    writes_into_q=_liar("writes-into-q", _scaled_in_place),
    nan_on_empty_rows=_liar("nan-on-empty-rows", _nan_on_empty_rows),
    loses_the_gradient=_liar("loses-the-gradient", _without_gradient),
    off_by_a_hundredth=_liar("off-by-a-hundredth", _off),
    fails_on_the_second_call=_liar("fails-on-the-second-call", hooks={"kernel": _failing_later}),
    wrong_beside_blocks=_liar("wrong-beside-blocks", _off_by_blocks),
    returns_float32=_liar("returns-float32", _in_float32),
    remembers_masks=_liar("remembers-masks", hooks={"kernel": _remembering}),
    takes_low_numbers_for_hidden=_liar("takes-low-numbers-for-hidden", _lying(_low_is_hidden)),
    ignores_strides=_liar("ignores-strides", _without_strides),
    remembers_outputs=_liar("remembers-outputs", hooks={"kernel": _remembering_outputs}),
    remembers_keys=_liar("remembers-keys", hooks={"kernel": _remembering_keys}),
    asks_for_lengths=_liar("asks-for-lengths", _asking_for_lengths),
    reads_padding=_liar("reads-padding", _reading_padding),
    fails_when_recomputed=_liar("fails-when-recomputed", _failing_when_recomputed),
    saves_otherwise_when_recomputed=_liar("saves-otherwise-when-recomputed", _otherwise_when_recomputed),
    keeps_inference_tensors=_liar("keeps-inference-tensors", hooks={"kernel": _keeping_ones}),
    differentiates_leaves_only=_liar("differentiates-leaves-only", _for_leaves_only),
    fails_behind_a_compiler=_liar("fails-behind-a-compiler", _behind_no_compiler),
    allocates_on_the_current_device=_liar("allocates-on-the-current-device", _on_the_current_device),
    drifts=_liar("drifts", hooks={"kernel": _drifting}),
    refuses_everything=_liar("refuses-everything", queries=()),
)
"""One backend a fault; an entry point names one as `fuseboard.testing.doubles:liars.drops_the_mask`."""
