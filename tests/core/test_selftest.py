from __future__ import annotations

import attrs
import pytest
import torch
from fakes import CPU, EVERY_STRUCTURE, Fake, entry, entry_of, hooks_of, qkv, registered, right, sdpa

import fuseboard as fb
from fuseboard import selftest
from fuseboard.call import describe
from fuseboard.probe import verdict
from fuseboard.registry import Registry
from fuseboard.selftest import attention_fp64
from fuseboard.settings import Settings

CLAIMS = {"structures": (EVERY_STRUCTURE,)}


def verdict_on(kernel, **limits):
    """What the self-test says of a kernel with these claims."""
    backend = Registry([entry("x", kernel, **limits)], Settings()).resolve("x")
    return selftest.run(backend, kernel, CPU)


def test_an_honest_kernel_passes():
    assert verdict_on(right, **CLAIMS) is None


def test_an_honest_kernel_passes_in_every_dtype():
    halves = {torch.float16, torch.bfloat16, torch.float32, torch.float64}

    assert verdict_on(right, dtypes=halves, backward=False, mask_grad=False) is None


def test_a_kernel_with_one_head_dim_and_no_other_claim_passes():
    plain = dict.fromkeys(("gqa", "custom_scale", "backward", "mask_grad", "dropout"), False)

    assert verdict_on(right, head_dims=fb.HeadDims(only={80}), v_head_dims=None, masks=(), causal=(), **plain) is None


def drops_the_mask(q, k, v, *, mask, mask_info, **given):
    return right(q, k, v, mask=None, mask_info=mask_info, **given)


def drops_the_structure(q, k, v, *, mask, mask_info, **given):
    return right(q, k, v, mask=mask, mask_info=None, **given)


def drops_the_flag(q, k, v, *, causal, **given):
    return right(q, k, v, causal=False, **given)


def drops_the_scale(q, k, v, *, scale, **given):
    return right(q, k, v, scale=None, **given)


def takes_top_left_for_bottom_right(q, k, v, *, mask, mask_info, **given):
    if mask_info is not None and mask_info.causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        if mask_info.keys is not None:
            mask = mask & mask_info.keys[:, None, None, :]
        mask_info = None
    return right(q, k, v, mask=mask, mask_info=mask_info, **given)


def takes_left_for_right_padding(q, k, v, *, mask, mask_info, **given):
    if mask_info is not None and mask_info.padding == "left":
        mask_info = attrs.evolve(mask_info, keys=mask_info.keys.flip(-1), padding="right")
    return right(q, k, v, mask=mask, mask_info=mask_info, **given)


def ignores_gaps(q, k, v, *, mask, mask_info, **given):
    if mask_info is not None and mask_info.keys is not None and mask_info.padding is None:
        place = torch.arange(k.shape[-2])
        mask_info = attrs.evolve(mask_info, keys=place < mask_info.keys.sum(-1, keepdim=True))
    return right(q, k, v, mask=mask, mask_info=mask_info, **given)


def window_off_by_one(q, k, v, *, mask, mask_info, **given):
    if mask_info is not None and mask_info.window is not None:
        mask_info = attrs.evolve(mask_info, window=mask_info.window + 1)
    return right(q, k, v, mask=mask, mask_info=mask_info, **given)


def bound_ahead_off_by_one(q, k, v, *, mask, mask_info, **given):
    if mask_info is not None and mask_info.ahead is not None:
        mask_info = attrs.evolve(mask_info, ahead=mask_info.ahead + 1)
    return right(q, k, v, mask=mask, mask_info=mask_info, **given)


def wrong_past_64_keys(q, k, v, **given):
    out = right(q, k, v, **given)
    return out * 1.01 if k.shape[-2] % 64 == 1 else out


def wrong_with_more_queries(q, k, v, **given):
    out = right(q, k, v, **given)
    return out + 0.01 if q.shape[-2] > k.shape[-2] else out


def tiles_shared_heads(q, k, v, **given):
    groups = q.shape[1] // k.shape[1]
    return right(q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), **given)


def nan_in_empty_rows(q, k, v, *, mask, **given):
    out = right(q, k, v, mask=mask, **given)
    if mask is not None and mask.dtype == torch.bool:
        out = out.masked_fill(~mask.any(-1, keepdim=True), torch.nan)
    return out


def writes_into_q(q, k, v, **given):
    out = right(q, k, v, **given)
    q.data.mul_(2)
    return out


def loses_the_graph(q, k, v, **given):
    return right(q.detach(), k.detach(), v.detach(), **given)


def loses_the_gradient_of_k(q, k, v, **given):
    return right(q, k.detach(), v, **given)


