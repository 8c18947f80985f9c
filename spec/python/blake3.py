"""BLAKE3 in its default (unkeyed, 32-byte) mode, in plain Python.

Written from the BLAKE3 paper, sections 2.1 to 2.6. The compression function works on *lanes*: a
Python integer that holds one 32-bit word of many inputs, each in a lane of 64 bits. The upper half
of a lane takes the carries and is masked off, so the same code hashes one chunk or a thousand at
once.
"""

import struct
import sys
from array import array

CHUNK_BYTES = 1024
BLOCK_BYTES = 64
BATCH_CHUNKS = 512  # lanes per integer; larger ones leave the cache

CHUNK_START, CHUNK_END, PARENT, ROOT = 1, 2, 4, 8

IV = struct.unpack(
    ">8I", bytes.fromhex("6A09E667BB67AE853C6EF372A54FF53A510E527F9B05688C1F83D9AB5BE0CD19")
)
PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
# Columns, then diagonals.
MIXED = [
    (i, 4 + (i + d) % 4, 8 + (i + 2 * d) % 4, 12 + (i + 3 * d) % 4)
    for d in (0, 1)
    for i in range(4)
]


def _to_lanes(words: array) -> int:
    return int.from_bytes(array("Q", words).tobytes(), sys.byteorder)


def _compress(
    cv: list[array], block: list[array], counter: array, length: int, flags: int
) -> list[array]:
    """The compression function (2.2) of as many inputs as `counter` has entries; returns the first
    eight words.
    """
    count = len(counter)
    ones = _to_lanes(array("Q", [1]) * count)
    mask = ones * 0xFFFFFFFF
    v = [*map(_to_lanes, cv), *(ones * word for word in IV[:4])]
    counters = _to_lanes(counter)
    v += [counters & mask, counters >> 32 & mask, ones * length, ones * flags]
    m = [*map(_to_lanes, block)]
    for _ in range(7):
        for i, (a, b, c, d) in enumerate(MIXED):
            va, vb, vc, vd = v[a], v[b], v[c], v[d]
            va = (va + vb + m[2 * i]) & mask
            vd ^= va
            vd = (vd >> 16 | vd << 16) & mask
            vc = (vc + vd) & mask
            vb ^= vc
            vb = (vb >> 12 | vb << 20) & mask
            va = (va + vb + m[2 * i + 1]) & mask
            vd ^= va
            vd = (vd >> 8 | vd << 24) & mask
            vc = (vc + vd) & mask
            vb ^= vc
            vb = (vb >> 7 | vb << 25) & mask
            v[a], v[b], v[c], v[d] = va, vb, vc, vd
        m = [m[i] for i in PERMUTATION]
    lanes = [(v[i] ^ v[i + 8]).to_bytes(8 * count, sys.byteorder) for i in range(8)]
    return [array("Q", word) for word in lanes]


def _start(count: int) -> list[array]:
    return [array("Q", [word]) * count for word in IV]


def _chunks(data: bytes, chunk_bytes: int, first: int, root: int) -> list[array]:
    """Chaining values (2.4) of chunks of one length, of which the first has the number `first`."""
    count = max(1, len(data) // max(1, chunk_bytes))
    blocks = max(1, -(-chunk_bytes // BLOCK_BYTES))
    words = array("I", data.ljust(count * blocks * BLOCK_BYTES, b"\0"))  # only of a lone chunk
    if sys.byteorder == "big":
        words.byteswap()
    counter, cv = array("Q", range(first, first + count)), _start(count)
    for b in range(blocks):
        block = [words[16 * b + w :: 16 * blocks] for w in range(16)]
        flags = CHUNK_START * (b == 0) | (CHUNK_END | root) * (b == blocks - 1)
        cv = _compress(cv, block, counter, min(BLOCK_BYTES, chunk_bytes - BLOCK_BYTES * b), flags)
    return cv


def _parents(cvs: list[array], root: int) -> list[array]:
    """One level of the tree (2.5): neighbours are joined, and an odd one out moves up as it is."""
    pairs = len(cvs[0]) // 2
    block = [word[side : 2 * pairs : 2] for side in (0, 1) for word in cvs]
    counter = array("Q", [0]) * pairs
    joined = _compress(_start(pairs), block, counter, BLOCK_BYTES, PARENT | root)
    return [new + old[2 * pairs :] for new, old in zip(joined, cvs)]


def blake3(data: bytes) -> bytes:
    """The 32-byte hash of `data`."""
    full = (max(1, len(data)) - 1) // CHUNK_BYTES  # all chunks but the last, which may be short
    cvs = [array("Q") for _ in range(8)]
    for first in range(0, full, BATCH_CHUNKS):
        end = min(first + BATCH_CHUNKS, full)
        part = data[first * CHUNK_BYTES : end * CHUNK_BYTES]
        cvs = [word + more for word, more in zip(cvs, _chunks(part, CHUNK_BYTES, first, 0))]
    last = data[full * CHUNK_BYTES :]
    more = _chunks(last, len(last), full, 0 if full else ROOT)
    cvs = [word + one for word, one in zip(cvs, more)]
    while len(cvs[0]) > 1:
        cvs = _parents(cvs, ROOT if len(cvs[0]) == 2 else 0)
    return struct.pack("<8I", *(word[0] for word in cvs))
