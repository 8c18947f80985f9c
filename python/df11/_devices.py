"""The devices that a caller names for a model, and how much of their memory the model may take."""

from __future__ import annotations

import re
from sys import maxsize
from typing import Any, NamedTuple

import torch

from ._errors import unfit

CPU = torch.device("cpu")
#: Default share of a GPU's free memory that a model may take; the rest is for caches. Rust has this
#: share and the next one, too (`src/gpu/load.rs`).
SHARE = 0.9
#: Default share that a model may take after `auto` makes a block fast. That only saves time.
FAST_SHARE = 2 / 3


class Devices(NamedTuple):
    """Devices, and the bytes that weights may take on each; None: as many as they need."""

    devices: list[torch.device]
    memory: list[int] | None = None
    #: The device of each module in a device_map of several modules. Weights on the CPU are streamed
    #: to the first GPU.
    where: dict[str, torch.device] | None = None
    #: How several GPUs share the weights, in the words of device_map.
    order: str = "sequential"
    #: The bytes up to which `auto` chooses the fast layout on each; None: `memory`.
    fast_memory: list[int] | None = None

    def limits(self, at: int, wanted: str = "auto") -> tuple[int, int]:
        """The most bytes that weights may take on a GPU, and the number of bytes up to which they
        are fast, in the wanted residence."""
        memory = fast_memory = maxsize
        if self.memory is not None:
            memory, fast_memory = self.memory[at], (self.fast_memory or self.memory)[at]
        elif wanted == "auto":
            free = free_bytes(self.devices[at])
            memory, fast_memory = int(SHARE * free), int(FAST_SHARE * free)
        return memory, fast_memory if wanted == "auto" else memory

    @property
    def rest(self) -> Any:
        return self.devices[0] if len(self.devices) == 1 else "cpu"


def byte_count(size: int | float | str) -> int:
    if not isinstance(size, str):
        return int(size)
    match = re.fullmatch(r"([0-9.]+)\s*(?:([KMGT])(I?))?B?", size.strip().upper())
    if match is None:
        raise unfit(
            f"{size!r} is not a number of bytes", 'write it as 9000000000, "9GB" or "8.5GiB"'
        )
    power = "KMGT".index(match[2]) + 1 if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def device_of(device: Any) -> torch.device:
    """The named device. None is the current GPU, or the CPU if there is no GPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(
                "there is no CUDA device that PyTorch can use; load onto the CPU with "
                'device_map="cpu" (slow)'
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise ValueError(f"weights are decoded on NVIDIA GPUs and on the CPU, and not on {device}")
    return CPU


def resolve(wanted: Any, memory: Any, max_memory: dict[Any, Any] | None = None) -> Devices:
    if isinstance(wanted, dict):
        return _by_modules(wanted, memory)
    given = (max_memory or {}).items()
    caps = {gpu: int(cap) for gpu, cap in given if isinstance(gpu, int) and cap}
    if not caps or not torch.cuda.is_available():
        return Devices([CPU])
    devices = [torch.device("cuda", gpu) for gpu in caps]
    sizes, limits = [free_bytes(device) for device in devices], limited(caps, memory).values()
    most, fast = (
        [min(cap, int(part * size)) for cap, size in zip(limits, sizes, strict=True)]
        for part in (SHARE, FAST_SHARE)
    )
    return Devices(devices, most, None, wanted, fast if memory is None else None)


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, including unused memory that PyTorch's allocator keeps."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def _by_modules(wanted: dict[Any, Any], memory: Any) -> Devices:
    if "disk" in wanted.values():
        raise ValueError(
            'compressed weights are on disk anyway; use "cpu" in the place of "disk" to stream '
            'them from the host, or device_map="auto" with max_memory to stream what does not fit'
        )
    if None in wanted.values():
        raise ValueError('device_map names None; name a device, as 0, "cuda" or "cpu"')
    where = {str(path): device_of(device) for path, device in wanted.items()}
    devices = list(dict.fromkeys(where.values()))
    if len(devices) == 1:
        if memory is None or devices[0].type == "cpu":
            return Devices(devices)
        sizes = memory if isinstance(memory, list) else [memory]
        return Devices(devices, [byte_count(size) for size in sizes])
    if memory is not None:
        raise ValueError(
            "device_map says of each module where it is, and memory how much of a GPU they may "
            'take; give one of them: device_map="auto" places blocks by memory, or max_memory'
        )
    return Devices([device for device in devices if device.type == "cuda"], None, where)


def limited(caps: dict[int, int], memory: Any) -> dict[int, int]:
    """Limits the bytes of each GPU by `memory`: one size for all, or a list of sizes."""
    if memory is None:
        return caps
    sizes = memory if isinstance(memory, list) else [memory] * len(caps)
    if len(sizes) != len(caps):
        raise ValueError(
            f"memory has {len(sizes)} sizes for {len(caps)} GPUs; name one for each, or a single "
            "one for all"
        )
    pairs = zip(caps.items(), sizes, strict=True)
    return {gpu: min(cap, byte_count(size)) for (gpu, cap), size in pairs}
