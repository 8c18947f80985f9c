"""A save writes the model in memory, or is refused and names the difference. A failed save does not
change the folder.
"""

import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Folders, compressed, config_of, equal, load, prompt, same_weights, seeded
from torch import nn

import df11
from df11 import _saving
from df11._origin import digest, settled
from df11._platform import IS_WINDOWS
from df11._tensor import CompressedTensor

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*ordinary")

Change = Callable[[Any], None]


@torch.no_grad()
def train_a_norm(model: Any) -> None:
    model.model.norm.weight.mul_(1.5)


@torch.no_grad()
def permute_a_norm(model: Any) -> None:
    """Which no sum of the values shows."""
    weight = model.model.layers[1].input_layernorm.weight
    weight.copy_(weight.flip(0).clone())


def assign_a_state(model: Any) -> None:
    weights = {name: value + 1 for name, value in df11.state_dict(model).items()}
    model.load_state_dict(weights, assign=True)


def set_data(model: Any) -> None:
    layer = model.model.layers[0].mlp.up_proj
    layer.weight.data = layer.weight.decode() * 2


def put_a_parameter(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(torch.ones_like(model.lm_head.weight.decode()))


def put_a_norm(model: Any) -> None:
    model.model.norm.weight = nn.Parameter(torch.full_like(model.model.norm.weight, 0.5))


def swap_layers(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def swap_compressed(model: Any) -> None:
    """Both are compressed tensors of the containers, and each is in the other's place."""
    one, other = (model.model.layers[at].mlp.up_proj for at in (0, 1))
    one.weight, other.weight = other.weight, one.weight


def swap_by_data(model: Any) -> None:
    one, other = (model.model.layers[at].mlp.up_proj.weight for at in (0, 1))
    one.data = other.data


def drop_a_layer(model: Any) -> None:
    del model.model.layers[2]
    model.config.num_hidden_layers = 2


def resize(model: Any) -> None:
    model.resize_token_embeddings(520, mean_resizing=False)


def cast(model: Any) -> None:
    nn.Module.half(model)


def cast_a_norm(model: Any) -> None:
    model.model.norm.float()


CHANGES: list[Change] = [
    train_a_norm, permute_a_norm, assign_a_state, set_data, put_a_parameter, put_a_norm,
    swap_layers, swap_compressed, swap_by_data, drop_a_layer, resize, cast, cast_a_norm,
]  # fmt: skip


def is_same_model(folder: Path, model: Any) -> bool:
    """Whether a folder gives, decoded, the tensors and bits that a model has in memory."""
    back = folder.with_name(f"{folder.name}-back")
    shutil.rmtree(back, ignore_errors=True)
    df11.decompress(folder, back, progress=False)
    again, wanted = load(back).state_dict(), df11.state_dict(model)
    assert again.keys() == wanted.keys()
    return equal((again[name].to(wanted[name].dtype) for name in wanted), wanted.values())


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_was_changed_is_saved(folders: Folders, change: Change, tmp_path: Path) -> None:
    model = load(folders.df11("llama"))
    change(model)
    expected = None if change in (cast, cast_a_norm) else model(prompt()).logits
    model.save_pretrained(tmp_path / "saved")
    assert is_same_model(tmp_path / "saved", model)
    df11.verify(tmp_path / "saved", progress=False)
    again = load(tmp_path / "saved")
    if expected is not None:
        assert torch.equal(again(prompt()).logits, expected)
    left = {path.name for path in (tmp_path / "saved").iterdir()}
    assert left == {"config.json", "generation_config.json", "model.df11"}
    # The saved one is what df11.save copies; this one is not.
    df11.save(again, tmp_path / "copied")
    with pytest.raises(ValueError, match=r"the model has .*df11\.state_dict"):
        df11.save(model, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe", "mixtral", "gpt2"])
def test_conversions_of_transformers_are_reverted(
    folders: Folders, name: str, tmp_path: Path
) -> None:
    """Tied, stacked and turned weights get the names and shapes of the checkpoint."""
    model, original = load(folders.df11(name)), load(folders.bf16(name))
    for each in (model, original):
        norm = next(m for name, m in each.named_modules() if "norm" in name or "ln" in name)
        norm.weight.data = norm.weight.data * 2
        each.save_pretrained(tmp_path / ("saved" if each is model else "bf16"))
    df11.decompress(tmp_path / "saved", tmp_path / "back", progress=False)
    for file in (tmp_path / "bf16").glob("*.safetensors"):
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()
    assert same_weights(load(tmp_path / "saved"), original)


@pytest.mark.parametrize("factor", [1, 2])
def test_untied_weights_are_saved(folders: Folders, factor: int, tmp_path: Path) -> None:
    """Equal ones, too: the container has one of them."""
    model = load(folders.df11("llama-tied"))
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.decode() * factor)
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert torch.equal(again(prompt()).logits, model(prompt()).logits)
    head, embedding = again.lm_head.weight.decode(), again.model.embed_tokens.weight.decode()
    assert torch.equal(head, embedding * factor)
    with pytest.raises(ValueError, match=r"the model has .*lm_head\.weight"):
        df11.save(model, tmp_path / "refused")


def test_a_weight_that_is_saved_no_more(folders: Folders, tmp_path: Path) -> None:
    """One that became a buffer that is not persistent: the save lacks it, like the model's state;
    equal ones stay in the containers.
    """
    model = load(folders.df11("llama"))
    name, norm = "model.norm.weight", model.model.norm
    value = norm.weight.detach()
    del norm.weight
    for factor in (1, 2):
        norm.register_buffer("weight", value * factor, persistent=False)
        model.save_pretrained(tmp_path / "saved")
        assert (name in df11.open(tmp_path / "saved")) == (factor == 1)
    assert name not in model.state_dict()


def test_buffers_and_more_parameters_are_saved(folders: Folders, tmp_path: Path) -> None:
    """Weights that the containers lack lie beside them, and no others."""
    model = load(folders.df11("llama"))
    model.model.register_buffer("counts", torch.arange(4))
    model.extra = nn.Linear(3, 2)
    model.save_pretrained(tmp_path / "saved")
    from safetensors.torch import load as tensors_of

    damaged = tmp_path / "saved/df11.safetensors"
    whole = damaged.read_bytes()
    held = tensors_of(whole)
    assert held.keys() == {"model.counts", "extra.weight", "extra.bias"}
    assert torch.equal(held["extra.weight"], model.extra.weight)
    told = df11.verify(tmp_path / "saved", progress=False)
    assert told.tensors == len(df11.open(tmp_path / "saved")) + 3 and not told.unchecked
    for content in (whole[:-1] + b"!", whole[:200]):
        damaged.write_bytes(content)
        with pytest.raises(df11.CorruptError, match=r"df11\.safetensors"):
            df11.verify(tmp_path / "saved", progress=False)
    words = rf"{re.escape(str(damaged))}.*remove the file"
    for content in (whole[:200], b"damaged", b""):
        damaged.write_bytes(content)
        with pytest.raises(df11.CorruptError, match=words) as found:
            load(tmp_path / "saved")
        assert found.value.place == str(damaged)
        with pytest.raises(df11.CorruptError, match=words):
            df11.verify(tmp_path / "saved", progress=False)
    damaged.write_bytes(whole)
    shutil.copy(damaged, shutil.copytree(folders.df11("gpt2"), tmp_path / "other"))
    with pytest.raises(df11.CorruptError, match="belongs to another model"):
        df11.verify(tmp_path / "other", progress=False)
    # Saved where such a file was, without them.
    del model.extra, model.model._buffers["counts"]
    model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved/df11.safetensors").exists()


def test_a_file_beside_holds_what_containers_lack(folders: Folders, tmp_path: Path) -> None:
    """One that holds more is an error, whatever its names: verifying and loading say so."""
    from safetensors.torch import save_file

    for source, name in [
        ("llama", "model.norm.weight"),
        ("llama", "lm_head.weight"),
        ("llama-tied", "lm_head.weight"),
        ("qwen3-moe", "model.layers.0.mlp.experts.down_proj"),
    ]:
        folder = shutil.copytree(folders.df11(source), tmp_path / source, dirs_exist_ok=True)
        shape = load(folder).get_parameter(name).shape
        save_file({name: torch.zeros(shape, dtype=torch.bfloat16)}, folder / "df11.safetensors")
        # The code of transformers that stacks experts fails on the name.
        words = "mlp" if "experts" in name else rf"df11\.safetensors.*{name}"
        with pytest.raises((ValueError, AttributeError), match=words):
            load(folder)
        if source == "llama":
            with pytest.raises(df11.CorruptError, match=rf"df11\.safetensors.*{name}"):
                df11.verify(folder, progress=False)
        (folder / "df11.safetensors").unlink()


def test_what_was_loaded_is_saved_whatever_the_folder_holds(
    folders: Folders, tmp_path: Path
) -> None:
    """The folder gets another model after loading: the first one is saved, from what is open."""
    source = shutil.copytree(folders.df11("llama"), tmp_path / "model")
    model = load(source)
    pickled = pickle.dumps(model)
    other = load(folders.df11("llama-bias"))
    other.save_pretrained(source)
    assert same_weights(load(source), load(folders.bf16("llama-bias")))
    model.save_pretrained(tmp_path / "saved")
    assert same_weights(load(tmp_path / "saved"), load(folders.bf16("llama")))
    df11.save(model, tmp_path / "copied")
    assert df11.report(model, verify=True).verified
    # A pickled model asks for its containers by name.
    with pytest.raises(ValueError, match="holds another model"):
        pickle.loads(pickled).save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again").exists()
    with pytest.raises(ValueError, match="holds another model"):
        df11.report(pickle.loads(pickled), verify=True)
    # Onto what took its place.
    model.save_pretrained(source)
    assert same_weights(load(source), load(folders.bf16("llama")))


def test_containers_that_are_overwritten_in_place_are_not_copied(
    folders: Folders, tmp_path: Path
) -> None:
    source = shutil.copytree(folders.df11("llama"), tmp_path / "model")
    model = load(source)
    container = source / "model.df11"
    with container.open("r+b") as file:
        file.seek(container.stat().st_size // 2)
        file.write(bytes(4096))
    with pytest.raises(df11.CorruptError):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_verification_tells_what_it_compared(folders: Folders) -> None:
    assert df11.report(load(folders.df11("llama")), verify=True).verified_by == "hashes and digests"
    raw = load(folders.df11("llama", "raw"))
    report = df11.report(raw, verify=True)
    assert report.verified_by == "digests" and "by digests" in str(report)


def test_digests_tell_values_and_places_apart() -> None:
    """Also of one element, of rows that are exchanged, and of longer tensors than one product."""
    torch.manual_seed(1)
    values = [
        torch.randn(130, 64, dtype=torch.bfloat16),
        torch.randn(3, 7),
        torch.randint(0, 2, (11,), dtype=torch.bool),
        torch.randn((1 << 22) + 5).bfloat16(),
        torch.tensor(3.0),
        torch.empty(0, 4),
    ]
    for value in values:
        told = settled(digest(value))
        assert settled(digest(value.clone())) == told
        assert settled(digest(value.reshape(1, *value.shape))) != told
        if value.numel() < 2:
            continue
        others = [value.flip(0), value.roll(1, 0)]
        others += [torch.cat([value[1:2], value[:1], value[2:]])]
        negated = value.clone()
        negated.view(-1)[-1] = (
            ~negated.view(-1)[-1] if value.dtype == torch.bool else -negated.view(-1)[-1]
        )
        for other in (*others, negated):
            assert torch.equal(other, value) or settled(digest(other)) != told
    assert settled(digest(torch.zeros(4))) != settled(digest(torch.zeros(4, dtype=torch.int32)))


def test_a_config_in_other_words_is_kept(folders: Folders, tmp_path: Path) -> None:
    """A config of another release stays; one with other values becomes the model's."""
    bf16, source = shutil.copytree(folders.bf16("llama"), tmp_path / "bf16"), tmp_path / "model"
    for name in ("config.json", "generation_config.json"):
        told = json.loads((bf16 / name).read_text())
        told["transformers_version"] = "4.40.0"
        if "dtype" in told:
            told["torch_dtype"] = told.pop("dtype")
        (bf16 / name).write_text(json.dumps(dict(reversed(told.items()))))
    model = load(compressed(bf16, source))
    model.save_pretrained(tmp_path / "saved")
    df11.verify(tmp_path / "saved", progress=False)
    assert contents(tmp_path / "saved") == contents(source)
    df11.decompress(tmp_path / "saved", tmp_path / "back", progress=False)
    assert contents(tmp_path / "back") == contents(bf16)
    model.config.rope_parameters["rope_theta"] = 7.0
    model.generation_config.max_length = 7
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.config.rope_parameters["rope_theta"] == 7.0
    assert again.generation_config.max_length == 7
    with pytest.raises(df11.CorruptError, match=r"config\.json"):
        df11.verify(tmp_path / "saved", progress=False)


def test_as_one_expression(folders: Folders, tmp_path: Path) -> None:
    load(folders.df11("llama")).save_pretrained(tmp_path)
    assert same_weights(load(tmp_path), load(folders.bf16("llama")))
    model = load(folders.df11("llama"))
    type(model).save_pretrained(model, tmp_path)
    assert "save_pretrained" not in vars(model)


def test_another_models_containers_are_in_the_way(folders: Folders, tmp_path: Path) -> None:
    """Containers of an earlier output go, as with `--force`; others stay: a refused save."""
    few, many = load(folders.df11("llama")), tmp_path / "many"
    shards = tmp_path / "shards"
    seeded(transformers.LlamaForCausalLM(config_of("llama-bias"))).save_pretrained(
        shards, max_shard_size="400KB"
    )
    compressed(shards, many)
    assert len(list(many.glob("*.df11"))) > 2
    few.save_pretrained(many)
    assert [path.name for path in many.glob("*.df11")] == ["model.df11"]
    assert same_weights(load(many), load(folders.bf16("llama")))
    for taken in ("other.df11", "pipeline.df11"):
        folder = tmp_path / f"with {taken.replace('/', '-')}"
        (folder / taken).parent.mkdir(parents=True)
        df11.compress(folders.bf16("gpt2") / "model.safetensors", folder / "x.df11", progress=False)
        (folder / "x.df11").rename(folder / taken)
        before = contents(folder)
        for save in (few.save_pretrained, lambda place: df11.save(few, place)):
            with pytest.raises(df11.ParameterError, match="not part of an earlier output"):
                save(folder)
            assert contents(folder) == before


def test_subfolders_keep_other_models(folders: Folders, tmp_path: Path) -> None:
    """Such as checkpoints of a trainer: they are neither loaded, nor replaced, nor in the way."""
    few, other = load(folders.df11("llama")), load(folders.df11("llama-bias"))
    out = tmp_path / "out"
    other.save_pretrained(out / "checkpoint-1")
    few.save_pretrained(out / "checkpoint-2")
    for model, name in ((few, "llama"), (other, "llama-bias"), (few, "llama")):
        before = contents(out / "checkpoint-1") | contents(out / "checkpoint-2")
        model.save_pretrained(out)
        df11.save(model, out)
        assert same_weights(load(out), load(folders.bf16(name)))
        df11.verify(out, progress=False)
        assert contents(out / "checkpoint-1") | contents(out / "checkpoint-2") == before
    assert same_weights(load(out / "checkpoint-1"), load(folders.bf16("llama-bias")))
    # One that would be loaded with what lies in subfolders itself.
    deep = shutil.copytree(folders.bf16("llama"), tmp_path / "deep")
    (deep / "weights").mkdir()
    (deep / "model.safetensors").rename(deep / "weights/model.safetensors")
    deep = compressed(deep, tmp_path / "deep-df11")
    assert (deep / "weights/model.df11").exists()
    inner = load(deep)
    shutil.rmtree(tmp_path / "out")
    other.save_pretrained(out / "checkpoint-1")
    with pytest.raises(df11.ParameterError, match=r"checkpoint-1.*not part of an earlier output"):
        df11.save(inner, out)


def contents(folder: Path) -> dict[str, bytes]:
    """Files by their names. Windows deletes none that is mapped: it keeps the temporary folder of
    what was replaced, which the next run removes. There transformers writes lines that end in
    `\\r\\n`, and df11 in `\\n`.
    """
    paths = (path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): path for path in paths}
    if IS_WINDOWS:
        files = {name: files[name] for name in files if not re.match(r"\.df11-\w{6}\.part/", name)}
    read = {name: path.read_bytes() for name, path in files.items()}
    if IS_WINDOWS:
        texts = {name: held for name, held in read.items() if name.endswith(".json")}
        read |= {name: held.replace(b"\r\n", b"\n") for name, held in texts.items()}
    return read


@pytest.fixture
def with_side_files(folders: Folders, tmp_path: Path) -> Path:
    """A compressed folder with two side files: `notes.txt` and `deep/more.txt`."""
    bf16, source = tmp_path / "bf16", tmp_path / "model"
    shutil.copytree(folders.bf16("llama"), bf16)
    (bf16 / "notes.txt").write_text("notes")
    (bf16 / "deep").mkdir()
    (bf16 / "deep/more.txt").write_text("more")
    return compressed(bf16, source)


def test_links_are_treated_as_by_compress(with_side_files: Path, tmp_path: Path) -> None:
    """One that leads out of the folder is refused; one in the target is replaced, and not written
    through.
    """
    source, secret = with_side_files, tmp_path / "secret"
    model = load(source)
    for content in ("secret", "notes"):  # with the recorded content, too
        secret.write_text(content)
        (source / "notes.txt").unlink()
        link(source / "notes.txt", secret)
        for save in (model.save_pretrained, lambda place: df11.save(model, place)):
            with pytest.raises(df11.ParameterError, match="leads out of the folder"):
                save(tmp_path / "saved")
            assert not (tmp_path / "saved").exists()
    (source / "notes.txt").unlink()
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved/model.df11").unlink()
    (tmp_path / "saved/model.df11").symlink_to(secret)
    model.save_pretrained(tmp_path / "saved")
    assert secret.read_text() == "notes" and not (tmp_path / "saved/model.df11").is_symlink()


def link(path: Path, target: Path) -> None:
    """Makes a link. Windows has them for some users, and Wine shows none."""
    try:
        path.symlink_to(target)
    except OSError:
        if not IS_WINDOWS:
            raise
    if IS_WINDOWS and not path.is_symlink():
        pytest.skip("no links here")


def test_side_files_are_copied_as_they_are(with_side_files: Path, tmp_path: Path) -> None:
    """What is no file is left out; of a file that was changed a warning tells."""
    source, saved = with_side_files, tmp_path / "saved"
    model = load(source)
    (source / "notes.txt").unlink()
    if hasattr(os, "mkfifo"):
        os.mkfifo(source / "notes.txt")
    model.save_pretrained(saved)
    assert not (saved / "notes.txt").exists()
    (source / "notes.txt").unlink(missing_ok=True)
    (source / "notes.txt").write_text("other")
    with pytest.warns(UserWarning, match=r"notes\.txt in .* was changed"):
        model.save_pretrained(saved)
    assert (saved / "notes.txt").read_text() == "other"
    (source / "notes.txt").write_text("notes")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(saved)
    assert (saved / "notes.txt").read_text() == "notes"
    assert (saved / "deep/more.txt").read_text() == "more"
    df11.verify(saved, progress=False)


@pytest.mark.parametrize("change", [None, train_a_norm], ids=["copied", "anew"])
def test_a_full_disk_leaves_the_folder_as_it_was(
    folders: Folders, change: Change | None, tmp_path: Path
) -> None:
    load(folders.df11("llama-bias")).save_pretrained(tmp_path / "saved")
    before, model = contents(tmp_path / "saved"), load(folders.df11("llama"))
    if change is not None:
        change(model)
    resource = pytest.importorskip("resource", reason="Windows has no limit of file sizes")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        for place in ("saved", "new"):
            with pytest.raises(Exception, match=r"too large|Error while serializing") as error:
                model.save_pretrained(tmp_path / place)
            assert not isinstance(error.value, AssertionError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path / "saved") == before
    assert not (tmp_path / "new").exists()
    assert {path.name for path in (tmp_path / "saved").iterdir()} == set(before)


def test_a_name_that_cannot_be_taken_leaves_the_folder_as_it_was(
    folders: Folders, tmp_path: Path
) -> None:
    load(folders.df11("llama-bias")).save_pretrained(tmp_path)
    (tmp_path / "model.df11").unlink()
    (tmp_path / "model.df11").mkdir()
    (tmp_path / "model.df11/kept").write_text("kept")
    before = contents(tmp_path)
    with pytest.raises(df11.ParameterError, match=r"model\.df11 is a folder"):
        load(folders.df11("llama")).save_pretrained(tmp_path)
    assert contents(tmp_path) == before


def test_two_savers_at_once(folders: Folders, tmp_path: Path) -> None:
    """Into one folder: it holds one of the two models, and nothing else."""
    from concurrent.futures import ThreadPoolExecutor

    models = [load(folders.df11(name)) for name in ("llama", "llama-bias")]
    for _ in range(3):
        with ThreadPoolExecutor(4) as threads:
            jobs = [threads.submit(df11.save, model, tmp_path / "saved") for model in models * 2]
        for job in jobs:
            job.result()
        assert {path.name for path in (tmp_path / "saved").iterdir()} <= {
            path.name for path in folders.df11("llama").iterdir()
        }
        identity = df11.open(tmp_path / "saved").identity
        assert identity in {
            df11.open(folders.df11(name)).identity for name in ("llama", "llama-bias")
        }


def test_threads_save_one_model(folders: Folders, tmp_path: Path) -> None:
    """Into folders of their own, which all get its containers."""
    from concurrent.futures import ThreadPoolExecutor

    model = load(folders.df11("llama"))
    places = [tmp_path / str(at) for at in range(8)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(model.save_pretrained, places))
    assert all(contents(place) == contents(folders.df11("llama")) for place in places)


def test_another_model_that_comes_meanwhile_stays(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save into the model's own folder leaves the containers there, if they are still its own."""
    source = shutil.copytree(folders.df11("llama"), tmp_path / "model")
    model, other = load(source), load(folders.df11("llama-bias"))
    install = _saving.install

    def late(*given: Any) -> None:
        monkeypatch.setattr(_saving, "install", install)
        other.save_pretrained(source)
        install(*given)

    monkeypatch.setattr(_saving, "install", late)
    with pytest.raises(df11.ParameterError, match=r"replaced by another model's.*save again"):
        model.save_pretrained(source)
    assert same_weights(load(source), load(folders.bf16("llama-bias")))
    assert contents(source) == contents(folders.df11("llama-bias"))
    model.save_pretrained(source)
    assert contents(source) == contents(folders.df11("llama"))


def test_offloaded_weights_are_refused(folders: Folders, tmp_path: Path) -> None:
    import accelerate

    model = load(folders.df11("llama"))
    accelerate.cpu_offload(model, execution_device="cpu", state_dict=model.state_dict())
    with pytest.raises(ValueError, match="remove_hook_from_module"):
        model.save_pretrained(tmp_path / "saved")
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    model.save_pretrained(tmp_path / "saved")
    assert same_weights(load(tmp_path / "saved"), load(folders.bf16("llama")))


def test_side_files_go_with_what_is_compressed_anew(folders: Folders, tmp_path: Path) -> None:
    """The tokenizer does; an index of other shards does not."""
    folders.worded("llama")
    bf16, source = tmp_path / "bf16", tmp_path / "model"
    transformers.AutoTokenizer.from_pretrained(folders.worded("llama")[0]).save_pretrained(bf16)
    load(folders.bf16("llama")).save_pretrained(bf16, max_shard_size="400KB")
    assert (bf16 / "model.safetensors.index.json").exists()
    model = load(compressed(bf16, source))
    train_a_norm(model)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "several", max_shard_size="500KB")
    for place in ("one", "several"):
        assert is_same_model(tmp_path / place, model)
        transformers.AutoTokenizer.from_pretrained(tmp_path / place)
        df11.verify(tmp_path / place, progress=False)
    assert not (tmp_path / "one/model.safetensors.index.json").exists()
    index = json.loads((tmp_path / "several/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(
        list((tmp_path / "several").glob("*.df11"))
    )
    # Over its own source, of which other shards go.
    model.save_pretrained(source)
    assert [path.name for path in source.glob("*.df11")] == ["model.df11"]
    assert is_same_model(source, model)


def test_wrapped_weights_are_refused(folders: Folders, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = load(folders.df11("llama"))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    base = adapted.get_base_model()
    with pytest.raises(ValueError, match=r"q_proj\.weight is in another module.*adapters"):
        base.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="adapters are saved by themselves"):
        df11.save(adapted, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    adapted.unload().save_pretrained(tmp_path / "saved")
    assert same_weights(load(tmp_path / "saved"), load(folders.bf16("llama")))


def test_decoded_weights_have_the_names_of_their_places(folders: Folders) -> None:
    """Names of exchanged layers, too."""
    model, original = load(folders.df11("llama")), load(folders.bf16("llama"))
    for each in (model, original):
        swap_layers(each)
    assert same_weights(model, original)


@pytest.mark.gpu
@pytest.mark.parametrize("residence", ["stored", "fast"])
def test_saving_from_a_gpu(folders: Folders, residence: str, tmp_path: Path) -> None:
    """Weights are compared by what a GPU decodes of them."""
    options = {"quantization_config": df11.Config(residence=residence)}
    for change in (None, swap_compressed, permute_a_norm, put_a_norm):
        model = load(folders.df11("llama"), "cuda", **options)
        assert isinstance(model.lm_head.weight, CompressedTensor)
        if change is not None:
            change(model)
        model.save_pretrained(tmp_path / "saved")
        assert is_same_model(tmp_path / "saved", model)
