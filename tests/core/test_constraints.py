from __future__ import annotations

import attrs
import pytest
import torch

import fuseboard as fb
from fuseboard.call import Sizes
from fuseboard.constraints import ALL_LENGTHS, admit, guard, known_bad_for, version_terms
from fuseboard.masks import Structure

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NOTHING = fb.Constraints(devices={"cpu"}, dtypes={F32})
PLAIN = fb.Call("cpu", None, None, F32, 64, 64)
SIZES = Sizes(1, 2, 2, 4, 4, 64, 64, ((512, 256, 64, 1),) * 3)


def refused(limits, **call):
    form, refusals = admit(limits, "acme", attrs.evolve(PLAIN, **call))
    assert all(each.backend == "acme" for each in refusals)
    return form, {each.rule: each for each in refusals}


def test_what_is_not_claimed_is_refused():
    """The cautious default: a plugin that says nothing but device and dtype takes the plain call and nothing else."""
    assert refused(NOTHING) == ("plain", {})
    for rule, call in {
        "device": {"device_type": "cuda"},
        "dtype": {"dtype": F16},
        "v_head_dim": {"v_head_dim": 32},
        "gqa": {"gqa": True},
        "causal": {"causal": True},
        "mask": {"mask": "bool"},
        "mask_grad": {"mask_grad": True},
        "scale": {"custom_scale": True},
        "dropout": {"dropout": True},
        "gradient": {"grad": True},
        "empty": {"empty": True},
        "stride": {"packed_last": False},
        "wrapped": {"wrapped": "a functorch transform"},
    }.items():
        assert list(refused(NOTHING, **call)[1]) == [rule], rule


def test_every_reason_is_kept_and_not_the_first_only():
    call = {
        "device_type": "mps",
        "dtype": F16,
        "gqa": True,
        "dropout": True,
        "grad": True,
        "mask": "additive",
        "mask_dtype": F16,
    }
    _, refusals = refused(NOTHING, **call)

    assert list(refusals) == ["device", "dtype", "gqa", "mask", "dropout", "gradient"]


