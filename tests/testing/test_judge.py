"""The kit is tested by liars: each must be caught, and for its own reason."""

from __future__ import annotations

from collections import Counter

import attrs
import pytest
import torch

from fuseboard import Guard, HeadDims
from fuseboard.testing import doubles
from fuseboard.testing.cases import Case, cases
from fuseboard.testing.judge import Kit, Outcome

EVERY = 9  # every ninth case tells a liar as surely as all of them

REASONS = {
    "drops_the_mask": ("dropped argument", "mask"),
    "top_left_for_bottom_right": ("wrong", "top-left for bottom-right"),
    "bottom_right_for_top_left": ("wrong", "bottom-right for top-left"),
    "ignores_the_window": ("dropped argument", "mask_info.window"),
    "ignores_the_scale": ("dropped argument", "scale"),
    "tiles_key_heads": ("wrong", "key heads tiled, not repeated"),
    "writes_into_q": ("changed inputs", "q"),
    "nan_on_empty_rows": ("wrong", "rows that see no key"),
    "loses_the_gradient": ("lost gradient", ""),
    "off_by_a_hundredth": ("wrong", ""),
    "fails_on_the_second_call": ("raised", ""),
    "wrong_beside_blocks": ("wrong", ""),
    "returns_float32": ("wrong", ""),
    "remembers_masks": ("dropped argument", "mask"),
}
RARE = {
    "takes_low_numbers_for_hidden": ("wrong", "low numbers for -inf", ".huge"),
    "ignores_the_bound_ahead": ("dropped argument", "mask_info.ahead", "ahead"),
    "sees_one_key_further_ahead": ("wrong", "", "ahead"),
    "ignores_strides": ("wrong", "shared inputs", "-shared"),
}
"""With a word of the cases that tell."""
OTHERWISE = {
    "remembers_outputs", "remembers_keys", "asks_for_lengths", "reads_padding", "fails_when_recomputed",
    "saves_otherwise_when_recomputed", "keeps_inference_tensors", "differentiates_leaves_only",
    "fails_behind_a_compiler", "allocates_on_the_current_device", "drifts",
}  # fmt: skip
"""Right when called plainly; `test_surroundings` catches them."""


def judged(double: doubles.Double, every: int = EVERY) -> list[tuple[Case, Outcome]]:
    with doubles.registered(double):
        kit = Kit.open(double.name, "cpu")
        made = cases(kit.backend.constraints, kit.device)[::every]
        return [(case, kit.judge(case)) for case in made]


@pytest.mark.parametrize("liar", REASONS)
def test_each_liar_is_caught_for_its_own_reason(liar):
    outcomes = [outcome for _, outcome in judged(getattr(doubles.liars, liar)) if outcome.failed]
    assert outcomes
    ((commonest, _),) = Counter((each.word, each.about) for each in outcomes).most_common(1)
    assert commonest == REASONS[liar]


@pytest.mark.parametrize("liar", RARE)
def test_a_liar_that_few_cases_tell_is_caught_by_those(liar):
    word, about, part = RARE[liar]
    with doubles.registered(getattr(doubles.liars, liar)):
        kit = Kit.open(getattr(doubles.liars, liar).name, "cpu")
        made = [case for case in cases(kit.backend.constraints, kit.device) if part in str(case)]
        found = [outcome for outcome in map(kit.judge, made) if outcome.failed]
    assert found
    ((commonest, _),) = Counter((each.word, each.about) for each in found).most_common(1)
    assert commonest == (word, about)


def test_every_liar_has_a_reason():
    assert set(vars(doubles.liars)) == {*REASONS, *RARE, *OTHERWISE, "refuses_everything"}


def test_the_reference_as_a_backend_is_right_in_every_case():
    outcomes = [(str(case), str(outcome)) for case, outcome in judged(doubles.loopback, 5) if outcome.word != "ok"]
    assert outcomes == []


def test_a_kernel_that_is_wrong_beside_blocks_of_64_keys_is_right_at_them():
    for case, outcome in judged(doubles.liars.wrong_beside_blocks, 4):
        if case.k_length % 64 == 0 and case.k_length and not outcome.about.startswith("after"):
            assert outcome.word == "ok", case


