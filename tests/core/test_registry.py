from __future__ import annotations

import inspect
import logging
import math
import re
import sys
from types import ModuleType

import attrs
import fakes
import pytest
import torch
from fakes import CPU, Fake, entry, entry_of, hooks_of, in_threads, plugin, qkv, registered, right

import fuseboard as fb
from fuseboard import hookspecs, registry
from fuseboard.call import describe
from fuseboard.registry import Entry, Registry, install_hint
from fuseboard.settings import Settings


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.WARNING, "fuseboard")


def board(*entries, disable=()):
    return Registry(entries, Settings(disable=frozenset(disable)))


def only_fault(*entries):
    made = board(*entries)
    backends = made.backends()
    (fault,) = made.faults
    return fault, [each.name for each in backends]


def placed(text):
    """A fault's text with every place in this file or in the fakes as PLACE."""
    return re.sub(rf"\((?:{re.escape(__file__)}|{re.escape(fakes.__file__)}):\d+\)", "(PLACE)", text)


def loads(load, name="bad"):
    return Entry(name, load, "acme-kernels", "1.2")


# ---- good plugins


def test_a_good_plugin_becomes_a_frozen_record():
    hooks = hooks_of(Fake(), rank=0.5) | {
        "tolerance": lambda dtype: 0.25,
        "probe": lambda device: f"not on {device}",
        "known_bad": lambda: iter([fb.KnownBad("x", "link")]),
        "install_line": lambda torch_version: f"pip install for {torch_version}",
    }
    backend = board(entry_of("good", **hooks)).resolve("good")
    call, sizes = describe(*qkv())

    assert (backend.name, backend.distribution, backend.version) == ("good", "acme-kernels", "1.2")
    assert backend.info == fb.BackendInfo("a fake")
    assert (backend.exactness(call), backend.rank(call, sizes)) == (fb.Exactness.EXACT, 0.5)
    assert (backend.tolerance(torch.float32), backend.probe(CPU)) == (0.25, "not on cpu")
    assert backend.known_bad == (fb.KnownBad("x", "link"),)
    assert backend.install("2.9") == "pip install for 2.9"
    assert isinstance(backend.load(CPU), Fake)
    assert repr(backend) == "<Backend good of acme-kernels 1.2>"
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        backend.name = "other"


def test_a_missing_hook_means_the_cautious_answer():
    hooks = {name: hook for name, hook in hooks_of(Fake()).items() if name in hookspecs.REQUIRED}
    backend = board(entry_of("terse", **hooks)).resolve("terse")
    call, sizes = describe(*qkv())

    assert backend.exactness(call) is fb.Exactness.APPROXIMATE
    assert backend.rank(call, sizes) == float("inf")
    assert backend.probe(CPU) is None
    assert backend.known_bad == ()
    assert backend.install("2.9") == "pip install --no-deps acme-kernels"
    tolerances = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-4, "float64": 1e-9, "int8": 0.0}
    assert {name: backend.tolerance(getattr(torch, name)) for name in tolerances} == tolerances


def test_an_implementation_may_take_fewer_arguments_than_its_specification():
    hooks = hooks_of(Fake()) | {"tolerance": lambda: 0.5, "kernel": lambda: "the kernel"}

    backend = board(entry_of("few", **hooks)).resolve("few")
    assert (backend.tolerance(torch.float32), backend.load(CPU)) == (0.5, "the kernel")


class Methods:
    """A plugin that is an object of a class."""

    @fb.hookimpl
    def info(self):
        return fb.BackendInfo("x")

    @fb.hookimpl
    def constraints(self):
        return fb.Constraints(devices={"cpu"}, dtypes={torch.float32})

    @fb.hookimpl
    def kernel(self, device):
        return device


def test_a_plugin_may_be_a_module_or_any_object():
    module = ModuleType("acme")
    for name, hook in hooks_of(Fake()).items():
        setattr(module, name, fb.hookimpl(hook))

    made = board(Entry("module", lambda: module), Entry("object", Methods))
    assert [each.name for each in made.backends()] == ["module", "object"]
    assert made.resolve("object").load(CPU) == CPU


