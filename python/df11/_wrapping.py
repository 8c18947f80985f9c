"""Functions of other libraries that df11 wraps, because the libraries have no extension points for
what df11 adds.

A release that lacks one of them is refused with its name, as `_doctor.mismatch` says, before
anything is changed. If a release lacks a function in `OPTIONAL`, what that function is for works as
without df11.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ._doctor import mismatch

_NEEDED = """
transformers.modeling_utils:load_state_dict
transformers.modeling_utils:PreTrainedModel.save_pretrained
transformers.pipelines.base:Pipeline.forward
transformers.quantizers.auto:AutoHfQuantizer.merge_quantization_configs

diffusers.loaders.single_file_model:FromOriginalModelMixin.from_single_file
diffusers.loaders.single_file_utils:load_state_dict
diffusers.models.modeling_utils:_fetch_index_file
diffusers.models.modeling_utils:_get_model_file
diffusers.models.modeling_utils:ModelMixin.save_pretrained
diffusers.pipelines.pipeline_utils:DiffusionPipeline.maybe_free_model_hooks
diffusers.quantizers.auto:DiffusersAutoQuantizer.merge_quantization_configs

vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights
vllm.v1.worker.gpu.model_runner:GPUModelRunner.reload_weights
vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model
vllm.v1.worker.gpu_worker:Worker.execute_model
vllm.v1.worker.gpu_worker:Worker.sample_tokens
vllm.v1.worker.gpu_worker:Worker.save_sharded_state
vllm.v1.worker.gpu_worker:Worker.save_tensorized_model
vllm.v1.worker.gpu_worker:Worker.sleep
vllm.v1.worker.gpu_worker:Worker.start_draft_weight_update
vllm.v1.worker.gpu_worker:Worker.start_weight_update
"""
_OPTIONAL = """
transformers.configuration_utils:PreTrainedConfig.get_config_dict
transformers.integrations.deepgemm:load_deepgemm_kernel
transformers.integrations.finegrained_fp8:load_finegrained_fp8_kernel
transformers.modeling_utils:_get_resolved_checkpoint_files
transformers.quantizers.base:HfQuantizer.get_state_dict_and_metadata
transformers.quantizers.base:HfQuantizer.param_element_size
transformers.quantizers.base:HfQuantizer.postprocess_model
transformers.quantizers.base:HfQuantizer.preprocess_model
transformers.utils.hub:cached_files

vllm.config:ModelConfig.maybe_pull_model_tokenizer_for_runai
vllm.config:VllmConfig._uses_breakable_cudagraph_for_batch_invariance
vllm.model_executor.warmup.deep_gemm_warmup:_deepgemm_fp8_gemm_nt_warmup
vllm.model_executor.warmup.deep_gemm_warmup:_deepgemm_grouped_fp8_gemm_nt_contiguous_warmup
vllm.v1.worker.gpu_worker:Worker.compute_weight_checksums
vllm.v1.worker.gpu_worker:Worker.reset_weights
"""
NEEDED, OPTIONAL = frozenset(_NEEDED.split()), frozenset(_OPTIONAL.split())

#: Gets a function that calls the original, and the arguments by their names.
Replacement = Callable[[Callable[[], Any], dict[str, Any]], Any]


def wrap_listed(replacements: dict[str, Replacement]) -> bool:
    """Wraps some of these functions, once each: all, or none if this release lacks an optional one.
    Raises `ImportError` if it lacks another one.
    """
    found = {place: _find(place) for place in replacements}
    lacking = wrap(*((*found[place], each) for place, each in replacements.items()))
    if lacking is None:
        return True
    place = next(place for place, (_, name) in found.items() if name == lacking)
    if place in OPTIONAL:
        return False
    library = place.partition(".")[0]
    version = sys.modules[library].__version__
    raise ImportError(mismatch(library, version, place.partition(":")[2]))


def _find(place: str) -> tuple[Any, str]:
    """The owner of a listed function, and the function's name there."""
    assert place in NEEDED or place in OPTIONAL, place
    module, _, path = place.partition(":")
    found: Any = import_module(module)
    *outer, name = path.split(".")
    owner = functools.reduce(lambda owner, each: getattr(owner, each, None), outer, found)
    return owner, name


def wrap(*functions: tuple[Any, str, Replacement]) -> str | None:
    """Replaces functions of a library, named by owner and name, once each, by
    `replacement(call, arguments)`, where `call` runs the original. If this release lacks one,
    changes nothing and returns its name.
    """
    for owner, name, _ in functions:
        if not hasattr(owner, name):
            return name
    for each in functions:
        _wrap(*each)
    return None


def _wrap(owner: Any, name: str, replacement: Replacement) -> None:
    original = inspect.getattr_static(owner, name)
    function: Any = original.__func__ if isinstance(original, classmethod) else original
    if hasattr(function, "_df11"):
        return
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        return replacement(functools.partial(function, *args, **kwargs), arguments)

    wrapped._df11 = True  # type: ignore[attr-defined]
    setattr(owner, name, classmethod(wrapped) if isinstance(original, classmethod) else wrapped)
