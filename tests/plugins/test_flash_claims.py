"""fuseboard-flash on the CPU: what it claims against stand-ins, what it says of packages that cannot be used."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
from torch import Tensor

import fuseboard as fb
from fuseboard.probe import verdict
from fuseboard.registry import Entry, Registry, use
from fuseboard.selftest import attention_fp64
from fuseboard.settings import Settings

HERE = Path(__file__).parent
MODULES = {"flash": "flash2", "flash3": "flash3", "flash4": "flash4"}
CLASSES = {"flash": "Flash2", "flash3": "Flash3", "flash4": "Flash4"}
NAMES = tuple(MODULES)
CPU = torch.device("cpu")
SITE = fb.Site("tests.flash")
HALF = torch.float16


def _loaded(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stand_in = _loaded(HERE / "flash_stand_in.py")


def module_of(name: str) -> object:
    return importlib.import_module(f"fuseboard_flash.{MODULES[name]}")


def on_cpu(name: str, **replaced: object) -> Entry:
    """The plugin as it is, but that its limits name the CPU, and that these hooks are others."""
    module = module_of(name)
    hooks = {each: value for each, value in vars(module).items() if hasattr(value, "fuseboard_impl")}
    limits = attrs.evolve(module.LIMITS, devices={"cpu"}, capability=None)
    hooks |= {"constraints": fb.hookimpl(lambda: limits)}
    hooks |= {each: fb.hookimpl(value) for each, value in replaced.items()}
    return Entry(name, lambda: SimpleNamespace(**hooks), "fuseboard-flash", "0.1.0")


class Board:
    """A registry of one backend over its stand-in."""

    def __init__(self, name: str, variant: str | None = None) -> None:
        self.name = name
        self.package = stand_in.package(variant or name)
        made = getattr(module_of(name), CLASSES[name])(self.package)
        self.registry = Registry(
            [
                on_cpu(
                    name,
                    kernel=lambda: made,
                    probe=lambda: None,
                    info=lambda: fb.BackendInfo("x"),
                    known_bad=lambda: (),
                )
            ],
            Settings(),
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **given: object) -> Tensor:
        with use(self.registry), fb.bind(fb.policy_for(self.name, True)):
            self.probed()
            self.package.calls.clear()
            return fb.attention(q, k, v, site=SITE, enable_gqa=True, **given)

    def probed(self) -> object:
        return verdict(self.registry, self.registry.resolve(self.name), CPU)

    def refused(self, *tensors: Tensor, **given: object) -> list[fb.Refusal]:
        with pytest.raises(fb.RefusedError) as caught:
            self(*tensors, **given)
        return list(caught.value.refusals)

    @property
    def called(self) -> list[str]:
        return [each for each, _ in self.package.calls]


@pytest.fixture(scope="module")
def boards() -> dict[str, Board]:
    return {name: Board(name) for name in NAMES} | {"flash 2.6.0": Board("flash", "flash 2.6.0")}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = HALF, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def qkv(
    n_q: int, n_k: int, *, batch: int = 3, heads: int = 4, kv_heads: int = 2, dim: int = 16, v_dim: int | None = None,
    grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        draw(batch, heads, n_q, dim, seed=1, grad=grad),
        draw(batch, kv_heads, n_k, dim, seed=2, grad=grad),
        draw(batch, kv_heads, n_k, v_dim or dim, seed=3, grad=grad),
    )


def keys_of(kind: str, n_k: int) -> Tensor | None:
    """Three rows: all real, some, none."""
    place, real = torch.arange(n_k), torch.tensor([[n_k], [max(n_k // 3, 1)], [0]])
    return {
        "none": None, "right": place < real, "left": place >= n_k - real, "any": (place % 3 != 1) & (real > 0),
    }[kind]  # fmt: skip


def info_of(
    kind: str, n_k: int, causal: bool = False, window: int | None = None, ahead: int | None = None
) -> fb.MaskInfo:
    return fb.MaskInfo(keys_of(kind, n_k), causal, window, kind if kind in ("right", "left") else None, ahead)


def admitted(name: str, info: fb.MaskInfo, n_q: int, n_k: int, *, grad: bool) -> bool:
    """By the words of the README."""
    structure = info.structure(n_q, n_k)
    keys, causal, bounded = structure.keys, structure.causal, structure.window or structure.ahead
    if bounded and not causal and n_q > n_k and name != "flash4":
        return False
    if name == "flash4" and structure.ahead and not structure.window:
        return False
    if keys == "right":
        return not bounded and (not causal or name != "flash4")
    if keys == "any":
        return not bounded and not causal and name != "flash4"
    return not (keys == "left" and bounded and not causal and name == "flash3")


@pytest.mark.parametrize("name", NAMES)
def test_the_self_test_passes_against_the_stand_in(name: str, boards: dict[str, Board]) -> None:
    assert boards[name].probed().reason == ""


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("lengths", [(1, 37), (37, 37), (20, 37), (37, 20), (1, 1)])
@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "right", "left", "any"])
@pytest.mark.parametrize("name", [*NAMES, "flash 2.6.0"])
def test_every_structure_is_right_or_refused_as_the_readme_says(
    name: str, kind: str, causal: bool, window: int | None, lengths: tuple[int, int], grad: bool, boards
) -> None:
    is_right_or_refused(boards[name], name, info_of(kind, lengths[1], causal, window), lengths, grad)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("lengths", [(37, 37), (20, 37), (37, 10)])
@pytest.mark.parametrize("bounds", [(None, 0), (None, 4), (9, 4), (1, 30), (36, 18)], ids=str)
@pytest.mark.parametrize("kind", ["none", "right", "left", "any"])
@pytest.mark.parametrize("name", [*NAMES, "flash 2.6.0"])
def test_every_bound_ahead_is_right_or_refused_as_the_readme_says(
    name: str, kind: str, bounds: tuple[int | None, int], lengths: tuple[int, int], grad: bool, boards
) -> None:
    window, ahead = bounds
    is_right_or_refused(boards[name], name, info_of(kind, lengths[1], False, window, ahead), lengths, grad)


def is_right_or_refused(board: Board, name: str, info: fb.MaskInfo, lengths: tuple[int, int], grad: bool) -> None:
    n_q, n_k = lengths
    q, k, v = qkv(n_q, n_k, grad=grad)
    if not admitted(name, info, n_q, n_k, grad=grad):
        assert {each.rule for each in board.refused(q, k, v, mask_info=info)} == {"mask"}
        return
    given = (q, k, v)
    if info.keys is not None:  # a real key is all that may be read
        hidden = ~info.keys[:, None, :, None]
        given = (q, *(each.detach().masked_fill(hidden, torch.nan).requires_grad_(grad) for each in (k, v)))
    out = board(*given, mask_info=info)
    exact = [each.detach().double().requires_grad_(grad) for each in (q, k, v)]
    want = attention_fp64(*exact, mask_info=info)

    assert out.shape == want.shape
    assert torch.allclose(out.detach().double(), want.detach(), atol=2e-3)
    if grad:
        seed = draw(*want.shape, seed=9)
        got = torch.autograd.grad(out, given, seed)
        for mine, right in zip(got, torch.autograd.grad(want, exact, seed.double()), strict=True):
            assert torch.allclose(mine.double(), right, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("lengths", [(37, 37), (20, 37), (1, 5)])
@pytest.mark.parametrize("name", NAMES)
def test_the_top_left_flag_is_exact_with_equal_lengths_and_with_fewer_queries(
    name: str, lengths: tuple[int, int], grad: bool, boards
) -> None:
    q, k, v = qkv(*lengths, grad=grad)
    out = boards[name](q, k, v, causal=True)
    want = attention_fp64(q, k, v, causal=True)

    assert torch.allclose(out.double(), want, atol=2e-3)
    if grad:
        got = torch.autograd.grad(out.sum(), (q, k, v))
        for mine, right in zip(got, torch.autograd.grad(want.sum(), (q, k, v)), strict=True):
            assert torch.allclose(mine, right, atol=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_the_top_left_flag_is_refused_with_more_queries(name: str, boards) -> None:
    assert [each.rule for each in boards[name].refused(*qkv(37, 20), causal=True)] == ["causal"]


@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("dims", [(1, 1), (5, 5), (72, 72), (16, 40), (40, 16), (129, 129)])
@pytest.mark.parametrize("name", NAMES)
def test_head_dims_are_padded_and_the_scale_is_that_of_the_true_one(
    name: str, dims: tuple[int, int], kind: str, boards
) -> None:
    q, k, v = qkv(9, 17, dim=dims[0], v_dim=dims[1], grad=True)
    info = info_of(kind, 17, causal=True)
    out = boards[name](q, k, v, mask_info=info)
    want = attention_fp64(q, k, v, mask_info=info)

    assert torch.allclose(out.double(), want, atol=3e-3)
    for mine, right in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(want.sum(), (q, k, v)), strict=True
    ):
        assert mine.shape == right.shape
        assert torch.allclose(mine, right, atol=1e-2, rtol=1e-2)
    with torch.no_grad():
        assert torch.allclose(boards[name](q, k, v, mask_info=info).double(), want, atol=3e-3)


@pytest.mark.parametrize("name", NAMES)
def test_any_layout_is_taken_and_a_custom_scale_is_used(name: str, boards) -> None:
    q, k, v = qkv(9, 17)
    layouts = (
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: torch.stack((t, t), -1)[..., 0],
        lambda t: torch.cat((t.new_zeros(1), t.reshape(-1)))[1:].view(t.shape),
        lambda t: torch.nn.functional.pad(t, (0, 3))[..., :16],
    )
    want = attention_fp64(q, k, v, scale=0.7)

    for laid_out in layouts:
        out = boards[name](laid_out(q), laid_out(k), laid_out(v), scale=0.7)
        assert torch.allclose(out.double(), want, atol=2e-3)


@pytest.mark.parametrize("name", ["flash", "flash3"])
def test_a_decode_step_over_a_growing_cache_copies_nothing(name: str, boards) -> None:
    cache = draw(2, 2, 64, 16)
    q = draw(2, 8, 1, 16)
    for length in (30, 31, 32):
        boards[name](q, cache[:, :, :length], cache[:, :, :length], mask_info=fb.MaskInfo(causal=True))
        called, tensors = boards[name].package.calls[0]

        assert called == "cached"
        assert [each.data_ptr() for each in tensors] == [q.data_ptr(), cache.data_ptr(), cache.data_ptr()]


@pytest.mark.parametrize("kind", ["right", "left"])
def test_padded_keys_without_a_gradient_are_not_gathered(kind: str, boards) -> None:
    q, k, v = qkv(9, 17)
    boards["flash"](q, k, v, mask_info=info_of(kind, 17))

    assert boards["flash"].called == ["cached"]
    assert boards["flash"].package.calls[0][1][1].data_ptr() == k.data_ptr()


def test_packing_keeps_room_for_all_keys_so_that_no_size_is_asked_of_the_device(boards) -> None:
    q, k, v = qkv(9, 17, grad=True)
    boards["flash"](q, k, v, mask_info=info_of("right", 17))

    assert boards["flash"].called == ["varlen"]
    assert boards["flash"].package.calls[0][1][1].shape[0] == 3 * 17


def test_what_is_derived_of_one_mask_is_made_once_for_all_layers(boards, monkeypatch) -> None:
    q, k, v = qkv(9, 17, grad=True)
    info, asked = info_of("left", 17, causal=True), []
    monkeypatch.setattr(
        Tensor, "argsort", lambda self, argsort=Tensor.argsort, **given: asked.append(1) or argsort(self, **given)
    )
    for _ in range(3):
        boards["flash"](q, k, v, mask_info=info)

    assert len(asked) == 1


def test_dropout_reaches_the_kernel_of_flash_with_and_without_padding(boards) -> None:
    q, k, _ = qkv(40, 40)
    v = torch.ones_like(k)
    for info in (None, info_of("left", 40)):
        torch.manual_seed(0)
        out = boards["flash"](q, k, v, dropout_p=0.5, mask_info=info)

        assert out[0].std() > 0.05
        assert abs(out[0].mean() - 1) < 0.1


@pytest.mark.parametrize("kind", ["none", "right", "left"])
def test_the_backward_of_dropout_drops_what_the_forward_dropped(kind: str, boards) -> None:
    q, k, v = qkv(20, 20, grad=True)
    out = boards["flash"](q, k, v, dropout_p=0.5, mask_info=info_of(kind, 20, causal=True))
    seed = draw(*out.shape, seed=9)
    (got,) = torch.autograd.grad(out, v, seed)

    # The output is linear in v, so that both are the same sum.
    assert torch.allclose((got.float() * v.float()).sum(), (out.float() * seed.float()).sum(), rtol=1e-2, atol=0.5)


def test_an_input_is_never_changed(boards) -> None:
    q, k, v = qkv(9, 17)
    before = [each.clone() for each in (q, k, v)]
    for name in NAMES:
        boards[name](q, k, v, mask_info=info_of("left", 17, causal=True))

    assert all(torch.equal(now, then) for now, then in zip((q, k, v), before, strict=True))


@pytest.mark.parametrize(
    ("name", "given", "rule"),
    [
        *[(name, {"mask": torch.ones(9, 17, dtype=torch.bool)}, "mask") for name in NAMES],
        *[(name, {"scale": -0.5}, "scale") for name in NAMES],
        *[(name, {"scale": 0.0}, "scale") for name in NAMES],
        ("flash3", {"dropout_p": 0.1}, "dropout"),
        ("flash4", {"dropout_p": 0.1}, "dropout"),
    ],
)
def test_what_a_kernel_lacks_is_refused_with_its_rule(name: str, given: dict[str, object], rule: str, boards) -> None:
    assert [each.rule for each in boards[name].refused(*qkv(9, 17), **given)] == [rule]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        ((65536, 1, 2, 16), "batch"),
        ((1, 65536, 2, 16), "heads"),
        ((0, 2, 4, 16), "empty"),
        ((2, 2, 0, 16), "empty"),
        ((1, 1, 4, 257), "head_dim"),
    ],
)
def test_sizes_beyond_the_kernels_are_refused_and_not_launched(
    name: str, shape: tuple[int, ...], rule: str, boards
) -> None:
    q = torch.zeros(shape, dtype=HALF)

    assert rule in {each.rule for each in boards[name].refused(q, q, q)}
    assert not boards[name].called


@pytest.mark.parametrize("name", NAMES)
def test_65535_rows_are_taken(name: str, boards) -> None:
    q = torch.ones(65535, 1, 1, 8, dtype=HALF)

    assert torch.equal(boards[name](q, q, q), q)


@pytest.mark.parametrize("name", NAMES)
def test_float32_is_refused(name: str, boards) -> None:
    q = torch.ones(1, 2, 4, 16)

    assert [each.rule for each in boards[name].refused(q, q, q)] == ["dtype"]


@pytest.mark.parametrize("name", NAMES)
def test_a_backward_with_more_than_two_to_the_31_accumulators_is_refused(name: str) -> None:
    q = torch.empty(64, 64, 4096, 256, dtype=HALF, device="meta").requires_grad_()
    call, sizes = fb.describe(q, q, q)
    refusing = [each.rule for each in module_of(name).LIMITS.guards if not each.check(call, sizes)]

    assert "backward size" in refusing
    with torch.no_grad():
        call, sizes = fb.describe(q, q, q)
    refusing = [each.rule for each in module_of(name).LIMITS.guards if not each.check(call, sizes)]
    assert refusing == (["tensor size"] if name == "flash4" else [])


def call_of(capability: tuple[int, int], **given: object) -> fb.Call:
    return fb.Call("cuda", 0, capability, HALF, **({"head_dim": 64, "v_head_dim": 64} | given))


def bad_at(name: str, call: fb.Call) -> list[str]:
    return [each.effect for each in module_of(name).known_bad() if each.call is None or each.call(call)]


def test_flash_attn_2_6_is_known_to_refuse_newer_gpus(monkeypatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "2.6.3")

    assert bad_at("flash", call_of((12, 0)))
    assert not bad_at("flash", call_of((9, 0)))
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "2.8.3.post2")
    assert not bad_at("flash", call_of((12, 0)))


def test_flash_has_no_backward_at_some_head_dims_of_consumer_gpus() -> None:
    assert bad_at("flash", call_of((8, 9), head_dim=208, v_head_dim=208, grad=True))
    assert bad_at("flash", call_of((8, 6), head_dim=256, v_head_dim=256, grad=True, dropout=True))
    assert not bad_at("flash", call_of((8, 6), head_dim=256, v_head_dim=256, grad=True))
    assert not bad_at("flash", call_of((9, 0), head_dim=208, v_head_dim=208, grad=True))


def test_flash4_is_not_used_where_it_was_wrong_or_does_not_fit() -> None:
    assert bad_at("flash4", call_of((12, 0)))
    assert bad_at("flash4", call_of((8, 9), head_dim=256, v_head_dim=256))
    assert not bad_at("flash4", call_of((8, 9), head_dim=128, v_head_dim=128))
    assert not bad_at("flash4", call_of((9, 0), head_dim=256, v_head_dim=256))


@pytest.mark.parametrize(
    ("capability", "dim", "fits"),
    [((10, 0), 16, False), ((10, 0), 128, True), ((10, 0), 192, False), ((11, 0), 256, True), ((9, 0), 8, True)],
)
def test_head_dims_of_flash4_depend_on_the_gpu(capability: tuple[int, int], dim: int, fits: bool) -> None:
    q = torch.empty(1, 1, 4, dim, dtype=HALF, device="meta")
    sizes = fb.describe(q, q, q)[1]
    guards = {each.rule: each for each in module_of("flash4").LIMITS.guards}

    assert guards["head_dim"].check(call_of(capability, head_dim=dim, v_head_dim=dim), sizes) is fits


def test_flash4_has_no_backward_before_compute_capability_9() -> None:
    q = torch.empty(1, 1, 4, 64, dtype=HALF, device="meta")
    guards = {each.rule: each for each in module_of("flash4").LIMITS.guards}

    assert not guards["gradient"].check(call_of((8, 0), grad=True), fb.describe(q, q, q)[1])
    assert guards["gradient"].check(call_of((8, 0)), fb.describe(q, q, q)[1])


@pytest.mark.parametrize("name", NAMES)
def test_ranks_are_positive_and_grow_with_the_work(name: str) -> None:
    rank = module_of(name).rank
    small, large = (torch.empty(2, 8, n, 128, dtype=HALF, device="meta") for n in (64, 16384))
    ranks = [rank(*fb.describe(each, each, each)) for each in (small, large)]
    windowed = rank(*fb.describe(large, large, large, mask_info=fb.MaskInfo(causal=True, window=64)))

    assert 0 < ranks[0] < windowed < ranks[1]


@pytest.mark.parametrize("name", NAMES)
def test_the_install_line_keeps_the_installed_torch_and_names_the_range(name: str) -> None:
    module = module_of(name)
    line = module.install_line("2.13.0")

    assert "--no-deps" in line
    assert all(versions in line for package, versions in module.info().requires.items() if package != "flash-attn-3")


# ---- packages that cannot be used


DISTRIBUTIONS = {
    "flash": ("flash-attn", "2.8.3"),
    "flash3": ("flash-attn-3", "3.0.0b1"),
    "flash4": ("flash-attn-4", "4.0.0b36"),
}
FILES = {
    "flash": "flash_attn/__init__.py",
    "flash3": "flash_attn_interface.py",
    "flash4": "flash_attn/cute/__init__.py",
}
SIGNATURES = """
def flash_attn_func(
    q, learnable_sink=None, return_lse=False,
):
    pass


