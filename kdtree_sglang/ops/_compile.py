"""Compiles the extension; run as a script in a process of its own by `_extension`.

A child process keeps the compiler's output in one stream that can be logged and quoted, and proves
that the library loads before it is published. The only argument is a JSON object with the arguments
of `torch.utils.cpp_extension.load`.
"""

import json
import sys

from torch.utils import cpp_extension


def main() -> int:
    arguments = json.loads(sys.argv[1])
    try:
        cpp_extension.load(**arguments, is_python_module=False, verbose=True)
    except (RuntimeError, OSError) as error:
        # ninja has printed the compiler's words; a traceback through torch would only bury them.
        print(f"{type(error).__name__}: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
