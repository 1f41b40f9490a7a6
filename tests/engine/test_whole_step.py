"""A step over a cache of fixed capacity, where there is no GPU: the growing cache's tokens, and what it refuses."""

from __future__ import annotations

import contextlib
import copy
import shutil
import threading
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuseboard as fb
from fuseboard import context
from fuseboard.engine.decoder import QwenDecoder
from fuseboard.engine.decoder.fixed import FixedCache, Lengths, Part, capacity_for
from fuseboard.engine.decoder.generation import Token
from fuseboard.engine.decoder.layers import untouched
from fuseboard.engine.decoder.whole_step import Ahead, WholeSteps
from fuseboard.engine.sampling import DrawError, Sampler, State
from fuseboard.masks import check_mask_info

VOCABULARY, LENGTH = 97, 14
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"model_type": "qwen2"},
    "every head its keys": {"num_key_value_heads": 8},
    "sliding after the first": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "window longer than the prompt": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0},
    "window of two": {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 0},
    "window longer than the capacity": {"use_sliding_window": True, "sliding_window": 300, "max_window_layers": 0},
    "dynamic rope, outgrown": {
        "max_position_embeddings": 24, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    },
    "tied": {"tie_word_embeddings": True},
}  # fmt: skip
PADS = {"one row": (0,), "rows alike": (0, 0), "left-padded": (0, 3, 11), "all padded": (4, 9)}


def made(dtype: torch.dtype = torch.float32, **given: Any) -> QwenDecoder:
    shape = {
        "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512,
    }  # fmt: skip
    decoder = QwenDecoder(shape | given)
    generator = torch.Generator().manual_seed(0)
    decoder.load(
        {
            name: (torch.randn(each.shape, generator=generator) * (0.2 if each.dim() > 1 else 1.0)).to(dtype)
            for name, each in decoder.named_parameters()
        }
    )
    return decoder


def prompts(pads: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, VOCABULARY, (len(pads), LENGTH), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(LENGTH) >= torch.tensor(pads)[:, None]).long()
    return ids.masked_fill(mask == 0, 0), mask


@torch.no_grad()
def compare(decoder: QwenDecoder, ids: Tensor, mask: Tensor, steps: int) -> None:
    """Assert that logits over the fixed cache are the growing one's but for rounding, step by step."""
    cache = decoder.cache(len(ids), attention_mask=mask)
    logits = decoder(ids, cache=cache, keep=1)
    fixed = decoder.fixed(cache)
    for step in range(steps):
        ids = logits[:, -1:].argmax(-1)
        mine, logits = decoder.step(ids, fixed), decoder(ids, cache=cache)
        torch.testing.assert_close(mine, logits, rtol=1e-4, atol=1e-4, msg=lambda text, at=step: f"step {at}: {text}")


@pytest.mark.parametrize("pads", PADS.values(), ids=PADS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_over_a_fixed_cache_are_the_growing_cache_s(shape: dict[str, Any], pads: tuple[int, ...]) -> None:
    compare(made(**shape), *prompts(pads), steps=40)


@pytest.mark.parametrize("shape", ["qwen3", "sliding after the first", "window longer than the capacity"])
def test_a_cache_that_is_full_doubles(shape: str) -> None:
    decoder = made(**SHAPES[shape])
    compare(decoder, *prompts((0, 3)), steps=280)


def test_capacity_is_whole_blocks_and_grows_by_doubling() -> None:
    decoder = made()
    with torch.no_grad():
        cache = decoder.cache(1)
        decoder(prompts((0,))[0], cache=cache)
        fixed = decoder.fixed(cache, capacity=257)
        assert (fixed.capacity, capacity_for(1), capacity_for(256), capacity_for(257)) == (512, 256, 256, 512)
        before, bytes_before = fixed.parts["full_attention"].keys.clone(), fixed.nbytes
        fixed.grow(decoder)

    assert (fixed.capacity, fixed.length, fixed.nbytes) == (1024, LENGTH, 2 * bytes_before)
    assert torch.equal(fixed.parts["full_attention"].keys[:, :, :, :512], before)


@pytest.mark.parametrize("where", ["on the left", "anywhere"])
def test_padding_anywhere_serves_where_no_layer_slides(where: str) -> None:
    ids, mask = prompts((0, 3))
    if where == "anywhere":
        mask[1] = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1])
    compare(made(), ids, mask, steps=20)


