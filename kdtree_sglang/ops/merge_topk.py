"""merge_topk: joins the top-k lists of several vocabulary shards.

    ids     [T, R, k] int64, as draft_topk gives them with each shard's vocab_start
    values  [T, R, k] float32
    lse     [T, R] float32
    k_out   1..T*k; T*k at most 4096
    -> ids [R, k_out] int64, values [R, k_out] float32, lse [R] float32, as of the whole vocabulary

Order: value descending, then smaller id, then smaller shard (shards of one vocabulary have no
common ids); NaN counts as -inf. The lists need not be sorted. The result is the whole row's top
k_out only if every shard gave min(k_out, its own V) entries; pad a shorter shard's list with value
-inf and ids past the vocabulary, so that they lose every tie. ids and values are bit-equal
everywhere; lse is within 1e-5 of the reference, and lse[0] itself when T = 1.

Errors: RuntimeError naming the argument (named out_ids, out_values and out_lse for the outputs).

Runs on the current stream, allocates nothing besides the outputs, never waits for the device.
Source: csrc/draft_topk.cu, csrc/cpu/draft_topk.cpp; reference/merge_topk.py.
"""

import torch

from kdtree_sglang.ops import _extension
from kdtree_sglang.ops.draft_topk import TopK, empty_topk


def merge_topk(ids: torch.Tensor, values: torch.Tensor, lse: torch.Tensor, k_out: int) -> TopK:
    # A bad k_out or shape is for the launcher to report, not for the allocation of its outputs.
    rows = values.shape[1] if values.dim() > 1 else 0
    out = empty_topk(rows, min(max(k_out, 0), 4096), values.device)
    merge_topk_out(ids, values, lse, k_out, out)
    return out


def merge_topk_out(
    ids: torch.Tensor, values: torch.Tensor, lse: torch.Tensor, k_out: int, out: TopK
) -> None:
    _extension.namespace().merge_topk_out(ids, values, lse, k_out, *out)
