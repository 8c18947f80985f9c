"""`vllm serve s3://…`: configs and tokenizers are linked, and weights come from the store."""

import json
import shutil
from pathlib import Path

import pytest
from models import Folders
from stores import S3, Bucket
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig

import df11
from df11 import _link
from df11.vllm import register
from df11.vllm._deferred import Deferred
from df11.vllm._loader import Df11ModelLoader

NAME = "s3://models/vllm/llama"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    bucket = Bucket()
    for name, value in {**S3, "AWS_ENDPOINT_URL": bucket.url}.items():
        monkeypatch.setenv(name, value)
    register()
    return bucket


@pytest.fixture
def stored(bucket: Bucket, folders: Folders) -> Path:
    """A folder that lies in the store too."""
    compressed = folders.worded("llama")[1]
    bucket.add(compressed, "vllm/llama")
    return compressed


def test_a_model_is_served_by_its_name(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(NAME)
    assert config.model == config.tokenizer == str(df11.link(NAME))
    assert config.quantization == "df11" and config.served_model_name == NAME
    # Engines have processes of their own, and get the config alone.
    monkeypatch.setattr(_link, "_names", {})
    monkeypatch.setattr(_link, "_folders", {})
    loader = Df11ModelLoader(LoadConfig())
    loader.download_model(config)
    source = loader.Source(config.model, None)
    found = dict(loader._get_weights_iterator(source))
    near = df11.torch.load_file(stored)
    assert found.keys() == near.keys()
    assert all(isinstance(value, Deferred) for value in found.values())


def test_another_quantization_is_served_from_a_store(
    stored: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(stored, tmp_path / "fp8")
    said = json.loads((folder / "config.json").read_text())
    said["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(said))
    bucket.add(folder, "vllm/fp8")
    config = ModelConfig(NAME.replace("llama", "fp8"))
    assert config.model == str(df11.link(NAME.replace("llama", "fp8")))
    assert config.quantization == "fp8"
    monkeypatch.setattr(_link, "_names", {})
    loader = Df11ModelLoader(LoadConfig())
    loader.download_model(config)
    found = dict(loader._get_weights_iterator(loader.Source(config.model, None)))
    assert found.keys() == df11.torch.load_file(stored).keys()


def test_a_model_is_a_draft_by_what_the_config_keeps(stored: Path) -> None:
    """So vLLM names the draft in a target's own checkpoint."""
    config = ModelConfig(NAME)
    draft = ModelConfig(config.model_weights, tokenizer=config.tokenizer)
    assert (draft.model, draft.model_weights) == (config.model, config.model_weights)


def test_other_models_are_left_to_vllm(
    bucket: Bucket, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pull(url: str) -> None:
        raise RuntimeError(f"vLLM pulls {url}")

    monkeypatch.setattr("vllm.config.model.ObjectStorageModel", pull)
    bucket.add(folders.bf16("llama"), "vllm/bf16")
    with pytest.raises(RuntimeError, match="vLLM pulls s3://models/vllm/bf16"):
        ModelConfig("s3://models/vllm/bf16")
