"""Compiled: right results whatever fails, every side effect once, and nothing of it in a module's state."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fuseboard as fb
from fuseboard.engine.compiled import Compiled, _Graph, compile_module

pytestmark = [
    pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch.compile of older releases does not know this Python"),
    # Dynamo looks at what it traces.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def warnings(caplog):
    """What was logged since, as text."""
    caplog.set_level(logging.WARNING, logger="fuseboard")
    return lambda: [each.getMessage() for each in caplog.records if each.name == "fuseboard"]


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def broken(graph, inputs):
    raise RuntimeError("no compiler here")


def breaks_when_run(graph, inputs):
    def run(*args):
        raise RuntimeError("the kernel cannot be launched")

    return run


def add_one(x):
    return x + 1


X = torch.ones(1)


# ---- failures to compile (O-11 a, d)


def test_a_backend_that_always_raises_costs_one_warning_and_no_result(warnings):
    compiled = Compiled(add_one, "plus", backend=broken)

    assert [compiled(X).item() for _ in range(3)] == [2.0, 2.0, 2.0]
    assert warnings() == ["plus is not compiled (RuntimeError: no compiler here); it runs eagerly from now on."]
    assert compiled.report() == {
        "name": "plus", "compiled": False, "cause": "RuntimeError: no compiler here", "graphs": 1, "recompiles": 0,
    }  # fmt: skip


def test_after_a_failure_the_backend_is_not_asked_again():
    asked = []

    def backend(graph, inputs):
        asked.append(1)
        raise RuntimeError("no")

    compiled = Compiled(add_one, backend=backend)
    for length in (2, 3, 4):
        compiled(torch.ones(length))

    assert asked == [1]


@pytest.mark.parametrize("place", ["at the start", "before a break", "between two breaks", "after all", "in a loop"])
def test_a_side_effect_happens_once_a_call_wherever_compiling_fails(place, warnings):
    done = []

    def step(x):
        if place == "at the start":
            done.append(x.shape)
            return x + 1
        if place == "before a break":
            done.append(x.shape)
            torch._dynamo.graph_break()
            return x + 1
        if place == "between two breaks":
            x = x + 0.5
            torch._dynamo.graph_break()
            done.append(x.shape)
            torch._dynamo.graph_break()
            return x + 0.5
        if place == "after all":
            x = x + 1
            torch._dynamo.graph_break()
            done.append(x.shape)
            return x
        for _ in range(2):  # dynamo compiles no loop that holds a break, but what it calls
            x = half(x)
            torch._dynamo.graph_break()
        done.append(x.shape)
        return x

    def half(x):
        return x + 0.5

    compiled = Compiled(step, backend=broken)
    for call in (1, 2, 3):
        assert compiled(X).item() == 2.0
        assert len(done) == call
    assert len(warnings()) == 1


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_backend_that_fails_for_a_later_graph_of_the_call_repeats_nothing(first):
    """Graphs before it are compiled and have run."""
    done, graphs = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        if len(graphs) > first:
            raise RuntimeError("no")
        return graph.forward

    def step(x):
        x = x * 2
        done.append(0)
        torch._dynamo.graph_break()
        x = x * 2
        done.append(1)
        torch._dynamo.graph_break()
        x = x * 2
        done.append(2)
        return x + 1

    compiled = Compiled(step, backend=backend)

    assert compiled(X).item() == 9.0
    assert done == [0, 1, 2]
    assert compiled(X).item() == 9.0
    assert done == [0, 1, 2] * 2
    assert compiled.report()["cause"] == "RuntimeError: no"


def test_writes_into_the_input_happen_once_when_a_later_graph_fails():
    def step(x):
        x.add_(1)
        torch._dynamo.graph_break()
        x.mul_(3)
        return x

    x = torch.ones(2)

    assert Compiled(step, backend=broken)(x).tolist() == [6.0, 6.0]
    assert x.tolist() == [6.0, 6.0]


def test_a_failure_at_a_recompilation_is_one_too(warnings):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        if len(graphs) > 1:
            raise RuntimeError("only once")
        return graph.forward

    compiled = Compiled(add_one, backend=backend)
    compiled(torch.ones(3))
    assert compiled.report()["compiled"]

    assert torch.equal(compiled(torch.ones(3, dtype=torch.int64)), torch.full((3,), 2))
    assert compiled.report() == {
        "name": "add_one", "compiled": False, "cause": "RuntimeError: only once", "graphs": 2, "recompiles": 1,
    }  # fmt: skip
    assert len(warnings()) == 1


@pytest.mark.parametrize("options", [{"backend": "no-such-backend"}, {"mode": "no-such-mode"}], ids=["backend", "mode"])
def test_what_torch_refuses_to_wrap_runs_eagerly(options, warnings):
    compiled = Compiled(add_one, "plus", **options)

    assert compiled(X).item() == 2.0
    assert compiled(X).item() == 2.0
    (line,) = warnings()
    assert "no-such" in line
    assert "plus is not compiled" in line


def test_an_error_of_the_function_has_nothing_to_do_with_torchs_refusal():
    def step(x):
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own") as caught:
        Compiled(step, backend="no-such-backend")(X)
    assert caught.value.__context__ is None


def test_without_a_cpp_compiler_inductor_gives_way_to_eager(tmp_path):
    code = """
