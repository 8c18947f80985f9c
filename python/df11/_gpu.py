"""Brings compressed weights to a GPU: as they are stored, in the fast layout, or to be streamed.

```text
 stored     container ──pinned ring──▶ one slab of a group: codebooks, records, bits, planes, tables
 fast       container ──▶ a slab for a while ──decode──▶ up to 64 MB of BF16 ──pack──▶ strips, entries
 streamed   container's mapping, registered with the driver (or a pinned copy); tables on the GPU
```
Slabs are tensors of PyTorch's allocator, and arrays are views of them: memory is given back when the
last weight of a group is gone. No more memory is taken at any moment than the result, `BATCH_BYTES`
(or one tensor, if that is larger) and `SLICE_BYTES`.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from . import _native
from ._errors import GpuError
from ._load import Bar, compressed, stored_part
from ._parameters import Weight
from ._plan import TABLE_BYTES, Group, aligned, is_tiled
from ._tensor import arrays_of_tiles

#: Stored bytes that are brought to the GPU at once to be changed into the fast layout.
BATCH_BYTES = 256 << 20
#: Bytes of BF16 that are decoded at once.
SLICE_BYTES = 64 << 20
#: Rows of a strip, in which the fast layout is made.
STRIP_ROWS = 32

Arrays = list[torch.Tensor]


def upload(group: Group, exact: bool, bar: Bar) -> Iterator[tuple[Weight, torch.Tensor]]:
    """The compressed weights of a group on its GPU."""
    gpu = _Gpu(group.container, group.device, bar)
    by_form: dict[str, list[Weight]] = {}
    for weight, form in group.forms():
        by_form.setdefault(form, []).append(weight)
    fast = list(gpu.fast(by_form.get("fast", [])))
    stored = [*by_form.get("stored", []), *(weight for weight, result in fast if result is None)]
    for weight, result in fast:
        if result is not None:
            yield weight, compressed(weight, *result, exact)
    for weights, arrays, device in (
        (stored, gpu.stored(_names(stored)), None),
        (
            by_form.get("streamed", []),
            gpu.streamed(_names(by_form.get("streamed", []))),
            group.device,
        ),
    ):
        for weight in weights:
            parts = [
                stored_part(gpu.container[p.tensor], gpu.container[p.tensor].tiles, p.rows)
                for p in weight.pieces
            ]
            found = [array for piece in weight.pieces for array in arrays[piece.tensor]]
            yield weight, compressed(weight, found, parts, exact, device)


def _names(weights: Iterable[Weight]) -> list[str]:
    return list(dict.fromkeys(name for weight in weights for name in weight.tensors))


class _Run(NamedTuple):
    """Pieces of a weight that become one piece of the fast layout."""

    rows: int
    #: Of each piece the tensor, and its rows in it.
    pieces: list[tuple[str, int, int]]


class _Packing:
    """Packs rows, in order, into strips."""

    def __init__(self, device: torch.device, rows: int, columns: int) -> None:
        self.device, self.rows, self.columns = device, rows, columns
        bytes_ = _native.strips_bytes(rows, columns)
        self.strips = torch.empty(bytes_, dtype=torch.uint8, device=device)
        self.stream = _stream(device)
        self.packer = _native.Packer(
            device.index, rows, columns, self.strips.data_ptr(), self.stream
        )
        self.done = 0

    def add(self, weights: torch.Tensor) -> None:
        """Whole strips of dense BF16 on the GPU, or the last rows."""
        self.packer.pack(self.done, weights.shape[0], weights.data_ptr(), self.stream)
        self.done += weights.shape[0]

    def finish(self) -> tuple[Arrays, tuple[int, ...]] | None:
        """Strips and entries, and the part that they are; None if there are too many exceptions."""
        count = self.packer.finish(self.stream)
        if count is None:
            return None
        entries = torch.empty(4 * count, dtype=torch.uint8, device=self.device)
        if count:
            self.packer.take(entries.data_ptr(), self.stream)
        return [self.strips, entries], (
            1,
            self.rows,
            self.columns,
            0,
            0,
            self.rows,
            0,
            self.columns,
        )


class _Gpu:
    """A container's tensors on one GPU."""

    def __init__(self, container: Any, device: torch.device, bar: Bar) -> None:
        self.container, self.device, self.bar = container, device, bar

    # ---- as stored ----

    def stored(self, names: list[str]) -> dict[str, Arrays]:
        """Five arrays of each tensor, in one slab. Done when it returns."""
        if not names:
            return {}
        lengths = {name: [*self.container[name].tiles.lengths, TABLE_BYTES] for name in names}
        slab = self._empty(sum(aligned(length) for each in lengths.values() for length in each))
        arrays: dict[str, Arrays] = {}
        at = 0
        for name, each in lengths.items():
            arrays[name] = []
            for length in each:
                arrays[name].append(slab[at : at + length])
                at += aligned(length)
        # The allocator gives memory that earlier work on the current stream may still use.
        torch.cuda.current_stream(self.device).synchronize()
        items = [(name, _addresses(each[:4])) for name, each in arrays.items()]
        _native.upload(self.container, self.device.index, items, self.bar.part)
        self._build_tables(arrays)
        self.bar.add(sum(self.container[name].stored_bytes for name in names))
        return arrays

    def _build_tables(self, arrays: dict[str, Arrays]) -> None:
        items = [
            (codebook.data_ptr(), codebook.numel(), table.data_ptr())
            for codebook, *_, table in arrays.values()
        ]
        _native.build_tables(self.device.index, items)

    def _empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.device)

    # ---- in the fast layout ----

    def fast(
        self, weights: list[Weight]
    ) -> Iterator[tuple[Weight, tuple[Arrays, list[tuple[int, ...]]] | None]]:
        """Arrays and parts of each weight; None for one with too many exceptions."""
        tiled = {
            id(weight): self._runs(weight) for weight in weights if is_tiled(weight, self.container)
        }
        pieces = [piece for runs in tiled.values() for run in runs for piece in run.pieces]
        slices = self._slices(pieces)
        for weight in weights:
            if id(weight) in tiled:
                yield weight, self._pack(weight, tiled[id(weight)], slices)
            else:
                yield weight, self._pack_dense(weight)

    def _runs(self, weight: Weight) -> list[_Run]:
        """Pieces of whole strips go together; only the last one of a run may end within a strip."""
        runs: list[_Run] = []
        whole = False
        for piece in weight.pieces:
            tensor = self.container[piece.tensor]
            part = stored_part(tensor, tensor.tiles, piece.rows)
            begin, end = part[4:6]
            before = runs.pop() if whole else _Run(0, [])
            runs.append(
                _Run(before.rows + end - begin, [*before.pieces, (piece.tensor, begin, end)])
            )
            whole = runs[-1].rows % STRIP_ROWS == 0
        return runs

    def _slices(self, pieces: list[tuple[str, int, int]]) -> Iterator[Iterator[torch.Tensor]]:
        """For each piece its decoded rows, some at a time; tensors are there only meanwhile."""
        for batch in self._batches(pieces):
            arrays = self.stored(list(dict.fromkeys(name for name, _, _ in batch)))
            for name, begin, end in batch:
                yield self._decoded(arrays[name], name, begin, end)
            del arrays  # before the next ones are there

    def _batches(self, pieces: list[tuple[str, int, int]]) -> Iterator[list[tuple[str, int, int]]]:
        batch: list[tuple[str, int, int]] = []
        size = 0
        for piece in pieces:
            more = sum(self.container[piece[0]].tiles.lengths)
            if batch and size + more > BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(piece)
            size += more
        if batch:
            yield batch

    def _decoded(self, arrays: Arrays, name: str, begin: int, end: int) -> Iterator[torch.Tensor]:
        tensor = self.container[name]
        part = stored_part(tensor, tensor.tiles, None)
        for first, last in _steps(begin, end, part[2]):
            window = [*part[:4], first, last, *part[6:]]
            yield torch.ops.df11.decode(arrays, window, self.device)

    def _pack(
        self, weight: Weight, runs: list[_Run], slices: Iterator[Iterator[torch.Tensor]]
    ) -> tuple[Arrays, list[tuple[int, ...]]] | None:
        results = []
        for run in runs:
            packing = _Packing(self.device, run.rows, weight.shape[-1])
            for piece in itertools.islice(slices, len(run.pieces)):
                for rows in piece:
                    packing.add(rows)
            results.append(packing.finish())
        if any(result is None for result in results):
            return None
        found = [result for result in results if result is not None]
        return [array for arrays, _ in found for array in arrays], [part for _, part in found]

    def _pack_dense(self, weight: Weight) -> tuple[Arrays, list[tuple[int, ...]]] | None:
        """A weight whose pieces are no tiles of 32 rows: decoded on the CPU."""
        dense = weight.decode(self.container).flatten(0, -2)
        packing = _Packing(self.device, *dense.shape)
        for first, last in _steps(0, dense.shape[0], dense.shape[1]):
            packing.add(dense[first:last].to(self.device))
        self.bar.add(sum(self.container[name].stored_bytes for name in weight.tensors))
        result = packing.finish()
        return None if result is None else (result[0], [result[1]])

    # ---- in host memory ----

    def streamed(self, names: list[str]) -> dict[str, Arrays]:
        """Four arrays of each tensor in pinned host memory, and its table on the GPU."""
        if not names:
            return {}
        for name in names:
            self.container[name].tiles.check()
            self.bar.add(self.container[name].stored_bytes)
        arrays = _pinned({name: self.container[name].tiles for name in names})
        tables = self._empty(TABLE_BYTES * len(names)).split(TABLE_BYTES)
        torch.cuda.current_stream(self.device).synchronize()
        for each, table in zip(arrays.values(), tables, strict=True):
            each.append(table)
        self._build_tables(arrays)
        return arrays


