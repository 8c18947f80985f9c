"""The nodes: loaders of containers, and one that makes a container of a model file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import comfy.model_management
import comfy.sd
import comfy.utils
import df11
import folder_paths
import torch

from . import loading

SUFFIX = ".df11"
CATEGORY = "loaders/df11"
FOLDERS = ("diffusion_models", "text_encoders", "checkpoints")
NONE = "none"
#: A container of more than this share of its file is not worth it.
MIN_SAVED = 0.98


def listed(folder: str) -> str:
    """The name under which ComfyUI lists the containers in one of its model folders. Its own
    loaders, which cannot read containers, list only their own files.
    """
    return f"{folder}_df11"


def register_folders() -> None:
    """Makes ComfyUI list containers in its own model folders."""
    known = folder_paths.folder_names_and_paths
    for folder in FOLDERS:
        known[listed(folder)] = (known[folder][0], {SUFFIX})


def names(folder: str) -> list[str]:
    """The files that ComfyUI lists in one of its model folders."""
    found: list[str] = folder_paths.get_filename_list(folder)
    return found


def path_of(folder: str, name: str) -> str:
    """The path of a listed file. Raises `FileNotFoundError`."""
    found: str = folder_paths.get_full_path_or_raise(folder, name)
    return found


class LoadDiffusionModel:
    """A diffusion model from `models/diffusion_models`."""

    CATEGORY = CATEGORY
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model_name": (names(listed("diffusion_models")),)}}

    def load(self, model_name: str) -> tuple[Any]:
        path = path_of(listed("diffusion_models"), model_name)
        return (loading.load_diffusion_model(path),)


class LoadCLIP:
    """One or several text encoders, in containers or in files that ComfyUI's own loaders take."""

    CATEGORY = CATEGORY
    RETURN_TYPES = ("CLIP",)
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        containers = names(listed("text_encoders"))
        others = [NONE, *containers, *names("text_encoders")]
        kinds = [kind.name.lower() for kind in comfy.sd.CLIPType]
        more = {f"clip_name{at}": (others,) for at in (2, 3)}
        devices = (["default", "cpu"], {"advanced": True})
        return {
            "required": {"clip_name": (containers,), "type": (kinds,)},
            "optional": {**more, "device": devices},
        }

    def load(self, clip_name: str, type: str, device: str = "default", **more: str) -> tuple[Any]:
        chosen = [clip_name, *(name for _, name in sorted(more.items()) if name != NONE)]
        paths = [path_of(self.folder(name), name) for name in chosen]
        host = torch.device("cpu")
        options = {"load_device": host, "offload_device": host} if device == "cpu" else {}
        kind = comfy.sd.CLIPType[type.upper()]
        embeddings = folder_paths.get_folder_paths("embeddings")
        return (loading.load_clip(paths, kind, embeddings, options),)

    @staticmethod
    def folder(name: str) -> str:
        return listed("text_encoders") if name.endswith(SUFFIX) else "text_encoders"


class LoadCheckpoint:
    """The diffusion model, text encoders and VAE of a checkpoint in `models/checkpoints`."""

    CATEGORY = CATEGORY
    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"ckpt_name": (names(listed("checkpoints")),)}}

    def load(self, ckpt_name: str) -> tuple[Any, Any, Any]:
        embeddings = folder_paths.get_folder_paths("embeddings")
        return loading.load_checkpoint(path_of(listed("checkpoints"), ckpt_name), embeddings)


class Compress:
    """Makes `NAME.df11` beside a model file `NAME.safetensors`, which is kept."""

    CATEGORY = CATEGORY
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES: ClassVar = ("path",)
    FUNCTION = "compress"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        files = [
            f"{folder}/{name}"
            for folder in FOLDERS
            for name in names(folder)
            if name.endswith(".safetensors")
        ]
        overwrite = ("BOOLEAN", {"default": False})
        return {"required": {"file": (files,), "overwrite": overwrite}}

    def compress(self, file: str, overwrite: bool) -> tuple[str]:
        folder, _, name = file.partition("/")
        source = Path(path_of(folder, name))
        out = source.with_suffix(SUFFIX)
        report = df11.compress(source, out, overwrite=overwrite, progress=Progress())
        sizes = f"{report.source_bytes:,} bytes, now {report.stored_bytes:,} ({report.ratio:.1%})"
        logging.info("df11: %s had %s", source.name, sizes)
        if report.ratio > MIN_SAVED:
            few = "df11: %s has few floats, and takes about as much memory as before"
            logging.warning(few, source.name)
        return (str(out),)


class Progress:
    """Shows the progress of work as ComfyUI's bar. Cancelling the workflow ends the work."""

    def __init__(self) -> None:
        self.bar: Any = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        self.bar = self.bar or comfy.utils.ProgressBar(total)
        self.bar.update_absolute(done, total)


NODES = {
    "Df11LoadDiffusionModel": (LoadDiffusionModel, "Load diffusion model (df11)"),
    "Df11LoadCLIP": (LoadCLIP, "Load CLIP (df11)"),
    "Df11LoadCheckpoint": (LoadCheckpoint, "Load checkpoint (df11)"),
    "Df11Compress": (Compress, "Compress (df11)"),
}
register_folders()
