"""Limits that the CUDA kernels share, and torch's own word on whether a call is eligible."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["eligible"]


def eligible(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout_p: float, causal: bool, gqa: bool
) -> str | None:
    """Torch's own eligibility check of one kernel, asked without running it: a reason, or None.

    Args:
        kernel: `flash`, `mem_efficient` or `cudnn`.
        q: As the kernel would be given it, like the arguments that follow.
        k: Likewise.
        v: Likewise.
        bias: Likewise.
        dropout_p: Likewise.
        causal: The top-left flag as the check understands it.
        gqa: Whether key heads are shared.
    """
    # The check obeys torch's process-wide switches; whoever has turned a kernel off is told so.
    if not getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")():
        return f"switched off in this process (torch.backends.cuda.enable_{kernel}_sdp)"
    if not q.is_cuda:  # cuDNN's check asks for the device's properties before it looks at the tensors
        return "needs CUDA tensors"
    check = getattr(torch.backends.cuda, f"can_use_{kernel.removeprefix('mem_')}_attention")
    params = torch.backends.cuda.SDPAParams(q, k, v, bias, dropout_p, causal, gqa)
    with torch.cuda.device(q.device):  # the check asks about the current device
        able: bool = check(params, False)
    return None if able else f"torch's own check of {kernel} attention says no"
