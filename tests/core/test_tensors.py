"""`fuseboard.tensors`: what kernel authors need of their inputs."""

from __future__ import annotations

import math

import pytest
import torch

from fuseboard import tensors
from fuseboard.selftest import attention_fp64


def qkv(dim: int = 5, heads: int = 4, kv_heads: int = 4) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(2, count, 7, dim, dtype=torch.float64, generator=generator) for count in (heads, kv_heads, kv_heads)
    )


def test_padded_heads_give_the_same_attention_when_the_scale_was_taken_before():
    q, k, v = qkv()
    scale = tensors.scale_of(q, None)
    out = attention_fp64(*(tensors.padded(each, 8) for each in (q, k, v)), scale=scale)

    assert scale == 1 / math.sqrt(5)
    assert torch.allclose(out[..., :5], attention_fp64(q, k, v))
    assert not out[..., 5:].any()
    assert tensors.padded(q, 5) is q


def test_repeated_keys_serve_the_query_heads_that_are_theirs():
    q, k, v = qkv(kv_heads=2)

    assert torch.equal(tensors.repeated(k, 4)[:, 1], k[:, 0])
    assert torch.equal(tensors.repeated(k, 4)[:, 2], k[:, 1])
    assert torch.allclose(attention_fp64(q, tensors.repeated(k, 4), tensors.repeated(v, 4)), attention_fp64(q, k, v))
    assert tensors.repeated(q, 4) is q


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_aligned_copies_only_what_a_kernel_could_not_load(dtype):
    whole = torch.zeros(2, 3, 8, 16, dtype=dtype)
    storage = torch.zeros(2 * 3 * 8 * 16 + 1, dtype=dtype)
    # Contiguous as torch sees it, for an axis of size 1 has any stride; a kernel may check it all the same.
    odd = torch.zeros(64, dtype=dtype).as_strided((1, 1, 4, 16), (7, 3, 16, 1))
    wrong = [storage[1:].view(2, 3, 8, 16), whole.transpose(2, 3), torch.zeros(2, 3, 4, 17, dtype=dtype)[..., 1:], odd]

    assert tensors.aligned(whole) is whole
    assert tensors.aligned(whole.transpose(1, 2)).data_ptr() == whole.data_ptr()
    for each in wrong:
        copy = tensors.aligned(each)
        size = each.element_size()
        assert torch.equal(copy, each)
        assert copy.data_ptr() % tensors.ALIGNMENT == 0
        assert copy.stride(-1) == 1
        assert all(stride * size % tensors.ALIGNMENT == 0 for stride in copy.stride()[:-1])


def test_packed_copies_only_strided_rows():
    tensor = torch.randn(2, 3, 4, 5)

    assert tensors.packed(tensor[:, :, 1:]).data_ptr() == tensor[:, :, 1:].data_ptr()
    assert tensors.packed(tensor.transpose(2, 3)).stride(-1) == 1
    assert torch.equal(tensors.packed(tensor.transpose(2, 3)), tensor.transpose(2, 3))


def test_tokens_are_a_view_where_the_layout_is_the_projections_own():
    projected = torch.randn(2, 7, 3, 4)
    tensor = projected.transpose(1, 2)

    assert torch.equal(tensors.as_tokens(tensor), projected.reshape(14, 3, 4))
    assert tensors.as_tokens(tensor).data_ptr() == projected.data_ptr()
    assert tensors.as_tokens(torch.randn(2, 3, 7, 4)).shape == (14, 3, 4)


def test_a_gradient_is_needed_when_grad_mode_and_some_tensor_say_so():
    leaf, plain = torch.zeros(1, requires_grad=True), torch.zeros(1)

    assert tensors.needs_grad(plain, None, leaf)
    assert not tensors.needs_grad(plain, None)
    with torch.no_grad():
        assert not tensors.needs_grad(leaf)


@pytest.mark.parametrize("shape", [(2, 4, 7, 9), (1, 1, 7, 9), (2, 1, 1, 9), (2, 4, 7, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_bias_is_laid_out_for_whole_vectors_and_says_what_the_mask_said(shape, kind):
    q, k = torch.zeros(2, 4, 7, 8), torch.zeros(2, 4, 9, 8)
    mask = torch.randn(shape) > 0 if kind == torch.bool else torch.randn(shape)
    bias = tensors.expanded_bias(mask, q, k)
    want = torch.zeros(shape).masked_fill(~mask, -torch.inf) if kind == torch.bool else mask

    assert bias.shape == (2, 4, 7, 9)
    assert torch.equal(bias, want.expand(2, 4, 7, 9))
    assert bias.stride(-1) == 1
    assert all(stride % 16 == 0 for stride in bias.stride()[:3])


def test_a_bias_passes_the_gradient_on_in_the_masks_own_shape():
    mask = torch.randn(1, 4, 1, 9, requires_grad=True)
    tensors.expanded_bias(mask, torch.zeros(2, 4, 7, 8), torch.zeros(2, 4, 9, 8)).sum().backward()

    assert torch.equal(mask.grad, torch.full((1, 4, 1, 9), 14.0))


def test_the_grid_admits_65535_and_no_more():
    batch, heads = tensors.GRID

    for name, each in (("batch", batch), ("heads", heads)):
        assert each.rule == name
        assert "65535" in each.allowed
