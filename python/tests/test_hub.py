"""Compressed repositories of the Hub, from a server on this machine and from the cache."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import run
from hub import Hub, Repository
from models import Folders, compressed, load, tokenizer

import df11

TOKENS = torch.arange(1, 60).reshape(1, -1)
#: What a script that loads models begins with.
SETUP = """
import sys, torch, transformers, df11
from pathlib import Path
transformers.utils.logging.set_verbosity_error()
expected = torch.load(sys.argv[1])
load = transformers.AutoModelForCausalLM.from_pretrained

def same(model):
    with torch.no_grad():
        assert torch.equal(model(torch.arange(1, 60).reshape(1, -1)).logits, expected["logits"])
    state = df11.state_dict(model)
    assert all(torch.equal(state[name], value) for name, value in expected["state"].items())
    assert state.keys() == expected["state"].keys() and df11.report(model, verify=True).verified

def refused(action):
    try:
        action()
    except (OSError, ValueError) as error:
        return str(error)
    raise AssertionError("nothing was refused")
"""


class Made:
    """A compressed folder of several containers, and what its model answers."""

    def __init__(self, root: Path, folders: Folders) -> None:
        self.root = root
        model = load(folders.bf16("llama"))
        model.save_pretrained(root / "bf16", max_shard_size="900KB")
        tokenizer().save_pretrained(root / "bf16")
        self.folder = compressed(root / "bf16", root / "df11")
        self.containers = {file.name for file in self.folder.glob("*.df11")}
        assert len(self.containers) > 1
        with torch.no_grad():
            told = {"logits": model(TOKENS).logits, "state": dict(model.state_dict())}
        self.expected = root / "expected.pt"
        torch.save(told, self.expected)

    def script(self, code: str, home: Path, *arguments: object, **environment: str) -> str:
        """Runs code after SETUP with a cache of its own."""
        settings = {
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        return run(SETUP + code, self.expected, *arguments, **settings, **environment)


@pytest.fixture(scope="module")
def made(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("hub"), folders)


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.server.shutdown()
    server.server.server_close()


def test_a_repository_is_fetched_and_then_in_the_cache(
    made: Made, hub: Hub, tmp_path: Path
) -> None:
    hub.repositories["org/tiny"] = Repository(made.folder)
    script = """
same(load("org/tiny", device_map="cpu"))
same(load("org/tiny", device_map="cpu", local_files_only=True))
tokenizer = transformers.AutoTokenizer.from_pretrained("org/tiny")
print(tokenizer.decode(tokenizer("some words of it")["input_ids"], skip_special_tokens=True))
config = transformers.AutoConfig.from_pretrained("org/tiny")
same(df11.attach(transformers.LlamaForCausalLM(config), "org/tiny"))
"""
    assert made.script(script, tmp_path, HF_ENDPOINT=hub.url).endswith("some words of it")
    got = hub.downloaded()
    assert {
        name.removeprefix("org/tiny/") for name in got if name.endswith(".df11")
    } == made.containers
    assert "org/tiny/config.json" in got
    assert not [name for name in got if "safetensors" in name or name.endswith(".bin")], got
    made.script(script, tmp_path, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert not hub.asked


def test_what_from_pretrained_is_told_is_heeded(made: Made, hub: Hub, tmp_path: Path) -> None:
    """A private repository, a branch, a subfolder of several, and a cache elsewhere."""
    (tmp_path / "pipeline").mkdir()
    shutil.copytree(made.folder, tmp_path / "pipeline" / "text[1]")
    shutil.copytree(made.folder, tmp_path / "pipeline" / "text1")
    hub.repositories["org/parts"] = Repository(tmp_path / "pipeline", "v2", token="secret")
    script = """
options = {"revision": "v2", "token": "secret", "cache_dir": sys.argv[2], "subfolder": "text[1]"}
# With PEFT, transformers looks for an adapter first: on the branch main, unless it is told.
options["adapter_kwargs"] = {"revision": "v2"}
same(load("org/parts", device_map="cpu", **options))
same(load("org/parts", device_map="cpu", local_files_only=True, **options))
same(load("org/parts", device_map="cpu", force_download=True, **options))
for wrong in ({"token": "guessed"}, {"revision": "main"}, {"subfolder": "image"},
              {"local_files_only": True}):
    changed = {**options, "cache_dir": None, **wrong}
    print(refused(lambda: load("org/parts", device_map="cpu", **changed)))
