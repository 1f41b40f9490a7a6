"""What a backend can take, as data: limits on a `Call`, guards on `Sizes`, and the refusals they give.

To add a limit: one field with its sentence in `Constraints`, and one entry in `_RULES`. The conformance kit makes its
cases from these fields, so they follow by themselves.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs

if TYPE_CHECKING:
    import torch

    from fuseboard.call import Call, Lengths, MaskKind, Sizes
    from fuseboard.masks import Form, Keys

__all__ = ["ALL_LENGTHS", "Constraints", "Guard", "HeadDims", "KnownBad", "Refusal", "StructureRule", "admit", "guard"]

ALL_LENGTHS: frozenset[Lengths] = frozenset({"equal", "fewer queries", "more queries"})


def _set(values: Iterable[Any]) -> Any:
    """A set of them. What cannot be one, text included, is left as it is to the field's validator, which has words."""
    try:
        return values if isinstance(values, str) else frozenset(values)
    except TypeError:
        return values


def _tuple(values: Iterable[Any]) -> Any:
    return values if isinstance(values, str) or not isinstance(values, Iterable) else tuple(values)


def _each(fits: Callable[[Any], bool], allowed: str) -> Any:
    """A validator: a set or list of what fits and of nothing else. A misspelt word would refuse everything, quietly."""

    def check(instance: object, attribute: Any, values: Any) -> None:
        many = isinstance(values, (frozenset, tuple))
        wrong = [each for each in values if not fits(each)] if many else [values]
        if wrong:
            kind = "list" if attribute.converter is _tuple else "set"
            msg = (
                f"{_place(instance, attribute)} {'has' if many else 'is'} {wrong[0]!r}; expected a {kind} of {allowed}."
            )
            raise ValueError(msg)

    return check


def _among(*allowed: object) -> Any:
    return _each(lambda each: each in allowed, ", ".join(map(repr, sorted(allowed, key=str))))


def _all_are(kind: type) -> Any:
    return _each(lambda each: isinstance(each, kind), kind.__name__)


def of_kind(kind: Any, *, optional: bool = False) -> Any:
    """A validator: one of that class."""

    def check(instance: object, attribute: Any, value: Any) -> None:
        if not isinstance(value, kind) and not (optional and value is None):
            msg = (
                f"{_place(instance, attribute)} is {value!r}; expected {kind.__name__}{' or None' if optional else ''}."
            )
            raise TypeError(msg)

    return check


def _place(instance: object, attribute: Any) -> str:
    return f"{type(instance).__name__}.{attribute.name}"


def _torch() -> Any:
    """Torch, which whoever has a dtype to declare has loaded; None before."""
    return sys.modules.get("torch")


def _is_device(word: Any) -> bool:
    if not isinstance(word, str) or _torch() is None:
        return isinstance(word, str)
    try:
        return bool(_torch().device(word).type == word)
    except RuntimeError:
        return False


def _is_dtype(value: Any) -> bool:
    return _torch() is not None and isinstance(value, _torch().dtype)


_devices = _each(_is_device, "torch's device types, such as 'cpu' and 'cuda'")


_TERM = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*([0-9][^\s,]*)\s*")


def version_terms(wanted: str, of: str = "version range") -> list[tuple[str, str]]:
    """The operators and versions of a range such as `>=2.6,<3`; an empty range has none.

    Args:
        wanted: The range.
        of: What it is, for the error.

    Raises:
        ValueError: It is no such range.
    """
    terms = []
    for term in filter(None, (each.strip() for each in wanted.split(","))) if isinstance(wanted, str) else (wanted,):
        match = _TERM.fullmatch(str(term))
        if match is None:
            msg = (
                f"{of} {wanted!r}: {term!r} is not an operator and a version. "
                "Operators are >=, <=, ==, !=, >, <; terms are joined by commas, as in '>=2.6,<3'."
            )
            raise ValueError(msg)
        terms.append((match[1], match[2]))
    return terms


