"""Whole steps as one CUDA graph: the eager step's bits over the same fixed cache, whatever happens between them."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuseboard as fb
from fuseboard.engine.decoder import QwenDecoder
from fuseboard.engine.decoder.fixed import FixedCache
from fuseboard.engine.decoder.kernels.glue import Glue
from fuseboard.engine.decoder.kernels.products import Products
from fuseboard.engine.decoder.layers import reference
from fuseboard.engine.decoder.whole_step import WholeSteps
from fuseboard.engine.graphs import Graphs
from fuseboard.engine.sampling import DrawError, Sampler

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

VOCABULARY, LAYERS, LENGTH, STEPS = 512, 4, 17, 12
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
SITE = fb.Site("tests.whole_step.gpu", approx_ok=False)


def made(kind: str = "qwen3", **given: Any) -> QwenDecoder:
    shape = {
        "model_type": kind, "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "max_position_embeddings": 1024,
    }  # fmt: skip
    decoder = QwenDecoder(shape | given)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(each.shape, generator=generator) * (0.2 if each.dim() > 1 else 1.0)
        for name, each in decoder.named_parameters()
    }
    decoder.load(weights, device="cuda", dtype=torch.bfloat16)
    return decoder


def prompts(batch: int = 3, length: int = LENGTH, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (batch, length), generator=generator)
    real = torch.arange(length) >= torch.tensor([0, 5, 11][:batch])[:, None]
    return ids.masked_fill(~real, 0).cuda(), real.long()


@torch.no_grad()
def begun(decoder: QwenDecoder, seed: int = 0, padded: bool = True, batch: int = 3) -> tuple[FixedCache, Tensor]:
    """A fixed cache after the prompt, and the first id."""
    ids, mask = prompts(batch, seed=seed)
    cache = decoder.cache(batch, attention_mask=mask if padded else None)
    logits = decoder(ids, cache=cache, keep=1)
    return decoder.fixed(cache), logits[:, -1].argmax(-1, keepdim=True)


@torch.no_grad()
def run(decoder: QwenDecoder, steps: WholeSteps | None, count: int = STEPS, **given: Any) -> Tensor:
    """The logits of greedy steps, `(count, batch, vocab)`."""
    cache, ids = begun(decoder, **given)
    found = []
    for _ in range(count):
        logits = decoder.step(ids, cache) if steps is None else steps(ids, cache)
        ids = logits[:, -1].argmax(-1, keepdim=True)
        found.append(logits[:, -1])
    return torch.stack(found)


@torch.no_grad()
def growing(decoder: QwenDecoder, ids_of: Tensor, padded: bool) -> Tensor:
    """The growing cache's logits where the ids are the most probable ones of these."""
    ids, mask = prompts()
    cache = decoder.cache(len(ids), attention_mask=mask if padded else None)
    logits, found = decoder(ids, cache=cache, keep=1), []
    ids = logits[:, -1].argmax(-1, keepdim=True)
    for place in range(len(ids_of)):
        logits = decoder(ids, cache=cache)
        ids = ids_of[place].argmax(-1, keepdim=True)
        found.append(logits[:, -1])
    return torch.stack(found)


def answers(backend: str) -> bool:
    """Whether a backend can run here."""
    record = fb.Run()
    try:
        q = torch.randn(1, 2, 1, 64, device="cuda", dtype=torch.bfloat16)
        with fb.bind(backend, run=record):
            fb.attention(q, q, q, site=SITE)
    except fb.RefusedError:
        return False
    return backend in record.report()["attention"]["used"]


def near(mine: Tensor, theirs: Tensor) -> None:
    """Alike but for rounding: chaos makes single numbers of it large, so all of them are looked at together."""
    error = float((mine.float() - theirs.float()).std() / theirs.float().std())
    assert error < 0.1, error


# ---- bits


