from __future__ import annotations

from fractions import Fraction

import attrs
import pytest
import torch
from fakes import Fake, qkv, registered

import fuseboard as fb
from fuseboard.call import describe
from fuseboard.errors import InputError
from fuseboard.masks import MaskInfo, Structure

F32, F16 = torch.float32, torch.float16


def call_of(q, k=None, v=None, **arguments):
    return describe(q, q if k is None else k, q if v is None else v, **arguments)[0]


def test_a_plain_call():
    q, k, v = qkv(2, 3, 5, dim=16)
    call, sizes = describe(q, k, v)

    assert call == fb.Call("cpu", None, None, F32, 16, 16)
    assert attrs.asdict(sizes) == {
        "batch": 2,
        "heads": 3,
        "kv_heads": 3,
        "q_length": 5,
        "k_length": 5,
        "head_dim": 16,
        "v_head_dim": 16,
        "strides": (q.stride(), k.stride(), v.stride()),
        "mask_shape": None,
        "dropout_p": 0.0,
    }
    assert call.device == torch.device("cpu")


def test_a_decode_loop_makes_the_same_call_every_step():
    calls = {describe(*qkv(q_length=1, k_length=length))[0] for length in range(2, 50)}

    assert len(calls) == 1
    (call,) = calls
    assert call.one_query
    assert call.lengths == "fewer queries"


@pytest.mark.parametrize(
    ("n_q", "n_k", "expected"),
    [
        (1, 1, (True, False, "equal")),
        (4, 4, (False, False, "equal")),
        (4, 9, (False, False, "fewer queries")),
        (9, 4, (False, False, "more queries")),
        (1024, 1024, (False, False, "equal")),
        (1025, 1025, (False, True, "equal")),
    ],
)
def test_lengths_become_kinds(n_q, n_k, expected):
    call = describe(*qkv(1, 1, n_q, n_k, 1))[0]

    assert (call.one_query, call.long_queries, call.lengths) == expected


def test_flags_become_kinds():
    q, k, v = qkv(heads=4, kv_heads=2)
    call = describe(q, k, v, causal=True, scale=0.5, enable_gqa=True, dropout_p=0.1)[0]

    assert (call.gqa, call.causal, call.custom_scale, call.dropout) == (True, True, True, True)
    assert "gqa, causal, custom scale, dropout" in str(call)


def test_a_value_may_have_its_own_head_dim():
    q, k, _ = qkv()
    call, sizes = describe(q, k, torch.zeros(1, 2, 4, 3))

    assert (call.head_dim, call.v_head_dim, sizes.v_head_dim) == (8, 3, 3)
    assert "head_dim 8/3" in str(call)


@pytest.mark.parametrize(
    ("mask", "kind", "dtype"),
    [
        (None, "none", None),
        (torch.ones(4, 4, dtype=torch.bool), "bool", None),
        (torch.zeros(4, 4), "additive", F32),
        (torch.zeros(4, 4, dtype=F16), "additive", F16),
    ],
)
def test_masks_become_kinds(mask, kind, dtype):
    call = describe(*qkv(dtype=F16), mask=mask)[0]

    assert (call.mask, call.mask_dtype) == (kind, dtype)


@pytest.mark.parametrize(
    "shape", [(), (4,), (1, 4), (4, 1), (4, 4), (2, 4, 4), (1, 1, 4, 4), (1, 2, 1, 4), (1, 2, 4, 4)]
)
def test_masks_that_broadcast_are_taken(shape):
    assert describe(*qkv(), mask=torch.zeros(shape))[1].mask_shape == shape


@pytest.mark.parametrize("which", ["q", "k", "v", "mask"])
def test_a_gradient_is_needed_when_any_input_needs_one(which):
    q, k, v = qkv()
    mask = torch.zeros(4, 4)
    {"q": q, "k": k, "v": v, "mask": mask}[which].requires_grad_()

    call = describe(q, k, v, mask=mask)[0]
    assert (call.grad, call.mask_grad) == (True, which == "mask")
    with torch.no_grad():
        call = describe(q, k, v, mask=mask)[0]
    assert (call.grad, call.mask_grad) == (False, False)


