"""Servers of S3 on the loopback."""

import http.client
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hub import Hub, content_of

#: Credentials of the server of the tests.
S3 = {
    "AWS_ACCESS_KEY_ID": "test-key",
    "AWS_SECRET_ACCESS_KEY": "test-secret-value",
    "AWS_REGION": "us-east-1",
}


#: A fault of `Proxy`: the request is passed on, and its answer is lost.
LOST = -1


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


def as_amazon(headers: dict[str, str]) -> dict[str, str]:
    """Headers of a request to Google's store as Amazon's, whose server moto is."""
    if not headers.get("authorization", "").startswith("AWS4"):
        scope = f"{S3['AWS_ACCESS_KEY_ID']}/20261127/{S3['AWS_REGION']}/s3/aws4_request"
        signed = "SignedHeaders=host, Signature=0"
        headers["authorization"] = f"AWS4-HMAC-SHA256 Credential={scope}, {signed}"
    if headers.pop("x-goog-if-generation-match", None) == "0":
        headers["If-None-Match"] = "*"
    return headers


class Proxy:
    """Passes requests on to a server, with faults."""

    def __init__(self, to: str) -> None:
        self.to = to
        #: Method, path with query, and number of a request: the status of a refusal, 0 for a
        #: connection that ends without an answer, LOST if the server had the request, or None.
        self.choose: Callable[[str, str, int], int | None] = lambda *_: None
        #: Whether a request waits until `goes_on` is set.
        self.stall: Callable[[str], bool] = lambda _: False
        self.stalled, self.goes_on = threading.Event(), threading.Event()
        self.count = 0
        host = to.removeprefix("http://")
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
                proxy.count += 1
                fault = proxy.choose(self.command, self.path, proxy.count)
                if proxy.stall(self.path):
                    proxy.stalled.set()
                    proxy.goes_on.wait(60)
                    fault = 0
                if fault == 0:
                    self.close_connection = True
                    return
                if fault not in (None, LOST):
                    self.send_response(fault)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                there = http.client.HTTPConnection(host, timeout=60)
                given = as_amazon(dict(self.headers))
                there.request(self.command, self.path, body, given)
                found = there.getresponse()
                content = found.read()
                if fault == LOST:
                    self.close_connection = True
                    return
                self.send_response(found.status)
                for name, value in found.headers.items():
                    if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                        self.send_header(name, value)
                if "Content-Length" not in found.headers:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                there.close()

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
