"""Runs the command for Windows under Wine, and compares with the command of this system.

Usage: command.py WINE DF11_EXE DF11
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

WINE, EXE, NATIVE = (str(Path(name).absolute()) for name in sys.argv[1:])
ROOT = Path(tempfile.mkdtemp(prefix="df11-wine."))
Run = subprocess.CompletedProcess[bytes]


def windows(*arguments: str, cwd: Path = ROOT) -> Run:
    command = [WINE, EXE, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, timeout=600, check=False)


def native(*arguments: str) -> Run:
    return subprocess.run([NATIVE, *arguments], cwd=ROOT, capture_output=True, check=True)


def good(*arguments: str, cwd: Path = ROOT) -> str:
    run = windows(*arguments, cwd=cwd)
    assert run.returncode == 0, (arguments, run)
    return run.stdout.decode()


def fails(code: int, words: list[str], *arguments: str) -> None:
    run = windows(*arguments)
    said = run.stderr.decode()
    assert run.returncode == code, (arguments, run)
    assert all(word in said for word in words), (words, said)


def same(left: Path, right: Path) -> None:
    """Both folders have the same files, byte for byte."""
    trees = [
        {p.relative_to(top): p.read_bytes() for p in top.rglob("*") if p.is_file()}
        for top in (left, right)
    ]
    assert trees[0], f"{left} is empty"
    assert trees[0].keys() == trees[1].keys(), [sorted(tree) for tree in trees]
    assert trees[0] == trees[1], [path for path in trees[0] if trees[0][path] != trees[1][path]]


def weights(path: Path, names: list[str]) -> None:
    """A safetensors file with normal weights, the same in every run."""
    draw, header, body = random.Random(str(path.name)), {}, b""
    for name in names:
        values = (struct.pack("<f", draw.gauss(0, 0.02))[2:] for _ in range(512 * 512))
        begin, body = len(body), body + b"".join(values)
        header[name] = {"dtype": "BF16", "shape": [512, 512], "data_offsets": [begin, len(body)]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def make() -> None:
    """Makes a model of two shards in `model`, here compressed to `model.df11` and `native`."""
    top, index = ROOT / "model", {}
    (top / "sub").mkdir(parents=True)
    (top / "config.json").write_text('{"model_type": "llama"}')
    (top / "sub/notes.txt").write_text("a side file")
    for shard in (1, 2):
        name = f"model-{shard:05}-of-00002.safetensors"
        tensors = [f"model.layers.{shard}.{part}.weight" for part in ("up", "down")]
        weights(top / name, tensors)
        index.update(dict.fromkeys(tensors, name))
    (top / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    native("compress", "model", "-o", "model.df11")
    native("compress", "model", "-o", "native", "--no-card")


def demo() -> str:
    good("demo", "--keep", "large")
    return "every bit equal"


def compress_as_here() -> str:
    good("compress", "model", "-o", "windows.df11")
    assert (ROOT / "windows.df11").read_bytes() == (ROOT / "model.df11").read_bytes()
    good("compress", "model", "-o", "windows", "--no-card")
    same(ROOT / "windows", ROOT / "native")
    return "a file and a folder, byte for byte as here"


def gap_as_here() -> str:
    for command in ("windows", "native"):
        run = good if command == "windows" else native
        run("convert", "model.df11", "-o", f"gap-{command}.df11", "--layout", "gap")
    assert (ROOT / "gap-windows.df11").read_bytes() == (ROOT / "gap-native.df11").read_bytes()
    return "convert to gap, byte for byte as here"


def restore() -> str:
    good("verify", "windows.df11")
    good("decompress", "windows.df11", "-o", "back")
    same(ROOT / "back", ROOT / "model")
    return "verify, then decompress to the original files"


def tell() -> str:
    here = json.loads(native("inspect", "windows.df11", "--tensors", "--json").stdout)
    there = json.loads(good("inspect", "windows.df11", "--tensors", "--json"))
    assert here["blocks"] == there["blocks"]
    checks = json.loads(good("doctor", "--json"))["checks"]
    assert checks["page size"]["value"] == 4096, checks["page size"]
    assert checks["disk"]["value"]["free"] > 0, checks["disk"]
    assert checks["memory"]["value"]["total"] > 0, checks["memory"]
    return "inspect as here; doctor knows memory, disk and page size"


def pipeline() -> str:
    top = ROOT / "pipe"
    for part in ("unet", "text_encoder"):
        (top / part).mkdir(parents=True)
        source = ROOT / "model/model-00002-of-00002.safetensors"
        (top / part / "model.safetensors").write_bytes(source.read_bytes())
        (top / part / "config.json").write_text("{}")
    parts = {name: ["library", "Class"] for name in ("unet", "text_encoder")}
    (top / "model_index.json").write_text(json.dumps({"_class_name": "Pipe", **parts}))
    good("compress", "pipe", "-o", "pipe-windows", "--no-card")
    native("compress", "pipe", "-o", "pipe-native", "--no-card")
    same(ROOT / "pipe-windows", ROOT / "pipe-native")
    good("decompress", "pipe-windows", "-o", "pipe-back")
    same(ROOT / "pipe-back", top)
    return "a pipeline, byte for byte as here, and back"


def replace() -> str:
    fails(2, ["exists", "--force"], "compress", "model", "-o", "windows.df11")
    for out in ("windows.df11", "windows"):
        good("compress", "model", "-o", out, "--no-card", "--force")
    same(ROOT / "windows", ROOT / "native")
    (ROOT / "windows/notes.txt").write_text("precious")
    fails(2, ["notes.txt"], "compress", "model", "-o", "windows", "--force")
    (ROOT / "windows/notes.txt").unlink()
    return "nothing is replaced without --force, and no unknown file with it"


def started(*arguments: str) -> subprocess.Popen[bytes]:
    """A run that has begun to write."""
    before = set(ROOT.glob(".df11-*"))
    command = [WINE, EXE, *arguments, "--threads", "1"]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for _ in range(3000):
        if set(ROOT.glob(".df11-*.df11-lock")) - before:
            return run
        assert run.poll() is None, run.communicate()
        time.sleep(0.01)
    raise AssertionError("no work in 30 seconds")


def parts() -> list[str]:
    return sorted(path.name for path in ROOT.glob(".df11-*"))


def killed() -> str:
    runs = []
    for out in ("new.df11", "new"):
        runs.append(started("compress", "large/model", "-o", out))
        runs[-1].send_signal(signal.SIGSTOP)
    in_use = json.loads(good("doctor", "--folder", ".", "--json"))["checks"]["leftovers"]
    assert ".part" not in json.dumps(in_use), in_use
    for run in runs:
        run.send_signal(signal.SIGKILL)
        run.wait()
    time.sleep(1)
    left = parts()
    assert len(left) == 2 and all(name.endswith(".part") for name in left), left
    told = json.dumps(json.loads(good("doctor", "--folder", ".", "--json"))["checks"]["leftovers"])
    assert all(name in told for name in left), (left, told)
    said = good("decompress", "windows.df11", "-o", "tidy")
    assert all(name in said for name in left) and not parts(), (said, parts())
    return "what killed runs leave is found, told and removed; what a run uses is not"


def interrupted() -> str:
    run = started("compress", "large/model", "-o", "new.df11")
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130 and not parts(), (run.returncode, said, parts())
    assert not (ROOT / "new.df11").exists()
    return "Ctrl-C ends with 130 and leaves nothing"


def head() -> str:
    line = f'"{WINE}" "{EXE}" inspect windows.df11 --tensors | head -c 1; echo "${{PIPESTATUS[0]}}"'
    run = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, check=True)
    assert run.stdout.endswith(b"0\n") and not run.stderr, run
    return "a reader that goes away is no error"


def forbidden() -> str:
    for name in ("aux.json", "a?.json", "dot."):
        top = ROOT / "forbidden" / "model"
        top.mkdir(parents=True, exist_ok=True)
        weights = (ROOT / "model/model-00002-of-00002.safetensors").read_bytes()
        (top / "model.safetensors").write_bytes(weights)
        (top / name).write_text("a side file")
        native("compress", "forbidden/model", "-o", "forbidden.df11", "--all-files", "--force")
        fails(2, [name, "Windows"], "decompress", "forbidden.df11", "-o", "never")
        assert not (ROOT / "never").exists() and not parts()
        (top / name).unlink()
    for name in ("aux.df11", "NUL", "dot."):
        fails(2, [name, "Windows", "another output"], "compress", "model", "-o", name)
    return "names that Windows forbids are refused before anything is written"


def long_paths() -> str:
    deep = ROOT / ("d" * 100) / ("e" * 100) / ("f" * 100)
    deep.mkdir(parents=True)
    out = str(deep / "model.df11")
    good("compress", "model", "-o", out)
    good("compress", "model", "-o", out, "--force")
    good("verify", out)
    good("decompress", out, "-o", str(deep / "back"))
    same(deep / "back", ROOT / "model")
    good("compress", "model", "-o", str(deep / "folder"), "--no-card")
    good("compress", "model", "-o", str(deep / "folder"), "--no-card", "--force")
    same(deep / "folder", ROOT / "native")
    return f"outputs with paths of {len(out)} characters"


def damaged() -> str:
    raw = bytearray((ROOT / "windows.df11").read_bytes())
    raw[len(raw) // 2] ^= 4
    (ROOT / "damaged.df11").write_bytes(raw)
    fails(1, ["damaged"], "verify", "damaged.df11")
    return "one changed bit is found"


CHECKS: list[Callable[[], str]] = [
    demo,
    compress_as_here,
    gap_as_here,
    restore,
    tell,
    pipeline,
    replace,
    killed,
    interrupted,
    head,
    forbidden,
    long_paths,
    damaged,
]


def main() -> int:
    os.environ["TMP"] = os.environ["TEMP"] = str(ROOT)
    make()
    bad = 0
    for check in CHECKS:
        try:
            print(f"{check.__name__:17} {check()}", flush=True)
        except (AssertionError, subprocess.SubprocessError, OSError) as error:
            bad += 1
            print(f"{check.__name__:17} FAILED {error!r}"[:2000], flush=True)
    subprocess.run(["rm", "-rf", str(ROOT)], check=True)
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
