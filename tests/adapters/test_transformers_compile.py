"""transformers models on the board in one graph: with a frozen choice, mask and attention are traced."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseboard as fb
from fuseboard.engine.compiled import Compiled
from fuseboard.engine.freeze import NotFrozenError, freeze

hf = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("transformers.masking_utils", reason="transformers is older than 4.57")

from fuseboard.adapters import transformers as adapter  # noqa: E402 - only where transformers is installed

V5 = int(hf.__version__.split(".")[0]) >= 5
pytestmark = [
    pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch.compile of older releases does not know this Python"),
    # Dynamo of torch 2.6, tracing the vmap with which transformers 4 makes its masks.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

BATCH, VOCABULARY, LENGTHS = 3, 64, (1, 2, 5, 100, 777)
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 1024,
}  # fmt: skip
OPERATOR = {
    "sdpa-cpu": "_scaled_dot_product_flash_attention_for_cpu",
    "sdpa-math": "_scaled_dot_product_attention_math",
    "reference": "scaled_dot_product_attention",
}


def bert() -> tuple[Any, Any]:
    return hf.BertModel, hf.BertConfig(**SMALL)


def modernbert() -> tuple[Any, Any]:
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "pad_token_id": 0}
    return hf.ModernBertModel, hf.ModernBertConfig(**SMALL, **tokens, local_attention=8, global_attn_every_n_layers=2)


def qwen3() -> tuple[Any, Any]:
    return hf.Qwen3Model, hf.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8, use_cache=False)


def llama() -> tuple[Any, Any]:
    return hf.LlamaModel, hf.LlamaConfig(**SMALL, num_key_value_heads=4, use_cache=False)


# transformers 4 keeps encoders' attention in classes of its own.
MODELS = [bert, modernbert, qwen3, llama] if V5 else [qwen3, llama]


def model_of(make: Callable[[], tuple[Any, Any]]) -> Any:
    adapter.register()
    kind, config = make()
    config._attn_implementation = "fuseboard"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(config).eval()


def batch(length: int, padding: str = "right", seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and their 2-D attention mask, as a tokenizer makes them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (BATCH, length), generator=generator)
    real = torch.ones(BATCH, length, dtype=torch.long)
    for row, missing in enumerate((0, length // 4, length // 2)):
        if padding == "right" and missing:
            real[row, -missing:] = 0
        if padding == "left" and missing:
            real[row, :missing] = 0
        if padding == "middle" and missing:
            real[row, 1 : 1 + missing] = 0
    return ids, real


def step_of(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def step(ids: Tensor, real: Tensor) -> Tensor:
        out: Tensor = model(input_ids=ids, attention_mask=real).last_hidden_state
        return out

    return step


def examples(step: Callable[[Tensor, Tensor], Tensor], *lengths: int) -> None:
    """What there will be to answer: padded batches and others, and one token where it comes."""
    for length in lengths or (9,):
        for padding in ("right", "none"):
            step(*batch(length, padding))


class Graphs:
    """A backend that keeps the graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, inputs: list[Any]) -> Any:
        self.graphs.append(graph)
        return graph.forward

    def operators(self) -> list[str]:
        return [getattr(each.target, "__name__", str(each.target)) for each in self.graphs[-1].graph.nodes]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def close(out: Tensor, expected: Tensor, real: Tensor) -> None:
    torch.testing.assert_close(out[real.bool()], expected[real.bool()], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("make", MODELS)
@torch.no_grad()
def test_one_full_graph_serves_all_lengths_and_one_more_a_single_token(make: Any) -> None:
    step, backend = step_of(model_of(make)), Graphs()
    frozen = freeze(lambda: examples(step, 1, 9), "exact", ())
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)

    for length in LENGTHS:
        for padding in ("right", "left", "none"):
            ids, real = batch(length, padding)
            with frozen.tracing():
                out = compiled(ids, real)
            with fb.bind("exact"):
                close(out, step(ids, real), real)
            close(out, step(ids, real), real)
    assert len(backend.graphs) <= 3
    calls = [each for each in backend.operators() if each.startswith("_scaled_dot_product_")]
    assert len(calls) == 2  # one a layer


@pytest.mark.parametrize("make", MODELS[:1])
@torch.no_grad()
def test_compiled_counts_its_graphs_and_stays_compiled(make: Any) -> None:
    model = model_of(make)
    compiled = Compiled(model, "encoder", backend="eager")
    step = step_of(model)
    frozen = freeze(lambda: examples(step), "exact", ())

    for length in (2, 5, 100, 777):
        ids, real = batch(length)
        with frozen.tracing():
            out = compiled(input_ids=ids, attention_mask=real).last_hidden_state
        close(out, step(ids, real), real)
    report = compiled.report()
    assert (report["compiled"], report["cause"]) == (True, None)
    assert report["graphs"] - report["recompiles"] == 1  # one frame: nothing broke it
    assert report["graphs"] <= 3


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@torch.no_grad()
def test_inductor_gives_what_the_policy_gives_but_for_rounding() -> None:
    model = model_of(MODELS[0])
    compiled, step = Compiled(model, "encoder"), step_of(model)
    frozen = freeze(lambda: examples(step), "exact", ())

    for length in (5, 33):
        ids, real = batch(length)
        with frozen.tracing():
            out = compiled(input_ids=ids, attention_mask=real).last_hidden_state
        close(out, step(ids, real), real)
    assert compiled.report()["cause"] is None
    assert compiled.report()["graphs"] == 1


