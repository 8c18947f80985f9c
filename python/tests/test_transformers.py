"""from_pretrained of compressed folders: every bit as with BF16 weights."""

from __future__ import annotations

import copy
import gc
import json
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import on_devices
from models import (
    CAUSAL,
    Folders,
    config_of,
    equal,
    greedy,
    load,
    prompt,
    same_weights,
    saved,
    seeded,
)

import df11
from df11._tensor import CompressedTensor

pytestmark = pytest.mark.usefixtures("compressed_on_gpus")


def with_options(folder: Path, **options: Any) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    config.quantization_config = {"quant_method": "df11", **options}
    return config


def same_steps(original: Any, model: Any, tokens: Any = None, steps: int = 12) -> bool:
    """Whether greedy steps give the same logits."""
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
    shapes = {name: (p.shape, p.dtype) for name, p in original.named_parameters()}
    assert {name: (p.shape, p.dtype) for name, p in model.named_parameters()} == shapes
    assert not any(parameter.requires_grad for parameter in model.parameters())
    found, expected = (dict(each.named_buffers()) for each in (model, original))
    assert found.keys() == expected.keys() and equal(found.values(), expected.values())


@pytest.mark.parametrize("name", ["llama", "qwen3-tied", "qwen3-moe", "mixtral", "gpt2"])
def test_all_matrices_stay_compressed(folders: Folders, name: str) -> None:
    model = load(folders.df11(name))
    report = df11.report(model)
    for parameter, value in model.named_parameters():
        # The codes of one of 16 KB take what they save.
        expected = "stored" if value.dim() > 1 and value.numel() > 1 << 13 else "ordinary"
        assert report.residences[parameter] == expected, parameter
        assert isinstance(value, CompressedTensor) == (expected == "stored")
    assert report.modes == ["exact"]
    assert set(report.ordinary) <= {"a vector", "as small as it is", "stored as it is"}
    assert not report.large_ordinary
    assert not report.unused_tensors
    # Tables of codes are there for each of these small matrices.
    assert report.ratio < 0.76


def test_a_large_vocabulary_stays_compressed(folders: Folders, tmp_path: Path) -> None:
    original, model = folders.pair("qwen3-wide")
    report = df11.report(model, verify=True)
    assert report.residences["model.embed_tokens.weight"] == "stored"
    assert report.ratio < 0.72
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert same_weights(model, original)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(load(tmp_path / "saved")(prompt()).logits, original(prompt()).logits)


def test_state_dict_and_copies_are_compressed(folders: Folders, tmp_path: Path) -> None:
    original, model = folders.pair("llama-tied")
    expected = original(prompt()).logits
    state = model.state_dict()
    assert state.keys() == original.state_dict().keys()
    assert isinstance(state["model.layers.0.mlp.up_proj.weight"], CompressedTensor)
    copied = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=False)
    assert (tmp_path / "model.pt").stat().st_size < 0.8 * original.get_memory_footprint()
    del model
    for other in (copied, saved):
        assert other.lm_head.weight is other.model.embed_tokens.weight
        assert torch.equal(other(prompt()).logits, expected)
        assert df11.report(other, verify=True).verified
        other.save_pretrained(tmp_path / "again")
        assert torch.equal(load(tmp_path / "again")(prompt()).logits, expected)


