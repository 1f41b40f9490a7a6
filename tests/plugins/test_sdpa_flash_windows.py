"""How `sdpa-flash` tells the operator of windows and bounds ahead, on the CPU by a stand-in for the operator."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import fuseboard as fb
from fuseboard.call import describe
from fuseboard.constraints import admit
from fuseboard.masks import in_form
from fuseboard.selftest import attention_fp64
from fuseboard_sdpa import flash


def forward(
    q: Tensor, k: Tensor, v: Tensor, _starts_q: None, _starts_k: None, _n_q: int, _n_k: int, _p: float, causal: bool,
    _debug: bool, *, scale: float, window_size_left: int, window_size_right: int,
) -> tuple[Tensor]:  # fmt: skip
    """`_flash_attention_forward`: -1, or a bound as long as the keys, is open; an open side of two is that long."""
    n_q, n_k = q.shape[1], k.shape[1]
    left, right = (-1 if side >= n_k else side for side in (window_size_left, 0 if causal else window_size_right))
    last, key = torch.arange(n_q)[:, None] + n_k - n_q, torch.arange(n_k)
    seen = torch.ones(n_q, n_k, dtype=torch.bool)
    if (left, right) != (-1, -1):
        seen = (key >= last - (n_k if left < 0 else left)) & (key <= last + (n_k if right < 0 else right))
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return (attention_fp64(q, k, v, mask=seen[None, None], scale=scale).to(q.dtype).transpose(1, 2),)


@pytest.mark.parametrize("lengths", [(37, 37), (20, 37), (37, 10)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("ahead", [None, 0, 4, 30])
def test_every_window_is_right_or_refused(
    lengths: tuple[int, int], causal: bool, window: int | None, ahead: int | None
) -> None:
    (n_q, n_k), info = lengths, fb.MaskInfo(causal=causal, window=window, ahead=ahead)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, each, 16, generator=generator).half() for each in (n_q, n_k, n_k))
    call = attrs.evolve(describe(q, k, v, mask_info=info)[0], device_type="cuda", capability=(9, 0))
    structure = call.structure
    assert structure is not None
    form, refusals = admit(flash.LIMITS, "sdpa-flash", call)
    bounded = structure.window or structure.ahead
    if bounded and not structure.causal and n_q > n_k:
        assert [each.rule for each in refusals] == ["mask"]
        return
    assert not refusals
    if not bounded:  # the operator without a window
        return
    kernel: Any = flash.Flash()
    kernel._forward = forward
    _, given = in_form(form, structure, None, info, q, k)
    out = kernel(q, k, v, mask=None, mask_info=given, causal=False, scale=None, dropout_p=0.0)

    assert torch.allclose(out.double(), attention_fp64(q, k, v, mask_info=info), atol=2e-3)
