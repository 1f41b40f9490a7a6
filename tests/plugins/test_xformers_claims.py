"""What the xFormers plugin claims, on a CPU: against a package that has the real signatures and the real faults.

The stand-in broadcasts nothing, its flash operator is bottom-right causal whatever is meant, CUTLASS's bottom-right
mask is wrong, and a pinned backward that does not fit gives NaN; what is admitted must come out right all the same.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import fuseboard as fb
from fuseboard.probe import Verdict, verdict
from fuseboard.registry import Entry, Registry, installed_entries, use
from fuseboard.selftest import attention_fp64, distance
from fuseboard.settings import Settings
from fuseboard_sdpa import _cost as sdpa_cost
from fuseboard_xformers import _package
from fuseboard_xformers import xformers as plugin

HERE = Path(__file__).parent / "stand_ins" / "xformers"
CPU = torch.device("cpu")
SITE = fb.Site("tests.xformers")
HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
TOLERANCE = {HALF: 2e-3, BRAIN: 1.6e-2, FLOAT: 1e-4}


@pytest.fixture(scope="module")
def fmha() -> Iterator[Any]:
    """The stand-in's module of attention; a real package, where there is one, is put back."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "xformers"}
    sys.path.insert(0, str(HERE))
    try:
        yield importlib.import_module("xformers.ops.fmha")
    finally:
        sys.path.remove(str(HERE))
        for name in [name for name in sys.modules if name.split(".")[0] == "xformers"]:
            del sys.modules[name]
        sys.modules.update(before)


@pytest.fixture(autouse=True)
def registry(fmha: Any) -> Iterator[Registry]:
    hooks = {name: getattr(plugin, name) for name in ("exactness", "rank", "install_line")}
    changed = {
        "info": lambda: attrs.evolve(plugin.info(), requires={}),
        "constraints": lambda: attrs.evolve(plugin.LIMITS, devices={"cpu"}),
        "kernel": lambda: plugin.Xformers(fmha),
    }
    on_cpu = SimpleNamespace(**hooks, **{name: fb.hookimpl(hook) for name, hook in changed.items()})
    entries = [Entry("xformers", lambda: on_cpu, "stand-ins", "1")]
    entries += [each for each in installed_entries() if each.name == "sdpa-cpu"]
    with use(Registry(entries, Settings())) as made:
        for each in entries:
            backend = made.resolve(each.name)
            assert backend is not None
            made.verdicts[each.name, "cpu"] = Verdict(ok=True, kernel=backend.load(CPU))
        fmha.CALLS.clear()
        yield made


