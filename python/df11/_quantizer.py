"""transformers' extension points: `from_pretrained` of a folder of containers, here or on the Hub.

Methods are in the order in which `from_pretrained` calls them. They choose the device, open the
containers (which `_origin` first makes from a BF16 folder, unless a GPU compresses it, `_packing`),
take the tensors that the loader has made, and bring them to their devices.

The config gets the name of a weights file beside the containers, for weights that they lack. On the
Hub, that name also finds the containers (`_hub`). A config without a dtype gets that of the
containers. So dtypes are chosen as for safetensors: that of the `dtype` argument, else of the
config, else of the checkpoint. A weight stored in another dtype is converted once, and stays an
ordinary parameter. No other weight is in memory or on disk as BF16 meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import __version__
from transformers.quantizers import auto
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ._added import load_beside
from ._container import Tensors
from ._devices import Devices, byte_count, device_of, resolve
from ._doctor import log_newer, mismatch
from ._errors import unfit
from ._hub import Expected, folder_of, hand, wrap_resolution
from ._link import WEIGHTS, open_folder
from ._load import check_options, load
from ._modules import prepare
from ._origin import KEY, Made, bf16_folder, made_of
from ._packing import PACKED, PackingTaker
from ._parameters import warn_of_converted
from ._plan import Item, Residence
from ._pretrained import Taker, checkpoint_dtype
from ._saving import wrap_saving
from ._siblings import join_siblings
from ._watch import check_gpus, watch
from ._wrapping import wrap_listed

METHOD = "df11"
#: Types of devices that compress BF16 weights during loading.
PACKING_DEVICES = ("cuda",)


class Method(str, Enum):
    DF11 = METHOD


#: Calls with the config, before the search for files. Each release has at least one of them.
_WITH_CONFIG = ("update_tp_plan", "update_attn_implementation")
_NEEDED = (
    *("param_needs_quantization", "get_quantize_ops", "update_dtype", "adjust_max_memory"),
    "get_state_dict_and_metadata",
)


@register_quantization_config(METHOD)
class Df11Config(QuantizationConfigMixin):
    """Options of weights: `quantization_config` of `from_pretrained`.

    With them, `from_pretrained` loads a compressed folder, or compresses a BF16 folder while it
    loads. A dict works too: `{"quant_method": "df11", "mode": "fused"}`.

    `mode`: "exact", the default, gives the BF16 model's bits; "fused" multiplies while it decodes,
    which is faster and rounds differently. `residence`: layout of weights that are loaded to a GPU:
    "stored", the least memory; "fast", which is larger and faster; or "auto", the default: fast for
    as many blocks as fit into `memory` or two thirds of the free memory, stored for the rest. On
    the CPU weights are as stored. `memory`: bytes of GPU memory for weights, such as "9GB" (a list
    for several GPUs), for "auto" by default nine tenths of the free memory. The GPU reads the rest
    from pinned host memory, and all weights with `streamed`.

    Raises `df11.ParameterError`, a ValueError, for unknown options and values.
    """

    def __init__(
        self,
        mode: str = "exact",
        residence: str = "auto",
        memory: Any = None,
        streamed: bool = False,
        **others: Any,
    ) -> None:
        check_options(mode=mode, residence=residence)
        if unknown := [name for name in others if name != "quant_method"]:
            known = "mode, residence, memory, streamed"
            raise unfit(f"Df11Config has no {', '.join(unknown)}", f"its options are {known}")
        for size in memory if isinstance(memory, list) else [memory]:
            if size is not None:
                byte_count(size)  # raises here, and not when the model has been read
        self.quant_method = Method.DF11  # type: ignore[assignment]
        self.mode, self.residence = mode, residence
        self.memory, self.streamed = memory, streamed

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": METHOD}


#: Its short name, which most code uses.
Config = Df11Config


def merge(call: Callable[[], Any], arguments: dict[str, Any]) -> Any:
    """Replaces the options in the config of a compressed model by the caller's. The library's own
    merge serves only its own configs. A dict serves too, as for a model that is not compressed.
    """
    config: Any = arguments["quantization_config"]
    options = arguments.get("quantization_config_from_args")
    method = config.get("quant_method") if isinstance(config, dict) else config.quant_method
    if isinstance(options, dict) and options.get("quant_method") == METHOD:
        options = Config(**options)
    return options if method == METHOD and isinstance(options, Config) else call()


wrap_listed({f"{auto.__name__}:AutoHfQuantizer.merge_quantization_configs": merge})


def refuse_decoding(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "run `df11 decompress FOLDER -o MODEL` and load MODEL to have BF16 weights in memory"
    )


@register_quantizer(METHOD)
class Df11Quantizer(HfQuantizer):
    #: Adapters can be trained: gradients go through compressed weights.
    is_trainable = True
    is_compileable = True
    #: See `_saving.save_model`.
    takes_new = True
    quantization_config: Config

    def __init__(self, quantization_config: Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.wanted: Any = None
        self.max_memory: dict[Any, Any] = {}
        self.model: Any = None
        self.container: Any = None
        self.made: Made | None = None
        self.taker: Any = None
        self.placement: Any = None
        self.dtype: torch.dtype | None = None
        #: While the model is saved: gives the tensors that its library writes.
        self.saving: Callable[[], dict[str, Any]] | None = None
        self._ignored: Any = None
        self._later: Callable[[], None] | None = None
        self._ratio = 1.0

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Checks transformers, and in a later call chooses the device."""
        lacking = [name for name in _NEEDED if not hasattr(HfQuantizer, name)]
        if not any(hasattr(HfQuantizer, name) for name in _WITH_CONFIG):
            lacking.append(" and ".join(_WITH_CONFIG))
        if lacking:
            raise ImportError(mismatch("transformers", __version__, lacking[0]))
        log_newer()
        if self.model is not None and isinstance(device_map, dict):
            self._settle(device_map)

    def update_device_map(self, device_map: Any) -> Any:
        """Keeps the caller's device map; without one, the model decides (`_home`)."""
        self.wanted = device_map
        if device_map is None:
            return None
        if isinstance(device_map, dict):
            self.placement = resolve(device_map, self.quantization_config.memory)
            return {"": self.placement.rest}
        # With this one the loader passes `max_memory` on unchanged.
        return "sequential"

    def _expect_containers(self, config: Any) -> Any:
        """Makes the loader look for containers, and not for missing weights files."""
        if not self.pre_quantized:
            return config
        source = Path(getattr(config, "_name_or_path", None) or "")
        config.transformers_weights = WEIGHTS
        if source.is_dir() and getattr(config, "dtype", None) is not None:
            return config
        config.transformers_weights = expected = Expected(WEIGHTS)
        expected.receive = partial(self._open_containers, config)
        if not wrap_resolution() and source.is_dir():
            self._open_containers(config, folder_of(source))
        return config

    # Releases call one of the two, or both.
    update_tp_plan = update_attn_implementation = _expect_containers

    def _open_containers(self, config: Any, folder: Path) -> None:
        """Opens the containers, and gives a config without a dtype theirs."""
        config.transformers_weights = WEIGHTS
        self._open(folder)
        if getattr(config, "dtype", None) is None:
            config.dtype = checkpoint_dtype(self.container)

    def _open(self, folder: Path) -> None:
        self.container = open_folder(folder)

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self.dtype = dtype
        return dtype

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        files = [] if checkpoint_files is None else checkpoint_files
        prepare(model)
        self.model = model
        if self.wanted is None and files:
            self.placement = resolve({"": _home(files[0])}, self.quantization_config.memory)
        if self.pre_quantized or self.placement is not None:
            self._begin(files)
        else:
            # Only the devices decide whether a GPU compresses BF16 weights.
            self._later = partial(self._begin, files)
            self._ratio = PACKED

    def _begin(self, files: list[str]) -> None:
        model = self.model
        if self._packs(files):
            said, device = self.quantization_config, self.placement.devices[0]
            folder, exact, form = bf16_folder(files), said.mode == "exact", self._residence(files)
            self.taker = packer = PackingTaker(model, folder, device, self.dtype, exact, form)
            if (slices := packer.slices(files)) is not None:
                files[:] = [hand(slices)]
            self._ratio = PACKED
            return
        beside = self._prepare(files)
        whole = sum(tensor.nbytes for tensor in self.container.tensors.values())
        self._ratio = self.container.stored_bytes / max(1, whole)
        rest = "cpu" if self.placement is None else self.placement.rest
        self.taker = taker = Taker(model, Tensors(self.container), self.dtype, rest)
        tensors = taker.slices()
        added = {} if beside is None else load_beside(beside, tensors)
        files[:] = [hand(tensors | added)]
        taker.take_beside(beside, list(added))
        # `df11.report` names the tensors that belong to no parameter.
        self._ignored = model._keys_to_ignore_on_load_unexpected
        model._keys_to_ignore_on_load_unexpected = {""}
        # The loader takes these weights for ones that are quantized during loading.
        self.pre_quantized = False

    def _packs(self, files: list[str]) -> bool:
        said = self.quantization_config
        place: Devices | None = self.placement
        if self.pre_quantized or place is None or said.streamed:
            return False
        several = place.where is not None or len(place.devices) > 1
        # Only BF16 weights are compressed on a GPU; for others containers are made.
        is_bf16 = self.dtype in (None, torch.bfloat16)
        if several or not is_bf16 or place.devices[0].type not in PACKING_DEVICES:
            return False
        if place.memory is not None:
            # A checkpoint that would fit in BF16 fits compressed in any case.
            return _bytes(files) <= place.memory[0]
        if said.residence != "auto" or place.devices[0].type == "cpu":
            return True
        return PACKED * _bytes(files) <= place.limits(0)[0]

    def _residence(self, files: list[str]) -> Residence:
        """The residence of weights that a device compresses."""
        said, place = self.quantization_config, self.placement
        if said.residence != "auto" or place.devices[0].type == "cpu":
            return "fast" if said.residence == "fast" else "stored"
        return "fast" if PACKED * _bytes(files) <= place.limits(0)[1] else "stored"

    def _prepare(self, files: list[str]) -> Path | None:
        """Opens or makes the containers. Returns the path of a possible file beside them."""
        if not self.pre_quantized:
            self.made = made_of(files)
            self.container = self.made.container
            return None
        if not files:
            raise ValueError("df11 loads from a folder of containers; name one in from_pretrained")
        if self.container is None:
            self._open(folder_of(Path(files[0]).parent))
        return Path(files[0])

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> Any:
        return self.taker.param_needs_quantization(model, param_name)

    def get_quantize_ops(self) -> Any:
        return self.taker.get_quantize_ops()

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        return param.element_size() * self._ratio

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        self.max_memory = dict(max_memory)
        return max_memory

    def _settle(self, device_map: dict[str, Any]) -> None:
        self.placement = resolve(self.wanted, self.quantization_config.memory, self.max_memory)
        begin, self._later = self._later, None
        if begin is not None:
            begin()
        if isinstance(self.taker, Taker):
            self.taker.rest = self.placement.rest
        device_map.clear()
        device_map[""] = self.placement.rest

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        from transformers import PreTrainedModel

        self.pre_quantized = True
        # Weights and the code that computes with them are as without compression. transformers
        # marks the configs of quantized models, and some models then take other paths, which round
        # differently or guess the dtype of weights.
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                vars(module.config).pop("_is_quantized", None)
        if hasattr(model.config, "transformers_weights"):
            del model.config.transformers_weights
        if isinstance(self.taker, PackingTaker):
            model.__dict__[KEY] = self.taker.finish()
            join_siblings(model)
            check_gpus([self.taker.device])
        else:
            model._keys_to_ignore_on_load_unexpected = self._ignored
            taker, self.taker = self.taker, None
            items = taker.finish()
            left = taker.left()
            finish(model, self, taker.tensors, items)
            model.__dict__[KEY].add(model, left)
        wrap_saving()
        watch(model)
        # Copies of the model carry the rest of the quantizer.
        self.model = self.container = self.made = self.taker = None
        return model

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(
        self, model: Any
    ) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        if self.saving is not None:
            return self.saving(), {}
        if not getattr(model, "_hf_peft_config_loaded", False):
            raise ValueError(
                "call save_pretrained of the model itself, which copies its containers"
            )
        return None, {}

    _dequantize = refuse_decoding

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        wrap_saving()


def _bytes(files: list[str]) -> int:
    return sum(Path(file).stat().st_size for file in files)


def _home(file: str) -> torch.device:
    """The default device of a model: the GPU, if there is one; the CPU for the component of a
    pipeline, which moves its components itself.
    """
    is_component = Path(file).parents[1].joinpath("model_index.json").is_file()
    return device_of("cpu" if is_component else None)


def finish(model: Any, quantizer: Any, tensors: Tensors, items: list[Item]) -> None:
    said = quantizer.quantization_config
    residence = "streamed" if said.streamed else said.residence
    warn_of_converted(items, tensors.container, quantizer.dtype)
    load(model, tensors, items, quantizer.placement, mode=said.mode, residence=residence)
    if quantizer.made is not None:
        model.__dict__[KEY].keep(quantizer.made)
