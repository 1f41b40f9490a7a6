"""What a token costs on a GPU: QwenDecoder in each of its forms beside transformers, in one run and in turn.

A model of Qwen3-0.6B's shape with random weights generates greedily from one prompt. Every variant is run once to
compile and capture, then all are run round after round, so that drift hits all alike. A token's time is the median
over rounds of (last token - first token) / tokens between: the prompt is not in it; variants whose launches the host
makes one by one generate fewer tokens. Device time and launches are the profiler's, over some tokens in the middle.
When a batch size has used its share of `--seconds`, its later rounds are left out. The floor is the bytes of the
weights over the bandwidth of a large copy in the same run. A variant that fails is shown with its reason, and the
others go on.

    python benchmarks/decode.py [--out DIR] [--only NAME,...] [--batches 1,8] [--rounds N] [--no-compile]
    python benchmarks/decode.py --tiny --device cpu       # shows that it runs, not what it costs
    python benchmarks/decode.py --plot benchmarks/results/decode.json
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import html
import json
import math
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from _report import aligned, machine, versions
from torch import Tensor

import fuseboard as fb
from fuseboard.engine.decoder import QwenDecoder

PACKAGES = ("torch", "fuseboard", "transformers", "triton", "flash-attn", "tilelang")
SHAPE: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "eos_token_id": None, "pad_token_id": 0,
    "bos_token_id": None,
}  # fmt: skip
TINY = SHAPE | {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
PROFILED = 8
"""How many tokens the profiler sees, after as many that it does not."""
EAGER = 24
"""How many tokens a variant generates whose launches the host makes one by one."""
SHOWN = 14
"""How many kernels of a variant are kept, those that take longest."""


@attrs.define
class Run:
    """One generation.

    Attributes:
        ids: Prompt and answer.
        times: When each token came, in seconds.
        seconds: All of it, the prompt included.
    """

    ids: Tensor
    times: list[float]
    seconds: float

    @property
    def ms(self) -> float:
        """A token's time."""
        return 1000 * (self.times[-1] - self.times[0]) / max(len(self.times) - 1, 1)


@attrs.define
class Variant:
    """One row.

    Attributes:
        name: What the reader sees.
        run: Generates so many tokens, calling the function after each.
        report: What it says about itself afterwards.
        equal_to: Whose ids its own are compared with.
        most: How many tokens it generates at most.
        runs: What was measured.
        found: Its numbers.
    """

    name: str
    run: Callable[[Tensor, int, Callable[[], None]], Tensor]
    report: Callable[[], Any] = dict
    equal_to: str = "eager"
    most: int = 2**31
    runs: list[Run] = attrs.field(factory=list)
    found: dict[str, Any] = attrs.field(factory=dict)

    def measured(self, ids: Tensor, new: int) -> Run:
        """One generation, timed."""
        times: list[float] = []
        new = min(new, self.most)
        synchronise(ids.device)
        begin = time.perf_counter()
        out = self.run(ids, new, lambda: times.append(time.perf_counter()))
        synchronise(ids.device)
        return Run(out, times, time.perf_counter() - begin)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- the variants


def ours(
    name: str, decoder: QwenDecoder, form: bool | str, policy: str | None, *, exact: bool = True, ahead: bool = False,
    equal_to: str = "eager",
) -> Variant:  # fmt: skip
    """QwenDecoder in one form, under a policy, with or without its kernels that have torch's bits."""

    def run(ids: Tensor, new: int, tick: Callable[[], None]) -> Tensor:
        decoder.graphs, decoder.exact_glue = form, exact
        with fb.bind(policy) if policy else contextlib.nullcontext():
            return decoder.generate(ids, max_new_tokens=new, eos=(), on_token=lambda _token: tick(), ahead=ahead)

    def report() -> Any:
        decoder.graphs, decoder.exact_glue = form, exact
        found = decoder.report()
        return {key: found[key] for key in ("graphs", "step", "exact_glue", "glue", "fused_projections", "streamed")}

    return Variant(name, run, report, equal_to, EAGER if form in (False, "step-eager") else 2**31)


