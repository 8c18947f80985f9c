"""Pipelines and models of diffusers: compressed by the command, loaded by `from_pretrained`."""

import copy
import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import diffusers
import peft
import pipelines
import pytest
import torch
import transformers
from conftest import on_devices
from models import equal, same_weights, saved
from pipelines import DTYPES, WITHOUT, answers, image, in_original_format, inputs
from safetensors.torch import save_file
from torch.nn import Module

import df11
from df11 import _watch
from df11._tensor import CompressedTensor

diffusers.utils.logging.set_verbosity_error()
diffusers.utils.logging.disable_progress_bar()


Flux = tuple[Path, Path]
KIND = diffusers.FluxTransformer2DModel


def load(folder: Path, **options: Any) -> Any:
    options = {**WITHOUT, "torch_dtype": DTYPES, **options}
    return diffusers.DiffusionPipeline.from_pretrained(folder, **options)


def test_a_pipeline_returns_nothing_of_damaged_weights(flux: Flux) -> None:
    """The function that reads the kernels' word stands in for kernels."""
    pipeline = load(flux[1])
    answers(pipeline)
    told = mock.patch.object(_watch, "check_gpus", side_effect=df11.CorruptError("told"))
    with told, pytest.raises(df11.CorruptError):
        answers(pipeline)


@pytest.mark.gpu
def test_a_pipeline_on_a_gpu_returns_nothing_of_damaged_weights(flux: Flux) -> None:
    pipeline = load(flux[1]).to("cuda")
    answers(pipeline)
    weight = next(
        value
        for value in reversed([*pipeline.transformer.parameters()])
        if isinstance(value, CompressedTensor)
    )
    weight._records0[8:40] = 0x77
    with pytest.raises(df11.CorruptError):
        answers(pipeline)


