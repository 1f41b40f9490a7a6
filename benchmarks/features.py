"""What each process switch gains and costs in exactness: matrix products, a convolution, torch's math attention.

Each switch is measured in a process of its own, applied at its start, beside a process without switches; all compute
the same operations on the same numbers. The error is the largest difference from float64, relative to the largest
value. Needs a CUDA device: without one it says so and ends well. Nothing is asserted about times: they belong to
machines.

    python benchmarks/features.py [--quick] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _report import aligned, machine, versions

PACKAGES = ("torch", "fuseboard")
NONE = "none"
WARM = 10


def operations() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Each operation on the device, and the same in float64."""
    import torch
    import torch.nn.functional as F  # noqa: N812

    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", generator=generator)

    def product(dtype: Any, m: int, k: int, n: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        a, b = draw(m, k).to(dtype), draw(k, n).to(dtype)
        return (lambda: a @ b), (lambda: a.double() @ b.double())

    found = {}
    for dtype, word in ((torch.float32, "fp32"), (torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        found[f"{word} product 4096x4096x4096"] = product(dtype, 4096, 4096, 4096)
        found[f"{word} product 64x65536x64"] = product(dtype, 64, 65536, 64)
    for dtype, word in ((torch.float32, "fp32"), (torch.float16, "fp16")):
        x, w = draw(4, 256, 8000).to(dtype), draw(256, 256, 11).to(dtype)
        found[f"{word} convolution 256 to 256, width 11"] = (
            lambda x=x, w=w: F.conv1d(x, w, padding=5),
            lambda x=x, w=w: F.conv1d(x.double(), w.double(), padding=5),
        )
    q = draw(4, 16, 1024, 64).bfloat16()
    math = torch.ops.aten._scaled_dot_product_attention_math
    found["bf16 math attention 4x16x1024x64"] = (lambda: math(q, q, q)[0], lambda: math(*[q.double()] * 3)[0])
    return found


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Times and errors of every operation in this process, under one switch."""
    from fuseboard.engine import features

    applied = features.apply([] if name == NONE else [name])
    import torch

    found: dict[str, Any] = {}
    for label, (compute, exact) in operations().items():
        for _ in range(WARM):
            compute()
        times = []
        for _ in range(rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            compute()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        want = exact()
        error = ((compute().double() - want).abs().max() / want.abs().max()).item()
        found[label] = {"us": round(statistics.median(times), 1), "error": error}
    return {
        "applied": applied.as_json(),
        "operations": found,
        "gpu": torch.cuda.get_device_name(),
        "fast": features.report()["params"],
    }


def in_a_process(name: str, rounds: int) -> dict[str, Any]:
    """The same in a fresh process."""
    command = [sys.executable, __file__, "--one", name, "--rounds", str(rounds)]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        msg = f"measuring {name} failed:\n{done.stderr}"
        raise SystemExit(msg)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def rows_of(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per switch and operation, with its gain over no switch."""
    base = results[NONE]["operations"]
    return [
        {
            "switch": name,
            "operation": label,
            "us": found["us"],
            "gain": round(base[label]["us"] / found["us"], 2),
            "error": found["error"],
            "error_without": base[label]["error"],
        }
        for name, result in results.items()
        for label, found in result["operations"].items()
    ]


def render(result: dict[str, Any]) -> str:
    """The table as text: every operation without switches, then what each switch changes."""
    head = ("switch: operation", "us", "gain", "error", "without")
    lines = [
        (f"{row['switch']}: {row['operation']}", f"{row['us']:,.1f}", f"{row['gain']:.2f}x", f"{row['error']:.1e}",
         f"{row['error_without']:.1e}")
        for row in result["rows"]
        if row["switch"] == NONE or row["error"] != row["error_without"] or not 0.95 < row["gain"] < 1.05  # noqa: PLR2004
    ]  # fmt: skip
    shown = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    refused = "".join(f"\nnot measured: {name}, {reason}" for name, reason in result["refused"].items())
    note = "Left out: rows within 5 % of the time without switches, and with the same error."
    return f"{aligned(head, lines)}\n\n{result['gpu']}; {shown}; {result['rounds']} rounds. {note}{refused}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=100, help="how often every operation is timed (default %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="two rounds: shows that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--one", metavar="SWITCH", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.rounds)))
        return 0

    import torch

    if not torch.cuda.is_available():
        print(
            f"SKIP: no CUDA device (torch {torch.__version__}); these switches change nothing that a CPU is timed at."
        )
        return 0
    from fuseboard.engine.features import SWITCHES

    rounds = 2 if arguments.quick else arguments.rounds
    results = {name: in_a_process(name, rounds) for name in (NONE, *SWITCHES)}
    refused = {name: reason for each in results.values() for name, reason in each["applied"]["refused"].items()}
    results = {name: each for name, each in results.items() if name not in refused}
    result = {
        "rows": rows_of(results),
        "refused": refused,
        "versions": versions(*PACKAGES),
        "machine": machine(),
        "gpu": results[NONE]["gpu"],
        "rounds": rounds,
    }
    print(render(result))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
