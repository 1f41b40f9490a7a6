"""What a call costs each kernel, in microseconds: a launch, arithmetic, or reading memory, whichever is longest.

The rates are fits to one H200 (benchmarks/results/grid.md). They are for ordering kernels, not for predicting
time: on another GPU all of them move together, but for cuDNN, which is ahead of flash attention only from Hopper on.
"""

from __future__ import annotations

import torch

from fuseboard import Call, Sizes

__all__ = ["cpu", "cudnn", "efficient", "flash", "math"]

HOPPER = (9, 0)
WIDE = 96  # from this head dimension on the tensor cores are kept busy


def flash(call: Call, sizes: Sizes) -> float:
    """FlashAttention 2. A structure skips what it hides: half where causal or padded, most with a window."""
    hidden = 1.0
    structure = call.structure
    if structure is not None:
        hidden *= 0.5 if structure.causal and call.lengths == "equal" else 1.0
        hidden *= 0.6 if structure.keys != "none" else 1.0
        hidden *= 0.3 if structure.window else 1.0
    rate = 330e6 if call.head_dim >= WIDE else 270e6  # operations a microsecond
    launch = 80.0 if structure is not None and structure.keys != "none" else 28.0  # offsets are made of the keys first
    return max(launch, hidden * _operations(call, sizes) / rate, hidden * _keys_read(call, sizes) / 2.5e6)


def efficient(call: Call, sizes: Sizes, *, dense: bool) -> float:
    """CUTLASS. Cheap to launch; shared key heads are written out for it."""
    shared = sizes.heads // max(sizes.kv_heads, 1)
    rate = (29e6 if call.dtype == torch.float32 else 150e6 if call.head_dim >= WIDE else 100e6) * (
        0.8 if dense else 1.0
    )
    copies = 0.0 if shared == 1 else 2 * shared * _keys_read(call, sizes) / 2e6
    hidden = 0.6 if not dense and call.structure is not None and call.structure.causal else 1.0
    read = shared * _keys_read(call, sizes) / 2.5e6
    launch = 95.0 if dense and call.structure is not None else 24.0  # the mask is made of the structure before
    return max(launch + copies, copies + hidden * _operations(call, sizes) / rate, copies + read)


def cudnn(call: Call, sizes: Sizes, *, dense: bool) -> float:
    """The cuDNN kernel. It does not split keys: a decode step has batch times key heads to spread over the device."""
    rate = (250e6 if dense else 640e6 if call.head_dim >= WIDE else 430e6) * (1.0 if _is_hopper(call) else 0.5)
    rate *= 1.0 if call.head_dim % 64 == 0 else 0.75  # its tiles are whole
    spread = min(1.0, max(sizes.batch * sizes.kv_heads, 1) / 64) if call.one_query else 1.0
    launch = 30.0 if not dense else 80.0 if call.structure is None else 130.0  # the mask is laid out before
    return max(launch, _operations(call, sizes) / rate, _keys_read(call, sizes) / (4.3e6 * spread))


def math(call: Call, sizes: Sizes) -> float:
    """Matrix products and a softmax over scores that go through memory several times."""
    if call.device_type == "cpu":
        return 20.0 + 2.5 * cpu(call, sizes, told=False)
    scores = sizes.batch * sizes.heads * sizes.q_length * sizes.k_length
    read = sizes.heads // max(sizes.kv_heads, 1) * _keys_read(call, sizes)  # shared key heads are written out for it
    return 150.0 + 40 * scores / 4e6 + 3 * read / 1e6


def cpu(call: Call, sizes: Sizes, *, told: bool) -> float:
    """Flash attention on two CPU cores. Where it is told of causality, half of the scores are never computed."""
    return 12.0 + _operations(call, sizes) * (0.6 if told and not call.causal else 1.0) / 8e4


def _is_hopper(call: Call) -> bool:
    return call.capability is not None and call.capability >= HOPPER


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
