"""Every Python example of the README and the docs runs, and prints what it is said to print."""

from __future__ import annotations

import contextlib
import gc
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_of(page: Path) -> str:
    """The Python of a page, one program: later blocks go on from earlier ones."""
    blocks = BLOCK.findall(page.read_text())
    return "\n\n".join(re.sub(rf"^{indent}", "", code, flags=re.MULTILINE) for indent, code in blocks)


def run(page: Path) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(python_of(page), str(page), "exec"), {"__name__": "example"})
    gc.collect()  # sites are weakly kept: the next page may use the names again
    return printed.getvalue()


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)], ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page: Path) -> None:
    run(page)


def test_the_readme_prints_what_it_says() -> None:
    text = (ROOT / "README.md").read_text()
    shown = re.search(r"printed by the code above.*?```\n(.*?)```", text, re.DOTALL)

    assert shown is not None
    assert run(ROOT / "README.md") == shown[1]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text())

    assert not [link for link in links if not (page.parent / link).exists()]
