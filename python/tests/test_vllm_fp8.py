"""An engine of vLLM with an FP8 checkpoint says what it says without df11, with compressed weights.

On the CPU vLLM multiplies by FP8 weights with a scale for each row as they are, and shuffles those
with scales for blocks; on a GPU it takes both as they are.
"""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
import transformers
import vllm_fp8
from models import Folders
from safetensors.torch import load_file, save_file
from vllm.config.load import LoadConfig
from vllm.model_executor.warmup import deep_gemm_warmup

from df11.vllm import _quantized
from df11.vllm._loader import Df11ModelLoader

#: Serves two folders, one after the other, and prints tokens and the log-probability of each.
SERVE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    *folders, options = json.loads(sys.argv[1])
    sampling = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=1
    )
    prompts = [{"prompt_token_ids": [7 * at + step for step in range(9)]} for at in (1, 5, 9)]
    for folder in folders:
        llm = LLM(folder, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4,
                  dtype="bfloat16", gpu_memory_utilization=0.3, **options)
        said = [answer.outputs[0] for answer in llm.generate(prompts, sampling, use_tqdm=False)]
        rows = [
            [(token, at[token].logprob) for token, at in zip(one.token_ids, one.logprobs)]
            for one in said
        ]
        print("SAID " + json.dumps(rows), flush=True)
        del llm
"""
GEOMETRY = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "head_dim": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048,
    "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    "decoder_sparse_step": 1,
}  # fmt: skip
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": vllm_fp8.CHANNELS},
}
BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [vllm_fp8.BLOCK] * 2,
    "modules_to_not_convert": ["lm_head", *(f"model.layers.{at}.mlp.gate" for at in range(2))],
}
GPU = torch.cuda.is_available()


def checkpoint(folder: Path, kind: str) -> Path:
    """A folder with linear layers in FP8."""
    is_mixture, is_in_blocks = kind == "mixture", kind != "channels"
    make: Any = transformers.Qwen3MoeConfig if is_mixture else transformers.LlamaConfig
    config = make(**{**models.SMALL, **GEOMETRY, **(MIXTURE if is_mixture else {})})
    config.dtype = "bfloat16"
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    models.seeded(model).save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        quantize = vllm_fp8.in_blocks if is_in_blocks else vllm_fp8.in_rows
        scale = f"{name}_scale_inv" if is_in_blocks else f"{name}_scale"
        weights[name], weights[scale] = quantize(weights[name])
    save_file(weights, file, {"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    said["quantization_config"] = BLOCKS if is_in_blocks else CHANNELS
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def serve(folders: list[Path], **options: Any) -> tuple[list[Any], str]:
    """Answers of engines with these folders, and what the engines logged."""
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    own |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    own |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_USE_DEEP_GEMM": "0"}
    own |= {} if GPU else {"TORCHDYNAMO_DISABLE": "1"}
    told = json.dumps([*folders, options], default=str)
    command = [sys.executable, "-c", SERVE, told]
    done = subprocess.run(
        command, env=os.environ | own, capture_output=True, text=True, timeout=600
    )
    said = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert len(said) == len(folders), done.stdout[-1000:] + done.stderr[-3000:]
    return said, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("kind", "is_eager"),
    [
        pytest.param("channels", True, marks=pytest.mark.gpu if GPU else ()),
        pytest.param("blocks", True, marks=pytest.mark.gpu),
        pytest.param("blocks", False, marks=pytest.mark.gpu),
        pytest.param("mixture", True, marks=pytest.mark.gpu),
        pytest.param("mixture", False, marks=pytest.mark.gpu),
    ],
)
def test_tokens_and_probabilities_are_those_without_df11(
    kind: str, is_eager: bool, tmp_path: Path
) -> None:
    plain = checkpoint(tmp_path / "fp8", kind)
    options: dict[str, Any] = {"enforce_eager": is_eager}
    # By default inductor chooses how norms add by timing them.
    norms = {"rms_norm": "vllm_c", "fused_add_rms_norm": "vllm_c"}
    options |= {"kernel_config": {"ir_op_priority": norms}} if GPU else {}
    said, log = serve([plain, models.compressed(plain, tmp_path / "df11")], **options)
    assert said[0] == said[1]
    assert "df11: 8 FP8 weights are compressed" in log
    assert "stay uncompressed" not in log


@pytest.mark.skipif(
    GPU or not torch.cpu._is_amx_tile_supported(), reason="that product of vLLM needs AMX"
)
def test_weights_that_vllm_shuffles_stay_as_it_leaves_them(tmp_path: Path) -> None:
    plain = checkpoint(tmp_path / "fp8", "blocks")
    said, log = serve([plain, models.compressed(plain, tmp_path / "df11")], enforce_eager=True)
    assert said[0] == said[1]
    assert "df11: 8 FP8 weights stay uncompressed" in log


def test_other_methods_get_decoded_weights(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    config: Any = SimpleNamespace(get_name=lambda: "gptq")
    model: Any = SimpleNamespace(model=str(folders.df11("llama")), revision=None)
    logger = logging.getLogger("vllm.plugins.df11")
    logger.addHandler(caplog.handler)
    try:
        assert Df11ModelLoader(LoadConfig())._adopt(config, model) is None
    finally:
        logger.removeHandler(caplog.handler)
    assert "gptq gets decoded weights" in caplog.text
    assert "fp8 and compressed-tensors keep weights compressed" in caplog.text


def test_deep_gemm_warms_up_with_decoded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels take memory, which a compressed weight has none of."""
    found: list[Any] = []
    monkeypatch.setattr(deep_gemm_warmup, "fp8_gemm_nt", lambda _, pair, out: found.extend(pair))
    monkeypatch.setattr(deep_gemm_warmup, "_get_fp8_gemm_nt_m_values", lambda *_: [1])
    monkeypatch.setattr(
        deep_gemm_warmup, "get_mk_alignment_for_contiguous_layout", lambda: [vllm_fp8.BLOCK] * 2
    )
    assert _quantized.wrap_warm_up()
    weight = torch.randn(128, 128).to(vllm_fp8.FP8)
    shown = _quantized.Shown(weight, lambda: weight)
    deep_gemm_warmup._deepgemm_fp8_gemm_nt_warmup(shown, torch.ones(1, 1), 4, None)
    assert found[0] is weight
