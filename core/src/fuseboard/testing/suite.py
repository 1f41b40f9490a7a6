"""The conformance kit's tests: `pytest --fuseboard-backend NAME` collects this module.

What a backend refuses is its own affair, and passes; what it admits must be right. A backend that admits nothing fails.
"""

from __future__ import annotations

import concurrent.futures

import pytest
import torch

from fuseboard.testing.cases import Case
from fuseboard.testing.dropout import dropout_problem
from fuseboard.testing.judge import Kit, Outcome, Via
from fuseboard.testing.plugin import CHECKED, KITS, PROPERTY, Session
from fuseboard.testing.surroundings import UNASKED, Check, checks, judge


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test its backends and cases."""
    session = metafunc.config.stash[KITS]
    if "check" in metafunc.fixturenames:
        triples = [(kit, check, case) for kit in session.kits for check, case in checks(kit)]
        ids = [f"{kit.backend.name}/{check.name}:{case}" for kit, check, case in triples]
        metafunc.parametrize(("kit", "check", "case"), triples, ids=ids)
    elif "case" in metafunc.fixturenames:
        chosen = {"test_attention": _some}.get(metafunc.function.__name__, _all)
        pairs = [(kit, case) for kit in session.kits for case in chosen(session.cases[kit.backend.name])]
        ids = [f"{kit.backend.name}/{case}" for kit, case in pairs]
        metafunc.parametrize(("kit", "case"), pairs, ids=ids)
    elif "kit" in metafunc.fixturenames:
        metafunc.parametrize("kit", session.kits, ids=[kit.backend.name for kit in session.kits])


def _some(cases: list[Case]) -> list[Case]:
    return [case for case in cases if not case.note][:: max(1, len(cases) // 120)]


def _all(cases: list[Case]) -> list[Case]:
    return cases


def _judge(kit: Kit, case: Case, via: Via | None = None, check: Check | None = None) -> Outcome:
    try:
        return kit.judge(case, via) if check is None else judge(kit, check, case)
    except torch.OutOfMemoryError as error:
        pytest.skip(f"not enough memory for this case: {error}")


def test_can_run_here(kit: Kit) -> None:
    """The probe and the self-test say yes, as they must before any call is answered."""
    verdict = kit.verdict()
    assert verdict.ok, f"{kit.backend.name} cannot run on {kit.device} ({verdict.stage}): {verdict.reason}"


def test_admits_something(kit: Kit, request: pytest.FixtureRequest) -> None:
    """A backend that refuses every case is not conformant, it is absent."""
    seen: dict[str, None] = {}
    for case in request.config.stash[KITS].cases[kit.backend.name]:
        outcome = _judge(kit, case)
        if outcome.word != "refused":
            return
        named = outcome.detail.startswith(outcome.about)  # by the rule, as most of them begin
        seen.setdefault(outcome.detail if named else f"{outcome.about}: {outcome.detail}")
    shown = "; ".join(list(seen)[:5])
    pytest.fail(f"{kit.backend.name} refuses every case on {kit.device}: {shown}", pytrace=False)


def test_hooks(kit: Kit, request: pytest.FixtureRequest) -> None:
    """No hook or guard raises, or gives what it must not, about any call."""
    faults = kit.faults(request.config.stash[KITS].cases[kit.backend.name])
    if faults:
        pytest.fail(f"{kit.backend.name}: the plugin is at fault: {' '.join(faults)}", pytrace=False)


def test_case(kit: Kit, case: Case, request: pytest.FixtureRequest) -> None:
    """The kernel, called as a chain calls it, gives what float64 gives."""
    outcome = _judge(kit, case)
    session = request.config.stash[KITS]
    request.node.user_properties.append((PROPERTY, session.record(kit, case, outcome)))
    _conclude(session, kit, case, outcome)


def test_attention(kit: Kit, case: Case, request: pytest.FixtureRequest) -> None:
    """`attention` under the strict policy of that name gives it too."""
    _conclude(request.config.stash[KITS], kit, case, _judge(kit, case, kit.attention))


def test_two_threads(kit: Kit, request: pytest.FixtureRequest) -> None:
    """Two threads at once get each its own right answer."""
    session = request.config.stash[KITS]
    kit.verdict()
    cases = [case for case in _some(session.cases[kit.backend.name]) if session.known(kit, case) is None][::6]
    halves = (cases, cases[::-1])
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        answers = threads.map(lambda half: [(case, kit.judge(case)) for case in half], halves)
        failed = [f"{case}: {outcome}" for half in answers for case, outcome in half if outcome.failed]
    assert not failed, f"with two threads at once: {'; '.join(failed[:5])}"


def test_dropout(kit: Kit) -> None:
    """Weights are dropped as often as asked, the rest is scaled, and the gradient saw the same ones."""
    if not kit.backend.constraints.dropout:
        pytest.skip(f"{kit.backend.name} claims no dropout")
    problems = [dropout_problem(kit, dtype) for dtype in sorted(kit.backend.constraints.dtypes, key=str)]
    assert not any(problems), "; ".join(filter(None, problems))


def test_dropout_recomputed(kit: Kit) -> None:
    """A recomputed forward drops what the first one did: its generator was put back."""
    limits = kit.backend.constraints
    if not (limits.dropout and limits.backward):
        pytest.skip(f"{kit.backend.name} claims no {'backward' if limits.dropout else 'dropout'}")
    problems = [dropout_problem(kit, dtype, recomputed=True) for dtype in sorted(limits.dtypes, key=str)]
    assert not any(problems), "; ".join(filter(None, problems))


def test_surroundings(kit: Kit, check: Check, case: Case, request: pytest.FixtureRequest) -> None:
    """The same call captured, recomputed, compiled, under autocast, its inputs overwritten, gives the same numbers."""
    lacks = check.lacks(kit)
    if lacks is not None:
        pytest.skip(lacks)
    outcome = _judge(kit, case, check=check)
    if outcome.about == UNASKED:
        pytest.skip(outcome.detail)
    session = request.config.stash[KITS]
    record = {
        "backend": kit.backend.name, "check": check.label, "case": f"{check.name}:{case}", "word": outcome.word,
        "about": outcome.about, "detail": outcome.detail,
    }  # fmt: skip
    request.node.user_properties.append((CHECKED, record))
    link = session.known(kit, case)
    if outcome.failed and link is not None:
        pytest.xfail(f"known, {link}: {outcome}")
    _conclude(session, kit, f"{check.name}:{case}", outcome)


def _conclude(session: Session, kit: Kit, case: Case | str, outcome: Outcome) -> None:
    link = session.known(kit, case)
    if outcome.failed:
        if link is not None:
            pytest.xfail(f"known, {link}: {outcome}")
        pytest.fail(f"{kit.backend.name}/{case}: {outcome}", pytrace=False)
    if outcome.word == "ok" and link is not None:
        pytest.fail(f"{kit.backend.name}/{case} passes: take its line out of {session.ledger}", pytrace=False)