def test_the_dtype_is_named_when_it_is_another():
    found = {outcome.detail for _, outcome in judged(doubles.liars.returns_float32) if outcome.failed}
    assert found
    assert all("torch.float32" in each and "expected torch.float16" in each for each in found)


def test_a_kernel_that_fails_its_self_test_is_still_judged_case_by_case():
    with doubles.registered(doubles.liars.drops_the_mask):
        kit = Kit.open("drops-the-mask", "cpu")
        assert not kit.verdict().ok
        assert kit.judge(Case(torch.float32, 8, 8, 32, 32)).word == "ok"


def test_what_the_constraints_refuse_is_named_by_its_rule():
    with doubles.registered(doubles.fake_backend("narrow", gqa=False)):
        outcome = Kit.open("narrow", "cpu").judge(Case(torch.float32, 8, 8, 32, 32, kv_heads=2))
    assert str(outcome).startswith("refused (gqa)")
    assert not outcome.failed


@pytest.mark.parametrize(("answer", "kind"), [(lambda out: None, "NoneType"), (lambda out: (out, None), "tuple")])
@pytest.mark.parametrize("later", [False, True])
def test_what_is_no_tensor_is_told_by_its_kind(answer, kind, later):
    def kernel(q, k, v, *, causal, **given):
        out = doubles.fake_backend("x").kernel()(q, k, v, causal=causal, **given)
        return out if causal and later else answer(out)

    with doubles.registered(doubles.fake_backend("no-tensor", kernel)):
        outcome = Kit.open("no-tensor", "cpu").judge(Case(torch.float32, 8, 8, 32, 32, causal=True))
    where = "after causal was moved: " if later else ""
    assert str(outcome) == f"wrong: {where}it returned a {kind}, expected a tensor"


@pytest.mark.parametrize(("said", "rule"), [(3, "declined"), (None, "import")])
def test_the_label_of_a_refusal_is_said_once(said, rule):
    kernel = doubles.fake_backend("x").kernel()
    kernel = type("Asked", (), {"declines": lambda *_, **__: said, "__call__": lambda _, *a, **b: kernel(*a, **b)})()
    hooks = {"kernel": lambda: kernel if said is not None else None}
    with doubles.registered(doubles.fake_backend("asked", hooks=hooks)):
        outcome = Kit.open("asked", "cpu").judge(Case(torch.float32, 8, 8, 32, 32))
    assert str(outcome).startswith(f"refused ({rule}): ")
    assert not outcome.detail.startswith(rule)


def test_a_guard_that_raises_is_the_plugins_fault_and_the_cases_are_made():
    guards = [
        Guard("batch", lambda _call, sizes: sizes.n < 9, "at most 8"),
        Guard("heads", lambda _call, sizes: sizes.heads > 8, "more than 8", lambda sizes: sizes.n),
    ]
    with doubles.registered(doubles.fake_backend("guarded", guards=guards)):
        kit = Kit.open("guarded", "cpu")
        made = cases(kit.backend.constraints, kit.device)
        faults = kit.faults(made[::40])
    assert "guard 'batch' raised AttributeError: 'Sizes' object has no attribute 'n'." in faults
    assert "guard 'heads' raised AttributeError: 'Sizes' object has no attribute 'n'." in faults


def test_a_kernel_that_raises_under_attention_is_no_refusal():
    with doubles.registered(doubles.liars.fails_on_the_second_call):
        kit = Kit.open("fails-on-the-second-call", "cpu")
        case = Case(torch.float32, 8, 8, 32, 32)
        kit.judge(case, kit.attention)
        assert str(kit.judge(case, kit.attention)) == "raised: RuntimeError: the workspace of the first call is gone"


