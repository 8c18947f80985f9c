"""Exact products on a GPU: the bits of PyTorch's, without decoding if its order is known."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from weights import same

import df11
from df11 import _matrices, _native, _ops, _order
from df11._encoding import encode, pack_dense
from df11._experts import MAX_ROUTED
from df11._tensor import CompressedTensor

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
#: Rows and columns: one split, two, three to eight by the number of rows of x, columns that end
#: within a block.
SHAPES = [(6144, 4096), (4096, 4096), (1024, 4096), (4096, 14336), (520, 1000)]
X_ROWS = [1, 2, 7, 8, 16, 17, 32, 64, 128]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DF11_ORDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_order, "_known", {})
    monkeypatch.setattr(_ops, "_known", {})
    monkeypatch.setattr(_order, "_waiting", {})
    monkeypatch.setattr(_order, "_caches", {})


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Shapes of what operators decode."""
    shapes: list[tuple[int, int]] = []

    def decode(*given: Any) -> Tensor:
        made = real(*given)
        shapes.append(tuple(made.shape))
        return made

    real = _ops._decode
    monkeypatch.setattr(_ops, "_decode", decode)
    yield shapes
    _native.check(0, torch._C._cuda_getCurrentRawStream(0))


def keeps_orders() -> bool:
    """Whether few rows of x must be multiplied without decoding: where cuBLAS adds in order."""
    return torch.cuda.get_device_capability() == (9, 0)


def seeded(seed: int = 5) -> Callable[..., Tensor]:
    generator = torch.Generator(GPU).manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, device=GPU)


def inputs(kind: str, rows: int, columns: int, x_rows: int) -> tuple[Tensor, Tensor]:
    """A weight and x: ordinary ones, magnitudes of e to ±9, or pairs of columns that cancel."""
    normal = seeded(rows + columns + x_rows)
    if kind == "normal":
        return (0.02 * normal(rows, columns)).bfloat16(), normal(x_rows, columns).bfloat16()
    wide = (3 * normal(x_rows, columns)).clamp(-9, 9).exp() * normal(x_rows, columns)
    if kind == "wide":
        return (0.02 * normal(rows, columns)).bfloat16(), wide.bfloat16()
    half, at = columns // 2, torch.randperm(columns, device=GPU)
    w, x = 0.02 * normal(rows, half), wide[:, :half]
    return (
        torch.cat([w, w], 1)[:, at].bfloat16().contiguous(),
        torch.cat([x, -x], 1)[:, at].bfloat16().contiguous(),
    )


def compressed(w: Tensor, form: str) -> CompressedTensor:
    if form == "fast":
        packed = pack_dense(GPU, w)
        assert packed is not None
        return CompressedTensor(*packed, w.shape)
    found = encode(w)
    assert found is not None
    arrays, parts = found
    torch.cuda.synchronize()
    place = (arrays[0].data_ptr(), arrays[0].nbytes, arrays[-1].data_ptr())
    _native.build_tables(0, [place])
    return CompressedTensor(arrays, parts, w.shape)


@pytest.mark.parametrize("form", ["fast", "stored"])
@pytest.mark.parametrize("kind", ["normal", "wide", "cancelling"])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_products_have_pytorchs_bits(
    shape: tuple[int, int], kind: str, form: str, decoded: list[Any]
) -> None:
    w, x = inputs(kind, *shape, max(X_ROWS))
    tensor, bias = compressed(w, form), seeded(9)(shape[0]).bfloat16()
    for rows in X_ROWS:
        for added in (None, bias):
            expected = functional.linear(x[:rows], w, added)
            assert same(functional.linear(x[:rows], tensor, added), expected), (rows, added)
    # For stored matrices, kernels of this many rows add in an order of their own.
    if keeps_orders() and form == "fast" and shape[1] % 64 == 0:
        decoded.clear()
        functional.linear(x[:1], tensor)
        functional.linear(x[:8], tensor)
        assert not decoded