@pytest.mark.parametrize("make", [MODELS[0], MODELS[-1]])
@torch.no_grad()
def test_what_the_mask_hides_may_change_between_calls_of_the_same_shapes(make: Any) -> None:
    step, backend = step_of(model_of(make)), Graphs()
    frozen = freeze(lambda: examples(step), "exact", ())
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    ids, _ = batch(12)
    found = []
    for padding in ("right", "left", "middle", "none", "right"):
        real = batch(12, padding)[1]
        with frozen.tracing():
            found.append(compiled(ids, real))
        close(found[-1], step(ids, real), real)

    assert len(backend.graphs) == 1
    assert torch.equal(found[0], found[4])
    assert not torch.allclose(found[1][1, -1], found[3][1, -1])  # the padding was hidden, and then not


@torch.no_grad()
def test_each_policy_has_its_own_kernels_in_its_own_graph() -> None:
    step, backend = step_of(model_of(llama)), Graphs()
    policies = {"sdpa-math": "sdpa-math", "sdpa-cpu": "sdpa-cpu", "auto": "reference"}
    frozen = {policy: freeze(lambda: examples(step), policy, ()) for policy in policies}
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    ids, real = batch(12)
    expected = step(ids, real)

    for policy, answers in policies.items():
        with frozen[policy].tracing():
            close(compiled(ids, real), expected, real)
        assert backend.operators().count(OPERATOR[answers]) == 2, policy
    assert len(backend.graphs) == 3
    for each in frozen.values():
        with each.tracing():
            close(compiled(ids, real), expected, real)
    assert len(backend.graphs) == 3


@torch.no_grad()
def test_a_graph_of_a_frozen_choice_is_not_used_without_it() -> None:
    step = step_of(model_of(llama))
    frozen = freeze(lambda: examples(step), "sdpa-math", ())
    compiled = torch.compile(step, backend="eager", dynamic=True)
    ids, real = batch(12)
    expected = step(ids, real)

    for _ in range(2):
        with frozen.tracing():
            close(compiled(ids, real), expected, real)
        assert torch.equal(compiled(ids, real).nan_to_num(7.0), expected.nan_to_num(7.0))
        run = fb.Run()
        with fb.bind("exact", run=run):
            close(compiled(ids, real), expected, real)
        assert sum(run.report()["attention"]["used"].values()) == 2


@torch.no_grad()
def test_the_report_says_that_a_graph_has_the_dense_mask() -> None:
    step = step_of(model_of(qwen3))
    report = freeze(lambda: examples(step), "exact", ()).report()["transformers.Qwen3Attention.causal"]
    padded = [answer for kind, answer in report.items() if "right-padded keys" in kind]

    assert len(padded) == 1
    assert "(traced: dense mask, sdpa-" in padded[0]


@torch.no_grad()
def test_a_length_that_was_not_frozen_is_refused_by_name() -> None:
    step = step_of(model_of(qwen3))
    frozen = freeze(lambda: examples(step), "exact", ())
    compiled = torch.compile(step, backend="eager", dynamic=True)

    with frozen.tracing(), pytest.raises(NotFrozenError, match="one query"):
        compiled(*batch(1))


def test_gradients_of_a_graph_are_those_of_the_reference() -> None:
    model = model_of(qwen3)
    step = step_of(model)
    frozen = freeze(lambda: examples(step), "exact", ())
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    ids, real = batch(12)
    gradients = []
    for function, binding in ((step, fb.bind("auto")), (compiled, frozen.tracing())):
        model.zero_grad()
        with binding:
            out = function(ids, real)
        torch.where(real[..., None].bool(), out, 0.0).square().sum().backward()
        gradients.append([each.grad.clone() for each in model.parameters() if each.grad is not None])

    assert gradients[0]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_an_argument_that_sdpa_would_drop_is_refused_from_within_a_compiled_function() -> None:
    adapter.register()
    layer = torch.nn.Module()
    layer.is_causal = False

    def step(q: Tensor, softcap: float | None = None) -> Tensor:
        return adapter.attend(layer, q, q, q, None, softcap=softcap)[0] * 2

    q = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    frozen = freeze(step, "exact", (q,))
    compiled = torch.compile(step, backend="eager")
    with frozen.tracing():
        torch.testing.assert_close(compiled(q), step(q))
        with pytest.raises(fb.InputError, match="Module passes softcap"):
            compiled(q, 50.0)
