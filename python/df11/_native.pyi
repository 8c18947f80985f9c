"""The native module: opened, decoded and written by Rust.

Everything here is thread-safe, and releases the interpreter's lock (GIL) while it works. Sizes are
bytes. Work runs on a pool of one thread a core, or as many as the variable `RAYON_NUM_THREADS`
says. Functions with the argument `progress` are long work: Ctrl-C ends them with
`KeyboardInterrupt` and leaves nothing half-written.

`progress` is `None` (a bar if standard error is a terminal, or in a notebook; with tqdm if that is
installed), `True` (always a bar), `False` (none), or a callable that is told `(stage, done,
total)`: the stage `analyse`, `encode`, `decode`, `verify` or `load`, and bytes over all stages. It
is called about twenty times a second and at the end, on the thread of the caller; what it raises
ends the work.

Exceptions are those of `df11.Error`: `IoError`, `UnsupportedError`, `CorruptError`, `LimitError`,
`ParameterError` and `GpuError`. Any function that takes a path may raise the first four of a file;
below only what is special is named.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, final

from ._report import Placement, Plan, Report, Verification

_Path: TypeAlias = str | PathLike[str]
_Progress: TypeAlias = bool | Callable[[str, int, int], object] | None
_Layout: TypeAlias = Literal["gap", "tile", "raw"] | None
_Level: TypeAlias = Literal["structure", "checksums", "full"]
_Device: TypeAlias = Literal["auto", "cpu", "gpu"] | int | None
# Anything with the buffer protocol; NumPy tells type checkers of it from Python 3.12 on.
_Buffer: TypeAlias = Any
# Names, or for each name an index of a GPU and whether the block is streamed.
_Blocks: TypeAlias = Mapping[str, tuple[int, bool]] | Sequence[str] | None
_Piece: TypeAlias = (
    tuple[str, int] | tuple[str, int, int, int] | tuple[str, int, Sequence[tuple[int, int]]]
)
_Index: TypeAlias = int | slice

__version__: str

__all__ = ["Block", "DeviceBlock", "DeviceModel", "Grouped", "Linear", "Matrix", "Model", "Packer"]
__all__ += ["PinnedMemory", "Program", "Slice", "TemporaryFolder", "Tensor", "Tiles"]
__all__ += ["__version__", "build_tables", "capture_id", "check", "check_done"]
__all__ += ["code_of", "compress", "convert", "decode_all", "decompress", "devices"]
__all__ += ["estimate", "fits", "install", "open", "pin", "plan", "printable"]
__all__ += ["run_command", "strips_bytes", "tensor_hashes", "upload", "verify"]

def open(
    path: _Path, *, memory_map: bool = True, checksums: bool = True, in_memory: bool = False
) -> Model:
    """Open a container, or a folder with all shards of a model.

    Reads and validates headers and directories: the cost grows with the number of tensors (about
    0.1 µs each) and not with their size. Containers are mapped into memory and **must not be
    truncated or changed in place while the model lives**, which would end the process; to replace
    one by renaming is fine. With `memory_map=False` they are read on demand: slower for small
    pieces, and a file that shrinks is an `IoError`. `checksums=False` leaves out the check of each
    1 MiB chunk when it is first read.

    `path` may also name a container or folder beyond a network: `s3://`, `gs://`, `az://`,
    `https://` or `hf://org/name@revision`. Opening fetches headers and directories, and reading the
    chunks that are wanted; `in_memory=True` fetches whole containers at once, and then they are as
    if mapped. `IoError` names the object and what to do.

    Raises `ParameterError` where a folder holds no container, or shards of different models.
    """

def compress(
    source: _Path,
    out: _Path,
    *,
    layout: _Layout = None,
    verify: bool = True,
    overwrite: bool = False,
    progress: _Progress = None,
) -> Report:
    """Compress a safetensors file, or the folder of a model.

    An `out` whose name ends in `.df11` becomes one self-contained file; any other becomes a folder
    with a container for each weights file, and the side files beside them. It gets its name when it
    is whole and, unless `verify=False`, decoded and compared. `layout` says how BF16 tensors are
    stored: `tile` (the default), `gap` (as in the paper) or `raw`.

    Some 1 GB/s per thread; memory some MiB per thread, whatever the size of the model. Raises
    `ParameterError` where `out` exists and `overwrite` is not given, or holds the source.
    """

def convert(
    source: _Path,
    out: _Path,
    *,
    layout: _Layout = None,
    verify: bool = True,
    overwrite: bool = False,
    progress: _Progress = None,
) -> Report:
    """Store a compressed model in another layout or form, without its original files in between.
    The result is what `compress` would make of the original files. Cost and exceptions are those of
    `compress`; `CorruptError` too where the source is damaged.
    """

def decompress(
    source: _Path, out: _Path, *, overwrite: bool = False, progress: _Progress = None
) -> int:
    """Give back the original files, byte for byte; returns their bytes.

    An `out` whose name ends in `.safetensors` is one file, where the model was made of one; any
    other is a folder. Each file is compared with the hash of the original before it gets its name.

    Raises `ParameterError` if `out` exists, a shard is missing, or one file is asked for of a
    model of several.
    """

def estimate(
    source: _Path, out: _Path | None = None, *, layout: _Layout = None, progress: _Progress = None
) -> Report:
    """Tell the exact sizes that `compress` would give, and write nothing. Reads all weights once.
    `out` is only looked at for its form: one file (the default), or a folder.
    """

def verify(
    path: _Path, level: _Level = "full", *, device: _Device = None, progress: _Progress = None
) -> Verification:
    """Check a container, or all shards of a folder.

    `structure` takes milliseconds; `checksums` reads all stored bytes; `full` decodes everything,
    and compares all hashes. `device` decodes: `cpu`, `gpu` (the first that can), the number of a
    GPU, or `auto` (the default): a GPU if there is one that is sooner done.

    Raises `CorruptError` at the first thing that is wrong; `GpuError` if the GPU that was asked for
    is not there.
    """

def install(stage: _Path, folder: _Path, names: set[str], identity: str) -> None:
    """Gives all files in `stage/files/NAME` their names in a folder, in the place of what has these
    and of an earlier output's containers. `stage` is a temporary folder in it, `names` containers
    that are there already, `identity` the model's. If one file cannot have its name, all is as it
    was; a run that is killed meanwhile is finished by the next one. Raises `ParameterError` if a
    container is not of an earlier output.
    """

def tensor_hashes(file: _Path) -> dict[str, str]:
    """The BLAKE3 hashes of the tensors of a safetensors file, in hexadecimal."""

def devices() -> list[dict[str, Any]]:
    """Tell the GPUs that the driver shows, if any. Starts nothing on them. Each has `ordinal`,
    `name`, `total_memory` in bytes, and as pairs of major and minor `compute_capability` (8.0 is
    the least that can decode) and `driver`, the version of CUDA that the driver knows.
    """

def plan(
    model: Model,
    memory: int | Sequence[int] | None = None,
    *,
    streamed: bool = False,
    blocks: _Blocks = None,
) -> Plan:
    """Tell which block would lie where, without a GPU.

    `memory` is what each GPU may give, in bytes, with room for two outputs of its largest block:
    what does not fit is streamed from the host. Without it all blocks lie on one GPU, or with
    `streamed` are streamed to it. `blocks` names the blocks that are loaded, where that is not all
    of them; or it is a dict that says of each of them where it lies, as `Plan.placements` does,
    instead of `memory` and `streamed`.

    Raises `ParameterError` where a GPU is too small even for streaming, with the bytes that it
    would need, or where there is no such block.
    """

def printable(text: str) -> str:
    """Text in which every character shows: controls, what reorders the text around it, and what is
    invisible are escaped. Messages of the module's exceptions are.
    """

def run_command(arguments: Sequence[str]) -> int:
    """Run the command `df11` with these arguments, of which the first is its name, for its exit
    code. Ctrl-C is the command's from then on: for processes that do nothing else.
    """

@final
class Model(Mapping[str, Tensor]):
    """An open model, from `open`: tensors by name, which are decoded when they are asked for."""

    path: Final[str]
    identity: Final[str]
    """The hash by which the shards of the model know each other, in hexadecimal."""
    is_complete: Final[bool]
    """Whether all shards of the model are open; a single shard of several opens alone."""
    def check_complete(self) -> None:
        """Refuse a model that lacks shards, and name them. Raises `ParameterError`."""
    nbytes: Final[int]
    """Decoded bytes of all tensors, aliases included."""
    stored_bytes: Final[int]
    mappings: Final[list[tuple[int, int]]]
    """Address and bytes of each container's mapping: for reading alone, unchecked."""
    def check_tiles(self, names: Sequence[str]) -> None:
        """Check those of these tensors that have `Tensor.tiles`: each byte once in the life of the
        model. Raises `KeyError`, `CorruptError`.
        """
    shards: Final[list[dict[str, Any]]]
    """The open containers: `path`, `index`, `count` and `bytes` of each."""
    weights_files: Final[list[str]]
    side_files: Final[list[str]]
    """Paths of the other original files in the containers."""
    def weights_header(self, path: str) -> str:
        """The JSON header of one of `weights_files`, as it was. Raises `ParameterError`."""
    blocks: Final[list[Block]]
    """The blocks, in the order in which the model runs them."""
    tensors: Final[Mapping[str, Tensor]]
    """All tensors by name, shard by shard; made at the first use and kept."""
    def block(self, name: str) -> Block:
        """The block with this name. Constant time. Raises `KeyError` where there is none."""
    def copy(
        self, out: _Path, beside: _Path | None = None, *, containers: bool = True
    ) -> list[str]:
        """Write the containers, as they are open, into a new folder `out`, unless they are not
        wanted, and the side files that lie in `beside`. Returns the paths of those that were
        changed. Raises `ParameterError` if one is a link that leads out of
        `beside`, or what is open was overwritten in place.
        """
    def read_ahead(self, names: Sequence[str]) -> object:
        """Has tensors brought that will be read in this order, until the answer is dropped. Does
        nothing unless the containers lie beyond a network. Raises `KeyError`.
        """
    def verify_containers(self) -> None:
        """Verify the containers fully, as they are open, and nothing beside them."""
    def verify(
        self, level: _Level = "full", *, device: _Device = None, progress: _Progress = None
    ) -> Verification:
        """As the function `verify`, of what is open."""
    def load(
        self,
        devices: int | Sequence[int] = 0,
        memory: int | Sequence[int] | None = None,
        streamed: bool = False,
        progress: _Progress = None,
        blocks: _Blocks = None,
    ) -> DeviceModel:
        """Load the blocks onto GPUs, by their numbers, where they stay compressed.

        `memory`, `streamed` and `blocks` are as in `plan`: what the model may take of each GPU, in
        bytes, includes two outputs of the largest block, which are the caller's to allocate.
        Without `memory` one GPU gets all blocks, and several share them within 90 % of their free
        memory; it has to be named if `blocks` are names and GPUs several.

        Checks all checksums on the way; near the speed of the bus. Raises `GpuError` with what to
        do, and `ParameterError` for GPUs and blocks that there are not.
        """
    def __getitem__(self, key: str, /) -> Tensor: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def get(self, name: str, default: Any = None) -> Any: ...
    def _repr_html_(self) -> str: ...

