"""The Triton kernels of `exact`. Importing this imports Triton.

They do what torch's elementwise kernels do one after the other: each operation in fp32, brought down to the low dtype
where torch would store it. They are compiled without contraction of a product and a sum into one rounding.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, misc"
# ruff: noqa: ANN001, ANN201, D103, N803

from __future__ import annotations

import importlib
from typing import Any

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")
libdevice: Any = importlib.import_module("triton.language.extra.libdevice")

__all__ = ["gated", "placed", "rooted", "rotated", "scaled", "squares"]


@triton.jit
def squares(x, delta, total, out, count, ADD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < count
    v = tl.load(x + at, mask=real, other=0.0)
    if ADD:
        more = tl.load(delta + at, mask=real, other=0.0)
        v = (v.to(tl.float32) + more.to(tl.float32)).to(v.dtype)
        tl.store(total + at, v, mask=real)
    wide = v.to(tl.float32)
    tl.store(out + at, wide * wide, mask=real)


@triton.jit
def scaled(x, mean, weight, out, size, eps, WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    v = tl.load(x + row * size + at, mask=real, other=0.0)
    scale = tl.math.rsqrt(tl.load(mean + row) + eps)
    v = (v.to(tl.float32) * scale).to(v.dtype)
    if WEIGHT:
        w = tl.load(weight + at, mask=real, other=0.0)
        v = (w.to(tl.float32) * v.to(tl.float32)).to(v.dtype)
    tl.store(out + row * size + at, v, mask=real)


@triton.jit
def rooted(mean, out, count, eps, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < count
    tl.store(out + at, tl.math.rsqrt(tl.load(mean + at, mask=real, other=1.0) + eps), mask=real)


@triton.jit
def rotated(
    q, k, v, q_weight, k_weight, cos, sin, q_out, k_out, v_out, q_by_row, k_by_row, v_by_row, angles_by_row,
    q_out_by_row, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    real = at < DIM
    if head >= HEADS + KV_HEADS:
        own = head - HEADS - KV_HEADS
        moved = tl.load(v + row * v_by_row + own * DIM + at, mask=real, other=0.0)
        tl.store(v_out + (row * KV_HEADS + own) * DIM + at, moved, mask=real)
    else:
        half = (at + DIM // 2) % DIM
        if head < HEADS:
            source = q + row * q_by_row + head * DIM
            target = q_out + row * q_out_by_row + head * DIM
            scales = q_weight
        else:
            source = k + row * k_by_row + (head - HEADS) * DIM
            target = k_out + (row * KV_HEADS + head - HEADS) * DIM
            scales = k_weight
        x = tl.load(source + at, mask=real, other=0.0)
        y = tl.load(source + half, mask=real, other=0.0)
        if WEIGHT:
            w = tl.load(scales + at, mask=real, other=0.0)
            z = tl.load(scales + half, mask=real, other=0.0)
            x = (w.to(tl.float32) * x.to(tl.float32)).to(x.dtype)
            y = (z.to(tl.float32) * y.to(tl.float32)).to(y.dtype)
        c = tl.load(cos + row * angles_by_row + at, mask=real, other=0.0)
        s = tl.load(sin + row * angles_by_row + at, mask=real, other=0.0)
        straight = (x.to(tl.float32) * c.to(tl.float32)).to(x.dtype)
        across = (y.to(tl.float32) * s.to(tl.float32)).to(x.dtype)
        tl.store(target + at, (straight.to(tl.float32) + across.to(tl.float32)).to(x.dtype), mask=real)


@triton.jit
def gated(gate, up, table, out, size, gate_by_row, up_by_row, TABLE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    x = tl.load(gate + row * gate_by_row + at, mask=real, other=0.0)
    y = tl.load(up + row * up_by_row + at, mask=real, other=0.0)
    if TABLE:
        bent = tl.load(table + x.to(tl.uint16, bitcast=True).to(tl.int32), mask=real, other=0.0)
    else:
        wide = x.to(tl.float32)
        # torch's own exponential and its division: Triton's usual ones are quicker, and rounded otherwise.
        bent = tl.div_rn(wide, 1.0 + libdevice.exp(-wide)).to(x.dtype)
    tl.store(out + row * size + at, (bent.to(tl.float32) * y.to(tl.float32)).to(x.dtype), mask=real)


@triton.jit
def placed(
    k, v, slots, keys, values, k_by_row, k_by_head, v_by_row, v_by_head, by_row, by_head, by_slot,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)  # a row's cache may have more than 2**31 numbers
    at = tl.arange(0, BLOCK)
    real = at < DIM
    slot = tl.load(slots + row)
    if head < KV_HEADS:
        moved = tl.load(k + row * k_by_row + head * k_by_head + at, mask=real, other=0.0)
        tl.store(keys + row * by_row + head * by_head + slot * by_slot + at, moved, mask=real)
    else:
        own = head - KV_HEADS
        moved = tl.load(v + row * v_by_row + own * v_by_head + at, mask=real, other=0.0)
        tl.store(values + row * by_row + own * by_head + slot * by_slot + at, moved, mask=real)
