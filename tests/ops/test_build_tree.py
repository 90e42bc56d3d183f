"""build_tree: against the reference, which tests/reference checks, and the invariants."""

import invariants
import numpy as np
import ops_support as support
import pytest
import random_cases
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kdtree_sglang import ops, reference

seeds = st.integers(0, 2**32 - 1)
styles = st.sampled_from(random_cases.LOG_PROB_STYLES)


def run_poisoned(device: str, case, budget: int) -> ops.Tree:
    args = support.put(device, *case)
    out = ops.empty_tree(case[0].shape[0], budget, device)
    for tensor in out:
        support.poison(tensor)
    ops.build_tree_out(*args, budget, out)
    return out


def assert_same_tree(expected, got: ops.Tree) -> None:
    for name, want, have in zip(expected._fields, expected, got, strict=True):
        support.assert_same(name, want, have)


@settings(max_examples=120, deadline=None)
@given(
    seeds,
    styles,
    st.integers(1, 64),
    st.integers(1, 15),
    st.integers(1, 127),
    st.integers(1, 127),
)
@example(0, "smooth", 1, 15, 127, 127)
@example(1, "equal", 3, 15, 127, 127)
@example(2, "ties", 2, 15, 64, 64)
@example(3, "ties", 2, 7, 32, 32)
@example(4, "equal", 2, 15, 1, 127)
@example(5, "few", 64, 1, 1, 1)
@example(6, "special", 17, 12, 37, 65)
def test_op_equals_reference(device, seed, style, bs, levels, k, budget):
    # Large batches of large trees only cost time; the reference is Python.
    bs = max(1, min(bs, 2000 // budget))
    case = random_cases.tree_case(np.random.default_rng(seed), style, bs, levels, k)
    expected = reference.build_tree(*case, budget)
    assert_same_tree(expected, run_poisoned(device, case, budget))


@pytest.mark.parametrize("seed", range(4))
def test_op_rounds_as_the_reference(device, seed):
    """256 trees, a few of which come out otherwise if the sums are written in another order."""
    case = random_cases.tree_case(np.random.default_rng(seed), "wide", 64, 10, 40)
    assert_same_tree(reference.build_tree(*case, 80), run_poisoned(device, case, 80))


def test_op_equals_reference_at_batch_64(device):
    case = random_cases.tree_case(np.random.default_rng(64), "ties", 64, 7, 63)
    expected = reference.build_tree(*case, 63)
    assert_same_tree(expected, run_poisoned(device, case, 63))
    assert_same_tree(expected, ops.build_tree(*support.put(device, *case), 63))


@pytest.mark.parametrize("first", [np.nan, np.inf, -np.inf])
def test_root_alone_when_no_candidate_is_finite(device, first):
    ids, lp, root, prefix = random_cases.tree_case(np.random.default_rng(0), "smooth", 2, 3, 4)
    lp[1, 0, 0] = first
    tree = run_poisoned(device, (ids, lp, root, prefix), 5)
    assert_same_tree(reference.build_tree(ids, lp, root, prefix, 5), tree)
    assert tree.num_nodes.tolist()[1] == 1
    assert not any(tensor.isnan().any() for tensor in tree if tensor.is_floating_point())


def test_zero_log_probs_of_both_signs_tie(device):
    """-0.0 and 0.0 are one key, so the rank path decides; log_mass keeps the sign of its sum."""
    rng = np.random.default_rng(5)
    ids, _, root, prefix = random_cases.tree_case(rng, "smooth", 8, 4, 5)
    lp = rng.choice(np.array([-0.0, 0.0], np.float32), (8, 4, 5))
    tree = run_poisoned(device, (ids, lp, root, prefix), 60)
    assert_same_tree(reference.build_tree(ids, lp, root, prefix, 60), tree)


def test_huge_log_probs_stay_ordered(device):
    rng = np.random.default_rng(6)
    ids, lp, root, prefix = random_cases.tree_case(rng, "smooth", 4, 15, 9)
    lp *= np.float32(1e37)
    tree = run_poisoned(device, (ids, lp, root, prefix), 100)
    assert_same_tree(reference.build_tree(ids, lp, root, prefix, 100), tree)


@settings(max_examples=60, deadline=None)
@given(seeds, styles, st.integers(1, 15), st.integers(1, 127), st.integers(1, 127))
def test_invariants(device, seed, style, levels, k, budget):
    case = random_cases.tree_case(np.random.default_rng(seed), style, 2, levels, k)
    tree = ops.Tree(*(tensor.cpu().numpy() for tensor in run_poisoned(device, case, budget)))
    invariants.check_tree(tree, *case, budget)


def test_is_deterministic_and_leaves_inputs_alone(device):
    case = random_cases.tree_case(np.random.default_rng(9), "ties", 5, 8, 40)
    args = support.put(device, *case)
    first = ops.build_tree(*args, 50)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, ops.build_tree(*args, 50), strict=True))
    for array, tensor in zip(case, args, strict=True):
        support.assert_same("input", array, tensor)