def test_a_hook_that_this_core_does_not_know_may_be_marked_optional():
    good = plugin(**hooks_of(Fake()))
    good.from_the_future = fb.hookimpl(optionalhook=True)(lambda call: 1)

    assert board(loads(lambda: good)).resolve("bad") is not None


def test_one_plugin_never_answers_for_another():
    first, second = hooks_of(Fake(), rank=1.0), hooks_of(Fake())
    del second["rank"]
    made = board(entry_of("first", **first), entry_of("second", **second))

    assert made.resolve("first").rank(*describe(*qkv())) == 1.0
    assert made.resolve("second").rank(*describe(*qkv())) == float("inf")


def test_a_plugin_is_loaded_when_asked_for_and_once_also_by_many_threads():
    loaded = []

    def load():
        loaded.append(1)
        return plugin(**hooks_of(Fake()))

    made = board(loads(load))
    assert made.names() == {"bad"}
    assert loaded == []
    assert len(set(in_threads(8, lambda i: made.resolve("bad")))) == 1
    assert loaded == [1]


def test_an_unknown_name_resolves_to_none():
    assert board().resolve("nothing") is None
    assert board().why_missing("nothing") is None


# ---- plugins at fault

ADVICE = "; import the kernel package inside kernel(), not at the top of the module."


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ImportError("libcudart.so.12: not found\nmore"), f"ImportError: libcudart.so.12: not found (PLACE){ADVICE}"),
        (ModuleNotFoundError("No module named 'ac'"), f"ModuleNotFoundError: No module named 'ac' (PLACE){ADVICE}"),
        (OSError("undefined symbol"), "OSError: undefined symbol (PLACE)"),
        (AttributeError("no such function"), "AttributeError: no such function (PLACE)"),
        (RuntimeError(), "RuntimeError (PLACE)"),
        (SystemExit(3), "its import called sys.exit(3)."),
    ],
)  # fmt: skip
def test_an_import_that_fails_is_a_fault_with_the_first_line_of_its_reason(error, text):
    def load():
        raise error

    fault, names = only_fault(loads(load), entry("good"))
    assert placed(fault.message) == text
    assert placed(str(fault)) == f"'bad' (acme-kernels 1.2): {text}"
    assert names == ["good"]


def test_an_error_whose_own_text_raises_is_a_fault_all_the_same():
    class Broken(Exception):
        def __str__(self):
            raise ValueError

    def load():
        raise Broken

    assert placed(only_fault(loads(load))[0].message) == "Broken (PLACE)"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, GeneratorExit])
def test_cancellation_passes_and_the_plugin_can_be_asked_for_again(stop):
    errors = [stop()]

    def load():
        if errors:
            raise errors.pop()
        return plugin(**hooks_of(Fake()))

    made = board(loads(load))
    with pytest.raises(stop):
        made.resolve("bad")
    assert made.faults == []
    assert made.resolve("bad") is not None