@pytest.mark.parametrize(
    ("limits", "call", "text", "reason"),
    [
        ({}, {"device_type": "cuda"}, "device is cuda, allowed cpu", "device cuda"),
        (
            {"devices": {"cuda"}, "capability": ((8, 0), (9, 0))},
            {"device_type": "cuda", "capability": (7, 5)},
            "capability is 7.5, allowed 8.0 to 9.0",
            "compute capability 7.5",
        ),
        (
            {"dtypes": {F16, BF16}},
            {},
            "dtype is float32, allowed bfloat16, float16 (nearest: cast to bfloat16)",
            "dtype float32",
        ),
        ({}, {"dtype": F16}, "dtype is float16, allowed float32", "dtype float16"),
        (
            {"head_dims": fb.HeadDims(only={64, 96, 128}), "v_head_dims": fb.HeadDims()},
            {"head_dim": 80},
            "head_dim is 80, allowed 64, 96, 128 (nearest: pad to 96 and keep scale=1/sqrt(80))",
            "head dim 80",
        ),
        (
            {"head_dims": fb.HeadDims(high=128, multiple=8), "v_head_dims": fb.HeadDims()},
            {"head_dim": 130},
            "head_dim is 130, allowed 1 to 128, a multiple of 8",
            "head dim 130",
        ),
        ({}, {"v_head_dim": 32}, "v_head_dim is 32, allowed q's, 64", "v head dim 32"),
        (
            {"v_head_dims": fb.HeadDims(high=16)},
            {"v_head_dim": 32},
            "v_head_dim is 32, allowed 1 to 16",
            "v head dim 32",
        ),
        ({}, {"gqa": True}, "gqa is shared key heads, allowed equal heads (nearest: repeat_interleave k and v)", "GQA"),
        ({"queries": {"many"}}, {"one_query": True}, "queries is one, allowed many", "one queries"),
        ({"queries": {"one"}}, {}, "queries is many, allowed one", "many queries"),
        (
            {"lengths": {"equal"}},
            {"lengths": "fewer queries"},
            "lengths is fewer queries, allowed equal",
            "lengths: fewer queries",
        ),
        (
            {"causal": {"equal"}},
            {"causal": True, "lengths": "more queries"},
            "causal is top-left with more queries, allowed equal",
            "causal flag with more queries",
        ),
        (
            {"structures": [fb.StructureRule()]},
            {"causal": True, "lengths": "fewer queries"},
            "causal is top-left with fewer queries, allowed none "
            "(nearest: mask_info=MaskInfo(causal=True) if bottom-right is meant)",
            "causal flag with fewer queries",
        ),
        ({}, {"mask": "bool"}, "mask is bool mask, allowed none", "bool mask"),
        (
            {"masks": {"bool"}, "structures": [fb.StructureRule(keys={"right"}, causal={True})]},
            {"mask": "additive", "mask_dtype": F32},
            "mask is additive mask, allowed bool, structures (right padding + causal) "
            "(nearest: pass mask_info if the mask has such a structure)",
            "additive mask",
        ),
        (
            {"structures": [fb.StructureRule(keys={"right"})]},
            {"structure": Structure("left"), "mask": "bool"},
            "mask is bool mask, structure left-padded keys, allowed structures (right padding + causal or not)",
            "mask structure left-padded keys",
        ),
        (
            {"structures": [fb.StructureRule(window={False, True})]},
            {"structure": Structure(window=True, ahead=True), "mask": "bool"},
            "mask is bool mask, structure window + bound ahead, allowed structures (causal or not + window or not)",
            "mask structure window + bound ahead",
        ),
        (
            {"dtypes": {F16}, "masks": {"additive"}},
            {"dtype": F16, "mask": "additive", "mask_dtype": F32},
            "mask_dtype is float32, allowed q's, float16 (nearest: cast the mask to float16)",
            "float32 mask beside float16",
        ),
        (
            {"masks": {"additive"}, "backward": True},
            {"mask": "additive", "mask_dtype": F32, "mask_grad": True, "grad": True},
            "mask_grad is needed, allowed not given (nearest: mask.detach())",
            "mask gradient",
        ),
        (
            {"masks": {"bool"}, "causal": ALL_LENGTHS},
            {"mask": "bool", "causal": True},
            "causal_and_mask is both, allowed one of them (nearest: write causality into the mask)",
            "causal flag and mask",
        ),
        ({}, {"custom_scale": True}, "scale is custom, allowed 1/sqrt(head_dim) (nearest: multiply q)", "custom scale"),
        ({}, {"dropout": True}, "dropout is used, allowed none (nearest: dropout_p=0)", "dropout"),
        ({}, {"grad": True}, "gradient is needed, allowed no backward (nearest: torch.no_grad())", "no backward"),
        ({}, {"empty": True}, "empty is a size of zero, allowed at least 1", "a size of zero"),
        (
            {},
            {"packed_last": False},
            "stride is last dimension strided, allowed contiguous last dimension (nearest: .contiguous())",
            "strided last dimension",
        ),
        ({}, {"wrapped": "a Mine"}, "wrapped is a Mine, allowed plain tensors", "a Mine"),
    ],
)
def test_a_refusal_names_rule_actual_allowed_and_the_nearest_change(limits, call, text, reason):
    _, refusals = refused(attrs.evolve(NOTHING, **limits), **call)

    assert [str(each) for each in refusals.values()] == [text]
    assert [each.reason for each in refusals.values()] == [reason]


@pytest.mark.parametrize(
    ("limits", "call"),
    [
        ({"devices": {"cuda"}, "capability": ((8, 0), (9, 0))}, {"device_type": "cuda", "capability": (8, 0)}),
        ({"devices": {"cuda"}, "capability": ((8, 0), (9, 0))}, {"device_type": "cuda", "capability": (9, 0)}),
        ({"capability": ((8, 0), (9, 0))}, {}),
        ({"gqa": True}, {"gqa": True}),
        (
            {"empty": True, "lengths": {"equal"}, "causal": {"equal"}},
            {"empty": True, "lengths": "more queries", "causal": True},
        ),
        ({"masks": {"bool"}}, {"mask": "bool"}),
        (
            {"dtypes": {F16}, "masks": {"additive"}, "mask_fp32": True},
            {"dtype": F16, "mask": "additive", "mask_dtype": F32},
        ),
        (
            {"dtypes": {torch.float64}, "masks": {"additive"}},
            {"dtype": torch.float64, "mask": "additive", "mask_dtype": F32},
        ),
        ({"masks": {"bool"}, "causal": ALL_LENGTHS, "causal_and_mask": True}, {"mask": "bool", "causal": True}),
        ({"wrapped": {"*"}}, {"wrapped": "a Mine"}),
        ({"wrapped": {"a Mine"}}, {"wrapped": "a Mine"}),
        ({"v_head_dims": fb.HeadDims(only={32})}, {"v_head_dim": 32}),
        ({"backward": True}, {"grad": True}),
        ({"any_stride": True}, {"packed_last": False}),
    ],
)
def test_what_is_claimed_is_admitted(limits, call):
    assert refused(attrs.evolve(NOTHING, **limits), **call)[1] == {}


