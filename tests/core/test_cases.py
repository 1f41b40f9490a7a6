"""Failures that users of such systems met, each kind once: numbered as in the project's list of cases."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import threading

import pytest
import torch
from fakes import EVERY_STRUCTURE, Fake, entry, entry_of, hooks_of, in_threads, qkv, raising, registered, right, sdpa

import fuseboard as fb
from fuseboard.registry import Registry
from fuseboard.selftest import attention_fp64
from fuseboard.settings import Settings

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


@pytest.fixture(params=["installed", "fake"], autouse=True)
def fast(request):
    """`fast` with the plugins that are installed here, and with one that answers everything by torch's own function."""
    if request.param == "installed":
        with fb.bind(fb.policy_for("fast", registry=INSTALLED)):
            yield
    else:
        everywhere = set(TOLERANCE)
        fake = entry("fake", dtypes=everywhere, structures=[EVERY_STRUCTURE])
        with registered(fake), fb.bind("fast"):
            yield


INSTALLED = Registry(config=Settings())


def close(got, want, dtype=torch.float32):
    return torch.allclose(got.double(), want, atol=TOLERANCE[dtype], rtol=0)


def grads(out, *leaves):
    return torch.autograd.grad(out.sum(), leaves)


# ---- O-01


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("bound", [False, True])
def test_o01_a_row_with_every_key_masked_is_zero_and_poisons_no_gradient(site, additive, bound):
    q, k, v = qkv(1, 2, 6, 10, grad=True)
    seen = torch.ones(1, 1, 6, 10, dtype=torch.bool).tril()
    seen[..., 5, :] = False
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf) if additive else seen
    if bound:
        out = fb.attention(q, k, v, site=site, mask=mask)
    else:
        with fb.bind("auto"):
            out = fb.attention(q, k, v, site=site, mask=mask)
    gradients = grads(out, q, k, v)

    assert bool((out[:, :, 5] == 0).all())
    assert close(out, attention_fp64(q, k, v, mask=seen))
    assert all(bool(each.isfinite().all()) for each in gradients)
    assert bool((gradients[0][:, :, 5] == 0).all())


def test_o01_a_row_masked_only_by_two_parts_together_is_zero_too(site):
    q, k, v = qkv(1, 2, 4, 6, grad=True)
    keys = torch.tensor([[False, False, False, True, True, True]])  # the real keys are the last three
    masked = fb.mask_for(4, 6, keys=keys, causal=True)  # and row 0 may look at the first three only
    assert masked.dense[0, 0].any(-1).tolist() == [False, True, True, True]
    for arguments in (masked.arguments(), {"mask": masked.dense}, {"mask_info": masked.info}):
        out = fb.attention(q, k, v, site=site, **arguments)
        assert bool((out[:, :, 0] == 0).all())
        assert close(out, attention_fp64(q, k, v, mask=masked.dense))
        assert all(bool(each.isfinite().all()) for each in grads(out, q, k, v))


# ---- O-02


def test_o02_a_mask_of_rank_three_means_per_head(site):
    q, k, v = qkv(2, 2, 3)
    mask = torch.zeros(2, 3, 3)
    mask[1, :, 0] = -torch.inf

    out = fb.attention(q, k, v, site=site, mask=mask)
    assert close(out, attention_fp64(q, k, v, mask=mask[None]))
    assert not close(out, attention_fp64(q, k, v, mask=mask[:, None]))
    with pytest.raises(fb.InputError, match="third to last dimension 3, expected 1 or 2"):
        fb.attention(*qkv(3, 2, 4), site=site, mask=torch.zeros(3, 4, 4))


# ---- O-03


@pytest.mark.parametrize(("n_q", "n_k"), [(2, 5), (1, 5), (4, 4), (5, 2)])
def test_o03_the_flag_is_top_left_and_the_structure_bottom_right(site, n_q, n_k):
    q, k, v = qkv(1, 1, n_q, n_k)
    top_left = torch.ones(n_q, n_k, dtype=torch.bool).tril()
    bottom_right = torch.ones(n_q, n_k, dtype=torch.bool).tril(n_k - n_q)

    assert close(fb.attention(q, k, v, site=site, causal=True), attention_fp64(q, k, v, mask=top_left))
    for arguments in ({"mask_info": fb.MaskInfo(causal=True)}, fb.mask_for(n_q, n_k, causal=True).arguments()):
        assert close(fb.attention(q, k, v, site=site, **arguments), attention_fp64(q, k, v, mask=bottom_right))


