"""tree_mask: against the reference, with every other cell poisoned."""

import numpy as np
import ops_support as support
import pytest
import random_cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_sglang import ops, reference


def random_ancestors(rng: np.random.Generator, bs: int, n: int) -> np.ndarray:
    case = random_cases.tree_case(rng, "ties", bs, 7, 20)
    return reference.build_tree(*case, n - 1).ancestors


def assert_equals_reference(device, ancestors, prefix, size, indptr, write_prefix, dtype):
    fill = True if dtype == torch.bool else 0x5A
    for poison in (fill, False) if dtype == torch.bool else (fill,):
        mask = torch.full((size,), poison, dtype=dtype)
        expected = mask.numpy().copy()
        reference.tree_mask(ancestors, prefix, expected, indptr, write_prefix)
        got = mask.to(device)
        ops.tree_mask(
            *support.put(device, ancestors, prefix), got, *support.put(device, indptr), write_prefix
        )
        support.assert_same("mask", expected, got)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 6),
    st.integers(2, 128),
    st.booleans(),
    st.sampled_from([torch.bool, torch.uint8]),
)
def test_equals_reference(device, seed, bs, n, write_prefix, dtype):
    rng = np.random.default_rng(seed)
    ancestors = random_ancestors(rng, bs, n)
    prefix = rng.integers(0, 60, bs)
    indptr = np.concatenate([[0], np.cumsum(n * (prefix + n))]) + 3
    size = int(indptr[-1]) + 7
    assert_equals_reference(device, ancestors, prefix, size, indptr, write_prefix, dtype)


@pytest.mark.parametrize("write_prefix", [False, True])
@pytest.mark.parametrize(
    ("prefix", "indptr", "size"),
    [
        ([4, 9], [0, 40, 200], 30),  # blocks past the end
        ([4, 9], [-17, 2**62, 0], 200),  # blocks far outside
        # Prefix lengths that make no sense. No two blocks meet in the mask: who wins is undefined.
        ([-3, 2**40], [0, 64, 0], 150),
        ([2**63 - 1, -(2**63)], [40, -24, 0], 150),
        ([2**62, 2**48 + 1], [-(2**63), 2**63 - 1, 0], 150),
        ([2**62, 2**48 + 1], [-(2**48), 200, 0], 150),
        ([2**48 + 1, 2**62], [200, -(2**48) - 100, 0], 150),
        ([4, 9], [0, 72, 208], 0),  # no mask at all
    ],
)
def test_never_writes_outside(device, write_prefix, prefix, indptr, size):
    rng = np.random.default_rng(1)
    ancestors = random_ancestors(rng, 2, 8)
    prefix, indptr = np.array(prefix), np.array(indptr)
    guard = 64
    whole = torch.full((size + 2 * guard,), 0x5A, dtype=torch.uint8)
    inner = whole.to(device)
    ops.tree_mask(
        *support.put(device, ancestors, prefix),
        inner[guard : guard + size],
        *support.put(device, indptr),
        write_prefix,
    )
    assert (inner[:guard] == 0x5A).all()
    assert (inner[guard + size :] == 0x5A).all()
    expected = whole.numpy().copy()[guard : guard + size]
    reference.tree_mask(ancestors, prefix, expected, indptr, write_prefix)
    support.assert_same("mask", expected, inner[guard : guard + size])


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("ancestors", {"ancestors": torch.zeros(2, 65, 1, dtype=torch.int64)}),
        ("prefix_lens", {"prefix_lens": torch.zeros(2, dtype=torch.int32)}),
        ("mask", {"mask": torch.zeros(100)}),
        ("mask", {"mask": torch.zeros(10, 10, dtype=torch.bool)}),
        ("mask_indptr", {"mask_indptr": torch.zeros(2, dtype=torch.int64)}),
    ],
)
def test_errors_name_the_argument(device, named, changes):
    args = {
        "ancestors": torch.zeros(2, 5, 1, dtype=torch.int64),
        "prefix_lens": torch.zeros(2, dtype=torch.int64),
        "mask": torch.zeros(100, dtype=torch.bool),
        "mask_indptr": torch.zeros(3, dtype=torch.int64),
    } | changes
    with pytest.raises(RuntimeError, match=f"kdtree: `{named}"):
        ops.tree_mask(**{k: v.to(device) for k, v in args.items()}, write_prefix=True)
