"""The doctor's report for a person: with rich in colour on a terminal, as aligned plain text anywhere else.

Both are made of the same sections, so that they say the same. Loads no torch.
"""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

import attrs

from fuseboard.child import STAGES
from fuseboard.ops.row import ABSENT, BLOCKED, BROKEN, ELSEWHERE, FAULTY, NOT_ASKED, WORKS

__all__ = ["Section", "plain", "sections", "show"]

STYLES = {
    WORKS: "green", BROKEN: "bold red", FAULTY: "bold red", ABSENT: "yellow", BLOCKED: "yellow", ELSEWHERE: "dim",
    NOT_ASKED: "dim", "wrong": "bold red",
}  # fmt: skip
DTYPES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
NARROWEST, WIDEST, DEFAULT_WIDTH = 40, 120, 80
GAP = 2
INDENT = " " * GAP
LEAST = 24
"""Columns that the last cell of a row needs; with fewer it is given lines of its own."""


@attrs.frozen
class Section:
    """One part of the report.

    Attributes:
        title: Its heading; empty for none.
        rows: Cells in columns; the last cell is wrapped.
        items: Texts, each wrapped, and with it lines to copy, which are never broken.
    """

    title: str
    rows: Sequence[Sequence[str]] = ()
    items: Sequence[tuple[str, Sequence[str]]] = ()


def show(found: Mapping[str, Any], stream: TextIO, *, whole: bool = False) -> None:
    """Print the report.

    Args:
        found: The data of `doctor --json`.
        stream: Where to.
        whole: Everything that each backend declares, too.
    """
    parts = list(sections(found, whole=whole))
    if _colourful(stream):
        from rich.console import Console  # noqa: PLC0415 - an extra, and only for terminals

        _show_rich(parts, Console(file=stream, highlight=False))
        return
    width = shutil.get_terminal_size().columns if stream.isatty() else DEFAULT_WIDTH
    stream.write(plain(parts, min(max(width, NARROWEST), WIDEST)))


def _colourful(stream: TextIO) -> bool:
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    try:
        import rich.console  # noqa: F401, PLC0415 - an extra
    except Exception:  # noqa: BLE001 - a damaged package is as good as none
        return False
    return True


# ---- what is said


def sections(found: Mapping[str, Any], *, whole: bool = False) -> Iterator[Section]:
    """The parts of the report, in order; empty ones are left out."""
    for part in (
        _machine(found),
        _settings(found),
        _backends(found),
        *(map(_declared, found["backends"]) if whole else ()),
        _wrong(found),
        _to_install(found),
        _known_bad(found),
        _more(found),
    ):
        if part.rows or part.items:
            yield Section(
                part.title,
                [[_harmless(cell) for cell in row] for row in part.rows],
                [(_harmless(text), [_harmless(line) for line in lines]) for text, lines in part.items],
            )
    summary = _harmless(found["summary"])
    yield Section("", items=[(f"{summary[0].upper()}{summary[1:]}.", ())])


def _harmless(text: str) -> str:
    """Without what would steer a terminal: names, versions and reasons are other people's text."""
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


def _machine(found: Mapping[str, Any]) -> Section:
    torch = found["torch"]
    built = [
        f"{name} {torch[key]}" for name, key in (("CUDA", "cuda"), ("ROCm", "hip"), ("cuDNN", "cudnn")) if torch[key]
    ]
    shown = ", ".join([torch["version"] or "cannot be imported", *built])
    rows = [
        ("fuseboard", found["fuseboard"]),
        ("torch", shown),
        ("python", f"{found['python']}, {found['platform']}"),
    ]
    rows += [("driver", torch["driver"])] if torch["driver"] else []
    return Section("machine", [*rows, *((each["device"], _device(each)) for each in found["devices"])])


def _device(each: Mapping[str, Any]) -> str:
    capability = each["capability"]
    facts = [each["name"] or "", ".".join(map(str, capability)) if isinstance(capability, list) else capability or ""]
    facts += [f"{each['memory'] / 2**30:.0f} GiB"] if each["memory"] else []
    return ", ".join(filter(None, facts))


def _settings(found: Mapping[str, Any]) -> Section:
    rows = []
    for each in found["settings"]:
        state = "wrong" if each["problem"] else "set" if each["source"] == "environment" else "default"
        rows.append((each["name"], state, each["problem"] or each["value"]))
    for each in found["unknown_settings"]:
        near = f" Did you mean {each['nearest']}?" if each["nearest"] else ""
        rows.append((each["name"], "unknown", f"This is not a setting of fuseboard and does nothing.{near}"))
    return Section("settings", rows)


