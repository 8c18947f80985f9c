"""Seconds a step and memory of a model of FLUX.1's geometry in ComfyUI, BF16 and df11, on a GPU.

    python comfyui/tests/time_comfyui.py PATH_OF_COMFYUI [--classic] [--double 19 --single 38]

Weights are seeded, 1024 x 1024 pixels, one prompt of 512 tokens. ComfyUI loads the BF16 model as it
would on such a GPU (dynamic VRAM), or with `--classic` as its option --disable-dynamic-vram says.
Prints JSON, a line a result; the exit code is 1 if a latent differs.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from node import import_node

STEPS = 8
GIGA = 1e9


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("comfyui", type=Path)
    parser.add_argument("--classic", action="store_true")
    parser.add_argument("--double", type=int, default=19)
    parser.add_argument("--single", type=int, default=38)
    parser.add_argument("--pixels", type=int, default=1024)
    parser.add_argument("--reloads", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="for 1.7 times the size of the model")
    return parser.parse_args()


def start(comfyui: Path, classic: bool) -> bool:
    """Sets ComfyUI up as its main.py does, before it imports PyTorch and after. Returns whether it
    is without dynamic VRAM, as releases before that are.
    """
    sys.path.insert(0, str(comfyui))
    option = "--disable-dynamic-vram"
    is_known = option in (comfyui / "comfy" / "cli_args.py").read_text()
    sys.argv = ["main.py", *([option] if classic and is_known else [])]
    classic = classic or not is_known
    import comfy.options

    comfy.options.enable_args_parsing()
    if not classic:
        import comfy_aimdo.control

        if not comfy_aimdo.control.init():
            raise unsupported()
    # It chooses PyTorch's allocator, which PyTorch reads when it is imported.
    importlib.import_module("cuda_malloc")
    import comfy.sd

    if not classic:
        use_dynamic()
    import_node()
    return classic


def use_dynamic() -> None:
    import comfy.memory_management
    import comfy.model_management as management
    import comfy.model_patcher
    import comfy_aimdo.control as aimdo

    if hasattr(aimdo, "init_devices"):
        devices = management.get_all_torch_devices()
        works = aimdo.init_devices((device.index, 0) for device in devices)
    else:  # ComfyUI 0.18
        works = aimdo.init_device(management.get_torch_device().index)
    if not works:
        raise unsupported()
    aimdo.set_log_warning()
    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
    comfy.memory_management.aimdo_enabled = True


def unsupported() -> RuntimeError:
    return RuntimeError("comfy-aimdo does not work here; pass --classic")


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def unload() -> None:
    import comfy.model_management
    import torch

    comfy.model_management.unload_all_models()
    comfy.model_management.cleanup_models()
    gc.collect()
    end_workflow()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def end_workflow() -> None:
    """Ends a workflow as ComfyUI does with dynamic VRAM: models may then take more memory."""
    memory = sys.modules.get("comfy.memory_management")
    if getattr(memory, "aimdo_enabled", False):
        import comfy.model_management
        import comfy_aimdo.model_vbar

        comfy.model_management.reset_cast_buffers()
        comfy_aimdo.model_vbar.vbars_reset_watermark_limits()


@contextmanager
def tight(room: int) -> Iterator[int]:
    """Takes the memory of the GPU, except `room` bytes, as another program would. Gives the bytes
    taken.
    """
    import torch

    taken = torch.cuda.mem_get_info()[0] - int(room)
    ballast = torch.empty(max(taken, 0), dtype=torch.uint8, device="cuda")
    try:
        yield ballast.nbytes
    finally:
        del ballast
        unload()


class Clock:
    """Times between the ends of steps."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def __call__(self, *_: Any) -> None:
        import torch

        torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [round(b - a, 4) for a, b in zip(self.ends, self.ends[1:], strict=False)]


def used() -> int:
    """Bytes of the GPU that are taken, by whatever allocator."""
    import torch

    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


