"""`quantization_config=df11.Config()` on a BF16 folder: compressed while it is loaded."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import on_devices, run
from models import SMALL, Folders, equal, greedy, load, same_weights, saved, seeded

import df11
from df11 import _source
from df11._tensor import CompressedTensor

pytestmark = pytest.mark.usefixtures("compressed_on_gpus")

PROMPT = torch.arange(1, 28).reshape(3, 9)


def online(folder: Path, device: str = "cpu", **options: Any) -> Any:
    return load(folder, device, quantization_config=df11.Config(**options))


@pytest.fixture(scope="module")
def several(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of several files, and what `df11 compress` makes of it."""
    model = load(folders.bf16("llama-tied"))
    bf16, folder = saved(model, tmp_path_factory.mktemp("online"), max_shard_size="400KB")
    assert len(list(bf16.glob("*.safetensors"))) > 2
    return bf16, folder


def containers(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*.df11")}


@on_devices
def test_bits_are_those_of_the_model(several: tuple[Path, Path], device: str) -> None:
    original, model = load(several[0], device), online(several[0], device)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, CompressedTensor)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert equal(greedy(model, PROMPT, 4), greedy(original, PROMPT, 4))
    assert same_weights(model, original)
    assert df11.report(model, verify=True).verified
    assert df11.report(model).ratio == df11.report(load(several[1], device)).ratio


#: By containers, and the way of GPUs: all of it runs on the CPU too, except for the fast layout.
WAYS = {"containers": ("cuda",), "PyTorch": ("cpu", "cuda")}


