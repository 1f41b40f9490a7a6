"""What each process switch gains and which bits it changes: products, convolutions, math attention, the decoder.

Each switch is measured in a process of its own, applied at its start, beside two processes without switches; all
compute the same operations on the same numbers, one process after the other. A switch is measured on what it could
change, and on two operations that it must leave alone (`CONCERNS`).

Times are the device's alone: it sleeps until the host has queued the whole operation, several times over if it is
short, and the decoder's steps one by one (`Stopwatch`). Where the host does not get ahead, the row says so in place of
a time. The two processes without switches, and what each switch must leave alone, say how far apart measurements of the
same are: the noise. A gain within it is marked. "bits" compares the results of a switch with those of no switch;
"varies" stands where two processes without switches differ already. The error is the largest difference from float64,
relative to the largest value.

Rows are printed and written as they come, so that a run that is cut short has given numbers; what does not fit into
`--seconds` is said. Needs a CUDA device: without one it says so and ends well. Nothing is asserted about times: they
belong to machines.

    python benchmarks/features.py [--quick] [--rounds N] [--seconds S] [--json FILE] [--out FILE] [--page]
    python benchmarks/features.py --from FILE.json [--out FILE] [--page]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import hashlib
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from _report import aligned, arguments, keep, listed, machine, versions, write_between

PACKAGES = ("torch", "fuseboard")
NONE, AGAIN = "none", "none again"
DEVICE = "cuda"
WARM = 2  # calls before anything is timed: they load kernels, and plan
WARMING = 0.05  # seconds of calls after them, for the clocks
SECONDS = 0.1  # after which no round begins
FEWEST = 3  # rounds that there are nevertheless
SPIN = 2_000_000  # cycles, about a millisecond
SPAN, MOST = 1.0, 32  # milliseconds that a round takes of repetitions, and how many of these at most
SHORTEST, LONGEST = 1.0, 150.0  # milliseconds of sleep
LIMIT = 75  # seconds for everything
LOADING = 40  # of these at most until every process has loaded what it needs, which would disturb the first
GRACE = 5  # for an operation that has begun
SHARES = {NONE: 4, AGAIN: 3}  # of the time, where a switch has one: they measure every operation
SIZE, THIN = 4096, (64, 65536, 64)
PROMPT, STEPS, ROWS = 1024, 16, 8  # few steps: cuDNN's attention plans anew for each length
DECODER = {
    "model_type": "qwen3", "vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip

ROUNDED = 1e-4  # what the gains of a file lack
PAGE = Path(__file__).parents[1] / "docs" / "features.md"
MARKED = ("features", "benchmarks/features.py --page")  # the markers of what stands there

Compute = Callable[[Callable[[], None]], Any]
"""Calls what it is given wherever it may be cut in parts that are timed one by one."""
Operation = tuple[Compute, Callable[[], Any]]


def square(word: str) -> str:
    return f"{word} product {SIZE}x{SIZE}x{SIZE}"


def thin(word: str) -> str:
    return f"{word} product {'x'.join(map(str, THIN))}"


def convolution(word: str) -> str:
    return f"{word} convolution 256 to 256, width 11"


def prompt(word: str) -> str:
    return f"{word} decoder, prompt of {PROMPT}"


def steps(word: str) -> str:
    return f"{word} decoder, {STEPS} steps of {ROWS} rows"


MATH = "bf16 math attention 4x16x1024x64"
BY_MATH = f"{prompt('bf16')}, by sdpa-math"
_HALVES = (thin("fp16"), thin("bf16"), prompt("bf16"), steps("bf16"), square("fp32"), MATH)
HOSTS = "with the host"
SPARED = 2
CONCERNS = {
    "fp16_accumulation": (square("fp16"), thin("fp16"), prompt("fp16"), steps("fp16"), square("bf16"), MATH),
    "tf32": (square("fp32"), MATH, prompt("fp32"), steps("fp32"), BY_MATH, square("bf16"), convolution("fp32")),
    "cudnn_benchmark": (convolution("fp32"), convolution("fp16"), square("fp32"), MATH),
    "reduced_precision": _HALVES,
    "no_reduced_precision": _HALVES,
    "math_reduction": (MATH, BY_MATH, square("bf16"), square("fp32")),
}
"""What each switch could change, then `SPARED` that it must leave alone. Without a switch all are measured."""
ALL = tuple(dict.fromkeys(label for labels in CONCERNS.values() for label in labels))


def drawing(label: str) -> Callable[..., Any]:
    """Draws on the device, for an operation the same in every process."""
    import torch

    generator = torch.Generator(DEVICE).manual_seed(zlib.crc32(label.encode()))
    return lambda *shape: torch.randn(shape, device=DEVICE, generator=generator)


def operations(wanted: Collection[str]) -> Iterator[tuple[str, Operation]]:
    """Each wanted operation on the device, and the same in float64. The quick ones come first."""
    import torch

    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    for word, dtype in dtypes.items():
        if square(word) in wanted:
            yield square(word), multiplying(dtype, drawing(square(word)), SIZE, SIZE, SIZE)
        if thin(word) in wanted:
            yield thin(word), multiplying(dtype, drawing(thin(word)), *THIN)
        if convolution(word) in wanted:
            yield convolution(word), convolving(dtype, drawing(convolution(word)))
    if MATH in wanted:
        q = drawing(MATH)(4, 16, 1024, 64).bfloat16()
        math = torch.ops.aten._scaled_dot_product_attention_math
        yield MATH, (lambda _: math(q, q, q)[0], lambda: math(*[q.double()] * 3)[0])
    for word, dtype in dtypes.items():
        labels = [each for each in (prompt(word), steps(word), BY_MATH) if each.startswith(word) and each in wanted]
        if labels:
            decoder = decoding(dtype, word)
            yield from ((label, decoder[label]) for label in labels)


def multiplying(dtype: Any, draw: Callable[..., Any], m: int, k: int, n: int) -> Operation:
    a, b = draw(m, k).to(dtype), draw(k, n).to(dtype)
    return (lambda _: a @ b), (lambda: a.double() @ b.double())


def convolving(dtype: Any, draw: Callable[..., Any]) -> Operation:
    import torch.nn.functional as F  # noqa: N812

    x, w = draw(4, 256, 8000).to(dtype), draw(256, 256, 11).to(dtype)
    return (lambda _: F.conv1d(x, w, padding=5)), (lambda: F.conv1d(x.double(), w.double(), padding=5))


def decoding(dtype: Any, word: str) -> dict[str, Operation]:
    """A prompt, and steps with a growing cache; the ids are fixed, so that rounding cannot lead them elsewhere."""
    import torch

    import fuseboard as fb
    from fuseboard.engine.decoder import QwenDecoder

    draw = drawing("decoder")
    rounded, exact = QwenDecoder(DECODER), QwenDecoder(DECODER)
    weights = {}
    for name, each in rounded.named_parameters():
        drawn = draw(*each.shape) * 0.02
        weights[name] = (drawn if each.dim() > 1 else drawn + 1).to(dtype)
    rounded.load(weights)
    exact.load(weights, dtype=torch.float64)
    ids = (draw(ROWS, PROMPT).abs() * 1000).long() % DECODER["vocab_size"]

    def at_once(decoder: Any) -> Any:
        with torch.inference_mode():
            return decoder.hidden(ids[:1])

    def stepwise(decoder: Any, cut: Callable[[], None]) -> Any:
        with torch.inference_mode():
            cache = decoder.cache(ROWS, reserve=2 * STEPS)
            parts = [decoder(ids[:, :STEPS], cache=cache, keep=1)]
            for at in range(STEPS, 2 * STEPS - 1):
                cut()  # a GPU's queue takes some thousand launches: all steps at once would have the host wait
                parts.append(decoder(ids[:, at : at + 1], cache=cache))
            return torch.cat(parts, 1)

    def by_math(_: Callable[[], None]) -> Any:
        with fb.bind(fb.policy_for("sdpa-math", strict=True)):
            return at_once(rounded)

    return {
        prompt(word): (lambda _: at_once(rounded), lambda: at_once(exact)),
        steps(word): (lambda cut: stepwise(rounded, cut), lambda: stepwise(exact, nowhere)),
        BY_MATH: (by_math, lambda: at_once(exact)),
    }


def bits(value: Any) -> str:
    """A digest of a tensor's memory."""
    host = value.detach().contiguous().cpu()
    return hashlib.sha256(ctypes.string_at(host.data_ptr(), host.numel() * host.element_size())).hexdigest()


