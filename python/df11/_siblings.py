"""One product for layers of a module that share x, such as queries, keys and values, or gate and
up.

df11 finds these layers in the source of the module's `forward` when the module is loaded
(`_forwards`), and never learns them from calls: a product does not depend on earlier calls. The
module then gets a subclass with another `forward`, which calls `multiply` in place of the first of
these layers. `multiply` returns None for replaced layers, hooks, gradients, the CPU, and many rows
of x; then each layer is called where it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, wraps
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._device import DeviceContext

from . import _ops
from ._forwards import (
    Callee,
    Held,
    Siblings,
    child_of,
    function_held,
    has_plain_names,
    rewritten,
    siblings_of,
)
from ._matrices import MULTIPLIED, PART
from ._modules import join
from ._tensor import PLAIN, CompressedTensor, is_at_once

#: Devices on which kernels multiply by several matrices at once.
DEVICES = ("cuda",)
#: Rows of x up to which one launch for several matrices takes less time than one each.
MAX_ROWS = 64
#: Functions that a call of a linear layer runs, unless they were exchanged.
_FORWARD, _CALL, _LINEAR = nn.Linear.forward, nn.Module.__call__, functional.linear


def join_siblings(root: nn.Module) -> None:
    """Makes all its modules multiply by siblings at once."""
    for module in root.modules():
        _join(module)


def joined_siblings(root: nn.Module) -> Iterator[tuple[str, ...]]:
    """The current names of the layers of each joint product, if x has few rows."""
    for path, module in root.named_modules():
        for siblings in _known(module):
            if _is_plain(module, siblings):
                weights, _ = _parameters(module, siblings)
                if weights and _is_alike(weights) and weights[0]._place.type in DEVICES:
                    yield tuple(join(path, layer.name) for layer in siblings.layers)


def _known(module: nn.Module) -> tuple[Siblings, ...]:
    siblings: tuple[Siblings, ...] = vars(type(module)).get("_df11_siblings", ())
    return siblings


def _join(module: nn.Module) -> None:
    kind: Any = type(module)
    layers = [name for name, layer in module._modules.items() if _is_compressed(layer)]
    if "forward" in vars(module) or _known(module) or not _is_simple(kind):
        return
    if siblings := siblings_of(module, layers):
        module.__class__ = _joined(kind, kind.forward, siblings)


def _is_compressed(layer: nn.Module | None) -> bool:
    return type(layer) is nn.Linear and isinstance(layer.weight, CompressedTensor)


def _is_simple(kind: type[nn.Module]) -> bool:
    """Whether a subclass can be made without side effects, and its objects can be pickled."""
    own = all("__init_subclass__" not in vars(base) for base in kind.__mro__[:-1])
    made = (kind.__new__, kind.__reduce__, kind.__reduce_ex__)
    is_made = made == (object.__new__, object.__reduce__, object.__reduce_ex__)
    is_read = has_plain_names(kind) and type(kind.forward) is FunctionType
    return own and type(kind) is type and is_made and is_read and not hasattr(kind, "__deepcopy__")


@lru_cache(maxsize=1 << 10)
def _joined(kind: Any, forward: Any, all_siblings: tuple[Siblings, ...]) -> type[nn.Module]:
    """A class whose modules multiply by siblings at once, until its forward is changed."""
    if (together := rewritten(forward, all_siblings, multiply)) is None:
        return cast(type[nn.Module], kind)

    @wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (together if kind.forward is forward else kind.forward)(self, *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        if type(self) is not made:
            return object.__reduce_ex__(self, protocol)
        state: tuple[Any, ...] = object.__reduce_ex__(self, max(protocol, 2))[2:]  # type: ignore[assignment]
        return _revive, (kind,), *state

    attributes = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    added = {"forward": run, "__reduce_ex__": reduce, "_df11_siblings": all_siblings}
    made: type[nn.Module] = type(kind.__name__, (kind,), attributes | added)
    return made


def _revive(kind: Any) -> nn.Module:
    """Makes an object without state. Its source is read again when it has its layers."""
    made = _reviving(kind)
    return made.__new__(made)


@lru_cache(maxsize=1 << 10)
def _reviving(kind: Any) -> type[nn.Module]:
    def set_state(self: nn.Module, state: dict[str, Any]) -> None:
        self.__class__ = kind
        self.__setstate__(state)  # type: ignore[no-untyped-call]
        _join(self)

    return type(kind.__name__, (kind,), {"__setstate__": set_state})


def multiply(module: nn.Module, x: Tensor, siblings: Siblings) -> Sequence[Tensor] | None:
    """The products of x with all siblings; None if each must be multiplied separately."""
    if not isinstance(x, Tensor) or x.device.type not in DEVICES or _is_watched():
        return None
    if not _is_plain(module, siblings):
        return None
    weights, biases = _parameters(module, siblings)
    if not weights or (torch.is_grad_enabled() and (x.requires_grad or _require_grad(biases))):
        return None
    if torch.compiler.is_compiling():
        if torch.is_autocast_enabled(x.device.type):
            return None
        made: Sequence[Tensor] = torch.ops.df11._each_linear(x, weights, biases)
        return made
    is_plain = all(bias is None or type(bias) in PLAIN for bias in biases)
    if not (is_plain and _is_alike(weights) and is_at_once(x, weights[0], biases[0])):
        return None
    if x.dtype is not torch.bfloat16 or not _has_few_rows(x):
        return None
    return _ops.linears(x, *_arguments(weights, biases))


def _has_few_rows(x: Tensor) -> bool:
    return x.dim() > 0 and x.shape.numel() <= MAX_ROWS * x.shape[-1]


def _is_watched() -> bool:
    """Whether a mode intercepts functions, except the mode for the device of new tensors."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in modes)


