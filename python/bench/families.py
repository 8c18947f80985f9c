#!/usr/bin/env python3
"""Which families of transformers give BF16's bits: a small seeded model of each, compressed.

    python bench/families.py --rows families.jsonl --out families.md   # all; goes on where it was
    python bench/families.py --only qwen3_next,gpt_oss                 # some
    python bench/families.py --jobs 16                                 # on 16 cores

For each model type that transformers has a class of `LISTS` for, a config is shrunk by the names of
its fields (the first way of `LADDER` that gives a model), a model with seeded weights is saved and
compressed, and everything that it returns for one input (the first of `inputs` that the BF16 model
takes) is compared with what the BF16 model returns, bit for bit. Each type has a process of its
own. Takes 5 to 10 s a type and core.

| result | meaning |
|---|---|
| identical | all outputs have BF16's bits |
| BF16 differs | the BF16 model itself gives other bits when it is loaded a second time |
| part | it has no class or no forward of its own, and is a part of the types in the note |
| no forward | transformers' class has no forward, only functions that generate |
| not in BF16 | transformers runs the model in float32, and not in BF16 |
| no model | transformers makes, saves, loads or runs no BF16 model of the shrunk config |
| FAILED | anything else |

The note of an identical model tells why matrices are not compressed in memory, if some are not.
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import resource
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from multiprocessing.connection import Connection
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import torch
import transformers
from family_configs import LADDER, Shrink, default, small
from family_inputs import Given, inputs
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.generation import utils as _  # noqa: F401 (what each process would import)
from transformers.models.auto import configuration_auto, modeling_auto

import df11

#: A class that makes models, and a model type.
Kind = tuple[str, str]
#: Sends the result of a type: class, type, where to send it, how many bytes it may allocate.
Work = Callable[[str, str, Connection, int], None]
#: Classes that make models, and lists of their model types; the first that has a type makes it.
LISTS = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "AutoModelForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "AutoModelForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "AutoModel": "MODEL",
    "AutoModelForTextToWaveform": "MODEL_FOR_TEXT_TO_WAVEFORM",
}
#: Model types whose names begin so come first: this year's.
FIRST = ("qwen3_next", "qwen3_5", "qwen4", "gemma4", "deepseek_v3", "deepseek_v4", "glm4", "glm5")
FIRST += (
    "kimi",
    "minimax",
    "gpt_oss",
    "llama4",
    "mistral",
    "ministral",
    "inkling",
    "youtu",
    "rwkv",
)
#: Reasons for which small parameters are ordinary in every model; the note tells all others.
USUAL = {"a vector", "as small as it is", "a buffer", "not in the containers"}
#: Larger ones were not shrunk.
MAX_WEIGHTS = 400_000_000


def main() -> int:
    libraries = "torch", "transformers"
    return try_all(__doc__, work, listed(), libraries)


def try_all(about: str | None, work: Work, known: list[Kind], libraries: Sequence[str]) -> int:
    """Runs `work` for model types as the command line says, and writes the table. Returns how many
    failed.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", type=lambda text: text.split(","))
    parser.add_argument("--rows", type=Path, help="where rows are kept; types there are not run")
    parser.add_argument("--out", type=Path, help="where the table goes; printed otherwise")
    parser.add_argument("--jobs", type=int, default=1, help="how many types at once")
    parser.add_argument("--seconds", type=int, default=120, help="the most that one type may take")
    parser.add_argument("--memory", type=float, default=8, help="GB that one type may allocate")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = kept(options.rows)
    done = {row[0] for row in rows}
    wanted = [
        each
        for each in known
        if each[1] not in done and (not options.only or each[1] in options.only)
    ]
    with ThreadPool(options.jobs) as pool:
        said = pool.imap_unordered(lambda each: [each[1], *result(work, *each, options)], wanted)
        for row in said:
            rows.append(row)
            print(" | ".join(row), flush=True)
            if options.rows:
                with options.rows.open("a") as file:
                    print(json.dumps(row), file=file)
    table = in_markdown(sorted(rows), libraries)
    if options.out:
        options.out.write_text(table)
    else:
        print(table)
    return sum(row[1] == "FAILED" for row in rows)


