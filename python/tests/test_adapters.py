"""Adapters on compressed weights: losses, gradients and merged weights are those of BF16."""

import json
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import transformers
from models import (
    Folders,
    adapted,
    compressed,
    config_of,
    equal,
    load,
    prompt,
    same_weights,
    seeded,
)
from transformers.integrations.peft import MIN_PEFT_VERSION, check_peft_version

import df11
from df11._tensor import CompressedTensor

STEPS = 200
WEIGHT = "model.layers.0.mlp.up_proj.weight"
#: The call of an adapter that wraps the layer.
BASE = "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"
Pair = tuple[Any, Any]


@pytest.fixture(scope="module")
def both(folders: Folders) -> tuple[Path, Path]:
    return folders.both("llama")


@pytest.fixture
def pair(folders: Folders) -> Pair:
    return folders.pair("llama")


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(prompt()).logits


ADAPTERS: dict[str, Any] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "ia3": peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "loha": peft.LoHaConfig(target_modules=["q_proj"]),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_compute_and_train(pair: Pair, name: str) -> None:
    how, results = ADAPTERS[name], []
    for base in pair:
        model = adapted(base, **how) if isinstance(how, dict) else adapted(base, how)
        loss = model(input_ids=prompt(), labels=prompt()).loss
        loss.backward()
        grads = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
        results.append({"loss": loss.detach(), **grads})
    assert results[0].keys() == results[1].keys() and len(results[0]) > 1
    assert equal(*(result.values() for result in results))
    assert isinstance(pair[1].model.layers[0].mlp.gate_proj.weight, CompressedTensor)
    if isinstance(how, dict):
        base = model.get_parameter(BASE)
        assert isinstance(base, CompressedTensor) and base.grad is None and len(grads) >= 18


def test_an_adapter_is_saved_and_loaded(pair: Pair, folders: Folders, tmp_path: Path) -> None:
    """Onto a compressed base, which `AutoPeftModel` finds by the name in the adapter."""
    model = adapted(pair[1])
    model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} >= {"adapter_model.safetensors"}
    expected = logits(peft.PeftModel.from_pretrained(pair[0], tmp_path))
    for again in (
        model,
        peft.PeftModel.from_pretrained(load(folders.df11("llama")), tmp_path),
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path, device_map="cpu"),
    ):
        assert isinstance(again.get_parameter(BASE), CompressedTensor)
        assert torch.equal(logits(again), expected)
        with again.disable_adapter():
            assert torch.equal(logits(again), logits(load(folders.bf16("llama"))))


def test_decoded_weights_have_their_own_names(pair: Pair) -> None:
    """Wrapped weights keep their own names; adapters have theirs."""
    names = pair[0].state_dict().keys()
    model = adapted(pair[1])
    assert df11.report(model, verify=True).verified
    state = df11.state_dict(model.get_base_model())
    assert names <= state.keys() and all(".lora_" in name for name in state.keys() - names)
    assert torch.equal(state[WEIGHT], pair[0].get_parameter(WEIGHT))


def test_adapters_by_transformers(pair: Pair, both: tuple[Path, Path], tmp_path: Path) -> None:
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError as error:  # transformers 5.24 asks for a release that there is not yet
        pytest.skip(f"so it is with BF16 models too: {error}")
    seen = []
    for name, projection in (("one", "q_proj"), ("two", "up_proj")):
        adapted(load(both[0]), target_modules=[projection]).save_pretrained(tmp_path / name)
        for model in pair:
            model.load_adapter(str(tmp_path / name), adapter_name=name)
    for name in ("one", "two"):
        for model in pair:
            model.set_adapter(name)
        seen.append(logits(pair[0]))
        assert torch.equal(logits(pair[1]), seen[-1])
    assert not torch.equal(*seen)


