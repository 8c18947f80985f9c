"""Compresses BFloat16 model weights losslessly, to two thirds of their size.

    import df11

    df11.compress("Llama-3.1-8B", "Llama-3.1-8B.df11")
    model = df11.open("Llama-3.1-8B.df11")
    weights = model["model.norm.weight"].torch()

`import df11` needs only Python: no GPU, no PyTorch, no NumPy.
"""

# The way through the package. A weight of a model is a tensor (_tensor) whose memory is the
# compressed arrays.
#
#   use     PyTorch's calls arrive in _dispatch, and some in _functions. They decode, or call
#           operators (_ops, and _experts for mixtures), which run kernels on PyTorch's stream.
#           _ahead decodes the next weight while a product of many rows runs.
#           _order measures in which order the framework adds, and _order_cache keeps that on disk.
#           _forwards and _code read from a module's source which layers share x; _siblings compiles
#           its forward again with one product for them.
#   load    attach (_load), transformers (_quantizer) and diffusers (_diffusers) call in. Folders
#           come from the Hub (_hub), or stand for folders in stores (_link). BF16 files become
#           containers first (_origin), or one GPU compresses them without any (_packing).
#           _container shows a container as a dictionary of tensors on the CPU. The library's own
#           loader moves these (_pretrained), or their names decide (_parameters). _plan then
#           decides device (_devices) and residence of each, and _load and _bring copy them.
#           Weights that are dense so far are compressed by _bring, with the encoders of _encoding.
#           Folders of FP8 models are loaded by their own quantizer, with compressed tensors
#           (_foreign).
#   save    _origin remembers the containers of a module, and compares. _saving copies them or
#           compresses anew. _merging merges adapters.
#   other   _safe and torch have the interface of safetensors; vllm is the plugin, which records
#           what vLLM's loading code does with tensors without memory, and loads that. _wrapping
#           lists the functions of other libraries that are wrapped; _register wraps the first ones
#           when these libraries are imported, which _df11_autoload awaits.

from collections.abc import Mapping
from typing import TYPE_CHECKING

from _df11_autoload import install as _install

from ._errors import (
    CorruptError,
    Error,
    GpuError,
    IoError,
    LimitError,
    NoBaseError,
    ParameterError,
    UnsupportedError,
)
from ._link import link
from ._native import (
    Block,
    DeviceBlock,
    DeviceModel,
    Model,
    Program,
    Slice,
    Tensor,
    __version__,
    compress,
    convert,
    decompress,
    devices,
    estimate,
    open,
    plan,
    verify,
)
from ._report import Placement, Plan, Report, Verification, inspect
from ._safe import safe_open

if TYPE_CHECKING:
    from ._load import attach as attach
    from ._merging import merge_adapter as merge_adapter
    from ._parameters import MissingError as MissingError
    from ._quantizer import Config as Config
    from ._quantizer import Df11Config as Df11Config
    from ._saving import save as save
    from ._saving import state_dict as state_dict
    from ._status import ModelReport as ModelReport
    from ._status import report as report

Mapping.register(Model)
# The names that users see, in messages and pickles.
_PRIVATE = ("df11._errors", "df11._report", "df11._safe")
for _value in list(globals().values()):
    if isinstance(_value, type) and _value.__module__ in _PRIVATE:
        _value.__module__ = "df11"

__all__ = ["Block", "CorruptError", "DeviceBlock", "DeviceModel", "Error", "GpuError", "IoError"]
__all__ += ["LimitError", "Model", "NoBaseError", "ParameterError", "Placement", "Plan", "Program"]
__all__ += ["Report", "Slice", "Tensor", "UnsupportedError", "Verification"]
__all__ += ["__version__", "compress", "convert", "decompress", "devices", "estimate", "inspect"]
__all__ += ["link", "open", "plan", "safe_open", "verify"]


#: Names that need PyTorch, which is imported when one of them is first used.
_WITH_TORCH = {
    "Config": "_quantizer",
    "Df11Config": "_quantizer",
    "MissingError": "_parameters",
    "ModelReport": "_status",
    "attach": "_load",
    "merge_adapter": "_merging",
    "report": "_status",
    "save": "_saving",
    "state_dict": "_saving",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "torch":
        return import_module(".torch", __name__)
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_WITH_TORCH[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WITH_TORCH, "torch"})


_install()
