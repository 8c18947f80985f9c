"""Decoding on a GPU beside PyTorch: on its streams, into its memory, in its graphs. Skipped where
there is none.
"""

from typing import Any

import pytest
import torch
from conftest import SAMPLE, Tensors, normal, write_safetensors

import df11

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

NAMES = [f"model.layers.2.experts.{at}.weight" for at in range(8)]
# Experts of a layer, and rows of a matrix whose rows are not whole 16 bytes.
EXPERTS: Tensors = {
    **SAMPLE,
    **{name: ("BF16", (64, 520), normal(64 * 520, 10 + at)) for at, name in enumerate(NAMES)},
}


@pytest.fixture(scope="module", params=["gap", "tile"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> df11.Model:
    folder = tmp_path_factory.mktemp("gpu")
    source = write_safetensors(folder / "m.safetensors", EXPERTS)
    df11.compress(source, folder / "m.df11", layout=request.param, progress=False)
    return df11.open(folder / "m.df11")


@pytest.fixture(params=[False, True], ids=["resident", "streamed"])
def loaded(request: pytest.FixtureRequest, model: df11.Model) -> Any:
    return model.load(streamed=request.param, progress=False)


def poisoned(nbytes: int, device: int = 0) -> torch.Tensor:
    return torch.full((nbytes,), 0xA5, dtype=torch.uint8, device=f"cuda:{device}")


def original(tensor: df11.Tensor) -> torch.Tensor:
    buffer = bytearray(tensor.nbytes)
    tensor.decode_into(buffer)
    return torch.tensor(buffer, dtype=torch.uint8)


def check_block(model: df11.Model, name: str, output: torch.Tensor) -> None:
    output = output.cpu()
    for tensor, (start, stop) in model.block(name).layout.items():
        assert torch.equal(output[start:stop], original(model[tensor])), tensor


def test_blocks_decode_on_any_stream(model: df11.Model, loaded: Any) -> None:
    side = torch.cuda.Stream()
    for turn in range(4):
        stream = [torch.cuda.default_stream(), side, torch.cuda.current_stream()][turn % 3]
        with torch.cuda.stream(stream):
            for block in loaded.blocks:
                output = poisoned(block.nbytes)
                block.decode(output.data_ptr(), stream.cuda_stream)
                check_block(model, block.name, output)
        loaded.check(stream.cuda_stream)
    loaded.check()


def test_programs_fuse_tensors(model: df11.Model, loaded: Any) -> None:
    program = loaded.program([(name, at * 64 * 520 * 2) for at, name in enumerate(NAMES)])
    assert program.nbytes == 8 * 64 * 520 * 2
    fused = poisoned(program.nbytes + 4096)
    stream = torch.cuda.current_stream().cuda_stream
    program.decode(fused.data_ptr(), stream)
    loaded.check(stream)
    expected = torch.stack([model[name].torch() for name in NAMES])
    assert torch.equal(fused[:-4096].view(torch.bfloat16).view(8, 64, 520).cpu(), expected)
    assert (fused[-4096:] == 0xA5).all()
    # Rows of several blocks, and what is between them.
    pieces = [
        ("model.layers.0.mlp.weight", 4096, 7, 300),
        ("model.embed.weight", 131072, 1, 255),
        (NAMES[3], 512 * 1024, 0, 5),
        ("model.layers.1.scale", 3),
    ]
    program = loaded.program(pieces)
    output, whole = poisoned(program.nbytes), poisoned(program.nbytes).cpu()
    for name, offset, *rows in pieces:
        row = model[name].nbytes // model[name].shape[0]
        content = original(model[name])[slice(*(at * row for at in rows)) if rows else ...]
        whole[offset : offset + len(content)] = content
    program.decode(output.data_ptr(), stream)
    loaded.check(stream)
    assert torch.equal(output.cpu(), whole)


def test_graphs_capture_decoding(model: df11.Model, loaded: Any) -> None:
    outputs = [poisoned(block.nbytes) for block in loaded.blocks]
    program = loaded.program([("model.layers.0.mlp.weight", 0)])
    extra = poisoned(program.nbytes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        for block, output in zip(loaded.blocks, outputs, strict=True):
            block.decode(output.data_ptr(), stream)
        program.decode(extra.data_ptr(), stream)
    for _ in range(3):
        for output in [*outputs, extra]:
            output.fill_(0xA5)
        graph.replay()
        for block, output in zip(loaded.blocks, outputs, strict=True):
            check_block(model, block.name, output)
        assert torch.equal(extra.cpu(), original(model["model.layers.0.mlp.weight"]))
    loaded.check()


def test_the_current_device_stays(model: df11.Model) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    memory = df11.plan(model).device_bytes[0]
    for current in (0, 1):
        torch.cuda.set_device(current)
        # The first one lacks a byte for all.
        loaded = model.load([0, 1], memory=[memory - 1, memory], progress=False)
        assert {block.device for block in loaded.blocks} == {0, 1}
        for block in loaded.blocks:
            output = poisoned(block.nbytes, block.device)
            block.decode(output.data_ptr(), torch.cuda.current_stream(block.device).cuda_stream)
            assert torch.cuda.current_device() == current
            assert torch.empty(1, device="cuda").device.index == current
            check_block(model, block.name, output)
        loaded.check()
        del loaded, block
        assert torch.cuda.current_device() == current
    torch.cuda.set_device(0)


def test_gpus_verify(model: df11.Model) -> None:
    assert model.verify(device="gpu", progress=False) == model.verify(device="cpu", progress=False)
