"""What is written is read again, bit by bit, in Python and in C++."""

from __future__ import annotations

import math
import os
import resource
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kdtr_support import ALL_DTYPES

from kdtree_sglang import kdtr

SHAPES = [(), (1,), (0,), (3, 0, 2), (7, 5, 3), (1,) * kdtr.MAX_RANK]


def random_bits(rng: np.random.Generator, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Any bits that the type allows, NaN with payloads among them."""
    high = 2 if dtype == np.bool_ else 256
    size = math.prod(shape) * dtype.itemsize
    return rng.integers(0, high, size, dtype=np.uint8).view(dtype).reshape(shape)


def assert_same(expected: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> None:
    assert list(got) == list(expected)
    for name, array in expected.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
        assert got[name].tobytes() == array.tobytes(), name


def copy_by_cpp(kdtr_copy: Path, source: Path, target: Path) -> None:
    done = subprocess.run([kdtr_copy, source, target], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("code", kdtr.DTYPES)
def test_every_type_and_shape(
    code: str, shape: tuple[int, ...], tmp_path: Path, kdtr_copy: Path
) -> None:
    rng = np.random.default_rng(7)
    tensors = {name: random_bits(rng, kdtr.DTYPES[code], shape) for name in ("x", "y")}
    kdtr.write(tmp_path / "python.kdtr", tensors)
    assert_same(tensors, kdtr.read(tmp_path / "python.kdtr"))
    copy_by_cpp(kdtr_copy, tmp_path / "python.kdtr", tmp_path / "cpp.kdtr")
    assert (tmp_path / "cpp.kdtr").read_bytes() == (tmp_path / "python.kdtr").read_bytes()
    assert_same(tensors, kdtr.read(tmp_path / "cpp.kdtr"))


@pytest.mark.parametrize(
    "tensors",
    [{}, ALL_DTYPES, {f"layer.{i}.q": np.full(i % 5, i) for i in range(300)}],
    ids=["none", "every type", "many"],
)
def test_files_of_several_tensors(
    tensors: dict[str, np.ndarray], tmp_path: Path, kdtr_copy: Path
) -> None:
    kdtr.write(tmp_path / "python.kdtr", tensors)
    assert_same(tensors, kdtr.read(tmp_path / "python.kdtr"))
    copy_by_cpp(kdtr_copy, tmp_path / "python.kdtr", tmp_path / "cpp.kdtr")
    assert (tmp_path / "cpp.kdtr").read_bytes() == (tmp_path / "python.kdtr").read_bytes()


# Names as the format has them.
names = st.text(
    st.characters(min_codepoint=0x20, exclude_categories=["Cs"], exclude_characters="\x7f"),
    min_size=1,
    max_size=20,
)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype = kdtr.DTYPES[draw(st.sampled_from(sorted(kdtr.DTYPES)))]
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=5)))
    return random_bits(np.random.default_rng(draw(st.integers(0, 2**32))), dtype, shape)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(tensors=st.dictionaries(names, arrays(), max_size=6))
def test_any_tensors(tensors: dict[str, np.ndarray], tmp_path: Path, kdtr_copy: Path) -> None:
    kdtr.write(tmp_path / "python.kdtr", tensors)
    assert_same(tensors, kdtr.read(tmp_path / "python.kdtr"))
    copy_by_cpp(kdtr_copy, tmp_path / "python.kdtr", tmp_path / "cpp.kdtr")
    assert (tmp_path / "cpp.kdtr").read_bytes() == (tmp_path / "python.kdtr").read_bytes()


def test_strided_arrays_are_written_in_c_order(tmp_path: Path) -> None:
    # The large ones take several chunks of the writer.
    base = np.arange(3 * 700 * 500, dtype=np.float32).reshape(3, 700, 500)
    tensors = {
        "transposed": base.T,
        "reversed": base[::-1, :, ::-2],
        "repeated": np.broadcast_to(np.arange(5), (4, 5)),
        "bf16": base.astype(ml_dtypes.bfloat16).transpose(1, 0, 2),
        "bools": (base > 1000).T,
    }
    kdtr.write(tmp_path / "x.kdtr", tensors)
    assert_same(tensors, kdtr.read(tmp_path / "x.kdtr"))


def test_numbers_become_tensors_of_rank_0(tmp_path: Path) -> None:
    kdtr.write(tmp_path / "x.kdtr", {"i": 3, "f": 0.5, "b": True, "scalar": np.float16(2)})
    read = kdtr.read(tmp_path / "x.kdtr")
    assert {name: (kdtr.code_of(a.dtype), a.item()) for name, a in read.items()} == {
        "i": ("i64", 3),
        "f": ("f64", 0.5),
        "b": ("bool", True),
        "scalar": ("f16", 2.0),
    }
    assert all(array.shape == () for array in read.values())


def test_arrays_are_aligned_and_cannot_be_written_through(tmp_path: Path) -> None:
    kdtr.write(tmp_path / "x.kdtr", ALL_DTYPES)
    for array in kdtr.read(tmp_path / "x.kdtr").values():
        assert array.ctypes.data % 64 == 0
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1
    for array in kdtr.parse(bytearray((tmp_path / "x.kdtr").read_bytes()), "memory").values():
        assert not array.flags.writeable


def test_a_replaced_file_stays_whole_for_who_has_read_it(tmp_path: Path) -> None:
    path = tmp_path / "x.kdtr"
    kdtr.write(path, {"x": np.arange(5000)})
    before = kdtr.read(path)["x"]
    kdtr.write(path, {"x": np.zeros(3)})
    assert before.tolist() == list(range(5000))
    assert kdtr.read(path)["x"].tolist() == [0, 0, 0]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.kdtr"
    kdtr.write(path, {"x": np.arange(3)})
    before = path.read_bytes()
    # Found while the data is being written.
    neither = np.array([0, 1, 2], np.uint8).view(np.bool_)
    message = r"x\.kdtr: tensor 1 'flags': data: a bool is neither 0 nor 1"
    with pytest.raises(kdtr.KdtrError, match=message):
        kdtr.write(path, {"x": np.ones(3), "flags": neither})
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        kdtr.write(tmp_path / "folder", {"x": np.ones(3)})
    assert path.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "x.kdtr"]


def test_both_writers_respect_the_umask(tmp_path: Path, kdtr_copy: Path) -> None:
    before = os.umask(0o027)
    try:
        kdtr.write(tmp_path / "python.kdtr", {})
        copy_by_cpp(kdtr_copy, tmp_path / "python.kdtr", tmp_path / "cpp.kdtr")
    finally:
        os.umask(before)
    for name in ("python.kdtr", "cpp.kdtr"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("", 1, "tensor 1: name_bytes: 0, must be 1..255"),
        ("é" * 128, 1, "tensor 1: name_bytes: 256, must be 1..255"),
        ("a\tb", 1, "tensor 1: name: holds a control character"),
        ("a\x7f", 1, "tensor 1: name: holds a control character"),
        ("\ud800", 1, r"tensor 1: name: '\ud800' is not valid Unicode"),
        ("x", np.zeros(2, np.uint32), "tensor 1 'x': dtype: <u4 is none of bf16, f16, "),
        ("x", np.zeros(2, ">f4"), "tensor 1 'x': dtype: >f4 is none of bf16, f16, "),
        ("x", "text", "tensor 1 'x': dtype: <U4 is none of bf16, f16, "),
        ("x", 2**64, "tensor 1 'x': dtype: |O is none of bf16, f16, "),
        ("x", np.zeros((1,) * 17), "tensor 1 'x': rank: 17, must be at most 16"),
    ],
)
def test_what_kdtr_cannot_hold_is_refused(
    name: str, value: object, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.kdtr"
    with pytest.raises(kdtr.KdtrError) as error:
        kdtr.write(path, {"first": 1, name: value})
    assert str(error.value).startswith(f"{path}: {message}")
    assert list(tmp_path.iterdir()) == []


def test_the_cpp_api(tmp_path: Path, kdtr_api: Path) -> None:
    done = subprocess.run([kdtr_api, tmp_path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty", "file.kdtr"]


@pytest.mark.slow
def test_five_gigabytes(tmp_path: Path, kdtr_copy: Path) -> None:
    """Offsets beyond 32 bits in both readers and writers, with little memory and disk."""
    size = 5 * 2**30
    # Zeros that nothing has touched take no memory to read, and a file of them no disk.
    big = np.zeros(size, np.uint8)
    marks = {0: 1, 2**31: 2, 2**32 - 1: 3, 2**32: 4, size - 1: 5}
    for index, value in marks.items():
        big[index] = value
    python, cpp = tmp_path / "python.kdtr", tmp_path / "cpp.kdtr"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kdtr.write(python, {"before": np.arange(3), "big": big, "after": np.float32(0.5)})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # in KiB
    del big
    copy_by_cpp(kdtr_copy, python, cpp)
    for path in (python, cpp):
        assert path.stat().st_size > size
        assert path.stat().st_blocks * 512 < 2**27
    # The header's checksum covers those of the data, which the C++ reader verified in the one file
    # and Python will verify in the other: they have the same bytes.
    header = 32 + 3 * 48
    with python.open("rb") as one, cpp.open("rb") as other:
        assert one.read(header) == other.read(header)
    python.unlink()
    tensors = kdtr.read(cpp)
    assert tensors["big"].shape == (size,)
    assert {index: tensors["big"][index] for index in marks} == marks
    assert (tensors["before"].tolist(), tensors["after"].item()) == ([0, 1, 2], 0.5)
    cpp.unlink()
