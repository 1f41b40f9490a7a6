"""The call of `sageattention.sageattn`, whose two generations differ in their keys and their scale."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fuseboard import MaskInfo
from fuseboard.tensors import packed, scale_of
from fuseboard_sage._tensors import in_range, lengthened, scale_declined

__all__ = ["Sage"]


class Sage:
    """`sageattention.sageattn` by its own words.

    Args:
        package: `sageattention`.
        device: Its kernels launch on the current device, which is made this one and put back: some set it and leave
            it so.
    """

    def __init__(self, package: ModuleType, device: torch.device) -> None:
        self._attend: Callable[..., Tensor] = package.sageattn
        self._device = device if device.type == "cuda" else -1  # -1 changes nothing

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None,
        mask_info: MaskInfo | None,
        causal: bool,
        scale: float | None,
        dropout_p: float,
    ) -> Tensor:
        """Bring values into range, lengthen where the kernel would read past its end, and call it."""
        length = q.shape[2]
        causal = causal or mask_info is not None
        # A causal block spans 128 queries and two blocks of 64 keys; where the second has no key at all, its scale is
        # read beyond the last one. Zeros behind all queries are seen by none of them.
        missing = -length % 128 if causal and -length % 128 >= 64 else 0  # noqa: PLR2004
        with torch.cuda.device(self._device):
            values, back = in_range(v, q.shape[1])
            out = self._attend(
                lengthened(packed(q), missing),
                lengthened(self._keys(k), missing),
                lengthened(values, missing),
                tensor_layout="HND",
                is_causal=causal,
                **self._options(scale_of(q, scale)),
            )
            return (out[:, :, :length] if missing else out) * back

    def declines(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None,
        mask_info: MaskInfo | None,
        causal: bool,
        scale: float | None,
        dropout_p: float,
    ) -> str | None:
        """Refuse scales at which its scores are too coarse."""
        return scale_declined(q, scale)

    def _keys(self, k: Tensor) -> Tensor:
        """The keys as they are handed on."""
        return packed(k)

    def _options(self, scale: float) -> dict[str, Any]:
        """The scale, and what goes with it."""
        return {"sm_scale": scale}
