"""Marker pooling, the decision head and the action head.

A question puts a marker token before each of its options. The decision head scores the markers' hidden states; the
action head reads the sequence's state, that of its first token, beside three numbers that say how sure the decision is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from decision.config import EncoderConfig
from decision.encoder import linear, norm

__all__ = ["FEATURES", "LOWEST", "ActionHead", "DecisionHead", "confidence", "in_weights_dtype", "marked"]

FEATURES = 3
LOWEST = torch.finfo(torch.float32).min
"""The logit of a slot without an option: finite, so that logits can be subtracted, and no probability in float32."""


def marked(hidden: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """The hidden states at the markers, `(batch, slots, hidden)`.

    Args:
        hidden: `(batch, length, hidden)`.
        positions: `(batch, slots)`, int64. What stands in a slot without an option does not matter.
        mask: `(batch, slots)`, bool, True for a slot with an option.
    """
    places = positions.masked_fill(~mask, 0)
    return hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))


def confidence(logits: Tensor, mask: Tensor) -> Tensor:
    """How sure a decision is, float32 `(batch, 3)`: largest probability, entropy, and its lead over the second.

    All are 0 for a row without options; one option leads by 1.
    """
    sure = F.softmax(logits.float(), dim=-1) * mask
    best, at = sure.max(dim=-1)
    entropy = -(sure * sure.clamp_min(torch.finfo(torch.float32).tiny).log()).sum(dim=-1)
    # Without topk: it needs two slots, and a graph can fuse this.
    is_best = torch.arange(sure.shape[-1], device=sure.device)[None, :] == at[:, None]
    second = sure.masked_fill(is_best, 0.0).amax(dim=-1)
    return torch.stack((best, entropy, best - second), dim=-1)


def in_weights_dtype(x: Tensor, layer: nn.Linear) -> Tensor:
    """The dtype rule: float32 `x` in the layer's dtype, outside autocast only; there autocast casts, once.

    Casting inside autocast as well would round twice where its dtype and the weights' differ.
    """
    return x if torch.is_autocast_enabled(x.device.type) else x.to(layer.weight.dtype)


class DecisionHead(nn.Module):
    """One logit for each marker slot."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = linear(config.hidden_size, config.hidden_size, bias=True)
        self.norm = norm(config)
        self.score = linear(config.hidden_size, 1, bias=True)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """`(batch, slots, hidden)` to float32 `(batch, slots)`, `LOWEST` where there is no option."""
        scores = self.score(self.norm(F.gelu(self.dense(states)))).squeeze(-1)
        return scores.float().masked_fill(~mask, LOWEST)  # type: ignore[no-any-return]


class ActionHead(nn.Module):
    """What to do with the decision: one logit for each action."""

    def __init__(self, config: EncoderConfig, actions: int) -> None:
        super().__init__()
        self.dense = linear(config.hidden_size + FEATURES, config.hidden_size, bias=True)
        self.out = linear(config.hidden_size, actions, bias=True)

    def forward(self, pooled: Tensor, features: Tensor) -> Tensor:
        """`(batch, hidden)` and float32 `(batch, 3)` to float32 `(batch, actions)`; joined in float32."""
        joined = torch.cat((pooled.float(), features), dim=-1)
        return self.out(F.gelu(self.dense(in_weights_dtype(joined, self.dense)))).float()  # type: ignore[no-any-return]
