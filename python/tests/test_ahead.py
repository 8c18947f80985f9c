"""Decoding ahead, on the CPU: work is done when it is put on a stream, which shows what is decoded when."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from test_attach import WIDTH, Net, compressed, fill, tokens  # noqa: E402

import df11  # noqa: E402
from df11._parameters import by_name  # noqa: E402
from df11._place import Placement  # noqa: E402
from df11._runtime import Runtime  # noqa: E402


class Stream:
    """A stream on which nothing ever waits. `joined` tells for what the caller's would have."""

    def __init__(self, *_: Any) -> None:
        self.joined: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.joined.append(event)

    def record(self, *_: Any) -> None: ...


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The caller's stream, where there is no GPU."""
    current = Stream()
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    return current


@pytest.fixture
def pair(stream: Stream, tmp_path: Path) -> tuple[Any, Any]:
    """A module, and the same with compressed weights, in memory for two units."""
    original = fill(Net(tied=False))
    container = df11.open(compressed(original, tmp_path))
    module = Net(tied=False).eval()
    runtime = Runtime(module, container, by_name(module, container)[0])
    runtime.load(Placement([torch.device("cpu")]))
    runtime.prefetch = True
    runtime._lay_out_arenas()
    runtime.place_residents()
    runtime.place()
    runtime.install()
    assert len(set(runtime.offsets)) > 1
    return original, module


@torch.no_grad()
def test_each_unit_is_decoded_once(pair: tuple[Any, Any], stream: Stream) -> None:
    original, module = pair
    (ahead,) = module.__dict__["_df11"]._aheads.values()
    counts = dict.fromkeys(ahead.decode, 0)

    def counting(at: int, decode: Any) -> Any:
        def run() -> None:
            counts[at] += 1
            decode()

        return run

    ahead.decode = {at: counting(at, decode) for at, decode in ahead.decode.items()}
    for turn in (1, 2):
        assert torch.equal(module(tokens()), original(tokens()))
        assert set(counts.values()) == {turn}
    assert len(stream.joined) == 2 * len(ahead.next)


@torch.no_grad()
def test_what_was_decoded_ahead_of_a_forward_that_failed(pair: tuple[Any, Any]) -> None:
    original, module = pair
    x = torch.randn(1, 3, WIDTH).to(torch.bfloat16)
    fail = module.layers[1].up.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module(tokens())
    fail.remove()
    # Layer 2 was being decoded, and others go to its place now: whatever comes next counts on nothing.
    assert df11.report(module, verify=True).verified
    assert torch.equal(module.layers[2](x), original.layers[2](x))
    assert torch.equal(module(tokens()), original(tokens()))


@torch.no_grad()
def test_a_forward_that_fails_has_joined(pair: tuple[Any, Any], stream: Stream) -> None:
    _, module = pair
    (ahead,) = module.__dict__["_df11"]._aheads.values()
    module.layers[1].up.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module(tokens())
    assert stream.joined.count(ahead.ready) == 3  # before layers 0 and 1, and at the end


@torch.no_grad()
def test_a_layer_by_itself_has_nothing_decoded_ahead(pair: tuple[Any, Any], stream: Stream) -> None:
    """A graph of it would end with work that nobody waits for."""
    original, module = pair
    x = torch.randn(1, 3, WIDTH).to(torch.bfloat16)
    (ahead,) = module.__dict__["_df11"]._aheads.values()
    for at in (0, 1, 2):
        assert torch.equal(module.layers[at](x), original.layers[at](x))
        assert ahead.pending is None
    assert not stream.joined
