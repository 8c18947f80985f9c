"""Operators for layers that hold compressed matrices.

They run `df11::linear`, `embedding` and `grouped_linear` on a layer's weight. A `key`, a small
tensor, names the layer. Lengths of compressed arrays differ between layers, between models of one
shape, and with options. If the arrays were arguments in a compiled graph, each layer would need its
own graph, and vLLM's cache of compiled graphs, which does not know the lengths, would return wrong
graphs.
"""

from __future__ import annotations

import weakref
from functools import cache
from importlib import import_module, metadata
from typing import Any, NamedTuple

import torch
import vllm.envs as envs
from torch import Tensor, nn
from torch.nn import functional

from .. import _experts, _native, _ops
from .._errors import ParameterError
from .._matrices import matrices, raw_stream, windows
from .._order import LINEAR, Framework
from .._tensor import CompressedTensor
from . import _cpu

#: Module with vLLM's batch-invariant product; its own module has other names in other releases.
_layers: Any = import_module("vllm.model_executor.layers.linear")
#: Side of the blocks of weights that have a table of their own.
BLOCK = 128
#: Bytes of a key. Compiled code may rely on addresses that are multiples of this.
_KEY_BYTES = 16


class _Held(NamedTuple):
    weight: CompressedTensor
    key: Tensor
    #: Rows of zeros after the weight.
    padding: int
    #: Whether vLLM multiplies by the weight without packing it for a CPU.
    is_plain: bool
    layer: weakref.ref[nn.Module]
    #: Name of the weight in the layer.
    name: str
    #: Forgets the weight when the layer is gone.
    forget: weakref.finalize[..., nn.Module]
    #: The tensor that the layer shows as its weight, if it is another one (`_quantized`).
    shown: Tensor | None = None
    #: Which byte each byte of a block becomes after decoding.
    table: Tensor | None = None
    #: How many experts of a mixture have equal shares of the rows, and what decodes chosen ones.
    experts: int = 0
    decoder: _native.Experts | None = None


#: Weights by the addresses of their keys.
_held: dict[int, _Held] = {}


def hold(layer: nn.Module, name: str, weight: CompressedTensor, padding: int) -> Tensor:
    """The key of a layer's weight, which is held as long as the layer. `padding`: rows of zeros."""
    key = torch.zeros(_KEY_BYTES, dtype=torch.uint8, device=weight.device)
    is_plain = _cpu.is_plain(layer)
    forget = weakref.finalize(layer, _held.pop, key.data_ptr())
    forget.atexit = False
    _held[key.data_ptr()] = _Held(weight, key, padding, is_plain, weakref.ref(layer), name, forget)
    return key


def replace(key: Tensor, shown: Tensor, table: Tensor | None, experts: int) -> None:
    """Makes a layer show another tensor as its weight, and `decode` translate the weight's bytes by
    a table for each block. `experts`: how many of a mixture have equal shares of the rows.
    """
    held = _held[key.data_ptr()]._replace(shown=shown, table=table, experts=experts)
    each = held.weight.matrix_shape[0] // max(experts, 1)
    if experts and key.is_cuda and (table is None or each % BLOCK == 0):
        held = held._replace(decoder=_decoder(held.weight, experts, key.device.index))
    _held[key.data_ptr()] = held


def _decoder(weight: CompressedTensor, experts: int, index: int) -> _native.Experts | None:
    """None if experts begin or end within tiles."""
    each = weight.matrix_shape[0] // experts
    shares = windows(
        weight._arrays,
        weight.flat_parts,
        ((each * expert, each * (expert + 1)) for expert in range(experts)),
    )
    try:
        return _native.Experts(
            [
                (matrix, expert)
                for expert, (arrays, parts) in enumerate(shares)
                for matrix in matrices(arrays, parts, index)
            ]
        )
    except ParameterError:
        return None


def weight_of(key: Tensor) -> CompressedTensor:
    return _held[key.data_ptr()].weight


def release(key: Tensor) -> None:
    """Releases a layer's weight, which operators must not name any more. Another key may get the
    address.
    """
    _held[key.data_ptr()].forget()


def _find(key: Tensor) -> _Held:
    """The weight of a key. Raises `RuntimeError` if the layer has another weight by now, which a
    product would not see. Captured graphs do not notice, as with BF16 weights.
    """
    held = _held[key.data_ptr()]
    layer = held.layer()
    shown = held.weight if held.shown is None else held.shown
    if layer is not None and layer.__dict__.get(held.name) is not shown:
        raise RuntimeError(
            f"df11: {held.name} of {type(layer).__name__} {getattr(layer, 'prefix', '')!r} was "
            "replaced after loading, but the engine multiplies by the compressed weight; to change "
            "weights in an engine, serve the BF16 checkpoint"
        )
    return held


library = torch.library.Library("df11_vllm", "DEF")


@cache
def _batch_invariant() -> Framework:
    libraries = (f"{name} {metadata.version(name)}" for name in ("vllm", "triton"))
    name = f"linear_batch_invariant of {', '.join(libraries)}"
    return Framework(name, _layers.linear_batch_invariant, is_batch_invariant=True)


def framework() -> Framework:
    """The product of vLLM's layers on a GPU with uncompressed weights."""
    return _batch_invariant() if envs.VLLM_BATCH_INVARIANT else LINEAR


