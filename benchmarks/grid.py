"""`fast` against each backend alone on one GPU: is the order it tries them in the right one?

    python benchmarks/grid.py [--rounds 15] [--backends sdpa-flash,flash,...] [--out benchmarks/results/grid]

One run, one table. For every shape each installed backend is timed under its own strict policy, torch's default
attention by the site's reference, and `fast` as an operator would use it; all through `fuseboard.attention`, in rounds
that visit every variant once, so that drift hits all alike. A time is the median over rounds of (time of N calls) / N
by device events. The ratio that matters is `fast` over the best single backend; where both run the same kernel it shows
the noise. Behind each time stands the place that the backend's own rank gives it among those that can answer.
"""

from __future__ import annotations

import platform
import re
import statistics
import time
from collections.abc import Callable

import attrs
import torch
from _report import arguments, keep, listed
from torch import Tensor

import fuseboard as fb

SITE = fb.Site("benchmark.grid")
SEEN = 0.8  # of the keys, by a random mask
STEADY_CALLS, STEADY_SECONDS = 200, 4.0
MATH_ELEMENTS = 2**28
"""The math kernel is timed only where its scores have at most this many elements."""


@attrs.frozen
class Shape:
    """One attention call of the grid."""

    kind: str
    batch: int
    heads: int
    kv_heads: int
    q_length: int
    k_length: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    mask: str = "none"
    backward: bool = False

    def __str__(self) -> str:
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        flags = [str(self.dtype).removeprefix("torch.")] if self.dtype != torch.bfloat16 else []
        flags += ["causal"] if self.causal else []
        flags += [self.mask] if self.mask != "none" else []
        sizes = f"{self.batch},{heads},{self.q_length},{self.k_length},{self.head_dim}"
        return " ".join([self.kind, sizes, *flags])


GRID = (
    Shape("prefill", 2, 24, 24, 4096, 4096, 128),
    Shape("prefill", 4, 16, 16, 2048, 2048, 128, causal=True),
    Shape("prefill", 1, 32, 32, 8192, 8192, 64, causal=True),
    Shape("prefill", 1, 16, 16, 1024, 1024, 64),
    Shape("prefill", 8, 16, 16, 512, 512, 64, dtype=torch.float16),
    Shape("prefill", 2, 16, 16, 2048, 2048, 96),
    Shape("prefill", 2, 16, 16, 2048, 2048, 192),
    Shape("prefill", 2, 16, 16, 2048, 2048, 256, causal=True),
    Shape("prefill", 4, 20, 20, 1500, 1500, 80),
    Shape("prefill", 2, 16, 16, 1024, 1024, 64, dtype=torch.float32),
    Shape("gqa", 2, 32, 8, 2048, 2048, 128, causal=True),
    Shape("gqa", 4, 32, 4, 1024, 1024, 64, causal=True),
    Shape("small", 1, 20, 20, 300, 300, 80),
    Shape("small", 2, 8, 8, 128, 128, 64),
    Shape("cross", 2, 8, 8, 4096, 77, 64),
    Shape("cross", 2, 16, 16, 1024, 300, 128),
    Shape("decode", 8, 32, 32, 1, 4096, 128),
    Shape("decode", 1, 32, 8, 1, 8192, 128),
    Shape("decode", 32, 32, 8, 1, 1024, 128),
    Shape("decode", 1, 16, 16, 1, 256, 64),
    Shape("decode", 8, 16, 2, 1, 4096, 256),
    Shape("mask", 8, 16, 16, 1024, 1024, 64, mask="bool keys"),
    Shape("mask", 2, 16, 16, 2048, 2048, 128, mask="bool full"),
    Shape("mask", 2, 16, 16, 1024, 1024, 128, mask="additive"),
    Shape("mask", 8, 32, 8, 1, 2048, 128, mask="bool keys"),
    Shape("structure", 8, 16, 16, 2048, 2048, 64, mask="right padding"),
    Shape("structure", 8, 16, 16, 2048, 2048, 128, mask="left padding causal"),
    Shape("structure", 1, 16, 16, 8192, 8192, 128, mask="window 512"),
    Shape("structure", 1, 32, 8, 256, 4096, 128, mask="bottom-right causal"),
    Shape("structure", 16, 32, 8, 1, 4096, 128, mask="left padding causal"),
    Shape("structure", 8, 32, 8, 512, 2048, 128, mask="right padding"),
    Shape("structure", 8, 16, 16, 128, 128, 64, mask="left padding causal"),
    Shape("structure", 4, 32, 8, 2048, 2048, 128, mask="window 256"),
    Shape("training", 4, 16, 16, 2048, 2048, 128, causal=True, backward=True),
    Shape("training", 2, 32, 8, 2048, 2048, 128, causal=True, backward=True),
    Shape("training", 4, 16, 16, 1024, 1024, 80, backward=True),
    Shape("training", 8, 16, 16, 1024, 1024, 64, mask="right padding", backward=True),
    Shape("training", 1, 16, 16, 4096, 4096, 128, mask="window 512", backward=True),
    Shape("training", 2, 16, 16, 1024, 1024, 64, mask="additive", backward=True),
)


