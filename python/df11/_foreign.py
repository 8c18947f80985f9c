"""Compressed folders whose config names another quantization, such as FP8 or MXFP4.

The config's own quantizer loads the model, as it does without df11. Two quantizers of transformers
leave weights in FP8 and multiply by them: `fp8`, and `compressed-tensors` with
`use_optimized_inference`. With these, the loader gets compressed tensors, which it places like any
others and makes parameters; kernels get decoded weights, in memory that is freed after the call.
Other quantizers get each tensor as the checkpoint had it, decoded when the loader asks for it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from . import _plan
from ._arrays import known_dtype_of
from ._container import Sliceable, Tensors, with_dtype
from ._dispatch import dense, is_compressed
from ._experts import decode_experts
from ._link import is_linked, open_folder
from ._modules import entries
from ._origin import KEY, Origin, Weight, digest, settled
from ._saving import wrap_saving
from ._tensor import CompressedTensor
from ._watch import check_gpus, watch
from ._wrapping import wrap_listed

#: Files of weights that transformers would load without df11.
_ORDINARY = ("*.safetensors", "*.bin", "*.gguf")
#: Quantizations that leave weights in FP8.
_FP8, _CHANNELS = "fp8", "compressed-tensors"
#: Functions that give the kernels of `fp8`.
_KERNELS = (
    "transformers.integrations.finegrained_fp8:load_finegrained_fp8_kernel",
    "transformers.integrations.deepgemm:load_deepgemm_kernel",
)
#: Kernels read F32 weights, which are scales, in each call.
_WIDE = "F32, as scales are"


class _Decoded(Sliceable):
    """A tensor that is decoded each time a loader asks for its values."""

    def __init__(self, tensors: Tensors, name: str) -> None:
        super().__init__(tensors, name)
        self.dtype = known_dtype_of(name, self.get_dtype())

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, key: Any) -> Any:
        values: Tensor = self.reader.stored(self.name).torch()
        return values if key is ... else values[key]


class _Undecoded(_Decoded):
    """A tensor that stays compressed on the device to which a loader moves it."""

    def __init__(self, tensors: Tensors, name: str, reasons: dict[str, str]) -> None:
        super().__init__(tensors, name)
        self.reasons = reasons

    def __getitem__(self, key: Any) -> Any:
        return self if key is ... else super().__getitem__(key)

    @torch.inference_mode(False)  # whose tensors could not be used outside of it
    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        tensors: Tensors = self.reader
        value = tensors[self.name]
        if isinstance(value, CompressedTensor):
            tensors.check([self.name])
        made = with_dtype(value, dtype)
        device = torch.device("cpu" if device is None else device)
        if (reason := self._why_ordinary(made, device)) is not None:
            self.reasons[self.name] = reason
            return dense(made).to(device)
        moved = made.to(device)
        assert isinstance(moved, CompressedTensor)
        tensors.moved(self.name, moved)
        return moved

    def _why_ordinary(self, value: Tensor, device: torch.device) -> str | None:
        item = _plan.Item(self.name, value, [self.name])
        reason = _plan.why_ordinary(item, self.reader.container, False, device.type == "cuda")
        if reason is None and value.dtype == torch.float32:
            return _WIDE
        return reason if is_compressed(value) else reason or _plan.GAP


class _Loading:
    """Records a quantizer's containers while it loads a model from compressed tensors."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        #: Why tensors of the containers are not compressed.
        self.reasons: dict[str, str] = {}
        whole = sum(tensor.nbytes for tensor in tensors.container.tensors.values())
        #: Bytes of compressed weights as a share of their own.
        self.ratio = tensors.container.stored_bytes / max(1, whole)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Loading:
        # The loader copies conversions, some of which hold the quantizer.
        return self

    def for_loader(self) -> dict[str, Any]:
        return {name: _Undecoded(self.tensors, name, self.reasons) for name in self.tensors}


def _loading_of(arguments: dict[str, Any]) -> _Loading | None:
    found: _Loading | None = vars(arguments["self"]).get(KEY)
    return found


def _element_size(call: Callable[[], float], arguments: dict[str, Any]) -> float:
    loading = _loading_of(arguments)
    return call() if loading is None else call() * loading.ratio


def _finish(call: Callable[[], Any], arguments: dict[str, Any]) -> Any:
    """Records the origin of the weights once they are on their devices."""
    result, loading, model = call(), _loading_of(arguments), arguments["model"]
    if loading is not None:
        model.__dict__[KEY] = _origin_of(model, loading.tensors, loading.reasons)
        # Copies of the model carry the rest of the quantizer.
        del vars(arguments["self"])[KEY]
        watch(model)
    return result


def _saved(call: Callable[[], Any], arguments: dict[str, Any]) -> Any:
    saving = getattr(arguments["self"], "saving", None)
    return call() if saving is None else (saving(), {})


def _origin_of(model: Any, tensors: Tensors, reasons: dict[str, str]) -> Origin:
    container = tensors.container
    origin = Origin(container.path, held=tensors, identity=container.identity)
    origin.full_path = container.full_path
    origin.unused = [name for name in tensors if name not in tensors.used]
    for value, spots, _, is_persistent in entries(model):
        weight = Weight(spots[0].name, spots, value.numel() * value.element_size(), None)
        if value.is_meta:
            weight.reason = "offloaded by accelerate"
        elif isinstance(value, CompressedTensor):
            weight.description = tensors.describe(value)
        elif is_persistent:
            weight.reason = reasons.get(weight.name, _plan.MADE)
            weight.digest = digest(value)
        else:
            continue
        origin.weights.append(weight)
    for weight in origin.weights:
        weight.digest = None if weight.digest is None else settled(weight.digest)
    origin.held = Tensors(container)  # without the objects of loading
    check_gpus(value.device for _, value in origin.live_weights())
    return origin


