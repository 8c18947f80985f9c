"""Where a model goes: devices, and how much of each it may take."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch

_FACTORS = {"": 1} | {
    prefix + binary: (1024 if binary else 1000) ** power
    for power, prefix in enumerate("KMGT", start=1)
    for binary in ("", "I")
}
#: Of what is free on a GPU, the share that a model may take unless it is told otherwise; the rest
#: is for activations and caches.
SHARE = 0.9


class Placement(NamedTuple):
    """Devices, and the bytes that weights may take of each; None: all that they need."""

    devices: list[torch.device]
    memory: list[int] | None = None
    #: Of each module that a device_map names, the device, if these are several; weights on the CPU
    #: are streamed to the first GPU.
    where: dict[str, torch.device] | None = None
    #: How several GPUs share what there is, as device_map says it.
    order: str = "sequential"

    @property
    def rest(self) -> Any:
        """Where a loader of one device may put what is not compressed; it is moved later."""
        return self.devices[0] if len(self.devices) == 1 else "cpu"


def byte_count(size: int | float | str) -> int:
    """Bytes from a number, or from words such as "9GB" or "1.5GiB"."""
    if not isinstance(size, str):
        return int(size)
    match = re.fullmatch(r"([0-9.]+)\s*([KMGT]?I?)B?", size.strip().upper())
    if match is None:
        raise ValueError(
            f'{size!r} is no number of bytes; write it as 9000000000, "9GB" or "8.5GiB"'
        )
    return int(float(match[1]) * _FACTORS[match[2]])


def device_of(device: Any) -> torch.device:
    """A device with its index, checked to be there."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(
                "there is no CUDA device that PyTorch can use; load onto the CPU with "
                'device_map="cpu" (slow)'
            )
        return torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
    if device.type != "cpu":
        raise ValueError(f"weights are decoded on NVIDIA GPUs and on the CPU, and not on {device}")
    return torch.device("cpu")


def default_device() -> torch.device:
    """The current GPU, or else the CPU."""
    return device_of("cuda") if torch.cuda.is_available() else torch.device("cpu")


def resolve(wanted: Any, memory: Any, max_memory: dict[Any, Any] | None = None) -> Placement:
    """What `device_map`, `memory` and `max_memory` ask for."""
    if isinstance(wanted, dict):
        return _by_modules(wanted, memory)
    caps = {
        gpu: int(cap) for gpu, cap in (max_memory or {}).items() if isinstance(gpu, int) and cap
    }
    if not caps or not torch.cuda.is_available():
        return Placement([torch.device("cpu")])
    caps = limited(caps, memory)
    for gpu in caps:
        free, _ = torch.cuda.mem_get_info(gpu)
        caps[gpu] = min(caps[gpu], int(SHARE * free))
    devices = [torch.device("cuda", gpu) for gpu in caps]

    return Placement(devices, list(caps.values()), None, wanted)


def _by_modules(wanted: dict[Any, Any], memory: Any) -> Placement:
    """What a dict of modules asks for."""
    if "disk" in wanted.values():
        raise ValueError(
            'compressed weights are on disk anyway; use "cpu" in the place of "disk" to stream '
            'them from the host, or device_map="auto" with max_memory to stream what does not fit'
        )
    where = {str(path): device_of(device) for path, device in wanted.items()}
    devices = list(dict.fromkeys(where.values()))
    if len(devices) == 1:
        if memory is None or devices[0].type == "cpu":
            return Placement(devices)
        sizes = memory if isinstance(memory, list) else [memory]
        return Placement(devices, [byte_count(size) for size in sizes])
    if memory is not None:
        raise ValueError(
            "device_map says of each module where it is, and memory how much of a GPU they may "
            'take; give one of them: device_map="auto" places blocks by memory, or max_memory'
        )
    return Placement([device for device in devices if device.type == "cuda"], None, where)


def limited(caps: dict[int, int], memory: Any) -> dict[int, int]:
    """What each GPU may use: `memory` is all that one may, or a list with the bytes of each."""
    if memory is None:
        return caps
    sizes = memory if isinstance(memory, list) else [memory] * len(caps)
    if len(sizes) != len(caps):
        raise ValueError(
            f"memory has {len(sizes)} sizes for {len(caps)} GPUs; name one for each, or a single "
            "one for all"
        )
    return {
        gpu: min(cap, byte_count(size))
        for (gpu, cap), size in zip(caps.items(), sizes, strict=True)
    }
