"""The flash operator."""

from __future__ import annotations

import torch
from torch import Tensor

from . import attn_bias as b
from .common import Inputs, attend, folded

PADDED = (b.BlockDiagonalPaddedKeysMask, b.BlockDiagonalGappyKeysMask)
DENSE = (
    type(None),
    b.LowerTriangularMask,
    b.LowerTriangularFromBottomRightMask,
    b.LowerTriangularFromBottomRightLocalAttentionMask,
    b.LocalAttentionFromBottomRightMask,
)


def reasons(inp: Inputs, kinds: tuple[type, ...]) -> list[str]:
    q, k, v = inp.query, inp.key, inp.value
    found = []
    if type(inp.attn_bias) not in kinds:
        found.append(f"attn_bias type is {type(inp.attn_bias)}")
    if q.dtype not in (torch.float16, torch.bfloat16):
        found.append(f"dtype={q.dtype}")
    if q.shape[-1] != v.shape[-1]:
        found.append("query.shape[-1] != value.shape[-1]")
    if max(q.shape[-1], v.shape[-1]) > 256:
        found.append("max(query.shape[-1], value.shape[-1]) > 256")
    if q.shape[-1] % 8 or q.stride(-2) % 8 or q.stride(-1) > 1:
        found.append("query.shape[-1] % 8 != 0")
    if type(inp.attn_bias) is b.LowerTriangularMask and q.shape[1] != k.shape[1]:
        found.append("Only support LowerTriangularMask if equal number of keys and queries")
    if q.ndim == 5 and q.shape[2] > 1 and q.stride(3) and q.stride(2) != q.stride(3) * q.shape[3]:
        found.append("GQA is only supported when the G/H dimensions are contiguous")
    return found


class FwOp:
    NAME = "fa2F"

    @classmethod
    def not_supported_reasons(cls, inp: Inputs) -> list[str]:
        return reasons(inp, DENSE + PADDED)

    @classmethod
    def apply(cls, inp: Inputs) -> Tensor:
        q, k, v = folded(inp.query), folded(inp.key), folded(inp.value)
        for each in (q, k, v):
            assert each.data_ptr() % 16 == 0
            assert all(stride % 8 == 0 for stride in each.stride()[:-1])
        scale = q.shape[-1] ** -0.5 if inp.scale is None else inp.scale
        if scale <= 0:
            return torch.full_like(q, torch.nan)
        bias = inp.attn_bias
        if isinstance(bias, PADDED):
            return cls.packed(q, k, v, bias, scale, inp.p).reshape(inp.query.shape)
        if max(q.shape[0], q.shape[2]) > 65535:
            raise RuntimeError("CUDA error: invalid argument")
        n_q, n_k = q.shape[1], k.shape[1]
        last, key = torch.arange(n_q)[:, None] + n_k - n_q, torch.arange(n_k)
        seen = torch.ones(n_q, n_k, dtype=torch.bool)
        if isinstance(bias, b.LowerTriangularMask | b.LowerTriangularFromBottomRightMask):
            seen &= key <= last  # bottom-right, whatever is meant
        if isinstance(bias, b.LowerTriangularFromBottomRightLocalAttentionMask):
            seen &= key >= last - (bias._window_size - 1)
        if isinstance(bias, b.LocalAttentionFromBottomRightMask):
            left, right = (
                min(bias.window_left, n_k),
                min(bias.window_right, n_k),
            )  # as long as the keys is open, and cut
            seen &= (key >= last - left) & (key <= last + right)
        return attend(q, k, v, seen, None, scale, inp.p).reshape(inp.query.shape)

    @classmethod
    def packed(cls, q: Tensor, k: Tensor, v: Tensor, bias: b.AttentionBias, scale: float, p: float) -> Tensor:
        assert q.shape[0] == k.shape[0] == 1
        queries, keys = bias.q_seqinfo, bias.k_seqinfo
        for each in (queries.seqstart, keys.seqstart, keys.seqlen):
            assert each.dtype == torch.int32
            assert each.device == q.device
        out = torch.full_like(q, torch.nan)
        for row in range(len(keys.seqlen)):
            n, start, first = int(keys.seqlen[row]), int(keys.seqstart[row]), int(queries.seqstart[row])
            end = int(queries.seqstart[row + 1])
            assert n <= keys.max_seqlen
            assert end - first <= queries.max_seqlen
            seen = torch.ones(1, 1, dtype=torch.bool)
            rows = slice(first, end)
            if n == 0:
                out[:, rows] = 0
                continue
            out[:, rows] = attend(q[:, rows], k[:, start : start + n], v[:, start : start + n], seen, None, scale, p)
        return out


class BwOp:
    NAME = "fa2B"

    @classmethod
    def not_supported_reasons(cls, inp: Inputs) -> list[str]:
        found = reasons(inp, DENSE)
        if inp.query.ndim == 5:
            found.append("operator does not support BMGHK format")
        if torch.are_deterministic_algorithms_enabled():
            found.append("operator is non-deterministic")
        return found
