"""Kernels that crash, hang, exit, flood and lie, in real child processes; the packages are made here."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile

import pytest
import torch

from fuseboard import child, machine, verdicts
from fuseboard.settings import Settings

PLUGIN = """
import fuseboard as fb
import torch

@fb.hookimpl
def info():
    return fb.BackendInfo("acme's attention", requires={"acme-kernel": ">=1,<2"}, homepage="https://acme.example")

@fb.hookimpl
def constraints():
    return fb.Constraints(devices={"cpu"}, dtypes={torch.float32}, head_dims=fb.HeadDims(only={8}))

@fb.hookimpl
def exactness():
    return fb.Exactness.EXACT

@fb.hookimpl
def kernel(device):
    import acme_kernel
    return acme_kernel.attention
"""
AT_IMPORT = """
import ctypes, os, signal, subprocess, sys, time
{then}
import torch

def attention(q, k, v, *, mask, mask_info, causal, scale, dropout_p):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)
"""
IN_SELF_TEST = """
import ctypes, os, signal, subprocess, sys, time
import torch

def attention(q, k, v, *, mask, mask_info, causal, scale, dropout_p):
    {then}
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)
"""
FACTS = machine.facts([torch.device("cpu")])

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """Install a plugin `acme` and its kernel package, whose text is given, first on the path."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))
    (tmp_path / "left").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "left"))

    def install(kernel=None, plugin="", version="1.4"):
        point = "[fuseboard.backends]\nacme = acme_attention\n"
        about = "Metadata-Version: 2.1\nName: {}\n"
        files = {
            "acme_attention-1.dist-info/METADATA": about.format("acme-attention") + "Version: 0.3\n",
            "acme_attention-1.dist-info/entry_points.txt": point,
            "acme_attention.py": plugin + PLUGIN,
            "acme_kernel-1.dist-info/METADATA": about.format("acme-kernel") + (version and f"Version: {version}\n"),
            "acme_kernel.py": kernel or AT_IMPORT.format(then=""),
        }
        for name, text in files.items():
            file = site / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if not file.exists() or file.read_text() != text:  # a file that is written again is another stamp
                file.write_text(text)
        return site

    yield install
    assert list((tmp_path / "left").iterdir()) == []  # no child leaves a file behind
    assert "acme_kernel" not in sys.modules


@pytest.fixture
def ask(acme, tmp_path):
    """Ask a child about such a kernel."""

    def asked(kernel=None, *, timeout=60.0, plugin="", version="1.4", **options):
        acme(kernel, plugin, version)
        config = Settings(cache=str(tmp_path / "cache"))
        return child.probe("acme", "cpu", timeout=timeout, config=config, machine=FACTS, **options)

    return asked


def told(answer):
    return answer.ok, answer.stage, answer.reason


# ---- what a child says


def test_a_good_kernel_is_a_yes_with_every_stage_told_and_is_read_from_disk_the_next_time(ask, tmp_path):
    stages = []
    first = ask(on_stage=stages.append)
    again = ask(on_stage=lambda stage: pytest.fail(f"a child was started: {stage}"))

    assert told(first) == (True, "", "")
    assert stages == ["plugin", "probe", "import", "self-test"]
    assert (first.cached, again.cached) == (False, True)
    assert told(again) == told(first)
    (file,) = (tmp_path / "cache").iterdir()
    assert file.name.startswith("acme-cpu-")
    kept = json.loads(file.read_text())
    assert kept["key"]["plugin"][:2] == ["acme-attention", "0.3"]
    assert kept["requires"]["acme-kernel"][0] == "1.4"


def test_another_kernel_under_the_same_version_is_asked_about_again(ask):
    assert ask(timeout=60).ok
    broken = ask(AT_IMPORT.format(then="raise OSError('libacme.so: cannot open\\nmore')"))

    assert told(broken) == (False, "import", "import failed: OSError: libacme.so: cannot open")
    assert not broken.cached


