"""Tensors of a container as loaders take them: windows of its mapping, and what is cut out."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from weights import WEIGHTS, container_of, normals, same, weights

import df11
from df11 import _bring, _encoding
from df11._bring import _held
from df11._container import Area, Sliceable, Tensors
from df11._matrices import STORED
from df11._progress import Bar
from df11._tensor import CompressedTensor


def test_a_container_is_a_dictionary(tensors: Tensors) -> None:
    assert set(tensors) == set(WEIGHTS) and len(tensors) == len(WEIGHTS)
    for name, expected in WEIGHTS.items():
        assert isinstance(tensors[name], CompressedTensor)
        assert same(tensors[name], expected)
    # Each array is memory of its own to PyTorch: saving one saves no other.
    for array in tensors["q"]._arrays:
        assert array.untyped_storage().nbytes() == array.numel()


def test_arrays_of_tiles_are_for_reading(tensors: Tensors, tmp_path: Path) -> None:
    mapped = tensors.container["edge"].tiles
    container_of({"edge": WEIGHTS["edge"]}, tmp_path)
    read = df11.open(tmp_path / "weights.df11", memory_map=False)
    for tiles in (mapped, read["edge"].tiles):
        arrays = [tiles.array(at) for at in range(4)]
        assert tuple(array.nbytes for array in arrays) == tiles.lengths
        assert arrays == [mapped.array(at) for at in range(4)]
        for array in arrays:
            with pytest.raises(TypeError, match="read-only"):
                array[0] = 0
        with pytest.raises(IndexError, match="array 4 of 4"):
            tiles.array(4)


@pytest.fixture
def tensors() -> Tensors:
    return weights()


JOINED = {
    "stack": lambda w: torch.stack([w["q"], w["q"]]),
    "stack of experts": lambda w: torch.stack([w["experts"][at] for at in (4, 1, 1)]),
    "stack within": lambda w: torch.stack([w["q"], w["q"]], 1),
    "cat within": lambda w: torch.cat([w["experts"], w["experts_apart"]], 1),
    "cat of stacks": lambda w: torch.cat(
        [torch.stack([w["q"], w["q"]]), torch.stack([w["k"], w["v"]])], 1
    ),
    "pieces of rows": lambda w: torch.cat([w["wide"][:16], w["wide"][48:64]]),
    "rows of experts": lambda w: w["experts"][:, 10:50],
    "a part again": lambda w: torch.stack([w["k"], w["v"]])[1].chunk(2)[0],
}


@pytest.mark.parametrize("name", JOINED)
def test_what_loaders_make_stays_compressed(tensors: Tensors, name: str) -> None:
    found = JOINED[name](tensors)
    assert isinstance(found, CompressedTensor)
    assert same(found, JOINED[name](WEIGHTS))
    assert same(tensors.rebuild(tensors.describe(found)), JOINED[name](WEIGHTS))


@pytest.mark.parametrize("most", [1, 100_000, 1 << 20, 1 << 30])
def test_no_two_batches_are_too_much_for_a_gpu(
    tensors: Tensors, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The used batch and the next one fit together, except for a larger single tensor."""
    monkeypatch.setattr(_bring, "BATCH_BYTES", most)
    values: Any = [tensors[name] for name in ("experts", "q", "k", "experts_apart", "q", "wide")]
    wanted = [window for mine in tensors.enclosing_tiles(values)[0] for window in mine]
    device = _bring._Device(tensors, torch.device("cuda", 0), Bar(0))
    batches = list(device._batches(wanted))
    assert [window for batch in batches for window in batch] == wanted
    areas = [[*{tiles for tiles, _ in batch}] for batch in batches]
    sizes = [sum(map(sum, tensors.lengths(some))) for some in areas]
    for batch, size in zip(batches, sizes, strict=True):
        assert size <= most // 2 or len({tiles for tiles, _ in batch}) == 1
    for one, other in pairwise(sizes):
        assert not one or not other or one + other <= most


@pytest.mark.gpu
@pytest.mark.parametrize("residence", ["stored", "fast"])
def test_weights_are_brought_while_others_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, residence: str
) -> None:
    """Many small batches, on streams with work that still uses memory which has been freed."""
    monkeypatch.setattr(_bring, "BATCH_BYTES", 4 << 20)
    monkeypatch.setattr(_encoding, "PACKED_BYTES", 1 << 20)
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(24)))
    weights = {name: value.detach().bfloat16() for name, value in net.named_parameters()}
    container_of(weights, tmp_path)
    for at in range(12):
        with torch.cuda.stream(torch.cuda.Stream() if at % 2 else torch.cuda.default_stream()):
            for _ in range(20):
                busy = torch.randn(2048, 2048, device="cuda")
                busy = busy @ busy @ busy
            del busy
            module = df11.attach(net, tmp_path / "weights.df11", device="cuda", residence=residence)
            for name, value in module.named_parameters():
                assert same(value, weights[name].cuda()), (at, name)
        net.__dict__.pop("_df11")


def test_what_is_no_stack_of_rows_is_decoded(tensors: Tensors) -> None:
    for join in (
        lambda w: torch.cat([w["q"], w["q"]], 1),
        lambda w: torch.stack([w["q"], w["q"]], 2),
        lambda w: torch.cat([w["q"], w["q"].float()]),
    ):
        found, expected = join(tensors), join(WEIGHTS)
        assert not isinstance(found, CompressedTensor) and same(found, expected)
    with pytest.raises(RuntimeError, match="match"):
        torch.stack([tensors["q"], tensors["q"][:32]])


