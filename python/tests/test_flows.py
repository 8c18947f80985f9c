"""What people do with models in a day, as docs/flows.md lists it: works, or is refused in one line.

Each row there names its test; most stand with what they belong to, and those here with nothing
else.
"""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import transformers
from conftest import ROOT
from models import Folders, adapted, bert_config, load, saved, seeded, tokenizer

import df11
from df11._tensor import CompressedTensor

TABLE = ROOT / "docs/flows.md"
PROMPT = torch.arange(1, 28).reshape(3, 9)
WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module", name="both")
def folders_of_llama(folders: Folders) -> tuple[Path, Path]:
    return folders.worded("llama")


# ---- the table ----


def test_each_row_of_the_table_names_a_test() -> None:
    text = TABLE.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "test_" in line]
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)
    assert len(rows) >= 40 and len(named) >= len(rows)
    for file, name in named:
        source = (ROOT / "python/tests" / file).read_text(encoding="utf-8")
        assert f"def {name}(" in source, f"{file}::{name}"


# ---- transformers ----


def test_pipelines_of_text(both: tuple[Path, Path]) -> None:
    answers = [
        transformers.pipeline("text-generation", model=str(folder), device_map="cpu")(
            "Small models of", max_new_tokens=6, do_sample=False
        )
        for folder in both
    ]
    assert answers[0] == answers[1]
    model, words = load(both[1]), transformers.AutoTokenizer.from_pretrained(both[1])
    features = transformers.pipeline("feature-extraction", model=model, tokenizer=words)
    expected = transformers.pipeline("feature-extraction", model=load(both[0]), tokenizer=words)
    assert features("Small models") == expected("Small models")


def test_an_assistant_drafts(both: tuple[Path, Path]) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    options["attention_mask"] = torch.ones_like(PROMPT[:1])
    expected = load(both[0]).generate(PROMPT[:1], **options)
    model = load(both[1])
    found = model.generate(PROMPT[:1], assistant_model=load(both[1]), **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_ways_of_attention(both: tuple[Path, Path], attention: str) -> None:
    found, expected = (
        load(folder, attn_implementation=attention).requires_grad_(False)(PROMPT).logits
        for folder in both
    )
    assert torch.equal(found, expected)


def test_training_all_weights_is_refused(both: tuple[Path, Path], tmp_path: Path) -> None:
    model = load(both[1])
    options = transformers.TrainingArguments(output_dir=tmp_path, report_to=[], use_cpu=True)
    with pytest.raises(ValueError, match="attach trainable adapters"):
        transformers.Trainer(model, options, train_dataset=[])
    with pytest.raises(RuntimeError, match="train adapters beside it"):
        model.get_parameter(WEIGHT).requires_grad_()


def test_evaluation_by_the_trainer(both: tuple[Path, Path], tmp_path: Path) -> None:
    options = transformers.TrainingArguments(
        output_dir=tmp_path, report_to=[], use_cpu=True, per_device_eval_batch_size=2
    )
    examples = [{"input_ids": row, "labels": row} for row in PROMPT]
    losses = []
    for folder in both:
        trainer = transformers.Trainer(adapted(load(folder)), options, eval_dataset=examples)
        losses.append(trainer.evaluate())
    assert losses[0]["eval_loss"] == losses[1]["eval_loss"]


def test_another_quantization_is_refused(both: tuple[Path, Path]) -> None:
    class Other(transformers.BitsAndBytesConfig):
        def post_init(self) -> None:
            """Without the package."""

    with pytest.raises(ValueError, match="is quantized with Config but you are passing a Other"):
        load(both[1], quantization_config=Other(load_in_8bit=True))


def test_half_and_float(both: tuple[Path, Path]) -> None:
    """As any module: ordinary weights of full size from then on, which a warning says."""
    for change, dtype in (("half", torch.float16), ("float", torch.float32)):
        model, original = load(both[1]), load(both[0])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                getattr(model, change)()
            except ValueError as error:  # transformers refuses it of quantized models
                assert "not supported for quantized" in str(error)
                continue
        assert any("ordinary tensor" in str(each.message) for each in said)
        wanted = getattr(original, change)().get_parameter(WEIGHT)
        assert model.get_parameter(WEIGHT).dtype == dtype
        assert torch.equal(model.get_parameter(WEIGHT), wanted)


# ---- PEFT ----


def test_adapters_by_their_own_folder(both: tuple[Path, Path], tmp_path: Path) -> None:
    """`AutoPeftModel` finds the compressed base by the name in the adapter."""
    adapted(load(both[1])).save_pretrained(tmp_path)
    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    expected = peft.PeftModel.from_pretrained(load(both[0]), tmp_path)
    assert isinstance(model.get_parameter(f"base_model.model.{BASE}"), CompressedTensor)
    with torch.no_grad():
        assert torch.equal(model(PROMPT).logits, expected(PROMPT).logits)
        with model.disable_adapter():
            assert torch.equal(model(PROMPT).logits, load(both[0])(PROMPT).logits)


BASE = WEIGHT.replace("up_proj", "up_proj.base_layer")


def test_adapters_by_transformers(both: tuple[Path, Path], tmp_path: Path) -> None:
    models = [load(folder).requires_grad_(False) for folder in both]
    for name, projection in (("one", "q_proj"), ("two", "up_proj")):
        adapter = adapted(load(both[0]), target_modules=[projection])
        adapter.save_pretrained(tmp_path / name)
        for model in models:
            model.load_adapter(str(tmp_path / name), adapter_name=name)
    seen = []
    for name in ("one", "two"):
        for model in models:
            model.set_adapter(name)
        found, expected = (model(PROMPT).logits for model in models)
        assert torch.equal(found, expected)
        seen.append(found)
    assert not torch.equal(*seen)


@pytest.mark.parametrize(
    "options",
    [
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        peft.LoHaConfig(target_modules=["q_proj"]),
    ],
    ids=["ia3", "prefix", "loha"],
)
def test_other_adapters_train(both: tuple[Path, Path], options: Any) -> None:
    grads = []
    for folder in both:
        torch.manual_seed(6)
        model = peft.get_peft_model(load(folder).requires_grad_(False), options)
        model(input_ids=PROMPT, labels=PROMPT).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0] and grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grads[1][name], grad) for name, grad in grads[0].items())


