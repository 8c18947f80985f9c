"""Throughput from a server on the loopback to host memory: df11 beside obstore, in turns.

    python benches/store.py CONTAINER.df11 [--turns 7]

Needs the Python package and obstore. Both fetch the same file with ranges of 16 MiB, at most 32 at
once; df11 also parses the directory and, as `check`, compares all checksums. Prints one JSON line a
turn. The server is a process of its own and sends from the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RANGE = 16 << 20
REQUESTS = 32


def serve(path: Path, sock: socket.socket) -> None:
    file, size = path.open("rb"), path.stat().st_size

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(200, 0, size, [])

        def do_GET(self) -> None:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            begin, end = int(first), min(int(last) + 1, size)
            told = [("Content-Range", f"bytes {begin}-{end - 1}/{size}")]
            self.answer(206, begin, end, told)
            self.wfile.flush()
            while begin < end:
                begin += os.sendfile(self.connection.fileno(), file.fileno(), begin, end - begin)

        def answer(self, status: int, begin: int, end: int, told: list[tuple[str, str]]) -> None:
            self.send_response(status)
            date = "Fri, 27 Nov 2026 00:00:00 GMT"
            both = [("Content-Length", str(end - begin)), ("ETag", '"x"'), ("Last-Modified", date)]
            for name, value in both + told:
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket = sock
    server.serve_forever()


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
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve is not None:
        serve(chosen.container, socket.socket(fileno=chosen.serve))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(64)
        command = [sys.executable, __file__, str(chosen.container), "--serve", str(sock.fileno())]
        server = subprocess.Popen(command, pass_fds=[sock.fileno()])
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/x.df11"
        try:
            run(url, chosen.turns)
        finally:
            server.kill()


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
