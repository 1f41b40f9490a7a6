"""What a call costs, in microseconds, to be compared with the estimates of other plugins.

Measured on one H200, xFormers 0.0.35, bfloat16, `(batch, heads, queries, keys, head_dim)`, flash and CUTLASS: 1490 and
2610 at 2, 24, 4096, 4096, 128; 310 and 190 at 1, 16, 1024, 1024, 64; 430 and 340 at 8, 32, 1, 4096, 128. They are
torch's own kernels behind a dispatch in Python, and so come after them. Nothing is measured on other GPUs.
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
    return copies + max(300.0, hidden * _operations(call, sizes) / 277e6, 430.0 / 537e6 * _keys_read(call, sizes))


def cutlass(call: Call, sizes: Sizes) -> float:
    """CUTLASS: dense masks, float32, wide heads. Shared key heads are written out for it."""
    shared = sizes.heads // max(sizes.kv_heads, 1)
    copies = 0.0 if shared == 1 else _repeats(call, sizes)
    rate = 27e6 if call.dtype.itemsize == 4 else 130e6  # noqa: PLR2004
    read = shared * _keys_read(call, sizes) * 340.0 / 537e6
    return copies + max(190.0, _operations(call, sizes) / rate, read)


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
