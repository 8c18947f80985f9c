"""Compressed repositories of the Hub, from a server on this machine and from the cache.

Code that loads them runs in one process, and some of it again in one that is off line; tests look
at what it said.
"""

import json
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import run
from hub import Hub, Repository, fill_cache
from models import Folders, compressed, load, saved, tokenizer

import df11
from _df11_autoload import AWAITED, install
from df11 import _hub, _register

TOKENS = torch.arange(1, 60).reshape(1, -1)
#: Runs CASES one after the other, with the folder of the fixture, and prints what each said.
RUNNER = """
import contextlib, io, json, sys, traceback
from pathlib import Path
from transformers import AutoModelForCausalLM
root, load = Path(sys.argv[1]), AutoModelForCausalLM.from_pretrained
import df11, torch, transformers
transformers.utils.logging.set_verbosity_error()
expected = torch.load(root / "expected.pt")

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

said = {}
for name, code in json.loads(sys.argv[2]).items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(code, dict(globals()))
        except Exception:
            traceback.print_exc(file=out)
        else:
            print("DONE")
    said[name] = out.getvalue()
print(json.dumps(said))
"""
#: The start of a process that loads a model before df11 is imported.
ALONE = """
import sys, transformers
alone = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/df11")
assert type(alone.lm_head.weight).__name__ == "CompressedTensor"
"""
CASES = {
    "a local folder": """
same(alone)
assert hasattr(transformers.modeling_utils._get_resolved_checkpoint_files, "_df11")
assert "holds no *.df11" in refused(lambda: load(root / "marked"))
""",
    "a repository": """
same(load("org/tiny", device_map="cpu"))
same(load("org/tiny", device_map="cpu", local_files_only=True))
tokenizer = transformers.AutoTokenizer.from_pretrained("org/tiny")
print(tokenizer.decode(tokenizer("some words of it")["input_ids"], skip_special_tokens=True))
config = transformers.AutoConfig.from_pretrained("org/tiny")
same(df11.attach(transformers.LlamaForCausalLM(config), "org/tiny"))
""",
    "options": """
options = {"revision": "v2", "token": "secret", "cache_dir": root / "cache", "subfolder": "text[1]"}
# With PEFT, transformers looks for an adapter first: on the branch main, unless it is told.
options["adapter_kwargs"] = {"revision": "v2"}
same(load("org/parts", device_map="cpu", **options))
same(load("org/parts", device_map="cpu", local_files_only=True, **options))
same(load("org/parts", device_map="cpu", force_download=True, **options))
for wrong in ({"token": "guessed"}, {"revision": "main"}, {"subfolder": "image"},
              {"local_files_only": True}):
    changed = {**options, "cache_dir": None, **wrong}
    refused(lambda: load("org/parts", device_map="cpu", **changed))
""",
    "a filled cache": """
# With PEFT, transformers looks for an adapter too.
here = {"local_files_only": True}

def local():
    return load("org/filled", device_map="cpu", **here, adapter_kwargs=here)

model = local()
same(model)
model.save_pretrained(root / "saved")
same(load(root / "saved", device_map="cpu"))
# First one of several containers is missing; then all are.
containers = sorted(root.glob("home/hub/models--org--filled/snapshots/*/*.df11"))
containers[0].unlink()
assert f"shard 1 of {len(containers)} is missing" in refused(local)
for container in containers[1:]:
    container.unlink()
assert "nor in the cache" in refused(local)
""",
    "without containers": """
print(refused(lambda: load("org/marked", device_map="cpu")))
print(refused(lambda: df11.attach(torch.nn.Linear(2, 2), "org/bf16")))
print(refused(lambda: df11.attach(torch.nn.Linear(2, 2), "org/absent")))
print(refused(lambda: df11.open("org/tiny")))
print(refused(lambda: df11.verify("org/tiny")))
assert not df11.report(load("org/bf16"))
""",
}


