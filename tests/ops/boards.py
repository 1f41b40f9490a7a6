"""A folder of fake distributions, first on the path, and the real command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PLUGIN = """
import torch
import fuseboard as fb

@fb.hookimpl
def info():
    return fb.BackendInfo("a fake", requires={requires!r}, homepage="https://example.org")

@fb.hookimpl
def constraints():
    return fb.Constraints(devices={devices!r}, dtypes={{torch.float32}}, head_dims=fb.HeadDims(only={{64}}))

@fb.hookimpl
def exactness():
    return fb.Exactness.EXACT

@fb.hookimpl
def known_bad():
    return {known_bad}

@fb.hookimpl
def install_line(torch_version):
    return "pip install --no-deps {name}-kernel  # for " + torch_version

@fb.hookimpl
def kernel(device):
    import {name}_kernel
    return {name}_kernel.attention
"""

KERNEL = """
import torch.nn.functional as F

def attention(q, k, v, *, mask, mask_info, causal, scale, dropout_p):
    return F.scaled_dot_product_attention(q, k, v, scale=scale)
"""


class Board:
    """Fake plugins and kernel packages in a folder, and the command run with them installed."""

    def __init__(self, folder: Path) -> None:
        self.site = folder / "site"
        self.site.mkdir(parents=True)
        self.cache = folder / "cache"
        self.path = [str(self.site), *sys.path]

    def distribution(self, name: str, version: str = "1.0", entry_points: str = "") -> None:
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if entry_points:
            (info / "entry_points.txt").write_text(f"[fuseboard.backends]\n{entry_points}\n")

    def module(self, name: str, text: str) -> None:
        (self.site / f"{name}.py").write_text(text)

    def plugin(
        self, name: str, kernel: str | None = KERNEL, *, plugin: str | None = None, version: str = "2.0",
        devices: tuple[str, ...] = ("cpu",), known_bad: str = "()", distribution: str | None = None,
    ) -> None:  # fmt: skip
        """A plugin of a backend and, but for `kernel=None`, the kernel package that it requires in a version from 2."""
        requires = {f"{name}-kernel": ">=2,<3"}
        text = PLUGIN.format(name=name, requires=requires, devices=devices, known_bad=known_bad)
        self.module(f"{name}_plugin", text if plugin is None else plugin)
        self.distribution(distribution or f"{name}-plugin", entry_points=f"{name} = {name}_plugin")
        if kernel is not None:
            self.distribution(f"{name}-kernel", version)
            self.module(f"{name}_kernel", kernel)

    def run(
        self, *arguments: str, python: tuple[str, ...] = (), cwd: Path | None = None, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """`fuseboard ARGUMENTS`, with every setting of the caller's own taken away."""
        return subprocess.run(
            [sys.executable, *python, "-m", "fuseboard", *arguments],
            env=self.environ(**environ), cwd=cwd or self.site, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip

    def environ(self, **more: str) -> dict[str, str]:
        kept = {name: text for name, text in os.environ.items() if not name.startswith("FUSEBOARD_")}
        path = os.pathsep.join(self.path)
        return kept | {"PYTHONPATH": path, "FUSEBOARD_CACHE": str(self.cache), "OMP_NUM_THREADS": "1"} | more
