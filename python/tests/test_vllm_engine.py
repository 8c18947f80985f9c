"""An engine of vLLM with compressed weights, on the CPU: says what it says with BF16."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
import transformers
from damage import damage
from hub import Hub, Repository
from safetensors.torch import load_file, save_file
from torch._inductor import config as inductor
from vllm.config import KernelConfig, ModelConfig, ParallelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.config.lora import LoRAConfig
from vllm.config.offload import OffloadConfig, UVAOffloadConfig
from vllm.model_executor.layers import utils
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from weights import compressed

from df11._matrices import shape_of
from df11.vllm import _loader, _operators, _orders, register
from df11.vllm._config import Df11Config

#: Serves folders, one after another, and prints tokens of each, or what went wrong; at the end how
#: many containers are still mapped.
SERVE = """
import gc, json, os, sys, torch
from pathlib import Path
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest

import df11
from df11.vllm import _workers

PROMPTS = [{"prompt_token_ids": [7 * at + step for step in range(9)]} for at in (1, 5, 9)]
SAMPLING = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)

def told_by_a_kernel():
    raise df11.CorruptError("told by a kernel")

def serve(folder, adapter, tells=False, **options):
    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4,
              dtype="bfloat16", **options)
    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    if tells:
        _workers.raise_if_damaged = told_by_a_kernel
    answers = llm.generate(PROMPTS, SAMPLING, lora_request=lora, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]

if __name__ == "__main__":
    check = _workers.raise_if_damaged
    for folder, adapter, options in json.loads(sys.argv[1]):
        # vLLM's own compilation of parts such as its router takes minutes: only its models are.
        torch._dynamo.config.disable = options.get("enforce_eager", False)
        os.environ["TORCHDYNAMO_DISABLE"] = str(int(torch._dynamo.config.disable))
        try:
            said = serve(folder, adapter, **options)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        _workers.raise_if_damaged = check
        print("SAID " + json.dumps(said), flush=True)
    cleanup_dist_env_and_memory()
    gc.collect()
    print("SAID", Path("/proc/self/maps").read_text().count(".df11\\n"), flush=True)
"""
#: An engine with two ranks, of which one meets damage that kernels tell when it has served before.
SERVE_ON_TWO = """
import json, sys
from vllm import LLM, SamplingParams

def meet_damage(worker, rank):
    import df11
    from df11.vllm import _workers

    def told_by_a_kernel():
        raise df11.CorruptError("told by a kernel")

    if worker.rank == rank:
        _workers.raise_if_damaged = told_by_a_kernel

if __name__ == "__main__":
    folder, rank = sys.argv[1:]
    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4,
              dtype="bfloat16", enforce_eager=True, tensor_parallel_size=2)
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": [7 * step for step in range(9)]}
    for _ in range(2):
        (answer,) = llm.generate([prompt], sampling, use_tqdm=False)
        print("SAID", answer.outputs[0].token_ids, flush=True)
        llm.collective_rpc(meet_damage, args=(int(rank),))
