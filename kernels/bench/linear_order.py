#!/usr/bin/env python3
"""Products in the order of a plan of the sum beside torch.nn.functional.linear: bits, then times.

    python3 kernels/bench/linear_order.py [bits] [forms] [grouped] [times] [mixture] [splits]
        [bands] [most] [image] [exceptions[=N,N,...]]

Needs PyTorch, a GPU, and the Python package (`df11`) on the path. `bits` finds, for each shape and
number of rows of x, the splits whose sums equal PyTorch's, with weights and inputs that cancel, and
counts the outputs that differ on three kinds of inputs. `forms` compares slices, several matrices
in a launch, strides and addresses of x with products of the plain form. `times` measures
microseconds per launch in CUDA graphs over copies that no L2 holds, as medians of interleaved
rounds. `mixture` measures products with experts, with places by offsets and in blocks. `splits`
measures ours with other splits than PyTorch's. `bands` gives bits and times of 17 rows of x and
more, `most` times of 2,048 and more, `image` those of FLUX.1's matrices; from 256 rows on also of
decoding first. `exceptions` gives bits and times with one zero among N weights (0: none), which is
an exception of the fast layout.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from df11 import _native, _ops
from df11._bring import pack_dense

LLAMA = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
SHAPES = [*LLAMA, (1024, 4096), (14336, 4096), (8192, 8192), (5120, 25600), (2560, 9728)]
SHAPES += [(25600, 5120), (2880, 4096), (4096, 2880), (1000, 4104), (1152, 4304), (128256, 4096)]
BAND_SHAPES = [*LLAMA, (1024, 4096), (5120, 5120), (5120, 25600), (8192, 8192)]
BAND_ROWS = (17, 24, 31, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 1024, 2048)
MAX_ROWS = (3072, 4096, 4608, 6144, 8192)
IMAGE = [(9216, 3072), (3072, 3072), (12288, 3072), (3072, 12288), (21504, 3072), (3072, 15360)]
DEVICE = torch.device("cuda", 0)


def say(*words: object) -> None:
    print(*words, flush=True)


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def shuffled(columns: int) -> Tensor:
    return torch.randperm(columns, device=DEVICE, generator=seeded(columns))


def wide(rows: int, columns: int, seed: int) -> Tensor:
    """Sixteen exponents, equally frequent, and some that no code of the fast layout expresses."""
    g = seeded(seed)
    bits = torch.randint(0, 65536, (rows, columns), device=DEVICE, dtype=torch.int32, generator=g)
    below = torch.randint(0, 16, (rows, columns), device=DEVICE, dtype=torch.int32, generator=g)
    far = torch.rand(rows, columns, device=DEVICE, generator=g) < 1 / 3000
    bits = bits & 0x807F | (130 - below - far * 24) << 7
    return (bits - (bits >> 15 << 16)).to(torch.int16).view(torch.bfloat16)


def weights(rows: int, columns: int, kind: str, seed: int) -> Tensor:
    if kind == "normal":
        made = (torch.randn(rows, columns, device=DEVICE, generator=seeded(seed)) * 0.02).bfloat16()
        return with_zeros(made, seed)
    if kind == "wide":
        return wide(rows, columns, seed)
    half = with_zeros(wide(rows, columns // 2, seed), seed)
    return torch.cat([half, half], 1)[:, shuffled(columns)].contiguous()


#: One weight of this many is zero; none, if it is 0.
zeros = 0


def with_zeros(weight: Tensor, seed: int) -> Tensor:
    if not zeros:
        return weight
    chosen = torch.rand(weight.shape, device=DEVICE, generator=seeded(seed + 2000))
    return weight.masked_fill_(chosen < 1 / zeros, 0)


def exceptions(counts: str) -> None:
    global zeros
    for zeros in map(int, (counts or "0,8192,4096,2048,1024,512,256").split(",")):
        say(f"== one zero of {zeros}")
        found.clear()
        bits(LLAMA, (1, 8, 16, 32, 64, 128, 256, 512))
        times(LLAMA, (1, 8, 16, 32, 64, 128, 256, 512))
    zeros = 0


def inputs(rows: int, columns: int, kind: str, seed: int) -> Tensor:
    """Weights; with `cancel`, sums of their products are nothing but rounding errors."""
    g = seeded(seed + 1000)
    x = torch.randn(rows, columns, device=DEVICE, generator=g)
    spread = 1 if kind == "normal" else 3
    x *= torch.exp(torch.randn(rows, columns, device=DEVICE, generator=g) * spread)
    if kind == "cancel":
        half = x[:, : columns // 2]
        x = torch.cat([half, -half], 1)[:, shuffled(columns)]
    return x.bfloat16().contiguous()


class Fast:
    """A matrix in the fast layout."""

    def __init__(self, weight: Tensor) -> None:
        packed = pack_dense(DEVICE, weight)
        assert packed is not None, "too many exceptions"
        self.arrays, (part,) = packed
        self.part = part
        self.matrix = self.of(part)

    def of(self, part: object) -> _native.Matrix:
        pointers = [array.data_ptr() for array in self.arrays]
        return _native.Matrix(0, list(part), pointers, [a.nbytes for a in self.arrays])

    def copy(self) -> "Fast":
        other = object.__new__(Fast)
        other.arrays, other.part = [array.clone() for array in self.arrays], self.part
        other.matrix = other.of(self.part)
        return other


room = torch.zeros(64 << 20, dtype=torch.uint8, device=DEVICE)


def multiply(
    product: _native.Linear, x: Tensor, ys: list[Tensor], splits: list[int], biases: list[int]
) -> None:
    places = [
        (y.data_ptr(), y.stride(0), bias, s) for y, s, bias in zip(ys, splits, biases, strict=True)
    ]
    product.multiply(x.data_ptr(), x.shape[0], x.stride(0), places, room.data_ptr(), stream())


def ours(
    product: _native.Linear, x: Tensor, rows: int, splits: int, bias: Tensor | None = None
) -> Tensor:
    y = torch.full((x.shape[0], rows), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    multiply(product, x, [y], [splits], [0 if bias is None else bias.data_ptr()])
    return y


def differ(a: Tensor, b: Tensor) -> int:
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


found: dict[tuple[int, int, int], int] = {}


def find(rows: int, columns: int, x_rows: int, product: _native.Linear, weight: Tensor) -> int:
    """PyTorch's splits, found by sums that are only rounding errors; negative: the nearest ones."""
    key = rows, columns, x_rows
    if key not in found:
        x = inputs(x_rows, columns, "cancel", 1)
        reference = linear(x, weight)
        tried = {}
        for splits in range(1, 21):
            if product.keeps_order(x_rows, [splits]):
                tried[splits] = differ(ours(product, x, rows, splits), reference)
                if not tried[splits]:
                    break
        splits = min(tried, key=lambda s: tried[s])
        found[key] = splits if not tried[splits] else -splits
        others = [n for s, n in tried.items() if s != splits]
        if tried[splits]:
            say(f"  !! {rows}x{columns}, {x_rows} rows: no order; {tried} differ")
        elif others and min(others) < reference.numel() // 20:
            say(f"  ?? {rows}x{columns}, {x_rows} rows: {tried}")
    return found[key]


