"""The CUTLASS operator."""

from __future__ import annotations

import torch
from torch import Tensor

from . import attn_bias as b
from .common import Inputs, attend

KINDS = (type(None), Tensor, b.LowerTriangularMask, b.LowerTriangularFromBottomRightMask)


def reasons(inp: Inputs) -> list[str]:
    q, v = inp.query, inp.value
    multiple = 16 // q.element_size()
    found = []
    if type(inp.attn_bias) not in KINDS:
        found.append(f"attn_bias type is {type(inp.attn_bias)}")
    for name, each in (("query", q), ("value", v)):
        if each.shape[-1] % multiple or each.stride(-2) % multiple or each.stride(-1) > 1:
            found.append(f"{name}.shape[-1] % {multiple} != 0")
    if isinstance(inp.attn_bias, Tensor):
        if any(stride % multiple for stride in inp.attn_bias.stride()[:-1]):
            found.append(f"attn_bias.stride(-2) % {multiple} != 0")
        if inp.attn_bias.stride(-1) > 1:
            found.append("attn_bias.stride(-1) > 1")
    return found


class FwOp:
    NAME = "cutlassF-pt"

    @classmethod
    def not_supported_reasons(cls, inp: Inputs) -> list[str]:
        return reasons(inp)

    @classmethod
    def apply(cls, inp: Inputs) -> Tensor:
        q, k, v, bias = inp.query, inp.key, inp.value, inp.attn_bias
        assert q.ndim == 4, "one stream for each group of heads, which a capture does not forgive"
        if max(q.shape[0], q.shape[2]) > 65535:
            raise RuntimeError("CUDA error: invalid configuration argument")
        n_q, n_k = q.shape[1], k.shape[1]
        seen = torch.ones(n_q, n_k, dtype=torch.bool)
        if isinstance(bias, b.LowerTriangularMask):
            seen = seen.tril()
        elif isinstance(bias, b.LowerTriangularFromBottomRightMask):
            seen = seen.tril(n_k - n_q) if n_q <= n_k else seen  # wrong with more queries than keys
        scale = q.shape[-1] ** -0.5 if inp.scale is None else inp.scale
        return attend(q, k, v, seen, bias if isinstance(bias, Tensor) else None, scale, inp.p)


class BwOp:
    NAME = "cutlassB-pt"

    @classmethod
    def not_supported_reasons(cls, inp: Inputs) -> list[str]:
        found = reasons(inp)
        if inp.query.ndim == 5:
            found.append("operator does not support BMGHK format")
        return found