class _Decoded:
    """What a tensor and a part of one have in common. By DLPack, `torch.from_dlpack(tensor)`
    decodes it into new memory of the CPU and copies nothing.
    """

    dtype: Final[str]
    """As safetensors names it, such as `BF16`; `unknown` for one of a newer version."""
    nbytes: Final[int]
    """Decoded. Raises `UnsupportedError` for an unknown dtype."""
    def decode_into(self, buffer: _Buffer) -> None:
        """Decode into a writable, contiguous buffer of exactly `nbytes` bytes, little-endian and in
        row-major order.

        Nothing else may use the buffer meanwhile. Of a PyTorch tensor on the CPU pass
        `tensor.view(torch.uint8).numpy()`. Raises `ParameterError` for a buffer of another size or
        that cannot be written, `TypeError` for what is no buffer, `CorruptError` where the
        container is damaged (then the buffer holds anything), `UnsupportedError` for an encoding of
        a newer version.
        """
    def numpy(self) -> Any:
        """A new NumPy array. BF16 and F8 have the types of ml_dtypes where that is installed; else
        `uint16` and `uint8` hold their bits, which a warning says. `numpy.asarray` gives values.
        """
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """A new NumPy array of the values, which `numpy.asarray` asks for. Without ml_dtypes those
        of BF16 are `float32`, which has them all. Raises `ParameterError` for other dtypes that
        need ml_dtypes, and `ValueError` for `copy=False`.
        """
    def torch(self) -> Any:
        """A new PyTorch tensor on the CPU, in memory that is its own. F4 has `float4_e2m1fn_x2`,
        two elements in one. Raises `ParameterError` for F6, and for F4 with an odd last dimension.
        """
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Raises `ParameterError` for another device than the CPU, and for F4 and F6."""
    def __dlpack_device__(self) -> tuple[int, int]:
        """The CPU."""

@final
class Tensor(_Decoded):
    """A tensor of an open model. Decoded anew by each call, on all cores (1 to 3 GB/s each)."""

    name: Final[str]
    block: Final[str]
    shape: Final[tuple[int, ...]]
    stored_bytes: Final[int]
    """Bytes of its arrays in the container; 0 for an alias."""
    tiles: Final[Tiles | None]
    """Its arrays, if it is BF16 in tiles of 32 x 256; of an alias those of its target. None for
    any other tensor.
    """
    bits_per_element: Final[float]
    """Stored bits per element; 0 for an alias or a tensor without elements."""
    encoding: Final[str]
    """How its bytes are stored: `gap`, `tile`, `raw`, or `unknown` for a newer version's. Of an
    alias that of its target.
    """
    target: Final[str]
    """The name of the tensor that holds its bytes: its own, except for an alias."""
    hash: Final[str]
    """The BLAKE3 hash of its decoded bytes, as stored, in hexadecimal."""
    def decode_rows_into(self, start: int, stop: int, buffer: _Buffer) -> None:
        """As `rows(start, stop).decode_into(buffer)`."""
    def rows(self, start: int, stop: int) -> Slice:
        """The part whose index in the first dimension lies in `start..stop`. Raises
        `ParameterError` for rows that do not exist, or that do not fill whole bytes.
        """
    def __getitem__(self, key: _Index | tuple[_Index, ...], /) -> Slice:
        """What indexing with numbers and slices gives, as in NumPy, but that steps are 1; nothing
        is decoded yet. Of a matrix in tiles only those of 32 rows and 256 columns are decoded that
        hold some of it: `tensor[:, 1024:2048]` is the part of one of several GPUs. Of other coded
        tensors whole rows are. Raises `IndexError`, and `ParameterError` where the part does not
        begin and end between bytes.
        """

@final
class Slice(_Decoded):
    """A part of a tensor: only the thread blocks, or the tiles, that hold it are decoded."""

    tensor: Final[Tensor]
    ranges: Final[tuple[tuple[int, int], ...]]
    """For each of the first dimensions the first index, and the one after the last."""
    shape: Final[tuple[int, ...]]
    """The numbers of indices, without dimensions that were indexed with a number."""

@final
class Block:
    """The tensors that a model uses together, usually one transformer layer."""

    name: Final[str]
    tensors: Final[list[Tensor]]
    """Its tensors, in the order of `layout`."""
    nbytes: Final[int]
    """Of a buffer for `decode_into`."""
    stored_bytes: Final[int]
    layout: Final[dict[str, tuple[int, int]]]
    """For each tensor, by name, where its bytes begin and end in a buffer for `decode_into`.
    Each begins on a multiple of 256.
    """
    def decode_into(self, buffer: _Buffer) -> None:
        """As `Tensor.decode_into`, of all tensors; bytes between them become zero."""

@final
class DeviceModel:
    """A model whose blocks lie compressed on GPUs, or pinned on the host. From `Model.load`. Memory
    is freed when the last of it, its blocks and programs is dropped, which waits for the GPUs.
    """

    devices: Final[list[int]]
    """The numbers of its GPUs, as they were given."""
    device_bytes: Final[int]
    """Memory that it holds on all GPUs together. Outputs are the caller's, and not counted."""
    host_bytes: Final[int]
    """Bytes of streamed blocks: page cache that is pinned, or copies."""
    copied_bytes: Final[int]
    """How much of that is copies, because the containers' mappings could not be pinned."""
    largest_block_bytes: Final[int]
    """The size of a buffer into which any block can be decoded."""
    blocks: Final[list[DeviceBlock]]
    """The blocks that are loaded, in the order in which the model runs them."""
    def block(self, name: str) -> DeviceBlock:
        """The block with this name. Raises `KeyError` where there is none, or it was not loaded."""
    placements: Final[dict[str, Placement]]
    """For each block that is loaded, by name, the number of its GPU, and whether it is streamed."""
    def program(self, pieces: Sequence[_Piece]) -> Program:
        """Prepare to decode tensors that lie on one GPU, of any blocks, to chosen places of one
        output.

        Each piece is `(tensor name, byte offset in the output)`, `(tensor name, byte offset, first
        row, row after the last)` or `(tensor name, byte offset, ranges)` with the ranges of a
        `Slice`. Offsets are multiples of 16; of tensors that are stored as they are (`raw`), any.
        Allocates 128 bytes of device memory a piece (384 if they are streamed) and waits for their
        upload, so that it cannot be captured. Tensors of exactly one streamed block come through
        its slots, unless rows of less than half of it are asked for; what is streamed otherwise is
        read in place, over the bus. Raises `ParameterError`, `GpuError`.
        """
    def check(self, stream: int = 0, device: int | None = None) -> None:
        """Raise `CorruptError` if any decoding so far met a malformed stream. Waits for what is on
        `stream`. Of a model on several GPUs, a stream other than 0 needs its `device`; 0 without
        one checks the default streams of all.
        """

