"""FP8 checkpoints: vLLM's own method multiplies, and weights are compressed between its products.

```text
 create_weights                 an FP8 weight becomes a target (`_deferred`), as any other
 process_weights_after_loading  the layer's weights are decoded, vLLM processes them, and compressed
                                ones take their place again if they give the bytes that vLLM left
 apply                          an operator decodes the layer's weights, of a mixture those of the
                                experts that the router chose, into memory that is free again after
                                the product
```

vLLM keeps the bytes of weights, or requantizes them: each block of weights for a scale that is a
power of two (DeepGEMM), or merged matrices for one common scale. Requantizing maps equal bytes of a
block to equal bytes, so a table of 256 bytes for each block turns decoded bytes into vLLM's.
Weights that vLLM shuffles or pads stay uncompressed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import set_weight_attrs

from .._dispatch import Compressed, dense
from .._plan import whole_bytes
from .._tensor import CompressedTensor
from .._wrapping import wrap_listed
from ._deferred import Target
from ._layers import (
    FP8,
    NAMES,
    Df11EmbeddingMethod,
    Df11LinearMethod,
    Options,
    defer,
    finish,
)
from ._operators import BLOCK, release, replace, weight_of

logger = init_logger("vllm.plugins.df11")

#: Subclasses of vLLM's classes, by what is changed in them.
_subclasses: dict[tuple[type, type], Any] = {}
#: Quantization methods of vLLM whose FP8 weights stay compressed.
METHODS = ("fp8", "compressed-tensors")
#: Weights of which the tables of blocks are made at once; this takes 9 bytes for each.
_AT_ONCE = 1 << 24
_WARM_UP = "vllm.model_executor.warmup.deep_gemm_warmup:_deepgemm"


def keep_compressed(config: Any) -> Options:
    """Makes a quantization config of vLLM keep weights compressed: weights in FP8, and those in
    BF16 by the options that it returns.
    """
    if not isinstance(config, _Config):
        config.__class__ = _subclass(_Config, type(config))
        config.df11 = Options()
    if torch.cuda.is_available():
        wrap_warm_up()
    options: Options = config.df11
    return options


def wrap_warm_up() -> bool:
    """Makes DeepGEMM compile its kernels with products of decoded weights. Returns false, and does
    nothing, if a release warms up in another way.
    """
    kinds = ("fp8_gemm_nt", "grouped_fp8_gemm_nt_contiguous")
    return wrap_listed({f"{_WARM_UP}_{kind}_warmup": _with_decoded for kind in kinds})


def _subclass(mixin: type, kind: type) -> Any:
    if (mixin, kind) not in _subclasses:
        # vLLM compares names of classes.
        made = type(kind.__name__, (mixin, kind), {"__module__": __name__})
        _subclasses[mixin, kind] = made
    return _subclasses[mixin, kind]


def _with_decoded(call: Any, arguments: dict[str, Any]) -> Any:
    return call.func(**{name: dense(value) for name, value in arguments.items()})


class _Config(QuantizationConfig):
    """A base of a new class, before a config class of vLLM. The classes below are bases in the same
    way, before method classes.

    `super` has arguments, because torch.compile follows some of the calls: from Python 3.12 on it
    knows `super()` alone only if an attribute follows at once.
    """

    df11: Options

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        vllm: Any = super(_Config, self)  # noqa: UP008
        method = vllm.get_quant_method(layer, prefix)
        if isinstance(layer, GateLinear):
            return method
        if isinstance(layer, VocabParallelEmbedding) and method is None:
            return Df11EmbeddingMethod(self.df11)
        if isinstance(layer, LinearBase):
            if type(method) is UnquantizedLinearMethod:
                return Df11LinearMethod(self.df11)
            method.__class__, method.df11 = _subclass(_Linear, type(method)), self.df11
        elif isinstance(layer, RoutedExperts):
            if isinstance(method, UnquantizedFusedMoEMethod):
                return method
            method.__class__, method.df11 = _subclass(_Experts, type(method)), self.df11
        return method


class Shown(Compressed):
    """A weight that vLLM has processed, for code that reads it outside of products, such as that of
    latent attention: it is decoded for each operator.
    """

    decode: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, like: Tensor, decode: Callable[[], Tensor]) -> Shown:
        lies: Any = {"strides": like.stride(), "dtype": like.dtype, "device": like.device}
        made: Shown = torch.Tensor._make_wrapper_subclass(cls, like.shape, **lies)
        made.decode = decode
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Shown, lambda each: each.decode(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Shown(shape={tuple(self.shape)}, {self.dtype})"


class _View(NamedTuple):
    """The view by which a layer of vLLM holds a weight whose matrix is decoded."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_transposed: bool


