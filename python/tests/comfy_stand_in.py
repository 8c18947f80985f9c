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
        weight_function: ClassVar[list[Any]] = []
        bias_function: ClassVar[list[Any]] = []

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


class ModelPatcher:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.patches: dict[str, Any] = {}
        self.hook_backup: dict[str, Any] = {}
        self.load_device = torch.device("cpu")
        self.size = 0
        self.replaced: list[str] = []

    def model_size(self) -> int:
        self.size = self.size or sum(value.nbytes for value in self.model.state_dict().values())
        return self.size

    def load(self, *args: Any, **kwargs: Any) -> None:
        for key in self.patches:
            self.patch_weight_to_device(key, self.load_device)

    def partially_unload(self, *args: Any, **kwargs: Any) -> int:
        for module in self.model.modules():
            if hasattr(module, "weight_function"):
                module.weight_function = [LowVramPatch()]
        return 1

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        pass

    def patch_weight_to_device(self, key: str, device_to: Any = None, **kwargs: Any) -> Any:
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
