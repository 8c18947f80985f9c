"""transformers' extension points: `from_pretrained` of a folder of containers, here or on the Hub.

What each of them is used for, in the order in which `from_pretrained` calls them:

| call | use |
|---|---|
| `validate_environment` | is this a transformers that has all of them |
| `update_device_map` | where the model shall be |
| `_expect_containers` | `update_tp_plan` to 5.20, `update_attn_implementation` from 5.18 |
| `update_dtype` | remembers what is asked for |
| `preprocess_model` | opens the containers; if there is no weights file, an empty one is read |
| `update_weight_conversions` | finds which parameters are which tensors, and hides these |
| `adjust_max_memory`, `validate_environment` | `device_map="auto"`: places by compressed sizes |
| `postprocess_model` | loads the containers: parameters are compressed tensors from then on |

The config gets the name of a weights file beside the containers, which holds what they lack, if
anything; on the Hub that finds them (`_hub`). Where it says no dtype, it gets that of the
containers. So dtypes are those that the same checkpoint would have as safetensors: of the `dtype`
argument, else of the config, else of the checkpoint. What is stored in another one is converted
once, and stays an ordinary parameter. No other weight is in memory or on disk as BF16 meanwhile.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import __version__
from transformers.quantizers import auto
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from . import _native
from ._hub import WEIGHTS, Expected, folder_of, wrap_resolution
from ._load import check_options, load, sizes_of
from ._names import join
from ._parallel import gathered, is_first, local, prepare
from ._parameters import Weight
from ._place import Placement, default_device, resolve
from ._pretrained import checkpoint_dtype, weights_of
from ._source import KEY, Source, copy_containers
from ._tensor import CompressedTensor
from ._torch import dtype_of
from ._versions import mismatch

METHOD = "df11"
EMPTY = Path(__file__).with_name("empty.safetensors")
#: As `df11 compress` inserts it, behind the first brace; `df11 decompress` takes it out
#: (src/write/config.rs).
MARK = '\n  "quantization_config": {"quant_method": "df11"},'
#: The calls with the config, before files are looked for; each release has one of them at least.
_WITH_CONFIG = ("update_tp_plan", "update_attn_implementation")
_NEEDED = (
    "update_weight_conversions",
    "update_dtype",
    "adjust_max_memory",
    "get_state_dict_and_metadata",
)


@register_quantization_config(METHOD)
class Df11Config(QuantizationConfigMixin):
    """What `quantization_config` may say, beside `{"quant_method": "df11"}`.

    `mode`, `residence`, `memory` and `streamed` are those of `df11.attach`. Other options, such as
    `prefetch` of earlier versions, do nothing and are warned of.
    """

    def __init__(
        self,
        mode: str = "exact",
        residence: str = "stored",
        memory: Any = None,
        streamed: bool = False,
        **others: Any,
    ) -> None:
        check_options(mode, residence)
        if others := {name: value for name, value in others.items() if name != "quant_method"}:
            warnings.warn(f"df11: {', '.join(others)} does nothing; leave it out", stacklevel=2)
        self.quant_method = METHOD  # type: ignore[assignment]
        self.mode = mode
        self.residence = residence
        self.memory = memory
        self.streamed = streamed

    def to_dict(self) -> dict[str, Any]:
        """Without what only matters for this run."""
        return {"quant_method": METHOD}

    def get_loading_attributes(self) -> dict[str, Any]:
        """What only matters for this run: the caller's, whatever the checkpoint's config says."""
        return {name: value for name, value in vars(self).items() if name != "quant_method"}


# The configs whose options may be given to `from_pretrained` of a quantized checkpoint. It is a
# list without a way to register; a release without it warns that it leaves the options out.
auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (
    *getattr(auto, "LOADING_ATTRIBUTES_CONFIG_TYPES", ()),
    Df11Config,
)


@register_quantizer(METHOD)
class Df11Quantizer(HfQuantizer):
    """Loads compressed weights into transformers models."""

    #: Adapters can be trained: gradients go through compressed weights.
    is_trainable = True
    #: generate() may compile by itself.
    is_compileable = True
    quantization_config: Df11Config

    def __init__(self, quantization_config: Df11Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.wanted: Any = None
        self.max_memory: dict[Any, Any] | None = None
        self.model: Any = None
        self.container: Any = None
        self.source: Source | None = None
        self.placement: Placement | None = None
        self.dtype: torch.dtype | None = None
        self.saving_to: Path | None = None
        self._hidden: Any = None
        self._by_name: dict[str, Weight] = {}

    # ---- before the model is made ----

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Checks transformers, and later settles where the model goes."""
        lacking = [name for name in _NEEDED if not hasattr(HfQuantizer, name)]
        if not any(hasattr(HfQuantizer, name) for name in _WITH_CONFIG):
            lacking.append(" and ".join(_WITH_CONFIG))
        if lacking:
            raise _unfit(lacking[0])
        if not self.pre_quantized:
            raise ValueError(
                "df11 compresses checkpoints, not models that are being loaded; run "
                "`df11 compress MODEL -o FOLDER` and load FOLDER"
            )
        if self.model is not None and isinstance(device_map, dict):
            self._settle(device_map)

    def update_device_map(self, device_map: Any) -> Any:
        """The GPU, where there is one and nothing is said."""
        if device_map is None:
            device_map = {"": default_device()}
        self.wanted = device_map
        if isinstance(device_map, dict):
            self.placement = resolve(device_map, self.quantization_config.memory)
            return {"": self.placement.rest}
        # The one for which the loader hands on `max_memory` as it is.
        return "sequential"

    def _expect_containers(self, config: Any) -> Any:
        """Has the loader look for containers, and not for weights files that are not there."""
        source = Path(getattr(config, "_name_or_path", None) or "")
        config.transformers_weights = WEIGHTS
        if source.is_dir() and getattr(config, "dtype", None) is not None:
            return config
        config.transformers_weights = Expected(partial(self._found, config))
        if not wrap_resolution() and source.is_dir():
            self._found(config, folder_of(source))
        return config

    # Some releases call the one, some the other, some both.
    update_tp_plan = update_attn_implementation = _expect_containers

    def _found(self, config: Any, folder: Path) -> None:
        """Opens the containers. What they hold is the dtype of a config that names none."""
        config.transformers_weights = WEIGHTS
        self._open(folder)
        if getattr(config, "dtype", None) is None:
            config.dtype = checkpoint_dtype(self.container)

    def _open(self, folder: Path) -> None:
        self.container = _native.open(folder)
        if not self.container.is_complete:
            shards = self.container.shards
            raise FileNotFoundError(
                f"{folder} holds {len(shards)} of {shards[0]['count']} containers of the model; "
                "fetch all"
            )

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What is asked for, by the caller or by the config."""
        self.dtype = dtype
        return dtype

    # ---- the model is on the meta device ----

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        if not checkpoint_files:
            raise ValueError("df11 loads from a folder of containers; name one in from_pretrained")
        if self.container is None:
            self._open(folder_of(Path(checkpoint_files[0]).parent))
        if not Path(checkpoint_files[0]).exists():
            checkpoint_files[:] = [os.fspath(EMPTY)]
        prepare(model)
        self.model = model

    def update_weight_conversions(
        self, weight_conversions: list[Any], model: Any = None
    ) -> list[Any]:
        """Finds the weights, and hides them from the loader, which would allocate them.

        Releases before 5.21 name no model.
        """
        if self.model is None:
            return weight_conversions
        weights, unused = weights_of(self.model, self.container, weight_conversions, self.dtype)
        if not weights:
            raise ValueError(
                f"no tensor of {self.container.path} belongs to a {type(self.model).__name__}; "
                "use the class it was made for"
            )
        self.source = Source(self.container, weights, unused=unused)
        _tell_conversions(self.container, weights, self.dtype)
        held = {place.name: weight for weight in weights for place in weight.places}
        self._by_name = held

        def hide(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            for name in held:
                state.pop(prefix + name, None)
            # Sharding makes new parameters after this, and before it looks at what to load.
            for name, value in (
                *module.named_parameters(remove_duplicate=False),
                *module.named_buffers(),
            ):
                if name in held:
                    value._is_hf_initialized = True

        self._hidden = self.model.register_state_dict_post_hook(hide)
        return weight_conversions

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes that an element takes while it is compressed."""
        weight = self._by_name.get(param_name)
        if weight is None:
            return float(param.element_size())
        return float(
            sum(self.container[name].stored_bytes for name in weight.tensors)
            / max(1, param.numel())
        )

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        """What each GPU may hold."""
        self.max_memory = dict(max_memory)
        return max_memory

    def _settle(self, device_map: dict[str, Any]) -> None:
        """For "auto" and the like: by compressed sizes. What else there is goes to one device."""
        assert self.max_memory is not None and self.source is not None
        options = self.quantization_config
        sizes = sizes_of(self.source, options.residence)
        self.placement = resolve(self.wanted, options.memory, sizes, self.max_memory)
        device_map.clear()
        device_map[""] = self.placement.rest

    # ---- the loader is done ----

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self._hidden is None or self.source is None:
            raise _unfit("a call of update_weight_conversions")
        self._hidden.remove()
        _take_quantized_mark(model)
        if hasattr(model.config, "transformers_weights"):
            del model.config.transformers_weights
        assert self.placement is not None
        words = self.quantization_config.get_loading_attributes()
        del words["memory"]
        load(model, self.source, self.placement, **words)
        model.save_pretrained = _Save(model)
        # What is left of the quantizer goes with copies of the model.
        self.model = self._hidden = self.container = self.source = None
        self._by_name = {}
        return model

    # ---- afterwards ----

    def is_serializable(self) -> bool:
        """As the folder that it came from."""
        return True

    def get_state_dict_and_metadata(
        self, model: Any
    ) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """No weights are saved as safetensors; the containers are copied."""
        if self.saving_to is not None:
            others = _others(model)
            if is_first():
                copy_containers(model.__dict__[KEY].container, self.saving_to)
                _save_others(others, self.saving_to / WEIGHTS)
            return {}, {}
        if not getattr(model, "_hf_peft_config_loaded", False):
            raise ValueError(
                "call save_pretrained of the model itself, which copies its containers"
            )
        return None, {}

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        raise NotImplementedError(
            "run `df11 decompress FOLDER -o MODEL` and load MODEL to have BF16 weights in memory"
        )


