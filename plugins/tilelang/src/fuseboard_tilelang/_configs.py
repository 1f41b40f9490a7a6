"""Tiles, threads and stages by kernel and size: a table that `benchmarks/tilelang_kernels.py --tune` measures.

On the CPU tiles are small, since a whole tile is computed however small the problem, and buffers lie on the stack.
"""

from __future__ import annotations

import functools
from typing import TypeAlias

import attrs

__all__ = [
    "GEMM",
    "LOADING",
    "SHARED",
    "AttnConfig",
    "Config",
    "RopeConfig",
    "RowConfig",
    "Tiles",
    "attn_config",
    "candidates",
    "gemm_config",
    "rope_config",
    "row_config",
]


REGISTERS = 65536  # of a multiprocessor
LOADERS, LOADING = 128, 24  # threads that load, and the registers that each keeps


def _registers(threads: int, blocks: int) -> int:
    """What a multiprocessor has for each thread that multiplies, after what the loading ones keep.

    Given out in eights. A thread that asked for more would wait for ever.
    """
    each = REGISTERS // blocks // (threads + LOADERS) // 8 * 8
    return min((each * (threads + LOADERS) - LOADING * LOADERS) // threads // 8 * 8, 240)


@attrs.frozen(cache_hash=True)  # part of the key that a kernel is found by at every call
class Config:
    """A matrix product's tiles.

    Attributes:
        bm: Rows of an output tile.
        bn: Its columns.
        bk: Columns of the input in one step.
        stages: Steps loaded ahead.
        threads: That multiply; the compiler adds a warp group that loads.
        policy: How warps share a tile, a name of TileLang's `GemmWarpPolicy`.
        swizzle: Tiles in a panel, for the cache; 0 for rows in order.
        blocks: That share a multiprocessor, so that one multiplies while another is at its activation.
    """

    bm: int
    bn: int
    bk: int
    stages: int
    threads: int
    policy: str = "FullRow"
    swizzle: int = 8
    blocks: int = 1

    @property
    def registers(self) -> int:
        """Of each thread that multiplies."""
        return _registers(self.threads, self.blocks)


@attrs.frozen
class RowConfig:
    """Rows in a block, and threads that a row is spread over."""

    rows: int
    lanes: int = 32


@attrs.frozen
class RopeConfig:
    """Rows in a block, and its threads."""

    rows: int
    threads: int


@attrs.frozen
class AttnConfig:
    """Queries and keys in a tile, blocks of keys loaded ahead, threads that multiply, blocks on a multiprocessor."""

    bm: int
    bn: int
    stages: int
    threads: int
    blocks: int = 1

    @property
    def registers(self) -> int:
        """Of each thread that multiplies."""
        return _registers(self.threads, self.blocks)


Tiles: TypeAlias = "Config | RowConfig | RopeConfig | AttnConfig"

CPU_GEMM = Config(16, 16, 16, 0, 1, "Square", 0)
CPU_ROWS = RowConfig(4, 1)
CPU_ROPE = RopeConfig(4, 1)
CPU_ATTN = AttnConfig(16, 32, 0, 1)

SMS = 132  # multiprocessors of an H100 and an H200
GEMM: dict[str, tuple[tuple[Config, float], ...]] = {
    "gemm": (
        (Config(64, 64, 64, 4, 128), 0.60),
        (Config(64, 96, 64, 5, 128), 0.65),
        (Config(128, 96, 64, 4, 256), 0.82),
        (Config(128, 128, 64, 4, 256), 0.88),
        (Config(128, 192, 64, 4, 256), 0.96),
        (Config(128, 256, 64, 3, 256), 1.00),
    ),
    "geglu": (
        (Config(64, 64, 64, 4, 128), 0.60),
        (Config(128, 64, 64, 4, 256), 0.78),
        (Config(128, 96, 64, 4, 256), 0.88),
        (Config(128, 144, 64, 3, 256), 0.94),
    ),
}
"""Tiles, and how fast a multiprocessor is at them, 1 for the fastest: estimates, which choose as measuring does.

A block has a multiprocessor to itself, so that a product takes as long as the one with the most tiles. Of the products
that `benchmarks/tilelang_kernels.py` measures, in rounds of 132 tiles, what is computed of what could be, and
microseconds on one H200, bfloat16, with bias and activation or residual:

    4096 x 3072   128 x 256: 2.9 of 3, 42.1    128 x 192: 3.9 of 4, 43.0    128 x 128: 5.8 of 6, 46.6
    4096 x 768    128 x 192: 0.97 of 1, 31.0   128 x 96: 1.9 of 2, 38.6
    256 x 3072    64 x 96: 0.97 of 1, 6.0      64 x 64: 1.5 of 2, 8.5
    4096 x 1152   128 x 144: 1.9 of 2, 27.0    128 x 96: 2.9 of 3, 29.1

The last is geglu's.
"""

SHARED: dict[str, tuple[tuple[Config, float], ...]] = {
    "gemm": (
        (Config(64, 64, 64, 4, 128, blocks=3), 0.85),
        (Config(64, 96, 64, 4, 128, blocks=2), 0.90),
        (Config(128, 96, 64, 3, 256, blocks=2), 1.05),
        (Config(64, 192, 64, 3, 128, blocks=2), 1.05),
    ),
    "geglu": (
        (Config(64, 64, 64, 4, 128, blocks=2), 0.85),
        (Config(64, 96, 64, 3, 128, blocks=2), 1.00),
        (Config(128, 48, 64, 3, 256, blocks=2), 0.95),
        (Config(128, 64, 64, 3, 256, blocks=2), 1.00),
    ),
}
"""Likewise, of blocks that share one, for `--tune` alone: where they were fastest it was by less than 4 in 100."""

LARGE = 2**40
ROWS: tuple[tuple[int, RowConfig], ...] = ((1024, RowConfig(4)), (LARGE, RowConfig(1, 128)))
"""By columns, at most."""

ROPE = RopeConfig(4, 128)

ATTN: dict[tuple[int, bool], AttnConfig] = {
    (64, False): AttnConfig(64, 128, 2, 128, blocks=2),
    (96, False): AttnConfig(128, 128, 2, 256),
    (128, False): AttnConfig(128, 128, 2, 256),
    (64, True): AttnConfig(64, 64, 2, 128, blocks=2),
    (96, True): AttnConfig(128, 64, 2, 256),
    (128, True): AttnConfig(128, 128, 2, 256),
}
"""By head dimension, and whether causality or a window hides keys.

Of 64 and 128 the fastest of `candidates` on an H200, or within 3 in 100 of it: 35.5 µs after 38.0 with 128 x 128, 14.0
after 20.6 with 128 x 64 in a window, 299 after 332 with 128 x 64 under causality. Those of 96 have not been measured.
"""

FEW_QUERIES = AttnConfig(64, 64, 2, 128, blocks=2)
"""For few queries, measured in whole decoding steps of Qwen3-0.6B's shape over 256 keys, 1 and 8 rows, on an H200.

A block that takes half of a multiprocessor leaves room for the next kernel's, which loads its weights meanwhile: of
8 rows a layer took 22 µs, 25 with a multiprocessor for each block, 26 with 128 keys a tile, 28 with flash-attn.
"""


@functools.lru_cache(4096)
def gemm_config(kernel: str, m: int | None, n: int, *, cpu: bool) -> Config:
    """The tiles of `gemm` or `geglu` for so many rows and columns of the output; None for many rows."""
    return CPU_GEMM if cpu else min(GEMM[kernel], key=lambda each: _time(each, m, n))[0]


def _time(tiles: tuple[Config, float], m: int | None, n: int) -> float:
    """Of the multiprocessor with the most tiles, in outputs."""
    config, speed = tiles
    count = -(-(m or 2**16) // config.bm) * -(-n // config.bn)
    return -(-count // SMS) * config.bm * config.bn / speed


def row_config(columns: int, *, cpu: bool) -> RowConfig:
    """How rows of so many columns are spread."""
    return CPU_ROWS if cpu else next(config for most, config in ROWS if columns <= most)


def rope_config(*, cpu: bool) -> RopeConfig:
    """How rows are rotated."""
    return CPU_ROPE if cpu else ROPE


def attn_config(dim: int, *, bounded: bool, few: bool = False, cpu: bool) -> AttnConfig:
    """The tiles of attention; a head dimension without a measurement takes the next larger one's, or the largest's."""
    if cpu:
        return CPU_ATTN
    if few:
        return FEW_QUERIES
    known = sorted(each for each, flag in ATTN if flag is bounded)
    return ATTN[next((each for each in known if each >= dim), known[-1]), bounded]


def candidates(kernel: str, m: int = 0, n: int = 0, most: int = 6) -> tuple[Tiles, ...]:
    """What `--tune` tries for a kernel; for a product of so many rows and columns those that should be fastest."""
    if kernel not in GEMM:
        return _CANDIDATES[kernel]
    ordered = sorted((*GEMM[kernel], *SHARED[kernel]), key=lambda each: _time(each, m, n))
    return tuple(config for config, _ in ordered[:most])


_CANDIDATES: dict[str, tuple[Tiles, ...]] = {
    "add_ln": (RowConfig(2), RowConfig(4), RowConfig(8), RowConfig(1, 128)),
    "rope": (RopeConfig(2, 128), RopeConfig(4, 128), RopeConfig(4, 256), RopeConfig(8, 256)),
    "attn": (
        AttnConfig(128, 64, 2, 256),
        AttnConfig(128, 128, 2, 256),
        AttnConfig(128, 176, 2, 256),
        AttnConfig(192, 80, 2, 384),
        AttnConfig(192, 128, 2, 384),
        AttnConfig(64, 64, 2, 128, blocks=2),
        AttnConfig(64, 128, 2, 128, blocks=2),
    ),
}