class _StandIn:
    """Stands in for a layer of vLLM in a product, with decoded weights."""

    def __init__(self, layer: Any, weights: dict[str, Tensor]) -> None:
        self._layer = layer
        for name, weight in weights.items():
            setattr(self, name, weight)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _with_weights(layer: Any, *choices: Tensor | None) -> Any:
    """A layer for a product, in which compressed weights are decoded, of experts the chosen ones:
    choices are the operator's."""
    views: dict[str, _View] = layer.df11_views
    if not views:
        return layer
    decoded = {name: _decoded(layer, name, view, *choices) for name, view in views.items()}
    return _StandIn(layer, decoded)


def _decoded(layer: Any, name: str, view: _View, *choices: Tensor | None) -> Tensor:
    key, columns = getattr(layer, f"{name}_key"), getattr(layer, f"{name}_columns")
    rows = getattr(layer, f"{name}_rows")
    weight: Tensor = torch.ops.df11_vllm.decode(key, rows, columns, view.dtype, *choices)
    return weight.t() if view.is_transposed else weight.view(view.shape)


class _Method(QuantizeMethodBase):
    df11: Options

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        vllm: Any = super(_Method, self)  # noqa: UP008
        vllm.create_weights(layer, *args, **kwargs)
        for name in NAMES:
            if (told := _attributes(layer, weight := layer._parameters.get(name))) is not None:
                # The weight's memory serves the next layer.
                target = Target(weight.shape, weight.dtype, weight.device)
                set_weight_attrs(defer(layer, name, target), told)

    def process_weights_after_loading(self, layer: Any) -> None:
        for name in NAMES:
            finish(layer, name, self.df11)
        some = {name: layer.__dict__.get(name) for name in NAMES}
        held = {name: each for name, each in some.items() if isinstance(each, CompressedTensor)}
        for name, weight in held.items():
            del layer.__dict__[name]
            layer.register_parameter(name, _parameter(weight.decode()))
        super().process_weights_after_loading(layer)
        layer.df11_views, layer.df11_changed = {}, []
        for name, weight in held.items():
            _keep(layer, name, weight)


class _Linear(_Method):
    def apply(self, layer: Any, x: Any, bias: Tensor | None = None) -> Tensor:
        vllm: Any = super(_Linear, self)  # noqa: UP008
        return cast(Tensor, vllm.apply(_with_weights(layer), x, bias))


