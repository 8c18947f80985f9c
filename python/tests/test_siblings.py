"""Layers that share x: which they are, that one product has the same bits, when each goes alone."""

import copy
import gc
import importlib
import io
import pickle
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any

import models
import pytest
import torch
import transformers
from conftest import on_devices
from models import Folders, prompt
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from weights import WEIGHTS, compressed, same

import df11
from df11 import _code, _forwards, _siblings

X = torch.randn(3, 256, generator=torch.Generator().manual_seed(4)).bfloat16()


@pytest.fixture
def joint(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has the CPU multiply by siblings too; the numbers of weights of each such product."""
    found: list[int] = []
    linears = _siblings._ops.linears

    def watched(x: Any, arrays: Any, parts: Any, counts: Any, *others: Any) -> Any:
        found.append(len(counts))
        return linears(x, arrays, parts, counts, *others)

    monkeypatch.setattr(_siblings, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(_siblings._ops, "linears", watched)
    return found


# ---- which layers ----

QKV, GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
KV = ("k_proj", "v_proj")
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 99, "d_model": 64, "d_ff": 96,
    "num_layers": 2, "decoder_layers": 2, "encoder_layers": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 32}
MIXTURE = {**EXPERTS, "shared_expert_intermediate_size": 32, "num_experts_per_tok": 2}
#: By the name of an architecture: what its config says besides, and which layers share x.
ARCHITECTURES: dict[str, tuple[dict[str, Any], set[tuple[str, ...]]]] = {
    "llama": ({}, {QKV, GATED}),
    "mistral": ({}, {QKV, GATED}),
    "qwen2": ({}, {QKV, GATED}),
    "qwen3": ({}, {QKV, GATED}),
    "gemma3_text": ({}, {QKV, GATED}),
    "olmo2": ({}, {QKV, GATED}),
    "mixtral": (EXPERTS, {QKV}),
    "qwen3_moe": ({**MIXTURE, "mlp_only_layers": [1]}, {QKV, GATED}),
    "qwen2_moe": (MIXTURE, {QKV, GATED}),
    "opt": ({"ffn_dim": 96, "word_embed_proj_dim": 64}, {QKV}),
    "bert": ({}, {("query", "key", "value")}),
    # Which x keys and values have is known at each call; queries are before that is decided.
    "whisper": ({"encoder_attention_heads": 2, "decoder_attention_heads": 2}, {KV}),
    "t5": ({"feed_forward_proj": "gated-gelu"}, {("k", "v"), ("wi_0", "wi_1")}),
    # One matrix already.
    "phi3": ({}, set()),
    "gpt_neox": ({}, set()),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_that_share_x(name: str) -> None:
    changes, expected = ARCHITECTURES[name]
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **changes})
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    found = set()
    for module in model.modules():
        layers = [key for key, one in module.named_children() if type(one) is nn.Linear]
        for siblings in _forwards.siblings_of(module, layers):
            names = tuple(layer.name for layer in siblings.layers)
            found.add(tuple(sorted(names, key=(*QKV, *names).index)))
    assert found == expected


class Three(nn.Module):
    """Layers of which a forward calls some; it writes nowhere if it is not told to."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (linear(name) for name in "qkv")
        self.norm, self.act = nn.LayerNorm(128, dtype=torch.bfloat16), nn.SiLU()
        self.requires_grad_(False)
        self.writer = Writer(self)
        self.register_buffer("held", torch.zeros(3, 256).bfloat16(), persistent=False)

    def write(self, value: Any) -> Any:
        self.held.data.fill_(2)
        return value

    def forward(self, x: torch.Tensor) -> Any:
        q = self.q(x).view(3, 2, 64).transpose(0, 1)
        k = self.k(x)
        return q, k, self.v(x)


class Writer(nn.Module):
    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner = [owner]

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        self.owner[0].held.data.fill_(0.5)
        return q


def linear(name: str, bias: bool = True) -> nn.Linear:
    rows, columns = WEIGHTS[name].shape
    layer = nn.Linear(columns, rows, bias, dtype=torch.bfloat16, device="meta")
    layer.weight = nn.Parameter(compressed(name), requires_grad=False)
    if bias:
        layer.bias = nn.Parameter(torch.arange(rows).bfloat16(), requires_grad=False)
    return layer


class Kept(Three):
    """Pure work between: activations, norms, arithmetic, functions, other names."""

    def forward(self, x: torch.Tensor) -> Any:
        shape = (*x.shape[:-1], -1)
        a = self.norm(self.act(self.q(x)) * 2).reshape(*shape, 32)
        b, c = functional.silu(self.k(x)), torch.sqrt(a.float().square() + 1)
        return a, b, c, self.write(self.v(x))


class OneExpression(Three):
    def forward(self, x: torch.Tensor) -> Any:
        return self.write(self.act(self.k(x)) * self.v(x)), self.q(x)


class Branches(Three):
    def forward(self, x: torch.Tensor, both: bool = True) -> Any:
        q = self.q(x)
        if both:
            k = self.k(x)
            v = self.v(x)
            return q, k, v
        return q, self.k(x)


class InLoop(Three):
    def forward(self, x: torch.Tensor) -> Any:
        out = []
        for _ in range(2):
            out.append((self.q(x), self.k(x)))
            x.data.mul_(0.5)
        return out


class WithCell(Three):
    def forward(self, x: torch.Tensor, *, scale: float = 2.0) -> Any:
        super().extra_repr()
        k, v = self.k(x) * scale, self.v(x)
        return k, (lambda: v + scale)()


def renaming(function: Callable[..., Any]) -> Callable[..., Any]:
    if function is None:
        empty = 0

    @wraps(function)
    def called(self: Any, y: Any = None, *, times: int = 2) -> Any:
        return function(self, y * times) if times else empty

    return called


class Wrapped(Three):
    """Forwards like those of transformers 5.24, whose arguments have new names."""

    @renaming
    @renaming
    def forward(self, x: Any) -> Any:
        return self.q(x), self.k(x)


class OfAnything(Three):
    def forward(self, x: torch.Tensor) -> Any:
        x = self.write(x)
        return self.q(x), self.k(x)


SHARING = {
    Wrapped: [("q", "k")], OfAnything: [("q", "k")],
    Three: [("q", "k", "v")], Kept: [("q", "k", "v")], OneExpression: [("k", "v")],
    Branches: [("k", "v")], InLoop: [("q", "k")], WithCell: [("k", "v")],
}  # fmt: skip


class ByAlias(Three):
    """x is the module's own buffer, which it writes to between its products."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.held
        q = self.q(x)
        self.held.data.fill_(3)
        return q, self.k(x)


class ByMethod(Three):
    def forward(self, x: torch.Tensor) -> Any:
        x = self.held
        q = self.write(self.q(x))
        return q, self.k(x)


class ByLayer(Three):
    def forward(self, x: torch.Tensor) -> Any:
        x = self.held
        return self.writer(self.q(x)), self.k(x)


class ByMethodOfTensor(Three):
    def forward(self, x: torch.Tensor) -> Any:
        return self.q(x).add_(x.mul_(2)[:, :128]), self.k(x)


class ByOperator(Three):
    def forward(self, x: torch.Tensor) -> Any:
        q = self.q(x)
        x += 1
        return q, self.k(x)


class ByElement(Three):
    def forward(self, x: torch.Tensor) -> Any:
        q = self.q(x)
        x[0] = 7
        return q, self.k(x)


class ByFunction(Three):
    def forward(self, x: torch.Tensor) -> Any:
        return self.q(x), functional.relu(x, True), functional.silu(x, inplace=True), self.k(x)


class ByOut(Three):
    def forward(self, x: torch.Tensor) -> Any:
        return self.q(x), torch.abs(x, out=x), self.k(x)


class AnotherX(Three):
    def forward(self, x: torch.Tensor) -> Any:
        q = self.q(x)
        x = x * 2
        return q, self.k(x), self.v(x * 1)


class PerhapsNever(Three):
    def forward(self, x: torch.Tensor) -> Any:
        q = self.q(x)
        return q, self.k(x) if q.sum() > 1e9 else None, [self.v(x) for _ in range(0)]


class ByWalrus(Three):
    def forward(self, x: torch.Tensor) -> Any:
        return self.q(x), (x := x * 2), self.k(x)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: function(*given)


class ByPartial:
    """A decorator that keeps the function elsewhere."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__wrapped__ = function

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else partial(self.__wrapped__, owner)


class WrappedByObject(Three):
    @ByPartial
    def forward(self, x: torch.Tensor) -> Any:
        return self.q(x), self.k(x)


class Decorated(Three):
    @decorated
    def forward(self, x: torch.Tensor) -> Any:
        return self.q(x), self.k(x)


class Rebound(Three):
    def forward(self, x: torch.Tensor) -> Any:
        q = self.q(x)
        self = self.writer.owner[0]
        return q, self.k(x)


def writing(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def with_free(len: Any) -> type[Three]:
    class ByFree(Three):
        """Calls a free variable that has the name of a global function."""

        def forward(self, x: torch.Tensor) -> Any:
            return self.q(x), len(x), self.k(x)

    return ByFree


ByFree = with_free(writing)


class Adding:
    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


ADDING = Adding()


class ByMethodOfObject(Three):
    def forward(self, x: torch.Tensor) -> Any:
        some = Adding()
        return self.q(x), some.add(x), self.k(x)


class ByMethodOfGiven(Three):
    def forward(self, x: torch.Tensor, some: Any = ADDING) -> Any:
        q = self.q(x)
        y = some
        return q, y.add(x), self.k(x)


class ByMethodOfLayer(Three):
    def forward(self, x: torch.Tensor) -> Any:
        layer = self.act
        return self.q(x), (layer.float(), None)[1], self.k(x)


class StarredLater(Three):
    """Python evaluates `*written(x)` before `k=`."""

    def forward(self, x: torch.Tensor) -> Any:
        def written(x: torch.Tensor) -> list[torch.Tensor]:
            return [x.mul_(2)]

        def given(*several: Any, k: Any) -> Any:
            return *several, k

        return given(self.q(x), k=self.k(x), *written(x))  # noqa: B026


class OtherNames(Three):
    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return LoRA.of(found) if name == "k" else found

    def forward(self, x: torch.Tensor) -> Any:
        return self.q(x), self.k(x)


class NameOfClass(Three):
    @property
    def k(self) -> Any:
        return LoRA.of(self._modules["k"])

    @k.setter
    def k(self, layer: nn.Module) -> None:
        self._modules["k"] = layer

    def forward(self, x: torch.Tensor) -> Any:
        return self.q(x), self.k(x)


class Calling(nn.Module):
    """A layer with a call of its own, which writes."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner = [owner]

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        self.owner[0].held.mul_(2)
        return super().__call__(y)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y * 2


class ByCall(Three):
    def __init__(self) -> None:
        super().__init__()
        self.calling = Calling(self)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.held.add_(1)
        return self.calling(self.q(x)), self.k(x)


class ByProperty(Three):
    @property
    def scale(self) -> torch.Tensor:
        return self.held.add_(1)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.held
        return self.q(x), self.scale * 1, self.k(x)


class ShowsLocals(Three):
    def forward(self, x: torch.Tensor) -> Any:
        q, k = self.q(x), self.k(x)
        return q, k, torch.tensor(len(locals()))


APART = [
    ByFree, ByMethodOfObject, ByMethodOfGiven, ByMethodOfLayer, StarredLater, OtherNames,
    NameOfClass, ByCall, ByProperty, ShowsLocals,
    ByAlias, ByMethod, ByLayer, ByMethodOfTensor, ByOperator, ByElement, ByFunction, ByOut,
    AnotherX, PerhapsNever, ByWalrus, Decorated, WrappedByObject, Rebound,
]  # fmt: skip


def flat(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif value is not None:
        for one in value:
            yield from flat(one)


def results(module: nn.Module, *given: Any) -> list[torch.Tensor]:
    return list(flat(module(X.clone(), *given)))


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(same, found, expected))


@pytest.mark.parametrize("kind", [*SHARING, *APART])
def test_siblings_give_the_bits_of_each_by_itself(kind: type[Three], joint: list[int]) -> None:
    expected = results(kind())
    module = kind()
    _siblings.join_siblings(module)
    assert list(_siblings.joined_siblings(module)) == SHARING.get(kind, [])
    assert equal(results(module), expected)
    assert bool(joint) == (kind in SHARING)
    assert not any(one.requires_grad for one in results(module))


def test_parts_are_tensors_of_their_own(joint: list[int]) -> None:
    module = joined()
    q, k, v = module(X)
    assert joint == [3] and all(one.is_contiguous() for one in (k, v, q.transpose(0, 1)))
    assert len({one.untyped_storage().data_ptr() for one in (q, k, v)}) == 3


def joined(kind: type[nn.Module] = Three) -> Any:
    module = kind()
    _siblings.join_siblings(module)
    return module


# ---- when each goes by itself ----


class LoRA(nn.Linear):
    @classmethod
    def of(cls, layer: nn.Module) -> nn.Module:
        made = copy.copy(layer)
        made.__class__ = cls
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


class Counting(TorchFunctionMode):
    """Counts calls of `linear`."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is functional.linear
        return func(*args, **kwargs or {})


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


def lora(module: Any) -> None:
    module.k.__class__ = LoRA


def ordinary(module: Any) -> None:
    module.k.weight = nn.Parameter(WEIGHTS["v"].clone(), requires_grad=False)


def another(module: Any) -> None:
    module.k = nn.Sequential(module.k, nn.SiLU())


def add_one(layer: Any, given: Any, y: torch.Tensor) -> torch.Tensor:
    return y + 1


def hooked(module: Any) -> None:
    module.v.register_forward_hook(add_one)


def hooked_before(module: Any) -> None:
    module.q.register_forward_pre_hook(lambda layer, given: (given[0] * 2,))


def another_forward(module: Any) -> None:
    module.q.forward = MethodType(lambda layer, x: nn.Linear.forward(layer, x) * 2, module.q)


def mixed_modes(module: Any) -> None:
    module.k.weight = nn.Parameter(compressed("k", exact=False), requires_grad=False)


def removed(module: Any) -> None:
    del module.k
    module.k = lambda x: x * 2


def bias_of_no_parameter(module: Any) -> None:
    del module.q.bias
    module.q.bias = torch.ones(128).bfloat16()


def between(module: Any) -> None:
    module.norm.register_forward_hook(add_one)


def inplace(module: Any) -> None:
    module.act.inplace = True


def named_otherwise(module: Any) -> None:
    module.__dict__["k"] = LoRA.of(module.k)


def compiled(module: Any) -> None:
    module.k._compiled_call_impl = LoRA.of(module.k)._call_impl


CHANGES = [
    inplace, named_otherwise, compiled,
    lora, ordinary, another, hooked, hooked_before, another_forward, mixed_modes, removed, between,
    bias_of_no_parameter,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_goes_by_itself(change: Any, joint: list[int]) -> None:
    plain, module = Kept(), joined(Kept)
    for one in (plain, module):
        change(one)
    assert equal(results(module), results(plain))
    assert not joint and not list(_siblings.joined_siblings(module))


class Inner(nn.Module):
    """A layer with a layer, a function, and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.inner = partial(functional.gelu, approximate="tanh"), nn.SiLU()

    def twice(self, y: torch.Tensor) -> torch.Tensor:
        return y * 2

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return self.inner(self.act(self.twice(y)))  # type: ignore[no-any-return]


class Nested(Three):
    def __init__(self) -> None:
        super().__init__()
        self.deep = Inner()

    def forward(self, x: torch.Tensor) -> Any:
        return self.deep(self.q(x)), self.k(x)


NESTED: dict[str, Callable[[Any], Any]] = {
    "hook": lambda deep: deep.inner.register_forward_hook(add_one),
    "child": lambda deep: setattr(deep, "inner", Writer(deep.owner)),
    "inplace": lambda deep: setattr(deep.inner, "inplace", True),
    "function": lambda deep: setattr(deep, "act", writing),
    "keyword": lambda deep: deep.act.keywords.update(approximate="none"),
    "method": lambda deep: setattr(deep, "twice", writing),
}


@pytest.mark.parametrize("change", NESTED)
def test_changes_inside_of_a_layer_between(change: str, joint: list[int]) -> None:
    plain, module = Nested(), joined(Nested)
    assert equal(results(module), results(plain)) and joint == [2]
    for one in (plain, module):
        one.deep.__dict__["owner"] = one
        NESTED[change](one.deep)
    assert equal(results(module), results(plain)) and joint == [2]
    assert not list(_siblings.joined_siblings(module))


def test_copies_with_functions_of_their_own(joint: list[int]) -> None:
    module = joined(Nested)
    module.writer.owner.clear()
    copied = copy.deepcopy(module)
    assert type(copied) is type(module) and equal(results(copied), results(module))
    assert joint == [2, 2]


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize(
    "owner, name", [(nn.Linear, "forward"), (nn.Module, "__call__"), (functional, "linear")]
)
def test_what_layers_call_may_be_exchanged(
    owner: Any, name: str, is_before: bool, joint: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, called = getattr(owner, name), []

    def watched(*given: Any) -> Any:
        called.append(given)
        return original(*given)

    module = Three() if is_before else joined()
    monkeypatch.setattr(owner, name, watched)
    _siblings.join_siblings(module)
    assert equal(list(flat(module.forward(X))), results(Three())) and not joint
    assert len(called) >= 3


def test_a_forward_of_pytorch_that_was_exchanged_before(
    joint: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.SiLU, "forward", lambda layer, y: y.mul_(2))
    assert equal(results(joined(Kept)), results(Kept())) and not joint


def test_modes_of_functions_see_each_product(joint: list[int]) -> None:
    module, expected = joined(), results(Three())
    with Counting() as mode, torch.device("cpu"):
        assert equal(results(module), expected)
    assert mode.count == 3 and not joint
    with torch.device("cpu"):
        assert equal(results(module), expected)
    assert joint == [3]


def test_tangents_flow_through_each(joint: list[int]) -> None:
    with forward_ad.dual_level(), torch.no_grad():
        x = forward_ad.make_dual(X, X * 2)
        for found in (joined()(x)[1], Three().k(x)):
            tangent = forward_ad.unpack_dual(found).tangent
            assert tangent is not None
            assert same(tangent, functional.linear(X * 2, WEIGHTS["k"]))
    assert not joint


def test_traces_have_each_product(joint: list[int]) -> None:
    module, expected = joined(Kept), results(Kept())
    module.__dict__["write"] = lambda value: value
    made = torch.fx.symbolic_trace(joined(OneOfTwo))
    assert equal(results(made), results(OneOfTwo())) and not joint
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(module, X, check_trace=False)
    assert equal(results(traced), expected)


class OneOfTwo(Three):
    def forward(self, x: torch.Tensor) -> Any:
        return self.q(x), self.k(x)


def test_a_number_alone_is_refused_as_by_a_layer(joint: list[int]) -> None:
    x, errors = torch.tensor(2.0).bfloat16(), []
    for module in (joined(), Three()):
        with pytest.raises(Exception) as error:
            module(x)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


def test_a_forward_that_was_exchanged_is_called(joint: list[int]) -> None:
    module = joined()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Three, "forward", lambda self, x: self.q(x) * 3)
        assert same(module(X), functional.linear(X, WEIGHTS["q"], module.q.bias) * 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, x: x[:, :128])
        assert same(module(X)[1], X[:, :128])
    assert not joint and len(module(X)) == 3 and joint


def test_gradients_flow_through_each(joint: list[int]) -> None:
    found = []
    for module in (joined(), Three()):
        x = X.clone().requires_grad_()
        sum(one.sum() for one in flat(module(x))).backward()
        found.append(x.grad)
    assert same(*found) and not joint
    module.q.bias.requires_grad_()
    assert module(X)[0].requires_grad


@pytest.mark.parametrize("mode", [Watching, lambda: FlopCounterMode(display=False)])
def test_modes_see_each_product(mode: Any, joint: list[int]) -> None:
    module, expected = joined(), results(Three())
    with mode():
        assert equal(results(module), expected)
    assert not joint


def test_autocast_many_rows_and_other_hooks(joint: list[int]) -> None:
    module = joined(OneExpression)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(X.float())[0].dtype == torch.bfloat16
    module(torch.zeros(_siblings.MAX_ROWS + 1, 256).bfloat16())
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    module(X)
    handle.remove()
    assert not joint
    module(torch.zeros(_siblings.MAX_ROWS, 256).bfloat16())
    assert joint == [2]


def test_on_the_cpu_each_goes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_siblings._ops, "linears", None)
    assert equal(results(joined()), results(Three()))


# ---- modules stay what they were ----


def separate(root: nn.Module) -> None:
    """Makes each layer multiply separately again."""
    for module in root.modules():
        if _siblings._known(module):
            module.__class__ = type(module).__mro__[1]


def test_modules_are_of_their_class(joint: list[int]) -> None:
    module, plain = joined(), Three()
    assert isinstance(module, Three) and repr(module) == repr(plain)
    assert (type(module).__name__, type(module).__module__) == ("Three", Three.__module__)
    assert module.state_dict().keys() == plain.state_dict().keys()
    separate(module)
    assert type(module) is Three and equal(results(module), results(plain)) and not joint


@pytest.mark.parametrize(
    "again",
    [
        copy.deepcopy,
        copy.copy,
        lambda module: pickle.loads(pickle.dumps(module)),
        lambda module: pickle.loads(pickle.dumps(module, 2)),
        lambda module: by_torch(nn.Sequential(module))[0],
    ],
)
def test_copies_multiply_by_siblings_too(again: Any, joint: list[int]) -> None:
    module = joined()
    module.writer.owner.clear()
    copied = again(module)
    assert type(copied) is type(module) and equal(results(copied), results(module))
    assert joint == [3, 3]
    hooked(copied)
    assert again is copy.copy or not list(_siblings.joined_siblings(again(copied)))


def by_torch(module: nn.Module) -> Any:
    torch.save(module, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_modules_are_free_when_nobody_has_them() -> None:
    gc.collect()
    module = joined()
    module.writer.owner.clear()
    held = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert held() is None
    finally:
        gc.enable()


def test_errors_show_lines_of_the_source() -> None:
    module = joined()
    with pytest.raises(RuntimeError) as error:
        module(X.view(6, 128))
    lines = [one.line for one in traceback.extract_tb(error.tb)]
    assert "q = self.q(x).view(3, 2, 64).transpose(0, 1)" in lines


def test_a_source_that_is_not_of_the_code_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    scope: dict[str, Any] = {}
    exec("def forward(self, x):\n    return self.q(x), self.k(x)", scope)
    made = type("Made", (Three,), {"forward": scope["forward"]})
    lines, _ = _code.inspect.findsource(Three.forward)
    edited = [line.replace("(3, 2, 64)", "(3, 4, 32)") for line in lines]
    assert not list(_siblings.joined_siblings(joined(made)))
    _code._source_of.cache_clear()
    monkeypatch.setattr(_code.inspect, "findsource", lambda function: (edited, 0))
    assert type(joined()) is Three
    _code._source_of.cache_clear()


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_forwards_that_are_no_functions_or_compiled_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = type("Made", (Three,), {"forward": Unhashable()})
    assert type(joined(made)) is made and same(joined(made)(X), X)
    _code._source_of.cache_clear()
    empty = compile("0", "", "exec")
    monkeypatch.setattr(_code, "compile", lambda *_, **__: empty, raising=False)
    assert type(joined()) is Three
    _code._source_of.cache_clear()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the syntax is newer")
def test_a_forward_with_type_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def forward[T](self, x: T):\n    return self.q(x), self.k(x)\n"
    (tmp_path / "df11_generic.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    made = type("Made", (Three,), {"forward": importlib.import_module("df11_generic").forward})
    assert type(joined(made)) is made


def test_codes_differ_by_the_kinds_of_their_arguments() -> None:
    several: list[Any] = [lambda a, b: a, lambda a, *, b: a, lambda a, b, /: a]
    for one in several:
        same_ones = [_code._is_same(one.__code__, other.__code__) for other in several]
        assert sum(same_ones) == 1


class WithNew(Three):
    def __new__(cls, size: int = 1) -> Any:
        made = super().__new__(cls)
        made.__dict__["size"] = size
        return made

    def __getnewargs__(self) -> tuple[int]:
        return (self.__dict__["size"],)


def test_subclasses_and_what_new_is_told_are_kept() -> None:
    made: Any = type("Made", (type(joined()),), {})
    module = made()
    module.writer.owner.clear()
    assert type(copy.deepcopy(module)) is made and type(copy.copy(module)) is made
    assert type(joined(WithNew)) is WithNew


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", [Kept, OneExpression, Branches, Nested])
def test_compiled_as_one_graph(kind: Any, grad: bool, joint: list[int]) -> None:
    module, called = joined(kind), []
    torch._dynamo.reset()

    def backend(graph: Any, inputs: Any) -> Any:
        called.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    plain = kind()
    for one in (module, plain):
        one.write = MethodType(lambda self, value: value, one)
        one.writer.owner.clear()
    made = torch.compile(module, fullgraph=True, backend=backend)
    with torch.set_grad_enabled(grad), torch.device("cpu"):
        assert equal(list(flat(made(X))), results(plain))
    assert torch.ops.df11._each_linear in called and not joint


def test_graphs_with_ordinary_weights(joint: list[int]) -> None:
    weights, biases = [WEIGHTS["q"], compressed("k")], [None, torch.ones(64).bfloat16()]
    found = torch.ops.df11._each_linear(X, weights, biases)
    plain = [functional.linear(X, WEIGHTS[n], b) for n, b in zip("qk", biases, strict=True)]
    assert equal(found, plain) and not joint
    weights[0] = compressed("q")
    with torch.inference_mode():
        assert equal(torch.ops.df11._each_linear(X, weights, biases), plain)


# ---- models ----


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    # With keys and values that are large enough to stay compressed.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.SMALL, "num_key_value_heads", 4)
        made = Folders(tmp_path_factory.mktemp("siblings"))
        for name in NAMES:
            made.both(name)
        return made


NAMES = ["llama-bias", "qwen3", "gemma3"]


@on_devices
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_same(
    name: str, folders: Folders, device: str, joint: list[int], tmp_path: Path
) -> None:
    original, model = folders.pair(name, device)
    report = df11.report(model)
    assert len(report.siblings) == 6 and "15 matrices that share x in 6 products" in str(report)
    assert report.siblings[0] == tuple(f"model.layers.0.self_attn.{layer}" for layer in QKV)
    expected = models.greedy(original, prompt(2, 7), 3)
    assert models.equal(models.greedy(model, prompt(2, 7), 3, like=expected), expected)
    assert joint == [3, 2] * 9
    model.save_pretrained(tmp_path)
    again = models.load(tmp_path, device)
    assert models.equal(models.greedy(again, prompt(2, 7), 3, like=expected), expected)


def test_adapters_go_by_themselves(folders: Folders, joint: list[int]) -> None:
    original, model = map(models.adapted, folders.pair("qwen3"))
    with torch.no_grad():
        assert torch.equal(model(prompt()).logits, original(prompt()).logits)
    assert not joint and len(df11.report(model).siblings) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"mode": mode, "residence": form}
        for mode in ("exact", "fused")
        for form in ("stored", "fast")
    ],
)
def test_on_a_gpu_bits_are_those_of_each_by_itself(options: Any, folders: Folders) -> None:
    said = df11.Config(**options)
    model = models.load(folders.df11("qwen3"), "cuda", quantization_config=said)
    apart = copy.deepcopy(model)
    separate(apart)
    assert df11.report(model).siblings and not df11.report(apart).siblings
    for rows, length in ((1, 1), (1, 16), (3, 21), (1, 64), (2, 60)):
        given = prompt(rows, length)
        expected = models.greedy(apart, given, 3)
        assert models.equal(models.greedy(model, given, 3, like=expected), expected)
