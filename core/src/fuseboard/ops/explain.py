"""`fuseboard explain`: who would answer one attention call, described on the command line, and why nobody else.

Status: 0 when somebody answers (a backend, or the reference), 1 when a strict policy lets nobody, 2 when the question
cannot be asked.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuseboard.errors import FuseboardError
from fuseboard.ops.cli import Parser, UnusableError
from fuseboard.registry import first_line

if TYPE_CHECKING:
    from fuseboard.explanation import Explanation
    from fuseboard.site import Site

__all__ = ["main"]

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SHAPE = (1, 8, 1024, 64)
EPILOG = """\
TARGET is module:SITE, where SITE is an attribute of the module (dots allowed)
or the name of a site that exists after its import, as in
fuseboard explain engine.tts:tts.decoder. A module alone stands for its only
site. Without TARGET, a site is made whose reference is torch's attention.

The tensors are random. Nothing is computed with them, but every backend that
might answer is probed in this process.

exit status:
  0  a backend or the reference answers
  1  a strict policy lets nobody answer
  2  the question cannot be asked
"""


def main(argv: list[str]) -> int:
    """Run `fuseboard explain`; its exit status."""
    args = _parser().parse_args(argv)
    try:
        # What an engine or a kernel package prints while it is imported must not stand in the answer.
        with contextlib.redirect_stdout(sys.stderr):
            said = _asked(args)
    except FuseboardError as error:
        raise UnusableError(str(error)) from None
    if args.json:
        sys.stdout.write(json.dumps({"schema": 1, **said.as_dict()}, indent=2, allow_nan=False) + "\n")
    else:
        sys.stdout.write(f"{said}\n")
    return 1 if said.chosen is None else 0


def _parser() -> Parser:
    parser = Parser(
        prog="fuseboard explain",
        description="Say who would answer one attention call, and why nobody else.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("target", nargs="?", metavar="TARGET", help="the site: module:SITE (see below)")
    add(
        "--site",
        metavar="NAME",
        help="the site's name, in TARGET's module; without TARGET, of a site made for the answer",
    )
    add("--shape", type=_shape, default=SHAPE, metavar="B,H,Q,D", help="batch, heads, queries, head dim (1,8,1024,64)")
    add("--kv-heads", type=_positive, metavar="N", help="key and value heads (as many as heads)")
    add("--k-length", type=_positive, metavar="N", help="keys (as many as queries)")
    add("--v-dim", type=_positive, metavar="N", help="head dim of v (as q's)")
    add("--dtype", choices=DTYPES, help="of q, k and v (bf16 on a GPU, else fp32)")
    add("--device", metavar="NAME", help="where, such as cuda:0 (cuda if there is one, else cpu)")
    add("--causal", action="store_true", help="torch's is_causal: aligned top-left")
    add("--scale", type=float, metavar="X", help="of the scores (1/sqrt(head dim))")
    add("--mask", choices=("bool", "float"), help="a dense mask; with a structure, the structure's")
    add("--window", type=_positive, metavar="N", help="structure: how many keys back a query sees")
    add("--ahead", type=_count, metavar="N", help="structure: how many keys beyond its own a query sees")
    add("--bottom-right", action="store_true", help="structure: causal, aligned bottom-right, as with a key cache")
    add("--padding", choices=("left", "right"), help="structure: on which side rows are padded")
    add("--dropout", type=_probability, default=0.0, metavar="P", help="probability of dropping a weight")
    add("--grad", action="store_true", help="q, k and v need a gradient")
    add("--policy", default="fast", metavar="NAME", help="auto, exact, fast or a backend's name (fast)")
    add("--strict", action="store_true", help="a call that the policy's backends cannot take is an error: status 1")
    add("--json", action="store_true", help="print data; docs/doctor.md describes the keys")
    return parser


def _shape(text: str) -> tuple[int, ...]:
    parts = text.replace("x", ",").split(",")
    if len(parts) != len(SHAPE) or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        msg = f"{text!r} is not four numbers of at least 1: batch,heads,queries,head_dim"
        raise argparse.ArgumentTypeError(msg)
    return tuple(int(part) for part in parts)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        msg = f"{text!r} is not a number of at least 1"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        msg = f"{text!r} is not a number of at least 0"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def _probability(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < 1:
            return float(text)
    msg = f"{text!r} is not a probability of at least 0 and below 1"
    raise argparse.ArgumentTypeError(msg)


def _asked(args: argparse.Namespace) -> Explanation:
    try:
        import torch  # noqa: F401, PLC0415 - not before it is known that the arguments can be read
    except Exception as error:  # noqa: BLE001 - a damaged torch raises anything
        msg = f"torch cannot be imported ({first_line(error)})."
        raise UnusableError(msg) from None
    import fuseboard as fb  # noqa: PLC0415 - its names load torch

    policy = fb.policy_for(args.policy, strict=args.strict)
    site = _site(args.target, args.site)
    tensors, arguments = _call(args)
    return fb.explain(site, *tensors, **arguments, policy=policy)


# ---- the site


def _site(target: str | None, name: str | None) -> Site:
    from fuseboard.site import Site, sites  # noqa: PLC0415 - loads torch

    if target is None:
        return Site(name or "fuseboard.explain")
    module_name, _, place = target.partition(":")
    if place and name and place != name:
        msg = f"TARGET names the site {place!r} and --site {name!r}; give one."
        raise UnusableError(msg)
    module = _import(module_name)
    living = sites()
    place = place or name or ""
    if not place:
        if len(living) == 1:
            return next(iter(living.values()))
        msg = f"which site of {module_name!r}? {_listed(living, module_name)}"
        raise UnusableError(msg)
    missing = object()
    found = functools.reduce(lambda at, each: getattr(at, each, missing), place.split("."), module)
    if isinstance(found, Site):
        return found
    if place in living:
        return living[place]
    near = difflib.get_close_matches(place, living, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    what = "nothing there is called so" if found is missing else f"that is a {type(found).__name__}"
    msg = f"{place!r} is no site of {module_name!r}: {what}.{hint} {_listed(living, module_name)}"
    raise UnusableError(msg)


def _listed(living: dict[str, Site], module: str) -> str:
    if not living:
        return "No site exists after its import."
    return f"Sites that exist after its import: {', '.join(f'{module}:{name}' for name in living)}."


def _import(name: str) -> Any:
    # The command's own folder stands first on the path of a script, not the folder that it is run in.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an engine's import may raise anything
        msg = (
            f"cannot import {name!r} ({first_line(error)}); TARGET is module:SITE, "
            "and --site NAME alone makes a site of that name."
        )
        raise UnusableError(msg) from None


# ---- the call


def _call(args: argparse.Namespace) -> tuple[list[Any], dict[str, Any]]:
    import torch  # noqa: PLC0415 - asked for by now

    try:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = getattr(torch, DTYPES[args.dtype or ("bf16" if device.type == "cuda" else "fp32")])
        return _tensors(args, device, dtype)
    except FuseboardError:
        raise
    except (Exception, MemoryError) as error:  # noqa: BLE001 - no such device, no memory: torch says it in many ways
        msg = f"the call's tensors cannot be made ({first_line(error)})."
        raise UnusableError(msg) from None


def _tensors(args: argparse.Namespace, device: Any, dtype: Any) -> tuple[list[Any], dict[str, Any]]:
    import torch  # noqa: PLC0415 - asked for by now

    from fuseboard.masks import mask_for  # noqa: PLC0415 - loads torch

    batch, heads, q_length, dim = args.shape
    k_length, kv_heads = args.k_length or q_length, args.kv_heads or heads

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device).requires_grad_(args.grad)

    tensors = [
        draw(batch, heads, q_length, dim),
        draw(batch, kv_heads, k_length, dim),
        draw(batch, kv_heads, k_length, args.v_dim or dim),
    ]
    arguments: dict[str, Any] = {
        "causal": args.causal,
        "scale": args.scale,
        "enable_gqa": kv_heads != heads,
        "dropout_p": args.dropout,
    }
    mask_dtype = torch.bool if args.mask == "bool" else dtype
    if args.window or args.ahead is not None or args.bottom_right or args.padding:
        keys = None
        if args.padding:
            # The first row is whole and the others are half as long, as a batch is padded to its longest; a batch of
            # one has padding too, since that is what was asked about.
            real = torch.full((batch, 1), max(1, k_length // 2), device=device)
            real[0] = k_length if batch > 1 else max(1, k_length // 2)
            at = torch.arange(k_length, device=device)
            keys = at < real if args.padding == "right" else at >= k_length - real
        masked = mask_for(
            q_length, k_length, keys=keys, causal=args.bottom_right, window=args.window, ahead=args.ahead,
            padding=args.padding, padded=True if args.padding else None, dtype=mask_dtype, device=device,
        )  # fmt: skip
        arguments |= masked.arguments() if args.mask else {"mask_info": masked.info}
    elif args.mask == "bool":
        arguments["mask"] = torch.rand(q_length, k_length, device=device) < 0.9  # noqa: PLR2004 - most keys are seen
    elif args.mask == "float":
        arguments["mask"] = torch.randn(q_length, k_length, dtype=dtype, device=device)
    return tensors, arguments
