"""The README's picture and its table of layouts, made from the newest records of a decode step.

python3 docs/picture.py            writes both pictures (docs/picture-*.svg) and the table
python3 docs/picture.py --check    fails if one of them is not what the records say

The picture shows the newest record of the fast layout on an H100. Each row of the table is of the
newest record there that has its kind, so that row and picture agree.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parent
README = DOCS.parent / "README.md"
RECORDS = DOCS.parent / "benches/record"
GPU = "H100"

#: Background, text, weaker text, BF16's bars, ours as stored, ours in the fast layout.
COLOURS = {
    "light": ("#ffffff", "#1f2328", "#59636e", "#9aa4af", "#0969da", "#54aeff"),
    "dark": ("#0d1117", "#f0f6fc", "#9198a1", "#656c76", "#4493f8", "#1f6feb"),
}
#: Sizes of the bars, in pixels.
LEFT, LONGEST, STEP, HEIGHT = 96, 150, 29, 20
#: Bars of the picture: a name, and what records call it. One that the record lacks is left out.
KINDS = (("BF16", "bf16"), ("df11, stored", "exact"), ("df11, fast", "exact-fast"))
FAST = "exact-fast"
#: Rows of the table: an option, what records call it, what its answers are.
OPTIONS = (
    ("none", FAST, "**BF16's, bit for bit**"),
    ('`df11.Config(residence="stored")`', "exact", "BF16's, bit for bit"),
    ('`df11.Config(mode="fused")`', "fast", "rounded differently: sums in another order"),
)
HEADER = "| `quantization_config` | memory | speed at batch 1 / 8 / 32 | answers | measured |"
BATCHES = (1, 8, 32)


class Record(NamedTuple):
    """One run: its day, the page about it, and its rows by part, kind and batch."""

    day: str
    page: str
    rows: dict[tuple[str, str, int | None], dict]

    def has(self, kind: str) -> bool:
        """Whether all batches of a kind were measured."""
        return all(("graph", kind, batch) in self.rows for batch in BATCHES)

    def bars(self, fills: list[str]) -> list[tuple[str, str, str]]:
        """Name, kind and colour of each bar."""
        pairs = zip(KINDS, fills, strict=True)
        return [(name, kind, fill) for (name, kind), fill in pairs if self.has(kind)]

    def held(self, kind: str) -> float:
        """GB of GPU memory."""
        return self.rows["load", kind, None]["held"] / 1e9

    def speed(self, kind: str, batch: int) -> float:
        """BF16's time of a decode step divided by this one's."""
        bf16, ours = (self.rows["graph", one, batch]["milliseconds"] for one in ("bf16", kind))
        return bf16 / ours

    def speeds(self, kind: str) -> list[str]:
        """Speeds at all batches."""
        return [f"{self.speed(kind, batch):.2f}" for batch in BATCHES]

    def is_exact(self, kind: str) -> bool:
        """Whether logits equal BF16's."""
        return all(self.rows["logits", kind, batch]["identical"] for batch in BATCHES)


def newest(kind: str) -> Record:
    """The newest record of a kind on the GPU."""
    for file in sorted(RECORDS.glob("*.jsonl"), reverse=True):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        steps = (row for row in rows if isinstance(row, dict))  # other records have lists
        found = {(row.get("part"), row.get("kind"), row.get("batch")): row for row in steps}
        record = Record(file.name[:10], page_of(file).name, found)
        if record.has("bf16") and record.has(kind) and gpu_of(file) == GPU:
            return record
    raise SystemExit(f"no record has a decode step of {kind} on an {GPU}")


def page_of(file: Path) -> Path:
    """The page about a file of rows, which may be of one of its GPUs."""
    return file.with_name(re.sub(r"(-h\d+)?\.jsonl$", ".md", file.name))


