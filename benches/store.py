"""Throughput from a server on the loopback to host memory: df11 beside obstore, in turns.

    python benches/store.py CONTAINER.df11 [--turns 7]

Needs the Python package and obstore. Both fetch the same file with ranges of 16 MiB, at most 32 at
once; df11 also parses the directory and, as `check`, compares all checksums. Prints one JSON line a
turn. The server is a process of its own and sends from the page cache.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


def by_df11(url: str) -> int:
    from df11 import _native

    return _native.open(url, in_memory=True).stored_bytes


def by_df11_checked(url: str) -> int:
    from df11 import _native

    model = _native.open(url, in_memory=True)
    model.verify("checksums", progress=False)
    return model.stored_bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("container", type=Path)
    parser.add_argument("--turns", type=int, default=7)
    chosen = parser.parse_args()
    with store_server.running(chosen.container.parent) as port:
        run(f"http://127.0.0.1:{port}/{chosen.container.name}", chosen.turns)


def run(url: str, turns: int) -> None:
    ways: dict[str, Callable[[str], int]] = {
        "obstore": by_obstore,
        "df11": by_df11,
        "df11 and checksums": by_df11_checked,
    }
    for turn in range(turns):
        for name, way in ways.items():
            start, before = time.perf_counter(), time.process_time()
            size = way(url)
            seconds, cpu = time.perf_counter() - start, time.process_time() - before
            told = {"turn": turn, "way": name, "bytes": size, "seconds": round(seconds, 4)}
            told |= {"cpu_seconds": round(cpu, 4), "gb_s": round(size / seconds / 1e9, 3)}
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