def test_preparing_for_few_bits_decodes_all(pair: Pair) -> None:
    """PEFT makes F32 of all weights that it does not know as quantized, which a warning says."""
    with pytest.warns(UserWarning, match="all of its memory"):
        peft.prepare_model_for_kbit_training(pair[1])
    peft.prepare_model_for_kbit_training(pair[0])
    expected, found = (model.get_parameter(WEIGHT) for model in pair)
    assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_merging_in_place_is_refused(pair: Pair) -> None:
    """Unless it is done in a copy of the weights, which is decoded."""
    original, model = (adapted(each) for each in pair)
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(RuntimeError, match=r"df11\.merge_adapter"):
            merge()
    original.merge_adapter(safe_merge=True)
    with pytest.warns(UserWarning, match="ordinary"):
        model.merge_adapter(safe_merge=True)
    assert torch.equal(logits(model), logits(original))
    with pytest.raises(df11.CorruptError, match=r"layers\.0\.mlp\.\S+ differs from"):
        df11.report(model, verify=True)


@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_an_adapter_that_changes_its_base(folders: Folders, pair: Pair, kind: str) -> None:
    """It takes its share out of a decoded copy of the base weight, and out of no other weight."""
    with pytest.warns(UserWarning, match="ordinary"):
        model = adapted(pair[1], init_lora_weights=kind)
    original = adapted(pair[0], init_lora_weights=kind)
    assert torch.equal(logits(model), logits(original))
    attention = model.base_model.model.model.layers[1].self_attn
    assert not isinstance(attention.q_proj.base_layer.weight, CompressedTensor)
    assert isinstance(attention.o_proj.weight, CompressedTensor)
    assert df11.report(load(folders.df11("llama")), verify=True).verified


