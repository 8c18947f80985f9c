"""Containers in object stores, behind HTTP and on the Hub."""

import hashlib
import importlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import SAMPLE, run, write_shards
from hub import Hub, Repository
from stores import Proxy, send, upload

import df11
from df11 import _hub


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two containers with side files."""
    root = tmp_path_factory.mktemp("store")
    source = root / "model"
    write_shards(source)
    df11.compress(source, root / "out", progress=False)
    return root / "out"


def hashes(model: df11.Model) -> dict[str, str]:
    found = {}
    for name, tensor in model.items():
        content = bytearray(tensor.nbytes)
        tensor.decode_into(content)
        found[name] = hashlib.sha256(content).hexdigest()
    return found


WANTED = {name: hashlib.sha256(content).hexdigest() for name, (_, _, content) in SAMPLE.items()}


def test_a_folder_in_a_bucket(bucket: str, folder: Path) -> None:
    upload(bucket, folder, "a/out")
    model = df11.open("s3://models/a/out")
    assert model.is_complete and model.path == "s3://models/a/out"
    assert hashes(model) == WANTED
    assert df11.verify("s3://models/a/out", progress=False).unchecked == ()
    one = df11.open("s3://models/a/out/model-00001-of-00002.df11")
    assert set(one) == set(list(SAMPLE)[:3]) and not one.is_complete


def test_the_command_reads_a_bucket(bucket: str, folder: Path, tmp_path: Path) -> None:
    upload(bucket, folder, "b")

    def command(*arguments: object) -> str:
        words = [sys.executable, "-m", "df11", *map(str, arguments)]
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    told = json.loads(command("inspect", "--json", "s3://models/b"))
    assert told["source"] == "s3://models/b" and told["complete"]
    assert "every bit is there" in command("verify", "s3://models/b")
    assert "GPU" in command("estimate", "s3://models/b", "--gpus", "1GiB")
    command("decompress", "s3://models/b", "-o", "restored")
    original = folder.parent / "model"
    for file in original.iterdir():
        assert (tmp_path / "restored" / file.name).read_bytes() == file.read_bytes(), file


def test_refused_credentials_are_not_told(
    bucket: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(bucket, folder, "c")
    send("POST", f"{bucket}/moto-api/reset-auth", b"0")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "test-session-value")
    try:
        with pytest.raises(df11.IoError) as caught:
            df11.open("s3://models/c")
    finally:
        send("POST", f"{bucket}/moto-api/reset-auth", b"inf")
    text = str(caught.value)
    assert "s3://models/c" in text and "credentials" in text, text
    secrets = ("test-key", "test-secret-value", "test-session-value")
    assert not any(secret in text for secret in secrets), text


def test_what_is_not_there_is_named(bucket: str) -> None:
    with pytest.raises(df11.ParameterError, match=r"s3://models/nothing holds no \.df11 file"):
        df11.open("s3://models/nothing")
    with pytest.raises(df11.IoError, match=r"s3://models/x\.df11.*check its name"):
        df11.open("s3://models/x.df11")


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """A Hub with a private repository."""
    hub = Hub()
    hub.repositories["org/private"] = Repository(folder, "main", "v1", token="hf_secret-token")
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return hub


def test_a_repository_of_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(df11.IoError, match=r"hf://org/private.*credentials"):
        df11.open("hf://org/private")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong-token")
    with pytest.raises(df11.IoError) as caught:
        df11.open("hf://org/private")
    assert "wrong-token" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret-token")
    for name in ("hf://org/private", "hf://org/private@v1"):
        assert hashes(df11.open(name)) == WANTED
    file = "hf://org/private@v1/model-00002-of-00002.df11"
    assert set(df11.open(file)) == set(list(SAMPLE)[3:])
    asked = {path for path in hub.asked if "/resolve/" in path}
    sha = hub.repositories["org/private"].sha
    assert asked and all(f"/resolve/{sha}/" in path for path in asked)
    with pytest.raises(df11.IoError, match="check its name"):
        df11.open("hf://org/private@v2")


def test_a_token_stays_at_the_hub(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub sends whoever asks for a file to a signed URL of another host."""
    cdn, seen = Hub(), []
    cdn.repositories["org/private"] = Repository(folder)
    answer, serve = hub.answer, cdn.answer

    def send_away(path: str, headers: Any) -> tuple[int, dict[str, str], bytes]:
        status, told, body = answer(path, headers)
        if status < 300 and "/resolve/" in path:
            return 302, {"Location": f"{cdn.url}{path}?Signature=signed"}, b""
        return status, told, body

    def watched(path: str, headers: Any) -> tuple[int, dict[str, str], bytes]:
        seen.append(headers["Authorization"])
        return serve(path, headers)

    monkeypatch.setattr(hub, "answer", send_away)
    monkeypatch.setattr(cdn, "answer", watched)
    monkeypatch.setenv("HF_TOKEN", "hf_secret-token")
    assert hashes(df11.open("hf://org/private")) == WANTED
    assert seen and set(seen) == {None}


