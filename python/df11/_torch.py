"""Tensors of a container as PyTorch tensors on the CPU, and what both call a dtype."""

from __future__ import annotations

from typing import Any

import torch

from ._arrays import NUMPY


def dtype_of(tensor: Any) -> torch.dtype | None:
    """The dtype of a tensor of a container; None if PyTorch has none such."""
    # PyTorch calls types as NumPy and ml_dtypes do.
    bits, extended = NUMPY.get(tensor.dtype, ("", None))
    return getattr(torch, extended or bits, None)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a view of one dimension."""
    return tensor.reshape(-1).view(torch.uint8)


def raw_stream(index: int) -> int:
    """PyTorch's current stream of a GPU, as CUDA's handle."""
    return int(torch._C._cuda_getCurrentRawStream(index))
