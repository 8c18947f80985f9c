"""A layer's weights: first a target, then compressed arrays or an ordinary parameter.

These are layers with matrices (single, merged, QKV), and vocabularies.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.utils import set_weight_attrs

from .._encoding import pack_rows
from .._load import OPTIONS, check_options
from .._tensor import CompressedTensor
from ._cpu import EXPERTS
from ._deferred import Deferred, Patch, Target
from ._operators import hold, release

logger = init_logger("vllm.plugins.df11")

NAMES = ("weight", *EXPERTS)
#: Dtypes of weights that stay compressed for vLLM's own kernels (`_quantized`).
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Options:
    mode, residence = (values[0] for values in OPTIONS.values())

    @property
    def exact(self) -> bool:
        """Whether products have the bits of the BF16 model."""
        return self.mode == "exact"

    def choose(self, options: dict[str, Any]) -> None:
        """Sets options that the user has given. Raises `ValueError` for a value that an option does
        not have.
        """
        try:
            check_options(**options)
        except ValueError as error:
            raise ValueError(f"--model-loader-extra-config: {error}") from None
        vars(self).update(options)


def defer(layer: nn.Module, name: str, target: Target) -> nn.Parameter:
    target.complete = pack
    weight = nn.Parameter(target.tensor(), requires_grad=False)
    layer.register_parameter(name, weight)
    return weight


def target_of(layer: nn.Module, name: str) -> Target | None:
    weight = layer._parameters.get(name)
    if not isinstance(weight, Deferred):
        return None
    assert isinstance(weight.backing, Target)
    return weight.backing


def give(layer: nn.Module, name: str, value: Tensor, target: Target) -> None:
    """Replaces a target by its final weight. A compressed weight is not a parameter but an
    attribute with shape, dtype and device: compiled code uses its key.
    """
    del layer._parameters[name]
    key = None
    if isinstance(value, CompressedTensor):
        layer.__dict__[name] = value
        padding = target.rows - value.matrix_shape[0]
        key = nn.Parameter(hold(layer, name, value, padding), requires_grad=False)
    else:
        layer.register_parameter(name, nn.Parameter(value, requires_grad=False))
    layer.register_parameter(f"{name}_key", key)
    setattr(layer, f"{name}_rows", target.rows)
    setattr(layer, f"{name}_columns", target.columns)


def decode(layer: Any, name: str) -> None:
    """Makes a compressed weight of a layer ordinary."""
    value = layer.__dict__.pop(name).decode()
    padding = getattr(layer, f"{name}_rows") - len(value)
    release(getattr(layer, f"{name}_key"))
    if padding:
        value = functional.pad(value, (0, 0, 0, padding))
    layer.register_parameter(name, nn.Parameter(value, requires_grad=False))
    layer.register_parameter(f"{name}_key", None)
    layer.quant_method.ordinary.process_weights_after_loading(layer)


def finish(layer: nn.Module, name: str, options: Options) -> None:
    """Gives a layer a weight that does not come from a container.
    Raises `ValueError` if the checkpoint lacks some of it.
    """
    target = target_of(layer, name)
    if target is None:
        return
    if target.value is None:
        named = getattr(layer, "prefix", None) or getattr(layer, "layer_name", "")
        target.ordered(where := named or str(type(layer)))
        raise RuntimeError(f"weights of {where} were read and not loaded")
    value = target.value
    if isinstance(value, CompressedTensor):
        value = value.with_mode(options.exact)
    give(layer, name, value, target)


def pack(target: Target, because: str | None = None) -> None:
    """Makes a weight from the dense patches of a target: packed on a GPU, ordinary on the CPU."""
    patches = target.ordered()
    small = target.rows * target.columns < 1 << 16
    fits = target.dtype == torch.bfloat16 and target.columns % 8 == 0
    is_packed = target.device.type == "cuda" and fits and not small
    value: Tensor | None = _packed(target, patches) if is_packed else None
    if value is None:
        value = _rows(target, patches, 0, target.rows).view(target.shape)
        because = because or "it is small, on the CPU, or has too many exceptions"
        dtype = "BF16" if target.dtype == torch.bfloat16 else str(target.dtype)
        logger.info_once("df11: a weight of shape %s stays %s: %s", target.shape, dtype, because)
    target.value = value


def _packed(target: Target, patches: list[Patch]) -> CompressedTensor | None:
    device = torch.device("cuda", torch.cuda.current_device())
    rows, columns = without_padding(target, patches), target.columns
    values = partial(_rows, target, patches, device=device)
    if (packed := pack_rows(device, rows, columns, values)) is None:
        return None
    return CompressedTensor(*packed, target.shape if rows == target.rows else (rows, columns))


def without_padding(target: Target, patches: list[Patch]) -> int:
    """The number of rows before zeros at the end; zeros would be exceptions in the fast layout."""
    rows = target.rows
    for patch in reversed(patches):
        if patch.values is not None or patch.columns != target.columns:
            break
        rows = patch.row
    return rows or target.rows


def _rows(
    target: Target, patches: list[Patch], begin: int, end: int, device: torch.device | None = None
) -> Tensor:
    device = device or target.device
    rows = torch.zeros(end - begin, target.columns, dtype=target.dtype, device=device)
    for patch in patches:
        first, last = max(begin, patch.row), min(end, patch.row + patch.rows)
        if first < last and patch.values is not None:
            place = rows[first - begin : last - begin, patch.column : patch.column + patch.columns]
            place.copy_(patch.values[first - patch.row : last - patch.row])
    return rows


class _MatrixMethod(QuantizeMethodBase):
    #: vLLM's method for layers whose weight is ordinary.
    ordinary: UnquantizedLinearMethod | UnquantizedEmbeddingMethod

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
        shape = (sum(output_partition_sizes), input_size_per_partition)
        weight = defer(layer, "weight", Target(shape, params_dtype, torch.get_default_device()))
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, **extra_weight_attrs})

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        finish(layer, "weight", self.options)
        if not hasattr(layer, "weight_key"):  # tied to a layer of vLLM's own
            layer.register_parameter("weight_key", None)
        if layer.weight_key is None:
            self.ordinary.process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if layer.weight_key is None:
            return self.ordinary.apply(layer, x, bias)
        return torch.ops.df11_vllm.linear(x, layer.weight_key, bias, layer.weight_rows)


class Df11LinearMethod(_MatrixMethod, LinearMethodBase):
    """Linear layers: column and row parallel ones, replicated, merged and QKV."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.ordinary = UnquantizedLinearMethod()


class Df11EmbeddingMethod(_MatrixMethod):
    """Vocabularies: embeddings and heads, which may share a weight."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.ordinary = UnquantizedEmbeddingMethod()

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        if layer.weight_key is None:
            return self.ordinary.embedding(layer, input_)
        return torch.ops.df11_vllm.embedding(input_, layer.weight_key, layer.weight_columns)
