"""Products on a CPU, with the bits of vLLM's layers there.

For CPUs vLLM packs the weights of its unquantized layers after loading, for kernels that add in
another order than PyTorch's. Which kernel that is depends on the shape, the CPU and the release. So
the layer's own method of vLLM packs decoded weights, and multiplies by them. Nothing is kept.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from .._tensor import CompressedTensor

EXPERTS = ("w13_weight", "w2_weight")
#: vLLM multiplies by such weights without packing them.
_IS_PLAIN = "_cpu_skip_gemm_dispatch"


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def is_plain(layer: nn.Module) -> bool:
    return getattr(layer, _IS_PLAIN, False)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, plain: bool) -> Tensor:
    """What an unquantized linear layer or head of vLLM gives. `plain`: `is_plain` of the layer."""
    layer: Any = nn.Module()
    layer.weight = _parameter(weight)
    # vLLM may change a layer's bias into another dtype.
    layer.bias = None if bias is None else _parameter(bias.clone())
    setattr(layer, _IS_PLAIN, plain)
    method = UnquantizedLinearMethod()
    method.process_weights_after_loading(layer)
    return method.apply(layer, x, layer.bias)


class Experts:
    """The experts of a layer of vLLM without quantization. Make it with a current vLLM config."""

    def __init__(self, moe: Any) -> None:
        self._method = UnquantizedFusedMoEMethod(moe)
        self._is_packed = False

    def load(self, layer: Any) -> None:
        """Packs the weights of a layer that has no compressed ones."""
        if not any(isinstance(getattr(layer, name), CompressedTensor) for name in EXPERTS):
            self._method.process_weights_after_loading(layer)
            self._is_packed = True

    def apply(self, layer: Any, *given: Any) -> Tensor:
        return self._method.apply(self._dense(layer), *given, None, None)

    def apply_monolithic(self, layer: Any, *given: Any) -> Tensor:
        return self._method.apply_monolithic(self._dense(layer), *given)

    def _dense(self, layer: Any) -> Any:
        """The layer, or one like it, with weights that are packed for the method."""
        if self._is_packed:
            return layer
        dense = copy.copy(layer)
        dense.__dict__["_parameters"] = dict(layer._parameters)
        for name in EXPERTS:
            weight = getattr(layer, name)
            dense.__dict__.pop(name, None)
            # vLLM may pack into the parameter.
            value = weight.decode() if isinstance(weight, CompressedTensor) else weight.clone()
            dense._parameters[name] = _parameter(value)
        self._method.moe_kernel = None  # with one, vLLM takes weights for packed
        self._method.process_weights_after_loading(dense)
        return dense
