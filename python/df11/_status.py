"""What compression does for a model that is loaded: `df11.report`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from . import _native
from ._ordinary import REASON
from ._parameters import Weight, decode_piece, piece_bytes
from ._runtime import Runtime, runtimes
from ._torch import bytes_of, show_bytes


@dataclass
class DeviceReport:
    """What one device holds, in bytes."""

    device: str
    #: Units that are decoded there, and of these the ones that are streamed from the host.
    units: int
    streamed_units: int
    #: Compressed weights with what decoding them needs.
    compressed: int
    #: The memory that decoded blocks take turns in.
    arena: int
    #: Ordinary parameters.
    resident: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.compressed + self.arena + self.resident


@dataclass
class ModelReport:
    """What compression does for a model. Falsy where the model has no compressed weights."""

    active: bool
    paths: list[str] = field(default_factory=list)
    #: The weights if they were not compressed, in bytes.
    original_bytes: int = 0
    devices: list[DeviceReport] = field(default_factory=list)
    #: Pinned host memory of streamed blocks.
    host_bytes: int = 0
    #: Weights that are ordinary parameters, by the reason, with their number and bytes.
    resident: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: Of those, the large ones, and those that are kept decoded because that takes less memory, by name.
    large_residents: dict[str, str] = field(default_factory=dict)
    #: Tensors of the containers that belong to no parameter.
    unused_tensors: list[str] = field(default_factory=list)
    #: Weights that were compared with the original's hashes; None where that was not asked for.
    verified: int | None = None

    def __bool__(self) -> bool:
        return self.active

    @property
    def device_bytes(self) -> int:
        """What the weights take on all devices, decoded blocks included."""
        return sum(device.total for device in self.devices)

    @property
    def saved_bytes(self) -> int:
        """What they would take more without compression."""
        return self.original_bytes - self.device_bytes

    @property
    def ratio(self) -> float:
        """`device_bytes` as a part of `original_bytes`."""
        return self.device_bytes / max(1, self.original_bytes)

    def __str__(self) -> str:
        if not self.active:
            return "df11: inactive: the model has no compressed weights"
        show = show_bytes
        lines = [
            f"df11: active, from {', '.join(self.paths)}",
            f"weights    {show(self.device_bytes)} of {show(self.original_bytes)} ({self.ratio:.1%}), "
            f"{show(abs(self.saved_bytes))} {'saved' if self.saved_bytes >= 0 else 'more'}",
        ]
        for device in self.devices:
            streamed = f", {device.streamed_units} of them streamed" if device.streamed_units else ""
            lines.append(
                f"{device.device:<10} {show(device.compressed)} compressed, {show(device.arena)} for "
                "decoded blocks, "
                f"{show(device.resident)} ordinary; {device.units} blocks{streamed}"
            )
        if self.host_bytes:
            lines.append(f"host       {show(self.host_bytes)} pinned for streamed blocks")
        if self.resident:
            parts = [
                f"{count} {reason} ({show(size)})" for reason, (count, size) in sorted(self.resident.items())
            ]
            lines.append("ordinary   " + ", ".join(parts))
        named = [f"           {name}: {reason}" for name, reason in self.large_residents.items()]
        lines += named[:_NAMED]
        if len(named) > _NAMED:
            lines.append(f"           and {len(named) - _NAMED} more, in large_residents")
        if self.unused_tensors:
            lines.append(
                f"unused     {len(self.unused_tensors)} tensors: {', '.join(self.unused_tensors[:3])}"
            )
        if self.verified is not None:
            lines.append(f"verified   {self.verified} weights are those of the original, by their hashes")
        return "\n".join(lines)


#: Ordinary parameters from this size on are named.
_LARGE = 1 << 20
#: The text names no more than so many.
_NAMED = 12
#: Why an adapter or a new head is an ordinary parameter.
_OTHER = "not in the containers"


def report(model: Any, *, verify: bool = False) -> ModelReport:
    """Whether a model's weights are compressed, what that saves, and where they are.

    With `verify` every block is decoded as for a forward, on its device, and compared with the container
    decoded by the CPU, and that with the hashes of the original tensors; takes about as long as reading the
    model twice, and a decoded tensor of host memory. Raises CorruptError where a bit differs.
    """
    found = runtimes(model)
    if not found:
        return ModelReport(False)
    out = ModelReport(True)
    for runtime in found:
        _add(out, runtime)
    if verify:
        out.verified = sum(_verify(runtime) for runtime in found)
    return out


def _add(out: ModelReport, runtime: Runtime) -> None:
    out.paths.append(str(runtime.container.path))
    out.original_bytes += sum(weight.nbytes for weight in runtime.weights)
    out.unused_tensors += runtime.unused_tensors
    resident: dict[torch.device, int] = {}
    for weight in runtime.weights:
        if weight.resident_because is None:
            continue
        count, size = out.resident.get(weight.resident_because, (0, 0))
        out.resident[weight.resident_because] = (count + 1, size + weight.nbytes)
        if weight.nbytes >= _LARGE or weight.resident_because == REASON:
            out.large_residents[weight.name] = weight.resident_because
        device = runtime.residents[id(weight)].device
        resident[device] = resident.get(device, 0) + weight.nbytes
    for _, value in runtime.others():
        size = value.numel() * value.element_size()
        out.original_bytes += size
        count, before = out.resident.get(_OTHER, (0, 0))
        out.resident[_OTHER] = (count + 1, before + size)
        resident[value.device] = resident.get(value.device, 0) + size
    for device in dict.fromkeys([*runtime.arenas, *resident]):
        units = [at for at, other in enumerate(runtime.unit_devices) if other == device]
        streamed = sum(_is_streamed(runtime, at) for at in units)
        arena = runtime.arenas[device].numel() if device in runtime.arenas else 0
        compressed = _compressed_bytes(runtime, device, units)
        out.devices.append(
            DeviceReport(str(device), len(units), streamed, compressed, arena, resident.get(device, 0))
        )
    if runtime.loaded is not None:
        out.host_bytes += runtime.loaded.host_bytes


def _is_streamed(runtime: Runtime, at: int) -> bool:
    return runtime.loaded is not None and any(
        runtime.loaded.block(name).is_streamed for name in runtime.units[at].blocks
    )


def _compressed_bytes(runtime: Runtime, device: torch.device, units: list[int]) -> int:
    if runtime.loaded is not None:
        total = int(runtime.loaded.device_bytes)
        if len(runtime.loaded.devices) == 1:
            return total
        # Blocks are nearly all of it.
        here = {
            name
            for name, place in runtime.loaded.placements.items()
            if place.device == device.index and not place.streamed
        }
        shares = {block.name: int(block.stored_bytes) for block in runtime.container.blocks}
        resident = sum(shares[n] for n, place in runtime.loaded.placements.items() if not place.streamed)
        return total * sum(shares[name] for name in here) // max(1, resident)
    return runtime.mapped_bytes(runtime.units[at] for at in units)


def _verify(runtime: Runtime) -> int:
    # Each by itself: of a repository on the Hub not all side files beside the containers are fetched.
    for shard in runtime.container.shards:
        _native.open(shard["path"]).verify("full", progress=False)
    checked = set()
    with torch.no_grad():
        for at, (unit, device) in enumerate(zip(runtime.units, runtime.unit_devices, strict=True)):
            with runtime.exclusive():
                runtime.decode_unit(at)
                offset = runtime.offsets[at]
                memory = runtime.arenas[device][offset : offset + unit.nbytes]
                for weight, start in zip(unit.weights, unit.starts, strict=True):
                    _compare(runtime, weight, memory[start : start + weight.nbytes])
                    checked.add(id(weight))
        runtime.check()
        for weight in runtime.weights:
            if weight.resident_because is not None:
                value = runtime.residents[id(weight)]
                if weight.make is None and value.numel():
                    _compare(runtime, weight, bytes_of(value.detach().contiguous()))
                elif not torch.equal(
                    bytes_of(value.cpu().contiguous()), bytes_of(weight.decode(runtime.container))
                ):
                    raise _wrong(runtime, weight)
                checked.add(id(weight))
    return len(checked)


def _compare(runtime: Runtime, weight: Weight, memory: torch.Tensor) -> None:
    """Piece by piece, so that no more than a tensor is on the host."""
    for piece in weight.pieces:
        count = piece_bytes(runtime.container[piece.tensor], piece)
        expected = torch.empty(count, dtype=torch.uint8)
        decode_piece(runtime.container, piece._replace(offset=0), expected)
        if not torch.equal(memory[piece.offset : piece.offset + count].cpu(), expected):
            raise _wrong(runtime, weight)


def _wrong(runtime: Runtime, weight: Weight) -> Exception:
    from ._errors import CorruptError

    return CorruptError(
        f"{weight.name} is not what {runtime.container.path} holds; another writer shares its memory, or "
        "memory fails: load the model again"
    )
