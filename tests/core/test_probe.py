from __future__ import annotations

import os
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from fakes import CPU, Fake, entry, entry_of, hooks_of, in_threads, plugin, qkv, registered, right

import fuseboard as fb
from fuseboard import machine, probe, verdicts
from fuseboard.probe import precheck, verdict
from fuseboard.registry import Entry, Registry
from fuseboard.settings import Settings


def judged(name="x", device=CPU, timeout=300.0, entry=None, **hooks):
    """The verdict on a plugin with these hooks instead of good ones."""
    made = Registry([entry or entry_of(name, **hooks_of(right) | hooks)], Settings(probe_timeout=timeout))
    return verdict(made, made.resolve(name), device)


def raise_(error):
    raise error


def wrong(q, k, v, **given):
    return right(q, k, v, **given) * torch.nan


PLAIN = {"mask": None, "mask_info": None, "causal": False, "scale": None, "dropout_p": 0.0}


def test_a_good_backend_gets_its_kernel():
    found = judged()

    assert (found.ok, found.reason, found.stage, found.kernel) == (True, "", "", right)
    assert found.installed


def test_the_wrong_device_is_a_no_without_any_import():
    found = judged(device=torch.device("meta"), kernel=lambda: pytest.fail("imported"))

    assert (found.ok, found.reason, found.stage) == (False, "runs on cpu, not on meta", "device")
    assert not found.installed


@pytest.mark.parametrize(
    ("requires", "reason"),
    [
        (
            {"no-such-package": ">=1"},
            "no-such-package is not installed. Install it: pip install --no-deps acme-kernels",
        ),
        ({"pluggy": ">=99"}, "needed >=99"),
        ({"pluggy": "<1,>=0.5"}, "needed <1,>=0.5"),
        ({"pluggy": "==0.1"}, "needed ==0.1"),
    ],
)
def test_a_package_absent_or_of_another_version_is_a_no_without_any_import(requires, reason):
    found = judged(info=lambda: fb.BackendInfo("x", requires=requires), kernel=lambda: pytest.fail("imported"))

    assert (found.ok, found.stage) == (False, "version")
    assert found.reason.endswith(reason)
    assert not found.installed


def test_a_package_whose_version_cannot_be_read_is_a_no(monkeypatch):
    def version(package):
        return {"acme": None, "worse": raise_}[package] and raise_(KeyError("Version"))

    monkeypatch.setattr(probe.importlib.metadata, "version", version)
    for package in ("acme", "worse"):
        found = judged(info=lambda package=package: fb.BackendInfo("x", requires={package: ">=1"}))
        assert found.reason == f"{package} is installed without a readable version, needed >=1"


def test_a_package_in_range_is_a_yes():
    assert judged(info=lambda: fb.BackendInfo("x", requires={"pluggy": ">=0.5,<99,!=1.0.0rc1", "attrs": ""})).ok


@pytest.mark.parametrize(
    ("version", "wanted", "inside"),
    [
        ("2.6.0", ">=2.6", True),
        ("2.10.0", ">=2.6", True),
        ("2.6.0+cu124", ">=2.6,<2.7", True),
        ("2.6.0.post1", ">2.6.0", True),
        ("2.7.0rc1", "<2.7", True),
        ("2.7.0", "!=2.7.0", False),
        ("2.7", "!=2.7.0", False),
        ("2.7", "==2.7.0", True),
        ("0.0.27", ">=0.0.21,<0.0.27", False),
        ("4.0.0b36", ">=4.0.0b30", True),
        ("1", "", True),
    ],
)
def test_versions_compare_as_pip_compares_them(version, wanted, inside):
    assert probe._in_range(version, wanted) is inside


def test_a_known_bad_version_is_a_no_with_its_link():
    bad = fb.KnownBad("wrong results", "https://example.com/1", package="pluggy", versions=">=0.1")
    found = judged(known_bad=lambda: [bad], kernel=lambda: pytest.fail("imported"))

    assert found.stage == "known bad"
    assert found.reason == "known bad: wrong results, see https://example.com/1"
    assert found.installed


