"""A few calls that `acme` claims, and one that it does not. Many more: pytest --fuseboard-backend acme."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import fuseboard as fb

SITE = fb.Site("acme_attention.tests")
DEVICE = "cpu"  # where the kernel runs


def heads(length: int) -> torch.Tensor:
    return torch.randn(2, 4, length, 32, device=DEVICE)


def strict() -> fb.Policy:
    """A call that the backend does not answer is an error that says why."""
    return fb.policy_for("acme", strict=True)


@pytest.mark.parametrize("causal", [False, True])
def test_it_answers_as_torch_does(causal: bool) -> None:
    q, k, v = heads(33), heads(65), heads(65)
    run = fb.Run()
    with fb.bind(strict(), run=run):
        out = fb.attention(q, k, v, site=SITE, causal=causal)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v, is_causal=causal), atol=1e-4, rtol=1e-4)
    assert run.report()["attention"]["used"] == {"acme": 1}


def test_a_query_that_sees_no_key_gets_zeros() -> None:
    q = heads(8)
    mask = torch.ones(8, 8, dtype=torch.bool, device=DEVICE).tril(-1)
    with fb.bind(strict()):
        out = fb.attention(q, q, q, site=SITE, mask=mask)
    assert not out[:, :, 0].any()


def test_what_is_not_claimed_is_refused_with_its_reason() -> None:
    q = heads(8)
    with fb.bind(strict()), pytest.raises(fb.RefusedError, match="dropout"):
        fb.attention(q, q, q, site=SITE, dropout_p=0.1)
