"""A stand-in for the parts of ComfyUI that the nodes call. comfyui/tests/try_comfyui.py tries the
rest with the real ComfyUI.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from conftest import ROOT
from torch import nn

NODE = ROOT / "comfyui"
NAME = "df11_node"


def layer(kind: Any) -> Any:
    class Layer(kind):  # type: ignore[misc]
        comfy_cast_weights = True
        weight_function: ClassVar[list[Any]] = []
        bias_function: ClassVar[list[Any]] = []

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.bias = getattr(self, "bias", None)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.forward_comfy_cast_weights(*args, **kwargs)

        def forward_comfy_cast_weights(self, x: Any, out_dtype: Any = None) -> Any:
            return kind.forward(self, x).to(out_dtype)

    return Layer


class Operations:
    Linear = layer(nn.Linear)
    Conv1d = layer(nn.Conv1d)
    Conv2d = layer(nn.Conv2d)
    Conv3d = layer(nn.Conv3d)
    Embedding = layer(nn.Embedding)
    LayerNorm = layer(nn.LayerNorm)


class LowVramPatch:
    """ComfyUI's own LoRA for a weight that it offloads."""

    def __call__(self, weight: Any) -> Any:
        raise AssertionError("added although the layer has the LoRA")


class Management:
    """Memory and devices, as ComfyUI would manage them on a GPU, if `is_gpu`."""

    is_gpu = False
    #: Bytes of pinned memory by address, and the most that may be pinned.
    pinned: ClassVar[dict[int, int]] = {}
    most_pinned = 1 << 30

    @classmethod
    def pin_memory(cls, tensor: Any) -> bool:
        if sum(cls.pinned.values()) + tensor.nbytes > cls.most_pinned:
            return False
        assert type(tensor).__name__ == "Parameter" and tensor.data_ptr() % 4096 == 0
        cls.pinned[tensor.data_ptr()] = tensor.nbytes
        return True

    @classmethod
    def unpin_memory(cls, tensor: Any) -> bool:
        return cls.pinned.pop(tensor.data_ptr()) == tensor.nbytes

    @staticmethod
    def module_size(module: nn.Module) -> int:
        return sum(value.nbytes for value in module.state_dict().values())


class ModelPatcher:
    def __init__(self, model: Any, size: int = 0) -> None:
        self.model = model
        self.patches: dict[str, Any] = {}
        self.hook_backup: dict[str, Any] = {}
        self.backup: dict[str, Any] = {}
        self.is_clip = False
        self.load_device = torch.device("cpu")
        self.size = size
        self.pinned: set[str] = set()
        self.patches_uuid = object()
        self.replaced: list[str] = []
        self.limit = 0.0
        model.__dict__.setdefault("model_loaded_weight_memory", 0)
        model.__dict__.setdefault("current_weight_patches_uuid", None)

    def clone(self) -> Any:
        copy = self.__class__(self.model, self.model_size())
        copy.patches, copy.load_device = self.patches, self.load_device
        copy.patches_uuid = self.patches_uuid
        return copy

    def model_size(self) -> int:
        self.size = self.size or Management.module_size(self.model)
        return self.size

    def _load_list(self) -> list[Any]:
        layers = [*self.model.inner.named_children()]
        names = {name: [each for each, _ in layer.named_parameters()] for name, layer in layers}
        return [
            (0, Management.module_size(layer), f"inner.{name}", layer, names[name])
            for name, layer in layers
        ]

    def load(self, offloaded: Any = (), lowvram_model_memory: float = 0) -> None:
        """Loads all layers but some."""
        self.limit = lowvram_model_memory
        counted = 0
        for _, size, name, layer, parameters in self._load_list():
            is_offloaded = name in offloaded
            counted += 0 if is_offloaded else size
            for key in (f"{name}.{each}" for each in parameters):
                if is_offloaded:
                    self.pin_weight_to_device(key)
                    continue
                self.unpin_weight(key)
                self.patch_weight_to_device(key, device_to=self.load_device)
            if not is_offloaded:
                layer.to(self.load_device)
        self.model.model_loaded_weight_memory = counted if offloaded else self.model_size()
        self.model.current_weight_patches_uuid = self.patches_uuid

    def partially_unload(self, *args: Any, **kwargs: Any) -> int:
        for module in self.model.modules():
            if hasattr(module, "weight_function"):
                module.weight_function = [LowVramPatch()]
        return 1

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        for key in list(self.pinned):
            self.unpin_weight(key)
        self.unpatch_hooks()
        if device_to is not None:
            self.model.to(device_to)
        self.model.model_loaded_weight_memory = 0
        self.model.current_weight_patches_uuid = None

    def pin_weight_to_device(self, key: str) -> None:
        pass

    def unpin_weight(self, key: str) -> None:
        pass

    def patch_weight_to_device(self, key: str, device_to: Any = None, **kwargs: Any) -> Any:
        if key in self.patches:
            self.replaced.append(key)

    def patch_hook_weight_to_device(self, hooks: Any, combined_patches: Any, key: str) -> None:
        self.hook_backup[key] = get_attr(self.model, key).clone()
        get_attr(self.model, key).data.add_(1)

    def patch_cached_hook_weights(self, cached_weights: Any, key: str, memory_counter: Any) -> None:
        pass

    def unpatch_hooks(self, keys: Any = None) -> None:
        self.hook_backup.clear()


