"""The model loader: reads containers if they are the weights of a model (`_files`).

It is registered as load format `df11`, and for `auto` in place of vLLM's own loader, because vLLM
chooses a loader only by the format, before it knows the model. For all other models it does what
vLLM's own loader does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import vllm.envs as envs
from torch import Tensor, nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor import model_loader
from vllm.model_executor.layers import utils
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

import df11

from .. import _ops
from .._doctor import log_newer
from .._load import OPTIONS
from .._workspaces import share_between_captures
from ._config import NAME, Df11Config
from ._files import containers_of, expect, has_head, weights_of
from ._layers import NAMES, Options
from ._orders import find_orders

logger = init_logger("vllm.plugins.df11")

#: Bytes that products with many rows of x decode at once: 3 to 7 % faster than with the 60 MB that
#: PyTorch's users get (benches/record/2026-11-22-vllm-h200.md).
_DECODED_BYTES = 120_000_000


def register_loader() -> None:
    log = logging.getLogger(model_loader.__name__)
    level = log.level
    # vLLM would warn in each process that `auto` has a loader already.
    log.setLevel(logging.ERROR)
    for name in (NAME, "auto"):
        model_loader.register_model_loader(name)(Df11ModelLoader)
    log.setLevel(level)


class Df11ModelLoader(DefaultModelLoader):
    """vLLM's own loader, for which containers are checkpoint files too."""

    enable_weights_track: bool | None

    def __init__(self, load_config: LoadConfig) -> None:
        extra = load_config.model_loader_extra_config
        self.options: dict[str, Any] = {}
        if isinstance(extra, dict):
            self.options = {name: extra[name] for name in OPTIONS if name in extra}
            rest = {name: value for name, value in extra.items() if name not in OPTIONS}
            load_config = replace(
                load_config,
                model_loader_extra_config=rest,
                load_format="auto" if load_config.load_format == NAME else load_config.load_format,
            )
        super().__init__(load_config)
        self._vllm_config: Any = None

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        expect(model_config)
        self._vllm_config = vllm_config
        if (options := self._adopt(vllm_config.quant_config, model_config)) is None:
            if self.options:
                raise ValueError(
                    f"--model-loader-extra-config names {', '.join(self.options)}, which are "
                    "options of df11; add --quantization df11, or serve a folder that df11 "
                    "compress made"
                )
            return super().load_model(vllm_config, model_config, prefix)
        options.choose(self.options)
        _refuse(vllm_config, options)
        log_newer()
        # They import much of vLLM.
        from ._quantized import log_weights
        from ._workers import guard, refuse_in_service, watch_steps

        watch_steps()
        refuse_in_service()
        is_fp8 = not isinstance(options, Df11Config)
        if torch.cuda.is_available():
            _ops.TEMPORARY_BYTES = _DECODED_BYTES
            share_between_captures()
            if not is_fp8:  # whose kernels are vLLM's
                let_launches_begin_early(vllm_config, df11.devices())
        if folder := self._containers(model_config.model, model_config.revision, None):
            tie_as_stored(model_config, folder)
        model = super().load_model(vllm_config, model_config, prefix)
        if is_fp8:
            log_weights(model)
        if options.exact and torch.cuda.is_available():
            with torch.inference_mode(False):
                find_orders(model, vllm_config)
            torch.cuda.empty_cache()
        extend_graph_key(model, vllm_config)
        guard(model)
        return model

    def _adopt(self, config: Any, model_config: ModelConfig) -> Options | None:
        """The options for a model with this quantization config, if weights stay compressed. Makes
        a config of vLLM keep FP8 weights compressed if they are in containers.
        """
        if config is None or isinstance(config, Df11Config):
            return config
        if self._containers(model_config.model, model_config.revision, None) is None:
            return None
        from ._quantized import METHODS, keep_compressed  # which imports much of vLLM

        if config.get_name() in METHODS:
            return keep_compressed(config)
        logger.warning(
            "df11: vLLM's method %s gets decoded weights, which take as much memory as without "
            "df11; %s keep weights compressed",
            *(config.get_name(), " and ".join(METHODS)),
        )
        return None

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        self.counter_before_loading_weights = begin = time.perf_counter()
        options = self._options
        if options is not None and self.enable_weights_track is None:
            # By default vLLM checks BF16 models and no quantized ones.
            self.enable_weights_track = True
        super().load_weights(model, model_config)
        if options is None:
            return
        from ._fill import fill

        device, memory = torch.device("cpu"), None
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
            share = self._vllm_config.cache_config.gpu_memory_utilization
            memory = int(share * torch.cuda.get_device_properties(device).total_memory)
        with torch.inference_mode(False):
            fill(model, options, device, memory)
        logger.info("df11: weights are loaded, after %.2f seconds", time.perf_counter() - begin)

    @property
    def _options(self) -> Options | None:
        config = getattr(self._vllm_config, "quant_config", None)
        return config if isinstance(config, Options) else getattr(config, "df11", None)

    def track_weights_loading(
        self, model: nn.Module, loaded_weights: set[str] | None, **others: Any
    ) -> None:
        """vLLM's check; in compressed models it also checks recorded weights and biases."""
        if self._options is None:
            super().track_weights_loading(model, loaded_weights, **others)
            return
        from ._fill import check_loaded

        check_loaded(model, loaded_weights)

    def _get_weights_iterator(
        self, source: DefaultModelLoader.Source
    ) -> Generator[tuple[str, Tensor], None, None]:
        folder = self._containers(source.model_or_path, source.revision, source.subfolder)
        if folder is None:
            yield from super()._get_weights_iterator(source)
            return
        for name, value in weights_of(folder):
            yield source.prefix + name, value

    def download_model(self, model_config: ModelConfig) -> None:
        expect(model_config)
        if self._containers(model_config.model, model_config.revision, None) is None:
            super().download_model(model_config)

    def _containers(self, model: str, revision: str | None, subfolder: str | None) -> Path | None:
        return containers_of(model, revision, subfolder, self.load_config.download_dir)


