"""Matrices encoded by PyTorch: the arrays that `df11 compress` writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import on_devices
from weights import container_of

from df11 import _encoding, _native, _ops

pytestmark = pytest.mark.usefixtures("compressed_on_gpus")

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
    value = torch.ones(shape, dtype=torch.bfloat16) if kind == "one" else weights(shape, kind)
    tiles = container_of({"w": value}, tmp_path)["w"].tiles
    assert tiles is not None and _encoding.is_encodable(value)
    # One strip at a time too, and some.
    for slice_bytes in (1, 3 * 64 * shape[1], 16 << 20):
        monkeypatch.setattr(_encoding, "SLICE_BYTES", slice_bytes)
        found = _encoding.encode(value.to(device))
        assert found is not None
        arrays, part = found
        for index in range(4):
            assert bytes(arrays[index].cpu().numpy()) == bytes(tiles.array(index)), index
        assert part.staged_bytes == tiles.staged_bytes
    if device == "cuda":
        book, table = arrays[0], arrays[4]
        place = (book.data_ptr(), book.nbytes, table.data_ptr())
        _native.build_tables(book.device.index, [place])
    decoded = _ops.decode(arrays, list(part), torch.device(arrays[0].device)).cpu()
    assert torch.equal(decoded.view(torch.int16), value.view(torch.int16))


def test_what_is_not_smaller_stays() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    value = bits[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(2))]
    assert _encoding.encode(value.view(torch.bfloat16).view(256, 256)) is None
    for shape in [(15, 2048), (64, 260), (512, 64), (16, 512)]:
        assert not _encoding.is_encodable(torch.zeros(shape, dtype=torch.bfloat16)), shape
