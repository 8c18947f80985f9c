"""Models that are compressed from stores, and outputs that go into one."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import SAMPLE, write_safetensors, write_shards
from hub import Hub, Repository, fill_cache
from stores import LOST, Proxy, put, send, upload

import df11


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two files of weights with an index, and what is no part of the model."""
    folder = tmp_path_factory.mktemp("write") / "model"
    write_shards(folder)
    (folder / "empty.txt").touch()
    (folder / "pytorch_model.bin").write_bytes(b"another format")
    (folder / ".gitattributes").write_text("hidden")
    return folder


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose container has several parts."""
    content = random.Random(1).randbytes(36 << 20)
    path = tmp_path_factory.mktemp("big") / "big.safetensors"
    return write_safetensors(path, {"w": ("BF16", (len(content) // 2,), content)})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, which are gone when a call has ended."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    return place


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def command(*arguments: object, cwd: Path, code: int = 0) -> str:
    words = [sys.executable, "-m", "df11", *map(str, arguments)]
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=own, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def objects(prefix: str) -> dict[str, bytes]:
    """The objects of the bucket below a prefix."""
    import boto3

    client: Any = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    found = client.list_objects_v2(Bucket="models", Prefix=prefix).get("Contents", [])
    keys = [each["Key"] for each in found]
    read = {key: client.get_object(Bucket="models", Key=key)["Body"].read() for key in keys}
    return {key.removeprefix(prefix).strip("/"): content for key, content in read.items()}


def unfinished() -> list[Any]:
    """The uploads that nobody has ended."""
    import boto3

    client: Any = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    found: list[Any] = client.list_multipart_uploads(Bucket="models").get("Uploads", [])
    return found


def test_a_bucket_is_compressed_as_its_files_are(
    bucket: str, model: Path, tmp_path: Path, place: Path
) -> None:
    upload(bucket, model, "source/bf16")
    df11.compress(model, tmp_path / "near", progress=False)
    df11.compress("s3://models/source/bf16", tmp_path / "far", progress=False)
    assert files(tmp_path / "far") == files(tmp_path / "near")
    found = df11.estimate("s3://models/source/bf16", tmp_path / "far", progress=False)
    assert found == df11.estimate(model, tmp_path / "far", progress=False)
    assert {path for path, _ in found.left_out} == {"pytorch_model.bin", ".gitattributes"}
    command("compress", "s3://models/source/bf16/", "--no-card", cwd=tmp_path)
    assert files(tmp_path / "bf16-df11") == files(tmp_path / "near")
    name = "model-00002-of-00002"
    command("compress", f"s3://models/source/bf16/{name}.safetensors", cwd=tmp_path)
    assert set(df11.open(tmp_path / f"{name}.df11")) == set(list(SAMPLE)[3:])
    told = command("estimate", "s3://models/source/bf16", "--exponent-bits", "2.6", cwd=tmp_path)
    assert "nothing written" in told
    command("compress", "s3://models/source/bf16", "--all-files", cwd=tmp_path)
    df11.decompress(tmp_path / "bf16.df11", tmp_path / "back", progress=False)
    hidden = {".gitattributes"}
    assert files(tmp_path / "back").keys() == files(model).keys() - hidden
    assert list(place.iterdir()) == []


def test_fetching_and_uploading_show_progress(bucket: str, big: Path, tmp_path: Path) -> None:
    put(f"{bucket}/models/shown/big.safetensors", big.read_bytes())
    seen: dict[str, set[int]] = {}

    def show(stage: str, done: int, total: int) -> None:
        assert done <= total
        seen.setdefault(stage, set()).add(total)

    name = "s3://models/shown/big.df11"
    df11.compress("s3://models/shown/big.safetensors", name, progress=show)
    assert seen["fetch"] == {big.stat().st_size}
    assert seen["upload"] == {len(objects("shown/big.df11")[""])}


def test_what_is_no_source_is_named(
    bucket: str, model: Path, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    df11.compress(model, tmp_path / "near", progress=False)
    upload(bucket, tmp_path / "near", "no/compressed")
    for name in ("s3://models/no/compressed", "s3://models/no/compressed/x.df11"):
        with pytest.raises(df11.ParameterError, match=rf"{name} is already compressed"):
            df11.compress(name, tmp_path / "out", progress=False)
    with pytest.raises(df11.ParameterError, match="s3://models/no/thing holds no safetensors"):
        df11.estimate("s3://models/no/thing", progress=False)
    put(f"{bucket}/models/no/bad/x.safetensors", b"\xff" * 100)
    with pytest.raises(df11.CorruptError, match=r"x\.safetensors"):
        df11.compress("s3://models/no/bad", tmp_path / "out", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["near", "tmp"]
    assert list(place.iterdir()) == []


def test_the_cache_of_the_hub_comes_first(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub()
    hub.repositories["org/bf16"] = Repository(model)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))

    def compressed(out: str) -> dict[str, bytes]:
        df11.compress("hf://org/bf16", tmp_path / out, progress=False)
        return files(tmp_path / out)

    df11.compress(model, tmp_path / "near", progress=False)
    near = files(tmp_path / "near")
    assert compressed("asked") == near and hub.downloaded()
    fill_cache(tmp_path / "hub/models--org--bf16", model)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert compressed("cached") == near and hub.asked == []
    told = command("compress", "hf://org/bf16", "-o", "told", cwd=tmp_path)
    assert "told" in told and "org/bf16" in (tmp_path / "told/README.md").read_text()
    snapshot = tmp_path / "hub/models--org--bf16/snapshots/0123"
    # One of two shards is missing; then the index is, too, and the other looks like a model.
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (snapshot / name).unlink()
        with pytest.raises(df11.ParameterError, match="HF_HUB_OFFLINE"):
            compressed("partial")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert compressed("again") == near and hub.downloaded()


def test_an_output_in_a_bucket(bucket: str, model: Path, tmp_path: Path, place: Path) -> None:
    df11.compress(model, tmp_path / "near", progress=False)
    near = files(tmp_path / "near")
    name = "s3://models/out/model-df11"
    df11.compress(model, name, progress=False)
    assert objects("out/model-df11") == near
    with pytest.raises(df11.ParameterError, match=rf"{name}.*exists"):
        df11.compress(model, name, progress=False)
    # Nothing is replaced, by anybody.
    one = tmp_path / "one"
    one.mkdir()
    write_safetensors(one / "other.safetensors", SAMPLE)
    text = command("compress", one, "-o", "s3://models/out", "--force", cwd=tmp_path, code=2)
    assert "s3://models/out exists, and nothing in a store is replaced" in text
    with pytest.raises(df11.ParameterError, match="nothing in a store is replaced"):
        df11.compress(one, name, overwrite=True, progress=False)
    assert objects("out/model-df11") == near
    text = command("compress", one, "-o", "s3://models/out/one", "--no-card", cwd=tmp_path)
    assert "s3://models/out/one" in text and 'df11.open("s3://models/out/one")' in text
    assert objects("out/one").keys() == {"other.df11"}
    put(f"{bucket}/models/mine/notes.txt", b"mine")
    text = command("compress", one, "-o", "s3://models/mine", "--force", cwd=tmp_path, code=2)
    assert "s3://models/mine exists" in text and objects("mine") == {"notes.txt": b"mine"}
    df11.convert(name, "s3://models/out/all.df11", layout="gap", progress=False)
    assert df11.verify("s3://models/out/all.df11", progress=False).unchecked == ()
    with pytest.raises(df11.ParameterError, match="exists"):
        df11.convert(name, "s3://models/out/all.df11", progress=False)
    with pytest.raises(df11.ParameterError, match="nothing in a store is replaced"):
        df11.convert(name, "s3://models/out/all.df11", overwrite=True, progress=False)
    assert list(place.iterdir()) == []


def test_outputs_that_are_refused(tmp_path: Path, model: Path) -> None:
    for name, remedy in {
        "https://me:secret@host/model": "tool of the server",
        "hf://org/name": "hf upload",
        "s3://models/x.safetensors": "end its name in .df11",
    }.items():
        with pytest.raises(df11.ParameterError, match=remedy) as caught:
            df11.compress(model, name, progress=False)
        assert "secret" not in str(caught.value)
    df11.compress(model, tmp_path / "near", progress=False)
    with pytest.raises(df11.ParameterError, match="s3://models/x is not on this machine"):
        df11.decompress(tmp_path / "near", "s3://models/x", progress=False)
    assert not list(Path().glob("s3:*"))


Choose = Callable[[str, str, int], int | None]


@pytest.fixture
def proxied(bucket: str, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    proxy = Proxy(bucket)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    return proxy


def test_faults_that_pass_are_repaired(proxied: Proxy, big: Path, tmp_path: Path) -> None:
    """Each request is refused, or its connection cut, the first time."""
    seen: set[str] = set()

    def choose(method: str, path: str, number: int) -> int | None:
        if path in seen:
            return None
        seen.add(path)
        return 503 if number % 2 else 0

    proxied.choose = choose
    df11.compress(big, "s3://models/faults/big.df11", progress=False)
    assert sum("partNumber=" in path for path in seen) >= 2, seen
    df11.compress(big, tmp_path / "near.df11", progress=False)
    proxied.choose = lambda *_: None
    assert objects("faults/big.df11") == {"": (tmp_path / "near.df11").read_bytes()}
    assert unfinished() == []


@pytest.mark.parametrize("kind", ["partNumber=2", "uploadId", "?uploads", "config.json"])
def test_a_fault_that_lasts_leaves_nothing(
    proxied: Proxy, model: Path, big: Path, place: Path, kind: str
) -> None:
    def choose(method: str, path: str, number: int) -> int | None:
        is_it = kind in path and method in ("PUT", "POST")
        return 403 if is_it and not (kind == "uploadId" and "partNumber" in path) else None

    proxied.choose = choose
    source, name = (model, "lasts/m") if "config" in kind else (big, "lasts/big.df11")
    with pytest.raises(df11.IoError, match=rf"s3://models/{name}.*credentials"):
        df11.compress(source, f"s3://models/{name}", progress=False)
    proxied.choose = lambda *_: None
    assert (objects("lasts"), unfinished(), list(place.iterdir())) == ({}, [], [])


def test_somebody_else_is_faster(proxied: Proxy, bucket: str, model: Path) -> None:
    """Files that were put there meanwhile stay, and nothing of ours."""
    done = []

    def choose(method: str, path: str, number: int) -> int | None:
        if method == "PUT" and path.endswith("config.json") and not done:
            done.append(put(f"{bucket}/models/race/m/config.json", b"theirs"))
        return None

    proxied.choose = choose
    with pytest.raises(df11.ParameterError, match=r"s3://models/race/m/config\.json.*exists"):
        df11.compress(model, "s3://models/race/m", progress=False)
    assert objects("race") == {"m/config.json": b"theirs"}


def test_an_answer_that_is_lost(proxied: Proxy, model: Path, tmp_path: Path) -> None:
    """The next try meets the object that the first one put."""
    lost: list[str] = []

    def choose(method: str, path: str, number: int) -> int | None:
        if method != "PUT" or path in lost:
            return None
        lost.append(path)
        return LOST

    proxied.choose = choose
    df11.compress(model, tmp_path / "near", progress=False)
    df11.compress(model, "s3://models/lost/m", progress=False)
    assert objects("lost/m") == files(tmp_path / "near") and len(lost) == len(objects("lost/m"))


@pytest.mark.parametrize("kind", ["partNumber=", "uploadId", "config.json"])
@pytest.mark.parametrize("always", [False, True])
def test_answers_of_uploads_are_lost(
    proxied: Proxy, model: Path, big: Path, tmp_path: Path, kind: str, always: bool
) -> None:
    """The server has each request, and its answer is lost once, or always."""
    if always and kind == "partNumber=":
        pytest.skip("nobody can know the name of a part")
    lost: list[str] = []

    def choose(method: str, path: str, number: int) -> int | None:
        is_it = kind in path and method in ("PUT", "POST")
        if not is_it or (kind == "uploadId" and "partNumber" in path):
            return None
        if path in lost and not always:
            return None
        lost.append(path)
        return LOST

    source, name = (model, "m") if kind == "config.json" else (big, "big.df11")
    name = f"lost-{len(kind)}-{always}/{name}"
    near = tmp_path / Path(name).name
    df11.compress(source, near, progress=False)
    proxied.choose = choose
    df11.compress(source, f"s3://models/{name}", progress=False)
    proxied.choose = lambda *_: None
    wanted = files(near) if near.is_dir() else {"": near.read_bytes()}
    assert objects(name) == wanted and unfinished() == []
    # A part for each request for one, and all tries of the other requests.
    assert len(lost) == (6 if always else len(set(lost))) and lost


def test_an_object_of_others_is_no_success(
    proxied: Proxy, bucket: str, big: Path, tmp_path: Path
) -> None:
    """An upload that ends without an answer is not taken for the object of somebody else."""
    df11.compress(big, tmp_path / "near.df11", progress=False)
    theirs = bytes((tmp_path / "near.df11").stat().st_size)

    def choose(method: str, path: str, number: int) -> int | None:
        if method == "POST" and "uploadId" in path:
            put(f"{bucket}/models/theirs/big.df11", theirs)
            return 0
        return None

    proxied.choose = choose
    with pytest.raises(df11.IoError, match=r"s3://models/theirs/big\.df11.*try again"):
        df11.compress(big, "s3://models/theirs/big.df11", progress=False)
    proxied.choose = lambda *_: None
    assert objects("theirs/big.df11") == {"": theirs} and unfinished() == []


def test_a_store_of_google(
    proxied: Proxy, model: Path, big: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own client; the server is that of S3, whose requests are nearly the same."""
    key = {"gcs_base_url": proxied.url, "disable_oauth": True}
    key |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
    df11.compress(model, tmp_path / "near", progress=False)
    df11.compress(model, "gs://models/google/m", progress=False)
    assert objects("google/m") == files(tmp_path / "near")
    with pytest.raises(df11.ParameterError, match=r"gs://models/google/m.*exists"):
        df11.compress(model, "gs://models/google/m", progress=False)
    assert df11.verify("gs://models/google/m", progress=False).unchecked == ()
    df11.decompress("gs://models/google/m", tmp_path / "back", progress=False)
    left_out = {"pytorch_model.bin", ".gitattributes"}
    wanted = {name: content for name, content in files(model).items() if name not in left_out}
    assert files(tmp_path / "back") == wanted
    proxied.choose = lambda method, path, _: 403 if "partNumber=2" in path else None
    with pytest.raises(df11.IoError, match=r"gs://models/google/big\.df11.*credentials"):
        df11.compress(big, "gs://models/google/big.df11", progress=False)
    assert objects("google/big.df11") == {} and unfinished() == []
    proxied.choose = lambda *_: None
    df11.compress(big, "gs://models/google/big.df11", progress=False)
    df11.compress(big, tmp_path / "near.df11", progress=False)
    assert objects("google/big.df11") == {"": (tmp_path / "near.df11").read_bytes()}


