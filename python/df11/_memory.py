"""Memory of Python objects as an address, and the other way round."""

from __future__ import annotations

import ctypes
import re
from typing import Any

from ._errors import unfit

#: Of formats of the struct module: Python's objects and pointers.
_POINTERS = frozenset("O&P")


def writable(buffer: Any) -> tuple[int, int, Any]:
    """The address of a buffer's first byte, its bytes, and what keeps them in place while it lives.

    The buffer protocol is no part of Python 3.10's stable ABI, so that the native module asks
    ctypes.
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
    # Names of fields are between colons.
    if set(re.sub(r":[^:]*:", "", view.format)) & _POINTERS:
        raise unfit(
            "the buffer holds objects, whose addresses would be overwritten", "pass one of numbers"
        )
    if view.nbytes == 0:
        return 0, 0, view
    memory = (ctypes.c_char * view.nbytes).from_buffer(view)
    return ctypes.addressof(memory), view.nbytes, memory


def memory_at(address: int, length: int, owner: Any) -> Any:
    """The bytes at an address, which keep their owner while they are used, for PyTorch.

    It has no read-only tensors, and warns of read-only buffers. Nobody may write to them.
    """
    memory = (ctypes.c_ubyte * length).from_address(address)
    memory._owner = owner  # type: ignore[attr-defined]
    return memory


def readable(address: int, length: int, owner: Any) -> memoryview:
    """As `memory_at`, for reading; its `obj` is what that gives."""
    return memoryview(memory_at(address, length, owner)).cast("B").toreadonly()
