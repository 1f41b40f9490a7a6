"""The structure behind a mask, and lossless ways from one form of mask to another.

Fused kernels take structure (lengths, causal, windows), not dense masks. An engine that builds its mask from a
structure says so with `MaskInfo`; `mask_for` builds both from one description, so that they cannot disagree.

Alignment, once and for all. With `n_q` queries and `n_k` keys:

* the `causal` *flag* of `attention` is torch's `is_causal`: top-left, query `i` sees key `j` when `j <= i`;
* the `causal` *structure* here is bottom-right, the KV-cache case: `j <= i + n_k - n_q`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import attrs
import torch
from torch import Tensor

from fuseboard.errors import InputError, MaskMismatchError

__all__ = [
    "Form",
    "Keys",
    "MaskInfo",
    "Masked",
    "Structure",
    "check_kind",
    "check_mask_info",
    "in_form",
    "mask_for",
    "to_4d",
    "to_additive",
]

T = TypeVar("T")
Padding: TypeAlias = Literal["right", "left"]
Keys: TypeAlias = Literal["none", "any", "right", "left"]
Form: TypeAlias = Literal["plain", "dense", "structure"]
"""How a kernel is given a call's mask: not at all, dense, or as the structure in its place."""

_FAR = 2**62  # beyond any length, and its sum with one still fits 64 bits: a bound of sys.maxsize would wrap around


class Structure(NamedTuple):
    """What a `MaskInfo` asks of a kernel at given lengths, without its tensor: part of a `Call`, so hashable.

    Parts that hide nothing at these lengths are already gone: one query is never held back by bottom-right causality,
    nor by a window at least as long as the keys. A bound ahead of 0 is causality and named so; beside causality, or for
    so few queries that none is kept from a key, a bound ahead is gone. So `causal` and `ahead` are never both True.

    Attributes:
        keys: `none` when all keys are real, else how the real ones lie: in one run from the first key (`right`
            padding), in one run up to the last (`left` padding), or `any`.
        causal: Bottom-right causality.
        window: A left bound on what a query sees.
        ahead: A right bound that is not causality.
    """

    keys: Keys = "none"
    causal: bool = False
    window: bool = False
    ahead: bool = False

    @property
    def is_open(self) -> bool:
        """Whether nothing is hidden at all."""
        return self.keys == "none" and not self.causal and not self.window and not self.ahead

    def __str__(self) -> str:
        parts = (
            [f"{self.keys} keys" if self.keys == "any" else f"{self.keys}-padded keys"] if self.keys != "none" else []
        )
        parts += ["bottom-right causal"] if self.causal else []
        parts += ["window"] if self.window else []
        parts += ["bound ahead"] if self.ahead else []
        return " + ".join(parts) or "nothing hidden"


def _check(info: MaskInfo) -> None:
    """Raise unless every field means something."""
    keys, window, ahead, padding = info.keys, info.window, info.ahead, info.padding
    dense = isinstance(keys, Tensor) and keys.layout == torch.strided and not keys.is_nested
    if keys is not None and (not dense or keys.dtype != torch.bool or keys.dim() != 2):  # noqa: PLR2004
        given = f"{keys.dtype} of shape {tuple(keys.shape)}" if dense else _not_dense(keys)
        msg = f"MaskInfo.keys is {given}; expected torch.bool of shape (batch, k_length), True for a real key."
        raise InputError("mask_info", msg)
    if not isinstance(info.causal, bool):
        msg = f"MaskInfo.causal is {info.causal!r}; expected True or False."
        raise InputError("mask_info", msg)
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        msg = f"MaskInfo.window is {window!r}; expected an int of at least 1, the number of keys seen, or None."
        raise InputError("mask_info", msg)
    _check_padding(padding)
    if padding is not None and keys is None:
        msg = (
            f"MaskInfo.padding is {padding!r} without keys; give keys, bool of shape (batch, k_length), or no padding."
        )
        raise InputError("mask_info", msg)
    if ahead is not None and (isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0):
        msg = f"MaskInfo.ahead is {ahead!r}; expected an int of at least 0, the number of later keys seen, or None."
        raise InputError("mask_info", msg)


