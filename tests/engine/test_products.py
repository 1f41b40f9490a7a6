"""Products of few rows as Triton kernels, by Triton's interpreter: the formula's numbers for every shape of a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fuseboard.engine.decoder import QwenDecoder
from fuseboard.engine.decoder.config import DecoderConfig
from fuseboard.engine.decoder.kernels.launch import Launcher
from fuseboard.engine.decoder.kernels.products import Tile, products_for, tile_for
from fuseboard.engine.decoder.kernels.trial import Case, Draws, differing

SHAPE = {
    "model_type": "qwen3", "vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
CPU = torch.device("cpu")

HARNESS = """
from __future__ import annotations
import torch
import torch.nn.functional as F
from fuseboard.engine.decoder.config import DecoderConfig
from fuseboard.engine.decoder.kernels import products as room
from fuseboard.engine.decoder.kernels.products import Products, products_for
from fuseboard.engine.decoder.kernels.trial import Draws

SHAPE = {shape}

{wanted}
def differs(made, dtype, wide, tall, **how):
    draws = Draws(torch.device("cpu"), dtype, 1e-6)
    x = draws.numbers(made.rows, wide)
    linear = draws.linear(wide, 2 * tall if how.get("gated") else tall, bias=how.pop("bias", False))
    norm = draws.norm(wide) if how.pop("norm", False) else None
    add = draws.numbers(made.rows, tall) if how.pop("add", False) else None
    want = wanted(x, linear, norm, how.get("gated", False), add)
    found = made(x, linear, norm=norm, add=add, **how)
    assert found.shape == want.shape and found.dtype == dtype
    return float((found.double() - want).abs().max() / want.abs().max())
"""


@pytest.fixture
def run(interpreted: Callable[..., str], product_fp64: Callable[..., Tensor]) -> Callable[[str], str]:
    """Gives what a script prints, with a product in fp64 at hand."""
    begin = HARNESS.format(shape=SHAPE, wanted=inspect.getsource(product_fp64))
    return lambda body: interpreted(begin + body)


@pytest.mark.slow
def test_every_number_of_rows_and_every_part_inside_gives_the_formula_s_numbers(run: Callable[[str], str]) -> None:
    found = run(
        """
config = DecoderConfig.of(SHAPE)
cases = [{"norm": True, "bias": True}, {"norm": True, "gated": True}, {"add": True}, {"add": True, "bias": True}, {}]
worst = {}
for dtype, rows in [(torch.float16, n) for n in (1, 2, 3, 7, 8, 9, 15, 16)] + [(torch.float32, n) for n in (1, 2, 3)]:
    made = products_for(torch.device("cpu"), dtype, config, rows=rows, early=False)
    assert isinstance(made, Products), made
    for case in cases:
        for wide, tall in ((64, 48), (70, 33), (24, 100)):
            worst[dtype] = max(worst.get(dtype, 0.0), differs(made, dtype, wide, tall, **case))
print(worst[torch.float16] < 4e-3, worst[torch.float32] < 1e-5, worst)
"""
    )
    assert found.startswith("True True"), found


@pytest.mark.slow
def test_every_tile_gives_the_formula_s_numbers(run: Callable[[str], str]) -> None:
    found = run(
        """
import attrs
made = products_for(torch.device("cpu"), torch.float16, DecoderConfig.of(SHAPE), rows=5, early=False)
seen, worst = set(), 0.0
for shared in (101376, 262144):  # the larger also with 16 rows, which older Tritons take at least
    one = attrs.evolve(made, shared=shared)
    for wide, tall, case in (
        (600, 24, {"norm": True}), (600, 24, {"norm": True, "gated": True}), (1024, 2048, {"norm": True}),
        (1024, 4096, {"norm": True}), (1500, 24, {"add": True}), (2048, 24, {"add": True}), (3072, 24, {"add": True}),
    ):
        how = {"normed": "norm" in case, "gated": "gated" in case}
        tile = one.tile(wide, tall, **how)
        if tile is not None:
            seen.add((tile.block, tile.warps, tile.chunks))
            worst = max(worst, differs(one, torch.float16, wide, tall, **case))
print(worst < 4e-3, *sorted(seen))
"""
    )
    assert found == "True (16, 4, 1) (16, 4, 2) (16, 4, 3) (16, 8, 1) (32, 4, 1) (64, 4, 1)\n"


def test_tiles_fit_into_shared_memory_and_cover_the_sum() -> None:
    for shared in (101376, 166912, 232448):
        for padded in (8, 16):
            for wide in (16, 64, 70, 896, 1024, 2048, 3072, 5120, 12288, 16384):
                for tall in (100, 1024, 4096, 30000):
                    for normed, gated in ((False, False), (True, False), (True, True)):
                        tile = tile_for(wide, tall, padded, shared, normed=normed, gated=gated)
                        if tile is None:
                            assert wide > 64
                            continue
                        span = tile.warps * tile.deep
                        taken = 2 * span * (padded + tile.chunks * tile.block * (1 + gated))
                        assert taken <= shared * 2 // 3
                        assert (tile.chunks - 1) * span < wide <= tile.chunks * span
                        assert tile.chunks <= (1 if normed else 3)


def test_tiles_of_the_shape_that_was_measured() -> None:
    found = [
        tile_for(wide, tall, 8, 232448, normed=normed, gated=gated)
        for wide, tall, normed, gated in (
            (1024, 4096, True, False), (2048, 1024, False, False), (1024, 3072, True, True), (3072, 1024, False, False)
        )
    ]  # fmt: skip
    assert found == [Tile(64, 4, 256, 1), Tile(16, 8, 256, 1), Tile(16, 4, 256, 1), Tile(16, 4, 256, 3)]


@pytest.mark.slow
def test_more_than_one_row_of_a_wide_model_is_left_to_cublas(run: Callable[[str], str]) -> None:
    found = run(
        """
