"""The pytest option, in child processes and through a real entry point."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LIARS = "fuseboard.testing.doubles:liars"
NARROW = """
import torch
from fuseboard.testing import doubles

small = {"dtypes": {torch.float32}, "gqa": False, "masks": (), "structures": (), "lengths": {"equal"}, "causal": ()}
small |= {"custom_scale": False, "backward": False, "any_stride": False, "mask_grad": False, "v_head_dims": None}
plugin = doubles.fake_backend("narrow", **small)
liar = doubles.fake_backend("narrow", doubles.liars.off_by_a_hundredth.kernel(), **small)
"""
WRONG = "narrow/float32-33x33-d32"


def test_pytest_loads_no_torch_without_the_option(tmp_path):
    (tmp_path / "test_nothing.py").write_text(
        "import sys\n\ndef test_nothing(request):\n    assert request.config.pluginmanager.hasplugin('fuseboard')\n"
        "    assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@pytest.mark.slow
def test_the_loopback_is_green_from_end_to_end(kit):
    done = kit("loopback", "fuseboard.testing.doubles:loopback", "-k", "not test_case or 33x33 or 1x77")
    assert done.returncode == 0, done.stdout
    assert "| mask_info: bottom-right causal | yes | yes | yes | yes |" in done.stdout
    assert "0 failed." in done.stdout


def test_a_liar_is_red_and_the_message_names_case_and_reason(kit):
    done = kit("drops-the-mask", f"{LIARS}.drops_the_mask", "-k", "test_case and 33x33 and bool")
    assert done.returncode == 1
    assert "drops-the-mask/float32-33x33-d32-bool.bhqk: dropped argument (mask): mask was moved" in done.stdout
    assert "What failed, by kind:\n" in done.stdout
    assert " x dropped argument (mask): mask was moved, and the output stayed where it was, as in float" in done.stdout
    assert "| bool mask | FAILS |" in done.stdout


def test_a_backend_that_refuses_everything_is_red(kit):
    done = kit("refuses-everything", f"{LIARS}.refuses_everything", "-k", "test_admits_something")
    assert done.returncode == 1
    assert "refuses-everything refuses every case on cpu: queries is many, allowed none" in done.stdout


def test_a_failed_self_test_is_red(kit):
    done = kit("tiles-key-heads", f"{LIARS}.tiles_key_heads", "-k", "test_can_run_here")
    assert done.returncode == 1
    assert "tiles-key-heads cannot run on cpu (self-test): self-test failed" in done.stdout


FAULTY = """
from fuseboard.testing import doubles


def rank(call, sizes):
    return 1.0 if call.causal else sizes.lenght


