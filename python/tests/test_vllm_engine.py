"""An engine of vLLM with compressed weights, on the CPU: says what it says with BF16."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from hub import Hub, Repository
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from vllm.config import VllmConfig
from vllm.config.load import LoadConfig
from vllm.config.offload import OffloadConfig, UVAOffloadConfig

import df11
from df11.vllm import register

#: Serves folders, one after another, and prints tokens of each, or what went wrong.
SERVE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

PROMPTS = [{"prompt_token_ids": [7 * at + step for step in range(9)]} for at in (1, 5, 9)]
SAMPLING = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)

def serve(folder, adapter, **options):
    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4,
              dtype="bfloat16", **options)
    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    answers = llm.generate(PROMPTS, SAMPLING, lora_request=lora, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]

if __name__ == "__main__":
    for folder, adapter, options in json.loads(sys.argv[1]):
        try:
            said = serve(folder, adapter, **options)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print("SAID " + json.dumps(said), flush=True)
"""
EAGER = {"enforce_eager": True}
EXACT = {"model_loader_extra_config": {"mode": "exact"}}


def serve(*jobs: tuple[Path | str, Path | None, dict[str, Any]], **settings: str) -> list[Any]:
    """What engines say, in one process, which imports vLLM once: a folder, an adapter, options."""
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **settings,
    }
    command = [sys.executable, "-c", SERVE, json.dumps(jobs, default=str)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    said = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert len(said) == len(jobs), done.stderr[-3000:]
    return said


def both(model: str, root: Path) -> tuple[Path, Path]:
    """Folders of a model in BF16, and compressed."""
    bf16 = models.causal(model, root / "bf16")
    df11.compress(bf16, root / "df11", progress=False)
    return bf16, root / "df11"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A mixture with a dense layer and a tied head, in BF16 and compressed."""
    return both("qwen3-moe-mixed", tmp_path_factory.mktemp("engine"))


def test_tokens_are_those_of_bf16(folders: tuple[Path, Path]) -> None:
    bf16, compressed = folders
    expected, *found = serve(
        (bf16, None, EAGER),
        (compressed, None, {}),
        (compressed, None, EAGER | EXACT),
        (bf16, None, {**EAGER, "quantization": "df11"}),
        (bf16, None, EAGER | EXACT),
        (compressed, None, {**EAGER, "load_format": "dummy"}),
    )
    assert found[:3] == [expected] * 3
    assert "options of df11; add --quantization df11" in found[3]
    assert "load the BF16 checkpoint for that" in found[4]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Llama in BF16, and compressed."""
    return both("llama", tmp_path_factory.mktemp("llama"))


def test_speculation_two_stages_and_repositories_leave_tokens_as_they_are(
    llama: tuple[Path, Path], tmp_path: Path
) -> None:
    bf16, compressed = llama
    (other := tmp_path / "gptq").mkdir()
    config = json.loads((bf16 / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (other / "config.json").write_text(json.dumps(config))
    hub = Hub()
    hub.repositories["someone/llama-df11"] = Repository(compressed)
    draft = {"num_speculative_tokens": 3, "method": "draft_model", "model": str(compressed)}
    ngram = {"num_speculative_tokens": 3, "method": "ngram", "prompt_lookup_max": 3}
    options = EAGER | EXACT
    plain, *found, refused = serve(
        (bf16, None, EAGER),
        (compressed, None, {**options, "speculative_config": ngram}),
        (compressed, None, {**options, "speculative_config": draft}),
        (compressed, None, {**options, "pipeline_parallel_size": 2}),
        ("someone/llama-df11", None, options),
        (other, None, {**EAGER, "quantization": "df11"}),
        HF_ENDPOINT=hub.url,
        HF_HOME=str(tmp_path / "home"),
        HF_HUB_OFFLINE="0",
        HF_HUB_DISABLE_XET="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    assert found == [plain] * 4
    containers = {file.name for file in compressed.glob("*.df11")}
    assert {name for name in hub.downloaded() if name.endswith(".df11")} == {
        f"someone/llama-df11/{name}" for name in containers
    }
    assert "(gptq) does not match the quantization method" in refused


def test_adapters_change_what_compressed_weights_say(
    llama: tuple[Path, Path], tmp_path: Path
) -> None:
    bf16, compressed = llama
    adapter = tmp_path / "adapter"
    get_peft_model(
        AutoModelForCausalLM.from_pretrained(bf16),
        LoraConfig(
            r=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights="gaussian"
        ),
    ).save_pretrained(adapter)
    tensors = load_file(adapter / "adapter_model.safetensors")
    generator = torch.Generator().manual_seed(2)
    noisy = {
        name: 0.1 * torch.randn(value.shape, generator=generator) for name, value in tensors.items()
    }
    save_file(noisy, adapter / "adapter_model.safetensors")
    options = {**EAGER, "enable_lora": True, "max_lora_rank": 8}
    plain, expected, found = serve(
        (bf16, None, EAGER), (bf16, adapter, options), (compressed, adapter, options)
    )
    assert found == expected != plain


def test_the_entry_point_is_named() -> None:
    (found,) = (each for each in entry_points(group="vllm.general_plugins") if each.name == "df11")
    assert found.load() is register


def test_options_and_config_are_checked() -> None:
    register()
    from df11.vllm._config import Df11Config
    from df11.vllm._loader import Df11ModelLoader

    config = Df11Config.from_config({"quant_method": "df11"})
    assert (config.mode, config.residence) == ("fused", "auto")
    config.choose({"mode": "exact", "residence": "fast"})
    assert config.exact and config.residence == "fast"
    with pytest.raises(ValueError, match="mode='quick' is unknown; choose one of fused, exact"):
        config.choose({"mode": "quick"})
    with pytest.raises(ValueError, match="give options by --model-loader-extra-config"):
        Df11Config.from_config({"quant_method": "df11", "mode": "exact"})
    loader = Df11ModelLoader(
        LoadConfig(load_format="df11", model_loader_extra_config={"mode": "exact"})
    )
    assert (loader.options, loader.load_config.load_format) == ({"mode": "exact"}, "auto")
    with pytest.raises(ValueError, match="Unexpected extra config keys"):
        Df11ModelLoader(LoadConfig(model_loader_extra_config={"residense": "fast"}))


def test_what_cannot_work_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    from df11.vllm._config import Df11Config
    from df11.vllm._loader import _refuse

    config = Df11Config()
    _refuse(VllmConfig(), config)
    offload = OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1))
    with pytest.raises(ValueError, match="leave out --cpu-offload-gb"):
        _refuse(VllmConfig(offload_config=offload), config)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match=r'add --model-loader-extra-config .*"exact"'):
        _refuse(VllmConfig(), config)
    config.choose({"mode": "exact"})
    _refuse(VllmConfig(), config)


def test_weights_are_not_loaded_again_in_service() -> None:
    from vllm.config import ModelConfig

    from df11.vllm._loader import Df11ModelLoader

    layer = torch.nn.Linear(4, 4)
    layer.weight_key = torch.nn.Parameter(torch.zeros(16), requires_grad=False)
    loader = Df11ModelLoader(LoadConfig())
    with pytest.raises(ValueError, match="cannot be loaded again in service; sleep at level 1"):
        loader.get_all_weights(ModelConfig.__new__(ModelConfig), torch.nn.Sequential(layer))


def test_compiled_graphs_are_kept_by_which_weights_are_ordinary() -> None:
    from df11.vllm._loader import tell_compiler

    config = VllmConfig()
    before = config.compute_hash()
    layer = torch.nn.Linear(4, 4)
    model = torch.nn.ModuleDict({"down": layer})
    layer.weight_key = torch.zeros(16)
    tell_compiler(model, config)
    assert config.compute_hash() == before
    layer.weight_key = None
    tell_compiler(model, config)
    assert config.additional_config == {"df11 ordinary weights": ["down"]}
    assert config.compute_hash() != before