@pytest.mark.parametrize("rows", [257, 2048, 3072, 3073, 4608])
@pytest.mark.parametrize("shape", [(1024, 2048), (6144, 4096), (4096, 14336)])
@torch.no_grad()
def test_many_rows_are_multiplied_when_they_come_again(
    shape: tuple[int, int], rows: int, decoded: list[Any]
) -> None:
    """By one launch or several, where decoding first takes longer."""
    w, x = inputs("cancelling", *shape, rows)
    tensor = compressed(w, "fast")
    kernels = _matrices.product(tensor._arrays, tensor.flat_parts, 0)
    expected = functional.linear(x, w)
    for time in range(3):
        decoded.clear()
        assert same(functional.linear(x, tensor), expected)
        if keeps_orders():
            assert kernels is not None
            assert bool(decoded) == (time == 0 or rows >= kernels.crossover_rows)


@torch.no_grad()
def test_layouts_of_x(decoded: list[Any]) -> None:
    w, x = inputs("cancelling", 4096, 4096, 12)
    tensor, bias = compressed(w, "fast"), seeded(9)(4096).bfloat16()
    apart = torch.empty(12, 4096 + 64, dtype=torch.bfloat16, device=GPU)[:, :4096]
    odd = torch.empty(12 * 4096 + 8, dtype=torch.bfloat16, device=GPU)[8:].view(12, 4096)
    for other in (apart, odd):
        other.copy_(x)
    for given in (
        *(x[0], x[:3], x.view(3, 4, 4096), x.view(3, 4, 4096).mT.contiguous().mT, apart, odd),
        *(x.view(3, 4, 4096).transpose(0, 1), x[:1].expand(5, -1), x[::2]),
        *(x.view(3, 4, 4096)[:, -1:], x.view(1, 12, 4096)[:, -1:], x.view(1, 12, 4096)[:, 2:5]),
    ):
        for added in (None, bias):
            expected = functional.linear(given, w, added)
            assert same(functional.linear(given, tensor, added), expected), given.stride()


@torch.no_grad()
def test_several_weights_at_once() -> None:
    w, x = inputs("cancelling", 6144, 4096, 3)
    parts = torch.split(w, [4096, 1024, 1024])
    tensors = [compressed(part.contiguous(), "fast") for part in parts]
    arrays = [array for tensor in tensors for array in tensor._arrays]
    flat = [number for tensor in tensors for number in tensor.flat_parts]
    found = torch.ops.df11.linears(x, arrays, flat, [1, 1, 1], [], True)
    for y, part in zip(found, parts, strict=True):
        assert same(y, functional.linear(x, part.contiguous()))
    # One weight of several parts, which PyTorch multiplies at once.
    merged = CompressedTensor(arrays, [tensor.parts[0] for tensor in tensors], w.shape)
    assert same(functional.linear(x, merged), functional.linear(x, w))


