"""A decoder's step of one token as graphs between its attention calls, over the cache that grows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from fuseboard.engine.decoder.kv_cache import as_one
from fuseboard.engine.graphs import Graphs
from fuseboard.engine.steps import LayerSteps, Stack

if TYPE_CHECKING:
    from fuseboard.engine.decoder.kv_cache import KVCache
    from fuseboard.engine.decoder.layers import Given, Layer
    from fuseboard.engine.decoder.model import QwenDecoder

__all__ = ["DecoderSteps"]


class DecoderSteps:
    """A `QwenDecoder`'s step of one token as graphs: logits equal to `decoder(ids, cache=cache)`'s in bits.

    Several caches may take turns, also on threads of their own.
    """

    def __init__(self, decoder: QwenDecoder, graphs: Graphs | None) -> None:
        """Prepare.

        Args:
            decoder: On the device of the graphs, with its weights loaded.
            graphs: Where graphs are kept; None runs every step eagerly.
        """
        self._decoder, self._graphs = decoder, graphs
        self._layers = cast("list[Layer]", list(decoder.model.layers))
        self._cache: KVCache | None = None  # of the step that is being made, which holds the lock
        self._given: dict[str, Given] = {}
        self._both: dict[int, tuple[tuple[Tensor, ...], Tensor | None]] = {}  # of a graph's outputs, which stay
        stack = Stack(
            count=len(self._layers),
            before=lambda layer, hidden, inputs: self._layers[layer].before(hidden, *inputs),
            attend=self._attend,
            after=lambda layer, hidden, attended, _inputs: self._layers[layer].after(hidden, attended),
            end=lambda hidden, _inputs: decoder.end(hidden),
            modules=[decoder],
            between=self._between,
        )
        self._steps = LayerSteps(stack, graphs)

    def __call__(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Logits, `(batch, 1, vocab)`.

        Args:
            ids: `(batch, 1)`.
            cache: Made by `decoder.cache`, with at least the prompt in it; takes the token in.
        """
        if self._graphs is None or self._graphs.failure is not None or self._decoder.streamed:
            self._steps.eager_steps += 1
            return self._decoder(ids, cache=cache)  # type: ignore[no-any-return]
        hidden, cos, sin, given = self._decoder.begin(ids, cache)
        with self._graphs.lock:
            self._cache, self._given = cache, given
            try:
                logits = self._steps(hidden, (cos, sin))
            finally:
                self._cache, self._given = None, {}
        cache.end(1)
        return logits

    def _between(
        self, layer: int, hidden: Tensor, attended: Tensor, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...] | Tensor]:
        cos, sin = inputs
        hidden, delta = self._layers[layer].leave(hidden, attended)
        if layer + 1 < len(self._layers):
            hidden, *taken = self._layers[layer + 1].enter(hidden, delta, cos, sin)
            return hidden, tuple(taken)
        return hidden, self._decoder.end(self._decoder.normalised(hidden, delta), normalised=True)

    def _attend(self, layer: int, tensors: tuple[Tensor, ...]) -> Tensor:
        assert self._cache is not None
        q, k, v = tensors
        part = self._layers[layer]
        known = self._both.get(layer)
        if known is None or known[0] is not tensors:
            self._both[layer] = known = (tensors, as_one(k, v))
        k, v = self._cache.put(layer, k, v, known[1])
        return part.attend(q, k, v, self._given[part.kind])

    def report(self) -> dict[str, Any]:
        """As of `LayerSteps`."""
        return self._steps.report()
