"""Gives the Python reader damaged files and checks that it refuses them with a KdtrError, or that
what it accepts is sound. Deterministic: the same seed makes the same files.

    python tests/kdtr/fuzz_python.py EXECUTIONS [SEED]

Prints how often each field was refused. Fails where something is wrong, and where many executions
have left a check unreached.
"""

import random
import re
import resource
import signal
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from kdtr_support import FIELDS, SEEDS, damaged, file_bytes

from kdtree_sglang import kdtr

REACHED_AFTER = 100_000
_FIELD = re.compile(rf": ({'|'.join(FIELDS)}): ")


def check_sound(file: bytes, tensors: dict[str, np.ndarray], rewrite: bool) -> None:
    """What is accepted can be read, cannot be written through, and makes the same file."""
    for name, array in tensors.items():
        assert array.dtype in kdtr.DTYPES.values() and not array.flags.writeable, name
        assert len(array.tobytes()) == array.nbytes, name
    if rewrite:
        assert file_bytes(tensors) == file, "an accepted file is not what its tensors make"


def main() -> int:
    executions = int(sys.argv[1])
    rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    seeds = [file_bytes(tensors) for tensors in SEEDS]
    # The files are small: much memory comes from a count that nobody checked.
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**28, in_use + 2**28))

    refused: Counter[str] = Counter()
    accepted = 0
    for execution in range(executions):
        if execution % 1000 == 0:
            signal.alarm(60)  # ends an endless loop
        file = damaged(rng, rng.choice(seeds))
        verify = rng.random() < 7 / 8
        try:
            tensors = kdtr.parse(file, "input", verify)
        except kdtr.KdtrError as error:
            refused[_FIELD.search(str(error))[1]] += 1
        except BaseException:
            print(f"execution {execution}: {file.hex()}", file=sys.stderr)
            raise
        else:
            accepted += verify
            check_sound(file, tensors, rewrite=verify and accepted % 64 == 0)

    fields = " ".join(f"{field} {count}" for field, count in sorted(refused.items()))
    print(
        f"Python reader: {executions} executions, {accepted} accepted, refused by field: {fields}"
    )
    if executions >= REACHED_AFTER:
        assert accepted and set(refused) == set(FIELDS), "a check was not reached"
    return 0


if __name__ == "__main__":
    sys.exit(main())