def _steps(begin: int, end: int, columns: int) -> Iterator[tuple[int, int]]:
    """Rows of whole strips, as many at a time as `SLICE_BYTES` hold."""
    step = max(1, SLICE_BYTES // (2 * columns * STRIP_ROWS)) * STRIP_ROWS
    for first in range(begin, end, step):
        yield first, min(first + step, end)


def _addresses(arrays: Arrays) -> tuple[int, ...]:
    return tuple(array.data_ptr() for array in arrays)


def _stream(device: torch.device) -> int:
    return int(torch._C._cuda_getCurrentRawStream(device.index))


class _Registered:
    """Pages that the driver knows, until the last tensor in them is gone."""

    def __init__(self, spans: list[tuple[int, int]]) -> None:
        self.spans: list[tuple[int, int]] = []
        for begin, end in spans:
            _native.pin(begin, end - begin)
            self.spans.append((begin, end))

    def __del__(self) -> None:
        for begin, _ in self.spans:
            # Kernels may still read what PyTorch knows as gone.
            torch.cuda.synchronize()
            _native.unpin(begin)


def _pinned(tiles: dict[str, Any]) -> dict[str, Arrays]:
    """Arrays of tensors in memory that a GPU can read: the mapping itself, or else a copy."""
    mapped = {name: arrays_of_tiles(each)[:4] for name, each in tiles.items()}
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
    total = sum(aligned(array.numel()) for arrays in mapped.values() for array in arrays)
    slab = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    copies: dict[str, Arrays] = {}
    at = 0
    for name, arrays in mapped.items():
        copies[name] = []
        for array in arrays:
            copies[name].append(slab[at : at + array.numel()].copy_(array))
            at += aligned(array.numel())
    return copies