def test_a_pickled_model_needs_no_container(folders: Folders, tmp_path: Path) -> None:
    shutil.copytree(folders.df11("llama"), tmp_path / "df11")
    model = load(tmp_path / "df11")
    expected = model(prompt()).logits
    torch.save(model, tmp_path / "model.pt")
    shutil.rmtree(tmp_path / "df11")
    saved = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(saved(prompt()).logits, expected)
    assert df11.report(saved).paths == [str(tmp_path / "df11")]
    with pytest.raises(df11.IoError, match="df11"):
        df11.report(saved, verify=True)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_options(folders: Folders) -> None:
    """The caller's, whatever the checkpoint says; they are not saved."""
    folder = folders.df11("llama")
    for model in (
        load(folder, quantization_config=df11.Config(mode="fused")),
        load(folder, config=with_options(folder, mode="fused")),
    ):
        assert not model.lm_head.weight.exact
        assert df11.report(model).modes == ["fused"] and " fused," in str(df11.report(model))
        # The CPU has no kernels that multiply.
        assert torch.equal(model(prompt()).logits, load(folder)(prompt()).logits)
        assert model.config.quantization_config.to_dict() == {"quant_method": "df11"}
    with pytest.raises(ValueError, match="no prefetch; its options are mode, residence"):
        load(folder, config=with_options(folder, prefetch=True))
    with pytest.raises(ValueError, match="no prefetch; its options are mode, residence"):
        df11.Config(prefetch=True)
    with pytest.raises(ValueError, match="choose one of exact, fused"):
        df11.Config(mode="fast")


@pytest.mark.parametrize("layout", ["tile", "gap", "raw"])
def test_other_layouts(folders: Folders, layout: str) -> None:
    original, model = load(folders.bf16("llama")), load(folders.df11("llama", layout))
    assert same_steps(original, model, prompt(), 3)


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


def test_the_base_model_and_a_new_head(folders: Folders) -> None:
    folder = folders.df11("qwen3")
    base = transformers.AutoModel.from_pretrained(folder, device_map="cpu")
    expected = transformers.AutoModel.from_pretrained(folders.bf16("qwen3"))
    assert torch.equal(base(prompt()).last_hidden_state, expected(prompt()).last_hidden_state)
    assert df11.report(base).unused_tensors == ["lm_head.weight"]
    model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, device_map="cpu", output_loading_info=True
    )
    assert set(info["missing_keys"]) == {"score.weight"}
    assert model.score.weight.dtype == torch.bfloat16
    assert torch.isfinite(model(prompt()).logits).all()


def test_a_new_head_is_saved_beside_the_containers(folders: Folders, tmp_path: Path) -> None:
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(folders.df11("qwen3"), device_map="cpu", num_labels=3)
    report = df11.report(model, verify=True)
    assert report.ordinary["not in the containers"] == (1, 3 * 128 * 2)
    optimizer = torch.optim.SGD(model.score.parameters(), lr=0.5)
    model(prompt(), labels=torch.tensor([1, 2])).loss.backward()
    optimizer.step()
    expected = model(prompt()).logits
    state = df11.state_dict(model)
    assert torch.equal(state["score.weight"], model.score.weight)
    model.save_pretrained(tmp_path / "df11")
    names = {file.name for file in (tmp_path / "df11").glob("*.safetensors")}
    assert names == {"df11.safetensors"}

    again, info = kind.from_pretrained(
        tmp_path / "df11", device_map="cpu", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(again(prompt()).logits, expected)
    # As a causal model it has no place for the head, and leaves it out when it is saved there.
    causal = load(tmp_path / "df11")
    assert torch.equal(causal(prompt()).logits, load(folders.bf16("qwen3"))(prompt()).logits)
    causal.save_pretrained(tmp_path / "df11")
    assert not list((tmp_path / "df11").glob("*.safetensors"))

    # The way to a BF16 model with the head, and to a folder of it alone.
    whole = kind.from_config(again.config).to(torch.bfloat16).eval()
    whole.load_state_dict(state)
    del whole.config.quantization_config
    _, folder = saved(whole, tmp_path / "whole")
    found = kind.from_pretrained(folder, device_map="cpu")
    assert torch.equal(found(prompt()).logits, expected)
    assert "not in the containers" not in df11.report(found).ordinary


def test_a_shard_is_missing(folders: Folders, tmp_path: Path) -> None:
    _, folder = saved(load(folders.bf16("llama")), tmp_path, max_shard_size="400KB")
    shards = sorted(folder.glob("*.df11"))
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=f"{len(shards) - 1} of {len(shards)} containers"):
        load(folder)


