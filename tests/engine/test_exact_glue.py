"""Kernels with torch's bits, where there is no GPU: in Triton's interpreter, and where they are not used at all."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuseboard.engine.decoder import QwenDecoder
from fuseboard.engine.decoder.config import DecoderConfig
from fuseboard.engine.decoder.kernels.exact import exact_for
from fuseboard.engine.decoder.kernels.launch import Launcher

SHAPE = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


BEGIN = """
import copy, pickle, warnings
import torch
from fuseboard.engine.decoder import QwenDecoder
from fuseboard.engine.decoder.kernels import exact as exact_glue
from fuseboard.engine.decoder.kernels.launch import Launcher

warnings.simplefilter("ignore")
SHAPE = %r
launched = []
launch = Launcher.__call__
Launcher.__call__ = lambda self, *given: (launched.append(self._kernel.fn.__name__), launch(self, *given))[1]


def made(dtype=torch.float16, **given):
    decoder = QwenDecoder(SHAPE | given)
    generator = torch.Generator().manual_seed(0)
    decoder.load({
        name: (torch.randn(each.shape, generator=generator) * (0.2 if each.dim() > 1 else 1.0)).to(dtype)
        for name, each in decoder.named_parameters()
    })
    return decoder


def prompts():
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return ids, mask
"""


@pytest.fixture
def run(interpreted: Callable[..., str]) -> Callable[[str], str]:
    """Gives what a script prints, with a decoder at hand; fp16, since the interpreter rounds bfloat16 otherwise."""
    return lambda body: interpreted(BEGIN % SHAPE + body)


@pytest.mark.slow
def test_steps_with_the_kernels_have_the_bits_of_steps_without(run: Callable[[str], str]) -> None:
    found = run(
        """
for given in ({}, {"model_type": "qwen2"}, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}):
    for fused in (False, True):
        for formula in (False, True):
            glued, plain = made(**given), made(**given)
            plain.exact_glue = False
            ids, mask = prompts()
            logits, used = {}, set()
            for decoder in (glued, plain):
                if fused:
                    decoder.fuse()
                decoder._prepare()
                for module in decoder.modules():
                    if formula and hasattr(module, "eps"):
                        module.fused = False  # as on a GPU whose own norm has other bits
                launched.clear()
                with torch.no_grad():
                    cache = decoder.cache(2, attention_mask=mask)
                    first = decoder(ids, cache=cache, keep=1)
                    assert not launched, "a prompt has torch's kernels"
                    steps, fixed = [first], decoder.fixed(cache)
                    for _ in range(3):
                        next_ids = steps[-1][:, -1:].argmax(-1)
                        steps.append(decoder(next_ids, cache=cache))
                        other = decoder.step(next_ids, fixed)
                        steps.append(other)
                logits[decoder] = steps
                used = set(launched) or used
            assert all(map(torch.equal, logits[glued], logits[plain])), (given, fused, formula)
            formed = [not module.fused for module in glued.modules() if hasattr(module, "eps")]  # torch 2.6: all
            norms = {"squares", "scaled"} if any(formed) else set()
            assert not launched and used == norms | {"rotated", "gated", "placed"}, (used, launched)
            assert glued.report()["exact_glue"] == "Triton, one token at a time", glued.report()
            assert plain.report()["exact_glue"] == "not asked for"
print("equal")
"""
    )
    assert found == "equal\n"


@pytest.mark.slow
def test_weights_that_are_not_row_after_row_give_the_same_bits(run: Callable[[str], str]) -> None:
    found = run(
        """
strided, plain = QwenDecoder(SHAPE), made()
strided.load({
    name: torch.stack([each] * 2, -1)[..., 0] if each.dim() == 1 else each for name, each in plain.named_parameters()
})
plain.exact_glue = False
ids, mask = prompts()
logits = []
for decoder in (strided, plain):
    with torch.no_grad():
        cache = decoder.cache(2, attention_mask=mask)
        decoder(ids, cache=cache)
        logits.append(decoder(ids[:, :1], cache=cache))
assert "rotated" in launched and not strided.model.layers[0].self_attn.q_norm.weight.is_contiguous()
print(torch.equal(*logits))
"""
    )
    assert found == "True\n"


@pytest.mark.slow
def test_a_default_device_of_the_caller_s_moves_no_trial(run: Callable[[str], str]) -> None:
    found = run(
        """
from fuseboard.engine.decoder.kernels.glue import glue_for
from fuseboard.engine.decoder.kernels.products import products_for
config, cpu = QwenDecoder(SHAPE).config, torch.device("cpu")
torch.set_default_device("meta")
print(exact_glue.exact_for(cpu, torch.float16, config).dtype)
print(type(glue_for(cpu, torch.float16, config, early=False)).__name__)
print(*(products_for(cpu, torch.float16, config, rows=rows, early=False) for rows in (1, 2)), sep="\\n")
"""
    )
    assert found == "torch.float16\nGlue\nTriton, weight by weight\nTriton, on tensor cores\n"


@pytest.mark.slow
def test_a_dtype_that_is_rounded_otherwise_is_refused_and_says_where(run: Callable[[str], str]) -> None:
    found = run(
        """
