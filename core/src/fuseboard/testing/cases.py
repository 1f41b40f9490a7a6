"""The conformance kit's cases, made from what a backend declares: each limit at, below, above, and real models' calls.

A case says what is called, not what must come of it: whatever the backend refuses is refused, and whatever it admits
must be right. The same constraints give the same cases, and a case the same numbers: no global generator is touched.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from fuseboard.call import describe
from fuseboard.constraints import Constraints, HeadDims, admit, guard
from fuseboard.masks import MaskInfo, Structure, to_additive
from fuseboard.testing.models import MODELS

__all__ = ["HUGE", "Case", "DenseMask", "Inputs", "base_dim", "cases", "few", "other_keys"]

BATCH, HEADS, SHARED = 2, 4, 2
WINDOW, AHEAD = 9, 5

CROSSED = ((33, 33), (33, 65), (65, 33))
LENGTHS = (
    (1, 1), (1, 2), (1, 7), (1, 64), (1, 77), (1, 257), (2, 1), (7, 1), (77, 1), (2, 2), (7, 7), (16, 16), (31, 31),
    (63, 63), (64, 64), (65, 65), (127, 127), (128, 128), (129, 129), (31, 97), (97, 31), (64, 128), (128, 64),
    (128, 65), (40, 104), (16, 296), (200, 200), (3, 300), (1025, 33), (33, 1025),
)  # fmt: skip
EMPTY = ((0, 5), (5, 0), (0, 0), (1, 0))
TWO_TILES = 130  # of queries, in every kernel known
DIMS = (1, 3, 5, 7, 8, 16, 24, 32, 40, 64, 72, 80, 96, 100, 128, 129, 192, 256, 264)
STRUCTURES = [
    each
    for each in itertools.product(("none", "right", "left", "any"), (False, True), (None, WINDOW))
    if each != ("none", False, None)
]
LOCAL: dict[str, Any] = {"structure": ("none", False, WINDOW), "ahead": AHEAD}
"""An encoder's local attention: the one structure with a bound ahead that every dtype is asked for."""

HUGE = -1e30
"""What engines add to hide a key where they avoid -inf; float16 has no such number."""

LAYOUTS = ("transposed", "strided", "sliced", "offset", "cache", "expanded", "shared", "one-head")

LARGEST = 500 * 2**20
"""Bytes that a case for a guard may need, its float64 copies included."""

GUARD_REACH = 2**17
"""How far one size is raised in search of a guard's limit: beyond a launch grid's 65,535."""


@attrs.frozen
class DenseMask:
    """How a case's dense mask looks.

    Attributes:
        kind: `bool`, `additive` in q's dtype, or additive in `float32`.
        axes: Its shape, a letter an axis: b, h, q, k or 1, from rank 1 to 4.
        layout: `packed`, `sliced` out of a wider buffer, `transposed`, or `expanded` with strides of 0.
        hides: `some` keys; also `rows`, whole rows; by finite numbers in place of -inf, `lowest`, the dtype's lowest,
            or `huge`, -1e30, which in a whole row makes all keys equal.
    """

    kind: str
    axes: str = "bhqk"
    layout: str = "packed"
    hides: str = "rows"

    def __str__(self) -> str:
        return ".".join([self.kind, self.axes, *({self.layout, self.hides} - {"packed", "rows"})])


@attrs.frozen(eq=False)
class Inputs:
    """A case's tensors and flags, as `attention` takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    info: MaskInfo | None = None
    causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that a kernel could write into."""
        keys = None if self.info is None else self.info.keys
        named = {"q": self.q, "k": self.k, "v": self.v, "mask": self.mask, "mask_info.keys": keys}
        return {name: each for name, each in named.items() if each is not None}

    def arguments(self) -> dict[str, Any]:
        """What `attention`, `describe` and `Chain.route` take by name."""
        return {
            "mask": self.mask, "mask_info": self.info, "causal": self.causal, "scale": self.scale,
            "dropout_p": self.dropout_p,
        }  # fmt: skip


