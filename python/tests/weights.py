"""Seeded BF16 weights of many shapes, and the same as compressed tensors of a container."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

import df11
from df11._container import Tensors
from df11._tensor import CompressedTensor


def normals(seed: int) -> Callable[..., torch.Tensor]:
    """A function that makes weights of a shape, different ones each time."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: (0.02 * torch.randn(shape, generator=generator)).bfloat16()


def _seeded() -> dict[str, torch.Tensor]:
    normal = normals(11)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    return {
        "every": every.view(torch.bfloat16).view(256, 256),  # NaN, infinities, subnormal numbers
        "odd": normal(45, 1000),
        "edge": normal(520, 264),
        "one_strip": normal(33, 520),
        "q": normal(128, 256),
        "k": normal(64, 256),
        "v": normal(64, 256),
        "wide": normal(96, 512),
        "experts": normal(6, 64, 256),
        "experts_apart": normal(6, 40, 256),  # no multiple of 32 rows
        "convolution": normal(40, 64, 3, 3),
    }


#: Matrices that end at many places of their tiles, experts, a convolution, all patterns.
WEIGHTS = _seeded()
#: Windows deletes none that is mapped at the end.
_FOLDER = TemporaryDirectory(ignore_cleanup_errors=True)


def container_of(weights: dict[str, torch.Tensor], folder: Path, **options: Any) -> Any:
    source, out = folder / "weights.safetensors", folder / "weights.df11"
    save_file(weights, source)
    df11.compress(source, out, progress=False, **options)
    return df11.open(out)


@cache
def _stored() -> Any:
    return container_of(WEIGHTS, Path(_FOLDER.name))


def weights() -> Tensors:
    """The tensors of a new container of WEIGHTS, which nobody else uses."""
    return Tensors(_stored())


def compressed(name: str, exact: bool = True, of: Tensors | None = None) -> CompressedTensor:
    found = (of or weights())[name]
    assert isinstance(found, CompressedTensor)
    return found.with_mode(exact)


def streamed(tensor: CompressedTensor, device: torch.device) -> CompressedTensor:
    """A tensor whose arrays a GPU reads from pinned memory of the host."""
    pinned = [array.pin_memory() for array in tensor._arrays[:4]]
    arrays = [*pinned, tensor.to(device)._table0]
    return CompressedTensor(arrays, tensor.parts, tensor.shape, exact=tensor.exact, device=device)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    found = found.decode() if isinstance(found, CompressedTensor) else found
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    first, second = (one.contiguous().reshape(-1).view(torch.uint8) for one in (found, expected))
    return torch.equal(first, second)
