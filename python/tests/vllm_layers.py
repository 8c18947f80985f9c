"""The checks of `test_vllm_layers`, on each rank.

python tests/vllm_layers.py    # on a GPU, where no pytest need be installed
"""

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
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers import fused_moe, utils
from vllm.model_executor.layers.fused_moe.router import fused_topk_router
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

import df11
from df11._container import Tensors
from df11._tensor import CompressedTensor
from df11.vllm import _orders, register
from df11.vllm._config import Df11Config
from df11.vllm._deferred import Stored
from df11.vllm._fill import check_loaded, fill

HEADS, KEYS, WIDTH, INNER, VOCABULARY, EXPERTS = 8, 2, 512, 1024, 1000, 4
NUMBERS = itertools.count()
#: Kernels add in other orders for other numbers of rows.
ROWS = (1, 3, 9, 64)


def checkpoint() -> dict[str, Any]:
    generator = torch.Generator("cpu").manual_seed(5)
    rows = {"q": HEADS * 64, "k": KEYS * 64, "v": KEYS * 64, "gate": INNER, "up": INNER}
    rows |= {"fused": 2 * INNER, "vocabulary": VOCABULARY}
    shapes = {name: (count, WIDTH) for name, count in rows.items()} | {"down": (WIDTH, INNER)}
    for expert in range(EXPERTS):
        shapes |= {f"e{expert}.w1": (320, WIDTH), f"e{expert}.w3": (320, WIDTH)}
        shapes |= {f"e{expert}.w2": (WIDTH, 320)}
    options = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    return {name: (0.02 * torch.randn(of, **options)).bfloat16() for name, of in shapes.items()}


CASES = (
    *("linear", "replaced", "small", "vocabulary", "tied", "experts", "missing", "routers"),
    *("dense", "fp8"),
)
#: Run on a GPU alone.
GPU_CASES = ("fused", "apart", "orders", "graph")
DEVICE = torch.device("cuda", 0) if __name__ == "__main__" else torch.device("cpu")


def on_rank(
    rank: int, world: int, port: int, container: str, out: str, is_apart: bool = False
) -> None:
    """Runs all cases on one rank; they need no other one once layers are made.

    `is_apart`: each rank has whole experts (expert parallelism).
    """
    register()
    os.environ["VLLM_DIST_IDENT"] = str(port)  # what an executor of vLLM sets
    # vLLM's own compiled functions, such as masks of vocabularies, take a minute to compile.
    torch._dynamo.config.disable = DEVICE.type == "cpu"
    if not hasattr(torch.ops._C, "convert_weight_packed"):
        # A build for GPUs, which lacks what vLLM would pack weights for on this CPU.
        utils.check_cpu_sgl_kernel = lambda *_: False
    found: dict[str, str] = {}
    parallel = ParallelConfig(tensor_parallel_size=world, enable_expert_parallel=is_apart)
    config = VllmConfig(parallel_config=parallel)
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(config), torch.no_grad(), torch.device(DEVICE):
        init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(world)
        if DEVICE.type == "cuda":
            from vllm.v1.worker.workspace import init_workspace_manager

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
    held = Tensors(container)
    return lambda name: Stored(held, name).tensor()


def filled(module: Any, mode: str = "exact", residence: str = "stored") -> Any:
    """A module after its weights were recorded."""
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
    return make(None), make(Df11Config())


def differing(found: Any, expected: Any) -> int:
    """How many values have other bits."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return int((found.view(torch.int16) != expected.view(torch.int16)).sum())


def products(layer: Any, dense: Any, *given: Any) -> list[Any]:
    """Outputs of a layer, and of a layer of vLLM in BF16 whose weights have been processed."""
    return [each.quant_method.apply(each, *given) for each in (layer, dense)]


def process(*layers: Any) -> None:
    """As vLLM does after loading. On a CPU it may take the BF16 layer's weight away."""
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)


def load(layer: Any, shards: dict[Any, Any]) -> None:
    """By the layer's own code."""
    weight = layer.weight
    for shard, value in shards.items():
        others = () if shard is None else (shard,)
        getattr(weight, "weight_loader", layer.weight_loader)(weight, value, *others)


def linear(kind: Any, *arguments: Any) -> Any:
    return lambda config: kind(*arguments, bias=False, quant_config=config)


QKV = linear(QKVParallelLinear, WIDTH, 64, HEADS, KEYS)
MERGED = linear(MergedColumnParallelLinear, WIDTH, [INNER, INNER])
#: Layers, and their tensors by shard.
LINEAR: list[tuple[Any, dict[Any, str]]] = [
    (QKV, {"q": "q", "k": "k", "v": "v"}),
    (MERGED, {0: "gate", 1: "up"}),
    (MERGED, {None: "fused"}),
    (linear(ColumnParallelLinear, WIDTH, INNER), {None: "gate"}),
    (linear(RowParallelLinear, INNER, WIDTH), {None: "down"}),
    (linear(ReplicatedLinear, WIDTH, INNER), {None: "up"}),
]


