"""The table of times in the plugin's README is the one of the numbers that are kept, and says what is slower."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "tilelang_kernels.py"
KEPT = ROOT / "benchmarks" / "results" / "tilelang.json"


def shown(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_readme_s_table_is_that_of_the_numbers_that_are_kept() -> None:
    said = shown("--from", str(KEPT))

    assert said.returncode == 0, said.stderr
    assert said.stdout.strip() in (ROOT / "plugins" / "tilelang" / "README.md").read_text(encoding="utf-8")
    assert said.stdout == KEPT.with_suffix(".md").read_text(encoding="utf-8")


def test_a_slower_row_is_named_and_compared_with_what_computes_the_same(tmp_path: Path) -> None:
    rows = {
        "won": {"time": {"device": 4.0, "call": 9.0}, "peer torch": {"device": 8.0, "call": 8.0}},
        "lost": {"time": {"device": 4.0}, "peer torch": {"device": 8.0}, "peer torch.compile": {"device": 2.0}},
        "unlike": {
            "time": {"device": 4.0},
            "peer cudnn, nothing hidden": {"device": 1.0},
            "peer torch": {"device": 5.0},
        },
        "failed": {"time": {"error": "it ended"}, "peer torch": {"device": 5.0}},
        "absent": {},
    }
    path = tmp_path / "tilelang.json"
    path.write_text(json.dumps({"facts": {"date": "today"}, "note": "by hand", "rows": rows}), encoding="utf-8")
    said = shown("--from", str(path)).stdout

    assert "Slower on the device than the best other: lost.\n" in said
    assert "Not measured in this run: absent.\n" in said
    assert said.startswith("date today\n\nby hand\n\n| kernel |")
    lines = [line for line in said.splitlines() if line.startswith(("| won", "| lost", "| unlike"))]
    assert [line.split(" | ")[-1] for line in lines] == ["0.50 |", "2.00 |", "0.80 |"]
    assert "it ended" in said


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("--compile-only", "--target", "sm_90a", "--only", "swish"),
            "--only 'swish' is found in no row; there are: gemm",
        ),
        (("--compile-only",), "needs a CUDA device; without one: --cpu, or --compile-only --target sm_90a"),
    ],
)
def test_a_command_that_can_do_nothing_says_what_would(arguments: tuple[str, ...], text: str) -> None:
    from fuseboard_tilelang import _package

    if "--target" in arguments and _package.gpu_problem() is not None:
        pytest.skip(_package.gpu_problem() or "")
    import torch

    if "--target" not in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    said = shown(*arguments)

    assert said.returncode == 1
    assert text in said.stderr
