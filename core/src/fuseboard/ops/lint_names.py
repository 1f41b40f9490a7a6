"""What a name in a Python source stands for: its scopes read off the tree, and expressions resolved to full names.

Nothing is imported and nothing is run. `F.scaled_dot_product_attention` resolves to
`torch.nn.functional.scaled_dot_product_attention` where `F` is that module by any form of import or assignment, and to
nothing where `F` is a parameter or another variable. A name with several meanings (a conditional import, a fallback)
has all of them.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

__all__ = ["Binding", "Module", "Scope", "constant"]

Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BUILTINS = frozenset(dir(builtins))
_NOTHING: frozenset[str] = frozenset()

# A name that is assigned in hundreds of branches is data, not an alias.
_MOST_MEANINGS = 64


@dataclass(frozen=True)
class Binding:
    """One way in which a name gets its meaning.

    Attributes:
        name: The full name that an import gives, or empty.
        value: The expression that an assignment gives, or None.
        scope: Where that expression stands.
        node: The function or class that a definition gives, or None.
    """

    name: str = ""
    value: ast.expr | None = None
    scope: Scope | None = None
    node: ast.AST | None = None


_OPAQUE = Binding()


@dataclass(eq=False)
class Scope:
    """A module, class, function or comprehension, with the names bound in it."""

    kind: str
    parent: Scope | None
    names: dict[str, list[Binding]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    elsewhere: dict[str, str] = field(default_factory=dict)

    def bind(self, name: str, binding: Binding) -> None:
        """Give `name` one more meaning, where `global` and `nonlocal` say."""
        scope = self
        said = self.elsewhere.get(name)
        if said == "global":
            scope = self.module
        elif said == "nonlocal":
            scope = next((each for each in self.outer() if each.kind == "function" and name in each.names), self.module)
        scope.names.setdefault(name, []).append(binding)

    @property
    def module(self) -> Scope:
        """The scope of the whole file."""
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope

    def outer(self) -> Iterator[Scope]:
        """The scopes around this one, innermost first."""
        scope = self.parent
        while scope is not None:
            yield scope
            scope = scope.parent

    def find(self, name: str) -> list[Binding] | None:
        """What is bound to `name` as Python looks it up: a class's names are seen in its own body only."""
        if self.elsewhere.get(name) == "global":
            return self.module.names.get(name)
        if name in self.names:
            return self.names[name]
        for scope in self.outer():
            if scope.kind != "class" and name in scope.names:
                return scope.names[name]
        return None


