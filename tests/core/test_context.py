from __future__ import annotations

import asyncio
import contextlib
import gc
import threading

import pytest
import torch
from fakes import Fake, in_threads, qkv, registered
from torch.utils.checkpoint import checkpoint

import fuseboard as fb
from fuseboard import context


@pytest.fixture(autouse=True)
def board():
    with registered(("a", Fake()), ("b", Fake())) as registry:
        yield registry


@pytest.fixture
def kernel(board):
    return board.verdicts["a", "cpu"].kernel


def now() -> str | None:
    """The name of the policy that is bound here."""
    bound = context.bound()
    return None if bound is None else bound.policy.name


# ---- bind


def test_nothing_is_bound_at_first():
    assert now() is None


def test_bind_nests_and_gives_its_run():
    run = fb.Run()
    with fb.bind("a", run=run) as given:
        assert given is run
        assert context.bound().run is run
        with fb.bind("b") as inner:
            assert inner is None
            assert now() == "b"
        assert now() == "a"
    assert now() is None


def test_bind_is_entered_again_within_itself():
    block = fb.bind("a")
    with block, fb.bind("b"), block:
        assert now() == "a"
    with block:
        assert now() == "a"
    assert now() is None


def test_bind_restores_after_an_exception():
    with fb.bind("b"):
        with pytest.raises(ZeroDivisionError), fb.bind("a"):
            raise ZeroDivisionError
        assert now() == "b"


def test_bind_says_at_once_that_there_is_no_such_policy():
    with pytest.raises(fb.PolicyError):
        fb.bind("nothing")


def test_one_bind_object_serves_many_threads_at_once():
    block = fb.bind("a")

    def work(i):
        seen = []
        for _ in range(200):
            with block:
                seen.append(now())
                with fb.bind("b"):
                    seen.append(now())
            seen.append(now())
        return set(zip(seen[::3], seen[1::3], seen[2::3], strict=True))

    assert in_threads(4, work) == [{("a", "b", None)}] * 4


@pytest.mark.parametrize("first_out", [0, 1])
def test_threads_that_are_inside_one_bind_object_leave_it_in_any_order(first_out):
    block, inside, left = fb.bind("a"), threading.Barrier(2), threading.Event()

    def work(i):
        with fb.bind("b"):
            with block:
                inside.wait()
                if i != first_out:
                    left.wait()
            seen = now()
            left.set()
        return seen

    assert in_threads(2, work) == ["b", "b"]


def test_a_block_left_in_another_context_says_what_to_use_instead():
    block = fb.bind("a")
    other = contextvars_copy_entering(block)

    with pytest.raises(RuntimeError, match=r"left in another context than it was entered in; use fuseboard\.steps"):
        block.__exit__(None, None, None)
    other.run(block.__exit__, None, None, None)


def contextvars_copy_entering(block):
    import contextvars

    other = contextvars.copy_context()
    other.run(block.__enter__)
    return other


def test_threads_never_see_each_others_policy():
    everyone_in, everyone_saw = threading.Barrier(8), threading.Barrier(8)

    def work(i):
        name = ("a", "b", "fast", "exact")[i % 4]
        with fb.bind(name):
            everyone_in.wait()
            seen = now()
            everyone_saw.wait()
        return seen == name and now() is None

    assert all(in_threads(8, work))


def test_a_new_thread_starts_with_nothing_bound():
    with fb.bind("a"):
        assert in_threads(1, lambda i: now()) == [None]


