"""Matrices of safetensors files, for the scripts beside this one."""

import json
import pathlib
import struct

import numpy

Arrays = dict[str, numpy.ndarray]


def read(path: pathlib.Path, dtype: type, most: float) -> Arrays:
    """The matrices of a safetensors file with at least 256 rows and columns, as this dtype: the
    first ones, up to `most` MB of it.
    """
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    kinds = {"F32": "<f4", "F16": "<f2"}
    found, left = {}, most * 1e6
    for name, info in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__" or info["dtype"] not in kinds or len(info["shape"]) != 2:
            continue
        begin, end = (8 + length + offset for offset in info["data_offsets"])
        values = numpy.frombuffer(data[begin:end], kinds[info["dtype"]])
        size = values.size * numpy.dtype(dtype).itemsize
        if min(info["shape"]) >= 256 and size <= left:
            found[name] = values.reshape(info["shape"]).astype(dtype)
            left -= size
    return found


def write(path: pathlib.Path, dtype: str, tensors: Arrays) -> None:
    """Writes a safetensors file of tensors of one dtype, by its name in the header."""
    header, end = {}, 0
    for name, values in tensors.items():
        begin, end = end, end + values.nbytes
        shape = list(values.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in tensors.values():
            file.write(values.tobytes())
