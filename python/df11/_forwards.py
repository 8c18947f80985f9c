"""Which linear layers the `forward` of a module multiplies by the same x, read from its source.

*Siblings* are layers of one module that its `forward` calls as `self.a(x)`, `self.b(x)`, in one
block of statements, with the same local variable, and with nothing between the first and the last
of these calls that could write into x or make it another tensor. Between them are allowed: names,
constants, arithmetic, methods and functions that write nowhere (`_PURE`), other layers whose
`forward` is made of these alone, such as activations and norms. Whatever else is there, each layer
goes by itself.

`rewritten` makes the same function with one call for all siblings: `self.a(x)` becomes
`self.a(x) if (y := multiply(self, x, siblings)) is None else y[0]`, `self.b(x)` becomes
`self.b(x) if y is None else y[1]`. Lines are those of the source, in tracebacks too."""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from copy import deepcopy
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from ._code import function_of, rewrapped, source_of, unwrapped

#: Methods of tensors, and functions, that write to none of their arguments.
_NAMES = """
    abs add chunk clamp contiguous cos div exp expand flatten float gelu log mean movedim mul neg
    numel permute pow relu repeat reshape rsqrt sigmoid silu sin size softmax softplus split sqrt
    square squeeze sub sum tanh to transpose type_as unbind unflatten unsqueeze view
"""
_PURE = frozenset(_NAMES.split())
_FUNCTIONS = [
    *(getattr(torch, name) for name in _PURE if hasattr(torch, name)),
    *(getattr(functional, name) for name in _PURE if hasattr(functional, name)),
    *(vars(math).values()),
    *(len, int, float, tuple),
]
#: PyTorch's own layers that write nowhere, by the file that they are from.
_LAYERS = tuple(f"torch.nn.modules.{name}" for name in ("activation", "linear", "normalization"))
#: Parameters by which functions write to their arguments.
_WRITING = {None, "out", "inplace"}
#: Nodes that evaluate their children, always, from left to right, and write nowhere.
_STRAIGHT = (ast.Attribute, ast.BinOp, ast.UnaryOp, ast.Subscript, ast.Tuple, ast.List, ast.Starred)
_PLAIN = (
    *_STRAIGHT,
    ast.keyword,
    ast.Constant,
    ast.Name,
    ast.Slice,
    ast.Compare,
    ast.BoolOp,
    ast.IfExp,
    ast.expr_context,
    ast.operator,
    ast.unaryop,
    ast.cmpop,
    ast.boolop,
)
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
#: The most layers of one call: what a launch takes.
_MOST = 8
#: How deep forwards of layers and methods are read.
_MOST_DEPTH = 4

Place = tuple[int, int, int, int]


class Callee(NamedTuple):
    """A layer as it was when the source was read."""

    name: str
    kind: type[nn.Module]
    forward: Any


class Siblings(NamedTuple):
    """Layers of a module that are multiplied by the same x."""

    layers: tuple[Callee, ...]
    #: Others that are called between them.
    between: tuple[Callee, ...]
    #: Where the source calls the layers.
    places: tuple[Place, ...]


class _Call(NamedTuple):
    layer: str
    x: str
    #: The number of its statement in the block, and the nodes around it there.
    at: int
    path: tuple[ast.AST, ...]
    node: ast.Call


