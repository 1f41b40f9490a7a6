from __future__ import annotations

import logging

import pytest
import torch
from fakes import CPU, Fake, entry, entry_of, hooks_of, in_threads, qkv, raising, registered, right, same_bits, sdpa

import fuseboard as fb
from fuseboard.chain import MAX_ROUTES
from fuseboard.errors import RefusedError

EXPECTED = "expected torch.float32 (1, 2, 4, 8) on cpu"
BOOM = RuntimeError("no kernel for this\nand more")


@pytest.fixture(autouse=True)
def logged(caplog):
    caplog.set_level(logging.INFO, "fuseboard")
    return lambda: [(each.levelname, each.getMessage()) for each in caplog.records]


def report(run):
    found = run.report()["attention"]
    return found["used"], found["fallbacks"]


# ---- selection


def test_a_site_that_is_not_swappable_keeps_its_reference_under_every_policy(make_site):
    kernel, run = Fake(), fb.Run()
    site = make_site(swappable=False)
    with registered(("a", kernel)):
        for policy in ("fast", "exact", "a", fb.policy_for("a", strict=True), {"*": "a"}):
            with fb.bind(policy, run=run):
                fb.attention(*qkv(), site=site)

    assert kernel.calls == 0
    assert report(run) == ({"reference": 5}, {})


def test_a_site_that_refuses_approximate_backends_gets_exact_ones(make_site):
    run = fb.Run()
    with registered(entry("rough", rank=0.1, exact=False), entry("fine", rank=0.2)), fb.bind("fast", run=run):
        fb.attention(*qkv(), site=make_site(approx_ok=False))
        fb.attention(*qkv(), site=make_site())

    assert report(run) == (
        {"fine": 1, "rough": 1},
        {"rough→fine": {"site refuses approximate backends": 1}},
    )


def test_exactness_may_depend_on_the_call(make_site):
    hooks = hooks_of(Fake()) | {
        "exactness": lambda call: fb.Exactness.EXACT if call.one_query else fb.Exactness.APPROXIMATE
    }
    run = fb.Run()
    with registered(entry_of("a", **hooks)), fb.bind("exact", run=run):
        site = make_site()
        fb.attention(*qkv(q_length=1, k_length=5), site=site)
        fb.attention(*qkv(), site=site)

    assert report(run)[0] == {"a": 1, "reference": 1}


def test_a_backend_of_another_device_is_passed_over_without_a_word(site, logged):
    run = fb.Run()
    cuda = entry("gpu", rank=0.1, devices={"cuda"})
    with registered(cuda, entry("a", rank=0.5)), fb.bind("fast", run=run):
        fb.attention(*qkv(), site=site)

    assert report(run) == ({"a": 1}, {})
    assert logged() == []


def test_a_backend_that_was_asked_for_by_name_is_a_fallback_whatever_the_reason(site):
    run = fb.Run()
    with registered(entry("gpu", devices={"cuda"})), fb.bind("gpu", run=run):
        fb.attention(*qkv(), site=site)

    assert report(run) == ({"reference": 1}, {"gpu→reference": {"device cpu": 1}})


def test_what_answers_to_its_name_alone_is_neither_taken_nor_probed_by_other_policies(site):
    shy, probes = Fake(), []

    def probe(device):
        probes.append(device)

    hooks = hooks_of(shy, by_name={"cpu"}) | {"probe": probe, "rank": lambda: 0.0}
    with registered(entry_of("shy", **hooks), entry("bold"), probed=False):
        for policy in ("fast", "exact", "bold"):
            run = fb.Run()
            with fb.bind(policy, run=run):
                fb.attention(*qkv(), site=site)
            assert run.report()["attention"]["used"] == {"bold": 1}
            assert run.report()["attention"]["fallbacks"] == {}
        assert (shy.calls, probes) == (0, [])
        with fb.bind("shy"):
            fb.attention(*qkv(), site=site)
        assert probes == [CPU]
        told = fb.explain(site, *qkv(), policy="fast")

    assert shy.calls > 1  # its self-test, and the call
    (refusal,) = next(each for each in told.candidates if each.name == "shy").refusals
    assert str(refusal) == "policy is fast, allowed its name on cpu (nearest: policy 'shy')"


