"""What a token costs on the CPU: QwenDecoder beside transformers' `generate`, with the same weights and the same ids.

Both generate greedily from one prompt, in one process and in turn, round after round, so that a slow moment of the
machine falls on both; that they give the same ids is checked before anything is timed. The ratio is of the rounds'
fastest. A row is also made for the steps alone: transformers' model called by hand with a DynamicCache, without what
`generate` adds. Nothing is asserted about times: they belong to machines.

    python benchmarks/decode_cpu.py [--quick] [--rounds N] [--json FILE] [--out FILE] [--readme]
"""

from __future__ import annotations

import inspect
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from _report import aligned, arguments, in_one_thread, keep, listed, machine, versions

PACKAGES = ("torch", "fuseboard", "transformers")
# The thread's own time, so that other processes are not counted. Too coarse on Windows.
CLOCK = time.perf_counter if sys.platform == "win32" else time.thread_time
PROMPT, NEW = 32, 48
SHAPES = {
    "small (hidden 256, 4 layers)": {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 2048,
    },
    "as Qwen3-0.6B, 3 layers": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 3, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 16384, "tie_word_embeddings": True,
    },
}  # fmt: skip


@dataclass
class Case:
    """One row: both sides generate `tokens` tokens, timed in turn.

    Attributes:
        name: What the reader sees.
        theirs: By transformers; gives the ids.
        ours: By fuseboard.
        tokens: How many steps one execution makes.
    """

    name: str
    theirs: Callable[[], Any]
    ours: Callable[[], Any]
    tokens: int
    times: dict[str, list[float]] = field(default_factory=lambda: {"theirs": [], "ours": []})

    def measure(self, *, ours_first: bool) -> None:
        """Time both once, in tokens per second."""
        for side in ("ours", "theirs") if ours_first else ("theirs", "ours"):
            begin = CLOCK()
            getattr(self, side)()
            self.times[side].append((CLOCK() - begin) / self.tokens)

    def row(self) -> dict[str, Any]:
        """Its numbers: tokens per second of the fastest round, and how many times as many ours are."""
        theirs, ours = (self.times[side] for side in ("theirs", "ours"))
        return {
            "name": self.name,
            "transformers_per_second": round(1 / min(theirs), 1),
            "fuseboard_per_second": round(1 / min(ours), 1),
            "ratio": round(min(theirs) / min(ours), 3),
            "median_ratio": round(statistics.median(t / o for t, o in zip(theirs, ours, strict=True)), 3),
        }


def cases(new: int) -> Iterator[Case]:
    """Each shape in fp32 and bf16, one row and a padded batch, by `generate` and by its steps alone."""
    import torch
    import transformers

    from fuseboard.engine.decoder import QwenDecoder

    transformers.logging.set_verbosity_error()
    for shape, options in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            config = transformers.Qwen3Config(
                **{"max_position_embeddings": 512, "eos_token_id": None, "pad_token_id": 0, "bos_token_id": None}
                | options
            )
            config._attn_implementation = "sdpa"
            with torch.random.fork_rng():
                torch.manual_seed(0)  # fuseboard: allow(in a fork of the generator; the same weights every time)
                model = transformers.Qwen3ForCausalLM(config).to(dtype).eval()
            decoder = QwenDecoder.from_transformers(model)
            for rows in (1, 4):
                ids = torch.randint(1, 2000, (rows, PROMPT), generator=torch.Generator().manual_seed(0))
                mask = (torch.arange(PROMPT) >= 5 * torch.arange(rows)[:, None]).long()
                title = f"{shape}, {str(dtype).removeprefix('torch.')}, {'one row' if rows == 1 else '4 padded rows'}"
                yield from _pair(title, model, decoder, ids, mask, new)


def _pair(title: str, model: Any, decoder: Any, ids: Any, mask: Any, new: int) -> Iterator[Case]:
    import torch

    def theirs() -> Any:
        return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)

    def ours() -> Any:
        return decoder.generate(ids, attention_mask=mask, max_new_tokens=new)

    if not torch.equal(theirs(), ours()):
        msg = f"{title}: the two sides give different ids."
        raise SystemExit(msg)
    yield Case(f"{title}: generate", theirs, ours, new)
    if ids.shape[0] == 1:
        yield Case(f"{title}: steps", _by_hand(model, ids, new), ours, new)


def _by_hand(model: Any, ids: Any, new: int) -> Callable[[], Any]:
    """The barest loop over transformers' model: no mask, no processors, greedy."""
    import torch
    import transformers

    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def loop() -> Any:
        given, parts = ids, [ids]
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            for _ in range(new):
                logits = model(given, use_cache=True, logits_to_keep=1, **{name: cache}).logits
                given = logits[:, -1:].float().argmax(-1)
                given.tolist()
                parts.append(given)
        return torch.cat(parts, dim=1)

    return loop


def render(result: dict[str, Any]) -> str:
    """The table as text."""
    lines = [
        (
            row["name"], f"{row['transformers_per_second']:.1f}", f"{row['fuseboard_per_second']:.1f}",
            f"{row['ratio']:.2f}x", f"{row['median_ratio']:.2f}x",
        )
        for row in result["rows"]
    ]  # fmt: skip
    table = aligned(("steps per second", "transformers", "fuseboard", "fastest", "median"), lines)
    shown = listed(result["versions"])
    facts = f"{result['machine']['cpu']}, {result['machine']['system']}, 1 thread; {shown}; {result['rounds']} rounds."
    return f"{table}\n\n{facts}"


def main() -> int:
    parser = arguments(
        __doc__,
        rounds=9,
        each="how often every row is timed",
        quick="one short round: shows that it runs, not what it costs",
        readme=True,
    )
    options = parser.parse_args()
    status = in_one_thread()
    if status is not None:
        return status
    rounds, new = (1, 4) if options.quick else (options.rounds, NEW)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, about generation flags
        made = list(cases(new))
        for turn in range(rounds):
            for case in made:
                case.measure(ours_first=turn % 2 == 0)
            if sys.stderr.isatty():
                print(f"round {turn + 1} of {rounds}", end="\r", file=sys.stderr, flush=True)
    result = {
        "rounds": rounds, "prompt": PROMPT, "new_tokens": new, "versions": versions(*PACKAGES), "machine": machine(),
        "rows": [case.row() for case in made],
    }  # fmt: skip
    text = render(result)
    print(text)
    keep(options, "decode_cpu", result, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
