#!/usr/bin/env python3
"""Tokens a second of the official DFloat11 package (0.5.0) with the model of llm.py, whose part
`make` must have run.

    python bench/official_llm.py --out rows.jsonl                 # options as those of llm.py

Needs a GPU, cupy, numba and the packages dfloat11 0.5.0 and dahuffman. The package's own encoder
takes minutes a block, so the loop of it is compiled (kernels/bench/official.py, which compares it
with the original), one layer is encoded, and all layers hold that one; each has its own copy of the
compressed arrays, as they would. Embedding and head are encoded too, as in published models. Codes,
tables, hooks and kernel are the package's. The logits are compared bit by bit with those of the
same model in BF16.
"""

import contextlib
import io
import sys
import types
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "kernels" / "bench")]

import llm  # noqa: E402
import official as kernel  # noqa: E402
import tools  # noqa: E402

# Gone from setuptools; the package asks it for one path.
sys.modules["pkg_resources"] = types.SimpleNamespace(
    resource_filename=lambda package, name: str(Path(sys.modules[package].__file__).parent / name)
)
from dfloat11 import dfloat11, dfloat11_utils  # noqa: E402

LAYER = [
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
]  # fmt: skip
THREADS, BYTES = dfloat11.threads_per_block, dfloat11.bytes_per_thread


def main() -> int:
    bench = llm.Bench(llm.arguments())
    model = bench.load_model("bf16")
    layers = model.model.layers
    with torch.no_grad():
        for layer in layers[1:]:
            for name in LAYER:
                layer.get_submodule(name).weight.copy_(layers[0].get_submodule(name).weight)
        tokens = bench.prompt(2, 37)
        before = model(tokens).logits
    encoded = encode([layers[0].get_submodule(name).weight for name in LAYER])
    for layer in layers:
        install(layer, encoded, [layer.get_submodule(name) for name in LAYER])
    for module in (model.model.embed_tokens, model.lm_head):
        install(module, encode([module.weight]), [])
    with torch.no_grad():
        identical = torch.equal(before.view(torch.int16), model(tokens).logits.view(torch.int16))
    bench.row("official", identical=identical, stored=sum(b.nbytes for b in model.buffers()))
    for rows in bench.options.batches:
        found = bench.rates({"official": model}, rows, bench.options.tokens)
        bench.row("official", batch=rows, tokens_per_second=found["official"])
        tools.free()
    return 0 if identical else 1


def encode(weights: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One module's arrays, as the package stores them."""
    words = torch.cat([weight.detach().flatten() for weight in weights])
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        _, counter = dfloat11_utils.get_codec(words)
        codec, _, table = dfloat11_utils.get_32bit_codec(counter)
        luts = dfloat11_utils.get_luts(table)
    bits = words.view(torch.int16).cpu().numpy().view(np.uint16)
    exponents = (bits >> 7).astype(np.uint8)
    stream, gaps, positions = kernel.encode(exponents, codec, BYTES, THREADS[0])
    plane = ((bits >> 8) & 0x80 | bits & 0x7F).astype(np.uint8)
    splits = np.cumsum([weight.numel() for weight in weights])[:-1]
    arrays = {
        "luts": luts,
        "encoded_exponent": stream,
        "sign_mantissa": plane,
        "output_positions": positions.view(np.uint8),
        "gaps": gaps,
        "splits": splits,
    }
    return {name: torch.as_tensor(array) for name, array in arrays.items()}


def install(
    module: torch.nn.Module, encoded: dict[str, torch.Tensor], inside: list[torch.nn.Module]
) -> None:
    """Does the work of the package's loader for one module."""
    for owner in inside or [module]:
        del owner.weight
    for name, array in encoded.items():
        if name == "splits":
            module.split_positions = array.tolist()
        else:
            module.register_buffer(name, array.cuda(), persistent=False)
    if inside:
        module.weight_injection_modules = inside
    positions = encoded["output_positions"].view(torch.uint32).numpy().astype(np.int64)
    module.shared_mem_size = THREADS[0] * 4 + 4 + int(np.diff(positions).max()) * 2
    module.register_forward_pre_hook(dfloat11.get_hook(THREADS, BYTES))


if __name__ == "__main__":
    sys.exit(main())
