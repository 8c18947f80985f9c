"""Which units are better left as they are.

Decoded units take turns in one arena, which is as large as the largest of them. Where one is much larger than
the others (an embedding with a large vocabulary, say), its compressed weights and the arena for it take more
than it does as ordinary parameters, beside an arena for the others. Only the largest ones can matter: the
arena becomes smaller only when all units of its size are gone.
"""

from __future__ import annotations

from collections.abc import Callable

from ._units import Unit

#: Why their weights are ordinary parameters.
REASON = "kept decoded, which takes less memory"


def choose(
    units: list[Unit], compressed: Callable[[list[Unit]], int], arena: Callable[[list[Unit]], int]
) -> tuple[list[Unit], int]:
    """The units whose weights are best ordinary parameters, and the bytes that all units then take.

    `compressed` tells the bytes of some units' compressed weights, `arena` those of the memory that they are
    decoded to.
    """
    best: list[Unit] = []
    least = compressed(units) + arena(units)
    for size in sorted({unit.nbytes for unit in units}, reverse=True):
        ordinary = _with_tied([unit for unit in units if unit.nbytes >= size], units)
        kept = [unit for unit in units if unit not in ordinary]
        weights = {id(weight): weight.nbytes for unit in ordinary for weight in unit.weights}
        total = compressed(kept) + arena(kept) + sum(weights.values())
        if total < least:
            best, least = ordinary, total
    return best, least


def _with_tied(some: list[Unit], units: list[Unit]) -> list[Unit]:
    """Some units, and all that share a weight with one of them."""
    while True:
        weights = {id(weight) for unit in some for weight in unit.weights}
        more = [unit for unit in units if any(id(weight) in weights for weight in unit.weights)]
        if len(more) == len(some):
            return more
        some = more
