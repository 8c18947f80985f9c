"""Brings compressed weights to a GPU: as they are stored, in the fast layout, or to be streamed.

```text
 stored     container ──pinned ring──▶ one slab: codebooks, records, bits, planes, tables
 fast       container ──▶ a slab for a while ──▶ up to 64 MB of BF16 ──▶ strips, entries
 streamed   the mapping, registered with the driver (or a pinned copy); tables on the GPU
```
Slabs are tensors of PyTorch's allocator, and arrays are views of them: memory is given back when
the last weight of a group is gone. No more memory is taken at any moment than the result,
`BATCH_BYTES` (or one tensor, if that is larger) and `SLICE_BYTES`.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from . import _native
from ._errors import GpuError
from ._load import compressed
from ._matrices import FAST, TABLE_BYTES, TILE_ROWS, Part
from ._parallel import cuts
from ._plan import Group, Item, aligned
from ._progress import Bar
from ._tensor import CompressedTensor, arrays_of_tiles
from ._torch import raw_stream

#: Stored bytes that are brought to the GPU at once to be changed into the fast layout.
BATCH_BYTES = 256 << 20
#: Bytes of BF16 that are decoded at once.
SLICE_BYTES = 64 << 20

Arrays = list[torch.Tensor]
_Packed = tuple[Arrays, list[Part]]


def upload(
    container: Any, group: Group, exact: bool, bar: Bar
) -> Iterator[tuple[Item, torch.Tensor | None]]:
    """The compressed weights of a group on its GPU; None for one that has no form there."""
    gpu = _Gpu(container, group.device, bar)
    by_form: dict[str, list[Item]] = {"fast": [], "stored": [], "streamed": [], "ordinary": []}
    for item in group.items:
        by_form[item.form(group.residence)].append(item)
    for item, packed in gpu.fast(by_form["fast"]):
        if packed is not None:
            yield item, CompressedTensor(*packed, item.weight.shape, exact=exact)
        elif item.parts:
            by_form["stored"].append(item)
        else:
            yield item, None
    for form, bring in (("stored", gpu.stored), ("streamed", gpu.streamed)):
        arrays = bring(_tiles(by_form[form]))
        for item in by_form[form]:
            yield item, compressed(item, arrays, exact, group.device)


def _tiles(items: Iterable[Item]) -> dict[str, Any]:
    return {name: tiles for item in items for name, tiles in item.tiles.items()}


class _Piece(NamedTuple):
    """Rows of a tensor in tiles."""

    name: str
    tiles: Any
    part: Part


#: Pieces of a weight that become one piece of the fast layout.
_Run = list[_Piece]


class _Packing:
    """Packs rows, in order, into strips."""

    def __init__(self, device: torch.device, rows: int, columns: int) -> None:
        self.device, self.rows, self.columns = device, rows, columns
        bytes_ = _native.strips_bytes(rows, columns)
        self.strips = torch.empty(bytes_, dtype=torch.uint8, device=device)
        self.stream = raw_stream(device.index)
        place = self.strips.data_ptr()
        self.packer = _native.Packer(device.index, rows, columns, place, self.stream)
        self.done = 0

    def add(self, weights: torch.Tensor) -> None:
        """Whole strips of dense BF16 on the GPU, or the last rows."""
        self.packer.pack(self.done, weights.shape[0], weights.data_ptr(), self.stream)
        self.done += weights.shape[0]

    def finish(self) -> tuple[Arrays, Part] | None:
        """Strips and entries, and the part that they are; None if exceptions are too many."""
        count = self.packer.finish(self.stream)
        if count is None:
            return None
        entries = torch.empty(4 * count, dtype=torch.uint8, device=self.device)
        if count:
            self.packer.take(entries.data_ptr(), self.stream)
        return [self.strips, entries], Part.whole(FAST, self.rows, self.columns)


def pack_rows(
    device: torch.device, rows: int, columns: int, values: Callable[[int, int], torch.Tensor]
) -> tuple[Arrays, Part] | None:
    """A BF16 matrix in the fast layout on a GPU: arrays, and the part that they are.

    `values` gives its rows from one to before another, on any device. None if exceptions are too
    many for that layout.
    """
    packing = _Packing(device, rows, columns)
    for first, last in _steps(0, rows, columns):
        packing.add(values(first, last).to(device))
    return packing.finish()


class _Gpu:
    """A container's tensors on one GPU."""

    def __init__(self, container: Any, device: torch.device, bar: Bar) -> None:
        self.container, self.device, self.bar = container, device, bar

    # ---- as stored ----

    def stored(self, tiles: dict[str, Any]) -> dict[str, Arrays]:
        """Five arrays of each tensor, in one slab. Done when it returns."""
        if not tiles:
            return {}
        own = cuts(tiles)
        arrays = _carved(
            {name: (*each.lengths, TABLE_BYTES) for name, each in tiles.items()}, device=self.device
        )
        # The allocator gives memory that earlier work on the current stream may still use.
        torch.cuda.current_stream(self.device).synchronize()
        items = [(name, _addresses(each)) for name, each in arrays.items() if name not in own]
        if items:
            _native.upload(self.container, self.device.index, items, self.bar.part)
        for name, cut in own.items():
            for view, array in zip(arrays[name], arrays_of_tiles(cut)[:4], strict=False):
                view.copy_(array)
        torch.cuda.current_stream(self.device).synchronize()
        self._build_tables(arrays)
        self.bar.add(sum(sum(each.lengths) for each in tiles.values()))
        for cut in own.values():
            cut.release()
        return arrays

    def _build_tables(self, arrays: dict[str, Arrays]) -> None:
        items = [
            (codebook.data_ptr(), codebook.numel(), table.data_ptr())
            for codebook, *_, table in arrays.values()
        ]
        _native.build_tables(self.device.index, items)

    # ---- in the fast layout ----

    def fast(self, items: list[Item]) -> Iterator[tuple[Item, _Packed | None]]:
        """Arrays and parts of each weight; None for one with too many exceptions."""
        all_runs = [_runs(item) for item in items]
        slices = self._slices(piece for runs in all_runs for run in runs for piece in run)
        for item, runs in zip(items, all_runs, strict=True):
            yield item, self._pack(runs, slices) if runs else self._pack_dense(item)

    def _slices(self, pieces: Iterable[_Piece]) -> Iterator[Iterator[torch.Tensor]]:
        """For each piece its decoded rows, some at a time; its tensor is there only meanwhile."""
        for batch in _batches(pieces):
            arrays = self.stored({piece.name: piece.tiles for piece in batch})
            for piece in batch:
                yield self._decoded(arrays[piece.name], piece.part)
            del arrays  # before the next ones are there

    def _decoded(self, arrays: Arrays, part: Part) -> Iterator[torch.Tensor]:
        for first, last in _steps(part.row_begin, part.row_end, part.columns):
            window = part._replace(row_begin=first, row_end=last)
            yield torch.ops.df11.decode(arrays, window, self.device)

    def _pack(self, runs: list[_Run], slices: Iterator[Iterator[torch.Tensor]]) -> _Packed | None:
        results = []
        for run in runs:
            rows = sum(piece.part.height for piece in run)
            packing = _Packing(self.device, rows, run[0].part.width)
            for piece in itertools.islice(slices, len(run)):
                for some in piece:
                    packing.add(some)
            results.append(packing.finish())
        found = [result for result in results if result is not None]
        if len(found) < len(results):
            return None
        return [array for arrays, _ in found for array in arrays], [part for _, part in found]

    def _pack_dense(self, item: Item) -> _Packed | None:
        """A weight whose pieces are not in tiles of 32 rows: decoded on the CPU."""
        dense = item.weight.decode(self.container).flatten(0, -2)
        rows, columns = dense.shape
        result = pack_rows(self.device, rows, columns, lambda first, last: dense[first:last])
        self.bar.add(sum(self.container[name].stored_bytes for name in item.weight.tensors))
        return None if result is None else (result[0], [result[1]])

    # ---- in host memory ----

    def streamed(self, tiles: dict[str, Any]) -> dict[str, Arrays]:
        """Four arrays of each tensor in pinned host memory, and its table on the GPU."""
        if not tiles:
            return {}
        own = cuts(tiles)
        for each in tiles.values():
            each.check()
            self.bar.add(sum(each.lengths))
        found = {name: arrays_of_tiles(each)[:4] for name, each in tiles.items()}
        arrays = _copied(found) if own else _pinned(found)
        for cut in own.values():
            cut.release()
        tables = _carved(dict.fromkeys(tiles, (TABLE_BYTES,)), device=self.device)
        torch.cuda.current_stream(self.device).synchronize()
        for name, mine in arrays.items():
            mine += tables[name]
        self._build_tables(arrays)
        return arrays


