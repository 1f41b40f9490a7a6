"""What `QwenDecoder` gives and takes while it generates: its tokens, and whoever chooses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import attrs
import torch
from torch import Tensor

from fuseboard.engine.decoder.config import ids_of
from fuseboard.engine.sampling import Sampler, State
from fuseboard.errors import InputError

__all__ = ["Chooser", "Draw", "Token", "check_ids"]

Draw: TypeAlias = Callable[[Tensor, int], Tensor]
"""Fp32 logits `(batch, vocab)` and the step's number to ids, `(batch,)` or `(batch, 1)`, without waiting."""


@attrs.frozen(eq=False)
class Token:
    """One step of a batch.

    Attributes:
        index: 0 for the first token after the prompt.
        ids: One a row; the padding id for rows that had ended before.
        ended: Which rows have, this step included.
        tensor: The ids on the device, `(batch, 1)`.
    """

    index: int
    ids: tuple[int, ...]
    ended: tuple[bool, ...]
    tensor: Tensor


@attrs.frozen
class Chooser:
    """How ids are chosen from logits.

    Attributes:
        sampler: Knows the ends; draws too unless `draw` does.
        draw: The caller's own function.
    """

    sampler: Sampler
    draw: Draw | None = None

    @classmethod
    def of(
        cls,
        sampler: Sampler | Draw | None,
        eos: int | Iterable[int] | None,
        pad: int | None,
        model: tuple[tuple[int, ...], int | None],
    ) -> Chooser:
        """From a request's arguments, which come first, then the sampler's own, then the model's.

        Raises:
            InputError: The sampler is neither a Sampler nor a function.
        """
        draw = None if sampler is None or isinstance(sampler, Sampler) else sampler
        base = sampler if isinstance(sampler, Sampler) else Sampler(do_sample=False)
        if draw is not None and not callable(draw):
            msg = f"sampler is {sampler!r}; expected a Sampler, a function of logits and step, or None."
            raise InputError("sampler", msg)
        ends = ids_of(eos) if eos is not None else base.eos_token_id or model[0]
        if pad is None:
            pad = base.pad_token_id if base.pad_token_id is not None else model[1]
        own = base.pad_token_id
        return cls(attrs.evolve(base, eos_token_id=ends, pad_token_id=pad if ends else own), draw)

    @property
    def ends(self) -> bool:
        """Whether any id ends a row."""
        return bool(self.sampler.eos_token_id)

    def choose(self, logits: Tensor, state: State, index: int) -> Tensor:
        """Ids of the step, `(batch, 1)`; rows that have ended get the padding id."""
        if self.draw is None:
            return self.sampler(logits, state)
        ids = self.draw(logits, index)
        batch = logits.shape[0]
        if not isinstance(ids, Tensor) or ids.numel() != batch or ids.is_floating_point():
            shown = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            msg = f"the sampler gave {shown}; expected one integer id a row, ({batch},) or ({batch}, 1)."
            raise InputError("sampler", msg)
        # Put through the sampler as logits that leave it no choice, so that ends and padding have one meaning.
        certain = torch.full_like(logits, -torch.inf).scatter_(1, ids.reshape(-1, 1).long(), 0.0)
        return self.sampler(certain, state)


def check_ids(ids: Tensor) -> None:
    """Raise unless these are ids.

    Raises:
        InputError: They are not.
    """
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32) or 0 in ids.shape:  # noqa: PLR2004
        shown = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        msg = f"ids is {shown}; expected int64 (batch, length), neither of them 0."
        raise InputError("ids", msg)
