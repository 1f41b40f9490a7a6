from __future__ import annotations

import pickle
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseboard.dispatch import attention
from fuseboard.errors import InputError, MaskMismatchError
from fuseboard.masks import MaskInfo, Structure, check_mask_info, in_form, mask_for, to_4d, to_additive
from fuseboard.site import Site

CPU = torch.device("cpu")
settings.register_profile("core", deadline=None, max_examples=150, derandomize=True, database=None)
settings.load_profile("core")

lengths = st.integers(0, 7)


@st.composite
def structures(draw):
    """Lengths, and the parts of a MaskInfo that fit them."""
    n_q, n_k = draw(lengths), draw(lengths)
    keys, padding = None, None
    kind = draw(st.sampled_from(["none", "any", "right", "left"]))
    if kind == "any":
        keys = draw(st.lists(st.lists(st.booleans(), min_size=n_k, max_size=n_k), min_size=1, max_size=3))
    elif kind != "none":
        real = draw(st.lists(st.integers(0, n_k), min_size=1, max_size=3))
        rows = [[j < n if kind == "right" else j >= n_k - n for j in range(n_k)] for n in real]
        keys, padding = rows, kind
    if keys is not None:
        keys = torch.tensor(keys, dtype=torch.bool).reshape(len(keys), n_k)
    window, ahead = draw(st.none() | st.integers(1, 9)), draw(st.none() | st.integers(0, 9))
    return n_q, n_k, keys, draw(st.booleans()), window, padding, ahead


def sees(i, j, n_q, n_k, keys, causal, window, ahead, row):
    """The definition, for one query and one key."""
    last = i + n_k - n_q
    if keys is not None and not bool(keys[row, j]):
        return False
    bounded = (causal and j > last) or (window is not None and j <= last - window)
    return not bounded and (ahead is None or j <= last + ahead)


def naive(n_q, n_k, keys, causal, window, ahead):
    rows = 1 if keys is None else keys.shape[0]
    mask = torch.zeros(rows, 1, n_q, n_k, dtype=torch.bool)
    for row in range(rows):
        for i in range(n_q):
            for j in range(n_k):
                mask[row, 0, i, j] = sees(i, j, n_q, n_k, keys, causal, window, ahead, row)
    return mask


@given(structures())
def test_the_dense_mask_is_what_its_definition_says(case):
    n_q, n_k, keys, causal, window, padding, ahead = case
    dense = MaskInfo(keys, causal, window, padding, ahead).dense(n_q, n_k, CPU)

    assert torch.equal(dense, naive(n_q, n_k, keys, causal, window, ahead))


@pytest.mark.parametrize("far", [2**62, sys.maxsize, sys.maxsize + 1, 10**30])
@pytest.mark.parametrize(("n_q", "n_k"), [(3, 7), (7, 3), (1, 1)])
def test_a_bound_as_far_as_numbers_go_hides_nothing(n_q, n_k, far):
    for causal in (False, True):
        for window, ahead in ((far, None), (None, far), (2, far), (far, 1), (far, far)):
            dense = MaskInfo(None, causal, window, None, ahead).dense(n_q, n_k, CPU)

            assert torch.equal(dense, naive(n_q, n_k, None, causal, window, ahead))


@given(structures())
def test_the_structure_at_given_lengths_hides_exactly_what_the_whole_hides(case):
    n_q, n_k, keys, causal, window, padding, ahead = case
    info = MaskInfo(keys, causal, window, padding, ahead)
    structure = info.structure(n_q, n_k)
    reduced = info.reduced(structure)

    assert torch.equal(reduced.dense(n_q, n_k, CPU), info.dense(n_q, n_k, CPU))
    left = (reduced.causal, reduced.window is not None, reduced.ahead is not None)
    assert left == (structure.causal, structure.window, structure.ahead)
    assert not (structure.causal and structure.ahead)
    assert reduced.structure(n_q, n_k) == structure
    assert info.reduced(structure) is reduced
    if structure.is_open:
        assert bool(info.dense(n_q, n_k, CPU).all())