def test_a_structure_is_reduced_to_what_the_lengths_leave_of_it():
    q, k, v = qkv(q_length=1, k_length=4)
    keys = torch.ones(1, 4, dtype=torch.bool)

    assert describe(q, k, v, mask_info=MaskInfo(causal=True))[0].structure == Structure()
    info = MaskInfo(keys, causal=True, window=3, padding="left")
    assert describe(q, k, v, mask_info=info)[0].structure == Structure("left", causal=False, window=True)
    q, k, v = qkv(q_length=4, k_length=4)
    bounds = {ahead: describe(q, k, v, mask_info=MaskInfo(ahead=ahead))[0].structure for ahead in (0, 2, 3)}
    assert bounds == {0: Structure(causal=True), 2: Structure(ahead=True), 3: Structure()}


def test_a_structure_cannot_stand_for_a_mask_that_needs_a_gradient_nor_beside_the_causal_flag():
    q, k, v = qkv()
    info = MaskInfo(causal=True)
    learned = torch.zeros(4, 4, requires_grad=True)

    assert describe(q, k, v, mask=learned, mask_info=info)[0].structure is None
    flagged = describe(q, k, v, causal=True, mask_info=info)[0]
    assert (flagged.structure, flagged.mask) == (None, "bool")


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (1, 0, 4, 8), (1, 2, 0, 8), (1, 2, 4, 0)])
def test_a_size_of_zero_is_empty(shape):
    assert call_of(torch.zeros(shape)).empty


def test_a_strided_last_dimension_is_seen_where_it_matters():
    q = torch.zeros(1, 2, 8, 4).transpose(2, 3)

    assert not call_of(q).packed_last
    assert call_of(torch.zeros(1, 2, 4, 8).transpose(1, 2)).packed_last
    assert call_of(torch.zeros(1, 2, 4, 8)[..., ::8]).packed_last  # a single column has no stride that matters


def test_what_wraps_a_tensor_is_named():
    class Mine(torch.Tensor):
        pass

    q = torch.zeros(1, 2, 4, 8)
    assert call_of(q.as_subclass(Mine)).wrapped == "a Mine"
    assert call_of(q, k=q.as_subclass(Mine)).wrapped == "a Mine"
    assert call_of(q, v=q.as_subclass(Mine)).wrapped == "a Mine"
    assert call_of(q, mask=torch.zeros(4, 4).as_subclass(Mine)).wrapped == "a Mine"
    assert call_of(torch.nn.Parameter(q), mask=torch.nn.Parameter(torch.zeros(4, 4))).wrapped is None
    with torch.autograd.forward_ad.dual_level():
        assert call_of(q).wrapped == "forward-mode AD"
    seen = []
    torch.func.vmap(lambda x: seen.append(call_of(x).wrapped) or x)(q[None])
    assert seen == ["a functorch transform"]


def test_a_scale_that_float32_cannot_hold_is_not_above_zero():
    q = torch.zeros(1, 2, 4, 8)
    kinds = [call_of(q, scale=scale).negative_scale for scale in (-0.5, 0.0, 1e-60, 1e-45, 1e-37, 0.5, None)]

    assert kinds == [True, True, True, True, False, False, False]


def test_calls_are_equal_hash_alike_and_read_well():
    info = MaskInfo(causal=True, window=2)
    one, two = (describe(*qkv(), mask_info=info)[0] for _ in range(2))

    assert one == two
    assert hash(one) == hash(two)
    assert str(one) == (
        "cpu, float32, head_dim 8, many queries, equal lengths, structure: bottom-right causal + window"
    )
    assert str(fb.Call("cuda", 1, (9, 0), F16, 64, 64, one_query=True)).startswith(
        "cuda:1, float16, head_dim 64, one query"
    )


# ---- input errors: each is raised before any kernel, under every policy but auto

