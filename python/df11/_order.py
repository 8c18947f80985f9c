"""Finds the order in which a framework's products add, by comparing bits.

A sum of floating-point numbers depends on its order, so a kernel gives the bits of
`torch.nn.functional.linear` only if it adds as cuBLAS does. On Hopper that order is simple
(docs/exact.md). For each output:

1. The columns of W are cut into s *splits*: all but the last have ceil(K / 64 / s) * 64.
2. Each split is one chain of tensor-core products of 16 columns, from an FP32 accumulator of 0.
3. The splits are added in order in FP32, then the bias; the sum is rounded to BF16 once.

cuBLAS chooses s, by shape, GPU and version. So df11 measures s: the framework's own product, and
the kernels' products for each s, multiply the same weights and inputs, and their bits are compared.
The exact result of the inputs is 0, so each output consists only of the rounding errors of its
order. One s must give all bits, and every other s must differ in thousands of outputs. Otherwise
the order is not known, and weights are decoded for the framework's product.

A result holds for one *case*: product, shapes, layout of x and flags of PyTorch. It is kept in the
process and on disk (`_order_cache`). Nothing is measured while a CUDA graph is captured. With many
rows of x a case is measured when the same weight meets it again: prompts have many lengths, most of
which come once, and measuring takes longer than the products of one prompt save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import prod
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ._encoding import pack_dense
from ._order_cache import OrderCache

#: Splits consist of whole blocks of this many columns; and the most splits that are tried.
_BLOCK, _MAX_SPLITS = 64, 16
#: The fewest outputs that are compared, and how many must differ in another order.
_MIN_OUTPUTS, _MIN_DIFFERENT = 1 << 14, 1 << 11
_MAX_DRAWS = 64
#: cuBLAS looks at alignments of addresses up to this many bytes.
_MAX_ALIGNED = 256
#: Rows of x for which batch-invariant products are measured.
_INVARIANT_ROWS = 16
#: Weights that are generated at once.
_SLICE_WEIGHTS = 1 << 22
#: The most tokens of a case that is measured when it comes for the first time, and a usual number
#: of experts of a token.
_TOKENS_AT_ONCE, _EXPERTS_PER_TOKEN = 256, 8
#: The most bytes for x and y of a case that is measured.
_MAX_BYTES = 3 << 30
#: How often a case is met, by any weights, until it is measured: the first weight may be gone.
_MAX_MEETINGS = 1 << 9
#: The most cases that wait. Then all are forgotten.
_MAX_WAITING = 1 << 12
#: The most cases in a process. Then all are forgotten, and read from disk again.
_MAX_CASES = 1 << 15
_BF16 = torch.bfloat16


class Order(NamedTuple):
    """The order of a product's additions; falsy if it is not known."""

    splits: int
    #: Whether the bias is added to the rounded product, and the sum rounded again.
    is_bias_apart: bool = False

    def __bool__(self) -> bool:
        return self.splits > 0


UNKNOWN = Order(0)


class Framework(NamedTuple):
    """The product of x, a dense W and a bias whose bits are wanted."""

    #: Name of the function that multiplies. Functions with other bits have other names.
    name: str
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    #: Whether the bits of a row of y do not depend on the other rows of x.
    is_batch_invariant: bool = False
    #: How many matrices W stacks, if each row of x is multiplied by one of them.
    experts: int = 1

    @property
    def rows_at_once(self) -> int:
        """The most rows of x of a case that is measured when it comes for the first time."""
        return _TOKENS_AT_ONCE * (1 if self.experts == 1 else _EXPERTS_PER_TOKEN)


LINEAR = Framework("torch.nn.functional.linear", functional.linear)


class Case(NamedTuple):
    """Everything that may decide the order of a product, for one GPU and its libraries."""

    framework: str
    #: Rows and columns of W.
    rows: int
    columns: int
    #: The shape of x, the class of its strides, and the alignment of its address in bytes.
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int
    #: The alignment of the bias's address in bytes; 0 if there is no bias.
    bias: int
    flags: str

    @property
    def x_rows(self) -> int:
        return prod(self.shape[:-1])


#: Multiplies x, a packed W and a bias in a given order; None if no kernel keeps that order.
Kernels = Callable[[Tensor, Any, "Tensor | None", int], "Tensor | None"]