def test_preparing_for_few_bits_decodes_all(both: tuple[Path, Path]) -> None:
    """PEFT makes F32 of all weights that it does not know as quantized, which a warning says."""
    model, original = load(both[1]), load(both[0])
    with pytest.warns(UserWarning, match="all of its memory"):
        peft.prepare_model_for_kbit_training(model)
    peft.prepare_model_for_kbit_training(original)
    assert model.get_parameter(WEIGHT).dtype == torch.float32
    assert torch.equal(model.get_parameter(WEIGHT), original.get_parameter(WEIGHT))


def test_merging_in_place_is_refused(both: tuple[Path, Path]) -> None:
    model = adapted(load(both[1]))
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(RuntimeError, match=r"df11\.merge_adapter"):
            merge()


# ---- accelerate ----


def test_accelerator_prepares_and_trains(both: tuple[Path, Path]) -> None:
    losses = []
    for folder in both:
        accelerator, model = accelerate.Accelerator(cpu=True), adapted(load(folder))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        data = torch.utils.data.DataLoader(list(PROMPT), batch_size=1)
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        unwrapped = accelerator.unwrap_model(model)
        assert type(unwrapped) is type(model)
    assert losses[:3] == losses[3:] and len(set(losses)) > 1


# ---- sentence-transformers ----


def test_cross_encoders(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    model = seeded(transformers.BertForSequenceClassification(bert_config(num_labels=1)))
    tokenizer().save_pretrained(tmp_path / "bf16")
    folders = saved(model, tmp_path)
    pairs = [("small", "models"), ("of", "many")]
    scores = [library.CrossEncoder(str(folder), device="cpu").predict(pairs) for folder in folders]
    assert (scores[0] == scores[1]).all()


# ---- notebooks ----


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
    assert 0 < done[-1] <= calls[-2][1] and len({total for _, total in calls[:-1]}) == 1


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
