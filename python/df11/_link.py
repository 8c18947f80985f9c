"""Local folders that stand for folders in stores: side files are here, and containers stay there.

Loaders of other libraries expect files such as config and tokenizer. A linked folder has them,
lasts as long as the process, and is recognised by its path.
"""

from __future__ import annotations

import atexit
import os
import re
import tempfile
import threading
from pathlib import Path
from typing import Any

from . import _native
from ._errors import unfit

#: Weights file that a config names, with parameters that the containers lack, such as a new head.
#: Usually it does not exist.
WEIGHTS = "df11.safetensors"
#: Names that `df11.open` finds in object stores, behind HTTP and on the Hub.
_FAR = re.compile(r"(s3|gs|az|https?|hf)://", re.IGNORECASE)

#: Linked folders of this process, by name; and names by folder.
_folders: dict[str, Path] = {}
_names: dict[Path, str] = {}
_lock = threading.Lock()


def is_far(path: str | os.PathLike[str]) -> bool:
    """Whether it is a remote name, such as `s3://bucket/model`, and not a path."""
    return _FAR.match(os.fspath(path)) is not None


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether it is the path or the name of a folder of containers."""
    if is_far(path):
        return not re.search(r"\.df11$|\?", os.fspath(path))
    return Path(path).is_dir()


def shown(name: str) -> str:
    """A remote name without what only its owner may see: user, password and query."""
    if not re.match("https?:", name, re.IGNORECASE):
        return name
    return re.sub("//.*@", "//", re.split("[?#]", name)[0], flags=re.DOTALL)


def link(name: str) -> Path:
    """A local folder that stands for a folder of containers in a store, such as
    "s3://bucket/model-df11". `from_pretrained` of transformers and diffusers takes it.

    The folder has the side files that the containers record, such as config and tokenizer. Weights
    are fetched when they are loaded. Until the process ends, which removes the folder, the same
    name gives the same folder and side files.

    Raises `ParameterError` for any other name, and the errors of `df11.open`.
    """
    if not is_far(name):
        raise unfit(f"{name} is no name of a store", "write it as s3://bucket/folder")
    name = name.rstrip("/")
    with _lock:
        if name not in _folders:
            place = _native.TemporaryFolder(Path(tempfile.gettempdir()))
            folder = place.__enter__()
            try:
                _native.fetch_side_files(name, folder, [WEIGHTS])
            except BaseException:
                place.__exit__(None, None, None)
                raise
            atexit.register(place.__exit__, None, None, None)
            remember(folder, name)
        return _folders[name]


def remember(folder: Path, name: str) -> None:
    """Records a linked folder, which another process may have made."""
    _folders[name], _names[folder] = folder, name


def is_linked(folder: Path) -> bool:
    return not _names.keys().isdisjoint((folder, *folder.parents))


def open_folder(folder: Path) -> Any:
    """Opens the containers of a folder, which may be linked, or inside a linked one. Raises the
    errors of `df11.open`, and `ParameterError` if containers are missing or belong to another
    model.
    """
    root = next((each for each in (folder, *folder.parents) if each in _names), None)
    if root is None:
        model = _native.open(folder, in_memory=True)
    else:
        inner = folder.relative_to(root).as_posix()
        name = _names[root] if folder == root else f"{_names[root]}/{inner}"
        model = _native.open(name, in_memory=True)
    model.check_complete()
    return model
