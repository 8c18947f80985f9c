"""The native module: opens, decodes and writes containers, in Rust.

Everything here is thread-safe, and releases the interpreter's lock (GIL) during work. Sizes are in
bytes. Work runs on a pool with one thread per core, or with as many threads as the environment
variable `RAYON_NUM_THREADS` says. Functions with the argument `progress` may take long: Ctrl-C ends
them with `KeyboardInterrupt` and leaves nothing half-written.

`progress` is `None` (a bar if standard error is a terminal, or in a notebook; with tqdm if that is
installed), `True` (always a bar), `False` (no bar), or a callable that receives `(stage, done,
total)`: the stage `analyse`, `encode`, `decode`, `verify` or `load`, and bytes over all stages. It
is called about twenty times a second and at the end, on the caller's thread. An exception from it
ends the work.

Exceptions are subclasses of `df11.Error`: `IoError`, `UnsupportedError`, `CorruptError`,
`LimitError`, `NoBaseError`, `ParameterError` and `GpuError`. Any function that takes a path may
raise the first four for a file; the text below names only special cases.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, final, overload

from ._report import Placement, Plan, Report, Verification

_Path: TypeAlias = str | PathLike[str]
_Progress: TypeAlias = bool | Callable[[str, int, int], object] | None
_Layout: TypeAlias = Literal["tile", "gap", "raw"] | None
_Level: TypeAlias = Literal["structure", "checksums", "full"]
_Device: TypeAlias = Literal["auto", "cpu", "gpu"] | int | None
# Anything with the buffer protocol. NumPy declares it to type checkers from Python 3.12 on.
_Buffer: TypeAlias = Any
# Names of blocks, or for each name the index of a GPU and whether the block is streamed.
_Blocks: TypeAlias = Mapping[str, tuple[int, bool]] | Sequence[str] | None
_Piece: TypeAlias = (
    tuple[str, int] | tuple[str, int, int, int] | tuple[str, int, Sequence[tuple[int, int]]]
)
_Index: TypeAlias = int | slice

__version__: str
KINDS: Final[tuple[str, ...]]
"""The dtype of weights for each kind of matrix (see `Tiles`), by the kind's number."""

__all__ = ["KINDS", "Block", "DeviceBlock", "DeviceModel", "Experts", "Grouped", "Linear"]
__all__ += ["Matrix", "Model", "Packer"]
__all__ += ["PinnedMemory", "Program", "ReadAhead", "Slice", "TemporaryFolder", "Tensor", "Tiles"]
__all__ += ["__version__", "build_tables", "capture_id", "check", "check_done"]
__all__ += ["code_of", "compress", "convert", "decode_all", "decompress", "devices"]
__all__ += ["estimate", "fetch_side_files", "fits", "install", "open", "pin", "plan", "printable"]
__all__ += ["describe", "run_command", "strips_bytes", "tensor_hashes", "upload", "verify"]

@overload
def open(  # type: ignore[overload-overlap]  # "cpu" is a str: the first one that fits counts
    path: _Path,
    *,
    device: Literal["cpu"] | None = None,
    memory_map: bool | None = None,
    checksums: bool = True,
    in_memory: bool = False,
    base: _Path | None = None,
    cache: _Path | None = None,
    cache_bytes: int = 64 << 30,
) -> Model:
    """Open a container, or a folder with all shards of a model.

    Reads and validates headers and directories. The cost grows with the number of tensors (about
    0.1 µs each) and not with their size. Containers are mapped into memory and **must not be
    truncated or changed in place while the model lives**, which would end the process. Replacing
    one by renaming is safe. With `memory_map=False` containers are read on demand: this is slower
    for small parts, and a file that shrinks is an `IoError`. The environment variable
    `DF11_MEMORY_MAP=0` sets this default for all files; loaders then read them into memory.
    `checksums=False` skips the check of each 1 MiB chunk when it is first read.

    `path` may also name a remote container or folder: `s3://`, `gs://`, `az://`, `https://` or
    `hf://org/name@revision`. Opening fetches headers and directories, and reading fetches the
    chunks that are wanted. `in_memory=True` fetches whole containers into memory, and returns
    before they have arrived: reading a tensor waits for its bytes. `IoError` names the object and
    the remedy. `cache` is a local folder that keeps fetched chunks, up to about `cache_bytes`
    bytes, for later runs and other processes (default: the environment variable `DF11_CACHE`, or
    none).

    `base` is the model against which this one was compressed: a path, or its name in the cache of
    the Hub. Without it, df11 looks for the base where it was then. If the base is missing, tensors
    that need it raise `NoBaseError`; so does `open` if `base` has other weights.

    With `device`, a GPU's number or its name in PyTorch, the model is also loaded onto the GPU, as
    by `Model.load`, and the result is a `DeviceModel`.

    Raises `ParameterError` if a folder holds no container, or shards of different models, and for
    any other device.
    """

