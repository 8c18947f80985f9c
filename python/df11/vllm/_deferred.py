"""Tensors without memory that record where vLLM's own loading code puts each weight.

Each architecture of vLLM has code that takes the checkpoint's tensors by name, slices them for a
rank of tensor parallelism, and copies them into windows of its parameters. Here this code runs
unchanged on tensors that know only their shape and their backing: a `Target` is a parameter, a
`Stored` a tensor of a container. Views keep the backing; a copy of a `Stored` into a `Target` is
recorded, not made. Afterwards `_fill` loads the recorded weights; each rank loads only its own
tiles.

All other operations on a stored tensor get its decoded values, so code that computes with
checkpoint tensors works too. The results are copied into targets as dense patches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from .._arrays import known_dtype_of
from .._container import Tensors
from .._matrices import view_of
from .._tensor import CompressedTensor

_aten = torch.ops.aten
_FILLS = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default)


class Patch(NamedTuple):
    """A window of a target, and its new values."""

    row: int
    rows: int
    column: int
    columns: int
    #: Its values: dense ones, a window of a stored tensor, or None for zeros.
    values: Tensor | None


class Backing:
    """The matrix behind deferred tensors, which are views of it. All dimensions but the last count
    rows.
    """

    def __init__(self, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        self.rows, self.columns = prod(self.shape[:-1]), self.shape[-1] if self.shape else 1

    def tensor(self) -> Deferred:
        return Deferred(torch.empty(self.shape, dtype=self.dtype, device="meta"), self, self.device)


class Stored(Backing):
    """A tensor of a container."""

    def __init__(self, tensors: Tensors, name: str) -> None:
        self.tensors, self.name = tensors, name
        self.stored = tensors.container[name]
        super().__init__(self.stored.shape, known_dtype_of(name, self.stored.dtype), _CPU)

    @property
    def is_in_tiles(self) -> bool:
        """Whether it is in tiles."""
        tiles = self.stored.tiles if len(self.shape) > 1 else None
        return tiles is not None and tiles.columns == self.columns

    def compressed(self) -> CompressedTensor:
        """The whole tensor, if it is in tiles."""
        value = self.tensors[self.name]
        assert isinstance(value, CompressedTensor)
        return value

    def values(self, view: Tensor) -> Tensor:
        window = window_of(view, self.columns) if len(self.shape) == 2 else None
        if window is None:
            base: Tensor = self.stored.torch()
            return base.as_strided(view.shape, view.stride(), view.storage_offset())
        row, rows, column, width = window
        decoded: Tensor = self.stored[row : row + rows, column : column + width].torch()
        return decoded.view(view.shape)


class Target(Backing):
    """A parameter of a layer, until its weights are loaded."""

    def __init__(self, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        self.patches: list[Patch] = []
        #: Called when dense patches cover it.
        self.complete: Callable[[Target], None] | None = None
        #: The final tensor, if it needs no container.
        self.value: Tensor | None = None

    def fill(self, view: Tensor, number: float) -> None:
        if not view.numel():
            return
        if number != 0:
            raise RuntimeError(f"a compressed weight is filled with {number}; {_REMEDY}")
        self._add(self._patches(view, None))

    def copy(self, view: Tensor, values: Tensor) -> None:
        if not view.numel():
            return
        values = values.expand(view.shape)
        is_same = values.dtype == self.dtype
        if not (isinstance(values, Deferred) and values.is_in_tiles and is_same):
            dense = values.decode() if isinstance(values, Deferred) else values
            values = dense.to(self.dtype)
        self._add(self._patches(view, values))

    def _patches(self, view: Tensor, values: Tensor | None) -> list[Patch]:
        """One patch if view and values are windows; otherwise those of their parts."""
        mine = window_of(view, self.columns)
        is_window = not isinstance(values, Deferred) or values.window is not None
        if mine is not None and is_window:
            _, rows, _, columns = mine
            return [Patch(*mine, None if values is None else values.reshape(rows, columns))]
        if view.dim() < 2:
            raise RuntimeError(
                f"a compressed weight of shape {self.shape} is filled in a way that df11 cannot "
                f"follow, by a view of shape {tuple(view.shape)} and strides {view.stride()}; "
                f"{_REMEDY}"
            )
        inner = [None] * len(view) if values is None else values.unbind()
        pairs = zip(view.unbind(), inner, strict=True)
        return [patch for one, other in pairs for patch in self._patches(one, other)]

    def _add(self, patches: list[Patch]) -> None:
        # Later patches replace earlier ones of the same window.
        new = {patch[:4] for patch in patches}
        self.patches = [patch for patch in self.patches if patch[:4] not in new] + patches
        if self.complete is None or any(isinstance(p.values, Deferred) for p in self.patches):
            return
        if _count(self.patches) >= self.rows * self.columns:
            self.complete(self)
            self.patches.clear()

    @property
    def lacks(self) -> str | None:
        """A message if patches overlap or do not cover it; otherwise None."""
        whole = self.rows * self.columns
        if self.value is not None or (count := _count(self.patches)) == whole:
            return None
        return f"{count:,} of {whole:,} weights are there"

    def ordered(self, name: str = "a layer") -> list[Patch]:
        """All patches, ordered by place. `name`: the name of the weight, for errors. Raises
        `ValueError` if they overlap or do not cover it.
        """
        if self.lacks is not None:
            raise lacking({name: self.lacks})
        return sorted(self.patches, key=lambda patch: (patch.row, patch.column))


def _count(patches: list[Patch]) -> int:
    return sum(patch.rows * patch.columns for patch in patches)


#: Parameters that an error names.
_NAMED = 20


def lacking(found: dict[str, str]) -> ValueError:
    """The error for a checkpoint that lacks weights. `found`: for each parameter, how many weights
    were found, or nothing.
    """
    names = [f"{name} ({count})" if count else name for name, count in found.items()]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ValueError(
        f"the checkpoint lacks weights of {', '.join(names[:_NAMED])}{more}; fetch it again"
    )


class Deferred(Tensor):
    backing: Backing
    #: The same view on the device meta, for its place.
    placed: Tensor

    @staticmethod
    def __new__(cls, placed: Tensor, backing: Backing, device: torch.device) -> Deferred:
        lies: Any = {"strides": placed.stride(), "storage_offset": placed.storage_offset()}
        made: Deferred = torch.Tensor._make_wrapper_subclass(
            cls, placed.shape, dtype=placed.dtype, device=device, **lies
        )
        made.placed, made.backing = placed, backing
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is _aten.copy_.default:
            return _copy(args[0], args[1])
        if isinstance(first, Deferred):
            if func is _aten._to_copy.default and kwargs.get("device") == _META:
                return func(first.placed, *args[1:], **kwargs)
            if func in _FILLS and isinstance(first.backing, Target):
                first.backing.fill(first.placed, float(args[1]) if len(args) > 1 else 0.0)
                return first
            if (views := first._viewed(func, args[1:], kwargs)) is not None:
                return views
        args, kwargs = tree_map_only(Deferred, lambda each: each.decode(), (args, kwargs))
        return func(*args, **kwargs)

    def _viewed(self, func: Any, others: tuple[Any, ...], kwargs: Any) -> Any:
        """Views of this; None if the function makes no views."""
        infos = [argument.alias_info for argument in func._schema.arguments]
        aliases = [info for info in infos if info is not None]
        if not aliases or any(info.is_write for info in aliases):
            return None
        storage = self.placed.untyped_storage()._cdata
        result = func(self.placed, *others, **kwargs)
        views = [result] if isinstance(result, Tensor) else result
        if any(view.untyped_storage()._cdata != storage for view in views):
            return None
        return tree_map(lambda view: Deferred(view, self.backing, self.device), result)

    @property
    def window(self) -> _Window | None:
        """Its window of the backing matrix, if it is a window."""
        return window_of(self.placed, self.backing.columns)

    @property
    def is_in_tiles(self) -> bool:
        """Whether it consists of windows of a stored tensor in tiles."""
        in_tiles = isinstance(self.backing, Stored) and self.backing.is_in_tiles
        return in_tiles and _is_of_windows(self.placed, self.backing.columns)

    def decode(self) -> Tensor:
        """Decodes it on the CPU. A parameter has no values yet."""
        if isinstance(self.backing, Stored):
            return self.backing.values(self.placed)
        raise RuntimeError(
            f"a weight that is being loaded has no values to compute with; {_REMEDY}"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Deferred({type(self.backing).__name__}, shape={tuple(self.shape)})"


_CPU, _META = torch.device("cpu"), torch.device("meta")
_REMEDY = (
    "load the BF16 checkpoint for that (load formats that make up or change weights, such as "
    "dummy, and reloading do not work with compressed ones)"
)
#: First row and rows; first column and columns.
_Window = tuple[int, int, int, int]


def _copy(into: Tensor, values: Tensor) -> Tensor:
    if isinstance(into, Deferred):
        if isinstance(into.backing, Stored):
            raise RuntimeError(f"{into.backing.name} of a container cannot be written to")
        assert isinstance(into.backing, Target)
        into.backing.copy(into.placed, values)
        return into
    assert isinstance(values, Deferred)
    return into.copy_(values.decode())


def _is_of_windows(view: Tensor, columns: int) -> bool:
    if window_of(view, columns) is not None:
        return True
    return view.dim() > 1 and all(_is_of_windows(each, columns) for each in view.unbind())


def window_of(view: Tensor, columns: int) -> _Window | None:
    """The window of a contiguous matrix that a view is; None for other views."""
    whole = view_of(view if view.dim() else view.unsqueeze(0), columns)
    if whole is None or whole.transposed:
        return None
    row, rows = whole.rows.start, whole.rows.stop - whole.rows.start
    column, width = whole.columns.start, whole.columns.stop - whole.columns.start
    return None if view.dim() == 1 and rows > 1 else (row, rows, column, width)
