"""Finds, or builds once, the compiled ops and registers them as `torch.ops.kdtree`.

`load()` takes the first of
  1. a prebuilt library in `kdtree_sglang/_prebuilt` (from `kdtree-sglang build` or a wheel) made
     from these sources for this torch and, on a GPU, for this GPU. A wheel that is built after
     `kdtree-sglang build` carries it;
  2. the cache, `$KDTREE_CACHE_DIR` or `$XDG_CACHE_HOME/kdtree_sglang`, built on a miss.

A library's file name carries everything that must match, `kdtree_ops-<variant>-<hash>.so`, and a
file gets that name by an atomic rename after it compiled and loaded in the builder: what has the
name is whole. Processes that start together (tensor parallelism) wait on one lock while the first
builds.

On a machine with a usable GPU the CUDA variant is required: a missing nvcc is an error, never a
quiet fall-back to the CPU.
"""

import fcntl
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

_PACKAGE = Path(__file__).resolve().parent.parent
PREBUILT_DIR = _PACKAGE / "_prebuilt"

# FMA contraction would round the tree's keys differently from the reference (csrc/include/kdtree/
# build_tree.h), so it is off for every file.
_CXX_FLAGS = ["-O3", "-fopenmp", "-ffp-contract=off", "-Wall"]
_CUDA_FLAGS = ["-O3", "-fmad=false", "-Xptxas=-v,-warn-spills"]
_LINK_FLAGS = ["-fopenmp"]
_QUOTED_LOG_LINES = 60

_load_lock = threading.Lock()
_loaded_from: Path | None = None


class ExtensionBuildError(RuntimeError):
    """The ops could not be compiled; the message quotes the compiler and the command."""


@dataclass(frozen=True)
class Variant:
    """What a library was compiled for: no `archs` means CPU only, else `("90a", "120")`."""

    archs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"cuda_{'_'.join(self.archs)}" if self.archs else "cpu"

    @classmethod
    def parse(cls, name: str) -> "Variant":
        return cls(tuple(name.split("_")[1:]))

    def serves(self, needed: "Variant") -> bool:
        """Whether a library of this variant can stand in for one of `needed`."""
        return set(needed.archs) <= set(self.archs)


def parse_archs(text: str) -> tuple[str, ...]:
    """Splits "90a,120" and rejects what is not an nvcc architecture number."""
    archs = tuple(sorted({part.strip() for part in text.split(",") if part.strip()}))
    for arch in archs:
        if not arch.rstrip("af").isdigit():
            raise ValueError(
                f"{arch!r} is no CUDA architecture; write them as nvcc does: 90a,120"
            )
    if not archs:
        raise ValueError("no CUDA architecture given; write them as nvcc does: 90a,120")
    return archs