@final
class DeviceBlock:
    """A block of a model on GPUs, which it keeps alive."""

    name: Final[str]
    device: Final[int]
    is_streamed: Final[bool]
    """Whether it stays on the host and is copied to the GPU ahead of each use."""
    nbytes: Final[int]
    layout: Final[dict[str, tuple[int, int]]]
    """As `Block.layout`: by the name of each tensor where its bytes begin and end."""
    def decode(self, pointer: int, stream: int) -> None:
        """Put the decoding of all its tensors on a stream: usually one launch.

        `pointer` is the device address of at least `nbytes` bytes, a multiple of 16 (256 is best):
        `tensor.data_ptr()`. `stream` is a stream of that device as CUDA's handle:
        `torch.cuda.current_stream(device).cuda_stream`, or 0 for the legacy default stream. Neither
        allocates nor waits; the thread's current device stays what it is; CUDA graphs capture it (a
        streamed block is then read in place, over the bus).

        **Nobody checks pointer and stream.** The memory must be there, and nobody else may use it,
        until the stream has done the work; of a captured graph that holds for each replay, and the
        model must live as well. A malformed stream is told by `DeviceModel.check`.

        Raises `ParameterError` for a misaligned pointer, `GpuError` where the driver refuses.
        """

@final
class Program:
    """Tensors of one GPU, or rows of them, to be decoded into one output. From
    `DeviceModel.program`.
    """

    device: Final[int]
    is_streamed: Final[bool]
    """Whether it decodes tensors of a streamed block out of its slots."""
    nbytes: Final[int]
    """Bytes of the output: to the end of the last piece."""
    def decode(self, pointer: int, stream: int) -> None:
        """As `DeviceBlock.decode`. Bytes between pieces stay as they are; where pieces overlap,
        they are those of any. The program must live as long as replays of a captured graph.
        """

