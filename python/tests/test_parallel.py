"""Tensor parallelism of transformers models: two processes, each with its own shards.

All cases run in one pair of processes, which is this file as a program.
"""

import faulthandler
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import (
    SMALL,
    compressed,
    config_of,
    equal,
    greedy,
    load,
    prompt,
    saved,
    seeded,
    with_head_apart,
)

import df11
from df11 import _plan
from df11._modules import local
from df11._tensor import CompressedTensor

#: All slices begin and end between tiles.
EVEN = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 1024,
    "tie_word_embeddings": False,
}  # fmt: skip
#: No slice of rows does, and few of columns.
ODD = {
    "hidden_size": 320, "intermediate_size": 1320, "num_hidden_layers": 2,
    "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 40, "vocab_size": 1000,
    "bos_token_id": 1, "eos_token_id": 999, "tie_word_embeddings": False,
}  # fmt: skip
OWN = {"even": ("LlamaConfig", EVEN), "odd": ("Qwen2Config", ODD)}
#: Architectures whose logits are compared, besides `models.CAUSAL`.
MODELS = ["even", "odd", "llama-tied", "llama-bias", "phi3", "gemma2", "mixtral", "qwen3-moe"]
#: Tied models whose head is in a shard of its own, and whether it has the embedding's values.
APART = {"apart": True, "apart, other": False}
PROMPT = prompt(2, 19)


def config(name: str) -> Any:
    if name not in OWN:
        return config_of(name)
    kind, changes = OWN[name]
    return getattr(transformers, kind)(**{**SMALL, **changes}, dtype="bfloat16")


# ---- what each of two processes does ----


def parallel(folder: Path, **options: Any) -> Any:
    from transformers.distributed import DistributedConfig

    distributed = DistributedConfig(**{"tp_size": 2, "tp_plan": "auto", **options.pop("told", {})})
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=distributed, **options
    )


def both(root: Path, name: str, told: Any = None, **said: Any) -> tuple[Any, Any]:
    folder, options = root / name, {"told": told or {}}
    original = parallel(folder / "bf16", **options)
    if said:
        options["config"] = transformers.AutoConfig.from_pretrained(folder / "df11")
        options["config"].quantization_config = {"quant_method": "df11", **said}
    return original, parallel(folder / "df11", **options)


def logits(model: Any) -> Any:
    return model(PROMPT.to(model.device)).logits


def shapes(model: Any) -> set[tuple[Any, ...]]:
    return {(name, value.shape, local(value).shape) for name, value in model.named_parameters()}


def kinds(model: Any) -> dict[str, Any]:
    return {name: type(local(p)) for name, p in model.named_parameters() if p.dim() > 1}


def same_steps(models: tuple[Any, Any]) -> Any:
    """Asserts that all steps give the same logits; the report of the compressed model."""
    assert equal(*(greedy(model, PROMPT, 6) for model in models))
    report = df11.report(models[1], verify=True)
    assert report.verified
    return report


def compare(root: Path, name: str) -> int:
    """A model with gradients and without; the bytes that it holds here."""
    original, model = models = both(root, name, residence="stored")
    report = same_steps(models)
    assert torch.equal(logits(original), logits(model)) and report.modes == ["exact"]
    # Older releases leave it whole.
    assert {name for name, *_ in shapes(original) ^ shapes(model)} <= {"model.embed_tokens.weight"}
    found = kinds(model)
    assert CompressedTensor in found.values()
    if name == "even":
        assert set(found.values()) == {CompressedTensor}
        assert set(report.residences.values()) == {"stored", "ordinary"}
    if name == "odd":
        # Slices within tiles stay compressed if that saves: the one process has 40 of 64 rows in
        # tiles of the keys, the other 40 of 48. On GPUs, tests compress all.
        is_last = torch.distributed.get_rank() == 1
        for part in ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj"):
            assert found[f"model.layers.0.{part}.weight"] is CompressedTensor
        keys = CompressedTensor if is_last else torch.Tensor
        assert found["model.layers.0.self_attn.k_proj.weight"] is keys or torch.cuda.is_available()
    return int(report.device_bytes)


def elsewhere(root: Path, name: str, **said: Any) -> None:
    """Weights that lie on GPUs in another form, or not there."""
    form = said.get("residence", "streamed")
    assert form in same_steps(both(root, name, **said)).residences.values()


def fused(root: Path) -> None:
    original, model = both(root, "even", mode="fused")
    steps = greedy(original, PROMPT, 6)
    # Both go on with the same tokens: two may be nearer to each other than products are.
    for one, other in zip(steps, greedy(model, PROMPT, 6, steps), strict=True):
        assert torch.allclose(one, other, rtol=0.02, atol=0.02)
    assert df11.report(model).modes == ["fused"]


def by_argument(root: Path) -> None:
    """`tp_plan` as an argument of its own, as releases before 5.18 want it."""
    kind = transformers.AutoModelForCausalLM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = kind.from_pretrained(root / "even/df11", tp_plan="auto")
    assert torch.equal(logits(model), logits(parallel(root / "even/bf16")))


