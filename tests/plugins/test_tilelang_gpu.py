"""fuseboard-tilelang on a GPU: the five kernels against float32 and their CPU form, graphs, streams, the backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fuseboard as fb
from fuseboard import registry
from fuseboard.probe import verdict
from fuseboard.selftest import attention_fp64
from fuseboard_tilelang import (
    _package,
    add_ln_kernel,
    attn_kernel,
    compile_gpu,
    gemm_geglu_kernel,
    gemm_kernel,
    ops,
    rope_kernel,
)
from fuseboard_tilelang._configs import SHARED, Config, gemm_config
from fuseboard_tilelang.attn import OPEN
from fuseboard_tilelang.warm import Job, warm

# TileLang and what it imports warn of each other; that is theirs to mend.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SITE = fb.Site("tests.tilelang.gpu")
HALVES = [torch.bfloat16, torch.float16]
CLOSE, CLOSE_ATTENTION = 0.05, 0.02
LARGEST = 8.0


BF16, FP16 = HALVES
GEMMS = [  # rows, columns, inner; activation; with bias and residual; tiles other than the table's
    ((17, 70, 67), "gelu", True, BF16, None),
    ((17, 70, 67), "gelu_tanh", True, FP16, None),
    ((300, 264, 96), "none", False, BF16, None),
    ((300, 264, 96), "silu", True, FP16, None),
    ((3000, 2040, 72), "relu", True, BF16, None),
    ((3000, 2048, 256), "gelu", False, FP16, None),
    ((1100, 768, 320), "gelu", True, BF16, SHARED["gemm"][2][0]),
    ((1100, 768, 320), "silu", False, BF16, SHARED["gemm"][0][0]),
]
"""Of all activations and both dtypes: tiles of all sizes that divide the problem and do not, and blocks that share a
multiprocessor."""
GEGLUS = [
    ((17, 70, 67), True, BF16, None),
    ((1100, 1152, 192), False, FP16, None),
    ((1100, 576, 192), True, BF16, SHARED["geglu"][1][0]),
]
NORMS = [(768, "both", BF16), (100, "both", FP16), (1000, "none", BF16), (4096, "residual", FP16), (64, "bias", BF16)]
ROPES = [((12, 64), False, BF16), ((3, 20), True, FP16)]
ATTENTIONS = [
    # All of one head dimension in both dtypes: the self-test takes its cases from there.
    *[(64, bounded, ragged, dtype) for bounded in (False, True) for ragged in (False, True) for dtype in HALVES],
    (128, False, False, FP16),
    (128, True, True, BF16),
    (96, True, True, FP16),
]
BOUNDS = {False: ("none",), True: ("causal", "window", "causal window")}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def jobs() -> list[Job]:
    """All kernels of this file, to be compiled in parallel first: one by one they take minutes."""
    found: list[Job] = []
    for (m, n, k), act, extras, dtype, tiles in GEMMS:
        options = {"bias": extras, "residual": extras, "act": act, "dtype": name_of(dtype)}
        found.append((gemm_kernel, (n, k), {**options, "config": tiles or gemm_config("gemm", m, n, cpu=False)}))
    for (m, n, k), biased, dtype, tiles in GEGLUS:
        options = {"bias": biased, "dtype": name_of(dtype)}
        found.append((gemm_geglu_kernel, (n, k), {**options, "config": tiles or gemm_config("geglu", m, n, cpu=False)}))
    found += [(add_ln_kernel, (dim,), {**norm_options(kind), "dtype": name_of(dtype)}) for dim, kind, dtype in NORMS]
    found += [(rope_kernel, heads, {"positions": given, "dtype": name_of(dtype)}) for heads, given, dtype in ROPES]
    attentions = [(dim, bounded, ragged, False, dtype) for dim, bounded, ragged, dtype in ATTENTIONS]
    # A single query is bounded by nothing but a window, and then has the kernel for few.
    attentions += dict.fromkeys((dim, False, ragged, True, dtype) for dim, _, ragged, dtype in ATTENTIONS)
    for dim, bounded, ragged, few, dtype in attentions:
        options = {"bounded": bounded, "lengths": ragged, "few": few, "dtype": name_of(dtype)}
        found.append((attn_kernel, (None, None, None, dim), options))
    return found


def for_cpu(options: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in options.items() if name not in ("dtype", "config", "few")}


def norm_options(kind: str) -> dict[str, object]:
    return {"residual": kind in ("both", "residual"), "bias": kind in ("both", "bias"), "eps": 1e-5}


@pytest.fixture(autouse=True, scope="session")
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
        same = {
            repr((factory, sizes, for_cpu(rest))): (factory, sizes, for_cpu(rest)) for factory, sizes, rest in jobs()
        }
        assert [why for why in warm(list(same.values()), target="c") if why] == []


def test_few_kernels_are_compiled_since_each_takes_seconds() -> None:
    assert len(jobs()) <= 36


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


def close(mine: Tensor, want: Tensor, tolerance: float) -> bool:
    """Whether they differ by less, at a size at which the dtype's last bit is no part of the difference."""
    assert float(want.abs().max()) < LARGEST, "scale the inputs: bfloat16's last bit is 1/16 from 8 on"
    return apart(mine, want) < tolerance


