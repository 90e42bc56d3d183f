"""The references that pick and move rows: top-k, its merge, the mask, the gather, the KV moves."""

import invariants
import numpy as np
import random_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_sglang import reference

seeds = st.integers(0, 2**32 - 1)


def random_logits(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Many ties, NaN and infinities."""
    logits = np.round(rng.standard_normal((rows, vocab)) * 2).astype(np.float32)
    special = rng.choice(np.array([np.nan, np.inf, -np.inf, -0.0], np.float32), logits.shape)
    return np.where(rng.random(logits.shape) < 0.1, special, logits)


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 4), st.integers(1, 200), st.integers(1, 127))
def test_topk_is_the_front_of_the_sorted_row(seed, rows, vocab, k):
    k = min(k, vocab)
    logits = random_logits(np.random.default_rng(seed), rows, vocab)
    invariants.check_topk(reference.draft_topk(logits, k, 1000), logits, k, 1000)


def test_log_sum_exp_is_a_natural_logarithm():
    logits = np.array([[0.0, np.log(3.0)], [-np.inf, 5.0], [np.nan, -np.inf]], np.float32)
    np.testing.assert_allclose(
        reference.draft_topk(logits, 1).lse, [np.log(4.0), 5.0, -np.inf], rtol=1e-6
    )


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 5), st.integers(10, 150), st.integers(1, 10))
def test_merged_shards_are_the_whole_vocabulary(seed, shards, vocab, k):
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, 3, shards * vocab)
    whole = reference.draft_topk(logits, k)
    parts = [
        reference.draft_topk(logits[:, s * vocab : (s + 1) * vocab], k, s * vocab)
        for s in rng.permutation(shards)
    ]
    merged = reference.merge_topk(*(np.stack(field) for field in zip(*parts, strict=True)), k)
    assert merged.ids.tolist() == whole.ids.tolist()
    assert merged.values.tolist() == whole.values.tolist()
    np.testing.assert_allclose(merged.lse, whole.lse, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 3), st.integers(1, 128), st.booleans())
def test_mask_blocks_hold_the_closure(seed, bs, n, write_prefix):
    rng = np.random.default_rng(seed)
    words = (n + 63) // 64
    ancestors = rng.integers(-(2**63), 2**63, (bs, n, words))
    seen = [invariants.bit_sets(ancestors[b]) for b in range(bs)]
    prefix = rng.integers(-2, 9, bs)
    indptr = np.concatenate([[0], np.cumsum(n * (np.maximum(prefix, 0) + n))]) + 2
    mask = np.full(int(indptr[-1]) + 3, 7, np.uint8)
    reference.tree_mask(ancestors, prefix, mask, indptr, write_prefix)
    assert mask[:2].tolist() == [7, 7]
    assert mask[-3:].tolist() == [7, 7, 7]
    for b in range(bs):
        before = max(int(prefix[b]), 0)
        block = mask[indptr[b] : indptr[b + 1]].reshape(n, before + n)
        assert (block[:, :before] == (1 if write_prefix else 7)).all()
        tree = block[:, before:]
        assert [set(np.flatnonzero(row).tolist()) for row in tree] == [
            {j for j in row if j < n} for row in seen[b]
        ]
        assert tree.max() <= 1


def test_mask_cells_outside_are_dropped():
    ancestors = np.array([[[1], [3]]])
    mask = np.full(6, 7, np.uint8)
    # Rows of five cells from -2 on: only the second row's first cells and the first row's last.
    reference.tree_mask(ancestors, np.array([3]), mask, np.array([-2, 0]), True)
    assert mask.tolist() == [1, 1, 0, 1, 1, 1]
    reference.tree_mask(ancestors, np.array([2**63 - 1]), mask, np.array([0, 0]), False)
    assert mask.tolist() == [1, 1, 0, 1, 1, 1]


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 3), st.integers(1, 40), st.integers(1, 10))
def test_gather_takes_the_path_or_zeros(seed, bs, n, steps):
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((bs, n, 3)).astype(np.float32)
    path = rng.integers(-2, n + 2, (bs, steps)).astype(np.int32)
    got = reference.gather_path(rows.reshape(bs * n, 3), path, n)
    for b, j in np.ndindex(bs, steps):
        inside = 0 <= path[b, j] < n
        assert got[b, j].tolist() == (rows[b, path[b, j]].tolist() if inside else [0, 0, 0])


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 3), st.integers(2, 40), st.integers(1, 16))
def test_compaction_brings_the_path_to_the_front(seed, bs, n, steps):
    rng = np.random.default_rng(seed)
    slots = rng.permutation(bs * n + 5)[: bs * n].reshape(bs, n)
    path, accept_len = random_cases.random_path(rng, bs, n, steps)
    before = rng.integers(0, 256, (bs * n + 5, 7)).astype(np.uint8)
    after = before.copy()
    reference.compact_kv([after], slots, path, accept_len)
    expected = before.copy()
    for b in range(bs):
        taken = path[b, : accept_len[b] + 1]
        expected[slots[b, : len(taken)]] = before[slots[b, taken]]
    assert after.tolist() == expected.tolist()


def test_compaction_moves_nothing_for_malformed_paths():
    slots = np.array([[0, 1, 2], [3, -4, 5]])
    before = np.arange(6, dtype=np.uint8)[:, None]
    for path in ([[0, -1, 3], [0, 2, 0]], [[0, 3, -1], [0, 2, -7]]):
        after = before.copy()
        reference.compact_kv([after], slots, np.array(path, np.int32), np.array([9, 1]))
        assert after.tolist() == before.tolist()
