"""Containers as dictionaries of PyTorch tensors; functions have the names of `safetensors.torch`.

from df11.torch import load_compressed, load_file, save_file

For loaders that handle weights themselves, `pack` compresses a weight on a GPU, and `Gathered`
brings a weight to a GPU at the speed of the bus.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path

import torch

from . import _native
from ._added import open_added
from ._container import Tensors
from ._encoding import matrix_for, pack_dense
from ._errors import unfit
from ._gathered import Gathered
from ._link import is_folder
from ._native import TemporaryFolder, compress
from ._report import Report
from ._safe import safe_open
from ._tensor import CompressedTensor

__all__ = ["CompressedTensor", "Gathered", "load_compressed", "load_file", "pack", "save_file"]


def load_file(
    filename: str | PathLike[str],
    device: str | int = "cpu",
    *,
    backend: str = "mmap",
    base: str | PathLike[str] | None = None,
) -> dict[str, torch.Tensor]:
    """All tensors of a container, or of a folder of them, decoded, by name.

    They take the memory of the BF16 model. To keep weights compressed use `from_pretrained`,
    `df11.attach` or `load_compressed`. `base` is that of `df11.open`. Raises the errors of
    `safe_open`, and `CorruptError` if the container is damaged.
    """
    file = safe_open(filename, framework="pt", device=device, backend=backend, base=base)
    with file:
        tensors: dict[str, torch.Tensor] = file.get_tensors()
        return tensors


def load_compressed(filename: str | PathLike[str]) -> dict[str, torch.Tensor]:
    """All tensors of a container, or of a folder of them, by name; matrices stay compressed.

    Matrices are read-only `CompressedTensor`s in the mapping of the file, which take no memory;
    other tensors are decoded. `module.load_state_dict(..., assign=True)` puts them into a module,
    and `module.to("cuda")` then moves compressed bytes. Reads and checks the whole container once.
    Includes the tensors of a local folder's `df11.safetensors`. Raises `CorruptError` if a file is
    damaged, `TypeError` for a dtype that PyTorch lacks, and the errors of `safe_open`.
    """
    container = _native.open(filename, in_memory=True)
    if is_folder(filename):
        container.check_complete()
    added = open_added(filename, container, "pt", "cpu")
    tensors = Tensors(container)
    result: dict[str, torch.Tensor] = {name: tensors[name] for name in tensors}
    tensors.check(name for name, value in result.items() if isinstance(value, CompressedTensor))
    more = [] if added is None else added.keys()
    return result | {name: added.get_tensor(name) for name in more}


def save_file(
    tensors: dict[str, torch.Tensor],
    filename: str | PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = False,
) -> Report:
    """Compress tensors into one container, whose name ends in `.df11`.

    The tensors are first written as a safetensors file beside the container, which temporarily
    takes their size on the disk. At the end the container is decoded and compared. `metadata` goes
    into that safetensors file, which `df11 decompress` restores. Needs the package `safetensors`,
    and raises the errors of its `save_file`: `RuntimeError` for tensors that share memory,
    `ValueError` for non-contiguous ones. Raises `ParameterError` if the name has another ending, or
    exists and `overwrite` is not given.
    """
    from safetensors.torch import save_file as save

    out = Path(filename)
    if out.suffix != ".df11":
        raise unfit(f"{out} does not end in .df11", "end its name in .df11")
    if out.exists() and not overwrite:
        raise unfit(f"{out} exists", "choose another output, or replace it with overwrite=True")
    with TemporaryFolder(out.parent) as folder:
        source = folder / f"{out.stem}.safetensors"
        save(tensors, source, metadata=None if metadata is None else dict(metadata))
        return compress(source, out, overwrite=overwrite, progress=False)


def pack(value: torch.Tensor) -> CompressedTensor | None:
    """Compresses a BF16 tensor on a GPU into the fast layout there, which takes 0.75 to 0.77 of its
    bytes.

    Waits for the GPU. Takes the result's memory, and meanwhile memory for one exception per 256
    weights. The result cannot be moved to the host. Returns None if the layout is impossible:
    another dtype or device, less than 32 KiB, rows of fewer than 128 weights or no multiple of 8 (a
    row is the last dimension, or all after the first one), too many exceptions, or no bytes saved.
    Raises PyTorch's `OutOfMemoryError`, and `GpuError`.
    """
    matrix = matrix_for(value) if value.is_cuda else None
    packed = None if matrix is None else pack_dense(value.device, matrix.contiguous())
    if packed is None or sum(array.nbytes for array in packed[0]) >= value.nbytes:
        return None
    return CompressedTensor(*packed, value.shape)
