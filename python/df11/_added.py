"""Weights that a folder's containers lack, such as a new head. `save_pretrained` writes them to a
safetensors file with a fixed name beside the containers.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._errors import damaged, unfit
from ._link import WEIGHTS, is_far

if TYPE_CHECKING:
    from torch import Tensor


def _is_there(file: Path) -> bool:
    """Whether the file exists. Raises `ParameterError` for anything except a regular file: opening
    a pipe would block, and reading a device would not end.
    """
    if os.path.lexists(file) and not file.is_file():
        raise unfit(f"{file} is not a regular file", "remove it, or put the file itself there")
    return file.is_file()


@contextmanager
def _naming(beside: Path) -> Iterator[None]:
    """Turns errors of safetensors, which do not name the file, into a `CorruptError` that does."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        remedy = "remove the file, or save the model again with save_pretrained"
        raise damaged(beside, str(error), remedy) from error


def in_both(beside: Path | None, name: str) -> ValueError:
    return ValueError(
        f"{beside} has {name}, which the containers hold too; it may hold only what they lack: "
        "remove the file, or save the model again with save_pretrained"
    )


def load_beside(beside: Path, names: Container[str]) -> dict[str, Tensor]:
    """The tensors of the file, on the CPU; none if it does not exist. Raises the errors of
    `open_added`.
    """
    file = _open(beside, names, "pt", "cpu")
    return {} if file is None else {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def open_added(
    source: str | os.PathLike[str], names: Container[str], framework: str, device: str | int
) -> Any:
    """Opens the file of a local folder with safetensors; None if there is none. `names`: tensors of
    the containers. Raises `ParameterError` if it is no regular file, `CorruptError` if it is
    damaged, `ValueError` if it has one of these tensors.
    """
    if is_far(source) or not Path(source).is_dir():
        return None
    return _open(Path(source, WEIGHTS), names, framework, device)


def _open(beside: Path, names: Container[str], framework: str, device: str | int) -> Any:
    if not _is_there(beside):
        return None
    from safetensors import safe_open

    with _naming(beside):
        file: Any = safe_open(beside, framework, device)
    if doubled := next((name for name in file.keys() if name in names), None):  # noqa: SIM118
        raise in_both(beside, doubled)
    return file
