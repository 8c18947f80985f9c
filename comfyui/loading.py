"""Loads ComfyUI's models from containers.

ComfyUI knows a model by the names and shapes of its tensors. Here it gets compressed tensors under
the same names, and operations that can hold them. Nothing here depends on an architecture.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import comfy.model_detection
import comfy.model_management
import comfy.ops
import comfy.sd
import comfy.utils
import df11
import torch
from df11.torch import load_compressed
from torch import Tensor

from .operations import decoded, operations
from .patching import adopt, is_dynamic

#: Ends of names that quantized files have. ComfyUI's own loaders know them.
QUANTIZED = (".comfy_quant", "scaled_fp8", ".weight_scale", ".scale_weight")
StateDict = dict[str, Tensor]


def load_diffusion_model(path: str, disable_dynamic: bool = True) -> Any:
    """A `MODEL` whose weights are those of a container, compressed."""
    state, metadata = read(path)
    options = {"custom_operations": operations_on(comfy.model_management.get_torch_device())}
    load = comfy.sd.load_diffusion_model_state_dict
    model = call(load, state, model_options=options, metadata=metadata)
    if model is None:
        raise undetected(path)
    return known_as(model, load_diffusion_model, path)


def load_clip(paths: Sequence[str], kind: Any, embeddings: Any, options: Any) -> Any:
    """A `CLIP` of one text encoder per file. ComfyUI reads files that are not containers."""
    states = [read(path)[0] for path in paths]
    device = options.get("load_device", comfy.model_management.text_encoder_device())
    options = {**options, "custom_operations": operations_on(device)}
    load = comfy.sd.load_text_encoder_state_dicts
    clip = call(load, states, embedding_directory=embeddings, clip_type=kind, model_options=options)
    known_as(clip.patcher, load_clip_patcher, paths, kind, embeddings, options)
    return clip


def load_clip_patcher(*args: Any, disable_dynamic: bool = True) -> Any:
    """The patcher of `load_clip`, for copies on other GPUs."""
    return load_clip(*args).patcher


def load_checkpoint(path: str, embeddings: Any) -> tuple[Any, Any, Any]:
    """The `MODEL`, `CLIP` and `VAE` of a checkpoint. The VAE is an ordinary one."""
    state, metadata = read(path)
    management = comfy.model_management
    options = {"custom_operations": operations_on(management.get_torch_device())}
    text_options = {"custom_operations": operations_on(management.text_encoder_device())}
    model, clip, vae = call(
        comfy.sd.load_state_dict_guess_config,
        decode_vae(state, metadata, path),
        embedding_directory=embeddings,
        model_options=options,
        te_model_options=text_options,
        metadata=metadata,
    )[:3]
    known_as(model, load_checkpoint_part, path, embeddings, 0)
    if clip is not None:
        known_as(clip.patcher, load_checkpoint_part, path, embeddings, 1)
    return model, clip, vae


def load_checkpoint_part(
    path: str, embeddings: Any, part: int, disable_dynamic: bool = True
) -> Any:
    """A patcher of `load_checkpoint`, for copies on other GPUs."""
    found = load_checkpoint(path, embeddings)[part]
    return getattr(found, "patcher", found)


def operations_on(device: torch.device) -> Any:
    """The operations of a model that a device runs."""
    return operations(comfy.ops.manual_cast, unrounded=is_dynamic(device))


def read(path: str) -> tuple[StateDict, Mapping[str, str] | None]:
    """The tensors of a file and the metadata of its safetensors file."""
    if Path(path).suffix == ".df11":
        state, metadata = load_compressed(path), df11.safe_open(path, "pt").metadata()
    else:
        state, metadata = comfy.utils.load_torch_file(path, safe_load=True), None
    if quantized := next((name for name in state if name.endswith(QUANTIZED)), None):
        raise ValueError(
            f"{path} is quantized ({quantized}); load it with ComfyUI's own loader, or choose a "
            "file of BF16 weights"
        )
    return state, metadata


def decode_vae(state: StateDict, metadata: Any, path: str) -> StateDict:
    """The tensors of a checkpoint; those of its VAE are decoded."""
    prefix = comfy.model_detection.unet_prefix_from_state_dict(state)
    config = call(comfy.model_detection.model_config_from_unet, state, prefix, metadata=metadata)
    if config is None:
        raise undetected(path)
    ends = tuple(config.vae_key_prefix)
    return {n: decoded(value) if n.startswith(ends) else value for n, value in state.items()}


def undetected(path: str) -> ValueError:
    """The error for a file whose tensors ComfyUI does not know."""
    return ValueError(
        f"ComfyUI knows no model with the tensors of {path}; update ComfyUI, or choose the loader "
        "for what the file holds"
    )


def known_as(patcher: Any, *how: Any) -> Any:
    """The patcher of a model with compressed weights, and how ComfyUI makes another one."""
    adopt(patcher)
    patcher.cached_patcher_init = (how[0], how[1:])
    return patcher


def call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function of ComfyUI without arguments that its release does not know. The patcher
    here moves a model of compressed weights; ComfyUI does not move it weight by weight (dynamic
    VRAM).
    """
    known = inspect.signature(function).parameters
    asked = {"disable_dynamic": True, **kwargs}
    return function(*args, **{name: value for name, value in asked.items() if name in known})