def test_a_model_that_nobody_keeps_cannot_be_saved(folders: Folders, tmp_path: Path) -> None:
    with pytest.raises(ReferenceError, match="keep it in a variable"):
        load(folders.df11("llama")).save_pretrained(tmp_path)


def test_attached_weights_have_the_dtypes_of_the_container(folders: Folders) -> None:
    """Whatever those of the module were: a class of transformers makes F32."""
    for name in ("llama", "qwen3-moe"):
        config = transformers.AutoConfig.from_pretrained(folders.bf16(name))
        module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model = df11.attach(module, folders.df11(name), device="cpu")
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert df11.report(model).residences == df11.report(load(folders.df11(name))).residences
        assert torch.equal(model(prompt()).logits, load(folders.bf16(name))(prompt()).logits)


def test_generate(folders: Folders) -> None:
    models, tokens = folders.pair("qwen3"), prompt()
    for options in [
        {"do_sample": False},
        {"num_beams": 3},
        {"do_sample": True},
        {"cache_implementation": "static"},
    ]:
        answers = []
        options |= {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 12}
        for model in models:
            torch.manual_seed(5)
            answers.append(model.generate(tokens, **options))
        assert torch.equal(*answers), options


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


def test_two_models_and_two_threads(folders: Folders) -> None:
    names = ["llama", "qwen3-moe"]
    models = {name: load(folders.df11(name)) for name in names}
    expected = {name: load(folders.bf16(name))(prompt()).logits for name in names}

    @torch.no_grad()
    def is_same(name: str) -> bool:
        found = [models[name](prompt()).logits for _ in range(5)]
        return all(torch.equal(logits, expected[name]) for logits in found)

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(is_same, names * 3))


def test_an_error_in_a_forward_leaves_the_model_usable(folders: Folders) -> None:
    model = load(folders.df11("llama"))
    expected = model(prompt()).logits
    with pytest.raises(IndexError):
        model(torch.tensor([[10**6]]))
    with ThreadPoolExecutor(1) as thread:
        assert torch.equal(thread.submit(model, prompt()).result(20).logits, expected)


def test_what_is_refused(folders: Folders, tmp_path: Path) -> None:
    model = load(folders.df11("llama"))
    with pytest.raises(RuntimeError, match="a compressed tensor"):
        model.load_state_dict(df11.state_dict(model))
    with pytest.raises(NotImplementedError, match="df11 decompress"):
        model.dequantize()
    assert model.to("cpu") is model
    assert model.eval() is model
    with pytest.raises(ValueError, match='"cpu" in the place of "disk"'):
        load(folders.df11("llama"), {"model": "cpu", "lm_head": "disk"})
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_bytes((folders.df11("llama") / "config.json").read_bytes())
    with pytest.raises(FileNotFoundError, match="df11 compress"):
        load(empty)
    wrong = config_of("llama")
    wrong.intermediate_size = 192
    wrong.quantization_config = {"quant_method": "df11"}
    with pytest.raises(ValueError, match="shape"):
        load(folders.df11("llama"), config=wrong)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match='device_map="cpu"'):
            load(folders.df11("llama"), "cuda")


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


def test_auto_without_a_gpu(folders: Folders) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    model = load(folders.df11("llama"), "auto")
    assert model.device == torch.device("cpu")


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_compiles_as_one_graph(folders: Folders, name: str) -> None:
    """With a backend that computes as eager code does: every bit."""
    original, model = folders.pair(name)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            assert torch.equal(compiled(prompt()).logits, original(prompt()).logits)


@pytest.mark.parametrize("name", ["llama-tied", "llama-bias", "mixtral"])
def test_gradients_reach_the_inputs(folders: Folders, name: str) -> None:
    grads = []
    for model in folders.pair(name):
        x = model.get_input_embeddings()(prompt()).detach().requires_grad_()
        model(inputs_embeds=x).logits.square().mean().backward()
        grads.append(x.grad)
    assert grads[0] is not None and torch.equal(*grads)


