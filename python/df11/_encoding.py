"""Compresses BF16 matrices in memory: as stored on any device, or into the fast layout on a GPU.

`encode` makes tiles of 32 x 256 by operations of PyTorch, and `pack` runs kernels.

The arrays of tiles equal those of `df11 compress` (spec/format.md, 6.4). On CPUs the native code
makes them faster. This module is for weights that are already on a GPU, where encoding takes about
as long as copying them there.

```text
weights ──▶ pairs of exponents ──▶ counts ──▶ code (native, on the CPU)
             └──▶ bits of each lane ──▶ records, size ──▶ bits, each pair added to its two words
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from . import _native
from ._matrices import FAST, STORED, TILE_COLUMNS, TILE_ROWS, Part, raw_stream

#: The fewest columns, rows and bytes of a matrix that a writer cuts into such tiles.
MIN_COLUMNS, MIN_ROWS, MIN_BYTES = 128, 16, 32 << 10
#: BF16 bytes that are processed at once; this takes 20 times as much memory.
SLICE_BYTES = 16 << 20
#: BF16 bytes that are on the GPU at once to be packed.
PACKED_BYTES = 64 << 20
_PAIRS = 1 << 16
#: Counters of one pair, so that fewer additions of the GPU wait for each other.
_COUNTERS = 8
_LANES, _LANE_PAIRS = 32, 128
_RECORD_BYTES, _COPY_BYTES = 32, 16
_MAX_EXCESS = 63
#: Dimensions of `_tiles` in the order of the bits and in the order of the plane.
_BY_LANES, _BY_BANDS = (0, 3, 2, 6, 1, 4, 5, 7), (0, 3, 1, 4, 2, 6, 5, 7)


def is_encodable(value: Tensor) -> bool:
    rows, columns = value.shape
    large = rows >= MIN_ROWS and columns >= MIN_COLUMNS and value.nbytes >= MIN_BYTES
    return large and columns % 8 == 0


def matrix_for(value: Tensor) -> Tensor | None:
    """A BF16 tensor as a matrix that `encode` takes. A row is the last dimension, or all dimensions
    after the first (kernels of convolutions). None if `encode` takes neither.
    """
    if value.dtype != torch.bfloat16 or value.dim() < 2 or not value.numel():
        return None
    rows = value.reshape(-1, value.shape[-1])
    some = (value.flatten(1), rows) if value.dim() > 3 else (rows, value.flatten(1))
    return next((matrix for matrix in some if is_encodable(matrix)), None)


#: Arrays, and their parts.
Packed = tuple[list[Tensor], list[Part]]


def encode(value: Tensor) -> Packed | None:
    """Encodes a BF16 matrix that `is_encodable`: five arrays on its device, and their part. None if
    codes make the matrix no smaller. Takes `20 * SLICE_BYTES` meanwhile, and waits for a GPU three
    times.
    """
    value = value.contiguous()
    rows, columns = value.shape
    code = _native.code_of(_counts(value).cpu().numpy().tobytes())
    if code is None:
        return None
    codebook, entries = (torch.frombuffer(one, dtype=torch.uint8) for one in code)
    entries = entries.view(torch.int64).to(value.device)
    bits = [(lanes & 0xFFFF).sum(-1) for _, lanes in _entries(value, entries)]
    records, begins, bitstream_bytes, staged_bytes = _measure(torch.cat(bits))
    plane = torch.cat([_plane(words) for words in _slices(value)])
    bitstream = _write(value, entries, begins, bitstream_bytes // 4)
    codebook = codebook.to(value.device)
    arrays = [codebook, records, bitstream, plane, torch.ops.df11.table(codebook)]
    return arrays, [Part.whole(STORED, rows, columns, staged_bytes)]


def _slices(value: Tensor) -> Iterator[Tensor]:
    """Words of two weights each, some whole strips at a time: [rows, columns / 2]."""
    words = value.view(torch.int32)
    step = max(1, SLICE_BYTES // (2 * value.shape[1] * TILE_ROWS)) * TILE_ROWS
    return (words[first : first + step] for first in range(0, value.shape[0], step))


def _pairs(words: Tensor) -> Tensor:
    """The two exponents of each word, the first one in the low byte."""
    return (words >> 7 & 0xFF) | (words >> 15 & 0xFF00)


def _counts(value: Tensor) -> Tensor:
    counts = torch.zeros(_COUNTERS * _PAIRS, dtype=torch.int64, device=value.device)
    one = torch.ones(1, dtype=torch.int64, device=value.device)
    counter = torch.arange(value.shape[1] // 2, device=value.device) % _COUNTERS * _PAIRS
    for words in _slices(value):
        at = (_pairs(words) + counter).view(-1)
        counts.scatter_add_(0, at, one.expand_as(at))
    return counts.view(_COUNTERS, _PAIRS).sum(0)


def _tiles(words: Tensor) -> Tensor:
    """Words as whole tiles: strip, band, row, tile, two units, unit, lane of the row, pair."""
    rows, columns = words.shape
    down, right = -rows % TILE_ROWS, -columns % (TILE_COLUMNS // 2)
    if down or right:
        words = functional.pad(words, (0, right, 0, down))
    return words.view(-1, 4, 8, words.shape[1] // (TILE_COLUMNS // 2), 4, 2, 4, 4)


def _entries(value: Tensor, entries: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields the number of the first tile, and the entries of pairs by tile and lane, in order.
    Pairs outside a partial tile have an entry without bits.
    """
    first = 0
    for words in _slices(value):
        pairs = _pairs(_tiles(words)).permute(_BY_LANES).reshape(-1)
        chosen = entries.index_select(0, pairs).view(-1, _LANES, _LANE_PAIRS)
        if chosen.numel() > words.numel():
            there = _tiles(torch.ones_like(words)).permute(_BY_LANES)
            chosen = chosen * there.reshape(chosen.shape)
        yield first, chosen
        first += len(chosen)


