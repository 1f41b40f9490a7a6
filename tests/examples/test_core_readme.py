"""The core's own page, which a package index shows: it says what the project's README says, and no other thing."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "core" / "README.md").read_text()
README = (ROOT / "README.md").read_text()


def test_what_it_is_and_its_example_are_those_of_the_projects_readme():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (printed,) = re.findall(r"printed by the code above.*?```\n(.*?)```", PAGE, re.DOTALL)

    assert PAGE.split("\n\n")[:2] == README.split("\n\n")[:2]
    assert f"```python\n{example}```" in README
    assert f"```\n{printed}```" in README


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?://)([^)#]+)", PAGE)

    assert "../README.md" in links
    assert [link for link in links if not (ROOT / "core" / link).exists()] == []


def test_the_package_shows_it():
    assert '\nreadme = "README.md"\n' in (ROOT / "core" / "pyproject.toml").read_text()
