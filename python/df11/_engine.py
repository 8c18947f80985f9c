"""What plugins for engines (`df11.vllm`) use of this package, all of it."""

from . import _ops
from ._bring import bring as bring
from ._bring import pack_rows as pack_rows
from ._container import Tensors as Tensors
from ._dispatch import view_of as view_of
from ._matrices import FAST as FAST
from ._matrices import TILE_COLUMNS as TILE_COLUMNS
from ._matrices import TILE_ROWS as TILE_ROWS
from ._native import devices as devices
from ._ops import decode as decode
from ._ops import define as define
from ._ops import embedding as embedding
from ._ops import grouped_linear as grouped_linear
from ._ops import linear as linear
from ._ops import products as products
from ._plan import SMALL as SMALL
from ._plan import Group as Group
from ._plan import Item as Item
from ._plan import Residence as Residence
from ._plan import why_ordinary as why_ordinary
from ._progress import Bar as Bar
from ._tensor import CompressedTensor as CompressedTensor
from ._torch import known_dtype_of as known_dtype_of
from ._workspaces import share_between_captures

#: Bytes that products with many rows of x decode at once: 3 to 7 % faster than with the 60 MB that
#: PyTorch's users get (benches/record/2026-11-22-vllm-h200.md).
DECODED_BYTES = 120_000_000


def serve() -> None:
    """Says that this process is an engine: one graph at a time, memory set aside for its steps."""
    _ops.TEMPORARY_BYTES = DECODED_BYTES
    share_between_captures()
