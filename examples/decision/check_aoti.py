"""The decision model as an AOTInductor package: exported, reloaded by a fresh process, compared and timed.

    python check_aoti.py --output-dir DIR [--model DIR | --size tiny|base] [--device cpu|cuda] [--dtype NAME] [--quick]

Writes decision.pt2, inputs.pt, eager.pt, results.json and results.md. Nothing is downloaded. The exit status is 0 when
all comparisons hold, or after the word SKIP and a reason where the check cannot be made (no CUDA device where one was
asked for, no C++ compiler, a torch without the API); 1 when one does not hold or the model cannot be exported; 2 when
the command means nothing. Times decide nothing: they are reported.

The fresh process has an empty compiler cache, and gets the package and the saved inputs alone; `torch.compile`, export
and packaging raise there.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import attrs
import torch

COLUMNS = ("AMP eager", "AMP compiled", "explicit eager", "explicit compiled", "AOTI")
SHAPES = ((2, 128, 3), (1, 256, 3), (4, 160, 5))  # rows, tokens, marker slots: seven rows in all
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Of probabilities. Compiled code rounds elsewhere, and in bf16 one rounding of a logit of 16 is 0.06.
TOLERANCES = {torch.bfloat16: 0.05, torch.float16: 0.02, torch.float32: 1e-4}
GOAL = 1.5
HEADS = ("decision", "action")

Pair = tuple[torch.Tensor, torch.Tensor]
Inputs = tuple[torch.Tensor, ...]


class Skip(Exception):  # noqa: N818 - no error: what keeps the check from being made
    """The check cannot be made here."""


# --- what is checked --------------------------------------------------------------------------------------------------


def batches(vocabulary: int, pad: int, seed: int, device: torch.device) -> list[Inputs]:
    """Seven questions of all kinds in three batches, padded, with unequal numbers of tokens and of options."""
    from decision.answers import Question, collate

    generator = torch.Generator().manual_seed(seed)

    def question(kind: str, tokens: int, options: int) -> Question:
        ids = torch.randint(1, vocabulary, (tokens,), generator=generator).tolist()
        markers = torch.randperm(tokens - 1, generator=generator)[:options].sort().values + 1
        return Question(kind, ids, markers.tolist())

    groups = [
        [question("choice", 128, 3), question("noul", 71, 2)],
        [question("score", 243, 3)],
        [question("score", 160, 5), question("choice", 33, 4), question("noul", 97, 2), question("choice", 150, 3)],
    ]
    made = [tuple(collate(group, vocabulary=vocabulary, pad=pad, device=device)) for group in groups]
    assert tuple((*each[0].shape, each[2].shape[1]) for each in made) == SHAPES
    return made


def fitting(batch: Inputs, package: Any) -> Inputs:
    """The batch, its only row twice where the package takes two at least: torch.export sets sizes 0 and 1 apart."""
    least = package.contract.inputs[0].sizes[0].low
    return tuple(each.repeat(2, 1) for each in batch) if len(batch[0]) == 1 < least else batch


def by_package(package: Any, batches_: list[Inputs]) -> list[Pair]:
    """What a package gives for each batch, without rows that were added for it."""
    with torch.no_grad():
        found = [package(*fitting(each, package)) for each in batches_]
    return [
        (decision[: len(batch[0])], action[: len(batch[0])])
        for (decision, action), batch in zip(found, batches_, strict=True)
    ]


def compared(given: list[Pair], wanted: list[Pair], inputs: list[Inputs]) -> dict[str, Any]:
    """For each head the largest differences over all rows, and in how many the same option leads."""
    found: dict[str, Any] = {"identical": True, "finite": True}
    for at, head in enumerate(HEADS):
        logit = probability = 0.0
        agree = rows = 0
        for batch, mine, theirs in zip(inputs, given, wanted, strict=True):
            a, b = mine[at].double().cpu(), theirs[at].double().cpu()
            real = batch[3].cpu() if head == "decision" else torch.ones_like(a, dtype=torch.bool)
            found["identical"] &= torch.equal(a, b)
            found["finite"] &= bool(a[real].isfinite().all())
            logit = max(logit, float((a - b)[real].abs().max()))
            probability = max(probability, float((a.softmax(-1) - b.softmax(-1)).abs().max()))
            agree += int((a.argmax(-1) == b.argmax(-1)).sum())
            rows += len(a)
        found[head] = {"logits": logit, "probabilities": probability, "argmax": agree, "rows": rows}
    return found


def holds(found: dict[str, Any], tolerance: float) -> bool:
    """Whether a comparison is good enough: finite, every argmax, every probability."""
    heads = [found[head] for head in HEADS]
    close = all(each["probabilities"] <= tolerance and each["argmax"] == each["rows"] for each in heads)
    return bool(found["finite"]) and close


# --- how it is timed --------------------------------------------------------------------------------------------------


def timed(calls: Mapping[str, Callable[..., object]], device: torch.device, *, quick: bool) -> dict[str, float]:
    """Milliseconds of each call: the median of five groups of thirty, after ten warm-ups. Groups take turns."""
    groups, each, warm = (2, 3, 1) if quick else (5, 30, 10)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for call in calls.values():
        for _ in range(warm):
            call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(groups):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            for _ in range(each):
                call()
            wait()
            found[name].append((time.perf_counter() - start) / each * 1000)
    return {name: statistics.median(times) for name, times in found.items()}


@contextlib.contextmanager
def clock(into: dict[str, float], name: str) -> Iterator[None]:
    """Seconds of a stage, kept and told."""
    start = time.perf_counter()
    yield
    into[name] = time.perf_counter() - start
    print(f"{name}: {into[name]:.2f} s", flush=True)


def snapshot(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on."""
    facts: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    with contextlib.suppress(OSError):
        facts["load"] = os.getloadavg()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = {"name": properties.name, "capability": list(torch.cuda.get_device_capability(device))}
        if shutil.which("nvidia-smi"):
            done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=60, check=False)  # noqa: S607
            facts["nvidia-smi"] = done.stdout or done.stderr
    return facts


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


