"""Checks the reader against the test vectors: python3 spec/python/check_vectors.py [spec/vectors]

Every row of manifest.json is one vector. The exit code is 0 if all of them passed.
"""

import gzip
import json
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from df11_reader import Container, FormatError, Unsupported

NOT_VECTORS = {"manifest.json", "README.md"}
FOLDER = Path(__file__).resolve().parent.parent / "vectors"


def require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def attempt(make: Callable[[str], bytes], names: list[str]) -> tuple[dict, list[FormatError]]:
    """The result for each name, and the errors."""
    made, errors = {}, []
    for name in names:
        try:
            made[name] = make(name)
        except FormatError as e:
            errors.append(e)
    return made, errors


def check_digests(found: dict[str, bytes], expected: dict[str, str]) -> None:
    digests = {name: sha256(data).hexdigest() for name, data in found.items()}
    require(digests == expected, f"{digests}, not {expected}")


def check_rows(container: Container, decoded: dict[str, bytes]) -> None:
    """Rows decoded alone are the same as rows of the whole."""
    for name, data in decoded.items():
        t = container.names[name]
        rows = t.shape[0] if t.dimension_count else 1
        if not data or len(data) % rows:
            continue
        size = len(data) // rows
        for first, count in {(0, 1), (rows - 1, 1), (rows // 3, rows - rows // 3), (rows // 2, 1)}:
            part = container.rows(name, first, count)
            require(part == data[first * size : (first + count) * size], f"rows of {name!r} differ")


def check_valid(data: bytes, base: Container | None, row: dict) -> None:
    container = Container(data, base=base)
    tensors, errors = attempt(container.tensor, container.names)
    files, more = attempt(container.restore, container.paths)
    for error in errors + more:
        require(isinstance(error, Unsupported), f"{error!r}")
    check_digests(tensors, row.get("tensors", {}))
    check_digests(files, row.get("files", {}))
    check_rows(container, tensors)
    is_good = not container.verify() and container.shard.shard_count == 1
    require(is_good == (row["result"] == "good"), "another result of verification")


def first_failure(data: bytes, base: Container | None = None) -> tuple[str, list[FormatError]]:
    """The first level at which a reader finds something, and what it finds there."""
    try:
        container = Container(data, base=base)
    except FormatError as e:
        return "open", [e]
    _, errors = attempt(container.tensor, container.names)
    # An Unsupported tensor is none: what is wrong may lie elsewhere.
    if any(not isinstance(e, Unsupported) for e in errors):
        return "load", errors
    try:
        container.verify()
    except FormatError as e:
        return "verify", [e]
    return "none", []


def check_invalid(data: bytes, base: Container | None, row: dict) -> None:
    expected = row["expect"] if isinstance(row["expect"], list) else [row["expect"]]
    level, errors = first_failure(data, base)
    found = "; ".join(f"{type(e).__name__}: {e}" for e in errors) or "no error"
    require(level == row["level"], f"found at {level}, not at {row['level']}: {found}")
    require(any(type(e).__name__ in expected for e in errors), f"expected {expected}: {found}")


def read(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def check(folder: Path, row: dict) -> None:
    data = read(folder / row["file"])
    require(sha256(data).hexdigest() == row["sha256"], "the file is not the one of the manifest")
    base = Container(read(folder / row["base"])) if "base" in row else None
    (check_valid if row["expect"] == "valid" else check_invalid)(data, base, row)


def unlisted(folder: Path, rows: list[dict]) -> list[str]:
    """Vectors without a row. Only text that explains them needs none."""
    listed = {row["file"] for row in rows} | NOT_VECTORS
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    return sorted(found - listed)


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0]) if arguments else FOLDER
    rows = json.loads((folder / "manifest.json").read_text())["vectors"]
    passed, failures = 0, [f"{name}: not in the manifest" for name in unlisted(folder, rows)]
    for row in rows:
        try:
            check(folder, row)
            passed += 1
        except Exception as e:  # whatever goes wrong fails this vector, and no other
            failures.append(f"{row.get('file')}: {type(e).__name__}: {e}")
    for failure in failures:
        print(f"FAILED {failure}")
    print(f"{passed} passed, {len(failures)} failed")
    return 1 if failures or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