def nowhere() -> None:
    """Cuts nothing."""


def measure(compute: Compute, exact: Callable[[], Any], rounds: int, stopwatch: Stopwatch) -> dict[str, Any]:
    """One operation's time, bits and error."""
    times = stopwatch.times(compute, rounds)
    want, got = exact(), compute(nowhere)
    error = ((got.double() - want).abs().max() / want.abs().max()).item()
    us = round(statistics.median(times), 2) if times else None
    return {"us": us, "rounds": len(times), "error": error, "bits": bits(got)}


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """The garbage collector takes the host some 50 ms, and every sleep after one would be as long."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Device:
    """What a stopwatch needs of the device, and the host's clock."""

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()

    def event(self) -> Any:
        """One that takes times."""
        import torch

        return torch.cuda.Event(enable_timing=True)

    def sleep(self, cycles: int) -> None:
        """Keep the stream busy; the host goes on."""
        import torch

        torch.cuda._sleep(cycles)

    def synchronize(self) -> None:
        """Wait until nothing is left to do."""
        import torch

        torch.cuda.synchronize()


class Stopwatch:
    """Times what the device does without what the host takes to launch it.

    The device sleeps until the whole operation is queued. That it did is seen: the event that ends the sleep must not
    have passed when the one that ends the operation is queued. If it has, the device may have waited for the host, and
    the round is made again with a longer sleep.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._sleep = SHORTEST  # milliseconds
        self._cycles = 0.0  # a millisecond's
        device.sleep(SPIN)  # the first loads the kernel

    def times(self, compute: Compute, rounds: int) -> list[float]:
        """Microseconds of each round; none where the host was never ahead, as when an operation waits for the device.

        Rounds end early when they have taken long enough.
        """
        repeats = self._warmed(compute)
        self._cycles, self._sleep = self._cycles_now(), SHORTEST
        found: list[float] = []
        end_at = self._device.now() + SECONDS
        with no_collection():
            while len(found) < rounds and (len(found) < FEWEST or self._device.now() < end_at):
                spent = self._round(compute, repeats)
                if spent is not None:
                    found.append(spent / repeats * 1e3)
                elif self._sleep > LONGEST:
                    break
        return found if len(found) >= min(rounds, FEWEST) else []

    def _warmed(self, compute: Compute) -> int:
        """Run it until the clocks are up. Gives how often a round repeats it."""
        for _ in range(WARM):
            compute(nowhere)
        self._device.synchronize()
        begun = self._device.now()
        compute(nowhere)
        self._device.synchronize()
        took = (self._device.now() - begun) * 1e3
        repeats = max(1, min(MOST, int(SPAN / took))) if took else MOST
        while self._device.now() < begun + WARMING:
            for _ in range(repeats):
                compute(nowhere)
            self._device.synchronize()  # without it, the host could queue seconds of work
        return repeats

    def _cycles_now(self) -> float:
        begin, end = self._device.event(), self._device.event()
        begin.record()
        self._device.sleep(SPIN)
        end.record()
        end.synchronize()
        return SPIN / float(begin.elapsed_time(end))

    def _round(self, compute: Compute, repeats: int) -> float | None:
        """Milliseconds of the device; None where the host was not ahead, and the next sleep is longer."""
        spent, ahead = 0.0, True
        begin, begun = self._asleep()

        def end() -> None:
            nonlocal spent, ahead
            ended = self._device.event()
            ended.record()
            ahead = not begin.query()
            queueing = (self._device.now() - begun) * 1e3
            ended.synchronize()
            spent += begin.elapsed_time(ended)
            if not ahead:
                self._sleep = max(2 * self._sleep, 1.5 * queueing)

        def cut() -> None:
            nonlocal begin, begun
            if ahead:
                end()
            if ahead:
                begin, begun = self._asleep()

        for _ in range(repeats):
            compute(cut)
        if ahead:
            end()
        return spent if ahead else None

    def _asleep(self) -> tuple[Any, float]:
        """The event at the end of a sleep that the device begins now, and the host's time of that."""
        begun = self._device.now()
        self._device.sleep(int(self._sleep * self._cycles))
        begin = self._device.event()
        begin.record()
        return begin, begun


