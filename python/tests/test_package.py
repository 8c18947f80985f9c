"""The package itself: what it needs, what it is typed as, what it is linked with."""

import ast
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, one_layout, run

import df11
from df11 import _doctor, _native
from df11._wrapping import wrap

LIBRARY = Path(_native.__file__)
PACKAGE = Path(df11.__file__).parent


def test_functions_are_wrapped_once_and_all_or_none() -> None:
    def replacement(call: Callable[[], int], arguments: dict[str, Any]) -> int:
        return call() + len(arguments)

    library = SimpleNamespace(one=lambda number: number)
    both = (library, "one", replacement), (library, "other", replacement)
    assert wrap(*both) == "other"
    assert library.one(1) == 1
    library.other = lambda: 5
    assert wrap(*both) is None
    assert wrap(*both) is None
    assert (library.one(1), library.other()) == (2, 5)


def test_nothing_else_is_needed(container: Path, without_driver: dict[str, str]) -> None:
    run(
        """
        import sys
        for name in ("torch", "numpy", "transformers", "tqdm", "safetensors", "ml_dtypes"):
            sys.modules[name] = None
        import df11
        model = df11.open(sys.argv[1])
        assert df11.verify(sys.argv[1]).tensors == len(model)
        for array in (model["model.mask"].numpy, model["model.mask"].torch):
            try:
                raise AssertionError(array())
            except ImportError:
                pass
        """,
        container,
        **without_driver,
    )


def test_import_loads_nothing_large() -> None:
    out = run("import sys, df11; print(*sys.modules)")
    assert not {"torch", "numpy", "transformers", "tqdm"} & set(out.split())


def test_a_module_that_was_looked_for_is_registered_when_it_is_imported() -> None:
    pytest.importorskip("transformers")
    out = run(
        """
        import importlib.util, df11
        for _ in range(2):
            assert importlib.util.find_spec("transformers.modeling_utils").origin
        import transformers.modeling_utils
        print(transformers.modeling_utils._get_resolved_checkpoint_files._df11)
        """
    )
    assert out == "True"


def test_exceptions_are_sorted_by_fault() -> None:
    for name, base in {
        "IoError": OSError,
        "UnsupportedError": df11.Error,
        "CorruptError": ValueError,
        "LimitError": ValueError,
        "NoBaseError": df11.Error,
        "ParameterError": ValueError,
        "GpuError": RuntimeError,
    }.items():
        error = getattr(df11, name)
        assert issubclass(error, df11.Error) and issubclass(error, base)
        assert error.__module__ == "df11" and str(error("words")) == "words"
    assert issubclass(df11.Error, Exception)


def test_all_that_is_told_is_there() -> None:
    for name in df11.__all__:
        assert getattr(df11, name) is not None
        assert name.startswith("__") or getattr(df11, name).__doc__, name
    assert re.fullmatch(r"\d+\.\d+\.\d+", df11.__version__)


def test_the_module_serves_every_version_and_links_no_library_of_others() -> None:
    assert LIBRARY.name.endswith((".abi3.so", ".pyd"))
    if not shutil.which("ldd"):
        pytest.skip("no ldd")
    out = subprocess.run(["ldd", LIBRARY], capture_output=True, text=True, check=True).stdout
    allowed = r"lib(c|m|dl|rt|pthread|gcc_s|util)\.so\.\d+|/\S*/ld-linux\S*|linux-vdso\S*"
    needed = re.findall(r"^\s*(\S+)", out, re.MULTILINE)
    assert needed and all(re.fullmatch(allowed, name) for name in needed), needed


@one_layout
def test_the_command_comes_along(container: Path, large: Path, tmp_path: Path) -> None:
    def started(*arguments: object) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "df11", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(line, **pipes, text=True, cwd=LIBRARY.parents[1])

    def command(*arguments: object) -> tuple[int, str, str]:
        process = started(*arguments)
        out, said = process.communicate()
        return process.returncode, out, said

    assert command("--version")[1].startswith(f"df11 {df11.__version__} (format ")
    assert "every bit is there" in command("verify", container)[1]
    assert (command("verify", tmp_path / "absent")[0], command("frobnicate")[0]) == (2, 2)
    assert command("--help")[0] == 0
    # Ctrl-C is the command's own.
    process = started("compress", large, "-o", tmp_path / "large.df11")
    while not list(tmp_path.iterdir()):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert (process.returncode, said) == (130, "df11: interrupted; nothing is left half-written\n")
    assert list(tmp_path.iterdir()) == []
    back = tmp_path / "back.safetensors"
    assert command("decompress", container, "-o", back, "--json")[::2] == (0, "")


@pytest.mark.skipif(bool(df11.devices()), reason="there is a driver")
def test_without_a_driver_the_layer_of_tensors_says_so() -> None:
    for name, arguments in {
        "pin": (4096, 4096),
        "check": (0, 0),
        "build_tables": (0, [(256, 30, 512)]),
        "Packer": (0, 32, 256, 256, 0),
    }.items():
        with pytest.raises(df11.GpuError, match="driver"):
            getattr(_native, name)(*arguments)
    assert not _native.fits(0)