def test_padding_elsewhere_than_on_the_left_is_refused_where_layers_slide_and_generate_says_why() -> None:
    decoder = made(**SHAPES["sliding after the first"])
    ids, mask = prompts((0, 3))
    mask[1] = 1
    mask[1, 5] = 0
    with torch.no_grad():
        cache = decoder.cache(2, attention_mask=mask)
        decoder(ids, cache=cache)
    with pytest.raises(fb.InputError, match="padding elsewhere than on the left, in a model with sliding layers"):
        decoder.fixed(cache)
    want = decoder.generate(ids, attention_mask=mask, max_new_tokens=6)
    decoder.graphs = "step"

    assert torch.equal(decoder.generate(ids, attention_mask=mask, max_new_tokens=6), want)
    assert "padding elsewhere" in decoder.report()["step"]["why not one graph"]
    assert decoder.report()["step"]["form"] == "eager"


def test_what_attention_is_told_is_right_padding_with_its_lengths() -> None:
    part = Part.made(None, 8, 1, 3, (2, 4), torch.float32, torch.device("cpu"))
    given = part.given(torch.tensor([0, 3, 11]))

    assert isinstance(given.info, Lengths)
    assert given.info.lengths().tolist() == [1, 4, 8]
    assert given.info.lengths().dtype == torch.int32
    check_mask_info(given.mask, given.info, 1, 8, torch.device("cpu"))


@pytest.mark.parametrize("form", ["step", "step-eager"])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("policy", ["auto", "exact"])
@pytest.mark.parametrize("pads", [(0,), (0, 3, 11)])
def test_generated_ids_are_the_growing_cache_s(form: str, sampled: bool, policy: str, pads: tuple[int, ...]) -> None:
    decoder = made()
    ids, mask = prompts(pads)

    def ids_of() -> Tensor:
        sampler = Sampler(temperature=0.9, top_k=20, repetition_penalty=1.1) if sampled else None
        generator = torch.Generator().manual_seed(4) if sampled else None
        with fb.bind(policy):
            return decoder.generate(
                ids, attention_mask=mask, max_new_tokens=30, sampler=sampler, generator=generator, eos=5
            )

    want = ids_of()
    decoder.graphs = form
    assert torch.equal(ids_of(), want)
    assert torch.equal(ids_of(), want)


def test_a_draw_without_a_generator_is_torch_s_own() -> None:
    decoder = made()
    ids, _ = prompts((0,))
    found = []
    for form in (False, "step"):
        decoder.graphs = form
        with torch.random.fork_rng():
            torch.manual_seed(5)
            found.append(decoder.generate(ids, max_new_tokens=10, sampler=Sampler()))

    assert torch.equal(*found)


def test_many_samplers_in_turn_over_one_cache_have_each_a_state_of_its_own() -> None:
    decoder, plain = made(), made()
    decoder.graphs = "step"
    ids, _ = prompts((0,))
    for top_k in (2, 3, 4, 5, 6, 7, 2):
        found = [
            each.generate(
                ids, max_new_tokens=8, sampler=Sampler(top_k=top_k, repetition_penalty=1.3),
                generator=torch.Generator().manual_seed(top_k),
            )
            for each in (decoder, plain)
        ]  # fmt: skip
        assert torch.equal(*found)
    (whole,) = decoder._whole.values()
    (states,) = whole._states.values()
    assert len(states) == 4


def test_a_growing_cache_that_was_taken_over_lets_go_of_its_memory() -> None:
    decoder = made()
    with torch.no_grad():
        cache = decoder.cache(1)
        decoder(prompts((0,))[0], cache=cache)
        fixed = WholeSteps(decoder, None).take(cache, 20)
        assert (cache.nbytes, fixed.length, fixed.capacity) == (0, LENGTH, 256)
        with pytest.raises(RuntimeError, match="make a new one"):
            decoder(prompts((0,))[0], cache=cache)


def test_a_stream_that_is_closed_gives_its_cache_to_the_next() -> None:
    decoder = made()
    decoder.graphs = "step"
    ids, _ = prompts((0,))
    stream = decoder.stream(ids, max_new_tokens=9)
    for _ in range(3):
        next(stream)
    (whole,) = decoder._whole.values()
    assert not whole._spare
    stream.close()
    (spare,) = whole._spare
    list(decoder.stream(prompts((3,))[0], max_new_tokens=9))

    assert whole._spare == [spare]
    decoder.graphs = True
    assert not whole._spare


