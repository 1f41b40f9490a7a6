"""What a call costs, in microseconds, to be compared with the estimates of other plugins.

From `benchmarks/tilelang_kernels.py` on one H200: ahead of the kernels inside torch where a window or lengths let it
skip blocks of keys, a little behind cuDNN on whole ones.
"""

from __future__ import annotations

from fuseboard import Call, Sizes
from fuseboard_tilelang._configs import SMS

__all__ = ["tilelang"]

WIDE = 96  # from this head dimension on the tensor cores are kept busy
TILE = 128  # queries
A_KEY, A_NARROW_KEY = 0.018, 0.012  # microseconds of a block, which has all keys of its queries to itself


def tilelang(call: Call, sizes: Sizes) -> float:
    """Launch, arithmetic, reading memory, or one block's way along the keys, whichever is longest."""
    shown = 1.0
    structure = call.structure
    if structure is not None:
        shown *= 0.75 if structure.keys != "none" else 1.0
        shown *= 0.3 if structure.window else 1.0
    wide = call.head_dim >= WIDE
    # Of more blocks than there is room for, arithmetic or reading takes longer.
    alone = sizes.batch * sizes.heads * -(-sizes.q_length // TILE) <= SMS
    way = shown * (A_KEY if wide else A_NARROW_KEY) * sizes.k_length if alone else 0.0
    causal = call.causal or (structure is not None and structure.causal)
    shown *= 0.55 if causal and call.lengths == "equal" else 1.0
    queries = -(-sizes.q_length // TILE) * TILE  # a tile is computed as a whole, for a decode step too
    operations = 4.0 * sizes.batch * sizes.heads * queries * sizes.k_length * sizes.head_dim
    rate = 530e6 if wide else 360e6
    read = 2.0 * sizes.batch * sizes.heads * sizes.k_length * sizes.head_dim * call.dtype.itemsize
    launch = 33.0 if structure is not None and structure.keys != "none" else 30.0
    return max(launch, way, shown * operations / rate, shown * read / 2.5e6)
