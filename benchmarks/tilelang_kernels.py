"""The TileLang kernels beside torch: differences, microseconds, and the tiles they should have.

    python benchmarks/tilelang_kernels.py --out DIR           every row: differences, times; DIR/tilelang.json and .md
    ... --only REGEX                                          those rows whose name it is found in
    ... --tune --seconds N                                    then other tiles, for what is slowest beside torch first,
                                                              until N seconds are over
    ... --eager                                               without torch.compile, which compiles for long
    ... --compile-only [--tune] [--target sm_90a]             no row: only fills TileLang's cache ($TILELANG_CACHE_DIR),
                                                              which with --target needs no GPU and can be taken to one
    ... --cpu                                                 the CPU form against float32, where there is no GPU
    ... --readme                                              and puts the table into plugins/tilelang/README.md
    ... --from FILE.json --readme                             the table of an earlier run

Kernels are compiled first, in as many processes as there are cores, into TileLang's cache on disk. What then runs on
the GPU runs in one child process, which writes each row as soon as it has it; where a row ends or hangs that process,
the row says so and another child goes on after it.

`call` is a call from Python, back to back; `device` is the same replayed from a CUDA graph, launches left out. Inputs
stay in the L2 cache as far as they fit, for everybody.

Inputs are scaled so that results stay below 8, where bfloat16's last bit is 1/32: a limit of 0.05 is then one on the
arithmetic, not on the rounding of large numbers. The table has the largest.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import pathlib
import re
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import torch
import torch.nn.functional as F  # noqa: N812
from _report import aligned, machine, versions, write_between
from torch import Tensor

from fuseboard_tilelang import (
    _configs,
    _package,
    add_ln_kernel,
    attn_kernel,
    compile_cpu,
    compile_gpu,
    gemm_geglu_kernel,
    gemm_kernel,
    ops,
    rope_kernel,
)
from fuseboard_tilelang.attn import OPEN
from fuseboard_tilelang.compile import target_of
from fuseboard_tilelang.warm import warm

PLUGIN = pathlib.Path(__file__).resolve().parents[1] / "plugins" / "tilelang" / "README.md"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
PATIENCE = 60.0  # seconds that one row may take
Run: TypeAlias = Callable[[], Any]


@attrs.frozen
class Case:
    """One row of the table.

    Attributes:
        name: What it says first.
        kernel: Which of the five.
        sizes: Numbers that its inputs are made of.
        options: What it asks of the kernel.
    """

    name: str
    kernel: str
    sizes: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def option(self, name: str) -> Any:
        """What is asked by that name, or None."""
        return dict(self.options).get(name)


CASES = (
    Case("gemm + bias + gelu, 17 x 70 x 67", "gemm", (17, 70, 67), (("act", "gelu"),)),
    Case("gemm + bias + gelu, 4096 x 3072 x 768", "gemm", (4096, 3072, 768), (("act", "gelu"),)),
    Case("gemm + bias + residual, 4096 x 768 x 3072", "gemm", (4096, 768, 3072), (("residual", True),)),
    Case("gemm + bias + gelu, 256 x 3072 x 768", "gemm", (256, 3072, 768), (("act", "gelu"),)),
    Case("geglu, 4096 x 1152 x 768", "geglu", (4096, 1152, 768)),
    Case("residual + layer norm, 4096 x 768", "add_ln", (4096, 768)),
    Case("rope, 4096 rows, 12 heads of 64", "rope", (4096, 12, 64)),
    Case("attention, 4 x 1024, 12 x 64", "attn", (4, 1024, 12, 64)),
    Case("attention, 4 x 300, 12 x 64, unequal lengths", "attn", (4, 300, 12, 64), (("lengths", (300, 17, 211, 0)),)),
    Case("attention, 8 x 1024, 12 x 64, half of the keys real", "attn", (8, 1024, 12, 64),
         (("lengths", (1024, 900, 700, 512, 400, 300, 200, 60)),)),
    Case("attention, 4 x 1024, 12 x 64, window 64", "attn", (4, 1024, 12, 64), (("window", (64, 64)),)),
    Case("attention, 2 x 4096, 16 x 128", "attn", (2, 4096, 16, 128)),
    Case("attention, 2 x 4096, 16 x 128, causal", "attn", (2, 4096, 16, 128), (("causal", True),)),
    Case("attention, 2 x 4096, 16 x 128, causal, window 256", "attn", (2, 4096, 16, 128),
         (("causal", True), ("window", (256, 0)))),
)  # fmt: skip

TUNED = tuple(
    case.name
    for case in CASES
    if case.sizes != (17, 70, 67) and not case.option("lengths") and len(case.options) < 2  # noqa: PLR2004
)
"""Those whose best tiles the configuration table can say."""


def inputs(case: Case, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """The same numbers on every device: drawn on the CPU, rounded to the dtype."""
    generator = torch.Generator().manual_seed(1234)

    def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

    if case.kernel in ("gemm", "geglu"):
        m, n, k = case.sizes
        rows = 2 * n if case.kernel == "geglu" else n
        size = 0.5 if case.kernel == "geglu" else 1.0  # of what is multiplied with one another
        found = {
            "x": draw(m, k, scale=size), "weight": draw(rows, k, scale=k**-0.5), "bias": draw(rows, scale=0.5 * size)
        }  # fmt: skip
        if case.option("residual"):
            found["residual"] = draw(m, n)
        return found
    if case.kernel == "add_ln":
        m, d = case.sizes
        return {"residual": draw(m, d), "x": draw(m, d), "weight": draw(d, scale=0.3), "bias": draw(d, scale=0.3)}
    if case.kernel == "rope":
        m, h, d = case.sizes
        angles = torch.arange(1024)[:, None] / 10000 ** (torch.arange(d // 2)[None] / (d // 2))
        cos, sin = angles.cos().to(device), angles.sin().to(device)
        return {"qkv": draw(m, 3 * h * d), "cos": cos, "sin": sin}
    b, s, h, d = case.sizes
    found = {name: draw(b, h, s, d) for name in ("q", "k", "v")}
    if case.option("lengths"):
        found["lengths"] = torch.tensor(case.option("lengths"), dtype=torch.int32, device=device)
    return found


def ours(case: Case, given: dict[str, Tensor]) -> Run:
    """The call that a user makes."""
    if case.kernel == "gemm":
        act = case.option("act") or "none"
        return lambda: ops.gemm(given["x"], given["weight"], given["bias"], given.get("residual"), act)
    if case.kernel == "geglu":
        return lambda: ops.geglu(given["x"], given["weight"], given["bias"])
    if case.kernel == "add_ln":
        return lambda: ops.add_ln(given["residual"], given["x"], given["weight"], given["bias"])
    if case.kernel == "rope":
        return lambda: ops.rope_(given["qkv"], given["cos"], given["sin"], None, *case.sizes[1:])
    return lambda: ops.attention(
        given["q"], given["k"], given["v"], given.get("lengths"), bool(case.option("causal")), case.option("window")
    )


def program(case: Case, config: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The factory, and what `ops` would give it; with tiles of its own where they are given."""
    options: dict[str, Any] = {}
    if case.kernel == "gemm":
        m, n, k = case.sizes
        options = {"bias": True, "residual": bool(case.option("residual")), "act": case.option("act") or "none"}
        options["config"] = config or _configs.gemm_config("gemm", m, n, cpu=False)
        return gemm_kernel, (n, k), options
    if case.kernel == "geglu":
        m, n, k = case.sizes
        options = {"bias": True, "config": config or _configs.gemm_config("geglu", m, n, cpu=False)}
        return gemm_geglu_kernel, (n, k), options
    if config is not None:
        options["config"] = config
    if case.kernel == "add_ln":
        return add_ln_kernel, case.sizes[1:], {"residual": True, "bias": True, "eps": 1e-5, **options}
    if case.kernel == "rope":
        return rope_kernel, case.sizes[1:], {"positions": False, **options}
    bounded = bool(case.option("causal") or case.option("window"))
    options |= {"bounded": bounded, "lengths": bool(case.option("lengths"))}
    return attn_kernel, (None, None, None, case.sizes[3]), options


