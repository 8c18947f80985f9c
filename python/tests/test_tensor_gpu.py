"""Compressed tensors on a GPU: stored, fast and streamed; graphs, memory, compilation."""

import io
from pathlib import Path
from typing import Any

import pytest
import test_tensor
import torch
from test_tensor import PRODUCTS, VIEWS, linear_of
from torch.nn import functional
from weights import WEIGHTS, compressed, container_of, normals, same, streamed

import df11
from df11 import _ahead, _native, _ops, _workspaces
from df11._container import Tensors
from df11._encoding import pack_dense
from df11._tensor import CompressedTensor
from df11._watch import check_gpus, raise_if_damaged

pytestmark = pytest.mark.gpu
ops = torch.ops.df11
GPU = torch.device("cuda", 0)
FORMS = ["stored", "fast", "streamed"]


def exact_product(name: str) -> torch.Tensor:
    return functional.linear(normal(1, 256), plain(name))


def stream() -> int:
    return torch._C._cuda_getCurrentRawStream(0)


def fast_of(tensor: CompressedTensor) -> CompressedTensor:
    packed = pack_dense(GPU, tensor.decode().view(tensor.matrix_shape))
    if packed is None:
        pytest.skip("too many exceptions for the fast layout")
    return CompressedTensor(*packed, tensor.shape, exact=tensor.exact)


def on_gpu(name: str, form: str, exact: bool = True) -> CompressedTensor:
    tensor = compressed(name, exact)
    if form == "streamed":
        return streamed(tensor, GPU)
    moved = tensor.to(GPU)
    return fast_of(moved) if form == "fast" else moved


def plain(name: str) -> torch.Tensor:
    return WEIGHTS[name].to(GPU)


def normal(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(GPU)


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Two products that add up in other orders.

    By the norm: in a mixture such an order can send a token to another expert.
    """
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    error = (found.float() - expected.float()).norm()
    return bool(error <= 0.02 * expected.float().norm() + 1e-3)


@pytest.fixture(autouse=True)
def nothing_was_wrong() -> Any:
    yield
    if torch.cuda.is_available():
        _native.check(0, stream())


@pytest.fixture
def inputs_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("X", "BIAS", "IDS", "OFFSETS"):
        monkeypatch.setattr(test_tensor, name, getattr(test_tensor, name).to(GPU))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_it_decodes_to_the_original_bits(name: str, form: str) -> None:
    tensor = on_gpu(name, form)
    assert tensor.device == GPU and tensor.is_streamed == (form == "streamed")
    assert same(tensor, plain(name))
    rows = WEIGHTS[name].shape[0]
    for begin, end in ((0, 1), (rows // 3, rows - 1), (32, rows)):
        if begin < end <= rows:
            assert same(tensor[begin:end], plain(name)[begin:end])


@pytest.mark.usefixtures("inputs_on_gpu")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PRODUCTS)
@torch.no_grad()
def test_products(name: str, form: str) -> None:
    """Exact ones have PyTorch's bits; fused ones add up in another order."""
    weight, function = PRODUCTS[name]
    expected = function(plain(weight))
    assert same(function(on_gpu(weight, form, exact=True)), expected)
    assert is_close(function(on_gpu(weight, form, exact=False)), expected)


@pytest.mark.usefixtures("inputs_on_gpu")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [name for name in VIEWS if "mask" not in name])
def test_views(name: str, form: str) -> None:
    weight, function, stays = VIEWS[name]
    found, expected = function(on_gpu(weight, form)), function(plain(weight))
    assert isinstance(found, CompressedTensor) == stays
    assert same(found, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 17, 33, 100, 128, 129, 700, 3000])
