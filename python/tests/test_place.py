"""Where weights go: dicts of modules, and what is better left as it is."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors.torch")

from test_attach import LAYERS, WIDTH, Net, compressed, fill, tokens  # noqa: E402

import df11  # noqa: E402
from df11._modules import look_up, place_blocks  # noqa: E402
from df11._ordinary import REASON, choose  # noqa: E402
from df11._place import Placement, resolve  # noqa: E402
from df11._units import Unit  # noqa: E402

CPU, ONE, TWO = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
NO_OPTIONS = SimpleNamespace(memory=None)


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The units of a module whose head is tied, and of one whose head is not."""
    found = {}
    for name, tied in [("tied", True), ("free", False)]:
        path = compressed(fill(Net(tied)), tmp_path_factory.mktemp(name))
        found[name] = df11.attach(Net(tied), path, device="cpu").__dict__["_df11"].units
        assert [unit.path for unit in found[name]] == [
            "embed",
            *(f"layers.{at}" for at in range(LAYERS)),
            "head",
        ]
    return found


def test_the_innermost_name_counts() -> None:
    where = {"": CPU, "layers": ONE, "layers.1.up": TWO, "layers.10": CPU}
    for name, device in [
        ("head.weight", CPU),
        ("layers.1.down.weight", ONE),
        ("layers.1.up.weight", TWO),
        ("layers.10.up.weight", CPU),
        ("layers.1", ONE),
        ("", CPU),
    ]:
        assert look_up(where, name) == device, name
    assert look_up({"layers": ONE}, "head.weight") is None


def test_blocks_go_where_a_dict_says(units: dict[str, Any]) -> None:
    where = {
        "embed": ONE,
        "layers.0": CPU,
        "layers.1": TWO,
        "layers.2": CPU,
        "layers": ONE,
        "norm": TWO,
        "head.weight": TWO,
    }
    places = place_blocks(units["free"], where)
    found = {unit.path: {places[block] for block in unit.blocks} for unit in units["free"]}
    assert found == {
        "embed": {(ONE, False)},
        "layers.0": {(ONE, True)},
        "layers.1": {(TWO, False)},
        "layers.2": {(ONE, True)},
        **{f"layers.{at}": {(ONE, False)} for at in range(3, LAYERS)},
        "head": {(TWO, False)},
    }
    assert places.keys() == {block for unit in units["free"] for block in unit.blocks}
    # What is streamed goes to the first GPU that is named.
    places = place_blocks(units["tied"], {"": CPU, "layers.2": TWO, "layers.3": ONE})
    assert set(places.values()) == {(TWO, True), (TWO, False), (ONE, False)}


def test_conflicts_in_a_dict_are_told(units: dict[str, Any]) -> None:
    for name, where, words in [
        ("free", {"": ONE, "layers.1.up": TWO}, r"layers\.1\.\S+ on cuda:\d and layers\.1\.\S+ on cuda:\d"),
        ("free", {"": ONE, "layers.1.up": CPU}, "give both the same device"),
        ("tied", {"": ONE, "head": TWO}, r"embed\.weight on cuda:0 and head\.weight on cuda:1"),
        ("free", {"embed": ONE, "layers": TWO}, r"no device for head\.weight; name one"),
    ]:
        with pytest.raises(ValueError, match=words):
            place_blocks(units[name], where)
    assert (
        len(place_blocks(units["free"], {"": ONE, "head": TWO}))
        == len(place_blocks(units["tied"], {"": ONE})) + 1
    )


def test_dicts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # No GPU is needed to read their numbers.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for wanted, memory, expected in [
        ({"": 1}, None, Placement([TWO])),
        ({"a": 1, "b": "cuda:1"}, "1GB", Placement([TWO], [10**9])),
        ({"a": "cpu", "b": CPU}, "1GB", Placement([CPU])),
        ({"a": 1, "b": "cuda:0"}, None, Placement([TWO, ONE], None, {"a": TWO, "b": ONE})),
        ({"a": "cpu", "b": 0}, None, Placement([ONE], None, {"a": CPU, "b": ONE})),
    ]:
        found = resolve(wanted, SimpleNamespace(memory=memory))
        assert found == expected
        assert found.rest == ("cpu" if len(found.devices) > 1 else found.devices[0])
    with pytest.raises(ValueError, match='"cpu" in the place of "disk"'):
        resolve({"a": 0, "b": "disk"}, NO_OPTIONS)
    with pytest.raises(ValueError, match="give one of them"):
        resolve({"a": 0, "b": 1}, SimpleNamespace(memory="1GB"))


