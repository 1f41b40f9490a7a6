"""What a traced graph says of a contract: sizes, guards, and what inputs' values are limited to."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuseboard.engine.aot.contract import Constant, Input, Output, Size, parsed
from fuseboard.engine.aot.errors import ExportError

__all__ = ["GraphSizes", "attention_guards", "index_guards", "input_of", "number_of", "output_of", "value_limits"]

GPU_ALIGNMENT = 16
"""Triton's kernels are compiled for inputs whose address is a multiple of this."""


class GraphSizes:
    """The symbols of a trace, as the contract writes them."""

    def __init__(self, values: Any) -> None:
        modes = [each.fake_mode for each in values if hasattr(each, "fake_mode")]
        self._env: Any = modes[0].shape_env if modes else None
        self._used: dict[str, Any] = {}

    def text(self, size: Any) -> int | str:
        """A number, or an expression as text, of symbols that are then in use."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        return self._text(self._env.replace(size.node.expr))

    def _text(self, expression: Any) -> int | str:
        if expression.is_Integer:
            return int(expression)
        from torch.utils._sympy.printers import PythonPrinter  # noqa: PLC0415 - sympy, for those who export

        try:
            text = str(PythonPrinter().doprint(expression))
            parsed(text)
        except (AssertionError, NotImplementedError, ValueError) as error:  # the printer's own, and ours
            msg = f"the graph depends on sizes in a way that no call could be checked for: {expression} ({error})."
            raise ExportError("sizes", msg) from error
        self._used |= {str(each): each for each in expression.free_symbols}
        return text

    def size(self, size: Any) -> Size:
        """One size of an input or output, with its bounds."""
        text = self.text(size)
        if isinstance(text, int):
            return Size(text, text, text)
        from torch.utils._sympy.value_ranges import bound_sympy  # noqa: PLC0415 - see above

        expression = self._env.replace(size.node.expr)
        bounds = bound_sympy(expression, self._env.var_to_range)
        low, high = number_of(bounds.lower) or 0, number_of(bounds.upper)
        free = list(expression.free_symbols)
        if len(free) == 1:
            plus = expression.subs(free[0], 0)
            times = expression.subs(free[0], 1) - plus
            affine = expression.expand() == (times * free[0] + plus).expand()
            if affine and times.is_Integer and plus.is_Integer and times > 0:
                return Size(text, low, high, str(free[0]), int(times), int(plus))
        return Size(text, low, high)

    def symbols(self) -> dict[str, tuple[int, int | None]]:
        """The symbols in use, and their ranges."""
        ranges = {name: self._env.var_to_range[each] for name, each in sorted(self._used.items())}
        return {name: (number_of(each.lower) or 0, number_of(each.upper)) for name, each in ranges.items()}

    def guards(self) -> tuple[str, ...]:
        """What the graph assumes of its symbols besides their ranges, and is not true by itself."""
        if self._env is None:
            return ()
        from torch.utils._sympy.value_ranges import bound_sympy  # noqa: PLC0415 - see above

        found: dict[str, None] = {}
        for guard in self._env.guards:
            # By the ranges alone. What torch itself simplifies with, such as divisors, it has learnt from these guards.
            expression = self._env.replace(guard.expr)
            if expression.is_Boolean and not expression.free_symbols:
                continue
            bounds = bound_sympy(expression, self._env.var_to_range)
            if bounds.is_singleton() and bool(bounds.lower):
                continue
            if {str(each) for each in expression.free_symbols} <= self._used.keys():
                found[str(self._text(expression))] = None
        return tuple(found)


def number_of(bound: Any) -> int | None:
    """A bound of torch's; None for infinite ones, and for those that stand for it."""
    try:
        number = int(bound)
    except (TypeError, ValueError, OverflowError, AttributeError):
        return None
    return number if abs(number) < sys.maxsize // 2 else None


def input_of(name: str, value: Tensor, sizes: GraphSizes, written: bool, device: torch.device) -> Input:
    """An input, of its fake tensor; `device` is where the package runs."""
    if value.is_contiguous():
        layout = "contiguous"
    elif value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last):  # noqa: PLR2004
        layout = "channels_last"
    else:
        layout = "strided"
    gpu = value.device.type == "cuda"
    return Input(
        name, str(value.dtype).removeprefix("torch."), tuple(sizes.size(each) for each in value.shape),
        tuple(sizes.text(each) for each in value.stride()), layout, value.device.type,
        (device.index or 0) if gpu else None, GPU_ALIGNMENT if gpu else 1, written,
    )  # fmt: skip