def flash_attn_varlen_func(
    q, seqused_k=None, return_lse=False,
):
    pass
"""


class Fakes:
    """A folder, first on the path, of fake packages with metadata."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def metadata(self, distribution: str, version: str | None) -> None:
        made = self.folder / f"{distribution.replace('-', '_')}-1.dist-info"
        made.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {distribution}"] + ([f"Version: {version}"] if version else [])
        (made / "METADATA").write_text("\n".join(lines) + "\n")

    def module(self, file: str, text: str = "") -> None:
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def package(self, name: str, text: str) -> None:
        """A whole package of `name`'s, whose import runs `text`, and all that its probe looks for."""
        self.metadata(*DISTRIBUTIONS[name])
        self.module(FILES[name], text)
        for each in ("einops", "cutlass", "quack", "tvm_ffi"):
            self.module(f"{each}.py")
        if name == "flash4":
            self.module("flash_attn/cute/interface.py", SIGNATURES)


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch) -> Fakes:
    ours = ("flash_attn", "flash_attn_interface", "einops", "cutlass", "quack", "tvm_ffi")
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ours}
    for name in kept:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Fakes(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]


def reason_of(name: str, timeout: float = 300.0) -> tuple[str, str]:
    """The probe's reason and stage; and a call by `fast` must be answered all the same."""
    importlib.invalidate_caches()
    registry = Registry([on_cpu(name)], Settings(probe_timeout=timeout))
    q = draw(1, 2, 4, 16)
    with use(registry):
        with fb.bind("fast"):
            assert torch.equal(
                fb.attention(q, q, q, site=SITE), torch.nn.functional.scaled_dot_product_attention(q, q, q)
            )
        found = verdict(registry, registry.resolve(name), CPU)
        assert not found.ok
        with fb.bind(fb.policy_for(name, True)), pytest.raises(fb.RefusedError) as caught:
            fb.attention(q, q, q, site=SITE)
        assert found.reason in str(caught.value)
    return found.reason, found.stage


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "error", ["ImportError('no luck')", "OSError('no luck')", "AttributeError('no luck')", "RuntimeError('no luck')"]
)
def test_a_package_that_raises_at_import_is_a_reason_and_harms_nobody(name: str, error: str, fakes: Fakes) -> None:
    fakes.package(name, f"raise {error}\n")

    assert reason_of(name) == (f"import failed: {error.partition('(')[0]}: no luck", "import")


