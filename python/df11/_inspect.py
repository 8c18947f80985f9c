"""What is in a container, as a dictionary."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from os import PathLike
from typing import Any

from ._native import Model, Tensor, open


def inspect(path: str | PathLike[str] | Model, *, tensors: bool = True) -> dict[str, Any]:
    """Tell what a container, or a folder of shards, holds.

    The keys are those of `df11 inspect --json`: `identity`, `complete`, `shards`,
    `container_bytes`, `total`, and `blocks`, each with its `tensors` unless these are not wanted.
    Sizes are bytes. Weights are not read, so that there is no entropy; the cost grows with the
    number of tensors.

    Raises what `df11.open` raises.
    """
    model = path if isinstance(path, Model) else open(path)
    blocks = []
    for block in model.blocks:
        told: dict[str, Any] = {
            "name": block.name,
            "tensor_count": len(block.tensors),
            **_sum(block.tensors),
        }
        if tensors:
            told["tensors"] = [_tensor(tensor) for tensor in block.tensors]
        blocks.append(told)
    return {
        "source": model.path,
        "identity": model.identity,
        "complete": model.is_complete,
        "shards": model.shards,
        "weights_files": len(model.weights_files),
        "side_files": len(model.side_files),
        "container_bytes": model.stored_bytes,
        "tensor_count": len(model),
        "total": _sum(model.tensors.values()),
        "blocks": blocks,
    }


def _tensor(tensor: Tensor) -> dict[str, Any]:
    alias = tensor.target != tensor.name
    told = {
        **_sum([tensor]),
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "encoding": "alias" if alias else tensor.encoding,
        "hash": tensor.hash,
    }
    return told | {"target": tensor.target} if alias else told


def _sum(tensors: Iterable[Tensor]) -> dict[str, Any]:
    """Aliases count as elements; their stored bytes are those of another tensor."""
    elements = decoded = stored = weights = weight_bytes = 0
    for tensor in tensors:
        count = prod(tensor.shape)
        elements += count
        decoded += tensor.nbytes
        stored += tensor.stored_bytes
        if tensor.dtype == "BF16" and tensor.target == tensor.name:
            weights += count
            weight_bytes += tensor.stored_bytes
    return {
        "elements": elements,
        "decoded_bytes": decoded,
        "stored_bytes": stored,
        "weights": weights,
        "bits_per_weight": 8 * weight_bytes / weights if weights else None,
    }
