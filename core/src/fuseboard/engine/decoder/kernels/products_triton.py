"""The Triton kernels of `products`. Importing this imports Triton.

They round where torch's kernels round, and sum in fp32. For `EARLY` see `glue_triton`: until it waits nothing is read
but weights, and nothing is written.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, misc"
# ruff: noqa: ANN001, ANN201, C901, D103, N803, N806, PLR2004 - what is chosen is chosen as it compiles

from __future__ import annotations

from fuseboard.engine.decoder.kernels.glue_triton import (
    LAUNCHES_EARLY,
    added,
    gated,
    let_next_begin,
    scaled,
    tl,
    triton,
    wait_for_last,
)

__all__ = ["LAUNCHES_EARLY", "MULTIPLIES_EIGHT", "one_by_one", "tiled"]

MULTIPLIES_EIGHT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
"""Whether `tl.dot` takes 8 rows; older Tritons take 16 at least."""


@triton.jit
def one_by_one(
    x, norm, weight, bias, add, out, wide, tall, eps, ROWS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    # All of a few output columns' weights at once, so that enough loads are under way to keep memory busy.
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, WIDE)
    real, kept = k < wide, n < tall
    inside = kept[:, None] & real[None, :]
    place = n.to(tl.int64)[:, None] * wide + k[None, :]
    tile = tl.load(weight + place, mask=inside, other=0.0)
    if GATED:
        upper = tl.load(weight + tl.cast(tall, tl.int64) * wide + place, mask=inside, other=0.0)
    if NORM:
        weights = tl.load(norm + k, mask=real, other=0.0)
    wait_for_last(EARLY)  # by now the weights are on their way
    for row in tl.static_range(ROWS):
        v = tl.load(x + row * wide + k, mask=real, other=0.0)
        if NORM:
            long = v.to(tl.float32)
            v = scaled(v, 1.0 / tl.sqrt(tl.sum(long * long, axis=0) / wide + eps), weights)
        long = v.to(tl.float32)
        y = tl.sum(tile.to(tl.float32) * long[None, :], axis=1)
        if BIAS:
            y += tl.load(bias + n, mask=kept, other=0.0).to(tl.float32)
        y = y.to(v.dtype)
        if GATED:
            y = gated(y, tl.sum(upper.to(tl.float32) * long[None, :], axis=1).to(v.dtype))
        if ADD:
            y = added(tl.load(add + row * tall + n, mask=kept, other=0.0), y)
        tl.store(out + row * tall + n, y, mask=kept)


@triton.jit
def tiled(
    x, norm, weight, bias, add, out, wide, tall, eps, rows, NORM: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr, DEEP: tl.constexpr,
    CHUNKS: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    # (warp, row or column, what is added up): a dot of three axes gives each warp a share of the sum, where one of two
    # would give all warps the same few rows and columns.
    SPAN: tl.constexpr = WARPS * DEEP
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.arange(0, PADDED)
    share = tl.arange(0, WARPS)[:, None, None] * DEEP
    down, k = share + tl.arange(0, DEEP)[None, :, None], share + tl.arange(0, DEEP)[None, None, :]
    kept, real = (n < tall)[None, None, :], (m < rows)[None, :, None]
    lower = weight + n.to(tl.int64)[None, None, :] * wide + down
    mine = x + m[None, :, None] * wide + k
    # All weights are on their way, or there, while the kernel before still runs.
    first = tl.load(lower, mask=kept & (down < wide), other=0.0)
    if CHUNKS > 1:
        second = tl.load(lower + SPAN, mask=kept & (down + SPAN < wide), other=0.0)
    if CHUNKS > 2:
        third = tl.load(lower + 2 * SPAN, mask=kept & (down + 2 * SPAN < wide), other=0.0)
    if GATED:
        upper = tl.load(lower + tl.cast(tall, tl.int64) * wide, mask=kept & (down < wide), other=0.0)
    if NORM:
        weights = tl.load(norm + k, mask=k < wide, other=0.0)
    wait_for_last(EARLY)
    v = tl.load(mine, mask=real & (k < wide), other=0.0)
    if NORM:
        long = v.to(tl.float32)
        squares = tl.sum(tl.sum(long * long, axis=2), axis=0)
        v = scaled(v, (1.0 / tl.sqrt(squares / wide + eps))[None, :, None], weights)
    y = tl.dot(v, first)
    if GATED:
        up = tl.dot(v, upper)
    if CHUNKS > 1:
        y = tl.dot(tl.load(mine + SPAN, mask=real & (k + SPAN < wide), other=0.0), second, y)
    if CHUNKS > 2:
        y = tl.dot(tl.load(mine + 2 * SPAN, mask=real & (k + 2 * SPAN < wide), other=0.0), third, y)
    y = tl.sum(y, axis=0)
    if BIAS:
        y += tl.load(bias + n, mask=n < tall, other=0.0).to(tl.float32)[None, :]
    low = y.to(out.dtype.element_ty)
    if GATED:
        low = gated(low, tl.sum(up, axis=0).to(low.dtype))
    place = m[:, None] * tall + n[None, :]
    inside = (m < rows)[:, None] & (n < tall)[None, :]
    if ADD:
        low = added(tl.load(add + place, mask=inside, other=0.0), low)
    tl.store(out + place, low, mask=inside)