_lock = Lock()
#: Orders by GPU and case.
_known: dict[tuple[int, Case], Order] = {}
#: For each case that is not measured yet, the weight that met it first, and how often it was met.
_waiting: dict[tuple[int, Case], tuple[int, int]] = {}
_caches: dict[int, OrderCache] = {}


def order_of(
    x: Tensor, rows: int, bias: Tensor | None, framework: Framework, kernels: Kernels, weight: int
) -> Order:
    """The order of the framework's product of x, on a GPU, with `rows` rows of W. Takes
    microseconds for a known case. Measures another case, which waits for the GPU for milliseconds
    and takes 3.5 bytes of its memory per weight, 9 per element of x and 7 per element of y. Does
    not measure while a graph is captured. Measures more rows of x than `framework.rows_at_once`
    only for a weight that had this case before; `weight` tells weights apart.
    """
    case = _case(x, rows, bias, framework)
    index = x.device.index
    remembered = _known.get((index, case))
    if remembered is not None:
        return remembered
    with _lock:
        if (kept := _recall(index, case)) is not None:
            return kept
        if torch.cuda.is_current_stream_capturing():
            return UNKNOWN
        if case.x_rows > framework.rows_at_once and _must_wait(index, case, weight):
            return UNKNOWN
        return _find(x.device, [case], framework, kernels)[0]


def _must_wait(index: int, case: Case, weight: int) -> bool:
    """Whether the weight meets a case for the first time. Remembers that it has met it."""
    first, count = _waiting.pop((index, case), (weight, 0))
    if (count and first == weight) or count >= _MAX_MEETINGS:
        return False
    if len(_waiting) >= _MAX_WAITING:
        _waiting.clear()
    _waiting[index, case] = first, count + 1
    return True


def prepare(
    device: torch.device,
    shape: tuple[int, int],
    x_rows: Iterable[int],
    with_bias: bool,
    framework: Framework,
    kernels: Kernels,
) -> list[Order]:
    """Like `order_of`, for contiguous x of two dimensions with each of these numbers of rows, and W
    of this shape. Measures all unknown cases with one W. Not while a graph is captured.
    """
    rows, columns = shape
    bias = _MAX_ALIGNED if with_bias else 0
    product = (framework.name, rows, columns)
    cases = [
        Case(
            *product, *_sides((count, columns), (columns, 1), framework), _MAX_ALIGNED, bias, flags
        )
        for flags in [_flags()]
        for count in x_rows
    ]
    with _lock:
        known = {case: _recall(device.index, case) for case in cases}
        missing = [case for case in dict.fromkeys(cases) if known[case] is None]
        known |= zip(missing, _find(device, missing, framework, kernels), strict=True)
    return [known[case] or UNKNOWN for case in cases]


def summary(index: int, rows: int, columns: int) -> dict[int, bool]:
    """For each number of rows of x that was measured, with W of this shape on a GPU: whether the
    order is known in all its cases.
    """
    result: dict[int, bool] = {}
    for (gpu, case), order in list(_known.items()):
        if (gpu, case.rows, case.columns) == (index, rows, columns):
            result[case.x_rows] = result.get(case.x_rows, True) and bool(order)
    return result


def _case(x: Tensor, rows: int, bias: Tensor | None, framework: Framework) -> Case:
    shape, strides = _sides(tuple(x.shape), x.stride(), framework)
    added = 0 if bias is None else _alignment(bias)
    return Case(framework.name, rows, x.shape[-1], shape, strides, _alignment(x), added, _flags())


def layout_of(x: Tensor) -> tuple[Any, ...]:
    """Everything about x that may decide the order of a product without a bias, and flags."""
    return tuple(x.shape), x.stride(), _alignment(x), _flags()


def layout_of_bias(bias: Tensor | None) -> tuple[Any, ...] | None:
    """Everything about a bias that may decide the order of a product, or forbid it."""
    if bias is None:
        return None
    return _alignment(bias), bias.dtype, bias.device, bias.shape, bias.stride()


