"""Compressed tensors of other floats than BF16: FP8, F16, F32, also F32 that was BF16 or F16, and
BF16 that was FP8.
"""

import copy
import gzip
import io
import pickle
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import test_tensor
import torch
from conftest import ROOT
from test_tensor import IDS, PRODUCTS, VIEWS
from torch import nn
from torch.nn import functional
from weights import WEIGHTS, container_of, same, streamed, weights

import df11
from df11 import _native, _ops
from df11._container import Tensors
from df11._encoding import MIN_BYTES
from df11._matrices import DTYPES, FAST, STORED
from df11._tensor import CompressedTensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Cast = Callable[[torch.Tensor], torch.Tensor]
#: For each kind that `df11 compress` writes, except `tile`: what makes its weights of BF16 ones.
CASTS: dict[int, Cast] = {
    2: lambda w: (5000 * w.float()).to(E4M3),
    3: lambda w: (5000 * w.float()).to(E5M2),
    4: lambda w: w.half(),
    5: lambda w: (w.view(torch.int16) & -16).view(torch.bfloat16),
    6: lambda w: w.float() * (1 + 2**-14 + 2**-20),
    7: lambda w: (w.float() * (1 + 2**-10)).half().float(),
    8: lambda w: w.float(),
}
#: Kind and name of weights that are large enough to be compressed.
LARGE = [
    (kind, name)
    for kind, name in product(CASTS, WEIGHTS)
    if WEIGHTS[name].numel() * DTYPES[kind].itemsize >= MIN_BYTES
]
MULTIPLIED = [kind for kind in CASTS if DTYPES[kind].itemsize > 1]
GPU = torch.device("cuda", 0)
_FOLDER = TemporaryDirectory()


def plain(kind: int, name: str) -> torch.Tensor:
    # Casts keep no payloads of NaN, so take other weights for those.
    return CASTS[kind](WEIGHTS["wide" if name == "every" else name])


@cache
def held(kind: int) -> Tensors:
    folder = Path(_FOLDER.name) / str(kind)
    folder.mkdir()
    values = {name: plain(kind, name) for name in WEIGHTS}
    return Tensors(container_of(values, folder))


def compressed(kind: int, name: str, exact: bool = True) -> CompressedTensor:
    found = held(kind)[name]
    assert isinstance(found, CompressedTensor), (kind, name)
    return found.with_mode(exact)


def test_there_is_a_test_of_each_kind() -> None:
    assert {*range(len(_native.KINDS))} == {*range(len(DTYPES))} == {STORED, FAST, *CASTS}


@pytest.mark.parametrize(("kind", "name"), LARGE)
def test_it_decodes_to_the_original_bits(kind: int, name: str) -> None:
    tensor, expected = compressed(kind, name), plain(kind, name)
    assert [part.kind for part in tensor.parts] == [kind]
    assert same(tensor, expected) and tensor.stride() == expected.stride()
    assert tensor.dtype == expected.dtype == DTYPES[kind] and not tensor.requires_grad
    assert tensor.nbytes_stored < expected.nbytes and str(tensor.dtype) in repr(tensor)
    assert tensor.element_size() == expected.element_size() and tensor.nbytes < expected.nbytes