def test_every_call_of_a_step_is_counted_in_the_run() -> None:
    decoder, run = made(), fb.Run()
    decoder.graphs = "step"
    with fb.bind("exact", run=run):
        decoder.generate(prompts((0,))[0], max_new_tokens=5, eos=())

    assert sum(run.report()["attention"]["used"].values()) == 3 * 5


@pytest.mark.parametrize("form", ["whole", "Step", 1, 0, None, "steps"])
def test_another_form_is_an_error_that_names_the_forms(form: object) -> None:
    decoder = made()
    with pytest.raises(fb.InputError, match=r"expected one of True, False, 'step', 'step-eager'"):
        decoder.graphs = form
    assert decoder.graphs is True


def test_the_report_says_which_form_and_why_not_one_graph() -> None:
    decoder = made()
    assert decoder.report()["step"] == {"form": "eager", "why not one graph": "not asked for"}
    decoder.graphs = "step"
    assert decoder.report()["step"] == {
        "form": "eager, over a fixed cache", "why not one graph": "cpu has no CUDA graphs",
    }  # fmt: skip
    decoder.generate(prompts((0,))[0], max_new_tokens=4, eos=())
    assert decoder.report()["graphs"]["eager steps"] == 3
    decoder.graphs = "step-eager"
    assert decoder.report()["step"]["why not one graph"] == "switched off"


def test_ids_of_another_shape_and_caches_of_other_rows_are_errors() -> None:
    decoder = made()
    with torch.no_grad():
        cache = decoder.cache(2)
        decoder(prompts((0, 0))[0], cache=cache)
        fixed = decoder.fixed(cache)
        with pytest.raises(fb.InputError, match=r"ids has shape \(1, 1\); a step takes one token a row, \(2, 1\)"):
            decoder.step(torch.ones(1, 1, dtype=torch.int64), fixed)
        with pytest.raises(fb.InputError, match="ids is on meta; expected it on cpu, where the decoder is"):
            decoder.step(torch.ones(2, 1, dtype=torch.int64, device="meta"), fixed)
        other = decoder.cache(1)
        with pytest.raises(fb.InputError, match="it has 1 rows, and the fixed one 2"):
            fixed.fill(decoder, other)
        long = decoder.cache(2)
        decoder(torch.ones(2, 300, dtype=torch.int64), cache=long)
        with pytest.raises(fb.InputError, match="it has 300 tokens, and the fixed one room for 256"):
            fixed.fill(decoder, long)


def test_a_cache_that_is_not_this_decoder_s_is_refused_before_anything_is_written() -> None:
    decoder = made()
    ids, _ = prompts((0,))
    with torch.no_grad():
        cache = decoder.cache(1)
        decoder(ids, cache=cache)
        fixed = decoder.fixed(cache)
        before = fixed.parts["full_attention"].keys.clone()
        others = [
            made(num_hidden_layers=2),
            made(num_hidden_layers=5),
            made(num_key_value_heads=1),
            made(torch.bfloat16),
        ]
        for other in others:
            with pytest.raises(
                fb.InputError, match="the cache is for another dtype or shape of decoder; make a new one"
            ):
                other.step(ids[:, :1], fixed)
        for other in others[:3]:
            with pytest.raises(fb.InputError, match="the cache cannot be taken over: it "):
                other.fixed(cache)
        with pytest.raises(fb.InputError, match=r"cache is a KVCache; expected one from fixed\(\)"):
            decoder.step(ids[:, :1], cache)  # type: ignore[arg-type]
        assert torch.equal(fixed.parts["full_attention"].keys, before)
        with pytest.raises(fb.InputError, match="ids has 97; expected ids of the vocabulary"):
            decoder.step(torch.full((1, 1), VOCABULARY), fixed)
        assert fixed.length == LENGTH


def test_a_growing_cache_that_was_left_half_written_is_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = made()
    ids, _ = prompts((0,))
    with torch.no_grad():
        cache = decoder.cache(1)
        decoder(ids, cache=cache)
        with monkeypatch.context() as patched:
            patched.setattr(decoder.model.layers[1], "attend", lambda *_: (_ for _ in ()).throw(MemoryError()))
            with pytest.raises(MemoryError):
                decoder(ids[:, :1], cache=cache)
        with pytest.raises(RuntimeError, match="this cache was left half written"):
            decoder.fixed(cache)


