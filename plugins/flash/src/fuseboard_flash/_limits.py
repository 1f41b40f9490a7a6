"""Limits on exact sizes that the kernels share."""

from __future__ import annotations

from fuseboard import Call, Guard, Sizes

__all__ = ["ACCUMULATOR"]


def _backward_fits(call: Call, sizes: Sizes) -> bool:
    # Offsets into the padded accumulator of dQ are 32 bits wide; beyond, it writes out of bounds. The forward is fine.
    dim = max(sizes.head_dim, sizes.v_head_dim, 32)
    return not call.grad or sizes.batch * sizes.heads * (-(-sizes.q_length // 128) * 128) * dim <= 2**31


ACCUMULATOR = Guard("backward size", _backward_fits, "2**31 accumulator elements", None, "split the batch")
