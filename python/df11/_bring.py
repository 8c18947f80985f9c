"""Brings weights of a container to a device: in its mapping, as stored, fast, or to be streamed.

```text
 CPU        the container's own mapping
 stored     container ──pinned ring──▶ one slab: codebooks, records, bits, planes, tables
 dense      a tensor that a loader computed, or read from a BF16 file: `compress`
 fast       container ──▶ temporary slab ──▶ up to 64 MB of BF16 ──▶ strips, entries
 streamed   the mapping, registered with the driver (or a pinned copy); tables on the GPU
```
Slabs are tensors of PyTorch's allocator, and arrays are views of them, so the memory is freed with
the last weight of a group. At most the result, `BATCH_BYTES` (or one larger tensor) and
`_encoding.PACKED_BYTES` are in memory at once. A thread reads the next batch meanwhile.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, groupby, islice, tee
from typing import Any

import torch
from torch import Tensor

from . import _native, _plan
from ._arrays import memory_at
from ._container import Area, Tensors
from ._encoding import Packed, encode, matrix_for, pack, pack_dense, row_ranges
from ._errors import GpuError
from ._matrices import TABLE_BYTES, TILE_ROWS, Part
from ._plan import EXCEPTIONAL, SMALL, Item, Residence, WeightBlock, aligned, whole_bytes
from ._progress import Bar
from ._tensor import CompressedTensor

#: Stored bytes that are on the GPU at once to be changed into the fast layout.
BATCH_BYTES = 256 << 20

Arrays = list[Tensor]
_Window = tuple[Area, Part]


def bring(
    tensors: Tensors, blocks: Sequence[WeightBlock], exact: bool, bar: Bar
) -> Iterator[tuple[Item, Tensor]]:
    """Yields the weights of some blocks on their devices, in their residences; then the ordinary
    weights, decoded. An item that cannot have its residence becomes ordinary, and records the
    reason. Each byte is read and checked once. Raises `CorruptError` if a tensor is damaged.
    """
    for (device, residence), some in groupby(blocks, lambda each: (each.device, each.residence)):
        to = _Device(tensors, device, bar)
        yield from _compressed(to, [each.items for each in some], residence, exact)
    for item in (item for each in blocks for item in each.items if item.reason is not None):
        if isinstance(item.value, CompressedTensor):
            tensors.check(item.tensor_names)
            yield item, item.value.decode()
        else:
            yield item, item.value


def _compressed(
    to: _Device, of_blocks: list[list[Item]], residence: Residence, exact: bool
) -> Iterator[tuple[Item, CompressedTensor]]:
    fast: list[tuple[Item, list[Item]]] = []
    others: list[list[Item]] = [[] for _ in of_blocks]
    for items, mine in zip(of_blocks, others, strict=True):
        for item in items:
            if (form := item.residence_if(residence)) == "ordinary":
                continue
            if not item.is_compressed:
                made = compress(item.value, form, to.device, exact)
                if isinstance(made, str):
                    item.reason = made
                else:
                    yield item, made
            elif form == "fast":
                fast.append((item, mine))
            else:
                mine.append(item)
    for (item, mine), packed in zip(fast, to.fast([item for item, _ in fast]), strict=True):
        if packed is None:
            mine.append(item)
        else:
            yield item, CompressedTensor(*packed, item.value.shape, exact=exact)
    others = [items for items in others if items]
    enclosing = [to.tensors.enclosing_tiles(_values(items)) for items in others]
    arrays_of = to.arrays([tiles for _, tiles in enclosing], residence)
    for items, (windows, _), arrays in zip(others, enclosing, arrays_of, strict=True):
        for item, some in zip(items, windows, strict=True):
            flat = [array for tiles, _ in some for array in arrays[tiles]]
            value: Any = item.value
            if to.device.type != "cpu":  # a copy of a view to another device has no gaps
                value = value.without_gaps()
            parts = [part for _, part in some]
            yield item, value.like(flat, parts, exact=exact, device=to.device)


def compress(
    value: Tensor, residence: Residence, device: torch.device, exact: bool
) -> CompressedTensor | str:
    """Compresses a dense BF16 weight on a device, as stored or in the fast layout. If the weight
    stays dense, returns the reason. `value`: for `stored` one that `matrix_for` takes; for `fast`
    rows of a multiple of 8 weights.
    """
    reason, made = EXCEPTIONAL, None
    if residence == "fast":
        made = pack_dense(device, value)
    elif (matrix := matrix_for(value)) is not None:
        reason, made = SMALL, encode(matrix.to(device))
    if made is None:
        return reason
    saved = whole_bytes(value) - sum(aligned(array.numel()) for array in made[0])
    return CompressedTensor(*made, value.shape, exact=exact) if saved >= _plan.MIN_SAVED else SMALL


def _values(items: Iterable[Item]) -> list[CompressedTensor]:
    return [item.value for item in items if isinstance(item.value, CompressedTensor)]


class _Device:
    def __init__(self, tensors: Tensors, device: torch.device, bar: Bar) -> None:
        self.tensors, self.device, self.bar = tensors, device, bar

    def arrays(
        self, batches: Iterable[Sequence[Area]], residence: Residence
    ) -> Iterator[dict[Area, Arrays]]:
        if self.device.type == "cpu":
            return map(self._mapped, batches)
        return map(self._streamed, batches) if residence == "streamed" else self._stored(batches)

    def _stored(self, batches: Iterable[Sequence[Area]]) -> Iterator[dict[Area, Arrays]]:
        """One slab per batch. Reads the next batch while the caller uses one."""
        ahead: deque[Future[dict[Area, Arrays]]] = deque()
        with ThreadPoolExecutor(1) as thread:
            for some in batches:
                ahead.append(thread.submit(self._fill, self._room(some)))
                if len(ahead) > 1:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def _room(self, some: Sequence[Area]) -> dict[Area, Arrays]:
        lengths = self.tensors.lengths(some)
        wanted = {area: (*mine, TABLE_BYTES) for area, mine in zip(some, lengths, strict=True)}
        arrays = _carved(wanted, device=self.device)
        # Earlier work on the current stream may still use the memory that the allocator gives.
        torch.cuda.current_stream(self.device).synchronize()
        return arrays

    def _fill(self, arrays: dict[Area, Arrays]) -> dict[Area, Arrays]:
        """Reads the arrays, which are complete when it returns."""
        items = [
            (*area[:3], [(array.data_ptr(), array.numel()) for array in mine])
            for area, (*mine, _) in arrays.items()
        ]
        _native.upload(self.tensors.container, self.device.index, items, self.bar.show)
        self._build_tables(arrays)
        self.bar.add(sum(array.numel() for mine in arrays.values() for array in mine[:4]))
        return arrays

    def _build_tables(self, arrays: dict[Area, Arrays]) -> None:
        items: dict[int, list[tuple[int, int, int]]] = {}
        for area, (book, *_, table) in arrays.items():
            place = book.data_ptr(), book.numel(), table.data_ptr()
            items.setdefault(area.kind, []).append(place)
        for kind, mine in items.items():
            _native.build_tables(self.device.index, mine, kind)

    def fast(self, items: list[Item]) -> Iterator[Packed | None]:
        all_runs = [_runs(mine) for mine in self.tensors.enclosing_tiles(_values(items))[0]]
        slices = self._slices(window for runs in all_runs for run in runs for window in run)
        return (self._pack(runs, slices) for runs in all_runs)

    def _slices(self, windows: Iterable[_Window]) -> Iterator[Iterator[Tensor]]:
        """Yields the decoded rows of each window, some at a time. The window's tiles exist only
        meanwhile."""
        batches, same = tee(self._batches(windows))
        some = (list(dict.fromkeys(tiles for tiles, _ in batch)) for batch in same)
        on_gpu = self._stored(some)
        for batch in batches:
            arrays = next(on_gpu)
            for tiles, part in batch:
                yield self._decoded(arrays[tiles], part)
            del arrays  # before the next ones are there

    def _decoded(self, arrays: Arrays, part: Part) -> Iterator[Tensor]:
        for first, last in row_ranges(part.row_begin, part.row_end, part.columns):
            window = part._replace(row_begin=first, row_end=last)
            yield torch.ops.df11.decode(arrays, window, self.device)

    def _pack(self, runs: list[list[_Window]], slices: Iterator[Iterator[Tensor]]) -> Packed | None:
        packed = []
        for run in runs:
            rows = sum(part.height for _, part in run)
            some = chain.from_iterable(islice(slices, len(run)))
            packed.append(pack(self.device, rows, run[0][1].width, some))
        results = [each for each in packed if each is not None]
        if len(results) < len(packed):
            return None
        arrays, parts = zip(*results, strict=True)
        return [*chain.from_iterable(arrays)], [*chain.from_iterable(parts)]

    def _batches(self, windows: Iterable[_Window]) -> Iterator[list[_Window]]:
        """Windows whose tiles are in memory together; an empty batch if two would be too large."""
        windows = [*windows]
        areas = [*dict.fromkeys(tiles for tiles, _ in windows)]
        lengths = dict(zip(areas, map(sum, self.tensors.lengths(areas)), strict=True))
        batch: list[_Window] = []
        known: set[Area] = set()
        before = size = 0
        for tiles, part in windows:
            more = 0 if tiles in known else lengths[tiles]
            if batch and size + more > BATCH_BYTES // 2:
                yield from ([], batch) if before + size > BATCH_BYTES else (batch,)
                batch, known, before, size = [], set(), size, 0
            batch.append((tiles, part))
            known.add(tiles)
            size += more
        yield from ([], batch) if before + size > BATCH_BYTES else (batch,)

    def _mapped(self, some: Sequence[Area]) -> dict[Area, Arrays]:
        arrays = self.tensors.on_host(some)
        self.bar.add(sum(array.numel() for mine in arrays.values() for array in mine))
        empty = torch.empty(0, dtype=torch.uint8)
        return {tiles: [*mine, empty] for tiles, mine in arrays.items()}

    def _streamed(self, some: Sequence[Area]) -> dict[Area, Arrays]:
        mapped = {tiles: mine[:4] for tiles, mine in self._mapped(some).items()}
        arrays = _pinned(mapped) if all(tiles.is_whole for tiles in some) else _copied(mapped)
        tables = _carved(dict.fromkeys(some, (TABLE_BYTES,)), device=self.device)
        torch.cuda.current_stream(self.device).synchronize()
        arrays = {tiles: mine + tables[tiles] for tiles, mine in arrays.items()}
        self._build_tables(arrays)
        return arrays


def _runs(windows: Sequence[_Window]) -> list[list[_Window]]:
    """Joins windows of whole strips. Only the last window of a run may end within a strip."""
    runs: list[list[_Window]] = []
    for window in windows:
        if not runs or runs[-1][-1][1].height % TILE_ROWS:
            runs.append([])
        runs[-1].append(window)
    return runs


class _Held:
    """Pinned memory that is freed when its last tensor is gone and no GPU reads it any more."""

    def __init__(self, pinned: list[_native.PinnedMemory], arrays: Arrays) -> None:
        self.pinned, self.arrays = pinned, arrays

    def __del__(self) -> None:
        # Kernels on any GPU may still read memory that Python has let go: it is pinned for all.
        for index in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(index):  # type: ignore[attr-defined]
                torch.cuda.synchronize(index)
        self.pinned.clear()  # before the owner of the memory
        self.arrays.clear()


def _held(arrays: dict[Area, Arrays], pinned: list[_native.PinnedMemory]) -> dict[Area, Arrays]:
    """The same arrays, whose pinned memory is freed as `_Held` says."""
    held = _Held(pinned, [array for mine in arrays.values() for array in mine])

    def kept(array: Tensor) -> Tensor:
        if not array.numel():
            return torch.empty(0, dtype=torch.uint8)
        memory = memory_at(array.data_ptr(), array.numel(), held)
        return torch.frombuffer(memory, dtype=torch.uint8)

    return {area: [kept(array) for array in mine] for area, mine in arrays.items()}


def _pinned(mapped: dict[Area, Arrays]) -> dict[Area, Arrays]:
    """Arrays in memory that a GPU can read: the mapping itself, or else a copy."""
    flat = [array for arrays in mapped.values() for array in arrays if array.numel()]
    try:
        pinned = [_native.pin(begin, end - begin) for begin, end in _spans(flat)]
    except GpuError:
        return _copied(mapped)
    return _held(mapped, pinned)


def _spans(arrays: Arrays) -> list[tuple[int, int]]:
    """The pages of arrays, each once. Neighbouring pages form one span."""
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


def _copied(mapped: dict[Area, Arrays]) -> dict[Area, Arrays]:
    lengths = {name: [array.numel() for array in arrays] for name, arrays in mapped.items()}
    copies = _carved(lengths, pin_memory=True)
    for name, arrays in mapped.items():
        for copy, array in zip(copies[name], arrays, strict=True):
            copy.copy_(array)
    # PyTorch's own pinned memory would be reused at once: it does not know the kernels that read
    # it.
    return _held(copies, [])


def _carved(lengths: Mapping[Area, Sequence[int]], **where: Any) -> dict[Area, Arrays]:
    sizes = [aligned(length) for mine in lengths.values() for length in mine]
    slab = torch.empty(sum(sizes), dtype=torch.uint8, **where)
    views = iter(torch.split(slab, sizes))
    return {name: [next(views)[:length] for length in mine] for name, mine in lengths.items()}
