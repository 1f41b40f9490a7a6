"""A ModernBERT encoder on the board: on the CPU, with nothing bound, transformers' sdpa result bit for bit.

Two sites, one for global and one for local attention. Padding and the local window are given as a structure as well as
in the dense mask. Where the sequence is so short that the window hides nothing, local attention is given what global
attention is.

Inference: dropout is computed as transformers does, but weights ask for no gradient until somebody says so.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fuseboard as fb
from decision.config import FULL, SLIDING, EncoderConfig

__all__ = ["GLOBAL", "LOCAL", "SITES", "Encoder", "Given", "reference"]

_SDPA = F.scaled_dot_product_attention


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """What transformers' sdpa attention computes for an encoder; its scale is `head_dim ** -0.5`, in Python."""
    return _SDPA(q, k, v, attn_mask=mask, dropout_p=dropout_p, scale=q.shape[-1] ** -0.5 if scale is None else scale)


GLOBAL = fb.Site("decision.global", reference=reference)
LOCAL = fb.Site("decision.local", reference=reference)
SITES = {FULL: GLOBAL, SLIDING: LOCAL}


class Given(NamedTuple):
    """What a forward pass tells attention, the same for every layer of a kind.

    Attributes:
        mask: Boolean, True = attend; None when nothing is hidden.
        info: The structure behind it, where there is one.
    """

    mask: Tensor | None = None
    info: fb.MaskInfo | None = None


class Embeddings(nn.Module):
    """Token embeddings, normalised; where a token stands is told by rotation alone."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        # On no device: weights are put in their place by `weights`, and drawing numbers would move the global
        # generator.
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, device="meta")
        self.norm = norm(config)
        self.drop = nn.Dropout(config.embedding_dropout)

    def forward(self, input_ids: Tensor) -> Tensor:
        """`(batch, length)` ids to `(batch, length, hidden)`."""
        return self.drop(self.norm(self.tok_embeddings(input_ids)))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """GEGLU: the first half of `Wi` goes through gelu and gates the second."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.Wi = linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.Wo = linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.drop = nn.Dropout(config.mlp_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, length, hidden)` to the same."""
        gate, up = self.Wi(x).chunk(2, dim=-1)
        return self.Wo(self.drop(F.gelu(gate) * up))  # type: ignore[no-any-return]


