"""The order of a framework's sums: how it is found, what refuses it, and how it is kept on disk.

Kernels are emulated here: chains of products of 16 columns in FP32, by splits. `test_order_gpu.py`
compares the real ones with cuBLAS.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from df11 import _ops, _order
from df11._matrices import FAST, Part
from df11._order import UNKNOWN, Case, Framework, Order, Probe, family, verdict
from df11._order_cache import OrderCache
from df11._status import ModelReport

matmul = torch.backends.cuda.matmul
CPU = torch.device("cpu")
ROWS, COLUMNS = 384, 512


def chain(x: Tensor, w: Tensor, first: int, end: int, step: int = 1) -> Tensor:
    total = torch.zeros(x.shape[0], w.shape[0])
    groups = [*range(first, end, 16)][::step]
    for at in groups:
        total = total + x[:, at : at + 16].float() @ w[:, at : at + 16].float().t()
    return total


def partial_sums(x: Tensor, w: Tensor, splits: int) -> list[Tensor]:
    columns = w.shape[1]
    blocks = -(-columns // 64)
    unit = -(-blocks // splits) * 64
    firsts = range(0, columns, unit)
    return [chain(x, w, first, min(first + unit, columns)) for first in firsts]


def in_order(x: Tensor, w: Tensor, bias: Tensor | None, splits: int) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    first, *others = partial_sums(flat, w, splits)
    for other in others:
        first = first + other
    y = first if bias is None else first + bias.float()
    return y.bfloat16().view(*x.shape[:-1], -1)


def backwards(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return chain(x.reshape(-1, x.shape[-1]), w, 0, w.shape[1], -1).bfloat16()


def last_split_first(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    first, *others = partial_sums(x, w, 3)[::-1]
    for other in others:
        first = first + other
    return first.bfloat16()


def rounded_splits(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    first, *others = (one.bfloat16().float() for one in partial_sums(x, w, 2))
    for other in others:
        first = first + other
    return first.bfloat16()


def framework(splits: int) -> Framework:
    return Framework("emulated", lambda x, w, bias: in_order(x, w, bias, splits))


def kernels(x: Tensor, packed: Any, bias: Tensor | None, splits: int) -> Tensor | None:
    return in_order(x, packed, bias, splits)


def case(*shape: int, bias: int = 0, alignment: int = 256, strides: Any = None) -> Case:
    strides = strides or torch.empty(shape).stride()
    return Case("emulated", ROWS, shape[-1], shape, strides, alignment, bias, "")


def probe(of: Framework, kernels: Any = kernels, columns: int = COLUMNS) -> Probe:
    return Probe(CPU, (ROWS, columns), of, kernels, lambda device, weight: weight)


def test_a_family_has_each_order_once() -> None:
    assert family(512) == [1, 2, 3, 4, 8]  # 5, 6 and 7 splits of 8 blocks would leave some empty
    assert family(4096) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16]
    assert family(40) == [1]
    for columns in (128, 200, 1024, 5120, 14336):
        blocks = -(-columns // 64)
        cuts = {tuple(range(0, blocks, -(-blocks // splits))) for splits in family(columns)}
        assert len(cuts) == len(family(columns))


@pytest.mark.parametrize("splits", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(1, COLUMNS), (2, 3, COLUMNS), (COLUMNS,), (33, COLUMNS)])
def test_finds_splits(splits: int, shape: tuple[int, ...]) -> None:
    assert probe(framework(splits)).order(case(*shape)) == Order(splits)


@pytest.mark.parametrize("columns", [264, 1000])
def test_finds_splits_of_columns_that_end_anywhere(columns: int) -> None:
    assert probe(framework(2), columns=columns).order(case(4, columns)) == Order(2)


def test_finds_where_a_bias_is_added() -> None:
    def apart(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        y = in_order(x, w, None, 2)
        return y if bias is None else y + bias

    assert probe(framework(3)).order(case(4, COLUMNS, bias=256)) == Order(3)
    assert probe(Framework("apart", apart)).order(case(4, COLUMNS, bias=256)) == Order(2, True)


@pytest.mark.parametrize("other", [backwards, last_split_first, rounded_splits])
def test_other_orders_are_not_known(other: Callable[..., Tensor]) -> None:
    assert probe(Framework("other", other)).order(case(4, COLUMNS)) == UNKNOWN


def test_one_wrong_output_of_thousands_is_seen() -> None:
    def nearly(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        y = in_order(x, w, bias, 2)
        y[0, 5] = y[0, 5].nextafter(torch.tensor(9.0).bfloat16())
        return y

    assert probe(Framework("nearly", nearly)).order(case(4, COLUMNS)) == UNKNOWN


def test_what_cannot_be_told_apart_is_not_known() -> None:
    """Kernels that add in one order, whatever they are told: each candidate gives all bits."""
    same = probe(framework(2), lambda x, w, bias, splits: in_order(x, w, bias, 2))
    assert same.order(case(4, COLUMNS)) == UNKNOWN


def test_inputs_that_do_not_cancel_do_not_decide() -> None:
    """Small whole numbers have exact sums in every order, and so prove nothing."""

    class Easy(Probe):
        def _inputs(self, case: Case, spread: int) -> tuple[Tensor, Tensor | None]:
            x, bias = super()._inputs(case, spread)
            return x.sign(), bias

        def _weight(self) -> Tensor:
            return super()._weight().sign()

    easy = Easy(CPU, (ROWS, COLUMNS), framework(2), kernels, lambda device, weight: weight)
    assert easy.order(case(4, COLUMNS)) == UNKNOWN


def test_each_other_order_differs_in_thousands_of_outputs() -> None:
    """The probe's own measure of how hard its inputs are, counted here once more."""
    tested = probe(framework(1))
    x, _ = tested._inputs(case(64, COLUMNS), 1)
    expected = in_order(x, tested.weight, None, 1)
    assert not x.double().sum(1).any()  # columns cancel in pairs
    for splits in family(COLUMNS)[1:]:
        y = in_order(x, tested.weight, None, splits)
        different = int((y.view(torch.int16) != expected.view(torch.int16)).sum())
        assert different > expected.numel() // 4, splits


