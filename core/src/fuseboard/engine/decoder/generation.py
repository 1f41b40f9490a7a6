"""How `QwenDecoder` generates: its tokens, whoever chooses them, and the steps one after the other."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, TypeAlias

import attrs
import torch
from torch import Tensor

from fuseboard.call import autocast
from fuseboard.engine.decoder.config import ids_of
from fuseboard.engine.sampling import Sampler, State, Step
from fuseboard.engine.sampling.draws import raise_if_invalid
from fuseboard.errors import InputError

if TYPE_CHECKING:
    from fuseboard.engine.decoder.fixed import FixedCache
    from fuseboard.engine.decoder.kv_cache import KVCache
    from fuseboard.engine.decoder.model import QwenDecoder
    from fuseboard.engine.decoder.whole_step import Ahead

__all__ = ["Chooser", "Draw", "Token", "check_ids", "check_range", "steps"]

_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})

_ROOM = 1024
"""For how many new tokens a fixed cache has room at first."""

Draw: TypeAlias = Callable[[Tensor, int], Tensor]
"""Fp32 logits `(batch, vocab)` and the step's number to ids, `(batch,)` or `(batch, 1)`, without waiting."""


@attrs.frozen(eq=False)
class Token:
    """One step of a batch.

    Attributes:
        index: 0 for the first token after the prompt.
        ids: One a row; the padding id for rows that had ended before.
        ended: Which rows have, this step included.
        tensor: The ids on the device, `(batch, 1)`. Not to be written: the next step reads it.
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
        if draw is not None and (not callable(draw) or isinstance(draw, type)):
            msg = f"sampler is {sampler!r}; expected a Sampler, a function of logits and step, or None."
            raise InputError("sampler", msg)
        ends = ids_of(eos, "eos") if eos is not None else base.eos_token_id or model[0]
        if pad is None:
            pad = base.pad_token_id if base.pad_token_id is not None else model[1]
        own = base.pad_token_id
        return cls(attrs.evolve(base, eos_token_id=ends, pad_token_id=pad if ends else own), draw)

    def check_pad(self, vocab: int) -> None:
        """Raise unless a row that has ended can go on: its padding id is the next step's input.

        Raises:
            InputError: The padding id is not of the vocabulary, and a row can end.
        """
        ends = self.sampler.eos_token_id
        pad = self.sampler.pad_token_id
        pad = ends[0] if pad is None and ends else pad
        if pad is not None and not 0 <= pad < vocab and any(0 <= each < vocab for each in ends):
            msg = f"pad is {pad}, which rows that have ended would go on with; expected an id of 0 to {vocab - 1}."
            raise InputError("pad", msg)

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
        if not isinstance(ids, Tensor) or ids.numel() != batch or ids.dtype not in _INTEGERS:
            shown = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            msg = f"the sampler gave {shown}; expected one integer id a row, ({batch},) or ({batch}, 1)."
            raise InputError("sampler", msg)
        if ids.device != logits.device:
            msg = f"the sampler gave ids on {ids.device}; expected them on {logits.device}, where the logits are."
            raise InputError("sampler", msg)
        check_range("the sampler gave", "sampler", ids, logits.shape[1])
        # Put through the sampler as logits that leave it no choice, so that ends and padding have one meaning.
        certain = torch.full_like(logits, -torch.inf).scatter_(1, ids.reshape(-1, 1).long(), 0.0)
        return self.sampler(certain, state)


def check_range(what: str, argument: str, ids: Tensor, vocab: int) -> None:
    """Raise unless ids are of the vocabulary, if they are on the CPU: elsewhere a look would wait.

    Raises:
        InputError: They are not.
    """
    if ids.device.type == "cpu":
        low, high = (int(each) for each in ids.aminmax())
        if low < 0 or high >= vocab:
            msg = f"{what} {low if low < 0 else high}; expected ids of the vocabulary, 0 to {vocab - 1}."
            raise InputError(argument, msg)


def check_count(name: str, given: object, least: int) -> None:
    """Raise unless an argument is a count.

    Raises:
        InputError: It is none.
    """
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        msg = f"{name} is {given!r}; expected an int of {'0 or more' if not least else f'at least {least}'}."
        raise InputError(name, msg)


def check_ids(ids: Tensor, device: torch.device | None = None) -> None:
    """Raise unless these are ids.

    Args:
        ids: Whatever was given.
        device: Where they have to be; None for anywhere.

    Raises:
        InputError: They are not, or are elsewhere.
    """
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32) or 0 in ids.shape:  # noqa: PLR2004
        shown = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        msg = f"ids is {shown}; expected a tensor, int64 (batch, length), neither of them 0."
        raise InputError("ids", msg)
    if device is not None and ids.device != device:
        msg = f"ids is on {ids.device}; expected it on {device}, where the decoder is."
        raise InputError("ids", msg)


def check_autocast(device: torch.device) -> None:
    """Raise where autocast is on: a pass would be made in other dtypes than its weights', a captured one for good.

    Raises:
        RuntimeError: It is.
    """
    if autocast(device):
        msg = "QwenDecoder computes in the dtype of its weights; leave autocast, and load it with dtype= instead."
        raise RuntimeError(msg)


class _Reading:
    """A step's ids on their way to the host: `State.read` in two parts, so that the next step can be launched between.

    What the host is to see is copied now, since the next step changes the state's tensors; and to the host on a stream
    of its own, since a GPU takes some 15 us from computing to copying and back.
    """

    def __init__(self, state: State, ids: Tensor, beside: torch.cuda.Stream | None) -> None:
        self._batch = state.finished.shape[0]
        values = torch.cat([ids.reshape(-1), state.finished.long(), state.invalid.long()])
        self._event: torch.cuda.Event | None = None
        self._held = values  # until the copy has ended
        if beside is not None:
            there = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            beside.wait_stream(torch.cuda.current_stream(values.device))
            with torch.cuda.stream(beside):
                there.copy_(values, non_blocking=True)
            self._event = beside.record_event()
            values = there
        self._values = values

    def wait(self) -> Step:
        """The one wait of a step."""
        if self._event is not None:
            self._event.synchronize()
        values, batch = self._values.tolist(), self._batch
        raise_if_invalid([bool(each) for each in values[-2:]])
        return Step(tuple(values[:batch]), tuple(bool(each) for each in values[batch:-2]))


def steps(
    decoder: QwenDecoder, ids: Tensor, cache: KVCache, chooser: Chooser, state: State, most: int, *, ahead: bool
) -> Generator[Token, None, None]:
    """Generate; what `QwenDecoder.stream` gives.

    Args:
        decoder: Prepared.
        ids: The prompts, on its device.
        cache: New.
        chooser: Chooses.
        state: Its own.
        most: How many tokens at most.
        ahead: Whether a step may be launched before the ids of the one before are read.
    """
    request = _Request(decoder, ids, cache, chooser, state, ahead=ahead and chooser.draw is None)
    room = ids.shape[1] + min(most, _ROOM)
    try:
        for index in range(most):
            # Entered anew for each step: a generator shares its consumer's thread, so no mode may be on while it waits.
            with torch.inference_mode(mode=False), torch.no_grad():
                if index == 1:
                    request.take_over(room)
                request.choose(index)
                step = request.read(last=index + 1 == most)
            yield Token(index, step.ids, step.finished, request.ids)
            if step.done and chooser.ends:
                return
    finally:
        request.end()


class _Request:
    """One generation.

    Attributes:
        ids: What was chosen last, `(batch, 1)`; the prompts before.
    """

    def __init__(
        self, decoder: QwenDecoder, ids: Tensor, cache: KVCache, chooser: Chooser, state: State, *, ahead: bool
    ) -> None:
        self.ids = ids
        self._decoder, self._cache, self._chooser, self._state = decoder, cache, chooser, state
        self._ahead = ahead
        self._whole = decoder._whole_for(cache)
        self._held: FixedCache | None = None
        self._coming: Ahead | None = None
        self._beside = torch.cuda.Stream(ids.device) if self._ahead and ids.is_cuda else None  # type: ignore[no-untyped-call]

    def take_over(self, room: int) -> None:
        """After the prompt: a fixed cache for whole steps, if they are asked for."""
        if self._whole is not None:
            self._held = self._whole.take(self._cache, room)
            if self._chooser.draw is None:
                self._state = self._whole.start(self._held, self._chooser.sampler, self._state)

    def choose(self, index: int) -> None:
        """Make a step, unless it was launched already."""
        chooser, whole, held = self._chooser, self._whole, self._held
        if self._coming is not None:
            self.ids, self._coming = self._coming.taken(), None
        elif held is None or whole is None:
            self.ids = chooser.choose(self._decoder._next(self.ids, self._cache)[:, -1].float(), self._state, index)
        elif chooser.draw is None:
            self.ids = whole.draw(self.ids, held, chooser.sampler, self._state)
        else:
            self.ids = chooser.choose(whole(self.ids, held)[:, -1].float(), self._state, index)

    def read(self, *, last: bool) -> Step:
        """The one wait of a step; the next is launched before, where that is wanted."""
        if last or not self._ahead or self._held is None or self._whole is None:
            return self._state.read(self.ids)
        reading = _Reading(self._state, self.ids, self._beside)
        self._coming = self._whole.ahead(self.ids, self._held, self._chooser.sampler, self._state)
        step = reading.wait()
        if step.done and self._chooser.ends:
            self._undo()  # before anybody can look
        return step

    def _undo(self) -> None:
        if self._coming is not None:
            self._coming.undo()
            self._coming = None

    def end(self) -> None:
        """It is over: what was launched and not asked for leaves no trace, and the next request may have the cache."""
        self._undo()
        if self._held is not None and self._whole is not None:
            if self._decoder.graphs in ("step", "step-eager"):  # else nobody would take it again
                self._whole.give_back(self._held)
            self._held = None
