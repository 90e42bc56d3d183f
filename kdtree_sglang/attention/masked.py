"""Tree verify on backends that read a flat custom mask.

Layout of the mask (SGLang's): requests concatenated, each row-major `[N, prefix + N]`, True where
query i sees key j. It is written in place by one op before the verify forward is planned.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from kdtree_sglang import ops


class DDTreeTritonAttnBackend(TritonAttnBackend):
    """Triton attention whose graphs keep the tree mask.

    Stock Triton is on SGLang's list of backends that capture DFLASH without a mask
    (srt/speculative/dflash_utils.py, resolve_dflash_verify_mask_policy); the list goes by class
    name, so this subclass is captured with one. The kernels are stock.
    """

    reads_tree_mask = True

    def _update_target_verify_buffers(
        self, plan: Any, bs: int, seq_lens: Any, spec_info: Any, req_pool_indices: Any
    ) -> Any:
        # `write_tree_mask` has filled `verify_mask.buffer` already; stock would copy the whole
        # buffer, sized for the longest context, onto itself.
        return super()._update_target_verify_buffers(plan, bs, seq_lens, None, req_pool_indices)


class DDTreeFlashInferAttnBackend(FlashInferAttnBackend):
    """FlashInfer attention for GQA targets, captured with a mask for the same reason.

    Its plan packs the flat mask into bits of its own, so it keeps no static flat buffer.
    """

    reads_tree_mask = True


def tree_backend(attn_backend: Any) -> Any:
    """The backend that runs TARGET_VERIFY, refused unless it reads a tree mask.

    Raises:
        ValueError: naming the backend that would silently run a causal mask.
    """
    backend = attn_backend
    if isinstance(backend, HybridAttnBackend):
        backend = backend._select_backend(ForwardMode.TARGET_VERIFY)
    if not getattr(backend, "reads_tree_mask", False):
        raise ValueError(
            f"DDTREE-NATIVE: {type(backend).__name__} would verify a tree with a causal mask. "
            "Fix: --attention-backend triton."
        )
    return backend


def write_tree_mask(
    backend: Any, tree: ops.Tree, prefix_lens: torch.Tensor, max_prefix_sum: int
) -> torch.Tensor:
    """Write the flat mask of `tree` and return the tensor that holds it.

    Args:
        backend: what `tree_backend` returned.
        tree: ancestors `[bs, N, ceil(N/64)]` i64.
        prefix_lens: `[bs]` i64, committed tokens.
        max_prefix_sum: host upper bound of `prefix_lens.sum()`.

    The static buffer of a graph-capable backend is used where the batch fits; a captured graph
    reads only that one. Prefix cells are always written: stock kernels differ in whether they
    read them.
    """
    bs, width = tree.tokens.shape
    static = getattr(backend, "verify_mask", None)
    if static is not None and static.fits(bs):
        mask = static.buffer
    else:
        cells = width * (max_prefix_sum + bs * width)
        mask = torch.empty(cells, dtype=torch.bool, device=prefix_lens.device)
    indptr = torch.zeros(bs + 1, dtype=torch.int64, device=prefix_lens.device)
    torch.cumsum(width * (prefix_lens + width), dim=0, out=indptr[1:])
    ops.tree_mask(tree.ancestors, prefix_lens, mask, indptr, write_prefix=True)
    return mask
