"""Experts on a GPU: vLLM's Triton experts, with kernels that multiply by compressed matrices.

vLLM's kernel adds each product in one chain, multiplies the second product by the router's weight,
and rounds once (docs/exact.md). The kernels here do the same, for slots in the order of vLLM's own
lists. Activation and sum are vLLM's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from math import prod
from typing import Any, NamedTuple

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

from .. import _native
from .._dispatch import dense
from .._matrices import grouped, raw_stream
from .._order import Framework, Kernels, prepare
from .._tensor import CompressedTensor

#: With this many experts per slot or more, blocks would hold little more than one slot each.
_SPARSE = 4


class _Slots(NamedTuple):
    """Experts of slots, or of blocks of slots."""

    experts: Tensor
    #: Places of a block, slots of places, and how many places count; None if `experts` are those of
    #: slots.
    blocks: tuple[int, Tensor, Tensor] | None


def _block(
    kernels: _native.Grouped, slots: int, experts: int, here: int, is_mapped: bool
) -> int | None:
    """Places of a block for this many slots of all experts, some of which are on this GPU. None:
    slots one by one.
    """
    if not is_mapped and slots * _SPARSE <= experts:
        return None
    return kernels.block_places(slots * here // experts)


def _sort(topk_ids: Tensor, experts: int, expert_map: Tensor | None, block: int | None) -> _Slots:
    if block is None:
        return _Slots(topk_ids.int().contiguous(), None)
    # Slots of other ranks' experts are left out.
    indices, of_blocks, end = moe_align_block_size(
        topk_ids, block, experts, expert_map, ignore_invalid_experts=expert_map is not None
    )
    return _Slots(of_blocks, (block, indices, end))


def _multiply(
    kernels: _native.Grouped, x: Tensor, slots: _Slots, factors: Tensor | None, y: Tensor
) -> None:
    """Writes the products of x, [T, K], for slots of equal shares: y, [S, N]."""
    blocks = None
    if slots.blocks is not None:
        each, indices, end = slots.blocks
        blocks = each, indices.data_ptr(), indices.numel(), end.data_ptr()
    scale = 0 if factors is None else factors.data_ptr()
    given = (x.data_ptr(), len(x), slots.experts.data_ptr(), len(y), blocks, scale, y.data_ptr())
    kernels.multiply_slots(*given, raw_stream(x.device.index))


def kernels_of(weight: Any) -> _native.Grouped | None:
    """The kernels for compressed experts, [E, N, K]; None if they are not in the fast layout."""
    if not isinstance(weight, CompressedTensor):
        return None
    return grouped(weight._arrays, weight.flat_parts, len(weight), weight.device.index)


class CompressedExperts(TritonExperts):
    """vLLM's Triton experts. Both weights may be compressed if `kernels_of` has kernels for
    them."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        first, second = kernels_of(w1), kernels_of(w2)
        has_hook = getattr(self, "post_gemm2_hook", None) is not None
        if first is None or second is None or has_hook:
            super().apply(
                output,
                hidden_states,
                dense(w1),
                dense(w2),
                topk_weights,
                topk_ids,
                activation,
                global_num_experts,
                expert_map,
                a1q_scale,
                a2_scale,
                workspace13,
                workspace2,
                expert_tokens_meta,
                apply_router_weight_on_input,
            )
            return
        experts = global_num_experts if expert_map is not None else len(w1)
        count = topk_ids.numel()
        block = _block(first, count, experts, len(w1), expert_map is not None)
        slots = _sort(topk_ids, experts, expert_map, block)
        width = self.adjust_N_for_activation(w1.shape[1], activation)
        up = _cut(workspace2, count, w1.shape[1])
        _multiply(first, hidden_states.contiguous(), slots, None, up)
        hidden = _cut(workspace13, count, width)
        self.activation(activation, hidden, up)
        # `up` is not needed any more.
        down = _cut(workspace2, count, w2.shape[1])
        if expert_map is not None:
            down.zero_()
        factors = None if apply_router_weight_on_input else topk_weights.float().contiguous()
        _multiply(second, hidden, slots, factors, down)
        self._finish(down.view(*topk_ids.shape, -1), output, topk_ids, expert_map)

    def _finish(
        self, down: Tensor, output: Tensor, topk_ids: Tensor, expert_map: Tensor | None
    ) -> None:
        """Adds the products of each token. vLLM 0.26 has no method for that."""
        finish = getattr(self, "_finalize_expert_output", None)
        if finish is None:
            self.moe_sum(down, output)
        else:
            finish(down, output, topk_ids, expert_map)


