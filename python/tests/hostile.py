"""Programs that `test_hostile.py` runs in separate processes: arguments of every kind for
operators, files that lie, and requests for memory. A call that does not raise must be right.
"""

import copy
import io
import os
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import torch
from test_ops import OFFSETS, ROWS, SAMPLES, described, normal
from torch.nn import functional
from weights import WEIGHTS, compressed, same

import df11
from df11._tensor import rebuild

warnings.simplefilter("ignore")
ops = torch.ops.df11
INTEGERS = (torch.int32, torch.int64)
REFUSALS = (ValueError, TypeError, AttributeError, RuntimeError, IndexError, KeyError)
REFUSALS += (OverflowError, df11.Error, pickle.UnpicklingError)


def said(what: object) -> None:
    """Keeps what is done last, if the process dies."""
    Path(os.environ["SAID"]).write_text(str(what))


def refused(function: Callable[[], Any], *kinds: type[Exception]) -> None:
    expected = kinds or REFUSALS
    said(f"line {function.__code__.co_firstlineno}")
    try:
        found = function()
    except expected:
        return
    raise AssertionError(found)


# ---- operators ----


def freed() -> torch.Tensor:
    array = torch.zeros(2048, dtype=torch.uint8)
    array.untyped_storage().resize_(0)
    return array


def is_freed(value: torch.Tensor) -> bool:
    """PyTorch itself crashes where it reads such a tensor."""
    is_strided = value.layout == torch.strided
    return is_strided and value.numel() > 0 and value.untyped_storage().nbytes() == 0


#: None of these is a right argument, whatever it stands for.
TENSORS: list[Callable[[torch.Tensor], Any]] = [
    lambda t: t.to("meta"),
    lambda t: t.float()[..., None],
    lambda t: t.to_sparse(),
    lambda t: 3,
    lambda t: t.to(torch.complex64),
    lambda t: t.bool(),
    lambda t: torch.full_like(t, -(2**30)) if t.dtype in INTEGERS else t[..., None],
    lambda t: torch.full_like(t, 2**30) if t.dtype in INTEGERS else t[..., None],
]
#: Values that are right for some arguments.
OTHER_TENSORS: list[Callable[[torch.Tensor], Any]] = [
    lambda t: t.flatten()[:0],
    lambda t: t[..., :-1],
    lambda t: None,
    lambda t: t[None, :0],
    lambda t: t[:0, None],
    lambda t: t.reshape(-1)[0],
    lambda t: t.T,
    lambda t: t.to(torch.int8),
]
ARRAYS: list[Callable[[torch.Tensor], Any]] = [
    lambda a: a.to("meta"),
    lambda a: a[:0],
    lambda a: a[:-1],
    lambda a: a.float(),
    lambda a: a.view(1, -1),
    lambda a: a.repeat(2),
    lambda a: a.repeat(2)[::2],
    lambda a: a[:1].expand(len(a)),
    lambda a: freed(),
    lambda a: a.to_sparse(),
    lambda a: None,
    lambda a: compressed("q"),
]
NUMBERS = [-1, -(2**31), -(2**62), 2**31, 2**40, 2**62, 2**63 - 1, 2**64, 1.5, "3", None]
LISTS: list[Any] = [[], [0], [-1] * 8, [2**62] * 8, [1] * 9, None, 7, ["x"] * 8]
DEVICES = ["meta", "cuda:99", "mps", "xyz", None, 5]
Change = tuple[bool, Any]


def changes(value: Any) -> Iterator[Change]:
    """Other values for an argument, and whether they must be refused."""
    if isinstance(value, torch.Tensor):
        yield from ((True, make(value)) for make in TENSORS)
        yield from ((False, make(value)) for make in OTHER_TENSORS)
    elif isinstance(value, torch.device):
        yield from ((True, wrong) for wrong in DEVICES)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield from ((True, wrong) for wrong in (0, *NUMBERS))
    elif isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        is_arrays = value[0].dtype == torch.uint8
        yield from ((is_arrays, wrong) for wrong in (value[:-1], [*value, value[0]], []))
        read = [at for at, array in enumerate(value) if array.dtype == torch.uint8 and len(array)]
        for at, make in product(read, ARRAYS):
            yield True, [*value[:at], make(value[at]), *value[at + 1 :]]
    elif isinstance(value, list) and value:
        yield from ((True, wrong) for wrong in LISTS)
        for at, wrong in product(range(len(value)), NUMBERS):
            # It may be of no matter to the CPU, or mean another window.
            yield False, [*value[:at], wrong, *value[at + 1 :]]