def test_a_login_and_offline(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/token").write_text("hf_secret-token\n")
    assert df11.open("hf://org/private").is_complete
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(df11.ParameterError, match="HF_HUB_OFFLINE"):
        df11.open("hf://org/private")


def http(hub: Hub, folder: Path) -> str:
    """The URL of a folder behind HTTP."""
    repository = hub.repositories["org/open"] = Repository(folder)
    return f"{hub.url}/org/open/resolve/{repository.sha}"


class Certified(NamedTuple):
    """A folder served by HTTPS: its URL, and a file with the issuer's certificate."""

    url: str
    issuer: Path


def certified(folder: Path, tmp_path: Path, name: str, **dates: datetime) -> Certified:
    """Serves a folder at `localhost`, with a certificate for `name`."""
    hub, issuer = Hub(), pytest.importorskip("trustme").CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issuer.issue_cert(name, **dates).configure_cert(context)
    hub.server.socket = context.wrap_socket(hub.server.socket, server_side=True)
    tmp_path.mkdir(exist_ok=True)
    issuer.cert_pem.write_to_path(str(tmp_path / "issuer.pem"))
    url = http(hub, folder).replace("http://127.0.0.1", "https://localhost")
    return Certified(url, tmp_path / "issuer.pem")


def trust(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)


def test_https_with_an_issuer_in_a_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = certified(folder, tmp_path, "localhost")
    trust(monkeypatch, served.issuer)
    assert hashes(df11.open(served.url)) == hashes(df11.open(folder))


@pytest.mark.parametrize(
    ("name", "is_trusted", "problem"),
    [
        ("localhost", False, "UnknownIssuer"),
        ("elsewhere.example", True, "elsewhere.example"),
        ("localhost", True, "expired"),
    ],
)
def test_certificates_that_are_refused(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    is_trusted: bool,
    problem: str,
) -> None:
    """At once: another try would not help."""
    past = {"not_after": datetime(2020, 1, 1)} if problem == "expired" else {}
    served = certified(folder, tmp_path, name, **past)
    another = certified(folder, tmp_path / "another", name)
    trust(monkeypatch, (served if is_trusted else another).issuer)
    begun = time.monotonic()
    with pytest.raises(df11.IoError, match=rf"certificate is not accepted \(.*{problem}.*; check"):
        df11.open(served.url)
    assert time.monotonic() - begun < 5


def test_a_server_without_tls_is_told(hub: Hub, folder: Path) -> None:
    with pytest.raises(df11.IoError, match="does not encrypt connections"):
        df11.open(http(hub, folder).replace("http:", "https:"))


def test_safe_open_and_load_file(hub: Hub, folder: Path) -> None:
    torch = pytest.importorskip("torch")
    url = http(hub, folder)
    near = df11.torch.load_file(folder)
    far = df11.torch.load_file(url)
    assert list(near) == list(far)
    for name, value in near.items():
        bytes_of = [each.reshape(-1).view(torch.uint8) for each in (value, far[name])]
        assert torch.equal(*bytes_of), name
    with df11.safe_open(url, "pt") as file:
        rows = file.get_slice("model.layers.0.mlp.weight")[100:300]
    assert torch.equal(rows, near["model.layers.0.mlp.weight"][100:300])


def test_attach_from_a_store(hub: Hub, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")

    def layer() -> "torch.nn.Module":
        return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 64)).bfloat16()

    module = layer()
    (tmp_path / "served").mkdir()
    safetensors.save_file(module.state_dict(), tmp_path / "x.safetensors")
    df11.compress(tmp_path / "x.safetensors", tmp_path / "served/x.df11", progress=False)
    url = f"{http(hub, tmp_path / 'served')}/x.df11"
    attached = df11.attach(layer(), url, device="cpu")
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    assert torch.equal(attached(x), module(x))
    stored = df11.torch.load_compressed(url)
    assert isinstance(stored["0.weight"], df11.torch.CompressedTensor)
    with pytest.raises(df11.ParameterError, match="takes no revision"):
        df11.attach(layer(), url, device="cpu", revision="v1")
    # The container is in memory: it can be saved without the store.
    df11.save(attached, tmp_path / "saved")
    assert hashes(df11.open(tmp_path / "saved")) == hashes(df11.open(url))