def containers(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.df11")}


@on_devices
def test_a_pipeline_is_loaded_as_any_other(flux: Flux, device: str) -> None:
    original, pipeline = load(flux[0]).to(device), load(flux[1])
    assert type(pipeline) is diffusers.FluxPipeline
    assert {value.device.type for value in pipeline.transformer.parameters()} == {"cpu"}
    pipeline.to(device)
    assert equal(answers(pipeline), answers(original))
    weight = pipeline.transformer.transformer_blocks[0].attn.to_q.weight
    assert isinstance(weight, CompressedTensor) and weight.device.type == device
    report = df11.report(pipeline, verify=True)
    assert report.verified and report.ratio < 0.9
    parts = [df11.report(part) for part in pipeline.components.values() if isinstance(part, Module)]
    assert report.device_bytes == sum(part.device_bytes for part in parts)
    assert report.original_bytes == sum(part.original_bytes for part in parts)
    assert report.paths == [path for part in parts for path in part.paths]
    kinds, found = (
        {name: value.dtype for name, value in each.transformer.named_parameters()}
        for each in (original, pipeline)
    )
    assert found == kinds
    assert {value.dtype for value in pipeline.vae.parameters()} == {torch.float32}


def test_components_wait_on_the_cpu(
    flux: Flux, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads like diffusers' own models, for `to` and offloading; other models go to the GPU."""
    asked: list[str | None] = []
    cpu = torch.device("cpu")
    monkeypatch.setattr("df11._quantizer.device_of", lambda said: asked.append(said) or cpu)
    load(flux[1])
    transformers.T5EncoderModel.from_pretrained(flux[1] / "text_encoder_2")
    assert set(asked) == {"cpu"}
    shutil.copytree(flux[1] / "text_encoder_2", tmp_path / "t5")
    transformers.T5EncoderModel.from_pretrained(tmp_path / "t5")
    assert None in asked


def test_without_a_dtype_all_is_as_it_is_stored(flux: Flux) -> None:
    """diffusers would convert everything to F32 here, which would decode all weights."""
    pipeline = load(flux[1], torch_dtype=None)
    assert pipeline.transformer.dtype == torch.bfloat16 and pipeline.vae.dtype == torch.float32
    assert equal(answers(pipeline), answers(load(flux[0])))


def test_another_dtype_is_heeded(flux: Flux) -> None:
    with pytest.warns(UserWarning, match="take their full size"):
        model = KIND.from_pretrained(flux[1], subfolder="transformer", torch_dtype=torch.float32)
    original = KIND.from_pretrained(flux[0], subfolder="transformer", torch_dtype=torch.float32)
    wanted = original.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("place", ["transformer", "vae"])
def test_a_component_by_itself(flux: Flux, place: str, tmp_path: Path) -> None:
    kind = {"transformer": KIND, "vae": diffusers.AutoencoderKL}[place]
    options = {"torch_dtype": DTYPES.get(place, torch.bfloat16)}
    original = kind.from_pretrained(flux[0] / place, **options)
    model, info = kind.from_pretrained(
        flux[1], subfolder=place, output_loading_info=True, **options
    )
    assert not any(info.values()) and not model.training
    assert same_weights(model, original)
    model.save_pretrained(tmp_path / "saved")
    assert containers(tmp_path / "saved") == containers(flux[1] / place)
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "df11"}
    assert same_weights(kind.from_pretrained(tmp_path / "saved", **options), original)
    # A model of several files.
    bf16, folder = saved(original, tmp_path, max_shard_size="2MB")
    assert len(list(bf16.glob("*.safetensors"))) > 2 or place == "vae"
    again = kind.from_pretrained(folder, **options)
    assert same_weights(again, original)
    assert place == "vae" or any(isinstance(p, CompressedTensor) for p in again.parameters())


def test_a_pipeline_is_saved_as_it_was(flux: Flux, tmp_path: Path) -> None:
    pipeline = load(flux[1])
    pipeline.save_pretrained(tmp_path)
    kept = {name: bytes_ for name, bytes_ in containers(flux[1]).items() if len(name.parts) > 1}
    assert kept and containers(tmp_path) == kept
    assert not list(tmp_path.rglob("*.safetensors"))
    assert equal(answers(load(tmp_path)), answers(pipeline))


@pytest.mark.filterwarnings("ignore:.*ordinary")
def test_a_component_that_was_changed_is_saved_so(flux: Flux, tmp_path: Path) -> None:
    model = KIND.from_pretrained(flux[1], subfolder="transformer", torch_dtype=torch.bfloat16)
    projection = model.transformer_blocks[0].attn.to_q
    projection.weight.data = projection.weight.decode() * 2
    projection.bias = torch.nn.Parameter(projection.bias.detach() + 1)
    model.save_pretrained(tmp_path / "saved")
    again = KIND.from_pretrained(tmp_path / "saved", torch_dtype=torch.bfloat16)
    assert equal(df11.state_dict(again).values(), df11.state_dict(model).values())
    assert isinstance(again.transformer_blocks[0].attn.to_q.weight, CompressedTensor)
    df11.verify(tmp_path / "saved", progress=False)
    # Another component's containers lie in the folder of a pipeline, which lists that one.
    shutil.copytree(flux[1], tmp_path / "pipeline")
    with pytest.raises(df11.ParameterError, match="lists another model as transformer"):
        model.save_pretrained(tmp_path / "pipeline/transformer")
    df11.verify(tmp_path / "pipeline", progress=False)


def test_options_by_component_and_for_all(flux: Flux) -> None:
    make, fused = diffusers.PipelineQuantizationConfig, {"mode": "fused"}
    by_name = make(quant_mapping={"transformer": df11.Config(**fused)})
    pipeline = load(flux[1], quantization_config=by_name)
    assert df11.report(pipeline.transformer).modes == ["fused"]
    assert df11.report(pipeline.text_encoder_2).modes == ["exact"]
    pipeline = load(flux[1], quantization_config=make(quant_backend="df11", quant_kwargs=fused))
    assert df11.report(pipeline).modes == ["fused"]


def test_a_bf16_pipeline_is_compressed_while_it_is_loaded(flux: Flux, tmp_path: Path) -> None:
    options = diffusers.PipelineQuantizationConfig(
        quant_backend="df11", quant_kwargs={"mode": "exact"}, components_to_quantize=["transformer"]
    )
    pipeline = load(flux[0], quantization_config=options)
    assert isinstance(pipeline.transformer.proj_out.weight, torch.nn.Parameter)
    weight = pipeline.transformer.transformer_blocks[0].attn.to_q.weight
    assert isinstance(weight, CompressedTensor)
    assert equal(answers(pipeline), answers(load(flux[0])))
    assert df11.report(pipeline, verify=True).verified
    pipeline.transformer.save_pretrained(tmp_path / "saved")
    assert containers(tmp_path / "saved") == containers(flux[1] / "transformer")


@pytest.mark.gpu
def test_cpu_offload(flux: Flux) -> None:
    pooled, hidden, wanted = answers(load(flux[0]).to("cuda"))
    for offload in ("enable_model_cpu_offload", "enable_sequential_cpu_offload"):
        pipeline = load(flux[1])
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


def test_lora(flux: Flux, tmp_path: Path) -> None:
    place = lora(tmp_path / "lora", load(flux[0]))
    original, pipeline = load(flux[0]), load(flux[1])
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
    with pytest.raises(RuntimeError, match=r"fuse_lora\(safe_fusing=True\)"):
        pipeline.fuse_lora()
    with pytest.raises(ValueError, match="unload_lora_weights"):
        pipeline.save_pretrained(tmp_path / "saved")
    pipeline.unload_lora_weights()
    assert equal(answers(pipeline), plain)


@pytest.mark.filterwarnings("ignore:.*ordinary")
def test_a_fused_lora(flux: Flux, tmp_path: Path) -> None:
    """Changed weights become ordinary, and are compressed again when saved."""
    place = lora(tmp_path / "lora", load(flux[0]))
    original, pipeline = load(flux[0]), load(flux[1])
    for each in (original, pipeline):
        each.load_lora_weights(place, adapter_name="style")
        each.fuse_lora(safe_fusing=True)
        each.unload_lora_weights()
    assert equal(answers(pipeline), answers(original))
    fused, kept = (
        getattr(pipeline.transformer.transformer_blocks[0].attn, name).weight
        for name in ("to_q", "to_k")
    )
    assert not isinstance(fused, CompressedTensor) and isinstance(kept, CompressedTensor)
    pipeline.transformer.save_pretrained(tmp_path / "saved")
    again = KIND.from_pretrained(tmp_path / "saved")
    assert same_weights(again, original.transformer)
    assert isinstance(again.transformer_blocks[0].attn.to_q.weight, CompressedTensor)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["flux", "wan"])
