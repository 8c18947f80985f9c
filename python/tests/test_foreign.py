"""Compressed folders whose config names another quantization: gpt-oss with experts in MXFP4, and a
Llama in FP8, which transformers dequantizes where no GPU is.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from models import compressed, config_of, equal, prompt, seeded
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig

import df11

WORDS = "another quantization, whose quantizer loads it"
BLOCK = 64


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of gpt-oss with experts in MXFP4, and the compressed one."""
    folder = tmp_path_factory.mktemp("mxfp4") / "gpt-oss"
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


def quantize_to_fp8(file: Path) -> None:
    """Puts FP8 weights in the place of those of linear layers, with a scale for each block."""
    weights = load_file(file)
    for name in [name for name in weights if name.endswith("proj.weight")]:
        value = weights[name].float()
        rows, columns = (-(-size // BLOCK) for size in value.shape)
        scales = torch.empty(rows, columns)
        made = torch.empty(value.shape, dtype=torch.float8_e4m3fn)
        for row in range(rows):
            for column in range(columns):
                at = tuple(slice(BLOCK * i, BLOCK * (i + 1)) for i in (row, column))
                scales[row, column] = value[at].abs().max() / 448
                made[at] = (value[at] / scales[row, column]).to(torch.float8_e4m3fn)
        weights[name], weights[name.replace("weight", "weight_scale_inv")] = made, scales
    save_file(weights, file, {"format": "pt"})


@torch.no_grad()
def test_fp8_is_loaded_by_its_quantizer(tmp_path: Path) -> None:
    seeded(AutoModelForCausalLM.from_config(config_of("llama"))).save_pretrained(tmp_path / "fp8")
    quantize_to_fp8(tmp_path / "fp8" / "model.safetensors")
    said = json.loads((tmp_path / "fp8" / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "dequantize": True}
    said["quantization_config"] = {**method, "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(said))
    folder = compressed(tmp_path / "fp8", tmp_path / "df11")
    held = df11.open(folder)
    assert {held[name].dtype for name in held if held[name].encoding == "float"} == {"F8_E4M3"}
    with pytest.warns(UserWarning, match=WORDS):
        found = logits(folder)
    assert torch.isfinite(found).all() and equal([found], [logits(tmp_path / "fp8")])
