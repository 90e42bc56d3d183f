"""Damaged files: both readers refuse them in the same words, which name file, tensor and field."""

from __future__ import annotations

import itertools
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from kdtr_support import (
    ENTRY_FIELDS,
    HEADER_FIELDS,
    SEEDS,
    cpp_verdicts,
    entry_offsets,
    file_bytes,
    python_verdict,
    repair,
)

from kdtree_sglang import kdtr

# Entries at 32, 80 and 128; data at 192..216, 256..260 and 320..325.
SAMPLE = file_bytes(
    {
        "ids": np.array([7, 8, -1]),
        "scale": np.float32(0.5),
        "mask": np.array([True, False, True, True, False]),
    }
)
# A dimension for each of the numbers whose product may overflow; data at 128..131.
CUBE = file_bytes({"x": np.zeros((1, 1, 3), np.int8)})
# Entries of 64, 64 and 48 bytes, then zeros up to the data at 256.
SPARE = file_bytes({"a" * 20: np.float32(0), "b" * 20: np.float32(0), "c": np.float32(0)})


def set_header(file: bytes, **values: int | bytes) -> bytes:
    """The file with other header fields and nothing repaired."""
    changed = bytearray(file)
    for name, value in values.items():
        at, form = HEADER_FIELDS[name]
        struct.pack_into(f"<{form}", changed, at, value)
    return bytes(changed)


def set_entry(
    file: bytes,
    index: int,
    name: bytes | None = None,
    shape: tuple[int, ...] = (),
    **values: int | bytes,
) -> bytes:
    """The file with other fields in an entry, and a header checksum for them."""
    changed = bytearray(file)
    base = entry_offsets(file)[index]
    rank = struct.unpack_from("<I", file, base + 4)[0]
    for field, value in values.items():
        at, form = ENTRY_FIELDS[field]
        struct.pack_into(f"<{form}", changed, base + at, value)
    struct.pack_into(f"<{len(shape)}Q", changed, base + 32, *shape)
    if name is not None:
        name_at = base + 32 + 8 * rank
        changed[name_at : name_at + len(name)] = name
    return repaired(changed)


def set_bytes(file: bytes, at: int, content: bytes) -> bytes:
    return file[:at] + content + file[at + len(content) :]


def repaired(file: bytes | bytearray, data_too: bool = False) -> bytes:
    changed = bytearray(file)
    repair(changed, data_too)
    return bytes(changed)


CRC = struct.unpack_from("<I", SAMPLE, 12)[0]
SCALE_CRC = zlib.crc32(SAMPLE[256:260])
CHANGED_SCALE_CRC = zlib.crc32(b"\1" + SAMPLE[257:260])
TOO_LARGE = "shape: more than 2^63 - 1 bytes, dimensions of 0 left out"

