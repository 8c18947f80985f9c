"""Decoded tensors as arrays of NumPy and PyTorch; neither is needed before."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from ._errors import unfit

if TYPE_CHECKING:
    from ._native import Slice, Tensor

# By the name in a container; the second name is that of ml_dtypes, if NumPy has no such type,
# and the first one holds its bits.
NUMPY = {
    "BOOL": ("bool", None),
    "U8": ("uint8", None),
    "I8": ("int8", None),
    "F8_E5M2": ("uint8", "float8_e5m2"),
    "F8_E4M3": ("uint8", "float8_e4m3fn"),
    "F8_E8M0": ("uint8", "float8_e8m0fnu"),
    "F8_E4M3FNUZ": ("uint8", "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": ("uint8", "float8_e5m2fnuz"),
    "I16": ("int16", None),
    "U16": ("uint16", None),
    "F16": ("float16", None),
    "BF16": ("uint16", "bfloat16"),
    "I32": ("int32", None),
    "U32": ("uint32", None),
    "F32": ("float32", None),
    "C64": ("complex64", None),
    "F64": ("float64", None),
    "I64": ("int64", None),
    "U64": ("uint64", None),
}


def numpy(selection: Tensor | Slice) -> Any:
    """A new array."""
    import numpy as np

    names = NUMPY.get(selection.dtype)
    if names is None:
        raise unfit(f"NumPy has no type for {selection.dtype}", "decode its bytes with decode_into")
    array = np.empty(selection.shape, names[0])
    selection.decode_into(array)
    extended = getattr(_ml_dtypes(), names[1], None) if names[1] else None
    return array if extended is None else array.view(extended)


@functools.cache
def _ml_dtypes() -> Any:
    """The package, or None. Looked for once: each failing import takes the lock of all imports, at
    which forks of a process whose other threads import may hang.
    """
    try:
        return importlib.import_module("ml_dtypes")
    except ImportError:
        return None


def torch(selection: Tensor | Slice) -> Any:
    """A new tensor on the CPU."""
    return importlib.import_module("torch").from_dlpack(selection)
