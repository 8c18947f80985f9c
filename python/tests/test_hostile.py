"""Arguments of every kind for operators, files that lie, and memory that is asked for: in processes
of their own, which must not crash. What does not raise must be right.
"""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from conftest import run

pytest.importorskip("torch")

_START = """
import faulthandler, io, random, sys, warnings
faulthandler.enable()
warnings.simplefilter("ignore")
import numpy as np
import torch
from torch.nn import functional
import df11
from df11._matrices import shape_of
from df11._tensor import CompressedTensor, rebuild
from weights import WEIGHTS, compressed, same

ops, CPU = torch.ops.df11, torch.device("cpu")
REFUSALS = (ValueError, TypeError, RuntimeError, IndexError, OverflowError, df11.Error)


torch.set_printoptions(threshold=0, edgeitems=1)


def said(what):
    # What is done last, if the process dies.
    print(str(what)[:600], file=sys.stderr, flush=True)


"""


def apart(function: Callable[..., None], *arguments: object) -> None:
    """Runs the body of a function in a process of its own."""
    body = inspect.getsource(function).split("\n", 1)[1]
    run(_START + textwrap.dedent(body), *arguments)


def _operators() -> None:
    from test_ops import SAMPLES, described

    fine = torch.zeros(64, dtype=torch.uint8)

    def freed():
        array = torch.zeros(2048, dtype=torch.uint8)
        array.untyped_storage().resize_(0)
        return array

    def fake():
        with torch._subclasses.FakeTensorMode() as mode:
            return mode.from_tensor(fine)

    meta = torch.device("meta")
    # None of these is a right argument, whatever it stands for.
    WRONG = {
        "tensor": [
            lambda t: t.to(meta), lambda t: t.flatten()[:0], lambda t: t.float()[..., None],
            lambda t: t.to(torch.complex64), lambda t: t[..., :-1], lambda t: None, lambda t: 3,
            lambda t: torch.full_like(t, -(2**30)) if not t.is_floating_point() else t[..., :1],
            lambda t: torch.full_like(t, 2**30) if not t.is_floating_point() else t[0, ..., 0],
            lambda t: t.reshape(-1)[0], lambda t: t.bool(), lambda t: t.to_sparse(),
        ],
        "array": [
            lambda a: a.to(meta), lambda a: a[:0], lambda a: a[:-1], lambda a: a.float(),
            lambda a: a.view(1, -1), lambda a: a.repeat(2), lambda a: a.repeat(2)[::2],
            lambda a: a[:1].expand(len(a)), lambda a: a.view(torch.int8), lambda a: freed(),
            lambda a: fake(), lambda a: a.to_sparse(), lambda a: None, lambda a: compressed("q"),
        ],
        "number": [-1, -(2**31), -(2**62), 2**31, 2**40, 2**62, 2**63 - 1, 2**64, 1.5, "3", None],
        "numbers": [[], [0], [-1] * 8, [2**62] * 8, [1] * 9, None, 7, ["x"] * 8],
        "device": ["meta", "cuda:99", "mps", "xyz", None, 5],
    }

    def changes(given):
        for at, value in enumerate(given):
            def put(new, at=at):
                return (*given[:at], new, *given[at + 1:])
            if isinstance(value, torch.Tensor):
                yield from ((True, put(make(value))) for make in WRONG["tensor"])
            elif isinstance(value, bool) or value is None:
                continue
            elif isinstance(value, int):
                yield from ((True, put(wrong)) for wrong in (0, *WRONG["number"]))
            elif isinstance(value, torch.device):
                yield from ((True, put(wrong)) for wrong in WRONG["device"])
            elif value and isinstance(value[0], torch.Tensor) and value[0].dtype == torch.uint8:
                yield True, put(value[:-1])
                yield True, put([*value, fine])
                yield True, put([])
                for place in range(len(value)):
                    if not value[place].numel():
                        continue  # no array that the CPU reads
                    for make in WRONG["array"]:
                        yield True, put([*value[:place], make(value[place]), *value[place + 1:]])
            elif value and isinstance(value[0], int):
                yield from ((True, put(wrong)) for wrong in WRONG["numbers"])
                for place in range(len(value)):
                    for wrong in WRONG["number"]:
                        # A number may be of no matter to the CPU, or mean another window.
                        yield False, put([*value[:place], wrong, *value[place + 1:]])

    calls = 0
    for name, sample in SAMPLES.items():
        operator = getattr(ops, name.split()[0])
        for must, given in changes(sample(described)):
            said(f"{name} {calls}: {[str(each)[:200] for each in given]}")
            calls += 1
            try:
                found = operator(*given)
            except REFUSALS:
                continue
            assert not must or name == "table", (name, given)
            first = found[0] if isinstance(found, list) else found
            if name == "decode":
                assert same(first, torch.cat([WEIGHTS[w] for w in "qkv"])), given
    assert calls > 1000, calls


