"""BLAKE3 in its default (unkeyed, 32-byte) mode, in plain Python.

Written from the BLAKE3 paper, sections 2.1 to 2.6. The compression function works on *lanes*: a
Python integer that holds one 32-bit word of many inputs, each in a lane of 64 bits. The upper half
of a lane takes the carries and is masked off, so the same code hashes one chunk or a thousand at
once.
"""

import sys
from array import array

CHUNK_BYTES = 1024
BLOCK_BYTES = 64
BATCH_CHUNKS = 512  # lanes per integer; larger ones leave the cache

CHUNK_START, CHUNK_END, PARENT, ROOT = 1, 2, 4, 8

IV = (
    0x6A09E667,
    0xBB67AE85,
    0x3C6EF372,
    0xA54FF53A,
    0x510E527F,
    0x9B05688C,
    0x1F83D9AB,
    0x5BE0CD19,
)
PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
COLUMNS_AND_DIAGONALS = (
    (0, 4, 8, 12),
    (1, 5, 9, 13),
    (2, 6, 10, 14),
    (3, 7, 11, 15),
    (0, 5, 10, 15),
    (1, 6, 11, 12),
    (2, 7, 8, 13),
    (3, 4, 9, 14),
)


def _to_lanes(words: array) -> int:
    return int.from_bytes(array("Q", words).tobytes(), sys.byteorder)


def _from_lanes(lanes: int, count: int) -> array:
    return array("Q", lanes.to_bytes(8 * count, sys.byteorder))


def _compress(
    cv: list[int], block: list[int], counter: array, length: int, flags: int
) -> list[int]:
    """The compression function (2.2) of as many inputs as `counter` has entries; returns the first
    eight words.
    """
    ones = _to_lanes(array("Q", [1]) * len(counter))
    mask = ones * 0xFFFFFFFF
    low = _to_lanes(array("Q", (c & 0xFFFFFFFF for c in counter)))
    high = _to_lanes(array("Q", (c >> 32 for c in counter)))
    v = [*cv, *(ones * word for word in IV[:4]), low, high, ones * length, ones * flags]
    m = block
    for _ in range(7):
        for i, (a, b, c, d) in enumerate(COLUMNS_AND_DIAGONALS):
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
    return [v[i] ^ v[i + 8] for i in range(8)]


def _words(data: bytes) -> array:
    words = array("I", data)
    assert words.itemsize == 4
    if sys.byteorder == "big":
        words.byteswap()
    return words


def _chunks(data: bytes, chunk_bytes: int, first: int, root: int) -> list[array]:
    """Chaining values (2.4) of chunks of one length, of which the first has the number `first`."""
    count = max(1, len(data) // max(1, chunk_bytes))
    blocks = max(1, -(-chunk_bytes // BLOCK_BYTES))
    padded = data.ljust(count * blocks * BLOCK_BYTES, b"\0")  # only a lone chunk is ever padded
    words = _words(padded)
    counter = array("Q", range(first, first + count))
    ones = _to_lanes(array("Q", [1]) * count)
    cv = [ones * word for word in IV]
    for b in range(blocks):
        block = [_to_lanes(words[16 * b + w :: 16 * blocks]) for w in range(16)]
        flags = CHUNK_START if b == 0 else 0
        if b == blocks - 1:
            flags |= CHUNK_END | root
        cv = _compress(cv, block, counter, min(BLOCK_BYTES, chunk_bytes - BLOCK_BYTES * b), flags)
    return [_from_lanes(word, count) for word in cv]


def _parents(cvs: list[array], root: int) -> list[array]:
    """One level of the tree (2.5): neighbours are joined, and an odd one out moves up as it is."""
    pairs = len(cvs[0]) // 2
    block = [_to_lanes(word[side : 2 * pairs : 2]) for side in (0, 1) for word in cvs]
    ones = _to_lanes(array("Q", [1]) * pairs)
    joined = _compress(
        [ones * word for word in IV], block, array("Q", [0]) * pairs, BLOCK_BYTES, PARENT | root
    )
    return [_from_lanes(new, pairs) + old[2 * pairs :] for new, old in zip(joined, cvs)]


def blake3(data: bytes) -> bytes:
    """The 32-byte hash of `data`."""
    data = bytes(data)
    batch = CHUNK_BYTES * BATCH_CHUNKS
    full = (max(1, len(data)) - 1) // CHUNK_BYTES  # all chunks but the last, which may be short
    root = ROOT if full == 0 else 0
    cvs = [array("Q") for _ in range(8)]
    for start in range(0, full * CHUNK_BYTES, batch):
        part = data[start : min(start + batch, full * CHUNK_BYTES)]
        for word, more in zip(cvs, _chunks(part, CHUNK_BYTES, start // CHUNK_BYTES, 0)):
            word.extend(more)
    last = data[full * CHUNK_BYTES :]
    for word, more in zip(cvs, _chunks(last, len(last), full, root)):
        word.extend(more)
    while len(cvs[0]) > 1:
        cvs = _parents(cvs, ROOT if len(cvs[0]) == 2 else 0)
    return b"".join(word[0].to_bytes(4, "little") for word in cvs)