@pytest.mark.parametrize("name", ["odd", "edge", "wide", "one_strip"])
def test_fused_products_of_many_heights(
    name: str, rows: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, tensor = plain(name), on_gpu(name, form, exact=False)
    x, bias = normal(rows, w.shape[1]), normal(w.shape[0], seed=9)
    # In slices too, when it is decoded before.
    monkeypatch.setattr(_ops, "TEMPORARY_BYTES", 64 * 2 * w.shape[1])
    for add in (None, bias):
        expected = functional.linear(x.float(), w.float(), add if add is None else add.float())
        found = functional.linear(x, tensor, add)
        assert is_close(found, expected.bfloat16())
        assert torch.equal(found, functional.linear(x, tensor, add))  # the same in each run
    apart = torch.cat([x, x], dim=1)[:, : w.shape[1]]
    assert torch.equal(functional.linear(apart, tensor), functional.linear(x, tensor))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_several_products_at_once(rows: int, form: str) -> None:
    tensors = [on_gpu(name, form, exact=False) for name in "qkvq"]
    arrays = [array for tensor in tensors for array in tensor._arrays]
    parts = [number for tensor in tensors for number in tensor.flat_parts]
    x, bias = normal(rows, 256), normal(128, seed=9)
    none = bias.new_empty(0)
    fused, exact = (
        ops.linears(x, arrays, parts, [2, 1, 1], [none, none, bias], mode) for mode in (False, True)
    )
    dense = ((torch.cat([plain("q"), plain("k")]),), (plain("v"),), (plain("q"), bias))
    for one, other, given in zip(fused, exact, dense, strict=True):
        expected = functional.linear(x, *given)
        assert is_close(one, expected) and same(other, expected)


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_do_not_exist_are_told(form: str) -> None:
    tensor, wrong = on_gpu("q", form), torch.tensor([5, 128, -1], device=GPU)
    found = functional.embedding(wrong, tensor)
    assert same(found[0], plain("q")[5]) and not found[1:].any()
    # The kernel is done: the next operator raises it, once.
    with pytest.raises(IndexError, match="does not exist"):
        functional.linear(normal(1, 256), tensor)
    assert same(functional.linear(normal(1, 256), tensor.with_mode(True)), exact_product("q"))
    functional.embedding(wrong, tensor)
    with pytest.raises(IndexError, match="does not exist"):
        check_gpus([GPU])
    raise_if_damaged()
    with pytest.raises(IndexError):
        functional.embedding(wrong.cpu(), compressed("q"))


@pytest.mark.parametrize("value", [2**31 - 1, -(2**31), 6, -1])
def test_numbers_of_experts_do_not_wrap(value: int) -> None:
    tensor = on_gpu("experts", "stored")
    for dtype in (torch.int32, torch.int64):
        torch.index_select(tensor, 0, torch.tensor([2, value], dtype=dtype, device=GPU))
        with pytest.raises(IndexError):
            check_gpus([GPU])


@pytest.mark.parametrize("rows", [1, 5, 700])
@pytest.mark.parametrize("exact", [True, False])
def test_damaged_weights_are_told_without_waiting(exact: bool, rows: int) -> None:
    """Also of a graph, whose replay calls no operator."""
    tensor, x = on_gpu("q", "stored", exact), normal(rows, 256)
    functional.linear(x, tensor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        functional.linear(x, tensor)
    torch.cuda.synchronize()
    raise_if_damaged(GPU)
    # Records of other lengths, which no checksum of the file covers here.
    tensor._records0[8:40] = 0x77
    graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(df11.CorruptError, match="weights decoded on the GPU"):
        raise_if_damaged(GPU)
    raise_if_damaged(GPU)
    functional.linear(x, tensor)
    torch.cuda.synchronize()
    with pytest.raises(df11.CorruptError):
        functional.linear(x, tensor)
    functional.linear(x, tensor)
    with pytest.raises(df11.CorruptError):
        check_gpus([GPU])


@pytest.mark.parametrize("call", ["linear", "linears", "embedding", "decode", "grouped_linear"])
@pytest.mark.parametrize("form", FORMS)
def test_wrong_arguments_are_the_same_errors_as_on_the_cpu(call: str, form: str) -> None:
    def raised(name: str, device: torch.device, change: str) -> type | None:
        tensor = on_gpu(name, form) if device.type == "cuda" else compressed(name)
        arrays, parts, x = tensor._arrays, list(tensor.flat_parts), normal(5, 256).to(device)
        match change:
            case "columns":
                x = x[:, :-1]
            case "dtype":
                x = x.to(torch.int16)
            case "no parts":
                parts = []
            case "rows":
                parts[5] = 10_000
            case "few arrays":
                arrays = arrays[:1]
            case "lengths":
                arrays = [*arrays[:-2], arrays[-2][:-1], arrays[-1]]
            case "meta":
                arrays = [array.to("meta") for array in arrays]
        offsets = torch.tensor([0, 0, 1, 1, 5, 5, 5], dtype=torch.int32, device=device)
        calls = {
            "linear": lambda: ops.linear(x, arrays, parts, None, False),
            "linears": lambda: ops.linears(x, arrays, parts, [1], [], False),
            "embedding": lambda: ops.embedding(x[:, 0], arrays, parts),
            "decode": lambda: ops.decode(arrays, parts, device),
            "grouped_linear": lambda: ops.grouped_linear(x, offsets, None, arrays, parts, 6),
        }
        try:
            calls[call]()
        except Exception as error:
            return type(error)
        return None

    name = "experts" if call == "grouped_linear" else "q"
    for change in ("columns", "dtype", "no parts", "rows", "few arrays", "lengths", "meta"):
        if form == "fast" and change == "lengths":
            continue  # no such form on the CPU
        found, expected = (raised(name, device, change) for device in (GPU, torch.device("cpu")))
        assert found is expected, (change, found, expected)


@pytest.mark.parametrize("form", ["stored", "fast"])
@pytest.mark.parametrize("with_rows", [True, False])
@pytest.mark.parametrize("name", ["experts", "experts_apart"])
def test_experts(name: str, with_rows: bool, form: str) -> None:
    tensor = on_gpu(name, form, exact=False)
    offsets = torch.tensor([0, 0, 3, 3, 8, 9, 9], dtype=torch.int32, device=GPU)
    rows = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0], dtype=torch.int32, device=GPU)
    x = normal(4 if with_rows else 9, 256)
    chosen = rows if with_rows else None
    found = ops.grouped_linear(x, offsets, chosen, tensor._arrays, tensor.flat_parts, 6)
    taken = x[rows] if with_rows else x
    for at, expert in enumerate([1, 1, 1, 3, 3, 3, 3, 3, 4]):
        assert is_close(found[at : at + 1], taken[at : at + 1] @ plain(name)[expert].T)


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form: str) -> None:
    results = []
    for w in (on_gpu("edge", form), plain("edge")):
        x = normal(7, 264).requires_grad_()
        functional.linear(x, w).square().sum().backward()
        results.append(x.grad)
    assert same(*results)
    x = normal(7, 264).requires_grad_()
    functional.linear(x, on_gpu("edge", form, exact=False)).square().sum().backward()
    assert is_close(x.grad, results[1])


