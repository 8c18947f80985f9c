"""Operators of compressed matrices: bits, shapes, gradients, what PyTorch asks of operators."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import Decoded
from torch.library import opcheck
from torch.nn import functional
from weights import compressed, container_of, same, seeded_weights

import df11
import df11._tensor
from df11 import _matrices

ops = torch.ops.df11
CPU = torch.device("cpu")
NONE = torch.empty(0, dtype=torch.bfloat16)
WEIGHTS = seeded_weights()


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return container_of(WEIGHTS, tmp_path_factory.mktemp("ops"))


def normal(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def asking(*shape: int) -> torch.Tensor:
    """An input that wants gradients."""
    return normal(*shape).requires_grad_()


def described(container: Any, *names: str) -> tuple[list[torch.Tensor], list[int]]:
    """Arrays and parts of stacked tensors."""
    tensors = [compressed(container, name) for name in names]
    arrays = [array for tensor in tensors for array in tensor.arrays]
    return arrays, [number for tensor in tensors for number in tensor.flat_parts]


# ---- decode ----


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda a, p: (a, p[:7]), "8 numbers"),
        (lambda a, p: (a, []), "8 numbers"),
        (lambda a, p: (a[:4], p), "5 arrays"),
        (lambda a, p: (a, [2, *p[1:]]), "form"),
        (lambda a, p: (a, [*p[:4], 0, p[1] + 1, *p[6:]]), "rows"),
        (lambda a, p: (a, [*p[:6], 9, 9]), "columns"),
        (lambda a, p: (a, [*p[:4], -32, 0, *p[6:]]), "rows"),
        (lambda a, p: ([a[0].clone().view(-1, 1), *a[1:]], p), "one dimension"),
        (lambda a, p: ([a[0].float(), *a[1:]], p), "uint8"),
        (lambda a, p: (a * 2, [*p, *p[:6], 0, 8]), "columns"),
    ],
)
def test_a_wrong_description_is_refused(container: Any, change: Any, problem: str) -> None:
    arrays, parts = change(*described(container, "odd"))
    with pytest.raises((ValueError, TypeError), match=problem):
        ops.decode(arrays, parts, CPU)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(array) for array in arrays]
        with pytest.raises((ValueError, TypeError), match=problem):
            ops.decode(fakes, parts, CPU)


def test_damaged_arrays_are_refused(container: Any) -> None:
    arrays, parts = described(container, "odd")
    damaged = [array.clone() for array in arrays]
    damaged[1][:16] = 255
    for wrong in (damaged, [*arrays[:3], arrays[3][:-1].clone(), *arrays[4:]]):
        with pytest.raises(df11.Error):
            ops.decode(wrong, parts, CPU)


# ---- products ----


def test_linears_are_several_products(container: Any) -> None:
    arrays, parts = described(container, "q", "k", "v", "q")
    x, bias = normal(5, 256), normal(128, seed=4)
    stacked = torch.cat([WEIGHTS["q"], WEIGHTS["k"]])
    found = ops.linears(x, arrays, parts, [2, 1, 1], [NONE, NONE, bias], True)
    expected = [
        functional.linear(x, stacked),
        functional.linear(x, WEIGHTS["v"]),
        functional.linear(x, WEIGHTS["q"], bias),
    ]
    assert all(same(*pair) for pair in zip(found, expected, strict=True))
    found = ops.linears(x, arrays, parts, [2, 1, 1], [], True)
    assert same(found[2], functional.linear(x, WEIGHTS["q"]))
    with pytest.raises(ValueError, match="counts"):
        ops.linears(x, arrays, parts, [2, 1], [], True)


# ---- look-ups ----


def test_embedding_of_stacked_parts(container: Any) -> None:
    arrays, parts = described(container, "q", "k", "v")
    stacked = torch.cat([WEIGHTS[name] for name in "qkv"])
    for dtype in (torch.int32, torch.int64):
        indices = torch.tensor([[0, 127, 128], [191, 192, 255]], dtype=dtype)
        assert same(ops.embedding(indices, arrays, parts), stacked[indices])
        assert ops.embedding(indices[:0], arrays, parts).shape == (0, 3, 256)


def test_embedding_refuses_other_indices(container: Any) -> None:
    with pytest.raises(TypeError, match="int32"):
        ops.embedding(torch.tensor([1.0]), *described(container, "q"))
    for index in (-1, 10_000):
        with pytest.raises(IndexError):
            ops.embedding(torch.tensor([0, index]), *described(container, *"qkv"))


# ---- experts ----

OFFSETS = torch.tensor([0, 0, 3, 3, 8, 9, 9], dtype=torch.int32)
#: Of each place its row of x, and by OFFSETS its expert.
ROWS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0], dtype=torch.int32)
EXPERT = torch.tensor([1, 1, 1, 3, 3, 3, 3, 3, 4])


@pytest.mark.parametrize("name", ["experts", "experts_apart"])
def test_grouped_linear_multiplies_each_place_by_its_expert(container: Any, name: str) -> None:
    arrays, parts = described(container, name)
    w, x = WEIGHTS[name], normal(4, 256)
    found = ops.grouped_linear(x, OFFSETS, ROWS, arrays, parts, 6)
    for at in range(9):
        expected = x[ROWS[at]].float() @ w[EXPERT[at]].float().T
        assert torch.allclose(found[at].float(), expected, atol=1e-2)
    direct = ops.grouped_linear(x[ROWS], OFFSETS, None, arrays, parts, 6)
    assert same(direct, found)


def test_only_routed_experts_are_decoded(container: Any, decoded: list[Decoded]) -> None:
    arrays, parts = described(container, "experts")
    ops.grouped_linear(normal(9, 256), OFFSETS, None, arrays, parts, 6)
    assert sum(each.count for each in decoded) == 3 * 64 * 256


# ---- gradients ----


def test_gradients_have_the_bits_of_pytorch(container: Any) -> None:
    arrays, parts = described(container, "edge")
    results = []
    for multiply in (
        lambda x, bias: ops.linear(x, arrays, parts, bias, True),
        lambda x, bias: functional.linear(x, WEIGHTS["edge"], bias),
    ):
        x, bias = asking(3, 2, 264), asking(520)
        y = multiply(x, bias)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, bias.grad))
    assert all(same(*pair) for pair in zip(*results, strict=True))


def test_gradients_of_several_products(container: Any) -> None:
    arrays, parts = described(container, "q", "k")
    results = []
    for multiply in (
        lambda x, bias: ops.linears(x, arrays, parts, [1, 1], [NONE, bias], True),
        lambda x, bias: [
            functional.linear(x, WEIGHTS["q"]),
            functional.linear(x, WEIGHTS["k"], bias),
        ],
    ):
        x, bias = asking(5, 256), asking(64)
        q, k = multiply(x, bias)
        (q.sum() + k.square().sum()).backward()
        results.append((x.grad, bias.grad))
    assert torch.allclose(results[0][0].float(), results[1][0].float(), rtol=2e-2, atol=1e-2)
    assert same(results[0][1], results[1][1])


def test_gradients_through_experts(container: Any) -> None:
    arrays, parts = described(container, "experts")
    x = normal(4, 256).requires_grad_()
    ops.grouped_linear(x, OFFSETS, ROWS, arrays, parts, 6).sum().backward()
    expected = torch.zeros(4, 256)
    for at in range(9):
        expected[ROWS[at]] += WEIGHTS["experts"][EXPERT[at]].float().sum(0)
    assert torch.allclose(x.grad.float(), expected, atol=2e-2)


def test_backward_does_not_use_memory_of_the_forward_pass(
    container: Any, decoded: list[Decoded]
) -> None:
    """Fails if decoded weights are kept for backward, or their memory, which others use by then."""
    arrays, parts = described(container, "edge")
    x = normal(3, 264).requires_grad_()
    y = df11._ops.functional.linear(x, torch.eye(264).bfloat16())
    y = ops.linear(y, arrays, parts, None, True)
    gc.collect()
    assert decoded and all(each.dense() is None for each in decoded)
    # Whatever lies there now is not weights any more.
    others = [torch.full((520, 264), float("nan"), dtype=torch.bfloat16) for _ in range(4)]
    y.sum().backward()
    plain = normal(3, 264).requires_grad_()
    functional.linear(
        functional.linear(plain, torch.eye(264).bfloat16()), WEIGHTS["edge"]
    ).sum().backward()
    assert same(x.grad, plain.grad) and others


def test_compressed_arrays_that_change_before_backward_are_noticed(container: Any) -> None:
    arrays, parts = described(container, "q")
    arrays = [array.clone() for array in arrays]
    y = ops.linear(normal(2, 256).requires_grad_(), arrays, parts, None, True)
    arrays[3].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- what PyTorch asks of operators ----


#: What each operator is given, by its name; `of` describes stacked tensors.
SAMPLES: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "decode": lambda of: (*of(*"qkv"), CPU),
    "linear": lambda of: (asking(3, 2, 256), *of("q"), None, True),
    "linear bias": lambda of: (asking(3, 2, 256), *of("q"), asking(128), False),
    "linears": lambda of: (asking(3, 2, 256), *of(*"qkv"), [1, 2], [asking(128), NONE], True),
    "linears plain": lambda of: (asking(3, 2, 256), *of(*"qkv"), [1, 1, 1], [], False),
    "embedding": lambda of: (torch.tensor([[1, 5], [127, 0]]), *of(*"qkv")),
    "grouped_linear": lambda of: (asking(9, 256), OFFSETS, None, *of("experts"), 6),
    "grouped_linear rows": lambda of: (asking(9, 256), OFFSETS, ROWS, *of("experts"), 6),
    "grouped_linear_backward": lambda of: (normal(9, 64), OFFSETS, ROWS, *of("experts"), 6, 9),
    "table": lambda of: (of("q")[0][0],),
    "_grouped_mm": lambda of: (
        *(normal(9, 256), OFFSETS[1:]),
        *of("experts"),
        *([6, 256, 64], True, True),
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_operator_is_as_pytorch_wants(container: Any, name: str) -> None:
    given = SAMPLES[name](partial(described, container))
    opcheck(getattr(ops, name.split()[0]).default, given)


def test_schemas_are_stable() -> None:
    """Other engines call these: a change is a new operator."""
    expected = [
        "decode(Tensor[] arrays, int[] parts, Device device) -> Tensor",
        "linear(Tensor x, Tensor[] arrays, int[] parts, Tensor? bias, bool exact) -> Tensor",
        "linears(Tensor x, Tensor[] arrays, int[] parts, int[] counts, Tensor[] biases, bool exact)"
        " -> Tensor[]",
        "embedding(Tensor indices, Tensor[] arrays, int[] parts) -> Tensor",
        "grouped_linear(Tensor x, Tensor offsets, Tensor? rows, Tensor[] arrays, int[] parts,"
        " int experts) -> Tensor",
        "grouped_linear_backward(Tensor grad, Tensor offsets, Tensor? rows, Tensor[] arrays,"
        " int[] parts, int experts, int x_rows) -> Tensor",
        "table(Tensor codebook) -> Tensor",
    ]
    for schema in expected:
        name = schema.partition("(")[0]
        assert str(getattr(ops, name).default._schema) == f"df11::{schema}"


def test_shapes_are_checked_before_anything_runs(container: Any) -> None:
    arrays, parts = described(container, "q")
    meta = [array.to("meta") for array in arrays]
    x = torch.empty(2, 255, dtype=torch.bfloat16, device="meta")
    with pytest.raises(RuntimeError, match="256 columns"):
        ops.linear(x, meta, parts, None, True)
    with pytest.raises(RuntimeError, match="cast x"):
        ops.linear(x.new_empty(2, 256, dtype=torch.float32), meta, parts, None, True)
    with pytest.raises(RuntimeError, match="bias"):
        ops.linear(x.new_empty(2, 256), meta, parts, x.new_empty(3), True)
    assert ops.linear(x.new_empty(2, 256), meta, parts, None, True).shape == (2, 128)


def test_the_cache_of_matrices_is_bounded(container: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_matrices, "_MOST", 4)
    arrays, parts = described(container, "edge")
    for row in range(9):
        window = [*parts[:4], row, row + 1, *parts[6:]]
        assert same(ops.decode(arrays, window, CPU), WEIGHTS["edge"][row : row + 1])
        assert len(_matrices._matrices) <= 4


def test_windows_cover_all_rows_once(container: Any) -> None:
    arrays, parts = described(container, "odd", "odd")
    ranges = [(0, 1), (1, 44), (44, 46), (46, 90)]
    found = []
    for (begin, end), mine in zip(ranges, _matrices.windows(arrays, parts, ranges), strict=True):
        found.append(ops.decode(*mine, CPU))
        assert len(found[-1]) == end - begin
    assert same(torch.cat(found), torch.cat([WEIGHTS["odd"]] * 2))


def test_at_most_one_slice_is_decoded_at_a_time(
    container: Any, monkeypatch: pytest.MonkeyPatch, decoded: list[Decoded]
) -> None:
    """What a GPU does for many rows of x in fused mode; it needs no GPU itself."""
    arrays, parts = described(container, "edge", "edge")
    x, bias = normal(5, 264), normal(520)
    monkeypatch.setattr(df11._ops, "TEMPORARY_BYTES", 64 * 2 * 264)
    outputs = [torch.empty(5, 520, dtype=torch.bfloat16) for _ in range(2)]
    df11._ops._multiply_decoded(x, arrays, parts, outputs, [None, bias])
    assert len(decoded) == 2 * 9
    assert all(each.count <= 64 * 264 and not each.others for each in decoded)
    for y, add in zip(outputs, (None, bias), strict=True):
        expected = functional.linear(x, WEIGHTS["edge"], add)
        assert torch.allclose(y.float(), expected.float(), rtol=1e-2, atol=1e-2)
