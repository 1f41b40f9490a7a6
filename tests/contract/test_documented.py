"""The documentation has every hook, setting and public name, with the signature that the code has."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import fuseboard
from fuseboard import hookspecs, settings

ROOT = Path(__file__).resolve().parents[2]
HOOKS = {
    name: value
    for name, value in vars(hookspecs).items()
    if inspect.isfunction(value) and value.__module__ == hookspecs.__name__
}


def test_every_hook_has_a_heading_with_its_signature() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "docs/hooks.md").read_text(), re.MULTILINE)
    wanted = set()
    for name, hook in HOOKS.items():
        signature = inspect.signature(hook)
        wanted.add(f"{name}({', '.join(signature.parameters)}) -> {signature.return_annotation}")

    assert set(headings) == wanted


def test_every_hook_is_tested_by_its_name() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py") if path.name != Path(__file__).name)

    assert [name for name in HOOKS if not re.search(rf"\b{name}\b", tests)] == []


def test_every_setting_is_documented_with_its_default() -> None:
    page = (ROOT / "docs/settings.md").read_text()
    documented = set(re.findall(r"^\| `(FUSEBOARD_\w+)`", page, re.MULTILINE))
    in_code = set(re.findall(r"^\| `(FUSEBOARD_\w+)`", inspect.getdoc(settings) or "", re.MULTILINE))

    assert documented == in_code
    assert f"| {settings.DEFAULT_PROBE_TIMEOUT:g} |" in page


def test_every_public_name_resolves_and_has_a_docstring() -> None:
    undocumented = [
        name for name in fuseboard.__all__ if not inspect.getdoc(getattr(fuseboard, name)) and name != "ALL_LENGTHS"
    ]

    assert undocumented == []
