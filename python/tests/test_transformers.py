"""from_pretrained of compressed folders: every bit as with BF16 weights."""

import contextlib
import copy
import gc
import inspect
import io
import json
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import needs_compiler, on_devices
from models import (
    CAUSAL,
    SMALL,
    UNTIED,
    Folders,
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
from df11._tensor import CompressedTensor
from df11._watch import raise_if_damaged


def with_options(folder: Path, **options: Any) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    config.quantization_config = {"quant_method": "df11", **options}
    return config


def loaded(folders: Folders, name: str, device: Any = "cuda", **options: Any) -> Any:
    return load(folders.df11(name), device, quantization_config=df11.Config(**options))


def same_steps(original: Any, model: Any, tokens: Any = None, steps: int = 12) -> bool:
    tokens = prompt() if tokens is None else tokens
    return equal(greedy(model, tokens, steps), greedy(original, tokens, steps))


@on_devices
@pytest.mark.parametrize("name", CAUSAL)
def test_logits_are_those_of_the_bf16_model(folders: Folders, name: str, device: str) -> None:
    original, model = folders.pair(name, device)
    for rows, length in [(1, 1), (1, 37), (3, 40)]:
        assert same_steps(original, model, prompt(rows, length), 8)
    assert df11.report(model, verify=True).verified
    for told in ("dtype", "device"):
        assert getattr(model, told) == getattr(original, told)
    assert model.num_parameters() == original.num_parameters()
    assert model.get_memory_footprint() <= original.get_memory_footprint()
    shapes, expected = (
        {name: (p.shape, p.dtype, p.requires_grad) for name, p in each.named_parameters()}
        for each in (model, original)
    )
    assert shapes == expected
    found, expected = (dict(each.named_buffers()) for each in (model, original))
    assert found.keys() == expected.keys() and equal(found.values(), expected.values())


@pytest.mark.parametrize(
    "name", ["llama", "qwen3-tied", "qwen3-wide", "qwen3-moe", "mixtral", "gpt2"]
)
def test_all_matrices_stay_compressed(folders: Folders, name: str) -> None:
    model = load(folders.df11(name))
    report = df11.report(model)
    for parameter, value in model.named_parameters():
        # The codes of one of 16 KB take what they save.
        expected = "stored" if value.dim() > 1 and value.numel() > 1 << 13 else "ordinary"
        assert report.residences[parameter] == expected, parameter
        assert isinstance(value, CompressedTensor) == (expected == "stored")
    assert report.modes == ["exact"]
    assert set(report.ordinary) <= {"a vector", "not smaller when compressed", "stored as it is"}
    assert not report.large_ordinary and not report.unused_tensors
    # Tables of codes are there for each of these small matrices.
    assert report.ratio < (0.72 if name == "qwen3-wide" else 0.76)


@pytest.mark.parametrize("layout", ["gap", "raw"])
def test_other_layouts(folders: Folders, layout: str) -> None:
    original, model = load(folders.bf16("llama")), load(folders.df11("llama", layout))
    assert same_steps(original, model, prompt(), 3)


def test_state_dict_and_copies_are_compressed(folders: Folders, tmp_path: Path) -> None:
    original, copied = load(folders.bf16("llama-tied")), tmp_path / "df11"
    model = load(shutil.copytree(folders.df11("llama-tied"), copied))
    expected, state = original(prompt()).logits, model.state_dict()
    assert state.keys() == original.state_dict().keys()
    assert isinstance(state["model.layers.0.mlp.up_proj.weight"], CompressedTensor)
    torch.save(model, tmp_path / "model.pt")
    others = [copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)]
    assert (tmp_path / "model.pt").stat().st_size < 0.8 * original.get_memory_footprint()
    del model
    for other in others:
        assert other.lm_head.weight is other.model.embed_tokens.weight
        assert torch.equal(other(prompt()).logits, expected)
        assert df11.report(other, verify=True).verified
        other.save_pretrained(tmp_path / "again")
        assert torch.equal(load(tmp_path / "again")(prompt()).logits, expected)
    # A pickled model needs no container, except to be verified.
    del state, others, other  # Windows deletes nothing that is mapped.
    gc.collect()
    shutil.rmtree(copied)
    pickled = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(pickled(prompt()).logits, expected)
    assert df11.report(pickled).paths == [str(copied)]
    with pytest.raises(df11.IoError, match="df11"):
        df11.report(pickled, verify=True)


