"""fuseboard-tilelang on a GPU: the five kernels against float32 and their CPU form, graphs, streams, the backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fuseboard as fb
from fuseboard import registry
from fuseboard.probe import verdict
from fuseboard.selftest import attention_fp64
from fuseboard_tilelang import _package, add_ln_kernel, attn_kernel, gemm_kernel, ops, rope_kernel
from fuseboard_tilelang._configs import gemm_config
from fuseboard_tilelang.warm import Job, warm

# TileLang and what it imports warn of each other; that is theirs to mend.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SITE = fb.Site("tests.tilelang.gpu")
HALVES = [torch.bfloat16, torch.float16]
CLOSE, CLOSE_ATTENTION = 0.05, 0.02


ACTIVATED = [((17, 70, 67), act) for act in ("none", "relu", "gelu", "gelu_tanh", "silu")]
GEMMS = [*ACTIVATED, ((1, 768, 768), "gelu"), ((300, 264, 96), "gelu"), ((3000, 2048, 256), "gelu")]
NORMS = [(dim, "both") for dim in (64, 100, 1000, 4096)] + [
    (768, kind) for kind in ("both", "residual", "bias", "none")
]
HEADS = [(12, 64), (3, 20), (2, 96)]
DIMS = [64, 96, 128]
DTYPES = ["bfloat16", "float16"]


def jobs() -> list[Job]:
    """What most tests here need, to be compiled in parallel first: one by one it takes a quarter of an hour."""
    found: list[Job] = []
    for (m, n, k), act in GEMMS:
        for extras in (False, True):
            options = {"bias": extras, "residual": extras, "act": act}
            found.append((gemm_kernel, (n, k), {**options, "config": gemm_config("gemm", m * n, cpu=False)}))
    found += [(add_ln_kernel, (dim,), norm_options(kind)) for dim, kind in NORMS]
    found += [(rope_kernel, heads, {"positions": given}) for heads in HEADS for given in (False, True)]
    for dim in DIMS:
        for bounded in (False, True):
            for lengths in (False, True):
                found.append((attn_kernel, (None, None, None, dim), {"bounded": bounded, "lengths": lengths}))
    return [(factory, sizes, {"dtype": dtype, **options}) for factory, sizes, options in found for dtype in DTYPES]


def for_cpu(options: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in options.items() if name not in ("dtype", "config")}


def norm_options(kind: str) -> dict[str, object]:
    return {"residual": kind in ("both", "residual"), "bias": kind in ("both", "bias"), "eps": 1e-5}


@pytest.fixture(autouse=True, scope="module")
def able() -> None:
    backend = registry.current().resolve("tilelang")
    if backend is None:
        pytest.skip("fuseboard-tilelang is not installed")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for compute capability 9.0")
    problem = _package.gpu_problem()
    if problem is not None:
        pytest.skip(problem)
    assert [why for why in warm(jobs()) if why] == []
    if _package.cpu_problem() is None:
        same = {(factory, sizes, *sorted(for_cpu(options).items())) for factory, sizes, options in jobs()}
        assert [why for why in warm([(f, sizes, dict(rest)) for f, sizes, *rest in same], target="c") if why] == []


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(1234 + seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).cuda()


def on_cpu(*tensors: Tensor | None) -> list[Tensor | None]:
    """The same rounded values, as the CPU form takes them."""
    return [
        None if each is None else each.cpu().float() if each.is_floating_point() else each.cpu() for each in tensors
    ]


def agree(mine: Tensor, call: Callable[[], Tensor], tolerance: float) -> bool:
    """Whether the CPU form gives the same, where there is a compiler for it."""
    return _package.cpu_problem() is not None or apart(mine, call()) < tolerance


def apart(a: Tensor, b: Tensor) -> float:
    return float((a.cpu().double() - b.cpu().double()).abs().max())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("shape", "act"), GEMMS)
@pytest.mark.parametrize("extras", [False, True])
def test_gemm_is_float32_s_and_the_cpu_form_s(
    dtype: torch.dtype, shape: tuple[int, int, int], act: str, extras: bool
) -> None:
    m, n, k = shape
    x, weight = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype, seed=1, scale=k**-0.5)
    bias, residual = (draw(n, dtype=dtype, seed=2), draw(m, n, dtype=dtype, seed=3)) if extras else (None, None)
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    y = {
        "none": lambda y: y, "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
        "silu": F.silu,
    }[act](y)  # fmt: skip
    want = y if residual is None else y + residual.float()

    got = ops.gemm(x, weight, bias, residual, act)
    assert apart(got, want) < CLOSE
    assert agree(got, lambda: ops.gemm(*on_cpu(x, weight, bias, residual), act), CLOSE)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(17, 70, 67), (300, 160, 128)])
@pytest.mark.parametrize("biased", [False, True])
def test_geglu_is_float32_s_and_the_cpu_form_s(dtype: torch.dtype, shape: tuple[int, int, int], biased: bool) -> None:
    m, n, k = shape
    x, weight = draw(m, k, dtype=dtype), draw(2 * n, k, dtype=dtype, seed=1, scale=k**-0.5)
    bias = draw(2 * n, dtype=dtype, seed=2) if biased else None
    u, g = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).chunk(2, -1)

    got = ops.geglu(x, weight, bias)
    assert apart(got, F.gelu(u) * g) < CLOSE
    assert agree(got, lambda: ops.geglu(*on_cpu(x, weight, bias)), CLOSE)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("dim", "kind"), NORMS)
@pytest.mark.parametrize("size", [1.0, 1000.0])
def test_add_ln_is_float32_s_and_its_residual_is_torch_s_sum(
    dtype: torch.dtype, dim: int, kind: str, size: float
) -> None:
    x, weight = draw(301, dim, dtype=dtype), draw(dim, dtype=dtype, seed=1)
    bias = draw(dim, dtype=dtype, seed=2) if kind in ("both", "bias") else None
    residual = draw(301, dim, dtype=dtype, seed=3, scale=size) if kind in ("both", "residual") else None
    total = x if residual is None else residual + x
    before = x.clone()
    want = F.layer_norm(total.float(), (dim,), weight.float(), None if bias is None else bias.float())
    again = on_cpu(residual, x, weight, bias)

    got = ops.add_ln(residual, x, weight, bias)
    assert apart(got, want) < CLOSE
    assert residual is None or torch.equal(residual, total)
    assert torch.equal(x, before)
    if size == 1.0:  # the CPU form does not round the sum to half precision, which is coarse beyond
        assert agree(got, lambda: ops.add_ln(*again), CLOSE)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("given", [False, True])
def test_rope_rotates_queries_and_keys_at_wrapped_positions_alone(
    dtype: torch.dtype, heads: tuple[int, int], given: bool
) -> None:
    h, d = heads
    rows, length = 301, 77
    qkv = draw(rows, 3 * h * d, dtype=dtype)
    angles = draw(length, d // 2, dtype=torch.float32, seed=1)
    positions = torch.randint(-100, 200, (rows,), dtype=torch.int32).cuda() if given else None
    at = (torch.arange(rows, device="cuda") if positions is None else positions.long()) % length
    before = qkv.clone()
    a, b = before[:, : 2 * h * d].float().view(rows, 2 * h, d).chunk(2, -1)
    cos, sin = angles.cos()[at, None], angles.sin()[at, None]
    want = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).view(rows, 2 * h * d)
    again = on_cpu(qkv, angles.cos(), angles.sin(), positions)

    assert ops.rope_(qkv, angles.cos(), angles.sin(), positions, h, d) is qkv
    assert apart(qkv[:, : 2 * h * d], want) < CLOSE
    assert torch.equal(qkv[:, 2 * h * d :], before[:, 2 * h * d :])
    assert agree(qkv, lambda: ops.rope_(*again, h, d), CLOSE)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("lengths", [(1, 77), (65, 65), (296, 296), (40, 104), (104, 40), (1, 65), (300, 1000)])
@pytest.mark.parametrize("bounds", ["none", "causal", "window", "causal window"])
@pytest.mark.parametrize("ragged", [False, True])
def test_attention_is_float64_s_and_the_cpu_form_s(
    dtype: torch.dtype, dim: int, lengths: tuple[int, int], bounds: str, ragged: bool
) -> None:
    n_q, n_k = lengths
    q, k, v = (draw(3, h, n, dim, dtype=dtype, seed=n) for h, n in ((4, n_q), (2, n_k), (2, n_k)))
    causal, window = "causal" in bounds, (20, 0 if "causal" in bounds else 9) if "window" in bounds else None
    real = torch.tensor([n_k, max(n_k // 3, 1), 0], dtype=torch.int32, device="cuda") if ragged else None
    shift = torch.arange(n_k, device="cuda") - torch.arange(n_q, device="cuda")[:, None] - (n_k - n_q)
    mask = torch.ones(3, 1, n_q, n_k, dtype=torch.bool, device="cuda")
    mask &= (shift <= 0) if causal else mask
    mask &= (shift >= -20) & (shift <= 9) if window is not None else mask
    if real is not None:
        seen = torch.arange(n_k, device="cuda") < real[:, None]
        mask &= seen[:, None, None]
    want = attention_fp64(q, k, v, mask=mask)
    if real is not None:  # what is not real is not read
        k, v = (each.masked_fill(~seen[:, None, :, None], torch.nan) for each in (k, v))

    got = ops.attention(q, k, v, real, causal, window)
    assert apart(got, want) < CLOSE_ATTENTION
    assert not got.masked_select(~mask.any(-1)[..., None]).any()
    if dim == 64:
        again = [None if each is None else torch.nan_to_num(each) for each in on_cpu(q, k, v)]
        assert agree(got, lambda: ops.attention(*again, *on_cpu(real), causal, window), CLOSE_ATTENTION)


def test_a_tail_of_keys_takes_no_weight() -> None:
    """Issue 1213 of TileLang: keys beyond the last one score 0 and take part; 0.925 here in place of 1."""
    q, k, v = torch.zeros(1, 1, 2, 64), torch.randn(1, 1, 296, 64), torch.ones(1, 1, 296, 64)
    for dtype in HALVES:
        got = ops.attention(*(each.cuda().to(dtype) for each in (q, k, v)))
        assert got.unique().tolist() == [1.0]


@pytest.mark.parametrize("layout", ["packed", "tokens", "expanded", "unaligned", "strided", "odd"])
def test_rows_may_lie_anywhere(layout: str) -> None:
    b, s, h, d = 2, 130, 4, 64
    if layout == "packed":
        q, k, v = draw(b, s, 3 * h * d).view(b, s, 3, h, d).permute(2, 0, 3, 1, 4)
    elif layout == "tokens":
        q, k, v = (draw(b, s, h, d, seed=seed).transpose(1, 2) for seed in range(3))
    elif layout == "expanded":
        q, k, v = draw(b, h, s, d), *(draw(1, 1, s, d, seed=seed).expand(b, h, s, d) for seed in (1, 2))
    elif layout == "unaligned":
        q, k, v = (draw(b * h * s * d + 1, seed=seed)[1:].view(b, h, s, d) for seed in range(3))
    elif layout == "odd":  # a stride of 3 where there is one element: contiguous to torch
        q, k, v = (draw(1, h, s, d, seed=seed).as_strided((1, h, s, d), (3, s * d, d, 1)) for seed in range(3))
    else:
        q, k, v = (draw(b, h, d, s, seed=seed).transpose(2, 3) for seed in range(3))
    with fb.bind(fb.policy_for("tilelang", True)):
        got = fb.attention(q, k, v, site=SITE)

    assert apart(got, attention_fp64(q, k, v)) < CLOSE_ATTENTION
    if layout in ("packed", "tokens"):
        assert apart(ops.attention(q, k, v), attention_fp64(q, k, v)) < CLOSE_ATTENTION


@pytest.mark.parametrize("lengths", [(200, 200), (1, 300), (37, 200), (200, 130)])
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_every_structure_is_right_and_reads_real_keys_only(
    lengths: tuple[int, int], window: int | None, causal: bool, padded: bool
) -> None:
    n_q, n_k = lengths
    place, real = torch.arange(n_k, device="cuda"), torch.tensor([[n_k], [max(n_k // 3, 1)], [0]], device="cuda")
    keys = place < real if padded else None
    info = fb.MaskInfo(keys, causal, window, "right" if padded else None)
    q, k, v = draw(3, 4, n_q, 64), draw(3, 2, n_k, 64, seed=1), draw(3, 2, n_k, 64, seed=2)
    want = attention_fp64(q, k, v, mask_info=info)
    if keys is not None:
        k, v = (each.masked_fill(~keys[:, None, :, None], torch.nan) for each in (k, v))
    with fb.bind(fb.policy_for("tilelang", True)):
        got = fb.attention(q, k, v, site=SITE, enable_gqa=True, mask_info=info)

    assert apart(got, want) < CLOSE_ATTENTION


def test_it_passes_its_own_probe() -> None:
    backend = registry.current().resolve("tilelang")
    found = verdict(registry.current(), backend, torch.device("cuda", torch.cuda.current_device()))

    assert found.ok, found.reason


def test_a_captured_graph_replays_with_other_inputs_and_lengths() -> None:
    x, weight, bias = draw(300, 256), draw(512, 256, seed=1, scale=0.06), draw(512, seed=2)
    q, k, real = draw(2, 4, 200, 64), draw(2, 4, 200, 64, seed=1), torch.tensor([200, 100], dtype=torch.int32).cuda()
    residual, norm, qkv = draw(300, 256, seed=3), draw(256, seed=4), draw(200, 3 * 256, seed=5)
    angles = draw(200, 32, dtype=torch.float32, seed=6)

    def step() -> list[Tensor]:
        return [
            ops.gemm(x, weight, bias, act="gelu"), ops.geglu(x, weight, bias), ops.add_ln(residual, x, norm, norm),
            ops.rope_(qkv, angles, angles, None, 4, 64), ops.attention(q, k, k, real, causal=True),
        ]  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    x.copy_(draw(300, 256, seed=9))
    real.copy_(torch.tensor([31, 200], dtype=torch.int32))
    residual.copy_(draw(300, 256, seed=10))
    qkv.copy_(draw(200, 3 * 256, seed=11))
    graph.replay()
    torch.cuda.synchronize()
    replayed = [each.clone() for each in outs]
    residual.copy_(draw(300, 256, seed=10))
    qkv.copy_(draw(200, 3 * 256, seed=11))

    assert all(torch.equal(mine, eager) for mine, eager in zip(replayed, step(), strict=True))


def test_work_is_put_on_the_current_stream() -> None:
    x, weight = draw(2048, 1024), draw(1024, 1024, seed=1, scale=0.03)
    want = ops.gemm(x, weight)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    out = torch.empty_like(want)
    with torch.cuda.stream(stream):
        late = torch.zeros_like(x)
        torch.cuda._sleep(20_000_000)  # the copy comes late: a kernel on another stream would find zeros
        late.copy_(x)
        ops.gemm(late, weight, out=out)
    stream.synchronize()

    assert torch.equal(out, want)


def test_nothing_waits_for_the_device() -> None:
    q, real = draw(2, 4, 200, 64), torch.tensor([200, 100], dtype=torch.int32).cuda()
    ops.attention(q, q, q, real)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        ops.attention(q, q, q, real)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rows_beyond_the_grid_are_answered_by_another_backend() -> None:
    q = draw(65536, 1, 2, 64)
    with fb.bind("tilelang"):
        out = fb.attention(q, q, q, site=SITE)

    assert apart(out, attention_fp64(q, q, q)) < CLOSE_ATTENTION


def test_float32_is_refused_with_what_to_do() -> None:
    x = draw(4, 64, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"on a GPU the dtype is torch\.float32; expected torch\.bfloat16 or"):
        ops.gemm(x, x)
    with pytest.raises(ValueError, match="dtype is 'float32'; the GPU form takes 'bfloat16' or 'float16'"):
        gemm_kernel(64, 64, dtype="float32")


def test_empty_tensors_give_empty_ones_and_no_keys_give_zeros() -> None:
    weight = draw(64, 64)
    q, none = draw(2, 4, 5, 64), draw(2, 4, 0, 64)

    assert ops.gemm(draw(0, 64), weight).shape == (0, 64)
    assert not ops.attention(q, none, none).any()
    assert ops.attention(none, q, q).shape == (2, 4, 0, 64)
