"""The target in torch on the ops: MLA in absorbed form over a paged latent cache, in float32.

Shapes: b requests, n new rows each, t cached rows, H hidden size, h heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from kdtree_sglang import ops
from kdtree_sglang.engine import rope
from kdtree_sglang.engine.cache import PageTable, RowCache
from kdtree_sglang.engine.config import KV_LORA_RANK, LATENT_WIDTH, Rope, TargetConfig, read_target
from kdtree_sglang.engine.weights import (
    Layer,
    MlaAttention,
    Mlp,
    Moe,
    TargetWeights,
    load_target,
    map_arrays,
)


@dataclass(frozen=True)
class Rows:
    """The rows of one target forward: new ones, and where they and their context are cached.

    Attributes:
        tokens, positions: `[b, n]` i64; the position is RoPE's, not the cache's.
        prefix_lens: `[b]` i64, cached rows that every new row sees.
        slots: `[b, t]` i64, slots of each request's positions from 0; t reaches past the new rows,
            of which row i is cached at position prefix_len + i.
        ancestors: `[b, n, W]` i64, bits of the new rows that each new row sees, as build_tree gives
            them. None for a chain: a row sees those before it and itself.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    prefix_lens: torch.Tensor
    slots: torch.Tensor
    ancestors: torch.Tensor | None = None

    @property
    def new_slots(self) -> torch.Tensor:
        """`[b, n]`"""
        offsets = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return self.slots.gather(1, self.prefix_lens[:, None] + offsets)


@dataclass(frozen=True)
class Forward:
    """hidden `[b, n, H]`, normalised for the head; states, `[b, n, H]` after each layer."""

    hidden: torch.Tensor
    states: list[torch.Tensor]


class Rotary:
    """Turns the pairs of `[b, n, heads, dim]` by the angles of positions `[b, n]`."""

    def __init__(self, config: Rope, device: torch.device | str):
        self._interleaved = config.interleaved
        self._frequencies = torch.from_numpy(rope.frequencies(config)).to(device)
        self._amplitude = rope.amplitude(config)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = positions[..., None, None].float() * self._frequencies
        cos, sin = angle.cos() * self._amplitude, angle.sin() * self._amplitude
        if self._interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def mlp(x: torch.Tensor, w: Mlp) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, w.gate)) * F.linear(x, w.up), w.down)


