"""Uses of models that docs/flows.md lists: each works, or is refused in one line.

Each row there names its test; most stand with what they belong to, and those here with nothing
else.
"""

import contextlib
import gc
import inspect
import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import safetensors.torch as safetensors
import torch
import transformers
from conftest import ROOT, on_devices
from models import (
    Folders,
    bert_config,
    compressed,
    config_of,
    load,
    prompt,
    same_weights,
    saved,
    seeded,
    tokenizer,
)
from tqdm import tqdm

import df11
from df11 import _progress, _watch
from df11._tensor import CompressedTensor

TABLE = ROOT / "docs/flows.md"
WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module", name="both")
def folders_of_llama(folders: Folders) -> tuple[Path, Path]:
    return folders.worded("llama")


def test_weights_in_subfolders(folders: Folders, tmp_path: Path) -> None:
    """An index places them there, and the config lies above."""
    plain = tmp_path / "plain"
    load(folders.bf16("llama")).save_pretrained(plain, max_shard_size="400KB")
    (plain / "weights").mkdir()
    for file in plain.glob("*.safetensors"):
        file.rename(plain / "weights" / file.name)
    index = plain / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    places = content["weight_map"].items()
    content["weight_map"] = {name: f"weights/{file}" for name, file in places}
    index.write_text(json.dumps(content))
    original, model = load(plain), load(compressed(plain, tmp_path / "df11"))
    assert isinstance(model.get_parameter(WEIGHT), CompressedTensor)
    assert same_weights(model, original)
    online = load(plain, quantization_config=df11.Config())
    assert isinstance(online.get_parameter(WEIGHT), CompressedTensor)
    df11.verify(tmp_path / "df11", progress=False)
    df11.decompress(tmp_path / "df11", tmp_path / "back", progress=False)
    for path in (path for path in plain.rglob("*") if path.is_file()):
        assert (tmp_path / "back" / path.relative_to(plain)).read_bytes() == path.read_bytes()


def test_a_folder_without_containers_takes_none_of_another_model(
    folders: Folders, tmp_path: Path
) -> None:
    """A checkpoint below it loads by itself."""
    out = shutil.copytree(folders.df11("llama"), tmp_path / "out")
    shutil.copytree(folders.df11("llama-bias"), out / "checkpoint-1")
    (out / "model.df11").unlink()
    words = r"out holds no container of its own, and .*checkpoint-1/model\.df11 is of another model"
    with pytest.raises(df11.ParameterError, match=words):
        load(out)
    assert load(out / "checkpoint-1").lm_head.weight.shape == (512, 128)


def test_each_row_of_the_table_names_a_test() -> None:
    text = TABLE.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "test_" in line]
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)
    assert len(rows) >= 40 and len(named) >= len(rows)
    for file, name in named:
        source = (ROOT / "python/tests" / file).read_text(encoding="utf-8")
        assert f"def {name}(" in source, f"{file}::{name}"


def test_pipelines_of_text(both: tuple[Path, Path]) -> None:
    found = []
    for folder in both:
        model, words = load(folder), transformers.AutoTokenizer.from_pretrained(folder)
        features = transformers.pipeline("feature-extraction", model=model, tokenizer=words)
        text = transformers.pipeline("text-generation", model=str(folder), device_map="cpu")
        answer = text("Small models of", max_new_tokens=6, do_sample=False)
        found.append((answer, features("Small models")))
    assert found[0] == found[1]


def test_an_assistant_drafts(both: tuple[Path, Path]) -> None:
    tokens = prompt(1, 9)
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 8, "do_sample": False}
    found = [
        load(folder).generate(tokens, assistant_model=load(folder), **options) for folder in both
    ]
    assert torch.equal(*found)


