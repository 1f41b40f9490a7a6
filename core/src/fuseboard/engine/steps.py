"""One token through a stack of layers as graphs, with attention between them run eagerly.

Attention over a growing cache has another shape at every step, so it is not captured; what lies between two attention
calls (the end of one layer, the beginning of the next) has the same shape at every step, and is one graph. So the cache
grows and the attention kernels are chosen as in an eager step, and the numbers are the eager ones bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn

from fuseboard.engine.graphs import Graph, Graphs, Signature, signature

__all__ = ["LayerSteps", "Stack"]


@attrs.frozen
class Stack:
    """A stack of layers, cut at its attention calls.

    All but `attend` only compute: they are run more than once while they are captured.

    Attributes:
        count: How many layers.
        before: `(layer, hidden, inputs) -> tensors`: from the hidden state to what attention takes.
        attend: `(layer, tensors) -> tensor`: attention, the cache's growth included. Never captured.
        after: `(layer, hidden, attended, inputs) -> hidden`: from attention's answer to the next hidden state.
        end: `(hidden, inputs) -> tensor`: what follows the last layer, such as norm and head.
        modules: Whose weights the captured parts read.
        between: `(layer, hidden, attended, inputs) -> (hidden, tensors)`: what `after` of a layer and `before` of the
            next, or `end`, make, where both together can do it in fewer launches. Left out: one after the other.
    """

    count: int
    before: Callable[[int, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]
    attend: Callable[[int, tuple[Tensor, ...]], Tensor]
    after: Callable[[int, Tensor, Tensor, tuple[Tensor, ...]], Tensor]
    end: Callable[[Tensor, tuple[Tensor, ...]], Tensor]
    modules: Sequence[nn.Module] = ()
    between: Callable[[int, Tensor, Tensor, tuple[Tensor, ...]], tuple[Tensor, Any]] | None = None

    def eager(self, hidden: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        """The step without graphs."""
        taken: Any = self.before(0, hidden, inputs) if self.count else self.end(hidden, inputs)
        for layer in range(self.count):
            hidden, taken = self.onward(layer, hidden, self.attend(layer, taken), inputs)
        answer: Tensor = taken
        return answer

    def onward(self, layer: int, hidden: Tensor, attended: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Any]:
        """From attention's answer to the next hidden state, and what the next attention takes, or the step's answer."""
        if self.between is not None:
            return self.between(layer, hidden, attended, inputs)
        hidden = self.after(layer, hidden, attended, inputs)
        last = layer + 1 == self.count
        return hidden, self.end(hidden, inputs) if last else self.before(layer + 1, hidden, inputs)


@attrs.define(eq=False)
class _Captured:
    """The graphs for one shape of step.

    Attributes:
        hidden: Where the step's input is put.
        inputs: Where what changes from step to step is put, such as the rotary embedding's numbers.
        attended: Where each layer's attention is put.
        graphs: One for each stretch, `count + 1`: the hidden state, and what attention takes or the answer.
        lies: Where the weights lay.
    """

    hidden: Tensor
    inputs: tuple[Tensor, ...]
    attended: list[Tensor]
    graphs: list[Graph[tuple[Tensor, Any]]]
    lies: Signature


class LayerSteps:
    """A stack's step, by graphs where that is possible; from several threads, one step at a time.

    ```python
    steps = LayerSteps(stack, Graphs("cuda"))
    logits = steps(hidden, (cos, sin))          # captured at the first step of a shape, replayed afterwards
    ```

    Attributes:
        eager_steps: How many steps ran without graphs.
    """

    def __init__(self, stack: Stack, graphs: Graphs | None) -> None:
        """Prepare.

        Args:
            stack: What a step is made of.
            graphs: Where graphs are kept; None runs every step eagerly.
        """
        self.eager_steps = 0
        self._stack = stack
        self._graphs = graphs
        self._captured: dict[Any, _Captured] = {}

    def __call__(self, hidden: Tensor, inputs: tuple[Tensor, ...] = ()) -> Tensor:
        """One step; the answer is the caller's own.

        Args:
            hidden: The input of the first layer, of the same shape at each step.
            inputs: What `before`, `after` and `end` read besides, of the same shapes at each step.
        """
        graphs = self._graphs
        if graphs is None or graphs.failure is not None or torch.is_grad_enabled():
            self.eager_steps += 1
            return self._stack.eager(hidden, inputs)
        with graphs.turn():
            return self._step(hidden, inputs, graphs).clone()  # the graphs' own is overwritten by the next step

    def drop(self) -> None:
        """Let go of all graphs, as when weights have moved; the next step captures anew."""
        held = [graph for each in self._captured.values() for graph in each.graphs]
        self._captured.clear()
        if self._graphs is not None:
            self._graphs.drop(held)

    def report(self) -> dict[str, Any]:
        """What `Graphs.report` says, and how many steps ran without graphs."""
        found = {} if self._graphs is None else self._graphs.report()
        return {**found, "eager steps": self.eager_steps}

    def _step(self, hidden: Tensor, inputs: tuple[Tensor, ...], graphs: Graphs) -> Tensor:
        key = tuple((each.shape, each.stride(), each.dtype, each.device) for each in (hidden, *inputs))
        found = self._captured.get(key)
        if found is not None and found.lies.changed():
            self.drop()
            found = None
        if found is None:
            return self._first(key, hidden, inputs, graphs)
        found.hidden.copy_(hidden)
        for mine, theirs in zip(found.inputs, inputs, strict=True):
            mine.copy_(theirs)
        _, taken = found.graphs[0].launch()
        for layer, graph in enumerate(found.graphs[1:]):
            found.attended[layer].copy_(self._stack.attend(layer, taken))
            _, taken = graph.launch()
        answer: Tensor = taken
        return answer

    def _first(self, key: Any, hidden: Tensor, inputs: tuple[Tensor, ...], graphs: Graphs) -> Tensor:
        """The first step of a shape is run and captured in one pass, stretch by stretch.

        A stretch that was captured is replayed at once, so that attention finds its real inputs and grows the cache
        once. When a capture fails, the rest of the step is run eagerly, and so are all later ones.
        """
        stack, mode = self._stack, torch.is_inference_mode_enabled()
        # What is made here is written at each step, which tensors made in inference mode allow in that mode only.
        with torch.inference_mode(mode=False), torch.no_grad():
            static, given = hidden.clone(), tuple(each.clone() for each in inputs)
            attended: list[Tensor] = []
            made: list[Graph[tuple[Tensor, Any]]] = []
            now, out = static, cast("Any", None)
            for layer in range(stack.count + 1):
                stretch = _stretch(stack, layer, now, attended, given)
                graph = graphs.capture(stretch)
                now, out = graph.launch() if graph is not None else stretch()
                made += [graph] if graph is not None else []
                if layer < stack.count:
                    with torch.inference_mode(mode=mode):
                        answer = stack.attend(layer, out)
                    attended.append(answer.clone())
        if len(made) == stack.count + 1:
            self._captured[key] = _Captured(static, given, attended, made, signature(*stack.modules))
        else:
            self.eager_steps += 1
        last: Tensor = out
        return last


def _stretch(
    stack: Stack, layer: int, hidden: Tensor, attended: list[Tensor], inputs: tuple[Tensor, ...]
) -> Callable[[], tuple[Tensor, Any]]:
    """What lies between attention in `layer - 1` and in `layer`: the hidden state, and what attention takes."""

    def run() -> tuple[Tensor, Any]:
        if layer:
            return stack.onward(layer - 1, hidden, attended[layer - 1], inputs)
        return hidden, stack.before(0, hidden, inputs) if stack.count else stack.end(hidden, inputs)

    return run
