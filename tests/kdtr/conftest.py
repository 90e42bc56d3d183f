"""The C++ side of KDTR, compiled once a session."""

import os
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
# Unoptimised: compiling takes longer than running.
SANITIZED = ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def compile_tool(name: str, folder: Path, flags: list[str]) -> Path:
    source, tool = CSRC / "tests" / f"{name}.cpp", folder / name
    command = [os.environ.get("CXX", "c++"), "-std=c++17", *flags, f"-I{CSRC / 'include'}"]
    subprocess.run([*command, source, "-o", tool], check=True, timeout=300)
    return tool


@pytest.fixture(scope="session")
def kdtr_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_tool("kdtr_copy", tmp_path_factory.mktemp("kdtr_copy"), ["-O2"])


@pytest.fixture(scope="session")
def kdtr_verdicts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_tool("kdtr_verdicts", tmp_path_factory.mktemp("kdtr_verdicts"), SANITIZED)


@pytest.fixture(scope="session")
def kdtr_fuzz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_tool("kdtr_fuzz", tmp_path_factory.mktemp("kdtr_fuzz"), SANITIZED)


@pytest.fixture(scope="session")
def kdtr_api(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_tool("kdtr_api", tmp_path_factory.mktemp("kdtr_api"), SANITIZED)