import json, logging, sys
import torch
from fuseboard.engine.compiled import Compiled
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("fuseboard").addHandler(handler)
done = []
def step(x):
    done.append(1)
    return torch.sin(x) + 1
compiled = Compiled(step, "step")
x = torch.linspace(0, 1, 7)
same = [torch.equal(compiled(x), torch.sin(x) + 1) for _ in range(3)]
print(json.dumps([same, len(done), lines, compiled.report()]))
"""
    env = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC", "PATH")}
    env |= {"PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    same, calls, lines, report = json.loads(ran.stdout.splitlines()[-1])

    assert same == [True] * 3
    assert calls == 3
    assert len(lines) == 1
    assert not report["compiled"]
    assert "ompiler" in report["cause"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_inductor_compiles_where_it_can():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    compiled = Compiled(block, "block")
    x = torch.randn(5, 8)

    with torch.no_grad():
        assert torch.allclose(compiled(x), block(x), atol=1e-5)
    assert compiled.report()["compiled"], compiled.report()


def test_a_backend_that_asks_dynamo_to_trace_once_more_has_not_failed(warnings):
    # As inductor does when a number has to be a constant.
    asked = []

    def backend(graph, inputs):
        asked.append(1)
        if len(asked) == 1:
            raise torch._dynamo.exc.TensorifyScalarRestartAnalysis
        return graph.forward

    compiled = Compiled(lambda x: torch.cos(x) * 2, "step", backend=backend)
    x = torch.linspace(0, 1, 3)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), torch.cos(x) * 2)

    assert len(asked) == 2
    assert compiled.report() == {"name": "step", "compiled": True, "cause": None, "graphs": 1, "recompiles": 0}
    assert warnings() == []


# ---- dynamo's own failures

_library = torch.library.Library("fuseboard_test", "FRAGMENT")
_library.define("untraceable(Tensor x) -> Tensor")
_library.impl("untraceable", lambda x: x + 1, "CPU")


@torch.library.register_fake("fuseboard_test::untraceable", lib=_library)
def _fails_to_trace(x):
    raise RuntimeError("no shapes for this one")


def test_an_operator_that_dynamo_cannot_trace_is_called_eagerly(warnings):
    done = []

    def step(x):
        done.append(1)
        return torch.ops.fuseboard_test.untraceable(x)

    compiled = Compiled(step, backend="eager")

    assert [compiled(X).item() for _ in range(3)] == [2.0, 2.0, 2.0]
    assert done == [1, 1, 1]
    assert len(warnings()) == 1
    assert "no shapes for this one" in compiled.report()["cause"]


def test_a_call_that_had_begun_when_dynamo_failed_is_not_repeated(warnings):
    done = []

    def step(x):
        done.append(1)
        torch._dynamo.graph_break()
        return torch.ops.fuseboard_test.untraceable(x)

    compiled = Compiled(step, backend="eager")

    with pytest.raises(RuntimeError, match="no shapes for this one"):
        compiled(X)
    assert done == [1]
    assert "cannot be repeated" in compiled.report()["cause"]
    assert compiled(X).item() == 2.0
    assert done == [1, 1]
    assert len(warnings()) == 1


# ---- errors of the function itself (O-11 b, c)


def refuses_negative(x):
    if x.min() < 0:
        raise ValueError("negative input")
    return x + 1


def test_the_functions_own_error_passes_up_and_leaves_compilation_on(warnings):
    compiled = Compiled(refuses_negative, backend="eager")

    for _ in range(2):
        with pytest.raises(ValueError, match="negative input") as caught:
            compiled(-X)
        assert type(caught.value) is ValueError
        assert caught.value.__cause__ is None
        assert compiled(X).item() == 2.0
    assert compiled.report()["compiled"]
    assert warnings() == []


def test_an_error_that_dynamo_finds_while_it_traces_is_the_functions_own(warnings):
    def product(x):
        return x @ torch.ones(3, 3)

    compiled = Compiled(product, backend="eager")
    with pytest.raises(RuntimeError) as own:
        product(torch.ones(2, 2))

    with pytest.raises(RuntimeError) as caught:
        compiled(torch.ones(2, 2))
    assert (type(caught.value), str(caught.value)) == (type(own.value), str(own.value))
    assert torch.equal(compiled(torch.eye(3)), torch.ones(3, 3))
    assert compiled.report()["compiled"]
    assert warnings() == []


def test_an_error_inside_a_graph_is_the_functions_own_when_eager_raises_it_too(warnings):
    def pick(x, i):
        return x[i] * 2

    compiled = Compiled(pick, backend="eager")

    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        compiled(torch.ones(3), torch.tensor([7]))
    assert compiled(torch.ones(3), torch.tensor([1])).item() == 2.0
    assert compiled.report()["compiled"]
    assert warnings() == []


@pytest.mark.parametrize("handled", [False, True], ids=["", "while the caller handles another"])
def test_out_of_memory_in_the_function_passes_up_and_leaves_compilation_on(handled, warnings):
    def step(x):
        if x.min() < 0:
            raise torch.OutOfMemoryError("no memory")
        return x + 1

    def call():
        with pytest.raises(torch.OutOfMemoryError, match="no memory") as caught:
            compiled(-X)
        assert type(caught.value) is torch.OutOfMemoryError

    compiled = Compiled(step, backend="eager")
    if handled:
        try:
            raise RuntimeError("the caller's")
        except RuntimeError:
            call()
    else:
        call()
    assert compiled(X).item() == 2.0
    assert compiled.report()["compiled"]
    assert warnings() == []


def test_out_of_memory_while_compiling_passes_up_as_itself_and_is_tried_again(warnings):
    full = [True]

    def backend(graph, inputs):
        if full.pop():
            raise torch.OutOfMemoryError("no memory to tune with")
        return graph.forward

    compiled = Compiled(add_one, backend=backend)
    with pytest.raises(torch.OutOfMemoryError, match="no memory to tune with") as caught:
        compiled(X)
    assert type(caught.value) is torch.OutOfMemoryError
    full.append(False)

    assert compiled(X).item() == 2.0
    assert compiled.report()["compiled"]
    assert warnings() == []


def test_a_caller_that_handles_out_of_memory_does_not_hide_what_failed(warnings):
    compiled = Compiled(add_one, backend=broken)
    try:
        raise torch.OutOfMemoryError("the caller's")
    except torch.OutOfMemoryError:
        out = compiled(X)

    assert out.item() == 2.0
    assert compiled.report()["cause"] == "RuntimeError: no compiler here"


# ---- compiled code that fails when it runs


def test_a_graph_that_only_computes_is_run_as_traced_when_its_compiled_form_fails(warnings):
    def step(x):
        return torch.nn.functional.layer_norm(x * 2, (4,)).sum() + 1

    compiled = Compiled(step, "step", backend=breaks_when_run)

    assert compiled(torch.ones(4)).item() == 1.0
    assert compiled(torch.ones(4)).item() == 1.0
    assert warnings() == [
        "step is not compiled (RuntimeError: the kernel cannot be launched); it runs eagerly from now on."
    ]


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x.__setitem__(0, 5.0) or x,
        lambda x: torch.add(x, 1, out=x),
        lambda x: nn.functional.relu(x, True),
        lambda x: nn.functional.dropout(x, 0.5),
    ],
    ids=["add_", "setitem", "out", "inplace", "dropout"],
)
def test_a_graph_that_writes_or_draws_is_not_run_twice(write):
    runs = []

    def backend(graph, inputs):
        def run(*args):
            runs.append(graph.forward(*args))
            raise RuntimeError("after the write")

        return run

    compiled = Compiled(write, backend=backend)
    x = torch.ones(3)

    with pytest.raises(RuntimeError, match="after the write"):
        compiled(x)
    assert len(runs) == 1
    want = torch.ones(3)
    if write is not None and not torch.equal(x, want):
        write(want)
        assert torch.equal(x, want)
    assert "cannot be repeated" in compiled.report()["cause"]
    compiled(torch.ones(3))
    assert len(runs) == 1


# ---- what is compiled, and how often


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference_mode"])
def test_lengths_share_their_graphs(mode):
    backend = Counting()
    compiled = Compiled(nn.Linear(4, 4), backend=backend)
    guard = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]

    with guard():
        for length in (1, 2, 5, 100, 777):
            x = torch.randn(length, 4)
            assert torch.equal(compiled(x), compiled.target(x))
    assert backend.graphs <= 3
    report = compiled.report()
    assert report["graphs"] == backend.graphs
    assert report["recompiles"] == backend.graphs - 1


def test_gradients_are_those_of_the_module():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    compiled = Compiled(block, backend="aot_eager")
    x, y = torch.randn(3, 4, requires_grad=True), None
    block(x).square().sum().backward()
    want, x.grad = [x.grad, *(each.grad for each in block.parameters())], None
    block.zero_grad()

    y = compiled(x)
    y.square().sum().backward()

    for got, each in zip([x.grad, *(p.grad for p in block.parameters())], want, strict=True):
        torch.testing.assert_close(got, each)
    assert compiled.report()["compiled"]


def test_keyword_arguments_and_several_results_come_through():
    def step(x, *, scale=1.0, bias=None):
        return {"y": x * scale, "z": (x if bias is None else x + bias,)}

    compiled = Compiled(step, backend="eager")

    assert compiled(X, scale=3.0)["y"].item() == 3.0
    assert compiled(X, bias=torch.ones(1))["z"][0].item() == 2.0
    assert compiled.report()["compiled"]


def test_hooks_of_a_module_run_as_part_of_its_graph():
    block, backend = nn.Linear(4, 4), Counting()
    block.register_forward_hook(lambda module, args, out: out + 100)

    assert Compiled(block, backend=backend)(torch.zeros(2, 4)).min() > 50
    assert backend.graphs == 1


@pytest.mark.parametrize("where", ["block", "0"])
def test_an_equal_module_with_hooks_does_not_run_a_graph_without_them(where):
    plain, hooked, x = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    assert torch.equal(Compiled(plain, backend="eager")(x), plain(x))

    place = hooked if where == "block" else hooked.get_submodule(where)
    handle = place.register_forward_hook(lambda module, args, out: out + 100)
    assert torch.equal(Compiled(hooked, backend="eager")(x), hooked(x))
    assert hooked(x).min() > 50
    handle.remove()
    assert torch.equal(Compiled(hooked, backend="eager")(x), hooked(x))


def test_equal_modules_share_their_graphs_and_none_falls_back_to_eager():
    backend = Counting()
    layers = [Compiled(nn.Linear(4, 4), backend=backend) for _ in range(12)]

    for layer in layers:
        x = torch.randn(3, 4)
        assert torch.equal(layer(x), layer.target(x))
    assert backend.graphs == 1
    assert all(layer.report()["compiled"] for layer in layers)


def test_many_modules_of_one_class_and_other_sizes_are_compiled_each():
    backend = Counting()
    layers = [Compiled(nn.Linear(4, width), backend=backend) for width in range(2, 14)]

    for layer in layers:
        x = torch.randn(3, 4)
        assert torch.equal(layer(x), layer.target(x))
    assert backend.graphs == 12


def test_an_object_that_can_be_called_is_compiled():
    class Scale:
        def __call__(self, x):
            return x * 3

    compiled = Compiled(Scale(), backend="eager")

    assert compiled(X).item() == 3.0
    assert compiled.report()["compiled"]


def test_equal_modules_share_the_news_of_a_failure_too(warnings):
    first, second = (Compiled(nn.Linear(4, 4), name, backend=broken) for name in ("first", "second"))
    x = torch.randn(3, 4)

    for layer in (first, second):
        assert torch.equal(layer(x), layer.target(x))
    assert [line.split()[0] for line in warnings()] == ["first", "second"]
    assert second.report()["cause"] == "RuntimeError: no compiler here"


class Block(nn.Module):
    """A block that keeps a compiled one."""

    def __init__(self, backend):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.compiled = Compiled(self.inner, "inner", backend=backend)

    def forward(self, x, broken=False):
        x = (self.compiled or self.inner)(x)
        if broken:
            torch._dynamo.graph_break()
        return x * 2


@pytest.mark.parametrize("broken", [False, True], ids=["", "with a graph break"])
def test_one_compiled_within_another_is_part_of_its_graph(broken):
    backend = Counting()
    block = Block(backend)
    outer = Compiled(block, "outer", backend=backend)
    x = torch.randn(3, 4)

    assert torch.equal(outer(x, broken), block.inner(x) * 2)
    assert backend.graphs == 1 + broken
    assert outer.report()["graphs"] == 1 + broken


def test_one_called_eagerly_by_another_does_not_lose_whose_call_it_is():
    @torch.compiler.disable
    def eagerly(function, x):
        return function(x)

    failing = Compiled(lambda x: x - 1, "failing", backend=broken)
    outer = Compiled(lambda x: eagerly(failing, x * 2) * 3, "outer", backend="eager")

    assert outer(X).item() == 3.0
    assert outer.report()["compiled"]
    assert failing.report()["cause"] == "RuntimeError: no compiler here"


def test_attention_follows_the_policy_that_is_bound():
    site = fb.Site("compiled.follows")

    def step(x):
        return fb.attention(x, x, x, site=site) * 2

    compiled = Compiled(step, backend="eager")
    x = torch.randn(1, 2, 5, 8)
    run = fb.Run()

    for policy in ("sdpa-math", "auto", "sdpa-cpu"):
        with fb.bind(policy, run=run):
            torch.testing.assert_close(compiled(x), step(x))
    assert run.report()["attention"]["used"] == {"sdpa-math": 2, "reference": 2, "sdpa-cpu": 2}


# ---- a plain attribute


def test_a_module_that_keeps_one_has_the_state_that_it_would_have_without():
    block = Block("eager")
    block(torch.randn(2, 4))

    assert list(block.state_dict()) == ["inner.weight", "inner.bias"]
    assert [name for name, _ in block.named_modules()] == ["", "inner"]
    assert len(list(block.parameters())) == 2
    assert not isinstance(block.compiled, nn.Module)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))], ids=["deepcopy", "pickle"]
)
def test_a_copy_compiles_its_own_module(copied):
    block = Block("eager")
    block(torch.randn(2, 4))
    twin = copied(block)
    with torch.no_grad():
        twin.inner.weight.zero_()
        twin.inner.bias.fill_(1.0)

    assert twin.compiled.target is twin.inner
    assert twin.compiled.report()["graphs"] == 0
    assert twin(torch.randn(2, 4)).unique().tolist() == [2.0]
    assert twin.compiled.report()["compiled"]
    assert list(twin.state_dict()) == ["inner.weight", "inner.bias"]
    assert block.inner.weight.abs().sum() > 0


def test_one_of_the_module_itself_may_be_kept_on_it():
    block = nn.Linear(4, 4)
    block.compiled = Compiled(block, backend="eager")
    twin = copy.deepcopy(block)

    assert twin.compiled.target is twin
    assert torch.equal(twin.compiled(torch.ones(1, 4)), block(torch.ones(1, 4)))


def test_compile_module_is_none_unless_asked_for():
    block = nn.Linear(4, 4)

    assert compile_module(block, False, "block") is None
    assert isinstance(compile_module(block, True, "block"), Compiled)
    assert (compile_module(block, False, "block") or block) is block


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="expected a module or a function"):
        Compiled(3)


def test_its_repr_says_how_it_runs():
    compiled = Compiled(add_one, "plus", backend="eager")
    assert repr(compiled) == "<Compiled plus (not called yet)>"
    compiled(X)
    assert repr(compiled) == "<Compiled plus (compiled)>"
    failed = Compiled(add_one, "plus", backend=broken)
    failed(X)
    assert repr(failed) == "<Compiled plus (eager: RuntimeError: no compiler here)>"


def test_a_function_without_a_graph_is_not_called_compiled():
    compiled = Compiled(len, "len", backend="eager")

    assert compiled([1, 2]) == 2
    report = compiled.report()
    assert not report["compiled"]
    assert "no graph" in report["cause"]


# ---- devices and threads


def test_on_mps_it_is_eager():
    backend = Counting()
    with FakeTensorMode():
        block, x = nn.ReLU(), torch.empty(2, 4, device="mps")
        block.weight = nn.Parameter(torch.empty(4, device="mps"))
        compiled, function = Compiled(block, backend=backend), Compiled(add_one, backend=backend)

        assert compiled(x).device.type == "mps"
        assert function(x=x).device.type == "mps"
        assert function(x).shape == (2, 4)
        assert compiled(x).shape == (2, 4)
    assert backend.graphs == 0
    assert compiled.report()["cause"] == "torch.compile is not used on MPS"


@torch.compiler.disable
def meet(barrier, met):
    """Note whether another call is here at the same time."""
    try:
        barrier.wait()
    except threading.BrokenBarrierError:
        met.append(False)
    else:
        met.append(True)


@pytest.mark.parametrize(("policy", "together"), [(None, True), ("auto", True), ("exact", False)])
def test_calls_run_at_once_under_auto_and_one_at_a_time_under_another_policy(policy, together):
    barrier = threading.Barrier(2)
    met = []

    def step(x):
        y = x + 1
        meet(barrier, met)
        return y * 2

    compiled = Compiled(step, backend="eager")
    barrier.abort()
    compiled(X)  # compiles, alone
    met.clear()
    barrier = threading.Barrier(2, timeout=10 if together else 0.5)

    def work():
        if policy is None:
            assert compiled(X).item() == 4.0
            return
        with fb.bind(policy):
            assert compiled(X).item() == 4.0

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == [together, together]


def test_threads_that_compile_at_once_get_right_results_and_one_warning(warnings):
    failing, good = Compiled(add_one, "failing", backend=broken), Compiled(lambda x: x * 3, "good", backend="eager")
    start = threading.Barrier(4)
    results = [None] * 4

    def work(i):
        start.wait()
        results[i] = [(failing(torch.full((n,), float(i))), good(torch.full((n,), float(i)))) for n in (2, 3, 4)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, pairs in enumerate(results):
        for plus, times in pairs:
            assert plus.unique().item() == i + 1
            assert times.unique().item() == i * 3
    assert len(warnings()) == 1
    assert good.report()["compiled"]


def test_a_graph_that_another_thread_gives_up_meanwhile_runs_as_it_was_found():
    found = iter([add_one, None])

    class Shared(_Graph):
        compiled = property(lambda self: next(found), lambda self, value: None)

    graph = Shared(add_one, add_one, repeatable=False)
    assert graph(X).item() == 2.0
