"""Tensor parallelism of transformers models: two processes, each with its own shards.

All cases run in one pair of processes, which is this file as a program; tests look at what they
wrote.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import SMALL, config_of, greedy, load, prompt, saved, seeded

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
#: Of these and of `models.CAUSAL`, logits are compared.
MODELS = ["even", "odd", "llama-tied", "llama-bias", "phi3", "gemma2", "mixtral", "qwen3-moe"]
PROMPT = prompt(2, 19)
STEPS = 6


def _config(name: str) -> Any:
    if name not in OWN:
        return config_of(name)
    kind, changes = OWN[name]
    return getattr(transformers, kind)(**{**SMALL, **changes}, dtype="bfloat16")


# ---- what each of two processes does ----


def _load(folder: Path, **options: Any) -> Any:
    from transformers.distributed import DistributedConfig

    distributed = DistributedConfig(**{"tp_size": 2, "tp_plan": "auto", **options.pop("told", {})})
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=distributed, **options
    )


def _of_both(root: Path, name: str, **options: Any) -> tuple[Any, Any]:
    return _load(root / name / "bf16", **options), _load(root / name / "df11", **options)


def _logits(model: Any) -> Any:
    return model(PROMPT.to(model.device)).logits


def _compare(original: Any, model: Any) -> dict[str, Any]:
    """Of all steps whether logits are the same, with and without gradients, and what is held."""
    pairs = zip(greedy(original, PROMPT, STEPS), greedy(model, PROMPT, STEPS), strict=True)
    report = df11.report(model, verify=True)
    return {
        "same": [torch.equal(one, other) for one, other in pairs],
        "same_with_gradients": torch.equal(_logits(original), _logits(model)),
        "held": report.device_bytes,
        "verified": report.verified,
        "residences": report.residences,
        "modes": report.modes,
        "differing_shapes": sorted({name for name, *_ in _shapes(original) ^ _shapes(model)}),
        "kinds": {
            name: type(local(value)).__name__
            for name, value in model.named_parameters()
            if value.dim() > 1
        },
    }


def _shapes(model: Any) -> set[tuple[Any, ...]]:
    """Of each parameter its name, its shape, and that of the slice which is here."""
    return {(name, value.shape, local(value).shape) for name, value in model.named_parameters()}


def _with(root: Path, name: str, **said: Any) -> Any:
    config = transformers.AutoConfig.from_pretrained(root / name / "df11")
    config.quantization_config = {"quant_method": "df11", **said}
    return _load(root / name / "df11", config=config)


def _elsewhere(root: Path, name: str, **said: Any) -> dict[str, Any]:
    return _compare(_load(root / name / "bf16"), _with(root, name, **said))


def _fused(root: Path) -> dict[str, Any]:
    original, model = _load(root / "even" / "bf16"), _with(root, "even", mode="fused")
    pairs = zip(greedy(original, PROMPT, STEPS), greedy(model, PROMPT, STEPS), strict=True)
    close = [torch.allclose(one, other, rtol=0.02, atol=0.02) for one, other in pairs]
    return {"close": close, "modes": df11.report(model).modes}


def _by_argument(root: Path) -> dict[str, Any]:
    """`tp_plan` as an argument of its own, as releases before 5.18 want it."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            root / "even" / "df11", tp_plan="auto"
        )
    return {"same": torch.equal(_logits(model), _logits(_load(root / "even" / "bf16")))}


def _used(root: Path) -> dict[str, Any]:
    """What is done with a model, beside its forward."""
    original, model = _of_both(root, "even")
    prompt = PROMPT.to(model.device)
    hidden = torch.ones(1, 3, EVEN["hidden_size"], dtype=torch.bfloat16, device=model.device)

    def written(which: Any) -> Any:
        return which.generate(prompt, max_new_tokens=5, do_sample=False)

    def gradient(which: Any) -> Any:
        inputs = hidden.clone().requires_grad_()
        which(inputs_embeds=inputs).logits.float().sum().backward()
        return inputs.grad

    @torch.no_grad()
    def compiled(which: Any) -> Any:
        return torch.compile(which, backend="eager", fullgraph=True)(prompt).logits

    uses: dict[str, Callable[[Any], Any]] = {
        "generate": written,
        "gradient": gradient,
        "compiled": compiled,
        "part": lambda which: which.model.layers[1].mlp(hidden),
        "weight": lambda which: which.lm_head.weight.full_tensor(),
    }
    return {name: torch.equal(use(original), use(model)) for name, use in uses.items()}


def _whole_again(root: Path) -> dict[str, Any]:
    """A state dict of whole weights, which all have; and a folder, which one of them saves."""
    model = _load(root / "odd" / "df11")
    state = df11.state_dict(model)
    expected = load(root / "odd" / "bf16").state_dict()
    model.save_pretrained(root / "saved")
    torch.distributed.barrier()
    saved = _load(root / "saved")
    return {
        "names": state.keys() == expected.keys(),
        "differing": [
            name for name, value in expected.items() if not torch.equal(value, state[name])
        ],
        "saved": torch.equal(_logits(saved), _logits(model)),
        "files": sorted(path.name for path in (root / "saved").iterdir()),
    }


def _experts(root: Path) -> dict[str, Any]:
    """Whole experts on each process: by the one option or the other."""
    from transformers.distributed import DistributedConfig

    newer = hasattr(DistributedConfig(), "ep_size")
    told = {"ep_size": 2} if newer else {"enable_expert_parallel": True}
    return _compare(*_of_both(root, "qwen3-moe", told=told))


