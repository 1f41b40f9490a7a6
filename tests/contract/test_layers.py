"""Who may import whom, read off the source; and what may not load torch, shown by child processes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "fuseboard"

# A module imports from lower levels, or from those named before it on its own.
LEVELS = (
    ("errors", "settings"),
    ("masks", "constraints", "tensors", "call", "backend", "hookspecs"),
    ("registry", "policy", "run", "context", "site", "verdicts", "child", "machine", "selftest", "probe", "inside",
     "failure", "chain"),
    ("explanation", "dispatch"),
)  # fmt: skip
ORDER = [name for level in LEVELS for name in level]
TORCH_FREE = (
    *("errors", "settings", "constraints", "backend", "hookspecs", "registry", "policy", "run", "context"),
    *("verdicts", "child"),
)


def spine() -> dict[str, Path]:
    return {path.stem: path for path in CORE.glob("*.py") if path.stem not in ("__init__", "__main__")}


def imported(path: Path) -> set[str]:
    """What a module imports when it is loaded or run: the blocks that only a type checker reads are left out."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for each in node.orelse:
                visit(each)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found.update(f"{module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def of_fuseboard(path: Path) -> set[str]:
    """The names right under `fuseboard` that a module imports."""
    names = {name.split(".")[1] for name in imported(path) if name.startswith("fuseboard.")}
    return {name for name in names if (CORE / f"{name}.py").exists() or (CORE / name).is_dir()}


def folders() -> list[str]:
    return sorted(path.name for path in CORE.iterdir() if path.is_dir() and list(path.glob("*.py")))


def test_every_module_of_the_spine_has_its_level():
    assert sorted(spine()) == sorted(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_module_imports_from_lower_levels_or_from_those_before_it(name):
    before = set(ORDER[: ORDER.index(name)])

    assert of_fuseboard(spine()[name]) - {name} <= before


@pytest.mark.parametrize("name", TORCH_FREE)
def test_a_module_that_loads_no_torch_imports_none_and_nobody_who_does(name):
    names = {each.split(".")[0] for each in imported(spine()[name])}

    assert "torch" not in names
    assert of_fuseboard(spine()[name]) <= set(TORCH_FREE)


def test_the_spine_knows_no_folder():
    for name, path in spine().items():
        assert not of_fuseboard(path) & set(folders()), name
    assert not of_fuseboard(CORE / "__init__.py") & set(folders())


def test_folders_never_import_each_other():
    assert {"adapters", "testing"} <= set(folders())
    for folder in folders():
        for path in (CORE / folder).rglob("*.py"):
            assert not of_fuseboard(path) & (set(folders()) - {folder}), path


def test_a_plugin_imports_public_names_only():
    public = set(all_public())
    for path in ROOT.glob("plugins/*/src/**/*.py"):
        for name in imported(path):
            if name.startswith("fuseboard."):
                assert name.split(".")[1] in public | {"testing", "tensors"}, f"{path} imports {name}"


def all_public() -> list[str]:
    tree = ast.parse((CORE / "__init__.py").read_text())
    (table,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_WHERE"
    )
    return [name for names in ast.literal_eval(table).values() for name in names]


def test_every_public_name_is_where_the_table_says_and_in_the_types_too():
    import fuseboard as fb

    assert sorted(fb.__all__) == sorted(all_public())
    for name in fb.__all__:
        assert getattr(fb, name) is not None
        assert name in dir(fb)
    typed = (CORE / "__init__.py").read_text()
    for name in fb.__all__:
        assert f"import {name} as {name}\n" in typed
    with pytest.raises(AttributeError, match="module 'fuseboard' has no attribute 'atention'"):
        _ = fb.atention


# ---- in processes of their own


def python(code: str) -> list[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("FUSEBOARD_")}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "code",
    [
        "import fuseboard",
        "import fuseboard as fb; fb.policy_for('fast')",
        "import fuseboard as fb; fb.policy_for({'a.*': 'auto', '*': 'exact'})",
        "import fuseboard as fb; run = fb.Run()\nwith fb.bind('fast', run=run): print(run.report())",
        "import fuseboard as fb; list(fb.steps(iter([1]), 'auto'))",
        "import fuseboard as fb; fb.bind_process('fast').close()",
        "import fuseboard as fb; fb.hookimpl, fb.Constraints, fb.BackendInfo, fb.PolicyError, fb.Exactness",
        "from fuseboard import registry; registry.current().names()",
    ],
)
def test_no_torch_is_loaded_by(code):
    found = python(
        f"{code}\nimport sys; print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )

    assert found[-1] == "[]"


def test_attention_loads_no_plugin_and_no_folder_until_a_policy_wants_one():
    found = python(
        "import fuseboard as fb, torch, sys\n"
        "q = torch.zeros(1, 1, 2, 8); fb.attention(q, q, q, site=fb.Site('s'))\n"
        "kinds = 'fuseboard_', 'fuseboard.adapters', 'fuseboard.testing'\n"
        "print([name for name in sys.modules if name.startswith(kinds)])\n"
    )

    assert found == ["[]"]
