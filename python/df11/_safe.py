"""`df11.safe_open`: opens containers with the interface of `safetensors.safe_open`."""

from __future__ import annotations

import json
from os import PathLike
from typing import Any

from ._added import open_added
from ._errors import unfit
from ._link import is_folder
from ._native import Model, Tensor, open

#: Names of safetensors for backends, and for the supported frameworks.
_BACKENDS = ("mmap", "pread")
_TORCH, _NUMPY = ("pt", "torch", "pytorch"), ("np", "numpy")


class safe_open:
    """Open a container, or a folder of them, as `safetensors.safe_open` opens a file.

    `framework` is `"pt"` (PyTorch) or `"np"` (NumPy); `device` is where PyTorch's tensors go, a
    name or a GPU's number; `backend`, `"mmap"` or `"pread"`, says how the container is read.
    Opening reads directories only. Each tensor is decoded on request, on all cores, into memory
    that the caller owns. `base` is that of `df11.open`. F4 has PyTorch's type of two elements, and
    half the length in the last dimension. A local folder also gives the tensors of
    `df11.safetensors`, which its containers lack; safetensors reads them.

    Raises `ParameterError` for another framework or backend, and for a folder that lacks shards,
    which it names; `ValueError` if `df11.safetensors` has a tensor of the containers; and the
    errors of `df11.open`. A file can be opened alone, also if it is one of several shards.
    """

    def __init__(
        self,
        filename: str | PathLike[str],
        framework: str,
        device: str | int = "cpu",
        *,
        backend: str = "mmap",
        base: str | PathLike[str] | None = None,
    ) -> None:
        if framework not in (*_TORCH, *_NUMPY):
            raise unfit(f"framework {framework!r} is not known", 'choose "pt" or "np"')
        self._is_numpy, self._device = framework in _NUMPY, device
        if self._is_numpy and device != "cpu":
            raise unfit("NumPy has no devices", 'leave device out, or choose framework="pt"')
        if backend not in _BACKENDS:
            known = " or ".join(f'"{name}"' for name in _BACKENDS)
            raise unfit(f"backend {backend!r} is not known", f"choose {known}")
        mapped = None if backend == "mmap" else False
        self._model: Model | None = open(filename, memory_map=mapped, base=base)
        if is_folder(filename):
            self._model.check_complete()
        self._added = open_added(filename, self._model, framework, device)
        self._names = set(self._added.keys() if self._added else ())

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, *_: object) -> None:
        self._model = self._added = None

    def keys(self) -> list[str]:
        """The names of all tensors, ascending."""
        return sorted({*self._open(), *self._names})

    def offset_keys(self) -> list[str]:
        """The names in the order of the tensors in the original files, then those of
        `df11.safetensors`.
        """
        names: list[str] = []
        for header in self._headers():
            header.pop("__metadata__", None)
            names += sorted(header, key=lambda name: header[name]["data_offsets"])
        return names + sorted(self._names)

    def metadata(self) -> dict[str, str] | None:
        """The `__metadata__` of the original file; None if it has none. If there are several files,
        it has the entries of all. Raises `ParameterError` if they give one key different values.
        """
        merged: dict[str, str] | None = None
        for header in self._headers():
            for key, value in header.get("__metadata__", {}).items():
                merged = {} if merged is None else merged
                if merged.setdefault(key, value) != value:
                    raise unfit(
                        f"the original files give the key {key!r} different values",
                        "Model.weights_header gives that of each file",
                    )
        return merged

    def get_tensor(self, name: str) -> Any:
        """A decoded tensor of the framework, on the device. Raises `KeyError`."""
        model = self._open()
        return self._added.get_tensor(name) if name in self._names else self._converted(model[name])

    def get_tensors(self) -> dict[str, Any]:
        """All tensors by name, decoded one after the other."""
        names = self.keys()
        _ahead = self._open().read_ahead([name for name in names if name not in self._names])
        return {name: self.get_tensor(name) for name in names}

    def get_slice(self, name: str) -> Any:
        """A tensor that decodes only the indexed part. Raises `KeyError`."""
        model = self._open()
        return self._added.get_slice(name) if name in self._names else Sliced(self, model[name])

    def _open(self) -> Model:
        if self._model is None:
            raise unfit("the container is closed", "open it again, or stay within the with")
        return self._model

    def _headers(self) -> list[dict[str, Any]]:
        model = self._open()
        return [json.loads(model.weights_header(path)) for path in model.weights_files]

    def _converted(self, tensor: Any) -> Any:
        """Makes the framework's tensor of a tensor or a slice."""
        if self._is_numpy:
            return tensor.numpy()
        made = tensor.torch()
        return made if self._device == "cpu" else made.to(self._device)


class Sliced:
    """A tensor that is decoded by indexing. From `safe_open.get_slice`."""

    def __init__(self, file: safe_open, tensor: Tensor) -> None:
        self._file, self._tensor = file, tensor

    def get_shape(self) -> list[int]:
        """Its dimensions, outermost first."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Its dtype as safetensors names it, such as `BF16`."""
        return self._tensor.dtype

    def __getitem__(self, key: Any) -> Any:
        """Decode a part. For numbers and slices with steps of 1, decodes only the tiles that hold
        it. For any other index, decodes the whole tensor, which the framework indexes. Raises
        `IndexError` like the framework.
        """
        self._file._open()
        indices = key if isinstance(key, tuple) else (key,)
        is_plain = all(
            index.step in (None, 1) if isinstance(index, slice) else type(index) is int
            for index in indices
        )
        if self._tensor.dtype == "F4" and not is_plain:
            raise unfit("such an index would split pairs of F4", "use numbers and plain slices")
        if not self._tensor.shape or not is_plain:
            return self._file._converted(self._tensor)[key]
        return self._file._converted(self._tensor[key])