@torch.no_grad()
def test_a_captured_graph(decoded: list[Any]) -> None:
    w, x = inputs("cancelling", 4096, 4096, 8)
    tensor = compressed(w, "fast")
    fixed = x.clone()

    def captured(rows: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = functional.linear(fixed[:rows], tensor)
        return graph, y

    functional.linear(fixed[:8], w)  # cuBLAS's own workspace
    functional.linear(fixed[:8], tensor)
    decoded.clear()
    for rows, is_known in ((8, True), (5, False)):
        graph, y = captured(rows)
        assert bool(decoded) == (not is_known or not keeps_orders())
        for seed in (1, 2):
            fixed.copy_(x * seed)
            graph.replay()
            assert same(y, functional.linear(fixed[:rows], w))
    # An order that was unknown during a capture is measured afterwards.
    functional.linear(fixed[:5], tensor)
    decoded.clear()
    functional.linear(fixed[:5], tensor)
    assert not (decoded and keeps_orders())


@torch.no_grad()
def test_a_compiled_layer() -> None:
    w, x = inputs("cancelling", 4096, 4096, 8)
    layer = nn.Linear(4096, 4096, bias=False, device=GPU, dtype=torch.bfloat16)
    layer.weight = nn.Parameter(compressed(w, "fast"), requires_grad=False)
    expected = functional.linear(x, w)
    assert same(torch.compile(layer, fullgraph=True)(x), expected)


def test_training_and_adapters(decoded: list[Any]) -> None:
    w, x = inputs("normal", 4096, 4096, 8)

    def adapted(weight: Tensor) -> Any:
        layer = nn.Linear(4096, 4096, bias=False, device=GPU, dtype=torch.bfloat16)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        torch.manual_seed(4)
        options = LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
        return get_peft_model(nn.Sequential(layer), options)

    results = []
    for model in (adapted(w), adapted(compressed(w, "fast"))):
        given = x.clone().requires_grad_()
        y = model(given)
        y.float().square().sum().backward()
        others = [one.grad for name, one in model.named_parameters() if "lora" in name]
        results.append([y, given.grad, *others])
    for one, other in zip(*results, strict=True):
        assert same(one, other)
    # Backward decodes, and forward need not.
    assert len(decoded) <= 2


@pytest.mark.parametrize("rows", [1, 6, 40, 200, 8 * MAX_ROUTED, 8 * MAX_ROUTED + 1])
@torch.no_grad()
def test_experts(rows: int, decoded: list[Any]) -> None:
    """By kernels for few rows of each expert and for more; and decoded."""
    experts, height, columns = 8, 768, 2048
    w, x = inputs("cancelling", experts * height, columns, rows)
    tensor = compressed(w, "fast").view(experts, height, columns)
    ends = torch.randint(0, rows + 1, (experts,), device=GPU).sort().values
    ends[-1] = rows
    offs = ends.int()
    dense = w.view(experts, height, columns)
    for _ in range(2):
        decoded.clear()
        found = torch._grouped_mm(x, tensor.mT, offs=offs)
        assert same(found, torch._grouped_mm(x, dense.mT, offs=offs))
    if keeps_orders():
        assert bool(decoded) == (rows > MAX_ROUTED * experts)


@pytest.mark.parametrize("name", ["llama", "llama-bias", "qwen3-tied", "mixtral"])
@torch.no_grad()
def test_logits_of_each_step(name: str, tmp_path: Path) -> None:
    folder = models.causal(name, tmp_path / "bf16")
    dense = models.load(folder, GPU)
    residence = {"quantization_config": df11.Config(residence="fast")}
    model = models.load(folder, GPU, **residence)
    assert df11.report(model).modes == ["exact"]
    ids = torch.randint(0, 512, (3, 9), generator=torch.Generator().manual_seed(1)).to(GPU)
    options = {"max_new_tokens": 12, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True, "eos_token_id": None}
    expected, found = (each.generate(ids, **options) for each in (dense, model))
    assert torch.equal(expected.sequences, found.sequences)
    for one, other in zip(expected.logits, found.logits, strict=True):
        assert torch.equal(one, other)


@torch.no_grad()
def test_the_report(tmp_path: Path) -> None:
    folder = models.causal("llama", tmp_path / "bf16")
    residence = {"quantization_config": df11.Config(residence="fast")}
    told = df11.report(models.load(folder, GPU, **residence))
    assert told.orders and all(rows for rows in told.orders.values())
    assert f" of {len(told.orders)} matrices are multiplied in BF16's order" in str(told)


@torch.no_grad()
def test_random_numbers_are_nobody_elses() -> None:
    w, x = inputs("normal", 4096, 4096, 3)
    tensor = compressed(w, "fast")
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    functional.linear(x, tensor)
    after = torch.cuda.get_rng_state(), torch.get_rng_state()
    assert all(map(torch.equal, before, after))


@torch.no_grad()
def test_memory_is_free_again() -> None:
    w, x = inputs("normal", 4096, 4096, 3)
    tensor = compressed(w, "fast")
    functional.linear(x[:1], tensor)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    functional.linear(x, tensor)
    assert torch.cuda.memory_allocated() == before


@torch.no_grad()
def test_weights_that_were_freed_are_not_missed() -> None:
    """A product prefetches from the weights of the one that came after it, which may be gone."""
    w, x = inputs("normal", 4096, 4096, 1)
    first, second = compressed(w, "fast"), compressed(w, "fast")
    expected = functional.linear(x, w)
    for weight in (first, second, first):
        assert same(functional.linear(x, weight), expected)
    del weight, second
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert same(functional.linear(x, first), expected)
    torch.cuda.synchronize()
