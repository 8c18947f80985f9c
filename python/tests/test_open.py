"""Opening, looking, and decoding on the CPU."""

import gzip
import json
import os
import shutil
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import pytest
from conftest import ROOT, SAMPLE, SIZES, run

import df11


def test_a_model_is_a_mapping_of_tensors(container: Path) -> None:
    model = df11.open(str(container))
    assert isinstance(model, Mapping)
    assert len(model) == len(SAMPLE) and set(model) == set(SAMPLE) == set(model.tensors)
    assert dict(model).keys() == model.keys() and len(model.items()) == len(model.values()) == len(
        model
    )
    assert "model.none" in model and "absent" not in model and 3 not in model
    assert model.get("absent") is None and model.get("absent", 7) == 7
    assert model.get("model.none").name == "model.none"
    for missing in (lambda: model["absent"], lambda: model.block("absent")):
        with pytest.raises(KeyError, match="absent"):
            missing()
    assert model.path == str(container) and model.is_complete and len(model.identity) == 64
    assert model.nbytes == sum(len(content) for _, _, content in SAMPLE.values())
    assert model.stored_bytes == container.stat().st_size
    assert model.weights_files == ["model.safetensors"] and model.side_files == []
    assert "10 tensors" in repr(model)


def test_tensors_tell_what_they_are(container: Path) -> None:
    model = df11.open(container)
    for name, (dtype, shape, content) in SAMPLE.items():
        tensor = model[name]
        assert (tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) == (
            name,
            dtype,
            shape,
            len(content),
        )
        assert tensor.block in {block.name for block in model.blocks}
        assert len(tensor.hash) == 64 and tensor.encoding in ("gap", "tile", "raw")
        assert name in repr(tensor)
        elements = len(content) // SIZES[dtype]
        if tensor.target == name:
            assert tensor.bits_per_element == (
                8 * tensor.stored_bytes / elements if elements else 0
            )
    first, tied = model["model.layers.0.mlp.weight"], model["model.layers.0.mlp.tied"]
    assert {first.target, tied.target} <= {first.name, tied.name} and first.hash == tied.hash


def test_decoded_bytes_are_the_originals(container: Path) -> None:
    model = df11.open(container)
    for name, (_, _, content) in SAMPLE.items():
        buffer = bytearray(len(content))
        model[name].decode_into(buffer)
        assert buffer == content, name
        view = memoryview(bytearray(len(content) + 6))[3:-3]
        model[name].decode_into(view)
        assert view == content, name


def test_the_reader_in_plain_python_agrees(container: Path) -> None:
    sys.path.insert(0, str(ROOT / "spec/python"))
    import df11_reader

    model = df11.open(container)
    with df11_reader.Container(container.read_bytes()) as judge:
        for name, tensor in model.items():
            buffer = bytearray(tensor.nbytes)
            tensor.decode_into(buffer)
            assert judge.tensor(name) == buffer, name