def candidates(case: Case) -> tuple[Any, ...]:
    """What `--tune` tries for it."""
    return _configs.candidates(case.kernel, *(case.sizes[:2] if case.kernel in ("gemm", "geglu") else ()))


def numbers(case: Case) -> tuple[float | int, ...]:
    """What the attention kernel is given after its tensors."""
    if case.kernel != "attn":
        return ()
    left, right = case.option("window") or (OPEN, OPEN)
    return case.sizes[3] ** -0.5 * math.log2(math.e), 1, 0, left, 0 if case.option("causal") else right


def tuned(case: Case, config: Any, given: dict[str, Tensor], arch: str) -> Run:
    """The kernel itself, with tiles of its own."""
    factory, sizes, options = program(case, config)
    kernel = compile_gpu(factory, *sizes, target=arch, dtype="bfloat16", **options)
    first = given.get("q", given.get("x"))
    assert first is not None or case.kernel == "rope"
    out = []
    if case.kernel in ("gemm", "geglu"):
        out = [given["x"].new_empty(case.sizes[0], case.sizes[1])]
    elif case.kernel != "rope":
        out = [torch.empty_like(first)]  # type: ignore[arg-type]
    return lambda: kernel(*given.values(), *out, *numbers(case))


def seen(case: Case, device: str) -> Tensor | None:
    """Which keys queries see, dense."""
    _, s, _, _ = case.sizes
    left, right = case.option("window") or (OPEN, OPEN)
    right = 0 if case.option("causal") else right
    apart = torch.arange(s, device=device) - torch.arange(s, device=device)[:, None]
    mask = ((apart <= right) & (apart >= -left))[None, None]
    if case.option("lengths"):
        real = torch.arange(s, device=device) < torch.tensor(case.option("lengths"), device=device)[:, None]
        return mask & real[:, None, None]
    return mask if case.options else None


