"""KDTR: named, typed tensors in one file, exchanged with C++ and CUDA.

    kdtr.write("case.kdtr", {"in.ids": ids, "in.budget": np.int64(8)})
    tensors = kdtr.read("case.kdtr")  # {"in.ids": array, "in.budget": array of rank 0}

The bytes are specified in docs/kdtr.md; csrc/include/kdtree/kdtr.h is the C++ side. Both readers
make the same checks in the same order and report them in the same words.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

MAGIC = b"KDTR\r\n\x1a\n"
VERSION = 1
MAX_RANK = 16
MAX_NAME_BYTES = 255

# The code in the file and numpy's type.
DTYPES = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype("<f2"),
    "f32": np.dtype("<f4"),
    "f64": np.dtype("<f8"),
    "i8": np.dtype("<i1"),
    "i16": np.dtype("<i2"),
    "i32": np.dtype("<i4"),
    "i64": np.dtype("<i8"),
    "u8": np.dtype("<u1"),
    "u64": np.dtype("<u8"),
    "bool": np.dtype(np.bool_),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_DTYPES_BY_BYTES = {code.encode().ljust(4, b"\0"): dtype for code, dtype in DTYPES.items()}

# magic, version, header_crc32, file_bytes, directory_bytes, tensor_count
_HEADER = struct.Struct("<8sIIQII")
_CRC_BEGIN = 16  # header_crc32 covers what follows it
# dtype, rank, name_bytes, data_crc32, offset, bytes; then the shape and the name
_ENTRY = struct.Struct("<4sIIIQQ")
_ENTRY_ALIGNMENT = 16
_MIN_ENTRY_BYTES = 48
_DATA_ALIGNMENT = 64
_MAX_TENSOR_BYTES = 2**63 - 1
_CHUNK_BYTES = 1 << 20


class KdtrError(ValueError):
    """A file that is not valid KDTR, or tensors that KDTR cannot hold; names file and field."""


def code_of(dtype: np.dtype) -> str | None:
    """KDTR's code of a numpy type, such as "bf16"; None for a type that KDTR does not have."""
    return _CODES.get(dtype)


def read(path: str | os.PathLike[str], verify: bool = True) -> dict[str, np.ndarray]:
    """The tensors of a file, in its order, as read-only arrays on a memory map of it.

    The map lives as long as an array of it does. Writers replace files as a whole, which leaves a
    map intact; a file that is cut in place under its readers takes their process down (SIGBUS).

    Args:
        verify: False leaves out what has to read all the data: its checksums, and that bools are 0
            or 1. Everything else is checked either way.

    Raises:
        KdtrError: the file is no valid KDTR; the message names the file, the tensor and the field.
        OSError: it cannot be opened.
    """
    with open(path, "rb") as file:
        # An empty file cannot be mapped, and parse has the words for it.
        empty = os.fstat(file.fileno()).st_size == 0
        data = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return parse(data, os.fspath(path), verify)


def parse(
    buffer: bytes | bytearray | memoryview | mmap.mmap, label: str, verify: bool = True
) -> dict[str, np.ndarray]:
    """`read` from memory: the arrays are read-only views of `buffer`; errors name `label`."""
    data = memoryview(buffer).toreadonly().cast("B")
    directory_bytes, tensor_count = _check_header(data, label)
    end = directory_end = _HEADER.size + directory_bytes
    position = _HEADER.size
    directory = data[:directory_end]
    entries: dict[str, _Entry] = {}
    for index in range(tensor_count):
        entry = _parse_entry(directory, position, f"{label}: tensor {index}", entries)
        where = f"{label}: tensor {index} '{entry.name}'"
        _check_place(data, entry, end, where)
        entries[entry.name] = entry
        position += _entry_bytes(len(entry.shape), entry.name_bytes)
        end = entry.offset + entry.nbytes
    if position != directory_end:
        raise KdtrError(
            f"{label}: directory_bytes: {directory_bytes}, but {tensor_count} entries take "
            f"{position - _HEADER.size}"
        )
    if end != len(data):
        raise KdtrError(f"{label}: file_bytes: {len(data)}, but the data ends at {end}")
    if verify:
        for index, entry in enumerate(entries.values()):
            _check_data(data, entry, f"{label}: tensor {index} '{entry.name}'")
    return {
        entry.name: np.ndarray(entry.shape, entry.dtype, buffer=data, offset=entry.offset)
        for entry in entries.values()
    }