def used(root: Path) -> None:
    """Uses of a model besides its forward."""
    models = both(root, "even")
    prompt = PROMPT.to(models[0].device)
    hidden = torch.ones(1, 3, EVEN["hidden_size"], dtype=torch.bfloat16, device=prompt.device)

    def gradient(which: Any) -> Any:
        inputs = hidden.clone().requires_grad_()
        which(inputs_embeds=inputs).logits.float().sum().backward()
        return inputs.grad

    @torch.no_grad()
    def compiled(which: Any) -> Any:
        return torch.compile(which, backend="eager", fullgraph=True)(prompt).logits

    uses: dict[str, Callable[[Any], Any]] = {
        "generate": lambda which: which.generate(prompt, max_new_tokens=5, do_sample=False),
        "gradient": gradient,
        "compiled": compiled,
        "part": lambda which: which.model.layers[1].mlp(hidden),
        "weight": lambda which: which.lm_head.weight.full_tensor(),
    }
    for name, use in uses.items():
        assert torch.equal(*map(use, models)), name


def whole_again(root: Path) -> None:
    """A state dict of whole weights, which all have; and a folder, which one of them saves."""
    model = parallel(root / "odd/df11")
    state, expected = df11.state_dict(model), load(root / "odd/bf16").state_dict()
    assert state.keys() == expected.keys()
    assert equal(expected.values(), (state[name] for name in expected))
    model.save_pretrained(root / "saved")
    torch.distributed.barrier()
    assert torch.equal(logits(parallel(root / "saved")), logits(model))
    assert (root / "saved/config.json").exists()
    if torch.distributed.get_rank() == 0:  # one of them knows, and all refuse
        with torch.no_grad():
            model.model.norm.weight.add_(1)
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*df11\.state_dict"):
        model.save_pretrained(root / "refused")


def experts(root: Path) -> None:
    """Whole experts on each process: by the one option or the other."""
    from transformers.distributed import DistributedConfig

    newer = hasattr(DistributedConfig(), "ep_size")
    told = {"ep_size": 2} if newer else {"enable_expert_parallel": True}
    models = both(root, "qwen3-moe", told)
    same_steps(models)
    found = {kind for name, kind in kinds(models[1]).items() if ".experts." in name}
    assert found == {CompressedTensor}


def head_apart(root: Path) -> None:
    """A tied head in a shard of its own is tied if it has the values of the embedding."""
    for name, is_same in APART.items():
        same_steps(models := both(root, name))
        for each in models:
            assert (each.lm_head.weight is each.model.embed_tokens.weight) == is_same


def refusal(root: Path) -> None:
    """Other ways to distribute a model."""
    with pytest.raises(ValueError, match="fsdp_size"):
        parallel(root / "even/df11", told={"tp_size": 1, "tp_plan": None, "fsdp_size": 2})


CASES: dict[str, Callable[[Path], Any]] = {
    "fused": fused,
    "by argument": by_argument,
    "used": used,
    "whole again": whole_again,
    "experts": experts,
    "head apart": head_apart,
    "refusal": refusal,
}
ON_GPUS: dict[str, Callable[[Path], Any]] = {
    "fast": partial(elsewhere, name="even", residence="fast"),
    "fast, odd": partial(elsewhere, name="odd", residence="fast"),
    "fast, mixture": partial(elsewhere, name="qwen3-moe", residence="fast"),
    "streamed": partial(elsewhere, name="even", streamed=True),
}


#: Seconds after which a process that waits says where, and ends; in CI all cases take 120.
PATIENCE = 500


def main(root: Path) -> None:
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    torch.set_num_threads(1)
    # Like the fixture compressed_on_gpus; and cuDNN's attention has other bits from run to run.
    if torch.cuda.is_available():
        _plan.MIN_SAVED = -(1 << 20)
    torch.backends.cuda.enable_cudnn_sdp(False)
    # The bytes of a process with the whole model.
    found: dict[str, Any] = {"alone": df11.report(load(root / "even/df11")).device_bytes}
    cases = {name: partial(compare, name=name) for name in MODELS} | CASES
    # A process that fails ends, and torchrun ends the other one, which would wait for it.
    for name, case in (cases | (ON_GPUS if torch.cuda.is_available() else {})).items():
        found[name] = case(root)
    rank = torch.distributed.get_rank()
    (root / f"found-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


# ---- what came out ----


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu(2))], name="found"
)
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("parallel")
    for name in MODELS:
        saved(seeded(transformers.AutoModelForCausalLM.from_config(config(name))), root / name)
    for name, is_same in APART.items():
        source = with_head_apart(root / "llama-tied/bf16", root / name / "bf16", is_same)
        compressed(source, root / name / "df11")
    # All by the loopback: the names of machines and their networks do not concern this test.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "localhost", "--nproc-per-node", "2", __file__, os.fspath(root)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    if request.param == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE + 100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((root / f"found-{rank}.json").read_text("utf-8")) for rank in range(2)]


def test_all_cases_pass_in_both_processes(found: list[dict[str, Any]]) -> None:
    assert all(each.keys() >= {*MODELS, *CASES} for each in found)


def test_each_process_holds_its_slices_alone(found: list[dict[str, Any]]) -> None:
    whole = found[0]["alone"]
    # On GPUs also tables, which count in models as small as this one.
    tables = 16384 * 16 if "fast" in found[0] else 0
    held = [each["even"] - tables for each in found]
    assert all(size < 0.52 * whole for size in held)
    # Together they hold what one process would, norms and codebooks twice.
    assert whole < sum(held) < 1.04 * whole


if __name__ == "__main__":
    main(Path(sys.argv[1]))
