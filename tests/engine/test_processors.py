"""Logits processors against transformers' own, bit for bit; the cases O-12 and O-13."""

from __future__ import annotations

import inspect
import random

import pytest
import torch
from torch import Tensor

from fuseboard import InputError
from fuseboard.engine import sampling as fs

hf = pytest.importorskip("transformers.generation.logits_process", reason="transformers is not installed")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
QWEN = 151936
INF = torch.inf


def scores_of(choose: random.Random, vocab: int, dtype: torch.dtype) -> Tensor:
    """Logits as models and their accidents make them: ties, minus infinity, NaN, constants, large values."""
    generator = torch.Generator().manual_seed(choose.randrange(2**31))
    scores = torch.randn(choose.randint(1, 3), vocab, generator=generator) * choose.choice([0.1, 1.0, 5.0, 60.0])
    kind = choose.choice(["plain", "ties", "masked", "nan", "constant", "infinite", "one left"])
    if kind == "ties":
        scores = scores.round()
    elif kind == "masked":
        scores[torch.rand(scores.shape, generator=generator) < 0.7] = -INF
    elif kind == "nan":
        scores[0, choose.randrange(vocab)] = torch.nan
    elif kind == "constant":
        scores.fill_(choose.choice([0.0, -0.0, 1.0, -3.0, -INF]))
    elif kind == "infinite":
        scores[-1, choose.randrange(vocab)] = INF
        scores[0, choose.randrange(vocab)] = choose.choice([0.0, -0.0])
    elif kind == "one left":
        scores[:, 1:] = -INF
    return scores.to(dtype)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Equal in every bit, the sign of zero included; a NaN is a NaN, whatever its payload."""
    if found.dtype != expected.dtype or not torch.equal(found.isnan(), expected.isnan()):
        return False
    bits = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    return torch.equal(*(each.masked_fill(each.isnan(), 0.0).contiguous().view(bits) for each in (found, expected)))


def history(choose: random.Random, batch: int, vocab: int) -> Tensor:
    """Ids with repetitions, some of them beyond the vocabulary."""
    length = choose.randint(1, 20)
    return torch.tensor([[choose.randrange(vocab + 2) for _ in range(length)] for _ in range(batch)])


PENALTIES = [1.1, 1.3, 2.0, 0.5, 0.99, 1e-3, 1e39, 1e-46]


def a_penalty(choose: random.Random, scores: Tensor) -> tuple[Tensor, Tensor]:
    vocab, penalty = scores.shape[-1], choose.choice(PENALTIES)
    ids = history(choose, len(scores), vocab)
    return fs.repetition_penalty(scores, ids, penalty), hf.RepetitionPenaltyLogitsProcessor(penalty)(ids, scores)


def a_penalty_over_a_mask(choose: random.Random, scores: Tensor) -> tuple[Tensor, Tensor]:
    vocab, penalty = scores.shape[-1], choose.choice(PENALTIES)
    ids = history(choose, len(scores), vocab)
    cut = choose.randint(0, ids.shape[1])
    seen = fs.seen_mask(ids[:, :cut], vocab)
    shape, place = seen.shape, seen.data_ptr()
    for column in range(cut, ids.shape[1]):
        fs.mark_seen(seen, ids[:, column : column + 1])
    assert (seen.shape, seen.data_ptr()) == (shape, place) == ((len(scores), vocab), place)
    expected = hf.RepetitionPenaltyLogitsProcessor(penalty)(ids, scores)
    return fs.repetition_penalty_seen(scores, seen, penalty), expected


def a_minimum(choose: random.Random, scores: Tensor) -> tuple[Tensor, Tensor]:
    vocab, minimum, prompt, new = scores.shape[-1], choose.randint(0, 4), choose.randint(0, 3), choose.randint(0, 6)
    eos = [choose.randrange(vocab + 1) for _ in range(choose.randint(1, 3))]
    count = choose.choice([new, torch.tensor(new)])
    found = fs.min_new_tokens(scores, fs.token_mask(eos, vocab, "cpu"), count, minimum)
    ids = torch.zeros(len(scores), prompt + new, dtype=torch.int64)
    return found, hf.MinNewTokensLengthLogitsProcessor(prompt, minimum, eos)(ids, scores)


def a_list_of_tokens(choose: random.Random, scores: Tensor) -> tuple[Tensor, Tensor]:
    vocab = scores.shape[-1]
    ids = [choose.randrange(-1, vocab + 2) for _ in range(choose.randint(1, 9))]
    expected = hf.SuppressTokensLogitsProcessor(ids)(None, scores)
    return fs.suppress(scores, fs.token_mask(ids, vocab, "cpu")), expected


def a_temperature(choose: random.Random, scores: Tensor) -> tuple[Tensor, Tensor]:
    value = choose.choice([0.1, 0.7, 0.8, 1.0, 1.3, 3.0, 1e-4])
    return fs.temperature(scores, value), hf.TemperatureLogitsWarper(value)(None, scores)


def a_top_k(choose: random.Random, scores: Tensor) -> tuple[Tensor, Tensor]:
    k = choose.choice([1, 2, 5, 50, 10**6])
    return fs.top_k(scores, k), hf.TopKLogitsWarper(k)(None, scores)


def a_top_p(choose: random.Random, scores: Tensor) -> tuple[Tensor, Tensor]:
    p = choose.choice([0.0, 1e-8, 0.1, 0.5, 0.8, 0.95, 0.999, 1.0])
    return fs.top_p(scores, p), hf.TopPLogitsWarper(p)(None, scores)


def a_min_p(choose: random.Random, scores: Tensor) -> tuple[Tensor, Tensor]:
    share = choose.choice([0.0, 0.01, 0.1, 0.5, 1.0])
    return fs.min_p(scores, share), hf.MinPLogitsWarper(share)(None, scores)


PROCESSORS = [
    *(a_penalty, a_penalty_over_a_mask, a_minimum, a_list_of_tokens),
    *(a_temperature, a_top_k, a_top_p, a_min_p),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", PROCESSORS, ids=lambda case: case.__name__)
def test_the_bits_are_transformers_for(case, dtype):
    choose = random.Random(0)
    for _ in range(200):
        scores = scores_of(choose, choose.choice([1, 2, 3, 10, 65, 1000]), dtype)
        before = scores.clone()
        found, expected = case(choose, scores)

        assert same_bits(found, expected), scores
        assert same_bits(scores, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", PROCESSORS, ids=lambda case: case.__name__)
def test_over_a_large_vocabulary_the_bits_are_transformers_for(case, dtype):
    choose = random.Random(1)
    for _ in range(2):
        found, expected = case(choose, scores_of(choose, QWEN, dtype))

        assert same_bits(found, expected)


def test_the_penalty_passes_over_padding_where_the_mask_of_ids_says_so():
    scores = torch.randn(2, 10)
    ids = torch.tensor([[9, 9, 3, 4], [1, 2, 3, 4]])
    ignored = torch.tensor([2, 0])
    if "prompt_ignore_length" not in inspect.signature(hf.RepetitionPenaltyLogitsProcessor).parameters:
        pytest.skip("this transformers has no prompt_ignore_length")
    try:
        expected = hf.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=ignored)(ids, scores)
    except ValueError:
        pytest.skip("this transformers takes one length for all rows")

    seen = fs.seen_mask(torch.tensor([[10, 10, 3, 4], [1, 2, 3, 4]]), 10)

    assert same_bits(fs.repetition_penalty_seen(scores, seen, 1.3), expected)


# ---- parameters


ONES = torch.ones(1, 2)
FLOAT = "it has to be a strictly positive float."
ACTIONS = {
    "temperature": (lambda value: fs.temperature(ONES, value), hf.TemperatureLogitsWarper),
    "penalty": (
        lambda value: fs.repetition_penalty(ONES, torch.zeros(1, 1, dtype=torch.int64), value),
        hf.RepetitionPenaltyLogitsProcessor,
    ),
    "top_k": (lambda value: fs.top_k(ONES, value), hf.TopKLogitsWarper),
    "top_p": (lambda value: fs.top_p(ONES, value), hf.TopPLogitsWarper),
    "min_p": (lambda value: fs.min_p(ONES, value), hf.MinPLogitsWarper),
}


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        *(("temperature", value, FLOAT) for value in (-1.0, 1, 2, torch.nan, None)),
        ("temperature", 0.0, f"{FLOAT} For greedy decoding set do_sample=False."),
        *(("penalty", value, FLOAT) for value in (0.0, -1.0, 2, "2", torch.nan)),
        *(("top_k", value, "it has to be a strictly positive int.") for value in (0, -1, 2.0)),
        *(("top_p", value, "it has to be a float from 0 to 1.") for value in (-0.1, 1.1)),
        *(("min_p", value, "it has to be a float from 0 to 1.") for value in (-0.1, 1.1, torch.nan)),
    ],
)
def test_a_parameter_that_transformers_refuses_is_a_value_error_naming_it(name, value, rule):
    ours, theirs = ACTIONS[name]
    with pytest.raises(ValueError):
        theirs(value)
    with pytest.raises(InputError) as caught:
        ours(value)

    assert str(caught.value) == f"{name} is {value!r}; {rule}"
    assert caught.value.argument == name


def test_a_mask_of_ids_is_made_once_for_a_device():
    first = fs.token_mask([5, 3], 10, "cpu")

    assert fs.token_mask([3, 5, 5], 10, "cpu") is first
    assert first.nonzero().flatten().tolist() == [3, 5]
    assert fs.token_mask([3, 5], 11, "cpu").shape == (11,)


def test_a_mask_made_in_inference_mode_can_be_used_outside():
    with torch.inference_mode():
        mask = fs.token_mask([77], 101, "cpu")

    assert not mask.is_inference()


def test_a_history_begun_in_inference_mode_goes_on_outside():
    with torch.inference_mode():
        seen = fs.seen_mask(torch.tensor([[1]]), 4)

    fs.mark_seen(seen, torch.tensor([[3]]))

    assert seen.tolist() == [[False, True, False, True]]


def test_ids_of_a_mask_may_be_a_tensors_and_are_whole_numbers():
    assert torch.equal(fs.token_mask(torch.tensor([1, 3, 1]), 5, "cpu"), fs.token_mask((1, 3), 5, "cpu"))
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        fs.token_mask([1.5], 5, "cpu")


# ---- O-12 repetition penalty


def penalised(logits: list[float], drawn: list[int], penalty: float, dtype: torch.dtype = torch.float32) -> list[float]:
    scores, ids = torch.tensor([logits], dtype=dtype), torch.tensor([drawn])
    found = fs.repetition_penalty(scores, ids, penalty)
    over_a_mask = fs.repetition_penalty_seen(scores, fs.seen_mask(ids, scores.shape[-1]), penalty)
    assert same_bits(found, over_a_mask)
    return found[0].tolist()


def test_o12_negative_logits_are_multiplied_and_an_id_seen_three_times_is_penalised_once():
    assert penalised([4, -1, 0, 3], [0, 1, 1, 1, 2], 2.0) == [2, -2, 0, 3]


def test_o12_a_penalty_below_one_rewards():
    assert penalised([4, -1, 0, 3], [0, 1], 0.5) == [8, -0.5, 0, 3]


def test_o12_minus_infinity_stays():
    assert penalised([-INF, -1, 0, 3], [0, 1], 2.0) == [-INF, -2, 0, 3]


def test_o12_half_precision_overflows_as_in_transformers():
    assert penalised([60000, -60000, 0, 3], [0, 1], 1.3, torch.float16) == [46144, -INF, 0, 3]


@pytest.mark.parametrize("penalty", [0.0, -1.0])
def test_o12_a_penalty_of_zero_or_less_is_refused(penalty):
    with pytest.raises(ValueError, match=f"^penalty is {penalty}; it has to be a strictly positive float"):
        fs.repetition_penalty_seen(torch.ones(1, 4), torch.ones(1, 4, dtype=torch.bool), penalty)
    with pytest.raises(ValueError, match=f"^repetition_penalty is {penalty}; it has to be a strictly positive float"):
        fs.Sampler(repetition_penalty=penalty)


def test_o12_padding_in_the_history_counts():
    assert penalised([4, 4, 4, 3], [3, 3, 1], 2.0) == [4, 2, 4, 1.5]


# ---- O-13 top-p


def kept(probabilities: list[float], p: float) -> list[int]:
    scores = torch.tensor([probabilities]).log()
    assert same_bits(fs.top_p(scores, p), hf.TopPLogitsWarper(p)(None, scores))
    return fs.top_p(scores, p)[0].isfinite().nonzero().flatten().tolist()


@pytest.mark.parametrize(("p", "expected"), [(0.8, [0, 3]), (0.81, [0, 2, 3]), (0.5, [3]), (0.0, [3]), (1e-8, [3])])
def test_o13_the_token_that_crosses_p_is_kept_and_no_other(p, expected):
    assert kept([0.3, 0.1, 0.1, 0.5], p) == expected


def test_o13_the_second_token_crosses_p():
    assert kept([0.5, 0.3, 0.15, 0.05], 0.6) == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_o13_p_near_zero_keeps_exactly_the_most_probable(dtype):
    scores = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = fs.top_p(scores, 1e-8)[0].isfinite().nonzero().flatten()

    assert scores[0, found].tolist() == [scores.max().item()]
