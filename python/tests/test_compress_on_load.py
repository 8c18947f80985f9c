"""`quantization_config=df11.Config()` on a BF16 folder: compressed while it is loaded."""

import copy
import gc
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from conftest import on_devices, run
from models import SMALL, Folders, equal, greedy, load, same_weights, saved, seeded

import df11
from df11 import _native, _origin, _platform
from df11._devices import Devices
from df11._platform import IS_WINDOWS
from df11._quantizer import Df11Quantizer
from df11._tensor import CompressedTensor

PROMPT = torch.arange(1, 28).reshape(3, 9)
Both = tuple[Path, Path]


def online(folder: Path, device: str = "cpu", **options: Any) -> Any:
    return load(folder, device, quantization_config=df11.Config(**options))


@pytest.fixture(scope="module")
def several(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """A model of several files, and what `df11 compress` makes of it."""
    model = load(folders.bf16("llama-tied"))
    bf16, folder = saved(model, tmp_path_factory.mktemp("online"), max_shard_size="400KB")
    assert len(list(bf16.glob("*.safetensors"))) > 2
    return bf16, folder


def containers(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*.df11")}


def is_empty(place: Path) -> bool:
    """Whether nothing is left in a place; on Windows, which deletes nothing that is mapped, after
    the next run.
    """
    if IS_WINDOWS:
        with _native.TemporaryFolder(place):
            pass
    return not list(place.iterdir())


def by(packs: bool) -> Any:
    """The way of GPUs, or of containers: all of it runs on the CPU too, except the fast layout."""
    devices = ("cpu", "cuda") if packs else ("cuda",)
    return mock.patch("df11._quantizer.PACKING_DEVICES", devices)


@on_devices
def test_bits_are_those_of_the_model(several: Both, device: str) -> None:
    original, model = load(several[0], device), online(several[0], device)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, CompressedTensor)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert equal(greedy(model, PROMPT, 4), greedy(original, PROMPT, 4))
    assert same_weights(model, original)
    assert df11.report(model, verify=True).verified
    assert df11.report(model).ratio == df11.report(load(several[1], device)).ratio


@pytest.mark.parametrize("packs", [False, True], ids=["containers", "packed"])
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt2"])
def test_what_transformers_stacks_and_turns(folders: Folders, name: str, packs: bool) -> None:
    with by(packs):
        original, model = load(folders.bf16(name)), online(folders.bf16(name))
    assert model.__dict__["_df11"].is_packed == packs
    assert any(isinstance(value, CompressedTensor) for value in model.parameters())
    assert torch.equal(model(PROMPT).logits, original(PROMPT).logits)
    assert df11.report(model, verify=True).verified


@on_devices
def test_saved_it_is_the_compressed_folder(several: Both, device: str, tmp_path: Path) -> None:
    model = online(several[0], device)
    model.save_pretrained(tmp_path / "saved")
    assert containers(tmp_path / "saved") == containers(several[1])
    config = (tmp_path / "saved/config.json").read_text()
    assert json.loads(config)["quantization_config"] == {"quant_method": "df11"}
    assert not list((tmp_path / "saved").glob("*.safetensors"))
    # Also the files that belong to it, so that all of it can be checked and restored.
    df11.verify(tmp_path / "saved", progress=False)
    df11.decompress(tmp_path / "saved", tmp_path / "restored", progress=False)
    originals = {path.name: path.read_bytes() for path in several[0].iterdir()}
    assert originals == {p.name: p.read_bytes() for p in (tmp_path / "restored").iterdir()}
    assert torch.equal(load(tmp_path / "saved")(PROMPT).logits, load(several[0])(PROMPT).logits)


def test_options_are_those_of_compressed_folders(several: Both) -> None:
    by_dict = load(several[0], quantization_config={"quant_method": "df11", "mode": "fused"})
    for model in (online(several[0], mode="fused"), by_dict):
        assert df11.report(model).modes == ["fused"]


@pytest.mark.parametrize("packs", [False, True], ids=["containers", "packed"])
def test_conversions_are_told(several: Both, packs: bool) -> None:
    words = {torch.float32: "take their full size", torch.float16: "which rounds them"}
    for dtype, said in words.items():
        used = f"bfloat16 and used as {str(dtype)[6:]}.*" if packs else ""
        with by(packs), pytest.warns(UserWarning, match=used + said):
            wide = load(several[0], quantization_config=df11.Config(), dtype=dtype)
        assert {value.dtype for value in wide.parameters()} == {dtype}


def test_copies_and_pickles(
    folders: Folders, several: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers are made when they are asked for, of the same files; nothing is left of them."""
    monkeypatch.setattr(_origin, "PLACES", [tmp_path / "places"])
    (tmp_path / "places").mkdir()
    shutil.copytree(several[0], tmp_path / "bf16")
    model = online(tmp_path / "bf16")
    # Windows deletes none that is mapped.
    assert IS_WINDOWS or not containers(tmp_path), "a process that is killed leaves no weights"
    expected = model(PROMPT).logits
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    del model
    for other in (copied, pickled):
        assert torch.equal(other(PROMPT).logits, expected)
        assert df11.report(other, verify=True).verified
        other.save_pretrained(tmp_path / "again")
        assert containers(tmp_path / "again") == containers(several[1])
    pickled = pickle.loads(pickle.dumps(pickled))
    del copied, other
    gc.collect()
    assert is_empty(tmp_path / "places") and not containers(tmp_path / "bf16")
    shutil.rmtree(tmp_path / "bf16")
    shutil.copytree(folders.bf16("llama"), tmp_path / "bf16")
    with pytest.raises(ValueError, match="other weights than when the model was loaded"):
        pickled.save_pretrained(tmp_path / "saved")


#: Loads a model once, says so, and loads it until it is killed.
LOADS = """
import sys, transformers, df11
from pathlib import Path
from df11 import _origin
_origin.PLACES = [Path(sys.argv[2])]
while True:
    transformers.AutoModelForCausalLM.from_pretrained(
        sys.argv[1], quantization_config=df11.Config(), device_map="cpu"
    )
    print("loaded", flush=True)
"""


def test_what_a_killed_run_leaves_the_next_one_removes(several: Both, tmp_path: Path) -> None:
    places, command = tmp_path / "places", [sys.executable, "-c", LOADS, str(several[0])]
    places.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [*command, str(places)], stdout=subprocess.PIPE, env=environment
    ) as loading:
        assert loading.stdout is not None and loading.stdout.readline().rstrip() == b"loaded"
        # Killed while it makes containers.
        while not list(places.rglob("*.df11*")):
            assert loading.poll() is None
        loading.kill()
    left = [path.name for path in places.iterdir()]
    assert len(left) == 1 and re.fullmatch(r"\.df11-\w{6}\.part", left[0])
    main = "import sys; from df11.__main__ import main; main()"
    said = json.loads(run(main, "doctor", "--json", **{_platform.TEMPORARY: str(places)}))
    assert left[0] in str(said["checks"]["leftovers"]["value"])
    with mock.patch.object(_origin, "PLACES", [places]):
        model = online(several[0])
        assert IS_WINDOWS or not containers(places)
        assert not (places / left[0]).exists()
    assert equal(greedy(model, PROMPT, 2), greedy(load(several[0]), PROMPT, 2))
    del model
    gc.collect()
    assert is_empty(places)


@pytest.mark.skipif(
    IS_WINDOWS or not Path("/proc/self/status").exists(), reason="asks Linux for its memory"
)
def test_memory(folders: Folders, tmp_path: Path) -> None:
    """Host memory: one file and the result, and not the BF16 model beside it."""
    changes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    config = transformers.LlamaConfig(**{**SMALL, **changes, "head_dim": 128}, dtype="bfloat16")
    model = seeded(transformers.LlamaForCausalLM(config))
    model.save_pretrained(tmp_path / "large", max_shard_size="16MB")
    files = [path.stat().st_size for path in (tmp_path / "large").glob("*.safetensors")]
    out = run(
        """
        import sys, torch, transformers, df11
        def peak():
            lines = open("/proc/self/status").read().splitlines()
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        def load(folder):
            options = {"quantization_config": df11.Config(), "device_map": "cpu"}
            return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
        load(sys.argv[1])
        before = peak()
        model = load(sys.argv[2])
        print(peak() - before, df11.report(model).device_bytes)
        """,
        folders.bf16("llama"),
        tmp_path / "large",
    )
    more, result = map(int, out.splitlines()[-1].split())
    assert len(files) > 4 and result < 0.75 * sum(files)
    assert more < result + max(files), (more, result, files)


def test_what_is_refused(several: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    shutil.copy(several[0] / "config.json", tmp_path)
    other = transformers.AutoConfig.from_pretrained(several[0])
    other.quantization_config = {"quant_method": "fp8"}
    few = {"quant_method": "df11", "bits": 4}
    for work, words in [
        (lambda: online(tmp_path), r"pytorch_model\.bin.*save it with save_pretrained"),
        (lambda: load(several[0], quantization_config=few), "its options are mode, residence"),
        (
            lambda: load(several[0], config=other, quantization_config=df11.Config()),
            "but you are passing a Df11Config config",
        ),
    ]:
        with pytest.raises(ValueError, match=words):
            work()
    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.is_initialized", lambda: True)
        patch.setattr("torch.distributed.get_world_size", lambda *_: 2)
        with pytest.raises(ValueError, match=r"df11 compress .* -o FOLDER"):
            online(several[0])
    monkeypatch.setattr(_origin, "_free", lambda place: 1000)
    with pytest.raises(OSError, match=rf"\b{_platform.TEMPORARY}\b"):
        online(several[0])


def check_packed(model: Any, several: Both, device: str, saved: Path) -> Any:
    """Without containers, which are made when they are asked for; its report."""
    assert model.__dict__["_df11"].held is None
    original = load(several[0], device)
    assert equal(greedy(model, PROMPT, 4), greedy(original, PROMPT, 4))
    report = df11.report(model, verify=True)
    assert report.verified and report.verified_by == "digests"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {value.device.type for value in [*model.parameters(), *model.buffers()]} == {device}
    assert not any(value.requires_grad for value in model.parameters())
    assert same_weights(model, original)
    for each in (model, pickle.loads(pickle.dumps(model))):
        each.save_pretrained(saved)
        assert containers(saved) == containers(several[1])
    return report


@pytest.mark.gpu
@pytest.mark.parametrize("residence", ["stored", "fast"])
@pytest.mark.parametrize("options", [{"device_map": "cuda"}, {"device_map": "auto"}, {}])
def test_a_gpu_compresses_by_itself(
    several: Both, options: dict[str, Any], residence: str, tmp_path: Path
) -> None:
    config = df11.Config(residence=residence)
    if options.get("device_map") == "auto":
        options = {**options, "max_memory": {0: "1GB"}}  # or else it uses all GPUs
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(several[0], quantization_config=config, **options)
    report = check_packed(model, several, "cuda", tmp_path / "saved")
    assert report.residences["model.layers.0.mlp.up_proj.weight"] == residence


@pytest.mark.parametrize("options", [{"device_map": "cpu"}, {"device_map": "auto"}, {}])
def test_a_device_compresses_by_itself(
    several: Both, options: dict[str, Any], tmp_path: Path
) -> None:
    kind = transformers.AutoModelForCausalLM
    with by(packs=True), mock.patch("df11._quantizer.Made", None):
        model = kind.from_pretrained(several[0], quantization_config=df11.Config(), **options)
    report = check_packed(model, several, "cpu", tmp_path / "saved")
    other = df11.report(load(several[1]))
    assert (report.residences, report.device_bytes) == (other.residences, other.device_bytes)


def test_when_a_gpu_compresses_by_itself(several: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU into which all of it fits, also if nothing became smaller."""
    gpu, files = torch.device("cuda", 0), list(several[0].glob("*.safetensors"))
    whole = sum(path.stat().st_size for path in files)
    elsewhere = {"": gpu, "model.layers.0": torch.device("cpu")}
    # No GPU is needed to read its numbers.
    monkeypatch.setattr("df11._devices.free_bytes", lambda device: whole)
    for place, options, expected in [
        (Devices([gpu]), {}, True),
        (Devices([gpu], [whole]), {"residence": "fast"}, True),
        (Devices([gpu], [whole - 1]), {}, False),
        (Devices([gpu], None, elsewhere), {"residence": "fast"}, False),
        (Devices([gpu, torch.device("cuda", 1)], [whole, whole]), {}, False),
        (Devices([gpu]), {"streamed": True}, False),
        (Devices([torch.device("cpu")]), {}, False),
    ]:
        quantizer = Df11Quantizer(df11.Config(**options), pre_quantized=False)
        quantizer.placement = place
        assert quantizer._packs(list(map(str, files))) is expected, (place, options)


def test_auto_is_fast_as_far_as_memory_allows(
    several: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights take two thirds of the free memory if they are fast, and nine tenths if stored."""
    files = [str(path) for path in several[0].glob("*.safetensors")]
    whole = sum(Path(file).stat().st_size for file in files)
    gpu = torch.device("cuda", 0)
    for free, memory, fast_memory, expected in [
        (1.2 * whole, None, None, "fast"),
        (1.1 * whole, None, None, "stored"),
        (0.9 * whole, None, None, "stored"),
        (0.8 * whole, None, None, None),
        (0, whole, None, "fast"),
        (0, whole, 0.75 * whole, "stored"),
        (0, 0.99 * whole, None, None),
    ]:
        monkeypatch.setattr("df11._devices.free_bytes", lambda device, free=free: free)
        quantizer = Df11Quantizer(df11.Config(), pre_quantized=False)
        sizes = [None if size is None else [int(size)] for size in (memory, fast_memory)]
        quantizer.placement = Devices([gpu], sizes[0], fast_memory=sizes[1])
        found = quantizer._residence(files) if quantizer._packs(files) else None
        assert found == expected, (free, memory, fast_memory)