# ---- on GPUs ----


RESIDENCES = ["stored", "fast", "auto", "streamed"]


def residence_options(residence: str) -> dict[str, Any]:
    return {"streamed": True} if residence == "streamed" else {"residence": residence}


@pytest.mark.gpu
@pytest.mark.parametrize("residence", RESIDENCES)
@pytest.mark.parametrize("name", ["llama", "llama-tied", "mixtral", "phi3", "gpt2"])
def test_residences(folders: Folders, name: str, residence: str) -> None:
    options = df11.Config(**residence_options(residence))
    model = load(folders.df11(name), "cuda", quantization_config=options)
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
def test_fused_products_are_nearly_those_of_bf16(
    folders: Folders, name: str, residence: str
) -> None:
    options = df11.Config(mode="fused", **residence_options(residence))
    model = load(folders.df11(name), "cuda", quantization_config=options)
    assert df11.report(model).modes == ["fused"]
    with torch.no_grad():
        for rows, length in [(1, 1), (1, 37), (3, 40)]:
            tokens = prompt(rows, length).cuda()
            expected = load(folders.bf16(name), "cuda")(tokens).logits.float()
            found = model(tokens).logits.float()
            # By the norm: another order of a sum can send a token to another expert.
            assert (found - expected).norm() < 0.05 * expected.norm()


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
def test_cuda_graphs(folders: Folders, name: str, residence: str) -> None:
    """A captured decode step, replayed, beside eager steps of the BF16 model; eager steps in
    between.
    """
    folder = folders.df11(name)
    options = {"experts_implementation": "batched_mm"} if "moe" in name else {}
    config = df11.Config(**residence_options(residence))
    model = load(folder, "cuda", quantization_config=config, **options)
    original = load(folders.bf16(name), "cuda", **options)
    with torch.no_grad():
        caches = [
            transformers.StaticCache(config=m.config, max_cache_len=64) for m in (original, model)
        ]
        starts = [
            m(prompt().cuda(), past_key_values=c).logits
            for m, c in zip((original, model), caches, strict=True)
        ]
        assert torch.equal(*starts)
        token = starts[0][:, -1:].argmax(-1)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                model(token, past_key_values=caches[1])
                original(token, past_key_values=caches[0])
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = model(token, past_key_values=caches[1]).logits
        for at in range(8):
            expected = original(token, past_key_values=caches[0]).logits
            graph.replay()
            assert torch.equal(found, expected)
            token.copy_(expected[:, -1:].argmax(-1))
            if at % 3 == 1:
                assert torch.equal(model(prompt().cuda()).logits, original(prompt().cuda()).logits)
    df11.report(model, verify=True)


@pytest.mark.gpu
def test_a_gpu_that_is_too_small(folders: Folders) -> None:
    folder = folders.df11("llama")
    original = load(folders.bf16("llama"), "cuda")
    whole = df11.report(load(folder, "cuda"))
    for share in (0.95, 0.8):
        limit = int(share * whole.device_bytes)
        model = load(folder, "auto", max_memory={0: limit, "cpu": 10**12})
        report = df11.report(model, verify=True)
        assert "streamed" in report.residences.values()
        assert report.host_bytes > 0
        assert report.device_bytes <= limit
        assert same_steps(original, model)


@pytest.mark.gpu
def test_no_bf16_copy_on_the_gpu(folders: Folders) -> None:
    """While it is loaded, PyTorch allocates no more than what stays."""
    folder = folders.df11("llama")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load(folder, "cuda")
    report = df11.report(model)
    # Arrays begin on multiples of 256 bytes, and allocations on multiples of 512.
    allowed = report.devices[0].total + (1 << 17)
    assert torch.cuda.max_memory_allocated() - before <= allowed


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma2", "mixtral", "qwen3-wide"])
def test_several_gpus(folders: Folders, name: str) -> None:
    model = load(folders.df11(name), "auto")
    devices = set(model.hf_device_map.values())
    assert len(devices) == torch.cuda.device_count()
    report = df11.report(model, verify=True)
    assert len(report.devices) == len(devices)
    assert same_steps(load(folders.bf16(name), "cuda"), model)
    assert torch.cuda.current_device() == 0
    single = load(folders.df11(name), "cuda:1")
    assert single.device == torch.device("cuda:1")
    assert same_steps(load(folders.bf16(name), "cuda:1"), single)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", ["llama", "llama-tied", "mixtral", "qwen3-wide"])