def _require_grad(biases: Sequence[Tensor | None]) -> bool:
    return any(bias is not None and bias.requires_grad for bias in biases)


def _parameters(module: Any, siblings: Siblings) -> tuple[list[Any], list[Any]]:
    """Weights and biases, read faster than through the layers. Empty if they are no longer
    parameters.
    """
    parameters = [module._modules[layer.name]._parameters for layer in siblings.layers]
    if not all("weight" in one and "bias" in one for one in parameters):
        return [], []
    return [one["weight"] for one in parameters], [one["bias"] for one in parameters]


def _is_plain(module: nn.Module, siblings: Siblings) -> bool:
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return False
    if nn.Linear.forward is not _FORWARD or functional.linear is not _LINEAR:
        return False
    several = (*siblings.layers, *siblings.between)
    return all(_is_as_read(child_of(module, layer.name), layer) for layer in several) and (
        all(_is_held(module, held) for held in siblings.functions)
    )


def _is_held(module: nn.Module, held: Held) -> bool:
    """Whether a layer still calls a function that was read. Partial ones are tuples here."""
    layer = child_of(module, held.layer)
    current = None if layer is None else function_held(layer, held.name)
    is_partial = type(current) is tuple and type(held.function) is tuple
    return current is held.function or (is_partial and current == held.function)


def _is_as_read(current: nn.Module | None, layer: Callee) -> bool:
    """Whether a layer still does the same as when the source was read, and nothing else."""
    if type(current) is not layer.kind or layer.kind.forward is not layer.forward:
        return False
    attributes = current.__dict__
    if "forward" in attributes or layer.kind.__call__ is not _CALL:
        return False
    return not (
        attributes.get("inplace")
        or attributes.get("_compiled_call_impl")
        or attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
    )


def _is_alike(weights: Sequence[Any]) -> bool:
    """Whether one product can take them. Streamed weights would be in memory together."""
    return all(
        type(one) is CompressedTensor
        and one.flat_parts[0] in MULTIPLIED
        and one.is_matrix
        and not one.is_streamed
        and one.exact == weights[0].exact
        and one._place == weights[0]._place
        for one in weights
    )


def _arguments(weights: Sequence[Any], biases: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Arguments of `df11::linears` for them, besides x."""
    arrays = [array for one in weights for array in one._arrays]
    parts = [number for one in weights for number in one.flat_parts]
    counts = [len(one.flat_parts) // PART for one in weights]
    some = next((bias for bias in biases if bias is not None), None)
    added = (
        [some.new_empty(0) if one is None else one for one in biases] if some is not None else []
    )
    return arrays, parts, counts, added, weights[0].exact


_ops.library.define(  # type: ignore[no-untyped-call]
    "_each_linear(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _each_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> Sequence[Tensor]:
    """Products with weights that may be compressed, for siblings in a graph."""
    if _is_alike(weights):
        made: Sequence[Tensor] = torch.ops.df11.linears(x, *_arguments(weights, biases))
        return made
    return [functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]


_ops.library.impl(  # type: ignore[no-untyped-call]
    "_each_linear", _each_linear, "CompositeImplicitAutograd"
)