class Run:
    def __init__(self, tiny: Any) -> None:
        self.tiny = tiny
        self.failed = False
        #: Bytes of the GPU that no model takes.
        self.taken = 0
        self.seconds: dict[str, float] = {}

    def sample(self, name: str, model: Any, expected: Any = None) -> Any:
        """Samples twice, for the first time only a little, and tells the second one's seconds."""
        import tiny

        started = time.perf_counter()
        tiny.sample(model, self.tiny, 2, 1.0)
        warm = time.perf_counter() - started
        clock = Clock()
        latent = tiny.sample(model, self.tiny, STEPS, 1.0, clock)
        equal = None if expected is None else bool((latent == expected).all())
        self.failed |= equal is False or not bool(latent.isfinite().all())
        step = self.seconds[name] = median(clock.seconds())
        taken = round((used() - self.taken) / GIGA, 3)
        loaded = round(model.loaded_size() / GIGA, 3)
        tell(graph=name, step_s=step, steps=clock.seconds(), first_s=round(warm, 2), equal=equal)
        tell(graph=name, gpu_used_gb=taken, loaded_gb=loaded)
        return latent

    def compare(self, name: str, theirs: Any, ours: Any) -> Any:
        expected = self.sample(f"{name}, BF16", theirs)
        unload()
        self.sample(f"{name}, df11", ours, expected)
        ratio = self.seconds[f"{name}, df11"] / self.seconds[f"{name}, BF16"]
        tell(graph=name, time_of_bf16=round(ratio, 4))
        unload()
        return expected

    def load(self, name: str, model: Any) -> None:
        """Memory of the compressed model on the GPU, its peak while it is loaded, and ComfyUI's
        count, which must be the sum of the weights there.
        """
        import comfy.model_management
        import torch

        unload()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        comfy.model_management.load_models_gpu([model], force_full_load=True)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        held = torch.cuda.memory_allocated() - before
        peak = torch.cuda.max_memory_allocated() - before
        weights = model.model.state_dict().values()
        found = sum(value.nbytes for value in weights if value.is_cuda)
        counts = sum(value.numel() for value in model.model.diffusion_model.parameters())
        counted = (model.model_size(), model.loaded_size())
        self.failed |= counted != (found, found)
        tell(
            graph=name,
            load_s=round(seconds, 2),
            held_gb=round(held / GIGA, 3),
            of_bf16=round(held / (2 * counts), 4),
            bytes_found=found,
            bytes_counted=counted,
            peak_of_held=round(peak / held, 4),
            packed=sum(getattr(value, "has_lora", False) for value in weights),
        )
        unload()

    def reload(self, model: Any, times: int) -> None:
        """Memory of the GPU after the first and after the last time that the model was there."""
        import comfy.model_management
        import torch

        left = []
        for _ in range(times):
            comfy.model_management.load_models_gpu([model], force_full_load=True)
            unload()
            left.append(torch.cuda.memory_allocated())
        self.failed |= left[-1] > left[0]
        tell(reloads=times, left_mb=[round(left[0] / 1e6, 2), round(left[-1] / 1e6, 2)])

    def offload(self, name: str, model: Any, expected: Any = None) -> None:
        """Samples as if half of the weights did not fit."""
        import comfy.model_management as management
        import torch

        unload()
        room = model.model_size() // 2 + management.minimum_inference_memory()
        with tight(room) as self.taken:
            try:
                self.sample(f"half offloaded, {name}", model, expected)
            except torch.OutOfMemoryError:
                tell(graph=f"half offloaded, {name}", out_of_memory=True)
                self.failed = True
                return
            loaded = model.loaded_size()
            tell(
                loaded_gb=round(loaded / GIGA, 3),
                of_model=round(loaded / model.model_size(), 3),
                pinned_gb=round(management.TOTAL_PINNED_MEMORY / GIGA, 3),
            )
            self.failed |= loaded >= model.model_size()
        self.taken = 0
        self.failed |= bool(management.TOTAL_PINNED_MEMORY)

    def together(self, theirs: Any, ours: Any, expected: Any) -> None:
        """Samples both models in turn, as one workflow does, where one and a half fit."""
        import comfy.model_management as management

        unload()
        sizes = theirs.model_size() // 2 + ours.model_size()
        with tight(sizes + management.minimum_inference_memory()) as self.taken:
            for turn in (1, 2):
                for name, model in (("BF16", theirs), ("df11", ours)):
                    self.sample(f"together, {name}, {turn}", model, expected)
                    pair = [round(each.loaded_size() / GIGA, 3) for each in (theirs, ours)]
                    tell(graph=f"together, {name}, {turn}", both_loaded_gb=pair)
        self.taken = 0


def files(tiny_model: Any, folder: Path) -> tuple[Path, Path]:
    import df11
    import tiny

    file = folder / "flux.safetensors"
    started = time.perf_counter()
    tiny.write(tiny_model, file)
    tell(made_s=round(time.perf_counter() - started, 1), file_gb=file.stat().st_size / GIGA)
    started = time.perf_counter()
    report = df11.compress(file, out := file.with_suffix(".df11"), verify=False, progress=False)
    tell(compress_s=round(time.perf_counter() - started, 1), file_of_bf16=round(report.ratio, 4))
    return file, out


def with_lora(models: list[Any], strength: float = 0.8) -> list[Any]:
    import comfy.sd
    import tiny

    lora = tiny.lora(models[0].model.diffusion_model.state_dict(), rank=16)
    load = comfy.sd.load_lora_for_models
    return [load(model, None, lora, strength, 0)[0] for model in models]


def main() -> int:
    asked = arguments()
    classic = start(asked.comfyui, asked.classic)
    import comfy.sd
    import comfyui_version
    import df11_node.loading as loading
    import tiny
    import torch

    tell(comfyui=comfyui_version.__version__, gpu=torch.cuda.get_device_name())
    tell(pytorch=torch.__version__, classic=classic, blocks=[asked.double, asked.single])
    config = tiny.flux(3072, asked.double, asked.single, 4096, 768)
    side = asked.pixels // 8
    shapes = ((1, 16, side, side), (1, 512, 4096), (1, 768))
    model = tiny.Tiny("comfy.ldm.flux.model", "Flux", config, *shapes)
    run = Run(model)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder, torch.inference_mode():
        file, container = files(model, Path(folder))
        theirs = comfy.sd.load_diffusion_model(str(file))
        started = time.perf_counter()
        ours = loading.load_diffusion_model(str(container))
        tell(opened_s=round(time.perf_counter() - started, 2))
        patched = with_lora([theirs, ours])
        run.load("plain", ours)
        run.load("LoRA", patched[1])
        plain = run.compare("plain", theirs, ours)
        with_one = run.compare("LoRA", *patched)
        weaker = with_lora([theirs, ours], 0.3)
        with_weaker = run.sample("LoRA, 0.3, BF16", weaker[0])
        unload()
        run.sample("LoRA, df11", patched[1], with_one)
        run.sample("then 0.3, df11", weaker[1], with_weaker)
        run.sample("then without LoRA, df11", ours, plain)
        unload()
        run.reload(patched[1], asked.reloads)
        run.offload("BF16", theirs, plain)
        run.offload("df11", ours, plain)
        # Without dynamic VRAM ComfyUI adds the LoRA of an offloaded weight in another arithmetic
        # than that of the rest.
        if not classic:
            run.offload("LoRA, BF16", patched[0], with_one)
        run.offload("LoRA, df11", patched[1], with_one)
        run.together(theirs, ours, plain)
    return int(run.failed)


if __name__ == "__main__":
    sys.exit(main())
