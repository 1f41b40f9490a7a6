"""A Qwen decoder's layers, cut at their attention, with the two sites and what transformers computes there."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fuseboard.dispatch import attention
from fuseboard.engine.decoder.config import DecoderConfig
from fuseboard.engine.decoder.norms import RMSNorm
from fuseboard.engine.decoder.rope import rotate
from fuseboard.masks import MaskInfo
from fuseboard.site import Site

if TYPE_CHECKING:
    from fuseboard.engine.decoder.kernels.exact import ExactGlue

__all__ = ["FULL", "SITES", "SLIDING", "Given", "Layer", "packs_queries", "reference", "untouched"]

_GQA_HEAD_DIM = 256
_SDPA = F.scaled_dot_product_attention


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """What transformers' sdpa attention makes of a decoder's call, heads shared as it shares them.

    Args:
        q: As in `attention`, like the arguments that follow.
        k: Likewise.
        v: Likewise.
        mask: Likewise.
        causal: Likewise.
        scale: None for transformers' `head_dim ** -0.5`.
        enable_gqa: Likewise.
        dropout_p: Likewise.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    groups = q.shape[1] // k.shape[1] if enable_gqa else 1
    if groups == 1:
        return _SDPA(q, k, v, attn_mask=mask, dropout_p=dropout_p, scale=scale, is_causal=causal)
    if mask is None and q.shape[-1] <= _GQA_HEAD_DIM:
        return _SDPA(q, k, v, dropout_p=dropout_p, scale=scale, is_causal=causal, enable_gqa=True)
    if q.shape[2] == 1 and packs_queries() and (mask is None or mask.shape[1] == 1):
        packed = q.reshape(q.shape[0], k.shape[1], groups, q.shape[-1])
        out = _SDPA(packed, k, v, attn_mask=mask, dropout_p=dropout_p, scale=scale)
        return out.reshape(q.shape[0], q.shape[1], 1, v.shape[-1])
    k, v = (
        each[:, :, None].expand(-1, -1, groups, -1, -1).reshape(each.shape[0], -1, *each.shape[2:]) for each in (k, v)
    )
    return _SDPA(q, k, v, attn_mask=mask, dropout_p=dropout_p, scale=scale, is_causal=causal)


@functools.cache
def packs_queries() -> bool:
    """Whether a masked call with one query has its query heads packed beside each other, so that keys are not repeated.

    The newest transformers does that; those before repeat the keys, which gives other bits in fp32. The one that is
    installed is asked, by its source: importing it takes seconds.
    """
    found = importlib.util.find_spec("transformers")
    folders = (found.submodule_search_locations if found is not None else None) or ()
    sources = [Path(folder) / "integrations" / "sdpa_attention.py" for folder in folders]
    texts = [source.read_text(encoding="utf-8") for source in sources if source.is_file()]
    return not texts or any("def pack_gqa(" in text for text in texts)


FULL = Site("qwen.full", reference=reference, approx_ok=False)
SLIDING = Site("qwen.sliding", reference=reference, approx_ok=False)
SITES = {"full_attention": FULL, "sliding_attention": SLIDING}


class Given(NamedTuple):
    """What a forward pass tells attention, the same for every layer of a kind.

    Attributes:
        causal: Top-left, where queries and keys are equally many and nothing else is hidden.
        mask: Dense; None when nothing is hidden but by `causal`.
        info: The structure behind it.
    """

    causal: bool = False
    mask: Tensor | None = None
    info: MaskInfo | None = None


def _linear(wide: int, to: int, *, bias: bool) -> nn.Linear:
    # On no device: weights are put in their place by `load`, and drawing numbers would move the global generator.
    return nn.Linear(wide, to, bias=bias, device="meta").requires_grad_(requires_grad=False)


def _stacked(*parts: nn.Linear) -> nn.Linear:
    made = _linear(parts[0].in_features, sum(each.out_features for each in parts), bias=parts[0].bias is not None)
    made.weight = nn.Parameter(torch.cat([each.weight.detach() for each in parts]), requires_grad=False)
    if parts[0].bias is not None:
        made.bias = nn.Parameter(torch.cat([each.bias.detach() for each in parts]), requires_grad=False)
    return made


