"""Compressed arrays in pinned memory of the host, brought to the GPU just before their use.

A copy moves 52 GB/s over the bus where kernels that read the host's memory move 37. It runs in the
order of the stream, into memory of PyTorch's allocator that is free again after the kernels which
read it: nothing is shared, and a CUDA graph captures it like any other copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ._matrices import STORED, each

#: Larger pieces are read where they lie, so that a copy never takes more memory than this.
MOST_BYTES = 256 << 20


def brought(arrays: Sequence[Tensor], parts: Sequence[int], index: int) -> Sequence[Tensor]:
    """What kernels of a GPU read instead: copies of the arrays in host memory, the others as is.

    Codebooks stay where they are: kernels read the table made of them. So does a piece of which
    these parts have less than half, such as one expert of many.
    """
    if arrays[0].is_cuda:
        return arrays
    found: list[Tensor] = []
    for part, mine in each(arrays, parts):
        some = part.height * part.width * 2 < part.rows * part.columns
        if some or part.form != STORED or sum(array.nbytes for array in mine) > MOST_BYTES:
            found += mine
        else:
            found.append(mine[0])
            found += (array.to(f"cuda:{index}", non_blocking=True) for array in mine[1:])
    return found
