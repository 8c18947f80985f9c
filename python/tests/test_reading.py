"""Tensors of safetensors files, read ahead of who asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import on_devices
from safetensors.torch import save_file

from df11 import _packing


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
    paths, tensors = files
    read: list[int] = []
    bring = _packing.Ahead._bring

    def counted(self: _packing.Ahead, entry: _packing._Entry) -> torch.Tensor:
        read.append(entry.offset)
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