# --- the check --------------------------------------------------------------------------------------------------------


def ready(device: torch.device) -> None:
    """Raise Skip unless a package can be made for the device."""
    if device.type == "cuda" and not torch.cuda.is_available():
        msg = "CUDA was asked for, and torch sees no CUDA device"
        raise Skip(msg)
    if not hasattr(importlib.import_module("torch._inductor"), "aoti_compile_and_package"):
        msg = f"torch {torch.__version__} has no aoti_compile_and_package; 2.6 has"
        raise Skip(msg)
    compilers = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    if not any(each and shutil.which(each) for each in compilers):
        msg = "there is no C++ compiler (CXX, g++, clang++) to make a package with"
        raise Skip(msg)


def export(model: torch.nn.Module, example: Inputs, path: Path) -> Any:
    """Rows 1 to 8, tokens 32 to 512 by sixteens, since attention wants its mask aligned, marker slots 2 to 8."""
    from torch.export import Dim

    from fuseboard.engine import aot

    rows, tokens, slots = Dim("rows", min=1, max=8), 16 * Dim("tokens16", min=2, max=32), Dim("slots", min=2, max=8)
    if torch.__version__.startswith("2.6."):
        tokens = Dim.AUTO  # its C++ code for sizes that are computed does not compile
    text, marks = {0: rows, 1: tokens}, {0: rows, 1: slots}
    return aot.export(model, example, path, dynamic_shapes=(text, text, marks, marks), policy="auto")


def wanted(args: argparse.Namespace) -> Any:
    """The model, in float32 on the CPU."""
    from decision import weights

    if args.model is not None:
        return weights.load(args.model, seed=args.seed, dtype=torch.float32)
    size = weights.SIZES[args.size]
    if args.layers is not None:
        kinds = [size.layer_types[index % len(size.layer_types)] for index in range(args.layers)]
        size = attrs.evolve(size, num_hidden_layers=args.layers, layer_types=tuple(kinds))
    return weights.random_model(size, seed=args.seed)


