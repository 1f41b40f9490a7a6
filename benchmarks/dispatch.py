"""What choosing a kernel costs: time added per call over the same kernel called by hand with the same arguments.

One table, made in one process and one run, so that its rows can be compared: fuseboard with nothing bound, fuseboard
with a policy bound, and other libraries' dispatchers, each over what it calls in the end. Tensors are tiny, so that
little but the dispatch is left. Nothing is asserted: times belong to machines.

    python benchmarks/dispatch.py [--quick] [--rounds N] [--json FILE] [--out FILE] [--readme]
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from _report import aligned, arguments, in_one_thread, keep, listed, machine, versions

PACKAGES = ("torch", "fuseboard", "fuseboard-sdpa", "transformers", "diffusers", "comfy-kitchen", "pluggy")
CALLS = 256  # of each side in a round
# The thread's own time, so that other processes are not counted. Too coarse on Windows.
CLOCK = time.perf_counter if sys.platform == "win32" else time.thread_time


@dataclass
class Case:
    """One row: `call` is timed against `hand`, both as source text in the names of `names`.

    Attributes:
        name: What the reader sees.
        call: Goes through a dispatcher.
        hand: Does what it does in the end, with the same arguments.
        under: Entered around both.
        prepare: Called before each is timed; gives names for both.
        calls: How many calls one execution makes.
    """

    name: str
    call: str
    hand: str
    names: dict[str, Any]
    under: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    prepare: Callable[[], dict[str, Any]] = dict
    calls: int = 1
    called: list[float] = field(default_factory=list)
    by_hand: list[float] = field(default_factory=list)

    def measure(self, *, hand_first: bool) -> None:
        """Time both once, in microseconds per call."""
        names = {**self.names, **self.prepare()}
        number = CALLS // self.calls
        sides = [(self.hand, self.by_hand), (self.call, self.called)]
        with self.under():
            for source, times in sides if hand_first else reversed(sides):
                timer = timeit.Timer(source, timer=CLOCK, globals=names)
                times.append(timer.timeit(number) / number / self.calls * 1e6)

    def row(self) -> dict[str, Any]:
        """Its numbers: the difference of the fastest rounds, and the median of the rounds' differences."""
        added = [called - hand for called, hand in zip(self.called, self.by_hand, strict=True)]
        return {
            "name": self.name,
            "call": self.call,
            "by_hand": self.hand,
            "by_hand_us": round(min(self.by_hand), 3),
            "added_min_us": round(min(self.called) - min(self.by_hand), 3),
            "added_median_us": round(statistics.median(added), 3),
        }


def fuseboard_cases() -> Iterator[Case]:
    """Ours: nothing bound, then a policy bound, over a bare kernel and over the plugin's."""
    import torch
    import torch.nn.functional as F  # noqa: N812

    import fuseboard as fb

    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    mask = torch.zeros(1, 1, 4, 4)
    names = {
        "attention": fb.attention,
        "sdpa": F.scaled_dot_product_attention,
        "kernel": torch._scaled_dot_product_flash_attention_for_cpu,
        "SITE": fb.Site("benchmark.dispatch"),
    } | {"q": q, "k": k, "v": v, "mask": mask}

    auto = "fuseboard auto"
    yield Case(auto, "attention(q, k, v, site=SITE)", "sdpa(q, k, v)", names)
    yield Case(f"{auto}, mask", "attention(q, k, v, site=SITE, mask=mask)", "sdpa(q, k, v, attn_mask=mask)", names)
    yield Case(f"{auto}, scale", "attention(q, k, v, site=SITE, scale=0.5)", "sdpa(q, k, v, scale=0.5)", names)
    yield Case(
        f"{auto}, bound with a Run", "attention(q, k, v, site=SITE)", "sdpa(q, k, v)", names,
        under=lambda: fb.bind("auto", run=fb.Run()),
    )  # fmt: skip

    plain, masked = "attention(q, k, v, site=SITE)", "attention(q, k, v, site=SITE, mask=mask)"
    for title, policy, hand_masked in _policies():

        def bound(policy: fb.Policy = policy, *, run: bool = True, inference: bool = False) -> Any:
            return _bound(policy, run=run, inference=inference)

        by_hand = "kernel(q, k, v)[0]"
        yield Case(f"{title}, no Run", plain, by_hand, names, under=lambda bound=bound: bound(run=False))
        yield Case(title, plain, by_hand, names, under=bound)
        yield Case(f"{title}, mask", masked, hand_masked, names, under=bound)
        yield Case(f"{title}, views of (b, s, h, d)", plain, by_hand, {**names, **_views()}, under=bound)
        yield Case(
            f"{title}, inference_mode", plain, by_hand, {**names, **_inference(q, k, v)},
            under=lambda bound=bound: bound(inference=True),
        )  # fmt: skip
        loop = "for k, v in grown:\n    {}"
        for what, prepare in (("every size new", _grown), ("sizes seen before", _Seen())):
            yield Case(
                f"{title}, decode, {what}",
                loop.format("attention(one, k, v, site=SITE)"),
                loop.format("kernel(one, k, v)[0]"),
                {**names, "one": q[:, :, :1].contiguous()},
                under=bound,
                prepare=prepare,
                calls=CALLS,
            )