@pytest.mark.slow
def test_fresh_asks_again_and_keeps_the_new_answer(ask, tmp_path, monkeypatch):
    passing = AT_IMPORT.format(then="if os.environ.get('ACME_OFF'): raise RuntimeError('off')")
    monkeypatch.setenv("ACME_OFF", "1")
    assert not ask(passing).ok
    monkeypatch.delenv("ACME_OFF")

    assert ask(passing).cached
    assert told(ask(passing, fresh=True)) == (True, "", "")
    assert ask(passing).ok


CRASHES = [
    ("os.abort()", "crashed (SIGABRT, abort)"),
    ("os.kill(os.getpid(), signal.SIGILL)", "crashed (SIGILL, illegal instruction)"),
    ("os.kill(os.getpid(), signal.SIGKILL)", "was killed (SIGKILL), as the system does when memory runs out,"),
    ("os.kill(os.getpid(), signal.SIGTERM)", "was ended (SIGTERM)"),
    ("os._exit(0)", "ended its process (exit status 0) without an answer"),
    ("os._exit(7)", "ended its process (exit status 7) without an answer"),
]
IN_QUICK = {(0, "its self-test"), (2, "its self-test"), (4, "its import")}


@posix
@pytest.mark.parametrize(
    ("then", "how", "where"),
    [
        pytest.param(
            *crash,
            where,
            marks=[] if (place, where) in IN_QUICK else [pytest.mark.slow],
            id=f"{place}-{where}",
        )
        for place, crash in enumerate(CRASHES)
        for where in ("its import", "its self-test")
    ],
)
def test_an_end_without_an_answer_is_a_reason_that_says_how_and_where(ask, then, how, where):
    answer = ask((AT_IMPORT if where == "its import" else IN_SELF_TEST).format(then=then))

    assert told(answer) == (False, "crash", f"{how} during {where}")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0xC0000005, "crashed (0xC0000005, access violation)"),
        (0xC0000409, "crashed (0xC0000409, abort)"),
        (3, "ended its process (exit status 3) without an answer"),
        pytest.param(-64, "was ended (SIGRTMAX)", marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux's")),
        pytest.param(-50, "was ended (signal 50)", marks=posix),
    ],
)
def test_every_way_to_end_has_words(code, words):
    assert child._ended(code) == words


@posix
def test_a_crash_shows_the_line_it_happened_at(ask):
    answer = ask(AT_IMPORT.format(then="print('loading acme')\nctypes.string_at(0)"))

    assert told(answer) == (False, "crash", "crashed (SIGSEGV, segmentation fault) during its import")
    assert answer.detail[0] == "loading acme"
    assert "Fatal Python error: Segmentation fault" in answer.detail
    assert any("acme_kernel.py" in line for line in answer.detail)


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        ("import no_such_library", "import failed: ModuleNotFoundError: No module named 'no_such_library'"),
        ("raise KeyboardInterrupt", "import failed: KeyboardInterrupt"),
        pytest.param("sys.exit(3)", "its import called sys.exit(3)", marks=pytest.mark.slow),
        pytest.param("raise ImportError('undefined symbol: _Z')", "import failed: ImportError: undefined symbol: _Z",
                     marks=pytest.mark.slow),
        pytest.param("torch.attention", "import failed: NameError: name 'torch' is not defined",
                     marks=pytest.mark.slow),
        pytest.param("sys.attention", "import failed: AttributeError: module 'sys' has no attribute 'attention'",
                     marks=pytest.mark.slow),
        pytest.param("raise RuntimeError('no GPU')", "import failed: RuntimeError: no GPU", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_an_import_that_raises_is_a_reason(ask, then, reason):
    assert told(ask(AT_IMPORT.format(then=then))) == (False, "import", reason)


@pytest.mark.slow
def test_a_package_without_the_function_is_a_reason(ask):
    reason = "import failed: AttributeError: module 'acme_kernel' has no attribute 'attention'"
    assert told(ask("import torch")) == (False, "import", reason)


@pytest.mark.slow
def test_a_kernel_that_is_wrong_is_a_reason(ask):
    answer = ask(IN_SELF_TEST.format(then="return q * float('nan')"))

    assert answer.stage == "self-test"
    assert answer.reason.endswith("its output is not finite")


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        pytest.param("2.0", "acme-kernel is 2.0, needed >=1,<2", marks=pytest.mark.slow),
        ("", "acme-kernel is installed without a readable version, needed >=1,<2"),
    ],
)
def test_a_version_out_of_range_or_missing_is_a_no_before_the_import(ask, version, reason):
    answer = ask(AT_IMPORT.format(then="os.abort()"), version=version)

    assert told(answer) == (False, "version", reason)