def draw(*shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    n_q: int = 37, n_k: int = 37, dim: int = 64, kv_heads: int = 4, v_dim: int | None = None, dtype: torch.dtype = HALF
) -> list[Tensor]:
    shapes = [(3, 4, n_q, dim), (3, kv_heads, n_k, dim), (3, kv_heads, n_k, v_dim or dim)]
    return [draw(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def strict(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
    with fb.bind(fb.policy_for("xformers", True)):
        return fb.attention(q, k, v, site=SITE, enable_gqa=True, **arguments)


def refused(*tensors: Tensor, **arguments: Any) -> set[str]:
    with pytest.raises(fb.RefusedError) as caught:
        strict(*tensors, **arguments)
    return {each.rule for each in caught.value.refusals if each.backend == "xformers"}


def right(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> bool:
    before = [each.clone() for each in (q, k, v)]
    out = strict(q, k, v, **arguments)
    assert out.dtype == q.dtype
    assert all(torch.equal(each, old) for each, old in zip((q, k, v), before, strict=True)), "an input has changed"
    return distance(out, attention_fp64(q, k, v, **arguments)) <= TOLERANCE[q.dtype]


def keys_of(kind: str, n_k: int) -> Tensor:
    place, real = torch.arange(n_k), torch.tensor([[n_k], [n_k // 3], [0]])
    return place < real if kind == "right" else place >= n_k - real


def info_of(kind: str, n_k: int, causal: bool = False, window: int | None = None) -> fb.MaskInfo:
    return fb.MaskInfo(None if kind == "none" else keys_of(kind, n_k), causal, window, None if kind == "none" else kind)


LENGTHS = [(1, 1), (1, 77), (37, 37), (20, 50), (50, 20)]


def test_the_self_test_passes_against_the_faulty_package(registry: Registry) -> None:
    backend = registry.resolve("xformers")
    assert backend is not None
    registry.verdicts.clear()
    found = verdict(registry, backend, CPU)

    assert (found.ok, found.reason) == (True, "")


def test_the_stand_in_is_as_faulty_as_the_package(fmha: Any) -> None:
    q, k, v = (each.transpose(1, 2) for each in qkv(50, 20))
    cutlass, flash = fmha.cutlass.FwOp, fmha.flash.FwOp
    bottom_right = fmha.attn_bias.LowerTriangularFromBottomRightMask()
    wrong = fmha.memory_efficient_attention_forward(q, k, v, bottom_right, op=cutlass)
    want = attention_fp64(*(each.transpose(1, 2) for each in (q, k, v)), mask_info=fb.MaskInfo(causal=True))

    assert distance(wrong.transpose(1, 2), want) > 0.1
    with pytest.raises(ValueError, match="equal number"):
        fmha.memory_efficient_attention_forward(q, k, v, fmha.attn_bias.LowerTriangularMask(), op=flash)
    with pytest.raises(ValueError, match="broadcasting"):
        fmha.memory_efficient_attention_forward(q, k[:, :, :2], v[:, :, :2], op=flash)
    with pytest.raises(ValueError, match="% 8"):
        fmha.memory_efficient_attention_forward(*(each[..., :60] for each in (q, k, v)), op=flash)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dims", [(64, 64), (60, 60), (40, 72), (264, 264), (320, 32)])
@pytest.mark.parametrize("causal", [False, True])
def test_every_length_head_count_and_head_dimension_is_right(
    lengths: tuple[int, int], kv_heads: int, dims: tuple[int, int], causal: bool
) -> None:
    assert right(*qkv(*lengths, dims[0], kv_heads, dims[1]), causal=causal)
    assert right(*qkv(*lengths, dims[0], kv_heads, dims[1], FLOAT), causal=causal, scale=0.3)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [HALF, BRAIN, FLOAT])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_bottom_right_causality_and_windows_are_right(
    lengths: tuple[int, int], window: int | None, causal: bool, dtype: torch.dtype, kv_heads: int
) -> None:
    assert right(*qkv(*lengths, kv_heads=kv_heads, dtype=dtype), mask_info=info_of("none", lengths[1], causal, window))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("bounds", [(None, 0), (None, 3), (7, 3), (1, 25), (49, 40)], ids=str)
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_bounds_ahead_are_right(
    lengths: tuple[int, int], bounds: tuple[int | None, int], dtype: torch.dtype, kv_heads: int
) -> None:
    info = fb.MaskInfo(window=bounds[0], ahead=bounds[1])
    assert right(*qkv(*lengths, kv_heads=kv_heads, dtype=dtype), mask_info=info)


@pytest.mark.parametrize(
    ("info", "dtype", "operator", "bias"),
    [
        (fb.MaskInfo(causal=True), HALF, "fa2F", "LowerTriangularFromBottomRightMask"),
        (fb.MaskInfo(causal=True, window=7), HALF, "fa2F", "LowerTriangularFromBottomRightLocalAttentionMask"),
        (fb.MaskInfo(window=7), HALF, "fa2F", "LocalAttentionFromBottomRightMask"),
        (fb.MaskInfo(window=7, ahead=6), HALF, "fa2F", "LocalAttentionFromBottomRightMask"),
        (fb.MaskInfo(ahead=6), HALF, "fa2F", "LocalAttentionFromBottomRightMask"),
        (fb.MaskInfo(ahead=0), HALF, "fa2F", "LowerTriangularFromBottomRightMask"),
        (fb.MaskInfo(keys_of("right", 50), padding="right"), HALF, "fa2F", "BlockDiagonalPaddedKeysMask"),
        (fb.MaskInfo(keys_of("left", 50), padding="left"), HALF, "fa2F", "BlockDiagonalGappyKeysMask"),
        (fb.MaskInfo(keys_of("left", 50), causal=True, padding="left"), HALF, "cutlassF-pt", "Tensor"),
        (fb.MaskInfo(causal=True), FLOAT, "cutlassF-pt", "Tensor"),
        (None, HALF, "fa2F", "NoneType"),
        (None, FLOAT, "cutlassF-pt", "NoneType"),
    ],
)
def test_each_structure_has_its_class_and_its_operator(
    fmha: Any, info: fb.MaskInfo | None, dtype: torch.dtype, operator: str, bias: str
) -> None:
    assert right(*qkv(20, 50, dtype=dtype), mask_info=info)
    assert [{"operator": operator, "bias": bias, "rank": 4}] == fmha.CALLS


@pytest.mark.parametrize("kind", ["right", "left"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_padded_keys_are_right_and_never_read(
    fmha: Any, kind: str, lengths: tuple[int, int], kv_heads: int, tokens_first: bool
) -> None:
    q, k, v = qkv(*lengths, kv_heads=kv_heads)
    if tokens_first:
        q, k, v = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (q, k, v))
    info = info_of(kind, lengths[1])
    want = attention_fp64(q, k, v, mask_info=info)
    hidden = ~info.keys[:, None, :, None]
    out = strict(q, k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan), mask_info=info)

    assert distance(out, want) < 2e-3
    assert not out[2].any()
    assert fmha.CALLS[-1]["operator"] == "fa2F"


@pytest.mark.parametrize("kind", ["right", "left"])
def test_padded_keys_are_never_read_in_float32_either_where_a_dense_mask_hides_them(fmha: Any, kind: str) -> None:
    q, k, v = qkv(20, 50, dtype=FLOAT)
    info = info_of(kind, 50)
    want = attention_fp64(q, k, v, mask_info=info)
    hidden = ~info.keys[:, None, :, None]
    out = strict(q, k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan), mask_info=info)

    assert distance(out, want) < TOLERANCE[FLOAT]
    assert fmha.CALLS[-1]["operator"].startswith("cutlass")


@pytest.mark.parametrize("kind", ["right", "left"])
def test_nothing_of_the_keys_is_read_on_the_host(fmha: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(20, 50)
    info = info_of(kind, 50)
    kernel = plugin.Xformers(fmha)

    def waits(*_: object) -> None:
        raise AssertionError("this waits for the device")

    for name in ("item", "tolist", "cpu", "__bool__", "__int__", "nonzero"):
        monkeypatch.setattr(Tensor, name, waits)
    monkeypatch.setattr(fmha.flash.FwOp, "apply", lambda inp: inp.query)
    kernel(q, k, v, mask=None, mask_info=info, causal=False, scale=None, dropout_p=0.0)


def test_a_bias_for_padded_keys_is_made_once_for_each_mask_and_again_when_the_keys_change(fmha: Any) -> None:
    q, k, v = qkv(20, 50)
    info = info_of("right", 50)
    kernel = plugin.Xformers(fmha)
    first, again = (kernel._biases.padded(info, 3, 20, 50) for _ in range(2))
    info.keys[:, :5] = True
    changed = kernel._biases.padded(info, 3, 20, 50)

    assert first is again
    assert changed.k_seqinfo.seqlen.tolist() == [50, 16, 5]
    assert right(q, k, v, mask_info=info)


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize(
    "shape", [(37, 50), (4, 37, 50), (1, 37, 50), (3, 1, 37, 50), (3, 4, 1, 50), (3, 4, 37, 1), (1, 1)]
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_dense_masks_of_any_shape_are_laid_out(dtype: torch.dtype, shape: tuple[int, ...], kv_heads: int) -> None:
    tensors = qkv(37, 50, kv_heads=kv_heads, dtype=dtype)
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.7
    seen[..., 0, 0] = True

    assert right(*tensors, mask=draw(*shape, dtype=dtype, seed=9))
    assert right(*tensors, mask=seen)
    assert not strict(*tensors, mask=torch.zeros(shape, dtype=torch.bool)).any()


@pytest.mark.parametrize(
    ("arguments", "kv_heads", "dtype"),
    [
        ({}, 4, HALF),
        ({}, 2, HALF),
        ({}, 2, FLOAT),
        ({"causal": True}, 2, HALF),
        ({"mask_info": fb.MaskInfo(causal=True)}, 2, HALF),
        ({"mask_info": fb.MaskInfo(causal=True, window=7)}, 4, HALF),
        ({"mask_info": fb.MaskInfo(window=7)}, 2, HALF),
        ({"mask_info": fb.MaskInfo(window=7, ahead=4)}, 2, HALF),
        ({"mask_info": fb.MaskInfo(ahead=4)}, 4, HALF),
        ({"mask_info": info_of("left", 50)}, 4, HALF),
        ({"mask": draw(20, 50, dtype=HALF)}, 2, HALF),
    ],
)
def test_gradients_are_right(arguments: dict[str, Any], kv_heads: int, dtype: torch.dtype) -> None:
    tensors = [each.requires_grad_() for each in qkv(20, 50, 60, kv_heads, dtype=dtype)]
    exact = [each.detach().double().requires_grad_() for each in tensors]
    if "mask_info" in arguments and arguments["mask_info"].keys is not None:
        arguments = {"mask": arguments["mask_info"].dense(20, 50, CPU), **arguments}  # written out for a gradient
    out, want = strict(*tensors, **arguments), attention_fp64(*exact, **arguments)
    seed = draw(*out.shape, dtype=dtype, seed=7)
    got, wanted = torch.autograd.grad(out, tensors, seed), torch.autograd.grad(want, exact, seed.double())

    assert all(distance(mine, theirs) < 2e-2 for mine, theirs in zip(got, wanted, strict=True))


def test_shared_heads_are_a_fifth_axis_forward_and_repeated_under_grad(fmha: Any) -> None:
    q, k, v = qkv(kv_heads=2)
    strict(q, k, v)
    strict(q.requires_grad_(), k, v)
    with torch.no_grad():
        strict(q, k, v)

    assert [each["rank"] for each in fmha.CALLS] == [5, 4, 5]


def test_expanded_heads_and_strided_tensors_are_right() -> None:
    q, k, v = qkv(kv_heads=2)

    assert right(q[:, :1].expand(-1, 4, -1, -1), k, v)
    assert right(q, k[:, :1].expand(-1, 2, -1, -1), v[:, :1].expand(-1, 2, -1, -1))
    assert right(q, k[:, :1].expand(-1, 4, -1, -1), v[:, :1].expand(-1, 4, -1, -1))
    assert right(*(each.transpose(2, 3).contiguous().transpose(2, 3) for each in (q, k, v)))
    assert right(*(torch.cat((each, each), -1)[..., 3:67] for each in (q, k, v)))


def test_a_deterministic_backward_is_not_promised() -> None:
    q, k, v = qkv()
    q.requires_grad_()
    strict(q, k, v)
    torch.use_deterministic_algorithms(True)
    try:
        assert refused(q, k, v) == {"declined"}
    finally:
        torch.use_deterministic_algorithms(False)


def test_dropout_gradients_of_masks_sizes_of_zero_and_scales_not_above_zero() -> None:
    q, k, v = qkv()

    assert strict(q, k, v, dropout_p=0.5).isfinite().all()
    assert "mask_grad" in refused(q, k, v, mask=draw(37, 37).requires_grad_())
    assert "mask_dtype" in refused(q, k, v, mask=draw(37, 37, dtype=FLOAT))
    assert "causal_and_mask" in refused(q, k, v, mask=draw(37, 37), causal=True)
    assert "empty" in refused(q[:, :, :0], k, v)
    assert "empty" in refused(q, k[:, :, :0], v[:, :, :0])
    assert "scale" in refused(q, k, v, scale=-0.1)
    assert "scale" in refused(q, k, v, scale=0.0)


@pytest.mark.parametrize(("shape", "rule"), [((65536, 1, 2, 16), "batch"), ((1, 65536, 2, 16), "heads")])
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_more_than_65535_rows_or_heads_are_refused(shape: tuple[int, ...], rule: str, dtype: torch.dtype) -> None:
    q = torch.zeros(1, 1, 1, 16, dtype=dtype).expand(shape)

    assert refused(q, q, q) == {rule}


def test_a_mask_of_more_than_32_bits_is_refused_and_its_structure_is_not() -> None:
    q = torch.zeros(1, 1, 1, 16, dtype=HALF).expand(1, 1, 2**17, 16)
    mask = torch.ones(1, 1, dtype=torch.bool)
    call, sizes = fb.describe(q, q, q, mask_info=fb.MaskInfo(causal=True))
    guard = next(each for each in plugin.LIMITS.guards if each.rule == "mask size")

    assert refused(q, q, q, mask=mask) == {"mask size"}
    assert guard.check(call, sizes)
    assert not guard.check(attrs.evolve(call, dtype=FLOAT), sizes)  # written out there


def test_beyond_hopper_only_what_flash_takes_is_admitted() -> None:
    guard = next(each for each in plugin.LIMITS.guards if each.rule == "operator")

    def fits(*tensors: Tensor, **arguments: Any) -> bool:
        call, sizes = fb.describe(*tensors, **arguments)
        assert guard.check(attrs.evolve(call, capability=(9, 0)), sizes)
        return guard.check(attrs.evolve(call, capability=(12, 0)), sizes)

    assert fits(*qkv())
    assert fits(*qkv(20, 50), mask_info=fb.MaskInfo(causal=True))
    assert not fits(*qkv(), mask=torch.ones(37, 37, dtype=torch.bool))
    assert not fits(*qkv(dtype=FLOAT))
    assert not fits(*qkv(dim=320))
    assert not fits(*qkv(50, 20), causal=True)
    assert not fits(*qkv(20, 50), mask_info=info_of("left", 50, causal=True))


@pytest.mark.parametrize("sizes", [(2, 24, 4096, 4096, 128), (1, 16, 1024, 1024, 64), (8, 32, 1, 4096, 128)])
@pytest.mark.parametrize("dtype", [BRAIN, FLOAT])
def test_on_hopper_it_comes_after_the_kernels_inside_torch(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, heads, n_q, n_k, dim = sizes
    rows = [torch.zeros(1, 1, 1, 1, dtype=dtype).expand(batch, heads, n, dim) for n in (n_q, n_k, n_k)]
    call, exact = fb.describe(*rows)
    call = attrs.evolve(call, device_type="cuda", device_index=0, capability=(9, 0))
    inside = [sdpa_cost.efficient(call, exact, dense=False)]
    inside += [] if dtype == FLOAT else [sdpa_cost.cudnn(call, exact, dense=False), sdpa_cost.flash(call, exact)]

    assert plugin.rank(call, exact) > min(inside)
    if dtype == BRAIN:
        assert plugin.rank(call, exact) > max(inside[1:])


@pytest.mark.parametrize(
    ("torch_version", "line"),
    [
        ("2.6.0+cu124", "pip install --no-deps xformers==0.0.29.post3"),
        ("2.7.0", "pip install --no-deps xformers==0.0.30"),
        ("2.7.1", "pip install --no-deps xformers==0.0.31.post1"),
        ("2.8.0", "pip install --no-deps xformers==0.0.32.post2"),
        ("2.9.1+cu128", "pip install --no-deps xformers==0.0.33.post2"),
        ("2.10.0", "pip install --no-deps xformers==0.0.35"),
        ("2.13.0+cpu", "pip install --no-deps xformers==0.0.35"),
        (
            "2.11.0+cu130",
            "pip install --no-deps xformers==0.0.35 nvidia-cuda-runtime-cu12  # and its lib folder on LD_LIBRARY_PATH",
        ),
    ],
)
def test_the_install_line_names_the_release_built_for_the_installed_torch(torch_version: str, line: str) -> None:
    assert plugin.install_line(torch_version) == line


def test_the_later_home_is_required_where_it_alone_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    have = {"xformers": None, "mslk": "1.1"}
    monkeypatch.setattr(_package, "version", have.get)
    assert plugin.info().requires == {"mslk": ">0.0.0"}
    have["mslk"] = "0.0.0"
    assert plugin.info().requires == {"xformers": ""}
    have |= {"xformers": "0.0.35", "mslk": "1.1"}
    assert plugin.info().requires == {"xformers": ""}


# ---- packages that are absent, broken or of another version: in interpreters of their own

LOADED = "_has_cpp_library = True\n"
NOT_LOADED = """
from types import SimpleNamespace

class Invalid(Exception):
    build_info = SimpleNamespace(torch_version="2.10.0+cu128", cuda_version=1208)

try:
    try:
        try:
            raise OSError("libcudart.so.12: cannot open shared object file: No such file or directory")
        except OSError as error:
            raise OSError("Could not load this library: _C.so") from error
    except OSError as error:
        raise Invalid from error
except Invalid as error:
    _cpp_library_load_exception = error
_build_metadata = None
"""


NOT_BUILT = "_cpp_library_load_exception = Exception()"
OTHER_FLASH = "raise ImportError('Requires Flash-Attention version >=2.7.1,<=2.8.4 but got 2.6.3.')"


@pytest.fixture
def child(host: Callable[..., str]) -> Callable[..., str]:
    """What a host prints beside a package of these files, or in this folder."""

    def run(files: dict[str, str] | Path | None, version: str = "0.0.35", **environ: str) -> str:
        name = "mslk" if isinstance(files, dict) and any(path.startswith("mslk") for path in files) else "xformers"
        return host("fuseboard_xformers.xformers", name, version, files, **environ)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "version", "reason"),
    [
        (None, "", "xformers is not installed. Install it: pip install --no-deps xformers=="),
        ({"xformers/__init__.py": "raise ImportError('undefined symbol: _ZN3')"}, "0.0.35", "undefined symbol: _ZN3"),
        ({"xformers/__init__.py": "raise OSError('libcuda.so.1: cannot open')"}, "0.0.35", "OSError: libcuda.so.1"),
        ({"xformers/__init__.py": "import torch; torch.no_such"}, "0.0.35", "AttributeError: module 'torch' has no"),
        ({"xformers/__init__.py": "import sys; sys.exit(3)"}, "0.0.35", "its import called sys.exit(3)"),
        ({"xformers/__init__.py": LOADED}, "0.0.35", "ModuleNotFoundError: No module named 'xformers.ops'"),
        ({"xformers/__init__.py": LOADED}, "0.0.26.post1", "a batch of 65536 and more fails at a later call, see https://"),
        ({"xformers/__init__.py": LOADED}, "0.0.21", "known bad"),
        ({"xformers/__init__.py": LOADED}, "0.0.18", "known bad: NaN beyond 32768 tokens"),
        (
            {"xformers/__init__.py": "_has_cpp_library = False", "xformers/_cpp_lib.py": NOT_LOADED},
            "0.0.35",
            "the compiled library of xformers does not load (libcudart.so.12: cannot open shared object file: No such "
            "file or directory; built for torch 2.10.0+cu128 and CUDA 12.8, here is",
        ),
        (
            {"xformers/__init__.py": "_has_cpp_library = False", "xformers/_cpp_lib.py": NOT_BUILT},
            "0.0.35",
            "xformers is installed without its compiled library. Install the one for this torch: pip install --no-deps",
        ),
        (
            {
                "xformers/__init__.py": LOADED,
                "xformers/ops/__init__.py": "import flash_attn.flash_attn_interface",
                "flash_attn/cute/__init__.py": "",
            },
            "0.0.35",
            "does not take the flash_attn that is installed here (No module named 'flash_attn.flash_attn_interface')",
        ),
        (
            {
                "xformers/__init__.py": LOADED,
                "xformers/ops/__init__.py": OTHER_FLASH,
            },
            "0.0.35",
            "does not take the flash_attn that is installed here (Requires Flash-Attention version >=2.7.1",
        ),
        (
            {"xformers/__init__.py": LOADED, "xformers/ops/__init__.py": "", "xformers/ops/fmha.py": ""},
            "0.0.35",
            "AttributeError: module 'xformers.ops.fmha' has no attribute 'memory_efficient_attention'",
        ),
        ({"mslk/__init__.py": ""}, "1.1", "ModuleNotFoundError: No module named 'mslk.attention'"),
    ],
)  # fmt: skip
def test_a_package_that_is_absent_or_broken_is_a_reason_and_harms_nobody(
    child: Callable[..., str], files: dict[str, str] | None, version: str, reason: str
) -> None:
    said = child(files, version)

    assert reason in said
    assert "'used': {'sdpa-cpu': 1}" in said


@pytest.mark.slow
def test_an_import_that_hangs_is_a_reason(child: Callable[..., str]) -> None:
    files = {"xformers/__init__.py": "import threading; threading.Event().wait(60)"}
    said = child(files, FUSEBOARD_PROBE_TIMEOUT="0.5")

    assert "did not end within 0.5 s" in said
    assert "'used': {'sdpa-cpu': 1}" in said


@pytest.mark.slow
def test_a_package_that_works_is_used(child: Callable[..., str]) -> None:
    assert "'used': {'xformers': 1}" in child(HERE)


@pytest.mark.slow
@pytest.mark.parametrize("xformers_too", [False, True])
def test_the_later_home_is_found(tmp_path: Path, child: Callable[..., str], xformers_too: bool) -> None:
    package = HERE / "xformers" / "ops" / "fmha"
    files = {f"mslk/attention/fmha/{each.name}": each.read_text() for each in package.glob("*.py")}
    if xformers_too:  # a release that no longer has the attention itself
        info = tmp_path / "site" / "xformers-0.1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: xformers\nVersion: 0.1.0\n")
        files |= {"xformers/__init__.py": LOADED, "xformers/ops/__init__.py": ""}

    assert "'used': {'xformers': 1}" in child(files, "1.1")
