"""Stand-ins for flash-attn 2, 3 and 4: their signatures, layout and alignment, by torch's own mathematics on the CPU.

What the kernels leave unwritten is NaN here, and what the tiled ones load beyond a row's last key is multiplied by
zero, so that whoever relies on either sees it.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def _attend(q: Tensor, k: Tensor, v: Tensor, rows: list[tuple[int, int, int, int]], given: dict[str, Any]) -> Tensor:
    """Rows of tokens: `(first query, queries, first key, keys)` each; NaN for queries that no row has."""
    out = torch.full((q.shape[0], q.shape[1], v.shape[2]), torch.nan)
    groups = q.shape[1] // k.shape[1]
    for q0, n_q, k0, n_k in rows:
        if n_q == 0:
            continue
        tile = given["tile"]
        end = min(k0 + -(-n_k // tile) * tile, k.shape[0])
        queries = q[q0 : q0 + n_q].float().transpose(0, 1)
        keys, values = (t[k0:end].float().transpose(0, 1).repeat_interleave(groups, 0) for t in (k, v))
        place, last = torch.arange(end - k0), torch.arange(n_q)[:, None] + (n_k - n_q)
        seen = (place < n_k).expand(n_q, -1)
        left, right = given["window"]
        if given["causal"]:
            right = 0
        if left is not None:
            seen = seen & (place >= last - left)
        if right is not None:
            seen = seen & (place <= last + right)
        empty = ~seen.any(-1, keepdim=True)
        scores = (queries @ keys.transpose(-1, -2) * given["scale"]).masked_fill(~seen, -torch.inf)
        weights = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
        weights = torch.nn.functional.dropout(weights, given["dropout_p"])
        out[q0 : q0 + n_q] = (weights @ values).transpose(0, 1)
    return out.to(q.dtype)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: Any, given: Any) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.rows, ctx.given, ctx.drawn = rows, given, torch.get_rng_state()
        return _attend(q, k, v, rows, given)

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> Any:
        inputs = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.drawn)  # the weights that the forward dropped
            out = _attend(*inputs, ctx.rows, ctx.given)
        queries, keys = torch.zeros(len(inputs[0]), dtype=torch.bool), torch.zeros(len(inputs[1]), dtype=torch.bool)
        for q0, n_q, k0, n_k in ctx.rows:
            queries[q0 : q0 + n_q] = True
            keys[k0 : k0 + n_k] = True
        grads = torch.autograd.grad(out, inputs, seed.masked_fill(~queries[:, None, None], 0), allow_unused=True)
        for grad, written in zip(grads, (queries, keys, keys), strict=True):
            grad[~written] = torch.nan
        if inputs[0].shape[2] % ctx.given["backward_multiple"]:  # read back with a stride other than it was written
            grads = (grads[0].roll(1, 2), *grads[1:])
        return *grads, None, None


def _checked(q: Tensor, k: Tensor, v: Tensor, multiple: int) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16), "half precision only"
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256, "head dims"
    assert q.shape[-1] % multiple == 0, "head dim not a multiple of 8"
    assert q.shape[-2] % k.shape[-2] == 0, "heads"
    if 0 in (*q.shape, *k.shape):
        msg = "invalid configuration argument"
        raise RuntimeError(msg)
    for each in (q, k, v):
        assert each.stride(-1) == 1, "last dimension must be contiguous"


def _given(
    q: Tensor, scale: Any, causal: bool, window: Any, dropout_p: float, tile: int, backward_multiple: int = 1
) -> dict[str, Any]:
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    assert isinstance(causal, bool)
    return {
        "scale": scale, "causal": causal, "window": window, "dropout_p": dropout_p, "tile": tile,
        "backward_multiple": backward_multiple,
    }  # fmt: skip


def _bounds(window: tuple[int, int], n_k: int) -> tuple[int | None, int | None]:
    """-1, or a bound as long as the keys, is open; if the other is not, the longest row is taken: FlashAttention 2."""
    left, right = (-1 if int(each) >= n_k else int(each) for each in window)
    if left < 0 and right < 0:
        return None, None
    return (n_k if left < 0 else left), (n_k if right < 0 else right)


def _whole(q: Tensor, k: Tensor, v: Tensor, starts: list[int], ends: list[int], given: dict[str, Any]) -> Tensor:
    """Batched `(batch, length, heads, head_dim)`: each row's keys from `starts` to `ends`."""
    (batch, n_q), n_k = q.shape[:2], k.shape[1]
    rows = [(i * n_q, n_q, i * n_k + starts[i], ends[i] - starts[i]) for i in range(batch)]
    out = _Rows.apply(*(each.reshape(-1, *each.shape[2:]) for each in (q, k, v)), rows, given)
    return out.view(batch, n_q, *out.shape[1:])


def _listed(tensor: Tensor, count: int) -> list[int]:
    assert tensor.dtype == torch.int32
    assert tensor.shape == (count,)
    assert tensor.is_contiguous()
    return tensor.tolist()


