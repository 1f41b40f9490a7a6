"""The exactness table: made of what the code declares, and the page has it as it is."""

from __future__ import annotations

import importlib
import json
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import fuseboard as fb
from fuseboard import registry
from fuseboard.engine import features
from fuseboard.engine.decoder import QwenDecoder
from fuseboard.engine.graphs import Graphs
from fuseboard.engine.sampling import Sampler
from fuseboard.ops import exactness
from fuseboard.ops.cli import UnusableError
from fuseboard.ops.exactness import BEGIN, DEPENDS, END, ENGINE, LOWER, NOTHING, ROUNDING, Row, fill, main, render, rows

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "exactness.md"


def plugin(answer: Any) -> types.ModuleType:
    """A backend whose exactness hook is `answer`; without one when that is None."""
    module = types.ModuleType("fake")

    @fb.hookimpl
    def info():
        return fb.BackendInfo("a fake.")

    @fb.hookimpl
    def constraints():
        return fb.Constraints(devices={"cpu"}, dtypes={torch.float16, torch.float32}, masks={"bool"})

    @fb.hookimpl
    def kernel(device):
        raise AssertionError("no table loads a kernel")

    module.info, module.constraints, module.kernel = info, constraints, kernel
    if answer is not None:

        @fb.hookimpl
        def exactness(call):
            return answer(call)

        module.exactness = exactness
    return module


def row_of(answer: Any) -> Row:
    board = registry.Registry([registry.Entry("mine", lambda: plugin(answer), "acme-attention", "1.0")])
    with registry.use(board):
        (found,) = [each for each in rows() if "`mine`" in each.name]
    return found


def test_the_page_has_the_table_that_the_code_makes():
    installed = {each.distribution for each in registry.installed_entries()}
    here = {f"fuseboard-{path.parent.name}" for path in ROOT.glob("plugins/*/pyproject.toml")}
    if not here <= installed:
        pytest.skip(f"not every plugin of the tree is installed: {', '.join(sorted(here - installed))}")
    text = PAGE.read_text()

    assert fill(text, render(rows(own=True))) == text, "run: fuseboard exactness docs/exactness.md"


def test_nothing_that_is_on_unasked_changes_a_result():
    on = [row for row in rows() if row.on]

    assert len(on) > 3
    assert {row.changes for row in on} == {NOTHING}


def test_every_backend_and_every_switch_has_its_row():
    names = [row.name for row in rows()]

    for backend in registry.current().backends():
        assert names.count(f"attention by `{backend.name}`") == 1
    for name in features.SWITCHES:
        assert names.count(f"`{name}`") == 1


@pytest.mark.parametrize(
    ("answer", "changes", "ask"),
    [
        (lambda call: fb.Exactness.EXACT, ROUNDING, "policies `exact` and `fast`, or its name"),
        (
            lambda call: fb.Exactness.APPROXIMATE,
            LOWER,
            "policy `fast`, or its name; never at a site with `approx_ok=False`",
        ),
        (None, LOWER, "policy `fast`, or its name; never at a site with `approx_ok=False`"),
        (
            lambda call: fb.Exactness.APPROXIMATE if call.dtype == torch.float16 else fb.Exactness.EXACT,
            DEPENDS,
            "policies `exact` and `fast`, or its name; never at a site with `approx_ok=False`",
        ),
        (
            lambda call: fb.Exactness.APPROXIMATE if call.mask == "bool" and call.one_query else fb.Exactness.EXACT,
            DEPENDS,
            "policies `exact` and `fast`, or its name; never at a site with `approx_ok=False`",
        ),
    ],
)
def test_a_backends_row_is_what_its_exactness_hook_says(answer, changes, ask):
    row = row_of(answer)

    assert (row.changes, row.what, row.on, row.ask) == (changes, "a fake", False, ask)
    assert row.reported == "`Run.report()`: `attention.used`"


def test_a_pages_table_leaves_out_other_peoples_backends_and_heeds_no_setting(monkeypatch):
    entries = [*registry.installed_entries(), registry.Entry("mine", lambda: plugin(None), "acme-attention", "1.0")]
    monkeypatch.setattr(registry, "installed_entries", lambda: entries)
    before = rows(own=True)
    monkeypatch.setenv("FUSEBOARD_DISABLE", "sdpa")

    assert rows(own=True) == before
    assert not [row for row in before if "`mine`" in row.name]
    with registry.use(registry.Registry(entries)):
        names = [row.name for row in rows()]
    assert "attention by `mine`" in names
    assert not [name for name in names if "sdpa" in name]


# ---- the lines that are written by hand


