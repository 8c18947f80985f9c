"""Compression on a GPU: PyTorch encodes matrices to the arrays that `df11 compress` writes, and
tensors of safetensors files are read ahead.
"""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import on_devices
from safetensors.torch import save_file
from weights import container_of

from df11 import _encoding, _native, _ops, _packing
from df11._container import Tensors
from df11.torch import Gathered, pack

#: Whole tiles, partial ones at each edge, and rows of less than a tile.
SHAPES = [(64, 512), (70, 264), (32, 520), (16, 1024), (201, 136), (128, 256)]


def weights(shape: tuple[int, int], kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if kind == "any":
        bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator)
        # Most of them in a few exponents, so that codes pay and others are escaped.
        some = torch.rand(shape, generator=generator) < 0.03
        normal = (0.02 * torch.randn(shape, generator=generator)).to(torch.bfloat16)
        return torch.where(some, bits.to(torch.int16).view(torch.bfloat16), normal)
    scale = 10.0 ** torch.linspace(-3, 0, shape[0])[:, None] if kind == "rows" else 0.02
    return (scale * torch.randn(shape, generator=generator)).to(torch.bfloat16)


@on_devices
@pytest.mark.parametrize("kind", ["normal", "rows", "any", "one"])
@pytest.mark.parametrize("shape", SHAPES)
def test_arrays_are_those_of_the_container(
    shape: tuple[int, int],
    kind: str,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = torch.full(shape, 1 + 2**-7, dtype=torch.bfloat16)
    value = one if kind == "one" else weights(shape, kind)
    wanted: Any = Tensors(container_of({"w": value}, tmp_path))["w"]
    assert _encoding.is_encodable(value)
    # One strip at a time too, and some.
    for slice_bytes in (1, 3 * 64 * shape[1], 16 << 20):
        monkeypatch.setattr(_encoding, "SLICE_BYTES", slice_bytes)
        found = _encoding.encode(value.to(device))
        assert found is not None
        arrays, (part,) = found
        for index in range(4):
            assert torch.equal(arrays[index].cpu(), wanted._arrays[index]), index
        assert part == wanted.parts[0]
    if device == "cuda":
        book, table = arrays[0], arrays[4]
        place = (book.data_ptr(), book.nbytes, table.data_ptr())
        _native.build_tables(book.device.index, [place])
    decoded = _ops.decode(arrays, list(part), torch.device(arrays[0].device)).cpu()
    assert torch.equal(decoded.view(torch.int16), value.view(torch.int16))


@on_devices
@pytest.mark.parametrize("stacked", [False, True])
def test_one_copy_brings_a_gathered_tensor(device: str, stacked: bool, tmp_path: Path) -> None:
    some = {name: weights((320, 512), kind) for name, kind in (("a", "normal"), ("b", "any"))}
    held = Tensors(container_of(some, tmp_path))
    value: Any = torch.cat([held["a"], held["b"][5:]]) if stacked else held["b"]
    gathered = Gathered(value, torch.device(device))
    buffer = torch.empty(gathered.nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
    gathered.fill(buffer)
    copy = gathered.within(buffer.to(device, non_blocking=True, copy=True))
    buffer.zero_() if device == "cpu" else torch.cuda.synchronize()
    assert copy.device.type == device and copy.parts == value.parts
    assert torch.equal(copy.decode().cpu().view(torch.int16), value.decode().view(torch.int16))
    if device == "cuda":
        with pytest.raises(ValueError, match="on cuda"):
            Gathered(copy, torch.device(device))


def test_what_has_no_fast_layout_is_not_packed() -> None:
    assert pack(weights((64, 512), "normal")) is None  # on the CPU


@pytest.mark.gpu
def test_packed_tensors_keep_their_bits() -> None:
    for shape in ((64, 512), (320, 288), (128, 96, 3, 3)):
        value = weights((shape[0], prod(shape[1:])), "normal").view(shape).cuda()
        packed = pack(value)
        assert packed is not None and packed.shape == shape
        assert torch.equal(packed.decode(), value)
    others = (torch.ones(64, 512), torch.randn(320, 132).bfloat16(), torch.ones(2, 8).bfloat16())
    assert all(pack(other.cuda()) is None for other in others)


def test_what_is_not_smaller_stays() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    value = bits[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(2))]
    assert _encoding.encode(value.view(torch.bfloat16).view(256, 256)) is None
    for shape in [(15, 2048), (64, 260), (512, 64), (16, 512)]:
        assert not _encoding.is_encodable(torch.zeros(shape, dtype=torch.bfloat16)), shape


@pytest.fixture
def files(tmp_path: Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    tensors = {
        f"layers.{at}.w": torch.randn(33, 70 + at, generator=generator).to(torch.bfloat16)
        for at in range(12)
    }
    tensors |= {"empty": torch.empty(0, 3), "one": torch.tensor(5), "norm": torch.ones(7)}
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    names = sorted(tensors)
    for path, some in zip(paths, (names[::2], names[1::2]), strict=True):
        save_file({name: tensors[name] for name in some}, path)
    return list(map(str, paths)), tensors


@on_devices
@pytest.mark.parametrize("ahead", [0, 9000, 1 << 30])
def test_any_order(
    files: tuple[list[str], dict[str, torch.Tensor]],
    ahead: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_packing, "AHEAD_BYTES", ahead)
    monkeypatch.setattr(_packing, "BUFFER_BYTES", 1000)
    (paths, tensors), read, bring = files, [], _packing.Ahead._bring

    def counted(self: Any, entry: Any) -> torch.Tensor:
        read.append(entry)
        return bring(self, entry)

    monkeypatch.setattr(_packing.Ahead, "_bring", counted)
    for order in (sorted(tensors), sorted(tensors, reverse=True)):
        read.clear()
        reader = _packing.Ahead(paths, torch.device(device))
        slices = reader.slices()
        assert slices.keys() == tensors.keys()
        for name in order[:-2]:  # what nobody asks for is in nobody's way
            one, value = slices[name], tensors[name]
            assert one.get_shape() == list(value.shape)
            found = one[...]
            assert found.dtype == value.dtype and torch.equal(found.cpu(), value), name
        reader.close()
        # Each tensor is read once, whoever asks for it first.
        assert len(read) <= len(tensors)


def test_files_that_are_wrong(files: tuple[list[str], dict[str, torch.Tensor]]) -> None:
    paths, _ = files
    reader = _packing.Ahead(paths, torch.device("cpu"))
    slices = reader.slices()
    Path(paths[0]).write_bytes(Path(paths[0]).read_bytes()[:2000])
    with pytest.raises(OSError, match="ends too early"):
        [slices[name][...] for name in slices]
    reader.close()
    with pytest.raises(Exception, match="header"):
        _packing.Ahead(paths, torch.device("cpu"))