@pytest.fixture
def by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("df11._quantizer.PACKING_DEVICES", WAYS["PyTorch"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt2"])
def test_what_transformers_stacks_and_turns(
    folders: Folders, name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("df11._quantizer.PACKING_DEVICES", WAYS[way])
    original, model = load(folders.bf16(name)), online(folders.bf16(name))
    assert model.__dict__["_df11"].is_packed == (way == "PyTorch")
    assert any(isinstance(value, CompressedTensor) for value in model.parameters())
    assert torch.equal(model(PROMPT).logits, original(PROMPT).logits)
    assert df11.report(model, verify=True).verified


@on_devices
def test_saved_it_is_the_compressed_folder(
    several: tuple[Path, Path], device: str, tmp_path: Path
) -> None:
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


def test_options_are_those_of_compressed_folders(several: tuple[Path, Path]) -> None:
    model = online(several[0], mode="fused")
    assert df11.report(model).modes == ["fused"]
    by_dict = load(several[0], quantization_config={"quant_method": "df11", "mode": "fused"})
    assert df11.report(by_dict).modes == ["fused"]
    with pytest.warns(UserWarning, match="take their full size"):
        wide = load(several[0], quantization_config=df11.Config(), dtype=torch.float32)
    assert {value.dtype for value in wide.parameters()} == {torch.float32}


@pytest.mark.usefixtures("by_pytorch")
def test_a_device_that_compresses_tells_of_conversions(several: tuple[Path, Path]) -> None:
    with pytest.warns(UserWarning, match="bfloat16 and used as float32.*take their full size"):
        wide = load(several[0], quantization_config=df11.Config(), dtype=torch.float32)
    assert {value.dtype for value in wide.parameters()} == {torch.float32}
    with pytest.warns(UserWarning, match="bfloat16 and used as float16.*which rounds them"):
        load(several[0], quantization_config=df11.Config(), dtype=torch.float16)


def test_copies_and_pickles(several: tuple[Path, Path], tmp_path: Path) -> None:
    model = online(several[0])
    expected = model(PROMPT).logits
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    del model
    for other in (copied, pickled):
        assert torch.equal(other(PROMPT).logits, expected)
        assert df11.report(other, verify=True).verified
        other.save_pretrained(tmp_path / "again")
        assert containers(tmp_path / "again") == containers(several[1])


def test_an_original_that_has_changed_is_refused(
    folders: Folders, several: tuple[Path, Path], tmp_path: Path
) -> None:
    """Of a pickled model the containers are made again, which need the same files."""
    shutil.copytree(several[0], tmp_path / "bf16")
    model = pickle.loads(pickle.dumps(online(tmp_path / "bf16")))
    shutil.rmtree(tmp_path / "bf16")
    shutil.copytree(folders.bf16("llama"), tmp_path / "bf16")
    with pytest.raises(ValueError, match="other weights than when the model was loaded"):
        model.save_pretrained(tmp_path / "saved")


def test_nothing_is_left_in_folders(
    several: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_source, "PLACES", [tmp_path])
    before = containers(several[0])
    model = online(several[0])
    assert not list(tmp_path.rglob("*.df11")), "a process that is killed leaves no weights"
    del model
    gc.collect()
    assert not list(tmp_path.iterdir())
    assert containers(several[0]) == before == {}


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
        more = peak() - before
        print(more, df11.report(model).device_bytes)
        """,
        folders.bf16("llama"),
        tmp_path / "large",
    )
    more, result = map(int, out.splitlines()[-1].split())
    assert len(files) > 4 and result < 0.75 * sum(files)
    assert more < result + max(files), (more, result, files)


def test_what_is_refused(
    several: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = transformers.AutoModelForCausalLM
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    shutil.copy(several[0] / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*save it with save_pretrained"):
        online(tmp_path)
    with pytest.raises(ValueError, match="its options are mode, residence"):
        load(several[0], quantization_config={"quant_method": "df11", "bits": 4})
    with pytest.raises(ValueError, match="but you are passing a Config config"):
        config = transformers.AutoConfig.from_pretrained(several[0])
        config.quantization_config = {"quant_method": "fp8"}
        kind.from_pretrained(several[0], config=config, quantization_config=df11.Config())
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda *_: 2)
    with pytest.raises(ValueError, match=r"df11 compress .* -o FOLDER"):
        online(several[0])
    monkeypatch.undo()
    monkeypatch.setattr(_source, "_free", lambda place: 1000)
    with pytest.raises(OSError, match="TMPDIR"):
        online(several[0])


@pytest.mark.gpu
@pytest.mark.parametrize("residence", ["stored", "fast"])
@pytest.mark.parametrize("options", [{"device_map": "cuda"}, {"device_map": "auto"}, {}])
def test_a_gpu_compresses_by_itself(
    several: tuple[Path, Path], options: dict[str, Any], residence: str, tmp_path: Path
) -> None:
    """Without containers, which are made when they are asked for."""
    config = df11.Config(residence=residence)
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(several[0], quantization_config=config, **options)
    assert model.__dict__["_df11"].held is None
    original = load(several[0], "cuda")
    assert equal(greedy(model, PROMPT, 4), greedy(original, PROMPT, 4))
    report = df11.report(model, verify=True)
    assert report.verified and report.verified_by == "sums of bits"
    assert report.residences["model.layers.0.mlp.up_proj.weight"] == residence
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {value.device.type for value in [*model.parameters(), *model.buffers()]} == {"cuda"}
    assert not any(value.requires_grad for value in model.parameters())
    assert same_weights(model, original)
    for each in (model, pickle.loads(pickle.dumps(model))):
        each.save_pretrained(tmp_path / "saved")
        assert containers(tmp_path / "saved") == containers(several[1])


@pytest.mark.parametrize("options", [{"device_map": "cpu"}, {"device_map": "auto"}, {}])
@pytest.mark.usefixtures("by_pytorch")
def test_a_device_compresses_by_itself(
    several: tuple[Path, Path], options: dict[str, Any], tmp_path: Path
) -> None:
    kind = transformers.AutoModelForCausalLM
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("df11._quantizer.Made", None)
        model = kind.from_pretrained(several[0], quantization_config=df11.Config(), **options)
    assert model.__dict__["_df11"].held is None
    assert equal(greedy(model, PROMPT, 4), greedy(load(several[0]), PROMPT, 4))
    report, other = df11.report(model, verify=True), df11.report(load(several[1]))
    assert report.verified and report.verified_by == "sums of bits"
    assert (report.residences, report.device_bytes) == (other.residences, other.device_bytes)
    model.save_pretrained(tmp_path / "saved")
    assert containers(tmp_path / "saved") == containers(several[1])


def test_when_a_gpu_compresses_by_itself(several: tuple[Path, Path]) -> None:
    """One GPU into which all of it fits, also if nothing became smaller."""
    from df11._plan import Placement
    from df11._quantizer import Df11Quantizer

    gpu, files = torch.device("cuda", 0), list(several[0].glob("*.safetensors"))
    whole = sum(path.stat().st_size for path in files)
    elsewhere = {"": gpu, "model.layers.0": torch.device("cpu")}
    for place, options, expected in [
        (Placement([gpu]), {}, True),
        (Placement([gpu], [whole]), {"residence": "fast"}, True),
        (Placement([gpu], [whole - 1]), {}, False),
        (Placement([gpu], None, elsewhere), {"residence": "fast"}, False),
        (Placement([gpu, torch.device("cuda", 1)], [whole, whole]), {}, False),
        (Placement([gpu]), {"residence": "auto"}, False),
        (Placement([gpu]), {"streamed": True}, False),
        (Placement([torch.device("cpu")]), {}, False),
    ]:
        quantizer = Df11Quantizer(df11.Config(**options), pre_quantized=False)
        quantizer.placement = place
        assert quantizer._packs(list(map(str, files))) is expected, (place, options)