@pytest.mark.parametrize(
    "bad",
    [
        fb.KnownBad("x", "link", package="pluggy", versions=">=99"),
        fb.KnownBad("x", "link", package="no-such-package"),
        fb.KnownBad("x", "link", package="pluggy", call=lambda call: call.gqa),
    ],
)
def test_a_known_bad_combination_that_does_not_apply_is_no_no(bad):
    assert judged(known_bad=lambda: [bad]).ok


def test_the_plugins_own_probe_decides_before_the_import():
    found = judged(probe=lambda device: f"no driver for {device}", kernel=lambda: pytest.fail("imported"))

    assert (found.stage, found.reason) == ("probe", "no driver for cpu")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("undefined symbol: _ZN3c10\ntrace"), "import failed: ImportError: undefined symbol: _ZN3c10"),
        (OSError("libfoo.so: cannot open"), "import failed: OSError: libfoo.so: cannot open"),
        (AttributeError("no attribute 'attention'"), "import failed: AttributeError: no attribute 'attention'"),
        (RuntimeError("no GPU"), "import failed: RuntimeError: no GPU"),
        (MemoryError(), "import failed: MemoryError"),
        (SystemExit(1), "its import called sys.exit(1)"),
    ],
)  # fmt: skip
def test_an_import_that_raises_is_a_reason(error, reason):
    found = judged(kernel=lambda: raise_(error))

    assert (found.ok, found.stage, found.reason) == (False, "import", reason)


def test_a_probe_that_raises_is_a_reason():
    assert judged(probe=lambda: raise_(OSError("no driver"))).reason == "probe failed: OSError: no driver"


@pytest.mark.parametrize("kernel", [None, 3, "attention"])
def test_a_kernel_that_cannot_be_called_is_a_reason(kernel):
    found = judged(kernel=lambda: kernel)

    assert (found.stage, found.reason) == ("import", f"hook kernel gave {kernel!r}, which cannot be called")


def test_a_kernel_that_raises_in_the_self_test_is_a_reason():
    found = judged(kernel=lambda: Fake(lambda *_, **__: raise_(RuntimeError("no kernel image"))))

    assert (found.stage, found.reason) == (
        "self-test",
        "self-test failed (float32, lengths 1x77, head dim 64, gqa): RuntimeError: no kernel image",
    )


def test_a_kernel_that_lies_is_a_reason():
    found = judged(kernel=lambda: Fake(lambda q, k, v, **given: right(q, k, v, **given) * torch.nan))

    assert found.stage == "self-test"
    assert found.reason.endswith("its output is not finite")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, GeneratorExit])
def test_cancellation_passes_and_the_backend_can_be_asked_again(stop):
    errors = [stop()]
    made = Registry(
        [entry_of("x", **hooks_of(right) | {"kernel": lambda: raise_(errors.pop()) if errors else right})], Settings()
    )
    backend = made.resolve("x")

    with pytest.raises(stop):
        verdict(made, backend, CPU)
    assert verdict(made, backend, CPU).ok


def test_an_import_that_hangs_is_a_reason_and_the_host_goes_on(site):
    never = threading.Event()
    try:
        with registered(
            entry_of("x", **hooks_of(right) | {"kernel": lambda: never.wait() and right}),
            probed=False,
            config=Settings(probe_timeout=0.05),
        ) as made:
            run = fb.Run()
            with fb.bind("x", run=run):
                fb.attention(*qkv(), site=site)

            found = made.verdicts["x", "cpu"]
            reason = "its import or self-test did not end within 0.05 s (FUSEBOARD_PROBE_TIMEOUT)"
            assert (found.ok, found.stage, found.reason) == (False, "time limit", reason)
            assert run.report()["attention"]["fallbacks"] == {"x→reference": {f"cannot run: {reason}": 1}}
    finally:
        never.set()


def test_a_backend_is_asked_once_for_a_device_also_by_eight_threads(site):
    loaded, kernel = [], Fake()

    def load():
        loaded.append(threading.current_thread().name)
        return kernel

    with registered(entry_of("x", **hooks_of(kernel) | {"kernel": load}), probed=False):

        def work(i):
            run = fb.Run()
            with fb.bind("x", run=run):
                fb.attention(*qkv(), site=site)
            return run.report()["attention"]["used"]

        assert in_threads(8, work) == [{"x": 1}] * 8
    assert loaded == ["fuseboard-probe-x"]


