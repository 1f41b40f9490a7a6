"""Trying Triton kernels beside the formula on the device where they would run, before any of them is used."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn

from fuseboard.engine.decoder.kernels.launch import compiling, on
from fuseboard.engine.decoder.norms import RMSNorm
from fuseboard.failure import Meaning, classify
from fuseboard.registry import first_line

__all__ = ["Case", "Draws", "differing", "launches_early", "tried"]

_Made = TypeVar("_Made")


def tried(name: str, device: torch.device, trial: Callable[[Any, bool], _Made | str]) -> _Made | str:
    """What a trial makes of the Triton kernels of a module, or why there are none.

    Args:
        name: Of the module beside this one, which imports Triton.
        device: Where they shall run.
        trial: Given the module, and whether Triton's interpreter runs it, gives what uses them or what is wrong with
            them. It runs without gradients, and waits for the device.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        kernels = importlib.import_module(f"fuseboard.engine.decoder.kernels.{name}")
        interpreted = any("Interpreted" in type(each).__name__ for each in vars(kernels).values())
        # What runs on the CPU is Triton's interpreter, which is there for tests.
        if device.type != "cuda" and not interpreted:
            return f"Triton's kernels do not run on {device.type}"
        with on(device), torch.inference_mode(mode=False), torch.no_grad():
            return trial(kernels, interpreted)
    except Exception as error:
        meaning = classify(error)
        if meaning is Meaning.OUT_OF_MEMORY:  # the decoder may well go on without them
            return "too little memory is free to try its kernels"
        if meaning is not Meaning.BROKEN:
            raise
        return f"its kernels failed: {first_line(error)}"


def launches_early(kernels: Any, device: torch.device) -> bool:
    """Whether a kernel can begin there before the kernel before it has ended."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and kernels.LAUNCHES_EARLY and torch.cuda.get_device_capability(device) >= (9, 0)


@attrs.define
class Draws:
    """Random numbers to try kernels with, where they shall run, whatever the caller's default device.

    Attributes:
        device: Where.
        dtype: Of the numbers.
        eps: Of the norms.
    """

    device: torch.device
    dtype: torch.dtype
    eps: float
    generator: torch.Generator = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(0)

    def numbers(self, *shape: int) -> Tensor:
        """Of a normal distribution."""
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def norm(self, size: int) -> RMSNorm:
        """With random weights; called, it is transformers' formula."""
        norm = RMSNorm(size, self.eps)
        norm.weight = nn.Parameter(self.numbers(size), requires_grad=False)
        return norm

    def linear(self, wide: int, tall: int, *, bias: bool = False) -> nn.Linear:
        """One that leaves numbers as large as they were."""
        linear = nn.Linear(wide, tall, bias=bias, device="meta")
        linear.weight = nn.Parameter(self.numbers(tall, wide).div_(wide**0.5), requires_grad=False)
        if bias:
            linear.bias = nn.Parameter(self.numbers(tall), requires_grad=False)
        return linear

    def near(self, mine: Tensor, theirs: Tensor) -> bool:
        """Equal but for the last bits."""
        # A last bit of a norm may be another, and what is subtracted afterwards makes it the larger beside the rest.
        bits = 1e-5 if self.dtype == torch.float32 else 4 * torch.finfo(self.dtype).eps
        apart = (mine.float() - theirs.float()).abs().max()
        return mine.shape == theirs.shape and bool(apart <= bits * theirs.float().abs().max())


@attrs.frozen
class Case:
    """Something that a kernel and a formula compute.

    Attributes:
        name: What it is.
        mine: Launches the kernel.
        formula: Gives the same, by torch.
    """

    name: str
    mine: Callable[[], tuple[Tensor, ...]]
    formula: Callable[[], tuple[Tensor, ...]]


def differing(cases: list[Case], draws: Draws, *, interpreted: bool) -> str | None:
    """What of it is not the formula's beyond the last bits, if anything.

    Args:
        cases: Each is launched twice, since the second time compiled kernels are launched by themselves.
        draws: For what is near.
        interpreted: By Triton's interpreter, which compiles nothing.
    """
    if not interpreted:
        _compile(cases, draws.device)
    for _ in range(1 if interpreted else 2):
        for case in cases:
            if not all(map(draws.near, case.mine(), case.formula())):
                return case.name
    return None


def _compile(cases: list[Case], device: torch.device) -> None:
    """Beside one another: each takes most of a second. What fails here fails again when it is launched."""

    def one(case: Case) -> None:
        with contextlib.suppress(Exception), on(device), torch.no_grad(), compiling():
            case.mine()

    with ThreadPoolExecutor(min(len(cases), os.cpu_count() or 1)) as pool:
        list(pool.map(one, cases))
