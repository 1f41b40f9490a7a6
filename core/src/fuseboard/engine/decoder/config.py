"""What a Qwen2 or Qwen3 configuration means, and the refusal of what it may ask that is not implemented."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import attrs

from fuseboard.engine.decoder.rope import Rope
from fuseboard.errors import InputError

__all__ = ["DecoderConfig"]

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_READ = {
    *("model_type", *_SIZES, "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "tie_word_embeddings"),
    *(
        "attention_bias",
        "attention_dropout",
        "use_sliding_window",
        "sliding_window",
        "max_window_layers",
        "layer_types",
    ),
    *("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "max_position_embeddings"),
    *("original_max_position_embeddings", "eos_token_id", "pad_token_id"),
}
# Says nothing about the logits: where a model comes from, how it was made, how transformers returns its output, and the
# defaults for `generate` that transformers 4 kept here.
_ASIDE = {
    *("architectures", "_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "auto_map"),
    *("_commit_hash", "initializer_range", "use_cache", "bos_token_id", "sep_token_id", "decoder_start_token_id"),
    *("tokenizer_class", "return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward"),
    *("id2label", "label2id", "num_labels", "problem_type", "_attn_implementation", "attn_implementation"),
    *("_attn_implementation_autoset", "_attn_implementation_internal", "_experts_implementation", "finetuning_task"),
    *("task_specific_params", "prefix", "torchscript", "use_bfloat16", "tf_legacy_loss", "tie_encoder_decoder"),
    *("is_decoder", "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
    *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"),
    *("output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id"),
    *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
}
_FIXED: dict[str, Any] = {
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "is_causal": True,
    "pruned_heads": {},
    "mlp_bias": False,
}


def _positive(instance: object, attribute: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        msg = f"{attribute.name} is {value!r}; expected an int of at least 1."
        raise InputError(attribute.name, msg)


@attrs.frozen(kw_only=True)
class DecoderConfig:
    """A decoder's shape, by transformers' names.

    Attributes:
        model_type: `qwen2` or `qwen3`.
        layer_types: `full_attention` or `sliding_attention` for each layer.
        sliding_window: How many keys a query of a sliding layer sees, its own included; None without such layers.
        qkv_bias: Whether the projections of queries, keys and values have biases.
        o_bias: Whether the output projection has one.
        qk_norm: Whether queries and keys are normalised.
        rope: How positions turn into angles.
        eos: The ids that end a row, unless `generate` is told others.
        pad: What a row that has ended is filled with; None for the first of `eos`.
    """

    model_type: str
    vocab_size: int = attrs.field(validator=_positive)
    hidden_size: int = attrs.field(validator=_positive)
    intermediate_size: int = attrs.field(validator=_positive)
    num_hidden_layers: int = attrs.field(validator=_positive)
    num_attention_heads: int = attrs.field(validator=_positive)
    num_key_value_heads: int = attrs.field(validator=_positive)
    head_dim: int = attrs.field(validator=_positive)
    rms_norm_eps: float
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]
    sliding_window: int | None
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    attention_dropout: float
    rope: Rope
    eos: tuple[int, ...] = ()
    pad: int | None = None

    @classmethod
    def of(cls, config: Any, *, ignore: Collection[str] = ()) -> DecoderConfig:
        """From a `config.json` as a mapping, or a transformers configuration.

        Args:
            config: Either, or a `DecoderConfig`, which is returned.
            ignore: Options that you know to say nothing about the model's arithmetic.

        Raises:
            InputError: An option that is not implemented, or a value that cannot be; the message names it.
        """
        if isinstance(config, cls):
            return config
        if isinstance(config, type) or not (isinstance(config, Mapping) or hasattr(config, "to_dict")):
            msg = (
                f"config is {config!r}; expected a config.json as a mapping, a transformers configuration, "
                "or a DecoderConfig."
            )
            raise InputError("config", msg)
        ignore = (ignore,) if isinstance(ignore, str) else ignore
        values: dict[str, Any] = dict(config if isinstance(config, Mapping) else config.to_dict())
        values = {name: value for name, value in values.items() if name not in ignore}
        kind = values.get("model_type")
        if kind not in ("qwen2", "qwen3"):
            msg = f"model_type is {kind!r}; QwenDecoder computes 'qwen2' and 'qwen3'."
            raise InputError("model_type", msg)
        _refuse_the_rest(values)
        _check_sizes(values)
        heads, layers = values["num_attention_heads"], values["num_hidden_layers"]
        kv_heads = values.get("num_key_value_heads") or heads
        # A Qwen3 has a head dim of its own even where the file does not say it.
        head_dim = values.get("head_dim") or (128 if kind == "qwen3" and "head_dim" not in values else None)
        head_dim = head_dim or values["hidden_size"] // heads
        if heads % kv_heads:
            msg = f"num_attention_heads is {heads} and num_key_value_heads {kv_heads}; expected a multiple of it."
            raise InputError("num_key_value_heads", msg)
        if head_dim % 2:
            msg = f"head_dim is {head_dim}; rotary positions need an even one."
            raise InputError("head_dim", msg)
        types, window = _layers(values, layers)
        bias = values.get("attention_bias")
        if kind == "qwen2" and bias is False:
            msg = "attention_bias is False; a qwen2 always has biases on queries, keys and values."
            raise InputError("attention_bias", msg)
        return cls(
            model_type=kind,
            **{name: values[name] for name in _SIZES},
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(values, "rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            layer_types=types,
            sliding_window=window,
            qkv_bias=kind == "qwen2" or bool(bias),
            o_bias=kind == "qwen3" and bool(bias),
            qk_norm=kind == "qwen3",
            attention_dropout=_number(values, "attention_dropout", 0.0),
            rope=Rope.of(values, head_dim),
            eos=ids_of(values.get("eos_token_id"), "eos_token_id"),
            pad=values.get("pad_token_id"),
        )

    @property
    def groups(self) -> int:
        """How many query heads share a key head."""
        return self.num_attention_heads // self.num_key_value_heads

    def window_of(self, kind: str) -> int | None:
        """The window of a kind of layer."""
        return self.sliding_window if kind == "sliding_attention" else None


def ids_of(value: Any, name: str) -> tuple[int, ...]:
    """One id, several or none, as a tuple.

    Args:
        value: What was given.
        name: Of which argument or option.

    Raises:
        InputError: It is something else.
    """
    if value is None:
        return ()
    try:
        given = tuple(value if isinstance(value, Iterable) else (value,))
        if not any(isinstance(each, bool) for each in given):
            return tuple(map(operator.index, given))
    except TypeError:  # something else than whole numbers, or a tensor without an axis
        pass
    msg = f"{name} is {value!r}; expected an id, an int, or several."
    raise InputError(name, msg)


def _check_sizes(values: Mapping[str, Any]) -> None:
    missing = [name for name in _SIZES if values.get(name) is None]
    if missing:
        msg = f"the configuration lacks {', '.join(missing)}."
        raise InputError(missing[0], msg)
    for name in (*_SIZES, *(each for each in ("num_key_value_heads", "head_dim") if values.get(each))):
        value = values[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            msg = f"{name} is {value!r}; expected an int of at least 1."
            raise InputError(name, msg)


def _number(values: Mapping[str, Any], name: str, default: float) -> float:
    value = values.get(name)
    try:
        return default if value is None else float(value)
    except (TypeError, ValueError):
        msg = f"{name} is {value!r}; expected a number."
        raise InputError(name, msg) from None


def _refuse_the_rest(values: Mapping[str, Any]) -> None:
    act = values.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        msg = f"hidden_act is {act!r}; QwenDecoder computes 'silu'."
        raise InputError("hidden_act", msg)
    for name, value in values.items():
        if name in _READ or name in _ASIDE or value is None:
            continue
        if name in _FIXED:
            if value != _FIXED[name]:
                msg = f"{name} is {value!r}; QwenDecoder computes {_FIXED[name]!r} only."
                raise InputError(name, msg)
            continue
        shown = value if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
        msg = (
            f"the configuration asks for {name} ({shown!r}), which QwenDecoder does not know. "
            f"If it says nothing about the model's arithmetic, pass ignore=[{name!r}]."
        )
        raise InputError(name, msg)


def _layers(values: Mapping[str, Any], layers: int) -> tuple[tuple[str, ...], int | None]:
    """The kind of each layer and the window of the sliding ones, by transformers' rules."""
    window = values.get("sliding_window") if values.get("use_sliding_window", False) else None
    types = values.get("layer_types")
    if types is None:
        first = values.get("max_window_layers", 28)
        if window is not None and not isinstance(first, int):
            msg = f"max_window_layers is {first!r}; expected an int, the first layer that slides."
            raise InputError("max_window_layers", msg)
        sliding = [window is not None and index >= first for index in range(layers)]
        types = ["sliding_attention" if each else "full_attention" for each in sliding]
    types = tuple(types) if isinstance(types, (list, tuple)) else (types,)
    unknown = sorted({repr(each) for each in types if each not in ("full_attention", "sliding_attention")})
    if unknown or len(types) != layers:
        found = f"{len(types)} of them" + (f" with {', '.join(unknown)}" if unknown else "")
        msg = f"layer_types has {found}; expected {layers}, each 'full_attention' or 'sliding_attention'."
        raise InputError("layer_types", msg)
    if "sliding_attention" not in types:
        return types, None
    if isinstance(window, bool) or not isinstance(window, int) or window < 2:  # noqa: PLR2004 - transformers' least
        msg = (
            f"layer_types has sliding layers, but sliding_window is {values.get('sliding_window')!r} with "
            f"use_sliding_window {values.get('use_sliding_window')!r}; expected an int of at least 2 with True."
        )
        raise InputError("sliding_window", msg)
    return types, window