def test_fused_projections(kind: str, tmp_path: Path) -> None:
    """diffusers stacks the weights of three projections into a new one."""
    made = getattr(pipelines, kind)
    saved(made().bfloat16().eval(), tmp_path)
    original, model = (
        type(made()).from_pretrained(tmp_path / name, torch_dtype=torch.bfloat16)
        for name in ("bf16", "df11")
    )
    plain = original(**inputs(kind)).sample
    for each in (original, model):
        each.fuse_qkv_projections()
    fused = [value for name, value in model.named_parameters() if "to_qkv.weight" in name]
    assert fused and (kind == "flux" or all(isinstance(value, CompressedTensor) for value in fused))
    assert torch.equal(model(**inputs(kind)).sample, original(**inputs(kind)).sample)
    for each in (original, model):
        each.unfuse_qkv_projections()
    assert torch.equal(model(**inputs(kind)).sample, plain)


# ---- single files ----

SD3 = diffusers.SD3Transformer2DModel


class Single(NamedTuple):
    """A model, and a checkpoint of it in its original format."""

    folder: Path
    file: Path
    container: Path
    original: Any


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Single:
    root = tmp_path_factory.mktemp("single")
    torch.manual_seed(4)
    model = pipelines.sd3().bfloat16()
    model.save_pretrained(root / "bf16")
    file, container = root / "sd3.safetensors", root / "sd3.df11"
    save_file({name: v.contiguous() for name, v in in_original_format(model).items()}, file)
    df11.compress(file, container, progress=False)
    original = SD3.from_single_file(file, config=str(root / "bf16"), torch_dtype=torch.bfloat16)
    assert equal(original.state_dict().values(), model.state_dict().values())
    return Single(root / "bf16", file, container, original)


def from_single(single: Single, source: Any, **options: Any) -> Any:
    options = {"torch_dtype": torch.bfloat16, **options}
    return SD3.from_single_file(source, config=str(single.folder), **options)


OPTIONS: list[Any] = [None, df11.Config(mode="fused"), {"quant_method": "df11", "mode": "fused"}]


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS, ids=["none", "config", "dict"])
@pytest.mark.parametrize("kind", ["file", "container"])
def test_from_single_file(single: Single, kind: str, options: Any, tmp_path: Path) -> None:
    if kind == "file" and options is None:
        options = df11.Config()
    said = {} if options is None else {"quantization_config": options}
    model = from_single(single, getattr(single, kind), **said)
    assert same_weights(model, single.original)
    weight = model.transformer_blocks[0].attn.to_q.weight
    assert isinstance(weight, CompressedTensor)
    assert weight.exact == (options is None or getattr(options, "mode", "fused") == "exact")
    expected = single.original(**inputs("sd3")).sample
    assert torch.equal(model(**inputs("sd3")).sample, expected)
    assert df11.report(model, verify=True).verified
    # Saved with diffusers' names, by which its loader finds them.
    model.save_pretrained(tmp_path / "saved")
    again = SD3.from_pretrained(tmp_path / "saved", torch_dtype=torch.bfloat16)
    assert same_weights(again, single.original)
    assert isinstance(again.transformer_blocks[0].attn.to_q.weight, CompressedTensor)


