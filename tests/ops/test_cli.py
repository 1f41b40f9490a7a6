"""The command `fuseboard`, and `fuseboard explain`."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from boards import Board
from pages import BLOCK, PAGES, printed

import fuseboard
from fuseboard import registry
from fuseboard.ops import cli

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(capfd):
    """The command in this process: its status, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(list(arguments))
        return status, *capfd.readouterr()

    return run


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """An engine's module with these lines, importable from the folder in which the command runs."""
    made: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def make(text: str) -> str:
        name = f"engine_{len(made)}_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{name}.py").write_text(f"import fuseboard as fb\n{text}\n")
        importlib.invalidate_caches()
        made.append(name)
        return name

    yield make
    for name in made:
        sys.modules.pop(name, None)


# ---- the front door


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command(command, arguments):
    status, out, err = command(*arguments)

    assert (status, err) == (0, "")
    assert out.startswith("usage: fuseboard COMMAND")
    for name in ("doctor", "explain", "exactness", "lint", "new-plugin"):
        assert re.search(rf"^  {name} +\w", out, re.MULTILINE)


def test_the_version_is_printed(command):
    assert command("--version") == (0, f"fuseboard {fuseboard.__version__}\n", "")


def test_an_unknown_command_is_one_line_with_the_nearest(command):
    status, out, err = command("docter")

    assert (status, out) == (2, "")
    assert err == (
        "fuseboard: no command is called 'docter'. Did you mean 'doctor'? "
        "Commands: doctor, explain, exactness, lint, new-plugin.\n"
    )


@pytest.mark.parametrize("name", ["doctor", "explain"])
def test_the_help_of_a_command_fits_80_columns_and_explains_the_exit_status(command, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = command(name, "--help")

    assert (status, err) == (0, "")
    assert "exit status:\n  0  " in out
    assert max(map(len, out.splitlines())) <= 80


def test_every_command_is_a_module_with_a_main():
    for name, (module, _what) in cli.COMMANDS.items():
        assert callable(importlib.import_module(module).main), name


def test_the_command_line_loads_no_torch_and_no_command():
    code = (
        "import sys, fuseboard.ops.cli as cli\n"
        "cli.main(['--version']); cli.main([]); cli.main(['nothing'])\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy', 'rich')])\n"
        "print(sorted(name for name in sys.modules if name.startswith('fuseboard.ops')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-2:] == ["[]", "['fuseboard.ops', 'fuseboard.ops.cli']"]


def test_the_script_and_the_module_are_the_same_command():
    text = (ROOT / "core" / "pyproject.toml").read_text()
    done = subprocess.run([sys.executable, "-m", "fuseboard", "-V"], capture_output=True, text=True, check=True)

    assert '[project.scripts]\nfuseboard = "fuseboard.ops.cli:main"\n' in text
    assert done.stdout == f"fuseboard {fuseboard.__version__}\n"


def test_a_reader_that_leaves_early_gets_no_traceback(board: Board):
    with subprocess.Popen(
        [sys.executable, "-m", "fuseboard", "--help"], env=board.environ(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        process.stdout.close()
        err = process.stderr.read()

    assert (process.returncode, err) == (cli.PIPE_CLOSED, "")


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_an_interrupt_ends_it_at_once_without_a_traceback_and_leaves_nothing(board: Board):
    temporary = board.cache.parent / "tmp"
    temporary.mkdir()
    board.plugin("stuck", plugin="import os, time\nopen('started', 'w').write(str(os.getpid()))\nos.close(0)\n"
                 "os.rename('started', 'running')\nwhile True:\n    time.sleep(0.1)\n")  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "fuseboard", "doctor", "--backend", "stuck"], cwd=board.site,
        env=board.environ(TMPDIR=str(temporary)),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A shell's job in the background ignores interrupts, and so would what these tests start there.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as process:  # fmt: skip
        while not (board.site / "running").exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
                pytest.fail(process.stderr.read())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)

    assert (process.returncode, out, err) == (cli.INTERRUPTED, "", "")
    assert list(temporary.iterdir()) == []
    if sys.platform == "linux":
        assert not Path(f"/proc/{(board.site / 'running').read_text()}").exists()


# ---- explain


def test_a_site_is_made_when_none_is_given(command):
    status, out, err = command("explain", "--site", "my.site", "--shape", "1,2,16,8", "--policy", "sdpa-math")

    assert (status, err) == (0, "")
    assert out.startswith("site 'my.site' under policy 'sdpa-math': sdpa-math\n  call: cpu, float32, head_dim 8,")


def test_a_site_is_found_as_an_attribute_by_its_name_or_as_the_only_one(command, engine):
    one = engine("SITE = fb.Site('one.decoder', swappable=False)")
    for arguments in ([f"{one}:SITE"], [f"{one}:one.decoder"], [one, "--site", "one.decoder"]):
        status, out, _ = command("explain", *arguments, "--shape", "1,1,4,8")
        assert status == 0
        assert out.startswith("site 'one.decoder' under policy 'fast': reference\n")
        assert "the site is declared swappable=False" in out
    two = engine("class Model:\n    inner = fb.Site('two.inner')\nSITE = 3")
    status, out, _ = command("explain", f"{two}:Model.inner", "--shape", "1,1,4,8", "--policy", "auto")
    assert (status, out.partition(":")[0]) == (0, "site 'two.inner' under policy 'auto'")


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("S = fb.Site('here.a')", "{}:S2", r"'S2' is no site of '\w+': nothing there is called so\. Sites .*:here\.a"),
        ("S = fb.Site('here.b')", "{}:here.bb", r"Did you mean 'here\.b'\?"),
        ("S = 3", "{}:S", r"'S' is no site of '\w+': that is a int\."),
        ("a, b = fb.Site('x.a'), fb.Site('x.b')", "{}", r"which site of '\w+'\? Sites that exist .*:x\.a, .*:x\.b"),
        ("1 / 0", "{}:S", r"cannot import '\w+' \(ZeroDivisionError: division by zero\); TARGET is module:SITE"),
        ("raise SystemExit(3)", "{}", r"cannot import '\w+' \(SystemExit: 3\)"),
        ("", "no.such.module:S", r"cannot import 'no\.such\.module' \(ModuleNotFoundError"),
        ("", ":S", r"cannot import '' \(ValueError"),
        ("S = fb.Site('x')", "{}:S --site y", r"TARGET names the site 'S' and --site 'y'; give one\."),
    ],
)  # fmt: skip
def test_a_site_that_cannot_be_found_is_one_line_and_status_2(command, engine, text, target, message):
    status, out, err = command("explain", *target.format(engine(text)).split())

    assert (status, out) == (2, "")
    assert re.match(r"fuseboard explain: ", err)
    assert re.search(message, err), err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--shape 1,2,3", r"argument --shape: '1,2,3' is not four numbers of at least 1: batch,heads,queries,head_dim"),
        ("--shape 1,2,0,8", r"argument --shape"),
        ("--dropout 1", r"argument --dropout: '1' is not a probability of at least 0 and below 1"),
        ("--window 0", r"argument --window: '0' is not a number of at least 1"),
        ("--ahead -1", r"argument --ahead: "),
        ("--ahead far", r"argument --ahead: 'far' is not a number of at least 0"),
        ("--dtype fp8", r"argument --dtype: invalid choice: 'fp8'"),
        ("--kv-heads 3", r"q has 8 heads and k 3"),
        ("--policy flsh", r"unknown policy 'flsh'\. Did you mean 'flash'"),
        ("--device nowhere", r"the call's tensors cannot be made \(RuntimeError: "),
        ("--shape 99999,99999,99999,64", r"the call's tensors cannot be made \(RuntimeError: "),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_described_is_one_line_and_status_2(command, arguments, message):
    status, out, err = command("explain", *arguments.split())

    assert (status, out) == (2, "")
    assert re.match(rf"fuseboard explain: .*{message}", err), err
    assert err.count("\n") == 1


