"""Mixtures of experts.

With few tokens, kernels multiply by the experts that the router chose on the GPU, and read no
others. With many tokens the router chooses most experts. Then, and in exact mode if the order of
vLLM's sums is not known, a layer's experts are decoded, and vLLM's own kernel multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import activation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
    make_unquantized_moe_kernel,
    select_unquantized_moe_backend,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from .._dispatch import dense
from .._experts import products
from ._cpu import EXPERTS, Experts
from ._deferred import Target
from ._layers import Options, defer, finish

#: Average rows of x per expert up to which kernels are faster than decoding all experts, on Hopper
#: (benches/record/2026-11-28-experts-h200.md).
_MAX_ROWS = 256
#: How vLLM 0.26 chooses experts on the CPU. Later ones have a router for that.
_select_experts: Any = None
_CPU_ROUTER = "vllm.model_executor.layers.fused_moe.cpu_fused_moe"
if current_platform.is_cpu() and find_spec(_CPU_ROUTER) is not None:
    _select_experts = import_module(_CPU_ROUTER).select_experts
_ROUTING = (
    *("top_k", "use_grouped_topk", "renormalize", "topk_group", "num_expert_group"),
    *("custom_routing_function", "scoring_func", "routed_scaling_factor"),
    "e_score_correction_bias",
)
#: Class that versions after 0.26 take instead of the numbers of gated activations.
_ActivationConfig: Any = getattr(activation, "ApplyMoEActivationConfig", None)


class Df11ExpertsMethod(FusedMoEMethodBase):
    """The experts of a layer: gate and up below each other for each expert, and down."""

    #: The layer's activation: writes the result for its second argument into the first.
    activate: Callable[[Tensor, Tensor], Tensor]

    def __init__(self, options: Options, moe: FusedMoEConfig) -> None:
        super().__init__(moe)
        self.options = options
        #: vLLM's kernel on a GPU, whose weights may be compressed if `is_grouped`.
        self.kernel: FusedMoEKernel | None = None
        self.is_grouped = False
        #: Where the bits are those of vLLM's products; None: nowhere, or not in exact mode.
        self.orders: Any = None
        _refuse(moe)
        is_cpu = current_platform.is_cpu()
        # On CPUs vLLM's own kernels know all experts alone.
        has_all = not moe.moe_parallel_config.use_ep
        self.on_cpu = Experts(moe) if is_cpu and options.exact and has_all else None
        self.backend = None if is_cpu else select_unquantized_moe_backend(moe)
        # Its kernels take weights in the checkpoint's layout.
        if self.backend is not None and self.backend[0] != UnquantizedMoeBackend.TRITON:
            raise ValueError(
                f"df11 has no experts for the MoE backend {self.backend[0].value}; add "
                "--moe-backend triton"
            )

    @property
    def is_monolithic(self) -> bool:
        """True on the CPU if this release of vLLM has no router outside its own kernel there."""
        return _select_experts is not None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        device = torch.get_default_device()
        inner = intermediate_size_per_partition
        up = 2 * inner if self.moe.is_act_and_mul else inner
        shapes = ((num_experts, up, hidden_size), (num_experts, hidden_size, inner))
        for name, shape in zip(EXPERTS, shapes, strict=True):
            weight = defer(layer, name, Target(shape, params_dtype, device))
            set_weight_attrs(weight, extra_weight_attrs)

    def process_weights_after_loading(self, layer: Any) -> None:
        for name in EXPERTS:
            finish(layer, name, self.options)
        if self.on_cpu is not None:
            self.on_cpu.load(layer)
            return
        numbers = self.get_fused_moe_quant_config(layer)
        if self.backend is None:
            self.activate = _activation_of(layer, numbers)
            return
        if self.kernel is not None:
            return
        from . import _grouped  # which needs Triton

        backend, experts = self.backend
        assert experts is not None
        if experts in _grouped.CompressedExperts.__bases__:
            experts = _grouped.CompressedExperts
            kernels = [_grouped.kernels_of(getattr(layer, name)) for name in EXPERTS]
            self.is_grouped = None not in kernels
            keeps_order = all(one is not None and one.keeps_order for one in kernels)
            if self.options.exact and keeps_order:
                top = self.moe.experts_per_token
                self.orders = _grouped.ExpertOrders(self.moe, numbers, layer, top)
        self.kernel = make_unquantized_moe_kernel(
            quant_config=numbers,
            moe_config=self.moe,
            backend=backend,
            experts_cls=experts,
            routing_tables=layer._expert_routing_tables(),
        )

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        """No scales; the layer's own numbers for gated activations."""
        return FusedMoEQuantConfig.make(
            gemm1_alpha=getattr(layer, "swiglu_alpha", None),
            gemm1_beta=getattr(layer, "swiglu_beta", None),
            gemm1_clamp_limit=getattr(layer, "swiglu_limit", None),
        )

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """The weighted sum of each token's experts: [tokens, hidden]."""
        if self.on_cpu is not None:
            return self.on_cpu.apply(layer, x, topk_weights, topk_ids)
        if self.kernel is None:
            return self._multiply(layer, x, topk_weights, topk_ids)
        decodes = not self.is_grouped or not self.multiplies(layer, len(x), topk_ids.shape[1])
        return self.run(layer, x, topk_weights, topk_ids, decodes)

    def run(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, decodes: bool
    ) -> Tensor:
        """Does what `apply` does, on a GPU, with compressed or decoded experts."""
        assert self.kernel is not None
        w13, w2 = layer.w13_weight, layer.w2_weight
        return self.kernel.apply(
            hidden_states=x,
            w1=dense(w13) if decodes else w13,
            w2=dense(w2) if decodes else w2,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            shared_experts=None,
            shared_experts_input=None,
        )

    def most_tokens(self, layer: Any) -> int:
        """The most tokens that kernels multiply by compressed experts."""
        return _MAX_ROWS * layer.global_num_experts // self.moe.experts_per_token

    def multiplies(self, layer: Any, tokens: int, chosen: int) -> bool:
        """Whether kernels multiply this many tokens, each with `chosen` experts."""
        if tokens > self.most_tokens(layer) or chosen != self.moe.experts_per_token:
            return False
        return not self.options.exact or (self.orders is not None and self.orders.is_known(tokens))

    def _multiply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        tokens, chosen = topk_ids.shape
        if layer.apply_router_weight_on_input:
            x = x * topk_weights.to(x.dtype)
            topk_weights = torch.ones_like(topk_weights)
        experts = layer.local_num_experts
        order, offsets, rows = route(topk_ids, layer.expert_map, experts)
        up = _grouped(x, offsets, rows, layer, "w13_weight", experts)
        width = up.shape[1] // 2 if layer.activation.is_gated else up.shape[1]
        hidden = up.new_empty(up.shape[0], width)
        self.activate(hidden, up)
        down = _grouped(hidden, offsets, None, layer, "w2_weight", experts)
        if layer.expert_map is not None:
            here = torch.arange(order.numel(), device=x.device) < offsets[-1]
            down = torch.where(here[:, None], down, 0)
        y = torch.empty_like(down)
        y[order] = down
        weighted = y.view(tokens, chosen, -1).float() * topk_weights[:, :, None]
        return weighted.sum(1).to(x.dtype)

    def apply_monolithic(
        self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None
    ) -> Tensor:
        if self.on_cpu is not None:
            return self.on_cpu.apply_monolithic(layer, x, router_logits)
        options = {name: getattr(layer, name) for name in _ROUTING}
        chosen = _select_experts(hidden_states=x, router_logits=router_logits, **options)
        return self.apply(layer, x, *chosen)


