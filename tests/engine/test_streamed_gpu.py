"""Streamed layers on a GPU: bits of weights that stay there, eagerly and by a graph that copies them itself."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseboard as fb
from fuseboard.engine.decoder import QwenDecoder
from fuseboard.engine.decoder.whole_step import WholeSteps
from fuseboard.engine.graphs import Graphs
from fuseboard.engine.sampling import Sampler

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

VOCABULARY = 512


def made(
    kind: str = "qwen3", *, streamed: bool, fused: bool = False, glue: bool = False, layers: int = 5
) -> QwenDecoder:
    shape = {
        "model_type": kind, "vocab_size": VOCABULARY, "hidden_size": 1024, "intermediate_size": 2048,
        "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
    }  # fmt: skip
    decoder = QwenDecoder(shape)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(each.shape, generator=generator) * (0.05 if each.dim() > 1 else 1.0)
        for name, each in decoder.named_parameters()
    }
    decoder.load(weights, dtype=torch.bfloat16, device="cpu" if streamed else "cuda")
    if fused:
        decoder.fuse(glue=glue)
    return decoder.stream_layers("cuda") if streamed else decoder


def ids_of(decoder: QwenDecoder, seed: int = 0, count: int = 12) -> Tensor:
    ids = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator("cuda").manual_seed(seed)
    return decoder.generate(ids, max_new_tokens=count, sampler=Sampler(top_k=20), generator=generator, eos=())


@torch.no_grad()
def logits_of(decoder: QwenDecoder, steps: WholeSteps | None, count: int = 8) -> Tensor:
    ids = torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0)).cuda()
    growing = decoder.cache(2)
    first = decoder(ids, cache=growing, keep=1)
    cache, found = decoder.fixed(growing), [first]
    for _ in range(count):
        ids = found[-1][:, -1].argmax(-1, keepdim=True)
        found.append(decoder.step(ids, cache) if steps is None else steps(ids, cache))
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("form", [False, True, "step-eager", "step"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_ids_are_those_of_weights_that_stay(kind: str, fused: bool, form: bool | str) -> None:
    resident, streamed = made(kind, streamed=False, fused=fused), made(kind, streamed=True, fused=fused)
    resident.graphs = "step-eager" if form in ("step", "step-eager") else False
    streamed.graphs = form
    want = ids_of(resident)
    for _ in range(3):
        assert torch.equal(ids_of(streamed), want), streamed.report()


@pytest.mark.parametrize("layers", [1, 2, 3, 6])
@pytest.mark.parametrize("glue", [False, True])
def test_a_graph_that_copies_the_weights_gives_their_bits(
    glue: bool, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = made(streamed=False, fused=True, glue=glue, layers=layers)
    streamed = made(streamed=True, fused=True, glue=glue, layers=layers)
    monkeypatch.setattr(WholeSteps, "_is_slower", lambda *_given: False)  # whichever is faster here
    steps = WholeSteps(streamed, Graphs("cuda"))
    with fb.bind("exact"):
        want = logits_of(resident, None)
        assert torch.equal(logits_of(streamed, None), want)
        for _ in range(3):
            assert torch.equal(logits_of(streamed, steps), want)
    report = steps.report()

    assert (report["failed"], report["eager steps"]) == (None, 0), report


def test_the_graph_is_used_where_it_was_measured_to_be_faster() -> None:
    streamed = made(streamed=True, layers=12)
    streamed.graphs = "step"
    ids_of(streamed)
    report = streamed.report()
    measured = report["streamed"]["measured"]

    assert set(measured) == {"eager ms", "graph ms"}
    faster = measured["graph ms"] < measured["eager ms"]
    assert (report["step"]["form"] == "one graph") is faster, report
    assert bool(report["graphs"]["replays"]) is faster, report
    assert faster or "ms by its graph" in report["step"]["why not one graph"]


def test_two_threads_with_streams_of_their_own_take_the_slots_in_turn() -> None:
    resident, streamed = made(streamed=False), made(streamed=True)
    for form in (False, "step"):
        resident.graphs = "step-eager" if form else False
        streamed.graphs = form
        want = {seed: ids_of(resident, seed, 20) for seed in (1, 2)}
        torch.cuda.synchronize()
        found, errors, barrier = {}, [], threading.Barrier(2)

        def body(seed: int, found: Any = found, errors: Any = errors, barrier: Any = barrier) -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    barrier.wait(60)
                    found[seed] = ids_of(streamed, seed, 20)
                    torch.cuda.current_stream().synchronize()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=body, args=(seed,)) for seed in want]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

        assert not errors, errors
        assert all(torch.equal(found[seed], want[seed]) for seed in want), form


def test_the_device_holds_two_layers() -> None:
    def held(streamed: bool) -> int:
        gc.collect()
        before = torch.cuda.memory_allocated()
        decoder = made(streamed=streamed, layers=8)
        torch.cuda.synchronize()
        taken = torch.cuda.memory_allocated() - before
        del decoder
        return taken

    one = 2 * sum(each.numel() for each in made(streamed=False, layers=1).model.layers[0].parameters())
    assert held(streamed=False) - held(streamed=True) > 5.9 * one


@torch.no_grad()
def test_a_streamed_step_waits_for_nothing() -> None:
    streamed = made(streamed=True)
    ids = torch.ones(1, 4, dtype=torch.int64, device="cuda")
    growing = streamed.cache(1)
    streamed(ids, cache=growing)
    cache, one = streamed.fixed(growing), ids[:, :1]
    want = streamed.step(one, cache)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            found = streamed.step(one, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert found.shape == want.shape
