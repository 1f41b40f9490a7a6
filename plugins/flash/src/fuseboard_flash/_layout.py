"""What the kernels of one family need of their inputs: heads of one dimension, and padded keys said or packed.

All here is of static shape and reads no tensor, so that nothing waits for the device and a graph can capture it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fuseboard import MaskInfo
from fuseboard.tensors import as_tokens, padded

__all__ = ["attend_packed", "first", "heads_padded", "left_padding", "row_starts", "window_size"]


def first(out: Any) -> Tensor:
    """The output of a kernel that returns it alone, or with the row sums, as its version likes."""
    found: Tensor = out[0] if isinstance(out, (tuple, list)) else out
    return found


def window_size(info: MaskInfo) -> dict[str, tuple[int, int]]:
    """The option of FlashAttention 2 and 3: inclusive bounds, aligned as the structure is; -1 is open."""
    if info.window is None and info.ahead is None:
        return {}
    left, right = -1 if info.window is None else info.window - 1, -1 if info.ahead is None else info.ahead
    return {"window_size": (left, 0 if info.causal else right)}


def row_starts(info: MaskInfo, rows: int, length: int) -> Tensor:
    """Where each row starts among all tokens when each has `length`: int32, `(rows + 1,)`."""
    if info.keys is None:
        msg = "packing needs MaskInfo.keys."
        raise ValueError(msg)
    device = info.keys.device
    made: Tensor = info.derived(
        ("row starts", rows, length),
        lambda: torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device),
    )
    return made


def left_padding(info: MaskInfo, k_length: int) -> tuple[Tensor, Tensor]:
    """Where each row's keys end and how many before them are padding: two of int32, `(batch,)`."""

    def made() -> tuple[Tensor, Tensor]:
        lengths = info.lengths()
        return torch.full_like(lengths, k_length), k_length - lengths

    return info.derived(("left padding", k_length), made)


def heads_padded(q: Tensor, k: Tensor, v: Tensor, multiple: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """All three with one head dimension, a multiple of `multiple`; the scale has to be taken from q before."""
    whole = -(-max(q.shape[3], v.shape[3]) // multiple) * multiple
    return padded(q, whole), padded(k, whole), padded(v, whole)


def attend_packed(
    varlen: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, info: MaskInfo, *, fill: bool, **options: Any
) -> Tensor:
    """Attention with real keys packed together, forward and backward.

    There is room for all keys, so that their number is not asked of the device. With right padding and causality the
    kernel is called twice: for the queries that causality keeps from some real key, and for the others.

    Args:
        varlen: `flash_attn_varlen_func`: q, k, v as `(tokens, heads, head_dim)`, where rows start, longest rows.
        q: `(batch, heads, q_length, head_dim)`.
        k: `(batch, kv_heads, k_length, head_dim)`.
        v: Likewise.
        info: The structure, with keys.
        fill: Whether the kernel may load keys beyond the last real one, which must then be numbers.
        options: Passed on.
    """
    batch, heads, n_q, dim = q.shape
    n_k = k.shape[2]
    keys = _packed_keys(info)
    k_tokens, v_tokens = (as_tokens(each)[keys.order] for each in (k, v))
    if fill:
        k_tokens, v_tokens = k_tokens.masked_fill(keys.tail, 0), v_tokens.masked_fill(keys.tail, 0)
    else:
        k_tokens, v_tokens = _without_gradient(k_tokens, keys.tail), _without_gradient(v_tokens, keys.tail)
    q_tokens = as_tokens(q)

    def attend(queries: Tensor, starts: Tensor, causal: bool) -> Tensor:
        return first(varlen(queries, k_tokens, v_tokens, starts, keys.starts, n_q, n_k, causal=causal, **options))

    if info.padding == "right" and info.causal:
        held = _held_queries(info, n_q, n_k)
        free = row_starts(info, batch, n_q) - held.starts + held.starts[-1]
        q_tokens = q_tokens[held.order]
        before = attend(_without_gradient(q_tokens, held.tail), held.starts, True)
        after = attend(_without_gradient(q_tokens, ~held.tail), free, False)
        out = torch.where(held.tail, after, before)[held.order.argsort()]
    else:
        out = attend(q_tokens, row_starts(info, batch, n_q), info.causal)
    return out.view(batch, n_q, heads, dim).transpose(1, 2)


@attrs.frozen(eq=False)
class _Packed:
    """An order of all tokens in which some come first, packed row by row, and the others after them.

    Attributes:
        order: Which token comes where: int64, `(tokens,)`; a permutation, so that its size is known without asking.
        starts: Where each row's first-placed tokens start: int32, `(rows + 1,)`.
        tail: Which places hold the others: bool, `(tokens, 1, 1)`.
    """

    order: Tensor
    starts: Tensor
    tail: Tensor


def _ordered(chosen: Tensor) -> _Packed:
    """The order that puts the chosen tokens, bool `(rows, length)`, first."""
    flat = chosen.reshape(-1)
    order = flat.logical_not().to(torch.uint8).argsort(stable=True)
    counts = chosen.sum(-1, dtype=torch.int32)
    starts = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    return _Packed(order, starts, flat[order].logical_not()[:, None, None])


def _packed_keys(info: MaskInfo) -> _Packed:
    """The order that puts real keys first."""
    keys = info.keys
    if keys is None:
        msg = "packing needs MaskInfo.keys."
        raise ValueError(msg)
    return info.derived("packed keys", lambda: _ordered(keys))


def _held_queries(info: MaskInfo, q_length: int, k_length: int) -> _Packed:
    """With right padding: the order that puts first the queries that causality keeps from some real key.

    Those are the first `q_length - (k_length - real)` of each row. Aligned to the last *real* key, as the kernels align
    them, they see just what they see when all queries are aligned to the last key; the others see every real key.
    """

    def made() -> _Packed:
        held = q_length - k_length + info.lengths()
        return _ordered(torch.arange(q_length, device=held.device) < held[:, None])

    return info.derived(("held queries", q_length, k_length), made)


def _without_gradient(tokens: Tensor, tail: Tensor) -> Tensor:
    """`tokens`, whose gradient will be zero where `tail`: kernels leave it unwritten for tokens that no row has."""
    if tokens.requires_grad:
        tokens = tokens.view_as(tokens)
        tokens.register_hook(lambda grad: grad.masked_fill(tail, 0))  # type: ignore[no-untyped-call]
    return tokens
