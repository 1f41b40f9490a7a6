"""fuseboard-flash on a GPU with the real packages: structures, silent errors refused, graphs, a decode loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fuseboard as fb
from fuseboard import registry
from fuseboard.probe import verdict
from fuseboard.selftest import attention_fp64

# The packages warn of each other's changes when they are imported and when they compile; that is theirs to mend.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SITE = fb.Site("tests.flash.gpu")
HALF = torch.bfloat16


@pytest.fixture(params=["flash", "flash3", "flash4"])
def name(request: pytest.FixtureRequest) -> str:
    backend = registry.current().resolve(request.param)
    if backend is None:
        pytest.skip("fuseboard-flash is not installed")
    found = verdict(registry.current(), backend, torch.device("cuda", torch.cuda.current_device()))
    if found.stage in ("device", "version"):  # absent, or for another GPU; anything else is a failure
        pytest.skip(found.reason)
    assert found.ok, found.reason
    return request.param


def draw(*shape: int, dtype: torch.dtype = HALF, seed: int = 0, grad: bool = False) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", dtype=dtype, generator=generator).requires_grad_(grad)


def strict(name: str, *tensors: Tensor, **arguments: object) -> Tensor:
    with fb.bind(fb.policy_for(name, True)):
        return fb.attention(*tensors, site=SITE, enable_gqa=True, **arguments)


def refused(name: str, *tensors: Tensor, **arguments: object) -> set[str]:
    with pytest.raises(fb.RefusedError) as caught:
        strict(name, *tensors, **arguments)
    return {each.rule for each in caught.value.refusals}


def info_of(kind: str, n_k: int, causal: bool = False, window: int | None = None) -> fb.MaskInfo:
    place, real = torch.arange(n_k, device="cuda"), torch.tensor([[n_k], [max(n_k // 3, 1)], [0]], device="cuda")
    keys = {
        "none": None, "right": place < real, "left": place >= n_k - real, "any": (place % 3 != 1) & (real > 0),
    }[kind]  # fmt: skip
    return fb.MaskInfo(keys, causal, window, kind if kind in ("right", "left") else None)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("lengths", [(1, 200), (200, 200), (37, 200), (200, 130), (300, 1000)])
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "right", "left", "any"])
def test_every_structure_is_right_or_refused_and_reads_real_keys_only(
    name: str, kind: str, causal: bool, window: int | None, lengths: tuple[int, int], grad: bool
) -> None:
    n_q, n_k = lengths
    info = info_of(kind, n_k, causal, window)
    q, k, v = draw(3, 4, n_q, 64, seed=1), draw(3, 2, n_k, 64, seed=2), draw(3, 2, n_k, 64, seed=3)
    exact = [each.double().requires_grad_(grad) for each in (q, k, v)]
    if info.keys is not None:
        hidden = ~info.keys[:, None, :, None]
        k, v = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)
    given = [each.requires_grad_(grad) for each in (q, k, v)]
    try:
        out = strict(name, *given, mask_info=info)
    except fb.RefusedError as error:
        assert {each.rule for each in error.refusals} == {"mask"}
        return
    want = attention_fp64(*exact, mask_info=info)

    assert torch.allclose(out.detach().double(), want.detach(), atol=3e-2)
    if grad:
        seed = draw(*want.shape, seed=9)
        got = torch.autograd.grad(out, given, seed)
        for mine, right in zip(got, torch.autograd.grad(want, exact, seed.double()), strict=True):
            assert torch.allclose(mine.double(), right, atol=0.15, rtol=0.1)


@pytest.mark.parametrize("dim", [8, 60, 80, 128, 192, 256])
@pytest.mark.parametrize("grad", [False, True])
def test_head_dims_are_right_forward_and_backward(name: str, dim: int, grad: bool) -> None:
    q, k, v = (draw(2, 4, 130, dim, seed=seed, grad=grad) for seed in range(3))
    info = fb.MaskInfo(causal=True)
    out = strict(name, q, k, v, mask_info=info)
    exact = [each.detach().double().requires_grad_(grad) for each in (q, k, v)]
    want = attention_fp64(*exact, mask_info=info)

    assert torch.allclose(out.detach().double(), want.detach(), atol=3e-2)
    if grad:
        seed = draw(*want.shape, seed=9)
        got = torch.autograd.grad(out, (q, k, v), seed)
        for mine, right in zip(got, torch.autograd.grad(want, exact, seed.double()), strict=True):
            assert torch.allclose(mine.double(), right, atol=0.15, rtol=0.1)


def test_values_of_another_head_dim_are_right(name: str) -> None:
    q, k, v = draw(2, 4, 50, 64), draw(2, 4, 70, 64, seed=1), draw(2, 4, 70, 40, seed=2)

    assert torch.allclose(strict(name, q, k, v).double(), attention_fp64(q, k, v), atol=3e-2)


@pytest.mark.parametrize("lengths", [(2, 5), (1, 5), (64, 128)])
def test_the_top_left_flag_with_fewer_queries_is_not_read_as_bottom_right(name: str, lengths: tuple[int, int]) -> None:
    q, k = draw(2, 4, lengths[0], 64), draw(2, 4, lengths[1], 64, seed=1)

    assert torch.allclose(strict(name, q, k, k, causal=True).double(), attention_fp64(q, k, k, causal=True), atol=3e-2)


def test_what_would_be_silently_wrong_or_fail_at_launch_is_refused(name: str) -> None:
    q, single = draw(2, 4, 64, 64), draw(1, 2, 64, 64, dtype=torch.float32)
    longer, many = draw(2, 4, 80, 64), draw(65536, 1, 2, 16)

    assert refused(name, q, q, q, scale=-0.5) == {"scale"}
    assert refused(name, q, q, q, scale=0.0) == {"scale"}
    assert refused(name, single, single, single) == {"dtype"}
    assert refused(name, q, q, q, mask=torch.ones(64, 64, dtype=torch.bool, device="cuda")) == {"mask"}
    assert refused(name, longer, q, q, causal=True) == {"causal"}
    assert "empty" in refused(name, q[:0], q[:0], q[:0])
    assert "empty" in refused(name, q[:, :, :0], q, q)
    assert "batch" in refused(name, many, many, many)
    assert "heads" in refused(name, *[many.transpose(0, 1)] * 3)
    assert strict(name, q, q, q).isfinite().all()


@pytest.mark.parametrize("shape", [(65535, 1, 2, 16), (1, 65535, 2, 16)])
def test_65535_rows_or_heads_are_right(name: str, shape: tuple[int, ...]) -> None:
    q = draw(*shape)
    out = strict(name, q, q, q)

    assert torch.allclose(out.double(), attention_fp64(q, q, q), atol=3e-2)


def test_more_rows_than_a_grid_has_are_answered_by_another_backend(name: str) -> None:
    q = draw(65536, 1, 2, 16)
    with fb.bind(name):
        out = fb.attention(q, q, q, site=SITE)

    assert torch.allclose(out.double(), attention_fp64(q, q, q), atol=3e-2)


@pytest.mark.parametrize("kind", ["none", "right", "left"])
def test_a_graph_captured_after_a_call_replays_bit_for_bit(name: str, kind: str) -> None:
    q, k = draw(3, 8, 1, 128), draw(3, 2, 512, 128, seed=1)
    info = info_of(kind, 512)
    eager = strict(name, q, k, k, mask_info=info)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = strict(name, q, k, k, mask_info=info)
    out.zero_()
    graph.replay()

    assert torch.equal(out, eager)


@pytest.mark.parametrize("kind", ["right", "left", "any"])
def test_padded_keys_do_not_wait_for_the_device(name: str, kind: str) -> None:
    q, k, v = (draw(3, 4, 200, 64, seed=seed, grad=True) for seed in range(3))
    if kind == "any" and name == "flash4":
        pytest.skip("refused there")
    strict(name, q, k, v, mask_info=info_of(kind, 200)).sum().backward()
    info, seed = info_of(kind, 200), draw(3, 4, 200, 64, seed=9)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        strict(name, q, k, v, mask_info=info).backward(seed)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_decode_loop_over_a_left_padded_growing_cache_is_right_at_every_step(name: str) -> None:
    cache = draw(3, 2, 160, 128)
    real = torch.tensor([[100], [40], [7]], device="cuda")
    run = fb.Run()
    with fb.bind(fb.policy_for(name, True), run=run):
        for length in range(120, 160):
            q, k = draw(3, 8, 1, 128, seed=length), cache[:, :, :length]
            keys = torch.arange(length, device="cuda") >= 100 - real
            info = fb.MaskInfo(keys, causal=True, padding="left")
            out = fb.attention(q, k, k, site=SITE, enable_gqa=True, mask_info=info)
            assert torch.allclose(out.double(), attention_fp64(q, k, k, mask_info=info), atol=3e-2), length

    assert run.report()["attention"]["used"] == {name: 40}


def test_structured_and_dense_agree_with_one_another(name: str) -> None:
    q, k = draw(3, 8, 64, 64), draw(3, 8, 256, 64, seed=1)
    info = info_of("left", 256, causal=True)
    masked = fb.mask_for(64, 256, keys=info.keys, causal=True, padding="left", padded=True)
    with fb.bind("sdpa-math"):
        dense = fb.attention(q, k, k, site=SITE, mask=masked.dense)
    out = strict(name, q, k, k, **masked.arguments())

    assert torch.allclose(out, dense, atol=3e-2)


def test_dropout_of_flash_keeps_the_mean_and_drops(name: str) -> None:
    q = draw(2, 4, 256, 64)
    if name != "flash":
        assert refused(name, q, q, q, dropout_p=0.5) == {"dropout"}
        return
    out = strict(name, q, q, torch.ones_like(q), dropout_p=0.5)

    assert abs(float(out.float().mean()) - 1) < 0.05
    assert out.float().std() > 0.01
