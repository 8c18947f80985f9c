"""An engine of vLLM, on the CPU, with compressed weights: the plugin is found, and tokens are BF16's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import models
from vllm.config.load import LoadConfig

import df11
from df11.vllm import register

#: Serves folders, one after another, and prints tokens of each, or what went wrong.
SERVE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    for folder, options in json.loads(sys.argv[1]):
        try:
            llm = LLM(folder, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4,
                      dtype="bfloat16", **options)
            prompts = [{"prompt_token_ids": [7 * at + step for step in range(9)]} for at in (1, 5, 9)]
            sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
            answers = llm.generate(prompts, sampling, use_tqdm=False)
            said = [list(answer.outputs[0].token_ids) for answer in answers]
            del llm
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print("SAID " + json.dumps(said), flush=True)
"""


def serve(*jobs: tuple[Path, dict[str, Any]]) -> list[Any]:
    """What engines say, in one process, which imports vLLM once."""
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    told = json.dumps([(str(folder), options) for folder, options in jobs])
    done = subprocess.run(
        [sys.executable, "-c", SERVE, told], env=environment, capture_output=True, text=True
    )
    said = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert len(said) == len(jobs), done.stderr[-3000:]
    return said


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A mixture with a dense layer and a tied head, in BF16 and compressed."""
    root = tmp_path_factory.mktemp("engine")
    bf16 = models.causal("qwen3-moe-mixed", root / "bf16")
    df11.compress(bf16, root / "df11", progress=False)
    return bf16, root / "df11"


def test_tokens_are_those_of_bf16(folders: tuple[Path, Path]) -> None:
    bf16, compressed = folders
    eager = {"enforce_eager": True}
    expected, *found = serve(
        (bf16, eager),
        (compressed, {}),
        (compressed, {**eager, "model_loader_extra_config": {"mode": "exact"}}),
        (bf16, {**eager, "quantization": "df11"}),
        (bf16, {**eager, "model_loader_extra_config": {"mode": "exact"}}),
        (compressed, {**eager, "load_format": "dummy"}),
    )
    assert found[:3] == [expected] * 3
    assert "options of df11; add --quantization df11" in found[3]
    assert "load the BF16 checkpoint for that" in found[4]


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
