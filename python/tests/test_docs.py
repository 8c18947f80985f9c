"""The documentation: its links, its picture, and every block of code on its pages.

Blocks of a page run one after the other in one folder, those of Python in one namespace, on small
models of the architectures that they name. A block after `<!-- not run: REASON -->` is checked for
its syntax, and run if the reason does not hold. Blocks of Rust are tests of the crate.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pytest
from conftest import ROOT, normal, write_safetensors

DOCS = ROOT / "docs"
#: Pages whose code is run.
PAGES = [ROOT / "README.md", ROOT / "python/README.md", *sorted(DOCS.glob("*.md"))]
#: What is linked, except records, which are as they were on their day.
LINKED = [*PAGES, *(ROOT / f"{name}.md" for name in ("ARCHITECTURE", "CONTRIBUTING", "CHANGELOG"))]
#: Why a block may not be run.
REASONS = {
    "needs a GPU",
    "needs vLLM",
    "installs into this machine",
    "builds with cargo",
    "takes minutes",
}
RUN = {"sh", "python"}
#: What is no code, and what tests of its own compile.
NO_CODE = {"text", "toml", "json", "c", "cpp", "rust,ignore"}


class Block(NamedTuple):
    """Code on a page."""

    page: Path
    line: int
    language: str
    code: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Fenced blocks of a page, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        if not lines[at].startswith("```"):
            at += 1
            continue
        end = lines.index("```", at + 1)
        mark = re.fullmatch(r"<!-- not run: (.*) -->", lines[at - 1] if at else "")
        code = "\n".join(lines[at + 1 : end]) + "\n"
        yield Block(page, at + 1, lines[at][3:], code, mark[1] if mark else None)
        at = end + 1


ALL = [block for page in PAGES for block in blocks(page)]


def prose(page: Path) -> str:
    """A page without its blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", prose(page), flags=re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


def links(page: Path) -> list[str]:
    """Where links and pictures of a page lead."""
    words = re.sub(r"`[^`\n]*`", "", prose(page))
    found = re.findall(r"\]\(([^)\s]+)\)", words)
    return found + re.findall(r'(?:src|srcset|href)="([^"]+)"', words)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong, f"{page.name}: {wrong}"


def test_a_wrong_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One two\n\n```sh\n# no heading\n```\n[a](#one-two) `[b](c)` [d](e.md#f)\n")
    assert links(page) == ["#one-two", "e.md#f"] and anchors(page) == {"one-two"}


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = set(links(DOCS / "README.md"))
    missing = {page.name for page in DOCS.glob("*.md")} - {"README.md"} - listed
    assert not missing, f"add to docs/README.md: {sorted(missing)}"
    assert "docs/README.md" in links(ROOT / "README.md")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_every_record_is_listed() -> None:
    listed = {Path(link).name for link in links(DOCS / "benchmarks.md")}
    records = {path.name for path in (ROOT / "benches/record").iterdir()}
    assert records <= listed, f"add to docs/benchmarks.md: {sorted(records - listed)}"


def test_the_picture_is_what_the_records_say() -> None:
    done = subprocess.run(
        [sys.executable, DOCS / "picture.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_block_has_a_language_and_a_known_reason() -> None:
    for block in ALL:
        assert block.language in RUN | NO_CODE or block.language.startswith("rust"), block
        assert block.reason is None or block.reason in REASONS, block
        assert block.reason is None or block.language in RUN, block
    # Rust is run by doctests, of one page.
    rust = {block.page.name for block in ALL if block.language in ("rust", "rust,no_run")}
    included = re.findall(r'include_str!\("\.\./docs/(.*)"\)', (ROOT / "src/lib.rs").read_text())
    assert rust <= set(included), "add these pages to src/lib.rs"


@pytest.mark.parametrize("block", [block for block in ALL if block.language in RUN], ids=str)
def test_syntax(block: Block) -> None:
    if block.language == "python":
        compile(block.code, str(block), "exec")
    else:
        subprocess.run(["bash", "-n", "-c", block.code], check=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages call by name, in one folder, and a cache of the Hub."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    from models import SMALL, causal, seeded, tokenizer
    from pipelines import save

    root = tmp_path_factory.mktemp("models")
    llama = transformers.LlamaConfig(**{**SMALL, "vocab_size": 2048}, dtype="bfloat16")
    large = transformers.AutoModelForCausalLM.from_config(llama)
    seeded(large).save_pretrained(root / "Llama-3.1-8B")
    shutil.copytree(root / "Llama-3.1-8B", root / "Llama-3.1-405B")
    causal("qwen3", root / "Qwen3-8B")
    tokenizer().save_pretrained(root / "Qwen3-8B")
    save(root / "FLUX.1-dev")
    write_safetensors(
        root / "model.safetensors",
        {"layers.0.weight": ("BF16", (64, 256), normal(64 * 256)), "bias": ("I64", (1,), bytes(8))},
    )
    entry = root / "cache/hub/models--Qwen--Qwen3-8B"
    for folder in ("blobs", "refs", "snapshots"):
        (entry / folder).mkdir(parents=True)
    shutil.copytree(root / "Qwen3-8B", entry / "snapshots/0123")
    (entry / "refs/main").write_text("0123")
    return root


#: Runs the blocks of each page in a process of its own and in its folder, those of Python in one
#: namespace. Pages are forks of one process, which imports the libraries once for all.
RUNNER = """
import json, os, subprocess, sys, traceback
import df11, diffusers, torch, transformers.models.llama.modeling_llama

def run(blocks):
    names = {"__name__": "__main__"}
    for where, language, code in blocks:
        print("==", where, flush=True)
        if language == "sh":
            subprocess.run(["bash", "-euo", "pipefail", "-c", code], check=True)
        else:
            exec(compile(code, where, "exec"), names)

for folder, blocks in json.load(sys.stdin):
    if not os.fork():
        said = os.open(folder + ".said", os.O_CREAT | os.O_WRONLY)
        os.dup2(said, 1), os.dup2(said, 2)
        status = 1
        try:
            os.chdir(folder)
            run(blocks)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.wait()[1])
    with open(folder + ".status", "w") as file:
        file.write(str(status))
"""


def wanted(block: Block) -> bool:
    """Whether a block can be run here."""
    if block.language not in RUN:
        return False
    if block.reason == "needs a GPU":
        import torch

        return bool(torch.cuda.is_available())
    return block.reason is None


def environment(root: Path, models: Path) -> dict[str, str]:
    """With the command `df11` of this package, and without the network."""
    command = root / "bin/df11"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m df11 "$@"\n')
    command.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(models / "cache"),
    }


@pytest.fixture(scope="module")
def pages(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """By page the folder in which its code has run."""
    root = tmp_path_factory.mktemp("pages")
    jobs, found = [], {}
    for at, page in enumerate(PAGES):
        runs = [(str(one), one.language, one.code) for one in blocks(page) if wanted(one)]
        if runs:
            found[page] = root / str(at)
            shutil.copytree(models, found[page], ignore=shutil.ignore_patterns("cache"))
            jobs.append((str(found[page]), runs))
    subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(jobs),
        env=environment(root, models),
        text=True,
        timeout=900,
        check=True,
    )
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page: Path, pages: dict[Path, Path]) -> None:
    if page not in pages:
        pytest.skip("no code to run")
    said = pages[page].with_suffix(".said").read_text(encoding="utf-8")
    assert pages[page].with_suffix(".status").read_text() == "0", said