def route(x: torch.Tensor, w: Moe, config: TargetConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each row of x `[rows, H]` and their weights, both `[rows, num_experts_per_tok]`.

    noaux_tc: sigmoid scores plus bias choose, within the groups whose two best are best; the
    weights are the scores without the bias.
    """
    scores = F.linear(x, w.router).sigmoid()
    contest = (scores + w.bias).view(len(x), config.n_group, -1)
    group_scores = contest.topk(2, dim=-1).values.sum(dim=-1)
    winners = group_scores.topk(config.topk_group, dim=-1).indices
    lost = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, winners, False)
    contest = contest.masked_fill(lost[..., None], -torch.inf).flatten(1)
    experts = contest.topk(config.num_experts_per_tok, dim=-1).indices
    weights = scores.gather(1, experts)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return experts, weights * config.routed_scaling_factor


def moe(x: torch.Tensor, w: Moe, config: TargetConfig) -> torch.Tensor:
    flat = x.flatten(0, 1)
    experts, weights = route(flat, w, config)
    out = mlp(flat, w.shared)
    for expert in range(config.n_routed_experts):
        rows, ranks = (experts == expert).nonzero(as_tuple=True)
        parts = Mlp(w.gate[expert], w.up[expert], w.down[expert])
        out[rows] += weights[rows, ranks, None] * mlp(flat[rows], parts)
    return out.view_as(x)


def attend(
    q: torch.Tensor, latents: torch.Tensor, visible: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q `[b, n, h, 576]` over latents `[b, t, 576]` where visible `[b, n, t]` or `[b, 1, t]`.

    Returns the output `[b, n, h, 512]` and its log-sum-exp `[b, n, h]`. A row that sees nothing has
    log-sum-exp -inf and an output of NaN.
    """
    b, n, h, _ = q.shape
    scores = (q.flatten(1, 2) @ latents.transpose(1, 2)).view(b, n, h, -1) * scale
    scores = scores.masked_fill(~visible[:, :, None], -torch.inf)
    lse = scores.logsumexp(dim=-1)
    probs = torch.exp(scores - lse[..., None])
    return (probs.flatten(1, 2) @ latents[..., :KV_LORA_RANK]).view(b, n, h, -1), lse


class Target:
    """A DeepSeek-V3 model. Sets torch's float32 products to full precision, for the process."""

    def __init__(self, config: TargetConfig, weights: TargetWeights, device: torch.device | str):
        # TF32 has 10 bits of mantissa, and texts would no longer be equal.
        torch.set_float32_matmul_precision("highest")
        self.config = config
        self.device = torch.device(device)
        self.weights: TargetWeights = map_arrays(
            weights, lambda array: torch.from_numpy(array).to(device)
        )
        self._rotary = Rotary(config.rope, device)
        self._scale = rope.softmax_scale(config.qk_nope_head_dim + config.rope.dim, config.rope)

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu") -> Target:
        """From config.json and safetensors; raises UnsupportedConfig or CheckpointError."""
        config = read_target(folder)
        return cls(config, load_target(folder, config), device)

    def new_cache(self, table: PageTable) -> RowCache:
        """A row is a token's latent and rotary key, for all heads."""
        return RowCache(self.config.num_hidden_layers, table, LATENT_WIDTH)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weights.embedding)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[..., H]` normalised hidden states, the drafter's too, to `[..., V]`."""
        return F.linear(hidden, self.weights.head)

    def forward(self, rows: Rows, cache: RowCache) -> Forward:
        """Caches the new rows of every layer and computes them."""
        c = self.config
        x, states = self.embed(rows.tokens), []
        for number, layer in enumerate(self.weights.layers):
            y = rms_norm(x, layer.input_norm, c.rms_norm_eps)
            x = x + self._attention(y, rows, cache.rows[number], layer.attention)
            x = x + self._feed_forward(rms_norm(x, layer.post_norm, c.rms_norm_eps), layer)
            states.append(x)
        return Forward(rms_norm(x, self.weights.norm, c.rms_norm_eps), states)

    def _feed_forward(self, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        return moe(x, layer.mlp, self.config) if isinstance(layer.mlp, Moe) else mlp(x, layer.mlp)

    def _attention(
        self, y: torch.Tensor, rows: Rows, cached: torch.Tensor, w: MlaAttention
    ) -> torch.Tensor:
        q = self._queries(y, rows.positions, w)
        latents = self._latents(y, rows.positions, w)
        cached[rows.new_slots] = latents
        context = cached[rows.slots]
        if rows.ancestors is None:
            # The cache holds a chain in its order, so its own rows are context like the rest.
            last = rows.prefix_lens[:, None] + torch.arange(y.shape[1], device=y.device)
            column = torch.arange(context.shape[1], device=y.device)
            mixed, _ = attend(q, context, column <= last[..., None], self._scale)
        else:
            mixed = self._tree_attention(q, latents, context[:, : -y.shape[1]], rows)
        values = torch.einsum("bnhk,hvk->bnhv", mixed, w.absorb_v)
        return F.linear(values.flatten(2), w.o)

    def _tree_attention(
        self, q: torch.Tensor, tail: torch.Tensor, prefix: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        """The prefix, which every node sees, then the op for the tail and the merge of both."""
        column = torch.arange(prefix.shape[1], device=q.device)
        visible = (column < rows.prefix_lens[:, None])[:, None]
        prefix_out, prefix_lse = attend(q, prefix, visible, self._scale)
        mixed = ops.tree_attention(
            q.flatten(0, 1),
            tail.flatten(0, 1),
            rows.ancestors,
            prefix_out.flatten(0, 1),
            prefix_lse.transpose(1, 2).contiguous(),
            self._scale,
        )
        return mixed.view_as(prefix_out)

    def _queries(self, y: torch.Tensor, positions: torch.Tensor, w: MlaAttention) -> torch.Tensor:
        """`[b, n, h, 576]`: absorbed to the latent's 512, then 64 rotary numbers."""
        c = self.config
        low = y if w.q_a is None else rms_norm(F.linear(y, w.q_a), w.q_a_norm, c.rms_norm_eps)
        q = F.linear(low, w.q_b).unflatten(-1, (c.num_attention_heads, -1))
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.rope.dim], dim=-1)
        q_latent = torch.einsum("bnhd,hdk->bnhk", q_nope, w.absorb_k)
        return torch.cat([q_latent, self._rotary(q_rope, positions)], dim=-1)

    def _latents(self, y: torch.Tensor, positions: torch.Tensor, w: MlaAttention) -> torch.Tensor:
        """`[b, n, 576]`, one row a token for all heads."""
        split = [KV_LORA_RANK, self.config.rope.dim]
        latent, k_rope = F.linear(y, w.kv_a).split(split, dim=-1)
        latent = rms_norm(latent, w.kv_a_norm, self.config.rms_norm_eps)
        k_rope = self._rotary(k_rope[:, :, None], positions)[:, :, 0]
        return torch.cat([latent, k_rope], dim=-1)
