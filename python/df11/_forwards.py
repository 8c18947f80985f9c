"""Finds linear layers that a module's `forward` multiplies by the same x, by reading its source.

*Siblings* are layers of one module that its `forward` calls as `self.a(x)`, `self.b(x)`, in one
block of statements, with the same local variable, and with nothing between the first and the last
of these calls that could write into x or make it another tensor. Only these are allowed between
them: names, constants, arithmetic, methods and functions that write nowhere (`_PURE`), and other
layers whose `forward` consists only of these, such as activations and norms. Anything else there
keeps the layers separate.

`rewritten` makes the same function with one call for all siblings: `self.a(x)` becomes
`self.a(x) if (y := multiply(self, x, siblings)) is None else y[0]`, `self.b(x)` becomes
`self.b(x) if y is None else y[1]`. Line numbers stay those of the source, in tracebacks too."""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from copy import deepcopy
from functools import lru_cache, partial
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
#: PyTorch's own layers that write nowhere, by their file.
_LAYERS = tuple(f"torch.nn.modules.{name}" for name in ("activation", "linear", "normalization"))
#: Parameters that make functions write to their arguments.
_WRITING = {None, "out", "inplace"}
#: Functions that show a caller its own variables. A rewritten function has additional ones.
_SHOWING = {"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"}
#: Values that no method or function can write to.
_CONSTANT = (int, float, str, type(None), torch.dtype, torch.device)
#: Nodes that always evaluate their children, from left to right, and write nowhere.
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
#: The most layers of one call: the limit of a launch.
_MAX = 8
#: The depth to which forwards of layers and methods are read.
_MAX_DEPTH = 4

Place = tuple[int, int, int, int]


class Callee(NamedTuple):
    """A layer as it was when the source was read."""

    #: Dotted, with the names of its enclosing layers.
    name: str
    kind: type[nn.Module]
    forward: Any


class Held(NamedTuple):
    """A function that a layer calls by one of its own names, as it was when the source was read."""

    layer: str
    name: str
    function: Any


class Siblings(NamedTuple):
    """Layers of a module that are multiplied by the same x."""

    layers: tuple[Callee, ...]
    #: Other layers that are called between them.
    between: tuple[Callee, ...]
    #: Functions that these other layers call.
    functions: tuple[Held, ...]
    #: The places of the calls in the source.
    places: tuple[Place, ...]


class _Call(NamedTuple):
    layer: str
    x: str
    #: The number of its statement in the block, and the nodes that enclose it there.
    at: int
    path: tuple[ast.AST, ...]
    node: ast.Call


def siblings_of(module: nn.Module, layers: Collection[str]) -> tuple[Siblings, ...]:
    """Siblings among these linear layers of a module, in the order of their calls."""
    function = unwrapped(type(module).forward)
    source = source_of(function) if len(layers) > 1 else None
    if source is None or not _SHOWING.isdisjoint(function.__code__.co_names):
        return ()
    definition = source.definition
    reader = _Reader(module, function, definition)
    layers = [name for name in layers if child_of(module, name) is not None]
    if reader.is_stored(reader.this):
        return ()
    return tuple(found for block in _blocks(definition) for found in reader.siblings(block, layers))


def has_plain_names(kind: type[nn.Module]) -> bool:
    """Whether `self.name` means the child of that name, if nothing else has the name."""
    own: Any = kind
    methods = own.__getattr__, own.__getattribute__
    return methods == (nn.Module.__getattr__, object.__getattribute__)


def child_of(module: nn.Module, path: str) -> nn.Module | None:
    """The child with a dotted name; None if the name is something else."""
    current: nn.Module | None = module
    for name in path.split("."):
        if current is None or name in current.__dict__ or hasattr(type(current), name):
            return None
        current = current._modules.get(name)
    return current


