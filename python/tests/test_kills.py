"""Runs that are killed at any moment: what they leave has the names of temporary files, loses no
model, and is gone after the next run.
"""

import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from models import Folders, adapted, load, same_weights

import df11

#: How often each kind of run is killed.
KILLS = int(os.environ.get("DF11_KILLS", "2"))
#: Does it once, or says when it begins again, until it is killed.
REPEAT = """
import sys, tempfile, transformers, df11
from pathlib import Path
from df11 import _origin

kind, root, once = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "once"
_origin.PLACES = [root / "places"]

def load(name, **options):
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(root / name, device_map="cpu", **options)

def compress_on_load():
    load("old-bf16", quantization_config=df11.Config())

def merge():
    df11.merge_adapter(root / "old", root / "adapter", root / "out", overwrite=True)

def save():
    for model in models:
        model.save_pretrained(root / "out")

models = [load(name) for name in ("old", "new")] if kind == "save" else []
globals()[kind]()
while not once:
    print("again", flush=True)
    globals()[kind]()
"""
#: Names of other libraries' temporary files.
OTHERS = re.compile(r"torch|tmp|pymp")


@pytest.fixture(scope="module")
def root(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("kills")
    shutil.copytree(folders.bf16("llama"), place / "old-bf16")
    shutil.copytree(folders.df11("llama"), place / "old")
    shutil.copytree(folders.df11("llama-bias"), place / "new")
    adapted(load(folders.bf16("llama"))).save_pretrained(place / "adapter")
    for name in ("places", "temporary"):
        (place / name).mkdir()
    return place


def command(kind: str, root: Path, how: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-c", REPEAT, kind, str(root), how]


def environment(root: Path) -> dict[str, str]:
    own = {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(root / "temporary")}
    return os.environ | own


def kill(kind: str, root: Path, share: float) -> None:
    """Kills a run in the middle of what it repeats, after a share of the time that this takes."""
    with subprocess.Popen(
        command(kind, root, "again"), stdout=subprocess.PIPE, env=environment(root)
    ) as running:
        assert running.stdout is not None
        times = []
        for _ in range(2):
            assert running.stdout.readline() == b"again\n"
            times.append(time.monotonic())
        time.sleep(share * (times[1] - times[0]))
        assert running.poll() is None
        running.kill()


def left(root: Path) -> list[str]:
    """Entries of the folders for temporary files, relative to the root."""
    known = {"old-bf16", "old", "new", "adapter", "places", "temporary", "out"}
    found = [path for path in root.iterdir() if path.name not in known]
    for folder in ("places", "temporary", "out"):
        found += (root / folder).glob("*" if folder != "out" else ".*")
    named = [path for path in found if not OTHERS.match(path.name)]
    return sorted(path.relative_to(root).as_posix() for path in named)


def is_whole(folder: Path) -> bool:
    """Whether a folder holds one model; else it says that a save was interrupted."""
    if (folder / ".df11-new").exists():
        with pytest.raises(df11.ParameterError, match="interrupted"):
            load(folder)
        return False
    df11.verify(folder, progress=False)
    config = (folder / "config.json").read_bytes()
    assert df11.open(folder).is_complete and config
    return True


@pytest.mark.parametrize("kind", ["compress_on_load", "merge", "save"])
def test_killed_runs_leave_nothing_for_long(kind: str, root: Path) -> None:
    out, seen = root / "out", []
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(root / "old", out)
    generator = random.Random(os.environ.get("DF11_SEED", kind))
    for _ in range(KILLS):
        kill(kind, root, generator.random())
        names = left(root)
        seen.append(names)
        assert all(re.fullmatch(r"(\w+/)?\.df11-(\w{6}\.part|new)", name) for name in names), names
        is_whole(out)
    subprocess.run(command(kind, root, "once"), check=True, env=environment(root))
    print(kind, seen)
    assert left(root) == [], seen
    assert is_whole(out)
    if kind == "save":
        assert same_weights(load(out), load(root / "new"))
