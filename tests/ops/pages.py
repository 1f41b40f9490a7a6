"""The output of commands in the documentation: `python tests/ops/pages.py` writes it anew, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAGES = [Path(__file__).parents[2] / "docs" / "operators.md"]
BLOCK = re.compile(
    r"(```\nfuseboard (?P<arguments>[^\n]+)\n```\n\n<!-- printed by the command above[^\n]*-->\n```\n)"
    r"(?P<output>.*?)(?=```)",
    re.DOTALL,
)


def printed(arguments: str, home: str) -> str:
    """What `fuseboard ARGUMENTS` prints for somebody whose home is elsewhere, as if it were /home/me."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("FUSEBOARD_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-m", "fuseboard", *arguments.split()],
        env=kept | {"HOME": home, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}, cwd=home,
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    return done.stdout.replace(home, "/home/me")


def main() -> None:
    for page in PAGES:
        with tempfile.TemporaryDirectory() as home:
            text = BLOCK.sub(lambda found, home=home: found[1] + printed(found["arguments"], home), page.read_text())
        page.write_text(text)


if __name__ == "__main__":
    main()
