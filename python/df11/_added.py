"""Weights beside the containers of a folder, which these lack, such as a new head: a file of
safetensors with a fixed name, which `save_pretrained` writes.
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
    """Whether the file exists. Raises `ParameterError` for anything but a regular file: opening a
    pipe would wait, and a device has no end.
    """
    if os.path.lexists(file) and not file.is_file():
        raise unfit(f"{file} is not a regular file", "remove it, or put the file itself there")
    return file.is_file()


@contextmanager
def _naming(beside: Path) -> Iterator[None]:
    """Turns errors of safetensors, which name no file, into a `CorruptError` that names it."""
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
    """The tensors of the file, on the CPU; none if it does not exist. `names`: tensors of the
    containers. Raises `ParameterError` if it is no regular file, `CorruptError` if it is damaged,
    `ValueError` if it has one of these tensors.
    """
    from safetensors.torch import load_file

    if not _is_there(beside):
        return {}
    with _naming(beside):
        others: dict[str, Tensor] = load_file(beside)
    if doubled := next((name for name in others if name in names), None):
        raise in_both(beside, doubled)
    return others


def open_added(
    source: str | os.PathLike[str], names: Container[str], framework: str, device: str | int
) -> Any:
    """Opens the file of a local folder with safetensors; None if there is none. `names`: tensors of
    the containers. Raises `ParameterError` if it is no regular file, `CorruptError` if it is
    damaged, `ValueError` if it has one of these tensors.
    """
    path = Path(source, WEIGHTS)
    if is_far(source) or not Path(source).is_dir() or not _is_there(path):
        return None
    from safetensors import safe_open

    with _naming(path):
        file: Any = safe_open(path, framework, device)
    if doubled := next((name for name in file.keys() if name in names), None):  # noqa: SIM118
        raise in_both(path, doubled)
    return file
