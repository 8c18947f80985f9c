#!/usr/bin/env python3
"""A diffusion transformer with compressed weights beside itself in BF16: bits, memory, time a step.

    python bench/diffusion.py --out rows.jsonl                # FLUX.1-dev's geometry, seeded, GPU 0
    python bench/diffusion.py --geometry tiny --device cpu    # tries the script itself

One call of the transformer is one step of the sampler: 4096 image tokens (1024 x 1024 pixels) and
512 of text. Both transformers are called in turns; medians. The other components (text encoders,
VAE) are the same for both and not counted. Outputs are compared bit by bit with PyTorch's flash
attention, and timed with its default one.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import diffusers
import tools
import torch
from accelerate import init_empty_weights
from torch.nn.attention import SDPBackend

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
    sizes = {"nargs": 2, "default": [4096, 512], "metavar": ("IMAGE", "TEXT")}
    parser.add_argument("--tokens", type=int, **sizes)
    parser.add_argument("--steps", type=int, default=12, help="timed calls of each")
    parser.add_argument("--graph", action="store_true", help="time the step as a CUDA graph too")
    return Bench(parser.parse_args()).run()


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.config = GEOMETRIES[options.geometry]
        self.folder = options.work / f"{options.geometry}-{options.layout or 'default'}"

    def row(self, **figures: Any) -> None:
        tools.tell(self.options.out, "diffusion", figures, geometry=self.options.geometry)

    @torch.no_grad()
    def run(self) -> int:
        original, options, on_gpu = self.original(), self.options, self.device.type == "cuda"
        start = time.perf_counter()
        compressed = diffusers.FluxTransformer2DModel.from_pretrained(
            self.folder,
            torch_dtype=torch.bfloat16,
            device_map=options.device,
            quantization_config=df11.Config(mode=options.mode, residence=options.residence),
        )
        self.row(from_pretrained_seconds=time.perf_counter() - start)
        report = df11.report(compressed)
        print(tools.told(report))
        held, bf16 = report.device_bytes, sum(p.nbytes for p in original.parameters())
        self.row(bf16=bf16, df11=held, ratio=held / bf16)
        inputs, models = self.inputs(), {"bf16": original, "df11": compressed}
        identical = self.same(models, inputs)
        peaks = [0]

        def step(model: Any) -> float:
            before = torch.cuda.memory_allocated() if on_gpu else 0
            seconds = tools.seconds(self.device, lambda: model(**inputs))
            peaks.append(torch.cuda.max_memory_allocated() - before if on_gpu else 0)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            return seconds

        works = {kind: partial(step, model) for kind, model in models.items()}
        tools.in_turns(2, works)
        seconds = tools.in_turns(options.steps, works)
        self.row(identical=identical, **{f"{kind}_seconds": of for kind, of in seconds.items()})
        for kind, model in models.items():
            self.row(kind=kind, kernels=self.kernels(partial(model, **inputs)))
        if options.graph:
            in_graphs = self.in_graphs(models, inputs)
            self.row(**in_graphs)
            identical = identical and in_graphs["graph_identical"]
        activations = max(peaks[-2:])
        self.row(time=seconds["df11"] / seconds["bf16"] - 1, activations=activations)
        self.row(memory=(held + activations) / (bf16 + activations) - 1)
        pipelines = [self.with_lora(model) for model in models.values()]
        lora_identical = self.same(models, inputs)
        adapters = {name for pipeline in pipelines for name in pipeline.get_active_adapters()}
        self.row(lora_identical=lora_identical, adapters=sorted(adapters))
        return 0 if identical and lora_identical else 1

    def in_graphs(self, models: dict[str, Any], inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Milliseconds of each model's step as a CUDA graph, without work of the host; whether the
        outputs are the same with flash attention.
        """
        with tools.attention(self.device, SDPBackend.FLASH_ATTENTION):
            steps = [partial(self.output, model, inputs) for model in models.values()]
            same = torch.equal(*(tools.capture(step)[1] for step in steps))
        tools.free()
        graphs = {
            kind: tools.capture(partial(self.output, model, inputs))[0]
            for kind, model in models.items()
        }
        works = {kind: partial(tools.replays, graph) for kind, graph in graphs.items()}
        return {"graph_identical": same, "graph_ms": tools.in_turns(self.options.steps, works)}

    def output(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = model(**inputs, return_dict=False)[0]
        return output

    def kernels(self, step: Callable[[], Any]) -> dict[str, float]:
        """Seconds of a GPU's kernels in a step: all, and those that take the most."""
        spent = tools.kernels(self.device, step)
        most = {name[:80]: taken for name, taken in islice(spent.items(), 16)}
        return {"all": sum(spent.values()), **most} if spent else {}

    def same(self, models: dict[str, Any], inputs: dict[str, torch.Tensor]) -> bool:
        """Whether both have the same output, bit for bit."""
        with tools.attention(self.device, SDPBackend.FLASH_ATTENTION):
            outputs = (self.output(model, inputs) for model in models.values())
            return torch.equal(*(output.view(torch.int16) for output in outputs))

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
            is_norm = "norm" in name and name.endswith("weight") and value.dim() == 1
            parameter.data.copy_(value + 1 if is_norm else value)
        if not self.folder.exists():
            bf16 = self.folder.with_name(self.folder.name + "-bf16")
            model.save_pretrained(bf16)
            layout = {"layout": self.options.layout} if self.options.layout else {}
            df11.compress(bf16, self.folder, verify=False, progress=False, **layout)
            shutil.rmtree(bf16)
        return model

    def inputs(self) -> dict[str, torch.Tensor]:
        """Invented inputs of a pipeline's transformer."""
        image, text = self.options.tokens
        generator = torch.Generator(self.device).manual_seed(3)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=self.device).to(torch.bfloat16)

        side, at = int(image**0.5), torch.arange(image)
        made = {
            "hidden_states": random(1, image, self.config["in_channels"]),
            "encoder_hidden_states": random(1, text, self.config["joint_attention_dim"]),
            "pooled_projections": random(1, self.config["pooled_projection_dim"]),
            "timestep": torch.tensor([0.5]).bfloat16(),
            "guidance": torch.tensor([3.5]),
            "img_ids": torch.stack([0 * at, at // side, at % side], 1).bfloat16(),
            "txt_ids": torch.zeros(text, 3).bfloat16(),
        }
        return {name: value.to(self.device) for name, value in made.items()}


if __name__ == "__main__":
    sys.exit(main())
