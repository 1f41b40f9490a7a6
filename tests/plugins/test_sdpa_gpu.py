"""What only a GPU shows: silent errors refused, launch limits, graphs, structures against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fuseboard as fb
from fuseboard.registry import Registry, use
from fuseboard.selftest import attention_fp64

pytestmark = pytest.mark.gpu

SITE = fb.Site("tests.gpu")
F = torch.nn.functional
HALF = torch.bfloat16


def draw(*shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", dtype=dtype, generator=generator)


def strict(name: str, *tensors: Tensor, **arguments: object) -> Tensor:
    with fb.bind(fb.policy_for(name, True)):
        return fb.attention(*tensors, site=SITE, **arguments)


def refused(name: str, *tensors: Tensor, **arguments: object) -> str:
    with pytest.raises(fb.RefusedError) as caught:
        strict(name, *tensors, **arguments)
    return "; ".join(each.rule for each in caught.value.refusals)


@pytest.mark.parametrize("name", ["sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-math"])
def test_every_backend_can_run_on_this_gpu(name: str) -> None:
    q = draw(2, 4, 128, 64)

    assert strict(name, q, q, q).isfinite().all()


def test_cudnn_is_never_given_float32_which_it_turns_into_nan() -> None:
    q = draw(1, 2, 64, 64, dtype=torch.float32)

    assert "dtype" in refused("sdpa-cudnn", q, q, q)


@pytest.mark.parametrize("name", ["sdpa-cudnn", "sdpa-efficient"])
def test_a_float32_mask_beside_half_q_is_refused_not_read_bit_by_bit(name: str) -> None:
    q, mask = draw(1, 2, 64, 64), draw(64, 64, dtype=torch.float32)

    assert "mask_dtype" in refused(name, q, q, q, mask=mask)


def test_a_float32_mask_beside_half_q_is_right_under_fast() -> None:
    q = draw(1, 2, 4, 64)
    mask = torch.tensor([[0.0, -1.5, 0.0, -torch.inf]], device="cuda").expand(4, 4)
    with fb.bind("fast"):
        out = fb.attention(q, q, q, site=SITE, mask=mask)

    assert torch.allclose(out.double(), attention_fp64(q, q, q, mask=mask), atol=2e-2)


@pytest.mark.parametrize("name", ["sdpa-flash", "sdpa-cudnn"])
def test_a_negative_scale_is_refused_by_kernels_that_keep_the_largest_unscaled_score(name: str) -> None:
    q = draw(1, 2, 64, 64)

    assert "scale" in refused(name, q, q, q, scale=-0.5)


@pytest.mark.parametrize("shape", [(65536, 1, 2, 16), (1, 65536, 2, 16), (65535, 1, 2, 16)])
def test_more_than_65535_rows_or_heads_are_right_and_poison_nothing(shape: tuple[int, ...]) -> None:
    q = draw(*shape, dtype=torch.float16)
    run = fb.Run()
    with fb.bind("fast", run=run):
        out = fb.attention(q, q, q, site=SITE)
    torch.cuda.synchronize()
    axis = 0 if shape[0] > 1 else 1
    halves = torch.cat([F.scaled_dot_product_attention(each, each, each) for each in q.chunk(2, axis)], axis)

    assert torch.allclose(out, halves, atol=2e-3)
    assert strict("sdpa-flash", draw(1, 2, 8, 64), draw(1, 2, 8, 64), draw(1, 2, 8, 64)).isfinite().all()


@pytest.mark.parametrize("name", ["sdpa-flash", "sdpa-efficient"])
def test_a_grid_limit_is_a_refusal_and_not_a_launch_error(name: str) -> None:
    q = draw(65536, 1, 2, 16)

    assert "batch" in refused(name, q, q, q)


@pytest.mark.parametrize("name", ["sdpa-flash", "sdpa-efficient"])
def test_bottom_right_with_more_queries_than_keys_is_right(name: str) -> None:
    # The bottom-right mask of mem-efficient is wrong there (error 3), so that it must be given the dense one.
    q, k = draw(1, 2, 128, 64), draw(1, 2, 65, 64)
    info = fb.MaskInfo(causal=True)

    assert torch.allclose(
        strict(name, q, k, k, mask_info=info).double(), attention_fp64(q, k, k, mask_info=info), atol=3e-2
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("lengths", [(1, 200), (200, 200), (37, 200)])
def test_left_padded_keys_go_to_flash_as_offsets_and_are_right(
    causal: bool, tokens_first: bool, heads: tuple[int, int], lengths: tuple[int, int]
) -> None:
    n_q, n_k = lengths

    def made(count: int, length: int, seed: int) -> Tensor:
        shape = (3, length, count, 64) if tokens_first else (3, count, length, 64)
        tensor = draw(*shape, seed=seed)
        return tensor.transpose(1, 2) if tokens_first else tensor

    q, k, v = made(heads[0], n_q, 1), made(heads[1], n_k, 2), made(heads[1], n_k, 3)
    real = torch.tensor([[200], [77], [1]], device="cuda")
    info = fb.MaskInfo(torch.arange(n_k, device="cuda") >= n_k - real, causal, padding="left")
    k = k.masked_fill(~info.keys[:, None, :, None], torch.nan)  # a real key is all it may read
    out = strict("sdpa-flash", q, k, v, mask_info=info, enable_gqa=True)
    want = attention_fp64(q, k.nan_to_num(), v, mask_info=info)

    assert torch.allclose(out.double(), want, atol=3e-2)


def test_right_padded_keys_go_to_flash_as_lengths_and_are_right() -> None:
    q, k, v = draw(3, 4, 100, 64), draw(3, 4, 300, 64, seed=1), draw(3, 4, 300, 64, seed=2)
    real = torch.tensor([[300], [77], [0]], device="cuda")
    info = fb.MaskInfo(torch.arange(300, device="cuda") < real, padding="right")
    out = strict("sdpa-flash", q, k, v, mask_info=info)

    assert torch.allclose(out.double(), attention_fp64(q, k, v, mask_info=info), atol=3e-2)
    assert not out[2].any()


def test_right_padding_with_causality_is_not_given_to_flash() -> None:
    q = draw(2, 4, 100, 64)
    info = fb.MaskInfo(torch.ones(2, 100, dtype=torch.bool, device="cuda"), causal=True, padding="right")

    assert "mask" in refused("sdpa-flash", q, q, q, mask_info=info)


def test_a_window_has_a_backward_on_flash() -> None:
    q, k, v = (draw(2, 4, 150, 64, seed=seed).requires_grad_() for seed in range(3))
    info = fb.MaskInfo(causal=True, window=20)
    out = strict("sdpa-flash", q, k, v, mask_info=info)
    exact = [each.detach().double().requires_grad_() for each in (q, k, v)]
    want = attention_fp64(*exact, mask_info=info)
    seed = draw(2, 4, 150, 64, seed=9)

    for got, right in zip(
        torch.autograd.grad(out, (q, k, v), seed), torch.autograd.grad(want, exact, seed.double()), strict=True
    ):
        assert torch.allclose(got.double(), right, atol=0.1, rtol=0.1)


def test_a_graph_captured_after_one_call_replays_bit_for_bit() -> None:
    q = draw(2, 4, 128, 64)
    with fb.bind("exact"):
        eager = fb.attention(q, q, q, site=SITE)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fb.attention(q, q, q, site=SITE)
    out.zero_()
    graph.replay()

    assert torch.equal(out, eager)


def test_a_backend_not_yet_probed_is_left_out_while_a_graph_is_captured() -> None:
    q = draw(2, 4, 128, 64)
    site, run = fb.Site("tests.gpu.capture"), fb.Run()
    with use(Registry()), fb.bind("exact", run=run):
        F.scaled_dot_product_attention(q, q, q)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fb.attention(q, q, q, site=site)
        graph.replay()
        fb.attention(q, q, q, site=site)
    used = run.report()["attention"]["used"]

    assert used["reference"] == 1
    assert len(used) == 2


def test_a_boolean_mask_can_be_captured_in_a_graph() -> None:
    q = draw(2, 4, 128, 64)
    mask = torch.rand(2, 1, 1, 128, device="cuda") < 0.7
    with fb.bind("sdpa-efficient"):
        eager = fb.attention(q, q, q, site=SITE, mask=mask)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fb.attention(q, q, q, site=SITE, mask=mask)
    out.zero_()
    graph.replay()

    assert torch.equal(out, eager)


def test_cudnn_waits_until_a_plan_pays_and_a_growing_cache_never_asks_it() -> None:
    cache, q = draw(1, 8, 400, 128), draw(1, 32, 1, 128)
    run = fb.Run()
    with fb.bind("fast", run=run):
        for length in range(300, 400):
            fb.attention(q, cache[:, :, :length], cache[:, :, :length], site=SITE, enable_gqa=True)
    report = run.report()["attention"]

    assert "sdpa-cudnn" not in report["used"]
    assert not report["fallbacks"]


def test_structures_agree_with_their_dense_masks_under_every_other_policy() -> None:
    q, k = draw(4, 8, 64, 64), draw(4, 8, 256, 64, seed=1)
    real = torch.tensor([[256], [200], [100], [3]], device="cuda")
    keys = torch.arange(256, device="cuda") >= 256 - real
    masked = fb.mask_for(64, 256, keys=keys, causal=True, padding="left", padded=True)
    want = attention_fp64(q, k, k, mask=masked.dense)

    # Not `auto`: torch's default gives rows that see nothing an average there (torch 2.11, cuDNN).
    for name in ("exact", "fast", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-math"):
        with fb.bind(name):
            out = fb.attention(q, k, k, site=SITE, **masked.arguments())
        assert torch.allclose(out.double(), want, atol=3e-2), name


def test_an_invalid_launch_is_not_sticky_and_an_out_of_memory_error_passes_up() -> None:
    q = draw(1, 1, 2, 16)
    with fb.bind("sdpa-math"), pytest.raises(torch.OutOfMemoryError):
        fb.attention(draw(1, 1, 2**20, 16), draw(1, 1, 2**20, 16), draw(1, 1, 2**20, 16), site=SITE)

    assert strict("sdpa-math", q, q, q).isfinite().all()
