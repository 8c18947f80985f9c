"""Decode rate of the official DFloat11 kernel and of ours on the same weights, in one process.

    python3 official.py FOLDER KERNELS REPEATS T B [T B ..] > rows.json

FOLDER is what `gap_arrays FOLDER block T B ..` wrote, KERNELS a file of kernels/ptx (PTX or machine
code). Needs a GPU, cupy, torch, numba and the packages dfloat11 0.5.0 and dahuffman.

The official side runs the package's own code, tables, launch parameters for one block of seven
matrices, and PTX. Only its encoder, a Python loop over every weight, is compiled here (`encode`),
and first compared with the original on parts of the weights. Every output is compared with the
weights bit by bit. Calls alternate; before each, a write of 512 MiB empties the L2 cache.
"""

import contextlib
import io
import json
import statistics
import sys
import types
from pathlib import Path

import numpy as np
from numba import njit

GAP_TASK = np.dtype(
    [
        (name, "<u8")
        for name in (
            "gaps offsets bitstream plane table output elements bit_count "
            "begin end first blocks unit"
        ).split()
    ]
    + [("threads_per_block", "<u4"), ("reserved", "<u4"), ("reserved2", "<u8", 2)]
)
assert GAP_TASK.itemsize == 128
GAP_TABLE_BYTES = 16880
BYTES_PER_THREAD, THREADS_PER_BLOCK = 8, 512  # the package's
WARM_UP = 3


@njit
def encode_loop(data, lengths, codes, encoded, gaps, positions, thread_bits, block_bits):
    """The loop of dfloat11_utils.encode; returns bytes, gaps, positions, and the rest of the
    buffer.
    """
    count = gap_count = position_count = 0
    buffer = size = total = np.int64(0)
    for element in range(len(data)):
        if total // thread_bits + 1 > gap_count:
            gaps[gap_count] = total % thread_bits
            gap_count += 1
        if total // block_bits + 1 > position_count:
            positions[position_count] = element
            position_count += 1
        bits = lengths[data[element]]
        buffer = (buffer << bits) + codes[data[element]]
        size += bits
        total += bits
        while size >= 8:
            encoded[count] = buffer >> (size - 8)
            count += 1
            size -= 8
            buffer &= (1 << size) - 1
    return count, gap_count, position_count, buffer, size, total


