"""From logits to ids as transformers' `generate` does it, bit for bit, with one wait for the device a step.

    sampler = Sampler(temperature=0.8, top_k=50, eos_token_id=2)
    state = sampler.start(prompt_ids, vocab, generator=generator)
    ids = sampler(logits, state)                # each step; nothing waits
    step = state.read(ids)                      # the one wait: ids, who has finished, and torch.multinomial's errors

A step changes tensors of the state in place and makes no other shape than the step before, so that a CUDA graph can
hold it: capture `sampler(logits, state)` with the generator registered, and restore `state.tensors` after a warm-up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import Tensor

from fuseboard.engine.sampling.draws import (
    multinomial1,
    new_invalid,
)
from fuseboard.engine.sampling.options import read_generation_config
from fuseboard.engine.sampling.processors import (
    check_positive_float,
    check_positive_int,
    check_share,
    min_p,
    repetition_penalty_seen,
    seen_and_beyond,
    suppress,
    temperature,
    token_mask,
    top_k,
    top_p,
)
from fuseboard.engine.sampling.state import State
from fuseboard.errors import InputError

__all__ = ["Sampler"]

_IDS = 2**63  # an id is an int64 on the device


def _ids(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    # What cannot be gone through is left to the check, which names the option.
    return tuple(value) if isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0 else (value,)


@attrs.frozen(kw_only=True)
class Sampler:
    """What turns logits into ids: transformers' options by transformers' names, checked as transformers checks them.

    An option at its default does nothing. Applied in transformers' order, which is the order of the attributes.

    Attributes:
        do_sample: False takes the most probable id; the options that only sampling has, `temperature` to `min_p`, then
            have no effect, as in transformers, and `report()` lists them.
        repetition_penalty: A positive float.
        min_new_tokens: No end before so many.
        suppress_tokens: Ids never drawn.
        begin_suppress_tokens: Ids not drawn as the first.
        temperature: A positive float.
        top_k: Keep so many, and those equal to the last; None or 0 keeps all.
        top_p: Keep the most probable ones up to this share; 1 keeps all.
        min_p: Keep those with at least this share of the most probable one's probability.
        eos_token_id: The id or ids that finish a row.
        pad_token_id: What a finished row goes on with; None is the first of `eos_token_id`.

    Raises:
        InputError: A value that transformers refuses.
    """

    do_sample: bool = True
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    suppress_tokens: tuple[int, ...] = attrs.field(default=(), converter=_ids)
    begin_suppress_tokens: tuple[int, ...] = attrs.field(default=(), converter=_ids)
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float | None = None
    eos_token_id: tuple[int, ...] = attrs.field(default=(), converter=_ids)
    pad_token_id: int | None = None

    def __attrs_post_init__(self) -> None:
        pad = self.pad_token_id
        if pad is not None and (not isinstance(pad, int) or isinstance(pad, bool) or not -_IDS <= pad < _IDS):
            msg = f"pad_token_id is {pad!r}; expected an id, an int, or None."
            raise InputError("pad_token_id", msg)
        if not isinstance(self.do_sample, bool):
            msg = f"do_sample is {self.do_sample!r}; expected True or False."
            raise InputError("do_sample", msg)
        if self.repetition_penalty != 1.0:
            check_positive_float("repetition_penalty", self.repetition_penalty)
            if self.pad_token_id is not None and self.pad_token_id < 0:
                msg = f"pad_token_id is {self.pad_token_id}; with a repetition penalty it has to be 0 or more."
                raise InputError("pad_token_id", msg)
        if self.min_new_tokens != 0:
            check_positive_int("min_new_tokens", self.min_new_tokens)
        for name in ("suppress_tokens", "begin_suppress_tokens", "eos_token_id"):
            wrong = [each for each in getattr(self, name) if not isinstance(each, int) or isinstance(each, bool)]
            if wrong:
                msg = f"{name} has {wrong[0]!r}; expected ids, each an int."
                raise InputError(name, msg)
        if self.do_sample:  # else transformers makes no processor of these, whatever they are
            self._check_sampling()

    def _check_sampling(self) -> None:
        if self.temperature != 1.0:
            check_positive_float("temperature", self.temperature)
        if self.top_k:
            check_positive_int("top_k", self.top_k)
        if self.top_p != 1.0:
            check_share("top_p", self.top_p)
        if self.min_p is not None:
            check_share("min_p", self.min_p)

    @classmethod
    def from_generation_config(cls, config: Any) -> Sampler:
        """The sampler that does what `generate` does with a transformers GenerationConfig.

        Give it the config that `generate` would end up with: a model's `generation_config` with the request's changes.
        How long to go on (`max_length`, `max_new_tokens`) stays the caller's loop's.

        Raises:
            InputError: It asks for what this sampler does not do; every such option is named.
        """
        values, refused = read_generation_config(config)
        if refused:
            msg = (
                f"the generation config asks for what the sampler does not do: {', '.join(refused)}. "
                "Switch these off, or let transformers' generate make the tokens."
            )
            raise InputError("config", msg)
        given = {name: value for name, value in values.items() if value is not None}
        return cls(**{**given, "do_sample": values["do_sample"] is True})

    def start(
        self,
        prompt_ids: Tensor,
        vocab: int,
        *,
        generator: torch.Generator | None = None,
        attention_mask: Tensor | None = None,
    ) -> State:
        """The state of a batch before its first step, on the prompt's device. Waits only to make masks, once a device.

        Args:
            prompt_ids: `(batch, length)`, ids. For the repetition penalty, in which padding counts unless
                `attention_mask` says what is padding; without any ids, `(batch, 0)`.
            vocab: How many columns the logits have.
            generator: Of the same device; None is torch's default generator, as in transformers.
            attention_mask: `(batch, length)`, 0 for padding. As in transformers' generate, the padding before a row's
                first real token then does not count as drawn.

        Raises:
            InputError: A shape, dtype or generator that cannot be right, or negative ids in a prompt on the CPU, where
                they are looked at for the repetition penalty.
        """
        if (
            not isinstance(prompt_ids, Tensor)
            or prompt_ids.dim() != 2  # noqa: PLR2004 - (batch, length)
            or prompt_ids.dtype not in (torch.int64, torch.int32)
        ):
            msg = f"prompt_ids is {_shown(prompt_ids)}; expected int64 ids (batch, length)."
            raise InputError("prompt_ids", msg)
        if attention_mask is not None and not isinstance(attention_mask, Tensor):
            msg = f"attention_mask is a {type(attention_mask).__name__}; expected a tensor, as prompt_ids is."
            raise InputError("attention_mask", msg)
        if attention_mask is not None and attention_mask.shape != prompt_ids.shape:
            msg = (
                f"attention_mask has shape {tuple(attention_mask.shape)}; "
                f"expected that of prompt_ids, {tuple(prompt_ids.shape)}."
            )
            raise InputError("attention_mask", msg)
        check_positive_int("vocab", vocab)
        batch, device = prompt_ids.shape[0], prompt_ids.device
        if (
            self.do_sample
            and generator is not None
            and (not isinstance(generator, torch.Generator) or generator.device.type != device.type)
        ):
            where = f" of {generator.device}" if isinstance(generator, torch.Generator) else ""
            msg = f"generator is a {type(generator).__name__}{where}; expected a torch.Generator of {device}, or None."
            raise InputError("generator", msg)
        # Written by later steps, which may run outside the caller's inference mode.
        with torch.inference_mode(False), torch.no_grad():
            seen = None
            if self.repetition_penalty != 1.0:
                ids = prompt_ids.long()
                if attention_mask is not None and ids.shape[1]:
                    first = (attention_mask != 0).int().argmax(dim=1)
                    places = torch.arange(ids.shape[1], device=device)
                    ids = ids.masked_fill(places < first[:, None], vocab)
                if device.type == "cpu" and ids.numel() and int(ids.min()) < 0:
                    msg = f"prompt_ids has {int(ids.min())}; expected ids of 0 or more."
                    raise InputError("prompt_ids", msg)
                seen = seen_and_beyond(ids, vocab)
            masks = {
                name: token_mask(ids, vocab, device)
                for name, ids in (
                    ("eos", self.eos_token_id),
                    ("suppress", self.suppress_tokens),
                    ("begin", self.begin_suppress_tokens),
                )
                if ids
            }
            return State(
                generator=generator,
                vocab=vocab,
                finished=torch.zeros(batch, dtype=torch.bool, device=device),
                invalid=new_invalid(device),
                count=torch.zeros((), dtype=torch.int64, device=device),
                seen_and_beyond=seen,
                masks=masks,
                lists=self._lists,
            )

    def scores(self, logits: Tensor, state: State) -> Tensor:
        """The processed scores of a step, float32 `(batch, vocab)`; the state stays as it is.

        Args:
            logits: `(batch, vocab)`, or `(batch, length, vocab)`, of which the last position counts.
            state: From `start`.

        Raises:
            InputError: The logits' shape is not that of the state, or the state is another sampler's.
        """
        return self._processed(logits, state).float()

    def _processed(self, logits: Tensor, state: State) -> Tensor:
        """The scores, in float32, or in a narrower dtype of the logits where nothing processes them."""
        if state.lists != self._lists or (state.seen_and_beyond is None and self.repetition_penalty != 1.0):
            msg = (
                "the state was started by a sampler with other lists of ids, or without a repetition penalty; "
                "make one with this sampler's start()."
            )
            raise InputError("state", msg)
        scores, blocked = _last(logits, state), self._blocked(state)
        if not self.do_sample and state.seen is None and blocked is None:
            return scores.float() if scores.dtype == torch.float64 else scores
        scores = scores.float()
        if state.seen is not None:
            scores = repetition_penalty_seen(scores, state.seen, self.repetition_penalty)
        if blocked is not None:
            scores = suppress(scores, blocked)
        if not self.do_sample:
            return scores
        if self.temperature != 1.0:
            scores = temperature(scores, self.temperature)
        if self.top_k:
            scores = top_k(scores, self.top_k)
        if self.top_p < 1.0:
            scores = top_p(scores, self.top_p)
        if self.min_p is not None:
            scores = min_p(scores, self.min_p)
        return scores

    def __call__(self, logits: Tensor, state: State) -> Tensor:
        """One step: ids `(batch, 1)`, int64, on the device. Does not wait for it.

        Args:
            logits: As for `scores`.
            state: From `start`; changed in place.

        Raises:
            InputError: The logits' shape is not that of the state, or the state is another sampler's.
        """
        if self.do_sample:
            ids = multinomial1(self.scores(logits, state).softmax(dim=-1), state.generator, invalid=state.invalid)
        else:  # of any dtype: in float32 they would have the same order, and the same ties
            ids = self._processed(logits, state).argmax(dim=-1, keepdim=True)
        state.count.add_(1)
        if self.eos_token_id:
            # The end is looked up before the padding is put in: that need not be an id of the vocabulary.
            ends = state.masks["eos"].index_select(0, ids[:, 0])
            ids = ids.masked_fill(state.finished[:, None], self._pad)
            state.finished.logical_or_(ends)
        if state.seen_and_beyond is not None:
            state.seen_and_beyond.scatter_(1, ids.clamp(max=state.vocab), True)
        return ids

    def _blocked(self, state: State) -> Tensor | None:
        """The ids that cannot be drawn in this step. The processors that say so follow each other: one mask for all."""
        masks, blocked = state.masks, state.masks.get("suppress")
        held = []
        if self.min_new_tokens and self.eos_token_id:
            held.append(masks["eos"] & (state.count < self.min_new_tokens))
        if self.begin_suppress_tokens:
            held.append(masks["begin"] & (state.count == 0))
        for each in held:
            blocked = each if blocked is None else blocked | each
        return blocked

    @property
    def _lists(self) -> tuple[tuple[int, ...], ...]:
        """What a state has masks of."""
        return self.eos_token_id, self.suppress_tokens, self.begin_suppress_tokens

    @property
    def _pad(self) -> int:
        return self.eos_token_id[0] if self.pad_token_id is None else self.pad_token_id

    def report(self) -> dict[str, Any]:
        """What it does, as JSON-ready data, to be put beside an output.

        `mode` is `sample` or `greedy`; `applied` has the processors in order; `unused` has what is set and has no
        effect; `eos` and `pad` are ids.
        """
        applied: dict[str, Any] = {
            "repetition_penalty": self.repetition_penalty if self.repetition_penalty != 1.0 else None,
            "min_new_tokens": self.min_new_tokens if self.eos_token_id else None,
            "suppress_tokens": list(self.suppress_tokens),
            "begin_suppress_tokens": list(self.begin_suppress_tokens),
        }
        sampling: dict[str, Any] = {
            "temperature": self.temperature if self.temperature != 1.0 else None,
            "top_k": self.top_k,
            "top_p": self.top_p if self.top_p != 1.0 else None,
            "min_p": self.min_p,
        }
        without_end = {"min_new_tokens": self.min_new_tokens, "pad_token_id": self.pad_token_id}
        unused: dict[str, Any] = {} if self.eos_token_id else without_end
        if self.do_sample:
            applied |= sampling
        else:
            unused |= sampling
        return {
            "mode": "sample" if self.do_sample else "greedy",
            "applied": {name: value for name, value in applied.items() if _is_set(name, value)},
            "unused": {name: value for name, value in unused.items() if _is_set(name, value)},
            "eos": list(self.eos_token_id),
            "pad": self._pad if self.eos_token_id else None,
        }

    def describe(self) -> str:
        """The report as a line of text."""
        report = self.report()
        steps = [f"{name} {value}" for name, value in report["applied"].items()]
        last = "one draw" if self.do_sample else "the most probable"
        text = f"{report['mode']}: {', then '.join([*steps, last])}"
        if report["eos"]:
            text += f"; ends at {', '.join(map(str, report['eos']))}, then {report['pad']}"
        if report["unused"]:
            text += f"; without effect: {', '.join(f'{name} {value}' for name, value in report['unused'].items())}"
        return text


def _is_set(name: str, value: Any) -> bool:
    # An id, a min_p and a top_p may be 0; a top_k and a count of tokens at 0 are off.
    return bool(value) or (value is not None and name in ("pad_token_id", "min_p", "top_p"))


def _last(logits: Tensor, state: State) -> Tensor:
    """The last position's, `(batch, vocab)`."""
    batch = state.finished.shape[0]
    if not isinstance(logits, Tensor):
        msg = f"logits is a {type(logits).__name__}; expected a tensor, (batch, vocab) or (batch, length, vocab)."
        raise InputError("logits", msg)
    shape = logits.shape
    if len(shape) not in (2, 3) or (shape[0], shape[-1]) != (batch, state.vocab) or 0 in shape[1:-1]:
        msg = (
            f"logits has shape {tuple(shape)}; expected (batch, vocab) = ({batch}, {state.vocab}), "
            "or (batch, length, vocab)."
        )
        raise InputError("logits", msg)
    return logits.detach() if len(shape) == 2 else logits.detach()[:, -1]  # noqa: PLR2004


def _shown(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