@posix
@pytest.mark.parametrize("fast_enough", ["time.sleep(600)", pytest.param("while True: pass", marks=pytest.mark.slow)])
def test_an_import_that_hangs_is_a_reason_and_shows_where(ask, fast_enough):
    answer = ask(AT_IMPORT.format(then=fast_enough), timeout=1)

    assert told(answer) == (False, "time limit", "did not end within 1 s during its import")
    assert any("acme_kernel.py" in line for line in answer.detail)


@pytest.mark.skipif(sys.platform != "linux", reason="a grandchild that left the session is found in /proc")
def test_a_hang_that_ignores_signals_is_killed_with_its_grandchildren_also_those_in_a_session_of_their_own(
    ask, tmp_path
):
    pipes = [tmp_path / "one", tmp_path / "two"]
    for pipe in pipes:
        os.mkfifo(pipe)
    ends = [os.open(pipe, os.O_RDONLY | os.O_NONBLOCK) for pipe in pipes]
    hold = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = open(sys.argv[1], "w")
held.write("x")
held.flush()
time.sleep(600)
"""
    then = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"    for place, pipe in enumerate({[str(pipe) for pipe in pipes]!r}):\n"
        f"        subprocess.Popen([sys.executable, '-c', {hold!r}, pipe], start_new_session=bool(place))\n"
        "    time.sleep(600)"
    )
    answer = ask(IN_SELF_TEST.format(then=then), timeout=2)

    assert told(answer) == (False, "time limit", "did not end within 2 s during its self-test")
    for end in ends:
        assert os.read(end, 1) == b"x"  # it was there
        assert select.select([end], [], [], 10)[0], "a grandchild lives"
        assert os.read(end, 1) == b""  # nobody holds the other end any more
        os.close(end)


def test_what_a_kernel_prints_is_no_answer_and_the_end_of_it_is_kept(ask):
    fake = json.dumps({"answer": {"ok": False, "reason": "forged", "stage": "import"}})
    then = (
        "for _ in range(20): sys.stdout.write('x' * (1 << 20))\n"
        "os.write(1, b'\\n\\xff\\x00\\x1b[31m garbage\\n')\n"
        f"print({fake!r}); print({fake!r}, file=sys.stderr)"
    )
    answer = ask(AT_IMPORT.format(then=then))

    assert told(answer) == (True, "", "")
    assert answer.detail[-3:] == ("\ufffd\ufffd\ufffd[31m garbage", fake, fake)
    assert max(map(len, answer.detail)) <= child.LINE
    assert len(answer.detail) <= child.LINES


@posix
def test_a_kernel_that_closes_every_file_still_gets_its_answer(ask):
    assert told(ask(AT_IMPORT.format(then="os.closerange(0, 256)"))) == (True, "", "")


@posix
def test_a_plugin_module_that_crashes_is_a_reason_and_a_fault(ask):
    crash = "import ctypes; ctypes.string_at(0)\n"
    answer = ask(plugin=crash)
    said = child.declare("acme")

    reason = "crashed (SIGSEGV, segmentation fault) during the import of its plugin"
    assert told(answer) == (False, "crash", reason)
    assert said["fault"] == reason
    assert (said["distribution"], said["version"], said["constraints"]) == ("acme-attention", "0.3", {})
    assert any("acme_attention.py" in line for line in said["detail"])


@pytest.mark.slow
def test_a_plugin_module_that_raises_is_a_reason_of_stage_plugin(ask, tmp_path):
    answer = ask(plugin="raise OSError('no disk')\n")

    assert told(answer) == (False, "plugin", f"OSError: no disk ({tmp_path / 'site' / 'acme_attention.py'}:1)")


def test_a_plugin_module_that_hangs_is_a_fault(acme):
    acme(plugin="import time; time.sleep(600)\n")

    assert child.declare("acme", timeout=1)["fault"] == "did not end within 1 s during the import of its plugin"


def test_a_plugin_says_what_it_is_without_its_kernel_being_imported(acme):
    acme(AT_IMPORT.format(then="os.abort()"))
    said = child.declare("acme")

    assert said["fault"] is None
    assert said["info"] == {
        "summary": "acme's attention", "requires": {"acme-kernel": ">=1,<2"}, "homepage": "https://acme.example",
    }  # fmt: skip
    assert said["exactness"] == "exact"
    assert (said["constraints"]["dtypes"], said["constraints"]["head_dims"]) == (["float32"], "8")
    assert said["install"] == "pip install --no-deps acme-attention"
    assert json.loads(json.dumps(said)) == said


@pytest.fixture
def three(acme, tmp_path):
    """Install a distribution with the backends `good`, `acme` and `last`; `acme`'s module begins with this text."""

    def install(plugin=""):
        acme(plugin=plugin)
        site = tmp_path / "site"
        for name in ("good", "last"):
            (site / f"acme_{name}.py").write_text(PLUGIN)
        points = "[fuseboard.backends]\ngood = acme_good\nacme = acme_attention\nlast = acme_last\n"
        (site / "acme_attention-1.dist-info/entry_points.txt").write_text(points)
        return ("good", "acme", "last")

    return install


