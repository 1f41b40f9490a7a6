"""What one call of `attention` looks like: `describe` checks the inputs and says so without reading a tensor.

A `Call` holds kinds, not sizes, and is hashable: a decode loop, whose keys grow by one each step, makes the same Call
every time and so selects once. `Sizes` holds the exact numbers, for limits that depend on them.
"""

from __future__ import annotations

import functools
import math
import numbers
from typing import Any, Literal, TypeAlias

import attrs
import torch
from torch import Tensor

from fuseboard.errors import InputError
from fuseboard.masks import Masked, MaskInfo, Structure, check_kind

__all__ = ["Call", "Lengths", "MaskKind", "Sizes", "autocast", "describe", "is_lowered", "lowered"]

Lengths: TypeAlias = Literal["equal", "fewer queries", "more queries"]
MaskKind: TypeAlias = Literal["none", "bool", "additive"]

LONG = 1024
"""More queries than this make a call `long_queries`: kernels rank differently there."""

_SMALLEST = 2.0**-126  # float32's smallest normal number


@attrs.frozen(cache_hash=True)
class Call:
    """One kind of attention call: everything a backend may accept or refuse but the exact sizes.

    Attributes:
        device_type: `cpu`, `cuda`, ….
        device_index: Which device of that type; None where there is one.
        capability: CUDA compute capability `(major, minor)`; None elsewhere.
        dtype: Of q, k and v.
        head_dim: Of q and k.
        v_head_dim: Of v, and so of the output.
        gqa: Fewer key heads than query heads; query head `i` uses key head `i // (heads // kv_heads)`.
        one_query: `q_length == 1`, a decode step.
        long_queries: `q_length > 1024`.
        lengths: How q_length relates to k_length.
        empty: A batch, head or length of zero: nothing to compute, or no key to see.
        mask: Kind of dense mask.
        mask_dtype: Of an additive mask.
        mask_grad: The additive mask needs a gradient.
        structure: What `mask_info` asks at these lengths; None without one. `Structure()` says that nothing is hidden.
        causal: The top-left flag.
        custom_scale: A scale was given.
        negative_scale: The scale given is zero or below, which kernels that keep the largest unscaled score get wrong;
            or so small that float32, in which kernels keep it, makes zero of it.
        dropout: `dropout_p > 0`.
        grad: Some input needs a gradient, the mask included.
        packed_last: The last dimension of q, k and v is contiguous.
        wrapped: What makes q, k, v or the mask no plain tensor (a functorch transform, forward-mode AD, a subclass);
            None if all are.
    """

    device_type: str
    device_index: int | None
    capability: tuple[int, int] | None
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    gqa: bool = False
    one_query: bool = False
    long_queries: bool = False
    lengths: Lengths = "equal"
    empty: bool = False
    mask: MaskKind = "none"
    mask_dtype: torch.dtype | None = None
    mask_grad: bool = False
    structure: Structure | None = None
    causal: bool = False
    custom_scale: bool = False
    negative_scale: bool = False
    dropout: bool = False
    grad: bool = False
    packed_last: bool = True
    wrapped: str | None = None

    @property
    def device(self) -> torch.device:
        """Where the call runs."""
        return (
            torch.device(self.device_type, self.device_index)
            if self.device_index is not None
            else torch.device(self.device_type)
        )

    def __str__(self) -> str:
        dims = str(self.head_dim) if self.head_dim == self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}"
        parts = [str(self.device), str(self.dtype).removeprefix("torch."), f"head_dim {dims}"]
        parts.append(
            "one query" if self.one_query else "more than 1024 queries" if self.long_queries else "many queries"
        )
        parts.append("equal lengths" if self.lengths == "equal" else self.lengths)
        of = f" of {str(self.mask_dtype).removeprefix('torch.')}" if self.mask_dtype not in (None, self.dtype) else ""
        parts += [f"{self.mask} mask{of}"] if self.mask != "none" else []
        parts += [f"structure: {self.structure}"] if self.structure is not None else []
        flags = ("gqa", "empty", "causal", "custom_scale", "negative_scale", "dropout", "grad", "mask_grad")
        parts += [name.replace("_", " ") for name in flags if getattr(self, name)]
        parts += [] if self.packed_last else ["last axis strided"]
        parts += [f"in {self.wrapped}"] if self.wrapped is not None else []
        return ", ".join(parts)


