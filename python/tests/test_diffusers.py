"""Pipelines and models of diffusers: compressed by the command, loaded by `from_pretrained`."""

from __future__ import annotations

import copy
import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import peft
import pytest
import torch
import transformers
from conftest import on_devices
from models import equal, same_weights, saved
from pipelines import DTYPES, WITHOUT, answers, flux, image, inputs

import df11
from df11._tensor import CompressedTensor

diffusers.utils.logging.set_verbosity_error()
diffusers.utils.logging.disable_progress_bar()

pytestmark = pytest.mark.usefixtures("compressed_on_gpus")


@pytest.fixture(scope="module")
def folders(flux_folders: tuple[Path, Path]) -> tuple[Path, Path]:
    return flux_folders


def load(folder: Path, **options: Any) -> Any:
    options = {**WITHOUT, "torch_dtype": DTYPES, **options}
    return diffusers.DiffusionPipeline.from_pretrained(folder, **options)


@on_devices
def test_a_pipeline_is_loaded_as_any_other(folders: tuple[Path, Path], device: str) -> None:
    original, pipeline = load(folders[0]).to(device), load(folders[1])
    assert type(pipeline) is diffusers.FluxPipeline
    assert {value.device.type for value in pipeline.transformer.parameters()} == {"cpu"}
    pipeline.to(device)
    assert equal(answers(pipeline), answers(original))
    weight = pipeline.transformer.transformer_blocks[0].attn.to_q.weight
    assert isinstance(weight, CompressedTensor) and weight.device.type == device
    report = df11.report(pipeline, verify=True)
    assert report.verified and report.ratio < 0.9
    kinds = {name: value.dtype for name, value in original.transformer.named_parameters()}
    found = {name: value.dtype for name, value in pipeline.transformer.named_parameters()}
    assert found == kinds
    assert {value.dtype for value in pipeline.vae.parameters()} == {torch.float32}


def test_components_wait_on_the_cpu(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As diffusers' own do, for `to` and the ways of offloading; other models go to the GPU."""
    asked: list[str] = []

    def gpu() -> Any:
        asked.append("the GPU")
        return torch.device("cpu")

    monkeypatch.setattr("df11._quantizer.default_device", gpu)
    load(folders[1])
    assert not asked
    transformers.T5EncoderModel.from_pretrained(folders[1] / "text_encoder_2")
    assert not asked
    folders[1].joinpath("text_encoder_2").rename(folders[1].parent / "t5")
    try:
        transformers.T5EncoderModel.from_pretrained(folders[1].parent / "t5")
    finally:
        folders[1].parent.joinpath("t5").rename(folders[1] / "text_encoder_2")
    assert asked


def test_without_a_dtype_all_is_as_it_is_stored(folders: tuple[Path, Path]) -> None:
    """Where diffusers would make F32 of everything, which would decode all weights."""
    pipeline = load(folders[1], torch_dtype=None)
    assert pipeline.transformer.dtype == torch.bfloat16 and pipeline.vae.dtype == torch.float32
    assert equal(answers(pipeline), answers(load(folders[0])))


def test_another_dtype_is_heeded(folders: tuple[Path, Path]) -> None:
    kind = diffusers.FluxTransformer2DModel
    with pytest.warns(UserWarning, match="take their full size"):
        model = kind.from_pretrained(folders[1], subfolder="transformer", torch_dtype=torch.float32)
    original = kind.from_pretrained(folders[0], subfolder="transformer", torch_dtype=torch.float32)
    wanted = original.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("place", ["transformer", "vae"])
def test_a_component_by_itself(folders: tuple[Path, Path], place: str, tmp_path: Path) -> None:
    kind = {"transformer": diffusers.FluxTransformer2DModel, "vae": diffusers.AutoencoderKL}[place]
    dtype = DTYPES.get(place, torch.bfloat16)
    original = kind.from_pretrained(folders[0] / place, torch_dtype=dtype)
    model, info = kind.from_pretrained(
        folders[1], subfolder=place, torch_dtype=dtype, output_loading_info=True
    )
    assert not any(info.values())
    assert same_weights(model, original)
    assert not model.training
    model.save_pretrained(tmp_path / "saved")
    for path in (folders[1] / place).glob("*.df11"):
        assert (tmp_path / "saved" / path.name).read_bytes() == path.read_bytes()
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "df11"}
    again = kind.from_pretrained(tmp_path / "saved", torch_dtype=dtype)
    assert same_weights(again, original)


