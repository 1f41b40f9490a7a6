"""A step of one token over a cache of fixed capacity: the same shapes and addresses each time, lengths on the device.

So all of a step can be one CUDA graph. Each row's real tokens lie from slot 0 on, whatever padding its prompt had, and
a token's slot is its position; so attention is told a length for each row, which a kernel such as flash-attn takes as
it is. A sliding layer's buffer is a ring of its window: attention does not ask in which order keys lie.

The numbers are those of a call over all slots with a mask: another kernel may answer it than answers the growing cache,
so they are the growing cache's but for rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor, nn

from fuseboard.engine.decoder.generation import check_autocast, check_ids
from fuseboard.engine.decoder.kernels.glue import Glue, Turn
from fuseboard.engine.decoder.kernels.launch import on
from fuseboard.engine.decoder.kernels.products import Products
from fuseboard.engine.decoder.layers import Given, untouched
from fuseboard.errors import InputError
from fuseboard.masks import MaskInfo

if TYPE_CHECKING:
    from fuseboard.engine.decoder.kernels.exact import ExactGlue
    from fuseboard.engine.decoder.kv_cache import KVCache
    from fuseboard.engine.decoder.model import QwenDecoder

__all__ = ["FixedCache", "Lengths", "Part", "capacity_for", "misfit", "step"]

_BLOCK = 256


def capacity_for(tokens: int) -> int:
    """How many slots are taken for so many tokens: whole blocks, so that requests of like length share a graph."""
    return -(-tokens // _BLOCK) * _BLOCK


@attrs.frozen(eq=False)
class Lengths(MaskInfo):
    """Right padding whose lengths are known: a captured kernel need not count the keys anew in every layer.

    Attributes:
        counts: Int32 `(batch,)`, how many real keys each row has.
    """

    counts: Tensor = attrs.field(kw_only=True)

    def lengths(self) -> Tensor:
        """The counts."""
        return self.counts


@attrs.define(eq=False)
class Part:
    """The buffers of the layers of one kind.

    Attributes:
        window: What its layers see at most; None for everything.
        size: How many slots.
        both: Keys and values, `(2, layers, batch, kv_heads, size, head_dim)`.
        slots: Int32 `(size,)`, 0, 1, ….
        keys: The first of both.
        values: The second.
    """

    window: int | None
    size: int
    both: Tensor
    slots: Tensor
    keys: Tensor = attrs.field(init=False)
    values: Tensor = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.keys, self.values = self.both[0], self.both[1]

    @classmethod
    def made(
        cls, window: int | None, capacity: int, layers: int, batch: int, heads: tuple[int, int], dtype: torch.dtype,
        device: torch.device,
    ) -> Part:  # fmt: skip
        """Zeros: a key that a mask hides must be a number still."""
        size = capacity if window is None else min(window, capacity)
        both = torch.zeros(2, layers, batch, heads[0], size, heads[1], dtype=dtype, device=device)
        return cls(window, size, both, torch.arange(size, dtype=torch.int32, device=device))

    def given(self, positions: Tensor, glue: Glue | None = None) -> Given:
        """What attention is told when the next token of each row is at these positions."""
        if glue is not None:
            counts, keys = glue.lengths(positions, self.size)
        else:
            counts = (positions + 1).clamp(max=self.size).int()
            keys = self.slots < counts[:, None]
        return Given(mask=keys[:, None, None, :], info=Lengths(keys, padding="right", counts=counts))

    def put(self, layer: int, k: Tensor, v: Tensor, slots: Tensor, exact: ExactGlue | None) -> tuple[Tensor, Tensor]:
        """Take in `(batch, kv_heads, 1, head_dim)` at each row's slot; give the whole buffers.

        Args:
            layer: Which, among those of its kind.
            k: The keys.
            v: The values.
            slots: Int64 `(batch,)`.
            exact: Kernels, where they serve.
        """
        keys, values = self.keys[layer], self.values[layer]
        if exact is not None and k.stride(-1) == v.stride(-1) == 1:
            exact.place(k, v, slots, keys, values)
            return keys, values
        place = slots[:, None, None, None].expand(k.shape)
        keys.scatter_(2, place, k)
        values.scatter_(2, place, v)
        return keys, values


def misfit(cache: KVCache, windows: list[int | None]) -> str | None:
    """Why a fixed cache cannot go on from this one, or None."""
    if cache.real is not None and cache.real.padding != "left" and any(each is not None for each in windows):
        return "padding elsewhere than on the left, in a model with sliding layers, whose windows count it"
    return None


class FixedCache:
    """One batch's keys and values in buffers that stay where they are. Made by `QwenDecoder.fixed`.

    Attributes:
        batch: How many rows.
        capacity: How many tokens a row can have; it doubles when it is full, and the next step is captured anew.
        length: How many the longest row has at most.
        positions: Int64 `(batch,)`, on the device: how many each row has, and so where its next one goes.
        parts: The buffers, by kind of layer.
        cos: `(capacity, head_dim)`, the rotary embedding's, for every position.
        sin: Likewise, `signed`.
        fits: What a decoder must be that steps over it.
    """

    def __init__(self, decoder: QwenDecoder, batch: int, capacity: int) -> None:
        """Take memory for so many rows and tokens."""
        self.batch = batch
        self.capacity = capacity
        self.length = 0
        self.fits = fits(decoder)
        with torch.inference_mode(mode=False), torch.no_grad():
            self.positions = torch.zeros(batch, dtype=torch.int64, device=decoder.device)
            self._make(decoder)

    def _make(self, decoder: QwenDecoder) -> None:
        config, device = decoder.config, decoder.device
        shape = (config.num_key_value_heads, config.head_dim)
        self.parts = {
            kind: Part.made(
                config.window_of(kind), self.capacity, config.layer_types.count(kind), self.batch, shape,
                decoder.dtype, device,
            )
            for kind in sorted(set(config.layer_types))
        }  # fmt: skip
        # A layer's place among those of its kind.
        self.index = [config.layer_types[:layer].count(kind) for layer, kind in enumerate(config.layer_types)]
        cos, sin = decoder.rotation(torch.arange(self.capacity, device=device)[None], 1)
        self.cos, self.sin = cos[0, :, 0].contiguous(), sin[0, :, 0].contiguous()
        self._stretched = False

    @property
    def nbytes(self) -> int:
        """How much memory the keys and values take."""
        return sum(each.both.nbytes for each in self.parts.values())

    @torch.no_grad()
    def fill(self, decoder: QwenDecoder, cache: KVCache) -> None:
        """Take over what a growing cache holds; what this one held is gone.

        Raises:
            InputError: It cannot be taken over; the message says why.
            RuntimeError: It was left half written.
        """
        cache.check_whole()
        windows, shape = decoder._windows, (decoder.config.num_key_value_heads, decoder.config.head_dim)
        why = misfit(cache, windows) or cache.misfit(windows, shape, (decoder.dtype, decoder.device))
        if why is None and cache.batch != self.batch:
            why = f"it has {cache.batch} rows, and the fixed one {self.batch}"
        if why is None and cache.length > self.capacity:
            why = f"it has {cache.length} tokens, and the fixed one room for {self.capacity}"
        if why is not None:
            msg = f"the cache cannot be taken over: {why}."
            raise InputError("cache", msg)
        with torch.inference_mode(mode=False):
            real, device = cache.real, decoder.device
            counts = torch.full((self.batch,), cache.length, device=device)
            seen = cache.real_keys(0, cache.length)
            if seen is not None:
                counts = seen.sum(-1)
            self.positions.copy_(counts)
            self.length = cache.length if real is None else cache.longest(0)
            for kind, part in self.parts.items():
                part.both.zero_()
                layers = [layer for layer, each in enumerate(decoder.config.layer_types) if each == kind]
                kept = cache.kept(part.window)
                if not kept:
                    continue
                order = None
                if seen is not None:  # real ones first, in their order: their number is not asked of the device
                    order = (~seen[:, cache.length - kept :]).to(torch.uint8).argsort(dim=-1, stable=True)
                place = self._places(part, kept, counts, seen)
                for index, layer in enumerate(layers):
                    _copy(part.both[:, index], cache.held(layer), order, place)

    def _places(self, part: Part, kept: int, counts: Tensor, seen: Tensor | None) -> Tensor | None:
        """For a ring that has come round: the slot of each of the tokens kept, `(batch, kept)`."""
        if part.window is None or self.length < part.size:
            return None
        # The last `kept` positions of each row, the oldest first. Rows with fewer have what is left over behind them,
        # which then lands in slots that are written before they are seen.
        first = counts - (kept if seen is None else seen[:, -kept:].sum(-1))
        return (first[:, None] + torch.arange(kept, device=counts.device)) % part.size

    def grow(self, decoder: QwenDecoder) -> None:
        """Twice the capacity, with the same tokens, in buffers that lie elsewhere."""
        larger = FixedCache(decoder, self.batch, 2 * self.capacity)  # if there is no memory, this one stays as it is
        with torch.inference_mode(mode=False), torch.no_grad():
            for kind, part in larger.parts.items():
                part.both[..., : self.parts[kind].size, :] = self.parts[kind].both
        self.capacity, self.parts, self._stretched = larger.capacity, larger.parts, False
        self.cos, self.sin = larger.cos, larger.sin

    def prepare(self, decoder: QwenDecoder) -> bool:
        """Before a step, on the host: room for the token, and numbers that depend on the length; whether it grew."""
        grew = self.length >= self.capacity
        if grew:
            self.grow(decoder)
        rope = decoder.config.rope
        outgrown = rope.kind == "dynamic" and self.length + 1 > rope.trained
        if outgrown or self._stretched:  # if not outgrown: a longer request had this cache before
            with torch.inference_mode(mode=False), torch.no_grad():
                places = torch.arange(self.capacity, device=self.positions.device)[None]
                cos, sin = decoder.rotation(places, self.length + 1)
                self.cos.copy_(cos[0, :, 0])
                self.sin.copy_(sin[0, :, 0])
            self._stretched = outgrown
        return grew


def _copy(mine: Tensor, theirs: Tensor, order: Tensor | None, place: Tensor | None) -> None:
    """One layer's kept tokens, `(2, batch, kv_heads, kept, head_dim)`, into its buffer."""
    if order is not None:
        theirs = theirs.gather(3, order[None, :, None, :, None].expand(theirs.shape))
    if place is None:
        mine[:, :, :, : theirs.shape[3]] = theirs
    else:
        mine.scatter_(3, place[None, :, None, :, None].expand(theirs.shape), theirs)


