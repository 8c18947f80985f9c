"""Mixtures of experts: each of transformers' ways to run them, and weights that it transposes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from models import causal, seeded  # noqa: E402

import df11  # noqa: E402
from df11._tensor import CompressedTensor  # noqa: E402

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

pytestmark = pytest.mark.usefixtures("compressed_on_gpus")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixtures")


def folders(root: Path, name: str) -> tuple[Path, Path]:
    bf16, folder = root / name / "bf16", root / name / "df11"
    if not folder.exists():
        if name == "qwen3-vl-moe":
            seeded(vision_language_model()).save_pretrained(bf16)
            transpose_experts(bf16 / "model.safetensors")
        else:
            causal(name, bf16)
        df11.compress(bf16, folder, progress=False)
    return bf16, folder


def prompt(rows: int, length: int) -> Any:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(1, 500, (rows, length), generator=generator)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_compute_as_in_bf16(
    root: Path, name: str, implementation: str, device: str
) -> None:
    kind = transformers.AutoModelForCausalLM
    original, model = (
        kind.from_pretrained(path, device_map=device, experts_implementation=implementation)
        for path in folders(root, name)
    )
    experts = [value for name, value in model.named_parameters() if ".experts." in name]
    assert all(isinstance(value, CompressedTensor) and value.dim() == 3 for value in experts)
    with torch.no_grad():
        for rows, length in [(1, 1), (2, 9)]:
            tokens = prompt(rows, length).to(device)
            assert torch.equal(model(tokens).logits, original(tokens).logits)


def transpose_experts(file: Path) -> None:
    """As checkpoints of such models are published."""
    tensors = safetensors.load_file(str(file))
    changed = {
        name: value.transpose(1, 2).contiguous() if ".experts." in name else value
        for name, value in tensors.items()
    }
    safetensors.save_file(changed, str(file), metadata={"format": "pt"})


def vision_language_model() -> Any:
    text = {
        "hidden_size": 128,
        "intermediate_size": 320,
        "moe_intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "vocab_size": 512,
        "rope_parameters": {"rope_type": "default", "mrope_section": [8, 4, 4], "rope_theta": 1e4},
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "depth": 2,
        "num_heads": 4,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    config = transformers.Qwen3VLMoeConfig(
        text_config=text, vision_config=vision, image_token_id=500, vision_start_token_id=501,
        vision_end_token_id=502, video_token_id=503, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_experts_that_transformers_transposes(root: Path, implementation: str, device: str) -> None:
    bf16, folder = folders(root, "qwen3-vl-moe")
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
        "pixel_values": torch.randn(
            16, 3 * 2 * 16 * 16, generator=torch.Generator().manual_seed(1)
        ),
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
def test_fused_experts_wait_for_nothing(root: Path, residence: str) -> None:
    """In the fast layout kernels read the router's choice where it is: CUDA graphs capture them."""
    options = df11.Config(mode="fused", residence=residence)
    kind = transformers.AutoModelForCausalLM
    bf16, folder = folders(root, "qwen3-moe")
    original = kind.from_pretrained(bf16, device_map="cuda")
    model = kind.from_pretrained(folder, device_map="cuda", quantization_config=options)
    with torch.no_grad():
        for rows, length in [(1, 1), (4, 40)]:
            tokens = prompt(rows, length).cuda()
            expected = original(tokens).logits.float()
            found = model(tokens).logits.float()
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