def test_tensors_are_used_while_others_come(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads wait for bytes that are not there yet."""
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    from df11._container import Tensors

    random = torch.Generator().manual_seed(1)
    weights = {
        name: (torch.randn(8192, 2560, generator=random) / 50).bfloat16() for name in ("a", "b")
    }
    (tmp_path / "served").mkdir()
    safetensors.save_file(weights, tmp_path / "x.safetensors")
    df11.compress(tmp_path / "x.safetensors", tmp_path / "served/x.df11", progress=False)
    url, answer, goes_on = http(hub, tmp_path / "served"), hub.answer, threading.Event()

    def held(path: str, headers: Any) -> tuple[int, dict[str, str], bytes]:
        first, _, last = headers["Range"].removeprefix("bytes=").partition("-")
        # Long pieces after those that have the first matrix.
        if int(first) > 36 << 20 and int(last) - int(first) > 1 << 20:
            goes_on.wait(60)
        return answer(path, headers)

    monkeypatch.setattr(hub, "answer", held)
    container = df11._native.open(f"{url}/x.df11", in_memory=True)
    tensors = Tensors(container)
    both = [tensors[name] for name in ("a", "b")]
    assert container.is_coming and tensors.names(both[1]) == ["b"]
    assert torch.equal(both[0].decode(), weights["a"])
    found: list[Any] = []
    # A slice and a copy wait as the whole does.
    uses = (lambda: both[1].decode(), lambda: both[1][5:7].decode(), lambda: both[1].clone())
    waiting = [threading.Thread(target=lambda use=use: found.append(use())) for use in uses]
    for thread in waiting:
        thread.start()
    time.sleep(0.5)
    assert not found and container.is_coming
    goes_on.set()
    for thread in waiting:
        thread.join()
    wanted = weights["b"]
    assert all(torch.equal(each, wanted if len(each) > 2 else wanted[5:7]) for each in found)
    assert len(found) == 3 and not container.is_coming


def test_a_save_takes_side_files_from_a_store(hub: Hub, tmp_path: Path) -> None:
    """And containers stay in their subfolders."""
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    source, made = tmp_path / "source", tmp_path / "made"
    (source / "deep").mkdir(parents=True)
    safetensors.save_file(
        torch.nn.Linear(256, 512).bfloat16().state_dict(), source / "deep/model.safetensors"
    )
    (source / "deep/config.json").write_text('{"model_type": "llama"}')
    (source / "notes.txt").write_text("some notes")
    df11.compress(source, made, progress=False)

    def save(name: str, served: Path) -> dict[str, bytes]:
        hub.repositories["org/open"] = Repository(served)
        module = torch.nn.Linear(256, 512).bfloat16()
        df11.save(df11.attach(module, "hf://org/open", device="cpu"), tmp_path / name)
        return files(tmp_path / name)

    assert save("saved", made) == files(made)
    assert not df11.verify(tmp_path / "saved", progress=False).unchecked
    changed = shutil.copytree(made, tmp_path / "changed")
    (changed / "notes.txt").write_text("other")
    with pytest.warns(UserWarning, match=r"notes\.txt in hf://org/open was changed"):
        assert save("again", changed) == files(changed)


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def test_a_signed_url_opens_it_again(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    module, answer = torch.nn.Linear(256, 512).bfloat16(), hub.answer
    safetensors.save_file(module.state_dict(), tmp_path / "x.safetensors")
    df11.compress(tmp_path / "x.safetensors", tmp_path / "served/x.df11", progress=False)
    url = f"{http(hub, tmp_path / 'served')}/x.df11"

    def guarded(path: str, headers: Any) -> tuple[int, dict[str, str], bytes]:
        is_known = headers["Query"] == "Signature=do-not-show"
        return answer(path, headers) if is_known else (403, {}, b"")

    monkeypatch.setattr(hub, "answer", guarded)
    with pytest.raises(df11.IoError, match="credentials"):
        df11.open(url)
    attached = df11.attach(module, f"{url}?Signature=do-not-show", device="cpu")
    [(_, origin)] = importlib.import_module("df11._origin").origins(attached)
    origin.close()
    assert origin.container["weight"].shape == (512, 256)
    assert "do-not-show" not in f"{origin} {origin.container} {df11.report(attached)}"


def test_names_are_far_in_any_case_and_tell_no_password() -> None:
    url = "HTTPS://user:pa/ss@host/m?X-Amz-Signature=sig"
    with pytest.raises(df11.ParameterError, match=r"^HTTPS://host/m takes no revision"):
        _hub.resolve_path(url, "v1", None)
    with pytest.raises(df11.ParameterError, match=r"^hf://org/name@v1 takes no revision"):
        _hub.resolve_path("hf://org/name@v1", None, "unet")


class Stall:
    """Makes a server silent after some requests for files, until `ends` is set."""

    def __init__(self, hub: Hub, requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.ends = threading.Event(), threading.Event()
        self.left, self.answer = requests, hub.answer
        monkeypatch.setattr(hub, "answer", self)

    def __call__(self, path: str, headers: Any) -> tuple[int, dict[str, str], bytes]:
        self.left -= 1
        if self.left < 0 and not self.ends.is_set():
            self.begun.set()
            self.ends.wait(60)
        return self.answer(path, headers)


#: Requests that open the two containers of `folder` behind HTTP: the index, and two for each.
OPENING = 5


#: Seconds within which a signal ends a wait, also on a busy machine; the server is silent for more.
AT_ONCE = 20


@contextmanager
def interrupted(
    stall: Stall, command: list[str], how: int, place: Path
) -> Iterator[subprocess.Popen[str]]:
    """Starts a run in a folder, and sends it a signal when the server has become silent."""
    own = {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(place)}
    run = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=place,
        env=os.environ | own,
    )
    with run:
        try:
            assert stall.begun.wait(60)
            time.sleep(0.2)
            run.send_signal(how)
            yield run
        finally:
            run.kill()


@pytest.mark.parametrize(
    ("requests", "options"),
    [(0, {}), (2, {}), (OPENING, {}), (OPENING, {"in_memory": True})],
    ids=["index", "directory", "tensor", "whole"],
)
def test_ctrl_c_ends_a_wait(
    hub: Hub,
    folder: Path,
    tmp_path: Path,
    requests: int,
    options: dict[str, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once, and the same process can read afterwards."""
    script = f"""
import signal, sys
from df11 import _native

# A shell that runs tests in the background makes them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)

def read():
    for tensor in _native.open(sys.argv[1], **{options}).tensors.values():
        tensor.decode_into(bytearray(tensor.nbytes))

try:
    read()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    input()
    read()
    print("read")
"""
    url = http(hub, folder)
    stall = Stall(hub, requests, monkeypatch)
    with interrupted(stall, ["-c", script, url], signal.SIGINT, tmp_path) as run:
        begin = time.monotonic()
        assert run.stdout is not None and run.stdout.readline() == "interrupted\n"
        assert time.monotonic() - begin < AT_ONCE
        stall.ends.set()
        out, err = run.communicate("\n", timeout=60)
    assert (out, run.returncode) == ("read\n", 0), err


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("requests", [0, OPENING, OPENING + 1])
def test_signals_end_the_command(
    hub: Hub,
    folder: Path,
    tmp_path: Path,
    how: int,
    requests: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = http(hub, folder)
    stall = Stall(hub, requests, monkeypatch)
    words = ["-m", "df11", "decompress", url, "-o", "restored"]
    with interrupted(stall, words, how, tmp_path) as run:
        begin = time.monotonic()
        _, err = run.communicate(timeout=60)
        assert time.monotonic() - begin < AT_ONCE
        stall.ends.set()
    assert (run.returncode, list(tmp_path.iterdir())) == (128 + how, []), err
    assert "interrupted; nothing is left half-written" in err


def test_a_fork_opens_its_own(hub: Hub, folder: Path) -> None:
    """A container that was opened before a fork says so after it, and can be opened again."""
    script = """
        import os, sys, df11
        url = sys.argv[1]
        def read(model):
            tensor = model["model.layers.0.mlp.weight"]
            tensor.decode_into(bytearray(tensor.nbytes))
        model = df11.open(url)
        if child := os.fork():
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        try:
            read(model)
            os._exit(1)
        except df11.IoError as error:
            assert "forked" in str(error)
        read(df11.open(url))
        os._exit(0)
    """
    run(script, http(hub, folder))


def test_a_cache_spares_requests(
    bucket: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the argument, the variable and the option; another name of the same model finds it too."""
    name, place = "s3://models/cached/a", tmp_path / "cache"
    upload(bucket, folder, "cached/a")
    assert hashes(df11.open(name, cache=place)) == WANTED
    chunks = list(place.rglob("*.chunk"))
    others = [path for path in place.rglob("*") if path.is_file() and path not in chunks]
    assert chunks and {(path.suffix, path.stat().st_size) for path in others} == {(".lock", 0)}
    proxy = Proxy(bucket)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)

    def count(*arguments: str, **environment: str) -> int:
        before = proxy.count
        script = "import df11, sys; df11.torch.load_file(sys.argv[1])"
        words = arguments or ("-c", script, name)
        own = {"PYTHONPATH": os.pathsep.join(sys.path), **environment}
        subprocess.run([sys.executable, *words], env=os.environ | own, cwd=tmp_path, check=True)
        return proxy.count - before

    # A listing, and two requests for each of two containers.
    assert hashes(df11.open(name, cache=place)) == WANTED and proxy.count == OPENING
    assert count() > OPENING and count(DF11_CACHE=str(place)) == OPENING
    other = tmp_path / "other"
    words = ("-m", "df11", "decompress", name, "--cache", str(other))
    first = count(*words, "-o", "one")
    assert count(*words, "-o", "two") < first
    assert files(tmp_path / "one") == files(tmp_path / "two")
    chunks[0].write_bytes(b"damaged")
    assert hashes(df11.open(name, cache=place)) == WANTED
    with pytest.raises(df11.ParameterError, match="DF11_CACHE_BYTES"):
        monkeypatch.setenv("DF11_CACHE", str(place))
        monkeypatch.setenv("DF11_CACHE_BYTES", "much")
        df11.open(name)
