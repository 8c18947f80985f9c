"""Tensors of a container as PyTorch tensors on the CPU, and what both call a dtype."""

from __future__ import annotations

import torch

from ._arrays import NUMPY


def dtype_of(kind: str) -> torch.dtype | None:
    """What PyTorch calls a dtype of a container; None if it has none such."""
    # PyTorch calls types as NumPy and ml_dtypes do.
    bits, extended = NUMPY.get(kind, ("", None))
    return getattr(torch, extended or bits, None)


def known_dtype_of(name: str, kind: str) -> torch.dtype:
    """As `dtype_of`, of the tensor with this name.

    # Errors
    `TypeError` if PyTorch has none such.
    """
    if (found := dtype_of(kind)) is None:
        raise TypeError(f"tensor {name!r} has dtype {kind}, which PyTorch does not know")
    return found


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a view of one dimension."""
    return tensor.reshape(-1).view(torch.uint8)


def raw_stream(index: int) -> int:
    """PyTorch's current stream of a GPU, as CUDA's handle."""
    return int(torch._C._cuda_getCurrentRawStream(index))
