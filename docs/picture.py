"""The picture of the README, made from the newest record of a decode step in mode exact.

python3 docs/picture.py            writes docs/picture-light.svg and docs/picture-dark.svg
python3 docs/picture.py --check    fails if one of them is not what the record says
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parent
RECORDS = DOCS.parent / "benches/record"

#: Background, text, weaker text, BF16's bars, ours as stored, ours in the fast layout.
COLOURS = {
    "light": ("#ffffff", "#1f2328", "#59636e", "#9aa4af", "#0969da", "#54aeff"),
    "dark": ("#0d1117", "#f0f6fc", "#9198a1", "#656c76", "#4493f8", "#1f6feb"),
}
#: Sizes of the bars, in pixels.
LEFT, LONGEST, STEP, HEIGHT = 96, 150, 29, 20
#: A row of the picture each: its name, and what records call it.
KINDS = (("BF16", "bf16"), ("as stored", "exact"), ("fast", "exact-fast"))
BATCHES = (1, 8, 32)


class Record(NamedTuple):
    """One run: its day, its GPU, and its rows by part, kind and batch."""

    day: str
    gpu: str
    rows: dict[tuple[str, str, int | None], dict]

    def held(self, kind: str) -> float:
        """GB of GPU memory."""
        return self.rows["load", kind, None]["held"] / 1e9

    def speed(self, kind: str, batch: int) -> float:
        """BF16's time of a decode step divided by this one's."""
        bf16, ours = (self.rows["graph", one, batch]["milliseconds"] for one in ("bf16", kind))
        return bf16 / ours

    def is_exact(self, kind: str) -> bool:
        """Whether logits equal BF16's."""
        return all(self.rows["logits", kind, batch]["identical"] for batch in BATCHES)


def newest() -> Record:
    """The newest record that has all kinds."""
    for file in sorted(RECORDS.glob("*.jsonl"), reverse=True):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        steps = (row for row in rows if isinstance(row, dict))  # other records have lists
        found = {(row.get("part"), row.get("kind"), row.get("batch")): row for row in steps}
        if all(("graph", kind, batch) in found for _, kind in KINDS for batch in BATCHES):
            told = file.with_suffix(".md").read_text(encoding="utf-8")
            gpu = re.search(r"NVIDIA (\w+)", told)
            return Record(file.name[:10], gpu[1] if gpu else "GPU", found)
    raise SystemExit("no record has a decode step in mode exact")


def text(x: float, y: float, words: str, colour: str, more: str = "") -> str:
    """A line of text, and a gap after it."""
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}"{more}>{words}</text>'


def bars(x: float, rows: list[tuple[str, float, str, str]], colour: str) -> Iterator[str]:
    """A bar a row: name, value, its colour, what stands after it."""
    largest = max(value for _, value, _, _ in rows)
    for index, (name, value, fill, label) in enumerate(rows):
        y, width = 76 + STEP * index, LONGEST * value / largest
        yield text(x + LEFT - 8, y + 15, name, colour, ' text-anchor="end"')
        place = f'x="{x + LEFT:g}" y="{y}" width="{width:.1f}" height="{HEIGHT}"'
        yield f'<rect {place} fill="{fill}"/>'
        yield text(x + LEFT + width + 6, y + 15, label, colour)


def sizes(x: float, palette: tuple[str, ...], record: Record) -> Iterator[str]:
    """GPU memory."""
    _, strong, weak, *fills = palette
    whole = record.held("bf16")
    rows = [
        (
            name,
            record.held(kind),
            fill,
            f"{record.held(kind):.1f} GB, {record.held(kind) / whole:.0%}",
        )
        for (name, kind), fill in zip(KINDS, fills, strict=True)
    ]
    yield text(x, 34, "GPU memory", strong, ' font-size="17" font-weight="600"')
    yield text(x, 54, "weights of an 8B model, two layouts", weak)
    yield from bars(x, rows, strong)


def speeds(x: float, palette: tuple[str, ...], record: Record) -> Iterator[str]:
    """Speed of a decode step, beside BF16's."""
    _, strong, weak, *fills = palette
    first, *more = BATCHES
    rows = []
    for (name, kind), fill in zip(KINDS, fills, strict=True):
        label = f"{record.speed(kind, first):.2f}" if kind != "bf16" else "1"
        rows.append((name, record.speed(kind, first), fill, label))
    yield text(x, 34, "Speed, BF16 = 1", strong, ' font-size="17" font-weight="600"')
    yield text(x, 54, f"a decode step in a CUDA graph, batch {first}", weak)
    yield from bars(x, rows, strong)
    fast = ", ".join(f"{record.speed('exact-fast', batch):.2f}" for batch in more)
    batches = " and ".join(map(str, more))
    yield text(x + LEFT, 178, f"fast with batch {batches}: {fast}", weak)


def proof(x: float, palette: tuple[str, ...], record: Record) -> Iterator[str]:
    """Whether logits are the same."""
    _, strong, weak, _, ours, _ = palette
    word = "identical" if all(record.is_exact(kind) for _, kind in KINDS) else "not identical"
    yield text(x, 34, "Exact", strong, ' font-size="17" font-weight="600"')
    yield text(x, 54, "logits of both layouts against BF16", weak)
    yield text(x, 122, word, ours, ' font-size="40" font-weight="700"')
    yield text(x, 146, f"bit for bit, batch {', '.join(map(str, BATCHES))}", strong)


def picture(colours: str, record: Record) -> str:
    """The SVG in the colours of a theme."""
    palette = COLOURS[colours]
    foot = (
        f"mode exact, Llama-3.1-8B geometry, seeded weights, one {record.gpu}; benches/record, "
        f"{record.day}"
    )
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 210" role="img"',
        '  font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13">',
        f"<title>{summary(record)}</title>",
        f'<rect width="1000" height="210" rx="6" fill="{palette[0]}"/>',
        *sizes(24, palette, record),
        *speeds(398, palette, record),
        *proof(760, palette, record),
        text(24, 200, foot, palette[2], ' font-size="11"'),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def summary(record: Record) -> str:
    """The picture in words."""
    parts = []
    for name, kind in KINDS[1:]:
        memory = record.held(kind) / record.held("bf16")
        speeds = ", ".join(f"{record.speed(kind, batch):.2f}" for batch in BATCHES)
        logits = "the same" if record.is_exact(kind) else "other"
        parts.append(
            f"{name}: {memory:.0%} of BF16's memory, {speeds} times its speed, {logits} logits"
        )
    return f"{'; '.join(parts)} (batch {', '.join(map(str, BATCHES))})"


def main() -> None:
    """Write the pictures, or check them."""
    record = newest()
    for colours in COLOURS:
        file, made = DOCS / f"picture-{colours}.svg", picture(colours, record)
        if "--check" not in sys.argv:
            file.write_text(made, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != made:
            raise SystemExit(f"{file.name} is not what the record says: python3 docs/picture.py")


if __name__ == "__main__":
    main()
