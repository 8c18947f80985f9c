"""The node for ComfyUI: tensors that it hands over, layers that hold them, LoRAs, and the nodes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from comfy_stand_in import (
    LowVramPatch,
    Management,
    ModelPatcher,
    Operations,
    ProgressBar,
    install,
)
from conftest import on_devices
from safetensors.torch import save_file
from torch import nn

import df11
from df11._encoding import encode
from df11.torch import CompressedTensor, load_compressed

ROWS, COLUMNS = 320, 288
KEY = "inner.linear.weight"


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    shapes = {
        "inner.linear.weight": (ROWS, COLUMNS),
        "inner.linear.bias": (ROWS,),
        "inner.conv.weight": (128, 96, 3, 3),
        "inner.conv.bias": (128,),
        "inner.rows.weight": (1200, 256),
        "inner.norm.weight": (96,),
        "inner.norm.bias": (96,),
    }
    return {name: (0.02 * torch.randn(shape)).bfloat16() for name, shape in shapes.items()}


class Inner(nn.Module):
    def __init__(self, ops: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = ops.Linear(COLUMNS, ROWS, dtype=dtype)
        self.conv = ops.Conv2d(96, 128, 3, dtype=dtype)
        self.rows = ops.Embedding(1200, 256, dtype=dtype)
        self.norm = ops.LayerNorm(96, dtype=dtype)


class Outer(nn.Module):
    def __init__(self, ops: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.inner = Inner(ops, dtype)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("diffusion_models", "text_encoders", "checkpoints"):
        (folder / name).mkdir()
    save_file(weights(), folder / "diffusion_models" / "one.safetensors")
    return folder


@pytest.fixture(scope="module")
def node(models: Path) -> Any:
    return install(models)


@pytest.fixture(scope="module")
def state(models: Path, node: Any) -> dict[str, torch.Tensor]:
    compress = node.NODE_CLASS_MAPPINGS["Df11Compress"]()
    (path,) = compress.compress("diffusion_models/one.safetensors", overwrite=False)
    return load_compressed(path)


def operations(node: Any) -> Any:
    import df11_node.operations  # type: ignore[import-not-found]

    return df11_node.operations.operations(Operations)


def loaded(node: Any, state: Any, dtype: torch.dtype = torch.bfloat16) -> Outer:
    model = Outer(operations(node), dtype).requires_grad_(False)
    missing, unexpected = model.load_state_dict(dict(state), strict=False)
    assert not missing and not unexpected
    return model


def ordinary(dtype: torch.dtype = torch.bfloat16) -> Outer:
    model = Outer(Operations, dtype).requires_grad_(False)
    model.load_state_dict(weights())
    return model


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and bool((one == other).all())


def input_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_load_compressed_gives_the_tensors_of_the_file(state: Any) -> None:
    expected = weights()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        is_matrix = value.dim() > 1
        assert isinstance(state[name], CompressedTensor) == is_matrix
        assert same(state[name].decode() if is_matrix else state[name], value)


def test_load_compressed_checks_what_it_reads(models: Path, state: Any, tmp_path: Path) -> None:
    content = bytearray((models / "diffusion_models" / "one.df11").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "bad.df11").write_bytes(content)
    with pytest.raises(df11.CorruptError):
        load_compressed(tmp_path / "bad.df11")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_layers_give_the_bits_of_ordinary_ones(node: Any, state: Any, dtype: Any) -> None:
    ours, theirs = loaded(node, state, dtype).inner, ordinary(dtype).inner
    image = torch.randn(1, 96, 6, 6).to(dtype)
    numbers = torch.tensor([[3, 1199], [0, 3]])
    assert same(ours.linear(input_of(dtype)), theirs.linear(input_of(dtype)))
    assert same(ours.conv(image), theirs.conv(image))
    assert same(ours.rows(numbers), theirs.rows(numbers))
    assert same(ours.rows(numbers, out_dtype=torch.float32), theirs.rows(numbers).float())
    assert ours.linear.is_compressed and ours.conv.is_compressed
    # Which others read too, and as F16 it would have to be rounded for them.
    assert ours.rows.is_compressed == (dtype != torch.float16)
    assert dtype != torch.float16 or same(ours.rows.weight, theirs.rows.weight)


def test_what_computes_in_another_dtype_gets_weights_of_that(node: Any, state: Any) -> None:
    layer = loaded(node, state, torch.float16).inner.linear
    expected = weights()[KEY].half().float()
    bias = weights()["inner.linear.bias"].half().float()
    x = input_of(torch.float32)
    assert same(layer(x), nn.functional.linear(x, expected, bias))


def test_a_model_has_no_memory_for_large_weights_before_it_is_loaded(node: Any) -> None:
    inner = Outer(operations(node)).inner
    assert all(layer.weight.is_meta for layer in (inner.linear, inner.conv, inner.rows))
    inner.to("cpu", torch.float32)
    assert inner.linear.weight.is_meta and inner.norm.weight.dtype == torch.float32


def test_sizes_are_those_of_compressed_bytes(node: Any, state: Any) -> None:
    model = loaded(node, state)
    told = sum(value.nbytes for value in model.state_dict().values())
    assert told == sum(value.nbytes for value in state.values())
    assert told < 0.75 * sum(value.nbytes for value in weights().values())


def test_a_missing_weight_is_told_and_zero(node: Any, state: Any) -> None:
    model = Outer(operations(node))
    some = {name: value for name, value in state.items() if name != KEY}
    missing, _ = model.load_state_dict(some, strict=False)
    assert missing == [KEY]
    assert not model.inner.linear.weight.any()


def test_another_shape_is_refused(node: Any, state: Any) -> None:
    other = {**state, KEY: state["inner.rows.weight"]}
    with pytest.raises(RuntimeError, match="size mismatch"):
        Outer(operations(node)).load_state_dict(other, strict=False)


def test_ordinary_weights_get_the_dtype_of_the_layer(node: Any) -> None:
    model = Outer(operations(node), torch.float32)
    model.load_state_dict(weights())
    assert same(model.inner.linear.weight, weights()[KEY].float())
    x = input_of(torch.float32)
    assert same(model.inner.linear(x), ordinary(torch.float32).inner.linear(x))


def test_ordinary_weights_take_the_place_of_compressed_ones(node: Any, state: Any) -> None:
    from df11_node.operations import compressed_layers

    model = loaded(node, state)
    new = {name: value + 1 for name, value in weights().items()}
    model.load_state_dict(new)
    layer = model.inner.linear
    assert not list(compressed_layers(model))
    layer.close()
    model.to("cpu", torch.float32)
    assert same(layer.weight, new[KEY].float())


def test_embeddings_with_a_largest_norm_are_refused(node: Any) -> None:
    with pytest.raises(ValueError, match="max_norm"):
        operations(node).Embedding(8, 4, max_norm=1.0)


@on_devices
def test_moves_keep_it_compressed_and_return_to_the_file(
    node: Any, state: Any, device: str
) -> None:
    model = loaded(node, state)
    layer = model.inner.linear
    place = layer.weight._arrays[1].data_ptr()
    expected = layer(input_of(torch.bfloat16))
    model.to(device)
    assert layer.is_compressed and layer.weight.device.type == device
    found = layer(input_of(torch.bfloat16).to(device))
    assert device != "cpu" or same(found, expected)
    model.to("cpu")
    assert layer.weight._arrays[1].data_ptr() == place


def test_another_dtype_keeps_it_compressed(node: Any, state: Any) -> None:
    model = loaded(node, state).to(torch.float16)
    assert model.inner.linear.is_compressed
    x = input_of(torch.float16)
    assert same(model.inner.linear(x), ordinary(torch.float16).inner.linear(x))


@on_devices
def test_a_layer_on_the_host_is_brought_to_its_input(node: Any, state: Any, device: str) -> None:
    layer = loaded(node, state).inner.linear
    found = layer(input_of(torch.bfloat16).to(device))
    assert found.device.type == device
    assert layer.weight.device.type == "cpu" and layer.is_compressed


def patcher(node: Any, state: Any) -> Any:
    import df11_node.patching as patching  # type: ignore[import-not-found]

    found = ModelPatcher(loaded(node, state))
    patching.adopt(found)
    return found


def patched(number: float) -> torch.Tensor:
    x, expected = input_of(torch.bfloat16), weights()
    weight = (expected[KEY].float() + number).bfloat16()
    return nn.functional.linear(x, weight, expected["inner.linear.bias"])


def test_a_lora_is_added_at_each_use_on_the_cpu(node: Any, state: Any) -> None:
    found = patcher(node, state)
    layer, x = found.model.inner.linear, input_of(torch.bfloat16)
    plain, size = layer(x), found.model_size()
    found.patches = {KEY: [(0.125, None), (0.25, None)], "inner.norm.weight": [(1.0, None)]}
    found.load()
    assert found.replaced == ["inner.norm.weight"]
    assert same(layer(x), patched(0.375)) and same(layer(x), patched(0.375))
    assert layer.is_compressed and not same(layer(x), plain)
    assert sum(value.nbytes for value in found.model.state_dict().values()) == size
    found.unpatch_model()
    assert same(layer(x), plain)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest, node: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU, or the CPU in its place, which compresses as it stores."""
    import df11_node.operations as operations

    monkeypatch.setattr(Management, "is_gpu", True)
    if request.param == "cuda":
        return torch.device("cuda", 0)

    def packed(value: torch.Tensor) -> CompressedTensor | None:
        made = encode(value.flatten(1))
        return made and CompressedTensor(*made, value.shape)

    monkeypatch.setattr(operations, "pack", packed)
    return torch.device("cpu")