def _backends(found: Mapping[str, Any]) -> Section:
    return Section(
        "backends", [(each["name"], each["state"], _where(each), _about(each)) for each in found["backends"]]
    )


def _where(each: Mapping[str, Any]) -> str:
    """The devices that have its state; of one that is not for this machine, the kinds it is for."""
    if each["state"] == ELSEWHERE:
        return " ".join(each["constraints"]["devices"])
    return _ranges([at["device"] for at in each["devices"] if at["state"] == each["state"]]) or "-"


def _ranges(devices: Sequence[str]) -> str:
    """`cuda:0 cuda:1 cuda:2` as `cuda:0-2`; the numbers of one kind that follow each other."""
    runs: list[tuple[str, int | None, int | None]] = []
    for device in devices:
        kind, _, index = device.partition(":")
        number = int(index) if index else None
        if runs and number is not None and runs[-1][0] == kind and runs[-1][2] == number - 1:
            runs[-1] = (kind, runs[-1][1], number)
        else:
            runs.append((kind, number, number))
    return " ".join(
        kind if first is None else f"{kind}:{first}" if first == last else f"{kind}:{first}-{last}"
        for kind, first, last in runs
    )


def _about(each: Mapping[str, Any]) -> str:
    """Whose it is, what it calls and what it takes, in short."""
    parts = [f"{each['distribution']} {each['version']}"]
    for package in each["packages"]:
        have, wanted = package["installed"], package["wanted"]
        text = f"{package['name']} {have}" if have is not None else f"no {package['name']}"
        parts.append(f"{text}, needed {wanted}" if package["fits"] is False else text)
    limits = each["constraints"]
    if limits:
        parts += [each["exactness"], " ".join(DTYPES.get(name, name) for name in limits["dtypes"])]
    if each["state"] == BLOCKED:
        parts.append(each["reason"].removeprefix("it is ").rstrip("."))
    if each["state"] == ELSEWHERE and any(at["device"].startswith(tuple(limits["devices"])) for at in each["devices"]):
        parts.append(each["reason"])
    return ", ".join(parts)


def _declared(each: Mapping[str, Any]) -> Section:
    rows = [(name, str(each[name])) for name in ("summary", "homepage", "exactness", "install") if each[name]]
    rows += [
        (package["name"], f"{package['installed'] or 'not installed'}, needed {package['wanted'] or 'any'}")
        for package in each["packages"]
    ]
    rows += [(name, _words(value)) for name, value in each["constraints"].items()]
    for at in each["devices"]:
        took = "from disk" if at["cached"] else f"{at['seconds']:.1f} s" if at["seconds"] is not None else ""
        rows.append((at["device"], ", ".join(filter(None, (at["state"], took)))))
    items = [(f"printed on {at['device']}:", at["detail"]) for at in each["devices"] if at["detail"]]
    return Section(each["name"], rows, items)


def _words(value: Any) -> str:  # noqa: PLR0911 - one return a kind of value
    match value:
        case None:
            return "any"
        case True | False:
            return "yes" if value else "no"
        case []:
            return "none"
        case [[int(), int()], [int(), int()]]:
            return " to ".join(f"{major}.{minor}" for major, minor in value)
        case [{}, *_]:
            return "; ".join(f"{each['rule']}: {each['allowed']}" for each in value)
        case [*_]:
            return ("; " if any(" " in str(each) for each in value) else ", ").join(map(str, value))
    return str(value)


def _wrong(found: Mapping[str, Any]) -> Section:
    items: list[tuple[str, Sequence[str]]] = []
    if found["torch"]["error"]:
        items.append((f"torch cannot be imported: {found['torch']['error']}", ()))
    for each in found["backends"]:
        if each["state"] == FAULTY:
            # A host loads the plugin's module itself.
            ends = each["reason"].endswith(STAGES["plugin"])
            advice = ", as a host that loads it would; block it:" if ends else ""
            lines = [f"FUSEBOARD_DISABLE={each['name']}"] if ends else []
            items.append(
                (f"{each['name']} of {each['distribution']} {each['version']}: {each['reason']}{advice}", lines)
            )
        items += [
            (f"{each['name']} of {each['distribution']} {each['version']}: {text}", ()) for text in each["faults"]
        ]
        reasons: dict[tuple[str, str], list[str]] = {}
        for at in each["devices"]:
            if at["state"] == BROKEN:
                reasons.setdefault((at["stage"] or "", at["reason"] or ""), []).append(at["device"])
        for (stage, reason), devices in reasons.items():
            advice, lines = _remedy(each, stage, reason)
            items.append((f"{each['name']} on {_ranges(devices)} ({stage}): {reason}{advice}", lines))
    for fault in found["faults"]:
        text = f"{fault['name']} of {fault['distribution']} {fault['version']} is ignored: {fault['message']}"
        items.append((text, ()))
    return Section("what is wrong", items=items)