def test_the_form_of_a_mask_is_the_structure_where_it_is_claimed_else_dense():
    limits = attrs.evolve(NOTHING, masks={"bool"}, structures=[fb.StructureRule(causal={True}, backward=False)])

    assert refused(limits)[0] == "plain"
    assert refused(limits, mask="bool")[0] == "dense"
    assert refused(limits, mask="bool", structure=Structure())[0] == "plain"
    assert refused(limits, mask="none", structure=Structure(causal=True))[0] == "structure"
    assert refused(limits, mask="bool", structure=Structure(causal=True), grad=True)[0] == "dense"
    assert refused(limits, mask="none", structure=Structure(window=True)) == ("dense", {})


@pytest.mark.parametrize(
    ("rule", "structure", "admitted"),
    [
        (fb.StructureRule(), Structure(causal=True), True),
        (fb.StructureRule(), Structure(), True),
        (fb.StructureRule(), Structure("right"), False),
        (fb.StructureRule(keys={"right"}), Structure(causal=True), False),
        (fb.StructureRule(keys={"none", "right"}), Structure("right", causal=True), True),
        (fb.StructureRule(keys={"right"}, causal={True}), Structure("right"), False),
        (fb.StructureRule(window={True}), Structure(causal=True), False),
        (fb.StructureRule(window={True, False}), Structure(window=True), True),
        (fb.StructureRule(window={True, False}), Structure(window=True, ahead=True), False),
        (fb.StructureRule(), Structure(ahead=True), False),
        (fb.StructureRule(ahead={True, False}), Structure(ahead=True), True),
        (fb.StructureRule(ahead={True, False}), Structure(window=True, ahead=True), False),
        (fb.StructureRule(ahead={True}), Structure(causal=True), False),
    ],
)
def test_a_structure_rule_admits_what_all_its_fields_admit(rule, structure, admitted):
    assert rule.admits(attrs.evolve(PLAIN, structure=structure)) is admitted


def test_a_structure_rule_may_depend_on_lengths_and_on_a_gradient():
    rule = fb.StructureRule(lengths={"equal", "fewer queries"}, backward=False)
    call = attrs.evolve(PLAIN, structure=Structure(causal=True))

    assert rule.admits(call)
    assert not rule.admits(attrs.evolve(call, lengths="more queries"))
    assert not rule.admits(attrs.evolve(call, grad=True))
    assert not rule.admits(PLAIN)
    assert str(rule) == "causal or not + equal or fewer queries + no gradient"
    assert (
        str(fb.StructureRule(keys={"any", "left"}, causal={False}, window={True})) == "any keys/left padding + window"
    )
    assert str(fb.StructureRule(causal={False})) == "nothing hidden"
    assert str(fb.StructureRule(causal={False}, window={True}, ahead={True})) == "window + bound ahead"
    assert str(fb.StructureRule(causal={False}, ahead={False, True})) == "bound ahead or not"


@pytest.mark.parametrize(
    ("dims", "dim", "admitted", "nearest"),
    [
        (fb.HeadDims(), 1, True, None),
        (fb.HeadDims(), 5000, True, None),
        (fb.HeadDims(multiple=8, high=256), 64, True, None),
        (fb.HeadDims(multiple=8, high=256), 60, False, 64),
        (fb.HeadDims(multiple=8, high=256), 256, True, None),
        (fb.HeadDims(multiple=8, high=256), 257, False, None),
        (fb.HeadDims(low=16, multiple=8), 8, False, 16),
        (fb.HeadDims(low=20, multiple=8), 8, False, 24),
        (fb.HeadDims(only={64, 96, 128}), 96, True, 128),
        (fb.HeadDims(only={64, 96, 128}), 65, False, 96),
        (fb.HeadDims(only={64, 96, 128}), 129, False, None),
    ],
)
def test_head_dims_admit_and_know_what_to_pad_to(dims, dim, admitted, nearest):
    assert (dims.admits(dim), dims.nearest(dim)) == (admitted, nearest)


def test_head_dims_read_well():
    assert str(fb.HeadDims()) == "at least 1"
    assert str(fb.HeadDims(multiple=8, high=256)) == "1 to 256, a multiple of 8"
    assert str(fb.HeadDims(only={128, 64})) == "64, 128"