def loses_the_gradient_of_the_mask(q, k, v, *, mask, **given):
    return right(q, k, v, mask=None if mask is None else mask.detach(), **given)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        return out.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.5


def scales_the_gradient(q, k, v, **given):
    return WrongGradient.apply(right(q, k, v, **given))


def raises_in_backward(q, k, v, **given):
    out = right(q, k, v, **given)
    if out.requires_grad:
        out.register_hook(lambda grad: 1 / 0)
    return out


LIARS = [
    (drops_the_mask, "bool mask", "off by"),
    (drops_the_structure, "structure", "off by"),
    (drops_the_flag, "causal", "off by"),
    (drops_the_scale, "", "off by"),
    (takes_top_left_for_bottom_right, "causal=True", "off by"),
    (takes_left_for_right_padding, "keys=left", "off by"),
    (ignores_gaps, "keys=any", "off by"),
    (window_off_by_one, "window=20", "off by"),
    (bound_ahead_off_by_one, "ahead=10", "off by"),
    (wrong_past_64_keys, "lengths 65x65", "off by"),
    (wrong_with_more_queries, "lengths 128x65", "off by"),
    (tiles_shared_heads, "gqa", "off by"),
    (nan_in_empty_rows, "bool mask", "its output is not finite"),
    (writes_into_q, "", "it wrote into q"),
    (loses_the_graph, "backward", "its output carries no gradient"),
    (loses_the_gradient_of_k, "backward", "its gradient of k is lost"),
    (loses_the_gradient_of_the_mask, "mask_grad", "its gradient of mask is lost"),
    (scales_the_gradient, "backward", "its gradient of q is off by"),
    (lambda q, k, v, **given: None, "", "it returned a NoneType, expected a tensor"),
    (lambda q, k, v, **given: (right(q, k, v, **given),), "", "it returned a tuple, expected a tensor"),
    (lambda q, k, v, **given: right(q, k, v, **given).half(), "", "it returned torch.float16 (2, 4, "),
    (lambda q, k, v, **given: right(q, k, v, **given).transpose(1, 2), "", "it returned torch.float32 (2, "),
    (lambda q, k, v, **given: right(q, k, v, **given).to("meta"), "", "on meta, expected torch.float32"),
    (lambda q, k, v, **given: right(q, k, v, **given) + 0.01, "", "off by 0.01, tolerance 0.0001"),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "case", "problem"), LIARS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_kernel_that_lies_is_caught_and_for_its_own_reason(kernel, case, problem):
    said = verdict_on(kernel, **CLAIMS)

    assert said.startswith("self-test failed (")
    where, _, what = said.partition("): ")
    assert case in where
    assert problem in what


def test_an_error_in_backward_is_not_swallowed():
    assert verdict_on(raises_in_backward, **CLAIMS) == (
        "self-test failed (float32, lengths 65x65, head dim 64, gqa, backward): ZeroDivisionError: division by zero"
    )


def test_an_error_is_told_with_its_case():
    def kernel(q, k, v, **given):
        if q.shape[2] % 2:
            raise RuntimeError("odd lengths unsupported")
        return right(q, k, v, **given)

    said = "self-test failed (float32, lengths 1x77, head dim 64, gqa): RuntimeError: odd lengths unsupported"
    assert verdict_on(kernel) == said


@pytest.mark.parametrize(("exact", "tolerance", "ok"), [(True, 8e-4, True), (True, 0.5, False), (False, 0.5, True)])
def test_a_backend_that_calls_itself_exact_asks_for_no_more_than_rounding(exact, tolerance, ok):
    hooks = hooks_of(right, exact=exact) | {"tolerance": lambda dtype: tolerance}
    backend = Registry([entry_of("x", **hooks)], Settings()).resolve("x")
    said = selftest.run(backend, right, CPU)

    assert (said is None) is ok, said
    assert ok or "it calls itself exact but for rounding, and its tolerance is 0.5, where rounding stays below" in said


def test_a_kernel_is_never_given_what_it_does_not_claim():
    claims = {
        "gqa": False,
        "masks": {"bool"},
        "causal": {"equal"},
        "backward": False,
        "mask_grad": False,
        "custom_scale": False,
    }
    seen = []

    def kernel(q, k, v, **given):
        seen.append((q, k, given))
        return right(q, k, v, **given)

    assert verdict_on(kernel, **claims) is None
    for q, k, given in seen:
        assert q.shape[1] == k.shape[1]
        assert given["mask"] is None or (given["mask"].dtype == torch.bool and given["mask"].dim() == 4)
        assert given["mask_info"] is None
        assert not given["causal"] or q.shape[-2] == k.shape[-2]
        assert given["scale"] is None
        assert not q.requires_grad


