"""What `test_vllm_layers` checks of layers, on each rank.

python tests/vllm_layers.py    # on a GPU, where no pytest need be installed
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn import functional
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

HEADS, KEYS, WIDTH, INNER, VOCABULARY, EXPERTS = 8, 2, 512, 1024, 1000, 4
NUMBERS = itertools.count()


def checkpoint() -> dict[str, Any]:
    """Tensors by name, the same in each process."""
    generator = torch.Generator("cpu").manual_seed(5)
    shapes = {
        "q": (HEADS * 64, WIDTH),
        "k": (KEYS * 64, WIDTH),
        "v": (KEYS * 64, WIDTH),
        "o": (WIDTH, HEADS * 64),
        "gate": (INNER, WIDTH),
        "up": (INNER, WIDTH),
        "down": (WIDTH, INNER),
        "fused": (2 * INNER, WIDTH),
        "vocabulary": (VOCABULARY, WIDTH),
    }
    for expert in range(EXPERTS):
        shapes |= {f"e{expert}.w1": (320, WIDTH), f"e{expert}.w3": (320, WIDTH)}
        shapes |= {f"e{expert}.w2": (WIDTH, 320)}
    options = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    return {
        name: (0.02 * torch.randn(shape, **options)).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


CASES = ("linear", "vocabulary", "tied", "experts", "missing", "dense")
#: Run on a GPU alone.
GPU_CASES = ("fused", "graph")
DEVICE = torch.device("cuda", 0) if __name__ == "__main__" else torch.device("cpu")


def on_rank(
    rank: int, world: int, port: int, container: str, out: str, is_apart: bool = False
) -> None:
    """Runs all cases on one rank; they need no other one once layers are made.

    `is_apart`: each rank has whole experts (expert parallelism).
    """
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.v1.worker.workspace import init_workspace_manager

    import df11
    from df11.vllm import register

    register()
    os.environ["VLLM_DIST_IDENT"] = str(port)  # what an executor of vLLM sets
    # What vLLM compiles for itself, such as masks of vocabularies, takes a compiler a minute.
    torch._dynamo.config.disable = DEVICE.type == "cpu"
    found: dict[str, str] = {}
    parallel = ParallelConfig(tensor_parallel_size=world, enable_expert_parallel=is_apart)
    config = VllmConfig(parallel_config=parallel)
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(config), torch.no_grad(), torch.device(DEVICE):
        init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(world)
        if DEVICE.type == "cuda":
            init_workspace_manager(DEVICE)  # as a worker of vLLM does
        for case in (*CASES, *GPU_CASES) if DEVICE.type == "cuda" else CASES:
            values = {name: value.to(DEVICE) for name, value in checkpoint().items()}
            try:
                globals()[f"check_{case}"](df11.open(container), values, world)
            except Exception:
                found[case] = f"rank {rank} of {world}: {traceback.format_exc()}"
            distributed.barrier()
    Path(out, f"{rank}.json").write_text(json.dumps(found))


def tensors(container: Any) -> Any:
    from df11._container import Tensors
    from df11.vllm._deferred import Source

    held = Tensors(container)
    return lambda name: Source(held, name).tensor()


def filled(module: Any, mode: str = "exact", residence: str = "stored") -> Any:
    """A module after its weights were recorded."""
    from df11.vllm._config import Df11Config
    from df11.vllm._fill import fill

    config = Df11Config()
    config.choose({"mode": mode, "residence": residence})
    for each in module.modules():
        if isinstance(getattr(each, "quant_method", None), QuantizeMethodBase):
            each.quant_method.options = config
    # vLLM's loaders run outside of its device.
    with torch.device("cpu"):
        fill(module, config, DEVICE, None)
    return module


def pairs(make: Any) -> tuple[Any, Any]:
    """A layer in BF16, and a compressed one."""
    from df11.vllm._config import Df11Config

    return make(None), make(Df11Config())


def load(layer: Any, shards: dict[Any, Any]) -> None:
    """By the layer's own code."""
    weight = layer.weight
    for shard, value in shards.items():
        others = () if shard is None else (shard,)
        getattr(weight, "weight_loader", layer.weight_loader)(weight, value, *others)


def check_linear(container: Any, values: dict[str, Any], world: int) -> None:
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        ReplicatedLinear,
        RowParallelLinear,
    )

    from df11._tensor import CompressedTensor

    kinds: list[tuple[Any, tuple[Any, ...], dict[Any, str]]] = [
        (QKVParallelLinear, (WIDTH, 64, HEADS, KEYS), {"q": "q", "k": "k", "v": "v"}),
        (MergedColumnParallelLinear, (WIDTH, [INNER, INNER]), {0: "gate", 1: "up"}),
        (MergedColumnParallelLinear, (WIDTH, [INNER, INNER]), {None: "fused"}),
        (ColumnParallelLinear, (WIDTH, INNER), {None: "gate"}),
        (RowParallelLinear, (INNER, WIDTH), {None: "down"}),
        (ReplicatedLinear, (WIDTH, INNER), {None: "up"}),
    ]
    lazy = tensors(container)
    for kind, arguments, names in kinds:
        dense, layer = pairs(
            lambda config, kind=kind, arguments=arguments: kind(
                *arguments, bias=False, quant_config=config
            )
        )
        load(dense, {shard: values[name] for shard, name in names.items()})
        load(layer, {shard: lazy(name) for shard, name in names.items()})
        filled(layer)
        layer.quant_method.process_weights_after_loading(layer)
        assert isinstance(layer.weight, CompressedTensor), kind
        assert torch.equal(layer.weight.decode(), dense.weight), kind
        x = torch.randn(3, layer.weight.shape[1])
        got = layer.quant_method.apply(layer, x, None)
        assert torch.equal(got, functional.linear(x, dense.weight)), kind


