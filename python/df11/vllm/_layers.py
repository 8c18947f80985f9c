"""What a layer has of a weight: first a target, then compressed arrays or an ordinary parameter."""

from __future__ import annotations

from torch import Tensor, nn

from .._engine import CompressedTensor
from ._deferred import Deferred, Target
from ._operators import hold
from ._options import Options
from ._packing import pack

#: Weights that layers have: a matrix; experts.
NAMES = ("weight", "w13_weight", "w2_weight")


def defer(layer: nn.Module, name: str, target: Target) -> nn.Parameter:
    """Registers a parameter without memory."""
    target.complete = pack
    weight = nn.Parameter(target.tensor(), requires_grad=False)
    layer.register_parameter(name, weight)
    return weight


def target_of(layer: nn.Module, name: str) -> Target | None:
    """The target that a layer still has as its parameter."""
    weight = layer._parameters.get(name)
    if not isinstance(weight, Deferred):
        return None
    assert isinstance(weight.origin, Target)
    return weight.origin


def give(layer: nn.Module, name: str, value: Tensor, target: Target) -> None:
    """Replaces a target by what it became.

    A compressed weight is an attribute, which tells its shape, dtype and device to whoever looks,
    and no parameter: compiled code has its key.
    """
    del layer._parameters[name]
    key = None
    if isinstance(value, CompressedTensor):
        layer.__dict__[name] = value
        key = nn.Parameter(hold(value, target.rows - value.matrix_shape[0]), requires_grad=False)
    else:
        layer.register_parameter(name, nn.Parameter(value, requires_grad=False))
    layer.register_parameter(f"{name}_key", key)
    setattr(layer, f"{name}_rows", target.rows)
    setattr(layer, f"{name}_columns", target.columns)


def finish(layer: nn.Module, name: str, options: Options) -> None:
    """Gives a layer a weight that came from elsewhere than a container.

    # Errors
    `ValueError` if the checkpoint lacks some of it.
    """
    target = target_of(layer, name)
    if target is None:
        return
    if target.value is None:
        where = (
            getattr(layer, "prefix", None) or getattr(layer, "layer_name", "") or str(type(layer))
        )
        target.ordered(where)
        raise RuntimeError(f"weights of {where} were read and not loaded")
    value = target.value
    if isinstance(value, CompressedTensor):
        value = value.with_mode(options.exact)
    give(layer, name, value, target)
