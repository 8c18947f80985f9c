"""The gap encoding (section 6.3 of spec/format.md), and what tile has of it: tables of codes, and
weights.

See df11_reader.py, which reads the arrays.
"""

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import accumulate

from df11_directory import MAX_CODE_LENGTH, Corrupt, ceil_div, require

# Bytes of one array of a tensor: its number, and from where to where, or to the end.
Read = Callable[..., bytes]


def code_table(codes: list[tuple[int, int]], width: int) -> tuple[list[int], list[int]]:
    """Lengths and symbols by the next `width` bits of a bitstream, of the code that has these
    lengths and symbols, in ascending order; length 0 where no code matches.
    """
    total = sum(1 << width >> length for length, _ in codes)
    complete = total == 1 << width or [length for length, _ in codes] == [1]
    require(complete, "the code lengths do not form a code")
    lengths, symbols = [0] * (1 << width), [0] * (1 << width)
    code, before = 0, 0
    for length, symbol in codes:
        code <<= length - before
        mirrored = int(f"{code:0{length}b}"[::-1], 2)
        # All indices whose low `length` bits are the code.
        count = 1 << width - length
        lengths[mirrored :: 1 << length] = [length] * count
        symbols[mirrored :: 1 << length] = [symbol] * count
        code, before = code + 1, length
    return lengths, symbols


def weights(exponents: bytes, signs_mantissas: bytes) -> bytes:
    """The weights of exponents and sign/mantissa bytes."""
    out = bytearray(2 * len(exponents))
    out[::2] = bytes((e & 1) << 7 | s & 0x7F for e, s in zip(exponents, signs_mantissas))
    out[1::2] = bytes(s & 0x80 | e >> 1 for e, s in zip(exponents, signs_mantissas))
    return bytes(out)


class Gap:
    """A gap tensor, whose parameters have been checked."""

    def __init__(self, parameters: tuple[int, ...], elements: int, read: Read) -> None:
        self.thread_bytes, self.block_threads, self.bit_count, _ = parameters
        self.thread_count, self._read = ceil_div(self.bit_count, 8 * self.thread_bytes), read
        self.code_lengths = read(0, 0, 256)
        require(max(self.code_lengths) <= MAX_CODE_LENGTH, "a code length exceeds 16")
        codes = sorted((n, e) for e, n in enumerate(self.code_lengths) if n)
        self._lengths, self._exponents = code_table(codes, MAX_CODE_LENGTH)
        self.offsets = [offset for (offset,) in struct.iter_unpack("<Q", read(2))]
        right = self.offsets[0] == 0 and self.offsets[-1] == elements
        require(right and self.offsets == sorted(self.offsets), "output offsets")

    def luts(self) -> bytes:
        """The LUTs that the code lengths imply."""
        first, further = [], []
        for i in range(256):
            entry = self._lengths[i] << 8 | self._exponents[i]
            if self._lengths[i] > 8:
                rest = zip(self._lengths[i::256], self._exponents[i::256])
                further += [length << 8 | exponent for length, exponent in rest]
                entry = len(further) // 256
            first.append(entry)
        return struct.pack(f"<{256 + len(further)}H", *first, *further)

    def _start(self, block: int) -> int:
        """The first bit of a thread block; that of the one after the last is bit_count."""
        thread = block * self.block_threads
        if thread >= self.thread_count:
            return self.bit_count
        (gaps,) = self._read(1, thread // 2, thread // 2 + 1)
        return 8 * thread * self.thread_bytes + (gaps & 15)

    def decode(self, start: int, end: int) -> bytes:
        """The weights of some elements, of the thread blocks that hold them."""
        low = bisect_right(self.offsets, start) - 1 if start else 0
        blocks = len(self.offsets) - 1
        high = bisect_left(self.offsets, end) if end < self.offsets[-1] else blocks
        first = low * self.block_threads * self.thread_bytes
        # A code may reach two bytes into the next thread; zeros follow the end.
        last = high * self.block_threads * self.thread_bytes + 2
        data, out = self._read(3, first, last) + bytes(3), bytearray()
        require(low or self._start(0) == 0, "gap(0) is not 0")
        for block in range(low, high):
            count = self.offsets[block + 1] - self.offsets[block]
            at, stop = self._start(block) - 8 * first, self._start(block + 1) - 8 * first
            out += self._exponents_at(data, at, stop, count)
        base = self.offsets[low]
        signs = self._read(4, base, self.offsets[high])
        return weights(out, signs)[2 * (start - base) : 2 * (end - base)]

    def _exponents_at(self, data: bytes, start: int, end: int, count: int) -> bytes:
        """`count` exponents from bit `start` of `data` on, which must end exactly at bit `end`."""
        require(count <= end - start, "a thread block has too few bits for its elements")
        lengths, exponents, out, pos = self._lengths, self._exponents, bytearray(count), start
        try:
            for i in range(count):
                byte = pos >> 3
                bits = data[byte] | data[byte + 1] << 8 | data[byte + 2] << 16
                bits = bits >> (pos & 7) & 0xFFFF
                out[i] = exponents[bits]
                if not lengths[bits]:
                    raise Corrupt("no code matches")
                pos += lengths[bits]
        except IndexError:  # `data` reaches past `end`, so the element does not belong here
            pos = -1
        require(pos == end, "a thread block does not end where the next one starts")
        return out

    def verify(self, data: bytes) -> None:
        """LUTs, every gap and output offset, and the bits from bit_count on, from the weights."""
        require(self._read(0, 256) == self.luts(), "LUTs do not follow from the code lengths")
        exponents = ((high & 0x7F) << 1 | low >> 7 for low, high in zip(data[::2], data[1::2]))
        boundaries = [0, *accumulate(self.code_lengths[e] for e in exponents)]
        starts = [8 * self.thread_bytes * i for i in range(self.thread_count)]
        firsts = [bisect_left(boundaries, start) for start in starts]
        gaps = [boundaries[first] - start for first, start in zip(firsts, starts)] + [0]
        expected = bytes(low | high << 4 for low, high in zip(gaps[::2], gaps[1::2]))
        require(self._read(1) == expected, "gaps do not follow from the bitstream")
        offsets = [*firsts[:: self.block_threads], len(boundaries) - 1]
        require(self.offsets == offsets, "output offsets do not follow from the bitstream")
        tail = int.from_bytes(self._read(3, self.bit_count // 8), "little")
        require(not tail >> self.bit_count % 8, "bits from bit_count on are not zero")