def rotated(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, dim: int) -> Tensor:
    """Rotary embedding by hand, out of place: the queries and keys."""
    rows = qkv.shape[0]
    pairs = qkv[:, : 2 * heads * dim].view(rows, 2 * heads, dim)
    at = torch.arange(rows, device=qkv.device) % cos.shape[0]
    c, s = torch.cat([cos, cos], -1)[at, None], torch.cat([sin, sin], -1)[at, None]
    a, b = pairs.chunk(2, -1)
    return pairs * c.to(qkv.dtype) + torch.cat([-b, a], -1) * s.to(qkv.dtype)


def reference(case: Case, given: dict[str, Tensor]) -> list[Tensor]:
    """The definition in float32, on the rounded inputs."""
    w = {name: each.float() if each.is_floating_point() else each for name, each in given.items()}
    if case.kernel == "gemm":
        y = F.linear(w["x"], w["weight"], w["bias"])
        y = F.gelu(y) if case.option("act") == "gelu" else y
        return [y + w["residual"] if "residual" in w else y]
    if case.kernel == "geglu":
        u, g = F.linear(w["x"], w["weight"], w["bias"]).chunk(2, -1)
        return [F.gelu(u) * g]
    if case.kernel == "add_ln":
        total = given["residual"] + given["x"]
        return [F.layer_norm(total.float(), total.shape[1:], w["weight"], w["bias"]), total.float()]
    if case.kernel == "rope":
        return [rotated(w["qkv"], w["cos"], w["sin"], *case.sizes[1:])]
    q, k, v, mask = w["q"], w["k"], w["v"], seen(case, str(w["q"].device))
    outs = []
    for place in range(q.shape[0]):  # row by row: the scores of a long one take gigabytes
        scores = q[place] @ k[place].transpose(1, 2) * q.shape[3] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[place if mask.shape[0] > 1 else 0], -torch.inf)
        outs.append(torch.nan_to_num(scores.softmax(-1)) @ v[place])
    return [torch.stack(outs)]


