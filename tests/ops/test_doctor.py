"""`fuseboard doctor` over fake packages that crash, hang, print and lie, in real processes."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import os
import re
import site
import sys
from pathlib import Path

import pytest
import torch
from boards import KERNEL, PLUGIN, Board
from pages import BLOCK, PAGES, printed

import fuseboard
from fuseboard import child, settings
from fuseboard.ops import cli, environment, parallel, table
from fuseboard.ops.row import Row
from fuseboard.probe import _in_range
from fuseboard.registry import Entry, Registry

ROOT = Path(__file__).parents[2]

KNOWN_BAD = """[
    fb.KnownBad("wrong on Sundays", "https://example.org/1", "good-kernel", ">=2,<2.5", call=lambda call: call.causal),
    fb.KnownBad("wrong before", "https://example.org/2", "good-kernel", "<2"),
    fb.KnownBad("decided by the plugin", "https://example.org/3", call=lambda call: call.grad),
]"""

KERNELS = {
    "crash": "import ctypes\nctypes.string_at(0)\n",
    "abort": "import os\nos.abort()\n",
    "hang": "import time\nwhile True:\n    time.sleep(0.1)\n",
    "loud": f"for _ in range(40000): print('x' * 99)\nprint('last words')\n{KERNEL}",
    "liar": "__version__ = '1.0'\ndef attend(): pass\n",
    "wrong": KERNEL.replace("return ", "return 1.1 * "),
    "late": KERNEL.replace("return ", "import ctypes; ctypes.string_at(0); return "),
    "loose": "import torch\ntorch.backends.cuda.enable_flash_sdp(False)\n" + KERNEL,
}


SLIPS = (
    PLUGIN.format(name="slip", requires={}, devices=("cpu",), known_bad="()").replace("fb.Exactness.EXACT", "True")
    + "\n@fb.hookimpl\ndef rank(call, sizes):\n    return sizes.lenght\n"
)
"""A plugin that works, and whose hooks `exactness` and `rank` fail."""


@pytest.fixture(scope="module")
def sick(tmp_path_factory):
    """One run over every kind of plugin, its settings partly wrong; and what it left."""
    made = Board(tmp_path_factory.mktemp("sick"))
    made.plugin("good", known_bad=KNOWN_BAD)
    for name, kernel in KERNELS.items():
        made.plugin(name, kernel)
    made.plugin("syntax", plugin="def info(:\n")
    made.plugin("stuck", plugin=KERNELS["hang"])
    made.plugin("slip", plugin=SLIPS)
    made.plugin("absent", kernel=None)
    made.plugin("far", kernel=None, devices=("cuda",))
    made.plugin("shut")
    made.plugin("twice", distribution="twice-a")
    made.distribution("twice-b", entry_points="twice = somewhere_else")
    names = ["good", *KERNELS, "syntax", "stuck", "slip", "absent", "far", "shut", "twice"]
    made.names = names
    chosen = [word for name in names for word in ("--backend", name)]
    made.done = made.run(
        "doctor", "--json", "--timeout", "2", "--device", "cpu", *chosen, python=("-X", "importtime"),
        FUSEBOARD_DISABLE="shut,nobody", FUSEBOARD_DEBUG="mask", FUSEBOARD_DISABEL="good",
    )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def found(sick):
    assert sick.done.stdout, [line for line in sick.done.stderr.splitlines() if "import time:" not in line]
    return json.loads(sick.done.stdout)


@pytest.fixture(scope="module")
def brief(found, sick):
    """The same with short paths: how long a test's folders are called is not the report's doing."""
    return json.loads(json.dumps(found).replace(found["cache"]["folder"], "/cache").replace(str(sick.site), "/site"))


@pytest.fixture(scope="module")
def states(found):
    return {each["name"]: each for each in found["backends"]}


# ---- what it finds out


def test_each_kind_of_plugin_has_its_state(states):
    assert {name: each["state"] for name, each in states.items()} == {
        "good": "works", "crash": "broken", "abort": "broken", "hang": "broken", "loud": "works", "liar": "broken",
        "late": "broken", "slip": "works",
        "wrong": "broken", "syntax": "faulty", "stuck": "faulty", "absent": "not installed", "far": "other device",
        "shut": "blocked", "twice": "works", "loose": "works",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "stage", "reason"),
    [
        ("crash", "crash", r"crashed \(SIGSEGV, segmentation fault\) during its import"),
        ("abort", "crash", r"crashed \(SIGABRT, abort\) during its import"),
        ("hang", "time limit", r"within 2 s"),
        ("late", "crash", r"crashed \(SIGSEGV, segmentation fault\) during its self-test"),
        ("liar", "import", r"import failed: AttributeError: .*'liar_kernel' has no attribute 'attention'"),
        ("wrong", "self-test", r"its output is off by 0\.\d+, tolerance 0\.0001"),
    ],
)
def test_a_backend_that_cannot_run_says_why_and_at_which_stage(states, name, stage, reason):
    (at,) = states[name]["devices"]

    assert (at["device"], at["state"], at["stage"]) == ("cpu", "broken", stage)
    assert re.search(reason, at["reason"]), at["reason"]
    assert states[name]["reason"] == at["reason"]
    assert states[name]["install"].startswith(f"pip install --no-deps {name}-kernel  # for 2.")


def test_what_a_plugin_declares_comes_from_the_plugin(states):
    good = states["good"]

    assert (good["summary"], good["exactness"], good["homepage"]) == ("a fake", "exact", "https://example.org")
    assert (good["distribution"], good["version"]) == ("good-plugin", "1.0")
    assert good["constraints"]["devices"] == ["cpu"]
    assert good["constraints"]["dtypes"] == ["float32"]
    assert good["packages"] == [{"name": "good-kernel", "installed": "2.0", "wanted": ">=2,<3", "fits": True}]


def test_only_known_bad_combinations_of_what_is_installed_are_listed(states):
    assert [(each["reason"], each["link"]) for each in states["good"]["known_bad"]] == [
        ("wrong on Sundays", "https://example.org/1"),
        ("decided by the plugin", "https://example.org/3"),
    ]


def test_a_plugin_that_cannot_be_loaded_is_faulty_and_not_tried(states):
    assert "SyntaxError" in states["syntax"]["reason"]
    assert states["stuck"]["reason"] == "did not end within 2 s during the import of its plugin"
    for name in ("syntax", "stuck"):
        assert states[name]["devices"] == []


def test_a_hook_that_fails_is_told_though_the_backend_works(sick, states):
    place = f"{sick.site / 'slip_plugin.py'}:"
    exactness, rank = states["slip"]["faults"]

    assert exactness.startswith(f"hook exactness gave True; expected Exactness ({place}")
    assert rank.startswith("hook rank raised AttributeError: 'Sizes' object has no attribute 'lenght'")
    assert f"({place}{SLIPS.splitlines().index('    return sizes.lenght') + 1})" in rank
    assert {name for name, each in states.items() if each["faults"]} == {"slip"}


def test_a_failing_hook_alone_is_status_1_also_when_the_verdict_comes_from_disk(board):
    board.plugin("slip", plugin=SLIPS)
    runs = [board.run("doctor", "--json", "--backend", "slip", "--device", "cpu") for _ in range(2)]
    first, again = (json.loads(done.stdout) for done in runs)

    assert [done.returncode for done in runs] == [1, 1]
    assert first["summary"] == again["summary"] == "failing hooks: slip"
    assert [each["backends"][0]["devices"][0]["cached"] for each in (first, again)] == [False, True]
    assert len(first["backends"][0]["faults"]) == 2
    assert first["backends"][0]["faults"] == again["backends"][0]["faults"]


def test_what_fails_when_it_is_called_is_to_be_reported_and_not_installed_again(found, states):
    text = " ".join(table.plain(list(table.sections(found)), 80).split())

    for name in ("wrong", "late"):
        report = "Report it: https://example.org; until then, block it: FUSEBOARD_DISABLE="
        assert f"{states[name]['reason']}. {report}{name}" in text
        assert " ".join(states[name]["install"].split()) not in text
    assert " ".join(states["crash"]["install"].split()) in text


def test_an_absent_kernel_package_is_told_apart_from_a_broken_one(states):
    absent = states["absent"]

    assert absent["reason"] == "absent-kernel is not installed"
    assert absent["packages"] == [{"name": "absent-kernel", "installed": None, "wanted": ">=2,<3", "fits": None}]
    assert states["far"]["reason"] == "runs on cuda"


def test_a_blocked_plugin_is_never_loaded_and_names_its_setting(states):
    assert states["shut"]["reason"] == "it is blocked by FUSEBOARD_DISABLE=shut."
    assert states["shut"]["summary"] is None
    assert states["shut"]["distribution"] == "shut-plugin"


def test_two_plugins_of_one_name_are_a_fault_that_names_both(found, states):
    (fault,) = found["faults"]

    assert states["twice"]["distribution"] == "twice-a"
    assert (fault["name"], fault["distribution"]) == ("twice", "twice-b")
    assert fault["message"] == "twice-a 1.0 has a backend of that name, and is used; uninstall one."


def test_what_a_child_prints_is_kept_in_part_and_stays_off_the_output(sick, states):
    (at,) = states["loud"]["devices"]

    assert "last words" in at["detail"][-1]
    assert len(json.dumps(at)) < 20_000
    assert "last words" not in sick.done.stderr


def test_settings_are_shown_with_their_source_and_a_wrong_one_with_its_problem(sick, found):
    shown = {each["name"]: (each["value"], each["source"]) for each in found["settings"]}
    problems = {each["name"]: each["problem"] for each in found["settings"] if each["problem"]}

    assert shown == {
        "FUSEBOARD_DISABLE": ("nobody, shut", "environment"),
        "FUSEBOARD_DEBUG": ("off", "default"),
        "FUSEBOARD_TEST": ("off", "default"),
        "FUSEBOARD_PROBE": ("here", "default"),
        "FUSEBOARD_PROBE_TIMEOUT": ("300", "default"),
        "FUSEBOARD_CACHE": (str(sick.cache), "environment"),
    }
    assert problems == {
        "FUSEBOARD_DEBUG": "FUSEBOARD_DEBUG='mask': mask means nothing here; allowed, comma separated: masks."
    }
    assert found["unknown_settings"] == [{"name": "FUSEBOARD_DISABEL", "nearest": "FUSEBOARD_DISABLE"}]
    assert found["notes"] == ["FUSEBOARD_DISABLE names 'nobody', which no installed plugin or backend is called."]


def test_the_sum_of_it_is_status_1_and_a_sentence(sick, found):
    assert sick.done.returncode == found["status"] == 1
    assert found["summary"] == (
        "broken: crash, abort, hang, liar, wrong, late; faulty: syntax, stuck; failing hooks: slip; "
        "ignored plugins: twice; wrong settings: FUSEBOARD_DEBUG"
    )


def test_neither_torch_nor_a_plugin_nor_a_kernel_is_loaded_by_the_command_itself(sick):
    loaded = re.findall(r"import time:.*\|\s*([\w.]+)$", sick.done.stderr, re.MULTILINE)

    assert "fuseboard.ops.table" in loaded
    heavy = {"torch", "numpy", "rich", *(f"{name}_{kind}" for name in sick.names for kind in ("plugin", "kernel"))}
    assert not heavy & set(loaded)


def test_verdicts_are_kept_and_counted(sick, found):
    assert found["cache"] == {"folder": str(sick.cache), "verdicts": len(list(sick.cache.glob("*.json")))}
    assert found["cache"]["verdicts"] >= 3


def test_the_state_of_torchs_attention_is_a_fresh_processs(found):
    assert found["torch"]["sdpa"]["flash"] is True
    assert found["torch"]["error"] is None
    assert found["devices"][0]["device"] == "cpu"


# ---- its data


def keys(value, at="") -> set[str]:
    """The path of each key, an item of a list as `[]`."""
    if isinstance(value, dict):
        return {path for key, each in value.items() for path in ({f"{at}{key}"} | keys(each, f"{at}{key}."))}
    if isinstance(value, list):
        return {path for each in value for path in keys(each, f"{at.removesuffix('.')}[].")}
    return set()


FREE = ("torch.sdpa.", "backends[].constraints.")
"""What has the keys that torch and `Constraints` have."""


def test_the_documented_keys_are_those_of_the_data(found):
    page = (ROOT / "docs" / "doctor.md").read_text()
    documented = re.findall(r"^\| `([\w.\[\]]+)` \|", page.partition("## explain --json")[0], re.MULTILINE)
    found = found | {"available": [{"name": "x", "install": "y"}]}
    there = {each for each in keys(found) if not each.startswith(FREE)}

    assert set(documented) == there
    assert len(documented) == len(set(documented))
    top = [each for each in documented if re.fullmatch(r"\w+", each)]
    assert top == list(found)  # in the order in which they are printed


def test_every_setting_is_shown():
    documented = re.findall(r"^\| `(FUSEBOARD_\w+)`", inspect.getdoc(settings) or "", re.MULTILINE)

    assert list(environment.IN_FORCE) == documented


# ---- how it looks


def test_the_plain_report_fits_80_columns_but_for_lines_to_copy(brief):
    text = table.plain(list(table.sections(brief)), 80)

    copied = [each["install"] for each in brief["backends"] if each["install"]]
    long = [line for line in text.splitlines() if len(line) > 80 and line.strip() not in copied]
    assert long == []
    assert "\x1b" not in text


def test_the_plain_report_has_every_backend_reason_and_line(found, states):
    text = " ".join(table.plain(list(table.sections(found)), 80).split())

    for name, each in states.items():
        assert f"{name} {each['state']}" in text
        if each["state"] == "broken":
            assert " ".join(f"{name} on cpu ({each['devices'][0]['stage']}): {each['reason']}".split()) in text
            assert " ".join(each["install"].split()) in text or name in ("wrong", "late")
    for said in (
        f"slip of slip-plugin 1.0: {states['slip']['faults'][0]}",
        "absent (a fake): absent-kernel is not installed",
        "good refuses the calls concerned: wrong on Sundays https://example.org/1",
        "twice of twice-b 1.0 is ignored: twice-a 1.0 has a backend of that name",
        "FUSEBOARD_DEBUG wrong FUSEBOARD_DEBUG='mask'",
        "FUSEBOARD_DISABEL unknown This is not a setting of fuseboard and does nothing. Did you mean FUSEBOARD_DISABLE",
        "shut blocked - shut-plugin 1.0, blocked by FUSEBOARD_DISABLE=shut",
        "far other device cuda far-plugin 1.0, no far-kernel",
    ):
        assert said in text


def test_one_backend_is_shown_with_everything_that_it_declares(found):
    only = found | {"backends": [each for each in found["backends"] if each["name"] == "good"]}
    text = table.plain(list(table.sections(only, whole=True)), 80)

    assert re.search(r"^  head_dims +64$", text, re.MULTILINE)
    assert re.search(r"^  good-kernel +2\.0, needed >=2,<3$", text, re.MULTILINE)
    assert re.search(r"^  backward +no$", text, re.MULTILINE)
    assert re.search(r"^  cpu +works, [\d.]+ s$", text, re.MULTILINE)


def test_what_a_child_printed_is_shown_when_its_backend_is_asked_about(found):
    loud = found | {"backends": [each for each in found["backends"] if each["name"] == "loud"]}

    assert "last words" not in table.plain(list(table.sections(loud)), 80)
    assert "printed on cpu:\n" in table.plain(list(table.sections(loud, whole=True)), 80)
    assert table.plain(list(table.sections(loud, whole=True)), 80).count("last words") == 1


def test_what_a_package_says_cannot_steer_the_terminal(found):
    (broken,) = (each for each in found["backends"] if each["name"] == "liar")
    (at,) = broken["devices"]
    rude = broken | {"version": "1\x1b[2J", "devices": [at | {"reason": "one\x1b]0;title\x07 two\rthree\u202e"}]}
    text = table.plain(list(table.sections(found | {"backends": [rude]})), 80)

    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    assert "one\ufffd]0;title\ufffd two\ufffdthree\ufffd" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


def test_a_terminal_gets_colour_the_same_words_and_no_longer_lines(brief, terminal):
    pytest.importorskip("rich")
    table.show(brief, terminal)
    coloured = terminal.getvalue()
    bare = re.sub(r"\x1b\[[\d;]*m", "", coloured)

    assert "\x1b[1;31mbroken" in coloured
    assert sorted(bare.split()) == sorted(table.plain(list(table.sections(brief)), 80).split())
    copied = [each["install"] for each in brief["backends"] if each["install"]]
    assert [line for line in bare.splitlines() if len(line.rstrip()) > 80 and line.strip() not in copied] == []


@pytest.mark.parametrize("why", ["NO_COLOR", "dumb", "no rich", "no terminal"])
def test_everybody_else_gets_plain_text(found, terminal, monkeypatch, why):
    if why == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    elif why == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    elif why == "no rich":
        monkeypatch.setitem(sys.modules, "rich", None)
        monkeypatch.setitem(sys.modules, "rich.console", None)
    stream = io.StringIO() if why == "no terminal" else terminal
    table.show(found, stream)

    assert stream.getvalue() == table.plain(list(table.sections(found)), 80)


def test_devices_that_follow_each_other_are_one_range():
    devices = ["cpu", "cuda:0", "cuda:1", "cuda:2", "cuda:5", "cuda:7", "mps"]

    assert table._ranges(devices) == "cpu cuda:0-2 cuda:5 cuda:7 mps"
    assert table._ranges([]) == ""


def test_progress_is_for_terminals_only():
    shown, hidden = Terminal(), io.StringIO()
    for stream in (shown, hidden):
        progress = parallel.Progress(stream)
        progress.expect(2)
        progress.say("flash on cuda:0: self-test")
        progress.wipe()

    assert "[0/2] flash on cuda:0: self-test" in shown.getvalue()
    assert shown.getvalue().rstrip("\r").rpartition("\r")[2].strip() == ""
    assert hidden.getvalue() == ""


# ---- statuses


def test_a_healthy_backend_is_status_0_known_from_disk_and_told_in_plain_text(board):
    board.plugin("good")
    first = board.run("doctor", "--backend", "good", "--device", "cpu", "--json")
    data = json.loads(first.stdout)
    assert (first.returncode, data["status"]) == (0, 0), first.stdout
    assert data["summary"] == "every installed backend that is meant for this machine works: good"
    assert data["backends"][0]["devices"][0]["cached"] is False

    again = board.run("doctor", "--backend", "good", "--device", "cpu")
    assert again.returncode == 0
    assert re.search(
        r"^  good +works +cpu +good-plugin 1\.0, good-kernel 2\.0, exact, fp32$", again.stdout, re.MULTILINE
    )
    assert re.search(r"^  cpu +works, from disk$", again.stdout, re.MULTILINE)
    assert again.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "godo"], r"no backend is called 'godo'\. Did you mean 'good'\? Installed: "),
        (
            ["--backend", "tilelang"],
            r"'tilelang' is not installed\. Install it: pip install --no-deps fuseboard-tilelang",
        ),
        (
            ["--timeout", "0"],
            r"argument --timeout: '0' is not a positive number of seconds\. See: fuseboard doctor --help",
        ),
        (["--jobs", "none"], r"argument --jobs: 'none' is not a number of at least 1"),
        (["--colour"], r"unrecognized arguments: --colour"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(board, arguments, message):
    board.plugin("good")
    board.distribution("fuseboard-tilelang")  # hides the one that is installed, and has no backend
    done = board.run("doctor", *arguments)

    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(rf"fuseboard doctor: .*{message}", done.stderr), done.stderr
    assert done.stderr.count("\n") == 1


def test_torch_that_cannot_be_imported_is_status_2_with_the_reason(board):
    board.plugin("good")
    (board.site / "torch").mkdir()
    (board.site / "torch" / "__init__.py").write_text("raise OSError('libtorch_cpu.so: no such file')\n")
    board.distribution("torch", "9.9")
    done = board.run("doctor", "--json")
    data = json.loads(done.stdout)

    assert (done.returncode, data["status"], done.stderr) == (2, 2, "")
    assert data["torch"]["error"] == "OSError: libtorch_cpu.so: no such file"
    assert data["summary"] == "torch cannot be imported: OSError: libtorch_cpu.so: no such file"
    good = next(each for each in data["backends"] if each["name"] == "good")
    assert (good["state"], good["distribution"], good["version"]) == ("not asked", "good-plugin", "1.0")
    assert "torch cannot be imported" in table.plain(list(table.sections(data)), 80)


def test_a_device_that_is_not_there_is_status_2(board):
    done = board.run("doctor", "--device", "cuda:99")

    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(r"fuseboard doctor: there is no device 'cuda:99'; there are cpu", done.stderr)


def test_an_environment_without_any_plugin_is_no_disaster(board):
    """What is on the path is linked, and the metadata that has the plugins' entry points is not."""
    for folder in site.getsitepackages():
        for each in Path(folder).iterdir():
            if not each.name.endswith((".dist-info", ".pth")) and not (board.site / each.name).exists():
                (board.site / each.name).symlink_to(each)
    for module in ("attrs", "pluggy", "torch"):
        assert importlib.util.find_spec(module) is not None
    source = Path(fuseboard.__file__).parent
    if not (board.site / "fuseboard").exists():
        (board.site / "fuseboard").symlink_to(source)
    board.path = [str(board.site)]
    done = board.run("doctor", "--json", python=("-S",))
    data = json.loads(done.stdout)

    assert (done.returncode, data["backends"], data["faults"]) == (0, [], [])
    assert data["summary"] == "no backend is installed: every call is answered by the reference"
    names = {each["name"] for each in data["available"]}
    assert {"flash", "xformers", "sage", "sdpa-cpu"} <= names
    assert "sdpa-cpu, sdpa-cudnn" in table.plain(list(table.sections(data)), 80)