# Matrices in memory of other libraries. A *piece* is a BF16 tensor of a container in tiles of 32 x
# 256, in one of two forms:
#
# | form | arrays, in order |
# |---|---|
# | 0, as stored | codebook, records, bits, plane, table: a decode table, empty on the CPU |
# | 1, fast layout, on GPUs alone | strips, entries: exceptions of 4 bytes each |
#
# A *part* is a window of a piece, eight numbers: form, rows, columns, staged bytes (0 in form 1),
# first row, row after the last one, first column, column after the last one. Rows and columns
# first: those of the whole piece.
#
# **Nobody checks addresses and streams.** Arrays have the bytes that are named, begin on multiples
# of 16, and live until the work on the stream that uses them is done; so do x, outputs and
# workspace, which nobody else uses meanwhile. `stream` is CUDA's handle of a stream of that device,
# 0 for the legacy default one. On a GPU nothing allocates or waits unless it says so, and CUDA
# graphs can capture it; arrays may lie in pinned host memory, which kernels then read over the bus.
# Arrays may hold anything: `check` tells.

@final
class Tiles:
    """A BF16 matrix of a container in tiles of 32 x 256. From `Tensor.tiles`."""

    rows: Final[int]
    """All dimensions but those of `columns`, multiplied."""
    columns: Final[int]
    """The last dimension, or the product of some last ones."""
    staged_bytes: Final[int]
    """The most bytes of its bitstream that a tile takes."""
    lengths: Final[tuple[int, int, int, int]]
    """Bytes of codebook, records, bits and plane."""
    places: Final[tuple[tuple[int, int], ...] | None]
    """Address and bytes of each of these arrays in one of `Model.mappings`, unread and
    unchecked; None if the container is not mapped.
    """
    def array(self, index: int) -> memoryview:
        """One of these arrays, for reading. Checks its checksums. Raises `CorruptError`."""
    def cut(
        self, rows: tuple[int, int], columns: tuple[int, int]
    ) -> tuple[int, tuple[bytearray, bytearray, bytearray, bytearray]]:
        """`staged_bytes` and arrays of a tensor of its own with these rows and columns; decodes
        nothing. Rows begin on a multiple of 32 and end on one or with the last one; columns
        likewise of 256. Raises `ParameterError` and `CorruptError`.
        """

