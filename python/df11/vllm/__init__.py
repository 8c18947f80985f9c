"""vLLM serves compressed models: a plugin, which vLLM finds by its entry point.

    pip install "df11[vllm]"
    df11 compress Qwen3-8B -o Qwen3-8B-df11
    vllm serve Qwen3-8B-df11

```text
 _config    quantization method "df11", found by config.json
 _deferred  weights without memory, which vLLM's own loading code fills and slices: they only record
 _loader    the model loader: lends names and shapes of a container to that code
 _fill      loads what was recorded, in one pass, and gives layers their arrays
 _layers    what a layer has of a weight, before it is loaded and afterwards; layers with
            matrices, vocabularies; what users choose: mode and residence
 _experts   mixtures of experts
 _operators operators of these layers, for torch.compile and CUDA graphs
```
"""

from __future__ import annotations

_registered = False


def register() -> None:
    """What vLLM calls in each of its processes. Once is enough; more often changes nothing.

    # Errors
    `ImportError` without vLLM.
    """
    global _registered
    if _registered:
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    from ._config import NAME, Df11Config
    from ._loader import register_loader

    register_quantization_config(NAME)(Df11Config)
    register_loader()
    _registered = True