def test_operators_refuse_arguments_of_every_kind() -> None:
    apart(_operators)


def _layouts() -> None:
    from test_ops import EXPERT, OFFSETS, ROWS, described, normal

    def spread(x):
        return torch.stack([x, x], -1)[..., 0]

    x, indices = normal(3, 256), torch.tensor([1, 5, 127])
    for y in (spread(x), x.T.contiguous().T, x[:1].expand(3, 256), x.clone().requires_grad_()):
        for exact in (True, False):
            assert torch.equal(
                ops.linear(y, *described("q"), None, exact), functional.linear(y, WEIGHTS["q"])
            )
    for some in (spread(indices), indices[:1].expand(4), indices.int(), indices[:0], indices[0]):
        assert same(ops.embedding(some, *described("q")), WEIGHTS["q"][some])
    x = normal(4, 256)
    expected = ops.grouped_linear(x, OFFSETS, ROWS, *described("experts"), 6)
    found = ops.grouped_linear(
        spread(x), spread(OFFSETS), spread(ROWS), *described("experts"), 6
    )
    assert same(found, expected)
    # Rows of places that no expert has may be anything.
    padded = torch.cat([ROWS, torch.tensor([-7, 2**30], dtype=torch.int32)])
    assert same(ops.grouped_linear(x, OFFSETS, padded, *described("experts"), 6)[:9], expected)
    for wrong in ([-1, 0, 3, 3, 8, 9, 9], [0, 4, 3, 3, 8, 9, 9], [0, 0, 3, 3, 8, 9, 10]):
        offsets = torch.tensor(wrong, dtype=torch.int32)
        for call in (
            lambda o: ops.grouped_linear(x, o, ROWS, *described("experts"), 6),
            lambda o: ops.grouped_linear_backward(
                normal(9, 64), o, ROWS, *described("experts"), 6, 4
            ),
            lambda o: ops._grouped_mm(
                normal(9, 256), o[1:], *described("experts"), [6, 256, 64], True, True
            ),
        ):
            try:
                call(offsets)
            except IndexError:
                continue
            assert wrong[0] < 0, wrong  # which `_grouped_mm` does not get
    for wrong in (-1, 4):
        rows = ROWS.clone()
        rows[2] = wrong
        for call in (
            lambda: ops.grouped_linear(x, OFFSETS, rows, *described("experts"), 6),
            lambda: ops.grouped_linear_backward(
                normal(9, 64), OFFSETS, rows, *described("experts"), 6, 4
            ),
        ):
            try:
                call()
            except IndexError:
                continue
            raise AssertionError("a row that x has not")


def test_layouts_of_arguments_do_not_matter() -> None:
    apart(_layouts)


