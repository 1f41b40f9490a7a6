from __future__ import annotations

import pytest
from fakes import Fake, entry, entry_of, hooks_of, qkv, registered

import fuseboard as fb
from fuseboard.call import describe
from fuseboard.errors import PolicyError
from fuseboard.settings import Settings


def used(site, policy, *tensors, **arguments):
    run = fb.Run()
    with fb.bind(policy, run=run):
        fb.attention(*(tensors or qkv()), site=site, **arguments)
    (name,) = run.report()["attention"]["used"]
    return name


def test_there_is_one_object_for_each_value():
    with registered(("a", Fake()), ("b", Fake())):
        assert fb.policy_for("fast") is fb.policy_for("fast")
        assert fb.policy_for("a") is fb.policy_for("a")
        assert fb.policy_for("a") is not fb.policy_for("b")
        assert fb.policy_for("a", strict=True) is not fb.policy_for("a")
        assert fb.policy_for({"x.*": "a", "*": "fast"}) is fb.policy_for({"x.*": "a", "*": "fast"})
        assert fb.policy_for({"x.*": "a", "*": "fast"}) is not fb.policy_for({"*": "fast", "x.*": "a"})


def test_a_policy_is_its_own_policy():
    with registered():
        policy = fb.policy_for("fast")

    assert fb.policy_for(policy) is policy


def test_models_that_share_a_policy_share_what_it_selected(site):
    asked = []
    hooks = hooks_of(Fake()) | {"rank": lambda call: asked.append(call) or 1.0}
    with registered(entry_of("a", **hooks)):
        first, second = fb.policy_for("fast"), fb.policy_for("fast")
        used(site, first)
        asked.clear()
        used(site, second)

    assert asked == []


def test_auto_takes_the_reference(site):
    with registered(("a", Fake())):
        assert used(site, "auto") == "reference"


def test_fast_takes_the_fastest_approximate_ones_included(site):
    with registered(entry("slow", rank=2.0), entry("rough", rank=0.5, exact=False), entry("mid", rank=1.0)):
        assert used(site, "fast") == "rough"


def test_exact_leaves_approximate_backends_out_without_calling_that_a_fallback(site):
    run = fb.Run()
    with registered(entry("rough", rank=0.5, exact=False), entry("mid", rank=1.0)), fb.bind("exact", run=run):
        fb.attention(*qkv(), site=site)

    assert run.report() == {"attention": {"policy": "exact", "used": {"mid": 1}, "fallbacks": {}}}


def test_a_name_comes_first_and_then_the_chain_of_fast(site):
    with registered(entry("a", rank=9.0, gqa=False), entry("b", rank=1.0)):
        assert used(site, "a") == "a"
        assert used(site, "a", *qkv(heads=4, kv_heads=2), enable_gqa=True) == "b"


def test_backends_of_one_rank_are_tried_by_name_and_those_without_one_last(site):
    silent = entry_of("aa", **{k: f for k, f in hooks_of(Fake()).items() if k != "rank"})
    with registered(entry("c"), entry("b"), silent, entry("a-nan", rank=float("nan"))) as registry:
        candidates = fb.explain(site, *qkv(), policy="fast").candidates

        assert [each.name for each in candidates] == ["b", "c", "a-nan", "aa"]
        assert [each.name for each in registry.faults] == ["a-nan"]


def test_an_unknown_name_is_an_error_with_the_nearest_names():
    with registered(entry("flash"), entry("sdpa-flash")), pytest.raises(PolicyError) as caught:
        fb.policy_for("flsh")

    assert str(caught.value) == (
        "unknown policy 'flsh'. Did you mean 'flash' or 'flash4'? Available here: auto, exact, fast, flash, sdpa-flash."
    )
    assert caught.value.policy == "flsh"
    assert caught.value.nearest[0] == "flash"