@pytest.mark.slow
def test_what_one_distribution_ships_is_declared_in_one_child_as_it_is_alone(three, monkeypatch):
    names, asked, ask = three(), [], child._ask
    monkeypatch.setattr(child, "_ask", lambda question, *rest, **more: asked.append(1) or ask(question, *rest, **more))
    together = child.declare_together(names)

    assert len(asked) == 1
    assert together == {name: child.declare(name) for name in names}
    assert all(said["constraints"] for said in together.values())


@posix
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "fault", "printed"),
    [
        ("import ctypes; ctypes.string_at(0)\n", "crashed (SIGSEGV, segmentation fault)", None),
        ("raise OSError('no disk')\n", "OSError: no disk", None),
        ("print('hello from acme')\n", None, ["hello from acme"]),
    ],
)
def test_among_backends_that_are_asked_together_only_the_one_at_fault_is_blamed(three, plugin, fault, printed):
    said = child.declare_together(three(plugin))

    assert [said[name]["fault"] for name in ("good", "last")] == [None, None]
    assert [said[name]["detail"] for name in ("good", "last")] == [[], []]
    assert all(said[name]["constraints"] for name in ("good", "last"))
    assert said["acme"]["fault"] is fault if fault is None else fault in said["acme"]["fault"]
    assert printed is None or said["acme"]["detail"] == printed


def test_a_backend_that_is_not_installed_is_a_no_without_a_child():
    answer = child.probe("no-such", "cpu", machine=FACTS)

    assert told(answer) == (False, "plugin", "no installed plugin has a backend called 'no-such'")
    assert child.declare("no-such")["fault"] == answer.reason


def test_of_two_plugins_with_one_name_the_child_loads_what_the_registry_would(acme):
    site = acme()
    (site / "zeta-2.dist-info").mkdir()
    (site / "zeta-2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: zeta\nVersion: 2\n")
    (site / "zeta-2.dist-info" / "entry_points.txt").write_text("[fuseboard.backends]\nacme = zeta\n")

    def found(distribution=None, **settings):
        return child.find("acme", distribution, Settings(**settings)).distribution

    assert found() == "acme-attention"
    assert found(disable=frozenset({"acme-attention"})) == "zeta"
    assert found(disable=frozenset({"acme"})) == "acme-attention"
    assert found("zeta") == "zeta"
    assert child.find("acme", "omega") is None


@pytest.mark.slow
def test_a_blocked_backend_is_asked_about_all_the_same(ask, monkeypatch):
    monkeypatch.setenv("FUSEBOARD_DISABLE", "acme")
    assert ask().ok


