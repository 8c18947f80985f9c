"""Products with weights that share x, and workspaces of products."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from weights import compressed, container_of

from df11 import _native, _ops, _shared, _workspaces
from df11._container import Tensors
from df11._tensor import CompressedTensor

SIZES = {"q": (256, 512), "k": (128, 512), "v": (384, 512), "o": (512, 256)}


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, tuple[torch.Tensor, CompressedTensor]]:
    torch.manual_seed(3)
    dense = {name: (torch.randn(size) * 0.02).bfloat16() for name, size in SIZES.items()}
    held = Tensors(container_of(dense, tmp_path))
    return {name: (dense[name], compressed(name, of=held)) for name in SIZES}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    for name in ("linear", "linears"):
        real = getattr(_ops, name)
        noted = partial(lambda name, real, *given: made.append(name) or real(*given), name, real)
        monkeypatch.setattr(_ops, name, noted)
    return made


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def step(weights: Any, x: torch.Tensor, names: str = "qkv", biases: Any = None) -> None:
    for name in names:
        bias = (biases or {}).get(name)
        expected, found = (functional.linear(x, weight, bias) for weight in weights[name])
        assert torch.equal(found, expected)


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
    # As a graph does that is replayed: no version tells of it. Results wait for the next products.
    x.data.copy_(random(3, 512))
    step(weights, random(2, 256), "o")
    step(weights, x, "kvq")
    step(weights, x, "q")
    step(weights, x + 1, "k")


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


# ---- workspaces of products, without a GPU ----

#: Large products of the fast layout, and of matrices as stored, need about as much, in bytes.
LARGE, SMALL, MIB = 69_210_368, 2_400_000, 1 << 20
CAPTURED = 7


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is held, memory takes none, and the stream `CAPTURED` is captured."""
    for name in ("_held", "_spare"):
        monkeypatch.setattr(_workspaces, name, {})
    monkeypatch.setattr(_workspaces, "_retired", [])
    monkeypatch.setattr(_workspaces, "_is_shared", False)
    made = partial(torch.empty, dtype=torch.uint8, device="meta")
    monkeypatch.setattr(_workspaces, "_made", lambda index, room: made(room))
    monkeypatch.setattr(_native, "capture_id", lambda stream: int(stream == CAPTURED))


def _spares() -> list[int]:
    return sorted(spare.nbytes for spare in _workspaces._spare.values())


@pytest.mark.usefixtures("empty")
def test_large_ones_are_no_more_than_needed() -> None:
    assert _workspaces.workspace(0, 0, LARGE).nbytes == 80 * MIB
    assert _workspaces.workspace(0, 0, 16 * MIB + 1).nbytes == 80 * MIB
    assert _workspaces.workspace(0, 1, 16 * MIB + 1).nbytes == 32 * MIB
    assert _workspaces.workspace(0, 2, SMALL).nbytes == 4 * MIB


@pytest.mark.usefixtures("empty")
def test_spares_are_the_largest_alone() -> None:
    for size in (SMALL, 20 * MIB, LARGE, SMALL // 2, 40 * MIB, 8 * MIB):
        _workspaces.workspace(0, 0, size)
    assert _spares() == [8 * MIB, 80 * MIB]


@pytest.mark.usefixtures("empty")
def test_captures_get_one_of_their_own() -> None:
    outside = [_workspaces.workspace(0, 0, size) for size in (LARGE, SMALL)]
    small = _workspaces.workspace(0, CAPTURED, SMALL)
    assert small.nbytes == 4 * MIB and all(small is not other for other in outside)
    assert _spares() == [80 * MIB]
    large = _workspaces.workspace(0, CAPTURED, LARGE)
    assert large.nbytes == 80 * MIB and large is not outside[0]
    assert not _spares() and _workspaces._retired == [small]
    # The next product outside of captures makes one for the next capture.
    assert _workspaces.workspace(0, 0, SMALL) is outside[0]
    assert _spares() == [4 * MIB]
