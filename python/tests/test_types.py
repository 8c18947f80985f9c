"""Types of the package, as its users' type checkers see them: in the code of the documents."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytest.importorskip("mypy")

#: Those with Python code.
DOCUMENTS = ["README.md", "python/README.md"]
SETTINGS = Path(__file__).with_name("types.ini")
#: What code takes as given.
GIVEN = """
from typing import Any
import df11, torch
from diffusers import FluxTransformer2DModel
from sentence_transformers import SentenceTransformer
config: Any
module: torch.nn.Module
"""


def checked(folder: Path, code: str) -> str:
    """What mypy says of some code."""
    (folder / "code.py").write_text(GIVEN + code)
    command = [sys.executable, "-m", "mypy", "--config-file", SETTINGS, "code.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "python")}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("name", DOCUMENTS)
def test_code_of_documents(name: str, tmp_path: Path) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    assert checked(tmp_path, "\n".join(blocks)) == ""


def test_wrong_calls_are_found(tmp_path: Path) -> None:
    wrong = [
        "df11.Config(mode=1)",
        "df11.attach(module)",
        "df11.report(module, verify='yes')",
        "df11.report(module).ratio.upper()",
        "df11.compress('a', 'b', overwrite=1.5)",
        "df11.merge_adapter('a', 'b')",
    ]
    said = checked(tmp_path, "\n".join(wrong))
    lines = re.findall(r"code\.py:(\d+): error:", said)
    first = GIVEN.count("\n") + 1
    assert lines == [str(first + at) for at in range(len(wrong))], said
    assert "not callable" not in said
