"""Fine-tunes as differences from their base: found, checked, and decoded to the same bits."""

import copy
from pathlib import Path

import pytest
import torch
import transformers
from models import config_of, equal, load, prompt, seeded
from safetensors.torch import load_file

import df11
import df11.torch


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A base, a fine-tune of it, and this as differences."""
    model = seeded(transformers.AutoModelForCausalLM.from_config(config_of("llama")))
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-4 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "tune")
    report = df11.compress(
        tmp_path / "tune", tmp_path / "df11", base=tmp_path / "base", progress=False
    )
    assert report.delta_tensors > 5
    return tmp_path


def test_every_way_to_read_gives_the_same_bits(folders: Path) -> None:
    expected = load_file(folders / "tune/model.safetensors")
    model = df11.open(folders / "df11")
    assert "delta" in {tensor.encoding for tensor in model.values()}
    loaded = df11.torch.load_file(folders / "df11")
    assert loaded.keys() == expected.keys()
    with df11.safe_open(folders / "df11/model.df11", framework="pt") as opened:
        for name, value in expected.items():
            assert torch.equal(loaded[name], value) and torch.equal(model[name].torch(), value)
            assert torch.equal(opened.get_slice(name)[3:40], value[3:40]), name


def test_the_base_is_named_or_missing(folders: Path, tmp_path: Path) -> None:
    (folders / "base").rename(folders / "moved")
    name = "model.embed_tokens.weight"
    expected = load_file(folders / "tune/model.safetensors")[name]
    with pytest.raises(df11.NoBaseError, match=r'"base".*base=') as caught:
        df11.open(folders / "df11")[name].torch()
    assert caught.value.remedy is not None and "\n" not in str(caught.value)
    moved = folders / "moved"
    assert torch.equal(df11.open(folders / "df11", base=moved)[name].torch(), expected)
    assert torch.equal(df11.torch.load_file(folders / "df11", base=moved)[name], expected)
    with df11.safe_open(folders / "df11", framework="pt", base=moved) as opened:
        assert torch.equal(opened.get_tensor(name), expected)
    assert df11.verify(folders / "df11", progress=False).unchecked
    assert not df11.verify(folders / "df11", base=moved, progress=False).unchecked
    df11.decompress(folders / "df11", tmp_path / "back", base=moved, progress=False)
    files = [folder / "model.safetensors" for folder in (tmp_path / "back", folders / "tune")]
    assert files[0].read_bytes() == files[1].read_bytes()
    df11.convert(folders / "df11", tmp_path / "alone.df11", base=moved, progress=False)
    assert torch.equal(df11.open(tmp_path / "alone.df11")[name].torch(), expected)
    with pytest.raises(df11.NoBaseError):
        load(folders / "df11")


def test_another_base_is_refused(folders: Path) -> None:
    df11.compress(folders / "tune", folders / "other.df11", progress=False)
    with pytest.raises(df11.NoBaseError, match=r"other\.df11"):
        df11.open(folders / "df11", base=folders / "other.df11")


def test_a_model_gives_the_same_logits(folders: Path) -> None:
    original, compressed = load(folders / "tune"), load(folders / "df11")
    assert equal(compressed.state_dict().values(), original.state_dict().values())
    assert torch.equal(compressed(prompt()).logits, original(prompt()).logits)


def test_a_module_has_exact_values(folders: Path) -> None:
    original = load(folders / "tune")
    (folders / "base").rename(folders / "moved")
    module = seeded(copy.deepcopy(original))
    attached = df11.attach(module, folders / "df11", device="cpu", base=folders / "moved")
    found = df11.state_dict(attached)
    assert equal((found[name] for name in original.state_dict()), original.state_dict().values())


def test_estimates_are_exact(folders: Path) -> None:
    out = folders / "one.df11"
    estimate = df11.estimate(folders / "tune", out, base=folders / "base", progress=False)
    report = df11.compress(folders / "tune", out, base=folders / "base", progress=False)
    assert estimate == report and report.stored_bytes == out.stat().st_size
