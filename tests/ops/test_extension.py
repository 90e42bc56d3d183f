"""Building and finding the compiled ops, on a stand-in source that compiles in a second."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kdtree_sglang.cli import build as build_command
from kdtree_sglang.ops import _extension

ROOT = Path(_extension.__file__).resolve().parents[2]
CPU = _extension.Variant()


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    folder = tmp_path / "csrc"
    (folder / "cpu").mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "include" / "answer.h").write_text("#define ANSWER 42\n")
    (folder / "bindings.cpp").write_text(
        '#include "answer.h"\nextern "C" int kdtree_stand_in() { return ANSWER; }\n'
    )
    return folder


@pytest.fixture
def counting_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that notes each compilation in the file returned, slowly enough to overlap."""
    notes = tmp_path / "compilations"
    script = tmp_path / "cxx"
    script.write_text(
        "#!/bin/sh\n"
        f'case " $* " in *" -c "*) echo $$ >> "{notes}"; sleep "${{CXX_SLEEP:-1}}";; esac\n'
        f'exec {shutil.which("c++")} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return notes


def libraries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.so"))


def start_load(csrc: Path, cache: Path, **environment: str) -> subprocess.Popen:
    """A process of its own that loads from `csrc` as a scheduler process would."""
    code = (
        "import pathlib, sys\n"
        "from kdtree_sglang.ops import _extension\n"
        "_extension.find_csrc = lambda: pathlib.Path(sys.argv[1])\n"
        "_extension.PREBUILT_DIR = pathlib.Path(sys.argv[1]) / 'none'\n"
        "_extension.needed_variant = lambda: _extension.Variant()\n"
        "first = _extension.load()\n"
        "assert _extension.load() == first\n"
        "print(first)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(csrc)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "KDTREE_CACHE_DIR": str(cache), **environment},
        start_new_session=True,
    )


def test_concurrent_first_loads_build_once(csrc, tmp_path, counting_compiler):
    cache = tmp_path / "cache"
    outputs = [p.communicate(timeout=200) for p in [start_load(csrc, cache) for _ in range(3)]]
    names = {text.strip().splitlines()[-1] for text, _ in outputs}
    assert names == {str(cache / _extension.library_name(CPU, _extension.build_key(csrc)))}
    assert len(counting_compiler.read_text().splitlines()) == 1
    assert len(libraries(cache)) == 1


def test_changed_source_is_built_again(csrc, tmp_path, counting_compiler):
    cache = tmp_path / "cache"
    first = _extension.build(csrc, CPU, cache)
    assert _extension.build(csrc, CPU, cache) == first
    assert len(counting_compiler.read_text().splitlines()) == 1
    (csrc / "include" / "answer.h").write_text("#define ANSWER 43\n")
    second = _extension.build(csrc, CPU, cache)
    assert second != first
    assert len(counting_compiler.read_text().splitlines()) == 2
    assert _extension.find_prebuilt(cache, CPU, _extension.build_key(csrc)) == second


def test_key_covers_torch_and_sources(csrc, monkeypatch):
    key = _extension.build_key(csrc)
    (csrc / "notes.md").write_text("no source")
    (csrc / "tests").mkdir()
    (csrc / "tests" / "harness.cpp").write_text("")
    assert _extension.build_key(csrc) == key
    (csrc / "include" / "new.cuh").write_text("")
    assert _extension.build_key(csrc) != key
    (csrc / "include" / "new.cuh").unlink()
    monkeypatch.setattr(torch, "__version__", "0.0.1")
    assert _extension.build_key(csrc) != key


def test_failure_quotes_the_compiler_and_the_command(csrc, tmp_path):
    (csrc / "bindings.cpp").write_text("int broken() { return no_such_name; }\n")
    with pytest.raises(_extension.ExtensionBuildError) as caught:
        _extension.build(csrc, CPU, tmp_path / "cache")
    assert "no_such_name" in str(caught.value)
    assert "command: " in str(caught.value)
    assert "_compile.py" in str(caught.value)
    assert libraries(tmp_path / "cache") == []
    (log,) = (tmp_path / "cache").glob("*.log")
    assert "no_such_name" in log.read_text()


def test_failure_to_load_is_a_failed_build(csrc, tmp_path):
    """What links but cannot be loaded is never published."""
    (csrc / "bindings.cpp").write_text("int missing();\nint present() { return missing(); }\n")
    with pytest.raises(_extension.ExtensionBuildError, match="missing"):
        _extension.build(csrc, CPU, tmp_path / "cache")
    assert libraries(tmp_path / "cache") == []


def test_library_of_another_machine_is_named_with_the_way_out(csrc, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    foreign = cache / _extension.library_name(CPU, _extension.build_key(csrc))
    foreign.write_bytes(b"not for this machine")
    process = start_load(csrc, cache)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "ExtensionBuildError: the compiled ops do not load" in output
    assert f"delete {foreign}" in output


def test_cache_that_cannot_be_written_is_named_with_the_way_out(csrc, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(_extension.ExtensionBuildError, match="Set KDTREE_CACHE_DIR"):
        _extension.build(csrc, CPU, blocked / "cache")


def test_gpu_too_old_for_the_ops_is_refused(monkeypatch):
    monkeypatch.delenv("KDTREE_CUDA_ARCHS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(_extension.ExtensionBuildError, match="compute capability 7.5"):
        _extension.needed_variant()


def test_killed_build_leaves_nothing_to_load(csrc, tmp_path, counting_compiler):
    cache = tmp_path / "cache"
    process = start_load(csrc, cache, CXX_SLEEP="120")
    deadline = time.monotonic() + 100
    while not counting_compiler.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    # The whole session that start_load made for it, compiler included.
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert libraries(cache) == []
    library = _extension.build(csrc, CPU, cache)
    assert libraries(cache) == [library.name]
    assert not list(cache.glob(".building-*"))


def test_prebuilt_must_serve_the_variant(tmp_path):
    for name in ("kdtree_ops-cuda_120_90a-k1.so", "kdtree_ops-cpu-k2.so"):
        (tmp_path / name).touch()
    hopper, both = _extension.Variant(("90a",)), _extension.Variant(("120", "90a"))
    blackwell = _extension.Variant(("100",))
    cuda = tmp_path / "kdtree_ops-cuda_120_90a-k1.so"
    assert _extension.find_prebuilt(tmp_path, hopper, "k1") == cuda
    assert _extension.find_prebuilt(tmp_path, both, "k1") == cuda
    assert _extension.find_prebuilt(tmp_path, CPU, "k1") == cuda
    assert _extension.find_prebuilt(tmp_path, blackwell, "k1") is None
    assert _extension.find_prebuilt(tmp_path, hopper, "k2") is None
    assert _extension.find_prebuilt(tmp_path, CPU, "k3") is None


def test_gpu_without_nvcc_is_an_error(csrc, tmp_path, monkeypatch):
    from torch.utils import cpp_extension

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    with pytest.raises(_extension.ExtensionBuildError, match=r"need nvcc.*CUDA_HOME"):
        _extension.build(csrc, _extension.Variant(("90a",)), tmp_path / "cache")


def test_other_cuda_than_torchs_is_an_error(csrc, tmp_path, monkeypatch):
    from torch.utils import cpp_extension

    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    with pytest.raises(_extension.ExtensionBuildError, match=r"is CUDA 11.8 but .* CUDA 13.0"):
        _extension.build(csrc, _extension.Variant(("90a",)), tmp_path / "cache")


def test_gpu_needs_the_cuda_variant(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", [(9, 0), (12, 0), (9, 0)].__getitem__)
    monkeypatch.delenv("KDTREE_CUDA_ARCHS", raising=False)
    assert _extension.needed_variant() == _extension.Variant(("120", "90a"))
    monkeypatch.setenv("KDTREE_CUDA_ARCHS", "100a")
    assert _extension.needed_variant() == _extension.Variant(("100a",))


@pytest.mark.parametrize("text", ["", "9.0", "sm_90", "90a,x"])
def test_bad_architectures_are_refused(text):
    with pytest.raises(ValueError, match="90a,120"):
        _extension.parse_archs(text)


def test_build_command(csrc, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_extension, "find_csrc", lambda: csrc)
    assert build_command.main(["--cpu", "--dest", str(tmp_path / "out")]) == 0
    printed = Path(capsys.readouterr().out.strip())
    assert printed.is_file()
    assert _extension.find_prebuilt(tmp_path / "out", CPU, _extension.build_key(csrc)) == printed
    (csrc / "bindings.cpp").write_text("#error broken on purpose\n")
    assert build_command.main(["--cpu", "--dest", str(tmp_path / "out")]) == 1
    assert "broken on purpose" in capsys.readouterr().err


def test_import_builds_nothing(tmp_path):
    code = "import sys, kdtree_sglang.ops\nassert 'torch.utils.cpp_extension' not in sys.modules\n"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=ROOT,
        env={**os.environ, "KDTREE_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.skipif(torch.version.cuda is None, reason="torch without CUDA")
def test_real_sources_compile_for_hopper_and_blackwell(tmp_path):
    variant = _extension.Variant(("120", "90a"))
    library = _extension.build(_extension.find_csrc(), variant, tmp_path)
    log = library.with_suffix(".log").read_text()
    for arch in ("sm_90a", "sm_120"):
        assert f"for '{arch}'" in log
    # Local memory in a kernel is a spill or an array the compiler could not keep in registers.
    frames = [line.strip() for line in log.splitlines() if "bytes stack frame" in line]
    assert frames
    assert all(line.startswith("0 bytes stack frame, 0 bytes spill") for line in frames), frames