def inputs(shape: Shape) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, object]]:
    """Tensors for a shape, and the keyword arguments of `attention`."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int, length: int) -> Tensor:
        size = (shape.batch, heads, length, shape.head_dim)
        return torch.randn(size, device="cuda", dtype=shape.dtype, generator=generator).requires_grad_(shape.backward)

    qkv = draw(shape.heads, shape.q_length), draw(shape.kv_heads, shape.k_length), draw(shape.kv_heads, shape.k_length)
    given: dict[str, object] = {"causal": shape.causal, "enable_gqa": shape.heads != shape.kv_heads}
    real = torch.linspace(shape.k_length // 4, shape.k_length * 3 // 4, shape.batch, device="cuda").long()[
        :, None
    ]  # half real
    place = torch.arange(shape.k_length, device="cuda")
    n_q, n_k = shape.q_length, shape.k_length
    if shape.mask == "bool keys":
        given["mask"] = (place < real)[:, None, None, :]
    elif shape.mask == "bool full":
        given["mask"] = torch.rand(shape.batch, 1, n_q, n_k, device="cuda", generator=generator) < SEEN
    elif shape.mask == "additive":
        given["mask"] = torch.randn(1, shape.heads, n_q, n_k, device="cuda", dtype=shape.dtype, generator=generator)
    elif shape.mask == "right padding":
        given.update(fb.mask_for(n_q, n_k, keys=place < real, padding="right", padded=True).arguments())
    elif shape.mask == "left padding causal":
        given.update(
            fb.mask_for(n_q, n_k, keys=place >= n_k - real, padding="left", padded=True, causal=True).arguments()
        )
    elif shape.mask.startswith("window"):
        given.update(fb.mask_for(n_q, n_k, causal=True, window=int(shape.mask.split()[1]), device="cuda").arguments())
    elif shape.mask == "bottom-right causal":
        given.update(fb.mask_for(n_q, n_k, causal=True, device="cuda").arguments())
    return qkv, given


def timed(call: Callable[[], None], count: int) -> float:
    """Microseconds a call, over `count` calls."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / count


def settle(call: Callable[[], None], waiting: Callable[[], bool]) -> None:
    """Reach the steady state: a backend that prepares for each size asks to be taken only after some calls."""
    start = time.perf_counter()
    while waiting() and time.perf_counter() - start < STEADY_SECONDS:
        for _ in range(STEADY_CALLS):
            call()
        torch.cuda.synchronize()


def waits(qkv: tuple[Tensor, Tensor, Tensor], given: dict[str, object]) -> bool:
    """Whether under `fast` somebody who would come first asks for more calls of these sizes."""
    found = fb.explain(SITE, *qkv, policy="fast", **given)
    able = [each for each in found.candidates if not each.refusals]
    return bool(able) and able[0].later is not None


def installed() -> list[str]:
    """Every backend that can run on this device."""
    q = torch.zeros(1, 1, 128, 64, device="cuda", dtype=torch.bfloat16)
    able = []
    for each in fb.explain(SITE, q, q, q, policy="fast").candidates:
        why = [str(refusal) for refusal in each.refusals]
        print(f"{each.name}: {'; '.join(why) or 'can run'}")
        able += [] if why else [each.name]
    return able


