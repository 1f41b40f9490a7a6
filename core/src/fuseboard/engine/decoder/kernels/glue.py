"""What lies between the matrix products of a one-token step, as three Triton kernels a layer in place of thirteen.

Off until `decoder.fuse(glue=True)`, since a norm's squares are added in another order. Used in steps over a fixed cache
alone, and only where a trial on the device gives the formula's numbers; elsewhere the report says why not.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fuseboard.engine.decoder.kernels.launch import Launcher, on, power_of_two
from fuseboard.engine.decoder.norms import RMSNorm, upcast_norm
from fuseboard.engine.decoder.rope import rotate
from fuseboard.failure import Meaning, classify
from fuseboard.registry import first_line

if TYPE_CHECKING:
    from fuseboard.engine.decoder.config import DecoderConfig
    from fuseboard.engine.decoder.fixed import Part
    from fuseboard.engine.decoder.layers import SelfAttention

__all__ = ["Glue", "glue_for"]

_BLOCK = 1024
_ROWS = 3
"""Each row more takes `product` a quarter of the first one's time, and cuBLAS nothing."""
_TILE = 16384
"""How many weights a program of `product` holds in registers."""
_COLUMNS = 16
_TRIED = 3


@attrs.frozen
class Glue:
    """The kernels. From `glue_for`.

    Attributes:
        products: Whether matrix products of a few rows are made by them too, with norm, gate and residual inside.
        early: Whether each begins before the kernel before it has ended, which hides most of a launch.
    """

    _add_norm: Launcher
    _put_heads: Launcher
    _silu_mul: Launcher
    _product: Launcher
    products: bool = False
    early: bool = False

    @classmethod
    def of(cls, kernels: Any, products: bool, early: bool) -> Glue:
        """Of the module that has them."""
        how = {"launch_pdl": True} if early else {}
        return cls(
            Launcher(kernels.add_norm, num_warps=4, **how), Launcher(kernels.put_heads, num_warps=1, **how),
            Launcher(kernels.silu_mul, num_warps=4, **how), Launcher(kernels.product, num_warps=8, **how), products,
            early,
        )  # fmt: skip

    def multiplies(self, rows: int) -> bool:
        """Whether it makes the matrix products of so many rows: of more, each weight would be used too often."""
        return self.products and rows <= _ROWS

    def product(
        self, x: Tensor, linear: nn.Linear, *, norm: RMSNorm | None = None, gated: bool = False,
        add: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`linear(x)` of a few rows.

        Args:
            x: `(rows, in_features)`, contiguous.
            linear: Its weight contiguous.
            norm: Normalises x before.
            gated: The first half of what comes out is a gate for the second: `silu(gate) * up` is given.
            add: Is added to what comes out.
        """
        rows, wide = x.shape
        tall = linear.out_features // 2 if gated else linear.out_features
        out = x.new_empty(rows, tall)
        whole = power_of_two(wide)
        block = min(max(_TILE // (2 if gated else 1) // whole, 1), _COLUMNS)
        bias = linear.bias
        self._product(
            (-(-tall // block), 1), x, x if norm is None else norm.weight, linear.weight, x if bias is None else bias,
            x if add is None else add, out, wide, tall, 0.0 if norm is None else norm.eps, rows, norm is not None,
            gated, add is not None, bias is not None, block, whole, self.early,
        )  # fmt: skip
        return out

    def add_norm(self, hidden: Tensor, delta: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """`hidden + delta`, and that normalised; both `(rows, size)` and contiguous."""
        out = torch.empty_like(hidden)
        total = hidden if delta is None else torch.empty_like(hidden)
        self._add_norm(
            (hidden.shape[0], 1), hidden, hidden if delta is None else delta, norm.weight, total, out, norm.size,
            norm.eps, delta is not None, power_of_two(norm.size), self.early,
        )  # fmt: skip
        return total, out

    def put_heads(self, qkv: Tensor, part: SelfAttention, place: Part, layer: int, step: Turn) -> Tensor:
        """Normalise and rotate queries and keys, and put keys and values into the cache; gives the queries.

        Args:
            qkv: `(rows, (heads + 2 * kv_heads) * head_dim)`, contiguous.
            part: For its norms and sizes.
            place: The part of the cache.
            layer: Which of its layers.
            step: Where each row is.
        """
        heads, kv_heads, dim = part.heads, part.kv_heads, part.head_dim
        q = qkv.new_empty(qkv.shape[0], heads, 1, dim)
        keys, values = place.keys[layer], place.values[layer]
        norms = (part.q_norm, part.k_norm) if part.qk_norm else None
        weights = (qkv, qkv) if norms is None else (norms[0].weight, norms[1].weight)
        self._put_heads(
            (qkv.shape[0], heads + 2 * kv_heads), qkv, *weights, step.cos, step.sin, step.positions, q, keys, values,
            0.0 if norms is None else norms[0].eps, place.size, keys.stride(0), keys.stride(1), keys.stride(2),
            heads, kv_heads, dim, power_of_two(dim), norms is not None, self.early,
        )  # fmt: skip
        return q

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `(rows, 2 * size)`, contiguous."""
        size = gate_up.shape[1] // 2
        out = gate_up.new_empty(gate_up.shape[0], size)
        grid = (gate_up.shape[0], -(-size // _BLOCK))
        self._silu_mul(grid, gate_up, out, size, _BLOCK, self.early)
        return out


@attrs.frozen(eq=False)
class Turn:
    """Where each row of a step is.

    Attributes:
        positions: Int64 `(rows,)`.
        cos: `(capacity, head_dim)`, for every position.
        sin: Likewise, `signed`.
    """

    positions: Tensor
    cos: Tensor
    sin: Tensor


def glue_for(
    device: torch.device, dtype: torch.dtype, config: DecoderConfig, *, products: bool, early: bool
) -> Glue | str:
    """The kernels, or why they cannot be used there. Tried once for each argument, which waits for the device.

    Args:
        device: Where.
        dtype: Of weights and numbers.
        config: For its sizes.
        products: Matrix products too.
        early: Begin before the kernel before has ended, where device and Triton can: no kernel that directly precedes
            one of these may then write a weight that it reads.
    """
    sizes = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    return _tried(
        device,
        dtype,
        config.hidden_size,
        config.intermediate_size,
        *sizes,
        config.qk_norm,
        config.rms_norm_eps,
        products,
        early,
    )


@functools.cache
def _tried(
    device: torch.device, dtype: torch.dtype, wide: int, inner: int, heads: int, kv_heads: int, dim: int, qk_norm: bool,
    eps: float, products: bool, early: bool,
) -> Glue | str:  # fmt: skip
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its kernels do not compute {dtype}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        kernels = importlib.import_module("fuseboard.engine.decoder.kernels.glue_triton")
        # What runs on the CPU is Triton's interpreter, which is there for tests.
        if device.type != "cuda" and "Interpreted" not in type(kernels.add_norm).__name__:
            return f"Triton's kernels do not run on {device.type}"
        widest = max(wide, inner, heads * dim)
        if products and power_of_two(widest) > _TILE:
            return f"its products have at most {_TILE} columns, and there are {widest}; ask for glue without products"
        glue = Glue.of(kernels, products, early and kernels.LAUNCHES_EARLY and _can_launch_early(device))
        with on(device), torch.inference_mode(mode=False), torch.no_grad():
            # Twice: the second time compiled kernels are launched by themselves.
            for _ in range(2 if device.type == "cuda" else 1):
                wrong = _Trial(glue, device, dtype, wide, inner, heads, kv_heads, dim, qk_norm, eps).wrong()
                if wrong:
                    break
    except Exception as error:
        if classify(error) is not Meaning.BROKEN:
            raise
        return f"its kernels failed: {first_line(error)}"
    return f"its {wrong} differs from the formula's on this device" if wrong else glue


def _can_launch_early(device: torch.device) -> bool:
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


@attrs.define
class _Trial:
    """The kernels beside the formula, on random numbers of a decoder's sizes."""

    glue: Glue
    device: torch.device
    dtype: torch.dtype
    wide: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    qk_norm: bool
    eps: float
    generator: torch.Generator = attrs.field(factory=lambda: torch.Generator().manual_seed(0))

    def wrong(self) -> str | None:
        """What of it gives other numbers than the formula, beyond the last bits."""
        hidden, norm = self.draw(_TRIED, self.wide), self.norm_of(self.wide)
        if not self.norms(hidden, norm):
            return "norm"
        gate_up = self.draw(_TRIED, 2 * self.inner)
        gate, up = gate_up.chunk(2, dim=-1)
        if not self.near(self.glue.silu_mul(gate_up), F.silu(gate) * up):
            return "gate"
        if not self.rotation():
            return "rotation"
        return None if not self.glue.products or self.product(hidden, norm) else "product"

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device="cpu").to(self.dtype).to(self.device)

    def norm_of(self, size: int) -> RMSNorm:
        norm = RMSNorm(size, self.eps)
        norm.weight = nn.Parameter(self.draw(size), requires_grad=False)
        return norm

    def linear_of(self, wide: int, tall: int, *, bias: bool = False) -> nn.Linear:
        linear = nn.Linear(wide, tall, bias=bias, device="meta")
        linear.weight = nn.Parameter(self.draw(tall, wide) / wide**0.5, requires_grad=False)
        if bias:
            linear.bias = nn.Parameter(self.draw(tall), requires_grad=False)
        return linear

    def normed(self, norm: RMSNorm, x: Tensor) -> Tensor:
        return norm.weight * upcast_norm(x, self.eps)

    def near(self, mine: Tensor, theirs: Tensor) -> bool:
        # A last bit of a norm may be another, and what is subtracted afterwards makes it the larger beside the rest.
        bits = 1e-5 if self.dtype == torch.float32 else 4 * torch.finfo(self.dtype).eps
        return bool((mine.float() - theirs.float()).abs().max() <= bits * theirs.float().abs().max())

    def norms(self, hidden: Tensor, norm: RMSNorm) -> bool:
        delta = self.draw(*hidden.shape)
        total, out = self.glue.add_norm(hidden, delta, norm)
        alone = self.glue.add_norm(hidden, None, norm)[1]
        right = self.near(total, hidden + delta) and self.near(out, self.normed(norm, total))
        return right and self.near(alone, self.normed(norm, hidden))

    def product(self, hidden: Tensor, norm: RMSNorm) -> bool:
        into, back = self.linear_of(self.wide, self.inner, bias=True), self.linear_of(self.inner, self.wide)
        gates = self.linear_of(self.wide, 2 * self.inner)
        narrow = into(self.normed(norm, hidden))
        gate, up = gates(hidden).chunk(2, dim=-1)
        right = self.near(self.glue.product(hidden, into, norm=norm), narrow)
        right = right and self.near(self.glue.product(narrow, back, add=hidden), hidden + back(narrow))
        return right and self.near(self.glue.product(hidden, gates, gated=True), F.silu(gate) * up)

    def rotation(self) -> bool:
        heads, both, dim, rows, slots = self.heads, self.heads + self.kv_heads, self.dim, _TRIED, 4
        part: Any = SimpleNamespace(
            heads=heads, kv_heads=self.kv_heads, head_dim=dim, qk_norm=self.qk_norm, q_norm=self.norm_of(dim),
            k_norm=self.norm_of(dim),
        )  # fmt: skip
        qkv, cos, sin = self.draw(rows, (both + self.kv_heads) * dim), self.draw(8, dim), self.draw(8, dim)
        positions = torch.arange(rows, device=self.device) + 2
        held = torch.zeros(2, 1, rows, self.kv_heads, slots, dim, dtype=self.dtype, device=self.device)
        place: Any = SimpleNamespace(size=slots, keys=held[0], values=held[1])
        q = self.glue.put_heads(qkv, part, place, 0, Turn(positions, cos, sin))
        split = qkv.view(rows, 1, -1, dim)
        want_q, want_k, want_v = split[:, :, :heads], split[:, :, heads:both], split[:, :, both:]
        if self.qk_norm:
            want_q, want_k = self.normed(part.q_norm, want_q), self.normed(part.k_norm, want_k)
        turned = [rotate(x, cos[positions][:, None, None], sin[positions][:, None, None]) for x in (want_q, want_k)]
        chosen = (torch.arange(rows, device=self.device), slice(None), positions % slots)
        right = self.near(q, turned[0].transpose(1, 2)) and self.near(place.keys[0][chosen], turned[1][:, 0])
        return right and torch.equal(place.values[0][chosen], want_v[:, 0])
