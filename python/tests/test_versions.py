"""Releases of transformers: what is said of one that lacks something, and what each of them does
with quantized models.
"""

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import SMALL, Folders, equal, load, prompt, saved, seeded

import df11
from df11 import _doctor, _hub, _quantizer, _wrapping

#: Files of models that ask whether a model is quantized, of the releases that are tested, and why
#: that is no matter.
KNOWN = {
    # `_is_quantized` of a config, which compressed models do not have.
    "models/falcon/modeling_falcon.py",
    "models/falcon_mamba/modeling_falcon_mamba.py",
    "models/falcon_mamba/modular_falcon_mamba.py",
    "models/gpt_neo/modeling_gpt_neo.py",
    "models/gptj/modeling_gptj.py",
    "models/jamba/modeling_jamba.py",
    "models/jamba/modular_jamba.py",
    "integrations/flash_attention.py",
    # Configs of checkpoints in FP8 and FP4, not of any in BF16: loading df11's refuses their
    # shapes.
    "models/deepseek_v4/configuration_deepseek_v4.py",
    "models/inkling2/configuration_inkling2.py",
    "models/inkling2/modular_inkling2.py",
    # Hands the config of an adapter's base model on.
    "models/auto/auto_factory.py",
}
ASKS = re.compile(
    r"is_quantized|quantization_config|quantization_method|_pre_quantization_dtype|hf_quantizer"
)

#: Models that take other ways if they are quantized.
OTHER_WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "jamba": ("JambaConfig", {
        "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8,
        "mamba_dt_rank": 16, "use_mamba_kernels": False,
    }),
    "falcon_mamba": ("FalconMambaConfig", {
        "num_hidden_layers": 3, "state_size": 8, "time_step_rank": 16,
    }),
    "gpt_neo": ("GPTNeoConfig", {
        "num_layers": 3, "num_heads": 4, "attention_types": [[["global", "local", "global"], 1]],
    }),
    "gptj": ("GPTJConfig", {
        "n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 16,
    }),
    "falcon": ("FalconConfig", {"num_kv_heads": 2, "new_decoder_architecture": True}),
}  # fmt: skip
COMMON = ("hidden_size", "vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", OTHER_WAYS)
@torch.no_grad()
def test_models_that_ask_whether_they_are_quantized(name: str, dtype: str, tmp_path: Path) -> None:
    kind, changes = OTHER_WAYS[name]
    left_out = {"gptj": {"hidden_size"}, "falcon": {"head_dim"}}.get(name, set())
    known = SMALL if name in ("jamba", "falcon") else {key: SMALL[key] for key in COMMON}
    common = {key: value for key, value in known.items() if key not in left_out}
    config = getattr(transformers, kind)(**{**common, **changes}, dtype="bfloat16")
    model = seeded(transformers.AutoModelForCausalLM.from_config(config))
    # PyTorch chooses other kernels for weights that want gradients.
    models = [load(each, dtype=dtype).requires_grad_(False) for each in saved(model, tmp_path)]
    tokens = prompt(3, 9)
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 4, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    expected, found = ([m(tokens).logits, *m.generate(tokens, **options).logits] for m in models)
    assert torch.isfinite(expected[0]).all() and equal(found, expected)
    report = df11.report(models[1], verify=True)
    assert report.verified
    assert ("stored" in report.residences.values()) == (dtype == "bfloat16")


def test_no_other_model_asks_whether_it_is_quantized() -> None:
    """A release in which a model does so newly must be looked at."""
    root = Path(transformers.__file__).parent
    places = ("models/*/*.py", "integrations/flash_*.py", "integrations/*attention*.py")
    found = {
        file.relative_to(root).as_posix()
        for place in places
        for file in root.glob(place)
        if not file.name.startswith("convert_") and ASKS.search(file.read_text(encoding="utf-8"))
    }
    assert len(found) > 8 and found <= KNOWN


def test_these_are_the_releases_that_are_named() -> None:
    """`python/check` runs the tests with the oldest releases, and with the newest there are. Newer
    ones than `_doctor.TESTED` names pass; it names them when somebody has looked at the tests.
    """
    said = os.environ.get("DF11_RELEASES", "")
    for name in ("torch", "transformers", "accelerate", "peft", "diffusers"):
        library = pytest.importorskip(name)
        oldest, newest = (_doctor._numbers(release) for release in _doctor.TESTED[name])
        found = _doctor._numbers(library.__version__)
        assert found >= oldest, name
        assert said != "oldest" or found == oldest, name
        assert said != "newest" or found >= newest, name


TESTED = _doctor.TESTED["transformers"]
TOO_OLD = r"^transformers 4\.57\.1 is too old .* tested with 5\.\d+ to 5\.\d+: "
TOO_NEW = r"^transformers 5\.99\.0\.dev0 is too new for this df11"


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("4.57.1", TOO_OLD + r"pip install 'transformers>=5\.\d+,<5\.\d+'$"),
        ("5.1.0", "too old"),
        ("5.99.0.dev0", TOO_NEW + r".*pip install -U df11, or pip install"),
        ("6.0.0rc1", "too new"),
        (f"{TESTED[0]}.3", "not as it was released"),
        (f"{TESTED[1]}.9", "not as it was released"),
    ],
)
def test_a_release_that_lacks_something_is_told(
    version: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_quantizer, "__version__", version)
    with monkeypatch.context() as patch:
        for name in _quantizer._WITH_CONFIG:
            patch.delattr(f"df11._quantizer.HfQuantizer.{name}", raising=False)
        with pytest.raises(ImportError, match=words) as error:
            _quantizer.Df11Quantizer(_quantizer.Config(), pre_quantized=True).validate_environment()
        assert "update_tp_plan and update_attn_implementation" in str(error.value)


@pytest.mark.parametrize("place", sorted(_wrapping.NEEDED | _wrapping.OPTIONAL))
def test_wrapped_functions_are_there(place: str) -> None:
    library = place.partition(".")[0]
    if library == "vllm":
        pytest.skip("test_vllm_service.py looks for those of vLLM")
    pytest.importorskip(library)
    owner, name = _wrapping._find(place)
    assert callable(getattr(owner, name))


def test_a_release_that_lacks_a_wrapped_function_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("transformers.modeling_utils.load_state_dict")
    with pytest.raises(ImportError, match=r"^transformers \S+ is .*: it lacks load_state_dict; "):
        _hub.hand({})


@pytest.mark.parametrize("lacking", _quantizer._WITH_CONFIG)
def test_one_of_two_names_is_enough(
    folders: Folders, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases have one, the other, or both."""
    other = next(name for name in _quantizer._WITH_CONFIG if name != lacking)
    if not hasattr(_quantizer.HfQuantizer, other):
        pytest.skip(f"transformers {transformers.__version__} calls {lacking} alone")
    monkeypatch.setattr(_quantizer.Df11Quantizer, lacking, lambda self, config: config)
    model = load(folders.df11("llama"))
    assert df11.report(model, verify=True).verified


def test_configs_are_not_marked_as_quantized(folders: Folders) -> None:
    model = load(folders.df11("llama"))
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    assert configs
    for config in (*configs, copy.deepcopy(model.config)):
        assert not hasattr(config, "_is_quantized")