def _not_dense(given: object) -> str:
    if not isinstance(given, Tensor):
        return type(given).__name__
    return "a nested tensor" if given.is_nested else f"a tensor of layout {given.layout}"


def _check_padding(padding: str | None) -> None:
    if padding not in (None, "right", "left"):
        msg = f"MaskInfo.padding is {padding!r}; expected 'right', 'left' or None."
        raise InputError("mask_info", msg)


@attrs.frozen(eq=False, init=False)
class MaskInfo:
    """The structure that a dense mask was built from. Its parts hide keys together: a key is seen if no part hides it.

    The reference ignores it and uses the dense mask. A backend may use it *instead* of the dense mask, reads only real
    keys, and gives zeros for a query that sees none.

    Attributes:
        keys: Bool, `(batch, k_length)`, True for a real key; None when all are real. Not to be written afterwards.
        causal: Bottom-right: query `i` sees key `j` when `j <= i + n_k - n_q`.
        window: Query `i` sees key `j` when `j > i + n_k - n_q - window`; at least 1. With `causal` that is the number
            of keys seen, the query's own included.
        padding: `right` or `left` when each row's real keys are one run that starts at the first or ends at the last
            key; None when they may lie anywhere.
        ahead: Query `i` sees key `j` when `j <= i + n_k - n_q + ahead`; at least 0, which is what `causal` says. Beside
            `causal` it hides nothing more. An encoder's local attention, `abs(i - j) <= reach`, is
            `window=reach + 1, ahead=reach`.

    Raises:
        InputError: (a `ValueError`) A field means nothing.
    """

    keys: Tensor | None = None
    causal: bool = False
    window: int | None = None
    padding: Padding | None = None
    ahead: int | None = None
    # What stands for this object where selections are remembered: everything but the keys' values.
    signature: tuple[object, ...] = attrs.field(init=False, repr=False)
    _derived: dict[Hashable, Any] = attrs.field(init=False, factory=dict, repr=False)

    def __init__(
        self,
        keys: Tensor | None = None,
        causal: bool = False,
        window: int | None = None,
        padding: Padding | None = None,
        ahead: int | None = None,
    ) -> None:
        # Written out, since torch.compile cannot follow the one that attrs makes for a frozen class.
        put = object.__setattr__
        put(self, "keys", keys)
        put(self, "causal", causal)
        put(self, "window", window)
        put(self, "padding", padding)
        put(self, "ahead", ahead)
        put(self, "_derived", {})
        self.__attrs_post_init__()

    def __attrs_post_init__(self) -> None:
        _check(self)
        keys = None if self.keys is None else (self.keys.shape, self.keys.device)
        object.__setattr__(self, "signature", (keys, self.causal, self.window, self.padding, self.ahead))

    def structure(self, q_length: int, k_length: int) -> Structure:
        """What remains to be asked of a kernel at these lengths."""
        causal = self.causal or self.ahead == 0
        return Structure(
            keys="none" if self.keys is None else (self.padding or "any"),
            causal=causal and q_length > 1,
            window=self.window is not None and self.window < k_length,
            ahead=not causal and self.ahead is not None and self.ahead < q_length - 1,
        )

    def reduced(self, structure: Structure) -> MaskInfo:
        """This info with only the parts that `structure` still names; the same object each time."""
        bounds = (self.window is not None, self.ahead is not None)
        if self.causal == structure.causal and bounds == (structure.window, structure.ahead):
            return self
        found: MaskInfo | None = self._derived.get(structure)
        if found is None:
            window, ahead = self.window if structure.window else None, self.ahead if structure.ahead else None
            made = attrs.evolve(self, causal=structure.causal, window=window, ahead=ahead)
            found = self._derived.setdefault(structure, made)
        return found

    def dense(self, q_length: int, k_length: int, device: torch.device) -> Tensor:
        """The boolean mask this describes, True = attend: `(batch or 1, 1, q_length, k_length)`."""
        mask = torch.ones(1, 1, q_length, k_length, dtype=torch.bool, device=device)
        if self.causal or self.window is not None or self.ahead is not None:
            last = torch.arange(q_length, device=device)[:, None] + (k_length - q_length)
            key = torch.arange(k_length, device=device)[None, :]
            if self.causal:
                mask = mask & (key <= last)
            if self.window is not None:
                mask = mask & (key > last - min(self.window, _FAR))
            if self.ahead is not None:
                mask = mask & (key <= last + min(self.ahead, _FAR))
        if self.keys is not None:
            mask = mask & self.keys[:, None, None, :]
        return mask

    def lengths(self) -> Tensor:
        """How many real keys each row has: int32, `(batch,)`, on the keys' device. Does not wait for the device."""
        if self.keys is None:
            msg = "MaskInfo.lengths() needs keys."
            raise ValueError(msg)
        keys = self.keys
        return self.derived("lengths", lambda: keys.sum(-1, dtype=torch.int32))

    def derived(self, name: Hashable, make: Callable[[], T]) -> T:
        """What a kernel needs to be computed from this info, such as offsets, made once: every layer of a model asks.

        Not kept for inference tensors, which have no version to hold it against, nor during a capture, after which its
        memory belongs to the graph.

        Args:
            name: What it is called among all that is derived from this info.
            make: Computes it.
        """
        if self.keys is None or self.keys.is_inference() or _capturing(self.keys):
            return make()
        kept: tuple[int, T] | None = self._derived.get(name)
        if kept is None or kept[0] != self.keys._version:
            with torch.inference_mode(mode=False):  # a later call may need a backward, which takes no inference tensor
                self._derived[name] = kept = (self.keys._version, make())
        return kept[1]


