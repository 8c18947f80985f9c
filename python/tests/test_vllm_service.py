"""Calls of vLLM in service that concern the weights of a model: nothing stale, nothing lost."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from vllm.v1.worker.gpu_worker import Worker

from df11 import _wrapping
from df11.vllm import _workers

#: An engine in a process that vLLM starts by `fork` or `spawn`, from one that has decoded before.
#: Prints what calls in service say, and tokens before and after.
SERVE = """
import json, sys
import df11
from vllm import LLM, SamplingParams

def load_again(worker, folder):
    from safetensors.torch import load_file
    worker.get_model().load_weights(load_file(folder + "/model.safetensors").items())

def reload_given(worker, folder):
    from safetensors.torch import load_file
    worker.model_runner.reload_weights(load_file(folder + "/model.safetensors").items())

def list_weights(worker):
    worker.get_model().state_dict()

if __name__ == "__main__":
    folder, other, out = sys.argv[1:]
    df11.verify(folder)
    decoded = {name: tensor.numpy() for name, tensor in df11.open(folder).items()}
    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4,
              dtype="bfloat16", enforce_eager=True)
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": [7 * step for step in range(9)]}

    def tokens():
        (answer,) = llm.generate([prompt], sampling, use_tqdm=False)
        return list(answer.outputs[0].token_ids)

    calls = {
        "reload": ("reload_weights", {}),
        "reload from a folder": ("reload_weights", {"weights_path": other}),
        "reload what is given": (reload_given, {"folder": other}),
        "load again": (load_again, {"folder": other}),
        "update": ("start_weight_update", {}),
        "save shards": ("save_sharded_state", {"path": out}),
        "list": (list_weights, {}),
        "hash": ("compute_weight_checksums", {}),
        "reset": ("reset_weights", {}),
    }
    said = {"before": tokens()}
    for case, (call, given) in calls.items():
        try:
            said[case] = str(llm.collective_rpc(call, kwargs=given))
        except Exception as error:
            said[case] = f"{type(error).__name__}: {error}"
    print("SAID " + json.dumps(said | {"after": tokens()}), flush=True)
"""
LOADED = "compressed weights cannot be loaded again in service; start a new server"
WRITTEN = "vLLM does not write compressed weights; copy the folder that is served"
SAID = {
    "reload": LOADED,
    "reload from a folder": LOADED,
    "reload what is given": LOADED,
    "load again": LOADED,
    "update": LOADED,
    "save shards": WRITTEN,
    "list": WRITTEN,
}
#: Methods that vLLM 0.26 lacks, and their errors.
NEWER = {
    "hash": "vLLM has no checksums of compressed weights",
    "reset": "so they are not dropped; sleep at level 1",
}


def serve(folder: Path, other: Path, out: Path, start: str) -> dict[str, Any]:
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    own |= {"VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    own |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # of functions that workers call
    own |= {"VLLM_WORKER_MULTIPROC_METHOD": start}
    command = [sys.executable, "-c", SERVE, str(folder), str(other), str(out)]
    done = subprocess.run(
        command, env=os.environ | own, capture_output=True, text=True, timeout=600
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(lines[0][5:])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def said(folders: models.Folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("shards")
    found = serve(folders.df11("llama"), folders.bf16("qwen3"), out, "fork")
    return {**found, "written": [file.name for file in out.iterdir()]}


@pytest.mark.parametrize("case", [*SAID, *NEWER])
def test_weights_are_not_exchanged_or_written_in_service(said: dict[str, Any], case: str) -> None:
    methods = {"hash": "compute_weight_checksums", "reset": "reset_weights"}
    if not hasattr(Worker, methods.get(case, "sleep")):
        pytest.skip(f"this vLLM has no {methods[case]}")
    assert (SAID | NEWER)[case] in said[case]


def test_an_engine_serves_on_after_refusals(said: dict[str, Any]) -> None:
    assert said["after"] == said["before"]
    assert said["written"] == []


@pytest.mark.parametrize("place", sorted(p for p in _wrapping.NEEDED if p.startswith("vllm")))
def test_wrapped_functions_are_there(place: str) -> None:
    owner, name = _wrapping._find(place)
    assert callable(getattr(owner, name))


def model(is_compressed: bool) -> torch.nn.Module:
    layer = torch.nn.Linear(4, 4)
    key = torch.nn.Parameter(torch.zeros(16), requires_grad=False)
    layer.register_parameter("weight_key", key if is_compressed else None)
    return torch.nn.Sequential(layer)


@pytest.mark.parametrize("of_draft", [False, True])
@pytest.mark.parametrize("level", [1, 2])
def test_only_weights_that_can_come_back_are_dropped(level: int, of_draft: bool) -> None:
    """No CPU sleeps, so vLLM's method is a stand-in here."""

    def sleep(*compressed: bool) -> Any:
        target, draft = map(model, compressed)
        runner = SimpleNamespace(get_model=lambda: target, drafter=SimpleNamespace(model=draft))
        worker = SimpleNamespace(model_runner=runner)
        return _workers._sleep(lambda: "asleep", {"self": worker, "level": level})

    assert sleep(False, False) == "asleep"
    if level == 1:
        assert sleep(not of_draft, of_draft) == "asleep"
    else:
        with pytest.raises(ValueError, match="so they are not dropped; sleep at level 1"):
            sleep(not of_draft, of_draft)


def test_models_without_compressed_weights_are_left_as_they_are() -> None:
    dense = model(False)
    _workers.guard(dense)
    assert "load_weights" not in vars(dense) and dense.state_dict()