"""
MAPPED = "containers that are still mapped"
EAGER = {"enforce_eager": True}
#: Weights that a checkpoint lacks: a part of a merged matrix, and a vector.
LACKING = ("model.layers.1.mlp.gate_proj.weight", "model.norm.weight")
BIAS = "model.layers.2.self_attn.o_proj.bias"
EXACT = {"model_loader_extra_config": {"mode": "exact"}}


def serve(jobs: dict[str, Any], **settings: str) -> dict[str, Any]:
    """Answers of engines in one process, which imports vLLM once: a folder, an adapter, options."""
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    own |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    environment = {**os.environ, **own, "TORCHDYNAMO_DISABLE": "1", **settings}
    command = [sys.executable, "-c", SERVE, json.dumps(list(jobs.values()), default=str)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    said = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert len(said) == len(jobs) + 1, done.stderr[-3000:]
    return dict(zip((*jobs, MAPPED), said, strict=True))


def serve_on_two(folder: Path, rank: int) -> subprocess.CompletedProcess[str]:
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    own |= {"VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    own |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # of the function that workers call
    command = [sys.executable, "-c", SERVE_ON_TWO, str(folder), str(rank)]
    return subprocess.run(
        command, env=os.environ | own, capture_output=True, text=True, timeout=600
    )


def changed(bf16: Path, place: Path, *lacking: str, **added: Any) -> Path:
    """A BF16 folder without some weights, or with more."""
    shutil.copytree(bf16, place)
    weights = load_file(place / "model.safetensors")
    for name in lacking:
        del weights[name]
    save_file(weights | added, place / "model.safetensors", {"format": "pt"})
    return place


def adapter_of(bf16: Path, place: Path) -> Path:
    names = ["q_proj", "v_proj", "down_proj"]
    models.adapted(models.load(bf16), r=8, target_modules=names).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def hub() -> Hub:
    return Hub()


@pytest.fixture(scope="module")
def said(
    folders: models.Folders, hub: Hub, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Answers of engines for a mixture with a dense layer and a tied head, and for a Llama."""
    root = tmp_path_factory.mktemp("engine")
    mixture, mixture_df11 = folders.both("qwen3-moe-mixed")
    llama, llama_df11 = folders.both("llama")
    config = json.loads((llama / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (gptq := root / "gptq").mkdir()
    (gptq / "config.json").write_text(json.dumps(config))
    hub.repositories["someone/llama-df11"] = Repository(llama_df11)
    ngram = {"num_speculative_tokens": 3, "method": "ngram", "prompt_lookup_max": 3}
    draft = {"num_speculative_tokens": 3, "method": "draft_model", "model": str(llama_df11)}
    lacks = changed(llama, root / "lacks", *LACKING)
    biased = changed(folders.bf16("llama-bias"), root / "biased", BIAS)
    more = changed(llama, root / "more", **{"model.more.weight": torch.ones(4)})
    tied = folders.bf16("llama-tied")
    apart = models.with_head_apart(tied, root / "apart")
    other = models.with_head_apart(tied, root / "apart-other", is_same=False)
    shutil.copytree(llama_df11, root / "damaged")
    damage(*(root / "damaged").glob("*.df11"))
    exact, lora = EAGER | EXACT, {**EAGER, "enable_lora": True, "max_lora_rank": 8}
    adapter = adapter_of(llama, root / "adapter")
    jobs = {
        "mixture": (mixture, None, EAGER),
        "compiled": (mixture_df11, None, {}),
        "exact": (mixture_df11, None, exact),
        "on line": (mixture, None, {**EAGER, "quantization": "df11"}),
        "options without a method": (mixture, None, exact),
        "no weights": (mixture_df11, None, {**EAGER, "load_format": "dummy"}),
        "llama": (llama, None, EAGER),
        "drafted": (llama_df11, None, {**exact, "speculative_config": draft}),
        "two stages": (llama_df11, None, {**exact, "pipeline_parallel_size": 2}),
        "a repository": ("someone/llama-df11", None, exact),
        "another method": (gptq, None, {**EAGER, "quantization": "df11"}),
        "adapted": (llama, adapter, lora),
        "adapted, compressed": (llama_df11, adapter, lora),
        "lacking": (models.compressed(lacks, root / "lacks-df11"), None, EAGER),
        "lacking, on line": (lacks, None, {**EAGER, "quantization": "df11"}),
        "lacking a bias": (models.compressed(biased, root / "biased-df11"), None, EAGER),
        "more, compressed": (models.compressed(more, root / "more-df11"), None, EAGER),
        "a head apart": (apart, None, EAGER),
        "a head apart, compressed": (models.compressed(apart, root / "apart-df11"), None, EAGER),
        "another head": (other, None, EAGER),
        "another head, compressed": (models.compressed(other, root / "other-df11"), None, EAGER),
        "damaged": (root / "damaged", None, exact),
        "damaged on a GPU": (llama_df11, None, {**exact, "tells": True}),
        # The last one: vLLM 0.32 for CPUs starts no engine in a process that has loaded Numba.
        "by n-grams": (llama_df11, None, {**exact, "speculative_config": ngram}),
    }
    home = str(root / "home")
    found = serve(jobs, HF_ENDPOINT=hub.url, HF_HOME=home, HF_HUB_DISABLE_XET="1")
    if found["two stages"] != found["llama"]:
        two_stages = (llama, None, {**EAGER, "pipeline_parallel_size": 2})
        found |= serve({"two stages of BF16": two_stages})
    return found


@pytest.mark.parametrize("case", ["compiled", "exact", "on line"])
def test_tokens_are_those_of_bf16(said: dict[str, Any], case: str) -> None:
    assert said[case] == said["mixture"]


@pytest.mark.parametrize("case", ["by n-grams", "drafted", "two stages", "a repository"])
def test_ways_to_serve_leave_tokens_as_they_are(said: dict[str, Any], case: str) -> None:
    if said.get(f"{case} of BF16", said["llama"]) != said["llama"]:
        pytest.skip(f"this vLLM fails with BF16 too: {said[f'{case} of BF16']}")
    assert said[case] == said["llama"]


def test_adapters_change_what_compressed_weights_say(said: dict[str, Any]) -> None:
    assert said["adapted, compressed"] == said["adapted"] != said["llama"]


@pytest.mark.parametrize("case", ["a head apart", "another head"])
def test_a_tied_head_in_another_shard(said: dict[str, Any], case: str) -> None:
    assert said[f"{case}, compressed"] == said[case]
    assert isinstance(said[case], list), said[case]


def test_containers_alone_are_fetched(
    said: dict[str, Any], hub: Hub, folders: models.Folders
) -> None:
    weights = {name for name in hub.downloaded() if name.endswith((".df11", ".safetensors"))}
    containers = folders.df11("llama").glob("*.df11")
    assert weights == {f"someone/llama-df11/{file.name}" for file in containers}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("options without a method", "options of df11; add --quantization df11"),
        ("no weights", "load the BF16 checkpoint for that"),
        ("another method", "(gptq) does not match the quantization method"),
    ],
)
def test_what_engines_refuse(said: dict[str, Any], case: str, words: str) -> None:
    assert words in said[case]