@final
class Matrix:
    """A part where the caller holds it. Owns nothing; some microseconds."""

    def __new__(
        cls,
        device: int | None,
        part: Sequence[int],
        pointers: Sequence[int],
        lengths: Sequence[int],
    ) -> Matrix:
        """`device`: a GPU's number, or None for the CPU. Raises `ParameterError` where lengths
        contradict the part, `GpuError`.
        """
    rows: Final[int]
    columns: Final[int]
    def decode(self, output: int, stream: int = 0) -> None:
        """Decode to an address, row by row, dense; a multiple of 16 on a GPU. On the CPU done when
        it returns.
        """
    def gather(self, indices: int, count: int, wide: bool, output: int, stream: int = 0) -> None:
        """Decode rows by their indices, of 64 bits if `wide`, else of 32, dense. Parts that begin
        and end between tiles alone. Of an index that names no row: on the CPU `IndexError`, on a
        GPU zeros, and `check` tells.
        """

def decode_all(matrices: Sequence[Matrix], outputs: Sequence[int], stream: int) -> None:
    """As `Matrix.decode` of each, all on one GPU: up to eight as stored in one launch."""

@final
class Linear:
    """`y = x Wᵀ (+ bias)` of parts of one GPU that share x, and begin and end between tiles."""

    def __new__(cls, matrices: Sequence[Matrix]) -> Linear:
        """Raises `ParameterError` where they differ in columns or GPU, `GpuError`."""
    def workspace_bytes(self, rows: int) -> int:
        """Bytes of a workspace for up to this many rows of x."""
    def keeps_order(self, rows: int, splits: Sequence[int]) -> bool:
        """Whether products of this many rows of x are added in the order of these splits, one for
        each part: split i of s has the columns from i * U to before (i + 1) * U, where U is
        ceil(ceil(columns / 64) / s) * 64, and is one chain of products of 16 columns from 0; splits
        are added in order, then the bias, and the sum is rounded once. 0 is always true.
        """
    crossover_rows: Final[int]
    """From this many rows of x on it is faster to decode and multiply then."""
    def multiply(
        self,
        x: int,
        rows: int,
        pitch: int,
        outputs: Sequence[tuple[int, int, int, int]],
        workspace: int,
        stream: int,
    ) -> None:
        """Multiply rows of x, `pitch` elements apart. For each part: address, pitch in elements,
        the address of a bias or 0, and the splits of its columns in whose order sums are added, or
        0: the fastest. The workspace was filled with zeros once, and since then only such calls
        have written to it, one after the other. Bits of y are the same in every run.
        Raises `ParameterError`, also if `keeps_order` says no.
        """

