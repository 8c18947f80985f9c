"""Saves a model with compressed weights: its containers, or decoded copies.

A save writes the model as it is in memory. If loading the containers would give the same weights,
it copies the containers as they were opened, and writes weights that they lack beside them.
Otherwise it compresses the model again, or refuses.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import _native
from ._dispatch import dense
from ._errors import Error
from ._link import WEIGHTS
from ._modules import entries, gathered, is_first, is_sharded, join
from ._native import TemporaryFolder, compress, install
from ._origin import KEY, Changes, Origin, changes_of, members, rooted
from ._watch import check_gpus
from ._wrapping import wrap_listed

#: The mark that `df11 compress` inserts and `df11 decompress` removes (src/open/beside.rs).
MARK = '\n  "quantization_config": {"quant_method": "df11"},'
_CONFIG = "config.json"
_INDEX = ".safetensors.index.json"
#: Files that libraries write from the model in memory.
_REWRITTEN = (_CONFIG, "generation_config.json")
#: Keys of configs for the release that wrote them, for their place, and of quantizers.
_OF_RELEASES = (
    "transformers_version",
    "_diffusers_version",
    "_name_or_path",
    "quantization_config",
    "base_model_tp_plan",
    "base_model_ep_plan",
)
_ANEW = (
    "save the tensors of df11.state_dict(model) as safetensors and compress them; adapters are "
    "saved by themselves"
)


def save(model: Any, folder: str | Path) -> None:
    """Copies the containers of a model with compressed weights into a folder, byte for byte as they
    were loaded, and the side files beside them.

    Every weight is compared first; compressed weights are decoded for that. The folder gets all
    files or none. Raises `ValueError` if the containers differ from the model in memory, or
    `ParameterError` if the folder has containers of no earlier output.
    """
    modules_loaded = rooted(model)
    if not modules_loaded:
        raise ValueError("the model has no compressed weights of df11")
    paths = [path for *_, origin in modules_loaded for path in origin.container.container_paths]
    if len(set(paths)) < len(paths):
        raise ValueError(
            "containers of the model's modules have the same names; save each module by itself"
        )
    if names := _unsaved(model):
        raise ValueError(f"{_listed(names)}, which the containers do not hold so; {_ANEW}")
    identity = str(modules_loaded[0][2].container.identity) if len(modules_loaded) == 1 else ""
    with _staged(folder) as (stage, files):
        for at, (_, _, origin) in enumerate(modules_loaded):
            _bring(origin, stage / str(at), files)
        install(stage, folder, set(paths), identity)


def state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Decoded copies of all weights, in host memory: as large as the BF16 model.

    Names are those of `model.state_dict()`, without the names of adapters' wrappers. All processes
    of a distributed model must call it at the same time, and each gets whole weights. Raises
    `CorruptError` if a kernel met damaged weights.
    """
    own: dict[tuple[int, str], str] = {}
    for path, module, origin in rooted(model):
        own |= {key: join(path, name) for key, name in _wrapped(module, origin).items()}
    out: dict[str, torch.Tensor] = {}
    persistent = [entry for entry in entries(model) if entry.is_persistent]
    for entry in persistent:
        copy = _copied(entry.value)
        out |= {own.get(spot.key, spot.name): copy for spot in entry.spots}
    check_gpus(entry.value.device for entry in persistent)
    return out


def _copied(value: Tensor) -> Tensor:
    return dense(gathered(value.detach())).cpu().clone(memory_format=torch.contiguous_format)


def _wrapped(root: nn.Module, origin: Origin) -> dict[tuple[int, str], str]:
    """The original names of weights whose module is wrapped, as by adapters."""
    places = {id(module): path for path, module in root.named_modules()}
    spots = ((spot, places.get(id(spot.module), "")) for spot in origin.spots)
    return {spot.key: spot.name for spot, path in spots if path.startswith(f"{spot.path}.")}


def _unsaved(model: Any) -> list[str]:
    """Names of weights that a copy of the containers would not restore."""
    loaded = rooted(model)
    pairs = ((path, changes_of(module, origin)) for path, module, origin in loaded)
    names = [join(path, name) for path, changes in pairs for name in changes.names]
    held = {id(module) for _, root, _ in loaded for module in root.modules()}
    others = (entry for one in members(model) for entry in entries(one) if entry.is_persistent)
    spots = (entry.spots for entry in others)
    return names + [s[0].name for s in spots if not any(id(spot.module) in held for spot in s)]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"the model has {', '.join(names[:3])}{more}"


