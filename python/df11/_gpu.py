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
from typing import Any

import torch
from torch import Tensor

from . import _native
from ._container import Tensors, Tiles, of_windows
from ._errors import GpuError
from ._matrices import FAST, TABLE_BYTES, TILE_ROWS, Part
from ._plan import Item, Residence, aligned, matrix_of
from ._progress import Bar
from ._tensor import CompressedTensor
from ._torch import raw_stream

#: Stored bytes that are brought to the GPU at once to be changed into the fast layout.
BATCH_BYTES = 256 << 20
#: Bytes of BF16 that are decoded at once.
SLICE_BYTES = 64 << 20

Arrays = list[Tensor]
_Packed = tuple[Arrays, list[Part]]
#: A window of tiles.
_Window = tuple[Tiles, Part]


def upload(
    tensors: Tensors,
    items: Iterable[Item],
    device: torch.device,
    residence: Residence,
    exact: bool,
    bar: Bar,
) -> Iterator[tuple[Item, CompressedTensor | None]]:
    """Compressed weights on a GPU; None for one that has no form there.

    Each byte of them is read once.
    """
    gpu = _Gpu(tensors, device, bar)
    by_form: dict[str, list[Item]] = {"fast": [], "stored": [], "streamed": [], "ordinary": []}
    for item in items:
        by_form[item.form(residence)].append(item)
    for item, packed in gpu.fast(by_form["fast"]):
        if packed is not None:
            yield item, CompressedTensor(*packed, item.value.shape, exact=exact)
        elif isinstance(item.value, CompressedTensor):
            by_form["stored"].append(item)
        else:
            yield item, None
    for form, bring in (("stored", gpu.stored), ("streamed", gpu.streamed)):
        values = _values(by_form[form])
        windows, tiles = tensors.around(values)
        arrays = bring(tiles)
        for item, value, mine in zip(by_form[form], values, windows, strict=True):
            yield item, of_windows(value, mine, arrays, exact=exact, device=device)


def _values(items: Iterable[Item]) -> list[CompressedTensor]:
    return [item.value for item in items if isinstance(item.value, CompressedTensor)]


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

    def add(self, weights: Tensor) -> None:
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
    device: torch.device, rows: int, columns: int, values: Callable[[int, int], Tensor]
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

    def __init__(self, tensors: Tensors, device: torch.device, bar: Bar) -> None:
        self.tensors, self.device, self.bar = tensors, device, bar

    # ---- as stored ----

    def stored(self, some: Sequence[Tiles]) -> dict[Tiles, Arrays]:
        """Five arrays of each tensor, in one slab. Done when it returns."""
        if not some:
            return {}
        own = self.tensors.cut(some)
        lengths = {
            tiles: [array.numel() for array in own[tiles]]
            if tiles in own
            else self.tensors.lengths(tiles)
            for tiles in some
        }
        arrays = _carved(
            {tiles: (*mine, TABLE_BYTES) for tiles, mine in lengths.items()}, device=self.device
        )
        # The allocator gives memory that earlier work on the current stream may still use.
        torch.cuda.current_stream(self.device).synchronize()
        items = [
            (
                tiles.name,
                (codebook.data_ptr(), records.data_ptr(), bits.data_ptr(), plane.data_ptr()),
            )
            for tiles, (codebook, records, bits, plane, _) in arrays.items()
            if tiles not in own
        ]
        if items:
            container = self.tensors.container
            _native.upload(container, self.device.index, items, self.bar.part)
        for tiles, mine in own.items():
            for view, array in zip(arrays[tiles], mine, strict=False):
                view.copy_(array)
        torch.cuda.current_stream(self.device).synchronize()
        self._build_tables(arrays)
        self.bar.add(sum(map(sum, lengths.values())))
        return arrays

    def _build_tables(self, arrays: dict[Tiles, Arrays]) -> None:
        items = [
            (codebook.data_ptr(), codebook.numel(), table.data_ptr())
            for codebook, *_, table in arrays.values()
        ]
        _native.build_tables(self.device.index, items)

    # ---- in the fast layout ----

    def fast(self, items: list[Item]) -> Iterator[tuple[Item, _Packed | None]]:
        """Arrays and parts of each weight; None for one with too many exceptions."""
        windows = iter(self.tensors.around(_values(items))[0])
        is_dense = [not isinstance(item.value, CompressedTensor) for item in items]
        all_runs = [[] if dense else _runs(next(windows)) for dense in is_dense]
        slices = self._slices(window for runs in all_runs for run in runs for window in run)
        for item, runs in zip(items, all_runs, strict=True):
            yield item, self._pack(runs, slices) if runs else self._pack_dense(item)

    def _slices(self, windows: Iterable[_Window]) -> Iterator[Iterator[Tensor]]:
        """For each window its decoded rows, some at a time; its tiles are there only meanwhile."""
        for batch in self._batches(windows):
            arrays = self.stored(list(dict.fromkeys(tiles for tiles, _ in batch)))
            for tiles, part in batch:
                yield self._decoded(arrays[tiles], part)
            del arrays  # before the next ones are there

    def _decoded(self, arrays: Arrays, part: Part) -> Iterator[Tensor]:
        for first, last in _steps(part.row_begin, part.row_end, part.columns):
            window = part._replace(row_begin=first, row_end=last)
            yield torch.ops.df11.decode(arrays, window, self.device)

    def _pack(
        self, runs: list[list[_Window]], slices: Iterator[Iterator[Tensor]]
    ) -> _Packed | None:
        results = []
        for run in runs:
            rows = sum(part.height for _, part in run)
            packing = _Packing(self.device, rows, run[0][1].width)
            for window in itertools.islice(slices, len(run)):
                for some in window:
                    packing.add(some)
            results.append(packing.finish())
        found = [result for result in results if result is not None]
        if len(found) < len(results):
            return None
        return [array for arrays, _ in found for array in arrays], [part for _, part in found]

    def _pack_dense(self, item: Item) -> _Packed | None:
        """A weight whose tensors are not in tiles of 32 rows, which the CPU has decoded."""
        rows, columns = matrix_of(item.value)
        dense = item.value.reshape(rows, columns)
        result = pack_rows(self.device, rows, columns, lambda first, last: dense[first:last])
        return None if result is None else (result[0], [result[1]])

    def _batches(self, windows: Iterable[_Window]) -> Iterator[list[_Window]]:
        batch: list[_Window] = []
        known: set[Tiles] = set()
        size = 0
        for tiles, part in windows:
            more = 0 if tiles in known else sum(self.tensors.lengths(tiles))
            if batch and size + more > BATCH_BYTES:
                yield batch
                batch, size, known = [], 0, set()
            batch.append((tiles, part))
            known.add(tiles)
            size += more
        if batch:
            yield batch

    # ---- in host memory ----

    def streamed(self, some: Sequence[Tiles]) -> dict[Tiles, Arrays]:
        """Four arrays of each tensor in pinned host memory, and its table on the GPU."""
        if not some:
            return {}
        found = self.tensors.on_host(some)
        self.bar.add(sum(array.numel() for mine in found.values() for array in mine))
        arrays = _pinned(found) if all(tiles.is_whole for tiles in some) else _copied(found)
        tables = _carved(dict.fromkeys(some, (TABLE_BYTES,)), device=self.device)
        torch.cuda.current_stream(self.device).synchronize()
        for tiles, mine in arrays.items():
            mine += tables[tiles]
        self._build_tables(arrays)
        return arrays