def write(path: str | os.PathLike[str], tensors: Mapping[str, npt.ArrayLike]) -> None:
    """Writes `tensors` to `path` in their order; the same tensors always give the same bytes.

    Atomic: a reader of `path` sees the file that was there before or all of the new one, which is
    on the disk when this returns. An array that is not contiguous is written in C order. Data is
    streamed, and long runs of zeros become holes, so size is bounded by the file system alone.

    Args:
        tensors: names of 1..255 bytes of UTF-8 without control characters; arrays, or what
            `np.asarray` makes one of, with a rank of at most 16 and a type of `DTYPES`.

    Raises:
        KdtrError: a tensor that KDTR cannot hold; the message names it and what is wrong.
        OSError: the file cannot be written; what was at `path` before is still there.
    """
    path = Path(path)
    arrays = {name: np.asarray(value) for name, value in tensors.items()}
    names = [
        _encode_name(name, array, f"{path}: tensor {index}")
        for index, (name, array) in enumerate(arrays.items())
    ]
    directory_bytes = sum(
        _entry_bytes(array.ndim, len(name))
        for name, array in zip(names, arrays.values(), strict=True)
    )
    if directory_bytes >= 2**32:
        raise KdtrError(f"{path}: directory_bytes: {directory_bytes} do not fit 32 bits")

    offsets = []
    file_bytes = _HEADER.size + directory_bytes
    for array in arrays.values():
        offsets.append(_round_up(file_bytes, _DATA_ALIGNMENT))
        file_bytes = offsets[-1] + array.nbytes

    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.truncate(file_bytes)  # reads as zeros: padding needs no writing
            directory = bytearray()
            for index, (name, array) in enumerate(zip(names, arrays.values(), strict=True)):
                offset = offsets[index]
                where = f"{path}: tensor {index} '{name.decode()}'"
                crc = _write_data(file, offset, array, where)
                directory += _ENTRY.pack(
                    _CODES[array.dtype].encode(), array.ndim, len(name), crc, offset, array.nbytes
                )
                directory += struct.pack(f"<{array.ndim}Q", *array.shape) + name
                directory += bytes(-len(directory) % _ENTRY_ALIGNMENT)
            covered = struct.pack("<QII", file_bytes, directory_bytes, len(arrays)) + directory
            file.seek(0)
            file.write(MAGIC + struct.pack("<II", VERSION, zlib.crc32(covered)) + covered)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The new name is durable once its folder is.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class _Entry(NamedTuple):
    name: str
    name_bytes: int
    dtype: np.dtype
    shape: tuple[int, ...]
    crc: int
    offset: int
    nbytes: int


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _entry_bytes(rank: int, name_bytes: int) -> int:
    return _round_up(_ENTRY.size + 8 * rank + name_bytes, _ENTRY_ALIGNMENT)


def _name_problem(name: bytes) -> str | None:
    try:
        text = name.decode("utf-8")
    except UnicodeDecodeError:
        return "not valid UTF-8"
    if any(character < " " or character == "\x7f" for character in text):
        return "holds a control character"
    return None


def _check_header(data: memoryview, label: str) -> tuple[int, int]:
    """directory_bytes and tensor_count of a header and directory that are as they were written."""
    if len(data) < _HEADER.size:
        raise KdtrError(
            f"{label}: header: the file has {len(data)} bytes, a header takes {_HEADER.size}"
        )
    magic, version, crc, file_bytes, directory_bytes, tensor_count = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise KdtrError(f"{label}: magic: {magic.hex()} is not KDTR's {MAGIC.hex()}")
    if version != VERSION:
        raise KdtrError(f"{label}: version: {version}, this reader knows only {VERSION}")
    if file_bytes > len(data):
        raise KdtrError(f"{label}: file_bytes: {file_bytes}, but the file is cut at {len(data)}")
    if file_bytes < len(data):
        raise KdtrError(f"{label}: file_bytes: {file_bytes}, but the file has {len(data)}")
    if directory_bytes > len(data) - _HEADER.size:
        raise KdtrError(
            f"{label}: directory_bytes: {directory_bytes} do not fit a file of {len(data)}"
        )
    if tensor_count > directory_bytes // _MIN_ENTRY_BYTES:
        raise KdtrError(
            f"{label}: tensor_count: {tensor_count} do not fit a directory of {directory_bytes}"
        )
    computed = zlib.crc32(data[_CRC_BEGIN : _HEADER.size + directory_bytes])
    if crc != computed:
        raise KdtrError(f"{label}: header_crc32: {crc:08x}, but the bytes give {computed:08x}")
    return directory_bytes, tensor_count


