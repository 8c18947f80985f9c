"""Products on a CPU that give the bits of vLLM's layers there.

On CPUs, vLLM packs the weights of its unquantized layers after loading, for kernels that add in
another order than PyTorch's. The kernel depends on the shape, the CPU and the release. So here
vLLM's own method for the layer packs decoded weights, and multiplies by them. The packed weights
are not kept.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
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
    """The product of an unquantized linear layer or head of vLLM. `plain`: the layer's
    `is_plain`."""
    layer: Any = nn.Module()
    layer.weight = _parameter(weight)
    # vLLM may change a layer's bias into another dtype.
    layer.bias = None if bias is None else _parameter(bias.clone())
    setattr(layer, _IS_PLAIN, plain)
    method = UnquantizedLinearMethod()
    method.process_weights_after_loading(layer)
    return method.apply(layer, x, layer.bias)


#: Layers with compressed experts, by the addresses of their keys.
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def multiply_experts(x: Tensor, routing: Tensor, ids: Tensor | None, key: Tensor) -> Tensor:
    """The sums of the experts of a layer without quantization. `routing`: the router's logits, or
    the weights of the chosen experts `ids`.
    """
    layer = _layers[key.data_ptr()]
    if layer.apply_router_weight_on_input:
        x = x.clone()  # which vLLM may change
    return layer.quant_method.on_cpu.multiply(layer, x, routing, ids)


def _key(layer: Any) -> Tensor | None:
    """Names a layer for the operator; None if no weight of it is compressed."""
    return layer.w2_weight_key if layer.w13_weight_key is None else layer.w13_weight_key


class Experts:
    """The experts of a layer of vLLM without quantization. Make it with a current vLLM config."""

    def __init__(self, moe: Any) -> None:
        self._method = UnquantizedFusedMoEMethod(moe)

    def load(self, layer: Any) -> None:
        """Packs the weights of a layer if none is compressed; otherwise the operator does."""
        if (key := _key(layer)) is None:
            self._method.process_weights_after_loading(layer)
        else:
            _layers[key.data_ptr()] = layer

    def apply(self, layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        if (key := _key(layer)) is None:
            return self._method.apply(layer, x, weights, ids, None, None)
        return torch.ops.df11_vllm.experts(x, weights, ids, key)

    def apply_monolithic(self, layer: Any, x: Tensor, logits: Tensor) -> Tensor:
        if (key := _key(layer)) is None:
            return self._method.apply_monolithic(layer, x, logits)
        return torch.ops.df11_vllm.experts(x, logits, None, key)

    def multiply(self, layer: Any, x: Tensor, routing: Tensor, ids: Tensor | None) -> Tensor:
        dense = self._dense(layer)
        if ids is None:
            return self._method.apply_monolithic(dense, x, routing)
        return self._method.apply(dense, x, routing, ids, None, None)

    def _dense(self, layer: Any) -> Any:
        """A layer like it, with weights that are packed for the method."""
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
