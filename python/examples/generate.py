#!/usr/bin/env python3
"""Generates text with a model whose weights stay compressed, and tells what that saves.

    df11 compress Qwen3-8B -o Qwen3-8B-df11
    python examples/generate.py Qwen3-8B-df11 "The capital of France is"

Without a GPU: --device cpu (slow). On a GPU that is too small: --memory 6GB streams what does not fit.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import df11


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory", help="of the GPU, for weights and decoded blocks: 6GB")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--verify", action="store_true", help="decode every block, and compare it with the original's hashes"
    )
    options = parser.parse_args()

    where = {"device_map": options.device}
    if options.memory:
        where = {"device_map": "auto", "max_memory": {0: options.memory, "cpu": "1TB"}}
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(options.folder, **where)
    print(f"loaded in {time.perf_counter() - start:.1f} s\n{df11.report(model, verify=options.verify)}\n")

    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    inputs = tokenizer(options.prompt, return_tensors="pt").to(model.device)
    start = time.perf_counter()
    answer = model.generate(**inputs, max_new_tokens=options.tokens, do_sample=False)
    seconds = time.perf_counter() - start
    print(tokenizer.decode(answer[0], skip_special_tokens=True))
    count = answer.shape[1] - inputs["input_ids"].shape[1]
    print(f"\n{count} tokens in {seconds:.1f} s, {count / seconds:.1f} a second")


if __name__ == "__main__":
    main()
