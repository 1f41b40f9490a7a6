"""How far is `accelerate` from the model it stands for? Probabilities and decisions, by kind of question.

    python benchmarks/parity.py [--model DIR | --size base|tiny] [--dtype bf16] [--out benchmarks/results/parity]

Seeded questions (48 choice, 180 noul, 60 score) are answered three times: by the model in float32, by the model in the
low dtype (stock: explicit weights, torch's kernels), and by `accelerate` in that dtype on the kernels of
fuseboard-tilelang (fast). For each pair the largest difference of a probability, and in how many questions the same
option leads. Without `--model` the weights are random but for the last layer of the decision head, which is fitted to
other questions of the kind, so that options lie as far apart as a trained model puts them: an untrained head often has
two that differ by less than rounding. On the CPU the kernels' CPU form is compared, in float32.
"""

from __future__ import annotations

import argparse
import copy
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _report import machine, versions

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples" / "decision"))

from decision import weights
from decision.accelerated import accelerate
from decision.answers import Question, collate
from decision.heads import marked
from decision.model import DecisionModel

from fuseboard_tilelang.warm import needed, warm

COUNTS = {"choice": 48, "noul": 180, "score": 60}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PAIRS = (("fast", "stock"), ("fast", "fp32"), ("stock", "fp32"))
MARKERS = 8  # ids 1 to 8 stand before options; the greater one is the better one
GAP = 3.0  # logits between two neighbours
BATCH = 8