def test_kernels_that_keep_one_order_are_compared_with_other_columns() -> None:
    def one(x: Tensor, w: Tensor, bias: Tensor | None, splits: int) -> Tensor | None:
        return in_order(x, w, bias, 1) if splits == 1 else None

    assert probe(framework(1), one).order(case(4, COLUMNS)) == Order(1)
    assert probe(framework(2), one).order(case(4, COLUMNS)) == UNKNOWN
    assert probe(framework(2), lambda *_: None).order(case(4, COLUMNS)) == UNKNOWN


@pytest.mark.parametrize(
    ("different", "outputs", "found"),
    [
        ({1: 9000, 2: 0, 3: 8000}, 20000, 2),
        ({1: 9000, 2: 1, 3: 8000}, 20000, 0),
        ({1: 0, 2: 0, 3: 8000}, 20000, 0),
        ({1: 0, 2: 2047}, 20000, 0),
        ({1: 0, 2: 2048}, 20000, 1),
        ({1: 0, 2: 9000}, 16383, 0),
        ({1: 0}, 20000, 0),
        ({1: 0, 0: 9000}, 20000, 1),
        ({0: 0}, 20000, 0),
        ({}, 0, 0),
    ],
)
def test_verdicts(different: dict[int, int], outputs: int, found: int) -> None:
    assert verdict(different, outputs) == found