@pytest.mark.slow
def test_a_device_that_is_not_there_is_a_no(acme, tmp_path):
    site = acme()
    text = (site / "acme_attention.py").read_text().replace('devices={"cpu"}', 'devices={"cpu", "cuda"}')
    (site / "acme_attention.py").write_text(text)
    answer = child.probe("acme", "cuda:63", config=Settings(cache="off"))

    assert (answer.ok, answer.stage) == (False, "device")
    assert answer.reason.startswith("there is no cuda:63 here: torch sees cpu")
    assert not list(tmp_path.glob("cache/*"))


def test_a_child_asks_no_child(ask, monkeypatch):
    """A kernel package that computes attention through the board at its import, in a host that asks children."""
    monkeypatch.setenv("FUSEBOARD_PROBE", "child")
    then = (
        "import fuseboard as fb, torch\n"
        "from fuseboard import child\n"
        "child.probe = lambda *_, **__: os.abort()\n"
        "q = torch.zeros(1, 1, 4, 8)\n"
        "with fb.bind('sdpa-cpu'): fb.attention(q, q, q, site=fb.Site('acme'))\n"
        "from fuseboard import registry\n"
        "assert registry.current().verdicts['sdpa-cpu', 'cpu'].ok"
    )
    assert told(ask(AT_IMPORT.format(then=then))) == (True, "", "")


@pytest.mark.slow
def test_a_module_beside_the_host_is_not_taken_for_the_standard_library(ask, tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)

    assert ask().ok


def test_a_full_device_is_a_no_that_is_not_kept(ask, tmp_path):
    answer = ask(IN_SELF_TEST.format(then="raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate')"))

    case = "float32, lengths 1x77, head dim 8"
    assert answer.reason == f"self-test failed ({case}): OutOfMemoryError: CUDA out of memory. Tried to allocate"
    assert list(tmp_path.glob("cache/*")) == []


@pytest.mark.slow
def test_an_error_of_the_one_who_listens_ends_the_child(ask, tmp_path):
    def stop(stage):
        raise ValueError(stage)

    with pytest.raises(ValueError, match="plugin"):
        ask(AT_IMPORT.format(then="time.sleep(600)"), on_stage=stop)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a child ends with its parent where the system can be told")