_SAME_VALUES = (
    "view", "reshape", "unsqueeze", "squeeze", "expand", "transpose", "permute", "flatten", "unflatten", "to",
    "_to_copy", "clone", "contiguous", "detach", "alias", "long", "int", "t",
)  # fmt: skip
"""Operators that keep an index what it is."""
_ALONG = (
    "index_select", "gather", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill",
    "index_reduce",
)  # fmt: skip
"""Operators of (tensor, dimension, index, ...)."""


def value_limits(program: Any, sizes: GraphSizes) -> dict[str, tuple[tuple[int | str, int | str], ...]]:
    """What the inputs' values are limited to, where the model uses them as indices as they are."""
    found: dict[str, dict[tuple[int | str, int | str], None]] = {}
    for node in program.graph.nodes:
        for index, size, negative in _indices(node):
            while index.op == "call_function" and _operator(index) in _SAME_VALUES:
                index = index.args[0]  # noqa: PLW2901 - back to where it comes from
            if index.op != "placeholder" or index.meta["val"].dtype is torch.bool:
                continue
            low = sizes.text(-size) if negative else 0
            found.setdefault(index.name, {})[low, sizes.text(size - 1)] = None
    return {name: tuple(limits) for name, limits in found.items()}


def _indices(node: Any) -> Iterator[tuple[Any, Any, bool]]:
    """The indices in an operator's arguments: a node, the size that it goes into, whether it may be negative."""
    name = _operator(node)
    if name == "embedding":
        yield node.args[1], node.args[0].meta["val"].shape[0], False
    elif (
        name.removesuffix("_") in _ALONG and isinstance(node.args[2], torch.fx.Node) and node.args[0].meta["val"].dim()
    ):
        yield node.args[2], node.args[0].meta["val"].shape[node.args[1]], False
    elif name == "take":
        yield node.args[1], node.args[0].meta["val"].numel(), True
    elif name in ("index", "index_put", "index_put_"):
        for size, index in zip(node.args[0].meta["val"].shape, node.args[1], strict=False):
            if index is not None:
                yield index, size, True


def _operator(node: Any) -> str:
    is_aten = node.op == "call_function" and getattr(node.target, "namespace", "") == "aten"
    return str(node.target.overloadpacket.__name__) if is_aten else ""


def output_of(value: Tensor, sizes: GraphSizes) -> Output:
    """An output, of its fake tensor."""
    return Output(
        str(value.dtype).removeprefix("torch."), tuple(sizes.size(each) for each in value.shape),
        tuple(sizes.text(each) for each in value.stride()), value.device.type,
    )  # fmt: skip


def attention_guards(program: Any, sizes: GraphSizes) -> Iterator[str]:
    """What attention asks of its operands' sizes. Traced, torch's operator does not ask, and neither do all kernels."""
    for node in program.graph.nodes:
        if "scaled_dot_product" not in _operator(node):
            continue
        q, k, v = (each.meta["val"].shape for each in node.args[:3])
        pairs = [(k[-2], v[-2]), *zip(q[:-3], k[:-3], strict=False), *zip(q[:-3], v[:-3], strict=False)]
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")  # noqa: PLR2004
        if isinstance(mask, torch.fx.Node):
            pairs += zip(reversed(mask.meta["val"].shape), (k[-2], q[-2]), strict=False)
        for one, other in pairs:
            left, right = sizes.text(one), sizes.text(other)
            fixed = isinstance(left, int) and isinstance(right, int)  # torch has compared those
            if left != right and not fixed and 1 not in (left, right):
                yield f"({left}) == ({right})"


def index_guards(inputs: list[Input | Constant], device: torch.device) -> Iterator[str]:
    """For a GPU inductor may index with 32 bits where the example allowed it."""
    for each in inputs:
        if device.type == "cuda" and isinstance(each, Input) and not all(size.fixed for size in each.sizes):
            yield f"{'*'.join(f'({size.expression})' for size in each.sizes)} <= {2**31 - 1}"