@overload
def open(
    path: _Path,
    *,
    device: int | str,
    memory_map: bool | None = None,
    checksums: bool = True,
    in_memory: bool = False,
    base: _Path | None = None,
    cache: _Path | None = None,
    cache_bytes: int = 64 << 30,
) -> DeviceModel: ...
def fetch_side_files(name: str, folder: _Path, others: Sequence[str]) -> None:
    """Fetch the files beside the containers of a folder in a store into a local folder: files that
    the containers record, and `others` if they exist. For a pipeline, fetch the files of all
    components.

    Raises `ParameterError` for a single container.
    """

def compress(
    source: _Path,
    out: _Path,
    *,
    layout: _Layout = None,
    verify: bool = True,
    overwrite: bool = False,
    base: _Path | None = None,
    progress: _Progress = None,
) -> Report:
    """Compress a safetensors file, or the folder of a model.

    An `out` whose name ends in `.df11` becomes one self-contained file. Any other becomes a folder
    with a container for each weights file, and the side files beside them. The output gets its name
    only when it is complete and, unless `verify=False`, has been decoded and compared. `layout`
    says how BF16 tensors are stored: `tile` (the default), `gap` (as in the paper) or `raw`.
    `base`, a path or a name in the cache of the Hub, is the model that was fine-tuned: BF16 tensors
    are stored as differences from it if that is smaller, and then need it for decoding.

    `source` may also be a name such as `s3://bucket/model` or `hf://org/name`: its files are
    fetched into the temporary folder first. `out` may be a name that begins with `s3://`, `gs://`
    or `az://`: the output is uploaded, all or nothing, when it is complete and verified. Nothing in
    a store is replaced, even with `overwrite`.

    Compresses some 1 GB/s per thread, with some MiB of memory per thread for any model. Raises
    `ParameterError` if `out` exists and `overwrite` is not given, or if it holds the source.
    """

def convert(
    source: _Path,
    out: _Path,
    *,
    layout: _Layout = None,
    verify: bool = True,
    overwrite: bool = False,
    base: _Path | None = None,
    progress: _Progress = None,
) -> Report:
    """Store a compressed model in another layout, or as one file or a folder, without writing its
    original files. The result equals that of `compress` on the original files, and needs no base;
    `base` is the base of the source, as in `open`. Cost and exceptions are those of `compress`; a
    damaged source raises `CorruptError`.
    """

def decompress(
    source: _Path,
    out: _Path,
    *,
    overwrite: bool = False,
    base: _Path | None = None,
    progress: _Progress = None,
) -> int:
    """Restore the original files, byte for byte. Returns the number of bytes. `base` is as in
    `open`.

    An `out` whose name ends in `.safetensors` is one file, if the model was one file; any other is
    a folder. Each file is compared with the hash of the original before it gets its name.

    Raises `ParameterError` if `out` exists, a shard is missing, or `out` is one file and the model
    has several.
    """

def estimate(
    source: _Path,
    out: _Path | None = None,
    *,
    layout: _Layout = None,
    base: _Path | None = None,
    progress: _Progress = None,
) -> Report:
    """Compute the exact sizes that `compress` would give, and write nothing. Reads all weights
    once. Only the ending of `out` matters: one file (the default), or a folder.
    """

def verify(
    path: _Path,
    level: _Level = "full",
    *,
    device: _Device = None,
    base: _Path | None = None,
    progress: _Progress = None,
) -> Verification:
    """Check a container, or all shards of a folder.

    `structure` takes milliseconds; `checksums` reads all stored bytes; `full` decodes everything,
    and compares all hashes. `device` is where to decode: `cpu`, `gpu` (the first usable one), the
    number of a GPU, or `auto` (the default): a GPU if that is faster. `base` is as in `open`;
    without it, the result lists the tensors that need it in `unchecked`.

    Raises `CorruptError` at the first problem; `GpuError` if the requested GPU does not exist.
    """