def results(case: Case, given: dict[str, Tensor]) -> list[Tensor]:
    """What our call gives or leaves, as `reference` lists it."""
    given = {name: each.clone() for name, each in given.items()}
    out = ours(case, given)()
    if case.kernel == "rope":
        rows, heads, dim = case.sizes
        return [out[:, : 2 * heads * dim].view(rows, 2 * heads, dim)]
    return [out, given["residual"]] if case.kernel == "add_ln" else [out]


def on_cpu(case: Case, given: dict[str, Tensor]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A part of the result by the CPU form, on the same rounded inputs; and which part it is."""
    w = {name: each.float().cpu() if each.is_floating_point() else each.cpu() for name, each in given.items()}
    rows = 64
    if case.kernel == "attn":
        q, k, v = (w[name][:1, :2].contiguous() for name in ("q", "k", "v"))
        q = q[:, :, :rows].contiguous()
        out = torch.empty_like(q)
        factory, sizes, options = program(case, None)
        kernel = compile_cpu(factory, *sizes, **options)
        tensors = [q, k, v, *([w["lengths"][:1]] if "lengths" in w else []), out]
        kernel(*tensors, *numbers(case))
        return out, lambda full: full[:1, :2, :rows]
    few = {name: each[:rows].contiguous() if name in ("x", "residual", "qkv") else each for name, each in w.items()}
    small = attrs.evolve(case, sizes=(min(rows, case.sizes[0]), *case.sizes[1:]))
    return results(small, few)[0], lambda full: full[:rows]


def peers(case: Case, given: dict[str, Tensor]) -> dict[str, Run]:
    """The same by torch."""
    x, weight, bias = given.get("x"), given.get("weight"), given.get("bias")
    if case.kernel == "gemm":

        def gemm() -> Tensor:
            y = F.linear(x, weight, bias)  # type: ignore[arg-type]
            y = F.gelu(y) if case.option("act") == "gelu" else y
            return y + given["residual"] if "residual" in given else y

        return {"torch": gemm, "torch.compile": torch.compile(gemm)}
    if case.kernel == "geglu":

        def geglu() -> Tensor:
            u, g = F.linear(x, weight, bias).chunk(2, -1)  # type: ignore[arg-type]
            return F.gelu(u) * g

        return {"torch": geglu, "torch.compile": torch.compile(geglu)}
    if case.kernel == "add_ln":

        def add_ln() -> Tensor:
            given["residual"].add_(x)  # type: ignore[arg-type]
            return F.layer_norm(given["residual"], case.sizes[1:], weight, bias)

        return {"torch": add_ln, "torch.compile": torch.compile(add_ln)}
    if case.kernel == "rope":
        _, heads, dim = case.sizes

        def rope() -> None:
            out = rotated(given["qkv"], given["cos"], given["sin"], heads, dim)
            given["qkv"][:, : 2 * heads * dim].copy_(out.view(-1, 2 * heads * dim))

        return {"torch": rope, "torch.compile": torch.compile(rope)}
    return attention_peers(case, given)


def attention_peers(case: Case, given: dict[str, Tensor]) -> dict[str, Run]:
    """cuDNN and FlashAttention 2 through aten, without what they have no word for; torch's choice with a dense mask."""
    q, k, v = given["q"], given["k"], given["v"]
    mask, causal = seen(case, "cuda"), case.options == (("causal", True),)
    aten = torch.ops.aten
    cudnn = functools.partial(aten._scaled_dot_product_cudnn_attention, q, k, v, None, False, 0.0, causal, False)
    flash = functools.partial(aten._scaled_dot_product_flash_attention, q, k, v, 0.0, causal, False)
    whole = mask is None or causal
    found: dict[str, Run] = {
        "cudnn" if whole else "cudnn, nothing hidden": cudnn,
        "flash" if whole else "flash, nothing hidden": flash,
    }
    if whole:
        found["torch"] = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return found
    found["torch"] = lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)  # type: ignore[arg-type]
    found["cudnn, mask"] = functools.partial(
        aten._scaled_dot_product_cudnn_attention, q, k, v, bias, False, 0.0, False, False
    )
    if case.option("window"):
        left, right = case.option("window")
        tokens = [each.transpose(1, 2) for each in (q, k, v)]
        n = case.sizes[1]
        options = {"window_size_left": left, "window_size_right": 0 if case.option("causal") else right}
        found["flash, window"] = lambda: aten._flash_attention_forward(
            *tokens, None, None, n, n, 0.0, False, False, **options
        )
    return found


