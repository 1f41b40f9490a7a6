from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import sys
import weakref
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from fakes import Fake, entry, qkv, raising, registered, right, same_bits, sdpa
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

import fuseboard as fb
from fuseboard.dispatch import TRIAL_BYTES
from fuseboard.errors import InputChangedError, InputError
from fuseboard.masks import mask_for
from fuseboard.selftest import attention_fp64

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def masks(dtype):
    """Every form of mask, by name."""
    generator = torch.Generator().manual_seed(3)
    boolean = torch.rand(2, 1, 4, 6, generator=generator) < 0.6
    boolean[0, :, 1] = False
    return {
        "none": None,
        "bool": boolean,
        "additive": torch.randn(1, 4, 4, 6, generator=generator).to(dtype),
        "float32": torch.randn(4, 6, generator=generator),
        "per head": torch.randn(4, 1, 6, generator=generator).to(dtype),
        "learned": torch.randn(1, 1, 4, 6, generator=generator).to(dtype).requires_grad_(),
    }


def outcome(call, *leaves):
    """What a call gives forward and backward, or its error."""
    for leaf in leaves:
        leaf.grad = None
    try:
        out = call()
        out.float().square().sum().backward()
    except Exception as error:
        return type(error), str(error)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def assert_same(one, two):
    if isinstance(one, tuple) or isinstance(two, tuple):
        assert one == two
        return
    for left, other in zip(one, two, strict=True):
        assert (left is None) == (other is None)
        assert left is None or same_bits(left, other)


def by_hand(q, k, v, mask=None, causal=False, scale=None, enable_gqa=False):
    """An upstream's own attention: unlike torch's, so that a swap would show."""
    if enable_gqa:
        k, v = k.repeat_interleave(q.shape[1] // k.shape[1], 1), v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    scores = (q * (scale or q.shape[-1] ** -0.5)) @ k.transpose(-1, -2)
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -1e4)
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e4) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1).to(v.dtype) @ v) * 1.0


