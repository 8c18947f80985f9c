"""Training adapters on compressed weights: losses and gradients of the BF16 base, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from models import Folders, adapted, load, same_weights

import df11
from df11._tensor import CompressedTensor

STEPS = 200
PROJECTION = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module", name="both")
def folders_of_llama(folders: Folders) -> tuple[Path, Path]:
    return folders.both("llama")


class Recorder(transformers.TrainerCallback):
    """The gradients of each step, summed up by their bits."""

    def __init__(self) -> None:
        self.sums: list[int] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        grads = [p.grad for p in more["model"].parameters() if p.requires_grad]
        assert grads and all(grad is not None for grad in grads)
        bits = (grad.float().contiguous().view(torch.int32).double().sum() for grad in grads)
        self.sums.append(int(sum(bits).item()))


def trained(folder: Path, out: Path) -> tuple[list[float], list[int], dict[str, Any], Any]:
    # Two layers show that gradients pass from one to the other.
    model = adapted(load(folder, num_hidden_layers=2), init_lora_weights=True)
    recorder = Recorder()
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(1, 500, (16, 12), generator=generator)
    options = transformers.TrainingArguments(
        output_dir=out,
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_checkpointing=True,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        seed=11,
    )
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
    assert all(torch.equal(adapter[name], value) for name, value in expected[2].items())
    weight = model.base_model.model.model.layers[0].mlp.down_proj.base_layer.weight
    assert isinstance(weight, CompressedTensor) and weight.grad is None


def test_no_decoded_weight_waits_for_backward(both: tuple[Path, Path]) -> None:
    """What backward reads are compressed arrays: memory of a decoded weight may be used again."""
    model = adapted(load(both[1]))
    weights = [p for p in model.parameters() if isinstance(p, CompressedTensor)]
    shapes = {tuple(weight.shape) for weight in weights}
    shapes |= {shape[::-1] for shape in shapes}
    compressed, decoded = list[Any](), list[Any]()

    def pack(value: Any) -> Any:
        if isinstance(value, CompressedTensor):
            compressed.append(value)
        elif tuple(value.shape) in shapes:
            decoded.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        model(torch.arange(1, 20)[None], labels=torch.arange(1, 20)[None]).loss.backward()
    assert len(weights) >= 10 and len(compressed) >= 5 and not decoded


def test_merged_into_a_new_container(both: tuple[Path, Path], tmp_path: Path) -> None:
    adapted(load(both[1])).save_pretrained(tmp_path / "adapter")
    report = df11.merge_adapter(both[1], tmp_path / "adapter", tmp_path / "merged")
    assert 0.5 < report.ratio < 0.9
    base = load(both[0])
    before = base.get_parameter(PROJECTION).detach().clone()
    expected = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    merged = load(tmp_path / "merged")
    assert isinstance(merged.get_parameter(PROJECTION), CompressedTensor)
    assert same_weights(merged, expected)
    assert not torch.equal(expected.get_parameter(PROJECTION), before)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"adapter", "merged"}, "nothing is left beside the result"


def test_an_adapter_of_another_model(both: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(df11.Error, match=r"adapter_config\.json"):
        df11.merge_adapter(both[1], tmp_path, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