@final
class Grouped:
    """Products with equal parts of the rows of a part in the fast layout (experts), as a router
    says on the device.
    """

    def __new__(cls, matrix: Matrix, experts: int) -> Grouped:
        """Raises `ParameterError` for form 0, a window of columns, or experts that do not begin on
        multiples of 32 rows; `GpuError`.
        """
    keeps_order: Final[bool]
    """Whether each product is added as `Linear.keeps_order` says of one split."""
    def multiply(
        self,
        x: int,
        x_rows: int,
        pitch: int,
        offsets: int,
        places: int,
        rows: int,
        y: int,
        y_pitch: int,
        stream: int,
    ) -> None:
        """`y[i] = x[rows[i]] W[e]ᵀ` for the places i from `offsets[e]` to before `offsets[e + 1]`,
        all of 32 bits. `rows` 0: place i has row i. Only experts with places are read.
        """

@final
class Packer:
    """BF16 weights on a GPU to the fast layout: `strips_bytes` at an address."""

    def __new__(cls, device: int, rows: int, columns: int, strips: int, stream: int) -> Packer:
        """Allocates room for exceptions, one of 256 weights. Raises `ParameterError` for 2^32
        weights or more, `GpuError`.
        """
    def pack(self, first_row: int, rows: int, weights: int, stream: int) -> None:
        """Pack the next rows, dense at an address: to a multiple of 32, or to the last one."""
    def finish(self, stream: int) -> int | None:
        """Wait; the number of exceptions, or None where they are too many."""
    def take(self, entries: int, stream: int) -> None:
        """Copy them to an address, 4 bytes each."""