def _policies() -> Iterator[tuple[str, Any, str]]:
    """A policy over a kernel that is nothing but its binding, and the plugin's policy if the plugin is here."""
    import torch

    import fuseboard as fb
    from fuseboard.registry import Entry, Registry

    kernel = torch._scaled_dot_product_flash_attention_for_cpu

    class Bare:
        @fb.hookimpl
        def info(self) -> fb.BackendInfo:
            return fb.BackendInfo("the binding, nothing around it")

        @fb.hookimpl
        def constraints(self) -> fb.Constraints:
            return fb.Constraints(devices={"cpu"}, dtypes={torch.float32}, masks={"additive"}, backward=True)

        @fb.hookimpl
        def kernel(self) -> Callable[..., torch.Tensor]:
            def call(
                q: Any, k: Any, v: Any, *, mask: Any, mask_info: Any, causal: Any, scale: Any, dropout_p: Any
            ) -> Any:
                return kernel(q, k, v)[0] if mask is None else kernel(q, k, v, attn_mask=mask)[0]

            return call

    registry = Registry([Entry("bare", Bare, "benchmark", "0")])
    yield (
        "fuseboard bound, bare kernel",
        fb.policy_for("bare", strict=True, registry=registry),
        "kernel(q, k, v, attn_mask=mask)[0]",
    )
    with contextlib.suppress(fb.PolicyError):
        policy = fb.policy_for("sdpa-cpu", strict=True)
        yield "fuseboard bound, sdpa-cpu", policy, "kernel(q, k, v, 0.0, False, attn_mask=mask, scale=None)[0]"


@contextlib.contextmanager
def _bound(policy: Any, *, run: bool, inference: bool) -> Iterator[None]:
    import torch

    import fuseboard as fb

    with (
        fb.bind(policy, run=fb.Run() if run else None),
        torch.inference_mode() if inference else contextlib.nullcontext(),
    ):
        yield


def _views() -> dict[str, Any]:
    """What a projection gives: (batch, length, heads, head_dim), seen as (batch, heads, length, head_dim)."""
    import torch

    return {name: torch.randn(1, 4, 2, 8).transpose(1, 2) for name in "qkv"}


def _inference(*tensors: Any) -> dict[str, Any]:
    import torch

    with torch.inference_mode():
        return {name: tensor.clone() for name, tensor in zip("qkv", tensors, strict=True)}


def _grown() -> dict[str, Any]:
    """Keys that grow by one a call, in a cache of a size not used before: every call has new sizes and strides."""
    import torch

    _grown.used += 1  # type: ignore[attr-defined]
    cache = torch.randn(2, 1, 2, CALLS + _grown.used, 8)  # type: ignore[attr-defined]
    return {"grown": [(cache[0, :, :, :n], cache[1, :, :, :n]) for n in range(1, CALLS + 1)]}


_grown.used = 0  # type: ignore[attr-defined]


class _Seen:
    """The same growing keys every time, as in the next sequence that a server decodes."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {}

    def __call__(self) -> dict[str, Any]:
        self._names = self._names or _grown()
        return self._names


def torch_cases() -> Iterator[Case]:
    """Torch's own context for choosing a kernel, and the two ways to wrap one that a reader would think of."""
    import torch
    import torch.nn.functional as F  # noqa: N812
    from torch.nn.attention import SDPBackend, sdpa_kernel

    sdpa = F.scaled_dot_product_attention

    def plain(
        q: Any, k: Any, v: Any, *, site: Any, mask: Any = None, causal: bool = False, scale: Any = None,
        enable_gqa: bool = False, dropout_p: float = 0.0, mask_info: Any = None,
    ) -> Any:  # fmt: skip
        return sdpa(q, k, v)

    @torch.library.custom_op(
        "fuseboard_benchmark::sdpa", mutates_args=(), schema="(Tensor q, Tensor k, Tensor v) -> Tensor"
    )
    def op(q: Any, k: Any, v: Any) -> Any:
        return sdpa(q, k, v)

    names: dict[str, Any] = {name: torch.randn(1, 2, 4, 8) for name in "qkv"}
    names |= {"sdpa": sdpa, "plain": plain, "op": op}
    names["sdpa_kernel"] = sdpa_kernel  # fuseboard: allow(its price is measured)
    names["FLASH"] = SDPBackend.FLASH_ATTENTION
    hand = "sdpa(q, k, v)"
    yield Case("a Python function of fuseboard's signature, no more", "plain(q, k, v, site=None)", hand, names)
    yield Case("torch sdpa_kernel(...) around the call", f"with sdpa_kernel(FLASH):\n    {hand}", hand, names)
    yield Case("torch.library.custom_op around the call", "op(q, k, v)", hand, names)


