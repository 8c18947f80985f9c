"""The picture of the README, made from the newest records of a decode step.

python3 docs/picture.py            writes docs/picture-light.svg and docs/picture-dark.svg
python3 docs/picture.py --check    fails if one of them is not what the records say
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parent
RECORDS = DOCS.parent / "benches/record"

#: Background, text, weaker text, BF16's bars, ours, ours in the other form.
COLOURS = {
    "light": ("#ffffff", "#1f2328", "#59636e", "#9aa4af", "#0969da", "#54aeff"),
    "dark": ("#0d1117", "#f0f6fc", "#9198a1", "#656c76", "#4493f8", "#1f6feb"),
}
#: Of the bars, in pixels.
LEFT, LONGEST, STEP, HEIGHT = 96, 150, 29, 20
BATCHES = (1, 8, 32)


def newest(part: str, kind: str) -> tuple[str, list[dict]]:
    """The rows of a part and a kind in the newest record that has some, and its day."""
    for file in sorted(RECORDS.glob("*-decode-step-h200.jsonl"), reverse=True):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        found = [row for row in rows if row.get("part") == part and row.get("kind") == kind]
        if found:
            return file.name[:10], found
    raise SystemExit(f"no record has the part {part} of {kind}")


def held(kind: str) -> float:
    """GB of GPU memory."""
    return newest("load", kind)[1][0]["held"] / 1e9


def milliseconds(kind: str) -> dict[int, float]:
    """Of a decode step, by batch."""
    return {row["batch"]: row["milliseconds"] for row in newest("graph", kind)[1]}


def exactness() -> tuple[int, int]:
    """Steps of decoding in mode exact with BF16's logits, to the bit, and all; of all records."""
    same = steps = 0
    for file in sorted(RECORDS.glob("*-python-h200.jsonl")):
        for row in map(json.loads, file.read_text().splitlines()):
            if row["part"] == "exact":
                first = row["first_difference"]
                same += row["steps"] if first is None else first
                steps += row["steps"]
    return same, steps


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


def sizes(x: float, palette: tuple[str, ...]) -> Iterator[str]:
    """GPU memory."""
    _, strong, weak, plain, ours, other = palette
    whole = held("bf16")
    named = (("BF16", "bf16", plain), ("as stored", "stored", ours), ("fast", "fast", other))
    rows = [
        (name, held(kind), fill, f"{held(kind):.1f} GB, {held(kind) / whole:.0%}")
        for name, kind, fill in named
    ]
    yield text(x, 34, "GPU memory", strong, ' font-size="17" font-weight="600"')
    yield text(x, 54, "weights of an 8B model, two layouts", weak)
    yield from bars(x, rows, strong)


def speeds(x: float, palette: tuple[str, ...]) -> Iterator[str]:
    """Time of a decode step, beside BF16's."""
    _, strong, weak, plain, _, other = palette
    bf16, fast = milliseconds("bf16"), milliseconds("fast")
    rows = [("BF16", 1.0, plain, "1")]
    rows += [
        (f"batch {batch}", bf16[batch] / fast[batch], other, f"{bf16[batch] / fast[batch]:.2f}")
        for batch in BATCHES
    ]
    yield text(x, 34, "Speed, BF16 = 1", strong, ' font-size="17" font-weight="600"')
    yield text(x, 54, "decode step in a CUDA graph, fused, fast", weak)
    yield from bars(x, rows, strong)


def proof(x: float, palette: tuple[str, ...]) -> Iterator[str]:
    """How many logits are the same."""
    _, strong, weak, _, ours, _ = palette
    same, steps = exactness()
    yield text(x, 34, "Exact", strong, ' font-size="17" font-weight="600"')
    yield text(x, 54, "mode exact, logits against BF16", weak)
    yield text(x, 122, f"{same:,}", ours, ' font-size="44" font-weight="700"')
    yield text(x, 146, f"of {steps:,} decode steps identical", strong)


def picture(colours: str) -> str:
    """The SVG in the colours of a theme."""
    palette = COLOURS[colours]
    days = sorted({newest(part, kind)[0] for part, kind in PARTS})
    foot = f"Llama-3.1-8B geometry, seeded weights, one H200; benches/record, {' and '.join(days)}"
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 210" role="img"',
        '  font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13">',
        f"<title>{summary()}</title>",
        f'<rect width="1000" height="210" rx="6" fill="{palette[0]}"/>',
        *sizes(24, palette),
        *speeds(398, palette),
        *proof(760, palette),
        text(24, 196, foot, palette[2], ' font-size="11"'),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


#: Where the picture's figures come from.
PARTS = (("load", "bf16"), ("graph", "fast"))


def summary() -> str:
    """The picture in words."""
    bf16, fast = milliseconds("bf16"), milliseconds("fast")
    ratios = ", ".join(f"{bf16[batch] / fast[batch]:.2f}" for batch in BATCHES)
    stored, quick = held("stored") / held("bf16"), held("fast") / held("bf16")
    same, steps = exactness()
    batches = ", ".join(map(str, BATCHES))
    return (
        f"GPU memory {stored:.0%} of BF16 as stored and {quick:.0%} in the fast layout; {ratios} "
        f"times BF16's speed with batch {batches}; exact: {same:,} of {steps:,} steps identical"
    )


def main() -> None:
    """Write the pictures, or check them."""
    for colours in COLOURS:
        file, made = DOCS / f"picture-{colours}.svg", picture(colours)
        if "--check" not in sys.argv:
            file.write_text(made, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != made:
            raise SystemExit(f"{file.name} is not what the records say: python3 docs/picture.py")


if __name__ == "__main__":
    main()
