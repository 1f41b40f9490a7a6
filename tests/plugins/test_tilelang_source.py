"""What TileLang makes of the kernels: CUDA source by its digest, and why the GPU form does not compile for target `c`.

Both are pinned to versions of TileLang; with another one they are skipped, and are to be looked at anew.
"""

from __future__ import annotations

import pytest

from fuseboard_tilelang import (
    _configs,
    _package,
    _tile,
    add_ln_kernel,
    attn_kernel,
    compile_cpu,
    digests,
    gemm_geglu_kernel,
    gemm_kernel,
    rope_kernel,
)
from fuseboard_tilelang import compile as compiling

PINNED = "0.1.15"
KERNELS = {
    "gemm": (gemm_kernel, (128, 64)),
    "geglu": (gemm_geglu_kernel, (64, 64)),
    "add_ln": (add_ln_kernel, (128,)),
    "rope": (rope_kernel, (2, 64)),
    "attn": (attn_kernel, (1, 64, 2, 64)),
}
INTERNAL = "InternalError"
LAYOUT = "layout_map.count(buffer) != 0 (0 vs. 0) : The layout for fragment {} can not be inferred correctly."
FILL = "CPU fill only supports local and global buffers, but got dst scope `local.fragment`."
REDUCE = (
    "CPU reduce only supports local src and local/local.var dst buffers, got src scope `local.fragment` and dst scope "
    "`local.fragment`."
)
BFLOAT16 = "Cannot convert type bfloat16 to C type"
UNDEFINED = "undefined.size() == 0 ({} vs. 0) : In PrimFunc {} variables ({}) are used, but are not passed in as API"


@pytest.fixture(autouse=True, scope="module")
def able() -> None:
    problem = _package.cpu_problem()
    if problem is not None:
        pytest.skip(problem)


@pytest.fixture
def pinned() -> None:
    if _package.version() != PINNED:
        pytest.skip(f"these texts are TileLang {PINNED}'s, installed is {_package.version()}")


def test_the_gpu_s_source_is_the_one_whose_digest_is_stored() -> None:
    then = digests.stored().get(_package.version() or "")
    if then is None:
        pytest.skip(f"no digests are stored for TileLang {_package.version()}")
    compile_cpu(gemm_kernel, 128, 64, bias=True, residual=True, act="gelu")  # which must change nothing

    assert dict(digests.found()) == then


def test_every_kernel_and_dtype_has_a_digest() -> None:
    wanted = {f"{name} {dtype}" for name in digests.CASES for dtype in _tile.GPU_DTYPES}

    assert {factory for factory, _, _ in digests.CASES.values()} == {factory for factory, _ in KERNELS.values()}
    assert all(each.keys() == wanted for each in digests.stored().values())
    assert PINNED in digests.stored()


def failure(kernel: str, dtype: str, *, cpu: bool = False) -> tuple[str, str]:
    """The error of compiling a kernel for target `c`: its class and text."""
    factory, sizes = KERNELS[kernel]
    program = factory(*sizes, dtype=dtype, cpu=cpu)
    try:
        compiling.made(program, "c", execution_backend="cython")
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "it compiles"


@pytest.mark.usefixtures("pinned")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("kernel", "text"),
    [("gemm", LAYOUT.format("y")), ("geglu", FILL), ("add_ln", REDUCE), ("attn", LAYOUT.format("p"))],
)
def test_fragments_are_what_first_keeps_the_gpu_form_from_compiling(kernel: str, text: str, dtype: str) -> None:
    name, said = failure(kernel, dtype)

    assert name == INTERNAL
    assert text in said


@pytest.mark.usefixtures("pinned")
def test_rope_which_has_no_fragment_fails_for_its_dtype(capfd: pytest.CaptureFixture[str]) -> None:
    name, said = failure("rope", "bfloat16")
    assert (name, BFLOAT16 in said) == (INTERNAL, True)

    name, said = failure("rope", "float16")
    assert (name, "Compilation Failed!" in said) == ("RuntimeError", True)
    assert "vec_type<float, 4>::vec_type(half4&)" in capfd.readouterr().err


