"""A few seconds of the fuzzers (`make fuzz` runs a million executions), and both readers on the
same damaged files."""

import random
import subprocess
import sys
from pathlib import Path

from kdtr_support import SEEDS, cpp_verdicts, damaged, file_bytes, python_verdict

EXECUTIONS = "20000"


def test_the_cpp_reader_survives_damage(kdtr_fuzz: Path) -> None:
    done = subprocess.run([kdtr_fuzz, EXECUTIONS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"C++ reader: {EXECUTIONS} executions, ")


def test_the_python_reader_survives_damage() -> None:
    command = [sys.executable, Path(__file__).with_name("fuzz_python.py"), EXECUTIONS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Python reader: {EXECUTIONS} executions, ")


def test_both_readers_say_the_same(kdtr_verdicts: Path) -> None:
    rng = random.Random(3)
    seeds = [file_bytes(tensors) for tensors in SEEDS]
    files = [damaged(rng, rng.choice(seeds)) for _ in range(20_000)]
    verdicts = [python_verdict(file) for file in files]
    assert cpp_verdicts(kdtr_verdicts, files) == verdicts
    # Damage that happens to make other sound files, too: their tensors are compared.
    sound = {verdict for verdict in verdicts if verdict.startswith("ok")}
    assert len(sound) > 100