def test_a_host_that_is_killed_takes_its_child_along(acme, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    hold = (
        f"import time; held = open({str(tmp_path / 'pipe')!r}, 'w'); held.write('x'); held.flush(); time.sleep(600)\n"
    )
    acme(plugin=hold)
    code = f"""
import sys, tempfile
sys.path[:] = {sys.path!r}
from fuseboard import child
from fuseboard.settings import Settings
tempfile.tempdir = {str(tmp_path)!r}
child.probe("acme", "cpu", config=Settings(cache="off"), on_stage=lambda stage: print(stage, flush=True))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"plugin\n"
        assert select.select([end], [], [], 60)[0]
        assert os.read(end, 1) == b"x"
        process.kill()

    assert select.select([end], [], [], 10)[0], "the child lives"
    assert os.read(end, 1) == b""
    os.close(end)


def test_a_driver_or_library_out_of_order_is_a_fact_and_no_error(monkeypatch):
    def fail(*_arguments):
        raise RuntimeError("driver too old\nmore")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    monkeypatch.setattr(torch.backends.cudnn, "version", fail)
    found = machine.facts([torch.device("cuda", 0)])

    assert found["cudnn"] == "RuntimeError: driver too old"
    assert found["devices"] == [
        {"device": "cuda:0", "name": None, "capability": None, "error": "RuntimeError: driver too old"}
    ]


def test_only_a_device_of_a_known_kind_is_known_to_be_absent():
    assert machine.lacks(torch.device("cuda:63"))
    assert not machine.lacks(torch.device("cpu"))
    assert not machine.lacks(torch.device("cpu:0"))
    assert not machine.lacks(torch.device("meta"))


# ---- survey


def test_a_survey_says_what_torch_says_here(acme):
    found = child.survey()

    assert found["torch"] == torch.__version__
    assert found["error"] is None
    assert (found["cuda"], found["hip"]) == (torch.version.cuda, torch.version.hip)
    assert found["devices"][0] == FACTS["devices"][0]
    assert [each["device"] for each in found["devices"]] == [str(each) for each in machine.devices()]
    assert (found["sdpa"]["flash"], found["sdpa"]["math"]) == (True, True)
    assert child.survey() == found
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise ImportError('libcudart.so.13: cannot open')", "ImportError: libcudart.so.13: cannot open"),
        pytest.param(
            "import os; os.abort()",
            "a process that tried it crashed (SIGABRT, abort) during the import of torch",
            marks=posix,
        ),
    ],
)
def test_a_torch_that_cannot_be_imported_is_said(acme, tmp_path, text, error):
    (acme() / "torch.py").write_text(text)
    found = child.survey()
    answer = child.probe("acme", "cpu", config=Settings(cache=str(tmp_path / "cache")))

    assert (found["torch"], found["error"], found["devices"]) == (None, error, [])
    assert told(answer) == (False, "import", f"torch cannot be imported: {error}")


# ---- in the host: FUSEBOARD_PROBE=child

HOST = """
import json, sys, torch, fuseboard as fb
from fuseboard import child, registry
asked = []
run_child = child._ask
child._ask = lambda question, *rest, **options: asked.append(question["name"]) or run_child(question, *rest, **options)
q = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
run, site = fb.Run(), fb.Site("host")
with fb.bind(sys.argv[1] if len(sys.argv) > 1 else NAME, run=run):
    out = fb.attention(q, q, q, site=site)
assert torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, q, q), atol=1e-5)
verdict = registry.current().verdicts.get((BACKEND, "cpu"))
print(json.dumps([run.report()["attention"]["used"], verdict.ok, verdict.stage, verdict.reason, asked]))
"""


def host(python, cache, name, backend, **environ):
    code = f"NAME, BACKEND = {name!r}, {backend!r}\n{HOST}"
    return json.loads(python(code, FUSEBOARD_PROBE="child", FUSEBOARD_CACHE=str(cache), **environ))


def test_a_host_that_asks_children_is_answered_and_the_next_one_reads_the_disk(python, tmp_path):
    only = {"FUSEBOARD_DISABLE": "sdpa-math,flash,sage,xformers"}
    first = host(python, tmp_path / "cache", "fast", "sdpa-cpu", **only)
    second = host(python, tmp_path / "cache", "fast", "sdpa-cpu", **only)

    assert first[:2] == second[:2] == [{"sdpa-cpu": 1}, True]
    assert "sdpa-cpu" in first[4]
    assert second[4] == []


@posix
def test_a_kernel_that_crashes_never_meets_the_host(python, acme, tmp_path):
    acme(IN_SELF_TEST.format(then="ctypes.string_at(0)"))
    found = host(python, tmp_path / "cache", "acme", "acme", FUSEBOARD_DISABLE="sdpa,flash,sage,xformers")

    reason = "crashed (SIGSEGV, segmentation fault) during its self-test"
    assert found == [{"reference": 1}, False, "crash", reason, ["acme"]]


def test_a_verdict_of_the_doctor_serves_the_host(python, ask, tmp_path):
    """The host's second self-test would abort: it is not made."""
    assert ask(IN_SELF_TEST.format(then="if os.environ.get('ACME_HOST') and q.shape[2] > 60: os.abort()")).ok
    found = host(python, tmp_path / "cache", "acme", "acme", ACME_HOST="1")

    assert found == [{"acme": 1}, True, "", "", []]


@pytest.mark.gpu
def test_on_a_gpu_a_process_without_torch_and_the_host_share_a_verdict(tmp_path):
    """The one has what it knows of the machine from a child, the other from torch."""
    device = torch.device("cuda:0")
    surveyed, here = child.survey(), machine.facts([device])
    row = next(each for each in surveyed["devices"] if each["device"] == "cuda:0")

    assert row == here["devices"][0]
    for name in ("cpu", "cuda:0"):
        own = machine.facts([torch.device(name)])
        assert verdicts.key("x", "fuseboard-sdpa", name, surveyed) == verdicts.key("x", "fuseboard-sdpa", name, own)
    config = Settings(cache=str(tmp_path / "cache"))
    first = child.probe("sdpa-flash", "cuda:0", config=config)
    again = child.probe("sdpa-flash", "cuda:0", config=config, machine=here)
    assert told(first) == told(again) == (True, "", "")
    assert again.cached
