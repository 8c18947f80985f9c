"""Weights without memory: what the loading code of vLLM does with them is recorded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from weights import container_of, normals

from df11._container import Tensors
from df11.vllm._deferred import Deferred, Stored, Target, window_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    normal = normals(3)
    return {
        "up": normal(640, 512),
        "gate": normal(640, 512),
        "experts": normal(4, 320, 256),
        "norm": normal(512),
        "wide": normal(64, 512).float(),
    }


@pytest.fixture(scope="module")
def container(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Tensors(container_of(values, tmp_path_factory.mktemp("deferred")))


def source(container: Any, name: str) -> Any:
    return Stored(container, name).tensor()


def parameter(*shape: int) -> tuple[Any, Any]:
    target = Target(shape, torch.bfloat16, CPU)
    return target, torch.nn.Parameter(target.tensor(), requires_grad=False)


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
def test_other_floats_are_decoded(tmp_path: Path, kind: torch.dtype) -> None:
    """A weight in tiles of another float than the layer's is cast like any other."""
    values = torch.randn(128, 512, generator=torch.Generator().manual_seed(5)).to(kind)
    tensors = Tensors(container_of({"w": values}, tmp_path))
    assert source(tensors, "w").is_in_tiles
    target, weight = parameter(128, 512)
    weight.data.copy_(source(tensors, "w"))
    assert not any(isinstance(patch.values, Deferred) for patch in target.ordered())
    assert torch.equal(dense(target), values.bfloat16())


def test_fp8_stays_in_tiles_of_an_fp8_layer(tmp_path: Path) -> None:
    values = torch.randn(256, 512, generator=torch.Generator().manual_seed(5))
    values = values.to(torch.float8_e4m3fn)
    tensors = Tensors(container_of({"w": values}, tmp_path))
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        target = Target((128, 512), dtype, CPU)
        target.tensor().copy_(source(tensors, "w")[128:])
        (patch,) = target.ordered()
        assert isinstance(patch.values, Deferred) == (dtype == values.dtype)
        found = patch.values.decode() if isinstance(patch.values, Deferred) else patch.values
        assert found.dtype == dtype and torch.equal(found.float(), values[128:].float())


def test_bf16_that_was_fp8_stays_in_tiles(tmp_path: Path) -> None:
    gate = torch.randn(128, 512, generator=torch.Generator().manual_seed(5))
    values = {"gate": gate.to(torch.float8_e4m3fn).bfloat16(), "up": gate.bfloat16()}
    tensors = Tensors(container_of(values, tmp_path))
    assert [tensors.stored(name).encoding for name in values] == ["float", "tile"]
    target, weight = parameter(256, 512)
    for at, name in enumerate(values):
        weight.data[128 * at : 128 * (at + 1)].copy_(source(tensors, name))
    assert all(isinstance(patch.values, Deferred) for patch in target.ordered())
    assert torch.equal(dense(target), torch.cat([*values.values()]))


def dense(target: Any) -> Any:
    """The values of the recorded patches, each decoded separately."""
    out = torch.full((target.rows, target.columns), torch.nan, dtype=torch.bfloat16)
    for patch in target.ordered():
        window = out[patch.row : patch.row + patch.rows]
        values = torch.tensor(0) if patch.values is None else patch.values
        window[:, patch.column : patch.column + patch.columns].copy_(values)
    return out.view(target.shape)


def halves(weight: Any, of: Any) -> None:
    for at, name in enumerate(("gate", "up")):
        weight.narrow(0, 320 * at, 320).copy_(of(name).narrow(0, 320, 320))


def experts(weight: Any, of: Any) -> None:
    for expert, each in enumerate(of("experts").chunk(2, dim=1)[1].unbind()):
        weight[expert].copy_(each)


def padded(weight: Any, of: Any) -> None:
    weight[:640].copy_(of("up"))
    weight[640:].fill_(0)
    weight[704:].fill_(0)


def twice(weight: Any, of: Any) -> None:
    for name in ("gate", "up"):
        weight.copy_(of(name))