def _runs(windows: Sequence[_Window]) -> list[list[_Window]]:
    """Windows of whole strips go together; only the last one of a run may end within a strip."""
    runs: list[list[_Window]] = []
    for window in windows:
        if not runs or runs[-1][-1][1].height % TILE_ROWS:
            runs.append([])
        runs[-1].append(window)
    return runs


def _steps(begin: int, end: int, columns: int) -> Iterator[tuple[int, int]]:
    """Rows of whole strips, as many at a time as `SLICE_BYTES` hold."""
    step = max(1, SLICE_BYTES // (2 * columns * TILE_ROWS)) * TILE_ROWS
    for first in range(begin, end, step):
        yield first, min(first + step, end)


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


def _pinned(mapped: dict[Tiles, Arrays]) -> dict[Tiles, Arrays]:
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


def _keeping(array: Tensor, registered: _Registered) -> Tensor:
    """The same memory, with what it needs to stay where it is."""
    if not array.numel():
        return array
    memory = (ctypes.c_ubyte * array.numel()).from_address(array.data_ptr())
    memory.keep = (array, registered)  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


def _copied(mapped: dict[Tiles, Arrays]) -> dict[Tiles, Arrays]:
    lengths = {name: [array.numel() for array in arrays] for name, arrays in mapped.items()}
    copies = _carved(lengths, pin_memory=True)
    for name, arrays in mapped.items():
        for copy, array in zip(copies[name], arrays, strict=True):
            copy.copy_(array)
    return copies


def _carved(lengths: Mapping[Tiles, Sequence[int]], **where: Any) -> dict[Tiles, Arrays]:
    """Arrays of these lengths, all in one slab."""
    slab = torch.empty(
        sum(aligned(length) for mine in lengths.values() for length in mine),
        dtype=torch.uint8,
        **where,
    )
    arrays: dict[Tiles, Arrays] = {}
    at = 0
    for name, mine in lengths.items():
        arrays[name] = []
        for length in mine:
            arrays[name].append(slab[at : at + length])
            at += aligned(length)
    return arrays