def rebuilt(tensors: Tensors, values: list[Any]) -> tuple[list[Any], list[Area]]:
    """Tensors of the arrays that would be brought to a device."""
    windows, tiles = tensors.enclosing_tiles(values)
    arrays = tensors.on_host(tiles)
    whole = {key: [*mine, torch.empty(0, dtype=torch.uint8)] for key, mine in arrays.items()}
    found = []
    for value, mine in zip(values, windows, strict=True):
        some = [array for key, _ in mine for array in whole[key]]
        found.append(value.like(some, [part for _, part in mine]))
    return found, tiles


def test_slices_take_no_more_than_their_tiles(tensors: Tensors) -> None:
    for name, parts, taken in [
        (
            "edge",
            [(slice(40, 90), slice(10, 200))],
            Area("edge", (32, 96), (0, 256), False, STORED),
        ),
        # Windows that need a whole tensor share it.
        (
            "experts",
            [(slice(None), slice(32)), (slice(None), slice(32, None))],
            Area("experts", (0, 384), (0, 256), True, STORED),
        ),
    ]:
        found, tiles = rebuilt(tensors, [tensors[name][part] for part in parts])
        assert tiles == [taken]
        for one, part in zip(found, parts, strict=True):
            assert same(one, WEIGHTS[name][part])
            assert name == "experts" or one._arrays[3].numel() == 64 * 256


def test_a_cut_tells_what_its_tiles_need_on_a_gpu(tmp_path: Path) -> None:
    """In a cut, tiles begin elsewhere among the 16 bytes that a GPU copies at once."""
    normal = normals(12)
    tensors = Tensors(container_of({f"w{at}": normal(64, 1024) for at in range(40)}, tmp_path))
    cuts, more = [((32, 64), (0, 1024)), ((0, 64), (256, 1024)), ((0, 64), (512, 1024))], 0
    for name in tensors:
        for rows, columns in cuts:
            part = tensors[name][slice(*rows), slice(*columns)]
            ((_, window),) = tensors.enclosing_tiles([part])[0][0]
            tiles = tensors.container[name].tiles
            needed, arrays = tiles.cut(rows, columns)
            assert tiles.cut_lengths(rows, columns) == tuple(map(len, arrays))
            assert window.staged_bytes >= needed
            more += needed > tiles.staged_bytes
    assert more, "no slice needs more than its tensor, so that nothing was tested"


def test_slices_are_read_when_they_are_indexed(tensors: Tensors) -> None:
    again = Tensors(tensors.container)
    some = Sliceable(again, "q")
    assert some.get_shape() == [128, 256] and some.get_dtype() == "BF16"
    assert not again.requested
    found = some[...].to(device="meta", dtype=torch.bfloat16)
    assert isinstance(found, CompressedTensor) and found.device.type == "cpu"
    assert again.requested == ["q"]
    wide = some[...].to(dtype=torch.float32)
    assert torch.equal(wide, WEIGHTS["q"].float())
    joined = torch.cat([some[0:32, :], some[64:96, :]], dim=0).to(device="cpu")
    assert same(joined, torch.cat([WEIGHTS["q"][0:32], WEIGHTS["q"][64:96]]))


def test_damage_is_found_before_a_tensor_is_used(tmp_path: Path) -> None:
    source = container_of(WEIGHTS, tmp_path)
    path = Path(source.path)
    places = {name: source[name].tiles.places for name in ("q", "k")}
    ((base, _),) = source.mappings
    file = bytearray(path.read_bytes())
    file[places["q"][3][0] - base + 5] ^= 1
    (tmp_path / "damaged.df11").write_bytes(file)
    tensors = Tensors(df11.open(tmp_path / "damaged.df11"))
    tensors.check(["k"])
    with pytest.raises(df11.CorruptError):
        tensors.check(["q"])
    with pytest.raises(df11.CorruptError):
        rebuilt(tensors, [tensors["q"][32:64]])


def test_pinned_memory_is_kept_until_no_gpu_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any GPU may: those that this process uses are waited for, whichever is the current one."""
    order: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        torch._C, "_cuda_hasPrimaryContext", lambda index: index != 2, raising=False
    )
    monkeypatch.setattr(torch.cuda, "synchronize", order.append)

    class Pinned:
        def __del__(self) -> None:
            order.append("unpinned")

    class Memory(bytearray):
        def __del__(self) -> None:
            order.append("freed")

    memory = torch.frombuffer(Memory(b"12345678"), dtype=torch.uint8)
    area = Area("w", (0, 1), (0, 8), True, STORED)
    held = _held({area: [memory[:4], memory[4:], memory[8:]]}, [Pinned()])[area]
    del memory
    assert [array.tolist() for array in held] == [[49, 50, 51, 52], [53, 54, 55, 56], []]
    while len(held) > 1:
        held.pop()
        assert not order
    view = held[0][1:]
    held.clear()
    assert not order and view.tolist() == [50, 51, 52]
    del view
    assert order == [0, 1, 3, "unpinned", "freed"]
