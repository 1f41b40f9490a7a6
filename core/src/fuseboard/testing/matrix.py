"""The conformance kit's matrix: what a backend takes, found by calling it, as Markdown for a terminal and a README."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypedDict

import torch

__all__ = ["Checked", "Record", "check_markers", "failures", "render", "write"]

COLUMNS = (("forward", False, False), ("GQA", True, False), ("backward", False, True), ("GQA backward", True, True))
SHOWN = 8
"""Kinds of failure that are listed."""
_NUMBER = re.compile(r"(\b[A-Za-z_]\w*)|[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
"""A number, or a word with whatever digits it has, such as a dtype's name."""
LEGEND = (
    "yes: right in every case; dense: right, at some lengths or all by way of the written-out mask; "
    "partly: right, and refused at some lengths; no: refused; FAILS: admitted and not right."
)


class Record(TypedDict):
    """What became of one case."""

    backend: str
    case: str
    row: str
    dtype: str
    gqa: bool
    backward: bool
    crossed: bool
    word: str
    about: str
    detail: str
    form: str


class Checked(TypedDict):
    """What became of one call that was made otherwise."""

    backend: str
    check: str
    case: str
    word: str
    about: str
    detail: str


def render(name: str, version: str, device: str, records: list[Record], checked: list[Checked] | tuple[()] = ()) -> str:
    """The matrix of one backend; the same records give the same text."""
    where = torch.cuda.get_device_name(torch.device(device)) if device.startswith("cuda") else device
    words = Counter(each["word"] for each in records)
    failed, otherwise = _failed(records), _failed(checked)
    counts = f"{len(records)} cases, {words['ok']} ok, {words['refused']} refused, {failed + otherwise} failed"
    counts += f" ({otherwise} of them when made otherwise)" if otherwise else ""
    lines = [f"`{name}` {version} on {where}, torch {torch.__version__}: {counts}."]
    tables: dict[str, list[str]] = {}
    for dtype in sorted({each["dtype"] for each in records if each["crossed"]}):
        of_dtype = [each for each in records if each["dtype"] == dtype]
        tables.setdefault("\n".join(_table(of_dtype)), []).append(dtype)
    for table, dtypes in tables.items():
        lines += ["", f"| {', '.join(dtypes)} | {' | '.join(title for title, _, _ in COLUMNS)} |", table]
    if checked:
        lines += ["", *_otherwise(checked)]
    return "\n".join([*lines, "", LEGEND])


def _failed(records: Sequence[Record | Checked]) -> int:
    return sum(each["word"] not in ("ok", "refused") for each in records)


def _otherwise(checked: list[Checked] | tuple[()]) -> Iterable[str]:
    """The same calls made otherwise, a line for each way: how many were as right as the plain call."""
    for label in dict.fromkeys(each["check"] for each in checked):
        words = Counter(each["word"] for each in checked if each["check"] == label)
        right, refused = words["ok"], words["refused"]
        failed = sum(words.values()) - right - refused
        word = "FAILS" if failed else "yes" if right else "no"
        counts = [f"{right} case{'s' * (right != 1)}"] * bool(right) + [f"{refused} refused"] * bool(refused)
        counts += [f"{failed} failed"] * bool(failed)
        yield f"* {label}: {word} ({', '.join(counts)})"


def failures(records: Sequence[Record | Checked]) -> list[str]:
    """What failed, a line for each kind of failure, the commonest first: a fault shows in hundreds of cases.

    A kind is a message without its numbers. Those of its first case stand behind it.
    """
    kinds: dict[str, list[Record | Checked]] = {}
    for each in records:
        if each["word"] not in ("ok", "refused"):
            word = f"{each['word']} ({each['about']})" if each["about"] else each["word"]
            kinds.setdefault(f"{word}: {_NUMBER.sub(_kept, each['detail'])}", []).append(each)
    ordered = sorted(kinds.items(), key=lambda item: -len(item[1]))
    lines = []
    for kind, found in ordered[:SHOWN]:
        example = f": {found[0]['detail']}" if not kind.endswith(found[0]["detail"]) else ""
        lines.append(f"{len(found):5} x {kind}, as in {found[0]['case']}{example}")
    rest = sum(len(found) for _, found in ordered[SHOWN:])
    return [*lines, f"{rest:5} x others"] if rest else lines


def _kept(found: re.Match[str]) -> str:
    return found[1] or "…"


def _table(records: list[Record]) -> Iterable[str]:
    yield "|---" * (1 + len(COLUMNS)) + "|"
    for row in dict.fromkeys(each["row"] for each in records if each["crossed"]):
        cells = []
        for _, gqa, backward in COLUMNS:
            here = [each for each in records if (each["row"], each["gqa"], each["backward"]) == (row, gqa, backward)]
            cells.append(_cell(here))
        yield f"| {row} | {' | '.join(cells)} |"


def _cell(records: list[Record]) -> str:
    # A failure counts wherever it was found; what is refused is read off the crossing, which every dtype has alike.
    if any(each["word"] not in ("ok", "refused") for each in records):
        return "FAILS"
    crossed = [each for each in records if each["crossed"]]
    right = [each for each in crossed if each["word"] == "ok"]
    if not right:
        return "no" if crossed else ""
    if len(right) < len(crossed):
        return "partly"
    dense = any(each["form"] == "dense" for each in right) and right[0]["row"].startswith("mask_info")
    return "dense" if dense else "yes"


def check_markers(path: Path, names: Iterable[str]) -> None:
    """Raise unless the file has a place for each backend's matrix.

    Raises:
        ValueError: Markers are missing; the message says which.
        OSError: The file cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    for name in names:
        _place(text, path, name)


def write(path: Path, name: str, matrix: str) -> None:
    """Replace what stands between a backend's markers."""
    text = path.read_text(encoding="utf-8")
    start, end = _place(text, path, name)
    path.write_text(f"{text[:start]}\n{matrix}\n{text[end:]}", encoding="utf-8")


def _place(text: str, path: Path, name: str) -> tuple[int, int]:
    marker, end = f"<!-- fuseboard matrix: {name} -->", "<!-- end -->"
    start = text.find(marker)
    stop = text.find(end, start)
    if start < 0 or stop < 0:
        msg = f"{path} has no place for the matrix: add the lines {marker!r} and {end!r} where it belongs."
        raise ValueError(msg)
    return start + len(marker), stop