@pytest.mark.parametrize(("shape", "act", "extras", "dtype", "tiles"), GEMMS)
def test_gemm_is_float32_s_and_the_cpu_form_s(
    shape: tuple[int, int, int], act: str, extras: bool, dtype: torch.dtype, tiles: Config | None
) -> None:
    m, n, k = shape
    x, weight = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype, seed=1, scale=k**-0.5)
    bias = draw(n, dtype=dtype, seed=2, scale=0.3) if extras else None
    residual = draw(m, n, dtype=dtype, seed=3, scale=0.3) if extras else None
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    y = {
        "none": lambda y: y, "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
        "silu": F.silu,
    }[act](y)  # fmt: skip
    want = y if residual is None else y + residual.float()

    if tiles is None:
        got = ops.gemm(x, weight, bias, residual, act)
    else:
        got = torch.empty_like(want, dtype=dtype)
        options = {"bias": extras, "residual": extras, "act": act, "dtype": name_of(dtype), "config": tiles}
        compile_gpu(gemm_kernel, n, k, **options)(
            *(each for each in (x, weight, bias, residual) if each is not None), got
        )
    assert close(got, want, CLOSE)
    few = slice(0, 80)
    again = on_cpu(x[few], weight, bias, None if residual is None else residual[few])
    assert agree(got[few], lambda: ops.gemm(*again, act), CLOSE)


@pytest.mark.parametrize(("act", "dtype"), [("gelu", BF16), ("gelu_tanh", FP16)])
def test_what_is_no_number_or_infinite_stays_so(act: str, dtype: torch.dtype) -> None:
    bias = torch.tensor([torch.nan, torch.inf] * 35).to(dtype).cuda()
    x, weight, residual = (
        draw(17, 67, dtype=dtype),
        draw(70, 67, dtype=dtype, seed=1),
        draw(17, 70, dtype=dtype, seed=2),
    )
    out = ops.gemm(x, weight, bias, residual, act)

    assert torch.equal(out.isnan(), bias.isnan().expand(17, 70))
    assert torch.equal(out.isposinf(), bias.isposinf().expand(17, 70))


@pytest.mark.parametrize(("shape", "biased", "dtype", "tiles"), GEGLUS)
def test_geglu_is_float32_s_and_the_cpu_form_s(
    shape: tuple[int, int, int], biased: bool, dtype: torch.dtype, tiles: Config | None
) -> None:
    m, n, k = shape
    x, weight = draw(m, k, dtype=dtype, scale=0.5), draw(2 * n, k, dtype=dtype, seed=1, scale=k**-0.5)
    bias = draw(2 * n, dtype=dtype, seed=2, scale=0.3) if biased else None
    u, g = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).chunk(2, -1)

    if tiles is None:
        got = ops.geglu(x, weight, bias)
    else:
        got = x.new_empty(m, n)
        kernel = compile_gpu(gemm_geglu_kernel, n, k, bias=biased, dtype=name_of(dtype), config=tiles)
        kernel(*(each for each in (x, weight, bias) if each is not None), got)
    assert close(got, F.gelu(u) * g, CLOSE)
    assert agree(got[:80], lambda: ops.geglu(*on_cpu(x[:80], weight, bias)), CLOSE)


