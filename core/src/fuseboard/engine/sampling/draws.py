"""Ids drawn as `torch.multinomial` draws them, without the two waits for the device that its checks make.

For one draw, and for draws without replacement, torch.multinomial is argmax(p / Exp(1)) and topk(p / Exp(1), n). The
same operators on the same tensors give the same ids and leave the generator in the same state. Torch looks at the
values first and waits for the answer twice; here the answer is kept in a tensor, `invalid`, for the caller's own wait.

The noise is drawn in the dtype of the probabilities, as torch does. Half precision rounds some of it to zero, and then
an id of probability zero is drawn (pytorch #192812): draw from float32, as `Sampler` does.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from fuseboard.errors import FuseboardError

__all__ = ["DrawError", "draws_without_waiting", "multinomial1", "multinomial_draws", "new_invalid", "raise_if_invalid"]

# Where `exponential_` is known to use the generator as torch.multinomial does.
_DEVICES = frozenset({"cpu", "cuda"})
_MOST_CATEGORIES = 2**24
# torch.multinomial's own words, in the order in which it looks; `invalid` has an entry for each.
_INVALID = (
    "probability tensor contains either `inf`, `nan` or element < 0",
    "invalid multinomial distribution (sum of probabilities <= 0)",
)


class DrawError(FuseboardError, RuntimeError):
    """Nothing can be drawn from these probabilities. The text begins with torch.multinomial's own."""


def draws_without_waiting(device: torch.device) -> bool:
    """Whether draws on this device never wait for it; elsewhere torch.multinomial itself is called."""
    return device.type in _DEVICES


def new_invalid(device: torch.device | str) -> Tensor:
    """The tensor that draws record wrong probabilities in: bool `(2,)`, all False.

    The first entry says "inf, NaN or negative", the second "a row that sums to zero". Draws only ever set them.
    """
    with torch.inference_mode(mode=False):  # later draws write into it, wherever they are made
        return torch.zeros(2, dtype=torch.bool, device=device)


def raise_if_invalid(invalid: Tensor | Sequence[bool]) -> None:
    """Raise what torch.multinomial would have raised, if a draw recorded it.

    Args:
        invalid: What was handed to the draws. A tensor is read, which waits for its device; values that were read
            together with the ids are not.

    Raises:
        DrawError: In torch.multinomial's words.
    """
    flags = invalid.tolist() if isinstance(invalid, Tensor) else invalid
    for flag, text in zip(flags, _INVALID, strict=True):
        if flag:
            raise DrawError(text)


def multinomial1(probs: Tensor, generator: torch.Generator | None = None, *, invalid: Tensor | None = None) -> Tensor:
    """Draw one id a row: `torch.multinomial(probs, 1)`, ids and generator state, without waiting for the device.

    Args:
        probs: `(batch, categories)` or `(categories,)`; need not sum to one.
        generator: Of the same device; None is torch's default one.
        invalid: From `new_invalid`: set where torch.multinomial would have raised because of a value. The id drawn is
            then meaningless and the generator has moved on, which with torch it has not. Left out, values are not
            checked at all.

    Returns:
        `(batch, 1)`, or `(1,)` for one row without a batch; int64.

    Raises:
        DrawError: A shape or dtype that torch.multinomial refuses; on devices other than CPU and CUDA, where
            torch.multinomial is called, torch's own errors.
        TypeError: Likewise.
    """
    return multinomial_draws(probs, 1, generator, invalid=invalid)


def multinomial_draws(
    probs: Tensor, n: int, generator: torch.Generator | None = None, *, invalid: Tensor | None = None
) -> Tensor:
    """Draw `n` different ids a row: `torch.multinomial(probs, n)`, ids and generator state, without waiting.

    Args:
        probs: As for `multinomial1`.
        n: How many, at most the categories.
        generator: As for `multinomial1`.
        invalid: As for `multinomial1`.

    Returns:
        `(batch, n)`, or `(n,)` for one row without a batch; int64.

    Raises:
        DrawError: As for `multinomial1`.
        TypeError: As for `multinomial1`.
    """
    n = _checked(probs, n, generator, invalid)
    if probs.device.type not in _DEVICES:
        return torch.multinomial(probs, n, generator=generator)
    probs = probs.detach()
    if not probs.numel():
        return torch.empty((*probs.shape[:-1], n), dtype=torch.int64, device=probs.device)
    if invalid is not None:
        _record(probs, invalid)
    # Into the noise's own memory and with its strides, as torch does: no tensor more, and the same order of elements.
    drawn = torch.empty_like(probs).exponential_(1, generator=generator)
    torch.div(probs, drawn, out=drawn)
    return drawn.argmax(-1, keepdim=True) if n == 1 else drawn.topk(n).indices


def _record(probs: Tensor, invalid: Tensor) -> None:
    """Torch's two checks, kept instead of read. NaN fails both comparisons of the first."""
    low, high = probs.aminmax()
    invalid[0].logical_or_(((high < torch.inf) & (low >= 0)).logical_not_())
    invalid[1].logical_or_((probs.sum(-1) == 0).any())


def _checked(probs: Tensor, n: int, generator: torch.Generator | None, invalid: Tensor | None) -> int:
    """What torch.multinomial checks without a look at the values, in its order."""
    if not isinstance(probs, Tensor):
        msg = f"probs is a {type(probs).__name__}; expected a Tensor."
        raise TypeError(msg)
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        msg = f"n is {n!r}; expected an int, the number of ids to draw."
        raise TypeError(msg)
    if generator is not None and not isinstance(generator, torch.Generator):
        msg = f"generator is a {type(generator).__name__}; expected a torch.Generator or None."
        raise TypeError(msg)
    if not 1 <= probs.dim() <= 2:  # noqa: PLR2004 - torch's own limits
        msg = f"prob_dist must be 1 or 2 dim: probs has shape {tuple(probs.shape)}; give (batch, categories)."
        raise DrawError(msg)
    if not probs.is_floating_point():
        msg = (
            "multinomial only supports floating-point dtypes for input: "
            f"probs is {str(probs.dtype).removeprefix('torch.')}; give probabilities, best in float32."
        )
        raise DrawError(msg)
    n, categories = operator.index(n), probs.shape[-1]
    if n <= 0:
        msg = f"cannot sample n_sample <= 0 samples: n is {n}, expected 1 to {categories}."
        raise DrawError(msg)
    if n > categories:
        msg = (
            "cannot sample n_sample > prob_dist.size(-1) samples without replacement: "
            f"n is {n} and probs has {categories} categories."
        )
        raise DrawError(msg)
    if categories > _MOST_CATEGORIES:
        msg = f"number of categories cannot exceed 2^24: probs has {categories}."
        raise DrawError(msg)
    if invalid is not None:
        _check_record(invalid, probs.device)
    return n


def _check_record(invalid: Tensor, device: torch.device) -> None:
    if not isinstance(invalid, Tensor):
        msg = f"invalid is a {type(invalid).__name__}; expected a tensor from new_invalid, or None."
        raise TypeError(msg)
    if invalid.dtype != torch.bool or invalid.shape != (2,) or invalid.device != device:
        msg = (
            f"invalid is {str(invalid.dtype).removeprefix('torch.')} {tuple(invalid.shape)} on {invalid.device}; "
            f"expected bool (2,) on {device}, as new_invalid(probs.device) makes it."
        )
        raise DrawError(msg)
