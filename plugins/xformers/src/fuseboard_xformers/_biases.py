"""A structure in the package's words: its bias classes.

Its biases for padded keys are made from lists of lengths on the host, and a list would have to be read off the device.
None is: the bias is made once from a list that means nothing, and each call is given one whose tensors are computed on
the device from the keys. Nothing waits, and a capture may see it. The host's part holds what is known there: exact
starts for padding on the right, and the longest that a row can be as every row's length.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fuseboard import MaskInfo

__all__ = ["Biases"]


class Biases:
    """Makes biases.

    Args:
        classes: The package's module `attn_bias`.
    """

    def __init__(self, classes: ModuleType) -> None:
        self._classes = classes

    def top_left(self) -> Any:
        """Query i sees keys up to i."""
        return self._classes.LowerTriangularMask()

    def of(self, info: MaskInfo, n_k: int) -> Any:
        """Bottom-right causality, a window, a bound ahead, or two of them, for inputs with a batch."""
        if info.window is None and info.ahead is None:
            return self._classes.LowerTriangularFromBottomRightMask()
        if info.causal:
            return self._classes.LowerTriangularFromBottomRightLocalAttentionMask(info.window)
        left, right = n_k if info.window is None else info.window - 1, n_k if info.ahead is None else info.ahead
        return self._classes.LocalAttentionFromBottomRightMask(window_left=left, window_right=right)

    def padded(self, info: MaskInfo, batch: int, n_q: int, n_k: int) -> Any:
        """Padded keys, no causality, for all tokens in one row; made once for each mask."""
        return info.derived(("xformers", n_q, n_k), lambda: self._padded(info, batch, n_q, n_k))

    def _padded(self, info: MaskInfo, batch: int, n_q: int, n_k: int) -> Any:
        lengths = info.lengths()
        first_query, first_key = _starts(lengths, n_q, n_k)
        if info.padding == "left":
            first_key = torch.cat((first_key[:-1] + (n_k - lengths), first_key[-1:]))
        template = self._from_the_left if info.padding == "left" else self._from_the_right
        q_host, k_host = (list(range(0, (batch + 1) * n, n)) for n in (n_q, n_k))
        keys: dict[str, Any] = {"seqlen": lengths, "seqlen_py": [n_k] * batch}
        if info.padding != "left":
            keys["padding"] = n_k
        return dataclasses.replace(
            template,
            q_seqinfo=dataclasses.replace(
                template.q_seqinfo, seqstart=first_query, seqstart_py=q_host, max_seqlen=n_q, min_seqlen=n_q
            ),
            k_seqinfo=dataclasses.replace(
                template.k_seqinfo, seqstart=first_key, seqstart_py=k_host, max_seqlen=n_k, min_seqlen=0, **keys
            ),
        )

    @functools.cached_property
    def _from_the_right(self) -> Any:
        return self._classes.BlockDiagonalPaddedKeysMask.from_seqlens(
            q_seqlen=[1], kv_padding=1, kv_seqlen=[1], device=torch.device("cpu")
        )

    @functools.cached_property
    def _from_the_left(self) -> Any:
        return self._classes.BlockDiagonalGappyKeysMask.from_seqlens(
            q_seqlen=[1], kv_seqstarts=[0, 1], kv_seqlen=[1], device=torch.device("cpu")
        )


def _starts(lengths: Tensor, n_q: int, n_k: int) -> tuple[Tensor, Tensor]:
    row = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    return row * n_q, row * n_k
