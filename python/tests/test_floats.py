"""Tensors of FP8, F16 and F32: compressed in a container and in modules, exact."""

import copy
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import (
    UNTIED,
    adapted,
    bert_config,
    compressed,
    config_of,
    equal,
    load,
    prompt,
    same_weights,
    saved,
    seeded,
)
from safetensors.torch import load_file, save_file
from weights import same

import df11
import df11.torch
from df11 import _plan
from df11._encoding import MIN_BYTES
from df11._matrices import TABLE_BYTES
from df11._tensor import CompressedTensor

NAMES = ["bf16-of-e4m3", "e4m3", "e5m2", "f16", "f32", "f32-of-bf16", "f32-of-f16"]
NAMES += ["odd", "special"]


def as_fp8(value: torch.Tensor) -> torch.Tensor:
    """BF16 that was E4M3, with a scale that is a power of two."""
    scale = 2.0 ** (448 / value.abs().max().float()).log2().floor()
    return (value.float() * scale).to(torch.float8_e4m3fn).bfloat16() / scale.bfloat16()


def floats() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    normal = 0.02 * torch.randn(96, 520, generator=generator)
    special = normal.clone()
    bits = special.view(torch.int32)
    words = [0, 1, 0x007FFFFF, 0x7F800000, 0x7F800001, 0x7FC12345, 0x7FFFFFFF]
    bits[0, : len(words)] = torch.tensor(words, dtype=torch.int32)
    bits[1] = bits[0] | -(1 << 31)
    return {
        "bf16-of-e4m3": as_fp8(normal.bfloat16()),
        "e4m3": (5000 * normal).to(torch.float8_e4m3fn),
        "e5m2": (5000 * normal).to(torch.float8_e5m2),
        "f16": normal.half(),
        "f32": normal,
        "f32-of-bf16": normal.bfloat16().float(),
        "f32-of-f16": (normal / 1000).half().float(),
        "odd": normal.flatten()[:33333].clone(),
        "special": special,
        "bf16": normal.bfloat16(),
        "steps": torch.arange(9000),
    }


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("floats")
    file, container = folder / "x.safetensors", folder / "x.df11"
    save_file(floats(), file)
    df11.compress(file, container, progress=False)
    return file, container


def test_they_are_compressed(both: tuple[Path, Path]) -> None:
    model = df11.open(both[1])
    assert {name for name in model if model[name].encoding == "float"} == set(NAMES)
    bits = {name: model[name].bits_per_element for name in NAMES}
    # Arrays of such small tensors have codebooks of some hundred bytes to a kilobyte.
    most = {"e4m3": 6.9, "e5m2": 5.9, "f16": 14, "f32": 27, "f32-of-bf16": 11, "f32-of-f16": 14.2}
    most["bf16-of-e4m3"] = 7
    assert all(bits[name] < most[name] for name in most), bits


def test_every_way_to_read_gives_the_same_bits(both: tuple[Path, Path]) -> None:
    expected, model = load_file(both[0]), df11.open(both[1])
    loaded = df11.torch.load_file(both[1])
    assert loaded.keys() == expected.keys()
    with df11.safe_open(both[1], framework="pt") as opened:
        for name, value in expected.items():
            assert same(loaded[name], value) and same(opened.get_tensor(name), value)
            assert same(model[name].torch(), value)
            part = opened.get_slice(name)[3:40]
            assert same(part, value[3:40]), name
            if value.dim() == 2:
                assert same(opened.get_slice(name)[5:70, 250:300], value[5:70, 250:300]), name


def test_they_come_back_byte_for_byte(both: tuple[Path, Path], tmp_path: Path) -> None:
    df11.decompress(both[1], tmp_path / "back", progress=False)
    assert (tmp_path / "back" / "x.safetensors").read_bytes() == both[0].read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_module_has_exact_values(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    module = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 128)).to(dtype)
    save_file(module.state_dict(), tmp_path / "x.safetensors")
    df11.compress(tmp_path / "x.safetensors", tmp_path / "x.df11", progress=False)
    attached = df11.attach(copy.deepcopy(module), tmp_path / "x.df11", device="cpu")
    assert same_weights(attached, module) and all_matrices_are_compressed(attached)
    assert set(df11.report(attached, verify=True).ordinary) == {"a vector"}
    x = torch.randn(3, 256).to(dtype)
    assert same(attached(x), module(x))