def install(stage: _Path, folder: _Path, names: set[str], identity: str) -> None:
    """Gives all files in `stage/files/NAME` their names in a folder. They replace files of these
    names, and the containers of an earlier output. `stage` is a temporary folder inside the folder,
    `names` are the containers that are already there, and `identity` is the model's. If one file
    cannot get its name, nothing changes. If a run is killed, the next one finishes its work. Raises
    `ParameterError` if a container belongs to no earlier output.
    """

def tensor_hashes(file: _Path) -> dict[str, str]:
    """The BLAKE3 hashes of the tensors of a safetensors file, in hexadecimal."""

def devices() -> list[dict[str, Any]]:
    """List the GPUs that the driver reports, without starting anything on them. Each has `ordinal`,
    `name`, `total_memory` in bytes, and two pairs of major and minor: `compute_capability` (8.0 or
    newer can decode) and `driver`, the version of CUDA that the driver supports.
    """

def plan(
    model: Model,
    memory: int | Sequence[int] | None = None,
    *,
    streamed: bool = False,
    blocks: _Blocks = None,
) -> Plan:
    """Plan the place of each block, without a GPU.

    `memory` is the memory of each GPU for the model, in bytes, with room for two outputs of its
    largest block. Blocks that do not fit are streamed from the host. Without `memory`, all blocks
    are on one GPU, or with `streamed` are streamed to it. `blocks` names the blocks to load, if not
    all; or, instead of `memory` and `streamed`, it is a dict with the place of each block, like
    `Plan.placements`.

    Raises `ParameterError` if a GPU is too small even for streaming (the error says how many bytes
    it would need), or if a block does not exist.
    """

def printable(text: str) -> str:
    """Text in which every character is visible: escapes control characters, invisible ones, and
    those that reorder text. Messages of the module's exceptions are already escaped.
    """

def describe(model: Model, source: _Path, tensors: bool) -> str:
    """What `df11 inspect --json` says of a model, whose weights it does not read."""

def run_command(arguments: Sequence[str]) -> int:
    """Run the command `df11` with these arguments, the first being its name. Returns the exit code.
    The command handles Ctrl-C from then on, so use it only in processes that do nothing else.
    """