def encode(data, codec, bytes_per_thread, threads_per_block):
    """dfloat11_utils.encode on a uint8 array."""
    lengths, codes = np.zeros(256, np.int64), np.zeros(256, np.int64)
    for symbol, (bits, value) in codec._table.items():
        if isinstance(symbol, int):
            lengths[symbol], codes[symbol] = bits, value
    thread_bits, block_bits = 8 * bytes_per_thread, 8 * bytes_per_thread * threads_per_block
    room = int(lengths[data].sum(dtype=np.int64)) // 8 + 8
    encoded = np.zeros(room, np.uint8)
    gaps = np.zeros(8 * room // thread_bits + 2 + threads_per_block, np.uint8)
    positions = np.zeros(8 * room // block_bits + 3, np.uint32)
    count, gap_count, position_count, buffer, size, total = encode_loop(
        data, lengths, codes, encoded, gaps, positions, thread_bits, block_bits
    )
    if size > 0:
        if total // thread_bits + 1 > gap_count:
            gaps[gap_count] = total % thread_bits
            gap_count += 1
        if total // block_bits + 1 > position_count:
            positions[position_count] = len(data)
            position_count += 1
        bits, value = codec._table[codec._eof]
        buffer = (int(buffer) << bits) + value
        size += bits
        encoded[count] = buffer >> (size - 8) if size >= 8 else buffer << (8 - size)
        count += 1
    positions[position_count] = len(data)
    blocks = -(-count // (threads_per_block * bytes_per_thread))
    gaps = np.pad(gaps[:gap_count], (0, threads_per_block * blocks - gap_count))
    bits = np.unpackbits(gaps[:, None], axis=1)[:, 3:]
    return encoded[:count], np.packbits(bits), positions[: position_count + 1]


def read_dumps(path):
    """The tensors that gap_arrays wrote: see dump.hpp."""
    data, at = np.fromfile(path, np.uint8), 0
    while at < len(data):
        t, b, elements, bit_count, *sizes = (int(n) for n in data[at : at + 64].view("<u8"))
        gaps, offsets, bitstream, weights = sizes
        at += 64
        arrays = {"t": t, "b": b, "elements": elements, "bit_count": bit_count}
        for name, size in [
            ("lengths", 256),
            ("gaps", gaps),
            ("offsets", offsets),
            ("bitstream", bitstream),
            ("plane", elements),
            ("weights", weights),
        ]:
            arrays[name] = data[at : at + size]
            at += size
        yield arrays


class Ours:
    """All tensors of one dump in one launch."""

    def __init__(self, cp, module, path, output):
        self.kept, tasks, unit, place, self.stored = [], [], 0, 0, 0
        for dump in read_dumps(path):
            device = {
                name: self.keep(cp.asarray(dump[name]))
                for name in ("lengths", "gaps", "offsets", "bitstream", "plane")
            }
            table = self.keep(cp.zeros(GAP_TABLE_BYTES, cp.uint8))
            make = self.keep(
                cp.asarray(np.array([device["lengths"].data.ptr, table.data.ptr], np.uint64))
            )
            module.get_function("df11_gap_tables")((1,), (256,), (make,))
            blocks = -(-dump["bit_count"] // (8 * dump["t"] * dump["b"]))
            pointers = [device[name].data.ptr for name in ("gaps", "offsets", "bitstream", "plane")]
            tasks.append(
                (
                    *pointers,
                    table.data.ptr,
                    output.data.ptr + 2 * place,
                    dump["elements"],
                    dump["bit_count"],
                    0,
                    dump["elements"],
                    0,
                    blocks,
                    unit,
                    dump["b"],
                    0,
                    [0, 0],
                )
            )
            unit, place = unit + blocks, place + dump["elements"]
            self.stored += sum(
                dump[name].size for name in ("gaps", "offsets", "bitstream", "plane")
            )
        t = dump["t"]
        constants = cp.ndarray(11, cp.uint32, module.get_global("df11_gap_constants"))
        numbers = [int(n) for n in constants.get()]
        assert numbers[:2] == [GAP_TASK.itemsize, GAP_TABLE_BYTES]
        index = [8, 16, 32, 64].index(t)
        self.shared, self.threads = numbers[3 + index] * numbers[7 + index], 32 * numbers[7 + index]
        self.kernel = module.get_function(f"df11_gap_decode_{t}")
        self.kernel.max_dynamic_shared_size_bytes = self.shared
        self.kernel.preferred_shared_memory_carveout = 100
        resident = cp.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
            self.kernel.kernel.ptr, self.threads, self.shared
        )
        self.grid = min(unit, cp.cuda.Device().attributes["MultiProcessorCount"] * resident)
        self.status = cp.zeros(1, cp.uint32)
        self.arguments = (
            self.keep(cp.asarray(np.array(tasks, GAP_TASK).view(np.uint8))),
            np.uint32(len(tasks)),
            np.uint64(unit),
            self.status,
            np.uint64(0),
        )

    def keep(self, array):
        self.kept.append(array)
        return array

    def run(self):
        self.kernel((self.grid,), (self.threads,), self.arguments, shared_mem=self.shared)


class Official:
    """The block as dfloat11.compress_model stores it and as its hook decodes it."""

    def __init__(self, cp, torch, weights, output):
        sys.modules["pkg_resources"] = (
            types.SimpleNamespace(  # gone from setuptools; the package asks it for one path
                resource_filename=lambda package, name: str(
                    Path(sys.modules[package].__file__).with_name(name)
                )
            )
        )
        from dfloat11 import dfloat11, dfloat11_utils

        assert (dfloat11.version, dfloat11.bytes_per_thread, dfloat11.threads_per_block[0]) == (
            "0.5.0",
            BYTES_PER_THREAD,
            THREADS_PER_BLOCK,
        )
        words = torch.from_numpy(weights.view(np.int16))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            _, counter = dfloat11_utils.get_codec(words.cuda())
            codec, _, table = dfloat11_utils.get_32bit_codec(counter)
            luts = dfloat11_utils.get_luts(table).numpy()
        exponents = (weights >> 7).astype(np.uint8)
        for part in (exponents[:1], exponents[:99_991], exponents[-300_000:]):
            theirs = dfloat11_utils.encode(
                part.tolist(), codec, BYTES_PER_THREAD, THREADS_PER_BLOCK
            )
            for mine, original in zip(
                encode(part, codec, BYTES_PER_THREAD, THREADS_PER_BLOCK), theirs, strict=True
            ):
                assert np.array_equal(mine, original)
        encoded, gaps, positions = encode(exponents, codec, BYTES_PER_THREAD, THREADS_PER_BLOCK)
        plane = ((weights >> 8) & 0x80 | weights & 0x7F).astype(np.uint8)
        arrays = [cp.asarray(array) for array in (luts, encoded, plane, positions, gaps)]
        self.stored = sum(array.nbytes for array in arrays[1:])
        self.kernel = dfloat11._decode
        self.grid = -(-len(encoded) // (THREADS_PER_BLOCK * BYTES_PER_THREAD))
        self.shared = THREADS_PER_BLOCK * 4 + 4 + int(np.diff(positions.astype(np.int64)).max()) * 2
        numbers = [luts.shape[0], len(encoded), len(weights)]
        self.kept = arrays
        self.arguments = [*(array.data.ptr for array in arrays), output.data.ptr, *numbers]

    def run(self):
        self.kernel(
            grid=(self.grid,),
            block=(THREADS_PER_BLOCK,),
            shared_mem=self.shared,
            args=self.arguments,
        )


def main():
    import cupy as cp
    import torch

    folder, kernels, repeats, *geometries = sys.argv[1:]
    weights = np.fromfile(Path(folder, "weights.bf16"), np.uint16)
    original, output, flush = (
        cp.asarray(weights),
        cp.zeros(len(weights) + 1024, cp.uint16),
        cp.zeros(512 << 20, cp.uint8),
    )
    module = cp.RawModule(path=kernels)
    stream = cp.cuda.get_current_stream()

    def copy():
        cp.cuda.runtime.memcpyAsync(
            output.data.ptr, original.data.ptr, original.nbytes, 3, stream.ptr
        )

    runs = {"copy": copy}
    stored = {}
    decoders = {
        f"T {t} B {b}": Ours(cp, module, Path(folder, f"block-{t}-{b}.gap"), output)
        for t, b in zip(geometries[::2], geometries[1::2], strict=True)
    }
    decoders["official"] = Official(cp, torch, weights, output)
    wrong = {}
    for name, decoder in decoders.items():
        output.fill(0xA5A5)
        decoder.run()
        wrong[name] = int((output[: len(weights)] != original).sum()) + int(
            (output[len(weights) :] != 0xA5A5).sum()
        )
        runs[name], stored[name] = decoder.run, decoder.stored
    times = {name: [] for name in runs}
    for repeat in range(int(repeats) + WARM_UP):
        for name, run in runs.items():
            cp.cuda.runtime.memsetAsync(flush.data.ptr, repeat, flush.nbytes, stream.ptr)
            begin, end = cp.cuda.Event(), cp.cuda.Event()
            begin.record()
            run()
            end.record()
            end.synchronize()
            if repeat >= WARM_UP:
                times[name].append(round(cp.cuda.get_elapsed_time(begin, end) * 1e3, 2))
    for name, decoder in decoders.items():
        if name != "official":
            assert int(decoder.status[0]) == 0, name
    rate = {
        name: weights.nbytes * (2 if name == "copy" else 1) / statistics.median(us) / 1e3
        for name, us in times.items()
    }
    rows = []
    for name, us in times.items():
        row = {"what": name, "median_us": statistics.median(us), "gb_per_s": round(rate[name], 1)}
        if name != "copy":
            row |= {
                "of_copy": round(rate[name] / rate["copy"], 4),
                "of_official": round(rate[name] / rate["official"], 3),
                "bits_a_weight": round(stored[name] * 8 / len(weights), 4),
                "wrong_weights": wrong[name],
            }
        rows.append(row | {"us": us})
    json.dump({"weights": len(weights), "rows": rows}, sys.stdout)
    return any(wrong.values())


if __name__ == "__main__":
    sys.exit(main())
