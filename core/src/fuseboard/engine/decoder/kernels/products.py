"""Matrix products of a few rows as Triton kernels, with the norm before and the gate or the residual after inside.

A step of few rows reads every weight for a handful of numbers, so that what it costs is memory and the waits between
kernels. Off until `decoder.fuse(products=True)`, since sums are added in another order than cuBLAS's. Used in steps
over a fixed cache alone, where a trial on the device gives the formula's numbers.

Each program has a few of a product's columns, and begins to load their weights before it waits for the numbers that
they are multiplied with. Of one row, that is done weight by weight; of more, by tensor cores, whose warps share a
column's weights and add what each has at the end.
"""

from __future__ import annotations

import abc
import functools
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fuseboard.engine.decoder.kernels.launch import Launcher, power_of_two
from fuseboard.engine.decoder.kernels.trial import Case, Draws, differing, launches_early, tried

if TYPE_CHECKING:
    from fuseboard.engine.decoder.config import DecoderConfig
    from fuseboard.engine.decoder.norms import RMSNorm

__all__ = ["Products", "Tile", "products_for", "tile_for"]

_HALVES = (torch.float16, torch.bfloat16)
_ROWS = 16
"""Of more, cuBLAS makes them faster. In float32, where tensor cores would round, of more than `_ONE_BY_ONE`."""
_ONE_BY_ONE = 3
"""Each row more takes that kernel a quarter of the first one's time."""
_HELD = 16384
"""How many weights a program holds in registers, one by one."""
_COLUMNS = 16

# Of the tensor cores' kernel, measured on an H200 in whole steps of Qwen3-0.6B's shape. Where a program cannot load all
# its weights before the numbers are there, cuBLAS is faster: by 5 % in the shape of Qwen3-1.7B, 40 % in that of 8B.
_WARPS, _MANY_WARPS = 4, 8
_DEEP, _LEAST = 256, 16
"""How much of a sum a warp takes at a time, at most and at least."""
_CHUNKS = 3
_BLOCKS = (64, 32, 16)
_PROGRAMS = 64
"""With fewer, too few multiprocessors load; with more, too many normalise the same rows."""
_LEAST_SHARED = 101376
"""Bytes of shared memory that a program may have on any GPU with bfloat16's tensor cores, compute capability 8.6."""


