"""What the benchmarks share: machine facts, a plain table, and the part of a README that a script writes itself."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

README = Path(__file__).parent / "README.md"


def versions(*distributions: str) -> dict[str, str]:
    """Installed versions; `not installed` for the others."""
    return {"python": platform.python_version(), **{name: _version(name) for name in distributions}}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def machine() -> dict[str, object]:
    """What the numbers depend on besides versions."""
    return {"system": platform.system(), "machine": platform.machine(), "cpu": _cpu(), "cores": os.cpu_count()}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def aligned(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table for a terminal: the first column to the left, numbers to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    )


def write_readme(name: str, text: str) -> None:
    """Put `text` between the README's markers of that name."""
    begin, end = f"<!-- {name}: written by {name}.py --readme -->\n", f"<!-- end of {name} -->"
    before, _, rest = README.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        msg = f"{README.name} has no markers for {name}; expected {begin.strip()} and {end}."
        raise SystemExit(msg)
    README.write_text(f"{before}{begin}\n{text}\n\n{end}{after}", encoding="utf-8")
