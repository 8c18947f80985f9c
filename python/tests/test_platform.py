"""Differences of systems, each system's way on this one."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from df11 import _platform


@pytest.mark.parametrize("is_windows", [True, False])
def test_windows_keeps_what_is_mapped(
    is_windows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_platform, "IS_WINDOWS", is_windows)
    file = tmp_path / "model.df11"
    file.write_bytes(b"mapped")
    _platform.unlink_mapped(file)
    assert file.exists() == is_windows


def test_libraries_of_pytorch_for_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_platform, "IS_WINDOWS", True)
    torch = SimpleNamespace(__file__=str(tmp_path / "__init__.py"))
    monkeypatch.setitem(sys.modules, "torch", torch)
    (tmp_path / "lib").mkdir()
    for name in ("cublas64_13.dll", "cublasLt64_13.dll"):
        (tmp_path / "lib" / name).touch()
    assert _platform.loaded_library("cublas") == tmp_path / "lib/cublas64_13.dll"
    assert _platform.loaded_library("cudart") is None
    (tmp_path / "lib/cublas64_12.dll").touch()
    assert _platform.loaded_library("cublas") is None, "several"


def test_only_linux_has_files_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert len(_platform.places()) == 1
