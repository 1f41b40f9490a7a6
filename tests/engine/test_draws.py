"""Draws against torch.multinomial: ids, the generator's state, and every error."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fuseboard import FuseboardError
from fuseboard.engine.sampling import (
    DrawError,
    draws_without_waiting,
    multinomial1,
    multinomial_draws,
    new_invalid,
    raise_if_invalid,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
QWEN = 151936


def seeded(seed: int, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def weights(kind: str, batch: int, categories: int, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(batch, categories, generator=generator)
    if kind == "softmax":
        return (3 * drawn).softmax(-1)
    if kind == "sparse":
        drawn = drawn.relu()
        drawn[:, 0] = 1
        return drawn
    if kind == "one hot":
        return torch.zeros(batch, categories).scatter_(1, drawn.argmax(-1, keepdim=True), 1.0)
    if kind == "ties":
        return drawn.round().abs() + 1
    return drawn.exp() * 50  # unnormalised


KINDS = ["softmax", "sparse", "one hot", "ties", "unnormalised"]


def laid_out(layout: str, probs: Tensor) -> Tensor:
    """The same values (`expanded`: the first row, over and over) in another layout."""
    batch, categories = probs.shape
    if layout == "transposed":
        return probs.t().contiguous().t()
    if layout == "strided":
        wide = torch.zeros(batch, 2 * categories, dtype=probs.dtype)
        wide[:, ::2] = probs
        return wide[:, ::2]
    if layout == "sliced":
        wide = torch.zeros(batch + 2, categories + 3, dtype=probs.dtype)
        wide[1:-1, 2:-1] = probs
        return wide[1:-1, 2:-1]
    if layout == "expanded":
        return probs[:1].expand(batch, categories)
    return probs[0] if layout == "one row" else probs


LAYOUTS = ["plain", "one row", "transposed", "strided", "sliced", "expanded"]


def assert_as_torch(probs: Tensor, n: int, seed: int) -> None:
    theirs, ours = seeded(seed), seeded(seed)
    expected = torch.multinomial(probs, n, generator=theirs)
    invalid = new_invalid("cpu")

    found = multinomial_draws(probs, n, ours, invalid=invalid)

    assert torch.equal(found, expected)
    assert found.dtype == expected.dtype
    assert torch.equal(ours.get_state(), theirs.get_state())
    assert not invalid.any()


def test_ten_thousand_draws_are_torchs_in_ids_and_generator_state():
    choose = random.Random(0)
    for seed in range(10_000):
        batch, categories = choose.randint(1, 5), choose.choice([1, 2, 3, 7, 16, 33, 100, 333])
        probs = weights(choose.choice(KINDS), batch, categories, seeded(seed)).to(choose.choice(DTYPES))
        assert_as_torch(laid_out(choose.choice(LAYOUTS), probs), choose.randint(1, min(10, categories)), seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_draws_over_a_large_vocabulary_are_torchs(dtype, layout):
    probs = laid_out(layout, weights("softmax", 3, QWEN, seeded(1)).to(dtype))

    for n in (1, 4):
        assert_as_torch(probs, n, seed=n)


@pytest.mark.slow
def test_hundreds_of_draws_over_a_large_vocabulary_are_torchs():
    choose = random.Random(1)
    for seed in range(300):
        probs = weights(choose.choice(KINDS), choose.randint(1, 3), QWEN, seeded(seed)).to(choose.choice(DTYPES))
        assert_as_torch(laid_out(choose.choice(LAYOUTS), probs), choose.randint(1, 10), seed)


def test_one_draw_is_torchs_with_and_without_a_batch():
    probs = weights("softmax", 4, 100, seeded(0))

    assert torch.equal(multinomial1(probs, seeded(5)), torch.multinomial(probs, 1, generator=seeded(5)))
    assert torch.equal(multinomial1(probs[0], seeded(5)), torch.multinomial(probs[0], 1, generator=seeded(5)))
    assert multinomial1(probs).shape == (4, 1)


def test_without_a_generator_the_default_one_is_used_as_torch_uses_it():
    probs = weights("softmax", 4, 100, seeded(0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected = torch.multinomial(probs, 5), torch.get_rng_state()
        torch.manual_seed(3)
        found = multinomial_draws(probs, 5), torch.get_rng_state()

    assert all(map(torch.equal, found, expected))


def test_more_draws_than_probabilities_above_zero_are_torchs():
    for seed in range(50):
        assert_as_torch(torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.5, 0.0, 0.5, 0.0]]), 4, seed)


def test_half_precision_draws_probability_zero_as_often_as_torch_does():
    probs = torch.zeros(1, QWEN, dtype=torch.float16)
    probs[:, 0] = 1
    ours, theirs = seeded(0), seeded(0)
    for _ in range(100):
        assert torch.equal(multinomial1(probs, ours), torch.multinomial(probs, 1, generator=theirs))


def test_no_rows_give_no_ids_and_draw_nothing():
    generator = seeded(0)

    assert multinomial_draws(torch.ones(0, 3), 2, generator, invalid=new_invalid("cpu")).shape == (0, 2)
    assert torch.equal(generator.get_state(), seeded(0).get_state())


def test_probabilities_that_want_a_gradient_are_drawn_from_and_left_as_they_are():
    probs = torch.tensor([[0.2, 0.8]], requires_grad=True)
    before = probs.detach().clone()

    ids = multinomial1(probs, seeded(0))

    assert not ids.requires_grad
    assert torch.equal(probs, before)
    assert torch.equal(ids, torch.multinomial(probs, 1, generator=seeded(0)))


def test_another_device_is_given_to_torch_multinomial():
    called = []

    class Spy(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            called.append(func)
            return func(*args, **(kwargs or {}))

    with Spy():
        there = multinomial1(torch.ones(2, 3, device="meta"))
        elsewhere = torch.multinomial in called
        called.clear()
        multinomial1(torch.ones(2, 3))

    assert (there.device.type, there.shape) == ("meta", (2, 1))
    assert elsewhere
    assert torch.multinomial not in called
    assert draws_without_waiting(torch.device("cpu"))
    assert not draws_without_waiting(torch.device("meta"))


# ---- errors


@pytest.mark.parametrize(
    ("probs", "n", "message"),
    [
        (torch.ones(2, 3, 4), 1, "prob_dist must be 1 or 2 dim: probs has shape (2, 3, 4); give (batch, categories)."),
        (torch.tensor(1.0), 1, "prob_dist must be 1 or 2 dim: probs has shape (); give (batch, categories)."),
        (
            torch.ones(3, dtype=torch.int64),
            1,
            "multinomial only supports floating-point dtypes for input: probs is int64; "
            "give probabilities, best in float32.",
        ),
        (torch.ones(3), 0, "cannot sample n_sample <= 0 samples: n is 0, expected 1 to 3."),
        (torch.ones(3), -1, "cannot sample n_sample <= 0 samples: n is -1, expected 1 to 3."),
        (
            torch.ones(3),
            4,
            "cannot sample n_sample > prob_dist.size(-1) samples without replacement: "
            "n is 4 and probs has 3 categories.",
        ),
        (
            torch.ones(2, 0),
            1,
            "cannot sample n_sample > prob_dist.size(-1) samples without replacement: "
            "n is 1 and probs has 0 categories.",
        ),
        (
            torch.ones(1).expand(2**24 + 1),
            1,
            "number of categories cannot exceed 2^24: probs has 16777217.",
        ),
    ],
)
def test_what_torch_refuses_unseen_is_refused_in_its_words_with_what_was_given(probs, n, message):
    with pytest.raises(RuntimeError) as theirs:
        torch.multinomial(probs, n)
    with pytest.raises(DrawError) as ours:
        multinomial_draws(probs, n)

    assert str(ours.value) == message
    words = str(theirs.value).partition(", got")[0]
    assert str(ours.value).startswith(words)
    assert isinstance(ours.value, FuseboardError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5, 0.5], 1), "probs is a list; expected a Tensor."),
        ((torch.ones(3), 1.0), "n is 1.0; expected an int, the number of ids to draw."),
        ((torch.ones(3), True), "n is True; expected an int, the number of ids to draw."),
        ((torch.ones(3), 1, 5), "generator is a int; expected a torch.Generator or None."),
    ],
)
def test_an_argument_of_another_type_is_a_type_error_as_with_torch(arguments, message):
    with pytest.raises(TypeError):
        torch.multinomial(*arguments[:2], **({"generator": arguments[2]} if arguments[2:] else {}))
    with pytest.raises(TypeError) as caught:
        multinomial_draws(*arguments)

    assert str(caught.value) == message


@pytest.mark.parametrize("wrong", [torch.zeros(2), torch.zeros(1, dtype=torch.bool), torch.zeros((), dtype=torch.bool)])
def test_a_record_of_another_kind_is_refused(wrong):
    with pytest.raises(DrawError, match=r"^invalid is \w+ \(\d?,?\) on cpu; expected bool \(2,\) on cpu, as new_inv"):
        multinomial1(torch.ones(3), invalid=wrong)


def test_a_record_that_is_no_tensor_is_a_type_error():
    with pytest.raises(TypeError, match="invalid is a list; expected a tensor from new_invalid, or None"):
        multinomial1(torch.ones(3), invalid=[False, False])


def test_a_record_made_in_inference_mode_is_written_outside():
    with torch.inference_mode():
        invalid = new_invalid("cpu")

    multinomial1(torch.tensor([NAN, 1.0]), invalid=invalid)

    assert invalid.tolist() == [True, False]


# ---- values


def torchs_error(probs: Tensor, n: int = 1) -> str | None:
    try:
        torch.multinomial(probs, n, generator=seeded(0))
    except RuntimeError as error:
        return str(error)
    return None


def our_error(probs: Tensor, n: int = 1) -> str | None:
    invalid = new_invalid("cpu")
    multinomial_draws(probs, n, seeded(0), invalid=invalid)
    try:
        raise_if_invalid(invalid)
    except DrawError as error:
        return str(error)
    return None


NAN, INF = torch.nan, torch.inf
VALUES = "probability tensor contains either `inf`, `nan` or element < 0"
EMPTY = "invalid multinomial distribution (sum of probabilities <= 0)"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.5, NAN, 0.5], VALUES),
        ([0.5, INF, 0.5], VALUES),
        ([0.5, -INF, 0.5], VALUES),
        ([0.5, -0.1, 0.5], VALUES),
        ([0.0, -0.1, 0.1], VALUES),
        ([NAN, NAN, NAN], VALUES),
        ([0.0, 0.0, 0.0], EMPTY),
        ([-0.0, 0.0, -0.0], EMPTY),
        ([0.0, 1e-30, 0.0], None),
        ([-0.0, 0.5, 0.0], None),
        ([1e38, 1e38, 3e38], None),  # their sum is infinite, and torch draws
    ],
)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_values_that_torch_raises_for_are_recorded_and_raised_in_its_words(values, expected, rows):
    probs = torch.tensor(values)
    if rows:
        probs = torch.cat([torch.full((rows - 1, 3), 0.3), probs[None]])

    assert torchs_error(probs) == our_error(probs) == expected
    assert torchs_error(probs, 2) == our_error(probs, 2) == expected


def test_two_thousand_rows_with_odd_values_are_judged_as_torch_judges_them():
    choose, seen = random.Random(0), set()
    odd = [NAN, INF, -INF, -1.0, -0.0, 0.0, 0.0, 0.0, 1e-45, 6e-8, 3e38, 6e4]
    for seed in range(2000):
        probs = torch.rand(choose.randint(1, 3), choose.randint(1, 4), generator=seeded(seed))
        if choose.random() < 0.3:
            probs.zero_()
        for _ in range(choose.randint(0, 2)):
            probs[choose.randrange(probs.shape[0]), choose.randrange(probs.shape[1])] = choose.choice(odd)
        probs = probs.to(choose.choice(DTYPES))
        seen.add(torchs_error(probs))

        assert our_error(probs) == torchs_error(probs), probs

    assert seen == {None, VALUES, EMPTY}


def test_a_record_stays_until_it_is_read_and_is_told_from_values_read_elsewhere():
    invalid = new_invalid("cpu")
    multinomial1(torch.tensor([NAN, 1.0]), invalid=invalid)
    multinomial1(torch.tensor([0.5, 0.5]), invalid=invalid)

    for read in (invalid, invalid.tolist()):
        with pytest.raises(DrawError, match=f"^{VALUES}$"):
            raise_if_invalid(read)
    raise_if_invalid([False, False])


def test_a_draw_from_wrong_values_moves_the_generator_on_which_torch_does_not():
    generator = seeded(0)
    multinomial1(torch.tensor([NAN, 1.0]), generator, invalid=new_invalid("cpu"))

    assert not torch.equal(generator.get_state(), seeded(0).get_state())