class Said:
    """The results of CASES, with their Hub and folder."""

    def __init__(self, root: Path, folders: Folders) -> None:
        self.root, self.hub = root, Hub()
        model = load(folders.bf16("llama"))
        tokenizer().save_pretrained(root / "bf16")
        saved(model, root, max_shard_size="900KB")
        compressed(folders.bf16("llama"), root / "one.df11")
        self.containers = {file.name for file in (root / "df11").glob("*.df11")}
        assert len(self.containers) > 1
        with torch.no_grad():
            told = {"logits": model(TOKENS).logits, "state": dict(model.state_dict())}
        torch.save(told, root / "expected.pt")
        (root / "marked").mkdir()
        shutil.copyfile(root / "df11/config.json", root / "marked/config.json")
        for name in ("text[1]", "text1"):
            shutil.copytree(root / "df11", root / "pipeline" / name)
        # A commit that the server does not know.
        place = root / "home/hub/models--org--filled"
        fill_cache(place, root / "df11", "0123456789" * 4)
        self.hub.repositories = {
            "org/tiny": Repository(root / "df11"),
            "org/parts": Repository(root / "pipeline", "v2", token="secret"),
            "org/marked": Repository(root / "marked"),
            "org/bf16": Repository(root / "bf16"),
        }
        self.on_line = self.run(CASES, ALONE)
        self.asked = "".join(self.hub.asked)
        self.downloaded = self.hub.downloaded()
        # Also if it is the first thing that a process does.
        single = 'print(refused(lambda: load(root / "one.df11")))'
        again = {"a single container": single, "a repository": CASES["a repository"]}
        self.off_line = self.run(again, HF_HUB_OFFLINE="1")

    def run(self, cases: dict[str, str], begin: str = "", **environment: str) -> dict[str, str]:
        """The results of cases in a process with this start."""
        settings = {"HF_HOME": str(self.root / "home"), "HF_ENDPOINT": self.hub.url}
        settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        said = run(begin + RUNNER, self.root, json.dumps(cases), **settings, **environment)
        return dict(json.loads(said.splitlines()[-1]))

    def of(self, case: str, is_off_line: bool = False) -> list[str]:
        said = (self.off_line if is_off_line else self.on_line)[case]
        *lines, last = said.splitlines()
        assert last == "DONE", said
        return lines

    def got(self, repository: str) -> set[str]:
        prefix = repository + "/"
        return {name.removeprefix(prefix) for name in self.downloaded if name.startswith(prefix)}


@pytest.fixture(scope="module")
def said(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Said:
    return Said(tmp_path_factory.mktemp("hub"), folders)


def test_a_repository_is_fetched_and_then_in_the_cache(said: Said) -> None:
    assert said.of("a repository") == ["some words of it"]
    got = said.got("org/tiny")
    assert {name for name in got if name.endswith(".df11")} == said.containers
    assert "config.json" in got
    assert not [name for name in got if "safetensors" in name or name.endswith(".bin")], got
    assert said.of("a repository", is_off_line=True) == ["some words of it"]
    assert not said.hub.asked


def test_what_from_pretrained_is_told_is_heeded(said: Said) -> None:
    """A private repository, a branch, a subfolder of several, and a cache elsewhere."""
    said.of("options")
    assert not list(said.root.glob("home/hub/models--org--parts/**/*.df11"))
    assert {file.name for file in (said.root / "cache").rglob("*.df11")} == said.containers
    assert not [name for name in said.got("org/parts") if "text1/" in name or "safetensors" in name]


def test_a_cache_that_another_program_filled(said: Said) -> None:
    said.of("a filled cache")
    assert "org/tiny" in said.asked and "org/filled" not in said.asked
    assert not any(file.is_symlink() for file in (said.root / "saved").iterdir())


def test_a_repository_without_containers(said: Said) -> None:
    marked, bf16, absent, *names = said.of("without containers")
    assert marked.startswith("org/marked (main) is no folder of containers")
    assert "df11 compress" in marked
    assert bf16.startswith("org/bf16 (main) is no folder of containers")
    assert "Repository Not Found" in "".join([absent, *names])
    for line in names[-2:]:
        assert "opening org/tiny" in line and "hf download org/tiny --local-dir tiny" in line


def test_a_local_folder_without_import_of_df11(said: Said) -> None:
    said.of("a local folder")


def test_paths_that_are_no_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: Any, **__: Any) -> Any:
        raise AssertionError("asked the Hub")

    monkeypatch.setattr(_hub, "_fetch", fetch)
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    paths = ["models/absent", "absent", "org/model.df11", "org/name/part", "./models/name"]
    for path in (*paths, tmp_path / "absent"):
        assert _hub.resolve_path(path, None, None) == Path(path)
        with pytest.raises(df11.IoError) as error:
            df11.attach(torch.nn.Linear(2, 2), path)
        assert "Hub" not in str(error.value)
    assert _hub.resolve_path("models", None, "part") == Path("models/part")
    with pytest.raises(AssertionError, match="asked the Hub"):
        _hub.resolve_path("org/name", None, None)


