"""Layers of vLLM in FP8 whose weights stay compressed: the bits of the same layers without df11.

`vllm_layers` runs `check` on each rank. On the CPU vLLM multiplies by FP8 with a scale for each row
alone; on a GPU by scales for blocks and matrices too, with several kernels.
"""

from __future__ import annotations

import itertools
import tempfile
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers import fused_moe
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    requant_weight_ue8m0_inplace,
)
from vllm.utils.deep_gemm import is_deep_gemm_supported
from weights import container_of

from df11._container import Tensors
from df11.vllm._deferred import Stored
from df11.vllm._fill import fill
from df11.vllm._layers import Options
from df11.vllm._quantized import Shown, keep_compressed

BLOCK, WIDTH, INNER, EXPERTS = 128, 512, 1024, 8
ROWS = (1, 3, 9, 64)
FP8 = torch.float8_e4m3fn
NUMBERS = itertools.count()
#: Layers by name, and their tensors by shard.
LAYERS: dict[str, tuple[Any, tuple[Any, ...], dict[Any, str]]] = {
    "qkv": (QKVParallelLinear, (WIDTH, 128, 8, 2), {"q": "q", "k": "k", "v": "v"}),
    "merged": (MergedColumnParallelLinear, (WIDTH, [INNER, INNER]), {0: "gate", 1: "up"}),
    "column": (ColumnParallelLinear, (WIDTH, INNER), {None: "gate"}),
    "row": (RowParallelLinear, (INNER, WIDTH), {None: "down"}),
}


class Kind(NamedTuple):
    """A quantization of vLLM."""

    config: Callable[[], Any]
    scale_name: str
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    #: The backend of linear layers.
    backend: str = "auto"
    #: The same for experts, if there are some.
    experts: str | None = None


