"""The exactness table: every speed-up of this installation, what it does to results, and what reports it.

It is made from what the code declares: the backends' exactness hooks, the process switches, and for the rest the list
`ENGINE` below, each line of which stands beside the object it is about and is left out where that does not exist.

    fuseboard exactness                      # a table of everything installed here
    fuseboard exactness docs/exactness.md    # fuseboard's own, into the page, between its markers
    fuseboard exactness --check docs/exactness.md
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from fuseboard import registry
from fuseboard.backend import Backend, Exactness
from fuseboard.ops.cli import Parser, UnusableError
from fuseboard.settings import Settings

if TYPE_CHECKING:
    from fuseboard.call import Call

__all__ = ["DEPENDS", "LOWER", "NOTHING", "ROUNDING", "Row", "fill", "main", "render", "rows"]

NOTHING, ROUNDING, LOWER, DEPENDS = "nothing", "rounding", "precision", "depends"
MEANING = {
    NOTHING: "the same bits: the same kernels with the same arguments, or shown to be equal on the device before it is "
    "used",
    ROUNDING: "the last bits: arithmetic in the inputs' precision or better, in another order or with "
    "other roundings between",
    LOWER: "more than that: quantised, or computed with fewer bits than the inputs have",
    DEPENDS: "one or the other, by the call",
}
OWN = "fuseboard-"
"""How the names of this project's distributions begin."""
BEGIN, END = "<!-- fuseboard exactness -->", "<!-- end of fuseboard exactness -->"


@attrs.frozen
class Row:
    """One speed-up.

    Attributes:
        name: What it is called.
        changes: What it changes in a result: `nothing`, `rounding`, `precision`, or `depends` on the call.
        what: How, in words.
        on: Whether it is used without being asked for.
        ask: What turns it on, or off where it is on.
        reported: Where an output's report says that it was used.
    """

    name: str
    changes: str
    what: str
    on: bool
    ask: str
    reported: str


ENGINE: tuple[tuple[str, Row], ...] = (
    (
        "fuseboard.engine.graphs:Graphs",
        Row(
            "CUDA graphs", NOTHING, "the same kernels, launched at once", on=True,
            ask="off: `decoder.graphs = False`; off by itself but on NVIDIA",
            reported="`QwenDecoder.report()`, `Graphs.report()`: `captured`, `replays`, `failed`",
        ),
    ),
    (
        "fuseboard.engine.decoder.whole_step:WholeSteps",
        Row(
            "whole-step graphs", ROUNDING, "one graph for a step, over a cache of fixed capacity, of which attention "
            "is told a mask or lengths: another kernel may answer. The bits are those of the same step without a graph",
            on=False, ask='`decoder.graphs = "step"`', reported="`QwenDecoder.report()`: `step`",
        ),
    ),
    (
        "fuseboard.engine.sampling:multinomial1",
        Row(
            "draws without waiting", NOTHING, "torch.multinomial's own draw without its two checks; ids and generator "
            "state are the same", on=True, ask="by calling it, or `Sampler`", reported="`Sampler.report()`: `mode`",
        ),
    ),
    (
        "fuseboard.engine.sampling:Sampler",
        Row(
            "logits processors without waiting", NOTHING, "transformers' processors, in its order and to the bit",
            on=True, ask="by calling `Sampler`", reported="`Sampler.report()`: `applied`",
        ),
    ),
    (
        "fuseboard.engine.decoder.norms:fused_norm_exact",
        Row(
            "`F.rms_norm` in the decoder", NOTHING, "only where a self-test on the device finds it equal bit for bit",
            on=True, ask="by itself", reported="`QwenDecoder.report()`: `norm`",
        ),
    ),
    (
        "fuseboard.engine.decoder:QwenDecoder.fuse",
        Row(
            "fused projections", ROUNDING, "q, k, v and gate, up as single matrix products; for the larger one a GPU "
            "may take another kernel", on=False, ask="`decoder.fuse()`",
            reported="`QwenDecoder.report()`: `fused_projections`",
        ),
    ),
    (
        "fuseboard.engine.decoder:QwenDecoder.glue",
        Row(
            "fused glue", ROUNDING, "norms, rotation and gate of a whole step as Triton kernels, matrix products if "
            "asked for too: their sums are in another order", on=False, ask="`decoder.fuse(glue=True, products=True)`",
            reported="`QwenDecoder.report()`: `glue`, `products`",
        ),
    ),
    (
        "fuseboard.engine.decoder.kernels.exact:ExactGlue",
        Row(
            "exact glue", NOTHING, "norms, rotation and gate of a one-token step in fewer launches, where a trial on "
            "the device gives torch's bits", on=True, ask="by itself; off by `decoder.exact_glue = False`",
            reported="`QwenDecoder.report()`: `exact_glue`",
        ),
    ),
    (
        "fuseboard.engine.decoder:QwenDecoder.stream_layers",
        Row(
            "streamed layers", NOTHING, "the layers' weights stay in pinned host memory and are copied over as a pass "
            "comes to them", on=False, ask="`decoder.stream_layers(device)`",
            reported="`QwenDecoder.report()`: `streamed`",
        ),
    ),
    (
        "fuseboard.engine.compiled:Compiled",
        Row(
            "torch.compile", ROUNDING, "fused kernels that inductor writes, with other orders of addition and without "
            "the roundings between", on=False, ask="`compile_module`, `Compiled`",
            reported="`Compiled.report()`: `compiled`, `graphs`",
        ),
    ),
    (
        "fuseboard.engine.aot:load",
        Row(
            "AOTInductor packages", ROUNDING, "as torch.compile, ahead of time; attention by what the example was "
            "answered by", on=False, ask="`aot.export`, `aot.load`",
            reported="`Package.report()`: `path`, `policy`, `attention`",
        ),
    ),
    (
        "fuseboard.engine.cpu:apply",
        Row(
            "memory and waiting on the CPU", NOTHING, "malloc's thresholds and arenas, how threads wait", on=False,
            ask="`cpu.apply()`, before torch is imported", reported="`cpu.report()`: `settings`",
        ),
    ),
    (
        "fuseboard.engine.cpu:apply",
        Row(
            "number of CPU threads", ROUNDING, "sums are cut into as many parts", on=False,
            ask="`cpu.apply(threads=N)`, with a number of yours only",
            reported="`cpu.report()`: `settings`, `changes_results`",
        ),
    ),
)  # fmt: skip
"""What a speed-up is made of, `module` or `module:name`, and its row."""


