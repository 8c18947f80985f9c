"""Models on GPUs: without a driver, and on the stand-in for one, whose memory is the host's and
which copies but runs no kernels.

`tests/gpu` of the library tests decoded bits on a GPU; `test_real_gpu.py` tests them through this
package, if there is a GPU.
"""

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, Tensors, run, write_safetensors

import df11

Environment = Callable[..., dict[str, str]]

# Stored as it is, so that the stand-in decodes it: layers of some sizes, which do not go to one
# block of small ones.
RAW: Tensors = {
    f"model.layers.{layer}.{name}": ("U32", (40, columns), bytes([layer, *range(159)]) * columns)
    for layer in range(4)
    for name, columns in [("a", 300), ("b", 250), ("c", 3)]
}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = write_safetensors(tmp_path_factory.mktemp("raw") / "m.safetensors", RAW)
    df11.compress(source, source.with_suffix(".df11"), progress=False)
    return source.with_suffix(".df11")


# The start of all scripts. Outputs are host memory at an address that is a multiple of 256.
PRELUDE = """
import ctypes, sys, df11
def output(size, fill=0xA5):
    memory = (ctypes.c_char * (size + 512)).from_buffer(bytearray([fill]) * (size + 512))
    start = -ctypes.addressof(memory) % 256
    view = memoryview(memory).cast("B")[start:start + size]
    return ctypes.addressof(memory) + start, view, memory
def original(tensor):
    buffer = bytearray(tensor.nbytes)
    tensor.decode_into(buffer)
    return buffer
def refused(call, kind=df11.ParameterError, words=""):
    try:
        call()
    except kind as error:
        assert kind is not df11.ParameterError or "; " in str(error), error
        assert words in str(error), error
        return error
    raise AssertionError(call)
def decoded(what, fill=0xA5):
    pointer, view, keep = output(what.nbytes, fill)
    what.decode(pointer, 0)
    return view
def check(blocks):
    for block in blocks:
        view = decoded(block)
        for name, (start, stop) in block.layout.items():
            assert view[start:stop] == original(model[name]), name
model = df11.open(sys.argv[1])
def driver():
    library = ctypes.CDLL("libcuda.so")
    library.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
    return library
def current():
    context = ctypes.c_void_p()
    driver().cuCtxGetCurrent(ctypes.byref(context))
    return context.value
"""


@pytest.fixture
def says(raw: Path, stand_in: Environment) -> Callable[..., str]:
    """The output of a script on two GPUs of the stand-in, or on others."""

    def says(text: str, **answers: str) -> str:
        environment = stand_in(**{"devices": "2", **answers})
        return run(PRELUDE + textwrap.dedent(text), raw, **environment)

    return says


def test_one_call_opens_and_loads(says: Callable[..., str]) -> None:
    says(
        """
        class Device:
            def __str__(self):
                return "cuda:1"
        for device, ordinal in [(0, 0), (1, 1), ("cuda", 0), ("cuda:1", 1), (Device(), 1)]:
            loaded = df11.open(sys.argv[1], device=device)
            assert isinstance(loaded, df11.DeviceModel) and loaded.devices == [ordinal], device
            check(loaded.blocks)
        for device in (None, "cpu"):
            assert isinstance(df11.open(sys.argv[1], device=device), df11.Model), device
        for device in ("gpu", "cuda:x", "cuda:", "mps", -1, 1.5):
            error = refused(lambda: df11.open(sys.argv[1], device=device), df11.ParameterError)
            assert "is no GPU" in str(error), error
        error = refused(lambda: df11.open(sys.argv[1], device="cuda:7"), df11.ParameterError)
        assert "there is no GPU 7" in str(error), error
        refused(lambda: df11.open("absent.df11", device="cuda:7"), df11.IoError)
        """
    )


def test_a_machine_without_a_driver_is_told_what_to_do(
    raw: Path, without_driver: dict[str, str]
) -> None:
    script = """
        assert df11.devices() == []
        for call in (lambda: model.load(), lambda: model.load([0, 1]),
                     lambda: model.verify(device="gpu")):
            error = refused(call, df11.GpuError)
            assert isinstance(error, RuntimeError), error
            assert error.remedy.startswith("install one of CUDA 12.0"), error
            begin = "GPU: no NVIDIA driver on this machine; install one"
            assert str(error).startswith(begin), error
        model.verify(device="auto")
        print(df11.plan(model).device_bytes)
        """
    assert run(PRELUDE + textwrap.dedent(script), raw, **without_driver)


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"version": "11080"}, "the NVIDIA driver knows CUDA 11.8; install a driver"),
        ({"memory": "5000"}, "Stand-in 0 has 5000 free; free memory"),
    ],
)
def test_drivers_that_fail_are_told(
    says: Callable[..., str], answers: dict[str, str], words: str
) -> None:
    assert words in says("print(refused(model.load, df11.GpuError))", **answers)