decoder = made(torch.bfloat16)
print(decoder.report()["exact_glue"])
print(made(torch.float32).report()["exact_glue"])
assert not any(module.exact for module in decoder.modules() if hasattr(module, "exact"))
"""
    )
    assert found == "its gate has other bits than torch's on this device\nnot for torch.float32\n"


@pytest.mark.slow
def test_whoever_watches_operations_or_wants_gradients_sees_torch_s(run: Callable[[str], str]) -> None:
    found = run(
        """
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class Watches(TorchDispatchMode):
    def __torch_dispatch__(self, fn, types, args=(), kwargs=None):
        seen.append(str(fn))
        return fn(*args, **(kwargs or {}))


decoder, ids = made(), torch.ones(2, 1, dtype=torch.int64)
decoder._prepare()
launched.clear()  # the trial's
seen = []
with torch.no_grad(), Watches():
    decoder(ids)
assert not launched and any("silu" in each for each in seen)
decoder(ids)  # gradients are on
assert not launched
with torch.no_grad():
    x = torch.ones(1, 1, 48, dtype=torch.float16)
    layer, given = decoder.model.layers[0], torch.ones(1, 1, 64, dtype=torch.float16)
    traced = torch.jit.trace(lambda x: layer.after(x, given), x, check_trace=False)
assert not launched and "silu" in str(traced.graph)
with torch.no_grad():
    torch.compile(layer.after, backend="eager", fullgraph=True)(x, given)
    vmapped = torch.func.vmap(lambda x: layer.after(x, given))(torch.ones(2, 1, 1, 48, dtype=torch.float16))
assert not launched and vmapped.shape == (2, 1, 1, 48)
with torch.no_grad(), torch.device("cpu"):  # which only says where new tensors lie
    layer.after(x, given)
assert launched
launched.clear()
with torch.no_grad():
    decoder(ids)
    assert launched
    launched.clear()
    for twin in (copy.deepcopy(decoder), pickle.loads(pickle.dumps(decoder))):
        assert torch.equal(twin(ids), decoder(ids))
        assert twin.model.layers[0].exact is not None
    decoder.exact_glue = False
    launched.clear()
    decoder(ids)
    assert not launched
print("seen")
"""
    )
    assert found == "seen\n"


class Compiled:
    """What Triton's compiled kernel is to a launcher: it takes a grid, and then so many arguments."""

    packed_metadata = ()

    def __init__(self, takes: int, launched: list[tuple[Any, ...]]) -> None:
        self.takes, self.launched = takes, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*given: Any) -> None:
            if len(given) != self.takes:
                msg = f"function takes exactly {self.takes} arguments ({len(given)} given)"
                raise TypeError(msg)
            self.launched.append(("itself", grid, len(given)))

        return launch


class Jitted:
    """What `triton.jit` makes of a function with two tensors, a number and a constant."""

    params = tuple(types.SimpleNamespace(is_constexpr=each) for each in (False, False, False, True))

    def __init__(self, takes: int | None) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.compiled = None if takes is None else Compiled(takes, self.launched)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*given: Any, **options: Any) -> Any:
            self.launched.append(("usual", grid, len(given), options))
            return self.compiled

        return launch


@pytest.mark.parametrize(("takes", "direct"), [(4, True), (3, True), (9, False), (None, None)])
def test_a_compiled_kernel_is_launched_by_itself_where_it_can_be(takes: int | None, direct: bool | None) -> None:
    kernel = Jitted(takes)
    launcher, x = Launcher(kernel, num_warps=2), torch.ones(32)
    for _ in range(3):
        launcher((5, 6), x, x, 7, 8)

    usual, itself = ("usual", (5, 6), 4, {"num_warps": 2}), ("itself", (5, 6, 1), takes)
    assert kernel.launched == [usual, *([itself] * 2 if direct else [usual] * 2)]
    assert launcher.direct is direct


def test_what_a_kernel_is_compiled_for_is_looked_up_anew_when_it_changes() -> None:
    kernel = Jitted(4)
    launcher, x = Launcher(kernel), torch.ones(32)
    base = 4 - x.data_ptr() % 16 // 4  # so many elements to the next aligned one
    aligned, askew = x[base % 4 :], x[base % 4 + 1 :]
    for given in (
        (aligned, x, 7, 8),
        (askew, x, 7, 8),
        (aligned.int(), x, 7, 8),
        (aligned, x, 1, 8),
        (aligned, x, 7, 9),
    ):
        for _ in range(2):
            launcher((1, 1), *given)

    assert [each[0] for each in kernel.launched] == ["usual", "itself"] * 5


def test_the_cpu_has_torch_s_kernels_and_the_report_says_so() -> None:
    decoder = QwenDecoder(SHAPE)
    decoder.load({name: torch.ones(each.shape) for name, each in decoder.named_parameters()}, dtype=torch.bfloat16)

    assert decoder.report()["exact_glue"] == "not for cpu"
    decoder.exact_glue = False
    assert decoder.report()["exact_glue"] == "not asked for"
    assert exact_for(torch.device("cpu"), torch.float16, DecoderConfig.of(SHAPE)) == "not for cpu"
