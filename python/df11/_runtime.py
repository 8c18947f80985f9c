"""A module whose weights stay compressed: each unit's are decoded just before its forward.

```text
          arena, one per device            parameters are views of it, made once
 unit 0   ┌──────────────┬─────────┐
 unit 2   │ decoded      │         │      hook of unit 2: one native call on the current stream
 unit 1   │         ┌────┴─────────┤
 unit 3   │         │      decoded │      with prefetch, both ends take turns: 3 is decoded while 2 runs
          └─────────┴──────────────┘
```
Without prefetch every unit is decoded to the start of the arena: work on one stream runs in order, so one
unit's forward has read its weights before the next one's are written. Nothing here is global: all hangs on
the module. Hooks neither wait for the GPU nor allocate, so that CUDA graphs can capture them, and a replayed
graph decodes as the hooks would.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from . import _native
from ._ahead import Ahead
from ._modules import look_up, main_device, place_blocks
from ._ordinary import REASON, choose
from ._parameters import Place, Weight, decode_piece, piece_bytes
from ._torch import show_bytes
from ._units import ALIGNMENT, Unit, find_units, inside, is_callable
from ._view import View, refuse_writes

if TYPE_CHECKING:
    from ._place import Placement

KEY = "_df11"
_CPU = torch.device("cpu")


class _Turn(threading.local):
    """How many forwards of this thread hold the lock, one in another."""

    depth = 0


class Runtime:
    """What a module with compressed weights hangs on."""

    def __init__(
        self, root: nn.Module, container: Any, weights: list[Weight], *, prefetch: bool = False
    ) -> None:
        # Weakly, as modules are everywhere here: a model that nobody uses is gone at once, and its memory
        # with it.
        self._root = weakref.ref(root)
        self.container = container
        self.weights = weights
        self.prefetch = prefetch
        self.units = find_units(root, weights, container)
        #: The GPUs' share of the model; None on the CPU.
        self.loaded: Any = None
        self.arenas: dict[torch.device, torch.Tensor] = {}
        self.unit_devices: list[torch.device] = []
        #: For each unit, by path, its device; of those too whose weights are ordinary parameters.
        self.homes: dict[str, torch.device] = {}
        #: Offset of each unit in its arena.
        self.offsets: list[int] = []
        self.unused_tensors: list[str] = []
        self._programs: list[Callable[[], None]] = []
        #: Ordinary parameters and buffers by the identity of their weight: adapters change their places.
        self.residents: dict[int, torch.Tensor] = {}
        #: Parameters that the module came with and the container lacks: a new head.
        self._new: dict[int, torch.Tensor] = {}
        #: Of each arena, when it was made ready.
        self._versions: dict[torch.device, int] = {}
        self._lock = threading.RLock()
        self._turn = _Turn()
        self._aheads: dict[torch.device, Ahead] = {}
        self._order = {path: at for at, (path, _) in enumerate(root.named_modules())}
        self.wanted_devices: list[torch.device] = [_CPU]
        #: What a device_map says of modules.
        self._where: dict[str, torch.device] | None = None
        self._streams: dict[int, tuple[int, torch.cuda.Stream]] = {}

    @property
    def root(self) -> nn.Module:
        """The module."""
        root = self._root()
        assert root is not None, "the module lives while it is used"
        return root

    # ---- set-up ----

    def load(self, placement: Placement, streamed: bool = False) -> None:
        """Loads the compressed weights, but for those that are better ordinary, and makes the arenas."""
        self.wanted_devices, self._where = placement.devices, placement.where
        places: dict[str, tuple[torch.device, bool]] = {}
        if placement.devices[0].type == "cuda":
            places = self._settle(placement, streamed)
        else:
            self.prefetch = False
            self.homes = {unit.path: _CPU for unit in self.units}
            self._leave_ordinary()
        if self.units and places:
            at = {device: index for index, device in enumerate(placement.devices)}
            self.loaded = self.container.load(
                devices=[device.index for device in placement.devices],
                blocks={name: (at[places[name][0]], places[name][1]) for name in _blocks_of(self.units)},
            )
        self.unit_devices = [self.homes[unit.path] for unit in self.units]
        self._lay_out_arenas()

    def _settle(self, placement: Placement, streamed: bool) -> dict[str, tuple[torch.device, bool]]:
        """Where blocks go on GPUs; leaves units out that are better ordinary, if nothing must be streamed."""
        if not self.units:
            return {}
        devices, memory = placement.devices, placement.memory
        budget = memory[0] if memory is not None and len(devices) == 1 else None
        if placement.where is not None:
            places = place_blocks(self.units, placement.where)
        elif streamed and len(devices) > 1:
            raise ValueError("streamed puts all blocks on one GPU; name one device")
        else:
            places = self._planned(devices, memory=None if budget is not None or streamed else memory)
        if streamed:
            places = {name: (device, True) for name, (device, _) in places.items()}
        self._find_homes(places)
        if not any(is_streamed for _, is_streamed in places.values()):
            if self._leave_ordinary(budget):
                return places
            assert budget is not None
            places = self._planned(devices, memory=[self._budget(budget)])
        return places

    def _planned(
        self, devices: list[torch.device], memory: list[int] | None
    ) -> dict[str, tuple[torch.device, bool]]:
        plan = _native.plan(self.container, memory, blocks=sorted(_blocks_of(self.units)))
        return {name: (devices[place.device], place.streamed) for name, place in plan.placements.items()}

    def _find_homes(self, places: dict[str, tuple[torch.device, bool]]) -> None:
        for unit in self.units:
            found = {places[block][0] for block in unit.blocks}
            if len(found) > 1:
                raise ValueError(
                    f"the blocks {sorted(unit.blocks)} of {unit.path} lie on several GPUs; name one device"
                )
            self.homes[unit.path] = found.pop()

    def _leave_ordinary(self, budget: int | None = None) -> bool:
        """Makes ordinary parameters of units that take less memory so; not if all take more than there is."""
        left: set[str] = set()
        total = self._resident_bytes()
        for device in dict.fromkeys(self.homes.values()):
            mine = [unit for unit in self.units if self.homes[unit.path] == device]
            ordinary, taken = choose(mine, self._compressed_bytes, self._arena_bytes)
            left.update(unit.path for unit in ordinary)
            total += taken
        if budget is not None and total > budget:
            return False
        for unit in self.units:
            for weight in unit.weights if unit.path in left else ():
                weight.resident_because = REASON
        self.units = [unit for unit in self.units if unit.path not in left]
        return True

    def _compressed_bytes(self, units: list[Unit]) -> int:
        """What units take where they are compressed, decode tables included."""
        if self.wanted_devices[0].type != "cuda":
            return self.mapped_bytes(units)
        blocks = sorted(_blocks_of(units))
        return _native.plan(self.container, blocks=blocks).device_bytes[0] - self._outputs_bytes(units)

    def _outputs_bytes(self, units: list[Unit]) -> int:
        """The two outputs that a native plan leaves room for; here arena and residents are in their place."""
        return 2 * max((int(self.container.block(block).nbytes) for block in _blocks_of(units)), default=0)

    def mapped_bytes(self, units: Iterable[Unit]) -> int:
        """Bytes of containers that are read on the CPU, and stay in the page cache."""
        names = {name for unit in units for weight in unit.weights for name in weight.tensors}
        return sum(int(self.container[name].stored_bytes) for name in names)

    def _resident_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights if weight.resident_because is not None)

    def _budget(self, memory: int) -> int:
        """What the native plan may use."""
        ours = self._resident_bytes() + self._arena_bytes(self.units)
        return max(0, memory - ours + self._outputs_bytes(self.units))

    def place_residents(self) -> None:
        """Makes ordinary parameters of what is not decoded at each use."""
        for weight in self.weights:
            if weight.resident_because is not None:
                self._place_resident(weight)
        self._place_buffers()

    @torch.inference_mode(False)  # whose tensors count no versions
    def place(self) -> None:
        """Turns parameters into views of the arenas."""
        parameters: dict[tuple[int, torch.device, int], nn.Parameter] = {}
        for unit, device, offset in zip(self.units, self.unit_devices, self.offsets, strict=True):
            self._place_unit(unit, device, offset, parameters)
        self._make_programs()

    def _arena_bytes(self, units: list[Unit]) -> int:
        sizes = [_aligned(unit.nbytes) for unit in units]
        if self.prefetch:
            layers = [_is_listed(unit.path) for unit in units]
            pairs = zip(sizes, sizes[1:], layers, layers[1:], strict=False)
            sizes += [a + b for a, b, first, second in pairs if first and second]
        return max(sizes, default=0)

    def _lay_out_arenas(self) -> None:
        self.offsets = [0] * len(self.units)
        for device in dict.fromkeys(self.unit_devices):
            mine = [at for at, other in enumerate(self.unit_devices) if other == device]
            bytes_ = self._arena_bytes([self.units[at] for at in mine])
            for turn, at in enumerate(mine):
                if self.prefetch and turn % 2 and not self._is_tied(self.units[at]):
                    self.offsets[at] = _aligned_down(bytes_ - self.units[at].nbytes)
            with torch.inference_mode(False):  # as in place
                self.arenas[device] = torch.empty(bytes_, dtype=torch.uint8, device=device)

    @staticmethod
    def _is_tied(unit: Unit) -> bool:
        return any(len(weight.places) > 1 for weight in unit.weights)

    def _place_resident(self, weight: Weight) -> None:
        device = self.device_at(weight.places[0].path)
        value = weight.decode(self.container).to(device)
        parameter = value if weight.is_buffer else nn.Parameter(value, requires_grad=False)
        self.residents[id(weight)] = parameter
        for place in weight.places:
            _set(self.root, place, parameter)

    def device_at(self, path: str) -> torch.device:
        """The device of the unit around a module, or else of the last one before it."""
        if len(self.devices) < 2:
            return self.devices[0]
        if self._where is not None and (said := look_up(self._where, path)) is not None:
            return said if said.type == "cuda" else main_device(self._where)
        device = self.devices[0]
        for unit, other in self.homes.items():
            if inside(path, unit):
                return other
            if self._order.get(unit, 0) <= self._order.get(path, 0):
                device = other
        return device

    def _place_unit(
        self,
        unit: Unit,
        device: torch.device,
        offset: int,
        parameters: dict[tuple[int, torch.device, int], nn.Parameter],
    ) -> None:
        arena = self.arenas[device]
        for weight, start in zip(unit.weights, unit.starts, strict=True):
            begin = offset + start
            key = (id(weight), device, begin)
            if key not in parameters:
                view = arena[begin : begin + weight.nbytes].view(weight.dtype).view(weight.shape)
                parameters[key] = View(view, requires_grad=False)
            for place in weight.places:
                if inside(place.path, unit.path):
                    _set(self.root, place, parameters[key])

    def _place_buffers(self) -> None:
        """Other buffers go where their module runs; those outside of all units where the model begins."""
        held = {(id(self.root.get_submodule(p.path)), p.attribute) for w in self.weights for p in w.places}
        for path, module in self.root.named_modules():
            has_parameters = any(True for _ in module.parameters(recurse=False))
            in_unit = any(inside(path, unit) for unit in self.homes)
            device = self.device_at(path) if in_unit or has_parameters else self.devices[0]
            for attribute, value in module._buffers.items():
                if value is not None and (id(module), attribute) not in held and not value.is_meta:
                    module._buffers[attribute] = value.to(device)

    def _make_programs(self) -> None:
        self._programs = [
            self._program_on_gpu(at) if device.type == "cuda" else self._program_on_cpu(at)
            for at, device in enumerate(self.unit_devices)
        ]

    def pieces(self, at: int) -> Iterable[tuple[Any, Any, int]]:
        """Each piece of a unit, with its weight and its offset in the unit's memory."""
        unit = self.units[at]
        for weight, start in zip(unit.weights, unit.starts, strict=True):
            for piece in weight.pieces:
                yield weight, piece, start + piece.offset

    def _program_on_cpu(self, at: int) -> Callable[[], None]:
        container, offset = self.container, self.offsets[at]
        arena = self.arenas[self.unit_devices[at]]
        steps = []
        for _, piece, start in self.pieces(at):
            begin = offset + start
            memory = arena[begin : begin + piece_bytes(container[piece.tensor], piece)]
            steps.append((piece._replace(offset=0), memory))

        def decode() -> None:
            for piece, memory in steps:
                decode_piece(container, piece, memory)

        return decode

    def _program_on_gpu(self, at: int) -> Callable[[], None]:
        pieces = [
            (piece.tensor, start, *piece.rows) if piece.rows else (piece.tensor, start)
            for _, piece, start in self.pieces(at)
        ]
        device = self.unit_devices[at]
        run = self.loaded.program(pieces).decode
        pointer = self.arenas[device].data_ptr() + self.offsets[at]
        index = device.index
        current = torch._C._cuda_getCurrentRawStream
        # It leaves the thread's current device, by which PyTorch knows its own, as it was.
        return lambda: run(pointer, current(index))

    # ---- hooks ----

    def install(self) -> None:
        """Puts the hooks onto the modules."""
        if self.prefetch:
            self._aheads = {device: Ahead(self, device) for device in self.arenas}
        for at, (unit, device) in enumerate(zip(self.units, self.unit_devices, strict=True)):
            decode = self._aheads[device].decoder(at) if self.prefetch else self._programs[at]
            module = self.root.get_submodule(unit.path)
            module.register_forward_pre_hook(_untraced(_hook(decode)), prepend=True, with_kwargs=True)
        for module in self._guards():
            module.register_forward_pre_hook(self._enter, prepend=True)
            module.register_forward_hook(self._leave, always_call=True)
        for module in {id(m): m for m in self._owners()}.values():
            module.register_state_dict_post_hook(partial(self._on_state_dict))  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(self._on_load_state_dict)  # type: ignore[no-untyped-call]
        self._versions = {device: arena._version for device, arena in self.arenas.items()}
        self._new = {id(value): value for _, value in self.others()}
        self.root.__dict__[KEY] = self
        for module in self._holders():
            module.__dict__["_apply"] = partial(self._on_apply, weakref.ref(module))
            module.__dict__[KEY] = self

    def _guards(self) -> list[nn.Module]:
        """The module and those around units, whose forward one thread runs at a time."""
        paths = {""}
        for unit in self.units:
            parts = unit.path.split(".")[:-1]
            paths.update(".".join(parts[:count]) for count in range(1, len(parts) + 1))
        modules = [self.root.get_submodule(path) for path in sorted(paths)]
        return [module for module in modules if is_callable(module)]

    def _holders(self) -> list[nn.Module]:
        """The modules that have compressed weights, and those around them.

        Others are ordinary ones, and may be another model's as well: an activation that a library makes once.
        """
        paths = {path for unit in self.units for weight in unit.weights for path in _around(weight.places)}
        return [self.root.get_submodule(path) for path in sorted(paths)]

    def _owners(self) -> list[nn.Module]:
        arena = {id(weight) for unit in self.units for weight in unit.weights}
        return [self.root.get_submodule(p.path) for w in self.weights if id(w) in arena for p in w.places]

    def _enter(self, module: nn.Module, args: Any) -> None:
        for device, arena in self.arenas.items():
            if arena._version != self._versions[device]:
                refuse_writes()
        self._begin()

    def _begin(self) -> None:
        self._lock.acquire()
        self._turn.depth += 1
        if self._turn.depth == 1 and self.loaded is not None:
            self._order_streams()

    def _order_streams(self) -> None:
        """Work on another stream than the last time begins when that one is done with the arena."""
        for device in self.arenas:
            number = torch._C._cuda_getCurrentRawStream(device.index)
            last = self._streams.get(device.index)
            if last is None or last[0] != number:
                stream = torch.cuda.current_stream(device)
                # A capture begins when the device is idle; within it, nothing outside may be waited for.
                if last is not None and not torch.cuda.is_current_stream_capturing():
                    stream.wait_stream(last[1])
                self._streams[device.index] = (number, stream)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # It is called as well where a hook before `_enter` failed, or `_enter` itself.
        if self._turn.depth:
            self._end()

    def _end(self) -> None:
        self._turn.depth -= 1
        try:
            for ahead in () if self._turn.depth else self._aheads.values():
                ahead.join()
        finally:
            self._lock.release()

    # ---- what parameters do not bear ----

    def _on_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        names = [prefix + name for name, value in module._parameters.items() if self._in_arena(value)]
        names = [name for name in names if name in state]
        if names and not self._has_adapters():
            raise RuntimeError(
                f"{names[0]} is compressed, and its memory holds another block's weights most of the time: "
                "state_dict() would copy "
                "those; save with save_pretrained() or df11.save(), or get decoded copies with "
                "df11.state_dict()"
            )
        # With adapters on top, what is trained is all that is asked for.
        for name in names:
            del state[name]

    def _has_adapters(self) -> bool:
        """Whether the module has parameters that it did not come with."""
        return any(id(value) not in self._new for _, value in self.others())

    def others(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that are not the container's, by name: adapters, and a new head."""
        named = self.root.named_parameters()
        return ((name, value) for name, value in named if not self.holds(value))

    def holds(self, value: torch.Tensor) -> bool:
        """Whether a parameter or buffer is one of the container's."""
        return self._in_arena(value) or any(value is other for other in self.residents.values())

    def _on_load_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, value in module._parameters.items():
            if prefix + name in state and self._in_arena(value):
                raise RuntimeError(
                    f"{prefix + name} is compressed and cannot be loaded over; load adapters alone"
                )

    def _in_arena(self, value: torch.Tensor | None) -> bool:
        if value is None or value.device not in self.arenas:
            return False
        arena = self.arenas[value.device]
        return value.untyped_storage().data_ptr() == arena.untyped_storage().data_ptr()

    def _on_apply(
        self, of: weakref.ref[nn.Module], change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> Any:
        """`to`, `cuda`, `half` and the like: what changes nothing may pass, and reaches adapters on top."""
        for device in self.arenas or dict.fromkeys(self.devices):
            probe = torch.empty(1, dtype=torch.bfloat16, device=device)
            after = change(probe)
            if after is not probe:
                to = str(after.device if after.device != probe.device else after.dtype).removeprefix("torch.")
                raise RuntimeError(
                    f"compressed weights stay where and what they are: on {device}, as they are stored; to "
                    "have the model elsewhere "
                    f"({to}), load it so, with device_map= or the device= of df11.attach"
                )
        module = of()
        assert module is not None
        apply: Any = type(module)._apply
        return apply(module, lambda value: value if self._in_arena(value) else change(value), recurse)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("a module with compressed weights cannot be copied; load the container again")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a module with compressed weights cannot be pickled; save it with df11.save() or "
            "save_pretrained()"
        )

    # ---- use ----

    def decode_unit(self, at: int) -> None:
        """Decodes a unit into its place in the arena, as its hook does."""
        self._programs[at]()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Held while the arenas are in use; no forward runs meanwhile, on this thread's streams or another's."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def check(self) -> None:
        """Waits for the GPUs, and raises CorruptError where any decode so far met a malformed stream."""
        if self.loaded is not None:
            for device in self.arenas:
                self.loaded.check(torch._C._cuda_getCurrentRawStream(device.index), device.index)

    @property
    def devices(self) -> list[torch.device]:
        """The devices that hold weights, the first unit's first."""
        named = (device for device in (self._where or {}).values() if device.type == "cuda")
        return list(dict.fromkeys([*self.homes.values(), *named])) or self.wanted_devices[:1]

    def __repr__(self) -> str:
        bytes_ = sum(weight.nbytes for weight in self.weights)
        return f"<df11: {len(self.units)} units, {show_bytes(bytes_)} of weights, from {self.container.path}>"


def _around(places: Iterable[Place]) -> Iterator[str]:
    """The modules of these places, and all around them."""
    for place in places:
        parts = place.path.split(".") if place.path else []
        for count in range(len(parts) + 1):
            yield ".".join(parts[:count])


def _blocks_of(units: list[Unit]) -> set[str]:
    return {block for unit in units for block in unit.blocks}


def _hook(decode: Callable[[], None]) -> Callable[..., None]:
    grad = torch.is_grad_enabled

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if grad():
            _refuse_training(args, kwargs)
        decode()

    return hook


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook at which torch.compile breaks its graph: it can trace neither locks nor native code.

    It compiles nothing either of what the hook calls, of which there would be a version for each tensor.
    """
    disable: Any = torch.compiler.disable
    disabled: Callable[..., None] = disable(hook, reason="df11 decodes weights")
    return disabled


def _refuse_training(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise RuntimeError(
                "compressed weights are for inference: the backward pass would read another block's weights; "
                "run the model under torch.no_grad(), or train the BF16 model"
            )


def _set(root: nn.Module, place: Place, value: torch.Tensor) -> None:
    module = root.get_submodule(place.path)
    table = module._buffers if place.attribute in module._buffers else module._parameters
    table[place.attribute] = value  # type: ignore[assignment]


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _aligned_down(count: int) -> int:
    return count // ALIGNMENT * ALIGNMENT


def _is_listed(path: str) -> bool:
    return any(part.isdigit() for part in path.split("."))


def runtimes(model: Any) -> list[Runtime]:
    """All runtimes in a module, or in the components of a pipeline."""
    if isinstance(model, nn.Module):
        modules: Iterable[nn.Module] = model.modules()
    else:
        parts = getattr(model, "components", None)
        parts = parts.values() if isinstance(parts, dict) else [model]
        inner = [part if isinstance(part, nn.Module) else getattr(part, "model", None) for part in parts]
        modules = (module for part in inner if isinstance(part, nn.Module) for module in part.modules())
    found = {id(runtime): runtime for module in modules if (runtime := module.__dict__.get(KEY)) is not None}
    return list(found.values())