def _sides(
    shape: tuple[int, ...], strides: tuple[int, ...], framework: Framework
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The deciding shape and strides of x: batch-invariant products ignore other rows."""
    if framework.is_batch_invariant and len(shape) == 2 and strides == (shape[1], 1):
        return (_INVARIANT_ROWS, shape[1]), strides
    return shape, stride_class(shape, strides)


@lru_cache(maxsize=1 << 12)
def stride_class(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Representative strides: the first of those that differ for a library only in size.

    A row of x may be the last of any number of tokens: (1, 1, K) with strides (tokens * K, K, 1).
    A stride counts as the one without a gap if its side is 1 and it is aligned alike; and as twice
    that if there is a gap and both are multiples of what addresses are aligned to at most.
    """
    result: list[int] = []
    dense = real = 1  # strides without gaps, of the result and of the input
    for side, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride == real or (side == 1 and _aligned(2 * stride) == _aligned(2 * dense)):
            result.append(dense)
        elif stride > real and _aligned(2 * stride) == _aligned(2 * dense) == _MAX_ALIGNED:
            result.append(2 * dense)
        else:
            return strides
        if side > 1:
            dense, real = result[-1] * side, stride * side
    return tuple(reversed(result))


def _aligned(address: int) -> int:
    """The largest relevant power of two that divides an address in bytes."""
    address |= _MAX_ALIGNED
    return address & -address


def _alignment(tensor: Tensor) -> int:
    return _aligned(tensor.data_ptr())


_SETTINGS = [
    getattr(torch._C, name)
    for name in (
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_blas_preferred_backend",
        "_get_deterministic_algorithms",
        "_get_sm_carveout_experimental",
        "_cuda_tunableop_is_enabled",
    )
    if hasattr(torch._C, name)
]
#: Whether PyTorch tries products while it runs, and may switch to another one (TunableOp).
_is_tuning = getattr(torch._C, "_cuda_tunableop_is_enabled", bool)
#: Texts, each made once, by the results of the functions above.
_texts: dict[tuple[Any, ...], str] = {}


def _flags() -> str:
    """Joins the settings by which PyTorch may choose other kernels: flags for reduced precision,
    preferred library, determinism, multiprocessors left out, tuned products.
    """
    settings = tuple([read() for read in _SETTINGS])
    text = _texts.get(settings)
    if text is None:
        text = _texts[settings] = " ".join(map(str, settings))
    return text


def _recall(index: int, case: Case) -> Order | None:
    if (order := _known.get((index, case))) is not None:
        return order
    if index not in _caches:
        _caches[index] = OrderCache.of_gpu(index)
    kept = _caches[index].get(case)
    return None if kept is None else _remember(index, case, Order(*kept))


def _remember(index: int, case: Case, order: Order) -> Order:
    if len(_known) >= _MAX_CASES:
        _known.clear()
    _known[index, case] = order
    return order


def _find(
    device: torch.device, cases: Sequence[Case], framework: Framework, kernels: Kernels
) -> list[Order]:
    orders: dict[Case, Order] = {}
    if not cases:
        return []
    if _is_tuning():
        return [UNKNOWN] * len(cases)
    try:
        with torch.no_grad():
            probe = Probe(device, (cases[0].rows, cases[0].columns), framework, kernels)
            for case in cases:
                orders[case] = probe.order(case)
    except torch.OutOfMemoryError:  # the next process may have more memory
        return [_remember(device.index, case, orders.get(case, UNKNOWN)) for case in cases]
    _caches[device.index].add(orders)
    return [_remember(device.index, case, orders[case]) for case in cases]


class Probe:
    """Measures orders of products with W of one shape, [rows, columns]. Keeps W twice, dense and
    packed. Uses its own random generator, so that other random numbers do not change.
    """

    def __init__(
        self,
        device: torch.device,
        shape: tuple[int, int],
        framework: Framework,
        kernels: Kernels,
        pack: Callable[[torch.device, Tensor], Any] | None = None,
    ) -> None:
        self.device, self.framework, self.kernels = device, framework, kernels
        self.rows, self.columns = shape
        self.generator = torch.Generator(device).manual_seed(self.rows * 31 + self.columns)
        self.packed = None
        if self.columns % 8:
            return
        #: Columns come in pairs with the same weights, in any order.
        self.places = torch.randperm(self.columns, generator=self.generator, device=device)
        self.weight = self._weight()
        self.packed = (pack or pack_dense)(device, self.weight)

    def order(self, case: Case) -> Order:
        """The one order among the kernels' that gives the framework's bits. Waits."""
        if self.packed is None or not _is_dense(case) or not case.x_rows:
            return UNKNOWN
        height = self.rows // self.framework.experts
        if case.x_rows * (9 * self.columns + 7 * height) > _MAX_BYTES:
            return UNKNOWN
        if splits := self._splits(case, False):
            return Order(splits)
        if case.bias and (splits := self._splits(case, True)):
            return Order(splits, True)
        return UNKNOWN

    def _splits(self, case: Case, is_bias_apart: bool) -> int:
        candidates = family(self.columns)
        different: dict[int, Tensor] = {}
        outputs = case.x_rows * self.rows
        draws = min(_MAX_DRAWS, max(2, -(-_MIN_OUTPUTS // outputs)))
        for draw in range(draws):
            x, bias = self._inputs(case, spread=3 if draw % 2 else 1)
            expected = self.framework.multiply(x, self.weight, bias)
            for splits in list(candidates):
                y = self.kernels(x, self.packed, None if is_bias_apart else bias, splits)
                if y is None:
                    candidates.remove(splits)
                    continue
                y = y if bias is None or not is_bias_apart else y + bias
                count = _differing(y, expected)
                different[splits] = different.get(splits, 0) + count
            if len(candidates) == 1:
                count = _differing(self._of_another_order(x, bias), expected)
                different[0] = different.get(0, 0) + count
        counted = {splits: int(count) for splits, count in different.items()}
        return verdict(counted, draws * outputs)

    def _of_another_order(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The framework's product with the columns in another order, which has the same exact
        result."""
        half = self.columns // 2 + self.columns // 2 % 16
        weight = self.weight.roll(half, 1)
        return self.framework.multiply(x.roll(half, -1), weight, bias)

    def _weight(self) -> Tensor:
        weight = torch.empty(self.rows, self.columns, dtype=_BF16, device=self.device)
        step = max(1, _SLICE_WEIGHTS // self.columns)
        for first in range(0, self.rows, step):
            some = weight[first : first + step]
            half = 0.02 * self._normal(len(some), self.columns // 2)
            some.copy_(torch.cat([half, half], 1)[:, self.places])
        return weight

    def _inputs(self, case: Case, spread: int) -> tuple[Tensor, Tensor | None]:
        """x in the case's layout, whose pairs of columns cancel, and a bias about as large as the
        rounding errors. Magnitudes of x range over e to the power of three times the spread.
        """
        sides = case.x_rows, self.columns // 2
        scale = (spread * self._normal(*sides)).clamp(-9, 9).exp()
        half = (self._normal(*sides) * scale).to(_BF16)
        x = self._laid_out(case.shape, case.strides, case.alignment)
        x.copy_(torch.cat([half, -half], 1)[:, self.places].view(case.shape))
        if not case.bias:
            return x, None
        bias = self._laid_out((self.rows,), (1,), case.bias)
        left = self.framework.multiply(x, self.weight, None).float().std()
        bias.copy_(self._normal(self.rows) * left)
        return x, bias

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def _laid_out(self, shape: Sequence[int], strides: Sequence[int], alignment: int) -> Tensor:
        first = alignment % _MAX_ALIGNED // 2
        count = 1 + sum((side - 1) * step for side, step in zip(shape, strides, strict=True))
        memory = torch.empty(first + count, dtype=_BF16, device=self.device)
        return memory.as_strided(shape, strides, first)


def family(columns: int) -> list[int]:
    """Numbers of splits that give different orders of this many columns, in ascending order."""
    blocks = -(-columns // _BLOCK)
    most = min(blocks, _MAX_SPLITS)
    return [splits for splits in range(1, most + 1) if -(-blocks // -(-blocks // splits)) == splits]


def verdict(different: dict[int, int], outputs: int) -> int:
    """The number of splits whose outputs are all equal, if every other order differs in thousands;
    otherwise 0. `different`: for each order, how many of the compared outputs differ.
    """
    equal = [splits for splits, count in different.items() if count == 0]
    others = [count for count in different.values() if count]
    if len(equal) != 1 or equal == [0] or not others or outputs < _MIN_OUTPUTS:
        return 0
    return equal[0] if min(others) >= _MIN_DIFFERENT else 0


def _differing(y: Tensor, expected: Tensor) -> Any:
    return (y.contiguous().view(torch.int16) != expected.contiguous().view(torch.int16)).sum()


def _is_dense(case: Case) -> bool:
    """Whether no two elements of x share memory, and addresses are aligned to whole elements."""
    end = 1
    for stride, side in sorted(zip(case.strides, case.shape, strict=True)):
        if side > 1 and stride < end:
            return False
        end = max(end, stride * (side - 1) + end) if side > 1 else end
    return case.alignment > 1 and case.bias != 1
