"""Attention, with the operator given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import attn_bias as attn_bias
from . import cutlass as cutlass
from . import flash as flash
from .common import CALLS as CALLS
from .common import Inputs as Inputs


def _run(inp: Inputs, operator: Any) -> Tensor:
    inp.validate()
    reasons = operator.not_supported_reasons(inp)
    if reasons:
        raise ValueError(f"Operator `memory_efficient_attention` does not support inputs: {reasons}")
    CALLS.append({"operator": operator.NAME, "bias": type(inp.attn_bias).__name__, "rank": inp.query.ndim})
    return operator.apply(inp)


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    assert op is not None, "the plugin pins its operators"
    inp = Inputs(query, key, value, attn_bias, p, scale, output_dtype)
    if op[1].not_supported_reasons(inp):
        return _run(inp, op[0]) * torch.nan  # a pinned backward is not asked, and its gradients are anything
    return _run(inp, op[0])


def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    assert op is not None, "the plugin pins its operators"
    with torch.no_grad():
        return _run(Inputs(query, key, value, attn_bias, p, scale, output_dtype), op)