@pytest.mark.parametrize(
    ("shape", "strides", "found"),
    [
        ((3, 512), (512, 1), (512, 1)),
        ((2, 3, 512), (1536, 512, 1), (1536, 512, 1)),
        ((1, 1, 512), (9 * 512, 512, 1), (512, 512, 1)),  # the last of nine tokens
        ((4, 1, 512), (9 * 512, 512, 1), (1024, 512, 1)),
        ((4, 1, 512), (7 * 512, 512, 1), (1024, 512, 1)),
        ((4, 2, 512), (9 * 512, 512, 1), (2048, 512, 1)),
        ((3, 512), (512 + 24, 1), (512 + 24, 1)),  # aligned to 16 bytes
        ((3, 512), (512 + 128, 1), (1024, 1)),
        ((1, 512), (7, 1), (7, 1)),
        ((3, 512), (0, 1), (0, 1)),
        ((3, 512), (1, 3), (1, 3)),
        ((512,), (1,), (1,)),
        ((512,), (2,), (2,)),
        ((1, 1, 200), (9 * 200, 200, 1), (200, 200, 1)),
        ((1, 1, 200), (8 * 200, 200, 1), (1600, 200, 1)),  # aligned better
    ],
)
def test_classes_of_strides(shape: Any, strides: Any, found: Any) -> None:
    assert _order.stride_class(shape, strides) == found
    assert _order.stride_class(shape, found) == found


def test_x_is_laid_out_as_the_case_says() -> None:
    tested = probe(framework(1))
    padded = case(4, COLUMNS, alignment=16, strides=(COLUMNS + 24, 1))
    x, _ = tested._inputs(padded, 1)
    assert (tuple(x.shape), x.stride()) == (padded.shape, padded.strides)
    assert x.storage_offset() == 8
    assert tested.order(padded) == Order(1)
    repeated = case(4, COLUMNS, strides=(0, 1))
    assert tested.order(repeated) == UNKNOWN
    assert probe(framework(1), columns=500).order(case(4, 500)) == UNKNOWN


# The orders that a process and a folder know.


class Gpu:
    """A tensor on a GPU, as far as a case looks at it."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.device, self.is_cuda = x, torch.device("cuda", 0), True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.x, name)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Case]:
    """Cases that were measured since the last look; orders have as many splits as x has rows."""
    cases: list[Case] = []

    class Counted:
        def __init__(self, *_: Any) -> None:
            pass

        def order(self, case: Case) -> Order:
            cases.append(case)
            return Order(case.x_rows % 5)

    monkeypatch.setattr(_order, "Probe", Counted)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    forget(monkeypatch)
    monkeypatch.setattr(
        OrderCache, "of_gpu", classmethod(lambda cls, index: cls(tmp_path, {"gpu": index}))
    )
    return cases


def aligned(*shape: int, alignment: int = 256) -> Tensor:
    """Memory as a GPU's allocator gives it, or some bytes from there on."""
    count = torch.Size(shape).numel()
    memory = torch.empty(count + 256, dtype=torch.bfloat16)
    first = (-memory.data_ptr() % 256 + alignment % 256) // 2
    return memory[first : first + count].view(shape)


