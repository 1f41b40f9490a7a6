"""What lies between the matrix products of a one-token step, as three Triton kernels a layer in place of thirteen.

Off until `decoder.fuse(glue=True)`, since a norm's squares are added in another order. Used in steps over a fixed cache
alone, and only where a trial on the device gives the formula's numbers; elsewhere the report says why not.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

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


@attrs.frozen
class Glue:
    """The kernels. From `glue_for`."""

    _kernels: Any

    def add_norm(self, hidden: Tensor, delta: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """`hidden + delta`, and that normalised; both `(rows, size)` and contiguous."""
        out = torch.empty_like(hidden)
        total = hidden if delta is None else torch.empty_like(hidden)
        self._kernels.add_norm[(hidden.shape[0],)](
            hidden, hidden if delta is None else delta, norm.weight, total, out, norm.size, norm.eps,
            ADD=delta is not None, BLOCK=_power_of_two(norm.size), num_warps=4,
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
        self._kernels.put_heads[(qkv.shape[0], heads + 2 * kv_heads)](
            qkv, *weights, step.cos, step.sin, step.positions, q, keys, values, 0.0 if norms is None else norms[0].eps,
            place.size, keys.stride(0), keys.stride(1), keys.stride(2),
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK=_power_of_two(dim), NORM=norms is not None, num_warps=1,
        )  # fmt: skip
        return q

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `(rows, 2 * size)`, contiguous."""
        size = gate_up.shape[1] // 2
        out = gate_up.new_empty(gate_up.shape[0], size)
        grid = (gate_up.shape[0], -(-size // _BLOCK))
        self._kernels.silu_mul[grid](gate_up, out, size, BLOCK=_BLOCK, num_warps=4)
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


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def glue_for(device: torch.device, dtype: torch.dtype, config: DecoderConfig) -> Glue | str:
    """The kernels, or why they cannot be used there. Tried once for each argument, which waits for the device."""
    sizes = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    return _tried(
        device, dtype, config.hidden_size, config.intermediate_size, *sizes, config.qk_norm, config.rms_norm_eps
    )


@functools.cache
def _tried(
    device: torch.device, dtype: torch.dtype, wide: int, inner: int, heads: int, kv_heads: int, dim: int, qk_norm: bool,
    eps: float,
) -> Glue | str:  # fmt: skip
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its kernels do not compute {dtype}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        kernels = importlib.import_module("fuseboard.engine.decoder.glue_kernels")
        # What runs on the CPU is Triton's interpreter, which is there for tests.
        if device.type != "cuda" and "Interpreted" not in type(kernels.add_norm).__name__:
            return f"Triton's kernels do not run on {device.type}"
        glue = Glue(kernels)
        # Triton launches on the current device.
        where = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with where, torch.inference_mode(mode=False), torch.no_grad():
            wrong = _differs(glue, device, dtype, wide, inner, heads, kv_heads, dim, qk_norm, eps)
    except Exception as error:
        if classify(error) is not Meaning.BROKEN:
            raise
        return f"its kernels failed: {first_line(error)}"
    return f"its {wrong} differs from the formula's on this device" if wrong else glue


def _differs(
    glue: Glue, device: torch.device, dtype: torch.dtype, wide: int, inner: int, heads: int, kv_heads: int, dim: int,
    qk_norm: bool, eps: float,
) -> str | None:  # fmt: skip
    """What of it gives other numbers than the formula, beyond the last bits."""
    from fuseboard.engine.decoder.fixed import Part  # noqa: PLC0415 - they know each other

    generator = torch.Generator().manual_seed(wide)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    def norm_of(size: int) -> RMSNorm:
        norm = RMSNorm(size, eps)
        norm.weight = torch.nn.Parameter(draw(size), requires_grad=False)
        return norm

    def near(mine: Tensor, theirs: Tensor) -> bool:
        # A last bit of a norm may be another, and what is subtracted afterwards makes it the larger beside the rest.
        allowed = (1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps) * theirs.float().abs().max()
        return bool((mine.float() - theirs.float()).abs().max() <= allowed)

    def normed(norm: RMSNorm, x: Tensor) -> Tensor:
        return norm.weight * upcast_norm(x, eps)

    rows, slots = 3, 4
    hidden, delta, norm = draw(rows, wide), draw(rows, wide), norm_of(wide)
    total, out = glue.add_norm(hidden, delta, norm)
    if not (near(total, hidden + delta) and near(out, normed(norm, total))):
        return "norm"
    if not near(glue.add_norm(hidden, None, norm)[1], normed(norm, hidden)):
        return "norm"
    gate_up = draw(rows, 2 * inner)
    gate, up = gate_up.chunk(2, dim=-1)
    if not near(glue.silu_mul(gate_up), F.silu(gate) * up):
        return "gate"
    part: Any = type("Sizes", (), {})()
    part.heads, part.kv_heads, part.head_dim, part.qk_norm = heads, kv_heads, dim, qk_norm
    part.q_norm, part.k_norm = norm_of(dim), norm_of(dim)
    qkv, cos, sin = draw(rows, (heads + 2 * kv_heads) * dim), draw(8, dim), draw(8, dim)
    positions = torch.arange(rows, device=device) + 2
    place = Part.made(None, slots, 1, rows, (kv_heads, dim), dtype, device)
    part_of: SelfAttention = part
    q = glue.put_heads(qkv, part_of, place, 0, Turn(positions, cos, sin))
    split = qkv.view(rows, 1, -1, dim)
    turn: Callable[[Tensor], Tensor] = lambda x: rotate(x, cos[positions][:, None, None], sin[positions][:, None, None])  # noqa: E731
    want_q, want_k, want_v = split[:, :, :heads], split[:, :, heads : heads + kv_heads], split[:, :, heads + kv_heads :]
    if qk_norm:
        want_q, want_k = normed(part.q_norm, want_q), normed(part.k_norm, want_k)
    chosen = (torch.arange(rows, device=device), slice(None), positions % slots)
    right = near(q, turn(want_q).transpose(1, 2)) and near(place.keys[0][chosen], turn(want_k)[:, 0])
    if not right or not torch.equal(place.values[0][chosen], want_v[:, 0]):
        return "rotation"
    return None
