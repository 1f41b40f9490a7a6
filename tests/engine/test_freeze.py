"""freeze: the same kernels as under the policy, with nothing left to choose, and traceable without a break."""

from __future__ import annotations

import copy
import gc
import itertools
import sys
import threading
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fuseboard as fb
from fuseboard import context
from fuseboard.constraints import ALL_LENGTHS
from fuseboard.engine.compiled import Compiled
from fuseboard.engine.freeze import NotFrozenError, freeze
from fuseboard.probe import Verdict
from fuseboard.registry import Entry, Registry, use
from fuseboard.settings import Settings

sdpa = F.scaled_dot_product_attention
_numbers = itertools.count()
traced = pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="torch.compile of older releases does not know this Python"
)
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert context.BOUND.get() is None


@pytest.fixture
def site():
    return fb.Site(f"frozen.{next(_numbers)}")


class Graphs:
    """A backend that keeps the graphs and runs them as they are."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward

    def operators(self):
        return [getattr(each.target, "__name__", str(each.target)) for each in self.graphs[-1].graph.nodes]


class Shifted:
    """Attention plus a number, so that its results tell who answered."""

    limits: ClassVar = {}

    def __init__(self, shift, fail=False):
        self.shift = shift
        self.fail = fail

    def __call__(self, q, k, v, *, mask, mask_info, causal, scale, dropout_p):
        if self.fail:
            raise RuntimeError("the kernel broke")
        return sdpa(q, k, v, attn_mask=mask, is_causal=causal, scale=scale) + self.shift


class Structured(Shifted):
    """Takes a structure alone."""

    limits: ClassVar = {"masks": set(), "structures": (fb.StructureRule(keys={"right"}),)}

    def __call__(self, q, k, v, *, mask, mask_info, causal, scale, dropout_p):
        mask = mask_info.dense(q.shape[2], k.shape[2], q.device)
        return super().__call__(q, k, v, mask=mask, mask_info=None, causal=causal, scale=scale, dropout_p=dropout_p)


@contextmanager
def registered(guards=(), **kernels):
    """A registry of these kernels, by rank in the order given."""

    def entry(rank, name, kernel):
        given = {
            "devices": {"cpu"}, "dtypes": {torch.float32}, "causal": ALL_LENGTHS, "masks": {"bool", "additive"},
            "custom_scale": True, "backward": True, "any_stride": True, "guards": guards,
        }  # fmt: skip
        limits = fb.Constraints(**given | kernel.limits)
        hooks = {
            "info": lambda: fb.BackendInfo("a fake"),
            "constraints": lambda: limits,
            "kernel": lambda: kernel,
            "exactness": lambda: fb.Exactness.EXACT,
            "rank": lambda: float(rank),
        }
        plugin = type("plugin", (), {name: staticmethod(fb.hookimpl(each)) for name, each in hooks.items()})
        return Entry(name, lambda: plugin, "acme-kernels", "1.0")

    registry = Registry([entry(i, name, kernel) for i, (name, kernel) in enumerate(kernels.items())], Settings())
    for name, kernel in kernels.items():
        assert registry.resolve(name) is not None, registry.faults
        registry.verdicts[name, "cpu"] = Verdict(ok=True, kernel=kernel)
    with use(registry):
        yield registry


def qkv(length=7, *, heads=4, kv_heads=None, grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, heads, length, 8), *[(2, kv_heads or heads, length, 8)] * 2)
    return [torch.randn(*shape, generator=generator).requires_grad_(grad) for shape in shapes]


# ---- with frozen: fuseboard.attention as it stands


def test_calls_are_answered_by_whoever_answered_the_example(site):
    q, k, v = qkv()
    with registered(a=Shifted(1.0), b=Shifted(2.0)):
        frozen = freeze(site, "b", lambda: fb.attention(q, k, v, site=site))
        with frozen:
            out = fb.attention(q, k, v, site=site)

    assert torch.equal(out, sdpa(q, k, v) + 2.0)
    assert frozen.report() == {site.name: {"cpu, float32, head_dim 8, many queries, equal lengths": "b"}}


def test_what_becomes_faster_or_breaks_later_changes_nothing(site):
    q, k, v = qkv()
    first, second = Shifted(1.0), Shifted(2.0)
    with registered(a=first, b=second):
        first.fail = True
        frozen = freeze(site, "fast", lambda: fb.attention(q, k, v, site=site))
        first.fail = False
        with frozen:
            for length in (7, 9):
                x = qkv(length)
                assert torch.equal(fb.attention(*x, site=site), sdpa(*x) + 2.0)


def test_another_kind_of_call_is_refused_with_site_call_and_what_was_frozen(site):
    frozen = freeze(site, "exact", lambda: fb.attention(*qkv(), site=site))

    for call in (lambda **given: fb.attention(*qkv(1), site=site), lambda **given: frozen[site](*qkv(1))):
        with frozen, pytest.raises(NotFrozenError) as caught:
            call()
        assert str(caught.value) == (
            f"site {site.name!r} was not frozen for such a call: cpu, float32, head_dim 8, one query, equal lengths. "
            "Frozen there, under policy 'exact':\n"
            "    cpu, float32, head_dim 8, many queries, equal lengths: sdpa-cpu\n"
            "Freeze with an example that makes it."
        )
        assert caught.value.site == site.name
        assert "one query" in caught.value.call
        assert list(caught.value.frozen.values()) == ["sdpa-cpu"]


def test_a_site_that_the_example_did_not_call_is_refused(site):
    other = fb.Site(f"frozen.{next(_numbers)}")
    frozen = freeze(site, "exact", lambda: fb.attention(*qkv(), site=site))
    later = fb.Site(f"frozen.{next(_numbers)}")

    for each in (other, later):
        with frozen, pytest.raises(NotFrozenError, match=rf"site '{each.name}' (is|was) not frozen"):
            fb.attention(*qkv(), site=each)
        with pytest.raises(NotFrozenError, match=f"site '{each.name}' is not frozen"):
            frozen[each]


def test_an_example_that_calls_too_little_is_refused(site):
    other = fb.Site(f"frozen.{next(_numbers)}")

    for policy in ("exact", "auto"):
        with pytest.raises(NotFrozenError, match=f"did not call site '{other.name}'"):
            freeze([site, other], policy, lambda: fb.attention(*qkv(), site=site))
        with pytest.raises(NotFrozenError, match="called no site"):
            freeze(lambda: None, policy, ())


def test_sizes_that_a_guard_refuses_are_refused(site):
    guard = fb.Guard("length", lambda call, sizes: sizes.q_length <= 8, "at most 8", lambda sizes: sizes.q_length)
    with registered(guards=(guard,), a=Shifted(1.0)):
        frozen = freeze(site, "fast", lambda: fb.attention(*qkv(7), site=site))
        with frozen:
            fb.attention(*qkv(8), site=site)
            with pytest.raises(
                NotFrozenError, match=r"was frozen to a for such calls.*\n.*length is 9, allowed at most 8"
            ):
                fb.attention(*qkv(9), site=site)


def test_a_kernel_that_breaks_is_not_replaced_by_another(site):
    q, k, v = qkv()
    kernel = Shifted(1.0)
    with registered(a=kernel, b=Shifted(2.0)):
        frozen = freeze(site, "fast", lambda: fb.attention(q, k, v, site=site))
        kernel.fail = True
        with frozen:
            for _ in range(2):
                with pytest.raises(NotFrozenError, match=r"was frozen to a .*\n.*the kernel broke"):
                    fb.attention(q, k, v, site=site)
        with fb.bind("fast"):
            assert torch.equal(fb.attention(q, k, v, site=site), sdpa(q, k, v) + 2.0)


def test_other_policies_choose_as_ever_beside_it(site):
    q, k, v = qkv()
    with registered(a=Shifted(1.0), b=Shifted(2.0)):
        frozen = freeze(site, "b", lambda: fb.attention(q, k, v, site=site))
        with fb.bind("fast"):
            assert torch.equal(fb.attention(q, k, v, site=site), sdpa(q, k, v) + 1.0)
            with frozen:
                assert torch.equal(fb.attention(q, k, v, site=site), sdpa(q, k, v) + 2.0)
        assert torch.equal(fb.attention(q, k, v, site=site), sdpa(q, k, v))


def test_a_run_counts_what_was_frozen(site):
    frozen = freeze(site, "exact", lambda: fb.attention(*qkv(), site=site))
    run = fb.Run()

    with frozen.bind(run=run):
        fb.attention(*qkv(), site=site)
        frozen[site](*qkv())
    frozen[site](*qkv())
    assert run.report()["attention"]["used"] == {"sdpa-cpu": 2}


def test_a_mapping_of_policies_is_frozen_site_by_site(site):
    other = fb.Site(f"frozen.{next(_numbers)}")

    def example():
        fb.attention(*qkv(), site=site)
        fb.attention(*qkv(), site=other)

    frozen = freeze([site, other], {site.name: "auto", "*": "sdpa-math"}, example)

    assert frozen.report()[site.name] == {"every call": "reference"}
    assert list(frozen.report()[other.name].values()) == ["sdpa-math"]
    with frozen:
        assert torch.equal(fb.attention(*qkv(1), site=site), sdpa(*qkv(1)))


def test_a_model_is_frozen_by_its_arguments(site):
    class Model(nn.Module):
        def forward(self, x, *, double=False):
            return fb.attention(x, x, x, site=site) * (2 if double else 1)

    x = qkv()[0]
    for example in ((x,), {"x": x, "double": True}):
        assert list(freeze(Model(), "sdpa-math", example).report()) == [site.name]


@pytest.mark.parametrize(
    ("what", "example", "message"),
    [
        ([1], lambda: None, "was given 1; expected sites and a function"),
        ([], (1,), r"was given \(1,\); expected sites and a function"),
        (nn.ReLU(), torch.ones(1), "was given a Tensor; expected a tuple of the model's arguments"),
    ],
)
def test_what_does_not_go_together_is_an_error(what, example, message):
    with pytest.raises(TypeError, match=message):
        freeze(what, "exact", example)


def test_nothing_of_it_remains_when_it_is_dropped_or_closed(site):
    q, k, v = qkv()
    before = dict(site.tables)
    frozen = freeze(site, "exact", lambda: fb.attention(q, k, v, site=site))
    attend = frozen[site]
    assert len(site.tables) == len(before) + 1

    del frozen
    gc.collect()
    assert torch.equal(attend(q, k, v), sdpa(q, k, v))
    del attend
    gc.collect()
    assert site.tables == before

    frozen = freeze(site, "exact", lambda: fb.attention(q, k, v, site=site))
    frozen.close()
    frozen.close()
    assert site.tables == before
    with frozen, pytest.raises(NotFrozenError):
        fb.attention(q, k, v, site=site)


@pytest.mark.parametrize("kept", ["site's call", "attention", "frozen"])
def test_a_copy_of_a_module_that_keeps_it_shares_it(kept, site):
    x = torch.randn(1, 2, 5, 8)
    frozen = freeze(site, "exact", lambda: fb.attention(x, x, x, site=site))
    module = nn.Linear(1, 1)
    module.kept = {"site's call": frozen[site], "attention": frozen.attention, "frozen": frozen}[kept]

    assert copy.deepcopy(module).kept is module.kept


def test_threads_share_it(site):
    with registered(a=Shifted(1.0)):
        frozen = freeze(site, "a", lambda: fb.attention(*qkv(), site=site))
        results = []

        def work(i):
            x = qkv(5 + i, seed=i)
            with frozen:
                results.append(torch.equal(fb.attention(*x, site=site), sdpa(*x) + 1.0))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [True] * 4


# ---- frozen[SITE] in a graph

KINDS = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"scale": 0.3},
    "boolean mask": {"mask": torch.eye(7, dtype=torch.bool).roll(1, 0) | torch.eye(7, dtype=torch.bool)},
    "additive mask": {"mask": torch.linspace(-1, 1, 49).view(7, 7)},
    "gqa": {"enable_gqa": True},
}
OPERATOR = {
    "sdpa-cpu": "_scaled_dot_product_flash_attention_for_cpu",
    "sdpa-math": "_scaled_dot_product_attention_math",
    "reference": "scaled_dot_product_attention",
}


@traced
@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["exact", "sdpa-math", "auto"])
def test_a_frozen_call_is_one_graph_with_the_kernels_operator_in_it(policy, kind, grad, site):
    given, kv_heads = KINDS[kind], 2 if kind == "gqa" else 4
    frozen = freeze(site, policy, lambda: fb.attention(*qkv(kv_heads=kv_heads, grad=grad), site=site, **given))
    (name,) = frozen.report()[site.name].values()
    attend, backend = frozen[site], Graphs()

    def step(q, k, v):
        return attend(q, k, v, **given) * 2

    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    q, k, v = qkv(kv_heads=kv_heads, grad=grad)
    out = compiled(q, k, v)

    torch.testing.assert_close(out, step(q, k, v), rtol=1e-5, atol=1e-5)
    assert len(backend.graphs) == 1
    assert OPERATOR[name] in backend.operators()
    if grad:
        got = torch.autograd.grad(out.sum(), (q, k, v))
        want = torch.autograd.grad(step(q, k, v).sum(), (q, k, v))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@traced
def test_lengths_of_one_kind_share_a_graph_and_another_kind_is_refused(site):
    frozen = freeze(site, "exact", lambda: fb.attention(*qkv(), site=site))
    attend, backend = frozen[site], Graphs()
    compiled = torch.compile(lambda q, k, v: attend(q, k, v) + 0, backend=backend, dynamic=True)

    for length in (3, 5, 7, 100):
        x = qkv(length)
        torch.testing.assert_close(compiled(*x), sdpa(*x))
    assert len(backend.graphs) == 1
    with pytest.raises(NotFrozenError, match="one query"):
        compiled(*qkv(1))


def drawn(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


WRONG = {
    "fewer values than keys": {"v": drawn(2, 4, 5, 8)},
    "more values than keys": {"v": drawn(2, 4, 9, 8)},
    "fewer heads of values": {"v": drawn(2, 2, 7, 8)},
    "another batch of keys and values": {"k": drawn(3, 4, 7, 8), "v": drawn(3, 4, 7, 8)},
    "another head dimension of keys": {"k": drawn(2, 4, 7, 16)},
    "another dtype of values": {"v": drawn(2, 4, 7, 8, dtype=torch.float64)},
    "a mask for fewer keys": {"mask": drawn(7, 5)},
    "a mask for more keys": {"mask": drawn(7, 9)},
    "a mask for fewer queries": {"mask": drawn(2, 1, 5, 7)},
    "a mask for more rows": {"mask": drawn(3, 1, 7, 7)},
    "a boolean mask for fewer keys": {"mask": drawn(7, 5, dtype=torch.bool)},
    "a mask of another dtype": {"mask": drawn(7, 7, dtype=torch.float64)},
    "a mask of five dimensions": {"mask": drawn(1, 2, 1, 7, 7)},
    "a probability below zero": {"dropout_p": -0.1},
}


@traced
@pytest.mark.parametrize("wrong", WRONG)
def test_what_eager_refuses_to_compute_a_graph_does_not_compute_either(wrong, site):
    right = dict(zip("qkv", qkv(), strict=True))
    given = WRONG[wrong]
    if "mask" in given:
        right["mask"] = drawn(7, 7, dtype=given["mask"].dtype if given["mask"].dtype == torch.bool else torch.float32)
    frozen = freeze(site, "sdpa-cpu", lambda: fb.attention(site=site, **right))
    attend, backend = frozen[site], Graphs()

    def step(arguments):
        return attend(**arguments) * 2

    with pytest.raises(fb.InputError) as eager:
        step(right | given)
    compiled = torch.compile(step, backend=backend, dynamic=True)
    torch.testing.assert_close(compiled(right), step(right))
    assert len(backend.graphs) == 1
    with pytest.raises(fb.InputError) as later:
        compiled(right | given)
    torch._dynamo.reset()
    with pytest.raises(fb.InputError) as at_once:
        torch.compile(step, backend="eager", dynamic=True)(right | given)

    assert str(later.value) == str(at_once.value) == str(eager.value)


@traced
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("wrong", ["fewer values than keys", "a mask for fewer keys"])
def test_lengths_that_a_kernel_would_not_compare_are_compared_by_an_exported_program(wrong, site):
    right = {**dict(zip("qkv", qkv(), strict=True)), "mask": drawn(7, 7)}
    frozen = freeze(site, "sdpa-cpu", lambda: fb.attention(site=site, **right))

    attend = frozen[site]

    class Module(nn.Module):
        def forward(self, q, k, v, mask):
            return attend(q, k, v, mask=mask) * 2

    auto = torch.export.Dim.AUTO
    shapes = {**{name: {2: auto} for name in "qkv"}, "mask": {0: auto, 1: auto}}
    program = torch.export.export(Module(), (), right, dynamic_shapes=shapes, strict=True).module()

    nine = {**dict(zip("qkv", qkv(9), strict=True)), "mask": drawn(9, 9)}
    torch.testing.assert_close(program(**nine), Module()(**nine))
    with pytest.raises((AssertionError, RuntimeError), match=r"size|shape"):
        program(**right | WRONG[wrong])


@traced
def test_heads_that_were_frozen_as_shared_are_not_shared_unasked(site):
    x = qkv(kv_heads=2)
    frozen = freeze(site, "exact", lambda: fb.attention(*x, site=site, enable_gqa=True))
    attend = frozen[site]
    compiled = torch.compile(lambda *x: attend(*x) * 2, backend="eager", dynamic=True)

    with pytest.raises(fb.InputError, match="enable_gqa=True if key heads are shared"):
        compiled(*x)


@traced
def test_in_a_full_graph_another_kind_is_dynamos_error(site):
    frozen = freeze(site, "exact", lambda: fb.attention(*qkv(), site=site))
    attend = frozen[site]
    compiled = torch.compile(lambda q, k, v: attend(q, k, v) + 0, backend="eager", fullgraph=True)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(*qkv(1))


@traced
def test_an_encoder_layer_with_frozen_attention_is_one_graph(site):
    class Layer(nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.qkv, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)
            self.attention = attention

        def forward(self, x):
            batch, length, _ = x.shape
            q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
            attended = self.attention(q, k, v, site=site)
            return x + self.out(attended.transpose(1, 2).reshape(batch, length, 32))

    torch.manual_seed(0)
    layer = Layer(fb.attention)
    x = torch.randn(2, 9, 32)
    with torch.no_grad():
        frozen = freeze(layer, "exact", (x,))
        want = layer(x)
        layer.attention = frozen.attention
        backend = Graphs()
        compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)

        torch.testing.assert_close(compiled(x), want, rtol=1e-5, atol=1e-5)
        compiled(torch.randn(3, 12, 32))
    assert len(backend.graphs) == 1
    assert backend.operators().count(OPERATOR["sdpa-cpu"]) == 1


@traced
@pytest.mark.parametrize("way", ["callable", "attention"])
def test_one_function_with_another_policy_frozen_is_another_graph(way, site):
    q, k, v = qkv()
    with registered(a=Shifted(1.0), b=Shifted(2.0)):
        frozen = {name: freeze(site, name, lambda: fb.attention(q, k, v, site=site)) for name in ("a", "b", "auto")}
    engine = {"site": site}

    def step(q, k, v):
        if way == "attention":
            return engine["attention"](q, k, v, site=engine["site"]) * 2
        return engine["call"](q, k, v) * 2

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    for name, shift in [("a", 1.0), ("b", 2.0), ("auto", 0.0), ("a", 1.0), ("b", 2.0), ("auto", 0.0)]:
        engine.update(attention=frozen[name].attention, call=frozen[name][site])
        assert torch.equal(compiled(q, k, v), (sdpa(q, k, v) + shift) * 2), name


@traced
def test_sizes_that_a_guard_refuses_leave_the_graph_and_are_refused(site):
    guard = fb.Guard("length", lambda call, sizes: sizes.q_length <= 8, "at most 8", lambda sizes: sizes.q_length)
    with registered(guards=(guard,), a=Shifted(1.0)):
        frozen = freeze(site, "fast", lambda: fb.attention(*qkv(7), site=site))
        attend = frozen[site]
        compiled = torch.compile(lambda q, k, v: attend(q, k, v) * 2, backend="eager", dynamic=True)

        for length in (7, 8):
            assert torch.equal(compiled(*qkv(length)), (sdpa(*qkv(length)) + 1.0) * 2)
        with pytest.raises(NotFrozenError, match="length is 9, allowed at most 8"):
            compiled(*qkv(9))


@traced
@pytest.mark.parametrize("policy", ["exact", "auto"])
def test_autocast_is_traced_as_it_was_frozen(policy, site):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        frozen = freeze(site, policy, lambda: fb.attention(*qkv(), site=site))
        attend = frozen[site]
        want = attend(*qkv())
        out = torch.compile(lambda *x: attend(*x) * 1, backend="eager", fullgraph=True)(*qkv())

    assert want.dtype is torch.bfloat16
    torch.testing.assert_close(out, want)


@traced
def test_mask_info_leaves_the_graph_and_is_answered(site):
    info = fb.MaskInfo(causal=True)
    frozen = freeze(site, "exact", lambda: fb.attention(*qkv(), site=site, mask_info=info))
    attend = frozen[site]
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, mask_info=info) * 2, backend="eager")

    torch.testing.assert_close(compiled(*qkv()), sdpa(*qkv(), is_causal=True) * 2)


def padded(length=7):
    return fb.mask_for(length, length, keys=torch.arange(length) < torch.tensor([[length], [length - 2]]))


@traced
def test_a_graph_has_the_dense_mask_of_a_call_whose_structure_cannot_be_traced_and_the_report_says_so(site):
    mask, info = padded()
    with registered(a=Structured(1.0), b=Shifted(2.0)):
        frozen = freeze(site, "fast", lambda: fb.attention(*qkv(), site=site, mask=mask, mask_info=info))
        answers = {kind: answer for kind, answer in frozen.report()[site.name].items() if "right-padded" in kind}
        attend = frozen[site]
        compiled = torch.compile(
            lambda *x, mask, info: attend(*x, mask=mask, mask_info=info) * 2, backend="eager", fullgraph=True
        )
        got = [compiled(*qkv(), mask=given, info=info) for given in (mask, ~mask)]

        assert [*answers.values()] == ["a (traced: dense mask, b)"]
        assert torch.equal(attend(*qkv(), mask=mask, mask_info=info), sdpa(*qkv(), attn_mask=mask) + 1.0)
    assert torch.equal(got[0], (sdpa(*qkv(), attn_mask=mask) + 2.0) * 2)
    # The mask decides, and not what is said of it.
    assert torch.equal(got[1].isnan(), (sdpa(*qkv(), attn_mask=~mask)).isnan())
    assert not torch.equal(got[0], got[1])


@traced
def test_where_nobody_takes_the_dense_mask_the_graph_breaks_and_the_structure_is_answered(site):
    mask, info = padded()
    with registered(a=Structured(1.0)):
        policy = fb.policy_for("a", strict=True)
        frozen = freeze(site, policy, lambda: fb.attention(*qkv(), site=site, mask=mask, mask_info=info))
        attend = frozen[site]

        def step(q, k, v):
            return attend(q, k, v, mask=mask, mask_info=info) * 2

        assert [*frozen.report()[site.name].values()] == ["a"]
        assert torch.equal(torch.compile(step, backend="eager")(*qkv()), (sdpa(*qkv(), attn_mask=mask) + 1.0) * 2)


def test_a_site_that_the_example_makes_is_frozen():
    made = {}

    def engine(q, k, v):
        if not made:
            made["site"] = fb.Site(f"frozen.{next(_numbers)}")
        return fb.attention(q, k, v, site=made["site"])

    with registered(a=Shifted(1.0)):
        frozen = freeze(engine, "fast", tuple(qkv()))
        assert torch.equal(frozen[made["site"]](*qkv()), sdpa(*qkv()) + 1.0)
        with frozen, pytest.raises(NotFrozenError, match="one query"):
            engine(*qkv(1))
        frozen.close()
        assert not made["site"].tables


@traced
def test_compiled_takes_a_function_with_frozen_calls(site):
    frozen = freeze(site, "sdpa-math", lambda: fb.attention(*qkv(), site=site))
    attend, backend = frozen[site], Graphs()
    compiled = Compiled(lambda q, k, v: attend(q, k, v) + 1, backend=backend)

    for length in (3, 7, 30):
        x = qkv(length)
        torch.testing.assert_close(compiled(*x), sdpa(*x) + 1, rtol=1e-5, atol=1e-5)
    assert compiled.report()["graphs"] == 1


@traced
def test_fuseboard_attention_under_a_frozen_binding_is_right_in_a_compiled_function(site):
    with registered(a=Shifted(1.0), b=Shifted(2.0)):
        frozen = freeze(site, "b", lambda: fb.attention(*qkv(), site=site))
        compiled = torch.compile(lambda q, k, v: fb.attention(q, k, v, site=site) * 2, backend="eager")
        with frozen:
            assert torch.equal(compiled(*qkv()), (sdpa(*qkv()) + 2.0) * 2)
        assert torch.equal(compiled(*qkv()), sdpa(*qkv()) * 2)


# ---- with frozen.tracing(): fuseboard.attention itself in a graph


@traced
def test_fuseboard_attention_is_in_the_graph_and_each_choice_has_its_own(site):
    def step(q, k, v):
        return fb.attention(q, k, v, site=site) * 2

    q, k, v = qkv()
    frozen = {policy: freeze(step, policy, (q, k, v)) for policy in ("exact", "sdpa-math", "auto")}
    backend = Graphs()
    compiled = torch.compile(step, backend=backend, fullgraph=True)

    for policy, name in [("exact", "sdpa-cpu"), ("sdpa-math", "sdpa-math"), ("auto", "reference")]:
        with frozen[policy].tracing():
            torch.testing.assert_close(compiled(q, k, v), step(q, k, v), rtol=1e-5, atol=1e-5)
        assert OPERATOR[name] in backend.operators()
    assert len(backend.graphs) == 3
    with frozen["exact"].tracing(), frozen["sdpa-math"].tracing():
        compiled(q, k, v)
    assert len(backend.graphs) == 3


@traced
def test_a_graph_of_a_frozen_choice_is_not_used_without_it(site):
    def step(q, k, v):
        return fb.attention(q, k, v, site=site) * 2

    q, k, v = qkv()
    with registered(a=Shifted(1.0), b=Shifted(2.0)):
        first, second = (freeze(step, name, (q, k, v)) for name in ("a", "b"))
        compiled = torch.compile(step, backend="eager")
        for _ in range(2):
            with first.tracing():
                assert torch.equal(compiled(q, k, v), (sdpa(q, k, v) + 1.0) * 2)
            assert torch.equal(compiled(q, k, v), sdpa(q, k, v) * 2)
            with fb.bind("b"):
                assert torch.equal(compiled(q, k, v), (sdpa(q, k, v) + 2.0) * 2)
            with second:
                assert torch.equal(compiled(q, k, v), (sdpa(q, k, v) + 2.0) * 2)
            with second.tracing(), pytest.raises(NotFrozenError, match="one query"):
                compiled(*qkv(1))


@traced
def test_threads_trace_and_run_each_its_own_choice(site):
    def step(q, k, v):
        return fb.attention(q, k, v, site=site) * 2

    q, k, v = qkv()
    with registered(a=Shifted(1.0), b=Shifted(2.0)):
        frozen = [freeze(step, name, (q, k, v)) for name in ("a", "b")]
        compiled = torch.compile(step, backend="eager", fullgraph=True)
        barrier, wrong = threading.Barrier(4), []

        def work(i):
            barrier.wait()
            for _ in range(20):
                with frozen[i % 2].tracing():
                    if not torch.equal(compiled(q, k, v), (sdpa(q, k, v) + (1.0 + i % 2)) * 2):
                        wrong.append(i)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
