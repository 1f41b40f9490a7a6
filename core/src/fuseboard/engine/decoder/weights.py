"""Weights for the decoder, from a state dict or a folder: all are compared by name and shape before any is taken."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fuseboard.errors import FuseboardError, InputError

__all__ = ["Folder", "WeightsError", "take"]

_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_SHOWN = 8


class WeightsError(FuseboardError, ValueError):
    """Weights that are not those of the configuration. Nothing was loaded.

    Attributes:
        missing: Names that the configuration needs and the weights lack.
        unexpected: Names that it has no place for.
        misshapen: Name, shape found, shape expected.
    """

    def __init__(
        self,
        message: str,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        misshapen: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]] = (),
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.misshapen = tuple(misshapen)


def take(
    weights: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    *,
    tied: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> dict[str, nn.Parameter]:
    """Parameters for each expected weight; those that need no cast or move share the given one's memory.

    Args:
        weights: A state dict or a `Folder`.
        expected: Shapes by name.
        tied: The head is the embedding, so there is no parameter for it.
        device: Where to; None leaves them where they are.
        dtype: What to cast to; None takes the one they all have.

    Raises:
        InputError: There is no mapping, or no dtype to compute in.
        WeightsError: They are not those expected.
    """
    if isinstance(weights, Folder):
        shapes, dtypes = weights.shapes, weights.dtypes
    else:
        weights = _by_name(weights)
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        dtypes = {name: tensor.dtype for name, tensor in weights.items()}
        nowhere = [name for name, tensor in weights.items() if tensor.is_meta]
        if nowhere:
            msg = f"there are weights without memory (on the meta device): {_some(nowhere)}; nothing was loaded."
            raise WeightsError(msg, missing=nowhere)
    compare(expected, shapes, tied=tied)
    dtype = one_dtype(dtypes, dtype)
    if tied:
        check_tie(weights)
    with torch.inference_mode(mode=False), torch.no_grad():
        return {
            name: nn.Parameter(weights[name].detach().to(device=device, dtype=dtype), requires_grad=False)
            for name in expected
            if not (tied and name == _HEAD)
        }


def _by_name(weights: Any) -> dict[str, Tensor]:
    """Weights by the names of a causal model.

    Raises:
        InputError: This is no mapping.
        WeightsError: There is something in it that is no weight, or a weight twice.
    """
    if not callable(getattr(weights, "items", None)):
        msg = f"weights is a {type(weights).__name__}; expected a mapping of names to tensors, such as a state_dict()."
        raise InputError("weights", msg)
    given = dict(weights.items())
    odd = [
        str(name)
        for name, each in given.items()
        if not isinstance(name, str) or not isinstance(each, Tensor) or each.layout != torch.strided
    ]
    if odd:
        msg = f"there are weights that are no dense tensors with a name: {_some(odd)}; nothing was loaded."
        raise WeightsError(msg, unexpected=odd)
    twice = [name for name in given if named(name) != name and named(name) in given]
    if twice:
        msg = f"there are weights that are there twice, with `model.` before their name and without: {_some(twice)}; "
        raise WeightsError(msg + "nothing was loaded.", unexpected=twice)
    return {named(name): tensor for name, tensor in given.items()}


def named(name: str) -> str:
    """A weight's name as a causal model has it: a bare stack's names lack their first word."""
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def compare(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
    """Raise unless the weights found are those expected.

    Args:
        expected: Shapes by name; the head is among them even when it is the embedding.
        found: Shapes by name.
        tied: The head is the embedding, so it may be left out.

    Raises:
        WeightsError: They differ; the message names each.
    """
    missing = [name for name in expected if name not in found and not (tied and name == _HEAD)]
    unexpected = [name for name in found if name not in expected]
    misshapen = [(name, found[name], shape) for name, shape in expected.items() if found.get(name, shape) != shape]
    if not (missing or unexpected or misshapen):
        return
    parts = []
    if missing:
        parts.append(f"missing: {_some(missing)}")
    if unexpected:
        parts.append(f"unexpected: {_some(unexpected)}")
    if misshapen:
        parts.append(
            "of another shape: " + _some([f"{name} is {have}, expected {want}" for name, have, want in misshapen])
        )
    msg = f"the weights are not those of the configuration; nothing was loaded. {'; '.join(parts)}."
    raise WeightsError(msg, missing, unexpected, misshapen)


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def check_tie(weights: Mapping[str, Tensor]) -> None:
    """Raise when a head that ought to be the embedding is another matrix.

    Raises:
        WeightsError: It is.
    """
    head, embedding = weights.get(_HEAD), weights[_EMBEDDING]
    if head is None or head is embedding:
        return
    if head.data_ptr() == embedding.data_ptr() or (head.dtype == embedding.dtype and torch.equal(head, embedding)):
        return
    msg = (
        f"tie_word_embeddings is set, but {_HEAD} differs from {_EMBEDDING}; nothing was loaded. "
        f"Leave {_HEAD} out, or set tie_word_embeddings to False."
    )
    raise WeightsError(msg, unexpected=[_HEAD])


def one_dtype(dtypes: Mapping[str, torch.dtype], dtype: torch.dtype | None) -> torch.dtype:
    """The dtype to load: the one given, or the one that all weights have.

    Raises:
        InputError: The one given cannot be computed with.
        WeightsError: They have several, and none was given; or they are not floating.
    """
    if dtype is not None and (
        not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2  # noqa: PLR2004 - fp8
    ):
        msg = f"dtype is {dtype!r}; expected a floating torch.dtype to compute in, such as torch.bfloat16, or None."
        raise InputError("dtype", msg)
    kinds = {each: name for name, each in dtypes.items()}
    odd = [f"{name} is {each}" for each, name in kinds.items() if not each.is_floating_point or each.itemsize < 2]  # noqa: PLR2004 - fp8
    if odd:
        msg = f"the weights are quantised ({_some(odd)}), which QwenDecoder does not compute with; nothing was loaded."
        raise WeightsError(msg)
    if dtype is not None:
        return dtype
    if len(kinds) > 1:
        listed = _some([f"{name} is {each}" for each, name in kinds.items()])
        msg = f"the weights have several dtypes ({listed}); nothing was loaded. Pass dtype= to have them cast."
        raise WeightsError(msg)
    return next(iter(kinds))


class Folder(Mapping[str, Tensor]):
    """The weights in a folder of safetensors, read when they are asked for.

    Attributes:
        path: The folder.
        config: Its `config.json`.
        generation: Its `generation_config.json`; empty without one.
        shapes: Each weight's, known without reading it.
        dtypes: Likewise.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the files and read their headers.

        Raises:
            InputError: There is no such folder, or no config or weights in it.
            ModuleNotFoundError: safetensors is not installed.
            WeightsError: The index names files or weights that are not there, or a file is not whole.
        """
        self.path = Path(path)
        self.config = _json(self.path / "config.json", needed=True)
        self.generation = _json(self.path / "generation_config.json", needed=False)
        safetensors = _safetensors()
        files, index = _files(self.path)
        self._where: dict[str, Any] = {}
        self._stored: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for file in files:
            try:
                opened = safetensors.safe_open(str(file), framework="pt")
            except safetensors.SafetensorError as error:
                msg = f"{file} is no whole safetensors file ({error}). Copy or download it again."
                raise WeightsError(msg) from error
            for stored in opened.keys():  # noqa: SIM118 - not a mapping
                if index is not None and index.get(stored) != file.name:
                    continue
                part, name = opened.get_slice(stored), named(stored)
                self._where[name], self._stored[name] = opened, stored
                self.shapes[name] = tuple(part.get_shape())
                self.dtypes[name] = _DTYPES.get(part.get_dtype(), torch.uint8)
        absent = [name for name in index or () if named(name) not in self._where]
        if absent:
            msg = f"{self.path}: the index lists weights that its files do not have: {_some(absent)}."
            raise WeightsError(msg, missing=absent)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._where[name].get_tensor(self._stored[name])
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors")
    except ModuleNotFoundError as error:
        msg = "QwenDecoder.from_folder reads safetensors, which is not installed. Install it: pip install safetensors"
        raise ModuleNotFoundError(msg, name="safetensors") from error


def _json(path: Path, *, needed: bool) -> dict[str, Any]:
    if not path.is_file():
        if not needed:
            return {}
        msg = f"there is no {path}; expected a folder with config.json and safetensors, as save_pretrained writes it."
        raise InputError("path", msg)
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        msg = f"{path} is not JSON: {error}."
        raise InputError("path", msg) from error
    if not isinstance(found, dict):
        msg = f"{path} holds a {type(found).__name__}; expected a JSON object."
        raise InputError("path", msg)
    return found


def _files(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files, and which of them holds which weight where an index says so."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        where: dict[str, str] = _json(index, needed=True).get("weight_map", {})
        if not isinstance(where, dict) or not all(isinstance(each, str) for each in where.values()):
            msg = f"{index}: weight_map is not a file's name for each weight, as save_pretrained writes it."
            raise InputError("path", msg)
        files = [path / name for name in sorted(set(where.values()))]
        outside = [each.name for each in files if each.parent != path or not each.is_file()]
        if outside:
            msg = f"{index} names files that are not in the folder: {_some(outside)}."
            raise WeightsError(msg, missing=outside)
        return files, where
    single = path / "model.safetensors"
    if single.is_file():
        return [single], None
    msg = f"there is neither model.safetensors nor model.safetensors.index.json in {path}."
    raise InputError("path", msg)