def test_a_cache_that_there_is_no_memory_to_double_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = made()
    with torch.no_grad():
        cache = decoder.cache(1)
        logits = decoder(torch.ones(1, 255, dtype=torch.int64), cache=cache, keep=1)
        fixed, twin = decoder.fixed(cache), decoder.fixed(cache)
        first = logits.argmax(-1)
        decoder.step(first, fixed)
        decoder.step(first, twin)
        with monkeypatch.context() as patched:
            patched.setattr(Part, "made", lambda *_: (_ for _ in ()).throw(MemoryError()))
            with pytest.raises(MemoryError):
                decoder.step(first, fixed)
        assert (fixed.capacity, fixed.length, fixed.parts["full_attention"].size) == (256, 256, 256)
        assert torch.equal(decoder.step(first, fixed), decoder.step(first, twin))


def test_a_callback_that_raises_gives_the_cache_back_while_its_error_is_still_handled() -> None:
    decoder = made()
    decoder.graphs = "step-eager"

    def stops(token: Token) -> None:
        if token.index == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError) as caught:
        decoder.generate(prompts((0,))[0], max_new_tokens=9, on_token=stops)
    (whole,) = decoder._whole.values()
    assert len(whole._spare) == 1
    assert caught.traceback  # which holds the frames


def test_a_request_that_outlives_the_form_keeps_no_cache() -> None:
    decoder = made()
    decoder.graphs = "step-eager"
    stream = decoder.stream(prompts((0,))[0], max_new_tokens=5, eos=())
    for _ in range(3):
        next(stream)
    decoder.graphs = True
    assert len(list(stream)) == 2
    (whole,) = decoder._whole.values()
    assert not whole._spare


def test_a_copy_has_neither_the_caches_nor_the_graphs() -> None:
    decoder = made()
    decoder.graphs = "step"
    with fb.bind("exact"):
        decoder.generate(prompts((0,))[0], max_new_tokens=4)
    twin = copy.deepcopy(decoder)

    assert (twin._whole, twin.graphs) == ({}, "step")


def test_steps_without_graphs_are_eager_and_counted() -> None:
    decoder = made()
    steps = WholeSteps(decoder, None)
    with torch.no_grad():
        cache = decoder.cache(1)
        ids = decoder(prompts((0,))[0], cache=cache, keep=1)[:, -1].argmax(-1, keepdim=True)
        mine, other = decoder.fixed(cache), decoder.fixed(cache)
        assert torch.equal(steps(ids, mine), decoder.step(ids, other))

    assert steps.report()["eager steps"] == 1
    assert (mine.length, mine.positions.tolist()) == (LENGTH + 1, [LENGTH + 1])


def test_a_short_request_after_one_that_outgrew_a_dynamic_rope_has_frequencies_of_its_own() -> None:
    shape = SHAPES["dynamic rope, outgrown"]
    decoder, plain = made(**shape), made(**shape)
    decoder.graphs = "step"
    ids = prompts((0,))[0]
    for start in (0, 6):
        each = [
            one.generate(ids[:, start:], max_new_tokens=30 if not start else 10, eos=()) for one in (decoder, plain)
        ]
        assert torch.equal(*each), start
        (whole,) = decoder._whole.values()
        assert len(whole._spare) == 1


# ---- launching ahead


class Eagerly(WholeSteps):
    """Launches ahead as graphs do, where there are none."""

    def __init__(self, decoder: QwenDecoder) -> None:
        super().__init__(decoder, None)
        self.tally = types.SimpleNamespace(lock=threading.RLock(), replays=0)

    def ahead(self, ids: Tensor, cache: FixedCache, sampler: Sampler, state: State) -> Ahead:
        binding, run = context.bound(), fb.Run()
        drawn = None if state.generator is None else state.generator.get_state()
        with fb.bind(binding.policy, run=run) if binding else contextlib.nullcontext():
            answer = self._step(ids, cache, sampler, state)
        self.tally.replays += 1
        held = None if binding is None else binding.run
        return Ahead(answer, cache, self.tally, state.generator, drawn, held, run._counts())