BREAKS = {
    "importerror": "raise ImportError('undefined symbol: _ZN3c10\\nsecond line')",
    "oserror": "raise OSError('libcudart.so.12: cannot open')",
    "attributeerror": "raise AttributeError('no such operator')",
    "runtimeerror": "raise RuntimeError('was built for another torch')",
    "exits": "raise SystemExit(3)",
    "interrupts": "raise KeyboardInterrupt",
}


@pytest.mark.slow
def test_every_way_in_which_an_import_breaks_is_a_reason_of_one_line(board):
    for name, text in BREAKS.items():
        board.plugin(name, text)
    board.plugin("old", version="1.9")
    board.plugin("unversioned")
    metadata = board.site / "unversioned_kernel-2.0.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: unversioned-kernel\n")
    names = [*BREAKS, "old", "unversioned"]
    done = board.run("doctor", "--json", "--device", "cpu", *(word for name in names for word in ("--backend", name)))
    reasons = {each["name"]: (each["state"], each["reason"]) for each in json.loads(done.stdout)["backends"]}

    assert done.returncode == 1
    assert {state for state, _ in reasons.values()} == {"broken"}
    assert {name: reason for name, (_, reason) in reasons.items() if name in BREAKS} == {
        "importerror": "import failed: ImportError: undefined symbol: _ZN3c10",
        "oserror": "import failed: OSError: libcudart.so.12: cannot open",
        "attributeerror": "import failed: AttributeError: no such operator",
        "runtimeerror": "import failed: RuntimeError: was built for another torch",
        "exits": "its import called sys.exit(3)",
        "interrupts": "import failed: KeyboardInterrupt",
    }
    assert reasons["old"][1] == "old-kernel is 1.9, needed >=2,<3"
    assert "without a readable version" in reasons["unversioned"][1]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the page shows a machine without a GPU")