def kept(path: Path | None) -> list[list[str]]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def listed() -> list[Kind]:
    """The class and the name of each model type that has a config: `FIRST`, then by lists."""
    found: dict[str, str] = {}
    for kind, names in LISTS.items():
        for name in known_by(names):
            if name in configuration_auto.CONFIG_MAPPING_NAMES:
                found.setdefault(name, kind)
    kinds = list(LISTS)

    def order(name: str) -> tuple[bool, int, str]:
        return not name.startswith(FIRST), kinds.index(found[name]), name

    return [(found[name], name) for name in sorted(found, key=order)]


def known_by(names: str) -> Iterable[str]:
    """Model types of a list of `LISTS`."""
    found: Iterable[str] = getattr(modeling_auto, f"{names}_MAPPING_NAMES")
    return found


def in_markdown(rows: list[list[str]], libraries: Sequence[str]) -> str:
    counts = {
        said: sum(row[1] == said for row in rows) for said in dict.fromkeys(r[1] for r in rows)
    }
    versions = [f"{name} {importlib.metadata.version(name)}" for name in libraries]
    told = ", ".join(f"{count} {said}" for said, count in counts.items())
    where = "a GPU" if "vllm" in libraries else "the CPU"  # the build of vLLM for GPUs
    lines = [f"{len(rows)} model types, {', '.join(versions)}, on {where}: {told}.", ""]
    lines += ["| model type | result | compressed parameters | note |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


_forking = threading.Lock()


def result(work: Work, kind: str, name: str, options: argparse.Namespace) -> tuple[str, str, str]:
    """The answer of a separate process: the result, compressed of all parameters, why not."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    late = f"not done in {options.seconds} s"
    with tempfile.TemporaryDirectory() as folder:
        arguments = folder, work, kind, name, theirs, int(options.memory * 1e9)
        process = multiprocessing.get_context("fork").Process(target=within, args=arguments)
        with _forking:  # filelock refuses forks in the middle of another one
            process.start()
        theirs.close()
        try:
            said = ours.recv() if ours.poll(options.seconds) else ("no model", "", late)
        except EOFError:
            said = ("FAILED", "", "the process ended")
        process.kill()
        process.join()
    return said


def within(folder: str, work: Work, *arguments: Any) -> None:
    """Works with all temporary files in a folder, which outlives a process that is killed."""
    tempfile.tempdir = folder
    work(*arguments)


def work(kind: str, name: str, answer: Connection, memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    torch.set_num_threads(1)
    if not has_forward(kind, name):
        wholes = ", ".join(holders(name))
        answer.send(("part", "", f"of {wholes}") if wholes else ("no forward", "", ""))
        return
    stage = "no model"
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        try:
            bf16, compressed = Path(folder, "bf16"), Path(folder, "df11")
            made, expected, given = first(kind, name, bf16)
            again = run(made, bf16, given)[0]
            stage = "FAILED"
            df11.compress(bf16, compressed, progress=False)
            found, model, _ = run(made, compressed, given)
            held = df11.report(model)
            count = sum(form == "stored" for form in held.residences.values())
            told = f"{count} of {len(held.residences)}"
            why = "; ".join(f"{held.ordinary[why][0]} {why}" for why in {*held.ordinary} - USUAL)
            if same(expected, found):
                answer.send(("identical", told, why))
            elif not same(expected, again):
                answer.send(("BF16 differs", told, why))
            else:
                answer.send(("FAILED", told, "other outputs"))
        except OnlyFloat32 as error:
            answer.send(("not in BF16", "", str(error)))
        except BaseException as error:
            answer.send((stage, "", in_words(error)))


class OnlyFloat32(Exception):
    """A model refuses BF16, and runs in float32."""


def has_forward(kind: str, name: str) -> bool:
    """Whether transformers has the class of a model type, with a forward of its own."""
    try:
        made = getattr(transformers, kind)._model_mapping[configuration_auto.CONFIG_MAPPING[name]]
    except ValueError:  # transformers names a class that it does not have
        return False
    except Exception:
        return True
    return "unimplemented" not in getattr(getattr(made, "forward", None), "__name__", "")


def holders(name: str) -> Iterable[str]:
    """Model types that have a config of this type as a part."""
    for other, kind in configuration_auto.CONFIG_MAPPING.items():
        if any(each.model_type == name for each in kind.sub_configs_defaults.values()):
            yield other


def in_words(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1].name
    text = f"{type(error).__name__} in {place}: {error}".replace("|", "/")
    return " ".join(text.replace(f"{sys.prefix}/", "").split())[:160]


def first(kind: str, name: str, folder: Path) -> tuple[type, list[Tensor], Given]:
    """The class of the first BF16 model that transformers makes and runs, of the smallest config,
    what it gives and for which input.
    """
    others = [each for each, names in LISTS.items() if name in known_by(names) and each != kind]
    unmade = unrun = None
    for shrink, each in product(LADDER, (kind, *others)):
        try:
            made = save(getattr(transformers, each), name, folder, shrink)
        except Exception as error:
            unmade = unmade or error
            continue
        try:
            found, _, given = run(made, folder)
        except Exception as error:
            if is_of_dtypes(error) and runs(made, folder, torch.float32):
                raise OnlyFloat32(in_words(error)) from error
            unrun = unrun or error
        else:
            return made, found, given
    why = unrun or unmade
    assert why is not None
    raise why


def is_of_dtypes(error: Exception) -> bool:
    return any(word in str(error) for word in ("dtype", "scalar type", "BFloat16"))


def runs(made: type, folder: Path, dtype: torch.dtype) -> bool:
    try:
        return bool(run(made, folder, dtype=dtype))
    except Exception:
        return False


def save(auto: Any, name: str, folder: Path, shrink: Shrink = small) -> type:
    """Saves a seeded BF16 model. Gives its class."""
    config = shrink(default(configuration_auto.CONFIG_MAPPING[name]))
    with torch.device("meta"):
        count = sum(value.numel() for value in auto.from_config(config).parameters())
    if count > MAX_WEIGHTS:
        raise ValueError(f"{count:,} weights are too many")
    model, generator = auto.from_config(config), torch.Generator().manual_seed(7)
    for key, value in model.named_parameters():
        centre = 1.0 if "norm" in key and key.endswith("weight") else 0.0
        value.copy_(centre + 0.05 * torch.randn(value.shape, generator=generator))
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    return type(model)


def run(
    made: Any, folder: Path, given: Given | None = None, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[Tensor], Any, Given]:
    """All that a model returns for an input: the given one, or the first that it takes."""
    model = made.from_pretrained(str(folder), dtype=dtype).eval().requires_grad_(False)
    for each in (model.config, *model.config.sub_configs):
        part = getattr(model.config, each, None) if isinstance(each, str) else each
        if hasattr(part, "use_cache"):
            part.use_cache = False
    refused = None
    for one in inputs(model, dtype) if given is None else [given]:
        torch.manual_seed(11)  # of models that draw noise
        try:
            found = tree_leaves(dict(model(**one)))
        except Exception as error:
            if refused is None or isinstance(refused, TypeError) or is_of_dtypes(error):
                refused = error
        else:
            return [value for value in found if isinstance(value, Tensor)], model, one
    raise refused or TypeError(f"no input is known of {type(model).__name__}")


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return bool(one) and all(a.dtype == b.dtype and bits(a).equal(bits(b)) for a, b in pairs)


def bits(value: Tensor) -> Tensor:
    return value.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


if __name__ == "__main__":
    raise SystemExit(main())