def test_a_known_plugin_that_is_not_installed_is_an_error_with_its_install_line():
    with registered(), pytest.raises(PolicyError) as caught:
        fb.policy_for("sage")

    assert str(caught.value) == (
        "policy 'sage' needs a plugin that is not installed. "
        "Install it: pip install --no-deps fuseboard-sage sageattention"
    )
    assert caught.value.install == "pip install --no-deps fuseboard-sage sageattention"


def test_tuned_says_that_it_cannot_be_had_yet():
    with (
        registered(),
        pytest.raises(PolicyError, match=r"^policy 'tuned' needs measured times, .* Available here: auto,"),
    ):
        fb.policy_for("tuned")


def test_a_blocked_backend_under_a_strict_policy_is_an_error_that_names_the_setting():
    with registered(entry("sage"), config=Settings(disable=frozenset({"sage"}))):
        with pytest.raises(PolicyError) as caught:
            fb.policy_for("sage", strict=True)

    assert str(caught.value) == (
        "policy 'sage' cannot be used: it is blocked by FUSEBOARD_DISABLE=sage. Available here: auto, exact, fast."
    )


def test_blocking_the_backend_that_a_policy_names_is_a_fallback_with_its_reason_and_no_error(site, caplog):
    caplog.set_level("INFO", "fuseboard")
    run = fb.Run()
    with registered(entry("sage"), entry("other"), config=Settings(disable=frozenset({"sage"}))):
        for _ in range(2):
            with fb.bind({"*": "sage"}, run=run):
                fb.attention(*qkv(), site=site)
        explained = fb.explain(site, *qkv(), policy="sage")

    found = run.report()["attention"]
    assert found["used"] == {"other": 2}
    assert found["fallbacks"] == {"sage→other": {"blocked by FUSEBOARD_DISABLE=sage": 2}}
    assert explained.chosen == "other"
    assert "sage: it is blocked by FUSEBOARD_DISABLE=sage." in str(explained)
    (line,) = (each.getMessage() for each in caplog.records if "sage does not answer" in each.getMessage())
    assert "(blocked by FUSEBOARD_DISABLE=sage)" in line


def test_a_faulty_plugin_is_a_fallback_also_once_its_fault_is_known(site):
    run = fb.Run()
    with registered(entry_of("odd", info=lambda: 3), entry("other"), probed=False) as registry:
        for _ in range(2):
            with fb.bind("odd", run=run):
                fb.attention(*qkv(), site=site)
            assert "odd" not in registry.names()

    assert run.report()["attention"]["fallbacks"] == {"odd→other": {"its plugin is at fault": 2}}


def test_a_faulty_plugin_under_a_strict_policy_is_an_error_that_tells_the_fault():
    with registered(entry_of("odd", info=lambda: 3)):
        with pytest.raises(
            PolicyError, match=r"^policy 'odd' cannot be used: its plugin is at fault: 'odd' \(acme-ker"
        ):
            fb.policy_for("odd", strict=True)


def test_a_plugin_at_fault_for_its_name_makes_no_policy_of_a_reserved_word():
    with registered(entry("tuned"), entry("reference")):
        with pytest.raises(PolicyError, match="needs measured times"):
            fb.policy_for("tuned")
        with pytest.raises(PolicyError, match="a backend cannot be called 'reference'"):
            fb.policy_for("reference")


@pytest.mark.parametrize("value", [3, None, ["fast"]])
def test_what_is_no_policy_is_an_error(value):
    with (
        registered(),
        pytest.raises(PolicyError, match=r"^a policy is .*; expected a name, a mapping of site patterns"),
    ):
        fb.policy_for(value)


def test_a_pattern_that_is_no_text_is_an_error():
    with registered(), pytest.raises(PolicyError, match=r"^a policy's site pattern is 3; expected text such as"):
        fb.policy_for({3: "fast"})


def test_an_unknown_name_in_a_mapping_is_an_error():
    with registered(), pytest.raises(PolicyError, match="unknown policy 'fsat'"):
        fb.policy_for({"*": "fsat"})