def on_gpu(node: Any, state: Any, gpu: torch.device, number: float) -> Any:
    """The patcher of a model for a GPU, with a LoRA for two of its layers."""
    found = patcher(node, state)
    found.load_device = gpu
    found.patches = {key: [(number, None)] for key in (KEY, "inner.conv.weight")}
    return found


def value_of(found: Any, gpu: torch.device) -> torch.Tensor:
    y = found.model.inner.linear(input_of(torch.bfloat16).to(gpu))
    assert y.device == gpu
    return y.cpu()


def refuse(*_: Any) -> None:
    raise AssertionError("a LoRA is added at a use")


def is_patched(found: Any, gpu: torch.device, number: float) -> bool:
    """Whether the product has the bits of the weight with a LoRA. A GPU adds in another order."""
    weight = (weights()[KEY].float() + number).bfloat16()
    expected = nn.functional.linear(
        input_of(torch.bfloat16).to(gpu), weight.to(gpu), weights()["inner.linear.bias"].to(gpu)
    )
    return same(value_of(found, gpu), expected.cpu())


def test_a_lora_is_added_once_on_a_gpu(
    node: Any, state: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = on_gpu(node, state, gpu, 0.125)
    found.load()
    inner = found.model.inner
    monkeypatch.setattr("comfy.lora.calculate_weight", refuse)
    assert is_patched(found, gpu, 0.125)
    assert inner.linear.is_packed and inner.conv.is_packed and not inner.rows.is_packed
    assert same(inner.conv.weight.decode().cpu(), weights()["inner.conv.weight"] + 0.125)
    found.unpatch_model(torch.device("cpu"))
    assert not inner.linear.is_packed and same(inner.linear.weight.decode(), weights()[KEY])


def test_another_strength_and_none_give_their_bits(node: Any, state: Any, gpu: Any) -> None:
    found = on_gpu(node, state, gpu, 0.125)
    found.load()
    for number in (0.5, 0.125):
        found.unpatch_model()
        found.patches[KEY] = [(number, None)]
        found.load()
        assert is_patched(found, gpu, number)
    found.unpatch_model()
    assert is_patched(found, gpu, 0) and found.model.inner.linear.is_compressed


def test_sizes_are_exact_once_it_is_loaded(node: Any, state: Any, gpu: Any) -> None:
    found = on_gpu(node, state, gpu, 0.125)
    plain = patcher(node, state).model_size()
    assert found.model_size() > plain and found.clone().model_size() == found.model_size()
    found.load()
    inner = found.model.inner
    there = sum(value.nbytes for value in found.model.state_dict().values())
    assert found.model.model_loaded_weight_memory == found.model_size() == there
    sizes = {name: size for _, size, name, *_ in found._load_list()}
    assert sizes["inner.linear"] == inner.linear.weight.nbytes + inner.linear.bias.nbytes
    assert found.clone().model_size() == there
    found.unpatch_model(torch.device("cpu"))
    found.patches = {}
    assert found.model_size() == plain


@pytest.mark.gpu
def test_sizes_are_exact_for_a_part(node: Any, state: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Management, "is_gpu", True)
    found = on_gpu(node, state, torch.device("cuda", 0), 0.125)
    found.load(offloaded=["inner.linear"])
    there = [value for value in found.model.state_dict().values() if value.is_cuda]
    assert found.model.model_loaded_weight_memory == sum(value.nbytes for value in there)
    assert found.model.inner.linear.patch._there[0] == found.load_device
    assert len(there) == 5 and is_patched(found, found.load_device, 0.125)
    found.load()
    there = [*found.model.state_dict().values()]
    assert found.model.model_loaded_weight_memory == sum(value.nbytes for value in there)
    assert found.model.inner.linear.is_packed and not Management.pinned


@pytest.mark.gpu
def test_a_weight_is_packed_for_products_with_few_rows_of_x(
    node: Any, state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Management, "is_gpu", True)
    found, gpu = patcher(node, state), torch.device("cuda", 0)
    found.load_device = gpu
    found.load()
    layer, x = found.model.inner.linear, input_of(torch.bfloat16).to(gpu)
    expected = nn.functional.linear(
        x, weights()[KEY].to(gpu), weights()["inner.linear.bias"].to(gpu)
    )
    stored = layer.weight.nbytes
    many = x.flatten(0, -2).repeat(100, 1)[:17]
    layer(many)
    assert layer.weight.nbytes == stored and not layer.is_few
    assert same(layer(x), expected) and layer.weight.nbytes > stored

    def check() -> None:
        there = sum(value.nbytes for value in found.model.state_dict().values())
        assert found.model.model_loaded_weight_memory == found.model_size() == there

    check()
    found.unpatch_model(torch.device("cpu"))
    assert layer.is_compressed and layer.weight.nbytes <= stored
    found.load()
    assert layer.weight.nbytes > stored and same(layer(x), expected)
    check()
    found.patches, found.patches_uuid = {KEY: [(0.125, None)]}, object()
    found.load()
    assert layer.is_packed and is_patched(found, gpu, 0.125)
    check()
    found.unpatch_model()
    found.patches, found.patches_uuid = {}, object()
    found.load()
    assert not layer.is_packed and same(layer(x), expected)
    check()


class Matrices:
    """Patches of ComfyUI have matrices in a tuple, with others that are None."""

    weights = (torch.zeros(1000, 4), torch.zeros(4, 1000), None)


def test_comfyui_is_told_what_each_use_of_an_offloaded_weight_takes(node: Any, state: Any) -> None:
    found = patcher(node, state)
    layer = found.model.inner.linear
    stored, numbers, bias = layer.host.nbytes, layer.host.numel(), layer.bias.nbytes
    listed = {name: (each, size) for each, size, name, *_ in found._load_list()}
    assert listed["inner.linear"] == (stored + 2 * numbers + bias, stored + bias)
    found.patches = {KEY: [(0.125, None)]}
    listed = {name: each for each, _, name, *_ in found._load_list()}
    # In F32: the weight, the product of the LoRA's matrices, and that times its strength.
    assert listed["inner.linear"] == stored + (2 + 2 + 3 * 4) * numbers + bias


def test_the_matrices_of_a_lora_take_memory_if_a_part_is_offloaded(node: Any, state: Any) -> None:
    found = patcher(node, state)
    size, taken = found.model_size(), 2 * 4000 * 4
    found.patches = {KEY: [(0.125, Matrices())]}
    found._told = found._sizes()
    for limit, expected in ((size - 1, size - 1 - taken), (taken // 2, 0.1), (size, size), (0, 0)):
        found.load(offloaded=["inner.linear"], lowvram_model_memory=limit)
        found.unpatch_model()
        assert found.limit == expected


@pytest.mark.gpu
def test_no_lora_is_left_out_because_memory_is_short(
    node: Any, state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Management, "is_gpu", True)
    monkeypatch.setattr("df11_node.patching.sum_bytes", lambda *_: 1 << 50)
    found = on_gpu(node, state, torch.device("cuda", 0), 0.125)
    found.load()
    assert not found.model.inner.linear.is_packed
    with pytest.raises(torch.OutOfMemoryError):
        value_of(found, found.load_device)


def no_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError


def test_a_layer_computes_again_once_memory_is_in_one_piece(
    node: Any, state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = loaded(node, state).inner.linear, input_of(torch.bfloat16)
    expected, compute, calls = layer(x), type(layer).compute, []

    def computed(*args: Any) -> torch.Tensor:
        calls.append("compute")
        return compute(*args) if "join" in calls else no_memory()

    monkeypatch.setattr(type(layer), "compute", computed)
    management = "comfy.model_management.soft_empty_cache"
    monkeypatch.setattr(management, lambda: calls.append("join"))
    assert same(layer(x), expected) and calls == ["compute", "join", "compute"]
    calls.clear()
    monkeypatch.setattr(management, lambda: None)
    with pytest.raises(torch.OutOfMemoryError):
        layer(x)
    assert calls == ["compute", "compute"]


@pytest.mark.parametrize("packs", [lambda value: None, no_memory])
def test_what_is_not_packed_gets_the_lora_at_each_use(
    node: Any, state: Any, gpu: Any, packs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("df11_node.operations.pack", packs)
    found = on_gpu(node, state, gpu, 0.125)
    found.load()
    assert is_patched(found, gpu, 0.125) and not found.model.inner.linear.is_packed
    there = sum(value.nbytes for value in found.model.state_dict().values())
    assert found.model.model_loaded_weight_memory == found.model_size() == there


def test_hooks_return_to_the_weight_with_its_lora(node: Any, state: Any, gpu: Any) -> None:
    found = on_gpu(node, state, gpu, 0.125)
    found.load()
    found.patch_hook_weight_to_device(None, {KEY: [1]}, KEY)
    layer = found.model.inner.linear
    assert same(layer.weight.cpu(), (weights()[KEY].float() + 0.125).bfloat16() + 1)
    assert not layer.is_compressed
    found.unpatch_hooks()
    assert is_patched(found, gpu, 0.125) and found.model.inner.linear.is_packed


def test_an_offloaded_weight_is_pinned_within_the_limit(
    node: Any, state: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = on_gpu(node, state, gpu, 0.125)
    layer = found.model.inner.linear
    found.load(offloaded=["inner.linear"])
    memory, gathered = layer.pinned
    assert found.pinned == {KEY} and [*Management.pinned.values()] == [memory.nbytes]
    copy = gathered.within(memory.to(gpu))
    assert same(copy.decode().cpu(), weights()[KEY])
    assert is_patched(found, gpu, 0.125) and not layer.is_packed
    found.load()
    assert layer.pinned is None and not Management.pinned and not found.pinned
    found.unpatch_model(torch.device("cpu"))
    monkeypatch.setattr(Management, "most_pinned", 0)
    found.load(offloaded=["inner.linear"])
    assert layer.pinned is None and is_patched(found, gpu, 0.125)


@pytest.mark.parametrize(
    ("is_clip", "is_eager", "shape"),
    [(False, False, None), (False, False, (1, 1)), (False, True, None), (True, False, None)],
)
def test_sums_are_those_of_how_comfyui_would_load_the_model(
    node: Any,
    state: Any,
    is_clip: bool,
    is_eager: bool,
    shape: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import df11_node.patching as patching

    monkeypatch.setattr(patching, "is_dynamic", lambda device: True)
    monkeypatch.setattr(patching, "is_eager", lambda: is_eager)
    monkeypatch.setattr(patching, "SMALL_BYTES", 1 << 30)
    found, numbers = patcher(node, state), (0.125, 2.0**-12, 2.0**-12)
    found.patches, found.is_clip = {KEY: [(number, shape) for number in numbers]}, is_clip
    found.load()
    weight, bias = weights()[KEY], weights()["inner.linear.bias"]
    late = weight.clone()
    for number in numbers:
        late += number  # rounds each time
    at_once = (weight.float() + sum(numbers)).bfloat16()
    assert not same(late, at_once)
    x = input_of(torch.bfloat16)
    is_late = not (is_clip or is_eager or shape)
    expected = nn.functional.linear(x, late if is_late else at_once, bias)
    assert same(found.model.inner.linear(x), expected)


def test_an_embedding_keeps_the_dtype_of_its_file_with_dynamic_vram(node: Any, state: Any) -> None:
    import df11_node.operations as operations

    model = Outer(operations.operations(Operations, unrounded=True), torch.float16)
    model.requires_grad_(False).load_state_dict(dict(state), strict=False)
    rows, expected = model.inner.rows, weights()["inner.rows.weight"]
    assert same(operations.decoded(rows.weight), expected)
    assert same(rows(torch.arange(4)), expected[:4].half())


def test_a_lora_of_an_offloaded_weight_is_added_once(node: Any, state: Any) -> None:
    found = patcher(node, state)
    found.patches = {KEY: [(0.125, None)]}
    found.load()
    found.partially_unload()
    layer = found.model.inner.linear
    assert not any(isinstance(each, LowVramPatch) for each in layer.weight_function)
    assert same(layer(input_of(torch.bfloat16)), patched(0.125))


def test_the_matrices_of_a_lora_are_moved_once(node: Any) -> None:
    import df11_node.patching as patching

    class Adapter:
        def __init__(self, loaded_keys: Any, weights: Any) -> None:
            self.loaded_keys, self.weights = loaded_keys, weights

    lora = Adapter({"key"}, (torch.ones(2, 2), None, 0.5))
    other = torch.ones(3, 3)
    patch = patching.Patch(KEY, [(1.0, lora, 0.5), (1.0, other)], late=None)
    there = patch.on(torch.device("meta"))
    (_, adapter, half), (_, merged) = there
    assert adapter.weights[0].is_meta and adapter.weights[1:] == (None, 0.5) and half == 0.5
    assert merged is other and patch.on(torch.device("meta")) is there


def test_other_functions_of_weights_come_after_a_lora(node: Any, state: Any) -> None:
    found = patcher(node, state)
    found.patches = {KEY: [(0.125, None)]}
    layer = found.model.inner.linear
    layer.weight_function = [lambda weight: 0 * weight]
    found.load()
    x = input_of(torch.bfloat16)
    assert same(layer(x), layer.bias.expand(5, -1))


def test_hooks_write_to_a_copy_that_is_gone_after_them(node: Any, state: Any) -> None:
    found = patcher(node, state)
    layer, x = found.model.inner.linear, input_of(torch.bfloat16)
    plain = layer(x)
    found.patch_hook_weight_to_device(None, {KEY: [1]}, KEY)
    assert not layer.is_compressed and not same(layer(x), plain)
    found.unpatch_hooks()
    assert layer.is_compressed and same(layer(x), plain)


@pytest.mark.parametrize("what", ["state_dict_for_saving", "model_state_dict_for_saving"])
def test_a_checkpoint_of_a_compressed_model_is_refused(node: Any, state: Any, what: str) -> None:
    with pytest.raises(ValueError, match="df11 decompress"):
        getattr(patcher(node, state), what)()


def test_a_lora_is_not_extracted_from_a_compressed_model(node: Any, state: Any) -> None:
    with pytest.raises(ValueError, match="df11 decompress"):
        patcher(node, state).model_state_dict(filter_prefix="diffusion_model.")


def test_containers_are_listed_apart_from_what_comfyui_reads(node: Any, state: Any) -> None:
    import folder_paths  # type: ignore[import-not-found]

    assert folder_paths.get_filename_list("diffusion_models") == ["one.safetensors"]
    loader = node.NODE_CLASS_MAPPINGS["Df11LoadDiffusionModel"]
    assert loader.INPUT_TYPES()["required"]["model_name"] == (["one.df11"],)
    assert set(node.NODE_DISPLAY_NAME_MAPPINGS) == set(node.NODE_CLASS_MAPPINGS)


def test_compression_moves_the_bar_to_its_end(node: Any, state: Any) -> None:
    bar = ProgressBar.made[0]
    assert bar.value == bar.total > 0


def test_compression_replaces_nothing_unless_told(node: Any, state: Any) -> None:
    compress = node.NODE_CLASS_MAPPINGS["Df11Compress"]()
    with pytest.raises(df11.ParameterError, match="exists"):
        compress.compress("diffusion_models/one.safetensors", overwrite=False)


def test_quantized_files_are_refused(node: Any, tmp_path: Path) -> None:
    import df11_node.loading as loading  # type: ignore[import-not-found]

    quantized = {**weights(), "inner.linear.weight_scale": torch.ones(1)}
    save_file(quantized, tmp_path / "q.safetensors")
    df11.compress(tmp_path / "q.safetensors", tmp_path / "q.df11", progress=False)
    with pytest.raises(ValueError, match="quantized"):
        loading.read(str(tmp_path / "q.df11"))


@pytest.mark.parametrize("stored", [torch.float16, torch.float32])
def test_files_in_other_floats(node: Any, tmp_path: Path, stored: torch.dtype) -> None:
    """Matrices stay compressed, also where ComfyUI computes in another dtype, unless they would be
    larger than in that dtype.
    """
    values = {name: value.float() * (1 + 2**-9) for name, value in weights().items()}
    values = {name: value.to(stored) for name, value in values.items()}
    save_file(values, tmp_path / "x.safetensors")
    df11.compress(tmp_path / "x.safetensors", tmp_path / "x.df11", progress=False)
    state = load_compressed(tmp_path / "x.df11")
    assert all(
        isinstance(state[name], CompressedTensor) == (values[name].dim() > 1) for name in state
    )
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        plain = Outer(Operations, dtype).requires_grad_(False)
        plain.load_state_dict(values)
        ours, theirs = loaded(node, state, dtype).inner, plain.inner
        numbers = torch.tensor([[3, 1199], [0, 3]])
        assert same(ours.linear(input_of(dtype)), theirs.linear(input_of(dtype)))
        assert same(ours.rows(numbers), theirs.rows(numbers))
        is_small = stored.itemsize <= dtype.itemsize
        assert ours.linear.is_compressed == is_small and ours.conv.is_compressed == is_small
        assert ours.rows.is_compressed == (is_small and dtype in (stored, torch.float32))
        read = ours.rows.weight
        assert same(
            read.decode().to(dtype) if ours.rows.is_compressed else read, theirs.rows.weight
        )