@pytest.mark.parametrize(
    ("kind", "name"),
    [each for each in product(CASTS, VIEWS) if (each[0], VIEWS[each[1]][0]) in LARGE],
)
def test_views(kind: int, name: str) -> None:
    weight, function, stays = VIEWS[name]
    found, expected = compressed(kind, weight), plain(kind, weight)
    try:
        expected = function(expected)
    except (RuntimeError, NotImplementedError):  # PyTorch has no such function of FP8
        assert expected.dtype.itemsize == 1
        with pytest.raises((RuntimeError, NotImplementedError)):
            function(found)
        return
    found = function(found)
    assert same(found, expected)
    assert isinstance(found, CompressedTensor) == stays


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("kind", MULTIPLIED)
def test_products(name: str, kind: int, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ("X", "BIAS"):
        value = getattr(test_tensor, given).to(DTYPES[kind])
        monkeypatch.setattr(test_tensor, given, value)
    weight, function = PRODUCTS[name]
    try:
        expected = function(plain(kind, weight))
    except RuntimeError:  # PyTorch multiplies groups of BF16 alone on the CPU
        assert name == "grouped"
        with pytest.raises(RuntimeError):
            function(compressed(kind, weight, exact))
        return
    assert same(function(compressed(kind, weight, exact)), expected)


@pytest.mark.parametrize("kind", MULTIPLIED)
def test_gradients_go_through(kind: int) -> None:
    x, bias = torch.randn(5, 256).to(DTYPES[kind]), torch.randn(128).to(DTYPES[kind])
    found, expected = [], []
    for weight, out in ((compressed(kind, "q"), found), (plain(kind, "q"), expected)):
        given = [value.clone().requires_grad_() for value in (x, bias)]
        functional.linear(given[0], weight, given[1]).square().sum().backward()
        out += [value.grad for value in given]
    assert all(map(same, found, expected))


@pytest.mark.parametrize("kind", MULTIPLIED)
def test_it_compiles_to_the_same_bits(kind: int) -> None:
    class Both(nn.Module):
        def __init__(self, w: torch.Tensor) -> None:
            super().__init__()
            self.w = nn.Parameter(w, requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = functional.embedding(IDS.abs().view(-1), self.w[:, :128])
            return functional.linear(x, self.w) + rows

    torch._dynamo.reset()
    x = torch.randn(4, 256).to(DTYPES[kind])
    made = torch.compile(Both(compressed(kind, "q")), fullgraph=True, backend="aot_eager")
    assert same(made(x), Both(plain(kind, "q"))(x))


@pytest.mark.parametrize("kind", CASTS)
def test_rows_of_slices_that_are_decoded_in_turn(
    kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU gathers rows, for which it has no kernel."""
    monkeypatch.setattr(_ops, "TEMPORARY_BYTES", 32 * 264 * 4)
    tensor = torch.cat([compressed(kind, "edge"), compressed(kind, "edge")[:64]])
    indices = torch.tensor([583, 0, 519, 520, 31, 32, 0])
    out = torch.empty(len(indices), 264, dtype=DTYPES[kind])
    _ops.gather_decoded(indices, tensor._arrays, tensor.flat_parts, out)
    expected = plain(kind, "edge").view(torch.uint8)
    expected = torch.cat([expected, expected[:64]])[indices]
    assert torch.equal(out.view(torch.uint8), expected)
    found = torch.ops.df11.embedding(indices, tensor._arrays, tensor.flat_parts)
    assert torch.equal(found.view(torch.uint8), expected)
    for wrong in (-1, 584):
        with pytest.raises((RuntimeError, AssertionError)):
            _ops.gather_decoded(
                torch.tensor([0, wrong]), tensor._arrays, tensor.flat_parts, out[:2]
            )


@pytest.mark.parametrize("kind", CASTS)
def test_it_is_kept_and_copied(kind: int) -> None:
    tensor, expected = compressed(kind, "edge"), plain(kind, "edge")
    file = io.BytesIO()
    torch.save({"w": nn.Parameter(tensor, requires_grad=False)}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)["w"]
    for other in (found, copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert isinstance(other, CompressedTensor) and same(other, expected)
        assert other.dtype == expected.dtype
    assert tensor.to("meta").dtype == expected.dtype
    names, numbers = held(kind).describe(tensor)
    assert same(held(kind).rebuild((names, numbers)), expected)


@pytest.mark.parametrize("kind", CASTS)
def test_another_dtype_decodes_it(kind: int) -> None:
    tensor, expected = compressed(kind, "q"), plain(kind, "q")
    assert isinstance(tensor.to(expected.dtype), CompressedTensor)
    other = torch.float64
    with pytest.warns(UserWarning, match="converted to another dtype"):
        found = tensor.to(other)
    assert not isinstance(found, CompressedTensor) and same(found, expected.to(other))


def on_gpu(kind: int, name: str, is_streamed: bool) -> CompressedTensor:
    tensor = compressed(kind, name)
    return streamed(tensor, GPU) if is_streamed else tensor.to(GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("kind", "name"), LARGE)
def test_it_decodes_on_a_gpu(kind: int, name: str, is_streamed: bool) -> None:
    tensor, expected = on_gpu(kind, name, is_streamed), plain(kind, name)
    assert tensor.is_cuda and tensor.is_streamed == is_streamed
    assert same(tensor, expected.cuda())
    rows = tensor.shape[0]
    for begin, end in ((0, 1), (rows // 3, rows - 1), (32, rows)):
        if begin < end <= rows:
            assert same(tensor[begin:end], expected[begin:end].cuda())
    assert same(tensor.to("cpu"), expected)
    _native.check(0, torch.cuda.current_stream().cuda_stream)


@pytest.mark.gpu
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("kind", MULTIPLIED)
@torch.no_grad()
def test_products_on_a_gpu(
    name: str, kind: int, is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given in ("X", "BIAS"):
        value = getattr(test_tensor, given).to("cuda", DTYPES[kind])
        monkeypatch.setattr(test_tensor, given, value)
    for given in ("IDS", "OFFSETS"):
        monkeypatch.setattr(test_tensor, given, getattr(test_tensor, given).cuda())
    weight, function = PRODUCTS[name]
    try:
        expected = function(plain(kind, weight).cuda())
    except RuntimeError:  # PyTorch multiplies groups of BF16 alone
        assert name == "grouped"
        with pytest.raises(RuntimeError):
            function(on_gpu(kind, weight, is_streamed))
        return
    assert same(function(on_gpu(kind, weight, is_streamed)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MULTIPLIED)
@torch.no_grad()
def test_a_graph_of_a_gpu_decodes_it(kind: int) -> None:
    tensor, x = on_gpu(kind, "q", False), torch.randn(5, 256).to("cuda", DTYPES[kind])
    functional.linear(x, tensor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = functional.linear(x, tensor)
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert same(found, functional.linear(x, plain(kind, "q").cuda()))


def test_parts_have_one_dtype() -> None:
    one, other = compressed(4, "q"), compressed(6, "q")
    with pytest.raises(ValueError, match="several dtypes"):
        arrays, parts = [*one._arrays, *other._arrays], [*one.parts, *other.parts]
        CompressedTensor(arrays, parts, (256, 256)).decode()
    joined = torch.cat([compressed(6, "q"), compressed(8, "k")])
    assert isinstance(joined, CompressedTensor) and joined.dtype == torch.float32
    assert same(joined, torch.cat([plain(6, "q"), plain(8, "k")]))
    joined = torch.cat([compressed(5, "q"), weights()["k"]])
    assert {part.kind for part in joined.parts} == {STORED, 5}
    assert same(joined, torch.cat([plain(5, "q"), WEIGHTS["k"]]))


@pytest.mark.parametrize("kind", CASTS)
def test_arrays_of_another_kind_are_refused(kind: int) -> None:
    """Kinds with planes of other lengths. The numbers tell the other kinds apart."""
    tensor = compressed(kind, "q")
    alike = {len(compressed(kind, "q")._arrays[3]): [] for kind in CASTS}
    for each in CASTS:
        alike[len(compressed(each, "q")._arrays[3])].append(each)
    same_plane = [STORED, *alike[len(tensor._arrays[3])]]
    for other in {*range(-1, len(DTYPES) + 1)} - {*same_plane}:
        parts = [part._replace(kind=other) for part in tensor.parts]
        arrays = tensor._arrays[: 2 if other == FAST else None]
        with pytest.raises(ValueError):
            CompressedTensor(arrays, parts, (128, 256)).decode()


def test_damage_is_found() -> None:
    def damaged(at: int) -> Any:
        tensor = compressed(6, "q")
        arrays = [array.clone() for array in tensor._arrays]
        arrays[at][:-32].bitwise_xor_(0xFF)
        return tensor.like(arrays, tensor.parts, device=None)

    for at in (0, 1):
        with pytest.raises(df11.CorruptError):
            functional.linear(torch.ones(1, 256), damaged(at))


def test_kinds_of_the_format(tmp_path: Path) -> None:
    """A matrix of each kind in a container of the format's vectors."""
    data = (ROOT / "spec/vectors/valid/float-edges.df11.gz").read_bytes()
    (tmp_path / "edges.df11").write_bytes(gzip.decompress(data))
    tensors = Tensors(df11.open(tmp_path / "edges.df11"))
    kinds = set()
    for name in tensors:
        tensor, expected = tensors[name], tensors.stored(name).torch()
        assert isinstance(tensor, CompressedTensor) and same(tensor, expected)
        assert same(tensor[5:33, 8:200], expected[5:33, 8:200])
        kinds |= {part.kind for part in tensor.parts}
    assert kinds == {*CASTS}
    x = torch.ones(2, 264, dtype=torch.bfloat16)
    weight = tensors["BF16.4"]
    assert same(functional.linear(x, weight), functional.linear(x, weight.clone()))
