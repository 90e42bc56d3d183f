"""build_tree: the exact best-first draft tree of each request.

    ids          [bs, L, K] int64, token of rank r at depth d + 1; L 1..15, K 1..127
    log_probs    [bs, L, K] float32, sorted descending along K in use; any values are safe
    root         [bs] int64, the last committed token
    prefix_lens  [bs] int64, position of the root
    budget       1..127 nodes besides the root; N = budget + 1, W = ceil(N / 64)
    -> Tree      tokens [bs, N] int64
                 parents [bs, N] int32, -1 for the root; always smaller than the node's number
                 depths [bs, N] int32
                 log_mass [bs, N] float32, the node's key rounded from double; 0 for the root
                 positions [bs, N] int64, prefix_lens + depths
                 ancestors [bs, N, W] int64, bit j % 64 of word j / 64: j is an ancestor of i, or i
                 next_token [bs, N] int32, first child or -1
                 next_sibling [bs, N] int32, next brother or -1; brothers ascend in number and rank
                 num_nodes [bs] int32, with the root

Algorithm: node 0 is the root, the others are numbered as they leave a best-first queue. The queue
starts with rank 0 of depth 1 (key lp[1, 0]). A node (d, r) with key w that leaves it pushes its
sibling with key (w - lp[d, r]) + lp[d, r + 1] and its first child with key w + lp[d + 1, 0],
computed in float64 in exactly this order. The greatest key leaves first; of equal keys (-0.0 equals
0.0) the lexicographically smaller path of ranks, a proper prefix before its extensions. A candidate
whose log-probability is not finite is not pushed, so neither are its later siblings. It ends after
`budget` nodes or with an empty queue. K >= min(budget, V) makes the tree the best of all of that
size.

Rows >= num_nodes: token of the root, parent 0, depth 0, log_mass -inf, position prefix_len,
ancestors only themselves, no links to or from.

Errors: RuntimeError naming the argument, for a size out of range or another dtype, shape, device or
layout.

Runs on the current stream, allocates nothing besides the outputs (the `_out` form nothing), never
waits for the device; bit-equal on every device.
Source: csrc/build_tree.cu, csrc/cpu/build_tree.cpp; reference/build_tree.py."""

from typing import NamedTuple

import torch

from kdtree_sglang.ops import _extension


class Tree(NamedTuple):
    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    log_mass: torch.Tensor
    positions: torch.Tensor
    ancestors: torch.Tensor
    next_token: torch.Tensor
    next_sibling: torch.Tensor
    num_nodes: torch.Tensor


def empty_tree(bs: int, budget: int, device: torch.device | str) -> Tree:
    """Uninitialised outputs for `build_tree_out`."""
    nodes = budget + 1

    def rows(dtype: torch.dtype, *more: int) -> torch.Tensor:
        return torch.empty((bs, nodes, *more), dtype=dtype, device=device)

    return Tree(
        tokens=rows(torch.int64),
        parents=rows(torch.int32),
        depths=rows(torch.int32),
        log_mass=rows(torch.float32),
        positions=rows(torch.int64),
        ancestors=rows(torch.int64, (nodes + 63) // 64),
        next_token=rows(torch.int32),
        next_sibling=rows(torch.int32),
        num_nodes=torch.empty((bs,), dtype=torch.int32, device=device),
    )


def build_tree(
    ids: torch.Tensor,
    log_probs: torch.Tensor,
    root: torch.Tensor,
    prefix_lens: torch.Tensor,
    budget: int,
) -> Tree:
    # A bad budget is for the launcher to report, not for the allocation of its outputs.
    out = empty_tree(ids.shape[0], min(max(budget, 0), 127), ids.device)
    build_tree_out(ids, log_probs, root, prefix_lens, budget, out)
    return out


def build_tree_out(
    ids: torch.Tensor,
    log_probs: torch.Tensor,
    root: torch.Tensor,
    prefix_lens: torch.Tensor,
    budget: int,
    out: Tree,
) -> None:
    """build_tree into buffers that the caller owns; every element of them is overwritten."""
    _extension.namespace().build_tree_out(ids, log_probs, root, prefix_lens, budget, *out)