def fits(decoder: QwenDecoder) -> tuple[object, ...]:
    """What of a decoder decides a fixed cache's buffers."""
    config = decoder.config
    return (
        decoder.dtype, config.layer_types, config.sliding_window, config.num_key_value_heads, config.head_dim,
        config.rope,
    )  # fmt: skip


def check(decoder: QwenDecoder, ids: Tensor, cache: FixedCache) -> None:
    """Raise unless these ids can be a step over this cache.

    Raises:
        InputError: They cannot.
        RuntimeError: Autocast is on.
    """
    check_autocast(decoder.device)
    check_ids(ids, decoder.device)
    if not isinstance(cache, FixedCache):
        msg = f"cache is a {type(cache).__name__}; expected one from fixed()."
        raise InputError("cache", msg)
    if tuple(ids.shape) != (cache.batch, 1):
        msg = f"ids has shape {tuple(ids.shape)}; a step takes one token a row, {(cache.batch, 1)}."
        raise InputError("ids", msg)
    if cache.positions.device != decoder.device:
        msg = f"the cache is on {cache.positions.device}, the decoder on {decoder.device}; make a new one."
        raise InputError("cache", msg)
    if cache.fits != fits(decoder):
        msg = "the cache is for another dtype or shape of decoder; make a new one with this decoder's fixed()."
        raise InputError("cache", msg)


