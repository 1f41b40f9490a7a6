"""A child pytest that finds a double by the public door: the entry point of an installed distribution."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Kit = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    """Run `pytest --fuseboard-backend NAME` in a folder of its own, with that double installed."""

    def run(name: str, double: str, *options: str, source: str = "") -> subprocess.CompletedProcess[str]:
        site = tmp_path / "site"
        info = site / f"double_{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: double-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[fuseboard.backends]\n{name} = {double}\n")
        if source:
            (site / "double_source.py").write_text(source)
        return child(
            tmp_path, site, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--fuseboard-backend", name, *options
        )

    return run


def child(folder: Path, path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)
