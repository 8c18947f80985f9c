"""Parameters and buffers of modules: names, places, and shards of several processes.

For tensor parallelism, transformers turns each parameter of its plan into a DTensor before it loads
weights. Its loader cuts each process's share out of the checkpoint's tensors; shares of compressed
tensors are windows. The hooks of transformers compute with the shards, and give the same bits as
with BF16 shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

Value = TypeVar("Value")


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def outer(name: str) -> Iterator[str]:
    """A name, and the names of its enclosing modules from the innermost to the root, ""."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def look_up(where: Mapping[str, Value], name: str) -> Value | None:
    return next((where[path] for path in outer(name) if path in where), None)


def common(paths: list[str]) -> str:
    first, *others = paths
    return next(path for path in outer(first) if all(path in outer(other) for other in others))


class Spot:
    """The place of a parameter or buffer in its module, also if something wraps the module later. A
    spot does not keep the module alive; a copy of a model has its own spots.
    """

    def __init__(self, module: nn.Module | None, path: str, attribute: str) -> None:
        self._held = None if module is None else weakref.ref(module)
        self.path, self.attribute = path, attribute

    @property
    def module(self) -> Any:
        return None if self._held is None else self._held()

    def __reduce__(self) -> tuple[Any, ...]:
        return Spot, (self.module, self.path, self.attribute)

    @property
    def name(self) -> str:
        return join(self.path, self.attribute)

    @property
    def key(self) -> tuple[int, str]:
        return id(self.module), self.attribute

    @property
    def is_buffer(self) -> bool:
        return self.attribute in getattr(self.module, "_buffers", ())

    @property
    def value(self) -> Tensor | None:
        module = self.module
        if module is None:
            return None
        current = module._buffers.get(self.attribute, module._parameters.get(self.attribute))
        return cast("Tensor | None", current)

    @value.setter
    def value(self, value: Tensor) -> None:
        module = self.module
        (module._buffers if self.is_buffer else module._parameters)[self.attribute] = value


class Entry(NamedTuple):
    value: Tensor
    spots: list[Spot]
    is_buffer: bool
    is_persistent: bool


def entries(root: nn.Module) -> list[Entry]:
    by_value: dict[int, Entry] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        for attribute, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None:
                is_buffer = attribute in module._buffers
                persistent = attribute not in module._non_persistent_buffers_set
                entry = by_value.setdefault(id(value), Entry(value, [], is_buffer, persistent))
                entry.spots.append(Spot(module, path, attribute))
    return list(by_value.values())


def prepare(model: nn.Module) -> None:
    """Refuses unsupported plans, and shards the input embedding like other weights, although plans
    of some releases leave it whole on each process. A look-up in an embedding sharded by rows gives
    the same values, because all processes except one add zeros. Raises `ValueError` for another
    kind of distribution.
    """
    config = getattr(model.config, "distributed_config", None)
    if config is None:
        return
    others = ("fsdp_size", "pp_size", "dp_replicate_size")
    if wrong := [name for name in others if (getattr(config, name, None) or 1) > 1]:
        raise ValueError(
            f"compressed weights are distributed by tensor and expert parallelism, and not by "
            f"{' and '.join(wrong)}; leave it out of distributed_config"
        )
    plan = getattr(model, "tp_plan", None)
    if not plan or (getattr(config, "tp_size", None) or 1) == 1:
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


def is_sharded(value: Any) -> bool:
    if not _is_distributed():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def local(value: Tensor) -> Tensor:
    return value._local_tensor if is_sharded(value) else value  # type: ignore[attr-defined]


def like(value: Tensor, other: Any) -> Tensor:
    """A shard as a DTensor like another one; unchanged if the other is no DTensor."""
    if not is_sharded(other):
        return value
    sides = {"shape": other.shape, "stride": tuple(other.stride())}
    made: Tensor = type(other).from_local(
        value, other.device_mesh, other.placements, run_check=False, **sides
    )
    return made


def gathered(value: Tensor) -> Tensor:
    """A whole parameter. To decode a DTensor, all processes must call this at the same time."""
    return value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]


def is_first() -> bool:
    return not _is_distributed() or torch.distributed.get_rank() == 0


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