def test_merged_into_a_new_container(both: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(df11.Error, match=r"adapter_config\.json"):
        df11.merge_adapter(both[1], tmp_path, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    adapted(load(both[1])).save_pretrained(tmp_path / "adapter")
    report = df11.merge_adapter(both[1], tmp_path / "adapter", tmp_path / "merged")
    assert 0.5 < report.ratio < 0.9
    base, merged = load(both[0]), load(tmp_path / "merged")
    before = base.get_parameter(WEIGHT).detach().clone()
    expected = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    assert isinstance(merged.get_parameter(WEIGHT), CompressedTensor)
    assert same_weights(merged, expected)
    assert not torch.equal(expected.get_parameter(WEIGHT), before)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"adapter", "merged"}, "nothing is left beside the result"


class Recorder(transformers.TrainerCallback):
    """The gradients of each step, summed up by their bits."""

    def __init__(self) -> None:
        self.sums: list[int] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        grads = [p.grad for p in more["model"].parameters() if p.requires_grad]
        assert grads and all(grad is not None for grad in grads)
        bits = (grad.float().contiguous().view(torch.int32).double().sum() for grad in grads)
        self.sums.append(int(sum(bits).item()))


def told(out: Path, **options: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(output_dir=out, report_to=[], use_cpu=True, **options)


def trained(folder: Path, out: Path) -> tuple[list[float], list[int], dict[str, Any], Any]:
    # Two layers show that gradients pass from one to the other.
    model = adapted(load(folder, num_hidden_layers=2), init_lora_weights=True)
    recorder = Recorder()
    rows = torch.randint(1, 500, (16, 12), generator=torch.Generator().manual_seed(7))
    options = told(
        out, max_steps=STEPS, per_device_train_batch_size=1, gradient_checkpointing=True,
        learning_rate=1e-3, logging_steps=1, save_strategy="no", seed=11,
    )  # fmt: skip
    examples = [{"input_ids": row, "labels": row} for row in rows]
    trainer = transformers.Trainer(model, options, train_dataset=examples, callbacks=[recorder])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, recorder.sums, peft.get_peft_model_state_dict(model), model


def test_trainer_and_checkpointing(both: tuple[Path, Path], tmp_path: Path) -> None:
    expected = trained(both[0], tmp_path / "bf16")
    losses, gradients, adapter, model = trained(both[1], tmp_path / "df11")
    assert len(losses) == STEPS and losses == expected[0] and losses[-1] < losses[0]
    assert len(set(gradients)) == STEPS and gradients == expected[1]
    assert equal(adapter.values(), (expected[2][name] for name in adapter))
    weight = model.get_parameter(BASE)
    assert isinstance(weight, CompressedTensor) and weight.grad is None


def test_training_all_weights_is_refused(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="attach trainable adapters"):
        transformers.Trainer(pair[1], told(tmp_path), train_dataset=[])
    with pytest.raises(RuntimeError, match="train adapters beside it"):
        pair[1].get_parameter(WEIGHT).requires_grad_()


def test_evaluation_by_the_trainer(pair: Pair, tmp_path: Path) -> None:
    examples = [{"input_ids": row, "labels": row} for row in prompt(3, 9)]
    options = told(tmp_path, per_device_eval_batch_size=2)
    losses = [
        transformers.Trainer(adapted(model), options, eval_dataset=examples).evaluate()["eval_loss"]
        for model in pair
    ]
    assert losses[0] == losses[1]


def test_accelerator_prepares_and_trains(pair: Pair) -> None:
    losses = []
    for base in pair:
        accelerator, model = accelerate.Accelerator(cpu=True), adapted(base)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        data = torch.utils.data.DataLoader(list(prompt(3, 9)), batch_size=1)
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        assert type(accelerator.unwrap_model(model)) is type(model)
    assert losses[:3] == losses[3:] and len(set(losses)) > 1


def test_no_decoded_weight_waits_for_backward(pair: Pair) -> None:
    """Backward reads compressed arrays: memory of a decoded weight may be reused."""
    model = adapted(pair[1])
    weights = [p for p in model.parameters() if isinstance(p, CompressedTensor)]
    shapes = {tuple(weight.shape) for weight in weights}
    shapes |= {shape[::-1] for shape in shapes}
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda value: kept.append(value) or value, lambda value: value
    ):
        model(prompt(1, 19), labels=prompt(1, 19)).loss.backward()
    compressed = [value for value in kept if isinstance(value, CompressedTensor)]
    ordinary = [value for value in kept if not isinstance(value, CompressedTensor)]
    assert len(weights) >= 10 and len(compressed) >= 5
    assert not [value for value in ordinary if tuple(value.shape) in shapes]


def test_merging_keeps_what_the_adapter_does_not_change(tmp_path: Path) -> None:
    """Also tensors that the class does not know, such as layers that predict several tokens, and
    dtypes that it would round: norms in F32 beside BF16.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    bf16 = tmp_path / "bf16"
    model = seeded(transformers.LlamaForCausalLM(config_of("llama")))
    model.save_pretrained(bf16, max_shard_size="900KB")
    names = sorted(path.name for path in bf16.glob("*.safetensors"))
    last = load_file(bf16 / names[-1])
    last["model.mtp.0.proj.weight"] = torch.randn(64, 64, dtype=torch.bfloat16)
    index = json.loads((bf16 / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.mtp.0.proj.weight"] = names[-1]
    (bf16 / "model.safetensors.index.json").write_text(json.dumps(index))
    norm = "model.layers.1.input_layernorm.weight"
    for name in names:
        weights = last if name == names[-1] else load_file(bf16 / name)
        if norm in weights:
            weights[norm] = 1 + 1e-5 * torch.randn(128)
        save_file(weights, bf16 / name, metadata={"format": "pt"})
    folder = compressed(bf16, tmp_path / "df11")
    adapted(load(bf16)).save_pretrained(tmp_path / "adapter")
    df11.merge_adapter(folder, tmp_path / "adapter", tmp_path / "merged")
    df11.decompress(tmp_path / "merged", tmp_path / "back", progress=False)

    def tensors(place: Path) -> dict[str, torch.Tensor]:
        return {name: value for file in names for name, value in load_file(place / file).items()}

    before, after = tensors(bf16), tensors(tmp_path / "back")
    expected = peft.PeftModel.from_pretrained(load(bf16), tmp_path / "adapter").merge_and_unload()
    merged = expected.state_dict()
    assert after.keys() == before.keys()
    projections = ("q_proj", "v_proj", "up_proj", "down_proj")
    for name, value in after.items():
        is_changed = any(f".{each}." in name for each in projections)
        assert torch.equal(value, merged[name] if is_changed else before[name]), name
        assert value.dtype == before[name].dtype and torch.equal(value, before[name]) != is_changed
    with safe_open(tmp_path / "back" / names[0], "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == after.keys()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"adapter", "back", "bf16", "df11", "merged"}


def test_merging_keeps_weights_beside_the_containers(tmp_path: Path, folders: Folders) -> None:
    """Such as a trained head, which the containers lack."""
    from safetensors.torch import save_file

    model, source, adapter = load(folders.df11("llama")), tmp_path / "source", tmp_path / "adapter"
    model.extra = torch.nn.Linear(3, 2)
    model.save_pretrained(source)
    assert (source / "df11.safetensors").exists()
    adapted(load(folders.bf16("llama"))).save_pretrained(adapter)
    df11.merge_adapter(source, adapter, tmp_path / "merged")
    merged = df11.torch.load_file(tmp_path / "merged")
    for name, value in model.extra.state_dict().items():
        assert torch.equal(merged.pop(f"extra.{name}"), value)
    assert merged.keys() == model.state_dict().keys() - {"extra.weight", "extra.bias"}
    assert not torch.equal(merged[WEIGHT], model.get_parameter(WEIGHT).decode())
    assert not (tmp_path / "merged/df11.safetensors").exists()
    save_file({"model.norm.weight": torch.ones(128)}, source / "df11.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight, which the containers hold too"):
        df11.merge_adapter(source, adapter, tmp_path / "again")
    with pytest.raises(df11.ParameterError, match=r"no local folder.*fetch it first"):
        df11.merge_adapter("s3://models/source", adapter, tmp_path / "again")


def test_an_adapter_of_another_model_or_that_is_not_whole_is_not_merged(
    folders: Folders, tmp_path: Path
) -> None:
    """PEFT would merge the weights that fit."""
    from safetensors.torch import load_file, save_file

    adapted(load(folders.bf16("llama"))).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_model.safetensors"
    whole = load_file(file)
    lost = min(whole)
    part = {name: value for name, value in whole.items() if name != lost}
    for tensors, words in (
        (part, f"lacks {lost}, one of 1 weights"),
        ({**whole, "a.b": torch.ones(2)}, r"has, beside the model's, a\.b, one of 1 weights"),
        ({f"x.{name}": value for name, value in whole.items()}, f"one of {len(whole)} weights"),
    ):
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=rf"{words}.*; fetch it again"):
            df11.merge_adapter(folders.df11("llama"), tmp_path / "adapter", tmp_path / "merged")
        assert {path.name for path in tmp_path.iterdir()} == {"adapter"}


def test_merging_into_another_dtype_is_refused(tmp_path: Path) -> None:
    """The result would be rounded to what the class computes in."""
    from safetensors.torch import load_file, save_file

    bf16 = tmp_path / "bf16"
    seeded(transformers.LlamaForCausalLM(config_of("llama"))).save_pretrained(bf16)
    weights = load_file(bf16 / "model.safetensors")
    weights[WEIGHT] = weights[WEIGHT].float()
    save_file(weights, bf16 / "model.safetensors", metadata={"format": "pt"})
    folder = compressed(bf16, tmp_path / "df11")
    adapted(load(bf16)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=rf"{WEIGHT} is stored as float32.*bfloat16"):
        df11.merge_adapter(folder, tmp_path / "adapter", tmp_path / "merged")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"adapter", "bf16", "df11"}


def test_a_head_of_an_adapter_is_merged(tmp_path: Path, folders: Folders) -> None:
    """Whole modules that an adapter has trained, in the place of those of the model."""
    model = adapted(load(folders.bf16("llama")), modules_to_save=["lm_head", "norm"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(3)
    model.save_pretrained(tmp_path / "adapter")
    df11.merge_adapter(folders.df11("llama"), tmp_path / "adapter", tmp_path / "merged")
    assert same_weights(load(tmp_path / "merged"), model.merge_and_unload())
