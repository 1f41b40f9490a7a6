"""Tiles, threads and stages by kernel and size: a table that `benchmarks/tilelang_kernels.py --tune` measures.

On the CPU tiles are small, since a whole tile is computed however small the problem, and buffers lie on the stack.
"""

from __future__ import annotations

import attrs

__all__ = [
    "AttnConfig",
    "Config",
    "RopeConfig",
    "RowConfig",
    "attn_config",
    "candidates",
    "gemm_config",
    "rope_config",
    "row_config",
]


@attrs.frozen
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
    """

    bm: int
    bn: int
    bk: int
    stages: int
    threads: int
    policy: str = "FullRow"
    swizzle: int = 8


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
    """Queries and keys in a tile, blocks of keys loaded ahead, and threads that multiply."""

    bm: int
    bn: int
    stages: int
    threads: int


CPU_GEMM = Config(16, 16, 16, 0, 1, "Square", 0)
CPU_ROWS = RowConfig(4, 1)
CPU_ROPE = RopeConfig(4, 1)
CPU_ATTN = AttnConfig(16, 32, 0, 1)

SMALL, MIDDLE, LARGE = 2**20, 2**22, 2**40
GEMM: dict[str, tuple[tuple[int, Config], ...]] = {
    "gemm": (
        (SMALL, Config(64, 64, 64, 4, 128)),
        (MIDDLE, Config(128, 128, 64, 4, 256)),
        (LARGE, Config(128, 256, 64, 3, 256)),
    ),
    "geglu": (
        (SMALL, Config(64, 64, 64, 4, 128)),
        (LARGE, Config(128, 128, 64, 3, 256)),
    ),
}
"""By the number of outputs, at most: small problems need many small tiles to occupy the device."""

ROWS: tuple[tuple[int, RowConfig], ...] = ((1024, RowConfig(4)), (LARGE, RowConfig(1, 128)))
"""By columns, at most."""

ROPE = RopeConfig(4, 128)

ATTN: dict[tuple[int, bool], AttnConfig] = {
    (64, False): AttnConfig(128, 128, 2, 256),
    (96, False): AttnConfig(128, 128, 2, 256),
    (128, False): AttnConfig(128, 128, 2, 256),
    (64, True): AttnConfig(128, 64, 2, 256),
    (96, True): AttnConfig(128, 64, 2, 256),
    (128, True): AttnConfig(128, 64, 2, 256),
}
"""By head dimension, and whether causality or a window hides keys."""


def gemm_config(kernel: str, outputs: int | None, *, cpu: bool) -> Config:
    """The tiles of `gemm` or `geglu` for so many outputs; None for many."""
    if cpu:
        return CPU_GEMM
    return next(config for most, config in GEMM[kernel] if outputs is None or outputs <= most or most == LARGE)


def row_config(columns: int, *, cpu: bool) -> RowConfig:
    """How rows of so many columns are spread."""
    return CPU_ROWS if cpu else next(config for most, config in ROWS if columns <= most)


def rope_config(*, cpu: bool) -> RopeConfig:
    """How rows are rotated."""
    return CPU_ROPE if cpu else ROPE


def attn_config(dim: int, *, bounded: bool, cpu: bool) -> AttnConfig:
    """The tiles of attention; a head dimension without a measurement takes the next larger one's, or the largest's."""
    if cpu:
        return CPU_ATTN
    known = sorted(each for each, flag in ATTN if flag is bounded)
    return ATTN[next((each for each in known if each >= dim), known[-1]), bounded]


def candidates(kernel: str) -> tuple[Config | RowConfig | RopeConfig | AttnConfig, ...]:
    """What `--tune` tries for a kernel."""
    return _CANDIDATES[kernel]


_CANDIDATES: dict[str, tuple[Config | RowConfig | RopeConfig | AttnConfig, ...]] = {
    "gemm": (
        Config(64, 64, 64, 4, 128),
        Config(64, 128, 64, 4, 128),
        Config(128, 64, 64, 4, 128),
        Config(128, 128, 64, 3, 256),
        Config(128, 128, 64, 4, 256),
        Config(128, 128, 64, 4, 256, "Square"),
        Config(128, 128, 64, 4, 128),
        Config(128, 192, 64, 3, 256),
        Config(128, 256, 64, 3, 256),
        Config(128, 256, 64, 3, 256, swizzle=0),
        Config(128, 256, 64, 4, 256, swizzle=4),
        Config(256, 128, 64, 3, 256),
    ),
    "geglu": (
        Config(64, 64, 64, 4, 128),
        Config(64, 128, 64, 4, 128),
        Config(128, 64, 64, 4, 256),
        Config(128, 96, 64, 3, 256),
        Config(128, 128, 64, 3, 256),
        Config(128, 128, 64, 4, 256),
        Config(128, 128, 64, 3, 256, swizzle=0),
    ),
    "add_ln": (RowConfig(1), RowConfig(2), RowConfig(4), RowConfig(8), RowConfig(1, 64), RowConfig(1, 128)),
    "rope": (
        RopeConfig(1, 128),
        RopeConfig(2, 128),
        RopeConfig(4, 128),
        RopeConfig(4, 256),
        RopeConfig(8, 256),
    ),
    "attn": (
        AttnConfig(64, 64, 2, 128),
        AttnConfig(64, 128, 2, 128),
        AttnConfig(128, 64, 2, 256),
        AttnConfig(128, 64, 3, 256),
        AttnConfig(128, 96, 2, 256),
        AttnConfig(128, 128, 1, 256),
        AttnConfig(128, 128, 2, 256),
        AttnConfig(128, 160, 2, 256),
        AttnConfig(128, 176, 2, 256),
        AttnConfig(192, 80, 2, 384),
        AttnConfig(192, 128, 2, 384),
    ),
}