def test_a_component_of_several_files(folders: tuple[Path, Path], tmp_path: Path) -> None:
    kind = diffusers.FluxTransformer2DModel
    options: dict[str, Any] = {"torch_dtype": torch.bfloat16}
    original = kind.from_pretrained(folders[0] / "transformer", **options)
    bf16, folder = saved(original, tmp_path, max_shard_size="2MB")
    assert len(list(bf16.glob("*.safetensors"))) > 2
    model = kind.from_pretrained(folder, **options)
    assert isinstance(model.transformer_blocks[0].attn.to_q.weight, CompressedTensor)
    assert same_weights(model, original)


def test_a_pipeline_is_saved_as_it_was(folders: tuple[Path, Path], tmp_path: Path) -> None:
    pipeline = load(folders[1])
    pipeline.save_pretrained(tmp_path / "saved")
    for path in folders[1].rglob("*/*.df11"):
        copied = tmp_path / "saved" / path.relative_to(folders[1])
        assert copied.read_bytes() == path.read_bytes()
    assert not list((tmp_path / "saved").rglob("*.safetensors"))
    assert equal(answers(load(tmp_path / "saved")), answers(pipeline))


def test_options_by_component_and_for_all(folders: tuple[Path, Path]) -> None:
    by_name = diffusers.PipelineQuantizationConfig(
        quant_mapping={"transformer": df11.Config(mode="fused")}
    )
    pipeline = load(folders[1], quantization_config=by_name)
    assert df11.report(pipeline.transformer).modes == ["fused"]
    assert df11.report(pipeline.text_encoder_2).modes == ["exact"]
    for_all = diffusers.PipelineQuantizationConfig(
        quant_backend="df11", quant_kwargs={"mode": "fused"}
    )
    pipeline = load(folders[1], quantization_config=for_all)
    assert df11.report(pipeline).modes == ["fused"]


