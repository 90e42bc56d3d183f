"""accept_tree: against the reference and the invariants, and on malformed links."""

import invariants
import numpy as np
import ops_support as support
import pytest
import random_cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_sglang import ops, reference

seeds = st.integers(0, 2**32 - 1)


def run_poisoned(device: str, arrays, max_depth: int) -> ops.Acceptance:
    out = ops.empty_acceptance(arrays[0].shape[0], max_depth, device)
    for tensor in out:
        support.poison(tensor)
    ops.accept_tree_out(*support.put(device, *arrays), max_depth, out)
    return out


def assert_equals_reference(device: str, arrays, max_depth: int) -> ops.Acceptance:
    expected = reference.accept_tree(*arrays, max_depth)
    got = run_poisoned(device, arrays, max_depth)
    for name, want, have in zip(expected._fields, expected, got, strict=True):
        support.assert_same(name, want, have)
    return got


def case_with_predictions(rng, style, bs, levels, k, budget):
    """A built tree and predictions that follow it for a random stretch."""
    case = random_cases.tree_case(rng, style, bs, levels, k)
    tree = reference.build_tree(*case, budget)
    return tree, random_cases.followed_predictions(rng, tree, k), case[3]


@settings(max_examples=80, deadline=None)
@given(
    seeds,
    st.sampled_from(random_cases.LOG_PROB_STYLES),
    st.integers(1, 16),
    st.integers(1, 15),
    st.integers(1, 40),
    st.integers(1, 127),
)
def test_equals_reference(device, seed, style, bs, levels, k, budget):
    rng = np.random.default_rng(seed)
    bs = min(bs, max(1, 500 // budget))
    tree, predictions, prefix = case_with_predictions(rng, style, bs, levels, k, budget)
    arrays = (tree.tokens, tree.next_token, tree.next_sibling, tree.num_nodes, predictions, prefix)
    got = assert_equals_reference(device, arrays, levels)
    got = ops.Acceptance(*(tensor.cpu().numpy() for tensor in got))
    invariants.check_acceptance(got, *arrays, levels)


@settings(max_examples=100, deadline=None)
@given(seeds, st.integers(1, 8), st.integers(1, 128), st.integers(0, 20))
def test_malformed_links_are_safe(device, seed, bs, n, max_depth):
    rng = np.random.default_rng(seed)
    span = int(rng.choice([2, n + 5, 2**31 - 1]))
    links = rng.integers(-span, span, (2, bs, n)).astype(np.int32)
    arrays = (
        rng.integers(0, 2, (bs, n)),
        links[0],
        links[1],
        rng.integers(-3, n + 5, bs).astype(np.int32),
        rng.integers(0, 2, (bs, n)),
        rng.integers(0, 1000, bs),
    )
    got = assert_equals_reference(device, arrays, max_depth)
    for b in range(bs):
        length = got.accept_len[b].item()
        path = got.path[b].tolist()[: length + 1]
        assert all(a < b for a, b in zip(path, path[1:], strict=False))
        assert all(j <= node < n for j, node in enumerate(path))


@pytest.mark.parametrize(
    ("next_token", "next_sibling", "length"),
    [
        ([1, -1, -1, -1], [-1, 1, -1, -1], 0),  # a brother that is itself
        ([0, -1, -1, -1], [-1, -1, -1, -1], 0),  # a root that is its own child
        ([2, -1, 2, -1], [-1, -1, 3, 2], 0),  # two brothers in a ring
        ([1, 0, -1, -1], [-1, -1, -1, -1], 1),  # a child that leads back to the root
        ([4, -1, -1, -1], [-1, -1, -1, -1], 0),  # outside the row
    ],
)
def test_rings_end_the_walk(device, next_token, next_sibling, length):
    # Token 7 is wanted everywhere; node 1 alone carries it.
    arrays = (
        np.array([[7, 7 if length else 5, 5, 5]]),
        np.array([next_token], np.int32),
        np.array([next_sibling], np.int32),
        np.array([4], np.int32),
        np.full((1, 4), 7),
        np.array([10]),
    )
    assert assert_equals_reference(device, arrays, 6).accept_len.tolist() == [length]


def test_depth_bounds_the_walk(device):
    chain = np.arange(1, 9, dtype=np.int32)[None]
    arrays = (
        np.zeros((1, 8), np.int64),
        np.where(chain < 8, chain, -1).astype(np.int32),
        np.full((1, 8), -1, np.int32),
        np.array([8], np.int32),
        np.zeros((1, 8), np.int64),
        np.array([0]),
    )
    assert assert_equals_reference(device, arrays, 3).path.tolist() == [[0, 1, 2, 3]]
    assert assert_equals_reference(device, arrays, 0).path.tolist() == [[0]]
    assert assert_equals_reference(device, arrays, 20).accept_len.tolist() == [7]


def test_functional_form(device):
    rng = np.random.default_rng(3)
    tree, predictions, prefix = case_with_predictions(rng, "ties", 4, 7, 9, 30)
    links = (tree.tokens, tree.next_token, tree.next_sibling, tree.num_nodes, predictions, prefix)
    expected = reference.accept_tree(*links, 7)
    got = ops.accept_tree(*support.put(device, *links), 7)
    for name, want, have in zip(expected._fields, expected, got, strict=True):
        support.assert_same(name, want, have)


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("max_depth", {"max_depth": -1}),
        ("max_depth", {"max_depth": 128}),
        ("next_token", {"next_token": torch.zeros(2, 5, dtype=torch.int64)}),
        ("next_sibling", {"next_sibling": torch.zeros(2, 4, dtype=torch.int32)}),
        ("num_nodes", {"num_nodes": torch.zeros(1, dtype=torch.int32)}),
        ("predictions", {"predictions": torch.zeros(2, 6, dtype=torch.int64)}),
        ("predictions", {"predictions": torch.zeros(5, 2, dtype=torch.int64).t()}),
        ("prefix_lens", {"prefix_lens": torch.zeros(2, dtype=torch.int32)}),
    ],
)
def test_errors_name_the_argument(device, named, changes):
    args = {
        "tokens": torch.zeros(2, 5, dtype=torch.int64),
        "next_token": torch.zeros(2, 5, dtype=torch.int32),
        "next_sibling": torch.zeros(2, 5, dtype=torch.int32),
        "num_nodes": torch.zeros(2, dtype=torch.int32),
        "predictions": torch.zeros(2, 5, dtype=torch.int64),
        "prefix_lens": torch.zeros(2, dtype=torch.int64),
        "max_depth": 4,
    } | changes
    args = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    with pytest.raises(RuntimeError, match=f"kdtree: `.*{named}"):
        ops.accept_tree(**args)
