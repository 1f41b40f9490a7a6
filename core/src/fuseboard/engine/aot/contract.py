"""What a package takes, as data; and the check of a call against it.

Sizes and strides are numbers, or expressions of symbols: `16*s0`, with s0 from 2 to 64. A call gives the symbols their
values, each by the first size that is `times * symbol + plus`; everything else follows. What the graph assumes besides,
torch's guards, are conditions on the symbols and kept as text: a loader needs neither sympy nor `eval`.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import attrs

__all__ = ["SCHEMA", "Constant", "Contract", "Input", "Output", "Size", "Target", "evaluate", "parsed", "symbols_of"]

SCHEMA = 1
"""Of the JSON. A loader reads its own only."""


@attrs.frozen
class Size:
    """What one size of an input may be.

    Attributes:
        expression: A number, or an expression of the contract's symbols.
        low: The smallest that is taken.
        high: The largest; None without a limit.
        symbol: Where the expression is `times * symbol + plus`, that symbol.
        times: See above.
        plus: See above.
    """

    expression: int | str
    low: int
    high: int | None
    symbol: str | None = None
    times: int = 1
    plus: int = 0

    @property
    def fixed(self) -> bool:
        """Whether there is one only."""
        return self.low == self.high

    def admits(self, size: int) -> bool:
        """Whether such a size may be right, whatever the other ones are."""
        in_bounds = self.low <= size and (self.high is None or size <= self.high)
        return in_bounds and (self.symbol is None or (size - self.plus) % self.times == 0)

    def __str__(self) -> str:
        if self.fixed:
            return str(self.low)
        bounds = f"{self.low} or more" if self.high is None else f"{self.low} to {self.high}"
        if self.symbol is None or self.times == 1:
            return bounds
        if self.plus % self.times == 0:
            return f"{bounds}, a multiple of {self.times}"
        return f"{bounds}, in steps of {self.times}"


@attrs.frozen
class Output:
    """A tensor that comes out."""

    dtype: str
    sizes: tuple[Size, ...]
    strides: tuple[int | str, ...]
    device: str

    def __str__(self) -> str:
        return f"{self.dtype} [{'; '.join(map(str, self.sizes))}] on {self.device}"


@attrs.frozen
class Input:
    """A tensor that goes in.

    Attributes:
        name: As the model's forward calls it.
        dtype: Without `torch.`.
        sizes: One a dimension.
        strides: Likewise; of no account where a size is 1.
        layout: `contiguous`, `channels_last` or `strided`.
        device: Its type.
        index: Which of them; None for the CPU.
        alignment: What its address has to be a multiple of, in bytes.
        written: Whether the model writes into it.
        values: What its values have to lie between, where they are used as indices: pairs of bounds, both allowed.
    """

    name: str
    dtype: str
    sizes: tuple[Size, ...]
    strides: tuple[int | str, ...]
    layout: str
    device: str
    index: int | None = None
    alignment: int = 1
    written: bool = False
    values: tuple[tuple[int | str, int | str], ...] = ()

    def __str__(self) -> str:
        where = self.device if self.index is None else f"{self.device}:{self.index}"
        values = "".join(f", values {low} to {high}" for low, high in self.values)
        written = ", written into" if self.written else ""
        sizes = "; ".join(map(str, self.sizes))
        return f"{self.name}: {self.dtype} [{sizes}], {self.layout}, on {where}{values}{written}"


@attrs.frozen
class Constant:
    """An argument that is no tensor: its value became part of the graph."""

    name: str
    value: bool | int | float | str | None

    def __str__(self) -> str:
        return f"{self.name}: {self.value!r}"


@attrs.frozen
class Target:
    """What the code was compiled for.

    Attributes:
        platform: `sys.platform`.
        machine: `platform.machine()`.
        isa: The vector instructions that inductor wrote for.
        instructions: Everything that the CPU could do; the compiler may have used it (`-march=native`).
        device: `cpu` or `cuda`.
        gpu: The GPU's name.
        capability: Its compute capability.
        cuda: The version of CUDA that torch was built with.
    """

    platform: str
    machine: str
    isa: str
    instructions: tuple[str, ...]
    device: str
    gpu: str | None = None
    capability: tuple[int, int] | None = None
    cuda: str | None = None


@attrs.frozen
class Contract:
    """Everything that a package takes and was made for.

    Attributes:
        inputs: In the order in which they are given: the positional ones, then those by name.
        outputs: In their order.
        symbols: The values that each symbol of the expressions may have.
        guards: Conditions on them that the graph assumes besides.
        positional: How many inputs, or structures of inputs, are given by position.
        keywords: The names of the others.
        flat: Whether each argument is one tensor or one constant, and no structure of them.
        trees: How arguments and results are nested, as torch writes it down.
        notes: Where the package takes less than was asked for, or something else.
        target: What the code was compiled for.
        torch: The version that it needs.
        fuseboard: The version that made it.
        policy: The policy that chose the attention in the graph.
        attention: Which kernel answers at which site, for which kind of call.
    """

    inputs: tuple[Input | Constant, ...]
    outputs: tuple[Output, ...]
    symbols: Mapping[str, tuple[int, int | None]]
    guards: tuple[str, ...]
    positional: int
    keywords: tuple[str, ...]
    flat: bool
    trees: tuple[str, str]
    notes: tuple[str, ...]
    target: Target
    torch: str
    fuseboard: str
    policy: str
    attention: Mapping[str, Mapping[str, str]]

    def tensors(self) -> tuple[Input, ...]:
        """The inputs that are tensors."""
        return tuple(each for each in self.inputs if isinstance(each, Input))

    def data(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {"schema": SCHEMA, **attrs.asdict(self)}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Contract:
        """What `data` gave, through JSON.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: It is something else.
        """
        given = dict(data)
        if given.pop("schema", None) != SCHEMA:
            msg = f"schema {data.get('schema')!r}, and this fuseboard reads {SCHEMA}"
            raise ValueError(msg)
        target = dict(given["target"])
        capability = target.pop("capability")
        return cls(
            **given
            | {
                "inputs": tuple(_input(each) for each in given["inputs"]),
                "outputs": tuple(Output(**each | _shape(each)) for each in given["outputs"]),
                "symbols": {name: (int(low), high) for name, (low, high) in given["symbols"].items()},
                "guards": tuple(given["guards"]),
                "keywords": tuple(given["keywords"]),
                "trees": tuple(given["trees"]),
                "notes": tuple(given["notes"]),
                "target": Target(
                    **target | {"instructions": tuple(target["instructions"])},
                    capability=None if capability is None else (capability[0], capability[1]),
                ),
            }
        )

    def owners(self) -> dict[str, tuple[int, int]]:
        """Which size gives each symbol its value, as (tensor, dimension)."""
        found: dict[str, tuple[int, int]] = {}
        for i, each in enumerate(self.tensors()):
            for j, size in enumerate(each.sizes):
                if size.symbol is not None:
                    found.setdefault(size.symbol, (i, j))
        return found

    def broken(self, values: Mapping[str, int]) -> Iterator[str]:
        """The guards that these values of symbols break; those about other symbols are left out."""
        for guard in self.guards:
            if symbols_of(guard) <= values.keys() and not evaluate(guard, values):
                yield guard

    def nearest(self, symbol: str, values: Mapping[str, int], wanted: Fraction) -> list[int]:
        """The values of a symbol that are right, next below and next above the one wanted."""
        low, high = self.symbols[symbol]
        found = []
        below = math.floor(wanted) if high is None else min(math.floor(wanted), high)
        above = max(math.ceil(wanted), low)
        for steps in (range(below, max(low, below - _SEARCHED) - 1, -1), range(above, above + _SEARCHED)):
            for value in steps:
                if high is not None and value > high:
                    break
                if next(self.broken({**values, symbol: value}), None) is None:
                    found.append(value)
                    break
        return sorted(set(found))

    def __str__(self) -> str:
        lines = [f"    {each}" for each in self.inputs]
        lines += [f"    -> {each}" for each in self.outputs]
        lines += [f"    only where {each}" for each in self.guards]
        lines += [f"    note: {each}" for each in self.notes]
        gpu = "" if self.target.gpu is None else f", {self.target.gpu}"
        return "\n".join([f"package for torch {self.torch}, {self.target.machine} {self.target.isa}{gpu}", *lines])


_SEARCHED = 4096


def _input(data: Mapping[str, Any]) -> Input | Constant:
    if "value" in data:
        return Constant(**data)
    return Input(**{**data, **_shape(data), "values": tuple((low, high) for low, high in data["values"])})


def _shape(data: Mapping[str, Any]) -> dict[str, Any]:
    return {"sizes": tuple(Size(**each) for each in data["sizes"]), "strides": tuple(data["strides"])}


# ---- expressions of symbols

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: Fraction,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs}


def evaluate(expression: int | str, values: Mapping[str, int]) -> Any:
    """The value of an expression. A division by zero makes a condition false, and no number at all of a size."""
    if isinstance(expression, int):
        return expression
    try:
        return _value(parsed(expression), values)
    except ZeroDivisionError:
        return None


@functools.lru_cache(maxsize=4096)
def parsed(expression: str) -> ast.expr:
    """The expression's tree.

    Raises:
        ValueError: There is something in it that `evaluate` does not know.
    """
    try:
        tree = ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        msg = f"{expression!r} is no expression of sizes"
        raise ValueError(msg) from error
    for node in ast.walk(tree):
        known = (
            isinstance(node, (ast.Name, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.And, ast.Or, ast.Load))
            or type(node) in _OPERATORS
            or (isinstance(node, ast.Constant) and isinstance(node.value, int))
            or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS)
        )
        if not known:
            msg = f"{expression!r} has {ast.unparse(node)!r} in it, which is not understood"
            raise ValueError(msg)
    return tree


def symbols_of(expression: int | str) -> set[str]:
    """The symbols in an expression."""
    if isinstance(expression, int):
        return set()
    names = {node.id for node in ast.walk(parsed(expression)) if isinstance(node, ast.Name)}
    return names - _FUNCTIONS.keys()


def _value(node: ast.expr, values: Mapping[str, int]) -> Any:  # noqa: PLR0911 - one for each kind of node
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, values), _value(node.right, values))
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand, values))
    if isinstance(node, ast.BoolOp):
        decide = all if isinstance(node.op, ast.And) else any
        return decide(_value(each, values) for each in node.values)
    if isinstance(node, ast.Compare):
        operands = [_value(each, values) for each in (node.left, *node.comparators)]
        pairs = zip(node.ops, operands, operands[1:], strict=False)
        return all(_OPERATORS[type(each)](left, right) for each, left, right in pairs)
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    return _FUNCTIONS[node.func.id](*(_value(each, values) for each in node.args))
