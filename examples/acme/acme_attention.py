"""A whole plugin: attention over blocks of keys, with an online softmax, in plain torch.

The scores of one block at a time are in memory, however many keys there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuseboard import (
    ALL_LENGTHS,
    BackendInfo,
    Call,
    Constraints,
    Exactness,
    HeadDims,
    Kernel,
    MaskInfo,
    Sizes,
    hookimpl,
)

BLOCK = 128


@hookimpl
def info() -> BackendInfo:
    return BackendInfo("attention over blocks of keys, in plain torch", homepage="https://example.org/acme")


@hookimpl
def constraints() -> Constraints:
    # What is not claimed is refused: no structures, no gradient, no dropout, no shared key heads, nothing empty.
    return Constraints(
        devices={"cpu", "cuda"},
        dtypes={torch.float32, torch.float64},
        v_head_dims=HeadDims(),
        causal=ALL_LENGTHS,
        masks={"bool"},
        causal_and_mask=True,
        custom_scale=True,
        any_stride=True,
    )


@hookimpl
def exactness() -> Exactness:
    return Exactness.EXACT  # rounding only


@hookimpl
def rank(call: Call, sizes: Sizes) -> float:
    scores = sizes.batch * sizes.heads * sizes.q_length * sizes.k_length
    return 50 + scores * sizes.head_dim / 2e4  # estimated microseconds; only the order among backends matters


@hookimpl
def kernel() -> Kernel:
    return attend  # a real plugin imports its kernel package here, and nowhere else


def attend(
    q: Tensor,  # (batch, heads, n_q, head_dim)
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,  # (batch or 1, heads or 1, n_q or 1, n_k or 1), True = attend
    mask_info: MaskInfo | None,  # None, since no structure is claimed
    causal: bool,  # top-left: query i sees key j when j <= i
    scale: float | None,
    dropout_p: float,  # 0, since no dropout is claimed
) -> Tensor:
    n_q, n_k = q.shape[2], k.shape[2]
    q = q * (q.shape[3] ** -0.5 if scale is None else scale)
    query = torch.arange(n_q, device=q.device)[:, None]
    best = q.new_full((*q.shape[:3], 1), -torch.inf)  # the largest score so far
    total = q.new_zeros((*q.shape[:3], 1))  # the sum of the weights so far
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    for start in range(0, n_k, BLOCK):
        stop = min(start + BLOCK, n_k)
        scores = q @ k[:, :, start:stop].transpose(2, 3)  # (batch, heads, n_q, block)
        if causal:
            scores = scores.masked_fill(torch.arange(start, stop, device=q.device) > query, -torch.inf)
        if mask is not None:
            seen = mask if mask.shape[3] == 1 else mask[..., start:stop]
            scores = scores.masked_fill(~seen, -torch.inf)
        new = torch.maximum(best, scores.amax(-1, keepdim=True))
        anchor = new.masked_fill(new == -torch.inf, 0.0)  # a query that has seen no key yet: exp(-inf - 0) is 0
        weights = (scores - anchor).exp()
        shrink = (best - anchor).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights @ v[:, :, start:stop]
        best = new
    return out / total.masked_fill(total == 0, 1.0)  # queries that see nothing: zeros