def bits(shapes: list[tuple[int, int]], all_rows: tuple[int, ...]) -> None:
    say("== outputs that differ from F.linear, of all: cancelling, wide, normal, with a bias")
    for rows, columns in shapes:
        wrong, all_outputs, splits = {}, 0, {}
        kinds = ("cancel", "wide", "normal") if rows * columns < 2**28 else ("cancel", "normal")
        for kind in kinds:
            weight = weights(rows, columns, kind, 1)
            product = _native.Linear([(kept := Fast(weight)).matrix])
            bias = torch.randn(rows, device=DEVICE, generator=seeded(9)).bfloat16()
            for x_rows in all_rows:
                if kind == "cancel":
                    splits[x_rows] = find(rows, columns, x_rows, product, weight)
                if splits[x_rows] < 0:
                    continue
                x = inputs(x_rows, columns, kind, x_rows)
                for add in (None, bias):
                    y = ours(product, x, rows, splits[x_rows], add)
                    bad = differ(y, linear(x, weight, add))
                    again = differ(y, ours(product, x, rows, splits[x_rows], add))
                    name = kind if add is None else f"{kind} + bias"
                    wrong[name] = wrong.get(name, 0) + bad + again
                    all_outputs += y.numel()
            del kept
        say(f"{rows}x{columns}: splits {splits}; {wrong} of {all_outputs}")


