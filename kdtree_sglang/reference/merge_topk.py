"""Reference of merge_topk."""

from typing import NamedTuple

import numpy as np


class TopK(NamedTuple):
    ids: np.ndarray
    values: np.ndarray
    lse: np.ndarray


def merge_topk(ids: np.ndarray, values: np.ndarray, lse: np.ndarray, k_out: int) -> TopK:
    """Joins T lists a row: by value descending, then smaller id, then smaller shard."""
    shards, rows, k = ids.shape
    if not 1 <= k_out <= shards * k:
        raise ValueError(f"k_out must be in 1..T * k = {shards * k}, got {k_out}")
    # One row's entries of all shards side by side, in shard order.
    ids = ids.transpose(1, 0, 2).reshape(rows, shards * k)
    values = values.transpose(1, 0, 2).reshape(rows, shards * k)
    values = np.where(np.isnan(values), np.float32(-np.inf), values)
    # lexsort is stable and its last key is the first criterion.
    order = np.lexsort((ids, -values), axis=-1)[:, :k_out]

    parts = np.where(np.isnan(lse), -np.inf, lse).T.astype(np.float64)
    greatest = parts.max(axis=-1)
    finite = np.where(np.isinf(greatest), 0.0, greatest)
    with np.errstate(divide="ignore", over="ignore"):
        joined = finite + np.log(np.exp(parts - finite[:, None]).sum(axis=-1))
    joined = np.where(np.isinf(greatest), greatest, joined).astype(np.float32)
    return TopK(
        np.take_along_axis(ids, order, axis=-1), np.take_along_axis(values, order, axis=-1), joined
    )