def rows(own: bool = False) -> list[Row]:
    """Every speed-up that is installed here.

    Args:
        own: Leave out the backends of other people's distributions.

    Raises:
        LookupError: A line of `ENGINE` is about something that its module does not have.
    """
    entries = [each for each in registry.installed_entries() if not own or each.distribution.startswith(OWN)]
    # A page is the same whatever is switched off where it is made.
    board = registry.Registry(entries, Settings()) if own else registry.current()
    backends = sorted(board.backends(), key=lambda each: (each.distribution, each.name))
    return [
        *(_of_backend(each) for each in backends),
        *(row for place, row in ENGINE if _exists(place)),
        *_of_switches(),
    ]


def _of_backend(backend: Backend) -> Row:
    found = {backend.exactness(call) for call in _calls(backend)}
    # No Call to ask about is no promise.
    changes = {frozenset({Exactness.EXACT}): ROUNDING, frozenset({Exactness.APPROXIMATE}): LOWER}.get(
        frozenset(found), DEPENDS if found else LOWER
    )
    policies = "policy `fast`" if changes == LOWER else "policies `exact` and `fast`"
    never = "; never at a site with `approx_ok=False`" if changes != ROUNDING else ""
    return Row(
        f"attention by `{backend.name}`", changes, backend.info.summary.rstrip("."), on=False,
        ask=f"{policies}, or its name{never}", reported="`Run.report()`: `attention.used`",
    )  # fmt: skip


