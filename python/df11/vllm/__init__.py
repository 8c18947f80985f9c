"""A plugin with which vLLM serves compressed models. vLLM finds it by its entry point.

pip install "df11[vllm]"
df11 compress Qwen3-8B -o Qwen3-8B-df11
vllm serve Qwen3-8B-df11
"""

from __future__ import annotations

_registered = False


def register() -> None:
    """Registers df11. vLLM calls it in each of its processes; further calls change nothing. Raises
    `ImportError` without vLLM.
    """
    global _registered
    if _registered:
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    from ._config import NAME, Df11Config, wrap_graphs
    from ._files import wrap_pulling
    from ._loader import register_loader

    register_quantization_config(NAME)(Df11Config)
    register_loader()
    wrap_pulling()
    wrap_graphs()
    _registered = True
