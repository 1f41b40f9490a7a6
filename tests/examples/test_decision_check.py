"""The decision engine's package check: what it makes, what it skips, and what it calls a failure."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `clean`

from clean import copy, wheel

ENGINE = Path(__file__).resolve().parents[2] / "examples" / "decision"
COMPILER = next(filter(shutil.which, ("g++", "clang++", "c++")), None)
FILES = {"decision.pt2", "inputs.pt", "eager.pt", "results.json", "results.md"}


def check(folder: Path, *arguments: str, **changes: str) -> tuple[int, str]:
    """Run the script: its exit status and all it printed."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **changes}
    command = [sys.executable, "check_aoti.py", "--output-dir", str(folder), *arguments]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=ENGINE, env=environ, timeout=900, check=False, **both)
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("check_aoti", ENGINE / "check_aoti.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ENGINE))
    spec.loader.exec_module(module)
    return module


def commands() -> list[list[str]]:
    """What the README says to type."""
    text = "\n".join(re.findall(r"^```sh\n(.*?)^```", (ENGINE / "README.md").read_text(), re.MULTILINE | re.DOTALL))
    return [line.partition("#")[0].split() for line in text.splitlines()]


@pytest.fixture(scope="module")
def packaged(tmp_path_factory):
    """What the script makes of the smallest model that has both kinds of layer, in bfloat16."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("aoti")
    (command,) = commands()
    status, said = check(folder, *command[4:], "--layers", "2")
    assert status == 0, said
    return folder, said


def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(rows, slots, generator=generator) * 4, torch.randn(rows, 3, generator=generator) * 4)
        for rows, _, slots in ((2, 128, 3), (1, 256, 3), (4, 160, 5))
    ]


# ---- a package


@pytest.mark.slow
def test_bfloat16_weights_export_package_and_reload_in_a_fresh_process(packaged):
    folder, said = packaged
    report = json.loads((folder / "results.json").read_text())
    fresh = report["fresh_process"]

    assert {each.name for each in folder.iterdir()} == FILES
    assert said.rstrip().endswith("ok")
    assert (report["status"], report["dtype"], report["device"]) == ("ok", "bf16", "cpu")
    assert report["package_bytes"] == (folder / "decision.pt2").stat().st_size
    for found in (report["comparisons"]["AOTI against explicit eager"], fresh["comparison"]):
        assert [found[head]["argmax"] for head in ("decision", "action")] == [7, 7]
        assert [found[head]["rows"] for head in ("decision", "action")] == [7, 7]
    assert fresh["ok"]
    assert "decision" not in fresh["modules"]
    assert "transformers" not in fresh["modules"]
    assert fresh["gpu_kernels_compiled"] == 0
    assert set(report["milliseconds"]) == {"2 x 128 x 3", "1 x 256 x 3", "4 x 160 x 5"}
    assert all(set(row) == {"AMP eager", "explicit eager", "AOTI"} for row in report["milliseconds"].values())
    assert report["machine"]["start"]["torch"] == torch.__version__


@pytest.mark.slow
def test_the_contract_is_what_the_readme_says(packaged):
    from fuseboard.engine import aot

    if torch.__version__.startswith("2.6."):
        pytest.skip("torch 2.6 exports tokens without the bounds that the README tells")
    folder, _ = packaged
    package = aot.load(folder / "decision.pt2")
    rows, tokens = package.contract.inputs[0].sizes
    slots = package.contract.inputs[2].sizes[1]
    said = re.sub(r"\s+", " ", (ENGINE / "README.md").read_text())

    assert (
        f"takes {rows.low} to {rows.high} rows, {tokens.low} to {tokens.high} tokens in multiples of 16, and "
        f"{slots.low} to {slots.high} marker slots"
    ) in said
    batch = torch.load(folder / "inputs.pt", weights_only=True)[0]
    with pytest.raises(aot.ContractError, match="multiple of 16"):
        package(batch[0][:, :100].contiguous(), batch[1][:, :100].contiguous(), *batch[2:])


@pytest.mark.slow
def test_answers_that_are_not_the_packages_fail_in_the_fresh_process(packaged, tmp_path, script):
    folder, _ = packaged
    for name in FILES:
        shutil.copy(folder / name, tmp_path)
    eager = torch.load(tmp_path / "eager.pt", weights_only=True)
    torch.save([(-decision, action) for decision, action in eager], tmp_path / "eager.pt")
    answer = script.reloaded(tmp_path, torch.device("cpu"), 0.05)

    assert answer["ok"] is False
    assert answer["comparison"]["decision"]["argmax"] < 7
    assert answer["comparison"]["action"]["argmax"] == 7


@pytest.mark.slow
def test_a_truncated_package_fails_in_the_fresh_process_with_the_reason(packaged, tmp_path, script):
    folder, _ = packaged
    for name in FILES:
        shutil.copy(folder / name, tmp_path)
    data = (tmp_path / "decision.pt2").read_bytes()
    (tmp_path / "decision.pt2").write_bytes(data[: len(data) // 2])
    answer = script.reloaded(tmp_path, torch.device("cpu"), 0.05)

    assert answer["ok"] is False
    assert "PackageError" in answer["error"]


@pytest.mark.slow
def test_in_the_fresh_process_nothing_can_be_compiled(tmp_path, script):
    code = f"""
import sys, torch
sys.path.insert(0, {str(ENGINE)!r})
import check_aoti
from pathlib import Path
try:
    check_aoti.reload(Path({str(tmp_path)!r}), torch.device("cpu"), 0.1)
except Exception as error:
    print(type(error).__name__)
import torch._inductor
for shut in (torch.compile, torch.export.export, torch._inductor.aoti_compile_and_package, torch._inductor.aot_compile):
    try:
        shut(torch.nn.Linear(1, 1))
    except AssertionError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout.splitlines()

    assert said[0] == "PackageError", done.stderr
    assert said[1:] == ["the fresh process tried to compile or package a model"] * 4


# ---- skips and failures


def test_without_a_compiler_it_skips_with_the_reason(tmp_path):
    (tmp_path / "results.md").write_text("of an earlier run")
    status, said = check(tmp_path, "--device", "cpu", "--quick", PATH=str(tmp_path), CXX="")

    assert (status, said.strip()) == (0, "SKIP: there is no C++ compiler (CXX, g++, clang++) to make a package with")
    assert json.loads((tmp_path / "results.json").read_text())["status"] == "skip"
    assert {each.name for each in tmp_path.iterdir()} == {"results.json"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_the_gpu_that_was_asked_for_it_skips_with_the_reason(tmp_path):
    status, said = check(tmp_path, "--device", "cuda")
    assert (status, said.strip()) == (0, "SKIP: CUDA was asked for, and torch sees no CUDA device")


def test_without_the_api_it_skips_with_the_reason(script, monkeypatch):
    monkeypatch.delattr("torch._inductor.aoti_compile_and_package")
    with pytest.raises(script.Skip, match="has no aoti_compile_and_package"):
        script.ready(torch.device("cpu"))


def test_what_cannot_be_exported_fails_and_says_so(script, tmp_path, monkeypatch, capsys):
    def refuse(*_arguments: object) -> None:
        msg = "mat1 and mat2 must have the same dtype"
        raise RuntimeError(msg)

    monkeypatch.setattr(script, "export", refuse)
    monkeypatch.setattr(script, "ready", lambda _device: None)
    arguments = ["--output-dir", str(tmp_path), "--device", "cpu", "--quick", "--layers", "1"]

    assert script.main(arguments) == 1
    assert capsys.readouterr().out.endswith("FAILED: RuntimeError\n")
    report = json.loads((tmp_path / "results.json").read_text())
    assert report == {"status": "failed", "ok": False, "error": "RuntimeError: mat1 and mat2 must have the same dtype"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "nowhere"], "nowhere: there is no such folder"),
        (["--layers", "0"], "expected 1 or more"),
        (["--device", "toaster"], "is no device"),
        (["--size", "huge"], "invalid choice"),
    ],
)
def test_a_command_that_means_nothing_exits_with_two(script, tmp_path, capsys, arguments, said):
    try:
        status = script.main(["--output-dir", str(tmp_path), *arguments])
    except SystemExit as left:
        status = left.code

    assert status == 2
    assert said in capsys.readouterr().err


