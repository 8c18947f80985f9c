"""Reports the effects of compression on a loaded model: `df11.report`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from . import _native
from ._errors import CorruptError
from ._modules import local
from ._ops import orders
from ._origin import Origin, is_as_loaded, members, origins
from ._report import html_table, show_bytes
from ._siblings import MAX_ROWS, joined_siblings
from ._tensor import CompressedTensor
from ._watch import check_gpus


@dataclass
class DeviceReport:
    """Memory of the weights of one device, in bytes: compressed weights as stored (with their
    decode tables) and in the fast layout, ordinary parameters, and streamed weights in host memory.
    """

    device: str
    stored: int = 0
    fast: int = 0
    ordinary: int = 0
    streamed: int = 0

    @property
    def total(self) -> int:
        return self.stored + self.fast + self.ordinary


@dataclass
class ModelReport:
    """Effects of compression on a model. Falsy if it has no compressed weights of df11."""

    active: bool
    paths: list[str] = field(default_factory=list)
    #: How compressed weights are multiplied: `exact`, `fused`, or both.
    modes: list[str] = field(default_factory=list)
    #: Bytes of the uncompressed weights.
    original_bytes: int = 0
    devices: list[DeviceReport] = field(default_factory=list)
    #: Residence of each weight by its name: `stored`, `fast`, `streamed` or `ordinary`.
    residences: dict[str, str] = field(default_factory=dict)
    #: Ordinary weights: number and bytes by reason; and the large ones by name.
    ordinary: dict[str, tuple[int, int]] = field(default_factory=dict)
    large_ordinary: dict[str, str] = field(default_factory=dict)
    #: Tensors of the containers that belong to no parameter.
    unused_tensors: list[str] = field(default_factory=list)
    #: By name, exact matrices on GPUs that kernels can multiply in the order of PyTorch's products:
    #: for each number of rows of x so far (or one), whether that order is known. If it is not, the
    #: matrix is decoded first, with the same bits.
    orders: dict[str, dict[int, bool]] = field(default_factory=dict)
    #: Names of layers that share x and that one product multiplies by, if x has few rows.
    siblings: list[tuple[str, ...]] = field(default_factory=list)
    #: With `verify`, how many weights were compared, and how: with the container's tensors, whose
    #: hashes were checked too; with digests of the loaded values; or some each way.
    verified: int | None = None
    verified_by: str = "hashes"

    def __bool__(self) -> bool:
        return self.active

    def _on(self, device: torch.device) -> DeviceReport:
        entry = next((each for each in self.devices if each.device == str(device)), None)
        if entry is None:
            self.devices.append(entry := DeviceReport(str(device)))
        return entry

    @property
    def device_bytes(self) -> int:
        """Bytes that the weights take on all devices."""
        return sum(device.total for device in self.devices)

    @property
    def host_bytes(self) -> int:
        """Pinned host memory of streamed weights."""
        return sum(device.streamed for device in self.devices)

    @property
    def saved_bytes(self) -> int:
        """Bytes that compression saves."""
        return self.original_bytes - self.device_bytes

    @property
    def ratio(self) -> float:
        return self.device_bytes / max(1, self.original_bytes)

    def __str__(self) -> str:
        if not self.active:
            return "df11: inactive: the model has no compressed weights"
        head = f"df11: active, {' and '.join(self.modes) or 'nothing compressed'}, "
        rows = (f"{label:<{_LABEL}}{_native.printable(text)}" for label, text in self._rows())
        return "\n".join([_native.printable(head + f"from {', '.join(self.paths)}"), *rows])

    def _rows(self) -> Iterator[tuple[str, str]]:
        show, more = show_bytes, "saved" if self.saved_bytes >= 0 else "more"
        of_all = f"{show(self.device_bytes)} of {show(self.original_bytes)} ({self.ratio:.1%})"
        yield "weights", f"{of_all}, {show(abs(self.saved_bytes))} {more}"
        for device in self.devices:
            sizes = {name: getattr(device, name) for name in ("stored", "fast", "ordinary")}
            sizes["streamed from pinned host memory"] = device.streamed
            parts = (f"{show(size)} {name}" for name, size in sizes.items() if size)
            yield device.device, ", ".join(parts)
        if self.orders:
            yield from self._of_orders()
        if self.siblings:
            layers = sum(map(len, self.siblings))
            products = f"{layers} matrices that share x in {len(self.siblings)} products"
            many = f"above {MAX_ROWS} rows of x each has its own product"
            yield "at once", f"{products}; {many}"
        if why := sorted(self.ordinary.items()):
            parts = (
                f"{count} tensor{'s, each' if count > 1 else ','} {reason} ({show(size)})"
                for reason, (count, size) in why
            )
            yield "ordinary", "; ".join(parts)
        large = [f"{name}: {reason}" for name, reason in self.large_ordinary.items()]
        if len(large) > _NAMED:
            large[_NAMED:] = [f"and {len(large) - _NAMED} more, in large_ordinary"]
        yield from (("", line) for line in large)
        if unused := self.unused_tensors:
            yield "unused", f"{len(unused)} tensors: {', '.join(unused[:3])}"
        if self.verified is not None:
            by = f"by {self.verified_by}"
            yield "verified", f"{self.verified} weights are as they were loaded, {by}"

    def _of_orders(self) -> Iterator[tuple[str, str]]:
        """Counts the matrices with a known order; names the others, with the rows of x."""
        decoded = {
            name: ", ".join(str(rows) for rows, is_known in sorted(each.items()) if not is_known)
            for name, each in self.orders.items()
            if not (each and all(each.values()))
        }
        known = f"{len(self.orders) - len(decoded)} of {len(self.orders)} matrices"
        yield "in order", f"{known} are multiplied in BF16's order without decoding to memory"
        lines = [
            f"{name}: decoded first" + (f" for {rows} rows of x" if rows else "")
            for name, rows in decoded.items()
        ]
        if len(lines) > _NAMED:
            lines[_NAMED:] = [f"and {len(lines) - _NAMED} more, in orders"]
        yield from (("", line) for line in lines)

    def _repr_html_(self) -> str:
        return html_table(str(self).splitlines()[0], self._rows())


_LABEL = 11
_LARGE = 1 << 20
_NAMED = 12
_OTHER = "not in the containers"


def report(model: Any, *, verify: bool = False) -> ModelReport:
    """Says whether a model's weights are compressed, how much memory that saves, and where they
    are.

    With `verify` every compressed weight is decoded on its device and compared with the container,
    decoded by the CPU. The container is compared with the hashes of the original tensors. This
    takes about as long as reading the model twice. Ordinary weights are compared with their loaded
    values, by a digest of 64 bits. In a model that is distributed over several processes, each
    reports its own weights.

    Waits for the GPUs. Raises CorruptError if something differs, or if a kernel met damaged weights
    since the last report.
    """
    parts = [origin for _, origin in origins(model)]
    if not parts:
        return ModelReport(False)
    out = ModelReport(True)
    for origin in parts:
        _add(out, origin)
    out.siblings = [layers for one in members(model) for layers in joined_siblings(one)]
    seen = {id(value) for origin in parts for _, value in origin.live_weights()}
    for name, value in _parameters(model, parts):
        if id(value) not in seen:
            seen.add(id(value))
            _add_ordinary(out, name, value, _OTHER)
    check_gpus(value.device for origin in parts for _, value in origin.live_weights())
    if verify:
        by = [kind for origin in parts for kind in _verify(origin)]
        out.verified, kinds = len(by), sorted(set(by), reverse=True)
        out.verified_by = " and ".join(kinds)
    return out


def _parameters(model: Any, all_origins: list[Origin]) -> list[tuple[str, torch.Tensor]]:
    if isinstance(model, nn.Module):
        return list(model.named_parameters())
    spots = (spot for origin in all_origins for spot in origin.spots)
    modules = [module for spot in spots if (module := spot.module) is not None]
    return [pair for module in modules for pair in module.named_parameters()]


def _add(out: ModelReport, origin: Origin) -> None:
    out.paths.append(str(origin.path))
    out.unused_tensors += origin.unused
    counted: set[tuple[int, int]] = set()
    for weight, whole in origin.live_weights():
        value = local(whole)
        if not isinstance(value, CompressedTensor):
            _add_ordinary(out, weight.name, value, weight.reason or "changed since")
            continue
        out.original_bytes += weight.nbytes
        mode = "exact" if value.exact else "fused"
        if mode not in out.modes:
            out.modes.append(mode)
        device = out._on(value.device)
        residence = "fast" if value.parts[0].is_fast else "stored"
        residence = "streamed" if value.is_streamed else residence
        out.residences[weight.name] = residence
        is_bf16 = value.dtype == torch.bfloat16
        if is_bf16 and value.exact and value.device.type == "cuda" and value.is_matrix:
            out.orders[weight.name] = orders(value._arrays, value.flat_parts)
        for array in value._arrays:
            key = (array.data_ptr(), array.numel())
            if array.numel() and key not in counted:
                counted.add(key)
                # Tables of streamed weights are on the device.
                kind = (
                    residence
                    if residence != "streamed" or array.device != value.device
                    else "stored"
                )
                setattr(device, kind, getattr(device, kind) + array.numel())


def _add_ordinary(out: ModelReport, name: str, value: torch.Tensor, reason: str) -> None:
    value = local(value)
    out.original_bytes += value.nbytes
    out.residences[name] = "ordinary"
    count, before = out.ordinary.get(reason, (0, 0))
    out.ordinary[reason] = (count + 1, before + value.nbytes)
    if value.nbytes >= _LARGE:
        out.large_ordinary[name] = reason
    out._on(value.device).ordinary += value.nbytes


def _verify(origin: Origin) -> list[str]:
    """Checks each weight, and returns how it was checked. Packed weights have no container."""
    if not origin.is_packed:
        origin.container.verify_containers()
    live = list(origin.live_weights())
    for weight, value in live:
        if not is_as_loaded(origin, weight, value):
            raise CorruptError(
                f"{weight.name} differs from {origin.path}: it was changed, or memory fails; "
                "load the model again"
            )
    check_gpus(value.device for _, value in live)
    return ["digests" if weight.description is None else "hashes" for weight, _ in live]
