"""What a batch being decoded keeps on its device, and the one wait in which the host reads it."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from fuseboard.engine.sampling.draws import raise_if_invalid
from fuseboard.errors import InputError

__all__ = ["State", "Step"]


@attrs.frozen
class Step:
    """One step as the host sees it.

    Attributes:
        ids: One a row; the padding id for rows that had finished before.
        finished: Which rows have, this step included.
    """

    ids: tuple[int, ...]
    finished: tuple[bool, ...]

    @property
    def done(self) -> bool:
        """Whether every row has finished."""
        return all(self.finished)


@attrs.define(eq=False, kw_only=True)
class State:
    """One batch being decoded: what a step changes in place, all of it on the device. From `Sampler.start`.

    Attributes:
        generator: What draws are made with; None is torch's default generator.
        vocab: How many columns the logits have.
        finished: Bool `(batch,)`, rows that have drawn an end-of-sequence id.
        invalid: Bool `(2,)`, what torch.multinomial would have raised; see `new_invalid`.
        count: Int64 `()`, the steps made.
        seen_and_beyond: Bool `(batch, vocab + 1)`, the ids in prompt and output, all beyond the vocabulary in the last
            column; None without a repetition penalty.
        masks: Bool `(vocab,)` for each list of ids that the sampler has.
        lists: Those lists: a sampler with others cannot go on with this state.
    """

    generator: torch.Generator | None
    vocab: int
    finished: Tensor
    invalid: Tensor
    count: Tensor
    seen_and_beyond: Tensor | None
    masks: dict[str, Tensor]
    lists: tuple[tuple[int, ...], ...]

    @property
    def seen(self) -> Tensor | None:
        """The mask that `repetition_penalty_seen` takes, `(batch, vocab)`."""
        return None if self.seen_and_beyond is None else self.seen_and_beyond[:, : self.vocab]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that a step changes in place: what a graph's warm-up has to restore."""
        changed = (self.finished, self.invalid, self.count)
        return changed if self.seen_and_beyond is None else (*changed, self.seen_and_beyond)

    def read(self, ids: Tensor) -> Step:
        """Wait for the device, once, and bring over a step's ids, who has finished, and whether a draw was invalid.

        Args:
            ids: What the sampler returned, `(batch, 1)`.

        Raises:
            DrawError: In torch.multinomial's words. The generator has moved on, which with torch it has not. `invalid`
                is False again, so that the state can go on.
            InputError: These are not one id a row.
        """
        batch = self.finished.shape[0]
        if not isinstance(ids, Tensor) or ids.numel() != batch or ids.is_floating_point():
            shown = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
            msg = f"ids is {shown}; expected what the sampler returned, int64 ({batch}, 1)."
            raise InputError("ids", msg)
        values = torch.cat([ids.reshape(-1), self.finished.long(), self.invalid.long()]).tolist()
        if any(values[-2:]):
            self.invalid.zero_()
            raise_if_invalid([bool(each) for each in values[-2:]])
        return Step(tuple(values[:batch]), tuple(bool(each) for each in values[batch:-2]))
