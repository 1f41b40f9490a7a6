"""What a call costs each kernel, in microseconds: a launch from Python, arithmetic, or reading memory, the longest.

For ordering kernels, not for predicting time: on another GPU all of them move together. Comparable with those of the
other plugins. FlashAttention 2's and 4's follow benchmarks/results/grid.md (one H200), FlashAttention 3's are guessed.
"""

from __future__ import annotations

import attrs

from fuseboard import Call, Sizes

__all__ = ["FLASH2", "FLASH3", "FLASH4", "Rates", "microseconds"]

WIDE = 96  # from this head dimension on the tensor cores are kept busy


@attrs.frozen
class Rates:
    """One kernel's rates.

    Attributes:
        inference: Host cost of a call without a gradient.
        training: Host cost of one with.
        wide: Operations a microsecond from head dimension 96 on.
        narrow: Operations a microsecond below it.
        read: Bytes of keys and values a microsecond in a decode step.
        window: What part of the arithmetic is left with a window.
        padding: Host cost of saying where real keys start and end.
    """

    inference: float
    training: float
    wide: float
    narrow: float
    read: float
    window: float = 0.3
    padding: float = 40.0


# A gradient goes through each package's own autograd function, about a millisecond of Python a step.
FLASH2 = Rates(inference=32.0, training=500.0, wide=350e6, narrow=275e6, read=2.5e6)
FLASH3 = Rates(inference=80.0, training=500.0, wide=560e6, narrow=400e6, read=2.8e6)
FLASH4 = Rates(inference=140.0, training=600.0, wide=630e6, narrow=490e6, read=1.9e6, window=0.6, padding=130.0)


def microseconds(rates: Rates, call: Call, sizes: Sizes, *, copies: float = 0.0) -> float:
    """Estimate a call. A structure skips what it hides.

    Args:
        rates: The kernel's.
        call: What kind of call.
        sizes: Its sizes.
        copies: How many times keys or values are copied before.
    """
    scores = float(sizes.batch * sizes.heads * sizes.q_length * sizes.k_length)
    causal = call.causal or (call.structure is not None and call.structure.causal)
    shown = 0.5 if causal and call.lengths == "equal" else 1.0
    if call.structure is not None:
        shown *= 0.6 if call.structure.keys != "none" else 1.0
        shown *= rates.window if call.structure.window else 1.0
    dims = sizes.head_dim + sizes.v_head_dim
    read = float(sizes.batch * sizes.kv_heads * sizes.k_length * dims * call.dtype.itemsize)
    launch = rates.training if call.grad or call.dropout else rates.inference
    rate = rates.wide if call.head_dim >= WIDE else rates.narrow
    launch += rates.padding if copies else 0.0
    moved = copies * read / 2e6
    return max(launch, moved + shown * 2 * scores * dims / rate, moved + shown * read / rates.read)