def forms() -> None:
    say("== other forms: outputs that differ from the plain form")
    weight = weights(1000, 4096, "cancel", 3)
    fast = Fast(weight)
    whole = _native.Linear([fast.matrix])
    big = inputs(16, 8192, "wide", 3)
    for x_rows in (1, 2, 8, 9, 16):
        x = inputs(x_rows, 4096, "cancel", 3)
        for splits in (0, 1, 3, 4, 7, 10, 13):
            plain = ours(whole, x, 1000, splits)
            counts = []
            for offset, pitch in ((1, 4099), (8, 4104), (0, 4097)):
                flat = torch.zeros(16 * 4104 + 16, dtype=torch.bfloat16, device=DEVICE)
                strided = flat[offset:].as_strided((x_rows, 4096), (pitch, 1))
                strided.copy_(x)
                counts.append(differ(ours(whole, strided, 1000, splits), plain))
            for row in (0, x_rows - 1):
                alone = ours(whole, x[row : row + 1], 1000, splits)
                counts.append(differ(alone, plain[row : row + 1]))
            if any(counts):
                say(f"  !! {x_rows} rows, {splits} splits: {counts}")
    # Slices of columns, and several matrices with splits of their own.
    part = list(fast.part)
    for first, last in ((0, 2048), (2048, 4096), (256, 3840)):
        cut = fast.of([*part[:6], first, last])
        alone = Fast(weight[:, first:last].contiguous())
        for x_rows in (1, 7, 16):
            x = big[:x_rows, first:last]
            for splits in (1, 2, 3):
                y = ours(_native.Linear([cut]), x, 1000, splits)
                other = ours(_native.Linear([alone.matrix]), x.contiguous(), 1000, splits)
                if bad := differ(y, other):
                    say(f"  !! columns {first} to {last}, {x_rows} rows, {splits} splits: {bad}")
    heights = [1024, 33, 4096, 160, 32]
    several = [weights(height, 4096, "cancel", height) for height in heights]
    packed = [Fast(weight) for weight in several]
    product = _native.Linear([fast.matrix for fast in packed])
    for x_rows in (1, 8, 16):
        x = inputs(x_rows, 4096, "cancel", 4)
        for splits in ([2, 3, 1, 10, 5], [0] * 5, [1, 2, 3, 4, 64]):
            y = torch.full((x_rows, sum(heights) + 3), float("nan"), dtype=torch.bfloat16)
            y = y.to(DEVICE)
            ys = list(y[:, :-3].split(heights, 1))
            multiply(product, x, ys, splits, [0] * 5)
            for y_one, fast, s, height in zip(ys, packed, splits, heights, strict=True):
                alone = ours(_native.Linear([fast.matrix]), x, height, s)
                if bad := differ(y_one.contiguous(), alone):
                    say(f"  !! {splits} splits, {x_rows} rows: {bad} of {height} rows")
            assert bool(y[:, -3:].isnan().all()), "wrote after y"
    say("  done")


