"""What lies between the matrix products of a one-token step in fewer launches, with torch's own bits.

An elementwise operation has one right answer once it is said where it is rounded, so kernels that do several of them,
rounding where torch's do, give torch's bits. Sums do not: the mean of a norm's squares stays torch's kernel, and so do
matrix products. Used, when asked for, in steps of one token, in float16 and bfloat16, where a trial on the device finds
every bit equal; else torch's kernels are launched one by one, as in a prompt, in training and while one is tracing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._device import DeviceContext

from fuseboard.engine.decoder.kernels.launch import Launcher, power_of_two
from fuseboard.engine.decoder.kernels.trial import tried
from fuseboard.engine.decoder.norms import upcast_norm
from fuseboard.engine.decoder.rope import rotate

if TYPE_CHECKING:
    from fuseboard.engine.decoder.config import DecoderConfig

__all__ = ["ExactGlue", "exact_for"]

_BLOCK = 1024
_HALVES = (torch.float16, torch.bfloat16)
_Sizes = tuple[int, int, int, int, bool]


@attrs.frozen(eq=False)
class ExactGlue:
    """The kernels for one device and dtype. From `exact_for`.

    Attributes:
        device: Where.
        dtype: Of everything but the mean.
        table: What torch makes of `silu` for every bit pattern, where a formula does not give its bits.
    """

    device: torch.device
    dtype: torch.dtype
    table: Tensor | None
    _key: tuple[Any, ...]
    _squares: Launcher
    _scaled: Launcher
    _rooted: Launcher
    _rotated: Launcher
    _gated: Launcher
    _placed: Launcher

    def __reduce__(self) -> Any:
        return _again, self._key

    @property
    def direct(self) -> bool:
        """Whether compiled kernels are launched by themselves, which costs the host about what torch's do."""
        return self._squares.direct is True

    @property
    def cheap(self) -> bool:
        """Whether a launch costs so little that it need not stand for four of torch's; else only `rotate` is used."""
        return self._squares.direct is not False

    def serves(self, x: Tensor) -> bool:
        """Whether the kernels may be used now, in a step that begins with this tensor, `(batch, 1, …)`."""
        return (
            not _tracing()
            and not _grad()
            and type(x) is Tensor
            and x.shape[1] == 1
            and x.dtype is self.dtype
            and _is_watched_by_nobody()
            and (self.device.index is None or self.device.index == torch.cuda.current_device())  # Triton launches there
        )

    def norm(
        self, x: Tensor, weight: Tensor | None, eps: float, *, delta: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What is normalised, `x + delta` or x, and `weight * upcast_norm` of it.

        Args:
            x: Contiguous.
            weight: Contiguous; None for 1.
            eps: Under the root.
            delta: Is added before; contiguous.
        """
        size, count = x.shape[-1], x.numel()
        squares = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        total = x if delta is None else torch.empty_like(x)
        self._squares(
            (-(-count // _BLOCK), 1), x, x if delta is None else delta, total, squares, count, delta is not None, _BLOCK
        )
        out = torch.empty_like(x)
        self._scaled(
            (count // size, -(-size // _BLOCK)), total, squares.mean(-1, keepdim=True),
            x if weight is None else weight, out, size, eps, weight is not None, _BLOCK,
        )  # fmt: skip
        return total, out

    def rotate(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weights: tuple[Tensor, Tensor] | None,
        cos: Tensor,
        sin: Tensor,
        *,
        joined: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys weighted and rotated, `(batch, heads, 1, head_dim)`, each transposed; values beside keys.

        Args:
            q: `(batch, 1, heads, head_dim)`.
            k: Likewise, of the keys' heads.
            v: Likewise.
            weights: `(head_dim,)` each; None for 1.
            cos: `(batch or 1, 1, 1, head_dim)`.
            sin: Likewise, `signed`.
            joined: Whether the queries shall lie as if keys lay behind those of each row: attention kernels are chosen
                by that too.
        """
        batch, _, heads, dim = q.shape
        kv_heads = k.shape[2]
        q, k, v = _rows(q), _rows(k), _rows(v)
        q_out = q.new_empty(batch, 1, heads + kv_heads if joined else heads, dim)[:, :, :heads]
        k_out, v_out = k.new_empty(2, batch, 1, kv_heads, dim).unbind(0)
        if cos.stride(-1) != 1 or cos.stride() != sin.stride():
            cos, sin = cos.contiguous(), sin.contiguous()
        if weights is not None:
            weights = (weights[0].contiguous(), weights[1].contiguous())
        self._rotated(
            (batch, heads + 2 * kv_heads), q, k, v, *((q, k) if weights is None else weights), cos, sin, q_out, k_out,
            v_out, q.stride(0), k.stride(0), v.stride(0), cos.stride(0) if cos.shape[0] > 1 else 0, q_out.stride(0),
            heads, kv_heads, dim, power_of_two(dim), weights is not None,
        )  # fmt: skip
        return q_out.transpose(1, 2), k_out.transpose(1, 2), v_out.transpose(1, 2)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """`silu(gate) * up`, `(batch, 1, size)`, contiguous."""
        batch, _, size = gate.shape
        gate, up = (each if each.stride(-1) == 1 else each.contiguous() for each in (gate, up))
        out = gate.new_empty(gate.shape)
        table = self.table
        self._gated(
            (batch, -(-size // _BLOCK)), gate, up, gate if table is None else table, out, size, gate.stride(0),
            up.stride(0), table is not None, _BLOCK,
        )  # fmt: skip
        return out

    def place(self, k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put each row's key and value, `(batch, kv_heads, 1, head_dim)`, in its slot.

        Args:
            k: Its last axis contiguous.
            v: Likewise.
            slots: Int64 `(batch,)`.
            keys: `(batch, kv_heads, slots, head_dim)`, contiguous.
            values: Likewise.
        """
        batch, kv_heads, _, dim = k.shape
        self._placed(
            (batch, 2 * kv_heads), k, v, slots, keys, values, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            keys.stride(0), keys.stride(1), keys.stride(2), kv_heads, dim, power_of_two(dim),
        )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """With the heads of a row side by side."""
    return x if x.stride(-1) == 1 and x.stride(2) == x.shape[3] else x.contiguous()


# Looked up once: they are asked twice a layer.
_tracing, _grad = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_dispatch_modes, _transform = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_jit_tracing, _has_function_modes = torch._C._is_tracing, torch._C._is_torch_function_mode_enabled
_function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack


def _only_places(mode: object) -> bool:
    """Whether all that a mode does is to say where new tensors lie, as `torch.set_default_device` does."""
    return isinstance(mode, DeviceContext)


def _is_watched_by_nobody() -> bool:
    """A mode that is told of every operation, such as a tracer, is told nothing of a Triton kernel."""
    return (
        _dispatch_modes() == 0
        and (not _has_function_modes() or all(map(_only_places, _function_modes())))
        and _transform() is None
        and not _jit_tracing()
    )


def exact_for(device: torch.device, dtype: torch.dtype, config: DecoderConfig) -> ExactGlue | str:
    """The kernels, or why they are not used there. Tried once for each argument, which waits for the device."""
    sizes = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    return _tried(device, dtype, (*sizes, config.qk_norm), config.rms_norm_eps)


def _again(device: torch.device, dtype: torch.dtype, sizes: _Sizes, eps: float) -> ExactGlue | None:
    """What a copy has in its place."""
    found = _tried(device, dtype, sizes, eps)
    return None if isinstance(found, str) else found


@functools.cache
def _tried(device: torch.device, dtype: torch.dtype, sizes: _Sizes, eps: float) -> ExactGlue | str:
    # What runs on the CPU is Triton's interpreter, which is there for tests.
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"not for {device.type}"
    if dtype not in _HALVES:
        return f"not for {dtype}"

    def trial(kernels: Any, interpreted: bool) -> ExactGlue | str:
        every = _patterns(device, dtype)
        # The interpreter has no exponential of CUDA's.
        for table in [F.silu(every)] if interpreted else [None, F.silu(every)]:
            made = _made(kernels, table, (device, dtype, sizes, eps))
            trial = _Trial(made, sizes, eps, every, interpreted)
            # Twice: the second time compiled kernels are launched by themselves.
            wrong = trial.wrong() or (None if interpreted else trial.wrong())
            if wrong != "gate":
                break
        return f"its {wrong} has other bits than torch's on this device" if wrong else made

    return tried("exact_triton", device, trial)


def _made(kernels: Any, table: Tensor | None, key: tuple[Any, ...]) -> ExactGlue:
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return ExactGlue(
        key[0], key[1], table, key, Launcher(kernels.squares, **options), Launcher(kernels.scaled, **options),
        Launcher(kernels.rooted, **options), Launcher(kernels.rotated, **(options | {"num_warps": 1})),
        Launcher(kernels.gated, **options), Launcher(kernels.placed, **(options | {"num_warps": 1})),
    )  # fmt: skip


def _patterns(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Every number of a 16-bit dtype, at the place that its bits count."""
    bits = torch.arange(2**16, dtype=torch.int32, device="cpu")  # whatever device is the caller's default
    return (bits - (bits >= 2**15) * 2**16).to(torch.int16).view(dtype).to(device)


def _same(mine: Tensor, theirs: Tensor) -> bool:
    """Equal in bits; one NaN is as good as another."""
    bits = torch.int16 if mine.element_size() == 2 else torch.int32  # noqa: PLR2004 - bytes
    equal = mine.contiguous().view(bits) == theirs.contiguous().view(bits)
    return mine.shape == theirs.shape and bool((equal | (mine.isnan() & theirs.isnan())).all())


@attrs.define
class _Trial:
    """The kernels beside torch's, for every number that their dtype has."""

    glue: ExactGlue
    sizes: _Sizes
    eps: float
    every: Tensor
    interpreted: bool
    generator: torch.Generator = attrs.field(factory=lambda: torch.Generator().manual_seed(0))

    def wrong(self) -> str | None:
        """What of it has other bits than torch's."""
        if not self.gate():
            return "gate"
        if not self.root():
            return "root"
        wide, _, _, dim, qk_norm = self.sizes
        if not all(self.norms(size) for size in ([wide, dim] if qk_norm else [wide])):
            return "norm"
        if not self.rotations():
            return "rotation"
        return None if self.places() else "placing"

    def shuffled(self) -> Tensor:
        order = torch.randperm(len(self.every), generator=self.generator, device="cpu")
        return self.every[order.to(self.every.device)]

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device="cpu").to(self.every.dtype).to(self.every.device)

    def gate(self) -> bool:
        ones, mixed = torch.ones_like(self.every), self.shuffled()
        both = torch.cat((self.every, mixed))
        wanted = (
            F.silu(self.every) * ones,
            F.silu(self.every) * mixed,
            F.silu(self.every).view(8, -1) * mixed.view(8, -1),
        )
        found = (
            self.glue.silu_mul(self.every[None, None], ones[None, None])[0, 0],
            self.glue.silu_mul(*both.view(1, 1, -1).chunk(2, dim=-1))[0, 0],
            self.glue.silu_mul(self.every.view(8, 1, -1), mixed.view(8, 1, -1))[:, 0],
        )
        return all(map(_same, found, wanted))

    def root(self) -> bool:
        """Every exponent of a mean."""
        count = 2**14 if self.interpreted else 2**20
        bits = torch.randint(0, 2**23, (count,), generator=self.generator, dtype=torch.int32, device="cpu")
        exponents = torch.arange(count, dtype=torch.int32, device="cpu") % 2**8
        mean = (bits + exponents * 2**23).view(torch.float32)
        mean, out = mean.to(self.every.device), torch.empty(count, device=self.every.device)
        self.glue._rooted((-(-count // _BLOCK), 1), mean, out, count, self.eps, _BLOCK)
        return _same(out, torch.rsqrt(mean + self.eps))

    def norms(self, size: int) -> bool:
        weight = self.drawn(size)
        mixed = self.shuffled()
        tried = [self.drawn(rows, 1, size) * scale for rows, scale in ((1, 1.0), (2, 1e-3), (3, 50.0), (8, 1.0))]
        if size <= len(mixed):
            tried += [each[: len(each) // size * size].view(-1, 1, size)[:64] for each in (mixed, self.every)]
        for x in tried:
            delta = self.drawn(*x.shape)
            total, out = self.glue.norm(x, weight, self.eps, delta=delta)
            wanted = x + delta
            right = _same(total, wanted) and _same(out, weight * upcast_norm(wanted, self.eps))
            right = right and _same(self.glue.norm(x, weight, self.eps)[1], weight * upcast_norm(x, self.eps))
            if not right or not _same(self.glue.norm(x, None, self.eps)[1], upcast_norm(x, self.eps)):
                return False
        return True

    def rotations(self) -> bool:
        _, heads, kv_heads, dim, qk_norm = self.sizes
        both = heads + 2 * kv_heads
        for batch, rows, joined in ((1, 1, False), (3, 1, False), (3, 3, False), (1, 1, True), (3, 3, True)):
            mixed = self.shuffled().repeat(-(-batch * both * dim // 2**16))[: batch * both * dim]
            mixed = mixed.view(batch, 1, both, dim)
            q, k, v = mixed[:, :, :heads], mixed[:, :, heads : both - kv_heads], mixed[:, :, both - kv_heads :]
            if not joined:
                q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            cos, sin = self.drawn(rows, 1, 1, dim), self.drawn(rows, 1, 1, dim)
            weights = (self.drawn(dim), self.drawn(dim)) if qk_norm else None
            found = self.glue.rotate(q, k, v, weights, cos, sin, joined=joined)
            weighted = (q, k) if weights is None else (weights[0] * q, weights[1] * k)
            wanted = (*(rotate(x, cos, sin) for x in weighted), v)
            if not all(_same(mine, x.transpose(1, 2)) for mine, x in zip(found, wanted, strict=True)):
                return False
        return True

    def places(self) -> bool:
        _, _, kv_heads, dim, _ = self.sizes
        for size in (4, 16):
            both = self.drawn(2, 3, 1, kv_heads, dim).transpose(2, 3)
            held = self.drawn(2, 3, kv_heads, size, dim)
            slots = torch.tensor([0, 3, 21], device=self.every.device) % size
            wanted = held.clone()
            wanted.scatter_(3, slots[None, :, None, None, None].expand(both.shape), both)
            self.glue.place(both[0], both[1], slots, held[0], held[1])
            if not _same(held, wanted):
                return False
        return True