class Masked(NamedTuple):
    """A dense mask and the structure it was built from; `mask, info = masked`, or `**masked.arguments()`.

    Attributes:
        dense: Boolean or additive, broadcastable to `(batch, heads, q_length, k_length)`; None when nothing is hidden.
        info: The structure.
    """

    dense: Tensor | None
    info: MaskInfo

    def arguments(self) -> dict[str, Any]:
        """The two keyword arguments of `attention`."""
        return {"mask": self.dense, "mask_info": self.info}


def check_kind(info: object) -> None:
    """Raise unless it is a MaskInfo.

    Raises:
        InputError: It is something else.
    """
    if not isinstance(info, MaskInfo):
        msg = f"mask_info is a {type(info).__name__}; expected fuseboard.MaskInfo."
        raise InputError("mask_info", msg)


def mask_for(
    q_length: int,
    k_length: int,
    *,
    keys: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    ahead: int | None = None,
    padding: Padding | None = None,
    padded: bool | None = None,
    dtype: torch.dtype = torch.bool,
    device: torch.device | str | None = None,
) -> Masked:
    """Build a dense mask and its `MaskInfo` from one structure.

    Args:
        q_length: Number of queries.
        k_length: Number of keys, cached ones included.
        keys: Bool `(batch, k_length)`, True for a real key.
        causal: Bottom-right causality (see the module's text).
        window: How far back a query sees; at least 1.
        ahead: How many keys beyond its own a query sees; at least 0, which is causality.
        padding: Where the padding of `keys` lies. Left out, it is read off `keys`, which waits for the device once.
        padded: Whether any key is padding: False drops `keys`, True keeps them, None asks the device, which waits for
            it.
        dtype: `torch.bool`, or a floating dtype for an additive mask of 0 and -inf.
        device: Where to build it; default the keys' device, else the CPU.

    Raises:
        InputError: A length is none, `keys` do not fit `k_length`, or a value means nothing.
    """
    for name, length in (("q_length", q_length), ("k_length", k_length)):
        if isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)) or length < 0:
            msg = f"{name} is {length!r}; expected an int of 0 or more."
            raise InputError(name, msg)
    _check_padding(padding)
    if keys is not None:
        MaskInfo(keys)  # its dtype and rank, before anything is read of it
        if keys.shape[1] != k_length:
            msg = f"keys has shape {tuple(keys.shape)}; expected (batch, k_length) with k_length = {k_length}."
            raise InputError("keys", msg)
        if padded is None:
            padded = not bool(keys.all())
        if not padded:
            keys, padding = None, None
        elif padding is None:
            found = _padding_of(keys)
            padding = "right" if found == "both" else found
    info = MaskInfo(keys, causal, window, padding, ahead)
    if info.structure(q_length, k_length).is_open:
        return Masked(None, info)
    where = torch.device(device) if device is not None else (keys.device if keys is not None else torch.device("cpu"))
    mask = info.dense(q_length, k_length, where)
    return Masked(mask if dtype == torch.bool else to_additive(mask, dtype), info)