@pytest.mark.parametrize("policy", ["auto", "exact", "flash", "tilelang"])
@pytest.mark.parametrize(
    ("kind", "given"), [("qwen3", {}), ("qwen2", {}), ("qwen3", {"tie_word_embeddings": True}), ("qwen3", SLIDING)]
)
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("form", ["plain", "fused", "glue", "products"])
def test_steps_by_one_graph_are_the_eager_steps_in_bits(
    kind: str, given: dict[str, Any], padded: bool, form: str, policy: str
) -> None:
    if policy in ("flash", "tilelang") and not answers(policy):
        pytest.skip(f"{policy} cannot run here")
    decoder = made(kind, **given)
    if form != "plain":
        decoder.fuse(glue=form == "glue", products=form == "products")
    if form in ("glue", "products"):
        assert isinstance(decoder.glue, Glue), decoder.glue
        assert isinstance(decoder.products(3), Products) is (form == "products"), decoder.products(3)
    steps = WholeSteps(decoder, Graphs("cuda"))
    with fb.bind(policy):
        eager = run(decoder, None, padded=padded)
        assert torch.equal(run(decoder, steps, padded=padded), eager), steps.report()
        assert torch.equal(run(decoder, steps, padded=padded), eager), steps.report()
        near(eager, growing(decoder, eager, padded))

    report = steps.report()
    assert (report["failed"], report["eager steps"], report["captured"]) == (None, 0, 2), report
    assert report["replays"] == 2 * STEPS


@pytest.mark.parametrize("backend", ["flash", "tilelang"])
def test_a_backend_is_told_lengths_and_answers_every_captured_call(backend: str) -> None:
    if not answers(backend):
        pytest.skip(f"{backend} cannot run here")
    decoder, record = made(**SLIDING), fb.Run()
    steps = WholeSteps(decoder, Graphs("cuda"))
    cache, ids = begun(decoder)
    with torch.no_grad(), fb.bind(backend, run=record):
        for _ in range(STEPS):
            ids = steps(ids, cache)[:, -1].argmax(-1, keepdim=True)

    assert record.report()["attention"]["used"] == {backend: LAYERS * STEPS}
    assert steps.report()["attention in a step"] == {backend: LAYERS}


@torch.no_grad()
def test_glue_gives_the_plain_form_s_numbers_but_for_rounding() -> None:
    for kind in ("qwen3", "qwen2"):
        plain, glued = made(kind).fuse(), made(kind).fuse(glue=True)
        near(run(glued, None, count=1), run(plain, None, count=1))
        assert glued.report()["glue"] == "Triton"
        glued.fuse(products=True)
        near(run(glued, None, count=1), run(plain, None, count=1))
        assert glued.report()["products"] == {"3": "Triton, on tensor cores"}


def difference(mine: Tensor, theirs: Tensor) -> str | None:
    """The first step whose logits differ, in which rows and by how much; None where all are equal."""
    for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if not torch.equal(a, b):
            rows = [row for row in range(len(a)) if not torch.equal(a[row], b[row])]
            return f"step {step}, rows {rows}, at most {float((a - b).float().abs().max())} apart"
    return None


def test_a_cache_that_is_full_doubles_and_is_captured_anew() -> None:
    decoder = made(**SLIDING)
    steps = WholeSteps(decoder, Graphs("cuda"))
    # Not torch's choice: cuDNN's attention over more than 256 slots gives other bits in one call of some hundreds.
    with fb.bind("sdpa-math"):
        want = run(decoder, None, count=300)
        apart = difference(run(decoder, steps, count=300), want)
    assert apart is None, apart
    assert steps.report()["captured"] == 2
    assert steps.report()["eager steps"] == 0


