"""`kdtree-sglang kdtr`: lists, shows and compares KDTR files.

Exit status: 0; 1 where `diff` finds a difference; 2 for a file that cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kdtree_sglang import kdtr

_PIECE = 1 << 20  # elements that are worked on at once, so that large tensors need no large copies


class Comparison(NamedTuple):
    """How two tensors of one type and shape differ.

    Attributes:
        max_abs: greatest |expected - actual|; infinite where a NaN or an infinity meets another
            value. NaN equals NaN.
        max_rel: greatest |expected - actual| / |expected|; infinite also where a zero is expected.
        outside: elements that differ by more than the tolerance.
        first: flat index of the first of these, or None.
    """

    max_abs: float
    max_rel: float
    outside: int
    first: int | None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kdtree-sglang kdtr",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("ls", help="name, type, shape and bytes of each tensor")
    command.add_argument("files", metavar="FILE", nargs="+")
    command.set_defaults(run=_ls)

    command = commands.add_parser("show", help="values and statistics of tensors")
    command.add_argument("file", metavar="FILE")
    command.add_argument("names", metavar="NAME", nargs="*", help="tensors (default: all)")
    command.set_defaults(run=_show)

    command = commands.add_parser(
        "diff",
        help="compare the values of two files",
        description="Tensors are matched by name. Values differ where |expected - actual| > "
        "atol + rtol * |expected|; NaN equals NaN.",
    )
    command.add_argument("expected", metavar="EXPECTED")
    command.add_argument("actual", metavar="ACTUAL")
    command.add_argument("--atol", type=float, default=0.0, help="absolute tolerance (default 0)")
    command.add_argument("--rtol", type=float, default=0.0, help="relative tolerance (default 0)")
    command.set_defaults(run=_diff)

    options = parser.parse_args(argv)
    try:
        return options.run(options)
    except (kdtr.KdtrError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def _ls(options: argparse.Namespace) -> int:
    for path in options.files:
        tensors = kdtr.read(path)
        if len(options.files) > 1:
            print(f"{path}:")
        width = max(map(len, tensors), default=0)
        for name, array in tensors.items():
            print(f"{name:{width}}  {_kind(array):20}  {array.nbytes} bytes")
    return 0


def _show(options: argparse.Namespace) -> int:
    tensors = kdtr.read(options.file)
    for name in options.names or tensors:
        if name not in tensors:
            raise kdtr.KdtrError(f"{options.file}: no tensor '{name}'")
        array = tensors[name]
        print(f"{name}  {_kind(array)}  {_statistics(array)}\n{array}")
    return 0


def _diff(options: argparse.Namespace) -> int:
    expected, actual = kdtr.read(options.expected), kdtr.read(options.actual)
    width = max(map(len, expected | actual), default=0)
    status = 0
    for name in expected | actual:
        if name not in actual:
            verdict, differs = f"only in {options.expected}", True
        elif name not in expected:
            verdict, differs = f"only in {options.actual}", True
        else:
            verdict, differs = _verdict(expected[name], actual[name], options.atol, options.rtol)
        print(f"{name:{width}}  {verdict}")
        status |= differs
    return status


def _verdict(
    expected: np.ndarray, actual: np.ndarray, atol: float, rtol: float
) -> tuple[str, bool]:
    """What to print of two tensors of a name, and whether it is a difference."""
    kind = _kind(expected)
    if kind != _kind(actual):
        return f"{kind} against {_kind(actual)}", True
    found = compare(expected, actual, atol, rtol)
    errors = f"max abs {found.max_abs:.3g}, max rel {found.max_rel:.3g}"
    if found.first is not None:
        index = tuple(map(int, np.unravel_index(found.first, expected.shape)))
        return (
            f"{kind}  {found.outside} of {expected.size} differ, {errors}, first at "
            f"{list(index)}: {expected[index]} against {actual[index]}",
            True,
        )
    return f"{kind}  {f'within tolerance, {errors}' if found.max_abs else 'equal'}", False


def compare(expected: np.ndarray, actual: np.ndarray, atol: float, rtol: float) -> Comparison:
    """Compares two arrays of one type and shape; see Comparison."""
    max_abs = max_rel = 0.0
    outside = 0
    first = None
    for begin, e, a in _pieces(expected, actual):
        unequal = np.flatnonzero((e != a) & ((e == e) | (a == a)))
        # 64 bits of mantissa: neighbouring 64-bit integers stay apart.
        x, y = e[unequal].astype(np.longdouble), a[unequal].astype(np.longdouble)
        with np.errstate(all="ignore"):
            error = np.nan_to_num(np.abs(x - y), nan=np.inf, posinf=np.inf)
            relative = np.nan_to_num(error / np.abs(x), nan=np.inf, posinf=np.inf)
            inside = np.isfinite(error) & (error <= atol + rtol * np.abs(x))
        max_abs = max(max_abs, float(error.max(initial=0)))
        max_rel = max(max_rel, float(relative.max(initial=0)))
        wrong = unequal[~inside]
        outside += wrong.size
        if first is None and wrong.size:
            first = begin + int(wrong[0])
    return Comparison(max_abs, max_rel, outside, first)


def _statistics(array: np.ndarray) -> str:
    """Of the finite values: least, greatest and mean; and how many are not finite."""
    if array.dtype == np.bool_:
        return f"{np.count_nonzero(array)} of {array.size} true"
    least, greatest, total, count, nan, infinite = np.inf, -np.inf, 0.0, 0, 0, 0
    for _, values in _pieces(array):
        wide = values.astype(np.longdouble)
        finite = wide[np.isfinite(wide)]
        nan += np.count_nonzero(np.isnan(wide))
        infinite += np.count_nonzero(np.isinf(wide))
        least = min(least, finite.min(initial=np.inf))
        greatest = max(greatest, finite.max(initial=-np.inf))
        total += finite.sum()
        count += finite.size
    parts = []
    if count:
        show = int if array.dtype.kind in "iu" else "{:.6g}".format
        parts.append(f"min {show(least)}, max {show(greatest)}, mean {total / count:.6g}")
    parts += [f"{number} {kind}" for number, kind in ((nan, "NaN"), (infinite, "inf")) if number]
    return ", ".join(parts) or "no values"


def _pieces(*arrays: np.ndarray) -> Iterator[tuple]:
    """(begin, slice of each array) over the flat arrays, which have one size."""
    flat = [array.reshape(-1) for array in arrays]
    for begin in range(0, flat[0].size, _PIECE):
        yield begin, *(array[begin : begin + _PIECE] for array in flat)


def _kind(array: np.ndarray) -> str:
    return f"{kdtr.code_of(array.dtype)} {list(array.shape)}"


if __name__ == "__main__":
    raise SystemExit(main())