# ---- comparisons


def test_the_inputs_are_seven_rows_of_all_kinds_in_three_batches(script):
    made = script.batches(300, 0, 0, torch.device("cpu"))
    tokens = torch.cat([each[1].sum(-1) for each in made])
    options = torch.cat([each[3].sum(-1) for each in made])

    assert [(*each[0].shape, each[2].shape[1]) for each in made] == [(2, 128, 3), (1, 256, 3), (4, 160, 5)]
    assert len(set(tokens.tolist())) == 7
    assert options.tolist() == [3, 2, 3, 5, 4, 2, 3]


def test_a_comparison_holds_only_if_all_rows_agree_and_all_numbers_are_close_and_finite(script):
    inputs = script.batches(300, 0, 0, torch.device("cpu"))
    wanted = pairs()
    same = script.compared(wanted, wanted, inputs)
    flipped = [(-decision, action) for decision, action in wanted]
    action = [(decision, action + torch.tensor([0.5, 0.0, 0.0])) for decision, action in wanted]
    missing = [(decision * float("nan"), action) for decision, action in wanted]

    assert same["identical"]
    assert script.holds(same, 0.0)
    assert not script.holds(script.compared(flipped, wanted, inputs), 1.0)
    found = script.compared(action, wanted, inputs)
    assert found["action"]["logits"] == pytest.approx(0.5)
    assert not script.holds(found, 0.001)
    assert not script.compared(missing, wanted, inputs)["finite"]
    assert not script.holds(script.compared(missing, wanted, inputs), 1.0)


