"""`kdtree-sglang build`: compiles the ops ahead of time into the package's folder."""

import argparse
import sys
from pathlib import Path

from kdtree_sglang.ops import _extension


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kdtree-sglang build", description=__doc__)
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--cuda-archs",
        metavar="LIST",
        help="CUDA architectures as nvcc names them, e.g. 90a,120; needs no GPU "
        "(default: what this machine's GPUs need, or the CPU ops without one)",
    )
    target.add_argument("--cpu", action="store_true", help="only the CPU ops")
    parser.add_argument(
        "--dest",
        type=Path,
        default=_extension.PREBUILT_DIR,
        help="folder of the library (default: the package's own, where load() finds it)",
    )
    options = parser.parse_args(argv)

    if options.cpu:
        variant = _extension.Variant()
    elif options.cuda_archs:
        try:
            variant = _extension.Variant(_extension.parse_archs(options.cuda_archs))
        except ValueError as error:
            parser.error(str(error))
    else:
        variant = _extension.needed_variant()

    try:
        library = _extension.build(_extension.find_csrc(), variant, options.dest)
    except _extension.ExtensionBuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(library)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