def _runs(item: Item) -> list[_Run]:
    """Pieces of whole strips go together; only the last one of a run may end within a strip."""
    runs: list[_Run] = []
    for name, part in item.parts:
        if not runs or runs[-1][-1].part.height % TILE_ROWS:
            runs.append([])
        runs[-1].append(_Piece(name, item.tiles[name], part))
    return runs


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        more = sum(piece.tiles.lengths)
        if batch and size + more > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += more
    if batch:
        yield batch


def _steps(begin: int, end: int, columns: int) -> Iterator[tuple[int, int]]:
    """Rows of whole strips, as many at a time as `SLICE_BYTES` hold."""
    step = max(1, SLICE_BYTES // (2 * columns * TILE_ROWS)) * TILE_ROWS
    for first in range(begin, end, step):
        yield first, min(first + step, end)


def _addresses(arrays: Arrays) -> tuple[int, int, int, int]:
    codebook, records, bits, plane = (array.data_ptr() for array in arrays[:4])
    return codebook, records, bits, plane


class _Registered:
    """Pages that the driver knows, until the last tensor in them is gone."""

    def __init__(self, spans: list[tuple[int, int]]) -> None:
        self.spans: list[tuple[int, int]] = []
        for begin, end in spans:
            _native.pin(begin, end - begin)
            self.spans.append((begin, end))

    def __del__(self) -> None:
        if self.spans:
            # Kernels may still read what Python has let go.
            torch.cuda.synchronize()
        for begin, _ in self.spans:
            _native.unpin(begin)


def _pinned(mapped: dict[str, Arrays]) -> dict[str, Arrays]:
    """Arrays in memory that a GPU can read: the mapping itself, or else a copy."""
    flat = [array for arrays in mapped.values() for array in arrays if array.numel()]
    try:
        registered = _Registered(_spans(flat))
    except GpuError:
        return _copied(mapped)
    return {
        name: [_keeping(array, registered) for array in arrays] for name, arrays in mapped.items()
    }


def _spans(arrays: Arrays) -> list[tuple[int, int]]:
    """The pages of arrays, each once: what lies side by side is one span."""
    page = mmap.PAGESIZE
    edges = sorted(
        (array.data_ptr() // page * page, -(-(array.data_ptr() + array.numel()) // page) * page)
        for array in arrays
    )
    spans: list[tuple[int, int]] = []
    for begin, end in edges:
        if spans and begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((begin, end))
    return spans


def _keeping(array: torch.Tensor, registered: _Registered) -> torch.Tensor:
    """The same memory, with what it needs to stay where it is."""
    if not array.numel():
        return array
    memory = (ctypes.c_ubyte * array.numel()).from_address(array.data_ptr())
    memory.keep = (array, registered)  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


def _copied(mapped: dict[str, Arrays]) -> dict[str, Arrays]:
    lengths = {name: [array.numel() for array in arrays] for name, arrays in mapped.items()}
    copies = _carved(lengths, pin_memory=True)
    for name, arrays in mapped.items():
        for copy, array in zip(copies[name], arrays, strict=True):
            copy.copy_(array)
    return copies


def _carved(lengths: Mapping[str, Sequence[int]], **where: Any) -> dict[str, Arrays]:
    """Arrays of these lengths, all in one slab."""
    slab = torch.empty(
        sum(aligned(length) for mine in lengths.values() for length in mine),
        dtype=torch.uint8,
        **where,
    )
    arrays: dict[str, Arrays] = {}
    at = 0
    for name, mine in lengths.items():
        arrays[name] = []
        for length in mine:
            arrays[name].append(slab[at : at + length])
            at += aligned(length)
    return arrays
