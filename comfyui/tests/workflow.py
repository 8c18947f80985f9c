"""A seeded checkpoint of SD3's kind (diffusion model, CLIP-L, VAE), and a workflow from its prompt
to an image.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import MODELS, Tiny, noise, sample, weights, whole_layers
from torch import Tensor

#: Widths that ComfyUI gives the text of SD3, whichever encoders there are.
TEXT, POOLED = 4096, 2048
VAE = {
    "double_z": True,
    "z_channels": 16,
    "resolution": 256,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 128,
    "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_resolutions": [],
    "dropout": 0.0,
}
CODER = "comfy.ldm.modules.diffusionmodules.model"
REGULARIZER = "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"


def diffusion() -> Tiny:
    sd3 = MODELS["SD3"]
    context = {"target": "torch.nn.Linear", "params": {"in_features": TEXT, "out_features": 192}}
    more = {"adm_in_channels": POOLED, "context_embedder_config": context}
    return sd3._replace(config={**sd3.config, **more})


def vae() -> Any:
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    return AutoencodingEngine(
        regularizer_config={"target": REGULARIZER},
        encoder_config={"target": f"{CODER}.Encoder", "params": VAE},
        decoder_config={"target": f"{CODER}.Decoder", "params": VAE},
    )


def clip() -> Any:
    import comfy.clip_model
    import comfy.ops
    import comfy.sd1_clip

    file = Path(comfy.sd1_clip.__file__).parent / "sd1_clip_config.json"
    config = json.loads(file.read_text())
    operations = comfy.ops.disable_weight_init
    return comfy.clip_model.CLIPTextModel(config, torch.bfloat16, "meta", operations)


def filled(module: Any, seed: int) -> dict[str, Tensor]:
    fill = noise(seed)
    return {name: 0.03 * fill(value) for name, value in module.state_dict().items()}


def write(path: Path) -> None:
    with whole_layers(), torch.device("meta"):
        coder, text = vae(), clip()
    parts = {
        "model.diffusion_model.": weights(diffusion()),
        "first_stage_model.": filled(coder, 8),
        "text_encoders.clip_l.transformer.": filled(text, 9),
    }
    some = {start + name: value for start, part in parts.items() for name, value in part.items()}
    save_file(some, path)


def image(model: Any, text: Any, coder: Any) -> Tensor:
    """Runs the workflow, and returns its image."""
    prompts = []
    for prompt in ("a lighthouse at night", ""):
        found, pooled = text.encode_from_tokens(text.tokenize(prompt), return_pooled=True)
        prompts.append([[found, {"pooled_output": pooled}]])
    shown: Tensor = coder.decode(sample(model, diffusion(), prompts=prompts))
    return shown
