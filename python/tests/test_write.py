"""Compression and back, progress, interruption, and other threads meanwhile."""

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import SAMPLE, run

import df11


def test_files_come_back_byte_for_byte(container: Path, source: Path, tmp_path: Path) -> None:
    back = tmp_path / "back.safetensors"
    assert df11.decompress(container, back, progress=False) == source.stat().st_size
    assert back.read_bytes() == source.read_bytes()
    folder = tmp_path / "folder"
    df11.decompress(str(container), str(folder), progress=False)
    assert (folder / "model.safetensors").read_bytes() == source.read_bytes()


def test_reports_have_all_figures(source: Path, tmp_path: Path) -> None:
    report = df11.compress(source, tmp_path / "a.df11", layout="gap", progress=False)
    assert report.source_bytes == source.stat().st_size
    assert report.stored_bytes == (tmp_path / "a.df11").stat().st_size
    # All patterns are as many as 16 bits a weight hold, and stay as they are.
    assert (report.coded_tensors, report.alias_tensors, report.shards) == (2, 1, 1)
    assert report.coded_tensors + report.raw_tensors + report.alias_tensors == len(SAMPLE)
    assert report.coded_weights == 2 * 520 * 70 and 10 < report.bits_per_weight < 13
    assert 2 < report.entropy < 3 and 0.5 < report.ratio < 1.2
    assert report.left_out == () and report.notes == ()
    assert dataclasses.asdict(report)["coded_weights"] == 72800
    estimated = df11.estimate(source, layout="gap", progress=False)
    assert estimated == report
    assert df11.estimate(source, progress=False) == df11.estimate(
        source, layout="tile", progress=False
    )
    smaller = df11.estimate(source, tmp_path / "folder", layout="raw", progress=False)
    assert smaller.coded_tensors == 0


def test_layouts_convert_into_each_other(container: Path, source: Path, tmp_path: Path) -> None:
    for layout in ("gap", "tile", "raw"):
        df11.convert(container, tmp_path / f"{layout}.df11", layout=layout, progress=False)
        df11.compress(
            source, tmp_path / "direct.df11", layout=layout, overwrite=True, progress=False
        )
        assert (tmp_path / f"{layout}.df11").read_bytes() == (tmp_path / "direct.df11").read_bytes()


def test_folders_keep_their_side_files(source: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(source.read_bytes())
    (model / "config.json").write_text('{"a": 1}\n')
    (model / "old.bin").write_bytes(b"other")
    report = df11.compress(model, tmp_path / "out", progress=False)
    assert report.left_out == (("old.bin", "weights in another format"),)
    assert (tmp_path / "out/config.json").read_text() == '{"a": 1}\n'
    df11.compress(model, tmp_path / "out.df11", progress=False)
    assert df11.open(tmp_path / "out.df11").side_files == ["config.json"]
    df11.decompress(tmp_path / "out.df11", tmp_path / "back", progress=False)
    assert (tmp_path / "back/config.json").read_text() == '{"a": 1}\n'


def test_outputs_are_replaced_only_on_request(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.df11"
    df11.compress(source, out, progress=False)
    with pytest.raises(df11.ParameterError, match="exists"):
        df11.compress(source, out, progress=False)
    df11.compress(source, out, overwrite=True, verify=False, progress=False)
    back = tmp_path / "back"
    df11.decompress(out, back, progress=False)
    with pytest.raises(df11.ParameterError, match="exists"):
        df11.decompress(out, back, progress=False)
    df11.decompress(out, back, overwrite=True, progress=False)
    # Never what holds the source, or was no output.
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    for wrong in (
        lambda: df11.compress(back, back, overwrite=True),
        lambda: df11.decompress(out, tmp_path / "mine", overwrite=True),
    ):
        with pytest.raises(df11.ParameterError, match="choose another output"):
            wrong()
    assert (tmp_path / "mine/notes.txt").exists() and (back / "model.safetensors").exists()


def test_wrong_words_and_sources_are_told(container: Path, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.df11"
    for call, words in [
        (
            lambda: df11.compress(source, out, layout="zip"),
            'layout "zip" is not known; choose gap, tile or raw',
        ),
        (lambda: df11.verify(container, "some"), 'level "some" is not known; choose structure'),
        (
            lambda: df11.verify(container, device="tpu"),
            'device "tpu" is not known; choose auto',
        ),
        (lambda: df11.compress(tmp_path, out), "holds no safetensors files"),
    ]:
        with pytest.raises(df11.ParameterError, match=words):
            call()
    with pytest.raises(df11.IoError):
        df11.compress(tmp_path / "absent", out)
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(df11.Error):
        df11.compress(tmp_path / "bad.safetensors", out)
    assert not out.exists()


def test_verification_tells_what_it_saw(container: Path) -> None:
    found = df11.verify(container, progress=False)
    assert (found.tensors, found.files, found.unchecked) == (len(SAMPLE), 1, ())
    assert found == df11.open(container).verify(progress=False)
    assert df11.verify(container, "structure", progress=False).tensors == 0
    assert df11.verify(container, level="checksums", progress=False).tensors == 0


def test_progress_is_told_on_the_callers_thread(large: Path, tmp_path: Path) -> None:
    calls = []
    thread = threading.get_ident()

    def told(stage: str, done: int, total: int) -> None:
        assert threading.get_ident() == thread
        calls.append((stage, done, total))

    df11.compress(large, tmp_path / "out.df11", progress=told)
    assert {stage for stage, _, _ in calls} >= {"analyse", "verify"}
    done = [done for _, done, _ in calls]
    assert (
        done == sorted(done)
        and calls[-1][1] == calls[-1][2] > 0
        and len({total for _, _, total in calls[1:]}) == 1
    )


def test_what_progress_raises_ends_the_work(large: Path, tmp_path: Path) -> None:
    def fails(stage: str, done: int, total: int) -> None:
        if done:
            raise LookupError("no more")

    start = time.monotonic()
    with pytest.raises(LookupError, match="no more"):
        df11.compress(large, tmp_path / "out.df11", progress=fails)
    assert list(tmp_path.iterdir()) == []
    assert time.monotonic() - start < 30


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler: shells let what they start in the background ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_work_and_leaves_nothing(large: Path, tmp_path: Path) -> None:
    for stage in ("analyse", "encode", "verify"):
        sent = []

        def interrupts(
            now: str, done: int, total: int, stage: str = stage, sent: list[str] = sent
        ) -> None:
            if now == stage and not sent:
                sent.append(now)
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            df11.compress(large, tmp_path / "out.df11", progress=interrupts)
        assert sent and list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_work_that_tells_nothing(large: Path, tmp_path: Path) -> None:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
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
    script = """
        import sys, df11
        df11.compress(sys.argv[1], sys.argv[2], progress=eval(sys.argv[3]), overwrite=True)
        """
    assert run(script, source, tmp_path / "a.df11", None) == ""
    # A bar that is asked for goes to standard error, with tqdm and without.
    for hide in ["", "import sys; sys.modules['tqdm'] = None; sys.modules['tqdm.auto'] = None\n"]:
        out = run(
            hide
            + "import io, sys, df11\n"
            + "sys.stderr = io.StringIO()\n"
            + "df11.compress(sys.argv[1], sys.argv[2], progress=True, overwrite=True)\n"
            + "print(repr(sys.stderr.getvalue()))",
            source,
            tmp_path / "a.df11",
        )
        assert "verifying" in out, out
