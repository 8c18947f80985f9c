"""Compressed tensors: every function of PyTorch gives the bits that it gives for BF16 weights."""

import copy
import io
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import needs_compiler
from torch import nn
from torch.nn import functional
from weights import WEIGHTS, compressed, same

from df11 import _dispatch
from df11._tensor import CompressedTensor, rebuild

MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]
X = torch.randn(3, 4, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
BIAS = torch.randn(128, generator=torch.Generator().manual_seed(2)).bfloat16()
IDS = torch.tensor([[3, -1], [0, 3]])
#: The end of each expert's rows.
OFFSETS = torch.tensor([0, 5, 5, 5, 11, 12], dtype=torch.int32)
Function = Callable[..., torch.Tensor]


@pytest.fixture
def q() -> CompressedTensor:
    return compressed("q")


@pytest.mark.parametrize("name", WEIGHTS)
def test_it_decodes_to_the_original_bits(name: str) -> None:
    tensor = compressed(name)
    expected = WEIGHTS[name]
    assert same(tensor, expected) and tensor.stride() == expected.stride()
    assert tensor.dtype == torch.bfloat16 and not tensor.requires_grad
    assert tensor.nbytes_stored < 0.8 * expected.nbytes or name == "every"


def test_it_has_the_shape_of_its_parts() -> None:
    joined = torch.cat([compressed(name) for name in "qkv"])
    assert isinstance(joined, CompressedTensor)
    with pytest.raises(ValueError, match="256 x 256"):
        CompressedTensor(joined._arrays, joined.parts, (3, 64, 256))


# ---- products ----

PRODUCTS: dict[str, tuple[str, Function]] = {
    "linear": ("q", lambda w: functional.linear(X, w)),
    "linear with bias": ("q", lambda w: functional.linear(X, w, BIAS)),
    "linear of one row": ("q", lambda w: functional.linear(X[0, 0], w)),
    "matmul": ("q", lambda w: X @ w.T),
    "matmul of a vector": ("q", lambda w: X[0, 0] @ w.mT),
    "mm": ("q", lambda w: torch.mm(X[0], w.t())),
    "addmm": ("q", lambda w: torch.addmm(BIAS, X[0], w.t())),
    "addmm scaled": ("q", lambda w: torch.addmm(BIAS, X[0], w.t(), beta=2, alpha=0.5)),
    "not transposed": ("q", lambda w: X[..., :128] @ w),
    "on the left": ("q", lambda w: w @ X[0].T),
    "with itself": ("q", lambda w: w @ w.T),
    "einsum": ("q", lambda w: torch.einsum("abi,oi->abo", X, w)),
    "bmm": ("experts", lambda w: torch.bmm(X.repeat(2, 1, 1), w.transpose(1, 2))),
    "bmm not transposed": ("experts", lambda w: torch.bmm(X.repeat(2, 1, 1)[:, :, :64], w)),
    "matmul of experts": ("experts", lambda w: X.repeat(2, 1, 1) @ w.mT),
    "grouped": (
        "experts",
        lambda w: functional.grouped_mm(X.view(12, 256), w.transpose(-2, -1), offs=OFFSETS),
    ),
    "window of rows": ("q", lambda w: functional.linear(X, w[32:96])),
    "other rows": ("q", lambda w: functional.linear(X, w[5:77])),
    "window of columns": ("wide", lambda w: functional.linear(X, w[:, 256:])),
    "an expert": ("experts", lambda w: functional.linear(X, w[3])),
    "an expert apart": ("experts_apart", lambda w: functional.linear(X, w[3])),
    "convolution": (
        "convolution",
        lambda w: functional.conv2d(X[None, :, :, :64].permute(0, 3, 1, 2), w),
    ),
    "embedding": ("q", lambda w: functional.embedding(IDS.abs(), w, padding_idx=0)),
    "embedding of other rows": ("q", lambda w: functional.embedding(IDS.abs(), w[3:])),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, exact: bool, mode: Any) -> None:
    """On the CPU both modes have the same bits."""
    weight, function = PRODUCTS[name]
    with mode():
        found = function(compressed(weight, exact))
        assert same(found, function(WEIGHTS[weight]))


def test_chosen_experts_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, decoded = compressed("experts_apart"), []
    real = CompressedTensor.decode

    def counted(self: CompressedTensor) -> torch.Tensor:
        decoded.append(self.numel())
        return real(self)

    monkeypatch.setattr(CompressedTensor, "decode", counted)
    assert same(experts[IDS], WEIGHTS["experts_apart"][IDS])
    assert decoded == [40 * 256] * 3
    assert experts[torch.empty(0, dtype=torch.int64)].shape == (0, 40, 256)


def test_autocast_casts_the_input(q: CompressedTensor) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = functional.linear(X.float(), q)
            assert same(found, functional.linear(X.float(), WEIGHTS["q"]))


# ---- views ----

VIEWS: dict[str, tuple[str, Function, bool]] = {
    "rows": ("q", lambda w: w[32:64], True),
    "any rows": ("q", lambda w: w[5:9], True),
    "last rows": ("odd", lambda w: w[32:], True),
    "rows of rows": ("edge", lambda w: w[32:300][100:], True),
    "columns": ("wide", lambda w: w[:, 256:512], True),
    "any columns": ("wide", lambda w: w[:, 3:500], True),
    "rows and columns": ("wide", lambda w: w[32:64, :256], True),
    "one row": ("q", lambda w: w[7], True),
    "last row": ("q", lambda w: w[-1], True),
    "one column": ("q", lambda w: w[:, 3], True),
    "one element": ("q", lambda w: w[3, 4], True),
    "every second row": ("q", lambda w: w[::2], False),
    "no rows": ("q", lambda w: w[5:5], False),
    "an expert": ("experts", lambda w: w[2], True),
    "some experts": ("experts", lambda w: w[2:5], True),
    "half of an expert": ("experts", lambda w: w[2][32:], True),
    "half of all experts": ("experts", lambda w: w[:, 32:], True),
    "columns of experts": ("experts", lambda w: w[..., :100], True),
    "transposed": ("q", lambda w: w.t(), True),
    "transposed twice": ("q", lambda w: w.T.T, True),
    "transposed experts": ("experts", lambda w: w.transpose(-1, -2), True),
    "permuted": ("experts", lambda w: w.permute(0, 2, 1), True),
    "permuted otherwise": ("experts", lambda w: w.permute(1, 0, 2), False),
    "an expert transposed": ("experts", lambda w: w.mT[4], True),
    "rows of a transposed one": ("q", lambda w: w.t()[5:77], True),
    "a row of a transposed one": ("q", lambda w: w.t()[5], True),
    "contiguous": ("q", lambda w: w.t().contiguous(), True),
    "flat": ("q", lambda w: w.view(-1), False),
    "other rows of it": ("q", lambda w: w.view(2, 64, 256), True),
    "reshaped": ("q", lambda w: w.reshape(2, -1, 256), True),
    "unsqueezed": ("q", lambda w: w.unsqueeze(0), True),
    "squeezed": ("q", lambda w: w[None].squeeze(0), True),
    "flat convolution": ("convolution", lambda w: w.flatten(1), True),
    "inputs exchanged": ("convolution", lambda w: w.flatten(2).mT[IDS[0]], False),
    "inputs of a convolution": ("convolution", lambda w: w[:, 10:20], True),
    "split": ("q", lambda w: w.split(40)[3], True),
    "split sizes": ("q", lambda w: w.split([64, 32, 32])[1], True),
    "split columns": ("wide", lambda w: w.split(256, dim=1)[1], True),
    "chunk": ("experts", lambda w: w[1].chunk(2, dim=-2)[1], True),
    "unbound": ("experts", lambda w: w.unbind()[5], True),
    "detached": ("q", lambda w: w.detach(), True),
    "alias": ("q", lambda w: w.view_as(w), True),
    "expanded": ("q", lambda w: w.expand(2, 128, 256), False),
    "diagonal": ("every", lambda w: w.diagonal(), False),
    "stacked": ("q", lambda w: torch.cat([w, w[32:64]]), True),
    "stacked otherwise": ("q", lambda w: torch.cat([w, w], dim=1), False),
    "chosen rows": ("q", lambda w: w[IDS], False),
    "selected rows": ("q", lambda w: w.index_select(0, IDS[1]), False),
    "chosen elements": ("q", lambda w: w[IDS[1], IDS[1]], False),
    "chosen by a mask": ("q", lambda w: w[torch.arange(128) % 3 == 0], False),
    "chosen experts": ("experts", lambda w: w[IDS], False),
    "chosen transposed experts": ("experts", lambda w: w.mT[IDS], False),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str, mode: Any) -> None:
    weight, function, stays = VIEWS[name]
    with mode():
        found, expected = function(compressed(weight)), function(WEIGHTS[weight])
        assert isinstance(found, CompressedTensor) == stays
        assert same(found, expected)
        if name.startswith(("transposed", "split", "rows of", "a row of")):
            assert found.stride() == expected.stride() == found.decode().stride()


HALVES: dict[str, Function] = {
    "as x": lambda w: functional.linear(w.split(128, dim=1)[0][None], w[:3, :128]),
    "the second as x": lambda w: functional.linear(w[:, 128:256], w[:2, 128:256].contiguous()),
    "as a matrix": lambda w: functional.linear(X[..., :128], w[:, :128]),
    "transposed": lambda w: X[..., :128] @ w[:, :128].T,
    "flat": lambda w: w[:, :128].reshape(-1),
    "rows of it": lambda w: w[:, :128][IDS],
    "moved": lambda w: w[:, :128].to("cpu", copy=True),
    "added": lambda w: w[:, :128] + w[:, 128:256],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", HALVES)
def test_a_window_of_columns_has_the_strides_of_a_view(name: str, mode: Any) -> None:
    """PyTorch's products of contiguous and of other tensors may add in different orders."""
    with mode():
        found, expected = HALVES[name](compressed("wide")), HALVES[name](WEIGHTS["wide"])
        assert same(found, expected) and found.stride() == expected.stride()


def test_a_window_of_columns_has_no_view_without_gaps() -> None:
    for weight in (compressed("wide"), WEIGHTS["wide"]):
        with pytest.raises(RuntimeError, match="view"):
            weight[:, :128].view(-1)


def test_a_window_of_columns_is_kept() -> None:
    window = compressed("wide")[:, :128]
    assert window.spread == WEIGHTS["wide"][:, :128].stride()
    for kept in (copy.deepcopy(window), window.detach()):
        assert same(kept, window) and kept.stride() == window.stride()
    loaded = pickle.loads(pickle.dumps(window))
    assert loaded.is_matrix
    for dense in (window.clone(), window.contiguous(), loaded):
        assert same(dense, window) and dense.is_contiguous()


def test_a_file_names_no_strides() -> None:
    """Decoding takes memory for the gaps."""
    window = compressed("wide")[:, :128]
    with pytest.raises(ValueError, match="no compressed tensor was kept with these names"):
        rebuild(window._kept, {**window._state, "spread": [1 << 20, 1]})


def some_view(w: torch.Tensor, pick: random.Random) -> Function:
    dim, other, shape = pick.randrange(w.dim()), pick.randrange(w.dim()), list(w.shape)
    begin, end = sorted(pick.choices(range(shape[dim] + 1), k=2))
    parts = [shape[dim] // 4 or 1, -1] if shape[dim] % 4 == 0 else [1, -1]
    views: list[Function] = [
        lambda w: w.transpose(dim, other),
        lambda w: w.narrow(dim, begin, end - begin),
        lambda w: w.select(dim, shape[dim] // 2) if w.dim() > 1 else w,
        lambda w: w.unsqueeze(dim),
        lambda w: w.squeeze(dim),
        lambda w: w.unflatten(dim, parts),
        lambda w: w.chunk(3, dim)[-1],
        lambda w: w.permute([*range(1, w.dim()), 0]),
        lambda w: w.reshape(shape),
    ]
    return pick.choice(views)


@pytest.mark.parametrize("seed", range(24))
def test_views_of_views(seed: int) -> None:
    pick = random.Random(seed)
    name = pick.choice(["q", "odd", "wide", "edge", "experts"])
    found, expected = compressed(name), WEIGHTS[name]
    if name == "experts" and pick.random() < 0.5:
        found = CompressedTensor(found._arrays, found.parts, (6, 256, 64), transposed=True)
        expected = expected.mT.contiguous()
    for _ in range(6):
        view = some_view(expected, pick)
        found, expected = view(found), view(expected)
        assert found.shape == expected.shape and same(found, expected)
        if not isinstance(found, CompressedTensor) or not expected.numel():
            return


def test_experts_stored_the_other_way_round() -> None:
    """transformers transposes weights of a checkpoint so that they are contiguous in memory."""
    stored = compressed("experts")
    weight = CompressedTensor(stored._arrays, stored.parts, (6, 256, 64), transposed=True)
    expected = WEIGHTS["experts"].transpose(1, 2).contiguous()
    assert same(weight, expected) and weight.decode().is_contiguous() and weight.is_contiguous()
    x = X.view(12, 256)
    for function in (
        lambda w: w[IDS],
        lambda w: functional.linear(x[:, :64], w[3]),
        lambda w: functional.grouped_mm(x[:, :64], w.transpose(-2, -1), offs=OFFSETS),
        lambda w: functional.grouped_mm(x, w, offs=OFFSETS),
        lambda w: torch.bmm(X.repeat(2, 1, 1), w),
    ):
        assert same(function(weight), function(expected))
    # The view that a product wants is what is stored.
    assert weight.transpose(1, 2)[1].is_contiguous() is False


@pytest.mark.parametrize("count", [4, 5, 7])
def test_batches_are_as_many_as_matrices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Also if some matrices are decoded at a time."""
    monkeypatch.setattr(_dispatch, "TEMPORARY_BYTES", 2 * 2 * 64 * 256)
    weight = compressed("experts", exact=False).transpose(1, 2)
    x = X[:1].expand(6, -1, -1)
    assert same(torch.bmm(x, weight), torch.bmm(x, WEIGHTS["experts"].transpose(1, 2)))
    with pytest.raises(RuntimeError):
        torch.bmm(X[:1].expand(count, -1, -1), weight)


# ---- everything else ----

OTHERS: dict[str, Function] = {
    "sum": lambda w: w.sum(),
    "norm": lambda w: torch.linalg.vector_norm(w.float(), dim=1),
    "add": lambda w: w + 1,
    "add to": lambda w: torch.ones(128, 256) + w,
    "of two": lambda w: w * w[32:33],
    "compare": lambda w: w == w.clone(),
    "where": lambda w: torch.where(w > 0, w, 0),
    "float": lambda w: w.float(),
    "half": lambda w: w.to(torch.float16),
    "bits": lambda w: w.view(torch.int16),
    "another as it": lambda w: torch.ones(128 * 256).view_as(w),
    "another as large": lambda w: torch.ones(256).expand_as(w),
    "strides": lambda w: w.as_strided((64, 256), (512, 1)),
    "diagonal": lambda w: w.diagonal(),
    "expand": lambda w: w.expand(3, 128, 256),
    "gradient": lambda w: torch.func.grad(lambda x: functional.linear(x, w).square().sum())(X[0]),
    "negative": lambda w: torch._neg_view(w) + 0,
    "batches": lambda w: torch.func.vmap(lambda x: functional.linear(x, w))(X),
    "batches of rows": lambda w: torch.func.vmap(lambda row: functional.linear(X, row[None]))(w),
    "complex": lambda w: torch.mm(X[0].to(torch.complex64).conj(), w.T.to(torch.complex64)),
    "nested": lambda w: functional.linear(torch.nested.nested_tensor([*X]), w).unbind()[1],
    "svd": lambda w: torch.linalg.svdvals(w.float()),
    "copy into another": lambda w: torch.zeros(128, 256).copy_(w),
    "assign to another": lambda w: assigned(torch.zeros(130, 256), w),
    "out": lambda w: torch.add(w, w, out=torch.empty(128, 256, dtype=torch.bfloat16)),
}


def assigned(out: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    out[1:129] = value
    return out


@pytest.mark.filterwarnings("ignore:a compressed weight is converted")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_get_decoded_weights(q: CompressedTensor, name: str, mode: Any) -> None:
    with mode():
        found = OTHERS[name](q)
        assert not isinstance(found, CompressedTensor)
        assert same(found, OTHERS[name](WEIGHTS["q"]))


def test_what_leaves_it_is_an_ordinary_tensor(q: CompressedTensor) -> None:
    plain, every = WEIGHTS["q"], compressed("every")
    assert torch.equal(q, plain) and torch.equal(plain, q) and torch.allclose(q, plain)
    assert not torch.equal(q, q + 1) and torch.equal(every.isnan(), WEIGHTS["every"].isnan())
    for made in (torch.empty_like(q), q.new_empty(3, 4), torch.randn_like(q), q.new_zeros(5)):
        assert type(made) is torch.Tensor
        assert made.dtype == torch.bfloat16 and made.device.type == "cpu"
    assert torch.equal(torch.zeros_like(q), torch.zeros_like(plain))
    assert torch.equal(torch.ones_like(q, dtype=torch.float32), torch.ones(128, 256))
    assert torch.empty_like(q.t()).stride() == torch.empty_like(plain.t()).stride()
    assert q[0, :3].tolist() == plain[0, :3].tolist()
    assert q[1, 2].item() == plain[1, 2].item() and bool(q[1, 2]) is True
    assert torch.equal(torch.from_dlpack(q), plain)
    shown = "CompressedTensor(shape=(128, 256), torch.bfloat16, device='cpu', exact, as stored"
    assert shown in repr(q)


ADDRESSES: dict[str, Callable[[torch.Tensor], object]] = {
    "data_ptr": lambda w: w.data_ptr(),
    "of a view": lambda w: w[32:64].data_ptr(),
    "storage": lambda w: w.untyped_storage().data_ptr(),
    "typed storage": lambda w: w.storage().data_ptr(),
    "in a function of a library": lambda w: called_by("safetensors.torch", w),
}


def called_by(module: str, w: torch.Tensor) -> int:
    """Its address as a function of a module gets it."""
    space: dict[str, Any] = {"__name__": module}
    exec("def ask(w): return w.data_ptr()", space)
    return int(space["ask"](w))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", ADDRESSES)
def test_it_has_no_address(q: CompressedTensor, name: str) -> None:
    with pytest.raises(RuntimeError, match=r"no address; .* df11\.state_dict\(model\)") as told:
        ADDRESSES[name](q)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("library", ["accelerate.hooks", "transformers.trainer", "peft.tuners"])
def test_libraries_that_compare_addresses_get_a_number(q: CompressedTensor, library: str) -> None:
    number = called_by(library, q)
    assert number == called_by(library, q.detach()) and number != called_by(library, q[32:64])
    assert number >= 1 << 62  # above what any processor can address
    assert called_by(library, q.to("meta")) == 0 == WEIGHTS["q"].to("meta").data_ptr()


@pytest.mark.parametrize("name", ["q", "wide", "experts", "experts_apart"])
def test_bytes_are_those_of_the_arrays(name: str) -> None:
    weight = compressed(name)
    held = sum(array.nbytes for array in weight.arrays)
    assert weight.nbytes == weight.untyped_storage().nbytes() == held < WEIGHTS[name].nbytes
    assert weight.untyped_storage() is weight.untyped_storage()
    assert weight.nelement() * weight.element_size() == WEIGHTS[name].nbytes
    # Windows of one matrix add up, except for what is rounded.
    assert abs(sum(part.nbytes for part in weight.split(24)) - held) <= len(weight)


@torch.no_grad()
def test_a_parameter_is_scaled_in_place(q: CompressedTensor) -> None:
    """Some models divide the weights of deep layers when they first run."""
    weight, plain = nn.Parameter(q, requires_grad=False), nn.Parameter(WEIGHTS["q"].clone(), False)
    assert weight.div_(1) is weight and isinstance(weight, CompressedTensor)
    for alias in (weight.data, weight.detach(), weight[:32]):
        for name in ("div_", "mul_"):
            with pytest.raises(RuntimeError, match=f"{name} would change a compressed tensor"):
                getattr(alias, name)(2)
    del alias
    with pytest.raises(RuntimeError, match="div_ would change"):
        weight.div_(weight)
    assert same(weight, WEIGHTS["q"])
    with pytest.warns(UserWarning, match="an ordinary tensor from now on"):
        assert weight.div_(2**3) is weight
    plain.div_(2**3)
    assert type(weight) is nn.Parameter and torch.equal(weight, plain)
    assert torch.equal(weight.mul_(8), WEIGHTS["q"])
    x = torch.ones(128, 256).bfloat16()
    assert torch.equal(x.div_(q), torch.ones(128, 256).bfloat16().div_(WEIGHTS["q"]))


def printed(weight: torch.Tensor) -> str:
    """PyTorch's text for a tensor."""
    return repr(weight.decode() if isinstance(weight, CompressedTensor) else weight)


@pytest.mark.parametrize("name", WEIGHTS)
def test_it_shows_its_values(name: str) -> None:
    weight, expected = compressed(name), WEIGHTS[name]
    for some, like in ((weight, expected), (weight[:3], expected[:3]), (weight.mT, expected.mT)):
        head, _, values = repr(some).rpartition(" containing:\n")
        assert values == printed(like)
        if isinstance(some, CompressedTensor):
            shown = f"CompressedTensor(shape={tuple(like.shape)}, torch.bfloat16, device='cpu', "
            assert head.startswith(shown)


def test_of_a_large_one_few_weights_are_decoded(decoded: list[Any]) -> None:
    weight = compressed("edge")
    text = repr(weight)
    assert text.endswith(printed(WEIGHTS["edge"]))
    assert sum(each.count for each in decoded) < 0.1 * weight.numel()
    assert repr(weight.to("meta")).endswith(" bytes)")


# ---- what is refused ----


def set_attribute(w: CompressedTensor) -> None:
    w.requires_grad = True


SHAPE = (IndexError, RuntimeError)
WRITING, TRAINING = "compressed tensor", "train adapters"
#: Uses of weights, and their errors.
REFUSED: dict[str, tuple[str, Callable[[CompressedTensor], Any], Any]] = {
    "rows that there are not": ("q", lambda w: functional.embedding(IDS + 126, w), IndexError),
    "a row before all": ("q", lambda w: functional.embedding(IDS, w), IndexError),
    "rows made smaller": (
        "q",
        lambda w: functional.embedding(IDS[1], w, max_norm=1.0),
        "read only",
    ),
    "another dtype": ("q", lambda w: functional.linear(X.float(), w), RuntimeError),
    "another dtype, fused": (
        "q",
        lambda w: functional.linear(X.float(), w.with_mode(exact=False)),
        RuntimeError,
    ),
    "an expert after all": ("experts_apart", lambda w: w[torch.tensor([6])], IndexError),
    "an expert before all": ("experts_apart", lambda w: w[torch.tensor([-7])], IndexError),
    "a row after all": ("q", lambda w: w.select(0, w.shape[0]), SHAPE),
    "one expert too many": ("experts", lambda w: w.select(0, w.shape[0]), SHAPE),
    "too many rows": ("q", lambda w: w.split([1, w.shape[0]]), SHAPE),
    "too many experts": ("experts", lambda w: w.split([1, w.shape[0]]), SHAPE),
    "another dimension": ("q", lambda w: w.transpose(0, 3), SHAPE),
    "another dimension of experts": ("experts", lambda w: w.transpose(0, 3), SHAPE),
    "no such shape": ("q", lambda w: w.view(7, -1), SHAPE),
    "no such shape of experts": ("experts", lambda w: w.view(7, -1), SHAPE),
    "gradients": ("q", lambda w: w.requires_grad_(), TRAINING),
    "gradients as an attribute": ("q", set_attribute, TRAINING),
    "a trained parameter": ("q", nn.Parameter, TRAINING),
    "fill": ("q", lambda w: w.fill_(0), WRITING),
    "add": ("q", lambda w: w.add_(1), WRITING),
    "item": ("q", lambda w: w.__setitem__(0, 0), WRITING),
    "a window": ("q", lambda w: w[0:3].zero_(), WRITING),
    "a transposed view": ("q", lambda w: w.t().mul_(2), WRITING),
    "init": ("q", lambda w: nn.init.normal_(w), WRITING),
    "other weights": ("q", lambda w: w.copy_(WEIGHTS["q"]), WRITING),
    "out": ("q", lambda w: torch.add(WEIGHTS["q"], 1, out=w), WRITING),
    "foreach": ("q", lambda w: torch._foreach_add_([w], 1), WRITING),
    "resize": ("q", lambda w: w.resize_(3), WRITING),
    "index": ("q", lambda w: w.index_fill_(0, torch.tensor([1]), 0), WRITING),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, mode: Any) -> None:
    weight, work, problem = REFUSED[name]
    w = compressed(weight)
    error, words = (RuntimeError, problem) if isinstance(problem, str) else (problem, None)
    with mode(), pytest.raises(error, match=words):
        work(w)
    assert same(w, WEIGHTS[weight]) and w.requires_grad_(False) is w


@pytest.mark.parametrize("version", [{}, {"fast": 1}, {"fast": 99}])
def test_the_fast_layout_of_another_release_is_refused(version: dict[str, int]) -> None:
    """Its bytes would mean other weights."""
    held = {"parts": [[1, 32, 256, 0, 0, 32, 0, 256]], "shape": [32, 256], **version}
    with pytest.raises(ValueError, match="fast layout of another release"):
        rebuild([torch.zeros(0, dtype=torch.uint8)], held)


# ---- gradients through it ----


@pytest.mark.parametrize("name", ["linear", "linear with bias", "matmul", "mm", "an expert", "bmm"])
def test_gradients_flow_through_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, function = PRODUCTS[name]
    results = []
    for w in (compressed(weight), WEIGHTS[weight]):
        x = X.clone().requires_grad_()
        monkeypatch.setitem(globals(), "X", x)
        function(w).square().sum().backward()
        results.append(x.grad)
        monkeypatch.undo()
    assert results[0] is not None and same(*results)


# ---- copies, modules, files ----


def linear_of(weight: torch.Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.bfloat16)
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def test_as_a_parameter(q: CompressedTensor) -> None:
    layer = linear_of(q)
    assert isinstance(layer.weight, nn.Parameter) and isinstance(layer.weight, CompressedTensor)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert same(layer(X), functional.linear(X, WEIGHTS["q"]))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(other.weight, nn.Parameter) and same(other.weight, WEIGHTS["q"])
        assert same(other(X), layer(X))
    # accelerate makes a parameter of another class like this.
    again = type(layer.weight)(layer.weight, requires_grad=False)
    assert isinstance(again, nn.Parameter) and same(again, WEIGHTS["q"])
    assert not isinstance(layer.weight.data, nn.Parameter)


def test_copies_share_what_nothing_can_write(q: CompressedTensor) -> None:
    for other in (copy.deepcopy(q), torch.ops.aten.clone(q), copy.copy(q)):
        assert same(other, WEIGHTS["q"])
        assert other._plane0.data_ptr() == q._plane0.data_ptr()
    clone = q.clone()
    clone += 1
    assert type(clone) is torch.Tensor and same(clone, WEIGHTS["q"] + 1) and same(q, WEIGHTS["q"])
    layer = linear_of(copy.copy(q))
    layer.share_memory()
    assert layer.weight.is_shared() and layer.weight._plane0.is_shared()
    assert same(layer(X), functional.linear(X, WEIGHTS["q"]))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_exported(q: CompressedTensor) -> None:
    layer, other = linear_of(q), X * 2
    for made in (torch.export.export(layer, (X,)).module(), torch.jit.trace(layer, X)):
        assert same(made(other), functional.linear(other, WEIGHTS["q"]))


def test_state_dict(q: CompressedTensor) -> None:
    layer = linear_of(q)
    state = layer.state_dict()
    assert isinstance(state["weight"], CompressedTensor)
    layer.load_state_dict(layer.state_dict())
    ordinary = nn.Linear(256, 128, bias=False, dtype=torch.bfloat16)
    ordinary.load_state_dict(layer.state_dict())
    assert same(ordinary.weight.data, WEIGHTS["q"])
    other = linear_of(copy.copy(compressed("wide")[:, :256]))
    for state in (other.state_dict(), ordinary.state_dict()):
        padded = {"weight": torch.cat([state["weight"]] * 2)[:128]}
        with pytest.raises(RuntimeError, match="assign=True"):
            layer.load_state_dict(padded)
    layer.load_state_dict(ordinary.state_dict(), assign=True)
    assert same(layer.weight.data, WEIGHTS["q"])
    # A tensor on the meta device replaces nothing.
    empty = copy.deepcopy(linear_of(q)).to("meta")
    assert empty.weight.is_meta and isinstance(empty.weight, CompressedTensor)
    assert empty(X.to("meta")).shape == (3, 4, 128)
    empty.load_state_dict({"weight": q.detach()}, assign=True)
    assert same(empty.weight, WEIGHTS["q"])


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("wants", [True, False])
def test_kept_weights_are_assigned_to_a_model(wants: bool, weights_only: bool) -> None:
    """Its parameters, whatever gradients they want, are compressed ones without."""

    def layers(make: Callable[[str], Any]) -> nn.Module:
        norm = nn.LayerNorm(256, dtype=torch.bfloat16)
        return nn.Sequential(linear_of(make("k")), linear_of(make("q")), norm)

    def dense(name: str) -> torch.Tensor:
        return torch.zeros_like(WEIGHTS[name])

    torch.save(layers(compressed).state_dict(), file := io.BytesIO())
    file.seek(0)
    state = torch.load(file, weights_only=weights_only)
    model = layers(dense).requires_grad_(wants)
    assert not model.load_state_dict(state, assign=True).missing_keys
    for at, name in enumerate("kq"):
        weight = model[at].weight
        assert isinstance(weight, CompressedTensor) and isinstance(weight, nn.Parameter)
        assert same(weight, WEIGHTS[name]) and not weight.requires_grad
    assert model[2].weight.requires_grad == wants
    assert same(model[1](X), functional.linear(X, WEIGHTS["q"]))
    # Parameters, as some save them.
    other = layers(dense).requires_grad_(wants)
    other.load_state_dict(dict(model.named_parameters()), assign=True)
    assert same(other[0].weight, WEIGHTS["k"])
    # A request for gradients is refused.
    for ask in (model.requires_grad_, lambda: nn.Parameter(state["0.weight"])):
        with pytest.raises(RuntimeError, match="cannot require gradients"):
            ask()


#: Writes into x of which its version tells nothing: a value of each element.
WRITES: dict[str, Callable[[torch.Tensor, float], object]] = {
    "data": lambda x, value: x.data.fill_(value),
    "detached data": lambda x, value: x.view(-1).data[:].fill_(value),
    "numpy": lambda x, value: x.view(torch.uint16).numpy().fill(int(BITS[value])),
    "dlpack": lambda x, value: torch.from_dlpack(x).fill_(value),
    "storage": lambda x, value: torch.empty(0).bfloat16().set_(x.untyped_storage()).fill_(value),
    "share_memory_": lambda x, value: x.share_memory_().data.fill_(value),
}
BITS = {value: torch.tensor(value).bfloat16().view(torch.int16) for value in (0.5, 2.0)}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", WRITES)
def test_products_are_of_what_x_holds(name: str, exact: bool) -> None:
    """And not of what it held when another weight was multiplied by it."""
    weights = {key: compressed(key, exact) for key in "qkv"}
    for value in (2.0, 0.5, 2.0):
        x = torch.randn(3, 256).bfloat16()
        for _ in range(3):
            assert same(functional.linear(x, weights["q"]), functional.linear(x, WEIGHTS["q"]))
            version = x._version
            WRITES[name](x, value)
            assert x._version == version and x[0, 0] == value
            for key in "kvq":
                expected = functional.linear(torch.full_like(x, value), WEIGHTS[key])
                assert same(functional.linear(x, weights[key]), expected)


def test_tensors_are_exchanged_after_products(q: CompressedTensor) -> None:
    """PyTorch refuses to exchange those that have weak references."""
    layer, x, other = linear_of(q), X.clone(), torch.zeros(2, 2)
    for _ in range(2):
        layer(x)
    torch.utils.swap_tensors(x, other)
    assert x.shape == (2, 2) and same(layer(other), functional.linear(X, WEIGHTS["q"]))
    torch.utils.swap_tensors(layer.weight, nn.Parameter(compressed("k"), requires_grad=False))
    assert same(layer(X), functional.linear(X, WEIGHTS["k"]))
    layer.to("meta")
    assert layer.weight.is_meta and layer(X.to("meta")).shape == (3, 4, 64)


def test_conversions_of_modules(q: CompressedTensor) -> None:
    assert isinstance(linear_of(q).to("cpu").bfloat16().weight, CompressedTensor)
    with pytest.warns(UserWarning, match="decodes it"):
        half = linear_of(q).half()
    assert type(half.weight) is nn.Parameter and same(half.weight.data, WEIGHTS["q"].half())


def test_setting_data(q: CompressedTensor) -> None:
    layer = linear_of(q)
    parameter, layer.weight.data = layer.weight, compressed("every")[:128]
    assert same(parameter, WEIGHTS["every"][:128])
    with pytest.raises(RuntimeError, match="other shape"):
        parameter.data = compressed("k")
    with pytest.warns(UserWarning, match="ordinary tensor from now on"):
        parameter.data = WEIGHTS["wide"]
    assert parameter is layer.weight and type(parameter) is nn.Parameter
    assert same(parameter.data, WEIGHTS["wide"])


@pytest.mark.parametrize("weights_only", [True, False])
def test_saving_by_pytorch(weights_only: bool) -> None:
    experts = compressed("experts", exact=False)
    held = {"e": experts, "t": experts.mT, "w": experts[2][32:], "p": linear_of(experts[1]).weight}
    file = io.BytesIO()
    torch.save(held, file)
    file.seek(0)
    found = torch.load(file, weights_only=weights_only)
    for name, value in held.items():
        assert isinstance(found[name], CompressedTensor) and same(found[name], value.decode())
        assert found[name].stride() == value.stride() and not found[name].exact
    assert isinstance(found["p"], nn.Parameter) and not isinstance(found["e"], nn.Parameter)
    file.seek(0)
    assert torch.load(file, weights_only=weights_only, map_location="meta")["e"].is_meta


# ---- compilation ----


class Layers(nn.Module):
    def __init__(self, weights: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self.embed = nn.Parameter(weights("q"), requires_grad=False)
        self.up = linear_of(weights("every")[:128])
        self.experts = nn.Parameter(weights("experts"), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = functional.embedding(ids, self.embed)
        h = functional.linear(x, self.experts[2]) + x[..., :64] @ self.embed[:64, :64].T
        h = h + torch.bmm(x, self.experts[: x.shape[0]].transpose(1, 2))
        return functional.linear(h.repeat(1, 1, 4), self.embed)


LAYERS = [Layers(lambda name: compressed(name)), Layers(lambda name: WEIGHTS[name])]
TOKENS = torch.tensor([[1, 5, 127], [0, 0, 64]])


def compiled(module: nn.Module, **options: Any) -> Any:
    """Without a graph break; by a backend that computes as eager code does, if no other is said."""
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, **(options or {"backend": "aot_eager"}))


@pytest.mark.parametrize("mode", MODES)
def test_compiled(mode: Any) -> None:
    ours, plain = LAYERS
    with mode():
        expected = plain(TOKENS)
        assert same(ours(TOKENS), expected) and same(compiled(ours)(TOKENS), expected)


@needs_compiler
@torch.no_grad()
def test_compiled_by_inductor() -> None:
    """Generated code rounds less often than PyTorch's functions, and not at the same places."""
    ours, plain = LAYERS
    # No look for vector instructions, no headers compiled ahead: they take most of the time.
    options = {"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
    found, expected = compiled(ours, options=options)(TOKENS), plain(TOKENS)
    assert torch.allclose(found.float(), expected.float(), rtol=2e-2, atol=1e-2)


def test_compiled_with_gradients() -> None:
    results = []
    for model in LAYERS:
        x = X.clone().requires_grad_()
        compiled(model.up)(x.clamp(-1, 1)).nan_to_num(0, 0, 0).sum().backward()
        results.append(x.grad)
    assert same(*results)


def test_fake_tensors(q: CompressedTensor) -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(q)
        assert isinstance(fake, CompressedTensor) and fake._plane0.shape == q._plane0.shape
        y = functional.linear(mode.from_tensor(X), fake)
        assert y.shape == (3, 4, 128) and fake.decode().shape == (128, 256)
