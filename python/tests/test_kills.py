"""Runs that are killed at any moment: what they leave has the names of temporary files, loses no
model, and is gone after the next run.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import Folders, adapted, load, same_weights

import df11

#: How often each kind of run is killed.
KILLS = int(os.environ.get("DF11_KILLS", "6"))
#: For each line on its input forks, and repeats what the line names, once or until it is killed.
REPEAT = """
import os, sys, transformers, df11
from pathlib import Path
from transformers.models.llama import modeling_llama
from df11 import _merging, _origin, _quantizer

root = Path(sys.argv[1])
_origin.PLACES = [root / "places"]

def load(name, **options):
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(root / name, device_map="cpu", **options)

def compress_on_load():
    load("old-bf16", quantization_config=df11.Config())

def merge():
    df11.merge_adapter(root / "old", root / "adapter", root / "out", overwrite=True)

def save(models=[]):
    models += [] if models else [load("old"), load("new")]
    for model in models:
        model.save_pretrained(root / "out")

def repeat(kind, how):
    while True:
        globals()[kind]()
        print("again", flush=True)
        if how == "once":
            os._exit(0)

for line in sys.stdin:
    if child := os.fork():
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print("ended", os.waitstatus_to_exitcode(status), flush=True)
    else:
        try:
            repeat(*line.split())
        finally:
            os._exit(1)
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


class Runs:
    """Runs of processes that have imported everything."""

    def __init__(self, root: Path) -> None:
        own = {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(root / "temporary")}
        command = [sys.executable, "-W", "ignore", "-c", REPEAT, str(root)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, env=os.environ | own, text=True
        )

    def begin(self, kind: str, how: str) -> int:
        """Returns the id of the process."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{kind} {how}\n")
        self.process.stdin.flush()
        return int(self.line())

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self, kind: str, share: float) -> None:
        """Kills a run in the middle of what it repeats, after a share of the time this takes."""
        child, times = self.begin(kind, "again"), []
        for _ in range(2):
            assert self.line() == "again"
            times.append(time.monotonic())
        time.sleep(share * (times[1] - times[0]))
        os.kill(child, signal.SIGKILL)
        while (said := self.line()) == "again":
            pass
        assert said == "ended -9"

    def once(self, kind: str) -> None:
        self.begin(kind, "once")
        assert [self.line(), self.line()] == ["again", "ended 0"]


@pytest.fixture(scope="module")
def runs(root: Path) -> Iterator[Runs]:
    made = Runs(root)
    with made.process as process:
        yield made
        assert process.stdin is not None
        process.stdin.close()


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
def test_killed_runs_leave_nothing_for_long(kind: str, root: Path, runs: Runs) -> None:
    out, seen = root / "out", []
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(root / "old", out)
    generator = random.Random(os.environ.get("DF11_SEED", kind))
    for _ in range(KILLS):
        runs.kill(kind, generator.random())
        names = left(root)
        seen.append(names)
        assert all(re.fullmatch(r"(\w+/)?\.df11-(\w{6}\.part|new)", name) for name in names), names
        is_whole(out)
    runs.once(kind)
    print(kind, seen)
    assert left(root) == [], seen
    assert is_whole(out)
    if kind == "save":
        assert same_weights(load(out), load(root / "new"))
