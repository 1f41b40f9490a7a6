# ruff: noqa: PTH100, PTH109, PTH110, PTH112, PTH116, PTH118, PTH119 - paths are shown as given, links stay links
"""`fuseboard lint`: find, in an engine's source, attention that bypasses the board and writes to process-wide state.

Reads sources only: nothing is imported or run, and torch need not be installed. Every finding is a line
`file:line:column: RULE message`; docs/lint.md says what each rule means.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import stat
import sys
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fuseboard.ops.cli import Parser, UnusableError
from fuseboard.ops.lint_rules import KERNEL_RULES, RULES
from fuseboard.ops.lint_walk import Found, check, relevant

__all__ = ["SCHEMA", "Finding", "Report", "lint", "lint_source", "main"]

SCHEMA = 1
"""Of `--json`: counts up when a key is renamed, removed or means something else."""

SKIPPED = frozenset({".venv", "venv", "__pycache__", "build", "dist", "node_modules", "site-packages"})
"""Folders that hold no source of the project; hidden ones and virtual environments are skipped too."""

LARGEST = 8_000_000
"""Bytes: a larger file is data with a `.py` at its end, and would take the parser gigabytes."""

_ALLOW = re.compile(r"#\s*fuseboard:\s*allow(?P<file>-file)?\b\s*(?P<rest>.*)")


@dataclass(frozen=True, order=True)
class Finding:
    """One line of the report.

    Attributes:
        path: The file, as it was reached from what was asked for.
        line: From 1.
        column: From 1.
        rule: Its code, a key of `RULES`.
        message: What was found, and what to write instead.
    """

    path: str
    line: int
    column: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}: {self.rule} {self.message}"


@dataclass
class Report:
    """What was read and what was found there, in the order of paths and lines.

    Attributes:
        findings: Sorted.
        files: How many files were read.
    """

    findings: list[Finding] = field(default_factory=list)
    files: int = 0


@dataclass(frozen=True)
class Options:
    """What to read and what to report; the table `[tool.fuseboard.lint]` of a pyproject.toml has the same keys.

    Attributes:
        kernels: Globs of places where calling kernels is the purpose: rules FB1.. are off there.
        exclude: Globs of files and folders to leave out.
        select: Prefixes of the rules to report; empty for all.
        ignore: Prefixes of the rules not to report.
        root: What globs are relative to.
    """

    kernels: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    root: str = "."

    def reports(self, rule: str) -> bool:
        """Whether findings of this rule are wanted."""
        return (not self.select or rule.startswith(self.select)) and not rule.startswith(self.ignore or ("-",))

    def lies_in(self, path: str, globs: tuple[str, ...]) -> bool:
        """Whether one of the globs matches the path or a folder above it."""
        if not globs:
            return False
        parts = Path(os.path.relpath(os.path.abspath(path), os.path.abspath(self.root))).parts
        return any(_matches(parts, Path(glob).parts) for glob in globs)


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a pattern matches the first parts of a path; one without a slash matches any part, as in .gitignore."""
    if len(pattern) == 1 and pattern[0] != "**":
        return any(fnmatchcase(part, pattern[0]) for part in parts)
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches_from(parts[start:], pattern[1:]) for start in range(len(parts) + 1))
    return _matches_from(parts, pattern)


