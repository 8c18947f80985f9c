"""Places of weights: dicts of modules, budgets, and weights that stay ordinary."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_attach import LAYERS, WIDTH, Net, attach, compressed, fill, same

import df11
from df11 import _load, _plan
from df11._container import Tensors
from df11._devices import Devices, limited, resolve
from df11._modules import common, look_up
from df11._parameters import by_name

FORMS: list[_plan.Residence] = ["streamed", "stored", "fast"]
CPU, ONE, TWO = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A module whose head is tied, and one whose head is not, each with its container."""
    found = {}
    for name, tied in [("tied", True), ("free", False)]:
        path = compressed(fill(Net(tied)), tmp_path_factory.mktemp(name))
        found[name] = Net(tied), df11.open(path)
    return found


def blocks(made: dict[str, Any], name: str) -> list[_plan.WeightBlock]:
    module, container = made[name]
    items = _load._known(module, by_name(module, Tensors(container)), container, on_gpu=True)
    return _plan.by_block(items, container)


def test_the_innermost_name_counts() -> None:
    where = {"": CPU, "layers": ONE, "layers.1.up": TWO, "layers.10": CPU}
    for name, device in {
        "head.weight": CPU,
        "layers.1.down.weight": ONE,
        "layers.1.up.weight": TWO,
        "layers.10.up.weight": CPU,
        "layers.1": ONE,
        "": CPU,
    }.items():
        assert look_up(where, name) == device, name
    assert look_up({"layers": ONE}, "head.weight") is None


def test_the_module_around_some() -> None:
    for paths, expected in {
        ("a.b.c", "a.b.d"): "a.b",
        ("a.b", "a.b.c"): "a.b",
        ("a", "b"): "",
        ("a.b",): "a.b",
        ("", "a"): "",
    }.items():
        assert common(list(paths)) == expected, paths


