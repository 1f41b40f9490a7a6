from __future__ import annotations

import json
import pickle

import pytest
import torch
from fakes import Fake, entry, entry_of, hooks_of, qkv, raising, registered, right

import fuseboard as fb
from fuseboard.call import describe
from fuseboard.registry import Registry, use
from fuseboard.settings import Settings


def answered_by(site, policy, *tensors, **arguments):
    """Who really answers; None when nobody may."""
    run = fb.Run()
    try:
        with fb.bind(policy, run=run):
            fb.attention(*tensors, site=site, **arguments)
    except fb.RefusedError:
        return None
    (name,) = run.report()["attention"]["used"]
    return name


def entries():
    odd = fb.Guard("length", lambda call, sizes: sizes.k_length % 2 == 1, "odd", lambda sizes: sizes.k_length)
    picky = Fake()
    picky.declines = lambda q, k, v, **given: "a scale" if given["scale"] is not None else None
    return [
        entry("broken", Fake(raising(ValueError("no"))), rank=0.1, gqa=False),
        entry("guarded", rank=0.2, guards=[odd]),
        entry("rough", rank=0.3, exact=False, masks={"bool"}, mask_grad=False),
        entry("picky", picky, rank=0.4, causal={"equal"}),
        entry_of("sick", **hooks_of(right, rank=0.5) | {"probe": lambda device: "no driver"}),
        entry("plain", rank=0.6, backward=False, mask_grad=False),
        entry("gpu", rank=0.0, devices={"cuda"}),
    ]