@attrs.frozen
class Sizes:
    """The exact numbers of one call, for guards. Never part of a Call.

    Attributes:
        batch: Rows.
        heads: Query heads.
        kv_heads: Key and value heads.
        q_length: Queries.
        k_length: Keys.
        head_dim: Of q and k.
        v_head_dim: Of v.
        strides: Of q, k and v, in elements.
        mask_shape: Of the dense mask as given, or None.
        dropout_p: The probability.
    """

    batch: int
    heads: int
    kv_heads: int
    q_length: int
    k_length: int
    head_dim: int
    v_head_dim: int
    strides: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    mask_shape: tuple[int, ...] | None = None
    dropout_p: float = 0.0


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    mask_info: MaskInfo | None = None,
) -> tuple[Call, Sizes]:
    """Check the arguments of `attention` and say what kind of call they make. Reads no tensor, waits for no device.

    Raises:
        InputError: An argument cannot be right; the message names it and the values.
    """
    _check_flags(causal, enable_gqa)
    sizes = _check_qkv(q, k, v, enable_gqa=enable_gqa, mask=mask, dropout_p=dropout_p)
    _check_numbers(scale, dropout_p)
    _check_mask(mask, q, sizes)
    if mask_info is not None:
        _check_mask_info(mask_info, q, sizes)
    kind: MaskKind = "none" if mask is None else "bool" if mask.dtype == torch.bool else "additive"
    mask_grad = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or mask_grad)
    n_q, n_k = sizes.q_length, sizes.k_length
    # A gradient flows into the dense mask only, so then the structure cannot stand in for it; and a structure says
    # nothing of the separate top-left flag, which only ever joins a dense mask.
    structure = mask_info.structure(n_q, n_k) if mask_info is not None and not mask_grad and not causal else None
    if mask is None and mask_info is not None and structure is None:
        kind = "bool"  # the board writes the dense mask out
    call = Call(
        device_type=q.device.type,
        device_index=q.device.index,
        capability=_capability(q.device) if q.is_cuda else None,
        dtype=q.dtype,
        head_dim=sizes.head_dim,
        v_head_dim=sizes.v_head_dim,
        gqa=sizes.kv_heads != sizes.heads,
        one_query=n_q == 1,
        long_queries=n_q > LONG,
        lengths="equal" if n_q == n_k else "fewer queries" if n_q < n_k else "more queries",
        empty=0 in (sizes.batch, sizes.heads, n_q, n_k, sizes.head_dim, sizes.v_head_dim),
        mask=kind,
        mask_dtype=mask.dtype if mask is not None and kind == "additive" else None,
        mask_grad=mask_grad,
        structure=structure,
        causal=causal,
        custom_scale=scale is not None,
        negative_scale=scale is not None and scale < _SMALLEST,
        dropout=dropout_p > 0.0,
        grad=grad,
        packed_last=all(t.shape[-1] < 2 or t.stride(-1) == 1 for t in (q, k, v)),  # noqa: PLR2004
        wrapped=_wrapped(q, k, v, mask),
    )
    return call, sizes


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _wrapped(*tensors: Tensor | None) -> str | None:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a functorch transform"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode AD"
    kinds = (type(tensor) for tensor in tensors if tensor is not None)
    return next((f"a {kind.__name__}" for kind in kinds if kind not in (Tensor, torch.nn.Parameter)), None)