def test_a_policy_whose_plugin_is_not_installed_is_one_line_with_the_line_that_installs_it(
    command, tmp_path, monkeypatch
):
    hidden = tmp_path / "fuseboard_tilelang-9.dist-info"  # first on the path, and without a backend
    hidden.mkdir()
    (hidden / "METADATA").write_text("Metadata-Version: 2.1\nName: fuseboard-tilelang\nVersion: 9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with registry.use(registry.Registry()):
        status, out, err = command("explain", "--policy", "tilelang")

    assert (status, out) == (2, "")
    assert re.match(
        r"fuseboard explain: .*is not installed\. Install it: pip install --no-deps fuseboard-tilelang", err
    )
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        ("", "cpu, float32, head_dim 16, many queries, equal lengths"),
        ("--dtype bf16 --v-dim 8", "cpu, bfloat16, head_dim 16/8, many queries, equal lengths"),
        ("--dtype fp16 --k-length 9", "cpu, float16, head_dim 16, many queries, fewer queries"),
        ("--kv-heads 2 --causal", "cpu, float32, head_dim 16, many queries, equal lengths, gqa, causal"),
        ("--mask bool --scale 0.5", "cpu, float32, head_dim 16, many queries, equal lengths, bool mask, custom scale"),
        ("--mask float --grad", "cpu, float32, head_dim 16, many queries, equal lengths, additive mask, grad"),
        ("--dropout 0.1", "cpu, float32, head_dim 16, many queries, equal lengths, dropout"),
        ("--bottom-right --k-length 9", "many queries, fewer queries, structure: bottom-right causal"),
        ("--window 3", "many queries, equal lengths, structure: window"),
        ("--window 3 --ahead 2", "many queries, equal lengths, structure: window + bound ahead"),
        ("--ahead 0", "many queries, equal lengths, structure: bottom-right causal"),
        ("--padding left --bottom-right", "equal lengths, structure: left-padded keys + bottom-right causal"),
        ("--padding right --mask bool", "equal lengths, bool mask, structure: right-padded keys"),
        ("--padding right --mask float --window 2", "additive mask, structure: right-padded keys + window"),
    ],
)  # fmt: skip
def test_every_option_describes_a_part_of_the_call(command, arguments, call):
    status, out, _ = command(
        "explain", "--policy", "auto", "--shape", "2,4,5,16", "--device", "cpu", *arguments.split()
    )

    assert status == 0
    kind, _, shapes = out.splitlines()[1].rpartition("; ")
    assert kind.endswith(call)
    assert shapes.startswith("q 2x4x5x16, k")


