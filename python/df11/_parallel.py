"""Tensor parallelism: parameters that are sharded over several processes (DTensor).

transformers makes a DTensor of each parameter in its plan before weights are loaded, and its loader
cuts what each process holds out of the checkpoint's tensors: of compressed ones this gives windows.
Hooks of its own on modules compute with the shards, so with the same bits as with BF16 shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def prepare(model: nn.Module) -> None:
    """Refuses what is not supported, and has the input embedding sharded as other weights are.

    Plans of some releases leave it whole on each process. A look-up gives the same values if it is
    sharded by rows: all processes except one add zeros.

    # Errors
    `ValueError` if the model shall be distributed in another way.
    """
    told = getattr(model.config, "distributed_config", None)
    if told is None:
        return
    sizes = {
        name: getattr(told, name, None) or 1
        for name in ("fsdp_size", "pp_size", "dp_replicate_size")
    }
    if wrong := [name for name, size in sizes.items() if size > 1]:
        raise ValueError(
            f"compressed weights are distributed by tensor and expert parallelism, and not by "
            f"{' and '.join(wrong)}; leave it out of distributed_config"
        )
    plan = getattr(model, "tp_plan", None)
    if not plan or (getattr(told, "tp_size", None) or 1) == 1:
        return
    try:
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    except NotImplementedError:
        return
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name, module in model.named_modules():
        is_it = module is embedding and type(module) is nn.Embedding
        if is_it and f"{name}.weight" not in {*tied, *tied.values()}:
            plan.setdefault(name, "embedding_rowwise")


# ---- DTensors ----


def is_sharded(value: Any) -> bool:
    """Whether a parameter is a DTensor."""
    if not _is_distributed():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def local(value: torch.Tensor) -> torch.Tensor:
    """What this process holds of a parameter: itself, or its shard."""
    return value._local_tensor if is_sharded(value) else value  # type: ignore[attr-defined]


def like(value: torch.Tensor, other: Any) -> torch.Tensor:
    """A shard as the DTensor that another one is, or as it is if that is none."""
    if not is_sharded(other):
        return value
    from torch.distributed.tensor import DTensor

    shape, strides = other.shape, other.stride()
    mesh, placements = other.device_mesh, other.placements
    return DTensor.from_local(
        value, mesh, placements, run_check=False, shape=shape, stride=tuple(strides)
    )


def gathered(value: torch.Tensor) -> torch.Tensor:
    """A parameter as a whole. Of a DTensor: decoded, and all processes must ask for it at once."""
    return value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]


def is_first() -> bool:
    """Whether this is the process that writes files."""
    return not _is_distributed() or torch.distributed.get_rank() == 0


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