def test_rows_are_parts_of_tensors(container: Path) -> None:
    model = df11.open(container)
    for name, (_, shape, content) in SAMPLE.items():
        if not shape or shape[0] == 0:
            continue
        row = len(content) // shape[0]
        for start, stop in [
            (0, shape[0]),
            (1, 2),
            (shape[0] // 3, shape[0] // 2),
            (shape[0], shape[0]),
        ]:
            rows = model[name].rows(start, stop)
            assert (rows.ranges, rows.dtype, rows.tensor.name) == (
                ((start, stop),),
                model[name].dtype,
                name,
            )
            assert rows.shape == (stop - start, *shape[1:]) and rows.nbytes == row * (stop - start)
            one, other = bytearray(rows.nbytes), bytearray(rows.nbytes)
            rows.decode_into(one)
            model[name].decode_rows_into(start, stop, other)
            assert one == other == content[row * start : row * stop], (name, start, stop)
    for start, stop in [(0, 521), (5, 4)]:
        with pytest.raises(df11.ParameterError, match=r"indices.*0\.\.520"):
            model["model.layers.0.mlp.weight"].rows(start, stop)


def test_slices_are_what_indexing_gives(container: Path) -> None:
    np = pytest.importorskip("numpy")
    model = df11.open(container)
    tensor = model["model.layers.0.mlp.weight"]
    array = tensor.numpy()
    for index in [
        np.s_[:],
        np.s_[:, 32:64],
        np.s_[100:, -10:],
        np.s_[5],
        np.s_[-1, 3:],
        np.s_[7, 9],
        np.s_[400:90, 1:2],
        np.s_[::1, :900],
        np.s_[()],
    ]:
        part = tensor[index]
        assert part.shape == array[index].shape and part.nbytes == array[index].nbytes, index
        assert np.array_equal(part.numpy().view("u2"), array[index].view("u2")), index
    assert tensor[2:4, 60:].ranges == ((2, 4), (60, 70)) and "Slice" in repr(tensor[1])
    for wrong in [(0, 0, 0), 520, (0, -71)]:
        with pytest.raises(IndexError):
            tensor[wrong]
    for other in [np.s_[::2], np.s_[::-1], "one", None, 1.5]:
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


def test_models_without_a_mapping_decode_too(container: Path) -> None:
    for options in [{"memory_map": False}, {"checksums": False}]:
        model = df11.open(container, **options)
        buffer = bytearray(len(SAMPLE["model.embed.weight"][2]))
        model["model.embed.weight"].decode_into(buffer)
        assert buffer == SAMPLE["model.embed.weight"][2]


def test_views_outlive_their_model(container: Path) -> None:
    tensor = df11.open(container)["model.layers.0.mlp.weight"]
    block = df11.open(container).blocks[0]
    buffer = bytearray(tensor.nbytes)
    tensor.decode_into(buffer)
    assert buffer == SAMPLE["model.layers.0.mlp.weight"][2]
    block.decode_into(bytearray(block.nbytes))


def test_files_that_are_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(df11.IoError, match=r"opening .*absent") as caught:
        df11.open(tmp_path / "absent.df11")
    assert isinstance(caught.value, OSError) and caught.value.errno == 2
    with pytest.raises(
        df11.ParameterError, match=r"holds no \.df11 file; name a container"
    ) as caught:
        df11.open(tmp_path)
    assert isinstance(caught.value, ValueError) and caught.value.remedy.startswith(
        "name a container"
    )
    with pytest.raises(TypeError):
        df11.open(None)


def test_damage_is_found(container: Path, tmp_path: Path) -> None:
    content = container.read_bytes()
    damaged = tmp_path / "damaged.df11"
    damaged.write_bytes(content[: len(content) // 2])
    with pytest.raises(df11.CorruptError) as caught:
        df11.open(damaged)
    assert isinstance(caught.value, ValueError) and caught.value.place and caught.value.offset >= 0
    damaged.write_bytes(b"no container" * 1000)
    with pytest.raises(df11.Error):
        df11.open(damaged)
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


VECTORS = json.loads((ROOT / "spec/vectors/manifest.json").read_text())["vectors"]
CLASSES = {
    "Corrupt": df11.CorruptError,
    "Limit": df11.LimitError,
    "Unsupported": df11.UnsupportedError,
}


def vector(row: dict[str, object], folder: Path) -> Path:
    path = ROOT / "spec/vectors" / str(row["file"])
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    (folder / "vector.df11").write_bytes(data)
    return folder / "vector.df11"


@pytest.mark.parametrize(
    "row", [row for row in VECTORS if row["expect"] == "valid"], ids=lambda row: row["file"]
)
def test_valid_vectors_decode(row: dict[str, object], tmp_path: Path) -> None:
    model = df11.open(vector(row, tmp_path))
    decoded = {}
    for name, tensor in model.items():
        try:
            # Tensors that cannot be decoded may be of any size.
            buffer = bytearray(tensor.nbytes if tensor.encoding != "unknown" else 0)
            tensor.decode_into(buffer)
        except (df11.UnsupportedError, df11.ParameterError):
            assert tensor.encoding == "unknown"
            continue
        decoded[name] = sha256(buffer).hexdigest()
    assert decoded == row.get("tensors", {})
    model.verify(progress=False)


@pytest.mark.parametrize(
    "row", [row for row in VECTORS if row["expect"] != "valid"], ids=lambda row: row["file"]
)
def test_invalid_vectors_are_errors_and_nothing_else(
    row: dict[str, object], tmp_path: Path
) -> None:
    kinds = row["expect"] if isinstance(row["expect"], list) else [row["expect"]]
    expected = tuple(CLASSES[kind] for kind in kinds)
    path = vector(row, tmp_path)
    if row["level"] == "open":
        with pytest.raises(expected):
            df11.open(path)
        return
    model = df11.open(path)
    if row["level"] == "load":
        with pytest.raises(expected):
            for tensor in model.values():
                tensor.decode_into(bytearray(tensor.nbytes))
    else:
        with pytest.raises(expected):
            model.verify(progress=False)


def test_a_folder_of_shards_is_one_model(container: Path, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    shutil.copy(container, tmp_path / "sub" / "model.df11")
    model = df11.open(tmp_path)
    assert len(model) == len(SAMPLE)
    assert model.shards == [
        {
            "path": str(tmp_path / "sub" / "model.df11"),
            "index": 0,
            "count": 1,
            "bytes": container.stat().st_size,
        }
    ]


def test_inspect_tells_all(container: Path) -> None:
    told = df11.inspect(container)
    assert json.loads(json.dumps(told)) == told
    assert told == df11.inspect(df11.open(container))
    assert told["complete"] and told["tensor_count"] == len(SAMPLE) and told["weights_files"] == 1
    assert told["total"]["decoded_bytes"] == sum(len(content) for _, _, content in SAMPLE.values())
    tensors = [tensor for block in told["blocks"] for tensor in block["tensors"]]
    assert sorted(tensor["name"] for tensor in tensors) == sorted(SAMPLE)
    assert all("tensors" not in block for block in df11.inspect(container, tensors=False)["blocks"])
    # As the command says it, except for what only it knows.
    said = json.loads(
        run(
            "import sys; from df11.__main__ import main; main()",
            "inspect",
            container,
            "--tensors",
            "--json",
        )
    )
    for key in ["identity", "complete", "shards", "container_bytes", "tensor_count"]:
        assert said[key] == told[key], key
    for theirs, ours in zip(said["blocks"], told["blocks"], strict=True):
        for key in ["name", "tensor_count", "elements", "decoded_bytes", "stored_bytes", "weights"]:
            assert theirs[key] == ours[key], key
        for tensor, mine in zip(theirs["tensors"], ours["tensors"], strict=True):
            assert {key: tensor[key] for key in mine} == mine


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
        child = os.fork()
        again = bytearray(tensor.nbytes)
        tensor.decode_into(again)
        if child:
            assert os.waitpid(child, 0)[1] == 0
        assert again == buffer
        print("done")
        """,
        container,
    )
    assert "done" in out