def _remedy(each: Mapping[str, Any], stage: str, reason: str) -> tuple[str, list[str]]:
    """What to do about a backend that cannot run, as a sentence and lines to copy."""
    if stage == "self-test" or reason.endswith(STAGES["self-test"]):
        # What is installed was imported and called: the same again would do the same.
        where = each["homepage"] or f"to whoever makes {each['distribution']}"
        return f". Report it: {where}; until then, block it:", [f"FUSEBOARD_DISABLE={each['name']}"]
    return "", [] if not each["install"] or each["install"] in reason else [each["install"]]


def _to_install(found: Mapping[str, Any]) -> Section:
    items = [
        (f"{each['name']} ({each['summary']}): {each['reason']}", [each["install"]])
        for each in found["backends"]
        if each["state"] == ABSENT
    ]
    by_line: dict[str, list[str]] = {}
    for each in found["available"]:
        by_line.setdefault(each["install"], []).append(each["name"])
    items += [(", ".join(names), [line]) for line, names in by_line.items()]
    return Section("not installed; these lines keep the installed torch", items=items)


def _known_bad(found: Mapping[str, Any]) -> Section:
    items = []
    for each in found["backends"]:
        for bad in each["known_bad"]:
            which = "refuses the calls concerned" if bad["some_calls"] else "is not used"
            items.append((f"{each['name']} {which}: {bad['reason']}", [bad["link"]]))
    return Section("known bad with what is installed", items=items)


def _more(found: Mapping[str, Any]) -> Section:
    sdpa, cache = found["torch"]["sdpa"], found["cache"]
    rows = []
    if sdpa:
        on, off = ([name for name, value in sdpa.items() if value is held] for held in (True, False))
        text = f"in a fresh process on: {', '.join(on) or 'nothing'}; off: {', '.join(off) or 'nothing'}"
        rows.append(("torch's attention", text))
    for each in found["backends"]:
        changes = dict.fromkeys(change for at in each["devices"] for change in at["changed"])
        if changes:
            text = f"{'; '.join(changes)}, for every attention of a process that imports what it calls"
            rows.append((f"changed by {each['name']}", text))
    kept = f"{cache['verdicts']} in {cache['folder']}" if cache["folder"] else "none (FUSEBOARD_CACHE=off)"
    rows.append(("verdicts on disk", kept))
    rows += [("note", text) for text in found["notes"]]
    return Section("more", rows)


# ---- how it looks


def plain(parts: Sequence[Section], width: int) -> str:
    """The report as text of at most `width` columns, lines to copy excepted."""
    out: list[str] = []
    for part in parts:
        out += [""] if out else []
        out += [part.title] if part.title else []
        indent = INDENT if part.title else ""
        columns = [max(map(len, column)) for column in zip(*(row[:-1] for row in part.rows), strict=True)]
        for row in part.rows:
            head = indent + "".join(cell.ljust(size + GAP) for cell, size in zip(row[:-1], columns, strict=True))
            if width - len(head) >= LEAST:
                out += _filled(row[-1], width, head, " " * len(head))
            else:
                out += [head.rstrip(), *_filled(row[-1], width, indent * 2, indent * 2)]
        for text, lines in part.items:
            out += _filled(text, width, indent, indent * 2)
            out += [f"{indent * 2}{line}" for line in lines]
    return "\n".join(line.rstrip() for line in out) + "\n"


def _filled(text: str, width: int, first: str, later: str) -> list[str]:
    wrapped = textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=later, break_on_hyphens=False, break_long_words=False
    )
    return wrapped or [first]


def _show_rich(parts: Sequence[Section], console: Any) -> None:
    from rich.padding import Padding  # noqa: PLC0415 - see `show`
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    for number, part in enumerate(parts):
        if number:
            console.print()
        if part.title:
            console.print(Text(part.title, style="bold"))
        indent = GAP if part.title else 0
        if part.rows:
            grid = Table.grid(padding=(0, GAP, 0, 0))
            for at in range(len(part.rows[0])):
                grid.add_column(no_wrap=at < len(part.rows[0]) - 1, overflow="fold", style="cyan" if at == 0 else None)
            for row in part.rows:
                grid.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
            console.print(Padding(grid, (0, 0, 0, indent)))
        for text, lines in part.items:
            for line in _filled(text, console.width, " " * indent, " " * indent * 2):
                console.print(Text(line), soft_wrap=True)
            for line in lines:
                console.print(Text(" " * indent * 2 + line, style="green"), soft_wrap=True)