@attrs.frozen
class Case:
    """One call.

    Attributes:
        dtype: Of q, k and v.
        q_length: Queries.
        k_length: Keys.
        head_dim: Of q and k.
        v_head_dim: Of v.
        batch: Rows.
        heads: Of q.
        kv_heads: Of k and v.
        causal: The top-left flag.
        mask: The dense mask.
        structure: `(keys, causal, window)` of a `MaskInfo`; `keys` with a 0 behind has a row without any real key.
        ahead: The structure's bound ahead.
        beside: The kind of dense mask given beside the structure and saying the same; empty for none.
        scale: None for the default.
        layout: How q, k and v lie in memory; see `_laid_out`. Besides: `expanded`, all rows are one; `shared`, all rows
            have the same keys; `one-head`, all key heads are one, each with a stride of 0; `same`, q is k and is v.
        grad: Which inputs need a gradient: letters of `qkvm`, m the mask.
        note: A model's name, or the guard that the case is made for.
        crossed: It is part of the crossing that the matrix shows.
    """

    dtype: torch.dtype
    q_length: int
    k_length: int
    head_dim: int
    v_head_dim: int
    batch: int = BATCH
    heads: int = HEADS
    kv_heads: int = HEADS
    causal: bool = False
    mask: DenseMask | None = None
    structure: tuple[str, bool, int | None] | None = None
    ahead: int | None = None
    beside: str = ""
    scale: float | None = None
    layout: str = "packed"
    grad: str = ""
    note: str = ""
    crossed: bool = attrs.field(default=False, eq=False)

    def __str__(self) -> str:
        dims = str(self.head_dim) if self.head_dim == self.v_head_dim else f"{self.head_dim}v{self.v_head_dim}"
        parts = [*filter(None, [self.note]), str(self.dtype).removeprefix("torch."), f"{self.q_length}x{self.k_length}"]
        parts.append(f"d{dims}")
        if (self.batch, self.heads, self.kv_heads) != (BATCH, HEADS, HEADS):
            parts.append(f"b{self.batch}h{self.heads}" + (f"kv{self.kv_heads}" if self.kv_heads != self.heads else ""))
        parts += ["causal"] if self.causal else []
        parts += [str(self.mask)] if self.mask is not None else []
        if self.structure is not None:
            keys, causal, window = self.structure
            shown = (
                [f"{keys}-keys"] * (keys != "none")
                + ["bottom-right"] * causal
                + [f"window{window}"] * (window is not None)
                + [f"ahead{self.ahead}"] * (self.ahead is not None)
            )
            parts.append("+".join(shown))
        parts += [f"beside-{self.beside}"] if self.beside else []
        parts += [f"scale{self.scale:g}"] if self.scale is not None else []
        parts += [self.layout] if self.layout != "packed" else []
        parts += [f"grad.{self.grad}"] if self.grad else []
        return "-".join(parts)

    @property
    def row(self) -> str:
        """The matrix's row: what is hidden, and how that is said."""
        if self.structure is not None:
            keys, causal, window = self.structure
            bound = bool(self.ahead) and not causal  # one of 0 is causality
            structure = Structure(keys.rstrip("0"), causal or self.ahead == 0, window is not None, bound)  # type: ignore[arg-type]
            return f"mask_info: {structure}"
        if self.mask is None:
            return "causal flag" if self.causal else "no mask"
        kind = "bool" if self.mask.kind == "bool" else "additive"
        return f"{kind} mask{' + causal flag' if self.causal else ''}{', its gradient' if 'm' in self.grad else ''}"

    def inputs(self, device: torch.device, draw_number: int = 0) -> Inputs:
        """The tensors, the same each time for one number; with another, other values in the same shapes."""
        generator = torch.Generator().manual_seed(zlib.crc32(str(self).encode()) + draw_number)
        draw_in = torch.float64 if self.dtype == torch.float64 else torch.float32

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=draw_in).to(device, self.dtype)

        def leaf(name: str, heads: int, length: int, dim: int) -> Tensor:
            row = self.layout == "expanded" or (self.layout == "shared" and name in "kv")
            head = self.layout == "one-head" and name in "kv"
            drawn = draw(1 if row else self.batch, 1 if head else heads, length, dim)
            laid = _laid_out(drawn, self.layout, name)
            return (laid.expand(self.batch, heads, -1, -1) if row or head else laid).requires_grad_(name in self.grad)

        q = leaf("q", self.heads, self.q_length, self.head_dim)
        k = v = q
        if self.layout != "same":
            k = leaf("k", self.kv_heads, self.k_length, self.head_dim)
            v = leaf("v", self.kv_heads, self.k_length, self.v_head_dim)
        mask = None if self.mask is None else self._mask(self.mask, generator, device)
        info = None
        if self.structure is not None:
            keys, causal, window = self.structure
            padding: Any = keys.rstrip("0") if keys.rstrip("0") in ("right", "left") else None
            info = MaskInfo(_keys(keys, self.batch, self.k_length, device), causal, window, padding, self.ahead)
            if draw_number and info.keys is not None:
                info = attrs.evolve(info, keys=other_keys(info))
            if self.beside:
                mask = info.dense(self.q_length, self.k_length, device)
                mask = mask if self.beside == "bool" else to_additive(mask, self.dtype)
        if mask is not None and "m" in self.grad:
            mask.requires_grad_()
        return Inputs(q, k, v, mask, info, self.causal, self.scale)

    def _mask(self, wanted: DenseMask, generator: torch.Generator, device: torch.device) -> Tensor:
        sizes = {"b": self.batch, "h": self.heads, "q": self.q_length, "k": self.k_length, "1": 1}
        shape = [sizes[axis] for axis in wanted.axes]
        seen = torch.rand(shape, generator=generator) < 0.7  # noqa: PLR2004 - most, not all
        if wanted.hides in ("rows", "huge") and len(shape) > 1 and shape[-2] > 1:
            seen[..., shape[-2] // 2, :] = False
        dtype = torch.bool
        if wanted.kind != "bool":
            dtype = torch.float32 if wanted.kind == "float32" else self.dtype
            low = {"lowest": torch.finfo(dtype).min, "huge": HUGE}.get(wanted.hides, -torch.inf)
            if wanted.hides == "lowest" and shape:
                seen[..., 0] = True  # what such a row shows when nothing is left is each kernel's rounding
            noise = torch.randn(shape, generator=generator).to(dtype)
            mask = torch.where(seen, noise, torch.tensor(low, dtype=dtype))
        else:
            mask = seen
        mask = mask.to(device)
        if wanted.layout == "sliced":
            wide = torch.full(
                (*shape[:-1], shape[-1] + 3), True if dtype == torch.bool else torch.nan, dtype=dtype, device=device
            )
            wide[..., 1:-2] = mask
            return wide[..., 1:-2]
        if wanted.layout == "transposed":
            return mask.mT.contiguous().mT
        if wanted.layout == "expanded":
            return mask.expand([sizes[axis] for axis in "bhqk"])
        return mask


def _laid_out(tensor: Tensor, layout: str, name: str) -> Tensor:
    """The tensor in memory as engines have it; what lies around it is NaN, so that whoever reads it is found out."""
    if layout == "transposed":  # the projection's own layout, (batch, length, heads, head_dim)
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    batch, heads, length, dim = tensor.shape
    if layout == "strided":
        wide = tensor.new_full((batch, heads, length, 2 * dim), torch.nan)
        view = wide[..., ::2]
    elif layout == "sliced":  # out of a fused projection, at an odd address
        wide = tensor.new_full((batch, heads, length, dim + 3), torch.nan)
        view = wide[..., 1 : 1 + dim]
    elif layout == "offset":  # contiguous, one element behind an aligned address
        view = tensor.new_full((tensor.numel() + 1,), torch.nan)[1:].view(tensor.shape)
    elif layout == "cache" and name in "kv":
        wide = tensor.new_full((batch, heads, length + 13, dim), torch.nan)
        view = wide[:, :, :length]
    else:
        return tensor
    view.copy_(tensor)
    return view


def _keys(kind: str, batch: int, k_length: int, device: torch.device) -> Tensor | None:
    if kind == "none":
        return None
    place = torch.arange(k_length)
    real = torch.tensor([[k_length if row == 0 else k_length // (row + 1) + 1] for row in range(batch)])
    if kind.endswith("0"):
        real[-1] = 0
    if kind.startswith("any"):
        return ((place % 3 != 1) & (real > 0)).to(device)
    return ((place < real) if kind.startswith("right") else (place >= k_length - real)).to(device)


def other_keys(info: MaskInfo) -> Tensor:
    """Other real keys with padding at the same end: the first rows get the last ones' and the other way round."""
    assert info.keys is not None
    if info.padding is None:
        return ~info.keys
    return info.keys.flip(0)


def base_dim(dims: HeadDims) -> int:
    """A usual head dimension that is admitted; the smallest one otherwise."""
    return next((dim for dim in (32, 64, 16, 128, 8) if dims.admits(dim)), dims.nearest(0) or 64)


def cases(limits: Constraints, device: torch.device) -> list[Case]:
    """All cases for a backend of these constraints on that device."""
    made: dict[str, Case] = {}
    for case in _all(limits, device):
        if device.type != "mps" or case.dtype != torch.float64:
            made.setdefault(str(case), case)
    return list(made.values())


def few(limits: Constraints, device: torch.device) -> list[Case]:
    """One call of each sort, for checks that make each several times. All are among `cases`.

    At odd lengths, or at whole tiles for a backend whose limits admit nothing else.
    """
    plain = _plain(limits)
    for n_q, n_k in ((33, 65), (33, 33), (128, 256), (256, 256)):
        case = attrs.evolve(plain, q_length=n_q, k_length=n_k)
        if _is_admitted(limits, case, device):
            plain = case
            break
    square = attrs.evolve(plain, k_length=plain.q_length)
    bool_mask, additive = DenseMask("bool"), DenseMask("additive", hides="some")
    found = [
        attrs.evolve(plain, **more)
        for more in (
            {}, {"kv_heads": SHARED}, {"mask": bool_mask}, {"mask": additive}, {"structure": ("none", True, None)},
            {"structure": ("none", True, WINDOW)}, LOCAL, {"structure": ("right", False, None)},
            {"structure": ("right", True, None)}, {"structure": ("left", True, None)},
            {"structure": ("any", False, None)}, {"grad": "qkv"}, {"grad": "qkv", "kv_heads": SHARED},
            {"grad": "qkv", "mask": additive}, {"grad": "qkvm", "mask": additive},
            {"grad": "qkv", "structure": ("none", True, None)}, {"grad": "qkv", "structure": ("right", False, None)},
        )
    ]  # fmt: skip
    found += [attrs.evolve(square, causal=True), attrs.evolve(square, causal=True, grad="qkv")]
    return [*found, attrs.evolve(plain, q_length=1), attrs.evolve(plain, layout="transposed")]


def _is_admitted(limits: Constraints, case: Case, device: torch.device) -> bool:
    call, sizes = _shape_only(case, device)
    return not admit(limits, "", call)[1] and not guard(limits, "", call, sizes)


ORDER = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _dtypes(limits: Constraints) -> list[torch.dtype]:
    return [dtype for dtype in ORDER if dtype in limits.dtypes] or sorted(limits.dtypes, key=str)


def _plain(limits: Constraints) -> Case:
    dim = base_dim(limits.head_dims)
    v_dim = dim if limits.v_head_dims is None or limits.v_head_dims.admits(dim) else base_dim(limits.v_head_dims)
    return Case(_dtypes(limits)[0], 33, 65, dim, v_dim)


def _all(limits: Constraints, device: torch.device) -> Iterator[Case]:
    plain, dtypes = _plain(limits), _dtypes(limits)
    for dtype in dtypes:
        yield from _crossing(attrs.evolve(plain, dtype=dtype))
        yield from _few(attrs.evolve(plain, dtype=dtype))
    yield attrs.evolve(plain, dtype=next((dtype for dtype in ORDER if dtype not in limits.dtypes), dtypes[0]))
    yield from few(limits, device)
    for family in (_lengths, _heads, _masks, _structures, _scales, _layouts, _gradients):
        yield from family(plain)
    yield from _head_dims(plain, limits)
    for limit in limits.guards:
        yield from _guards(plain, attrs.evolve(limits, guards=(limit,)), device)
    for dtype in dtypes[:2]:
        for name, fields in MODELS.items():
            yield attrs.evolve(plain, dtype=dtype, note=name, **fields)


def _crossing(plain: Case) -> Iterator[Case]:
    """What the matrix shows: what is hidden, GQA and backward crossed, at the three relations of lengths."""
    hidden: list[dict[str, Any]] = [{}, {"causal": True}]
    hidden += [{"mask": DenseMask("bool")}, {"mask": DenseMask("additive")}]
    hidden += [{"structure": each} for each in STRUCTURES]
    for (n_q, n_k), kv_heads, grad, what in itertools.product(CROSSED, (HEADS, SHARED), ("", "qkv"), hidden):
        yield attrs.evolve(plain, q_length=n_q, k_length=n_k, kv_heads=kv_heads, grad=grad, crossed=True, **what)
    for (n_q, n_k), kv_heads, grad in itertools.product(((33, 65), (65, 33)), (HEADS, SHARED), ("", "qkv")):
        yield attrs.evolve(plain, q_length=n_q, k_length=n_k, kv_heads=kv_heads, grad=grad, crossed=True, **LOCAL)
    for (n_q, n_k), kv_heads in itertools.product(CROSSED, (HEADS, SHARED)):
        mask = DenseMask("additive", hides="some")
        yield attrs.evolve(plain, q_length=n_q, k_length=n_k, kv_heads=kv_heads, grad="qkvm", mask=mask, crossed=True)


def _few(plain: Case) -> Iterator[Case]:
    """What is worth asking in every dtype."""
    for n_q, n_k in ((1, 1), (1, 77), (65, 65), (128, 65), (64, 128)):
        yield attrs.evolve(plain, q_length=n_q, k_length=n_k)
        yield attrs.evolve(plain, q_length=n_q, k_length=n_k, causal=True, scale=0.3)
    yield attrs.evolve(plain, mask=DenseMask("float32", "11qk"))
    yield attrs.evolve(plain, mask=DenseMask("additive", "b1qk", hides="lowest"))
    if torch.finfo(plain.dtype).min < HUGE:
        yield attrs.evolve(plain, mask=DenseMask("additive", "b1qk", hides="huge"))
    yield attrs.evolve(plain, mask=DenseMask("float32", "b1qk", hides="huge"))
    yield attrs.evolve(plain, layout="transposed", kv_heads=1)


def _lengths(plain: Case) -> Iterator[Case]:
    for n_q, n_k in (*LENGTHS, *EMPTY):
        case = attrs.evolve(plain, q_length=n_q, k_length=n_k)
        yield case
        yield attrs.evolve(case, causal=True)
        yield attrs.evolve(case, structure=("none", True, None))
        if min(n_q, n_k) < 2 or n_k % 2:  # noqa: PLR2004
            yield attrs.evolve(case, mask=DenseMask("bool"), kv_heads=SHARED)
            yield attrs.evolve(case, grad="qkv")
            yield attrs.evolve(case, mask=DenseMask("additive", "b1qk"), grad="qkv")
    yield attrs.evolve(plain, batch=0)
    yield attrs.evolve(plain, batch=0, grad="qkv")
    yield attrs.evolve(plain, heads=0, kv_heads=0)
    yield attrs.evolve(plain, batch=1, heads=1, kv_heads=1)


def _heads(plain: Case) -> Iterator[Case]:
    for heads, kv_heads in ((6, 1), (6, 2), (6, 3), (8, 2), (5, 5), (7, 1)):
        for more in (
            {},
            {"causal": True},
            {"mask": DenseMask("bool")},
            {"structure": ("right", False, None)},
            {"grad": "qkv"},
        ):
            case = attrs.evolve(plain, heads=heads, kv_heads=kv_heads, **more)
            yield case
            yield attrs.evolve(case, q_length=1)


def _masks(plain: Case) -> Iterator[Case]:
    axes = ("bhqk", "b1qk", "1hqk", "11qk", "b11k", "111k", "bhq1", "11q1", "hqk", "1qk", "qk", "1k", "k")
    for kind, shape, (n_q, n_k) in itertools.product(("bool", "additive"), axes, ((33, 65), (1, 77), (64, 64))):
        yield attrs.evolve(plain, q_length=n_q, k_length=n_k, mask=DenseMask(kind, shape))
    for kind, layout, shape in itertools.product(
        ("bool", "additive", "float32"), ("sliced", "transposed", "expanded"), ("bhqk", "b1qk", "11qk")
    ):
        yield attrs.evolve(plain, mask=DenseMask(kind, shape, layout))
        yield attrs.evolve(plain, mask=DenseMask(kind, shape, layout), kv_heads=SHARED, grad="qkv")
    # As many rows as heads: rank 3 is one mask a head, and is read per row by mistake without an error.
    for kind in ("bool", "additive"):
        yield attrs.evolve(plain, heads=2, kv_heads=2, q_length=7, k_length=9, mask=DenseMask(kind, "hqk"))
        yield attrs.evolve(plain, mask=DenseMask(kind), causal=True)
        yield attrs.evolve(plain, mask=DenseMask(kind, "11qk"), causal=True, q_length=65, grad="qkv")
        yield attrs.evolve(plain, mask=DenseMask(kind, hides="some"), scale=0.5)
    yield attrs.evolve(plain, mask=DenseMask("additive", hides="lowest"))
    yield attrs.evolve(plain, mask=DenseMask("additive", hides="lowest"), grad="qkv")


def _structures(plain: Case) -> Iterator[Case]:
    for structure, (n_q, n_k) in itertools.product(STRUCTURES, (*CROSSED, (1, 77), (64, 128))):
        yield attrs.evolve(plain, q_length=n_q, k_length=n_k, structure=structure)
    for structure, beside in itertools.product(STRUCTURES, ("bool", "additive")):
        yield attrs.evolve(plain, structure=structure, beside=beside)
        yield attrs.evolve(plain, structure=structure, beside=beside, grad="qkv", kv_heads=SHARED)
    yield attrs.evolve(plain, structure=("right", True, None), beside="additive", grad="qkvm")
    for keys, causal, window in itertools.product(("right0", "left0", "any0"), (False, True), (None, WINDOW)):
        for n_q in (1, 33, 65):
            yield attrs.evolve(plain, q_length=n_q, structure=(keys, causal, window))
        yield attrs.evolve(plain, structure=(keys, causal, window), grad="qkv")
    for window in (1, 2, 64, 65, 66, 1000):
        yield attrs.evolve(plain, structure=("none", True, window))
        yield attrs.evolve(plain, structure=("none", False, window), q_length=65)
    for structure, ahead, more in (
        (("none", False, None), AHEAD, {"kv_heads": SHARED, "grad": "qkv"}),
        (("none", False, None), 0, {"q_length": 65}),
        (("none", False, 65), 64, {"q_length": 130, "k_length": 130}),
        (("right0", False, WINDOW), AHEAD, {"kv_heads": SHARED}),
        (("left0", False, WINDOW), AHEAD, {"kv_heads": SHARED}),
        (("left", False, WINDOW), AHEAD, {"q_length": 65, "grad": "qkv"}),
    ):
        yield attrs.evolve(plain, structure=structure, ahead=ahead, **more)
    # The flag and a structure at once: top-left and bottom-right must not be taken for each other.
    yield attrs.evolve(plain, causal=True, structure=("none", True, None))
    yield attrs.evolve(plain, causal=True, structure=("right", False, None))


def _scales(plain: Case) -> Iterator[Case]:
    for scale in (0.5, 1.0, 0.05, 2.0, -0.4, 0.0, plain.head_dim**-0.5):
        yield attrs.evolve(plain, scale=scale)
        yield attrs.evolve(plain, scale=scale, causal=True, q_length=65)
        yield attrs.evolve(plain, scale=scale, grad="qkv")
        yield attrs.evolve(plain, scale=scale, structure=("right", True, None))


def _layouts(plain: Case) -> Iterator[Case]:
    whats: tuple[dict[str, Any], ...] = (
        {}, {"causal": True, "q_length": 65}, {"kv_heads": SHARED}, {"mask": DenseMask("bool")},
        {"structure": ("right", False, None)}, {"structure": ("left", True, None)},
        {"structure": ("none", True, WINDOW)}, {"grad": "qkv"}, {"q_length": 1}, {"k_length": 64},
    )  # fmt: skip
    for layout, what in itertools.product(LAYOUTS, whats):
        yield attrs.evolve(plain, layout=layout, **what)
    one = attrs.evolve(plain, q_length=65, v_head_dim=plain.head_dim, layout="same")
    for more in ({}, {"causal": True}, {"mask": DenseMask("bool")}, {"structure": ("right", True, None)}):
        yield attrs.evolve(one, **more)
        yield attrs.evolve(one, grad="qkv", **more)


def _gradients(plain: Case) -> Iterator[Case]:
    for grad in ("q", "k", "v", "qk", "qkv"):
        yield attrs.evolve(plain, grad=grad)
        yield attrs.evolve(plain, grad=grad, mask=DenseMask("additive"))
    for grad, axes in itertools.product(("m", "qm", "qkvm"), ("bhqk", "1hqk", "b1qk", "11qk", "111k", "hqk", "qk")):
        yield attrs.evolve(plain, grad=grad, mask=DenseMask("additive", axes, hides="some"))
    yield attrs.evolve(plain, grad="qkvm", mask=DenseMask("additive", hides="rows"))
    yield attrs.evolve(plain, grad="qkvm", mask=DenseMask("float32", "11qk", hides="some"))
    for n_q, n_k in ((128, 65), (64, 128), (1, 77), (129, 129)):
        yield attrs.evolve(plain, grad="qkv", q_length=n_q, k_length=n_k, causal=True)
        yield attrs.evolve(plain, grad="qkv", q_length=n_q, k_length=n_k, structure=("none", True, None))


def _head_dims(plain: Case, limits: Constraints) -> Iterator[Case]:
    for dim in _around(limits.head_dims):
        v_dim = dim if limits.v_head_dims is None or limits.v_head_dims.admits(dim) else plain.v_head_dim
        case = attrs.evolve(plain, head_dim=dim, v_head_dim=v_dim)
        yield case
        # Two tiles of queries: kernels exist whose gradient of q is wrong at some dimensions beyond the first.
        yield attrs.evolve(case, grad="qkv", causal=True, q_length=TWO_TILES, k_length=TWO_TILES)
        yield attrs.evolve(case, mask=DenseMask("additive"), kv_heads=SHARED)
        yield attrs.evolve(case, structure=("right", True, None))
    for v_dim in _around(limits.v_head_dims or limits.head_dims):
        if v_dim != plain.head_dim:
            yield attrs.evolve(plain, v_head_dim=v_dim)
            yield attrs.evolve(plain, v_head_dim=v_dim, grad="qkv", mask=DenseMask("bool"))


def _around(dims: HeadDims) -> list[int]:
    """Dimensions at, below and above a declaration's limits, and usual and odd ones between."""
    if dims.only:
        near = {dim + step for dim in dims.only for step in (-1, 0, 1)}
        return sorted(dim for dim in near if dim > 0)
    ends = {dims.low} if dims.high is None else {dims.low, dims.high}
    near = {dim + step for dim in ends for step in (-dims.multiple, -1, 0, 1, dims.multiple)}
    top = dims.high if dims.high is not None else max(DIMS) * 2
    return sorted({dim for dim in near if dim > 0} | {dim for dim in DIMS if dim <= top})


def _guards(plain: Case, limits: Constraints, device: torch.device) -> Iterator[Case]:
    """Sizes on both sides of one guard's limit, found by raising one size at a time while the case stays affordable."""
    (limit,) = limits.guards
    small = attrs.evolve(
        plain, batch=1, heads=1, kv_heads=1, q_length=1, k_length=2, note=f"guard.{limit.rule.replace(' ', '_')}"
    )
    starts = [small, attrs.evolve(small, grad="qkv"), attrs.evolve(small, mask=DenseMask("bool", "11qk", hides="some"))]
    starts += [attrs.evolve(small, q_length=64, k_length=64, heads=4, kv_heads=4)]
    grow: dict[str, Callable[[int], dict[str, int]]] = {
        "batch": lambda size: {"batch": size},
        "heads": lambda size: {"heads": size, "kv_heads": size},
        "q_length": lambda size: {"q_length": size},
        "k_length": lambda size: {"k_length": size},
    }
    for start, step in itertools.product(starts, grow.values()):

        def admitted(size: int, start: Case = start, step: Callable[[int], dict[str, int]] = step) -> bool:
            return not guard(limits, "", *_shape_only(attrs.evolve(start, **step(size)), device))  # type: ignore[arg-type]

        for size in _edges(admitted, [*range(1, 18), *(2**power for power in range(5, GUARD_REACH.bit_length()))]):
            case = attrs.evolve(start, **step(size))  # type: ignore[arg-type]
            if _bytes(case) <= LARGEST:
                yield case


def _edges(admitted: Callable[[int], bool], sizes: Iterable[int]) -> list[int]:
    """The first few sizes at which the answer changes, each with its neighbour on the other side."""
    found: list[int] = []
    for low, high in itertools.pairwise(sizes):
        if admitted(low) != admitted(high):
            below, above = low, high
            while above - below > 1:
                middle = (below + above) // 2
                below, above = (middle, above) if admitted(middle) == admitted(low) else (below, middle)
            found += [below, above]
    return list(dict.fromkeys(found))[:4]


def _shape_only(case: Case, device: torch.device) -> tuple[Any, Any]:
    """What `describe` says of a case, from tensors without memory."""
    kind: dict[str, Any] = {"dtype": case.dtype, "device": "meta", "requires_grad": bool(case.grad)}
    q = torch.empty(case.batch, case.heads, case.q_length, case.head_dim, **kind)
    k = torch.empty(case.batch, case.kv_heads, case.k_length, case.head_dim, **kind)
    v = torch.empty(case.batch, case.kv_heads, case.k_length, case.v_head_dim, **kind)
    mask = None if case.mask is None else torch.empty(case.q_length, case.k_length, dtype=torch.bool, device="meta")
    call, sizes = describe(q, k, v, mask=mask, enable_gqa=True)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return attrs.evolve(call, device_type=device.type, device_index=device.index, capability=capability), sizes


def _bytes(case: Case) -> int:
    rows = case.batch * case.heads
    inputs = rows * (2 * case.q_length * case.v_head_dim + 2 * case.k_length * case.head_dim)
    scores = rows * case.q_length * case.k_length
    return (12 * inputs + 24 * scores) * (3 if case.grad else 1)
