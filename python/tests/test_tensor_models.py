"""Models of transformers whose parameters are compressed tensors, and nothing else is changed."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import config_of, seeded
from torch import nn
from weights import container_of, of_tiles, same

import df11
from df11._tensor import CompressedTensor

IDS = torch.arange(20).view(2, 10)


def pair(name: str, folder: Path) -> tuple[Any, Any]:
    """A model with compressed parameters, and the same one in BF16."""
    config = config_of(name)
    config.hidden_size, config.intermediate_size, config.head_dim = 256, 512, 64
    plain = seeded(transformers.AutoModelForCausalLM.from_config(config)).requires_grad_(False)
    ours = copy.deepcopy(plain)
    container = container_of(dict(plain.named_parameters()), folder)
    for key, parameter in list(ours.named_parameters()):
        stored = container[key]
        if stored.tiles is not None:
            replace(ours, parameter, of_tiles([stored.tiles], stored.shape))
    assert isinstance(ours.lm_head.weight, CompressedTensor)
    return ours, plain


def replace(model: nn.Module, old: nn.Parameter, new: torch.Tensor) -> None:
    """Puts a parameter in all places of another one: tied weights stay tied."""
    made = nn.Parameter(new, requires_grad=False)
    for module in model.modules():
        for attribute, value in module._parameters.items():
            if value is old:
                module._parameters[attribute] = made


@pytest.fixture(
    params=["llama", "llama-tied", "llama-bias", "mixtral", "qwen3-moe"], scope="module"
)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return pair(request.param, tmp_path_factory.mktemp("model"))


def test_logits_and_generation_have_the_bits_of_bf16(models: Any) -> None:
    ours, plain = models
    with torch.no_grad():
        assert torch.equal(ours(IDS).logits, plain(IDS).logits)
    options = {"max_new_tokens": 8, "do_sample": False}
    for cache in (None, "static"):
        found = ours.generate(IDS, cache_implementation=cache, disable_compile=True, **options)
        expected = plain.generate(IDS, cache_implementation=cache, disable_compile=True, **options)
        assert torch.equal(found, expected)


def test_a_compiled_model_has_no_graph_break(models: Any) -> None:
    ours, plain = models
    with torch.no_grad():
        torch._dynamo.reset()
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(IDS).logits, plain(IDS).logits)


def test_gradients_have_the_bits_of_bf16(models: Any) -> None:
    results = []
    for model in models:
        x = model.get_input_embeddings()(IDS).detach().clone().requires_grad_()
        model(inputs_embeds=x).logits.square().mean().backward()
        results.append(x.grad)
    assert results[0] is not None and torch.equal(*results)


def test_an_inductor_build_of_a_model(tmp_path: Path) -> None:
    """Compiled BF16 rounds less often than eager BF16, and not at the same places."""
    ours, plain = pair("llama-tied", tmp_path)
    with torch.no_grad():
        torch._dynamo.reset()
        found = torch.compile(ours, fullgraph=True)(IDS).logits
        assert torch.allclose(found.float(), plain(IDS).logits.float(), atol=0.05)


def test_a_model_is_exported(tmp_path: Path) -> None:
    ours, plain = pair("llama", tmp_path)
    layer, reference = ours.model.layers[0].mlp, plain.model.layers[0].mlp
    x = torch.randn(1, 5, 256).bfloat16()
    program = torch.export.export(layer, (x,))
    assert torch.equal(program.module()(x), reference(x))


def test_only_routed_experts_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plain = pair("mixtral", tmp_path)
    experts = ours.model.layers[0].mlp.experts
    assert isinstance(experts.gate_up_proj, CompressedTensor)
    x = torch.randn(1, 1, 256).bfloat16()
    real, decoded = df11._ops.decode, []

    def counted(arrays: Any, parts: Any, device: Any) -> torch.Tensor:
        decoded.append(df11._matrices.shape_of(parts))
        return real(arrays, parts, device)

    monkeypatch.setattr(df11._ops, "decode", counted)
    with torch.no_grad():
        found = ours.model.layers[0].mlp(x)
    monkeypatch.undo()
    assert torch.equal(found, plain.model.layers[0].mlp(x))
    gate, down = experts.gate_up_proj.shape, experts.down_proj.shape
    wanted = 2 * (gate[1] * gate[2] + down[1] * down[2])  # two of four experts
    routed = [rows * columns for rows, columns in decoded if rows * columns > wanted // 8]
    assert sum(routed) == wanted


def test_no_decoded_weights_live_until_the_backward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = pair("llama", tmp_path)
    x = ours.get_input_embeddings()(IDS).detach().clone().requires_grad_()
    alive: list[weakref.ref[torch.Tensor]] = []
    real = df11._ops.decode

    def watched(*arguments: Any) -> torch.Tensor:
        dense = real(*arguments)
        alive.append(weakref.ref(dense))
        return dense

    monkeypatch.setattr(df11._ops, "decode", watched)
    y = ours(inputs_embeds=x).logits
    gc.collect()
    assert len(alive) >= 15 and all(reference() is None for reference in alive)
    y.sum().backward()


def test_copies_of_a_model(tmp_path: Path) -> None:
    ours, plain = pair("llama-tied", tmp_path)
    state = ours.state_dict()
    assert any(isinstance(value, CompressedTensor) for value in state.values())
    plain_again = copy.deepcopy(plain)
    nn.init.zeros_(plain_again.lm_head.weight)
    plain_again.load_state_dict(state)
    for model in (copy.deepcopy(ours), ours.to("cpu"), plain_again):
        assert model.lm_head.weight is model.get_input_embeddings().weight
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, plain(IDS).logits)
    assert same(ours.lm_head.weight, plain.lm_head.weight.data)