def test_the_page_shows_the_backends_and_parts_that_are_printed_now(tmp_path):
    (shown,) = (each["output"] for each in BLOCK.finditer(PAGES[0].read_text()) if each["arguments"] == "doctor")
    now = printed("doctor", str(tmp_path))

    def skeleton(text: str) -> list[str]:
        rows = r"^  (\S+) +(works|other device|not installed|broken|faulty|blocked|default|set|wrong) +(\S+)"
        return [line for line in text.splitlines() if re.match(r"\w", line)] + re.findall(rows, text, re.MULTILINE)

    assert skeleton(shown) == skeleton(now), "write the page anew: python tests/ops/pages.py"
    assert max(map(len, now.splitlines())) <= 80


def test_who_changes_the_state_of_torchs_attention_is_named(found, states):
    assert states["loose"]["devices"][0]["changed"] == ["flash: True -> False"]
    assert all(not at["changed"] for name, each in states.items() if name != "loose" for at in each["devices"])
    text = table.plain(list(table.sections(found)), 200)
    assert "changed by loose   flash: True -> False, for every attention of a process that imports" in text


# ---- GPUs


@pytest.fixture(scope="module")
def said():
    """What fuseboard-flash declares, for a row of a machine that need not be this one."""
    return child.declare("flash3")