@final
class Model(Mapping[str, Tensor]):
    """An open model, from `open`: tensors by name, decoded on request."""

    path: Final[str]
    full_path: Final[str]
    """The name that was opened, with the signature of a URL, which `path` leaves out."""
    identity: Final[str]
    """The hash that all shards of the model share, in hexadecimal."""
    is_complete: Final[bool]
    """Whether all shards of the model are open; a single shard of several opens alone."""
    def check_complete(self) -> None:
        """Refuse a model that lacks shards, and name them. Raises `ParameterError`."""
    nbytes: Final[int]
    """Decoded bytes of all tensors, aliases included."""
    stored_bytes: Final[int]
    mappings: Final[list[tuple[int, int]]]
    """Address and bytes of each container's mapping: read-only, unchecked."""
    is_coming: Final[bool]
    """Whether bytes of the mappings are still arriving over a network. The bytes of an array have
    arrived when `check_tiles` returns.
    """
    def check_tiles(self, names: Sequence[str]) -> None:
        """Check those of these tensors that have `Tensor.tiles`. Each byte is checked only once in
        the life of the model. Raises `KeyError`, `CorruptError`.
        """
    shards: Final[list[dict[str, Any]]]
    """The open containers: `path`, `index`, `count` and `bytes` of each."""
    container_paths: Final[list[str]]
    """Their paths in the folder of the model."""
    weights_files: Final[list[str]]
    side_files: Final[list[str]]
    """Paths of the other original files in the containers."""
    def weights_header(self, path: str) -> str:
        """The original JSON header of one of `weights_files`. Raises `ParameterError`."""
    blocks: Final[list[Block]]
    """The blocks, in the order in which the model runs them."""
    tensors: Final[Mapping[str, Tensor]]
    """All tensors by name, shard by shard; made on first use and kept."""
    def block(self, name: str) -> Block:
        """The block with this name, in constant time. Raises `KeyError` if there is none."""
    def copy(
        self, out: _Path, beside: _Path | None = None, *, containers: bool = True
    ) -> list[str]:
        """Write the open containers (unless `containers` is False) and the side files in `beside`
        (default: the containers' folder; remote files are fetched) to a new folder `out`. Returns
        the paths of changed side files. Raises `ParameterError` if one is a link that leads out of
        `beside`, or if an open container was overwritten in place.
        """
    def read_ahead(self, names: Sequence[str]) -> ReadAhead:
        """Fetches tensors ahead of reads in this order, until the result is dropped. Does nothing
        if the containers are local. Raises `KeyError`.
        """
    def verify_containers(self) -> None:
        """Verify the open containers fully, but no files beside them."""
    def verify(
        self, level: _Level = "full", *, device: _Device = None, progress: _Progress = None
    ) -> Verification:
        """Like the function `verify`, for the open containers."""
    def load(
        self,
        devices: int | Sequence[int] = 0,
        memory: int | Sequence[int] | None = None,
        streamed: bool = False,
        progress: _Progress = None,
        blocks: _Blocks = None,
    ) -> DeviceModel:
        """Load the blocks onto GPUs, by their numbers, where they stay compressed.

        `memory`, `streamed` and `blocks` are as in `plan`. `memory` includes two outputs of the
        largest block, which the caller allocates. Without `memory`, one GPU gets all blocks, and
        several GPUs share them within 90 % of their free memory. `memory` is required if `blocks`
        are names and there are several GPUs.

        Loads nearly at the speed of the bus, and checks all checksums. Raises `GpuError` with a
        remedy, and `ParameterError` for GPUs and blocks that do not exist.
        """
    def __getitem__(self, key: str, /) -> Tensor: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def get(self, name: str, default: Any = None) -> Any: ...
    def _repr_html_(self) -> str: ...