@pytest.mark.parametrize("name", NAMES)
def test_a_package_without_its_functions_is_a_reason(name: str, fakes: Fakes) -> None:
    fakes.package(name, "")
    reason, stage = reason_of(name)

    assert stage == "import"
    assert "flash_attn_func" in reason


@pytest.mark.parametrize("name", NAMES)
def test_a_package_that_hangs_at_import_is_a_reason_after_a_while(name: str, fakes: Fakes) -> None:
    gate = threading.Event()
    sys.modules["fuseboard_tests_gate"] = SimpleNamespace(gate=gate)
    fakes.package(name, "from fuseboard_tests_gate import gate\n\ngate.wait(60)\nraise ImportError('late')\n")
    try:
        assert reason_of(name, timeout=0.2)[1] == "time limit"
    finally:
        gate.set()
        for each in threading.enumerate():
            if each.name.startswith("fuseboard-probe"):
                each.join()
        del sys.modules["fuseboard_tests_gate"]


@pytest.mark.parametrize(
    ("name", "version"),
    [("flash", "2.5.9"), ("flash", "3.0"), ("flash3", "2.9"), ("flash4", "4.0.0b12"), ("flash4", "5")],
)
def test_a_version_out_of_range_is_a_reason_and_nothing_is_imported(name: str, version: str, fakes: Fakes) -> None:
    distribution = DISTRIBUTIONS[name][0]
    fakes.metadata(distribution, version)
    fakes.module(FILES[name], "raise SystemExit('imported')")

    assert reason_of(name) == (f"{distribution} is {version}, needed {module_of(name).RANGE}", "version")


