"""How a `QwenDecoder` comes to its weights: from a transformers model, a folder, or any mapping of names to tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fuseboard.engine.decoder.config import DecoderConfig, ids_of
from fuseboard.engine.decoder.rope import frequencies
from fuseboard.engine.decoder.weights import Folder, take
from fuseboard.errors import InputError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Loading"]


class Loading(nn.Module):
    """What `QwenDecoder` is before it computes: its configuration, and its weights put in their place."""

    config: DecoderConfig
    eos: tuple[int, ...]
    pad: int | None
    fused: bool
    _ready: tuple[torch.device, torch.dtype, bool] | None
    _given_frequencies: Tensor | None
    _frequencies: dict[torch.device, tuple[Tensor, float]]

    if TYPE_CHECKING:

        def _refuse_streamed(self, what: str) -> None: ...

        def _tie(self) -> None: ...

        def _drop_whole(self) -> None: ...

    @classmethod
    def from_transformers(
        cls,
        model: Any,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ignore: Collection[str] = (),
    ) -> Self:
        """From a transformers model, whose weights are shared, not copied, unless `device` or `dtype` differ.

        Raises:
            InputError: It is no such model, or its configuration asks for something that is not implemented.
            WeightsError: Its weights are not those of its configuration.
        """
        if isinstance(model, type) or not (hasattr(model, "config") and hasattr(model, "state_dict")):
            msg = f"model is {model!r}; expected a transformers model in memory. A folder is read by from_folder()."
            raise InputError("model", msg)
        decoder = cls(model.config, ignore=ignore)
        decoder.load(model.state_dict(), device=device, dtype=dtype)
        rotary = getattr(getattr(model, "model", model), "rotary_emb", None)
        # A dynamic one that has seen a longer sequence goes back to its original frequencies for a shorter one.
        grown = getattr(rotary, "max_seq_len_cached", 0) != getattr(rotary, "original_max_seq_len", 0)
        held = getattr(rotary, "original_inv_freq" if grown else "inv_freq", None)
        if isinstance(held, Tensor) and not held.is_meta:
            # `model.to(torch.bfloat16)` rounds the frequencies too, unlike loading in bfloat16: they are part of what
            # the model computes.
            held = held.detach().float().cpu()
            if not torch.equal(held, frequencies(decoder.config.rope)[0]):
                decoder._given_frequencies = held
        decoder._take_ends(getattr(model, "generation_config", None))
        return decoder

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ignore: Collection[str] = (),
    ) -> Self:
        """From `config.json` and safetensors, in one file or several, as `save_pretrained` writes them.

        Args:
            path: The folder.
            device: Where to load; the CPU if left out.
            dtype: What to cast to; the files' own if left out.
            ignore: Options that you know to say nothing about the model's arithmetic.

        Raises:
            InputError: There is no model there, or its configuration asks for something that is not implemented.
            ModuleNotFoundError: safetensors is not installed.
            WeightsError: The weights are not those of the configuration.
        """
        folder = Folder(path)
        decoder = cls(folder.config, ignore=ignore)
        decoder.load(folder, device=device, dtype=dtype)
        decoder._take_ends(folder.generation)
        return decoder

    def load(
        self,
        weights: Mapping[str, Tensor],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Put weights in their place: all of them, or none when anything is wrong.

        Tensors that need no cast or move are shared with the mapping.

        Raises:
            InputError: This is no mapping, or the dtype cannot be computed in.
            WeightsError: A weight is missing, unexpected or of another shape; or their dtype is not one.
        """
        self._refuse_streamed("loaded")
        if self.fused:
            msg = "fuse() has stacked this decoder's weights; load into a new QwenDecoder."
            raise RuntimeError(msg)
        tied = self.config.tie_word_embeddings
        expected = {name: tuple(each.shape) for name, each in self.named_parameters(remove_duplicate=False)}
        taken = take(weights, expected, tied=tied, device=device, dtype=dtype)
        for name, parameter in taken.items():
            module, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(module), leaf, parameter)
        self._tie()
        self._ready = None
        # Those of the model that the weights before came from; and what was made with them.
        self._given_frequencies = None
        self._frequencies.clear()
        self._drop_whole()

    def _take_ends(self, generation: Any) -> None:
        """The ids that end a row as `generate` would know them: a generation config's come first."""
        known = generation if isinstance(generation, Mapping) else vars(generation or object)
        self.eos = ids_of(known.get("eos_token_id"), "eos_token_id") or self.eos
        pad = ids_of(known.get("pad_token_id"), "pad_token_id")
        self.pad = pad[0] if pad else self.pad
