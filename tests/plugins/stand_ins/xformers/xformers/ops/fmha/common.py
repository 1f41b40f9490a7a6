"""What the operators share: inputs, and attention by its definition over what a bias shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CALLS: list[dict[str, Any]] = []  # which operator was given which bias


@dataclass
class Inputs:
    query: Tensor
    key: Tensor
    value: Tensor
    attn_bias: Any = None
    p: float = 0.0
    scale: float | None = None
    output_dtype: torch.dtype | None = None
    is_partial: bool = False

    def validate(self) -> None:
        q, k, v = self.query, self.key, self.value
        if k.shape[:-1] != v.shape[:-1] or q.shape[2:-1] != k.shape[2:-1] or q.shape[-1] != k.shape[-1]:
            raise ValueError("Incompatible shapes for attention inputs: we don't support broadcasting")
        if isinstance(self.attn_bias, Tensor):
            want = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
            if tuple(self.attn_bias.shape) != want:
                raise ValueError(f"Invalid shape for attention bias: {self.attn_bias.shape} (expected {want})")
            if self.attn_bias.dtype != q.dtype:
                raise RuntimeError("invalid dtype for bias - should match query's dtype")


def folded(x: Tensor) -> Tensor:
    if x.ndim == 4:
        return x
    return x[:, :, :, 0] if x.stride(3) == 0 else x.reshape(*x.shape[:2], -1, x.shape[4])


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Tensor | None, scale: float, p: float) -> Tensor:
    """(batch, tokens, heads, dim); `seen` broadcasts to (batch, heads, queries, keys)."""
    groups = q.shape[2] // k.shape[2]
    queries = q.float().transpose(1, 2)
    keys, values = (each.float().transpose(1, 2).repeat_interleave(groups, 1) for each in (k, v))
    scores = queries @ keys.transpose(-1, -2) * scale
    scores = scores if bias is None else scores + bias.float()
    seen = (seen & (scores > -torch.inf)).expand(scores.shape)
    empty = ~seen.any(-1, keepdim=True)
    weights = scores.masked_fill(~seen, -torch.inf).masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    weights = torch.nn.functional.dropout(weights, p)
    return (weights @ values).transpose(1, 2).to(q.dtype)
