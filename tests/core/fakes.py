"""Fake plugins for the core's tests: kernels that count, and that misbehave on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fuseboard as fb
from fuseboard.constraints import ALL_LENGTHS
from fuseboard.probe import Verdict
from fuseboard.registry import Entry, Registry, use
from fuseboard.settings import Settings

sdpa = F.scaled_dot_product_attention
CPU = torch.device("cpu")

EVERYTHING: dict[str, Any] = {
    "devices": {"cpu"},
    "dtypes": {torch.float32},
    "gqa": True,
    "v_head_dims": fb.HeadDims(),
    "causal": ALL_LENGTHS,
    "masks": {"bool", "additive"},
    "mask_grad": True,
    "custom_scale": True,
    "dropout": True,
    "backward": True,
    "empty": True,
    "any_stride": True,
}
"""Limits of a backend that takes whatever torch's own function takes, in float32."""

EVERY_STRUCTURE = fb.StructureRule(keys={"none", "any", "right", "left"}, window={False, True}, ahead={False, True})


def right(q: Tensor, k: Tensor, v: Tensor, *, mask, mask_info, causal, scale, dropout_p) -> Tensor:
    """Attention as it should be, by torch's own function."""
    if mask_info is not None:
        mask = mask_info.dense(q.shape[-2], k.shape[-2], q.device)
    return sdpa(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, dropout_p=dropout_p, enable_gqa=q.shape[1] != k.shape[1]
    )


class Fake:
    """A kernel that counts its calls and does `then` when that is set, else what is right."""

    def __init__(self, then: Callable[..., Any] | None = None) -> None:
        self.then = then
        self.calls = 0
        self.given: dict[str, Any] = {}
        self._lock = threading.Lock()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
        with self._lock:
            self.calls += 1
            self.given = given
        return (self.then or right)(q, k, v, **given)


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """What a kernel does that raises."""

    def kernel(*_arguments: Any, **_given: Any) -> Any:
        raise error

    return kernel


def plugin(**hooks: Callable[..., Any]) -> SimpleNamespace:
    """An object with these functions as its hooks."""
    return SimpleNamespace(**{name: fb.hookimpl(function) for name, function in hooks.items()})


def hooks_of(kernel: Any, *, exact: bool = True, rank: float = 1.0, **limits: Any) -> dict[str, Callable[..., Any]]:
    """The hooks of a good plugin."""
    limits = {**EVERYTHING, **limits}
    exactness = fb.Exactness.EXACT if exact else fb.Exactness.APPROXIMATE
    return {
        "info": lambda: fb.BackendInfo("a fake"),
        "constraints": lambda: fb.Constraints(**limits),
        "kernel": lambda: kernel,
        "exactness": lambda: exactness,
        "rank": lambda: rank,
    }


def entry(name: str, kernel: Any = right, **options: Any) -> Entry:
    """An entry point of a good plugin that ships `kernel` under `name`."""
    return Entry(name, lambda: plugin(**hooks_of(kernel, **options)), "acme-kernels", "1.2")


def entry_of(name: str, distribution: str = "acme-kernels", **hooks: Callable[..., Any]) -> Entry:
    """An entry point of a plugin with exactly these hooks."""
    return Entry(name, lambda: plugin(**hooks), distribution, "1.2")


@contextmanager
def registered(
    *entries: Entry | tuple[str, Any], probed: bool = True, config: Settings | None = None
) -> Iterator[Registry]:
    """A registry of these, as the process's; `probed` takes the probe's yes for granted on the CPU."""
    made = [each if isinstance(each, Entry) else entry(*each) for each in entries]
    registry = Registry(made, config or Settings())
    if probed:
        for each in made:
            backend = registry.resolve(each.name)
            if backend is not None and "cpu" in backend.constraints.devices:
                registry.verdicts[each.name, "cpu"] = Verdict(ok=True, kernel=backend.load(CPU))
    with use(registry):
        yield registry


def qkv(
    batch: int = 1, heads: int = 2, q_length: int = 4, k_length: int | None = None, dim: int = 8, *,
    kv_heads: int | None = None, dtype: torch.dtype = torch.float32, grad: bool = False, seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Random q, k and v."""
    generator = torch.Generator().manual_seed(seed)
    k_length = q_length if k_length is None else k_length
    kv_heads = heads if kv_heads is None else kv_heads

    def draw(h: int, length: int) -> Tensor:
        return torch.randn(batch, h, length, dim, generator=generator).to(dtype).requires_grad_(grad)

    return draw(heads, q_length), draw(kv_heads, k_length), draw(kv_heads, k_length)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal dtype, shape and bits, NaN included."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.detach().contiguous().view(torch.uint8), right.detach().contiguous().view(torch.uint8))


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work(i)` on threads that start together; their results, or the first error."""
    barrier, results, errors = threading.Barrier(count), [None] * count, []

    def body(i: int) -> None:
        try:
            barrier.wait()
            results[i] = work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