@pytest.mark.parametrize("case", ["lacking", "lacking, on line"])
def test_missing_weights_are_named(said: dict[str, Any], case: str) -> None:
    merged = r"model.layers.1.mlp.gate_up_proj.weight (40,960 of 81,920 weights are there)"
    assert "ValueError: the checkpoint lacks weights of " in said[case]
    assert merged in said[case] and LACKING[1] in said[case]


def test_a_missing_bias_is_named(said: dict[str, Any]) -> None:
    assert f"the checkpoint lacks weights of {BIAS}; fetch it again" in said["lacking a bias"]


def test_unexpected_weights_are_refused_by_vllm(said: dict[str, Any]) -> None:
    assert "There is no module or parameter named" in said["more, compressed"]


def test_damaged_weights_give_no_tokens(said: dict[str, Any]) -> None:
    assert "CorruptError" in said["damaged"]


def test_what_kernels_told_is_raised_before_tokens_leave(said: dict[str, Any]) -> None:
    """A GPU's kernels raise nothing; what stands for them is the function that reads their word."""
    assert said["damaged on a GPU"] == "CorruptError: told by a kernel"


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_on_any_rank_stops_the_engine(folders: models.Folders, rank: int) -> None:
    """Also on one whose outputs vLLM does not take."""
    done = serve_on_two(folders.df11("llama"), rank)
    if not done.stdout.count("SAID") and not serve_on_two(folders.bf16("llama"), 0).stdout.count(
        "SAID"
    ):
        pytest.skip("this vLLM fails with BF16 on two ranks, too")
    assert done.stdout.count("SAID") == 1, done.stderr[-3000:]
    assert done.returncode != 0 and "told by a kernel" in done.stdout + done.stderr


def test_memory_returns_when_engines_end(said: dict[str, Any]) -> None:
    assert said[MAPPED] == 0


def test_the_entry_point_is_named() -> None:
    (found,) = (each for each in entry_points(group="vllm.general_plugins") if each.name == "df11")
    assert found.load() is register