def test_a_guard_is_asked_for_each_combination_of_sizes_and_once(site):
    asked = []

    def check(call, sizes):
        asked.append(sizes.k_length)
        return sizes.k_length % 2 == 0

    even = fb.Guard("length", check, "even", lambda sizes: sizes.k_length)
    run = fb.Run()
    with registered(entry("a", guards=[even])), fb.bind("fast", run=run):
        for length in (2, 3, 4, 2, 3, 4):
            fb.attention(*qkv(q_length=1, k_length=length), site=site)

    assert asked == [2, 3, 4]
    assert report(run) == ({"a": 4, "reference": 2}, {"a→reference": {"length not even": 2}})


def test_a_decode_loop_selects_once(site):
    asked = []
    hooks = hooks_of(Fake()) | {"exactness": lambda call: asked.append(call) or fb.Exactness.EXACT}
    with registered(entry_of("a", **hooks)), fb.bind("fast"):
        for length in range(2, 30):
            fb.attention(*qkv(q_length=1, k_length=length), site=site)

    assert len(asked) == 1


def test_a_table_of_routes_stays_bounded(site, monkeypatch):
    monkeypatch.setattr("fuseboard.chain.MAX_ROUTES", 8)
    with registered(("a", Fake())):
        policy = fb.policy_for("fast")
        with fb.bind(policy):
            for length in range(1, 40):
                fb.attention(*qkv(q_length=1, k_length=length), site=site)
        assert len(site.tables[policy].routes) <= 8
    assert MAX_ROUTES == 4096


@pytest.mark.parametrize(
    ("arguments", "form"),
    [
        ({}, "plain"),
        ({"mask": torch.ones(4, 4, dtype=torch.bool)}, "dense"),
        ({"mask_info": fb.MaskInfo(causal=True)}, "structure"),
        ({"mask": torch.ones(4, 4).tril().bool(), "mask_info": fb.MaskInfo(causal=True)}, "structure"),
        ({"mask_info": fb.MaskInfo(window=2)}, "dense"),
        ({"mask_info": fb.MaskInfo(window=9)}, "plain"),
        ({"mask_info": fb.MaskInfo(causal=True), "causal": True}, "both"),
    ],
)
def test_a_kernel_is_given_one_form_of_the_mask_and_the_right_one(site, arguments, form):
    kernel = Fake()
    limits = {"structures": [fb.StructureRule(causal={True})], "causal_and_mask": True}
    q, k, v = qkv()
    with registered(entry("a", kernel, **limits)), fb.bind("a"):
        kernel.then = lambda q, k, v, **given: q.clone()
        for _ in range(2):  # the first time and the remembered one
            fb.attention(q, k, v, site=site, **arguments)
            mask, info = kernel.given["mask"], kernel.given["mask_info"]
            assert (mask is not None, info is not None) == (form in {"dense", "both"}, form == "structure")
            assert mask is None or mask.dim() == 4
            assert kernel.given["causal"] is arguments.get("causal", False)


def test_all_arguments_reach_the_kernel_as_they_were_given(site):
    kernel = Fake(lambda q, k, v, **given: q.clone())
    q, k, v = qkv(heads=4, kv_heads=2)
    mask = torch.randn(4, 4, 4)
    with registered(("a", kernel)), fb.bind("a"):
        for _ in range(2):
            fb.attention(q, k, v, site=site, mask=mask, scale=0.3, enable_gqa=True, dropout_p=0.1)
            assert kernel.given.keys() == {"mask", "mask_info", "causal", "scale", "dropout_p"}
            assert torch.equal(kernel.given["mask"], mask[None])
            assert (kernel.given["causal"], kernel.given["scale"], kernel.given["dropout_p"]) == (False, 0.3, 0.1)


# ---- kernels that raise