# ---- auto


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", masks(torch.float32))
@pytest.mark.parametrize("how", ["nothing bound", "auto bound", "not swappable", "auto for this site"])
def test_auto_is_bit_for_bit_the_reference_forward_and_backward(make_site, dtype, mask, how):
    site = make_site(swappable=how != "not swappable")
    q, k, v = qkv(2, 4, 4, 6, kv_heads=2, dtype=dtype, grad=True)
    given = masks(dtype)[mask]
    leaves = [q, k, v] + ([given] if mask == "learned" else [])
    policy = {"auto bound": "auto", "not swappable": "fast", "auto for this site": {site.name: "auto", "*": "fast"}}
    with registered(entry("a", Fake(lambda q, k, v, **given: right(q, k, v, **given) + 1), dtypes=set(DTYPES))):
        for scale, causal in itertools.product((None, 0.3), (False, True)):
            plain = {"attn_mask": given, "scale": scale, "is_causal": causal, "enable_gqa": True}
            want = outcome(lambda plain=plain: sdpa(q, k, v, **plain), *leaves)

            def ours(scale=scale, causal=causal):
                return fb.attention(q, k, v, site=site, mask=given, scale=scale, causal=causal, enable_gqa=True)

            if how == "nothing bound":
                got = outcome(ours, *leaves)
            else:
                with fb.bind(policy[how]):
                    got = outcome(ours, *leaves)
            assert_same(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", masks(torch.float32))
def test_auto_is_bit_for_bit_a_reference_written_by_hand(make_site, dtype, mask):
    site = make_site(reference=by_hand)
    q, k, v = qkv(2, 4, 4, 6, kv_heads=2, dtype=dtype, grad=True)
    given = masks(dtype)[mask]
    leaves = [q, k, v] + ([given] if mask == "learned" else [])
    arguments = {"scale": 0.3, "causal": True, "enable_gqa": True}
    want = outcome(lambda: by_hand(q, k, v, mask=given, **arguments), *leaves)

    assert_same(outcome(lambda: fb.attention(q, k, v, site=site, mask=given, **arguments), *leaves), want)
    with registered(("a", Fake())), fb.bind("auto"):
        assert_same(outcome(lambda: fb.attention(q, k, v, site=site, mask=given, **arguments), *leaves), want)


def test_dropout_under_auto_draws_what_the_reference_draws(site):
    q, k, v = qkv()
    torch.manual_seed(5)
    want = sdpa(q, k, v, dropout_p=0.5)
    torch.manual_seed(5)

    assert same_bits(fb.attention(q, k, v, site=site, dropout_p=0.5), want)


def test_the_reference_left_at_the_end_of_a_chain_is_the_same_bits(make_site):
    site = make_site(reference=by_hand)
    q, k, v = qkv(grad=True)
    want = outcome(lambda: by_hand(q, k, v), q, k, v)
    with registered(entry("a", backward=False)), fb.bind("fast"):
        for _ in range(2):
            assert_same(outcome(lambda: fb.attention(q, k, v, site=site), q, k, v), want)


# ---- a bound policy


@pytest.mark.parametrize("mask", masks(torch.float32))
def test_a_backend_gives_the_references_numbers_and_gradients(site, mask):
    kernel = Fake()
    q, k, v = qkv(2, 4, 4, 6, kv_heads=2, grad=True)
    given = masks(torch.float32)[mask]
    leaves = [q, k, v] + ([given] if mask == "learned" else [])
    want = outcome(lambda: sdpa(q, k, v, attn_mask=given, scale=0.3, enable_gqa=True), *leaves)
    with registered(("a", kernel)), fb.bind("a"):
        for _ in range(2):
            got = outcome(lambda: fb.attention(q, k, v, site=site, mask=given, scale=0.3, enable_gqa=True), *leaves)
            for left, other in zip(got, want, strict=True):
                assert torch.allclose(left, other, atol=1e-6)
    assert kernel.calls == 2


def test_a_change_of_anything_that_matters_is_a_new_decision(site):
    """Two calls that differ in one respect never share a route that fits only one of them."""
    kernel = Fake()
    claims = {"backward": False, "masks": (), "mask_grad": False, "causal": (), "dropout": False, "custom_scale": False}
    q, k, v = qkv()
    mask = torch.zeros(4, 4)
    with registered(entry("a", kernel, any_stride=False, gqa=False, **claims)), fb.bind("fast"):
        fb.attention(q, k, v, site=site)
        assert kernel.calls == 1
        fb.attention(q.double(), k.double(), v.double(), site=site)
        fb.attention(q.mT.contiguous().mT, k, v, site=site)
        fb.attention(q.requires_grad_(), k, v, site=site)
        q.requires_grad_(False)
        fb.attention(q, k, v, site=site, mask=mask)
        fb.attention(q, k, v, site=site, causal=True)
        fb.attention(q, k, v, site=site, scale=0.5)
        fb.attention(q, k, v, site=site, dropout_p=0.5)
        fb.attention(q, k[:, :1], v[:, :1], site=site, enable_gqa=True)
        fb.attention(q, k, v, site=site, mask_info=fb.MaskInfo(causal=True))
        assert kernel.calls == 1
        fb.attention(q, k, v, site=site)
        assert kernel.calls == 2
        with torch.no_grad():
            fb.attention(q.requires_grad_(), k, v, site=site)
        assert kernel.calls == 3


@pytest.mark.parametrize("policy", ["exact", "a"])
def test_a_mask_that_only_torchs_own_attention_can_read_goes_to_it(site, policy):
    """Torch's `causal_lower_right` is a tensor whose numbers mean nothing."""
    kernel = Fake()
    q, k, v = qkv(1, 2, 2, 5)
    bias = causal_lower_right(2, 5)
    with registered(("a", kernel)), fb.bind(policy):
        fb.attention(q, k, v, site=site, mask=torch.zeros(2, 5))  # remembered, and not to be mistaken for it
        assert kernel.calls == 1
        try:
            out = fb.attention(q, k, v, site=site, mask=bias)
        except InputError as error:  # torch 2.6: it tells nobody its shape
            assert str(error).startswith("mask is a CausalBias, which tells nothing of itself")
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    assert kernel.calls == 1
    assert torch.allclose(out, attention_fp64(q, k, v, mask_info=fb.MaskInfo(causal=True)).float(), atol=1e-5)


def test_a_wrong_argument_breaks_no_backend(site):
    kernel = Fake()
    q, k, v = qkv()
    wrong = (
        {"scale": Fraction(1, 2)},
        {"causal": 1},
        {"dropout_p": Fraction(1, 2)},
        {"mask": torch.eye(4).to_sparse()},
    )
    with registered(("a", kernel)), fb.bind("a"):
        for given in wrong:
            with pytest.raises(InputError):
                fb.attention(q, k, v, site=site, **given)
        for given in ({"scale": 0.5}, {"causal": True}, {"dropout_p": 0.5}, {"mask": torch.eye(4)}):
            fb.attention(q, k, v, site=site, **given)
        with pytest.raises(InputError):  # equal to a call that is remembered
            fb.attention(q, k, v, site=site, scale=Fraction(1, 2))
    assert kernel.calls == 4


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
def test_a_tensor_of_inference_mode_where_a_gradient_is_needed_breaks_no_backend(site, first):
    kernel = Fake(lambda q, k, v, **_given: ((q @ k.mT) * 8**-0.5).softmax(-1) @ v)  # saves q
    q, k, v = qkv()
    k.requires_grad_()
    with torch.inference_mode():
        unsavable = q.clone()
    with registered(("a", kernel)) as registry, fb.bind("a"):
        for given in (unsavable, q) if first else (q, unsavable, q):
            with contextlib.suppress(RuntimeError):  # the reference may say the same
                fb.attention(given, k, v, site=site)
        assert not registry.broken
        run = fb.Run()
        with fb.bind("a", run=run):
            fb.attention(q, k, v, site=site).sum().backward()
    assert run.report()["attention"]["used"] == {"a": 1}


# ---- errors that pass up


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("MPS backend out of memory"),
        RuntimeError("CUDA error: device-side assert triggered"),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        GeneratorExit(),
        SystemExit(),
    ],
    ids=repr,
)
def test_what_says_nothing_of_the_kernel_passes_up_untouched(site, error, first):
    kernel, spare = Fake(), Fake()
    with registered(entry("a", kernel, rank=0.1), entry("spare", spare, rank=0.2)) as made, fb.bind("fast"):
        if not first:
            fb.attention(*qkv(), site=site)
        kernel.then = raising(error)
        with pytest.raises(type(error)) as caught:
            fb.attention(*qkv(), site=site)
        assert caught.value is error
        assert made.broken == {}
        assert spare.calls == 0
        kernel.then = None
        fb.attention(*qkv(), site=site)
        assert spare.calls == 0


