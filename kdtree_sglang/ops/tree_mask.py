"""tree_mask: writes the trees into the flat mask of SGLang's custom-mask attention backends.

    ancestors     [bs, N, W] int64, build_tree's; N 1..128, W = ceil(N / 64)
    prefix_lens   [bs] int64
    mask          [M] bool or uint8, overwritten where stated
    mask_indptr   [bs + 1] int64, start of each request's block
    write_prefix  whether the cells of the prefix are set as well
    -> None       request b's block starts at mask_indptr[b] and is row-major
                  [N, prefix_lens[b] + N]; cell (i, prefix_lens[b] + j) says whether node j is an
                  ancestor of node i or i itself; cells (i, < prefix_lens[b]) become True if
                  write_prefix, else stay

Every other cell of mask stays. Nothing is written outside [0, M): what would fall there is dropped.
A negative prefix length counts as 0, one above 2^48 as 2^48. Only mask_indptr[:bs] is read.

Errors: RuntimeError naming the argument, for another dtype, shape, device or layout.

Runs on the current stream, allocates nothing, never waits for the device.
Source: csrc/tree_mask.cu, csrc/cpu/tree_mask.cpp; reference/tree_mask.py.
"""

import torch

from kdtree_sglang.ops import _extension


def tree_mask(
    ancestors: torch.Tensor,
    prefix_lens: torch.Tensor,
    mask: torch.Tensor,
    mask_indptr: torch.Tensor,
    write_prefix: bool,
) -> None:
    _extension.namespace().tree_mask(ancestors, prefix_lens, mask, mask_indptr, write_prefix)