"""
    made.script(script, tmp_path / "home", tmp_path / "cache", HF_ENDPOINT=hub.url)
    assert not list((tmp_path / "home").rglob("*.df11"))
    assert {file.name for file in (tmp_path / "cache").rglob("*.df11")} == made.containers
    assert not [name for name in hub.downloaded() if "/text1/" in name or "safetensors" in name]


def test_a_cache_that_another_program_filled(made: Made, tmp_path: Path) -> None:
    """As huggingface_hub lays it out: blobs, links to them, and a branch that names a commit; no
    server at all.
    """
    commit = "0123456789" * 4
    place = tmp_path / "hub" / "models--org--tiny"
    for folder in ("blobs", "refs", f"snapshots/{commit}"):
        (place / folder).mkdir(parents=True)
    (place / "refs/main").write_text(commit)
    for file in made.folder.iterdir():
        shutil.copyfile(file, place / "blobs" / file.name)
        (place / "snapshots" / commit / file.name).symlink_to(f"../../blobs/{file.name}")
    script = """
# With PEFT, transformers looks for an adapter too, many times if the server is gone.
here = {"local_files_only": True}

def local():
    return load("org/tiny", device_map="cpu", **here, adapter_kwargs=here)

model = local()
same(model)
model.save_pretrained(sys.argv[2])
same(load(sys.argv[2], device_map="cpu"))
# Of several containers one is missing; then all are.
containers = sorted(Path(sys.argv[3]).glob("*.df11"))
containers[0].unlink()
assert f"{len(containers) - 1} of {len(containers)}" in refused(local)
for container in containers[1:]:
    container.unlink()
assert "nor in the cache" in refused(local)
"""
    saved = tmp_path / "saved"
    snapshot = place / "snapshots" / commit
    made.script(script, tmp_path, saved, snapshot, HF_ENDPOINT="http://127.0.0.1:9")
    assert not any(file.is_symlink() for file in saved.iterdir())


def test_a_repository_without_containers(made: Made, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "marked").mkdir()
    shutil.copyfile(made.folder / "config.json", tmp_path / "marked" / "config.json")
    hub.repositories["org/marked"] = Repository(tmp_path / "marked")
    hub.repositories["org/bf16"] = Repository(made.root / "bf16")
    script = """
print(refused(lambda: load("org/marked", device_map="cpu")))
print(refused(lambda: df11.attach(torch.nn.Linear(2, 2), "org/bf16")))
print(refused(lambda: df11.attach(torch.nn.Linear(2, 2), "org/absent")))
print(refused(lambda: df11.open("org/tiny")))
print(refused(lambda: df11.verify("org/tiny")))
assert not df11.report(load("org/bf16"))
"""
    said = made.script(script, tmp_path / "home", HF_ENDPOINT=hub.url).splitlines()
    assert (
        said[0].startswith("org/marked (main) is no folder of containers")
        and "df11 compress" in said[0]
    )
    assert said[1].startswith("org/bf16 (main) is no folder of containers")
    assert "Repository Not Found" in "".join(said)
    for line in said[-2:]:
        assert "opening org/tiny" in line and "hf download org/tiny --local-dir tiny" in line


def test_a_local_folder_leaves_transformers_as_it_is(made: Made, tmp_path: Path) -> None:
    made.script(
        """
same(load(sys.argv[2]))
assert not hasattr(transformers.modeling_utils._get_resolved_checkpoint_files, "_df11")
empty = Path(sys.argv[3])
empty.mkdir()
(empty / "config.json").write_bytes(Path(sys.argv[2], "config.json").read_bytes())
assert "holds no *.df11" in refused(lambda: load(empty))
""",
        tmp_path,
        made.folder,
        tmp_path / "empty",
    )


def test_paths_that_are_no_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from df11 import _hub

    def fetch(*_: Any, **__: Any) -> Any:
        raise AssertionError("asked the Hub")

    monkeypatch.setattr(_hub, "_fetch", fetch)
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    for path in (
        "models/absent",
        "absent",
        "org/model.df11",
        "org/name/part",
        "./models/name",
        tmp_path / "absent",
    ):
        assert _hub.brought(path, None, None) == Path(path)
        with pytest.raises(df11.IoError) as error:
            df11.attach(torch.nn.Linear(2, 2), path)
        assert "Hub" not in str(error.value)
    assert _hub.brought("models", None, "part") == Path("models/part")
    with pytest.raises(AssertionError, match="asked the Hub"):
        _hub.brought("org/name", None, None)


def test_a_single_container_says_what_loads_it(folders: Folders, tmp_path: Path) -> None:
    one = compressed(folders.bf16("llama"), tmp_path / "one.df11")
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoConfig):
        with pytest.raises(
            df11.ParameterError, match=r"is one container.* df11 convert .*one-df11"
        ):
            kind.from_pretrained(one)
    # Also if it is the first thing that a process does.
    out = run(
        """
        import sys
        from transformers import AutoModelForCausalLM
        import df11
        try:
            AutoModelForCausalLM.from_pretrained(sys.argv[1])
        except df11.ParameterError as error:
            print(error)
        """,
        one,
    )
    assert "is one container" in out
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(OSError, match="not a valid JSON"):
        transformers.AutoConfig.from_pretrained(tmp_path)
