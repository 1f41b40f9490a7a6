"""What a ModernBERT configuration means, and the refusal of what it may ask that is not computed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

import fuseboard as fb

__all__ = ["FULL", "SLIDING", "EncoderConfig"]

FULL, SLIDING = "full_attention", "sliding_attention"
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_THETA = {FULL: 160_000.0, SLIDING: 10_000.0}
_OLD_THETA = {FULL: "global_rope_theta", SLIDING: "local_rope_theta"}
# What this engine computes and nothing else; a value of None is the same as none given.
_FIXED = {"hidden_activation": "gelu", "rope_scaling": None, "position_embedding_type": "absolute"}
# Says nothing of the encoder's arithmetic: heads for other tasks, training, and where a model comes from.
_ASIDE = {
    *("model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "decision"),
    *("max_position_embeddings", "eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id", "initializer_range"),
    *("initializer_cutoff_factor", "decoder_bias", "classifier_pooling", "classifier_dropout", "classifier_bias"),
    *("classifier_activation", "deterministic_flash_attn", "sparse_prediction", "sparse_pred_ignore_index"),
    *("tie_word_embeddings", "reference_compile", "repad_logits_with_grad", "gradient_checkpointing", "is_decoder"),
    *("id2label", "label2id", "num_labels", "problem_type", "output_attentions", "output_hidden_states"),
    *("return_dict", "use_cache", "chunk_size_feed_forward", "is_encoder_decoder", "layer_norm_eps", "mask_token_id"),
    *("_attn_implementation", "_attn_implementation_internal", "attn_implementation", "unk_token_id"),
    *("add_cross_attention", "pruned_heads", "_experts_implementation", "auto_map"),
}


@attrs.frozen(kw_only=True)
class EncoderConfig:
    """An encoder's shape, by transformers' names.

    Attributes:
        layer_types: `full_attention` or `sliding_attention` for each layer.
        local_attention: The window of sliding layers: a token sees those at most half as far away, on either side.
        theta: The base of the rotary frequencies for each kind of layer.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_types: tuple[str, ...]
    theta: Mapping[str, float]
    local_attention: int = 128
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    mlp_dropout: float = 0.0
    pad_token_id: int | None = None

    @property
    def head_dim(self) -> int:
        """Numbers in one head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def reach(self) -> int:
        """How far away a token of a sliding layer may look, on either side."""
        return self.local_attention // 2

    @classmethod
    def of(cls, config: Any) -> EncoderConfig:
        """From a `config.json` as a mapping, old names or new, or a transformers configuration.

        Raises:
            InputError: Something that is not computed here; the message names it.
        """
        if isinstance(config, cls):
            return config
        values = dict(config if isinstance(config, Mapping) else config.to_dict())
        if values.get("model_type", "modernbert") != "modernbert":
            msg = f"model_type is {values['model_type']!r}; this engine computes 'modernbert'."
            raise fb.InputError("model_type", msg)
        missing = [name for name in _SIZES if values.get(name) is None]
        if missing:
            msg = f"the configuration lacks {', '.join(missing)}."
            raise fb.InputError(missing[0], msg)
        made = cls(layer_types=_layers(values), theta=_thetas(values), **_plain(values))
        if made.hidden_size % made.num_attention_heads or made.head_dim % 2:
            msg = (
                f"hidden_size is {made.hidden_size} and num_attention_heads {made.num_attention_heads}; "
                "expected an even number for each head."
            )
            raise fb.InputError("num_attention_heads", msg)
        return made

    def to_dict(self) -> dict[str, Any]:
        """What `of` reads, and transformers too."""
        values = attrs.asdict(self)
        theta = values.pop("theta")
        rope = {kind: {"rope_type": "default", "rope_theta": theta[kind]} for kind in (FULL, SLIDING)}
        return {"model_type": "modernbert", **values, "layer_types": list(self.layer_types), "rope_parameters": rope}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    own = {each.name for each in attrs.fields(EncoderConfig)} - {"layer_types", "theta"}
    read = {"layer_types", "global_attn_every_n_layers", "rope_parameters", *_OLD_THETA.values()}
    for name, value in values.items():
        if name in own or name in read or name in _ASIDE or value is None or value == _FIXED.get(name):
            continue
        wanted = f"this engine computes {_FIXED[name]!r}" if name in _FIXED else "which this engine does not know"
        msg = f"the configuration asks for {name} = {value!r}; {wanted}."
        raise fb.InputError(name, msg)
    return {name: values[name] for name in own if values.get(name) is not None}


def _layers(values: Mapping[str, Any]) -> tuple[str, ...]:
    count = values["num_hidden_layers"]
    every = values.get("global_attn_every_n_layers") or 3
    types = values.get("layer_types") or [SLIDING if index % every else FULL for index in range(count)]
    if len(types) != count or not set(types) <= {FULL, SLIDING}:
        msg = f"layer_types is {types!r}; expected {count} of {FULL!r} and {SLIDING!r}."
        raise fb.InputError("layer_types", msg)
    return tuple(types)


def _thetas(values: Mapping[str, Any]) -> dict[str, float]:
    """From `rope_parameters` (transformers 5) or the two numbers of transformers 4."""
    found = {}
    for kind, default in _THETA.items():
        given = dict((values.get("rope_parameters") or {}).get(kind) or {})
        if given.get("rope_type", "default") != "default" or given.get("partial_rotary_factor") not in (None, 1.0):
            msg = f"rope_parameters of {kind} is {given!r}; this engine computes rope_type 'default' on whole heads."
            raise fb.InputError("rope_parameters", msg)
        found[kind] = float(given.get("rope_theta") or values.get(_OLD_THETA[kind]) or default)
    # transformers 4 wrote down null for "as the global ones".
    if _OLD_THETA[SLIDING] in values and values[_OLD_THETA[SLIDING]] is None and not values.get("rope_parameters"):
        found[SLIDING] = found[FULL]
    return found