def test_moves() -> None:
    tensor = compressed("experts")
    there = tensor.to(GPU)
    assert there._table0.nbytes == 16384 and there.device == GPU and same(there, plain("experts"))
    back = there.cpu()
    assert back.device.type == "cpu" and same(back, WEIGHTS["experts"]) and not back._table0.numel()
    assert there.to("cuda")._plane0.data_ptr() == there._plane0.data_ptr()
    with pytest.raises(RuntimeError, match="load it as stored"):
        fast_of(there).cpu()
    streamed = on_gpu("experts", "streamed")
    assert same(streamed.cpu(), WEIGHTS["experts"]) and not streamed.cpu().is_streamed
    layer = linear_of(compressed("q")).to(GPU)
    assert same(layer(normal(2, 256)), functional.linear(normal(2, 256), plain("q")))


def test_memory_of_the_host_must_be_pinned() -> None:
    tensor = compressed("q")
    arrays = [*(array.clone() for array in tensor._arrays[:4]), tensor.to(GPU)._table0]
    with pytest.raises(ValueError, match="pinned"):
        CompressedTensor(arrays, tensor.parts, tensor.shape, device=GPU).decode()


def test_files_from_and_to_a_gpu() -> None:
    def loaded(tensor: CompressedTensor, **options: Any) -> CompressedTensor:
        torch.save(tensor, file := io.BytesIO())
        file.seek(0)
        return torch.load(file, **options)

    for form in FORMS:
        found = loaded(on_gpu("q", form))
        assert found.device.type == ("cpu" if form == "streamed" else "cuda")
        assert same(found.decode().to(GPU), plain("q"))
    found = loaded(compressed("q"), map_location="cuda")
    assert found.device == GPU and same(found, plain("q"))


