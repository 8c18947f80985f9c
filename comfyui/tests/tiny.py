"""Small seeded diffusion models as files, with ComfyUI's names, and what to sample them with.

Widths are those that ComfyUI's detection reads off the shapes; where it fixes them (Qwen-Image,
Z-Image) the models have one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

#: Numbers after which noise repeats: a prime, so that rows differ.
NOISE = 3_999_971
PREFIX = "diffusion_model."


class Tiny(NamedTuple):
    module: str
    kind: str
    config: dict[str, Any]
    latent: tuple[int, ...]
    #: Shapes of the text and of its pooled vector.
    text: tuple[int, ...]
    pooled: tuple[int, ...] | None = None


def flux(hidden: int, depth: int, single: int, text: int, pooled: int) -> dict[str, Any]:
    sides = {"in_channels": 16, "out_channels": 16, "vec_in_dim": pooled, "context_in_dim": text}
    shape = {"hidden_size": hidden, "mlp_ratio": 4.0, "num_heads": hidden // 128, "depth": depth}
    rope = {"axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2, "txt_ids_dims": []}
    options = {"depth_single_blocks": single, "qkv_bias": True, "guidance_embed": True}
    return {**sides, **shape, **rope, **options}


SD3 = {
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "depth": 3,
    "input_size": None,
    "adm_in_channels": 96,
    "context_embedder_config": {
        "target": "torch.nn.Linear",
        "params": {"in_features": 128, "out_features": 192},
    },
    "num_patches": 256,
    "pos_embed_max_size": 16,
    "pos_embed_scaling_factor": None,
}
WAN = {"dim": 256, "ffn_dim": 512, "num_heads": 2, "num_layers": 2, "in_dim": 16, "out_dim": 16}
Z_IMAGE = {
    "patch_size": 2,
    "in_channels": 16,
    "dim": 3840,
    "cap_feat_dim": 256,
    "n_layers": 1,
    "qk_norm": True,
    "n_heads": 30,
    "n_kv_heads": 30,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
    "rope_theta": 256.0,
    "ffn_dim_multiplier": 8.0 / 3.0,
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}
MMDIT = "comfy.ldm.modules.diffusionmodules.mmdit"
MODELS = {
    "Flux": Tiny(
        "comfy.ldm.flux.model",
        "Flux",
        flux(256, 2, 2, 128, 96),
        (1, 16, 16, 16),
        (1, 12, 128),
        (1, 96),
    ),
    "SD3": Tiny(MMDIT, "MMDiT", SD3, (1, 16, 16, 16), (1, 12, 128), (1, 96)),
    "Wan": Tiny("comfy.ldm.wan.model", "WanModel", WAN, (1, 16, 2, 8, 8), (1, 12, 4096)),
    "Qwen-Image": Tiny(
        "comfy.ldm.qwen_image.model",
        "QwenImageTransformer2DModel",
        {"num_layers": 1},
        (1, 16, 1, 8, 8),
        (1, 12, 3584),
    ),
    "Z-Image": Tiny("comfy.ldm.lumina.model", "NextDiT", Z_IMAGE, (1, 16, 8, 8), (1, 12, 256)),
}


def noise(seed: int) -> Callable[[Tensor], Tensor]:
    """Fills tensors with numbers of a normal distribution that a seed decides."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(NOISE, generator=generator).bfloat16()
    begin = 0

    def fill(like: Tensor) -> Tensor:
        nonlocal begin
        begin = (begin + 7919) % NOISE
        rolled = torch.cat([numbers[begin:], numbers[:begin]])
        times = -(-like.numel() // NOISE)
        return rolled.repeat(times)[: like.numel()].view(like.shape)

    return fill


@contextmanager
def whole_layers() -> Iterator[None]:
    """Gives new layers weights, which with dynamic VRAM ComfyUI leaves to the loading of a file."""
    import comfy

    management = getattr(comfy, "memory_management", None)
    before = getattr(management, "aimdo_enabled", False)
    if before:
        management.aimdo_enabled = False
    try:
        yield
    finally:
        if before:
            management.aimdo_enabled = True


def weights(tiny: Tiny, seed: int = 1) -> dict[str, Tensor]:
    """The state dict of such a model, in BF16."""
    import comfy.ops

    kind = getattr(import_module(tiny.module), tiny.kind)
    options = {"operations": comfy.ops.disable_weight_init, "dtype": torch.bfloat16}
    with whole_layers(), torch.device("meta"):
        module = kind(**tiny.config, **options)
    fill = noise(seed)
    made = {}
    for name, value in module.state_dict().items():
        small = 0.02 * fill(value)
        made[name] = 1 + small if value.dim() == 1 and name.endswith("weight") else small
    return made


def write(tiny: Tiny, path: Path) -> dict[str, Tensor]:
    made = weights(tiny)
    save_file(made, path)
    return made


def lora(made: dict[str, Tensor], rank: int = 4) -> dict[str, Tensor]:
    """A LoRA for every matrix of a model."""
    fill, found = noise(2), {}
    for name, value in made.items():
        if value.dim() != 2 or not name.endswith(".weight"):
            continue
        stem = PREFIX + name.removesuffix(".weight")
        rows, columns = value.shape
        found[f"{stem}.lora_up.weight"] = 0.05 * fill(torch.empty(rows, rank))
        found[f"{stem}.lora_down.weight"] = 0.05 * fill(torch.empty(rank, columns))
        found[f"{stem}.alpha"] = torch.tensor(float(rank))
    return found


def conditioning(tiny: Tiny, seed: int) -> list[list[Any]]:
    fill = noise(seed)
    more = {} if tiny.pooled is None else {"pooled_output": fill(torch.empty(tiny.pooled)).float()}
    return [[fill(torch.empty(tiny.text)).float(), {**more, "guidance": 3.5}]]


def sample(
    model: Any,
    tiny: Tiny,
    steps: int = 2,
    cfg: float = 2.0,
    told: Any = None,
    prompts: list[Any] | None = None,
) -> Tensor:
    """The latent of a seeded graph of a model loader, two prompts and a sampler. `told` is called
    after each step.
    """
    import comfy.sample

    latent = torch.zeros(tiny.latent)
    texts = prompts or [conditioning(tiny, seed) for seed in (3, 4)]
    options = {"callback": told, "disable_pbar": True, "seed": 7}
    noised = comfy.sample.prepare_noise(latent, 7)
    how = (steps, cfg, "euler", "simple")
    found: Tensor = comfy.sample.sample(model, noised, *how, *texts, latent, **options)
    return found