def row_of(said, devices, *answers):
    entry = Entry("flash3", lambda: pytest.fail("loaded"), "fuseboard-flash", "0.1.0")
    made = Row("flash3", Registry([entry], settings.Settings()), [entry])
    made.take(said, devices)
    for device, answer in answers:
        made.found(device, answer)
    return made


GPUS = [
    {"device": "cpu", "capability": "AVX512"},
    {"device": "cuda:0", "capability": [8, 0]},
    {"device": "cuda:1", "capability": [9, 0]},
    {"device": "cuda:2", "capability": [9, 0]},
]


def test_a_gpu_of_another_generation_is_another_device_and_needs_no_child(said):
    absent = row_of(said, GPUS)
    data = absent.as_dict()

    assert [(each["device"], each["state"]) for each in data["devices"]] == [
        ("cpu", "other device"), ("cuda:0", "other device"), ("cuda:1", "not installed"), ("cuda:2", "not installed"),
    ]  # fmt: skip
    assert data["devices"][1]["reason"] == "needs compute capability 9.0 to 9.0, cuda:0 has 8.0"
    assert (data["state"], absent.unknown) == ("not installed", [])
    only = row_of(said, GPUS[:2]).as_dict()
    assert (only["state"], only["reason"]) == ("other device", data["devices"][1]["reason"])
    assert table._about(only).endswith("needs compute capability 9.0 to 9.0, cuda:0 has 8.0")