def test_devices_are_told_and_verify(says: Callable[..., str]) -> None:
    common = {"total_memory": 1 << 30, "compute_capability": (8, 0), "driver": (12, 0)}
    told = [{"ordinal": at, "name": f"Stand-in {at}", **common} for at in range(2)]
    script = """
        on_gpu = df11.verify(sys.argv[1], device="gpu")
        assert on_gpu == model.verify(device=1) == model.verify(device="cpu")
        print(df11.devices())
        """
    assert eval(says(script)) == told


def test_blocks_decode_wherever_they_lie(says: Callable[..., str]) -> None:
    says("""
        import threading
        plan = df11.plan(model)
        whole = plan.device_bytes[0]
        least = df11.plan(model, streamed=True)
        assert least.host_bytes > 0 == plan.host_bytes and least.device_bytes < plan.device_bytes
        for options in [
            dict(), dict(devices=1), dict(devices=[1, 0]), dict(streamed=True),
            dict(memory=whole - 1), dict(memory=[whole]),
            dict(devices=[0, 1], memory=[whole * 3 // 4] * 2),
        ]:
            told = []
            loaded = model.load(**options, progress=lambda *now: told.append(now))
            assert told[-1][0] == "load" and told[-1][1] == told[-1][2] > 0
            numbers = options.get("devices", 0)
            assert loaded.devices == (numbers if isinstance(numbers, list) else [numbers])
            assert loaded.largest_block_bytes == max(block.nbytes for block in model.blocks)
            assert loaded.device_bytes > 0 and loaded.copied_bytes <= loaded.host_bytes
            # Several threads at once, each many times.
            threads = [threading.Thread(target=check, args=[loaded.blocks * 3]) for _ in range(4)]
            for step in ("start", "join"):
                for thread in threads: getattr(thread, step)()
            check(loaded.blocks)
            for block, same in zip(loaded.blocks, model.blocks, strict=True):
                assert (block.name, block.layout) == (same.name, same.layout)
                assert block.nbytes == same.nbytes
                assert loaded.placements[block.name] == (block.device, block.is_streamed)
                assert loaded.block(block.name).name == block.name
                assert block.device in loaded.devices
                assert block.is_streamed or not options.get("streamed")
            loaded.check()
            loaded.check(0, loaded.devices[0])
            assert loaded.host_bytes > 0 or not options.get("streamed")
        # The last options spread the blocks.
        assert {place.device for place in loaded.placements.values()} == {0, 1}
        for wrong in (lambda: loaded.check(77), lambda: loaded.check(0, 5), lambda: model.load(7),
                      lambda: model.load(memory=1000),
                      lambda: model.load(memory=10**9, streamed=True),
                      lambda: block.decode(8, 0), lambda: model.load([0, 1], streamed=True)):
            refused(wrong)
        refused(lambda: loaded.block("absent"), KeyError)
        """)


def test_blocks_lie_where_they_are_told_to(says: Callable[..., str]) -> None:
    says("""
        a, b, c = [block.name for block in model.blocks][:3]
        plan = df11.plan(model, blocks={a: (1, False), c: (0, True)})
        assert plan.placements == {a: (1, False), c: (0, True)} and plan.host_bytes > 0
        loaded = model.load([1, 0], blocks=plan.placements)
        assert loaded.placements == {a: (0, False), c: (1, True)}, loaded.placements
        assert loaded.device_bytes < sum(plan.device_bytes)
        check(loaded.blocks)
        # Only some, wherever they fit.
        whole, some = df11.plan(model), df11.plan(model, blocks=[b, c])
        assert list(some.placements) == [b, c] and some.device_bytes < whole.device_bytes
        assert df11.plan(model, some.device_bytes[0], blocks=[b, c]) == some
        assert df11.plan(model, streamed=True, blocks=[b]).placements == {b: (0, True)}
        assert [block.name for block in model.load(blocks=[b, c]).blocks] == [b, c]
        assert model.load(blocks=[]).blocks == []
        assert df11.plan(model, blocks=[]).device_bytes == (0,)
        assert b in str(refused(lambda: loaded.block(b), KeyError, "not loaded"))
        lost, of = next(iter(model.block(b).layout)), df11.plan
        for wrong, words in [
            (lambda: loaded.program([(lost, 0)]), f'tensor "{lost}" is not loaded'),
            (lambda: of(model, blocks=["absent"]), 'no block "absent"'),
            (lambda: model.load(blocks={"absent": (0, False)}), 'no block "absent"'),
            (lambda: of(model, blocks={a: (2**60, False)}), f'"{a}" is placed on GPU {2**60} of'),
            (lambda: of(model, 10**9, blocks={a: (0, False)}), "memory and places of blocks"),
            (lambda: of(model, streamed=True, blocks={a: (0, False)}),
             "streamed and places of blocks"),
        ]:
            refused(wrong, words=words)
        """)


