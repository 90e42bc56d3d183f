"""What the KDTR tests and the fuzzer share: sample files, the field offsets, damage, verdicts.

The offsets are typed from docs/kdtr.md, not taken from the reader under test.
"""

from __future__ import annotations

import random
import struct
import subprocess
import tempfile
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np

from kdtree_sglang import kdtr

HEADER_BYTES = 32
HEADER_FIELDS = {
    "magic": (0, "8s"),
    "version": (8, "I"),
    "header_crc32": (12, "I"),
    "file_bytes": (16, "Q"),
    "directory_bytes": (24, "I"),
    "tensor_count": (28, "I"),
}
ENTRY_FIXED_BYTES = 32
ENTRY_FIELDS = {
    "dtype": (0, "4s"),
    "rank": (4, "I"),
    "name_bytes": (8, "I"),
    "data_crc32": (12, "I"),
    "offset": (16, "Q"),
    "bytes": (24, "Q"),
}
# Every field that an error can name.
FIELDS = (*HEADER_FIELDS, *ENTRY_FIELDS, "header", "entry", "name", "shape", "data")

ALL_DTYPES = {
    code: np.arange(12).reshape(3, 4).astype(dtype) for code, dtype in kdtr.DTYPES.items()
}
SEEDS: tuple[dict[str, np.ndarray], ...] = (
    {},
    {"budget": np.array(8)},
    {"flags": np.arange(15).reshape(3, 5) % 3 == 0, "more flags": np.arange(70) % 2 == 0},
    {
        "a": np.arange(24).reshape(2, 3, 4).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 7), np.float32),
        "b": np.arange(65, dtype=np.uint8),
        "é€🌳": np.full((1, 1, 1, 1), 2.5),
        "n" * kdtr.MAX_NAME_BYTES: np.array([1, -1], np.int16),
        "deep": np.ones((1,) * kdtr.MAX_RANK, np.int8),
        "last": np.zeros((3, 0), np.uint64),
    },
    ALL_DTYPES,
)


def file_bytes(tensors: dict[str, np.ndarray]) -> bytes:
    """The file that kdtr.write makes of the tensors."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.kdtr"
        kdtr.write(path, tensors)
        return path.read_bytes()


def entry_offsets(file: bytes) -> list[int]:
    """Where the entries of a file begin, as far as they can be followed."""
    if len(file) < HEADER_BYTES:
        return []
    end = min(len(file), HEADER_BYTES + struct.unpack_from("<I", file, 24)[0])
    offsets = []
    at = HEADER_BYTES
    while at + ENTRY_FIXED_BYTES <= end:
        offsets.append(at)
        rank, name_bytes = struct.unpack_from("<II", file, at + 4)
        at += -(-(ENTRY_FIXED_BYTES + 8 * rank + name_bytes) // 16) * 16
    return offsets


def repair(file: bytearray, data_too: bool) -> None:
    """Makes checksums and the size true again, so that the checks behind them are reached."""
    if len(file) < HEADER_BYTES:
        return
    struct.pack_into("<Q", file, 16, len(file))
    for at in entry_offsets(file) if data_too else ():
        offset, size = struct.unpack_from("<QQ", file, at + 16)
        if offset + size <= len(file):
            struct.pack_into("<I", file, at + 12, zlib.crc32(file[offset : offset + size]))
    end = HEADER_BYTES + struct.unpack_from("<I", file, 24)[0]
    struct.pack_into("<I", file, 12, zlib.crc32(file[16:end]))


def damaged(rng: random.Random, seed: bytes) -> bytes:
    """A copy of a file with one to three faults, in most cases with true checksums."""
    file = bytearray(seed)
    for _ in range(rng.randint(1, 3)):
        _damage_once(rng, file)
    if rng.random() < 7 / 8:
        repair(file, data_too=rng.random() < 0.5)
    return bytes(file)


def _damage_once(rng: random.Random, file: bytearray) -> None:
    size = len(file)
    if size < 8:
        return
    # Half of the damage goes to the header and the first entries.
    reach = min(size, 160) if rng.random() < 0.5 else size
    at = rng.randrange(reach)
    word = rng.randrange(reach // 4 - 1) * 4
    count = rng.randint(1, 48)
    match rng.randrange(8):
        case 0:
            file[at] ^= 1 << rng.randrange(8)
        case 1:
            file[at] = rng.randrange(256)
        case 2:
            _damage_number(rng, file, word, "<I", 2**32)
        case 3:
            _damage_number(rng, file, word, "<Q", 2**64)
        case 4:
            del file[at:]
        case 5:
            file += bytes([rng.randrange(2)]) * rng.randint(1, 80)
        case 6:  # one entry, or a part of it, over another
            piece = file[at : at + count]
            to = rng.randrange(size - len(piece) + 1)
            file[to : to + len(piece)] = piece
        case 7:
            del file[at : at + count]


def _damage_number(
    rng: random.Random, file: bytearray, at: int, form: str, modulus: int
) -> None:
    """Another number at a limit of the format or of an integer type, or near what was there."""
    if rng.random() < 0.5:
        limits = (0, 16, 48, 64, 255, 2**31, 2**32, 2**61, 2**63, len(file))
        value = rng.choice(limits) + rng.randint(-1, 1)
    else:
        value = struct.unpack_from(form, file, at)[0] + rng.choice((-64, -16, -1, 1, 16, 64))
    struct.pack_into(form, file, at, value % modulus)


def python_verdict(file: bytes) -> str:
    """What kdtr_verdicts prints of the file, from the Python reader."""
    try:
        tensors = kdtr.parse(file, "input")
    except kdtr.KdtrError as error:
        return str(error)
    listed = [
        f" {kdtr.code_of(array.dtype)}[{','.join(map(str, array.shape))}]"
        f"{zlib.crc32(array.tobytes()):08x}'{name}'"
        for name, array in tensors.items()
    ]
    return "ok" + "".join(listed)


def cpp_verdicts(kdtr_verdicts: Path, files: list[bytes]) -> list[str]:
    """What the C++ reader says of each file."""
    fed = b"".join(struct.pack("<Q", len(file)) + file for file in files)
    done = subprocess.run([kdtr_verdicts], input=fed, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    # Not splitlines: a name may hold what Unicode counts as the end of a line.
    return done.stdout.decode().split("\n")[:-1]
