"""Reference of gather_path."""

import numpy as np


def gather_path(rows: np.ndarray, path: np.ndarray, num_nodes_per_request: int) -> np.ndarray:
    bs, steps = path.shape
    n = num_nodes_per_request
    out = np.zeros((bs, steps, rows.shape[1]), rows.dtype)
    for b in range(bs):
        for j in range(steps):
            if 0 <= path[b, j] < n:
                out[b, j] = rows[b * n + path[b, j]]
    return out
