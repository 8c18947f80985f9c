"""Which weights vLLM loads of a folder, and what it says if some are missing."""

import json
import logging
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import Folders
from safetensors.torch import load_file, save_file
from test_paths import NAMES
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig

import df11
from df11._link import WEIGHTS
from df11.vllm import register
from df11.vllm._deferred import Deferred
from df11.vllm._files import containers_of, has_head
from df11.vllm._loader import Df11ModelLoader, tie_as_stored

Found = dict[str, Any]


def read(folder: Path, subfolder: str | None = None) -> Found:
    """The tensors that vLLM's loading code is handed, by name."""
    loader = Df11ModelLoader(LoadConfig())
    source = loader.Source(str(folder), None, subfolder)
    return dict(loader._get_weights_iterator(source))


def decoded(value: Any) -> Any:
    return value.decode() if isinstance(value, Deferred) else value


def are_compressed(found: Found) -> bool:
    kinds = {isinstance(value, Deferred) for value in found.values()}
    assert len(kinds) == 1
    return kinds.pop()


def copy(folder: Path, place: Path) -> Path:
    shutil.copytree(folder, place)
    return place


def unmark(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several containers."""
    root = tmp_path_factory.mktemp("sharded")
    model = models.seeded(
        models.transformers.AutoModelForCausalLM.from_config(models.config_of("llama"))
    )
    _, folder = models.saved(model, root, max_shard_size="400KB")
    assert len(list(folder.glob("*.df11"))) > 2
    return folder


@pytest.mark.parametrize("is_same", [True, False])
def test_a_tied_head_in_another_shard(folders: Folders, is_same: bool, tmp_path: Path) -> None:
    """It is untied as vLLM unties BF16 models, which looks at safetensors alone."""
    register()
    source = models.with_head_apart(folders.bf16("llama-tied"), tmp_path / "bf16", is_same)
    folder = models.compressed(source, tmp_path / "df11")
    assert has_head(folder) == (not is_same)
    assert has_head(folders.df11("llama")) and not has_head(folders.df11("llama-tied"))
    for is_left_over in (False, True):
        if is_left_over:
            for file in source.glob("*.safetensors"):
                shutil.copy(file, folder)
        config = ModelConfig(str(folder), skip_tokenizer_init=True, dtype="bfloat16")
        knows = hasattr(config, "maybe_untie_word_embeddings")
        if knows:
            config.maybe_untie_word_embeddings()
        tie_as_stored(config, folder)
        assert config.hf_config.tie_word_embeddings == (is_same or not knows)


def test_a_head_beside_containers_is_one(folders: Folders, tmp_path: Path) -> None:
    folder = copy(folders.df11("llama-tied"), tmp_path / "beside")
    save_file({"norm.weight": torch.zeros(2)}, folder / WEIGHTS)
    assert not has_head(folder)
    save_file({"lm_head.weight": torch.zeros(2, 2)}, folder / WEIGHTS)
    assert has_head(folder)


def test_a_stray_container_beside_bf16_is_left_out(
    folders: Folders, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy(folders.bf16("llama"), tmp_path / "mixed")
    for file in folders.df11("qwen3").glob("*.df11"):
        shutil.copy(file, folder / f"old-{file.name}")
    logger = logging.getLogger("vllm.plugins.df11")
    logger.addHandler(caplog.handler)
    try:
        found = read(folder)
    finally:
        logger.removeHandler(caplog.handler)
    assert not are_compressed(found)
    assert "config.json does not name df11: model.safetensors is loaded" in caplog.text
    expected = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_what_is_left_over_beside_containers_is_left_out(folders: Folders, tmp_path: Path) -> None:
    folder = copy(folders.df11("llama"), tmp_path / "left")
    shutil.copy(folders.bf16("qwen3") / "model.safetensors", folder)
    found = read(folder)
    assert are_compressed(found) and found.keys() == df11.open(folder).keys()


def test_containers_that_no_config_names_are_loaded_alone(folders: Folders, tmp_path: Path) -> None:
    """Like the names of a checkpoint of another quantization method."""
    folder = copy(folders.df11("llama"), tmp_path / "alone")
    unmark(folder)
    assert are_compressed(read(folder))


def test_the_config_of_a_subfolder_decides(folders: Folders, tmp_path: Path) -> None:
    bf16, compressed = folders.both("llama")
    copy(bf16, tmp_path / "model")
    copy(compressed, tmp_path / "model/draft")
    shutil.copy(bf16 / "model.safetensors", tmp_path / "model/draft")
    assert are_compressed(read(tmp_path / "model", "draft"))


def test_a_folder_without_its_containers_is_refused(folders: Folders, tmp_path: Path) -> None:
    folder = copy(folders.df11("llama"), tmp_path / "empty")
    shutil.copy(folders.bf16("llama") / "model.safetensors", folder)
    for file in folder.glob("*.df11"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no \*\.df11"):
        read(folder)


def test_a_checkpoint_below_a_folder_is_not_taken_for_it(folders: Folders, tmp_path: Path) -> None:
    folder = copy(folders.df11("llama"), tmp_path / "out")
    copy(folders.df11("qwen3"), folder / "checkpoint-1")
    assert are_compressed(read(folder))
    (folder / "model.df11").unlink()
    with pytest.raises(df11.ParameterError, match=r"checkpoint-1/model\.df11 is of another model"):
        read(folder)


def test_a_missing_container_is_named(sharded: Path, tmp_path: Path) -> None:
    folder = copy(sharded, tmp_path / "part")
    count = len(list(folder.glob("*.df11")))
    sorted(folder.glob("*.df11"))[1].unlink()
    with pytest.raises(df11.ParameterError, match=f"shard 2 of {count} is missing"):
        read(folder)


def test_containers_of_two_models_are_refused(
    folders: Folders, sharded: Path, tmp_path: Path
) -> None:
    folder = copy(sharded, tmp_path / "two")
    for file in folders.df11("qwen3").glob("*.df11"):
        shutil.copy(file, folder / f"other-{file.name}")
    with pytest.raises(df11.ParameterError):
        read(folder)


def test_what_containers_lack_is_read_beside_them(folders: Folders, tmp_path: Path) -> None:
    folder = copy(folders.df11("llama"), tmp_path / "beside")
    save_file({"added.weight": torch.ones(3)}, folder / WEIGHTS)
    found = read(folder)
    assert torch.equal(found.pop("added.weight"), torch.ones(3))
    assert are_compressed(found)
    name = next(iter(found))
    save_file({name: torch.ones(3)}, folder / WEIGHTS)
    with pytest.raises(ValueError, match=f"has {name}, which the containers hold too"):
        read(folder)


def test_a_damaged_file_beside_them_is_named(folders: Folders, tmp_path: Path) -> None:
    folder = copy(folders.df11("llama"), tmp_path / "beside")
    for content in (b"", b"damaged"):
        (folder / WEIGHTS).write_bytes(content)
        with pytest.raises(df11.CorruptError, match=rf"{folder / WEIGHTS}: .*remove the file"):
            read(folder)


def test_an_interrupted_save_is_named(folders: Folders, tmp_path: Path) -> None:
    """In a folder that was not there before it: vLLM finds no config, and we the containers."""
    folder = tmp_path / "saved"
    copy(folders.df11("llama"), folder / ".df11-new" / "files")
    assert containers_of(str(folder), None, None, None) == folder
    with pytest.raises(df11.ParameterError, match=r"interrupted.*df11 doctor --finish"):
        read(folder)


def test_only_a_regular_file_is_read_beside_them(folders: Folders, tmp_path: Path) -> None:
    folder = copy(folders.df11("llama"), tmp_path / "beside")
    for make in (os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")):
        make(folder / WEIGHTS)
        with pytest.raises(df11.ParameterError, match="not a regular file"):
            read(folder)
        (folder / WEIGHTS).rename(tmp_path / f"other-{len(list(tmp_path.iterdir()))}")


@pytest.mark.parametrize("name", NAMES)
def test_names_of_folders_mean_nothing(folders: Folders, tmp_path: Path, name: str) -> None:
    folder = copy(folders.df11("llama"), tmp_path / name)
    assert are_compressed(read(folder))
    unmark(folder)
    assert are_compressed(read(folder))


class Hostile:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return Path.touch, (self.place,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "other.df11"])
def test_pickles_are_not_run(folders: Folders, tmp_path: Path, name: str) -> None:
    folder, made = copy(folders.df11("llama"), tmp_path / "hostile"), tmp_path / "made"
    (folder / name).write_bytes(pickle.dumps(Hostile(made)))
    if name.endswith(".df11"):
        with pytest.raises(df11.CorruptError, match=rf"{name}: .*this is not a df11 file"):
            read(folder)
    else:
        assert are_compressed(read(folder))
    assert not made.exists()
    pickle.loads((folder / name).read_bytes())
    assert made.exists()


def test_containers_are_regular_files(sharded: Path, tmp_path: Path) -> None:
    kinds = (os.mkfifo, lambda path: path.symlink_to("/dev/zero"))
    for number, make in enumerate(kinds):
        folder = copy(sharded, tmp_path / str(number))
        (first, *_) = sorted(folder.glob("*.df11"))
        first.unlink()
        make(first)
        with pytest.raises(df11.ParameterError, match=f"{first.name}: not a regular file"):
            read(folder)


def test_a_truncated_container_is_named(sharded: Path, tmp_path: Path) -> None:
    folder = copy(sharded, tmp_path / "truncated")
    (first, *_) = sorted(folder.glob("*.df11"))
    os.truncate(first, first.stat().st_size - 1)
    with pytest.raises(df11.CorruptError, match=f"{first.name}: .*fetch it again"):
        read(folder)


@pytest.mark.parametrize("revision", ["../../other", "/tmp/other"])
def test_revisions_and_subfolders_lead_nowhere_else(
    folders: Folders, revision: str, tmp_path: Path
) -> None:
    for model in ("org/name", str(copy(folders.df11("llama"), tmp_path / "model"))):
        with pytest.raises(ValueError, match="leads out of the repository"):
            containers_of(model, revision, None, str(tmp_path))
        with pytest.raises(ValueError, match="leads out of the repository"):
            containers_of(model, None, revision, str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_floats_are_decoded_to_exact_values(tmp_path: Path, dtype: torch.dtype) -> None:
    config = models.config_of("llama")
    model = models.seeded(models.transformers.AutoModelForCausalLM.from_config(config))
    before, folder = models.saved(model.float().to(dtype), tmp_path)
    encodings = {tensor.encoding for tensor in df11.open(folder).values()}
    assert "float" in encodings
    expected, found = load_file(before / "model.safetensors"), read(folder)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        loaded = decoded(found[name])
        assert loaded.dtype == dtype and torch.equal(loaded, value), name


def test_a_fine_tune_is_decoded_with_its_base(tmp_path: Path) -> None:
    config = models.config_of("llama")
    model = models.seeded(models.transformers.AutoModelForCausalLM.from_config(config))
    model.save_pretrained(tmp_path / "base")
    for parameter in model.parameters():
        parameter.data.mul_(1.002)
    model.save_pretrained(tmp_path / "tune")
    folder = tmp_path / "df11"
    df11.compress(tmp_path / "tune", folder, base=tmp_path / "base", progress=False)
    assert "delta" in {tensor.encoding for tensor in df11.open(folder).values()}
    expected, found = load_file(tmp_path / "tune/model.safetensors"), read(folder)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(decoded(found[name]), value), name
    (tmp_path / "base").rename(tmp_path / "moved")
    tensors = read(folder).values()
    with pytest.raises(df11.NoBaseError, match='"base"'):
        list(map(decoded, tensors))
