"""Checkpoints of the official package, as fixtures: made by its own encoder, small, seeded.

    pip install torch transformers dahuffman==0.4.2; pip install --no-deps dfloat11==0.5.0
    python3 make.py [OUT]            # default: this folder; tests/import.rs reads what it writes

Needs no GPU: `compress_model` runs as it is, without its own check, and what it imports for
decoding is a stub. `originals.sha256` holds the hashes of the BF16 files that were compressed; they
are not kept. A fixture is made again only on purpose: other versions of torch may draw other
numbers.
"""

import hashlib
import shutil
import sys
import tempfile
import types
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

SEED = 20251115


def stub(name, **members):
    module = types.ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module


stub("pkg_resources", resource_filename=lambda package, name: name)
stub("cupy", RawModule=mock.MagicMock())
stub("accelerate", infer_auto_device_map=None, dispatch_model=None)
stub("accelerate.utils", get_balanced_memory=None)

from dfloat11 import compress_model  # noqa: E402

PROJECTIONS = "self_attn.q self_attn.k self_attn.v self_attn.o mlp.gate mlp.up mlp.down"
LLAMA_PATTERNS = {
    r"model\.embed_tokens": [],
    r"model\.layers\.\d+": [f"{name}_proj" for name in PROJECTIONS.split()],
    r"lm_head": [],
}


def fill(model, generator):
    """Normal weights in BF16."""
    for parameter in model.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.02).bfloat16()


def llama(out, originals):
    """A file a block and one for the rest, as the package's published checkpoints are; odd widths,
    shapes from config.json.
    """
    config = LlamaConfig(
        hidden_size=36,
        intermediate_size=151,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        vocab_size=131,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).bfloat16()
    fill(model, torch.Generator().manual_seed(SEED))
    model.save_pretrained(originals / "llama")
    compress_model(
        model, LLAMA_PATTERNS, str(out / "llama"), save_single_file=False, check_correctness=False
    )
    for path in (out / "llama").iterdir():
        if path.name != "config.json" and path.suffix != ".safetensors":
            path.unlink()


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.to_q = nn.Linear(width, inner)
        self.to_out = nn.Sequential(nn.Linear(inner, width))
        self.mixer = nn.Linear(width, 3, bias=False)


class Plain(nn.Module):
    """No config, one file: shapes from biases, and one that nothing tells."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(45, 91), Block(13, 7)])
        self.proj = nn.Linear(61, 9)


def special(model):
    """Values that comparing floats misses: both zeros, subnormals, the largest finite number,
    infinities, NaN with its payload.
    """
    weight = model.blocks[0].to_q.weight.data.view(torch.int16).flatten()
    words = "0000 8000 0001 807F 7F7F FF7F 7F80 FF80 7FC1 FFFF 7880 F912"
    patterns = [int(word, 16) for word in words.split()]
    weight[100 : 100 + len(patterns)] = torch.tensor(patterns, dtype=torch.int32).to(torch.int16)


def plain(out, originals):
    model = Plain()
    fill(model, torch.Generator().manual_seed(SEED + 1))
    special(model)
    (originals / "plain").mkdir()
    save_file(model.state_dict(), originals / "plain" / "model.safetensors")
    patterns = {r"blocks\.[0-9]+": ["to_q", "to_out.0", "mixer"], "proj": []}
    compress_model(
        model, patterns, str(out / "plain"), save_single_file=True, check_correctness=False
    )


def main():
    out = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
    with tempfile.TemporaryDirectory() as folder:
        originals = Path(folder)
        for make in (llama, plain):
            shutil.rmtree(out / make.__name__, ignore_errors=True)
            make(out, originals)
        paths = sorted(path.relative_to(originals) for path in originals.rglob("*.safetensors"))
        lines = [
            f"{hashlib.sha256((originals / path).read_bytes()).hexdigest()}  {path.as_posix()}\n"
            for path in paths
        ]
    (out / "originals.sha256").write_text("".join(lines))


if __name__ == "__main__":
    main()
