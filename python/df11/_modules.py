"""Where a `device_map` that names modules puts units, and the blocks that these are decoded from."""

from __future__ import annotations

import torch

from ._units import Unit, inside


def look_up(where: dict[str, torch.device], name: str) -> torch.device | None:
    """The device of a module or parameter: that of the innermost one around it that is named."""
    while name not in where:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return where[name]


def main_device(where: dict[str, torch.device]) -> torch.device:
    """The first GPU, to which what is on the CPU is streamed, as accelerate does with what it offloads."""
    return next(device for device in where.values() if device.type == "cuda")


def place_blocks(units: list[Unit], where: dict[str, torch.device]) -> dict[str, tuple[torch.device, bool]]:
    """For each block of the units, its GPU, and whether it is streamed.

    Raises ValueError where nothing is said of a unit, or its weights, or units of one block, are on several
    devices.
    """
    main = main_device(where)
    said: dict[str, tuple[str, torch.device]] = {}
    for unit in units:
        name, device = _of_unit(unit, where)
        for block in sorted(unit.blocks):
            other, before = said.setdefault(block, (name, device))
            if before != device:
                raise _conflict(other, before, name, device)
    return {
        block: (device if device.type == "cuda" else main, device.type != "cuda")
        for block, (_, device) in said.items()
    }


def _of_unit(unit: Unit, where: dict[str, torch.device]) -> tuple[str, torch.device]:
    """The name of one of its weights, and the device of all of them."""
    found: dict[torch.device, str] = {}
    for weight in unit.weights:
        for place in weight.places:
            if not inside(place.path, unit.path):
                continue
            device = look_up(where, place.name)
            if device is None:
                raise ValueError(
                    f'device_map names no device for {place.name}; name one, or one for "", which is all '
                    "that it does not name"
                )
            found.setdefault(device, place.name)
    (device, name), *others = found.items()
    for other, second in others:
        raise _conflict(name, device, second, other)
    return name, device


def _conflict(one: str, first: torch.device, other: str, second: torch.device) -> ValueError:
    return ValueError(
        f"device_map puts {one} on {first} and {other} on {second}, and their weights are decoded together, "
        "as one block; give both the same device"
    )