def theirs(name: str, model: Any, **given: Any) -> Variant:
    """transformers' generate."""

    def run(ids: Tensor, new: int, tick: Callable[[], None]) -> Tensor:
        nothing = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        def criterion(_ids: Tensor, _scores: Tensor, **_more: Any) -> Tensor:
            tick()
            return nothing

        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None,
            stopping_criteria=[criterion], **given,
        )  # fmt: skip

    return Variant(name, run, most=2**31 if given else EAGER)


def variants(options: argparse.Namespace, device: torch.device, batch: int) -> Iterator[Variant]:
    """All of them; what cannot be made is said and left out."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    shape = TINY if options.tiny else SHAPE
    model, decoder = models(shape, device, dtype)
    eager = ours("eager", decoder, False, None)
    yield eager
    yield ours("eager, torch's kernels", decoder, False, None, exact=False)
    if model is not None:
        yield theirs("transformers eager", model)
        if not options.no_compile and batch in options.compiled:
            yield theirs("transformers static+compile", model, cache_implementation="static")
    yield ours("layer graphs", decoder, True, None)
    state = {name: each.detach() for name, each in decoder.state_dict().items()}
    # A decoder of its own for whole steps: one that is set to another form lets go of their graphs.
    whole = decoder_of(shape, state)
    yield ours("whole step reference", whole, "step", None)
    yield ours("step-eager reference", whole, "step-eager", None, equal_to="whole step reference")
    policies = [each for each in options.policies if takes(each, device, dtype)]
    for policy in policies or [None]:
        title = policy or "reference"
        if policy:
            yield ours(f"layer graphs {title}", decoder, True, policy)
            yield ours(f"whole step {title}", whole, "step", policy, equal_to=f"layer graphs {title}")
            yield ours(f"step-eager {title}", whole, "step-eager", policy, equal_to=f"whole step {title}")
        for more in ((), ("glue",), ("glue", "products")):
            fused = decoder_of(shape, state).fuse(**dict.fromkeys(more, True))
            added = "+".join((title, "fused", *more))
            yield ours(f"whole step {added}", fused, "step", policy, equal_to=f"whole step {title}")
            if more:
                yield ours(
                    f"whole step {added}, ahead", fused, "step", policy, ahead=True, equal_to=f"whole step {added}"
                )
            yield ours(f"step-eager {added}", fused, "step-eager", policy, equal_to=f"whole step {added}")

    if batch in options.streamed:
        on_cpu = {name: each.cpu() for name, each in state.items()}
        yield ours("streamed eager", decoder_of(shape, on_cpu).stream_layers(device), False, None)
        streamed = decoder_of(shape, on_cpu).stream_layers(device)
        yield ours("streamed step", streamed, "step", None, equal_to="whole step reference")
        yield ours("step-eager streamed", streamed, "step-eager", None, equal_to="streamed step")


def takes(policy: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a backend answers here."""
    run = fb.Run()
    try:
        q = torch.randn(1, 2, 1, 128, device=device, dtype=dtype)
        with fb.bind(policy, run=run):
            fb.attention(q, q, q, site=SITE)
        reason = str(run.warning)
    except Exception as error:  # noqa: BLE001 - whatever it is, the variant is left out
        reason = str(error).strip().partition("\n")[0]
    if policy in run.report()["attention"]["used"]:
        return True
    print(f"{policy} is left out: {reason}", flush=True)
    return False


SITE = fb.Site("benchmark.decode")


def models(shape: dict[str, Any], device: torch.device, dtype: torch.dtype) -> tuple[Any, QwenDecoder]:
    """transformers' model, where it is installed, and a decoder with its weights."""
    try:
        import transformers
    except ImportError:
        decoder = QwenDecoder({"model_type": "qwen3"} | shape)
        generator = torch.Generator(device).manual_seed(0)
        weights = {
            name: torch.ones(each.shape, device=device, dtype=dtype) if "norm" in name
            else torch.randn(each.shape, device=device, dtype=torch.float32, generator=generator).mul_(0.02).to(dtype)
            for name, each in decoder.named_parameters()
        }  # fmt: skip
        decoder.load(weights)
        return None, decoder
    transformers.logging.set_verbosity_error()
    config = transformers.Qwen3Config(**shape)
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)  # fuseboard: allow(in a fork of the generator; the same weights every time)
        model = transformers.Qwen3ForCausalLM(config)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model = model.to(dtype).eval()
    model.model.rotary_emb.inv_freq = frequencies
    model.model.rotary_emb.original_inv_freq = frequencies.clone()
    return model, QwenDecoder.from_transformers(model)


