"""Stands in for SageAttention 1.0.6 on a CPU: its signature, its arithmetic and its faults, in torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GIVEN: list[dict[str, Any]] = []  # what each call was given


def quantised(x: Tensor, block: int) -> Tensor:
    """x as int8 times one scale for each block of tokens."""
    b, h, n, d = x.shape
    blocks = F.pad(x.float(), (0, 0, 0, -n % block)).view(b, h, -1, block, d)
    scale = blocks.abs().amax((-1, -2), keepdim=True) / 127
    numbers = torch.nan_to_num(blocks / scale)
    return ((numbers + 0.5 * numbers.sign()).trunc() * scale).view(b, h, -1, d)[:, :, :n]


def sageattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    **kwargs: Any,
) -> Tensor:
    GIVEN.append({"smooth_k": smooth_k, "is_causal": is_causal, **kwargs})
    dtype = q.dtype
    assert dtype in (torch.float16, torch.bfloat16, torch.float32)
    assert q.dtype == k.dtype == v.dtype
    assert q.size(-1) in (64, 96, 128), "headdim should be in [64, 96, 128]."
    assert q.stride(-1) == 1, "Last dim of qkv must be contiguous."
    assert k.stride(-1) == 1
    assert v.stride(-1) == 1
    assert tensor_layout == "HND"
    batch, heads, n_q, dim = q.shape
    n_k = k.shape[2]
    if batch > 65535 or heads > 65535 or (dim == 96 and batch * heads > 65535):
        raise RuntimeError("Triton Error [CUDA]: invalid argument")
    if smooth_k:
        k -= k.mean(2, keepdim=True)  # the caller's
    v = v.to(torch.float16)  # beyond 65504 is inf
    groups = heads // k.shape[1]
    q8 = quantised(q.float() * (dim**-0.5 if sm_scale is None else sm_scale), 128)
    k8, v = quantised(k, 64).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if is_causal:
        assert n_q == n_k, "qo_len and kv_len must be equal for causal attention"
    padding = -n_k % 64
    k8, v = F.pad(k8, (0, 0, 0, padding)), F.pad(v, (0, 0, 0, padding))  # and no mask hides these keys
    scores = q8 @ k8.transpose(-1, -2)
    if is_causal:
        scores = scores.masked_fill(torch.ones(n_q, n_k + padding, dtype=torch.bool).triu(1), -1e6)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    sums = weights.sum(-1, keepdim=True)
    blocks = (
        (weights[..., at : at + 64].half().float() @ v[:, :, at : at + 64].float())
        .half()
        .float()  # added up in float16
        for at in range(0, n_k + padding, 64)
    )
    out = (sum(blocks) / sums).to(dtype)
    if is_causal and 0 < n_k % 128 <= 64:
        out[-1, -1, n_k // 128 * 128 :] = torch.nan  # a scale read beyond the last one
    return out