def all_matrices_are_compressed(model: Any) -> bool:
    layers = (torch.nn.Linear, torch.nn.Embedding)
    weights = [one.weight for one in model.modules() if isinstance(one, layers)]
    large = [one for one in weights if one.numel() * one.element_size() >= MIN_BYTES]
    return bool(large) and all(isinstance(one, CompressedTensor) for one in large)


def share(model: Any, original: Any) -> float:
    """The memory of a model, which is as its report says, as a share of the original's."""
    report = df11.report(model, verify=True)
    whole = sum(value.nbytes for value in original.parameters())
    assert report.original_bytes == whole
    buffers = sum(value.nbytes for value in model.buffers())
    assert report.device_bytes <= model.get_memory_footprint() <= report.device_bytes + buffers + 64
    return report.device_bytes / whole


def low(dtype: torch.dtype) -> Any:
    """Makes a model whose F32 weights have the values of a smaller dtype."""
    return lambda model: model.to(dtype).float()


def aligned(model: Any) -> Any:
    """A copy whose weights begin on multiples of 64 bytes. MKL's F32 product of one row depends on
    where its weights lie, and those that are mapped from a file begin anywhere.
    """
    return copy.deepcopy(model).requires_grad_(False)


def filled(model: Any) -> Any:
    """F32 weights with all their bits: those of `seeded` are BF16 numbers."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1 + torch.rand(value.shape, generator=generator) / 100)
    return model


def whisper() -> Any:
    sizes = {"d_model": 128, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "vocab_size": 512}
    layers = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers",)}
    heads = {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(
        **sizes, **layers, **heads, **tokens, max_source_positions=64, num_mel_bins=16
    )
    return transformers.WhisperForConditionalGeneration(config)


def run_whisper(model: Any) -> Any:
    generator = torch.Generator().manual_seed(6)
    mel = torch.randn(2, 16, 128, generator=generator).to(model.device, model.dtype)
    return model(input_features=mel, decoder_input_ids=prompt(2, 9).to(model.device)).logits


def run_bert(model: Any) -> Any:
    tokens = prompt().to(model.device)
    return model(tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state


#: A model, its weights, what it computes, and the largest share of memory that it may take.
MODELS: dict[str, tuple[Any, Any, Any, float]] = {
    "whisper in F16": (whisper, lambda model: model.half(), run_whisper, 0.91),
    "whisper in F32 of F16": (whisper, low(torch.float16), run_whisper, 0.52),
    "bert in F32": (
        lambda: transformers.BertModel(bert_config()),
        lambda model: filled(model.float()),
        run_bert,
        0.86,
    ),
    "bert in F32 of BF16": (
        lambda: transformers.BertModel(bert_config()),
        low(torch.bfloat16),
        run_bert,
        0.40,
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model in both forms, how to run it, the largest share of memory, and its folders."""
    make, change, run, most = MODELS[request.param]
    folders = saved(change(seeded(make())), tmp_path_factory.mktemp("model"))
    kind = type(make())
    original, model = (kind.from_pretrained(folder, device_map="cpu") for folder in folders)
    return aligned(original), model, run, most, folders


def test_models_of_other_floats(pair: Any) -> None:
    original, model, run, most, (before, _) = pair
    assert {value.dtype for value in model.parameters()} == {original.dtype}
    assert same_weights(model, original) and all_matrices_are_compressed(model)
    found, expected = run(model), run(original)
    assert same(found, expected) and found.isfinite().all()
    assert share(model, original) < most
    attached = df11.attach(type(original)(original.config).to(original.dtype), pair[4][1])
    assert same(run(attached), expected) and share(attached, original) < most
    on_load = type(original).from_pretrained(
        before, device_map="cpu", quantization_config=df11.Config()
    )
    assert same(run(on_load), expected) and share(on_load, original) < most


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"residence": "fast"}, {"streamed": True}])
@torch.no_grad()
def test_models_on_a_gpu(pair: Any, options: dict[str, Any]) -> None:
    original, _, run, most, (before, after) = pair
    kind = type(original)
    original = kind.from_pretrained(before, device_map="cuda")
    for folder in (after, before):
        model = kind.from_pretrained(
            folder, device_map="cuda", quantization_config=df11.Config(**options)
        )
        assert {value.dtype for value in model.parameters()} == {original.dtype}
        assert all_matrices_are_compressed(model) and same_weights(model, original)
        assert same(run(model), run(original))
        report = df11.report(model, verify=True)
        # Only BF16 has the fast layout.
        expected = "streamed" if "streamed" in options else "stored"
        assert {*report.residences.values()} == {expected, "ordinary"}
        count = [*report.residences.values()].count(expected)
        assert report.device_bytes < most * report.original_bytes + count * TABLE_BYTES