def _bring(
    origin: Origin,
    place: Path,
    files: Path,
    *,
    containers: bool = True,
    rewritten: Iterable[str] = (),
    kept: Iterable[str] = (),
) -> None:
    """Copies a model's containers, and the side files beside them or beside their BF16 weights, to
    `files`; fetches remote side files. Does not replace existing files. Files named in `kept` stay
    in `place`. Warns of changed side files, unless they will be `rewritten`.
    """
    was_open = origin.held is not None
    beside = origin.path if Path(origin.path).is_dir() else None
    changed = origin.container.copy(place, beside, containers=containers)
    for name in set(changed).difference(rewritten):
        warnings.warn(
            f"{name} in {origin.path} was changed after the model was compressed; the copy has the "
            "change",
            stacklevel=2,
        )
    _move(place, files, kept)
    if origin.is_of_files and not was_open:
        origin.close()


def _move(source: Path, target: Path, kept: Iterable[str] = ()) -> None:
    for path in set(_files(source)).difference(source / name for name in kept):
        if not (place := target / path.relative_to(source)).exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            path.rename(place)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


@contextmanager
def _staged(folder: str | Path) -> Iterator[tuple[Path, Path]]:
    """A working folder, and in it a folder named like the target, from which `install` fills the
    target. On failure the target has nothing new.
    """
    folder = Path(folder)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryFolder(folder) as stage:
            files = stage / "files" / folder.resolve().name
            files.mkdir(parents=True)
            yield stage, files
    except BaseException:
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        raise


#: The `save_pretrained` of a library, of a folder and its options.
Library = Callable[..., None]
#: Held while a library writes.
_LIBRARY = threading.Lock()
#: Options about the layout of weights in files.
_OF_FILES = ("max_shard_size", "save_original_format")


def save_model(
    model: Any,
    folder: str | Path,
    library: Library,
    options: dict[str, Any],
    *,
    takes_new: bool,
    renamed: bool = False,
) -> None:
    """Runs `save_pretrained` of the library, which asks `model.hf_quantizer` for the tensors to
    write.
    `takes_new`: its loader reads a file beside the containers for tensors that they lack.
    `renamed`: its loader would not find tensors by their names in the containers. If weights differ
    from the containers, the model is compressed anew. This takes the host memory of the BF16 model,
    and twice that on the disk of `folder`. Raises `ValueError` if that is impossible, and
    `ParameterError` like `save`.
    """
    origin: Origin = model.__dict__[KEY]
    changes = _agreed(model, changes_of(model, origin))
    added = {name: _copied(value) for name, value in changes.new.items()}
    is_anew = bool(renamed or changes.gone or changes.differing or (added and not takes_new))
    is_anew = is_anew or any(name in origin.tensors for name in added)
    if is_anew and (wrapped := [*_wrapped(model, origin).values()]):
        raise ValueError(
            f"{wrapped[0]} is in another module now, as adapters have it; take adapters out first, "
            "with unload_lora_weights() or the like, and save them by themselves"
        )
    is_written = is_first() and options.get("is_main_process", True)
    with _staged(folder) as (stage, files):
        if not is_written:
            _by_library(model, library, files, options, dict)
            return
        if is_anew:
            made = _anew(model, origin, library, options, stage)
            fill = partial(_move, made, files)
        else:
            fill = partial(_fill, origin, added, stage / "copy", files, Path(folder))
        _by_library(model, library, files, options, fill)
        mark_config(files / _CONFIG)
        _keep_originals(model, stage / "copy", files)
        names = [] if is_anew else origin.container.container_paths
        identity = _native.open(files).identity if is_anew else origin.container.identity
        install(stage, folder, set(names), identity)


def wrap_saving() -> None:
    """Makes `save_pretrained` of transformers write a compressed model as it is in memory."""
    wrap_listed({"transformers.modeling_utils:PreTrainedModel.save_pretrained": _save})


def _save(call: Any, arguments: dict[str, Any]) -> None:
    model, folder = arguments.pop("self"), arguments.pop("save_directory")
    takes_new = getattr(getattr(model, "hf_quantizer", None), "takes_new", None)
    is_ours = takes_new is not None and KEY in vars(model)
    if not is_ours or getattr(model, "_hf_peft_config_loaded", False):
        call()
        return
    options = arguments.pop("kwargs", {}) | arguments
    if options.get("variant") or options.get("state_dict") is not None:
        raise ValueError("save_pretrained takes no variant or state_dict for a compressed model")
    save_model(model, folder, partial(call.func, model), options, takes_new=bool(takes_new))


