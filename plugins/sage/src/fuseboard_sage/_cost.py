"""What a call costs, in microseconds, to be compared with the estimates of other plugins.

They follow benchmarks/results/grid.md (one H200, SageAttention 1.0.6): half of cuDNN's speed in a long prefill, 320 µs
of launches from Python, and a pass over the keys to quantise them anew for each query of a decode. So it follows the
kernels inside torch there.

Its authors report it ahead of flash attention on consumer cards (8.6, 8.9, 12.0). Nothing is measured here on those,
nor for SageAttention 2 and 3, and what is not measured is no reason to be first: name the backend to use it there.
"""

from __future__ import annotations

from fuseboard import Call, Sizes

__all__ = ["sage"]

_LAUNCHES = 320.0
_RATE = 330e6  # operations a microsecond
_READ = 0.47e6  # bytes of keys and values a microsecond, quantisation included
_PASS = 2.5e6  # bytes a microsecond where values and outputs are scaled, which the numbers above are without


def sage(call: Call, sizes: Sizes) -> float:
    """Launches, arithmetic, or passing over the keys, whichever is longest."""
    seen = 0.5 if call.causal or (call.structure is not None and call.structure.causal) else 1.0
    operations = 4.0 * sizes.batch * sizes.heads * sizes.q_length * sizes.k_length * sizes.head_dim
    keys = 2.0 * sizes.batch * sizes.kv_heads * sizes.k_length * sizes.head_dim * call.dtype.itemsize
    output = 1.0 * sizes.batch * sizes.heads * sizes.q_length * sizes.head_dim * call.dtype.itemsize
    return max(_LAUNCHES, seen * operations / _RATE, keys / _READ) + (1.5 * keys + 2 * output) / _PASS