def _refuse(moe: FusedMoEConfig) -> None:
    parallel = "data parallel attention with expert parallelism; leave out --data-parallel-size"
    for is_requested, problem in (
        (moe.has_bias, "experts with biases; serve the BF16 checkpoint"),
        (moe.is_lora_enabled, "LoRA adapters of a mixture of experts; serve the BF16 checkpoint"),
        (moe.moe_parallel_config.use_all2all_kernels, parallel),
    ):
        if is_requested:
            raise ValueError(f"df11 does not support {problem}")


def route(
    topk_ids: Tensor, expert_map: Tensor | None, experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the places of tokens by expert: their order, where each expert begins, and their rows.
    Experts of other ranks come last. Does not wait.
    """
    flat = topk_ids.reshape(-1).long()
    if expert_map is not None:
        flat = expert_map[flat].long()
        flat = torch.where(flat < 0, experts, flat)
    ids, order = torch.sort(flat, stable=True)
    numbers = torch.arange(experts + 1, device=ids.device)
    offsets = torch.searchsorted(ids, numbers, out_int32=True)
    return order, offsets, (order // topk_ids.shape[1]).int()


def _grouped(
    x: Tensor, offsets: Tensor, rows: Tensor | None, layer: Any, name: str, experts: int
) -> Tensor:
    key, weight = getattr(layer, f"{name}_key"), getattr(layer, name)
    if key is not None:
        height = getattr(layer, f"{name}_rows") // experts
        return torch.ops.df11_vllm.grouped_linear(x, offsets, rows, key, height)
    flat = x if rows is None else x[rows]
    _, *ends = offsets.tolist()
    y = products(flat[: ends[-1]], weight.mT, ends)
    return torch.cat([y, flat.new_zeros(flat.shape[0] - ends[-1], weight.shape[1])])


def _activation_of(layer: Any, numbers: FusedMoEQuantConfig) -> Callable[..., Tensor]:
    apply = partial(activation.apply_moe_activation, layer.activation)
    if _ActivationConfig is not None:
        config = _ActivationConfig.from_configs(layer.moe_config, numbers)
        return partial(apply, activation_config=config)
    alpha, beta = numbers.gemm1_alpha or 1.0, numbers.gemm1_beta or 0.0
    return partial(apply, clamp_limit=numbers.gemm1_clamp_limit, alpha=alpha, beta=beta)
