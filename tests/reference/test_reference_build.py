"""build_tree's reference against the published loop and against enumerations of all paths."""

import heapq
import itertools
import math

import invariants
import numpy as np
import pytest
import random_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_sglang import reference
from kdtree_sglang.reference.build_tree import best_first

seeds = st.integers(0, 2**32 - 1)
styles = st.sampled_from(random_cases.LOG_PROB_STYLES)


def published_loop(lp: np.ndarray, budget: int):
    """The published loop from its description: one item holds (-w, ranks, parent, depth, rank, w).

    Its queue takes -inf and NaN; the difference the contract makes, that these never enter, is the
    one line in `offer`.
    """
    levels, k = lp.shape
    lp = [[float(x) for x in row] for row in lp]
    heap: list[tuple] = []
    nodes = []

    def offer(item):
        if math.isfinite(lp[item[3] - 1][item[4]]):
            heapq.heappush(heap, item)

    offer((-lp[0][0], (0,), 0, 1, 0, lp[0][0]))
    while heap and len(nodes) < budget:
        _, ranks, parent, depth, rank, w = heapq.heappop(heap)
        number = len(nodes) + 1
        nodes.append((w, ranks, parent))
        if rank + 1 < k:
            key = w - lp[depth - 1][rank] + lp[depth - 1][rank + 1]
            offer((-key, ranks[:-1] + (rank + 1,), parent, depth, rank + 1, key))
        if depth < levels:
            key = w + lp[depth][0]
            offer((-key, ranks + (0,), number, depth + 1, 0, key))
    return nodes


def keys_of_all_paths(lp: np.ndarray) -> dict[tuple[int, ...], float]:
    """The key of every path that may enter, by the published rule alone.

    A first child's comes from its parent's, another's from its elder brother's. What is not finite
    and what comes after it in its row has no key.
    """
    levels, k = lp.shape
    row = [[float(x) for x in values] for values in lp]
    keys: dict[tuple[int, ...], float] = {}
    for depth in range(1, levels + 1):
        for path in itertools.product(range(k), repeat=depth):
            above, rank = path[:-1], path[-1]
            if not math.isfinite(row[depth - 1][rank]):
                continue
            if rank > 0:
                elder = (*above, rank - 1)
                if elder in keys:
                    keys[path] = (keys[elder] - row[depth - 1][rank - 1]) + row[depth - 1][rank]
            elif depth == 1:
                keys[path] = row[0][0]
            elif above in keys:
                keys[path] = keys[above] + row[depth - 1][0]
    return keys


def sorted_paths(lp: np.ndarray):
    """All paths sorted by (-key, path), with the place of each one's parent."""
    keys = keys_of_all_paths(lp)
    order = sorted(keys, key=lambda path: (-keys[path], path))
    place = {(): 0} | {path: i for i, path in enumerate(order, start=1)}
    return [(keys[path], path, place[path[:-1]]) for path in order]


def never_rises(lp: np.ndarray) -> bool:
    """Whether no key exceeds the one it comes from, so that the sorted order is a pop order.

    Log-probabilities that are sorted have this but for the rounding of doubles.
    """
    keys = keys_of_all_paths(lp)
    return all(
        keys[path] <= keys[(*path[:-1], path[-1] - 1) if path[-1] else path[:-1]]
        for path in keys
        if path != (0,)
    )


def picked_one_by_one(lp: np.ndarray, budget: int):
    """Best-first without a queue: again and again the best path whose elders are all chosen."""
    keys = keys_of_all_paths(lp)
    chosen: dict[tuple[int, ...], int] = {(): 0}
    order = []
    while len(order) < budget:
        open_paths = [
            path
            for path in keys
            if path not in chosen
            and path[:-1] in chosen
            and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in chosen)
        ]
        if not open_paths:
            break
        best = min(open_paths, key=lambda path: (-keys[path], path))
        order.append((keys[best], best, chosen[best[:-1]]))
        chosen[best] = len(order)
    return order


@pytest.mark.parametrize(("levels", "k"), [(1, 4), (2, 3), (3, 2)])
def test_every_small_case_is_all_paths_sorted(levels, k):
    """Every choice of sorted rows from four values, every path, and so every budget."""
    # -0.25 and -0.5 make exact ties, -0.3 sums that round, -inf trees that end early.
    rows = itertools.combinations_with_replacement([-0.25, -0.3, -0.5, -np.inf], k)
    compared = 0
    for case in itertools.product(list(rows), repeat=levels):
        lp = np.array(case, np.float32)
        if never_rises(lp):
            expected = sorted_paths(lp)
            assert best_first(lp, 1000) == expected
            assert best_first(lp, len(expected) // 2) == expected[: len(expected) // 2]
            compared += 1
    assert compared > 0.9 * math.comb(k + 3, k) ** levels


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from(["smooth", "ties", "equal", "few"]), st.integers(1, 4),
       st.integers(1, 5))
def test_drawn_cases_are_all_paths_sorted(seed, style, levels, k):
    lp = random_cases.log_probs(np.random.default_rng(seed), style, 1, levels, k)[0]
    if never_rises(lp):
        assert best_first(lp, 1000) == sorted_paths(lp)


@settings(max_examples=80, deadline=None)
@given(seeds, styles, st.integers(1, 3), st.integers(1, 4), st.integers(1, 40))
def test_best_first_over_all_paths_also_where_keys_rise(seed, style, levels, k, budget):
    lp = random_cases.log_probs(np.random.default_rng(seed), style, 1, levels, k)[0]
    assert best_first(lp, budget) == picked_one_by_one(lp, budget)


@settings(max_examples=150, deadline=None)
@given(seeds, styles, st.integers(1, 15), st.integers(1, 127), st.integers(1, 127))
def test_follows_the_published_loop(seed, style, levels, k, budget):
    lp = random_cases.log_probs(np.random.default_rng(seed), style, 1, levels, k)[0]
    assert best_first(lp, budget) == published_loop(lp, budget)


@pytest.mark.parametrize("seed", range(2))
def test_rounds_as_the_published_loop(seed):
    """64 trees, a few of which come out otherwise if the sums are written in another order."""
    for lp in random_cases.log_probs(np.random.default_rng(seed), "wide", 64, 10, 40):
        assert best_first(lp, 80) == published_loop(lp, 80)


@settings(max_examples=80, deadline=None)
@given(seeds, styles, st.integers(1, 15), st.integers(1, 127), st.integers(1, 127))
def test_invariants(seed, style, levels, k, budget):
    case = random_cases.tree_case(np.random.default_rng(seed), style, 2, levels, k)
    invariants.check_tree(reference.build_tree(*case, budget), *case, budget)


def test_invariants_see_each_broken_field():
    """An invariant that holds of everything would be worth nothing."""
    case = random_cases.tree_case(np.random.default_rng(1), "smooth", 1, 4, 8)
    tree = reference.build_tree(*case, 20)
    invariants.check_tree(tree, *case, 20)
    for field in tree._fields:
        for node in (0, 7, 20):
            broken = getattr(tree, field).copy()
            broken.reshape(-1)[min(node * broken.size // 21, broken.size - 1)] += 1
            with pytest.raises((AssertionError, IndexError)):
                invariants.check_tree(tree._replace(**{field: broken}), *case, 20)