def _memory() -> None:
    import copy
    import pickle
    from multiprocessing.reduction import ForkingPickler

    q = compressed("q")

    def refused(function, *kinds):
        said(inspect_name(function))
        try:
            found = function()
        except kinds or REFUSALS:
            return
        raise AssertionError(found)

    def inspect_name(function):
        return f"line {function.__code__.co_firstlineno}"

    refused(lambda: torch.utils.dlpack.to_dlpack(q))
    refused(lambda: torch._C._to_dlpack(q))
    refused(lambda: torch._C._to_dlpack_versioned(q))
    refused(lambda: np.asarray(q))  # NumPy has no BF16
    refused(lambda: q.numpy())
    refused(lambda: np.from_dlpack(q))
    refused(lambda: memoryview(q))
    refused(lambda: torch.frombuffer(q, dtype=torch.uint8))
    refused(lambda: q.__cuda_array_interface__, AttributeError)
    refused(lambda: q.__array_interface__, AttributeError)
    refused(lambda: q.apply_(lambda value: value))
    refused(lambda: q.untyped_storage().fill_(1))
    refused(lambda: q.untyped_storage()[0])
    refused(lambda: torch.empty(0).bfloat16().set_(q.untyped_storage(), 0, (2, 2)).tolist())
    assert torch._C._data_address(q) == 0
    assert not q.untyped_storage().nbytes() and not q.untyped_storage().tolist()
    q.untyped_storage().share_memory_()
    for tensor in (q, torch.nn.Parameter(compressed("q"), requires_grad=False)):
        for array in tensor.arrays:
            said("writing into an array")
            array.fill_(7)
        assert same(tensor, WEIGHTS["q"])
        assert same(torch.from_dlpack(tensor), WEIGHTS["q"])
        assert same(pickle.loads(pickle.dumps(tensor)), WEIGHTS["q"])
        assert np.array_equal(np.asarray(tensor.float()), WEIGHTS["q"].float().numpy())
        shared = copy.copy(tensor).share_memory_()
        assert shared.is_shared() and same(shared, WEIGHTS["q"])
        assert same(pickle.loads(ForkingPickler.dumps(tensor)), WEIGHTS["q"])
    if torch.cuda.is_available():
        assert same(q.pin_memory(), WEIGHTS["q"])
    else:
        refused(lambda: q.pin_memory())
    refused(lambda: functional.linear(torch.zeros(2, 256).bfloat16(), q.to("meta")))
    refused(lambda: functional.linear(torch.zeros(2, 256, device="meta").bfloat16(), q))
    assert q.to("meta").decode().is_meta


def test_memory_that_is_asked_for_is_refused_or_right() -> None:
    apart(_memory)


def _files() -> None:
    choose = random.Random(int(sys.argv[1]))
    NUMBERS = [0, 1, -1, 2, 8, 31, 32, 33, 64, 128, 255, 256, 2**31, 2**32, 2**62, 2**63, -(2**63)]
    OTHERS = [True, None, 1.0, "1", [], {}, [1], (2, 3), torch.tensor(3), torch.zeros(3)]
    ARRAYS = [
        lambda a: a[:-1], lambda a: a[:0], lambda a: a.repeat(2), lambda a: a.repeat(2)[::2],
        lambda a: a[:1].expand(len(a)), lambda a: a.view(1, -1), lambda a: a.view(torch.int8),
        lambda a: a.float(), lambda a: a.to("meta"), lambda a: a.to_sparse(), lambda a: a[7:],
        lambda a: torch.nn.Parameter(a, requires_grad=False), lambda a: compressed("q"),
        lambda a: torch.randint_like(a, 256), lambda a: a ^ 1, lambda a: torch.flip(a, [0]),
        lambda a: torch.full_like(a, 255), lambda a: torch.zeros_like(a), lambda a: None,
        lambda a: a.clone().untyped_storage(), lambda a: [a], lambda a: 3,
        lambda a: torch.nested.nested_tensor([a.float()]),
    ]

    class File:
        # To pickle what a file says that was not written by us.
        def __init__(self, function, arguments):
            self.function, self.arguments = function, arguments

        def __reduce__(self):
            return self.function, self.arguments

    def number():
        return choose.choice(NUMBERS if choose.random() < 0.8 else OTHERS)

    def changed(value, depth=0):
        if isinstance(value, torch.Tensor):
            return choose.choice(ARRAYS)(value)
        if isinstance(value, dict) and value:
            value, key = dict(value), choose.choice(list(value))
            if choose.random() < 0.1:
                del value[key]
            elif choose.random() < 0.1:
                value[choose.choice(["device", "requires_grad", "x", 3])] = number()
            else:
                value[key] = changed(value[key], depth + 1)
            return value
        if isinstance(value, (list, tuple)) and value and choose.random() < 0.9:
            value, at = list(value), choose.randrange(len(value))
            kind = choose.random()
            if kind < 0.05:
                del value[at]
            elif kind < 0.1:
                value.insert(at, value[at])
            elif kind < 0.15:
                value[at], value[0] = value[0], value[at]
            else:
                value[at] = changed(value[at], depth + 1)
            return value
        if isinstance(value, int) and not isinstance(value, bool) and choose.random() < 0.5:
            return value + choose.choice([-256, -32, -1, 1, 32, 256])
        return number()

    def use(tensor):
        x = torch.ones(2, tensor.shape[-1] if tensor.dim() else 1).bfloat16()
        some = [
            lambda: tensor.decode(), lambda: functional.linear(x, tensor), lambda: repr(tensor),
            lambda: tensor[0], lambda: tensor[1:3], lambda: tensor.mT, lambda: tensor.to("meta"),
            lambda: functional.embedding(torch.tensor([0, 1]), tensor), lambda: tensor.clone() + 1,
            lambda: tensor.arrays, lambda: torch.save(tensor, io.BytesIO()), lambda: tensor.view(-1),
            lambda: tensor.detach().decode(), lambda: tensor.nbytes_stored, lambda: tensor.data_ptr(),
            lambda: torch.cat([tensor, tensor]).decode(), lambda: tensor.share_memory_().decode(),
        ]
        for function in some:
            try:
                function()
            except (*REFUSALS, AttributeError, KeyError):
                pass

    good = [compressed(name).__reduce_ex__(2)[1] for name in ("q", "odd", "experts", "edge")]
    stacked = torch.cat([compressed("q"), compressed("k")])
    good.append(stacked.__reduce_ex__(2)[1])
    loaded = refused = 0
    for at in range(int(sys.argv[2])):
        given = list(choose.choice(good))
        for _ in range(choose.choice([1, 1, 2, 3])):
            given = changed(given)
            given = list(given) if isinstance(given, (list, tuple)) else [given]
        function, arguments = rebuild, tuple(given)
        if choose.random() < 0.3:
            # Attributes of a tensor are a file's, too.
            attributes = vars(compressed("q"))
            state = {key: changed(attributes[key]) for key in choose.sample(list(attributes), 2)}
            function = torch._tensor._rebuild_from_type_v2
            arguments = (rebuild, torch.Tensor, tuple(choose.choice(good)), state)
        said(f"{at}: {str(arguments)[-500:]}")
        file = io.BytesIO()
        try:
            torch.save(File(function, arguments), file)
        except Exception:
            continue  # what cannot be written
        file.seek(0)
        try:
            tensor = torch.load(file, weights_only=True)
        except (*REFUSALS, Exception) as error:
            refused += 1
            assert isinstance(error, (*REFUSALS, AttributeError, KeyError)) or (
                type(error).__name__ == "UnpicklingError"
            ), type(error)
            continue
        loaded += 1
        if isinstance(tensor, torch.Tensor):
            use(tensor)
    print(loaded, refused)
    assert loaded > 20 and refused > 20


