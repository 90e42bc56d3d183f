"""The tree as SGLang's spec_info for a TARGET_VERIFY forward."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from kdtree_sglang.ops import Tree


def tree_verify_input(tree: Tree, mask: torch.Tensor, plan: KVLocPlan) -> DFlashVerifyInput:
    """Verify every node of `tree` in one forward.

    Args:
        tree: the draft trees of the batch, tokens and positions `[bs, N]` i64.
        mask: flat mask of `attention.masked.write_tree_mask`, True where a query sees a key.
        plan: the step's KV locations; the verify writes the first N columns of its window.

    A tree is a DFLASH verify with positions and a mask of its own: attention backends, graph runner
    and memory sizing then treat both alike (seam: srt/speculative/dflash_info.py).
    """
    bs, width = tree.tokens.shape
    return DFlashVerifyInput(
        draft_token=tree.tokens.reshape(-1),
        positions=tree.positions.reshape(-1),
        draft_token_num=width,
        custom_mask=mask,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        kv_loc_plan=plan,
        kv_loc_cols=slice(0, width),
    )
