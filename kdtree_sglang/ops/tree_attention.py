"""tree_attention: attends each node to its ancestors in the tail and joins the prefix pass.

    q           [bs * N, h, 576] float32 or bfloat16, absorbed MLA queries; h 1..65535
    k_tail      [bs * N, 576] of q's dtype, the nodes' own cache rows; the first 512 are the value
    ancestors   [bs, N, W] int64, build_tree's or any other mask; N 1..128, W = ceil(N / 64)
    prefix_out  [bs * N, h, 512] of q's dtype, normalised result over the prefix
    prefix_lse  [bs, h, N] float32, natural log of the prefix's sum of exp(scale * q . k)
    scale       finite; of the scores
    -> out      [bs * N, h, 512] of q's dtype

Row b * N + i belongs to node i of request b. With s_j = scale * (q . k_j) over the rows j that the
node's ancestors name (bit j % 64 of word j / 64),
    out = (exp(lse) prefix_out + sum_j exp(s_j) v_j) / (exp(lse) + sum_j exp(s_j)),
shifted by the greatest exponent. An infinite lse, +inf as FlashMLA returns it or -inf, means an
empty prefix: that row of prefix_out is not read. A tail row that a query does not see is not read
for it, whatever it holds; bits from N on count for nothing. A query that sees nothing, with an
empty prefix, gives zeros. NaN or an infinity in what a query does see is the caller's, and may make
its output NaN.

Precision: float32 sums in float64, bfloat16 in float32, and both round once, at the end. With
scores and values of about unit deviation float32 is within 1e-6 of exact, and bfloat16 within 1e-2
of the output's norm. The same on every run of a device; devices may differ in the last bit.

Errors: RuntimeError naming the argument, for another dtype, shape, device or layout, a scale that
is not finite, or q, k_tail, prefix_out or out not starting at a multiple of 16 bytes.

One launch on the current stream, allocates nothing besides the output (the `_out` form nothing),
never waits for the device. out must not overlap an input.
Source: csrc/tree_attention.cu, csrc/cpu/tree_attention.cpp; reference/tree_attention.py.
"""

import torch

from kdtree_sglang.ops import _extension


def tree_attention(
    q: torch.Tensor,
    k_tail: torch.Tensor,
    ancestors: torch.Tensor,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    out = torch.empty((*q.shape[:2], 512), dtype=q.dtype, device=q.device)
    tree_attention_out(q, k_tail, ancestors, prefix_out, prefix_lse, scale, out)
    return out


def tree_attention_out(
    q: torch.Tensor,
    k_tail: torch.Tensor,
    ancestors: torch.Tensor,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """tree_attention into a buffer that the caller owns; every element of it is overwritten."""
    _extension.namespace().tree_attention_out(
        q, k_tail, ancestors, prefix_out, prefix_lse, scale, out
    )