def test_scopes_of_two_threads_that_overlap_leave_nothing_behind(site):
    """A scope that stores a process-wide value would restore the other scope's when it leaves last."""
    entered, left = threading.Event(), threading.Event()
    seen = {}

    def first():
        with fb.bind("auto"):
            entered.wait()
        seen["first"] = now()
        left.set()

    def second():
        with fb.bind("a"):
            entered.set()
            left.wait()
            seen["inside second"] = now()
        seen["second"] = now()

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    with fb.bind("b"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert now() == "b"

    assert seen == {"first": None, "inside second": "a", "second": None}


def test_tasks_never_see_each_others_policy():
    async def work(name, turn, others):
        with fb.bind(name):
            turn.set()
            await others.wait()
            return now()

    async def main():
        one, two = asyncio.Event(), asyncio.Event()
        found = await asyncio.gather(work("a", one, two), work("b", two, one))
        return found, now()

    assert asyncio.run(main()) == (["a", "b"], None)


def test_a_task_inherits_what_was_bound_where_it_was_made():
    async def child():
        return now()

    async def main():
        with fb.bind("a"):
            task = asyncio.create_task(child())
        return await task

    assert asyncio.run(main()) == "a"


# ---- steps


def names(count: int, seen: list | None = None):
    """A generator that yields the policy it runs under, and notes that of its clean-up."""
    try:
        for _ in range(count):
            yield now()
    finally:
        if seen is not None:
            seen.append(now())


def test_steps_bind_the_generator_and_not_its_consumer():
    found = []
    for name in fb.steps(names(3), "a"):
        found.append(name)
        assert now() is None

    assert found == ["a", "a", "a"]


def test_a_generator_that_binds_by_itself_would_leak_and_steps_prevent_it():
    def leaky():
        with fb.bind("b"):
            yield now()
            yield now()

    stepped = fb.steps(leaky(), "a")
    assert (next(stepped), now(), next(stepped), now()) == ("b", None, "b", None)
    stepped.close()


def test_steps_of_two_requests_interleave_under_their_own_policies_and_runs(site):
    runs = fb.Run(), fb.Run()

    def request(calls):
        for _ in range(calls):
            fb.attention(*qkv(), site=site)
            yield now()

    one, two = fb.steps(request(3), "a", run=runs[0]), fb.steps(request(2), "b", run=runs[1])
    found = [next(each) for each in (one, two, one, two, one)]

    assert found == ["a", "b", "a", "b", "a"]
    assert [run.report()["attention"]["used"] for run in runs] == [{"a": 3}, {"b": 2}]


def test_a_generator_closed_half_way_cleans_up_under_its_policy():
    seen = []
    stepped = fb.steps(names(5, seen), "a")
    with fb.bind("b"):
        next(stepped)
        stepped.close()
        assert now() == "b"

    assert seen == ["a"]
    with pytest.raises(StopIteration):
        next(stepped)


def test_a_generator_that_is_dropped_half_way_binds_nothing():
    stepped = fb.steps(names(5), "a")
    next(stepped)
    del stepped
    gc.collect()

    assert now() is None


def test_steps_may_be_asked_for_by_different_threads():
    stepped = fb.steps(names(6), "a")
    found = []

    def ask(i):
        found.append((next(stepped), now()))

    for _ in range(6):
        in_threads(1, ask)

    assert found == [("a", None)] * 6


def test_values_and_errors_are_handed_to_the_generator():
    def echo():
        received = []
        while True:
            try:
                received.append((yield now()))
            except KeyError as error:
                yield (error.args[0], received, now())

    stepped = fb.steps(echo(), "a")

    assert next(stepped) == "a"
    assert stepped.send(3) == "a"
    assert stepped.send(None) == "a"
    assert stepped.throw(KeyError("stop")) == ("stop", [3, None], "a")
    assert now() is None


def test_an_error_of_the_generator_reaches_the_consumer_with_nothing_bound():
    def broken():
        yield now()
        raise ZeroDivisionError

    stepped = fb.steps(broken(), "a")
    next(stepped)
    with pytest.raises(ZeroDivisionError):
        next(stepped)

    assert now() is None


def test_a_plain_iterator_can_be_stepped_and_closed():
    stepped = fb.steps(iter([1, 2]), "a")

    assert list(stepped) == [1, 2]
    stepped.close()


def test_steps_say_at_once_that_there_is_no_such_policy():
    with pytest.raises(fb.PolicyError):
        fb.steps(names(1), "nothing")


async def async_names(count: int, seen: list | None = None):
    try:
        for _ in range(count):
            await asyncio.sleep(0)
            yield now()
    finally:
        if seen is not None:
            seen.append(now())


def test_async_steps_bind_the_generator_and_not_its_consumer():
    async def main():
        found = []
        async for name in fb.steps(async_names(3), "a"):
            found.append((name, now()))
        return found

    assert asyncio.run(main()) == [("a", None)] * 3


def test_async_steps_in_two_tasks_interleave():
    async def consume(policy):
        found = []
        async for name in fb.steps(async_names(20), policy):
            found.append((name, now()))
            await asyncio.sleep(0)
        return set(found)

    async def main():
        return await asyncio.gather(*(consume(policy) for policy in ("a", "b", "fast", "a")))

    assert asyncio.run(main()) == [{("a", None)}, {("b", None)}, {("fast", None)}, {("a", None)}]


def test_async_steps_closed_half_way_clean_up_under_their_policy():
    seen = []

    async def main():
        stepped = fb.steps(async_names(5, seen), "a")
        async with contextlib.aclosing(stepped):
            async for _ in stepped:
                break
        return now()

    assert asyncio.run(main()) is None
    assert seen == ["a"]


def test_async_steps_may_be_asked_for_by_different_tasks():
    async def main():
        stepped = fb.steps(async_names(4), "a")
        return [await asyncio.create_task(anext(stepped)) for _ in range(4)], now()

    assert asyncio.run(main()) == (["a"] * 4, None)


def test_values_and_errors_are_handed_to_the_async_generator():
    async def echo():
        received = []
        while True:
            try:
                received.append((yield now()))
            except KeyError as error:
                yield (error.args[0], received, now())

    async def main():
        stepped = fb.steps(echo(), "a")
        found = [await anext(stepped), await stepped.asend(3), await stepped.athrow(KeyError("stop")), now()]
        await stepped.aclose()
        return found

    assert asyncio.run(main()) == ["a", "a", ("stop", [3], "a"), None]


def test_an_async_iterator_that_is_no_generator_takes_no_values():
    class Numbers:
        def __aiter__(self):
            return self

        async def __anext__(self):
            return now()

    async def main():
        stepped = fb.steps(Numbers(), "a")
        assert await anext(stepped) == "a"
        with pytest.raises(TypeError, match="a Numbers takes no values; only a generator does"):
            await stepped.asend(3)

    asyncio.run(main())


def test_an_async_step_that_is_cancelled_leaves_nothing_bound():
    async def waits():
        await asyncio.Event().wait()
        yield 1

    async def main():
        async def consume():
            try:
                async for _ in fb.steps(waits(), "a"):
                    pass
            finally:
                seen.append(now())

        seen: list = []
        task = asyncio.create_task(consume())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return seen

    assert asyncio.run(main()) == [None]


# ---- bind_process


def test_a_process_binding_holds_in_every_thread_that_has_bound_nothing():
    def work(i):
        with fb.bind("b"):
            own = now()
        return own, now()

    with fb.bind_process("a"):
        assert now() == "a"
        assert in_threads(3, work) == [("b", "a")] * 3
    assert now() is None


def test_a_process_binding_is_undone_by_close_and_only_once():
    binding = fb.bind_process("a")
    binding.close()
    with fb.bind_process("b"):
        binding.close()
        assert now() == "b"


def test_a_process_binding_is_undone_after_an_exception():
    with pytest.raises(ZeroDivisionError), fb.bind_process("a"):
        raise ZeroDivisionError
    assert now() is None


def test_only_one_process_binding_holds_at_a_time():
    with fb.bind_process("a"):
        with pytest.raises(RuntimeError) as caught:
            fb.bind_process("b")
        assert now() == "a"

    assert str(caught.value) == "policy 'a' is bound for the process already; close() it before binding 'b'."


class Nested(torch.autograd.Function):
    """A function whose backward runs another backward: past some depth torch moves that to a thread of its own."""

    @staticmethod
    def forward(ctx, x, depth, seen):
        ctx.depth, ctx.seen = depth, seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append((threading.get_ident(), now()))
        if ctx.depth:
            with torch.enable_grad():
                x = torch.ones(1, requires_grad=True)
                Nested.apply(x, ctx.depth - 1, ctx.seen).backward()
        return grad, None, None


def test_a_process_binding_reaches_the_threads_of_autograd_and_a_block_does_not():
    def found():
        seen = []
        Nested.apply(torch.ones(1, requires_grad=True), 70, seen).backward()
        here = threading.get_ident()
        return {name for thread, name in seen if thread == here}, {name for thread, name in seen if thread != here}

    with fb.bind("b"):
        assert found() == ({"b"}, {None})
        with fb.bind_process("a"):
            assert found() == ({"b"}, {"a"})


def test_a_process_binding_reaches_backward_hooks_and_recomputation_on_other_threads(site, kernel):
    run, hooked = fb.Run(), []
    q, k, v = qkv(grad=True)

    def backward(_i):
        out = checkpoint(lambda *qkv: fb.attention(*qkv, site=site), q, k, v, use_reentrant=False)
        out.register_hook(lambda grad: hooked.append(now()))
        out.sum().backward()

    with fb.bind_process("a", run=run):
        in_threads(1, backward)

    assert hooked == ["a"]
    # Once more for backward: checkpointing stops that by an exception, so it is no call that was answered.
    assert kernel.calls == 2
    assert run.report()["attention"]["used"] == {"a": 1}


def test_what_is_no_run_or_no_iterator_is_refused_when_it_is_given():
    for binds in (lambda: fb.bind("fast", run={}), lambda: fb.bind_process("fast", run={})):
        with pytest.raises(fb.InputError, match=r"run is a dict; expected a fuseboard\.Run, or None"):
            binds()
    for wrong in ([1, 2], lambda: 1, None):
        with pytest.raises(fb.InputError, match=f"generator is a {type(wrong).__name__}; expected what a generator"):
            fb.steps(wrong, "fast")
    assert context.bound() is None