def test_out_of_memory_passes_up_through_a_wrapped_error(site):
    def wraps(*_arguments, **_given):
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except torch.OutOfMemoryError as error:
            raise RuntimeError("kernel launch failed") from error

    with registered(("a", Fake(wraps))) as made, fb.bind("fast"):
        with pytest.raises(RuntimeError, match="kernel launch failed"):
            fb.attention(*qkv(), site=site)
        assert made.broken == {}


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
def test_a_caller_that_handles_an_out_of_memory_does_not_hide_a_broken_kernel(site, first):
    kernel = Fake()
    q, k, v = qkv()
    with registered(("a", kernel)) as made, fb.bind("fast"):
        if not first:
            fb.attention(q, k, v, site=site)
        kernel.then = raising(ValueError("head_dim"))
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except torch.OutOfMemoryError:
            out = fb.attention(q, k, v, site=site)
        assert same_bits(out, sdpa(q, k, v))
        assert len(made.broken) == 1


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
@pytest.mark.parametrize("kind", [MemoryError, ValueError, fb.DeclinedError])
def test_no_error_keeps_the_inputs_alive(site, first, kind):
    """An engine that runs out of memory frees its tensors and tries a smaller batch: they must really be gone."""

    def fails(*_arguments, **_given):
        raise kind

    kernel = Fake()
    with registered(("a", kernel)), fb.bind("fast"):
        q, k, v = qkv()
        if not first:
            fb.attention(q, k, v, site=site)
        kernel.then = fails
        gc.collect()
        gc.disable()
        try:
            with contextlib.suppress(MemoryError):
                fb.attention(q, k, v, site=site)
            alive = weakref.ref(q)
            del q, k, v
            assert alive() is None
        finally:
            gc.enable()


