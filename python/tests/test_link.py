"""Folders of containers in stores, loaded by transformers and diffusers."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import run
from stores import upload

import df11

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from models import Folders, load, same_weights  # noqa: E402
from pipelines import DTYPES, WITHOUT, answers  # noqa: E402


def test_transformers_loads_a_model(bucket: str, folders: Folders) -> None:
    bf16, compressed = folders.worded("llama")
    upload(bucket, compressed, "link/llama")
    folder = df11.link("s3://models/link/llama")
    assert df11.link("s3://models/link/llama/") == folder
    model = load(folder)
    assert same_weights(model, load(bf16))
    assert df11.report(model).saved_bytes > 0
    words, wanted = map(transformers.AutoTokenizer.from_pretrained, (folder, bf16))
    assert words("a b").input_ids == wanted("a b").input_ids


def test_a_linked_model_is_saved_and_changed(bucket: str, folders: Folders, tmp_path: Path) -> None:
    bf16, compressed = folders.worded("llama")
    upload(bucket, compressed, "link/saved")
    model = load(df11.link("s3://models/link/saved"))
    model.save_pretrained(tmp_path / "saved")
    assert same_weights(load(tmp_path / "saved"), load(bf16))


def test_parameters_beside_the_containers_are_loaded(
    bucket: str, folders: Folders, tmp_path: Path
) -> None:
    """`save_pretrained` puts a new head there."""
    model = load(folders.df11("llama"))
    model.lm_head = torch.nn.Linear(128, 512, bias=False).bfloat16()
    model.save_pretrained(tmp_path / "head")
    upload(bucket, tmp_path / "head", "link/head")
    found = load(df11.link("s3://models/link/head"))
    assert torch.equal(found.lm_head.weight, model.lm_head.weight)


def test_diffusers_loads_a_pipeline(bucket: str, flux: tuple[Path, Path]) -> None:
    diffusers = pytest.importorskip("diffusers")
    upload(bucket, flux[1], "link/flux")
    options = {**WITHOUT, "torch_dtype": DTYPES}
    folder = df11.link("s3://models/link/flux")
    far = diffusers.DiffusionPipeline.from_pretrained(folder, **options)
    near = diffusers.DiffusionPipeline.from_pretrained(flux[1], **options)
    assert all(torch.equal(*pair) for pair in zip(answers(far), answers(near), strict=True))


def test_what_cannot_be_linked_is_named(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(df11.ParameterError, match="is no name of a store"):
        df11.link(str(tmp_path))
    with pytest.raises(df11.ParameterError, match=r"holds no \.df11 file"):
        df11.link("s3://models/link/nothing")
    with pytest.raises(df11.IoError, match="check its name"):
        df11.link("s3://models/link/x.df11")
    for kind in (transformers.AutoConfig, transformers.AutoTokenizer):
        with pytest.raises(df11.ParameterError, match=r"stores.*df11\.link"):
            kind.from_pretrained("s3://models/link/llama")


LINK = """
import os, sys, time, df11
print(df11.link(sys.argv[1]), flush=True)
if len(sys.argv) > 2:
    time.sleep(60)
"""


def test_a_link_ends_with_its_process(bucket: str, folders: Folders, tmp_path: Path) -> None:
    """And if that is killed, with the next link."""
    upload(bucket, folders.df11("llama"), "link/ends")
    name, own = "s3://models/link/ends", {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", LINK, name, "sleeps"]
    environment = os.environ | own | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as killed:
        assert killed.stdout is not None
        left = Path(killed.stdout.readline().strip())
        killed.send_signal(signal.SIGKILL)
    assert (left / "config.json").is_file()
    after = Path(run(LINK, name, **own))
    assert after.parent == tmp_path and list(tmp_path.iterdir()) == []