def get_attr(found: Any, path: str) -> Any:
    for name in path.split("."):
        found = getattr(found, name)
    return found


def calculate_weight(
    patches: Any, weight: Any, key: str, intermediate_dtype: Any = torch.float32
) -> Any:
    """Adds numbers, in the dtype of the weight, as ComfyUI adds the products of a LoRA."""
    for number, *_ in patches:
        weight += torch.tensor(number, dtype=intermediate_dtype).to(weight.dtype)
    return weight


def calculate_shape(patches: Any, weight: Any, key: str) -> torch.Size:
    """A second entry of a patch is the shape that it gives the weight."""
    return next((shape for _, shape in patches if shape is not None), weight.shape)


class ProgressBar:
    made: ClassVar[list["ProgressBar"]] = []

    def __init__(self, total: int) -> None:
        self.total, self.value = total, 0
        self.made.append(self)

    def update_absolute(self, value: int, total: int) -> None:
        self.value, self.total = value, total


def install(models: Path) -> Any:
    """Imports the node with stand-ins for ComfyUI, whose model folders are in `models`."""
    made = {
        "float": {"stochastic_rounding": lambda value, dtype: value.to(dtype)},
        "lora": {"calculate_weight": calculate_weight, "calculate_shape": calculate_shape},
        "model_detection": {},
        "model_management": {
            "lora_compute_dtype": lambda device: torch.float32,
            "is_device_cpu": lambda device: device.type == "cpu",
            "is_device_cuda": lambda device: Management.is_gpu,
            "module_size": Management.module_size,
            "MAX_PINNED_MEMORY": Management.most_pinned,
            "pin_memory": Management.pin_memory,
            "unpin_memory": Management.unpin_memory,
            "get_offload_stream": lambda device: None,
            "sync_stream": lambda device, stream: None,
            "OOM_EXCEPTION": torch.OutOfMemoryError,
            "soft_empty_cache": lambda: None,
            "throw_exception_if_processing_interrupted": lambda: None,
        },
        "model_patcher": {"ModelPatcher": ModelPatcher, "LowVramPatch": LowVramPatch},
        "ops": {"manual_cast": Operations},
        "sd": {"CLIPType": []},
        "utils": {
            "get_attr": get_attr,
            "ProgressBar": ProgressBar,
        },
    }
    comfy = sys.modules["comfy"] = ModuleType("comfy")
    for name, content in made.items():
        module = ModuleType(f"comfy.{name}")
        module.__dict__.update(content)
        sys.modules[module.__name__] = module
        setattr(comfy, name, module)
    sys.modules["folder_paths"] = folder_paths(models)
    spec = importlib.util.spec_from_file_location(
        NAME, NODE / "__init__.py", submodule_search_locations=[str(NODE)]
    )
    assert spec is not None and spec.loader is not None
    node = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(node)
    return node


def folder_paths(models: Path) -> ModuleType:
    module = ModuleType("folder_paths")
    folders = ("diffusion_models", "text_encoders", "checkpoints")
    known = {name: ([str(models / name)], {".safetensors"}) for name in folders}

    def names(folder: str) -> list[str]:
        (path,), suffixes = known[folder]
        return sorted(each.name for each in Path(path).glob("*") if each.suffix in suffixes)

    def path_of(folder: str, name: str) -> str:
        return str(Path(known[folder][0][0]) / name)

    module.__dict__.update(
        folder_names_and_paths=known, get_filename_list=names, get_full_path_or_raise=path_of
    )
    return module
