"""Rotary position embeddings as transformers computes them: the kinds that Qwen models use, bit for bit.

`default`, `linear` and `yarn` have fixed frequencies. `dynamic` makes them anew from the longest sequence of a batch
once that is longer than the model was trained for; here it depends on that batch alone, whereas a transformers model
also remembers the longest sequence that it has ever seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fuseboard.errors import InputError

__all__ = ["Rope", "cos_sin", "frequencies", "rotate", "signed"]

_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    },
}


@attrs.frozen
class Rope:
    """How positions turn into angles.

    Attributes:
        kind: `default`, `linear`, `dynamic` or `yarn`.
        theta: The base of the frequencies.
        dim: The head dim.
        trained: `max_position_embeddings`: beyond it `dynamic` stretches.
        options: The kind's own numbers, by their names in `rope_parameters`.
    """

    kind: str
    theta: float
    dim: int
    trained: int
    options: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def of(cls, config: Mapping[str, Any], dim: int) -> Rope:
        """From a config's `rope_parameters` (transformers 5), or its `rope_theta` and `rope_scaling` (4).

        Raises:
            InputError: A kind or an option that is not implemented; the message names it.
        """
        field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        found = config.get(field) or {}
        if not isinstance(found, Mapping):
            msg = f"{field} is {found!r}; expected a mapping with rope_type and its options."
            raise InputError(field, msg)
        given = dict(found)
        kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
        given.pop("type", None)
        theta = given.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        _check_number("rope_theta", theta)
        if not isinstance(kind, str) or kind not in _KEYS:
            msg = f"{field}: rope type {kind!r} is not implemented; QwenDecoder knows {', '.join(_KEYS)}."
            raise InputError(field, msg)
        partial = given.pop("partial_rotary_factor", None)
        if partial is None:
            partial = config.get("partial_rotary_factor")
        if partial not in (None, 1.0):
            msg = f"partial_rotary_factor is {partial!r}; QwenDecoder rotates whole heads, which is 1.0."
            raise InputError("partial_rotary_factor", msg)
        options = {name: value for name, value in given.items() if value is not None}
        unknown = sorted(set(options) - _KEYS[kind])
        if unknown:
            msg = f"{field}: rope type {kind!r} has no option {', '.join(map(repr, unknown))} in QwenDecoder."
            raise InputError(field, msg)
        if kind != "default" and not isinstance(options.get("factor"), (int, float)):
            msg = f"{field}: rope type {kind!r} needs a factor; given {options.get('factor')!r}."
            raise InputError(field, msg)
        trained = config.get("max_position_embeddings") or 32768
        _check_number("max_position_embeddings", trained)
        trained = int(trained)
        if kind == "yarn":
            outside = config.get("original_max_position_embeddings")  # transformers gives it priority
            original = outside or options.get("original_max_position_embeddings") or trained
            _check_number("original_max_position_embeddings", original)
            options["original_max_position_embeddings"] = original
        return cls(kind, theta, dim, trained, options)


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        msg = f"{name} is {value!r}; expected a number above 0."
        raise InputError(name, msg)


def frequencies(rope: Rope, *, longest: int | None = None, device: torch.device | None = None) -> tuple[Tensor, float]:
    """The inverse frequencies, fp32 `(head_dim / 2,)`, and the factor on cos and sin.

    Args:
        rope: Which.
        longest: For `dynamic`: the length of the longest sequence, when it is more than the model was trained for. It
            is then computed on `device`, in float32, as transformers does while it generates.
        device: Where; without `longest` they are made on the CPU and moved, as when a model is loaded.
    """
    if rope.kind == "yarn":
        inverse, factor = _yarn(rope)
        return inverse.to(device), factor
    base: Any = rope.theta
    where = torch.device("cpu")  # not the caller's default device, which may have other bits
    if rope.kind == "dynamic":
        length: Any = rope.trained
        if longest is not None and longest > rope.trained:
            # A tensor, because float32 arithmetic gives other bits than Python's; filled, since a copy would wait.
            where = device or where
            length = torch.full((), longest, dtype=torch.int64, device=where)
        factor = rope.options["factor"]
        stretch = (factor * length / rope.trained) - (factor - 1)
        base = base * stretch ** (rope.dim / (rope.dim - 2))
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64, device=where).to(torch.float) / rope.dim
    inverse = 1.0 / (base**exponents)
    if rope.kind == "linear":
        inverse /= rope.options["factor"]
    return inverse.to(device), 1.0


def _yarn(rope: Rope) -> tuple[Tensor, float]:
    options, dim, base = rope.options, rope.dim, rope.theta
    factor, original = options["factor"], options["original_max_position_embeddings"]

    def mscale(scale: float, by: float = 1) -> float:
        return 1.0 if scale <= 1 else 0.1 * by * math.log(scale) + 1.0

    attention_factor = options.get("attention_factor")
    if attention_factor is None:
        one, all_dims = options.get("mscale"), options.get("mscale_all_dim")
        attention_factor = float(mscale(factor, one) / mscale(factor, all_dims)) if one and all_dims else mscale(factor)

    def dimension(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low, high = dimension(options.get("beta_fast") or 32), dimension(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low), 0, 1)
    powers = base ** (torch.arange(0, dim, 2, device="cpu").to(torch.float) / dim)
    extrapolated = 1 - ramp
    inverse = 1.0 / (factor * powers) * (1 - extrapolated) + 1.0 / powers * extrapolated
    return inverse, float(attention_factor)


def cos_sin(positions: Tensor, inverse: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos and sin of every position, `(batch or 1, length, 1, head_dim)`: computed in fp32, then rounded to `dtype`."""
    angles = positions[..., None].float() * inverse
    # Doubled before the cosine as transformers does it: a vectorised cosine may differ by where in the row it is taken.
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return cos.to(dtype)[:, :, None], sin.to(dtype)[:, :, None]


def signed(sin: Tensor) -> Tensor:
    """`sin` with its first half negated, as `rotate` wants it."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x * cos + rotate_half(x) * sin` for `(batch, length, heads, head_dim)`, with a `signed` sin.

    Negating the sine instead of half of `x` is exact, and lets one roll stand for two slices, a negation and a join.
    """
    return (x * cos) + (torch.roll(x, x.shape[-1] // 2, -1) * sin)
