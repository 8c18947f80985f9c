"""The documentation: its links, its picture, and every block of code on its pages.

Blocks of a page run one after the other in one folder, those of Python in one namespace, on small
models of the architectures that they name. A block after `<!-- not run: REASON -->` is checked for
its syntax, and run if the reason does not hold. Blocks of Rust are tests of the crate.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pytest
from conftest import ROOT, normal, write_safetensors
from hub import fill_cache

DOCS = ROOT / "docs"
#: Pages whose code is run.
PAGES = [ROOT / "README.md", ROOT / "python/README.md", *sorted(DOCS.glob("*.md"))]
#: Pages whose links are checked. Records stay as they were on their day.
LINKED = [*PAGES, *(ROOT / f"{name}.md" for name in ("ARCHITECTURE", "CONTRIBUTING", "CHANGELOG"))]
#: Why a block may not be run.
REASONS = {
    *("needs a GPU", "needs vLLM", "installs into this machine", "builds with cargo"),
    *("takes minutes", "needs a store"),
}
RUN = {"sh", "python"}
#: Languages without code, and languages that other tests compile.
NO_CODE = {"text", "toml", "json", "c", "cpp", "rust,ignore"}


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    code: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    lines, at = page.read_text(encoding="utf-8").splitlines(), 0
    while at < len(lines):
        end = at
        if lines[at].startswith("```"):
            end = lines.index("```", at + 1)
            mark = re.fullmatch(r"<!-- not run: (.*) -->", lines[at - 1] if at else "")
            code = "\n".join(lines[at + 1 : end]) + "\n"
            yield Block(page, at + 1, lines[at][3:], code, mark[1] if mark else None)
        at = end + 1


ALL = [block for page in PAGES for block in blocks(page)]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", prose(page), flags=re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


def links(page: Path) -> list[str]:
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


def test_every_page_and_record_is_listed() -> None:
    missing = {page.name for page in DOCS.glob("*.md")} - {"README.md", *links(DOCS / "README.md")}
    assert not missing, f"add to docs/README.md: {sorted(missing)}"
    listed = {Path(link).name for link in links(DOCS / "benchmarks.md")}
    records = {path.name for path in (ROOT / "benches/record").iterdir()}
    assert records <= listed, f"add to docs/benchmarks.md: {sorted(records - listed)}"
    readme = ROOT / "README.md"
    assert "docs/README.md" in links(readme)
    assert len(readme.read_text(encoding="utf-8").splitlines()) <= 150


def test_picture_and_table_are_what_the_records_say() -> None:
    command = [sys.executable, DOCS / "picture.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_readme_begins_with_two_commands_that_ci_runs() -> None:
    first = next(blocks(ROOT / "README.md"))
    commands = [line.partition("#")[0].strip() for line in first.code.splitlines()]
    assert commands == ["cargo run --release -- demo", "cargo test"]
    steps = (ROOT / ".ci/run").read_text(encoding="utf-8").replace("\\\n", " ")
    assert re.search(r"^(\w+=\w+ +)*cargo test$", steps, re.M)


def figures_of(line: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", re.sub(r"\]\([^)]*\)", "", line.partition("|")[2]))


@pytest.mark.parametrize("page", ["README.md", "docs/comparison.md"])
def test_figures_of_packages_are_those_of_their_record(page: str) -> None:
    """Percent and medians of the rates of each package in the table of files."""
    record = json.loads((ROOT / "benches/record/2026-11-27-peers.json").read_text())
    sources = list(dict.fromkeys(row["source"] for row in record["rows"]))
    sources = sources[:1] if page == "README.md" else sources
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    for name in ("df11", "zipnn", "lmzip", "bigsmall", "glyd"):
        rows = [row for row in record["rows"] if row["name"] == name and row["source"] in sources]
        wanted = [f"{row['percent']:.2f}" for row in rows]
        for rates in ("compress_mb_s", "decompress_mb_s"):
            wanted += [str(round(statistics.median(row[rates]))) for row in rows]
        begins = re.compile(rf"\| [*\[]*{name}\b", re.I)
        told = [figures_of(line.strip("| ")) for line in lines if begins.match(line)]
        assert any(each[: len(wanted)] == wanted for each in told), (name, wanted, told)


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
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that the pages name, in one folder, and a cache of the Hub."""
    transformers = pytest.importorskip("transformers")
    pipelines = pytest.importorskip("pipelines")
    import models

    root = tmp_path_factory.mktemp("models")
    llama = transformers.LlamaConfig(**{**models.SMALL, "vocab_size": 2048}, dtype="bfloat16")
    large = models.seeded(transformers.AutoModelForCausalLM.from_config(llama))
    large.save_pretrained(root / "Llama-3.1-8B")
    shutil.copytree(root / "Llama-3.1-8B", root / "Llama-3.1-405B")
    for parameter in large.parameters():
        parameter.data.mul_(1.002)
    large.save_pretrained(root / "Llama-3.1-8B-tune")
    models.causal("qwen3", root / "Qwen3-8B")
    models.tokenizer().save_pretrained(root / "Qwen3-8B")
    pipelines.save(root / "FLUX.1-dev")
    shutil.copy(
        root / "FLUX.1-dev/transformer/diffusion_pytorch_model.safetensors",
        root / "flux1-dev.safetensors",
    )
    tensors = {"layers.0.weight": ("BF16", (64, 256), normal(64 * 256))}
    tensors["bias"] = ("I64", (1,), bytes(8))
    write_safetensors(root / "model.safetensors", tensors)
    fill_cache(root / "cache/hub/models--Qwen--Qwen3-8B", root / "Qwen3-8B")
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
    if block.reason == "needs a GPU":
        import torch

        return bool(torch.cuda.is_available())
    return block.language in RUN and block.reason is None


