"""Tensors of a container as PyTorch tensors on the CPU, and what both call a dtype."""

from __future__ import annotations

from typing import Any

import torch

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}


def dtype_of(tensor: Any) -> torch.dtype | None:
    """The dtype of a tensor of a container; None where PyTorch has none such."""
    return DTYPES.get(tensor.dtype)


def as_buffer(memory: torch.Tensor) -> memoryview:
    """The bytes of a one-dimensional uint8 tensor on the CPU."""
    return memoryview(memory.numpy())  # type: ignore[arg-type]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a view of one dimension."""
    return tensor.reshape(-1).view(torch.uint8)


def decoded(tensor: Any) -> torch.Tensor:
    """A tensor of a container, decoded by the CPU into memory of its own."""
    dtype = dtype_of(tensor)
    if dtype is None:
        raise TypeError(
            f"tensor {tensor.name!r} has dtype {tensor.dtype}, which PyTorch does not know"
        )
    out = torch.empty(tuple(tensor.shape), dtype=dtype)
    if out.numel():
        tensor.decode_into(as_buffer(bytes_of(out)))
    return out


def raw_stream(index: int) -> int:
    """PyTorch's current stream of a GPU, as CUDA's handle."""
    return int(torch._C._cuda_getCurrentRawStream(index))


def show_bytes(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