def decoder_of(shape: dict[str, Any], state: dict[str, Tensor]) -> QwenDecoder:
    made = QwenDecoder({"model_type": "qwen3"} | shape)
    made.load(state)
    return made


# ---- measuring


def profiled(variant: Variant, ids: Tensor) -> dict[str, Any]:
    """Device time and launches of a token, and its kernels."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA])  # what the host does is many events, and takes seconds
    seen = 0

    def tick() -> None:
        nonlocal seen
        seen += 1
        if seen == PROFILED:
            synchronise(ids.device)
            profiler.start()
        elif seen == 2 * PROFILED:
            synchronise(ids.device)
            profiler.stop()

    variant.run(ids, 2 * PROFILED + 2, tick)
    kernels: dict[str, list[float]] = {}
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memset", "ProfilerStep")):
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us())
    slowest = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    return {
        "device_ms": round(sum(map(sum, kernels.values())) / PROFILED / 1000, 4),
        "launches": round(sum(map(len, kernels.values())) / PROFILED, 1),
        "kernels": [
            {"name": name[:110], "a_token": round(len(times) / PROFILED, 2), "us": round(statistics.mean(times), 2)}
            for name, times in slowest[:SHOWN]
        ],
    }


def bandwidth(device: torch.device, megabytes: int) -> float:
    """Bytes a second, read and written, of the fastest of some large copies."""
    source = torch.ones(megabytes * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = math.inf
    for _ in range(8):
        synchronise(device)
        begin = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        synchronise(device)
        best = min(best, (time.perf_counter() - begin) / 4)
    return 2 * source.nbytes / best


def measure(options: argparse.Namespace, device: torch.device, batch: int, deadline: float) -> list[Variant]:
    """All variants of one batch size. After the deadline those that were timed once are not timed again."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = (TINY if options.tiny else SHAPE)["vocab_size"]
    ids = torch.randint(1, vocabulary, (batch, options.prompt), generator=generator).to(device)
    made: list[Variant] = []
    for variant in variants(options, device, batch):
        if options.only and variant.name not in options.only and variant.name != "eager":
            continue
        made.append(variant)
        guarded(variant, "first run", lambda v=variant: v.found.update(first=v.measured(ids, options.new)))
        if "failed" not in variant.found:
            print(f"batch {batch}: {variant.name}: {variant.found['first'].seconds:.2f} s at first", flush=True)
    alive = [each for each in made if "failed" not in each.found]
    for number in range(options.rounds):
        for variant in alive:
            if number == 0 or time.perf_counter() < deadline:
                guarded(variant, "timed run", lambda v=variant: v.runs.append(v.measured(ids, options.new)))
        if number == 0 and device.type == "cuda":
            for variant in alive:
                guarded(variant, "profile", lambda v=variant: v.found.update(profiled(v, ids)), fatal=False)
    summed_up(alive, {each.name: each for each in made}, options.prompt)
    return made


def summed_up(alive: list[Variant], by_name: dict[str, Variant], prompt: int) -> None:
    """The numbers of the variants that ran."""
    for variant in alive:
        first: Run = variant.found["first"]
        if variant.runs:
            variant.found["ms"] = round(statistics.median(each.ms for each in variant.runs), 4)
            variant.found["ms_all"] = [round(each.ms, 4) for each in variant.runs]
            usual = statistics.median(each.seconds for each in variant.runs)
            variant.found["start_seconds"] = round(max(first.seconds - usual, 0.0), 3)
        other = by_name.get(variant.equal_to)
        if other is not None and other is not variant and "first" in other.found:
            variant.found["same_ids"] = same(first.ids, other.found["first"].ids, prompt)
            variant.found["same_ids_as"] = variant.equal_to
        guarded(variant, "report", lambda v=variant: v.found.update(report=v.report()), fatal=False)


