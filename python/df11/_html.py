"""What notebooks show: tables of reports and of models."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from ._inspect import inspect

if TYPE_CHECKING:
    from ._native import Model

#: Of more blocks than this the rest are one row.
_SHOWN = 40


def table(caption: str, rows: Iterable[Iterable[str]], head: Iterable[str] = ()) -> str:
    """A table; the first value of each row names it."""
    lines = [f"<caption>{escape(caption)}</caption>"]
    if cells := "".join(f"<th>{escape(name)}</th>" for name in head):
        lines.append(f"<tr>{cells}</tr>")
    for name, *values in rows:
        cells = "".join(f"<td style='text-align:left'>{escape(value)}</td>" for value in values)
        lines.append(f"<tr><th style='text-align:left'>{escape(name)}</th>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def model(of: Model) -> str:
    """A table of its blocks: tensors, sizes, bits a weight. Reads no weights."""
    told = inspect(of, tensors=False)
    blocks = told["blocks"]
    rows = [_row(block["name"], block) for block in blocks[:_SHOWN]]
    if len(blocks) > _SHOWN:
        rows.append([f"… and {len(blocks) - _SHOWN} more blocks"])
    rows.append(_row("all", {**told["total"], "tensor_count": told["tensor_count"]}))
    left = "" if told["complete"] else ", not all of the model"
    head = ("block", "tensors", "original", "stored", "bits a weight")
    return table(f"df11.Model {told['source']}{left}", rows, head)


def _row(name: str, total: dict[str, float | None]) -> list[str]:
    bits = total["bits_per_weight"]
    sizes = [show_bytes(total[size] or 0) for size in ("decoded_bytes", "stored_bytes")]
    return [name, f"{total['tensor_count']:,}", *sizes, "" if bits is None else f"{bits:.2f}"]


def show_bytes(count: float) -> str:
    """A number of bytes for people."""
    for symbol in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {symbol}" if symbol == "B" else f"{count:.1f} {symbol}"
        count /= 1000
    return f"{count:.2f} GB"