def test_an_import_that_fails_is_tried_once():
    tried = []

    def load():
        tried.append(1)
        raise ImportError

    made = board(loads(load))
    for _ in range(3):
        assert made.resolve("bad") is None
    assert tried == [1]
    assert made.names() == frozenset()


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ({}, "it lacks the required hook info and constraints and kernel (marked @fuseboard.hookimpl)."),
        (
            {"info": lambda: fb.BackendInfo("x"), "constraints": lambda: None},
            "it lacks the required hook kernel (marked @fuseboard.hookimpl).",
        ),
        (hooks_of(Fake()) | {"info": lambda: "a kernel"}, "hook info gave 'a kernel'; expected BackendInfo (PLACE)."),
        (hooks_of(Fake()) | {"info": lambda: None}, "hook info gave None; expected BackendInfo (PLACE)."),
        (
            hooks_of(Fake()) | {"constraints": lambda: {"a": 1}},
            "hook constraints gave {'a': 1}; expected Constraints (PLACE).",
        ),
        (
            hooks_of(Fake()) | {"known_bad": lambda: ["sm_120"]},
            "hook known_bad gave 'sm_120'; expected KnownBad (PLACE).",
        ),
        (
            hooks_of(Fake()) | {"known_bad": lambda: 3},
            "hook known_bad raised TypeError: 'int' object is not iterable (PLACE).",
        ),
        (
            hooks_of(Fake()) | {"constraints": lambda: fb.Constraints(devices="cpu", dtypes=())},
            "hook constraints raised ValueError: Constraints.devices is 'cpu'; "
            "expected a set of torch's device types, such as 'cpu' and 'cuda' (PLACE).",
        ),
        (
            hooks_of(Fake()) | {"info": lambda: fb.BackendInfo("x", requires={"torch": "new"})},
            "hook info raised ValueError: BackendInfo.requires 'new': 'new' is not an operator and a version. "
            "Operators are >=, <=, ==, !=, >, <; terms are joined by commas, as in '>=2.6,<3' (PLACE).",
        ),
    ],
)
def test_a_hook_that_is_missing_or_of_the_wrong_type_is_a_fault(hooks, message):
    fault, names = only_fault(entry_of("bad", **hooks), entry("good"))

    assert placed(fault.message) == message
    assert names == ["good"]


def test_an_unknown_hook_is_a_fault():
    fault, _ = only_fault(entry_of("bad", **hooks_of(Fake()), tolerence=lambda dtype: 1.0))

    assert placed(fault.message) == (
        "unknown hook 'tolerence' (PLACE). Did you mean 'tolerance'? Hooks are info, constraints, known_bad, "
        "install_line, probe, kernel, tolerance, exactness, rank."
    )


@pytest.mark.parametrize("name", ["exactness", "rank", "kernel"])
def test_a_function_with_a_hooks_name_and_without_the_mark_is_a_fault(name):
    module = ModuleType("acme")
    for hook, function in hooks_of(Fake()).items():
        setattr(module, hook, fb.hookimpl(function))

    def forgotten(call):
        pytest.fail("it was called")

    forgotten.__module__ = "acme"
    setattr(module, name, forgotten)

    fault, _ = only_fault(loads(lambda: module))
    assert placed(fault.message) == (
        f"function {name} has a hook's name and no @fuseboard.hookimpl; mark it, or rename it (PLACE)."
    )


def test_a_method_with_a_hooks_name_and_without_the_mark_is_a_fault():
    class Plugin(Methods):
        def rank(self, call):
            return 1.0

    assert only_fault(loads(Plugin))[0].message.startswith("function rank has a hook's name and no @fuseboard.hookimpl")


def test_what_a_plugin_imports_under_a_hooks_name_is_its_own_affair():
    module = ModuleType("acme")
    for hook, function in hooks_of(Fake()).items():
        setattr(module, hook, fb.hookimpl(function))
    module.probe, module.tolerance = logging.info, 3

    assert board(loads(lambda: module)).resolve("bad") is not None


def test_a_wrong_signature_is_a_fault_that_shows_the_right_one():
    fault, _ = only_fault(entry_of("bad", **hooks_of(Fake()) | {"tolerance": lambda dtypes: 1.0}))

    assert "dtypes" in fault.message
    assert placed(fault.message).endswith(" (PLACE). The hook is tolerance(dtype: 'torch.dtype') -> 'float'.")


def test_a_class_in_place_of_its_instance_is_a_fault():
    fault, _ = only_fault(loads(lambda: Methods))
    assert fault.message


def test_a_module_without_any_hook_is_a_fault():
    assert "it lacks the required hook" in only_fault(loads(lambda: sys))[0].message
    assert "it lacks the required hook" in only_fault(loads(lambda: None))[0].message


def raise_(error):
    raise error


LINE = "pip install --no-deps acme-kernels"