def _in_order(
    x: Tensor, weight: CompressedTensor, bias: Tensor | None, padding: int
) -> Tensor | None:
    """The bits of vLLM's product, without decoding to memory; None if its order is not known."""
    height = weight.matrix_shape[0]
    inner = None if bias is None else bias[:height]
    counts = (len(weight.parts),)
    given = (x, weight._arrays, weight.flat_parts, counts, (inner,), framework(), padding)
    products = _ops.in_order(*given)
    if products is None:
        return None
    y = functional.pad(products[0], (0, padding)) if padding else products[0]
    if padding and bias is not None:
        y[..., height:] += bias[height:]
    return y


@_ops.operator(
    "linear(Tensor x, Tensor key, Tensor? bias, int rows) -> Tensor",
    lambda x, key, bias, rows: x.new_empty((*x.shape[:-1], rows)),
    library,
)
def linear(x: Tensor, key: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """y = x Wᵀ (+ bias): [..., rows]; the last rows may be padding."""
    held = _find(key)
    weight, padding = held.weight, held.padding
    arrays, parts = weight._arrays, weight.flat_parts
    if weight.exact or not x.is_cuda:
        if (y := _in_order(x, weight, bias, padding)) is not None:
            return y
        dense = _ops.decode(arrays, parts, x.device)
        if padding:
            dense = functional.pad(dense, (0, 0, 0, padding))
        if not x.is_cuda:
            return _cpu.multiply(x, dense, bias, held.is_plain)
        return framework().multiply(x, dense, bias)
    if not padding:
        return _ops.linear(x, arrays, parts, bias, False)
    y = functional.pad(_ops.linear(x, arrays, parts, None, False), (0, padding))
    return y if bias is None else y + bias


@_ops.operator(
    "embedding(Tensor indices, Tensor key, int columns) -> Tensor",
    lambda indices, key, columns: indices.new_empty(
        (*indices.shape, columns), dtype=torch.bfloat16
    ),
    library,
)
def embedding(indices: Tensor, key: Tensor, columns: int) -> Tensor:
    weight = _find(key).weight
    return _ops.embedding(indices, weight._arrays, weight.flat_parts)


@_ops.operator(
    "grouped_linear(Tensor x, Tensor offsets, Tensor? rows, Tensor key, int height) -> Tensor",
    lambda x, offsets, rows, key, height: x.new_empty(
        (x.shape[0] if rows is None else rows.shape[0], height)
    ),
    library,
)
def grouped_linear(
    x: Tensor, offsets: Tensor, rows: Tensor | None, key: Tensor, height: int
) -> Tensor:
    """Products with experts of `height` rows each, as `df11::grouped_linear`."""
    weight = _find(key).weight
    experts = weight.matrix_shape[0] // height
    return _experts.grouped_linear(x, offsets, rows, weight._arrays, weight.flat_parts, experts)


@_ops.operator(
    "decode(Tensor key, int rows, int columns, ScalarType dtype, Tensor? ids=None, "
    "Tensor? expert_map=None) -> Tensor",
    lambda key, rows, columns, dtype, ids=None, expert_map=None: key.new_empty(
        (rows, columns), dtype=dtype
    ),
    library,
)
def decode(
    key: Tensor,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    ids: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> Tensor:
    """Decodes a weight of a layer that uses vLLM's kernels: [rows, columns]. With `ids` of experts
    that a router has chosen, other experts may be missing: their rows have any content.
    `expert_map`: the place of each of the router's experts among those of this rank, or -1.
    """
    held = _find(key)
    if held.decoder is None:
        ids = None
        weight = _ops.decode(held.weight._arrays, held.weight.flat_parts, key.device)
    else:
        weight = key.new_empty((rows, columns), dtype=dtype)
        stream = raw_stream(key.device.index)
        held.decoder.decode(weight.data_ptr(), stream, *_choices(ids, expert_map))
    if held.table is not None:
        chosen = None if ids is None else _chosen(ids, expert_map, held.experts)
        _translate(weight.view(torch.uint8), held.table, chosen)
    return weight


def _chosen(ids: Tensor, expert_map: Tensor | None, experts: int) -> Tensor:
    """Says of each expert, and of one more, whether it is chosen: 1, or 0."""
    places = ids.flatten().long()
    if expert_map is not None:
        places = expert_map.long()[places.clamp(0, len(expert_map) - 1)]
    places = torch.where((places < 0) | (places >= experts), experts, places)
    return ids.new_zeros(experts + 1, dtype=torch.int32).index_fill_(0, places, 1)


def _choices(ids: Tensor | None, expert_map: Tensor | None) -> tuple[Any, Any]:
    """The arguments `ids` and `map` of `_native.Experts.decode`."""
    if ids is None or not ids.is_contiguous() or ids.dtype not in (torch.int32, torch.int64):
        return None, None
    given = ids.data_ptr(), ids.numel(), ids.dtype == torch.int64
    if expert_map is None:
        return given, None
    if not expert_map.is_contiguous() or expert_map.dtype != torch.int32:
        return None, None
    return given, (expert_map.data_ptr(), expert_map.numel())


def _translate(weight: Tensor, table: Tensor, chosen: Tensor | None) -> None:
    if weight.is_cuda:
        from . import _translation  # which needs Triton

        _translation.translate(weight, table, BLOCK, chosen)
        return
    blocks = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2)
    found = table.gather(1, blocks.reshape(len(table), -1).long())
    blocks.copy_(found.view(blocks.shape))


_ops.operator(
    "experts(Tensor x, Tensor routing, Tensor? ids, Tensor key) -> Tensor",
    lambda x, routing, ids, key: torch.empty_like(x),
    library,
)(_cpu.multiply_experts)
