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


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def step(weights: Any, x: torch.Tensor, names: str = "qkv", biases: Any = None) -> None:
    """Multiplies and compares, with biases by name."""
    for name in names:
        dense, compressed = weights[name]
        bias = (biases or {}).get(name)
        assert torch.equal(
            functional.linear(x, compressed, bias), functional.linear(x, dense, bias)
        )


def test_weights_that_share_x_are_multiplied_together(weights: Any, calls: list[str]) -> None:
    # Tensors without versions are multiplied alone.
    with torch.inference_mode():
        for _ in range(2):
            step(weights, random(3, 512))
    assert calls == ["linear"] * 6
    step(weights, random(3, 512))
    for rows, names in ((1, "qkv"), (2, "kvq"), (3, "qkv")):
        calls.clear()
        step(weights, random(rows, 512), names)
        step(weights, random(2, 256), "o")
        assert calls == ["linears", "linear"]


def test_a_changed_or_another_x_is_multiplied_anew(weights: Any) -> None:
    step(weights, random(3, 512))
    x = random(3, 512)
    step(weights, x, "q")
    x.mul_(2)
    step(weights, x, "kv")
    step(weights, x.clone(), "v")
    step(weights, x, "q")
    step(weights, x + 1, "k")


def test_results_wait_for_the_next_products_alone(weights: Any, calls: list[str]) -> None:
    step(weights, random(3, 512))
    x = random(3, 512)
    step(weights, x, "q")
    # As a graph does that is replayed: no version tells of it.
    x.data.copy_(random(3, 512))
    step(weights, random(2, 256), "o")
    step(weights, x, "kvq")


def test_results_that_nobody_wants_end_it(weights: Any, calls: list[str]) -> None:
    step(weights, random(3, 512))
    for _ in range(5):
        step(weights, random(3, 512), "q")
    calls.clear()
    step(weights, random(3, 512))
    step(weights, random(3, 512))
    assert calls == ["linear"] * 6


def test_biases_belong_to_their_weights(weights: Any, calls: list[str]) -> None:
    biases = {name: random(SIZES[name][0]) for name in "qv"}
    for _ in range(2):
        step(weights, random(3, 512), biases=biases)
    assert calls == ["linear"] * 3 + ["linears"]
    x = random(3, 512)
    step(weights, x, "q", biases)
    biases["v"].add_(1)  # after the product that holds v's
    step(weights, x, "kv", biases)
    step(weights, x, "q", {"q": biases["q"] + 1})


def test_weights_of_other_models_do_not_matter(weights: Any) -> None:
    x = random(3, 512)
    step(weights, x)
    other = {
        name: (dense, copy.deepcopy(compressed)) for name, (dense, compressed) in weights.items()
    }
    assert all(compressed.operand.shared is None for _, compressed in other.values())
    step(weights, x, "q")
    step(other, x)
    del weights["v"]
    step(weights, random(3, 512), "qk")


def test_gradients_take_their_own_way(weights: Any) -> None:
    step(weights, random(3, 512))
    x = random(3, 512).requires_grad_()
    grads = []
    for at in (0, 1):
        total = sum(functional.linear(x, weights[name][at]).float().sum() for name in "qkv")
        grads += torch.autograd.grad(total, x)
    assert torch.equal(*grads)


def test_large_groups_are_not_decoded_at_once(
    weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_shared, "_MOST_DECODED", 2 * (256 + 128) * 512)
    for _ in range(2):
        step(weights, random(3, 512))
    assert weights["q"][1].operand.shared is weights["k"][1].operand.shared is not None
    assert weights["v"][1].operand.shared is None


def test_a_module_moves_after_it_was_used(weights: Any) -> None:
    """PyTorch exchanges tensors in place then, and refuses those that have weak references."""
    layers = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in "qkv"})
    for name, layer in layers.items():
        layer.weight = torch.nn.Parameter(weights[name][1], requires_grad=False)
    for _ in range(2):
        x = random(3, 512)
        for name, layer in layers.items():
            assert torch.equal(layer(x), functional.linear(x, weights[name][0]))
    assert layers["q"].weight.operand.shared
    layers.to("meta")
    assert all(layer.weight.is_meta for layer in layers.values())
    assert layers["q"](random(3, 512).to("meta")).shape == (3, 256)
