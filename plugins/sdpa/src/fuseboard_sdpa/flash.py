"""`sdpa-flash`: FlashAttention 2 as PyTorch ships it for CUDA, structured masks included.

Called directly its causal flag is *bottom-right*: public attention hides that by refusing unequal lengths. Here the
top-left flag is made of it by cutting the keys to the queries, and the bottom-right structure is what it takes by
itself. A window goes to `_flash_attention_forward`. Padded keys go to its form for packed sequences, which is told
where each row's real keys start and how many they are: nothing is gathered, and keys that are not real are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuseboard import (
    BackendInfo,
    Call,
    Constraints,
    Exactness,
    Guard,
    HeadDims,
    MaskInfo,
    Sizes,
    StructureRule,
    hookimpl,
)
from fuseboard.tensors import GRID, GRID_LIMIT, aligned, as_tokens, padded, scale_of
from fuseboard_sdpa import _cost
from fuseboard_sdpa._limits import eligible
from fuseboard_sdpa._tensors import binding, ready


def _backward_fits(call: Call, sizes: Sizes) -> bool:
    # Offsets into the padded accumulator of dQ are 32 bits wide; beyond that it writes out of bounds. The forward is
    # fine.
    return (
        not call.grad
        or sizes.batch * sizes.heads * (-(-sizes.q_length // 128) * 128) * max(sizes.head_dim, 32) <= 2**31
    )


LIMITS = Constraints(
    devices={"cuda"},
    capability=((8, 0), (12, 1)),
    dtypes={torch.float16, torch.bfloat16},
    head_dims=HeadDims(high=256),
    v_head_dims=HeadDims(high=256),
    gqa=True,
    causal={"equal", "fewer queries"},
    structures=(
        StructureRule(causal={True}, window={False, True}),
        # A window open to the right is given the bound k_length there, which cuts when the queries outnumber the keys.
        # So is a bound ahead beyond k_length; where the queries are no more than the keys, none that long is asked for.
        StructureRule(causal={False}, window={False, True}, ahead={False, True}, lengths={"equal", "fewer queries"}),
        # With causality or a window the kernel aligns to the last *real* key, the structure to the last key: the same
        # only when the padding is on the left.
        StructureRule(keys={"right"}, causal={False}, backward=False),
        StructureRule(keys={"left"}, causal={True}, window={False, True}, backward=False),
        StructureRule(keys={"left"}, causal={False}, backward=False),
    ),
    custom_scale=True,
    dropout=True,
    backward=True,
    any_stride=True,
    guards=(
        *GRID,
        Guard("backward size", _backward_fits, "2**31 accumulator elements", None, "split the batch"),
    ),
)
"""What it takes. It has no dense mask at all; gradients are not right with packed sequences of given lengths."""


@hookimpl
def info() -> BackendInfo:
    """What it is."""
    return BackendInfo("FlashAttention 2 as PyTorch ships it", homepage="https://pytorch.org")


@hookimpl
def constraints() -> Constraints:
    """Its limits."""
    return LIMITS


@hookimpl
def exactness() -> Exactness:
    """Rounding only."""
    return Exactness.EXACT


@hookimpl
def rank(call: Call, sizes: Sizes) -> float:
    """Microseconds, from the measured rates of `_cost`."""
    return _cost.flash(call, sizes)


@hookimpl
def kernel() -> Flash:
    """The operators."""
    return Flash()


class Flash:
    """`_scaled_dot_product_flash_attention`, and `_flash_attention_forward` for windows and padded keys."""

    def __init__(self) -> None:
        self._op: Callable[..., Any] = binding("_scaled_dot_product_flash_attention")
        self._forward: Callable[..., Any] = torch.ops.aten._flash_attention_forward.default

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
        """Pad, align, and call the operator for the structure."""
        if causal and k.shape[2] > q.shape[2]:  # top-left: no query sees a key beyond the number of queries
            k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
        if mask_info is None or _is_causality(mask_info):
            causal = causal or mask_info is not None
            if ready(q, k, v, 8):
                if scale is None and not dropout_p:
                    return self._op(q, k, v, 0.0, causal)[0]  # type: ignore[no-any-return]
                return self._op(q, k, v, dropout_p, causal, scale=scale)[0]  # type: ignore[no-any-return]
        v_dim, number = v.shape[3], scale_of(q, scale)
        q, k, v = self._prepared(q, k, v)
        if mask_info is None or _is_causality(mask_info):
            out: Tensor = self._op(q, k, v, dropout_p, causal, scale=number)[0]
        elif mask_info.keys is None:
            out = self._call(q, k, v, mask_info, number, dropout_p)
        else:
            out = self._padded(q, k, v, mask_info, number, dropout_p)
        return out[..., :v_dim] if out.shape[3] != v_dim else out

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
        """Torch's own eligibility check. It is asked without causality, which it knows for equal lengths only."""
        q, k, v = self._prepared(q, k, v)
        return eligible("flash", q, k, v, None, dropout_p, False, q.shape[1] != k.shape[1])

    def _prepared(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dim = -(-max(q.shape[3], v.shape[3]) // 8) * 8
        return aligned(padded(q, dim)), aligned(padded(k, dim)), aligned(padded(v, dim))

    def _call(self, q: Tensor, k: Tensor, v: Tensor, info: MaskInfo, scale: float, dropout_p: float) -> Tensor:
        """A window: `(batch, length, heads, head_dim)`, bounds inclusive, aligned as the structure is."""
        out: Tensor = self._forward(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, None, q.shape[2], k.shape[2], dropout_p,
            info.causal, False, scale=scale, **_window(info),
        )[0]  # fmt: skip
        return out.transpose(1, 2)

    def _padded(self, q: Tensor, k: Tensor, v: Tensor, info: MaskInfo, scale: float, dropout_p: float) -> Tensor:
        """Padded keys: all tokens in one row, `(tokens, heads, head_dim)`, with where each row's keys start."""
        batch, heads, n_q, dim = q.shape
        n_k = k.shape[2]
        lengths = info.lengths()
        if not _tokens_adjoin(k) or not _tokens_adjoin(v):
            # Keys laid out head by head: each head of each row becomes a row of its own, so that a cache is not copied.
            groups = heads // k.shape[1]
            if batch * k.shape[1] <= GRID_LIMIT and k.is_contiguous() and v.is_contiguous():
                rows, kv_heads = batch * k.shape[1], k.shape[1]
                lengths = info.derived(("lengths", kv_heads), lambda: info.lengths().repeat_interleave(kv_heads))
                q = q.reshape(rows, groups, n_q, dim)
                k, v = k.view(rows, 1, n_k, dim), v.view(rows, 1, n_k, dim)
        rows = q.shape[0]
        first_query, first_key = info.derived(("offsets", rows, n_q), lambda: _offsets(info, lengths, n_q, n_k))
        out: Tensor = self._forward(
            as_tokens(q), as_tokens(k), as_tokens(v), first_query, first_key, n_q, n_k, dropout_p, info.causal,
            False,
            scale=scale, seqused_k=lengths, **_window(info),
        )[0]  # fmt: skip
        return out.view(rows, n_q, -1, dim).transpose(1, 2).reshape(batch, heads, n_q, dim)


def _offsets(info: MaskInfo, lengths: Tensor, n_q: int, n_k: int) -> tuple[Tensor, Tensor]:
    """Where each row's queries and real keys start among all tokens: int32, `(rows + 1,)`."""
    row = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    first_key = row * n_k
    if info.padding == "left":
        first_key[:-1] += n_k - lengths
    return row * n_q, first_key


def _is_causality(info: MaskInfo) -> bool:
    return info.keys is None and info.window is None and info.ahead is None


def _window(info: MaskInfo) -> dict[str, int]:
    if info.window is None and info.ahead is None:
        return {}
    left, right = -1 if info.window is None else info.window - 1, -1 if info.ahead is None else info.ahead
    return {"window_size_left": left, "window_size_right": 0 if info.causal else right}


def _tokens_adjoin(tensor: Tensor) -> bool:
    """Whether `(batch, heads, length, head_dim)` can be seen as `(batch * length, heads, head_dim)` without a copy."""
    batch_stride, _, length_stride, _ = tensor.stride()
    return tensor.shape[0] == 1 or batch_stride == tensor.shape[2] * length_stride
