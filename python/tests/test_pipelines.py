"""A whole pipeline of diffusers: compressed by the command, loaded as its model card says."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import df11

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")


def save(folder: Path) -> None:
    """A small FLUX.1 in BF16, except its VAE in F32; without tokenizers."""
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=16,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    clip = transformers.CLIPTextConfig(
        bos_token_id=0,
        eos_token_id=2,
        hidden_size=32,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=5,
        projection_dim=32,
        vocab_size=1000,
    )
    t5 = transformers.T5Config(
        vocab_size=1000, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    )
    vae = diffusers.AutoencoderKL(
        sample_size=32, block_out_channels=(4,), latent_channels=1, norm_num_groups=1
    )
    diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=transformers.CLIPTextModel(clip).to(torch.bfloat16),
        tokenizer=None,
        text_encoder_2=transformers.T5EncoderModel(t5).to(torch.bfloat16),
        tokenizer_2=None,
        transformer=transformer.to(torch.bfloat16),
        vae=vae,
    ).save_pretrained(folder)


def answers(pipeline: Any) -> list[Any]:
    """What the text encoders say, and an image of it before the VAE."""
    with torch.no_grad():
        ids = torch.tensor([[0, 5, 6, 2]])
        pooled = pipeline.text_encoder(ids).pooler_output
        hidden = pipeline.text_encoder_2(ids).last_hidden_state
        latent = pipeline(
            prompt_embeds=hidden,
            pooled_prompt_embeds=pooled,
            num_inference_steps=2,
            height=16,
            width=16,
            output_type="latent",
            generator=torch.Generator().manual_seed(3),
        ).images
    return [pooled, hidden, latent]


def test_the_card_of_a_pipeline_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(Path("bf16"))
    subprocess.run([sys.executable, "-m", "df11", "compress", "bf16", "-q"], check=True)
    assert df11.verify("bf16-df11", progress=False).files == 10

    card = Path("bf16-df11/README.md").read_text()
    found = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert found
    # What has no tokenizers is loaded without.
    code = found[1].replace('"bf16-df11",', '"bf16-df11", tokenizer=None, tokenizer_2=None,')
    names: dict[str, Any] = {}
    exec(code, names)
    pipeline = names["pipeline"]
    assert "df11: active" in str(df11.report(pipeline))

    original = diffusers.FluxPipeline.from_pretrained(
        "bf16",
        tokenizer=None,
        tokenizer_2=None,
        torch_dtype={"default": torch.bfloat16, "vae": torch.float32},
    )
    for got, expected in zip(answers(pipeline), answers(original), strict=True):
        assert torch.isfinite(expected).all()
        assert torch.equal(got, expected)


def test_a_pipeline_comes_back(tmp_path: Path) -> None:
    save(tmp_path / "bf16")
    report = df11.compress(tmp_path / "bf16", tmp_path / "df11", progress=False)
    assert report.shards == 5
    assert df11.estimate(tmp_path / "bf16", progress=False).stored_bytes == report.stored_bytes
    df11.convert(tmp_path / "df11", tmp_path / "gap", layout="gap", progress=False)
    df11.decompress(tmp_path / "gap", tmp_path / "back", progress=False)
    paths = [path for path in (tmp_path / "bf16").rglob("*") if path.is_file()]
    assert len(paths) == 10
    for path in paths:
        back = tmp_path / "back" / path.relative_to(tmp_path / "bf16")
        assert back.read_bytes() == path.read_bytes()
    (tmp_path / "gap" / "vae").rename(tmp_path / "away")
    found = df11.verify(tmp_path / "gap", progress=False)
    assert list(found.unchecked) == ["component vae, which is missing"]
    with pytest.raises(df11.ParameterError, match="pipeline"):
        df11.open(tmp_path / "gap")
