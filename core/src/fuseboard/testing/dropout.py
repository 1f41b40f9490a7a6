"""Dropout, judged by its statistics: how many weights are gone, how the rest is scaled, what the gradient saw."""

from __future__ import annotations

import math

import torch

from fuseboard.context import bind_process
from fuseboard.selftest import gradient_tolerance
from fuseboard.testing.cases import Inputs, base_dim
from fuseboard.testing.judge import Answer, Kit
from fuseboard.testing.surroundings import recomputing

__all__ = ["dropout_problem"]

P = 0.75
"""Its 1 / (1 - p) is exact in every dtype, and to keep what should be dropped shows."""
BATCH, HEADS, QUERIES = 2, 4, 256
DEVIATIONS = 6
"""Of the binomial distribution: one honest kernel in 500 million is that far off."""


def dropout_problem(kit: Kit, dtype: torch.dtype, *, recomputed: bool = False) -> str | None:
    """What is wrong with the dropout of a backend that claims it; None for nothing, or where it refuses the call.

    With `recomputed` the call is made under gradient checkpointing, so that its backward is that of the second forward.
    With queries of zero every weight is 1/n, and with values that are the unit matrix the output *is* the weights.
    """
    dim = base_dim(kit.backend.constraints.head_dims)
    generator = torch.Generator().manual_seed(11)
    q = torch.zeros(BATCH, HEADS, QUERIES, dim, device=kit.device, dtype=dtype)
    k = torch.randn(BATCH, HEADS, dim, dim, generator=generator).to(kit.device, dtype)
    v = torch.eye(dim, device=kit.device, dtype=dtype).expand(BATCH, HEADS, dim, dim).clone()
    grad = kit.backend.constraints.backward
    v.requires_grad_(grad)
    with bind_process(kit.policy):
        return _problem(kit, Inputs(q, k, v, dropout_p=P), recomputed=recomputed)


def _problem(kit: Kit, inputs: Inputs, *, recomputed: bool) -> str | None:
    v, dtype = inputs.v, inputs.q.dtype
    dim, grad = v.shape[2], v.requires_grad
    outcome = kit.try_call(inputs, grad=grad, via=_recomputing if recomputed else None)
    if not isinstance(outcome, torch.Tensor):
        return f"{dtype}: {outcome}" if outcome.failed else None
    weights = outcome.detach().double()
    kept, whole = weights > 0.5 / dim, 1 / (dim * (1 - P))
    off = float((weights - kept * whole).abs().max())
    if not off <= kit.backend.tolerance(dtype):
        return f"{dtype}: kept weights must be scaled by 1 / (1 - p) and dropped ones be zero: off by {off:.2g}"
    share, spread = 1 - float(kept.double().mean()), math.sqrt(P * (1 - P) / weights.numel())
    if abs(share - P) > DEVIATIONS * spread:
        return f"{dtype}: it drops {share:.4f} of the weights, asked for {P}"
    if not grad:
        return None
    seed = torch.randn(outcome.shape, generator=torch.Generator().manual_seed(12)).to(kit.device, dtype)
    (got,) = torch.autograd.grad(outcome, v, seed)
    want = (kept.double() * whole).transpose(-1, -2) @ seed.double()
    off, allowed = float((got.double() - want).abs().max()), gradient_tolerance(kit.backend.tolerance(dtype), want)
    if off <= allowed:
        return None
    which = "recomputed forward" if recomputed else "backward"
    return f"{dtype}: its {which} drops other weights than its forward: off by {off:.2g}"


def _recomputing(inputs: Inputs) -> Answer:
    return Answer(recomputing(inputs.q, inputs.k, inputs.v, inputs.arguments()))
