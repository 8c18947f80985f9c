#!/usr/bin/env python3
"""Wavefronts of shared memory that a warp's look-ups in a decode table take, for tables in copies.

    python3 kernels/bench/lookups.py    # needs numpy, no GPU

32 lanes read a word each: as many wavefronts as the bank with the most different addresses has.
Pairs of exponents are drawn from N(0, 0.02^2); their code has at most 12 bits (package-merge) and
400 pairs and an escape.
"""

import numpy as np

LANES, BANKS, LIMIT, WARPS = 32, 32, 12, 4000
rng = np.random.default_rng(1)


def lengths(counts: list[int]) -> np.ndarray:
    """Of the best code with at most LIMIT bits."""
    items = sorted((count, [index]) for index, count in enumerate(counts))
    packages: list[tuple[int, list[int]]] = []
    for _ in range(LIMIT):
        merged = sorted(items + packages, key=lambda package: package[0])
        pairs = zip(merged[::2], merged[1::2], strict=False)
        packages = [(one[0] + other[0], one[1] + other[1]) for one, other in pairs]
    result = np.zeros(len(counts), int)
    for _, symbols in packages[: len(counts) - 1]:
        np.add.at(result, symbols, 1)
    return result


def codes(length: np.ndarray) -> np.ndarray:
    """Canonical, their first bit lowest."""
    result, code, before = np.zeros(len(length), int), 0, 0
    for symbol in np.lexsort((np.arange(len(length)), length)):
        code <<= length[symbol] - before
        before = length[symbol]
        result[symbol] = int(format(code, f"0{before}b")[::-1], 2)
        code += 1
    return result


def wavefronts(banks: np.ndarray, addresses: np.ndarray, active: np.ndarray | None = None) -> float:
    total = 0
    for warp in range(WARPS):
        lanes = range(LANES) if active is None else np.flatnonzero(active[warp])
        found: dict[int, set[int]] = {}
        for lane in lanes:
            found.setdefault(banks[warp, lane], set()).add(addresses[warp, lane])
        total += max((len(words) for words in found.values()), default=0)
    return total / WARPS


weights = (rng.standard_normal(1 << 23) * 0.02).astype(np.float32).view(np.uint32)
exponents = ((weights + 0x7FFF + (weights >> 16 & 1)) >> 23 & 255).astype(int).reshape(-1, 2)
_, counts = np.unique(exponents[:, 0] * 256 + exponents[:, 1], return_counts=True)
counts = np.sort(counts)[::-1]
counts = np.append(counts[:400], counts[400:].sum() + 1)
length = lengths(counts.tolist())
share = counts / counts.sum()
print(
    f"{(share * length).sum():.3f} bits a pair;",
    {k: round(float(share[length > k].sum()), 4) for k in (8, 9, 10, 11)},
)

symbols = rng.choice(len(share), p=share, size=(WARPS, LANES))
index = (
    codes(length)[symbols]
    | rng.integers(0, 1 << LIMIT, symbols.shape) << length[symbols] & (1 << LIMIT) - 1
)
lane = np.arange(LANES)
for copies, bits in ((1, 12), (8, 12), (16, 11), (16, 10), (32, 10), (32, 9)):
    own = BANKS // copies
    part = index & (1 << bits) - 1
    banks = lane // own * own + part % own
    first = wavefronts(banks, part * BANKS + banks)
    again = wavefronts(index % BANKS, index, length[symbols] > bits) if bits < LIMIT else 0.0
    print(
        f"{copies:2} copies of {bits} bits, {copies * 4 << bits >> 10} KiB: "
        f"{first:.2f}, longer codes {again:.2f}"
    )
words = rng.integers(0, 1 << 20, symbols.shape)
print(f"a word for each lane: {wavefronts(words % BANKS, words):.2f}")
print(
    "for 64 % of the lanes: "
    f"{wavefronts(words % BANKS, words, rng.random(words.shape) < 0.645):.2f}"
)
