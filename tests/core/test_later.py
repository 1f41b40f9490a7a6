"""Kernels that prepare something for each size, and kernels that decline: when they are asked, and when again."""

from __future__ import annotations

import pytest
from fakes import Fake, entry, qkv, registered

import fuseboard as fb
from fuseboard.chain import RECHECK


class Patient(Fake):
    """Asks to be taken after some calls of the same sizes."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.wait = calls

    def declines(self, q, k, v, **given):
        return fb.Later("builds a plan", self.wait)


class Unhashable(Fake):
    """A kernel that can be in no dictionary."""

    __hash__ = None

    def __eq__(self, other):
        return False


@pytest.fixture
def both():
    patient, other = Patient(8), Fake()
    with registered(entry("patient", patient, rank=0.1), entry("other", other, rank=0.2)):
        yield patient, other


def attend(site, count, *tensors):
    run = fb.Run()
    with fb.bind("fast", run=run):
        for _ in range(count):
            fb.attention(*tensors, site=site)
    return run.report()


def test_it_takes_over_after_as_many_calls_as_it_asked_for(site, both):
    report = attend(site, 20, *qkv())

    # The call that finds the route, eight counted ones, and from then on the patient one.
    assert report["attention"]["used"] == {"other": 9, "patient": 11}


def test_waiting_is_no_fallback(site, both):
    report = attend(site, 3, *qkv())

    assert report["attention"]["fallbacks"] == {}
    assert "warnings" not in report


def test_sizes_that_never_repeat_never_reach_it(site, both):
    patient, other = both
    run = fb.Run()
    with fb.bind("fast", run=run):
        for length in range(4, 104):
            q, k, v = qkv(q_length=1, k_length=length)
            fb.attention(q, k, v, site=site)

    assert (patient.calls, other.calls) == (0, 100)


def test_a_policy_that_names_it_does_not_wait(site, both):
    patient, _ = both
    with fb.bind("patient"):
        fb.attention(*qkv(), site=site)

    assert patient.calls == 1


def test_sizes_are_counted_apart(site, both):
    attend(site, 6, *qkv())
    report = attend(site, 6, *qkv(k_length=9))

    assert report["attention"]["used"] == {"other": 6}


def test_many_sizes_with_many_wishes_make_few_counters(site):
    patient = Patient(1)
    with registered(entry("patient", patient, rank=0.1), entry("other", rank=0.2)):
        run = fb.Run()
        with fb.bind("fast", run=run):
            for length in range(4, 204):
                patient.wait = 1000 + length
                fb.attention(*qkv(q_length=1, k_length=length), site=site)

        assert len(run._ticks) <= 2


def test_a_kernel_that_declined_is_asked_again_after_a_while(site):
    kernel = Fake()
    reasons = ["switched off"]
    kernel.declines = lambda q, k, v, **given: reasons[0] if reasons else None
    with registered(entry("a", kernel)):
        q, k, v = qkv()
        report = attend(site, 10, q, k, v)
        reasons.clear()
        attend(site, RECHECK, q, k, v)

        assert report["attention"]["fallbacks"] == {"a→reference": {"switched off": 10}}
        assert attend(site, 1, q, k, v)["attention"]["used"] == {"a": 1}


def test_a_kernel_need_not_be_hashable(site):
    with registered(entry("a", Unhashable())):
        assert attend(site, 3, *qkv())["attention"]["used"] == {"a": 3}


def test_a_wait_of_no_call_is_refused():
    with pytest.raises(ValueError, match="calls"):
        fb.Later("nothing", 0)


def test_a_number_of_calls_may_be_a_quotient_and_is_rounded_up():
    assert fb.Later("a plan", 40e-3 / 1e-3).calls == 40
    assert fb.Later("a plan", 2.1).calls == 3
