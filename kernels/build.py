#!/usr/bin/env python3
"""Compiles the kernels to PTX and machine code.

Both are committed, so that building the crate needs no CUDA.

    just ptx            # installs the compilers, and writes kernels/ptx/
    just ptx --check    # compiles, compares, writes nothing

Linux, no GPU needed. NVRTC is the oldest of CUDA 12, so that every driver from R525 (December 2022)
on loads its PTX. Those drivers also run machine code of any ptxas of CUDA 12 (CUDA's "minor version
compatibility"), so ptxas is the version that spills least: its tile kernel decodes 4096x4096 alone
5 % faster than that of 12.0. Code for compute capability 9.0 alone (linear) has no PTX, so the last
versions of both compilers of CUDA 12 make it: ptxas 12.6 makes products of 8 rows 25 % slower
(benches/record/2026-11-22-linear-compilers.md). Machine code also spares the driver a second of
compiling when a machine first loads the PTX; a driver that refuses the machine code compiles the
PTX. Both versions are part of the result. ptxas also reports what each kernel takes of a
multiprocessor: the manifest notes it, and a spill of registers above ALLOWED_SPILLS fails the
build. tests/sources/ptx.rs compares the committed files with the manifest when the crate is tested.
"""

import argparse
import ctypes
import hashlib
import json
import re
import struct
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

KERNELS = Path(__file__).resolve().parent
PTX = KERNELS / "ptx"
OPTIONS = ["--gpu-architecture=compute_80", "--std=c++17"]
# Targets whose resources are checked. Machine code is kept for the second one, which a device was
# there to test; that of linear has code that no PTX for another target has.
TARGETS = {
    "gap": ["sm_80", "sm_90"],
    "tile": ["sm_80", "sm_90"],
    "linear": ["sm_80", "sm_90a"],
    "float": ["sm_80", "sm_90"],
}
HOPPER_OPTIONS = ["--gpu-architecture=compute_90a", "--std=c++17"]


class Tools(NamedTuple):
    """Compilers: their versions, and where they are installed."""

    packages: Path
    nvrtc: str
    ptxas: str

    @property
    def wheels(self) -> list[str]:
        return [f"nvidia-cuda-nvrtc-cu12=={self.nvrtc}", f"nvidia-cuda-nvcc-cu12=={self.ptxas}"]

    def need(self, path: str) -> Path:
        found = self.packages / "nvidia" / path
        if not found.exists():
            sys.exit(f"{found} is missing: `just ptx` installs {' '.join(self.wheels)}")
        return found


COMMON_TOOLS = Tools(Path(sysconfig.get_path("purelib")), "12.0.140", "12.6.85")
HOPPER_TOOLS = Tools(Path(sys.prefix, "hopper"), "12.9.86", "12.9.86")

