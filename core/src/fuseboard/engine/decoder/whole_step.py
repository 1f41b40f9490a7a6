"""One CUDA graph for a whole step of one token, over a `FixedCache`: embedding, layers, attention, head, and the draw.

A graph belongs to a cache, whose addresses it holds, and to what was bound when it was captured: the policy chose the
attention kernels that it launches. Replays count in the bound Run as the captured calls did.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch
from torch import Tensor

from fuseboard import context
from fuseboard.call import autocast
from fuseboard.engine.decoder import fixed
from fuseboard.engine.decoder.fixed import FixedCache, capacity_for
from fuseboard.engine.graphs import Graph, Graphs, Signature, signature
from fuseboard.engine.sampling import Sampler, State
from fuseboard.run import Run

if TYPE_CHECKING:
    from fuseboard.engine.decoder.kv_cache import KVCache
    from fuseboard.engine.decoder.model import QwenDecoder
    from fuseboard.run import Counted

__all__ = ["Ahead", "WholeSteps"]

_SPARE = 4
"""How many caches of requests that are over are kept."""
_EACH = 4
"""How many graphs a cache has at most, for as many policies and samplers."""
_TRIALS = 3
_Key: TypeAlias = tuple[Any, Sampler | None, bool]


@attrs.define(eq=False)
class _Captured:
    """A cache's graph for one policy and one sampler.

    Attributes:
        ids: Where the step's input is put.
        graph: Gives logits, or with a sampler the ids.
        lies: Where the weights lay.
        routes: What answered the attention calls, and how often in a step.
        finished: A tensor of the sampler's state, which the graph changes; None without a sampler.
    """

    ids: Tensor
    graph: Graph[Tensor]
    lies: Signature
    routes: list[tuple[Counted, int]]
    finished: Tensor | None


@attrs.define(eq=False)
class Ahead:
    """A step that was launched before anybody asked for it. From `WholeSteps.ahead`.

    Attributes:
        ids: What it draws.
        cache: Has taken its token in.
        graphs: Have counted its replay.
        generator: What it drew with; None when it drew nothing.
        drawn: The generator's state before.
        run: Where its attention calls are counted once it is asked for.
        routes: What answered them.
    """

    ids: Tensor
    cache: FixedCache
    graphs: Graphs
    generator: torch.Generator | None
    drawn: Tensor | None
    run: Run | None
    routes: list[tuple[Counted, int]]

    def taken(self) -> Tensor:
        """It is asked for."""
        _count(self.run, self.routes)
        return self.ids

    def undo(self) -> None:
        """Nobody asked for it. What it changed on the device is filled anew before the cache and the state are used."""
        self.cache.length -= 1
        with self.graphs.lock:
            self.graphs.replays -= 1
        if self.generator is not None and self.drawn is not None:
            self.generator.set_state(self.drawn)


class WholeSteps:
    """The whole-step graphs of one decoder on one device. Several caches may take turns, also on threads of their own.

    Attributes:
        eager_steps: How many steps ran without a graph.
        capture_seconds: What the captures took, all together.
        measured: For streamed layers: what a step took by its graph, and without, in milliseconds.
        slower: Why graphs that were captured are not used: streaming without them was faster.
    """

    def __init__(self, decoder: QwenDecoder, graphs: Graphs | None) -> None:
        """Prepare.

        Args:
            decoder: On the device of the graphs, with its weights loaded.
            graphs: Where graphs are made; None runs every step eagerly.
        """
        self.eager_steps = 0
        self.capture_seconds = 0.0
        self.measured: dict[str, float] | None = None
        self.slower: str | None = None
        self._decoder, self._graphs = decoder, graphs
        self._captured: weakref.WeakKeyDictionary[FixedCache, dict[_Key, _Captured]] = weakref.WeakKeyDictionary()
        self._states: weakref.WeakKeyDictionary[FixedCache, dict[Sampler, State]] = weakref.WeakKeyDictionary()
        self._spare: list[FixedCache] = []
        self._lent: weakref.WeakSet[FixedCache] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._used: dict[str, int] = {}

    # ---- caches

    def take(self, cache: KVCache, tokens: int) -> FixedCache:
        """A fixed cache that goes on from a growing one: one that is spare, with its graphs, or a new one.

        Args:
            cache: With the prompt in it; it lets go of its memory.
            tokens: For how many tokens to have room.
        """
        capacity = capacity_for(tokens)
        decoder = self._decoder
        found = None
        with self._lock:
            for each in self._spare:
                if (each.batch, each.capacity, each.fits) == (cache.batch, capacity, fixed.fits(decoder)):
                    found = each
                    self._spare.remove(each)
                    break
        if found is None:
            found = FixedCache(decoder, cache.batch, capacity)
        if self._graphs is not None:
            self._graphs.follow()
        found.fill(decoder, cache)
        cache.release()
        with self._lock:
            self._lent.add(found)
        return found

    def give_back(self, cache: FixedCache) -> None:
        """A request is over: the next of its shape may have its cache, and the graphs of it.

        Not one that was taken before a `drop`. Waits for the device where another cache has to make room, as
        `Graphs.drop` does.
        """
        with self._lock:
            if cache not in self._lent:
                return
            self._lent.discard(cache)
            self._spare.append(cache)
            gone = self._spare[:-_SPARE]
            del self._spare[:-_SPARE]
        for each in gone:
            self._let_go(each)

    # ---- steps

    def __call__(self, ids: Tensor, cache: FixedCache) -> Tensor:
        """Logits, `(batch, 1, vocab)`, the caller's own; the bits of `decoder.step(ids, cache)`.

        Args:
            ids: `(batch, 1)`.
            cache: Takes the token in.
        """
        return self._step(ids, cache, None, None)

    def start(self, cache: FixedCache, sampler: Sampler, state: State) -> State:
        """A state for `draw`, which goes on from this one: a graph changes the tensors that it was captured with."""
        with self._lock:
            states = self._states.setdefault(cache, {})
            held = states.get(sampler)
            if held is None:
                while len(states) >= _EACH:
                    del states[next(iter(states))]
                with torch.inference_mode(mode=False), torch.no_grad():
                    states[sampler] = held = _copied(state)
        if self._graphs is not None:
            self._graphs.follow()
        with torch.no_grad():
            for mine, theirs in zip(held.tensors, state.tensors, strict=True):
                mine.copy_(theirs)
        return attrs.evolve(held, generator=state.generator)

    def draw(self, ids: Tensor, cache: FixedCache, sampler: Sampler, state: State) -> Tensor:
        """The next ids, `(batch, 1)`, the caller's own; those of `sampler(decoder.step(ids, cache), state)`.

        Args:
            ids: `(batch, 1)`.
            cache: Takes the token in.
            sampler: Draws.
            state: From `start`, for this cache and sampler.
        """
        if sampler.do_sample and state.generator is None:  # torch's default generator is not this graph's to move
            return sampler(self(ids, cache), state)
        return self._step(ids, cache, sampler, state)

    def ahead(self, ids: Tensor, cache: FixedCache, sampler: Sampler, state: State) -> Ahead | None:
        """Launch what `draw` would launch next, if that is a replay and no more; None if it is not.

        Args:
            ids: What `draw` gave last; they may still be being computed.
            cache: As for `draw`.
            sampler: Likewise.
            state: Likewise.
        """
        graphs, decoder = self._graphs, self._decoder
        if graphs is None or decoder.streamed or (sampler.do_sample and state.generator is None):
            return None
        with graphs.turn():
            if graphs.failure is not None or torch.is_grad_enabled() or cache.length >= cache.capacity:
                return None
            if autocast(decoder.device):  # which `draw` says
                return None
            binding = context.bound()
            generator = state.generator if sampler.do_sample else None
            found = self._captured.get(cache, {}).get(_key(binding, sampler, generator))
            if found is None or found.finished is not state.finished or found.lies.changed():
                return None
            drawn = None if generator is None else generator.get_state()
            cache.prepare(decoder)
            answer = self._launched(found, ids, cache, generator, graphs)
        run = None if binding is None else binding.run
        return Ahead(answer, cache, graphs, generator, drawn, run, found.routes)

    def _step(self, ids: Tensor, cache: FixedCache, sampler: Sampler | None, state: State | None) -> Tensor:
        decoder, graphs = self._decoder, self._graphs
        fixed.check(decoder, ids, cache)
        if graphs is None:
            cache.prepare(decoder)
            return self._eager(ids, cache, sampler, state)
        with graphs.turn():
            if cache.prepare(decoder):
                self._forget(cache)
            if graphs.failure is not None or self.slower is not None or torch.is_grad_enabled():
                return self._eager(ids, cache, sampler, state)
            return self._replayed(ids, cache, sampler, state, graphs)

    def _eager(self, ids: Tensor, cache: FixedCache, sampler: Sampler | None, state: State | None) -> Tensor:
        self.eager_steps += 1
        logits = fixed.step(self._decoder, ids, cache)
        cache.length += 1
        return logits if sampler is None or state is None else sampler(logits, state)

    def _replayed(
        self, ids: Tensor, cache: FixedCache, sampler: Sampler | None, state: State | None, graphs: Graphs
    ) -> Tensor:
        binding = context.bound()
        generator = None if state is None or sampler is None or not sampler.do_sample else state.generator
        key = _key(binding, sampler, generator)
        held = self._captured.setdefault(cache, {})
        found = held.get(key)
        if found is not None and found.lies.changed():
            self._forget(cache)
            held = self._captured.setdefault(cache, {})
            found = None
        if found is not None and state is not None and found.finished is not state.finished:
            graphs.drop([held.pop(key).graph])  # it changes the tensors of another state
            found = None
        if found is None:
            found = self._capture(ids, cache, sampler, state, graphs)
            if found is None:
                return self._eager(ids, cache, sampler, state)
            while len(held) >= _EACH:
                graphs.drop([held.pop(next(iter(held))).graph])
            held[key] = found
        answer = self._launched(found, ids, cache, generator, graphs)
        _count(None if binding is None else binding.run, found.routes)
        return answer

    def _launched(
        self, found: _Captured, ids: Tensor, cache: FixedCache, generator: torch.Generator | None, graphs: Graphs
    ) -> Tensor:
        found.ids.copy_(ids)
        drawing = contextlib.nullcontext() if generator is None else graphs.drawing(generator)
        with self._decoder.one_pass(), drawing:
            answer = found.graph.launch()
            cache.length += 1  # as the device counts now, whatever the copy comes to
            return answer.clone()

    def _capture(
        self, ids: Tensor, cache: FixedCache, sampler: Sampler | None, state: State | None, graphs: Graphs
    ) -> _Captured | None:
        begun = time.perf_counter()
        decoder, binding = self._decoder, context.bound()
        changed = [cache.positions, *(() if state is None else state.tensors)]
        _ = decoder.glue, decoder.products(cache.batch)  # tried here, since a trial waits for the device
        runs: list[Run] = []
        with torch.inference_mode(mode=False), torch.no_grad():
            mine = ids.clone()
            fn = _function(decoder, mine, cache, sampler, state, graphs)

            def counted() -> Tensor:
                if binding is None:
                    return fn()
                runs.append(Run())
                with context.bind(binding.policy, run=runs[-1]):
                    return fn()

            # A pool of its own: caches take turns in any order, and one's graphs go when it goes.
            with decoder.one_pass():  # until its end a capture has the stream that copies streamed weights
                graph = graphs.capture(counted, changed, pool=graphs.pool())
            self.capture_seconds += time.perf_counter() - begun
            if graph is not None and decoder.streamed and self._is_slower(fn, graph, changed, graphs):
                graphs.drop([graph])
                graph = None
        if graph is None:
            return None
        routes = runs[-1]._counts() if runs else []  # of the calls that were captured, the last ones
        used: dict[str, int] = {}
        for route, count in routes:
            used[route.backend_name] = used.get(route.backend_name, 0) + count
        self._used = used or {"reference": len(decoder.config.layer_types)}
        return _Captured(mine, graph, signature(decoder), routes, None if state is None else state.finished)

    def _is_slower(self, fn: Callable[[], Tensor], graph: Graph[Tensor], changed: list[Tensor], graphs: Graphs) -> bool:
        """Whether streaming by the graph takes longer than without. Waits for the device; once a capture."""
        kept, drawn, replays = [each.clone() for each in changed], graphs.generator.get_state(), graphs.replays
        best: dict[str, float] = {}
        with self._decoder.one_pass():
            for name, action in (("eager", fn), ("graph", graph.launch)) * _TRIALS:
                for tensor, before in zip(changed, kept, strict=True):
                    tensor.copy_(before)
                torch.cuda.synchronize(graphs.device)
                begun = time.perf_counter()
                action()
                torch.cuda.synchronize(graphs.device)
                best[name] = min(best.get(name, 1e9), 1000 * (time.perf_counter() - begun))
            for tensor, before in zip(changed, kept, strict=True):
                tensor.copy_(before)
        graphs.generator.set_state(drawn)
        graphs.replays = replays
        self.measured = {f"{name} ms": round(took, 3) for name, took in best.items()}
        if best["graph"] < best["eager"]:
            return False
        self.slower = f"a step took {best['graph']:.2f} ms by its graph and {best['eager']:.2f} ms without"
        return True

    def _forget(self, cache: FixedCache) -> None:
        """Let go of a cache's graphs."""
        held = self._captured.pop(cache, None)
        if held and self._graphs is not None:
            graphs = [each.graph for each in held.values()]
            held.clear()
            self._graphs.drop(graphs)

    def drop(self) -> None:
        """Let go of all graphs and of the caches that are spare."""
        with self._lock:
            self._spare.clear()
            self._lent.clear()
        for cache in list(self._captured):
            self._let_go(cache)

    def _let_go(self, cache: FixedCache) -> None:
        with self._graphs.lock if self._graphs is not None else contextlib.nullcontext():
            self._forget(cache)

    def report(self) -> dict[str, Any]:
        """What `Graphs.report` says, what attention the latest graph has, and what captures took."""
        found = {} if self._graphs is None else self._graphs.report()
        return {
            **found,
            "eager steps": self.eager_steps,
            "capture seconds": round(self.capture_seconds, 4),
            "attention in a step": dict(self._used),
        }


def _function(
    decoder: QwenDecoder, ids: Tensor, cache: FixedCache, sampler: Sampler | None, state: State | None, graphs: Graphs
) -> Callable[[], Tensor]:
    def logits() -> Tensor:
        return fixed.step(decoder, ids, cache)

    if sampler is None or state is None:
        return logits

    def drawn() -> Tensor:
        return sampler(logits(), attrs.evolve(state, generator=graphs.generator))

    return drawn


def _key(binding: context.Binding | None, sampler: Sampler | None, generator: torch.Generator | None) -> _Key:
    return (None if binding is None else binding.policy, sampler, generator is not None)


def _count(run: Run | None, routes: list[tuple[Counted, int]]) -> None:
    if run is not None:
        for route, count in routes:
            for _ in range(count):
                run.tick(route)


def _copied(state: State) -> State:
    seen = state.seen_and_beyond
    return attrs.evolve(
        state,
        finished=state.finished.clone(),
        invalid=state.invalid.clone(),
        count=state.count.clone(),
        seen_and_beyond=None if seen is None else seen.clone(),
    )
