"""What notebooks show of a model."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ._inspect import inspect

if TYPE_CHECKING:
    from ._native import Model

#: Of more blocks than this the rest are one row.
_SHOWN = 40
_UNITS = ("B", "kB", "MB", "GB", "TB")


def model(of: Model) -> str:
    """A table of its blocks: tensors, sizes, bits a weight. Reads no weights."""
    told = inspect(of, tensors=False)
    blocks = told["blocks"]
    rows = [_row(block["name"], block["tensor_count"], block) for block in blocks[:_SHOWN]]
    if len(blocks) > _SHOWN:
        rows.append(f"<tr><td colspan=5>… and {len(blocks) - _SHOWN} more blocks</td></tr>")
    rows.append(_row("all", told["tensor_count"], told["total"], cell="th"))
    names = "".join(
        f"<th>{name}</th>" for name in ("block", "tensors", "original", "stored", "bits a weight")
    )
    part = "" if told["complete"] else ", a part of the model"
    head = f"<b>df11.Model</b> {escape(told['source'])}{part}"
    return (
        f"<div>{head}<table><thead><tr>{names}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(name: str, tensors: int, total: dict[str, float | None], cell: str = "td") -> str:
    bits = total["bits_per_weight"]
    values = (
        escape(name),
        f"{tensors:,}",
        _bytes(total["decoded_bytes"] or 0),
        _bytes(total["stored_bytes"] or 0),
        "" if bits is None else f"{bits:.2f}",
    )
    return "<tr>" + "".join(f"<{cell}>{value}</{cell}>" for value in values) + "</tr>"


def _bytes(count: float) -> str:
    for unit in _UNITS[:-1]:
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} {_UNITS[-1]}"