def _cut(workspace: Tensor, *shape: int) -> Tensor:
    return workspace.view(-1)[: prod(shape)].view(shape)


class _OneProduct(TritonExperts):
    """Calculates one of vLLM's two products, of tokens that all choose the first of E experts."""

    x: Tensor
    first: Tensor
    second: Tensor

    def activation(self, activation: Any, output: Tensor, input: Tensor, **kwargs: Any) -> None:
        self.first = input.clone()
        output.copy_(self.x) if len(self.x) == len(output) else output.zero_()

    def moe_sum(self, input: Tensor, output: Tensor, *more: Any) -> None:
        self.second = input.flatten(0, 1).clone()


_Configuration = tuple[tuple[str, int], ...]
#: The configuration of vLLM's kernel, whether Triton compiles it for multiples of 16, and the
#: places of a block of the kernels here. Both kernels take slots one by one, or neither does.
_Pair = tuple[_Configuration, bool, int | None]
#: For each shape of a layer: the pairs of numbers of tokens, and whether their order is known. All
#: layers of a model ask for them in each step.
_found: dict[Any, tuple[dict[int, _Pair], dict[_Pair, bool]]] = {}


class ExpertOrders:
    """Finds for how many tokens the kernels have the bits of vLLM's products with experts.

    Both products of a layer are measured as `_order` describes, with one expert that all tokens
    choose, once for each configuration of vLLM's kernel and each kernel here that replaces it.
    These two fix the order of a sum for any number of tokens.
    """

    def __init__(
        self, moe: FusedMoEConfig, numbers: FusedMoEQuantConfig, layer: Any, chosen: int
    ) -> None:
        """`chosen`: how many experts each token chooses."""
        self.config, self.activation = (moe, numbers), layer.activation
        w13, w2 = layer.w13_weight, layer.w2_weight
        self.device, self.experts, self.chosen = w13.device, len(w13), chosen
        self.is_mapped = layer.expert_map is not None
        self.all_experts = layer.global_num_experts if self.is_mapped else self.experts
        kernels = kernels_of(w13)
        assert kernels is not None, "the caller has looked"
        self.kernels = kernels
        self.shapes = [tuple(weight.shape[1:]) for weight in (w13, w2)]
        shape = (self.device, self.experts, self.all_experts, self.is_mapped, *self.shapes, chosen)
        self._pairs, self._known = _found.setdefault(shape, ({}, {}))

    def prepare(self, tokens: Iterable[int]) -> list[bool]:
        """Whether it is known for each of these numbers. Not while a graph is captured."""
        pairs = [(self._pair(count), count) for count in tokens]
        # The first number of each pair: the fewest tokens, if they ascend.
        wanted = {pair: count for pair, count in reversed(pairs) if pair not in self._known}
        counts = list(wanted.values()), [count * self.chosen for count in wanted.values()]
        orders = [
            prepare(self.device, self.shapes[which], rows, False, *self._products(which))
            for which, rows in enumerate(counts)
        ]
        both = (one.splits == other.splits == 1 for one, other in zip(*orders, strict=True))
        self._known |= zip(wanted, both, strict=True)
        return [self._known[pair] for pair, _ in pairs]

    def is_known(self, tokens: int) -> bool:
        pair = self._pair(tokens)
        if pair not in self._known:
            if torch.cuda.is_current_stream_capturing():
                return False
            self.prepare([tokens])
        return self._known[pair]

    def _block(self, tokens: int) -> int | None:
        slots = tokens * self.chosen
        return _block(self.kernels, slots, self.all_experts, self.experts, self.is_mapped)

    def _pair(self, tokens: int) -> _Pair:
        if tokens not in self._pairs:
            self._pairs[tokens] = self._find_pair(tokens)
        return self._pairs[tokens]

    def _find_pair(self, tokens: int) -> _Pair:
        w1, w2 = ((self.experts, *shape) for shape in self.shapes)
        dtype = self.config[1].config_name(torch.bfloat16)
        config = _configuration(w1, w2, self.chosen, dtype, tokens)
        return config, tokens * self.chosen % 16 == 0, self._block(tokens)

    def _products(self, which: int) -> tuple[Framework, Kernels]:
        """One of vLLM's two products with experts, and the kernels'."""
        of_others = f"{self.experts} experts of {self.shapes}, {self.chosen} chosen"
        name = f"product {which} with {of_others}, of {self.all_experts}, {_version()}"
        name += ", mapped" * self.is_mapped
        multiply = self._first if which == 0 else self._second
        return Framework(name, multiply), self._kernels(which)

    def _first(self, x: Tensor, w: Tensor, _: Tensor | None) -> Tensor:
        done = self._run(x, w, None, len(x))
        return done.first.view(len(x), self.chosen, -1)[:, 0]

    def _second(self, x: Tensor, w: Tensor, _: Tensor | None) -> Tensor:
        tokens = len(x) // self.chosen
        some = torch.zeros(tokens, self.shapes[0][1], dtype=x.dtype, device=x.device)
        return self._run(some, None, (x, w), tokens).second

    def _run(
        self, x: Tensor, w13: Tensor | None, second: tuple[Tensor, Tensor] | None, tokens: int
    ) -> _OneProduct:
        """vLLM looks at the number of experts. Nothing reads those after the first."""
        (up, hidden), (width, inner) = self.shapes
        w1, w2 = (x.new_empty(self.experts, *shape) for shape in self.shapes)
        if w13 is not None:
            w1[0] = w13
        if second is not None:
            w2[0] = second[1]
        runner = _OneProduct(*self.config)
        runner.x = x.new_empty(0) if second is None else second[0]
        ids = torch.zeros(tokens, self.chosen, dtype=torch.int32, device=x.device)
        slots, expert_map = tokens * self.chosen, None
        if self.is_mapped:
            expert_map = torch.arange(self.experts, dtype=torch.int32, device=x.device)
        runner.apply(
            x.new_empty(tokens, width),
            x,
            w1,
            w2,
            _factors(slots, x.device).view(tokens, self.chosen),
            ids,
            self.activation,
            self.experts,
            expert_map,
            None,
            None,
            x.new_empty(slots * max(inner, hidden)),
            x.new_empty(slots * max(up, width)),
            None,
            False,
        )
        return runner

    def _kernels(self, which: int) -> Kernels:
        def multiply(x: Tensor, packed: Any, _: Tensor | None, splits: int) -> Tensor | None:
            arrays, (part,) = packed
            kernels = grouped(arrays, part, 1, x.device.index)
            if splits != 1 or kernels is None or not kernels.keeps_order:
                return None
            y = x.new_empty(len(x), self.shapes[which][0])
            ids = torch.zeros(len(x), 1, dtype=torch.int32, device=x.device)
            block = self._block(len(x) if which == 0 else len(x) // self.chosen)
            factors = None if which == 0 else _factors(len(x), x.device)
            _multiply(kernels, x, _sort(ids, 1, None, block), factors, y)
            return y

        return multiply


def _configuration(
    w1: tuple[int, ...], w2: tuple[int, ...], chosen: int, dtype: str | None, tokens: int
) -> _Configuration:
    config = try_get_optimal_moe_config(w1, w2, chosen, dtype, tokens)
    return tuple(sorted(config.items()))


def _factors(count: int, device: torch.device) -> Tensor:
    """Weights of a router for slots."""
    return torch.linspace(0.03, 1.1, count, dtype=torch.float32, device=device)


@cache
def _version() -> str:
    libraries = ", ".join(f"{name} {metadata.version(name)}" for name in ("vllm", "triton"))
    tuned = os.environ.get("VLLM_TUNED_CONFIG_FOLDER", "")
    return f"{libraries} {tuned} {'batch invariant' * envs.VLLM_BATCH_INVARIANT}"
