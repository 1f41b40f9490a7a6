"""What each process switch gains and which bits it changes: products, convolutions, math attention, the decoder.

Each switch is measured in a process of its own, applied at its start, beside two processes without switches; all
compute the same operations on the same numbers, one process after the other. "bits" compares the results of a switch
with those of no switch; "varies" stands where two processes without switches differ already. The error is the largest
difference from float64, relative to the largest value. Needs a CUDA device: without one it says so and ends well.
Nothing is asserted about times: they belong to machines. A run takes about a minute.

    python benchmarks/features.py [--quick] [--rounds N] [--json FILE] [--out FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from _report import aligned, arguments, keep, listed, machine, versions

PACKAGES = ("torch", "fuseboard")
NONE, AGAIN = "none", "none again"
WARM, SECONDS = 3, 0.3
PATIENCE = 120
PROMPT, STEPS, ROWS = 1024, 16, 8  # few steps: cuDNN's attention plans anew for each length
DECODER = {
    "model_type": "qwen3", "vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip

Operation = tuple[Callable[[], Any], Callable[[], Any]]


def operations() -> Iterator[tuple[str, Operation]]:
    """Each operation on the device, and the same in float64."""
    import torch
    import torch.nn.functional as F  # noqa: N812

    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", generator=generator)

    def product(dtype: Any, m: int, k: int, n: int) -> Operation:
        a, b = draw(m, k).to(dtype), draw(k, n).to(dtype)
        return (lambda: a @ b), (lambda: a.double() @ b.double())

    def convolution(dtype: Any) -> Operation:
        x, w = draw(4, 256, 8000).to(dtype), draw(256, 256, 11).to(dtype)
        return (lambda: F.conv1d(x, w, padding=5)), (lambda: F.conv1d(x.double(), w.double(), padding=5))

    dtypes = ((torch.float32, "fp32"), (torch.float16, "fp16"), (torch.bfloat16, "bf16"))
    for dtype, word in dtypes:
        yield f"{word} product 4096x4096x4096", product(dtype, 4096, 4096, 4096)
        yield f"{word} product 64x65536x64", product(dtype, 64, 65536, 64)
    for dtype, word in dtypes[:2]:
        yield f"{word} convolution 256 to 256, width 11", convolution(dtype)
    q = draw(4, 16, 1024, 64).bfloat16()
    math = torch.ops.aten._scaled_dot_product_attention_math
    yield "bf16 math attention 4x16x1024x64", (lambda: math(q, q, q)[0], lambda: math(*[q.double()] * 3)[0])
    for dtype, word in dtypes:
        yield from decoding(dtype, word, math=dtype is torch.bfloat16)


def decoding(dtype: Any, word: str, *, math: bool) -> Iterator[tuple[str, Operation]]:
    """A prompt, and steps with a growing cache; the ids are fixed, so that rounding cannot lead them elsewhere."""
    import torch

    import fuseboard as fb
    from fuseboard import registry
    from fuseboard.engine.decoder import QwenDecoder

    generator = torch.Generator("cuda").manual_seed(1)
    rounded, exact = QwenDecoder(DECODER), QwenDecoder(DECODER)
    weights = {}
    for name, each in rounded.named_parameters():
        drawn = torch.randn(each.shape, device="cuda", generator=generator) * 0.02
        weights[name] = (drawn if each.dim() > 1 else drawn + 1).to(dtype)
    rounded.load(weights)
    exact.load(weights, dtype=torch.float64)
    ids = torch.randint(DECODER["vocab_size"], (ROWS, PROMPT), device="cuda", generator=generator)

    def prompt(decoder: Any) -> Any:
        with torch.inference_mode():
            return decoder.hidden(ids[:1])

    def steps(decoder: Any) -> Any:
        with torch.inference_mode():
            cache = decoder.cache(ROWS, reserve=2 * STEPS)
            parts = [decoder(ids[:, :STEPS], cache=cache, keep=1)]
            parts += [decoder(ids[:, at : at + 1], cache=cache) for at in range(STEPS, 2 * STEPS - 1)]
            return torch.cat(parts, 1)

    def by_math() -> Any:
        with fb.bind(fb.policy_for("sdpa-math", strict=True)):
            return prompt(rounded)

    yield f"{word} decoder, prompt of {PROMPT}", (lambda: prompt(rounded), lambda: prompt(exact))
    yield f"{word} decoder, {STEPS} steps of {ROWS} rows", (lambda: steps(rounded), lambda: steps(exact))
    if math and registry.current().resolve("sdpa-math") is not None:
        yield f"{word} decoder by sdpa-math, prompt of {PROMPT}", (by_math, lambda: prompt(exact))


def bits(value: Any) -> str:
    """A digest of a tensor's memory."""
    host = value.detach().contiguous().cpu()
    return hashlib.sha256(ctypes.string_at(host.data_ptr(), host.numel() * host.element_size())).hexdigest()