class Flash2:
    """flash-attn 2.8: what it was called with is kept in `calls`."""

    tile = 1
    packed_multiple = 1

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Tensor, ...]]] = []

    def flash_attn_func(
        self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        return self._func(q, k, v, dropout_p, softmax_scale, causal, window_size)

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        return self._varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size,
        )  # fmt: skip

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        assert k is v is None
        return self._cached(q, k_cache, v_cache, cache_seqlens, cache_leftpad, softmax_scale, causal, window_size)

    def _func(self, q, k, v, dropout_p, softmax_scale, causal, window_size):
        self.calls.append(("func", (q, k, v)))
        _checked(q, k, v, self.packed_multiple)
        given = _given(q, softmax_scale, causal, _bounds(window_size, k.shape[1]), dropout_p, self.tile)
        return _whole(q, k, v, [0] * len(q), [k.shape[1]] * len(q), given)

    def _varlen(self, q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, softmax_scale, causal, window_size):
        self.calls.append(("varlen", (q, k, v)))
        _checked(q, k, v, self.packed_multiple)
        assert isinstance(max_q, int)
        assert isinstance(max_k, int)
        rows_q, rows_k = _listed(cu_q, len(cu_q)), _listed(cu_k, len(cu_q))
        rows = [(a, b - a, c, d - c) for a, b, c, d in zip(rows_q, rows_q[1:], rows_k, rows_k[1:], strict=False)]
        assert all(n_q <= max_q and n_k <= max_k for _, n_q, _, n_k in rows)
        given = _given(q, softmax_scale, causal, _bounds(window_size, max_k), dropout_p, self.tile)
        return _Rows.apply(q, k, v, rows, given)

    def _cached(self, q, k, v, cache_seqlens, cache_leftpad, softmax_scale, causal, window_size):
        self.calls.append(("cached", (q, k, v)))
        _checked(q, k, v, 8)  # it would copy the cache to pad it
        ends = [k.shape[1]] * len(q) if cache_seqlens is None else _listed(cache_seqlens, len(q))
        starts = [0] * len(q) if cache_leftpad is None else _listed(cache_leftpad, len(q))
        given = _given(q, softmax_scale, causal, _bounds(window_size, k.shape[1]), 0.0, self.tile)
        with torch.no_grad():
            return _whole(q, k, v, starts, ends, given)


class Flash2Before261(Flash2):
    """flash-attn 2.6.0, which has no `cache_leftpad`."""

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
    ):  # fmt: skip
        return self._cached(q, k_cache, v_cache, cache_seqlens, None, softmax_scale, causal, window_size)


class Flash3(Flash2):
    """FlashAttention 3: whole tiles are loaded; some versions return the row sums as well."""

    tile = 16
    packed_multiple = 8

    def flash_attn_func(
        self, q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0,
    ):  # fmt: skip
        return self._func(q, k, v, 0.0, softmax_scale, causal, window_size), None

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0,
    ):  # fmt: skip
        return self._varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal, window_size
        )

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    ):  # fmt: skip
        assert k is v is None
        return self._cached(q, k_cache, v_cache, cache_seqlens, cache_leftpad, softmax_scale, causal, window_size)


class Flash4:
    """flash-attn-4: the row sums always come with the output, None is the open side of a window, tiles are whole.

    Its gradient of q is wrong at head dimensions that are no multiple of 32.
    """

    tile = 16

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Tensor, ...]]] = []

    def flash_attn_func(
        self, q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None),
        learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None,
        score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None,
        block_sparse_tensors_bwd=None, return_lse=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
    ):  # fmt: skip
        assert qv is None
        self.calls.append(("func", (q, k, v)))
        _checked(q, k, v, 8)
        given = _given(q, softmax_scale, causal, window_size, 0.0, self.tile, 32)
        return _whole(q, k, v, [0] * len(q), [k.shape[1]] * len(q), given), None

    def flash_attn_varlen_func(
        self, q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
        softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
        pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None,
        block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None,
        seqlen_k_per_split=None, disable_scheduler_metadata=False, gather_bwd_recompute_p=False,
        gather_bwd_token_chunk=None,
    ):  # fmt: skip
        assert qv is None
        self.calls.append(("varlen", (q, k, v)))
        _checked(q, k, v, 8)
        given = _given(q, softmax_scale, causal, window_size, 0.0, self.tile, 32)
        if cu_seqlens_k is None:
            return _whole(q, k, v, [0] * len(q), _listed(seqused_k, len(q)), given), None
        rows_q, rows_k = _listed(cu_seqlens_q, len(cu_seqlens_q)), _listed(cu_seqlens_k, len(cu_seqlens_q))
        lengths = _listed(seqused_k, len(rows_q) - 1)
        rows = [(a, b - a, c, n) for a, b, c, n in zip(rows_q, rows_q[1:], rows_k, lengths, strict=False)]
        return _Rows.apply(q, k, v, rows, given), None


def package(name: str) -> SimpleNamespace:
    """The functions of the real package, over one stand-in; `calls` lists what was called with which tensors."""
    made = {"flash": Flash2, "flash 2.6.0": Flash2Before261, "flash3": Flash3, "flash4": Flash4}[name]()
    names = [each for each in dir(made) if each.startswith("flash_attn_")]
    return SimpleNamespace(calls=made.calls, **{each: getattr(made, each) for each in names})
