"""Operators of layers that hold compressed matrices.

They are `df11::linear`, `embedding` and `grouped_linear` of what a layer holds. A layer is named
by its `key`, a small tensor: lengths of compressed arrays differ from layer to layer, from model to
model of one shape, and with options. In a compiled graph they would make each layer a graph of its
own, and vLLM's cache of compiled graphs, which does not know of them, would return wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import torch
import vllm.envs as envs
from torch import Tensor
from torch.nn import functional

from .. import _ops
from .._tensor import CompressedTensor

#: Has vLLM's batch-invariant product, whose own module has another name in each tested release.
_layers: Any = import_module("vllm.model_executor.layers.linear")
#: Bytes of a key. Compiled code may count on addresses being multiples of this.
_KEY_BYTES = 16

Function = TypeVar("Function", bound=Callable[..., Any])


class Held(NamedTuple):
    key: Tensor
    arrays: list[Tensor]
    parts: tuple[int, ...]
    #: Of the matrix, and of the rows of zeros after it.
    rows: int
    padding: int
    exact: bool


_held: dict[int, Held] = {}


def hold(weight: CompressedTensor, padding: int) -> Tensor:
    """The key of a weight, which it keeps alive. `padding`: rows of zeros."""
    device = weight.device
    key = torch.zeros(_KEY_BYTES, dtype=torch.uint8, device=device)
    rows, _ = weight.matrix_shape
    _held[key.data_ptr()] = Held(key, weight.arrays, weight.flat_parts, rows, padding, weight.exact)
    return key


def held_by(key: Tensor) -> Held:
    return _held[key.data_ptr()]


library = torch.library.Library("df11_vllm", "DEF")


def _operator(schema: str, fake: Callable[..., Any]) -> Callable[[Function], Function]:
    """Makes a function an operator; `fake` tells its result without a look at what is held."""
    name = schema.partition("(")[0]

    def register(function: Function) -> Function:
        _ops.define(library, schema, function)
        torch.library.register_fake(f"df11_vllm::{name}", fake, lib=library)
        return function

    return register


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As vLLM multiplies by a weight that is not compressed, to the bit."""
    if x.is_cuda and envs.VLLM_BATCH_INVARIANT:
        product: Tensor = _layers.linear_batch_invariant(x, weight, bias)
        return product
    return functional.linear(x, weight, bias)


@_operator(
    "linear(Tensor x, Tensor key, Tensor? bias, int rows) -> Tensor",
    lambda x, key, bias, rows: x.new_empty((*x.shape[:-1], rows)),
)
def linear(x: Tensor, key: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """y = x Wᵀ (+ bias): [..., rows], of which the last ones may be those of padding."""
    held = held_by(key)
    if held.exact or not x.is_cuda:
        dense = _ops.decode(held.arrays, held.parts, x.device)
        if held.padding:
            dense = functional.pad(dense, (0, 0, 0, held.padding))
        return dense_linear(x, dense, bias)
    if not held.padding:
        return _ops.linear(x, held.arrays, held.parts, bias, False)
    y = functional.pad(_ops.linear(x, held.arrays, held.parts, None, False), (0, held.padding))
    return y if bias is None else y + bias


@_operator(
    "embedding(Tensor indices, Tensor key, int columns) -> Tensor",
    lambda indices, key, columns: indices.new_empty(
        (*indices.shape, columns), dtype=torch.bfloat16
    ),
)
def embedding(indices: Tensor, key: Tensor, columns: int) -> Tensor:
    """Rows by their numbers: [..., columns]."""
    held = held_by(key)
    return _ops.embedding(indices, held.arrays, held.parts)


@_operator(
    "grouped_linear(Tensor x, Tensor offsets, Tensor? rows, Tensor key, int height) -> Tensor",
    lambda x, offsets, rows, key, height: x.new_empty(
        (x.shape[0] if rows is None else rows.shape[0], height)
    ),
)
def grouped_linear(
    x: Tensor, offsets: Tensor, rows: Tensor | None, key: Tensor, height: int
) -> Tensor:
    """Products with experts of `height` rows each, as `df11::grouped_linear`."""
    held = held_by(key)
    experts = held.rows // height
    return _ops.grouped_linear(x, offsets, rows, held.arrays, held.parts, experts)
