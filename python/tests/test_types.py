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


#: Each is on a line of its own.
WRONG = [
    "df11.Config(mode=1)",
    "df11.attach(module)",
    "df11.report(module, verify='yes')",
    "df11.report(module).ratio.upper()",
    "df11.compress('a', 'b', overwrite=1.5)",
    "df11.merge_adapter('a', 'b')",
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy says of the code of each document, `0.py` and so on, and of wrong calls."""
    folder = tmp_path_factory.mktemp("types")
    for at, name in enumerate(DOCUMENTS):
        text = (ROOT / name).read_text(encoding="utf-8")
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        assert blocks
        (folder / f"{at}.py").write_text(GIVEN + "\n".join(blocks))
    (folder / "wrong.py").write_text(GIVEN + "\n".join(WRONG))
    files = sorted(path.name for path in folder.iterdir())
    command = [sys.executable, "-m", "mypy", "--config-file", SETTINGS, *files]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "python")}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    return done.stdout + done.stderr


@pytest.mark.parametrize("at", range(len(DOCUMENTS)), ids=DOCUMENTS)
def test_code_of_documents(at: int, said: str) -> None:
    assert "checked" in said and f"{at}.py:" not in said, said


def test_wrong_calls_are_found(said: str) -> None:
    lines = re.findall(r"wrong\.py:(\d+): error:", said)
    first = GIVEN.count("\n") + 1
    assert lines == [str(first + at) for at in range(len(WRONG))], said
    assert "not callable" not in said
