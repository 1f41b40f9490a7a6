"""A virtual environment that has this one's packages but none of ours: what is installed there comes from wheels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = ("fuseboard", "_editable_impl_fuseboard", "__editable__", "acme")


def run(folder: Path, *command: str, environ: dict[str, str] | None = None) -> str:
    """Run a command that must succeed: what it printed."""
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def wheel(source: Path, folder: Path) -> Path:
    """Build a distribution's wheel into the folder. Nothing is downloaded: hatchling is this environment's own."""
    before = set(folder.glob("*.whl"))
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-q")
    run(folder, sys.executable, "-m", "pip", "wheel", *offline, "-w", str(folder), str(source))
    (made,) = set(folder.glob("*.whl")) - before
    return made


def copy(source: Path, target: Path) -> Path:
    """A distribution's source without what tools have left beside it."""
    return Path(shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "dist", "build", ".*")))


def view(folder: Path) -> Path:
    """A folder with a link to everything that is installed here, but what is ours and what start-up files would add."""
    folder.mkdir()
    for place in map(Path, sys.path):
        if place.name not in ("site-packages", "dist-packages") or not place.is_dir():
            continue
        for each in place.iterdir():
            name = each.name
            if not name.startswith((*OURS, "pip", "__pycache__")) and not name.endswith(".pth"):
                link = folder / name
                if not link.is_symlink():
                    link.symlink_to(each)
    return folder


def surroundings(folder: Path, wheels: Path) -> dict[str, str]:
    """The environment variables under which plain commands (`pip install x`) find wheels, and ask no network."""
    scripts = folder / "scripts"
    scripts.mkdir()
    pytest = scripts / "pytest"  # the one of the environment that is active, whose script nobody has installed
    pytest.write_text('#!/bin/sh\nexec python -m pytest "$@"\n')
    pytest.chmod(0o755)
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "FUSEBOARD_", "PYTEST_"))
    }
    return environ | {
        "PATH": os.pathsep.join([str(scripts), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(view(folder / "view")),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # as pip reads it: no isolation
        "PIP_FIND_LINKS": str(wheels),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
