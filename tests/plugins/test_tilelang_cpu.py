"""The CPU form of the TileLang kernels against float32 and float64, seed 1234; what is refused before a kernel sees it.

Needs TileLang and a C++ compiler, and says which is missing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fuseboard as fb
from fuseboard import registry
from fuseboard.registry import Entry, Registry, use
from fuseboard.selftest import attention_fp64
from fuseboard_tilelang import (
    _package,
    add_ln_kernel,
    attn_kernel,
    compile_cpu,
    gemm_geglu_kernel,
    gemm_kernel,
    ops,
    rope_kernel,
    tilelang,
)
from fuseboard_tilelang import compile as compiling
from fuseboard_tilelang.attn import OPEN
from fuseboard_tilelang.warm import Job, needed, warm

SITE = fb.Site("tests.tilelang.cpu")
CLOSE, CLOSE_ROPE = 2e-5, 2e-6
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": F.silu,
}
STATIC = (2, 70, 2, 64)


def jobs() -> list[Job]:
    """All kernels of these tests, which are compiled in parallel first."""
    found: list[Job] = [(gemm_kernel, (70, 67), options("gemm", True, True, act)) for act in ACTIVATIONS]
    found += [
        (gemm_kernel, (70, 67), options("gemm", bias, residual, "none"))
        for bias, residual in ((False, False), (True, False), (False, True))
    ]
    found += [(gemm_kernel, (129, 31), options("gemm", True, False, "gelu"))]
    found += [(gemm_geglu_kernel, (70, 67), {"bias": bias}) for bias in (False, True)]
    found += [(add_ln_kernel, (100,), options("add_ln", a, b)) for a in (False, True) for b in (False, True)]
    found += [(rope_kernel, (3, 20), {"positions": given}) for given in (False, True)]
    found += [
        (attn_kernel, (None, None, None, 64), {"bounded": a, "lengths": b})
        for a in (False, True)
        for b in (False, True)
    ]
    found += [(attn_kernel, (None, None, None, 96), {"bounded": False, "lengths": False})]
    found += [(attn_kernel, STATIC, {"keys": 70, "kv_heads": 2, "bounded": True, "lengths": True})]
    return found


def options(kind: str, *values: Any) -> dict[str, Any]:
    names = {"gemm": ("bias", "residual", "act"), "add_ln": ("residual", "bias")}[kind]
    found = dict(zip(names, values, strict=True))
    return {**found, "eps": 1e-5} if kind == "add_ln" else found


@pytest.fixture(autouse=True, scope="module")
def able() -> None:
    problem = _package.cpu_problem()
    if problem is not None:
        pytest.skip(problem)
    assert [why for why in warm(jobs(), target="c") if why] == []


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1234)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def linear(n: int, k: int) -> Tensor:
    return torch.randn(n, k) / math.sqrt(k)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_gemm_is_float32_s_with_every_epilogue(act: str) -> None:
    x, weight, bias, residual = torch.randn(17, 67), linear(70, 67), torch.randn(70), torch.randn(17, 70)
    want = ACTIVATIONS[act](F.linear(x, weight, bias)) + residual

    assert apart(ops.gemm(x, weight, bias, residual, act), want) < CLOSE


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_are_float32_s_from_far_below_zero_to_far_above(act: str) -> None:
    x, weight = torch.linspace(-60, 60, 17 * 67).view(17, 67), torch.eye(70, 67)
    rest = torch.zeros(17, 70)

    assert apart(ops.gemm(x, weight, torch.zeros(70), rest, act)[:, :67], ACTIVATIONS[act](x)) < CLOSE


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_what_is_no_number_or_infinite_stays_so(act: str) -> None:
    bias = torch.tensor([math.nan, math.inf] * 35)
    out = ops.gemm(torch.randn(17, 67), linear(70, 67), bias, torch.zeros(17, 70), act)

    assert torch.equal(out.isnan(), bias.isnan().expand(17, 70))
    assert torch.equal(out.isposinf(), bias.isposinf().expand(17, 70))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_gemm_is_float32_s_with_and_without_bias_and_residual(biased: bool, residual: bool) -> None:
    x, weight = torch.randn(17, 67), linear(70, 67)
    bias, rest = torch.randn(70) if biased else None, torch.randn(17, 70) if residual else None
    want = F.linear(x, weight, bias)

    assert apart(ops.gemm(x, weight, bias, rest), want if rest is None else want + rest) < CLOSE


@pytest.mark.parametrize("rows", [1, 16, 65])
def test_one_kernel_serves_any_number_of_rows(rows: int) -> None:
    x, weight, bias = torch.randn(rows, 31), linear(129, 31), torch.randn(129)

    assert apart(ops.gemm(x, weight, bias, act="gelu"), F.gelu(F.linear(x, weight, bias))) < CLOSE
    assert compile_cpu(gemm_kernel, 129, 31, bias=True, residual=False, act="gelu", config=None) is not None


def test_gemm_writes_where_it_is_told_to_and_its_residual_may_be_there() -> None:
    x, weight, residual = torch.randn(17, 67), linear(70, 67), torch.randn(17, 70)
    want = F.linear(x, weight) + residual

    assert ops.gemm(x, weight, residual=residual, out=residual) is residual
    assert apart(residual, want) < CLOSE


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 17, 64])
def test_geglu_is_float32_s(biased: bool, rows: int) -> None:
    x, weight, bias = torch.randn(rows, 67), linear(140, 67), torch.randn(140) if biased else None
    u, g = F.linear(x, weight, bias).chunk(2, -1)

    assert apart(ops.geglu(x, weight, bias), F.gelu(u) * g) < CLOSE


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", [None, 1.0, 1000.0])
def test_add_ln_is_float32_s_and_its_residual_is_exactly_torch_s_sum(biased: bool, size: float | None) -> None:
    x, weight, bias = torch.randn(17, 100), torch.randn(100), torch.randn(100) if biased else None
    residual = None if size is None else torch.randn(17, 100) * size
    total, before = x if residual is None else residual + x, x.clone()

    out = ops.add_ln(residual, x, weight, bias)
    assert apart(out, F.layer_norm(total, (100,), weight, bias)) < CLOSE
    assert torch.equal(total, x if residual is None else residual)
    assert torch.equal(x, before)


def test_what_is_written_in_place_says_so_to_autograd() -> None:
    residual, x, weight = torch.randn(17, 100), torch.randn(17, 100), torch.randn(100)
    weights = torch.randn(17, 100, requires_grad=True)
    product = (weights * residual).sum()  # keeps residual for its backward
    ops.add_ln(residual, x, weight)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("given", [False, True])
def test_rope_rotates_queries_and_keys_at_wrapped_positions_and_leaves_values_alone(given: bool) -> None:
    qkv, angles = torch.randn(17, 180), torch.randn(5, 10)
    positions = torch.randint(-12, 12, (17,), dtype=torch.int32) if given else None
    at = (torch.arange(17) if positions is None else positions.long()) % 5
    before = qkv.clone()
    a, b = before[:, :120].view(17, 6, 20).chunk(2, -1)
    cos, sin = angles.cos()[at, None], angles.sin()[at, None]
    want = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).view(17, 120)

    assert ops.rope_(qkv, angles.cos(), angles.sin(), positions, 3, 20) is qkv
    assert apart(qkv[:, :120], want) < CLOSE_ROPE
    assert torch.equal(qkv[:, 120:], before[:, 120:])


@pytest.mark.parametrize("lengths", [(1, 77), (65, 65), (296, 296), (40, 104), (104, 40), (1, 65), (3, 1)])
@pytest.mark.parametrize("window", [None, (20, 9), (0, 0), (None, 3), (5, None)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_attention_is_float64_s(
    lengths: tuple[int, int], window: tuple[int | None, int | None] | None, causal: bool, ragged: bool
) -> None:
    n_q, n_k = lengths
    q, k, v = torch.randn(4, 2, n_q, 64), torch.randn(4, 1, n_k, 64), torch.randn(4, 1, n_k, 64)
    before, behind = (n_k + n_q if side is None else side for side in window or (None, None))
    shift = torch.arange(n_k) - torch.arange(n_q)[:, None] - (n_k - n_q)
    mask = ((shift >= -before) & (shift <= (0 if causal else behind))).expand(4, 1, n_q, n_k)
    real = torch.tensor([n_k, max(n_k // 3, 1), 0, n_k + 9], dtype=torch.int32) if ragged else None
    if real is not None:
        mask = mask & (torch.arange(n_k) < real[:, None])[:, None, None]
    want = attention_fp64(q, k, v, mask=mask)
    if real is not None:  # what is not real is not read
        hidden = (torch.arange(n_k) >= real[:, None])[:, None, :, None]
        k, v = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)

    out = ops.attention(q, k, v, real, causal, window)
    assert apart(out, want) < CLOSE
    assert not out.masked_select(~mask.any(-1)[..., None]).any()


def test_attention_of_fixed_sizes_is_that_of_any() -> None:
    q, k, v = (torch.randn(STATIC).transpose(1, 2).contiguous().transpose(1, 2).reshape(2, 2, 70, 64) for _ in range(3))
    real = torch.tensor([70, 33], dtype=torch.int32)
    fixed = compile_cpu(attn_kernel, *STATIC, keys=70, kv_heads=2, bounded=True, lengths=True)
    out = torch.empty_like(q)
    fixed(q, k, v, real, out, math.log2(math.e) / 8, 1, 0, OPEN, 0)

    assert torch.equal(out, ops.attention(q, k, v, real, causal=True))
    assert "q (2, 2, 70, 64)" in repr(fixed)


def test_attention_at_another_head_dim_scale_and_alignment_is_float64_s() -> None:
    q, k, v = torch.randn(2, 4, 33, 96), torch.randn(2, 2, 50, 96), torch.randn(2, 2, 50, 96)

    assert apart(ops.attention(q, k, v, scale=0.3), attention_fp64(q, k, v, scale=0.3)) < CLOSE
    q, k, v = (each[..., :64] for each in (q, k, v))
    for causal in (False, True):
        got = ops.attention(q, k, v, causal=causal, top_left=True)
        assert apart(got, attention_fp64(q, k, v, causal=causal)) < CLOSE


def test_a_tail_of_keys_takes_no_weight() -> None:
    """Issue 1213 of TileLang: keys beyond the last one score 0 and take part; 296 / 320 here in place of 1."""
    q, k, v = torch.zeros(1, 1, 2, 64), torch.randn(1, 1, 296, 64), torch.ones(1, 1, 296, 64)

    assert ops.attention(q, k, v).unique().tolist() == [1.0]


@pytest.mark.parametrize("causal", [False, True])
def test_scores_that_are_no_numbers_give_none(causal: bool) -> None:
    q, k, v = (torch.randn(1, 2, 70, 64) for _ in range(3))
    q[0, 0, 5], k[0, 1, 40, 7] = torch.nan, torch.inf
    want = attention_fp64(q, k, v, causal=causal)
    out = ops.attention(q, k, v, torch.tensor([70], dtype=torch.int32) if causal else None, causal=causal)

    assert want.isnan().any()
    assert torch.equal(out.isnan(), want.isnan())
    assert apart(out.nan_to_num(), want.nan_to_num()) < CLOSE


def test_lengths_below_zero_and_beyond_the_keys_are_clamped() -> None:
    q = torch.randn(2, 2, 40, 64)
    real = torch.tensor([-5, 1000], dtype=torch.int32)
    out = ops.attention(q, q, q, real)

    assert not out[0].any()
    assert apart(out[1], attention_fp64(q, q, q)[1]) < CLOSE


def test_empty_tensors_give_empty_ones_and_no_keys_give_zeros() -> None:
    q, none = torch.randn(2, 4, 5, 64), torch.randn(2, 4, 0, 64)

    assert ops.gemm(torch.randn(0, 67), linear(70, 67)).shape == (0, 70)
    assert ops.add_ln(torch.randn(0, 100), torch.randn(0, 100), torch.randn(100)).shape == (0, 100)
    assert not ops.attention(q, none, none).any()
    assert ops.attention(none, q, q).shape == (2, 4, 0, 64)


def test_two_threads_make_one_kernel_and_each_gets_its_own_result() -> None:
    found: list[Any] = [None] * 4
    inputs = [torch.randn(17, 67) for _ in found]
    weight = linear(70, 67)

    def work(place: int) -> None:
        kernel = compile_cpu(gemm_kernel, 70, 67, bias=False, residual=False, act="none", config=None)
        found[place] = (kernel, [ops.gemm(inputs[place], weight) for _ in range(20)])

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({id(kernel) for kernel, _ in found}) == 1
    for x, (_, outs) in zip(inputs, found, strict=True):
        assert all(apart(out, F.linear(x, weight)) < CLOSE for out in outs)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"weight": None}, TypeError, "gemm was given a NoneType in a tensor's place"),
        ({"x": torch.randn(17)}, ValueError, r"gemm was given shapes \(17,\) and \(70, 67\)"),
        ({"x": torch.randn(17, 67).double()}, ValueError, r"the dtype is torch\.float64; expected torch\.float32"),
        ({"x": torch.randn(17, 67).bfloat16()}, ValueError, r"the dtype is torch\.bfloat16; expected torch\.float32"),
        ({"x": torch.randn(17, 67, device="meta")}, ValueError, "a tensor is on meta; expected a CUDA device or"),
        ({"x": torch.randn(17, 66)}, ValueError, r"x has shape \(17, 66\); expected \(M, 67\)"),
        ({"x": torch.randn(67, 17).T}, ValueError, r"x has strides \(1, 17\); expected a contiguous tensor\."),
        ({"weight": linear(70, 67).double()}, ValueError, r"weight has dtype torch\.float64; expected torch\.float32"),
        ({"bias": torch.randn(69)}, ValueError, r"bias has shape \(69,\); expected \(70\)"),
        ({"bias": torch.randn(70, device="meta")}, ValueError, "bias is on meta; this kernel was compiled for cpu"),
        ({"bias": 3.0}, TypeError, r"bias is a float; expected a torch\.Tensor"),
        ({"out": torch.empty(18, 70)}, ValueError, "out has M = 18 and x has M = 17"),
        ({"act": "swish"}, ValueError, "act is 'swish'; expected one of none, relu, gelu, gelu_tanh, silu"),
        ({"weight": linear(70, 67).requires_grad_()}, ValueError, r"weight needs a gradient.*torch\.no_grad"),
    ],
)  # fmt: skip
def test_what_a_kernel_would_read_out_of_bounds_or_not_survive_is_refused(
    arguments: Mapping[str, Any], error: type[Exception], text: str
) -> None:
    given: dict[str, Any] = {"x": torch.randn(17, 67), "weight": linear(70, 67), "bias": torch.randn(70)}
    with pytest.raises(error, match=text):
        ops.gemm(**{**given, **arguments})


@pytest.mark.parametrize(
    ("place", "other", "text"),
    [
        (0, torch.randn(18, 67), "out has M = 17 and x has M = 18"),
        (0, torch.randn(67, 17).T, "x has strides"),
        (1, torch.randn(70, 67).double(), "weight has dtype"),
        (1, torch.randn(70, 67, device="meta"), "weight is on meta"),
        (1, torch.randn(70, 67).requires_grad_(), "weight needs a gradient"),
        (2, torch.empty(17, 71)[:, :70], "out has strides"),
    ],
)
def test_a_call_like_an_earlier_one_but_for_one_thing_is_checked_anew(place: int, other: Tensor, text: str) -> None:
    kernel = compile_cpu(gemm_kernel, 70, 67, bias=False, residual=False, act="none", config=None)
    given = [torch.randn(17, 67), linear(70, 67), torch.empty(17, 70)]
    for _ in range(2):
        kernel(*given)
    given[place] = other
    for _ in range(2):
        with pytest.raises(ValueError, match=text):
            kernel(*given)
        with torch.no_grad():
            kernel(torch.randn(17, 67), linear(70, 67), torch.empty(17, 70))


def test_a_tensor_that_needs_a_gradient_is_taken_where_none_is_kept_and_refused_where_one_is() -> None:
    kernel = compile_cpu(gemm_kernel, 70, 67, bias=False, residual=False, act="none", config=None)
    x, weight, out = torch.randn(17, 67), linear(70, 67).requires_grad_(), torch.empty(17, 70)
    with torch.no_grad():
        kernel(x, weight, out)
        assert apart(out, F.linear(x, weight)) < CLOSE
    with pytest.raises(ValueError, match="weight needs a gradient"):
        kernel(x, weight, out)


def test_calls_of_more_kinds_than_are_remembered_are_right_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "KEPT", 3)
    weight = linear(70, 67)
    kernel = compile_cpu(gemm_kernel, 70, 67, bias=False, residual=False, act="none", config=None)
    for rows in (*range(1, 12), 1, 0, 2):
        x = torch.randn(rows, 67)
        assert ops.gemm(x, weight).shape == (rows, 70)
        assert rows == 0 or apart(ops.gemm(x, weight), F.linear(x, weight)) < CLOSE
        assert len(kernel._right) <= 3


def test_kernels_that_no_time_is_left_for_are_named_as_not_begun() -> None:
    many = [(gemm_kernel, (8, 8 * place), {"act": "none"}) for place in range(1, 6)]

    assert warm(many, target="c", workers=1, seconds=0)[-1] == "not begun within 0 s"


def test_the_other_functions_refuse_too() -> None:
    q = torch.randn(2, 4, 5, 64)
    angles = torch.randn(5, 10)
    with pytest.raises(ValueError, match=r"geglu: weight has shape \(141, 67\); expected \(2 \* N, K\)"):
        ops.geglu(torch.randn(17, 67), linear(141, 67))
    with pytest.raises(ValueError, match="x has M = 18 and residual has M = 17"):
        ops.add_ln(torch.randn(17, 100), torch.randn(18, 100), torch.randn(100))
    with pytest.raises(ValueError, match=r"qkv has shape \(17, 179\); expected \(M, 180\)"):
        ops.rope_(torch.randn(17, 179), angles, angles, None, 3, 20)
    with pytest.raises(ValueError, match="sin has P = 4 and cos has P = 5"):
        ops.rope_(torch.randn(17, 180), angles, angles[:4], None, 3, 20)
    with pytest.raises(ValueError, match=r"cos has shape \(0, \.\.\.\); expected a position at least"):
        ops.rope_(torch.randn(17, 180), angles[:0], angles[:0], None, 3, 20)
    with pytest.raises(ValueError, match=r"positions has dtype torch\.int64; expected torch\.int32"):
        ops.rope_(torch.randn(17, 180), angles, angles, torch.arange(17), 3, 20)
    with pytest.raises(ValueError, match="D is 21; a head's columns are rotated in pairs"):
        ops.rope_(torch.randn(17, 189), angles, angles, None, 3, 21)
    with pytest.raises(ValueError, match="q has 4 heads and k 3; expected a multiple of the key heads"):
        ops.attention(q, torch.randn(2, 3, 5, 64), torch.randn(2, 3, 5, 64))
    with pytest.raises(ValueError, match=r"lengths has dtype torch\.int64; expected torch\.int32"):
        ops.attention(q, q, q, torch.tensor([5, 5]))
    with pytest.raises(ValueError, match="lengths has B = 3 and q has B = 2"):
        ops.attention(q, q, q, torch.tensor([5, 5, 5], dtype=torch.int32))
    with pytest.raises(ValueError, match="v has L = 6 and k has L = 5"):
        ops.attention(q, q, torch.randn(2, 4, 6, 64))
    with pytest.raises(ValueError, match=r"scale is -1\.0; expected a number above zero"):
        ops.attention(q, q, q, scale=-1.0)
    with pytest.raises(ValueError, match="window is -1; expected how many keys are seen before and behind"):
        ops.attention(q, q, q, window=-1)


def test_a_compiled_kernel_checks_its_arguments_as_it_names_them() -> None:
    kernel = compile_cpu(gemm_kernel, 70, 67, bias=False, residual=False, act="none", config=None)
    x, weight, out = torch.randn(17, 67), linear(70, 67), torch.empty(17, 70)
    kernel(x, weight, out)

    assert apart(out, F.linear(x, weight)) < CLOSE
    assert repr(kernel) == "<gemm_kernel for cpu: x (M, 67), weight (70, 67), out (M, 70)>"
    assert "gemm_kernel" in kernel.source or "gemm" in kernel.source
    with pytest.raises(TypeError, match="gemm_kernel was given 2 arguments; expected x, weight, out"):
        kernel(x, weight)
    with pytest.raises(TypeError, match="gemm_kernel: out is a NoneType"):
        kernel(x, weight, None)
    with pytest.raises(ValueError, match="dtype is 'bfloat16'; the CPU form takes 'float32' only"):
        gemm_kernel(70, 67, cpu=True)


def test_the_backend_answers_to_its_name_and_is_no_part_of_fast() -> None:
    q, k = torch.randn(2, 4, 20, 64), torch.randn(2, 2, 33, 64)
    alone = Registry([Entry("tilelang", lambda: tilelang, "fuseboard-tilelang", "0.1.0")])
    for policy, used in (("fast", "reference"), ("exact", "reference"), ("tilelang", "tilelang")):
        run = fb.Run()
        with use(alone), fb.bind(policy, run=run):
            out = fb.attention(q, k, k, site=SITE, enable_gqa=True)
        assert run.report()["attention"]["used"] == {used: 1}
        assert apart(out, attention_fp64(q, k, k)) < CLOSE


@pytest.mark.parametrize("scale", [1e-19, 1e-21, 1e-30])
def test_a_scale_at_which_hidden_keys_would_be_seen_is_refused(scale: float) -> None:
    q, k = torch.randn(2, 2, 20, 64), torch.randn(2, 2, 33, 64)
    info = fb.MaskInfo(causal=True, window=3)
    with fb.bind(fb.policy_for("tilelang", True)):
        try:
            out = fb.attention(q, k, k, site=SITE, scale=scale, mask_info=info)
        except fb.RefusedError as error:
            assert scale < 1e-20
            assert "a scale below 1e-20, at which hidden keys would be seen" in str(error)
        else:
            assert apart(out, attention_fp64(q, k, k, scale=scale, mask_info=info)) < CLOSE


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ahead", [None, 0, 1, 8])
def test_the_backend_takes_structures_as_they_are_meant(
    window: int | None, causal: bool, padded: bool, ahead: int | None
) -> None:
    q, k = torch.randn(2, 4, 20, 64), torch.randn(2, 2, 33, 64)
    keys = torch.arange(33) < torch.tensor([[33], [9]]) if padded else None
    info = fb.MaskInfo(keys, causal, window, "right" if padded else None, ahead)
    with fb.bind(fb.policy_for("tilelang", True)):
        out = fb.attention(q, k, k, site=SITE, enable_gqa=True, mask_info=info)

    assert apart(out, attention_fp64(q, k, k, mask_info=info)) < CLOSE


@pytest.mark.parametrize("lengths", [(130, 130), (40, 104), (104, 40), (2, 300)])
@pytest.mark.parametrize("bounds", [(None, 0), (None, 7), (65, 64), (1, 90)], ids=str)
def test_the_backend_takes_local_attention_at_all_lengths(
    lengths: tuple[int, int], bounds: tuple[int | None, int]
) -> None:
    q, k = torch.randn(2, 4, lengths[0], 64), torch.randn(2, 2, lengths[1], 64)
    info = fb.MaskInfo(window=bounds[0], ahead=bounds[1])
    with fb.bind(fb.policy_for("tilelang", True)):
        out = fb.attention(q, k, k, site=SITE, enable_gqa=True, mask_info=info)

    assert apart(out, attention_fp64(q, k, k, mask_info=info)) < CLOSE


def test_the_installed_backend_is_listed_and_works() -> None:
    q = torch.randn(1, 1, 4, 64)
    found = {each.name: each for each in fb.explain(SITE, q, q, q, policy="tilelang").candidates}

    assert registry.current().resolve("tilelang") is not None
    assert not found["tilelang"].refusals


def test_what_a_call_needs_is_gathered_without_running_it() -> None:
    x, weight, residual = torch.randn(5, 33), torch.randn(31, 33), torch.ones(5, 33)

    def call() -> None:
        for _ in range(2):
            ops.gemm(x, weight, act="gelu")
        ops.gemm(x, weight)
        ops.add_ln(residual, x, torch.ones(33))

    jobs = needed(call)

    assert [(job[0], job[1]) for job in jobs] == [(gemm_kernel, (31, 33))] * 2 + [(add_ln_kernel, (33,))]
    assert [job[2]["act"] for job in jobs[:2]] == ["gelu", "none"]
    assert torch.equal(residual, torch.ones(5, 33))
    with pytest.raises(ValueError, match=r"expected torch\.float32"):
        needed(lambda: ops.gemm(x.half(), weight.half()))
    assert warm(jobs, target="c") == [None] * 3
    call()
    assert torch.equal(residual, 1 + x)
