#!/usr/bin/env python3
"""Generates text with a model whose weights stay compressed, and tells what that saves.

    df11 compress Qwen3-8B -o Qwen3-8B-df11
    python examples/generate.py Qwen3-8B-df11 "The capital of France is"

The model may as well be a repository of the Hub that holds such a folder. Without a GPU: --device
cpu (slow). On a GPU that is too small: --memory 6GB streams what does not fit.
"""

import argparse
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TextStreamer

import df11


def arguments() -> argparse.Namespace:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("model", help="a folder that df11 compress made, or one of the Hub")
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory", help="of the GPU: 6GB; what does not fit is streamed")
    parser.add_argument("--mode", choices=["exact", "fused"], default="exact")
    parser.add_argument("--residence", choices=["auto", "fast", "stored"], default="auto")
    parser.add_argument("--tokens", type=int, default=64, help="how many to generate at most")
    parser.add_argument("--verify", action="store_true", help="compare every weight's hash")
    options = parser.parse_args()
    if (options.memory or options.device.startswith("cuda")) and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU; --device cpu, without --memory, decodes on all cores")
    return options


def main() -> None:
    options = arguments()
    where = {"device_map": options.device}
    if options.memory:
        where = {"device_map": "auto", "max_memory": {0: options.memory, "cpu": "1TB"}}
    start = time.perf_counter()
    config = AutoConfig.from_pretrained(options.model)
    if getattr(config, "quantization_config", None):
        where["quantization_config"] = df11.Config(mode=options.mode, residence=options.residence)
    model = AutoModelForCausalLM.from_pretrained(options.model, **where)
    seconds = time.perf_counter() - start
    report = df11.report(model, verify=options.verify)
    print(f"loaded in {seconds:.1f} s\n{report}\n")
    if not report:
        print("this is no compressed model: df11 compress MODEL -o FOLDER makes one\n")

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    inputs = tokenizer(options.prompt, return_tensors="pt").to(model.device)
    start = time.perf_counter()
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    wanted = {"max_new_tokens": options.tokens, "do_sample": False, "streamer": streamer}
    answer = model.generate(**inputs, **wanted)
    seconds = time.perf_counter() - start
    count = answer.shape[1] - inputs["input_ids"].shape[1]
    print(f"\n{count} tokens in {seconds:.1f} s, {count / seconds:.1f} a second")
    if model.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        print(f"{peak / 1e9:.2f} GB of GPU memory at most, caches and activations included")


if __name__ == "__main__":
    main()