# What is wrong: the file and the error behind its label.
CASES = {
    "empty": (b"", "header: the file has 0 bytes, a header takes 32"),
    "other format": (
        set_bytes(SAMPLE, 0, b"\x89PNG\r\n\x1a\n"),
        "magic: 89504e470d0a1a0a is not KDTR's 4b4454520d0a1a0a",
    ),
    "later version": (set_header(SAMPLE, version=2), "version: 2, this reader knows only 1"),
    "version 0": (set_header(SAMPLE, version=0), "version: 0, this reader knows only 1"),
    "cut": (SAMPLE[:-1], "file_bytes: 325, but the file is cut at 324"),
    "longer": (SAMPLE + b"\0", "file_bytes: 325, but the file has 326"),
    "absurd size": (
        set_header(SAMPLE, file_bytes=2**64 - 1),
        f"file_bytes: {2**64 - 1}, but the file is cut at 325",
    ),
    "byte after the data": (
        repaired(SAMPLE + b"\0"),
        "file_bytes: 326, but the data ends at 325",
    ),
    "directory past the end": (
        set_header(SAMPLE, directory_bytes=294),
        "directory_bytes: 294 do not fit a file of 325",
    ),
    "absurd directory": (
        set_header(SAMPLE, directory_bytes=2**32 - 1),
        f"directory_bytes: {2**32 - 1} do not fit a file of 325",
    ),
    "directory with room": (
        repaired(set_header(SAMPLE, directory_bytes=160)),
        "directory_bytes: 160, but 3 entries take 144",
    ),
    "no entries": (
        repaired(set_header(SAMPLE, tensor_count=0)),
        "directory_bytes: 144, but 0 entries take 0",
    ),
    "an entry less": (
        repaired(set_header(SAMPLE, tensor_count=2)),
        "directory_bytes: 144, but 2 entries take 96",
    ),
    "an entry more": (
        set_header(SAMPLE, tensor_count=4),
        "tensor_count: 4 do not fit a directory of 144",
    ),
    "absurd count": (
        set_header(SAMPLE, tensor_count=2**32 - 1),
        f"tensor_count: {2**32 - 1} do not fit a directory of 144",
    ),
    "header checksum": (
        set_header(SAMPLE, header_crc32=CRC ^ 1),
        f"header_crc32: {CRC ^ 1:08x}, but the bytes give {CRC:08x}",
    ),
    "no room for an entry": (
        repaired(set_header(SPARE, directory_bytes=192, tensor_count=4)),
        "tensor 3: entry: the directory has 16 bytes left",
    ),
    "no room for a shape": (
        set_entry(SAMPLE, 2, rank=3),
        "tensor 2: entry: takes 64 bytes, the directory has 48 left",
    ),
    "no room for a name": (
        set_entry(SAMPLE, 2, name_bytes=9),
        "tensor 2: entry: takes 64 bytes, the directory has 48 left",
    ),
    "rank 17": (set_entry(SAMPLE, 0, rank=17), "tensor 0: rank: 17, must be at most 16"),
    "absurd rank": (
        set_entry(SAMPLE, 1, rank=2**32 - 1),
        f"tensor 1: rank: {2**32 - 1}, must be at most 16",
    ),
    "no name": (set_entry(SAMPLE, 0, name_bytes=0), "tensor 0: name_bytes: 0, must be 1..255"),
    "long name": (
        set_entry(SAMPLE, 1, name_bytes=256),
        "tensor 1: name_bytes: 256, must be 1..255",
    ),
    "absurd name": (
        set_entry(SAMPLE, 2, name_bytes=2**32 - 1),
        f"tensor 2: name_bytes: {2**32 - 1}, must be 1..255",
    ),
    "not UTF-8": (set_entry(SAMPLE, 0, name=b"i\xffs"), "tensor 0: name: not valid UTF-8"),
    "control character": (
        set_entry(SAMPLE, 1, name=b"sca\ne"),
        "tensor 1: name: holds a control character",
    ),
    "delete character": (
        set_entry(SAMPLE, 1, name=b"sca\x7fe"),
        "tensor 1: name: holds a control character",
    ),
    "duplicate name": (
        set_entry(SAMPLE, 2, name=b"ids\0", name_bytes=3),
        "tensor 2: name: 'ids' is taken by an earlier tensor",
    ),
    "name padding": (
        set_entry(SAMPLE, 0, name=b"ids\0\0\0\0\1"),
        "tensor 0 'ids': name: the padding after it is not zero",
    ),
    "unknown type": (
        set_entry(SAMPLE, 1, dtype=b"f33\0"),
        "tensor 1 'scale': dtype: unknown code 66333300",
    ),
    "type without padding": (
        set_entry(SAMPLE, 1, dtype=b"f32 "),
        "tensor 1 'scale': dtype: unknown code 66333220",
    ),
    "no type": (
        set_entry(SAMPLE, 1, dtype=b"\0\0\0\0"),
        "tensor 1 'scale': dtype: unknown code 00000000",
    ),
    # Unchecked, the products of these wrap around to the bytes that are there.
    "overflow to 0": (
        set_entry(CUBE, 0, shape=(2**62, 4, 3), bytes=0),
        f"tensor 0 'x': {TOO_LARGE}",
    ),
    "overflow to 3": (
        set_entry(CUBE, 0, shape=(2**63 + 1, 2**63 + 1, 3)),
        f"tensor 0 'x': {TOO_LARGE}",
    ),
    "overflow by the item": (
        set_entry(SAMPLE, 0, shape=(2**61 + 3,)),
        f"tensor 0 'ids': {TOO_LARGE}",
    ),
    "overflow by one": (set_entry(SAMPLE, 0, shape=(2**60,)), f"tensor 0 'ids': {TOO_LARGE}"),
    "no overflow": (
        set_entry(SAMPLE, 0, shape=(2**60 - 1,)),
        f"tensor 0 'ids': bytes: 24, but shape and dtype give {2**63 - 8}",
    ),
    "overflow of an empty tensor": (
        set_entry(CUBE, 0, shape=(2**62, 0, 2), bytes=0),
        f"tensor 0 'x': {TOO_LARGE}",
    ),
    "bytes": (
        set_entry(SAMPLE, 0, bytes=16),
        "tensor 0 'ids': bytes: 16, but shape and dtype give 24",
    ),
    "misaligned": (
        set_entry(SAMPLE, 0, offset=200),
        "tensor 0 'ids': offset: 200 is no multiple of 64",
    ),
    "overlap with the directory": (
        set_entry(SAMPLE, 0, offset=128),
        "tensor 0 'ids': offset: 128 overlaps what ends at 176",
    ),
    "overlap with a tensor": (
        set_entry(SAMPLE, 1, offset=192),
        "tensor 1 'scale': offset: 192 overlaps what ends at 216",
    ),
    "begin past the end": (
        set_entry(SAMPLE, 2, offset=384),
        "tensor 2 'mask': offset: 5 bytes at 384 do not fit a file of 325",
    ),
    "absurd offset": (
        set_entry(SAMPLE, 2, offset=2**64 - 64),
        f"tensor 2 'mask': offset: 5 bytes at {2**64 - 64} do not fit a file of 325",
    ),
    "end past the end": (
        set_entry(SAMPLE, 2, shape=(6,), bytes=6),
        "tensor 2 'mask': offset: 6 bytes at 320 do not fit a file of 325",
    ),
    "gap": (
        set_entry(SAMPLE, 1, offset=320),
        "tensor 1 'scale': offset: 320 leaves a gap, must be 256",
    ),
    "padding": (
        set_bytes(SAMPLE, 319, b"\1"),
        "tensor 2 'mask': offset: the padding before 320 is not zero",
    ),
    "data": (
        set_bytes(SAMPLE, 256, b"\1"),
        f"tensor 1 'scale': data_crc32: {SCALE_CRC:08x}, but the bytes give "
        f"{CHANGED_SCALE_CRC:08x}",
    ),
    "data checksum": (
        set_entry(SAMPLE, 1, data_crc32=SCALE_CRC ^ 1),
        f"tensor 1 'scale': data_crc32: {SCALE_CRC ^ 1:08x}, but the bytes give {SCALE_CRC:08x}",
    ),
    "bool": (
        repaired(set_bytes(SAMPLE, 321, b"\2"), data_too=True),
        "tensor 2 'mask': data: a bool is neither 0 nor 1",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_names_the_field(case: str, kdtr_verdicts: Path) -> None:
    file, message = CASES[case]
    assert python_verdict(file) == f"input: {message}"
    assert cpp_verdicts(kdtr_verdicts, [file]) == [f"input: {message}"]


@pytest.mark.parametrize("case", CASES)
def test_only_checks_of_the_data_can_be_left_out(case: str) -> None:
    file, _ = CASES[case]
    if case in ("data", "data checksum", "bool"):
        assert list(kdtr.parse(file, "input", verify=False)) == ["ids", "scale", "mask"]
    else:
        with pytest.raises(kdtr.KdtrError):
            kdtr.parse(file, "input", verify=False)


def refuse_alike(kdtr_verdicts: Path, files: list[bytes]) -> list[str]:
    """Both readers refuse each file in the same words; returns them."""
    verdicts = [python_verdict(file) for file in files]
    assert not any(verdict.startswith("ok") for verdict in verdicts)
    assert cpp_verdicts(kdtr_verdicts, files) == verdicts
    return verdicts


@pytest.mark.parametrize("seed", range(len(SEEDS)))
def test_cut_at_every_byte(seed: int, kdtr_verdicts: Path) -> None:
    whole = file_bytes(SEEDS[seed])
    cut = [whole[:size] for size in range(len(whole))]
    verdicts = refuse_alike(kdtr_verdicts, cut)
    fields = ["header" if size < 32 else "file_bytes" for size in range(len(whole))]
    assert [verdict.split(": ")[1] for verdict in verdicts] == fields
    # A cut that the header knows of runs into the checks behind it.
    refuse_alike(kdtr_verdicts, [repaired(file) for file in cut])


def test_every_flipped_bit_is_noticed(kdtr_verdicts: Path) -> None:
    flips = []
    for bit in range(8 * len(SAMPLE)):
        flipped = bytearray(SAMPLE)
        flipped[bit // 8] ^= 1 << bit % 8
        flips.append(bytes(flipped))
    refuse_alike(kdtr_verdicts, flips)


def test_names_are_the_utf8_that_python_knows(kdtr_verdicts: Path) -> None:
    """Every lead byte with followers at the limits of what may come after one."""
    limits = (0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0)
    names = [bytes(pair) for pair in itertools.product(range(0x20, 0x100), limits)]
    names += [
        bytes((lead, *rest))
        for count in (2, 3)
        for lead in range(0xC0, 0x100)
        for rest in itertools.product(limits, *[(0x41, 0x80, 0xBF)] * (count - 1))
    ]
    files = []
    for size in (2, 3, 4):
        whole = file_bytes({"x" * size: np.float32(1)})
        files += [set_entry(whole, 0, name=name) for name in names if len(name) == size]
    verdicts = [python_verdict(file) for file in files]
    assert cpp_verdicts(kdtr_verdicts, files) == verdicts
    assert {verdict.split(" ")[0] for verdict in verdicts} == {"ok", "input:"}


def test_errors_name_the_file(tmp_path: Path, kdtr_copy: Path) -> None:
    for case, (file, message) in CASES.items():
        path = tmp_path / f"{case}.kdtr"
        path.write_bytes(file)
        with pytest.raises(kdtr.KdtrError) as error:
            kdtr.read(path)
        assert str(error.value) == f"{path}: {message}"
        copied = subprocess.run(
            [kdtr_copy, path, tmp_path / "copy"], capture_output=True, text=True, timeout=60
        )
        assert (copied.returncode, copied.stderr) == (1, f"{path}: {message}\n")
    with pytest.raises(FileNotFoundError):
        kdtr.read(tmp_path / "none.kdtr")
