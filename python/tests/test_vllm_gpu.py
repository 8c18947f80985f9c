"""An engine of vLLM on a GPU, with lanes that contradict each other under valid checksums: kernels
alone see it, and the engine stops before tokens of them leave.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import transformers
import vllm  # noqa: F401, without it this file is left out
from damage import damage

pytestmark = pytest.mark.gpu

#: Serves a folder three times and prints the tokens. After the first time one weight in the GPU's
#: memory may become what no encoder writes.
SERVE = """
import json, sys
from vllm import LLM, SamplingParams

def change_records(worker):
    import torch
    from df11._tensor import CompressedTensor

    each = [value for module in worker.get_model().modules() for value in vars(module).values()]
    held = [value for value in each if isinstance(value, CompressedTensor)]
    with torch.inference_mode():
        held[len(held) // 2]._records0[8:40] = 0x77
    torch.cuda.synchronize()

if __name__ == "__main__":
    folder, is_changed, options = json.loads(sys.argv[1])
    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4,
              dtype="bfloat16", gpu_memory_utilization=0.3, **options)
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [7 * at + step for step in range(9)]} for at in (1, 5, 9)]
    for _ in range(3):
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        tokens = [list(answer.outputs[0].token_ids) for answer in answers]
        print("SAID " + json.dumps(tokens), flush=True)
        if is_changed:
            llm.collective_rpc(change_records)
"""
#: Large enough that compression pays on a GPU, whose tables take 16 KiB a matrix.
GEOMETRY = {
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip


def serve(folder: Path, mode: str, residence: str, is_changed: bool, **said: Any) -> Any:
    """Answers of an engine in this process, or with `apart` in one of its own."""
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(said.pop("apart", False)))}
    own |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
    own |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # of the function that workers call
    options = {"model_loader_extra_config": {"mode": mode, "residence": residence}}
    options |= {"enforce_eager": True} | said
    command = [sys.executable, "-c", SERVE, json.dumps([str(folder), is_changed, options])]
    return subprocess.run(
        command, env=os.environ | own, capture_output=True, text=True, timeout=400
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(**{**models.SMALL, **GEOMETRY}, dtype="bfloat16")
    model = models.seeded(transformers.AutoModelForCausalLM.from_config(config))
    _, compressed = models.saved(model, tmp_path_factory.mktemp("engine"))
    return compressed


def test_layers() -> None:
    """The cases of `test_vllm_layers.py`, and products without decoding."""
    program = Path(__file__).with_name("vllm_layers.py")
    command = [sys.executable, str(program)]
    # Also where the environment says that a program's own folder is no place of modules.
    places = os.pathsep.join(filter(None, [str(program.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": places}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert 'RESULT {"layers_failed": []}' in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


def test_whole_weights_are_served(folder: Path) -> None:
    done = serve(folder, "exact", "stored", False)
    said = [line for line in done.stdout.splitlines() if line.startswith("SAID")]
    assert len(said) == 3 and len(set(said)) == 1, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("mode", "residence"), [("exact", "stored"), ("fused", "stored"), ("exact", "fast")]
)
def test_damaged_containers_give_no_tokens(
    folder: Path, mode: str, residence: str, tmp_path: Path
) -> None:
    place = shutil.copytree(folder, tmp_path / "damaged")
    damage(*place.glob("*.df11"))
    done = serve(place, mode, residence, False)
    assert "SAID" not in done.stdout
    assert done.returncode != 0 and "CorruptError" in done.stdout + done.stderr, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("exact", {}),
        ("fused", {"enforce_eager": False}),
        ("exact", {"apart": True}),
        ("fused", {"apart": True, "async_scheduling": True}),
    ],
    ids=["exact", "in graphs", "in a process of its own", "ahead"],
)
def test_damage_in_service_stops_the_engine(folder: Path, mode: str, said: dict[str, Any]) -> None:
    done = serve(folder, mode, "stored", True, **said)
    assert done.stdout.count("SAID") == 1, done.stdout[-500:] + done.stderr[-3000:]
    assert done.returncode != 0 and "CorruptError" in done.stdout + done.stderr, done.stderr[-3000:]
