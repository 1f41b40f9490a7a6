"""The Triton kernels of `products`. Importing this imports Triton.

They round where torch's kernels round, and sum in fp32. For `EARLY` see `glue_triton`: until `gdc_wait` nothing is read
but weights, and nothing is written.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, misc"
# ruff: noqa: ANN001, ANN201, C901, D103, N803, N806, PLR0912, PLR0915, PLR2004 - what is chosen is chosen as it compiles

from __future__ import annotations

from fuseboard.engine.decoder.kernels.glue_triton import LAUNCHES_EARLY, added, cuda, gated, scaled, tl, triton

__all__ = ["LAUNCHES_EARLY", "MULTIPLIES_EIGHT", "one_by_one", "tiled"]

MULTIPLIES_EIGHT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
"""Whether `tl.dot` takes 8 rows; older Tritons take 16 at least."""


@triton.jit
def one_by_one(
    x, norm, weight, bias, add, out, wide, tall, eps, ROWS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        cuda.gdc_launch_dependents()
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
    if EARLY:  # by now the weights are on their way
        cuda.gdc_wait()
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
    CHUNKS: tl.constexpr, HELD: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        cuda.gdc_launch_dependents()
    # (warp, row or column, what is added up): a dot of three axes gives each warp a share of the sum, where one of two
    # would give all warps the same few rows and columns.
    SPAN: tl.constexpr = WARPS * DEEP
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.arange(0, PADDED)
    share = tl.arange(0, WARPS)[:, None, None] * DEEP
    down, k = share + tl.arange(0, DEEP)[None, :, None], share + tl.arange(0, DEEP)[None, None, :]
    kept, real = (n < tall)[None, None, :], (m < rows)[None, :, None]
    lower = weight + n.to(tl.int64)[None, None, :] * wide + down
    upper = lower + tl.cast(tall, tl.int64) * wide
    mine = x + m[None, :, None] * wide + k
    # What is loaded here is on its way while the kernel before still runs.
    first = tl.load(lower, mask=kept & (down < wide), other=0.0)
    if GATED:
        first_up = tl.load(upper, mask=kept & (down < wide), other=0.0)
    if HELD > 1:
        second = tl.load(lower + SPAN, mask=kept & (down + SPAN < wide), other=0.0)
    if HELD > 2:
        third = tl.load(lower + 2 * SPAN, mask=kept & (down + 2 * SPAN < wide), other=0.0)
    if NORM and CHUNKS == 1:
        weights = tl.load(norm + k, mask=k < wide, other=0.0)
    if EARLY:
        cuda.gdc_wait()
    if NORM:
        squares = tl.zeros((PADDED,), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            at = chunk * SPAN
            long = tl.load(mine + at, mask=real & (k + at < wide), other=0.0).to(tl.float32)
            squares += tl.sum(tl.sum(long * long, axis=2), axis=0)
        scale = (1.0 / tl.sqrt(squares / wide + eps))[None, :, None]
    y = tl.zeros((WARPS, PADDED, BLOCK), tl.float32)
    up = y
    for chunk in tl.static_range(CHUNKS):
        at = chunk * SPAN
        v = tl.load(mine + at, mask=real & (k + at < wide), other=0.0)
        if NORM:
            if CHUNKS > 1:
                weights = tl.load(norm + k + at, mask=k + at < wide, other=0.0)
            v = scaled(v, scale, weights)
        if chunk == 0:
            w = first
        elif chunk == 1 and HELD > 1:
            w = second
        elif chunk == 2 and HELD > 2:
            w = third
        else:
            w = tl.load(lower + at, mask=kept & (down + at < wide), other=0.0)
        y = tl.dot(v, w, y)
        if GATED:
            if chunk > 0:
                first_up = tl.load(upper + at, mask=kept & (down + at < wide), other=0.0)
            up = tl.dot(v, first_up, up)
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