@pytest.mark.parametrize(("place", "row"), ENGINE, ids=[row.name for _, row in ENGINE])
def test_a_line_is_there_when_what_it_is_about_is(place, row):
    module = place.partition(":")[0]
    try:
        importlib.import_module(module)
        there = True
    except ModuleNotFoundError:
        there = False

    assert (row in rows()) == there


def test_a_line_about_a_name_that_is_gone_is_an_error_and_about_a_module_that_is_gone_left_out():
    assert exactness._exists("fuseboard.engine.graphs:Graphs.capture")
    assert not exactness._exists("fuseboard.engine.no_such_module:Graphs")
    with pytest.raises(LookupError, match=r"fuseboard\.engine\.graphs has no Grphs"):
        exactness._exists("fuseboard.engine.graphs:Grphs")


def reports() -> dict[str, dict[str, Any]]:
    """The reports that rows point to, of real objects."""
    config = {
        "model_type": "qwen3", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    }  # fmt: skip
    decoder = QwenDecoder(config)
    decoder.load({name: torch.zeros(each.shape) for name, each in decoder.named_parameters()})
    found = {
        "QwenDecoder": decoder.report() | decoder.report()["graphs"],
        "Sampler": Sampler(temperature=0.5).report(),
        "Run": fb.Run().report(),
        "features": features.report(),
    }
    for name, module, make in (
        ("Compiled", "fuseboard.engine.compiled", lambda module: module.Compiled(torch.nn.Linear(2, 2)).report()),
        ("cpu", "fuseboard.engine.cpu", lambda module: module.report()),
    ):
        if importlib.util.find_spec(module) is not None:
            found[name] = make(importlib.import_module(module))
    return found


def test_what_a_row_says_of_a_report_the_report_has():
    found, checked = reports(), 0
    for row in rows():
        (first, keys) = re.fullmatch(r"((?:`\w+\.report\(\)`(?:, )?)+): (.*)", row.reported).groups()
        for owner in set(re.findall(r"`(\w+)\.report", first)) - {"Graphs", "Package"}:  # need a GPU, a compiler
            for path in re.findall(r"`([\w.]+)`", keys):
                value = found[owner]
                for key in path.split("."):
                    assert key in value, (row.name, path)
                    value = value[key]
                checked += 1

    assert checked > 20


def test_what_is_said_to_be_off_or_on_unasked_is():
    decoder = QwenDecoder(
        {"model_type": "qwen3", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    )  # fmt: skip
    on = {row.name: row.on for row in rows()}

    assert decoder.graphs is on["CUDA graphs"] is True
    assert decoder.fused is on["fused projections"] is False
    assert features.report()["params"]["fast"] == [name for name in features.SWITCHES if on[f"`{name}`"]] == []
    assert callable(Graphs.report)


# ---- the command


def test_the_command_prints_and_gives_data(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out == render(rows()) + "\n"
    assert main(["--json"]) == 0
    assert [Row(**each) for each in json.loads(capsys.readouterr().out)] == rows()


def test_the_command_writes_a_page_between_its_markers_and_finds_a_stale_one(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")

    assert main(["--check", str(page)]) == 1
    assert "is out of date: fuseboard exactness" in capsys.readouterr().err
    assert "old" in page.read_text()
    assert main([str(page)]) == 0
    assert page.read_text() == f"before\n{BEGIN}\n{render(rows(own=True))}\n{END}\nafter\n"
    assert main(["--check", str(page)]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--check"], "--check needs a page"), (["--json", "x.md"], "--json prints and takes no page")],
)
def test_options_that_contradict_each_other_are_refused(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)

    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_a_page_without_markers_or_without_existence_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"{END}\n")

    with pytest.raises(UnusableError, match=r"page\.md: there is no place for the table"):
        main([str(page)])
    with pytest.raises(UnusableError, match=r"none\.md: "):
        main([str(tmp_path / "none.md")])


def test_an_exact_backend_of_wide_heads_alone_only_rounds():
    def limits():
        return fb.Constraints(devices={"cpu"}, dtypes={torch.float16}, head_dims=fb.HeadDims(only={576}))

    module = plugin(lambda call: fb.Exactness.EXACT if call.head_dim == 576 else fb.Exactness.APPROXIMATE)
    module.constraints = fb.hookimpl(limits)
    board = registry.Registry([registry.Entry("wide", lambda: module, "acme-attention", "1.0")])
    with registry.use(board):
        (found,) = [each for each in rows() if "`wide`" in each.name]
    assert found.changes == ROUNDING


def test_a_summary_with_bars_and_line_breaks_stays_one_cell():
    row = Row("x", ROUNDING, "one | two\nthree", on=False, ask="y", reported="z")
    assert render([row]).splitlines()[2] == "| x | rounding | one \\| two three | off | y | z |"
