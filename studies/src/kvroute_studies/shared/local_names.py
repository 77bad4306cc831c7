"""Replaces the names of local variables in a syntax tree by numbers, because a rename of them changes nothing.

Local variables are what a function, lambda or comprehension binds by assignment, `for`, `with`, `except`, `match`, `:=`
or `del`. Other names stay: parameters, attributes and names of a class body, imports, nested functions and classes, and
names that the module declares `global` or `nonlocal`.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_READERS = {"locals", "vars", "eval", "exec", "dir"}
"""Functions that can see the names of local variables."""


@dataclass(eq=False, slots=True)
class _Scope:
    """A module, class, function or comprehension, and what it binds."""

    outer: _Scope | None
    kind: str
    bound: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    """Bound names that are not local variables in the sense above."""


@dataclass(slots=True)
class _Use:
    """A place of a name in the tree."""

    node: ast.AST
    attribute: str
    scope: _Scope

    @property
    def name(self) -> str:
        return str(getattr(self.node, self.attribute))


class _Uses(ast.NodeVisitor):
    """Collects scopes and the places of names, in the order of the tree."""

    def __init__(self) -> None:
        self.scope = _Scope(None, "module")
        self.uses: list[_Use] = []
        self.declared: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        self._use(node, "id", binds=not isinstance(node.ctx, ast.Load))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        scope: _Scope | None = self.scope
        while scope is not None and scope.kind == "comprehension":
            scope = scope.outer
        assert scope is not None, "the outermost scope is a module"
        scope.bound.add(node.target.id)
        self.uses.append(_Use(node.target, "id", self.scope))
        self.visit(node.value)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._optional(node, "name")

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self._optional(node, "name")

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        self._optional(node, "name")

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self._optional(node, "rest")

    def visit_Global(self, node: ast.Global) -> None:
        self.declared.update(node.names)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.declared.update(node.names)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.scope.kept.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)

    visit_ImportFrom = visit_Import  # noqa: N815  # ast calls them by these names

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.scope.kept.add(node.name)
        self._all([*node.decorator_list, *([node.returns] if node.returns else [])])
        self._function(node, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._function(node, [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.kept.add(node.name)
        self._all([*node.decorator_list, *node.bases, *node.keywords])
        self._inside("class", node.body)

    def visit_ListComp(self, node: Comprehension) -> None:
        first, *others = node.generators
        self.visit(first.iter)
        results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self._inside("comprehension", [first.target, *first.ifs, *others, *results])

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp  # noqa: N815

    def _function(self, node: Function, body: Sequence[ast.AST]) -> None:
        given = node.args
        parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        parameters += [parameter for parameter in (given.vararg, given.kwarg) if parameter is not None]
        annotations = [parameter.annotation for parameter in parameters if parameter.annotation]
        self._all([*given.defaults, *(default for default in given.kw_defaults if default), *annotations])
        self._inside("function", body, {parameter.arg for parameter in parameters})

    def _inside(self, kind: str, parts: Sequence[ast.AST], kept: set[str] | None = None) -> None:
        outer, self.scope = self.scope, _Scope(self.scope, kind, kept=kept or set())
        self._all(parts)
        self.scope = outer

    def _all(self, parts: Sequence[ast.AST]) -> None:
        for part in parts:
            self.visit(part)

    def _optional(self, node: ast.AST, attribute: str) -> None:
        if getattr(node, attribute) is not None:
            self._use(node, attribute, binds=True)
        self.generic_visit(node)

    def _use(self, node: ast.AST, attribute: str, *, binds: bool) -> None:
        self.uses.append(_Use(node, attribute, self.scope))
        if binds:
            self.scope.bound.add(self.uses[-1].name)


def number_local_names(tree: ast.Module) -> None:
    """Replace each local variable's name by a number, by first appearance in the module; modules whose code can see the
    names of local variables stay as they are."""
    found = _Uses()
    found.visit(tree)
    if any(use.name in _READERS for use in found.uses):
        return
    owners = [_owner(use, found.declared) for use in found.uses]
    numbers: dict[tuple[_Scope, str], str] = {}
    for use, owner in zip(found.uses, owners, strict=True):
        if owner is not None:
            setattr(use.node, use.attribute, numbers.setdefault((owner, use.name), str(len(numbers))))


def _owner(use: _Use, declared: set[str]) -> _Scope | None:
    """Return the function or comprehension whose local variable this is, if it is one."""
    if use.name in declared or use.name.startswith("__"):  # the compiler changes those of a class
        return None
    scope: _Scope | None = use.scope
    while scope is not None:
        if use.name in scope.bound | scope.kept and (scope.kind != "class" or scope is use.scope):
            local = scope.kind in ("function", "comprehension") and use.name not in scope.kept
            return scope if local else None
        scope = scope.outer
    return None