class _Decoded:
    """The common base class of tensors and their parts. `torch.from_dlpack(tensor)` decodes into
    new CPU memory, without a copy.
    """

    dtype: Final[str]
    """Its name in safetensors, such as `BF16`; `unknown` for a dtype of a newer version."""
    nbytes: Final[int]
    """Decoded bytes. Raises `UnsupportedError` for an unknown dtype."""
    def decode_into(self, buffer: _Buffer) -> None:
        """Decode into a writable, contiguous buffer of exactly `nbytes` bytes, little-endian and in
        row-major order.

        Nothing else may use the buffer meanwhile. For a PyTorch tensor on the CPU pass
        `tensor.view(torch.uint8).numpy()`. Raises `ParameterError` for a read-only buffer or
        another size, `TypeError` for anything except a buffer, `CorruptError` if the container is
        damaged (the buffer then holds anything), `UnsupportedError` for an encoding of a newer
        version.
        """
    def numpy(self) -> Any:
        """A new NumPy array. BF16 and F8 have the types of ml_dtypes if that is installed;
        otherwise `uint16` and `uint8` hold their bits, with a warning. `numpy.asarray` gives
        values.
        """
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """A new NumPy array of the values, for `numpy.asarray`. Without ml_dtypes, BF16 values
        become `float32`, which represents them all. Raises `ParameterError` for other dtypes that
        need ml_dtypes, and `ValueError` for `copy=False`.
        """
    def torch(self) -> Any:
        """A new PyTorch tensor on the CPU, in its own memory. F4 has the dtype `float4_e2m1fn_x2`,
        with two elements in one. Raises `ParameterError` for F6, and for F4 with an odd last
        dimension.
        """
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Raises `ParameterError` for devices other than the CPU, and for F4 and F6."""
    def __dlpack_device__(self) -> tuple[int, int]:
        """The CPU."""

@final
class Tensor(_Decoded):
    """A tensor of an open model. Each call decodes it again, on all cores (1 to 5 GB/s each)."""

    name: Final[str]
    block: Final[str]
    shape: Final[tuple[int, ...]]
    stored_bytes: Final[int]
    """Bytes of its arrays in the container; 0 for an alias."""
    tiles: Final[Tiles | None]
    """Its arrays, if it is in tiles of 32 x 256; an alias has those of its target. None for any
    other tensor.
    """
    bits_per_element: Final[float]
    """Stored bits per element; 0 for an alias or a tensor without elements."""
    encoding: Final[str]
    """Its encoding: `gap`, `tile`, `float`, `delta`, `raw`, or `unknown` for one of a newer
    version. An alias has that of its target.
    """
    target: Final[str]
    """The name of the tensor that holds its bytes: its own, except for an alias."""
    hash: Final[str]
    """The BLAKE3 hash of its decoded bytes, as stored, in hexadecimal."""
    def decode_rows_into(self, start: int, stop: int, buffer: _Buffer) -> None:
        """The same as `rows(start, stop).decode_into(buffer)`."""
    def rows(self, start: int, stop: int) -> Slice:
        """The part whose index in the first dimension is in `start..stop`. Raises `ParameterError`
        for rows that do not exist, or that do not fill whole bytes.
        """
    def __getitem__(self, key: _Index | tuple[_Index, ...], /) -> Slice:
        """A part, selected by numbers and slices as in NumPy, with steps of 1. Decodes nothing yet.
        Of a matrix in tiles, only the tiles of 32 rows and 256 columns that hold some of the part
        are decoded later: `tensor[:, 1024:2048]` is the share of one of several GPUs. Of other
        coded tensors, whole rows are decoded. Raises `IndexError`, and `ParameterError` if the part
        does not begin and end between bytes.
        """

@final
class Slice(_Decoded):
    """A part of a tensor: only the thread blocks, or the tiles, that hold it are decoded."""

    tensor: Final[Tensor]
    ranges: Final[tuple[tuple[int, int], ...]]
    """For each of the first dimensions, the first index and the index after the last."""
    shape: Final[tuple[int, ...]]
    """The number of indices in each dimension, without dimensions that were indexed with a
    number."""

@final
class ReadAhead:
    """Tensors that are fetched before they are read; made by `Model.read_ahead`."""

@final
class Block:
    """The tensors that a model uses together, usually one transformer layer."""

    name: Final[str]
    tensors: Final[list[Tensor]]
    """Its tensors, in the order of `layout`."""
    nbytes: Final[int]
    """Bytes of a buffer for `decode_into`."""
    stored_bytes: Final[int]
    layout: Final[dict[str, tuple[int, int]]]
    """For each tensor, by name, the begin and end of its bytes in a buffer for `decode_into`. Each
    begins on a multiple of 256.
    """
    def decode_into(self, buffer: _Buffer) -> None:
        """Like `Tensor.decode_into`, for all tensors; bytes between them become zero."""

@final
class DeviceModel:
    """A model whose blocks are compressed on GPUs, or pinned on the host. From `Model.load`. Its
    memory is freed, after a wait for the GPUs, when the model, its blocks and its programs are all
    gone.
    """

    devices: Final[list[int]]
    """The numbers of its GPUs, in the order given."""
    device_bytes: Final[int]
    """Memory that the model holds on all GPUs together, without the caller's outputs."""
    host_bytes: Final[int]
    """Bytes of streamed blocks: pinned page cache, or copies."""
    copied_bytes: Final[int]
    """The part of `host_bytes` that is copies, because the containers' mappings could not be
    pinned."""
    largest_block_bytes: Final[int]
    """The size of a buffer into which any block can be decoded."""
    blocks: Final[list[DeviceBlock]]
    """The blocks that are loaded, in the order in which the model runs them."""
    def block(self, name: str) -> DeviceBlock:
        """The block with this name. Raises `KeyError` if there is none, or if it was not loaded."""
    placements: Final[dict[str, Placement]]
    """For each loaded block, by name: the number of its GPU, and whether it is streamed."""
    def program(self, pieces: Sequence[_Piece]) -> Program:
        """Prepare to decode tensors of any blocks that are on one GPU to chosen places in one
        output.

        Each piece is `(tensor name, byte offset in the output)`, `(tensor name, byte offset, first
        row, row after the last)` or `(tensor name, byte offset, ranges)` with the ranges of a
        `Slice`. Offsets are multiples of 16, or any number for `raw` tensors. Allocates 128 bytes
        of device memory per piece (384 if streamed) and waits for their upload, so it cannot be
        captured. If all tensors are in one streamed block and at least half of its rows are wanted,
        the block is copied through a slot. Other streamed tensors are read in place, over the bus.
        Raises `ParameterError`, `GpuError`.
        """
    def check(self, stream: int = 0, device: int | None = None) -> None:
        """Raise `CorruptError` if any decoding so far found a malformed stream. Waits for `stream`.
        For a model on several GPUs, a stream other than 0 needs its `device`; 0 without a device
        checks the default streams of all GPUs.
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
    """Like `Block.layout`: for each tensor, by name, the begin and end of its bytes."""
    def decode(self, pointer: int, stream: int) -> None:
        """Put the decoding of all its tensors on a stream: usually one launch.

        `pointer` is the device address of at least `nbytes` bytes, a multiple of 16 (256 is best):
        `tensor.data_ptr()`. `stream` is a stream of that device as CUDA's handle:
        `torch.cuda.current_stream(device).cuda_stream`, or 0 for the legacy default stream. The
        call neither allocates nor waits, and does not change the thread's current device. CUDA
        graphs can capture it (a streamed block is then read in place, over the bus).

        **Pointer and stream are not checked.** Until the stream has done the work, the memory must
        exist, and nothing else may use it. For a captured graph this holds at each replay, and the
        model must live as well. `DeviceModel.check` reports a malformed stream.

        Raises `ParameterError` for a misaligned pointer, `GpuError` if the driver refuses.
        """

@final
class Program:
    """Tensors of one GPU, or rows of them, to be decoded into one output. From
    `DeviceModel.program`.
    """

    device: Final[int]
    is_streamed: Final[bool]
    """Whether it decodes tensors of a streamed block from its slots."""
    nbytes: Final[int]
    """Bytes of the output: to the end of the last piece."""
    def decode(self, pointer: int, stream: int) -> None:
        """Like `DeviceBlock.decode`. Does not change bytes between pieces; overlapping pieces give
        the bytes of one of them. The program must live as long as replays of a captured graph.
        """

# Matrices in memory of other libraries. A *matrix* is a tensor of a container in tiles of 32 x 256,
# of one of these kinds:
#
# | kind | arrays, in order |
# |---|---|
# | 0, BF16 as stored | codebook, records, bits, plane, table: a decode table, empty on the CPU |
# | 1, BF16 in the fast layout, on GPUs alone | strips, entries: exceptions of 4 bytes each |
# | 2 to 8, other floats as stored (E4M3, E5M2, F16, BF16 of E4M3, F32, of F16, of BF16) | as 0 |
#
# A *part* is a window of a matrix, in eight numbers: kind, rows and columns of the whole matrix,
# staged bytes (0 for kind 1), first row, row after the last one, first column, column after the
# last one. Kernels multiply by kinds 0 and 1, and gather rows from them; the CPU gathers from any.
#
# **Addresses and streams are not checked.** Arrays must have the named lengths, begin on multiples
# of 16, and live until the stream has done the work that uses them. The same holds for x, outputs
# and workspace, which nothing else may use meanwhile. `stream` is CUDA's handle of a stream of that
# device, or 0 for the legacy default stream. On a GPU, no call allocates or waits unless its text
# says so, and CUDA graphs can capture all calls that do neither. Arrays may be in pinned host
# memory, which kernels then read over the bus. Arrays may contain anything: `check` reports damage.

@final
class Tiles:
    """A matrix of a container in tiles of 32 x 256. From `Tensor.tiles`."""

    rows: Final[int]
    """The product of all dimensions that are not in `columns`."""
    columns: Final[int]
    """The last dimension, or the product of some last dimensions."""
    staged_bytes: Final[int]
    """The most bytes of the bitstream that one tile takes."""
    kind: Final[int]
    """Its kind, a number in the table above."""
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
        """`staged_bytes` and arrays of a new tensor with these rows and columns, without decoding.
        Rows begin and end on multiples of 32, or end with the last row; columns likewise, on
        multiples of 256. Raises `ParameterError` and `CorruptError`.
        """
    def cut_lengths(
        self, rows: tuple[int, int], columns: tuple[int, int]
    ) -> tuple[int, int, int, int]:
        """`lengths` of the tensor that `cut` makes. Reads records alone. Raises the same errors."""

@final
class Matrix:
    """A part in the caller's memory. Owns nothing. Making one takes some microseconds."""

    def __new__(
        cls,
        device: int | None,
        part: Sequence[int],
        pointers: Sequence[int],
        lengths: Sequence[int],
    ) -> Matrix:
        """`device`: a GPU's number, or None for the CPU. Raises `ParameterError` if lengths
        contradict the part, `GpuError`.
        """
    rows: Final[int]
    columns: Final[int]
    def decode(self, output: int, stream: int = 0) -> None:
        """Decode to an address, row by row, dense; a multiple of 16 on a GPU. On the CPU the work
        is done when it returns.
        """
    def gather(self, indices: int, count: int, wide: bool, output: int, stream: int = 0) -> None:
        """Decode rows by their indices (64 bits if `wide`, otherwise 32), dense. Only for parts
        that begin and end between tiles. An index of a row that does not exist is an `IndexError`
        on the CPU; on a GPU it gives zeros, and `check` reports it.
        """

