"""Reference of compact_kv."""

import numpy as np


def compact_kv(
    buffers: list[np.ndarray], slots: np.ndarray, path: np.ndarray, accept_len: np.ndarray
) -> None:
    """Moves rows in place; a buffer is [rows, row_bytes] uint8 where the op takes an address."""
    bs, n = slots.shape
    for buffer in buffers:
        before = buffer.copy()
        for b in range(bs):
            for j in range(1, min(int(accept_len[b]), path.shape[1] - 1, n - 1) + 1):
                node = int(path[b, j])
                if 1 <= node < n and slots[b, node] >= 0 and slots[b, j] >= 0:
                    buffer[slots[b, j]] = before[slots[b, node]]
