"""Layers with matrices (single, merged, QKV), and vocabularies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.utils import set_weight_attrs

from . import _operators
from ._deferred import Target
from ._layers import defer, finish
from ._options import Options


class _Matrix(QuantizeMethodBase):
    """A layer whose weight is a matrix, or several ones below each other."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Registers a weight without memory."""
        shape = (sum(output_partition_sizes), input_size_per_partition)
        weight = defer(layer, "weight", Target(shape, params_dtype, torch.get_default_device()))
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, **extra_weight_attrs})

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Gives the layer what it holds, if the loader has not."""
        finish(layer, "weight", self.options)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """y = x Wᵀ (+ bias)."""
        if layer.weight_key is None:
            return _operators.dense_linear(x, layer.weight, bias)
        return torch.ops.df11_vllm.linear(x, layer.weight_key, bias, layer.weight_rows)


class Df11LinearMethod(_Matrix, LinearMethodBase):
    """Linear layers: column and row parallel ones, replicated, merged and QKV."""


class Df11EmbeddingMethod(_Matrix):
    """Vocabularies: embeddings and heads, which may share a weight."""

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        """Rows by their numbers."""
        if layer.weight_key is None:
            return functional.embedding(input_, layer.weight)
        return torch.ops.df11_vllm.embedding(input_, layer.weight_key, layer.weight_columns)