def transformers_cases() -> Iterator[Case]:
    """The attention interface as a model of today calls it: looked up by name, then called with the module."""
    import torch
    import torch.nn.functional as F  # noqa: N812
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 1, False  # type: ignore[assignment]
    names: dict[str, Any] = {name: torch.randn(1, 2, 4, 8) for name in "qkv"}
    names |= {"mask": torch.zeros(1, 1, 4, 4), "module": module, "scale": 8**-0.5, "none": None}
    names |= {"interface": ALL_ATTENTION_FUNCTIONS.get_interface, "sdpa": F.scaled_dot_product_attention}
    call = 'interface("sdpa", None)(module, q, k, v, {}, dropout=0.0, scaling=scale)[0]'
    hand = "sdpa(q, k, v, attn_mask={}, dropout_p=0.0, scale=scale, is_causal=False)"
    # It also lays the output out as (batch, length, heads, head_dim): the model's work rather than the choice's.
    laid_out = f"{hand}.transpose(1, 2).contiguous()"
    yield Case("transformers attention interface", call.format("none"), laid_out.format("none"), names)
    yield Case("transformers attention interface, mask", call.format("mask"), laid_out.format("mask"), names)
    yield Case("transformers, its change of layout counted", call.format("none"), hand.format("none"), names)


def diffusers_cases() -> Iterator[Case]:
    """`dispatch_attention_fn` with its native backend, which takes (batch, length, heads, head_dim)."""
    import torch
    import torch.nn.functional as F  # noqa: N812
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry, dispatch_attention_fn

    @contextlib.contextmanager
    def checks(on: bool) -> Iterator[None]:
        before = _AttentionBackendRegistry._checks_enabled
        _AttentionBackendRegistry._checks_enabled = on  # fuseboard: allow(what DIFFUSERS_ATTN_CHECKS sets)
        try:
            yield
        finally:
            _AttentionBackendRegistry._checks_enabled = before  # fuseboard: allow(puts it back)

    names: dict[str, Any] = {name: torch.randn(1, 4, 2, 8) for name in "qkv"}
    names |= {f"{name}_view": names[name].permute(0, 2, 1, 3) for name in "qkv"}
    names |= {
        "mask": torch.zeros(1, 1, 4, 4),
        "dispatch": dispatch_attention_fn,
        "sdpa": F.scaled_dot_product_attention,
    }
    rest = "attn_mask={}, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False"
    turn = ".permute(0, 2, 1, 3)"
    turned = f"sdpa(query=q{turn}, key=k{turn}, value=v{turn}, {rest}){turn}"
    hand = f"sdpa(query=q_view, key=k_view, value=v_view, {rest})"
    off, on = (lambda: checks(on=False)), (lambda: checks(on=True))
    call, name = "dispatch(q, k, v)", "diffusers dispatch_attention_fn"
    yield Case(f"{name}, checks off", call, turned.format(None), names, under=off)
    yield Case(f"{name}, checks off, mask", "dispatch(q, k, v, mask)", turned.format("mask"), names, under=off)
    yield Case(f"{name}, checks on", call, turned.format(None), names, under=on)
    yield Case("diffusers, its change of layout counted", call, hand.format(None), names, under=off)


def comfy_cases() -> Iterator[Case]:
    """comfy-kitchen's `adaln`, a plain operator of its registry, over its eager function, which is chosen on a CPU."""
    import comfy_kitchen
    import torch
    from comfy_kitchen.backends import eager

    names: dict[str, Any] = {"x": torch.randn(1, 4, 8), "scale": torch.randn(8), "shift": torch.randn(8)}
    names |= {"adaln": comfy_kitchen.adaln, "choose": comfy_kitchen.registry.get_implementation, "eager": eager.adaln}
    given = {key: names[key] for key in ("x", "scale", "shift")} | {"eps": 1e-6}
    names["given"] = given
    yield Case("comfy-kitchen adaln, its public function", "adaln(x, scale, shift)", "eager(**given)", names)
    yield Case(
        "comfy-kitchen adaln, its registry alone", 'choose("adaln", kwargs=given)(**given)', "eager(**given)", names
    )