def vocabulary(config: Any, head: bool = False) -> Any:
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    kind = ParallelLMHead if head else VocabParallelEmbedding
    return kind(VOCABULARY, WIDTH, quant_config=config)


def check_vocabulary(container: Any, values: dict[str, Any], world: int) -> None:
    x, ids = torch.randn(3, WIDTH), torch.tensor([0, 1, 31, 400, 499, 511, 512, 999])
    for head in (False, True):
        dense, layer = pairs(lambda config, head=head: vocabulary(config, head))
        load(dense, {None: values["vocabulary"]})
        load(layer, {None: tensors(container)("vocabulary")})
        filled(layer)
        if head:
            got = layer.quant_method.apply(layer, x)
            assert got.shape == (3, 1024 // world)
            assert torch.equal(got, functional.linear(x, dense.weight))
        else:
            assert torch.equal(layer(ids), values["vocabulary"][ids])


def check_tied(container: Any, values: dict[str, Any], world: int) -> None:
    from df11.vllm._config import Df11Config

    config = Df11Config()
    model = torch.nn.ModuleDict(
        {"embed": vocabulary(config), "head": vocabulary(config, head=True)}
    )
    model["head"].tie_weights(model["embed"])
    load(model["embed"], {None: tensors(container)("vocabulary")})
    filled(model)
    assert model["head"].weight is model["embed"].weight
    x, ids = torch.randn(2, WIDTH), torch.arange(9)
    assert torch.equal(model["embed"](ids), values["vocabulary"][:9])
    dense = vocabulary(None)
    load(dense, {None: values["vocabulary"]})
    got = model["head"].quant_method.apply(model["head"], x)
    assert torch.equal(got, functional.linear(x, dense.weight))


def experts(config: Any) -> Any:
    from vllm.model_executor.layers import fused_moe

    # 0.26 calls it so.
    make = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
    name = f"experts.{next(NUMBERS)}"  # vLLM wants one for each layer
    made = make(EXPERTS, 2, WIDTH, 320, renormalize=True, quant_config=config, prefix=name)
    return made.routed_experts


def load_experts(routed: Any, get: Any) -> None:
    for expert in range(EXPERTS):
        for shard in ("w1", "w2", "w3"):
            name = "w2_weight" if shard == "w2" else "w13_weight"
            value = get(f"e{expert}.{shard}")
            routed.weight_loader(getattr(routed, name), value, name, shard, expert)


def check_experts(container: Any, values: dict[str, Any], world: int) -> None:
    from df11._tensor import CompressedTensor

    dense, layer = pairs(experts)
    load_experts(dense, values.__getitem__)
    load_experts(layer, tensors(container))
    filled(layer)
    method = layer.quant_method
    method.process_weights_after_loading(layer)
    for name in ("w13_weight", "w2_weight"):
        weight = getattr(layer, name)
        # Tiles around half of 320 columns are no smaller than BF16.
        is_cut = name == "w2_weight" and world > 1 and layer.expert_map is None
        compressed = not is_cut or DEVICE.type == "cuda"
        assert isinstance(weight, CompressedTensor) == compressed
        values_ = weight.decode() if compressed else weight
        assert torch.equal(values_, getattr(dense, name))
    x = torch.randn(5, WIDTH)
    assert len(layer.w13_weight) == (EXPERTS if layer.expert_map is None else EXPERTS // world)
    scores = torch.randn(5, EXPERTS).softmax(-1)
    weights, ids = scores.topk(2)
    got = method.apply(layer, x, weights.float(), ids.int())
    for row in range(5):
        expected = torch.zeros(WIDTH, dtype=torch.float32)
        for weight, expert in zip(weights[row], ids[row], strict=True):
            here = expert if layer.expert_map is None else layer.expert_map[expert]
            if here < 0:
                continue
            gate, up = functional.linear(x[row], dense.w13_weight[here]).chunk(2)
            hidden = functional.silu(gate) * up
            expected += weight.float() * functional.linear(hidden, dense.w2_weight[here]).float()
        torch.testing.assert_close(got[row].float(), expected, rtol=2e-2, atol=2e-3)


def check_missing(container: Any, values: dict[str, Any], world: int) -> None:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    from df11.vllm._config import Df11Config

    layer = MergedColumnParallelLinear(
        WIDTH, [INNER, INNER], bias=False, quant_config=Df11Config(), prefix="mlp"
    )
    load(layer, {0: tensors(container)("gate")})
    works = (lambda: filled(layer), lambda: layer.quant_method.process_weights_after_loading(layer))
    for work in works:
        try:
            work()
        except ValueError as error:
            assert "the checkpoint lacks weights of" in str(error)
        else:
            raise AssertionError("nothing is missed")


def check_dense(container: Any, values: dict[str, Any], world: int) -> None:
    """On-line: a BF16 checkpoint. On the CPU, which has no fast layout, weights stay BF16."""
    from df11._tensor import CompressedTensor

    dense, layer = pairs(vocabulary)
    for each in (dense, layer):
        load(each, {None: values["vocabulary"]})
    layer.quant_method.process_weights_after_loading(layer)
    if DEVICE.type == "cuda":
        assert isinstance(layer.weight, CompressedTensor)
        rows = len(layer.weight)
        assert torch.equal(layer.weight.decode(), dense.weight[:rows])
        assert not dense.weight[rows:].any()
    else:
        assert type(layer.weight) is torch.nn.Parameter
        assert torch.equal(layer.weight, dense.weight)
    ids = torch.arange(20)
    assert torch.equal(layer(ids), values["vocabulary"][ids])


def check_fused(container: Any, values: dict[str, Any], world: int) -> None:
    """Kernels multiply without decoding to memory: by any number of rows, by chosen experts."""
    from vllm.model_executor.layers.linear import QKVParallelLinear

    lazy = tensors(container)
    for residence in ("stored", "fast"):
        dense, layer = pairs(
            lambda config: QKVParallelLinear(
                WIDTH, 64, HEADS, KEYS, bias=False, quant_config=config
            )
        )
        load(dense, {name: values[name] for name in "qkv"})
        load(layer, {name: lazy(name) for name in "qkv"})
        filled(layer, "fused", residence)
        for rows in (1, 8, 64, 700):
            x = torch.randn(rows, WIDTH)
            got = layer.quant_method.apply(layer, x, None)
            torch.testing.assert_close(
                got, functional.linear(x, dense.weight), rtol=2e-2, atol=2e-2
            )
        dense, layer = pairs(vocabulary)
        load(layer, {None: lazy("vocabulary")})
        filled(layer, "fused", residence)
        ids = torch.tensor([0, 31, 999, 5])
        assert torch.equal(layer(ids), values["vocabulary"][ids])
    dense, layer = pairs(experts)
    load_experts(dense, values.__getitem__)
    load_experts(layer, lazy)
    filled(layer, "fused", "stored")
    for routed in (dense, layer):
        routed.quant_method.process_weights_after_loading(routed)
    assert layer.quant_method.is_grouped
    for tokens in (1, 3, 500):
        x = torch.randn(tokens, WIDTH)
        weights, ids = torch.randn(tokens, EXPERTS).float().softmax(-1).topk(2)
        got, expected = (
            routed.quant_method.apply(routed, x, weights, ids.int(), None, None)
            for routed in (layer, dense)
        )
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-3)
    filled_exact = experts_in_mode(lazy, "exact")
    got, expected = (
        routed.quant_method.apply(routed, x, weights, ids.int(), None, None)
        for routed in (filled_exact, dense)
    )
    assert torch.equal(got, expected)


def experts_in_mode(lazy: Any, mode: str) -> Any:
    from df11.vllm._config import Df11Config

    layer = experts(Df11Config())
    load_experts(layer, lazy)
    filled(layer, mode, "stored")
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def check_graph(container: Any, values: dict[str, Any], world: int) -> None:
    """A captured graph reads what the router says when it is replayed."""
    layer = experts_in_mode(tensors(container), "fused")
    x = torch.randn(4, WIDTH)
    weights, ids = torch.full((4, 2), 0.5), torch.tensor([[0, 1]] * 4, dtype=torch.int32)

    def run() -> Any:
        return layer.quant_method.apply(layer, x, weights, ids, None, None)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for chosen in ([0, 1], [2, 3], [3, 0]):
        ids.copy_(torch.tensor([chosen] * 4, dtype=torch.int32))
        graph.replay()
        assert torch.equal(y, run()), chosen


def main() -> int:
    """All cases on a GPU; what went wrong."""
    from safetensors.torch import save_file

    import df11

    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name), Path(name, "out")
        out.mkdir()
        save_file(checkpoint(), folder / "model.safetensors")
        df11.compress(folder / "model.safetensors", folder / "model.df11", progress=False)
        on_rank(0, 1, 29533, str(folder / "model.df11"), str(out))
        found = json.loads((out / "0.json").read_text())
    for case, problem in found.items():
        print(f"FAILED {case}\n{problem}")
    print(f"RESULT {json.dumps({'layers_failed': list(found)})}", flush=True)
    return len(found)


if __name__ == "__main__":
    sys.exit(main())