# Bytes of spill stores, by kernel and target: words that are needed between tasks or rounds. The
# threads that fit a multiprocessor leave 64 and 80 registers each; fewer threads decode slower
# (kernels/*.cu).
ALLOWED_SPILLS = {
    ("df11_gap_decode_16", "sm_80"): 4,
    ("df11_gap_decode_32", "sm_80"): 28,
    ("df11_gap_decode_32", "sm_90"): 32,
    # Words that are needed between tiles, and, with 16 rows of x, some of a tile's bands.
    ("df11_linear_tile_2", "sm_90a"): 116,
    ("df11_linear_tile_8", "sm_90a"): 40,
    ("df11_linear_tile_16", "sm_80"): 36,
    ("df11_linear_tile_16", "sm_90a"): 44,
}
# Registers per thread that a kernel must begin with, because its warps exchange theirs
# (`setmaxnreg`): in linear_fast_128.cuh, linear_experts.cuh and linear_tile_16.cuh, 104 for each of
# 512 threads and 64 for each of 128, of 640; in linear_fast_256.cuh, 216 for each of 256 and 72 for
# each of 128, of 384. With fewer, a warp waits for registers for ever.
MIN_REGISTERS = (
    {
        (f"df11_linear_{kernel}", "sm_90a"): (104 * 512 + 64 * 128) // 640
        for kernel in (
            *("fast_32", "fast_64", "fast_128", "grouped_64", "grouped_128"),
            *("tile_8", "tile_16"),
        )
    }
    | {
        # linear_tile_64.cuh has three sorts of warps.
        ("df11_linear_tile_32", "sm_90a"): (104 * 128 + 80 * 512 + 56 * 128) // 768,
        ("df11_linear_tile_64", "sm_90a"): (168 * 128 + 64 * 512 + 56 * 128) // 768,
    }
    | {(f"df11_linear_fast_{rows}", "sm_90a"): (216 * 256 + 72 * 128) // 384 for rows in (192, 256)}
)


def read_source(path: Path) -> bytes:
    """A text file as it is in the repository, whatever the checkout does to line endings."""
    return path.read_bytes().replace(b"\r\n", b"\n")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sources_of(name: str) -> dict[str, bytes]:
    """A file and all files that it includes, by name."""
    found: dict[str, bytes] = {}
    wanted = [name]
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = read_source(KERNELS / name)
            wanted += re.findall(r'^#include "([^"]+)"', found[name].decode(), re.MULTILINE)
    return dict(sorted(found.items()))


class Nvrtc:
    """NVIDIA's run-time compiler: the few calls that are needed."""

    def __init__(self, tools: Tools) -> None:
        self.library = ctypes.CDLL(str(tools.need("cuda_nvrtc/lib/libnvrtc.so.12")))
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        if not tools.nvrtc.startswith(f"{major.value}.{minor.value}."):
            sys.exit(f"NVRTC {major.value}.{minor.value} found: install {tools.wheels[0]}")

    def call(self, function: str, *arguments: object) -> None:
        if code := getattr(self.library, function)(*arguments):
            raise RuntimeError(f"{function}: {self.library.nvrtcGetErrorString(code).decode()}")

    def text(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, buffer)
        return buffer.value

    def compile(self, name: str, sources: dict[str, bytes], options: list[str]) -> bytes:
        headers = [header for header in sources if header != name]
        strings = ctypes.c_char_p * len(headers)
        program = ctypes.c_void_p()
        self.call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            sources[name],
            name.encode(),
            len(headers),
            strings(*(sources[header] for header in headers)),
            strings(*(header.encode() for header in headers)),
        )
        strings = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        try:
            self.call("nvrtcCompileProgram", program, len(options), strings)
        except RuntimeError as error:
            sys.exit(f"{name}: {error}\n{self.text('ProgramLog', program).decode()}")
        if log := self.text("ProgramLog", program).decode().strip():
            print(log)
        # Visible, so that drivers keep constants that users ask for by name and no kernel reads.
        return self.text("PTX", program).replace(b"\n.const ", b"\n.visible .const ")


def assemble(tools: Tools, ptx: bytes, target: str) -> tuple[bytes, str]:
    """Makes machine code; returns it and the report of ptxas."""
    ptxas = tools.need("cuda_nvcc/bin/ptxas")
    version = subprocess.run([ptxas, "--version"], check=True, capture_output=True, text=True)
    if f"V{tools.ptxas}" not in version.stdout:
        sys.exit(f"another ptxas found: install {tools.wheels[1]}")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "in.ptx").write_bytes(ptx)
        command = [ptxas, "-v", f"-arch={target}", "in.ptx", "-o", "out.cubin"]
        log = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stderr
        return Path(folder, "out.cubin").read_bytes(), log


def build() -> tuple[dict[str, bytes], bool]:
    """The files of kernels/ptx, by name, and whether all kernels spill little enough."""
    compiler, hopper_compiler = Nvrtc(COMMON_TOOLS), Nvrtc(HOPPER_TOOLS)
    files: dict[str, bytes] = {}
    modules = {}
    good = True
    for module, targets in TARGETS.items():
        sources = sources_of(f"{module}.cu")
        ptx = compiler.compile(f"{module}.cu", sources, OPTIONS)
        files[f"{module}.ptx"] = ptx
        hashes = {}
        taken = {}
        extra = {}
        for target in targets:
            source, tools = ptx, COMMON_TOOLS
            if target == "sm_90a":
                tools = HOPPER_TOOLS
                source = hopper_compiler.compile(f"{module}.cu", sources, HOPPER_OPTIONS)
                extra["hopper_constants"] = constants(source.decode(), module)
            code, log = assemble(tools, source, target)
            taken[target] = resources(log)
            problems = re.findall(r".*Potential Performance Loss.*", log)
            for kernel, numbers in taken[target].items():
                print(f"{target} {kernel}: {numbers}")
                problems += check_resources(kernel, target, numbers)
            for problem in problems:
                print(f"{target}: {problem}")
                good = False
            if target != "sm_80":
                files[f"{module}.{target}.cubin"] = code
                hashes[f"{module}.{target}.cubin"] = {"sha256": sha256(code), "ptx": sha256(source)}
        modules[f"{module}.ptx"] = {
            "sha256": sha256(ptx),
            "entries": sorted(
                re.findall(r"^\.visible \.entry (\w+)\(", ptx.decode(), re.MULTILINE)
            ),
            "constants": constants(ptx.decode(), module),
            **extra,
            "resources": taken,
            "machine_code": hashes,
            "sources": {name: sha256(text) for name, text in sources.items()},
        }
    manifest = {
        "wheels": COMMON_TOOLS.wheels,
        "options": OPTIONS,
        "hopper_wheels": HOPPER_TOOLS.wheels,
        "hopper_options": HOPPER_OPTIONS,
        "modules": modules,
    }
    files["manifest.json"] = json.dumps(manifest, indent=2).encode() + b"\n"
    return files, good