config = DecoderConfig.of(SHAPE | {"hidden_size": 2048, "intermediate_size": 6144})
print(products_for(torch.device("cpu"), torch.float16, config, rows=2, early=False))
"""
    )
    assert found == "of more than one row, with sums this long, cuBLAS makes them faster\n"


def test_what_is_not_multiplied_says_why() -> None:
    config = DecoderConfig.of(SHAPE)
    many = products_for(CPU, torch.float16, config, rows=17, early=False)
    long = products_for(CPU, torch.float32, config, rows=4, early=False)
    wide = products_for(CPU, torch.float16, DecoderConfig.of(SHAPE | {"intermediate_size": 16386}), rows=1, early=False)
    double = products_for(CPU, torch.float64, config, rows=1, early=False)

    assert many == "of more than 16 rows cuBLAS makes them faster"
    assert long == "of more than 3 rows cuBLAS makes them faster"
    assert wide == "its kernels add at most 16384 products, and there are 16386"
    assert double == "its kernels do not compute torch.float64"


def test_the_report_says_for_each_number_of_rows_what_multiplied() -> None:
    decoder = QwenDecoder(SHAPE)
    generator = torch.Generator().manual_seed(0)
    decoder.load({name: torch.randn(each.shape, generator=generator) for name, each in decoder.named_parameters()})
    assert decoder.fuse(glue=True).report()["products"] == "not asked for"
    decoder.fuse(products=True)
    assert decoder.report()["products"] == {}
    decoder.graphs = "step"
    for rows in (5, 1):
        decoder.generate(torch.ones(rows, 3, dtype=torch.int64), max_new_tokens=3, eos=())

    said = decoder.report()["products"]
    assert list(said) == ["1", "5"]
    assert said["5"] == "of more than 3 rows cuBLAS makes them faster"
    assert said["1"] in ("Triton is not installed", "Triton's kernels do not run on cpu")


class _Kernel:
    """A stand-in for a compiled function: Triton compiles for a GPU alone."""

    params = ()

    def __init__(self, broken: bool) -> None:
        self.broken = broken
        self.seen: list[str] = []

    def warmup(self, *_arguments: object, grid: tuple[int, int]) -> None:
        self.seen.append(f"compiled {grid}")
        if self.broken:
            raise RuntimeError("no compiler")

    def __getitem__(self, grid: tuple[int, int]) -> Callable[[Tensor], None]:
        def launch(out: Tensor) -> None:
            self.seen.append("launched")
            if self.broken:
                raise RuntimeError("no compiler")
            out.fill_(2.0)

        return launch


def _case(name: str, kernel: _Kernel, right: float) -> Case:
    launcher = Launcher(kernel)

    def mine() -> tuple[Tensor, ...]:
        out = torch.zeros(3)
        launcher((1, 1), out)
        return (out,)

    return Case(name, mine, lambda: (torch.full((3,), right),))


def test_kernels_are_compiled_beside_one_another_and_then_compared_one_by_one() -> None:
    kernels = [_Kernel(broken=False) for _ in range(3)]
    cases = [_case(str(index), each, 2.0 if index < 2 else 2.5) for index, each in enumerate(kernels)]
    draws = Draws(CPU, torch.float32, 1e-6)

    assert differing(cases[:2], draws, interpreted=False) is None
    assert [each.seen for each in kernels] == [["compiled (1, 1)", "launched", "launched"]] * 2 + [[]]
    assert differing(cases, draws, interpreted=False) == "2"


def test_a_kernel_that_does_not_compile_says_so_where_it_is_launched() -> None:
    draws = Draws(CPU, torch.float32, 1e-6)
    with pytest.raises(RuntimeError, match="no compiler"):
        differing([_case("one", _Kernel(broken=True), 2.0)], draws, interpreted=False)


@pytest.mark.slow
def test_a_trial_that_finds_no_memory_leaves_the_decoder_its_other_kernels(run: Callable[[str], str]) -> None:
    found = run(
        """
class Full(Draws):
    def linear(self, *sizes, **given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

room.Draws = Full
print(products_for(torch.device("cpu"), torch.float16, DecoderConfig.of(SHAPE), rows=2, early=False))
"""
    )
    assert found == "too little memory is free to try its kernels\n"
