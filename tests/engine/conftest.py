"""What tests of Triton kernels share: the interpreter, which runs in a process of its own, and a product in fp64."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture
def interpreted() -> Callable[..., str]:
    """Gives what a script prints in a process that has Triton's interpreter, and these folders in its path."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")

    def run(script: str, *folders: Path) -> str:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        path = [*map(str, folders), *filter(None, [environment.get("PYTHONPATH")])]
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False,
            env=environment | {"PYTHONPATH": os.pathsep.join(path)}, cwd=Path(__file__).parent,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


def wanted(x: Tensor, linear: nn.Linear, norm: Any, gated: bool, add: Tensor | None) -> Tensor:
    x = x.double()
    if norm is not None:
        x = x * (x.pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    y = x @ linear.weight.double().T
    if linear.bias is not None:
        y = y + linear.bias.double()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    return y if add is None else y + add.double()


@pytest.fixture
def product_fp64() -> Callable[..., Tensor]:
    """What `Products` computes, in float64: `wanted`, whose source a script can have too."""
    return wanted