def needed_variant() -> Variant:
    """The variant that this process's devices need."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return Variant()
    if override := os.environ.get("KDTREE_CUDA_ARCHS"):
        return Variant(parse_archs(override))
    capabilities = {
        torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())
    }
    for capability in capabilities:
        if capability < (8, 0):
            raise ExtensionBuildError(
                f"a visible GPU has compute capability {capability[0]}.{capability[1]}, and the "
                "ops need 8.0 or higher. Hide it with CUDA_VISIBLE_DEVICES."
            )
    names = {"90a" if c == (9, 0) else f"{c[0]}{c[1]}" for c in capabilities}
    return Variant(tuple(sorted(names)))


def find_csrc() -> Path:
    """The sources: inside the package when it was installed, else beside it in the repository."""
    for folder in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):
        if (folder / "bindings.cpp").is_file():
            return folder
    raise ExtensionBuildError(
        f"the sources of the ops are neither in {_PACKAGE / 'csrc'} nor in "
        f"{_PACKAGE.parent / 'csrc'}; reinstall kdtree-sglang"
    )


def build_key(csrc: Path) -> str:
    """Hash of the sources and of what else decides whether a library fits this process."""
    digest = hashlib.sha256()
    facts = [
        torch.__version__,
        str(torch.version.git_version),
        str(torch.version.cuda),
        str(torch.compiled_with_cxx11_abi()),
        f"cp{sys.version_info.major}{sys.version_info.minor}",
        platform.machine(),
        *_CXX_FLAGS,
        *_CUDA_FLAGS,
        *_LINK_FLAGS,
    ]
    digest.update("\0".join(facts).encode())
    for path in sorted(csrc.rglob("*")):
        # csrc/tests is no part of the library, nor of an installed package.
        if path.suffix in (".h", ".cuh", ".cpp", ".cu") and csrc / "tests" not in path.parents:
            digest.update(f"\0{path.relative_to(csrc).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def library_name(variant: Variant, key: str) -> str:
    return f"kdtree_ops-{variant.name}-{key}.so"


def cache_dir() -> Path:
    if folder := os.environ.get("KDTREE_CACHE_DIR"):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kdtree_sglang"


def find_prebuilt(folder: Path, needed: Variant, key: str) -> Path | None:
    """A library in `folder` that was made from these sources and serves the variant."""
    for path in sorted(folder.glob(f"kdtree_ops-*-{key}.so")):
        if Variant.parse(path.name.split("-")[1]).serves(needed):
            return path
    return None


def _check_nvcc() -> None:
    from torch.utils import cpp_extension

    wanted = torch.version.cuda
    if wanted is None:
        raise ExtensionBuildError(
            "the CUDA ops need a CUDA build of torch; this one "
            f"({torch.__version__}) has none. Install torch for CUDA, or build with --cpu."
        )
    home = cpp_extension.CUDA_HOME
    nvcc = Path(home) / "bin" / "nvcc" if home else None
    if nvcc is None or not nvcc.is_file():
        raise ExtensionBuildError(
            f"the CUDA ops need nvcc to compile and none was found. Install the CUDA {wanted} "
            "toolkit and set CUDA_HOME to it, or install a wheel that carries the compiled ops "
            "(`kdtree-sglang build --cuda-archs ...` on a machine with nvcc makes them)."
        )
    report = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True).stdout
    found = report.partition("release ")[2].partition(",")[0]
    if found.partition(".")[0] != wanted.partition(".")[0]:
        raise ExtensionBuildError(
            f"nvcc at {nvcc} is CUDA {found or 'unknown'} but torch {torch.__version__} was built "
            f"with CUDA {wanted}. Install the CUDA {wanted} toolkit and set CUDA_HOME to it."
        )


def _compile(csrc: Path, variant: Variant, workspace: Path) -> Path:
    """Compiles into `workspace`; returns the library, or raises with the compiler's output."""
    sources = [*csrc.glob("*.cpp"), *csrc.glob("cpu/*.cpp")]
    cxx_flags, cuda_flags = list(_CXX_FLAGS), list(_CUDA_FLAGS)
    if variant.archs:
        _check_nvcc()
        sources += csrc.glob("*.cu")
        cxx_flags.append("-DKDTREE_WITH_CUDA")
        for arch in variant.archs:
            cuda_flags.append(f"-gencode=arch=compute_{arch},code=sm_{arch}")
    arguments = {
        "name": "kdtree_ops",
        "sources": [str(path) for path in sorted(sources)],
        "extra_include_paths": [str(csrc), str(csrc / "include")],
        "extra_cflags": cxx_flags,
        "extra_cuda_cflags": cuda_flags if variant.archs else [],
        "extra_ldflags": _LINK_FLAGS,
        "build_directory": str(workspace),
        "with_cuda": bool(variant.archs),
    }
    script = Path(__file__).with_name("_compile.py")
    # -P: the script's folder must not shadow anybody's imports.
    command = [sys.executable, "-P", str(script), json.dumps(arguments)]
    environment = {"MAX_JOBS": str(os.cpu_count() or 1), **os.environ}
    # A pip-installed ninja lies beside the interpreter, which PATH need not name.
    environment["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    )
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    (workspace / "build.log").write_text(done.stdout)
    library = workspace / "kdtree_ops.so"
    if done.returncode != 0 or not library.is_file():
        tail = "\n".join(done.stdout.splitlines()[-_QUOTED_LOG_LINES:])
        raise ExtensionBuildError(
            f"compiling the {variant.name} ops failed (exit status {done.returncode}).\n"
            f"command: {shlex.join(command)}\n{tail}"
        )
    return library


def build(csrc: Path, variant: Variant, dest: Path) -> Path:
    """Compiles into folder `dest`, unless it has a library of the same key, and returns the file.

    Safe against concurrent calls in other processes: one compiles, the rest find its result.
    """
    target = dest / library_name(variant, build_key(csrc))
    if target.is_file():
        return target
    try:
        dest.mkdir(parents=True, exist_ok=True)
        lock = open(target.with_suffix(".lock"), "w")
    except OSError as error:
        raise ExtensionBuildError(
            f"cannot write the compiled ops to {dest}: {error}. Set KDTREE_CACHE_DIR to a folder "
            "that can be written."
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_file():
            return target
        # Whoever left a workspace of this library was killed: its lock is gone, and now ours.
        prefix = f".building-{target.stem}-"
        for leftover in dest.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=dest) as folder:
            workspace = Path(folder)
            log = target.with_suffix(".log")
            try:
                library = _compile(csrc, variant, workspace)
                os.replace(library, target)
            finally:
                if (workspace / "build.log").is_file():
                    shutil.move(workspace / "build.log", log)
    return target


def load() -> Path:
    """Registers `torch.ops.kdtree` in this process; later calls only return the library's path."""
    global _loaded_from
    with _load_lock:
        if _loaded_from is None:
            needed = needed_variant()
            csrc = find_csrc()
            library = find_prebuilt(PREBUILT_DIR, needed, build_key(csrc))
            if library is None:
                library = build(csrc, needed, cache_dir())
            try:
                torch.ops.load_library(str(library))
            except OSError as error:
                raise ExtensionBuildError(
                    f"the compiled ops do not load: {error}. They may come from another machine; "
                    f"delete {library} to have them built here."
                ) from error
            _loaded_from = library
    return _loaded_from


def namespace():
    """`torch.ops.kdtree`, loaded on first use."""
    if _loaded_from is None:
        load()
    return torch.ops.kdtree