def test_a_package_without_a_version_is_a_reason(fakes: Fakes) -> None:
    fakes.metadata("flash-attn", None)

    assert reason_of("flash") == ("flash-attn is installed without a readable version, needed >=2.6,<3", "version")


@pytest.mark.parametrize("name", NAMES)
def test_an_absent_package_is_a_reason_with_the_install_line(name: str, fakes: Fakes) -> None:
    distribution = DISTRIBUTIONS[name][0]
    if importlib.util.find_spec("flash_attn") or importlib.util.find_spec("flash_attn_interface"):
        pytest.skip("a real flash-attn is installed")
    expected = f"{distribution} is not installed. Install it: {module_of(name).install_line('')}"

    assert reason_of(name) == (expected, "version")


def test_an_empty_namespace_where_only_flash_attn_4_lies_is_a_reason(fakes: Fakes) -> None:
    fakes.metadata("flash-attn", "2.8.3")
    fakes.module("flash_attn/cute/__init__.py")
    reason, stage = reason_of("flash")

    assert stage == "probe"
    assert reason.startswith("flash_attn is an empty namespace: flash-attn's own files are missing")


@pytest.mark.parametrize("name", ["flash3", "flash4"])
def test_metadata_without_files_is_a_reason(name: str, fakes: Fakes) -> None:
    fakes.metadata(*DISTRIBUTIONS[name])
    reason, stage = reason_of(name)

    assert stage == "probe"
    assert "metadata is there, and" in reason


