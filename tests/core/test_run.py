from __future__ import annotations

import json
import logging

import pytest
from fakes import Fake, entry, in_threads, qkv, raising, registered

import fuseboard as fb
from fuseboard.run import Counter, Run


def test_a_counter_is_exact_however_often_it_is_read():
    counter = Counter()

    for expected in range(5):
        assert counter.value() == expected
        assert counter.value() == expected
        counter.tick()


def test_eight_threads_that_hammer_one_run_lose_no_count(site):
    run, (q, k, v) = Run(), qkv()
    kernel = Fake()

    def work(i):
        with fb.bind("fast", run=run):
            for j in range(300):
                fb.attention(q, k, v, site=site, scale=None if (i + j) % 3 else 0.5)
                if j % 50 == 0:
                    run.report()

    with registered(("fake", kernel)):
        in_threads(8, work)

    assert run.report()["attention"]["used"] == {"fake": 2400}
    assert kernel.calls == 2400


def test_a_new_run_says_so_as_json():
    report = Run().report()

    assert report == {"attention": {"policy": [], "used": {}, "fallbacks": {}}}
    assert Run().warning is None


def test_the_report_has_the_shape_that_the_specification_shows(site):
    run, (q, k, v) = Run(), qkv(dim=80)
    limits = {"head_dims": fb.HeadDims(only={64, 96, 128})}
    with registered(entry("sage", rank=0.1, **limits), entry("flash", rank=0.2)), fb.bind("fast", run=run):
        for _ in range(3):
            fb.attention(q, k, v, site=site)

    assert run.report() == {
        "attention": {"policy": "fast", "used": {"flash": 3}, "fallbacks": {"sage→flash": {"head dim 80": 3}}},
        "warnings": ["attention fell back: sage→flash (head dim 80: 3)"],
    }
    assert run.warning == "attention fell back: sage→flash (head dim 80: 3)"
    assert json.loads(json.dumps(run.report())) == run.report()


def test_all_fallbacks_make_one_warning(site, caplog):
    run = Run()
    with registered(entry("a", Fake(raising(RuntimeError("no luck"))), rank=0.1), entry("b", gqa=False, rank=0.2)):
        with caplog.at_level(logging.CRITICAL, "fuseboard"), fb.bind("fast", run=run):
            fb.attention(*qkv(), site=site)
            fb.attention(*qkv(heads=4, kv_heads=2), site=site, enable_gqa=True)

    report = run.report()
    assert report["attention"]["used"] == {"b": 1, "reference": 1}
    assert report["attention"]["fallbacks"] == {
        "a→b": {"broke (RuntimeError: no luck)": 1},
        "a→reference": {"broke (RuntimeError: no luck)": 1},
        "b→reference": {"GQA": 1},
    }
    assert len(report["warnings"]) == 1
    assert report["warnings"][0].count("→") == 3


def test_a_run_under_several_policies_lists_them_once_each(site):
    run = Run()
    with registered(("fake", Fake())):
        for policy in ("fast", "auto", "fast", {"x.*": "auto", "*": "exact"}):
            with fb.bind(policy, run=run):
                fb.attention(*qkv(), site=site)

    assert run.report()["attention"]["policy"] == ["fast", "auto", {"x.*": "auto", "*": "exact"}]


def test_auto_counts_the_reference_when_it_is_bound(site):
    run = Run()
    with registered(), fb.bind("auto", run=run):
        fb.attention(*qkv(), site=site)

    assert run.report() == {"attention": {"policy": "auto", "used": {"reference": 1}, "fallbacks": {}}}


def test_a_call_that_raises_is_not_counted(site):
    run = Run()
    with registered(("fake", Fake(raising(MemoryError())))), fb.bind("fast", run=run), pytest.raises(MemoryError):
        fb.attention(*qkv(), site=site)

    assert run.report()["attention"]["used"] == {}


def test_the_counters_of_a_run_do_not_grow_with_the_sizes_seen(site):
    run = Run()
    with registered(("fake", Fake())), fb.bind("fast", run=run):
        for length in range(2, 40):
            fb.attention(*qkv(q_length=1, k_length=length), site=site)

    assert len(run._counters) == 1
    assert run.report()["attention"]["used"] == {"fake": 38}
