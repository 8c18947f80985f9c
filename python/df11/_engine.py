"""What plugins for engines (`df11.vllm`) use of this package, all of it."""

from . import _ops
from ._bring import bring, pack_rows
from ._container import Tensors
from ._dispatch import view_of
from ._matrices import FAST, TILE_COLUMNS, TILE_ROWS
from ._ops import decode, embedding, grouped_linear, linear, products
from ._plan import SMALL, Group, Item, Residence, why_ordinary
from ._progress import Bar
from ._tensor import CompressedTensor
from ._torch import dtype_of
from ._workspaces import share_between_captures

#: Bytes that products with many rows of x decode at once: 3 to 7 % faster than with the 60 MB that
#: PyTorch's users get (benches/record/2026-11-22-vllm-h200.md).
DECODED_BYTES = 120_000_000


def serve() -> None:
    """Says that this process is an engine: one graph at a time, memory set aside for its steps."""
    _ops.TEMPORARY_BYTES = DECODED_BYTES
    share_between_captures()


__all__ = [
    "FAST",
    "SMALL",
    "TILE_COLUMNS",
    "TILE_ROWS",
    "Bar",
    "CompressedTensor",
    "Group",
    "Item",
    "Residence",
    "Tensors",
    "bring",
    "decode",
    "dtype_of",
    "embedding",
    "grouped_linear",
    "linear",
    "pack_rows",
    "products",
    "serve",
    "view_of",
    "why_ordinary",
]