@given(structures())
def test_a_part_that_hides_something_is_never_reduced_away(case):
    n_q, n_k, _keys, causal, window, _padding, ahead = case
    structure = MaskInfo(None, causal, window, ahead=ahead).structure(n_q, n_k)
    bound = structure.causal or structure.ahead

    assert structure.causal or not causal or bool(naive(n_q, n_k, None, True, None, None).all())
    assert structure.window or window is None or bool(naive(n_q, n_k, None, False, window, None).all())
    assert bound or ahead is None or bool(naive(n_q, n_k, None, False, None, ahead).all())


@given(lengths, lengths, st.booleans(), st.integers(0, 9))
def test_a_bound_ahead_that_hides_nothing_more_is_not_asked_for(n_q, n_k, causal, ahead):
    structure = MaskInfo(causal=causal, ahead=ahead).structure(n_q, n_k)
    without, bounded = naive(n_q, n_k, None, causal, None, None), naive(n_q, n_k, None, causal, None, ahead)

    if n_k > n_q and torch.equal(without, bounded):  # every query has its own key
        assert not structure.ahead
        assert structure.causal == (causal and n_q > 1)


@given(structures(), st.sampled_from([torch.bool, torch.float32, torch.float16, torch.bfloat16]))
def test_mask_for_builds_a_mask_and_an_info_that_agree(case, dtype):
    n_q, n_k, keys, causal, window, padding, ahead = case
    dense, info = mask_for(n_q, n_k, keys=keys, causal=causal, window=window, ahead=ahead, padding=padding, dtype=dtype)
    want = naive(n_q, n_k, keys, causal, window, ahead)

    if dense is None:
        assert bool(want.all())
    else:
        assert dense.dtype == dtype
        full = torch.broadcast_to(dense, want.shape)
        assert torch.equal(full if dtype == torch.bool else full == 0, want)
        assert dtype == torch.bool or torch.equal(full == -torch.inf, ~want)
    assert torch.equal(torch.broadcast_to(info.dense(n_q, n_k, CPU), want.shape), want)
    check_mask_info(dense, info, n_q, n_k, CPU)


@given(structures())
def test_mask_for_reads_off_where_the_padding_lies(case):
    n_q, n_k, keys, _causal, _window, padding, _ahead = case
    info = mask_for(n_q, n_k, keys=keys).info

    if keys is None or bool(keys.all()):
        assert info.keys is None
    elif padding is None:
        check_mask_info(None, info, n_q, n_k, CPU)
    else:
        assert info.padding is not None
        check_mask_info(None, MaskInfo(keys, padding=info.padding), n_q, n_k, CPU)


@given(structures(), st.data())
def test_the_check_finds_any_single_wrong_place(case, data):
    n_q, n_k, keys, causal, window, padding, ahead = case
    info = MaskInfo(keys, causal, window, padding, ahead)
    wrong = info.dense(n_q, n_k, CPU).clone()
    if wrong.numel() == 0:
        return
    place = data.draw(st.integers(0, wrong.numel() - 1))
    wrong.view(-1)[place] = ~wrong.view(-1)[place]

    with pytest.raises(MaskMismatchError):
        check_mask_info(wrong, info, n_q, n_k, CPU)
    with pytest.raises(MaskMismatchError):
        check_mask_info(to_additive(wrong, torch.float32), info, n_q, n_k, CPU)


def test_the_check_names_the_first_wrong_place():
    mask = torch.ones(1, 1, 2, 3, dtype=torch.bool)

    with pytest.raises(MaskMismatchError) as caught:
        check_mask_info(mask, MaskInfo(causal=True), 2, 3, CPU)

    assert str(caught.value) == (
        "mask_info (bottom-right causal) does not describe its dense mask: at (batch, head, query, key) = (0, 0, 0, 2) "
        "the mask holds True, and the structure hides the key. Build both with mask_for, or drop mask_info."
    )
    assert caught.value.argument == "mask_info"


def test_the_check_finds_padding_that_lies_elsewhere():
    with pytest.raises(MaskMismatchError, match="says padding='right', but its keys are not one run at that end"):
        check_mask_info(None, MaskInfo(torch.tensor([[False, True]]), padding="right"), 1, 2, CPU)


