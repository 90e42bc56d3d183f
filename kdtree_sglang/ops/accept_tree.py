"""accept_tree: follows the target's tokens from the root of each tree.

    tokens        [bs, N] int64        as build_tree gives them; N 1..128
    next_token    [bs, N] int32
    next_sibling  [bs, N] int32
    num_nodes     [bs] int32
    predictions   [bs, N] int64, the target's token after each node (argmax, or one sample a node)
    prefix_lens   [bs] int64
    max_depth     0..127, L in use
    -> path          [bs, L+1] int32, accepted nodes; path[0] = 0 (the root), -1 past the end
       accept_len    [bs] int32, accepted drafts, the root not counted
       bonus         [bs] int64, the prediction of the last accepted node
       out_tokens    [bs, L+1] int64, the accepted drafts, then the bonus, then 0
       new_seq_lens  [bs] int64, prefix_lens + accept_len + 1

The walk steps to the first child, in brother order, whose token is the current node's prediction,
and stops when there is none or after max_depth steps. Along it path[j] >= j and path ascends.

Malformed links are safe: an index outside [1, num_nodes), a child not above its parent or a brother
not above its elder ends that list of children. num_nodes above N counts as N.

Errors: RuntimeError naming the argument, for another dtype, shape, device or layout.

Runs on the current stream, allocates nothing besides the outputs (the `_out` form nothing), never
waits for the device; bit-equal on every device.
Source: csrc/accept_tree.cu, csrc/cpu/accept_tree.cpp; reference/accept_tree.py."""

from typing import NamedTuple

import torch

from kdtree_sglang.ops import _extension


class Acceptance(NamedTuple):
    path: torch.Tensor
    accept_len: torch.Tensor
    bonus: torch.Tensor
    out_tokens: torch.Tensor
    new_seq_lens: torch.Tensor


def empty_acceptance(bs: int, max_depth: int, device: torch.device | str) -> Acceptance:
    """Uninitialised outputs for `accept_tree_out`."""
    return Acceptance(
        path=torch.empty((bs, max_depth + 1), dtype=torch.int32, device=device),
        accept_len=torch.empty((bs,), dtype=torch.int32, device=device),
        bonus=torch.empty((bs,), dtype=torch.int64, device=device),
        out_tokens=torch.empty((bs, max_depth + 1), dtype=torch.int64, device=device),
        new_seq_lens=torch.empty((bs,), dtype=torch.int64, device=device),
    )


def accept_tree(
    tokens: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    num_nodes: torch.Tensor,
    predictions: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_depth: int,
) -> Acceptance:
    out = empty_acceptance(tokens.shape[0], min(max(max_depth, 0), 127), tokens.device)
    accept_tree_out(
        tokens, next_token, next_sibling, num_nodes, predictions, prefix_lens, max_depth, out
    )
    return out


def accept_tree_out(
    tokens: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    num_nodes: torch.Tensor,
    predictions: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_depth: int,
    out: Acceptance,
) -> None:
    """accept_tree into buffers that the caller owns; every element of them is overwritten."""
    _extension.namespace().accept_tree_out(
        tokens, next_token, next_sibling, num_nodes, predictions, prefix_lens, max_depth, *out
    )