@pytest.mark.filterwarnings("error:You passed `quantization_config`")
def test_options(folders: Folders) -> None:
    """The caller's, whatever the checkpoint says; they are not saved."""
    folder, said = folders.df11("llama"), {"quant_method": "df11", "mode": "fused"}
    for model in (
        loaded(folders, "llama", "cpu", mode="fused"),
        load(folder, quantization_config=said),
        load(folders.bf16("llama"), quantization_config=said),
        load(folder, config=with_options(folder, mode="fused")),
    ):
        assert not model.lm_head.weight.exact
        assert df11.report(model).modes == ["fused"] and " fused," in str(df11.report(model))
        # The CPU has no kernels that multiply.
        assert torch.equal(model(prompt()).logits, load(folder)(prompt()).logits)
        assert model.config.quantization_config.to_dict() == {"quant_method": "df11"}
    for refused, words in [
        (lambda: load(folder, config=with_options(folder, prefetch=True)), "no prefetch; its opt"),
        (lambda: df11.Config(prefetch=True), "Df11Config has no prefetch; its options are mode, "),
        (lambda: load(folder, quantization_config={**said, "prefetch": 1}), "has no prefetch"),
        (lambda: df11.Config(mode="fast"), "choose one of exact, fused"),
        (lambda: df11.Config(memory=["9GB", "6 gigs"]), "'6 gigs' is not a number of bytes"),
    ]:
        with pytest.raises(df11.ParameterError, match=words) as caught:
            refused()
        assert str(caught.value).endswith(str(caught.value.remedy))


