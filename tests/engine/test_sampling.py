"""The sampler against transformers' generate: scores, ids, the generator's state; refusals; that nothing waits."""

from __future__ import annotations

import inspect
import random
import subprocess
import sys

import attrs
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fuseboard import InputError
from fuseboard.engine import sampling as fs
from fuseboard.engine.sampling import DrawError, Sampler, State, Step, options

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

VOCABULARY = 40
QWEN = 151936
# transformers 5.x does, older ones count it.
PASSES_OVER_PADDING = "padding_lengths" in inspect.getsource(transformers.GenerationMixin._get_logits_processor)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def model():
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, initializer_range=0.5,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = transformers.Qwen3ForCausalLM(config).eval()
    made.generation_config = transformers.GenerationConfig()
    return made


# ---- against generate


def some_options(choose: random.Random) -> dict[str, object]:
    """Each option is set about half the time, also to values that mean nothing."""
    given = {
        "temperature": [0.3, 0.8, 1.0, 1.7],
        "top_k": [1, 3, 10, 50],
        "top_p": [0.1, 0.5, 0.9, 1.0],
        "min_p": [0.0, 0.02, 0.3],
        "repetition_penalty": [0.7, 1.0, 1.1, 2.0],
        "min_new_tokens": [0, 1, 3, 6],
        "suppress_tokens": [[], [7], [3, 9, 11, VOCABULARY + 4]],
        "begin_suppress_tokens": [[5], [0, 1, 2]],
        "eos_token_id": [5, [5, 6, 8], [20, 21, 22, 23, 24, 25, 26, 27, 28]],
        "pad_token_id": [0, 7, 39],
    }
    return {name: choose.choice(values) for name, values in given.items() if choose.random() < 0.55}


