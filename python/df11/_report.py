"""Reports of work and of containers, and their display in notebooks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from os import PathLike
from typing import Any, NamedTuple

from ._native import Model, describe, open, printable


@dataclass(frozen=True)
class Report:
    """Sizes before and after compression. `dataclasses.asdict` makes a dict of it.

    Shards are containers. Blocks and tensors are counted in each of them. Tensors are coded, raw,
    or aliases: references to other tensors with the same bytes.
    """

    source_bytes: int
    """Bytes of the original weights files."""
    side_bytes: int
    """Bytes of the side files (configuration, tokenizer)."""
    stored_bytes: int
    """Bytes of all containers, side files in them included."""
    stored_side_bytes: int
    """Bytes of side files that are stored in a container; 0 for a folder."""
    shards: int
    blocks: int
    coded_tensors: int
    raw_tensors: int
    delta_tensors: int
    """Coded tensors that are stored as differences from a base."""
    alias_tensors: int
    coded_weights: int
    coded_bytes: int
    """Bytes of the arrays of coded tensors, with their alignment."""
    entropy_bits: float
    """Sum over coded tensors of exponent entropy times weights, in bits."""
    left_out: tuple[tuple[str, str], ...]
    """Files that are not part of the output, with the reason for each."""
    notes: tuple[str, ...]
    """Notes for the user on how the weights were read, one sentence each."""

    @property
    def ratio(self) -> float:
        """Stored size divided by the size of the same files. Stored side files count in both."""
        return self.stored_bytes / max(self.source_bytes + self.stored_side_bytes, 1)

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight over all coded tensors."""
        return 8 * self.coded_bytes / max(self.coded_weights, 1)

    @property
    def entropy(self) -> float:
        """Exponent entropy in bits per weight, over coded tensors with their own distributions."""
        return self.entropy_bits / max(self.coded_weights, 1)

    def _repr_html_(self) -> str:
        tensors = (self.coded_tensors, self.raw_tensors, self.alias_tensors)
        rows = {
            "before": f"{self.source_bytes + self.stored_side_bytes:,} bytes",
            "after": f"{self.stored_bytes:,} bytes ({self.ratio:.1%})",
            "a weight": f"{self.bits_per_weight:.2f} bits; exponents {self.entropy:.2f} bits",
            "tensors": "{} coded, {} as they are, {} tied".format(*tensors),
            **{f"left out: {name}": why for name, why in self.left_out},
            **{f"note {at}": note for at, note in enumerate(self.notes, start=1)},
        }
        return html_table("df11: compressed", rows.items())


@dataclass(frozen=True)
class Verification:
    """Result of a verification."""

    tensors: int
    """Tensors whose hashes match; 0 below the level `full`."""
    files: int
    """Original files whose hashes match, so that they would be restored byte for byte."""
    bytes: int
    """Decoded bytes of those tensors."""
    unchecked: tuple[str, ...]
    """Sentences on parts that could not be checked, which need a newer version or another shard."""


class Placement(NamedTuple):
    """The place of a block."""

    device: int
    """Its GPU: in a `Plan` the index in the list of sizes, otherwise the GPU's number."""
    streamed: bool
    """Whether it stays pinned on the host and is copied to the GPU ahead of each use."""


@dataclass(frozen=True)
class Plan:
    """The planned place of each block."""

    placements: dict[str, Placement]
    """Places of blocks by their names, in the order in which the model runs them."""
    device_bytes: tuple[int, ...]
    """Bytes of each GPU: sections, slots, tables, and the caller's two outputs of a block."""
    host_bytes: int
    """Bytes of streamed blocks, which stay pinned on the host."""


def inspect(path: str | PathLike[str] | Model, *, tensors: bool = True) -> dict[str, Any]:
    """Describe a container, or a folder of shards, as `df11 inspect --entropy=never --json` does:
    `identity`, `complete`, `shards`, `container_bytes`, `total`, and `blocks`, each with its
    `tensors` if wanted. Raises the errors of `df11.open`.
    """
    model = path if isinstance(path, Model) else open(path)
    found: dict[str, Any] = json.loads(describe(model, model.path, tensors))
    return found


_SHOWN = 40


def html_table(caption: str, rows: Iterable[Iterable[str]], head: Iterable[str] = ()) -> str:
    """An HTML table; the first value of each row is its name. All characters are escaped."""

    def shown(text: str) -> str:
        return escape(printable(text))

    lines = [f"<caption>{shown(caption)}</caption>"]
    if cells := "".join(f"<th>{shown(name)}</th>" for name in head):
        lines.append(f"<tr>{cells}</tr>")
    for name, *values in rows:
        cells = "".join(f"<td style='text-align:left'>{shown(value)}</td>" for value in values)
        lines.append(f"<tr><th style='text-align:left'>{shown(name)}</th>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def model_table(of: Model) -> str:
    """A table of its blocks: tensors, sizes, bits per weight. Reads no weights."""
    contents = inspect(of, tensors=False)
    blocks = contents["blocks"]
    rows = [_row(block["name"], block) for block in blocks[:_SHOWN]]
    if len(blocks) > _SHOWN:
        rows.append([f"… and {len(blocks) - _SHOWN} more blocks"])
    rows.append(_row("all", {**contents["total"], "tensor_count": contents["tensor_count"]}))
    left = "" if contents["complete"] else ", not all of the model"
    head = ("block", "tensors", "original", "stored", "bits per weight")
    return html_table(f"df11.Model {contents['source']}{left}", rows, head)


def _row(name: str, total: dict[str, float | None]) -> list[str]:
    bits = total["bits_per_weight"]
    sizes = [show_bytes(total[size] or 0) for size in ("decoded_bytes", "stored_bytes")]
    return [name, f"{total['tensor_count']:,}", *sizes, "" if bits is None else f"{bits:.2f}"]


def show_bytes(count: float) -> str:
    """A number of bytes for people."""
    for symbol, digits in (("B", 0), ("kB", 1), ("MB", 1)):
        if count < 1000:
            return f"{count:.{digits}f} {symbol}"
        count /= 1000
    return f"{count:.2f} GB"