def test_one_broken_device_makes_a_backend_broken_and_is_named(said):
    said = said | {"info": said["info"] | {"requires": {}}}
    answers = [("cuda:2", child.Answer(ok=False, reason="crashed", stage="crash")), ("cuda:1", child.Answer(ok=True))]
    made = row_of(said, GPUS, *answers)
    data = made.as_dict()

    assert made.unknown == ["cuda:1", "cuda:2"]
    assert [each["state"] for each in data["devices"]] == ["other device", "other device", "works", "broken"]
    assert (data["state"], data["reason"]) == ("broken", "crashed")
    assert table._where(data) == "cuda:2"


@pytest.mark.gpu
def test_on_a_gpu_a_backend_works_there_and_on_the_cpu(board):
    done = board.run("doctor", "--json", "--backend", "sdpa-math", "--backend", "sdpa-efficient")
    data = json.loads(done.stdout)
    states = {(each["name"], at["device"]): at["state"] for each in data["backends"] for at in each["devices"]}

    assert done.returncode == 0, data["summary"]
    assert states["sdpa-math", "cpu"] == states["sdpa-math", "cuda:0"] == states["sdpa-efficient", "cuda:0"] == "works"
    assert states["sdpa-efficient", "cpu"] == "other device"
    (gpu,) = (each for each in data["devices"] if each["device"] == "cuda:0")
    assert gpu["memory"] > 0
    assert len(gpu["capability"]) == 2
    assert data["torch"]["driver"]


