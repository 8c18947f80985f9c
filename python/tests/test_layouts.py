"""Weights that a model has otherwise than its container stores them."""

import copy
from pathlib import Path

import pytest
import torch
import transformers
from models import load, prompt, same_weights, saved, seeded
from safetensors.torch import save_file
from torch import nn

import df11
from df11._tensor import CompressedTensor


def test_experts_that_are_interleaved_stay_compressed(tmp_path: Path) -> None:
    """transformers takes every second row of each expert: no window of what is stored."""
    name = "Inkling2TextConfig"
    if not hasattr(transformers, name):
        pytest.skip(f"this release has no {name}")
    sizes = {"vocab_size": 512, "unpadded_vocab_size": 500, "hidden_size": 128, "rel_extent": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 32, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2}
    sizes |= {"swa_head_dim": 32, "sliding_window_size": 16, "moe_intermediate_size": 384}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 256}
    config = getattr(transformers, name)(**sizes, eos_token_id=2, dtype="bfloat16")
    bf16, folder = saved(seeded(transformers.AutoModelForCausalLM.from_config(config)), tmp_path)
    original, model = load(bf16).requires_grad_(False), load(folder)
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    assert isinstance(weight, CompressedTensor) and weight.nbytes < 0.75 * 2 * weight.numel()
    assert same_weights(model, original)
    assert torch.equal(model(prompt()).logits, original(prompt()).logits)
    assert df11.report(model, verify=True).verified
    model.save_pretrained(tmp_path / "saved")
    assert same_weights(load(tmp_path / "saved"), original)


@torch.no_grad()
def test_kernels_of_convolutions_and_odd_widths(tmp_path: Path) -> None:
    """What is not stored in tiles of rows is encoded while it is loaded, or a report says why not."""
    module = nn.ModuleDict(
        {
            "conv": nn.Conv1d(128, 256, 3),
            "odd": nn.Linear(250, 128, bias=False),
            "thin": nn.Linear(64, 512, bias=False),
        }
    )
    seeded(module)
    save_file(
        {f"{name}.weight": each.weight for name, each in module.items()}
        | {"conv.bias": module["conv"].bias},
        tmp_path / "x.safetensors",
    )
    df11.compress(tmp_path / "x.safetensors", tmp_path / "x.df11", progress=False)
    model = df11.attach(copy.deepcopy(module), tmp_path / "x.df11", device="cpu")
    report = df11.report(model, verify=True)
    assert report.residences["conv.weight"] == "stored"
    assert torch.equal(model["conv"].weight.decode(), module["conv"].weight)
    x = torch.randn(1, 128, 9).bfloat16()
    assert torch.equal(model["conv"](x), module["conv"](x))
    assert {"not a multiple of 8 wide, as the kernels need"} <= report.ordinary.keys()
    assert any(reason.startswith("too narrow for the kernels") for reason in report.ordinary)


def test_scaled_layers_of_rwkv(tmp_path: Path) -> None:
    """The model divides weights of deep layers in place when it first runs."""
    config = transformers.RwkvConfig(
        vocab_size=512, context_length=64, hidden_size=128, num_hidden_layers=3, rescale_every=1
    )
    bf16, folder = saved(seeded(transformers.RwkvForCausalLM(config)), tmp_path)
    original, model = load(bf16).requires_grad_(False), load(folder)
    with torch.no_grad(), pytest.warns(UserWarning, match="ordinary tensor from now on"):
        assert torch.equal(model(prompt()).logits, original(prompt()).logits)
    blocks = [block.attention.output.weight for block in model.rwkv.blocks]
    assert [isinstance(weight, CompressedTensor) for weight in blocks] == [True, False, False]
