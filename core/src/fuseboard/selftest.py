"""The self-test: a small grid of real calls against float64, before a backend answers anything.

One shape is not enough. Kernels exist that are right at 64 keys and wrong at 65, right when causal and wrong when not,
right until the queries outnumber the keys. The grid crosses the lengths that catch those with what the backend claims.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fuseboard.backend import DEFAULT_TOLERANCE, Backend, Exactness, Kernel
from fuseboard.call import Call, describe
from fuseboard.constraints import Constraints, HeadDims, admit, guard
from fuseboard.errors import DeclinedError
from fuseboard.masks import MaskInfo, in_form, to_4d
from fuseboard.registry import first_line

__all__ = ["Case", "attention_fp64", "cases", "definition", "distance", "gradients", "malformed", "run"]

LENGTHS = ((1, 77), (65, 65), (64, 128), (128, 65))
WHOLE_TILES = ((128, 128), (256, 256))
"""For a backend whose limits admit none of the grid's lengths."""
ROUNDING = 8
"""How many times the default tolerance a backend may ask for that calls itself exact."""
HEADS, SHARED, BATCH = 4, 2, 2
UNEVEN_DIM, UNEVEN_LENGTH = 80, 130
"""No multiple of 32, and two tiles of queries: a backward that pads one and not the other gives a wrong gradient of q.

https://github.com/Dao-AILab/flash-attention/pull/2896
"""


