"""Converts decoded tensors to arrays of NumPy or PyTorch, which it imports only then; and converts
between Python objects and addresses of their memory.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import re
import warnings
from typing import TYPE_CHECKING, Any

from ._errors import unfit

if TYPE_CHECKING:
    import torch as pytorch

    from ._native import Slice, Tensor

# By the name in a container. If NumPy lacks a type, the second name is the one in ml_dtypes, and
# the first type holds the same bits.
NUMPY: dict[str, tuple[str, str | None]] = {
    "BOOL": ("bool", None),
    "F8_E5M2": ("uint8", "float8_e5m2"),
    "F8_E4M3": ("uint8", "float8_e4m3fn"),
    "F8_E8M0": ("uint8", "float8_e8m0fnu"),
    "F8_E4M3FNUZ": ("uint8", "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": ("uint8", "float8_e5m2fnuz"),
    "BF16": ("uint16", "bfloat16"),
    "C64": ("complex64", None),
    **{f"F{bits}": (f"float{bits}", None) for bits in (16, 32, 64)},
    **{f"I{bits}": (f"int{bits}", None) for bits in (8, 16, 32, 64)},
    **{f"U{bits}": (f"uint{bits}", None) for bits in (8, 16, 32, 64)},
}
#: PyTorch's types of two elements, by the container's dtype of one element.
_PAIRS = {"F4": "float4_e2m1fn_x2"}
#: Formats of buffers of numbers, as the struct module and NumPy (complex ones) write them. Not of
#: structures, whose fields may be addresses.
_NUMBERS = re.compile(r"[@=<>!]?(Z[fd]|[?cbBhHiIlLqQnNefd])")


def numpy(selection: Tensor | Slice) -> Any:
    import numpy as np

    names = NUMPY.get(selection.dtype)
    if names is None:
        raise unfit(f"NumPy has no type for {selection.dtype}", "decode its bytes with decode_into")
    array = np.empty(selection.shape, names[0])
    selection.decode_into(array)
    if names[1] is None:
        return array
    if (extended := getattr(_ml_dtypes(), names[1], None)) is not None:
        return array.view(extended)
    other = "numpy.asarray(tensor)" if selection.dtype == "BF16" else ".torch()"
    warnings.warn(
        f"these {names[0]} are the bits of {selection.dtype}, not its values: NumPy has no such "
        f"type without ml_dtypes; install it, or take {other}",
        stacklevel=2,
    )
    return array


def values(selection: Tensor | Slice, dtype: Any, copy: bool | None) -> Any:
    import numpy as np

    if copy is False:
        raise ValueError("a tensor is decoded into new memory; leave copy=False out")
    extended = NUMPY.get(selection.dtype, ("", None))[1]
    if extended is None or hasattr(_ml_dtypes(), extended):
        array = numpy(selection)
    elif selection.dtype == "BF16":
        bits = np.empty(selection.shape, np.uint16)
        selection.decode_into(bits)
        array = (bits.astype(np.uint32) << 16).view(np.float32)
    else:
        raise unfit(
            f"NumPy has no type for {selection.dtype} without ml_dtypes",
            "install it, or take .torch()",
        )
    return array if dtype is None else array.astype(dtype, copy=False)


@functools.cache
def _ml_dtypes() -> Any:
    """The package ml_dtypes, or None. Imported at most once: a failing import takes the lock of all
    imports, and a forked process may hang there if another thread was importing.
    """
    try:
        return importlib.import_module("ml_dtypes")
    except ImportError:
        return None


def torch(selection: Tensor | Slice) -> Any:
    library = importlib.import_module("torch")
    if selection.dtype in _PAIRS:
        return _pairs(selection, library)
    if selection.dtype.startswith("F6_"):
        raise unfit(f"PyTorch has no type for {selection.dtype}", "decode its bytes by decode_into")
    return library.from_dlpack(selection)


def _pairs(selection: Tensor | Slice, library: Any) -> Any:
    """A tensor of two-element types: half as long in its last dimension, as in safetensors."""
    *outer, last = selection.shape or (1,)
    kind = getattr(library, _PAIRS[selection.dtype], None)
    if kind is None or last % 2:
        problem = f"PyTorch has no type for {selection.dtype}"
        raise unfit(f"{problem} with {last} elements per row", "decode its bytes with decode_into")
    data = bytearray(selection.nbytes)
    selection.decode_into(data)
    raw = library.frombuffer(data, dtype=library.uint8) if data else library.empty(0)
    return raw.to(library.uint8).view(kind).view([*outer, last // 2])


def dtype_of(kind: str) -> pytorch.dtype | None:
    """PyTorch's dtype for a container's, as NumPy and ml_dtypes name it; None if it has none."""
    bits, extended = NUMPY.get(kind, ("", None))
    return getattr(importlib.import_module("torch"), extended or bits, None)


def known_dtype_of(name: str, kind: str) -> pytorch.dtype:
    """`dtype_of` for a named tensor. Raises `TypeError` if PyTorch has no such dtype."""
    if (known := dtype_of(kind)) is None:
        raise TypeError(f"tensor {name!r} has dtype {kind}, which PyTorch does not know")
    return known


def writable(buffer: Any) -> tuple[int, int, Any]:
    """The address of a buffer's first byte, its length in bytes, and an object that keeps the bytes
    in place while it lives. The native module gets these by ctypes, because the stable ABI of
    Python 3.10 lacks the buffer protocol.
    """
    try:
        view = memoryview(buffer)
    except TypeError as error:
        raise TypeError(
            f"{type(buffer).__name__} is no buffer; pass a bytearray, a NumPy array, or "
            "tensor.view(torch.uint8).numpy() of a tensor on the CPU"
        ) from error
    if view.readonly:
        raise unfit("the buffer is read-only", "pass a writable one")
    if not view.c_contiguous:
        raise unfit("the buffer is not contiguous", "pass a contiguous one")
    if not _NUMBERS.fullmatch(view.format):
        raise unfit(
            f"the buffer holds {view.format!r}, in which addresses would be overwritten",
            "pass one of numbers, as array.view(numpy.uint8)",
        )
    if view.nbytes == 0:
        return 0, 0, view
    memory = (ctypes.c_char * view.nbytes).from_buffer(view)
    return ctypes.addressof(memory), view.nbytes, memory


def memory_at(address: int, length: int, owner: Any) -> Any:
    """The bytes at an address, for PyTorch; they keep their owner alive. Nobody may write to them,
    though the buffer is writable: PyTorch has no read-only tensors and warns of read-only buffers.
    """
    memory = (ctypes.c_ubyte * length).from_address(address)
    memory._owner = owner  # type: ignore[attr-defined]
    return memory


def readable(address: int, length: int, owner: Any) -> memoryview:
    """The same bytes as `memory_at`, read-only."""
    return memoryview(memory_at(address, length, owner)).cast("B").toreadonly()
