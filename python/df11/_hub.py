"""Containers in repositories of the Hugging Face Hub.

A local folder whose config names a dtype needs only `folder_of`. For all others, one function of
transformers resolves the files of a checkpoint. It knows only the files of safetensors and PyTorch,
and only it receives the arguments of `from_pretrained`: revision, token, cache, subfolder. No
extension point receives these, and a config cannot name another file. So df11 wraps that function.
If asked for `WEIGHTS`, which the quantizer names, the wrapped function fetches the containers,
passes their folder to the quantizer, and returns it. If the containers' config names another
quantization, it returns tensors for that quantization's loader (`_foreign`), provided that the
containers are in a local folder, in a linked one, or in a repository without other weights. For all
other files it does the same as before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ._errors import unfit
from ._link import WEIGHTS, is_far, is_linked, shown
from ._wrapping import wrap_listed

#: Names that the Hub allows, but with an owner: a name without one may be a mistyped path.
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
#: Module of transformers that finds and loads weights.
_LOADER = "transformers.modeling_utils"


class Expected(str):
    """`WEIGHTS` in a config, with the function that receives the folder once it is known."""

    receive: Callable[[Path], None]


class Handed(str):
    """A name without a file, for which transformers' loader gets tensors."""

    tensors: dict[str, Any]


def wrap_resolution() -> bool:
    """Makes transformers find containers. False if a release lacks the function; then only local
    folders load, and none whose config names another quantization.
    """

    def resolve(call: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        source = arguments.get("pretrained_model_name_or_path")
        name = arguments.get("transformers_explicit_filename")
        if name != WEIGHTS or source is None:
            return _of_library(call, source, arguments)
        options = {name: arguments.get(name) for name in ("user_agent", "tqdm_class")}
        folder = folder_of(source, **options, **(arguments.get("download_kwargs") or {}))
        if isinstance(name, Expected):
            name.receive(folder)
        return [os.fspath(folder / WEIGHTS)], None

    return wrap_listed({f"{_LOADER}:_get_resolved_checkpoint_files": resolve})


def hand(tensors: dict[str, Any]) -> Handed:
    """The name of a weights file that has these tensors, for transformers' loader. Raises
    `ImportError` if this release loads files by another function.
    """

    def load(call: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        file = arguments["checkpoint_file"]
        return dict(file.tensors) if isinstance(file, Handed) else call()

    wrap_listed({f"{_LOADER}:load_state_dict": load})
    file = Handed("tensors.bin")
    file.tensors = tensors
    return file


def _of_library(call: Callable[[], Any], source: Any, arguments: dict[str, Any]) -> Any:
    """Lets transformers find the files, unless a local or linked folder has containers that another
    library's quantizer loads. If it finds no weights in a repository of the Hub, fetches its
    containers.
    """
    if not isinstance(source, (str, os.PathLike)) or arguments.get("gguf_file"):
        return call()
    download = arguments.get("download_kwargs") or {}
    if found := _of_others(Path(source, download.get("subfolder") or "")):
        return found
    try:
        return call()
    except OSError as refusal:
        if not _REPOSITORY.fullmatch(os.fspath(source)):
            raise
        try:
            folder = folder_of(source, **download)
        except OSError as error:
            raise refusal from error
        if found := _of_others(folder):
            return found
        raise


def _of_others(folder: Path) -> tuple[list[str], None] | None:
    """Tensors of containers that another library's quantizer loads; None for others."""
    from ._foreign import is_for_others, tensors_for_others

    return ([hand(tensors_for_others(folder))], None) if is_for_others(folder) else None


def folder_of(
    source: str | os.PathLike[str],
    *,
    subfolder: str | None = None,
    proxies: Any = None,
    commit_hash: str | None = None,
    **download: Any,
) -> Path:
    """The folder of a model's containers: below a local one, fetched from a repository of the Hub,
    or linked to a store.

    `download`: options of `huggingface_hub.snapshot_download`, except proxies; it resolves the
    commit itself. Raises FileNotFoundError if there is no container, ValueError for a revision or
    subfolder that leads elsewhere, and the errors of huggingface_hub.
    """
    check_inside(revision=download.get("revision"), subfolder=subfolder)
    is_here = Path(source).is_dir()
    folder = Path(source, subfolder or "")
    folder = folder if is_here else _fetch(os.fspath(source), subfolder, **download)
    if is_linked(folder) or next(folder.rglob("*.df11"), None) is not None:
        return folder
    if is_here:
        from ._platform import quoted

        raise FileNotFoundError(
            f"{folder} says that its weights are compressed, and holds no *.df11; make it with "
            f"`df11 compress MODEL -o {quoted(folder)}`"
        )
    where = f"{source}/{subfolder}" if subfolder else source
    remedy = f"; make one with `df11 compress MODEL -o FOLDER`, and `hf upload {source} FOLDER`"
    if download.get("local_files_only"):
        remedy = ", nor in the cache; load it once while the Hub can be reached"
    raise FileNotFoundError(
        f"{where} ({download.get('revision') or 'main'}) is no folder of containers: "
        f"no *.df11 is there{remedy}"
    )


def resolve_path(
    path: str | os.PathLike[str], revision: str | None, subfolder: str | None
) -> Path | str:
    """The path itself, or the fetched folder if the path can only be a repository's name. The
    variables and login of huggingface_hub apply. If it is not installed, opening the path says what
    to do.
    """
    check_inside(revision=revision, subfolder=subfolder)
    if is_far(path):
        if revision is None and subfolder is None:
            return os.fspath(path)
        problem = f"{shown(os.fspath(path))} takes no revision and subfolder"
        raise unfit(problem, "write them as in hf://org/name@revision/subfolder")
    here = Path(path)
    is_name = _REPOSITORY.fullmatch(os.fspath(path)) and here.suffix != ".df11"
    if not is_name or here.parent.exists():
        return here / (subfolder or "")
    try:
        return folder_of(path, revision=revision, subfolder=subfolder)
    except ImportError:
        return here


def check_inside(**names: str | None) -> None:
    """Refuses names that lead huggingface_hub, or a folder, out of the repository."""
    for what, name in names.items():
        for kind in (PurePosixPath, PureWindowsPath):
            path = kind(name or "")
            if path.drive or path.root or ".." in path.parts:
                raise unfit(
                    f"{what}={name!r} leads out of the repository", "name one that is in it"
                )


def _fetch(repository: str, subfolder: str | None, **download: Any) -> Path:
    from huggingface_hub import snapshot_download

    prefix = f"{subfolder.strip('/')}/" if subfolder else ""
    place = re.sub(r"([*?[])", r"[\1]", prefix)
    wanted = ["*.df11", WEIGHTS, "config.json"]  # "*" is of subfolders too, as in a local folder
    wanted = [place + name for name in wanted]
    return Path(snapshot_download(repository, allow_patterns=wanted, **download), prefix)
