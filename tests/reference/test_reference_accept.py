"""accept_tree's reference against the published walk over one token map a node."""

import invariants
import numpy as np
import random_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_sglang import reference

seeds = st.integers(0, 2**32 - 1)


def published_walk(tree, b: int, predictions: np.ndarray) -> list[int]:
    """Nodes from the root while the current node's token has a child that carries it."""
    child_with: list[dict[int, int]] = [{} for _ in range(int(tree.num_nodes[b]))]
    for i in range(1, int(tree.num_nodes[b])):
        # A drafter's candidates differ; of brothers with one token the contract takes the first.
        child_with[tree.parents[b, i]].setdefault(int(tree.tokens[b, i]), i)
    walked = [0]
    while (wanted := int(predictions[b, walked[-1]])) in child_with[walked[-1]]:
        walked.append(child_with[walked[-1]][wanted])
    return walked


@settings(max_examples=100, deadline=None)
@given(
    seeds,
    st.sampled_from(random_cases.LOG_PROB_STYLES),
    st.integers(1, 15),
    st.integers(1, 40),
    st.integers(1, 127),
)
def test_follows_the_published_walk(seed, style, levels, k, budget):
    rng = np.random.default_rng(seed)
    case = random_cases.tree_case(rng, style, 3, levels, k)
    tree = reference.build_tree(*case, budget)
    predictions = random_cases.followed_predictions(rng, tree, k)
    links = (tree.tokens, tree.next_token, tree.next_sibling, tree.num_nodes)
    prefix = case[3]
    got = reference.accept_tree(*links, predictions, prefix, levels)
    invariants.check_acceptance(got, *links, predictions, prefix, levels)
    for b in range(3):
        walked = published_walk(tree, b, predictions)
        assert got.accept_len[b] == len(walked) - 1
        assert got.path[b, : len(walked)].tolist() == walked
        committed = [int(tree.tokens[b, i]) for i in walked[1:]]
        committed.append(int(predictions[b, walked[-1]]))
        assert got.out_tokens[b, : len(walked)].tolist() == committed


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 128), st.integers(0, 20))
def test_malformed_links_end_the_walk(seed, n, max_depth):
    rng = np.random.default_rng(seed)
    span = int(rng.choice([2, n + 5, 2**31 - 1]))
    links = rng.integers(-span, span, (2, 4, n)).astype(np.int32)
    num_nodes = rng.integers(-3, n + 5, 4).astype(np.int32)
    got = reference.accept_tree(
        np.zeros((4, n), np.int64), *links, num_nodes, np.zeros((4, n), np.int64),
        np.zeros(4, np.int64), max_depth,
    )
    for b in range(4):
        walked = got.path[b, : got.accept_len[b] + 1].tolist()
        assert all(j <= node < max(1, min(int(num_nodes[b]), n)) for j, node in enumerate(walked))
        assert all(a < b for a, b in zip(walked, walked[1:], strict=False))