def ask(*shape: int, bias: bool = False, weight: int = 1) -> Order:
    x: Any = Gpu(aligned(*shape))
    added = aligned(ROWS) if bias else None
    return _order.order_of(x, ROWS, added, framework(1), kernels, weight)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets everything, as the next process does."""
    monkeypatch.setattr(_order, "_known", {})
    monkeypatch.setattr(_order, "_waiting", {})
    monkeypatch.setattr(_order, "_caches", {})


def test_a_case_is_measured_once(measured: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(3, COLUMNS) == Order(3)
    assert ask(3, COLUMNS) == Order(3)
    assert len(measured) == 1
    forget(monkeypatch)
    assert ask(3, COLUMNS) == Order(3)
    assert len(measured) == 1
    assert ask(5, COLUMNS) == UNKNOWN
    forget(monkeypatch)
    assert ask(5, COLUMNS) == UNKNOWN
    assert len(measured) == 2
    assert _order.summary(0, ROWS, COLUMNS) == {5: False}


@pytest.mark.parametrize("other", ["rows", "dimensions", "columns", "bias", "flags", "alignment"])
def test_what_may_change_the_order_is_another_case(
    measured: list[Case], monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    ask(1, COLUMNS)
    if other == "rows":
        ask(2, COLUMNS)
    elif other == "dimensions":
        ask(1, 1, COLUMNS)
    elif other == "columns":
        ask(1, 2 * COLUMNS)
    elif other == "bias":
        ask(1, COLUMNS, bias=True)
    elif other == "flags":
        before = matmul.allow_bf16_reduced_precision_reduction
        matmul.allow_bf16_reduced_precision_reduction = False
        ask(1, COLUMNS)
        matmul.allow_bf16_reduced_precision_reduction = before
    else:
        odd: Any = Gpu(aligned(1, COLUMNS, alignment=16))
        _order.order_of(odd, ROWS, None, framework(1), kernels, 1)
        assert measured[1].alignment == 16
    assert len(measured) == 2
    assert measured[0] != measured[1]


def test_deterministic_algorithms_are_another_case(measured: list[Case]) -> None:
    ask(1, COLUMNS)
    torch.use_deterministic_algorithms(True)
    try:
        ask(1, COLUMNS)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(measured) == 2


def test_nothing_is_measured_in_a_capture(
    measured: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(2, COLUMNS)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert ask(2, COLUMNS) == Order(2)
    assert ask(3, COLUMNS) == UNKNOWN
    forget(monkeypatch)
    assert ask(2, COLUMNS) == Order(2)  # from disk
    assert len(measured) == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert ask(3, COLUMNS) == Order(3)  # the capture's answer was for the capture alone


def test_many_rows_are_measured_when_a_weight_meets_them_again(
    measured: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of many lengths come once, and the steps of a diffusion model have one length. Layers
    of a model have weights of one shape.
    """

    def forward(count: int) -> list[Order]:
        return [ask(count, COLUMNS, weight=layer) for layer in range(4)]

    assert forward(256) == 4 * [Order(1)]
    assert forward(257) == forward(259) == 4 * [UNKNOWN]
    assert [case.x_rows for case in measured] == [256]
    assert forward(257) == 4 * [Order(2)]
    assert forward(258) == 4 * [UNKNOWN]
    assert [case.x_rows for case in measured] == [256, 257]
    forget(monkeypatch)
    assert forward(257) == 4 * [Order(2)]  # from disk
    assert forward(259) == 4 * [UNKNOWN]
    assert len(measured) == 2
    # Weights that were loaded again lie elsewhere.
    found = [ask(258, COLUMNS, weight=layer) for layer in range(1000)]
    assert found[:512] == 512 * [UNKNOWN] and found[512:] == 488 * [Order(3)]


def test_tokens_of_experts_have_several_rows(measured: list[Case]) -> None:
    experts = framework(1)._replace(experts=4)
    for count in (2048, 2049):
        x: Any = Gpu(aligned(count, COLUMNS))
        _order.order_of(x, ROWS, None, experts, kernels, 1)
    assert [case.x_rows for case in measured] == [2048]


def test_a_case_that_takes_too_much_memory_is_not_measured() -> None:
    tested = probe(framework(1))
    assert tested.order(case((1 << 29) // COLUMNS, COLUMNS)) == UNKNOWN


class Recorded:
    """Kernels that record how they are called."""

    crossover_rows, keeps = 100, True

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, list[int]]] = []

    def keeps_order(self, rows: int, splits: list[int]) -> bool:
        return self.keeps

    def workspace_bytes(self, rows: int) -> int:
        return 0

    def multiply(self, x: int, rows: int, pitch: int, places: Any, *_: int) -> None:
        self.calls.append((rows, pitch, [splits for *_, splits in places]))


