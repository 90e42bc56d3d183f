"""Random arguments of the ops, in numpy alone; tests/ops and tests/reference draw from here."""

import ml_dtypes
import numpy as np

LOG_PROB_STYLES = ("smooth", "wide", "ties", "equal", "few", "special", "unsorted")


def log_probs(rng: np.random.Generator, style: str, bs: int, levels: int, k: int) -> np.ndarray:
    """[bs, levels, k] float32 in one of LOG_PROB_STYLES.

    "smooth" is what a drafter gives; "wide" takes few values from 1e-20 to 10, so that sums of
    doubles round and, in some percent of trees, only the published order of operations gives the
    published order of nodes; "ties" is "smooth" on a grid as coarse as bf16's, so that many keys
    are bit-equal; "few" has so many -inf that trees stay smaller than the budget; "special" has NaN
    and both infinities anywhere; "unsorted" may have rising keys.
    """
    raw = rng.standard_normal((bs, levels, k)) * rng.uniform(0.2, 3.0, (bs, levels, 1))
    shape = np.sort(raw, axis=-1)[..., ::-1]
    lp = shape - np.log(np.exp(shape).sum(axis=-1, keepdims=True)) - rng.uniform(0, 1)
    lp = lp.astype(np.float32)
    if style == "wide":
        palette = -np.sort(10.0 ** rng.uniform(-20, 1, 20)).astype(np.float32)
        steps = np.cumsum(rng.integers(0, 2, (bs, levels, k)), axis=-1)
        lp = palette[np.minimum(rng.integers(0, 20, (bs, levels, 1)) + steps, 19)]
    elif style == "ties":
        lp = (np.round(lp * 2) / 2 - 0.1).astype(ml_dtypes.bfloat16).astype(np.float32)
    elif style == "equal":
        lp = np.broadcast_to(lp[:, :1, :1], lp.shape)
    elif style == "few":
        lp = np.where(rng.random(lp.shape) < 0.6, np.float32(-np.inf), lp)
        lp = np.sort(lp, axis=-1)[..., ::-1]
    elif style == "special":
        special = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), lp.shape)
        lp = np.where(rng.random(lp.shape) < 0.15, special, lp)
    elif style == "unsorted":
        lp = rng.permuted(lp, axis=-1) * rng.choice([-1.0, 1.0], (bs, 1, 1)).astype(np.float32)
    return np.ascontiguousarray(lp, dtype=np.float32)


def tree_case(
    rng: np.random.Generator, style: str, bs: int, levels: int, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Arguments of build_tree; token ids, 0 among them, repeat across depths."""
    return (
        rng.integers(0, k + 3, (bs, levels, k)),
        log_probs(rng, style, bs, levels, k),
        rng.integers(0, k + 3, bs),
        rng.integers(0, 100_000, bs),
    )


def followed_predictions(rng: np.random.Generator, tree, k: int) -> np.ndarray:
    """[bs, N] predictions that follow a tree of token ids below k + 3 for a random stretch."""
    predictions = rng.integers(0, k + 3, tree.tokens.shape)
    for b in range(tree.tokens.shape[0]):
        for i in range(1, int(tree.num_nodes[b])):
            # The last writer wins, so any child may be the one that is followed.
            if rng.random() < 0.7:
                predictions[b, tree.parents[b, i]] = tree.tokens[b, i]
    return predictions


def random_path(
    rng: np.random.Generator, bs: int, n: int, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """(path, accept_len) as accept_tree gives them: ascending from 0, -1 past the end."""
    path = np.full((bs, steps), -1, np.int32)
    accept_len = rng.integers(0, min(steps, n), bs).astype(np.int32)
    for b in range(bs):
        taken = np.sort(rng.choice(np.arange(1, n), accept_len[b], replace=False))
        path[b, 0] = 0
        path[b, 1 : accept_len[b] + 1] = taken
    return path, accept_len


ATTENTION_MASKS = ("tree", "chain", "any", "all", "one")
# Products of a query and a key, both of unit deviation, get a deviation of 1.5.
ATTENTION_SCALE = 1 / 16


def attention_ancestors(rng: np.random.Generator, style: str, bs: int, n: int) -> np.ndarray:
    """[bs, n, ceil(n / 64)] int64 masks in one of ATTENTION_MASKS, with noise in bits from n on."""
    seen = np.zeros((bs, n, n), np.bool_)
    for b in range(bs):
        for i in range(n):
            if style == "tree":
                seen[b, i] = seen[b, rng.integers(0, i)] if i > 0 else False
                seen[b, i, i] = True
            elif style == "chain":
                seen[b, i, : i + 1] = True
            elif style == "any":
                seen[b, i] = rng.random(n) < rng.random()
            elif style == "all":
                seen[b, i] = True
            elif style == "one":
                seen[b, i, rng.integers(0, n)] = True
    return pack_ancestors(rng, seen)


def pack_ancestors(rng: np.random.Generator, seen: np.ndarray) -> np.ndarray:
    """The words of a [bs, n, n] boolean mask, with noise in bits from n on."""
    bs, n, _ = seen.shape
    words = (n + 63) // 64
    bits = rng.random((bs, n, 64 * words)) < 0.5
    bits[:, :, :n] = seen
    return np.packbits(bits, axis=-1, bitorder="little").view(np.int64)


def attention_case(
    rng: np.random.Generator, style: str, bs: int, n: int, heads: int, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Arguments of tree_attention besides the scale, with NaN in all that no query may read.

    A third of the prefixes is empty, under both conventions; a quarter of the tail rows is seen by
    nobody, so that some queries may see nothing at all.
    """
    ancestors = attention_ancestors(rng, style, bs, n)
    q = rng.standard_normal((bs * n, heads, 576))
    k_tail = rng.standard_normal((bs * n, 576))
    prefix_out = rng.standard_normal((bs * n, heads, 512))
    prefix_lse = rng.uniform(-4, 9, (bs, heads, n)).astype(np.float32)

    unseen = rng.random((bs, n)) < 0.25
    ancestors &= ~pack_ancestors(rng, np.repeat(unseen[:, None], n, axis=1))
    k_tail[unseen.ravel()] = np.nan
    empty = rng.random(prefix_lse.shape) < 0.33
    prefix_lse[empty] = rng.choice([np.inf, -np.inf], int(empty.sum()))
    prefix_out[np.swapaxes(empty, 1, 2).reshape(bs * n, heads)] = np.nan
    return q.astype(dtype), k_tail.astype(dtype), ancestors, prefix_out.astype(dtype), prefix_lse
