"""Files and processes for the tests; nothing here needs NumPy, PyTorch or a GPU."""

import ast
import importlib.util
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import stores

from df11._platform import IS_WINDOWS

# Models here are so small that threads take longer to start than to work; before PyTorch is there.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"U8": 1, "BOOL": 1, "F16": 2, "BF16": 2, "F32": 4, "I64": 8, "F8_E4M3": 1}

#: For tests that run on the CPU, and if there is one on a GPU.
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

#: For tests whose code Inductor generates in C++; on Windows MSVC compiles it.
needs_compiler = pytest.mark.skipif(
    IS_WINDOWS and shutil.which("cl") is None, reason="no C++ compiler"
)

# Tensors by name: dtype, shape, bytes.
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def normal(count: int, seed: int = 1, scale: float = 0.02) -> bytes:
    """Normal weights as BF16, cut off."""
    generator = random.Random(seed)
    return b"".join(struct.pack("<f", generator.gauss(0, scale))[2:] for _ in range(count))


def write_safetensors(path: Path, tensors: Tensors) -> Path:
    header, end = {}, 0
    for name, (dtype, shape, content) in tensors.items():
        begin, end = end, end + len(content)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(content for _, _, content in tensors.values())
    return path


# All patterns of 16 bits, a matrix, what is not BF16, what is empty, what is there twice.
MATRIX = normal(520 * 70)
SAMPLE: Tensors = {
    "model.embed.weight": ("BF16", (256, 256), struct.pack("<65536H", *range(65536))),
    "model.layers.0.mlp.weight": ("BF16", (520, 70), MATRIX),
    "model.layers.0.norm.weight": ("BF16", (9,), normal(9, 3)),
    "model.layers.1.mlp.weight": ("BF16", (520, 70), normal(520 * 70, 2)),
    "model.layers.0.mlp.tied": ("BF16", (520, 70), MATRIX),
    "model.layers.1.scale": ("F32", (5,), struct.pack("<5f", 1, 2, 3, 4, 5)),
    "model.layers.1.eight": ("F8_E4M3", (4, 2), bytes(range(8))),
    "model.mask": ("BOOL", (3,), b"\1\0\1"),
    "model.steps": ("I64", (), struct.pack("<q", 77)),
    "model.none": ("BF16", (0, 4), b""),
}


def write_shards(folder: Path) -> None:
    """Makes the folder of a model: SAMPLE in two files of weights with an index, and a config."""
    folder.mkdir()
    names = {}
    for at, some in enumerate((list(SAMPLE)[:3], list(SAMPLE)[3:]), 1):
        file = f"model-{at:05}-of-00002.safetensors"
        write_safetensors(folder / file, {name: SAMPLE[name] for name in some})
        names.update(dict.fromkeys(some, file))
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "llama"}')


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors(tmp_path_factory.mktemp("source") / "model.safetensors", SAMPLE)


@pytest.fixture(scope="session", params=["gap", "tile", "raw"])
def container(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    import df11

    path = tmp_path_factory.mktemp(request.param) / "model.df11"
    df11.compress(source, path, layout=request.param, progress=False)
    return path


#: For tests that ask for `container`, and to which its layout is all the same.
one_layout = pytest.mark.parametrize("container", ["tile"], indirect=True)


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that takes a second to compress: 256 MB."""
    weights = {"a": ("BF16", (1 << 27,), normal(1 << 16) * (1 << 11))}
    return write_safetensors(tmp_path_factory.mktemp("large") / "model.safetensors", weights)


def run(script: str, *arguments: object, **environment: str) -> str:
    """Runs a script in a process of its own; what it prints."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="session")
def flux(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small pipeline of diffusers in BF16, and compressed; nobody writes to them."""
    from pipelines import save

    import df11

    root = tmp_path_factory.mktemp("pipeline")
    save(root / "bf16")
    df11.compress(root / "bf16", root / "df11", progress=False)
    return root / "bf16", root / "df11"


@pytest.fixture(scope="session")
def without_driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which no driver's library can be loaded, even if the machine has one."""
    folder = tmp_path_factory.mktemp("no-driver")
    for name in ("libcuda.so", "libcuda.so.1"):
        (folder / name).write_text("no library")
    return {"LD_LIBRARY_PATH": str(folder)}


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """An environment with the stand-in for the driver of tests/stand_in.rs: GPUs whose memory is
    the host's, and which run no kernels.
    """
    if shutil.which("cc") is None:
        assert "DF11_REQUIRE_CC" not in os.environ, "no C compiler"
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    source = ROOT / "tests/support/driver.c"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", folder / "libcuda.so", source]
    subprocess.run(command, check=True)
    base = {"LD_LIBRARY_PATH": str(folder), "CUDA_VISIBLE_DEVICES": "0,1"}
    return lambda **answers: base | {f"DRIVER_{key}": value for key, value in answers.items()}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from models import Folders

    return Folders(tmp_path_factory.mktemp("models"))


class Decoded(NamedTuple):
    count: int
    dense: weakref.ref[Any]
    #: How many decoded before were still there.
    others: int


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Decoded]:
    from df11 import _ops

    found: list[Decoded] = []
    decode = _ops.decode

    def watched(*arguments: Any) -> Any:
        dense = decode(*arguments)
        others = sum(each.dense() is not None for each in found)
        found.append(Decoded(dense.numel(), weakref.ref(dense), others))
        return dense

    monkeypatch.setattr(_ops, "decode", watched)
    return found


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Files of tests that import what is not installed are left out, which is said."""
    if not collection_path.match("test_*.py"):
        return None
    missing = [name for name in imported(collection_path) if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{collection_path.name} is left out: {missing[0]} is not installed")
    return True if missing else None


def imported(file: Path) -> list[str]:
    """The top-level imports of a file and of the files beside it that it imports."""
    named: list[str] = []
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            named += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            named.append(str(node.module))
    roots = sorted({name.partition(".")[0] for name in named})
    beside = [path for root in roots if (path := file.with_name(f"{root}.py")).exists()]
    return [*roots, *(name for path in beside for name in imported(path))]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` run if PyTorch has that many."""
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    count = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = (marker.args[0] if marker.args else 1) if marker else 0
        if needed > count:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs that PyTorch can use"))


@pytest.fixture(scope="session", autouse=True)
def inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder for each process of a run. By default PyTorch keeps compiled code for all processes
    of a user in one, which several fill at once here, and one was given code that did not compile.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture(autouse=True)
def compressed_on_gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps matrices compressed in tests that need a GPU: each tensor has a table of 16 KiB there,
    so that most matrices of the tests' models would be left as they are, and nothing tested.
    """
    if request.node.get_closest_marker("gpu"):
        monkeypatch.setattr("df11._plan.MIN_SAVED", -(1 << 20))


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The URL of a server of S3 with one bucket, `models`."""
    pytest.importorskip("moto")
    with stores.s3_server() as url:
        yield url


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in {**stores.S3, "AWS_ENDPOINT_URL": s3}.items():
        monkeypatch.setenv(name, value)
    return s3