# ---- inputs that a kernel changed


HALF_WAY = ValueError("half way")


def corrupts(write, error=HALF_WAY):
    def kernel(q, k, v, *, mask, **given):
        write(q, k, v, mask)
        raise error

    return kernel


def test_inputs_that_a_first_call_corrupted_are_restored_for_the_next_backend(site):
    def write(q, k, v, mask):
        q.zero_()
        k.data.fill_(7)  # as a raw kernel writes: torch does not see it
        v[0, 0, 0, 0] = torch.nan
        mask.fill_(-1)

    q, k, v = qkv()
    mask = torch.randn(4, 4)
    before = [each.clone() for each in (q, k, v, mask)]
    want = sdpa(q, k, v, attn_mask=mask)
    with registered(entry("bad", Fake(corrupts(write)), rank=0.1), entry("good", rank=0.2)), fb.bind("fast"):
        out = fb.attention(q, k, v, site=site, mask=mask)

    assert same_bits(out, want)
    assert all(same_bits(each, was) for each, was in zip((q, k, v, mask), before, strict=True))


def wrote(into):
    """What is right, after it has written into an input."""

    def then(q, k, v, *, mask, **_rest):
        {"q": q, "k": k, "v": v, "mask": mask}[into].mul_(2)
        return sdpa(q, k, v, attn_mask=mask)

    return then


@pytest.mark.parametrize("name", ["q", "k", "v", "mask"])
def test_an_input_that_a_kernel_changed_and_answered_is_given_back_and_the_answer_is_not_used(site, name):
    kernel, run = Fake(wrote(name)), fb.Run()
    given = dict(zip(("q", "k", "v"), qkv(), strict=True)) | {"mask": torch.randn(4, 4)}
    before = {key: each.clone() for key, each in given.items()}
    with registered(("bad", kernel)), fb.bind("fast", run=run):
        out = fb.attention(**given, site=site)

    assert all(torch.equal(given[key], each) for key, each in before.items())
    assert same_bits(out, sdpa(given["q"], given["k"], given["v"], attn_mask=given["mask"]))
    assert run.report()["attention"]["used"] == {"reference": 1}
    assert f"it wrote into {name}, and no input may be written" in str(run.report()["attention"])


def test_larger_inputs_that_a_proven_kernel_changes_are_an_error_and_not_a_wrong_number(site):
    kernel = Fake()
    with registered(("bad", kernel)), fb.bind("fast"):
        fb.attention(*qkv(), site=site)
        kernel.then = wrote("k")
        q, k, v = qkv(q_length=9, k_length=9)
        with pytest.raises(InputChangedError, match=r"it wrote into k, .* after it had written into k"):
            fb.attention(q, k, v, site=site)
        kernel.then = None
        fb.attention(q, k, v, site=site)
    assert kernel.calls == 2


def test_inputs_that_hold_nan_count_as_unchanged(site):
    q, k, v = qkv()
    q[0, 0, 0, 0] = torch.nan
    version = q._version
    with registered(("bad", Fake(raising(ValueError())))), fb.bind("fast"):
        fb.attention(q, k, v, site=site)

    assert q._version == version