def test_an_equal_object_of_another_run_is_not_taken(
    proxied: Proxy, bucket: str, model: Path, tmp_path: Path
) -> None:
    """It was put while the first try failed, and it stays."""
    df11.compress(model, tmp_path / "near", progress=False)
    theirs: dict[str, bytes] = {}

    def choose(method: str, path: str, number: int) -> int | None:
        if method != "PUT" or theirs:
            return None
        name = path.rsplit("/")[-1].rpartition("%2F")[2]
        theirs[name] = (tmp_path / "near" / name).read_bytes()
        put(f"{bucket}/models/equal/m/{name}", theirs[name])
        return 503

    proxied.choose = choose
    with pytest.raises(df11.ParameterError, match=r"s3://models/equal/m.*exists"):
        df11.compress(model, "s3://models/equal/m", progress=False)
    assert theirs and objects("equal/m") == theirs


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_an_upload(
    proxied: Proxy, big: Path, tmp_path: Path, place: Path, how: int
) -> None:
    proxied.stall = lambda path: "partNumber=2" in path
    words = [sys.executable, "-m", "df11", "compress", str(big), "-o", "s3://models/signal/x.df11"]
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(words, stderr=subprocess.PIPE, cwd=tmp_path, env=own) as run:
        assert proxied.stalled.wait(120)
        begin = time.monotonic()
        run.send_signal(how)
        _, err = run.communicate(timeout=60)
        assert time.monotonic() - begin < 20
    proxied.goes_on.set()
    assert run.returncode == 128 + how, err
    assert (objects("signal"), unfinished(), list(place.iterdir())) == ({}, [], [])