plugin = doubles.fake_backend("misspelt", hooks={"rank": rank})
"""


def test_a_hook_that_raises_about_some_calls_is_red(kit):
    done = kit("misspelt", "double_source:plugin", "-k", "test_hooks", source=FAULTY)
    assert done.returncode == 1
    said = "misspelt: the plugin is at fault: hook rank raised AttributeError: 'Sizes' object has no attribute 'lenght'"
    assert said in done.stdout


def test_a_guard_that_raises_is_red_and_does_not_stop_the_run(kit):
    source = (
        "import fuseboard as fb\nfrom fuseboard.testing import doubles\n\n"
        "guards = [fb.Guard('batch', lambda call, sizes: sizes.n < 9, 'small')]\n"
        "plugin = doubles.fake_backend('guarded', guards=guards)\n"
    )
    done = kit("guarded", "double_source:plugin", "-k", "test_hooks", source=source)
    assert done.returncode == 1
    assert "guard 'batch' raised AttributeError: 'Sizes' object has no attribute 'n'." in done.stdout
    assert "INTERNALERROR" not in done.stdout + done.stderr


def test_hooks_that_answer_every_call_are_green(kit):
    done = kit("loopback", "fuseboard.testing.doubles:loopback", "-k", "test_hooks")
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_an_unknown_backend_is_a_usage_error_that_names_the_nearest(kit):
    done = kit("narrow", "double_source:plugin", "--fuseboard-backend", "narow", source=NARROW)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "unknown policy 'narow'. Did you mean 'narrow'?" in done.stderr


def test_the_kit_replaces_testpaths(kit, tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = own\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "test_own.py").write_text("def test_own():\n    raise SystemExit\n")
    done = kit("narrow", "double_source:plugin", "-k", "test_own or test_can_run_here", source=NARROW)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_a_known_failure_is_expected_and_named_with_its_link(kit, tmp_path):
    (tmp_path / "conformance-xfails.txt").write_text(f"# known\n\n{WRONG} https://example.org/1\n")
    done = kit("narrow", "double_source:liar", "-k", "test_case and 33x33 and not grad", "-rx", source=NARROW)
    assert "XFAIL" in done.stdout
    assert "known, https://example.org/1: wrong: its output is off by 0.01, tolerance 0.0001" in done.stdout


def test_a_call_that_fails_only_when_it_is_made_otherwise_has_a_line_of_its_own(kit, tmp_path):
    name = "remembers-outputs/overwritten:float32-1x65-d32"
    (tmp_path / "ledger.txt").write_text(f"{name} https://example.org/2\n")
    options = ("-k", "overwritten:float32-1x65-d32", "--fuseboard-xfails", "ledger.txt", "-rx")
    done = kit("remembers-outputs", f"{LIARS}.remembers_outputs", *options)
    assert done.returncode == 0, done.stdout
    assert "known, https://example.org/2: dropped argument (q and k and v): it was overwritten in place" in done.stdout


def test_a_known_failure_that_passes_is_an_error(kit, tmp_path):
    (tmp_path / "ledger.txt").write_text(f"{WRONG} https://example.org/1\n")
    done = kit("narrow", "double_source:plugin", "-k", "33x33", "--fuseboard-xfails", "ledger.txt", source=NARROW)
    assert done.returncode == 1
    assert f"{WRONG} passes: take its line out of ledger.txt" in done.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (WRONG, "ledger.txt, line 1: 'narrow/float32-33x33-d32' has no link; expected `backend/case https://...`."),
        ("narrow/gone https://example.org", "ledger.txt, line 1: there is no case 'narrow/gone'"),
    ],
)
def test_a_line_without_a_link_or_a_case_stops_the_run(kit, tmp_path, line, message):
    (tmp_path / "ledger.txt").write_text(line)
    done = kit("narrow", "double_source:plugin", "--fuseboard-xfails", "ledger.txt", source=NARROW)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in done.stderr


def test_lines_of_other_backends_are_none_of_this_runs_business(kit, tmp_path):
    (tmp_path / "ledger.txt").write_text("other/gone https://example.org\n")
    options = ("--fuseboard-xfails", "ledger.txt", "-k", "test_can_run_here")
    assert kit("narrow", "double_source:plugin", *options, source=NARROW).returncode == 0


@pytest.mark.slow
def test_the_matrix_is_written_between_its_markers_and_is_the_same_each_time(kit, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("above\n<!-- fuseboard matrix: narrow -->\nstale\n<!-- end -->\nbelow\n")
    options = ("-k", "test_case", "--fuseboard-matrix", "README.md")
    done = kit("narrow", "double_source:plugin", *options, source=NARROW)
    assert done.returncode == 0, done.stdout
    text = readme.read_text()
    assert text.startswith("above\n<!-- fuseboard matrix: narrow -->\n`narrow` 1.0 on cpu, torch ")
    assert "\n| float32 | forward | GQA | backward | GQA backward |\n|---|---|---|---|---|\n" in text
    assert "\n| no mask | partly | no | no | no |\n" in text
    assert "stale" not in text
    assert text.endswith("<!-- end -->\nbelow\n")
    kit("narrow", "double_source:plugin", *options, source=NARROW)
    assert readme.read_text() == text


def test_half_a_run_leaves_the_file_as_it_was(kit, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("<!-- fuseboard matrix: narrow -->\n<!-- end -->\n")
    done = kit("narrow", "double_source:plugin", "-k", "1x77", "--fuseboard-matrix", "README.md", source=NARROW)
    assert "README.md is left as it was: not every case ran" in done.stdout
    assert readme.read_text() == "<!-- fuseboard matrix: narrow -->\n<!-- end -->\n"


def test_a_file_without_markers_stops_the_run_before_it_starts(kit, tmp_path):
    (tmp_path / "README.md").write_text("nothing\n")
    done = kit("narrow", "double_source:plugin", "--fuseboard-matrix", "README.md", source=NARROW)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "README.md has no place for the matrix: add the lines '<!-- fuseboard matrix: narrow -->'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["--fuseboard-device", "nowhere"], {}, "ERROR: --fuseboard-device nowhere: there is no such device here ("),
        (["--fuseboard-device", "cpu:x"], {}, "ERROR: --fuseboard-device cpu:x: there is no such device here ("),
        (["--fuseboard-xfails", sys.executable], {}, "is not text in UTF-8"),
        ([], {"FUSEBOARD_DEBUG": "1"}, "ERROR: FUSEBOARD_DEBUG='1': 1 means nothing here; allowed"),
    ],
)
def test_what_cannot_be_asked_is_a_usage_error(kit, monkeypatch, arguments, environ, message):
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    done = kit("loopback", "fuseboard.testing.doubles:loopback", *arguments)
    assert done.returncode == 4, done.stdout
    assert message in done.stdout + done.stderr
    assert "INTERNALERROR" not in done.stdout + done.stderr
