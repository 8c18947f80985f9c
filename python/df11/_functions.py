"""Versions, for compressed tensors, of PyTorch functions that need a tensor's memory.

Libraries call these functions to compare, save and change weights. Each does what is possible
without BF16 weights in memory, or refuses with a remedy.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ._dispatch import REMEDY, dense, is_compressed, refuse_writing

#: No processor has memory at addresses from here on.
_NO_MEMORY = 1 << 62
#: Libraries that use an address as the identity of a weight, to find tied ones, without reading
#: there.
_COMPARING = ("accelerate", "compressed_tensors", "peft", "transformers")
#: The most calls between `load_state_dict`, or transformers' loader, and the tensor.
_MAX_FRAMES = 6
_LOADER = "transformers.core_model_loading"


def refuse_gradients() -> None:
    raise RuntimeError(
        "a compressed tensor cannot require gradients; gradients flow through it to its inputs, so "
        f"train adapters beside it (requires_grad=False), or {REMEDY}"
    )


def _requires_grad(self: Any, requires_grad: bool = True) -> Any:
    if requires_grad and not _is_assigned():
        refuse_gradients()
    return self


def _is_assigned() -> bool:
    """Whether `load_state_dict(assign=True)` or transformers' loader requests gradients. They do so
    for each weight that replaces one with gradients, or is a float, and so also for compressed
    weights, where nobody needs gradients.
    """
    frame, code = sys._getframe(2), nn.Module._load_from_state_dict.__code__
    for _ in range(_MAX_FRAMES):
        if frame.f_code is code or frame.f_globals.get("__name__") == _LOADER:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _set_data(self: Any, value: Any) -> None:
    if is_compressed(value):
        if (value.shape, value.stride(), value.device) != (self.shape, self.stride(), self.device):
            raise RuntimeError(
                "the data of a compressed tensor cannot be a compressed one of other shape or on "
                "another device; put a new parameter in its module instead"
            )
        self._take(value)
        return
    warnings.warn(
        "the data of a compressed weight is set: it is an ordinary tensor from now on, with all of "
        "its memory",
        stacklevel=3,
    )
    is_parameter = getattr(self, "_is_param", False)
    other = nn.Parameter(value, requires_grad=False) if is_parameter else value.detach()
    torch.utils.swap_tensors(self, other)  # type: ignore[no-untyped-call]


def _scaled(name: str) -> Callable[..., Any]:
    """`div_` or `mul_`, with which some models scale weights when they first run. A factor of one
    changes nothing. A scaled parameter becomes ordinary. Other tensors are refused, because they
    may be aliases of a parameter.
    """

    def scale(self: Any, other: Any, **options: Any) -> Any:
        if not is_compressed(self):
            with torch._C.DisableTorchFunctionSubclass():
                return getattr(self, name)(other, **options)
        is_number = isinstance(other, (int, float))
        if is_number and other == 1 and not options:
            return self
        if not (is_number and getattr(self, "_is_param", False)):
            refuse_writing(name)
        _set_data(self, getattr(self.decode(), name)(other, **options))
        return self

    return scale


class _Storage(torch.UntypedStorage):
    """The storage of a compressed tensor, which has no memory of its own."""

    #: Bytes of arrays.
    held: int

    def nbytes(self) -> int:
        return self.held

    def data_ptr(self) -> int:
        _refuse_address()


def _storage(self: Any) -> Any:
    """The storage that PyTorch sees, always the same object."""
    with torch._C.DisableTorchFunctionSubclass():
        storage = self.untyped_storage()
    storage.__class__ = _Storage
    storage.held = self._nbytes
    return storage


def _typed_storage(self: Any) -> torch.TypedStorage:
    kept = {"wrap_storage": _storage(self), "dtype": self.dtype}
    return torch.TypedStorage(**kept, _internal=True)  # type: ignore[no-untyped-call]


def _refuse_address() -> NoReturn:
    raise RuntimeError(
        "a compressed tensor has no memory with BF16 weights, and no address; to save a model use "
        "save_pretrained, or the tensors of df11.state_dict(model); .decode() gives one tensor"
    )


def _address(self: Any) -> int:
    """A number that aliases share, for libraries that compare addresses. It is no valid address to
    read from. Raises `RuntimeError` for all other callers.
    """
    if self.is_meta:
        return 0
    caller = sys._getframe(2).f_globals.get("__name__", "").partition(".")[0]
    if caller not in _COMPARING:
        _refuse_address()
    number = hash((self._arrays[0].data_ptr(), self.flat_parts, self.transposed))
    return _NO_MEMORY + number % (1 << 44) * 256


def _share_memory(self: Any) -> Any:
    for array in self._arrays:
        array.share_memory_()
    return self


def _interface(self: Any) -> NoReturn:
    raise AttributeError("a compressed tensor has no memory with BF16 weights; take .decode()")


def _assign(self: Tensor, key: Any, value: Any) -> None:
    if is_compressed(self):
        refuse_writing("assignment to elements")
    self[key] = dense(value)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.requires_grad_: _requires_grad,
    Tensor.requires_grad.__set__: _requires_grad,  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch._has_compatible_shallow_copy_type: lambda self, other: type(self) is type(other),
    Tensor.data_ptr: _address,
    Tensor.nbytes.__get__: lambda self: self._nbytes,  # type: ignore[attr-defined]
    Tensor.untyped_storage: _storage,
    Tensor.storage: _typed_storage,
    # A caller of clone wants to write.
    Tensor.clone: lambda self, **_: self.without_gaps().decode(),
    Tensor.share_memory_: _share_memory,
    Tensor.is_shared: lambda self: self._arrays[0].is_shared(),
    Tensor.__setitem__: _assign,
    Tensor.numpy: lambda self, *args, **kwargs: self.decode().numpy(*args, **kwargs),
    Tensor.__array__: lambda self, *args, **kwargs: self.decode().__array__(*args, **kwargs),
    Tensor.__cuda_array_interface__.__get__: _interface,
    Tensor.div_: _scaled("div_"),
    Tensor.mul_: _scaled("mul_"),
    Tensor.apply_: lambda *_: refuse_writing("apply_"),
    Tensor.tolist: lambda self: self.decode().tolist(),
    Tensor.__dlpack__: lambda self, **kwargs: self.decode().__dlpack__(**kwargs),
}
