"""Products of few rows by compiled Triton kernels: beside fp64, in the shapes of real models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fuseboard.engine.decoder.config import DecoderConfig
from fuseboard.engine.decoder.kernels.launch import on
from fuseboard.engine.decoder.kernels.products import Products, products_for
from fuseboard.engine.decoder.kernels.trial import Draws

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
SHAPES = {
    "tiny": (64, 96, 2, 1, 16), "odd": (120, 200, 3, 1, 24), "qwen3 0.6B": (1024, 3072, 16, 8, 128),
    "qwen2 0.5B": (896, 4864, 14, 2, 64), "qwen3 4B": (2560, 9728, 32, 8, 128), "qwen3 8B": (4096, 12288, 32, 8, 128),
}  # fmt: skip

LONG = ("qwen2 0.5B", "qwen3 4B", "qwen3 8B")


def config_of(shape: str) -> DecoderConfig:
    wide, inner, heads, kv_heads, dim = SHAPES[shape]
    return DecoderConfig.of({
        "model_type": "qwen2" if "2 " in shape else "qwen3", "vocab_size": 32, "hidden_size": wide,
        "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": dim,
    })  # fmt: skip


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize(
    ("dtype", "rows"),
    [(torch.bfloat16, rows) for rows in (1, 2, 3, 8, 9, 16)] + [(torch.float16, rows) for rows in (1, 8, 16)]
    + [(torch.float32, rows) for rows in (1, 3)],
)  # fmt: skip
@torch.no_grad()
def test_every_product_of_a_layer_is_as_near_to_fp64_as_its_dtype_allows(
    shape: str, dtype: torch.dtype, rows: int, product_fp64: Callable[..., Tensor]
) -> None:
    config = config_of(shape)
    made = products_for(DEVICE, dtype, config, rows=rows, early=True)
    if rows > 1 and dtype != torch.float32 and shape in LONG:
        assert made == "of more than one row, with sums this long, cuBLAS makes them faster"
        return
    assert isinstance(made, Products), made
    wide, inner, heads, kv_heads, dim = SHAPES[shape]
    draws = Draws(DEVICE, dtype, config.rms_norm_eps)
    for into, out, given in (
        (wide, (heads + 2 * kv_heads) * dim, {"norm": True, "bias": config.qkv_bias}),
        (heads * dim, wide, {"add": True}), (wide, inner, {"norm": True, "gated": True}), (inner, wide, {"add": True}),
    ):  # fmt: skip
        gated = given.get("gated", False)
        x, linear = draws.numbers(rows, into), draws.linear(into, out * (1 + gated), bias=given.get("bias", False))
        norm = draws.norm(into) if given.get("norm") else None
        add = draws.numbers(rows, out) if given.get("add") else None
        with on(DEVICE):
            found = made(x, linear, norm=norm, gated=gated, add=add)
        want = product_fp64(x, linear, norm, gated, add)
        eps = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
        assert float((found.double() - want).abs().max() / want.abs().max()) < 2 * eps, given


@torch.no_grad()
def test_the_same_numbers_have_the_same_bits_each_time_and_in_every_row() -> None:
    made = products_for(DEVICE, torch.bfloat16, config_of("qwen3 0.6B"), rows=8, early=True)
    assert isinstance(made, Products), made
    assert str(made) == "Triton, on tensor cores"
    draws = Draws(DEVICE, torch.bfloat16, 1e-6)
    x, linear, norm = draws.numbers(1, 1024).expand(8, -1).contiguous(), draws.linear(1024, 6144), draws.norm(1024)
    first = made(x, linear, norm=norm, gated=True)

    assert all(torch.equal(made(x, linear, norm=norm, gated=True), first) for _ in range(50))
    assert all(torch.equal(first[0], row) for row in first)