def test_how_kernels_multiply_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked, order = Recorded(), [], Order(3)
    part = Part.whole(FAST, ROWS, COLUMNS)

    def order_of(x: Any, *_: Any) -> Order:
        asked.append(tuple(x.shape))
        return order

    def multiply(*shape: int, bias: Tensor | None = None, alignment: int = 256) -> Any:
        x, arrays = Gpu(aligned(*shape, alignment=alignment)), [Gpu(torch.zeros(8))]
        given: Any = (x, arrays, part, (1,), (None if bias is None else Gpu(bias),), framework(1))
        return _ops.in_order(*given)

    monkeypatch.setattr(_ops, "product", lambda *_: made)
    monkeypatch.setattr(_ops, "order_of", order_of)
    monkeypatch.setattr(_ops, "raw_stream", lambda _: 0)
    monkeypatch.setattr(_ops, "_known", {})
    for _ in range(3):
        (y,) = multiply(3, COLUMNS)
        assert y.shape == (3, ROWS)
    assert len(asked) == 1 and made.calls == 3 * [(3, COLUMNS, [3])]
    for others in ({"alignment": 16}, {"bias": aligned(ROWS)}):
        asked.clear()
        multiply(3, COLUMNS, **others)
        assert len(asked) == 1
    multiply(1, 3, COLUMNS)
    multiply(4, COLUMNS)
    assert asked[1:] == [(1, 3, COLUMNS), (4, COLUMNS)]
    # An order that is not known may be measured later; kernels that do not keep one never will.
    order = UNKNOWN
    asked.clear()
    assert multiply(5, COLUMNS) is multiply(5, COLUMNS) is None
    assert len(asked) == 2
    order, made.keeps = Order(3), False
    asked.clear()
    assert multiply(6, COLUMNS) is multiply(6, COLUMNS) is None
    assert len(asked) == 1
    assert multiply(100, COLUMNS) is None


def test_many_are_measured_with_one_weight(measured: list[Case]) -> None:
    ask(2, COLUMNS)
    device, shape = torch.device("cuda", 0), (ROWS, COLUMNS)
    found = _order.prepare(device, shape, [1, 2, 3, 3], False, framework(1), kernels)
    assert found == [Order(1), Order(2), Order(3), Order(3)]
    assert [case.shape[0] for case in measured] == [2, 1, 3]


def test_products_that_are_being_tuned_have_no_order(
    measured: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_order, "_is_tuning", lambda: True)
    assert ask(2, COLUMNS) == UNKNOWN
    monkeypatch.setattr(_order, "_is_tuning", lambda: False)
    assert ask(2, COLUMNS) == Order(2)


def test_batch_invariant_products_have_one_case(measured: list[Case]) -> None:
    invariant = Framework("invariant", framework(1).multiply, True)
    device, shape = torch.device("cuda", 0), (ROWS, COLUMNS)
    found = _order.prepare(device, shape, [1, 7, 500], False, invariant, kernels)
    assert len(set(found)) == len(measured) == 1


