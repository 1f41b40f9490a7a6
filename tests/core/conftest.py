from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `fakes`

import fuseboard as fb
from fuseboard import context

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def nothing_stays_bound():
    yield
    assert context.BOUND.get() is None
    assert context.process is None
    assert torch.is_grad_enabled()


@pytest.fixture
def make_site(request):
    """Make a site under a name that no other test has."""

    def make(**options):
        return fb.Site(f"{request.node.originalname}.{next(_numbers)}", **options)

    return make


@pytest.fixture
def site(make_site):
    return make_site()


@pytest.fixture
def python(tmp_path):
    """Run code in a fresh interpreter; its standard output, or its failure."""

    def run(code: str, *, fails: bool = False, **environ: str) -> str:
        import os

        env = {name: value for name, value in os.environ.items() if not name.startswith("FUSEBOARD_")}
        env |= {"PYTHONWARNINGS": "error", "PYTHONPATH": os.pathsep.join(sys.path)} | environ
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode != 0) == fails, done.stderr
        return done.stderr if fails else done.stdout

    return run
