"""Layers whose weights lie in pinned host memory and are copied to the device as a pass comes to them.

Two slots on the device are filled in turn, each by a copy that runs beside the layer before. A layer's parameters are
views of its slot and never move, so that the code that computes is the same, and a CUDA graph can hold the copies too.
The bits are those of weights that stay on the device.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from fuseboard.engine.decoder.layers import Layer

__all__ = ["Streamed"]

_SLOTS = 2
_ALIGNMENT = 256
"""Bytes: where kernels that load vectors want a weight to begin."""


class Streamed:
    """The layers of one decoder. Made by `QwenDecoder.stream_layers`.

    Attributes:
        device: Where the slots are.
        nbytes: What a pass copies.
    """

    def __init__(self, layers: Sequence[Layer], device: torch.device) -> None:
        """Pack the weights into pinned memory, one block a layer, and give each layer the views of its slot."""
        self.device = device
        self._cuda = device.type == "cuda"
        self._lock = threading.RLock()
        self._layers = layers
        with torch.inference_mode(mode=False), torch.no_grad():
            self._host = [self._packed(layer) for layer in layers]
            self._slots = [torch.empty_like(self._host[0], device=device) for _ in range(min(_SLOTS, len(layers)))]
            if self._cuda:
                with torch.cuda.device(device):
                    self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                    self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            for index, layer in enumerate(layers):  # last: until here nothing has changed
                self._point(layer, self._slots[index % _SLOTS])
        self.nbytes = sum(each.nbytes for each in self._host)

    def _packed(self, layer: Layer) -> Tensor:
        weights = [each.detach() for each in layer.parameters()]
        block = torch.zeros(sum(map(_room, weights)), dtype=weights[0].dtype, device="cpu", pin_memory=self._cuda)
        start = 0
        for each in weights:
            block[start : start + each.numel()] = each.reshape(-1)
            start += _room(each)
        return block

    @staticmethod
    def _point(layer: Layer, slot: Tensor) -> None:
        start = 0
        for name, each in list(layer.named_parameters()):
            module, _, leaf = name.rpartition(".")
            view = slot[start : start + each.numel()].view(each.shape)
            setattr(layer.get_submodule(module), leaf, nn.Parameter(view, requires_grad=False))
            start += _room(each)

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[None]:
        """One pass at a time has the slots, whatever threads and streams they come from."""
        with self._lock:
            if not self._cuda or torch.cuda.is_current_stream_capturing():
                yield
                return
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self._done)
            try:
                yield
            finally:
                self._done.record(stream)

    def visited(self) -> Iterator[tuple[int, Layer]]:
        """Each layer when its weights are there; the copy of the one after next begins when it has been left.

        Within `one_pass`. What the caller does with a layer goes to its current stream.
        """
        if not self._cuda:
            for index, layer in enumerate(self._layers):
                self._slots[index % _SLOTS].copy_(self._host[index])
                yield index, layer
            return
        stream, count = torch.cuda.current_stream(self.device), len(self._layers)
        # Events of this pass alone: in a capture none may be waited for that was recorded outside of it.
        ready = [self._fetch(index, self._now(stream)) for index in range(min(_SLOTS, count))]
        for index, layer in enumerate(self._layers):
            stream.wait_event(ready[index])
            yield index, layer
            if index + _SLOTS < count:
                ready.append(self._fetch(index + _SLOTS, self._now(stream)))

    def _fetch(self, index: int, after: Any) -> Any:
        self._copies.wait_event(after)
        with torch.cuda.stream(self._copies):
            self._slots[index % _SLOTS].copy_(self._host[index], non_blocking=True)
        return self._now(self._copies)

    @staticmethod
    def _now(stream: Any) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


def _room(weight: Tensor) -> int:
    """How many elements of a block a weight takes."""
    unit = _ALIGNMENT // weight.element_size()
    return -(-weight.numel() // unit) * unit