def test_empty_batch(device):
    case = random_cases.tree_case(np.random.default_rng(9), "ties", 0, 8, 40)
    tree = ops.build_tree(*support.put(device, *case), 9)
    assert tree.tokens.shape == (0, 10)


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("budget", {"budget": 0}),
        ("budget", {"budget": 128}),
        ("log_probs", {"log_probs": torch.zeros(2, 3, 4, dtype=torch.float64)}),
        ("log_probs", {"log_probs": torch.zeros(2, 3, 5)}),
        ("log_probs", {"log_probs": torch.zeros(2, 4, 3).transpose(1, 2)}),
        ("ids", {"ids": torch.zeros(2, 3, 4, dtype=torch.int32)}),
        ("ids", {"ids": torch.zeros(2, 12, dtype=torch.int64)}),
        ("root", {"root": torch.zeros(3, dtype=torch.int64)}),
        ("prefix_lens", {"prefix_lens": torch.zeros(2, dtype=torch.int32)}),
        ("ids.*K", {"ids": torch.zeros(2, 3, 128, dtype=torch.int64)}),
        ("ids.*L", {"ids": torch.zeros(2, 16, 4, dtype=torch.int64)}),
    ],
)
def test_errors_name_the_argument(device, named, changes):
    args = {
        "ids": torch.zeros(2, 3, 4, dtype=torch.int64),
        "log_probs": torch.zeros(2, 3, 4),
        "root": torch.zeros(2, dtype=torch.int64),
        "prefix_lens": torch.zeros(2, dtype=torch.int64),
        "budget": 5,
    } | changes
    args = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    with pytest.raises(RuntimeError, match=rf"kdtree: `.*{named}"):
        ops.build_tree(**args)


@pytest.mark.parametrize("field", ops.Tree._fields)
def test_out_is_checked(device, field):
    case = random_cases.tree_case(np.random.default_rng(9), "ties", 2, 3, 4)
    out = ops.empty_tree(2, 5, device)
    wrong = getattr(out, field)[:1]
    with pytest.raises(RuntimeError, match=f"`{field}`"):
        ops.build_tree_out(*support.put(device, *case), 5, out._replace(**{field: wrong}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_replays_in_a_graph_with_accept_tree():
    """Captured once, replayed on other inputs: no host round trip, no state from the last tree."""
    rng = np.random.default_rng(11)
    args = support.put("cuda", *random_cases.tree_case(rng, "smooth", 3, 7, 20))
    tree = ops.empty_tree(3, 33, "cuda")
    accepted = ops.empty_acceptance(3, 7, "cuda")
    predictions = torch.zeros((3, 34), dtype=torch.int64, device="cuda")
    ops.load()

    def step():
        ops.build_tree_out(*args, 33, tree)
        ops.accept_tree_out(
            tree.tokens, tree.next_token, tree.next_sibling, tree.num_nodes, predictions, args[3],
            7, accepted,
        )

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for style in random_cases.LOG_PROB_STYLES:
        case = random_cases.tree_case(rng, style, 3, 7, 20)
        guesses = rng.integers(0, 23, (3, 34))
        for tensor, array in zip([*args, predictions], [*case, guesses], strict=True):
            tensor.copy_(torch.from_numpy(array))
        graph.replay()
        expected = reference.build_tree(*case, 33)
        assert_same_tree(expected, tree)
        walk = reference.accept_tree(
            expected.tokens, expected.next_token, expected.next_sibling, expected.num_nodes,
            guesses, case[3], 7,
        )
        for name, want, have in zip(walk._fields, walk, accepted, strict=True):
            support.assert_same(name, want, have)