@attrs.frozen
class Case:
    """One call of the grid: its tensors live on the CPU in float64 until it is run.

    Attributes:
        dtype: What it is run in.
        q_length: Queries.
        k_length: Keys.
        head_dim: Of q and k.
        v_head_dim: Of v.
        gqa: Two query heads share a key head.
        causal: The top-left flag.
        mask: `none`, `bool` or `additive`.
        structure: A structure given in place of a mask: which, or None.
        ahead: The structure's bound ahead.
        scale: None for the default.
        backward: Gradients are checked too.
        mask_grad: Also that of an additive mask.
    """

    dtype: torch.dtype
    q_length: int
    k_length: int
    head_dim: int
    v_head_dim: int
    gqa: bool = False
    causal: bool = False
    mask: str = "none"
    structure: tuple[str, bool, int | None] | None = None
    ahead: int | None = None
    scale: float | None = None
    backward: bool = False
    mask_grad: bool = False

    def __str__(self) -> str:
        dims = f"head dim {self.head_dim}" + (f" (v {self.v_head_dim})" if self.v_head_dim != self.head_dim else "")
        parts = [str(self.dtype).removeprefix("torch."), f"lengths {self.q_length}x{self.k_length}", dims]
        parts += [name for name in ("gqa", "causal", "backward", "mask_grad") if getattr(self, name)]
        parts += [f"scale {self.scale:g}"] if self.scale is not None else []
        parts += [f"{self.mask} mask"] if self.mask != "none" else []
        if self.structure is not None:
            keys, causal, window = self.structure
            ahead = "" if self.ahead is None else f" ahead={self.ahead}"
            parts.append(f"structure keys={keys} causal={causal} window={window}{ahead}")
        return ", ".join(parts)


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    mask_info: MaskInfo | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention by its definition, in q's dtype: softmax(q k^T scale + mask) v, zero in rows that see nothing."""
    groups = q.shape[1] // max(k.shape[1], 1)
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    n_q, n_k = scores.shape[-2:]
    seen = torch.ones(1, 1, n_q, n_k, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril()
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & to_4d(mask)
    elif mask is not None:
        scores = scores + to_4d(mask).to(scores.dtype)
        seen = seen & (to_4d(mask) > -torch.inf)
    if mask_info is not None:
        seen = seen & mask_info.dense(n_q, n_k, q.device)
    # A score of -inf must not meet the softmax of a row that sees nothing, nor its gradient: 0 * NaN is NaN.
    empty = ~seen.any(-1, keepdim=True)
    weights = scores.masked_fill(~seen, -torch.inf).masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return weights @ v


def attention_fp64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    mask_info: MaskInfo | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention by its definition in float64: what every backend is held against. Differentiable."""
    return definition(q.double(), k.double(), v.double(), mask=mask, mask_info=mask_info, causal=causal, scale=scale)


def cases(backend: Backend, device: torch.device, lengths: tuple[tuple[int, int], ...] = LENGTHS) -> Iterator[Case]:
    """The grid for what `backend` claims: the whole of it in one dtype, a few calls in each other.

    What is wrong in structure is wrong in every dtype, and kernels exist that build a plan of half a second for each
    case.
    """
    limits = backend.constraints
    dim = _dim(limits.head_dims)
    v_dim = dim if limits.v_head_dims is None else _dim(limits.v_head_dims)
    order = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    dtypes = [dtype for dtype in (*order, *sorted(limits.dtypes - {*order}, key=str)) if dtype in limits.dtypes]
    for place, dtype in enumerate(dtypes):
        if device.type == "mps" and dtype == torch.float64:
            continue
        for n_q, n_k in lengths:
            plain = Case(dtype, n_q, n_k, dim, v_dim)
            shared = attrs.evolve(plain, gqa=limits.gqa)
            if place:
                yield shared
                if n_q == n_k:
                    yield attrs.evolve(shared, backward=True, causal=True)
                continue
            yield from _crossed(plain, shared, limits)
    if dtypes and lengths is LENGTHS and limits.head_dims.admits(UNEVEN_DIM):
        uneven = Case(dtypes[0], UNEVEN_LENGTH, UNEVEN_LENGTH, UNEVEN_DIM, UNEVEN_DIM)
        yield attrs.evolve(uneven, backward=True)


def _crossed(plain: Case, shared: Case, limits: Constraints) -> Iterator[Case]:
    """Every claim at one pair of lengths."""
    yield shared
    if limits.custom_scale:  # besides: quantised kernels take small scales only
        yield attrs.evolve(shared, scale=0.5)
    yield attrs.evolve(plain, causal=True)
    yield attrs.evolve(shared, mask="bool")
    yield attrs.evolve(plain, mask="additive")
    for keys, causal, window in itertools.product(("none", "right", "left", "any"), (False, True), (None, 20)):
        if (keys, causal, window) != ("none", False, None):
            yield attrs.evolve(plain, structure=(keys, causal, window))
        if not causal and (window is not None or keys == "none"):
            yield attrs.evolve(plain, structure=(keys, causal, window), ahead=10)
    if plain.q_length not in (1, 64):
        yield attrs.evolve(shared, backward=True)
        yield attrs.evolve(plain, backward=True, causal=True)
        yield attrs.evolve(plain, backward=True, mask="additive")
        yield attrs.evolve(plain, backward=True, mask="additive", mask_grad=True)
        yield attrs.evolve(plain, backward=True, structure=("none", True, None))


def run(
    backend: Backend, kernel: Kernel, device: torch.device, given_up: Callable[[], bool] = lambda: False
) -> str | None:
    """Run the grid on `device`: None when every admitted case is right, else what went wrong at which.

    Args:
        backend: Whose claims are tested.
        kernel: What is called.
        device: Where.
        given_up: Asked before each case: whether nobody waits for the answer any more.
    """
    for lengths in (LENGTHS, WHOLE_TILES):
        ran = 0
        for case in cases(backend, device, lengths):
            if given_up():
                return "self-test: given up"
            try:
                problem = check(backend, kernel, case, device)
            except Exception as error:  # noqa: BLE001 - a kernel may raise anything, and the case is half the reason
                problem = first_line(error)
            if problem is not None and problem != "":
                return f"self-test failed ({case}): {problem}"
            ran += problem is None
        if ran:
            return None
    return "self-test: its constraints admit none of the calls of the grid"


def check(backend: Backend, kernel: Kernel, case: Case, device: torch.device) -> str | None:
    """Run one case: None when right, empty when the backend refuses it, else the problem."""
    q, k, v, mask, info = _tensors(case, device)
    call, sizes = describe(q, k, v, mask=mask, causal=case.causal, scale=case.scale, enable_gqa=True, mask_info=info)
    form, refusals = admit(backend.constraints, backend.name, call)
    # A structure that the backend would be given as a dense mask is tested as a dense mask already.
    if (
        refusals
        or guard(backend.constraints, backend.name, call, sizes)
        or (case.structure is not None and form == "dense")
    ):
        return ""
    given_mask, given_info = in_form(form, call.structure, mask, info, q, k)
    given = {"mask": given_mask, "mask_info": given_info, "causal": case.causal, "scale": case.scale, "dropout_p": 0.0}
    declines = getattr(kernel, "declines", None)
    if declines is not None and isinstance(declines(q, k, v, **given), str):
        return ""
    inputs = {name: each for name, each in (("q", q), ("k", k), ("v", v), ("mask", given_mask)) if each is not None}
    before = {name: each.detach().clone() for name, each in inputs.items()}
    roots = {"q": q, "k": k, "v": v} | ({"mask": mask} if mask is not None and case.mask_grad else {})
    exact = {name: each.detach().double().cpu().clone().requires_grad_(case.backward) for name, each in roots.items()}
    with torch.set_grad_enabled(case.backward):
        try:
            out = kernel(q, k, v, **given)  # type: ignore[arg-type]
        except DeclinedError:
            return ""
    host_info = None if info is None else attrs.evolve(info, keys=None if info.keys is None else info.keys.cpu())
    host_mask = exact.get("mask", None if mask is None else mask.cpu())
    want = attention_fp64(
        exact["q"], exact["k"], exact["v"], mask=host_mask, mask_info=host_info, causal=case.causal, scale=case.scale
    )
    tolerance = backend.tolerance(case.dtype)
    problem = _wrong(out, want.detach(), q, tolerance) or _too_tolerant(backend, call, tolerance)
    if problem is None and case.backward:
        problem = _wrong_gradients(out, want, roots, exact, tolerance)
    changed = [name for name, each in inputs.items() if not torch.equal(each.detach(), before[name])]
    return problem or (f"it wrote into {' and '.join(changed)}" if changed else None)


def _tensors(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None, MaskInfo | None]:
    generator = torch.Generator().manual_seed(
        case.q_length * 1009 + case.k_length
    )  # its own: no global state is touched

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, case.dtype)

    kv_heads = SHARED if case.gqa else HEADS
    q = draw(BATCH, HEADS, case.q_length, case.head_dim).requires_grad_(case.backward)
    k = draw(BATCH, kv_heads, case.k_length, case.head_dim).requires_grad_(case.backward)
    v = draw(BATCH, kv_heads, case.k_length, case.v_head_dim).requires_grad_(case.backward)
    mask = None
    if case.mask == "bool":
        mask = torch.rand(BATCH, 1, case.q_length, case.k_length, generator=generator) < 0.7  # noqa: PLR2004 - most, not all
        mask[0, :, 0] = False  # a row that sees nothing
        mask = mask.to(device)
    elif case.mask == "additive":
        mask = draw(1, HEADS, case.q_length, case.k_length)
        mask[..., case.k_length // 2 :: 7] = -torch.inf
        mask.requires_grad_(case.mask_grad)
    info = None
    if case.structure is not None:
        keys, causal, window = case.structure
        padding: Any = keys if keys in ("right", "left") else None
        info = MaskInfo(_keys(keys, case.k_length, device), causal, window, padding, case.ahead)
    return q, k, v, mask, info


def _keys(kind: str, k_length: int, device: torch.device) -> Tensor | None:
    if kind == "none":
        return None
    place, real = torch.arange(k_length), torch.tensor([[k_length], [k_length // 2 + 1]])
    if kind == "any":
        return (place % 3 != 1).expand(BATCH, -1).to(device)
    return ((place < real) if kind == "right" else (place >= k_length - real)).to(device)


def malformed(out: object, want: Tensor, q: Tensor) -> str | None:
    """What is wrong with the kind of a kernel's answer, whatever its numbers; None for nothing."""
    if not isinstance(out, Tensor):
        return f"it returned a {type(out).__name__}, expected a tensor"
    if out.shape != want.shape or out.dtype != q.dtype or out.device != q.device:
        expected = f"{q.dtype} {tuple(want.shape)} on {q.device}"
        return f"it returned {out.dtype} {tuple(out.shape)} on {out.device}, expected {expected}"
    return None if bool(out.detach().isfinite().all()) else "its output is not finite"


def distance(got: Tensor, want: Tensor) -> float:
    """The largest absolute difference from a float64 result."""
    difference = got.detach().to(want.device).double() - want.detach()
    return float(difference.abs().max()) if difference.numel() else 0.0


def gradients(
    out: Tensor, want: Tensor, inputs: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    """Each input's name, its gradient through `out` (None when lost) and the right one, for one random seed."""
    generator = torch.Generator().manual_seed(7)
    seed = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    got = torch.autograd.grad(out, list(inputs.values()), seed.to(out.device, out.dtype), allow_unused=True)
    right = torch.autograd.grad(want, list(exact.values()), seed.to(want.device))
    return zip(inputs, got, right, strict=True)


def gradient_tolerance(tolerance: float, right: Tensor) -> float:
    """The error allowed in a gradient: it sums over rows, so its rounding scales with its size.

    The factor is the one flash-attn's own tests need.
    """
    return 8 * tolerance * max(1.0, float(right.abs().max()) if right.numel() else 0.0)


def _wrong(out: object, want: Tensor, q: Tensor, tolerance: float) -> str | None:
    problem = malformed(out, want, q)
    if problem is not None or not isinstance(out, Tensor):
        return problem
    error = distance(out, want)
    return None if error <= tolerance else f"its output is off by {error:.2g}, tolerance {tolerance:.2g}"


def _too_tolerant(backend: Backend, call: Call, tolerance: float) -> str | None:
    """An exact backend's errors are rounding: one that is allowed more is right by its own word alone."""
    rounding = DEFAULT_TOLERANCE.get(str(call.dtype).removeprefix("torch."))
    if rounding is None or tolerance <= ROUNDING * rounding or backend.exactness(call) is not Exactness.EXACT:
        return None
    return (
        f"it calls itself exact but for rounding, and its tolerance is {tolerance:.2g}, where rounding stays below "
        f"{ROUNDING * rounding:.2g}: give a smaller one, or say that it is approximate"
    )


def _wrong_gradients(
    out: Tensor, want: Tensor, inputs: Mapping[str, Tensor], exact: Mapping[str, Tensor], tolerance: float
) -> str | None:
    if out.grad_fn is None:
        return "its output carries no gradient"
    for name, mine, theirs in gradients(out, want, inputs, exact):
        if mine is None:
            return f"its gradient of {name} is lost"
        error, allowed = distance(mine, theirs), gradient_tolerance(tolerance, theirs)
        if not error <= allowed:
            return f"its gradient of {name} is off by {error:.2g}, tolerance {allowed:.2g}"
    return None


def _dim(dims: HeadDims) -> int:
    usual = [dim for dim in (64, 128, 32, 16, 8) if dims.admits(dim)]
    return usual[0] if usual else (dims.nearest(0) or 64)