def untouched(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module does what its weights say and no more: a kernel that reads them may then stand in for it.

    Not one with hooks, with a `forward` of its own, as adapters and offloading set it, or whose weights are a subclass
    of tensors, such as quantised ones.
    """
    return (
        type(module) is kind
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and "forward" not in vars(module)
        and all(type(each) in (nn.Parameter, Tensor) for each in module._parameters.values() if each is not None)
    )


class SelfAttention(nn.Module):
    """Projections, norms and rotation; attention itself is the caller's."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        wide = config.hidden_size
        self.q_proj = _linear(wide, self.heads * self.head_dim, bias=config.qkv_bias)
        self.k_proj = _linear(wide, self.kv_heads * self.head_dim, bias=config.qkv_bias)
        self.v_proj = _linear(wide, self.kv_heads * self.head_dim, bias=config.qkv_bias)
        self.o_proj = _linear(self.heads * self.head_dim, wide, bias=config.o_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.fused = False

    def fuse(self) -> None:
        """Stack the three projections into one linear, unless a call that did not end has done so."""
        if self.fused:
            return
        self.qkv_proj = _stacked(self.q_proj, self.k_proj, self.v_proj)
        del self.q_proj, self.k_proj, self.v_proj
        self.fused = True

    def project(
        self, x: Tensor, cos: Tensor, sin: Tensor, exact: ExactGlue | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, `(batch, heads, length, head_dim)`, the first two normalised and rotated.

        Queries and keys together where that is the same in bits: on the CPU, whose reductions go row by row, and when
        they came out of one linear. CUDA plans a reduction by the tensor's size, so there they stay apart.
        """
        if exact is not None:
            return self._exactly(exact, x, cos, sin)
        split = (*x.shape[:2], -1, self.head_dim)
        heads, both = self.heads, self.heads + self.kv_heads
        if self.fused:
            qkv = self.qkv_proj(x).view(split)
            qk, v = qkv[:, :, :both], qkv[:, :, both:]
        elif x.device.type == "cpu" and not torch.is_grad_enabled():
            qk = torch.cat((self.q_proj(x), self.k_proj(x)), dim=-1).view(split)
            v = self.v_proj(x).view(split)
        else:
            q, k, v = (each(x).view(split) for each in (self.q_proj, self.k_proj, self.v_proj))
            if self.qk_norm:
                q, k = self.q_norm(q), self.k_norm(k)
            return rotate(q, cos, sin).transpose(1, 2), rotate(k, cos, sin).transpose(1, 2), v.transpose(1, 2)
        if self.qk_norm:
            # Nobody else's tensor; and the weights are read where they are, since one that is kept joined grows stale.
            qk = self.q_norm.normalised(qk)
            qk[:, :, :heads].mul_(self.q_norm.weight)
            qk[:, :, heads:].mul_(self.k_norm.weight)
        qk = rotate(qk, cos, sin).transpose(1, 2)
        return qk[:, :heads], qk[:, heads:], v.transpose(1, 2)

    def _exactly(self, exact: ExactGlue, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same, with one kernel for weights and rotation, and keys and values in one memory for the cache."""
        split = (*x.shape[:2], -1, self.head_dim)
        if self.fused:
            qk, v = self.qkv_proj(x).view(split).split((self.heads + self.kv_heads, self.kv_heads), dim=2)
            qk = self.q_norm.normalised(qk, exact) if self.qk_norm else qk
            q, k = qk.split((self.heads, self.kv_heads), dim=2)
        else:
            q, k, v = (each(x).view(split) for each in (self.q_proj, self.k_proj, self.v_proj))
            if self.qk_norm:
                q, k = self.q_norm.normalised(q, exact), self.k_norm.normalised(k, exact)
        weights = (self.q_norm.weight, self.k_norm.weight) if self.qk_norm else None
        return exact.rotate(q, k, v, weights, cos, sin, joined=self.fused)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size, bias=False)
        self.fused = False

    def fuse(self) -> None:
        """Stack gate and up into one linear, unless a call that did not end has done so."""
        if self.fused:
            return
        self.gate_up_proj = _stacked(self.gate_proj, self.up_proj)
        del self.gate_proj, self.up_proj
        self.fused = True

    def forward(self, x: Tensor, exact: ExactGlue | None = None) -> Tensor:
        """`down(silu(gate(x)) * up(x))`."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1) if self.fused else (self.gate_proj(x), self.up_proj(x))
        if exact is not None and exact.cheap:
            return self.down_proj(exact.silu_mul(gate, up))  # type: ignore[no-any-return]
        return self.down_proj(F.silu(gate) * up)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A layer, cut at its attention: `before`, `attend`, `after`, so that what lies between can be captured.

    Attributes:
        exact: In steps of one token, kernels with torch's bits for what lies between matrix products; None for torch's.
    """

    def __init__(self, config: DecoderConfig, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.exact: ExactGlue | None = None
        self.shares = config.groups > 1
        self.dropout = config.attention_dropout
        self.self_attn = SelfAttention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def site(self) -> Site:
        """Where in the engine its attention is. Not held, so that a copy of a decoder copies no site."""
        return SITES[self.kind]

    def fuse(self) -> None:
        """Stack its projections."""
        self.self_attn.fuse()
        self.mlp.fuse()

    def before(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From the hidden state to queries, keys and values."""
        return self.enter(hidden, None, cos, sin)[1:]

    def enter(
        self, hidden: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`before`, of a hidden state that `delta` is still to be added to; gives that first."""
        exact = self._serving(hidden)
        hidden, x = self.input_layernorm.added(hidden, delta, exact)
        return hidden, *self.self_attn.project(x, cos, sin, exact)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, given: Given) -> Tensor:
        """Attention, `(batch, length, heads * head_dim)`; keys go to it as they are, fewer than the queries' heads."""
        out = attention(
            q,
            k,
            v,
            site=self.site,
            mask=given.mask,
            causal=given.causal,
            enable_gqa=self.shares,
            dropout_p=self.dropout if self.training else 0.0,
            mask_info=given.info,
        )
        batch, _, length, _ = out.shape
        if length == 1:
            return out.reshape(batch, 1, -1)
        # By way of one matrix, since a backend's layout may leave strides that torch would multiply batch by batch.
        return out.transpose(1, 2).reshape(batch * length, -1).view(batch, length, -1)

    def after(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """From attention's answer to the next hidden state."""
        hidden, delta = self.leave(hidden, attended)
        return hidden + delta

    def leave(self, hidden: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """`after`, as two tensors to be added: the next layer's norm may do it on its way."""
        exact = self._serving(hidden)
        hidden, x = self.post_attention_layernorm.added(hidden, self.self_attn.o_proj(attended), exact)
        return hidden, self.mlp(x, exact)

    def _serving(self, hidden: Tensor) -> ExactGlue | None:
        return self.exact if self.exact is not None and self.exact.serves(hidden) else None