def check_linear(container: Any, values: dict[str, Any], world: int) -> None:
    lazy = tensors(container)
    for make, names in LINEAR:
        dense, layer = pairs(make)
        load(dense, {shard: values[name] for shard, name in names.items()})
        load(layer, {shard: lazy(name) for shard, name in names.items()})
        filled(layer)
        assert isinstance(layer.weight, CompressedTensor), names
        assert torch.equal(layer.weight.decode(), dense.weight), names
        process(dense, layer)
        for rows in ROWS:
            x = torch.randn(rows, layer.weight.shape[1])
            assert differing(*products(layer, dense, x)) == 0, (names, rows)


def check_small(container: Any, values: dict[str, Any], world: int) -> None:
    """A small matrix stays BF16 if its products would decode it."""
    lazy = tensors(container)
    for name, rows, unknown in (
        ("gate", INNER, [1]),
        ("gate", INNER, []),
        ("fused", 2 * INNER, [1]),
    ):
        dense, layer = pairs(linear(ReplicatedLinear, WIDTH, rows))
        load(dense, {None: values[name]})
        load(layer, {None: lazy(name)})
        filled(layer)
        process(dense, layer)
        model, shape = torch.nn.ModuleDict({name: layer}), _orders._shape(layer, layer.weight)
        kept = _orders._keep_small(model, False, {shape: unknown})
        assert kept == ({shape} if unknown and name == "gate" else set())
        assert isinstance(layer.weight, CompressedTensor) == (not kept)
        for tokens in (1, 9):
            assert differing(*products(layer, dense, torch.randn(tokens, WIDTH))) == 0


def check_replaced(container: Any, values: dict[str, Any], world: int) -> None:
    """A weight that code gives a layer after loading is not passed over."""
    make, names = LINEAR[0]
    for change in (torch.nn.Parameter, torch.Tensor.detach):
        _, layer = pairs(make)
        lazy = tensors(container)
        load(layer, {shard: lazy(name) for shard, name in names.items()})
        filled(layer)
        process(layer)
        x = torch.randn(3, WIDTH)
        layer.quant_method.apply(layer, x)
        layer.weight = change(torch.zeros(layer.weight.shape))
        try:
            layer.quant_method.apply(layer, x)
        except RuntimeError as error:
            assert "replaced after loading" in str(error), error
        else:
            raise AssertionError(f"a product took the old weight after {change}")


def vocabulary(config: Any, head: bool = False) -> Any:
    kind = ParallelLMHead if head else VocabParallelEmbedding
    return kind(VOCABULARY, WIDTH, quant_config=config)


