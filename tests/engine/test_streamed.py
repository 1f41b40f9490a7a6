"""Streamed layers where there is no GPU: the slots are shared and filled in turn there too, and nothing is lost."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseboard as fb
from fuseboard.engine.decoder import QwenDecoder
from fuseboard.engine.decoder.steps import DecoderSteps
from fuseboard.engine.sampling import Sampler

VOCABULARY, LAYERS = 97, 5


def made(kind: str = "qwen3", *, fused: bool = False, **given: Any) -> QwenDecoder:
    shape = {
        "model_type": kind, "vocab_size": VOCABULARY, "hidden_size": 40, "intermediate_size": 56,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
    }  # fmt: skip
    decoder = QwenDecoder(shape | given)
    generator = torch.Generator().manual_seed(0)
    decoder.load(
        {
            name: torch.randn(each.shape, generator=generator) * (0.2 if each.dim() > 1 else 1.0)
            for name, each in decoder.named_parameters()
        }
    )
    return decoder.fuse() if fused else decoder


def ids_of(decoder: QwenDecoder, seed: int = 0) -> Tensor:
    ids = torch.randint(1, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed)
    return decoder.generate(ids, max_new_tokens=12, sampler=Sampler(top_k=20), generator=generator, eos=())


@pytest.mark.parametrize("form", [False, True, "step", "step-eager"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "given", [{}, {"num_hidden_layers": 1}, {"num_hidden_layers": 2}, {"tie_word_embeddings": True}]
)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_streamed_decoder_gives_the_ids_of_one_that_is_all_there(
    kind: str, given: dict[str, Any], fused: bool, form: bool | str
) -> None:
    resident, streamed = made(kind, fused=fused, **given), made(kind, fused=fused, **given).stream_layers("cpu")
    resident.graphs = streamed.graphs = form
    assert torch.equal(ids_of(streamed), ids_of(resident))
    assert streamed.streamed
    assert not resident.streamed


def test_logits_are_equal_in_bits_and_two_slots_hold_the_weights_of_all_layers() -> None:
    resident, streamed = made(fused=True), made(fused=True).stream_layers("cpu")
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        assert torch.equal(streamed(ids), resident(ids))
    places = {layer.mlp.down_proj.weight.data_ptr() for layer in streamed.model.layers}

    assert len(places) == 2
    assert streamed.report()["streamed"]["layers"] == LAYERS
    assert streamed.report()["streamed"]["bytes a token"] >= sum(
        each.nbytes for layer in resident.model.layers for each in layer.parameters()
    )
    assert resident.report()["streamed"] is None


def test_with_graphs_between_attention_calls_it_says_why_there_are_none() -> None:
    streamed = made().stream_layers("cpu")
    assert streamed.report()["no_graphs"] == "the layers are streamed"


def test_steps_by_decoder_steps_are_eager() -> None:
    resident, streamed = made(), made().stream_layers("cpu")
    logits = []
    with torch.no_grad():
        for decoder in (resident, streamed):
            cache = decoder.cache(1)
            decoder(torch.arange(1, 5)[None], cache=cache)
            logits.append(DecoderSteps(decoder, None)(torch.tensor([[3]]), cache))

    assert torch.equal(*logits)


def test_threads_take_the_slots_in_turn() -> None:
    resident, streamed = made(), made().stream_layers("cpu")
    want = {seed: ids_of(resident, seed) for seed in range(4)}
    found, errors, barrier = {}, [], threading.Barrier(4)

    def body(seed: int) -> None:
        try:
            barrier.wait(10)
            found[seed] = ids_of(streamed, seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(seed,)) for seed in want]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert not errors, errors
    assert all(torch.equal(found[seed], want[seed]) for seed in want)


def test_a_pass_that_raises_leaves_the_slots_to_the_next() -> None:
    resident, streamed = made(), made().stream_layers("cpu")
    layer, leave = streamed.model.layers[2], streamed.model.layers[2].leave

    def fails(*_given: object) -> None:
        msg = "half-way"
        raise ValueError(msg)

    layer.leave = fails
    with pytest.raises(ValueError, match="half-way"):
        ids_of(streamed)
    layer.leave = leave
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(ids_of(streamed)), daemon=True)
    thread.start()
    thread.join(20)

    assert torch.equal(found[0], ids_of(resident))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda decoder: decoder.state_dict(), "parameters are not all there to be saved"),
        (lambda decoder: decoder.to(torch.float64), "not all there to be moved or cast"),
        (copy.deepcopy, "not all there to be copied"),
        (lambda decoder: decoder.load({}), "not all there to be loaded"),
        (lambda decoder: decoder.fuse(), r"call fuse\(\) before stream_layers\(\)"),
        (lambda decoder: decoder.train(), "streamed layers are for inference"),
        (lambda decoder: decoder.begin(torch.ones(1, 1, dtype=torch.int64), decoder.cache(1)), "used one by one"),
        (
            lambda decoder: decoder(embeds=torch.zeros(1, 2, 40, requires_grad=True)),
            "streamed layers are for inference, and a gradient is wanted",
        ),
    ],
)
def test_what_streamed_layers_cannot_do_is_an_error(what: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        what(made().stream_layers("cpu"))


def test_weights_that_want_a_gradient_are_not_streamed() -> None:
    with pytest.raises(RuntimeError, match=r"stream_layers\(\) is for inference"):
        made().requires_grad_(requires_grad=True).stream_layers("cpu")


@pytest.mark.parametrize("tied", [False, True])
def test_without_memory_for_the_head_all_stays_as_it_was(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, resident = made(tie_word_embeddings=tied), made(tie_word_embeddings=tied)
    moves = iter([MemoryError()])

    def no_room(*_given: object) -> None:
        for error in moves:  # the first time
            raise error

    with monkeypatch.context() as patched:
        patched.setattr(decoder.lm_head, "to", no_room)
        with pytest.raises(MemoryError):
            decoder.stream_layers("cpu")

    assert not decoder.streamed
    assert torch.equal(ids_of(decoder), ids_of(resident))
    assert torch.equal(ids_of(decoder.stream_layers("cpu")), ids_of(resident))


def test_a_default_device_of_the_callers_changes_nothing() -> None:
    streamed, resident = made(), made()
    with torch.device("meta"):
        streamed.stream_layers("cpu")
    assert torch.equal(ids_of(streamed), ids_of(resident))


def test_a_device_without_memory_is_refused() -> None:
    decoder = made()
    with pytest.raises(fb.InputError, match="device is meta, which has no memory"):
        decoder.stream_layers("meta")
    assert torch.equal(ids_of(decoder), ids_of(made()))


def test_a_second_call_does_nothing() -> None:
    streamed = made().stream_layers("cpu")
    held = streamed._streamed
    assert streamed.stream_layers("cpu")._streamed is held


def test_a_policy_answers_in_streamed_layers() -> None:
    resident, streamed, run = made(), made().stream_layers("cpu"), fb.Run()
    with fb.bind("exact", run=run):
        found = ids_of(streamed)
        assert torch.equal(found, ids_of(resident))
    assert sum(run.report()["attention"]["used"].values()) == 2 * LAYERS * 12
