#!/usr/bin/env python3
"""Estimates the clocks that one warp alone takes for an iteration of a kernel's innermost loop.

It reads machine code for compute capability 9.0, and needs no GPU.

    python3 kernels/bench/stalls.py                        # the kernels of linear_order.cuh
    python3 kernels/bench/stalls.py --verbose KERNEL...     # where the clocks go

Needs `nvdisasm`, which CUDA and Triton have. Instructions are issued in order. ptxas writes into
each one how many clocks the next one waits, and which of six barriers it waits for itself; loads
set these when they are done. The estimate adds latencies that an H100 was seen to have: 33 clocks
for a product (`mma.m16n8k16`) whose sums the next one continues, 28 to 33 for loads from shared
memory. It knows neither bank conflicts nor other warps nor missing instructions.

The path is that of a stage without exceptions: branches forward are not taken, unless they skip
code that waits for a barrier or searches for patches.
"""

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

CUBIN = Path(__file__).resolve().parent.parent / "ptx/linear.sm_90a.cubin"
KERNELS = [f"df11_linear_order_{rows}" for rows in (8, 16, 32, 64)]
PRODUCT = 33
LATENCIES = {"LDSM": 33, "LDS.128": 31, "LDS": 28, "SYNCS": 22, "ATOMS": 30, "SHFL": 23}
OTHERS = 20
#: Loops with fewer products are not the kernel's own.
MIN_PRODUCTS = 4


class Instruction(NamedTuple):
    address: int
    text: str
    stall: int
    sets: list[int]  # barriers that it sets
    waits: list[int]  # barriers that it waits for

    @property
    def name(self) -> str:
        return re.sub(r"^@!?U?P\w+ ", "", self.text).split()[0]

    @property
    def operands(self) -> list[str]:
        rest = re.sub(r"^@!?U?P\w+ ", "", self.text).partition(" ")[2]
        return [part.strip().replace(".reuse", "") for part in rest.split(",")]


def disassembler() -> str:
    if found := shutil.which("nvdisasm"):
        return found
    if spec := importlib.util.find_spec("triton"):
        return str(Path(str(spec.origin)).parent / "backends/nvidia/bin/nvdisasm")
    sys.exit("nvdisasm is missing: install CUDA, or the Python package triton")


def decode(address: str, text: str, upper: int) -> Instruction:
    """An instruction with the control bits of its upper word."""
    sets = [barrier for barrier in (upper >> 46 & 7, upper >> 49 & 7) if barrier < 7]
    waits = [barrier for barrier in range(6) if upper >> 52 + barrier & 1]
    return Instruction(int(address, 16), text, max(upper >> 41 & 15, 1), sets, waits)


def read(listing: str, kernel: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a kernel, and the places of its labels."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    begun = None
    for line in listing.partition(f"\n.text.{kernel}:\n")[2].splitlines():
        if line.startswith(("\t.section", ".text.")) and code:
            break
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif first := re.match(
            r"\s*/\*(\w{4,5})\*/\s+(.*?)\s*;\s*/\* 0x\w{16} \*/", line
        ):
            begun = first
        elif begun and (second := re.match(r"\s*/\* 0x(\w{16}) \*/", line)):
            code.append(decode(begun[1], begun[2], int(second[1], 16)))
            begun = None
    return code, labels


def innermost(
    code: list[Instruction], target: list[int | None]
) -> list[tuple[int, int]]:
    """First and last places of the loops that multiply and have none within."""
    found = []
    for last, first in enumerate(target):
        if first is not None and first <= last:
            products = sum(at.name.startswith("HMMA") for at in code[first : last + 1])
            if products >= MIN_PRODUCTS:
                found.append((first, last))
    return [
        (a, b)
        for a, b in found
        if not any((c, d) != (a, b) and a <= c and d <= b for c, d in found)
    ]


def is_rare(
    code: list[Instruction], target: list[int | None], begin: int, end: int
) -> bool:
    """Whether code from `begin` to `end` waits for a barrier, or searches for patches."""
    region = code[begin:end]
    if any(at.name.startswith("HMMA") for at in region):
        return False
    waits = len(region) < 6 and any("TRYWAIT" in at.text for at in region)
    loops = any(
        to is not None and begin <= to <= begin + i
        for i, to in enumerate(target[begin:end])
    )
    return waits or loops or any(at.name == "BSSY" for at in region)


def path(
    code: list[Instruction], target: list[int | None], first: int, last: int
) -> list[Instruction] | None:
    """The instructions of an iteration; none if it leaves the loop."""
    found, place = [], first
    while True:
        at, to = code[place], target[place]
        found.append(at)
        if place == last:
            return found
        inside = to is not None and place < to <= last
        if to is not None and not at.text.startswith("@") and not inside:
            return None
        takes = inside and (
            not at.text.startswith("@") or is_rare(code, target, place + 1, to)
        )
        place = to if takes and to is not None else place + 1


def latency(name: str) -> int:
    return next(
        (clocks for start, clocks in LATENCIES.items() if name.startswith(start)),
        OTHERS,
    )


def clocks(
    iteration: list[Instruction], times: int = 16
) -> tuple[float, dict[int, float]]:
    """Clocks per iteration after some, and those that each address waits besides its stalls."""
    barriers: dict[int, int] = {}
    sums: dict[str, int] = {}
    now = loaded = half = 0
    waited: dict[int, float] = {}
    for number in range(times):
        half = now if number == times // 2 else half
        for at in iteration:
            ready = max([now, *(barriers.pop(barrier, 0) for barrier in at.waits)])
            if at.name.startswith("HMMA"):
                ready = max(ready, sums.get(at.operands[3], 0))
                sums[at.operands[0]] = ready + PRODUCT
            if ready > now and number >= times // 2:
                waited[at.address] = waited.get(at.address, 0) + (ready - now) / (
                    times - times // 2
                )
            now = ready
            done = now + latency(at.name)
            if at.name.startswith("LDS"):  # loads are done in order
                loaded = done = max(
                    done, loaded + (4 if "128" in at.name or "M88" in at.name else 2)
                )
            for barrier in at.sets:
                barriers[barrier] = max(barriers.get(barrier, 0), done)
            now += at.stall
    return (now - half) / (times - times // 2), waited


def tell(listing: str, kernel: str, verbose: bool) -> None:
    code, labels = read(listing, kernel)
    places = [re.search(r"\bBRA.*`\((\.L_\w+)\)", at.text) for at in code]
    target = [labels.get(place[1]) if place else None for place in places]
    for first, last in innermost(code, target):
        iteration = path(code, target, first, last)
        if iteration is None or any(at.name.startswith("LDG") for at in iteration):
            continue
        each, waited = clocks(iteration)
        products = sum(at.name.startswith("HMMA") for at in iteration)
        stalls = sum(at.stall for at in iteration)
        print(
            f"{kernel}: {each:.0f} clocks an iteration, {len(iteration)} instructions, "
            f"{products} products, stalls of ptxas {stalls}"
        )
        for at in iteration if verbose else []:
            print(
                f"  {at.address:05x} {at.stall:3} {waited.get(at.address, 0):5.1f}  {at.text}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernels", nargs="*", default=KERNELS, metavar="KERNEL")
    parser.add_argument("--cubin", type=Path, default=CUBIN)
    parser.add_argument(
        "--verbose", action="store_true", help="each instruction: its stall, its wait"
    )
    told = parser.parse_args()
    command = [disassembler(), "-hex", told.cubin]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for kernel in told.kernels:
        tell(listing, kernel, told.verbose)


if __name__ == "__main__":
    main()
