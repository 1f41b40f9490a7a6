"""Every distribution's wheel holds what it must and nothing else; a third party's is found where it is installed."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))  # for `clean`

from clean import ROOT, copy, run, surroundings, wheel

pytestmark = pytest.mark.slow
pytest.importorskip("hatchling", reason="builds wheels")

DISTRIBUTIONS = sorted(path.parent for path in [ROOT / "core/pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")])
FIND = """
import importlib.metadata, json, fuseboard
points = importlib.metadata.entry_points(group="fuseboard.backends")
names = [distribution.metadata["Name"] for distribution in importlib.metadata.distributions()]
found = {point.name: [point.value, point.dist.name, point.load().__file__] for point in points}
print(json.dumps({"points": found, "core": fuseboard.__file__, "names": names}))
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    return {source.name: wheel(source, folder) for source in DISTRIBUTIONS}


@pytest.fixture(scope="module")
def site(wheels, tmp_path_factory):
    """A clean environment with the core's wheel and the example's: its folder, Python and variables."""
    folder = tmp_path_factory.mktemp("clean")
    wheel(copy(ROOT / "examples" / "acme", folder / "source"), wheels["core"].parent)
    environ = surroundings(folder, wheels["core"].parent)
    run(folder, sys.executable, "-m", "venv", "env", environ=environ)
    python = str(folder / "env" / "bin" / "python")
    run(folder, python, "-m", "pip", "install", "-q", "fuseboard", "acme-attention", environ=environ)
    return folder, python, environ


def entries_of(source):
    """The entry points that a pyproject.toml declares: `group name module`."""
    text = (source / "pyproject.toml").read_text()
    tables = re.findall(r'^\[project\.(?:entry-points\.)?"?([\w.]+)"?\]\n((?:[\w-]+ = ".*"\n)+)', text, re.MULTILINE)
    groups = {"scripts": "console_scripts"}
    return {
        f"{groups.get(group, group)} {name} {value}"
        for group, lines in tables
        for name, value in re.findall(r'^([\w-]+) = "(.*)"$', lines, re.MULTILINE)
    }


@pytest.mark.parametrize("source", DISTRIBUTIONS, ids=lambda path: path.name)
def test_a_wheel_holds_its_modules_types_licence_and_entry_points_and_nothing_else(source, wheels):
    (package,) = [path for path in (source / "src").iterdir() if path.is_dir()]
    with zipfile.ZipFile(wheels[source.name]) as archive:
        names = set(archive.namelist())
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        licence = archive.read(f"{info}/licenses/LICENSE").decode()
        declared = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    sources = {
        str(path.relative_to(source / "src")) for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }  # fmt: skip

    assert {name for name in names if not name.startswith(info)} == sources
    assert f"{package.name}/py.typed" in names
    assert not [name for name in names if re.search(r"(^|/)(tests?|__pycache__)/|test_\w+\.py$|\.pyc$", name)]
    assert licence == (ROOT / "LICENSE").read_text()
    assert re.search(r"^License-Expression: Apache-2\.0$", metadata, re.MULTILINE)
    group, found = "", set()
    for line in filter(None, declared.splitlines()):
        group = line.strip("[]") if line.startswith("[") else group
        found |= set() if line.startswith("[") else {f"{group} {line.replace(' = ', ' ')}"}
    assert found
    assert found == entries_of(source)
    for line in found:
        module = line.split()[2].partition(":")[0].replace(".", "/")
        assert {f"{module}.py", f"{module}/__init__.py"} & names, line


def test_the_core_has_the_templates_of_new_plugin(wheels):
    with zipfile.ZipFile(wheels["core"]) as archive:
        names = {name.rpartition("/")[2] for name in archive.namelist() if "/new_plugin/" in name}

    assert names >= {"pyproject.toml.txt", "module.py.txt", "README.md.txt", "test_claims.py.txt"}


def test_a_third_partys_entry_point_is_found_from_its_wheel(site):
    folder, python, environ = site
    found = json.loads(run(folder, python, "-c", FIND, environ=environ))

    assert list(found["points"]) == ["acme"]
    value, distribution, module = found["points"]["acme"]
    assert (value, distribution) == ("acme_attention", "acme-attention")
    assert Path(module).is_relative_to(folder / "env")
    assert Path(found["core"]).is_relative_to(folder / "env")
    assert not [name for name in found["names"] if name.startswith("fuseboard-")]


def test_some_of_the_kit_passes_there(site):
    folder, python, environ = site
    options = ("-q", "-p", "no:cacheprovider", "--fuseboard-backend", "acme", "-k", "33x33 or can_run or overwritten")
    said = run(folder, python, "-W", "error", "-m", "pytest", *options, environ=environ)
    counts = re.search(r"`acme` 0\.1\.0 on cpu, torch \S+: \d+ cases, (\d+) ok, \d+ refused, 0 failed", said)

    assert counts is not None, said
    assert int(counts[1]) > 10


def test_a_new_plugin_can_be_written_and_installed_there(site):
    folder, python, environ = site
    tool = str(Path(python).with_name("fuseboard"))
    run(folder, tool, "new-plugin", "fresh", environ=environ)
    run(folder / "fresh-attention", python, "-m", "pip", "install", "-q", "-e", ".", environ=environ)
    own = run(folder / "fresh-attention", python, "-m", "pytest", "-q", "-p", "no:cacheprovider", environ=environ)

    assert "4 passed" in own
    run(folder, python, "-m", "pip", "uninstall", "-q", "-y", "fresh-attention", environ=environ)