def measure(shape: Shape, backends: list[str], rounds: int) -> dict[str, object]:
    """Time every variant on one shape."""
    (q, k, v), given = inputs(shape)
    grad = torch.randn_like(q) if shape.backward else None

    def variant(policy: fb.Policy) -> Callable[[], None]:
        bound = fb.bind(policy)

        def call() -> None:
            with bound:
                out = fb.attention(q, k, v, site=SITE, **given)
            if grad is not None:
                torch.autograd.grad(out, (q, k, v), grad)

        return call

    few = shape.batch * shape.heads * shape.q_length * shape.k_length <= MATH_ELEMENTS
    names = ["fast", "reference", *(each for each in backends if few or each != "sdpa-math")]
    calls, refused = {}, {}
    for name in names:
        policy = fb.policy_for("auto") if name == "reference" else fb.policy_for(name, name != "fast")
        try:
            call = variant(policy)
            for _ in range(3):
                call()
            calls[name] = call
        except fb.RefusedError as error:
            refused[name] = "; ".join(str(each) for each in error.refusals if each.backend == name)
    settle(calls["fast"], lambda: waits((q, k, v), given))
    run = fb.Run()
    with fb.bind("fast", run=run):
        fb.attention(q, k, v, site=SITE, **given)
    ranks = {each.name: each.rank for each in fb.explain(SITE, q, k, v, policy="fast", **given).candidates}
    once = {name: min(timed(call, 2) for _ in range(3)) for name, call in calls.items()}
    counts = {name: max(3, min(200, int(3000 / max(time, 1.0)))) for name, time in once.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds):
        order = list(calls) if index % 2 == 0 else list(calls)[::-1]
        for name in order:
            times[name].append(timed(calls[name], counts[name]))
    medians = {name: statistics.median(each) for name, each in times.items()}
    single = {name: time for name, time in medians.items() if name in backends}
    best = min(single, key=lambda name: single[name])
    ratio = statistics.median([mine / other for mine, other in zip(times["fast"], times[best], strict=True)])
    return {
        "shape": str(shape), "fast_used": next(iter(run.report()["attention"]["used"])), "best": best, "us": medians,
        "fast_over_best": ratio, "fast_over_reference": medians["fast"] / medians["reference"], "refused": refused,
        "ranks": {name: ranks[name] for name in single},
    }  # fmt: skip


def growing(backends: list[str]) -> dict[str, float]:
    """Milliseconds a decode step costs when every step has a new key length: what plan building does to a kernel."""
    cache = torch.randn(1, 8, 2400, 128, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(1, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    found = {}
    for name in ("reference", "fast", *backends):
        lengths = iter(range(1000, 2400))
        policy = fb.policy_for("auto") if name == "reference" else fb.policy_for(name, name != "fast")

        def step(policy: fb.Policy = policy, lengths: object = lengths) -> None:
            length = next(lengths)  # type: ignore[call-overload]
            with fb.bind(policy):
                fb.attention(q, cache[:, :, :length], cache[:, :, :length], site=SITE, enable_gqa=True)

        try:
            timed(step, 3)
            found[name] = statistics.median(timed(step, 40) for _ in range(5)) / 1000
        except fb.RefusedError:
            continue
    return found


def table(rows: list[dict[str, object]], backends: list[str], grown: dict[str, float]) -> str:
    """The results as Markdown: microseconds, and in brackets the place among those able by estimated time."""
    head = [
        "shape (b, heads/kv, q, k, d)",
        "fast used",
        "fast µs",
        *backends,
        "torch default",
        "fast / best",
        "fast / torch",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        us: dict[str, float] = row["us"]  # type: ignore[assignment]
        ranks: dict[str, float] = row["ranks"]  # type: ignore[assignment]
        place = {name: at for at, name in enumerate(sorted(ranks, key=lambda name: ranks[name]), 1)}
        cells = [str(row["shape"]), str(row["fast_used"]), f"{us['fast']:.1f}"]
        cells += [f"{us[name]:.1f} ({place[name]})" if name in us else "—" for name in backends]
        cells += [f"{us['reference']:.1f}", f"{row['fast_over_best']:.3f}", f"{row['fast_over_reference']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "A growing cache (1, 32/8, 1, k, 128), k new at every step, ms a step: "]
    lines[-1] += ", ".join(f"{name} {time:.3f}" for name, time in grown.items())
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, rounds=15)
    parser.add_argument("--backends", help="comma separated; default every one that can run")
    parser.add_argument("--shapes", default="", metavar="REGEX", help="only shapes whose name has this; default all")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        msg = "grid.py needs a CUDA device: it compares CUDA kernels."
        raise SystemExit(msg)
    backends = options.backends.split(",") if options.backends else installed()
    rows = []
    for shape in (each for each in GRID if re.search(options.shapes, str(each))):
        rows.append(measure(shape, backends, options.rounds))
        torch.cuda.empty_cache()
    grown = growing(backends)
    facts = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(), "rounds": options.rounds,
    }  # fmt: skip
    text = table(rows, backends, grown)
    print(facts)
    print(text)
    numbers = {"facts": facts, "rows": rows, "growing_ms": grown}
    keep(options, "grid", numbers, f"{listed(facts)}\n\n{text}", fenced=False)


if __name__ == "__main__":
    main()