def test_nothing_is_read_from_safetensors_and_nothing_initialised(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No parameter is ever allocated by transformers: neither of its true size, nor to be
    initialised.
    """
    sizes: list[int] = []
    empty_like = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda *a, **k: sizes.append(a[0].numel()) or empty_like(*a, **k)
    )
    model, info = load(folders.df11("llama"), output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert max(sizes, default=0) < 1000
    assert not list(folders.df11("llama").glob("*.safetensors"))
    assert not hasattr(model.config, "transformers_weights")


@pytest.mark.parametrize("is_same", [True, False])
def test_a_tied_head_in_another_shard(folders: Folders, is_same: bool, tmp_path: Path) -> None:
    """It is no alias in its container, and tied if it has the values of the embedding."""
    source = with_head_apart(folders.bf16("llama-tied"), tmp_path / "bf16", is_same)
    original, model = load(source), load(compressed(source, tmp_path / "df11"))
    for each in (original, model):
        assert (each.lm_head.weight is each.model.embed_tokens.weight) == is_same
    assert same_steps(original, model, prompt(), 3)


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe"])
def test_save_pretrained_gives_the_folder_again(
    folders: Folders, name: str, tmp_path: Path
) -> None:
    model = load(folders.df11(name))
    model.save_pretrained(tmp_path / "saved")
    saved, source = tmp_path / "saved", folders.df11(name)
    assert {file.name for file in saved.iterdir()} == {file.name for file in source.iterdir()}
    for file in source.glob("*.df11"):
        assert (saved / file.name).read_bytes() == file.read_bytes()
    assert json.loads((saved / "config.json").read_text())["quantization_config"] == {
        "quant_method": "df11"
    }
    again = load(saved)
    assert torch.equal(again(prompt()).logits, model(prompt()).logits)
    df11.decompress(saved, tmp_path / "bf16", progress=False)
    for file in folders.bf16(name).iterdir():
        assert (tmp_path / "bf16" / file.name).read_bytes() == file.read_bytes()
    model.save_pretrained(source)  # onto itself
    assert torch.equal(load(source)(prompt()).logits, again(prompt()).logits)


def test_a_new_head_is_saved_beside_the_containers(folders: Folders, tmp_path: Path) -> None:
    kind = transformers.AutoModelForSequenceClassification
    base = transformers.AutoModel.from_pretrained(folders.df11("qwen3"), device_map="cpu")
    plain = transformers.AutoModel.from_pretrained(folders.bf16("qwen3"))
    assert torch.equal(base(prompt()).last_hidden_state, plain(prompt()).last_hidden_state)
    assert df11.report(base).unused_tensors == ["lm_head.weight"]

    def classifier(folder: Path) -> tuple[Any, list[str]]:
        options = {"device_map": "cpu", "output_loading_info": True}
        model, info = kind.from_pretrained(folder, **options)
        assert not info["unexpected_keys"] and not info["mismatched_keys"]
        return model, list(info["missing_keys"])

    model, missing = classifier(folders.df11("qwen3"))
    assert missing == ["score.weight"] and model.score.weight.dtype == torch.bfloat16
    report = df11.report(model, verify=True)
    assert report.ordinary["not in the containers"] == (1, 2 * 128 * 2)
    optimizer = torch.optim.SGD(model.score.parameters(), lr=0.5)
    model(prompt(), labels=torch.tensor([1, 0])).loss.backward()
    optimizer.step()
    expected, state = model(prompt()).logits, df11.state_dict(model)
    assert torch.isfinite(expected).all()
    assert torch.equal(state["score.weight"], model.score.weight)
    model.save_pretrained(tmp_path / "df11")
    names = {file.name for file in (tmp_path / "df11").glob("*.safetensors")}
    assert names == {"df11.safetensors"}

    again, missing = classifier(tmp_path / "df11")
    assert not missing and torch.equal(again(prompt()).logits, expected)
    # A causal model has no place for the head, and drops it when saved.
    causal = load(tmp_path / "df11")
    assert torch.equal(causal(prompt()).logits, load(folders.bf16("qwen3"))(prompt()).logits)
    causal.save_pretrained(tmp_path / "df11")
    assert not list((tmp_path / "df11").glob("*.safetensors"))

    # The way to a BF16 model with the head, and to a folder of it alone.
    whole = kind.from_config(again.config).to(torch.bfloat16).eval()
    whole.load_state_dict(state)
    del whole.config.quantization_config
    found, missing = classifier(saved(whole, tmp_path / "whole")[1])
    assert not missing and torch.equal(found(prompt()).logits, expected)
    assert "not in the containers" not in df11.report(found).ordinary


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_attached_weights_have_the_dtypes_of_the_container(folders: Folders, name: str) -> None:
    """With any dtypes of the module: a class of transformers makes F32."""
    original, model = folders.pair(name)
    kind = transformers.AutoModelForCausalLM
    module = kind.from_config(original.config, dtype=torch.float32)
    attached = df11.attach(module, folders.df11(name), device="cpu")
    assert {parameter.dtype for parameter in attached.parameters()} == {torch.bfloat16}
    assert df11.report(attached).residences == df11.report(model).residences
    assert torch.equal(attached(prompt()).logits, original(prompt()).logits)


GENERATE: list[dict[str, Any]] = [
    {"do_sample": False},
    {"num_beams": 3},
    {"do_sample": True},
    {"cache_implementation": "static"},
]


@pytest.mark.parametrize("options", GENERATE, ids=str)
def test_generate(folders: Folders, options: dict[str, Any]) -> None:
    tokens, answers = prompt(), []
    told = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 12, **options}
    for model in folders.pair("qwen3"):
        torch.manual_seed(5)
        answers.append(model.generate(tokens, **told))
    assert torch.equal(*answers)


def test_encoder_decoder(tmp_path: Path) -> None:
    config = transformers.T5Config(
        vocab_size=512, d_model=128, d_kv=32, d_ff=320, num_layers=2, num_heads=4,
        decoder_start_token_id=0, dtype="bfloat16",
    )  # fmt: skip
    both = saved(seeded(transformers.T5ForConditionalGeneration(config)), tmp_path)
    kind, tokens = transformers.AutoModelForSeq2SeqLM, prompt()
    models = [kind.from_pretrained(folder, device_map="cpu") for folder in both]
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    assert torch.equal(*(model.generate(**inputs, max_new_tokens=9) for model in models))
    inputs["decoder_input_ids"] = tokens[:, :4]
    # With gradients, PyTorch chooses other kernels for weights that want them.
    with torch.no_grad():
        assert torch.equal(*(model(**inputs).logits for model in models))
    assert df11.report(models[1], verify=True).verified


@torch.no_grad()
def test_two_models_and_two_threads(folders: Folders) -> None:
    names = ["llama", "qwen3-moe"]
    models = {name: load(folders.df11(name)) for name in names}
    expected = {name: load(folders.bf16(name))(prompt()).logits for name in names}
    # A model whose call failed can be used again.
    with pytest.raises(IndexError):
        models["llama"](torch.tensor([[10**6]]))

    @torch.no_grad()
    def is_same(name: str) -> bool:
        found = [models[name](prompt()).logits for _ in range(5)]
        return all(torch.equal(logits, expected[name]) for logits in found)

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(is_same, names * 3))


def test_what_is_refused(folders: Folders, tmp_path: Path) -> None:
    folder = folders.df11("llama")
    model, wrong = load(folder), with_options(folder)
    wrong.intermediate_size = 192
    (tmp_path / "empty").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "empty")
    _, several = saved(load(folders.bf16("llama")), tmp_path, max_shard_size="400KB")
    shards = sorted(several.glob("*.df11"))
    shards[1].unlink()
    missing = f"shard 2 of {len(shards)} is missing"
    disk = {"model": "cpu", "lm_head": "disk"}
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: model.load_state_dict(df11.state_dict(model)), RuntimeError, "compressed tensor"),
        (model.dequantize, NotImplementedError, "df11 decompress"),
        (lambda: load(folder, disk), ValueError, '"cpu" in the place of "disk"'),
        (lambda: load(tmp_path / "empty"), FileNotFoundError, "df11 compress"),
        (lambda: load(several), df11.ParameterError, missing),
        (lambda: load(folder, config=wrong), ValueError, "shape"),
    ]
    if not torch.cuda.is_available():
        cases.append((lambda: load(folder, "cuda"), RuntimeError, 'device_map="cpu"'))
        assert load(folder, "auto").device == torch.device("cpu")
    for work, error, words in cases:
        with pytest.raises(error, match=words):
            work()
    assert model.to("cpu") is model and model.eval() is model


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe"])
def test_a_model_is_gone_when_nobody_uses_it(folders: Folders, name: str) -> None:
    """Without the garbage collector: its memory is wanted for the next one."""
    gc.collect()
    gc.disable()
    try:
        model = load(folders.df11(name))
        model(prompt())
        source, layer = weakref.ref(model.__dict__["_df11"]), weakref.ref(model.model.layers[0])
        del model
        assert layer() is None
        assert source() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["llama", "llama-bias", "mixtral"])
def test_compiles_as_one_graph(folders: Folders, name: str) -> None:
    """With a backend that computes as eager code does: every bit; gradients reach the inputs."""
    original, model = models = folders.pair(name)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            assert torch.equal(compiled(prompt()).logits, original(prompt()).logits)
    grads = []
    for each in models:
        x = each.get_input_embeddings()(prompt()).detach().requires_grad_()
        each(inputs_embeds=x).logits.square().mean().backward()
        grads.append(x.grad)
    assert grads[0] is not None and torch.equal(*grads)


def one_layer() -> Any:
    config = transformers.LlamaConfig(**{**SMALL, **UNTIED, "num_hidden_layers": 1})
    return seeded(transformers.LlamaForCausalLM(config))


@needs_compiler
@torch.no_grad()
def test_compiled_by_inductor(tmp_path: Path) -> None:
    """The bits of the compiled BF16 model from the first layer on. Inductor fuses the look-up of an
    embedding with what follows, which it cannot do with a compressed one, and rounds otherwise.
    """
    bf16, folder = saved(one_layer(), tmp_path)
    original, model = load(bf16).requires_grad_(False), load(folder)
    assert isinstance(model.model.embed_tokens.weight, CompressedTensor)
    x = model.get_input_embeddings()(prompt())
    found = []
    for each in (original, model):
        torch._dynamo.reset()
        # No headers compiled ahead, which PyTorch shares among all processes and runs.
        options = {"cpp_cache_precompile_headers": False}
        compiled = torch.compile(each, fullgraph=True, options=options)
        found.append([compiled(inputs_embeds=x).logits for _ in range(2)])
    assert torch.equal(*found[1]) and torch.equal(found[1][0], found[0][0])
    logits = compiled(prompt()).logits
    assert torch.equal(logits, compiled(prompt()).logits) and nearly(logits, found[0][0])


# ---- on GPUs ----


#: Options by what they ask for.
RESIDENCES: dict[str, dict[str, Any]] = {
    **{form: {"residence": form} for form in ("stored", "fast", "auto")},
    "streamed": {"streamed": True},
}


def nearly(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """By the norm: another order of a sum can send a token to another expert."""
    return bool((found.float() - expected.float()).norm() < 0.05 * expected.float().norm())


@pytest.mark.gpu
@pytest.mark.parametrize("residence", RESIDENCES)
@pytest.mark.parametrize("name", ["llama", "llama-tied", "mixtral", "phi3", "gpt2"])
def test_residences(folders: Folders, name: str, residence: str) -> None:
    model = loaded(folders, name, **RESIDENCES[residence])
    # Not loaded within the other stream: threads of transformers' loader allocate on the default
    # stream what it stacks there, and free it before that is done.
    original = load(folders.bf16(name), "cuda")
    assert same_steps(original, model)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert same_steps(original, model)
    report = df11.report(model, verify=True)
    expected = "fast" if residence == "auto" else residence
    assert set(report.residences.values()) == {expected, "ordinary"}
    assert getattr(report.devices[0], expected) > 0
    assert (report.host_bytes > 0) == (residence == "streamed")


@pytest.mark.gpu
@pytest.mark.parametrize("residence", RESIDENCES)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@torch.no_grad()
def test_fused_products_are_nearly_those_of_bf16(
    folders: Folders, name: str, residence: str
) -> None:
    model = loaded(folders, name, mode="fused", **RESIDENCES[residence])
    original = load(folders.bf16(name), "cuda")
    assert df11.report(model).modes == ["fused"]
    for rows, length in [(1, 1), (1, 37), (3, 40)]:
        tokens = prompt(rows, length).cuda()
        assert nearly(model(tokens).logits, original(tokens).logits)


@pytest.mark.gpu
@pytest.mark.parametrize("residence", ["stored", "fast"])
def test_another_layout_of_the_container(folders: Folders, residence: str) -> None:
    """Matrices that are not in tiles are packed: they are in the fast layout then."""
    options = df11.Config(residence=residence)
    model = load(folders.df11("llama", "gap"), "cuda", quantization_config=options)
    assert set(df11.report(model, verify=True).residences.values()) == {"fast", "ordinary"}
    assert same_steps(load(folders.bf16("llama"), "cuda"), model)


@pytest.mark.gpu
@pytest.mark.parametrize("residence", RESIDENCES)
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
@torch.no_grad()
def test_cuda_graphs(folders: Folders, name: str, residence: str) -> None:
    """A captured decode step, replayed, beside eager steps of the BF16 model; eager steps in
    between.
    """
    options = {"experts_implementation": "batched_mm"} if "moe" in name else {}
    config = df11.Config(**RESIDENCES[residence])
    model = load(folders.df11(name), "cuda", quantization_config=config, **options)
    original = load(folders.bf16(name), "cuda", **options)
    caches = {
        each: transformers.StaticCache(config=each.config, max_cache_len=64)
        for each in (original, model)
    }

    def step(which: Any, tokens: torch.Tensor) -> torch.Tensor:
        return which(tokens, past_key_values=caches[which]).logits

    starts = [step(each, prompt().cuda()) for each in (original, model)]
    assert torch.equal(*starts)
    token = starts[0][:, -1:].argmax(-1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(model, token)
            step(original, token)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(model, token)
    for at in range(8):
        expected = step(original, token)
        graph.replay()
        assert torch.equal(found, expected)
        token.copy_(expected[:, -1:].argmax(-1))
        if at % 3 == 1:
            assert torch.equal(model(prompt().cuda()).logits, original(prompt().cuda()).logits)
    df11.report(model, verify=True)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.95, 0.8])
def test_a_gpu_that_is_too_small(folders: Folders, share: float) -> None:
    folder = folders.df11("llama")
    # The fast layout has no tables, and so less bytes than small weights as stored.
    configs = (df11.Config(residence=each) for each in ("stored", "fast"))
    models = (load(folder, "cuda", quantization_config=each) for each in configs)
    limit = int(share * min(df11.report(each).device_bytes for each in models))
    model = load(folder, "auto", max_memory={0: limit, "cpu": 10**12})
    report = df11.report(model, verify=True)
    assert "streamed" in report.residences.values()
    assert report.host_bytes > 0 and report.device_bytes <= limit
    assert same_steps(load(folders.bf16("llama"), "cuda"), model)


@pytest.mark.gpu
def test_no_bf16_copy_on_the_gpu(folders: Folders) -> None:
    """While it is loaded as stored, PyTorch allocates no more than what stays."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = loaded(folders, "llama", residence="stored")
    # Before the report, which multiplies to find the order of sums.
    peak = torch.cuda.max_memory_allocated() - before
    ordinary = [value.nbytes for value in model.parameters() if type(value) is torch.nn.Parameter]
    # The digest of an ordinary weight has 8 bytes for each of its 2, and as many numbers of places.
    digest = 8 * max(ordinary)
    # Arrays begin on multiples of 256 bytes, and allocations on multiples of 512.
    assert peak <= df11.report(model).devices[0].total + digest + (1 << 15)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma2", "mixtral", "qwen3-wide"])
def test_several_gpus(folders: Folders, name: str) -> None:
    model = load(folders.df11(name), "auto")
    devices = set(model.hf_device_map.values())
    assert len(devices) == torch.cuda.device_count()
    assert len(df11.report(model, verify=True).devices) == len(devices)
    assert same_steps(load(folders.bf16(name), "cuda"), model)
    assert torch.cuda.current_device() == 0
    single = load(folders.df11(name), "cuda:1")
    assert single.device == torch.device("cuda:1")
    assert same_steps(load(folders.bf16(name), "cuda:1"), single)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", ["llama", "llama-tied", "mixtral", "qwen3-wide"])
def test_a_device_map_of_modules(folders: Folders, name: str) -> None:
    """A map of modules as in accelerate; modules on the CPU are streamed to the first GPU."""
    tied, folder = name in ("llama-tied", "qwen3-wide"), folders.df11(name)
    count = config_of(name).num_hidden_layers
    ends: dict[str, Any] = {"model.embed_tokens": 0, "model.norm": 1, "model.rotary_emb": 0}
    ends["lm_head"] = 0 if tied else "cuda:1"
    places = ends | {f"model.layers.{at}": at % 2 for at in range(count)}
    original, cpu = load(folders.bf16(name), "cuda"), torch.device("cpu")
    for changes in ({}, {"model.layers.1": "cpu", "model.layers.2": cpu}):
        model = load(folder, {**places, **changes})
        for at in (0, 1):
            device = 0 if f"model.layers.{at}" in changes else at
            assert model.model.layers[at].self_attn.q_proj.weight.device.index == device
        assert model.lm_head.weight.device.index == (0 if tied else 1)
        assert model.model.norm.weight.device.index == 1
        forms = df11.report(model, verify=True).residences
        streamed = {name.split(".")[2] for name, form in forms.items() if form == "streamed"}
        assert len(streamed) == len(changes)
        assert same_steps(original, model) and torch.cuda.current_device() == 0
    alike = "give both the same device"
    refused = [({**places, "model.layers.0.self_attn": 1}, alike)]
    refused += [({**ends, "model.layers.0": 1}, "no device for")]
    refused += [({**places, "lm_head": 1}, alike)] if tied else []
    for where, words in refused:
        with pytest.raises(ValueError, match=words):
            load(folder, where)


@pytest.mark.gpu
def test_two_threads_on_streams_of_their_own(folders: Folders) -> None:
    model, tokens = load(folders.df11("llama"), "cuda"), prompt().cuda()
    with torch.no_grad():
        expected = load(folders.bf16("llama"), "cuda")(tokens).logits

    def is_same(_: int) -> bool:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            found = [model(prompt().cuda()).logits for _ in range(20)]
            return all(torch.equal(logits, expected) for logits in found)

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(is_same, range(3)))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["exact", "fused"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@torch.no_grad()
def test_compiled_on_a_gpu(folders: Folders, name: str, mode: str) -> None:
    original = load(folders.bf16(name), "cuda")
    model = loaded(folders, name, mode=mode, residence="fast")
    inputs = {"input_ids": prompt().cuda(), "attention_mask": torch.ones_like(prompt()).cuda()}
    torch._dynamo.reset()
    # Generated kernels round elsewhere: the weights are the same bits, and the logits nearly.
    expected = torch.compile(original)(**inputs).logits
    assert nearly(torch.compile(model, fullgraph=True)(**inputs).logits, expected)
    # transformers compiles a step of decoding by itself, captured as a CUDA graph.
    steps = {"min_new_tokens": 8, "max_new_tokens": 8, "do_sample": False}
    for _ in range(2):
        tokens = model.generate(**inputs, **steps, cache_implementation="static")
    assert tokens.shape == (2, 45)
    torch._dynamo.reset()


class Tokens:
    """A streamer that keeps what it gets, the prompt first."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        self.found.append(value)

    def end(self) -> None:
        pass


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["exact", "fused"])
def test_no_token_of_damaged_weights_leaves(folders: Folders, mode: str) -> None:
    model = loaded(folders, "llama", mode=mode, residence="stored")
    tokens, options = prompt(1, 7).cuda(), {"max_new_tokens": 3, "do_sample": False}
    model.generate(tokens, streamer=(good := Tokens()), **options)
    assert len(good.found) == 4
    weights = [p for p in model.parameters() if isinstance(p, CompressedTensor)]
    weights[len(weights) // 2]._records0[8:40] = 0x77
    with pytest.raises(df11.CorruptError):
        model.generate(tokens, streamer=(bad := Tokens()), **options)
    assert len(bad.found) == 1
    for steps in (1, 3):
        with pytest.raises(df11.CorruptError):
            model.generate(tokens, **{**options, "max_new_tokens": steps})
    # Without `generate`: by whichever operator begins after the damaged kernel is done.
    with pytest.raises(df11.CorruptError):
        for _ in range(2):
            model(tokens).logits.cpu()
    torch.cuda.synchronize()
    with contextlib.suppress(df11.CorruptError):
        raise_if_damaged()


def test_generate_is_the_models_own(folders: Folders) -> None:
    model = loaded(folders, "llama", "cpu")
    expected = load(folders.bf16("llama")).generate(prompt(1, 7), max_new_tokens=3)
    streamer = Tokens()
    assert torch.equal(model.generate(prompt(1, 7), max_new_tokens=3, streamer=streamer), expected)
    assert len(streamer.found) == 4
    original = inspect.unwrap(type(model).generate).__get__(model)
    assert inspect.signature(model.generate) == inspect.signature(original)
    twin, gone = copy.deepcopy(model), weakref.ref(model)
    del model, original
    gc.collect()
    assert gone() is None
    assert twin.generate(prompt(1, 7), max_new_tokens=1).shape == (1, 8)
    assert load(folders.df11("llama")).generate(prompt(1, 7), max_new_tokens=1).shape == (1, 8)


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_a_kept_state_dict_is_assigned_to_a_new_model(folders: Folders, name: str) -> None:
    original, model = folders.pair(name)
    torch.save(model.state_dict(), file := io.BytesIO())
    file.seek(0)
    state = torch.load(file, weights_only=True)
    kind = transformers.AutoModelForCausalLM
    other = kind.from_config(model.config, dtype=torch.bfloat16).eval()
    assert any(parameter.requires_grad for parameter in other.parameters())
    other.load_state_dict(state, assign=True)
    other.tie_weights()
    weights = dict(other.named_parameters())
    assert sum(isinstance(weight, CompressedTensor) for weight in weights.values()) > 10
    assert torch.equal(other(prompt()).logits, original(prompt()).logits)