def _matches_from(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches_from(parts[start:], pattern[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches_from(parts[1:], pattern[1:])


# ---- one source


def lint_source(  # noqa: PLR0911 - one return a way of not being a source
    source: bytes, path: str = "<source>", *, kernels: bool = False, own: frozenset[str] = frozenset()
) -> list[Finding]:
    """The findings of one source.

    Args:
        source: Its bytes.
        path: What to call it.
        kernels: Whether calling kernels is its purpose.
        own: The top-level names of its project, whose attributes it may write.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        text = source.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        return [
            Finding(
                path, 1, 1, "FB902", f"its text cannot be decoded ({_first_line(error)}): nothing in it was checked"
            )
        ]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the source's own invalid escapes
            tree = ast.parse(source, path)
    except SyntaxError as error:
        line, column = error.lineno or 1, error.offset or 1
        return [
            Finding(path, line, max(column, 1), "FB901", f"not valid Python ({error.msg}): nothing in it was checked")
        ]
    except ValueError as error:  # null bytes, before Python 3.12
        return [Finding(path, 1, 1, "FB901", f"not valid Python ({error}): nothing in it was checked")]
    except (RecursionError, MemoryError):
        return [Finding(path, 1, 1, "FB902", "nested too deeply to be read: nothing in it was checked")]
    if not relevant(text, tree):
        return []
    try:
        found = check(tree, own, exports=os.path.basename(path) == "__init__.py")
    except RecursionError:
        return [Finding(path, 1, 1, "FB902", "nested too deeply to be read: nothing in it was checked")]
    if kernels:
        found = [each for each in found if each.rule not in KERNEL_RULES]
    lines = text.splitlines() if text.isascii() else io.StringIO(text, newline=None).read().split("\n")
    findings = [Finding(path, each.line, _column(lines, each), each.rule, each.message) for each in found]
    if "fuseboard:" not in text:
        return findings
    return _allowed(text, path, found, findings)


def _column(lines: list[str], found: Found) -> int:
    line = lines[found.line - 1] if found.line <= len(lines) else ""
    return len(line.encode("utf-8", "replace")[: found.offset].decode("utf-8", "replace")) + 1


def _allowed(text: str, path: str, found: list[Found], findings: list[Finding]) -> list[Finding]:
    """The findings that no comment allows, and those about the comments themselves."""
    kept = list(range(len(found)))
    about: list[Finding] = []
    for line, column, is_file, reason in _allows(text):
        hit = [at for at in range(len(found)) if is_file or line in (found[at].line, found[at].first)]
        what = "allow-file" if is_file else "allow"
        if not reason:
            example = f"# fuseboard: {what}(why it must be so)"
            about.append(
                Finding(path, line, column, "FB301", f"this {what} has no reason and allows nothing: write {example}")
            )
        elif not hit:
            where = "this file" if is_file else "this statement"
            about.append(
                Finding(path, line, column, "FB302", f"nothing in {where} needs this {what}({reason}): remove it")
            )
        else:
            kept = [at for at in kept if at not in hit]
    return sorted([*(findings[at] for at in kept), *about])


def _allows(text: str) -> Iterator[tuple[int, int, bool, str]]:
    """Line, column, whether for the file, and reason of each allow comment; in strings there are none."""
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and (match := _ALLOW.search(token.string)):
                rest = match["rest"].strip()
                closed = rest.startswith("(") and ")" in rest
                reason = rest[1 : rest.rindex(")")].strip() if closed else ""
                yield token.start[0], token.start[1] + match.start() + 1, bool(match["file"]), reason
    except (tokenize.TokenError, SyntaxError):  # the parser took it: an odd end of the file
        return


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


# ---- files and folders


def lint(paths: Sequence[str], options: Options | None = None) -> Report:
    """Lint files and folders.

    Args:
        paths: Each a file or a folder.
        options: What to leave out; default, nothing.
    """
    options = Options() if options is None else options
    report = Report()
    seen: set[str] = set()
    for given in sorted(dict.fromkeys(paths)):
        for path, problem in _files(given, options):
            real = os.path.realpath(path)
            if real in seen and problem is None:
                continue
            seen.add(real)
            report.files += problem is None
            found = [Finding(path, 1, 1, "FB902", problem)] if problem is not None else _lint_file(path, options)
            report.findings += [each for each in found if options.reports(each.rule)]
    report.findings.sort()
    return report


def _lint_file(path: str, options: Options) -> list[Finding]:
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            return [Finding(path, 1, 1, "FB902", "not a regular file: it was not read")]
        if about.st_size > LARGEST:
            size = f"{about.st_size / 1e6:.0f} MB, at most {LARGEST / 1e6:.0f} MB are read"
            return [Finding(path, 1, 1, "FB902", f"too large ({size}): it was not read")]
        source = Path(path).read_bytes()
    except OSError as error:
        return [Finding(path, 1, 1, "FB902", f"cannot be read ({error.strerror or error}): nothing in it was checked")]
    return lint_source(source, path, kernels=options.lies_in(path, options.kernels), own=_own(path))


def _own(path: str) -> frozenset[str]:
    """The top-level names of a file's project: its package, or the modules beside a script."""
    folder = Path(path).absolute().parent
    if not (folder / "__init__.py").is_file():
        return _beside(str(folder))
    while (folder.parent / "__init__.py").is_file():
        folder = folder.parent
    return frozenset((folder.name,))


_known: dict[str, frozenset[str]] = {}


def _beside(folder: str) -> frozenset[str]:
    if folder not in _known:
        with os.scandir(folder) as entries:
            _known[folder] = frozenset(entry.name.removesuffix(".py") for entry in entries)
    return _known[folder]


def _files(given: str, options: Options) -> Iterator[tuple[str, str | None]]:
    """The sources under a path, each with None, or a path with the reason why it cannot be looked into."""
    if not os.path.isdir(given):
        yield given, None
        return
    yield from _folder(given, options, (os.path.realpath(given),))


def _folder(folder: str, options: Options, above: tuple[str, ...]) -> Iterator[tuple[str, str | None]]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        yield folder, f"cannot be listed ({error.strerror or error}): nothing in it was checked"
        return
    for entry in names:
        path = os.path.normpath(entry.path) if entry.path.startswith("./") else entry.path
        try:
            is_folder = entry.is_dir()
        except OSError:
            is_folder = False
        if options.lies_in(path, options.exclude):
            continue
        if not is_folder:
            if entry.name.endswith((".py", ".pyw")):
                yield path, None
            continue
        if entry.name in SKIPPED or entry.name.startswith(".") or os.path.exists(os.path.join(path, "pyvenv.cfg")):
            continue
        real = os.path.realpath(path)
        if entry.is_symlink() and real in above:
            yield path, "a link to a folder above it: not followed"
            continue
        yield from _folder(path, options, (*above, real))


# ---- the command line


def main(argv: list[str]) -> int:
    """Run `fuseboard lint`; 0 for a clean tree, 1 for findings, 2 for a question that cannot be answered."""
    try:
        return _main(argv)
    except UnusableError as error:
        sys.stderr.write(f"fuseboard lint: {error}\n")
        return 2
    except SystemExit as left:  # argparse leaves by itself
        return left.code if isinstance(left.code, int) else 0


def _main(argv: list[str]) -> int:
    asked = _parser().parse_args(argv)
    for path in asked.paths:
        if not os.path.lexists(path):
            msg = f"there is no file or folder {path!r}."
            raise UnusableError(msg)
    report = lint(asked.paths, _options(asked))
    if asked.json:
        text = json.dumps(
            {
                "schema": SCHEMA,
                "files": report.files,
                "findings": [vars(each) for each in report.findings],
                "statistics": _statistics(report),
            },
            indent=2,
        )
        sys.stdout.write(f"{text}\n")
        return int(bool(report.findings))
    if asked.statistics:
        lines = [f"{count:6} {rule} {RULES[rule]}" for rule, count in _statistics(report).items()]
    else:
        lines = [str(each) for each in report.findings]
    lines.append(f"{len(report.findings)} findings in {report.files} files")
    # A name that is not valid Unicode is shown by its bytes.
    sys.stdout.write("".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace").decode())
    return int(bool(report.findings))


def _statistics(report: Report) -> dict[str, int]:
    return dict(sorted(Counter(each.rule for each in report.findings).items()))


def _parser() -> Parser:
    parser = Parser(
        prog="fuseboard lint",
        description="Find attention that bypasses the board, and writes to process-wide state, in Python sources.",
        epilog="rules: " + "; ".join(f"{code} {text}" for code, text in RULES.items()) + ". Comments: "
        "'# fuseboard: allow(reason)' on a line, '# fuseboard: allow-file(reason)' anywhere in a file.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a file, or a folder with all below it")
    parser.add_argument("--json", action="store_true", help="findings as data")
    parser.add_argument("--statistics", action="store_true", help="a count for each rule instead of the findings")
    parser.add_argument("--select", action="append", metavar="RULES", help="report these only; FB1 is every FB1..")
    parser.add_argument("--ignore", action="append", metavar="RULES", help="do not report these")
    parser.add_argument("--exclude", action="append", metavar="GLOB", help="leave these files and folders out")
    parser.add_argument(
        "--kernels", action="append", metavar="GLOB", help="places made to call kernels: no FB1.. there"
    )
    return parser


def _options(asked: Any) -> Options:
    configured, root = _configuration(asked.paths[0])
    options: dict[str, tuple[str, ...]] = {}
    for name in _KEYS:
        given = getattr(asked, name)
        values = configured.get(name, []) if given is None else given
        if name in ("select", "ignore"):
            values = [part.strip() for value in values for part in value.split(",") if part.strip()]
            for value in values:
                if not any(rule.startswith(value) for rule in RULES):
                    msg = f"--{name}: there is no rule {value!r}. Rules: {', '.join(RULES)}."
                    raise UnusableError(msg)
        # A place from the command line is seen from here, one from a file from that file's folder.
        options[name] = tuple(
            os.path.relpath(value, root) if given is not None and "/" in value else value for value in values
        )
    return Options(**options, root=root)


_KEYS = ("kernels", "exclude", "select", "ignore")
_TABLE = "[tool.fuseboard.lint]"


def _configuration(path: str) -> tuple[dict[str, list[str]], str]:
    """The table of the nearest pyproject.toml at or above a path that has it, and that file's folder."""
    start = Path(path).absolute()
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        table = _table(text, file) if "fuseboard" in text else None
        if table is not None:
            for name, value in table.items():
                if name not in _KEYS:
                    msg = f"{file}: {_TABLE} has no key {name!r}. Keys: {', '.join(_KEYS)}."
                    raise UnusableError(msg)
                if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                    msg = f"{file}: {name} in {_TABLE} is {value!r}, expected a list of strings."
                    raise UnusableError(msg)
            return table, str(folder)
    return {}, os.getcwd()


def _table(text: str, file: Path) -> dict[str, Any] | None:
    """The table; None for a file without it."""
    headed = re.search(r"^\s*\[tool\.fuseboard\.lint\]", text, re.MULTILINE)
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415 - Python 3.10 has none

        try:
            found: Any = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            if not headed:
                return None
            msg = f"{file} is not valid TOML: {error}."
            raise UnusableError(msg) from error
        for name in ("tool", "fuseboard", "lint"):
            found = found.get(name) if isinstance(found, dict) else None
        if found is None or isinstance(found, dict):
            return found
        msg = f"{file}: {_TABLE} is {found!r}, expected a table."
        raise UnusableError(msg)
    return plain_table(text, file) if headed else None


def plain_table(text: str, file: Path) -> dict[str, Any]:
    """The table without a TOML parser, which Python has from 3.11 only: lists of plain strings, as Python has them."""
    body = re.split(r"^\s*\[tool\.fuseboard\.lint\][^\n]*$", text, maxsplit=1, flags=re.MULTILINE)[1]
    body = re.split(r"^\s*\[[^\n]*\]\s*(?:#[^\n]*)?$", body, maxsplit=1, flags=re.MULTILINE)[0]
    try:
        tree = ast.parse(body.strip())
        return {
            each.targets[0].id: ast.literal_eval(each.value)  # type: ignore[attr-defined]
            for each in tree.body
            if isinstance(each, ast.Assign) or ast.literal_eval("unreadable")
        }
    except (SyntaxError, ValueError, AttributeError) as error:
        msg = f"{file}: {_TABLE} cannot be read by Python 3.10, which has no TOML parser; give --kernels and --exclude."
        raise UnusableError(msg) from error


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
