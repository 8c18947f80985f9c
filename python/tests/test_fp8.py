"""Models of transformers in FP8 whose weights stay compressed in memory, with the same bits."""

import copy
import gc
import json
import os
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from conftest import on_devices, run
from models import compressed, config_of, equal, greedy, load, prompt, same_weights, seeded
from safetensors.torch import load_file, save_file
from test_foreign import WORDS
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations import finegrained_fp8
from transformers.quantizers.auto import CompressedTensorsHfQuantizer, FineGrainedFP8HfQuantizer

import df11
from df11 import _foreign, _ops
from df11._container import Tensors
from df11._tensor import CompressedTensor

BLOCK = 64
METHOD = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
METHOD |= {"modules_to_not_convert": ["lm_head"]}
EXPERTS = ["grouped_mm", "batched_mm", "eager"]
MODELS = [("llama", None), *(("qwen3-moe", each) for each in EXPERTS)]

Both = tuple[Path, Path]


def quantized(name: str, folder: Path, method: dict[str, Any] = METHOD) -> Both:
    """A folder with FP8 weights in linear layers and a scale for each block, and the compressed
    one.
    """
    seeded(AutoModelForCausalLM.from_config(config_of(name))).save_pretrained(folder / "fp8")
    file = folder / "fp8" / "model.safetensors"
    weights = load_file(file)
    for each in [each for each in weights if each.endswith("proj.weight")]:
        weights[each], weights[f"{each}_scale_inv"] = in_blocks(weights[each].float())
    save_file(weights, file, {"format": "pt"})
    return named(folder, method)


def named(folder: Path, method: dict[str, Any]) -> Both:
    """Writes the name of the quantization, and compresses."""
    file = folder / "fp8" / "config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, "quantization_config": method}))
    return folder / "fp8", compressed(folder / "fp8", folder / "df11")