def some_prompt(choose: random.Random) -> tuple[Tensor, Tensor]:
    batch, length = choose.randint(1, 4), choose.randint(1, 6)
    ids = torch.tensor([[choose.randrange(VOCABULARY) for _ in range(length)] for _ in range(batch)])
    mask = torch.ones_like(ids)
    if PASSES_OVER_PADDING:
        for row in range(batch):
            mask[row, : choose.choice([0, 0, length // 2])] = 0
    return ids, mask


def generated(model, config, ids: Tensor, mask: Tensor, seed: int):
    """What transformers makes of it, with its generator's state afterwards: the global one, put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        out = model.generate(ids, attention_mask=mask, generation_config=config)
        return out, torch.get_rng_state()


def assert_as_generate(model, seed: int, do_sample: bool) -> str:
    choose = random.Random(seed)
    config = transformers.GenerationConfig(
        **some_options(choose), do_sample=do_sample, max_new_tokens=6,
        return_dict_in_generate=True, output_logits=True, output_scores=True,
    )  # fmt: skip
    ids, mask = some_prompt(choose)
    out, rng_state = generated(model, config, ids, mask, seed)
    sampler, generator = Sampler.from_generation_config(config), seeded(seed)

    state = sampler.start(ids, VOCABULARY, generator=generator, attention_mask=mask)
    new = out.sequences[:, ids.shape[1] :]
    assert len(out.logits) == new.shape[1] > 0
    for place, (logits, scores) in enumerate(zip(out.logits, out.scores, strict=True)):
        assert torch.equal(sampler.scores(logits, state), scores), sampler
        found = sampler(logits, state)
        assert torch.equal(found, new[:, place : place + 1]), sampler
        step = state.read(found)
        assert step.ids == tuple(new[:, place].tolist())
        assert step.done == all(step.finished)
        assert step.done is False or place == new.shape[1] - 1
    assert torch.equal(generator.get_state(), rng_state)
    assert step.done or new.shape[1] == 6
    return "finished" if step.done else "some finished" if any(step.finished) else "none finished"


def test_scores_ids_and_generator_are_generates_over_hundreds_of_combinations(model):
    ends = [assert_as_generate(model, seed, do_sample=True) for seed in range(240)]

    assert set(ends) == {"finished", "some finished", "none finished"}


def test_greedy_scores_and_ids_are_generates(model):
    for seed in range(40):
        assert_as_generate(model, seed, do_sample=False)


@pytest.mark.slow
def test_scores_ids_and_generator_are_generates_over_thousands_of_combinations(model):
    for seed in range(1000, 3000):
        assert_as_generate(model, seed, do_sample=seed % 5 != 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_are_made_float32_before_anything_else_as_transformers_does(dtype):
    logits = torch.randn(2, 1000, generator=seeded(0)).to(dtype)
    prompt = torch.tensor([[1, 2], [3, 4]])
    sampler = Sampler(temperature=0.7, top_p=0.9, repetition_penalty=1.3)
    processors = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(1.3),
            transformers.TemperatureLogitsWarper(0.7),
            transformers.TopPLogitsWarper(0.9),
        ]
    )
    expected = processors(prompt, logits.to(torch.float32))

    assert torch.equal(sampler.scores(logits, sampler.start(prompt, 1000)), expected)


def test_of_logits_with_a_length_the_last_position_counts():
    logits = torch.randn(2, 5, 30, generator=seeded(0))
    sampler = Sampler(top_k=3)
    prompt = torch.zeros(2, 1, dtype=torch.int64)

    found = sampler(logits, sampler.start(prompt, 30, generator=seeded(1)))

    assert torch.equal(found, sampler(logits[:, -1], sampler.start(prompt, 30, generator=seeded(1))))


def test_logits_that_want_a_gradient_are_sampled_without_one():
    logits = torch.randn(1, 30, requires_grad=True)
    sampler = Sampler(top_k=3, repetition_penalty=1.1)
    state = sampler.start(torch.tensor([[1]]), 30)

    assert not sampler.scores(logits, state).requires_grad


def test_without_a_prompt_only_what_was_drawn_is_penalised():
    sampler = Sampler(do_sample=False, repetition_penalty=4.0)
    state = sampler.start(torch.zeros(1, 0, dtype=torch.int64), 3)
    logits = torch.tensor([[4.0, 3.0, 2.0]])

    assert [state.read(sampler(logits, state)).ids[0] for _ in range(4)] == [0, 1, 2, 0]


def test_a_finished_row_goes_on_with_padding_and_the_others_go_on():
    sampler = Sampler(do_sample=False, eos_token_id=2, pad_token_id=7)
    state = sampler.start(torch.zeros(2, 1, dtype=torch.int64), 3)
    steps = []
    for best in ([2, 0], [1, 0], [0, 2]):
        logits = torch.nn.functional.one_hot(torch.tensor(best), 3).float()
        steps.append(state.read(sampler(logits, state)))

    assert steps == [Step((2, 0), (True, False)), Step((7, 0), (True, False)), Step((7, 2), (True, True))]
    assert [each.done for each in steps] == [False, False, True]


def test_the_padding_is_the_first_end_where_none_is_given():
    sampler = Sampler(do_sample=False, eos_token_id=[2, 1])
    state = sampler.start(torch.zeros(1, 1, dtype=torch.int64), 3)
    logits = torch.tensor([[0.0, 9.0, 1.0]])

    assert [state.read(sampler(logits, state)).ids for _ in range(2)] == [(1,), (2,)]


def test_a_state_started_in_inference_mode_serves_outside_and_the_other_way_round():
    sampler = Sampler(repetition_penalty=1.2, eos_token_id=1, min_new_tokens=1, suppress_tokens=[87])
    logits = torch.randn(1, 91)
    with torch.inference_mode():
        inside = sampler.start(torch.zeros(1, 2, dtype=torch.int64), 91)
        sampler(logits.clone(), inside)
    sampler(logits, inside)
    outside = sampler.start(torch.zeros(1, 2, dtype=torch.int64), 91)
    with torch.inference_mode():
        sampler(logits.clone(), outside)
    sampler(logits, outside)


def test_the_changed_tensors_put_back_and_the_generator_too_repeat_a_step():
    sampler = Sampler(repetition_penalty=3.0, eos_token_id=1, min_new_tokens=2, begin_suppress_tokens=[3, 4])
    state = sampler.start(torch.zeros(3, 2, dtype=torch.int64), 11, generator=seeded(0))
    logits = torch.randn(4, 3, 11, generator=seeded(1))
    saved, at = [each.clone() for each in state.tensors], state.generator.get_state()
    first = [state.read(sampler(each, state)) for each in logits]
    for tensor, before in zip(state.tensors, saved, strict=True):
        tensor.copy_(before)
    state.generator.set_state(at)

    assert [state.read(sampler(each, state)) for each in logits] == first
    assert {each.name for each in attrs.fields(State)} >= {"finished", "invalid", "count", "seen_and_beyond"}


# ---- O-14


def test_o14_a_half_precision_sampler_never_draws_a_token_of_probability_zero():
    probs = torch.zeros(10, QWEN, dtype=torch.float16)
    probs[:, 0] = 1
    sampler = Sampler()
    state = sampler.start(torch.zeros(10, 0, dtype=torch.int64), QWEN, generator=seeded(0))
    logits = probs.log()

    for _ in range(150):
        assert not sampler(logits, state).any()
    assert not state.invalid.any()


def test_o14_rows_of_zero_and_one_in_float32_give_one_every_time():
    probs = torch.tensor([[0.0, 1.0]]).expand(100_000, 2)
    for seed in range(15):
        assert fs.multinomial1(probs, seeded(seed)).all()
    state = Sampler().start(torch.zeros(100_000, 0, dtype=torch.int64), 2, generator=seeded(0))

    assert Sampler()(probs.log(), state).all()


# ---- values that cannot be drawn from


def test_scores_without_a_token_left_raise_torchs_error_at_the_one_read():
    sampler = Sampler(suppress_tokens=[0, 1, 2])
    state = sampler.start(torch.zeros(1, 1, dtype=torch.int64), 3)
    ids = sampler(torch.ones(1, 3), state)
    with pytest.raises(RuntimeError) as theirs:
        torch.multinomial(torch.full((1, 3), -torch.inf).softmax(-1), 1)
    with pytest.raises(DrawError) as ours:
        state.read(ids)

    assert str(ours.value) == str(theirs.value)


def test_a_state_goes_on_after_the_error_was_read():
    sampler = Sampler()
    state = sampler.start(torch.zeros(1, 1, dtype=torch.int64), 3, generator=seeded(0))
    with pytest.raises(DrawError):
        state.read(sampler(torch.full((1, 3), torch.nan), state))

    ids = sampler(torch.tensor([[-torch.inf, 0.0, -torch.inf]]), state)

    assert state.read(ids).ids == (1,)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_odd_logits_raise_where_generate_raises(value):
    logits = torch.tensor([[0.5, value, 1.0], [1.0, 2.0, 3.0]])
    sampler = Sampler(temperature=0.5, top_k=2, top_p=0.9)
    state = sampler.start(torch.zeros(2, 1, dtype=torch.int64), 3)
    ids = sampler(logits, state)
    with pytest.raises(RuntimeError) as theirs:
        torch.multinomial(logits.softmax(-1), 1)

    assert state.invalid.tolist() == [True, False]
    with pytest.raises(DrawError) as ours:
        state.read(ids)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [{}, {"suppress_tokens": (5,)}, {"repetition_penalty": 1.3}])
def test_greedy_ids_of_low_logits_are_those_of_float32_where_many_are_equal(dtype, given):
    sampler = Sampler(do_sample=False, **given)
    ids = torch.arange(8).view(4, 2)
    logits = torch.randint(-3, 4, (4, 64), generator=torch.Generator().manual_seed(0)).to(dtype)
    low, wide = (sampler(each, sampler.start(ids, 64)) for each in (logits, logits.float()))

    assert torch.equal(low, wide)


def test_greedy_takes_nan_for_the_most_probable_as_generate_does():
    sampler = Sampler(do_sample=False)
    state = sampler.start(torch.zeros(1, 1, dtype=torch.int64), 3)

    assert state.read(sampler(torch.tensor([[0.5, torch.nan, 1.0]]), state)).ids == (1,)


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": 2}, "temperature is 2; it has to be a strictly positive float."),
        (
            {"temperature": 0.0},
            "temperature is 0.0; it has to be a strictly positive float. For greedy decoding set do_sample=False.",
        ),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0; it has to be a strictly positive float."),
        ({"top_k": -5}, "top_k is -5; it has to be a strictly positive int."),
        ({"top_k": 2.5}, "top_k is 2.5; it has to be a strictly positive int."),
        ({"top_p": 1.5}, "top_p is 1.5; it has to be a float from 0 to 1."),
        ({"min_p": -0.5}, "min_p is -0.5; it has to be a float from 0 to 1."),
        ({"min_new_tokens": -1}, "min_new_tokens is -1; it has to be a strictly positive int."),
        ({"suppress_tokens": ["a"]}, "suppress_tokens has 'a'; expected ids, each an int."),
        ({"eos_token_id": [1.5]}, "eos_token_id has 1.5; expected ids, each an int."),
        (
            {"repetition_penalty": 1.1, "pad_token_id": -100},
            "pad_token_id is -100; with a repetition penalty it has to be 0 or more.",
        ),
        ({"eos_token_id": 2.0}, "eos_token_id has 2.0; expected ids, each an int."),
        ({"suppress_tokens": torch.tensor(2)}, "suppress_tokens has tensor(2); expected ids, each an int."),
        ({"pad_token_id": 2.5, "eos_token_id": 1}, "pad_token_id is 2.5; expected an id, an int, or None."),
        ({"pad_token_id": [0], "repetition_penalty": 1.1}, "pad_token_id is [0]; expected an id, an int, or None."),
        ({"pad_token_id": 2**63, "eos_token_id": 1}, f"pad_token_id is {2**63}; expected an id, an int, or None."),
        ({"do_sample": "no"}, "do_sample is 'no'; expected True or False."),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_its_name(arguments, message):
    with pytest.raises(InputError) as caught:
        Sampler(**arguments)

    assert str(caught.value) == message
    assert caught.value.argument == message.partition(" ")[0]


def test_a_sampler_is_data_that_compares_hashes_and_does_not_change():
    sampler = Sampler(top_k=5, suppress_tokens=[1, 2])

    assert sampler == Sampler(top_k=5, suppress_tokens=(1, 2))
    assert hash(sampler) == hash(Sampler(top_k=5, suppress_tokens=(1, 2)))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        sampler.top_k = 6


@pytest.mark.parametrize(
    ("prompt", "rest", "message"),
    [
        (torch.zeros(3), {}, "prompt_ids is torch.float32 (3,); expected int64 ids (batch, length)."),
        (
            torch.zeros(2, 3, dtype=torch.int64),
            {"attention_mask": torch.ones(2, 4)},
            "attention_mask has shape (2, 4); expected that of prompt_ids, (2, 3).",
        ),
        (torch.zeros(2, 3, dtype=torch.int64), {"vocab": 0}, "vocab is 0; it has to be a strictly positive int."),
        ([[1]], {}, "prompt_ids is a list; expected int64 ids (batch, length)."),
        (
            torch.zeros(1, 1, dtype=torch.int64),
            {"attention_mask": [[1]]},
            "attention_mask is a list; expected a tensor, as prompt_ids is.",
        ),
        (
            torch.zeros(1, 1, dtype=torch.int64),
            {"generator": 5},
            "generator is a int; expected a torch.Generator of cpu, or None.",
        ),
        (torch.tensor([[3, -2]]), {}, "prompt_ids has -2; expected ids of 0 or more."),
    ],
)
def test_a_start_that_cannot_be_is_refused(prompt, rest, message):
    with pytest.raises(InputError) as caught:
        Sampler(repetition_penalty=1.2).start(prompt, **{"vocab": 10, **rest})

    assert str(caught.value) == message


def test_padding_may_be_negative_where_the_mask_says_that_it_is_padding():
    ids, mask = torch.tensor([[-1, 2]]), torch.tensor([[0, 1]])

    state = Sampler(repetition_penalty=2.0).start(ids, 4, attention_mask=mask)

    assert state.seen.tolist() == [[False, False, True, False]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a generator of another device")
@pytest.mark.gpu
def test_a_generator_of_another_device_is_refused_before_anything_runs():
    with pytest.raises(InputError, match=r"generator is a Generator of cuda:0; expected a torch.Generator of cpu"):
        Sampler().start(torch.zeros(1, 1, dtype=torch.int64), 3, generator=torch.Generator("cuda:0"))


@pytest.mark.parametrize(
    "options",
    [{"eos_token_id": 5}, {"begin_suppress_tokens": [1]}, {"suppress_tokens": [1]}, {"repetition_penalty": 1.5}],
)
def test_a_state_of_a_sampler_with_other_lists_is_refused_and_left_as_it_was(options):
    state = Sampler(eos_token_id=6 if "eos_token_id" in options else ()).start(torch.zeros(2, 1, dtype=torch.int64), 10)
    before = [each.clone() for each in state.tensors]

    with pytest.raises(InputError, match=r"^the state was started by a sampler with other lists .* this sampler's sta"):
        Sampler(**options)(torch.zeros(2, 10), state)
    assert all(torch.equal(*each) for each in zip(state.tensors, before, strict=True))


def test_a_state_serves_another_sampler_with_the_same_lists():
    state = Sampler(eos_token_id=9).start(torch.zeros(1, 1, dtype=torch.int64), 10)

    ids = Sampler(eos_token_id=9, do_sample=False)(torch.arange(10.0)[None], state)

    assert state.read(ids).done


@pytest.mark.parametrize("ids", [torch.zeros(3, 1, dtype=torch.int64), torch.zeros(2, 1), [1, 2]])
def test_what_is_not_one_id_a_row_is_not_read(ids):
    state = Sampler().start(torch.zeros(2, 1, dtype=torch.int64), 10)

    with pytest.raises(InputError, match=r"^ids is .*; expected what the sampler returned, int64 \(2, 1\)\.$"):
        state.read(ids)


def test_logits_that_are_no_tensor_are_refused():
    state = Sampler().start(torch.zeros(1, 1, dtype=torch.int64), 2)

    with pytest.raises(InputError, match=r"^logits is a list; expected a tensor"):
        Sampler()([[0.0, 1.0]], state)


@pytest.mark.parametrize("shape", [(2, 9), (3, 10), (10,), (1, 2, 3, 10), (2, 0, 10)])
def test_logits_of_another_shape_than_the_states_are_refused(shape):
    state = Sampler().start(torch.zeros(2, 1, dtype=torch.int64), 10)

    with pytest.raises(InputError) as caught:
        Sampler()(torch.zeros(shape), state)
    expected = f"logits has shape {shape}; expected (batch, vocab) = (2, 10), or (batch, length, vocab)."
    assert str(caught.value) == expected


# ---- from transformers' config


def test_every_option_of_a_generation_config_is_applied_refused_or_said_to_be_elsewhere():
    names = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    known = [*options.APPLIED, *options.ELSEWHERE, *options.REFUSED]

    assert names - set(known) == set()
    assert len(known) == len(set(known))
    fields = {each.name for each in attrs.fields(Sampler)}
    assert set(options.APPLIED) == fields


@pytest.mark.parametrize("config", [None, {"temperature": 2.0}, transformers.GenerationConfig])
def test_what_is_no_generation_config_is_refused(config):
    with pytest.raises(InputError, match="expected a transformers GenerationConfig, such as a model's generation_conf"):
        Sampler.from_generation_config(config)


def test_a_config_newly_made_is_taken_and_greedy_as_in_generate():
    assert Sampler.from_generation_config(transformers.GenerationConfig()).do_sample is False


def test_an_option_left_open_is_what_generate_makes_of_it():
    config = transformers.GenerationConfig(do_sample=True)

    assert Sampler.from_generation_config(config).top_k == 50


def test_a_chat_models_config_is_taken_as_it_is():
    config = transformers.GenerationConfig(
        bos_token_id=151643, do_sample=True, eos_token_id=[151645, 151643], pad_token_id=151643,
        repetition_penalty=1.05, temperature=0.7, top_k=20, top_p=0.8, max_new_tokens=2048, use_cache=True,
    )  # fmt: skip

    assert Sampler.from_generation_config(config) == Sampler(
        repetition_penalty=1.05, temperature=0.7, top_k=20, top_p=0.8, eos_token_id=(151645, 151643),
        pad_token_id=151643,
    )  # fmt: skip


REFUSED = {
    "num_beams": 4,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": ["x"],
    "force_words_ids": [[1]],
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "num_return_sequences": 3,
    "use_mtp": True,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 2,
    "speculation_type": "dflash",
    "token_healing": True,
    "stop_strings": ["end"],
    "max_time": 1.5,
    "guidance_scale": 1.5,
    "sequence_bias": {(1,): 2.0},
    "encoder_repetition_penalty": 1.2,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 3,
    "bad_words_ids": [[1, 2]],
    "min_length": 5,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "remove_invalid_values": True,
    "forced_decoder_ids": [[1, 2]],
    "exponential_decay_length_penalty": (5, 1.1),
    "top_h": 0.4,
    "typical_p": 0.9,
    "epsilon_cutoff": 3e-4,
    "eta_cutoff": 3e-4,
    "watermarking_config": "any",
    "renormalize_logits": True,
    "an_option_of_next_year": 0.5,
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_the_sampler_does_not_do_is_refused_by_its_name_and_value(name):
    config = transformers.GenerationConfig(do_sample=True)
    setattr(config, name, REFUSED[name])

    with pytest.raises(InputError) as caught:
        Sampler.from_generation_config(config)
    assert str(caught.value) == (
        f"the generation config asks for what the sampler does not do: {name}={REFUSED[name]!r}. "
        "Switch these off, or let transformers' generate make the tokens."
    )


def test_every_option_that_is_refused_has_its_case_here():
    assert set(options.REFUSED) == set(REFUSED) - {"an_option_of_next_year"}


def test_all_the_options_that_are_not_done_are_named_at_once():
    config = transformers.GenerationConfig(do_sample=True, typical_p=0.5, num_beams=2, no_repeat_ngram_size=2)

    with pytest.raises(InputError) as caught:
        Sampler.from_generation_config(config)
    assert all(each in str(caught.value) for each in ("typical_p=0.5", "num_beams=2", "no_repeat_ngram_size=2"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_beams", 1), ("typical_p", 1.0), ("epsilon_cutoff", 0.0), ("eta_cutoff", 1.0)),
        *(("guidance_scale", 1), ("min_length", 0), ("renormalize_logits", False), ("stop_strings", None)),
    ],
)
def test_an_option_at_the_value_that_transformers_takes_for_off_is_no_reason(name, value):
    config = transformers.GenerationConfig(do_sample=True, top_k=0)
    setattr(config, name, value)

    assert Sampler.from_generation_config(config) == Sampler(top_k=0)


# ---- what it says


def test_the_report_has_what_is_applied_in_order_and_what_has_no_effect():
    sampler = Sampler(
        temperature=0.8, top_k=50, top_p=1.0, repetition_penalty=1.1, min_new_tokens=2, eos_token_id=[5, 6],
        suppress_tokens=[1], min_p=0.0,
    )  # fmt: skip

    assert sampler.report() == {
        "mode": "sample",
        "applied": {
            "repetition_penalty": 1.1,
            "min_new_tokens": 2,
            "suppress_tokens": [1],
            "temperature": 0.8,
            "top_k": 50,
            "min_p": 0.0,
        },
        "unused": {},
        "eos": [5, 6],
        "pad": 5,
    }
    assert list(sampler.report()["applied"])[-3:] == ["temperature", "top_k", "min_p"]
    assert sampler.describe() == (
        "sample: repetition_penalty 1.1, then min_new_tokens 2, then suppress_tokens [1], then temperature 0.8, "
        "then top_k 50, then min_p 0.0, then one draw; ends at 5, 6, then 5"
    )


def test_a_greedy_sampler_says_which_of_its_options_have_no_effect():
    sampler = Sampler(do_sample=False, temperature=0.5, top_k=5, min_new_tokens=3)

    assert sampler.report()["unused"] == {"min_new_tokens": 3, "temperature": 0.5, "top_k": 5}
    assert sampler.describe() == (
        "greedy: the most probable; without effect: min_new_tokens 3, temperature 0.5, top_k 5"
    )


# ---- nothing waits


WAITING_OPERATORS = {
    *("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::equal"),
    *("aten::masked_select", "aten::multinomial", "aten::_unique2", "aten::unique_dim", "aten::repeat_interleave"),
}
WAITING_METHODS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu", "__array__"}


class Waits(AssertionError):
    """An operation that on a GPU would wait for the device."""


class NoWaitingMethods(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in WAITING_METHODS:
            raise Waits(name)
        if name in {"__getitem__", "__setitem__"}:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(each, Tensor) and each.dtype == torch.bool for each in index):
                raise Waits(f"{name} with a boolean mask")
        if name in {"tensor", "as_tensor", "to"}:
            raise Waits(f"{name}: a copy from the host")
        return func(*args, **(kwargs or {}))


class NoWaitingOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in WAITING_OPERATORS:
            raise Waits(func._schema.name)
        return func(*args, **(kwargs or {}))


def without_waiting(function):
    with NoWaitingMethods(), NoWaitingOperators():
        return function()


X = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    "waiting",
    [
        X[0].item,
        X.tolist,
        lambda: 1 if X[0] else 0,
        lambda: float(X[0]),
        X.nonzero,
        lambda: X[X > 1],
        lambda: X.clone().__setitem__(X > 1, X[:1]),
        lambda: torch.equal(X, X),
        lambda: torch.unique(X),
        lambda: torch.multinomial(X, 1),
        lambda: torch.tensor([1.0]),
        lambda: X.to("cpu"),
        lambda: X.masked_select(X > 1),
    ],
)
def test_the_check_for_waits_finds_one(waiting):
    with pytest.raises(Waits):
        without_waiting(waiting)


EVERYTHING = Sampler(
    temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, min_new_tokens=2, eos_token_id=[3, 4],
    pad_token_id=0, suppress_tokens=[1, 2], begin_suppress_tokens=[9],
)  # fmt: skip


@pytest.mark.parametrize("sampler", [EVERYTHING, attrs.evolve(EVERYTHING, do_sample=False), Sampler()])
def test_a_step_waits_for_nothing(sampler):
    state = sampler.start(torch.zeros(3, 4, dtype=torch.int64), 50, generator=seeded(0))
    logits = torch.randn(5, 3, 50, generator=seeded(1)).bfloat16()

    steps = without_waiting(lambda: [sampler(logits[place], state) for place in range(5)])

    assert all(state.read(each).ids for each in steps)


def test_draws_and_processors_wait_for_nothing():
    probs, scores = torch.rand(3, 50), torch.randn(3, 50)
    ids, invalid = torch.zeros(3, 2, dtype=torch.int64), fs.new_invalid("cpu")
    eos = fs.token_mask([1, 2], 50, "cpu")

    def all_of_them():
        fs.multinomial1(probs, invalid=invalid)
        fs.multinomial_draws(probs, 5, invalid=invalid)
        seen = fs.seen_mask(ids, 50)
        fs.mark_seen(seen, ids)
        fs.repetition_penalty_seen(scores, seen, 1.2)
        fs.repetition_penalty(scores, ids, 1.2)
        fs.min_new_tokens(scores, eos, torch.ones((), dtype=torch.int64), 2)
        fs.suppress(scores, fs.token_mask([1, 2], 50, "cpu"))
        fs.top_p(fs.min_p(fs.top_k(fs.temperature(scores, 0.5), 5), 0.1), 0.9)

    without_waiting(all_of_them)


def test_a_step_is_read_with_one_wait():
    sampler, count = EVERYTHING, []
    state = sampler.start(torch.zeros(3, 4, dtype=torch.int64), 50)
    ids = sampler(torch.randn(3, 50), state)

    class Counting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            count.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    with Counting(), NoWaitingOperators():
        state.read(ids)
    assert [each for each in count if each in WAITING_METHODS] == ["tolist"]


def test_the_folder_for_engine_authors_loads_no_torch_until_a_module_of_it_is_asked_for():
    code = (
        "import sys, fuseboard.engine; print('torch' in sys.modules)\n"
        "import fuseboard.engine.sampling; print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)

    assert done.stdout.split() == ["False", "False"]


def test_logits_of_float64_are_chosen_from_as_float32s_are():
    logits = torch.tensor([[1.0, 1.0 + 1e-12, 0.0]], dtype=torch.float64)
    sampler = Sampler(do_sample=False)

    assert sampler(logits, sampler.start(torch.tensor([[0]]), 3)).tolist() == [[0]]
