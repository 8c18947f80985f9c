"""Compressed folders whose config names another quantization, which decodes all weights: gpt-oss
with experts in MXFP4. `test_fp8.py` has those that keep weights compressed.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run
from hub import Hub, Repository
from models import compressed, equal, prompt, seeded
from safetensors.torch import load_file, save_file
from stores import upload
from transformers import AutoModelForCausalLM, GptOssConfig

import df11

WORDS = "another quantization, whose quantizer loads it"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return gpt_oss(tmp_path_factory.mktemp("mxfp4") / "gpt-oss")


def gpt_oss(folder: Path) -> tuple[Path, Path]:
    """A folder of gpt-oss with experts in MXFP4, and the compressed one beside it."""
    config = GptOssConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_local_experts=4, num_experts_per_tok=2,
        vocab_size=512, layer_types=["sliding_attention", "full_attention"], dtype="bfloat16",
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    seeded(AutoModelForCausalLM.from_config(config)).save_pretrained(folder)
    quantize_experts(folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    said["quantization_config"] = {"quant_method": "mxfp4"}
    said["quantization_config"]["modules_to_not_convert"] = [*kept, "lm_head"]
    (folder / "config.json").write_text(json.dumps(said))
    return folder, compressed(folder, folder.with_name("gpt-oss-df11"))


def quantize_experts(file: Path) -> None:
    """Puts random blocks of 32 weights of 4 bits, and their scales, in the place of experts."""
    weights, generator = load_file(file), torch.Generator().manual_seed(3)
    for name in [name for name in weights if name.endswith(("up_proj", "down_proj"))]:
        experts, inner, outer = weights.pop(name).shape
        blocks = experts, outer, inner // 32
        random = {"dtype": torch.uint8, "generator": generator}
        weights[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), **random)
        weights[f"{name}_scales"] = torch.randint(118, 124, blocks, **random)
    save_file(weights, file, {"format": "pt"})


def logits(folder: Path, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    return model(prompt(2, 9)).logits


@pytest.mark.parametrize("options", [{}, {"dtype": "auto"}, {"dtype": torch.float32}])
@torch.no_grad()
def test_gpt_oss_in_mxfp4_is_loaded_by_its_quantizer(
    both: tuple[Path, Path], options: dict[str, Any]
) -> None:
    with pytest.warns(UserWarning, match=WORDS):
        found = logits(both[1], **options)
    assert torch.isfinite(found).all() and equal([found], [logits(both[0], **options)])


@torch.no_grad()
def test_a_folder_in_a_store(both: tuple[Path, Path], bucket: str) -> None:
    upload(bucket, both[1], "foreign/gpt-oss")
    with pytest.warns(UserWarning, match=WORDS):
        found = logits(df11.link("s3://models/foreign/gpt-oss"))
    assert equal([found], [logits(both[0])])


@torch.no_grad()
def test_repositories_of_the_hub(both: tuple[Path, Path], tmp_path: Path) -> None:
    """One of containers, whose weights transformers does not find, one of ordinary weights, and one
    without weights.
    """
    (tmp_path / "none").mkdir()
    shutil.copy(both[1] / "config.json", tmp_path / "none")
    hub, script = (
        Hub(),
        """
        import torch
        from transformers import AutoModelForCausalLM
        load = AutoModelForCausalLM.from_pretrained
        x = torch.arange(1, 10).reshape(1, -1)
        found = [load(name)(x).logits for name in ("org/ordinary", "org/containers")]
        assert torch.equal(*found)
        try:
            load("org/none")
        except OSError as error:
            print(error)
        """,
    )
    folders = {"ordinary": both[0], "containers": both[1], "none": tmp_path / "none"}
    hub.repositories = {f"org/{name}": Repository(each) for name, each in folders.items()}
    settings = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url}
    settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    for is_off_line in ("0", "1"):
        said = run(script, **settings, HF_HUB_OFFLINE=is_off_line)
        assert "org/none" in said and "model.safetensors" in said
    assert not [name for name in hub.downloaded() if "containers/model.safetensors" in name]


@torch.no_grad()
def test_a_config_without_a_dtype(both: tuple[Path, Path], tmp_path: Path) -> None:
    copies = [shutil.copytree(each, tmp_path / each.name) for each in both]
    for copy in copies:
        said = json.loads((copy / "config.json").read_text())
        said.pop("dtype")
        (copy / "config.json").write_text(json.dumps(said))
    with pytest.warns(UserWarning, match=WORDS):
        found = logits(copies[1])
    assert equal([found], [logits(copies[0])])


@torch.no_grad()
def test_ordinary_weights_in_the_folder_come_first(both: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(both[1], tmp_path / "mixed")
    shutil.copy(both[0] / "model.safetensors", folder)
    (folder / "model.df11").write_bytes(b"no container")
    assert equal([logits(folder)], [logits(both[0])])


def test_damage_is_found(both: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(both[1], tmp_path / "damaged")
    file = folder / "model.df11"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    file.write_bytes(data)
    with pytest.warns(UserWarning, match=WORDS), pytest.raises(df11.CorruptError):
        logits(folder)