def constants(ptx: str, module: str) -> list[int]:
    """Returns the words of the module's constants, which PTX initialises byte by byte without the
    last zeros.
    """
    pattern = rf"^\.visible \.const .* df11_{module}_constants\[(\d+)\] = {{(.*)}};$"
    size, array = re.search(pattern, ptx, re.MULTILINE).groups()
    given = bytes(map(int, array.split(",")))
    return [word for (word,) in struct.iter_unpack("<I", given.ljust(int(size), b"\0"))]


def check_resources(kernel: str, target: str, taken: dict[str, int]) -> list[str]:
    """Returns problems: too many spills, or too few registers at the beginning."""
    problems = []
    allowed = ALLOWED_SPILLS.get((kernel, target), 0)
    if taken["spill_stores"] > allowed:
        problems.append(f"{kernel} spills {taken['spill_stores']} bytes, {allowed} are allowed")
    least = MIN_REGISTERS.get((kernel, target), 0)
    if taken["registers"] < least:
        begin = f"{kernel} begins with {taken['registers']} registers"
        problems.append(f"{begin}, and would wait for {least} for ever")
    return problems


def resources(log: str) -> dict[str, dict[str, int]]:
    """What each kernel takes of a multiprocessor, from the output of ptxas -v; memory in bytes.

    Functions that are called from a kernel have a line of spills too; they count to it, as they run
    in its frame.
    """
    kernels = {}
    for part in log.split("Compiling entry function ")[1:]:
        shared = re.search(r"(\d+) bytes smem", part)
        kernels[re.match(r"'(\w+)'", part)[1]] = {
            "registers": int(re.search(r"Used (\d+) registers", part)[1]),
            "static_shared": int(shared[1]) if shared else 0,
            "spill_stores": sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", part)),
            "spill_loads": sum(int(n) for n in re.findall(r"(\d+) bytes spill loads", part)),
        }
    return dict(sorted(kernels.items()))


def write_for_emulator(folder: Path) -> None:
    """The sources of all machine code: the committed PTX, and that of compute capability 9.0."""
    folder.mkdir(parents=True, exist_ok=True)
    for module, targets in TARGETS.items():
        if "sm_90a" in targets:
            sources = sources_of(f"{module}.cu")
            ptx = Nvrtc(HOPPER_TOOLS).compile(f"{module}.cu", sources, HOPPER_OPTIONS)
        else:
            ptx = (PTX / f"{module}.ptx").read_bytes()
        (folder / f"{module}.ptx").write_bytes(ptx)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="compare with the committed files; write nothing"
    )
    parser.add_argument(
        "--emulator",
        type=Path,
        metavar="FOLDER",
        help="write the PTX that kernels/emulator runs into FOLDER, and do nothing else",
    )
    arguments = parser.parse_args()
    if arguments.emulator:
        write_for_emulator(arguments.emulator)
        return 0
    check = arguments.check
    files, good = build()
    if not good:
        return 1
    stale = False
    for name, content in files.items():
        path = PTX / name
        read = Path.read_bytes if name.endswith(".cubin") else read_source
        if path.exists() and read(path) == content:
            continue
        stale = True
        if check:
            print(f"kernels/ptx/{name} is not what the sources give; `just ptx` renews it")
        else:
            path.write_bytes(content)
            print(f"wrote kernels/ptx/{name}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