@on_devices
def test_pipelines_hand_out_nothing_of_damaged_weights(folders: Folders, device: str) -> None:
    """On the CPU what stands for kernels is the function that reads their word."""
    words = transformers.AutoTokenizer.from_pretrained(folders.worded("llama")[0])
    stored = df11.Config(residence="stored")
    model = load(folders.df11("llama"), device, quantization_config=stored)
    features = transformers.pipeline("feature-extraction", model=model, tokenizer=words)
    assert features("some words")
    told: Any = contextlib.nullcontext()
    if device == "cpu":
        told = mock.patch.object(_watch, "raise_if_damaged", side_effect=df11.CorruptError("told"))
    else:
        # Only the last product reads it, so no operator begins after that.
        model.lm_head.weight._records0[8:40] = 0x77
    with told, pytest.raises(df11.CorruptError):
        features("some words")


#: A process whose last operator meets damage, and which never checks.
LAST = """
import sys, df11, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(
    sys.argv[1], device_map="cuda", quantization_config=df11.Config(residence="stored")
)
model.lm_head.weight._records0[8:40] = 0x77
with torch.no_grad():
    print(model(torch.arange(9, device="cuda")[None]).logits.cpu().shape)
"""


@pytest.mark.gpu
def test_damage_of_the_last_operator_is_told_at_the_end(folders: Folders) -> None:
    command = [sys.executable, "-c", LAST, str(folders.df11("llama"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "torch.Size([1, 9, 512])" in done.stdout, done.stderr
    assert "CorruptError" in done.stderr


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_ways_of_attention(folders: Folders, attention: str) -> None:
    found = [
        model(prompt()).logits for model in folders.pair("llama", attn_implementation=attention)
    ]
    assert torch.equal(*found)


def test_another_quantization_is_refused(both: tuple[Path, Path]) -> None:
    class Other(transformers.BitsAndBytesConfig):
        def post_init(self) -> None:
            """Without the package."""

    with pytest.raises(
        ValueError, match="is quantized with Df11Config but you are passing a Other"
    ):
        load(both[1], quantization_config=Other(load_in_8bit=True))


@pytest.mark.parametrize("change", ["half", "float"])
def test_half_and_float(folders: Folders, change: str) -> None:
    """As in any module. Weights become ordinary, of full size, with a warning."""
    original, model = folders.pair("llama")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            getattr(model, change)()
        except ValueError as error:  # transformers refuses it of quantized models
            assert "not supported for quantized" in str(error)
            return
    assert any("ordinary tensor" in str(each.message) for each in said)
    wanted, found = (each.get_parameter(WEIGHT) for each in (getattr(original, change)(), model))
    assert found.dtype == wanted.dtype and torch.equal(found, wanted)


@pytest.mark.filterwarnings("ignore:.*ordinary")
def test_resized_embeddings(folders: Folders, tmp_path: Path) -> None:
    """transformers replaces the memory of the old ones, which are ordinary from then on."""
    original, model = folders.pair("llama")
    expected = model(prompt()).logits
    for each in (original, model):
        each.resize_token_embeddings(520, mean_resizing=False)
    for head in ("model.embed_tokens.weight", "lm_head.weight"):
        found = model.get_parameter(head)
        assert found.shape == (520, 128) and not isinstance(found, CompressedTensor)
        assert torch.equal(found[:512], original.get_parameter(head)[:512])
    assert torch.equal(model(prompt()).logits[..., :512], expected)
    report = df11.report(model)
    assert (report.residences[WEIGHT], report.residences[head]) == ("stored", "ordinary")
    assert {"changed since", "not in the containers"} <= report.ordinary.keys()
    original.load_state_dict(df11.state_dict(model))
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert same_weights(again, original)
    assert isinstance(again.get_parameter(head), CompressedTensor)


@torch.no_grad()
def test_offloading_hooks(folders: Folders) -> None:
    """accelerate keeps weights elsewhere, and brings each to its module before its forward."""
    original, model = folders.pair("llama")
    accelerate.cpu_offload(model, execution_device="cpu", state_dict=model.state_dict())
    for _ in range(2):
        assert model.model.layers[0].mlp.up_proj.weight.is_meta
        assert torch.equal(model(prompt()).logits, original(prompt()).logits)
    assert model.model.layers[0].mlp.up_proj.weight.is_meta


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
@pytest.mark.parametrize("way", ["disk_offload", "dispatch_model"])
def test_offloaded_to_disk(folders: Folders, tmp_path: Path, way: str, name: str) -> None:
    """By accelerate's own files, which hold BF16; its hooks read them before each forward."""
    original, model = folders.pair(name)
    if way == "disk_offload":
        accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    else:
        where = dict.fromkeys(["model.embed_tokens", "model.norm", "lm_head"], "cpu")
        where |= {"model.rotary_emb": "cpu", "model.layers": "disk"}
        accelerate.dispatch_model(model, where, main_device="cpu", offload_dir=tmp_path)
    for _ in range(2):
        assert model.model.layers[0].mlp.up_proj.weight.is_meta
        assert torch.equal(model(prompt()).logits, original(prompt()).logits)
    assert (tmp_path / f"{WEIGHT}.dat").stat().st_size == original.get_parameter(WEIGHT).nbytes


Save = Callable[[Any, Path], object]
SAVES: dict[str, Save] = {
    "save_state": lambda model, folder: prepared(model).save_state(folder),
    "accelerate's save_model": lambda model, folder: prepared(model).save_model(model, folder),
    "save_file": lambda model, folder: safetensors.save_file(model.state_dict(), folder / "x"),
    "save": lambda model, folder: (folder / "x").write_bytes(safetensors.save(model.state_dict())),
    "save_model": lambda model, folder: safetensors.save_model(model, folder / "x"),
}


def prepared(model: Any) -> accelerate.Accelerator:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(model)
    return accelerator


@pytest.mark.parametrize("name", SAVES)
def test_safetensors_of_compressed_weights_are_refused(
    folders: Folders, tmp_path: Path, name: str
) -> None:
    original, model = folders.pair("llama")
    with pytest.raises(RuntimeError, match=r"save_pretrained, .* df11\.state_dict") as told:
        SAVES[name](model, tmp_path)
    assert "\n" not in str(told.value)
    assert not any(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    # The remedy.
    safetensors.save_file(df11.state_dict(model), tmp_path / "x")
    assert same_weights(model, original)
    back = safetensors.load_file(tmp_path / "x")
    assert all(torch.equal(back[name], value) for name, value in original.state_dict().items())


def test_accelerate_saves_compressed_weights_by_pickle(folders: Folders, tmp_path: Path) -> None:
    original, model = folders.pair("llama")
    prepared(model).save_state(tmp_path, safe_serialization=False)
    state = torch.load(tmp_path / "pytorch_model.bin")
    assert isinstance(state[WEIGHT], CompressedTensor)
    assert (tmp_path / "pytorch_model.bin").stat().st_size < 0.8 * original.get_memory_footprint()
    assert torch.equal(state[WEIGHT].decode(), original.get_parameter(WEIGHT))


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_memory_that_tools_count(folders: Folders, name: str) -> None:
    original, model = folders.pair(name)
    report = df11.report(model)
    assert sum(value.nbytes for value in model.parameters()) == report.device_bytes
    buffers = sum(value.nbytes for value in model.buffers())
    assert model.get_memory_footprint() == report.device_bytes + buffers
    assert model.get_memory_footprint(return_buffers=False) == report.device_bytes
    assert original.get_memory_footprint() == report.original_bytes + buffers
    assert report.device_bytes < 0.8 * report.original_bytes


@pytest.mark.gpu
def test_moves_between_devices(folders: Folders) -> None:
    original, model = folders.pair("llama")
    expected = original.cuda()(prompt().cuda()).logits
    model.to("cuda")
    assert isinstance(model.lm_head.weight, CompressedTensor)
    assert model.lm_head.weight.device.type == "cuda"
    assert torch.equal(model(prompt().cuda()).logits, expected)
    assert df11.report(model, verify=True).devices[0].stored > 0
    model.to("cpu")
    assert torch.equal(model(prompt()).logits, original.cpu()(prompt()).logits)


@pytest.mark.gpu
def test_a_model_that_waits_on_the_host(folders: Folders) -> None:
    """Like diffusers' `enable_model_cpu_offload`: on the GPU from its forward on."""
    original, model = folders.pair("llama")
    expected = original.cuda()(prompt().cuda()).logits
    model, hook = accelerate.cpu_offload_with_hook(model, 0)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(model(prompt()).logits.cuda(), expected)
        assert model.lm_head.weight.device.type == "cuda"
        hook.offload()
        assert isinstance(model.lm_head.weight, CompressedTensor)
        assert model.lm_head.weight.device.type == "cpu"


def test_cross_encoders(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    model = seeded(transformers.BertForSequenceClassification(bert_config(num_labels=1)))
    tokenizer().save_pretrained(tmp_path / "bf16")
    pairs = [("small", "models"), ("of", "many")]
    encoders = [library.CrossEncoder(str(path), device="cpu") for path in saved(model, tmp_path)]
    one, other = (encoder.predict(pairs) for encoder in encoders)
    assert (one == other).all()


def test_reports_render_in_notebooks(both: tuple[Path, Path], tmp_path: Path) -> None:
    shown = df11.report(load(both[1]))._repr_html_()
    assert shown.startswith("<table") and shown.endswith("</table>")
    for part in ("active, exact", "weights", " saved", "cpu", "a vector"):
        assert part in shown
    made = df11.compress(both[0], tmp_path / "<b>", progress=False)
    html = made._repr_html_()
    assert f"{made.ratio:.1%}" in html and f"{made.bits_per_weight:.2f}" in html
    odd = df11.report(load(tmp_path / "<b>"))._repr_html_()
    assert "&lt;b&gt;" in odd and "<b>" not in odd
    assert "inactive" in df11.report(load(both[0]))._repr_html_()


def test_the_bar_of_loading_counts(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []

    class Watcher:
        def __call__(self, stage: str, done: int, total: int) -> None:
            calls.append((done, total))

        def close(self) -> None:
            calls.append((-1, -1))

    monkeypatch.setattr("df11._progress.watcher", lambda progress: Watcher())
    load(both[1])
    done = [count for count, _ in calls[:-1]]
    assert done == sorted(done) and calls[-1] == (-1, -1)
    assert 0 < done[-1] == calls[-2][1] and len({total for _, total in calls[:-1]}) == 1


def test_bars_of_notebooks_end_full(
    both: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bar that is closed before it is full stays there, in red."""
    closed: list[tuple[int, int]] = []

    class Tqdm(tqdm):
        def close(self) -> None:
            if not self.disable and self.total is not None:
                closed.append((self.n, self.total))
            self.disable = True

    monkeypatch.setattr("tqdm.auto.tqdm", Tqdm)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    watch = _progress.watcher(True)
    assert isinstance(watch, _progress._Tqdm)
    df11.compress(both[0], tmp_path / "df11", progress=True)
    df11.verify(tmp_path / "df11", progress=True)
    df11.decompress(tmp_path / "df11", tmp_path / "back", progress=True)
    monkeypatch.setattr("df11._progress.watcher", lambda _: watch)
    load(tmp_path / "df11")
    assert len(closed) >= 4 and all(done == total > 0 for done, total in closed)


def test_loads_leave_nothing_open(both: tuple[Path, Path], tmp_path: Path) -> None:
    gc.collect()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = load(both[1])
        model.save_pretrained(tmp_path / "saved")
        del model
        load(both[0], quantization_config=df11.Config())
        df11.attach(transformers.AutoModelForCausalLM.from_config(config_of("llama")), both[1])
        gc.collect()
    assert not [str(each.message) for each in said if each.category is ResourceWarning]


def test_help_tells_what_options_are() -> None:
    for name, words in {
        "Config": ["mode", "residence", "memory", "streamed", "exact", "fused", "stored", "fast"],
        "attach": ["device", "mode", "residence", "memory", "prefix", "MissingError"],
        "merge_adapter": ["source", "adapter", "out", "overwrite"],
        "report": ["verify"],
        "save": ["folder"],
        "state_dict": ["host memory"],
    }.items():
        text = inspect.getdoc(getattr(df11, name)) or ""
        assert not [word for word in words if word not in text], name
