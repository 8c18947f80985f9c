"""What work came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from . import _html


@dataclass(frozen=True)
class Report:
    """Sizes before and after compression. Dataclass: `dataclasses.asdict` makes a dict of it."""

    source_bytes: int
    """Bytes of the original weights files."""
    side_bytes: int
    """Bytes of the side files (configuration, tokenizer)."""
    stored_bytes: int
    """Bytes of all containers, side files in them included."""
    stored_side_bytes: int
    """Bytes of side files inside of a container before they were stored; none of a folder."""
    shards: int
    """The number of containers."""
    blocks: int
    """The number of blocks, counted in each container."""
    coded_tensors: int
    """The number of tensors with coded exponents."""
    raw_tensors: int
    """The number of tensors stored as they are."""
    alias_tensors: int
    """The number of tensors stored as references to others with the same bytes."""
    coded_weights: int
    """Weights in coded tensors."""
    coded_bytes: int
    """Bytes of the arrays of coded tensors, with their alignment."""
    entropy_bits: float
    """Sum of each coded tensor's own exponent entropy times its weights, in bits."""
    left_out: tuple[tuple[str, str], ...]
    """Files that were found and are not part of the output, with the reason of each."""
    notes: tuple[str, ...]
    """What the user should know of how the weights were read, a sentence each."""

    @property
    def ratio(self) -> float:
        """Stored size divided by that of the same files: side files count if they are inside."""
        return self.stored_bytes / max(self.source_bytes + self.stored_side_bytes, 1)

    @property
    def bits_per_weight(self) -> float:
        """Bits a weight over all coded tensors."""
        return 8 * self.coded_bytes / max(self.coded_weights, 1)

    @property
    def entropy(self) -> float:
        """Exponent entropy in bits a weight: over coded tensors, each with its distribution."""
        return self.entropy_bits / max(self.coded_weights, 1)

    def _repr_html_(self) -> str:
        tensors = (self.coded_tensors, self.raw_tensors, self.alias_tensors)
        rows = {
            "before": f"{self.source_bytes + self.stored_side_bytes:,} bytes",
            "after": f"{self.stored_bytes:,} bytes ({self.ratio:.1%})",
            "a weight": f"{self.bits_per_weight:.2f} of 16 bits; exponents {self.entropy:.2f} of 8",
            "tensors": "{} coded, {} as they are, {} tied".format(*tensors),
            **{f"left out: {name}": why for name, why in self.left_out},
            **{f"note {at}": note for at, note in enumerate(self.notes, start=1)},
        }
        return _html.table("df11: compressed", rows.items())


@dataclass(frozen=True)
class Verification:
    """What was verified."""

    tensors: int
    """Tensors whose hashes match; 0 below the level `full`."""
    files: int
    """Original files whose hashes match, so that they would be restored byte for byte."""
    bytes: int
    """Decoded bytes of those tensors."""
    unchecked: tuple[str, ...]
    """What could not be checked, because it needs a newer version or another shard."""


class Placement(NamedTuple):
    """Where a block lies."""

    device: int
    """Its GPU: in a `Plan` the index among the sizes it was given, else the GPU's number."""
    streamed: bool
    """Whether it stays pinned on the host and is copied to the GPU ahead of each use."""


@dataclass(frozen=True)
class Plan:
    """Which block would lie where."""

    placements: dict[str, Placement]
    """By the name of the block, in the order in which the model runs them."""
    device_bytes: tuple[int, ...]
    """Bytes of each GPU: sections, slots, tables, and the caller's two outputs of a block."""
    host_bytes: int
    """Bytes of streamed blocks, which stay pinned on the host."""
