"""The plugin with structures on the page for kernel authors passes the kit, and fails as the page says it would."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "kernel-authors.md").read_text()
FILLED = "v = v.masked_fill(~hides.keys[:, None, :, None], 0.0)"


def plugin() -> str:
    (code,) = re.findall(r"test_page\.py runs the kit on it -->\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return code


@pytest.mark.slow
def test_the_plugin_of_the_page_passes_the_kit(kit):
    done = kit("page", "double_source", source=plugin())

    assert done.returncode == 0, done.stdout
    assert "0 failed." in done.stdout
    for keys in ("", "right-padded keys + "):
        assert f"| mask_info: {keys}bottom-right causal + window | yes |" in done.stdout
    assert "| mask_info: window + bound ahead | yes |" in done.stdout
    assert "* NaN in the padding: yes (" in done.stdout


def test_a_weight_of_zero_for_what_is_hidden_is_not_enough(kit):
    assert FILLED in plugin()
    done = kit("page", "double_source", "-k", "unread", source=plugin().replace(FILLED, "pass"))

    assert done.returncode == 1
    assert "wrong (padding read): output is off by nan" in done.stdout
    assert "`wrong (padding read): output is off by nan`" in " ".join(PAGE.split())
