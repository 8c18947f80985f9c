"""`vllm serve s3://…`: vLLM has names of stores for its own streamer, which reads safetensors.

vLLM pulls config and tokenizer into a local folder and keeps the name as `model_weights`; for such
names it replaces the load format. If the config in the store names df11, the plugin does the same
with a linked folder, and keeps the name after `_OURS`, which vLLM takes for no store's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig
from vllm.logger import init_logger

from .._errors import Error
from .._link import link, remember
from .._wrapping import wrap_listed
from ._config import NAME

logger = init_logger("vllm.plugins.df11")

#: Before a name in `model_weights`: the plugin loads from there.
_OURS = "df11+"
#: Names that vLLM takes for those of stores; all others it looks for on the Hub.
_STORES = ("s3://", "gs://", "az://")


def wrap_pulling() -> None:
    """Makes vLLM link folders of containers in stores. Does nothing if a release pulls otherwise:
    then such names fail as without df11.
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
    is_ours = (config.get("quantization_config") or {}).get("quant_method") == NAME
    return folder if is_ours else None


def expect(config: ModelConfig) -> None:
    """Notes the linked folder of a model in this process, which may not have made it."""
    if config.model_weights.startswith(_OURS):
        remember(Path(config.model), config.model_weights.removeprefix(_OURS))
