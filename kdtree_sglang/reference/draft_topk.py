"""Reference of draft_topk."""

from typing import NamedTuple

import numpy as np


class TopK(NamedTuple):
    ids: np.ndarray
    values: np.ndarray
    lse: np.ndarray


def log_sum_exp(rows: np.ndarray) -> np.ndarray:
    """Natural log-sum-exp along the last axis in float64, rounded to float32.

    A row whose greatest element is infinite has that as its log-sum-exp.
    """
    greatest = rows.max(axis=-1).astype(np.float64)
    finite = np.where(np.isinf(greatest), 0.0, greatest)
    with np.errstate(divide="ignore", over="ignore"):
        sums = np.exp(rows.astype(np.float64) - finite[..., None]).sum(axis=-1)
        lse = np.where(np.isinf(greatest), greatest, finite + np.log(sums))
        return lse.astype(np.float32)


def draft_topk(logits: np.ndarray, k: int, vocab_start: int = 0) -> TopK:
    """The k greatest of each row, by value descending, then smaller id. NaN counts as -inf.

    logits is [R, V] float32; 16-bit logits are widened by the caller, which is exact.
    """
    rows, vocab = logits.shape
    if not 1 <= k <= vocab:
        raise ValueError(f"k must be in 1..V = {vocab}, got {k}")
    logits = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    # A stable sort leaves equal values in id order, and takes -0.0 and 0.0 for equal.
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    values = np.take_along_axis(logits, ids, axis=-1)
    return TopK(ids.astype(np.int64) + vocab_start, values, log_sum_exp(logits))