def test_the_largest_temporary_of_a_fused_product(tmp_path: Path) -> None:
    head = normals(5)(32768, 4096)
    held = Tensors(container_of({"head": head}, tmp_path))
    tensor, w = compressed("head", exact=False, of=held).to(GPU), head.to(GPU)
    for rows in (1, 16, 3000):
        x = normal(rows, 4096)
        expected = functional.linear(x, w)
        functional.linear(x, tensor)  # makes the workspace
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = functional.linear(x, tensor)
        used = torch.cuda.max_memory_allocated() - before - found.nbytes
        assert used <= 64_000_000 and is_close(found, expected)


def many(rows: int) -> torch.Tensor:
    """So many rows of x that each weight is decoded first."""
    return normal(8192 + rows, 1024)


@pytest.mark.parametrize("form", FORMS)
def test_the_next_weight_is_decoded_ahead(form: str, tmp_path: Path) -> None:
    made = {f"w{at}": normals(at)(512 + 64 * at, 1024) for at in range(4)}
    held = Tensors(container_of(made, tmp_path))
    stored = [compressed(name, of=held) for name in made]
    weights: list[Any] = [streamed(w, GPU) if form == "streamed" else w.to(GPU) for w in stored]
    if form == "fast":
        weights = [fast_of(w) for w in weights]
    plain = [w.to(GPU) for w in made.values()]
    x = many(1)
    expected = [functional.linear(x, w) for w in plain]
    ahead = _ahead.ahead_of(GPU)
    assert ahead is not None

    def run(order: list[int], is_ahead: list[bool]) -> None:
        for at, has_next in zip(order, is_ahead, strict=True):
            assert same(functional.linear(x, weights[at]), expected[at])
            assert (ahead._pending is not None) == has_next

    run([0, 1, 2, 3], [False] * 4)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        run([0, 1, 2, 3], [True, True, True, False])
    assert torch.cuda.memory_allocated() == before
    # Another order than expected, and weights that are gone.
    run([0, 2, 1, 3, 0], [True, True, True, False, True])
    weights[1] = None  # which came after 2
    run([2], [False])
    with torch.cuda.stream(torch.cuda.Stream()):
        assert _ahead.ahead_of(GPU) is None


def captured(function: Any, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = function()
    return graph, out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("exact", [True, False])
def test_graphs(form: str, exact: bool) -> None:
    tensor = on_gpu("wide", form, exact)
    x = normal(3, 512)
    expected = functional.linear(x, tensor)
    graphs = [captured(lambda: functional.linear(x, tensor)) for _ in range(3)]
    for graph, out in graphs:
        out.zero_()
        graph.replay()
        assert same(out, expected)
    streams = [torch.cuda.Stream() for _ in graphs]
    x.copy_(normal(3, 512, seed=8))
    expected = functional.linear(x, tensor)
    torch.cuda.synchronize()
    for _ in range(50):  # at once, each with a workspace of its own
        for (graph, _), side in zip(graphs, streams, strict=True):
            with torch.cuda.stream(side):
                graph.replay()
    torch.cuda.synchronize()
    assert all(same(out, expected) for _, out in graphs)


def test_a_capture_before_anything_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = on_gpu("wide", "stored", exact=False)
    x = normal(3, 512)
    expected = functional.linear(x, tensor)
    monkeypatch.setattr(_workspaces, "_held", {})
    monkeypatch.setattr(_workspaces, "_spare", {})
    graph, out = captured(lambda: functional.linear(x, tensor) + functional.linear(x, tensor))
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert same(out, expected + expected)


def test_workspaces_of_streams() -> None:
    tensor = on_gpu("wide", "stored", exact=False)
    x = normal(3, 512)
    expected = functional.linear(x, tensor)
    torch.cuda.synchronize()
    outs = []
    for _ in range(20):
        for _ in range(4):
            with torch.cuda.stream(torch.cuda.Stream()):
                outs.append(functional.linear(x, tensor))
    torch.cuda.synchronize()
    assert all(same(out, expected) for out in outs)