def test_extras_ask_for_the_oldest_tested_releases_and_for_no_newest() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((LIBRARY.parents[1] / "pyproject.toml").read_text())["project"]
    named = {}
    for requirement in [one for some in project["optional-dependencies"].values() for one in some]:
        name = re.match(r"\w+", requirement)
        assert name
        named[name[0]] = requirement[len(name[0]) :]
    known = _doctor.TESTED
    assert {"torch", "transformers", "diffusers", "vllm"} <= named.keys() & known.keys()
    for library in named.keys() & known.keys():
        assert named[library] == f">={_doctor.TESTED[library][0]}", library
    assert not any("<" in required for required in named.values())


def test_workflows_name_actions_by_their_commits() -> None:
    """A tag may move; a commit is what was looked at. Jobs may do no more than they need."""
    files = {path.name: path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")}
    assert {"release.yml", "kernels.yml"} <= files.keys()
    for name, text in files.items():
        used = re.findall(r"uses: (.+)", text)
        assert used
        for action in used:
            is_own = action.startswith("./.github/workflows/")
            assert is_own or re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", action), (name, action)
        assert "\npermissions:\n  contents: read\n" in text
        assert text.count("contents: write") == (name == "release.yml")
    ci = files["ci.yml"]
    assert "bash .ci/run" in ci and "\n  pull_request:\n" in ci
    released = files["release.yml"]
    assert "uses: ./.github/workflows/ci.yml" in released
    assert "needs: [tests, kernels, " in released


def test_contributing_names_all_that_ci_installs() -> None:
    script = (ROOT / ".ci/run").read_text()
    packages = re.findall(r"^has (?:\w+ )?([\w-]+)(?: +#.*)?$", script, flags=re.M)
    tools = re.findall(r"^need (?:[\w-]+) ([\w-]+)$", script, flags=re.M)
    environments = re.findall(r'"?\$target/(py-\w+)"', (ROOT / "python/check").read_text())
    assert {"strace", "golang-go"} <= set(packages) and "cargo-deny" in tools
    assert {"py-venv", "py-today"} <= set(environments)
    (gigabytes,) = re.findall(r"a first run puts (\d+) into target/", script)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    names = {f"`{name}`" for name in (*packages, *tools, *environments)} | {f"{gigabytes} GB"}
    assert not {name for name in names if name not in text}


def test_the_doctor_tells_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    out = run("import sys; from df11.__main__ import main; main()", "doctor", "--json", PATH="")
    value = json.loads(out)["checks"]["python"]["value"]
    assert value["df11"] == df11.__version__ and value["python"]
    releases = {"torch": "2.99.0", "transformers": "5.20.1"}
    monkeypatch.setattr(_doctor, "_release", releases.get)
    told = _doctor.report()
    newest = _doctor.TESTED["torch"][1]
    newer = f"torch 2.99.0 is newer than {newest}, the newest release that was tested"
    assert newer in str(told["text"])
    tested = f"pip install 'torch{_doctor.within('torch')}'"
    assert told["remedy"] == f"it may work; if not, install a tested release: {tested}"
    releases["torch"] = "2.9.1"
    assert "torch 2.9.1 is older than 2.11, the oldest" in str(_doctor.report()["text"])
    releases["torch"] = "2.12.1+cpu"
    assert _doctor.report()["remedy"] == ""


def test_newer_releases_are_told_once_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_doctor, "_logged", set())
    released = {"torch": "2.99.0", "peft": "0.99.1.dev0", "transformers": "5.20.1"}
    monkeypatch.setattr(_doctor, "_imported", released.get)
    for _ in range(2):
        _doctor.log_newer()
    (line,) = caplog.messages
    assert "torch 2.99.0 is newer than" in line and "; peft 0.99.1.dev0 is newer than" in line
    assert "transformers" not in line and "\n" not in line


def imported(file: Path) -> set[str]:
    """The modules of the package that a module imports, wherever in it."""
    package = list(file.relative_to(PACKAGE.parent).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {".".join([*base, name]) for name in names}
    return found


def test_no_module_imports_itself_by_others() -> None:
    files = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
    }
    left = {name: imported(path) & files.keys() for name, path in files.items()}
    assert len(left) > 30 and any(left.values())
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"these import each other: {sorted(left)}"


def test_super_alone_is_followed_by_an_attribute() -> None:
    """From Python 3.12 on, torch.compile knows `super().name`, but no other use of `super()`."""
    for path in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        followed = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node) == "super()":
                assert id(node) in followed, f"{path}:{node.lineno}"


def test_the_kernel_in_triton_compiles() -> None:
    """For a GPU, which its interpreter does not show."""
    triton = pytest.importorskip("triton")
    path = PACKAGE / "vllm" / "_translation.py"
    module = module_from_spec(spec := spec_from_file_location("translation", path))
    spec.loader.exec_module(module)
    signature = {"weight": "*u8", "table": "*u8", "chosen": "*i32", "columns": "i32"}
    signature |= {"strips": "i32", "side": "constexpr"}
    source = triton.compiler.ASTSource(module._translate, signature, constexprs={"side": 128})
    target = import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    assert "cubin" in triton.compile(source, target=target).asm


def test_each_name_is_listed_once() -> None:
    names = dir(df11)
    assert len(names) == len(set(names)) and {"Config", "Df11Config", "attach"} <= set(names)
