"""The check of a call: everything that is wrong with it, or its tensors as the package reads them.

A call of kinds, sizes and strides that were right before is right: one look into a table.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fuseboard.engine.aot.contract import Contract, Input, Size, evaluate, symbols_of
from fuseboard.engine.aot.errors import ContractError, Problem

__all__ = ["Check"]

KNOWN = 1024
"""How many combinations of sizes are remembered."""

_Copies = tuple[tuple[int, tuple[int, ...]], ...]
"""Which inputs have to be copied, and into which strides."""
_Values = tuple[tuple[int, int, int], ...]
"""Of which inputs the values have to be looked at, the smallest that is right, and the largest."""

_transform = torch._C._functorch.peek_interpreter_stack
_grad = torch.is_grad_enabled


class Check:
    """Checks calls against one contract.

    Attributes:
        contract: Which.
        contiguous: Whether an input in another layout is copied instead of refused.
        package: What messages call it.
        written: Which inputs the model writes into.
    """

    def __init__(self, contract: Contract, contiguous: bool, package: str) -> None:
        self.contract = contract
        self.contiguous = contiguous
        self.package = package
        self._inputs = contract.tensors()
        self._owners = contract.owners()
        self.written = [i for i, each in enumerate(self._inputs) if each.written]
        self._aligned = [(i, each.alignment) for i, each in enumerate(self._inputs) if each.alignment > 1]
        self._known: dict[Hashable, tuple[_Copies, _Values]] = {}

    def __call__(self, tensors: Sequence[Any]) -> list[Tensor]:
        """The tensors, to be given to the package.

        Raises:
            ContractError: It would answer wrongly, or not at all.
        """
        grad = _grad()
        try:
            key: Hashable = (
                forward_ad._current_level,
                _transform() is None,
                *[
                    (
                        type(each), each.shape, each.stride(), each.dtype, each.device, grad and each.requires_grad,
                        each.is_neg(), each.is_conj(),
                    )
                    for each in tensors
                ],
            )  # fmt: skip
            known = self._known.get(key)
        except (AttributeError, RuntimeError, TypeError):  # no tensors, or without strides: the long way says it better
            key = known = None
        if known is None or forward_ad._current_level >= 0:
            known = self._checked(tensors)
            if key is not None:
                if len(self._known) >= KNOWN:
                    self._known = {}
                self._known[key] = known
        copies, values = known
        out = list(tensors)
        for i in self.written:
            self._apart(i, out)
        for i, low, high in values:
            self._look_at(out[i], self._inputs[i].name, low, high)
        for i, strides in copies:
            given = out[i]
            out[i] = torch.empty_strided(given.shape, strides, dtype=given.dtype, device=given.device).copy_(given)
        for i, alignment in self._aligned:
            if out[i].data_ptr() % alignment:
                out[i] = self._realigned(out[i], self._inputs[i])
        return out

    def _checked(self, tensors: Sequence[Any]) -> tuple[_Copies, _Values]:
        if _transform() is not None:
            given = "made inside a transform of torch.func"
            raise ContractError([Problem("", given, "plain calls", "call it outside of vmap and grad")], self.package)
        problems: list[Problem] = []
        sound = []
        for given, each in zip(tensors, self._inputs, strict=True):
            found, shaped = _kind(given, each)
            problems += found
            sound.append(shaped)
        values = self._values(tensors, sound, problems)
        copies = []
        for i, (given, each) in enumerate(zip(tensors, self._inputs, strict=True)):
            if values is None:
                break
            strides = tuple(evaluate(stride, values) for stride in each.strides)
            wrong = _layout(given, each, strides)
            if wrong is None:
                continue
            if self.contiguous and not each.written:
                copies.append((i, strides))
            else:
                problems.append(wrong)
        if problems or values is None:
            raise ContractError(problems, self.package)
        limits = tuple(
            (
                i,
                max(evaluate(low, values) for low, _ in each.values),
                min(evaluate(high, values) for _, high in each.values),
            )
            for i, each in enumerate(self._inputs)
            # A GPU would have to be waited for; and there, a wrong index is what it is without a package.
            if each.values and each.device == "cpu" and tensors[i].numel()
            for lows, highs in [zip(*each.values, strict=True)]
        )
        return tuple(copies), limits

    def _apart(self, i: int, tensors: Sequence[Tensor]) -> None:
        """Compiled code reads and writes in an order of its own, as if nothing else lay where it writes."""
        start, end = _span(tensors[i])
        for j, each in enumerate(tensors):
            low, high = _span(each)
            if j != i and low < end and start < high:
                name, other = self._inputs[i].name, self._inputs[j].name
                allowed = f"memory of its own, since the model writes into {name}"
                raise ContractError(
                    [Problem(other, f"shares memory with {name}", allowed, f"give {other}.clone()")], self.package
                )

    def _look_at(self, given: Tensor, name: str, low: int, high: int) -> None:
        smallest, largest = (int(each) for each in torch.aminmax(given.detach()))
        if smallest < low or largest > high:
            said = f"has values from {smallest} to {largest}"
            advice = "they are indices, and compiled code that meets a wrong one ends the process"
            raise ContractError([Problem(name, said, f"{low} to {high}", advice)], self.package)

    def _values(self, tensors: Sequence[Any], sound: list[bool], problems: list[Problem]) -> dict[str, int] | None:
        """What the symbols stand for in this call; None where a size is wrong, which is added to the problems."""
        before = len(problems)
        owned = {
            symbol: (self._inputs[i].sizes[j], tensors[i].shape[j])
            for symbol, (i, j) in self._owners.items()
            if sound[i]
        }
        values = {
            symbol: (given - size.plus) // size.times for symbol, (size, given) in owned.items() if size.admits(given)
        }
        for symbol in [each for each in owned if each not in values]:
            i, j = self._owners[symbol]
            problems.append(self._size(i, j, tensors[i].shape[j], values))
        owners = set(self._owners.values())
        others = [
            self._other(i, j, tensors[i].shape[j], values, tensors, sound)
            for i, each in enumerate(self._inputs)
            for j in range(len(each.sizes))
            if sound[i] and (i, j) not in owners
        ]
        problems += [each for each in others if each is not None]
        if len(problems) == before:
            problems += self._guards(tensors, sound, values)
        return values if len(problems) == before and all(sound) else None

    def _size(self, i: int, j: int, given: int, values: dict[str, int], why: str = "") -> Problem:
        """A size that is not what its symbol allows."""
        each = self._inputs[i]
        size = each.sizes[j]
        assert size.symbol is not None
        others = {name: value for name, value in values.items() if name != size.symbol}
        near = self.contract.nearest(size.symbol, others, Fraction(given - size.plus, size.times))
        return Problem(each.name, f"size {j} is {given}", f"{size}{why}", _nearest(size, given, near))

    def _other(
        self, i: int, j: int, given: int, values: dict[str, int], tensors: Sequence[Any], sound: list[bool]
    ) -> Problem | None:
        """A size that does not give a symbol its value: a number, or what follows from others."""
        each = self._inputs[i]
        size = each.sizes[j]
        if isinstance(size.expression, int):
            if given == size.expression:
                return None
            return Problem(each.name, f"size {j} is {given}", f"{size.expression} there", "it was exported fixed")
        if size.symbol is not None:
            owner, dim = self._owners[size.symbol]
            if size.symbol not in values:
                # Its owner is wrong, and that is said already where both are the same.
                same = sound[owner] and tensors[owner].shape[dim] == given
                return None if same or size.admits(given) else self._size(i, j, given, values)
            tied = f", since size {dim} of {self._inputs[owner].name} is {tensors[owner].shape[dim]}"
        else:
            try:
                evaluate(size.expression, values)
            except KeyError:
                return None
            tied = f" = {size.expression}"
        wanted = evaluate(size.expression, values)
        if given == wanted:
            return None
        return Problem(each.name, f"size {j} is {given}", f"{wanted}{tied}", "give both the same length")

    def _guards(self, tensors: Sequence[Any], sound: list[bool], values: dict[str, int]) -> Iterable[Problem]:
        broken = [(guard, sorted(symbols_of(guard))) for guard in self.contract.broken(values)]
        # One condition a size says enough, and a size that is wrong by itself explains what it is wrong with.
        alone = {names[0]: guard for guard, names in reversed(broken) if len(names) == 1}
        for name, guard in alone.items():
            i, j = self._owners[name]
            yield self._size(i, j, tensors[i].shape[j], values, f", where {guard}")
        if broken and not alone:
            guard, names = broken[0]
            places = [self._owners[name] for name in names]
            said = " and ".join(f"size {j} of {self._inputs[i].name} is {tensors[i].shape[j]}" for i, j in places)
            yield Problem("", said, f"sizes where {guard}", "")

    def _realigned(self, given: Tensor, each: Input) -> Tensor:
        if self.contiguous and not each.written:
            return given.clone()
        problem = Problem(
            each.name, f"starts at an address that is no multiple of {each.alignment}, as a slice may",
            "whole tensors, or slices that start there", f"give {each.name}.clone(), or load with contiguous=True",
        )  # fmt: skip
        raise ContractError([problem], self.package)


def _kind(given: Any, each: Input) -> tuple[list[Problem], bool]:
    """What is wrong with an input whatever its sizes, and whether it has as many sizes as it should."""
    name = each.name
    if not isinstance(given, Tensor):
        return [Problem(name, f"is a {type(given).__name__}", f"a tensor of {each.dtype}", "")], False
    if type(given) not in (Tensor, torch.nn.Parameter):
        advice = f"{name}.as_subclass(torch.Tensor), where that is right"
        return [Problem(name, f"is a {type(given).__name__}", "plain tensors", advice)], False
    if given.layout != torch.strided or given.is_nested:
        kind = "nested" if given.is_nested else str(given.layout).removeprefix("torch.")
        return [Problem(name, f"is {kind}", "strided tensors", f"{name}.to_dense()")], False
    problems = []
    dtype = str(given.dtype).removeprefix("torch.")
    if dtype != each.dtype:
        problems.append(Problem(name, f"is {dtype}", each.dtype, f"{name}.to(torch.{each.dtype})"))
    if given.device.type != each.device or given.device.index != each.index:
        where = each.device if each.index is None else f"{each.device}:{each.index}"
        problems.append(Problem(name, f"is on {given.device}", where, f'{name}.to("{where}")'))
    if _grad() and given.requires_grad:
        advice = f"call it under torch.no_grad(), or give {name}.detach()"
        problems.append(Problem(name, "requires a gradient", "no gradients: it computes none", advice))
    if forward_ad._current_level >= 0 and _has_tangent(given):
        advice = f"call it outside of forward_ad, or give {name}.detach()"
        problems.append(Problem(name, "has a tangent", "none: it computes no derivatives", advice))
    if given.dim() != len(each.sizes):
        rank = f"rank {len(each.sizes)}: [{'; '.join(map(str, each.sizes))}]"
        problems.append(Problem(name, f"has rank {given.dim()}, shape {tuple(given.shape)}", rank, ""))
    return problems, given.dim() == len(each.sizes)


def _span(given: Tensor) -> tuple[int, int]:
    """From its first byte to behind its last."""
    start = given.data_ptr()
    if given.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(given.shape, given.stride(), strict=True))
    return start, start + (last + 1) * given.element_size()


def _has_tangent(given: Tensor) -> bool:
    unpack: Any = forward_ad.unpack_dual  # untyped
    return unpack(given).tangent is not None


def _layout(given: Tensor, each: Input, strides: tuple[int, ...]) -> Problem | None:
    if given.is_neg() or given.is_conj():
        kind = "negated" if given.is_neg() else "conjugated"
        advice = f"{each.name}.resolve_neg().resolve_conj(), or load with contiguous=True"
        return Problem(each.name, f"is lazily {kind}", "tensors whose memory is their value", advice)
    if given.numel() == 0:
        return None
    if all(size == 1 or a == b for size, a, b in zip(given.shape, given.stride(), strides, strict=True)):
        return None
    if each.written:
        advice = f"the model writes into {each.name}, so that a copy would not do"
    elif each.layout == "contiguous":
        advice = f"{each.name}.contiguous(), or load with contiguous=True"
    else:
        advice = "load with contiguous=True, which copies into these strides"
    return Problem(each.name, f"has strides {given.stride()}", f"{each.layout}, strides {strides}", advice)


def _nearest(size: Size, given: int, near: list[int]) -> str:
    sizes = [size.times * value + size.plus for value in near]
    if not sizes:
        return "there is none near"
    said = f"nearest: {' and '.join(map(str, sizes))}"
    above = [each for each in sizes if each > given]
    if above:
        return f"{said}; pad to {above[0]}" + (f" or cut to {sizes[0]}" if sizes[0] < given else "")
    return f"{said}; cut to {sizes[-1]}, or export with a larger bound"
