"""Mixtures of experts: each of transformers' ways to run them, and weights that it transposes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
import transformers
from conftest import Decoded, on_devices
from models import SMALL, Folders, compressed, load, prompt, seeded

import df11
from df11._tensor import CompressedTensor

IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]


@pytest.fixture(scope="module")
def transposed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose experts transformers transposes, in BF16 and compressed."""
    root = tmp_path_factory.mktemp("mixtures")
    seeded(vision_language_model()).save_pretrained(root / "bf16")
    file = root / "bf16/model.safetensors"
    # The layout of published checkpoints of such models.
    tensors = {
        name: value.transpose(1, 2).contiguous() if ".experts." in name else value
        for name, value in safetensors.load_file(file).items()
    }
    safetensors.save_file(tensors, file, metadata={"format": "pt"})
    return root / "bf16", compressed(root / "bf16", root / "df11")


@on_devices
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_compute_as_in_bf16(
    folders: Folders, name: str, implementation: str, device: str
) -> None:
    original, model = folders.pair(name, device, experts_implementation=implementation)
    experts = [value for name, value in model.named_parameters() if ".experts." in name]
    assert experts and all(isinstance(value, CompressedTensor) for value in experts)
    # Without a copy: each expert is where the container has it.
    apart = [value for value in experts if not value.parts[0].is_fast]
    assert all(value.dim() == 3 for value in experts)
    assert all(len(value.parts) > 1 for value in apart) and bool(apart) == (device == "cpu")
    with torch.no_grad():
        for rows, length in [(1, 1), (2, 9)]:
            tokens = prompt(rows, length).to(device)
            assert torch.equal(model(tokens).logits, original(tokens).logits)


@torch.no_grad()
def test_only_routed_experts_are_decoded(folders: Folders, decoded: list[Decoded]) -> None:
    original, model = (each.model.layers[0].mlp for each in folders.pair("mixtral"))
    x = torch.randn(1, 1, 128).bfloat16()
    assert torch.equal(model(x), original(x))
    experts = sum(value.numel() for value in model.experts.parameters())
    gate = model.gate.weight.numel()
    large = [each.count for each in decoded if each.count > gate]
    assert sum(large) == experts // 2  # two of four


def vision_language_model() -> Any:
    text = {
        **SMALL, "moe_intermediate_size": 192, "num_hidden_layers": 2, "num_experts": 4,
        "num_experts_per_tok": 2, "decoder_sparse_step": 1,
        "rope_parameters": {"rope_type": "default", "mrope_section": [8, 4, 4], "rope_theta": 1e4},
    }  # fmt: skip
    vision = {
        "hidden_size": 64, "intermediate_size": 128, "depth": 2, "num_heads": 4,
        "out_hidden_size": 128, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    config = transformers.Qwen3VLMoeConfig(
        text_config=text, vision_config=vision, image_token_id=500, vision_start_token_id=501,
        vision_end_token_id=502, video_token_id=503, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


@on_devices
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_experts_that_transformers_transposes(
    transposed: tuple[Path, Path], implementation: str, device: str
) -> None:
    bf16, folder = transposed
    stored = df11.open(folder)["model.language_model.layers.0.mlp.experts.down_proj"]
    kind = transformers.AutoModelForImageTextToText
    original, model = (
        kind.from_pretrained(path, device_map=device, experts_implementation=implementation)
        for path in (bf16, folder)
    )
    down = model.model.language_model.layers[0].mlp.experts.down_proj
    assert stored.shape == (4, 192, 128) and down.shape == (4, 128, 192)
    assert isinstance(down, CompressedTensor) and down.transposed
    report = df11.report(model, verify=True)
    assert "ordinary" not in {form for name, form in report.residences.items() if "experts" in name}
    inputs = {
        "input_ids": torch.cat([prompt(1, 5), torch.tensor([[501, 500, 500, 500, 500, 502]])], 1),
        "pixel_values": torch.randn(16, 1536, generator=torch.Generator().manual_seed(1)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == 500).long()
    inputs = {name: value.to(device) for name, value in inputs.items()}
    with torch.no_grad():
        expected = original(**inputs).logits
        assert torch.isfinite(expected).all()
        assert torch.equal(model(**inputs).logits, expected)
        assert torch.equal(copy.deepcopy(model)(**inputs).logits, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("residence", ["stored", "fast"])
@torch.no_grad()
def test_fused_experts_wait_for_nothing(folders: Folders, residence: str) -> None:
    """In the fast layout kernels read the router's choice where it is: CUDA graphs capture them."""
    options = df11.Config(mode="fused", residence=residence)
    original = load(folders.bf16("qwen3-moe"), "cuda")
    model = load(folders.df11("qwen3-moe"), "cuda", quantization_config=options)
    for rows, length in [(1, 1), (4, 40)]:
        tokens = prompt(rows, length).cuda()
        found, expected = (each(tokens).logits.float() for each in (model, original))
        assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    if residence == "stored":
        return
    experts = model.model.layers[0].mlp
    x = torch.randn(1, 8, 128, device="cuda").to(torch.bfloat16)
    for _ in range(3):
        expected = experts(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = experts(x)
    graph.replay()
    assert torch.equal(*(y[0] if isinstance(y, tuple) else y for y in (found, expected)))