def test_the_check_takes_the_lowest_number_for_hidden_but_not_in_a_row_that_sees_nothing():
    lowest = torch.finfo(torch.float32).min
    causal = MaskInfo(causal=True)
    check_mask_info(torch.tensor([[0.0, lowest], [0.0, 0.0]]), causal, 2, 2, CPU)
    nothing = MaskInfo(torch.tensor([[False, False]]))

    with pytest.raises(MaskMismatchError):
        check_mask_info(torch.full((2, 2), lowest), nothing, 2, 2, CPU)  # softmax of equal scores is no zero
    with pytest.raises(MaskMismatchError):
        check_mask_info(torch.tensor([[0.0, -1.0], [0.0, 0.0]]), causal, 2, 2, CPU)
    with pytest.raises(MaskMismatchError):
        check_mask_info(torch.tensor([[0.5, lowest], [0.0, 0.0]]), causal, 2, 2, CPU)


def test_a_rank_three_mask_is_checked_as_per_head():
    info = MaskInfo(causal=True)
    check_mask_info(info.dense(2, 2, CPU)[0].expand(3, 2, 2), info, 2, 2, CPU)


@given(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]), structures())
def test_a_boolean_mask_becomes_additive_without_loss(dtype, case):
    n_q, n_k, keys, causal, window, _padding, ahead = case
    mask = naive(n_q, n_k, keys, causal, window, ahead)
    additive = to_additive(mask, dtype)

    assert additive.dtype == dtype
    assert torch.equal(additive == 0, mask)
    assert torch.equal(additive == -torch.inf, ~mask)


@pytest.mark.parametrize(
    ("have", "want"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.float64)],
)
def test_an_additive_mask_is_widened_exactly(have, want):
    mask = torch.tensor([0.1, -1.5, -torch.inf, 3e-5], dtype=have)

    assert torch.equal(to_additive(mask, want).to(have), mask)
    assert to_additive(mask, have) is mask


@pytest.mark.parametrize(
    ("have", "want"),
    [(torch.float32, torch.bfloat16), (torch.float64, torch.float32), (torch.bfloat16, torch.float16)],
)
def test_an_additive_mask_is_never_rounded(have, want):
    with pytest.raises(ValueError, match=f"an additive mask of {have} would be rounded to {want}; cast it yourself"):
        to_additive(torch.zeros(2, dtype=have), want)


def test_a_mask_of_lower_rank_gains_axes_in_front():
    mask = torch.rand(2, 3)

    assert to_4d(mask).shape == (1, 1, 2, 3)
    assert to_4d(mask).data_ptr() == mask.data_ptr()
    assert to_4d(torch.tensor(1.0)).shape == (1, 1, 1, 1)
    full = torch.rand(1, 2, 3, 4)
    assert to_4d(full) is full


# ---- the forms in which a kernel is given a mask


def test_a_kernel_is_given_the_mask_or_the_structure_and_never_both():
    q = torch.zeros(1, 2, 3, 4)
    mask, info = mask_for(3, 3, causal=True)
    structure = info.structure(3, 3)

    assert in_form("plain", None, mask, info, q, q) == (None, None)
    assert in_form("structure", structure, mask, info, q, q) == (None, info)
    dense, none = in_form("dense", structure, mask[0, 0], info, q, q)
    assert none is None
    assert torch.equal(dense, mask)
    written, none = in_form("dense", structure, None, info, q, q)
    assert none is None
    assert torch.equal(written, mask)
    assert in_form("dense", None, None, None, q, q) == (None, None)


def test_a_float32_mask_beside_float64_is_widened_for_the_kernel():
    q = torch.zeros(1, 2, 3, 4, dtype=torch.float64)

    assert in_form("dense", None, torch.zeros(3, 3), None, q, q)[0].dtype == torch.float64


# ---- MaskInfo itself


def test_lengths_are_counted_once_and_again_after_the_keys_were_written():
    keys = torch.tensor([[True, True, False], [True, False, False]])
    info = MaskInfo(keys, causal=True, padding="right")

    assert info.lengths().tolist() == [2, 1]
    assert info.lengths().dtype == torch.int32
    assert info.lengths() is info.lengths()
    step = info.structure(1, 3)  # a decode step's, which is not causal
    assert info.reduced(step).lengths() is info.reduced(step).lengths()
    keys[1] = True
    assert info.lengths().tolist() == [2, 3]


def test_lengths_of_inference_tensors_are_counted_each_time():
    with torch.inference_mode():
        keys = torch.tensor([[True, False]])
        info = MaskInfo(keys, padding="right")
        assert info.lengths().tolist() == [1]
        keys.fill_(True)
        assert info.lengths().tolist() == [2]


