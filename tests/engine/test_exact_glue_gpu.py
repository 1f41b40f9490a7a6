"""Kernels with torch's bits on a GPU: dtypes, shapes and layouts, and a decoder with and without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseboard.engine.decoder import QwenDecoder
from fuseboard.engine.decoder.config import DecoderConfig
from fuseboard.engine.decoder.kernels.exact import ExactGlue, exact_for
from fuseboard.engine.decoder.kernels.launch import Launcher
from fuseboard.engine.decoder.kv_cache import as_one
from fuseboard.engine.decoder.norms import upcast_norm
from fuseboard.engine.decoder.rope import rotate
from fuseboard.engine.decoder.steps import DecoderSteps
from fuseboard.engine.decoder.whole_step import WholeSteps
from fuseboard.engine.graphs import Graphs

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "small": {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24},
    "wide": {"hidden_size": 5120, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 80},
    "qwen2": {"model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2},
}
HALVES = [torch.bfloat16, torch.float16]
BATCHES = (1, 2, 3, 8, 33)


def config_of(shape: str) -> DecoderConfig:
    base = {"model_type": "qwen3", "vocab_size": 64, "intermediate_size": 3000, "num_hidden_layers": 2}
    return DecoderConfig.of(base | SHAPES[shape])


def glue_of(shape: str, dtype: torch.dtype) -> ExactGlue:
    found = exact_for(torch.device("cuda", torch.cuda.current_device()), dtype, config_of(shape))
    assert isinstance(found, ExactGlue), found
    return found


def drawn(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, device="cuda", generator=generator) * scale).to(dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_trial_passes_and_compiled_kernels_are_launched_by_themselves(shape: str, dtype: torch.dtype) -> None:
    assert glue_of(shape, dtype).direct


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_norms_rotations_and_gates_have_torch_s_bits(shape: str, dtype: torch.dtype) -> None:
    glue, config = glue_of(shape, dtype), config_of(shape)
    heads, kv_heads, dim, eps = (
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rms_norm_eps
    )  # fmt: skip
    both = heads + kv_heads
    for seed in range(20):
        batch = BATCHES[seed % len(BATCHES)]
        for size in (config.hidden_size, dim):
            x, delta = (
                drawn(batch, 1, size, dtype=dtype, scale=10.0 ** (seed % 5 - 2), seed=seed + at) for at in (0, 50)
            )
            weight = drawn(size, dtype=dtype, seed=seed)
            total, out = glue.norm(x, weight, eps, delta=delta)
            assert torch.equal(total, x + delta)
            assert torch.equal(out, weight * upcast_norm(x + delta, eps))
            assert torch.equal(glue.norm(x, None, eps)[1], upcast_norm(x, eps))

        qkv = drawn(batch, 1, both + kv_heads, dim, dtype=dtype, seed=seed)
        q, k, v = qkv[:, :, :heads], qkv[:, :, heads:both], qkv[:, :, both:]
        weights = (drawn(dim, dtype=dtype, seed=seed), drawn(dim, dtype=dtype, seed=seed + 1)) if seed % 2 else None
        rows = batch if seed % 3 else 1
        cos, sin = (drawn(rows, 1, 1, dim, dtype=dtype, seed=seed + at) for at in (2, 3))
        for joined in (False, True):
            found = glue.rotate(q, k, v, weights, cos, sin, joined=joined)
            weighted = (q, k) if weights is None else (weights[0] * q, weights[1] * k)
            wanted = [rotate(each, cos, sin).transpose(1, 2) for each in weighted]
            assert all(map(torch.equal, found, (*wanted, v.transpose(1, 2))))
            assert as_one(found[1], found[2]) is not None
            held = rotate(qkv[:, :, :both] if joined else q.contiguous(), cos, sin)[:, :, :heads]
            assert found[0].stride() == held.transpose(1, 2).stride()

        gate_up = drawn(batch, 1, 2 * config.intermediate_size, dtype=dtype, scale=8.0, seed=seed)
        for gate, up in (gate_up.chunk(2, dim=-1), [each.contiguous() for each in gate_up.chunk(2, dim=-1)]):
            assert torch.equal(glue.silu_mul(gate, up), F.silu(gate) * up)


# ---- a decoder


def made(dtype: torch.dtype, exact: bool, **given: Any) -> QwenDecoder:
    shape = {
        "model_type": "qwen3", "vocab_size": 512, "hidden_size": 1024, "intermediate_size": 1536,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    }  # fmt: skip
    decoder = QwenDecoder(shape | given)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(each.shape, generator=generator) * (0.2 if each.dim() > 1 else 1.0)
        for name, each in decoder.named_parameters()
    }
    decoder.load(weights, device="cuda", dtype=dtype)
    decoder.exact_glue = exact
    return decoder


@torch.no_grad()
def logits_of(decoder: QwenDecoder, how: str, batch: int) -> Tensor:
    ids = torch.randint(2, 512, (batch, 19), generator=torch.Generator().manual_seed(batch)).cuda()
    mask = torch.ones(batch, 19, dtype=torch.long)
    mask[1:, :6] = 0
    cache = decoder.cache(batch, attention_mask=mask)
    logits = decoder(ids, cache=cache, keep=1)
    step: Any = {"eager": lambda ids, cache: decoder(ids, cache=cache), "fixed": decoder.step}.get(how)
    if how == "layers":
        step = DecoderSteps(decoder, Graphs("cuda"))
    if how == "whole":
        step = WholeSteps(decoder, Graphs("cuda"))
    held: Any = decoder.fixed(cache) if how in ("fixed", "whole") else cache
    found = [logits]
    for _ in range(6):
        found.append(step(found[-1][:, -1:].argmax(-1), held))
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("how", ["eager", "layers", "fixed", "whole"])
@pytest.mark.parametrize("given", [{}, {"model_type": "qwen2"}, {"use_sliding_window": True, "sliding_window": 8,
                                                                "max_window_layers": 1}], ids=str)  # fmt: skip
def test_steps_have_the_bits_of_steps_without_the_kernels(
    given: dict[str, Any], how: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, launch = [], Launcher.__call__

    def counted(self: Launcher, *given: Any) -> None:
        launched.append(self)
        launch(self, *given)

    monkeypatch.setattr(Launcher, "__call__", counted)
    for fused in (False, True):
        for batch in (1, 3):
            glued, plain = made(dtype, True, **given), made(dtype, False, **given)
            if fused:
                glued.fuse()
                plain.fuse()
            want = logits_of(plain, how, batch)
            assert glued.report()["exact_glue"] == "Triton, one token at a time", glued.report()
            launched.clear()
            assert torch.equal(logits_of(glued, how, batch), want), (fused, batch)
            assert launched


@torch.no_grad()
def test_a_layer_of_a_step_takes_half_the_launches() -> None:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    found = []
    for exact in (False, True):
        decoder = made(torch.bfloat16, exact)
        cache = decoder.cache(1)
        ids = decoder(torch.ones(1, 19, dtype=torch.long, device="cuda"), cache=cache, keep=1).argmax(-1)
        decoder(ids, cache=cache)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            decoder(ids, cache=cache)
            torch.cuda.synchronize()
        events = [each for each in seen.events() if each.device_type == DeviceType.CUDA]
        found.append(sum(not each.name.startswith(("Memset", "ProfilerStep")) for each in events))

    assert found[1] < 0.65 * found[0], found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@torch.no_grad()
def test_a_decoder_elsewhere_than_on_the_current_device_has_torch_s_kernels_or_is_right() -> None:
    glued, plain = (made(torch.bfloat16, exact).to("cuda:1") for exact in (True, False))
    ids = torch.ones(2, 7, dtype=torch.long, device="cuda:1")
    for where in (0, 1):
        with torch.cuda.device(where):
            for graphs in (False, True, "step"):
                glued.graphs = plain.graphs = graphs
                assert torch.equal(*(each.generate(ids, max_new_tokens=8) for each in (glued, plain)))