Q = torch.zeros(1, 2, 4, 8)
WRONG = [
    ("q", {"q": [1]}, "q is a list; expected a torch.Tensor, (batch, heads, length, head_dim)."),
    ("k", {"k": None}, "k is a NoneType; expected a torch.Tensor, (batch, heads, length, head_dim)."),
    ("v", {"v": Q[0]}, "v has shape (2, 4, 8); expected four dimensions, (batch, heads, length, head_dim)."),
    ("q", {"q": Q.long()}, "q has dtype torch.int64; attention takes floating-point tensors."),
    ("k", {"k": Q.to_sparse()}, "k has layout torch.sparse_coo; attention takes dense tensors."),
    (
        "q",
        {"q": torch.nested.nested_tensor([torch.zeros(2, 4, 8)], layout=torch.jagged)},
        "q is a nested tensor; expected a plain one with a mask, or mask_info, for its lengths.",
    ),
    ("k", {"k": Q.to("meta")}, "k is on meta and q on cpu; move them to one device."),
    ("v", {"v": Q.half()}, "v has dtype torch.float16 and q torch.float32; cast them to one dtype."),
    (
        "k",
        {"k": torch.zeros(2, 2, 4, 8)},
        "k has shape (2, 2, 4, 8) and q (1, 2, 4, 8); batch and head_dim must be the same.",
    ),
    (
        "k",
        {"k": torch.zeros(1, 2, 4, 9)},
        "k has shape (1, 2, 4, 9) and q (1, 2, 4, 8); batch and head_dim must be the same.",
    ),
    (
        "v",
        {"v": torch.zeros(1, 2, 5, 8)},
        "v has shape (1, 2, 5, 8) and k (1, 2, 4, 8); batch, heads and length must be the same.",
    ),
    (
        "v",
        {"q": torch.zeros(1, 4, 4, 8), "v": torch.zeros(1, 1, 4, 8), "enable_gqa": True},
        "v has shape (1, 1, 4, 8) and k (1, 2, 4, 8); batch, heads and length must be the same.",
    ),
    (
        "enable_gqa",
        {"q": torch.zeros(1, 4, 4, 8)},
        "q has 4 heads and k 2; pass enable_gqa=True if key heads are shared.",
    ),
    (
        "k",
        {"q": torch.zeros(1, 3, 4, 8), "enable_gqa": True},
        "q has 3 heads and k 2; with enable_gqa the first must be a multiple of the second.",
    ),
    (
        "k",
        {"k": torch.zeros(1, 0, 4, 8), "v": torch.zeros(1, 0, 4, 8), "enable_gqa": True},
        "q has 2 heads and k 0; with enable_gqa the first must be a multiple of the second.",
    ),
    ("scale", {"scale": float("nan")}, "scale is nan; expected a finite number, or None for 1 / sqrt(head_dim)."),
    ("scale", {"scale": float("inf")}, "scale is inf; expected a finite number, or None for 1 / sqrt(head_dim)."),
    ("scale", {"scale": "big"}, "scale is 'big'; expected a finite number, or None for 1 / sqrt(head_dim)."),
    (
        "scale",
        {"scale": torch.tensor(2.0)},
        "scale is tensor(2.); expected a finite number, or None for 1 / sqrt(head_dim).",
    ),
    (
        "scale",
        {"scale": Fraction(1, 8)},
        "scale is Fraction(1, 8); expected a finite number, or None for 1 / sqrt(head_dim).",
    ),
    (
        "scale",
        {"scale": 10**310},
        f"scale is {10**310}; expected a finite number, or None for 1 / sqrt(head_dim).",
    ),
    (
        "dropout_p",
        {"dropout_p": Fraction(1, 8)},
        "dropout_p is Fraction(1, 8); expected a probability of at least 0 and below 1.",
    ),
    ("causal", {"causal": "no"}, "causal is 'no'; expected True or False."),
    ("causal", {"causal": torch.ones(2, dtype=torch.bool)}, "causal is tensor([True, True]); expected True or False."),
    ("enable_gqa", {"enable_gqa": 1}, "enable_gqa is 1; expected True or False."),
    ("dropout_p", {"dropout_p": 1.0}, "dropout_p is 1.0; expected a probability of at least 0 and below 1."),
    ("dropout_p", {"dropout_p": -0.1}, "dropout_p is -0.1; expected a probability of at least 0 and below 1."),
    ("dropout_p", {"dropout_p": "some"}, "dropout_p is 'some'; expected a probability of at least 0 and below 1."),
    ("mask", {"mask": [[True]]}, "mask is a list; expected a torch.Tensor, boolean (True = attend) or additive."),
    (
        "mask",
        {"mask": torch.zeros(4, 4).to_sparse()},
        "mask has layout torch.sparse_coo; attention takes dense tensors.",
    ),
    (
        "mask",
        {"mask": torch.nested.nested_tensor([torch.zeros(4, 4)], layout=torch.jagged)},
        "mask is a nested tensor; expected a plain one with a mask, or mask_info, for its lengths.",
    ),
    ("mask", {"mask": Q[0, 0, :, :4].to("meta")}, "mask is on meta and q on cpu; move it to q's device."),
    *(
        (
            "mask",
            {"mask": torch.zeros(4, 4, dtype=dtype)},
            f"mask has dtype {dtype} and q torch.float32; "
            "expected torch.bool (True = attend), or torch.float32 to add.",
        )
        for dtype in (torch.uint8, torch.int64, F16, torch.bfloat16)
    ),
    (
        "mask",
        {"mask": torch.zeros(1, 1, 4, 6)},
        "mask has shape (1, 1, 4, 6) and does not broadcast to (batch, heads, q_length, k_length) = (1, 2, 4, 4): "
        "last dimension 6, expected 1 or 4.",
    ),
    (
        "mask",
        {"mask": torch.zeros(3, 4)},
        "mask has shape (3, 4) and does not broadcast to (batch, heads, q_length, k_length) = (1, 2, 4, 4): "
        "second to last dimension 3, expected 1 or 4.",
    ),
    (
        "mask",
        {"mask": torch.zeros(2, 2, 4, 4)},
        "mask has shape (2, 2, 4, 4) and does not broadcast to (batch, heads, q_length, k_length) = (1, 2, 4, 4): "
        "first dimension 2, expected 1.",
    ),
    (
        "mask",
        {"mask": torch.zeros(1, 1, 2, 4, 4)},
        "mask has shape (1, 1, 2, 4, 4) and does not broadcast to (batch, heads, q_length, k_length) = (1, 2, 4, 4): "
        "5 dimensions, expected at most 4.",
    ),
    (
        "mask",
        {"mask": torch.zeros(3, 4, 4)},
        "mask has shape (3, 4, 4) and does not broadcast to (batch, heads, q_length, k_length) = (1, 2, 4, 4): "
        "third to last dimension 3, expected 1 or 2. "
        "Rank 3 is read as (heads, q_length, k_length); for one mask per row give (batch, 1, q_length, k_length).",
    ),
    (
        "mask",
        {"mask": fb.mask_for(4, 4, causal=True)},
        "mask is a Masked; expected a torch.Tensor, boolean (True = attend) or additive. Give both with "
        "**masked.arguments().",
    ),
    (
        "mask",
        {"q": torch.zeros(3, 2, 4, 8), "k": torch.zeros(3, 2, 4, 8), "v": torch.zeros(3, 2, 4, 8)}
        | {"mask": torch.ones(3, 4)},
        "mask has shape (3, 4) and does not broadcast to (batch, heads, q_length, k_length) = (3, 2, 4, 4): "
        "second to last dimension 3, expected 1 or 4. If it says which keys of each row are real, give "
        "mask_info=MaskInfo(keys=mask.bool()) in its place.",
    ),
    ("mask_info", {"mask_info": "causal"}, "mask_info is a str; expected fuseboard.MaskInfo."),
    (
        "mask_info",
        {"mask_info": MaskInfo(torch.ones(1, 5, dtype=torch.bool))},
        "mask_info.keys has shape (1, 5); expected (batch, k_length) = (1, 4).",
    ),
    (
        "mask_info",
        {"mask_info": MaskInfo(torch.ones(1, 4, dtype=torch.bool, device="meta"))},
        "mask_info.keys is on meta and q on cpu; move it to q's device.",
    ),
]