def tie_as_stored(model_config: Any, folder: Path) -> None:
    """Unties the head of a model if its config ties the head, but its containers have a head with
    other values than the embedding's. vLLM itself does this only for heads in safetensors; releases
    before 0.32 leave such a head out. Call it before the model is made.
    """
    was_untied = getattr(model_config, "word_embeddings_untied_by_checkpoint", None)
    config = model_config.hf_config
    if was_untied is None or not (was_untied or getattr(config, "tie_word_embeddings", False)):
        return
    is_apart = has_head(folder)
    for each in (config, config.get_text_config()):
        each.tie_word_embeddings = not is_apart
    model_config.word_embeddings_untied_by_checkpoint = is_apart


def let_launches_begin_early(vllm_config: VllmConfig, gpus: list[dict[str, Any]]) -> None:
    """Lets kernels of inductor begin while the kernel before them ends, as products do.

    Inductor supports this programmatic dependent launch on compute capability 9.0 and newer. `gpus`
    are from `df11.devices`; graphs cannot hold such launches if the driver is older than CUDA 12.3.
    Call it before the model is made, whose compiler copies the config.

    Inductor's kernels wait only for the kernel before them. That is correct if each kernel lets the
    next one begin only after its own wait, as products do, or never, as nearly all kernels of vLLM
    do. LoRA kernels begin early and do not wait, so with adapters no other kernel begins early.
    """
    knows = any(gpu["driver"] >= (12, 3) for gpu in gpus)
    if knows and vllm_config.lora_config is None:
        vllm_config.compilation_config.inductor_compile_config.setdefault("triton.enable_pdl", True)


def extend_graph_key(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Adds the names of ordinary weights to the key of vLLM's cache of compiled graphs, and on a
    CPU whether experts are exact; and whether weights in FP8 are compressed, which no name of a
    method says. Graphs depend on a container, and on options, in nothing else; which weights are
    ordinary depends on sizes and is in no config.
    """
    names = [
        path
        for path, module in model.named_modules()
        for name in NAMES
        if name in module._parameters and getattr(module, f"{name}_key", module) is None
    ]
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    is_exact = any(getattr(method, "on_cpu", None) is not None for method in methods)
    has_fp8 = any(getattr(module, "df11_views", None) for module in model.modules())
    told = {"ordinary weights": names, "exact experts": is_exact, "FP8": has_fp8}
    for what, value in told.items():
        if value and isinstance(vllm_config.additional_config, dict):
            vllm_config.additional_config[f"df11 {what}"] = value


def _refuse(vllm_config: VllmConfig, options: Options) -> None:
    offload = vllm_config.offload_config
    if offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size:
        raise ValueError(
            "df11 weights cannot be offloaded; leave out --cpu-offload-gb and --offload-group-size"
        )
    if envs.VLLM_BATCH_INVARIANT and options.mode != "exact":
        raise ValueError(
            "VLLM_BATCH_INVARIANT needs exact products; add --model-loader-extra-config "
            """'{"mode": "exact"}'"""
        )
    backend = getattr(vllm_config.kernel_config, "linear_backend", "auto")
    if options.exact and backend in getattr(utils, "_FLASHINFER_BF16_BACKENDS", ()):
        raise ValueError(
            f"df11 gives the bits of vLLM's default products; leave out --linear-backend {backend}"
        )
