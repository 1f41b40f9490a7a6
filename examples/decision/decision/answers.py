"""What stands outside of the model: questions become padded tensors, logits become calibrated answers.

Three kinds of question, each with one marker token before each option:

* `choice`: which of the options; the answer is an index.
* `noul`: a yes-or-no question, whose two options are no and yes; the answer is a truth value.
* `score`: how much, on levels from least to most; the answer is the expected level, from 0.0 to the number of levels
  minus 1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor

import fuseboard as fb
from decision.model import DecisionModel, Logits

__all__ = ["KINDS", "Answer", "Batch", "Calibration", "Question", "answers", "ask", "collate", "fitted"]

KINDS = ("choice", "noul", "score")
LEAST, MOST = 0.5, 10.0
"""Temperatures beyond these say that a head was fitted to too little; they are cut."""


@attrs.frozen
class Question:
    """Tokens with markers.

    Attributes:
        kind: One of `KINDS`.
        ids: Token ids, at least one.
        markers: Where in `ids` each option's marker is, at least one; two for `noul`.

    Raises:
        InputError: A field means nothing.
    """

    kind: str
    ids: tuple[int, ...] = attrs.field(converter=tuple)
    markers: tuple[int, ...] = attrs.field(converter=tuple)

    def __attrs_post_init__(self) -> None:
        if self.kind not in KINDS:
            msg = f"kind is {self.kind!r}; expected one of {', '.join(KINDS)}."
            raise fb.InputError("kind", msg)
        if not self.ids:
            msg = "ids is empty; a question has at least one token."
            raise fb.InputError("ids", msg)
        if not self.markers or not all(0 <= at < len(self.ids) for at in self.markers):
            msg = f"markers is {self.markers}; expected places in {len(self.ids)} tokens, at least one."
            raise fb.InputError("markers", msg)
        if self.kind == "noul" and len(self.markers) != 2:  # noqa: PLR2004
            msg = f"markers is {self.markers}; a noul question has two, no and yes."
            raise fb.InputError("markers", msg)


class Batch(NamedTuple):
    """The model's four inputs, in its order: `model(*batch)`."""

    input_ids: Tensor
    attention_mask: Tensor
    marker_positions: Tensor
    marker_mask: Tensor


def collate(
    questions: Sequence[Question],
    *,
    vocabulary: int,
    pad: int = 0,
    multiple: int = 16,
    shortest: int = 32,
    device: torch.device | str | None = None,
) -> Batch:
    """Questions as tensors, padded on the right, in the shapes that a package takes.

    Args:
        questions: At least one.
        vocabulary: How many ids the model knows. Looked at here, since neither a GPU nor a package can refuse an id.
        pad: The id to fill with.
        multiple: Of which the length is one.
        shortest: The least length.
        device: Where to.

    Raises:
        InputError: There is no question, or one holds an id that the model does not know.
    """
    if not questions:
        msg = "questions is empty; expected at least one."
        raise fb.InputError("questions", msg)
    for index, question in enumerate(questions):
        wrong = next((each for each in question.ids if not 0 <= each < vocabulary), None)
        if wrong is not None:
            msg = f"question {index} holds token id {wrong}; the model knows 0 to {vocabulary - 1}."
            raise fb.InputError("questions", msg)
    longest = max(shortest, *(len(each.ids) for each in questions))
    length = math.ceil(longest / multiple) * multiple
    # One slot is two, one of them without an option: a graph that was exported for a range of slots begins at two.
    slots = max(2, *(len(each.markers) for each in questions))
    rows = [[*each.ids, *[pad] * (length - len(each.ids))] for each in questions]
    places = [[*each.markers, *[0] * (slots - len(each.markers))] for each in questions]
    tokens = torch.tensor([len(each.ids) for each in questions])[:, None]
    options = torch.tensor([len(each.markers) for each in questions])[:, None]
    batch = Batch(
        torch.tensor(rows),
        (torch.arange(length)[None] < tokens).long(),
        torch.tensor(places),
        torch.arange(slots)[None] < options,
    )
    return Batch(*(each.to(device) for each in batch))


