"""Names of modules and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

Value = TypeVar("Value")


class Place(NamedTuple):
    """Where a module has a parameter or buffer."""

    path: str
    attribute: str

    @property
    def name(self) -> str:
        """Its full name."""
        return join(self.path, self.attribute)


def join(path: str, name: str) -> str:
    """The name of what has a name in the module at a path."""
    return f"{path}.{name}" if path else name


def outer(name: str) -> Iterator[str]:
    """A name and those of the modules around it, from the innermost to the root, which is ""."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def look_up(where: Mapping[str, Value], name: str) -> Value | None:
    """What is said of a module or parameter: by the innermost name around it."""
    return next((where[around] for around in outer(name) if around in where), None)


def common(paths: list[str]) -> str:
    """The innermost module around all of these."""
    first, *others = paths
    return next(path for path in outer(first) if all(path in outer(other) for other in others))
