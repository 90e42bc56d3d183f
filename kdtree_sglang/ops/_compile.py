"""Compiles the extension; run as a script in a process of its own by `_extension`.

A child process keeps the compiler's output in one stream that can be logged and quoted, and proves
that the library loads before it is published. The only argument is a JSON object with the arguments
of `torch.utils.cpp_extension.load`.
"""

import json
import sys
from pathlib import Path

import torch  # noqa: F401  (loads the CUDA runtime that _lend_runtime looks for)
from torch.utils import cpp_extension


def _lend_runtime(build_directory: Path) -> list[str]:
    """Linker flags for a toolkit without the CUDA runtime, as one installed by pip is.

    The runtime that torch itself loaded is the one the library will meet at run time; it only lacks
    the unversioned name that the linker looks for.
    """
    home = Path(cpp_extension.CUDA_HOME or "")
    if any((home / folder / "libcudart.so").exists() for folder in ("lib64", "lib")):
        return []
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.rpartition(" ")[2])
        if path.name.startswith("libcudart.so"):
            (build_directory / "libcudart.so").symlink_to(path)
            return [f"-L{build_directory}"]
    return []


def main() -> int:
    arguments = json.loads(sys.argv[1])
    if arguments["with_cuda"]:
        arguments["extra_ldflags"] += _lend_runtime(Path(arguments["build_directory"]))
    try:
        cpp_extension.load(**arguments, is_python_module=False, verbose=True)
    except (RuntimeError, OSError) as error:
        # ninja has printed the compiler's words; a traceback through torch would only bury them.
        print(f"{type(error).__name__}: {error}")
        if error.__cause__ is not None:
            print(f"{type(error.__cause__).__name__}: {error.__cause__}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
