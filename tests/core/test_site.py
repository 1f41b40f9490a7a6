from __future__ import annotations

import copy
import functools
import gc
import pickle

import pytest
import torch
import torch.nn.functional as F
from fakes import Fake, qkv, registered, same_bits

import fuseboard as fb
from fuseboard.errors import SiteError


def test_sites_are_listed_by_name():
    late, early = fb.Site("listed.z"), fb.Site("listed.a")
    found = {name: each for name, each in fb.sites().items() if name.startswith("listed.")}

    assert list(found.items()) == [("listed.a", early), ("listed.z", late)]


def test_two_sites_with_one_name_are_an_error():
    kept = fb.Site("twice")

    with pytest.raises(SiteError) as caught:
        fb.Site("twice")
    assert str(caught.value) == (
        "site 'twice' exists already; a site is made once, at module level, and has a name of its own."
    )
    assert fb.sites()["twice"] is kept


def test_a_site_that_is_gone_frees_its_name_also_after_it_was_used():
    gc.disable()
    try:
        with registered(("a", Fake())):
            for _ in range(2):
                site = fb.Site("freed")
                with fb.bind("fast"):
                    fb.attention(*qkv(), site=site)
                del site
                assert "freed" not in fb.sites()
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["", "  ", None, 3])
def test_a_site_needs_a_name(name):
    with pytest.raises(SiteError, match=r"^a site's name is .*; expected a word such as 'engine\.part'\.$"):
        fb.Site(name)


@pytest.mark.parametrize("name", ["a.*", "a?", "a.[0]", "a]"])
def test_a_name_that_policies_would_read_as_a_pattern_is_refused(name):
    with pytest.raises(SiteError, match=r"expected none of \* \? \[ \], with which policies select several sites"):
        fb.Site(name)


def test_a_reference_must_be_a_function_that_takes_q_k_and_v():
    with pytest.raises(SiteError, match=r"reference is 3; expected a function of \(q, k, v, \.\.\.\)"):
        fb.Site("no reference", reference=3)
    with pytest.raises(SiteError, match=r"cannot be called with \(q, k, v\)"):
        fb.Site("no reference", reference=lambda q, k: q)
    with pytest.raises(SiteError, match=r"cannot be called with \(q, k, v\)"):
        fb.Site("no reference", reference=lambda q, k, v, bias: q)
    assert "no reference" not in fb.sites()


def test_a_site_shows_its_flags():
    assert repr(fb.Site("shown")) == "Site('shown')"
    assert (
        repr(fb.Site("shown2", swappable=False, approx_ok=False)) == "Site('shown2', swappable=False, approx_ok=False)"
    )


def recording(names):
    """A reference with parameters of these names, and what it is given."""
    given = []
    parameters = ", ".join(f"{name}=None" for name in names)
    body = f"def reference(q, k, v, {parameters}):\n    given.append(locals())\n    return q\n"
    scope = {"given": given}
    exec(body, scope)
    return scope["reference"], given


def test_a_reference_is_given_only_what_differs_from_the_default():
    given = []

    def reference(q, k, v, **arguments):
        given.append(arguments)
        return q

    site, (q, k, v) = fb.Site("only", reference=reference), qkv()
    mask = torch.ones(4, 4, dtype=torch.bool)
    fb.attention(q, k, v, site=site)
    fb.attention(q, k, v, site=site, mask=None, causal=False, scale=None, enable_gqa=False, dropout_p=0.0)
    fb.attention(q, k, v, site=site, scale=2.0)
    fb.attention(q, k, v, site=site, mask=mask, causal=True, enable_gqa=True, dropout_p=0.25)

    assert given == [
        {},
        {},
        {"scale": 2.0},
        {"mask": mask, "causal": True, "enable_gqa": True, "dropout_p": 0.25},
    ]


def test_a_reference_that_knows_no_other_arguments_serves_calls_without_them():
    site, (q, k, v) = fb.Site("plain reference", reference=lambda q, k, v: v), qkv()

    assert fb.attention(q, k, v, site=site) is v
    with pytest.raises(TypeError):
        fb.attention(q, k, v, site=site, scale=2.0)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("mask", "causal"), {"mask", "causal"}),
        (("attn_mask", "is_causal"), {"attn_mask", "is_causal"}),
        (("mask", "is_causal"), {"mask", "is_causal"}),
        (("mask", "attn_mask", "causal"), {"mask", "causal"}),
    ],
)
def test_a_reference_may_use_torchs_names_or_ours(make_site, names, expected):
    reference, given = recording(names)
    fb.attention(*qkv(), site=make_site(reference=reference), mask=torch.ones(4, 4), causal=True)

    assert {name for name, value in given[0].items() if name in names and value is not None} == expected


def test_torchs_own_function_is_called_by_its_own_names_however_it_is_wrapped(make_site):
    q, k, v = qkv()
    mask = torch.rand(4, 4) < 0.5
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    for reference in (None, F.scaled_dot_product_attention, functools.partial(F.scaled_dot_product_attention)):
        assert same_bits(fb.attention(q, k, v, site=make_site(reference=reference), mask=mask), want)


def test_the_reference_stays_torchs_function_when_somebody_replaces_it(make_site, monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *_, **__: pytest.fail("the replacement was called"))

    assert fb.attention(*qkv(), site=make_site()).shape == (1, 2, 4, 8)


def test_a_structure_without_its_dense_mask_is_written_out_for_the_reference(site):
    q, k, v = qkv(q_length=2, k_length=5)
    info = fb.MaskInfo(causal=True)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=info.dense(2, 5, q.device))

    assert same_bits(fb.attention(q, k, v, site=site, mask_info=info), want)
    assert not same_bits(fb.attention(q, k, v, site=site), want)


def test_the_reference_uses_the_dense_mask_and_not_the_structure_beside_it(site):
    q, k, v = qkv()
    mask = torch.rand(4, 4) < 0.5

    out = fb.attention(q, k, v, site=site, mask=mask, mask_info=fb.MaskInfo(causal=True))
    assert same_bits(out, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def test_a_model_s_copy_has_its_sites_and_a_pickle_means_the_living_one():
    site = fb.Site("copied.site")
    model = torch.nn.Linear(1, 1)
    model.site = site
    with registered(("a", Fake())), fb.bind("exact"):
        fb.attention(*qkv(), site=site)  # from here on it holds a table, which cannot be copied

    assert copy.deepcopy(model).site is site
    assert copy.copy(site) is site
    assert pickle.loads(pickle.dumps(model)).site is site
    kept = pickle.dumps(site)
    del model, site
    gc.collect()
    with pytest.raises(SiteError, match=r"no site .copied\.site. lives in this process; import the module"):
        pickle.loads(kept)
