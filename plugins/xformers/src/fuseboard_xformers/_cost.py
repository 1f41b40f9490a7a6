"""What a call costs, in microseconds, to be compared with the estimates of other plugins.

They follow benchmarks/results/grid.md (one H200, xFormers 0.0.35): FlashAttention 2 and CUTLASS behind a dispatch in
Python of 140 µs, and so after the same kernels elsewhere. Nothing is measured on other GPUs.
"""

from __future__ import annotations

from fuseboard import Call, Sizes

__all__ = ["cutlass", "flash"]


def flash(call: Call, sizes: Sizes) -> float:
    """FlashAttention 2. A structure skips what it hides; padded keys are laid out token by token before."""
    hidden, copies = 1.0, 0.0
    structure = call.structure
    if structure is not None:
        hidden *= 0.5 if structure.causal and call.lengths == "equal" else 1.0
        hidden *= 0.6 if structure.keys != "none" else 1.0
        hidden *= 0.3 if structure.window else 1.0
        copies = 2 * _keys_read(call, sizes) / 2e6 if structure.keys != "none" else 0.0
    if call.grad and sizes.heads != sizes.kv_heads:
        copies += _repeats(call, sizes)
    launch = (140.0 if structure is None or structure.keys == "none" else 320.0) + (500.0 if call.grad else 0.0)
    return copies + max(launch, hidden * _operations(call, sizes) / 300e6, _keys_read(call, sizes) / 2.4e6)


def cutlass(call: Call, sizes: Sizes) -> float:
    """CUTLASS: dense masks, float32, wide heads. Shared key heads are written out for it."""
    shared = sizes.heads // max(sizes.kv_heads, 1)
    copies = 0.0 if shared == 1 else _repeats(call, sizes)
    rate = 27e6 if call.dtype.itemsize == 4 else 130e6  # noqa: PLR2004
    read = shared * _keys_read(call, sizes) * 340.0 / 537e6
    return copies + max(150.0 + (500.0 if call.grad else 0.0), _operations(call, sizes) / rate, read)


def _operations(call: Call, sizes: Sizes) -> float:
    causal = 0.5 if call.causal else 1.0
    return (
        2.0 * sizes.batch * sizes.heads * sizes.q_length * sizes.k_length * (sizes.head_dim + sizes.v_head_dim) * causal
    )


def _keys_read(call: Call, sizes: Sizes) -> float:
    """Bytes of keys and values."""
    return float(
        sizes.batch * sizes.kv_heads * sizes.k_length * (sizes.head_dim + sizes.v_head_dim) * call.dtype.itemsize
    )


def _repeats(call: Call, sizes: Sizes) -> float:
    return 2 * sizes.heads / max(sizes.kv_heads, 1) * _keys_read(call, sizes) / 2e6
