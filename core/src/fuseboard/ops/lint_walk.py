"""The walk over one parsed source that finds what the rules of `fuseboard lint` are against."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fuseboard.ops.lint_names import Binding, Function, Module, Scope, constant, pairs
from fuseboard.ops.lint_rules import (
    ADVICE,
    KERNEL_RULES,
    WORDS,
    is_attention_kernel,
    of_environment,
    of_name,
    of_write,
)

__all__ = ["Found", "check", "relevant"]

# How an expression's result is used. A reference that is only looked at, or gets another name in this file, is no
# finding: what is then done by that name is.
LOOK, ALIAS, VALUE, BASE = "look", "alias", "value", "base"

_LOOKS = frozenset(
    {
        *(f"builtins.{name}" for name in ("isinstance", "issubclass", "hasattr", "callable", "id", "type", "print")),
        *("builtins.repr", "builtins.str", "inspect.signature", "inspect.getsource", "inspect.getfullargspec"),
        *("inspect.getmodule", "inspect.isfunction", "inspect.unwrap"),
    }
)
_SETS = frozenset({"builtins.setattr", "builtins.delattr"})
_SITES = frozenset({"fuseboard.Site", "fuseboard.site.Site"})
_ENVIRON = re.compile(r"os\.(?:environ\.(?:setdefault|pop|update|__setitem__)|putenv|unsetenv)")
_PATCH = re.compile(r"(?:unittest\.)?mock\.patch(?:\.object)?")
_LIBRARY = re.compile(r"torch\.library\.(?:Library|impl|register_kernel)")
_SETS_IF_GIVEN = re.compile(r"torch\.backends\.cuda\.preferred_\w+_library")


@dataclass(frozen=True)
class Found:
    """One finding before paths and suppression.

    Attributes:
        line: Where, from 1.
        offset: Where in the line, in bytes of UTF-8 from 0.
        rule: Its code.
        message: What was found and what to write instead.
        first: The first line of the statement around it.
    """

    line: int
    offset: int
    rule: str
    message: str
    first: int


def check(tree: ast.Module, own: frozenset[str], *, exports: bool = False) -> list[Found]:
    """The findings of one parsed source.

    Args:
        tree: The source.
        own: The top-level names of its own project, whose attributes it may write.
        exports: Whether a name that it imports and does not use is there for others: a package's `__init__.py`.
    """
    walk = _Walk(tree, own, exports=exports)
    walk.block(tree.body, walk.module.top)
    unique = {(each.line, each.offset, each.rule): each for each in walk.found}
    return [unique[key] for key in sorted(unique)]


def relevant(text: str, tree: ast.Module) -> bool:
    """Whether a source can have a finding at all: cheap, and never wrong when it says no."""
    return any(word in text for word in WORDS) or _writes_to_imports(tree)


def _writes_to_imports(tree: ast.Module) -> bool:  # noqa: C901 - one case a statement
    """Whether an attribute is written to a name that an import may have given, under whatever alias."""
    written: set[str] = set()
    given: set[str] = set()
    aliases: list[tuple[str, str]] = []
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            given.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if any(alias.name == "*" for alias in node.names):
                return True
            given.update(alias.asname or alias.name for alias in node.names)
        else:
            for target in _targets(node):
                if isinstance(target, ast.Name):
                    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                        aliases += [(target.id, name) for name in _sources(node.value)]
                    continue
                root = _root(target)
                if not isinstance(root, ast.Name):
                    return True
                written.add(root.id)
            for name in _INSIDE:
                todo += getattr(node, name, ())
    written -= {"self", "cls"}
    # A name written to may have been given by another, and that by a third.
    while written:
        if written & given:
            return True
        before, written = written, {source for name, source in aliases if name in written} - {"self", "cls"}
        aliases = [each for each in aliases if each[0] not in before]
    return False


_INSIDE = ("body", "orelse", "finalbody", "handlers", "cases", "items")


def _sources(value: ast.expr) -> Iterator[str]:
    """The names that an assigned value may be another name of, by the forms that `Module.resolve` follows."""
    root = _root(value)
    if isinstance(root, ast.Name):
        yield root.id
    elif isinstance(root, (ast.IfExp, ast.BoolOp, ast.NamedExpr, ast.Tuple, ast.List)):
        for each in ast.iter_child_nodes(root):
            if isinstance(each, ast.expr):
                yield from _sources(each)
    elif isinstance(root, ast.Call):
        name = getattr(root.func, "attr", getattr(root.func, "id", ""))
        if name in ("getattr", "import_module", "__import__", "vars"):
            yield from (each.id for each in ast.walk(root) if isinstance(each, ast.Name))


def _root(node: ast.expr) -> ast.expr:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement writes to, unpacking undone."""
    todo: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        todo = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor)):
        todo = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        todo = [node.optional_vars]
    while todo:
        each = todo.pop()
        if isinstance(each, (ast.Tuple, ast.List)):
            todo.extend(each.elts)
        elif isinstance(each, ast.Starred):
            todo.append(each.value)
        else:
            yield each