def test_they_are_saved_byte_for_byte(pair: Any, tmp_path: Path) -> None:
    original, model, run, _, (_, after) = pair
    model.save_pretrained(tmp_path / "again")
    for name in ("model.df11", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (after / name).read_bytes()
    again = type(original).from_pretrained(tmp_path / "again", device_map="cpu")
    assert same(run(again), run(original))
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    assert equal(kept.values(), original.state_dict().values())


def test_copies_and_moves_stay_compressed(pair: Any) -> None:
    original, model, run, most, _ = pair
    other = copy.deepcopy(model).to("cpu")
    other.load_state_dict(model.state_dict(), assign=True)
    assert same(run(other), run(original)) and all_matrices_are_compressed(other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wide = copy.deepcopy(model).to(torch.float64)
    expected = copy.deepcopy(original).to(torch.float64)
    assert equal(wide.state_dict().values(), expected.state_dict().values())
    assert share(model, original) < most


def test_they_train_adapters(pair: Any) -> None:
    peft = pytest.importorskip("peft")
    original, model, run, _, _ = pair
    grads = []
    for each in (original, model):
        targets = [name for name, one in each.named_modules() if isinstance(one, torch.nn.Linear)]
        options = {"r": 4, "target_modules": targets, "init_lora_weights": False}
        torch.manual_seed(5)
        trained = peft.get_peft_model(copy.deepcopy(each), peft.LoraConfig(**options))
        run(trained.base_model.model).float().square().mean().backward()
        named = trained.named_parameters()
        grads.append({name: one.grad for name, one in named if one.requires_grad})
    assert grads[0].keys() == grads[1].keys() and grads[0]
    assert all(
        same(grads[0][name], grads[1][name]) for name in grads[0] if grads[0][name] is not None
    )


def test_they_compile_as_one_graph(pair: Any) -> None:
    original, model, *_ = pair
    if "Whisper" in type(model).__name__:
        pytest.skip("its forward breaks the graph without df11 too")
    torch._dynamo.reset()
    with torch.no_grad():
        made = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert same(made(prompt()).last_hidden_state, original(prompt()).last_hidden_state)


def test_damage_is_found(pair: Any, tmp_path: Path) -> None:
    original, _, _, _, (_, after) = pair
    folder = Path(shutil.copytree(after, tmp_path / "damaged"))
    data = bytearray((folder / "model.df11").read_bytes())
    data[len(data) // 2] ^= 255
    (folder / "model.df11").write_bytes(data)
    with pytest.raises(df11.CorruptError):
        type(original).from_pretrained(folder, device_map="cpu")
    with pytest.raises(df11.CorruptError):
        df11.attach(type(original)(original.config).to(original.dtype), folder)


def test_several_dtypes_in_one_module(tmp_path: Path) -> None:
    kinds = [torch.float32, torch.float16, torch.bfloat16]
    torch.manual_seed(3)
    module = torch.nn.ModuleList(torch.nn.Linear(256, 256).to(kind) for kind in kinds)
    module.append(torch.nn.Linear(256, 256).to(torch.bfloat16).float())
    save_file(module.state_dict(), tmp_path / "x.safetensors")
    df11.compress(tmp_path / "x.safetensors", tmp_path / "x.df11", progress=False)
    attached = df11.attach(copy.deepcopy(module), tmp_path / "x.df11", device="cpu")
    assert same_weights(attached, module)
    for found, expected in zip(attached, module, strict=True):
        assert isinstance(found.weight, CompressedTensor)
        x = torch.randn(3, 256).to(expected.weight.dtype)
        assert same(found(x), expected(x))
    sizes = [layer.weight.nbytes / 65536 for layer in attached]
    assert sizes[0] < 3.5 and sizes[1] < 1.8 and sizes[2] < 1.45 and sizes[3] < 1.45, sizes


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "mixtral", "qwen3-moe"])
def test_architectures(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Tied embeddings, transposed weights, and experts that the loader stacks."""
    model = seeded(transformers.AutoModelForCausalLM.from_config(config_of(name)))
    before, after = saved(filled(model.float()).to(dtype), tmp_path)
    original, model = aligned(load(before)), load(after)
    assert model.dtype == dtype and same_weights(model, original)
    assert same(model(prompt()).logits, original(prompt()).logits)
    assert share(model, original) < 0.95
    if name == "llama-tied":
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert isinstance(model.lm_head.weight, CompressedTensor)


def test_parts_of_no_matrix_say_why_they_are_ordinary(tmp_path: Path) -> None:
    module = torch.nn.ParameterDict(
        {
            "odd": torch.randn(300, 301).half(),
            "narrow": torch.randn(3000, 16).half(),
            "small": torch.randn(16, 128).half(),
            "vector": torch.randn(40000).half(),
            "whole": torch.randn(256, 256).half(),
        }
    )
    save_file(dict(module.items()), tmp_path / "x.safetensors")
    df11.compress(tmp_path / "x.safetensors", tmp_path / "x.df11", progress=False)
    attached = df11.attach(copy.deepcopy(module), tmp_path / "x.df11", device="cpu")
    reasons = df11.report(attached).ordinary
    assert reasons.keys() == {_plan.ODD, _plan.NARROW, "stored as it is", "a vector"}
    assert isinstance(attached["whole"], CompressedTensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_model_gives_the_same_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    config = config_of("llama")
    model = transformers.AutoModelForCausalLM.from_config(config)
    model = seeded(model).float().to(dtype)
    assert UNTIED and model.config.tie_word_embeddings is False
    before, after = saved(model, tmp_path)
    encodings = {tensor.encoding for tensor in df11.open(after).values()}
    assert "float" in encodings
    original, compressed = aligned(load(before, dtype=dtype)), load(after, dtype=dtype)
    assert equal(compressed.state_dict().values(), original.state_dict().values())
    assert torch.equal(compressed(prompt()).logits, original(prompt()).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_model_is_saved_and_merged(tmp_path: Path, dtype: torch.dtype) -> None:
    """As it was, changed, compressed while it is loaded, and with an adapter merged."""
    peft = pytest.importorskip("peft")
    before, after = saved(
        seeded(transformers.AutoModelForCausalLM.from_config(config_of("llama"))).to(dtype),
        tmp_path,
    )
    model, made = load(after), load(before, quantization_config=df11.Config())
    for each, name in ((model, "copied"), (made, "made")):
        each.save_pretrained(tmp_path / name)
        container = (tmp_path / name / "model.df11").read_bytes()
        assert container == (after / "model.df11").read_bytes()
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "changed")
    again = load(tmp_path / "changed")
    assert again.dtype == dtype
    assert equal(again.state_dict().values(), model.state_dict().values())
    adapted(load(before)).save_pretrained(tmp_path / "adapter")
    df11.merge_adapter(after, tmp_path / "adapter", tmp_path / "merged")
    expected = peft.PeftModel.from_pretrained(load(before), tmp_path / "adapter")
    merged, wanted = load(tmp_path / "merged"), expected.merge_and_unload()
    assert equal(merged.state_dict().values(), wanted.state_dict().values())


class Fp8Linear(torch.nn.Module):
    """Multiplies by FP8 weights with a scale for each row, in one of two ways."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        weight = (50 * torch.randn(rows, columns)).to(torch.float8_e4m3fn)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.scale = torch.nn.Parameter(torch.rand(rows, 1) / 50, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.weight.to(x.dtype) * self.scale.to(x.dtype)
        one = torch.ones((), dtype=torch.float32)
        scaled = torch._scaled_mm(
            x.to(torch.float8_e4m3fn), self.weight.t(), one, one, out_dtype=torch.float32
        )
        return torch.nn.functional.linear(x, wide) + scaled * self.scale.t()


def test_a_module_of_fp8_keeps_it_compressed(tmp_path: Path) -> None:
    torch.manual_seed(4)
    module = torch.nn.Sequential(Fp8Linear(256, 512), Fp8Linear(128, 256))
    save_file(module.state_dict(), tmp_path / "x.safetensors")
    df11.compress(tmp_path / "x.safetensors", tmp_path / "x.df11", progress=False)
    attached = df11.attach(copy.deepcopy(module), tmp_path / "x.df11", device="cpu")
    assert all(isinstance(layer.weight, CompressedTensor) for layer in attached)
    assert all(layer.weight.nbytes < 0.9 * layer.weight.numel() for layer in attached)
    x = torch.randn(3, 512)
    with pytest.warns(UserWarning, match="converted to another dtype"):
        found = attached(x)
    assert same(found, module(x)) and same_weights(attached, module)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["flux", "unet"])
@torch.no_grad()
def test_models_of_diffusers(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    pipelines = pytest.importorskip("pipelines")
    made = filled(seeded(getattr(pipelines, kind)()).float()).to(dtype)
    folders = saved(made, tmp_path)
    loaded = [type(made).from_pretrained(folder, torch_dtype=dtype) for folder in folders]
    loaded.append(df11.attach(type(made).from_config(dict(made.config)).to(dtype), folders[1]))
    given = {
        name: value.to(dtype) if value.dtype == torch.bfloat16 else value
        for name, value in pipelines.inputs(kind).items()
    }
    loaded[0] = aligned(loaded[0])
    original, *others = (model(**given).sample for model in loaded)
    assert original.isfinite().all() and all(same(other, original) for other in others)
    for model in loaded[1:]:
        report = df11.report(model, verify=True)
        assert report.ratio < 0.95
        assert "stored" in report.residences.values()
        large = [value for value in report.large_ordinary.values() if "a buffer" not in value]
        assert not large, large


def was_fp8(root: Path) -> tuple[Path, Path]:
    """A BF16 model whose weights were E4M3, except those of one matrix: both folders."""
    model = seeded(transformers.AutoModelForCausalLM.from_config(config_of("llama")))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "layers.1.self_attn.q_proj" not in name:
                value.copy_(as_fp8(value))
    model.save_pretrained(root / "bf16")
    return root / "bf16", compressed(root / "bf16", root / "df11")


def test_bf16_that_was_fp8_stays_compressed(tmp_path: Path) -> None:
    before, after = was_fp8(tmp_path)
    stored = df11.open(after)
    large = {one.encoding for one in stored.values() if one.nbytes >= MIN_BYTES}
    assert large == {"float", "tile"}
    original, model = aligned(load(before)), load(after)
    attached = df11.attach(copy.deepcopy(original), after, device="cpu")
    for each in (model, attached):
        assert same_weights(each, original) and all_matrices_are_compressed(each)
        assert same(each(prompt()).logits, original(prompt()).logits)
        assert share(each, original) < 0.55
    model.save_pretrained(tmp_path / "again")
    container = (tmp_path / "again" / "model.df11").read_bytes()
    assert container == (after / "model.df11").read_bytes()


@pytest.mark.gpu
@pytest.mark.parametrize("residence", ["auto", "fast", "stored", "streamed"])
@torch.no_grad()
def test_bf16_that_was_fp8_on_a_gpu(tmp_path: Path, residence: str) -> None:
    before, after = was_fp8(tmp_path)
    options = {"streamed": True} if residence == "streamed" else {"residence": residence}
    original = load(before, "cuda")
    expected = original(prompt().cuda()).logits
    for mode in ("exact", "fused"):
        config = df11.Config(mode=mode, **options)
        model = load(after, "cuda", quantization_config=config)
        assert same_weights(model, original) and all_matrices_are_compressed(model)
        logits = model(prompt().cuda()).logits
        if mode == "exact":
            assert same(logits, expected)
        else:
            assert torch.allclose(logits, expected, rtol=0.05, atol=0.05)
        report = df11.report(model, verify=True)
        actual = "fast" if residence == "auto" else residence
        assert {*report.residences.values()} == {actual, "ordinary"}