def placed(made: dict[str, Any], name: str, where: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    found = blocks(made, name)
    gpus = [device for device in dict.fromkeys(where.values()) if device.type == "cuda"]
    _plan.place(found, Devices(gpus, None, where), "stored")
    return {
        item.name: (each.device, item.residence_if(each.residence))
        for each in found
        for item in each.items
        if item.reason is None
    }


def test_weights_go_where_a_dict_says(made: dict[str, Any]) -> None:
    where = {"embed": ONE, "layers": ONE, "norm": TWO, "position": TWO, "head.weight": TWO}
    where |= {"layers.0": CPU, "layers.1": TWO, "layers.2": CPU}
    places = placed(made, "free", where)
    assert places["embed.weight"] == (ONE, "stored")
    assert places["head.weight"] == places["position"] == (TWO, "stored")
    for at in range(LAYERS):
        expected = (TWO if at == 1 else ONE, "streamed" if at in (0, 2) else "stored")
        assert places[f"layers.{at}.up.weight"] == places[f"layers.{at}.down.weight"] == expected
    # Streamed weights go to the first named GPU.
    places = placed(made, "tied", {"": CPU, "layers.2": TWO, "layers.3": ONE})
    assert set(places.values()) == {(TWO, "streamed"), (TWO, "stored"), (ONE, "stored")}


def test_weights_share_gpus(made: dict[str, Any]) -> None:
    """In their order; what is too much for all is streamed by the last one."""
    whole = {form: sum(each.nbytes(form) for each in blocks(made, "free")) for form in FORMS}
    for wanted, form, share, expected in [
        ("stored", "stored", 0.6, {"stored"}),
        ("auto", "fast", 0.6, {"fast"}),
        ("auto", "stored", 0.4, {"stored", "streamed"}),
        ("fast", "fast", 0.6, {"fast"}),
    ]:
        found = blocks(made, "free")
        cap = int(share * whole[form])
        _plan.place(found, Devices([ONE, TWO], [cap, cap]), wanted)
        devices = [each.device.index for each in found]
        assert devices == sorted(devices) and set(devices) == {0, 1}
        # The rest of a nearly full GPU is used, too.
        residences = {each.residence for each in found}
        assert expected <= residences <= {*expected, "fast"}, (wanted, share)
        assert ("streamed" in residences) == ("streamed" in expected)
        for device in (ONE, TWO):
            mine = [each for each in found if each.device == device]
            assert sum(each.nbytes(each.residence) for each in mine) <= cap
    with pytest.raises(ValueError, match='residence="auto"'):
        _plan.place(blocks(made, "free"), Devices([ONE, TWO], [cap // 2, cap // 2]), "fast")


def test_conflicts_in_a_dict_are_told(made: dict[str, Any]) -> None:
    places = r"layers\.1\.\S+ on cuda:\d and layers\.1\.\S+ on cuda:\d"
    ends = r"embed\.weight on cuda:0 and head\.weight on cuda:1"
    for name, where, words in [
        ("free", {"": ONE, "layers.1.up": TWO}, places),
        ("free", {"": ONE, "layers.1.up": CPU}, "give both the same device"),
        ("tied", {"": ONE, "head": TWO}, ends),
        ("free", {"embed": ONE, "layers": TWO, "position": ONE}, r"no device for head\.weight; na"),
    ]:
        with pytest.raises(ValueError, match=words):
            placed(made, name, where)
    assert placed(made, "free", {"": ONE, "head": TWO})["head.weight"] == (TWO, "stored")


def test_what_is_asked_for_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # No GPU is needed to read their numbers.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for wanted, memory, expected in [
        ({"": 1}, None, Devices([TWO])),
        ({"a": 1, "b": "cuda:1"}, "1GB", Devices([TWO], [10**9])),
        ({"a": "cpu", "b": CPU}, "1GB", Devices([CPU])),
        ({"a": 1, "b": "cuda:0"}, None, Devices([TWO, ONE], None, {"a": TWO, "b": ONE})),
        ({"a": "cpu", "b": 0}, None, Devices([ONE], None, {"a": CPU, "b": ONE})),
    ]:
        found = resolve(wanted, memory)
        assert found == expected
        assert found.rest == ("cpu" if len(found.devices) > 1 else found.devices[0])
    caps = {0: 10 * 10**9, 1: 20 * 10**9}
    assert limited(caps, None) == caps
    assert limited(caps, "12GB") == {0: 10 * 10**9, 1: 12 * 10**9}
    assert limited(caps, ["1GB", 2]) == {0: 10**9, 1: 2}
    for work, words in [
        (lambda: resolve({"a": 0, "b": "disk"}, None), '"cpu" in the place of "disk"'),
        (lambda: resolve({"a": 0, "b": 1}, "1GB"), "give one of them"),
        (lambda: resolve({"": None}, None), "name a device"),
        (lambda: limited(caps, ["1GB"]), "one for each"),
        (lambda: limited(caps, ["1GB"] * 3), "one for each"),
    ]:
        with pytest.raises(ValueError, match=words):
            work()


class Sized(_plan.WeightBlock):
    """A block of weights, of which one byte each is never streamed."""

    def __init__(self, stored: int, weights: int = 2) -> None:
        super().__init__([_plan.Item("", torch.empty(0), [])] * weights)
        self.sizes = {"streamed": 1, "stored": stored, "fast": stored + stored // 4}

    def nbytes(self, wanted: _plan.Residence) -> int:
        return self.sizes[wanted]


@pytest.mark.parametrize(
    ("budget", "wanted", "expected"),
    [
        (sys.maxsize, "stored", "stored stored stored"),
        (sys.maxsize, "fast", "fast fast fast"),
        (sys.maxsize, "streamed", "streamed streamed streamed"),
        (3, "streamed", "streamed streamed streamed"),
        (300, "stored", "stored stored stored"),
        (299, "stored", "stored stored streamed"),
        (10**6, "stored", "stored stored stored"),
        (375, "fast", "fast fast fast"),
        (375, "auto", "fast fast fast"),
        (374, "auto", "fast fast stored"),
        (324, "auto", "stored stored stored"),
        (226, "auto", "fast stored streamed"),
        (225, "auto", "stored stored streamed"),
        (102, "auto", "stored streamed streamed"),
        (3, "auto", "streamed streamed streamed"),
        (374, "fast", 'residence="auto"'),
        (2, "stored", r"never\sstreamed\stake\s3;\sallow\smore"),
    ],
)
def test_residences_under_a_budget(budget: int, wanted: str, expected: str) -> None:
    """From the first block on: what fits is resident, and then fast."""
    blocks: list[_plan.WeightBlock] = [Sized(100), Sized(100), Sized(100)]
    if " " not in expected:
        with pytest.raises(ValueError, match=expected):
            _plan.settle(blocks, budget, budget, wanted)
        return
    _plan.settle(blocks, budget, budget, wanted)
    assert [each.residence for each in blocks] == expected.split()
    assert sum(each.nbytes(each.residence) for each in blocks) <= budget


@pytest.mark.parametrize(
    ("budget", "fast", "expected"),
    [
        (375, 374, "fast fast stored"),
        (375, 349, "fast stored stored"),
        (375, 299, "stored stored stored"),  # less than all of it takes as stored
        (375, 0, "stored stored stored"),
        (299, 225, "stored stored streamed"),
        (299, 0, "stored stored streamed"),
    ],
)
def test_less_memory_for_the_fast_layout(budget: int, fast: int, expected: str) -> None:
    blocks: list[_plan.WeightBlock] = [Sized(100), Sized(100), Sized(100)]
    _plan.settle(blocks, budget, fast, "auto")
    assert [each.residence for each in blocks] == expected.split()


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (512, "fast fast fast"),
        (511, "stored fast fast"),
        (430, "stored stored fast"),
        (409, "streamed fast fast"),
        (200, "streamed fast streamed"),
        (100, "streamed streamed fast"),
    ],
)
def test_single_weights_come_last(budget: int, expected: str) -> None:
    """An embedding, and two layers, of which the smaller one may fit alone."""
    blocks: list[_plan.WeightBlock] = [Sized(200, weights=1), Sized(150), Sized(60)]
    _plan.settle(blocks, budget, budget, "auto")
    assert [each.residence for each in blocks] == expected.split()


def test_groups_fill_gpus_in_turn_or_alike() -> None:
    assert _plan.fill([3, 3, 3, 3], [7, 7]) == [0, 0, 1, 1]
    assert _plan.fill([3, 8, 3], [7, 9]) == []
    assert _plan.fill([3, 8], [7, 9]) == [0, 1]
    for caps, order, first in [
        ([100, 100], "sequential", 10),
        ([100, 100], "auto", 5),
        ([100, 100], "balanced_low_0", 3),
        ([100, 20], "auto", 8),
        ([100, 0], "auto", 10),
        ([99, 0], "auto", None),
        ([100], "balanced_low_0", 10),
    ]:
        expected = [] if first is None else [0] * first + [1] * (10 - first)
        assert _plan.balance([10] * 10, caps, order) == expected, (caps, order)


def test_sizes_are_those_that_are_loaded(made: dict[str, Any]) -> None:
    """Bytes of the plan beside bytes of the arrays, on the CPU, where there are no tables."""
    _, container = made["free"]
    found = blocks(made, "free")
    tables = sum(item.table_bytes for each in found for item in each.items if not item.reason)
    planned = sum(each.nbytes("stored") for each in found) - tables
    held = df11.report(attach(Net(tied=False), container.path)).device_bytes
    assert held <= planned <= held + 4 * _plan.ALIGNMENT * len(container)
    for each in found[1:-1]:
        assert each.nbytes("streamed") < each.nbytes("stored") < each.nbytes("fast")


def test_modules_that_run_on_one_device(made: dict[str, Any]) -> None:
    """A layer as a whole; what is in no layer by itself."""
    found = blocks(made, "free")
    for at, each in enumerate(found):
        each.device = torch.device("cuda", at)
    module, _ = made["free"]
    homes = _plan.homes(found, lambda path: _load._is_callable(module.get_submodule(path)))
    assert {f"layers.{at}" for at in range(LAYERS)} <= homes.keys()
    assert not any(name.count(".") > 1 for name in homes)
    assert {"embed", "head", "norm"} <= homes.keys()


def test_what_compression_makes_larger_stays_as_it_is(tmp_path: Path) -> None:
    original = fill(torch.nn.Linear(64, 64))
    module = attach(torch.nn.Linear(64, 64), compressed(original, tmp_path))
    report = df11.report(module, verify=True)
    assert report.ratio == 1
    assert report.residences == {"weight": "ordinary", "bias": "ordinary"}
    assert torch.equal(module.weight, original.weight)


@pytest.mark.gpu
def test_memory_decides_what_is_streamed(made: dict[str, Any]) -> None:
    original, path = fill(Net(False)).cuda(), made["free"][1].path
    whole = df11.report(attach(Net(False), path, "cuda", residence="stored")).device_bytes
    for memory, fits in [(whole + 100_000, True), (whole - 100_000, False)]:
        module = attach(Net(False), path, "cuda", memory=memory)
        report = df11.report(module, verify=True)
        assert ("streamed" in report.residences.values()) != fits
        assert report.device_bytes <= memory and same(module, original)
    module = attach(Net(False), path, "cuda", streamed=True)
    assert set(df11.report(module, verify=True).residences.values()) == {"streamed", "ordinary"}


@pytest.mark.gpu
def test_modules_on_the_host_beside_a_gpu(made: dict[str, Any]) -> None:
    original, path = fill(Net(False)).cuda(), made["free"][1].path
    module = attach(Net(False), path, {"": 0, "layers.1": "cpu", "layers.3": "cpu"})
    forms = df11.report(module, verify=True).residences
    streamed = {name.rsplit(".", 2)[0] for name, form in forms.items() if form == "streamed"}
    assert streamed == {"layers.1", "layers.3"}
    for _ in range(3):
        assert same(module, original)
    assert module.embed.weight.shape == (600, WIDTH)
