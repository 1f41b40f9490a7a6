"""transformers' GenerationConfig, read for a Sampler: every option is applied, is not the sampler's, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuseboard.errors import InputError

__all__ = ["APPLIED", "ELSEWHERE", "REFUSED", "read_generation_config"]

APPLIED = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_new_tokens"),
    *("suppress_tokens", "begin_suppress_tokens", "eos_token_id", "pad_token_id"),
)

# What changes no token, given the logits; or only how long the caller's own loop is; or only beams, assistants and
# prompt lookup, each of which is switched on by an option that is refused.
ELSEWHERE = frozenset({
    *("max_length", "max_new_tokens", "bos_token_id", "decoder_start_token_id"),
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "return_legacy_cache"),
    *("prefill_chunk_size", "compile_config", "disable_compile", "low_memory", "continuous_batching_config"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("early_stopping", "length_penalty"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "max_matching_ngram_size"),
    *("generation_kwargs", "transformers_version"),
})  # fmt: skip


def _is_off(value: Any) -> bool:
    return value is None or value is False


def _off_at(neutral: float) -> Callable[[Any], bool]:
    return lambda value: value is None or value == neutral


def _off_outside(value: Any) -> bool:
    """A cutoff that transformers applies between 0 and 1 alone."""
    return value is None or not 0 < value < 1


def _off_from_one(value: Any) -> bool:
    return value is None or value >= 1


# Refused unless off, with what transformers takes for off.
REFUSED: dict[str, Callable[[Any], bool]] = {
    "num_beams": _off_at(1),
    "num_beam_groups": _off_at(1),
    "diversity_penalty": _off_at(0),
    "constraints": _is_off,
    "force_words_ids": _is_off,
    "penalty_alpha": _off_at(0),
    "dola_layers": _is_off,
    "num_return_sequences": _off_at(1),
    "use_mtp": _is_off,
    "prompt_lookup_num_tokens": _is_off,
    "assistant_early_exit": _is_off,
    "speculation_type": _is_off,
    "token_healing": _is_off,
    "stop_strings": _is_off,
    "max_time": _is_off,
    "guidance_scale": _off_at(1),
    "sequence_bias": _is_off,
    "encoder_repetition_penalty": _off_at(1),
    "no_repeat_ngram_size": _off_at(0),
    "encoder_no_repeat_ngram_size": _off_at(0),
    "bad_words_ids": _is_off,
    "min_length": _off_at(0),
    "forced_bos_token_id": _is_off,
    "forced_eos_token_id": _is_off,
    "remove_invalid_values": _is_off,
    "forced_decoder_ids": _is_off,
    "exponential_decay_length_penalty": _is_off,
    "top_h": _is_off,
    "typical_p": _off_from_one,
    "epsilon_cutoff": _off_outside,
    "eta_cutoff": _off_outside,
    "watermarking_config": _is_off,
    "renormalize_logits": _is_off,
}


def read_generation_config(config: Any) -> tuple[dict[str, Any], list[str]]:
    """What a Sampler takes from a GenerationConfig, and what it cannot do, each as `option=value`.

    An option left at None means what `generate` makes of it: 50 for `top_k`, in versions of transformers that fill it
    in then. An option that is in no list, from a later transformers or the caller's own, is refused unless it is as in
    a config newly made.

    Raises:
        InputError: It is no such object.
    """
    if isinstance(config, type) or not hasattr(config, "__dict__"):
        msg = f"config is {config!r}; expected a transformers GenerationConfig, such as a model's generation_config."
        raise InputError("config", msg)
    defaults: dict[str, Any] = getattr(config, "_get_default_generation_params", dict)()
    options = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    values = {name: defaults.get(name) if options.get(name) is None else options[name] for name in APPLIED}
    new: dict[str, Any] | None = None
    refused = []
    for name, value in options.items():
        if name in APPLIED or name in ELSEWHERE:
            continue
        if name in REFUSED:
            is_off = REFUSED[name](value)
        else:
            new = vars(type(config)()) if new is None else new
            is_off = value is None or (name in new and value == new[name])
        if not is_off:
            refused.append(f"{name}={value!r}")
    return values, refused