def test_o03_a_flag_is_never_handed_to_a_kernel_that_is_right_at_equal_lengths_only(site):
    kernel = Fake()
    with registered(entry("bottom", kernel, causal={"equal"})), fb.bind("bottom"):
        fb.attention(*qkv(k_length=6), site=site, causal=True)
        assert kernel.calls == 0
        fb.attention(*qkv(), site=site, causal=True)
        assert kernel.calls == 1


# ---- O-04


def test_o04_left_padding_is_not_taken_for_right_padding(site):
    q, k, v = qkv(2, 1, 5)
    keys = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    out = fb.attention(q, k, v, site=site, **fb.mask_for(5, 5, keys=keys, causal=True, padding="left").arguments())

    alone = attention_fp64(q[:1, :, 2:], k[:1, :, 2:], v[:1, :, 2:], causal=True)
    assert close(out[:1, :, 2:], alone)
    assert bool((out[0, :, :2] == 0).all())
    assert close(out[1:], attention_fp64(q[1:], k[1:], v[1:], causal=True))


def test_o04_a_gap_in_the_keys_is_a_gap(site):
    q, k, v = qkv(2, 1, 5)
    keys = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    real = [0, 2, 3]
    for arguments in (fb.mask_for(5, 5, keys=keys).arguments(), {"mask_info": fb.MaskInfo(keys)}):
        out = fb.attention(q, k, v, site=site, **arguments)
        assert close(out[:1], attention_fp64(q[:1], k[:1, :, real], v[:1, :, real]))


# ---- O-05


def test_o05_mixed_dtypes_under_autocast_are_cast_as_torch_casts_them(site):
    q, k, v = qkv(1, 2, 4)
    v = v.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out = fb.attention(q, k, v, site=site)

    want = fb.attention(q.bfloat16(), k.bfloat16(), v, site=site)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, want)


