"""transformers' logits processors as functions: the same bits, and nothing that waits for the device.

Each takes scores `(batch, vocab)` and gives new ones. What transformers makes anew each step, the masks of ids, is
made once (`token_mask`). The order of transformers is: repetition penalty, minimum of new tokens, suppressed tokens,
then, when sampling, temperature, top-k, top-p, min-p; `Sampler` keeps it.

Parameters stay Python floats: CUDA divides by a Python float through its reciprocal, and by a tensor properly, up to
one unit in the last place apart (pytorch #191495).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fuseboard.errors import InputError

__all__ = [
    "mark_seen",
    "min_new_tokens",
    "min_p",
    "repetition_penalty",
    "repetition_penalty_seen",
    "seen_mask",
    "suppress",
    "temperature",
    "token_mask",
    "top_k",
    "top_p",
]

# Penalties far enough from what float32 takes for zero or infinity; with those, 0 * penalty or inf * penalty is NaN.
_IN_FLOAT32 = (1e-30, 1e30)


def token_mask(ids: Iterable[int], vocab: int, device: torch.device | str) -> Tensor:
    """A bool mask `(vocab,)`, True at `ids`; ids outside the vocabulary are left out, as transformers leaves them out.

    Made once for each (ids, vocab, device) and shared: do not write into it. Making it waits for the device.
    """
    return _token_mask(tuple(sorted({operator.index(each) for each in ids})), vocab, torch.device(device))


@functools.lru_cache(maxsize=64)
def _token_mask(ids: tuple[int, ...], vocab: int, device: torch.device) -> Tensor:
    # Kept beyond this call, so an ordinary tensor also when it is made in inference mode. The copy waits until the mask
    # is on the device: requests on other streams use it too.
    with torch.inference_mode(False):
        mask = torch.zeros(vocab, dtype=torch.bool, device="cpu")
        mask[[each for each in ids if 0 <= each < vocab]] = True
        return mask.to(device)


def repetition_penalty(scores: Tensor, ids: Tensor, penalty: float) -> Tensor:
    """Scores of ids in the history, divided by the penalty where they are positive, multiplied where negative.

    Args:
        scores: `(batch, vocab)`.
        ids: `(batch, length)`, all of it: padding counts, as in transformers. Each id is penalised once; ids beyond the
            vocabulary are passed over.
        penalty: Positive; above 1 it makes a repetition less likely.

    Raises:
        InputError: The penalty is not a positive float.
    """
    check_positive_float("penalty", penalty)
    vocab = scores.shape[-1]
    ids = ids.clamp(max=vocab)
    scores = F.pad(scores, (0, 1))  # the column that takes the ids beyond the vocabulary
    score = scores.gather(1, ids)
    score = torch.where(score < 0, score * penalty, score / penalty)
    return scores.scatter(1, ids, score)[..., :vocab]


def seen_mask(ids: Tensor, vocab: int) -> Tensor:
    """Which ids occur in a history `(batch, length)`: bool `(batch, vocab)`. Ids beyond the vocabulary are left out."""
    return seen_and_beyond(ids, vocab)[:, :vocab]


def mark_seen(seen: Tensor, ids: Tensor) -> None:
    """Add ids `(batch, length)` to a mask from `seen_mask`, in place."""
    seen.logical_or_(seen_mask(ids, seen.shape[-1]))


def seen_and_beyond(ids: Tensor, vocab: int) -> Tensor:
    """As `seen_mask`, with a column more, for the ids beyond the vocabulary."""
    with torch.inference_mode(mode=False):  # later steps write into it, wherever they are made
        seen = torch.zeros(ids.shape[0], vocab + 1, dtype=torch.bool, device=ids.device)
    return seen.scatter_(1, ids.clamp(max=vocab), True)


def repetition_penalty_seen(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """`repetition_penalty` over a mask of the ids that occurred: its shape does not grow, so that a graph can hold it.

    Args:
        scores: `(batch, vocab)`; no gradient goes through.
        seen: Bool `(batch, vocab)`, from `seen_mask` and `mark_seen`.
        penalty: As for `repetition_penalty`.

    Raises:
        InputError: The penalty is not a positive float.
    """
    check_positive_float("penalty", penalty)
    scores = scores.detach()
    if not _IN_FLOAT32[0] < penalty < _IN_FLOAT32[1]:
        return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    # Of the product and the quotient the wanted one is always the lower, or with a penalty below 1 the higher: rounding
    # keeps order. That takes half the time of choosing by sign, and one tensor less of the vocabulary's size.
    choose = torch.minimum if penalty > 1 else torch.maximum
    penalised = scores * penalty
    choose(penalised, scores / penalty, out=penalised)
    return torch.where(seen, penalised, scores, out=penalised)


def min_new_tokens(scores: Tensor, eos: Tensor, count: int | Tensor, minimum: int) -> Tensor:
    """No end before `minimum` new tokens.

    Args:
        scores: `(batch, vocab)`.
        eos: From `token_mask`.
        count: How many tokens were generated; as an int64 tensor `()` on the device where a graph is to hold the step.
        minimum: How many must be.
    """
    if isinstance(count, Tensor):
        return suppress(scores, eos & (count < minimum))
    return suppress(scores, eos) if count < minimum else scores


def suppress(scores: Tensor, mask: Tensor) -> Tensor:
    """Minus infinity where a mask, from `token_mask`, is True."""
    return scores.masked_fill(mask, -torch.inf)


def temperature(scores: Tensor, value: float) -> Tensor:
    """Scores divided by a positive float.

    Raises:
        InputError: It is not one.
    """
    check_positive_float("temperature", value)
    return scores / value


def top_k(scores: Tensor, k: int) -> Tensor:
    """Keep the `k` highest scores, and all that are equal to the lowest of them.

    Raises:
        InputError: `k` is not a positive int.
    """
    check_positive_int("top_k", k)
    least = scores.topk(min(k, scores.shape[-1])).values[..., -1, None]
    return scores.masked_fill(scores < least, -torch.inf)


def top_p(scores: Tensor, p: float) -> Tensor:
    """Keep the most probable tokens whose probabilities add up to `p`, the one that crosses it included; at least one.

    Raises:
        InputError: `p` is not between 0 and 1.
    """
    check_share("top_p", p)
    # transformers' very calls: the default sort is not stable, so another one would keep other tokens of equal score,
    # and softmax over fewer columns than the vocabulary has other bits.
    in_order, indices = torch.sort(scores, descending=False)
    removed = in_order.softmax(dim=-1).cumsum(dim=-1) <= (1 - float(p))
    removed[..., -1:].fill_(False)
    return scores.masked_fill(removed.scatter(-1, indices, removed), -torch.inf)


def min_p(scores: Tensor, share: float) -> Tensor:
    """Keep tokens at least `share` times as probable as the most probable one.

    Raises:
        InputError: `share` is not between 0 and 1.
    """
    check_share("min_p", share)
    probs = scores.softmax(dim=-1)
    removed = probs < share * probs.amax(dim=-1, keepdim=True)
    removed.scatter_(-1, probs.topk(1, dim=-1).indices, False)
    return scores.masked_fill(removed, -torch.inf)


def check_positive_float(name: str, value: float) -> None:
    """As transformers: an int is refused, whatever its value."""
    if not isinstance(value, float) or not value > 0:
        greedy = " For greedy decoding set do_sample=False." if name == "temperature" and value == 0 else ""
        msg = f"{name} is {value!r}; it has to be a strictly positive float.{greedy}"
        raise InputError(name, msg)


def check_positive_int(name: str, value: int) -> None:
    """As transformers, and no bool."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        msg = f"{name} is {value!r}; it has to be a strictly positive int."
        raise InputError(name, msg)


def check_share(name: str, value: float) -> None:
    """As transformers, and no NaN."""
    if not isinstance(value, float | int) or not 0 <= value <= 1:
        msg = f"{name} is {value!r}; it has to be a float from 0 to 1."
        raise InputError(name, msg)
