"""Decoded tensors as arrays of other libraries."""

import ctypes
import importlib
import os
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import MATRIX, SAMPLE, one_layout

import df11
from df11 import _arrays

pytestmark = pytest.mark.filterwarnings("ignore:these uint:UserWarning")


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Whether ml_dtypes is there is not known before, nor after."""
    _arrays._ml_dtypes.cache_clear()
    yield
    _arrays._ml_dtypes.cache_clear()


def test_numpy_arrays_have_the_bytes(container: Path) -> None:
    np = pytest.importorskip("numpy")
    model = df11.open(container)
    for name, (dtype, shape, content) in SAMPLE.items():
        array = model[name].numpy()
        assert array.shape == shape and array.tobytes() == content and array.flags.writeable, name
        if dtype == "F32":
            assert array.dtype == np.float32
        if shape and shape[0] > 2:
            assert np.array_equal(model[name].rows(1, 3).numpy().view("u1"), array[1:3].view("u1"))
    array = np.empty((520, 70), np.uint16)
    model["model.layers.0.mlp.weight"].decode_into(array)
    assert array.tobytes() == SAMPLE["model.layers.0.mlp.weight"][2]


@one_layout
@pytest.mark.usefixtures("forgotten")
def test_numpy_types_are_those_of_ml_dtypes_where_it_is(
    container: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np = pytest.importorskip("numpy")
    # Any type of two bytes shows that it is taken.
    monkeypatch.setitem(sys.modules, "ml_dtypes", types.SimpleNamespace(bfloat16=np.float16))
    assert df11.open(container)["model.layers.0.mlp.weight"].numpy().dtype == np.float16


@one_layout
@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("has_types", [True, False])
def test_values_of_numpy(container: Path, monkeypatch: pytest.MonkeyPatch, has_types: bool) -> None:
    np = pytest.importorskip("numpy")
    # Any type of two bytes shows that it is taken.
    types_of_it = types.SimpleNamespace(bfloat16=np.float16) if has_types else None
    monkeypatch.setitem(sys.modules, "ml_dtypes", types_of_it)
    model = df11.open(container)
    tensor, bits = model["model.layers.0.mlp.weight"], np.frombuffer(MATRIX, np.uint16)
    # BF16 is the upper half of F32: NaN too.
    floats = (bits.astype(np.uint32) << 16).view(np.float32).reshape(520, 70)
    expected = bits.view(np.float16).reshape(520, 70) if has_types else floats
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found, like in (
            (np.asarray(tensor), expected),
            (np.asarray(tensor[3:5, 7]), expected[3:5, 7]),
            (np.array(tensor, np.float64), expected.astype(np.float64)),
        ):
            assert found.dtype == like.dtype and found.tobytes() == like.tobytes()
        ordinary = {"F32": "f4", "I64": "i8", "BOOL": "?"}
        for name, (dtype, _, content) in SAMPLE.items():
            if dtype in ordinary:
                found = np.asarray(model[name])
                assert found.dtype == ordinary[dtype] and found.tobytes() == content
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":  # earlier ones copy after all
        with pytest.raises(ValueError, match="new memory"):
            np.array(tensor, copy=False)
    if not has_types:
        with pytest.raises(df11.ParameterError, match=r"no type for F8_E4M3 .* install it"):
            np.asarray(model["model.layers.1.eight"])
        words = r"these uint16 are the bits of BF16, not its values.*numpy\.asarray"
        with pytest.warns(UserWarning, match=words):
            assert tensor.numpy().dtype == np.uint16


@one_layout
@pytest.mark.usefixtures("forgotten")
def test_ml_dtypes_is_looked_for_once(container: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failing import takes locks that a fork of a process with threads may find taken for
    ever.
    """
    np = pytest.importorskip("numpy")
    tensor = df11.open(container)["model.layers.0.mlp.weight"]
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    asked: list[str] = []
    real = importlib.import_module

    def watched(name: str) -> object:
        asked.append(name)
        return real(name)

    monkeypatch.setattr(_arrays.importlib, "import_module", watched)
    for _ in range(3):
        assert tensor.numpy().dtype == np.uint16
    if hasattr(os, "fork"):
        child = os.fork()
        if child == 0:
            tensor.numpy()
            os._exit(0 if asked.count("ml_dtypes") == 1 else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert asked.count("ml_dtypes") == 1


@one_layout
def test_objects_are_not_overwritten(container: Path) -> None:
    """Their addresses are the memory of such an array, and Python would follow them."""
    np = pytest.importorskip("numpy")
    tensor = df11.open(container)["model.layers.1.eight"]

    class Both(ctypes.Structure):
        _fields_ = (("number", ctypes.c_int), ("text", ctypes.c_char_p))

    class Holder(ctypes.Structure):
        _fields_ = (("a:P", ctypes.c_int), ("inner", Both * 2))

    for buffer in (
        np.array([object()]),
        np.zeros(1, np.dtype([("Object", "O")])),
        np.zeros(2, np.dtype([("O", "u1"), ("P", "O")])),
        (ctypes.py_object * 1)(object()),
        (ctypes.POINTER(ctypes.c_int) * 1)(),
        (ctypes.c_void_p * 1)(),
        (ctypes.c_char_p * 1)(),
        (ctypes.c_wchar_p * 1)(),
        (ctypes.CFUNCTYPE(None) * 1)(),
        (Both * 1)(),
        Both(),
        Holder(),
        # No addresses, but nobody can tell from the format of a structure.
        np.zeros(4, np.dtype([("O", "u1"), ("P", "u1")])),
    ):
        for of in (tensor, tensor.rows(0, 4)):
            with pytest.raises(df11.ParameterError, match="addresses would be overwritten"):
                of.decode_into(buffer)
    for numbers in (
        np.zeros(8, "u1"),
        np.zeros(4, ">u2"),
        np.zeros((2, 2), "e"),
        np.zeros(1, "c8"),
        np.zeros(8, "?"),
        bytearray(8),
        (ctypes.c_ubyte * 4 * 2)(),
        memoryview(bytearray(8)).cast("c"),
    ):
        tensor.decode_into(numbers)
        assert memoryview(numbers).tobytes() == bytes(range(8))


def test_torch_tensors_have_the_bytes(container: Path) -> None:
    torch = pytest.importorskip("torch")
    types = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}
    types |= {"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn}
    model = df11.open(container)
    for name, (dtype, shape, content) in SAMPLE.items():
        for tensor in (model[name].torch(), torch.from_dlpack(model[name])):
            assert tensor.dtype == types[dtype] and tuple(tensor.shape) == shape, name
            assert tensor.device.type == "cpu" and tensor.is_contiguous()
            if content:
                assert bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == content, name
                # The memory is the tensor's own.
                tensor.reshape(-1)[0] = 0
        if shape and shape[0] > 2:
            rows = model[name].rows(1, 3).torch()
            assert torch.equal(rows.view(torch.uint8), model[name].torch()[1:3].view(torch.uint8))
    assert model["model.embed.weight"].torch().data_ptr() % 256 == 0


def test_torch_buffers_are_decoded_into(container: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("numpy")
    model = df11.open(container)
    tensor = torch.empty(520, 70, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"tensor\.view\(torch\.uint8\)\.numpy\(\)"):
        model["model.layers.0.mlp.weight"].decode_into(tensor)
    model["model.layers.0.mlp.weight"].decode_into(tensor.view(torch.uint8).numpy())
    assert torch.equal(tensor, model["model.layers.0.mlp.weight"].torch())


@one_layout
def test_capsules_follow_the_protocol(container: Path) -> None:
    tensor = df11.open(container)["model.layers.0.mlp.weight"]
    assert tensor.__dlpack_device__() == tensor.rows(0, 1).__dlpack_device__() == (1, 0)
    one, other = '"dltensor"', '"dltensor_versioned"'
    for version, name in [(None, one), ((0, 8), one), ((1, 0), other)]:
        for of in (tensor, tensor.rows(3, 5)):
            capsule = of.__dlpack__(max_version=version, stream=None, copy=True, dl_device=(1, 0))
            assert name in repr(capsule)
            # Nobody took it: its own destructor frees it.
            del capsule
    with pytest.raises(df11.ParameterError, match="decoded to the CPU; load the model"):
        tensor.__dlpack__(dl_device=(2, 0))


@one_layout
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_memory_of_capsules_is_freed(container: Path) -> None:
    torch = pytest.importorskip("torch")
    tensor = df11.open(container)["model.embed.weight"]

    def decode(times: int) -> int:
        """Bytes of the process after it."""
        for _ in range(times):
            torch.from_dlpack(tensor), tensor.__dlpack__(), tensor.__dlpack__(max_version=(1, 0))
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = decode(50)
    # 400 MB are decoded.
    assert decode(1000) - before < 50 << 20