# ---- one process


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def one(name: str, rounds: int) -> None:
    """Everything in this process, under one switch: a line of JSON as soon as there is something to say.

    It loads what it needs, and measures nothing until a line comes by stdin: how many seconds it may take.
    """
    from fuseboard.engine import features

    applied = features.apply([] if name in (NONE, AGAIN) else [name])
    import torch

    import fuseboard as fb

    # So small that nothing is in its way; it makes the contexts of CUDA, cuBLAS and cuDNN, which takes seconds.
    small = torch.ones(1, 8, 8, device=DEVICE)
    torch.nn.functional.conv1d(small @ small, small)
    wanted = CONCERNS.get(name, ALL)
    if any("decoder" in label for label in wanted):
        from fuseboard.engine.decoder import QwenDecoder

        QwenDecoder(DECODER)  # loads much of torch; on the meta device
    stopwatch = Stopwatch(Device())
    say(ready=applied.as_json())

    seconds = float(sys.stdin.readline())
    began = time.monotonic()
    left = dict.fromkeys(wanted)
    for label, operation in operations(wanted):
        if time.monotonic() - began > seconds:
            break
        del left[label]
        try:
            say(label=label, **measure(*operation, rounds, stopwatch))
        except (fb.RefusedError, fb.PolicyError) as error:  # a self-test that fails under the switch; no such kernel
            say(unmeasured=label, reason=str(error).strip().splitlines()[-1].strip())
    for label in left:
        say(unmeasured=label, reason="there was no time left for it")
    say(done=round(time.monotonic() - began, 1), fast=features.report()["params"])


