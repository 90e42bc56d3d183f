"""`torch_native` attention that can verify drafts, along a chain or a tree.

The stock backend has no TARGET_VERIFY mode. `VerifyTorchNativeBackend` adds it and leaves prefill
and decode to the stock code, so a test that compares speculative with plain text compares two
independent attention implementations.

One verify forward has n query rows a request at positions prefix..prefix+n-1, and prefix + n KV
rows that `req_to_token` lists in that order. Which of them a query sees:

| layer and batch | visible rows |
|---|---|
| encoder-only layer (a DFlash draft block) | all |
| `spec_info.custom_mask` present | its n x (prefix + n) entries of this request |
| otherwise | prefix, and window rows up to the query's own |
| sliding window, in addition | positions at or after the query's position - window |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from kdtree_sglang.cpu_sglang.attention import masked_attention, unpack_custom_mask

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass
class _VerifyMetadata:
    """What every layer of one verify forward shares."""

    n: int
    slots: torch.Tensor  # [batch, rows], slot 0 past a request's end
    inside: torch.Tensor  # bool [batch, n, rows]: rows that the request has
    visible: torch.Tensor  # bool [batch, n, rows]: custom mask or causal
    query_positions: torch.Tensor  # [batch, n]
    row_positions: torch.Tensor  # [batch, rows]


class VerifyTorchNativeBackend(TorchNativeAttnBackend):
    """The stock backend plus TARGET_VERIFY."""

    # What kdtree_sglang.attention.masked asks of a backend before it verifies a tree on it.
    reads_tree_mask = True

    def __init__(self, model_runner: ModelRunner):
        super().__init__(model_runner)
        self._verify: _VerifyMetadata | None = None
        if self.use_sliding_window_kv_pool:
            raise NotImplementedError(
                "the CPU stand-in serves no model with a separate sliding-window KV pool"
            )

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._verify = None
        if forward_batch.forward_mode.is_target_verify():
            self._verify = self._build_metadata(forward_batch)

    def _build_metadata(self, forward_batch: ForwardBatch) -> _VerifyMetadata:
        spec_info = forward_batch.spec_info
        if getattr(spec_info, "ragged_verify_layout", None) is not None:
            raise NotImplementedError("the CPU stand-in verifies one width for all requests")
        n = int(spec_info.draft_token_num)
        prefix = forward_batch.seq_lens.to(torch.int64)
        kv_lens = prefix + n
        rows = int(kv_lens.max())
        column = torch.arange(rows)
        present = column < kv_lens[:, None]
        slots = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices, :rows]
        inside = present[:, None].expand(-1, n, -1)
        causal = inside & (column <= (prefix[:, None] + torch.arange(n))[:, :, None])

        custom_mask = getattr(spec_info, "custom_mask", None)
        visible = causal
        query_positions = prefix[:, None] + torch.arange(n)
        row_positions = column.expand(prefix.numel(), -1)
        if custom_mask is not None:
            visible = unpack_custom_mask(custom_mask, prefix, n, rows)
            # A tree's window rows are not in position order.
            query_positions = forward_batch.positions.view(-1, n).to(torch.int64)
            row_positions = row_positions.clone()
            window = prefix[:, None] + torch.arange(n)
            row_positions.scatter_(1, window, query_positions)
        return _VerifyMetadata(
            n=n,
            slots=slots.to(torch.int64).masked_fill(~present, 0),
            inside=inside,
            visible=visible,
            query_positions=query_positions,
            row_positions=row_positions,
        )

    def _visible_rows(self, layer: RadixAttention, meta: _VerifyMetadata) -> torch.Tensor:
        if layer.attn_type == AttentionType.ENCODER_ONLY:
            return meta.inside
        visible = meta.visible
        if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
            oldest = meta.query_positions - layer.sliding_window_size
            visible = visible & (meta.row_positions[:, None] >= oldest[:, :, None])
        return visible

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: object,
    ) -> torch.Tensor:
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
            )
        if layer.is_cross_attention:
            raise NotImplementedError("the CPU stand-in verifies no cross attention")
        meta = self._verify
        if meta is None:
            raise RuntimeError("verify attention ran before init_forward_metadata")
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v
            )
        query = q.view(-1, meta.n, layer.tp_q_head_num, layer.qk_head_dim)
        output = masked_attention(
            query,
            self.token_to_kv_pool.get_key_buffer(layer.layer_id)[meta.slots],
            self.token_to_kv_pool.get_value_buffer(layer.layer_id)[meta.slots],
            self._visible_rows(layer, meta),
            layer.scaling,
            layer.logit_cap,
        )
        return output.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)
