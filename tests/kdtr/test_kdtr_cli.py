"""`kdtree-sglang kdtr`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from kdtr_support import ALL_DTYPES

from kdtree_sglang import kdtr
from kdtree_sglang.cli.kdtr import compare, main

NAN, INF = np.nan, np.inf


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, so that output holds short paths."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    status = main(list(arguments))
    output = capsys.readouterr()
    return status, output.out, output.err


def test_the_command_is_registered(files: Path) -> None:
    kdtr.write("a.kdtr", {"x": np.zeros(3, np.float32)})
    command = [Path(sys.executable).with_name("kdtree-sglang"), "kdtr", "ls", "a.kdtr"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["x", "f32", "[3]", "12", "bytes"])


def test_ls(files: Path, capsys: pytest.CaptureFixture) -> None:
    kdtr.write("a.kdtr", {"in.q": np.zeros((2, 3), ml_dtypes.bfloat16), "n": 3})
    kdtr.write("b.kdtr", {})
    assert run(capsys, "ls", "a.kdtr", "b.kdtr") == (
        0,
        "a.kdtr:\n"
        "in.q  bf16 [2, 3]           12 bytes\n"
        "n     i64 []                8 bytes\n"
        "b.kdtr:\n",
        "",
    )


def test_show(files: Path, capsys: pytest.CaptureFixture) -> None:
    kdtr.write(
        "a.kdtr",
        {
            "x": np.array([[1, 2.5], [NAN, -INF]], ml_dtypes.bfloat16),
            "flags": np.array([True, False, True]),
            "large": np.arange(2**62, 2**62 + 5000),
            "none": np.zeros((0, 3)),
        },
    )
    status, out, _ = run(capsys, "show", "a.kdtr")
    assert status == 0
    assert "x  bf16 [2, 2]  min 1, max 2.5, mean 1.75, 1 NaN, 1 inf\n[[1 2.5]\n [nan -inf]]" in out
    assert "flags  bool [3]  2 of 3 true\n[ True False  True]" in out
    assert f"large  i64 [5000]  min {2**62}, max {2**62 + 4999}, mean 4.61169e+18\n" in out
    assert f"[{2**62} {2**62 + 1} {2**62 + 2} ..." in out
    assert "none  f64 [0, 3]  no values\n[]" in out
    assert run(capsys, "show", "a.kdtr", "none") == (0, "none  f64 [0, 3]  no values\n[]\n", "")
    assert run(capsys, "show", "a.kdtr", "y") == (2, "", "a.kdtr: no tensor 'y'\n")


def test_diff_of_equal_files(files: Path, capsys: pytest.CaptureFixture) -> None:
    tensors = {**ALL_DTYPES, "nan": np.array([NAN, INF, -INF]), "none": np.zeros((0, 2))}
    kdtr.write("a.kdtr", tensors)
    kdtr.write("b.kdtr", dict(reversed(tensors.items())))
    status, out, _ = run(capsys, "diff", "a.kdtr", "b.kdtr")
    assert status == 0
    lines = out.splitlines()
    assert len(lines) == len(tensors) and all(line.endswith("equal") for line in lines)


def test_diff_of_values(files: Path, capsys: pytest.CaptureFixture) -> None:
    kdtr.write("a.kdtr", {"same": 1, "x": np.array([[1.0, 2.0], [4.0, 8.0]])})
    kdtr.write("b.kdtr", {"same": 1, "x": np.array([[1.0, 2.5], [4.0, 9.0]])})
    assert run(capsys, "diff", "a.kdtr", "b.kdtr") == (
        1,
        "same  i64 []  equal\n"
        "x     f64 [2, 2]  2 of 4 differ, max abs 1, max rel 0.25, first at [0, 1]: "
        "2.0 against 2.5\n",
        "",
    )
    status, out, _ = run(capsys, "diff", "a.kdtr", "b.kdtr", "--atol", "0.5")
    assert status == 1
    assert "x     f64 [2, 2]  1 of 4 differ, max abs 1, max rel 0.25, first at [1, 1]: 8.0" in out
    for tolerance in (("--atol", "1"), ("--rtol", "0.25"), ("--atol", "0.5", "--rtol", "0.0625")):
        status, out, _ = run(capsys, "diff", "a.kdtr", "b.kdtr", *tolerance)
        assert status == 0
        assert "x     f64 [2, 2]  within tolerance, max abs 1, max rel 0.25\n" in out


def test_diff_of_other_tensors(files: Path, capsys: pytest.CaptureFixture) -> None:
    kdtr.write("a.kdtr", {"a": 1, "shape": np.zeros((2, 3)), "type": np.float32(1)})
    kdtr.write("b.kdtr", {"shape": np.zeros((3, 2)), "type": np.float64(1), "b": 1})
    assert run(capsys, "diff", "a.kdtr", "b.kdtr") == (
        1,
        "a      only in a.kdtr\n"
        "shape  f64 [2, 3] against f64 [3, 2]\n"
        "type   f32 [] against f64 []\n"
        "b      only in b.kdtr\n",
        "",
    )


@pytest.mark.parametrize("command", [("ls",), ("show",), ("diff", "good.kdtr")], ids=str)
def test_unreadable_files(
    command: tuple[str, ...], files: Path, capsys: pytest.CaptureFixture
) -> None:
    kdtr.write("good.kdtr", {"x": 1})
    Path("bad.kdtr").write_bytes(b"no tensors in here, but thirty-two bytes")
    status, _, err = run(capsys, *command, "bad.kdtr")
    assert status == 2 and err.startswith("bad.kdtr: magic: ")
    status, _, err = run(capsys, *command, "none.kdtr")
    assert status == 2 and "No such file or directory: 'none.kdtr'" in err


@pytest.mark.parametrize(
    ("expected", "actual", "dtype", "max_abs", "max_rel"),
    [
        (1.0, 1.5, "f32", 0.5, 0.5),
        (-4.0, 4.0, "bf16", 8, 2),
        (0.0, 1e-3, "f64", 1e-3, INF),
        (0.0, -0.0, "f16", 0, 0),
        (NAN, NAN, "bf16", 0, 0),
        (INF, INF, "f16", 0, 0),
        (NAN, 1.0, "f32", INF, INF),
        (1.0, NAN, "f32", INF, INF),
        (INF, 1.0, "f32", INF, INF),
        (1.0, -INF, "f64", INF, INF),
        (INF, -INF, "f64", INF, INF),
        (2**63 - 1, 2**63 - 2, "i64", 1, 1 / (2**63 - 1)),
        (-(2**63), 2**63 - 1, "i64", 2**64 - 1, (2**64 - 1) / 2**63),
        (2**64 - 1, 0, "u64", 2**64 - 1, 1),
        (200, 100, "u8", 100, 0.5),
        (-128, 127, "i8", 255, 255 / 128),
        (True, False, "bool", 1, 1),
    ],
)
def test_errors_of_single_values(
    expected: object, actual: object, dtype: str, max_abs: float, max_rel: float
) -> None:
    kind = kdtr.DTYPES[dtype]
    # The last of more values than are worked on at once.
    e, a = np.zeros((2, 2**20), kind), np.zeros((2, 2**20), kind)
    e[1, -1], a[1, -1] = expected, actual
    found = compare(e, a, 0, 0)
    assert (found.max_abs, found.max_rel) == (float(max_abs), float(max_rel))
    assert (found.outside, found.first) == ((1, 2**21 - 1) if max_abs else (0, None))
    # No tolerance covers an infinite error.
    assert (compare(e, a, 1e300, 1e300).first is not None) == (max_abs == INF)