def test_missing_einops_is_a_reason(fakes: Fakes, monkeypatch) -> None:
    fakes.package("flash", "")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "einops" else found(name, *rest)
    )

    assert reason_of("flash") == (
        "flash-attn imports einops, which is not installed: pip install --no-deps einops", "probe"
    )  # fmt: skip


def test_a_build_for_another_torch_is_a_reason_with_what_to_do(fakes: Fakes) -> None:
    fakes.package("flash", "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda')\n")
    reason, _ = reason_of("flash")

    assert "flash-attn was built for another torch (flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda)" in reason
    assert reason.endswith('Build it again: pip install --no-deps --no-build-isolation "flash-attn>=2.6,<3" einops')


def test_a_build_for_another_cuda_is_a_reason_with_what_to_do(fakes: Fakes) -> None:
    fakes.package("flash", "raise ImportError('libcudart.so.12: cannot open shared object file')\n")

    assert "flash-attn was built for another CUDA" in reason_of("flash")[0]


def test_a_build_without_kernels_for_this_gpu_is_a_reason_with_what_to_do(fakes: Fakes) -> None:
    text = """
        def flash_attn_func(*given, **named):
            raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

        flash_attn_varlen_func = flash_attn_with_kvcache = flash_attn_func
        """
    fakes.package("flash", text)

    assert "flash-attn was built without kernels for this GPU (no kernel image)" in reason_of("flash")[0]