def test_a_backend_that_raises_is_marked_once_and_the_next_one_answers(site, logged):
    bad, good, run = Fake(raising(BOOM)), Fake(), fb.Run()
    q, k, v = qkv()
    with registered(entry("bad", bad, rank=0.1), entry("good", good, rank=0.2)), fb.bind("fast", run=run):
        for _ in range(5):
            assert same_bits(fb.attention(q, k, v, site=site), sdpa(q, k, v))

    assert (bad.calls, good.calls) == (1, 5)
    assert report(run) == ({"good": 5}, {"bad→good": {"broke (RuntimeError: no kernel for this)": 5}})
    ((level, message),) = logged()
    assert level == "WARNING"
    assert message == (
        f"bad broke at site {site.name!r} for this kind of call (RuntimeError: no kernel for this); good takes over. "
        "The kind of call: cpu, float32, head_dim 8, many queries, equal lengths. See fuseboard.explain."
    )


def test_a_backend_that_raises_on_the_second_call_is_marked_then(site):
    bad, run = Fake(), fb.Run()
    q, k, v = qkv()
    with registered(("bad", bad)), fb.bind("fast", run=run):
        fb.attention(q, k, v, site=site)
        bad.then = raising(BOOM)
        for _ in range(3):
            assert same_bits(fb.attention(q, k, v, site=site), sdpa(q, k, v))

    assert bad.calls == 2
    assert report(run)[0] == {"bad": 1, "reference": 3}


def test_other_kinds_of_call_are_still_tried(site):
    bad = Fake(raising(BOOM))
    with registered(("bad", bad)) as made, fb.bind("fast"):
        fb.attention(*qkv(), site=site)
        fb.attention(*qkv(q_length=9), site=site)  # the same kind
        assert bad.calls == 1
        fb.attention(*qkv(dim=16), site=site)
        fb.attention(*qkv(), site=site, causal=True)
        assert bad.calls == 3
        assert len(made.broken) == 3


def test_a_mark_is_shared_by_sites_and_policies_and_told_once_at_each_site(make_site, logged):
    bad, first, second = Fake(raising(BOOM)), make_site(), make_site()
    with registered(("bad", bad)):
        for policy in ("fast", "bad", "exact"):
            for site in (first, second):
                with fb.bind(policy):
                    fb.attention(*qkv(), site=site)
                    fb.attention(*qkv(), site=site)

    assert bad.calls == 1
    messages = [message for _, message in logged()]
    assert len(messages) == 2
    assert messages[0].startswith(f"bad broke at site {first.name!r} for this kind of call")
    assert messages[1] == (
        f"bad is not used at site {second.name!r}: it broke at such calls before (RuntimeError: no kernel for this)."
    )


def test_a_mark_takes_back_routes_that_other_sites_remember(make_site):
    bad, first, second = Fake(), make_site(), make_site()
    with registered(("bad", bad)), fb.bind("fast"):
        for site in (first, second):
            fb.attention(*qkv(), site=site)
        bad.then = raising(BOOM)
        for site in (first, second):
            fb.attention(*qkv(), site=site)

    assert bad.calls == 3


def test_every_backend_of_a_chain_may_break_and_the_reference_answers(site, logged):
    kernels = [Fake(raising(ValueError(str(i)))) for i in range(3)]
    entries = [entry(f"b{i}", kernel, rank=float(i)) for i, kernel in enumerate(kernels)]
    run = fb.Run()
    with registered(*entries), fb.bind("fast", run=run):
        for _ in range(3):
            fb.attention(*qkv(), site=site)

    assert [kernel.calls for kernel in kernels] == [1, 1, 1]
    assert report(run)[0] == {"reference": 3}
    assert len([level for level, _ in logged() if level == "WARNING"]) == 3