def test_a_guard_refuses_with_its_number():
    grid = fb.Guard(
        "batch", lambda _call, sizes: sizes.batch <= 65535, "at most 65535", lambda sizes: sizes.batch, "split it"
    )
    even = fb.Guard("even length", lambda _call, sizes: sizes.q_length % 2 == 0, "an even number")
    limits = attrs.evolve(NOTHING, guards=[grid, even])

    assert guard(limits, "acme", PLAIN, SIZES) == ()
    found = guard(limits, "acme", PLAIN, attrs.evolve(SIZES, batch=65536, q_length=3))
    assert [str(each) for each in found] == [
        "batch is 65536, allowed at most 65535 (nearest: split it)",
        "even length is not so, allowed an even number",
    ]
    assert [each.reason for each in found] == ["batch not at most 65535", "even length not an even number"]


def test_a_guard_that_raises_refuses():
    limits = attrs.evolve(NOTHING, guards=[fb.Guard("odd", lambda _call, sizes: 1 / 0, "whatever")])

    assert [str(each) for each in guard(limits, "acme", PLAIN, SIZES)] == [
        "odd is unknown, its guard raised ZeroDivisionError: division by zero, allowed whatever"
    ]
    (refusal,) = guard(limits, "acme", PLAIN, SIZES)
    assert refusal.reason == "its guard 'odd' raised ZeroDivisionError: division by zero"


def test_known_bad_combinations_refuse_the_calls_they_concern():
    bad = fb.KnownBad("NaN with GQA", "https://example.com/1", call=lambda call: call.gqa)
    whole = fb.KnownBad("all is lost", "https://example.com/2")

    assert list(known_bad_for([bad, whole], PLAIN, "acme")) == []
    (found,) = known_bad_for([bad, whole], attrs.evolve(PLAIN, gqa=True), "acme")
    assert str(found) == "known bad: NaN with GQA, see https://example.com/1"
    assert found.reason == "known bad: NaN with GQA"


def test_a_known_bad_check_that_raises_refuses():
    assert list(known_bad_for([fb.KnownBad("x", "link", call=lambda call: call.nothing)], PLAIN, "acme")) != []