def test_o05_mixed_dtypes_elsewhere_are_one_clear_error_and_no_broken_backend(site):
    q, k, v = qkv(1, 2, 4)
    kernel = Fake()
    with registered(("a", kernel)) as made, fb.bind("fast"):
        with pytest.raises(fb.InputError, match=r"v has dtype torch\.bfloat16 and q torch\.float32; cast them to one"):
            fb.attention(q, k, v.bfloat16(), site=site)
        assert (kernel.calls, made.broken) == (0, {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_o05_a_float32_mask_beside_half_precision_has_its_own_values(site, dtype):
    q, k, v = qkv(1, 2, 4, dtype=dtype)
    mask = torch.tensor([0.0, -1.5, -torch.inf, 0.0]).expand(4, 4).clone()

    out = fb.attention(q, k, v, site=site, mask=mask)
    assert out.dtype == dtype
    assert close(out, attention_fp64(q, k, v, mask=mask), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.int64])
def test_o05_a_mask_of_another_dtype_is_refused_by_name(site, dtype):
    with pytest.raises(fb.InputError, match=f"mask has dtype {dtype} and q torch.float32"):
        fb.attention(*qkv(1, 2, 4), site=site, mask=torch.zeros(4, 4, dtype=dtype))


# ---- O-06


def test_o06_a_head_dim_that_is_declared_away_is_never_tried(site):
    stub, run = Fake(), fb.Run()
    claims = {"head_dims": fb.HeadDims(only={64, 96, 128}), "v_head_dims": fb.HeadDims()}
    q, k, v = qkv(1, 2, 5, dim=80)
    with registered(entry("stub", stub, rank=0.1, **claims), entry("next", rank=0.2)), fb.bind("fast", run=run):
        for _ in range(100):
            fb.attention(q, k, v, site=site)

    assert stub.calls == 0
    assert run.report()["attention"] == {
        "policy": "fast",
        "used": {"next": 100},
        "fallbacks": {"stub→next": {"head dim 80": 100}},
    }


def test_o06_a_head_dim_that_is_not_declared_raises_once_for_that_kind_only(site, caplog):
    def stub(q, k, v, **given):
        if q.shape[-1] == 80:
            raise RuntimeError("head_dim 80")
        return right(q, k, v, **given)

    kernel = Fake(stub)
    with registered(("stub", kernel)), fb.bind("fast"):
        for _ in range(100):
            fb.attention(*qkv(1, 2, 5, dim=80), site=site)
        assert kernel.calls == 1
        fb.attention(*qkv(1, 2, 5, dim=64), site=site)
        assert kernel.calls == 2

    assert len([each for each in caplog.records if "stub broke" in each.getMessage()]) == 1


@pytest.mark.parametrize("dim", [1, 3, 5, 7, 72, 129])
def test_o06_a_padded_head_dim_keeps_the_true_scale_and_gradients(site, dim):
    def pads(q, k, v, *, scale, **given):
        pad = (0, -q.shape[-1] % 8)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out = right(*(torch.nn.functional.pad(each, pad) for each in (q, k, v)), scale=scale, **given)
        return out[..., : v.shape[-1]]

    q, k, v = qkv(1, 2, 5, dim=dim, grad=True)
    want = attention_fp64(q, k, v)
    for kernel in (pads, None):
        if kernel is None:  # whatever is bound by the fixture
            out = fb.attention(q, k, v, site=site)
        else:
            with registered(("pads", Fake(kernel))), fb.bind("pads"):
                out = fb.attention(q, k, v, site=site)
        assert close(out, want)
        for mine, theirs in zip(grads(out, q, k, v), grads(attention_fp64(q, k, v), q, k, v), strict=True):
            assert mine.shape == theirs.shape
            assert torch.allclose(mine, theirs, atol=1e-4)


# ---- O-07


def test_o07_query_head_i_uses_key_head_i_over_the_group_size(site):
    q, k, v = qkv(1, 4, 3, kv_heads=2)
    out = fb.attention(q, k, v, site=site, enable_gqa=True)

    assert close(out, attention_fp64(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    assert not close(out, attention_fp64(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)))
    q, k, v = qkv(1, 6, 3, kv_heads=1)
    assert close(fb.attention(q, k, v, site=site, enable_gqa=True), attention_fp64(q, k.expand_as(q), v.expand_as(q)))


@pytest.mark.parametrize(("heads", "k_heads", "v_heads"), [(3, 2, 2), (4, 2, 1), (2, 4, 4)])
def test_o07_head_counts_that_do_not_divide_are_an_error_before_any_kernel(site, heads, k_heads, v_heads):
    q, k, v = (torch.randn(1, n, 3, 8) for n in (heads, k_heads, v_heads))

    with pytest.raises(ValueError, match="heads"):
        fb.attention(q, k, v, site=site, enable_gqa=True)


# ---- O-08


@pytest.mark.parametrize(("shape", "with_q"), [*itertools.product([(1, 1, 1, 4), (1, 2, 4, 4), (4, 4)], [False, True])])
def test_o08_a_learned_mask_gets_its_gradient_in_its_own_shape(site, shape, with_q):
    q, k, v = qkv(2, 2, 4)
    q.requires_grad_(with_q)
    bias = torch.randn(shape, requires_grad=True)
    leaves = [bias, q] if with_q else [bias]
    got = torch.autograd.grad(fb.attention(q, k, v, site=site, mask=bias).square().sum(), leaves)
    want = torch.autograd.grad(attention_fp64(q, k, v, mask=bias).square().sum(), leaves)

    assert got[0].shape == bias.shape
    for mine, theirs in zip(got, want, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_o08_a_backend_without_that_gradient_is_not_used(site):
    kernel = Fake()
    with registered(entry("a", kernel, mask_grad=False)), fb.bind("a"):
        fb.attention(*qkv(), site=site, mask=torch.zeros(4, 4, requires_grad=True))
        assert kernel.calls == 0
        with torch.no_grad():
            fb.attention(*qkv(), site=site, mask=torch.zeros(4, 4, requires_grad=True))
        assert kernel.calls == 1


# ---- O-09


def test_o09_scopes_that_overlap_in_threads_leave_settings_as_they_were(site):
    q, k, v = qkv(1, 2, 4)
    a_in, b_in, a_out, stop = (threading.Event() for _ in range(4))
    flags = [torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled]
    before = [flag() for flag in flags]
    kernel = Fake(lambda q, k, v, **given: right(q, k, v, **given) + 1)
    want = sdpa(q, k, v)

    def first(policies):
        with fb.bind(policies["auto"]):
            a_in.set()
            b_in.wait()
            seen = fb.attention(q, k, v, site=site)
        a_out.set()
        return seen

    def second(policies):
        a_in.wait()
        with fb.bind(policies["auto"]):
            b_in.set()
            a_out.wait()
            seen = fb.attention(q, k, v, site=site)
        stop.set()
        return seen

    def third(policies):
        with fb.bind(policies["a"]):
            seen = [fb.attention(q, k, v, site=site)]
            while not stop.is_set():
                seen.append(fb.attention(q, k, v, site=site))
        return seen

    with registered(("a", kernel)):
        policies = {name: fb.policy_for(name) for name in ("auto", "a")}
        works = [first, second, third]
        one, two, three = in_threads(3, lambda i: works[i](policies))

    assert torch.equal(one, want)
    assert torch.equal(two, want)
    assert all(torch.allclose(each, want + 1) for each in three)
    assert [flag() for flag in flags] == before


def test_o09_an_await_inside_a_scope_lets_nothing_out(site):
    q, k, v = qkv()
    kernel = Fake(lambda q, k, v, **given: right(q, k, v, **given) + 1)

    async def ask(policy, rounds):
        found = []
        for _ in range(rounds):
            with fb.bind(policy):
                await asyncio.sleep(0)
                found.append(fb.attention(q, k, v, site=site))
            await asyncio.sleep(0)
        return found

    async def main():
        return await asyncio.gather(ask("auto", 5), ask("a", 7))

    with registered(("a", kernel)):
        plain, shifted = asyncio.run(main())
    assert all(torch.equal(each, sdpa(q, k, v)) for each in plain)
    assert all(torch.allclose(each, sdpa(q, k, v) + 1) for each in shifted)


# ---- O-10

BROKEN_PACKAGES = {
    "ImportError": "raise ImportError('undefined symbol: _ZN2at')",
    "OSError": "raise OSError('libcuda.so.1: cannot open shared object file')",
    "AttributeError": "raise AttributeError('no such thing')",
    "RuntimeError": "raise RuntimeError('no device')",
    "no function": "__version__ = '1.0'",
}


@pytest.mark.parametrize("kind", BROKEN_PACKAGES)
def test_o10_an_installed_package_that_breaks_at_import_harms_nobody(site, tmp_path, monkeypatch, kind):
    (tmp_path / "broken_kernel.py").write_text(
        f"with open({str(tmp_path / 'log')!r}, 'a') as log: log.write('x')\n{BROKEN_PACKAGES[kind]}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def load():
        import broken_kernel

        return broken_kernel.attention

    run, (q, k, v) = fb.Run(), qkv(1, 1, 4, dim=64)
    try:
        with registered(entry_of("broken", **hooks_of(right) | {"kernel": load}), probed=False):
            with fb.bind("fast", run=run):
                for length in (2, 3, 4):
                    out = fb.attention(*qkv(1, 1, length, dim=64), site=site)
            assert torch.equal(out, sdpa(q, k, v))
            with fb.bind(fb.policy_for("broken", strict=True)), pytest.raises(fb.RefusedError, match="import failed: "):
                fb.attention(q, k, v, site=site)
    finally:
        sys.modules.pop("broken_kernel", None)

    assert (tmp_path / "log").read_text() == "x"
    ((pair, reasons),) = run.report()["attention"]["fallbacks"].items()
    expected = "AttributeError: module 'broken_kernel' has no attribute" if kind == "no function" else f"{kind}: "
    assert pair == "broken→reference"
    assert next(iter(reasons)).startswith(f"cannot run: import failed: {expected}")


def test_o10_a_keyboard_interrupt_in_an_import_is_not_swallowed(site):
    hooks = hooks_of(right) | {"kernel": raising(KeyboardInterrupt())}
    with registered(entry_of("broken", **hooks), probed=False), fb.bind("fast"):
        with pytest.raises(KeyboardInterrupt):
            fb.attention(*qkv(), site=site)
    gc.collect()
