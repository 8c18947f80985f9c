"""Opening, looking, and decoding on the CPU; what decodes is tested by the library's own tests."""

import gzip
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import ROOT, SAMPLE, SIZES, run

import df11
from df11._platform import IS_WINDOWS


def test_a_model_is_a_mapping_of_tensors(container: Path) -> None:
    model = df11.open(str(container))
    assert isinstance(model, Mapping) and dict(model).keys() == model.keys()
    assert set(model) == set(SAMPLE) == set(model.tensors)
    assert len(model) == len(SAMPLE) == len(model.items()) == len(model.values())
    assert "model.none" in model and "absent" not in model and 3 not in model
    assert model.get("absent") is None and model.get("absent", 7) == 7
    for missing in (lambda: model["absent"], lambda: model.block("absent")):
        with pytest.raises(KeyError, match="absent"):
            missing()
    assert model.path == str(container) and model.is_complete and len(model.identity) == 64
    assert model.nbytes == sum(len(content) for _, _, content in SAMPLE.values())
    assert model.stored_bytes == container.stat().st_size
    assert model.weights_files == ["model.safetensors"] and model.side_files == []
    assert "10 tensors" in repr(model)


def test_tensors_tell_what_they_are_and_decode(container: Path) -> None:
    model = df11.open(container)
    for name, (dtype, shape, content) in SAMPLE.items():
        tensor, size = model[name], len(content)
        told = (tensor.name, tensor.dtype, tensor.shape, tensor.nbytes)
        assert told == (name, dtype, shape, size) and name in repr(tensor)
        assert tensor.block in {block.name for block in model.blocks}
        assert len(tensor.hash) == 64 and tensor.encoding in ("gap", "tile", "raw")
        if tensor.target == name:
            bits = 8 * tensor.stored_bytes * SIZES[dtype] / size if size else 0
            assert tensor.bits_per_element == bits
        view = memoryview(bytearray(size + 6))[3:-3]
        tensor.decode_into(view)
        assert view == content, name
    first, tied = model["model.layers.0.mlp.weight"], model["model.layers.0.mlp.tied"]
    assert {first.target, tied.target} <= {first.name, tied.name} and first.hash == tied.hash


