"""Python functions and the source from which they were compiled."""

from __future__ import annotations
import __future__

import ast
import inspect
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

_FUTURE = 0
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag


class Source(NamedTuple):
    """The source of a function."""

    definition: ast.FunctionDef
    #: Imports of its file. Python compiles calls of imported names differently.
    imports: list[ast.stmt]


class _File(NamedTuple):
    """Contents of a source file: functions by their first lines, and imports outside of them."""

    functions: dict[int, ast.FunctionDef]
    imports: list[ast.stmt]


@lru_cache(maxsize=1 << 6)
def _file_of(source: str) -> _File:
    nodes = list(_outside(tree := ast.parse(source)))
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return _File(
        {
            min([node.lineno, *(one.lineno for one in node.decorator_list)]): node
            for node in functions
        },
        [node for node in imports if getattr(node, "module", None) != "__future__"],
    )


def _outside(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes outside functions and classes. Imports there change how calls are compiled."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
            yield from _outside(child)


def source_of(function: Any) -> Source | None:
    """The source of a function, if it compiles to the function's code."""
    if type(function) is not FunctionType or hasattr(function, "__wrapped__"):
        return None
    return _source_of(function)


@lru_cache(maxsize=1 << 10)
def _source_of(function: FunctionType) -> Source | None:
    code = function.__code__
    try:
        file = _file_of("".join(inspect.findsource(function)[0]))
        definition = file.functions.get(code.co_firstlineno)
        if definition is None or definition.name != code.co_name:
            return None
        source = Source(definition, file.imports)
        return source if _is_same(_code_of(source, function), code) else None
    except (OSError, SyntaxError, TypeError, ValueError):
        return None


def _code_of(source: Source, function: Any, *names: str) -> CodeType | None:
    """The code of a definition in the scope of a function, with names of an outer function. None if
    the code is nested elsewhere, as in a definition with type parameters.
    """
    (outer,) = ast.parse(
        f"def outer({', '.join((*function.__code__.co_freevars, *names))}): 0"
    ).body
    outer.body = [source.definition]  # type: ignore[attr-defined]
    own: CodeType = function.__code__
    flags = own.co_flags & _FUTURE
    tree = ast.fix_missing_locations(ast.Module([*source.imports, outer], []))
    code = compile(tree, own.co_filename, "exec", flags=flags, dont_inherit=True)
    return _inner(_inner(code, "outer"), source.definition.name)


def _inner(code: CodeType | None, name: str) -> CodeType | None:
    some = code.co_consts if code is not None else ()
    inner = (one for one in some if isinstance(one, CodeType) and one.co_name == name)
    return next(inner, None)


def _is_same(one: CodeType | None, other: CodeType) -> bool:
    """Whether codes are equal, except that one may be nested in another function."""
    if one is None or (one.co_flags ^ other.co_flags) & ~inspect.CO_NESTED:
        return False
    return one.replace(co_flags=other.co_flags) == other


def function_of(source: Source, function: Any, given: Mapping[str, Any]) -> FunctionType:
    """The function that a definition makes in place of another one, with additional names."""
    code = _code_of(source, function, *given)
    assert code is not None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells |= {name: CellType(value) for name, value in given.items()}
    closure = tuple(cells[name] for name in code.co_freevars)
    name, defaults = function.__name__, function.__defaults__
    made = FunctionType(code, function.__globals__, name, defaults, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def unwrapped(function: Any) -> Any:
    """The function inside decorators."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def rewrapped(function: Any, made: FunctionType) -> FunctionType | None:
    """A decorated function with another function inside its decorators. None if a decorator's
    result is no function that has the next one in its scope.
    """
    if (wrapped := getattr(function, "__wrapped__", None)) is None:
        return made
    inner = rewrapped(wrapped, made)
    if inner is None or type(function) is not FunctionType:
        return None
    old = function.__closure__ or ()
    is_it = [_content(cell) is wrapped for cell in old]
    if not any(is_it):
        return None
    cells = (CellType(inner) if is_new else cell for cell, is_new in zip(old, is_it, strict=True))
    given = function.__globals__, function.__name__, function.__defaults__
    copied = FunctionType(function.__code__, *given, tuple(cells))
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
