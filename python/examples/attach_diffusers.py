#!/usr/bin/env python3
"""A diffusion pipeline whose transformer stays compressed.

    df11 compress FLUX.1-dev/transformer -o FLUX.1-dev-transformer-df11
    python examples/attach_diffusers.py FLUX.1-dev FLUX.1-dev-transformer-df11 "a cube" --out o.png

Without a pipeline at hand, `--try` makes a small transformer from a config, and compares every bit
of what it answers.
"""

import argparse
import tempfile
from pathlib import Path

import diffusers
import torch
from accelerate import init_empty_weights

import df11


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("pipeline", nargs="?", help="the folder of the pipeline")
    parser.add_argument("compressed", nargs="?", help="what df11 compress made of its transformer")
    parser.add_argument("prompt", nargs="?", default="a red cube on a table")
    parser.add_argument("--out", default="image.png")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--try", dest="trial", action="store_true")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU; --device cpu decodes on all cores (slow)")
    if options.trial:
        return trial(options.device)
    if not options.compressed:
        parser.error("name a pipeline's folder and the compressed transformer, or --try")

    config = diffusers.FluxTransformer2DModel.load_config(f"{options.pipeline}/transformer")
    with init_empty_weights():  # so that BF16 weights are never in memory
        transformer = diffusers.FluxTransformer2DModel.from_config(config)
    df11.attach(transformer, options.compressed, device=options.device)
    pipeline = diffusers.FluxPipeline.from_pretrained(
        options.pipeline, transformer=transformer, torch_dtype=torch.bfloat16
    ).to(options.device)
    print(df11.report(pipeline))
    pipeline(options.prompt, generator=torch.Generator().manual_seed(0)).images[0].save(options.out)
    return None


def trial(device: str) -> None:
    """A transformer with random weights, compressed and not."""
    torch.manual_seed(0)
    original = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=4, attention_head_dim=64,
        num_attention_heads=8, joint_attention_dim=256, pooled_projection_dim=128,
        axes_dims_rope=[16, 24, 24],
    )  # fmt: skip
    original = original.to(torch.bfloat16).eval()
    with tempfile.TemporaryDirectory() as folder:
        original.save_pretrained(Path(folder, "bf16"))
        df11.compress(Path(folder, "bf16"), Path(folder, "df11"))
        with init_empty_weights():
            model = diffusers.FluxTransformer2DModel.from_config(dict(original.config))
        df11.attach(model, Path(folder, "df11"), device=device)
        inputs = {
            "hidden_states": torch.randn(1, 64, 16),
            "encoder_hidden_states": torch.randn(1, 32, 256),
            "pooled_projections": torch.randn(1, 128),
            "timestep": torch.tensor([0.5]),
        }
        inputs = {name: value.to(device, torch.bfloat16) for name, value in inputs.items()}
        inputs |= {
            "img_ids": torch.zeros(64, 3, device=device),
            "txt_ids": torch.zeros(32, 3, device=device),
        }
        with torch.no_grad():
            same = torch.equal(model(**inputs).sample, original.to(device)(**inputs).sample)
        print(df11.report(model, verify=True))
        print(f"identical: {same}")


if __name__ == "__main__":
    main()