def is_for_others(folder: Path) -> bool:
    """Whether a folder, which may be linked, holds containers and no other weights, and its config
    names another quantization than df11's.
    """
    config = folder / "config.json"
    if not config.is_file() or any(next(folder.glob(kind), None) for kind in _ORDINARY):
        return False
    if not is_linked(folder) and next(folder.glob("*.df11"), None) is None:
        return False
    said = json.loads(config.read_text(encoding="utf-8")).get("quantization_config") or {}
    return bool(said.get("quant_method", "df11") != "df11")


def tensors_for_others(folder: Path) -> dict[str, Any]:
    """The tensors of a folder's containers, for transformers' loader, decoded. `_prepare` replaces
    them by compressed ones.
    """
    tensors = Tensors(open_folder(folder))
    if not wrap_quantizers():
        _warn(tensors, "this release of transformers has other methods of quantizers")
    return {name: _Decoded(tensors, name) for name in tensors}


def _warn(tensors: Tensors, reason: str) -> None:
    warnings.warn(
        f"df11: {tensors.container.path} is compressed beside another quantization, whose "
        "quantizer loads it: it decodes all weights, which take as much memory as without df11, "
        f"because {reason}",
        stacklevel=2,
    )


def _prepare(call: Callable[[], Any], arguments: dict[str, Any]) -> Any:
    """Makes a quantizer keep weights compressed, if it can, before it changes the model."""
    quantizer, options = arguments["self"], arguments.get("kwargs", {})
    file: Any = next(iter(options.get("checkpoint_files") or ()), None)
    first = next(iter(getattr(file, "tensors", {}).values()), None)
    if isinstance(first, _Decoded):
        tensors: Tensors = first.reader
        reason = _why_decoded(quantizer, arguments["model"], options.get("device_map"))
        if reason is None:
            vars(quantizer)[KEY] = loading = _Loading(tensors)
            vars(quantizer)[f"{KEY}_wraps"] = _Wraps()
            quantizer.takes_new = False
            file.tensors = loading.for_loader()
        else:
            _warn(tensors, reason)
    return call()


def _why_decoded(quantizer: Any, model: Any, device_map: Any) -> str | None:
    method = quantizer.quantization_config.quant_method
    method = getattr(method, "value", method)
    if method not in (_FP8, _CHANNELS):
        return f"{method} is neither {_FP8} nor {_CHANNELS}"
    if getattr(quantizer.quantization_config, "dequantize", False):
        return f"{method} dequantizes them"
    if not getattr(quantizer, "use_fp8_kernel", True):
        return f"{method} dequantizes them without use_optimized_inference"
    if getattr(model.config, "distributed_config", None) is not None:
        return "the model is distributed over several processes"
    if isinstance(device_map, dict) and "disk" in device_map.values():
        return "device_map offloads some to disk"
    if method == _FP8 and not wrap_kernels():
        return "this release of transformers loads its kernels by other functions"
    return None


class _Wraps:
    """Wraps what a model needs, also in the process that unpickles it."""

    def __init__(self) -> None:
        wrap_quantizers()
        wrap_kernels()
        wrap_saving()

    def __reduce__(self) -> tuple[type[_Wraps], tuple[()]]:
        return _Wraps, ()


def wrap_quantizers() -> bool:
    return wrap_listed({f"{_QUANTIZER}.{name}": each for name, each in _WRAPPED.items()})


def wrap_kernels() -> bool:
    """Makes the kernels of `fp8` get decoded weights."""
    return wrap_listed(dict.fromkeys(_KERNELS, _with_decoding))


_QUANTIZER = "transformers.quantizers.base:HfQuantizer"
_WRAPPED = {
    "get_state_dict_and_metadata": _saved,
    "param_element_size": _element_size,
    "postprocess_model": _finish,
    "preprocess_model": _prepare,
}


def _with_decoding(call: Callable[[], Any], arguments: dict[str, Any]) -> Any:
    return _Decoding(call())


class _Decoding:
    """Kernels that get decoded weights."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._kernels, name)
        return partial(_run, found) if callable(found) else found


def _run(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def decoded(value: Any) -> Any:
        return _decode(value, kwargs) if is_compressed(value) else value

    return kernel(*tree_map(decoded, args), **tree_map(decoded, kwargs))


def _decode(weight: CompressedTensor, options: dict[str, Any]) -> Tensor:
    """A decoded weight. Only experts that the kernel reads are decoded; the memory of the others,
    which must exist because the kernel's choices depend on the number of experts, holds anything.
    Waits for the GPU to name the experts.
    """
    is_plain = weight.dim() == 3 and not weight.transposed and weight.spread is None
    routed = _routed(options) if is_plain else None
    some = [expert for expert in routed or () if expert < len(weight)]
    if routed is None or len(some) == len(weight):
        return weight.decode()
    room = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    if some:
        height = weight.matrix_shape[0] // len(weight)
        places = [(expert, 0, 0) for expert in some]
        decoded = decode_experts(weight._arrays, weight.flat_parts, height, places, weight)
        index = torch.tensor(some, device=weight.device)
        room.view(torch.uint8)[index] = decoded.view(torch.uint8).view(len(some), room.shape[1], -1)
    return room


def _routed(options: dict[str, Any]) -> list[int] | None:
    """The numbers of the experts that a kernel gets rows for; None if they are not known."""
    if torch.compiler.is_compiling() or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    ):
        return None
    if (numbers := options.get("expert_ids")) is not None:
        return list(numbers.unique().tolist())
    if (counts := options.get("tokens_per_expert")) is not None:
        return list(counts.nonzero().flatten().tolist())
    return None