def test_a_strict_policy_that_lets_nobody_answer_is_status_1(command):
    arguments = ("explain", "--shape", "1,2,16,8", "--device", "cpu", "--policy", "sdpa-cpu", "--mask", "bool")
    refused = command(*arguments, "--strict", "--dropout", "0.1")
    status, out, _ = command(*arguments, "--dropout", "0.1")

    assert refused[0] == 1
    assert refused[1].startswith("site 'fuseboard.explain' under policy 'sdpa-cpu (strict)': an error (strict)\n")
    assert "dropout is used, allowed none (nearest: dropout_p=0)" in refused[1]
    assert status == 0
    assert "(strict)" not in out


def test_data_is_json_with_the_documented_keys_and_nothing_else(command, engine):
    module = engine("print('hello from an engine'); S = fb.Site('data.s')")
    status, out, err = command("explain", f"{module}:S", "--shape", "1,2,16,8", "--device", "cpu", "--json")
    data = json.loads(out)

    page = (ROOT / "docs" / "doctor.md").read_text().partition("## explain --json")[2]
    documented = re.findall(r"^\| `([\w.\[\]]+)` \|", page, re.MULTILINE)
    assert status == 0
    assert "hello from an engine" in err
    assert [each for each in documented if re.fullmatch(r"\w+", each)] == list(data)
    (cuda,) = (each for each in data["candidates"] if each["name"] == "sdpa-flash")
    assert {f"candidates[].{key}" for key in cuda} <= set(documented)
    assert {f"candidates[].refusals[].{key}" for key in cuda["refusals"][0]} <= set(documented)
    assert len(documented) == len(data) + len(cuda) + len(cuda["refusals"][0])
    assert (data["schema"], data["site"]) == (1, "data.s")
    assert data["chosen"] in ("sdpa-cpu", "sdpa-math", "reference")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the page shows a machine without a GPU")
def test_the_page_shows_an_explanation_as_it_is_printed_now(tmp_path):
    found = [each for each in BLOCK.finditer(PAGES[0].read_text()) if each["arguments"].startswith("explain")]

    assert found
    for each in found:
        now = printed(each["arguments"], str(tmp_path))
        assert each["output"] == now, "write the page anew: python tests/ops/pages.py"


def test_torch_that_cannot_be_imported_is_one_line_and_status_2(board: Board):
    board.module("torch", "raise OSError('libtorch_cpu.so: no such file')\n")
    done = board.run("explain", "--shape", "1,1,4,8")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "fuseboard explain: torch cannot be imported (OSError: libtorch_cpu.so: no such file).\n"


def test_a_wrong_setting_is_one_line_and_status_2(board: Board):
    done = board.run("explain", "--shape", "1,1,4,8", FUSEBOARD_DEBUG="mask")

    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"fuseboard explain: FUSEBOARD_DEBUG='mask': .*\n", done.stderr)


# ---- where nothing can be written


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["lint", "."], ["exactness"]])
def test_a_full_disk_is_one_line_and_status_2(board: Board, arguments):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fuseboard", *arguments], env=board.environ(), cwd=board.site, stdout=full,
            stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "fuseboard: No space left on device.\n")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell that closes a stream")
@pytest.mark.parametrize(("arguments", "status"), [("-V", 0), ("nothing", 2), ("lint nowhere", 2), ("doctor -x", 2)])
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_stream_that_is_closed_changes_no_status(board: Board, arguments, status, closed):
    line = f"{sys.executable} -m fuseboard {arguments} {closed}"
    done = subprocess.run(
        ["/bin/sh", "-c", line], env=board.environ(), cwd=board.site, capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert "Traceback" not in done.stderr


def test_a_wrong_setting_is_one_line_from_every_command_that_reads_it(board: Board):
    done = board.run("exactness", FUSEBOARD_PROBE="there")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "fuseboard exactness: FUSEBOARD_PROBE='there': expected here or child.\n"


@pytest.mark.skipif(sys.platform == "win32", reason="a folder that is in use cannot be removed there")
def test_a_current_folder_that_is_gone_is_one_line_and_status_2(board: Board, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    line = f"cd {gone} && rmdir {gone} && {sys.executable} -m fuseboard lint ."
    done = subprocess.run(["/bin/sh", "-c", line], env=board.environ(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "fuseboard: No such file or directory.\n")
