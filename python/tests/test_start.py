"""Compressed models without `import df11`, by the file that Python reads at its start.

`test_hub` loads one of transformers so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import AS_INSTALLED, run


def test_diffusers_alone(flux_folders: tuple[Path, Path]) -> None:
    out = run(
        AS_INSTALLED
        + """
import sys
from diffusers import FluxTransformer2DModel
model = FluxTransformer2DModel.from_pretrained(sys.argv[1], subfolder="transformer")
print(type(model.transformer_blocks[0].attn.to_q.weight).__name__)
""",
        flux_folders[1],
    )
    assert out.splitlines()[-1] == "CompressedTensor"


def test_it_imports_nothing_by_itself() -> None:
    script = "import sys; before = set(sys.modules)\n" + AS_INSTALLED
    script += "print(*sorted(set(sys.modules) - before))"
    # Without site-packages, where the file may be already.
    command = [sys.executable, "-S", "-c", script]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "_df11_start" in out and "df11" not in out.split()
    assert not {"importlib.util", "warnings", "transformers"} & set(out.split())


def test_a_start_without_df11_goes_on() -> None:
    """As after a removal that left the file."""
    script = AS_INSTALLED + "import sys; sys.modules['df11'] = None\n"
    script += "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as known\n"
    script += "print('bitsandbytes_8bit' in known)"
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "True" and "df11 could not be imported" in done.stderr


def test_the_wheel_has_it() -> None:
    """Of an installed package; a checkout that is used as it is has none."""
    from importlib.metadata import PackageNotFoundError, files

    try:
        names = {Path(str(file)).name for file in files("df11") or ()}
    except PackageNotFoundError:
        pytest.skip("df11 is not installed")
    if "__init__.py" not in names:
        pytest.skip("df11 is installed as a link to its sources")
    assert {"_df11_start.pth", "_df11_start.py"} <= names