CALLS = {
    "plain": (qkv(), {}),
    "odd length": (qkv(q_length=5), {}),
    "bool mask": (qkv(), {"mask": torch.ones(4, 4, dtype=torch.bool)}),
    "additive mask": (qkv(), {"mask": torch.zeros(4, 4)}),
    "causal": (qkv(), {"causal": True}),
    "causal, unequal": (qkv(k_length=6), {"causal": True}),
    "scale": (qkv(), {"scale": 0.5}),
    "gqa": (qkv(heads=4, kv_heads=2), {"enable_gqa": True}),
    "gradient": (qkv(grad=True), {}),
    "half": (qkv(dtype=torch.float16), {}),
    "structure": (qkv(), {"mask_info": fb.MaskInfo(causal=True)}),
    "dropout": (qkv(), {"dropout_p": 0.1}),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("approx_ok", [True, False])
def test_it_says_what_attention_then_does(make_site, name, approx_ok):
    tensors, arguments = CALLS[name]
    site = make_site(approx_ok=approx_ok)
    with registered(*entries(), probed=False) as made:
        for good in ("broken", "guarded", "rough", "picky", "plain"):
            made.verdicts[good, "cpu"] = fb_verdict(made, good)
        strict = [fb.policy_for(each, strict=True) for each in ("rough", "gpu", "sick", "fast")]
        for policy in ("auto", "fast", "exact", "plain", "picky", "gpu", *strict, {"*": "fast"}):
            answered_by(site, policy, *tensors, **arguments)  # what breaks breaks now: nobody can foresee that
            said = fb.explain(site, *tensors, **arguments, policy=policy)
            assert said.chosen == answered_by(site, policy, *tensors, **arguments), policy


def fb_verdict(made, name):
    from fuseboard.probe import Verdict

    return Verdict(ok=True, kernel=made.resolve(name).load(torch.device("cpu")))


def test_it_follows_the_bound_policy_and_auto_without_one(site):
    with registered(("a", Fake())):
        assert fb.explain(site, *qkv()).chosen == "reference"
        assert fb.explain(site, *qkv()).policy == "auto"
        with fb.bind("fast"):
            assert fb.explain(site, *qkv()).chosen == "a"
        with fb.bind_process("a"):
            assert fb.explain(site, *qkv()).policy == "a"


def test_it_computes_nothing(site):
    kernel = Fake()
    with registered(("a", kernel)), fb.bind("fast"):
        fb.explain(site, *qkv())

    assert kernel.calls == 0


def test_it_names_every_refusal_with_actual_allowed_and_nearest(site):
    claims = {
        "head_dims": fb.HeadDims(only={64, 96}),
        "v_head_dims": fb.HeadDims(),
        "gqa": False,
        "dtypes": {torch.float16},
    }
    q, k, v = qkv(heads=4, kv_heads=2, dim=80)
    with registered(entry("sage", rank=0.5, exact=False, **claims), entry("flash", rank=0.75)):
        said = fb.explain(site, q, k, v, enable_gqa=True, policy="fast")

    assert str(said) == (
        f"site {site.name!r} under policy 'fast': flash\n"
        "  call: cpu, float32, head_dim 80, many queries, equal lengths, gqa; q 1x4x4x80, k and v 1x2x4x80\n"
        "   sage (approximate, about 0.5 µs): refuses\n"
        "       dtype is float32, allowed float16 (nearest: cast to float16)\n"
        "       head_dim is 80, allowed 64, 96 (nearest: pad to 96 and keep scale=1/sqrt(80))\n"
        "       gqa is shared key heads, allowed equal heads (nearest: repeat_interleave k and v)\n"
        "       to admit it: cast to float16; pad to 96 and keep scale=1/sqrt(80); repeat_interleave k and v\n"
        "-> flash (exact, about 0.75 µs): can answer\n"
        "   reference"
    )


def test_the_shapes_that_its_times_are_about_are_shown(site):
    q, k, v = qkv(2, 3, 5, 7)
    with registered(entry("a")):
        said = fb.explain(site, q, k, v[..., :6], mask=torch.ones(5, 7, dtype=torch.bool), policy="fast")

    assert said.shapes == said.as_dict()["shapes"] == "q 2x3x5x8, k 2x3x7x8, v 2x3x7x6, mask 5x7"
    assert str(said).splitlines()[1] == f"  call: {said.call}; {said.shapes}"


def test_the_changes_it_names_admit_the_call(site):
    claims = {"head_dims": fb.HeadDims(only={64, 96}), "v_head_dims": fb.HeadDims(), "gqa": False}
    q, k, v = qkv(heads=4, kv_heads=2, dim=80)
    with registered(entry("picky", dtypes={torch.float16}, **claims), entry("many", queries={"one"}, gqa=False)):
        before = fb.explain(site, q, k, v, enable_gqa=True, policy="fast")
        q, k, v = q.half(), k.half(), v.half()
        q, k = torch.nn.functional.pad(q, (0, 16)), torch.nn.functional.pad(k, (0, 16))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        after = fb.explain(site, q, k, v, scale=80**-0.5, policy="fast")

    changes = {each.name: each.changes for each in before.candidates}
    assert changes["picky"] == (
        "cast to float16",
        "pad to 96 and keep scale=1/sqrt(80)",
        "repeat_interleave k and v",
    )
    assert changes["many"] is None  # no change of the call makes one query of many
    assert after.chosen == "picky"
    assert {each.name: each.changes for each in after.candidates}["picky"] == ()


def test_backends_of_other_devices_share_a_line_but_the_one_that_was_named(site):
    far = [entry(name, devices={"cuda"}, dtypes={torch.float16}) for name in ("a", "b", "c")]
    with registered(*far, entry("near")):
        under_fast = fb.explain(site, *qkv(), policy="fast")
        named = fb.explain(site, *qkv(), policy="b")

    assert str(under_fast).splitlines()[2:] == [
        "-> near (exact, about 1 µs): can answer",
        "   reference",
        "   a, b, c: device is cpu, allowed cuda",
    ]
    assert str(named).splitlines()[2:] == [
        "   b (exact, about 1 µs): refuses",
        "       device is cpu, allowed cuda",
        "       dtype is float32, allowed float16 (nearest: cast to float16)",
        "-> near (exact, about 1 µs): can answer",
        "   reference",
        "   a, c: device is cpu, allowed cuda",
    ]
    assert [each["name"] for each in named.as_dict()["candidates"]] == ["b", "a", "c", "near"]


def test_a_package_of_the_wrong_version_comes_with_the_line_that_mends_it(site):
    hooks = hooks_of(right) | {
        "info": lambda: fb.BackendInfo("x", requires={"pluggy": ">=99"}),
        "install_line": lambda torch_version: "pip install --no-deps pluggy==99",
    }
    with registered(entry_of("old", **hooks), probed=False):
        (candidate,) = fb.explain(site, *qkv(), policy="fast").candidates

    (refusal,) = candidate.refusals
    assert refusal.rule == "version"
    assert refusal.nearest == "pip install --no-deps pluggy==99"
    assert str(refusal).endswith("needed >=99 (nearest: pip install --no-deps pluggy==99)")


def test_times_are_shown_in_a_unit_that_fits(site):
    ranks = {"a": 0.5, "b": 26900.0, "c": 3.2e6}
    with registered(*(entry(name, rank=rank) for name, rank in ranks.items())):
        text = str(fb.explain(site, *qkv(), policy="fast"))

    for shown in ("a (exact, about 0.5 µs)", "b (exact, about 26.9 ms)", "c (exact, about 3.2 s)"):
        assert shown in text


def test_it_tells_of_faults_blocked_plugins_and_breakage(site):
    with registered(
        entry("bad", Fake(raising(ValueError("no")))),
        entry_of("faulty"),
        entry("sage"),
        config=Settings(disable=frozenset({"sage"})),
    ):
        with fb.bind("fast"):
            fb.attention(*qkv(), site=site)
            text = str(fb.explain(site, *qkv()))

    assert "       broken: ValueError: no\n" in text
    assert "-> reference\n" in text
    assert "   fault: 'faulty' (acme-kernels 1.2): it lacks the required hook" in text
    assert text.endswith("   sage: it is blocked by FUSEBOARD_DISABLE=sage.")


def test_it_says_why_the_reference_answers(make_site):
    with registered(("a", Fake())):
        auto = fb.explain(make_site(), *qkv())
        fixed = fb.explain(make_site(swappable=False), *qkv(), policy="fast")

    assert auto.why_reference == "policy 'auto' always takes the reference; what follows would hold under 'fast'"
    assert auto.why_reference in str(auto)
    assert (fixed.chosen, fixed.why_reference) == ("reference", "the site is declared swappable=False")


def test_a_strict_policy_that_lets_nobody_answer_is_shown_as_an_error(site):
    with registered(entry("a", gqa=False)):
        policy = fb.policy_for("a", strict=True)
        said = fb.explain(site, *qkv(heads=4, kv_heads=2), enable_gqa=True, policy=policy)

    assert said.chosen is None
    assert str(said).startswith(f"site {site.name!r} under policy 'a (strict)': an error (strict)\n")


@pytest.mark.parametrize("named", [True, False])
def test_a_strict_error_leads_to_the_same_explanation(site, named):
    q, k, v = qkv(heads=4, kv_heads=2)
    with registered(entry("a", gqa=False), entry("b", rank=2.0, gqa=False), entry_of("faulty")):
        policy = fb.policy_for("a" if named else "fast", strict=True)
        with fb.bind(policy), pytest.raises(fb.RefusedError) as caught:
            fb.attention(q, k, v, site=site, enable_gqa=True)
        said = fb.explain(site, q, k, v, enable_gqa=True, policy=policy)

    assert caught.value.explanation == said
    assert set(caught.value.refusals) <= {each for one in said.candidates for each in one.refusals}


def test_a_strict_error_imports_nobody_until_its_explanation_is_read(site):
    imported = []
    hooks = hooks_of(right) | {"kernel": lambda: imported.append("b") or right}
    with use(Registry([entry("a", gqa=False), entry_of("b", **hooks)], Settings())):
        with fb.bind(fb.policy_for("a", strict=True)), pytest.raises(fb.RefusedError) as caught:
            fb.attention(*qkv(heads=4, kv_heads=2), site=site, enable_gqa=True)
        before = list(imported)
        shown = str(caught.value.explanation)

    assert (before, imported) == ([], ["b"])
    assert "b (" in shown


def test_what_a_kernel_said_of_the_call_is_in_the_explanation_of_the_error(site):
    fake = Fake()
    fake.declines = lambda *_tensors, **_given: "not on Sundays"
    with registered(entry("a", fake)):
        with fb.bind(fb.policy_for("a", strict=True)), pytest.raises(fb.RefusedError) as caught:
            fb.attention(*qkv(), site=site)

    (candidate,) = caught.value.explanation.candidates
    assert [each.reason for each in candidate.refusals] == ["not on Sundays"]


def test_errors_travel_between_processes_with_their_fields(site):
    with registered(entry("a", gqa=False)):
        with fb.bind(fb.policy_for("a", strict=True)), pytest.raises(fb.RefusedError) as caught:
            fb.attention(*qkv(heads=4, kv_heads=2), site=site, enable_gqa=True)
        with pytest.raises(fb.PolicyError) as unknown:
            fb.policy_for("b")
    for error in (caught.value, unknown.value):
        copy = pickle.loads(pickle.dumps(error))

        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert copy.policy == error.policy
    assert pickle.loads(pickle.dumps(caught.value)).refusals == caught.value.refusals
    assert pickle.loads(pickle.dumps(caught.value)).explanation is None


@pytest.mark.parametrize("name", CALLS)
def test_its_data_is_json(site, name):
    tensors, arguments = CALLS[name]
    with registered(*entries(), entry_of("faulty"), entry("unranked", rank=float("inf"))):
        for policy in ("auto", "fast", fb.policy_for("gpu", strict=True)):
            data = fb.explain(site, *tensors, **arguments, policy=policy).as_dict()
            assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["site"] == site.name
    assert {each["name"] for each in data["candidates"]} >= {"plain", "gpu", "unranked"}
    gpu = next(each for each in data["candidates"] if each["name"] == "gpu")
    assert gpu["refusals"][0]["rule"] == "device"
    assert gpu["refusals"][0]["allowed"] == "cuda"


def test_a_backend_of_another_device_need_not_be_imported_to_say_so(site):
    hooks = hooks_of(right, devices={"cuda"}) | {"kernel": lambda: pytest.fail("imported")}
    with registered(entry_of("gpu", **hooks)):
        (candidate,) = fb.explain(site, *qkv(), policy="fast").candidates

    assert [each.rule for each in candidate.refusals] == ["device"]


def test_it_sees_what_autocast_would_cast(site):
    q, k, v = qkv()
    with registered(entry("a", dtypes={torch.bfloat16})), torch.autocast("cpu", torch.bfloat16):
        said = fb.explain(site, q, k, v.bfloat16(), mask=torch.zeros(4, 4), policy="fast")
        assert said.chosen == answered_by(site, "fast", q, k, v.bfloat16(), mask=torch.zeros(4, 4)) == "a"
        assert (said.call.dtype, said.call.mask_dtype) == (torch.bfloat16, torch.bfloat16)


def test_a_wrong_argument_is_the_same_error(site):
    with registered(), pytest.raises(fb.InputError, match="k has shape"):
        fb.explain(site, *qkv()[:1], *qkv(dim=9)[1:])


def test_a_kernel_that_wants_to_be_taken_later_is_shown_with_its_wish(site):
    patient = Fake()
    patient.declines = lambda q, k, v, **given: fb.Later("builds a plan", 3)
    with registered(entry("patient", patient, rank=0.1), entry("b", rank=0.2)):
        said = fb.explain(site, *qkv(), policy="fast")
        assert said.chosen == "b"
        assert "answers after 3 calls of these sizes (builds a plan)" in str(said)
        with fb.bind("fast"):
            for _ in range(20):
                fb.attention(*qkv(), site=site)
        assert patient.calls > 0
        assert answered_by(site, "fast", *qkv()) == "patient"
        assert describe(*qkv())[0] == said.call


def test_what_is_no_site_is_said_to_be_none():
    with pytest.raises(fb.InputError, match=r"^site is 'decoder'; expected a fuseboard\.Site\.$") as caught:
        fb.explain("decoder", *qkv())
    assert caught.value.argument == "site"