def test_the_reference_is_never_marked_broken(make_site):
    calls = []

    def reference(q, k, v):
        calls.append(1)
        raise BOOM

    site = make_site(reference=reference)
    with registered() as made, fb.bind("fast"):
        for _ in range(3):
            with pytest.raises(RuntimeError, match="no kernel for this") as caught:
                fb.attention(*qkv(), site=site)
            assert caught.value is BOOM
        assert made.broken == {}
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda q, *_, **__: None, "TypeError: it returned a NoneType, expected a tensor"),
        (lambda q, *_, **__: (q, q), "TypeError: it returned a tuple, expected a tensor"),
        (lambda q, *_, **__: q.half(), f"ValueError: it returned torch.float16 (1, 2, 4, 8) on cpu, {EXPECTED}"),
        (lambda q, *_, **__: q.mT, f"ValueError: it returned torch.float32 (1, 2, 8, 4) on cpu, {EXPECTED}"),
    ],
)  # fmt: skip
def test_an_answer_of_the_wrong_kind_is_a_failure(site, answer, reason):
    bad, run = Fake(answer), fb.Run()
    q, k, v = qkv()
    with registered(("bad", bad)), fb.bind("fast", run=run):
        assert same_bits(fb.attention(q, k, v, site=site), sdpa(q, k, v))

    assert report(run)[1] == {"bad→reference": {f"broke ({reason})": 1}}


def test_an_answer_that_lost_the_gradient_is_a_failure(site):
    bad, run = Fake(lambda q, k, v, **given: right(q, k, v, **given).detach()), fb.Run()
    q, k, v = qkv(grad=True)
    with registered(("bad", bad)), fb.bind("fast", run=run):
        out = fb.attention(q, k, v, site=site)
        out.sum().backward()

    assert q.grad is not None
    assert report(run)[0] == {"reference": 1}


# ---- kernels that decline


@pytest.mark.parametrize("text", ["", "the plan does not fit"])
def test_a_kernel_that_declines_is_not_broken_and_is_asked_again(site, text, logged):
    coy, run = Fake(raising(fb.DeclinedError(text))), fb.Run()
    q, k, v = qkv()
    with registered(("coy", coy)) as made, fb.bind("fast", run=run):
        for _ in range(3):
            assert same_bits(fb.attention(q, k, v, site=site), sdpa(q, k, v))
        coy.then = None
        fb.attention(q, k, v, site=site)
        assert made.broken == {}

    assert coy.calls == 4
    assert report(run) == ({"reference": 3, "coy": 1}, {"coy→reference": {text or "declined": 3}})
    assert len(logged()) == 1


def test_a_kernel_may_decline_later_too(site):
    coy = Fake()
    q, k, v = qkv()
    with registered(("coy", coy)) as made, fb.bind("fast"):
        fb.attention(q, k, v, site=site)
        coy.then = raising(fb.DeclinedError("no longer"))
        assert same_bits(fb.attention(q, k, v, site=site), sdpa(q, k, v))
        assert made.broken == {}


def test_a_kernels_own_check_refuses_for_this_combination_of_sizes(site):
    class Picky(Fake):
        def declines(self, q, k, v, *, mask, mask_info, causal, scale, dropout_p):
            return "odd length" if k.shape[-2] % 2 else None

    picky, run = Picky(), fb.Run()
    with registered(("picky", picky)), fb.bind("fast", run=run):
        for length in (2, 3, 4, 3):
            fb.attention(*qkv(q_length=1, k_length=length), site=site)

    assert picky.calls == 2
    assert report(run) == ({"picky": 2, "reference": 2}, {"picky→reference": {"odd length": 2}})


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (lambda *_, **__: 1 / 0, "its check failed (ZeroDivisionError: division by zero)"),
        (lambda *_, **__: False, "its check gave False, expected a reason or None"),
    ],
)
def test_a_check_that_fails_or_answers_nonsense_refuses(site, check, reason):
    kernel, run = Fake(), fb.Run()
    kernel.declines = check
    with registered(("odd", kernel)), fb.bind("fast", run=run):
        fb.attention(*qkv(), site=site)

    assert kernel.calls == 0
    assert report(run) == ({"reference": 1}, {"odd→reference": {reason: 1}})


# ---- strict policies


def strict_error(site, policy, *tensors, **arguments):
    with fb.bind(policy), pytest.raises(RefusedError) as caught:
        fb.attention(*(tensors or qkv()), site=site, **arguments)
    return caught.value