def in_blocks(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 weights, and scales for blocks."""
    blocks = value.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    made = (blocks / scales).to(FP8).view(value.shape)
    return made, scales[:, 0, :, 0].contiguous()


def in_rows(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = value.float().abs().amax(1, keepdim=True) / 448
    return (value.float() / scales).to(FP8), scales


def as_whole(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = value.float().abs().max() / 448
    return (value.float() / scale).to(FP8), scale


_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
#: A group of layers with a scale for each row.
CHANNELS = {
    "targets": ["Linear"],
    "weights": {**_FLOAT, "strategy": "channel", "dynamic": False},
    "input_activations": {**_FLOAT, "strategy": "token", "dynamic": True},
}


def channels() -> Any:
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return CompressedTensorsConfig.from_config({**config, "config_groups": {"group_0": CHANNELS}})


def blocks() -> Any:
    return Fp8Config(True, "dynamic", weight_block_size=[BLOCK, BLOCK])


KINDS = {"channels": Kind(channels, "weight_scale", in_rows)}
GPU_KINDS = {
    "blocks, CUTLASS": Kind(blocks, "weight_scale_inv", in_blocks, "cutlass", "triton"),
    "blocks, Triton": Kind(blocks, "weight_scale_inv", in_blocks, "triton"),
    "matrices": Kind(
        lambda: Fp8Config(True, "dynamic"), "weight_scale", as_whole, experts="triton"
    ),
}
if is_deep_gemm_supported():
    GPU_KINDS["blocks, DeepGEMM"] = Kind(
        blocks, "weight_scale_inv", in_blocks, "deep_gemm", "deep_gemm"
    )


def checkpoint() -> dict[str, torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(7)
    shapes = {"q": (8 * 128, WIDTH), "k": (2 * 128, WIDTH), "v": (2 * 128, WIDTH)}
    shapes |= {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    for expert in range(EXPERTS):
        shapes |= {f"e{expert}.w1": (256, WIDTH), f"e{expert}.w3": (256, WIDTH)}
        shapes[f"e{expert}.w2"] = (WIDTH, 256)
    options: Any = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    # Their sizes differ, so that merged matrices have other scales.
    return {
        name: 0.01 * (1 + at % 3) * torch.randn(shape, **options)
        for at, (name, shape) in enumerate(shapes.items())
    }


def check(device: torch.device, kinds: dict[str, Kind]) -> None:
    for name, kind in kinds.items():
        quantized = {each: kind.quantize(value) for each, value in checkpoint().items()}
        tensors = {each: pair[0] for each, pair in quantized.items()}
        tensors |= {f"{each}.scale": pair[1] for each, pair in quantized.items()}
        config = get_current_vllm_config()
        told = SimpleNamespace(model_type="llama")
        config.model_config = SimpleNamespace(dtype=torch.bfloat16, hf_text_config=told)
        config.kernel_config.linear_backend = kind.backend
        config.kernel_config.moe_backend = kind.experts or "auto"
        with tempfile.TemporaryDirectory() as folder, torch.device("cpu"):
            held = Tensors(container_of(tensors, Path(folder)))
        sources = ({each: value.to(device) for each, value in tensors.items()}, Lazy(held))
        for layer in LAYERS:
            check_linear(layer, kind, sources, device, name)
        if kind.experts:
            check_experts(kind, sources, device, name)
        if name == "channels":
            check_changed(kind, sources[1], device)


class Lazy:
    def __init__(self, held: Tensors) -> None:
        self.held = held

    def __getitem__(self, name: str) -> Any:
        return Stored(self.held, name).tensor()


def pair(kind: Kind, make: Callable[[Any], Any]) -> Iterator[Any]:
    """A layer without df11, and one that keeps weights compressed."""
    for is_kept in (False, True):
        config = kind.config()
        if is_kept:
            keep_compressed(config)
        yield make(config)


def finish(layer: Any, device: torch.device) -> None:
    with torch.device("cpu"):
        fill(layer, Options(), device, None)
    layer.quant_method.process_weights_after_loading(layer)


def check_linear(name: str, kind: Kind, sources: Any, device: torch.device, what: str) -> None:
    make, arguments, shards = LAYERS[name]
    layers = [*pair(kind, lambda config: make(*arguments, bias=False, quant_config=config))]
    for layer, source in zip(layers, sources, strict=True):
        for shard, tensor in shards.items():
            others = () if shard is None else (shard,)
            for parameter, value in (("weight", tensor), (kind.scale_name, f"{tensor}.scale")):
                weight = getattr(layer, parameter)
                weight.weight_loader(weight, source[value], *others)
        finish(layer, device)
    dense, layer = layers
    assert type(layer.quant_method).__name__ == type(dense.quant_method).__name__
    assert not layer.df11_changed, (what, name)
    check_shown(layer.weight, dense.weight)
    for rows in ROWS:
        x = torch.randn(rows, layer.weight_columns, dtype=torch.bfloat16)
        expected = dense.quant_method.apply(dense, x)
        assert torch.equal(layer.quant_method.apply(layer, x), expected), (what, name, rows)
    check_compiled(layer, x, expected)


def check_changed(kind: Kind, source: Any, device: torch.device) -> None:
    """Weights that vLLM requantizes block by block stay compressed, and shuffled ones do not."""
    made: list[torch.Tensor] = []

    def process(layer: Any, is_shuffled: bool) -> None:
        weight = layer.weight.data
        rows, columns = (side // BLOCK for side in weight.shape)
        requant_weight_ue8m0_inplace(weight, torch.rand(rows, columns) + 0.5)
        if is_shuffled:
            layer.weight = torch.nn.Parameter(weight.flip(0), requires_grad=False)
        made.append(layer.weight.data.clone())
        dense.append(weakref.ref(layer.weight))

    for is_shuffled in (False, True):
        dense: list[Any] = []
        config = kind.config()
        keep_compressed(config)
        layer = ColumnParallelLinear(WIDTH, INNER, bias=False, quant_config=config)
        for parameter, value in (("weight", "gate"), (kind.scale_name, "gate.scale")):
            weight = getattr(layer, parameter)
            weight.weight_loader(weight, source[value])
        del weight
        layer.scheme.process_weights_after_loading = partial(process, is_shuffled=is_shuffled)
        finish(layer, device)
        expected, (parameter_of_vllm,) = made.pop(), dense
        assert layer.df11_changed == ["weight"] * is_shuffled
        assert (parameter_of_vllm() is None) != is_shuffled
        if is_shuffled:
            assert layer.weight_key is None and not layer.df11_views
            assert torch.equal(layer.weight.view(torch.uint8), expected.view(torch.uint8))
        else:
            check_shown(layer.weight, expected)


def check_shown(weight: Any, expected: Any) -> None:
    """Code of vLLM that reads the weight finds its own."""
    assert isinstance(weight, Shown)
    for one in (weight.shape, weight.stride(), weight.dtype, weight.device):
        assert one in (expected.shape, expected.stride(), expected.dtype, expected.device)
    assert torch.equal(weight.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(weight.float(), expected.float())


def check_compiled(layer: Any, x: torch.Tensor, expected: torch.Tensor) -> None:
    """vLLM compiles models as one graph, without breaks."""
    is_off, torch._dynamo.config.disable = torch._dynamo.config.disable, False
    torch._dynamo.reset()  # which else compiles the method for a few layers only
    try:
        run = torch.compile(layer.quant_method.apply, fullgraph=True, backend="aot_eager")
        assert torch.equal(run(layer, x), expected)
    finally:
        torch._dynamo.config.disable = is_off


def check_experts(kind: Kind, sources: Any, device: torch.device, what: str) -> None:
    create = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE  # as 0.26 calls it

    def make(config: Any) -> Any:
        given = EXPERTS, 2, WIDTH, 256
        prefix = f"fp8.{next(NUMBERS)}"
        return create(*given, renormalize=True, quant_config=config, prefix=prefix).routed_experts

    layers = [*pair(kind, make)]
    for layer, source in zip(layers, sources, strict=True):
        for expert, shard in itertools.product(range(EXPERTS), ("w1", "w2", "w3")):
            stem = "w2" if shard == "w2" else "w13"
            for end, value in (("weight", ""), (kind.scale_name, ".scale")):
                name = f"{stem}_{end}"
                tensor = source[f"e{expert}.{shard}{value}"]
                weight = getattr(layer, name)
                layer.weight_loader(weight, tensor, name, shard, expert)
        finish(layer, device)
    dense, layer = layers
    assert not layer.quant_method.supports_eplb
    for name in ("w13_weight", "w2_weight"):
        check_shown(getattr(layer, name), getattr(dense, name))
    for rows in ROWS:
        x = torch.randn(rows, WIDTH, dtype=torch.bfloat16)
        weights, ids = torch.randn(rows, EXPERTS).float().softmax(-1).topk(2)
        given = x, weights, ids.int(), None, None
        found, expected = (each.quant_method.apply(each, *given) for each in (layer, dense))
        assert torch.equal(found, expected), (what, rows)