def check_vocabulary(container: Any, values: dict[str, Any], world: int) -> None:
    x, ids = torch.randn(3, WIDTH), torch.tensor([0, 1, 31, 400, 499, 511, 512, 999])
    for head in (False, True):
        dense, layer = pairs(lambda config, head=head: vocabulary(config, head))
        load(dense, {None: values["vocabulary"]})
        load(layer, {None: tensors(container)("vocabulary")})
        filled(layer)
        process(dense, layer)
        if head:
            got, expected = products(layer, dense, x)
            assert got.shape == (3, 1024 // world)
            assert differing(got, expected) == 0
        else:
            assert torch.equal(layer(ids), values["vocabulary"][ids])


def check_tied(container: Any, values: dict[str, Any], world: int) -> None:
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
    process(dense, model["head"])
    assert differing(*products(model["head"], dense, x)) == 0
    # Some models of vLLM give their embedding no method.
    embed, head = vocabulary(None), vocabulary(config, head=True)
    head.tie_weights(embed)
    load(embed, {None: values["vocabulary"]})
    process(filled(head))
    assert differing(*products(head, dense, x)) == 0


def experts(config: Any) -> Any:
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
    dense, layer = pairs(experts)
    load_experts(dense, values.__getitem__)
    load_experts(layer, tensors(container))
    filled(layer)
    w13, w2 = (getattr(dense, name).clone() for name in ("w13_weight", "w2_weight"))
    process(dense, layer)
    for name, expected in (("w13_weight", w13), ("w2_weight", w2)):
        weight = getattr(layer, name)
        # Tiles around half of 320 columns are no smaller than BF16.
        is_cut = name == "w2_weight" and world > 1 and layer.expert_map is None
        compressed = not is_cut or DEVICE.type == "cuda"
        assert isinstance(weight, CompressedTensor) == compressed
        assert torch.equal(weight.decode() if compressed else weight, expected)
    assert len(layer.w13_weight) == (EXPERTS if layer.expert_map is None else EXPERTS // world)
    for rows in ROWS:
        x, logits = torch.randn(rows, WIDTH), torch.randn(rows, EXPERTS)
        got = chosen(layer, x, logits)
        if layer.expert_map is None or DEVICE.type == "cuda":
            assert differing(got, chosen(dense, x, logits)) == 0
        torch.testing.assert_close(got, mixed(layer, x, logits, w13, w2), rtol=2e-2, atol=2e-3)


def route(logits: Any) -> tuple[Any, Any]:
    values, ids = logits.float().topk(2)
    return values.softmax(-1), ids.int()


def chosen(layer: Any, x: Any, logits: Any) -> Any:
    """Outputs of experts. For CPUs, vLLM 0.26 has a method that chooses them, for all ranks'."""
    method = layer.quant_method
    if method.is_monolithic and layer.expert_map is None:
        return method.apply_monolithic(layer, x.clone(), logits)
    return method.apply(layer, x, *route(logits), None, None)


def mixed(layer: Any, x: Any, logits: Any, w13: Any, w2: Any) -> Any:
    y = torch.zeros(x.shape, dtype=torch.float32)
    for row, (weights, ids) in enumerate(zip(*route(logits), strict=True)):
        for weight, expert in zip(weights, ids, strict=True):
            here = expert if layer.expert_map is None else layer.expert_map[expert]
            if here >= 0:
                gate, up = functional.linear(x[row], w13[here]).chunk(2)
                hidden = functional.silu(gate) * up
                y[row] += weight * functional.linear(hidden, w2[here]).float()
    return y.bfloat16()


def check_missing(container: Any, values: dict[str, Any], world: int) -> None:
    layer = MERGED(Df11Config())
    load(layer, {0: tensors(container)("gate")})
    for work in (filled, layer.quant_method.process_weights_after_loading):
        try:
            work(layer)
        except ValueError as error:
            assert "the checkpoint lacks weights of" in str(error)
        else:
            raise AssertionError("nothing is missed")
    model = torch.nn.ModuleDict({"gate": GateLinear(WIDTH, EXPERTS)})
    check_loaded(model, {"gate.weight"})
    try:
        check_loaded(model, set())
    except ValueError as error:
        assert "the checkpoint lacks weights of gate.weight; fetch it again" in str(error)
    else:
        raise AssertionError("a router's weight is not missed")
    # vLLM's experts hold the router of a transformers model too, which is loaded by its own name.
    experts = torch.nn.ModuleDict({"gate": model["gate"]})
    check_loaded(torch.nn.ModuleDict({"experts": experts, "gate": model["gate"]}), {"gate.weight"})


def check_routers(container: Any, values: dict[str, Any], world: int) -> None:
    """vLLM chooses other kernels for routers that have a method of quantization."""
    method = Df11Config().get_quant_method(GateLinear(WIDTH, EXPERTS), "gate")
    assert type(method) is UnquantizedLinearMethod


def check_dense(container: Any, values: dict[str, Any], world: int) -> None:
    """On-line: a BF16 checkpoint. On the CPU, which has no fast layout, weights stay BF16."""
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


def check_fp8(container: Any, values: dict[str, Any], world: int) -> None:
    """Weights in FP8 stay compressed, and vLLM's own kernels multiply by decoded ones."""
    import vllm_fp8  # whose imports are those of quantized models

    kinds = vllm_fp8.GPU_KINDS if DEVICE.type == "cuda" else {}
    vllm_fp8.check(DEVICE, vllm_fp8.KINDS | kinds)


def check_fused(container: Any, values: dict[str, Any], world: int) -> None:
    """Kernels multiply without decoding to memory: by any number of rows, by chosen experts."""
    lazy = tensors(container)
    for residence in ("stored", "fast"):
        dense, layer = pairs(QKV)
        load(dense, {name: values[name] for name in "qkv"})
        load(layer, {name: lazy(name) for name in "qkv"})
        filled(layer, "fused", residence)
        for rows in (1, 8, 64, 700):
            x = torch.randn(rows, WIDTH)
            got, expected = layer.quant_method.apply(layer, x, None), x @ dense.weight.T
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
        layer = vocabulary(Df11Config())
        load(layer, {None: lazy("vocabulary")})
        filled(layer, "fused", residence)
        ids = torch.tensor([0, 31, 999, 5])
        assert torch.equal(layer(ids), values["vocabulary"][ids])
    dense, layer = experts(None), experts_in_mode(lazy, "fused")
    load_experts(dense, values.__getitem__)
    dense.quant_method.process_weights_after_loading(dense)
    assert layer.quant_method.is_grouped

    def products(*routed: Any) -> list[Any]:
        given = x, weights, ids.int(), None, None
        return [each.quant_method.apply(each, *given) for each in routed]

    from df11.vllm import _grouped  # which needs Triton

    exact = experts_in_mode(lazy, "exact")
    most = exact.quant_method.most_tokens(exact)
    # Slots one by one, in blocks of 16, 64 and 128; decoded experts.
    for tokens in (1, 3, -2, -4, -20, -100, -most, -most - 1):
        _grouped._SPARSE = 0 if tokens > 0 else 4
        tokens = abs(tokens)
        x = torch.randn(tokens, WIDTH)
        weights, ids = torch.randn(tokens, EXPERTS).float().softmax(-1).topk(2)
        torch.testing.assert_close(*products(layer, dense), rtol=2e-2, atol=2e-3)
        assert differing(*products(exact, dense)) == 0, tokens
        assert exact.quant_method.multiplies(exact, tokens, 2) == (tokens <= most)
        ids.zero_()  # all of them choose one expert
        assert differing(*products(exact, dense)) == 0, tokens
        if tokens > 1 and hasattr(fused_topk_router, "_get_padding_mask"):
            ids[-1] = -1  # as that router leaves padding
            got, expected = products(exact, dense)
            assert differing(got[:-1], expected[:-1]) == 0, tokens


def check_apart(container: Any, values: dict[str, Any], world: int) -> None:
    """Expert parallelism: slots of another rank's experts add nothing."""
    layer = experts_in_mode(tensors(container), "exact")
    both = layer.w13_weight, layer.w2_weight
    ranks = torch.full((2 * EXPERTS,), -1, dtype=torch.int32)
    ranks[1::2] = torch.arange(EXPERTS, dtype=torch.int32)
    for tokens in (1, 9, 40, 300):
        x = torch.randn(tokens, WIDTH)
        weights, ids = torch.randn(tokens, 2 * EXPERTS).float().softmax(-1).topk(2)
        results = [
            layer.quant_method.kernel.apply(
                hidden_states=x,
                w1=w13,
                w2=w2,
                topk_weights=weights,
                topk_ids=ids.int(),
                activation=layer.activation,
                apply_router_weight_on_input=False,
                global_num_experts=2 * EXPERTS,
                expert_map=ranks,
                shared_experts=None,
                shared_experts_input=None,
            )
            for w13, w2 in (both, [weight.decode() for weight in both])
        ]
        assert differing(*results) == 0, tokens


def check_orders(container: Any, values: dict[str, Any], world: int) -> None:
    """A kernel that rounds before it multiplies by the router's weights is not taken."""
    from df11.vllm import _grouped

    layer = experts_in_mode(tensors(container), "exact")
    method = layer.quant_method
    given = method.moe, method.get_fused_moe_quant_config(layer), layer
    assert _grouped.ExpertOrders(*given, 2).prepare([1, 7, 16]) == [True] * 3
    multiply = _grouped._multiply

    def rounded(kernels: Any, x: Any, slots: Any, factors: Any, y: Any) -> None:
        multiply(kernels, x, slots, None, y)
        if factors is not None:
            y.copy_(y * factors[:, None])

    _grouped._multiply = rounded
    try:  # three experts per token are not known yet
        assert _grouped.ExpertOrders(*given, 3).prepare([1, 7, 16]) == [False] * 3
    finally:
        _grouped._multiply = multiply


def experts_in_mode(lazy: Any, mode: str) -> Any:
    layer = experts(Df11Config())
    load_experts(layer, lazy)
    filled(layer, mode, "stored")
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def check_graph(container: Any, values: dict[str, Any], world: int) -> None:
    """A captured graph reads what the router says when it is replayed."""
    for mode in ("fused", "exact"):
        layer = experts_in_mode(tensors(container), mode)
        for tokens in (1, 4):
            check_captured(layer, tokens)


def check_captured(layer: Any, tokens: int) -> None:
    x = torch.randn(tokens, WIDTH)
    weights = torch.full((tokens, 2), 0.5)
    ids = torch.tensor([[0, 1]] * tokens, dtype=torch.int32)
    assert layer.quant_method.multiplies(layer, tokens, 2)

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
        ids.copy_(torch.tensor([chosen] * tokens, dtype=torch.int32))
        graph.replay()
        assert torch.equal(y, run()), chosen


def main() -> int:
    from weights import container_of

    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name), Path(name, "out")
        out.mkdir()
        on_rank(0, 1, 29533, container_of(checkpoint(), folder).path, str(out))
        found = json.loads((out / "0.json").read_text())
    for case, problem in found.items():
        print(f"FAILED {case}\n{problem}")
    print(f"RESULT {json.dumps({'layers_failed': list(found)})}", flush=True)
    return len(found)


if __name__ == "__main__":
    sys.exit(main())
