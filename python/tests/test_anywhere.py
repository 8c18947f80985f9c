"""Compressed weights wherever they are used: new embeddings, adapters, offloading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import Folders, adapted, load, prompt

import df11
from df11._tensor import CompressedTensor

pytestmark = pytest.mark.usefixtures("compressed_on_gpus")

Pair = tuple[Any, Any]


@pytest.fixture
def pair(folders: Folders) -> Pair:
    """The BF16 model and the compressed one."""
    return folders.pair("llama")


@pytest.mark.filterwarnings("ignore:.*ordinary")
def test_resized_embeddings(pair: Pair, tmp_path: Path) -> None:
    """transformers replaces the memory of the old ones, which are ordinary from then on."""
    original, model = pair
    expected = model(prompt()).logits
    for each in (original, model):
        each.resize_token_embeddings(520, mean_resizing=False)
    for head in ("model.embed_tokens.weight", "lm_head.weight"):
        found = model.get_parameter(head)
        assert found.shape == (520, 128) and not isinstance(found, CompressedTensor)
        assert torch.equal(found[:512], original.get_parameter(head)[:512])
    assert torch.equal(model(prompt()).logits[..., :512], expected)
    report = df11.report(model)
    assert report.residences["model.layers.0.mlp.up_proj.weight"] == "stored"
    assert report.residences["lm_head.weight"] == "ordinary"
    assert {"changed since", "not in the containers"} <= report.ordinary.keys()
    with pytest.raises(RuntimeError, match=r"weight is an ordinary weight now.*df11\.state_dict"):
        model.save_pretrained(tmp_path)
    original.load_state_dict(df11.state_dict(model))
    with pytest.raises(ValueError, match="of the model itself"):
        type(model).save_pretrained(model, tmp_path)


# ---- adapters ----

WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "options", [{}, {"use_dora": True}, {"use_rslora": True}], ids=["lora", "dora", "rslora"]
)
def test_adapters_compute_and_train(pair: Pair, options: dict[str, Any]) -> None:
    original, model = (adapted(each, **options) for each in pair)
    losses, gradients = [], []
    for each in (original, model):
        loss = each(prompt(), labels=prompt()).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: p.grad for name, p in each.named_parameters() if p.requires_grad})
    assert torch.equal(*losses)
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) >= 18
    for name, expected in gradients[0].items():
        assert torch.equal(gradients[1][name], expected), name
    base = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    assert isinstance(base, CompressedTensor) and base.grad is None


def test_an_adapter_is_saved_and_loaded(pair: Pair, folders: Folders, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = adapted(pair[1])
    expected = model(prompt()).logits
    model.save_pretrained(tmp_path / "adapter")
    assert {file.name for file in (tmp_path / "adapter").iterdir()} >= {"adapter_model.safetensors"}
    again = peft.PeftModel.from_pretrained(load(folders.df11("llama")), tmp_path / "adapter")
    assert torch.equal(again(prompt()).logits, expected)


def test_decoded_weights_have_their_own_names(pair: Pair) -> None:
    """What an adapter wraps has no name of the wrapper's; adapters have theirs."""
    names = pair[0].state_dict().keys()
    model = adapted(pair[1])
    assert df11.report(model, verify=True).verified
    state = df11.state_dict(model.get_base_model())
    assert names <= state.keys() and all(".lora_" in name for name in state.keys() - names)
    assert torch.equal(state[WEIGHT], pair[0].get_parameter(WEIGHT))


def test_an_adapter_is_merged_into_a_decoded_copy(pair: Pair) -> None:
    original, model = (adapted(each) for each in pair)
    original.merge_adapter(safe_merge=True)
    with pytest.warns(UserWarning, match="ordinary"):
        model.merge_adapter(safe_merge=True)
    assert torch.equal(model(prompt()).logits, original(prompt()).logits)
    with pytest.raises(df11.CorruptError, match=r"layers\.0\.mlp\.\S+ is not what"):
        df11.report(model, verify=True)


@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_an_adapter_that_changes_its_base(folders: Folders, pair: Pair, kind: str) -> None:
    """What it takes out of the base weight is taken out of a decoded copy, and no other weight."""
    with pytest.warns(UserWarning, match="ordinary"):
        model = adapted(pair[1], init_lora_weights=kind)
    original = adapted(pair[0], init_lora_weights=kind)
    assert torch.equal(model(prompt()).logits, original(prompt()).logits)
    layer = model.base_model.model.model.layers[1]
    assert not isinstance(layer.self_attn.q_proj.base_layer.weight, CompressedTensor)
    assert isinstance(layer.self_attn.o_proj.weight, CompressedTensor)
    again = load(folders.df11("llama"))
    assert df11.report(again, verify=True).verified


# ---- offloading ----


def test_offloading_hooks(pair: Pair) -> None:
    """accelerate keeps weights elsewhere, and brings each to its module before its forward."""
    accelerate = pytest.importorskip("accelerate")
    original, model = pair
    state = model.state_dict()
    accelerate.cpu_offload(model, execution_device="cpu", state_dict=state)
    assert model.model.layers[0].mlp.up_proj.weight.is_meta
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(prompt()).logits, original(prompt()).logits)
    assert model.model.layers[0].mlp.up_proj.weight.is_meta


@pytest.mark.gpu
def test_moves_between_devices(pair: Pair) -> None:
    original, model = pair
    expected = original.cuda()(prompt().cuda()).logits
    model.to("cuda")
    assert isinstance(model.lm_head.weight, CompressedTensor)
    assert model.lm_head.weight.device.type == "cuda"
    assert torch.equal(model(prompt().cuda()).logits, expected)
    assert df11.report(model, verify=True).devices[0].stored > 0
    model.to("cpu")
    assert torch.equal(model(prompt()).logits, original.cpu()(prompt()).logits)


@pytest.mark.gpu
def test_a_model_that_waits_on_the_host(pair: Pair) -> None:
    """As diffusers' `enable_model_cpu_offload` has it: on the GPU from its forward on."""
    accelerate = pytest.importorskip("accelerate")
    original, model = pair
    expected = original.cuda()(prompt().cuda()).logits
    model, hook = accelerate.cpu_offload_with_hook(model, 0)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(model(prompt()).logits.cuda(), expected)
        assert model.lm_head.weight.device.type == "cuda"
        hook.offload()
        assert isinstance(model.lm_head.weight, CompressedTensor)
        assert model.lm_head.weight.device.type == "cpu"