def _unfit(lacking: str) -> ImportError:
    return ImportError(mismatch(__version__, lacking))


def _take_quantized_mark(model: Any) -> None:
    """Weights are what they were before compression, and so is the code that computes with them.

    transformers marks the configs of quantized models, and by that mark some models take other
    ways, which round otherwise (Jamba and Falcon Mamba) or guess what dtype weights have
    (attention).
    """
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            vars(module.config).pop("_is_quantized", None)


_ROUNDED = (
    "which rounds them, as transformers does with safetensors: the dtype argument of "
    "from_pretrained, or else the config, asks for it; name the stored dtype to keep every bit"
)
_WIDENED = (
    "because the dtype argument of from_pretrained, or else the config, asks for it; these are "
    "decoded once and take their full size; name the stored dtype to keep them compressed"
)


def _tell_conversions(container: Any, weights: list[Weight], dtype: torch.dtype | None) -> None:
    """Warns of weights that are rounded, and of compressed ones that become wider."""
    counts: Counter[tuple[str, str]] = Counter()
    for weight in weights:
        tensors = [container[name] for name in weight.tensors]
        kinds = {kind for tensor in tensors if (kind := dtype_of(tensor)) is not None}
        for kind in kinds - {weight.dtype}:
            words = f"stored as {kind} and used as {weight.dtype}".replace("torch.", "")
            if torch.promote_types(kind, weight.dtype) != weight.dtype:
                counts[words, _ROUNDED] += 1
            elif weight.dtype == dtype and any(tensor.encoding != "raw" for tensor in tensors):
                counts[words, _WIDENED] += 1
    for (words, what), count in counts.items():
        warnings.warn(f"df11: {count} weights are {words}, {what}", stacklevel=2)