@pytest.mark.parametrize(
    ("hook", "bad", "said", "answer"),
    [
        ("exactness", lambda call: raise_(KeyError("x")), "raised KeyError: 'x'", fb.Exactness.APPROXIMATE),
        ("exactness", lambda call: "exact", "gave 'exact'; expected Exactness", fb.Exactness.APPROXIMATE),
        ("rank", lambda call: raise_(KeyError("x")), "raised KeyError: 'x'", float("inf")),
        ("rank", lambda call: None, "gave None; expected int or float", float("inf")),
        ("tolerance", lambda dtype: raise_(KeyError("x")), "raised KeyError: 'x'", 0.0),
        ("tolerance", lambda dtype: "2e-3", "gave '2e-3'; expected int or float", 0.0),
        *(
            ("tolerance", lambda dtype, bad=bad: bad, f"gave {bad}; expected a number of 0 or more and below 1", 0.0)
            for bad in (10.0, float("inf"), float("nan"), -1)
        ),
        ("rank", lambda call: float("nan"), "gave nan; expected microseconds, 0 or more", float("inf")),
        ("rank", lambda call: -5, "gave -5; expected microseconds, 0 or more", float("inf")),
        ("install_line", lambda torch_version: raise_(KeyError("x")), "raised KeyError: 'x'", LINE),
        ("install_line", lambda torch_version: None, "gave None; expected str", LINE),
    ],
)
def test_a_hook_that_fails_later_gets_the_cautious_answer_and_one_fault(hook, bad, said, answer, caplog):
    made = board(entry_of("bad", **hooks_of(Fake()) | {hook: bad}))
    backend = made.resolve("bad")
    call, sizes = describe(*qkv())
    given = {
        "exactness": (call,),
        "rank": (call, sizes),
        "tolerance": (torch.float32,),
        "install_line": ("2.9",),
    }[hook]

    assert [getattr(backend, "install" if hook == "install_line" else hook)(*given) for _ in range(3)] == [answer] * 3
    (fault,) = made.faults
    assert placed(fault.message) == f"hook {hook} {said} (PLACE). Taken instead: {answer}."
    (line,) = (each.getMessage() for each in caplog.records)
    assert line == f"plugin at fault: {fault}"  # and not that it is ignored: it is used


def test_a_fault_tells_the_plugins_line_and_neither_the_cores_nor_that_of_a_package_it_calls(here):
    text = GOOD.replace("return fb.BackendInfo", "return helped")
    text += "\n\ndef helped(summary):\n    import fractions\n    return fractions.Fraction(summary)\n"
    here("bad-kernels", "[fuseboard.backends]\nbad = bad_plugin\n", bad_plugin=text)
    made = Registry(config=Settings())
    made.resolve("bad")

    (fault,) = made.faults_of("bad")
    file = sys.modules["bad_plugin"].__file__
    assert fault.message == (
        "hook info raised ValueError: Invalid literal for Fraction: 'acme' "
        f"({file}:{text.splitlines().index('    return fractions.Fraction(summary)') + 1})."
    )


def test_the_faults_of_a_backend_are_its_own_and_not_those_of_a_namesake_that_is_not_used():
    mine = hooks_of(Fake()) | {"rank": lambda: None}
    made = board(entry_of("x", "a-kernels", **mine), entry_of("x", "b-kernels", **hooks_of(2)), entry_of("worse"))
    made.resolve("x").rank(*describe(*qkv()))
    made.resolve("worse")

    assert len(made.faults) == 3
    assert [(each.distribution, "hook rank" in each.message) for each in made.faults_of("x")] == [("a-kernels", True)]
    assert [each.name for each in made.faults_of("worse")] == ["worse"]
    assert made.faults_of("nothing") == []


def test_a_hook_that_fails_later_does_not_harm_the_call(site):
    hooks = hooks_of(Fake()) | {"rank": lambda call: raise_(KeyError("x"))}
    with registered(entry_of("bad", **hooks)), fb.bind("fast"):
        assert fb.attention(*qkv(), site=site).shape == (1, 2, 4, 8)