def _parse_entry(
    directory: memoryview, position: int, where: str, entries: Mapping[str, _Entry]
) -> _Entry:
    """The entry at `position`, sound in itself and unlike `entries`, those before it."""
    room = len(directory) - position
    if room < _ENTRY.size:
        raise KdtrError(f"{where}: entry: the directory has {room} bytes left")
    code, rank, name_bytes, crc, offset, size = _ENTRY.unpack_from(directory, position)
    if rank > MAX_RANK:
        raise KdtrError(f"{where}: rank: {rank}, must be at most {MAX_RANK}")
    if not 1 <= name_bytes <= MAX_NAME_BYTES:
        raise KdtrError(f"{where}: name_bytes: {name_bytes}, must be 1..{MAX_NAME_BYTES}")
    entry_bytes = _entry_bytes(rank, name_bytes)
    if room < entry_bytes:
        raise KdtrError(
            f"{where}: entry: takes {entry_bytes} bytes, the directory has {room} left"
        )

    name_at = position + _ENTRY.size + 8 * rank
    raw_name = bytes(directory[name_at : name_at + name_bytes])
    problem = _name_problem(raw_name)
    if problem:
        raise KdtrError(f"{where}: name: {problem}")
    name = raw_name.decode("utf-8")
    if name in entries:
        raise KdtrError(f"{where}: name: '{name}' is taken by an earlier tensor")
    where = f"{where} '{name}'"
    if any(directory[name_at + name_bytes : position + entry_bytes]):
        raise KdtrError(f"{where}: name: the padding after it is not zero")

    dtype = _DTYPES_BY_BYTES.get(code)
    if dtype is None:
        raise KdtrError(f"{where}: dtype: unknown code {code.hex()}")
    shape = struct.unpack_from(f"<{rank}Q", directory, position + _ENTRY.size)
    # Also of an empty tensor the other dimensions are bounded, as numpy's strides need it.
    if math.prod(d for d in shape if d) * dtype.itemsize > _MAX_TENSOR_BYTES:
        raise KdtrError(f"{where}: shape: more than 2^63 - 1 bytes, dimensions of 0 left out")
    expected = math.prod(shape) * dtype.itemsize
    if size != expected:
        raise KdtrError(f"{where}: bytes: {size}, but shape and dtype give {expected}")
    return _Entry(name, name_bytes, dtype, shape, crc, offset, size)


def _check_place(data: memoryview, entry: _Entry, previous_end: int, where: str) -> None:
    """The data must begin at the first aligned offset after what is before it, behind zeros."""
    offset = entry.offset
    if offset % _DATA_ALIGNMENT:
        raise KdtrError(f"{where}: offset: {offset} is no multiple of {_DATA_ALIGNMENT}")
    if offset < previous_end:
        raise KdtrError(f"{where}: offset: {offset} overlaps what ends at {previous_end}")
    if offset > len(data) or entry.nbytes > len(data) - offset:
        raise KdtrError(
            f"{where}: offset: {entry.nbytes} bytes at {offset} do not fit a file of {len(data)}"
        )
    expected = _round_up(previous_end, _DATA_ALIGNMENT)
    if offset != expected:
        raise KdtrError(f"{where}: offset: {offset} leaves a gap, must be {expected}")
    if any(data[previous_end:offset]):
        raise KdtrError(f"{where}: offset: the padding before {offset} is not zero")


def _check_data(data: memoryview, entry: _Entry, where: str) -> None:
    content = data[entry.offset : entry.offset + entry.nbytes]
    computed = zlib.crc32(content)
    if entry.crc != computed:
        raise KdtrError(
            f"{where}: data_crc32: {entry.crc:08x}, but the bytes give {computed:08x}"
        )
    if entry.dtype == np.bool_ and not _are_bools(np.asarray(content)):
        raise KdtrError(f"{where}: data: a bool is neither 0 nor 1")


def _are_bools(values: np.ndarray) -> bool:
    return values.max(initial=0) <= 1


def _encode_name(name: str, array: np.ndarray, where: str) -> bytes:
    """`name` in UTF-8, of a tensor that KDTR can hold."""
    try:
        encoded = name.encode("utf-8")
    except UnicodeEncodeError:
        raise KdtrError(f"{where}: name: {name!r} is not valid Unicode") from None
    if not 1 <= len(encoded) <= MAX_NAME_BYTES:
        raise KdtrError(f"{where}: name_bytes: {len(encoded)}, must be 1..{MAX_NAME_BYTES}")
    problem = _name_problem(encoded)
    if problem:
        raise KdtrError(f"{where}: name: {problem}")
    if array.dtype not in _CODES:
        raise KdtrError(
            f"{where} '{name}': dtype: {array.dtype.str} is none of {', '.join(DTYPES)}; "
            "convert it with astype"
        )
    if array.ndim > MAX_RANK:
        raise KdtrError(f"{where} '{name}': rank: {array.ndim}, must be at most {MAX_RANK}")
    return encoded


def _write_data(file: BinaryIO, offset: int, array: np.ndarray, where: str) -> int:
    """Writes the array in C order and gives its checksum; chunks of zeros stay holes."""
    crc = 0
    chunks = np.nditer(
        array,
        flags=["external_loop", "buffered", "zerosize_ok"],
        op_flags=[["readonly", "contig"]],
        order="C",
        buffersize=_CHUNK_BYTES // array.itemsize,
    )
    for chunk in chunks:
        content = chunk.view(np.uint8)
        if array.dtype == np.bool_ and not _are_bools(content):
            raise KdtrError(f"{where}: data: a bool is neither 0 nor 1")
        crc = zlib.crc32(content, crc)
        if content.any():
            file.seek(offset)
            file.write(content)
        offset += content.nbytes
    return crc
