"""Structure against dense masks on one GPU: what does `mask_info` buy?

    python benchmarks/structured.py [--rounds 15] [--out benchmarks/results/structured]

One run, one table. *dense* is torch's `F.scaled_dot_product_attention` given the dense mask, by the fastest of its
kernels for the shape (memory-efficient, cuDNN, its default choice). Every other column is `fuseboard.attention` given
the structure: under `fast`, and under each backend by name that takes it as one. Ratios are dense over structured:
above 1 is faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from _report import arguments, keep, listed
from grid import SITE, Shape, inputs, settle, timed, waits
from torch.nn.attention import SDPBackend, sdpa_kernel

import fuseboard as fb

SHAPES = {
    "right-padded batch, half real": Shape("structure", 8, 16, 16, 2048, 2048, 64, mask="right padding"),
    "left-padded batch, causal, half real": Shape("structure", 8, 16, 16, 2048, 2048, 64, mask="left padding causal"),
    "window 512 of 8192": Shape("structure", 1, 16, 16, 8192, 8192, 128, mask="window 512"),
    "bottom-right chunk, 256 of 4096": Shape("structure", 1, 32, 8, 256, 4096, 128, mask="bottom-right causal"),
    "decode over 4096 keys, GQA 32/8, left-padded": Shape(
        "structure", 16, 32, 8, 1, 4096, 128, mask="left padding causal"
    ),
}
DENSE = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "default": None}


def by_structure(policy: str) -> Callable[..., torch.Tensor]:
    """Attention under a policy, given the structure."""
    bound = fb.bind(fb.policy_for(policy, policy != "fast"))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: object) -> torch.Tensor:
        with bound:
            return fb.attention(q, k, v, site=SITE, **given)

    return call


def takes_structure(name: str, qkv: tuple[torch.Tensor, ...], given: dict[str, object]) -> bool:
    """Whether a backend would be given the structure, and can answer."""
    only = {**given, "mask": None}
    call, _ = fb.describe(*qkv, **only)
    backend = fb.policy_for(name).registry.resolve(name)
    if backend is None or backend.constraints.form(call) != "structure":
        return False
    found = next(each for each in fb.explain(SITE, *qkv, policy=name, **given).candidates if each.name == name)
    return not found.refusals


def measure(shape: Shape, rounds: int) -> dict[str, object]:
    """Time the dense kernels and the structured ones on one shape."""
    qkv, given = inputs(shape)
    gqa = shape.heads != shape.kv_heads
    calls: dict[str, Callable[[], object]] = {}
    for name, kernel in DENSE.items():

        def dense(kernel: SDPBackend | None = kernel) -> object:
            def attend() -> object:
                return torch.nn.functional.scaled_dot_product_attention(*qkv, attn_mask=given["mask"], enable_gqa=gqa)

            if kernel is None:
                return attend()
            with sdpa_kernel(kernel):  # fuseboard: allow(what it is compared with)
                return attend()

        try:
            dense()
        except RuntimeError:
            continue
        calls[f"dense {name}"] = dense
    names = [
        "fast",
        *sorted(name for name in fb.policy_for("fast").registry.names() if takes_structure(name, qkv, given)),
    ]
    for name in names:
        attend = by_structure(name)
        calls[name] = lambda attend=attend: attend(*qkv, **given)
    for call in calls.values():
        call()
    settle(calls["fast"], lambda: waits(qkv, given))
    once = {name: min(timed(call, 2) for _ in range(3)) for name, call in calls.items()}
    counts = {name: max(3, min(200, int(3000 / max(time, 1.0)))) for name, time in once.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds):
        for name in list(calls) if index % 2 == 0 else list(calls)[::-1]:
            times[name].append(timed(calls[name], counts[name]))
    us = {name: statistics.median(each) for name, each in times.items()}
    best = min((name for name in us if name.startswith("dense")), key=lambda name: us[name])
    run = fb.Run()
    with fb.bind("fast", run=run):
        fb.attention(*qkv, site=SITE, **given)
    return {"us": us, "dense": best, "fast_used": next(iter(run.report()["attention"]["used"])),
            "ratios": {name: us[best] / us[name] for name in names}}  # fmt: skip


def main() -> None:
    parser = arguments(__doc__, rounds=15)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        msg = "structured.py needs a CUDA device: it compares CUDA kernels."
        raise SystemExit(msg)
    rows = {}
    for name, shape in SHAPES.items():
        rows[name] = measure(shape, options.rounds)
        torch.cuda.empty_cache()
    backends = sorted({name for row in rows.values() for name in row["ratios"]} - {"fast"})
    head = ["shape", "best dense", "dense µs", "fast used", "fast µs", "**fast**", *backends]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, row in rows.items():
        us, ratios = row["us"], row["ratios"]
        cells = [
            name,
            row["dense"],
            f"{us[row['dense']]:.1f}",
            row["fast_used"],
            f"{us['fast']:.1f}",
            f"**{ratios['fast']:.2f}x**",
        ]
        cells += [f"{ratios[each]:.2f}x" if each in ratios else "—" for each in backends]
        lines.append("| " + " | ".join(cells) + " |")
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rounds": options.rounds}
    print(facts)
    text = "\n".join(lines)
    print(text)
    keep(options, "structured", {"facts": facts, "rows": rows}, f"{listed(facts)}\n\n{text}", fenced=False)


if __name__ == "__main__":
    main()