def decode_all(matrices: Sequence[Matrix], outputs: Sequence[int], stream: int) -> None:
    """Like `Matrix.decode` of each, all on one GPU: up to eight neighbours of a kind in tiles in
    one launch.
    """

@final
class Experts:
    """Parts of the experts of a mixture, in floats of 8 bits in tiles, all on one GPU, of which
    those are decoded that a router on the GPU has chosen. Owns nothing but 260 bytes of GPU memory
    for each part.
    """

    def __new__(cls, matrices: Sequence[tuple[Matrix, int]]) -> Experts:
        """Parts, each with the number of its expert: dense one after another in the output. Raises
        `ParameterError` for other floats, parts that begin or end within tiles, or that would not
        begin on a multiple of 16 bytes; `GpuError`.
        """
    def decode(
        self,
        output: int,
        stream: int,
        ids: tuple[int, int, bool] | None = None,
        map: tuple[int, int] | None = None,
    ) -> None:
        """Decode the chosen experts to their places at an address, a multiple of 16; all of them if
        there are no ids, or eight or more for each expert. `ids`: the address of numbers of
        experts, how many they are, and whether they have 64 bits instead of 32; `map`: address and
        length of a table of 32 bits from these numbers to those of the parts. Numbers of no expert
        choose none. Captured graphs read ids at each replay. One stream at a time may decode.
        """