@pytest.mark.parametrize("seed", range(60))
def test_the_choice_takes_least(seed: int) -> None:
    """Of all sets of units, in models whose compression is the same everywhere."""
    generator = random.Random(seed)
    sizes = [generator.choice([100, 400, 400, 401, 3000, 20_000]) for _ in range(6)]
    units = [
        Unit(f"layers.{at}", [SimpleNamespace(nbytes=size)], nbytes=size) for at, size in enumerate(sizes)
    ]

    def compressed(some: list[Unit]) -> int:
        return sum(unit.nbytes * 67 // 100 for unit in some)

    def arena(some: list[Unit]) -> int:
        return max((unit.nbytes for unit in some), default=0)

    def total(ordinary: Any) -> int:
        kept = [unit for unit in units if unit not in ordinary]
        return compressed(kept) + arena(kept) + sum(unit.nbytes for unit in ordinary)

    ordinary, bytes_ = choose(units, compressed, arena)
    least = min(total(some) for count in range(7) for some in itertools.combinations(units, count))
    assert bytes_ == total(ordinary) == least <= sum(sizes)


def test_tied_units_are_left_together() -> None:
    shared = SimpleNamespace(nbytes=5000)
    units = [
        Unit("embed", [shared], nbytes=5000),
        *(Unit(f"layers.{at}", [SimpleNamespace(nbytes=1000)], nbytes=1000) for at in range(9)),
        Unit("head", [shared, SimpleNamespace(nbytes=10)], nbytes=5010),
    ]
    asked = []

    def compressed(some: list[Unit]) -> int:
        asked.append({unit.path for unit in some})
        return sum({id(w): w.nbytes * 2 // 3 for unit in some for w in unit.weights}.values())

    ordinary, bytes_ = choose(units, compressed, lambda some: max((unit.nbytes for unit in some), default=0))
    assert [unit.path for unit in ordinary] == ["embed", "head"]
    assert bytes_ == 5010 + 9 * 666 + 1000
    assert all(("embed" in paths) == ("head" in paths) for paths in asked)


ROWS = 8000


class Wide(Net):
    """A third of it is its embedding."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__(tied)
        self.embed = torch.nn.Embedding(ROWS, WIDTH)
        if tied:
            self.head = torch.nn.Linear(WIDTH, ROWS, bias=False)
            self.head.weight = self.embed.weight


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_a_large_vocabulary_is_left_as_it_is(tmp_path: Path, tied: bool, prefetch: bool, device: str) -> None:
    original = fill(Wide(tied))
    path = compressed(original, tmp_path)
    module = df11.attach(Wide(tied), path, device=device, prefetch=prefetch)
    original.to(device)
    with torch.no_grad():
        assert torch.equal(module(tokens().to(device)), original(tokens().to(device)))
    runtime = module.__dict__["_df11"]
    layers = [f"layers.{at}" for at in range(LAYERS)]
    assert [unit.path for unit in runtime.units] == (layers if tied else [*layers, "head"])
    report = df11.report(module, verify=True)
    assert report.verified == len(list(module.parameters())) + 1
    assert report.large_residents == {"embed.weight": REASON}
    assert report.resident[REASON] == (1, ROWS * WIDTH * 2)
    assert f"embed.weight: {REASON}" in str(report)
    assert report.ratio < 1
    assert report.devices[0].arena < 2.1 * max(unit.nbytes for unit in runtime.units)
    # As it would be otherwise: all of it compressed, and an arena for the embedding.
    largest = ROWS * WIDTH * 2
    assert report.device_bytes < 0.66 * report.original_bytes + largest
    assert (module.head.weight is module.embed.weight) == tied
    assert torch.equal(module.embed.weight, original.embed.weight)
    state = df11.state_dict(module)
    assert state.keys() == original.state_dict().keys()
    assert all(torch.equal(state[name], value.cpu()) for name, value in original.state_dict().items())
    if tied and device == "cuda":
        # Only what is used is on the GPU.
        assert len(runtime.loaded.blocks) == LAYERS
    # An ordinary parameter that is not what the container holds any more is found.
    with torch.no_grad():
        module.embed.weight[0, 0] += 1
    with pytest.raises(df11.CorruptError, match=r"embed\.weight"):
        df11.report(module, verify=True)


def test_what_compression_makes_larger_stays_as_it_is(tmp_path: Path) -> None:
    """Nothing takes turns in the memory of a single block."""
    original = fill(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()))
    module = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU())
    df11.attach(module, compressed(original, tmp_path), device="cpu")
    report = df11.report(module, verify=True)
    assert report.ratio == 1
    assert report.devices[0].arena == report.devices[0].compressed == 0
    x = torch.ones(3, 512, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(module(x), original(x))


@pytest.mark.gpu
def test_memory_decides_what_is_left_as_it_is(tmp_path: Path) -> None:
    path = compressed(fill(Wide()), tmp_path)
    whole = df11.report(df11.attach(Wide(), path, device="cuda")).device_bytes
    for memory, fits in [(whole + 100_000, True), (whole - 100_000, False)]:
        report = df11.report(df11.attach(Wide(), path, device="cuda", memory=memory), verify=True)
        assert (REASON in report.resident) == fits
        assert (report.devices[0].streamed_units > 0) != fits
        assert report.device_bytes <= memory
    report = df11.report(df11.attach(Wide(), path, device="cuda", streamed=True), verify=True)
    assert REASON not in report.resident
    assert report.devices[0].streamed_units == report.devices[0].units == LAYERS + 2


@pytest.mark.gpu
def test_modules_on_the_host_beside_a_gpu(tmp_path: Path) -> None:
    original = fill(Net(False))
    path = compressed(original, tmp_path)
    where = {"": 0, "layers.1": "cpu", "layers.3": "cpu"}
    module = df11.attach(Net(False), path, device=where)
    runtime = module.__dict__["_df11"]
    streamed = {unit.path for unit in runtime.units if runtime.loaded.block(*unit.blocks).is_streamed}
    assert streamed == {"layers.1", "layers.3"}
    original.cuda()
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(module(tokens().cuda()), original(tokens().cuda()))
    assert df11.report(module, verify=True).devices[0].streamed_units == 2