def _check_flags(causal: bool, enable_gqa: bool) -> None:
    for name, flag in (("causal", causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool) and flag is not None:
            msg = f"{name} is {flag!r}; expected True or False."
            raise InputError(name, msg)


def _check_qkv(  # noqa: C901, PLR0912 - a flat list of checks reads better than one cut in two
    q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, mask: Tensor | None, dropout_p: float
) -> Sizes:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            msg = f"{name} is a {type(tensor).__name__}; expected a torch.Tensor, (batch, heads, length, head_dim)."
            raise InputError(name, msg)
        _check_layout(name, tensor)
        if tensor.dim() != 4:  # noqa: PLR2004
            msg = f"{name} has shape {tuple(tensor.shape)}; expected four dimensions, (batch, heads, length, head_dim)."
            raise InputError(name, msg)
        if not tensor.is_floating_point():
            msg = f"{name} has dtype {tensor.dtype}; attention takes floating-point tensors."
            raise InputError(name, msg)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.device != q.device:
            msg = f"{name} is on {tensor.device} and q on {q.device}; move them to one device."
            raise InputError(name, msg)
        if tensor.dtype != q.dtype:
            msg = f"{name} has dtype {tensor.dtype} and q {q.dtype}; cast them to one dtype."
            raise InputError(name, msg)
    if isinstance(mask, Tensor):
        _check_layout("mask", mask)
    batch, heads, q_length, head_dim = q.shape
    _, kv_heads, k_length, _ = k.shape
    if k.shape != (batch, kv_heads, k_length, head_dim):
        msg = f"k has shape {tuple(k.shape)} and q {tuple(q.shape)}; batch and head_dim must be the same."
        raise InputError("k", msg)
    if v.shape[:3] != k.shape[:3]:
        msg = f"v has shape {tuple(v.shape)} and k {tuple(k.shape)}; batch, heads and length must be the same."
        raise InputError("v", msg)
    if heads != kv_heads:
        if not enable_gqa:
            msg = f"q has {heads} heads and k {kv_heads}; pass enable_gqa=True if key heads are shared."
            raise InputError("enable_gqa", msg)
        if kv_heads == 0 or heads % kv_heads:
            msg = f"q has {heads} heads and k {kv_heads}; with enable_gqa the first must be a multiple of the second."
            raise InputError("k", msg)
    return Sizes(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_length=q_length,
        k_length=k_length,
        head_dim=head_dim,
        v_head_dim=v.shape[3],
        strides=(q.stride(), k.stride(), v.stride()),
        mask_shape=None if mask is None else tuple(mask.shape) if isinstance(mask, Tensor) else None,
        dropout_p=dropout_p,
    )


def _check_layout(name: str, tensor: Tensor) -> None:
    try:
        nested, layout = tensor.is_nested, tensor.layout
    except NotImplementedError as error:  # some subclasses answer no question, as torch 2.6's CausalBias
        msg = f"{name} is a {type(tensor).__name__}, which tells nothing of itself ({error}); expected a torch.Tensor."
        raise InputError(name, msg) from error
    if nested:
        msg = f"{name} is a nested tensor; expected a plain one with a mask, or mask_info, for its lengths."
        raise InputError(name, msg)
    if layout != torch.strided:
        msg = f"{name} has layout {layout}; attention takes dense tensors."
        raise InputError(name, msg)


def _number(given: object) -> float:
    """What torch reads as a number, Python's and numpy's, as one; NaN for all else.

    A tensor would have to be read, which waits for the device; a fraction is none to torch.
    """
    fits = isinstance(given, (int, float)) or (isinstance(given, numbers.Real) and hasattr(given, "dtype"))
    try:
        return float(given) if fits else math.nan  # type: ignore[arg-type]
    except OverflowError:
        return math.nan


def _check_numbers(scale: float | None, dropout_p: float) -> None:
    if scale is not None and not -math.inf < _number(scale) < math.inf:
        msg = f"scale is {scale!r}; expected a finite number, or None for 1 / sqrt(head_dim)."
        raise InputError("scale", msg)
    if not 0.0 <= _number(dropout_p) < 1.0:
        msg = f"dropout_p is {dropout_p!r}; expected a probability of at least 0 and below 1."
        raise InputError("dropout_p", msg)


def _check_mask(mask: Tensor | None, q: Tensor, sizes: Sizes) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        both = " Give both with **masked.arguments()." if isinstance(mask, Masked) else ""
        msg = f"mask is a {type(mask).__name__}; expected a torch.Tensor, boolean (True = attend) or additive.{both}"
        raise InputError("mask", msg)
    if mask.device != q.device:
        msg = f"mask is on {mask.device} and q on {q.device}; move it to q's device."
        raise InputError("mask", msg)
    # float32 beside any q is torch's own rule; integers are never added as numbers.
    if mask.dtype not in (torch.bool, torch.float32, q.dtype):
        additive = " or ".join(dict.fromkeys((str(q.dtype), "torch.float32")))
        msg = f"mask has dtype {mask.dtype} and q {q.dtype}; expected torch.bool (True = attend), or {additive} to add."
        raise InputError("mask", msg)
    want = (sizes.batch, sizes.heads, sizes.q_length, sizes.k_length)
    wrong = [axis for axis in range(1, mask.dim() + 1) if axis > 4 or mask.shape[-axis] not in (1, want[-axis])]  # noqa: PLR2004
    if wrong:
        axis = wrong[0]
        names = ("last dimension", "second to last dimension", "third to last dimension", "first dimension")
        detail = (
            f"{names[axis - 1]} {mask.shape[-axis]}, expected {'1' if want[-axis] == 1 else f'1 or {want[-axis]}'}"
            if axis <= 4  # noqa: PLR2004
            else f"{mask.dim()} dimensions, expected at most 4"
        )
        hint = ""
        if mask.dim() == 3:  # noqa: PLR2004
            hint = (
                " Rank 3 is read as (heads, q_length, k_length); for one mask per row give "
                "(batch, 1, q_length, k_length)."
            )
        elif tuple(mask.shape) == (sizes.batch, sizes.k_length):
            hint = (
                " If it says which keys of each row are real, give mask_info=MaskInfo(keys=mask.bool()) in its place."
            )
        msg = (
            f"mask has shape {tuple(mask.shape)} and does not broadcast to "
            f"(batch, heads, q_length, k_length) = {want}: {detail}.{hint}"
        )
        raise InputError("mask", msg)


def _check_mask_info(info: MaskInfo, q: Tensor, sizes: Sizes) -> None:
    check_kind(info)
    if info.keys is None:
        return
    if tuple(info.keys.shape) != (sizes.batch, sizes.k_length):
        want = (sizes.batch, sizes.k_length)
        msg = f"mask_info.keys has shape {tuple(info.keys.shape)}; expected (batch, k_length) = {want}."
        raise InputError("mask_info", msg)
    if info.keys.device != q.device:
        msg = f"mask_info.keys is on {info.keys.device} and q on {q.device}; move it to q's device."
        raise InputError("mask_info", msg)


def autocast(device: torch.device) -> bool:
    """Whether autocast is on there."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def is_lowered(q: Tensor) -> bool:
    """Whether autocast is on where q is."""
    return isinstance(q, Tensor) and autocast(q.device)


def lowered(q: Tensor, *others: Tensor | None) -> list[Any]:
    """The tensors as autocast hands them to torch's attention: floating ones of q's device, but no float64, cast."""
    device = q.device.type
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Any) -> Any:  # what is no tensor is for `describe` to refuse
        lower = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if lower and tensor.device.type == device else tensor

    return [cast(each) for each in (q, *others)]
