"""The third party's example: built into a wheel, installed, and used as its README says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "acme"
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


def child(folder: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **({} if path is None else {"PYTHONPATH": str(path)})}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Where the wheel was installed. Nothing is downloaded: hatchling is the test environment's own."""
    pytest.importorskip("hatchling", reason="builds the example's wheel")
    folder = tmp_path_factory.mktemp("acme")
    shutil.copytree(EXAMPLE, folder / "source")
    offline = ("--no-deps", "--no-index", "--disable-pip-version-check", "-q")
    child(folder, "-m", "pip", "wheel", "--no-build-isolation", *offline, "-w", "wheels", "./source")
    (wheel,) = (folder / "wheels").glob("acme_attention-*.whl")
    child(folder, "-m", "pip", "install", *offline, "--target", "site", str(wheel))
    return folder / "site"


@pytest.mark.slow
def test_the_plugin_is_green_under_the_kit(installed, tmp_path):
    options = ("-p", "no:cacheprovider", "-q", "--fuseboard-backend", "acme", "--fuseboard-device", "cpu")
    done = child(tmp_path, "-W", "error", "-m", "pytest", *options, path=installed)
    counts = re.search(r"`acme` 0\.1\.0 on cpu, torch \S+: (\d+) cases, (\d+) ok, \d+ refused, 0 failed", done.stdout)
    assert counts is not None, done.stdout
    assert int(counts[2]) > 200


def test_a_strict_policy_of_its_name_answers_a_call(installed, tmp_path):
    done = child(tmp_path, "-W", "error", "-c", CALL, path=installed)
    assert done.stdout.strip() == "{'acme': 1}"
