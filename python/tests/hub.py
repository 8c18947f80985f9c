"""A small Hugging Face Hub: what huggingface_hub asks for when it downloads, from folders on this
machine.
"""

import hashlib
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class Repository:
    """A folder at one commit, which branches name; with a token if it is private."""

    def __init__(self, folder: Path, *branches: str, token: str | None = None) -> None:
        self.files = {
            str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()
        }
        self.branches = branches or ("main",)
        self.token = token
        self.sha = hashlib.sha1(str(folder).encode()).hexdigest()


class Hub:
    """Serves repositories by name at `url`, and keeps what was asked for."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                self.headers["Query"] = urlsplit(self.path).query
                status, headers, body = hub.answer(unquote(urlsplit(self.path).path), self.headers)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    hub.asked.append(unquote(urlsplit(self.path).path))
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str, headers: Any) -> tuple[int, dict[str, str], bytes]:
        api, _, rest = path.strip("/").rpartition("api/models/")
        parts = rest.split("/")
        repository = self.repositories.get("/".join(parts[:2]))
        token = (headers["Authorization"] or "").removeprefix("Bearer ")
        if repository is None or repository.token not in (None, token):
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        # A repository alone is asked for what its default branch is.
        kind, revision = parts[2:4] if len(parts) > 2 else ("revision", "main")
        name = "/".join(parts[4:])
        if revision not in (repository.sha, *repository.branches):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if kind == "resolve":
            told = {"X-Repo-Commit": repository.sha}
            if name not in repository.files:
                return 404, {**told, "X-Error-Code": "EntryNotFound"}, b""
            return content_of(repository.files[name], headers["Range"], told)
        assert api == "" and kind in ("revision", "tree"), path
        files = [
            {"type": "file", "path": name, "size": file.stat().st_size, "oid": _etag(file)}
            for name, file in repository.files.items()
        ]
        if kind == "tree":
            found = [file for file in files if not name or str(file["path"]).startswith(name + "/")]
            missing = 404, {"X-Error-Code": "EntryNotFound"}, b""
            return (200, {}, json.dumps(found).encode()) if found else missing
        siblings = [{"rfilename": file["path"]} for file in files]
        told = {"id": "/".join(parts[:2]), "sha": repository.sha, "siblings": siblings}
        return 200, {}, json.dumps(told).encode()

    def downloaded(self) -> set[str]:
        """Files that were got, as `org/name/path`, since the last time."""
        got = [path.strip("/").split("/") for path in self.asked if not path.startswith("/api/")]
        self.asked.clear()
        return {"/".join(parts[:2] + parts[4:]) for parts in got if parts[2] == "resolve"}


def content_of(
    file: Path, asked: str | None, told: dict[str, str]
) -> tuple[int, dict[str, str], bytes]:
    """All of a file, or the range that a header asks for."""
    body, told = file.read_bytes(), {**told, "ETag": f'"{_etag(file)}"'}
    if asked is None:
        return 200, told, body
    first, last = asked.removeprefix("bytes=").split("-")
    begin, end = int(first), min(int(last) + 1, len(body))
    return 206, {**told, "Content-Range": f"bytes {begin}-{end - 1}/{len(body)}"}, body[begin:end]


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


def fill_cache(place: Path, folder: Path, commit: str = "0123") -> None:
    """The layout of huggingface_hub: blobs, links to them, and a branch that names a commit."""
    for name in ("blobs", "refs", f"snapshots/{commit}"):
        (place / name).mkdir(parents=True)
    (place / "refs/main").write_text(commit)
    for file in folder.iterdir():
        shutil.copyfile(file, place / "blobs" / file.name)
        (place / "snapshots" / commit / file.name).symlink_to(f"../../blobs/{file.name}")
