"""Products with weights that share x."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from weights import compressed, container_of

from df11 import _ops, _shared
from df11._tensor import CompressedTensor

SIZES = {"q": (256, 512), "k": (128, 512), "v": (384, 512), "o": (512, 256)}


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, tuple[torch.Tensor, CompressedTensor]]:
    torch.manual_seed(3)
    dense = {name: (torch.randn(size) * 0.02).bfloat16() for name, size in SIZES.items()}
    container = container_of(dense, tmp_path)
    return {name: (dense[name], compressed(container, name)) for name in SIZES}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that are called."""
    made: list[str] = []
    for name in ("linear", "linears"):
        inner = getattr(_ops, name)

        def noted(*args: Any, name: str = name, inner: Any = inner) -> Any:
            made.append(name)
            return inner(*args)

        monkeypatch.setattr(_ops, name, noted)
    return made


def step(weights: Any, x: torch.Tensor, names: str = "qkv", biases: Any = None) -> None:
    """Multiplies and compares, with biases by name."""
    for name in names:
        dense, compressed = weights[name]
        bias = (biases or {}).get(name)
        assert torch.equal(
            functional.linear(x, compressed, bias), functional.linear(x, dense, bias)
        )


def test_weights_that_share_x_are_multiplied_together(weights: Any, calls: list[str]) -> None:
    x = torch.randn(3, 512).bfloat16()
    step(weights, x)
    assert calls == ["linear"] * 3
    for seed in range(3):
        calls.clear()
        torch.manual_seed(seed)
        x = torch.randn(seed + 1, 512).bfloat16()
        step(weights, x, "kvq" if seed == 1 else "qkv")
        step(weights, torch.randn(2, 256).bfloat16(), "o")
        assert calls == ["linears", "linear"]


def test_a_changed_or_another_x_is_multiplied_anew(weights: Any) -> None:
    step(weights, torch.randn(3, 512).bfloat16())
    x = torch.randn(3, 512).bfloat16()
    step(weights, x, "q")
    x.mul_(2)
    step(weights, x, "kv")
    step(weights, x.clone(), "v")
    step(weights, x, "q")
    step(weights, x + 1, "k")


def test_results_wait_for_the_next_products_alone(weights: Any, calls: list[str]) -> None:
    step(weights, torch.randn(3, 512).bfloat16())
    x = torch.randn(3, 512).bfloat16()
    step(weights, x, "q")
    # As a graph does that is replayed: no version tells of it.
    x.data.copy_(torch.randn(3, 512).bfloat16())
    step(weights, torch.randn(2, 256).bfloat16(), "o")
    step(weights, x, "kvq")


def test_results_that_nobody_wants_end_it(weights: Any, calls: list[str]) -> None:
    step(weights, torch.randn(3, 512).bfloat16())
    for _ in range(5):
        step(weights, torch.randn(3, 512).bfloat16(), "q")
    calls.clear()
    step(weights, torch.randn(3, 512).bfloat16())
    step(weights, torch.randn(3, 512).bfloat16())
    assert calls == ["linear"] * 6


def test_biases_belong_to_their_weights(weights: Any, calls: list[str]) -> None:
    biases = {name: torch.randn(SIZES[name][0]).bfloat16() for name in "qv"}
    for _ in range(2):
        step(weights, torch.randn(3, 512).bfloat16(), biases=biases)
    assert calls == ["linear"] * 3 + ["linears"]
    x = torch.randn(3, 512).bfloat16()
    step(weights, x, "q", biases)
    biases["v"].add_(1)  # after the product that holds v's
    step(weights, x, "kv", biases)
    step(weights, x, "q", {"q": biases["q"] + 1})


def test_weights_of_other_models_do_not_matter(weights: Any) -> None:
    x = torch.randn(3, 512).bfloat16()
    step(weights, x)
    other = {
        name: (dense, copy.deepcopy(compressed)) for name, (dense, compressed) in weights.items()
    }
    assert all(compressed.operand.shared is None for _, compressed in other.values())
    step(weights, x, "q")
    step(other, x)
    del weights["v"]
    step(weights, torch.randn(3, 512).bfloat16(), "qk")


def test_tensors_without_versions_are_multiplied_alone(weights: Any, calls: list[str]) -> None:
    with torch.inference_mode():
        for _ in range(3):
            step(weights, torch.randn(3, 512).bfloat16())
    assert calls == ["linear"] * 9


def test_gradients_take_their_own_way(weights: Any) -> None:
    step(weights, torch.randn(3, 512).bfloat16())
    x = torch.randn(3, 512).bfloat16().requires_grad_()
    total = sum(functional.linear(x, weights[name][1]).float().sum() for name in "qkv")
    (grad,) = torch.autograd.grad(total, x)
    expected = sum(functional.linear(x, weights[name][0]).float().sum() for name in "qkv")
    assert torch.equal(grad, torch.autograd.grad(expected, x)[0])


def test_large_groups_are_not_decoded_at_once(
    weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_shared, "_MOST_DECODED", 2 * (256 + 128) * 512)
    for _ in range(2):
        step(weights, torch.randn(3, 512).bfloat16())
    assert weights["q"][1].operand.shared is weights["k"][1].operand.shared is not None
    assert weights["v"][1].operand.shared is None


def test_a_module_moves_after_it_was_used(weights: Any) -> None:
    """PyTorch exchanges tensors in place then, and refuses those that have weak references."""
    layers = torch.nn.ModuleDict(
        {
            name: torch.nn.Linear(
                512, SIZES[name][0], bias=False, device="meta", dtype=torch.bfloat16
            )
            for name in "qkv"
        }
    )
    for name, layer in layers.items():
        layer.weight = torch.nn.Parameter(weights[name][1], requires_grad=False)
    for _ in range(2):
        x = torch.randn(3, 512).bfloat16()
        for name, layer in layers.items():
            assert torch.equal(layer(x), functional.linear(x, weights[name][0]))
    assert layers["q"].weight.operand.shared
    layers.to("meta")
    assert all(layer.weight.is_meta for layer in layers.values())
    assert layers["q"](torch.randn(3, 512).bfloat16().to("meta")).shape == (3, 256)
