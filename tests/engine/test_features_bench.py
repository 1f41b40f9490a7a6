"""The benchmark of process switches: its stopwatch, on a device made of numbers, and what is kept of a run."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fuseboard.engine.features import SWITCHES

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "features.py"
KEPT = ROOT / "benchmarks" / "results" / "features.json"
PAGE = ROOT / "docs" / "features.md"
CYCLES = 1.7e9  # a second's
US = 1e-6


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = -1.0

    def record(self) -> None:
        self.device.host += US
        self.at = max(self.device.free, self.device.host)

    def query(self) -> bool:
        return self.device.host >= self.at

    def synchronize(self) -> None:
        self.device.host = max(self.device.host, self.at)

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


class Device:
    """A host and a device, each with the time that it has come to; the host waits where too much is queued."""

    QUEUE = 1000

    def __init__(self) -> None:
        self.host = self.free = 0.0
        self.ends: list[float] = []

    def launch(self, seconds: float, *, hosts: float) -> None:
        self.host += hosts
        if len(self.ends) >= self.QUEUE:
            self.host = max(self.host, self.ends[-self.QUEUE])
        self.free = max(self.free, self.host) + seconds
        self.ends.append(self.free)

    def now(self) -> float:
        return self.host

    def event(self) -> Event:
        return Event(self)

    def sleep(self, cycles: int) -> None:
        assert isinstance(cycles, int)  # as torch insists
        self.launch(cycles / CYCLES, hosts=5 * US)

    def synchronize(self) -> None:
        self.host = max(self.host, self.free)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize(
    ("launches", "seconds", "hosts"),
    [(1, 10 * US, 50 * US), (1, 2700 * US, 10 * US), (100, 2 * US, 40 * US), (12, 90 * US, 30 * US)],
)
def test_what_the_host_takes_to_launch_is_not_in_a_time(script, launches, seconds, hosts):
    device = Device()

    def compute(_: Callable[[], None]) -> None:
        for _ in range(launches):
            device.launch(seconds, hosts=hosts)

    times = script["Stopwatch"](device).times(compute, 30)

    assert len(times) >= 3
    assert times == pytest.approx([launches * seconds / US] * len(times), rel=1e-6)


def test_a_long_operation_is_timed_in_parts_and_not_at_all_where_the_queue_is_too_short_for_it(script):
    device = Device()

    def compute(cut: Callable[[], None]) -> None:
        for part in range(16):
            if part:
                cut()
            for _ in range(100):
                device.launch(3 * US, hosts=40 * US)

    whole = script["Stopwatch"](device).times(lambda _: compute(script["nowhere"]), 30)
    parts = script["Stopwatch"](device).times(compute, 30)

    assert whole == []
    assert parts == pytest.approx([16 * 100 * 3.0] * len(parts), rel=1e-6)
    assert len(parts) >= 3


def test_an_operation_that_waits_for_the_device_has_no_time(script):
    device = Device()

    def compute(_: Callable[[], None]) -> None:
        device.launch(20 * US, hosts=10 * US)
        device.synchronize()
        device.launch(20 * US, hosts=10 * US)

    assert script["Stopwatch"](device).times(compute, 30) == []
    assert device.host < 1


def test_a_host_that_falters_has_a_round_made_again_and_no_wrong_one(script):
    device, calls = Device(), 0

    def compute(_: Callable[[], None]) -> None:
        nonlocal calls
        calls += 1
        device.launch(500 * US, hosts=10 * US)
        if calls % 50 == 0:
            device.host += 0.02
        device.launch(500 * US, hosts=10 * US)

    times = script["Stopwatch"](device).times(compute, 30)

    assert calls > 50
    assert times == pytest.approx([1000.0] * len(times), rel=1e-6)
    assert len(times) == 30


def test_the_noise_is_what_measurements_of_the_same_show_and_no_less_than_is_usual(script):
    first = {"a": 100.0, "b": 100.0, "c": 100.0, "host": None, "once": 100.0}
    others = [{"a": 100.0, "b": 98.0, "c": 110.0, "host": None}, {"b": 101.0, "c": 90.0}]
    usual = 1 / 0.98 - 1

    assert script["noise_of"](first, others) == pytest.approx({"a": usual, "b": usual, "c": 1 / 0.9 - 1})
    assert script["noise_of"]({}, []) == {}


def test_what_a_switch_left_alone_counts_as_noise_and_what_it_could_change_does_not(script):
    could, *_, spared, touched = script["CONCERNS"]["tf32"]

    def child(us: float, digest: str) -> SimpleNamespace:
        found = {label: {"us": us, "bits": "0", "error": 0.0} for label in (could, spared, touched)}
        found[touched]["bits"] = digest
        return SimpleNamespace(found=found)

    children = {"none": child(100.0, "0"), "none again": child(99.0, "0"), "tf32": child(50.0, "1")}
    rows = {label: script["row_of"](children, "tf32", label) for label in (could, spared, touched)}

    assert {label: row["noise"] for label, row in rows.items()} == pytest.approx(
        {could: 1 / 0.99 - 1, spared: 1.0, touched: 1 / 0.99 - 1}
    )
    assert [row["bits"] for row in rows.values()] == ["same", "same", "changed"]
    assert {row["gain"] for row in rows.values()} == {2.0}


@pytest.mark.parametrize(
    ("switch", "us", "gain", "noise", "shown"),
    [
        ("tf32", 5.0, 1.08, 0.02, "1.08x"),
        ("tf32", 5.0, 1.019, 0.02, "1.02x~"),
        ("tf32", 5.0, 0.985, 0.02, "0.98x~"),
        ("tf32", 5.0, 0.9, 0.02, "0.90x"),
        ("tf32", 5.0, 0.9, None, "0.90x?"),
        ("none again", 5.0, 1.01, 0.02, "1.01x"),
        ("tf32", 5.0, None, None, ""),
        ("tf32", None, None, 0.02, "with the host"),
    ],
)
def test_a_gain_within_the_noise_is_marked(script, switch, us, gain, noise, shown):
    assert script["gain_of"]({"switch": switch, "us": us, "gain": gain, "noise": noise}) == shown


# ---- what is kept


def test_the_table_and_the_page_are_those_of_the_numbers_that_are_kept(script):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--from", str(KEPT)], capture_output=True, text=True, timeout=60, check=False
    )
    page = script["page"](json.loads(KEPT.read_text(encoding="utf-8")))

    assert done.returncode == 0, done.stderr
    assert f"```text\n{done.stdout}```\n" in KEPT.with_suffix(".md").read_text(encoding="utf-8")
    assert f"\n\n{page}\n\n<!-- end of features -->" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SWITCHES)
def test_what_the_registry_says_was_seen_is_what_is_kept(name, script):
    kept, seen = json.loads(KEPT.read_text(encoding="utf-8")), SWITCHES[name].seen
    rows = [row for row in kept["rows"] if row["switch"] == name]
    changed = [row["operation"] for row in rows if row["bits"] == "changed"]

    assert (kept["gpu"], kept["versions"]["torch"], kept["versions"]["CUDA"]) == (seen.device, seen.torch, seen.cuda)
    assert rows
    assert bool(changed) == bool(seen.changed), changed
    assert bool(seen.changed) != bool(seen.tried)
    could = script["CONCERNS"][name][: -script["SPARED"]]
    gains = {row["operation"]: script["gain_of"](row) for row in rows if row["operation"] in could}
    assert {key: f"{gain:.2f}x" for key, gain in seen.gains.items()} == {
        key: gain for key, gain in gains.items() if not gain.endswith("~")
    }