def _valid_range(instance: object, attribute: Any, wanted: str | None) -> None:
    if wanted is not None:
        version_terms(wanted, _place(instance, attribute))


def _valid_capability(instance: object, attribute: Any, value: Any) -> None:
    match value:
        case None | ((int(), int()), (int(), int())):
            return
    msg = f"{_place(instance, attribute)} is {value!r}; expected ((major, minor), (major, minor)), lowest and highest."
    raise ValueError(msg)


@attrs.frozen
class Refusal:
    """Which limit refused what.

    Attributes:
        backend: Whose limit.
        rule: The limit's name: a field of `Constraints`, a guard's rule, or a stage such as `probe` or `site`.
        actual: What the call has.
        allowed: What the limit admits.
        nearest: The nearest change that would be admitted, where one is known.
        reason: A few words without exact sizes, so that equal reasons can be counted.
    """

    backend: str
    rule: str
    actual: str
    allowed: str
    nearest: str | None = None
    reason: str = ""

    def __str__(self) -> str:
        text = (
            f"{self.rule} is {self.actual}, allowed {self.allowed}" if self.allowed else f"{self.rule}: {self.actual}"
        )
        return f"{text} (nearest: {self.nearest})" if self.nearest else text


@attrs.frozen
class HeadDims:
    """The head dimensions a kernel takes: from `low` to `high` in steps of `multiple`, or `only` those listed."""

    low: int = attrs.field(default=1, validator=[of_kind(int), attrs.validators.ge(1)])
    high: int | None = attrs.field(default=None, validator=of_kind(int, optional=True))
    multiple: int = attrs.field(default=1, validator=[of_kind(int), attrs.validators.ge(1)])
    only: frozenset[int] = attrs.field(default=frozenset(), converter=_set, validator=_all_are(int))

    def admits(self, dim: int) -> bool:
        """Whether `dim` is one of them."""
        if self.only:
            return dim in self.only
        return dim >= self.low and dim % self.multiple == 0 and (self.high is None or dim <= self.high)

    def nearest(self, dim: int) -> int | None:
        """The smallest admitted dimension above `dim`, to which tensors can be padded with zeros; None without one."""
        if self.only:
            return min((each for each in self.only if each > dim), default=None)
        padded = -(-max(dim, self.low) // self.multiple) * self.multiple
        return padded if padded > dim and self.admits(padded) else None

    def __str__(self) -> str:
        if self.only:
            return ", ".join(map(str, sorted(self.only)))
        text = f"{self.low} to {self.high}" if self.high is not None else f"at least {self.low}"
        return f"{text}, a multiple of {self.multiple}" if self.multiple > 1 else text


@attrs.frozen
class StructureRule:
    """One set of structures that a kernel takes in place of a dense mask. Any rule that fits admits the structure.

    Attributes:
        keys: Where real keys may lie; `none` when all must be real.
        causal: The values of bottom-right causality it takes.
        window: Whether it takes a window, or none, or either.
        ahead: Likewise a bound ahead. Where a structure has one it is not causal.
        lengths: The relations of q_length to k_length at which it is right.
        backward: Whether a gradient may be asked for.
    """

    keys: frozenset[Keys] = attrs.field(
        default=frozenset({"none"}), converter=_set, validator=_among("none", "any", "right", "left")
    )
    causal: frozenset[bool] = attrs.field(
        default=frozenset({False, True}), converter=_set, validator=_among(False, True)
    )
    window: frozenset[bool] = attrs.field(default=frozenset({False}), converter=_set, validator=_among(False, True))
    ahead: frozenset[bool] = attrs.field(default=frozenset({False}), converter=_set, validator=_among(False, True))
    lengths: frozenset[Lengths] = attrs.field(default=ALL_LENGTHS, converter=_set, validator=_among(*ALL_LENGTHS))
    backward: bool = True

    def admits(self, call: Call) -> bool:
        """Whether the call's structure is one of these."""
        wanted = call.structure
        return (
            wanted is not None
            and wanted.keys in self.keys
            and wanted.causal in self.causal
            and wanted.window in self.window
            and wanted.ahead in self.ahead
            and call.lengths in self.lengths
            and (self.backward or not call.grad)
        )

    def __str__(self) -> str:
        parts = [
            "/".join(sorted(f"{each} keys" if each == "any" else f"{each} padding" for each in self.keys - {"none"}))
        ]
        parts.append({(True,): "causal", (False, True): "causal or not"}.get(tuple(sorted(self.causal)), ""))
        parts.append({(True,): "window", (False, True): "window or not"}.get(tuple(sorted(self.window)), ""))
        parts.append({(True,): "bound ahead", (False, True): "bound ahead or not"}.get(tuple(sorted(self.ahead)), ""))
        parts.append(
            ""
            if self.lengths == ALL_LENGTHS
            else f"{' or '.join(sorted(self.lengths))} lengths".replace("queries lengths", "queries")
        )
        parts.append("" if self.backward else "no gradient")
        return " + ".join(filter(None, parts)) or "nothing hidden"


@attrs.frozen
class Guard:
    """A limit on exact sizes, such as a launch grid's.

    Attributes:
        rule: Its name.
        check: `(call, sizes) -> bool`, True when the sizes are admitted. Called once per combination of sizes.
        allowed: What it admits, in words.
        actual: The number it looks at, for the message.
        nearest: The nearest change that would be admitted.
    """

    rule: str = attrs.field(validator=of_kind(str))
    check: Callable[[Call, Sizes], bool] = attrs.field(validator=of_kind(Callable))
    allowed: str = attrs.field(validator=of_kind(str))
    actual: Callable[[Sizes], object] | None = attrs.field(default=None, validator=of_kind(Callable, optional=True))
    nearest: str | None = attrs.field(default=None, validator=of_kind(str, optional=True))

    def against(self, call: Call, sizes: Sizes) -> str | None:
        """What it says against a call, or None. A plugin's functions answer, and may raise anything."""
        if self.check(call, sizes):
            return None
        return "not so" if self.actual is None else str(self.actual(sizes))


@attrs.frozen
class KnownBad:
    """A combination known to be wrong, shipped as data.

    Attributes:
        effect: What goes wrong, in words.
        link: Where it is documented.
        package: The distribution whose versions matter; None when the hook has decided that itself.
        versions: A version range of `package`, such as `">=0.0.21,<0.0.27"`.
        call: Which calls it concerns; None for all, so that the backend does not run at all.
    """

    effect: str = attrs.field(validator=of_kind(str))
    link: str = attrs.field(validator=of_kind(str))
    package: str | None = attrs.field(default=None, validator=of_kind(str, optional=True))
    versions: str | None = attrs.field(default=None, validator=_valid_range)
    call: Callable[[Call], bool] | None = attrs.field(default=None, validator=of_kind(Callable, optional=True))


@attrs.frozen
class Constraints:
    """What a backend takes. A default is the cautious answer: what is not claimed is refused.

    Attributes:
        devices: Device types, in torch's words (`torch.device(...).type`).
        dtypes: Of q, k and v.
        capability: Lowest and highest CUDA compute capability, both included.
        head_dims: Of q and k.
        v_head_dims: Of v; None when it must equal q's.
        gqa: Takes fewer key heads than query heads.
        queries: Whether one query (a decode step) and many are taken.
        lengths: Relations of q_length to k_length it is right at.
        causal: Relations of q_length to k_length at which its top-left causal flag is right; empty for none.
        masks: Kinds of dense mask.
        mask_fp32: Takes a float32 additive mask beside half-precision q.
        mask_grad: Gives a gradient of the additive mask.
        causal_and_mask: Takes the top-left flag and a dense mask together.
        structures: Structures it takes in place of a dense mask.
        custom_scale: Takes a scale above zero.
        negative_scale: Takes any scale.
        dropout: Takes dropout.
        backward: Has a backward.
        empty: Takes lengths, batches and heads of zero.
        any_stride: Takes q, k and v whose last dimension is not contiguous.
        wrapped: Takes tensors of these kinds (`Call.wrapped`); `*` for all.
        guards: Limits on exact sizes.
        by_name: Device types on which only a policy that names it takes it, such as a form that is there for checking.
    """

    devices: frozenset[str] = attrs.field(converter=_set, validator=_devices)
    dtypes: frozenset[torch.dtype] = attrs.field(
        converter=_set, validator=_each(_is_dtype, "torch.dtype, such as torch.float16")
    )
    capability: tuple[tuple[int, int], tuple[int, int]] | None = attrs.field(default=None, validator=_valid_capability)
    head_dims: HeadDims = attrs.field(default=HeadDims(), validator=of_kind(HeadDims))
    v_head_dims: HeadDims | None = attrs.field(default=None, validator=of_kind(HeadDims, optional=True))
    gqa: bool = False
    queries: frozenset[Literal["one", "many"]] = attrs.field(
        default=frozenset({"one", "many"}), converter=_set, validator=_among("one", "many")
    )
    lengths: frozenset[Lengths] = attrs.field(default=ALL_LENGTHS, converter=_set, validator=_among(*ALL_LENGTHS))
    causal: frozenset[Lengths] = attrs.field(default=frozenset(), converter=_set, validator=_among(*ALL_LENGTHS))
    masks: frozenset[MaskKind] = attrs.field(
        default=frozenset(), converter=_set, validator=_among("none", "bool", "additive")
    )
    mask_fp32: bool = False
    mask_grad: bool = False
    causal_and_mask: bool = False
    structures: tuple[StructureRule, ...] = attrs.field(default=(), converter=_tuple, validator=_all_are(StructureRule))
    custom_scale: bool = False
    negative_scale: bool = False
    dropout: bool = False
    backward: bool = False
    empty: bool = False
    any_stride: bool = False
    wrapped: frozenset[str] = attrs.field(default=frozenset(), converter=_set, validator=_all_are(str))
    guards: tuple[Guard, ...] = attrs.field(default=(), converter=_tuple, validator=_all_are(Guard))
    by_name: frozenset[str] = attrs.field(default=frozenset(), converter=_set, validator=_devices)

    def form(self, call: Call) -> Form:
        """How a kernel is given the call's mask: the structure where it takes it, else the mask, maybe written out."""
        if call.structure is None:
            return "plain" if call.mask == "none" else "dense"
        if call.structure.is_open:
            return "plain"
        return "structure" if any(rule.admits(call) for rule in self.structures) else "dense"


def admit(constraints: Constraints, backend: str, call: Call) -> tuple[Form, tuple[Refusal, ...]]:
    """The form in which a backend would be given the call's mask, and every limit that refuses the call."""
    form = constraints.form(call)
    refusals = []
    for rule in _RULES:
        found = rule(constraints, call, form)
        if found is not None:
            name, actual, allowed, nearest, reason = found
            refusals.append(Refusal(backend, name, actual, allowed, nearest, reason))
    return form, tuple(refusals)


def guard(constraints: Constraints, backend: str, call: Call, sizes: Sizes) -> tuple[Refusal, ...]:
    """Every guard that refuses these sizes; one that raises refuses too."""
    found = (_guarded(each, backend, call, sizes) for each in constraints.guards)
    return tuple(refusal for refusal in found if refusal is not None)


def _guarded(each: Guard, backend: str, call: Call, sizes: Sizes) -> Refusal | None:
    try:
        actual = each.against(call, sizes)
    except Exception as error:  # noqa: BLE001 - a plugin's function must not harm the call
        said = " ".join(f"{type(error).__name__}: {error}".split())
        actual = f"unknown, its guard raised {said}"
        return Refusal(backend, each.rule, actual, each.allowed, None, f"its guard {each.rule!r} raised {said}")
    if actual is None:
        return None
    return Refusal(backend, each.rule, actual, each.allowed, each.nearest, f"{each.rule} not {each.allowed}")


_Found: TypeAlias = tuple[str, str, str, "str | None", str] | None


def _names(values: Iterable[Any]) -> str:
    return ", ".join(sorted(str(value).removeprefix("torch.") for value in values)) or "none"


def _device(limits: Constraints, call: Call, _form: Form) -> _Found:
    if call.device_type in limits.devices:
        return None
    return "device", call.device_type, _names(limits.devices), None, f"device {call.device_type}"


def _capability(limits: Constraints, call: Call, _form: Form) -> _Found:
    if limits.capability is None or call.capability is None:
        return None
    low, high = limits.capability
    if low <= call.capability <= high:
        return None
    shown = f"{call.capability[0]}.{call.capability[1]}"
    return "capability", shown, f"{low[0]}.{low[1]} to {high[0]}.{high[1]}", None, f"compute capability {shown}"


def _dtype(limits: Constraints, call: Call, _form: Form) -> _Found:
    if call.dtype in limits.dtypes:
        return None
    shown = _names([call.dtype])
    halves = [name for name in _names(limits.dtypes).split(", ") if name in ("bfloat16", "float16")]
    return "dtype", shown, _names(limits.dtypes), f"cast to {halves[0]}" if halves else None, f"dtype {shown}"


def _head_dim(limits: Constraints, call: Call, _form: Form) -> _Found:
    if limits.head_dims.admits(call.head_dim):
        return None
    padded = limits.head_dims.nearest(call.head_dim)
    nearest = f"pad to {padded} and keep scale=1/sqrt({call.head_dim})" if padded else None
    return "head_dim", str(call.head_dim), str(limits.head_dims), nearest, f"head dim {call.head_dim}"


def _v_head_dim(limits: Constraints, call: Call, _form: Form) -> _Found:
    if limits.v_head_dims is None:
        fits, allowed = call.v_head_dim == call.head_dim, f"q's, {call.head_dim}"
    else:
        fits, allowed = limits.v_head_dims.admits(call.v_head_dim), str(limits.v_head_dims)
    return None if fits else ("v_head_dim", str(call.v_head_dim), allowed, None, f"v head dim {call.v_head_dim}")


def _gqa(limits: Constraints, call: Call, _form: Form) -> _Found:
    if limits.gqa or not call.gqa:
        return None
    return "gqa", "shared key heads", "equal heads", "repeat_interleave k and v", "GQA"


def _queries(limits: Constraints, call: Call, _form: Form) -> _Found:
    have: Literal["one", "many"] = "one" if call.one_query else "many"
    return None if have in limits.queries else ("queries", have, _names(limits.queries), None, f"{have} queries")


def _lengths(limits: Constraints, call: Call, _form: Form) -> _Found:
    if call.lengths in limits.lengths or call.empty:
        return None
    return "lengths", call.lengths, _names(limits.lengths), None, f"lengths: {call.lengths}"


def _causal(limits: Constraints, call: Call, _form: Form) -> _Found:
    if not call.causal or call.lengths in limits.causal or call.empty:
        return None
    nearest = "mask_info=MaskInfo(causal=True) if bottom-right is meant" if limits.structures else None
    return "causal", f"top-left with {call.lengths}", _names(limits.causal), nearest, f"causal flag with {call.lengths}"


def _mask(limits: Constraints, call: Call, form: Form) -> _Found:
    if form != "dense":
        return None
    kind: MaskKind = "bool" if call.mask == "none" else call.mask
    if kind not in limits.masks:
        taken = [f"structures ({'; '.join(map(str, limits.structures))})"] if limits.structures else []
        allowed = ", ".join(sorted(limits.masks) + taken) or "none"
        shown = f"{kind} mask" if call.structure is None else f"{kind} mask, structure {call.structure}"
        nearest = (
            "pass mask_info if the mask has such a structure" if limits.structures and call.structure is None else None
        )
        return (
            "mask",
            shown,
            allowed,
            nearest,
            f"{kind} mask" if call.structure is None else f"mask structure {call.structure}",
        )
    return None


def _mask_dtype(limits: Constraints, call: Call, form: Form) -> _Found:
    if form != "dense" or call.mask_dtype in (None, call.dtype) or limits.mask_fp32:
        return None
    if call.dtype.itemsize > 4:  # float32 widens to float64 without rounding  # noqa: PLR2004
        return None
    shown = _names([call.mask_dtype])
    return (
        "mask_dtype",
        shown,
        f"q's, {_names([call.dtype])}",
        f"cast the mask to {_names([call.dtype])}",
        f"{shown} mask beside {_names([call.dtype])}",
    )


def _mask_grad(limits: Constraints, call: Call, _form: Form) -> _Found:
    return (
        None
        if limits.mask_grad or not call.mask_grad
        else ("mask_grad", "needed", "not given", "mask.detach()", "mask gradient")
    )


def _causal_and_mask(limits: Constraints, call: Call, form: Form) -> _Found:
    if limits.causal_and_mask or not call.causal or form != "dense":
        return None
    return "causal_and_mask", "both", "one of them", "write causality into the mask", "causal flag and mask"


def _scale(limits: Constraints, call: Call, _form: Form) -> _Found:
    if call.negative_scale and not limits.negative_scale:
        return "scale", "zero or below", "above zero", "negate q", "scale not above zero"
    if call.custom_scale and not limits.custom_scale:
        return "scale", "custom", "1/sqrt(head_dim)", "multiply q", "custom scale"
    return None


def _dropout(limits: Constraints, call: Call, _form: Form) -> _Found:
    return None if limits.dropout or not call.dropout else ("dropout", "used", "none", "dropout_p=0", "dropout")


def _backward(limits: Constraints, call: Call, _form: Form) -> _Found:
    return (
        None
        if limits.backward or not call.grad
        else ("gradient", "needed", "no backward", "torch.no_grad()", "no backward")
    )


def _empty(limits: Constraints, call: Call, _form: Form) -> _Found:
    return None if limits.empty or not call.empty else ("empty", "a size of zero", "at least 1", None, "a size of zero")


def _stride(limits: Constraints, call: Call, _form: Form) -> _Found:
    if limits.any_stride or call.packed_last:
        return None
    return "stride", "last dimension strided", "contiguous last dimension", ".contiguous()", "strided last dimension"


def _wrapped(limits: Constraints, call: Call, _form: Form) -> _Found:
    if call.wrapped is None or "*" in limits.wrapped or call.wrapped in limits.wrapped:
        return None
    return "wrapped", call.wrapped, "plain tensors", None, call.wrapped


_RULES = (
    _device, _capability, _dtype, _head_dim, _v_head_dim, _gqa, _queries, _lengths, _causal, _mask, _mask_dtype,
    _mask_grad, _causal_and_mask, _scale, _dropout, _backward, _empty, _stride, _wrapped,
)  # fmt: skip


def known_bad_for(entries: Iterable[KnownBad], call: Call, backend: str) -> Iterator[Refusal]:
    """The refusals of the known-bad combinations that apply to this call."""
    for entry in entries:
        if entry.call is not None and _concerns(entry.call, call):
            yield Refusal(
                backend, "known bad", f"{entry.effect}, see {entry.link}", "", None, f"known bad: {entry.effect}"
            )


def _concerns(ask: Callable[[Call], bool], call: Call) -> bool:
    try:
        return bool(ask(call))
    except Exception:  # noqa: BLE001 - a plugin's function must not harm the call; the cautious answer is yes
        return True
