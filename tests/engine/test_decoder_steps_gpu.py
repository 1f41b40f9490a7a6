"""`DecoderSteps` on a GPU: a decoder's steps by graphs are its eager steps in bits, whatever happens between them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuseboard as fb

hf = pytest.importorskip("transformers", reason="transformers is not installed")

from fuseboard.engine.decoder import QwenDecoder  # noqa: E402 - only where transformers is installed
from fuseboard.engine.decoder.steps import DecoderSteps  # noqa: E402
from fuseboard.engine.graphs import Graphs  # noqa: E402
from fuseboard.engine.sampling import Sampler  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

VOCABULARY, LAYERS = 512, 4
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def made(kind: str = "qwen3", **given: Any) -> QwenDecoder:
    makers = {"qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config), "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config)}
    model, config = makers[kind]
    head = {"head_dim": 64} if kind == "qwen3" else {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = model(config(**SMALL, **head, **given))
    return QwenDecoder.from_transformers(plain, device="cuda", dtype=torch.bfloat16)


def prompts(batch: int = 3, length: int = 17, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (batch, length), generator=generator)
    real = torch.arange(length) >= torch.tensor([0, 5, 11][:batch])[:, None]
    return ids.masked_fill(~real, 0).cuda(), real.long()


@torch.no_grad()
def run(
    decoder: QwenDecoder, steps: DecoderSteps | None, count: int = 12, seed: int = 0, padded: bool = True
) -> Tensor:
    """The logits of greedy steps, `(count, batch, vocab)`."""
    ids, mask = prompts(seed=seed)
    cache = decoder.cache(len(ids), attention_mask=mask if padded else None)
    logits, found = decoder(ids, cache=cache, keep=1), []
    for _ in range(count):
        ids = logits[:, -1].argmax(-1, keepdim=True)
        logits = decoder(ids, cache=cache) if steps is None else steps(ids, cache)
        found.append(logits[:, -1])
    return torch.stack(found)


@pytest.mark.parametrize("policy", ["auto", "exact"])
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("qwen3", {}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    ],
)
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_steps_by_graphs_are_the_eager_steps_in_bits(
    kind: str, given: dict[str, Any], padded: bool, fused: bool, policy: str
) -> None:
    decoder = made(kind, **given)
    if fused:
        decoder.fuse()
    graphs = Graphs("cuda")
    steps = DecoderSteps(decoder, graphs)
    with fb.bind(policy):
        eager = run(decoder, None, padded=padded)
        assert torch.equal(run(decoder, steps, padded=padded), eager)
        assert torch.equal(run(decoder, steps, padded=padded), eager)

    assert steps.report()["captured"] == LAYERS + 1
    assert steps.report()["eager steps"] == 0


def test_steps_that_fail_to_capture_are_the_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = made()
    eager = run(decoder, None)
    layer = decoder.model.layers[2]
    leave = type(layer).leave

    def waits(hidden: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        if torch.cuda.is_current_stream_capturing():
            attended.sum().item()
        return leave(layer, hidden, attended)

    monkeypatch.setattr(layer, "leave", waits)
    steps = DecoderSteps(decoder, Graphs("cuda"))

    assert torch.equal(run(decoder, steps), eager)
    assert torch.equal(run(decoder, steps), eager)
    assert steps.report()["failed"]
    assert steps.report()["eager steps"] == 24


def test_weights_that_move_between_steps_are_followed() -> None:
    decoder = made()
    steps = DecoderSteps(decoder, Graphs("cuda"))
    run(decoder, steps, count=2)
    for layer in decoder.model.layers:
        layer.mlp.down_proj.weight = nn.Parameter(layer.mlp.down_proj.weight * 0.5, requires_grad=False)

    assert torch.equal(run(decoder, steps), run(decoder, None))


def test_two_requests_on_two_threads_get_each_its_own_numbers() -> None:
    decoder = made()
    steps = DecoderSteps(decoder, Graphs("cuda"))
    want = {seed: run(decoder, None, count=40, seed=seed) for seed in (1, 2)}
    torch.cuda.synchronize()
    found, errors, barrier = {}, [], threading.Barrier(2)

    def body(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                barrier.wait()
                found[seed] = run(decoder, steps, count=40, seed=seed)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(seed,)) for seed in want]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert not errors, errors
    assert all(torch.equal(found[seed], want[seed]) for seed in want)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("graphs", ["on", "off", "failing"])
def test_generated_ids_are_the_same_with_graphs_on_off_and_failing(
    sampled: bool, graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = prompts()

    def ids_of(decoder: QwenDecoder) -> Tensor:
        sampler = Sampler(temperature=0.9, top_k=40, top_p=0.95) if sampled else None
        generator = torch.Generator("cuda").manual_seed(3) if sampled else None
        return decoder.generate(ids, attention_mask=mask, max_new_tokens=24, sampler=sampler, generator=generator)

    plain = made()
    plain.graphs = False
    want = ids_of(plain)
    decoder = made()
    decoder.graphs = graphs != "off"
    if graphs == "failing":

        def fails(*_arguments: object, **_given: object) -> None:
            msg = "no capture today"
            raise RuntimeError(msg)

        monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", fails)

    assert torch.equal(ids_of(decoder), want)
    assert torch.equal(ids_of(decoder), want)
    report = decoder.report()["graphs"]
    assert bool(report["replays"]) is (graphs == "on")
    assert bool(report["failed"]) is (graphs == "failing")


@torch.no_grad()
def test_a_step_waits_for_nothing() -> None:
    decoder = made()
    steps = DecoderSteps(decoder, Graphs("cuda"))
    with fb.bind("exact"):
        want = run(decoder, steps)
        ids, mask = prompts()
        cache = decoder.cache(len(ids), attention_mask=mask, reserve=64)
        logits, found = decoder(ids, cache=cache, keep=1), []
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(12):
                logits = steps(logits[:, -1].argmax(-1, keepdim=True), cache)
                found.append(logits[:, -1])
        finally:
            torch.cuda.set_sync_debug_mode("default")

    assert torch.equal(torch.stack(found), want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_decoder_on_a_device_that_is_not_the_current_one() -> None:
    decoder = made().to("cuda:1")
    ids = prompts()[0].to("cuda:1")
    off = decoder.generate(ids, max_new_tokens=8)
    decoder.graphs = True

    assert torch.equal(decoder.generate(ids, max_new_tokens=8), off)