def told(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [told(each) for each in value]
    is_tensor = isinstance(value, torch.Tensor)
    return (value.dtype, value.device, value.shape, value.layout) if is_tensor else value


def operators() -> None:
    calls, taken = 0, []
    for name, sample in SAMPLES.items():
        given = sample(described)
        for at, value in enumerate(given):
            for must, other in changes(value):
                arguments = (*given[:at], other, *given[at + 1 :])
                said(f"{name} {calls}: {told(arguments)}")
                calls += 1
                try:
                    found = getattr(ops, name.split()[0])(*arguments)
                except REFUSALS:
                    continue
                if must and name != "table":
                    taken.append((name, told(arguments)))
                elif name == "decode":
                    assert same(found, torch.cat([WEIGHTS[w] for w in "qkv"])), told(arguments)
    assert calls > 1000 and not taken, (calls, *taken)


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same with other strides."""
    return torch.stack([x, x], -1)[..., 0]


def layouts() -> None:
    x, indices = normal(3, 256), torch.tensor([1, 5, 127])
    for y in (spread(x), x.T.contiguous().T, x[:1].expand(3, 256), x.clone().requires_grad_()):
        for exact in (True, False):
            found = ops.linear(y, *described("q"), None, exact)
            assert same(found, functional.linear(y, WEIGHTS["q"]))
    for some in (spread(indices), indices[:1].expand(4), indices.int(), indices[:0], indices[0]):
        assert same(ops.embedding(some, *described("q")), WEIGHTS["q"][some])
    x, experts = normal(4, 256), (*described("experts"), 6)
    expected = ops.grouped_linear(x, OFFSETS, ROWS, *experts)
    assert same(ops.grouped_linear(spread(x), spread(OFFSETS), spread(ROWS), *experts), expected)
    # Rows of places that no expert has may be anything.
    padded = torch.cat([ROWS, torch.tensor([-7, 2**30], dtype=torch.int32)])
    assert same(ops.grouped_linear(x, OFFSETS, padded, *experts)[:9], expected)


def routes() -> None:
    x, experts = normal(9, 256), (*described("experts"), 6)
    # Indices of a wrong dtype are not read.
    refused(lambda: ops.embedding(freed(), *described("q")), TypeError)

    def refuse(offsets: torch.Tensor, rows: torch.Tensor) -> None:
        refused(lambda: ops.grouped_linear(x[:4], offsets, rows, *experts), IndexError)
        backward = ops.grouped_linear_backward
        refused(lambda: backward(normal(9, 64), offsets, rows, *experts, 4), IndexError)

    for wrong in ([-1, 0, 3, 3, 8, 9, 9], [0, 4, 3, 3, 8, 9, 9], [0, 0, 3, 3, 8, 9, 10]):
        offsets = torch.tensor(wrong, dtype=torch.int32)
        refuse(offsets, ROWS)
        ends, shape = offsets[1:], [6, 256, 64]
        if wrong[0] == 0:
            grouped = ops._grouped_mm
            refused(lambda: grouped(x, ends, *experts[:2], shape, True, True), IndexError)  # noqa: B023
    for wrong_row in (-1, 4):
        rows = ROWS.clone()
        rows[2] = wrong_row
        refuse(OFFSETS, rows)


# ---- memory ----


def memory() -> None:
    q, k, zeros = compressed("q"), compressed("k"), torch.zeros(2, 256).bfloat16()
    refused(lambda: torch.utils.dlpack.to_dlpack(q))
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
    refused(lambda: torch.empty(0).bfloat16().set_(k.untyped_storage(), 0, (2, 2)).tolist())
    refused(lambda: functional.linear(zeros, q.to("meta")))
    refused(lambda: functional.linear(zeros.to("meta"), q))
    assert torch._C._data_address(q) == 0 and q.untyped_storage().nbytes() == q.nbytes
    q.untyped_storage().share_memory_()
    if not torch.cuda.is_available():
        refused(lambda: q.pin_memory())
    for tensor in (compressed("q"), torch.nn.Parameter(compressed("q"), requires_grad=False)):
        said("writing into arrays")
        for array in tensor.arrays:
            array.fill_(7)
        said("what others get")
        shared = copy.copy(tensor).share_memory_()
        sent = pickle.loads(ForkingPickler.dumps(tensor))
        kept = pickle.loads(pickle.dumps(tensor))
        for other in (tensor, torch.from_dlpack(tensor), shared, sent, kept):
            assert same(other, WEIGHTS["q"])
        assert np.array_equal(np.asarray(tensor.float()), WEIGHTS["q"].float().numpy())


# ---- files ----

SIDES = [0, 1, -1, 2, 8, 31, 32, 33, 64, 128, 255, 256, 2**31, 2**32, 2**62, 2**63, -(2**63)]
OTHERS = [True, None, 1.0, "1", [], {}, [1], (2, 3), torch.tensor(3), torch.zeros(3)]
#: Values that may also be right in a file, and hold anything.
CONTENTS: list[Callable[[torch.Tensor], Any]] = [
    *ARRAYS,
    lambda a: a.view(torch.int8),
    lambda a: a[7:],
    lambda a: torch.nn.Parameter(a, requires_grad=False),
    lambda a: torch.randint_like(a, 256),
    lambda a: a ^ 1,
    lambda a: torch.flip(a, [0]),
    lambda a: torch.full_like(a, 255),
    lambda a: a.clone().untyped_storage(),
    lambda a: [a],
    lambda a: torch.nested.nested_tensor([a.float()]),
]


class Said:
    """Contents of a file that `torch.save` never writes."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


class Liar:
    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        good = [compressed(name) for name in ("q", "odd", "experts", "edge")]
        good.append(torch.cat([good[0], compressed("k")]))
        self.good = [tensor.__reduce_ex__(2)[1] for tensor in good]

    def is_so(self, share: float) -> bool:
        return self.choose.random() < share

    def changed(self, value: Any) -> Any:
        """Something else, or the same with another part somewhere."""
        pick = self.choose.choice
        if isinstance(value, torch.Tensor):
            return value if is_freed(value) else pick(CONTENTS)(value)
        if isinstance(value, dict) and value:
            key = pick([*value, "device", "requires_grad", 3])
            if self.is_so(0.1):
                return {other: each for other, each in value.items() if other != key}
            return {**value, key: self.changed(value.get(key))}
        if isinstance(value, list | tuple) and value and self.is_so(0.9):
            at = self.choose.randrange(len(value))
            some = [self.changed(value[at])] if self.is_so(0.9) else pick(([], [value[at]] * 2))
            return [*value[:at], *some, *value[at + 1 :]]
        if type(value) is int and self.is_so(0.5):
            return value + pick([-256, -32, -1, 1, 32, 256])
        return pick(SIDES if self.is_so(0.8) else OTHERS)

    def file(self) -> io.BytesIO:
        """Raises what comes of changes that there are not, or that cannot be written."""
        given: Any = list(self.choose.choice(self.good))
        for _ in range(self.choose.choice([1, 1, 2, 3])):
            given = self.changed(given)
            given = list(given) if isinstance(given, list | tuple) else [given]
        what = Said(rebuild, tuple(given))
        if self.is_so(0.3):
            # Attributes of a tensor are a file's, too.
            held = vars(compressed("q"))
            state = {key: self.changed(held[key]) for key in self.choose.sample([*held], 2)}
            good = tuple(self.choose.choice(self.good))
            function: Any = torch._tensor._rebuild_from_type_v2  # type: ignore[attr-defined]
            what = Said(function, (rebuild, torch.Tensor, good, state))
        said(told(what.arguments))
        torch.save(what, file := io.BytesIO())
        file.seek(0)
        return file


def use(tensor: torch.Tensor) -> None:
    x = torch.ones(2, tensor.shape[-1] if tensor.dim() else 1).bfloat16()
    some: list[Callable[[], Any]] = [
        lambda: tensor.decode(),  # type: ignore[operator]
        lambda: functional.linear(x, tensor),
        lambda: repr(tensor),
        lambda: tensor[1:3].clone(),
        lambda: tensor.mT.clone(),
        lambda: tensor.to("meta"),
        lambda: functional.embedding(torch.tensor([0, 1]), tensor),
        lambda: tensor.arrays,  # type: ignore[attr-defined]
        lambda: torch.save(tensor, io.BytesIO()),
        lambda: tensor.detach() + 1,
        lambda: tensor.data_ptr(),
        lambda: torch.cat([tensor, tensor]) + 1,
        lambda: tensor.share_memory_() + 1,
    ]
    for function in some:
        with suppress(*REFUSALS):
            function()


def files(seed: int, count: int) -> None:
    torch.manual_seed(seed)
    liar, loaded, refused = Liar(seed), 0, 0
    for _ in range(count):
        try:
            file = liar.file()
        except Exception:
            continue
        try:
            tensor = torch.load(file, weights_only=True)
        except REFUSALS:
            refused += 1
            continue
        loaded += 1
        if isinstance(tensor, torch.Tensor):
            use(tensor)
    assert loaded > count // 20 and refused > count // 20, (loaded, refused)