def same(mine: Tensor, theirs: Tensor, prompt: int) -> str:
    """`all` that both generated, or how many tokens are, up to the first of any row that is not."""
    length = min(mine.shape[1], theirs.shape[1])
    if torch.equal(mine[:, :length], theirs[:, :length]):
        return "all"
    equal = (mine[:, prompt:length] == theirs[:, prompt:length]).all(0).long()
    return f"first {int(equal.cumprod(0).sum())}"


def guarded(variant: Variant, what: str, action: Callable[[], Any], *, fatal: bool = True) -> None:
    """Do it; a failure is printed, kept, and ends this variant alone."""
    if "failed" in variant.found:
        return
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the table goes on without it
        reason = f"{what}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        variant.found["failed" if fatal else f"no {what}"] = reason
        print(f"{variant.name} failed at its {what}:\n{traceback.format_exc()}", flush=True)


# ---- results


def row(variant: Variant, floor: float) -> dict[str, Any]:
    """A variant as data."""
    found = {key: value for key, value in variant.found.items() if key != "first"}
    if found.get("ms"):
        found["times_floor"] = round(found["ms"] / floor, 2)
    return {"name": variant.name, **found}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    facts = f"{result['device']}, {result['dtype']}, prompt {result['prompt']}, {result['new_tokens']} new tokens"
    shown = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    parts = [
        "# A token on the GPU",
        "Written by `benchmarks/decode.py`: Qwen3-0.6B's shape, random weights, greedy.",
        f"{facts}; {_rounds(result)}; {shown}.",
        f"Floor: {result['weights_gb']} GB of weights at {result['bandwidth_tb_s']} TB/s are {result['floor_ms']} ms.",
    ]
    head = ("batch, variant", "ms a token", "x floor", "device ms", "launches", "start s", "same ids")
    lines = []
    for batch, rows in result["batches"].items():
        for each in rows:
            if "failed" in each:
                lines.append((f"{batch}: {each['name']}", "failed", "", "", "", "", each["failed"][:60]))
                continue
            ids = f"{each['same_ids']}, as {each['same_ids_as']}" if "same_ids" in each else ""
            cells = (_shown(each.get(name)) for name in ("ms", "times_floor", "device_ms", "launches", "start_seconds"))
            lines.append((f"{batch}: {each['name']}", *cells, ids))
    return "\n\n".join([*parts, f"```text\n{aligned(head, lines)}\n```"]) + "\n"


def _rounds(result: dict[str, Any]) -> str:
    """How often the variants were timed, which the time there was decides."""
    counts = {len(each["ms_all"]) for rows in result["batches"].values() for each in rows if "ms_all" in each} or {0}
    least, most = min(counts), max(counts)
    said = f"{most} timed run{'s' if most != 1 else ''} of each"
    return said if least == most else f"{least} to {said}"


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"  # noqa: PLR2004