def called(run: Run, rounds: int) -> float:
    """Microseconds a call from Python, calls back to back; the median over rounds."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        start.record()
        for _ in range(10):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 100)
    return statistics.median(times)


def replayed(run: Run, rounds: int) -> float:
    """Microseconds a call, replayed from a CUDA graph."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            run()
    return called(graph.replay, rounds) / 10


Job: TypeAlias = "tuple[str, int, str, Any]"
"""What is to be done (`check`, `time`, `peer` or `tune`), the case's place, a dtype or a peer's name, a config."""


@functools.lru_cache(2)
def held(place: int, which: str) -> dict[str, Tensor]:
    """The inputs of a case, which to draw takes longer than most of what is measured."""
    return inputs(CASES[place], DTYPES[which], "cuda")


def work(job: Job, rounds: int, arch: str) -> dict[str, Any]:
    """Do one job."""
    what, place, which, config = job
    case = CASES[place]
    if what == "check":
        # Not those that were timed: two of the kernels write into what they are given.
        given = inputs(case, DTYPES[which], "cuda")
        want = reference(case, given)
        got = results(case, given)
        found = {
            "fp32": max(float((mine.float() - right).abs().max()) for mine, right in zip(got, want, strict=True)),
            "largest": max(float(right.abs().max()) for right in want),
        }
        try:
            part, cut = on_cpu(case, given)
            found["cpu"] = float((cut(got[0]).float().cpu() - part).abs().max())
        except ImportError as error:
            return {**found, "note": str(error)}
        return found
    given = held(place, "bfloat16")
    if what == "time":
        run = ours(case, given)
    elif what == "tune":
        run = tuned(case, config, given, arch)
        run()
        torch.cuda.synchronize()
        return {"device": replayed(run, min(rounds, 10))}
    else:
        run = peers(case, given)[which]
    return {"call": called(run, rounds), "device": replayed(run, rounds)}


def child(jobs: list[Job], rounds: int, arch: str, rows: Any) -> None:
    """Do jobs one after the other, and say of each what came of it."""
    for place, job in enumerate(jobs):
        try:
            with torch.no_grad():
                found = work(job, rounds, arch)
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - a row, not an end
            found = {"error": f"{type(error).__name__}: {str(error).strip()[-300:]}"}
        rows.put((place, found))
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception:  # noqa: BLE001 - the device is lost to this process
            rows.close()
            rows.join_thread()
            os._exit(3)