def launching_ahead(monkeypatch: pytest.MonkeyPatch) -> tuple[QwenDecoder, Eagerly]:
    """A decoder whose whole steps are launched ahead without a GPU, and who makes them."""
    decoder = made()
    decoder.graphs = "step"
    whole = Eagerly(decoder)
    monkeypatch.setattr(decoder, "_whole_for", lambda _cache: whole)
    return decoder, whole


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("eos", [(), 5, (5, 7, 11, 30, 40, 41, 42, 43)])
def test_steps_launched_ahead_leave_the_tokens_generators_and_counts_alone(
    sampled: bool, eos: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = prompts((0, 3))
    found = []
    for ahead in (False, True):
        decoder, whole = launching_ahead(monkeypatch)
        run, generator = fb.Run(), torch.Generator().manual_seed(2)
        sampler = Sampler(top_k=20, repetition_penalty=1.2) if sampled else Sampler(do_sample=False)
        with fb.bind("exact", run=run):
            out = decoder.generate(
                ids, attention_mask=mask, max_new_tokens=25, sampler=sampler, generator=generator, eos=eos, ahead=ahead
            )
        (cache,) = whole._spare
        found.append((out.tolist(), generator.get_state().tolist(), run.report()["attention"]["used"], cache.length))
        taken = out.shape[1] - LENGTH - 2  # the first came of the prompt, the second was drawn when it was asked for
        assert whole.tally.replays == (taken if ahead else 0)

    assert found[0] == found[1]


@pytest.mark.parametrize("end", ["closed", "raised", "invalid"])
def test_a_stream_that_ends_early_has_drawn_what_was_asked_for(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, _ = prompts((0,))
    found = []
    for ahead in (False, True):
        decoder, whole = launching_ahead(monkeypatch)
        generator = torch.Generator().manual_seed(2)
        given = {"max_new_tokens": 25, "sampler": Sampler(), "generator": generator, "eos": (), "ahead": ahead}
        if end == "raised":

            def stops(token: Token) -> None:
                if token.index == 6:
                    raise InterruptedError

            with pytest.raises(InterruptedError):
                decoder.generate(ids, on_token=stops, **given)
        else:
            stream = decoder.stream(ids, **given)
            for _ in range(7):
                next(stream)
            if end == "closed":
                stream.close()
            else:
                decoder.model.norm.weight.fill_(torch.nan)
                if ahead:  # it was launched before
                    next(stream)
                with pytest.raises(DrawError):
                    next(stream)
        (cache,) = whole._spare
        found.append((generator.get_state().tolist(), cache.length))
        decoder.graphs = True

    assert len(whole._spare) == 1
    if end != "invalid":
        assert found[0] == found[1]


# ---- glue


def test_glue_is_not_asked_for_by_itself_and_says_why_it_is_not_used() -> None:
    decoder = made()
    assert decoder.report()["glue"] == "not asked for"
    assert decoder.fuse().report()["glue"] == "not asked for"
    decoder.fuse(glue=True)

    assert decoder.report()["glue"] in ("Triton is not installed", "Triton's kernels do not run on cpu")
    compare(decoder, *prompts((0, 3)), steps=5)


GLUED = """
import torch
from tests_whole_step import LENGTH, SHAPES, QwenDecoder, made, prompts
from fuseboard.engine.decoder.kernels.glue import Glue
from fuseboard.engine.decoder.kernels.products import Products
from fuseboard.engine.decoder.layers import Layer

for dtype, products in ((torch.float32, True), (torch.float16, False), (torch.float16, True)):
    for name in ("qwen2", "sliding after the first"):
        plain = made(dtype, **SHAPES[name]).fuse()
        glued = made(dtype, **SHAPES[name]).fuse(glue=True, products=products)
        assert isinstance(glued.glue, Glue) and isinstance(glued.products(2), Products) is products, glued.report()
        ids, mask = prompts((0, 3))
        with torch.no_grad():
            cache = plain.cache(2, attention_mask=mask)
            logits = plain(ids, cache=cache, keep=1)
            theirs, mine = plain.fixed(cache), glued.fixed(cache)
            for _ in range(2):
                ids = logits[:, -1:].argmax(-1)
                logits, found = plain.step(ids, theirs), glued.step(ids, mine)
                near = 1e-4 if dtype == torch.float32 else 0.05 * float(logits.float().std())
                torch.testing.assert_close(found, logits, rtol=0, atol=near)

plain, glued = made(torch.float32).fuse(), QwenDecoder(made().config)
glued.load({
    name: torch.stack([each] * 2, -1)[..., 0] if each.dim() == 1 else each.t().contiguous().t()
    for name, each in made(torch.float32).named_parameters()
})
glued.fuse(products=True)
ids, mask = prompts((0,))
with torch.no_grad():
    caches = [each.cache(1) for each in (plain, glued)]
    for each, cache in zip((plain, glued), caches):
        each(ids, cache=cache)
    theirs, mine = (each.step(ids[:, :1], each.fixed(cache)) for each, cache in zip((plain, glued), caches))
assert isinstance(glued.products(1), Products) and isinstance(glued.glue, Glue)
torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)

attend = Layer.attend
Layer.attend = lambda *given: torch.cat([attend(*given)] * 2, dim=-1)[..., :glued.config.num_attention_heads * 16]
ids, mask = prompts((0, 3))
with torch.no_grad():
    caches = [each.cache(2, attention_mask=mask) for each in (plain, glued)]
    for each, cache in zip((plain, glued), caches):
        each(ids, cache=cache)
    theirs, mine = (each.step(ids[:, :1], each.fixed(cache)) for each, cache in zip((plain, glued), caches))
Layer.attend = attend
torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)

for each in (plain, glued):
    each.model.layers[1].mlp.down_proj.register_forward_hook(lambda _module, _given, out: out * 2)
    each.model.embed_tokens.register_forward_hook(lambda _module, _given, out: out * 3)
with torch.no_grad():
    theirs, mine = (each.step(ids[:, 1:2], each.fixed(cache)) for each, cache in zip((plain, glued), caches))
torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
assert glued.report()["products"] == dict.fromkeys(
    "12", "model.layers.1.mlp.down_proj is a Linear with hooks, a forward of its own or weights that are no plain "
    "tensors: it is called as it is"
), glued.report()["products"]

plain, glued = made(torch.float32).fuse(), made(torch.float32).fuse(products=True)
for each in (plain, glued):
    each.model.layers[0].self_attn.o_proj.forward = lambda x: x.new_ones(*x.shape[:-1], plain.config.hidden_size)
with torch.no_grad():
    caches = [each.cache(2, attention_mask=mask) for each in (plain, glued)]
    for each, cache in zip((plain, glued), caches):
        each(ids, cache=cache)
    theirs, mine = (each.step(ids[:, :1], each.fixed(cache)) for each, cache in zip((plain, glued), caches))
torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
assert isinstance(glued.products(2), str) and "model.layers.0.self_attn.o_proj is a Linear with" in glued.products(2)

unknown = made(torch.float32).fuse(glue=True)
hidden = unknown.glue.embed(torch.tensor([[1], [10**6], [-1]]), unknown.model.embed_tokens)
assert hidden.isnan().all(1).tolist() == [False, True, True], hidden
print("glued")
"""


@pytest.mark.slow
def test_glue_in_triton_s_interpreter_gives_the_formula_s_numbers(interpreted, tmp_path) -> None:
    shutil.copy(__file__, tmp_path / "tests_whole_step.py")

    assert interpreted(GLUED, tmp_path).endswith("glued\n")


def test_autocast_that_begins_between_two_steps_is_refused_and_changes_nothing() -> None:
    decoder, (ids, mask) = made(), prompts((0, 3))
    decoder.graphs = "step-eager"
    stream = decoder.stream(ids, attention_mask=mask, max_new_tokens=6, eos=())
    for _ in range(2):
        next(stream)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="leave autocast"):
        next(stream)

    steps = WholeSteps(decoder, None)
    with torch.no_grad():
        cache, twin = decoder.cache(2, attention_mask=mask), decoder.cache(2, attention_mask=mask)
        for each in (cache, twin):
            decoder(ids, cache=each)
        fixed, other = decoder.fixed(cache), decoder.fixed(twin)
        for step in (steps, decoder.step):
            with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="leave autocast"):
                step(ids[:, :1], fixed)
        assert torch.equal(steps(ids[:, :1], fixed), decoder.step(ids[:, :1], other))
        assert fixed.length == other.length
        assert torch.equal(fixed.positions, other.positions)


def test_a_kernel_stands_in_for_a_module_only_if_its_weights_say_all_that_it_does() -> None:
    class Quantised(Tensor):
        pass

    def linear() -> nn.Linear:
        return nn.Linear(4, 4)

    patched, hooked, quantised, other = linear(), linear(), linear(), nn.utils.skip_init(nn.Bilinear, 4, 4, 4)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    hooked.register_forward_pre_hook(lambda _module, given: given)
    quantised.weight = nn.Parameter(quantised.weight.detach().as_subclass(Quantised), requires_grad=False)

    assert untouched(linear(), nn.Linear)
    assert not any(untouched(each, nn.Linear) for each in (patched, hooked, quantised, other))