@pytest.mark.parametrize("name", ["/etc", "..", "a/../../b", "../x", "\\x", "C:x", "a\\..\\b"])
def test_names_that_lead_out_of_a_repository(tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    for options in ({"revision": name}, {"subfolder": name}):
        for place in (tmp_path / "model", "org/name"):
            with pytest.raises(df11.ParameterError, match="leads out of the repository"):
                df11.attach(torch.nn.Linear(2, 2), place, **options)
            with pytest.raises(df11.ParameterError, match="leads out of the repository"):
                _hub.folder_of(place, **options)
    for inside in ("v1.0", "refs/pr/1", "text[1]", "a/b..c"):
        _hub.check_inside(revision=inside, subfolder=inside)


def test_a_single_container_says_what_loads_it(said: Said, tmp_path: Path) -> None:
    words = r"is one container.* df11 convert .*one-df11"
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoConfig):
        with pytest.raises(df11.ParameterError, match=words):
            kind.from_pretrained(said.root / "one.df11")
    assert "is one container" in "".join(said.of("a single container", is_off_line=True))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(OSError, match="not a valid JSON"):
        transformers.AutoConfig.from_pretrained(tmp_path)


def test_diffusers_alone(flux: tuple[Path, Path]) -> None:
    script = """
from diffusers import FluxTransformer2DModel
model = FluxTransformer2DModel.from_pretrained(sys.argv[1], subfolder="transformer")
print(type(model.transformer_blocks[0].attn.to_q.weight).__name__)
"""
    out = run(f"import sys{script}", flux[1])
    assert out.splitlines()[-1] == "CompressedTensor"


def test_single_files_of_diffusers_are_loaded_whatever_was_imported_first() -> None:
    pytest.importorskip("diffusers")
    script = """
from diffusers.loaders.single_file_model import FromOriginalModelMixin
print(FromOriginalModelMixin.from_single_file._df11)
"""
    assert run(script).splitlines()[-1] == "True"


def test_a_start_without_pytorch_runs_nothing_of_it() -> None:
    script = """
        import sys
        for library in ("json", "torch"):
            __import__(library)
            print(library, *(name for name in sys.modules if "df11" in name))
    """
    assert run(script).splitlines() == ["json", "torch _df11_autoload"]


@pytest.mark.parametrize("first", [*AWAITED, "torch"])
def test_it_registers_whatever_is_imported_first(first: str) -> None:
    """Some of the awaited modules import PyTorch while they run."""
    if first.startswith("diffusers"):
        pytest.importorskip("diffusers")
    script = f"""
        import importlib, sys
        importlib.import_module({first!r})
        if {first.startswith("diffusers")}:
            import diffusers.loaders.single_file_model, diffusers.quantizers.auto
            assert "df11" in diffusers.quantizers.auto.AUTO_QUANTIZER_MAPPING
            mixin = diffusers.loaders.single_file_model.FromOriginalModelMixin
            assert mixin.from_single_file._df11
        import transformers.quantizers.auto, transformers.modeling_utils
        assert "df11" in transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING
        assert transformers.modeling_utils._get_resolved_checkpoint_files._df11
        assert transformers.configuration_utils.PreTrainedConfig.get_config_dict._df11
        print(any(type(each).__module__ == "_df11_autoload" for each in sys.meta_path))
    """
    assert run(script) == "True"


def test_awaited_modules_are_those_that_df11_knows() -> None:
    assert {*AWAITED} == {*_register._MODULES}


def test_a_start_without_df11_goes_on() -> None:
    """As after an incomplete uninstallation."""
    script = """
        import sys; sys.modules["df11"] = None; sys.stderr = sys.stdout
        from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as known
        print("bitsandbytes_8bit" in known)
    """
    said = run(script)
    assert said.endswith("True") and "df11 could not be imported" in said


def test_the_installed_package_has_it() -> None:
    """With its entry point, also as a link to its sources."""
    try:
        metadata.distribution("df11")
    except metadata.PackageNotFoundError:
        pytest.skip("df11 is not installed")
    (found,) = (
        each for each in metadata.entry_points(group="torch.backends") if each.name == "df11"
    )
    assert found.load() is install