def test_a_fault_is_logged_once(caplog):
    made = board(entry_of("bad"))
    for _ in range(3):
        made.resolve("bad")

    assert [each.getMessage() for each in caplog.records] == [
        "plugin ignored: 'bad' (acme-kernels 1.2): it lacks the required hook info and constraints and kernel "
        "(marked @fuseboard.hookimpl)."
    ]


# ---- names


def test_of_two_plugins_with_one_name_the_distribution_of_the_install_hints_wins():
    mine = entry_of("sage", "a-sage", **hooks_of("mine"))
    known = entry_of("sage", "FuseBoard_Sage", **hooks_of("known"))
    for order in ([mine, known], [known, mine]):
        made = board(*order)
        assert made.resolve("sage").distribution == "FuseBoard_Sage"
        (fault,) = made.faults
        assert str(fault) == (
            "'sage' (a-sage 1.2): FuseBoard_Sage 1.2 has a backend of that name, and is used; uninstall one."
        )


def test_of_two_unknown_plugins_with_one_name_the_first_by_distribution_wins_whatever_the_order():
    one, two = entry_of("x", "b-kernels", **hooks_of(1)), entry_of("x", "a-kernels", **hooks_of(2))

    assert {board(*order).resolve("x").distribution for order in ([one, two], [two, one])} == {"a-kernels"}


@pytest.mark.parametrize("name", ["auto", "exact", "fast", "tuned", "reference", "Flash", "a b", "", "-x", "a,b", "é"])
def test_a_name_that_means_something_else_is_a_fault(name):
    fault, names = only_fault(entry(name))

    assert names == []
    assert fault.message == (
        f"a backend cannot be called {name!r}: use a word of a-z, 0-9 and '-_.' that is no policy."
    )


@pytest.mark.parametrize("word", ["sage", "fuseboard-sage", "fuseboard_sage", "sage3"])
def test_a_plugin_is_blocked_by_its_backends_name_or_by_its_distributions(word):
    def load():
        pytest.fail("a blocked plugin was loaded")

    entries = [Entry(name, load, "fuseboard-sage", "1") for name in ("sage", "sage3")]
    made = board(*entries, entry("good"), disable={word})
    blocked = {"sage", "sage3"} if word != "sage3" else {"sage3"}

    assert set(made.disabled) == blocked
    assert made.disabled["sage3"] == f"it is blocked by FUSEBOARD_DISABLE={word}."
    assert made.names() == {"good", "sage", "sage3"} - blocked
    assert made.why_missing("sage3") == made.disabled["sage3"]


def test_a_name_of_which_one_shipper_is_blocked_is_not_blocked():
    one, two = entry_of("x", "a-kernels", **hooks_of(1)), entry_of("x", "b-kernels", **hooks_of(2))
    for blocked, used in (("b-kernels", "a-kernels"), ("a-kernels", "b-kernels")):
        made = board(one, two, disable={blocked})

        assert made.resolve("x").distribution == used
        assert (made.disabled, made.why_missing("x"), made.faults) == ({}, None, [])
    assert list(board(one, two, disable={"x"}).disabled) == ["x"]


def test_a_blocked_name_that_nobody_has_is_warned_of(caplog):
    board(entry("good"), disable={"sgae", "good"})

    assert [each.getMessage() for each in caplog.records] == [
        "FUSEBOARD_DISABLE names 'sgae', which no installed plugin or backend is called."
    ]


def test_the_install_hints_know_first_party_names_only():
    assert install_hint("flash") == "pip install --no-deps fuseboard-flash flash-attn"
    assert install_hint("acme") is None


# ---- the process's registry


def test_a_registry_is_the_processs_for_a_block():
    with registered(entry("a")) as outer:
        with registered(entry("b")) as inner:
            assert registry.current() is inner
        assert registry.current() is outer


def test_the_processs_registry_is_made_once(python):
    out = python(
        "import threading\n"
        "from fuseboard import registry\n"
        "found = []\n"
        "threads = [threading.Thread(target=lambda: found.append(registry.current())) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print(len(set(found)), len(found))\n"
    )
    assert out == "1 8\n"


