"""Weights that a model has otherwise than its container stores them."""

import copy
from pathlib import Path

import pytest
import torch
import transformers
from conftest import on_devices
from models import SMALL, load, prompt, same_weights, saved, seeded
from safetensors.torch import save_file
from torch import nn
from weights import WEIGHTS, compressed

import df11
from df11._encoding import encode
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


@on_devices
@torch.no_grad()
def test_kernels_of_convolutions_and_odd_widths(tmp_path: Path, device: str) -> None:
    """Others than tiles of rows are encoded while they are loaded, or a report says why not."""
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
    model = df11.attach(copy.deepcopy(module), tmp_path / "x.df11", device=device)
    report = df11.report(model, verify=True)
    # The fast layout is for rows of a multiple of 8 weights, and these have 3.
    assert report.residences["conv.weight"] == "stored"
    assert report.residences["thin.weight"] == ("fast" if device == "cuda" else "ordinary")
    assert torch.equal(model["conv"].weight.decode().cpu(), module["conv"].weight)
    x = torch.randn(1, 128, 9).bfloat16().to(device)
    assert torch.equal(model["conv"](x), module.to(device)["conv"](x))
    assert {"not a multiple of 8 wide, as the kernels need"} <= report.ordinary.keys()
    # The fast layout of GPUs is for narrow ones too.
    assert device == "cuda" or any(
        reason.startswith("too narrow for the kernels") for reason in report.ordinary
    )


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


def youtu(folder: Path) -> tuple[Path, Path]:
    """A model whose class clears the row of padding, which holds something in the checkpoint."""
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 320}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 16, "v_head_dim": 32}
    special = {"pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.YoutuConfig(**sizes, **special, qk_nope_head_dim=16, dtype="bfloat16")
    return saved(seeded(transformers.AutoModelForCausalLM.from_config(config)), folder)


def test_the_row_of_padding_is_what_transformers_makes_it(tmp_path: Path) -> None:
    bf16, folder = youtu(tmp_path)
    original = load(bf16).requires_grad_(False)
    assert not original.model.embed_tokens.weight[3].any()
    for model in (load(folder), load(bf16, quantization_config=df11.Config())):
        assert same_weights(model, original)
        assert isinstance(model.model.embed_tokens.weight, CompressedTensor)
        tokens = prompt()
        tokens[0, 3:5] = 3
        assert torch.equal(model(tokens).logits, original(tokens).logits)
        assert df11.report(model, verify=True).verified
    # Others' rows are what they hold.
    config = transformers.LlamaConfig(**{**SMALL, "pad_token_id": 3}, dtype="bfloat16")
    bf16, folder = saved(seeded(transformers.LlamaForCausalLM(config)), tmp_path / "other")
    assert load(folder).model.embed_tokens.weight[3].decode().any()
    assert same_weights(load(folder), load(bf16))


def test_zeros_are_cleared() -> None:
    weight = torch.cat([compressed("q"), compressed("q")])
    for part in (weight[3], weight.t()):
        with pytest.raises(RuntimeError, match=r"zero_.* would change"):
            part.zero_()
    dense = torch.zeros(32, 256, dtype=torch.bfloat16)
    dense[1:] = WEIGHTS["q"][:31]
    made, (part,) = encode(dense) or ([], [None])
    assert part is not None
    whole = CompressedTensor(made, [part], dense.shape)
    for row in (whole[0], whole[:1].t()):
        assert row.zero_() is row and not row.decode().any()