def to_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive mask of `dtype` that hides and adds exactly what `mask` does.

    A boolean mask becomes 0 and -inf, which every floating dtype holds exactly; an additive one is widened at most.

    Raises:
        ValueError: The conversion would round the mask's values.
    """
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    if mask.dtype == dtype:
        return mask
    if torch.promote_types(mask.dtype, dtype) != dtype:
        msg = f"an additive mask of {mask.dtype} would be rounded to {dtype}; cast it yourself if that is meant."
        raise ValueError(msg)
    return mask.to(dtype)


def to_4d(mask: Tensor) -> Tensor:
    """A view of `mask` with four axes, the missing ones in front, as torch broadcasts: rank 3 means per head."""
    missing = 4 - mask.dim()
    return mask[(None,) * missing] if missing else mask


def in_form(
    form: Form, structure: Structure | None, mask: Tensor | None, info: MaskInfo | None, q: Tensor, k: Tensor
) -> tuple[Tensor | None, MaskInfo | None]:
    """The `mask` and `mask_info` that a kernel is given: one of them at most, and the mask with four axes.

    Args:
        form: What the backend takes for this call.
        structure: What `info` asks at these lengths.
        mask: As the engine gave it; None with an `info` is written out when the form is dense.
        info: As the engine gave it.
        q: Queries, for their length and dtype.
        k: Keys, for their length.
    """
    if form == "plain":
        return None, None
    if form == "structure" and info is not None and structure is not None:
        return None, info.reduced(structure)
    if mask is None:
        return None if info is None else info.dense(q.shape[-2], k.shape[-2], q.device), None
    if q.dtype == torch.float64 and mask.dtype == torch.float32:
        mask = mask.double()  # widened without rounding, so that kernels need know only their own dtype
    return to_4d(mask), None


def check_mask_info(mask: Tensor | None, info: MaskInfo, q_length: int, k_length: int, device: torch.device) -> None:
    """Raise unless `info` describes `mask`. Reads both, so it waits for the device.

    An additive mask is described when it adds 0 where the structure shows a key and hides the others: with -inf, or, in
    rows that still see something, with a number as low as its dtype has.

    Raises:
        MaskMismatchError: They differ; the message names the first place.
    """
    if info.padding is not None and info.keys is not None and _padding_of(info.keys) not in (info.padding, "both"):
        msg = f"mask_info says padding={info.padding!r}, but its keys are not one run at that end."
        raise MaskMismatchError("mask_info", msg)
    if mask is None:
        return
    seen = info.dense(q_length, k_length, device)
    full = to_4d(mask)
    full, seen = torch.broadcast_tensors(full, seen)  # type: ignore[no-untyped-call]
    if full.dtype == torch.bool:
        wrong = full != seen
    else:
        hidden = (full == -torch.inf) | ((full <= torch.finfo(full.dtype).min / 2) & seen.any(-1, keepdim=True))
        wrong = torch.where(seen, full != 0, ~hidden)
    if bool(wrong.any()):
        place = tuple(int(i) for i in wrong.nonzero()[0])
        msg = (
            f"mask_info ({info.structure(q_length, k_length)}) does not describe its dense mask: "
            f"at (batch, head, query, key) = {place} the mask holds {full[place].item()}, "
            f"and the structure {'shows' if bool(seen[place]) else 'hides'} the key. "
            "Build both with mask_for, or drop mask_info."
        )
        raise MaskMismatchError("mask_info", msg)


def _padding_of(keys: Tensor) -> Any:
    """`right` or `left` when every row's keys are one run at that end, `both` when all are real, else None. Waits."""
    if keys.shape[1] == 0:
        return "both"
    ends = keys[:, 1:] <= keys[:, :-1]  # never a real key after padding
    starts = keys[:, 1:] >= keys[:, :-1]
    right, left = (bool(flag) for flag in torch.stack((ends.all(), starts.all())).tolist())
    if right and left:
        return "both"
    return "right" if right else "left" if left else None


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