@pytest.mark.usefixtures("pinned")
@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        ("gemm", UNDEFINED.format(3, "gemm", "ws, xs, ys")),
        ("geglu", UNDEFINED.format(4, "gemm_geglu", "us, vs, xs, ys")),
        ("add_ln", BFLOAT16),
        ("rope", BFLOAT16),
        ("attn", UNDEFINED.format(5, "attn", "ks, outs, p, qs, vs")),
    ],
)
def test_with_local_buffers_bfloat16_is_what_keeps_it_from_compiling(
    kernel: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tile, "CPU_DTYPE", "bfloat16")
    name, said = failure(kernel, "bfloat16", cpu=True)

    assert name == INTERNAL
    assert text in said


@pytest.mark.parametrize("kernel", KERNELS)
def test_with_any_version_the_gpu_form_does_not_compile_for_c(kernel: str) -> None:
    assert failure(kernel, "bfloat16")[0]


TILES = [(kernel, *each) for kernel, every in (*_configs.GEMM.items(), *_configs.SHARED.items()) for each in every]


@pytest.mark.parametrize(("kernel", "tiles", "speed"), TILES)
def test_blocks_fit_a_multiprocessor_with_their_registers_and_their_memory(
    kernel: str, tiles: _configs.Config, speed: float
) -> None:
    each = 65536 // tiles.blocks // (tiles.threads + 128) // 8 * 8  # what a block is started with
    sides = tiles.bm + tiles.bn * (2 if kernel == "geglu" else 1)
    memory = max(2 * tiles.stages * tiles.bk * sides, 2 * tiles.bm * tiles.bn) + 1024

    assert tiles.registers * tiles.threads + 24 * 128 <= each * (tiles.threads + 128)  # else it waits for ever
    assert tiles.registers % 8 == 0
    assert tiles.registers <= 240
    assert tiles.registers > tiles.bm * tiles.bn * (2 if kernel == "geglu" else 1) / tiles.threads + 30  # the sums
    assert memory * tiles.blocks <= 228 * 1024
    assert 0 < speed <= 1.1


@pytest.mark.parametrize(("kernel", "m", "n", "least"), [
    ("gemm", 4096, 3072, 0.9), ("gemm", 4096, 768, 0.9), ("gemm", 256, 3072, 0.9), ("geglu", 4096, 1152, 0.9),
    ("gemm", 2048, 2048, 0.6), ("gemm", 8192, 8192, 0.9),
])  # fmt: skip
def test_tiles_are_of_a_size_that_leaves_few_multiprocessors_idle(kernel: str, m: int, n: int, least: float) -> None:
    tiles = _configs.gemm_config(kernel, m, n, cpu=False)
    count = -(-m // tiles.bm) * -(-n // tiles.bn)
    rounds = -(-count // 132)

    assert m * n / (rounds * 132 * tiles.bm * tiles.bn) >= least
    assert tiles == _configs.gemm_config(kernel, m, n, cpu=False)
    assert tiles in _configs.candidates(kernel, m, n)
    assert len(_configs.candidates(kernel, m, n)) <= 6


@pytest.mark.parametrize("lengths", [True, False])
def test_a_kernel_for_few_queries_waits_for_the_one_before_it_ahead_of_its_first_read(lengths: bool) -> None:
    source = compiling.lowered(attn_kernel, None, None, None, 64, lengths=lengths, few=True, dtype="bfloat16")
    body = source[source.rindex("__launch_bounds__") :]
    waits, lets = body.index("cudaGridDependencySynchronize()"), body.index("cudaTriggerProgrammaticLaunchCompletion()")

    assert "__launch_bounds__(256, 2)" in body
    assert waits < lets < body.index("tma_load")
    assert not lengths or lets < body.index("lengths[")
    for other in ({}, {"lengths": True}):
        assert "cudaGrid" not in compiling.lowered(attn_kernel, None, None, None, 64, dtype="bfloat16", **other)


def test_blocks_that_share_a_multiprocessor_say_so_in_the_source() -> None:
    tiles = _configs.Config(128, 96, 64, 3, 256, blocks=2)
    source = compiling.lowered(gemm_kernel, 768, 3072, bias=True, act="gelu", dtype="bfloat16", config=tiles)

    assert "__launch_bounds__(384, 2)" in source
    assert f"warpgroup_reg_alloc<{tiles.registers}>" in source
    assert "warpgroup_reg_dealloc<24>" in source
