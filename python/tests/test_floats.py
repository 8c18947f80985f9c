"""Tensors of FP8, F16 and F32: compressed in a container, decoded when they are loaded, exact."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import UNTIED, adapted, config_of, equal, load, prompt, saved, seeded
from safetensors.torch import load_file, save_file

import df11
import df11.torch

NAMES = ["e4m3", "e5m2", "f16", "f32", "f32-of-bf16", "f32-of-f16", "odd", "special"]


def floats() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    normal = 0.02 * torch.randn(96, 520, generator=generator)
    special = normal.clone()
    bits = special.view(torch.int32)
    words = [0, 1, 0x007FFFFF, 0x7F800000, 0x7F800001, 0x7FC12345, 0x7FFFFFFF]
    bits[0, : len(words)] = torch.tensor(words, dtype=torch.int32)
    bits[1] = bits[0] | -(1 << 31)
    return {
        "e4m3": (5000 * normal).to(torch.float8_e4m3fn),
        "e5m2": (5000 * normal).to(torch.float8_e5m2),
        "f16": normal.half(),
        "f32": normal,
        "f32-of-bf16": normal.bfloat16().float(),
        "f32-of-f16": (normal / 1000).half().float(),
        "odd": normal.flatten()[:33333].clone(),
        "special": special,
        "bf16": normal.bfloat16(),
        "steps": torch.arange(9000),
    }


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("floats")
    file, container = folder / "x.safetensors", folder / "x.df11"
    save_file(floats(), file)
    df11.compress(file, container, progress=False)
    return file, container


def same(one: Any, other: Any) -> bool:
    """The same bits, of NaNs too."""
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_they_are_compressed(both: tuple[Path, Path]) -> None:
    model = df11.open(both[1])
    assert {name for name in model if model[name].encoding == "float"} == set(NAMES)
    bits = {name: model[name].bits_per_element for name in NAMES}
    # Arrays of such small tensors have codebooks of some hundred bytes to a kilobyte.
    most = {"e4m3": 6.9, "e5m2": 5.9, "f16": 14, "f32": 27, "f32-of-bf16": 11, "f32-of-f16": 14.2}
    assert all(bits[name] < most[name] for name in most), bits


def test_every_way_to_read_gives_the_same_bits(both: tuple[Path, Path]) -> None:
    expected, model = load_file(both[0]), df11.open(both[1])
    loaded = df11.torch.load_file(both[1])
    assert loaded.keys() == expected.keys()
    with df11.safe_open(both[1], framework="pt") as opened:
        for name, value in expected.items():
            assert same(loaded[name], value) and same(opened.get_tensor(name), value)
            assert same(model[name].torch(), value)
            part = opened.get_slice(name)[3:40]
            assert same(part, value[3:40]), name
            if value.dim() == 2:
                assert same(opened.get_slice(name)[5:70, 250:300], value[5:70, 250:300]), name


def test_they_come_back_byte_for_byte(both: tuple[Path, Path], tmp_path: Path) -> None:
    df11.decompress(both[1], tmp_path / "back", progress=False)
    assert (tmp_path / "back" / "x.safetensors").read_bytes() == both[0].read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_module_has_exact_values(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    module = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 128)).to(dtype)
    save_file(module.state_dict(), tmp_path / "x.safetensors")
    df11.compress(tmp_path / "x.safetensors", tmp_path / "x.df11", progress=False)
    attached = df11.attach(copy.deepcopy(module), tmp_path / "x.df11", device="cpu")
    assert equal(attached.state_dict().values(), module.state_dict().values())
    reasons = df11.report(attached, verify=True).ordinary
    assert "of a dtype that is decoded at load" in reasons


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_model_gives_the_same_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    config = config_of("llama")
    model = transformers.AutoModelForCausalLM.from_config(config)
    model = seeded(model).float().to(dtype)
    assert UNTIED and model.config.tie_word_embeddings is False
    before, after = saved(model, tmp_path)
    encodings = {tensor.encoding for tensor in df11.open(after).values()}
    assert "float" in encodings
    original, compressed = load(before, dtype=dtype), load(after, dtype=dtype)
    assert equal(compressed.state_dict().values(), original.state_dict().values())
    assert torch.equal(compressed(prompt()).logits, original(prompt()).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_model_is_saved_and_merged(tmp_path: Path, dtype: torch.dtype) -> None:
    """As it was, changed, compressed while it is loaded, and with an adapter merged."""
    peft = pytest.importorskip("peft")
    before, after = saved(
        seeded(transformers.AutoModelForCausalLM.from_config(config_of("llama"))).to(dtype),
        tmp_path,
    )
    model, made = load(after), load(before, quantization_config=df11.Config())
    for each, name in ((model, "copied"), (made, "made")):
        each.save_pretrained(tmp_path / name)
        container = (tmp_path / name / "model.df11").read_bytes()
        assert container == (after / "model.df11").read_bytes()
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "changed")
    again = load(tmp_path / "changed")
    assert again.dtype == dtype
    assert equal(again.state_dict().values(), model.state_dict().values())
    adapted(load(before)).save_pretrained(tmp_path / "adapter")
    df11.merge_adapter(after, tmp_path / "adapter", tmp_path / "merged")
    expected = peft.PeftModel.from_pretrained(load(before), tmp_path / "adapter")
    merged, wanted = load(tmp_path / "merged"), expected.merge_and_unload()
    assert equal(merged.state_dict().values(), wanted.state_dict().values())
