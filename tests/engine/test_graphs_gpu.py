"""CUDA graphs on a GPU: replays are the eager numbers, failures leave nothing behind, threads keep apart."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fuseboard as fb
from fuseboard.engine.graphs import Graphs
from fuseboard.engine.steps import LayerSteps, Stack

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SITE = fb.Site("tests.graphs.gpu", approx_ok=False)
HIDDEN, HEADS, DIM, LAYERS = 64, 4, 16, 3


def generator(seed: int = 0, device: str = "cuda") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, device="cuda", generator=generator(seed))


# ---- one graph


@torch.no_grad()
def test_a_replay_gives_the_eager_bits_and_follows_its_inputs() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64)).cuda().bfloat16()
    graphs, x = Graphs("cuda"), draw(8, 64).bfloat16()
    graph = graphs.capture(lambda: model(x))

    for seed in range(3):
        x.copy_(draw(8, 64, seed=seed))
        assert torch.equal(graph.replay(), model(x))
    assert graphs.report() == {"captured": 1, "replays": 3, "failed": None}


def workspaces_are_let_go() -> None:
    """As inductor does around each graph of its own."""
    torch._C._cuda_clearCublasWorkspaces()


def another_graph_comes_and_goes() -> None:
    """On every stream of the ring from which torch takes one for a capture; newer versions let go when a graph ends."""
    x, w = draw(8, 4096).bfloat16(), draw(4096, 64).bfloat16()
    for _ in range(32):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            x @ w
        with torch.cuda.graph(graph, stream=stream):
            x @ w
        graph.replay()
        torch.cuda.synchronize()
        del graph


def an_own_graph_comes_and_goes(graphs: Graphs) -> None:
    x, w = draw(8, 4096, seed=3).bfloat16(), draw(4096, 64, seed=4).bfloat16()
    for pool in (None, graphs.pool()):
        graph = graphs.capture(lambda: x @ w, pool=pool)
        graph.replay()
        graphs.drop([graph])


def inductor_makes_graphs() -> None:
    compiled = torch.compile(lambda x, w: (x @ w).relu(), mode="reduce-overhead")
    x, w = draw(8, 4096).bfloat16(), draw(4096, 64).bfloat16()
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        compiled(x, w)
    torch.compiler.reset()


@torch.no_grad()
@pytest.mark.parametrize(
    "others", [workspaces_are_let_go, another_graph_comes_and_goes, an_own_graph_comes_and_goes, inductor_makes_graphs]
)
def test_replays_go_on_whatever_others_do_with_the_workspaces_of_products(others: Callable) -> None:
    """A product of few rows over many numbers is cut in parts, whose sums lie in a workspace that torch may let go."""
    x, w = draw(8, 4096).bfloat16(), draw(4096, 64, seed=1).bfloat16()
    graphs, apart = Graphs("cuda"), Graphs("cuda")
    held = [graphs.capture(lambda: x @ w), graphs.capture(lambda: torch.matmul(x, w), pool=graphs.pool())]
    held.append(apart.capture(lambda: x @ w))
    want = x @ w
    for _ in range(2):
        others(graphs) if others is an_own_graph_comes_and_goes else others()
        gc.collect()
        torch.cuda.empty_cache()
        taken = [torch.full((2**24,), 7, dtype=torch.uint8, device="cuda") for _ in range(16)]
        for graph in held:
            for _ in range(8):
                assert torch.equal(graph.replay(), want)
        assert all(bool((each == 7).all()) for each in taken)
        del taken


@torch.no_grad()
def test_a_capture_leaves_state_and_generator_as_they_were() -> None:
    graphs, cache = Graphs("cuda"), draw(4)
    before = cache.clone()
    graphs.generator.manual_seed(5)
    drawn = graphs.generator.get_state()

    def step() -> Tensor:
        cache.add_(1)
        return torch.rand(4, device="cuda", generator=graphs.generator)

    graph = graphs.capture(step, state=[cache])

    assert torch.equal(cache, before)
    assert torch.equal(graphs.generator.get_state(), drawn)
    graph.replay()
    assert torch.equal(cache, before + 1)


@torch.no_grad()
def test_a_seeded_request_draws_in_a_graph_what_it_draws_eagerly() -> None:
    logits = draw(2, 1000).softmax(-1)
    graphs, source = Graphs("cuda"), generator(7)

    def sample(drawing: torch.Generator) -> Tensor:
        noise = torch.empty_like(logits).exponential_(1, generator=drawing)
        return (logits / noise).argmax(-1)

    eager = [sample(source).clone() for _ in range(6)]
    after = source.get_state()
    source.manual_seed(7)
    graph = graphs.capture(lambda: sample(graphs.generator))
    mine = []
    for place in range(6):
        if place == 3:  # a step that is run eagerly in between
            mine.append(sample(source).clone())
            continue
        with graphs.drawing(source):
            mine.append(graph.replay().clone())

    assert torch.equal(torch.stack(mine), torch.stack(eager))
    assert torch.equal(source.get_state(), after)


@torch.no_grad()
def test_a_capture_that_fails_half_way_costs_one_log_line_and_nothing_else(caplog) -> None:
    graphs, x = Graphs("cuda"), draw(16)
    graphs.generator.manual_seed(3)
    calls = []

    def step() -> Tensor:
        calls.append(1)
        out = x * 2 + torch.rand(16, device="cuda", generator=graphs.generator)
        if torch.cuda.is_current_stream_capturing():
            out.sum().item()
        return out

    with torch.random.fork_rng(devices=[0]):
        torch.cuda.manual_seed(11)
        want = torch.rand(4, device="cuda")
        torch.cuda.manual_seed(11)
        with caplog.at_level(logging.WARNING, "fuseboard"):
            assert graphs.capture(step) is None
            assert graphs.capture(step) is None
        assert torch.equal(torch.rand(4, device="cuda"), want)  # the process's own generator draws on, and the same

    assert len(calls) == 2  # the run before the capture, and the capture; a second one is not tried
    assert len(caplog.records) == 1
    assert "steps run eagerly" in caplog.text
    assert graphs.failure
    expected = x * 2 + torch.rand(16, device="cuda", generator=generator(3))
    assert torch.equal(step(), expected)
    torch.cuda.empty_cache()
    assert gc.isenabled()
    other = Graphs("cuda")  # another model's graphs work
    graph = other.capture(lambda: x + 1)
    assert torch.equal(graph.replay(), x + 1)


@torch.no_grad()
def test_what_other_threads_do_meanwhile_does_not_end_a_capture() -> None:
    graphs, x, stop = Graphs("cuda"), draw(256, 256), threading.Event()

    def busy() -> None:
        while not stop.is_set():
            torch.rand(1 << 16, device="cuda").sum().item()

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        made = [graphs.capture(lambda: (x @ x).relu() + 1) for _ in range(10)]
    finally:
        stop.set()
        thread.join()

    assert graphs.failure is None
    assert all(torch.equal(graph.replay(), (x @ x).relu() + 1) for graph in made)


def test_an_exception_of_the_step_itself_is_not_swallowed() -> None:
    def step() -> None:
        msg = "no such token"
        raise ValueError(msg)

    with pytest.raises(ValueError, match="no such token"):
        Graphs("cuda").capture(step)


def test_a_generator_of_another_device_is_an_error() -> None:
    graphs = Graphs("cuda")
    with pytest.raises(ValueError, match="the generator is of cpu"), graphs.drawing(generator(device="cpu")):
        pass


def test_a_turn_comes_after_the_one_before_on_another_stream_also_where_that_raised() -> None:
    graphs, x = Graphs("cuda"), torch.zeros(1, device="cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()

    def step() -> None:
        with graphs.turn():
            torch.cuda._sleep(200_000_000)
            x.add_(1)
            msg = "half-way"
            raise ValueError(msg)

    with torch.cuda.stream(first), pytest.raises(ValueError, match="half-way"):
        step()
    with torch.cuda.stream(second), graphs.turn():
        seen = x.clone()
    second.synchronize()

    assert seen.item() == 1


# ---- a stack of layers


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HEADS * DIM)
        self.out, self.mlp = nn.Linear(HEADS * DIM, HIDDEN), nn.Linear(HIDDEN, HIDDEN)


class Small:
    """A decoder of three layers with a growing cache."""

    def __init__(self, graphs: Graphs | None, seed: int = 0, *, wrong: int | None = None) -> None:
        with torch.random.fork_rng(devices=[0]):
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(Layer() for _ in range(LAYERS)).cuda().bfloat16()
        self.caches: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.wrong = wrong
        self.steps = LayerSteps(
            Stack(LAYERS, self.before, self.attend, self.after, lambda hidden, _: hidden.float(), [self.layers]), graphs
        )

    def before(self, layer: int, hidden: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        part = self.layers[layer]
        qkv = part.qkv(part.norm(hidden + inputs[0]))
        return tuple(each.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for each in qkv.chunk(3, -1))

    def attend(self, layer: int, tensors: tuple[Tensor, ...]) -> Tensor:
        q, k, v = tensors
        caches = self.caches.setdefault(threading.get_ident(), [])
        if len(caches) == layer:
            caches.append((k.clone(), v.clone()))
        else:
            caches[layer] = tuple(torch.cat((old, new), 2) for old, new in zip(caches[layer], (k, v), strict=True))
        return fb.attention(q, *caches[layer], site=SITE)

    def after(self, layer: int, hidden: Tensor, attended: Tensor, _inputs: tuple[Tensor, ...]) -> Tensor:
        part = self.layers[layer]
        if layer == self.wrong and torch.cuda.is_current_stream_capturing():
            attended.sum().item()
        hidden = hidden + part.out(attended.transpose(1, 2).flatten(2))
        return hidden + part.mlp(hidden).relu()

    def run(self, count: int = 12, batch: int = 2) -> list[Tensor]:
        self.caches.pop(threading.get_ident(), None)
        hidden, found = draw(batch, 1, HIDDEN).bfloat16(), []
        for step in range(count):
            hidden = self.steps(hidden, (draw(batch, 1, HIDDEN, seed=step).bfloat16() * 0.1,)).bfloat16()
            found.append(hidden)
        return found


def same(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("policy", ["auto", "exact", "sdpa-flash"])
def test_steps_by_graphs_are_the_eager_steps_in_bits(mode: Callable, policy: str) -> None:
    graphs = Graphs("cuda")
    with mode(), fb.bind(policy):
        eager, mine = Small(None).run(), Small(graphs)
        assert same(mine.run(), eager)
        assert same(mine.run(), eager)
    assert mine.steps.report() == {
        "captured": LAYERS + 1, "replays": 24 * (LAYERS + 1), "failed": None, "eager steps": 0,
    }  # fmt: skip


@torch.no_grad()
def test_another_shape_is_captured_for_itself() -> None:
    graphs = Graphs("cuda")
    eager, mine = Small(None), Small(graphs)
    for batch in (2, 1, 2):
        assert same(mine.run(batch=batch), eager.run(batch=batch))
    assert graphs.captured == 2 * (LAYERS + 1)


@torch.no_grad()
def test_with_a_gradient_steps_are_eager() -> None:
    mine = Small(Graphs("cuda"))
    with torch.enable_grad():
        mine.run(2)

    assert mine.steps.report()["eager steps"] == 2


@torch.no_grad()
@pytest.mark.parametrize("wrong", range(LAYERS))
def test_a_capture_that_fails_in_any_layer_leaves_the_eager_numbers(wrong: int) -> None:
    graphs = Graphs("cuda")
    eager, mine = Small(None), Small(graphs, wrong=wrong)

    assert same(mine.run(), eager.run())
    assert same(mine.run(), eager.run())
    report = mine.steps.report()
    assert report["failed"]
    assert report["eager steps"] == 24
    assert torch.rand(2, device="cuda").isfinite().all()


@torch.no_grad()
def test_weights_that_move_between_steps_are_captured_anew() -> None:
    graphs = Graphs("cuda")
    eager, mine = Small(None), Small(graphs)
    mine.run(3)
    for small in (eager, mine):
        for layer in small.layers:
            layer.mlp.weight = nn.Parameter(layer.mlp.weight * 0.5)
            layer.out.weight.data = layer.out.weight.data * 2

    assert same(mine.run(), eager.run())
    assert graphs.captured == 2 * (LAYERS + 1)


@torch.no_grad()
def test_two_threads_on_streams_of_their_own_get_each_its_own_numbers() -> None:
    graphs = Graphs("cuda")
    mine, results, errors = Small(graphs), {}, []
    want = Small(None).run(40)
    torch.cuda.synchronize()
    barrier = threading.Barrier(2)

    def body(name: str) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                barrier.wait()
                results[name] = mine.run(40)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(name,)) for name in "ab"]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert not errors, errors
    assert same(results["a"], want)
    assert same(results["b"], want)


@torch.no_grad()
def test_a_step_waits_for_nothing() -> None:
    mine = Small(Graphs("cuda"))
    with fb.bind("exact"):
        want = mine.run(6)
        inputs = [draw(2, 1, HIDDEN, seed=step).bfloat16() * 0.1 for step in range(6)]
        hidden = draw(2, 1, HIDDEN).bfloat16()
        mine.caches.clear()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = []
            for each in inputs:
                hidden = mine.steps(hidden, (each,)).bfloat16()
                found.append(hidden)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    assert same(found, want)


@torch.no_grad()
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_a_device_that_is_not_the_current_one() -> None:
    with torch.cuda.device(1):
        x = torch.randn(8, 64, device="cuda:1")
    graphs = Graphs("cuda:1")
    graph = graphs.capture(lambda: x @ x.T + 1)

    assert torch.cuda.current_device() == 0
    assert torch.equal(graph.replay(), x @ x.T + 1)