# ---- parts


@pytest.mark.parametrize("wanted", ["", ">=2.6,<3", ">2.6", "<=2.6", "==2.6", "!=2.10", "<2.6", ">=2.6.0.post1"])
@pytest.mark.parametrize(
    "have",
    ["2.6", "2.6.0", "2.5.9", "2.6.0.post1", "2.6rc1", "2.6.0a1", "2.6.dev3", "2.6+cu118", "3.0", "2.10", "v2.7"],
)
def test_the_tables_comparison_of_versions_is_the_probes(have, wanted):
    assert environment.in_range(have, wanted) is _in_range(have, wanted)


def test_a_version_that_cannot_be_read_is_neither_in_nor_out():
    assert environment.in_range("unknown", ">=2") is None
    assert environment.in_range("unknown", "") is True


def test_results_come_in_order_and_the_first_error_is_raised():
    def fails() -> None:
        raise cli.UnusableError("no")

    assert parallel.run_all([lambda n=n: n * n for n in range(20)], 3) == [n * n for n in range(20)]
    assert parallel.run_all([], 3) == []
    with pytest.raises(cli.UnusableError):
        parallel.run_all([fails, lambda: None], 2)


def test_no_more_run_at_once_than_asked():
    import threading

    lock, running, most = threading.Lock(), 0, 0

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        os.sched_yield() if hasattr(os, "sched_yield") else None
        with lock:
            running -= 1

    parallel.run_all([work] * 50, 2)

    assert 1 <= most <= 2


def test_a_plugin_that_ends_or_holds_up_who_loads_it_is_told_how_to_keep_it_out(found):
    told = {text.partition(" ")[0]: list(lines) for text, lines in table._wrong(found).items}

    assert told["stuck"] == ["FUSEBOARD_DISABLE=stuck"]
    assert told["syntax"] == []