def siblings_of(module: nn.Module, layers: Collection[str]) -> tuple[Siblings, ...]:
    """Siblings among these linear layers of a module, in the order of their calls."""
    function = unwrapped(type(module).forward)
    source = source_of(function) if len(layers) > 1 else None
    if source is None:
        return ()
    definition = source.definition
    reader = _Reader(module, function, definition)
    if reader.is_stored(reader.this):
        return ()
    return tuple(found for block in _blocks(definition) for found in reader.siblings(block, layers))


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Lists of statements of a function that run one after another, not of functions in it."""
    for _, value in ast.iter_fields(node):
        some = value if isinstance(value, list) else []
        if some and isinstance(some[0], ast.stmt):
            yield some
        for child in some:
            is_inner = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)) and not is_inner:
                yield from _blocks(child)


class _Reader:
    """Reads a function of a module, which is its forward or what that calls."""

    def __init__(
        self, module: nn.Module, function: Any, definition: ast.FunctionDef, depth: int = 0
    ) -> None:
        self.module, self.function, self.definition = module, function, definition
        self.depth = depth
        self.this = definition.args.args[0].arg if definition.args.args else ""
        #: Children that were called in what was found pure.
        self.called: dict[str, nn.Module] = {}

    def siblings(self, block: list[ast.stmt], layers: Collection[str]) -> Iterator[Siblings]:
        runs: list[list[_Call]] = []
        last: dict[str, list[_Call]] = {}
        for call in self._calls(block, layers):
            run = last.get(call.x, [])
            is_new = call.layer in [one.layer for one in run] or len(run) == _MOST
            if not run or is_new or not self._is_pure_between(block, run[0], call):
                runs.append(run := [])
                last[call.x] = run
            run.append(call)
        for run in runs:
            if len(run) > 1:
                self.called.clear()
                self._is_pure_between(block, run[0], run[-1])
                names = [call.layer for call in run]
                between = [name for name in self.called if name not in names]
                places = tuple(place_of(call.node) for call in run)
                yield Siblings(self._callees(names), self._callees(between), places)

    def _callees(self, names: Iterable[str]) -> tuple[Callee, ...]:
        found: list[tuple[str, Any]] = [(name, self.module._modules[name]) for name in names]
        return tuple(Callee(name, type(one), type(one).forward) for name, one in found)

    def _calls(self, block: list[ast.stmt], layers: Collection[str]) -> Iterator[_Call]:
        """Calls of the layers with a local variable alone, that always happen, in their order."""
        for at, statement in enumerate(block):
            value = getattr(statement, "value", None)
            if isinstance(statement, _SIMPLE) and value is not None:
                for path in _straight(value, ()):
                    call: Any = path[-1]
                    layer, x = self._child(call.func), self._x(call)
                    if layer is not None and layer in layers and x is not None:
                        yield _Call(layer, x, at, path, call)

    def _child(self, node: ast.expr) -> str | None:
        """The name in `self.name`."""
        is_its = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        return node.attr if is_its and node.value.id == self.this else None  # type: ignore

    def _x(self, call: ast.Call) -> str | None:
        is_one = len(call.args) == 1 and not call.keywords and isinstance(call.args[0], ast.Name)
        name = call.args[0].id if is_one else None  # type: ignore[attr-defined]
        return name if name in self.function.__code__.co_varnames else None

    def is_stored(self, name: str) -> bool:
        names = (node for node in ast.walk(self.definition) if isinstance(node, ast.Name))
        return any(node.id == name and not isinstance(node.ctx, ast.Load) for node in names)

    def _is_pure_between(self, block: list[ast.stmt], first: _Call, last: _Call) -> bool:
        fixed = {first.x, self.this}
        return all(self._is_pure_statement(one, fixed) for one in block[first.at : last.at]) and (
            self._is_pure_before(last.path[0], last)
        )

    def _is_pure_before(self, node: ast.AST, last: _Call) -> bool:
        """Whether all is pure that happens in an expression before its last call."""
        if node is last.node:
            return True
        if node not in last.path:
            return place_of(node)[:2] >= place_of(last.node)[2:] or self.is_pure(node)
        inner = (child for child in ast.iter_child_nodes(node) if hasattr(child, "lineno"))
        return all(self._is_pure_before(child, last) for child in inner)

    def _is_pure_statement(self, statement: ast.stmt, fixed: Collection[str] = ()) -> bool:
        if isinstance(statement, ast.If):
            parts = [*statement.body, *statement.orelse]
            inner = all(self._is_pure_statement(one, fixed) for one in parts)
            return not fixed and inner and self.is_pure(statement.test)
        if isinstance(statement, ast.Return):
            return not fixed and (statement.value is None or self.is_pure(statement.value))
        if isinstance(statement, ast.Assign):
            names = [name for target in statement.targets for name in _targets(target)]
            return all(name and name not in fixed for name in names) and (
                self.is_pure(statement.value)
            )
        return isinstance(statement, ast.Expr) and self.is_pure(statement.value)

    def is_pure(self, node: ast.AST) -> bool:
        """Whether evaluating it writes to nothing that was there before."""
        if isinstance(node, ast.Call):
            return self._is_pure_call(node)
        return isinstance(node, _PLAIN) and all(map(self.is_pure, ast.iter_child_nodes(node)))

    def _is_pure_call(self, call: ast.Call) -> bool:
        given = [*call.args, *(one.value for one in call.keywords)]
        if not all(map(self.is_pure, given)) or any(one.arg in _WRITING for one in call.keywords):
            return False
        if (name := self._child(call.func)) is not None:
            return self._is_pure_callee(name)
        if (found := self._resolved(call.func)) is not None:
            return _is_pure_function(found, len(call.args))
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in _PURE:
            return False
        return not self._may_be_module(call.func.value) and self.is_pure(call.func.value)

    def _may_be_module(self, node: ast.expr) -> bool:
        """Whether it is of this module and no tensor: `to` and `float` write to modules."""
        known = (*self.module._parameters, *self.module._buffers)
        if self._child(node) in known:
            return False
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id == self.this

    def _is_pure_callee(self, name: str) -> bool:
        found = getattr(self.module, name, None)
        if isinstance(found, nn.Module):
            if self.depth == 0:
                self.called[name] = found
            return self._is_pure_layer(found)
        if self.depth == 0:  # nobody would see that it is another one by now
            return False
        if isinstance(found, MethodType) and found.__self__ is self.module:
            return self._reads(self.module, found.__func__)
        return _is_pure_function(found)

    def _is_pure_layer(self, layer: nn.Module) -> bool:
        if type(layer).__module__ in _LAYERS:
            return not getattr(layer, "inplace", False)
        return self._reads(layer, type(layer).forward)

    def _reads(self, module: nn.Module, function: Any) -> bool:
        """Whether all that a function does is pure."""
        source = source_of(function)
        if source is None or self.depth == _MOST_DEPTH:
            return False
        reader = _Reader(module, function, source.definition, self.depth + 1)
        return all(map(reader._is_pure_statement, source.definition.body))

    def _resolved(self, node: ast.AST) -> Any:
        """The object that a dotted name stands for which begins with a global one."""
        if isinstance(node, ast.Attribute):
            outer = self._resolved(node.value)
            return None if outer is None else getattr(outer, node.attr, None)
        if not isinstance(node, ast.Name) or node.id in self.function.__code__.co_varnames:
            return None
        scope = {**vars(builtins), **self.function.__globals__}
        return scope.get(node.id)


def _is_pure_function(found: Any, count: int = 1) -> bool:
    """Whether it writes to none of `count` arguments."""
    if isinstance(found, partial):
        is_named = not found.args and _WRITING.isdisjoint(found.keywords)
        return is_named and _is_pure_function(found.func, count)
    names = found.__code__.co_varnames if isinstance(found, FunctionType) else ()
    return any(found is one for one in _FUNCTIONS) and _WRITING.isdisjoint(names[:count])


def _straight(node: ast.AST, path: tuple[ast.AST, ...]) -> Iterator[tuple[ast.AST, ...]]:
    """Calls in an expression that always happen, in their order, each with the nodes around it."""
    path = (*path, node)
    if isinstance(node, ast.Call):
        for child in (node.func, *node.args, *node.keywords):
            yield from _straight(child, path)
        yield path
    elif isinstance(node, (*_STRAIGHT, ast.keyword)):
        for child in ast.iter_child_nodes(node):
            yield from _straight(child, path)


def _targets(node: ast.expr) -> Iterator[str]:
    """Names that are assigned; an empty one for what is no name."""
    if isinstance(node, (ast.Tuple, ast.List)):
        for inner in node.elts:
            yield from _targets(inner)
    else:
        yield node.id if isinstance(node, ast.Name) else ""


def place_of(node: Any) -> Place:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


class _Rewriter(ast.NodeTransformer):
    def __init__(self, this: str, all_siblings: Iterable[Siblings]) -> None:
        self.this = this
        #: The siblings and the number of the layer that a call is of, by the place of the call.
        self.known = {
            place: (number, at)
            for number, each in enumerate(all_siblings)
            for at, place in enumerate(each.places)
        }

    def visit_Call(self, node: ast.Call) -> Any:
        if (known := self.known.get(place_of(node))) is None:
            return self.generic_visit(node)
        number, at = known
        several = made = f"_df11_{number}"
        if at == 0:
            given = f"{self.this}, {node.args[0].id}, _df11_siblings_{number}"  # type: ignore
            made = f"({several} := _df11_multiply({given}))"
        source = f"0 if {made} is None else {several}[{at}]"
        found: Any = ast.parse(source, mode="eval").body
        found.body = node
        for inner in ast.walk(found):
            if inner is not node and inner not in (node.func, *node.args):
                ast.copy_location(inner, node)
        return found


def rewritten(
    function: Any, all_siblings: tuple[Siblings, ...], multiply: Callable[..., Any]
) -> FunctionType | None:
    """A function whose source was read, with one call of `multiply` for all siblings; None if it
    has decorators which cannot be copied.
    """
    inner = unwrapped(function)
    source = source_of(inner)
    assert source is not None
    definition = deepcopy(source.definition)
    definition = _Rewriter(definition.args.args[0].arg, all_siblings).visit(definition)
    given: dict[str, Any] = {f"_df11_siblings_{at}": each for at, each in enumerate(all_siblings)}
    given["_df11_multiply"] = multiply
    return rewrapped(function, function_of(source._replace(definition=definition), inner, given))
