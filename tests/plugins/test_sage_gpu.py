"""fuseboard-sage on a GPU with the real packages: claims against float64, silent errors refused, graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fuseboard as fb
from fuseboard import registry
from fuseboard.probe import verdict
from fuseboard.selftest import attention_fp64, distance
from fuseboard_sage import sage

# Triton and the packages warn when they are imported and when they compile; that is theirs to mend.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SITE = fb.Site("tests.sage.gpu")
EXACT_SITE = fb.Site("tests.sage.gpu.exact", approx_ok=False)
HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(params=["sage", "sage3"])
def name(request: pytest.FixtureRequest) -> str:
    backend = registry.current().resolve(request.param)
    if backend is None:
        pytest.skip("fuseboard-sage is not installed")
    found = verdict(registry.current(), backend, torch.device("cuda", torch.cuda.current_device()))
    if found.stage in ("device", "version"):  # absent, or for another GPU; anything else is a failure
        pytest.skip(found.reason)
    assert found.ok, found.reason
    return request.param


@pytest.fixture
def first(name: str) -> str:
    if name != "sage" or sage.GENERATION != 1:
        pytest.skip("about SageAttention 1")
    return name


def draw(*shape: int, dtype: torch.dtype = BRAIN, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def qkv(
    n_q: int = 128, n_k: int = 128, dim: int = 64, kv_heads: int = 8, dtype: torch.dtype = BRAIN
) -> tuple[Tensor, Tensor, Tensor]:
    heads = (8, kv_heads, kv_heads)
    q, k, v = (
        draw(2, h, n, dim, dtype=dtype, seed=i) for i, (h, n) in enumerate(zip(heads, (n_q, n_k, n_k), strict=True))
    )
    return q, k, v


def strict(name: str, *tensors: Tensor, site: fb.Site = SITE, **arguments: object) -> Tensor:
    with fb.bind(fb.policy_for(name, True)):
        return fb.attention(*tensors, site=site, enable_gqa=True, **arguments)


def refused(name: str, *tensors: Tensor, **arguments: object) -> set[str]:
    with pytest.raises(fb.RefusedError) as caught:
        strict(name, *tensors, **arguments)
    return {each.rule for each in caught.value.refusals}


def off_by(name: str, q: Tensor, k: Tensor, v: Tensor, **arguments: object) -> float:
    return distance(strict(name, q, k, v, **arguments), attention_fp64(q, k, v, **arguments))


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("lengths", [(1, 128), (64, 128), (300, 320), (1000, 192), (65, 128)])
@pytest.mark.parametrize("dtype", [HALF, BRAIN, FLOAT])
def test_whole_blocks_of_keys_are_right(
    first: str, dim: int, kv_heads: int, lengths: tuple[int, int], dtype: torch.dtype
) -> None:
    assert off_by(first, *qkv(*lengths, dim, kv_heads, dtype)) < sage.tolerance(dtype)


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("length", [1, 5, 64, 65, 127, 128, 129, 192, 193, 300, 1025])
def test_causality_is_right_at_every_length(first: str, dim: int, length: int) -> None:
    tensors = qkv(length, length, dim)

    assert off_by(first, *tensors, causal=True) < sage.tolerance(BRAIN)
    if length > 1:  # the structure of one query hides nothing: a plain call, whose one key does not fill a block
        structured = strict(first, *tensors, mask_info=fb.MaskInfo(causal=True))
        assert torch.equal(strict(first, *tensors, causal=True), structured)


@pytest.mark.parametrize("keys", [1, 65, 77])
def test_keys_that_do_not_fill_a_block_are_refused(first: str, keys: int) -> None:
    assert "k_length" in refused(first, *qkv(64, keys))


def test_what_it_has_no_word_for_is_refused(name: str) -> None:
    q, k, v = qkv()
    keys = torch.arange(128, device="cuda").expand(2, -1) < 100

    assert "causal" in refused(name, *qkv(64, 128), causal=True)
    assert "mask" in refused(name, q, k, v, mask=torch.ones(128, 128, dtype=torch.bool, device="cuda"))
    assert "mask" in refused(name, q, k, v, mask=draw(128, 128))
    assert "mask" in refused(name, q, k, v, mask_info=fb.MaskInfo(keys, padding="right"))
    assert "dropout" in refused(name, q, k, v, dropout_p=0.5)
    assert "gradient" in refused(name, q.clone().requires_grad_(), k, v)
    assert "scale" in refused(name, q, k, v, scale=-0.1)
    assert "declined" in refused(name, q, k, v, scale=1.0)
    assert "empty" in refused(name, q, k[:, :, :0], v[:, :, :0])


def test_keys_are_never_written(name: str) -> None:
    q, k, v = qkv()
    k = k + 20
    version, bits = k._version, k.clone()
    for _ in range(3):
        strict(name, q, k, v)

    assert (k._version, torch.equal(k, bits)) == (version, True)
    assert strict(name, q, k[:1].expand(2, -1, -1, -1), v).isfinite().all()


@pytest.mark.parametrize("size", [1e9, 1e5, 1e-6, 1e-20])
def test_values_beyond_what_float16_holds_are_right(name: str, size: float) -> None:
    q, k, v = qkv()
    v = (v.float() * size).to(BRAIN)

    assert off_by(name, q, k, v) < 0.1 * size


def test_float16_values_whose_sum_float16_does_not_hold_are_right(first: str) -> None:
    q, k, v = qkv(dtype=HALF)
    v = v.clamp(-2, 2) * 10_000

    assert off_by(first, q, k, v) < 0.1 * 10_000


def test_any_layout_is_right(first: str) -> None:
    q, k, v = qkv()
    strided = [each.transpose(2, 3).contiguous().transpose(2, 3) for each in (q, k, v)]
    tokens_first = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (q, k, v)]

    assert off_by(first, *strided) < sage.tolerance(BRAIN)
    assert off_by(first, *tokens_first) < sage.tolerance(BRAIN)


@pytest.mark.parametrize(("shape", "rule"), [((65536, 1, 64, 64), "batch"), ((1, 65536, 64, 64), "heads")])
def test_more_than_65535_rows_or_heads_are_refused_and_poison_nothing(
    name: str, shape: tuple[int, ...], rule: str
) -> None:
    q = torch.zeros(shape, device="cuda", dtype=HALF)

    assert rule in refused(name, q, q, q)
    assert strict(name, *qkv()).isfinite().all()


def test_65535_rows_are_right(first: str) -> None:
    q = draw(65535, 1, 64, 64, dtype=HALF)
    with fb.bind("exact"):
        want = fb.attention(q, q, q, site=SITE)

    assert (strict(first, q, q, q) - want).abs().max() < sage.tolerance(HALF)


def test_a_captured_call_replays_equal_to_eager_and_follows_its_inputs(name: str) -> None:
    q, k, v = qkv()
    eager = strict(name, q, k, v)  # probes and compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = strict(name, q, k, v)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, eager)
    v.mul_(1e5)
    graph.replay()
    torch.cuda.synchronize()

    assert torch.equal(out, strict(name, q, k, v))


def test_the_current_device_and_stream_are_left_as_they_were(name: str) -> None:
    stream = torch.cuda.Stream()
    tensors = qkv()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        strict(name, *tensors)
        assert torch.cuda.current_stream() == stream
    assert torch.cuda.current_device() == tensors[0].device.index


def test_a_site_that_takes_only_exact_backends_gets_one_and_the_run_says_so(name: str) -> None:
    q, k, v = qkv()
    run = fb.Run()
    with fb.bind(name, run=run):
        out = fb.attention(q, k, v, site=EXACT_SITE)
    report = run.report()["attention"]

    assert distance(out, attention_fp64(q, k, v)) < 1.6e-2
    assert name not in report["used"]
    assert any(skipped.startswith(f"{name}→") for skipped in report["fallbacks"])
    assert "site" in refused(name, q, k, v, site=EXACT_SITE)