def test_a_mapping_gives_each_site_the_first_policy_that_fits():
    vocoder, decoder = fb.Site("mapping.vocoder.mid"), fb.Site("mapping.decoder")
    with registered(entry("a")):
        policy = fb.policy_for({"mapping.vocoder.*": "auto", "*": "fast"})

        assert used(vocoder, policy) == "reference"
        assert used(decoder, policy) == "a"
        assert used(decoder, {"*": "fast", "mapping.decoder": "auto"}) == "a"


def test_a_site_that_no_pattern_fits_has_auto(site):
    with registered(entry("a")):
        assert used(site, {"nothing.like.it": "fast"}) == "reference"
        assert used(site, {}) == "reference"


def test_mappings_nest(site):
    with registered(entry("a")):
        inner = fb.policy_for({site.name: "auto", "*": "fast"})

        assert used(site, {"*": inner}) == "reference"
        assert used(site, {"*": {site.name: "auto", "*": "fast"}}) == "reference"


def test_patterns_are_matched_with_their_case(site):
    with registered(entry("a")):
        assert used(site, {site.name.upper(): "fast"}) == "reference"


def test_a_strict_policy_in_a_mapping_stays_strict(site):
    with registered(entry("a", gqa=False)):
        policy = fb.policy_for({"*": fb.policy_for("a", strict=True)})
        with fb.bind(policy), pytest.raises(fb.RefusedError):
            fb.attention(*qkv(heads=4, kv_heads=2), site=site, enable_gqa=True)


def test_a_policy_shows_its_value():
    with registered(entry("a")):
        assert repr(fb.policy_for("a", strict=True)) == "Policy('a', strict=True)"
        assert str(fb.policy_for({"x": "a", "*": "fast"})) == "{'x': 'a', '*': 'fast'}"
        assert fb.policy_for("a", strict=True).as_json() == "a (strict)"
        assert fb.policy_for("a").backend_name == "a"
        assert fb.policy_for("fast").backend_name is None
        assert fb.policy_for({"*": "a"}).backend_name is None


def test_a_policy_belongs_to_the_registry_it_was_made_from(site):
    with registered(entry("a")):
        policy = fb.policy_for("fast")
    with registered(entry("b")):
        assert used(site, policy) == "a"
        assert used(site, "fast") == "b"


def test_an_ordering_function_replaces_the_order_by_rank_but_not_a_name():
    with registered(entry("a", rank=1.0), entry("b", rank=2.0), entry("c", rank=3.0)) as registry:
        call = describe(*qkv())
        backends = registry.backends()

        def backwards(_call, _sizes, ranked):
            return ranked[::-1]

        assert [each.name for each in fb.policy_for("fast").order(*call, backends)] == ["a", "b", "c"]
        assert [each.name for each in fb.policy_for("fast").order(*call, backends, backwards)] == ["c", "b", "a"]
        assert [each.name for each in fb.policy_for("b").order(*call, backends, backwards)] == ["b", "c", "a"]


def test_a_policy_asked_for_strictly_becomes_its_strict_twin():
    with registered(entry("a")):
        assert fb.policy_for(fb.policy_for("a"), True) is fb.policy_for("a", True)
        mapped = fb.policy_for(fb.policy_for({"x.*": "a", "*": "fast"}), True)
        assert mapped is fb.policy_for({"x.*": "a", "*": "fast"}, True)
        assert mapped.for_site("x.y").strict


@pytest.mark.parametrize(("given", "meant"), [("FAST", "fast"), ("Acme", "acme"), ("SDPA-CPU", "sdpa-cpu")])
def test_a_name_in_capitals_is_told_its_spelling(given, meant):
    with registered(entry("acme")), pytest.raises(PolicyError) as caught:
        fb.policy_for(given)
    assert caught.value.nearest[0] == meant