def test_options_and_config_are_checked() -> None:
    register()
    config = Df11Config.from_config({"quant_method": "df11"})
    assert (config.mode, config.residence) == ("exact", "auto")
    config.choose({"mode": "fused", "residence": "fast"})
    assert not config.exact and config.residence == "fast"
    with pytest.raises(ValueError, match="mode='quick' is unknown; choose one of exact, fused"):
        config.choose({"mode": "quick"})
    with pytest.raises(ValueError, match="give options by --model-loader-extra-config"):
        Df11Config.from_config({"quant_method": "df11", "mode": "exact"})
    loader = _loader.Df11ModelLoader(
        LoadConfig(load_format="df11", model_loader_extra_config={"mode": "exact"})
    )
    assert (loader.options, loader.load_config.load_format) == ({"mode": "exact"}, "auto")
    with pytest.raises(ValueError, match="Unexpected extra config keys"):
        _loader.Df11ModelLoader(LoadConfig(model_loader_extra_config={"residense": "fast"}))


def test_what_cannot_work_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Df11Config()
    _loader._refuse(VllmConfig(), config)
    offload = OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1))
    with pytest.raises(ValueError, match="leave out --cpu-offload-gb"):
        _loader._refuse(VllmConfig(offload_config=offload), config)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    _loader._refuse(VllmConfig(), config)
    config.choose({"mode": "fused"})
    with pytest.raises(ValueError, match=r'add --model-loader-extra-config .*"exact"'):
        _loader._refuse(VllmConfig(), config)


def test_batch_invariance_runs_as_for_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM does not compile BF16 models of some shapes then, and compiled code rounds otherwise."""
    name = "_uses_breakable_cudagraph_for_batch_invariance"
    if not hasattr(VllmConfig, name):
        pytest.skip("this vLLM has one way to run them")
    register()
    configs: dict[tuple[int, str | None], ModelConfig] = {}
    for hidden in (2048, 2176):
        geometry = {"hidden_size": hidden, "intermediate_size": 6144, "head_dim": 128}
        geometry |= {"num_attention_heads": 16, "num_key_value_heads": 8}
        for method in (None, "df11"):
            config = transformers.LlamaConfig(**geometry, architectures=["LlamaForCausalLM"])
            if method:
                config.quantization_config = {"quant_method": method}
            config.save_pretrained(folder := tmp_path / f"{hidden}-{method}")
            options = {"skip_tokenizer_init": True, "dtype": "bfloat16"}
            configs[hidden, method] = ModelConfig(str(folder), **options)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    capability = staticmethod(lambda device=0: DeviceCapability(9, 0))
    monkeypatch.setattr(type(current_platform), "get_device_capability", capability)
    found = []
    for (_, method), model in configs.items():
        asked = SimpleNamespace(model_config=model, parallel_config=ParallelConfig())
        found.append(getattr(VllmConfig, name)(asked))
        assert model.quantization == method
    assert found == [True, True, False, False]


def test_products_of_other_libraries_are_refused() -> None:
    """They add in orders of their own. vLLM 0.26 has none."""
    if not hasattr(utils, "_FLASHINFER_BF16_BACKENDS"):
        pytest.skip("this vLLM has one product")
    (backend, *_), config = utils._FLASHINFER_BF16_BACKENDS, Df11Config()
    vllm_config = VllmConfig(kernel_config=KernelConfig(linear_backend=backend))
    with pytest.raises(ValueError, match=f"leave out --linear-backend {backend}"):
        _loader._refuse(vllm_config, config)
    config.choose({"mode": "fused"})
    _loader._refuse(vllm_config, config)


@pytest.mark.parametrize("with_bias", [False, True])
def test_padding_of_a_product_in_order(monkeypatch: pytest.MonkeyPatch, with_bias: bool) -> None:
    """Rows of zeros are asked for as a part of the shape, and are not multiplied."""
    weight, layer = compressed("k"), torch.nn.Linear(1, 1)
    dense, padded = weight.decode(), torch.nn.functional.pad(weight.decode(), (0, 0, 0, 32))

    def in_order(x: Any, arrays: Any, parts: Any, counts: Any, biases: Any, *given: Any) -> Any:
        assert (counts, given) == ((1,), (_operators.LINEAR, 32))
        return [torch.nn.functional.linear(x, dense, *biases)]

    monkeypatch.setattr(_operators._ops, "in_order", in_order)
    del layer._parameters["weight"]
    layer.__dict__["weight"] = weight
    key = _operators.hold(layer, "weight", weight, 32)
    x, bias = torch.randn(3, 256).bfloat16(), torch.randn(96).bfloat16() if with_bias else None
    y = torch.ops.df11_vllm.linear(x, key, bias, 96)
    assert torch.equal(y, torch.nn.functional.linear(x, padded, bias))


def test_the_log_says_for_which_layers_the_order_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shape is asked for once, with the numbers of tokens of captured graphs."""
    asked: list[tuple[int, list[int]]] = []

    def orders(arrays: Any, parts: Any, x_rows: Any, **given: Any) -> dict[int, bool]:
        asked.append((shape_of(parts)[0] + given["padding"], [*x_rows]))
        return {count: not (count == 8 and given["with_bias"]) for count in x_rows}

    def layer(name: str, rows: int, bias: bool = False) -> torch.nn.Module:
        made = torch.nn.Linear(4, 4, bias=bias)
        del made._parameters["weight"]
        made.__dict__["weight"], made.weight_rows = compressed(name), rows
        return made

    lines: list[str] = []
    monkeypatch.setattr(_orders._ops, "orders", orders)
    monkeypatch.setattr(_orders, "_SMALL", 0)  # no matrix here is a layer's of vLLM
    monkeypatch.setattr(_orders.logger, "info", lambda line, *of: lines.append(line % of))
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 8, 64]),
        scheduler_config=SimpleNamespace(max_num_seqs=2),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace()),
    )
    named = {"a": layer("q", 128), "b": layer("q", 128), "c": layer("k", 96, True)}
    _orders.find_orders(torch.nn.ModuleDict(named), config)
    assert asked == [(128, [1, 8, 64]), (96, [1, 8, 64])]
    first, second = lines
    assert first.startswith("df11: 2 of 3 matrices are multiplied in the order of BF16's products")
    assert "1 matrices of 96 x 256 (c) are decoded" in second and "with 8 rows of x" in second


