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

    for b in range(bs):
        prefix = min(max(int(prefix_lens[b]), 0), 2**48)
        for i in range(n):
            row = int(mask_indptr[b]) + i * (prefix + n)
            tree = row + prefix
            if write_prefix:
                mask[max(row, 0) : max(tree, 0)] = 1
            for j in range(n):
                if 0 <= tree + j < mask.shape[0]:
                    mask[tree + j] = int(ancestors[b, i, j // 64]) >> (j % 64) & 1
