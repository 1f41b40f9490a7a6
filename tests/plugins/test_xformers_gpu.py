"""fuseboard-xformers on a GPU with the real package: claims against float64, silent errors refused, graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fuseboard as fb
from fuseboard import registry
from fuseboard.probe import verdict
from fuseboard.selftest import attention_fp64, distance

# The package warns when it is imported; that is its to mend.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SITE = fb.Site("tests.xformers.gpu")
HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
TOLERANCE = {HALF: 4e-3, BRAIN: 3e-2, FLOAT: 2e-3}  # float32 may go through TF32
NEWEST_CUTLASS = (9, 0)


@pytest.fixture(autouse=True)
def installed() -> None:
    backend = registry.current().resolve("xformers")
    if backend is None:
        pytest.skip("fuseboard-xformers is not installed")
    found = verdict(registry.current(), backend, torch.device("cuda", torch.cuda.current_device()))
    if found.stage in ("device", "version"):  # absent, or for another GPU; anything else is a failure
        pytest.skip(found.reason)
    assert found.ok, found.reason


@pytest.fixture
def cutlass() -> None:
    if torch.cuda.get_device_capability() > NEWEST_CUTLASS:
        pytest.skip("CUTLASS is for compute capability 9.0 at most")


def draw(*shape: int, dtype: torch.dtype = BRAIN, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def qkv(
    n_q: int = 100, n_k: int = 100, dim: int = 64, kv_heads: int = 8, v_dim: int | None = None,
    dtype: torch.dtype = BRAIN,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k = draw(3, 8, n_q, dim, dtype=dtype), draw(3, kv_heads, n_k, dim, dtype=dtype, seed=1)
    return q, k, draw(3, kv_heads, n_k, v_dim or dim, dtype=dtype, seed=2)


def strict(*tensors: Tensor, **arguments: object) -> Tensor:
    with fb.bind(fb.policy_for("xformers", True)):
        return fb.attention(*tensors, site=SITE, enable_gqa=True, **arguments)


def refused(*tensors: Tensor, **arguments: object) -> set[str]:
    with pytest.raises(fb.RefusedError) as caught:
        strict(*tensors, **arguments)
    return {each.rule for each in caught.value.refusals}


def right(q: Tensor, k: Tensor, v: Tensor, **arguments: object) -> bool:
    return distance(strict(q, k, v, **arguments), attention_fp64(q, k, v, **arguments)) <= TOLERANCE[q.dtype]


def info_of(kind: str, n_k: int, causal: bool = False, window: int | None = None) -> fb.MaskInfo:
    place, real = torch.arange(n_k, device="cuda"), torch.tensor([[n_k], [max(n_k // 3, 1)], [0]], device="cuda")
    keys = {"none": None, "right": place < real, "left": place >= n_k - real}[kind]
    return fb.MaskInfo(keys, causal, window, None if kind == "none" else kind)


LENGTHS = [(1, 1), (1, 200), (200, 200), (37, 200), (200, 130)]


@pytest.mark.usefixtures("cutlass")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (60, 60), (40, 72), (264, 264)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [HALF, BRAIN, FLOAT])
def test_every_length_head_count_and_head_dimension_is_right(
    lengths: tuple[int, int], kv_heads: int, dims: tuple[int, int], causal: bool, dtype: torch.dtype
) -> None:
    assert right(*qkv(*lengths, dims[0], kv_heads, dims[1], dtype), causal=causal)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_bottom_right_causality_and_windows_are_right(
    lengths: tuple[int, int], window: int | None, causal: bool, kv_heads: int
) -> None:
    n_q, n_k = lengths
    if window is not None and not causal and n_q > n_k and torch.cuda.get_device_capability() > NEWEST_CUTLASS:
        pytest.skip("given as a dense mask, for CUTLASS")
    assert right(*qkv(*lengths, kv_heads=kv_heads), mask_info=info_of("none", n_k, causal, window))


@pytest.mark.parametrize("kind", ["right", "left"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_padded_keys_are_right(kind: str, lengths: tuple[int, int], kv_heads: int, tokens_first: bool) -> None:
    q, k, v = qkv(*lengths, kv_heads=kv_heads)
    if tokens_first:
        q, k, v = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (q, k, v))
    info = info_of(kind, lengths[1])
    want = attention_fp64(q, k, v, mask_info=info)
    out = strict(q, k.masked_fill(~info.keys[:, None, :, None], torch.nan), v, mask_info=info)

    assert distance(out, want) < TOLERANCE[BRAIN]
    assert not out[2].any()


def test_padded_keys_make_nobody_wait() -> None:
    q, k, v = qkv(37, 200)
    strict(q, k, v, mask_info=info_of("left", 200))
    info = info_of("left", 200)
    torch.cuda.set_sync_debug_mode("error")
    try:
        strict(q, k, v, mask_info=info)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("cutlass")
@pytest.mark.parametrize("dtype", [HALF, BRAIN, FLOAT])
@pytest.mark.parametrize("shape", [(37, 77), (8, 37, 77), (3, 1, 37, 77), (3, 8, 1, 77), (3, 8, 37, 1)])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_dense_masks_of_any_shape_are_right(dtype: torch.dtype, shape: tuple[int, ...], kv_heads: int) -> None:
    tensors = qkv(37, 77, kv_heads=kv_heads, dtype=dtype)

    assert right(*tensors, mask=draw(*shape, dtype=dtype, seed=9))
    assert right(*tensors, mask=draw(*shape, seed=9) > -1)
    assert not strict(*tensors, mask=torch.zeros(shape, dtype=torch.bool, device="cuda")).any()


@pytest.mark.usefixtures("cutlass")
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("what", ["plain", "flag", "bottom-right", "window", "mask", "float32", "more queries"])
def test_gradients_are_right(kv_heads: int, what: str) -> None:
    lengths = {"flag": (150, 150), "more queries": (150, 90)}.get(what, (90, 150))
    dtype = FLOAT if what == "float32" else HALF
    tensors = [each.requires_grad_() for each in qkv(*lengths, 60, kv_heads, dtype=dtype)]
    arguments: dict[str, object] = {
        "flag": {"causal": True},
        "more queries": {"causal": True},
        "bottom-right": {"mask_info": fb.MaskInfo(causal=True)},
        "window": {"mask_info": fb.MaskInfo(causal=True, window=20)},
        "mask": {"mask": draw(90, 150, dtype=HALF)},
    }.get(what, {})
    exact = [each.detach().double().requires_grad_() for each in tensors]
    out, want = strict(*tensors, **arguments), attention_fp64(*exact, **arguments)
    seed = draw(*out.shape, dtype=out.dtype, seed=7)
    got, wanted = torch.autograd.grad(out, tensors, seed), torch.autograd.grad(want, exact, seed.double())

    for mine, theirs in zip(got, wanted, strict=True):
        assert distance(mine, theirs) < 3e-2 * max(1.0, float(theirs.abs().max()))


def test_what_it_has_no_word_for_is_refused() -> None:
    q, k, v = qkv()

    assert "mask_dtype" in refused(q, k, v, mask=draw(100, 100, dtype=FLOAT))
    assert "mask_grad" in refused(q, k, v, mask=draw(100, 100).requires_grad_())
    assert "scale" in refused(q, k, v, scale=-0.1)
    assert "empty" in refused(q, k[:, :, :0], v[:, :, :0])


@pytest.mark.usefixtures("cutlass")
@pytest.mark.parametrize("kind", ["right", "left"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_padded_keys_with_causality_are_written_out_and_right(kind: str, lengths: tuple[int, int]) -> None:
    assert right(*qkv(*lengths), mask_info=info_of(kind, lengths[1], causal=True))


@pytest.mark.parametrize(("shape", "rule"), [((65536, 1, 2, 16), "batch"), ((1, 65536, 2, 16), "heads")])
def test_more_than_65535_rows_or_heads_are_refused_and_poison_nothing(shape: tuple[int, ...], rule: str) -> None:
    q = draw(*shape)

    assert rule in refused(q, q, q)
    assert right(*qkv())


def test_65535_rows_are_right() -> None:
    q = draw(65535, 1, 2, 16)

    assert right(q, q, q)


@pytest.mark.parametrize("kind", ["none", "right", "left"])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_a_captured_call_replays_equal_to_eager_and_follows_its_inputs(kind: str, kv_heads: int) -> None:
    q, k, v = qkv(37, 200, kv_heads=kv_heads)
    info = info_of(kind, 200, causal=kind == "none")
    eager = strict(q, k, v, mask_info=info)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = strict(q, k, v, mask_info=info)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, eager)
    q.neg_()
    if info.keys is not None:  # lengths are computed in the graph
        info.keys.copy_(info.keys.flip(0))
    graph.replay()
    torch.cuda.synchronize()

    assert torch.equal(out, strict(q, k, v, mask_info=info))