def in_blocks(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = value.shape
    whole = pad(value, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = whole.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    made = (blocks / scales).flatten(2).flatten(0, 1)[:rows, :columns]
    return made.to(torch.float8_e4m3fn).contiguous(), scales[:, 0, :, 0].contiguous()


@pytest.fixture(scope="module")
def folders_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Both]:
    """Makes both folders of a model, once; nobody writes to them."""
    known: dict[str, Both] = {}

    def folders(name: str) -> Both:
        if name not in known:
            known[name] = quantized(name, tmp_path_factory.mktemp(name))
        return known[name]

    return folders


@pytest.fixture
def both(folders_of: Callable[[str], Both]) -> Both:
    return folders_of("llama")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products for FP8: transformers' own kernels come from the Hub, or from `LOCAL_KERNELS`. On
    the CPU it would dequantize.
    """
    if not torch.cuda.is_available():
        monkeypatch.setattr(
            FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None
        )
    if "LOCAL_KERNELS" not in os.environ:
        monkeypatch.setattr(finegrained_fp8, "_FINEGRAINED_FP8", kernels())


def kernels() -> finegrained_fp8.FineGrainedFP8:
    return finegrained_fp8.FineGrainedFP8(matmul, batched_matmul, grouped_matmul)


def matmul(
    x: torch.Tensor, w: Any, scales: torch.Tensor, block_size: Any, dtype: Any = None, **_: Any
) -> torch.Tensor:
    assert type(w) in (torch.Tensor, torch.nn.Parameter) and w.dtype == torch.float8_e4m3fn
    assert list(block_size) == [BLOCK, BLOCK]
    if w.is_cuda:
        from triton_fp8 import product

        return product(x, w, scales, BLOCK)
    rows, columns = w.shape
    whole = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    return (x.float() @ (w.float() * whole).T).to(x.dtype)


def batched_matmul(x: Any, w: Any, scales: Any, block_size: Any, expert_ids: Any) -> torch.Tensor:
    pairs = zip(x.split(1), expert_ids.tolist(), strict=True)
    return torch.cat([matmul(row, w[e], scales[e], block_size) for row, e in pairs])


def grouped_matmul(
    x: Any, w: Any, scales: Any, offsets: Any, tokens_per_expert: Any, block_size: Any
) -> torch.Tensor:
    counts = tokens_per_expert.int().tolist()
    assert offsets[-1] == sum(counts) == len(x)
    parts = enumerate(x.split(counts))
    return torch.cat([matmul(p, w[e], scales[e], block_size) for e, p in parts if len(p)])


def pair(folders: Both, device: str = "cpu", **options: Any) -> tuple[Any, Any]:
    """The models of both folders, without any warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        original, model = (load(folder, device, **options) for folder in folders)
    return original.requires_grad_(False), model


@on_devices
@pytest.mark.parametrize(("name", "experts"), MODELS)
@pytest.mark.usefixtures("products")
def test_weights_stay_compressed_and_logits_are_the_same(
    folders_of: Callable[[str], Both], name: str, experts: str | None, device: str
) -> None:
    options = {} if experts is None else {"experts_implementation": experts}
    original, model = pair(folders_of(name), device, **options)
    assert same_weights(model, original)
    expected = greedy(original, prompt(2, 9), 4)
    assert torch.isfinite(expected[0]).all() and equal(greedy(model, prompt(2, 9), 4), expected)
    kinds = {name: type(value) for name, value in model.named_parameters()}
    assert [name for name in kinds if kinds[name] is CompressedTensor]
    assert all(kinds[name] is not CompressedTensor for name in kinds if "scale" in name)
    wide = "gate_up_proj" if experts else "mlp.up_proj.weight"
    assert all(kinds[name] is CompressedTensor for name in kinds if name.endswith(wide))
    assert same_weights(model, original)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
@pytest.mark.usefixtures("products")
def test_memory_and_report(folders_of: Callable[[str], Both], name: str) -> None:
    original, model = pair(folders_of(name))
    report = df11.report(model, verify=True)
    assert report and report.modes == ["exact"] and not report.unused_tensors
    assert report.verified == len(report.residences) == len(dict(model.named_parameters()))
    assert report.original_bytes == sum(value.nbytes for value in original.parameters())
    assert report.ratio < 0.85
    saved = original.get_memory_footprint() - model.get_memory_footprint()
    assert saved == report.saved_bytes > 0
    assert "a vector" in report.ordinary and "stored as it is" in report.ordinary


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, weakref.ref[Any]]]:
    """The numbers of weights that are decoded, and the tensors."""
    found: list[tuple[int, weakref.ref[Any]]] = []

    def watched(decode: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*arguments: Any) -> Any:
            dense = decode(*arguments)
            # A product has freed what was decoded for the one before it.
            assert not [each for _, each in found if each() is not None]
            found.append((dense.numel(), weakref.ref(dense)))
            return dense

        return watch

    for owner, name in ((CompressedTensor, "decode"), (_ops, "decode")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    return found


@pytest.mark.parametrize(("name", "experts"), MODELS)
@pytest.mark.usefixtures("products")
@torch.no_grad()
def test_a_layer_decodes_what_it_reads(
    folders_of: Callable[[str], Both],
    name: str,
    experts: str | None,
    made: list[tuple[int, weakref.ref[Any]]],
) -> None:
    """One weight at a time, and of six experts those two that a token is routed to."""
    options = {} if experts is None else {"experts_implementation": experts}
    model = load(folders_of(name)[1], **options)
    layer = model.model.layers[0].mlp
    x = torch.randn(1, 1, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    made.clear()
    layer(x)
    if experts is None:
        expected = [layer.gate_proj.weight.numel()] * 3
    else:
        up, down = (
            value[0].numel() for value in (layer.experts.gate_up_proj, layer.experts.down_proj)
        )
        expected = [up, down] * 2 if experts == "eager" else [2 * up, 2 * down]
    assert [count for count, _ in made] == expected


@pytest.mark.parametrize("device_map", [None, "auto", "cpu", {"": "cpu"}])
@pytest.mark.usefixtures("products")
@torch.no_grad()
def test_device_maps(both: Both, device_map: Any) -> None:
    original, model = pair(both, device_map)
    found, expected = (each(prompt().to(each.device)).logits for each in (model, original))
    assert equal([found], [expected])
    assert df11.report(model, verify=True).ratio < 0.85 or torch.cuda.is_available()


@pytest.mark.usefixtures("products")
@torch.no_grad()
def test_another_dtype_decodes_what_it_converts(both: Both) -> None:
    original, model = (load(folder, dtype=torch.float16) for folder in both)
    assert same_weights(model, original)
    assert equal([model(prompt()).logits], [original(prompt()).logits])
    report = df11.report(model, verify=True)
    assert report.residences["lm_head.weight"] == "ordinary"
    assert "stored as bfloat16, used as float16" in report.ordinary
    assert report.residences["model.layers.0.mlp.up_proj.weight"] == "stored"


@pytest.mark.usefixtures("products")
@torch.no_grad()
def test_accelerate_offloads_them(both: Both) -> None:
    original, model = pair(both)
    model = cpu_offload(model, execution_device=torch.device("cpu"))
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.is_meta and type(weight) is CompressedTensor
    assert equal([model(prompt()).logits], [original(prompt()).logits])


def test_scales_are_ordinary(tmp_path: Path) -> None:
    """Large ones too, whose arrays would be smaller."""
    scales = torch.rand(256, 512, generator=torch.Generator().manual_seed(1))
    save_file({"scales": scales}, tmp_path / "x.safetensors")
    df11.compress(tmp_path / "x.safetensors", tmp_path / "x.df11", progress=False)
    tensors, reasons = Tensors(df11.open(tmp_path / "x.df11")), {}
    assert isinstance(tensors["scales"], CompressedTensor)
    found = _foreign._Undecoded(tensors, "scales", reasons).to("cpu", torch.float32)
    assert type(found) is torch.Tensor and equal([found], [scales])
    assert reasons == {"scales": "F32, as scales are"}


@pytest.mark.usefixtures("products")
def test_plans_count_compressed_bytes(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests the bytes that a device_map counts, and those that transformers reserves."""
    sizes: list[float] = []

    def watched(self: Any, model: Any, name: str, value: torch.Tensor) -> float:
        sizes.append(element_size(self, model, name, value) / value.element_size())
        return sizes[-1]

    element_size = FineGrainedFP8HfQuantizer.param_element_size
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "param_element_size", watched)
    load(both[0], "auto")
    assert sizes and set(sizes) == {1}
    sizes.clear()
    load(both[1], "auto")
    assert sizes and 0.5 < min(sizes) == max(sizes) < 1


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
@pytest.mark.usefixtures("products")
def test_save_pretrained_copies_the_containers(
    folders_of: Callable[[str], Both], name: str, tmp_path: Path
) -> None:
    folders = folders_of(name)
    original, model = pair(folders)
    model.save_pretrained(tmp_path / "copy")
    expected, found = (
        {path.name for path in each.iterdir()} for each in (folders[1], tmp_path / "copy")
    )
    assert found == expected
    container = "model.df11"
    assert (tmp_path / "copy" / container).read_bytes() == (folders[1] / container).read_bytes()
    assert said(tmp_path / "copy")["quant_method"] == "fp8"
    assert same_weights(load(tmp_path / "copy"), original)
    df11.decompress(tmp_path / "copy", tmp_path / "back", progress=False)
    stored, kept = (
        load_file(each / "model.safetensors") for each in (folders[0], tmp_path / "back")
    )
    assert stored.keys() == kept.keys()
    assert equal(map(bits, kept.values()), (bits(stored[name]) for name in kept))


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1).view(torch.uint8)


def said(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
@pytest.mark.usefixtures("products")
@torch.no_grad()
def test_a_changed_model_is_compressed_anew(
    folders_of: Callable[[str], Both], name: str, tmp_path: Path
) -> None:
    original, model = pair(folders_of(name))
    for each in (original, model):
        each.model.norm.weight.add_(1)
    model.save_pretrained(tmp_path / "changed")
    assert said(tmp_path / "changed")["quant_method"] == "fp8"
    again = load(tmp_path / "changed")
    assert same_weights(again, original) and df11.report(again, verify=True).ratio < 0.85


@pytest.mark.usefixtures("products")
@torch.no_grad()
def test_copies_and_pickles(both: Both, tmp_path: Path) -> None:
    original, model = pair(both)
    expected = original(prompt()).logits
    torch.save(model, tmp_path / "model.pt")
    for made in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert equal([made(prompt()).logits], [expected])
        assert df11.report(made).ratio < 0.85


@pytest.mark.usefixtures("products")
@torch.no_grad()
def test_another_process_unpickles_a_model(both: Both, tmp_path: Path) -> None:
    original, model = pair(both)
    torch.save(model, tmp_path / "model.pt")
    save_file({"logits": original(prompt()).logits}, tmp_path / "logits.safetensors")
    unpickle = """
        import sys

        import torch
        from safetensors.torch import load_file

        folder, tests = sys.argv[1:]
        model = torch.load(f"{folder}/model.pt", weights_only=False)
        sys.path.append(tests)
        from models import prompt
        from test_fp8 import finegrained_fp8, kernels

        finegrained_fp8._FINEGRAINED_FP8 = kernels()
        expected = load_file(f"{folder}/logits.safetensors")["logits"]
        with torch.no_grad():
            assert torch.equal(model(prompt()).logits, expected)
        model.save_pretrained(f"{folder}/saved")
    """
    run(unpickle, tmp_path, Path(__file__).parent)
    assert same_weights(load(tmp_path / "saved"), original)


@pytest.mark.usefixtures("products")
@torch.no_grad()
def test_a_compiled_layer_has_the_same_bits(both: Both) -> None:
    layers = [model.model.layers[0].mlp for model in pair(both)]
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    options = {"fullgraph": True, "backend": "aot_eager"}
    expected, found = (torch.compile(layer, **options)(x) for layer in layers)
    assert equal([found, found], [expected, layers[0](x)])


@pytest.mark.usefixtures("products")
def test_dequantize_is_refused_as_without_df11(both: Both) -> None:
    for model in pair(both):
        with pytest.raises(NotImplementedError, match="fp8 has no implementation of `dequantize`"):
            model.dequantize()


@pytest.mark.usefixtures("products")
def test_damage_is_found(both: Both, tmp_path: Path) -> None:
    """Changes signs and mantissas too, which decode to other weights."""
    folder = shutil.copytree(both[1], tmp_path / "damaged")
    held = df11.open(folder)
    (start, _), *_ = held.mappings
    address, length = held["model.layers.0.mlp.up_proj.weight"].tiles.places[-1]
    file = folder / "model.df11"
    data = bytearray(file.read_bytes())
    data[address - start + length // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(df11.CorruptError):
        load(folder)


@torch.no_grad()
def test_a_model_that_is_dequantized_is_decoded(both: Both) -> None:
    options = {"quantization_config": FineGrainedFP8Config(dequantize=True)}
    with pytest.warns(UserWarning, match=f"{WORDS}.* because fp8 dequantizes them"):
        model = load(both[1], **options)
    assert not df11.report(model)
    assert equal([model(prompt()).logits], [load(both[0], **options)(prompt()).logits])


@pytest.mark.usefixtures("products")
@torch.no_grad()
def test_a_release_with_other_functions_decodes(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "transformers.integrations.deepgemm.load_deepgemm_kernel"
    monkeypatch.delattr(place)
    with pytest.warns(UserWarning, match=f"{WORDS}.* loads its kernels by other functions"):
        model = load(both[1])
    assert equal([model(prompt()).logits], [load(both[0])(prompt()).logits])


@pytest.fixture
def rowwise() -> Iterator[None]:
    """PyTorch's row-wise product of FP8, which it lacks on the CPU."""

    def product(a: Any, b: Any, a_scales: Any, *others: Any) -> torch.Tensor:
        _, _, b_scales, _, _, bias, dtype = others[:7]
        assert type(b) is torch.Tensor and b.stride(0) == 1
        y = (a.float() @ b.float()) * a_scales[0] * b_scales[0]
        return (y if bias is None else y + bias).to(dtype)

    if torch.cuda.is_available():
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_mm_v2", product, "CPU")
    yield
    library._destroy()


def by_channel(name: str, folder: Path) -> Both:
    """A folder of compressed-tensors, with a scale for each row, and the compressed one."""
    seeded(AutoModelForCausalLM.from_config(config_of(name))).save_pretrained(folder / "fp8")
    file = folder / "fp8" / "model.safetensors"
    weights = load_file(file)
    for name in [name for name in weights if name.endswith("proj.weight")]:
        scales = weights[name].float().abs().amax(1, keepdim=True) / 448
        weights[name] = (weights[name].float() / scales).to(torch.float8_e4m3fn)
        weights[f"{name}_scale"] = scales.bfloat16()
    save_file(weights, file, {"format": "pt"})
    kind = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**kind, "strategy": "channel", "dynamic": False},
        "input_activations": {**kind, "strategy": "token", "dynamic": True},
    }
    method = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    method |= {"quantization_status": "compressed", "ignore": ["lm_head"]}
    return named(folder, {**method, "config_groups": {"group_0": group}})


@pytest.fixture
def optimized(rowwise: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Any]]:
    """Options for products of compressed-tensors in FP8; a quantizer changes its config."""
    pytest.importorskip("compressed_tensors")
    from transformers import CompressedTensorsConfig

    def validate(self: Any, *_: Any, **__: Any) -> None:
        self.use_fp8_kernel = self.quantization_config.use_optimized_inference

    if not torch.cuda.is_available():
        monkeypatch.setattr(CompressedTensorsHfQuantizer, "validate_environment", validate)
    return lambda: {"quantization_config": CompressedTensorsConfig(use_optimized_inference=True)}


