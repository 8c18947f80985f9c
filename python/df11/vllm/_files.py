"""Chooses the files of a model: its containers, local or in a store, or the files that vLLM would
load.

`config.json` decides. If it names df11, the containers are the weights, and other weights beside
them are ignored. If it does not, a container beside other weights is ignored. If there are only
containers, they are loaded, because `config.json` would name the quantization method of any other
checkpoint.

`vllm serve s3://…`: vLLM supports names of stores for its own streamer, which reads safetensors. It
pulls config and tokenizer into a local folder, keeps the name as `model_weights`, and replaces the
load format for such names. If the config in the store names df11, the plugin does the same with a
linked folder, and puts `_OURS` before the name, so that vLLM does not recognise it as a store's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from vllm.config import ModelConfig
from vllm.logger import init_logger
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict, list_filtered_repo_files

from .._added import load_beside
from .._container import Tensors
from .._errors import Error
from .._hub import check_inside, folder_of
from .._link import WEIGHTS, is_linked, link, open_folder, remember
from .._wrapping import wrap_listed
from ._config import NAME
from ._deferred import Stored

logger = init_logger("vllm.plugins.df11")

#: Names of weights files, as vLLM looks for them.
_OTHERS = ["*.safetensors", "*.bin", "*.pt"]
#: Before a name in `model_weights`: the plugin loads from there.
_OURS = "df11+"
#: How names of heads end.
_HEAD = "lm_head.weight"
#: Names that vLLM takes for those of stores; all others it looks for on the Hub.
_STORES = ("s3://", "gs://", "az://")


def containers_of(
    model: str, revision: str | None, subfolder: str | None, cache: str | None
) -> Path | None:
    """The folder of the containers to load, fetched to `cache` if the model is a repository; None
    if vLLM loads other files. Raises `FileNotFoundError` if the config names df11 and there are no
    containers, `ValueError` for a revision or subfolder that leads elsewhere.
    """
    check_inside(revision=revision, subfolder=subfolder)
    prefix = f"{subfolder.strip('/')}/" if subfolder else ""
    known = is_linked(Path(model)) or _names_df11(model, revision, prefix)
    if known or _are_alone(model, revision, prefix):
        return folder_of(model, revision=revision, subfolder=subfolder, cache_dir=cache)
    return None


def _names_df11(model: str, revision: str | None, prefix: str) -> bool:
    """Whether the subfolder's config, or the model's if there is none, names df11."""
    for place in dict.fromkeys((prefix, "")):
        config = get_hf_file_to_dict(f"{place}config.json", model, revision)
        if isinstance(config, dict):
            named = config.get("quantization_config")
            return isinstance(named, dict) and named.get("quant_method") == NAME
    return False


def _are_alone(model: str, revision: str | None, prefix: str) -> bool:
    """Whether there are containers and no other files that vLLM would load."""

    def listed(patterns: list[str]) -> list[str]:
        names = list_filtered_repo_files(model, allow_patterns=patterns, revision=revision)
        return [name[len(prefix) :] for name in names if name.startswith(prefix)]

    containers = listed(["*.df11"])
    if not containers:
        return False
    others = [name for name in listed(_OTHERS) if "/" not in name and name != WEIGHTS]
    if others:
        logger.warning(
            "df11: %s and other weights lie in %s, whose config.json does not name df11: %s is "
            "loaded. To load the containers, move the other weights away",
            *(containers[0], model, others[0]),
        )
    return not others


def weights_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder's containers, and of the file beside them, by their names. Raises
    `ParameterError` if a container is missing; `ValueError` if the file repeats a tensor of the
    containers, `CorruptError` if it is damaged; the errors of `df11.open`.
    """
    tensors = Tensors(open_folder(folder))
    for name in tensors:
        yield name, Stored(tensors, name).tensor()
    yield from load_beside(folder / WEIGHTS, tensors).items()


def has_head(folder: Path) -> bool:
    """Whether a folder's containers, or the file beside them, have a head that is no copy of an
    embedding. The errors of `df11.open`.
    """
    model, beside = open_folder(folder), folder / WEIGHTS
    if beside.is_file():
        with safe_open(beside, framework="pt") as file:
            if any(name.endswith(_HEAD) for name in file.keys()):  # noqa: SIM118
                return True
    heads = {model[name].hash for name in model if name.endswith(_HEAD)}
    embeddings = {model[name].hash for name in model if "embed" in name or "wte" in name}
    return not heads <= embeddings


def wrap_pulling() -> None:
    """Makes vLLM link folders of containers in stores. Does nothing if a release pulls files in
    another way; then such names fail as they do without df11.
    """
    wrap_listed({"vllm.config:ModelConfig.maybe_pull_model_tokenizer_for_runai": _pull})


def _pull(call: Any, arguments: dict[str, Any]) -> None:
    config, model = arguments["self"], arguments["model"].removeprefix(_OURS)
    folder = None if config.model_weights else _linked(model)
    if folder is None:
        call()
        return
    if config.tokenizer == config.model:
        config.tokenizer = str(folder)
    else:
        call.func(config, str(folder), config.tokenizer)
    config.model, config.model_weights = str(folder), _OURS + model


def _linked(model: str) -> Path | None:
    """The linked folder of a model in a store; None if it is not of df11."""
    if not model.lower().startswith(_STORES):
        return None
    try:
        folder = link(model)
        config = json.loads((folder / "config.json").read_bytes())
    except (Error, OSError, ValueError) as error:
        logger.info("df11: no containers are loaded from a store: %s", error)
        return None
    # The config names df11, or the quantization that the containers' weights have.
    return folder if config.get("quantization_config") else None


def expect(config: ModelConfig) -> None:
    """Records the linked folder of a model in this process, which may not have made the folder."""
    if config.model_weights.startswith(_OURS):
        remember(Path(config.model), config.model_weights.removeprefix(_OURS))