def test_a_slot_without_an_option_is_not_compared(script):
    inputs = script.batches(300, 0, 0, torch.device("cpu"))
    wanted = [(each[0].masked_fill(~batch[3], -9e9), each[1]) for each, batch in zip(pairs(), inputs, strict=True)]
    other = [(each[0].masked_fill(~batch[3], -8e9), each[1]) for each, batch in zip(pairs(), inputs, strict=True)]
    found = script.compared(wanted, other, inputs)

    assert (found["decision"]["logits"], found["identical"]) == (0.0, False)


def test_the_times_are_medians_of_groups_in_turns(script):
    calls = []
    runs = {name: (lambda name=name: calls.append(name)) for name in ("a", "b")}
    found = script.timed(runs, torch.device("cpu"), quick=False)

    assert set(found) == {"a", "b"}
    assert len(calls) == 2 * (10 + 5 * 30)
    assert calls[:20] == ["a"] * 10 + ["b"] * 10
    assert calls[20:80] == ["a"] * 30 + ["b"] * 30


# ---- README


def test_the_readmes_python_runs():
    text = (ENGINE / "README.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ENGINE,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert code
    assert done.returncode == 0, done.stderr
    assert len(text.splitlines()) <= 65


def test_the_readmes_command_is_the_one_that_is_tried_here():
    assert [each[:4] for each in commands()] == [["python", "check_aoti.py", "--output-dir", "out"]]


def test_the_engine_depends_on_the_core_alone():
    allowed = {"fuseboard", "decision", "torch", "attrs", "safetensors"}
    for path in sorted((ENGINE / "decision").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
                for name in names:
                    # Public names of the core alone: nothing below `fuseboard` itself.
                    assert name == "fuseboard" or not name.startswith("fuseboard."), (path.name, name)
                    first = name.partition(".")[0]
                    plugin = path.name == "accelerated.py" and first == "fuseboard_tilelang"
                    assert first in allowed | set(sys.stdlib_module_names) or plugin, (path.name, name)


def test_the_engine_is_a_wheel_without_its_scripts(tmp_path):
    pytest.importorskip("hatchling", reason="builds wheels")
    with zipfile.ZipFile(wheel(copy(ENGINE, tmp_path / "source"), tmp_path)) as made:
        names = {name for name in made.namelist() if ".dist-info/" not in name}
        (metadata,) = (made.read(name).decode() for name in made.namelist() if name.endswith("METADATA"))

    assert names == {f"decision/{path.name}" for path in (ENGINE / "decision").glob("*.py")}
    assert re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE) == ["fuseboard>=0.1", "safetensors"]


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu_the_check_holds(tmp_path):
    status, said = check(tmp_path, "--device", "cuda", "--quick", "--layers", "2")
    assert status == 0, said
    assert said.rstrip().endswith("ok"), said
