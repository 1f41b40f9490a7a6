"""What a step of sampling costs: transformers' processors and torch.multinomial beside fuseboard's Sampler.

Both sides are given the same logits and generators seeded alike, in one process and in turn; that they draw the same
ids is checked before anything is timed. A step ends with its ids on the host, as a decode loop needs them: on a GPU
that wait is in both sides' times, once in ours, three times in the other (torch.multinomial's two checks, and the ids).
Nothing is asserted about times: they belong to machines.

    python benchmarks/sampling.py [--quick] [--rounds N] [--json FILE] [--out FILE] [--readme]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from _report import aligned, arguments, in_one_thread, keep, listed, machine, versions

PACKAGES = ("torch", "fuseboard", "transformers")
# The thread's own time, so that other processes are not counted. Too coarse on Windows.
CPU_CLOCK = time.perf_counter if sys.platform == "win32" else time.thread_time
VOCABULARY = 151936
PROMPT = 512
BATCHES = (1, 8)
OPTIONS: dict[str, dict[str, Any]] = {
    "draw alone": {"top_k": 0},  # left open it is 50
    "chat (penalty, temperature, top-k, top-p)": {
        "repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8,
    },
    "all of them": {
        "repetition_penalty": 1.05, "min_new_tokens": 8, "suppress_tokens": [1, 2, 3], "temperature": 0.7, "top_k": 20,
        "top_p": 0.8, "min_p": 0.01, "eos_token_id": [151645, 151643],
    },
    "greedy (penalty)": {"do_sample": False, "repetition_penalty": 1.05},
}  # fmt: skip


@dataclass
class Case:
    """One row: a step of each side, timed in turn.

    Attributes:
        name: What the reader sees.
        device: `cpu` or `cuda`.
        batch: How many rows.
        theirs: One step of transformers' loop, ids on the host.
        ours: The same by fuseboard.
    """

    name: str
    device: str
    batch: int
    theirs: Callable[[], list[int]]
    ours: Callable[[], list[int]]
    their_times: list[float] = field(default_factory=list)
    our_times: list[float] = field(default_factory=list)

    def measure(self, *, ours_first: bool) -> None:
        """Time both once, in microseconds."""
        clock = CPU_CLOCK if self.device == "cpu" else time.perf_counter
        sides = [(self.ours, self.our_times), (self.theirs, self.their_times)]
        for step, times in sides if ours_first else reversed(sides):
            begin = clock()
            step()
            times.append((clock() - begin) * 1e6)

    def row(self) -> dict[str, Any]:
        """Its numbers: medians, the fastest rounds, and their ratios."""
        theirs, ours = statistics.median(self.their_times), statistics.median(self.our_times)
        return {
            "name": self.name,
            "device": self.device,
            "batch": self.batch,
            "transformers_us": round(theirs, 1),
            "fuseboard_us": round(ours, 1),
            "ratio_median": round(theirs / ours, 2),
            "ratio_min": round(min(self.their_times) / min(self.our_times), 2),
        }


def case_of(name: str, device: str, batch: int) -> Case:
    """Both sides over the same logits."""
    import torch
    from transformers import GenerationConfig

    from fuseboard.engine.sampling import Sampler

    config = GenerationConfig(**{"do_sample": True, **OPTIONS[name]})
    prompt = torch.randint(VOCABULARY, (batch, PROMPT), device=device)
    logits = torch.randn(batch, VOCABULARY, device=device, dtype=torch.bfloat16) * 4
    processors = transformers_list(config, prompt)
    generators = [torch.Generator(device).manual_seed(0) for _ in range(2)]

    sampler = Sampler.from_generation_config(config)
    state = sampler.start(prompt, VOCABULARY, generator=generators[0])

    def ours() -> list[int]:
        return list(state.read(sampler(logits, state)).ids)

    # What `generate` keeps and does around its processors: the growing ids and the rows' ends.
    loop = {"ids": prompt, "unfinished": torch.ones(batch, dtype=torch.int64, device=device)}
    ends = torch.tensor(config.eos_token_id, device=device) if config.eos_token_id else None

    def theirs() -> list[int]:
        scores = processors(loop["ids"], logits.to(copy=True, dtype=torch.float32))
        if config.do_sample:
            ids = torch.multinomial(scores.softmax(-1), num_samples=1, generator=generators[1]).squeeze(1)
        else:
            ids = scores.argmax(-1)
        if ends is not None:
            ids = ids * loop["unfinished"] + ends[0] * (1 - loop["unfinished"])
            loop["unfinished"] = loop["unfinished"] & ~torch.isin(ids, ends)
        loop["ids"] = torch.cat([loop["ids"], ids[:, None]], dim=-1)
        return ids.tolist()

    for _ in range(3):
        found, expected = ours(), theirs()
        if found != expected:
            msg = f"{name}, {device}, batch {batch}: fuseboard drew {found}, transformers {expected}."
            raise SystemExit(msg)
    return Case(name, device, batch, theirs, ours)


def transformers_list(config: Any, prompt: Any) -> Any:
    """The processors that `generate` makes for a config, in its order, made by it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = type(config)(**config.to_dict())
    with torch.device("meta"):
        model = Qwen3ForCausalLM(
            Qwen3Config(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
        )
    model._prepare_special_tokens(config, device=prompt.device)
    return model._get_logits_processor(config, prompt.shape[1], device=prompt.device)


def render(result: dict[str, Any]) -> str:
    """The table as text."""
    lines = [
        (
            f"{row['device']}, batch {row['batch']}: {row['name']}",
            f"{row['transformers_us']:,.0f}",
            f"{row['fuseboard_us']:,.0f}",
            f"{row['ratio_median']:.2f}x",
            f"{row['ratio_min']:.2f}x",
        )
        for row in result["rows"]
    ]
    table = aligned(("microseconds per step, median", "transformers", "fuseboard", "ratio", "of the fastest"), lines)
    shown = listed(result["versions"])
    gpu = f", {result['gpu']}" if result["gpu"] else ""
    where = f"{result['machine']['cpu']}{gpu}, {result['machine']['system']}, 1 thread"
    return f"{table}\n\n{where}; {shown}; {result['rounds']} rounds."


def main() -> int:
    parser = arguments(
        __doc__, rounds=100, each="how often every row is timed", quick="two rounds: shows that it runs", readme=True
    )
    options = parser.parse_args()
    status = in_one_thread()
    if status is not None:
        return status

    import torch

    rounds = 2 if options.quick else options.rounds
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    cases = [case_of(name, device, batch) for device in devices for batch in BATCHES for name in OPTIONS]
    for turn in range(rounds):
        for case in cases:
            case.measure(ours_first=turn % 2 == 0)
    result = {
        "rows": [case.row() for case in cases],
        "versions": versions(*PACKAGES),
        "machine": machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "rounds": rounds,
    }
    text = render(result)
    print(text)
    keep(options, "sampling", result, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
