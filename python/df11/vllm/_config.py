"""The quantization method `df11` of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from .._wrapping import wrap_listed
from ._layers import Df11EmbeddingMethod, Df11LinearMethod, Options

NAME = "df11"


def wrap_graphs() -> None:
    """Makes vLLM run a compressed model with `VLLM_BATCH_INVARIANT` as it runs the BF16 model:
    compiled, or in breakable CUDA graphs without compilation. By itself, vLLM compiles all models
    that have a quantization method, and compiled code rounds differently. Does nothing if a release
    runs all models in one way.
    """
    place = "vllm.config:VllmConfig._uses_breakable_cudagraph_for_batch_invariance"
    wrap_listed({place: _as_bf16})


def _as_bf16(call: Callable[[], bool], arguments: dict[str, Any]) -> bool:
    model = arguments["self"].model_config
    if model is None or model.quantization != NAME:
        return call()
    model.quantization = None
    try:
        return call()
    finally:
        model.quantization = NAME


class Df11Config(Options, QuantizationConfig):
    def __repr__(self) -> str:
        return f"Df11Config(mode={self.mode!r}, residence={self.residence!r})"

    @classmethod
    def get_name(cls) -> Any:
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """The compute capability of the oldest GPUs on which the kernels run: Ampere."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: `config.json` names the method, and a BF16 folder needs no name."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Df11Config:
        """Reads `quantization_config` of `config.json`, which has only the method's name. Raises
        `ValueError` if it has more.
        """
        if others := [name for name in config if name != "quant_method"]:
            raise ValueError(
                f"quantization_config of df11 names {', '.join(others)}; give options by "
                "--model-loader-extra-config"
            )
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, GateLinear):
            # Routers are small, and vLLM has other kernels for those without a method.
            return UnquantizedLinearMethod()
        if isinstance(layer, LinearBase):
            return Df11LinearMethod(self)
        if isinstance(layer, VocabParallelEmbedding):
            return Df11EmbeddingMethod(self)
        if isinstance(layer, RoutedExperts):
            from ._experts import Df11ExpertsMethod  # which imports much of vLLM

            return Df11ExpertsMethod(self, layer.moe_config)
        return None
