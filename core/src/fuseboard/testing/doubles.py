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

from fuseboard import registry
from fuseboard.backend import BackendInfo, Exactness, Kernel
from fuseboard.constraints import ALL_LENGTHS, Constraints, HeadDims, StructureRule
from fuseboard.context import bind
from fuseboard.hookspecs import hookimpl
from fuseboard.masks import MaskInfo
from fuseboard.policy import Policy
from fuseboard.registry import Entry, Registry
from fuseboard.run import Run
from fuseboard.selftest import attention_fp64
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
    structures=(StructureRule(keys={"none", "right", "left", "any"}, window={False, True}),),
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


def _liar(name: str, kernel: Kernel | None = None, **more: Any) -> Double:
    # Two dtypes tell as much as four, in half the time.
    return fake_backend(name, kernel, dtypes={torch.float32, torch.float16}, **more)


liars = SimpleNamespace(
    drops_the_mask=_liar("drops-the-mask", _lying(_without_mask)),
    top_left_for_bottom_right=_liar("top-left-for-bottom-right", _lying(_top_left)),
    bottom_right_for_top_left=_liar("bottom-right-for-top-left", _lying(_bottom_right)),
    ignores_the_window=_liar("ignores-the-window", _lying(_without_window)),
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
    refuses_everything=_liar("refuses-everything", queries=()),
)
"""One backend a fault; an entry point names one as `fuseboard.testing.doubles:liars.drops_the_mask`."""