@pytest.mark.parametrize(("argument", "arguments", "message"), WRONG, ids=[f"{a}: {m[:40]}" for a, _, m in WRONG])
def test_an_argument_that_cannot_be_right_is_one_clear_error_before_any_kernel(site, argument, arguments, message):
    kernel = Fake()
    given = {"q": Q, "k": Q, "v": Q} | arguments
    with registered(("a", kernel)):
        for policy in ("fast", "exact", "a", fb.policy_for("a", strict=True)):
            with fb.bind(policy), pytest.raises(InputError) as caught:
                fb.attention(**given, site=site)
            assert str(caught.value) == message
            assert caught.value.argument == argument
            assert isinstance(caught.value, ValueError)
        assert kernel.calls == 0
        assert fb.attention(Q, Q, Q, site=site).shape == Q.shape


@pytest.mark.parametrize("arguments", [each for _, each, _ in WRONG])
def test_a_wrong_argument_is_the_same_error_under_autocast(site, arguments):
    given = {"q": Q, "k": Q, "v": Q} | arguments
    mended = arguments.keys() <= {"v", "mask"} and all(
        isinstance(each, torch.Tensor) and each.dtype in (F16, torch.bfloat16) for each in arguments.values()
    )  # autocast casts these to one dtype
    with registered(("a", Fake())), fb.bind("fast"), torch.autocast("cpu", torch.bfloat16):
        if mended:
            assert fb.attention(**given, site=site).dtype == torch.bfloat16
        else:
            with pytest.raises(InputError):
                fb.attention(**given, site=site)