def constant(node: ast.AST | None) -> str | None:
    """The text of a constant string, else None."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


class Module:
    """One parsed source: its scopes, and what its expressions stand for.

    Attributes:
        top: The module's own scope.
        scopes: The scope that each function, class, lambda and comprehension opens.
        loaded: Every name that is read anywhere.
        imported: Every name that an import binds anywhere.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.top = Scope("module", None)
        self.scopes: dict[ast.AST, Scope] = {}
        self.loaded: set[str] = set()
        self.imported: set[str] = set()
        self._late: list[Callable[[], None]] = []
        # By the identity of a name's list of bindings: what it may stand for, and how far that has been followed.
        self._meanings: dict[int, frozenset[str]] = {}
        self._done: set[int] = set()
        self._seen: set[int] = set()
        self._busy: set[int] = set()
        self._cyclic = False
        for statement in tree.body:
            self._read(statement, self.top)
        # Bodies after everything around them, so that a `nonlocal` finds what it speaks of.
        while self._late:
            late, self._late = self._late, []
            for each in late:
                each()

    # ---- what expressions stand for

    def resolve(self, node: ast.AST, scope: Scope) -> frozenset[str]:  # noqa: PLR0911 - one return a kind
        """The full names that `node` may stand for; none when it is no name, or anybody's guess."""
        if isinstance(node, ast.Name):
            return self._named(node.id, scope)
        if isinstance(node, ast.Attribute):
            return frozenset(f"{base}.{node.attr}" for base in self.resolve(node.value, scope))
        if isinstance(node, ast.Call):
            return self._called(node, scope)
        if isinstance(node, ast.Subscript):
            return self._indexed(node, scope)
        if isinstance(node, ast.IfExp):
            return self.resolve(node.body, scope) | self.resolve(node.orelse, scope)
        if isinstance(node, ast.BoolOp):
            return _NOTHING.union(*(self.resolve(each, scope) for each in node.values))
        if isinstance(node, ast.NamedExpr):
            return self.resolve(node.value, scope)
        return _NOTHING

    def _named(self, name: str, scope: Scope) -> frozenset[str]:
        bindings = scope.find(name)
        if bindings is None:
            if name in _BUILTINS:
                return frozenset((f"builtins.{name}",))
            return frozenset(f"{star}.{name}" for star in scope.module.stars)
        key = id(bindings)
        if key in self._done or key in self._seen:
            self._cyclic |= key in self._busy
            return self._meanings[key]
        self._meanings.setdefault(key, frozenset(each.name for each in bindings if each.name))
        if self._busy:
            return self._evaluate(key, bindings)
        # Names given by one another (`x = x.part`) need a second look; four see through any chain that people write.
        for _round in range(4):
            before = self._meanings[key]
            self._cyclic = False
            self._seen.clear()
            self._evaluate(key, bindings)
            if not self._cyclic or self._meanings[key] == before:
                break
        self._done |= self._seen
        self._seen.clear()
        return self._meanings[key]

    def _evaluate(self, key: int, bindings: list[Binding]) -> frozenset[str]:
        self._seen.add(key)
        self._busy.add(key)
        found = set(self._meanings[key])
        for binding in bindings[:_MOST_MEANINGS]:
            if binding.value is not None and binding.scope is not None:
                found |= self.resolve(binding.value, binding.scope)
        self._busy.discard(key)
        self._meanings[key] = frozenset(found)
        return self._meanings[key]

    def _called(self, node: ast.Call, scope: Scope) -> frozenset[str]:
        if not node.args:
            return _NOTHING
        function = self.resolve(node.func, scope)
        if "builtins.getattr" in function and len(node.args) > 1:
            name = constant(node.args[1])
            return frozenset(f"{base}.{name or '*'}" for base in self.resolve(node.args[0], scope))
        text = constant(node.args[0])
        if text and not text.startswith("."):
            if "importlib.import_module" in function:
                return frozenset((text,))
            if "builtins.__import__" in function:
                return frozenset((text if len(node.args) + len(node.keywords) > 1 else text.split(".")[0],))
        if "builtins.vars" in function:
            return frozenset(f"{base}.__dict__" for base in self.resolve(node.args[0], scope))
        return _NOTHING

    def _indexed(self, node: ast.Subscript, scope: Scope) -> frozenset[str]:
        text = constant(node.slice)
        found = set()
        for base in self.resolve(node.value, scope):
            if base == "sys.modules":
                if text:  # any other key is anybody's guess, mostly `__name__`
                    found.add(text)
            elif base.endswith(".__dict__"):
                found.add(f"{base.removesuffix('__dict__')}{text or '*'}")
            else:
                found.add(f"{base}[]")
        return frozenset(found)

    def definitions(self, node: ast.AST, scope: Scope) -> list[ast.AST]:
        """The functions and classes of this file that a name stands for."""
        if not isinstance(node, ast.Name):
            return []
        found: list[ast.AST] = []
        for binding in scope.find(node.id) or []:
            if binding.node is not None:
                found.append(binding.node)
            elif isinstance(binding.value, (ast.Lambda, ast.Name)) and binding.scope is not None:
                if isinstance(binding.value, ast.Lambda):
                    found.append(binding.value)
                elif binding.value.id != node.id:
                    found += self.definitions(binding.value, binding.scope)
        return found

    # ---- reading the tree

    def _read(self, node: ast.AST, scope: Scope) -> None:
        # A chain of operators is as deep a tree as it is long: walked, not recursed into.
        while isinstance(node, ast.BinOp):
            self._read(node.right, scope)
            node = node.left
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                self.loaded.add(node.id)
        elif isinstance(node, (ast.Constant, ast.Pass, ast.Break, ast.Continue)):
            pass
        elif isinstance(node, (*Function, ast.Lambda)):
            self._read_function(node, scope)
        elif isinstance(node, ast.ClassDef):
            self._read_class(node, scope)
        elif isinstance(node, _COMPREHENSIONS):
            self._read_comprehension(node, scope)
        else:
            self._bind(node, scope)
            for child in ast.iter_child_nodes(node):
                self._read(child, scope)

    def _read_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, scope: Scope) -> None:  # noqa: C901 - one case a part
        inner = self.scopes[node] = Scope("function", scope)
        arguments = node.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
            if each is not None:
                inner.bind(each.arg, _OPAQUE)
                if each.annotation is not None:
                    self._read(each.annotation, scope)
        for default in (*arguments.defaults, *arguments.kw_defaults):
            if default is not None:
                self._read(default, scope)
        if isinstance(node, ast.Lambda):
            self._late.append(lambda: self._read(node.body, inner))
            return
        scope.bind(node.name, Binding(node=node))
        for decorator in node.decorator_list:
            self._read(decorator, scope)
        if node.returns is not None:
            self._read(node.returns, scope)
        self._declared(node, inner)

        def body() -> None:
            for statement in node.body:
                self._read(statement, inner)

        self._late.append(body)

    @staticmethod
    def _declared(node: ast.AST, inner: Scope) -> None:
        todo = list(ast.iter_child_nodes(node))
        while todo:
            each = todo.pop()
            if isinstance(each, (ast.Global, ast.Nonlocal)):
                said = "global" if isinstance(each, ast.Global) else "nonlocal"
                inner.elsewhere.update(dict.fromkeys(each.names, said))
            elif isinstance(each, (ast.stmt, ast.ExceptHandler, ast.match_case)) and not isinstance(
                each, (*Function, ast.ClassDef)
            ):
                todo.extend(ast.iter_child_nodes(each))

    def _read_class(self, node: ast.ClassDef, scope: Scope) -> None:
        scope.bind(node.name, Binding(node=node))
        for each in (*node.decorator_list, *node.bases, *node.keywords):
            self._read(each, scope)
        inner = self.scopes[node] = Scope("class", scope)
        self._declared(node, inner)
        for statement in node.body:
            self._read(statement, inner)

    def _read_comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp, scope: Scope
    ) -> None:
        inner = self.scopes[node] = Scope("comprehension", scope)
        for position, each in enumerate(node.generators):
            self._read(each.iter, scope if position == 0 else inner)
            self._target(each.target, None, inner)
            for condition in each.ifs:
                self._read(condition, inner)
        parts = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        for part in parts:
            self._read(part, inner)

    def _bind(self, node: ast.AST, scope: Scope) -> None:  # noqa: C901, PLR0912 - one case a form of binding
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                self.imported.add(name)
                scope.bind(name, Binding(name=alias.name if alias.asname else name))
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                if alias.name == "*":
                    scope.stars.append(module)
                    continue
                name = alias.asname or alias.name
                self.imported.add(name)
                scope.bind(name, Binding(name=f"{module}{'' if module.endswith('.') else '.'}{alias.name}"))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._target(target, node.value, scope)
        elif isinstance(node, ast.AnnAssign):
            self._target(node.target, node.value, scope)
        elif isinstance(node, ast.NamedExpr):
            while scope.kind == "comprehension" and scope.parent is not None:
                scope = scope.parent
            self._target(node.target, node.value, scope)
        elif isinstance(node, (ast.AugAssign, ast.For, ast.AsyncFor)):
            self._target(node.target, None, scope)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._target(node.optional_vars, None, scope)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            scope.bind(node.name, _OPAQUE)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            scope.bind(node.rest, _OPAQUE)

    def _target(self, target: ast.expr, value: ast.expr | None, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope.bind(target.id, _OPAQUE if value is None else Binding(value=value, scope=scope))
        elif isinstance(target, ast.Starred):
            self._target(target.value, None, scope)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each, part in pairs(target, value):
                self._target(each, part, scope)


def pairs(target: ast.Tuple | ast.List, value: ast.expr | None) -> list[tuple[ast.expr, ast.expr | None]]:
    """The targets of an unpacking with what each gets, or None where that cannot be read off."""
    if (
        isinstance(value, (ast.Tuple, ast.List))
        and len(value.elts) == len(target.elts)
        and not any(isinstance(each, ast.Starred) for each in (*target.elts, *value.elts))
    ):
        return list(zip(target.elts, value.elts, strict=True))
    return [(each, None) for each in target.elts]