def test_a_bf16_pipeline_is_compressed_while_it_is_loaded(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    options = diffusers.PipelineQuantizationConfig(
        quant_backend="df11", quant_kwargs={"mode": "exact"}, components_to_quantize=["transformer"]
    )
    pipeline = load(folders[0], quantization_config=options)
    assert isinstance(pipeline.transformer.proj_out.weight, torch.nn.Parameter)
    weight = pipeline.transformer.transformer_blocks[0].attn.to_q.weight
    assert isinstance(weight, CompressedTensor)
    assert equal(answers(pipeline), answers(load(folders[0])))
    assert df11.report(pipeline, verify=True).verified
    pipeline.transformer.save_pretrained(tmp_path / "saved")
    for path in (folders[1] / "transformer").glob("*.df11"):
        assert (tmp_path / "saved" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.gpu
def test_cpu_offload(folders: tuple[Path, Path]) -> None:
    """Components are on the GPU while they work."""
    pooled, hidden, wanted = answers(load(folders[0]).to("cuda"))
    for offload in ("enable_model_cpu_offload", "enable_sequential_cpu_offload"):
        pipeline = load(folders[1])
        getattr(pipeline, offload)()
        assert torch.equal(image(pipeline, pooled, hidden), wanted), offload


def lora(folder: Path, pipeline: Any, rank: int = 4) -> Path:
    """Writes a LoRA of the transformer as trainers of diffusers do."""
    config = peft.LoraConfig(r=rank, target_modules=["to_q", "to_v"], init_lora_weights=False)
    torch.manual_seed(8)
    pipeline.transformer.add_adapter(config)
    layers = peft.get_peft_model_state_dict(pipeline.transformer)
    type(pipeline).save_lora_weights(folder, transformer_lora_layers=layers)
    return folder


def test_lora(folders: tuple[Path, Path], tmp_path: Path) -> None:
    place = lora(tmp_path / "lora", load(folders[0]))
    original, pipeline = load(folders[0]), load(folders[1])
    plain = answers(pipeline)
    for each in (original, pipeline):
        each.load_lora_weights(place, adapter_name="style")
    assert isinstance(
        pipeline.transformer.transformer_blocks[0].attn.to_q.base_layer.weight, CompressedTensor
    )
    assert equal(answers(pipeline), answers(original)) and not equal(answers(pipeline), plain)
    for each in (original, pipeline):
        each.set_adapters(["style"], [0.5])
    assert equal(answers(pipeline), answers(original))
    with pytest.raises(RuntimeError, match="compressed tensor"):
        pipeline.fuse_lora()
    with pytest.raises(ValueError, match="unload_lora_weights"):
        pipeline.save_pretrained(tmp_path / "saved")
    pipeline.unload_lora_weights()
    assert equal(answers(pipeline), plain)


@torch.no_grad()
def test_fused_projections(tmp_path: Path) -> None:
    """diffusers stacks the weights of three projections into a new one."""
    original = flux(2).bfloat16().eval()
    model = df11.attach(flux(2), saved(original, tmp_path)[1], device="cpu")
    plain = original(**inputs("flux")).sample
    for each in (original, model):
        each.fuse_qkv_projections()
    assert torch.equal(model(**inputs("flux")).sample, original(**inputs("flux")).sample)
    model.unfuse_qkv_projections()
    assert torch.equal(model(**inputs("flux")).sample, plain)


def test_copies(folders: tuple[Path, Path]) -> None:
    kind = diffusers.FluxTransformer2DModel
    model = kind.from_pretrained(folders[1], subfolder="transformer")
    state = df11.state_dict(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = df11.state_dict(other)
        assert all(torch.equal(found[name], value) for name, value in state.items())


def test_what_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    kind = diffusers.FluxTransformer2DModel
    place = folders[1] / "transformer"
    model = kind.from_pretrained(place)
    with pytest.raises(ValueError, match=r"df11\.Config\(memory="):
        kind.from_pretrained(place, device_map="auto")
    with pytest.raises(NotImplementedError, match="df11 decompress"):
        model.dequantize()
    with pytest.raises(ValueError, match="its options are mode, residence"):
        kind.from_pretrained(folders[0] / "transformer", quantization_config=df11.Config(bits=4))
    with pytest.raises(ValueError, match="without variant"):
        model.save_pretrained(tmp_path, variant="fp16")
    config = json.loads((place / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileNotFoundError, match="holds no \\*\\.df11"):
        kind.from_pretrained(tmp_path)


def test_the_card_of_a_pipeline_loads_it(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folders[0], "bf16")
    subprocess.run([sys.executable, "-m", "df11", "compress", "bf16", "-q"], check=True)
    assert df11.verify("bf16-df11", progress=False).files == 10

    card = Path("bf16-df11/README.md").read_text()
    found = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert found
    # What has no tokenizers is loaded without.
    code = found[1].replace('"bf16-df11"', '"bf16-df11", tokenizer=None, tokenizer_2=None')
    names: dict[str, Any] = {}
    exec(code, names)
    pipeline = names["pipeline"]
    assert "df11: active" in str(df11.report(pipeline))
    assert equal(answers(pipeline), answers(load(Path("bf16"))))


def test_a_pipeline_comes_back(folders: tuple[Path, Path], tmp_path: Path) -> None:
    report = df11.compress(folders[0], tmp_path / "df11", progress=False)
    assert report.shards == 5
    assert df11.estimate(folders[0], progress=False).stored_bytes == report.stored_bytes
    df11.convert(tmp_path / "df11", tmp_path / "gap", layout="gap", progress=False)
    df11.decompress(tmp_path / "gap", tmp_path / "back", progress=False)
    paths = [path for path in folders[0].rglob("*") if path.is_file()]
    assert len(paths) == 10
    for path in paths:
        back = tmp_path / "back" / path.relative_to(folders[0])
        assert back.read_bytes() == path.read_bytes()
    (tmp_path / "gap" / "vae").rename(tmp_path / "away")
    found = df11.verify(tmp_path / "gap", progress=False)
    assert list(found.unchecked) == ["component vae, which is missing"]
    with pytest.raises(df11.ParameterError, match="pipeline"):
        df11.open(tmp_path / "gap")