def _keep_originals(model: Any, place: Path, files: Path) -> None:
    """Takes the original side files that the library did not write, or whose values equal the
    written ones: containers have the hashes of the originals.
    """
    objects = (getattr(model, "config", None), getattr(model, "generation_config", None))
    for name, said in zip(_REWRITTEN, objects, strict=True):
        original, new = place / name, files / name
        if not original.is_file():
            continue
        if not new.is_file() or _says(original, said) == _says(new, said):
            original.replace(new)


def _says(path: Path, said: Any) -> Any:
    """Reads a JSON file with the class of the object that was written to it."""
    values = json.loads(path.read_text(encoding="utf-8"))
    if hasattr(said, "from_dict"):
        values = type(said).from_dict(values).to_dict()
    return {name: value for name, value in values.items() if name not in _OF_RELEASES}


def _agreed(model: nn.Module, changes: Changes) -> Changes:
    """Agrees on changes: a change in one process of a distributed model is refused in all."""
    if not any(is_sharded(value) for value in model.parameters()):
        return changes
    names: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(names, [*changes.differing, *changes.gone])
    if changed := list(dict.fromkeys(name for mine in names for name in mine)):
        raise ValueError(
            f"{_listed(changed)}, which the containers do not hold so, and a model in several "
            f"processes is not compressed anew; {_ANEW}"
        )
    return changes


def _by_library(
    model: Any,
    library: Library,
    files: Path,
    options: dict[str, Any],
    fill: Callable[[], dict[str, Any] | None],
) -> None:
    """Lets the library write its files, with the tensors that `fill` gives. The quantizer holds
    `fill` meanwhile, so other threads that save the model wait.
    """
    quantizer = model.hf_quantizer
    with _LIBRARY:
        quantizer.saving = lambda: fill() or {}
        try:
            library(os.fspath(files), **options)
        finally:
            quantizer.saving = None


def _anew(
    model: Any, origin: Origin, library: Library, options: dict[str, Any], stage: Path
) -> Path:
    """Compresses the model in memory. Returns the folder."""
    plain, made = stage / "bf16", stage / "model"
    of_files = {name: options[name] for name in _OF_FILES if name in options}
    _by_library(model, library, plain, of_files, lambda: state_dict(model))
    config = json.loads((plain / _CONFIG).read_text(encoding="utf-8"))
    if _pop_mark(config):
        _write(plain / _CONFIG, config)
    indexes = set(plain.rglob("*" + _INDEX))
    _bring(origin, stage / "side", plain, containers=False, rewritten=_REWRITTEN)
    for old in set(plain.rglob("*" + _INDEX)) - indexes:
        old.unlink()
    compress(plain, made, progress=False)
    shutil.rmtree(plain)
    return made


def _fill(origin: Origin, added: dict[str, Tensor], place: Path, files: Path, folder: Path) -> None:
    is_new = not _lies_in(origin, folder)
    _bring(origin, place, files, containers=is_new, rewritten=_REWRITTEN, kept=_REWRITTEN)
    if added:
        _save_added(added, files / WEIGHTS, origin.container.identity)


def _save_added(added: dict[str, Tensor], path: Path, identity: str) -> None:
    """Saves weights that the containers lack, with hashes and the containers' identity for `df11
    verify` (src/open/added.rs)."""
    from safetensors.torch import save_file

    save_file(added, path)
    hashes = json.dumps(_native.tensor_hashes(path))
    metadata = {"format": "pt", "df11.identity": identity, "df11.hashes": hashes}
    save_file(added, path, metadata=metadata)


def _lies_in(origin: Origin, folder: Path) -> bool:
    """Whether the model was loaded from this folder, which still holds it."""
    if origin.is_of_files or not Path(origin.path).is_dir() or not folder.exists():
        return False
    try:
        there = _native.open(folder)
    except Error:
        return False
    is_it = there.is_complete and there.identity == origin.container.identity
    return is_it and folder.samefile(origin.path)


def mark_config(path: Path) -> None:
    """Writes the line of the compression as `df11 compress` does; `df11 decompress` removes it. A
    config that names another quantization has none.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    if _pop_mark(config):
        _write(path, config, MARK)


def _pop_mark(config: dict[str, Any]) -> bool:
    """Removes the name of df11 from a config. False if it names no or another quantization."""
    is_marked = (config.get("quantization_config") or {}).get("quant_method") == "df11"
    return is_marked and config.pop("quantization_config") is not None


def _write(path: Path, config: dict[str, Any], mark: str = "") -> None:
    """Writes a config with the same bytes on all systems: the mark is known by its bytes."""
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    path.write_bytes(text.replace("{", "{" + mark, 1).encode())
