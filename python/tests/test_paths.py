"""Names of folders that shells, patterns and formats give a meaning: none has one here."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import models
import pytest

import df11
from df11._hub import folder_of
from df11._platform import IS_WINDOWS
from df11._tensor import CompressedTensor

NAMES = (
    *("with space", 'it\'s "quoted"', "größe 模型 🦙", "100% %s %20", "a[b]*?", "$HOME `x`"),
    *("-dash", "back\\slash", "~", "tab\tand\nline", "semi;colon&", "#hash{}"),
)
if IS_WINDOWS:  # which has none of the others
    NAMES = tuple(name for name in NAMES if not re.search(r'["*?\\\t\n]', name))


def words(line: str) -> list[str]:
    """The arguments that this system's shell would make of a line."""
    if not IS_WINDOWS:
        return shlex.split(line)
    return [word.strip('"') for word in re.findall(r'"[^"]*"|[^ ]+', line)]


def command(*arguments: object) -> str:
    """Runs the command; what it prints."""
    line = [sys.executable, "-m", "df11", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_names_of_folders_mean_nothing(folders: models.Folders, tmp_path: Path, name: str) -> None:
    source, made, back = (tmp_path / place / name for place in ("source", "made", "back"))
    shutil.copytree(folders.bf16("llama"), source)
    said = command("compress", source, "-o", made)
    (advised,) = re.findall(r"from_pretrained\((\".*\"), device_map", said)
    assert ast.literal_eval(advised) == str(made)
    command("verify", made)
    back.parent.mkdir()
    command("decompress", made, "-o", back)
    for file in source.iterdir():
        assert (back / file.name).read_bytes() == file.read_bytes()
    found = models.transformers.AutoModelForCausalLM.from_pretrained(made)
    assert isinstance(found.model.layers[0].mlp.up_proj.weight, CompressedTensor)
    container = made / "model.df11"
    with pytest.raises(df11.ParameterError, match="transformers loads folders; name ") as error:
        models.transformers.AutoModelForCausalLM.from_pretrained(container)
    assert f"name {str(made)!r};" in str(error.value)


# Messages show control characters by their names, so a command with them cannot be pasted.
@pytest.mark.parametrize("name", [name for name in NAMES if name.isprintable()])
def test_advised_commands_take_names_as_they_are(
    folders: models.Folders, tmp_path: Path, name: str
) -> None:
    """The argument that a shell would give to the command."""
    (tmp_path / name).mkdir()
    container = tmp_path / name / "one.df11"
    command("compress", folders.bf16("llama"), "-o", container)
    with pytest.raises(df11.ParameterError) as error:
        models.transformers.AutoModelForCausalLM.from_pretrained(container)
    (advised,) = re.findall(r"; (df11 convert .*) makes one;", str(error.value), re.DOTALL)
    _, *given = words(advised)
    command(*given)
    assert models.transformers.AutoModelForCausalLM.from_pretrained(given[-1])
    with pytest.raises(FileNotFoundError) as lacking:
        folder_of(tmp_path / name / "one-df11", subfolder=empty(Path(given[-1])))
    (advised,) = re.findall(r"`(df11 compress MODEL .*)`", str(lacking.value), re.DOTALL)
    assert Path(words(advised)[-1]) == Path(given[-1], "empty")


def empty(folder: Path) -> str:
    (folder / "empty").mkdir()
    return "empty"