def done(
    jobs: list[Job], rounds: int, arch: str, keep: Callable[[Job, dict[str, Any]], None], until: float = math.inf
) -> None:
    """Do all jobs in children, one at a time; one that ends or hangs a child does not end the others.

    Args:
        jobs: In order.
        rounds: Measurements of each.
        arch: What their kernels were compiled for.
        keep: Takes what came of each.
        until: A reading of the monotonic clock at which to stop.
    """
    context = multiprocessing.get_context("spawn")
    while jobs:
        rows = context.Queue()
        process = context.Process(target=child, args=(jobs, rounds, arch, rows))
        process.start()
        finished, last = 0, time.monotonic()
        why = ""
        while finished < len(jobs) and not why:
            try:
                place, found = rows.get(timeout=1.0)
            except Exception:  # noqa: BLE001 - queue.Empty, or a torn pipe
                late = time.monotonic() - last > PATIENCE
                why = (
                    "late"
                    if time.monotonic() > until
                    else "hangs"
                    if late
                    else ""
                    if process.is_alive()
                    else f"ended with {process.exitcode}"
                )
                continue
            keep(jobs[place], found)
            finished, last = place + 1, time.monotonic()
            why = "late" if last > until else ""
        if process.is_alive() and why:
            process.kill()
        process.join()
        if finished == len(jobs) or why == "late":
            return
        if why == "hangs" or finished == 0:
            keep(jobs[finished], {"error": f"the process {why}"})
            finished += 1
        jobs = jobs[finished:]


Wanted: TypeAlias = "tuple[int, str, Any]"
"""A kernel: the case's place, a dtype (`c` for the CPU form), a config or None."""


def compile_all(wanted: list[Wanted], arch: str, workers: int, seconds: float | None = None) -> dict[Wanted, str]:
    """Compile in parallel, each once; what could not be, and why."""
    begun = time.monotonic()
    failed: dict[Wanted, str] = {}
    for target in ("c", arch):
        jobs: dict[str, Any] = {}
        owners: dict[str, list[Wanted]] = {}
        for key in wanted:
            place, dtype, config = key
            if (dtype == "c") != (target == "c"):
                continue
            factory, sizes, kwargs = program(CASES[place], config)
            options = {**kwargs, "config": None} if dtype == "c" else {**kwargs, "dtype": dtype}
            name = repr((factory.__name__, sizes, sorted(options.items())))
            jobs[name] = (factory, sizes, {each: value for each, value in options.items() if value is not None})
            owners.setdefault(name, []).append(key)
        if target == "c" and _package.cpu_problem() is not None:
            continue
        for name, error in zip(
            jobs, warm(list(jobs.values()), target=target, workers=workers, seconds=seconds), strict=True
        ):
            if error is not None:
                failed |= dict.fromkeys(owners[name], error)
                print(f"does not compile: {name}: {error}", flush=True)
        took = time.monotonic() - begun
        print(f"{len(jobs)} kernels for {target} in {took:.0f} s, {len(jobs) / took:.2f} a second", flush=True)
        begun = time.monotonic()
    return failed


def short(number: float | None, digits: int = 1) -> str:
    return "" if number is None else f"{number:.{digits}f}"


