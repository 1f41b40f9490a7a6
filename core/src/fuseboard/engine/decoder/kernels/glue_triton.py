"""The Triton kernels of `glue`. Importing this imports Triton.

They round where torch's kernels round: a sum or a product of two low numbers is made in fp32 and brought down at once,
so that what is left to differ is the order in which a norm's squares are added, and the exponential's last bit.

With `EARLY` a kernel begins while the one before it in the stream still runs (CUDA's programmatic dependent launch,
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization). What it reads
until it waits are weights, and positions with their cosines and sines, which are written between steps alone, where
ordinary kernels stand; nothing else is read, and nothing written, before the kernel before has ended.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, misc"
# ruff: noqa: ANN001, ANN201, D103, N803

from __future__ import annotations

import importlib
from typing import Any

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")
cuda: Any = importlib.import_module("triton.language.extra.cuda")

__all__ = [
    "LAUNCHES_EARLY",
    "add_norm",
    "added",
    "embed",
    "gated",
    "lengths",
    "let_next_begin",
    "put_heads",
    "scaled",
    "silu_mul",
    "wait_for_last",
]

LAUNCHES_EARLY = hasattr(cuda, "gdc_wait")
"""Whether this Triton knows of it."""

if LAUNCHES_EARLY:

    @triton.jit
    def let_next_begin(EARLY: tl.constexpr):
        if EARLY:
            cuda.gdc_launch_dependents()

    @triton.jit
    def wait_for_last(EARLY: tl.constexpr):
        if EARLY:
            cuda.gdc_wait()

else:  # where it does not, a kernel that mentions it does not compile

    @triton.jit
    def let_next_begin(EARLY: tl.constexpr):
        pass

    @triton.jit
    def wait_for_last(EARLY: tl.constexpr):
        pass


@triton.jit
def added(x, more):
    return (x.to(tl.float32) + more.to(tl.float32)).to(x.dtype)


@triton.jit
def scaled(x, scale, weight):
    normal = (x.to(tl.float32) * scale).to(x.dtype)
    return (normal.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def gated(gate, up):
    wide = gate.to(tl.float32)
    bent = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (bent.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def embed(ids, weight, out, size, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    number = tl.load(ids + row).to(tl.int64)
    known = (number >= 0) & (number < vocabulary)
    x = tl.load(weight + number * size + at, mask=real & known, other=float("nan"))
    tl.store(out + row * size + at, x, mask=real)


@triton.jit
def lengths(positions, counts, keys, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.minimum(tl.load(positions + row) + 1, size).to(tl.int32)
    if tl.program_id(1) == 0:
        tl.store(counts + row, count)
    tl.store(keys + row * size + slot, (slot < count).to(tl.uint8), mask=slot < size)


@triton.jit
def add_norm(
    hidden, delta, weight, total, out, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < size
    w = tl.load(weight + at, mask=real, other=0.0)
    let_next_begin(EARLY)
    wait_for_last(EARLY)
    x = tl.load(hidden + row * size + at, mask=real, other=0.0)
    if ADD:
        more = tl.load(delta + row * size + at, mask=real, other=0.0)
        x = added(x, more)
        tl.store(total + row * size + at, x, mask=real)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / size + eps)
    tl.store(out + row * size + at, scaled(x, scale, w), mask=real)


@triton.jit
def put_heads(
    qkv, q_weight, k_weight, cos, sin, positions, q_out, keys, values, eps, slots, by_row, by_head, by_slot,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)  # a row's cache may have more than 2**31 numbers
    at = tl.arange(0, BLOCK)
    real = at < DIM
    half = (at + DIM // 2) % DIM
    position = tl.load(positions + row)
    slot = position % slots
    c = tl.load(cos + position * DIM + at, mask=real, other=0.0)
    s = tl.load(sin + position * DIM + at, mask=real, other=0.0)
    if NORM:
        weight = q_weight if head < HEADS else k_weight
        w = tl.load(weight + at, mask=real, other=0.0)
        w_half = tl.load(weight + half, mask=real, other=0.0)
    wait_for_last(EARLY)
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    x = tl.load(source + at, mask=real, other=0.0)
    if head >= HEADS + KV_HEADS:
        tl.store(values + row * by_row + (head - HEADS - KV_HEADS) * by_head + slot * by_slot + at, x, mask=real)
    else:
        y = tl.load(source + half, mask=real, other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / DIM + eps)
            x, y = scaled(x, scale, w), scaled(y, scale, w_half)
        straight = (x.to(tl.float32) * c.to(tl.float32)).to(c.dtype)
        across = (y.to(tl.float32) * s.to(tl.float32)).to(c.dtype)
        turned = added(straight, across)
        if head < HEADS:
            tl.store(q_out + (row * HEADS + head) * DIM + at, turned, mask=real)
        else:
            tl.store(keys + row * by_row + (head - HEADS) * by_head + slot * by_slot + at, turned, mask=real)


@triton.jit
def silu_mul(gate_up, out, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    let_next_begin(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=real, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=real, other=0.0)
    tl.store(out + row * size + at, gated(gate, up), mask=real)
