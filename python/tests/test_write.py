"""Compression and back, progress, interruption, and other threads meanwhile."""

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from conftest import SAMPLE, run

import df11
from df11 import _native
from df11._platform import IS_WINDOWS


def test_temporary_folders(tmp_path: Path) -> None:
    """They are their maker's, and gone at the end, also by an error."""
    with pytest.raises(ZeroDivisionError), _native.TemporaryFolder(tmp_path) as folder:
        (folder / "x").write_text("x")
        assert folder.parent == tmp_path
        # Windows has no modes: what is created inherits who may access it.
        assert IS_WINDOWS or folder.stat().st_mode & 0o077 == 0
        other = _native.TemporaryFolder(tmp_path)
        assert other.__enter__() != folder, "which is in use"
        if hasattr(os, "fork"):
            child = os.fork()
            if not child:
                other.__exit__()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert other.__enter__().is_dir(), "a child leaves it"
        raise ZeroDivisionError
    # Locks of Windows are files.
    left = [path for path in tmp_path.iterdir() if not (IS_WINDOWS and path.suffix == ".df11-lock")]
    assert left == [other.__enter__()]
    del other
    assert not list(tmp_path.iterdir())
    left = tmp_path / ".df11-uvwxyz.part"
    left.mkdir()
    with _native.TemporaryFolder(tmp_path):
        assert not left.exists()
    with _native.TemporaryFolder(tmp_path / "missing" / "parents") as folder:
        assert folder.is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(df11.IoError, match="creating a folder in"):
        _native.TemporaryFolder(tmp_path / "file")


def test_files_come_back_byte_for_byte(container: Path, source: Path, tmp_path: Path) -> None:
    for back, name in [("back.safetensors", "."), ("folder", "model.safetensors")]:
        size = df11.decompress(container, str(tmp_path / back), progress=False)
        assert size == source.stat().st_size
        assert (tmp_path / back / name).read_bytes() == source.read_bytes()
    layout, converted = container.parent.name.rstrip("0123456789"), tmp_path / "converted.df11"
    other = {"gap": "tile", "tile": "raw", "raw": "gap"}[layout]
    df11.convert(container, converted, layout=other, progress=False)
    assert converted.read_bytes() != container.read_bytes()
    df11.convert(converted, tmp_path / "again.df11", layout=layout, progress=False)
    assert (tmp_path / "again.df11").read_bytes() == container.read_bytes()


def test_reports_have_all_figures(source: Path, tmp_path: Path) -> None:
    report = df11.compress(source, tmp_path / "a.df11", layout="gap", progress=False)
    sizes = (source.stat().st_size, (tmp_path / "a.df11").stat().st_size)
    assert (report.source_bytes, report.stored_bytes) == sizes
    # All patterns are as many as 16 bits per weight hold, and stay as they are.
    assert (report.coded_tensors, report.alias_tensors, report.shards) == (2, 1, 1)
    assert report.coded_tensors + report.raw_tensors + report.alias_tensors == len(SAMPLE)
    assert report.coded_weights == 2 * 520 * 70 and 10 < report.bits_per_weight < 13
    assert 2 < report.entropy < 3 and 0.5 < report.ratio < 1.2
    assert report.left_out == () and report.notes == ()
    assert dataclasses.asdict(report)["coded_weights"] == 72800

    estimated = partial(df11.estimate, source, progress=False)
    assert estimated(layout="gap") == report and estimated() == estimated(layout="tile")
    assert estimated(tmp_path / "folder", layout="raw").coded_tensors == 0