def test_launches_begin_early_unless_told_otherwise() -> None:
    def chosen(driver: tuple[int, int], lora: bool = False, **told: Any) -> object:
        config = VllmConfig()
        config.lora_config = LoRAConfig(max_lora_rank=8) if lora else None
        options = config.compilation_config.inductor_compile_config
        options |= {f"triton.{name}": value for name, value in told.items()}
        _loader.let_launches_begin_early(config, [{"driver": driver}])
        return options.get("triton.enable_pdl")

    assert hasattr(inductor.triton, "enable_pdl")
    assert chosen((13, 0)) is True
    assert chosen((12, 2)) is None
    assert chosen((13, 0), lora=True) is None
    assert chosen((13, 0), enable_pdl=False) is False


def test_compiled_graphs_are_kept_by_which_weights_are_ordinary() -> None:
    config = VllmConfig()
    before = config.compute_hash()
    layer = torch.nn.Linear(4, 4)
    model = torch.nn.ModuleDict({"down": layer})
    layer.weight_key = torch.zeros(16)
    _loader.extend_graph_key(model, config)
    assert config.compute_hash() == before
    layer.weight_key = None
    _loader.extend_graph_key(model, config)
    assert config.additional_config == {"df11 ordinary weights": ["down"]}
    assert config.compute_hash() != before


def test_compiled_graphs_are_kept_by_which_experts_are_exact() -> None:
    """On a CPU, where vLLM compiles them."""
    config = VllmConfig()
    before, layer = config.compute_hash(), torch.nn.Linear(4, 4)
    layer.quant_method = SimpleNamespace(on_cpu=object())
    _loader.extend_graph_key(torch.nn.ModuleDict({"experts": layer}), config)
    assert config.additional_config == {"df11 exact experts": True}
    assert config.compute_hash() != before