@pytest.mark.parametrize("size", [8, 9, 24, 64, 200, 256])
@pytest.mark.parametrize("behind", ["keys", "values", "the mask, and all else that is small"])
@torch.no_grad()
def test_torch_s_attention_reads_no_memory_behind_what_it_is_given(behind: str, size: int) -> None:
    """A ring of few slots has other tensors behind it, and so has its mask: what lies there must not matter.

    But for a last bit, which cuDNN's attention does not give the same every time.
    """
    shape = (3, 2, size, 64)
    q = torch.randn(3, 4, 1, 64, device="cuda", dtype=torch.bfloat16)
    real = torch.randn(2, *shape, device="cuda", dtype=torch.bfloat16)
    mask = torch.ones(3, 1, 1, size, dtype=torch.bool, device="cuda")
    found = []
    for filling in (0.0, torch.nan):
        memory = torch.zeros(2, real[0].numel() + 2**17, device="cuda", dtype=torch.bfloat16)
        for place, name in enumerate(("keys", "values")):
            if behind == name:
                memory[place] = filling
        k, v = (each[: real[0].numel()].view(shape).copy_(one) for each, one in zip(memory, real, strict=True))
        # What torch makes of the mask is put where the allocator gives it room: blocks that were just given back.
        small = [torch.full((256,), filling, device="cuda", dtype=torch.bfloat16) for _ in range(4000)]
        if behind not in ("keys", "values"):
            del small
        found.append(reference(q, k, v, mask, enable_gqa=True))
        small = []

    torch.testing.assert_close(found[1], found[0], rtol=2**-7, atol=2**-7)


def test_caches_in_turn_keep_apart_and_graphs_go_with_them() -> None:
    decoder = made()
    steps = WholeSteps(decoder, Graphs("cuda"))
    want = {seed: run(decoder, None, seed=seed) for seed in (1, 2, 3)}
    held = {seed: begun(decoder, seed=seed) for seed in want}
    caches = {seed: cache for seed, (cache, _) in held.items()}
    ids = {seed: first for seed, (_, first) in held.items()}
    found: dict[int, list[Tensor]] = {seed: [] for seed in want}
    with torch.no_grad():
        for _ in range(STEPS):
            for seed, cache in caches.items():
                logits = steps(ids[seed], cache)[:, -1]
                ids[seed] = logits.argmax(-1, keepdim=True)
                found[seed].append(logits)

    assert all(torch.equal(torch.stack(found[seed]), want[seed]) for seed in want)
    assert len(steps._captured) == 3
    del held, caches, cache
    gc.collect()
    assert len(steps._captured) == 0
    assert torch.equal(run(decoder, steps, seed=1), want[1])


def test_weights_that_move_between_steps_are_followed() -> None:
    decoder = made()
    steps = WholeSteps(decoder, Graphs("cuda"))
    cache, ids = begun(decoder)
    other, _ = begun(decoder)
    with torch.no_grad():
        assert torch.equal(steps(ids, cache), decoder.step(ids, other))
        for layer in decoder.model.layers:
            layer.mlp.down_proj.weight = nn.Parameter(layer.mlp.down_proj.weight * 0.5, requires_grad=False)
            layer.self_attn.o_proj.weight.data = layer.self_attn.o_proj.weight.data * 2
        for _ in range(3):
            assert torch.equal(steps(ids, cache), decoder.step(ids, other))


def test_a_policy_bound_between_steps_is_followed() -> None:
    decoder = made()
    steps = WholeSteps(decoder, Graphs("cuda"))
    (cache, ids), (other, _) = begun(decoder), begun(decoder)
    with torch.no_grad():
        for policy in ("auto", "exact", "sdpa-math", "auto", "exact"):
            with fb.bind(policy):
                assert torch.equal(steps(ids, cache), decoder.step(ids, other)), policy
    assert steps.report()["captured"] == 3


# ---- failures


def breaks(monkeypatch: pytest.MonkeyPatch, how: str, decoder: QwenDecoder) -> None:
    """Captures fail at their start, or half-way through."""
    if how == "at its start":

        def fails(*_arguments: object, **_given: object) -> None:
            msg = "no capture today"
            raise RuntimeError(msg)

        monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", fails)
        return
    layer = decoder.model.layers[2]
    attend = type(layer).attend

    def waits(*given: Any) -> Tensor:
        out = attend(layer, *given)
        if torch.cuda.is_current_stream_capturing():
            out.sum().item()
        return out

    monkeypatch.setattr(layer, "attend", waits)


