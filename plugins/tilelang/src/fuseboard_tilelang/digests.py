"""Which CUDA source TileLang makes of each kernel, as a digest for each of its versions.

    python -m fuseboard_tilelang.digests             say which differ from those stored
    python -m fuseboard_tilelang.digests --write     store those of the installed version

Source of another digest is another kernel than the one that was tested and measured on a GPU. No GPU is needed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fuseboard_tilelang import _package
from fuseboard_tilelang._tile import GPU_DTYPES, Factory
from fuseboard_tilelang.add_ln import add_ln_kernel
from fuseboard_tilelang.attn import attn_kernel
from fuseboard_tilelang.compile import lowered
from fuseboard_tilelang.geglu import gemm_geglu_kernel
from fuseboard_tilelang.gemm import gemm_kernel
from fuseboard_tilelang.rope import rope_kernel

__all__ = ["CASES", "STORE", "found", "stored"]

STORE = Path(__file__).with_name("digests.json")

CASES: Mapping[str, tuple[Factory, tuple[int | None, ...], Mapping[str, Any]]] = {
    "gemm": (gemm_kernel, (128, 64), {"bias": True, "residual": True, "act": "gelu"}),
    "geglu": (gemm_geglu_kernel, (64, 64), {"bias": True}),
    "add_ln": (add_ln_kernel, (128,), {}),
    "rope": (rope_kernel, (2, 64), {}),
    "attn": (attn_kernel, (None, None, None, 64), {}),
    "attn bounded lengths": (attn_kernel, (None, None, None, 64), {"bounded": True, "lengths": True}),
    "attn lengths few": (attn_kernel, (None, None, None, 64), {"lengths": True, "few": True}),
}
"""A factory, sizes and options by name."""


def found() -> Iterator[tuple[str, str]]:
    """The digest of each case in each dtype, by name, with the installed TileLang."""
    for name, (factory, sizes, options) in CASES.items():
        for dtype in GPU_DTYPES:
            source = lowered(factory, *sizes, dtype=dtype, **options)
            yield f"{name} {dtype}", hashlib.sha256(source.encode()).hexdigest()


def stored() -> dict[str, dict[str, str]]:
    """The digests by TileLang's version."""
    known: dict[str, dict[str, str]] = json.loads(STORE.read_text(encoding="utf-8"))
    return known


def main() -> int:
    """Compare, or write."""
    version, now = _package.version() or "", dict(found())
    if sys.argv[1:] == ["--write"]:
        text = json.dumps({**stored(), version: now}, indent=1, sort_keys=True)
        STORE.write_text(f"{text}\n", encoding="utf-8")
        return 0
    then = stored().get(version)
    if then is None:
        print(f"no digests are stored for TileLang {version}")  # noqa: T201 - a command
        return 1
    other = [name for name in now if now[name] != then.get(name)]
    print(f"TileLang {version}: {len(now) - len(other)} alike, {', '.join(other) or 'none'} other")  # noqa: T201
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
