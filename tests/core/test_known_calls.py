"""The shortcuts of a call whose kind is known: the key that was answered last, and versions read without asking."""

from __future__ import annotations

import pytest
import torch
from fakes import Fake, entry, qkv, registered, same_bits, sdpa

import fuseboard as fb
from fuseboard.call import describe


def test_kinds_that_take_turns_are_each_answered_by_their_own_route(site):
    kernel = Fake()
    q, k, v = qkv()
    long = (q, torch.cat((k, k), 2), torch.cat((v, v), 2))
    run = fb.Run()
    with registered(entry("x", kernel)), fb.bind("x", run=run):
        for _ in range(4):
            assert same_bits(fb.attention(q, k, v, site=site), sdpa(q, k, v))
            assert same_bits(fb.attention(*long, site=site), sdpa(*long))
            with pytest.raises(fb.InputError, match="k has dtype"):
                fb.attention(q, k.double(), v, site=site)

    assert run.report()["attention"]["used"] == {"x": 8}


@pytest.mark.parametrize(("name", "number"), [("scale", 0.5), ("dropout_p", 0.0)])
def test_a_tensor_in_a_number_s_place_is_refused_also_after_its_equal(site, name, number):
    with registered(entry("x")), fb.bind("x"):
        for _ in range(3):
            fb.attention(*qkv(), site=site, **{name: number})

        with pytest.raises(fb.InputError, match=name):
            fb.attention(*qkv(), site=site, **{name: torch.tensor(number)})


def test_a_backend_marked_broken_is_not_answered_from_the_last_key(site):
    q, k, v = qkv()
    run = fb.Run()
    with registered(entry("x", Fake())) as registry, fb.bind("x", run=run):
        for _ in range(3):
            fb.attention(q, k, v, site=site)
        call, _ = describe(q, k, v)
        registry.mark_broken("x", call, "quarantined")
        fb.attention(q, k, v, site=site)

    assert run.report()["attention"]["used"] == {"x": 3, "reference": 1}


@pytest.mark.parametrize("which", ["q", "k", "v", "mask", "all"])
def test_one_inference_tensor_among_ordinary_ones_is_taken(site, which):
    q, k, v = qkv()
    inputs = {"q": q, "k": k, "v": v, "mask": torch.zeros(q.shape[-2], k.shape[-2])[None, None]}
    with torch.inference_mode():
        inputs |= {name: each.clone() for name, each in inputs.items() if which in (name, "all")}
    run = fb.Run()
    with registered(entry("x")), fb.bind("x", run=run), torch.no_grad():
        for _ in range(3):
            fb.attention(**inputs, site=site)

    assert run.report()["attention"]["used"] == {"x": 3}


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_a_write_before_an_error_is_seen_on_a_known_call(site, which):
    kernel = Fake()
    inputs = dict(zip("qkv", (each.clone() for each in qkv()), strict=True))

    def writes_and_raises(q, k, v, **_given):
        {"q": q, "k": k, "v": v}[which].add_(1)
        raise RuntimeError("too late")

    with registered(entry("x", kernel)), fb.bind("x"):
        for _ in range(3):
            fb.attention(**inputs, site=site)
        kernel.then = writes_and_raises

        with pytest.raises(fb.InputChangedError, match=which):
            fb.attention(**inputs, site=site)