@pytest.mark.parametrize("how", ["at its start", "half-way"])
def test_steps_that_fail_to_capture_are_the_eager_steps(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = made()
    want = run(decoder, None)
    breaks(monkeypatch, how, decoder)
    steps = WholeSteps(decoder, Graphs("cuda"))

    assert torch.equal(run(decoder, steps), want)
    assert torch.equal(run(decoder, steps), want)
    assert steps.report()["failed"]
    assert steps.report()["eager steps"] == 2 * STEPS
    assert torch.rand(2, device="cuda").isfinite().all()


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("policy", ["auto", "exact"])
@pytest.mark.parametrize("graphs", ["on", "off", "at its start", "half-way"])
def test_generated_ids_are_the_same_with_graphs_on_off_and_failing(
    sampled: bool, graphs: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = prompts()

    def ids_of(decoder: QwenDecoder) -> tuple[Tensor, Tensor | None]:
        sampler = Sampler(temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.2) if sampled else None
        generator = torch.Generator("cuda").manual_seed(3) if sampled else None
        with fb.bind(policy):
            out = decoder.generate(
                ids, attention_mask=mask, max_new_tokens=24, sampler=sampler, generator=generator, eos=7
            )
        return out, None if generator is None else generator.get_state()

    plain = made()
    plain.graphs = "step-eager"
    want, state = ids_of(plain)
    decoder = made()
    decoder.graphs = "step-eager" if graphs == "off" else "step"
    if graphs not in ("on", "off"):
        breaks(monkeypatch, graphs, decoder)
    for _ in range(2):
        found, after = ids_of(decoder)
        assert torch.equal(found, want)
        assert state is None or torch.equal(after, state)
    report = decoder.report()
    assert bool(report["graphs"].get("replays")) is (graphs == "on"), report
    assert (report["step"]["form"] == "one graph") is (graphs == "on"), report
    assert (report["step"]["why not one graph"] is None) is (graphs == "on"), report


def test_an_invalid_draw_inside_a_graph_is_multinomials_error() -> None:
    decoder = made()
    decoder.graphs = "step"
    ids, _ = prompts(1)
    generator = torch.Generator("cuda").manual_seed(0)
    stream = decoder.stream(ids, max_new_tokens=8, sampler=Sampler(), generator=generator, eos=())
    next(stream)
    next(stream)
    decoder.model.norm.weight.fill_(torch.nan)  # in place: the graph goes on with it
    with pytest.raises(DrawError, match="probability tensor contains"):
        next(stream)
    decoder.model.norm.weight.fill_(1.0)
    again = torch.Generator("cuda").manual_seed(0)
    assert decoder.generate(ids, max_new_tokens=8, sampler=Sampler(), generator=again, eos=()).shape == (1, LENGTH + 8)


@pytest.mark.parametrize("form", [True, "step"])
def test_norms_whose_weights_change_in_place_are_seen_by_graphs_that_joined_them(form: bool | str) -> None:
    decoder, plain = made().to(torch.float32).fuse(), made().to(torch.float32).fuse()
    decoder.exact_glue = plain.exact_glue = False  # which need no weights of queries and keys in one tensor
    decoder.graphs, plain.graphs = form, "step-eager" if form == "step" else False
    ids, mask = prompts()
    for scale in (1.0, 2.0, 0.25):
        for each in (decoder, plain):
            for layer in each.model.layers:
                layer.self_attn.q_norm.weight.data.mul_(scale)
        torch.randn(2**20, device="cuda")  # over what was let go
        want = plain.generate(ids, attention_mask=mask, max_new_tokens=STEPS, eos=())
        for _ in range(2):
            assert torch.equal(decoder.generate(ids, attention_mask=mask, max_new_tokens=STEPS, eos=()), want), scale

    assert decoder.report()["graphs"]["captured"] == (1 if form == "step" else LAYERS + 1)


# ---- requests


def test_caches_of_many_shapes_take_turns_and_the_oldest_gives_back_its_memory_for_graphs() -> None:
    decoder = made()
    decoder.graphs = "step"
    for batch in (1, 2, 3, 1, 2, 3):
        for length in (17, 300):
            decoder.generate(prompts(batch, length)[0], max_new_tokens=4, eos=())
    (steps,) = decoder._whole.values()

    assert len(steps._captured) == len(steps._spare) == 4
    assert decoder.report()["graphs"]["captured"] == 12
    used = {id(each.graph.pool) for held in steps._captured.values() for each in held.values()}
    spare = {id(each) for each in steps._graphs._spare}
    assert (len(used), len(spare)) == (4, 1)  # the one that the last cache to go gave back


def test_the_next_request_of_a_shape_has_the_graph_of_the_last() -> None:
    decoder = made()
    decoder.graphs = "step"
    for seed in range(4):
        ids, mask = prompts(seed=seed)
        sampler, generator = Sampler(top_k=20), torch.Generator("cuda").manual_seed(seed)
        mine = decoder.generate(ids, attention_mask=mask, max_new_tokens=16, sampler=sampler, generator=generator)
        decoder.graphs = "step"
        other = made()
        other.graphs = "step-eager"
        generator.manual_seed(seed)
        want = other.generate(ids, attention_mask=mask, max_new_tokens=16, sampler=sampler, generator=generator)
        assert torch.equal(mine, want)

    assert decoder.report()["graphs"]["captured"] == 1


def test_samplers_in_turn_have_each_a_graph_of_its_own_and_the_oldest_goes() -> None:
    decoder, plain = made(), made()
    decoder.graphs, plain.graphs = "step", "step-eager"
    ids, mask = prompts()
    for turn in range(2):
        for top_k in (2, 3, 5, 8, 13, 21, 2):
            found = []
            for each in (decoder, plain):
                sampler, generator = Sampler(top_k=top_k), torch.Generator("cuda").manual_seed(turn)
                found.append(
                    each.generate(ids, attention_mask=mask, max_new_tokens=6, sampler=sampler, generator=generator)
                )
            assert torch.equal(*found), (turn, top_k)
    (cache,) = decoder._whole[decoder.device, True]._spare
    assert len(decoder._whole[decoder.device, True]._captured[cache]) == 4


@torch.no_grad()
def test_a_state_that_the_graph_was_not_captured_with_is_followed() -> None:
    decoder, sampler = made(), Sampler(do_sample=False, repetition_penalty=1.5)
    steps = WholeSteps(decoder, Graphs("cuda"))
    (cache, first), (other, _) = begun(decoder), begun(decoder)
    for _ in range(2):  # the second time over the same cache, with another state
        states = [sampler.start(first, VOCABULARY) for _ in range(2)]
        ids = mine = first
        for _ in range(5):
            ids = sampler(decoder.step(ids, other), states[0])
            mine = steps.draw(mine, cache, sampler, states[1])
            assert torch.equal(mine, ids)
        assert torch.equal(*(each.seen_and_beyond for each in states))
    assert steps.report()["captured"] == 2


def test_two_requests_on_two_threads_get_each_its_own_ids() -> None:
    decoder, plain = made(), made()
    decoder.graphs, plain.graphs = "step", "step-eager"

    def ids_of(made: QwenDecoder, seed: int) -> Tensor:
        ids, mask = prompts(seed=seed)
        generator = torch.Generator("cuda").manual_seed(seed)
        return made.generate(
            ids, attention_mask=mask, max_new_tokens=40, sampler=Sampler(top_k=30), generator=generator
        )

    want = {seed: ids_of(plain, seed) for seed in (1, 2)}
    torch.cuda.synchronize()
    found, errors, barrier = {}, [], threading.Barrier(2)

    def body(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(3):
                    barrier.wait()
                    found[seed] = ids_of(decoder, seed)
                    torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=body, args=(seed,)) for seed in want]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert not errors, errors
    assert all(torch.equal(found[seed], want[seed]) for seed in want)


def test_a_function_that_draws_is_given_the_logits_of_every_step() -> None:
    decoder, plain = made(), made()
    decoder.graphs, plain.graphs = "step", "step-eager"
    ids, mask = prompts()
    seen: list[Tensor] = []

    def least(logits: Tensor, _index: int) -> Tensor:
        seen.append(logits)
        return logits.argmin(-1)

    mine = decoder.generate(ids, attention_mask=mask, max_new_tokens=10, sampler=least)
    theirs = plain.generate(ids, attention_mask=mask, max_new_tokens=10, sampler=least)

    assert torch.equal(mine, theirs)
    assert all(torch.equal(a, b) for a, b in zip(seen[:10], seen[10:], strict=True))


@torch.no_grad()
def test_a_step_waits_for_nothing() -> None:
    decoder = made(**SLIDING)
    steps = WholeSteps(decoder, Graphs("cuda"))
    sampler = Sampler(top_k=20, temperature=0.8)
    with fb.bind("exact"):
        cache, ids = begun(decoder)
        generator = torch.Generator("cuda").manual_seed(1)
        state = steps.start(cache, sampler, sampler.start(ids, VOCABULARY, generator=generator))
        ids = steps.draw(ids, cache, sampler, state)
        logits = steps(ids, cache)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(6):
                ids = steps.draw(ids, cache, sampler, state)
                logits = steps(ids, cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    assert logits.isfinite().all()
    assert steps.report()["failed"] is None


# ---- launching ahead


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("form", ["plain", "products"])
@pytest.mark.parametrize("eos", [(), 7, tuple(range(100, 140))])
def test_steps_launched_ahead_leave_tokens_generators_and_counts_alone(eos: object, form: str, sampled: bool) -> None:
    decoder = made()
    if form == "products":
        decoder.fuse(products=True)
    decoder.graphs = "step"
    ids, mask = prompts()
    found = []
    for ahead in (False, True, False, True):
        sampler = Sampler(temperature=0.9, top_k=40, repetition_penalty=1.2) if sampled else None
        generator, record = torch.Generator("cuda").manual_seed(3), fb.Run()
        with fb.bind("exact", run=record):
            out = decoder.generate(
                ids, attention_mask=mask, max_new_tokens=40, sampler=sampler, generator=generator, eos=eos, ahead=ahead
            )
        used = sum(record.report()["attention"]["used"].values())
        found.append((out.tolist(), generator.get_state().tolist(), used))
        assert used == LAYERS * (out.shape[1] - LENGTH)

    assert found[0] == found[1] == found[2] == found[3]
    assert decoder.report()["step"]["form"] == "one graph", decoder.report()


def test_a_cache_that_is_full_doubles_while_steps_are_launched_ahead() -> None:
    decoder = made()
    decoder.graphs = "step"
    ids, mask = prompts()
    sampler = Sampler(top_k=30)
    found = []
    for ahead in (False, True):
        generator = torch.Generator("cuda").manual_seed(1)
        stream = decoder.stream(
            ids, attention_mask=mask, max_new_tokens=1400, sampler=sampler, generator=generator, eos=(), ahead=ahead
        )
        with fb.bind("sdpa-math"):  # which gives the same bits every time
            found.append([token.ids for token in stream])

    assert found[0] == found[1]


def test_a_stream_that_is_closed_has_drawn_what_was_asked_for() -> None:
    decoder = made()
    decoder.graphs = "step"
    ids, mask = prompts()
    found = []
    for ahead in (False, True):
        generator = torch.Generator("cuda").manual_seed(1)
        stream = decoder.stream(
            ids, attention_mask=mask, max_new_tokens=20, sampler=Sampler(), generator=generator, eos=(), ahead=ahead
        )
        tokens = [next(stream).ids for _ in range(7)]
        stream.close()
        found.append((tokens, generator.get_state().tolist()))

    assert found[0] == found[1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_decoder_on_a_device_that_is_not_the_current_one() -> None:
    for given in ({}, {"glue": True}, {"products": True}):
        decoder = made().to("cuda:1").fuse(**given)
        ids = prompts()[0].to("cuda:1")
        decoder.graphs = "step-eager"
        want = decoder.generate(ids, max_new_tokens=8)
        decoder.graphs = "step"

        assert torch.equal(decoder.generate(ids, max_new_tokens=8), want)
        assert decoder.report()["step"]["form"] == "one graph"
