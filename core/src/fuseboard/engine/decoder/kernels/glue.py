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
from torch import Tensor, nn

from fuseboard.engine.decoder.kernels.launch import Launcher, power_of_two
from fuseboard.engine.decoder.kernels.trial import Case, Draws, differing, launches_early, tried
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
    _embed: Launcher
    _lengths: Launcher
    early: bool = False

    @classmethod
    def of(cls, kernels: Any, early: bool) -> Glue:
        """Of the module that has them."""
        how = {"launch_pdl": True} if early else {}
        return cls(
            Launcher(kernels.add_norm, num_warps=4, **how), Launcher(kernels.put_heads, num_warps=1, **how),
            Launcher(kernels.silu_mul, num_warps=4, **how),
            # Not early: what they follow writes what they read, and what comes after them may begin before they end.
            Launcher(kernels.embed, num_warps=4), Launcher(kernels.lengths, num_warps=4), early,
        )  # fmt: skip

    def embed(self, ids: Tensor, embedding: nn.Embedding) -> Tensor:
        """`embedding(ids)`, `(batch, size)`; NaN for an id that is not of the vocabulary.

        Args:
            ids: Int64 or int32 `(batch, 1)`.
            embedding: Its weight contiguous.
        """
        vocabulary, size = embedding.weight.shape
        out = embedding.weight.new_empty(ids.shape[0], size)
        self._embed(
            (ids.shape[0], -(-size // _BLOCK)), ids.contiguous(), embedding.weight, out, size, vocabulary, _BLOCK
        )
        return out

    def lengths(self, positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """For a row whose next token has this position: int32 `(batch,)`, how many keys it then has, and which.

        Args:
            positions: Int64 `(batch,)`.
            size: How many slots there are; the second is `(batch, size)`, bool.
        """
        batch = positions.shape[0]
        counts = torch.empty(batch, dtype=torch.int32, device=positions.device)
        keys = torch.empty(batch, size, dtype=torch.uint8, device=positions.device)
        self._lengths((batch, -(-size // _BLOCK)), positions, counts, keys, size, _BLOCK)
        return counts, keys.view(torch.bool)

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
        glue, draws = Glue.of(kernels, early and launches_early(kernels, device)), Draws(device, dtype, eps)
        cases = [*_placing(glue, draws, sizes[0]), *_norms(glue, draws, *sizes[:2])]
        cases.append(_rotation(glue, draws, sizes[2:], qk_norm))
        wrong = differing(cases, draws, interpreted=interpreted)
        return f"its {wrong} differs from the formula's on this device" if wrong else glue

    return tried("glue_triton", device, trial)


def _placing(glue: Glue, draws: Draws, wide: int) -> list[Case]:
    embedding = nn.Embedding(8, wide, device="meta")
    embedding.weight = nn.Parameter(draws.numbers(8, wide), requires_grad=False)
    ids = torch.tensor([[7], [0], [3]], device=draws.device)
    positions, slots = torch.tensor([0, 3, 9], device=draws.device), torch.arange(5, device=draws.device)
    counts = (positions + 1).clamp(max=len(slots)).int()
    return [
        Case("embedding", lambda: (glue.embed(ids, embedding),), lambda: (embedding(ids)[:, 0],)),
        Case("length", lambda: glue.lengths(positions, len(slots)), lambda: (counts, slots < counts[:, None])),
    ]


def _norms(glue: Glue, draws: Draws, wide: int, inner: int) -> list[Case]:
    norm, hidden, delta = draws.norm(wide), draws.numbers(_TRIED, wide), draws.numbers(_TRIED, wide)
    gate_up = draws.numbers(_TRIED, 2 * inner)
    gate, up = gate_up.chunk(2, dim=-1)

    def formula(total: Tensor) -> tuple[Tensor, Tensor]:
        return total, norm(total)

    return [
        Case("norm", lambda: glue.add_norm(hidden, None, norm), lambda: formula(hidden)),
        Case("norm of a sum", lambda: glue.add_norm(hidden, delta, norm), lambda: formula(hidden + delta)),
        Case("gate", lambda: (glue.silu_mul(gate_up),), lambda: (F.silu(gate) * up,)),
    ]


def _rotation(glue: Glue, draws: Draws, sizes: tuple[int, int, int], qk_norm: bool) -> Case:
    heads, kv_heads, dim = sizes
    both, rows, slots, device = heads + kv_heads, _TRIED, 4, draws.device
    part: Any = SimpleNamespace(
        heads=heads, kv_heads=kv_heads, head_dim=dim, qk_norm=qk_norm, q_norm=draws.norm(dim), k_norm=draws.norm(dim)
    )
    qkv, cos, sin = draws.numbers(rows, (both + kv_heads) * dim), draws.numbers(8, dim), draws.numbers(8, dim)
    positions = torch.arange(rows, device=device) + 2
    held = torch.zeros(2, 1, rows, kv_heads, slots, dim, dtype=draws.dtype, device=device)
    place: Any = SimpleNamespace(size=slots, keys=held[0], values=held[1])
    chosen = (torch.arange(rows, device=device), slice(None), positions % slots)

    def mine() -> tuple[Tensor, ...]:
        q = glue.put_heads(qkv, part, place, 0, Turn(positions, cos, sin))
        return q, place.keys[0][chosen], place.values[0][chosen]

    def formula() -> tuple[Tensor, ...]:
        q, k, v = torch.split(qkv.view(rows, 1, -1, dim), [heads, kv_heads, kv_heads], dim=2)
        if qk_norm:
            q, k = part.q_norm(q), part.k_norm(k)
        q, k = (rotate(x, cos[positions][:, None, None], sin[positions][:, None, None]) for x in (q, k))
        return q.transpose(1, 2), k[:, 0], v[:, 0]

    return Case("rotation", mine, formula)