def measure(compute: Callable[[], Any], exact: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """One operation's time, bits and error. Rounds end early when they have taken long enough."""
    import torch

    for _ in range(WARM):
        compute()
    torch.cuda.synchronize()
    times, end_at = [], time.monotonic() + SECONDS
    while len(times) < rounds and (len(times) < 2 or time.monotonic() < end_at):  # noqa: PLR2004 - a median of two
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        compute()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    want, got = exact(), compute()
    error = ((got.double() - want).abs().max() / want.abs().max()).item()
    return {"us": round(statistics.median(times), 1), "rounds": len(times), "error": error, "bits": bits(got)}


def one(name: str, rounds: int) -> dict[str, Any]:
    """Everything in this process, under one switch. The GPU is left alone until a line comes by stdin."""
    from fuseboard.engine import features

    applied = features.apply([] if name in (NONE, AGAIN) else [name])
    import torch

    import fuseboard as fb
    from fuseboard.engine.decoder import QwenDecoder

    QwenDecoder(DECODER)  # loads most of torch; on the meta device
    sys.stdin.readline()
    begin = time.monotonic()
    found, unmeasured = {}, {}
    for label, operation in operations():
        try:
            found[label] = measure(*operation, rounds)
        except fb.RefusedError as error:  # noqa: PERF203 - a kernel whose self-test fails under the switch
            unmeasured[label] = str(error).strip().splitlines()[-1].strip()
    return {
        "applied": applied.as_json(),
        "operations": found,
        "unmeasured": unmeasured,
        "gpu": torch.cuda.get_device_name(),
        "fast": features.report()["params"],
        "seconds": round(time.monotonic() - begin, 1),
    }


def in_processes(names: tuple[str, ...], rounds: int) -> dict[str, dict[str, Any]]:
    """The same in a fresh process for each name. They start together, which is half the time, and measure in turn."""
    found: dict[str, dict[str, Any]] = {}
    children = {}
    try:
        for name in names:
            command = [sys.executable, __file__, "--one", name, "--rounds", str(rounds)]
            children[name] = subprocess.Popen(  # noqa: S603 - this very script
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=os.environ,
                text=True,
            )
        for name, child in children.items():
            try:
                out, err = child.communicate("go\n", timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                msg = f"measuring {name} took more than {PATIENCE} s."
                raise SystemExit(msg) from None
            if child.returncode:
                msg = f"measuring {name} failed:\n{err}"
                raise SystemExit(msg)
            found[name] = json.loads(out.splitlines()[-1])
    finally:
        for child in children.values():
            if child.poll() is None:
                child.kill()
                child.communicate()
    return found


def rows_of(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per switch and operation, with its gain over no switch."""
    base, again = results[NONE]["operations"], results[AGAIN]["operations"]
    return [
        {
            "switch": name,
            "operation": label,
            "us": found["us"],
            "gain": round(base[label]["us"] / found["us"], 2),
            "bits": "varies" if base[label]["bits"] != again[label]["bits"]
            else "same" if found["bits"] == base[label]["bits"] else "changed",
            "error": found["error"],
            "error_without": base[label]["error"],
        }
        for name, result in results.items()
        for label, found in result["operations"].items()
    ]  # fmt: skip


def render(result: dict[str, Any]) -> str:
    """The table as text: every operation without switches, then what each switch changes."""
    head = ("switch: operation", "us", "gain", "bits", "error", "without")
    lines = [
        (f"{row['switch']}: {row['operation']}", f"{row['us']:,.1f}", f"{row['gain']:.2f}x", row["bits"],
         f"{row['error']:.1e}", f"{row['error_without']:.1e}")
        for row in result["rows"]
        if row["switch"] == NONE or row["bits"] == "changed" or not 0.95 < row["gain"] < 1.05  # noqa: PLR2004
    ]  # fmt: skip
    refused = "".join(f"\nnot measured: {name}, {reason}" for name, reason in result["refused"].items())
    refused += "".join(
        f"\nnot measured: {name}: {label}, {reason}"
        for name, each in result["unmeasured"].items()
        for label, reason in each.items()
    )
    note = "Left out: rows within 5 % of the time without switches, and without a changed bit."
    facts = f"{result['gpu']}; {listed(result['versions'])}; {result['rounds']} rounds at most."
    return f"{aligned(head, lines)}\n\n{facts} {note}{refused}"


def main() -> int:
    parser = arguments(
        __doc__, rounds=100, each="how often every operation is timed", quick="two rounds: shows that it runs"
    )
    parser.add_argument("--one", metavar="SWITCH", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options.rounds)))
        return 0

    import torch

    if not torch.cuda.is_available():
        print(
            f"SKIP: no CUDA device (torch {torch.__version__}); these switches change nothing that a CPU is timed at."
        )
        return 0
    from fuseboard.engine.features import SWITCHES

    rounds = 2 if options.quick else options.rounds
    results = in_processes((NONE, AGAIN, *SWITCHES), rounds)
    refused = {name: reason for each in results.values() for name, reason in each["applied"]["refused"].items()}
    results = {name: each for name, each in results.items() if name not in refused}
    result = {
        "rows": rows_of(results),
        "seconds": {name: each["seconds"] for name, each in results.items()},
        "refused": refused,
        "unmeasured": {name: each["unmeasured"] for name, each in results.items()},
        "versions": versions(*PACKAGES),
        "machine": machine(),
        "gpu": results[NONE]["gpu"],
        "rounds": rounds,
    }
    text = render(result)
    print(text)
    keep(options, "features", result, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