def test_flash_attn_2_over_flash_attn_4_in_one_folder_is_a_reason(fakes: Fakes) -> None:
    fakes.package("flash4", "raise SystemExit('imported')")
    fakes.metadata("flash-attn", "2.8.3")
    fakes.module("flash_attn/cute/interface.py", "def flash_attn_func(\n    q, learnable_sink=None,\n):\n    pass\n")
    # A first line of their own, as in a file that starts with imports.
    path = fakes.folder / "flash_attn/cute/interface.py"
    path.write_text("import torch\n\n" + path.read_text())

    assert reason_of("flash4") == (
        "flash_attn/cute has a flash_attn_func without return_lse: flash-attn 2.8.3 has overwritten it. Install "
        "flash-attn-4 again, after flash-attn: pip install --no-deps --force-reinstall 'flash-attn-4>=4.0.0b36,<5'",
        "probe",
    )


def test_an_install_whose_pth_file_was_not_processed_is_a_reason(fakes: Fakes) -> None:
    fakes.package("flash4", "raise SystemExit('imported')")
    fakes.metadata("nvidia-cutlass-dsl", "4.8.1")
    (fakes.folder / "cutlass.py").unlink()
    if importlib.util.find_spec("cutlass"):
        pytest.skip("a real cutlass is installed")
    reason, stage = reason_of("flash4")

    assert stage == "probe"
    assert "its .pth file was not processed" in reason
    assert "nvidia_cutlass_dsl/dsl_packages" in reason