# ---- real entry points


@pytest.fixture
def installed(tmp_path):
    """Install a distribution with one backend on a path of its own."""

    def install(name, entry_points, metadata="Metadata-Version: 2.1\nName: {name}\nVersion: 3.1\n", **modules):
        info = tmp_path / f"{name.replace('-', '_')}-3.1.dist-info"
        info.mkdir()
        if metadata is not None:
            (info / "METADATA").write_text(metadata.format(name=name))
        (info / "entry_points.txt").write_text(entry_points)
        for module, text in modules.items():
            (tmp_path / f"{module}.py").write_text(text)
        return str(tmp_path)

    return install


GOOD = """
import fuseboard as fb

@fb.hookimpl
def info():
    return fb.BackendInfo("acme")

@fb.hookimpl
def constraints():
    import torch
    return fb.Constraints(devices={"cpu"}, dtypes={torch.float32}, head_dims=fb.HeadDims(only={64}))

@fb.hookimpl
def kernel(device):
    import acme_kernel
    return acme_kernel.attention
"""
KERNEL = """
from torch.nn.functional import scaled_dot_product_attention

def attention(q, k, v, *, mask, mask_info, causal, scale, dropout_p):
    return scaled_dot_product_attention(q, k, v)
"""
ASK = """
import sys
sys.path.insert(0, {path!r})
import logging; logging.basicConfig(level="WARNING", stream=sys.stdout, format="%(message)s")
import torch, fuseboard as fb
from fuseboard import registry
site, q = fb.Site("s"), torch.randn(1, 1, 4, 64)
"""
ENTRY = "[fuseboard.backends]\nacme = acme_plugin\n"


def test_an_installed_plugin_is_found_by_its_entry_point_and_loads_no_kernel_before_its_time(installed, python):
    path = installed("acme-kernels", ENTRY, acme_plugin=GOOD, acme_kernel=KERNEL)
    out = python(
        ASK.format(path=path) + "print('acme' in registry.current().names(), 'acme_plugin' in sys.modules)\n"
        "backend = registry.current().resolve('acme'); print(backend, 'acme_kernel' in sys.modules)\n"
        "with fb.bind('acme'):\n"
        "    fb.attention(q[..., :8], q[..., :8], q[..., :8], site=site)\n"
        "    print('acme_kernel' in sys.modules)\n"
        "    run = fb.Run()\n"
        "with fb.bind('acme', run=run): fb.attention(q, q, q, site=site)\n"
        "print('acme_kernel' in sys.modules, run.report()['attention']['used'])\n"
    )

    assert out.splitlines() == [
        "True False",
        "<Backend acme of acme-kernels 3.1> False",
        "False",
        "True {'acme': 1}",
    ]


@pytest.fixture
def here(installed, monkeypatch):
    """Have the path of `installed` searched in this process, and forget its modules afterwards."""
    path = installed("acme-kernels", ENTRY, acme_plugin=GOOD, acme_kernel=KERNEL)
    monkeypatch.syspath_prepend(path)
    yield installed
    for name in ("acme_plugin", "acme_kernel", "bad_plugin"):
        sys.modules.pop(name, None)


def acme():
    """The installed plugin, looked up afresh."""
    return Registry(config=Settings()).resolve("acme")


def test_a_plugin_that_is_installed_and_faulty_leaves_the_others_alone(here):
    points = "[fuseboard.backends]\nbad = bad_plugin\nworse = nowhere.at_all\nworst = no entry point\n"
    here("bad-kernels", points, bad_plugin="import sys; sys.exit()")
    made = Registry(config=Settings())

    assert "acme" in [each.name for each in made.backends()]
    assert {each.name for each in made.faults} >= {"bad", "worse", "worst"}
    (worse,) = made.faults_of("worse")
    assert worse.message == "ModuleNotFoundError: No module named 'nowhere'"  # it has no top of a module to mend


