"""Weights: random ones from a seed, or a local folder as transformers' `save_pretrained` writes it. No network."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fuseboard as fb
from decision.config import EncoderConfig
from decision.model import DecisionModel

__all__ = ["BASE", "SIZES", "TINY", "load", "random_model", "save"]

TINY = EncoderConfig.of(
    {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "local_attention": 32,
        "pad_token_id": 0,
    }
)
BASE = EncoderConfig.of(
    {
        "vocab_size": 50368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "pad_token_id": 50283,
    }
)
SIZES = {"tiny": TINY, "base": BASE}

_HEADS = ("decision_head.", "action_head.")
_OTHER_TASKS = ("head.", "decoder.", "classifier.", "cls.")  # of transformers' models for other tasks
_SPREAD = 4.0
"""How far apart a random head's logits lie: as far as a trained one's, so that a decision does not hang on rounding."""


def random_model(
    config: EncoderConfig = TINY, *, actions: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32
) -> DecisionModel:
    """A model with random weights, the same ones for the same seed. The global generator is not touched."""
    model = DecisionModel(config, actions)
    _put(model, _drawn(model, seed), dtype)
    return model.eval()


def load(
    folder: str | Path, *, actions: int | None = None, seed: int = 0, dtype: torch.dtype | None = None
) -> DecisionModel:
    """The model in a folder: `config.json` beside `model.safetensors`, or its shards and their index.

    Any ModernBERT checkpoint will do. Where it has no heads of this engine's they are drawn from `seed`, and that is
    logged.

    Args:
        folder: Which; as `save` or transformers' `save_pretrained` writes it.
        actions: How many actions; None for what the folder says, else 3.
        seed: Of heads that the folder lacks.
        dtype: What to cast weights to; None keeps the one they have.

    Raises:
        InputError: It is no such folder, or asks for what is not computed here; nothing was loaded.
    """
    folder = Path(folder)
    values = _json(folder / "config.json")
    count = actions or int((values.get("decision") or {}).get("actions") or 3)
    model = DecisionModel(EncoderConfig.of(values), count)
    found = {_named(name): tensor for name, tensor in _read(folder).items()}
    found = {name: tensor for name, tensor in found.items() if not name.startswith(_OTHER_TASKS)}
    wanted = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    dtypes = {each.dtype for each in found.values()}
    if dtype is None and len(dtypes) > 1:
        msg = f"the weights in {folder} are of several dtypes ({', '.join(sorted(map(str, dtypes)))}); choose a dtype."
        raise fb.InputError("dtype", msg)
    if not any(name.startswith(_HEADS) for name in found):
        logging.getLogger(__name__).warning("%s has no decision heads: theirs are drawn from seed %d.", folder, seed)
        drawn = _drawn(model, seed)
        found |= {name: drawn[name] for name in wanted if name.startswith(_HEADS)}
    missing = sorted(set(wanted) - set(found))
    unexpected = sorted(set(found) - set(wanted))
    misshapen = [
        f"{name} {tuple(found[name].shape)}, expected {shape}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name].shape) != shape
    ]
    parts = [
        f"{what}: {', '.join(names[:6])}{' ...' if names[6:] else ''}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
        if names
    ]
    if parts:
        msg = f"the weights in {folder} are not those of its configuration; nothing was loaded. {'; '.join(parts)}."
        raise fb.InputError("folder", msg)
    _put(model, found, dtype or dtypes.pop())
    return model.eval()


def save(model: DecisionModel, folder: str | Path) -> None:
    """Write `config.json` and `model.safetensors`, which `load` reads, and transformers too for the encoder."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: each.detach().cpu().contiguous() for name, each in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    values = {
        "architectures": ["ModernBertModel"],
        **model.config.to_dict(),
        "decision": {"actions": model.actions},
    }
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _put(model: DecisionModel, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    # Copied out of the mapped file, which may be written to later, and whose odd addresses cost bits: the CPU sums a
    # row that is not aligned in another order.
    cast = {name: each.detach().to(dtype, copy=True) for name, each in weights.items()}
    model.load_state_dict(cast, assign=True)
    model.requires_grad_(requires_grad=False)


def _drawn(model: DecisionModel, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, like in model.state_dict().items():
        if name.endswith("norm.weight"):
            drawn[name] = torch.ones(like.shape)
        elif name.endswith(".bias"):
            drawn[name] = torch.zeros(like.shape)
        else:
            last = name.endswith(("score.weight", "out.weight"))
            std = _SPREAD / math.sqrt(like.shape[-1]) if last else 0.02 if like.shape[-1] > 256 else 0.06  # noqa: PLR2004
            drawn[name] = torch.empty(like.shape).normal_(0.0, std, generator=generator)
    return drawn


def _named(name: str) -> str:
    """A bare `ModernBertModel` is saved without its first word."""
    bare = name.startswith(("embeddings.", "layers.", "final_norm."))
    return f"model.{name}" if bare else name


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        msg = f"there is no {path}; expected a folder with config.json and safetensors, as save_pretrained writes it."
        raise fb.InputError("folder", msg)
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        msg = f"{path} is not JSON: {error}."
        raise fb.InputError("folder", msg) from error
    return found


def _read(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    names = sorted(set(_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    found: dict[str, Tensor] = {}
    for name in names:
        path = folder / name
        if path.parent != folder or not path.is_file():
            msg = f"there is no {path}; expected safetensors beside config.json, as save_pretrained writes them."
            raise fb.InputError("folder", msg)
        try:
            found |= load_file(path)
        except (SafetensorError, OSError) as error:
            msg = f"{path} cannot be read: {error}."
            raise fb.InputError("folder", msg) from error
    return found
