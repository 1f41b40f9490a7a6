"""The Triton kernels of `glue`. Importing this imports Triton.

They round where torch's kernels round: a sum or a product of two low numbers is made in fp32 and brought down at once,
so that what is left to differ is the order in which a norm's squares are added, and the exponential's last bit.

With `EARLY` a kernel begins while the one before it in the stream still runs: what it reads until `gdc_wait` is weights
alone, and nothing that others wrote is read, and nothing written, before that one has ended (CUDA's programmatic
dependent launch, https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization).
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, misc"
# ruff: noqa: ANN001, ANN201, D103, N803

from __future__ import annotations

import importlib
from typing import Any

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")
cuda: Any = importlib.import_module("triton.language.extra.cuda")

__all__ = ["LAUNCHES_EARLY", "add_norm", "product", "put_heads", "silu_mul"]

LAUNCHES_EARLY = hasattr(cuda, "gdc_wait")
"""Whether this Triton knows of it."""


@triton.jit
def add_norm(
    hidden, delta, weight, total, out, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < size
    w = tl.load(weight + at, mask=real, other=0.0)
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    x = tl.load(hidden + row * size + at, mask=real, other=0.0)
    if ADD:
        more = tl.load(delta + row * size + at, mask=real, other=0.0)
        x = (x.to(tl.float32) + more.to(tl.float32)).to(x.dtype)
        tl.store(total + row * size + at, x, mask=real)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / size + eps)
    normal = (wide * scale).to(x.dtype)
    tl.store(out + row * size + at, (normal.to(tl.float32) * w.to(tl.float32)).to(x.dtype), mask=real)


@triton.jit
def put_heads(
    qkv, q_weight, k_weight, cos, sin, positions, q_out, keys, values, eps, slots, by_row, by_head, by_slot,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    real = at < DIM
    position = tl.load(positions + row)
    slot = position % slots
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    x = tl.load(source + at, mask=real, other=0.0)
    if head >= HEADS + KV_HEADS:
        tl.store(values + row * by_row + (head - HEADS - KV_HEADS) * by_head + slot * by_slot + at, x, mask=real)
    else:
        half = (at + DIM // 2) % DIM
        y = tl.load(source + half, mask=real, other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / DIM + eps)
            if head < HEADS:
                w = tl.load(q_weight + at, mask=real, other=0.0)
                w_half = tl.load(q_weight + half, mask=real, other=0.0)
            else:
                w = tl.load(k_weight + at, mask=real, other=0.0)
                w_half = tl.load(k_weight + half, mask=real, other=0.0)
            x = (wide * scale).to(w.dtype)
            y = (y.to(tl.float32) * scale).to(w.dtype)
            x = (x.to(tl.float32) * w.to(tl.float32)).to(w.dtype)
            y = (y.to(tl.float32) * w_half.to(tl.float32)).to(w.dtype)
        c = tl.load(cos + position * DIM + at, mask=real, other=0.0)
        s = tl.load(sin + position * DIM + at, mask=real, other=0.0)
        straight = (x.to(tl.float32) * c.to(tl.float32)).to(c.dtype)
        across = (y.to(tl.float32) * s.to(tl.float32)).to(c.dtype)
        turned = (straight.to(tl.float32) + across.to(tl.float32)).to(c.dtype)
        if head < HEADS:
            tl.store(q_out + (row * HEADS + head) * DIM + at, turned, mask=real)
        else:
            tl.store(keys + row * by_row + (head - HEADS) * by_head + slot * by_slot + at, turned, mask=real)


@triton.jit
def silu_mul(gate_up, out, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=real, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=real, other=0.0)
    wide = gate.to(tl.float32)
    bent = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * size + at, (bent.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=real)


@triton.jit
def product(
    x, norm, weight, bias, add, out, wide, tall, eps, ROWS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    EARLY: tl.constexpr,
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
        scales = tl.load(norm + k, mask=real, other=0.0)
    if EARLY:  # by now the weights are on their way
        cuda.gdc_wait()
    for row in tl.static_range(ROWS):
        v = tl.load(x + row * wide + k, mask=real, other=0.0)
        if NORM:
            long = v.to(tl.float32)
            scale = 1.0 / tl.sqrt(tl.sum(long * long, axis=0) / wide + eps)
            v = (long * scale).to(v.dtype)
            v = (v.to(tl.float32) * scales.to(tl.float32)).to(v.dtype)
        long = v.to(tl.float32)
        y = tl.sum(tile.to(tl.float32) * long[None, :], axis=1)
        if BIAS:
            y += tl.load(bias + n, mask=kept, other=0.0).to(tl.float32)
        y = y.to(v.dtype)
        if GATED:
            up = tl.sum(upper.to(tl.float32) * long[None, :], axis=1).to(v.dtype)
            gate = y.to(tl.float32)
            bent = (gate / (1.0 + tl.exp(-gate))).to(v.dtype)
            y = (bent.to(tl.float32) * up.to(tl.float32)).to(v.dtype)
        if ADD:
            more = tl.load(add + row * tall + n, mask=kept, other=0.0)
            y = (more.to(tl.float32) + y.to(tl.float32)).to(v.dtype)
        tl.store(out + row * tall + n, y, mask=kept)