def test_programs_put_tensors_anywhere(says: Callable[..., str]) -> None:
    says("""
        names = list(model)
        pieces = [("model.layers.2.b", 0), ("model.layers.0.a", 48000, 3, 9),
                  ("model.layers.2.c", 60001), ("model.layers.0.a", 70000)]
        for options in (dict(), dict(streamed=True)):
            loaded = model.load(**options, progress=False)
            program = loaded.program(pieces)
            assert (program.nbytes, program.device) == (70000 + 48000, 0)
            assert not program.is_streamed
            expected = bytearray(b"\\xa5" * program.nbytes)
            for name, offset, *rows in pieces:
                content = original(model[name])
                if rows:
                    content = content[rows[0] * 1200:rows[1] * 1200]
                expected[offset:offset + len(content)] = content
            assert decoded(program) == decoded(program) == expected
            one = loaded.program([("model.layers.3.a", 512)])
            assert one.is_streamed == bool(options)
            # It keeps the model.
            del loaded
            assert decoded(one)[512:] == original(model["model.layers.3.a"])
        loaded = model.load([0, 1], memory=[df11.plan(model).device_bytes[0] * 3 // 4] * 2)
        tensors = {block.device: next(iter(block.layout)) for block in loaded.blocks}
        assert loaded.program([(tensors[1], 0)]).device == 1
        for wrong in ([], [("absent", 0)], [(names[0], 0, 5, 50)],
                      [(tensors[0], 0), (tensors[1], 0)], [(names[0], 2**64 - 8)]):
            refused(lambda: loaded.program(wrong))
        for wrong in (None, [names[0]], [(0, names[0])], [(names[0], -1)]):
            refused(lambda: loaded.program(wrong), (TypeError, OverflowError, ValueError))
        """)


def test_the_threads_context_stays_what_it_is(says: Callable[..., str]) -> None:
    """PyTorch's default is the current device."""
    says("""
        mine = ctypes.create_string_buffer(8)
        for context in (None, ctypes.addressof(mine)):
            driver().cuCtxSetCurrent(context)
            held = [model.load(1, streamed=True)]
            held.append(held[0].blocks[0])
            held.append(held[0].program([(next(iter(held[1].layout)), 0)]))
            pointer, view, keep = output(held[0].largest_block_bytes)
            for step in (lambda: held[1].decode(pointer, 0), lambda: held[2].decode(pointer, 0),
                         lambda: held[0].check(), held.pop, held.clear):
                assert current() == context
                step()
            assert current() == context
        """)


def linear_constants() -> dict[str, str]:
    """Answers of the stand-in about the kernels that multiply."""
    source = (ROOT / "tests/support/driver.rs").read_text()
    found = re.search(r'"(df11_linear_constants)",\s*"([^"]*)"', source)
    assert found
    return {found[1]: re.sub(r"[^0-9,]", "", found[2])}


def test_calls_with_addresses_leave_the_threads_context(says: Callable[..., str]) -> None:
    """Calls, and the objects that they made when these are freed."""
    says(
        """
        from df11 import _native
        at, *_keep = output(1 << 16, 0)
        def fast():
            strips = _native.strips_bytes(64, 256)
            return _native.Matrix(1, [1, 64, 256, 0, 0, 64, 0, 256], [at, at], [strips, 0])
        def grouped():
            return _native.Grouped(fast(), 2)
        def multiply():
            _native.Linear([fast()]).multiply(at, 1, 256, [(at, 64, 0, 0)], at, 0)
        steps = {
            "pack": lambda: _native.Packer(1, 64, 256, at, 0).finish(0),
            "take": lambda: _native.Packer(1, 64, 256, at, 0).take(at, 0),
            "matrix": fast, "decode": lambda: fast().decode(at, 0), "multiply": multiply,
            "gather": lambda: fast().gather(at, 1, True, at, 0),
            "decode_all": lambda: _native.decode_all([fast()], [at], 0),
            "grouped": lambda: grouped().multiply(at, 1, 256, at, 1, 0, at, 64, 0),
            "table": lambda: _native.build_tables(1, [(at, 48, at)]),
            "pin": lambda: _native.pin(at, 4096), "check": lambda: _native.check(1, 0),
            "check_done": _native.check_done, "fits": lambda: _native.fits(1),
            "capture": lambda: _native.capture_id(0),
        }
        mine = ctypes.create_string_buffer(8)
        for context in (None, ctypes.addressof(mine)):
            for name, step in steps.items():
                driver().cuCtxSetCurrent(context)
                step()
                assert current() == context, name
        """,
        **linear_constants(),
    )