class _Walk:
    def __init__(self, tree: ast.Module, own: frozenset[str], *, exports: bool) -> None:
        self.module = Module(tree)
        self.own = own
        self.exports = exports
        self.found: list[Found] = []
        self.first = 0
        self.in_reference = 0
        self.listed = {
            text
            for binding in self.module.top.names.get("__all__", [])
            if isinstance(binding.value, (ast.List, ast.Tuple))
            for each in binding.value.elts
            if (text := constant(each))
        }
        self.references = self._references(tree) if self._knows_sites() else set()

    # ---- references of Sites: the places where a direct call belongs

    def _knows_sites(self) -> bool:
        def is_ours(binding: Binding) -> bool:
            return binding.name.split(".")[0] == "fuseboard"

        scopes = (self.module.top, *self.module.scopes.values())
        return any(is_ours(each) for scope in scopes for bound in scope.names.values() for each in bound)

    def _references(self, tree: ast.Module) -> set[ast.AST]:
        found: set[ast.AST] = set()
        todo: list[tuple[ast.AST, Scope, ast.ClassDef | None]] = [(tree, self.module.top, None)]
        while todo:
            node, scope, owner = todo.pop()
            if isinstance(node, ast.Call) and self.module.resolve(node.func, scope) & _SITES:
                for keyword in node.keywords:
                    if keyword.arg == "reference":
                        found.update(self._functions(keyword.value, scope, owner))
            inner = self.module.scopes.get(node, scope)
            holder = node if isinstance(node, ast.ClassDef) else owner
            todo.extend((each, inner, holder) for each in ast.iter_child_nodes(node))
        return found

    def _functions(self, value: ast.expr, scope: Scope, owner: ast.ClassDef | None) -> Iterable[ast.AST]:
        """The functions of this file that `reference=value` means."""
        if isinstance(value, ast.Lambda):
            return [value]
        if isinstance(value, ast.Call):
            is_partial = "functools.partial" in self.module.resolve(value.func, scope)
            return self._functions(value.args[0], scope, owner) if is_partial and value.args else []
        if isinstance(value, ast.Attribute):
            holders = [each for each in self.module.definitions(value.value, scope) if isinstance(each, ast.ClassDef)]
            if owner is not None and isinstance(value.value, ast.Name) and value.value.id in ("self", "cls"):
                holders.append(owner)
            return [
                each
                for holder in holders
                for each in holder.body
                if isinstance(each, Function) and each.name == value.attr
            ]
        return [each for each in self.module.definitions(value, scope) if not isinstance(each, ast.ClassDef)]

    # ---- what is reported

    def report(self, node: ast.AST, rule: str, name: str, done: str) -> None:
        if self.in_reference and rule in KERNEL_RULES:
            return
        line, offset = getattr(node, "lineno", self.first), getattr(node, "col_offset", 0)
        message = f"{name} is {done}: {ADVICE[rule]}"
        self.found.append(Found(line, offset, rule, message, self.first))

    def named(self, node: ast.AST, names: Iterable[str], done: str) -> bool:
        """Report the first of these full names that a rule is against; whether there was one."""
        for name in sorted(names):
            rule = of_name(name)
            if rule is not None:
                # A module's class in a table, an isinstance or an annotation computes nothing.
                if rule != "FB105" or done in ("called", "subclassed"):
                    self.report(node, rule, name, done)
                return True
        return False

    def written(self, node: ast.AST, names: Iterable[str], done: str) -> bool:
        """Report the first of these full names that must not be written; whether there was one."""
        for name in sorted(names):
            rule = of_write(name, self.own)
            if rule is not None:
                self.report(node, rule, name, done)
                return True
        return False

    # ---- statements

    def block(self, statements: Iterable[ast.stmt], scope: Scope) -> None:
        for each in statements:
            before, self.first = self.first, each.lineno
            self.statement(each, scope)
            self.first = before

    def statement(self, node: ast.stmt, scope: Scope) -> None:  # noqa: C901, PLR0912 - one case a kind of statement
        if isinstance(node, Function):
            self.function(node, scope)
        elif isinstance(node, ast.ClassDef):
            self.definition(node, scope)
        elif isinstance(node, ast.Assign):
            self.assign([(target, node.value) for target in node.targets], scope)
        elif isinstance(node, ast.AnnAssign):
            self.assign([(node.target, node.value)], scope)
        elif isinstance(node, ast.AugAssign):
            self.target(node.target, scope, "assigned")
            self.expression(node.value, scope, VALUE)
        elif isinstance(node, ast.Delete):
            for each in _targets(node):
                self.target(each, scope, "deleted")
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            for each in _targets(node):
                self.target(each, scope, "assigned")
            self.expression(node.iter, scope, VALUE)
            self.block((*node.body, *node.orelse), scope)
        elif isinstance(node, (ast.If, ast.While)):
            self.expression(node.test, scope, LOOK)
            if not self.is_for_types(node.test, scope):
                self.block(node.body, scope)
            self.block(node.orelse, scope)
        elif isinstance(node, ast.Expr):
            self.expression(node.value, scope, LOOK)
        elif isinstance(node, ast.Assert):
            self.expression(node.test, scope, LOOK)
        elif isinstance(node, ast.ImportFrom):
            self.exports_of(node, scope)
        else:
            self.parts(node, scope)

    def parts(self, node: ast.AST, scope: Scope) -> None:
        """Whatever stands in a statement that has no case of its own, and in its handlers and items."""
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.stmt):
                self.block([each], scope)
            elif isinstance(each, ast.expr):
                if not isinstance(getattr(each, "ctx", None), (ast.Store, ast.Del)):
                    self.expression(each, scope, VALUE)
            else:
                for target in _targets(each):
                    self.target(target, scope, "assigned")
                self.parts(each, scope)

    def is_for_types(self, test: ast.expr, scope: Scope) -> bool:
        return "typing.TYPE_CHECKING" in self.module.resolve(test, scope) or (
            isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"
        )

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
        for each in node.decorator_list:
            self.first = each.lineno
            self.expression(each, scope, VALUE)
        self.first = node.lineno
        self.defaults(node.args, scope)
        is_reference = node in self.references
        self.in_reference += is_reference
        self.block(node.body, self.module.scopes[node])
        self.in_reference -= is_reference

    def defaults(self, arguments: ast.arguments, scope: Scope) -> None:
        for each in (*arguments.defaults, *arguments.kw_defaults):
            if each is not None:
                self.expression(each, scope, VALUE)

    def definition(self, node: ast.ClassDef, scope: Scope) -> None:
        for each in (*node.decorator_list, *(keyword.value for keyword in node.keywords)):
            self.expression(each, scope, VALUE)
        for each in node.bases:
            self.expression(each, scope, BASE)
        self.block(node.body, self.module.scopes[node])

    def exports_of(self, node: ast.ImportFrom, scope: Scope) -> None:
        """An attention function imported for others to take from here; one that this file uses is reported there."""
        if scope is not self.module.top or node.level:
            return
        for alias in node.names:
            name = alias.asname or alias.name
            handed_on = name in self.listed or alias.asname == alias.name
            if handed_on or (self.exports and name not in self.module.loaded):
                self.named(alias, {f"{node.module}.{alias.name}"}, "re-exported")

    def assign(self, given: list[tuple[ast.expr, ast.expr | None]], scope: Scope) -> None:
        """Targets and what they get. An alias by a plain name is followed; one that leaves this file is reported."""
        uses: dict[ast.expr, str] = {}
        todo = list(reversed(given))
        while todo:
            target, part = todo.pop()
            if isinstance(target, ast.Starred):
                todo.append((target.value, part))
                continue
            if isinstance(target, (ast.Tuple, ast.List)):
                parts = pairs(target, part)
                todo += reversed(parts)
                # Unpacked from something that is not written out here: whatever is in it is handed on.
                use = VALUE if all(each is None for _, each in parts) else LOOK
                part = part if use == VALUE else None
            elif isinstance(target, ast.Name):
                use = VALUE if self.leaves(target.id, scope) else ALIAS
            else:
                use = LOOK if self.target(target, scope, "assigned") else VALUE
            if part is not None:
                uses[part] = VALUE if VALUE in (use, uses.get(part)) else use
        for each, use in uses.items():
            self.expression(each, scope, use)

    def leaves(self, name: str, scope: Scope) -> bool:
        """Whether what gets this name can be used from outside the file, or by an attribute of a class."""
        if scope.kind == "class":
            return True
        is_global = scope is self.module.top or scope.elsewhere.get(name) == "global"
        return is_global and (name not in self.module.loaded or name in self.listed)

    def target(self, node: ast.expr, scope: Scope, done: str) -> bool:
        """One target of a write; whether it was reported."""
        if isinstance(node, ast.Name):
            return False
        reported = False
        if isinstance(node, ast.Subscript):
            base = self.module.resolve(node.value, scope)
            key = constant(node.slice)
            if "os.environ" in base and key is not None:
                reported = self.environment(node, key)
            elif "sys.modules" in base and key is not None:
                reported = self.written(node, {f"{key}.*"}, "replaced in sys.modules")
            elif any(name.startswith("torch.backends") for name in base):
                reported = self.written(node, base, done)
            elif any(name.endswith(".__dict__") for name in base):
                reported = self.written(node, self.module.resolve(node, scope), done)
            self.expression(node.slice, scope, LOOK)
        else:
            reported = self.written(node, self.module.resolve(node, scope), done)
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            self.expression(node.value, scope, LOOK)
        return reported

    def environment(self, node: ast.AST, variable: str) -> bool:
        rule = of_environment(variable)
        if rule is not None:
            self.report(node, rule, variable, "written to the environment")
        return rule is not None

    # ---- expressions

    def expression(self, node: ast.expr, scope: Scope, use: str) -> None:  # noqa: C901, PLR0912 - one case a kind
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            self.reference(node, scope, use)
        elif isinstance(node, ast.Call):
            self.call(node, scope, use)
        elif isinstance(node, ast.Constant):
            pass
        elif isinstance(node, ast.IfExp):
            self.expression(node.test, scope, LOOK)
            self.expression(node.body, scope, use)
            self.expression(node.orelse, scope, use)
        elif isinstance(node, ast.BoolOp):
            for each in node.values:
                self.expression(each, scope, use)
        elif isinstance(node, ast.NamedExpr):
            self.expression(node.value, scope, VALUE if use == VALUE else ALIAS)
        elif isinstance(node, ast.Compare):
            for each in (node.left, *node.comparators):
                self.expression(each, scope, LOOK)
        elif isinstance(node, ast.UnaryOp):
            self.expression(node.operand, scope, LOOK if isinstance(node.op, ast.Not) else VALUE)
        elif isinstance(node, ast.BinOp):
            self.chain(node, scope)
        elif isinstance(node, ast.Lambda):
            self.defaults(node.args, scope)
            is_reference = node in self.references
            self.in_reference += is_reference
            self.expression(node.body, self.module.scopes[node], VALUE)
            self.in_reference -= is_reference
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            self.comprehension(node, scope)
        elif isinstance(node, (ast.JoinedStr, ast.FormattedValue)):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.expression(child, scope, LOOK)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.expression(child, scope, LOOK if use == LOOK else VALUE)

    def chain(self, node: ast.expr, scope: Scope) -> None:
        # A chain of operators is as deep a tree as it is long: walked, not recursed into.
        while isinstance(node, ast.BinOp):
            self.expression(node.right, scope, VALUE)
            node = node.left
        self.expression(node, scope, VALUE)

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp, scope: Scope) -> None:
        inner = self.module.scopes[node]
        for position, each in enumerate(node.generators):
            self.expression(each.iter, inner if position else scope, VALUE)
            for condition in each.ifs:
                self.expression(condition, inner, LOOK)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.expression(part, inner, VALUE)

    def reference(self, node: ast.Name | ast.Attribute | ast.Subscript, scope: Scope, use: str) -> None:
        names = self.module.resolve(node, scope)
        if names and any(of_name(name) for name in names):
            if use in (VALUE, BASE):
                self.named(node, names, "handed on" if use == VALUE else "subclassed")
            return
        if isinstance(node, ast.Subscript):
            is_literal = isinstance(node.value, (ast.Tuple, ast.List, ast.Dict))
            self.expression(node.value, scope, VALUE if is_literal else LOOK)
            self.expression(node.slice, scope, LOOK)
        elif isinstance(node, ast.Attribute):
            self.expression(node.value, scope, LOOK)

    def call(self, node: ast.Call, scope: Scope, use: str) -> None:
        names = self.module.resolve(node.func, scope)
        if not self.named(node, names, "called"):
            self.special(node, names, scope)
            if not names:
                self.expression(node.func, scope, LOOK)
        # `getattr(F, "scaled_dot_product_attention")` is a reference like any other.
        own = self.module.resolve(node, scope)
        if use in (VALUE, BASE) and own:
            self.named(node, own, "handed on" if use == VALUE else "subclassed")
        inner = LOOK if names & _LOOKS else VALUE
        for each in node.args:
            self.expression(each, scope, inner)
        for keyword in node.keywords:
            is_reference = keyword.arg == "reference" and names & _SITES
            if not is_reference:
                self.expression(keyword.value, scope, inner)
            elif isinstance(keyword.value, ast.Call):
                for each in keyword.value.args[1:]:
                    self.expression(each, scope, VALUE)
            else:
                self.expression(keyword.value, scope, LOOK)

    def special(self, node: ast.Call, names: frozenset[str], scope: Scope) -> None:  # noqa: C901, PLR0912 - one case each
        """Calls that write, and calls that depend on an argument."""
        args = node.args
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if names & _SETS or (
            method in ("__setattr__", "__delattr__")
            and names & {"builtins.object." + method, "types.ModuleType." + method}
        ):
            self.sets(node, args, scope)
        elif method in ("__setattr__", "__delattr__") and isinstance(node.func, ast.Attribute) and args:
            self.sets(node, [node.func.value, *args], scope)
        elif method in ("setattr", "delattr") and args and not names:  # pytest's monkeypatch
            text = constant(args[0])
            if text is not None and "." in text:
                self.written(node, {text}, "replaced")
            else:
                self.sets(node, args, scope)
        if "functools.partial" in names and args and self.module.resolve(args[0], scope) & _SETS:
            self.sets(node, args[1:], scope)
        for name in sorted(names):
            if name.endswith((".__dict__.update", ".__dict__.setdefault", ".__dict__.pop")):
                self.written(node, {f"{name.rsplit('.__dict__.', 1)[0]}.*"}, "assigned")
            elif _ENVIRON.fullmatch(name):
                for variable in self.variables(node):
                    self.environment(node, variable)
            elif _PATCH.fullmatch(name) and args:
                if name.endswith(".object"):
                    self.sets(node, args, scope)
                elif text := constant(args[0]):
                    self.written(node, {text}, "replaced")
            elif _SETS_IF_GIVEN.fullmatch(name) and (args or node.keywords):
                self.report(node, "FB201", name, "called to set it")
            elif _LIBRARY.fullmatch(name) and args:
                self.library(node, name)
            elif name.rsplit(".", 1)[-1] == "get_kernel" and args and is_attention_kernel(constant(args[0]) or ""):
                self.report(node, "FB104", f"{name}({constant(args[0])!r})", "called")

    def sets(self, node: ast.Call, args: list[ast.expr], scope: Scope) -> None:
        if len(args) > 1:
            attribute = constant(args[1]) or "*"
            bases = self.module.resolve(args[0], scope)
            self.written(node, {f"{base}.{attribute}" for base in bases}, "assigned")

    @staticmethod
    def variables(node: ast.Call) -> Iterator[str]:
        """The variables that a call of `os.environ` or `os.putenv` names."""
        for each in node.args[:1]:
            if isinstance(each, ast.Dict):
                yield from (text for key in each.keys if (text := constant(key)))
            elif text := constant(each):
                yield text
        yield from (keyword.arg for keyword in node.keywords if keyword.arg)

    def library(self, node: ast.Call, name: str) -> None:
        """`torch.library.Library("aten", "IMPL")` and its like: torch's own operators get other kernels."""
        what = constant(node.args[0]) or ""
        second = constant(node.args[1]) if len(node.args) > 1 else None
        if name.endswith(".Library"):
            if what == "aten" and second == "IMPL":
                self.report(node, "FB205", f"{name}('aten', 'IMPL')", "made")
        elif what.startswith("aten::"):
            self.report(node, "FB205", f"{name}({what!r})", "called")