def test_what_is_derived_in_inference_mode_serves_a_later_backward():
    info = MaskInfo(torch.tensor([[True, True, False]]), padding="right")
    values = torch.randn(1, 2, 3, 4, requires_grad=True)
    with torch.inference_mode():
        kept = info.derived("weights", info.keys[:, None, :, None].float)
    (values * info.derived("weights", lambda: pytest.fail("made again"))).sum().backward()

    assert not kept.is_inference()
    assert torch.equal(values.grad, torch.tensor([1.0, 1.0, 0.0])[:, None].expand(1, 2, 3, 4))


def test_a_bound_ahead_of_none_is_causality_and_beside_causality_it_is_nothing():
    none, both = MaskInfo(ahead=0), MaskInfo(causal=True, ahead=3)

    assert none.structure(4, 6) == both.structure(4, 6) == Structure(causal=True)
    for info in (none, both):
        reduced = info.reduced(info.structure(4, 6))
        assert (reduced.causal, reduced.ahead) == (True, None)
    assert none.structure(1, 6).is_open
    assert torch.equal(none.dense(4, 6, CPU), MaskInfo(causal=True).dense(4, 6, CPU))


def test_local_attention_sees_as_far_on_either_side():
    place = torch.arange(9)
    near = (place[:, None] - place).abs() <= 2

    assert torch.equal(MaskInfo(window=3, ahead=2).dense(9, 9, CPU)[0, 0], near)
    check_mask_info(near, MaskInfo(window=3, ahead=2), 9, 9, CPU)
    with pytest.raises(MaskMismatchError, match=r"mask_info \(window \+ bound ahead\) does not describe"):
        check_mask_info(near, MaskInfo(window=3, ahead=1), 9, 9, CPU)


def test_infos_that_differ_in_the_bound_ahead_alone_are_remembered_apart():
    assert len({MaskInfo(ahead=each).signature for each in (None, 0, 1, 2)}) == 4


def test_an_info_travels_between_processes_with_its_bounds():
    info = MaskInfo(torch.tensor([[True, False, False]]), window=2, padding="right", ahead=1)
    copy = pickle.loads(pickle.dumps(info))

    assert torch.equal(copy.dense(3, 3, CPU), info.dense(3, 3, CPU))
    assert copy.structure(3, 3) == info.structure(3, 3) == Structure("right", window=True, ahead=True)


def test_lengths_need_keys():
    with pytest.raises(ValueError, match=r"MaskInfo\.lengths\(\) needs keys"):
        MaskInfo(causal=True).lengths()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"keys": [[True]]},
            "MaskInfo.keys is list; expected torch.bool of shape (batch, k_length), True for a real key.",
        ),
        (
            {"keys": torch.ones(2, 3)},
            "MaskInfo.keys is torch.float32 of shape (2, 3); expected torch.bool of shape (batch, k_length), "
            "True for a real key.",
        ),
        (
            {"keys": torch.ones(3, dtype=torch.bool)},
            "MaskInfo.keys is torch.bool of shape (3,); expected torch.bool of shape (batch, k_length), "
            "True for a real key.",
        ),
        (
            {"keys": torch.ones(1, 3, dtype=torch.bool).to_sparse()},
            "MaskInfo.keys is a tensor of layout torch.sparse_coo; expected torch.bool of shape (batch, k_length), "
            "True for a real key.",
        ),
        (
            {"keys": torch.nested.nested_tensor([torch.ones(3, dtype=torch.bool)], layout=torch.jagged)},
            "MaskInfo.keys is a nested tensor; expected torch.bool of shape (batch, k_length), True for a real key.",
        ),
        ({"window": 0}, "MaskInfo.window is 0; expected an int of at least 1, the number of keys seen, or None."),
        ({"window": -3}, "MaskInfo.window is -3; expected an int of at least 1, the number of keys seen, or None."),
        ({"window": True}, "MaskInfo.window is True; expected an int of at least 1, the number of keys seen, or None."),
        ({"window": 2.0}, "MaskInfo.window is 2.0; expected an int of at least 1, the number of keys seen, or None."),
        ({"ahead": -1}, "MaskInfo.ahead is -1; expected an int of at least 0, the number of later keys seen, or None."),
        (
            {"ahead": True},
            "MaskInfo.ahead is True; expected an int of at least 0, the number of later keys seen, or None.",
        ),
        (
            {"ahead": 2.0},
            "MaskInfo.ahead is 2.0; expected an int of at least 0, the number of later keys seen, or None.",
        ),
        (
            {"keys": torch.ones(1, 2, dtype=torch.bool), "padding": "both"},
            "MaskInfo.padding is 'both'; expected 'right', 'left' or None.",
        ),
        (
            {"padding": "left"},
            "MaskInfo.padding is 'left' without keys; give keys, bool of shape (batch, k_length), or no padding.",
        ),
    ],
)
def test_a_field_that_means_nothing_is_an_error(arguments, message):
    with pytest.raises(InputError) as caught:
        MaskInfo(**arguments)

    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)