@attrs.frozen
class Products(abc.ABC):
    """The kernel for so many rows, by either of the ways below. From `products_for`.

    Attributes:
        rows: How many.
        early: Whether a kernel begins before the kernel before it has ended, which hides most of a launch.
    """

    rows: int
    early: bool

    @abc.abstractmethod
    def suits(self, wide: int, inner: int, heads: int, attended: int) -> bool:
        """Whether the four products of a layer are faster by it.

        Args:
            wide: The hidden size.
            inner: The intermediate size.
            heads: How many columns queries, keys and values have.
            attended: And attention's answer.
        """

    @abc.abstractmethod
    def _launch(self, given: tuple[Any, ...], wide: int, tall: int, *, normed: bool, gated: bool) -> None:
        """Launch the kernel with what both take, and the constants that it has besides."""

    def __call__(
        self, x: Tensor, linear: nn.Linear, *, norm: RMSNorm | None = None, gated: bool = False,
        add: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`linear(x)`.

        Args:
            x: `(rows, in_features)`, contiguous.
            linear: Its weight contiguous.
            norm: Normalises x before.
            gated: The first half of what comes out is a gate for the second: `silu(gate) * up` is given.
            add: Is added to what comes out.
        """
        wide = x.shape[1]
        tall = linear.out_features // 2 if gated else linear.out_features
        out = x.new_empty(self.rows, tall)
        bias = linear.bias
        given = (
            x, x if norm is None else norm.weight, linear.weight, x if bias is None else bias,
            x if add is None else add, out, wide, tall, 0.0 if norm is None else norm.eps, self.rows,
            norm is not None, gated, add is not None, bias is not None,
        )  # fmt: skip
        self._launch(given, wide, tall, normed=norm is not None, gated=gated)
        return out


@attrs.frozen
class OneByOne(Products):
    """Weight by weight, whatever the sizes: a program holds as many columns as it can of sums that long."""

    _kernel: Launcher

    def __str__(self) -> str:
        return "Triton, weight by weight"

    def suits(self, wide: int, inner: int, heads: int, attended: int) -> bool:
        """As of `Products`."""
        return True

    def _launch(self, given: tuple[Any, ...], wide: int, tall: int, *, normed: bool, gated: bool) -> None:
        whole = power_of_two(wide)
        block = min(max(_HELD // (2 if gated else 1) // whole, 1), _COLUMNS)
        self._kernel((-(-tall // block), 1), *given, block, whole, self.early)


@attrs.frozen
class Tiled(Products):
    """On tensor cores.

    Attributes:
        shared: Bytes of shared memory that a program may have.
        padded: How many rows tensor cores are given.
    """

    _kernels: dict[int, Launcher]  # by warps
    shared: int
    padded: int

    def __str__(self) -> str:
        return "Triton, on tensor cores"

    def suits(self, wide: int, inner: int, heads: int, attended: int) -> bool:
        """As of `Products`."""
        tiles = (
            self.tile(wide, heads, normed=True, gated=False),
            self.tile(attended, wide, normed=False, gated=False),
            self.tile(wide, inner, normed=True, gated=True),
            self.tile(inner, wide, normed=False, gated=False),
        )
        return None not in tiles

    def tile(self, wide: int, tall: int, *, normed: bool, gated: bool) -> Tile | None:
        """As of `tile_for`."""
        return tile_for(wide, tall, self.padded, self.shared, normed=normed, gated=gated)

    def _launch(self, given: tuple[Any, ...], wide: int, tall: int, *, normed: bool, gated: bool) -> None:
        tile = self.tile(wide, tall, normed=normed, gated=gated)
        assert tile is not None, "products_for looks"
        grid = (-(-tall // tile.block), 1)
        constants = (tile.block, tile.warps, tile.deep, tile.chunks, self.padded, self.early)
        self._kernels[tile.warps](grid, *given, *constants)


@attrs.frozen
class Tile:
    """What a program on tensor cores does.

    Attributes:
        block: How many columns it has, of gate and up so many each.
        warps: How many share each sum.
        deep: How much of a sum a warp takes at a time.
        chunks: In how many parts the sum goes.
    """

    block: int
    warps: int
    deep: int
    chunks: int


@functools.cache
def tile_for(wide: int, tall: int, padded: int, shared: int, *, normed: bool, gated: bool) -> Tile | None:
    """A tile in two thirds of the shared memory, or None where not all weights of a program are there at once.

    Args:
        wide: How long the sums are.
        tall: How many columns there are.
        padded: How many rows.
        shared: Bytes of shared memory that a program may have.
        normed: The rows are normalised before, for which a program has all of them at once.
        gated: Each column has two sums.
    """
    warps = _WARPS if wide % (_MANY_WARPS * _DEEP) else _MANY_WARPS
    deep = min(_DEEP, max(_LEAST, power_of_two(-(-wide // warps))))
    chunks = -(-wide // (warps * deep))
    if chunks > (1 if normed else _CHUNKS):
        return None
    part = warps * deep * 2  # bytes
    free = shared * 2 // 3 - part * padded
    for block in _BLOCKS[-1:] if gated else _BLOCKS:
        weights = part * chunks * block * (2 if gated else 1)
        if weights <= free and (tall >= block * _PROGRAMS or block == _BLOCKS[-1]):
            return Tile(block, warps, deep, chunks)
    return None


def products_for(
    device: torch.device, dtype: torch.dtype, config: DecoderConfig, *, rows: int, early: bool
) -> Products | str:
    """The kernel for steps of so many rows, or why there is none. Tried once for each argument, which waits.

    Args:
        device: Where.
        dtype: Of weights and numbers.
        config: For its sizes.
        rows: How many.
        early: As for `glue_for`.
    """
    most = _ROWS if dtype in _HALVES else _ONE_BY_ONE
    if rows > most:
        return f"of more than {most} rows cuBLAS makes them faster"
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    sizes = (config.hidden_size, config.intermediate_size, heads, config.num_attention_heads * config.head_dim)
    return _tried(device, dtype, sizes, config.qkv_bias, config.o_bias, config.rms_norm_eps, rows, early)


@functools.cache
def _tried(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int], qkv_bias: bool, o_bias: bool,
    eps: float, rows: int, early: bool,
) -> Products | str:  # fmt: skip
    if dtype not in (torch.float32, *_HALVES):
        return f"its kernels do not compute {dtype}"
    if power_of_two(max(sizes[0], sizes[1], sizes[3])) > _HELD:
        return f"its kernels add at most {_HELD} products, and there are {max(sizes[0], sizes[1], sizes[3])}"

    def trial(kernels: Any, interpreted: bool) -> Products | str:
        made = _made(kernels, device, dtype, rows, early and launches_early(kernels, device))
        if not made.suits(*sizes):
            return "of more than one row, with sums this long, cuBLAS makes them faster"
        draws = Draws(device, dtype, eps)
        wrong = differing(_cases(made, draws, sizes, qkv_bias, o_bias), draws, interpreted=interpreted)
        return f"its {wrong} differs from the formula's on this device" if wrong else made

    return tried("products_triton", device, trial)


def _made(kernels: Any, device: torch.device, dtype: torch.dtype, rows: int, early: bool) -> Products:
    how = {"launch_pdl": True} if early else {}
    if rows == 1 or dtype not in _HALVES:
        return OneByOne(rows, early, Launcher(kernels.one_by_one, num_warps=_MANY_WARPS, **how))
    shared = _LEAST_SHARED
    if device.type == "cuda":
        shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", shared)
    padded = 8 if rows <= 8 and kernels.MULTIPLIES_EIGHT else 16  # noqa: PLR2004 - what tensor cores multiply
    tiled = {warps: Launcher(kernels.tiled, num_warps=warps, **how) for warps in (_WARPS, _MANY_WARPS)}
    return Tiled(rows, early, tiled, shared, padded)


def _cases(
    products: Products, draws: Draws, sizes: tuple[int, int, int, int], qkv_bias: bool, o_bias: bool
) -> list[Case]:  # fmt: skip
    """The four products of a layer."""
    wide, inner, heads, attended = sizes
    hidden, norm = draws.numbers(products.rows, wide), draws.norm(wide)
    into, gates = draws.linear(wide, heads, bias=qkv_bias), draws.linear(wide, 2 * inner)

    def gated() -> tuple[Tensor, ...]:
        gate, up = gates(norm(hidden)).chunk(2, dim=-1)
        return (F.silu(gate) * up,)

    def added(name: str, size: int, bias: bool) -> Case:
        back, x = draws.linear(size, wide, bias=bias), draws.numbers(products.rows, size)
        return Case(name, lambda: (products(x, back, add=hidden),), lambda: (hidden + back(x),))

    return [
        Case(
            "product after a norm", lambda: (products(hidden, into, norm=norm),),
            lambda: (into(norm(hidden)),),
        ),
        Case("gated product", lambda: (products(hidden, gates, norm=norm, gated=True),), gated),
        added("product of attention", attended, o_bias),
        added("product added to the residual", inner, False),
    ]  # fmt: skip
