#!/usr/bin/env python3
"""A diffusion transformer with compressed weights beside itself in BF16: bits, memory, time a step.

    python bench/diffusion.py --out rows.jsonl                # FLUX.1-dev's geometry, seeded, GPU 0
    python bench/diffusion.py --geometry tiny --device cpu    # tries the script itself

One call of the transformer is one step of the sampler: 4096 image tokens (1024 x 1024 pixels) and
512 of text. Both transformers are called in turns; medians. What pipelines have besides (text
encoders, VAE) is the same for both and is not counted. Outputs are compared bit by bit with
PyTorch's flash attention, and timed with its default one.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from typing import Any

import diffusers
import tools
import torch
from accelerate import init_empty_weights
from torch.nn.attention import SDPBackend, sdpa_kernel

import df11

GEOMETRIES: dict[str, dict[str, Any]] = {
    "flux.1-dev": {
        "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
        "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768,
        "guidance_embeds": True,
    },
    "tiny": {
        "in_channels": 16, "num_layers": 2, "num_single_layers": 4, "attention_head_dim": 64,
        "num_attention_heads": 8, "joint_attention_dim": 256, "pooled_projection_dim": 128,
        "guidance_embeds": True, "axes_dims_rope": [16, 24, 24],
    },
}  # fmt: skip
SCALE = 0.02


def main() -> int:
    shared = ("--device", "--layout", "--mode", "--residence", "--work", "--out")
    parser = tools.parser(__doc__, *shared)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="flux.1-dev")
    parser.add_argument(
        "--tokens", type=int, nargs=2, default=[4096, 512], metavar=("IMAGE", "TEXT")
    )
    parser.add_argument("--steps", type=int, default=12, help="timed calls of each")
    return Bench(parser.parse_args()).run()


class Bench:
    """One geometry."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.config = GEOMETRIES[options.geometry]
        self.folder = options.work / f"{options.geometry}-{options.layout or 'default'}"

    def row(self, **figures: Any) -> None:
        """Prints a row, and keeps it."""
        tools.tell(self.options.out, "diffusion", figures, geometry=self.options.geometry)

    @torch.no_grad()
    def run(self) -> int:
        original = self.original()
        start = time.perf_counter()
        compressed = diffusers.FluxTransformer2DModel.from_pretrained(
            self.folder,
            torch_dtype=torch.bfloat16,
            device_map=self.options.device,
            quantization_config=df11.Config(
                mode=self.options.mode, residence=self.options.residence
            ),
        )
        self.row(from_pretrained_seconds=time.perf_counter() - start)
        report = df11.report(compressed)
        print("   " + str(report).replace("\n", "\n   "))
        bf16 = sum(p.nbytes for p in original.parameters())
        self.row(bf16=bf16, df11=report.device_bytes, ratio=report.device_bytes / bf16)
        inputs = self.inputs()
        identical = self.same((original, compressed), inputs)
        times: dict[str, list[float]] = {"bf16": [], "df11": []}
        peaks = {}
        for step in range(self.options.steps + 2):
            for kind, model in (("bf16", original), ("df11", compressed)):
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                seconds = tools.seconds(self.device, lambda model=model: model(**inputs))
                if step > 1:
                    times[kind].append(seconds)
                if self.device.type == "cuda":
                    peaks[kind] = torch.cuda.max_memory_allocated() - before
        medians = {kind: statistics.median(values) for kind, values in times.items()}
        activations = max(peaks.values(), default=0)
        self.row(
            identical=identical, **{f"{kind}_seconds": value for kind, value in medians.items()}
        )
        self.row(time=medians["df11"] / medians["bf16"] - 1, activations=activations)
        self.row(memory=(report.device_bytes + activations) / (bf16 + activations) - 1)
        pipelines = [self.with_lora(model) for model in (original, compressed)]
        lora_identical = self.same((original, compressed), inputs)
        adapters = {name for pipeline in pipelines for name in pipeline.get_active_adapters()}
        self.row(lora_identical=lora_identical, adapters=sorted(adapters))
        return 0 if identical and lora_identical else 1

    def same(self, models: Any, inputs: dict[str, torch.Tensor]) -> bool:
        """Whether models have the same output, bit for bit."""
        on_gpu = self.device.type == "cuda"
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if on_gpu else SDPBackend.MATH):
            outputs = [model(**inputs, return_dict=False)[0].view(torch.int16) for model in models]
        return torch.equal(*outputs)

    def with_lora(self, transformer: Any) -> Any:
        """A pipeline of a transformer alone, into which a LoRA is loaded, written where it is not
        yet.
        """
        parts = ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
        pipeline = diffusers.FluxPipeline(transformer=transformer, **dict.fromkeys(parts))
        place = self.folder.with_name(self.folder.name + "-lora")
        if not place.exists():
            torch.manual_seed(8)
            layers = {}
            for name, module in transformer.named_modules():
                if name.endswith((".to_q", ".to_v")):
                    rows, columns = module.weight.shape
                    layers[f"{name}.lora_A.weight"] = 0.02 * torch.randn(16, columns)
                    layers[f"{name}.lora_B.weight"] = 0.02 * torch.randn(rows, 16)
            diffusers.FluxPipeline.save_lora_weights(place, transformer_lora_layers=layers)
        pipeline.load_lora_weights(place, adapter_name="style")
        return pipeline

    def original(self) -> Any:
        """The BF16 transformer; its weights are compressed where they are not yet."""
        with init_empty_weights():
            model = diffusers.FluxTransformer2DModel.from_config(self.config)
        model = model.to(torch.bfloat16).to_empty(device=self.device).eval()
        generator = torch.Generator(self.device).manual_seed(17)
        for name, parameter in model.named_parameters():
            value = torch.empty(parameter.shape, dtype=torch.float32, device=self.device)
            value.normal_(0.0, SCALE, generator=generator)
            parameter.data.copy_(
                value + 1
                if "norm" in name and name.endswith("weight") and value.dim() == 1
                else value
            )
        if not self.folder.exists():
            bf16 = self.folder.with_name(self.folder.name + "-bf16")
            model.save_pretrained(bf16)
            layout = {"layout": self.options.layout} if self.options.layout else {}
            df11.compress(bf16, self.folder, verify=False, progress=False, **layout)
            shutil.rmtree(bf16)
        return model

    def inputs(self) -> dict[str, torch.Tensor]:
        """What a pipeline would hand to its transformer, made up."""
        image, text = self.options.tokens
        generator = torch.Generator(self.device).manual_seed(3)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=self.device).to(torch.bfloat16)

        side = int(image**0.5)
        ids = torch.zeros(image, 3, device=self.device)
        ids[:, 1] = torch.arange(image, device=self.device) // side
        ids[:, 2] = torch.arange(image, device=self.device) % side
        return {
            "hidden_states": random(1, image, self.config["in_channels"]),
            "encoder_hidden_states": random(1, text, self.config["joint_attention_dim"]),
            "pooled_projections": random(1, self.config["pooled_projection_dim"]),
            "timestep": torch.tensor([0.5], device=self.device, dtype=torch.bfloat16),
            "guidance": torch.tensor([3.5], device=self.device, dtype=torch.float32),
            "img_ids": ids.to(torch.bfloat16),
            "txt_ids": torch.zeros(text, 3, device=self.device, dtype=torch.bfloat16),
        }


if __name__ == "__main__":
    sys.exit(main())
