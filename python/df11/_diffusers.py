"""diffusers: `from_pretrained` of compressed models and pipelines.

diffusers keeps its quantizers in two tables without an extension point, and finds the files of a
checkpoint with two functions that know only its own formats. So df11 adds an entry to the tables
when they are imported, and wraps the functions when the first compressed model is loaded. The
methods of the quantizer do everything else; they are in the order in which diffusers calls them.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.quantizers import auto
from diffusers.quantizers.base import DiffusersQuantizer

from . import _native
from ._arrays import dtype_of
from ._container import Lineage, Tensors
from ._devices import device_of, resolve
from ._doctor import log_newer
from ._errors import misshapen
from ._hub import folder_of
from ._link import open_folder
from ._origin import KEY, SAVE_AGAIN, Made, made_of
from ._parameters import wanted_by
from ._plan import Item
from ._quantizer import METHOD, Config, finish, merge, refuse_decoding
from ._saving import save_model
from ._tensor import CompressedTensor
from ._watch import watch
from ._wrapping import wrap_listed

#: Module of diffusers that finds and loads weights.
_LOADER = "diffusers.models.modeling_utils"
_OPTIONS = ("subfolder", "cache_dir", "force_download", "local_files_only", "token", "revision")
#: State of each thread: the quantizer of the next model (`quantizer`) and of the requested file
#: (`opened`); whether df11 reads a single file, and the tensors that it read.
_loading = threading.local()


class Df11DiffusersQuantizer(DiffusersQuantizer):
    is_serializable = True
    supports_safetensors_serialization = True
    #: Adapters can be trained: gradients go through compressed weights.
    is_trainable = True
    is_compileable = True
    #: Parameters that diffusers keeps in F32 beside weights of 16 bits are F32 here too.
    use_keep_in_fp32_modules = True
    quantization_config: Any

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.made: Made | None = None
        self.tensors: Any = None
        self.dtype: torch.dtype | None = None
        self.placement: Any = None
        #: While the model is saved, what gives the tensors that its library writes.
        self.saving: Callable[[], dict[str, Any]] | None = None
        self._items: list[Item] = []
        self._lineage: Lineage | None = None

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Checks diffusers, and makes it ask this quantizer for files. diffusers calls it twice."""
        if self.tensors is not None:
            return
        log_newer()
        single, _loading.single = getattr(_loading, "single", None), None
        if single is None:
            _wrap()
            _loading.quantizer = weakref.ref(self)
        else:
            self.made, self.tensors = single.made, single.tensors
            self._lineage = single.lineage

    def update_torch_dtype(self, torch_dtype: Any) -> Any:
        self.dtype = torch_dtype
        return torch_dtype

    def update_device_map(self, device_map: Any) -> None:
        """The CPU unless the caller names a device, as for any model of diffusers."""
        said = self.quantization_config
        if isinstance(device_map, str) or (device_map and len({*device_map.values()}) > 1):
            raise ValueError(
                f"device_map={device_map!r} is not there for compressed models of diffusers; name "
                "one device, or give df11.Config(memory=...) for a GPU that is too small"
            )
        is_of_gpu = said.streamed or said.memory is not None or said.residence == "fast"
        default = device_of(None if is_of_gpu else "cpu")
        device = next(iter(device_map.values())) if device_map else default
        self.placement = resolve({"": device}, said.memory)

    def open(self, folder: Path) -> None:
        self.tensors = Tensors(open_folder(folder))

    def values(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        values = {name: self.tensors[name] for name in names}
        for name, value in values.items():
            if isinstance(value, CompressedTensor) and self.dtype not in (None, value.dtype):
                values[name] = value.decode()
        self._lineage = Lineage(self.tensors, dict(values))
        return values

    def maybe_update_loaded_keys(
        self, loaded_keys: list[str], checkpoint_files: list[str]
    ) -> list[str]:
        """Compresses BF16 files."""
        if not self.pre_quantized:
            self.made = made_of(checkpoint_files)
            self.tensors = Tensors(self.made.container)
        return loaded_keys

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self.made is None or isinstance(state_dict, Checkpoint):
            return state_dict
        if other := [name for name in state_dict if name not in self.tensors]:
            raise ValueError(
                f"diffusers calls a tensor {other[0]}, and the checkpoint does not; {SAVE_AGAIN}"
            )
        return self.values(state_dict)

    def _process_model_before_weight_loading(
        self, model: Any, state_dict: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if self.tensors is None:
            raise ValueError(
                f"df11 compresses folders and files of safetensors, and nothing else; {SAVE_AGAIN}"
            )
        if self.dtype is not None:
            return
        wanted = wanted_by(model)
        for name, parameter in model.named_parameters():
            if state_dict is not None and name in state_dict:
                parameter.data = parameter.data.to(wanted(name, state_dict[name].dtype))
            elif name in self.tensors:
                kind = wanted(name, dtype_of(self.tensors.container[name].dtype))
                parameter.data = parameter.data.to(kind)

    def check_if_quantized_param(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def check_quantized_param_shape(self, param_name: str, wanted: Any, found: Any) -> None:
        raise misshapen(param_name, wanted.shape, found.shape, self.tensors.container.path)

    def create_quantized_param(self, *args: Any, **kwargs: Any) -> Any:
        _, value, name, device, state_dict, *_ = args
        if self.placement is None:  # `from_single_file` passes it with each parameter only
            self.update_device_map(None if device.type == "cpu" else {"": device})
        assert self._lineage is not None
        self._items.append(Item(name, value, self._lineage.of(state_dict[name])))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        finish(model, self, self.tensors, self._items)
        _wrap_saving()
        watch(model)
        if not model.config.get("quantization_config"):  # of a single file
            model.register_to_config(quantization_config=self.quantization_config)
        # The weights have their original values, so the model may be moved and converted freely.
        model.is_quantized = False
        self.tensors = self.made = self._lineage = None
        self._items = []

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        return (state_dict if self.saving is None else self.saving()), {}

    _dequantize = refuse_decoding

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _wrap_saving()


def _wrap_saving() -> None:
    """Makes `save_pretrained` write a compressed model as it is in memory."""
    wrap_listed({f"{_LOADER}:ModelMixin.save_pretrained": _save})


def _save(call: Any, arguments: dict[str, Any]) -> None:
    model, folder = arguments.pop("self"), arguments.pop("save_directory")
    is_ours = isinstance(getattr(model, "hf_quantizer", None), Df11DiffusersQuantizer)
    if not is_ours or KEY not in vars(model):
        call()
        return
    options = arguments.pop("kwargs", {}) | arguments
    if options.get("variant") or options.get("push_to_hub"):
        raise ValueError(
            "save_pretrained takes no variant or push_to_hub for a compressed model; "
            "`hf upload REPOSITORY FOLDER` brings the folder to the Hub"
        )
    weights = [weight for weight in model.__dict__[KEY].weights if weight.description is not None]
    renamed = any(weight.description[0] != [weight.name] for weight in weights)
    library = partial(call.func, model)
    save_model(model, folder, library, options, takes_new=False, renamed=renamed)


def _wrap() -> None:
    """Makes diffusers find containers when it looks for the files of a compressed model.
    Raises `ImportError` if this release has other functions.
    """

    def find_index(call: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        quantizer = _take_state("quantizer")
        if quantizer is None or not quantizer.pre_quantized:
            return call()
        options = {name: arguments.get(name) for name in _OPTIONS}
        quantizer.open(folder_of(arguments["pretrained_model_name_or_path"], **options))
        _loading.opened = weakref.ref(quantizer)
        return None

    def find_file(call: Callable[[], Any], _: dict[str, Any]) -> Any:
        quantizer = _take_state("opened")
        return call() if quantizer is None else _Values(quantizer.values(quantizer.tensors))

    functions = {"_fetch_index_file": find_index, "_get_model_file": find_file}
    wrap_listed({f"{_LOADER}:{name}": each for name, each in functions.items()})


class _Values(dict[str, torch.Tensor]):
    """Tensors that diffusers gets in place of a weights file."""

    __repr__ = object.__repr__


class Checkpoint(dict[str, torch.Tensor]):
    """The tensors of a container, in place of the checkpoint that `from_single_file` expects."""

    def __init__(self, path: Path) -> None:
        """Opens a container, or makes one from a safetensors file. Raises `ValueError` for any
        other file.
        """
        self.made: Made | None = None
        if path.suffix != ".df11":
            if path.suffix != ".safetensors":
                raise ValueError(f"df11 compresses files of safetensors, not {path}; {SAVE_AGAIN}")
            self.made = Made(path)
        self.tensors = Tensors(
            _native.open(path, in_memory=True) if self.made is None else self.made.container
        )
        super().__init__({name: self.tensors[name] for name in self.tensors})
        self.lineage = Lineage(self.tensors, dict(self))


def wrap_single_files() -> None:
    """Makes `from_single_file` load containers and, with options of df11, compress safetensors
    files.
    """

    def load(call: Any, arguments: dict[str, Any]) -> Any:
        given = arguments.get("kwargs", {})
        said, source = given.get("quantization_config"), arguments.get(_SINGLE)
        if isinstance(said, dict) and said.get("quant_method") == METHOD:
            said = Config(**said)
        is_container = isinstance(source, (str, os.PathLike)) and Path(source).suffix == ".df11"
        if said is None and is_container:
            said = Config()
        if not isinstance(said, Config):
            if is_container:
                raise ValueError(f"{source} is compressed; leave quantization_config out")
            return call()
        _loading.reads = True
        try:
            return partial(call, quantization_config=said)()
        finally:
            _loading.reads, _loading.single = False, None

    def read(call: Any, arguments: dict[str, Any]) -> Any:
        file = arguments["checkpoint_file"]
        if not getattr(_loading, "reads", False) or isinstance(file, dict):
            return call()
        _loading.single = Checkpoint(Path(file))
        return _loading.single

    mixin = "diffusers.loaders.single_file_model:FromOriginalModelMixin.from_single_file"
    wrap_listed({mixin: load, "diffusers.loaders.single_file_utils:load_state_dict": read})


_SINGLE = "pretrained_model_link_or_path_or_dict"


def _take_state(name: str) -> Any:
    """Takes a quantizer out of the state of this thread."""
    reference, _loading.__dict__[name] = _loading.__dict__.get(name), None
    return None if reference is None else reference()


auto.AUTO_QUANTIZER_MAPPING[METHOD] = Df11DiffusersQuantizer
auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = Config
wrap_listed({f"{auto.__name__}:DiffusersAutoQuantizer.merge_quantization_configs": merge})