def strips_bytes(rows: int, columns: int) -> int:
    """Bytes of a matrix in the fast layout, except its exceptions."""

def code_of(counts: bytes) -> tuple[bytearray, bytearray] | None:
    """The codebook of a matrix with these counts (65,536 of 64 bits), and what each pair of
    exponents is written as (as many of 64 bits): the number of its bits in the low 16, and these
    above. None if codes make the matrix no smaller. Some milliseconds at most.
    """

def upload(
    model: Model,
    device: int,
    items: Sequence[tuple[str, tuple[int, int, int, int]]],
    progress: _Progress = None,
) -> None:
    """Copy the four arrays of tensors that have `Tensor.tiles` to addresses on a GPU, through
    pinned memory, and check them. Done when it returns; Ctrl-C ends it.
    """

def build_tables(device: int, items: Sequence[tuple[int, int, int]]) -> None:
    """Build decode tables of 16,384 bytes: address of the codebook, its bytes, address of the
    table. Done when it returns.
    """

@final
class PinnedMemory:
    """Memory of the host that kernels read over the bus. When this is dropped it is so no longer,
    which waits for nothing: whoever used it must be done.
    """

@final
class TemporaryFolder:
    """A new folder in `parent` that this user alone may enter, for a `with`, which removes it.

    If the process is killed, the next one that makes a folder here, or writes an output, removes
    it; until then `df11 doctor` lists it.
    """

    def __new__(cls, parent: _Path) -> TemporaryFolder: ...
    def __enter__(self) -> Path: ...
    def __exit__(self, *error: object) -> None: ...

def pin(address: int, bytes: int) -> PinnedMemory:
    """Pin memory of the host. Raises `GpuError` where the driver refuses."""

def capture_id(stream: int) -> int:
    """The number of the CUDA graph capture that takes what is put on a stream of the current
    device, another one for each capture; 0 if there is none.
    """

def check(device: int, stream: int) -> None:
    """Wait for a stream, and raise what kernels on this GPU told since the last such call:
    `CorruptError` of weights that contradict themselves; `IndexError` if all that was wrong are
    indices or offsets of rows that do not exist.
    """

def check_done(device: int | None = None) -> None:
    """As `check`, of kernels that are done by now: waits for nothing, and takes nanoseconds. Of all
    GPUs that matrices were made for, unless one is named. Everything here that decodes, gathers or
    multiplies on a GPU raises the same before it begins.
    """

def fits(device: int) -> bool:
    """Whether the kernels run on a GPU."""