def check(args: argparse.Namespace, device: torch.device, folder: Path) -> dict[str, Any]:
    """All stages; `ok` in what it gives says whether every comparison holds."""
    from fuseboard.engine import aot
    from fuseboard.engine.freeze import freeze

    began = time.perf_counter()
    dtype = DTYPES[args.dtype]
    seconds: dict[str, float] = {}
    before = snapshot(device)
    with clock(seconds, "model"):
        stock = wanted(args).to(device)
        explicit = copy.deepcopy(stock).to(dtype)
    config = stock.config
    inputs = batches(config.vocab_size, config.pad_token_id or 0, args.seed, device)

    def amp() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)

    def under_amp(model: Callable[..., Any]) -> Callable[..., Any]:
        def call(*batch: torch.Tensor) -> Any:
            with amp():
                return model(*batch)

        return call

    runs: dict[str, Callable[..., Any]] = {"AMP eager": under_amp(stock), "explicit eager": explicit}
    gave = {name: [run(*each) for each in inputs] for name, run in runs.items()}
    path = folder / "decision.pt2"
    torch.save([tuple(each.cpu() for each in batch) for batch in inputs], folder / "inputs.pt")
    torch.save([tuple(each.cpu() for each in pair) for pair in gave["explicit eager"]], folder / "eager.pt")

    with clock(seconds, "export and package"):
        made = export(explicit, inputs[0], path)
    seconds |= made.seconds
    with clock(seconds, "load, in this process"):
        package = aot.load(path, device=device)
    runs["AOTI"] = package
    gave["AOTI"] = by_package(package, inputs)

    with clock(seconds, "fresh process"):
        fresh = reloaded(folder, device, args.tolerance)

    frozen = freeze(stock, "auto", tuple(inputs[0]))
    if not args.quick:
        with frozen.tracing():
            for name, model, around in (("AMP", stock, under_amp), ("explicit", explicit, lambda run: run)):
                run = around(torch.compile(model, dynamic=True, fullgraph=True))
                with clock(seconds, f"{name} compiled: compilation"):
                    gave[f"{name} compiled"] = [run(*each) for each in inputs]
                runs[f"{name} compiled"] = run

    times = {}
    with frozen.tracing() if not args.quick else contextlib.nullcontext(), clock(seconds, "timing"):
        for shape, batch in zip(SHAPES, inputs, strict=True):
            times[" x ".join(map(str, shape))] = timed(calls_of(runs, batch), device, quick=args.quick)

    comparisons = {
        f"{one} against {other}": compared(gave[one], gave[other], inputs)
        for one, other in (
            ("AOTI", "explicit eager"),
            ("AOTI", "AMP eager"),
            ("explicit compiled", "explicit eager"),
            ("AMP compiled", "AMP eager"),
            ("explicit eager", "AMP eager"),
        )
        if one in gave and other in gave
    }
    seconds["all"] = time.perf_counter() - began
    good = holds(comparisons["AOTI against explicit eager"], args.tolerance) and fresh["ok"]
    return {
        "status": "ok" if good else "failed",
        "ok": good,
        "model": str(args.model) if args.model else f"random {args.size}, seed {args.seed}",
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "device": str(device),
        "dtype": args.dtype,
        "tolerance": args.tolerance,
        "package_bytes": path.stat().st_size,
        "contract": package.contract.data(),
        "rows_given_to_package": {
            " x ".join(map(str, shape)): len(fitting(batch, package)[0])
            for shape, batch in zip(SHAPES, inputs, strict=True)
        },
        "seconds": seconds,
        "milliseconds": times,
        "speedup": {shape: speedups(row) for shape, row in times.items()},
        "comparisons": comparisons,
        "fresh_process": fresh,
        "timing": "quick" if args.quick else "median of 5 groups of 30 after 10 warm-ups, synchronised, taking turns",
        "machine": {"start": before, "end": snapshot(device)},
    }