@final
class Linear:
    """`y = x Wᵀ (+ bias)` for parts on one GPU that share x, and begin and end between tiles."""

    def __new__(cls, matrices: Sequence[Matrix]) -> Linear:
        """Raises `ParameterError` for floats other than BF16, or if the matrices differ in columns
        or GPU; `GpuError`.
        """
    def workspace_bytes(self, rows: int) -> int:
        """Bytes of a workspace for up to this many rows of x."""
    def keeps_order(self, rows: int, splits: Sequence[int]) -> bool:
        """Whether products of this many rows of x add in the order of these splits, one for each
        part: split i of s has the columns from i * U to before (i + 1) * U, where U is
        ceil(ceil(columns / 64) / s) * 64, and is one chain of products of 16 columns from 0; splits
        are added in order, then the bias, and the sum is rounded once. For 0 splits the result is
        always true.
        """
    crossover_rows: Final[int]
    """From this many rows of x on, decoding before the product is faster."""
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
        the address of a bias or 0, and the splits of its columns, which give the order of sums, or
        0 for the fastest order. The workspace must have been filled with zeros once; since then
        only such calls, one after the other, may have written to it. Bits of y are the same in
        every run. Raises `ParameterError`, also if `keeps_order` is false.
        """

@final
class Grouped:
    """Products with experts: equal shares of the rows of a part in the fast layout, which a router
    chooses on the device.
    """

    def __new__(cls, matrix: Matrix, experts: int) -> Grouped:
        """Raises `ParameterError` for kinds in tiles, a window of columns, or experts that do not
        begin on multiples of 32 rows; `GpuError`.
        """
    keeps_order: Final[bool]
    """Whether each product adds in the order of one split (`Linear.keeps_order`)."""
    def block_places(self, slots: int) -> int:
        """The places of a block of `multiply_slots` that are fastest for this many slots. All give
        the same bits.
        """
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
        """`y[i] = x[rows[i]] W[e]ᵀ` for the places i from `offsets[e]` to before `offsets[e + 1]`.
        Offsets and rows have 32 bits. If `rows` is 0, place i has row i. Reads only experts with
        places.
        """
    def multiply_slots(
        self,
        x: int,
        x_rows: int,
        experts: int,
        slots: int,
        blocks: tuple[int, int, int, int] | None,
        factors: int,
        y: int,
        stream: int,
    ) -> None:
        """`y[s] = factors[s] * (x[s // share] W[experts[s]]ᵀ)` for each slot s, rounded once. x and
        y are contiguous, and share is `slots // x_rows`. `factors`, of 32 bits, may be 0: none.
        `blocks`: the places of a block, the address of places' slots, how many places there are,
        and the address of how many count; experts are then those of blocks, and slots that do not
        exist pad the end of a block, as vLLM's `moe_align_block_size` writes them. Raises
        `ParameterError` for other places of a block than `block_places` may name.
        """

@final
class Packer:
    """Packs BF16 weights on a GPU into the fast layout, as `strips_bytes` bytes at an address."""

    def __new__(cls, device: int, rows: int, columns: int, strips: int, stream: int) -> Packer:
        """Allocates memory for exceptions, one per 256 weights. Raises `ParameterError` for 2^32
        weights or more, `GpuError`.
        """
    def pack(self, first_row: int, rows: int, weights: int, stream: int) -> None:
        """Pack the next rows, which are dense at an address and end on a multiple of 32 or with the
        last row."""
    def finish(self, stream: int) -> int | None:
        """Wait for the GPU. Returns the number of exceptions, or None if there are too many."""
    def take(self, entries: int, stream: int) -> None:
        """Copy the exceptions to an address, 4 bytes each."""

def strips_bytes(rows: int, columns: int) -> int:
    """Bytes of a matrix in the fast layout, except its exceptions."""

def code_of(counts: bytes) -> tuple[bytearray, bytearray] | None:
    """The codebook of a matrix with these counts of pairs (65,536 of 64 bits), and an entry for
    each pair (64 bits): the number of its bits in the low 16, and the bits above. None if codes
    make the matrix no smaller. Takes some milliseconds at most.
    """

def upload(
    model: Model,
    device: int,
    items: Sequence[tuple[str, tuple[int, int], tuple[int, int], Sequence[tuple[int, int]]]],
    progress: _Progress = None,
) -> None:
    """Copy the arrays that `Tiles.cut` makes of rows and columns of tensors to a GPU, each to the
    address and with the length given, through pinned memory, and check them. Everything is copied
    when it returns; Ctrl-C ends it. Raises `CorruptError` for another length.
    """

def build_tables(device: int, items: Sequence[tuple[int, int, int]], kind: int = 0) -> None:
    """Build decode tables of 16,384 bytes for matrices of a kind: address of the codebook, its
    bytes, address of the table. The tables are complete when it returns.
    """

@final
class PinnedMemory:
    """Memory of the host that kernels read over the bus. Dropping this unpins it without waiting,
    so all users must be done.
    """

@final
class TemporaryFolder:
    """A new folder in `parent` that only this user may enter. Use it in a `with` statement, which
    removes it.

    If the process is killed, the next process that makes a folder here, or writes an output,
    removes it; until then `df11 doctor` lists it.
    """

    def __new__(cls, parent: _Path) -> TemporaryFolder: ...
    def __enter__(self) -> Path: ...
    def __exit__(self, *error: object) -> None: ...

def pin(address: int, bytes: int) -> PinnedMemory:
    """Pin memory of the host. Raises `GpuError` if the driver refuses."""

def capture_id(stream: int) -> int:
    """The unique number of the CUDA graph capture of a stream of the current device; 0 if there is
    no capture.
    """

def check(device: int, stream: int) -> None:
    """Wait for a stream, and raise problems that kernels on this GPU have found since the last such
    call: `CorruptError` for weights that contradict themselves; `IndexError` if the only problems
    are indices or offsets of rows that do not exist.
    """

def check_done(device: int | None = None) -> None:
    """Like `check`, for kernels that have already finished: does not wait, and takes nanoseconds.
    Checks all GPUs with matrices, unless one is named. All calls that decode, gather or multiply on
    a GPU raise the same before they begin.
    """

def fits(device: int) -> bool:
    """Whether the kernels run on a GPU."""