def test_a_missing_dependency_of_flash_attn_4_is_named(fakes: Fakes) -> None:
    fakes.package("flash4", "raise SystemExit('imported')")
    (fakes.folder / "quack.py").unlink()
    if importlib.util.find_spec("quack"):
        pytest.skip("a real quack is installed")

    assert reason_of("flash4")[0].startswith("flash-attn-4 imports quack, which cannot be found. Install: pip install")


CHILD = """
import sys

import fuseboard as fb
import torch
from fuseboard import registry

with fb.bind("fast"):
    q = torch.ones(1, 2, 4, 16, dtype=torch.float16)
    assert fb.attention(q, q, q, site=fb.Site("child")).isfinite().all()
loaded = {backend.name for backend in registry.current().backends()}
assert {"flash", "flash3", "flash4"} <= loaded, loaded
assert not registry.current().faults, registry.current().faults
names = {name.partition(".")[0] for name in sys.modules}
assert not names & {"flash_attn", "flash_attn_interface", "flash_attn_2_cuda", "cutlass"}, names
print("answered")
"""


def test_entry_points_load_and_a_call_is_answered_without_importing_any_kernel_package(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path)
    for file in ("flash_attn/__init__.py", "flash_attn_interface.py"):
        fakes.module(file, "raise SystemExit('imported')")
    for distribution, version in DISTRIBUTIONS.values():
        fakes.metadata(distribution, version)
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.stdout.strip() == "answered", done.stderr