def _temperature(_instance: object, attribute: Any, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        kind, _, least = name.partition(":")
        if kind not in KINDS or (least and not (least.endswith("+") and least[:-1].isdecimal())):
            msg = f"{attribute.name} has {name!r}; expected 'choice' or its like, or 'choice:11+' from 11 options on."
            raise fb.InputError(attribute.name, msg)
        if not (math.isfinite(value) and value > 0):
            msg = f"the temperature of {name!r} is {value!r}; expected a positive number."
            raise fb.InputError(attribute.name, msg)


def _cut(values: Mapping[str, float]) -> dict[str, float]:
    kept = {}
    for name, value in values.items():
        kept[name] = min(max(value, LEAST), MOST) if value > 0 else value
        if kept[name] != value and value > 0:
            warnings.warn(f"the temperature of {name} is {value:g}; {kept[name]:g} is used.", stacklevel=3)
    return kept


@attrs.frozen
class Calibration:
    """Temperatures by kind of question, and from a number of options on: `{"choice": 1.3, "choice:11+": 2.0}`.

    Raises:
        InputError: A name or a number means nothing.
    """

    temperatures: Mapping[str, float] = attrs.field(factory=dict, converter=_cut, validator=_temperature)

    def of(self, question: Question) -> float:
        """A question's temperature: the entry with the most options that it has, else the kind's, else 1."""
        found, most = self.temperatures.get(question.kind, 1.0), 0
        for name, value in self.temperatures.items():
            kind, _, least = name.partition(":")
            if kind == question.kind and least and most <= int(least[:-1]) <= len(question.markers):
                found, most = value, int(least[:-1])
        return found


def fitted(logits: Tensor, right: Tensor) -> float:
    """The temperature at which the logits give the right options the greatest likelihood, between `LEAST` and `MOST`.

    Args:
        logits: `(questions, slots)`, `LOWEST` or -inf where there is no option.
        right: `(questions,)`, the right option of each.
    """
    wide, at = logits.double().cpu(), right.cpu()[:, None]
    low, high = math.log(LEAST), math.log(MOST)

    def loss(log_temperature: float) -> float:
        return -float((wide / math.exp(log_temperature)).log_softmax(-1).gather(1, at).mean())

    golden = (math.sqrt(5) - 1) / 2
    while high - low > 1e-4:  # noqa: PLR2004
        left, after = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, after) if loss(left) < loss(after) else (left, high)
    return math.exp((low + high) / 2)


@attrs.frozen
class Answer:
    """What the model says to one question.

    Attributes:
        kind: The question's.
        value: An index (`choice`), a truth value (`noul`), or an expected level (`score`).
        probability: Of the option that is most likely.
        probabilities: Of each option.
        action: The most likely action.
        action_probability: Its probability, not calibrated.
    """

    kind: str
    value: int | bool | float
    probability: float
    probabilities: tuple[float, ...]
    action: int
    action_probability: float


def answers(questions: Sequence[Question], logits: Logits, calibration: Calibration | None = None) -> list[Answer]:
    """Calibrated answers; waits for the device once.

    Args:
        questions: As they were collated.
        logits: What the model, or a package of it, gave.
        calibration: Temperatures of the decision; none means 1.
    """
    calibration = calibration or Calibration()
    decision, action = (each.double().cpu() for each in logits)
    given = []
    for row, question in enumerate(questions):
        odds = (decision[row, : len(question.markers)] / calibration.of(question)).softmax(-1)
        acts = action[row].softmax(-1)
        at = int(odds.argmax())
        level = float((odds * torch.arange(len(odds))).sum())
        value = at if question.kind == "choice" else bool(at) if question.kind == "noul" else level
        act = int(acts.argmax())
        given.append(Answer(question.kind, value, float(odds[at]), tuple(odds.tolist()), act, float(acts[act])))
    return given


def ask(model: DecisionModel, questions: Sequence[Question], calibration: Calibration | None = None) -> list[Answer]:
    """Answers of a model, in one batch."""
    config = model.config
    where = model.model.embeddings.tok_embeddings.weight.device
    batch = collate(questions, vocabulary=config.vocab_size, pad=config.pad_token_id or 0, device=where)
    with torch.inference_mode():
        return answers(questions, model(*batch), calibration)
