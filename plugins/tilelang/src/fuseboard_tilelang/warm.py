"""Kernels compiled ahead of their first call, in parallel, into TileLang's cache on disk."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from fuseboard_tilelang import ops
from fuseboard_tilelang._tile import Factory
from fuseboard_tilelang.compile import compile_cpu, compile_gpu, target_of

__all__ = ["Job", "needed", "warm"]

Job: TypeAlias = "tuple[Factory, Sequence[int | None], Mapping[str, Any]]"
"""A factory, its sizes, its options."""


def needed(call: Callable[[], Any]) -> list[Job]:
    """The kernels that a function calls through `ops`, each once. It is run, and its kernels are not: no number counts.

    Args:
        call: Such as `lambda: model(batch)`, on the device that is meant.
    """
    jobs: list[Job] = []
    token = ops.gathered.set(jobs)
    try:
        call()
    finally:
        ops.gathered.reset(token)
    return list({(job[0], tuple(job[1]), tuple(sorted(job[2].items()))): job for job in jobs}.values())


def warm(
    jobs: Sequence[Job], *, target: str | None = None, workers: int | None = None, seconds: float | None = None
) -> list[str | None]:
    """Compile kernels in child processes; whoever makes the same ones afterwards finds them in tens of milliseconds.

    One kernel takes 2 to 20 seconds, and one process compiles one at a time.

    Args:
        jobs: The kernels.
        target: `c` for the CPU form, or a GPU such as `sm_90a`; None for the current device.
        workers: Processes; None for one each core.
        seconds: After so many no further kernel is begun; None for no limit.

    Returns:
        For each kernel None, or why there is none.
    """
    if not jobs:
        return []
    where = target or target_of(None)
    count = max(1, min(workers or os.cpu_count() or 1, len(jobs)))
    context = multiprocessing.get_context("spawn")  # a forked child of a process that has used a GPU cannot
    with concurrent.futures.ProcessPoolExecutor(count, mp_context=context) as pool:
        futures = [pool.submit(_one, (where, *job)) for job in jobs]
        concurrent.futures.wait(futures, seconds)
        late = [future.cancel() for future in futures]  # what is done, or under way, is not
        return [
            f"not begun within {seconds} s" if never else future.result()
            for never, future in zip(late, futures, strict=True)
        ]


def _one(job: tuple[str, Factory, Sequence[int | None], Mapping[str, Any]]) -> str | None:
    target, factory, sizes, options = job
    try:
        if target == "c":
            compile_cpu(factory, *sizes, **options)
        else:
            compile_gpu(factory, *sizes, target=target, **options)
    except Exception as error:  # noqa: BLE001 - told, and the other kernels still made
        return f"{type(error).__name__}: {str(error).strip()[-300:]}"
    return None
