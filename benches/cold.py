"""Reading a model from a disk or from memory to a device: df11 beside loaders of safetensors.

    python benches/cold.py FOLDER [--turns 5] [--device cuda:0] [--warm] [--ways df11,...]

FOLDER has BF16 safetensors, such as `python/bench/llm.py` makes; beside it, FOLDER-df11 is made if
it is missing. Unless `--warm` is given, files leave the page cache before each turn (on tmpfs they
cannot). Ways take turns in one process, after a first turn that does not count but compares the
bits of all tensors. Prints one JSON line a turn, and medians of 10⁹ bytes of BF16 a second.

Ways that are not installed are named and left out. *df11, compressed* leaves weights compressed on
the device, ready for products; *df11, decoded* decodes all of them there.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Load = Callable[[list[Path], str], Any]


def by_safetensors(files: list[Path], device: str) -> Tensors:
    from safetensors.torch import load_file

    return {name: value for file in files for name, value in load_file(file, device).items()}


def by_fastsafetensors(files: list[Path], device: str) -> Tensors:
    from fastsafetensors import fastsafe_open

    names = [str(file) for file in files]
    with fastsafe_open(names, device=device, nogds=True) as opened:
        return {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118


def by_runai(files: list[Path], device: str) -> Tensors:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(file) for file in files], device=device)
        return {name: value.clone() for name, value in streamer.get_tensors()}


def by_instanttensor(files: list[Path], device: str) -> Tensors:
    from instanttensor import safe_open

    number = torch.device(device).index
    with safe_open([str(file) for file in files], framework="pt", device=number) as opened:
        return dict(opened.tensors())


def compressed(files: list[Path], device: str) -> Any:
    import df11

    loaded = df11.open(files[0].parent).load(torch.device(device).index)
    loaded.check()
    return loaded


def decoded(files: list[Path], device: str) -> Tensors:
    import df11

    if device == "cpu":
        return df11.torch.load_file(files[0].parent)
    model = df11.open(files[0].parent)
    loaded, out = model.load(torch.device(device).index), {}
    stream = torch.cuda.current_stream(device).cuda_stream
    for block in loaded.blocks:
        buffer = torch.empty(block.nbytes, dtype=torch.uint8, device=device)
        block.decode(buffer.data_ptr(), stream)
        for name, (begin, end) in block.layout.items():
            weight = buffer[begin:end].view(torch.bfloat16)
            out[name] = weight.view(tuple(model[name].shape))
    loaded.check(stream, torch.device(device).index)
    return out


#: Ways by their names: the package, whether it reads containers, and the function.
WAYS: dict[str, tuple[str, bool, Load]] = {
    "df11, compressed": ("df11", True, compressed),
    "df11, decoded": ("df11", True, decoded),
    "safetensors": ("safetensors", False, by_safetensors),
    "fastsafetensors": ("fastsafetensors", False, by_fastsafetensors),
    "Run:ai streamer": ("runai_model_streamer", False, by_runai),
    "InstantTensor": ("instanttensor", False, by_instanttensor),
}
#: Ways that need a GPU.
ON_GPU = ("df11, compressed", "InstantTensor")


def evict(files: list[Path]) -> None:
    """Lets the files leave the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sums(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """Sums of each tensor, which differ for other bits and other places of bits."""

    def both(value: torch.Tensor) -> tuple[int, ...]:
        bits = value.reshape(-1).view(torch.int16).long()
        places = torch.arange(len(bits), device=bits.device) % 32749
        return len(bits), int(bits.sum()), int((bits * places).sum())

    return {name: both(value) for name, value in sorted(tensors.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--warm", action="store_true", help="leave files in the page cache")
    parser.add_argument("--ways", default="", help="beginnings of their names, with commas")
    chosen = parser.parse_args()
    originals = sorted(chosen.folder.glob("*.safetensors"))
    of_df11 = chosen.folder.with_name(f"{chosen.folder.name}-df11")
    if not of_df11.is_dir():
        import df11

        df11.compress(chosen.folder, of_df11)
    containers = sorted(of_df11.glob("*.df11"))
    size = sum(file.stat().st_size for file in originals)
    wanted = tuple(chosen.ways.split(","))
    ways = {name: way for name, way in WAYS.items() if name.startswith(wanted)}
    if chosen.device == "cpu":
        ways = {name: way for name, way in ways.items() if name not in ON_GPU}
    for name in [name for name, (package, *_) in ways.items() if find_spec(package) is None]:
        print(f"{name} is not installed")
        del ways[name]
    rates: dict[str, list[float]] = {name: [] for name in ways}
    expected: dict[str, tuple[int, ...]] | None = None
    for at in range(chosen.turns + 1):
        for name, (_, is_ours, load) in ways.items():
            files = containers if is_ours else originals
            if not chosen.warm:
                evict(files)
            start = time.perf_counter()
            loaded = load(files, chosen.device)
            if chosen.device != "cpu":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            if at == 0 and isinstance(loaded, dict):
                found = sums(loaded)
                expected = expected or found
                assert found == expected, f"{name} gives other bits"
            elif at > 0:
                rates[name].append(size / seconds / 1e9)
                row = {"turn": at, "way": name, "seconds": round(seconds, 4)}
                print(json.dumps(row | {"bf16_gb_s": round(rates[name][-1], 3)}), flush=True)
            del loaded
            gc.collect()
            if chosen.device != "cpu":
                torch.cuda.empty_cache()
    for name, some in rates.items():
        low, high = min(some), max(some)
        print(f"{name:18} {statistics.median(some):7.2f} GB/s of BF16 ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