@pytest.mark.parametrize("name", ["q", "k", "v", "mask"])
def test_a_later_call_that_corrupts_an_input_is_an_error_and_not_a_wrong_number(site, name):
    kernel = Fake()
    given = dict(zip(("q", "k", "v"), qkv(), strict=True)) | {"mask": torch.randn(4, 4)}
    with registered(("bad", kernel)), fb.bind("fast"):
        fb.attention(**given, site=site)
        kernel.then = corrupts(lambda q, k, v, mask: {"q": q, "k": k, "v": v, "mask": mask}[name].zero_())
        with pytest.raises(InputChangedError) as caught:
            fb.attention(**given, site=site)
        assert kernel.calls == 2
        fb.attention(**given, site=site)
        assert kernel.calls == 2

    assert str(caught.value) == (
        f"bad raised at site {site.name!r} (ValueError: half way) after it had written into {name}, so that no other "
        "backend can answer this call. It is not used for such calls again: repeat from the inputs."
    )
    assert (caught.value.backend, caught.value.arguments) == ("bad", (name,))
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_structure_that_is_none_is_refused_with_nothing_bound_too(site):
    for binding in (contextlib.nullcontext(), fb.bind("auto"), fb.bind("fast")):
        with binding, pytest.raises(InputError, match=r"mask_info is a dict; expected fuseboard\.MaskInfo"):
            fb.attention(*qkv(), site=site, mask_info={"causal": True})


def test_an_input_whose_history_a_kernel_changed_is_not_restored_by_its_values_alone(site):
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    q = x * 1.0
    with registered(("bad", Fake(corrupts(lambda q, k, v, mask: q.mul_(0))))), fb.bind("fast"):
        with pytest.raises(InputChangedError, match="after it had written into q"):
            fb.attention(q, *qkv()[1:], site=site)


def test_an_input_that_cannot_be_restored_is_an_error(site):
    q, k, v = qkv()
    k = k[:, :1].expand(1, 2, 4, 8)  # heads share memory: no copy can go back
    with registered(("bad", Fake(corrupts(lambda q, k, v, mask: k[:, :1].zero_())))), fb.bind("fast"):
        with pytest.raises(InputChangedError, match="after it had written into k"):
            fb.attention(q, k, v, site=site)


def test_inputs_too_large_for_a_copy_are_watched_by_their_versions(site, monkeypatch):
    assert TRIAL_BYTES == 64 * 1024 * 1024
    monkeypatch.setattr("fuseboard.dispatch.TRIAL_BYTES", 100)
    q, k, v = qkv()
    with registered(("bad", Fake(corrupts(lambda q, k, v, mask: q.zero_())))), fb.bind("fast"):
        with pytest.raises(InputChangedError, match="after it had written into q"):
            fb.attention(q, k, v, site=site)


def test_a_kernel_that_writes_and_then_declines_where_nothing_can_be_restored_is_broken(site, monkeypatch):
    monkeypatch.setattr("fuseboard.dispatch.TRIAL_BYTES", 100)
    kernel = Fake(corrupts(lambda q, k, v, mask: q.zero_(), fb.DeclinedError("oh")))
    with registered(("bad", kernel)) as made, fb.bind("fast"):
        with pytest.raises(InputChangedError):
            fb.attention(*qkv(), site=site)
        assert len(made.broken) == 1


def test_inference_tensors_are_taken(site):
    kernel = Fake()
    with registered(("a", kernel)), fb.bind("a"), torch.inference_mode():
        q, k, v = qkv()
        for _ in range(3):
            assert same_bits(fb.attention(q, k, v, site=site), sdpa(q, k, v))
        kernel.then = raising(ValueError())
        assert same_bits(fb.attention(q, k, v, site=site), sdpa(q, k, v))


# ---- autocast, transforms, forward-mode AD, compilation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_a_backend_gets_what_torchs_own_attention_would_get(site, dtype):
    kernel = Fake()
    q, k, v = qkv()
    mask = torch.randn(4, 4)
    with torch.autocast("cpu", dtype):
        want = sdpa(q, k, v.to(dtype), attn_mask=mask)
    with registered(entry("a", kernel, dtypes={dtype})), fb.bind("a"), torch.autocast("cpu", dtype):
        for _ in range(2):
            out = fb.attention(q, k, v.to(dtype), site=site, mask=mask)
            assert same_bits(out, want)
        assert kernel.given["mask"].dtype == dtype
        assert torch.is_autocast_enabled("cpu")
    assert kernel.calls == 2