def test_a_device_map_of_modules(folders: Folders, name: str) -> None:
    """As accelerate's say it; what is on the CPU is streamed to the first GPU."""
    tied = name in ("llama-tied", "qwen3-wide")
    count = config_of(name).num_hidden_layers
    layers = {f"model.layers.{at}": at % 2 for at in range(count)}
    ends = {
        "model.embed_tokens": 0,
        "model.norm": 1,
        "model.rotary_emb": 0,
        "lm_head": 0 if tied else "cuda:1",
    }
    original = load(folders.bf16(name), "cuda")
    for changes, streamed in [
        ({}, 0),
        ({"model.layers.1": "cpu", "model.layers.2": torch.device("cpu")}, 2),
    ]:
        model = load(folders.df11(name), {**ends, **layers, **changes})
        for at in (0, 1):
            device = 0 if f"model.layers.{at}" in changes else at
            assert model.model.layers[at].self_attn.q_proj.weight.device == torch.device(
                "cuda", device
            )
        assert model.lm_head.weight.device.index == (0 if tied else 1)
        assert model.model.norm.weight.device.index == 1
        report = df11.report(model, verify=True)
        found = {
            name.split(".")[2] for name, form in report.residences.items() if form == "streamed"
        }
        assert len(found) == streamed
        assert same_steps(original, model)
        assert torch.cuda.current_device() == 0
    if tied:
        with pytest.raises(ValueError, match="give both the same device"):
            load(folders.df11(name), {**ends, **layers, "lm_head": 1})
    with pytest.raises(ValueError, match="give both the same device"):
        load(folders.df11(name), {**ends, **layers, "model.layers.0.self_attn": 1})
    with pytest.raises(ValueError, match="no device for"):
        load(folders.df11(name), {**ends, "model.layers.0": 1})


@pytest.mark.gpu
def test_two_threads_on_streams_of_their_own(folders: Folders) -> None:
    model = load(folders.df11("llama"), "cuda")
    with torch.no_grad():
        expected = load(folders.bf16("llama"), "cuda")(prompt().cuda()).logits

    def is_same(_: int) -> bool:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            found = [model(prompt().cuda()).logits for _ in range(20)]
            return all(torch.equal(logits, expected) for logits in found)

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(is_same, range(3)))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["exact", "fused"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_compiled_on_a_gpu(folders: Folders, name: str, mode: str) -> None:
    options = df11.Config(mode=mode, residence="fast")
    original = load(folders.bf16(name), "cuda")
    model = load(folders.df11(name), "cuda", quantization_config=options)
    inputs = {"input_ids": prompt().cuda(), "attention_mask": torch.ones_like(prompt()).cuda()}
    torch._dynamo.reset()
    with torch.no_grad():
        # Generated kernels round elsewhere: the weights are the same bits, and the logits nearly.
        expected = torch.compile(original)(**inputs).logits.float()
        found = torch.compile(model, fullgraph=True)(**inputs).logits.float()
        # By the norm: another order of a sum can send a token to another expert.
        assert (found - expected).norm() < 0.05 * expected.norm()
        # transformers compiles a step of decoding by itself, captured as a CUDA graph.
        steps = {"min_new_tokens": 8, "max_new_tokens": 8, "do_sample": False}
        for _ in range(2):
            tokens = model.generate(**inputs, **steps, cache_implementation="static")
        assert tokens.shape == (2, 45)
    torch._dynamo.reset()
