"""Containers that are made of BF16 files while a model is loaded.

They have no names: each file is deleted as soon as it is open, and its memory is given back when
nobody uses it any longer, also if the process is killed.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from . import _native

#: Where containers lie meanwhile: in memory, or with temporary files if that is too small.
PLACES = [Path("/dev/shm"), Path(tempfile.gettempdir())]
_SUFFIX = ".safetensors"
#: What to do with a checkpoint that cannot be compressed while it is loaded.
SAVE_AGAIN = "load it in BF16, save it with save_pretrained(FOLDER), and load FOLDER"


class Made:
    """The containers of a folder with BF16 weights, as `df11 compress` writes them.

    Made on all cores, 1 GB/s each, with some MiB of memory beside the containers themselves.
    """

    def __init__(self, folder: Path) -> None:
        """Compresses a folder.

        # Errors
        `OSError` if there is no room for the result; those of `df11.compress`.
        """
        self.folder = folder
        files = list(folder.rglob(f"*{_SUFFIX}"))
        place = _place(sum(path.stat().st_size for path in files))
        held = tempfile.TemporaryDirectory(prefix="df11-", dir=place)
        out = Path(held.name, "model")
        #: By the path of each container the open file.
        self._files: dict[str, BinaryIO] = {}
        weakref.finalize(self, _close, held, self._files)
        _native.compress(folder, out, verify=False)
        self.container: Any = _native.open(out)
        for shard in self.container.shards:
            path = Path(shard["path"])
            self._files[shard["path"]] = path.open("rb")
            path.unlink()

    def file(self, path: str) -> str:
        """Where a container can be read, as long as this is there."""
        return f"/proc/self/fd/{self._files[path].fileno()}"


#: Names, sizes and times of the files of a folder.
Stamp = tuple[tuple[str, int, int], ...]


def stamp(folder: Path) -> Stamp:
    """By which it is seen that weights files of a folder were changed."""
    found = sorted(folder.rglob(f"*{_SUFFIX}"))
    stats = ((path, path.stat()) for path in found)
    return tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats)


def again(folder: Path, identity: str | Stamp) -> Made:
    """Makes containers once more.

    # Errors
    `ValueError` if the folder, or the containers' identity, is not what it was.
    """
    made = None
    if isinstance(identity, str) or stamp(folder) == identity:
        made = Made(folder)
    if made is None or identity not in (made.container.identity, stamp(folder)):
        raise ValueError(
            f"{folder} holds other weights than when the model was loaded; load the model again"
        )
    return made


def folder_of(files: Sequence[str] | None) -> Path:
    """The folder of a checkpoint's weights files that can be compressed.

    # Errors
    `ValueError` for files that cannot, or in a process of several.
    """
    if not files:
        raise ValueError("df11 compresses the files of a checkpoint; name it in from_pretrained")
    first = Path(files[0])
    if first.suffix != _SUFFIX:
        raise ValueError(
            f"df11 compresses safetensors files, and the checkpoint is {first.name}; {SAVE_AGAIN}"
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _check_alone(first.parent)
    return first.parent


def made_of(files: Sequence[str] | None) -> Made:
    """Compresses the weights files of a checkpoint.

    # Errors
    Those of `folder_of` and `Made`; `ValueError` if a file is not compressed, such as that of a
    variant.
    """
    made = Made(folder_of(files))
    taken = {Path(name).name for name in made.container.weights_files}
    left = [Path(file).name for file in files or () if Path(file).name not in taken]
    if left:
        raise ValueError(
            f"df11 compresses the weights that load by default, and {left[0]} is not among them; "
            "run `df11 compress MODEL -o FOLDER --variant …` and load FOLDER"
        )
    return made


def _check_alone(folder: Path) -> None:
    if torch.distributed.get_world_size() > 1:
        raise ValueError(
            "several processes would each compress the whole model; run "
            f"`df11 compress {folder} -o FOLDER` once and load FOLDER"
        )


def _place(count: int) -> Path:
    """A folder with room for this many bytes."""
    found = next((place for place in PLACES if place.is_dir() and _free(place) > count), None)
    if found is None:
        where = " and ".join(map(str, PLACES))
        raise OSError(
            f"{where} have no room for {count:,} bytes, which is the most that compressed weights "
            "take while they are loaded; set TMPDIR to a folder that has"
        )
    return found


def _free(place: Path) -> int:
    return shutil.disk_usage(place).free


def _close(held: tempfile.TemporaryDirectory[str], files: dict[str, BinaryIO]) -> None:
    held.cleanup()
    for file in files.values():
        file.close()
