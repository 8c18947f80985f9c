"""Runs small seeded models in a real ComfyUI with and without df11, and compares their latents.

    python comfyui/tests/try_comfyui.py PATH_OF_COMFYUI [--record] [--commit HASH] [--only Flux]

On the CPU, in ComfyUI's environment with `df11` installed. Prints a table; `--record` writes it to
benches/record. The exit code is 1 if a latent differs or memory grows.
"""

from __future__ import annotations

import argparse
import gc
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from node import import_node

ROOT = Path(__file__).resolve().parents[2]
RELOADS = 20
#: Resident memory that twenty reloads may take for allocators, whatever the model.
SLACK_BYTES = 32 << 20
HOW = """\
By `comfyui/tests/try_comfyui.py`. Equal means every bit of the sampled latent; for the checkpoint,
every bit of the image. On the CPU no weight is copied to another device: offloaded weights only
take another way through the layers, and unloading only drops LoRAs. Seconds include both models
where a graph first meets them; other work ran on the machine.
"""
COLUMNS = ("model", "compute", "graph", "equal", "weights, MB", "of BF16", "seconds")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("comfyui", type=Path)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--commit", help="of ComfyUI, if its folder is no git checkout")
    parser.add_argument("--only", help="one model")
    return parser.parse_args()


def start(comfyui: Path) -> None:
    """Imports ComfyUI, on the CPU, and the node as ComfyUI would."""
    sys.path.insert(0, str(comfyui))
    sys.argv = ["main.py", "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.sd

    logging.getLogger().setLevel(logging.ERROR)
    import_node()


@contextmanager
def computing_in(kind: str) -> Iterator[None]:
    """The dtype of ComfyUI's arithmetic: F32, its choice for the CPU, or BF16, that for GPUs."""
    from comfy.cli_args import args

    args.bf16_unet = kind == "BF16"
    yield
    args.bf16_unet = False


def node(name: str) -> Any:
    """One of the nodes, as ComfyUI makes it."""
    import df11_node

    return df11_node.NODE_CLASS_MAPPINGS[f"Df11{name}"]()


def unload() -> None:
    import comfy.model_management

    comfy.model_management.unload_all_models()
    comfy.model_management.cleanup_models()
    gc.collect()


def resident() -> int:
    """Bytes of memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("this system does not tell RssAnon; run on Linux")


class Trial:
    """One model in one dtype: graphs with the file and with its container."""

    def __init__(self, name: str, kind: str, folder: Path) -> None:
        import tiny

        self.name, self.kind, self.tiny = name, kind, tiny.MODELS[name]
        self.file = folder / f"{name}.safetensors"
        self.rows: list[tuple[str, ...]] = []
        self.failed = False
        self.sample = lambda model: tiny.sample(model, self.tiny)

    def models(self) -> tuple[Any, Any]:
        import comfy.sd

        (ours,) = node("LoadDiffusionModel").load(self.file.with_suffix(".df11").name)
        return comfy.sd.load_diffusion_model(str(self.file)), ours

    def row(self, graph: str, equal: bool, sizes: tuple[int, int], seconds: float) -> None:
        self.failed |= not equal
        theirs, ours = sizes
        cells = (f"{ours / 1e6:.1f}", f"{ours / theirs:.3f}", f"{seconds:.1f}")
        self.rows.append((self.name, self.kind, graph, "yes" if equal else "NO", *cells))

    def compare(self, graph: str, theirs: Any, ours: Any, expected: Any = None) -> Any:
        """Samples both models, or compares ours with what theirs gave before."""
        started = time.monotonic()
        if expected is None:
            expected = self.sample(theirs)
            unload()
        found = self.sample(ours)
        equal = found.dtype == expected.dtype and bool((found == expected).all())
        equal &= bool(found.isfinite().all()) and bool(found.std() > 0)
        sizes = (self.bf16_bytes(theirs), ours.model_size())
        self.row(graph, equal, sizes, time.monotonic() - started)
        return expected

    def bf16_bytes(self, model: Any) -> int:
        return sum(2 * value.numel() for value in model.model.diffusion_model.parameters())

    def run(self, made: dict[str, Any]) -> None:
        import comfy.sd
        import tiny

        theirs, ours = self.models()
        plain = self.compare("as it is", theirs, ours)
        unload()
        with_lora = [
            comfy.sd.load_lora_for_models(model, None, tiny.lora(made), 0.8, 0)[0]
            for model in (theirs, ours)
        ]
        patched = self.compare("LoRA", *with_lora)
        differs = bool((patched != plain).any())
        self.failed |= not differs
        self.compare("LoRA, half of the weights offloaded", *halved(with_lora), patched)
        self.reloads(*with_lora, patched)
        self.compare("LoRA taken away", theirs, ours, plain)
        unload()

    def reloads(self, theirs: Any, ours: Any, expected: Any) -> None:
        import comfy.model_management

        for at in range(RELOADS):
            comfy.model_management.load_models_gpu([ours])
            unload()
            if at == 1:
                before = resident()
        grown = resident() - before
        self.failed |= grown > SLACK_BYTES
        title = f"LoRA, {RELOADS} times unloaded and loaded ({grown / 1e6:+.1f} MB)"
        self.compare(title, theirs, ours, expected)
        unload()


def halved(models: list[Any]) -> list[Any]:
    """The models, loaded as if half of their weights did not fit."""
    unload()
    for model in models:
        half = model.model_size() // 2
        model.patch_model(model.load_device, lowvram_model_memory=half)
    return models


def commit_of(comfyui: Path, given: str | None) -> str:
    if given is not None:
        return given
    asked = ["git", "-C", str(comfyui), "rev-parse", "HEAD"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def table(rows: list[tuple[str, ...]]) -> str:
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def versions(commit: str) -> str:
    import comfyui_version
    import df11
    import torch

    return (
        f"ComfyUI {comfyui_version.__version__} (commit {commit}),\n"
        f"PyTorch {torch.__version__}, df11 {df11.__version__}, on the CPU."
    )


def record(text: str, commit: str) -> None:
    out = ROOT / "benches" / "record" / f"{date.today()}-comfyui.md"
    head = "# ComfyUI: latents of small seeded models, BF16 and df11\n\n"
    out.write_text(f"{head}{versions(commit)}\n{HOW}\n{text}\n")
    print(f"written to {out}")


def trials(only: str | None, folder: Path) -> Iterator[Trial]:
    import tiny

    for name in tiny.MODELS if only is None else [only]:
        file = folder / f"{name}.safetensors"
        made = tiny.write(tiny.MODELS[name], file)
        node("Compress").compress(f"diffusion_models/{file.name}", overwrite=False)
        for kind in ("F32", "BF16"):
            trial = Trial(name, kind, folder)
            with computing_in(kind):
                trial.run(made)
            yield trial
        for path in (file, file.with_suffix(".df11")):
            path.unlink()


def checkpoint(folder: Path) -> tuple[tuple[str, ...], bool]:
    """The images of a workflow of three models, by ComfyUI's loader and by the node."""
    import comfy.sd
    import workflow

    file = folder / "checkpoint.safetensors"
    workflow.write(file)
    node("Compress").compress(f"checkpoints/{file.name}", overwrite=False)
    started = time.monotonic()
    theirs = comfy.sd.load_checkpoint_guess_config(str(file))[:3]
    expected = workflow.image(*theirs)
    ours = node("LoadCheckpoint").load(file.with_suffix(".df11").name)
    found = workflow.image(*ours)
    equal = bool((found == expected).all()) and bool(found.std() > 0)
    parts = (ours[0], ours[1].patcher)
    held = sum(part.model_size() for part in parts)
    bf16 = sum(2 * weight.numel() for part in parts for weight in part.model.parameters())
    cells = (f"{held / 1e6:.1f}", f"{held / bf16:.3f}", f"{time.monotonic() - started:.1f}")
    title = "checkpoint: CLIP, sampler, VAE"
    return ("SD3", "F32", title, "yes" if equal else "NO", *cells), not equal


def main() -> int:
    asked = arguments()
    start(asked.comfyui)
    import folder_paths
    import torch

    rows, failed = [], False
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for kind in ("diffusion_models", "checkpoints"):
            folder_paths.add_model_folder_path(kind, folder)
        for trial in trials(asked.only, Path(folder)):
            print(table(trial.rows), flush=True)
            rows += trial.rows
            failed |= trial.failed
        if asked.only in (None, "SD3"):
            row, differs = checkpoint(Path(folder))
            rows, failed = [*rows, row], failed or differs
            print(table([row]))
    commit = commit_of(asked.comfyui, asked.commit)
    print(versions(commit))
    if asked.record:
        record(table(rows), commit)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