def pluggy_cases() -> Iterator[Case]:
    """A pluggy hook call per attention call: what fuseboard would pay if it did not resolve hooks beforehand."""
    import pluggy
    import torch
    import torch.nn.functional as F  # noqa: N812

    class Spec:
        @pluggy.HookspecMarker("benchmark")(firstresult=True)
        def attend(self, q: Any, k: Any, v: Any) -> Any: ...

    class Plugin:
        @pluggy.HookimplMarker("benchmark")
        def attend(self, q: Any, k: Any, v: Any) -> Any:
            return F.scaled_dot_product_attention(q, k, v)

    manager = pluggy.PluginManager("benchmark")
    manager.add_hookspecs(Spec)
    manager.register(Plugin())
    names: dict[str, Any] = {name: torch.randn(1, 2, 4, 8) for name in "qkv"}
    names |= {"attend": manager.hook.attend, "sdpa": F.scaled_dot_product_attention}
    yield Case("a pluggy hook call", "attend(q=q, k=k, v=v)", "sdpa(q, k, v)", names)


PEERS = {
    "torch": torch_cases,
    "transformers": transformers_cases,
    "diffusers": diffusers_cases,
    "comfy-kitchen": comfy_cases,
    "pluggy": pluggy_cases,
}
OURS = ("fuseboard auto", "fuseboard bound, bare kernel", "fuseboard bound, sdpa-cpu")
THEIRS = (
    "transformers attention interface",
    "diffusers dispatch_attention_fn, checks off",
    "diffusers dispatch_attention_fn, checks on",
    "torch sdpa_kernel(...) around the call",
    "comfy-kitchen adaln, its public function",
)


def collect() -> tuple[list[Case], dict[str, str]]:
    """Every row that can be measured here, and why the others cannot."""
    cases, missing = list(fuseboard_cases()), {}
    if not any(case.name == OURS[2] for case in cases):
        missing[OURS[2]] = "not installed"
    for name, make in PEERS.items():
        if versions(name)[name] == "not installed":
            missing[name] = "not installed"
            continue
        try:
            cases += list(make())
        except Exception as error:  # noqa: BLE001 - another version of a peer may have moved what is used here
            missing[name] = f"not measured ({type(error).__name__})"
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    return cases, missing


def measure(cases: list[Case], rounds: int) -> None:
    """Time all cases in turn, over and over, so that a slow moment of the machine falls on all alike."""
    for turn in range(-1, rounds):
        for case in cases:
            case.measure(hand_first=turn % 2 == 0)
            if turn < 0:  # the first round warms up
                case.called.clear()
                case.by_hand.clear()
        if sys.stderr.isatty():
            print(f"round {turn + 1} of {rounds}", end="\r", file=sys.stderr, flush=True)


def ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """How many times as much as each of ours a peer adds, by the fastest rounds."""
    added = {row["name"]: row["added_min_us"] for row in rows}
    return {
        peer: {name: round(added[peer] / added[name], 1) for name in OURS if added.get(name, 0) > 0}
        for peer in THEIRS
        if peer in added
    }


def render(result: dict[str, Any]) -> str:
    """The tables as text."""
    lines = [
        (row["name"], f"{row['by_hand_us']:.2f}", f"{row['added_min_us']:.2f}", f"{row['added_median_us']:.2f}")
        for row in result["rows"]
    ]
    lines += [(name, "", "", reason) for name, reason in result["missing"].items()]
    table = aligned(("microseconds per call", "by hand", "added, min", "added, median"), lines)
    compared = [
        (peer, *(f"{times[name]:.1f}x" if name in times else "-" for name in OURS))
        for peer, times in result["ratios"].items()
    ]
    shown = listed(result["versions"])
    facts = f"{result['machine']['cpu']}, {result['machine']['system']}, 1 thread; {shown}; {result['rounds']} rounds."
    return f"{table}\n\n{aligned(('added, as a multiple of', *OURS), compared)}\n\n{facts}"


def main() -> int:
    parser = arguments(
        __doc__,
        rounds=200,
        each="how often every row is timed",
        quick="five short rounds: shows that it runs, not what it costs",
        readme=True,
    )
    options = parser.parse_args()
    status = in_one_thread()
    if status is not None:
        return status
    rounds = 5 if options.quick else options.rounds

    cases, missing = collect()
    measure(cases, rounds)
    rows = [case.row() for case in cases]
    result = {
        "rounds": rounds, "calls_per_round": CALLS, "versions": versions(*PACKAGES), "machine": machine(),
        "rows": rows, "missing": missing, "ratios": ratios(rows),
    }  # fmt: skip
    text = render(result)
    print(text)
    keep(options, "dispatch", result, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