def test_a_no_is_remembered_too(site):
    loaded = []
    hooks = hooks_of(right) | {"kernel": lambda: loaded.append(1)}
    with registered(entry_of("x", **hooks), probed=False), fb.bind("fast"):
        for length in range(2, 6):
            fb.attention(*qkv(q_length=length), site=site)

    assert loaded == [1]


def test_a_backend_that_is_refused_by_its_limits_is_never_imported(site):
    hooks = hooks_of(right, gqa=False) | {"kernel": lambda: pytest.fail("imported")}
    with registered(entry_of("x", **hooks), probed=False), fb.bind("fast"):
        fb.attention(*qkv(heads=4, kv_heads=2), site=site, enable_gqa=True)


# ---- FUSEBOARD_PROBE=child; with real children in test_child


@pytest.fixture
def on_disk(tmp_path):
    """Keep a verdict on an installed backend, and make a registry that asks children and finds it."""

    def keep(name, *, ok, reason="", stage=""):
        key = verdicts.key(name, "fuseboard-sdpa", "cpu", machine.facts([CPU]))
        verdicts.write(tmp_path, key, {
            "requires": {}, "limit": 300.0, "ok": ok, "reason": reason, "stage": stage, "seconds": 52.0, "detail": [],
        })  # fmt: skip
        return Registry(config=Settings(probe="child", cache=str(tmp_path)))

    return keep


def test_a_childs_no_is_taken_with_its_reason_and_the_kernel_never_loaded(on_disk):
    reason = "crashed (SIGSEGV, segmentation fault) during its self-test"
    made = on_disk("sdpa-cpu", ok=False, reason=reason, stage="crash")
    found = verdict(made, made.resolve("sdpa-cpu"), CPU)

    assert (found.ok, found.reason, found.stage, found.kernel) == (False, reason, "crash", None)
    assert found.installed


def test_after_a_childs_yes_the_kernel_is_loaded_and_not_tested_again(on_disk, monkeypatch):
    monkeypatch.setattr(probe.selftest, "run", lambda *_: pytest.fail("tested again"))
    made = on_disk("sdpa-cpu", ok=True)
    found = verdict(made, made.resolve("sdpa-cpu"), CPU)

    assert (found.ok, found.reason, found.stage) == (True, "", "")
    assert right(*qkv(), **PLAIN).allclose(found.kernel(*qkv(), **PLAIN))


@pytest.mark.parametrize(("name", "distribution"), [("x", "acme-kernels"), ("sdpa-cpu", "acme-kernels")])
def test_a_backend_that_a_child_could_not_find_is_probed_here(name, distribution, tmp_path):
    """Given to the registry by hand: no child would find it, or one would find another of that name."""
    loaded = []
    hooks = hooks_of(right) | {"kernel": lambda: loaded.append(threading.current_thread().name) or Fake(wrong)}
    made = Registry([entry_of(name, distribution, **hooks)], Settings(probe="child", cache=str(tmp_path / "cache")))
    found = verdict(made, made.resolve(name), CPU)

    assert (found.ok, found.stage) == (False, "self-test")
    assert loaded == [f"fuseboard-probe-{name}"]
    assert not (tmp_path / "cache").exists()


def test_the_callers_modes_do_not_reach_the_probe(site):
    def modes():
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    class Kernel(Fake):
        def __call__(self, q, k, v, **given):
            if threading.current_thread().name == "fuseboard-probe-x":
                modes()
                assert not q.is_inference()
            return super().__call__(q, k, v, **given)

    def load():
        modes()
        return kernel

    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        seen, kernel = [], Kernel()
        hooks = hooks_of(kernel, dtypes={torch.float32, torch.bfloat16}) | {"kernel": load}
        with registered(entry_of("x", **hooks), probed=False) as made:
            with mode, fb.bind("x"):
                fb.attention(*qkv(), site=site)
            assert made.verdicts["x", "cpu"].ok
        assert seen[0] == (False, False, True)
        assert {each[:2] for each in seen} == {(False, False)}


def test_a_probe_runs_with_gradients_whatever_the_caller_switched_off():
    """The self-test checks backward, so that a caller's no_grad would make an honest kernel fail, or a liar pass."""
    liar = Fake(lambda q, k, v, **given: right(q.detach(), k.detach(), v.detach(), **given))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert judged().ok
            assert judged(kernel=lambda: liar).reason.endswith("its output carries no gradient")