Windows = list[tuple[tuple[int, int], tuple[int, int]]]
WIDE = (0, 512)
#: Loading code for a weight of a shape, and for each patch the rows and columns of its tensor, or
#: none if it is dense.
RECORDED: dict[str, tuple[tuple[int, ...], Any, Windows]] = {
    "rows of two tensors": ((640, 512), halves, [((320, 640), WIDE)] * 2),
    "columns": (
        (640, 256),
        lambda weight, of: weight.copy_(of("up").chunk(2, dim=1)[1]),
        [((0, 640), (256, 512))],
    ),
    "experts of one tensor": (
        (4, 160, 256),
        experts,
        [((320 * at + 160, 320 * at + 320), (0, 256)) for at in range(4)],
    ),
    "parts of experts": (
        (4, 160, 256),
        lambda weight, of: weight.copy_(of("experts").chunk(2, dim=1)[1]),
        [((320 * at + 160, 320 * at + 320), (0, 256)) for at in range(4)],
    ),
    "between the rows": (
        (4, 320, 256),
        lambda weight, of: [weight[:, at::2].copy_(of("experts")[:, at::2]) for at in (0, 1)],
        [((row, row + 1), (0, 256)) for row in range(4 * 320)],
    ),
    "written twice": ((640, 512), twice, [((0, 640), WIDE)]),
    "padding": ((704, 512), padded, []),
    "computed": ((512, 640), lambda weight, of: weight.copy_(of("up").t().contiguous()), []),
    "transposed": ((512, 640), lambda weight, of: weight.copy_(of("up").t()), []),
    "another dtype": ((64, 512), lambda weight, of: weight.copy_(of("wide")), []),
}


@pytest.mark.parametrize("name", RECORDED)
def test_what_loading_code_does_is_recorded(
    container: Any, values: dict[str, Any], name: str
) -> None:
    shape, load, expected = RECORDED[name]
    target, weight = parameter(*shape)
    load(weight.data, lambda name: source(container, name))
    if expected:
        patches = target.ordered()
        windows: Any = [patch.values.window for patch in patches]  # type: ignore[union-attr]
        found = [((row, row + rows), (at, at + width)) for row, rows, at, width in windows]
        assert found == expected
    plain = torch.empty(shape, dtype=torch.bfloat16)
    load(plain, values.__getitem__)
    assert torch.equal(dense(target), plain)


def test_ordinary_tensors_get_values(container: Any, values: dict[str, Any]) -> None:
    norm = torch.nn.Parameter(torch.empty(512, dtype=torch.bfloat16), requires_grad=False)
    norm.data.copy_(source(container, "norm"))
    assert torch.equal(norm, values["norm"])
    rows = torch.empty(32, 512, dtype=torch.bfloat16)
    rows.copy_(source(container, "up")[64:96])
    assert torch.equal(rows, values["up"][64:96])
    scaled = source(container, "norm") + 1
    assert type(scaled) is torch.Tensor and torch.equal(scaled, values["norm"] + 1)


def test_dense_patches_complete_a_target_at_once(values: dict[str, Any]) -> None:
    target, weight = parameter(640, 1024)
    found: list[Any] = []
    target.complete = lambda each: found.append(dense(each))
    weight.data.narrow(1, 0, 512).copy_(values["up"])
    assert not found
    weight.data.narrow(1, 512, 512).copy_(values["gate"])
    assert torch.equal(found[0], torch.cat([values["up"], values["gate"]], 1))


UNRECORDED: dict[str, Any] = {
    "random": lambda weight: weight.data.uniform_(-1, 1),
    "computed with": lambda weight: weight + 1,
    "filled": lambda weight: weight.data.fill_(1),
    "turned": lambda weight: weight.data.t().copy_(torch.zeros(512, 640)),
}


@pytest.mark.parametrize("name", UNRECORDED)
def test_what_cannot_be_recorded_is_refused(container: Any, name: str) -> None:
    target, weight = parameter(640, 512)
    with pytest.raises(RuntimeError, match="load the BF16 checkpoint"):
        UNRECORDED[name](weight)
    with pytest.raises(RuntimeError, match="cannot be written to"):
        source(container, "up").copy_(torch.zeros(640, 512))
    weight.data.narrow(0, 0, 320).copy_(source(container, "up")[:320])
    with pytest.raises(ValueError, match="163,840 of 327,680 weights"):
        target.ordered()


def test_windows_of_views() -> None:
    matrix = torch.empty(6, 8, 4, device="meta")
    assert window_of(matrix, 4) == (0, 48, 0, 4)
    assert window_of(matrix[3, 2:4, 1:3], 4) == (26, 2, 1, 2)
    assert window_of(matrix[3, 5], 4) == (29, 1, 0, 4)
    for other in (matrix[:, 2:4], matrix.transpose(1, 2), matrix.view(-1)):
        assert window_of(other, 4) is None