DEVICES = "expected a set of torch's device types, such as 'cpu' and 'cuda'."
DTYPES = "expected a set of torch.dtype, such as torch.float16."
LENGTHS = "expected a set of 'equal', 'fewer queries', 'more queries'."
OPERATORS = "Operators are >=, <=, ==, !=, >, <; terms are joined by commas, as in '>=2.6,<3'."
RANGES = f"is not an operator and a version. {OPERATORS}"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: fb.Constraints(devices="cuda", dtypes={F32}), f"Constraints.devices is 'cuda'; {DEVICES}"),
        (lambda: fb.Constraints(devices={"gpu"}, dtypes={F32}), f"Constraints.devices has 'gpu'; {DEVICES}"),
        (lambda: fb.Constraints(devices={"cuda:0"}, dtypes={F32}), f"Constraints.devices has 'cuda:0'; {DEVICES}"),
        (lambda: fb.Constraints(devices={""}, dtypes={F32}), f"Constraints.devices has ''; {DEVICES}"),
        (lambda: fb.Constraints(devices=[0], dtypes={F32}), f"Constraints.devices has 0; {DEVICES}"),
        (
            lambda: fb.Constraints(devices=[torch.device("cpu")], dtypes={F32}),
            f"Constraints.devices has device(type='cpu'); {DEVICES}",
        ),
        (lambda: attrs.evolve(NOTHING, by_name={"gpu"}), f"Constraints.by_name has 'gpu'; {DEVICES}"),
        (lambda: attrs.evolve(NOTHING, dtypes={"float32"}), f"Constraints.dtypes has 'float32'; {DTYPES}"),
        (lambda: attrs.evolve(NOTHING, dtypes=F32), f"Constraints.dtypes is torch.float32; {DTYPES}"),
        (
            lambda: attrs.evolve(NOTHING, masks="bool"),
            "Constraints.masks is 'bool'; expected a set of 'additive', 'bool', 'none'.",
        ),
        (
            lambda: attrs.evolve(NOTHING, masks={"boolean"}),
            "Constraints.masks has 'boolean'; expected a set of 'additive', 'bool', 'none'.",
        ),
        (lambda: attrs.evolve(NOTHING, lengths={"fewer"}), f"Constraints.lengths has 'fewer'; {LENGTHS}"),
        (lambda: attrs.evolve(NOTHING, causal={"bottom-right"}), f"Constraints.causal has 'bottom-right'; {LENGTHS}"),
        (lambda: attrs.evolve(NOTHING, causal=True), f"Constraints.causal is True; {LENGTHS}"),
        (lambda: attrs.evolve(NOTHING, queries={1}), "Constraints.queries has 1; expected a set of 'many', 'one'."),
        (
            lambda: attrs.evolve(NOTHING, queries=[["one"]]),
            "Constraints.queries is [['one']]; expected a set of 'many', 'one'.",
        ),
        (
            lambda: attrs.evolve(NOTHING, capability=(8, 0)),
            "Constraints.capability is (8, 0); expected ((major, minor), (major, minor)), lowest and highest.",
        ),
        (lambda: attrs.evolve(NOTHING, head_dims={64}), "Constraints.head_dims is {64}; expected HeadDims."),
        (lambda: attrs.evolve(NOTHING, v_head_dims=64), "Constraints.v_head_dims is 64; expected HeadDims or None."),
        (lambda: attrs.evolve(NOTHING, guards=["no"]), "Constraints.guards has 'no'; expected a list of Guard."),
        (lambda: attrs.evolve(NOTHING, wrapped={1}), "Constraints.wrapped has 1; expected a set of str."),
        (
            lambda: attrs.evolve(NOTHING, structures=["padding"]),
            "Constraints.structures has 'padding'; expected a list of StructureRule.",
        ),
        (
            lambda: attrs.evolve(NOTHING, structures=Structure),
            f"Constraints.structures is {Structure!r}; expected a list of StructureRule.",
        ),
        (lambda: fb.HeadDims(multiple=0), "'multiple' must be >= 1: 0"),
        (lambda: fb.HeadDims(low=0), "'low' must be >= 1: 0"),
        (lambda: fb.HeadDims(low="64"), "HeadDims.low is '64'; expected int."),
        (lambda: fb.HeadDims(high="64"), "HeadDims.high is '64'; expected int or None."),
        (lambda: fb.HeadDims(only=64), "HeadDims.only is 64; expected a set of int."),
        (
            lambda: fb.StructureRule(keys={"right_padding"}),
            "StructureRule.keys has 'right_padding'; expected a set of 'any', 'left', 'none', 'right'.",
        ),
        (lambda: fb.StructureRule(window=True), "StructureRule.window is True; expected a set of False, True."),
        (
            lambda: fb.KnownBad("x", "link", package="torch", versions="~=2.6"),
            f"KnownBad.versions '~=2.6': '~=2.6' {RANGES}",
        ),
        (
            lambda: fb.BackendInfo("x", requires={"torch": "2.6 or so"}),
            f"BackendInfo.requires '2.6 or so': '2.6 or so' {RANGES}",
        ),
        (
            lambda: fb.BackendInfo("x", requires={"torch": 2.6}),
            f"BackendInfo.requires 2.6: 2.6 {RANGES}",
        ),
        (
            lambda: fb.BackendInfo("x", requires=["torch"]),
            "BackendInfo.requires is ['torch']; expected version ranges by distribution, "
            "such as {'flash-attn': '>=2.6'}.",
        ),
    ],
)
def test_a_declaration_that_would_quietly_mean_something_else_is_an_error_in_words(make, text):
    with pytest.raises((TypeError, ValueError)) as caught:
        make()

    assert str(caught.value) == text


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "mps", "xla", "hpu", "meta", "privateuseone"])
def test_every_device_of_torch_can_be_named_whether_it_is_here_or_not(device):
    assert fb.Constraints(devices=[device], dtypes=[BF16]).devices == {device}


def test_a_declaration_loads_no_torch_and_one_without_it_has_no_dtype(python):
    out = python(
        "import sys\n"
        "from fuseboard.constraints import Constraints\n"
        "print(sorted(Constraints(devices={'cuda'}, dtypes=()).devices))\n"
        "try: Constraints(devices={'cuda'}, dtypes={'float16'})\n"
        "except ValueError as error: print(error)\n"
        "print('torch' in sys.modules)\n"
    )
    assert out.splitlines() == ["['cuda']", f"Constraints.dtypes has 'float16'; {DTYPES}", "False"]


def test_version_ranges_are_lists_of_terms():
    assert version_terms(" >=2.6 , <3,!=2.7.1") == [(">=", "2.6"), ("<", "3"), ("!=", "2.7.1")]
    assert version_terms("") == []
    with pytest.raises(ValueError, match=r"version range '>=2\.6,~=3': '~=3' is not an operator and a version"):
        version_terms(">=2.6,~=3")