def test_under_autocast_the_reference_gets_the_engines_own_tensors_and_modes(make_site):
    seen = []

    def reference(q, k, v):
        seen.append((q.dtype, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return q @ k.mT @ v

    site, (q, k, v) = make_site(reference=reference), qkv()
    with torch.autocast("cpu", torch.bfloat16):
        want = reference(q, k, v)
        with registered(entry("a", dtypes={torch.float64})), fb.bind("fast"):
            for _ in range(2):
                assert same_bits(fb.attention(q, k, v, site=site), want)
    assert seen == [(torch.float32, True, torch.bfloat16)] * 3


def test_float64_is_left_alone_by_autocast(site):
    q, k, v = qkv(dtype=torch.float64)
    with registered(entry("a", dtypes={torch.float64})), fb.bind("a"), torch.autocast("cpu", torch.bfloat16):
        assert fb.attention(q, k, v, site=site).dtype == torch.float64


def test_autocast_for_another_device_changes_nothing(site):
    q = torch.empty(1, 2, 4, 8, device="meta")
    with registered(("a", Fake())), fb.bind("fast"), torch.autocast("cpu", torch.bfloat16):
        assert fb.attention(q, q, q, site=site).dtype == torch.float32


def test_gradients_flow_through_autocasts_casts(site):
    q, k, v = qkv(grad=True)
    with registered(entry("a", dtypes={torch.bfloat16})), fb.bind("a"), torch.autocast("cpu", torch.bfloat16):
        fb.attention(q, k, v, site=site).sum().backward()

    assert q.grad.dtype == torch.float32


TRANSFORMS = {
    "vmap": lambda f, q: torch.func.vmap(f)(q[None].repeat(3, 1, 1, 1, 1)),
    "grad": lambda f, q: torch.func.grad(lambda x: f(x).sum())(q),
    "vmap of grad": lambda f, q: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(q[None].repeat(2, 1, 1, 1, 1)),
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (q,))[1],
    "forward-mode AD": lambda f, q: forward_mode(f, q),  # noqa: PLW0108 - defined below
}


def forward_mode(f, q):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        return torch.autograd.forward_ad.unpack_dual(f(dual)).tangent


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_get_the_references_result_and_break_no_backend(make_site, name):
    kernel = Fake()
    site = make_site(reference=by_hand)
    q = qkv()[0]
    want = TRANSFORMS[name](lambda x: by_hand(x, x, x), q)
    with registered(("a", kernel)) as made, fb.bind("fast"):
        fb.attention(q, q, q, site=site)  # a remembered route must not be taken inside a transform
        calls = kernel.calls
        for _ in range(2):
            assert same_bits(TRANSFORMS[name](lambda x: fb.attention(x, x, x, site=site), q), want)
        assert kernel.calls == calls
        assert made.broken == {}
        fb.attention(q, q, q, site=site)
        assert kernel.calls == calls + 1


def test_gradient_checkpointing_works_and_breaks_no_backend(site):
    kernel = Fake()
    q, k, v = qkv(grad=True)
    want = outcome(lambda: sdpa(q, k, v), q, k, v)
    with registered(("a", kernel)) as made, fb.bind("a"):
        for reentrant in (False, True):
            got = outcome(
                lambda reentrant=reentrant: checkpoint(
                    lambda *x: fb.attention(*x, site=site), q, k, v, use_reentrant=reentrant
                ),
                *(q, k, v),
            )
            assert_same(got, want)
        assert made.broken == {}
    assert kernel.calls == 4


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch.compile of older releases does not know this Python")
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_function_follows_a_change_of_policy(site):
    kernel = Fake(lambda q, k, v, **given: right(q, k, v, **given) + 1)
    q, k, v = qkv()
    plain, shifted = sdpa(q, k, v) * 2, (sdpa(q, k, v) + 1) * 2

    @torch.compile(backend="eager")
    def step(q, k, v):
        return fb.attention(q, k, v, site=site) * 2

    run = fb.Run()
    with registered(("a", kernel)):
        assert torch.allclose(step(q, k, v), plain)
        with fb.bind("a", run=run):
            assert torch.allclose(step(q, k, v), shifted)
            assert torch.allclose(step(q, k, v), shifted)
        assert torch.allclose(step(q, k, v), plain)
        with fb.bind("auto", run=run):
            assert torch.allclose(step(q, k, v), plain)
        with fb.bind({"*": "a"}, run=run):
            assert torch.allclose(step(q, k, v), shifted)

    assert run.report()["attention"]["used"] == {"a": 3, "reference": 1}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own look
@pytest.mark.usefixtures("fresh_compiler")
def test_a_function_compiled_under_a_policy_is_right_without_it(site):
    kernel = Fake()
    q, k, v = qkv(grad=True)

    @torch.compile(backend="eager")
    def step(q, k, v):
        return fb.attention(q, k, v, site=site, causal=True)

    want = outcome(lambda: sdpa(q, k, v, is_causal=True), q, k, v)
    with registered(("a", kernel)):
        with fb.bind("a"):
            assert_same(outcome(lambda: step(q, k, v), q, k, v), want)
        calls = kernel.calls
        assert calls > 0
        assert_same(outcome(lambda: step(q, k, v), q, k, v), want)
        assert kernel.calls == calls


# ---- the two test settings, in a process of their own

SETUP = """
import torch, fuseboard as fb
site, other = fb.Site("engine.used"), fb.Site("engine.bypassed")
q = torch.zeros(1, 1, 2, 4)
"""


def test_debug_masks_checks_every_call_that_has_a_structure(python):
    out = python(
        SETUP
        + """
good, info = fb.mask_for(2, 2, causal=True)
fb.attention(q, q, q, site=site, mask=good, mask_info=info)
fb.attention(q, q, q, site=site, mask=~good)
for policy in ("auto", "fast"):
    with fb.bind(policy):
        try: fb.attention(q, q, q, site=site, mask=~good, mask_info=info)
        except fb.MaskMismatchError as error: print(str(error)[:60])
try: fb.site_calls()
except RuntimeError as error: print(error)
""",
        FUSEBOARD_DEBUG="masks",
    )

    assert out.splitlines() == [
        *["mask_info (bottom-right causal) does not describe its dense "] * 2,
        "site_calls() needs FUSEBOARD_TEST=count in the environment before the first attention call or policy.",
    ]


def test_test_count_proves_which_sites_went_through_the_dispatcher(python):
    out = python(
        SETUP
        + """
import threading
def work():
    for _ in range(100): fb.attention(q, q, q, site=site)
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
with fb.bind("fast"): fb.attention(q, q, q, site=site)
print(fb.site_calls())
""",
        FUSEBOARD_TEST="count",
    )

    assert out == "{'engine.bypassed': 0, 'engine.used': 801}\n"


def test_a_mask_that_does_not_fit_its_structure_is_not_looked_at_by_default(site):
    dense, info = mask_for(4, 4, causal=True)

    assert same_bits(
        fb.attention(*qkv(), site=site, mask=~dense, mask_info=info), F.scaled_dot_product_attention(*qkv(), ~dense)
    )


@pytest.mark.parametrize("policy", [None, "auto", "exact"])
@pytest.mark.parametrize("given", ["engine.part", None, F.scaled_dot_product_attention])
def test_what_is_no_site_is_said_before_anything_is_computed(given, policy):
    bound = fb.bind(policy) if policy else contextlib.nullcontext()
    with bound, pytest.raises(fb.InputError, match=r"^site is .*; expected .* SITE = fuseboard\.Site") as error:
        fb.attention(None, None, None, site=given)
    assert error.value.argument == "site"
    assert repr(given) in str(error.value)
