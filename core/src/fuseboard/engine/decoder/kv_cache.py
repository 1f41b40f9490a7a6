"""The keys and values of one batch: they grow in place, and attention gets views of them.

transformers joins the old and the new keys into a new tensor at every step, which copies the whole cache once a token.
Here a layer's buffer grows by half when it is full, so that a token costs its own copy; a sliding layer keeps what its
window can still see. The keys that attention sees are those of transformers' `DynamicCache`, and so are its bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from fuseboard.errors import InputError
from fuseboard.masks import Padding, mask_for

__all__ = ["KVCache", "RealKeys", "as_one"]

_BLOCK = 64


@attrs.frozen(eq=False)
class RealKeys:
    """Which tokens of a prompt are real, where some are padding. From `RealKeys.of`.

    Attributes:
        keys: Bool `(batch, length)`, on the decoder's device.
        positions: Int64 `(batch, length)`, each token's place among its row's real ones; padding has some place too.
        counts: Int64 `(batch, 1)`, how many real tokens a row has.
        longest: The most that any row has of the first 0, 1, … tokens; where that was not read, 0, 1, ….
        padding: On which side the padding lies, where that is known.
    """

    keys: Tensor
    positions: Tensor
    counts: Tensor
    longest: tuple[int, ...]
    padding: Padding | None

    @classmethod
    def of(
        cls, attention_mask: Tensor | None, shape: tuple[int, int], device: torch.device, padded: bool | None
    ) -> RealKeys | None:
        """From an attention mask; None when nothing is padding.

        Args:
            attention_mask: `(batch, length)`, 0 for padding; or None. On the CPU it is read without waiting.
            shape: The prompt's, which the mask must have.
            device: Where the decoder is.
            padded: Whether any token is padding: None reads the mask, which waits for the device if it lies there.
                With True nothing is read, and a mask on a device may have its padding anywhere.

        Raises:
            InputError: The mask's shape is not the prompt's.
        """
        if attention_mask is None or padded is False:
            return None
        if not isinstance(attention_mask, Tensor):
            msg = f"attention_mask is a {type(attention_mask).__name__}; expected a tensor of shape {tuple(shape)}."
            raise InputError("attention_mask", msg)
        if tuple(attention_mask.shape) != tuple(shape):
            msg = (
                f"attention_mask has shape {tuple(attention_mask.shape)}; expected {tuple(shape)}, that of the prompt."
            )
            raise InputError("attention_mask", msg)
        keys = attention_mask != 0
        padding: Padding | None = None
        longest = tuple(range(shape[1] + 1))
        if padded is None or keys.device.type == "cpu":
            info = mask_for(0, shape[1], keys=keys).info  # reads whether there is padding, and on which side
            if info.keys is None:
                return None
            padding = info.padding
            if keys.device.type == "cpu":
                longest = (0, *keys.cumsum(-1).amax(0).tolist())
        keys = keys.to(device, non_blocking=True)
        sums = keys.long().cumsum(-1)
        return cls(keys, (sums - 1).clamp(min=0), sums[:, -1:], longest, padding)


class KVCache:
    """One batch's keys and values, layer by layer. Made by `QwenDecoder.cache`.

    A forward pass that raised leaves it half written: it says so when it is used again.

    Attributes:
        length: How many tokens it has seen, padding included.
        real: Which of the prompt's were real; None when all were.
    """

    def __init__(
        self, windows: Sequence[int | None], batch: int, *, real: RealKeys | None = None, reserve: int = 0
    ) -> None:
        """Prepare; memory is taken when the first keys come.

        Args:
            windows: Each layer's window, or None.
            batch: How many rows.
            real: Which tokens of the prompt are real.
            reserve: For how many tokens to take memory at first.
        """
        self.batch = batch
        self.length = 0
        self.real = real
        self._windows = windows
        self._layers = [_Layer(window, reserve) for window in windows]
        self._keys = None if real is None else real.keys
        self._writing = False

    def begin(self) -> None:
        """A forward pass begins.

        Raises:
            RuntimeError: The pass before it did not end.
        """
        self.check_whole()
        self._writing = True

    def check_whole(self) -> None:
        """Raise unless its layers have taken in the same tokens.

        Raises:
            RuntimeError: The pass before did not end.
        """
        if self._writing:
            msg = "this cache was left half written by a pass that raised, or is in use by another; make a new one."
            raise RuntimeError(msg)

    def misfit(
        self, windows: Sequence[int | None], heads: tuple[int, int], kind: tuple[torch.dtype, torch.device]
    ) -> str | None:
        """Why it is not a cache for a decoder, or None.

        Args:
            windows: The decoder's, layer by layer.
            heads: Its key heads and head dim.
            kind: Its dtype and device.
        """
        if self._windows != windows:
            return "it is for other layers"
        both = self._layers[0].both if self._layers else None
        if both is None:
            return None
        if (both.shape[2], both.shape[4]) != heads:
            return f"it has {both.shape[2]} key heads of {both.shape[4]}, and the decoder {heads[0]} of {heads[1]}"
        if (both.dtype, both.device) != kind:
            return f"it is {both.dtype} on {both.device}, and the decoder {kind[0]} on {kind[1]}"
        return None

    def end(self, new: int) -> None:
        """The pass is over."""
        self.length += new
        self._writing = False

    def kept(self, window: int | None) -> int:
        """How many of the tokens seen so far a layer still attends to."""
        return self.length if window is None else min(self.length, window - 1)

    def real_keys(self, start: int, stop: int) -> Tensor | None:
        """Which tokens of that range are real; None when all of the prompt's were."""
        keys = self._keys
        if keys is None:
            return None
        if stop > keys.shape[1]:
            # The prompt's mask goes on with real tokens, in blocks, so that most steps write nothing.
            more = torch.ones(keys.shape[0], stop - keys.shape[1] + 4 * _BLOCK, dtype=torch.bool, device=keys.device)
            self._keys = keys = torch.cat((keys, more), dim=1)
        return keys[:, start:stop]

    def positions(self, new: int, device: torch.device) -> Tensor:
        """The places of the next `new` tokens, int64 `(batch or 1, new)`."""
        past, real = self.length, self.real
        if real is None:
            return torch.arange(past, past + new, device=device)[None]
        prompt = real.keys.shape[1]
        after = max(past + new - max(past, prompt), 0)
        later = real.counts + torch.arange(max(past - prompt, 0), max(past - prompt, 0) + after, device=device)
        return later if past >= prompt else torch.cat((real.positions[:, past : past + new], later), dim=1)

    def longest(self, new: int) -> int:
        """The length of the longest row once `new` more tokens are there."""
        total = self.length + new
        if self.real is None:
            return total
        prompt = self.real.keys.shape[1]
        return self.real.longest[min(total, prompt)] + max(total - prompt, 0)

    def put(self, layer: int, k: Tensor, v: Tensor, both: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Take in a layer's new keys and values, and give all that it attends to.

        Args:
            layer: Which.
            k: `(batch, kv_heads, new, head_dim)`.
            v: Likewise.
            both: What `as_one` gives for them, where the caller knows it.
        """
        held = self._layers[layer]
        return held.put(k, v, as_one(k, v) if both is None else both, self.kept(held.window))

    def held(self, layer: int) -> Tensor:
        """The keys and values that a layer still attends to: a view, `(2, batch, kv_heads, kept, head_dim)`."""
        held = self._layers[layer]
        kept = self.kept(held.window)
        return held.both.narrow(3, held.stop - kept, kept)

    def release(self) -> None:
        """Let go of its memory. It is of no use any more."""
        self._writing = True
        self._layers.clear()

    @property
    def nbytes(self) -> int:
        """How much memory the keys and values take."""
        return sum(each.both.nbytes for each in self._layers if each.both is not None)


def as_one(k: Tensor, v: Tensor) -> Tensor | None:
    """Keys and values as one tensor, `(2, …)`, if they lie alike in one memory; then one copy takes in both."""
    if k.shape != v.shape or k.stride() != v.stride() or k.dtype != v.dtype:
        return None
    start = k.storage_offset()
    apart = v.storage_offset() - start
    if apart <= 0 or k.untyped_storage()._cdata != v.untyped_storage()._cdata:
        return None
    return k.as_strided((2, *k.shape), (apart, *k.stride()), start)


class _Layer:
    """A layer's buffer, keys and values. Its tokens end at `stop`; those before what is kept are left over."""

    __slots__ = ("both", "reserve", "stop", "window")

    def __init__(self, window: int | None, reserve: int) -> None:
        self.window = window
        self.reserve = reserve
        self.both: Tensor = None  # type: ignore[assignment]  # (2, batch, kv_heads, capacity, head_dim)
        self.stop = 0

    def put(self, k: Tensor, v: Tensor, both: Tensor | None, kept: int) -> tuple[Tensor, Tensor]:
        new = k.shape[2]
        total = kept + new
        if self.both is None or self.stop + new > self.both.shape[3] or self._too_large(total):
            self._make_room(k, kept, total)
        place = self.both.narrow(3, self.stop, new)
        if both is not None:
            place.copy_(both)
        else:
            place[0].copy_(k)
            place[1].copy_(v)
        self.stop += new
        keys, values = self.both.narrow(3, self.stop - total, total).unbind(0)
        return keys, values

    def _most(self, total: int) -> int:
        """How many tokens a buffer is ever for: twice a window, so that one move a window is all it costs."""
        return max(total, 2 * self.window + _BLOCK) if self.window is not None else 2**62

    def _too_large(self, total: int) -> bool:
        return self.window is not None and self.both.shape[3] > self._most(total)

    def _make_room(self, k: Tensor, kept: int, total: int) -> None:
        before = 0 if self.both is None else self.both.shape[3]
        wanted = max(total, self.reserve, before + before // 2)
        capacity = min(-(-wanted // _BLOCK) * _BLOCK, self._most(total))
        old = self.both
        with torch.inference_mode(mode=False):  # later passes write into it, in whatever mode they are made
            self.both = k.new_empty(2, *k.shape[:2], capacity, k.shape[3])
        if kept:
            self.both[:, :, :, :kept] = old[:, :, :, self.stop - kept : self.stop]
        self.stop = kept
