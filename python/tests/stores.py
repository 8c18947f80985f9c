"""Servers of S3 on the loopback."""

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hub import Hub, content_of

#: Credentials of the server of the tests.
S3 = {
    "AWS_ACCESS_KEY_ID": "test-key",
    "AWS_SECRET_ACCESS_KEY": "test-secret-value",
    "AWS_REGION": "us-east-1",
}


def send(method: str, url: str, body: bytes = b"") -> None:
    headers = {"Content-Type": "application/octet-stream"}
    request = urllib.request.Request(url, body, headers, method=method)
    urllib.request.urlopen(request, timeout=60).close()


def put(url: str, body: bytes = b"") -> None:
    send("PUT", url, body)


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of a server of S3 with one bucket, `models`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    silent = subprocess.DEVNULL
    server = subprocess.Popen(command, stdout=silent, stderr=silent)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                put(f"{url}/models")
                break
            except OSError:
                time.sleep(0.2)
        else:
            raise AssertionError("moto did not start")
        yield url
    finally:
        server.terminate()
        server.wait()


def upload(url: str, folder: Path, prefix: str) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            put(f"{url}/models/{prefix}/{file.relative_to(folder)}", file.read_bytes())


class Bucket(Hub):
    """A server of S3 for environments without moto: one bucket that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, Path] = {}

    def add(self, folder: Path, prefix: str) -> None:
        files = (file for file in folder.rglob("*") if file.is_file())
        self.files |= {f"{prefix}/{file.relative_to(folder)}": file for file in files}

    def answer(self, path: str, headers: Any) -> tuple[int, dict[str, str], bytes]:
        _, _, key = path.strip("/").partition("/")
        if key:
            told = {"Last-Modified": "Fri, 27 Nov 2026 00:00:00 GMT"}
            file = self.files.get(key)
            return content_of(file, headers["Range"], told) if file else (404, {}, b"")
        date = "2026-11-27T00:00:00.000Z"
        found = "".join(
            f"<Contents><Key>{key}</Key><Size>{file.stat().st_size}</Size>"
            f"<LastModified>{date}</LastModified></Contents>"
            for key, file in self.files.items()
        )
        return 200, {}, f"<ListBucketResult>{found}</ListBucketResult>".encode()