def test_an_output_that_does_not_follow_a_moved_argument_is_told_with_the_tolerance():
    def kernel(q, k, v, *, scale, **given):
        out = doubles.fake_backend("x").kernel()(q, k, v, scale=scale, **given)
        return out + 0.01 if scale is not None and scale > 1 else out

    with doubles.registered(doubles.fake_backend("high-scales", kernel)):
        outcome = Kit.open("high-scales", "cpu").judge(Case(torch.float32, 8, 8, 32, 32, scale=0.5))
    assert (outcome.word, outcome.about) == ("wrong", "after scale was moved")
    assert outcome.detail == "its output is off by 0.01, tolerance 0.0001"


def test_writing_beside_a_view_is_a_changed_input():
    def kernel(q, k, v, **given):
        q.detach().as_strided((1,), (1,), 0).zero_()
        return doubles.fake_backend("x").kernel()(q, k, v, **given)

    with doubles.registered(doubles.fake_backend("writer", kernel)):
        outcome = Kit.open("writer", "cpu").judge(Case(torch.float32, 8, 8, 32, 32, layout="sliced"))
    assert (outcome.word, outcome.about) == ("changed inputs", "q")


def test_the_same_constraints_give_the_same_cases_and_numbers():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, second = (cases(doubles.EVERYTHING, torch.device("cpu")) for _ in range(2))
    assert [str(each) for each in first] == [str(each) for each in second]
    assert len({str(each) for each in first}) == len(first)
    one, other = first[7].inputs(torch.device("cpu")), second[7].inputs(torch.device("cpu"))
    assert torch.equal(one.q, other.q)
    assert torch.equal(torch.get_rng_state(), state)


def test_head_dims_are_asked_at_below_and_above_each_limit():
    limits = attrs.evolve(doubles.EVERYTHING, head_dims=HeadDims(low=16, high=128, multiple=8))
    dims = {case.head_dim for case in cases(limits, torch.device("cpu"))}
    assert {8, 15, 16, 17, 24, 120, 127, 128, 129, 136} <= dims


def test_a_guard_is_asked_on_both_sides_of_its_limit():
    guard = Guard("batch", lambda _call, sizes: sizes.batch <= 65_535, "at most 65535")
    limits = attrs.evolve(doubles.EVERYTHING, guards=(guard,))
    batches = {case.batch for case in cases(limits, torch.device("cpu")) if case.note.startswith("guard")}
    assert batches == {65_535, 65_536}


def test_a_backend_of_another_device_is_named_before_anything_runs():
    from fuseboard import PolicyError

    with doubles.registered(doubles.fake_backend("far", devices={"xla"})), pytest.raises(PolicyError) as caught:
        Kit.open("far")
    assert str(caught.value) == "--fuseboard-backend far: it runs on xla, which this machine has not."


def dropping(scaled: bool, same_in_backward: bool):
    def kernel(q, k, v, *, scale, dropout_p, **given):
        weights = (q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)).softmax(-1)
        keep = (torch.rand(weights.shape) >= dropout_p).to(weights.dtype) / (1 - dropout_p if scaled else 1)
        out = (weights * keep) @ v
        if same_in_backward:
            return out
        other = (weights * keep.flip(-1)) @ v
        return other + (out - other).detach()

    limits = {"dropout": True, "masks": (), "structures": (), "causal": (), "gqa": False, "mask_grad": False}
    return doubles.fake_backend("dropping", kernel, dtypes={torch.float32}, **limits)


@pytest.mark.parametrize(
    ("scaled", "same", "problem"),
    [(True, True, "None"), (False, True, "must be scaled by 1 / (1 - p)"), (True, False, "drops other weights")],
)
def test_dropout_is_judged_by_its_scale_and_by_its_backward(scaled, same, problem):
    from fuseboard.testing.dropout import dropout_problem

    with torch.random.fork_rng(devices=[]), doubles.registered(dropping(scaled, same)):
        torch.manual_seed(5)
        assert problem in str(dropout_problem(Kit.open("dropping", "cpu"), torch.float32))


def test_a_run_is_captured_under_the_policy_of_the_block():
    import fuseboard as fb

    site = fb.Site("tests.doubles")
    q = torch.randn(1, 2, 4, 8)
    with doubles.registered(doubles.loopback), doubles.capture_run("loopback") as run:
        fb.attention(q, q, q, site=site)
    assert run.report()["attention"]["used"] == {"loopback": 1}
