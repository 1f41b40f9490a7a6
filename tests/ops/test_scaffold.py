"""`fuseboard new-plugin`: what it writes works at once, and it takes no name that cannot be one."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fuseboard.ops import cli, scaffold

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "pyproject.toml", "acme_attention.py", "README.md", "conformance-xfails.txt", "tests/test_claims.py",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fails(capsys, *arguments):
    """What the command line says, once it has refused."""
    assert cli.main(["new-plugin", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.strip()


def child(folder, *arguments, path=None):
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    environ |= {} if path is None else {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False
    )


def with_entry_point(folder, name, module):
    """The folder as an installed distribution: what `pip install -e .` leaves behind."""
    info = folder / f"{module}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[fuseboard.backends]\n{name} = {module}\n")
    return folder


# ---- what it writes


def test_it_writes_a_whole_project_and_says_what_to_do_next(folder, capsys):
    assert cli.main(["new-plugin", "acme"]) == 0
    made = folder / "acme-attention"
    assert {str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()} == FILES
    commands = re.findall(r"^    (.+)$", capsys.readouterr().out, re.MULTILINE)
    assert commands == ["cd acme-attention", "pip install -e .", "pytest --fuseboard-backend acme"]
    text = (made / "pyproject.toml").read_text()
    assert 'name = "acme-attention"' in text
    assert '[project.entry-points."fuseboard.backends"]\nacme = "acme_attention"\n' in text


def test_every_placeholder_is_filled(folder):
    assert scaffold.main(["acme", "--kernel-package", "pluggy"]) == 0
    for path in (folder / "acme-attention").rglob("*.*"):
        if path.is_file():
            assert "$" not in path.read_text(), path


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--kernel-package", "pluggy")], ids=["alone", "with-a-kernel-package"])
def test_the_kit_and_its_own_tests_pass_at_once(folder, more):
    assert scaffold.main(["acme", *more]) == 0
    made = with_entry_point(folder / "acme-attention", "acme", "acme_attention")
    options = ("-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    kit = child(made, *options, "--fuseboard-backend", "acme", "--fuseboard-matrix", "README.md", path=[made])
    assert kit.returncode == 0, kit.stdout
    assert ", 0 failed." in kit.stdout
    assert "* inputs overwritten in place: yes" in (made / "README.md").read_text()
    own = child(made, *options, path=[made])
    assert own.returncode == 0, own.stdout
    assert "4 passed" in own.stdout


def test_what_it_writes_is_clean_by_our_own_rules(folder):
    ruff, mypy = (
        shutil.which("ruff", path=Path(sys.executable).parent),
        shutil.which("mypy", path=Path(sys.executable).parent),
    )
    if ruff is None or mypy is None:
        pytest.skip("needs ruff and mypy")
    assert scaffold.main(["plain"]) == 0
    assert scaffold.main(["other", "--kernel-package", "pluggy"]) == 0
    config = str(ROOT / "pyproject.toml")
    for made in (folder / "plain-attention", folder / "other-attention"):
        as_tests = ("--ignore", "INP001", "--extend-per-file-ignores", "**/test_*.py:D103")
        rules = [[ruff, "check", "--no-cache", "--config", config, *as_tests, "."]]
        rules += [[ruff, "format", "--no-cache", "--check", "--config", config, "."]]
        files = [str(path) for path in made.rglob("*.py")]
        rules += [[mypy, "--config-file", config, "--strict", "--cache-dir", str(folder / "cache"), *files]]
        for command in rules:
            done = subprocess.run(command, cwd=made, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr


def test_a_kernel_package_is_required_and_imported_in_one_place_and_no_dependency(folder):
    assert scaffold.main(["acme", "--kernel-package", "pyyaml-like"]) == 0
    made = folder / "acme-attention"
    module, project = (made / "acme_attention.py").read_text(), (made / "pyproject.toml").read_text()
    assert 'requires={"pyyaml-like": ""}' in module
    assert '    importlib.import_module("pyyaml_like")' in module
    assert 'return "pip install --no-deps pyyaml-like"' in module
    assert 'dependencies = ["fuseboard>=0.1"]' in project
    assert 'kernel = ["pyyaml-like"]' in project


def test_an_absent_kernel_package_is_told_of(capsys):
    assert scaffold.main(["acme", "--kernel-package", "no-such-kernels"]) == 0
    said = capsys.readouterr().out
    assert "no-such-kernels is not installed here, and acme runs nowhere without it: install it first." in said


def test_an_installed_kernel_package_is_imported_by_its_own_name(folder):
    names = importlib.metadata.packages_distributions()
    if "hypothesis" not in names.get("_hypothesis_pytestplugin", ()):
        pytest.skip("needs a distribution whose modules have several names")
    assert scaffold.main(["acme", "--kernel-package", "hypothesis"]) == 0
    assert 'importlib.import_module("hypothesis")' in (folder / "acme-attention" / "acme_attention.py").read_text()


def test_names_that_python_cannot_say_get_a_module_that_it_can(folder):
    assert scaffold.main(["3d.fast-attn", "--path", "here"]) == 0
    assert (folder / "here" / "fuseboard_3d_fast_attn_attention.py").is_file()
    assert '\n"3d.fast-attn" = "fuseboard_3d_fast_attn_attention"\n' in (folder / "here" / "pyproject.toml").read_text()


# ---- what it refuses


def test_nothing_is_ever_overwritten(folder, capsys):
    assert scaffold.main(["acme"]) == 0
    module = folder / "acme-attention" / "acme_attention.py"
    module.write_text("mine")
    capsys.readouterr()
    said = fails(capsys, "acme")
    assert said == (
        "fuseboard new-plugin: acme-attention is not empty, and nothing is overwritten; give another folder: --path."
    )
    assert module.read_text() == "mine"


def test_an_empty_folder_is_used(folder):
    (folder / "here").mkdir()
    assert scaffold.main(["acme", "--path", "here"]) == 0
    assert (folder / "here" / "acme_attention.py").is_file()


def test_a_place_that_cannot_be_written_is_named(folder, capsys):
    (folder / "file").write_text("")
    assert "file/sub cannot be written: Not a directory." in fails(capsys, "acme", "--path", "file/sub")


@pytest.mark.parametrize("name", ["auto", "fast", "reference", "Acme", "my kernel", "-x.", "", "ü"])
def test_a_name_that_the_registry_would_refuse_is_refused(folder, capsys, name):
    said = fails(capsys, "--", name)
    assert said == (
        f"fuseboard new-plugin: a backend cannot be called {name!r}: "
        "use a word of a-z, 0-9 and '-_.' that is no policy."
    )
    assert list(folder.iterdir()) == []


def test_the_name_of_an_installed_backend_is_refused(folder, capsys, monkeypatch):
    with_entry_point(folder, "taken", "taken_kernels")
    monkeypatch.syspath_prepend(str(folder))
    assert fails(capsys, "taken", "--path", "x") == (
        "fuseboard new-plugin: taken_kernels 0.1.0 has a backend called 'taken' already; "
        "choose another name, or uninstall it: pip uninstall taken_kernels"
    )


def test_the_name_of_a_known_backend_is_refused_where_it_is_not_installed(capsys, monkeypatch):
    monkeypatch.setattr("fuseboard.registry.installed_entries", list)
    said = fails(capsys, "flash4")
    assert said.endswith(
        "'flash4' is the backend of fuseboard-flash, which is not installed here; choose another name."
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--distribution", "pluggy"), "pluggy is installed here already; choose another name for yours"),
        (("--distribution", "json"), "its module would be called 'json', which hides one that can be imported here"),
        (("--distribution", "no/name"), "a distribution cannot be called 'no/name'"),
        (("--kernel-package", "acme>=2"), "--kernel-package 'acme>=2' is no distribution"),
        (("--kernel-package", "Acme_attention"), "--distribution and --kernel-package are both 'acme-attention'"),
    ],
)
def test_distributions_that_cannot_be_are_refused(folder, capsys, options, message):
    assert message in fails(capsys, "acme", *options)
    assert list(folder.iterdir()) == []


def test_as_a_module_it_needs_no_torch_and_says_why_it_refuses(folder):
    done = child(folder, "-X", "importtime", "-m", "fuseboard.ops.scaffold", "acme")
    assert done.returncode == 0, done.stderr
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)
    again = child(folder, "-m", "fuseboard.ops.scaffold", "acme")
    assert (again.returncode, again.stderr.splitlines()[-1][:52]) == (
        2, "fuseboard new-plugin: acme-attention is not empty, a",
    )  # fmt: skip