def step(decoder: QwenDecoder, ids: Tensor, cache: FixedCache) -> Tensor:
    """The device's part of a step, which a graph can hold: logits `(batch, 1, vocab)`; positions advance."""
    glue, products = decoder.glue, decoder.products(cache.batch)
    with on(decoder.device), decoder.one_pass():
        if not isinstance(glue, Glue):
            logits = _plain(decoder, ids, cache)
        else:
            logits = _glued(decoder, ids, cache, glue, products if isinstance(products, Products) else None)
        cache.positions.add_(1)
    return logits


def _plain(decoder: QwenDecoder, ids: Tensor, cache: FixedCache) -> Tensor:
    hidden = decoder.embedded(ids)
    cos, sin = (each.index_select(0, cache.positions)[:, None, None] for each in (cache.cos, cache.sin))
    given = {kind: part.given(cache.positions) for kind, part in cache.parts.items()}
    slots = {kind: cache.positions % part.size for kind, part in cache.parts.items()}
    exact = decoder.serving(hidden)
    delta: Tensor | None = None
    for index, layer in decoder.visited():
        kind = layer.kind
        hidden, q, k, v = layer.enter(hidden, delta, cos, sin)
        k, v = cache.parts[kind].put(cache.index[index], k, v, slots[kind], exact)
        hidden, delta = layer.leave(hidden, layer.attend(q, k, v, given[kind]))
    return decoder.end(decoder.normalised(hidden, delta), normalised=True)


