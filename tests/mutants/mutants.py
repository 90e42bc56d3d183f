"""Shows that the suites mean something: every small fault of faults.py must make one fail.

    python tests/mutants/mutants.py [NAME...]

A fault is put into a copy of the sources, which is built and tested as the originals are. Names
pick the faults whose name or file they are a part of. Exit status 1 if a fault survives, does not
apply or does not compile, or if the sources without a fault fail. Faults in CUDA code need a GPU;
without one they are counted as not run.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from faults import CUDA_SUITE, FAULTS, REFERENCE, SUITE, Fault

ROOT = Path(__file__).parents[2]
COPIED = {
    SUITE: ("Makefile", "csrc"),
    CUDA_SUITE: ("Makefile", "csrc"),
    REFERENCE: ("kdtree_sglang/__init__.py", "kdtree_sglang/reference", "tests/reference"),
}
HARNESS = {SUITE: "kernel_suite_cpu", CUDA_SUITE: "kernel_suite_cuda"}
NO_DEVICE = 77
KILLED, SURVIVED, NOT_RUN, BROKEN = "killed", "SURVIVED", "not run", "BROKEN"


class Outcome(NamedTuple):
    verdict: str
    reason: str


class BuildError(Exception):
    """The copy does not compile."""


def count_of(fault: Fault) -> int:
    """How often the fault's text is in its file; 1 where it can be applied."""
    return (ROOT / fault.file).read_text().count(fault.text)


def copy_sources(killer: str, tree: Path) -> None:
    for name in COPIED[killer]:
        source, target = ROOT / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)


def suite_command(killer: str, tree: Path, cases: Path) -> list[str]:
    """Builds the harness in `tree`; the command that runs it over all cases."""
    harness = f"build/{HARNESS[killer]}"
    # Without optimisation the CPU suite takes a second longer and its build much less.
    command = ["make", "-s", "-C", str(tree), "BUILD=build", "CXXFLAGS=-O0", harness]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(next(line for line in done.stderr.splitlines() if "error" in line.lower()))
    return [str(tree / harness), *map(str, sorted(cases.glob("*.kdtr")))]


def pytest_command() -> list[str]:
    flags = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    return [sys.executable, "-m", "pytest", *flags, "tests/reference"]


def run_suite(killer: str, tree: Path, cases: Path, limit_s: float) -> tuple[int | None, str]:
    """(exit status, what failed) of a suite on the sources in `tree`; None when it hangs."""
    if killer == REFERENCE:
        command = pytest_command()
    else:
        command = suite_command(killer, tree, cases)
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return None, f"no end after {limit_s:.0f} s"
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if failed:
        first = failed[0].removeprefix("FAILED ").strip().partition(" - ")[0]
        return done.returncode, first + (f" and {len(failed) - 1} more" if failed[1:] else "")
    return done.returncode, f"exit status {done.returncode}"


def try_fault(fault: Fault, cases: Path, limit_s: float) -> Outcome:
    if count_of(fault) != 1:
        return Outcome(BROKEN, f"its text is {count_of(fault)} times in {fault.file}")
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        copy_sources(fault.killer, tree)
        mutated = tree / fault.file
        mutated.write_text(mutated.read_text().replace(fault.text, fault.replacement))
        try:
            status, what = run_suite(fault.killer, tree, cases, limit_s)
        except BuildError as error:
            return Outcome(BROKEN, f"does not compile: {error}")
    return Outcome(SURVIVED, "") if status == 0 else Outcome(KILLED, what)


def write_cases(folder: Path) -> None:
    script = ROOT / "tests" / "suite" / "suite_cases.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, str(script), str(folder)], check=True, env=environment,
        stdout=subprocess.DEVNULL,
    )


def try_unchanged(killer: str, cases: Path) -> tuple[Outcome, float]:
    """(how the sources without a fault fare, seconds)."""
    if killer == CUDA_SUITE and shutil.which("nvcc") is None:
        return Outcome(NOT_RUN, "no nvcc"), 0.0
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy_sources(killer, Path(folder))
        began = time.monotonic()
        try:
            status, what = run_suite(killer, Path(folder), cases, 600.0)
        except BuildError as error:
            return Outcome(BROKEN, f"does not compile: {error}"), 0.0
        seconds = time.monotonic() - began
    if killer == CUDA_SUITE and status == NO_DEVICE:
        return Outcome(NOT_RUN, "no GPU"), seconds
    return Outcome(SURVIVED if status == 0 else BROKEN, what), seconds


def run(faults: Iterable[Fault]) -> dict[Fault, Outcome]:
    """Tries every fault, as many at a time as there are cores; raises if there is no baseline."""
    faults = list(faults)
    outcomes: dict[Fault, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        cases = Path(folder)
        write_cases(cases)
        limits = {}
        for killer in dict.fromkeys(fault.killer for fault in faults):
            unchanged, seconds = try_unchanged(killer, cases)
            if unchanged.verdict == BROKEN:
                raise SystemExit(f"{killer}: the sources without a fault fail: {unchanged.reason}")
            if unchanged.verdict == NOT_RUN:
                outcomes |= {fault: unchanged for fault in faults if fault.killer == killer}
            # Enough for a machine that is busier than it was just now; a hang takes this long.
            limits[killer] = max(30.0, 5 * seconds)
        waiting = [fault for fault in faults if fault not in outcomes]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            results = pool.map(lambda f: try_fault(f, cases, limits[f.killer]), waiting)
            for fault, outcome in zip(waiting, results, strict=True):
                outcomes[fault] = outcome
                report(fault, outcome)
    return outcomes


def report(fault: Fault, outcome: Outcome) -> None:
    where = f"{Path(fault.file).name}: {fault.name}"
    print(f"{outcome.verdict:8}  {where:62}  {outcome.reason}", flush=True)


def main(names: list[str]) -> int:
    chosen = [
        fault
        for fault in FAULTS
        if not names or any(name in f"{fault.file}: {fault.name}" for name in names)
    ]
    if not chosen:
        print(f"no fault matches {names}", file=sys.stderr)
        return 2
    outcomes = run(chosen)
    counts = Counter(outcome.verdict for outcome in outcomes.values())
    print(
        f"{counts[KILLED]} killed, {counts[SURVIVED]} survived, {counts[BROKEN]} broken, "
        f"{counts[NOT_RUN]} not run"
    )
    for reason in {o.reason for o in outcomes.values() if o.verdict == NOT_RUN}:
        print(f"not run: faults in CUDA code, {reason}")
    return 1 if counts[SURVIVED] or counts[BROKEN] else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