def calls_of(runs: Mapping[str, Callable[..., Any]], batch: Inputs) -> dict[str, Callable[[], object]]:
    """Each way to compute a batch, by its column."""
    given = {name: fitting(batch, run) if name == "AOTI" else batch for name, run in runs.items()}
    return {name: functools.partial(runs[name], *given[name]) for name in COLUMNS if name in runs}


def speedups(row: dict[str, float]) -> dict[str, float]:
    return {name: time / row["AOTI"] for name, time in row.items() if name != "AOTI"}


# --- the fresh process ------------------------------------------------------------------------------------------------


def reloaded(folder: Path, device: torch.device, tolerance: float) -> dict[str, Any]:
    """What a fresh process, with an empty compiler cache, made of the package."""
    with tempfile.TemporaryDirectory() as cache:
        shut = {name: each for name, each in os.environ.items() if not name.startswith("TORCHINDUCTOR")}
        environ = {**shut, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        command = [sys.executable, str(Path(__file__).resolve()), "--reload", "--output-dir", str(folder)]
        command += ["--device", str(device), "--tolerance", str(tolerance)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)  # noqa: S603
        if done.returncode not in (0, 1) or not done.stdout.strip():
            return {"ok": False, "exit": done.returncode, "error": (done.stderr or done.stdout)[-4000:]}
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        kernels = [each for each in Path(cache).rglob("*") if each.suffix in {".cubin", ".ptx", ".ttir"}]
        return {**answer, "cache_files": sorted({each.suffix or each.name for each in Path(cache).rglob("*.*")}),
                "gpu_kernels_compiled": len(kernels)}  # fmt: skip


def put(name: str, value: object) -> None:
    """Replace an attribute of a module, in a process that does nothing else."""
    module, _, attribute = name.rpartition(".")
    setattr(importlib.import_module(module), attribute, value)


def reload(folder: Path, device: torch.device, tolerance: float) -> dict[str, Any]:
    """In the fresh process: the package and the saved inputs, and no way to compile a model."""

    def shut(*_arguments: object, **_named: object) -> Any:
        msg = "the fresh process tried to compile or package a model"
        raise AssertionError(msg)

    for name in ("torch.compile", "torch.export.export", "torch._inductor.aot_compile"):
        put(name, shut)
    put("torch._inductor.aoti_compile_and_package", shut)

    from fuseboard.engine import aot

    start = time.perf_counter()
    package = aot.load(folder / "decision.pt2", device=device)
    seconds = time.perf_counter() - start
    inputs = torch.load(folder / "inputs.pt", weights_only=True)
    wanted = torch.load(folder / "eager.pt", weights_only=True)
    there = [tuple(each.to(device) for each in batch) for batch in inputs]
    found = compared(by_package(package, there), wanted, inputs)
    loaded = sorted({"decision", "transformers", "torch._dynamo.convert_frame"} & set(sys.modules))
    return {"ok": holds(found, tolerance), "load_seconds": seconds, "comparison": found, "modules": loaded}


# --- the command ------------------------------------------------------------------------------------------------------


def tables(report: dict[str, Any]) -> str:
    """The latencies and the differences, in Markdown."""
    columns = [name for name in COLUMNS if any(name in row for row in report["milliseconds"].values())]
    best = max((name for name in ("explicit compiled", "explicit eager") if name in columns), key=columns.index)
    what = (
        f"{report['model']}, {report['layers']} layers, hidden {report['hidden_size']}, on {report['device']}, "
        f"{report['dtype']}, torch {report['machine']['start']['torch']}; {report['timing']}."
    )
    lines = [
        what,
        "",
        "| rows x tokens x slots | " + " | ".join(f"{name} (ms)" for name in columns) + f" | AOTI over {best} |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for shape, row in report["milliseconds"].items():
        cells = " | ".join(f"{row[name]:.4f}" for name in columns)
        lines.append(f"| {shape} | {cells} | {report['speedup'][shape][best]:.2f}x |")
    added = {shape: rows for shape, rows in report["rows_given_to_package"].items() if rows != int(shape.split()[0])}
    lines += [f"\nAOTI was given {rows} rows at {shape}: it takes no fewer." for shape, rows in added.items()]
    lines += [
        "",
        "| comparison | decision logits | probabilities | argmax | action logits | probabilities | argmax |",
        "|---|---|---|---|---|---|---|",
    ]
    fresh = {"AOTI in a fresh process against explicit eager": report["fresh_process"].get("comparison")}
    for name, found in {**report["comparisons"], **fresh}.items():
        if found is not None:
            parts = [
                f"{found[head]['logits']:.6g} | {found[head]['probabilities']:.6g} | "
                f"{found[head]['argmax']}/{found[head]['rows']}"
                for head in HEADS
            ]
            lines.append(f"| {name} | {' | '.join(parts)} |")
    if "explicit compiled" in columns:
        ratios = [report["speedup"][shape]["explicit compiled"] for shape in report["speedup"]]
        met = ratios[0] >= GOAL and min(ratios) >= 1
        lines += [
            "",
            f"Goal (AOTI {GOAL}x compiled at the first shape, no slower at any): {'met' if met else 'NOT met'}.",
        ]
    return "\n".join(lines)


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check the decision model as an AOTInductor package.")
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR", help="where the files go")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a local checkpoint; default, random weights")
    parser.add_argument("--size", choices=("tiny", "base"), default="tiny", help="of the random model (tiny)")
    parser.add_argument("--layers", type=int, metavar="N", help="of the random model, instead of its size's")
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda; default cuda if there is one, else cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="of the packaged weights (bf16)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of random weights and inputs (0)")
    parser.add_argument("--tolerance", type=float, metavar="X", help="largest difference of a probability")
    parser.add_argument("--quick", action="store_true", help="time little, and no torch.compile")
    parser.add_argument("--reload", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if args.tolerance is None:
        args.tolerance = TOLERANCES[DTYPES[args.dtype]]
    if args.layers is not None and args.layers < 1:
        parser.error(f"--layers {args.layers}: expected 1 or more")
    if args.model is not None and not args.model.is_dir():
        parser.error(f"--model {args.model}: there is no such folder")
    return args


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    try:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        print(f"check_aoti: --device {args.device!r} is no device", file=sys.stderr)
        return 2
    if args.reload:
        answer = reload(args.output_dir, device, args.tolerance)
        print(json.dumps(answer))
        return 0 if answer["ok"] else 1
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for name in ("decision.pt2", "inputs.pt", "eager.pt", "results.json", "results.md"):
        (args.output_dir / name).unlink(missing_ok=True)  # what lies there afterwards is this run's
    try:
        ready(device)
        with torch.no_grad():
            report = check(args, device, args.output_dir)
    except Skip as why:
        print(f"SKIP: {why}")
        report = {"status": "skip", "reason": str(why)}
    except Exception as error:  # noqa: BLE001 - whatever it was, it is the result of the check
        traceback.print_exc()
        print(f"FAILED: {type(error).__name__}")
        report = {"status": "failed", "ok": False, "error": f"{type(error).__name__}: {error}"}
    else:
        text = tables(report)
        (args.output_dir / "results.md").write_text(text + "\n", encoding="utf-8")
        print(f"\n{text}\n\n{'ok' if report['ok'] else 'FAILED'}")
        if not report["fresh_process"]["ok"] and "error" in report["fresh_process"]:
            print(report["fresh_process"]["error"], file=sys.stderr)
    (args.output_dir / "results.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if report.get("ok", True) else 1


if __name__ == "__main__":
    sys.exit(main())
