"""Layers of ComfyUI's models whose weights may stay compressed.

ComfyUI builds a model from a class of operations, and a node may give it another one. Here the
layers with large weights hold these as df11's compressed tensors: in memory, on the way to a GPU
and back. A product in BF16 reads them compressed; everything else gets decoded values for one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from df11.torch import CompressedTensor
from torch import Tensor, nn
from torch.nn import functional


class Held:
    """A layer whose weight may be compressed. Goes before a layer of ComfyUI that casts."""

    weight: Any
    bias: Any
    weight_function: list[Any]
    bias_function: list[Any]
    #: The dtype that ComfyUI gave the layer; a compressed weight counts as one of it.
    weight_dtype: torch.dtype
    #: A LoRA, which every use of a compressed weight applies anew; see `patching.Patch`.
    patch: Any = None
    #: The weight as it was loaded, which costs no memory: it lies in the file's mapping.
    host: CompressedTensor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight_dtype = self.weight.dtype
        # Loading replaces it, so it has no memory until then.
        self.weight = nn.Parameter(self.weight.to("meta"), requires_grad=False)

    @property
    def is_compressed(self) -> bool:
        return isinstance(self.weight, CompressedTensor)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *lists: Any
    ) -> None:
        missing, key = lists[0], f"{prefix}weight"
        value = state_dict.get(key)
        if value is None:
            value = torch.zeros(self.weight.shape, dtype=self.weight_dtype)
            missing.append(key)
        elif value.shape != self.weight.shape:
            self._others_from(dict(state_dict), prefix, metadata, strict, *lists)
            return
        self._hold(value)
        others = {name: other for name, other in state_dict.items() if name != key}
        before = missing.count(key)
        self._others_from(others, prefix, metadata, strict, *lists)
        while missing.count(key) > before:
            missing.remove(key)

    def _others_from(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)  # type: ignore[misc]

    def _hold(self, value: Tensor) -> None:
        # F32 that ComfyUI runs in 16 bits takes less when it is cast once.
        most = value.numel() * self.weight_dtype.itemsize
        is_small = isinstance(value, CompressedTensor) and value.nbytes <= most
        if is_small and self.keeps(value.dtype):
            self.host = value
        else:
            self.host = None
            value = decoded(value).to(self.weight_dtype)
        self.weight = nn.Parameter(value, requires_grad=False)

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether a weight of this dtype can stay compressed, and is cast in each call."""
        return self.weight_dtype in (torch.bfloat16, torch.float32, torch.float16)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves the layer. A compressed weight that returns to the host is the one of the file."""
        weight = self.weight
        if not (self.is_compressed or weight.is_meta):
            return super()._apply(fn, recurse)  # type: ignore[misc]
        parameters = self._parameters  # type: ignore[attr-defined]
        parameters["weight"] = None
        try:
            super()._apply(fn, recurse)  # type: ignore[misc]
            weight = weight if weight.is_meta else self._moved(weight, fn)
        finally:
            parameters["weight"] = weight
        return self

    def _moved(self, weight: Any, fn: Any) -> nn.Parameter:
        probe = fn(torch.empty(0, dtype=self.weight_dtype, device=weight.device))
        self.weight_dtype = probe.dtype
        if probe.device == weight.device:
            return weight
        return nn.Parameter(on_device(self.host, probe.device), requires_grad=False)

    def cast(self, device: torch.device, dtype: torch.dtype | None) -> tuple[Any, Tensor | None]:
        """The weight and the bias for a call. The weight is compressed if nothing changes it."""
        weight, bias = on_device(self.weight, device), self.bias
        if self.patch or self.weight_function or {dtype, self.weight_dtype} - {weight.dtype, None}:
            weight = self.patched(weight)
            weight = weight if dtype is None else weight.to(dtype)
            for function in self.weight_function:
                weight = function(weight)
        if bias is not None:
            bias = bias.to(device=device, dtype=dtype)
            for function in self.bias_function:
                bias = function(bias)
        return weight, bias

    def patched(self, weight: Any) -> Tensor:
        """The weight that ComfyUI would have loaded, with its LoRA."""
        dense = weight.decode().to(self.weight_dtype)
        return dense if self.patch is None else self.patch(dense)

    def open(self) -> None:
        """Holds the decoded weight, which may be written to, until `close`."""
        if self.is_compressed:
            self.weight = nn.Parameter(self.patched(self.weight), requires_grad=False)

    def close(self) -> None:
        """Drops a weight that `open` decoded, and whatever was written to it."""
        if self.host is not None and not self.is_compressed:
            held = on_device(self.host, self.weight.device)
            self.weight = nn.Parameter(held, requires_grad=False)

    def forward_comfy_cast_weights(self, *args: Any, **kwargs: Any) -> Tensor:
        if not self.is_compressed:
            return super().forward_comfy_cast_weights(*args, **kwargs)  # type: ignore[misc]
        return self.compute(*args, **kwargs)

    def compute(self, x: Tensor, **kwargs: Any) -> Tensor:
        raise NotImplementedError


class HeldLinear(Held):
    """A linear layer: its product reads a compressed weight."""

    def compute(self, x: Tensor, **kwargs: Any) -> Tensor:
        return functional.linear(x, *self.cast(x.device, x.dtype))


class HeldConv(Held):
    """A convolution, which gets a decoded weight."""

    def compute(self, x: Tensor, **kwargs: Any) -> Tensor:
        weight, bias = self.cast(x.device, x.dtype)
        return self._conv_forward(x, decoded(weight), bias, **kwargs)  # type: ignore[attr-defined]


class HeldEmbedding(Held):
    """An embedding, of which the rows that are asked for are decoded."""

    padding_idx: int | None
    max_norm: float | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.max_norm is not None:
            raise ValueError(
                "max_norm writes to the weight of an embedding, and a compressed one is not "
                "written to; load the model with ComfyUI's own loader"
            )

    def keeps(self, dtype: torch.dtype) -> bool:
        """Text encoders also read the weight of an embedding, past the layer: a weight that the
        layer's dtype would round must be rounded.
        """
        return self.weight_dtype in (dtype, torch.float32)

    def compute(self, x: Tensor, out_dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        weight = on_device(self.weight, x.device)
        if self.patch or self.weight_function:
            weight, _ = self.cast(x.device, None)
        rows = functional.embedding(x, weight, self.padding_idx).to(self.weight_dtype)
        return rows if out_dtype is None else rows.to(out_dtype)


HELD: dict[str, type[Held]] = {
    "Linear": HeldLinear,
    "Conv1d": HeldConv,
    "Conv2d": HeldConv,
    "Conv3d": HeldConv,
    "Embedding": HeldEmbedding,
}


def operations(base: Any) -> Any:
    """The class `base` of operations, of which those layers hold compressed weights."""
    layers = {name: type(name, (held, getattr(base, name)), {}) for name, held in HELD.items()}
    return type("Df11Operations", (base,), layers)


def compressed_layers(model: nn.Module) -> Iterator[tuple[str, Held]]:
    """The layers of a model that hold compressed weights, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, Held) and module.host is not None:
            yield name, module


def decoded(value: Tensor) -> Tensor:
    """An ordinary tensor of the same values."""
    return value.decode() if isinstance(value, CompressedTensor) else value


def on_device(weight: Any, device: torch.device) -> Any:
    """The weight on this device. A compressed one is moved as its bytes."""
    return weight if weight.device == device else weight.to(device, non_blocking=True)