def test_rows_are_parts_of_tensors(container: Path) -> None:
    model = df11.open(container)
    for name, (dtype, shape, content) in SAMPLE.items():
        count = shape[0] if shape else 0
        row = len(content) // max(1, count)
        for start, stop in {(0, count), (1, 2), (count // 3, count // 2), (count, count)}:
            if stop > count or not shape:
                continue
            rows = model[name].rows(start, stop)
            told = (rows.ranges, rows.dtype, rows.tensor.name, rows.shape, rows.nbytes)
            size = row * (stop - start)
            assert told == (((start, stop),), dtype, name, (stop - start, *shape[1:]), size)
            one, other = bytearray(size), bytearray(size)
            rows.decode_into(one)
            model[name].decode_rows_into(start, stop, other)
            assert one == other == content[row * start : row * stop], (name, start, stop)
    for start, stop in [(0, 521), (5, 4)]:
        with pytest.raises(df11.ParameterError, match=r"indices.*0\.\.520"):
            model["model.layers.0.mlp.weight"].rows(start, stop)


def test_slices_are_what_indexing_gives(container: Path) -> None:
    np = pytest.importorskip("numpy")
    tensor = df11.open(container)["model.layers.0.mlp.weight"]
    array, s = tensor.numpy(), np.s_
    indices = [s[:], s[:, 32:64], s[100:, -10:], s[5], s[-1, 3:], s[7, 9], s[400:90, 1:2]]
    for index in [*indices, s[::1, :900], s[()]]:
        part = tensor[index]
        assert part.shape == array[index].shape and part.nbytes == array[index].nbytes, index
        assert np.array_equal(part.numpy().view("u2"), array[index].view("u2")), index
    assert tensor[2:4, 60:].ranges == ((2, 4), (60, 70)) and "Slice" in repr(tensor[1])
    for wrong in [(0, 0, 0), 520, (0, -71)]:
        with pytest.raises(IndexError):
            tensor[wrong]
    for other in [s[::2], s[::-1], "one", None, 1.5]:
        with pytest.raises(TypeError):
            tensor[other]


def test_blocks_decode_into_one_buffer(container: Path) -> None:
    model = df11.open(container)
    names = [tensor.name for block in model.blocks for tensor in block.tensors]
    assert sorted(names) == sorted(SAMPLE)
    for block in model.blocks:
        assert model.block(block.name).name == block.name and block.name in repr(block)
        assert block.stored_bytes == sum(tensor.stored_bytes for tensor in block.tensors)
        assert list(block.layout) == [tensor.name for tensor in block.tensors]
        buffer = bytearray(b"\xa5" * block.nbytes)
        block.decode_into(buffer)
        end = 0
        for name, (start, stop) in block.layout.items():
            assert start % 256 == 0 and buffer[start:stop] == SAMPLE[name][2]
            assert not any(buffer[end:start])
            end = stop
        assert end == block.nbytes
        with pytest.raises(df11.ParameterError, match=f"{block.nbytes} are decoded"):
            block.decode_into(bytearray(block.nbytes + 1))


@pytest.mark.parametrize("options", [{"memory_map": False}, {"checksums": False}], ids=str)
def test_options_of_open_leave_bytes_as_they_are(container: Path, options: dict[str, bool]) -> None:
    # The tensor outlives its model.
    tensor = df11.open(container, **options)["model.embed.weight"]
    buffer = bytearray(tensor.nbytes)
    tensor.decode_into(buffer)
    assert buffer == SAMPLE["model.embed.weight"][2]


def test_wrong_buffers_are_refused(container: Path) -> None:
    tensor = df11.open(container)["model.layers.0.norm.weight"]
    for buffer, words in [
        (bytes(18), "read-only; pass a writable one"),
        (bytearray(17), "17 bytes, and 18 are decoded; pass a buffer of exactly"),
        (memoryview(bytearray(36))[::2], "not contiguous; pass"),
    ]:
        with pytest.raises(df11.ParameterError, match=words) as caught:
            tensor.decode_into(buffer)
        assert caught.value.remedy and str(caught.value).endswith(caught.value.remedy)
    for buffer in [None, 18, "text", [0] * 18]:
        with pytest.raises(TypeError, match="no buffer; pass"):
            tensor.decode_into(buffer)
    # While it is decoded to, a buffer cannot move; afterwards it can.
    buffer = bytearray(18)
    tensor.decode_into(buffer)
    buffer.append(0)


def test_files_that_are_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(df11.IoError, match=r"opening .*absent") as caught:
        df11.open(tmp_path / "absent.df11")
    assert isinstance(caught.value, OSError) and caught.value.errno == 2
    assert str(caught.value).endswith("; check the path")
    assert caught.value.remedy == "check the path"
    with pytest.raises(df11.ParameterError, match=r"holds no \.df11 file; name a") as refused:
        df11.open(tmp_path)
    assert refused.value.remedy.startswith("name a container")
    with pytest.raises(TypeError):
        df11.open(None)


def vector(name: str, folder: Path) -> Path:
    """One of the vectors, which tests/spec/vectors.rs of the library reads all."""
    path = folder / "vector.df11"
    path.write_bytes(gzip.decompress((ROOT / "spec/vectors" / name).read_bytes()))
    return path


def test_damage_is_found(container: Path, tmp_path: Path) -> None:
    content, damaged = container.read_bytes(), tmp_path / "damaged.df11"
    damaged.write_bytes(content[: len(content) // 2])
    with pytest.raises(df11.CorruptError) as caught:
        df11.open(damaged)
    assert caught.value.place and caught.value.offset >= 0
    assert caught.value.remedy and str(caught.value).endswith(caught.value.remedy)
    # In the middle of the weights: opening sees nothing, decoding and verification do.
    middle = content.index(SAMPLE["model.layers.1.scale"][2])
    damaged.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    model = df11.open(damaged)
    with pytest.raises(df11.CorruptError, match="checksum"):
        for tensor in model.values():
            tensor.decode_into(bytearray(tensor.nbytes))
    for level in ("checksums", "full"):
        with pytest.raises(df11.CorruptError):
            df11.verify(damaged, level, progress=False)


def test_every_character_of_a_message_shows(container: Path, tmp_path: Path) -> None:
    unseen = "\x1b\x9b\u202e\u200b\ufeff\u2028\U000e0041\n"
    shown = r"\u{1b}\u{9b}\u{202e}\u{200b}\u{feff}\u{2028}\u{e0041}\n"
    if IS_WINDOWS:  # no name has a control character
        unseen, shown = unseen[1:-1], shown.removeprefix(r"\u{1b}").removesuffix(r"\n")
    path = tmp_path / f"x{unseen}.df11"
    shutil.copy(container, path)
    with path.open("r+b") as file:
        file.write(b"no container")
    for wrong in (path, tmp_path / f"none{unseen}.df11"):
        with pytest.raises(df11.Error) as error:
            df11.open(wrong)
        assert shown in str(error.value) and not set(unseen) & set(str(error.value))
    with pytest.raises(df11.ParameterError) as parameter:
        df11.safe_open(path, framework=unseen)
    assert not set(unseen) & set(str(parameter.value))
    shutil.copy(container, path)
    table = df11.open(path)._repr_html_()
    assert shown in table and not set(unseen) & set(table)


@pytest.mark.parametrize("kind", ["Corrupt", "Limit", "Unsupported"])
def test_kinds_of_problems_are_classes(kind: str, tmp_path: Path) -> None:
    """One vector each; tests/spec/vectors.rs of the library reads all."""
    vectors = json.loads((ROOT / "spec/vectors/manifest.json").read_bytes())["vectors"]
    row = next(row for row in vectors if (row["expect"], row.get("level")) == (kind, "open"))
    with pytest.raises(getattr(df11, f"{kind}Error")):
        df11.open(vector(row["file"], tmp_path))


def test_a_tensor_that_needs_a_newer_reader_is_told(tmp_path: Path) -> None:
    model = df11.open(vector("valid/unknown-encoding.df11.gz", tmp_path))
    unknown = [tensor for tensor in model.values() if tensor.encoding == "unknown"]
    assert unknown and model.verify(progress=False).unchecked
    for tensor in unknown:
        with pytest.raises((df11.UnsupportedError, df11.ParameterError)):
            tensor.decode_into(bytearray())


def test_a_folder_of_shards_is_one_model(container: Path, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    path = shutil.copy(container, tmp_path / "sub" / "model.df11")
    model, size = df11.open(tmp_path), container.stat().st_size
    assert len(model) == len(SAMPLE)
    assert model.shards == [{"path": str(path), "index": 0, "count": 1, "bytes": size}]


def test_inspect_tells_what_the_command_says(container: Path) -> None:
    told = df11.inspect(container)
    assert told == df11.inspect(df11.open(container)) == json.loads(json.dumps(told))
    assert all("tensors" not in block for block in df11.inspect(container, tensors=False)["blocks"])
    command = "import sys; from df11.__main__ import main; main()"
    said = json.loads(run(command, "inspect", container, "--tensors", "--entropy=never", "--json"))
    assert told == said
    assert {
        "identity",
        "complete",
        "shards",
        "container_bytes",
        "blocks",
    } <= told.keys()
    assert {"elements", "weights", "tensors"} <= told["blocks"][0].keys()


def test_decoding_works_after_a_fork(container: Path) -> None:
    # Data loaders fork, which leaves threads out.
    if not hasattr(os, "fork"):
        pytest.skip("no fork")
    out = run(
        """
        import os, sys, df11
        tensor = df11.open(sys.argv[1])["model.embed.weight"]
        buffer = bytearray(tensor.nbytes)
        tensor.decode_into(buffer)
        df11.verify(sys.argv[1], device="cpu", progress=False)
        child = os.fork()
        again = bytearray(tensor.nbytes)
        tensor.decode_into(again)
        df11.verify(sys.argv[1], device="cpu", progress=False)
        own = df11.open(sys.argv[1])["model.embed.weight"]
        own.decode_into(again)
        if child:
            assert os.waitpid(child, 0)[1] == 0
        assert again == buffer
        print("done")
        """,
        container,
    )
    assert "done" in out
