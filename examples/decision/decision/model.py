"""The decision model: four tensors in, two heads' logits out. Tokens, padding, temperatures and answers are outside."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor, nn

from decision.config import EncoderConfig
from decision.encoder import Encoder
from decision.heads import ActionHead, DecisionHead, confidence, marked

__all__ = ["DecisionModel", "Logits"]


Logits: TypeAlias = tuple[Tensor, Tensor]
"""What the two heads say, float32: `(batch, slots)` of the decision and `(batch, actions)`."""


class DecisionModel(nn.Module):
    """Encoder, marker pooling, two heads.

    Attributes:
        model: The encoder, called so because transformers calls it that in its checkpoints.
        actions: How many actions there are.
        right: The real tokens of each row come first, as `collate` puts them. False takes padding anywhere.
    """

    def __init__(self, config: EncoderConfig, actions: int = 3, *, right: bool = False) -> None:
        super().__init__()
        self.config, self.actions, self.right = config, actions, right
        self.model = Encoder(config)
        self.decision_head = DecisionHead(config)
        self.action_head = ActionHead(config, actions)
        self.requires_grad_(requires_grad=False)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None, marker_positions: Tensor, marker_mask: Tensor
    ) -> Logits:
        """Both heads' logits.

        Args:
            input_ids: `(batch, length)`, int64.
            attention_mask: `(batch, length)`, not 0 for a real token; None when all are.
            marker_positions: `(batch, slots)`, int64: where in the row each option's marker is.
            marker_mask: `(batch, slots)`, bool, True for a slot with an option.
        """
        hidden = self.model(input_ids, attention_mask, right=self.right)
        decision = self.decision_head(marked(hidden, marker_positions, marker_mask), marker_mask)
        action = self.action_head(hidden[:, 0], confidence(decision, marker_mask))
        return decision, action
