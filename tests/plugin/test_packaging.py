"""What `pip install .` and a wheel contain."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ("kdtree_sglang", "csrc", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def wheel_of(tree: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "-w", str(out), str(tree)], check=True, timeout=300)
    [wheel] = out.glob("*.whl")
    return wheel


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what is packaged, so that the build leaves nothing in the checkout."""
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in SHIPPED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "_prebuilt", "tests")
            shutil.copytree(source, copy / name, ignore=ignored)
        else:
            shutil.copy(source, copy / name)
    return copy


def test_a_wheel_carries_sources_stand_ins_and_entry_point(tree: Path, tmp_path: Path) -> None:
    wheel = wheel_of(tree, tmp_path / "out")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {f.relative_to(tree).as_posix() for f in (tree / "csrc").rglob("*") if f.is_file()}
    assert {f"kdtree_sglang/{name}" for name in sources} <= names
    package = {
        f.relative_to(tree).as_posix() for f in (tree / "kdtree_sglang").rglob("*") if f.is_file()
    }
    assert package <= names
    [metadata] = [name for name in names if name.endswith("-0.1.0.dist-info/entry_points.txt")]
    entry_points = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "[sglang.srt.plugins]\nkdtree_sglang = kdtree_sglang.plugin:activate" in entry_points


def test_a_wheel_carries_prebuilt_ops_and_says_so_in_its_tag(tree: Path, tmp_path: Path) -> None:
    prebuilt = tree / "kdtree_sglang" / "_prebuilt" / "kdtree_ops-cpu-0123456789abcdef.so"
    prebuilt.parent.mkdir()
    prebuilt.write_bytes(b"compiled")
    wheel = wheel_of(tree, tmp_path / "out")
    assert f"kdtree_sglang/_prebuilt/{prebuilt.name}" in zipfile.ZipFile(wheel).namelist()
    assert not wheel.name.endswith("-any.whl")