class _Save:
    """`save_pretrained` of a model, without keeping it; a copy of the model has its own."""

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)

    def __call__(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Writes containers and config, as `df11 compress` made them."""
        model = self._model()
        if model is None:
            raise ReferenceError("the model is gone; keep it in a variable while it is saved")
        if kwargs.get("variant") or kwargs.get("state_dict"):
            raise ValueError("a compressed model is saved as it is, without variant or state_dict")
        folder = Path(save_directory)
        adapters = getattr(model, "_hf_peft_config_loaded", False)
        if not adapters and (changed := _changed(model)):
            raise RuntimeError(
                f"{changed[0]} is an ordinary weight now, and the containers have what it was; "
                "load df11.state_dict(model) into a BF16 model, save that, and compress it"
            )
        model.hf_quantizer.saving_to = None if adapters else folder
        try:
            type(model).save_pretrained(model, save_directory, *args, **kwargs)
        finally:
            model.hf_quantizer.saving_to = None
        if not adapters and is_first():
            mark_config(folder / "config.json")

    def __deepcopy__(self, memo: dict[int, Any]) -> _Save:
        return _Save(copy.deepcopy(self._model(), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Save, (self._model(),)


def _changed(model: Any) -> list[str]:
    """Weights that were compressed, and in whose places are others."""
    now = dict(model.named_parameters(remove_duplicate=False))
    return [
        place.name
        for weight in model.__dict__[KEY].weights
        for place in weight.places
        if weight.ordinary_because is None
        and place.name in now
        and not isinstance(local(now[place.name]), CompressedTensor)
    ]


def _others(model: Any) -> dict[str, torch.Tensor]:
    """Parameters that the containers lack, such as a new head."""
    held = {spot.key for spots in model.__dict__[KEY].spots for spot in spots}
    return {
        join(path, attribute): gathered(value.detach()).cpu().contiguous()
        for path, module in model.named_modules()
        for attribute, value in module._parameters.items()
        if value is not None and (id(module), attribute) not in held
    }


def _save_others(others: dict[str, torch.Tensor], path: Path) -> None:
    """In the file that the loader looks for beside the containers."""
    from safetensors.torch import save_file

    if others:
        save_file(others, path, metadata={"format": "pt"})
    else:
        path.unlink(missing_ok=True)


def mark_config(path: Path) -> None:
    """Writes the line of the compression as `df11 compress` does; `df11 decompress` removes it."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.pop("quantization_config", None) is None:
        return
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    path.write_text(text.replace("{", "{" + MARK, 1), encoding="utf-8")
