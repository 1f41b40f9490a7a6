"""Stands in for SageAttention 2.2.0 on a CPU: its signature and its faults, in torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GIVEN: list[dict[str, Any]] = []  # what each call was given


def sageattn_qk_int8_pv_fp16_cuda() -> None:
    """By this the generations are told apart."""


def sageattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    **kwargs: Any,
) -> Tensor:
    GIVEN.append({"is_causal": is_causal, **kwargs})
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert tensor_layout == "HND"
    batch, heads, n_q, dim = q.shape
    n_k = k.shape[2]
    if dim > 128:
        raise ValueError(f"Unsupported head_dim: {dim}")
    if batch > 65535 or heads > 65535:
        raise RuntimeError("CUDA error: invalid argument")
    groups = heads // k.shape[1]
    k = (k.float() - k.float().mean(2, keepdim=True)).repeat_interleave(groups, 1)
    v = v.to(torch.float16).repeat_interleave(groups, 1).float()
    scores = q.float() @ k.transpose(-1, -2) * (dim**-0.5 if sm_scale is None else sm_scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(n_q, n_k, dtype=torch.bool).triu(1), -1e6)  # top-left, whatever is meant
    out = (F.softmax(scores, -1) @ v).to(q.dtype)
    return out * torch.nan if n_k < 64 else out
