"""Stands in for SageAttention 3 on a CPU: its signature and its faults, in torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def sageattn3_blackwell(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    per_block_mean: bool = True,
    **kwargs: Any,
) -> Tensor:
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.shape[1] == k.shape[1]
    assert q.shape[3] in (64, 128)
    if q.shape[0] > 65535 or q.shape[1] > 65535:
        raise RuntimeError("CUDA error: invalid argument")
    k -= k.mean(2, keepdim=True)  # the caller's
    n_q, n_k = q.shape[2], k.shape[2]
    padding = -n_k % 128
    keys, values = F.pad(k.float(), (0, 0, 0, padding)), F.pad(v.half().float(), (0, 0, 0, padding))
    scores = q.float() @ keys.transpose(-1, -2) / q.shape[3] ** 0.5  # no other scale, and no mask
    if is_causal:
        padded = -(-n_q // 128) * 128
        scores = scores.masked_fill(torch.ones(n_q, n_k + padding).triu(1 + n_k + padding - padded).bool(), -1e6)
    return (F.softmax(scores, -1) @ values).to(q.dtype)