@on_devices
@torch.no_grad()
def test_compressed_tensors(
    optimized: Callable[[], dict[str, Any]], tmp_path: Path, device: str
) -> None:
    folders = by_channel("llama", tmp_path)
    original = load(folders[0], device, **optimized())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "df11", UserWarning)
        model = load(folders[1], device, **optimized())
    kinds = {type(layer.mlp.up_proj.weight) for layer in model.model.layers}
    assert kinds == {CompressedTensor} and same_weights(model, original)
    assert equal([model(prompt().to(device)).logits], [original(prompt().to(device)).logits])
    model.save_pretrained(tmp_path / "copy")
    assert same_weights(load(tmp_path / "copy", device, **optimized()), original)
    with pytest.warns(UserWarning, match="dequantizes them without use_optimized_inference"):
        found = load(folders[1], device)(prompt().to(device)).logits
    assert equal([found], [load(folders[0], device)(prompt().to(device)).logits])


@torch.no_grad()
def test_experts_that_a_loader_dequantizes(
    optimized: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    folders = by_channel("qwen3-moe", tmp_path)
    original = load(folders[0], **optimized())
    with pytest.warns(UserWarning, match="is converted to another dtype, which decodes it"):
        model = load(folders[1], **optimized())
    assert same_weights(model, original)
    assert equal([model(prompt(2, 5)).logits], [original(prompt(2, 5)).logits])
    report = df11.report(model, verify=True)
    assert report.residences["model.layers.0.mlp.experts.gate_up_proj"] == "ordinary"
    assert report.residences["lm_head.weight"] == "stored"


@pytest.mark.gpu
@pytest.mark.usefixtures("products")
@torch.no_grad()
def test_offloaded_weights_are_compressed(both: Both, tmp_path: Path) -> None:
    device_map = {"": "cuda:0", "model.layers.0": "cpu"}
    original, model = (load(folder, device_map) for folder in both)
    for weight in model.model.layers[0].mlp.parameters():
        assert weight.is_meta
    assert equal(greedy(model, prompt(), 2), greedy(original, prompt(), 2))
    assert "offloaded by accelerate" in df11.report(model).ordinary
    with pytest.raises(ValueError, match="offloaded; bring it back first"):
        model.save_pretrained(tmp_path)


@pytest.mark.gpu
@pytest.mark.usefixtures("products")
def test_memory_on_a_gpu(tmp_path: Path) -> None:
    """Loads a model whose decode tables are small beside its weights."""
    config = config_of("llama")
    config.hidden_size, config.intermediate_size, config.head_dim = 1024, 4096, 64
    config.num_attention_heads = config.num_key_value_heads = 16
    root = tmp_path / "fp8"
    seeded(AutoModelForCausalLM.from_config(config)).save_pretrained(root)
    weights = load_file(root / "model.safetensors")
    for each in [each for each in weights if each.endswith("proj.weight")]:
        weights[each], weights[f"{each}_scale_inv"] = in_blocks(weights[each].float())
    save_file(weights, root / "model.safetensors", {"format": "pt"})
    taken, logits = [], []
    for folder in named(tmp_path, METHOD):
        gc.collect()
        before = torch.cuda.memory_allocated()
        model = load(folder, "cuda")
        taken.append(torch.cuda.memory_allocated() - before)
        logits.append(greedy(model, prompt(), 3))
        del model
    assert equal(logits[1], logits[0]) and taken[1] < 0.87 * taken[0], taken