# ---- all of them


class Child:
    """The process of a switch, and what it has said so far."""

    def __init__(self, name: str, rounds: int, folder: Path) -> None:
        self.name = name
        self.applied: dict[str, Any] | None = None
        self.found: dict[str, dict[str, Any]] = {}
        self.unmeasured: dict[str, str] = {}
        self.seconds: float | None = None
        self.failure = ""
        self._errors = folder / f"{name}.err"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(  # noqa: S603 - this very script
                [sys.executable, __file__, "--one", name, "--rounds", str(rounds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ,
                text=True,
            )

        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            self._said.put(line)
        self._said.put("")

    def _facts(self, end_at: float) -> dict[str, Any] | None:
        """What it says next; None when it has ended, or the time is over."""
        while True:
            try:
                line = self._said.get(timeout=max(end_at - time.monotonic(), 0.01))
            except queue.Empty:
                return None
            if line.startswith("{"):
                facts: dict[str, Any] = json.loads(line)
                return facts
            if not line:
                self._said.put("")
                return None

    def load(self, end_at: float) -> None:
        """Wait until it could begin, or the time is over: it may still load then."""
        facts = self._facts(end_at)
        if facts is not None:
            self.applied = facts["ready"]

    def rows(self, seconds: float) -> Iterator[str]:
        """Measure. Gives labels as they come."""
        end_at = time.monotonic() + seconds
        if self.applied is None:
            self.load(end_at)
        if self.applied is None:
            self._fail()
            return
        if self.applied["refused"]:
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{end_at - time.monotonic()}\n")
            self._process.stdin.flush()
        while (facts := self._facts(end_at + GRACE)) is not None:
            if "label" in facts:
                label = facts.pop("label")
                self.found[label] = facts
                yield label
            elif "unmeasured" in facts:
                self.unmeasured[facts["unmeasured"]] = facts["reason"]
            else:
                self.seconds = facts["done"]
                return
        self._fail()

    def _fail(self) -> None:
        try:
            self.failure = f"it ended with {self._process.wait(1)}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.failure = "it took too long"
        errors = self._errors.read_text(encoding="utf-8").strip()
        self.failure += f":\n{errors}" if errors else ""

    def outcome(self) -> str:
        """How it went, in a line or more."""
        return self.failure or (f"{self.seconds} s" if self.seconds is not None else "refused")

    def end(self) -> None:
        """No more of it. Safe to call twice."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def measured(names: tuple[str, ...], rounds: int, seconds: float) -> Iterator[tuple[dict[str, Child], Child, str]]:
    """The same in a fresh process for each name. They start together, which is half the time, and measure in turn.

    Gives all processes, one of them, and an operation that it has just measured; an empty text when it has ended.
    """
    end_at = time.monotonic() + seconds
    loaded_at = time.monotonic() + min(LOADING, seconds / 2)
    children: dict[str, Child] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in names:
                children[name] = Child(name, rounds, Path(folder))
            for child in children.values():
                child.load(loaded_at)
            shares = {name: SHARES.get(name, 1) for name in names}
            for name, child in children.items():
                share = (end_at - time.monotonic()) * shares[name] / sum(shares.values())
                del shares[name]
                for label in child.rows(share):
                    yield children, child, label
                yield children, child, ""
                child.end()
        finally:
            for child in children.values():
                child.end()


def noise_of(first: Mapping[str, float | None], others: Iterable[Mapping[str, float | None]]) -> dict[str, float]:
    """How far apart measurements of the same are, by operation: 0.01 is one percent.

    Few that happen to agree prove little: it is no less than what half of all operations have.
    """
    apart: dict[str, float] = {}
    for each in others:
        for label, other in each.items():
            one = first.get(label)
            if one and other:
                apart[label] = max(apart.get(label, 0.0), one / other - 1, other / one - 1)
    usual = statistics.median(apart.values()) if apart else 0.0
    return {label: max(each, usual) for label, each in apart.items()}


def noise_between(children: Mapping[str, Child]) -> dict[str, float]:
    """The noise by all that had to be the same: no switch, and what a switch left alone as it must."""
    base = children[NONE].found
    others = []
    for name, child in children.items():
        alike = base if name == AGAIN else CONCERNS.get(name, ())[-SPARED:]
        others.append(
            {
                label: each["us"]
                for label, each in child.found.items()
                if label in alike and label in base and each["bits"] == base[label]["bits"]
            }
        )
    return noise_of({label: each["us"] for label, each in base.items()}, others)


def row_of(children: Mapping[str, Child], name: str, label: str) -> dict[str, Any]:
    """One operation under one switch, with its gain over no switch as far as that is known."""
    found, base, again = (children[each].found.get(label) for each in (name, NONE, AGAIN))
    assert found is not None
    row = {"switch": name, "operation": label, "us": found["us"], "error": found["error"]}
    if base is None:
        return row | {"gain": None, "noise": None, "bits": "unknown", "error_without": None}
    same = "same" if found["bits"] == base["bits"] else "changed"
    varies = again is not None and again["bits"] != base["bits"]
    return row | {
        "gain": round(base["us"] / found["us"], 4) if base["us"] and found["us"] else None,
        "noise": noise_between(children).get(label),
        "bits": "varies" if varies else same,
        "error_without": base["error"],
    }


def gain_of(row: Mapping[str, Any]) -> str:
    """A ratio; marked where two measurements of the same are as far apart."""
    gain, noise = row["gain"], row["noise"]
    if row["us"] is None:
        return HOSTS
    if gain is None:
        return ""
    mark = "?" if noise is None else "~" if max(gain, 1 / gain) - 1 <= noise + ROUNDED else ""
    return f"{gain:.2f}x{'' if row['switch'] in (NONE, AGAIN) else mark}"


def errors_of(row: Mapping[str, Any]) -> tuple[str, str]:
    without = row["error_without"]
    return f"{row['error']:.1e}", "" if without is None else f"{without:.1e}"


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    us = "" if row["us"] is None else f"{row['us']:,.1f}"
    return f"{row['switch']}: {row['operation']}", us, gain_of(row), row["bits"], *errors_of(row)


def result_of(children: Mapping[str, Child], rounds: int) -> dict[str, Any]:
    """What is known by now."""
    import torch

    return {
        "rows": [row_of(children, name, label) for name, child in children.items() for label in child.found],
        "seconds": {name: child.seconds for name, child in children.items()},
        "refused": {
            name: reason
            for child in children.values()
            for name, reason in (child.applied or {}).get("refused", {}).items()
        },
        "unmeasured": {name: child.unmeasured for name, child in children.items() if child.unmeasured},
        "failed": {name: child.failure for name, child in children.items() if child.failure},
        "versions": {**versions(*PACKAGES), "CUDA": torch.version.cuda},
        "machine": machine(),
        "gpu": torch.cuda.get_device_name(),
        "rounds": rounds,
    }


def facts_of(result: Mapping[str, Any]) -> str:
    return f"{result['gpu']}; {listed(result['versions'])}."


def marks_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """What the marks of these rows mean, and how large the noise is."""
    shown = [gain_of(row) for row in rows]
    noises = sorted({row["operation"]: row["noise"] for row in rows if row["noise"] is not None}.values())
    lines = []
    if noises:
        lines.append(
            "~: within the noise, no further from 1 than processes that had to take the same time are from each other, "
            f"on this operation or on half of all, whichever is more: {noises[0]:.1%} to {noises[-1]:.1%}."
        )
    if any(each.endswith("?") for each in shown):
        lines.append("?: not measured twice without a switch, so that its noise is not known.")
    if HOSTS in shown:
        lines.append(f"{HOSTS}: not timed, since the host's launches would have been in it.")
    return lines


def missing_of(result: Mapping[str, Any]) -> list[str]:
    """What was not measured, and why, a line each."""
    lines = [f"not measured: {name}, {reason}" for name, reason in result["refused"].items()]
    lines += [
        f"not measured: {name}: {label}, {reason}"
        for name, each in result["unmeasured"].items()
        for label, reason in each.items()
    ]
    return lines + [f"failed: {name}, {reason}" for name, reason in result["failed"].items()]


def render(result: Mapping[str, Any]) -> str:
    """The table as text: every operation without switches, then what each switch could change."""
    head = ("switch: operation", "us", "gain", "bits", "error", "without")
    rows = result["rows"]
    notes = [result["note"]] if "note" in result else []
    last = f"{facts_of(result)} {result['rounds']} rounds at most."
    return "\n".join([aligned(head, map(cells, rows)), "", last, *notes, *marks_of(rows), *missing_of(result)])


def page(result: Mapping[str, Any]) -> str:
    """The part of the documentation's page: what each switch could change; what it must not, in a sentence."""
    rows = [row for row in result["rows"] if row["switch"] in CONCERNS]
    could = [row for row in rows if row["operation"] not in CONCERNS[row["switch"]][-SPARED:]]
    spared = [row for row in rows if row not in could]
    touched = [f"{row['switch']}: {row['operation']}" for row in spared if row["bits"] != "same"]
    lines = ["| switch | operation | gain | bits | error | without |", "|---|---|---|---|---|---|"]
    lines += [f"| `{row['switch']}` | {' | '.join((row['operation'], *cells(row)[2:]))} |" for row in could]
    alone = "their bits are the same" if not touched else f"of them changed or vary: {'; '.join(touched)}"
    notes = [result["note"]] if "note" in result else []
    notes += [f"{len(spared)} measurements of operations that a switch must leave alone: {alone}."]
    facts = [facts_of(result), *notes, *marks_of(could), *missing_of(result)]
    return "\n".join([*lines, "", *(f"* {each}" for each in facts)])


def main() -> int:
    parser = arguments(
        __doc__, rounds=30, each="how often every operation is timed", quick="two rounds: shows that it runs"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=LIMIT,
        help="what all of it may take: the rest is left out (default %(default)s)",
    )
    parser.add_argument("--from", dest="earlier", type=Path, metavar="FILE", help="measure nothing: show that JSON")
    parser.add_argument("--page", action="store_true", help=f"write the table into docs/{PAGE.name}")
    parser.add_argument("--one", metavar="SWITCH", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one, options.rounds)
        return 0

    if options.earlier:
        result = json.loads(options.earlier.read_text(encoding="utf-8"))
        keep(options, "features", result, render(result))
        if options.page:
            write_between(PAGE, *MARKED, page(result))
        print(render(result))
        return 0

    began = time.monotonic()
    import torch

    if not torch.cuda.is_available():
        print(
            f"SKIP: no CUDA device (torch {torch.__version__}); these switches change nothing that a CPU is timed at."
        )
        return 0
    from fuseboard.engine.features import SWITCHES

    rounds = 2 if options.quick else options.rounds
    seconds = options.seconds - (time.monotonic() - began)
    for children, child, label in measured((NONE, AGAIN, *SWITCHES), rounds, seconds):
        if label:
            print("  ".join(cells(row_of(children, child.name, label))), flush=True)
            continue
        print(f"{child.name}: {child.outcome()}", flush=True)
        result = result_of(children, rounds)
        keep(options, "features", result, render(result))
    if options.page:
        write_between(PAGE, *MARKED, page(result))
    print(f"\n{render(result)}\n{time.monotonic() - began:.0f} s in all")
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
