"""The examples, as users run them, on models made here. No GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from models import config_of, seeded, sentence_encoder, tokenizer  # noqa: E402

import df11  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def example(name: str, *arguments: object, fails: bool = False) -> str:
    """Runs an example without a GPU; what it prints, or where it fails what it says of that."""
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HF_HUB_OFFLINE": "1",
        **NO_GPU,
    }
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    assert ("Traceback" in done.stderr) is False, done.stderr
    return done.stderr if fails else done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("examples")
    model: Any = seeded(transformers.AutoModelForCausalLM.from_config(config_of("llama")))
    model.save_pretrained(root / "bf16")
    tokenizer().save_pretrained(root / "bf16")
    command = [
        sys.executable,
        "-m",
        "df11",
        "compress",
        str(root / "bf16"),
        "-o",
        str(root / "df11"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, check=True, capture_output=True, env=environment, timeout=300)
    return root


def test_generate(folder: Path) -> None:
    prompt = "Small models of many architectures"
    said = example("generate.py", folder / "df11", prompt, "--tokens", 8, "--verify")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "bf16")
    words = transformers.AutoTokenizer.from_pretrained(folder / "bf16")
    inputs = words(prompt, return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    text = words.decode(answer[0], skip_special_tokens=True)
    assert text.startswith(prompt) and text in said
    for part in (
        "loaded in",
        "df11: active",
        " saved",
        "weights are those of the original",
        "8 tokens in",
    ):
        assert part in said, said
    said = example("generate.py", folder / "bf16", "--tokens", 2)
    assert "no compressed model" in said and "2 tokens in" in said
    for options in (["--device", "cuda"], ["--memory", "1GB"]):
        said = example("generate.py", folder / "df11", *options, fails=True)
        assert "finds no GPU; --device cpu" in said


def test_sentences(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    sentence_encoder(tmp_path / "bf16")
    df11.compress(tmp_path / "bf16", tmp_path / "df11", progress=False)
    said = example("attach_sentence_encoder.py", tmp_path / "bf16", tmp_path / "df11")
    assert (
        "identical: True" in said
        and "weights are those of the original" in said
        and "3 sentences" in said
    )
    said = example("attach_sentence_encoder.py", "x", "y", "--device", "cuda", fails=True)
    assert "finds no GPU" in said


def test_images() -> None:
    pytest.importorskip("diffusers")
    said = example("attach_diffusers.py", "--try")
    assert "identical: True" in said and "weights are those of the original" in said
    assert "or --try" in example("attach_diffusers.py", fails=True)
