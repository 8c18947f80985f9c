"""Small pipelines of diffusers."""

import re
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

#: Components that the pipelines here lack.
WITHOUT: dict[str, Any] = {"tokenizer": None, "tokenizer_2": None}
#: Dtypes of the components as they are saved.
DTYPES = {"default": torch.bfloat16, "vae": torch.float32}


def save(folder: Path) -> None:
    """A small FLUX.1 in BF16, except its VAE in F32; without tokenizers."""
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=16, joint_attention_dim=128, pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    clip = transformers.CLIPTextConfig(
        bos_token_id=0, eos_token_id=2, hidden_size=32, intermediate_size=37,
        num_attention_heads=4, num_hidden_layers=5, projection_dim=32, vocab_size=1000,
    )  # fmt: skip
    t5 = transformers.T5Config(
        vocab_size=1000, d_model=128, d_kv=32, d_ff=512, num_layers=2, num_heads=4
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
    """The outputs of the text encoders, and an image from them before the VAE."""
    with torch.no_grad():
        ids = torch.tensor([[0, 5, 6, 2]], device=pipeline.text_encoder.device)
        pooled = pipeline.text_encoder(ids).pooler_output
        hidden = pipeline.text_encoder_2(ids).last_hidden_state
    return [pooled, hidden, image(pipeline, pooled, hidden)]


def image(pipeline: Any, pooled: Any, hidden: Any) -> Any:
    """An image before the VAE, by attention that gives the same bits in every run."""
    given = {"prompt_embeds": hidden, "pooled_prompt_embeds": pooled, "height": 16, "width": 16}
    given |= {"generator": torch.Generator().manual_seed(3), "output_type": "latent"}
    with sdpa_kernel(SDPBackend.MATH):
        return pipeline(**given, num_inference_steps=2).images


def flux(layers: int = 6) -> Any:
    """A small transformer of FLUX.1, with the weights that it begins with."""
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=layers, num_single_layers=layers,
        attention_head_dim=32, num_attention_heads=4, joint_attention_dim=64,
        pooled_projection_dim=32, axes_dims_rope=[8, 12, 12],
    )  # fmt: skip


def sd3() -> Any:
    return diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=8, attention_head_dim=32,
        num_attention_heads=4, joint_attention_dim=64, caption_projection_dim=128,
        pooled_projection_dim=32, out_channels=4, pos_embed_max_size=16,
    )  # fmt: skip


#: Names of SD3's original format, and those of diffusers; the last block's norm is apart.
_ORIGINAL = [
    (r"^pos_embed.pos_embed$", "pos_embed"),
    (r"^pos_embed.proj", "x_embedder.proj"),
    (r"^time_text_embed.timestep_embedder.linear_1", "t_embedder.mlp.0"),
    (r"^time_text_embed.timestep_embedder.linear_2", "t_embedder.mlp.2"),
    (r"^time_text_embed.text_embedder.linear_1", "y_embedder.mlp.0"),
    (r"^time_text_embed.text_embedder.linear_2", "y_embedder.mlp.2"),
    (r"^norm_out.linear", "final_layer.adaLN_modulation.1"),
    (r"^proj_out", "final_layer.linear"),
    (r"^transformer_blocks", "joint_blocks"),
    (r"norm1_context.linear", "context_block.adaLN_modulation.1"),
    (r"norm1.linear", "x_block.adaLN_modulation.1"),
    (r"ff_context.net.0.proj", "context_block.mlp.fc1"),
    (r"ff_context.net.2", "context_block.mlp.fc2"),
    (r"ff.net.0.proj", "x_block.mlp.fc1"),
    (r"ff.net.2", "x_block.mlp.fc2"),
    (r"attn.to_add_out", "context_block.attn.proj"),
    (r"attn.to_out.0", "x_block.attn.proj"),
    (r"attn.add_([qkv])_proj", r"context_block.attn.\1"),
    (r"attn.to_([qkv])", r"x_block.attn.\1"),
]


def in_original_format(model: Any) -> dict[str, torch.Tensor]:
    """The checkpoint that diffusers makes these weights of a small SD3 of: projections are one."""
    found: dict[str, torch.Tensor] = {}
    last = f"joint_blocks.{len(model.transformer_blocks) - 1}.context_block.adaLN_modulation"
    for name, value in model.state_dict().items():
        for pattern, replacement in _ORIGINAL:
            name = re.sub(pattern, replacement, name)
        if name.startswith((last, "final_layer.adaLN_modulation")):
            value = torch.cat(value.chunk(2)[::-1])
        found[name] = value
    for name in [name for name in found if ".attn.q." in name]:
        parts = [found.pop(name.replace(".q.", f".{letter}.")) for letter in "qkv"]
        found[name.replace(".q.", ".qkv.")] = torch.cat(parts)
    return found


def unet() -> Any:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=2, sample_size=16, in_channels=4,
        out_channels=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=32,
        norm_num_groups=8,
    )  # fmt: skip


def wan() -> Any:
    """A small transformer of Wan, which diffusers keeps in F32 in parts."""
    return diffusers.WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=64,
        freq_dim=32, ffn_dim=512, num_layers=6, rope_max_seq_len=32,
    )  # fmt: skip


#: Inputs of these components, by name; floats are BF16.
_TEXT: dict[str, tuple[int, ...]] = {
    "encoder_hidden_states": (1, 8, 64), "pooled_projections": (1, 32),
}  # fmt: skip
_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "flux": {"hidden_states": (1, 16, 4), **_TEXT},
    "sd3": {"hidden_states": (1, 4, 16, 16), **_TEXT},
    "unet": {"sample": (1, 4, 16, 16), "encoder_hidden_states": (1, 8, 32)},
    "wan": {"hidden_states": (1, 4, 2, 8, 8), "encoder_hidden_states": (1, 8, 64)},
}


def inputs(kind: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    made = {
        name: torch.randn(shape, generator=generator).bfloat16()
        for name, shape in _SHAPES[kind].items()
    }
    if kind == "flux":
        made |= {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3)}
    is_flow = kind in ("flux", "sd3")
    return {**made, "timestep": torch.tensor([0.5]).bfloat16() if is_flow else torch.tensor([3])}
