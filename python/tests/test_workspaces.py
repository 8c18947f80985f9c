"""Workspaces of products, without a GPU."""

from functools import partial

import pytest
import torch

from df11 import _native, _workspaces

#: Large products of the fast layout, and of matrices as stored, need about as much, in bytes.
LARGE, SMALL, MIB = 69_210_368, 2_400_000, 1 << 20
CAPTURED = 7


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is held, memory takes none, and the stream `CAPTURED` is captured."""
    for name in ("_held", "_spare"):
        monkeypatch.setattr(_workspaces, name, {})
    monkeypatch.setattr(_workspaces, "_retired", [])
    monkeypatch.setattr(_workspaces, "_is_shared", False)
    made = partial(torch.empty, dtype=torch.uint8, device="meta")
    monkeypatch.setattr(_workspaces, "_allocate", lambda index, room: made(room))
    monkeypatch.setattr(_native, "capture_id", lambda stream: int(stream == CAPTURED))


def _spares() -> list[int]:
    return sorted(spare.nbytes for spare in _workspaces._spare.values())


@pytest.mark.usefixtures("empty")
def test_large_ones_are_no_more_than_needed() -> None:
    assert _workspaces.workspace(0, 0, LARGE).nbytes == 80 * MIB
    assert _workspaces.workspace(0, 0, 16 * MIB + 1).nbytes == 80 * MIB
    assert _workspaces.workspace(0, 1, 16 * MIB + 1).nbytes == 32 * MIB
    assert _workspaces.workspace(0, 2, SMALL).nbytes == 4 * MIB


@pytest.mark.usefixtures("empty")
def test_spares_are_the_largest_alone() -> None:
    for size in (SMALL, 20 * MIB, LARGE, SMALL // 2, 40 * MIB, 8 * MIB):
        _workspaces.workspace(0, 0, size)
    assert _spares() == [8 * MIB, 80 * MIB]


@pytest.mark.usefixtures("empty")
def test_captures_get_one_of_their_own() -> None:
    outside = [_workspaces.workspace(0, 0, size) for size in (LARGE, SMALL)]
    small = _workspaces.workspace(0, CAPTURED, SMALL)
    assert small.nbytes == 4 * MIB and all(small is not other for other in outside)
    assert _spares() == [80 * MIB]
    large = _workspaces.workspace(0, CAPTURED, LARGE)
    assert large.nbytes == 80 * MIB and large is not outside[0]
    assert not _spares() and _workspaces._retired == [small]
    # The next product outside of captures makes one for the next capture.
    assert _workspaces.workspace(0, 0, SMALL) is outside[0]
    assert _spares() == [4 * MIB]