def function_held(layer: nn.Module, name: str) -> Any:
    """The function behind a layer's name. A partial function gives all its parts."""
    attributes = layer.__dict__
    held = attributes[name] if name in attributes else getattr(type(layer), name, None)
    if isinstance(held, partial):
        return held.func, held.args, tuple(held.keywords.items())
    return held


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Lists of consecutive statements of a function, without those of inner functions."""
    for _, value in ast.iter_fields(node):
        some = value if isinstance(value, list) else []
        if some and isinstance(some[0], ast.stmt):
            yield some
        for child in some:
            is_inner = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)) and not is_inner:
                yield from _blocks(child)


class _Reader:
    """Reads a function of a module: its forward, or a function that forward calls."""

    def __init__(
        self, module: nn.Module, function: Any, definition: ast.FunctionDef, depth: int = 0
    ) -> None:
        self.module, self.function, self.definition = module, function, definition
        self.depth = depth
        self.this = definition.args.args[0].arg if definition.args.args else ""
        #: Path of the module in the module whose forward is read: "", or a name with a final dot.
        self.path = ""
        #: Layers and functions that the pure parts call.
        self.called: dict[str, Callee] = {}
        self.functions: dict[str, Held] = {}
        #: Names of tensors, numbers, and the like; and names that may be anything.
        self.values: set[str] = set()
        self.others: set[str] = set()

    def siblings(self, block: list[ast.stmt], layers: Collection[str]) -> Iterator[Siblings]:
        runs: list[list[_Call]] = []
        last: dict[str, list[_Call]] = {}
        for call in self._calls(block, layers):
            run = last.get(call.x, [])
            is_new = call.layer in [one.layer for one in run] or len(run) == _MAX
            if not run or is_new or not self._is_pure_between(block, run[0], call):
                runs.append(run := [])
                last[call.x] = run
            run.append(call)
        for run in runs:
            if len(run) > 1:
                self._is_pure_between(block, run[0], run[-1])
                yield self._siblings_in(run)

    def _siblings_in(self, run: list[_Call]) -> Siblings:
        names = [call.layer for call in run]
        between = tuple(one for name, one in self.called.items() if name not in names)
        layers = tuple(_callee(name, self.module._modules[name]) for name in names)
        places = tuple(place_of(call.node) for call in run)
        return Siblings(layers, between, tuple(self.functions.values()), places)

    def _calls(self, block: list[ast.stmt], layers: Collection[str]) -> Iterator[_Call]:
        """The calls of layers with one local variable that always happen, in order."""
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
        return name in _stored_in(self.definition)

    def _is_pure_between(self, block: list[ast.stmt], first: _Call, last: _Call) -> bool:
        fixed = {first.x, self.this}
        self.values, self.others = {first.x}, set()
        for statement in block[: first.at]:
            self._learn(statement)
        self.others.discard(first.x)  # `multiply` sees that it is a tensor
        self.called.clear()
        self.functions.clear()
        return all(self._is_pure_statement(one, fixed) for one in block[first.at : last.at]) and (
            self._is_pure_before(last.path[0], last)
        )

    def _is_pure_before(self, node: ast.AST, last: _Call) -> bool:
        """Whether everything in an expression before its last call is pure."""
        if node is last.node:
            return True
        if node not in last.path:
            return place_of(node)[:2] >= place_of(last.node)[2:] or self.is_pure(node)
        inner = (child for child in ast.iter_child_nodes(node) if hasattr(child, "lineno"))
        return all(self._is_pure_before(child, last) for child in inner)

    def _learn(self, statement: ast.stmt) -> None:
        """Notes what a statement assigns to names. A name that may be anything stays so."""
        value = statement.value if isinstance(statement, ast.Assign) else None
        known = self.values if value is not None and self._is_value(value) else self.others
        known |= _stored_in(statement)

    def _is_value(self, node: ast.AST) -> bool:
        """Whether it is a tensor, a number, or a tuple of these, which pure calls do not change."""
        if isinstance(node, ast.Name) and node.id in self.values:
            return node.id not in self.others
        if isinstance(node, (ast.Attribute, ast.Name)):
            is_of = isinstance(node, ast.Attribute) and self._is_value(node.value)
            resolved = self._resolved(node)
            is_constant = resolved is not None and isinstance(resolved, _CONSTANT)
            return is_of or self._is_own(node) or is_constant
        if isinstance(node, ast.Call):
            return self.is_pure(node)
        if isinstance(node, ast.Subscript):
            return self._is_value(node.value)
        return isinstance(node, _PLAIN) and all(map(self._is_value, ast.iter_child_nodes(node)))

    def _is_own(self, node: ast.expr) -> bool:
        """Whether it is a parameter or a constant of the module."""
        if (name := self._child(node)) is None:
            return False
        known = name in self.module._parameters or name in self.module._buffers
        return known or isinstance(vars(self.module).get(name, self), _CONSTANT)

    def _is_pure_statement(self, statement: ast.stmt, fixed: Collection[str] = ()) -> bool:
        if isinstance(statement, ast.If):
            parts = [*statement.body, *statement.orelse]
            inner = all(self._is_pure_statement(one, fixed) for one in parts)
            return not fixed and inner and self.is_pure(statement.test)
        if isinstance(statement, ast.Return):
            value = statement.value or ast.Constant(None)
            return not fixed and self.is_pure(value) and self._is_value(value)
        if isinstance(statement, ast.Assign):
            names = [name for target in statement.targets for name in _targets(target)]
            is_kept = all(name and name not in fixed for name in names)
            is_pure = is_kept and self.is_pure(statement.value)
            self._learn(statement)
            return is_pure
        return isinstance(statement, ast.Expr) and self.is_pure(statement.value)

    def is_pure(self, node: ast.AST) -> bool:
        """Whether evaluating it writes to nothing that was there before."""
        if isinstance(node, ast.Call):
            return self._is_pure_call(node)
        if isinstance(node, ast.Attribute) and self._is_computed(node):
            return False
        return isinstance(node, _PLAIN) and all(map(self.is_pure, ast.iter_child_nodes(node)))

    def _is_computed(self, node: ast.Attribute) -> bool:
        """Whether reading a name of the module runs code, as with a property."""
        attribute = getattr(type(self.module), self._child(node) or "", None)
        return hasattr(attribute, "__get__") and not isinstance(attribute, FunctionType)

    def _is_pure_call(self, call: ast.Call) -> bool:
        given = [*call.args, *(one.value for one in call.keywords)]
        if not all(map(self.is_pure, given)) or any(one.arg in _WRITING for one in call.keywords):
            return False
        if (name := self._child(call.func)) is not None:
            return all(map(self._is_value, given)) and self._is_pure_callee(name)
        if (callee := self._resolved(call.func)) is not None:
            return all(map(self._is_value, given)) and _is_pure_function(callee, len(call.args))
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in _PURE:
            return False
        # `to` and `float` write to modules, and `add` to sets.
        return self._is_value(call.func.value) and self.is_pure(call.func.value)

    def _is_pure_callee(self, name: str) -> bool:
        if (layer := child_of(self.module, name)) is not None:
            self.called[self.path + name] = _callee(self.path + name, layer)
            return self._is_pure_layer(layer, self.path + name + ".")
        if self.depth == 0:
            return False
        attribute = getattr(self.module, name, None)
        held = Held(self.path[:-1], name, function_held(self.module, name))
        self.functions[self.path + name] = held
        if isinstance(attribute, MethodType) and attribute.__self__ is self.module:
            return self._reads(self.module, attribute.__func__, self.path)
        return _is_pure_function(attribute)

    def _is_pure_layer(self, layer: nn.Module, path: str) -> bool:
        scope = getattr(type(layer).forward, "__globals__", {})
        if type(layer).__module__ in _LAYERS and scope.get("__name__") in _LAYERS:
            return not getattr(layer, "inplace", False)
        return has_plain_names(type(layer)) and self._reads(layer, type(layer).forward, path)

    def _reads(self, module: nn.Module, function: Any, path: str) -> bool:
        """Whether a function of values is pure and returns values."""
        source = source_of(function)
        if source is None or self.depth == _MAX_DEPTH:
            return False
        reader = _Reader(module, function, source.definition, self.depth + 1)
        reader.path, reader.called, reader.functions = path, self.called, self.functions
        reader.values = {*function.__code__.co_varnames} - {reader.this}
        return all(map(reader._is_pure_statement, source.definition.body))

    def _locals(self) -> tuple[str, ...]:
        code = self.function.__code__
        return (*code.co_varnames, *code.co_freevars, *code.co_cellvars)

    def _resolved(self, node: ast.AST) -> Any:
        """The object of a dotted name that begins with a global name."""
        if isinstance(node, ast.Attribute):
            outer = self._resolved(node.value)
            return None if outer is None else getattr(outer, node.attr, None)
        if not isinstance(node, ast.Name) or node.id in self._locals():
            return None
        return self.function.__globals__.get(node.id, vars(builtins).get(node.id))


@lru_cache(maxsize=1 << 12)
def _stored_in(node: ast.AST) -> frozenset[str]:
    """The names that a part of a source writes to or deletes."""
    names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
    return frozenset(each.id for each in names if not isinstance(each.ctx, ast.Load))


def _is_pure_function(function: Any, count: int = 1) -> bool:
    """Whether it writes to none of `count` arguments."""
    if isinstance(function, partial):
        is_named = not function.args and _WRITING.isdisjoint(function.keywords)
        is_fixed = all(isinstance(value, _CONSTANT) for value in function.keywords.values())
        return is_named and is_fixed and _is_pure_function(function.func, count)
    names = function.__code__.co_varnames if isinstance(function, FunctionType) else ()
    return any(function is one for one in _FUNCTIONS) and _WRITING.isdisjoint(names[:count])


def _straight(node: ast.AST, path: tuple[ast.AST, ...]) -> Iterator[tuple[ast.AST, ...]]:
    """The calls in an expression that always happen, in order, each with its enclosing nodes."""
    path = (*path, node)
    if isinstance(node, ast.Call) and not _is_out_of_order(node):
        for child in (node.func, *node.args, *node.keywords):
            yield from _straight(child, path)
        yield path
    elif isinstance(node, (*_STRAIGHT, ast.keyword)):
        for child in ast.iter_child_nodes(node):
            yield from _straight(child, path)


def _is_out_of_order(call: ast.Call) -> bool:
    """Whether arguments are not evaluated in source order: `*c` before b in f(a, k=b, *c)."""
    first = min((place_of(one) for one in call.keywords), default=None)
    return first is not None and any(place_of(one) > first for one in call.args)


def _callee(name: str, layer: Any) -> Callee:
    return Callee(name, type(layer), type(layer).forward)


def _targets(node: ast.expr) -> Iterator[str]:
    """Names that are assigned; an empty one for any other target."""
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
        #: The siblings and the number of the called layer, by the place of the call.
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
        expression: Any = ast.parse(source, mode="eval").body
        expression.body = node
        for inner in ast.walk(expression):
            if inner is not node and inner not in (node.func, *node.args):
                ast.copy_location(inner, node)
        return expression


def rewritten(
    function: Any, all_siblings: tuple[Siblings, ...], multiply: Callable[..., Any]
) -> FunctionType | None:
    """A function whose source was read, with one call of `multiply` for all siblings. None if it
    has decorators that cannot be copied.
    """
    inner = unwrapped(function)
    source = source_of(inner)
    assert source is not None
    definition = deepcopy(source.definition)
    definition = _Rewriter(definition.args.args[0].arg, all_siblings).visit(definition)
    given: dict[str, Any] = {f"_df11_siblings_{at}": each for at, each in enumerate(all_siblings)}
    given["_df11_multiply"] = multiply
    return rewrapped(function, function_of(source._replace(definition=definition), inner, given))