def _embedded(decoder: QwenDecoder, ids: Tensor, glue: Glue) -> Tensor:
    embedding = decoder.model.embed_tokens
    if untouched(embedding, nn.Embedding):
        return glue.embed(ids, embedding)
    return decoder.embedded(ids).view(len(ids), -1)


def _glued(decoder: QwenDecoder, ids: Tensor, cache: FixedCache, glue: Glue, products: Products | None) -> Tensor:
    batch = cache.batch
    hidden = _embedded(decoder, ids, glue)
    turn = Turn(cache.positions, cache.cos, cache.sin)
    given = {kind: part.given(cache.positions, glue) for kind, part in cache.parts.items()}
    delta: Tensor | None = None
    for index, layer in decoder.visited():
        part, mlp, place, own = layer.self_attn, layer.mlp, cache.parts[layer.kind], cache.index[index]
        if products is not None:
            qkv = products(hidden, part.qkv_proj, norm=layer.input_layernorm)
        else:
            hidden, x = glue.add_norm(hidden, delta, layer.input_layernorm)
            qkv = part.qkv_proj(x)
        q = glue.put_heads(qkv, part, place, own, turn)
        attended = layer.attend(q, place.keys[own], place.values[own], given[layer.kind]).view(batch, -1)
        if products is not None:
            # A backend's answer may be a part of something larger, with a gap after each row.
            hidden = products(attended.contiguous(), part.o_proj, add=hidden)
            inner = products(hidden, mlp.gate_up_proj, norm=layer.post_attention_layernorm, gated=True)
            hidden = products(inner, mlp.down_proj, add=hidden)
        else:
            hidden, x = glue.add_norm(hidden, part.o_proj(attended), layer.post_attention_layernorm)
            delta = mlp.down_proj(glue.silu_mul(mlp.gate_up_proj(x)))
    # Not by products: the head has so many weights that only memory takes time, and cuBLAS is as fast as that.
    x = glue.add_norm(hidden, delta, decoder.model.norm)[1]
    return decoder.lm_head(x).view(batch, 1, -1)  # type: ignore[no-any-return]