def plot(result: dict[str, Any]) -> str:
    """Milliseconds a token as an SVG of bars, on a logarithmic scale, with the floor as a line."""
    wide, left, high, floor = 900, 330, 22, result["floor_ms"]
    rows = [
        (f"batch {batch}: {each['name']}", each["ms"], each["name"].startswith("transformers"))
        for batch, found in result["batches"].items()
        for each in found
        if each.get("ms")
    ]
    if not rows:
        return ""
    least = 10 ** math.floor(math.log10(min(floor, *(ms for _, ms, _ in rows))))
    most = 10 ** math.ceil(math.log10(max(ms for _, ms, _ in rows)))

    def at(ms: float) -> float:
        return left + (wide - left - 70) * math.log10(ms / least) / math.log10(most / least)

    tall = 60 + high * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" font-family="sans-serif" font-size="12">',
        f'<rect width="{wide}" height="{tall}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">Milliseconds a token, {html.escape(result["device"])} (log scale)</text>',
    ]
    tick = least
    while tick <= most:
        parts.append(f'<line x1="{at(tick):.1f}" x2="{at(tick):.1f}" y1="32" y2="{tall - 20}" stroke="#ddd"/>')
        parts.append(f'<text x="{at(tick):.1f}" y="{tall - 6}" text-anchor="middle" fill="#666">{tick:g}</text>')
        tick *= 10
    for place, (name, ms, other) in enumerate(rows):
        y = 36 + high * place
        colour = "#b0b0b0" if other else "#3b6ea5"
        parts.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{html.escape(name)}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{at(ms) - left:.1f}" height="16" fill="{colour}"/>')
        parts.append(f'<text x="{at(ms) + 5:.1f}" y="{y + 13}">{ms:.3g}</text>')
    parts.append(f'<line x1="{at(floor):.1f}" x2="{at(floor):.1f}" y1="28" y2="{tall - 20}" stroke="#c33"/>')
    parts.append(f'<text x="{at(floor) + 4:.1f}" y="32" fill="#c33" font-size="11">floor {floor:.3g}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def write(result: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "decode.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (out / "decode.md").write_text(table(result), encoding="utf-8")
    (out / "decode.svg").write_text(plot(result), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    parser.add_argument("--only", default="", metavar="NAME,...", help="these variants, and eager")
    parser.add_argument("--batches", default="1,8", help="batch sizes (default %(default)s)")
    parser.add_argument("--compiled", default="1,8", help="batch sizes with a compiled static cache: 45 s each")
    parser.add_argument("--streamed", default="1", help="batch sizes with streamed layers (default %(default)s)")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled static cache out")
    parser.add_argument("--policies", default="flash,tilelang", help="backends for whole steps (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs of each variant (default %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=150, help="leave rounds out after so long (default %(default)s)"
    )
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt (default %(default)s)")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate (default %(default)s)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: shows that it runs, not what it costs")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="draw decode.svg again beside this result, no more")
    options = parser.parse_args()
    begun = time.perf_counter()
    if options.plot:
        result = json.loads(options.plot.read_text(encoding="utf-8"))
        options.plot.with_suffix(".svg").write_text(plot(result), encoding="utf-8")
        options.plot.with_suffix(".md").write_text(table(result), encoding="utf-8")
        return 0
    options.only = [each.strip() for each in options.only.split(",") if each.strip()]
    options.policies = [each for each in options.policies.split(",") if each]
    options.streamed = [int(each) for each in options.streamed.split(",") if each]
    options.compiled = [int(each) for each in options.compiled.split(",") if each]
    device = torch.device(options.device)
    if options.tiny:
        options.prompt, options.new = min(options.prompt, 16), min(options.new, 20)
    shape = TINY if options.tiny else SHAPE
    shapes = QwenDecoder({"model_type": "qwen3"} | shape)
    size = 4 if device.type == "cpu" else 2
    weights = size * sum(each.numel() for each in shapes.parameters())  # tied: the embedding is read once, as the head
    speed = bandwidth(device, 64 if options.tiny else 4096)
    floor = 1000 * weights / speed
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else machine()["cpu"]
    result: dict[str, Any] = {
        "device": str(name), "dtype": "float32" if device.type == "cpu" else "bfloat16", "shape": shape,
        "prompt": options.prompt, "new_tokens": options.new, "rounds": options.rounds,
        "weights_gb": round(weights / 1e9, 4), "bandwidth_tb_s": round(speed / 1e12, 3), "floor_ms": round(floor, 4),
        "versions": versions(*PACKAGES), "machine": machine(), "batches": {},
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, about generation flags
        batches = [int(each) for each in options.batches.split(",")]
        for place, batch in enumerate(batches):
            deadline = begun + options.seconds * (place + 1) / len(batches)
            try:
                found = measure(options, device, batch, deadline)
                result["batches"][str(batch)] = [row(each, floor) for each in found]
            except Exception:  # noqa: BLE001 - the other batch sizes go on
                print(f"batch {batch} failed:\n{traceback.format_exc()}", flush=True)
            write(result, options.out)  # what there is, should the next one take the process with it
            gc.collect()
    print(table(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