def test_a_default_dtype_or_device_of_the_host_does_not_matter():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            assert judged().ok
    finally:
        torch.set_default_dtype(before)


def test_a_precheck_asks_for_no_import():
    made = Registry([entry("x", right)], Settings())

    assert precheck(made.resolve("x"), CPU) is None
    assert precheck(made.resolve("x"), torch.device("meta")).stage == "device"


def test_a_kernel_object_may_be_any_callable():
    class Bound:
        def attention(self, q, k, v, **given):
            return right(q, k, v, **given)

    assert judged(entry=Entry("x", lambda: plugin(**hooks_of(Bound().attention)))).ok


def test_a_self_test_that_was_given_up_stops_and_does_not_abort_the_process(python):
    code = """
import types, torch, threading, fuseboard as fb
from fuseboard.registry import Entry, Registry, use
from fuseboard.settings import Settings

SDPA = torch.nn.functional.scaled_dot_product_attention
started, calls = threading.Event(), []

def kernel(q, k, v, *, mask, mask_info, causal, scale, dropout_p):
    calls.append(1)
    for _ in range(500):
        out = SDPA(q, k, v)
    return out

hooks = {"info": lambda: fb.BackendInfo("slow"), "kernel": lambda: kernel,
         "constraints": lambda: fb.Constraints(devices={"cpu"}, dtypes={torch.float32}, backward=True, gqa=True)}
plugin = types.SimpleNamespace(**{name: fb.hookimpl(hook) for name, hook in hooks.items()})
q = torch.randn(1, 2, 4, 8)
site = fb.Site("slow")
with use(Registry([Entry("slow", lambda: plugin)], Settings(probe_timeout=0.05))), fb.bind("fast"):
    fb.attention(q, q, q, site=site)
print("answered")
"""
    assert python(code) == "answered\n"


@pytest.mark.parametrize("said", [True, False, 3, "", torch.ones(2, 2)])
def test_a_probe_that_gives_no_words_is_told_what_is_expected(said):
    answer = judged(probe=lambda: said)
    assert (answer.ok, answer.stage) == (False, "probe")
    assert re.fullmatch(r"hook probe gave .+; expected a reason in words, or None", answer.reason)


class Panic(BaseException):
    """As PyO3's PanicException, which is no Exception."""


def test_what_only_a_package_can_have_raised_on_the_probes_thread_is_a_reason():
    answer = judged(kernel=lambda: raise_(Panic("a panic in Rust")))
    assert (answer.ok, answer.stage) == (False, "import")
    assert answer.reason == "its import or self-test raised Panic: a panic in Rust"


def test_a_time_limit_beyond_what_the_system_can_wait_is_none():
    assert judged(timeout=1e300).ok


def test_without_a_thread_to_probe_on_the_call_is_answered_and_the_backend_asked_again(site, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    run = fb.Run()
    with registered(("acme", right), probed=False) as registry, fb.bind("fast", run=run):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            fb.attention(*qkv(), site=site)
        assert registry.verdicts == {}
        fb.attention(*qkv(), site=site)
    assert run.report()["attention"]["used"] == {"reference": 1, "acme": 1}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_while_another_thread_probes_does_not_wait_for_it(python):
    assert python(FORKED, PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), *sys.path])) == "the child: acme\n"


FORKED = """
import os, signal, threading, warnings
import torch, fuseboard as fb
from fakes import entry_of, hooks_of, qkv, registered, right

warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads, which is what is tried here
torch.set_num_threads(1)  # OpenMP's threads do not survive one

begun, go = threading.Event(), threading.Event()

def kernel():
    begun.set()
    go.wait(20)
    return right

def ask():
    run = fb.Run()
    with fb.bind("fast", run=run):
        fb.attention(*qkv(), site=site)
    return " ".join(run.report()["attention"]["used"])

site = fb.Site("forked")
with registered(entry_of("acme", **hooks_of(right) | {"kernel": kernel}), probed=False):
    thread = threading.Thread(target=ask)
    thread.start()
    begun.wait()
    child = os.fork()
    go.set()
    if child == 0:
        signal.alarm(20)
        print("the child:", ask(), flush=True)
        os._exit(0)
    thread.join()
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
