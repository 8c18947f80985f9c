"""ComfyUI's patcher for models with compressed weights.

ComfyUI adds a LoRA to the weights of a model when it loads the model to a GPU, and keeps the
original weights to restore them. Here the sum is computed with the same arithmetic, so that
products have the same bits, and is compressed on the GPU in the fast layout; the original stays in
its file. Some weights have no such sum: weights on the CPU, offloaded weights, weights used in a
dtype other than BF16, and weights with values that the layout cannot hold. Each use decodes such a
weight and adds the LoRA.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import ref

import comfy.float
import comfy.lora
import comfy.model_management
import comfy.utils
import torch
from comfy import model_patcher
from comfy.model_patcher import LowVramPatch, ModelPatcher
from torch import Tensor

from .operations import Held, compressed_layers, on_device

#: Bytes of modules, at most, to which ComfyUI adds a LoRA at once while others wait for their use.
SMALL_BYTES = 16 * 1024
#: Bytes of a weight that is compressed with its LoRA, in bytes of BF16, until they are counted.
PACKED = 0.76
LOADED = inspect.signature(ModelPatcher.load)
HOOKED = inspect.signature(ModelPatcher.patch_hook_weight_to_device)
CACHED = inspect.signature(ModelPatcher.patch_cached_hook_weights)


class Patch:
    """Computes the same sum of a weight and its LoRA as ComfyUI would."""

    def __init__(self, key: str, patches: Sequence[Any], late: torch.dtype | None) -> None:
        self.key, self.patches = key, patches
        #: The dtype of sums if they are those of a model that ComfyUI loads weight by weight
        #: (dynamic VRAM).
        self.late = late
        #: The device of the last call, and the patches with their matrices there.
        self._there: tuple[torch.device, Sequence[Any]] = (torch.device("cpu"), patches)

    def __call__(self, weight: Tensor) -> Tensor:
        patches = self.on(weight.device)
        if weight.is_cuda:
            # ComfyUI would log that memory is short, and leave the LoRA out.
            torch.empty(sum_bytes(weight, self.late), dtype=torch.uint8, device=weight.device)
        dtype = self.late or comfy.model_management.lora_compute_dtype(weight.device)
        between = self.late or torch.float32
        made = comfy.lora.calculate_weight(
            patches, weight.to(dtype), self.key, intermediate_dtype=between
        )
        return comfy.float.stochastic_rounding(made, weight.dtype)

    def on(self, device: torch.device) -> Sequence[Any]:
        """The patches, with their matrices on a device, where they stay."""
        if device != self._there[0]:
            self._there = device, [(p[0], moved(p[1], device), *p[2:]) for p in self.patches]
        return self._there[1]


def sum_bytes(weight: Tensor, late: torch.dtype | None) -> int:
    """Bytes that the sum of a weight and its LoRA takes besides the weight while it is computed."""
    if late is not None:
        return 2 * weight.numel() * late.itemsize
    return weight.numel() * (weight.itemsize + 3 * torch.float32.itemsize)


def lora_bytes(patches: Sequence[Any]) -> int:
    """Bytes of the matrices that `moved` copies."""
    found = [getattr(patch[1], "weights", ()) for patch in patches]
    return sum(each.nbytes for weights in found for each in weights if isinstance(each, Tensor))


def moved(value: Any, device: torch.device) -> Any:
    """Moves the matrices of a LoRA to a device. Other patches of a weight (another model, to merge)
    stay in place.
    """
    if not hasattr(value, "loaded_keys"):
        return value
    weights = [w.to(device) if isinstance(w, Tensor) else w for w in value.weights]
    return type(value)(value.loaded_keys, tuple(weights))


class Df11Patcher(ModelPatcher):
    """A patcher that moves weights as compressed bytes, and compresses sums with a LoRA."""

    #: Bytes of weights while they are loaded, by layer, as ComfyUI was told before.
    _told: dict[str, int] | None = None

    def load(self, *args: Any, **kwargs: Any) -> Any:
        asked = LOADED.bind(self, *args, **kwargs).arguments
        limit = asked.get("lowvram_model_memory", 0)
        if not asked.get("full_load", False) and 0 < limit < self.model_size():
            # The matrices of a LoRA stay on the GPU. ComfyUI loads everything if the limit is 0.
            asked["lowvram_model_memory"] = max(limit - self._lora_bytes(), 0.1)
        told = self._told = self._sizes()
        try:
            result = super().load(**{k: v for k, v in asked.items() if k != "self"})
        finally:
            self._told = None
        self._set_patches()
        self.model.model_loaded_weight_memory += sum(
            layer.weight.nbytes - told[name]
            for name, layer in compressed_layers(self.model)
            if layer.weight.device == self.load_device
        )
        return result

    def partially_unload(self, *args: Any, **kwargs: Any) -> Any:
        freed = super().partially_unload(*args, **kwargs)
        self._set_patches()
        return freed

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> Any:
        result = super().unpatch_model(device_to, unpatch_weights=unpatch_weights)
        if unpatch_weights:
            for _, layer in compressed_layers(self.model):
                layer.unpatch()
        return result

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        copy = super().clone(*args, **kwargs)
        copy.size = self.size
        return copy

    def model_size(self) -> int:
        """Bytes of the model on its GPU; exact for weights that are already there with this
        LoRA."""
        return int(self.size) + sum(self._sizes().values())

    def _load_list(self, *args: Any, **kwargs: Any) -> Any:
        """Modules with the bytes that each use takes if they stay offloaded, and those that they
        will take once they are loaded.
        """
        sizes, found = self._sizes(), []
        for offloaded, size, name, module, params in super()._load_list(*args, **kwargs):
            if name in sizes and module.is_compressed:
                offloaded = size - module.weight.nbytes + self._bytes_of_use(name, module)
                size += sizes[name] - module.weight.nbytes
            found.append((offloaded, size, name, module, params))
        return found

    def _bytes_of_use(self, name: str, layer: Held) -> int:
        """Bytes of the compressed weight, the decoded one, and its sum with a LoRA."""
        key, dtype = f"{name}.weight", layer.weight_dtype
        dense = torch.empty(layer.host.shape, dtype=dtype, device="meta")
        more = sum_bytes(dense, self._late(key, layer, dtype)) if key in self.patches else 0
        return int(layer.host.nbytes) + dense.nbytes + more

    def _lora_bytes(self) -> int:
        """Bytes of the matrices of LoRAs that weights may get at each use."""
        names = (f"{name}.weight" for name, _ in compressed_layers(self.model))
        return sum(lora_bytes(self.patches[name]) for name in names if name in self.patches)

    def _sizes(self) -> dict[str, int]:
        """Bytes of each compressed weight on the GPU."""
        if self._told is not None:
            return self._told
        return {name: self._size(name, each) for name, each in compressed_layers(self.model)}

    def _size(self, name: str, layer: Held) -> int:
        weight = layer.weight if layer.closed is None else layer.closed
        is_mine = self.model.current_weight_patches_uuid == self.patches_uuid
        if is_mine and weight.device == self.load_device:
            return int(weight.nbytes)
        if self._packs(f"{name}.weight", layer):
            return int(PACKED * 2 * layer.host.numel())
        return int(layer.host.nbytes)

    def _packs(self, key: str, layer: Held) -> bool:
        """Whether the weight is to be packed, with its LoRA or for few rows of x."""
        is_gpu = comfy.model_management.is_device_cuda(self.load_device)
        is_asked = key in self.patches or layer.is_few
        return is_gpu and is_asked and layer.weight_dtype == torch.bfloat16

    def _set_patches(self) -> None:
        """Gives each layer its LoRA. ComfyUI's own patches of offloaded weights depend on how much
        memory is free; these do not.
        """
        for name, layer in compressed_layers(self.model):
            functions = layer.weight_function
            layer.weight_function = [f for f in functions if not isinstance(f, LowVramPatch)]
            key = f"{name}.weight"
            is_patched = key in self.patches
            layer.patch = self._patch(key, layer) if is_patched else None
            if is_patched and not layer.is_packed:
                # At the first use they would lie between what one use needs, and divide memory.
                layer.patch.on(self.load_device)

    def _patch(self, key: str, layer: Held) -> Patch:
        return Patch(key, self.patches[key], self._late(key, layer, layer.weight_dtype))

    def _late(self, key: str, module: Any, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype in which ComfyUI would add a LoRA to a weight of `dtype` when the model uses
        it; `None` if it would add it when it loads the model. Text encoders compute in F32. There
        its sum is exact for the first use, and rounded to `dtype` for the others, as here.
        """
        if not is_dynamic(self.load_device) or not hasattr(module, "comfy_cast_weights"):
            return None
        numbers = sum(p.numel() for p in module.parameters(recurse=False))
        if is_eager() and numbers * dtype.itemsize <= SMALL_BYTES:
            return None
        # It does not wait if a LoRA changes the shape of the weight or of the bias.
        for name in ("weight", "bias"):
            other = f"{key.rpartition('.')[0]}.{name}"
            found = getattr(module, name, None)
            if other not in self.patches or found is None:
                continue
            if comfy.lora.calculate_shape(self.patches[other], found, other) != found.shape:
                return None
        if self.is_clip:
            return torch.float32
        return getattr(self.model, "manual_cast_dtype", None) or dtype

    def patch_weight_to_device(
        self, key: str, device_to: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        layer = self._layer(key)
        if layer is None or not layer.is_compressed:
            result = super().patch_weight_to_device(key, device_to, *args, **kwargs)
            self._patch_late(key, device_to)
            return result
        if not kwargs.get("return_weight", False):
            if device_to == self.load_device and self._packs(key, layer):
                patch = self._patch(key, layer) if key in self.patches else None
                layer.pack(patch, device_to)
            return None
        host = layer.host
        dense = on_device(host, device_to or host.device).decode().to(layer.weight_dtype)
        return self._patch(key, layer)(dense) if key in self.patches else dense

    def _patch_late(self, key: str, device_to: Any) -> None:
        """Replaces the sum of an ordinary weight and its LoRA, if dynamic VRAM has another one."""
        if key not in self.backup or key not in self.patches:
            return
        original, module = self.backup[key].weight, self._module(key)
        late = self._late(key, module, original.dtype)
        if late is not None:
            patch = Patch(key, self.patches[key], late)
            made = patch(on_device(original, device_to or original.device).clone())
            comfy.utils.set_attr_param(self.model, key, made)

    def pin_weight_to_device(self, key: str) -> None:
        layer = self._layer(key)
        if layer is None:
            super().pin_weight_to_device(key)
        elif layer.pinned is None and layer.pin(self.load_device):
            self.pinned.add(key)

    def unpin_weight(self, key: str) -> None:
        layer = self._layer(key)
        if layer is None:
            super().unpin_weight(key)
        elif key in self.pinned:
            layer.unpin()
            self.pinned.remove(key)

    def patch_hook_weight_to_device(self, *args: Any, **kwargs: Any) -> Any:
        """Hooks write to weights: a weight that they change stays decoded until they are
        removed."""
        asked = HOOKED.bind(self, *args, **kwargs).arguments
        if asked["key"] in asked["combined_patches"]:
            self._open(asked["key"])
        return super().patch_hook_weight_to_device(*args, **kwargs)

    def patch_cached_hook_weights(self, *args: Any, **kwargs: Any) -> Any:
        self._open(CACHED.bind(self, *args, **kwargs).arguments["key"])
        return super().patch_cached_hook_weights(*args, **kwargs)

    def _open(self, key: str) -> None:
        if (layer := self._layer(key)) is not None:
            layer.open()

    def unpatch_hooks(self, *args: Any, **kwargs: Any) -> Any:
        result = super().unpatch_hooks(*args, **kwargs)
        for name, layer in compressed_layers(self.model):
            if f"{name}.weight" not in self.hook_backup:
                layer.close()
        return result

    def state_dict_for_saving(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses: saving a checkpoint needs ordinary weights."""
        raise unsaved()

    def model_state_dict_for_saving(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses: saving a text encoder needs ordinary weights."""
        raise unsaved()

    def model_state_dict(self, filter_prefix: str | None = None) -> Any:
        """The weights as they are in memory. Refuses `filter_prefix`, with which ComfyUI extracts a
        LoRA from patched weights.
        """
        if filter_prefix is not None:
            raise ValueError(
                "a LoRA is not extracted from a compressed model; `df11 decompress` gives back its "
                "original file, and ComfyUI's own loaders take that"
            )
        return super().model_state_dict()

    def _layer(self, key: str) -> Held | None:
        """The layer of which this is the compressed weight."""
        module = self._module(key)
        is_ours = isinstance(module, Held) and module.host is not None
        return module if is_ours and key.endswith(".weight") else None

    def _module(self, key: str) -> Any:
        """The module of which this is a weight."""
        return comfy.utils.get_attr(self.model, key.rpartition(".")[0])


def unsaved() -> ValueError:
    """The error for saving a compressed model."""
    return ValueError(
        "a compressed model is not saved as a checkpoint; `df11 decompress` gives back its "
        "original file, and ComfyUI's own loaders take that"
    )


def is_dynamic(device: torch.device) -> bool:
    """Whether ComfyUI would load an ordinary model weight by weight on this device."""
    is_newer = getattr(model_patcher, "CoreModelPatcher", ModelPatcher) is not ModelPatcher
    return is_newer and not comfy.model_management.is_device_cpu(device)


@cache
def is_eager() -> bool:
    """Whether dynamic VRAM loads small modules at once. ComfyUI 0.18 does not, 0.33 does, and only
    its code tells.
    """
    return "<= 16 * 1024" in inspect.getsource(model_patcher.ModelPatcherDynamic)


def adopt(patcher: Any) -> None:
    """Turns the patcher of a model with compressed weights into a `Df11Patcher`."""
    patcher.__class__ = Df11Patcher
    model = ref(patcher.model)

    def grow(count: int) -> None:
        if (found := model()) is not None:
            found.model_loaded_weight_memory += count

    for _, layer in compressed_layers(patcher.model):
        layer.grow = grow
    held = (layer.weight.nbytes for _, layer in compressed_layers(patcher.model))
    #: Bytes besides the compressed weights.
    patcher.size = comfy.model_management.module_size(patcher.model) - sum(held)
