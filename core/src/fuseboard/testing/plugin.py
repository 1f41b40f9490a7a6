"""The pytest side of the conformance kit: `pytest --fuseboard-backend NAME`. Loads no torch until the option is given.

| option | meaning |
|---|---|
| `--fuseboard-backend NAME` | run the kit on this backend; may be repeated |
| `--fuseboard-device DEVICE` | where; default the first of the backend's devices that this machine has |
| `--fuseboard-matrix FILE` | write what was found between the markers in this file |
| `--fuseboard-xfails FILE` | known failures; default `conformance-xfails.txt` in the root directory, if there is one |

With no path given, the kit replaces `testpaths`: run your own tests in a second command. The file of known failures
has a line for each: `backend/case link`, or `backend/check:case link` for a call that fails only when it is made
otherwise. A line whose case passes is an error, so that the list shrinks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fuseboard.testing.cases import Case
    from fuseboard.testing.judge import Kit, Outcome
    from fuseboard.testing.matrix import Checked, Record

SUITE = "fuseboard.testing.suite"
LEDGER = "conformance-xfails.txt"
PROPERTY = "fuseboard"
CHECKED = "fuseboard-checked"


class Session:
    """One run of the kit.

    Attributes:
        kits: The backends under test.
        cases: Each one's cases, by its name.
        ledger: The file of known failures.
        records: What became of which case.
        checked: What became of which call that was made otherwise.
    """

    def __init__(self, kits: list[Kit], cases: dict[str, list[Case]], ledger: Path, known: Mapping[str, str]) -> None:
        self.kits = kits
        self.cases = cases
        self.ledger = ledger
        self.records: list[Record] = []
        self.checked: list[Checked] = []
        self._known = known

    def known(self, kit: Kit, case: Case | str) -> str | None:
        """The link of a known failure."""
        return self._known.get(f"{kit.backend.name}/{case}")

    def record(self, kit: Kit, case: Case, outcome: Outcome) -> Record:
        """What the matrix needs of a case, as plain data: it travels with the test's report."""
        return {
            "backend": kit.backend.name, "case": str(case), "row": case.row,
            "dtype": str(case.dtype).removeprefix("torch."), "gqa": case.kv_heads != case.heads,
            "backward": bool(case.grad), "crossed": case.crossed, "word": outcome.word,
            "about": outcome.about, "detail": outcome.detail, "form": outcome.form,
        }  # fmt: skip

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the records, from wherever the tests run."""
        if report.when == "call":
            self.records += [value for name, value in report.user_properties if name == PROPERTY]  # type: ignore[misc]
            self.checked += [value for name, value in report.user_properties if name == CHECKED]  # type: ignore[misc]


KITS: pytest.StashKey[Session] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("fuseboard", "fuseboard: the conformance kit for attention backends")
    group.addoption("--fuseboard-backend", action="append", default=[], metavar="NAME", help="run the kit on a backend")
    group.addoption("--fuseboard-device", metavar="DEVICE", help="where to run it, such as cuda:1")
    group.addoption("--fuseboard-matrix", metavar="FILE", help="write the matrix between the markers in FILE")
    group.addoption("--fuseboard-xfails", metavar="FILE", help=f"known failures; default {LEDGER}, if there is one")


def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Ask for the kit's suite, as if it had been typed."""
    if early_config.known_args_namespace.fuseboard_backend:
        args += ["--pyargs", SUITE]


def pytest_configure(config: pytest.Config) -> None:
    """Open the backends asked for; what cannot be done is said before anything runs."""
    names: list[str] = config.getoption("--fuseboard-backend")
    if not names:
        return
    try:
        from fuseboard.testing import matrix  # noqa: PLC0415 - nothing of ours is loaded without the option
        from fuseboard.testing.cases import cases  # noqa: PLC0415
        from fuseboard.testing.judge import Kit  # noqa: PLC0415 - it reads the settings
        from fuseboard.testing.surroundings import checks  # noqa: PLC0415

        kits = [Kit.open(name, config.getoption("--fuseboard-device")) for name in dict.fromkeys(names)]
        made = {kit.backend.name: cases(kit.backend.constraints, kit.device) for kit in kits}
        names_of_cases = {f"{name}/{case}" for name, each in made.items() for case in each}
        names_of_cases |= {f"{kit.backend.name}/{check.name}:{case}" for kit in kits for check, case in checks(kit)}
        ledger, known = _ledger(config, names_of_cases)
        if config.getoption("--fuseboard-matrix"):
            matrix.check_markers(Path(config.getoption("--fuseboard-matrix")), list(made))
    except (OSError, ValueError) as error:  # errors of policies and settings are ValueErrors
        raise pytest.UsageError(str(error)) from error
    session = Session(kits, made, ledger, known)
    config.stash[KITS] = session
    config.pluginmanager.register(session, "fuseboard-session")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print each backend's matrix, and write it where that was asked for."""
    session = config.stash.get(KITS, None)
    if session is None:
        return
    from fuseboard.testing import matrix  # noqa: PLC0415 - as above

    for kit in session.kits:
        name = kit.backend.name
        # In the order of the cases, whichever worker's report came first.
        order = {str(case): place for place, case in enumerate(session.cases[name])}
        records = [each for each in session.records if each["backend"] == name]
        records.sort(key=lambda each: order[each["case"]])
        checked = [each for each in session.checked if each["backend"] == name]
        text = matrix.render(name, kit.backend.version, str(kit.device), records, checked)
        terminalreporter.section(f"fuseboard: {name}")
        terminalreporter.write_line(text)
        failed = matrix.failures([*records, *checked])
        if failed:
            terminalreporter.write_line("\n".join(["", "What failed, by kind:", *failed]))
        path = config.getoption("--fuseboard-matrix")
        if path and len({each["case"] for each in records}) == len(session.cases[name]):
            matrix.write(Path(path), name, text)
        elif path:
            terminalreporter.write_line(f"{path} is left as it was: not every case ran", yellow=True)


def _ledger(config: pytest.Config, cases: set[str]) -> tuple[Path, dict[str, str]]:
    """The known failures: `backend/case` to link."""
    given = config.getoption("--fuseboard-xfails")
    path = Path(given) if given else config.rootpath / LEDGER
    if not given and not path.is_file():
        return path, {}
    known: dict[str, str] = {}
    backends = {case.partition("/")[0] for case in cases}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        msg = f"{path} is not text in UTF-8 ({error})."
        raise ValueError(msg) from error
    for number, line in enumerate(lines, 1):
        name, *rest = line.split() or ["#"]
        if name.startswith("#"):
            continue
        if not rest or "://" not in rest[0]:
            msg = f"{path}, line {number}: {line!r} has no link; expected `backend/case https://...`."
            raise ValueError(msg)
        if name.partition("/")[0] in backends and name not in cases:
            msg = f"{path}, line {number}: there is no case {name!r}; take the line out, or correct it."
            raise ValueError(msg)
        known[name] = rest[0]
    return path, known
