"""Weights on their devices: what a loader has made otherwise, and memory that a GPU reads."""

import gc
from pathlib import Path

import pytest
import torch
from conftest import on_devices
from torch.nn import functional
from weights import WEIGHTS, compressed, container_of, normals, same, weights

from df11 import _bring
from df11._container import Tensors
from df11._encoding import pack_dense
from df11._errors import GpuError
from df11._plan import EXCEPTIONAL, SMALL, Item, Residence, WeightBlock
from df11._progress import Bar
from df11._tensor import CompressedTensor

ops = torch.ops.df11
#: Weights that the encoder takes, one of each kind.
ENCODABLE = ["every", "odd", "edge", "one_strip", "q", "wide", "experts", "convolution"]
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
#: Ticks of a GPU's clock in about a second.
LONG = 2_000_000_000


def device_of(name: str) -> _bring._Device:
    index = 0 if name == "cuda" else None
    return _bring._Device(weights(), torch.device(name, index), Bar(0))


def noise(*shape: int) -> torch.Tensor:
    """Bits without any order, which no code makes smaller."""
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator)
    return bits.to(torch.int16).view(torch.bfloat16)


@on_devices
@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("name", ENCODABLE)
def test_encoded_weights_are_those_of_a_container(name: str, is_there: bool, device: str) -> None:
    """Whether the weight lies on the CPU or on the device already; of whichever strides."""
    to, value = device_of(device), WEIGHTS[name].to(device if is_there else "cpu")
    spread = torch.stack([value, value], -1)[..., 0]
    for each in (value, spread):
        found = _bring.compress(each, "stored", to.device, exact=True)
        assert not isinstance(found, str) and found.exact and found.device.type == device
        for mine, theirs in zip(found._arrays[:4], compressed(name)._arrays, strict=False):
            assert torch.equal(mine.cpu(), theirs), name
        assert same(found.cpu(), WEIGHTS[name]) and same(found.decode().cpu(), WEIGHTS[name])
        assert same(found[3:9].decode().cpu(), WEIGHTS[name][3:9])


@on_devices
@pytest.mark.parametrize("name", ["odd", "edge", "q", "wide"])
@torch.no_grad()
def test_products_of_encoded_weights(name: str, device: str) -> None:
    """By the table that is made of the codebook on a GPU."""
    value = WEIGHTS[name].to(device)
    place = device_of(device).device
    exact, fused = (_bring.compress(value, "stored", place, mode) for mode in (True, False))
    assert isinstance(exact, CompressedTensor) and isinstance(fused, CompressedTensor)
    assert exact.exact and not fused.exact
    for rows in (1, 7, 200):
        x = normals(rows)(rows, value.shape[1]).to(device)
        expected = functional.linear(x, value)
        assert same(functional.linear(x, exact), expected)
        error = (functional.linear(x, fused).float() - expected.float()).norm()
        assert error <= 0.02 * expected.float().norm() + 1e-3


@on_devices
def test_what_codes_make_no_smaller_stays(device: str) -> None:
    place = device_of(device).device
    assert _bring.compress(noise(256, 256), "stored", place, exact=True) == SMALL


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("residence", "why"), [("stored", SMALL), ("fast", EXCEPTIONAL)], ids=["stored", "fast"]
)
def test_dense_weights_beside_those_of_a_container(residence: Residence, why: str) -> None:
    """One pass brings both, in the form that is asked for, on a stream with work on it."""
    tensors = weights()
    dense = Item("dense", WEIGHTS["wide"].clone(), [], is_encodable=True)
    worse = Item("noise", noise(256, 256), [], is_encodable=True)
    items = [Item("q", tensors["q"], ["q"]), dense, worse]
    block = WeightBlock(items, FIRST, residence)
    with torch.cuda.stream(torch.cuda.Stream(FIRST)):
        torch.cuda._sleep(LONG // 20)
        found = {item.name: value for item, value in _bring.bring(tensors, [block], True, Bar(0))}
    for name, wanted in (("q", "q"), ("dense", "wide")):
        assert same(found[name].decode().cpu(), WEIGHTS[wanted])
    assert isinstance(found["dense"], CompressedTensor) and found["dense"].device == FIRST
    assert worse.reason == why and torch.equal(
        found["noise"].view(torch.int16), noise(256, 256).view(torch.int16)
    )


@on_devices
def test_a_window_of_columns_has_the_strides_of_a_moved_view(device: str) -> None:
    """A view keeps its gaps where it lies, and a copy on another device has none."""
    tensors, place = weights(), device_of(device).device
    item = Item("wide", tensors["wide"][:, :256], ["wide"])
    ((_, found),) = _bring.bring(tensors, [WeightBlock([item], place, "stored")], True, Bar(0))
    expected = WEIGHTS["wide"][:, :256].to(device)
    assert isinstance(found, CompressedTensor) and same(found.cpu(), expected.cpu())
    assert found.stride() == expected.stride() and found.is_matrix == expected.is_contiguous()


@pytest.mark.gpu(2)
def test_packing_on_another_gpu_leaves_the_current_one() -> None:
    weights = torch.zeros(64, 256, dtype=torch.bfloat16, device=SECOND)
    with torch.cuda.device(FIRST):
        pack_dense(SECOND, weights)
        # Freeing what packing has used must not make that GPU PyTorch's current device.
        assert torch.cuda.current_device() == FIRST.index


@pytest.mark.gpu(2)
@pytest.mark.parametrize("is_mapped", [True, False])
def test_pinned_memory_outlives_kernels_of_another_gpu(
    is_mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel waits on the second GPU while the last weight of the first one goes: its memory is
    given back when that kernel has read it, and not before.
    """
    if not is_mapped:

        def refused(address: int, length: int) -> None:
            raise GpuError("not here")

        monkeypatch.setattr(_bring._native, "pin", refused)
    value = normals(1)(4096, 1024)
    tensors = Tensors(container_of({"w": value}, tmp_path))
    item = Item("w", tensors["w"], ["w"])
    block = WeightBlock([item], FIRST, "streamed")
    ((_, weight),) = _bring.bring(tensors, [block], True, Bar(0))
    assert isinstance(weight, CompressedTensor) and weight.is_streamed
    # Less than half of a matrix is read where it lies.
    part = weight.parts[0]._replace(row_begin=1024, row_end=2048)
    pinned = weight._arrays[:4]
    assert all(array.is_pinned() for array in pinned)
    arrays = [*pinned, ops.table(pinned[0].to(SECOND))]
    sizes = [array.nbytes for array in pinned]
    stream = torch.cuda.Stream(SECOND)
    ops.decode(arrays, part, SECOND)  # kernels are loaded, and the allocator has its memory
    torch.cuda.synchronize(SECOND)
    with torch.cuda.device(SECOND), torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        found = ops.decode(arrays, part, SECOND)
    with torch.cuda.device(FIRST):
        assert not stream.query()
        del weight, arrays, pinned, item, block
        gc.collect()
        assert not any(type(each) is _bring._Held for each in gc.get_objects())
        assert stream.query()
        others = [torch.full((size,), 255, dtype=torch.uint8).pin_memory() for size in sizes * 4]
    assert same(found.cpu(), value[1024:2048]) and len(others) == 16
