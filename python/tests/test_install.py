"""The last step of a save, killed at each of its system calls: the folder holds the earlier model,
the new one, or says what to do, and then gives the new one.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import normal, run, write_safetensors

import df11
from df11 import _native
from df11._native import TemporaryFolder

Models = tuple[Path, Path, Path]

#: Calls that change or keep names; the kernel kills before it does the call.
CALLS = ["rename", "fsync", "unlink,unlinkat"]
INSTALL = """
import shutil, sys, df11
from pathlib import Path
from df11._native import TemporaryFolder, install
new, target = Path(sys.argv[1]), Path(sys.argv[2])
with TemporaryFolder(target) as stage:
    shutil.copytree(new, stage / "files" / target.name)
    install(stage, target, set(), df11.open(new).identity)
"""
FINISH = """
from df11.__main__ import main
main()
"""


def folder_of(root: Path, name: str, shards: int, layers: int) -> Path:
    """A folder of containers with side files, one of them in a subfolder."""
    source = root / f"{name}-bf16"
    (source / "words").mkdir(parents=True)
    for at in range(shards):
        file = "model" if shards == 1 else f"model-{at + 1:05}-of-{shards:05}"
        weights = normal(64 * 64, layers * 10 + at)
        tensors = {f"layers.{at}.weight": ("BF16", (64, 64), weights)}
        write_safetensors(source / f"{file}.safetensors", tensors)
    (source / "config.json").write_text(json.dumps({"name": name}))
    (source / "words/list.txt").write_text(name)
    df11.compress(source, root / name, progress=False)
    return root / name


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    return {name: content for name, content in found.items() if not name.startswith(".df11-")}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    return folder_of(root, "old", 3, 1), folder_of(root, "new", 2, 2), folder_of(root, "one", 1, 3)


def killed(call: str, at: int, script: str, *arguments: object) -> bool:
    """Whether a script was killed at one of these calls, of which each kind is counted."""
    command = ["strace", "-f", "-qq", "-o", "/dev/null", f"-etrace={call}"]
    command += [f"-einject={call}:signal=KILL:when={at}", sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    done = subprocess.run(
        [*command, *map(str, arguments)],
        env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode in (0, -9, 137), done.stderr
    return done.returncode != 0


def may_trace() -> bool:
    probe = ["strace", "-f", "-o", "/dev/null", "true"]
    try:
        found = subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        found = False
    assert found or "DF11_REQUIRE_STRACE" not in os.environ, "no strace that may trace"
    return found


needs_strace = pytest.mark.skipif(not may_trace(), reason="no strace that may trace")


def install(new: Path, target: Path) -> None:
    with TemporaryFolder(target) as stage:
        shutil.copytree(new, stage / "files" / target.name)
        _native.install(stage, target, set(), df11.open(new).identity)


def check(target: Path, before: dict[str, bytes], after: dict[str, bytes]) -> bool:
    """Whether a save was interrupted, which opening says; else one of the models is there."""
    if (target / ".df11-new").exists():
        with pytest.raises(df11.ParameterError, match=r"interrupted.*df11 doctor --finish"):
            df11.open(target)
        return True
    assert contents(target) in (before, after)
    df11.verify(target, progress=False)
    return False


@pytest.mark.parametrize("is_fresh", [True, False])
def test_whatever_is_asked_names_the_interrupted_save(
    models: Models, is_fresh: bool, tmp_path: Path
) -> None:
    old, new, _ = models
    target = tmp_path / "target"
    shutil.copytree(new, target / ".df11-new" / "files")
    if not is_fresh:
        shutil.copytree(old, target, dirs_exist_ok=True)
    remedy = r"save into .*target.* was interrupted.*df11 doctor --finish"
    asked: list[Callable[[], Any]] = [
        lambda: df11.open(target),
        lambda: df11.attach(torch.nn.Linear(1, 1), target, device="cpu"),
        lambda: df11.verify(target, progress=False),
        lambda: df11.safe_open(target, "pt"),
        lambda: df11.compress(target, tmp_path / "other"),
        lambda: df11.convert(target, tmp_path / "other"),
    ]
    for call in asked:
        with pytest.raises(df11.ParameterError, match=remedy):
            call()
    for verb in ("verify", "inspect", "compress", "estimate", "decompress"):
        command = [sys.executable, "-m", "df11", verb, target]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and re.search(remedy, done.stderr), done.stderr
    assert "a save was interrupted" in run(FINISH, "doctor", "--folder", target)


@needs_strace
@pytest.mark.parametrize("call", CALLS)
def test_a_killed_save_loses_nothing(models: Models, call: str, tmp_path: Path) -> None:
    old, new, last = models
    target, saved = tmp_path / "target", contents(new)
    mine = {"notes.txt": b"notes", "checkpoint-1/model.df11": (last / "model.df11").read_bytes()}
    interrupted = 0
    for at in itertools.count(1):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(old, target)
        for name, content in mine.items():
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_bytes(content)
        before, after = contents(target), saved | mine
        was_killed = killed(call, at, INSTALL, new, target)
        if is_pending := check(target, before, after):
            interrupted += 1
        if not was_killed:
            assert contents(target) == after and not is_pending
            break
        if is_pending and at % 2:
            # Killed in the middle of this, too.
            killed("rename,unlink,unlinkat", 1 + interrupted % 3, FINISH, "doctor",
                   "--finish", "--folder", target)  # fmt: skip
            run(FINISH, "doctor", "--finish", "--folder", target)
            assert contents(target) == after
        install(last, target)
        assert contents(target) == contents(last) | mine
        assert not list(target.glob(".df11-*"))
    assert interrupted or call == CALLS[-1]


def test_what_is_pending_leads_nowhere(models: Models, tmp_path: Path) -> None:
    """A folder from elsewhere makes nobody write or remove outside of it."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.df11").write_text("kept")
    for names, stale, link in [
        (["model.df11"], ["../outside/x.df11"], None),
        (["model.df11"], ["link/x.df11"], "link"),
        (["link/x.df11"], [], "link"),
    ]:
        target = shutil.copytree(models[0], tmp_path / "target", dirs_exist_ok=True)
        if link:
            (target / link).symlink_to(outside)
        pending = target / ".df11-new"
        for name in names:
            (pending / "files" / name).parent.mkdir(parents=True, exist_ok=True)
            (pending / "files" / name).write_text("evil")
        (pending / ".stale").write_text(json.dumps(stale))
        with pytest.raises((df11.ParameterError, df11.CorruptError)):
            install(models[1], target)
        assert (outside / "x.df11").read_text() == "kept"
        shutil.rmtree(target)
    for make in (
        lambda pending: pending.symlink_to(outside),
        lambda pending: os.mkfifo(pending),
        lambda pending: (pending.mkdir(), os.mkfifo(pending / ".stale")),
        lambda pending: (pending.mkdir(), (pending / ".stale").symlink_to("/dev/zero")),
    ):
        target = shutil.copytree(models[0], tmp_path / "target")
        make(target / ".df11-new")
        with pytest.raises(df11.ParameterError):
            install(models[1], target)
        shutil.rmtree(target)
    target = shutil.copytree(models[0], tmp_path / "target")
    (target / ".df11-new").mkdir()
    (target / ".df11-new/files").symlink_to(outside)
    install(models[1], target)
    assert contents(target) == contents(models[1])
    assert [path.name for path in outside.iterdir()] == ["x.df11"]
    shutil.rmtree(target)
    # Nothing but containers goes.
    target = shutil.copytree(models[1], tmp_path / "target")
    (target / ".df11-new").mkdir()
    (target / ".df11-new/.stale").write_text('["config.json"]')
    install(models[0], target)
    assert contents(target) == contents(models[0])