class _Experts(_Method):
    #: The mixture's config, which the method of vLLM sets.
    moe: Any

    @property
    def supports_eplb(self) -> bool:
        """False: vLLM would move parameters between ranks, and compressed weights are not
        parameters."""
        return False

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        vllm: Any = super(_Experts, self)  # noqa: UP008
        # Elsewhere tokens of other ranks come later, and choose experts too.
        ranks = self.moe.moe_parallel_config
        is_alone = ranks.dp_size == ranks.pcp_size == 1 and not ranks.use_all2all_kernels
        alone = is_alone and ranks.all2all_backend != "passthrough"
        choices = (topk_ids, layer.expert_map) if alone else ()
        decoded = _with_weights(layer, *choices)
        return vllm.apply(decoded, x, topk_weights, topk_ids, *args, **kwargs)

    def apply_monolithic(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        vllm: Any = super(_Experts, self)  # noqa: UP008
        return vllm.apply_monolithic(_with_weights(layer), *args, **kwargs)


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def _attributes(layer: Any, weight: Any) -> dict[str, Any] | None:
    """The attributes of an FP8 weight that loading code reads; None for a weight that is not
    recorded."""
    if weight is None or weight.dtype not in FP8:
        return None
    if type(weight) is nn.Parameter:
        return dict(vars(weight))
    if type(weight) is not ModelWeightParameter or not hasattr(layer, "weight_loader"):
        return None
    # The parameter's own methods load it otherwise, and a target has none.
    dims = {"input_dim": weight.input_dim, "output_dim": weight.output_dim}
    return {**dims, "weight_loader": layer.weight_loader}


def _keep(layer: Any, name: str, weight: CompressedTensor) -> None:
    """Replaces vLLM's weight by a compressed one if both have the same values, or if a table gives
    vLLM's.
    """
    made, key = layer._parameters.get(name), getattr(layer, f"{name}_key")
    view = None if made is None else _view(made, weight)
    if view is not None:
        table = _table(weight.decode(), made.t() if view.is_transposed else made)
        decode = partial(_decoded, weakref.proxy(layer), name, view)
        shown = layer.__dict__[name] = Shown(made, decode)
        experts = view.shape[0] if len(view.shape) > 2 else 0
        replace(key, shown, table, experts)
        del layer._parameters[name]
        if torch.equal(_bytes(decode()), _bytes(made)):
            layer.df11_views[name] = view
            return
        del layer.__dict__[name]
        layer.register_parameter(name, made)
    release(key)
    layer.register_parameter(f"{name}_key", None)
    layer.df11_changed.append(name)


def _view(made: Tensor, weight: CompressedTensor) -> _View | None:
    if made.dtype != weight.dtype:
        return None
    for is_transposed in (False, True) if made.dim() == 2 else (False,):
        layout = made.t() if is_transposed else made
        if layout.shape == weight.shape and layout.is_contiguous():
            return _View(tuple(layout.shape), made.dtype, is_transposed)
    return None


def _bytes(value: Tensor) -> Tensor:
    return value.view(torch.uint8)


def _table(old: Tensor, new: Tensor) -> Tensor | None:
    """For each block, by rows of blocks: the byte that each byte of `old` has become (any of them
    if it has become several). None if all are the same, or if a side is not a multiple of a
    block's.
    """
    before, after = (_bytes(value).view(-1, value.shape[-1]) for value in (old, new))
    if torch.equal(before, after) or any(side % BLOCK for side in before.shape):
        return None
    step = max(1, _AT_ONCE // (BLOCK * before.shape[1])) * BLOCK
    tables = []
    for some, others in zip(before.split(step), after.split(step), strict=True):
        places, values = _in_blocks(some).long(), _in_blocks(others)
        tables.append(values.new_zeros(len(values), 256).scatter_(1, places, values))
    return torch.cat(tables)


def _in_blocks(matrix: Tensor) -> Tensor:
    blocks = matrix.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    return blocks.transpose(1, 2).reshape(-1, BLOCK * BLOCK)


def log_weights(model: nn.Module) -> None:
    """Says how many FP8 weights are compressed, and how many are not."""
    held, changed = [*_held(model)], dict(_changed(model))
    parameters = model.named_parameters()
    others = [one for name, one in parameters if one.dtype in FP8 and name not in changed]
    whole = sum(map(whole_bytes, held))
    logger.info(
        "df11: %d FP8 weights are compressed, %s bytes of %s; each product decodes its own",
        *(len(held), f"{sum(weight._nbytes for weight in held):,}", f"{whole:,}"),
    )
    if changed:
        logger.warning(
            "df11: %d FP8 weights stay uncompressed, %s bytes, because vLLM shuffles or pads them "
            "for its kernels (such as %s); --moe-backend triton and --linear-backend cutlass leave "
            "weights in place",
            *(len(changed), f"{_sum(changed.values()):,}", next(iter(changed))),
        )
    if others:
        logger.info(
            "df11: %d other FP8 weights are uncompressed, %s bytes: they are small, stored so, or "
            "of a layer that is loaded otherwise",
            *(len(others), f"{_sum(others):,}"),
        )


def _sum(values: Iterable[Tensor]) -> int:
    return sum(value.nbytes for value in values)


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((path, each) for path, each in model.named_modules() if hasattr(each, "df11_views"))


def _held(model: nn.Module) -> Iterable[CompressedTensor]:
    for _, layer in _layers(model):
        for name in layer.df11_views:
            yield weight_of(getattr(layer, f"{name}_key"))


def _changed(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for path, layer in _layers(model):
        for name in layer.df11_changed:
            if (value := getattr(layer, name, None)) is not None:
                yield f"{path}.{name}", value
