"""draft_topk: the k greatest logits of each row and the row's log-sum-exp.

    logits       [R, V] float32, bfloat16 or float16; rows contiguous, any row stride >= V (padding)
    k            1..min(V, 127)
    vocab_start  added to every id: the first id of this vocabulary shard
    -> ids       [R, k] int64
       values    [R, k] float32, the logits themselves
       lse       [R] float32, natural log of the sum of exponentials over the whole row

Order: value descending, then smaller id; -0.0 equals 0.0. NaN counts as -inf (and is returned as
-inf). ids and values are bit-equal on every device and run; lse is within 1e-5 + 1e-6 |lse| of the
reference, and the same on every run of a device for the same alignment of the row. A row of only
-inf and NaN has lse -inf; a row with +inf has lse +inf. A candidate's log-probability is
`values - lse[:, None]`; it may come out NaN (-inf - -inf), which build_tree never lets in.

Errors: RuntimeError naming the argument, for k out of range, another dtype, overlapping rows,
outputs of another shape, dtype or device.

Runs on the current stream, allocates nothing besides the outputs (the `_out` form nothing), never
waits for the device. Source: csrc/draft_topk.cu, csrc/cpu/draft_topk.cpp; reference/draft_topk.py.
"""

from typing import NamedTuple

import torch

from kdtree_sglang.ops import _extension


class TopK(NamedTuple):
    ids: torch.Tensor
    values: torch.Tensor
    lse: torch.Tensor


def empty_topk(rows: int, k: int, device: torch.device | str) -> TopK:
    """Uninitialised outputs for `draft_topk_out` and `merge_topk_out`."""
    return TopK(
        torch.empty((rows, k), dtype=torch.int64, device=device),
        torch.empty((rows, k), dtype=torch.float32, device=device),
        torch.empty((rows,), dtype=torch.float32, device=device),
    )


def draft_topk(logits: torch.Tensor, k: int, vocab_start: int = 0) -> TopK:
    # A bad k is for the launcher to report, not for the allocation of its outputs.
    out = empty_topk(logits.shape[0], min(max(k, 0), 127), logits.device)
    draft_topk_out(logits, k, out, vocab_start)
    return out


def draft_topk_out(logits: torch.Tensor, k: int, out: TopK, vocab_start: int = 0) -> None:
    _extension.namespace().draft_topk_out(logits, k, vocab_start, *out)
