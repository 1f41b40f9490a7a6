"""Matrix products of a few rows as Triton kernels, with the norm before and the gate or the residual after inside.

A step of few rows reads every weight for a handful of numbers, so that what it costs is memory and the waits between
kernels. Off until `decoder.fuse(products=True)`, since sums are added in another order than cuBLAS's. Used in steps
over a fixed cache alone, where a trial on the device gives the formula's numbers.

Each program has a few of a product's columns, and begins to load their weights before it waits for the numbers that
they are multiplied with. Of one row, that is done weight by weight; of more, by tensor cores, whose four warps share a
column's weights and add what each has at the end.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fuseboard.engine.decoder.kernels.launch import Launcher, power_of_two
from fuseboard.engine.decoder.kernels.trial import Draws, launches_early, tried

if TYPE_CHECKING:
    from fuseboard.engine.decoder.config import DecoderConfig
    from fuseboard.engine.decoder.norms import RMSNorm

__all__ = ["Products", "products_for"]

_HALVES = (torch.float16, torch.bfloat16)
_ROWS = 16
"""Of more, cuBLAS makes them faster. In float32, where tensor cores would round, of more than `_ONE_BY_ONE`."""
_ONE_BY_ONE = 3
"""Each row more takes that kernel a quarter of the first one's time."""
_HELD = 16384
"""How many weights a program holds in registers, one by one."""
_COLUMNS = 16

# Of the tensor cores' kernel, measured on an H200.
_WARPS = 4
_DEEP = 256
_PARTS = 3
_WIDEST = 4096
"""From so many columns on there are enough programs when each has 32 of them."""
_LEAST_SHARED = 101376
"""Bytes of shared memory that a program may have on any GPU with bfloat16's tensor cores, compute capability 8.6."""


@attrs.frozen
class Products:
    """The kernel for so many rows. From `products_for`.

    Attributes:
        rows: How many.
        early: Whether a kernel begins before the kernel before it has ended, which hides most of a launch.
        shared: Bytes of shared memory that a program on tensor cores may have; None for weight by weight.
        padded: How many rows tensor cores are given.
    """

    _kernel: Launcher
    rows: int
    early: bool
    shared: int | None
    padded: int

    def __str__(self) -> str:
        return "Triton, on tensor cores" if self.shared is not None else "Triton, weight by weight"

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
        if self.shared is None:
            whole = power_of_two(wide)
            block = min(max(_HELD // (2 if gated else 1) // whole, 1), _COLUMNS)
            self._kernel((-(-tall // block), 1), *given, block, whole, self.early)
        else:
            block, deep, held = _tile(wide, tall, self.padded, self.shared, gated=gated)
            chunks = -(-wide // (_WARPS * deep))
            self._kernel(
                (-(-tall // block), 1), *given, block, _WARPS, deep, chunks, held, self.padded, self.early
            )  # fmt: skip
        return out


@functools.cache
def _tile(wide: int, tall: int, padded: int, shared: int, *, gated: bool) -> tuple[int, int, int]:
    """How many columns a program has, how much of each a warp takes at a time, and how many such parts are held.

    Two programs shall fit into the shared memory of a multiprocessor, as each has little to do while it waits.
    """
    deep = min(_DEEP, max(16, power_of_two(-(-wide // _WARPS))))
    block = 32 if tall >= _WIDEST and not gated and wide <= _WARPS * deep else 16
    number = 2  # bytes
    while True:
        part = _WARPS * deep * number
        weights, free = part * block * (2 if gated else 1), shared // 2 - part * padded
        if weights <= free or deep == 16:  # noqa: PLR2004 - the least that tensor cores multiply
            return block, deep, min(-(-wide // (_WARPS * deep)), max(free // weights, 1), _PARTS)
        deep //= 2


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
        # Twice: the second time compiled kernels are launched by themselves.
        for _ in range(1 if interpreted else 2):
            if not _right(made, Draws(device, dtype, eps), sizes, qkv_bias, o_bias):
                return "its product differs from the formula's on this device"
        return made

    return tried("products_triton", device, trial)


def _made(kernels: Any, device: torch.device, dtype: torch.dtype, rows: int, early: bool) -> Products:
    how = {"launch_pdl": True} if early else {}
    if rows == 1 or dtype not in _HALVES:
        return Products(Launcher(kernels.one_by_one, num_warps=8, **how), rows, early, None, rows)
    shared = _LEAST_SHARED
    if device.type == "cuda":
        shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", shared)
    padded = 8 if rows <= 8 and kernels.MULTIPLIES_EIGHT else 16  # noqa: PLR2004 - what tensor cores multiply
    return Products(Launcher(kernels.tiled, num_warps=_WARPS, **how), rows, early, shared, padded)


def _right(
    products: Products, draws: Draws, sizes: tuple[int, int, int, int], qkv_bias: bool, o_bias: bool
) -> bool:  # fmt: skip
    """Whether the four products of a layer are the formula's, beyond the last bits."""
    wide, inner, heads, attended = sizes
    hidden, norm = draws.numbers(products.rows, wide), draws.norm(wide)
    normed = draws.normed(norm, hidden)
    into = draws.linear(wide, heads, bias=qkv_bias)
    if not draws.near(products(hidden, into, norm=norm), into(normed)):
        return False
    gates = draws.linear(wide, 2 * inner)
    gate, up = gates(normed).chunk(2, dim=-1)
    if not draws.near(products(hidden, gates, norm=norm, gated=True), F.silu(gate) * up):
        return False
    for size, bias in ((attended, o_bias), (inner, False)):
        back, x = draws.linear(size, wide, bias=bias), draws.numbers(products.rows, size)
        if not draws.near(products(x, back, add=hidden), hidden + back(x)):
            return False
    return True
