"""The bias classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class AttentionBias:
    pass


class LowerTriangularMask(AttentionBias):
    pass


class LowerTriangularFromBottomRightMask(AttentionBias):
    pass


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    _window_size: int

    def __post_init__(self) -> None:
        if self._window_size <= 0:
            raise ValueError(f"Expected `window_size > 0`, but window_size={self._window_size}")


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        if self.window_left < 0 or self.window_right < 0:
            raise ValueError("Invalid window value")


@dataclass
class _SeqLenInfo:
    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]


@dataclass
class _PaddedSeqLenInfo(_SeqLenInfo):
    seqlen: Tensor
    seqlen_py: list[int]
    padding: int


@dataclass
class _GappySeqInfo(_SeqLenInfo):
    seqlen: Tensor
    seqlen_py: Sequence[int]


def _of(lengths: Sequence[int], device: torch.device) -> _SeqLenInfo:
    starts = [0]
    for each in lengths:
        starts.append(starts[-1] + each)
    return _SeqLenInfo(torch.tensor(starts, dtype=torch.int32, device=device), max(lengths), min(lengths), starts)


@dataclass
class BlockDiagonalPaddedKeysMask(AttentionBias):
    q_seqinfo: _SeqLenInfo
    k_seqinfo: _PaddedSeqLenInfo

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: object = None,
        *,
        device: torch.device | None = None,
    ) -> BlockDiagonalPaddedKeysMask:
        starts = list(range(0, len(kv_seqlen) * kv_padding + 1, kv_padding))
        keys = _PaddedSeqLenInfo(
            torch.tensor(starts, dtype=torch.int32), max(kv_seqlen), min(kv_seqlen), starts,
            torch.tensor(kv_seqlen, dtype=torch.int32), list(kv_seqlen), kv_padding,
        )  # fmt: skip
        return cls(_of(q_seqlen, device), keys)


@dataclass
class BlockDiagonalGappyKeysMask(AttentionBias):
    q_seqinfo: _SeqLenInfo
    k_seqinfo: _GappySeqInfo

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        *,
        device: torch.device | None = None,
    ) -> BlockDiagonalGappyKeysMask:
        starts = list(kv_seqstarts)
        keys = _GappySeqInfo(
            torch.tensor(starts, dtype=torch.int32), max(kv_seqlen), min(kv_seqlen), starts,
            torch.tensor(kv_seqlen, dtype=torch.int32), kv_seqlen,
        )  # fmt: skip
        return cls(_of(q_seqlen, device), keys)
