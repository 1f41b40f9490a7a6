"""Grouped-query attention as the package wants it: a fifth axis."""

from __future__ import annotations

from torch import Tensor

__all__ = ["grouped"]


def grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens `(rows, tokens, heads, head_dim)` with a fifth axis: `(rows, tokens, kv_heads, heads per key head, dim)`.

    Keys are shared by a stride of zero, and so are not repeated in memory. Queries must not have one: where they do,
    as expanded ones may, the package would take one head for all.
    """
    heads, kv_heads = q.shape[2], k.shape[2]
    q = q.contiguous() if q.stride(2) == 0 else q
    shared = [each.unsqueeze(3).expand(-1, -1, -1, heads // kv_heads, -1) for each in (k, v)]
    return q.view(*q.shape[:2], kv_heads, heads // kv_heads, q.shape[3]), shared[0], shared[1]
