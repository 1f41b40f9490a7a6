"""What lies between the matrix products of a one-token step, as three Triton kernels a layer in place of thirteen.

Off until `decoder.fuse(glue=True)`, since a norm's squares are added in another order. Used in steps over a fixed cache
alone, and only where a trial on the device gives the formula's numbers; elsewhere the report says why not.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fuseboard.engine.decoder.kernels.launch import Launcher, power_of_two
from fuseboard.engine.decoder.kernels.trial import Draws, launches_early, tried
from fuseboard.engine.decoder.rope import rotate

if TYPE_CHECKING:
    from fuseboard.engine.decoder.config import DecoderConfig
    from fuseboard.engine.decoder.fixed import Part
    from fuseboard.engine.decoder.layers import SelfAttention
    from fuseboard.engine.decoder.norms import RMSNorm

__all__ = ["Glue", "glue_for"]

_BLOCK = 1024
_TRIED = 3


@attrs.frozen
class Glue:
    """The kernels. From `glue_for`.

    Attributes:
        early: Whether each begins before the kernel before it has ended, which hides most of a launch.
    """

    _add_norm: Launcher
    _put_heads: Launcher
    _silu_mul: Launcher
    early: bool = False

    @classmethod
    def of(cls, kernels: Any, early: bool) -> Glue:
        """Of the module that has them."""
        how = {"launch_pdl": True} if early else {}
        return cls(
            Launcher(kernels.add_norm, num_warps=4, **how), Launcher(kernels.put_heads, num_warps=1, **how),
            Launcher(kernels.silu_mul, num_warps=4, **how), early,
        )  # fmt: skip

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


def glue_for(device: torch.device, dtype: torch.dtype, config: DecoderConfig, *, early: bool) -> Glue | str:
    """The kernels, or why they cannot be used there. Tried once for each argument, which waits for the device.

    Args:
        device: Where.
        dtype: Of weights and numbers.
        config: For its sizes.
        early: Begin before the kernel before has ended, where device and Triton can: no kernel that directly precedes
            one of these may then write a weight that it reads.
    """
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    sizes = (config.hidden_size, config.intermediate_size, *heads)
    return _tried(device, dtype, sizes, config.qk_norm, config.rms_norm_eps, early)


@functools.cache
def _tried(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int, int], qk_norm: bool, eps: float,
    early: bool,
) -> Glue | str:  # fmt: skip
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its kernels do not compute {dtype}"

    def trial(kernels: Any, interpreted: bool) -> Glue | str:
        glue = Glue.of(kernels, early and launches_early(kernels, device))
        # Twice: the second time compiled kernels are launched by themselves.
        for _ in range(1 if interpreted else 2):
            wrong = _Trial(glue, *sizes, qk_norm, Draws(device, dtype, eps)).wrong()
            if wrong:
                return f"its {wrong} differs from the formula's on this device"
        return glue

    return tried("glue_triton", device, trial)


@attrs.define
class _Trial:
    """The kernels beside the formula, on random numbers of a decoder's sizes."""

    glue: Glue
    wide: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    qk_norm: bool
    draws: Draws

    def wrong(self) -> str | None:
        """What of it gives other numbers than the formula, beyond the last bits."""
        if not self.norms():
            return "norm"
        gate_up = self.draws.numbers(_TRIED, 2 * self.inner)
        gate, up = gate_up.chunk(2, dim=-1)
        if not self.draws.near(self.glue.silu_mul(gate_up), F.silu(gate) * up):
            return "gate"
        return None if self.rotation() else "rotation"

    def norms(self) -> bool:
        draws, norm = self.draws, self.draws.norm(self.wide)
        hidden, delta = draws.numbers(_TRIED, self.wide), draws.numbers(_TRIED, self.wide)
        total, out = self.glue.add_norm(hidden, delta, norm)
        alone = self.glue.add_norm(hidden, None, norm)[1]
        right = draws.near(total, hidden + delta) and draws.near(out, draws.normed(norm, total))
        return right and draws.near(alone, draws.normed(norm, hidden))

    def rotation(self) -> bool:
        heads, both, dim, rows, slots = self.heads, self.heads + self.kv_heads, self.dim, _TRIED, 4
        draws, device = self.draws, self.draws.device
        part: Any = SimpleNamespace(
            heads=heads, kv_heads=self.kv_heads, head_dim=dim, qk_norm=self.qk_norm, q_norm=draws.norm(dim),
            k_norm=draws.norm(dim),
        )  # fmt: skip
        qkv = draws.numbers(rows, (both + self.kv_heads) * dim)
        cos, sin = draws.numbers(8, dim), draws.numbers(8, dim)
        positions = torch.arange(rows, device=device) + 2
        held = torch.zeros(2, 1, rows, self.kv_heads, slots, dim, dtype=draws.dtype, device=device)
        place: Any = SimpleNamespace(size=slots, keys=held[0], values=held[1])
        q = self.glue.put_heads(qkv, part, place, 0, Turn(positions, cos, sin))
        split = qkv.view(rows, 1, -1, dim)
        want_q, want_k, want_v = split[:, :, :heads], split[:, :, heads:both], split[:, :, both:]
        if self.qk_norm:
            want_q, want_k = draws.normed(part.q_norm, want_q), draws.normed(part.k_norm, want_k)
        turned = [rotate(x, cos[positions][:, None, None], sin[positions][:, None, None]) for x in (want_q, want_k)]
        chosen = (torch.arange(rows, device=device), slice(None), positions % slots)
        right = draws.near(q, turned[0].transpose(1, 2)) and draws.near(place.keys[0][chosen], turned[1][:, 0])
        return right and torch.equal(place.values[0][chosen], want_v[:, 0])
