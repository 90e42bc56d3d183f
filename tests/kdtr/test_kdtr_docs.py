"""The example of docs/kdtr.md is what both writers make of its tensors."""

import re
import subprocess
from pathlib import Path

import numpy as np
from kdtr_support import file_bytes

from kdtree_sglang import kdtr

DOCS = Path(__file__).parents[2] / "docs" / "kdtr.md"


def documented_bytes() -> bytes:
    lines = re.findall(r"^([0-9a-f]{8})  ((?:[0-9a-f]{2} )+) +(.{1,16})", DOCS.read_text(), re.M)
    content = b""
    for at, digits, text in lines:
        line = bytes.fromhex(digits)
        assert int(at, 16) == len(content)
        assert text.rstrip() == "".join(chr(b) if 0x20 <= b < 0x7F else "." for b in line)
        content += line
    return content


def test_the_example_is_what_both_writers_make(tmp_path: Path, kdtr_copy: Path) -> None:
    expected = documented_bytes()
    assert len(expected) == 325
    tensors = {
        "ids": np.array([7, 8, -1]),
        "scale": np.float32(0.5),
        "mask": np.array([True, False, True, True, False]),
    }
    assert file_bytes(tensors) == expected
    (tmp_path / "documented.kdtr").write_bytes(expected)
    subprocess.run([kdtr_copy, tmp_path / "documented.kdtr", tmp_path / "copy.kdtr"], check=True)
    assert (tmp_path / "copy.kdtr").read_bytes() == expected


def test_the_types_are_those_of_the_table() -> None:
    table = DOCS.read_text().split("### Types")[1].split("###")[0]
    documented = {}
    for codes, sizes in re.findall(r"^\| (`.*?) \| ([0-9, ]+) \|", table, re.M):
        documented |= zip(re.findall(r"\w+", codes), map(int, sizes.split(", ")), strict=True)
    assert documented == {code: dtype.itemsize for code, dtype in kdtr.DTYPES.items()}
