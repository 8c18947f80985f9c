"""Keeps orders of products on disk, so that each is measured only once on a machine.

There is one JSON file for each combination of GPU, libraries and environment, named by a hash of
the combination. A file of another combination, or an unreadable one, is ignored and replaced with
the next order. Files are replaced as a whole, by renaming. Processes that write at the same time
may lose each other's orders, which are then measured again.

`DF11_ORDER_CACHE` is the folder; "off" keeps nothing on disk. By default it is `df11` in
`$XDG_CACHE_HOME`, or in `~/.cache`.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from . import _native
from ._platform import loaded_library

#: Increased when the meaning of entries changes.
FORMAT = 1
#: The most entries of a file (about 150 bytes each), and the most files; the oldest are removed.
_MAX_ENTRIES, _MAX_FILES = 1 << 13, 32
_MAX_BYTES = 8 << 20
_MAX_SPLITS = 1 << 10
#: Variables by which cuBLAS and PyTorch choose other products.
_PREFIXES = ("CUBLAS", "TORCH_CUBLAS", "TORCH_BLAS", "DISABLE_ADDMM", "CUDA_MPS", "PYTORCH_TUNABLE")


class OrderCache:
    def __init__(self, folder: Path | None, about: Mapping[str, Any]) -> None:
        """Reads a folder's file for the combination `about`, in JSON values. None: no folder."""
        self.about = {"format": FORMAT, **about}
        text = json.dumps(self.about, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.file = None if folder is None else folder / f"orders-{name}.json"
        self._entries = self._read()

    @classmethod
    def of_gpu(cls, index: int) -> OrderCache:
        """Opens the orders of a GPU. Uses no disk if versions of libraries are unknown."""
        about = _about(index)
        known = all(about[name] is not None for name in ("cublas", "cublasLt"))
        return cls(_folder() if known else None, about)

    def get(self, case: Sequence[Any]) -> tuple[int, bool] | None:
        """The splits of a case (0 if its order is not known), and whether its bias is apart."""
        return self._entries.get(json.dumps(case))

    def add(self, measured: Mapping[Any, tuple[int, bool]]) -> None:
        """Keeps orders of cases, also on disk if the disk is writable."""
        added = {
            json.dumps(case): (int(splits), apart) for case, (splits, apart) in measured.items()
        }
        held = self._read() or self._entries
        kept = {case: order for case, order in held.items() if case not in added} | added
        self._entries = dict(list(kept.items())[-_MAX_ENTRIES:])
        if self.file is None:
            return
        with suppress(OSError):
            _replace(self.file, json.dumps({"about": self.about, "orders": self._entries}))
            _bound(self.file.parent)

    def _read(self) -> dict[str, tuple[int, bool]]:
        try:
            # A pipe or a device might have no end.
            if self.file is None or not self.file.is_file():
                return {}
            if self.file.stat().st_size > _MAX_BYTES:
                return {}
            held = json.loads(self.file.read_bytes())
            if held["about"] != json.loads(json.dumps(self.about)):
                return {}
            orders = held["orders"].items()
            return {case: order for case, each in orders if (order := _order(each)) is not None}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return {}


def _order(value: Any) -> tuple[int, bool] | None:
    splits, apart = value
    if type(splits) is not int or type(apart) is not bool or not 0 <= splits <= _MAX_SPLITS:
        return None
    return splits, apart


def _replace(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, made = tempfile.mkstemp(dir=file.parent, prefix=".orders-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as out:
            out.write(text)
        Path(made).replace(file)
    except BaseException:
        Path(made).unlink(missing_ok=True)
        raise


def _bound(folder: Path) -> None:
    files = sorted(folder.glob("orders-*.json"), key=lambda file: file.stat().st_mtime)
    for file in files[:-_MAX_FILES]:
        file.unlink(missing_ok=True)


def _folder() -> Path | None:
    named = os.environ.get("DF11_ORDER_CACHE")
    if named:
        return None if named == "off" else Path(named)
    with suppress(RuntimeError):  # nobody has a home
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "df11"
    return None


def _about(index: int) -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties(index)
    drivers = {one["ordinal"]: one["driver"] for one in _native.devices()}
    variables = {name: os.environ[name] for name in sorted(os.environ) if _affects_products(name)}
    kernels = Path(_native.__file__).stat()
    return {
        "df11": [_native.__version__, kernels.st_size, kernels.st_mtime_ns],
        "gpu": [gpu.name, gpu.major, gpu.minor, gpu.multi_processor_count],
        "driver": sorted({f"{major}.{minor}" for major, minor in drivers.values()}),
        "torch": [torch.__version__, torch.version.cuda],
        "cublas": _version("cublas"),
        "cublasLt": _version("cublasLt"),
        "environment": variables,
    }


def _affects_products(name: str) -> bool:
    return name.startswith(_PREFIXES)


def _version(library: str) -> list[int] | None:
    """Major, minor and patch version of a library that this process has loaded, and the size of its
    file; None if the process has not loaded it.
    """
    with suppress(OSError, AttributeError):
        path = loaded_library(library)
        if path is None:
            return None
        read = getattr(ctypes.CDLL(str(path)), f"{library}GetProperty")
        values = [ctypes.c_int() for _ in range(3)]
        known = [read(at, ctypes.byref(value)) for at, value in enumerate(values)]
        if not any(known):
            return [*(value.value for value in values), path.stat().st_size]
    return None
