"""What only a GPU shows of sampling: torch's Philox draws, the device's own bits, no waits, and CUDA graphs."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator

import attrs
import pytest
import torch
from torch import Tensor

from fuseboard.engine import sampling as fs
from fuseboard.engine.sampling import DrawError, Sampler, State

pytestmark = pytest.mark.gpu

QWEN = 151936
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INF, NAN = torch.inf, torch.nan


def seeded(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


@pytest.fixture
def no_waits() -> Iterator[Callable[[bool], None]]:
    """Turn an error for every wait on or off; off again afterwards."""

    def switch(on: bool) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that the switch is a prototype
            torch.cuda.set_sync_debug_mode("error" if on else "default")

    yield switch
    switch(False)


# ---- draws


def weights(choose: random.Random, batch: int, categories: int, seed: int) -> Tensor:
    drawn = torch.randn(batch, categories, generator=seeded(seed), device="cuda")
    kind = choose.choice(["softmax", "sparse", "one hot", "unnormalised"])
    if kind == "softmax":
        return (3 * drawn).softmax(-1)
    if kind == "sparse":
        drawn = drawn.relu()
        drawn[:, 0] = 1
        return drawn
    if kind == "one hot":
        return torch.zeros_like(drawn).scatter_(1, drawn.argmax(-1, keepdim=True), 1.0)
    return drawn.exp() * 50


def laid_out(choose: random.Random, probs: Tensor) -> Tensor:
    layout = choose.choice(["plain", "one row", "transposed", "strided", "sliced", "expanded"])
    batch, categories = probs.shape
    if layout == "transposed":
        return probs.t().contiguous().t()
    if layout == "strided":
        wide = probs.new_zeros(batch, 2 * categories)
        wide[:, ::2] = probs
        return wide[:, ::2]
    if layout == "sliced":
        wide = probs.new_zeros(batch + 2, categories + 3)
        wide[1:-1, 2:-1] = probs
        return wide[1:-1, 2:-1]
    if layout == "expanded":
        return probs[:1].expand(batch, categories)
    return probs[0] if layout == "one row" else probs


def test_four_hundred_draws_are_torchs_in_ids_and_generator_state():
    choose = random.Random(0)
    for seed in range(400):
        batch, categories = choose.randint(1, 8), choose.choice([1, 2, 7, 100, 1024, 4097, 32000, QWEN])
        probs = laid_out(choose, weights(choose, batch, categories, seed).to(choose.choice(DTYPES)))
        n, ours, theirs = choose.randint(1, min(10, categories)), seeded(seed), seeded(seed)
        expected = torch.multinomial(probs, n, generator=theirs)
        invalid = fs.new_invalid("cuda")

        assert torch.equal(fs.multinomial_draws(probs, n, ours, invalid=invalid), expected), (probs.shape, probs.dtype)
        assert torch.equal(ours.get_state(), theirs.get_state())
        assert not invalid.any()


def test_without_a_generator_the_devices_default_one_is_used():
    probs = torch.rand(4, 1000, device="cuda")
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        torch.cuda.manual_seed(3)
        expected = torch.multinomial(probs, 1), torch.cuda.get_rng_state()
        torch.cuda.manual_seed(3)
        found = fs.multinomial1(probs), torch.cuda.get_rng_state()

    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.5, NAN, 0.5], [True, False]),
        ([0.5, INF, 0.5], [True, False]),
        ([0.5, -0.1, 0.5], [True, False]),
        ([0.0, -0.0, 0.0], [False, True]),
        ([0.0, 1e-30, 0.0], [False, False]),
    ],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_wrong_values_are_recorded_on_the_device(values, expected, rows):
    probs = torch.cat([torch.full((rows - 1, 3), 0.3), torch.tensor([values])]).cuda()
    invalid = fs.new_invalid("cuda")

    fs.multinomial1(probs, invalid=invalid)

    assert invalid.tolist() == expected


# ---- processors


def scores_of(choose: random.Random, vocab: int, dtype: torch.dtype) -> Tensor:
    # Two rows at least: of one row alone torch's cumsum is another one on a GPU, whose last bits differ from run to run
    # (pytorch #75240), and with them, rarely, where top-p cuts; in transformers as here.
    scores = torch.randn(choose.randint(2, 4), vocab, generator=seeded(choose.randrange(2**31)), device="cuda")
    scores *= choose.choice([0.1, 1.0, 5.0, 60.0])
    kind = choose.choice(["plain", "ties", "masked", "nan", "constant"])
    if kind == "ties":
        scores = scores.round()
    elif kind == "masked":
        scores[:, 1:] = scores[:, 1:].masked_fill(scores[:, 1:] < 1, -INF)
    elif kind == "nan":
        scores[0, choose.randrange(vocab)] = NAN
    elif kind == "constant":
        scores.fill_(choose.choice([0.0, 1.0, -3.0]))
    return scores.to(dtype)


def same(found: Tensor, expected: Tensor) -> bool:
    if found.dtype != expected.dtype or not torch.equal(found.isnan(), expected.isnan()):
        return False
    return torch.equal(found.nan_to_num(0.0), expected.nan_to_num(0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_processors_are_transformers_on_the_device(dtype):
    hf = pytest.importorskip("transformers.generation.logits_process", reason="transformers is not installed")
    choose = random.Random(0)
    for _ in range(60):
        scores = scores_of(choose, choose.choice([1, 2, 100, 4096, 32000, QWEN]), dtype)
        batch, vocab = scores.shape
        history = torch.randint(vocab, (batch, 12), generator=seeded(choose.randrange(2**31)), device="cuda")
        seen = fs.seen_mask(history[:, :9], vocab)
        fs.mark_seen(seen, history[:, 9:])
        penalty, heat = choose.choice([0.7, 1.1, 1.3, 3.0]), choose.choice([0.3, 0.7, 0.8, 1.3])
        k, p, share = choose.choice([1, 5, 50, 10**6]), choose.choice([0.0, 0.5, 0.8, 0.95]), choose.choice([0.0, 0.1])
        ids = [0, vocab // 2, vocab + 1]
        penalised = hf.RepetitionPenaltyLogitsProcessor(penalty)(history, scores)

        assert same(fs.repetition_penalty(scores, history, penalty), penalised)
        assert same(fs.repetition_penalty_seen(scores, seen, penalty), penalised)
        suppressed = hf.SuppressTokensLogitsProcessor(ids, device="cuda")(history, scores)
        assert same(fs.suppress(scores, fs.token_mask(ids, vocab, scores.device)), suppressed)
        assert same(fs.temperature(scores, heat), hf.TemperatureLogitsWarper(heat)(history, scores))
        assert same(fs.top_k(scores, k), hf.TopKLogitsWarper(k)(history, scores))
        assert same(fs.top_p(scores, p), hf.TopPLogitsWarper(p)(history, scores))
        assert same(fs.min_p(scores, share), hf.MinPLogitsWarper(share)(history, scores))


# ---- the sampler

EVERYTHING = Sampler(
    temperature=0.8, top_k=200, top_p=0.95, min_p=0.001, repetition_penalty=1.2, min_new_tokens=3, eos_token_id=[3, 4],
    pad_token_id=0, suppress_tokens=[1, 2], begin_suppress_tokens=[9],
)  # fmt: skip
SAMPLERS = [EVERYTHING, attrs.evolve(EVERYTHING, do_sample=False), Sampler(), Sampler(do_sample=False)]
VOCAB, BATCH, STEPS = 4096, 3, 12


def logits_of_steps() -> Tensor:
    logits = torch.randn(STEPS, BATCH, VOCAB, generator=seeded(1), device="cuda")
    logits[5:, 0, 3] = 40.0  # the first row ends there
    return logits.bfloat16()


def started(sampler: Sampler, seed: int = 0) -> State:
    prompt = torch.randint(VOCAB, (BATCH, 7), generator=seeded(2), device="cuda")
    return sampler.start(prompt, VOCAB, generator=seeded(seed))


def test_generate_on_the_device_draws_the_same_ids_from_the_same_logits():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.Qwen3Config(
        vocab_size=1000, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, initializer_range=0.5,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    device = torch.cuda.current_device()
    with torch.random.fork_rng(devices=[device]):
        torch.manual_seed(0)
        model = transformers.Qwen3ForCausalLM(config).eval().to(device="cuda", dtype=torch.bfloat16)
    model.generation_config = transformers.GenerationConfig()
    choose = random.Random(0)
    for seed in range(40):
        given = transformers.GenerationConfig(
            do_sample=True, max_new_tokens=6, return_dict_in_generate=True, output_logits=True, output_scores=True,
            temperature=choose.choice([0.5, 0.8, 1.0, 1.5]), top_k=choose.choice([0, 5, 50]),
            top_p=choose.choice([0.5, 0.9, 1.0]), repetition_penalty=choose.choice([1.0, 1.3]),
            min_p=choose.choice([None, 0.05]), suppress_tokens=choose.choice([None, [3, 4, 5]]),
            min_new_tokens=choose.choice([None, 2]), eos_token_id=choose.choice([None, list(range(200))]),
            pad_token_id=0,
        )  # fmt: skip
        prompt = torch.randint(1000, (choose.randint(2, 4), 5), generator=seeded(seed), device="cuda")
        with torch.random.fork_rng(devices=[device]):
            torch.cuda.manual_seed(seed)
            out = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=given)
        sampler = Sampler.from_generation_config(given)
        state = sampler.start(prompt, 1000, generator=seeded(seed))
        new = out.sequences[:, prompt.shape[1] :]
        for place in range(new.shape[1]):
            assert torch.equal(sampler.scores(out.logits[place], state), out.scores[place]), sampler
            assert torch.equal(sampler(out.logits[place], state), new[:, place : place + 1]), sampler


def test_the_check_for_waits_finds_one(no_waits):
    # Not torch.multinomial's own: on torch 2.11 the check passed over them.
    probs = torch.rand(2, 100, device="cuda")
    no_waits(True)
    with pytest.raises(RuntimeError, match="synchronizing"):
        probs.sum().item()


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.describe()[:20])
def test_a_step_waits_for_nothing(sampler, no_waits):
    state, logits = started(sampler), logits_of_steps()
    torch.cuda.synchronize()
    no_waits(True)
    steps = [sampler(each, state) for each in logits]
    no_waits(False)

    assert [len(state.read(each).ids) for each in steps] == [BATCH] * STEPS


def test_a_start_whose_masks_are_made_already_waits_for_nothing(no_waits):
    started(EVERYTHING)
    prompt, generator = torch.zeros(BATCH, 7, dtype=torch.int64, device="cuda"), seeded(0)
    padding = torch.ones_like(prompt)
    no_waits(True)
    state = EVERYTHING.start(prompt, VOCAB, generator=generator, attention_mask=padding)
    no_waits(False)

    assert state.seen is not None
    assert state.seen.sum().item() == BATCH


def test_draws_and_processors_wait_for_nothing(no_waits):
    probs, scores = torch.rand(3, VOCAB, device="cuda"), torch.randn(3, VOCAB, device="cuda")
    ids, invalid, generator = torch.zeros(3, 2, dtype=torch.int64, device="cuda"), fs.new_invalid("cuda"), seeded(0)
    eos = fs.token_mask([1, 2], VOCAB, scores.device)
    no_waits(True)
    fs.multinomial1(probs, generator, invalid=invalid)
    fs.multinomial_draws(probs, 5, generator, invalid=invalid)
    seen = fs.seen_mask(ids, VOCAB)
    fs.mark_seen(seen, ids)
    fs.repetition_penalty_seen(scores, seen, 1.2)
    fs.repetition_penalty(scores, ids, 1.2)
    fs.min_new_tokens(scores, eos, 0, 2)
    fs.suppress(scores, eos)
    fs.top_p(fs.min_p(fs.top_k(fs.temperature(scores, 0.5), 5), 0.1), 0.9)
    no_waits(False)


def test_a_read_raises_torchs_words_for_scores_without_a_token_left():
    sampler = Sampler(suppress_tokens=[0, 1, 2])
    state = sampler.start(torch.zeros(1, 1, dtype=torch.int64, device="cuda"), 3)
    ids = sampler(torch.ones(1, 3, device="cuda"), state)

    with pytest.raises(DrawError, match=r"^probability tensor contains either `inf`, `nan` or element < 0$"):
        state.read(ids)


# ---- CUDA graphs


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.describe()[:20])
def test_a_step_captured_in_a_graph_replays_what_eager_steps_do(sampler):
    logits = logits_of_steps()
    eager = started(sampler)
    expected = [eager.read(sampler(each, eager)) for each in logits]

    state, static = started(sampler), logits[0].clone()
    saved, at = [each.clone() for each in state.tensors], state.generator.get_state()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            sampler(static, state)
        for tensor, before in zip(state.tensors, saved, strict=True):
            tensor.copy_(before)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    state.generator.set_state(at)

    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(state.generator)
    with torch.cuda.graph(graph, stream=side):
        ids = sampler(static, state)
    found = []
    for each in logits:
        static.copy_(each)
        graph.replay()
        found.append(state.read(ids))

    assert found == expected
    assert torch.equal(state.generator.get_state(), eager.generator.get_state())
    assert all(map(torch.equal, state.tensors, eager.tensors))
    torch.cuda.synchronize()  # before the graph goes: torch up to 2.13 frees its generator's tensors while it may run


def test_a_draw_in_a_graph_records_a_wrong_value_at_its_replay():
    probs, invalid, generator = torch.full((2, 100), 0.5, device="cuda"), fs.new_invalid("cuda"), seeded(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fs.multinomial1(probs, generator, invalid=invalid)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph, stream=side):
        fs.multinomial1(probs, generator, invalid=invalid)
    graph.replay()
    before = invalid.tolist()
    probs[1, 3] = NAN
    graph.replay()

    assert (before, invalid.tolist()) == ([False, False], [True, False])
    torch.cuda.synchronize()
