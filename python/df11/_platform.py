"""Differences between operating systems. No other code of the package asks on which system it runs;
a test of the repository checks that.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

IS_WINDOWS = os.name == "nt"
#: The variable that names the folder of temporary files.
TEMPORARY = "TMP" if IS_WINDOWS else "TMPDIR"


def places() -> list[Path]:
    """Folders for files that are soon deleted: one in memory, if the system has it, or temporary
    folders."""
    temporary = Path(tempfile.gettempdir())
    return [Path("/dev/shm"), temporary] if sys.platform == "linux" else [temporary]


def quoted(path: Path | str) -> str:
    """A path as one argument of the system's shell, for commands that a user copies."""
    text = str(path)
    if not IS_WINDOWS:
        return shlex.quote(text)
    return text if re.fullmatch(r"[\w\\/:.~+@-]+", text) else f'"{text}"'


def unlink_mapped(path: Path) -> None:
    """Delete a file that this process has mapped; its memory stays until nothing uses it. Windows
    does not delete mapped files: there the file is removed with its folder, or by the next run.
    """
    if not IS_WINDOWS:
        path.unlink()


def loaded_library(name: str) -> Path | None:
    """Return the file of a CUDA library that this process has loaded, such as `cublas`; None if it
    has not, has several, or the system does not tell.
    """
    found: set[Path] = set()
    with suppress(OSError):
        found = _in_torch(name) if IS_WINDOWS else _mapped(name)
    return found.pop() if len(found) == 1 else None


def _mapped(name: str) -> set[Path]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split(maxsplit=5)[-1]) for line in lines if f"/lib{name}.so" in line}


def _in_torch(name: str) -> set[Path]:
    """PyTorch for Windows has its own copy, which it loads from its folder."""
    torch = sys.modules.get("torch")
    folder = Path(torch.__file__ or "").parent / "lib" if torch else Path()
    return set(folder.glob(f"{name}64_*.dll"))