def test_calls_that_guards_or_the_kernel_itself_refuse_are_left_out():
    def kernel(q, k, v, **given):
        assert q.shape[-2] == k.shape[-2]
        if given["causal"]:
            raise fb.DeclinedError("not today")
        return right(q, k, v, **given)

    kernel.declines = lambda q, k, v, **given: "masked" if given["mask"] is not None else None
    square = fb.Guard("square", lambda call, sizes: sizes.q_length == sizes.k_length, "equal lengths")

    assert verdict_on(kernel, guards=[square]) is None


def test_a_backend_that_admits_no_call_of_the_grid_is_not_taken_on_trust():
    never = fb.Guard("never", lambda call, sizes: False, "nothing")

    assert verdict_on(right, guards=[never]) == "self-test: its constraints admit none of the calls of the grid"


def test_the_declared_tolerance_decides():
    def kernel(q, k, v, **given):
        return right(q, k, v, **given) + 0.01

    strict = Registry([entry("x", kernel, exact=False)], Settings()).resolve("x")
    lax = attrs.evolve(strict, tolerance=lambda dtype: 0.011)
    case = selftest.Case(torch.float32, 65, 65, 64, 64)

    assert "off by" in selftest.check(strict, kernel, case, CPU)
    assert selftest.check(lax, kernel, case, CPU) is None


def test_the_grid_has_the_lengths_that_catch_known_faults():
    backend = Registry([entry("x", Fake(), **CLAIMS)], Settings()).resolve("x")
    grid = list(selftest.cases(backend, CPU))

    assert {(case.q_length, case.k_length) for case in grid} == {(1, 77), (65, 65), (64, 128), (128, 65), (130, 130)}
    for claim in ("causal", "gqa", "backward", "mask_grad"):
        assert any(getattr(case, claim) for case in grid), claim


def test_no_global_generator_is_touched():
    before = torch.get_rng_state()
    verdict_on(right)

    assert torch.equal(torch.get_rng_state(), before)


# ---- what everything is held against


@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_in_float64_agrees_with_torch(kind, causal):
    q, k, v = qkv(2, 4, 5, 9, kv_heads=2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    mask = None
    if kind == "bool":
        mask = torch.rand(2, 1, 5, 9, generator=generator) < 0.6
    elif kind == "additive":
        mask = torch.randn(4, 5, 9, generator=generator, dtype=torch.float64)
    dense = mask
    if causal and mask is not None:
        tril = torch.ones(5, 9, dtype=torch.bool).tril()
        dense = mask & tril if kind == "bool" else mask.masked_fill(~tril, -torch.inf)
    want = sdpa(q, k, v, attn_mask=dense, is_causal=causal and mask is None, scale=0.3, enable_gqa=True)

    got = attention_fp64(q, k, v, mask=mask, causal=causal, scale=0.3)
    assert torch.allclose(got, want, atol=1e-12)


def test_rows_that_see_nothing_are_zero_with_finite_gradients():
    q, k, v = qkv(dtype=torch.float64, grad=True)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    out = attention_fp64(q, k, v, mask=mask)
    out.sum().backward()

    assert bool((out[:, :, 2] == 0).all())
    assert bool((q.grad[:, :, 2] == 0).all())
    assert all(bool(each.grad.isfinite().all()) for each in (q, k, v))


def test_a_case_describes_what_it_is_called():
    case = selftest.Case(torch.float16, 1, 77, 64, 64, gqa=True, structure=("left", True, None))

    assert str(case) == "float16, lengths 1x77, head dim 64, gqa, structure keys=left causal=True window=None"
    assert str(attrs.evolve(case, ahead=3)).endswith("structure keys=left causal=True window=None ahead=3")
    assert str(attrs.evolve(case, structure=None, mask="bool")) == (
        "float16, lengths 1x77, head dim 64, gqa, bool mask"
    )
    scaled = attrs.evolve(case, structure=None, gqa=False, v_head_dim=32, scale=0.5)
    assert str(scaled) == "float16, lengths 1x77, head dim 64 (v 32), scale 0.5"
    assert describe(*qkv())[0].structure is None


@pytest.mark.parametrize("wrong", [False, True])
def test_a_backend_that_takes_whole_tiles_only_is_tested_at_those(wrong):
    guards = [fb.Guard("k_length", lambda _call, sizes: sizes.k_length % 256 == 0, "a multiple of 256")]

    def kernel(q, k, v, **given):
        return right(q, k, v, **given) * (2 if wrong else 1)

    with registered(entry("a", kernel, guards=guards), probed=False) as registry:
        found = verdict(registry, registry.resolve("a"), CPU)

    assert found.ok is not wrong
    assert ("lengths 256x256" in found.reason) is wrong