def questions(counts: dict[str, int], vocabulary: int, seed: int) -> list[Question]:
    """Of each kind, from 24 to 400 tokens, their options' markers drawn without repetition."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    made = []
    for kind, count in counts.items():
        for _ in range(count):
            options = 2 if kind == "noul" else drawn(3, 8) if kind == "choice" else 5
            ids = torch.randint(MARKERS + 1, vocabulary, (drawn(24, 400),), generator=generator)
            places = (torch.randperm(len(ids) - 1, generator=generator)[:options] + 1).sort().values
            ids[places] = torch.randperm(MARKERS, generator=generator)[:options] + 1
            made.append(Question(kind, ids.tolist(), places.tolist()))
    return made


def batches(asked: list[Question], model: DecisionModel, device: torch.device) -> list[tuple[list[int], Any]]:
    """Which questions, and their tensors; questions of like length together."""
    order = sorted(range(len(asked)), key=lambda at: len(asked[at].ids))
    groups = [order[first : first + BATCH] for first in range(0, len(order), BATCH)]
    config = model.config
    pad = config.pad_token_id or 0
    return [
        (group, collate([asked[at] for at in group], vocabulary=config.vocab_size, pad=pad, device=device))
        for group in groups
    ]


@torch.no_grad()
def fit(model: DecisionModel, seed: int, device: torch.device) -> None:
    """Fit the last layer of the decision head by ridge regression, to the markers' rank; on questions of its own."""
    config, head = model.config, model.decision_head
    asked = questions({"choice": max(256, config.hidden_size // 2)}, config.vocab_size, seed)
    seen, wanted = [], []
    hooked: list[torch.Tensor] = []
    hook = head.score.register_forward_pre_hook(lambda _layer, given: hooked.append(given[0]))
    for _, batch in batches(asked, model, device):
        model(*batch)
        seen.append(hooked.pop()[batch.marker_mask])
        ids = marked(batch.input_ids[..., None], batch.marker_positions, batch.marker_mask)[..., 0]
        wanted.append(ids[batch.marker_mask] * GAP)
    hook.remove()
    x, y = torch.cat(seen).double(), torch.cat(wanted).double()
    mean, middle = x.mean(0), y.mean()
    centred = x - mean
    square = centred.T @ centred
    square += torch.eye(len(square), dtype=square.dtype, device=device) * square.diagonal().mean() * 1e-3
    weight = torch.linalg.solve(square, centred.T @ (y - middle))
    head.score.weight.copy_(weight[None])
    head.score.bias.copy_(-(mean @ weight)[None])


@torch.no_grad()
def probabilities(run: Callable[..., Any], asked: list[Question], made: list[tuple[list[int], Any]]) -> list[Any]:
    """Each question's options, float64."""
    found: list[Any] = [None] * len(asked)
    for group, batch in made:
        decision = run(*batch)[0].double().cpu()
        for row, at in enumerate(group):
            found[at] = decision[row, : len(asked[at].markers)].softmax(-1)
    return found


def compared(asked: list[Question], given: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """A row for each kind of question."""
    rows = []
    for kind in COUNTS:
        at = [index for index, each in enumerate(asked) if each.kind == kind]
        row: dict[str, Any] = {"type": kind, "n": len(at)}
        for one, other in PAIRS:
            pairs = [(given[one][index], given[other][index]) for index in at]
            row[f"{one}/{other}"] = {
                "largest": max(float((a - b).abs().max()) for a, b in pairs),
                "argmax": sum(int(a.argmax()) == int(b.argmax()) for a, b in pairs),
            }
        rows.append(row)
    return rows


def measure(args: argparse.Namespace, name: str, device: torch.device) -> list[dict[str, Any]]:
    """All questions in one dtype."""
    dtype = DTYPES[name]
    if args.model is None:
        wide = weights.random_model(weights.SIZES[args.size], seed=args.seed).to(device)
        fit(wide, args.seed + 1, device)
    else:
        wide = weights.load(args.model, seed=args.seed, dtype=torch.float32).to(device)
    low = copy.deepcopy(wide).to(dtype)
    counts = {kind: max(1, count // args.fraction) for kind, count in COUNTS.items()}
    asked = questions(counts, wide.config.vocab_size, args.seed)
    made = batches(asked, wide, device)
    runs = {"fp32": wide, "stock": low, "fast": accelerate(low)}
    begun = time.monotonic()
    jobs = needed(lambda: [runs["fast"](*batch) for _, batch in made])
    missing = [why for why in warm(jobs, target="c" if device.type == "cpu" else None) if why]
    print(f"{name}: {len(jobs)} kernels in {time.monotonic() - begun:.0f} s", *missing, flush=True)
    given = {}
    for each, run in runs.items():
        begun = time.monotonic()
        given[each] = probabilities(run, asked, made)
        print(f"{name}: {len(asked)} questions by {each} in {time.monotonic() - begun:.1f} s", flush=True)
    return [{"dtype": name, **row} for row in compared(asked, given)]


def shown(difference: float) -> str:
    rounded = f"{difference:.4f}"
    return f"{difference:.1e}" if difference and not float(rounded) else rounded


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown, as it is published."""
    heads = [f"{one}/{other}: largest difference | argmax" for one, other in PAIRS]
    lines = [f"| dtype | type | n | {' | '.join(heads)} |", "|" + "---|" * (3 + 2 * len(PAIRS))]
    for row in rows:
        cells = [
            f"{shown(row[f'{one}/{other}']['largest'])} | {row[f'{one}/{other}']['argmax']}/{row['n']}"
            for one, other in PAIRS
        ]
        lines.append(f"| {row['dtype']} | {row['type']} | {row['n']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, metavar="DIR", help="a local checkpoint; default, random weights")
    parser.add_argument("--size", choices=tuple(weights.SIZES), default="base", help="of the random model (base)")
    parser.add_argument("--device", metavar="NAME", help="default cuda if there is one, else cpu")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), action="append", help="default bf16 and fp16; fp32 on the CPU"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--fraction", type=int, default=1, metavar="N", help="ask one in N of the questions")
    parser.add_argument("--out", type=pathlib.Path, metavar="NAME", help="write NAME.json and NAME.md")
    args = parser.parse_args(given)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    names = args.dtype or (["bf16", "fp16"] if device.type == "cuda" else ["fp32"])
    rows = [row for name in names for row in measure(args, name, device)]
    facts = {
        "model": str(args.model) if args.model else f"random {args.size}, seed {args.seed}, fitted score",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else machine()["cpu"],
        **versions("torch", "fuseboard", "fuseboard-tilelang", "tilelang"),
    }
    print(facts)
    print(table(rows))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
        said = ", ".join(f"{key} {value}" for key, value in facts.items())
        text = f"<!-- generated by benchmarks/parity.py -->\n{said}\n\n{table(rows)}\n"
        args.out.with_suffix(".md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