def gpu_of(file: Path) -> str:
    """The GPU in the name of a file of rows, or else the first that its page names."""
    if named := re.search(r"-(h\d+)\.jsonl$", file.name):
        return named[1].upper()
    told = re.search(r"NVIDIA (\w+)", page_of(file).read_text(encoding="utf-8"))
    return told[1] if told else ""


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
    rows = []
    for name, kind, fill in record.bars(fills):
        held = record.held(kind)
        rows.append((name, held, fill, f"{held:.1f} GB, {held / whole:.0%}"))
    yield text(x, 34, "GPU memory", strong, ' font-size="17" font-weight="600"')
    yield text(x, 54, "weights of an 8B model", weak)
    yield from bars(x, rows, strong)


def speeds(x: float, palette: tuple[str, ...], record: Record) -> Iterator[str]:
    """Speed of a decode step, beside BF16's."""
    _, strong, weak, *fills = palette
    first, *more = BATCHES
    rows = []
    for name, kind, fill in record.bars(fills):
        label = f"{record.speed(kind, first):.2f}" if kind != "bf16" else "1"
        rows.append((name, record.speed(kind, first), fill, label))
    yield text(x, 34, "Speed, BF16 = 1", strong, ' font-size="17" font-weight="600"')
    yield text(x, 54, f"a decode step in a CUDA graph, batch {first}", weak)
    yield from bars(x, rows, strong)
    fast = ", ".join(record.speeds(FAST)[1:])
    batches = " and ".join(map(str, more))
    yield text(x + LEFT, 92 + STEP * len(rows), f"fast with batch {batches}: {fast}", weak)


def proof(x: float, palette: tuple[str, ...], record: Record) -> Iterator[str]:
    """Whether logits are the same."""
    _, strong, weak, _, ours, _ = palette
    are_exact = all(record.is_exact(kind) for _, kind in KINDS if record.has(kind))
    word = "identical" if are_exact else "not identical"
    yield text(x, 34, "Exact", strong, ' font-size="17" font-weight="600"')
    yield text(x, 54, "logits against BF16", weak)
    yield text(x, 122, word, ours, ' font-size="40" font-weight="700"')
    yield text(x, 146, f"bit for bit, batch {', '.join(map(str, BATCHES))}", strong)


def picture(colours: str, record: Record) -> str:
    """The SVG in the colours of a theme."""
    palette = COLOURS[colours]
    foot = (
        f"mode exact, Llama-3.1-8B geometry, seeded weights, one {GPU}; the command is in "
        f"benches/record/{record.page}"
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
        if not record.has(kind):
            continue
        memory = record.held(kind) / record.held("bf16")
        speeds = ", ".join(record.speeds(kind))
        logits = "the same" if record.is_exact(kind) else "other"
        parts.append(
            f"{name}: {memory:.0%} of BF16's memory, {speeds} times its speed, {logits} logits"
        )
    return f"{'; '.join(parts)} (batch {', '.join(map(str, BATCHES))})"


def table() -> str:
    """The README's table of layouts."""
    lines = [HEADER, "|---|---|---|---|---|"]
    for option, kind, answers in OPTIONS:
        record = newest(kind)
        memory = f"{record.held(kind) / record.held('bf16'):.0%}".replace("%", " %")
        speeds = " / ".join(record.speeds(kind))
        speeds = f"**{speeds}**" if kind == FAST else speeds
        source = f"[{record.day}](benches/record/{record.page})"
        lines.append(f"| {option} | {memory} | {speeds} | {answers} | {source} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The README with the table that is true now."""
    begin = page.index(HEADER.partition(" memory")[0])
    return page[:begin] + table() + page[page.index("\n\n", begin) :]


def main() -> None:
    """Write the pictures and the table, or check them."""
    record = newest(FAST)
    made = {DOCS / f"picture-{colours}.svg": picture(colours, record) for colours in COLOURS}
    made[README] = with_table(README.read_text(encoding="utf-8"))
    for file, content in made.items():
        if "--check" not in sys.argv:
            file.write_text(content, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != content:
            raise SystemExit(f"{file.name} is not what the records say: python3 docs/picture.py")


if __name__ == "__main__":
    main()
