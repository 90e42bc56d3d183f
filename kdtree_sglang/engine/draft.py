"""The DFlash drafter in torch, float32.

One forward over `[root, mask, ...]` predicts the positions after the root, all at once. Its context
are the target's hidden states of committed tokens: each layer makes keys and values of them, once.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from kdtree_sglang.engine.cache import PageTable, RowCache
from kdtree_sglang.engine.config import DraftConfig, check_pair, read_draft
from kdtree_sglang.engine.model import Rotary, Target, mlp, rms_norm
from kdtree_sglang.engine.weights import DraftWeights, GqaAttention, load_draft, map_arrays


class Draft:
    """Drafter of one target, whose embedding and head it uses."""

    def __init__(self, config: DraftConfig, weights: DraftWeights, target: Target):
        check_pair(target.config, config)
        self.config = config
        self.target = target
        self.weights: DraftWeights = map_arrays(
            weights, lambda array: torch.from_numpy(array).to(target.device)
        )
        self._rotary = Rotary(config.rope, target.device)

    @classmethod
    def load(cls, folder: Path, target: Target) -> Draft:
        """From config.json and safetensors; raises UnsupportedConfig or CheckpointError."""
        config = read_draft(folder)
        return cls(config, load_draft(folder, config), target)

    def new_cache(self, table: PageTable) -> RowCache:
        """A row is the keys of all heads, then their values."""
        width = 2 * self.config.num_key_value_heads * self.config.head_dim
        return RowCache(self.config.num_hidden_layers, table, width)

    def features(self, states: list[torch.Tensor]) -> torch.Tensor:
        """`[b, n, A*H]`: the states after the layers that this drafter reads, of those of all."""
        return torch.cat([states[i] for i in self.config.target_layer_ids], dim=-1)

    def append(
        self,
        features: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cache: RowCache,
    ) -> None:
        """Caches the context that features `[b, n, A*H]` give at positions and slots `[b, n]`."""
        w = self.weights
        context = rms_norm(F.linear(features, w.fc), w.hidden_norm, self.config.rms_norm_eps)
        for number, layer in enumerate(w.layers):
            cache.rows[number][slots] = self._keys_values(context, positions, layer.attention)

    def logits(
        self, root: torch.Tensor, prefix_lens: torch.Tensor, slots: torch.Tensor, cache: RowCache
    ) -> torch.Tensor:
        """`[b, B - 1, V]`: row d is for the token d + 1 positions after the root `[b]`.

        slots: `[b, t]`, t at least the longest prefix.
        """
        c, block = self.config, self.config.block_size
        tokens = torch.full((len(root), block), c.mask_token_id, device=root.device)
        tokens[:, 0] = root
        positions = prefix_lens[:, None] + torch.arange(block, device=root.device)
        in_context = torch.arange(slots.shape[1], device=root.device) < prefix_lens[:, None]
        # Every row of the block sees the context and all of the block.
        visible = F.pad(in_context, (0, block), value=True)[:, None]

        x = self.target.embed(tokens)
        for number, layer in enumerate(self.weights.layers):
            y = rms_norm(x, layer.input_norm, c.rms_norm_eps)
            own = self._keys_values(y, positions, layer.attention)
            rows = torch.cat([cache.rows[number][slots], own], dim=1)
            x = x + self._attention(y, positions, rows, visible, layer.attention)
            x = x + mlp(rms_norm(x, layer.post_norm, c.rms_norm_eps), layer.mlp)
        return self.target.logits(rms_norm(x[:, 1:], self.weights.norm, c.rms_norm_eps))

    def _keys_values(
        self, x: torch.Tensor, positions: torch.Tensor, w: GqaAttention
    ) -> torch.Tensor:
        k = F.linear(x, w.k).unflatten(-1, (self.config.num_key_value_heads, -1))
        k = self._rotary(rms_norm(k, w.k_norm, self.config.rms_norm_eps), positions)
        return torch.cat([k.flatten(2), F.linear(x, w.v)], dim=-1)

    def _attention(
        self,
        y: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        visible: torch.Tensor,
        w: GqaAttention,
    ) -> torch.Tensor:
        c = self.config
        q = F.linear(y, w.q).unflatten(-1, (c.num_attention_heads, -1))
        q = self._rotary(rms_norm(q, w.q_norm, c.rms_norm_eps), positions)
        keys_values = rows.unflatten(-1, (2, c.num_key_value_heads, c.head_dim))
        k, v = keys_values.permute(2, 0, 3, 1, 4)
        # [b, kv heads, queries of a kv head, B, dim]
        q = q.transpose(1, 2).unflatten(1, (c.num_key_value_heads, -1))
        scores = q @ k[:, :, None].transpose(-1, -2) * c.head_dim**-0.5
        scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
        mixed = scores.softmax(dim=-1) @ v[:, :, None]
        return F.linear(mixed.flatten(1, 2).transpose(1, 2).flatten(2), w.o)
