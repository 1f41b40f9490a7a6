"""What the Sage plugins claim, on a CPU: against packages that have the real signatures and the real faults.

The stand-ins let padded keys into the softmax, write into the caller's keys, cast values to float16, and so on; what
the plugin admits must come out right all the same.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
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
from fuseboard_sage import _one, _two, sage, sage3
from fuseboard_sdpa import _cost as sdpa_cost

HERE = Path(__file__).parent / "stand_ins"
CPU = torch.device("cpu")
SITE = fb.Site("tests.sage")
EXACT_SITE = fb.Site("tests.sage.exact", approx_ok=False)
HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32


def stand_in(folder: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"stand_in_{folder}", HERE / folder / name / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FIRST, SECOND, THIRD = (
    stand_in("sage1", "sageattention"),
    stand_in("sage2", "sageattention"),
    stand_in("sage3", "sageattn3"),
)


def on_cpu(plugin: ModuleType, limits: fb.Constraints, make: Callable[[torch.device], Any]) -> SimpleNamespace:
    """The plugin's own hooks, but that it runs on the CPU, what it needs is there, and its kernel is a stand-in's."""
    hooks = {name: getattr(plugin, name) for name in ("exactness", "tolerance", "rank", "install_line")}
    changed = {
        "info": lambda: attrs.evolve(plugin.info(), requires={}),
        "constraints": lambda: attrs.evolve(limits, devices={"cpu"}),
        "kernel": make,
    }
    return SimpleNamespace(**hooks, **{name: fb.hookimpl(hook) for name, hook in changed.items()})


BACKENDS = {
    "one": on_cpu(sage, _one.LIMITS, lambda device: _one.One(FIRST, device)),
    "two": on_cpu(sage, _two.LIMITS, lambda device: _two.Two(SECOND, device)),
    "three": on_cpu(sage3, sage3.LIMITS, lambda device: sage3.Three(THIRD.sageattn3_blackwell, device)),
}


@pytest.fixture(autouse=True)
def registry() -> Iterator[Registry]:
    entries = [Entry(name, lambda plugin=plugin: plugin, "stand-ins", "1") for name, plugin in BACKENDS.items()]
    entries += [each for each in installed_entries() if each.name == "sdpa-cpu"]
    with use(Registry(entries, Settings())) as made:
        for each in entries:
            backend = made.resolve(each.name)
            assert backend is not None
            made.verdicts[each.name, "cpu"] = Verdict(ok=True, kernel=backend.load(CPU))
        FIRST.GIVEN.clear()
        SECOND.GIVEN.clear()
        yield made


def draw(*shape: int, dtype: torch.dtype = BRAIN, seed: int = 0, size: float = 1.0, mean: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * size + mean).to(dtype)


def qkv(
    n_q: int = 128, n_k: int = 128, dim: int = 64, heads: int = 4, kv_heads: int = 4, **options: Any
) -> list[Tensor]:
    shapes = [(2, heads, n_q, dim), (2, kv_heads, n_k, dim), (2, kv_heads, n_k, dim)]
    return [draw(*shape, seed=seed, **options) for seed, shape in enumerate(shapes)]


def strict(name: str, q: Tensor, k: Tensor, v: Tensor, site: fb.Site = SITE, **arguments: Any) -> Tensor:
    with fb.bind(fb.policy_for(name, True)):
        return fb.attention(q, k, v, site=site, enable_gqa=True, **arguments)


def refused(name: str, *tensors: Tensor, **arguments: Any) -> set[str]:
    with pytest.raises(fb.RefusedError) as caught:
        strict(name, *tensors, **arguments)
    return {each.rule for each in caught.value.refusals if each.backend == name}


def right(name: str, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> bool:
    before = [each.clone() for each in (q, k, v)]
    out = strict(name, q, k, v, **arguments)
    size = max(1.0, float(v.abs().max()))
    assert out.dtype == q.dtype
    assert all(torch.equal(each, old) for each, old in zip((q, k, v), before, strict=True)), "an input has changed"
    return distance(out, attention_fp64(q, k, v, **arguments)) <= sage.tolerance(q.dtype) * size


def test_the_stand_ins_are_as_faulty_as_the_packages() -> None:
    q, k, v = qkv(65, 65)
    want, before = attention_fp64(q, k, v), k.clone()

    assert distance(FIRST.sageattn(q, k.clone(), v), want) > 0.1  # padded keys take part
    FIRST.sageattn(q, k, v, is_causal=True, attn_mask=3)  # a swallowed mask, and k written
    assert not torch.equal(k, before)
    assert FIRST.sageattn(*qkv(64, 64), is_causal=True).isnan().any()  # a scale read beyond the last
    assert not FIRST.sageattn(*qkv(64, 64)[:2], qkv(64, 64)[2] * 1e5).isfinite().all()
    assert SECOND.sageattn(*qkv(63, 63)).isnan().all()
    assert distance(SECOND.sageattn(*qkv(64, 128), is_causal=True), attention_fp64(*qkv(64, 128))) > 0.1
    assert distance(THIRD.sageattn3_blackwell(*qkv(64, 64), scale=0.01), attention_fp64(*qkv(64, 64))) > 0.1


@pytest.mark.parametrize("name", BACKENDS)
def test_the_self_test_passes_against_the_faulty_package(registry: Registry, name: str) -> None:
    backend = registry.resolve(name)
    assert backend is not None
    registry.verdicts.clear()
    found = verdict(registry, backend, CPU)

    assert (found.ok, found.reason) == (True, "")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dim", [40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_what_is_admitted_is_right_and_all_else_refused(name: str, dim: int, causal: bool, shared: bool) -> None:
    answered = 0
    for n_q, n_k in [
        (1, 1),
        (1, 77),
        (1, 128),
        (63, 63),
        (64, 64),
        (64, 128),
        (65, 65),
        (128, 65),
        (128, 64),
        (200, 200),
    ]:
        tensors = qkv(n_q, n_k, dim, kv_heads=2 if shared else 4)
        try:
            assert right(name, *tensors, causal=causal), (n_q, n_k)
            answered += 1
        except fb.RefusedError as error:
            assert not any(each.rule == "broken" for each in error.refusals), error
    takes = BACKENDS[name].constraints()
    assert bool(answered) == (
        takes.head_dims.admits(dim) and (takes.gqa or not shared) and (bool(takes.causal) or not causal)
    )


@pytest.mark.parametrize("dtype", [HALF, BRAIN, FLOAT])
@pytest.mark.parametrize("causal", [False, True])
def test_the_first_generation_takes_every_dtype(dtype: torch.dtype, causal: bool) -> None:
    assert right("one", *qkv(dtype=dtype), causal=causal)


def test_bottom_right_causality_is_taken_at_equal_lengths_and_not_elsewhere() -> None:
    info = fb.MaskInfo(causal=True)

    for name in ("one", "two"):
        assert right(name, *qkv(100, 100), mask_info=info)
        assert "mask" in refused(name, *qkv(64, 128), mask_info=info)
        assert "mask" in refused(name, *qkv(128, 64), mask_info=info)


@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize("lengths", [(64, 128), (128, 64)])
def test_the_causal_flag_with_unequal_lengths_is_refused(name: str, lengths: tuple[int, int]) -> None:
    assert "causal" in refused(name, *qkv(*lengths), causal=True)


@pytest.mark.parametrize("keys", [1, 63, 65, 77, 100, 129])
def test_keys_that_do_not_fill_a_block_are_refused_unless_causality_hides_the_padding(keys: int) -> None:
    assert refused("one", *qkv(64, keys)) == {"k_length"}
    assert right("one", *qkv(keys, keys), causal=True)


@pytest.mark.parametrize("length", [1, 5, 64, 65, 127, 128, 129, 192, 193, 256])
def test_a_causal_call_never_has_a_block_of_keys_without_a_scale(length: int) -> None:
    tensors = qkv(length, length)

    assert right("one", *tensors, causal=True)
    assert strict("one", *tensors, causal=True).shape == (2, 4, length, 64)


@pytest.mark.parametrize(("capability", "least"), [((8, 9), 64), ((9, 0), 128), ((12, 0), 64)])
def test_the_second_generation_refuses_fewer_keys_than_a_block(capability: tuple[int, int], least: int) -> None:
    call, sizes = fb.describe(*qkv(64, least - 1))
    call = attrs.evolve(call, capability=capability)
    guard = next(each for each in _two.LIMITS.guards if each.rule == "k_length")

    assert not guard.check(call, sizes)
    assert guard.check(call, attrs.evolve(sizes, k_length=least))
    assert refused("two", *qkv(64, 63)) == {"k_length"}


@pytest.mark.parametrize("name", BACKENDS)
def test_masks_of_every_kind_are_refused_where_the_package_would_drop_them(name: str) -> None:
    tensors = qkv()
    keys = torch.arange(128).expand(2, -1) < 100

    assert "mask" in refused(name, *tensors, mask=torch.ones(128, 128, dtype=torch.bool).tril())
    assert "mask" in refused(name, *tensors, mask=draw(128, 128))
    assert "mask" in refused(name, *tensors, mask=draw(128, 128, dtype=FLOAT))
    assert "mask" in refused(name, *tensors, mask_info=fb.MaskInfo(keys, padding="right"))
    assert "mask" in refused(name, *tensors, mask_info=fb.MaskInfo(window=7))


@pytest.mark.parametrize("name", BACKENDS)
def test_no_argument_is_passed_that_the_package_would_swallow(name: str) -> None:
    strict(name, *qkv())

    assert all(set(given) == {"smooth_k", "is_causal"} and not given["smooth_k"] for given in FIRST.GIVEN)
    assert all(set(given) == {"is_causal"} for given in SECOND.GIVEN)


@pytest.mark.parametrize("name", BACKENDS)
def test_dropout_gradients_zero_sizes_and_scales_not_above_zero_are_refused(name: str) -> None:
    q, k, v = qkv()

    assert "dropout" in refused(name, q, k, v, dropout_p=0.5)
    assert "gradient" in refused(name, q, k.clone().requires_grad_(), v)
    assert "empty" in refused(name, q[:, :, :0], k, v)
    assert "empty" in refused(name, q, k[:, :, :0], v[:, :, :0])
    assert "scale" in refused(name, q, k, v, scale=-0.1)
    assert "scale" in refused(name, q, k, v, scale=0.0)


@pytest.mark.parametrize("name", ["one", "two"])
def test_scales_are_honoured_up_to_where_quantised_scores_are_too_coarse(name: str) -> None:
    q, k, v = qkv()

    assert right(name, q, k, v, scale=0.01)
    assert right(name, q, k, v, scale=0.125)
    assert right(name, q, k, v, scale=0.17)
    assert distance(strict(name, q, k, v, scale=0.17), attention_fp64(q, k, v, scale=0.125)) > 0.1
    assert refused(name, q, k, v, scale=0.5) == {"declined"}


def test_the_third_generation_takes_its_own_scale_alone() -> None:
    tensors = qkv()

    assert right("three", *tensors, scale=0.125)
    assert refused("three", *tensors, scale=0.1) == {"declined"}


def test_the_third_generation_takes_no_shared_heads_no_causality_and_whole_blocks_of_keys() -> None:
    assert "gqa" in refused("three", *qkv(kv_heads=2))
    assert "causal" in refused("three", *qkv(), causal=True)
    assert "mask" in refused("three", *qkv(), mask_info=fb.MaskInfo(causal=True))
    assert refused("three", *qkv(64, 64)) == {"k_length"}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_keys_are_never_written_whatever_they_are(name: str, mean: float) -> None:
    q, k, v = qkv()
    k = draw(2, 4, 128, 64, seed=1, mean=mean)
    version, bits = k._version, k.clone()
    for _ in range(3):
        strict(name, q, k, v)
    expanded = k[:1].expand(2, -1, -1, -1)
    leaf = k.clone().requires_grad_()
    with torch.no_grad():
        same = strict(name, q, leaf, v)

    assert (k._version, torch.equal(k, bits)) == (version, True)
    assert torch.equal(same, strict(name, q, k, v))
    assert right(name, q, expanded, v)


@pytest.mark.parametrize("name", BACKENDS)
def test_any_layout_is_taken(name: str) -> None:
    q, k, v = qkv()
    strided = [each.transpose(2, 3).contiguous().transpose(2, 3) for each in (q, k, v)]
    tokens_first = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (q, k, v)]

    assert right(name, *strided)
    assert right(name, *tokens_first)
    assert right(name, q[:1, :1].expand(2, 4, -1, -1), k[:, :1].expand(-1, 4, -1, -1), v[:, :1].expand(-1, 4, -1, -1))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("size", [1e30, 1e9, 1e5, 3e4, 1.0, 1e-6, 1e-20])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_values_beyond_what_float16_holds_are_right(name: str, size: float, kv_heads: int) -> None:
    if kv_heads == 2 and name == "three":
        pytest.skip("it takes no shared heads")
    q, k, v = qkv(kv_heads=kv_heads)
    v = (v.float() * size).to(BRAIN)
    v[:, 0] *= 1e-3  # each head by itself
    want = attention_fp64(q, k, v)
    got = strict(name, q, k, v)
    error = (
        (got.double() - want).abs() / v.double().abs().amax((2, 3), keepdim=True).repeat_interleave(4 // kv_heads, 1)
    ).max()

    assert error < 0.03


@pytest.mark.parametrize("size", [20_000.0, 65_504.0, 1e-6])
def test_float16_values_whose_sum_float16_does_not_hold_are_right(size: float) -> None:
    q, k, v = qkv(dtype=HALF)
    v = (v.clamp(-2, 2) / 2 * size).half()
    error = (strict("one", q, k, v).double() - attention_fp64(q, k, v)).abs().max() / size

    assert error < (0.03 if size > 1 else 0.06)  # there the format itself has few digits left


@pytest.mark.parametrize("dtype", [HALF, BRAIN, FLOAT])
@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_values_that_are_not_finite_give_no_plausible_number(dtype: torch.dtype, number: float) -> None:
    q, k, v = qkv(dtype=dtype)
    v[0, 0, 3, 5] = number
    out = strict("one", q, k, v)

    assert not out[0, 0, :, 5].isfinite().any()
    assert out[1].isfinite().all()


def test_float16_keys_whose_distance_float16_does_not_hold_are_right() -> None:
    q, k, v = qkv(dtype=HALF)
    k = k.clone()
    k[..., 0] = 60_000.0
    k[:, :, 0, 0] = -60_000.0
    q = q.clone()
    q[..., 0] = 0.0

    assert strict("one", q, k, v).isfinite().all()


def test_values_that_are_all_zero_give_zeros() -> None:
    q, k, v = qkv()

    assert not strict("one", q, k, torch.zeros_like(v)).any()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("shape", "rule"), [((65536, 1, 128, 64), "batch"), ((1, 65536, 128, 64), "heads")])
def test_more_than_65535_rows_or_heads_are_refused(name: str, shape: tuple[int, ...], rule: str) -> None:
    tensors = [torch.zeros(1, 1, 1, 64, dtype=BRAIN).expand(shape)] * 3

    assert rule in refused(name, *tensors)


def test_at_head_dim_96_rows_and_heads_share_one_axis_of_the_grid() -> None:
    tensors = [torch.zeros(1, 1, 1, 96, dtype=BRAIN).expand(300, 300, 64, 96)] * 3

    assert refused("one", *tensors) == {"batch * heads"}


def test_offsets_of_more_than_32_bits_are_refused() -> None:
    q = torch.zeros(1, 1, 1, 128, dtype=BRAIN).expand(2, 4, 2**21, 128)

    assert "offsets" in refused("one", q, q, q)


def test_the_devices_of_the_second_generation_are_listed_and_what_was_not_built_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(sage, "GENERATION", 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (10, 0))
    assert sage.probe(cuda) == (
        "sageattention 2 has kernels for compute capability 8.0, 8.6, 8.9, 9.0, 12.0, 12.1, cuda:0 has 10.0"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    assert sage.probe(cuda) is None
    monkeypatch.setitem(sys.modules, "built_for_others", SECOND)
    monkeypatch.setitem(sys.modules, "built_for_others.core", SimpleNamespace(SM90_ENABLED=False))
    monkeypatch.setattr(SECOND, "__name__", "built_for_others")
    with pytest.raises(ImportError, match=r"built without kernels for 9\.0; rebuild with TORCH_CUDA_ARCH_LIST=9\.0"):
        _two.Two(SECOND, cuda)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_current_device_is_the_tensors_own_while_it_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[object] = []

    class Recorder:
        def __init__(self, device: object) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *_: object) -> None:
            entered.append("left")

    kernel = BACKENDS[name].kernel(CPU)
    kernel._device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device", Recorder)
    kernel(*qkv(), mask=None, mask_info=None, causal=False, scale=None, dropout_p=0.0)

    assert entered == [torch.device("cuda", 1), "left"]


def test_a_site_that_takes_only_exact_backends_gets_one_and_the_run_says_so() -> None:
    q, k, v = qkv()
    run = fb.Run()
    with fb.bind("one", run=run):
        out = fb.attention(q, k, v, site=EXACT_SITE)
    report = run.report()["attention"]

    assert distance(out, attention_fp64(q, k, v)) < 1.6e-2
    assert report["used"] == {"sdpa-cpu": 1}
    assert report["fallbacks"]["one→sdpa-cpu"] == {"site refuses approximate backends": 1}
    assert "site" in refused("one", q, k, v, site=EXACT_SITE)


@pytest.mark.parametrize("sizes", [(2, 24, 4096, 4096, 128), (1, 16, 1024, 1024, 64), (8, 32, 1, 4096, 128)])
def test_on_hopper_it_comes_after_the_kernels_inside_torch(sizes: tuple[int, ...]) -> None:
    batch, heads, n_q, n_k, dim = sizes
    rows = [torch.zeros(1, 1, 1, 1, dtype=BRAIN).expand(batch, heads, n, dim) for n in (n_q, n_k, n_k)]
    call, exact = fb.describe(*rows)
    call = attrs.evolve(call, device_type="cuda", device_index=0, capability=(9, 0))
    inside = (sdpa_cost.cudnn(call, exact, dense=False), sdpa_cost.flash(call, exact))

    assert sage.rank(call, exact) > max(inside)


# ---- packages that are absent, broken or of another version: in interpreters of their own


@pytest.fixture
def child(host: Callable[..., str]) -> Callable[..., str]:
    """What a host prints beside a package of this source, or in this folder."""

    def run(source: str | Path | None, version: str = "1.0.6", plugin: str = "sage", **environ: str) -> str:
        package = "sageattn3" if plugin == "sage3" else "sageattention"
        files = {f"{package}/__init__.py": source} if isinstance(source, str) else source
        return host(f"fuseboard_sage.{plugin}", package, version, files, **environ)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "version", "reason"),
    [
        (None, "", "sageattention is not installed. Install it: pip install --no-deps sageattention==1.0.6"),
        ("raise ImportError('undefined symbol: _ZN3c10')", "1.0.6", "ImportError: undefined symbol: _ZN3c10"),
        ("raise OSError('libcudart.so.12: cannot open')", "1.0.6", "OSError: libcudart.so.12: cannot open"),
        ("", "1.0.6", "AttributeError"),
        ("import torch; torch.no_such_thing", "1.0.6", "AttributeError"),
        ("import sys; sys.exit(3)", "1.0.6", "sys.exit(3)"),
        ("def sageattn(): pass", "1.0.5", "sageattention is 1.0.5, needed >=1.0.6,<3"),
        ("def sageattn(): pass", "3.0.0", "sageattention is 3.0.0, needed >=1.0.6,<3"),
        ("def sageattn(): pass", "2.2.0", "the metadata of sageattention says version 2.x and the module is another"),
        ("def sageattn_qk_int8_pv_fp16_cuda(): pass", "1.0.6", "says version 1.x and the module is another"),
        ("def sageattn(*_, **__): raise RuntimeError('no kernel image')", "1.0.6", "no kernel image"),
        ("def sageattn(q, k, v, **_): return q", "1.0.6", "self-test"),
    ],
)  # fmt: skip
def test_a_package_that_is_absent_or_broken_is_a_reason_and_harms_nobody(
    child: Callable[..., str], source: str | None, version: str, reason: str
) -> None:
    said = child(source, version)

    assert reason in said
    assert "'used': {'sdpa-cpu': 1}" in said


@pytest.mark.slow
def test_an_import_that_hangs_is_a_reason(child: Callable[..., str]) -> None:
    said = child("import threading; threading.Event().wait(60)", FUSEBOARD_PROBE_TIMEOUT="5")

    assert "did not end within 5 s" in said
    assert "'used': {'sdpa-cpu': 1}" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "version", "plugin"),
    [("sage1", "1.0.6", "sage"), ("sage2", "2.2.0", "sage"), ("sage3", "1.0.0", "sage3")],
)
def test_each_generation_is_told_by_its_metadata_and_used(
    child: Callable[..., str], folder: str, version: str, plugin: str
) -> None:
    assert f"'used': {{'{plugin}': 1}}" in child(HERE / folder, version, plugin)


@pytest.mark.slow
def test_the_third_generation_without_its_function_is_a_reason(child: Callable[..., str]) -> None:
    assert "AttributeError" in child("", "1.0.0", "sage3")
    assert "pip install" in sage3.install_line()