@pytest.mark.parametrize(
    ("verb", "kind", "at"),
    [("verify", "df11", "config.json"), ("estimate", "bf16", "00002.safetensors")],
)
def test_the_next_run_removes_what_a_killed_one_fetched(
    proxied: Proxy, model: Path, tmp_path: Path, place: Path, verb: str, kind: str, at: str
) -> None:
    """Side files of a container, and a source."""
    df11.compress(model, tmp_path / "near", progress=False)
    name = f"s3://models/killed/{kind}"
    upload(proxied.to, tmp_path / "near" if kind == "df11" else model, f"killed/{kind}")
    proxied.stall = lambda path: path.endswith(at)
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-m", "df11", verb, name]
    with subprocess.Popen(words, cwd=tmp_path, env=own) as run:
        assert proxied.stalled.wait(60)
        run.kill()
    proxied.goes_on.set()
    proxied.stall = lambda _: False
    [left] = place.iterdir()
    assert str(left) in command("doctor", cwd=tmp_path)
    assert command(verb, name, cwd=tmp_path)
    assert list(place.iterdir()) == []


def test_credentials_that_expire_are_not_told(bucket: str, model: Path) -> None:
    send("POST", f"{bucket}/moto-api/reset-auth", b"0")
    try:
        with pytest.raises(df11.IoError) as caught:
            df11.compress(model, "s3://models/expired/m", progress=False)
    finally:
        send("POST", f"{bucket}/moto-api/reset-auth", b"inf")
    text = str(caught.value)
    assert "s3://models/expired/m" in text and "credentials" in text, text
    assert "test-key" not in text and "test-secret-value" not in text, text