def _calls(backend: Backend) -> Iterator[Call]:
    """Calls of every kind that a backend takes: an exactness hook may answer by the call."""
    from fuseboard.call import Call  # noqa: PLC0415 - loads torch
    from fuseboard.masks import Structure  # noqa: PLC0415 - loads torch

    limits = backend.constraints
    usual = 512
    dims = [dim for dim in range(1, usual + 1) if limits.head_dims.admits(dim)]
    dims = dims or [dim for dim in (limits.head_dims.nearest(usual),) if dim is not None]
    for device, dtype, dim, queries, lengths, mask, grad, causal, inside in itertools.product(
        sorted(limits.devices), sorted(limits.dtypes, key=str), {dims[0], dims[-1]} if dims else (),
        sorted(limits.queries), sorted(limits.lengths), ("none", "bool", "additive"), (False, True), (False, True),
        (None, Structure(causal=True), Structure(keys="right")),
    ):  # fmt: skip
        if mask not in {"none", *limits.masks} or (grad and not limits.backward) or (inside and not limits.structures):
            continue
        yield Call(
            device_type=device, device_index=0 if device == "cuda" else None,
            capability=(limits.capability or ((9, 0), (9, 0)))[0] if device == "cuda" else None,
            dtype=dtype, head_dim=dim, v_head_dim=dim, one_query=queries == "one", lengths=lengths,
            mask=mask, mask_dtype=dtype if mask == "additive" else None, structure=inside, causal=causal, grad=grad,
        )  # fmt: skip


def _of_switches() -> Iterator[Row]:
    # By name: folders of fuseboard do not import each other.
    place = "fuseboard.engine.features"
    if not _exists(place):
        return
    switches: dict[str, Any] = importlib.import_module(place).SWITCHES
    for name, switch in switches.items():
        yield Row(
            f"`{name}`", ROUNDING if switch.rounds_only else LOWER, switch.effect.rstrip("."), on=False,
            ask=f'`features.apply(["{name}"])`', reported="`features.report()`: `params.fast`",
        )  # fmt: skip


def _exists(place: str) -> bool:
    """Whether `module` or `module:name.name` is there. A module that is there without the name is a mistake here."""
    module, _, name = place.partition(":")
    if importlib.util.find_spec(module) is None:
        return False
    found: Any = importlib.import_module(module)
    for part in filter(None, name.split(".")):
        found = getattr(found, part, None)
        if found is None:
            msg = f"{module} has no {name}, which a line of fuseboard.ops.exactness.ENGINE is about; correct the line."
            raise LookupError(msg)
    return True


def render(found: list[Row]) -> str:
    """The table as Markdown, with what its words mean."""
    lines = ["| speed-up | changes | how | unasked | by | reported in |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {row.name} | {row.changes} | {_cell(row.what)} | {'on' if row.on else 'off'} | {row.ask} | {row.reported} |"
        for row in found
    ]
    used = {row.changes for row in found}
    return "\n".join([*lines, "", *(f"* **{word}**: {text}." for word, text in MEANING.items() if word in used)])


def _cell(text: str) -> str:
    """Other people's text as one cell: a line break or a bar would end the row."""
    return " ".join(text.split()).replace("|", "\\|")


def fill(page: str, table: str) -> str:
    """The page with the table between its markers.

    Raises:
        ValueError: It has no markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        msg = f"there is no place for the table: add the lines {BEGIN!r} and {END!r} where it belongs."
        raise ValueError(msg)
    return f"{before}{begin}\n{table}\n{end}{after}"


def main(argv: list[str]) -> int:
    """Print the table, or write it into a page; the exit status, 1 for a page that `--check` finds stale."""
    parser = Parser(prog="fuseboard exactness", description="What each speed-up does to results.")
    parser.add_argument("page", nargs="?", type=Path, metavar="PAGE", help="a Markdown file with the table's markers")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when the page is out of date")
    parser.add_argument("--json", action="store_true", help="the table as data")
    args = parser.parse_args(argv)
    page: Path | None = args.page
    if args.json or page is None:
        if page is not None or args.check:
            parser.error("--json prints and takes no page" if args.json else "--check needs a page")
        found = rows()
        text = json.dumps([attrs.asdict(row) for row in found], indent=1) if args.json else render(found)
        sys.stdout.write(text + "\n")
        return 0
    try:
        before = page.read_text(encoding="utf-8")
        after = fill(before, render(rows(own=True)))
    except (OSError, ValueError) as error:
        msg = f"{page}: {error}"
        raise UnusableError(msg) from error
    if args.check:
        if before != after:
            sys.stderr.write(f"{page} is out of date: fuseboard exactness {page}\n")
        return int(before != after)
    page.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except UnusableError as unusable:
        sys.stderr.write(f"{unusable}\n")
        status = 2
    sys.exit(status)