def beside(row: dict[str, Any]) -> float | None:
    """How long ours takes on the device, 1 for the fastest other that computes the same; None where it is unknown."""
    mine = row.get("time", {}).get("device")
    others = [
        each["device"]
        for key, each in row.items()
        if key.startswith("peer ") and "nothing hidden" not in key and "device" in each
    ]
    return mine / min(others) if mine and others else None


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The results as Markdown."""
    head = (
        "kernel", "largest value", "bf16 diff", "fp16 diff", "from CPU form", "µs a call", "torch, a call",
        "µs on the device", "torch", "torch.compile", "others", "ours / best",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, row in rows.items():
        if not row:
            continue
        checks = [row.get(f"check {dtype}", {}) for dtype in DTYPES]
        diffs = [f"{each['fp32']:.1e}" if "fp32" in each else each.get("error", "") for each in checks]
        near = [each["cpu"] for each in checks if "cpu" in each]
        largest = max((each["largest"] for each in checks if "largest" in each), default=None)
        mine = row.get("time", {})
        others = {key.removeprefix("peer "): each for key, each in row.items() if key.startswith("peer ")}
        rest = ", ".join(
            f"{key} {short(each.get('device')) or each.get('error', '')}"
            for key, each in others.items()
            if key not in ("torch", "torch.compile")
        )
        cells = [
            name, short(largest), *diffs, f"{max(near):.1e}" if near else "",
            short(mine.get("call")) or mine.get("error", ""), short(others.get("torch", {}).get("call")),
            short(mine.get("device")),
            *(short(others.get(key, {}).get("device")) for key in ("torch", "torch.compile")), rest,
            short(beside(row), 2),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shown(result: dict[str, Any]) -> str:
    """A run as Markdown: when and where, the table, what is slower than others, what is missing."""
    facts, rows = result["facts"], result["rows"]
    text = ", ".join(f"{key} {value}" for key, value in facts.items()) + "\n\n"
    if "note" in result:  # of who keeps an old run's numbers
        text += f"{result['note']}\n\n"
    text += table(rows)
    slower = [name for name, row in rows.items() if (beside(row) or 0) > 1]
    absent = [name for name, row in rows.items() if not row]
    text += "\n\nSlower on the device than the best other: " + ("; ".join(slower) or "none") + "."
    return text + (f"\n\nNot measured in this run: {'; '.join(absent)}." if absent else "")


def cpu_rows() -> dict[str, dict[str, float]]:
    """The CPU form against float32 on small shapes that no tile divides."""
    found = {}
    for case in (
        Case("gemm", "gemm", (17, 70, 67), (("act", "gelu"), ("residual", True))),
        Case("geglu", "geglu", (17, 70, 67)),
        Case("residual + layer norm", "add_ln", (17, 100)),
        Case("rope", "rope", (17, 3, 20)),
        Case("attention", "attn", (3, 77, 2, 64), (("causal", True), ("lengths", (77, 0, 40)), ("window", (20, 0)))),
    ):
        given = inputs(case, torch.float32, "cpu")
        pairs = zip(results(case, given), reference(case, given), strict=True)
        found[case.name] = {"fp32": max(float((mine - right).abs().max()) for mine, right in pairs)}
    return found


def write_plugin_readme(name: str, text: str) -> None:
    """Put a table between the markers of that name."""
    write_between(PLUGIN, name, "benchmarks/tilelang_kernels.py --readme", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=pathlib.Path, help="a folder for tilelang.json and tilelang.md, written as it goes"
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="rows whose name this is found in")
    parser.add_argument("--tune", action="store_true", help="then other tiles, where we are slowest beside torch first")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long --tune may take (default %(default)s)")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--compile-only", action="store_true", help="fill TileLang's cache, and measure nothing")
    parser.add_argument("--target", help="what to compile for, such as sm_90a; without it the GPU that is there")
    parser.add_argument("--from", dest="earlier", type=pathlib.Path, metavar="FILE", help="show a run's tilelang.json")
    parser.add_argument("--cpu", action="store_true", help="only the CPU form, against float32")
    parser.add_argument("--readme", action="store_true", help=f"write the table into {PLUGIN.name} of the plugin")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes that compile")
    options = parser.parse_args()
    if options.cpu:
        problem = _package.cpu_problem()
        if problem is not None:
            raise SystemExit(problem)
        rows = [(name, f"{each['fp32']:.1e}") for name, each in cpu_rows().items()]
        text = "\n".join(["| CPU form | from float32 |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)])
        print(aligned(("CPU form", "from float32"), rows))
        if options.readme:
            write_plugin_readme("cpu", text)
        return
    if options.earlier:
        text = shown(json.loads(options.earlier.read_text(encoding="utf-8")))
        print(text)
        if options.readme:
            write_plugin_readme("gpu", text)
        return
    if not torch.cuda.is_available() and not (options.compile_only and options.target):
        msg = "tilelang_kernels.py needs a CUDA device; without one: --cpu, or --compile-only --target sm_90a."
        raise SystemExit(msg)
    problem = _package.gpu_problem()
    if problem is not None:
        raise SystemExit(problem)
    places = [place for place, case in enumerate(CASES) if re.search(options.only, case.name)]
    if not places:
        msg = f"--only {options.only!r} is found in no row; there are: {'; '.join(case.name for case in CASES)}."
        raise SystemExit(msg)
    arch = options.target or target_of(None)
    wanted: list[Wanted] = [(place, dtype, None) for place in places for dtype in ("c", *DTYPES)]
    if options.compile_only:
        extra = [each for place in places for each in tunings(place)] if options.tune else []
        compile_all(wanted + extra, arch, options.workers)
        return
    measure(options, places, wanted, arch)


def tunings(place: int) -> list[Wanted]:
    """The kernels that `--tune` tries for a row."""
    return [(place, "bfloat16", config) for config in candidates(CASES[place]) if CASES[place].name in TUNED]


def measure(options: argparse.Namespace, places: list[int], wanted: list[Wanted], arch: str) -> None:
    """Compile, then run everything, and write what is known after each row."""
    begun = time.monotonic()
    facts = {
        "date": time.strftime("%Y-%m-%d"), **versions("torch", "tilelang", "apache-tvm-ffi"), **machine(),
        "device": torch.cuda.get_device_name(), "cudnn": torch.backends.cudnn.version(),
        "nvcc": _package.nvcc() or "none: NVRTC", "target": arch,
    }  # fmt: skip
    print(facts, flush=True)
    compile_all(wanted, arch, options.workers)
    rows: dict[str, dict[str, Any]] = {CASES[place].name: {} for place in places}
    best: dict[str, list[Any]] = {CASES[place].name: [] for place in places}

    def keep(job: Job, found: dict[str, Any]) -> None:
        what, place, which, config = job
        name = CASES[place].name
        print(what, name, which, config or "", found, flush=True)
        if what == "tune":
            best[name].append({"config": attrs.asdict(config), **found})
        else:
            rows[name][what if what == "time" else f"{what} {which}"] = found
        save()

    def save() -> dict[str, Any]:
        ordered = {
            name: sorted(each, key=lambda row: row.get("device", math.inf)) for name, each in best.items() if each
        }
        result = {"facts": facts, "rows": rows, "tuned": ordered}
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "tilelang.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            (options.out / "tilelang.md").write_text(shown(result) + "\n", encoding="utf-8")
        return result

    jobs: list[Job] = []
    for place in places:
        names = [name for name in peer_names(CASES[place]) if not (options.eager and name == "torch.compile")]
        jobs += [("time", place, "bfloat16", None), *(("peer", place, name, None) for name in names)]
        jobs += [("check", place, dtype, None) for dtype in DTYPES]
    done(jobs, options.rounds, arch, keep)
    if options.tune:
        tune(options, sorted(places, key=lambda place: -(beside(rows[CASES[place].name]) or 0)), arch, keep)
    result = save()
    print(shown(result))
    for name, tried in result["tuned"].items():
        print(json.dumps({"case": name, "best": tried[0]["config"], "us": tried[0].get("device")}))
    print(f"{time.monotonic() - begun:.0f} s")
    if options.readme:
        write_plugin_readme("gpu", shown(result))


def tune(
    options: argparse.Namespace, places: list[int], arch: str, keep: Callable[[Job, dict[str, Any]], None]
) -> None:
    """Time other tiles, for at most so many seconds, of which half may go to compiling."""
    until = time.monotonic() + options.seconds
    wanted = [each for place in places for each in tunings(place)]
    failed = compile_all(wanted, arch, options.workers, options.seconds / 2)
    for place, dtype, config in failed:
        keep(("tune", place, dtype, config), {"error": failed[place, dtype, config]})
    done([("tune", *each) for each in wanted if each not in failed], options.rounds, arch, keep, until)


def peer_names(case: Case) -> list[str]:
    """What `peers` gives, without a device."""
    if case.kernel != "attn":
        return ["torch", "torch.compile"]
    if case.options in ((), (("causal", True),)):
        return ["cudnn", "flash", "torch"]
    names = ["cudnn, nothing hidden", "flash, nothing hidden", "torch", "cudnn, mask"]
    return [*names, "flash, window"] if case.option("window") else names


if __name__ == "__main__":
    main()
