"""A server of a folder for benchmarks, by HTTP and as the bucket `models` of S3, at most as fast as
it is told.

    python benches/store_server.py FOLDER [--gb-s 2]

Prints its port. It answers ranges of objects and lists them (ListObjectsV2), asks for no
credentials, and sends from the page cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "models"
#: Bytes that are sent at once.
PART = 4 << 20
DATE = "Fri, 27 Nov 2026 00:00:00 GMT"


class Rate:
    """Bytes per second of all connections together."""

    def __init__(self, gb_s: float | None) -> None:
        self._each = 0.0 if gb_s is None else 1e-9 / gb_s
        self._lock, self._next = threading.Lock(), 0.0

    def wait(self, count: int) -> None:
        """Waits until this many more bytes may be sent."""
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._next)
            self._next = begin + count * self._each
        time.sleep(begin - now)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    #: Or else a small body waits 40 ms for the client to acknowledge its headers.
    disable_nagle_algorithm = True
    root: Path
    rate: Rate

    def do_HEAD(self) -> None:
        self._object(is_head=True)

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if "list-type" in asked.query:
            self._list(parse_qs(asked.query).get("prefix", [""])[0])
        else:
            self._object(is_head=False)

    def _object(self, is_head: bool) -> None:
        key = unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/").lstrip("/")
        path = self.root / key
        if ".." in Path(key).parts or not path.is_file():
            return self._answer(404, 0, {})
        size = path.stat().st_size
        begin, end, headers = 0, size, {"Content-Type": "binary/octet-stream"}
        if asked := self.headers["Range"]:
            first, last = asked.removeprefix("bytes=").split("-")
            begin, end = int(first), min(int(last or size - 1) + 1, size)
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        self._answer(206 if asked else 200, end - begin, headers)
        if is_head:
            return None
        self.wfile.flush()
        with path.open("rb") as file:
            while begin < end:
                count = min(PART, end - begin)
                self.rate.wait(count)
                begin += os.sendfile(self.connection.fileno(), file.fileno(), begin, count)
        return None

    def _list(self, prefix: str) -> None:
        found = [each for each in sorted(self.root.rglob("*")) if each.is_file()]
        names = {each.relative_to(self.root).as_posix(): each.stat().st_size for each in found}
        told = [(name, size) for name, size in names.items() if name.startswith(prefix)]
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size><ETag>&quot;x&quot;</ETag>"
            "<LastModified>2026-11-27T00:00:00.000Z</LastModified></Contents>"
            for name, size in told
        )
        text = (
            '<?xml version="1.0" encoding="UTF-8"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><MaxKeys>1000</MaxKeys>"
            f"<KeyCount>{len(told)}</KeyCount><IsTruncated>false</IsTruncated>{entries}"
            "</ListBucketResult>"
        ).encode()
        self._answer(200, len(text), {"Content-Type": "application/xml"})
        self.wfile.write(text)

    def _answer(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        common = {"Content-Length": str(length), "ETag": '"x"', "Last-Modified": DATE}
        for name, value in (common | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 256


@contextmanager
def running(folder: Path, gb_s: float | None = None) -> Iterator[int]:
    """The port of a server in a process of its own."""
    limit = [] if gb_s is None else ["--gb-s", str(gb_s)]
    command = [sys.executable, __file__, str(folder), *limit]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.kill()


def environment(port: int) -> dict[str, str]:
    """Variables by which clients of S3 find a server on this machine."""
    credentials = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "none")
    store = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_REGION": "us-east-1"}
    # Names of Run:ai's streamer, for servers that are not Amazon's.
    streamer = {
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    return credentials | store | streamer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb-s", type=float, help="10⁹ bytes per second, of all connections")
    chosen = parser.parse_args()
    Handler.root, Handler.rate = chosen.folder.resolve(), Rate(chosen.gb_s)
    with Server(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
