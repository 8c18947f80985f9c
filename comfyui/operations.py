"""Layers of ComfyUI's models whose weights may stay compressed.

ComfyUI builds a model from a class of operations, which a node may replace. In the class here,
layers hold large weights as df11's compressed tensors: in memory, on the way to a GPU and back. A
product in BF16 reads compressed weights; everything else gets decoded values for one call.

```text
 file's mapping ──▶ GPU, as stored                        the layer stays there
                ──▶ GPU: decoded, LoRA added, packed      the same, with a LoRA or few rows of x
                ──▶ pinned memory ──each call──▶ GPU      the layer is offloaded
```

Packing compresses a weight in the fast layout. It takes a seventh more memory than the file's
encoding, and products with few rows of x need not decode it first.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import torch
from df11.torch import CompressedTensor, Gathered, pack
from torch import Tensor, nn
from torch.nn import functional

#: Products with up to this many rows of x are faster with a packed weight. These are the products
#: that modulate a diffusion model's blocks, a quarter of FLUX.1's weights.
FEW_ROWS = 16


class Held:
    """A layer whose weight may be compressed. As a base class it comes before a casting layer of
    ComfyUI."""

    weight: Any
    bias: Any
    weight_function: list[Any]
    bias_function: list[Any]
    #: The dtype that ComfyUI gave the layer; a compressed weight counts as one of it.
    weight_dtype: torch.dtype
    #: Its LoRA, see `patching.Patch`. Each use of a compressed weight applies it, unless the weight
    #: was packed with it.
    patch: Any = None
    #: The compressed weight while `open` holds another one.
    closed: CompressedTensor | None = None
    #: Memory for ComfyUI to copy an offloaded weight from, and what finds the weight in it.
    pinned: tuple[nn.Parameter, Gathered] | None = None
    #: The weight as it was loaded, which costs no memory: it lies in the file's mapping.
    host: CompressedTensor | None = None
    #: Whether one of its products had few rows of x.
    is_few = False
    #: Tells ComfyUI how many bytes more the layer takes on the GPU.
    grow: Callable[[int], None] | None = None
    #: Whether the weight keeps the dtype of its file for code that reads it past the layer, as all
    #: weights do with ComfyUI's dynamic VRAM.
    is_unrounded = False

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
            value = decoded(value)
            value = value if self.is_unrounded else value.to(self.weight_dtype)
        self.weight = nn.Parameter(value, requires_grad=False)

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether a weight of this dtype can stay compressed, and is cast in each call."""
        return self.weight_dtype in (torch.bfloat16, torch.float32, torch.float16)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves the layer. A compressed weight that returns to the host is again that of the
        file."""
        weight = self.weight
        if self.closed is not None:
            self.closed = self._moved(self.closed, fn).detach()
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
        before = self.weight_dtype
        probe = fn(torch.empty(0, dtype=before, device=weight.device))
        self.weight_dtype = probe.dtype
        is_as_asked = probe.dtype == before or not has_lora(weight)
        if probe.device == weight.device and is_as_asked:
            return weight
        return self._original(probe.device)

    def _original(self, device: torch.device) -> nn.Parameter:
        """The weight of the file."""
        return nn.Parameter(on_device(self.host, device), requires_grad=False)

    @property
    def is_packed(self) -> bool:
        """Whether the weight was compressed with its LoRA."""
        return has_lora(self.weight)

    def pack(self, patch: Any, device: torch.device) -> None:
        """Adds a LoRA, if there is one, to the weight on a GPU, and compresses the sum there, once.
        The weight stays unchanged if the sum cannot be compressed, or if memory is short.
        """
        if patch is None and is_fast(self.weight):
            return
        try:
            original = on_device(self.host if self.is_packed else self.weight, device)
            dense = original.decode().to(self.weight_dtype)
            packed = pack(dense if patch is None else patch(dense))
        except comfy.model_management.OOM_EXCEPTION:
            return
        if packed is not None:
            self.weight = nn.Parameter(packed, requires_grad=False)
            self.weight.is_fast, self.weight.has_lora = True, patch is not None

    def unpatch(self) -> None:
        self.patch = None
        if self.is_packed:
            self.weight = self._original(self.weight.device)

    def pin(self, device: torch.device) -> bool:
        """Copies the weight to pinned memory for a GPU, if ComfyUI's settings and limits allow
        that."""
        management = comfy.model_management
        if management.MAX_PINNED_MEMORY <= 0:
            return False
        gathered = Gathered(self.host, device)
        memory = nn.Parameter(whole_pages(gathered.nbytes), requires_grad=False)
        # Many threads get pages by writing to them; the driver would get them one after the other.
        gathered.fill(memory.data)
        if not management.pin_memory(memory):
            return False
        self.pinned = memory, gathered
        return True

    def unpin(self) -> None:
        comfy.model_management.unpin_memory(self.pinned[0])
        self.pinned = None

    @contextmanager
    def brought(self, device: torch.device) -> Iterator[tuple[Any, Tensor | None]]:
        """The weight and the bias on a device, for one call. ComfyUI's streams copy offloaded
        weights while the GPU computes with others.
        """
        weight, bias = self.weight, self.bias
        if weight.device == device and (bias is None or bias.device == device):
            yield weight, bias
            return
        management = comfy.model_management
        stream = management.get_offload_stream(device)
        with torch.cuda.stream(stream):
            weight = self._copied(device)
            bias = None if bias is None else bias.to(device, non_blocking=True)
        management.sync_stream(device, stream)
        try:
            yield weight, bias
        finally:
            if stream is not None:  # whose next copies get the same memory
                stream.wait_stream(management.current_stream(device))

    def _copied(self, device: torch.device) -> Any:
        memory, gathered = self.pinned or (None, None)
        if gathered is None or gathered.device != device or self.weight.device == device:
            return on_device(self.weight, device)
        return gathered.within(memory.data.to(device, non_blocking=True))

    @contextmanager
    def cast(
        self, device: torch.device, dtype: torch.dtype | None
    ) -> Iterator[tuple[Any, Tensor | None]]:
        """The weight and the bias for a call. The weight is compressed if nothing changes it."""
        with self.brought(device) as (weight, bias):
            if self.is_changed or {dtype, self.weight_dtype} - {weight.dtype, None}:
                weight = self.changed(weight, dtype)
            if bias is not None:
                bias = bias.to(dtype=dtype)
                for function in self.bias_function:
                    bias = function(bias)
            yield weight, bias

    @property
    def is_changed(self) -> bool:
        """Whether a use changes the weight."""
        return bool(self.weight_function) or (self.patch is not None and not self.is_packed)

    def changed(self, weight: Any, dtype: torch.dtype | None) -> Tensor:
        """The weight as one use needs it."""
        weight = self.patched(weight)
        weight = weight if dtype is None else weight.to(dtype)
        for function in self.weight_function:
            weight = function(weight)
        return weight

    def patched(self, weight: Any) -> Tensor:
        """The weight that ComfyUI would have loaded, with its LoRA."""
        dense = decoded(weight).to(self.weight_dtype)
        return dense if self.patch is None or self.is_packed else self.patch(dense)

    def open(self) -> None:
        """Holds the decoded weight, which may be written to, until `close`."""
        if self.is_compressed:
            self.closed = self.weight.detach()
            self.weight = nn.Parameter(self.patched(self.weight), requires_grad=False)

    def close(self) -> None:
        """Drops a weight that `open` decoded, and whatever was written to it."""
        if self.closed is not None:
            self.weight = nn.Parameter(self.closed, requires_grad=False)
            self.closed = None

    def forward_comfy_cast_weights(self, *args: Any, **kwargs: Any) -> Tensor:
        if not self.is_compressed:
            return super().forward_comfy_cast_weights(*args, **kwargs)  # type: ignore[misc]
        try:
            return self.compute(*args, **kwargs)
        except comfy.model_management.OOM_EXCEPTION:
            pass
        # Memory that streams have freed may be in pieces. It is joined while the GPU does nothing.
        comfy.model_management.soft_empty_cache()
        return self.compute(*args, **kwargs)

    def compute(self, x: Tensor, **kwargs: Any) -> Tensor:
        raise NotImplementedError


class HeldLinear(Held):
    """A linear layer: its product reads a compressed weight."""

    def compute(self, x: Tensor, **kwargs: Any) -> Tensor:
        self._pack_if_few(x)
        with self.cast(x.device, x.dtype) as (weight, bias):
            return functional.linear(x, weight, bias)

    def _pack_if_few(self, x: Tensor) -> None:
        """Packs the weight for the first product with few rows of x, if it is on the GPU. Later it
        is packed while it is loaded.
        """
        if self.is_few or x.numel() > FEW_ROWS * x.shape[-1]:
            return
        weight = self.weight
        if self.grow is None or self.is_changed or is_fast(weight):
            return
        is_there = weight.is_cuda and weight.device == x.device
        if is_there and weight.dtype == torch.bfloat16 and not is_recorded():
            self.is_few = True
            self.pack(None, weight.device)
            self.grow(self.weight.nbytes - weight.nbytes)


class HeldConv(Held):
    """A convolution, which gets a decoded weight."""

    def compute(self, x: Tensor, **kwargs: Any) -> Tensor:
        with self.cast(x.device, x.dtype) as (weight, bias):
            dense = decoded(weight)
            return self._conv_forward(x, dense, bias, **kwargs)  # type: ignore[attr-defined]


class HeldEmbedding(Held):
    """An embedding; only the requested rows are decoded."""

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
        layer's dtype would round must be rounded, except with dynamic VRAM.
        """
        return super().keeps(dtype) and (
            self.is_unrounded or self.weight_dtype in (dtype, torch.float32)
        )

    def forward_comfy_cast_weights(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.weight.dtype == self.weight_dtype:
            return super().forward_comfy_cast_weights(*args, **kwargs)
        return self.compute(*args, **kwargs)

    def compute(self, x: Tensor, out_dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        with self.brought(x.device) as (weight, _):
            weight = self.changed(weight, None) if self.is_changed else weight
            rows = functional.embedding(x, weight, self.padding_idx).to(self.weight_dtype)
        return rows if out_dtype is None else rows.to(out_dtype)


HELD: dict[str, type[Held]] = {
    "Linear": HeldLinear,
    "Conv1d": HeldConv,
    "Conv2d": HeldConv,
    "Conv3d": HeldConv,
    "Embedding": HeldEmbedding,
}


def operations(base: Any, unrounded: bool = False) -> Any:
    """The class `base` of operations, with layers that hold compressed weights. Embeddings are
    `unrounded` for dynamic VRAM.
    """
    layers: dict[str, Any] = {
        name: type(name, (held, getattr(base, name)), {}) for name, held in HELD.items()
    }
    layers["Embedding"].is_unrounded = unrounded
    return type("Df11Operations", (base,), layers)


def compressed_layers(model: nn.Module) -> Iterator[tuple[str, Held]]:
    """The layers of a model that hold compressed weights, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, Held) and module.host is not None:
            yield name, module


def decoded(value: Tensor) -> Tensor:
    """An ordinary tensor of the same values."""
    return value.decode() if isinstance(value, CompressedTensor) else value


def has_lora(weight: Tensor) -> bool:
    """Whether `Held.pack` made the weight with a LoRA."""
    return getattr(weight, "has_lora", False)


def is_fast(weight: Tensor) -> bool:
    """Whether `Held.pack` made the weight."""
    return getattr(weight, "is_fast", False)


def is_recorded() -> bool:
    """Whether PyTorch compiles or captures what runs, so that nothing may change."""
    return torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing()


def whole_pages(nbytes: int) -> Tensor:
    """Memory on pages that nothing else shares, because pages are pinned as a whole."""
    room = torch.empty(nbytes + 2 * mmap.PAGESIZE, dtype=torch.uint8)
    return room[-room.data_ptr() % mmap.PAGESIZE :][:nbytes]


def on_device(weight: Any, device: torch.device) -> Any:
    """The weight on this device. A compressed weight is moved as compressed bytes."""
    return weight if weight.device == device else weight.to(device, non_blocking=True)