def test_single_files_of_others(single: Single, tmp_path: Path) -> None:
    """Models without options of df11 load as before, also after others."""
    plain = from_single(single, single.file)
    assert not any(isinstance(value, CompressedTensor) for value in plain.parameters())
    model = from_single(single, single.container, torch_dtype=None)
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    with pytest.warns(UserWarning, match="take their full size"):
        wide = from_single(single, single.container, torch_dtype=torch.float32)
    assert wide.proj_out.weight.dtype == torch.float32
    torch.save(dict(plain.state_dict()), tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"files of safetensors, not .*x\.ckpt; load it in BF16"):
        from_single(single, tmp_path / "x.ckpt", quantization_config=df11.Config())
    other = diffusers.QuantoConfig(weights_dtype="int8")
    with pytest.raises(ValueError, match="is compressed; leave quantization_config out"):
        from_single(single, single.container, quantization_config=other)
    component = SD3.from_pretrained(single.folder, torch_dtype=torch.bfloat16)
    assert equal(component.state_dict().values(), single.original.state_dict().values())


@torch.no_grad()
def test_attached_by_names_of_the_original_format(single: Single) -> None:
    model = df11.attach(pipelines.sd3(), single.container, device="cpu")
    assert same_weights(model, single.original)
    assert isinstance(model.transformer_blocks[0].attn.to_q.weight, CompressedTensor)
    expected = single.original(**inputs("sd3")).sample
    assert torch.equal(model(**inputs("sd3")).sample, expected)
    wrong = pipelines.unet()
    with pytest.raises((df11.MissingError, KeyError)):
        df11.attach(wrong, single.container, device="cpu")


def test_copies(flux: Flux) -> None:
    model = KIND.from_pretrained(flux[1], subfolder="transformer")
    state = df11.state_dict(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert equal(df11.state_dict(other).values(), state.values())


def test_what_is_refused(flux: Flux, tmp_path: Path) -> None:
    place, plain = flux[1] / "transformer", flux[0] / "transformer"
    model = KIND.from_pretrained(place)
    shutil.copy(place / "config.json", tmp_path)
    for work, error, words in [
        (lambda: KIND.from_pretrained(place, device_map="auto"), ValueError, r"Config\(memory="),
        (lambda: KIND.from_pretrained(place, device_map={"": None}), ValueError, "name a device"),
        (model.dequantize, NotImplementedError, "df11 decompress"),
        (
            lambda: KIND.from_pretrained(plain, quantization_config=df11.Config(bits=4)),
            ValueError,
            "its options are mode, residence",
        ),
        (lambda: model.save_pretrained(tmp_path, variant="fp16"), ValueError, "takes no variant"),
        (lambda: KIND.from_pretrained(tmp_path), FileNotFoundError, r"holds no \*\.df11"),
    ]:
        with pytest.raises(error, match=words):
            work()


def test_the_card_of_a_pipeline_loads_it(
    flux: Flux, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(flux[0], "bf16")
    subprocess.run([sys.executable, "-m", "df11", "compress", "bf16", "-q"], check=True)
    assert df11.verify("bf16-df11", progress=False).files == 10
    card = Path("bf16-df11/README.md").read_text()
    # test_hub.py::test_diffusers_alone loads without it.
    assert "`from_pretrained` needs no `import df11` if pip installed the package" in card
    found = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert found
    # A pipeline without tokenizers loads without them.
    code = found[1].replace('"bf16-df11"', '"bf16-df11", tokenizer=None, tokenizer_2=None')
    names: dict[str, Any] = {}
    exec(code, names)
    assert "df11: active" in str(df11.report(names["pipeline"]))
    assert equal(answers(names["pipeline"]), answers(load(Path("bf16"))))


def test_a_pipeline_comes_back(flux: Flux, tmp_path: Path) -> None:
    report = df11.compress(flux[0], tmp_path / "df11", progress=False)
    assert report.shards == 5
    assert df11.estimate(flux[0], progress=False).stored_bytes == report.stored_bytes
    df11.convert(tmp_path / "df11", tmp_path / "gap", layout="gap", progress=False)
    df11.decompress(tmp_path / "gap", tmp_path / "back", progress=False)
    paths = [path for path in flux[0].rglob("*") if path.is_file()]
    assert len(paths) == 10
    for path in paths:
        assert (tmp_path / "back" / path.relative_to(flux[0])).read_bytes() == path.read_bytes()
    (tmp_path / "gap" / "vae").rename(tmp_path / "away")
    found = df11.verify(tmp_path / "gap", progress=False)
    assert list(found.unchecked) == ["component vae, which is missing"]
    with pytest.raises(df11.ParameterError, match="pipeline"):
        df11.open(tmp_path / "gap")
