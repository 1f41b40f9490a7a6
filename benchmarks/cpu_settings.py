"""What the CPU settings save: page faults and time of a chain of elementwise operations, in the main thread or another.

Each row's processes run in turn: bare, after `cpu.apply()`, and with the environment of `cpu.child_env()`. A process
reports the median over its repetitions after a warm-up, and a hash of its result, which must be the same for all. How
many times as fast is a ratio within a round. Nothing else is asserted.

    python benchmarks/cpu_settings.py [--quick] [--rounds N] [--json FILE] [--out FILE] [--readme]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _report import aligned, arguments, keep, listed, machine, versions

from fuseboard.engine import cpu

SIZES = {"49 MB": 12_250_000, "100 MB": 25_000_000}
WAYS = ("bare", "apply", "child_env")
WARM, TURNS = 12, 15
CLEAN = ("OMP_", "MKL_", "GOMP_", "KMP_", "MALLOC_", "GLIBC_TUNABLES", "THP_", "LD_PRELOAD")


# ---- in a child


def child(way: str, where: str, count: int) -> dict[str, Any]:
    """Faults, seconds and system seconds of one iteration, medians; peak memory; a hash of the results."""
    if way == "apply":
        cpu.apply()
    import torch

    found: dict[str, Any] = {}

    def loop() -> None:
        x = torch.arange(count, dtype=torch.float32)
        rows = []
        for _ in range(WARM + TURNS):
            before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            y = torch.relu(x * 2 + 1)
            seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
            rows.append((after.ru_minflt - before.ru_minflt, seconds, after.ru_stime - before.ru_stime))
            del y
        medians = [statistics.median(column) for column in zip(*rows[WARM:], strict=True)]
        found.update(zip(("faults", "seconds", "system_seconds"), medians, strict=True))
        found["hash"] = hashlib.sha256(memoryview(torch.relu(x * 2 + 1).numpy()).cast("B")).hexdigest()

    run(loop, where)
    return found | {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def run(loop: Callable[[], None], where: str) -> None:
    if where == "main":
        loop()
        return
    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()


# ---- asking


def ask(way: str, where: str, count: int) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(CLEAN)} | {"OMP_NUM_THREADS": "1"}
    if way == "child_env":
        env = cpu.child_env(env)
    command = [sys.executable, __file__, "--child", way, where, str(count)]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)  # noqa: S603 - this script
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def measure(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for size, count in SIZES.items():
        for where in ("main", "worker"):
            runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
            for turn in range(rounds):
                for way in WAYS[turn % len(WAYS) :] + WAYS[: turn % len(WAYS)]:
                    runs[way].append(ask(way, where, count))
            if len({each["hash"] for found in runs.values() for each in found}) != 1:
                msg = f"results differ between {', '.join(WAYS)} at {size} in the {where} thread"
                raise SystemExit(msg)
            rows += [row(size, where, way, runs[way], runs["bare"]) for way in WAYS]
    return rows


def row(size: str, where: str, way: str, found: list[dict[str, Any]], bare: list[dict[str, Any]]) -> dict[str, Any]:
    def median(name: str) -> float:
        return statistics.median(each[name] for each in found)

    ratios = [before["seconds"] / after["seconds"] for before, after in zip(bare, found, strict=True)]
    fewer = [before["faults"] / max(after["faults"], 1) for before, after in zip(bare, found, strict=True)]
    return {
        "size": size,
        "thread": where,
        "way": way,
        "faults": median("faults"),
        "fewer_faults": round(min(fewer), 1),
        "ms": round(median("seconds") * 1e3, 2),
        "system_ms": round(median("system_seconds") * 1e3, 2),
        "speedup": round(statistics.median(ratios), 2),
        "speedup_range": [round(min(ratios), 2), round(max(ratios), 2)],
        "peak_mb": round(median("peak_mb")),
        "runs": [{name: value for name, value in each.items() if name != "hash"} for each in found],
    }


# ---- shown


def render(result: dict[str, Any]) -> str:
    """The table as text."""
    head = ("x * 2 + 1, relu; one iteration", "faults", "ms", "of it system", "times as fast", "peak MB")
    rows = []
    for each in result["rows"]:
        low, high = each["speedup_range"]
        fast = "" if each["way"] == "bare" else f"{each['speedup']:.1f} ({low:.1f} to {high:.1f})"
        name = f"{each['size']}, {each['thread']} thread: {each['way']}"
        rows.append(
            (
                name,
                f"{each['faults']:,.0f}",
                f"{each['ms']:.1f}",
                f"{each['system_ms']:.1f}",
                fast,
                f"{each['peak_mb']}",
            )
        )
    shown = listed(result["versions"])
    about = result["machine"]
    facts = f"{about['cpu']}, {about['system']}, {about['libc']}, huge pages {about['huge_pages']}, 1 thread; {shown}"
    return f"{aligned(head, rows)}\n\n{facts}; {result['rounds']} processes each."


def huge_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
    except OSError:
        return "none"
    return text.partition("[")[2].partition("]")[0]


def main() -> int:
    parser = arguments(__doc__, rounds=7, each="processes per row", quick="one process per row", readme=True)
    parser.add_argument("--child", nargs=3, metavar=("WAY", "THREAD", "COUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        way, where, count = options.child
        print(json.dumps(child(way, where, int(count))))
        return 0
    said = cpu.report()
    if not said["children"]:
        print(f"nothing to measure: {said['reason']}")
        return 0
    rounds = 1 if options.quick else options.rounds
    result = {
        "rounds": rounds,
        "warm": WARM,
        "turns": TURNS,
        "versions": versions("torch", "fuseboard"),
        "machine": machine() | {"libc": said["libc"], "huge_pages": huge_pages()},
        "rows": measure(rounds),
    }
    text = render(result)
    print(text)
    keep(options, "cpu_settings", result, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