class Rotary(nn.Module):
    """Cosines and sines for the positions, for one base.

    Its frequencies stay float32 whatever the model is cast to, as they do in a transformers model that was loaded in
    a low dtype. (One that is cast after loading rounds them.)
    """

    def __init__(self, dim: int, theta: float) -> None:
        super().__init__()
        self.dim, self.theta = dim, theta
        self.inverse: Tensor
        self.register_buffer("inverse", self._frequencies(), persistent=False)

    def _frequencies(self) -> Tensor:
        steps = torch.arange(0, self.dim, 2, dtype=torch.float32, device="cpu")
        return 1.0 / (self.theta ** (steps / self.dim))

    def _apply(self, fn: Any, recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.inverse.dtype != torch.float32:
            self.inverse = self._frequencies().to(self.inverse.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`(1, length)` positions to two tensors `(1, length, head_dim)` in `dtype`."""
        angles = positions[..., None].float() * self.inverse
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(dtype), both.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `(batch, heads, length, head_dim)`, in float32 inside."""
    wide = x.float()
    half = x.shape[-1] // 2
    turned = torch.cat((-wide[..., half:], wide[..., :half]), dim=-1)
    return ((wide * cos) + (turned * sin)).to(x.dtype)


class SelfAttention(nn.Module):
    """Projections and rotation around one of the two sites."""

    def __init__(self, config: EncoderConfig, kind: str) -> None:
        super().__init__()
        self.kind = kind  # and not the site: a copy of the model is to call the same one
        self.head_dim = config.head_dim
        self.dropout = config.attention_dropout
        self.Wqkv = linear(config.hidden_size, 3 * config.hidden_size, bias=config.attention_bias)
        self.Wo = linear(config.hidden_size, config.hidden_size, bias=config.attention_bias)
        self.out_drop = nn.Dropout(config.attention_dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, given: Given) -> Tensor:
        """`(batch, length, hidden)` to the same."""
        batch, length, _ = x.shape
        qkv = self.Wqkv(x).view(batch, length, 3, -1, self.head_dim)
        q, k, v = (each.transpose(1, 2) for each in qkv.unbind(dim=2))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        dropout_p = self.dropout if self.training else 0.0
        out = fb.attention(q, k, v, site=SITES[self.kind], mask=given.mask, dropout_p=dropout_p, mask_info=given.info)
        return self.out_drop(self.Wo(out.transpose(1, 2).reshape(batch, length, -1)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and GEGLU, each behind its norm; the first layer's attention has none, its input being normalised."""

    def __init__(self, config: EncoderConfig, index: int) -> None:
        super().__init__()
        self.kind = config.layer_types[index]
        self.attn_norm = norm(config) if index else nn.Identity()
        self.attn = SelfAttention(config, self.kind)
        self.mlp_norm = norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, given: Given) -> Tensor:
        """`(batch, length, hidden)` to the same."""
        x = x + self.attn(self.attn_norm(x), cos, sin, given)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """`ModernBertModel`, by transformers' names for its weights.

    Attributes:
        structures: Whether attention is told the structure behind its mask. Set it to False before `freeze` under a
            policy other than `auto`: inside a graph only the dense mask is given, and that is another kind of call.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.structures = True
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.final_norm = norm(config)
        self.rotary = nn.ModuleDict({kind: Rotary(config.head_dim, config.theta[kind]) for kind in (FULL, SLIDING)})
        self.requires_grad_(requires_grad=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, right: bool = False) -> Tensor:
        """The last hidden state, `(batch, length, hidden)`.

        Args:
            input_ids: `(batch, length)`.
            attention_mask: `(batch, length)`, not 0 for a real token; None when all are.
            right: The real tokens of each row are known to come first, which more kernels can use.
        """
        x = self.embeddings(input_ids)
        given = self.given(input_ids.shape[1], attention_mask, x.device, right=right)
        positions = torch.arange(input_ids.shape[1], device=x.device)[None]
        angles = {kind: self.rotary[kind](positions, x.dtype) for kind in given}
        turned = {kind: (cos[:, None], sin[:, None]) for kind, (cos, sin) in angles.items()}
        for layer in self.layers:
            kind = str(layer.kind)
            x = layer(x, *turned[kind], given[kind])
        return self.final_norm(x)  # type: ignore[no-any-return]

    def given(
        self, length: int, attention_mask: Tensor | None, device: torch.device, *, right: bool = False
    ) -> dict[str, Given]:
        """What attention is told, for each kind of layer.

        In a graph nothing depends on values or lengths: the masks are always written out, and no structure is given.
        The CPU is asked whether anything is padding, since it answers at once; another device would have to be waited
        for.
        """
        tracing = torch.compiler.is_compiling()
        keys = None if attention_mask is None else attention_mask.to(device=device, dtype=torch.bool)
        if keys is not None and not tracing and device.type == "cpu" and bool(keys.all()):
            keys = None
        told, reach = self.structures and not tracing, self.config.reach
        padding: Literal["right"] | None = "right" if right and keys is not None else None
        whole = Given()
        if keys is not None:
            whole = Given(keys[:, None, None, :], fb.MaskInfo(keys, padding=padding) if told else None)
        if not tracing and length <= reach + 1:
            return {FULL: whole, SLIDING: whole}
        place = torch.arange(length, device=device)
        near = ((place[:, None] - place[None, :]).abs() <= reach)[None, None]
        info = fb.MaskInfo(keys, window=reach + 1, ahead=reach, padding=padding) if told else None
        return {FULL: whole, SLIDING: Given(near if whole.mask is None else near & whole.mask, info)}


def linear(wide: int, to: int, *, bias: bool) -> nn.Linear:
    """A linear without weights yet."""
    return nn.Linear(wide, to, bias=bias, device="meta")


def norm(config: EncoderConfig) -> nn.LayerNorm:
    """A layer norm without weights yet."""
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias, device="meta")