def test_too_little_memory_is_asked_again_in_the_next_process(
    measured: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def __init__(self, *_: Any) -> None:
            raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(_order, "Probe", Full)
        assert ask(2, COLUMNS) == UNKNOWN
    assert ask(2, COLUMNS) == UNKNOWN
    forget(monkeypatch)
    assert ask(2, COLUMNS) == Order(2)


def test_a_report_names_what_is_decoded() -> None:
    orders = {"a.weight": {1: True, 8: True}, "b.weight": {1: True, 8: False, 9: False}}
    told = str(ModelReport(True, ["folder"], ["exact"], orders=orders | {"c.weight": {}}))
    assert "1 of 3 matrices are multiplied in BF16's order without decoding to memory" in told
    assert "b.weight: decoded first for 8, 9 rows of x" in told
    assert told.splitlines()[-1].strip() == "c.weight: decoded first"
    assert "in order" not in str(ModelReport(True, ["folder"], ["exact"]))


CASE = case(2, COLUMNS)


def test_orders_are_kept_by_what_they_hold_for(tmp_path: Path) -> None:
    OrderCache(tmp_path, {"cublas": [13, 1]}).add({CASE: (3, True)})
    assert OrderCache(tmp_path, {"cublas": [13, 1]}).get(CASE) == (3, True)
    assert OrderCache(tmp_path, {"cublas": [13, 2]}).get(CASE) is None
    assert OrderCache(None, {"cublas": [13, 1]}).get(CASE) is None
    assert not [file for file in tmp_path.iterdir() if file.suffix == ".tmp"]


def test_processes_that_write_in_turn_keep_both(tmp_path: Path) -> None:
    one, two = OrderCache(tmp_path, {}), OrderCache(tmp_path, {})
    other = case(9, COLUMNS)
    one.add({CASE: (1, False)})
    two.add({other: (2, False)})
    kept = OrderCache(tmp_path, {})
    assert (kept.get(CASE), kept.get(other)) == ((1, False), (2, False))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"null",
        b'{"about": {"format": 1}, "orders": []}',
        b'{"about": {"format": 1}, "orders": {"a": 3}}',
        b'{"about": {"format": 1}, "orders": {"a": [1, 2, 3]}}',
        b'{"about": {"format": 0}, "orders": {}}',
        b'{"about": {"format": 1, "gpu": "another"}, "orders": {}}',
        b"[" * 100000,
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_and_replaced(tmp_path: Path, content: bytes) -> None:
    file = OrderCache(tmp_path, {}).file
    assert file is not None
    file.write_bytes(content)
    cache = OrderCache(tmp_path, {})
    assert cache.get(CASE) is None
    cache.add({CASE: (4, False)})
    assert OrderCache(tmp_path, {}).get(CASE) == (4, False)


def test_a_pipe_and_a_device_are_ignored_and_replaced(tmp_path: Path) -> None:
    file = OrderCache(tmp_path, {}).file
    assert file is not None
    for make in (os.mkfifo, lambda place: place.symlink_to("/dev/zero")):
        make(file)
        cache = OrderCache(tmp_path, {})
        assert cache.get(CASE) is None
        cache.add({CASE: (4, False)})
        assert OrderCache(tmp_path, {}).get(CASE) == (4, False)
        file.unlink()


@pytest.mark.parametrize(
    "value", [[-1, False], [1 << 20, False], [True, False], [2, 1], [2.0, True]]
)
def test_a_number_that_is_no_order_is_ignored(tmp_path: Path, value: list[Any]) -> None:
    cache = OrderCache(tmp_path, {})
    assert cache.file is not None
    held = {"about": cache.about, "orders": {json.dumps(CASE): value}}
    cache.file.write_text(json.dumps(held))
    assert OrderCache(tmp_path, {}).get(CASE) is None


def test_a_file_of_another_name_does_not_count(tmp_path: Path) -> None:
    """Copied by hand from what was measured with another library."""
    other = OrderCache(tmp_path, {"cublas": 1})
    other.add({CASE: (4, False)})
    mine = OrderCache(tmp_path, {"cublas": 2})
    assert other.file is not None and mine.file is not None
    mine.file.write_bytes(other.file.read_bytes())
    assert OrderCache(tmp_path, {"cublas": 2}).get(CASE) is None


def test_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("df11._order_cache._MAX_ENTRIES", 3)
    monkeypatch.setattr("df11._order_cache._MAX_FILES", 2)
    for at in range(4):
        cache = OrderCache(tmp_path, {"gpu": at})
        for rows in range(1, 6):
            cache.add({case(rows, COLUMNS): (rows, False)})
        assert cache.file is not None
        os.utime(cache.file, (at, at))
    assert len([*tmp_path.iterdir()]) == 2
    kept = OrderCache(tmp_path, {"gpu": 3})
    known = [kept.get(case(rows, COLUMNS)) is not None for rows in range(1, 6)]
    assert known == [False, False, True, True, True]
    monkeypatch.setattr("df11._order_cache._MAX_BYTES", 10)
    assert OrderCache(tmp_path, {"gpu": 3}).get(case(5, COLUMNS)) is None


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = OrderCache(tmp_path / "file", {})
    cache.add({CASE: (1, False)})
    assert cache.get(CASE) == (1, False)


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from df11._order_cache import _folder

    monkeypatch.setenv("DF11_ORDER_CACHE", "off")
    assert _folder() is None
    monkeypatch.setenv("DF11_ORDER_CACHE", str(tmp_path))
    assert _folder() == tmp_path
    monkeypatch.delenv("DF11_ORDER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert _folder() == tmp_path / "cache" / "df11"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert _folder() == tmp_path / ".cache" / "df11"
