"""Limits on sizes that the generations share."""

from __future__ import annotations

from fuseboard import Call, Guard, Sizes

__all__ = ["OFFSETS"]


def _largest_offset(sizes: Sizes) -> int:
    # k and v are written anew, so that theirs are their sizes; q is read as it lies, and quantised into a dense one.
    rows = (sizes.batch, sizes.heads, sizes.q_length, sizes.head_dim)
    as_given = sum((size - 1) * stride for size, stride in zip(rows, sizes.strides[0], strict=True))
    dense = sizes.head_dim * max(
        sizes.batch * sizes.heads * sizes.q_length, sizes.batch * sizes.kv_heads * sizes.k_length
    )
    return max(as_given, dense)


def _offsets_fit(_call: Call, sizes: Sizes) -> bool:
    return _largest_offset(sizes) < 2**31


OFFSETS = Guard("offsets", _offsets_fit, "below 2**31 elements", _largest_offset, "split the batch")
"""The quantiser multiplies block numbers and strides in 32 bits; beyond, it reads and writes out of bounds."""
