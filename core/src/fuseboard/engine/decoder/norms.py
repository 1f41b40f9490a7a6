"""RMSNorm with transformers' bits, and the test on the device that lets torch's own kernel stand in for it.

transformers casts to fp32, normalises, casts down, and only then multiplies by the weight in the low dtype: two
roundings. `F.rms_norm` with its weight rounds once, so it is used without one. Whether it then gives the same bits
depends on device, dtype, width and torch, so it is tried once for each.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

if TYPE_CHECKING:
    from fuseboard.engine.decoder.kernels.exact import ExactGlue

__all__ = ["RMSNorm", "fused_norm_exact", "upcast_norm"]

_ROWS = (1, 2, 3, 4, 7, 8, 16, 17, 32, 64, 96, 128, 257, 512, 1024, 4096, 16384)
_ELEMENTS = {"cpu": 2**19}
_MOST = 2**24


def upcast_norm(x: Tensor, eps: float) -> Tensor:
    """transformers' formula without its weight: fp32 inside, x's dtype outside."""
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return (wide * torch.rsqrt(variance + eps)).to(x.dtype)


@functools.cache
def fused_norm_exact(device: torch.device, dtype: torch.dtype, size: int, eps: float) -> bool:
    """Whether `F.rms_norm` without weight gives the formula's bits there. Waits for the device, once per argument.

    Many counts of rows, since a kernel's order of summation may depend on them, and magnitudes from tiny to huge.
    """
    generator = torch.Generator("cpu").manual_seed(size)  # its own: nobody else's numbers change
    most = max(_ELEMENTS.get(device.type, _MOST) // size, 1)
    try:
        with torch.inference_mode(mode=False), torch.no_grad():
            rows = [count for count in _ROWS if count <= most]
            # On the CPU, whatever the caller's default device is.
            wide = torch.randn(rows[-1], size, generator=generator, device="cpu")
            magnitudes = torch.logspace(-4, 3, rows[-1], device="cpu")
            wide *= magnitudes[torch.randperm(rows[-1], generator=generator, device="cpu"), None]
            data = wide.to(dtype).to(device)
            return all(
                torch.equal(upcast_norm(x, eps), F.rms_norm(x, (size,), None, eps))
                for x in (data[:count] for count in rows)
            )
    except (RuntimeError, NotImplementedError, TypeError):  # a device or dtype without the operator
        return False


class RMSNorm(nn.Module):
    """`weight * normalised`, the product in the weight's dtype.

    Attributes:
        fused: Whether `F.rms_norm` is used; set where `fused_norm_exact` says so.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta"), requires_grad=False)
        self.size = size
        self.eps = eps
        self.fused = False

    def normalised(self, x: Tensor, exact: ExactGlue | None = None) -> Tensor:
        """Without the weight. Where a gradient is wanted it is the formula's own.

        Args:
            x: Its last axis is normalised.
            exact: Kernels with the formula's bits, where they serve.
        """
        if self.fused and not (torch.is_grad_enabled() and x.requires_grad):
            return F.rms_norm(x, (self.size,), None, self.eps)
        if exact is not None and self._suits(exact, x):
            return exact.norm(x, None, self.eps)[1]
        return upcast_norm(x, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return self.weight * self.normalised(x)

    def added(self, x: Tensor, delta: Tensor | None, exact: ExactGlue | None = None) -> tuple[Tensor, Tensor]:
        """`x + delta`, or x, and that normalised; arguments as for `normalised`."""
        suits = exact is not None and self._suits(exact, x) and (delta is None or _alike(x, delta))
        if exact is not None and suits:
            return exact.norm(x, self.weight, self.eps, delta=delta)
        total = x if delta is None else x + delta
        return total, self.forward(total)

    def _suits(self, exact: ExactGlue, x: Tensor) -> bool:
        weight = self.weight
        return (
            exact.cheap and not self.fused and x.is_contiguous() and weight.dtype == x.dtype and weight.is_contiguous()
        )


def _alike(x: Tensor, delta: Tensor) -> bool:
    return delta.is_contiguous() and delta.dtype == x.dtype and delta.shape == x.shape