def test_a_strict_policy_lists_every_reason(site):
    guards = [fb.Guard("length", lambda call, sizes: False, "another", lambda sizes: sizes.k_length)]
    claims = {"head_dims": fb.HeadDims(only={64, 96, 128}), "v_head_dims": fb.HeadDims(), "backward": False}
    hooks = hooks_of(Fake(), guards=guards, **claims) | {"probe": lambda device: "no driver"}
    q, k, v = qkv(dim=80, grad=True)
    with registered(entry_of("sage", **hooks), entry("good"), probed=False):
        error = strict_error(site, fb.policy_for("sage", strict=True), q, k, v)

    assert str(error) == (
        f"policy 'sage' (strict) cannot run site {site.name!r} on cpu:\n"
        "    head_dim is 80, allowed 64, 96, 128 (nearest: pad to 96 and keep scale=1/sqrt(80))\n"
        "    gradient is needed, allowed no backward (nearest: torch.no_grad())\n"
        "    length is 4, allowed another\n"
        "    probe: no driver"
    )
    assert (error.policy, error.site) == ("sage", site.name)
    assert [each.rule for each in error.refusals] == ["head_dim", "gradient", "length", "probe"]


def test_a_strict_policy_is_an_error_when_its_backend_breaks_and_on_every_call_after(site, logged):
    bad = Fake(raising(BOOM))
    with registered(("bad", bad), ("good", Fake())):
        policy = fb.policy_for("bad", strict=True)
        for _ in range(2):
            error = strict_error(site, policy)
            assert [str(each) for each in error.refusals] == ["broken: RuntimeError: no kernel for this"]
    assert bad.calls == 1
    assert "no other may" in logged()[0][1]


def test_a_strict_policy_is_an_error_when_its_kernel_declines(site):
    with registered(("coy", Fake(raising(fb.DeclinedError("not this one"))))):
        error = strict_error(site, fb.policy_for("coy", strict=True))

    assert [str(each) for each in error.refusals] == ["declined: not this one"]


def test_a_strict_policy_that_can_answers(site):
    with registered(("a", Fake())), fb.bind(fb.policy_for("a", strict=True)):
        assert fb.attention(*qkv(), site=site).shape == (1, 2, 4, 8)


def test_strict_fast_is_an_error_when_only_the_reference_is_left(site):
    with registered(entry("a", gqa=False), entry("gpu", devices={"cuda"})):
        error = strict_error(site, fb.policy_for("fast", strict=True), *qkv(heads=4, kv_heads=2), enable_gqa=True)
        text = str(error)
    assert "    a: gqa is shared key heads, allowed equal heads (nearest: repeat_interleave k and v)" in text
    assert "    gpu: device is cpu, allowed cuda" in text
    with registered():
        assert "no backend is installed" in str(strict_error(site, fb.policy_for("fast", strict=True)))


def test_a_named_backend_whose_plugin_turns_out_faulty_falls_back_or_is_an_error(site):
    run = fb.Run()
    with registered(entry("good")) as made:
        policies = []
        made._entries["bad"] = entry_of("bad")
        policies = fb.policy_for("bad"), fb.policy_for("bad", strict=True)
        with fb.bind(policies[0], run=run):
            fb.attention(*qkv(), site=site)
        error = strict_error(site, policies[1])

    assert report(run) == ({"good": 1}, {"bad→good": {"its plugin is at fault": 1}})
    assert "it lacks the required hook" in str(error)


# ---- threads


def test_eight_threads_whose_kernel_breaks_all_get_the_right_answer(site):
    bad, run = Fake(raising(BOOM)), fb.Run()
    q, k, v = qkv()
    want = sdpa(q, k, v)

    def work(i):
        with fb.bind("fast", run=run):
            return all(same_bits(fb.attention(q, k, v, site=site), want) for _ in range(50))

    with registered(("bad", bad)):
        assert all(in_threads(8, work))
        with fb.bind("fast"):
            before = bad.calls
            fb.attention(q, k, v, site=site)
            assert bad.calls == before <= 8
    assert report(run)[0] == {"reference": 400}
