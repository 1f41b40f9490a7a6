"""Products of few rows as Triton kernels, by Triton's interpreter: the formula's numbers for every shape of a step."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from fuseboard.engine.decoder import QwenDecoder
from fuseboard.engine.decoder.config import DecoderConfig
from fuseboard.engine.decoder.kernels.products import _tile, products_for

SHAPE = {
    "model_type": "qwen3", "vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
CPU = torch.device("cpu")

HARNESS = """
import torch
import torch.nn.functional as F
from fuseboard.engine.decoder.config import DecoderConfig
from fuseboard.engine.decoder.kernels import products as room
from fuseboard.engine.decoder.kernels.products import Products, products_for
from fuseboard.engine.decoder.kernels.trial import Draws

SHAPE = {shape}

def wanted(x, linear, norm, gated, add):
    x = x.double()
    if norm is not None:
        x = x * (x.pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    y = x @ linear.weight.double().T
    if linear.bias is not None:
        y = y + linear.bias.double()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if add is None else y + add.double()

def differs(made, dtype, wide, tall, **how):
    draws = Draws(torch.device("cpu"), dtype, 1e-6)
    x = draws.numbers(made.rows, wide)
    linear = draws.linear(wide, 2 * tall if how.get("gated") else tall, bias=how.pop("bias", False))
    norm = draws.norm(wide) if how.pop("norm", False) else None
    add = draws.numbers(made.rows, tall) if how.pop("add", False) else None
    want = wanted(x, linear, norm, how.get("gated", False), add)
    found = made(x, linear, norm=norm, add=add, **how)
    assert found.shape == want.shape and found.dtype == dtype
    return float((found.double() - want).abs().max() / want.abs().max())
"""


def interpreted(body: str) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", HARNESS.format(shape=SHAPE) + body], capture_output=True, text=True, timeout=300,
        env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


INTERPRETED = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.slow
@INTERPRETED
def test_every_number_of_rows_and_every_part_inside_gives_the_formula_s_numbers() -> None:
    found = interpreted(
        """
config = DecoderConfig.of(SHAPE)
cases = [{"norm": True, "bias": True}, {"norm": True, "gated": True}, {"add": True}, {"add": True, "bias": True}, {}]
worst = {}
for dtype, rows in [(torch.float16, n) for n in (1, 2, 3, 7, 8, 9, 15, 16)] + [(torch.float32, n) for n in (1, 2, 3)]:
    made = products_for(torch.device("cpu"), dtype, config, rows=rows, early=False)
    assert isinstance(made, Products), made
    for case in cases:
        for wide, tall in ((64, 48), (70, 33), (24, 100)):
            worst[dtype] = max(worst.get(dtype, 0.0), differs(made, dtype, wide, tall, **case))
print(worst[torch.float16] < 4e-3, worst[torch.float32] < 1e-5, worst)
"""
    )
    assert found.startswith("True True"), found


@pytest.mark.slow
@INTERPRETED
def test_a_width_that_goes_in_parts_held_or_not_gives_the_formula_s_numbers() -> None:
    found = interpreted(
        """
import attrs
made = products_for(torch.device("cpu"), torch.float16, DecoderConfig.of(SHAPE), rows=5, early=False)
seen, worst = set(), 0.0
for shared in (8192, 16384, 101376, 232448):
    one = attrs.evolve(made, shared=shared)
    for wide in (600, 1500, 3072):
        for case in ({"norm": True}, {"norm": True, "gated": True}, {"add": True}):
            _, deep, held = room._tile(wide, 24, one.padded, shared, gated=case.get("gated", False))
            seen.add((-(-wide // (4 * deep)) > 1, held))
            worst = max(worst, differs(one, torch.float16, wide, 24, **case))
print(worst < 4e-3, sorted(seen))
"""
    )
    assert found == "True [(False, 1), (True, 1), (True, 2), (True, 3)]\n"


def test_tiles_fit_twice_into_a_multiprocessor_s_shared_memory() -> None:
    for shared in (101376, 166912, 232448):
        for padded in (8, 16):
            for wide in (16, 64, 70, 896, 1024, 2048, 3072, 5120, 12288, 16384):
                for gated in (False, True):
                    block, deep, held = _tile(wide, 4096, padded, shared, gated=gated)
                    part = 2 * 4 * deep
                    assert part * (padded + held * block * (1 + gated)) <= shared // 2
                    assert 1 <= held <= -(-wide // (4 * deep))
                    assert deep >= 16
                    assert deep & (deep - 1) == 0


def test_what_is_not_multiplied_says_why() -> None:
    config = DecoderConfig.of(SHAPE)
    many = products_for(CPU, torch.float16, config, rows=17, early=False)
    long = products_for(CPU, torch.float32, config, rows=4, early=False)
    wide = products_for(CPU, torch.float16, DecoderConfig.of(SHAPE | {"intermediate_size": 16386}), rows=1, early=False)
    double = products_for(CPU, torch.float64, config, rows=1, early=False)

    assert many == "of more than 16 rows cuBLAS makes them faster"
    assert long == "of more than 3 rows cuBLAS makes them faster"
    assert wide == "its kernels add at most 16384 products, and there are 16386"
    assert double == "its kernels do not compute torch.float64"


def test_the_report_says_for_each_number_of_rows_what_multiplied() -> None:
    decoder = QwenDecoder(SHAPE)
    generator = torch.Generator().manual_seed(0)
    decoder.load({name: torch.randn(each.shape, generator=generator) for name, each in decoder.named_parameters()})
    assert decoder.fuse(glue=True).report()["products"] == "not asked for"
    decoder.fuse(products=True)
    assert decoder.report()["products"] == {}
    decoder.graphs = "step"
    for rows in (5, 1):
        decoder.generate(torch.ones(rows, 3, dtype=torch.int64), max_new_tokens=3, eos=())

    said = decoder.report()["products"]
    assert list(said) == ["1", "5"]
    assert said["5"] == "of more than 3 rows cuBLAS makes them faster"
    assert said["1"] in ("Triton is not installed", "Triton's kernels do not run on cpu")