# No key heads at all: torch 2.6 divides by their number and the process ends.
CRASHING = [each for _, each, _ in WRONG if isinstance(each.get("k"), torch.Tensor) and each["k"].shape[1] == 0]


@pytest.mark.parametrize(
    "arguments", [each for _, each, _ in WRONG if "mask_info" not in each and not any(each is bad for bad in CRASHING)]
)
def test_under_auto_the_error_is_the_references_own(site, arguments):
    given = {"q": Q, "k": Q, "v": Q, "mask": None, "scale": None, "dropout_p": 0.0, "enable_gqa": False} | arguments

    def outcome(call):
        try:
            out = call()
        except Exception as error:
            return type(error), str(error)
        return out.shape, out.dtype

    q, k, v, mask = (given[name] for name in ("q", "k", "v", "mask"))
    shared = {"scale": given["scale"], "dropout_p": given["dropout_p"]}
    gqa = {"enable_gqa": True} if given["enable_gqa"] else {}
    masked = {"attn_mask": mask} if mask is not None else {}
    expected = outcome(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, **masked, **shared, **gqa))

    assert outcome(lambda: fb.attention(q, k, v, site=site, mask=mask, **shared, **gqa)) == expected
    with fb.bind("auto"):
        assert outcome(lambda: fb.attention(q, k, v, site=site, mask=mask, **shared, **gqa)) == expected


def test_calls_that_differ_are_told_apart_in_words():
    q = torch.randn(1, 2, 4, 8, dtype=torch.float16)
    strided = torch.randn(1, 2, 8, 4, dtype=torch.float16).transpose(2, 3)
    wide, low = torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.float16)
    words = {
        str(describe(*given, **options)[0])
        for given, options in (
            ((q, q, q), {}),
            ((strided, q, q), {}),
            ((q.as_subclass(Subclass), q, q), {}),
            ((q, q, q), {"scale": 0.5}),
            ((q, q, q), {"scale": -0.5}),
            ((q, q, q), {"mask": low}),
            ((q, q, q), {"mask": wide}),
        )
    }

    assert len(words) == 7


class Subclass(torch.Tensor):
    pass
