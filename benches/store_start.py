"""Time to the first token from a store: df11 beside BF16 through the Run:ai streamer.

    python benches/store_start.py FOLDER [--gb-s 1,2,4] [--turns 3] [--device cuda:0]

FOLDER is a BF16 checkpoint of transformers, such as `python/bench/llm.py` makes; beside it,
FOLDER-df11 is made if it is missing. Both lie behind one S3 server on the loopback that sends so
many 10⁹ bytes a second. Each turn of each way is a process of its own, which imports its libraries,
waits for the GPU, and then counts seconds: until the weights are loaded, and until the first token
is known. Prints one JSON line a turn, and the medians. Fails if the ways give different tokens.

Needs the Python package, transformers, accelerate, runai-model-streamer and
runai-model-streamer-s3.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import store_server

WAYS = ("bf16, Run:ai streamer", "df11, stored", "df11, fast")
#: Tokens of the prompt.
PROMPT = 16


def streamed(name: str, config: Path, device: str) -> Any:
    """A BF16 model, with weights that the streamer brings."""
    import torch
    from accelerate import init_empty_weights
    from runai_model_streamer import SafetensorsStreamer, list_safetensors
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        made = AutoConfig.from_pretrained(config)
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    state = {}
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(list_safetensors(name), device=device)
        for tensor, value in streamer.get_tensors():
            state[tensor] = value.to(device, copy=True)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    assert not unexpected and all("lm_head" in each for each in missing), (missing, unexpected)
    return model.to(device).eval()


def linked(name: str, residence: str, device: str) -> Any:
    """A compressed model."""
    import df11
    from transformers import AutoModelForCausalLM

    options = {} if device == "cpu" else {"quantization_config": df11.Config(residence=residence)}
    return AutoModelForCausalLM.from_pretrained(
        df11.link(name), device_map=device, **options
    ).eval()


def one_way(way: str, folder: Path, device: str) -> None:
    """Loads and answers in this process; prints what it took."""
    import torch

    if way == WAYS[0]:
        import accelerate  # noqa: F401
        import runai_model_streamer  # noqa: F401
    else:
        import df11  # noqa: F401
    kind = json.loads((folder / "config.json").read_bytes())["model_type"]
    for library in (f"models.{kind}.modeling_{kind}", "quantizers.auto", "pipelines"):
        import_module(f"transformers.{library}")
    is_on_gpu = device != "cpu"
    if is_on_gpu:
        torch.empty(1, device=device)
    name = f"s3://{store_server.BUCKET}/{folder.name}"
    loads: dict[str, Callable[[], Any]] = {
        WAYS[0]: lambda: streamed(name, folder, device),
        WAYS[1]: lambda: linked(f"{name}-df11", "stored", device),
        WAYS[2]: lambda: linked(f"{name}-df11", "fast", device),
    }
    start = time.perf_counter()
    model = loads[way]()
    if is_on_gpu:
        torch.cuda.synchronize(device)
    loaded = time.perf_counter()
    prompt = torch.arange(1, PROMPT + 1, device=device)[None]
    with torch.inference_mode():
        token = int(model(prompt).logits[0, -1].argmax())
    done = time.perf_counter()
    seconds = {"load_seconds": round(loaded - start, 3), "seconds": round(done - start, 3)}
    print(json.dumps(seconds | {"token": token}))


def turn(way: str, folder: Path, device: str, port: int) -> dict[str, Any]:
    command = [sys.executable, __file__, str(folder), "--device", device, "--way", way]
    environment = os.environ | store_server.environment(port)
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb-s", default="1,2,4", help="rates of the server")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    folder = chosen.folder.resolve()
    if chosen.way:
        return one_way(chosen.way, folder, chosen.device)
    compressed = folder.with_name(f"{folder.name}-df11")
    if not compressed.is_dir():
        import df11

        df11.compress(folder, compressed)
    ways = WAYS[:2] if chosen.device == "cpu" else WAYS
    for rate in map(float, chosen.gb_s.split(",")):
        rows: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        with store_server.running(folder.parent, rate) as port:
            for at in range(chosen.turns):
                for way in ways:
                    row = turn(way, folder, chosen.device, port)
                    print(json.dumps({"gb_s": rate, "turn": at, "way": way, **row}), flush=True)
                    rows[way].append(row)
        tokens = {row["token"] for some in rows.values() for row in some}
        assert len(tokens) == 1, f"the ways differ: {tokens}"
        median = {
            way: statistics.median(row["seconds"] for row in some) for way, some in rows.items()
        }
        for way, seconds in median.items():
            share = seconds / median[ways[0]]
            print(f"{rate:g} GB/s  {way:24} {seconds:8.2f} s  {share:.2f} of BF16's")
    return None


if __name__ == "__main__":
    main()