def test_causal_must_be_a_boolean():
    with pytest.raises(InputError, match=r"MaskInfo\.causal is 'yes'; expected True or False"):
        MaskInfo(causal="yes")


def test_keys_that_do_not_fit_the_length_are_an_error():
    with pytest.raises(InputError) as caught:
        mask_for(2, 3, keys=torch.ones(1, 4, dtype=torch.bool))

    assert str(caught.value) == "keys has shape (1, 4); expected (batch, k_length) with k_length = 3."


def test_saying_whether_keys_are_padded_spares_the_question():
    padded, whole = torch.tensor([[True, False]]), torch.tensor([[True, True]])

    assert mask_for(1, 2, keys=padded, padded=False).dense is None
    assert mask_for(1, 2, keys=padded, padded=False).info.keys is None
    assert mask_for(1, 2, keys=whole, padded=True).info.keys is whole
    assert mask_for(1, 2, keys=whole, padded=True).info.padding == "right"


def test_equal_structures_are_equal_and_hash_alike_and_read_well():
    assert Structure("left", causal=True) == Structure("left", causal=True)
    assert hash(Structure(window=True)) == hash(Structure(window=True))
    assert str(Structure()) == "nothing hidden"
    assert str(Structure("left", causal=True, window=True)) == "left-padded keys + bottom-right causal + window"
    assert str(Structure("any")) == "any keys"
    assert str(Structure(window=True, ahead=True)) == "window + bound ahead"
    assert Structure(ahead=True) != Structure()
    assert not Structure(ahead=True).is_open


def test_masked_unpacks_into_the_arguments_of_attention():
    masked = mask_for(2, 2, causal=True)

    assert masked.arguments() == {"mask": masked.dense, "mask_info": masked.info}
    dense, info = masked
    assert dense is masked.dense
    assert info is masked.info


def test_a_mask_is_built_where_its_keys_are_or_where_it_is_told():
    keys = torch.ones(1, 2, dtype=torch.bool, device="meta")

    assert mask_for(2, 2, keys=keys, padded=True, padding="right").dense.device.type == "meta"
    assert mask_for(2, 2, causal=True).dense.device.type == "cpu"
    assert mask_for(2, 2, causal=True, device="meta").dense.device.type == "meta"


def test_a_padding_that_is_no_word_is_refused_though_nothing_is_padded():
    with pytest.raises(InputError, match="padding is 'rigth'"):
        mask_for(3, 3, keys=torch.ones(2, 3, dtype=torch.bool), padding="rigth")


@pytest.mark.parametrize("dense", [False, True])
def test_structures_are_made_inside_of_a_compiled_function(dense):
    site = Site("tests.masks.compiled")

    def attend(q, keys):
        if not dense:
            return attention(q, q, q, site=site, mask_info=MaskInfo(keys, causal=True, padding="right"))
        made = mask_for(q.shape[2], q.shape[2], keys=keys, causal=True, padding="right", padded=True)
        return attention(q, q, q, site=site, **made.arguments())

    q = torch.randn(2, 2, 6, 8)
    keys = torch.arange(6) < torch.tensor([6, 4])[:, None]
    torch._dynamo.reset()

    assert torch.equal(torch.compile(attend, backend="eager")(q, keys), attend(q, keys))


@pytest.mark.parametrize("wrong", [-1, 4.0, "4", True, None])
def test_a_length_that_is_none_is_refused(wrong):
    for lengths, name in (((wrong, 4), "q_length"), ((4, wrong), "k_length")):
        with pytest.raises(InputError, match=f"{name} is {wrong!r}; expected an int of 0 or more"):
            mask_for(*lengths, causal=True)
