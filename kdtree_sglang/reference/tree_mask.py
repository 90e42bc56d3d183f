"""Reference of tree_mask."""

import numpy as np


def tree_mask(
    ancestors: np.ndarray,
    prefix_lens: np.ndarray,
    mask: np.ndarray,
    mask_indptr: np.ndarray,
    write_prefix: bool,
) -> None:
    """Fills mask in place; what would fall outside it is dropped."""
    bs, n, _ = ancestors.shape

    def put(cell: int, value: int) -> None:
        if 0 <= cell < mask.shape[0]:
            mask[cell] = value

    for b in range(bs):
        prefix = max(int(prefix_lens[b]), 0)
        for i in range(n):
            row = int(mask_indptr[b]) + i * (prefix + n)
            if write_prefix:
                for p in range(prefix):
                    put(row + p, 1)
            for j in range(n):
                put(row + prefix + j, int(ancestors[b, i, j // 64]) >> (j % 64) & 1)
