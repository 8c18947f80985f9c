"""The exceptions. Each says who can fix the problem and, if known, how."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ._native import printable


class Error(Exception):
    """Base of all exceptions of this package. `remedy` says what to do, if that is known."""

    remedy: str | None = None

    def __str__(self) -> str:
        return printable(super().__str__())


class IoError(Error, OSError):
    """The operating system refused to read or write. `errno` is its error number, if any."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class UnsupportedError(Error):
    """The data is well-formed, but needs a newer version of df11."""


class NoBaseError(Error):
    """A tensor is stored as its differences from a tensor of another model, the base, which is
    missing. Name the base with `base=` of `df11.open`.
    """


class CorruptError(Error, ValueError):
    """The bytes break a rule of their format: the file is damaged, cut, or was never valid."""

    #: The file, section or array with the problem, and the offset in it, in bytes.
    place: str = ""
    offset: int = 0


class LimitError(Error, ValueError):
    """A limit of the format is exceeded."""


class ParameterError(Error, ValueError):
    """The caller asked for something impossible."""


class GpuError(Error, RuntimeError):
    """The GPU or its driver failed, or there is none."""


def unfit(problem: str, remedy: str) -> ParameterError:
    """The error of a request, with a remedy."""
    error = ParameterError(f"{problem}; {remedy}")
    error.remedy = remedy
    return error


def damaged(file: Path, problem: str, remedy: str) -> CorruptError:
    """The error of a file whose reader does not name it."""
    error = CorruptError(f"{file}: {problem}; {remedy}")
    error.place, error.remedy = str(file), remedy
    return error


def misshapen(name: str, shape: Iterable[int], found: Iterable[int], where: str) -> ValueError:
    return ValueError(
        f"{printable(name)} has shape {tuple(shape)}, and {tuple(found)} in {where}; use the "
        "config that belongs to the container"
    )