@pytest.mark.parametrize("seed", range(3))
def test_files_that_lie_are_refused_or_decoded(seed: int) -> None:
    apart(_files, seed, 700)


def test_what_a_file_says_is_checked() -> None:
    import torch
    from weights import WEIGHTS, compressed, same

    import df11
    from df11._tensor import rebuild

    arrays, told, _ = compressed("q").__reduce_ex__(2)[1]
    assert same(rebuild(arrays, told), WEIGHTS["q"])
    part = told["parts"][0]

    def refused(error: Any, match: str, arrays: Any = arrays, **changes: Any) -> None:
        with pytest.raises(error, match=match):
            rebuild(arrays, {**told, **changes})

    refused(ValueError, "names", more=1)
    refused(TypeError, "whole numbers", shape=[128.0, 256])
    refused(TypeError, "whole numbers", shape=[True, 256 * 128])
    refused(TypeError, "a list was kept", shape=128)
    refused(ValueError, "no compressed tensor", shape=[-128, -256])
    refused(ValueError, "no compressed tensor", exact=1)
    refused(ValueError, "8 numbers", parts=[part[:7]])
    refused(ValueError, "form", parts=[[-1, *part[1:]]])
    refused(ValueError, "form", parts=[])
    refused(ValueError, "staged bytes", parts=[[*part[:3], -1, *part[4:]]])
    refused(ValueError, "4 arrays", arrays=arrays[:3])
    refused(ValueError, "one device", arrays=[*arrays[:3], arrays[3].to("meta")])
    refused(TypeError, "uint8", arrays=[*arrays[:3], arrays[3].view(torch.int8)])
    refused(TypeError, "tensors", arrays=[*arrays[:3], 7])
    refused(df11.ParameterError, "arrays of", arrays=[*arrays[:3], arrays[3][:-1]])
    refused(ValueError, "weights", parts=[[*part[:1], 2**40, 2**40, 0, 0, 128, 0, 256]])
