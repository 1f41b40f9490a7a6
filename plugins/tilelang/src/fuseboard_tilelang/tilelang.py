"""`tilelang`: attention in TileLang, bounded by key lengths, causality and windows. Inference only.

Bounds are numbers of a call, not of a kernel: causality at the bottom right and at the top left, and every window, are
one kernel, and so are all lengths, batches and heads. What is compiled anew, for seconds, is a head dimension, a dtype,
having bounds, having key lengths, and having few queries and no bounds.

On the CPU it is the portable form of the same source, which no policy but its own name picks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fuseboard import (
    BackendInfo,
    Call,
    Constraints,
    DeclinedError,
    Exactness,
    Guard,
    HeadDims,
    KnownBad,
    MaskInfo,
    Sizes,
    StructureRule,
    hookimpl,
)
from fuseboard.tensors import ALIGNMENT, GRID, scale_of
from fuseboard_tilelang import _cost, _package, attn
from fuseboard_tilelang import compile as compiling

if TYPE_CHECKING:
    from fuseboard_tilelang.compile import Compiled

__all__ = ["LIMITS", "TileLang"]

HALVES = (torch.float16, torch.bfloat16)
SMALLEST_SCALE = 1e-20
"""The kernel gives a hidden key a score of -1e30 before the scale: times less than 1e-28 it is not hidden."""


def _dtype_fits(call: Call, _sizes: Sizes) -> bool:
    return (call.dtype in HALVES) == (call.device_type == "cuda")


def _largest(sizes: Sizes) -> int:
    return sizes.head_dim * max(
        sizes.batch * sizes.heads * sizes.q_length, sizes.batch * sizes.kv_heads * sizes.k_length
    )


LIMITS = Constraints(
    devices={"cuda", "cpu"},
    # Hopper, where it is measured. Before it the pipelined kernel does not compile, beyond it nobody has tried.
    capability=((9, 0), (9, 0)),
    dtypes={torch.float16, torch.bfloat16, torch.float32},
    head_dims=HeadDims(only={64, 96, 128}),
    gqa=True,
    causal={"equal", "fewer queries", "more queries"},
    structures=(
        StructureRule(keys={"none", "right"}, window={False, True}, ahead={False, True}, backward=False),
    ),
    custom_scale=True,
    any_stride=True,
    guards=(
        *GRID,
        Guard("dtype", _dtype_fits, "float16 or bfloat16 on a GPU, float32 on the CPU", None, "cast q, k and v"),
        Guard("elements", lambda _call, sizes: _largest(sizes) < 2**31, "below 2**31", _largest, "split the batch"),
        Guard(
            "lengths", lambda _call, sizes: sizes.q_length + sizes.k_length < 2**30, "together below 2**30",
            lambda sizes: sizes.q_length + sizes.k_length,
        ),
    ),
    by_name={"cpu"},  # where it is for checking, not for speed
)  # fmt: skip
"""What it takes. It has no dense mask, no dropout and no backward."""


@hookimpl
def info() -> BackendInfo:
    """What it is."""
    return BackendInfo(
        "TileLang attention: lengths, causality and windows without a mask; no backward",
        requires={"tilelang": _package.RANGE},
        homepage="https://github.com/tile-ai/tilelang",
    )


@hookimpl
def constraints() -> Constraints:
    """Its limits."""
    return LIMITS


@hookimpl
def exactness() -> Exactness:
    """Rounding only: sums and softmax are in float32, weights rounded to q's dtype before they meet the values."""
    return Exactness.EXACT


@hookimpl
def rank(call: Call, sizes: Sizes) -> float:
    """Microseconds, by `_cost`; on the CPU after everything else."""
    return math.inf if call.device_type == "cpu" else _cost.tilelang(call, sizes)


@hookimpl
def known_bad() -> tuple[KnownBad, ...]:
    """None in the versions that are admitted."""
    return ()


@hookimpl
def probe(device: torch.device) -> str | None:
    """What metadata cannot tell: a compiler, and a place for what it compiles."""
    return _package.gpu_problem() if device.type == "cuda" else _package.cpu_problem()


@hookimpl
def kernel(device: torch.device) -> TileLang:
    """Import TileLang, which compiles nothing yet."""
    _package.load()
    return TileLang(device)


@hookimpl
def install_line() -> str:
    """TileLang without what it would resolve anew, torch above all."""
    return _package.INSTALL


class TileLang:
    """`attn_kernel`, compiled for one device.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        self._cpu = device.type == "cpu"
        self._target = None if self._cpu else compiling.target_of(device)
        self._kernels: dict[tuple[object, ...], Compiled] = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None,
        mask_info: MaskInfo | None,
        causal: bool,
        scale: float | None,
        dropout_p: float,
    ) -> Tensor:
        """Turn the structure into bounds and lengths."""
        n_q, n_k = q.shape[2], k.shape[2]
        left = right = attn.OPEN
        offset = n_k - n_q
        lengths = None
        if causal:
            offset, right = 0, 0
        elif mask_info is not None:
            if mask_info.causal:
                right = 0
            elif mask_info.ahead is not None:
                right = min(mask_info.ahead, right)
            left = left if mask_info.window is None else min(mask_info.window - 1, left)
            lengths = None if mask_info.keys is None else mask_info.lengths()
        bounded = attn.hides(n_q, n_k, offset, left, right)
        kernel = self._kernel(q, bounded, lengths is not None)
        q, k, v = self._laid_out(q), self._laid_out(k), self._laid_out(v)
        out = torch.empty_like(q)
        factor = scale_of(q, scale) * math.log2(math.e)
        tensors = (q, k, v, out) if lengths is None else (q, k, v, lengths, out)
        kernel(*tensors, factor, q.shape[1] // k.shape[1], offset, left, right)
        return out

    def declines(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None,
        mask_info: MaskInfo | None,
        causal: bool,
        scale: float | None,
        dropout_p: float,
    ) -> str | None:
        """Refuse scales that would let hidden keys be seen."""
        if scale is None or scale >= SMALLEST_SCALE:
            return None
        return f"a scale below {SMALLEST_SCALE:.0e}, at which hidden keys would be seen"

    def _kernel(self, q: Tensor, bounded: bool, lengths: bool) -> Compiled:
        form = {"bounded": bounded, "lengths": lengths, "few": attn.for_few(q, bounded=bounded)}
        key = (q.dtype, q.shape[3], *form.values())
        found = self._kernels.get(key)
        if found is None:
            sizes = (None, None, None, q.shape[3])
            if self._cpu:
                found = compiling.compile_cpu(attn.attn_kernel, *sizes, **form)
            elif torch.cuda.is_current_stream_capturing():
                msg = "TileLang compiles this kind of call first; make one before the capture"
                raise DeclinedError(msg)
            else:
                dtype = str(q.dtype).removeprefix("torch.")
                found = compiling.compile_gpu(attn.attn_kernel, *sizes, target=self._target, dtype=dtype, **form)
            self._kernels[key] = found
        return found

    def _laid_out(self, tensor: Tensor) -> Tensor:
        """`tensor`, copied unless its rows are whole, where the kernel's wide loads want them."""
        if self._cpu:
            return tensor.contiguous()
        if tensor.data_ptr() % ALIGNMENT == 0 and compiling.rows_are_whole(tensor):
            return tensor
        return tensor.clone(memory_format=torch.contiguous_format)
