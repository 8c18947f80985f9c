"""The examples, as users run them, on models made here. No GPU is needed."""

import io
import runpy
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
import transformers
from models import Folders, compressed, load, sentence_encoder

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs an example without a GPU; what it prints, or if it fails what it says of that."""

    def run(name: str, *arguments: object, fails: bool = False) -> str:
        said, wrong, code = io.StringIO(), io.StringIO(), None
        with monkeypatch.context() as patch, redirect_stdout(said), redirect_stderr(wrong):
            patch.setattr(sys, "argv", [name, *map(str, arguments)])
            patch.setattr(torch.cuda, "is_available", lambda: False)
            try:
                runpy.run_path(str(EXAMPLES / name), run_name="__main__")
            except SystemExit as end:
                code = end.code
        assert bool(code) == fails, said.getvalue() + wrong.getvalue()
        return (wrong if fails else said).getvalue()

    return run


def test_generate(example: Callable[..., str], folders: Folders) -> None:
    bf16, folder = folders.worded("llama")
    prompt = "Small models of many architectures"
    said = example("generate.py", folder, prompt, "--tokens", 8, "--verify")
    words = transformers.AutoTokenizer.from_pretrained(bf16)
    inputs = words(prompt, return_tensors="pt")
    answer = load(bf16).generate(**inputs, max_new_tokens=8, do_sample=False)
    text = words.decode(answer[0], skip_special_tokens=True)
    parts = ["loaded in", "df11: active", " saved", "weights are as they were loaded"]
    assert text.startswith(prompt)
    for part in (text, *parts, "8 tokens in"):
        assert part in said, said
    said = example("generate.py", bf16, "--tokens", 2)
    assert "no compressed model" in said and "2 tokens in" in said
    for options in (["--device", "cuda"], ["--memory", "1GB"]):
        said = example("generate.py", folder, *options, fails=True)
        assert "finds no GPU; --device cpu" in said


def test_sentences(example: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    bf16 = sentence_encoder(tmp_path / "bf16")
    folder = compressed(bf16, tmp_path / "df11")
    said = example("attach_sentence_encoder.py", bf16, folder)
    for part in ("identical: True", "weights are as they were loaded", "3 sentences"):
        assert part in said
    said = example("attach_sentence_encoder.py", "x", "y", "--device", "cuda", fails=True)
    assert "finds no GPU" in said


def test_images(example: Callable[..., str]) -> None:
    pytest.importorskip("diffusers")
    said = example("attach_diffusers.py", "--try")
    assert "identical: True" in said and "weights are as they were loaded" in said
    assert "or --try" in example("attach_diffusers.py", fails=True)
