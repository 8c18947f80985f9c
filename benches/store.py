"""Throughput from a server on the loopback to host memory: df11 beside obstore, in turns.

    python benches/store.py CONTAINER.df11 [--turns 7] [--gb-s 0.25] [--ways df11,...]

Needs the Python package, and obstore for its way. Both fetch the same file with ranges of 16 MiB,
at most 32 at once; df11 also parses the directory. *Loaded* checks and decodes tensors while they
come, and *loaded afterwards* when all are there. Prints one JSON line a turn, and medians. The
server is a process of its own and sends from the page cache, so many 10⁹ bytes a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import store_server

RANGE = 16 << 20
REQUESTS = 32


def by_obstore(url: str) -> int:
    import obstore

    base, _, name = url.rpartition("/")
    store = obstore.store.HTTPStore.from_url(base, client_options={"allow_http": True})
    size = obstore.head(store, name)["size"]
    whole = bytearray(size)

    def fetch(begin: int) -> None:
        end = min(begin + RANGE, size)
        whole[begin:end] = obstore.get_range(store, name, start=begin, end=end)

    with ThreadPoolExecutor(REQUESTS) as threads:
        list(threads.map(fetch, range(0, size, RANGE)))
    return len(whole)


def arrived(url: str) -> Any:
    from df11 import _native

    model = _native.open(url, in_memory=True)
    while model.is_coming:
        time.sleep(0.001)
    return model


def by_df11(url: str) -> int:
    return arrived(url).stored_bytes


def loaded_afterwards(url: str) -> int:
    return decoded(arrived(url))


def loaded(url: str) -> int:
    from df11 import _native

    return decoded(_native.open(url, in_memory=True))


def decoded(model: Any) -> int:
    out = bytearray(max(tensor.nbytes for tensor in model.values()))
    for tensor in model.values():
        tensor.decode_into(memoryview(out)[: tensor.nbytes])
    return model.stored_bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("container", type=Path)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--gb-s", type=float, help="the rate of the server")
    parser.add_argument("--ways", default="", help="beginnings of their names, with commas")
    chosen = parser.parse_args()
    wanted = tuple(chosen.ways.split(","))
    ways = {name: way for name, way in WAYS.items() if name.startswith(wanted)}
    with store_server.running(chosen.container.parent, chosen.gb_s) as port:
        run(f"http://127.0.0.1:{port}/{chosen.container.name}", chosen.turns, ways)


WAYS: dict[str, Callable[[str], int]] = {
    "obstore": by_obstore,
    "df11": by_df11,
    "df11, loaded": loaded,
    "df11, loaded afterwards": loaded_afterwards,
}


def run(url: str, turns: int, ways: dict[str, Callable[[str], int]]) -> None:
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns):
        for name, way in ways.items():
            start, before = time.perf_counter(), time.process_time()
            size = way(url)
            seconds, cpu = time.perf_counter() - start, time.process_time() - before
            told = {"turn": turn, "way": name, "bytes": size, "seconds": round(seconds, 4)}
            told |= {"cpu_seconds": round(cpu, 4), "gb_s": round(size / seconds / 1e9, 3)}
            print(json.dumps(told), flush=True)
            rates[name].append(size / seconds / 1e9)
    for name, some in rates.items():
        low, high = min(some), max(some)
        print(f"{name:24} {statistics.median(some):6.3f} GB/s ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
