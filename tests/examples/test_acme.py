"""The page for kernel authors, followed to the letter, ends in the third party's example."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `clean`

from clean import ROOT, copy, run, surroundings, wheel

from fuseboard.ops import scaffold
from fuseboard.registry import Entry, Registry
from fuseboard.settings import Settings

EXAMPLE = ROOT / "examples" / "acme"
PAGE = ROOT / "docs" / "kernel-authors.md"
BLOCK = re.compile(r"(<!-- into acme_attention\.py -->\n)?^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CALL = """
import fuseboard as fb
import torch

site = fb.Site("my.model")
q = torch.randn(2, 4, 300, 16)
run = fb.Run()
with fb.bind(fb.policy_for("acme", strict=True), run=run):
    out = fb.attention(q, q, q, site=site, causal=True)
torch.testing.assert_close(out, fb.attention(q, q, q, site=site, causal=True))
print(run.report()["attention"]["used"])
"""


def steps() -> list[tuple[str, str]]:
    """What the page says to do, in order: commands, and code to put into the module."""
    found = []
    for into, kind, text in BLOCK.findall(PAGE.read_text()):
        if kind == "sh":
            found.append(("run", text))
        elif into:
            found.append(("put", text))
    return found


def put(code: str, module: Path) -> None:
    """Do as the page says: definitions in the place of those of the same names, imports where they are missing."""
    for node in ast.parse(code).body:
        text, lines = module.read_text(), module.read_text().splitlines(keepends=True)
        new = (ast.get_source_segment(code, node) or "") + "\n"
        if isinstance(node, ast.Import | ast.ImportFrom):
            module.write_text(text.replace("import torch\n", f"import torch\n{new}", 1))
        elif isinstance(node, ast.FunctionDef):
            (old,) = [each for each in ast.parse(text).body if getattr(each, "name", "") == node.name]
            decorators = "".join(f"@{ast.unparse(each)}\n" for each in node.decorator_list)
            first = min([old.lineno, *(each.lineno for each in old.decorator_list)])
            lines[first - 1 : old.end_lineno] = [decorators + new]
            module.write_text("".join(lines))
        else:
            module.write_text(text.replace("\n\n\n@hookimpl", f"\n\n{new}\n\n@hookimpl", 1))


def definitions(path: Path) -> dict[str, str]:
    """Every function and constant of a module, without its docstring."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            node.body = body
            found[node.name] = ast.unparse(node)
        elif isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = ast.unparse(node.value)
    return found


def files(folder: Path) -> set[str]:
    made = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in made if not {"__pycache__", "dist"} & set(path.parts)}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What the tool writes, with the page's code put in."""
    folder = tmp_path_factory.mktemp("written")
    assert scaffold.main(["acme", "--path", str(folder)]) == 0
    for kind, text in steps():
        if kind == "put":
            put(text, folder / "acme_attention.py")
    return folder


def test_the_example_is_what_the_tool_writes_with_the_pages_code_put_in(written):
    assert files(written) == files(EXAMPLE)
    for name in ("acme_attention.py", "tests/test_claims.py"):
        assert definitions(written / name) == definitions(EXAMPLE / name)
    kept = [line for line in (written / "pyproject.toml").read_text().splitlines() if "description" not in line]
    example = [line for line in (EXAMPLE / "pyproject.toml").read_text().splitlines() if "description" not in line]
    assert [line for line in kept if not line.startswith("#")] == example
    assert (written / "conformance-xfails.txt").read_text() == (EXAMPLE / "conformance-xfails.txt").read_text()


def test_the_hooks_page_is_one_plugin_without_a_fault():
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "hooks.md").read_text(), re.MULTILINE | re.DOTALL)
    plugin = ModuleType("page")
    exec("\n".join(blocks), vars(plugin))
    board = Registry([Entry("page", lambda: plugin)], Settings())
    backend = board.resolve("page")

    assert board.faults == []
    assert backend is not None
    assert (backend.install("2.9"), len(backend.known_bad)) == ("pip install --no-deps acme-kernel", 1)


def test_the_page_names_every_word_in_which_a_case_can_end():
    rows = re.findall(r"^\| (`.+?) \|", PAGE.read_text(), re.MULTILINE)
    words = {word.partition(" (")[0] for row in rows for word in re.findall(r"`([^`]+)`", row)}
    assert words == {"ok", "refused", "wrong", "raised", "changed inputs", "lost gradient", "dropped argument"}


@pytest.mark.slow
def test_the_page_followed_to_the_letter_ends_in_a_wheel_that_passes_the_kit(tmp_path):
    pytest.importorskip("hatchling", reason="builds wheels")
    (tmp_path / "wheels").mkdir()
    wheel(ROOT / "core", tmp_path / "wheels")
    environ = surroundings(tmp_path, tmp_path / "wheels")
    editor = tmp_path / "editor.py"  # the hand of whoever follows the page, with this environment's Python
    editor.write_text(
        f"import sys\nfrom pathlib import Path\n\nsys.path[:0] = {sys.path}\nfrom test_acme import put\n\n"
        "put(Path(sys.argv[1]).read_text(), Path('acme_attention.py'))\n"
    )
    script = ["set -eo pipefail"]
    for number, (kind, text) in enumerate(steps()):
        piece = tmp_path / f"piece{number}"
        piece.write_text(text)
        script.append(text if kind == "run" else f"PYTHONPATH= '{sys.executable}' '{editor}' '{piece}'")
    (tmp_path / "empty").mkdir()
    said = run(tmp_path / "empty", "bash", "-c", "\n".join(script), environ=environ)
    counts = re.findall(r"`acme` 0\.1\.0 on cpu, torch \S+: (\d+) cases, (\d+) ok, \d+ refused, (\d+) failed", said)

    assert [failed for _, _, failed in counts] == ["0", "0", "0"]
    assert int(counts[0][1]) > 200
    assert int(counts[1][1]) > int(counts[0][1])  # float64 was claimed in between
    assert counts[1] == counts[2]
    readme = (tmp_path / "empty" / "acme-attention" / "README.md").read_text()
    assert "| no mask | yes | no | no | no |" in readme
    python = str(tmp_path / "empty" / ".venv" / "bin" / "python")
    where = run(tmp_path, python, "-c", "import acme_attention; print(acme_attention.__file__)", environ=environ)
    assert Path(where.strip()).is_relative_to(tmp_path / "empty" / ".venv")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Where the example's wheel was installed."""
    pytest.importorskip("hatchling", reason="builds the example's wheel")
    folder = tmp_path_factory.mktemp("acme")
    made = wheel(copy(EXAMPLE, folder / "source"), folder)
    offline = ("--no-deps", "--no-index", "--disable-pip-version-check", "-q")
    run(folder, sys.executable, "-m", "pip", "install", *offline, "--target", "site", str(made))
    return folder / "site"


def test_a_strict_policy_of_its_name_answers_a_call(installed, tmp_path):
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(installed)}
    command = [sys.executable, "-W", "error", "-c", CALL]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{'acme': 1}"
