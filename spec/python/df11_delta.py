"""The delta encoding of section 6.6 of spec/format.md: differences from another tensor."""

import struct
from bisect import bisect_right
from collections.abc import Callable
from math import prod

from df11_directory import ceil_div, require, segment_elements

ESCAPE = 104
MIN_STATE = 1 << 31


def order(weight: int) -> int:
    """The number of a weight in the order of all (*Differences*)."""
    return weight ^ (0xFFFF if weight & 0x8000 else 0x8000)


def weight_at(place: int) -> int:
    """The weight of a number, the inverse of `order`."""
    return place ^ (0x8000 if place & 0x8000 else 0xFFFF)


class Context:
    """The tokens of a context, with their frequencies and starts."""

    def __init__(self, entries: list[tuple[int, int]]) -> None:
        self.entries, self.starts, start = entries, [], 0
        for _, frequency in entries:
            self.starts.append(start)
            start += frequency
        require(not entries or start == 2048, "the frequencies of a context do not add up")


def read_codebook(data: bytes) -> tuple[int, list[Context]]:
    """`top`, and the contexts (*Codebook*)."""
    top, count = data[:2]
    require(1 <= count <= 16, f"{count} contexts")
    contexts, pos = [], 2
    for _ in range(count):
        require(pos < len(data), "the codebook ends early")
        entries, end = [], pos + 1 + 3 * data[pos]
        require(end <= len(data), "the codebook ends early")
        for token, frequency in struct.iter_unpack("<BH", data[pos + 1 : end]):
            ascends = not entries or entries[-1][0] < token
            require(ascends and token <= ESCAPE, f"token {token} does not ascend")
            require(1 <= frequency <= 2048, f"frequency {frequency}")
            entries.append((token, frequency))
        contexts.append(Context(entries))
        pos = end
    require(pos == len(data), "bytes after the last context")
    return top, contexts


class RawBits:
    """Numbers of some bits, the least significant first."""

    def __init__(self, data: bytes) -> None:
        self.value, self.left = int.from_bytes(data, "little"), 8 * len(data)

    def take(self, count: int) -> int:
        require(count <= self.left, "raw bits end early")
        number = self.value & ((1 << count) - 1)
        self.value >>= count
        self.left -= count
        return number


def difference(token: int, raw: RawBits) -> int:
    """The difference of a token, and its raw bits (*Tokens*)."""
    if token < 64:
        return token
    if token == ESCAPE:
        return raw.take(16)
    n = (token - 64) // 4 + 6
    return (4 + (token - 64) % 4 << (n - 2)) + raw.take(n - 2)


class Delta:
    """A tensor of this shape. `read` reads bytes of an array, `base` the base's weights."""

    def __init__(
        self,
        shape: tuple[int, ...],
        read: Callable[..., bytes],
        base: Callable[[], bytes],
    ) -> None:
        self.elements, self.each = prod(shape), segment_elements(shape)
        self.read, self.base = read, base

    def decode(self, start: int, end: int) -> bytes:
        """The weights from `start` to `end`; of segments in which some of them are."""
        base = self.base()
        top, contexts = read_codebook(self.read(0))
        records = [number for (number,) in struct.iter_unpack("<Q", self.read(1))]
        bitstream = self.read(2)
        require(records[0] == 0 and records[-1] == len(bitstream), "the first or last record")
        out = bytearray()
        first = start // self.each
        for segment in range(first, ceil_div(end, self.each)):
            at, after = records[segment : segment + 2]
            require(at % 4 == after % 4 == 0 and at + 36 <= after, "a record")
            require(after <= len(bitstream), "a record")
            weights = base[2 * segment * self.each : 2 * (segment + 1) * self.each]
            out += decode_segment(bitstream[at:after], top, contexts, weights)
        return bytes(out[2 * (start - first * self.each) : 2 * (end - first * self.each)])

    def verify(self, data: bytes) -> None:
        """All is checked by decoding."""


def decode_segment(data: bytes, top: int, contexts: list[Context], base: bytes) -> bytes:
    """The weights of a segment (*Decoding*)."""
    count, *states = struct.unpack_from("<I4Q", data)
    require(36 + 4 * count <= len(data), "a segment has fewer words")
    require(all(MIN_STATE <= x < MIN_STATE << 32 for x in states), "a state at the start")
    words = iter(struct.unpack_from(f"<{count}I", data, 36))
    raw = RawBits(data[36 + 4 * count :])
    weights = [weight for (weight,) in struct.iter_unpack("<H", base)]
    last = len(contexts) - 1
    for unit in range(0, len(weights), 8):
        for i in range(min(8, len(weights) - unit)):
            weight = weights[unit + i]
            context = contexts[min(last, max(0, top - (weight >> 7 & 0xFF)))]
            require(context.entries, "a weight has a context without tokens")
            high, slot = divmod(states[i % 4], 2048)
            found = bisect_right(context.starts, slot) - 1
            token, frequency = context.entries[found]
            states[i % 4] = frequency * high + slot - context.starts[found]
            z = difference(token, raw)
            step = -(z + 1 >> 1) if z & 1 else z >> 1
            weights[unit + i] = weight_at((order(weight) + step) % 65536)
        for s, x in enumerate(states):
            if x < MIN_STATE:
                word = next(words, None)
                require(word is not None, "words end early")
                states[s] = x << 32 | word
    require(states == [MIN_STATE] * 4 and next(words, None) is None, "the states do not end right")
    require(raw.left < 32 and raw.value == 0, "the raw bits do not end right")
    return struct.pack(f"<{len(weights)}H", *weights)
