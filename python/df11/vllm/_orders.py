"""Finds layers that give BF16's bits without decoding to memory, before graphs are captured."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from .. import _ops
from .._tensor import CompressedTensor
from ._cpu import EXPERTS
from ._layers import decode
from ._operators import framework

logger = init_logger("vllm.plugins.df11")

#: The most requests for which products with a vocabulary are measured; no graph holds these.
_MAX_REQUESTS = 256
_NAMED = 4
#: Bytes in BF16 up to which a weight stays BF16 if products with it would have to decode it:
#: decoding takes longer than reading it.
_SMALL = 1 << 20


class _Shape(NamedTuple):
    rows: int
    columns: int
    with_bias: bool
    is_head: bool
    #: How many matrices of this shape lie in one tensor; each token has some of them.
    experts: int = 1


def find_orders(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Measures the order of vLLM's products: for all layers and captured numbers of tokens, for
    heads and all numbers of requests, and for experts and all numbers of tokens. Then logs for how
    many products the order is known. Measures each shape once, and reads known orders from disk.
    """
    begin = time.perf_counter()
    captured = vllm_config.compilation_config.cudagraph_capture_sizes or [1]
    requests = range(1, min(vllm_config.scheduler_config.max_num_seqs, _MAX_REQUESTS) + 1)
    tied = getattr(vllm_config.model_config.hf_text_config, "tie_word_embeddings", False)
    named: dict[_Shape, list[str]] = {}
    unknown: dict[_Shape, list[int]] = {}
    for path, layer, weight in _layers(model, tied):
        shape = _shape(layer, weight)
        named.setdefault(shape, []).append(path)
        if shape not in unknown:
            unknown[shape] = _unknown(weight, shape, requests if shape.is_head else captured)
    kept = _keep_small(model, tied, unknown)
    for path, layer in _layers_of_experts(model):
        method = layer.quant_method
        most = min(method.most_tokens(layer), vllm_config.scheduler_config.max_num_batched_tokens)
        counts = range(1, most + 1)
        known = method.orders.prepare(counts) if method.orders else [False] * most
        unproved = {count for count, is_known in zip(counts, known, strict=True) if not is_known}
        decoded = [count for count in captured if count in unproved]
        for name in EXPERTS:
            weight = getattr(layer, name)
            rows, columns = weight.shape[1:]
            shape = _Shape(rows, columns, False, False, len(weight))
            named.setdefault(shape, []).append(f"{path}.{name}")
            unknown[shape] = sorted({*unknown.get(shape, []), *decoded})
    _log(named, unknown, kept, time.perf_counter() - begin)


def _layers(model: nn.Module, tied: bool) -> Iterable[tuple[str, Any, CompressedTensor]]:
    for path, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        looked_up = isinstance(layer, VocabParallelEmbedding)
        is_head = isinstance(layer, ParallelLMHead) or tied
        if isinstance(weight, CompressedTensor) and (is_head or not looked_up):
            yield path, layer, weight


def _layers_of_experts(model: nn.Module) -> Iterable[tuple[str, Any]]:
    for path, layer in model.named_modules():
        if getattr(getattr(layer, "quant_method", None), "is_grouped", False):
            yield path, layer


def _keep_small(model: nn.Module, tied: bool, unknown: dict[_Shape, list[int]]) -> set[_Shape]:
    """Decodes the weights of small matrices whose order is not always known, such as routers'.
    Returns their shapes.
    """
    kept = set()
    for _, layer, weight in list(_layers(model, tied)):
        shape = _shape(layer, weight)
        if unknown[shape] and not shape.is_head and 2 * shape.rows * shape.columns <= _SMALL:
            decode(layer, "weight")
            kept.add(shape)
    return kept


def _shape(layer: Any, weight: CompressedTensor) -> _Shape:
    with_bias = getattr(layer, "bias", None) is not None and not getattr(
        layer, "skip_bias_add", False
    )
    is_head = isinstance(layer, VocabParallelEmbedding)
    return _Shape(layer.weight_rows, weight.matrix_shape[1], with_bias, is_head)


def _unknown(weight: CompressedTensor, shape: _Shape, x_rows: Iterable[int]) -> list[int]:
    """Numbers of rows of x for which weights are decoded."""
    wanted = list(x_rows)
    known = _ops.orders(
        weight._arrays,
        weight.flat_parts,
        wanted,
        with_bias=shape.with_bias,
        framework=framework(),
        padding=shape.rows - weight.matrix_shape[0],
    )
    if not known or framework().is_batch_invariant:
        return [] if known and all(known.values()) else wanted
    return [count for count in wanted if not known.get(count, True)]


def _log(
    named: dict[_Shape, list[str]],
    unknown: dict[_Shape, list[int]],
    kept: set[_Shape],
    seconds: float,
) -> None:
    matrices = {shape: len(names) * shape.experts for shape, names in named.items()}
    total = sum(matrices.values())
    known = sum(count for shape, count in matrices.items() if not unknown[shape])
    logger.info(
        "df11: %d of %d matrices are multiplied in the order of BF16's products, without decoding "
        "to memory (found in %.2f seconds)",
        known,
        total,
        seconds,
    )
    for shape, names in named.items():
        if counts := unknown[shape]:
            some = ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
            logger.info(
                "df11: %d matrices of %d x %d (%s) %s BF16's product with %s rows of x, whose "
                "order is not known",
                matrices[shape],
                *shape[:2],
                some,
                "are small and stay BF16, for" if shape in kept else "are decoded for",
                _list(counts),
            )


def _list(counts: list[int]) -> str:
    return ", ".join(map(str, counts[:8])) + (f", … {counts[-1]}" if len(counts) > 8 else "")