@pytest.mark.parametrize("metadata", [None, "", "\xff\xfe nonsense"])
def test_damaged_metadata_harms_nobody(here, metadata):
    here("bad-kernels", "[fuseboard.backends]\nodd = acme_plugin\n", metadata)
    made = Registry(config=Settings())

    assert made.resolve("acme") is not None
    assert made.resolve("odd") is not None


def test_an_unreadable_list_of_entry_points_hides_only_its_own(here, caplog):
    here("bad-kernels", "[fuseboard.backends]\nthis is no entry point\n")

    assert acme() is not None
    if caplog.records:  # not every version of Python minds
        assert [each.getMessage() for each in caplog.records] == [
            "an installed distribution has damaged metadata; plugins are looked up one distribution at a time."
        ]


def test_a_blocked_plugin_is_not_imported(here):
    made = Registry(config=Settings(disable=frozenset({"acme"})))

    made.backends()
    assert "acme_plugin" not in sys.modules
    assert acme() is not None
    assert "acme_plugin" in sys.modules
    assert "acme_kernel" not in sys.modules


# ---- the specifications


def test_every_hook_says_what_a_missing_one_means_or_that_it_is_required():
    hooks = {name: hook for name, hook in vars(hookspecs).items() if hasattr(hook, "fuseboard_spec")}

    assert len(hooks) == 9
    for name, hook in hooks.items():
        expected = "Required" if name in hookspecs.REQUIRED else "Missing:"
        assert expected in inspect.getdoc(hook), name
        assert hook.fuseboard_spec["firstresult"], name


@pytest.mark.parametrize("rank", [10**400, torch.ones(3, 3)])
def test_what_a_hook_gives_wrongly_is_shown_on_one_line(rank):
    with registered(entry_of("acme", **hooks_of(right) | {"rank": lambda: rank})) as registry:
        backend = registry.resolve("acme")
        assert backend.rank(None, None) == math.inf
        (fault,) = registry.faults
    assert re.search(r"hook rank gave .{1,123}; expected int or float \(.+:\d+\). Taken instead: inf.$", fault.message)


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ({"info": lambda: fb.BackendInfo(None)}, "BackendInfo.summary is None; expected str"),
        ({"info": lambda: fb.BackendInfo("x", homepage=3)}, "BackendInfo.homepage is 3; expected str"),
        ({"info": lambda: fb.BackendInfo("x", {1: ">=2"})}, "BackendInfo.requires has the name 1; expected"),
        ({"known_bad": lambda: [fb.KnownBad("x", None)]}, "KnownBad.link is None; expected str"),
        ({"known_bad": lambda: [fb.KnownBad("x", "y", call=True)]}, "KnownBad.call is True; expected Callable or None"),
        ({"constraints": lambda: fb.Guard("x", True, "y")}, "Guard.check is True; expected Callable"),
        ({"constraints": lambda: fb.Guard(7, print, "y")}, "Guard.rule is 7; expected str"),
    ],
)
def test_a_declaration_of_the_wrong_type_is_a_fault_that_names_it(hooks, message):
    with registered(entry_of("acme", **hooks_of(right) | hooks)) as registry:
        assert registry.resolve("acme") is None
        (fault,) = registry.faults
    assert message in fault.message


def test_an_entry_point_that_says_nothing_is_a_fault_that_shows_it(tmp_path, monkeypatch):
    folder = tmp_path / "acme-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[fuseboard.backends]\nacme = :\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry(config=Settings(disable=frozenset({"sdpa"})))
    assert registry.resolve("acme") is None
    assert registry.faults_of("acme")[0].message == "its entry point is ':'; expected 'module' or 'module:object'."


def test_a_plugin_that_asks_for_all_backends_while_it_is_imported_is_loaded_once():
    loads = []

    def load():
        loads.append(registry.current().backends())
        return plugin(**hooks_of(right))

    with registry.use(Registry([Entry("acme", load, "acme-kernels", "1.2")], Settings())) as made:
        (backend,) = made.backends()
    assert (backend.name, loads, made.faults) == ("acme", [[]], [])