def _measure(bits: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Measures tiles and lanes by the bits of their pairs. Returns the records, the bit of the
    bitstream where each lane begins, the bytes of the bitstream, and the most bytes that a tile
    stages.
    """
    least = bits.amin(-1, keepdim=True)
    most = bits.amax(-1, keepdim=True) - least
    # The least shift with which all lengths of a tile can be written.
    steps = 1 << torch.arange(7, device=bits.device)
    shift = (-(-most // steps) > _MAX_EXCESS).sum(-1, keepdim=True)
    excess = -(-(bits - least) // (1 << shift))
    lengths = least + (excess << shift)
    ends = lengths.cumsum(-1)
    tile_bits = -(-ends[:, -1] // 8) * 8
    tile_ends = tile_bits.cumsum(0)
    offsets = functional.pad(tile_ends, (1, 0))
    heads = offsets.clone()
    heads[:-1] += (least << 48 | shift << 61)[:, 0]
    copies = (offsets[1:] // 8 - offsets[:-1] // 8 // _COPY_BYTES * _COPY_BYTES).amax()
    total, staged = torch.stack([offsets[-1] // 8, copies]).tolist()
    return (
        _records(heads, excess),
        offsets[:-1, None] + ends - lengths,
        -(-total // _COPY_BYTES) * _COPY_BYTES,
        -(-staged // _COPY_BYTES) * _COPY_BYTES,
    )


def _records(heads: Tensor, excess: Tensor) -> Tensor:
    """Packs 8 bytes per tile, and 3 bytes per four lanes; the last record has no lanes."""
    places = torch.tensor([0, 6, 12, 18], device=heads.device)
    four = (excess.view(-1, _LANES // 4, 4) << places).sum(-1)
    records = torch.zeros(len(heads), _RECORD_BYTES, dtype=torch.uint8, device=heads.device)
    records[:, :8] = heads.view(torch.uint8).view(-1, 8)
    records[:-1, 8:] = four.view(torch.uint8).view(-1, _LANES // 4, 8)[..., :3].flatten(1)
    return records.view(-1)


def _write(value: Tensor, entries: Tensor, begins: Tensor, count: int) -> Tensor:
    """The bitstream of `count` words: each pair's bits in one, or in two neighbouring ones."""
    # Missing pairs end where the last pair ends, and add zeros.
    stream = torch.zeros(count + 2, dtype=torch.int32, device=value.device)
    for first, some in _entries(value, entries):
        lengths = some & 0xFFFF
        mine = begins[first : first + len(some), :, None]
        at = (mine + lengths.cumsum(-1) - lengths).view(-1)
        shifted = (some >> 16).view(-1) << (at & 31)
        word = at >> 5
        # No two pairs share a bit, so adding them joins them.
        stream.scatter_add_(0, word, shifted.to(torch.int32))
        stream.scatter_add_(0, word + 1, (shifted >> 32).to(torch.int32))
    return stream[:count].view(torch.uint8)


def _plane(words: Tensor) -> Tensor:
    first = (words & 0x7F) | (words >> 8 & 0x80)
    both = first | (words >> 8 & 0x7F00) | (words >> 16 & 0x8000)
    tiles = _tiles(both.to(torch.int16)).permute(_BY_BANDS)
    if tiles.numel() > words.numel():
        tiles = tiles[_tiles(torch.ones_like(words, dtype=torch.bool)).permute(_BY_BANDS)]
    return tiles.reshape(-1).view(torch.uint8)


def pack(device: torch.device, rows: int, columns: int, some: Iterable[Tensor]) -> Packed | None:
    """Packs a BF16 matrix on a GPU: arrays and their part. `some` gives its rows in turn, dense on
    that GPU: whole strips at a time, or the last rows. None if it has too many exceptions.
    """
    size, stream = _native.strips_bytes(rows, columns), raw_stream(device.index)
    strips = torch.empty(size, dtype=torch.uint8, device=device)
    packer = _native.Packer(device.index, rows, columns, strips.data_ptr(), stream)
    done = 0
    for weights in some:
        packer.pack(done, weights.shape[0], weights.data_ptr(), stream)
        done += weights.shape[0]
    if (count := packer.finish(stream)) is None:
        return None
    entries = torch.empty(4 * count, dtype=torch.uint8, device=device)
    if count:
        packer.take(entries.data_ptr(), stream)
    return [strips, entries], [Part.whole(FAST, rows, columns)]


def pack_rows(
    device: torch.device, rows: int, columns: int, values: Callable[[int, int], Tensor]
) -> Packed | None:
    """Like `pack`, for rows that `values(first, last)` gives on any device."""
    some = (values(first, last).to(device) for first, last in row_ranges(0, rows, columns))
    return pack(device, rows, columns, some)


def pack_dense(device: torch.device, value: Tensor) -> Packed | None:
    """Like `pack`, for a dense BF16 tensor on any device, with rows of its last dimension."""
    dense = value.reshape(-1, value.shape[-1])
    rows, columns = dense.shape
    return pack_rows(device, rows, columns, lambda first, last: dense[first:last])


def row_ranges(begin: int, end: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows: whole strips, as many at a time as `PACKED_BYTES` hold."""
    step = max(1, PACKED_BYTES // (2 * columns * TILE_ROWS)) * TILE_ROWS
    for first in range(begin, end, step):
        yield first, min(first + step, end)