def environment(root: Path, made: Path) -> dict[str, str]:
    command = root / "bin/df11"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m df11 "$@"\n')
    command.chmod(0o755)
    path = {"PATH": f"{command.parent}:{os.environ['PATH']}", "HF_HOME": str(made / "cache")}
    return {**os.environ, **path, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def pages(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """By page the folder in which its code has run."""
    root = tmp_path_factory.mktemp("pages")
    jobs, found = [], {}
    for at, page in enumerate(PAGES):
        if runs := [(str(one), one.language, one.code) for one in blocks(page) if wanted(one)]:
            found[page] = root / str(at)
            shutil.copytree(made, found[page], ignore=shutil.ignore_patterns("cache"))
            jobs.append((str(found[page]), runs))
    settings = {"env": environment(root, made), "text": True, "timeout": 900, "check": True}
    subprocess.run([sys.executable, "-c", RUNNER], input=json.dumps(jobs), **settings)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page: Path, pages: dict[Path, Path]) -> None:
    if page not in pages:
        pytest.skip("no code to run")
    said = pages[page].with_suffix(".said").read_text(encoding="utf-8")
    assert pages[page].with_suffix(".status").read_text() == "0", said


def test_the_guide_runs_on_what_it_makes(tmp_path: Path) -> None:
    """On the demonstration and the small pipeline, where there is no other model."""
    pytest.importorskip("diffusers")
    guide, copy = DOCS / "guide.md", "cp -r demo/model Qwen3-8B"
    assert f"After `{copy}`" in prose(guide)
    runs = [(str(one), one.language, one.code) for one in blocks(guide) if wanted(one)]
    runs = [each for each in runs if "from-cache" not in each[2]]
    (at,) = (at for at, (_, _, code) in enumerate(runs) if "demo --keep demo" in code)
    runs.insert(at + 1, ("its sentence after that", "sh", copy))
    (folder := tmp_path / "guide").mkdir()
    job = json.dumps([(str(folder), runs)])
    settings = {"env": environment(tmp_path, tmp_path), "text": True, "timeout": 900, "check": True}
    subprocess.run([sys.executable, "-c", RUNNER], input=job, **settings)
    said = folder.with_suffix(".said").read_text(encoding="utf-8")
    assert folder.with_suffix(".status").read_text() == "0", said
    assert "Lossless means" in said and "as they were loaded" in said


#: Pages with Python code.
TYPED = ["README.md", "python/README.md"]
#: Declarations that the code relies on.
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
    """mypy's messages for the code of each document, `0.py` and so on, and for wrong calls."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("types")
    for at, name in enumerate(TYPED):
        code = [block.code for block in blocks(ROOT / name) if block.language == "python"]
        assert code
        (folder / f"{at}.py").write_text(GIVEN + "\n".join(code))
    (folder / "wrong.py").write_text(GIVEN + "\n".join(WRONG))
    settings = Path(__file__).with_name("types.ini")
    files = sorted(path.name for path in folder.iterdir())
    command = [sys.executable, "-m", "mypy", "--config-file", settings, *files]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "python")}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    return done.stdout + done.stderr


@pytest.mark.parametrize("at", range(len(TYPED)), ids=TYPED)
def test_types_of_documents(at: int, said: str) -> None:
    assert "checked" in said and f"{at}.py:" not in said, said


def test_wrong_types_are_found(said: str) -> None:
    lines = re.findall(r"wrong\.py:(\d+): error:", said)
    first = GIVEN.count("\n") + 1
    assert lines == [str(first + at) for at in range(len(WRONG))], said
    assert "not callable" not in said
