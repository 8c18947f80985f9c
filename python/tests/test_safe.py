"""`safe_open`, `load_file` and `save_file` beside those of safetensors, on the same tensors."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from conftest import write_safetensors
from safetensors.torch import load_file, save_file

import df11
import df11.torch
from df11._platform import IS_WINDOWS


def tensors() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(96, 520, generator=generator)
    return {
        "b.weight": (0.02 * normal).bfloat16(),
        "a.bias": torch.arange(7),
        "c.cube": (0.02 * normal).reshape(4, 24, 520).bfloat16(),
        "scale": torch.tensor(3.5),
    }


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("safe")
    file, container = folder / "x.safetensors", folder / "x.df11"
    save_file(tensors(), file, metadata={"format": "pt", "made": "here"})
    df11.compress(file, container, progress=False)
    return file, container


def same(one: Any, other: Any) -> bool:
    return bool(one.dtype == other.dtype and one.shape == other.shape and (one == other).all())


def opened(both: tuple[Path, Path], framework: str = "pt") -> tuple[Any, Any]:
    """The file by safetensors, and the container."""
    theirs = safetensors.safe_open(both[0], framework=framework)
    return theirs, df11.safe_open(both[1], framework=framework)


def test_all_that_it_answers_is_what_safetensors_answers(both: tuple[Path, Path]) -> None:
    with (
        safetensors.safe_open(both[0], framework="pt", device="cpu") as theirs,
        df11.safe_open(both[1], framework="pt", device="cpu") as ours,
    ):
        assert ours.keys() == list(theirs.keys())
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata() == {"format": "pt", "made": "here"}
        for name in theirs.keys():  # noqa: SIM118 (no mapping)
            assert same(ours.get_tensor(name), theirs.get_tensor(name))
            mine, yours = ours.get_slice(name), theirs.get_slice(name)
            assert (mine.get_shape(), mine.get_dtype()) == (yours.get_shape(), yours.get_dtype())
        assert ours.get_tensors().keys() == theirs.get_tensors().keys()
        assert isinstance(ours, df11.safe_open)


S = np.s_
INDICES = [0, -1, S[1:3], S[-3:], S[3:1], S[0:100_000], S[0:8:2], S[:, 256:300], S[:, 5], (0, 0)]
INDICES += [..., S[..., 0:2], None, [0, 2], S[:, [1, 3]], S[5:33, 17:517]]


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("name", ["b.weight", "c.cube"])
def test_slices_are_those_of_safetensors(both: tuple[Path, Path], name: str, index: Any) -> None:
    theirs, ours = opened(both)
    assert same(ours.get_slice(name)[index], theirs.get_slice(name)[index])


@pytest.mark.parametrize("index", [5000, (0, 0, 0, 0), S[:, 5000]], ids=str)
def test_indices_that_there_are_not(both: tuple[Path, Path], index: Any) -> None:
    for each in opened(both):
        with pytest.raises(IndexError):
            each.get_slice("b.weight")[index]


def test_what_is_refused(both: tuple[Path, Path]) -> None:
    with pytest.raises(df11.ParameterError, match=r'"tf" is not known|\'tf\' is not known; choose'):
        df11.safe_open(both[1], framework="tf")
    with pytest.raises(df11.ParameterError, match="NumPy has no devices"):
        df11.safe_open(both[1], framework="np", device="cuda")
    opened = df11.safe_open(both[1], framework="pt")
    for call in (opened.get_tensor, opened.get_slice):
        with pytest.raises(KeyError, match="nothing"):
            call("nothing")
    kept = opened.get_slice("b.weight")
    with opened:
        pass
    for use in (opened.keys, opened.metadata, lambda: kept[0]):
        with pytest.raises(df11.ParameterError, match="closed; open it again"):
            use()


#: All types that safetensors writes, with the bits of one element.
KINDS = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"], 8),
    **dict.fromkeys(["F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["F16", "BF16", "I16", "U16"], 16),
    **dict.fromkeys(["F32", "I32", "U32"], 32),
    **dict.fromkeys(["F64", "I64", "U64", "C64"], 64),
    "F4": 4,
}


def of_kind(folder: Path, kind: str, *shape: int, bits: int) -> tuple[Path, Path]:
    """A file with a tensor of this type, and a container of it."""
    count = np.prod(shape, dtype=int) * bits // 8
    data = (np.arange(count) % (2 if kind == "BOOL" else 251)).astype("u1").tobytes()
    file, container = folder / "x.safetensors", folder / "x.df11"
    write_safetensors(file, {"x": (kind, shape, data)})
    df11.compress(file, container, progress=False)
    return file, container


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("shape", [(4, 16), (2,), (0, 2), (3, 0)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_types_are_those_of_safetensors(
    kind: str, shape: tuple[int, ...], backend: str, tmp_path: Path
) -> None:
    file, container = of_kind(tmp_path, kind, *shape, bits=KINDS[kind])
    expected = load_file(file)["x"]  # by pread it fails for F4
    with df11.safe_open(container, framework="pt", backend=backend) as opened:
        several = [opened.get_tensor("x"), opened.get_tensors()["x"]]
        assert opened.get_slice("x").get_shape() == list(shape)
    several.append(df11.torch.load_file(container, backend=backend)["x"])
    for found in several:
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))


def test_parts_of_pairs(tmp_path: Path) -> None:
    """safetensors itself gives no slice of F4: rows of what it loads."""
    file, container = of_kind(tmp_path, "F4", 4, 16, bits=4)
    with df11.safe_open(container, framework="pt") as opened:
        part, packed = opened.get_slice("x"), load_file(file)["x"].view(torch.uint8)
        for key, like in ((S[1:3], packed[1:3]), (2, packed[2]), (S[:, 4:10], packed[:, 2:5])):
            found = part[key]
            assert found.dtype == torch.float4_e2m1fn_x2
            assert torch.equal(found.view(torch.uint8), like)
        for key in (S[:, 1:3], S[:, :3], S[::2], [0, 1]):
            with pytest.raises(df11.ParameterError):
                part[key]


@pytest.mark.parametrize("kind", ["F6_E2M3", "F6_E3M2"])
def test_types_that_safetensors_cannot_give(kind: str, tmp_path: Path) -> None:
    file, container = of_kind(tmp_path, kind, 4, 16, bits=6)
    with pytest.raises(safetensors.SafetensorError):
        load_file(file)
    with pytest.raises(df11.ParameterError, match=kind):
        df11.torch.load_file(container)
    data = bytearray(48)
    df11.open(container)["x"].decode_into(data)
    assert data == bytes(range(48))


def test_backends(both: tuple[Path, Path]) -> None:
    for name, call in (("theirs", load_file), ("ours", df11.torch.load_file)):
        place = both[0] if name == "theirs" else both[1]
        found = [call(place, backend=backend) for backend in ("mmap", "pread")]
        assert all(same(found[0][name], value) for name, value in found[1].items())
        with pytest.raises((safetensors.SafetensorError, df11.ParameterError), match="mmap"):
            call(place, backend="other")


def test_arrays_of_numpy(both: tuple[Path, Path]) -> None:
    theirs, ours = opened(both, "np")
    found = ours.get_tensor("a.bias")
    assert isinstance(found, np.ndarray) and same(found, theirs.get_tensor("a.bias"))
    assert same(ours.get_slice("a.bias")[2:4], theirs.get_slice("a.bias")[2:4])


def test_metadata_of_several_files(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    weights = tensors()["b.weight"]
    index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        file = tmp_path / "model" / name
        metadata = {"format": "pt", "part": str(number)}
        save_file({f"layers.{number}.weight": weights + number}, file, metadata=metadata)
        index["weight_map"][f"layers.{number}.weight"] = name
    df11.compress(tmp_path / "model", tmp_path / "out", progress=False)
    opened = df11.safe_open(tmp_path / "out", framework="pt")
    assert opened.offset_keys() == ["layers.1.weight", "layers.2.weight"]
    with pytest.raises(df11.ParameterError, match=r"'part' different values; Model.weights_header"):
        opened.metadata()
    model = df11.open(tmp_path / "out")
    assert all('"part"' in model.weights_header(path) for path in model.weights_files)
    with pytest.raises(df11.ParameterError, match="no weights file"):
        model.weights_header("other")


@pytest.mark.parametrize("indexed", [True, False])
def test_a_folder_that_lacks_a_shard(tmp_path: Path, indexed: bool) -> None:
    (tmp_path / "model").mkdir()
    names = {number: f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    for number, name in names.items():
        file = tmp_path / "model" / name
        save_file({f"{number}.weight": tensors()["b.weight"]}, file)
    if indexed:
        places = {f"{number}.weight": name for number, name in names.items()}
        index = {"metadata": {}, "weight_map": places}
        (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    df11.compress(tmp_path / "model", tmp_path / "out", progress=False)
    whole = df11.torch.load_file(tmp_path / "out")
    assert len(whole) == 3
    (tmp_path / "out/model-00002-of-00003.df11").unlink()
    name = r" \(with model-00002-of-00003\.safetensors\)" if indexed else ""
    words = rf"shard 2 of 3 is missing{name}; fetch"
    for work in (df11.safe_open, lambda path, **_: df11.torch.load_file(path)):
        with pytest.raises(df11.ParameterError, match=words):
            work(tmp_path / "out", framework="pt")
    with pytest.raises(df11.ParameterError, match=words):
        df11.open(tmp_path / "out").check_complete()
    # One that is named opens by itself, as a file of safetensors does.
    assert list(df11.torch.load_file(tmp_path / "out/model-00001-of-00003.df11")) == ["1.weight"]


def test_a_folder_has_the_tensors_beside_its_containers(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    own, beside = tensors(), {"z.head": torch.ones(3, 4), "a.head": torch.zeros(2)}
    save_file(own, tmp_path / "model/model.safetensors")
    df11.compress(tmp_path / "model", tmp_path / "out", progress=False)
    file = tmp_path / "out/df11.safetensors"
    save_file(beside, file)
    expected = own | beside
    for found in (
        df11.torch.load_file(tmp_path / "out"),
        df11.torch.load_compressed(tmp_path / "out"),
    ):
        assert found.keys() == expected.keys()
        assert all(same(found[name], value) for name, value in expected.items())
    with df11.safe_open(tmp_path / "out", "np") as opened:
        assert opened.keys() == sorted(expected) == sorted(opened.offset_keys())
        assert opened.get_slice("z.head")[1:].tolist() == [[1.0] * 4] * 2
        assert opened.get_tensor("a.head").tolist() == [0.0, 0.0]
    for call in (opened.keys, lambda: opened.get_tensor("a.head")):
        with pytest.raises(df11.ParameterError, match="closed"):
            call()
    del found  # Windows writes to no file that is mapped
    save_file({"b.weight": own["b.weight"]}, file)
    with pytest.raises(ValueError, match=r"df11\.safetensors has b\.weight, which the containers"):
        df11.safe_open(tmp_path / "out", "pt")
    file.write_bytes(b"damaged")
    with pytest.raises(df11.CorruptError, match=r"df11\.safetensors.*remove the file"):
        df11.torch.load_compressed(tmp_path / "out")


def test_dictionaries_of_tensors(both: tuple[Path, Path], tmp_path: Path) -> None:
    ours, theirs = df11.torch.load_file(both[1]), load_file(both[0])
    assert list(ours) == sorted(theirs) and all(same(ours[name], theirs[name]) for name in theirs)
    out = tmp_path / "saved.df11"
    report = df11.torch.save_file(tensors(), out, metadata={"by": "me"})
    assert (report.coded_tensors, report.raw_tensors) == (2, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["saved.df11"]
    back = df11.torch.load_file(out)
    assert all(same(back[name], value) for name, value in tensors().items())
    df11.decompress(out, tmp_path / "back.safetensors", progress=False)
    save_file(tensors(), tmp_path / "plain.safetensors", metadata={"by": "me"})
    plain = (tmp_path / "plain.safetensors").read_bytes()
    assert (tmp_path / "back.safetensors").read_bytes() == plain


def test_what_saving_refuses(tmp_path: Path) -> None:
    out, shared = tmp_path / "saved.df11", tensors()["b.weight"]
    with pytest.raises(df11.ParameterError, match=r"does not end in .df11; end its name"):
        df11.torch.save_file(tensors(), tmp_path / "saved.safetensors")
    for bad, error in (({"a": shared, "b": shared}, RuntimeError), ({"a": shared.T}, ValueError)):
        for save, place in ((save_file, tmp_path / "theirs"), (df11.torch.save_file, out)):
            with pytest.raises(error):
                save(bad, place)
    assert not out.exists()
    df11.torch.save_file(tensors(), out)
    # Arguments of Python, not options of the command.
    with pytest.raises(df11.ParameterError, match=r"exists; .* overwrite=True$") as told:
        df11.torch.save_file(tensors(), out)
    assert "--" not in str(told.value) and told.value.remedy.endswith("overwrite=True")
    df11.torch.save_file({"only": shared}, out, overwrite=True)
    assert list(df11.open(out)) == ["only"]


def test_a_notebook_shows_the_blocks(both: tuple[Path, Path], tmp_path: Path) -> None:
    model = df11.open(both[1])
    shown = model._repr_html_()
    told = df11.inspect(model)
    for block in told["blocks"]:
        cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", shown)
        at = cells.index(block["name"])
        assert cells[at + 1] == f"{block['tensor_count']:,}"
    assert f"{told['total']['bits_per_weight']:.2f}" in shown
    save_file({f"<b>.{i}.weight": torch.zeros(2) for i in range(90)}, tmp_path / "y.safetensors")
    name, escaped = ("&y.df11", "&amp;y") if IS_WINDOWS else ("<y>.df11", "&lt;y&gt;")
    df11.compress(tmp_path / "y.safetensors", tmp_path / name, progress=False)
    shown = df11.open(tmp_path / name)._repr_html_()
    assert escaped in shown and "<b>." not in shown