def test_what_is_left_out_is_told(source: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name, content in [("a.safetensors", source.read_bytes()), ("old.bin", b"other")]:
        (tmp_path / "model" / name).write_bytes(content)
    (tmp_path / "model/config.json").write_text("{}")
    report = df11.compress(tmp_path / "model", tmp_path / "out.df11", progress=False)
    assert report.left_out == (("old.bin", "weights in another format"),)
    assert df11.open(tmp_path / "out.df11").side_files == ["config.json"]


def test_outputs_are_replaced_only_on_request(source: Path, tmp_path: Path) -> None:
    out, back = tmp_path / "out.df11", tmp_path / "back"
    compress, decompress = partial(df11.compress, source, out), partial(df11.decompress, out, back)
    for write in (compress, decompress):
        write(progress=False)
        with pytest.raises(df11.ParameterError, match="exists"):
            write(progress=False)
        write(overwrite=True, progress=False)
    compress(overwrite=True, verify=False, progress=False)
    # Never what holds the source.
    with pytest.raises(df11.ParameterError, match="choose another output"):
        df11.compress(back, back, overwrite=True)
    assert (back / "model.safetensors").exists()


def test_wrong_words_and_sources_are_told(container: Path, source: Path, tmp_path: Path) -> None:
    out, wrong = tmp_path / "out.df11", df11.ParameterError
    layouts = "is not known; choose tile, gap or raw"
    levels = "is not known; choose structure"
    for call, error, words in [
        (lambda: df11.compress(source, out, layout="zip"), wrong, f'layout "zip" {layouts}'),
        (lambda: df11.verify(container, "some"), wrong, f'level "some" {levels}'),
        (lambda: df11.verify(container, device="tpu"), wrong, 'device "tpu" is not known; choose'),
        (lambda: df11.compress(tmp_path, out), wrong, "holds no safetensors files"),
        (lambda: df11.compress(tmp_path / "absent", out), df11.IoError, "absent"),
    ]:
        with pytest.raises(error, match=words):
            call()
    assert not out.exists()


def test_verification_tells_what_it_saw(container: Path) -> None:
    found = df11.verify(container, progress=False)
    assert (found.tensors, found.files, found.unchecked) == (len(SAMPLE), 1, ())
    assert found == df11.open(container).verify(progress=False)
    assert df11.verify(container, "structure", progress=False).tensors == 0
    assert df11.verify(container, level="checksums", progress=False).tensors == 0


def test_progress_is_told_on_the_callers_thread(large: Path, tmp_path: Path) -> None:
    calls = []

    def told(stage: str, done: int, total: int) -> None:
        calls.append((stage, done, total, threading.get_ident()))

    df11.compress(large, tmp_path / "out.df11", progress=told)
    stages, done, totals, threads = zip(*calls, strict=True)
    assert {*stages} >= {"analyse", "verify"} and {*threads} == {threading.get_ident()}
    assert list(done) == sorted(done) and done[-1] == totals[-1] > 0
    assert len({*totals[1:]}) == 1


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler: shells let what they start in the background ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("stage", ["analyse", "encode", "verify"])
@pytest.mark.parametrize("raised", [KeyboardInterrupt, LookupError])
def test_what_ends_the_work_leaves_nothing(
    large: Path, tmp_path: Path, stage: str, raised: type[BaseException]
) -> None:
    """Ctrl-C, or what a function of progress raises."""

    def ends(now: str, done: int, total: int) -> None:
        if now == stage and raised is LookupError:
            raise raised
        if now == stage and not sent:
            sent.append(now)
            signal.raise_signal(signal.SIGINT)

    sent: list[str] = []
    with pytest.raises(raised):
        df11.compress(large, tmp_path / "out.df11", progress=ends)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_work_that_tells_nothing(large: Path, tmp_path: Path) -> None:
    # os.kill ends a process of Windows.
    send = signal.raise_signal if IS_WINDOWS else partial(os.kill, os.getpid())
    timer = threading.Timer(0.3, send, (signal.SIGINT,))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        df11.compress(large, tmp_path / "out.df11", progress=False)
        # Should the work be done before.
        time.sleep(60)
    assert not [path for path in tmp_path.iterdir() if path.name != "out.df11"]


def test_other_threads_go_on_meanwhile(large: Path, tmp_path: Path) -> None:
    ticks, done = [], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.002)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.monotonic()
    df11.compress(large, tmp_path / "out.df11", verify=False, progress=False)
    buffer = bytearray(df11.open(tmp_path / "out.df11")["a"].nbytes)
    middle = time.monotonic()
    df11.open(tmp_path / "out.df11")["a"].decode_into(buffer)
    end = time.monotonic()
    done.set()
    thread.join()
    # Under load a thread may wait long for its turn; with the lock held it would have none at all.
    assert sum(start < at < middle for at in ticks) >= 5
    assert sum(middle < at < end for at in ticks) >= 2


def test_several_threads_decode_at_once(container: Path) -> None:
    model = df11.open(container)

    def decode(_: int) -> None:
        for name, (_, _, content) in SAMPLE.items():
            buffer = bytearray(len(content))
            model[name].decode_into(buffer)
            assert buffer == content, name

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(decode, range(8)))


def test_progress_is_silent_without_a_terminal(source: Path, tmp_path: Path) -> None:
    """A bar that is asked for goes to standard error, with tqdm and without."""
    script = """
        import io, sys
        for name in sys.argv[3].split():
            sys.modules[name] = None
        import df11
        sys.stderr = io.StringIO()
        df11.compress(sys.argv[1], sys.argv[2], progress=eval(sys.argv[4]), overwrite=True)
        print(sys.stderr.getvalue())
        """
    for hidden, progress in [("", None), ("", True), ("tqdm tqdm.auto", True)]:
        out = run(script, source, tmp_path / "a.df11", hidden, progress)
        assert ("verifying" in out) if progress else out == "", out
