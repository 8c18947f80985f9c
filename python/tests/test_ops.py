"""Operators of compressed matrices: bits, shapes, gradients, what PyTorch asks of operators."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Decoded
from torch.library import opcheck
from torch.nn import functional
from weights import WEIGHTS, compressed, same

import df11
import df11._tensor
from df11 import _matrices, _native

ops = torch.ops.df11
CPU = torch.device("cpu")
NONE = torch.empty(0, dtype=torch.bfloat16)


def normal(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def asking(*shape: int) -> torch.Tensor:
    return normal(*shape).requires_grad_()


def described(*names: str) -> tuple[list[torch.Tensor], list[int]]:
    tensors = [compressed(name) for name in names]
    arrays = [array for tensor in tensors for array in tensor._arrays]
    return arrays, [number for tensor in tensors for number in tensor.flat_parts]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda a, p: (a, p[:7]), "8 numbers"),
        (lambda a, p: (a, []), "8 numbers"),
        (lambda a, p: (a[:4], p), "5 arrays"),
        (lambda a, p: (a, [9, *p[1:]]), "kind of a part"),
        (lambda a, p: (a, [*p[:4], 0, p[1] + 1, *p[6:]]), "rows"),
        (lambda a, p: (a, [*p[:6], 9, 9]), "columns"),
        (lambda a, p: (a, [*p[:4], -32, 0, *p[6:]]), "rows"),
        (lambda a, p: ([a[0].clone().view(-1, 1), *a[1:]], p), "one dimension"),
        (lambda a, p: ([a[0].float(), *a[1:]], p), "uint8"),
        (lambda a, p: (a * 2, [*p, *p[:6], 0, 8]), "columns"),
    ],
)
def test_a_wrong_description_is_refused(change: Any, problem: str) -> None:
    arrays, parts = change(*described("odd"))
    with pytest.raises((ValueError, TypeError), match=problem):
        ops.decode(arrays, parts, CPU)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(array) for array in arrays]
        with pytest.raises((ValueError, TypeError), match=problem):
            ops.decode(fakes, parts, CPU)


def test_damaged_arrays_are_refused() -> None:
    arrays, parts = described("odd")
    damaged = [array.clone() for array in arrays]
    damaged[1][:16] = 255
    for wrong in (damaged, [*arrays[:3], arrays[3][:-1].clone(), *arrays[4:]]):
        with pytest.raises(df11.Error):
            ops.decode(wrong, parts, CPU)
    with pytest.raises(df11.ParameterError, match="7 numbers of a part; pass eight"):
        _native.Matrix(None, parts[:7], [0] * 4, [0] * 4)


def test_linears_are_several_products() -> None:
    arrays, parts = described("q", "k", "v", "q")
    x, bias = normal(5, 256), normal(128, seed=4)
    plain = [torch.cat([WEIGHTS["q"], WEIGHTS["k"]]), WEIGHTS["v"], WEIGHTS["q"]]
    for biases in ([NONE, NONE, bias], []):
        found = ops.linears(x, arrays, parts, [2, 1, 1], biases, True)
        for y, w, add in zip(found, plain, biases or [NONE] * 3, strict=True):
            assert same(y, functional.linear(x, w, add if add.numel() else None))
    with pytest.raises(ValueError, match="counts"):
        ops.linears(x, arrays, parts, [2, 1], [], True)


def test_of_several_weights_one_is_decoded_at_a_time(decoded: list[Decoded]) -> None:
    arrays, parts = described("q", "k", "v", "q")
    ops.linears(normal(5, 256), arrays, parts, [2, 1, 1], [], True)
    assert [each.count for each in decoded] == [192 * 256, 64 * 256, 128 * 256]
    assert not any(each.others for each in decoded)


def test_embedding_of_stacked_parts() -> None:
    arrays, parts = described("q", "k", "v")
    stacked = torch.cat([WEIGHTS[name] for name in "qkv"])
    for dtype in (torch.int32, torch.int64):
        indices = torch.tensor([[0, 127, 128], [191, 192, 255]], dtype=dtype)
        assert same(ops.embedding(indices, arrays, parts), stacked[indices])
        assert ops.embedding(indices[:0], arrays, parts).shape == (0, 3, 256)
    for wrong, error in ([1.0], TypeError), ([0, -1], IndexError), ([0, 10_000], IndexError):
        with pytest.raises(error):
            ops.embedding(torch.tensor(wrong), arrays, parts)


OFFSETS = torch.tensor([0, 0, 3, 3, 8, 9, 9], dtype=torch.int32)
#: The row of x of each place; OFFSETS give its expert.
ROWS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0], dtype=torch.int32)
EXPERT = torch.tensor([1, 1, 1, 3, 3, 3, 3, 3, 4])


@pytest.mark.parametrize("name", ["experts", "experts_apart"])
def test_grouped_linear_multiplies_each_place_by_its_expert(name: str) -> None:
    arrays, parts = described(name)
    w, x = WEIGHTS[name], normal(4, 256)
    found = ops.grouped_linear(x, OFFSETS, ROWS, arrays, parts, 6)
    for at in range(9):
        expected = x[ROWS[at]].float() @ w[EXPERT[at]].float().T
        assert torch.allclose(found[at].float(), expected, atol=1e-2)
    direct = ops.grouped_linear(x[ROWS], OFFSETS, None, arrays, parts, 6)
    assert same(direct, found)


def test_only_routed_experts_are_decoded(decoded: list[Decoded]) -> None:
    arrays, parts = described("experts")
    ops.grouped_linear(normal(9, 256), OFFSETS, None, arrays, parts, 6)
    assert sum(each.count for each in decoded) == 3 * 64 * 256


@pytest.mark.parametrize("name", ["linear", "linears"])
def test_gradients_of_inputs_and_biases(name: str) -> None:
    names = "qk" if name == "linears" else "q"
    arrays, parts = described(*names)
    results = []
    for is_plain in (False, True):
        x, bias = asking(5, 256), asking(128)
        if is_plain:
            found = [functional.linear(x, WEIGHTS[w], bias if w == "q" else None) for w in names]
        elif name == "linears":
            found = ops.linears(x, arrays, parts, [1, 1], [bias, NONE], True)
        else:
            found = [ops.linear(x, arrays, parts, bias, True)]
        sum(y.square().sum() for y in found).backward()
        results.append((x.grad, bias.grad))
    (grad, of_bias), (expected, of_plain) = results
    assert same(of_bias, of_plain) and (name == "linears" or same(grad, expected))
    assert torch.allclose(grad.float(), expected.float(), rtol=2e-2, atol=1e-2)


def test_gradients_through_experts() -> None:
    arrays, parts = described("experts")
    x = normal(4, 256).requires_grad_()
    ops.grouped_linear(x, OFFSETS, ROWS, arrays, parts, 6).sum().backward()
    expected = torch.zeros(4, 256)
    for at in range(9):
        expected[ROWS[at]] += WEIGHTS["experts"][EXPERT[at]].float().sum(0)
    assert torch.allclose(x.grad.float(), expected, atol=2e-2)


def test_backward_does_not_use_memory_of_the_forward_pass(decoded: list[Decoded]) -> None:
    """Fails if decoded weights are kept for backward, or their memory, which others use by then."""
    arrays, parts = described("edge")
    x, plain, unit = asking(3, 264), asking(3, 264), torch.eye(264).bfloat16()
    y = ops.linear(functional.linear(x, unit), arrays, parts, None, True)
    gc.collect()
    assert decoded and all(each.dense() is None for each in decoded)
    # The memory no longer holds weights.
    others = [torch.full((520, 264), float("nan"), dtype=torch.bfloat16) for _ in range(4)]
    y.sum().backward()
    functional.linear(functional.linear(plain, unit), WEIGHTS["edge"]).sum().backward()
    assert same(x.grad, plain.grad) and others


def test_compressed_arrays_that_change_before_backward_are_noticed() -> None:
    arrays, parts = described("q")
    arrays = [array.clone() for array in arrays]
    y = ops.linear(normal(2, 256).requires_grad_(), arrays, parts, None, True)
    arrays[3].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


#: Arguments of each operator, by its name; `of` describes stacked tensors.
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
        normal(9, 256),
        OFFSETS[1:],
        *of("experts"),
        [6, 256, 64],
        True,
        True,
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_operator_is_as_pytorch_wants(name: str) -> None:
    given = SAMPLES[name](described)
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
        "table_of_kind(Tensor codebook, int kind) -> Tensor",
    ]
    for schema in expected:
        name = schema.partition("(")[0]
        assert str(getattr(ops, name).default._schema) == f"df11::{schema}"


def test_shapes_are_checked_before_anything_runs() -> None:
    arrays, parts = described("q")
    meta = [array.to("meta") for array in arrays]
    x = torch.empty(2, 256, dtype=torch.bfloat16, device="meta")
    for wrong, bias, words in [
        (x[:, :255], None, "256 columns"),
        (x.float(), None, "cast x"),
        (x, x.new_empty(3), "bias"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            ops.linear(wrong, meta, parts, bias, True)
    assert ops.linear(x, meta, parts, None, True).shape == (2, 128)


def test_the_cache_of_matrices_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_matrices, "_MAX", 4)
    arrays, parts = described("edge")
    for row in range(9):
        window = [*parts[:4], row, row + 1, *parts[6:]]
        assert same(ops.decode(arrays, window, CPU), WEIGHTS["edge"][row : row + 1])
        assert len(_matrices.matrices.known) <= 4
    arrays, parts = described("odd", "odd")
    ranges = [(0, 1), (1, 44), (44, 46), (46, 90)]
    found = [ops.decode(*mine, CPU) for mine in _matrices.windows(arrays, parts, ranges)]
    assert [len(each) for each in found] == [end - begin for begin, end in ranges]
    assert same(torch.cat(found), torch.cat([WEIGHTS["odd"]] * 2))


def test_at_most_one_slice_is_decoded_at_a_time(
    monkeypatch: pytest.MonkeyPatch, decoded: list[Decoded]
) -> None:
    """A GPU's work for many rows of x in fused mode, which needs no GPU itself."""
    arrays, parts = described("edge", "edge")
    x, bias = normal(5, 264), normal(520)
    monkeypatch.setattr(df11._ops, "TEMPORARY_BYTES", 64 * 2 * 264)
    stacked = torch.cat([WEIGHTS["edge"]] * 2)
    for add in (None, torch.cat([bias, -bias])):
        decoded.clear()
        y = df11._ops._multiply_decoded(x, arrays, parts, add)
        assert len(decoded) == 17
        assert all(each.count <= 64 * 264 and not each.others for each in decoded)
        expected = functional.linear(x, stacked, add)
        assert torch.allclose(y.float(), expected.float(), rtol=1e-2, atol=1e-2)