def _refusal(root: Path) -> dict[str, Any]:
    """Other ways to distribute a model."""
    try:
        _load(root / "even" / "df11", told={"tp_size": 1, "tp_plan": None, "fsdp_size": 2})
    except ValueError as error:
        return {"error": str(error)}
    return {"error": "nothing was refused"}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    **{name: lambda root, name=name: _compare(*_of_both(root, name)) for name in MODELS},
    "fused": _fused,
    "by argument": _by_argument,
    "used": _used,
    "whole again": _whole_again,
    "experts": _experts,
    # What a process holds that has the whole model.
    "alone": lambda root: {"held": df11.report(load(root / "even" / "df11")).device_bytes},
    "refusal": _refusal,
}
#: On GPUs, beside those: weights that lie there in another form, or not there.
ON_GPUS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "fast": partial(_elsewhere, name="even", residence="fast"),
    "fast, odd": partial(_elsewhere, name="odd", residence="fast"),
    "fast, mixture": partial(_elsewhere, name="qwen3-moe", residence="fast"),
    "streamed": partial(_elsewhere, name="even", streamed=True),
}


def main(root: Path) -> None:
    """Runs all cases, and writes what came out."""
    torch.set_num_threads(1)
    # As the fixture compressed_on_gpus; and cuDNN's attention has other bits from run to run.
    if torch.cuda.is_available():
        _plan.LEAST_SAVED = -(1 << 20)
    torch.backends.cuda.enable_cudnn_sdp(False)
    found: dict[str, Any] = {}
    for name, case in {**CASES, **(ON_GPUS if torch.cuda.is_available() else {})}.items():
        try:
            found[name] = case(root)
        except Exception:
            found[name] = {"failed": traceback.format_exc()}
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
    """Of each process what each case gave."""
    root = tmp_path_factory.mktemp("parallel")
    for name in MODELS:
        saved(seeded(transformers.AutoModelForCausalLM.from_config(_config(name))), root / name)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", __file__, os.fspath(root)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    if request.param == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((root / f"found-{rank}.json").read_text("utf-8")) for rank in range(2)]


def _each(found: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    results = [each[case] for each in found]
    assert not any("failed" in result for result in results), results[0].get("failed")
    return results


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_parallel_bf16_model(
    found: list[dict[str, Any]], name: str
) -> None:
    for result in _each(found, name):
        assert result["same"] == [True] * STEPS and result["same_with_gradients"]
        assert result["verified"] and result["modes"] == ["exact"]
        # Older releases leave it whole.
        assert set(result["differing_shapes"]) <= {"model.embed_tokens.weight"}
        assert CompressedTensor.__name__ in result["kinds"].values()


def test_each_process_holds_its_slices_alone(found: list[dict[str, Any]]) -> None:
    for result in _each(found, "even"):
        assert set(result["kinds"].values()) == {CompressedTensor.__name__}
        assert set(result["residences"].values()) == {"stored", "ordinary"}
    whole = _each(found, "alone")[0]["held"]
    # On GPUs also tables, which count in models as small as this one.
    tables = 16384 * 16 if "fast" in found[0] else 0
    held = [result["held"] - tables for result in _each(found, "even")]
    assert all(size < 0.52 * whole for size in held)
    # Together they hold what one process would, norms and codebooks twice.
    assert whole < sum(held) < 1.04 * whole


def test_slices_within_tiles_stay_compressed_if_that_saves(found: list[dict[str, Any]]) -> None:
    for result, keys in zip(_each(found, "odd"), ("Tensor", "CompressedTensor"), strict=True):
        kinds = {
            name.removeprefix("model.layers.0."): kind for name, kind in result["kinds"].items()
        }
        for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj"):
            assert kinds[f"{name}.weight"] == CompressedTensor.__name__
        # The one has 40 of 64 rows in tiles, the other 40 of 48.
        assert kinds["self_attn.k_proj.weight"] == keys or "fast" in found[0]


def test_fused_products_are_close(found: list[dict[str, Any]]) -> None:
    for result in _each(found, "fused"):
        assert result == {"close": [True] * STEPS, "modes": ["fused"]}


def test_weights_in_other_places_give_the_same_logits(found: list[dict[str, Any]]) -> None:
    for case in ON_GPUS.keys() & found[0].keys():
        for result in _each(found, case):
            assert result["same"] == [True] * STEPS and result["verified"]
            assert case.partition(",")[0] in result["residences"].values()


def test_models_are_used_as_bf16_ones(found: list[dict[str, Any]]) -> None:
    for result in _each(found, "used"):
        assert result == dict.fromkeys(result, True)


def test_the_plan_may_be_an_argument(found: list[dict[str, Any]]) -> None:
    assert all(result["same"] for result in _each(found, "by argument"))


def test_whole_weights_come_back_and_are_saved_once(found: list[dict[str, Any]]) -> None:
    for result in _each(found, "whole again"):
        assert result["names"] and not result["differing"]
        assert result["saved"] and "config.json" in result["files"]


def test_whole_experts_are_distributed(found: list[dict[str, Any]]) -> None:
    for result in _each(found, "experts"):
        assert result["same"] == [True] * STEPS
        experts = {kind for name, kind in result["kinds"].items() if ".experts." in name}
        assert experts == {CompressedTensor.__name__}


def test_what_is_not_tensor_parallel_is_refused(found: list[dict[str, Any]]) -> None:
    for result in _each(found, "refusal"):
        assert "fsdp_size" in result["error"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