@pytest.mark.parametrize(("dim", "kind", "dtype"), NORMS)
@pytest.mark.parametrize("size", [1.0, 1000.0])
def test_add_ln_is_float32_s_and_its_residual_is_torch_s_sum(
    dim: int, kind: str, dtype: torch.dtype, size: float
) -> None:
    x, weight = draw(301, dim, dtype=dtype), draw(dim, dtype=dtype, seed=1, scale=0.3)
    bias = draw(dim, dtype=dtype, seed=2, scale=0.3) if kind in ("both", "bias") else None
    residual = draw(301, dim, dtype=dtype, seed=3, scale=size) if kind in ("both", "residual") else None
    total = x if residual is None else residual + x
    before = x.clone()
    want = F.layer_norm(total.float(), (dim,), weight.float(), None if bias is None else bias.float())
    again = on_cpu(residual, x, weight, bias)

    got = ops.add_ln(residual, x, weight, bias)
    assert close(got, want, CLOSE)
    assert residual is None or torch.equal(residual, total)
    assert torch.equal(x, before)
    if size == 1.0:  # the CPU form does not round the sum to half precision, which is coarse beyond
        assert agree(got, lambda: ops.add_ln(*again), CLOSE)


@pytest.mark.parametrize(("heads", "given", "dtype"), ROPES)
def test_rope_rotates_queries_and_keys_at_wrapped_positions_alone(
    heads: tuple[int, int], given: bool, dtype: torch.dtype
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


@pytest.mark.parametrize(
    ("dim", "bounds", "ragged", "dtype"),
    [(dim, each, ragged, dtype) for dim, bounded, ragged, dtype in ATTENTIONS for each in BOUNDS[bounded]],
)
@pytest.mark.parametrize(
    "lengths",
    [
        (1, 77),
        (65, 65),
        (296, 296),
        (40, 104),
        (104, 40),
        (1, 65),
        (300, 1000),
        (16, 300),
        (17, 300),
        (9, 5),
        (1, 1000),
    ],
)
def test_attention_is_float64_s_and_the_cpu_form_s(
    dim: int, bounds: str, ragged: bool, dtype: torch.dtype, lengths: tuple[int, int]
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
    if dim == 64 and dtype == BF16 and n_k < 1000:  # which takes the CPU form seconds
        again = [None if each is None else torch.nan_to_num(each) for each in on_cpu(q, k, v)]
        assert agree(got, lambda: ops.attention(*again, *on_cpu(real), causal, window), CLOSE_ATTENTION)


def test_a_tail_of_keys_takes_no_weight() -> None:
    """Issue 1213 of TileLang: keys beyond the last one score 0 and take part; 0.925 here in place of 1."""
    q, k, v = torch.zeros(1, 1, 2, 64), torch.randn(1, 1, 296, 64), torch.ones(1, 1, 296, 64)
    for dtype in HALVES:
        got = ops.attention(*(each.cuda().to(dtype) for each in (q, k, v)))
        assert got.unique().tolist() == [1.0]


@pytest.mark.parametrize("causal", [False, True])
def test_scores_that_are_no_numbers_give_none(causal: bool) -> None:
    q, k, v = (draw(1, 2, 70, 64, seed=seed) for seed in range(3))
    q[0, 0, 5], k[0, 1, 40, 7] = torch.nan, torch.inf
    want = attention_fp64(q, k, v, causal=causal)
    real = torch.tensor([70], dtype=torch.int32, device="cuda") if causal else None
    got = ops.attention(q, k, v, real, causal=causal)

    assert want.isnan().any()
    assert torch.equal(got.isnan(), want.isnan())
    assert apart(got.nan_to_num(), want.nan_to_num()) < CLOSE_ATTENTION


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


@pytest.mark.parametrize("lengths", [(200, 200), (1, 300), (16, 300), (37, 200), (200, 130)])
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


def test_nvrtc_compiles_where_there_is_no_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    if not _package._nvrtc():
        pytest.skip("there is no cuda-python")
    monkeypatch.setattr(_package, "nvcc", lambda: None)
    q, k, v = draw(2, 4, 3, 64), draw(2, 2, 50, 64, seed=1), draw(2, 2, 50, 64, seed=2)
    kernel, out = compile_gpu(attn_kernel, 2, 3, 4, 64, keys=50, kv_heads=2, few=True), torch.empty_like(q)
    kernel(q, k, v, out, math.log2(math.e) / 8, 2, 0, OPEN, OPEN)

    assert apart(out, attention_fp64(q, k, v)) < CLOSE_ATTENTION


def test_it_passes_its_own_probe() -> None:
    backend = registry.current().resolve("tilelang")
    found = verdict(registry.current(), backend, torch.device("cuda", torch.cuda.current_device()))

    assert found.ok, found.reason


def test_a_captured_graph_replays_with_other_inputs_and_lengths() -> None:
    x, weight, bias = draw(17, 67), draw(140, 67, seed=1, scale=0.1), draw(140, seed=2)
    q, k, real = draw(2, 4, 200, 64), draw(2, 4, 200, 64, seed=1), torch.tensor([200, 100], dtype=torch.int32).cuda()
    residual, norm, qkv = draw(300, 768, seed=3), draw(768, seed=4), draw(200, 3 * 768, seed=5)
    angles, rest = draw(200, 32, dtype=torch.float32, seed=6), draw(300, 768, seed=7)

    def step() -> list[Tensor]:
        wide = ops.geglu(x, weight, bias)
        return [
            wide, ops.gemm(x, weight[:70], bias[:70], wide, act="gelu"), ops.add_ln(residual, rest, norm, norm),
            ops.rope_(qkv, angles, angles, None, 12, 64), ops.attention(q, k, k, real, causal=True),
        ]  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    x.copy_(draw(17, 67, seed=9))
    real.copy_(torch.tensor([31, 200], dtype=torch.int32))
    residual.copy_(draw(300, 768, seed=10))
    qkv.copy_(draw(200, 3 * 768, seed=11))
    graph.replay()
    torch.cuda.synchronize()
    replayed = [each.clone() for each in outs]
    residual.copy_(draw(300, 768, seed=10))
    qkv.copy_(draw(200, 3 * 768, seed=11))

    assert all(torch.equal(mine, eager) for mine, eager in zip(replayed, step(), strict=True))


@pytest.mark.parametrize("captured", [False, True])
def test_a_step_that_begins_early_reads_nothing_early_and_is_read_when_it_is_done(captured: bool) -> None:
    """Step after step: what one wrote the next reads, over memory that the allocator gives again at once."""
    k, v = draw(8, 8, 700, 128, seed=1), draw(8, 8, 700, 128, seed=2)
    first, real = draw(8, 16, 1, 128), torch.randint(1, 700, (8,), generator=torch.Generator().manual_seed(0)).int()
    real = real.cuda()

    def steps(waits: bool) -> Tensor:
        q, seen = first, real.clone()
        for _ in range(40):
            seen = torch.roll(seen, 1)
            out = ops.attention(q, k, v, seen)
            if waits:
                torch.cuda.synchronize()
            q = ops.attention(out, v, k, seen) * 4
        return q

    want = steps(waits=True)
    if not captured:
        assert all(torch.equal(steps(waits=False), want) for _ in range(5))
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = steps(waits=False)
    for _ in range(5):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


def test_work_is_put_on_the_current_stream() -> None:
    x, weight = draw(300, 96), draw(264, 96, seed=1, scale=0.1)
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
    weight = draw(264, 96)
    q, none = draw(2, 4, 5, 64), draw(2, 4, 0, 64)

    assert ops.gemm(draw(0, 96), weight).shape == (0, 264)
    assert not ops.attention(q, none, none).any()
    assert ops.attention(none, q, q).shape == (2, 4, 0, 64)