def grouped_case(experts: int, rows: int, columns: int, counts: list[int], kind: str) -> int:
    """Number of outputs that differ from torch._grouped_mm."""
    weight = weights(experts * rows, columns, kind, 5)
    product = _native.Grouped((kept := Fast(weight)).matrix, experts)
    places = sum(counts)
    x = inputs(places, columns, kind, 6)
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).int()
    offsets = torch.cat([ends.new_zeros(1), ends])
    reference = torch._grouped_mm(x, weight.view(experts, rows, columns).transpose(1, 2), ends)
    y = torch.full((places, rows), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    product.multiply(
        x.data_ptr(), places, columns, offsets.data_ptr(), places, 0, y.data_ptr(), rows, stream()
    )
    torch.cuda.synchronize()
    del kept
    return differ(y, reference)


def grouped() -> None:
    say("== grouped: outputs that differ from torch._grouped_mm")
    for kind in ("cancel", "wide", "normal"):
        for experts, rows, columns, counts in (
            (128, 1536, 2048, [1] * 8 + [0] * 120),
            (128, 2048, 768, [0, 3, 17, 1, 40] + [0] * 60 + [2] * 63),
            (16, 1536, 2048, [16, 1, 0, 33] * 4),
            (8, 96, 4096, [5] * 8),
        ):
            bad = grouped_case(experts, rows, columns, counts, kind)
            all_outputs = sum(counts) * rows
            say(f"  {experts} of {rows}x{columns}, {kind}: {bad} of {all_outputs}")


side = torch.cuda.Stream()


def graph(call: Callable[[int], object], count: int) -> torch.cuda.CUDAGraph:
    call(0)
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        made.capture_begin()
        for i in range(count):
            call(i)
        made.capture_end()
    return made


def measure(graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]], rounds: int) -> dict[str, float]:
    """Microseconds per launch, medians of interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds + 1):
        for name, (made, count) in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            made.replay()
            begin.record()
            for _ in range(4):
                made.replay()
            end.record()
            end.synchronize()
            if turn:
                times[name].append(begin.elapsed_time(end) * 1e3 / 4 / count)
    return {name: statistics.median(some) for name, some in times.items()}


def times(
    shapes: list[tuple[int, int]],
    all_rows: tuple[int, ...],
    others: tuple[int, ...] = (0,),
    summed: list[tuple[int, int]] = LLAMA,
) -> None:
    say("== times, us: F.linear, ours with its splits, ours with others (0: the fastest), decoded")
    sums: dict[tuple[int, str], list[float]] = {}
    for rows, columns in shapes:
        began = time.time()
        hard = weights(rows, columns, "cancel", 1)
        hard_product = _native.Linear([(hard_fast := Fast(hard)).matrix])
        splits = {m: find(rows, columns, m, hard_product, hard) for m in all_rows}
        del hard, hard_fast
        weight = weights(rows, columns, "normal", 1)
        fast = Fast(weight)
        count = max(6, -(-450_000_000 // (rows * columns * 3 // 2)))
        plain = max(4, -(-450_000_000 // (rows * columns * 2)))
        fasts = [fast] + [fast.copy() for _ in range(count - 1)]
        products = [_native.Linear([one.matrix]) for one in fasts]
        whole = [weight] + [weight.clone() for _ in range(plain - 1)]
        for x_rows in all_rows:
            x = inputs(x_rows, columns, "normal", 5)
            y = torch.empty(x_rows, rows, dtype=torch.bfloat16, device=DEVICE)
            plain_launches = max(plain, 24) if x_rows < 2048 else plain
            graphs = {
                "F.linear": (
                    graph(lambda i: linear(x, whole[i % plain]), plain_launches),
                    plain_launches,
                )
            }
            # Many rows take long, and x and y replace what L2 held.
            launches, rounds = (max(count, 24), 5) if x_rows < 2048 else (count, 3)
            given = {"its": abs(splits[x_rows]), **{str(s): s for s in others}}
            for name, s in given.items():
                if products[0].keeps_order(x_rows, [s]):
                    call = lambda i, s=s: multiply(products[i % count], x, [y], [s], [0])  # noqa: E731
                    graphs[name] = (graph(call, launches), launches)
            if x_rows >= 256 or zeros:
                decoded = torch.empty_like(weight)

                def decode_first(i: int, x: Tensor = x, decoded: Tensor = decoded) -> None:
                    fasts[i % count].matrix.decode(decoded.data_ptr(), stream())
                    linear(x, decoded)

                graphs["decoded"] = graph(decode_first, launches), launches
            taken = measure(graphs, rounds)
            base = taken["F.linear"]
            told = ", ".join(f"{n} {t:.2f} ({base / t:.3f})" for n, t in taken.items())
            say(f"{rows}x{columns}, {x_rows} rows, {splits[x_rows]} splits: {told}")
            if (rows, columns) in summed:
                for name, t in taken.items():
                    both = sums.setdefault((x_rows, name), [0, 0])
                    both[0] += base
                    both[1] += t
        size = sum(a.nbytes for a in fast.arrays) * 8 / rows / columns
        say(f"  [{time.time() - began:.1f} s, {size:.3f} bits]")
        del fasts, products, whole
        torch.cuda.empty_cache()
    say(f"== sums of {len(summed)}: F.linear / ours")
    for (x_rows, name), (base, mine) in sums.items():
        say(f"  {x_rows} rows, {name}: {base / mine:.3f} ({base:.1f} / {mine:.1f})")


MIXTURES = {  # experts, those of a token, and the rows and columns of both matrices
    "Qwen3-30B-A3B": (128, 8, ((1536, 2048), (2048, 768))),
    "Mixtral 8x7B": (8, 2, ((28672, 4096), (4096, 14336))),
}


def in_blocks(chosen: Tensor, experts: int, each: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots in blocks of `each` of one expert: the blocks' experts, slots, their number."""
    flat = chosen.flatten()
    counts = flat.bincount(minlength=experts)
    padded = (counts + each - 1) // each * each
    order = flat.argsort(stable=True)
    expert = flat[order]
    rank = torch.arange(len(flat), device=DEVICE) - (counts.cumsum(0) - counts)[expert]
    total = int(padded.sum())
    slots = torch.full((total,), len(flat), dtype=torch.int32, device=DEVICE)
    slots[(padded.cumsum(0) - padded)[expert] + rank] = order.int()
    names = torch.repeat_interleave(torch.arange(experts, device=DEVICE), padded // each)
    return names.int(), slots, torch.tensor([total], dtype=torch.int32, device=DEVICE)


def mixture() -> None:
    """Both products with the experts of a layer."""
    blocks = (16, 64, 128)
    say("== mixture, us: torch._grouped_mm, decoding; ours by offsets, in blocks of", *blocks)
    for name, (experts, top, shapes) in MIXTURES.items():
        for rows, columns in shapes:
            weight = weights(experts * rows, columns, "normal", 5)
            fast = Fast(weight)
            for tokens in (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096):
                told = grouped_times(fast, weight, experts, top, tokens, blocks)
                say(f"{name}, {rows}x{columns}, {tokens} tokens: {told}")
            del fast, weight


def grouped_times(
    fast: Fast, weight: Tensor, experts: int, top: int, tokens: int, blocks: tuple[int, ...]
) -> str:
    rows, columns = len(weight) // experts, weight.shape[1]
    product, slots = _native.Grouped(fast.matrix, experts), tokens * top
    g, routes = seeded(3), 4
    chosen = [
        torch.rand(tokens, experts, device=DEVICE, generator=g).topk(top, 1).indices
        for _ in range(routes)
    ]
    ends = [one.flatten().bincount(minlength=experts).cumsum(0).int() for one in chosen]
    offsets = [torch.cat([one.new_zeros(1), one]) for one in ends]
    lists = {each: [in_blocks(one, experts, each) for one in chosen] for each in blocks}
    x = inputs(slots, columns, "normal", 7)
    ys = {each: torch.empty(slots, rows, dtype=torch.bfloat16, device=DEVICE) for each in blocks}
    y = torch.empty_like(ys[blocks[0]])
    of_experts = weight.view(experts, rows, columns).transpose(1, 2)

    def by_offsets(i: int) -> None:
        given = (x.data_ptr(), slots, columns, offsets[i % routes].data_ptr(), slots, 0)
        product.multiply(*given, y.data_ptr(), rows, stream())

    def by_blocks(each: int, i: int) -> None:
        names, indices, end = lists[each][i % routes]
        listed = (each, indices.data_ptr(), len(indices), end.data_ptr())
        given = (x.data_ptr(), slots, names.data_ptr(), slots, listed, 0, ys[each].data_ptr())
        product.multiply_slots(*given, stream())

    calls: dict[str, Callable[[int], object]] = {
        "theirs": lambda i: torch._grouped_mm(x, of_experts, ends[i % routes]),
        "decoding": lambda _: _ops.decode(fast.arrays, list(fast.part), DEVICE),
        "offsets": by_offsets,
        **{str(each): partial(by_blocks, each) for each in blocks},
    }
    taken = measure({name: (graph(call, routes), routes) for name, call in calls.items()}, 5)
    bad = sum(differ(ys[each], ys[blocks[0]]) for each in blocks)
    by_offsets(0)
    apart = differ(y, torch._grouped_mm(x, of_experts, ends[0]))
    ratio = taken["offsets"] / taken["theirs"]
    figures = ", ".join(f"{name} {us:.1f}" for name, us in taken.items())
    differing = f"{bad} outputs differ between blocks, {apart} from theirs"
    return f"{figures}; offsets / theirs {ratio:.2f}; {differing}"


def main() -> None:
    say(torch.cuda.get_device_name(), torch.version.cuda, torch.__version__)
    for mode in sys.argv[1:] or ["bits", "forms", "grouped", "times", "mixture"]:
        began = time.time()
        if mode == "bits":
            bits(SHAPES, (1, 2, 3, 7, 8, 9, 13, 16))
        elif mode == "quick":
            bits(LLAMA[:2], (1, 2, 8, 16))
        elif mode == "times":
            times(LLAMA, (1, 8, 16))
        elif mode == "more":
            times(SHAPES[4:10], (1, 8, 16))
        elif mode == "bands":
            bits(BAND_SHAPES, BAND_ROWS)
            times(LLAMA, (17, 32, 64, 128, 192, 256, 512, 1024, 2048, *MAX_ROWS))
        elif mode == "most":
            times(LLAMA, (2048, *MAX_ROWS))
        elif mode.startswith("exceptions"):
            exceptions(mode.partition("=")[2])
        elif mode == "image":
            times(IMAGE, (512, 4096, 4608), summed=IMAGE)
        elif mode == "splits":
            times(SHAPES[:9], (1, 16), (0, 1, 2, 3, 4, 6))
        else:
            {"forms": forms, "grouped": grouped, "mixture": mixture}[mode]()
        torch.cuda.synchronize()
        say(f"  [{mode}: {time.time() - began:.1f} s]")


if __name__ == "__main__":
    main()
