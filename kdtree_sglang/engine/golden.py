"""The golden model: DeepSeek-V3 and the DFlash drafter in numpy, written to be read.

One forward serves prefill, decoding, a chain and a tree: it takes any rows, their positions and
which of the new rows each of them sees. Shapes: b requests, n new rows each, t rows of context,
H hidden size, h heads. All numbers are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kdtree_sglang.engine import rope
from kdtree_sglang.engine.config import KV_LORA_RANK, LATENT_WIDTH, DraftConfig, Rope, TargetConfig
from kdtree_sglang.engine.weights import (
    DraftWeights,
    GqaAttention,
    MlaAttention,
    Mlp,
    Moe,
    TargetWeights,
)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return weight * (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    # By tanh, which does not overflow.
    return np.float32(0.5) * (np.tanh(np.float32(0.5) * x) + 1)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def rotate(x: np.ndarray, positions: np.ndarray, config: Rope) -> np.ndarray:
    """Turns the pairs of x `[..., heads, dim]` by the angles of positions `[...]`."""
    angle = positions[..., None, None].astype(np.float32) * rope.frequencies(config)
    cos, sin = (f(angle) * np.float32(rope.amplitude(config)) for f in (np.cos, np.sin))
    if config.interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
    else:
        a, b = np.split(x, 2, axis=-1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    if config.interleaved:
        return np.stack(turned, axis=-1).reshape(x.shape)
    return np.concatenate(turned, axis=-1)


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray, scale: float
) -> np.ndarray:
    """q `[b, n, h, d]`, one key head k `[b, t, d]`, v `[b, t, e]`, visible `[b, n, t]`."""
    b, n, h, d = q.shape
    scores = (q.reshape(b, n * h, d) @ k.swapaxes(1, 2)).reshape(b, n, h, -1) * np.float32(scale)
    scores = np.where(visible[:, :, None], scores, np.float32(-np.inf))
    return (softmax(scores).reshape(b, n * h, -1) @ v).reshape(b, n, h, -1)


def per_head(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """`[b, n, h, i]` by w `[h, i, o]`, each head by its own matrix: `[b, n, h, o]`."""
    b, n, h, i = x.shape
    return (x.reshape(b * n, h, i).swapaxes(0, 1) @ w).swapaxes(0, 1).reshape(b, n, h, -1)


def mlp(x: np.ndarray, w: Mlp) -> np.ndarray:
    return (silu(x @ w.gate.T) * (x @ w.up.T)) @ w.down.T


def route(x: np.ndarray, w: Moe, config: TargetConfig) -> np.ndarray:
    """What each expert counts for, `[rows, E]`: zero where it is not chosen.

    Experts compete by sigmoid score plus bias, first as groups, each ranked by its two best, then
    one by one within the groups that won. The bias steers the choice, not the weight.
    """
    rows = np.arange(len(x))[:, None]
    scores = sigmoid(x @ w.router.T)
    contest = scores + w.bias
    groups = contest.reshape(len(x), config.n_group, -1)
    best_two = np.sort(groups, axis=-1)[..., -2:].sum(axis=-1)
    winners = np.argsort(-best_two, axis=-1, kind="stable")[:, : config.topk_group]
    lost = np.ones((len(x), config.n_group), bool)
    lost[rows, winners] = False
    contest = np.where(lost[..., None], -np.inf, groups).reshape(scores.shape)
    chosen = np.argsort(-contest, axis=-1, kind="stable")[:, : config.num_experts_per_tok]
    weights = np.zeros_like(scores)
    weights[rows, chosen] = scores[rows, chosen]
    if config.norm_topk_prob:
        weights /= weights.sum(axis=-1, keepdims=True) + np.float32(1e-20)
    return weights * np.float32(config.routed_scaling_factor)


def moe(x: np.ndarray, w: Moe, config: TargetConfig) -> np.ndarray:
    flat = x.reshape(-1, x.shape[-1])
    weights = route(flat, w, config)
    out = mlp(flat, w.shared)
    for expert in range(config.n_routed_experts):
        rows = np.flatnonzero(weights[:, expert])
        parts = Mlp(w.gate[expert], w.up[expert], w.down[expert])
        out[rows] += weights[rows, expert, None] * mlp(flat[rows], parts)
    return out.reshape(x.shape)


class Cache:
    """Rows of every layer by request and position, in pages that the requests took in turns.

    Position p of request r lies in slot `pages[r, p // page_size] * page_size + p % page_size`.
    """

    def __init__(self, layers: int, requests: int, capacity: int, page_size: int, width: int):
        per_request = -(-capacity // page_size)
        self.page_size = page_size
        self.pages = np.arange(requests * per_request).reshape(per_request, requests).T
        self._rows = np.zeros((layers, requests * per_request * page_size, width), np.float32)

    def _slots(self, requests: np.ndarray, positions: np.ndarray) -> np.ndarray:
        page = self.pages[requests[:, None], positions // self.page_size]
        return page * self.page_size + positions % self.page_size

    def read(self, layer: int, requests: np.ndarray, length: int) -> np.ndarray:
        """`[b, length, width]`: the first positions of each request."""
        positions = np.broadcast_to(np.arange(length), (len(requests), length))
        return self._rows[layer, self._slots(requests, positions)]

    def write(
        self, layer: int, requests: np.ndarray, positions: np.ndarray, rows: np.ndarray
    ) -> None:
        """rows `[b, n, width]` at positions `[b, n]`."""
        self._rows[layer, self._slots(requests, positions)] = rows

    def move(self, request: int, path: np.ndarray, start: int) -> None:
        """Row `start + path[j]` of every layer goes to `start + j`, all of them at once."""
        origin = self._slots(np.array([request]), start + path[None])[0]
        goal = self._slots(np.array([request]), start + np.arange(len(path))[None])[0]
        self._rows[:, goal] = self._rows[:, origin]


@dataclass(frozen=True)
class Forward:
    """logits `[b, n, V]`; states, `[b, n, H]` after each layer."""

    logits: np.ndarray
    states: list[np.ndarray]


class GoldenTarget:
    """The target: MLA in absorbed form, so that the cache holds one latent row a token."""

    def __init__(self, config: TargetConfig, weights: TargetWeights):
        self.config, self.weights = config, weights
        head_dim = config.qk_nope_head_dim + config.rope.dim
        self.scale = rope.softmax_scale(head_dim, config.rope)

    def new_cache(self, requests: int, capacity: int, page_size: int) -> Cache:
        layers = self.config.num_hidden_layers
        return Cache(layers, requests, capacity, page_size, LATENT_WIDTH)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Of normalised hidden states, the drafter's too."""
        return hidden @ self.weights.head.T

    def forward(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        visible: np.ndarray,
        prefix_lens: np.ndarray,
        cache: Cache,
        requests: np.ndarray,
    ) -> Forward:
        """New rows after each request's prefix; row i is cached at position prefix_len + i.

        Args:
            tokens, positions: `[b, n]`; the position is RoPE's, not the cache's.
            visible: `[b, n, n]` bool, which new rows each new row sees, itself included.
            prefix_lens: `[b]` cached rows, all of them seen by every new row.
            requests: `[b]`, their numbers in the cache.
        """
        c, n = self.config, tokens.shape[1]
        homes = prefix_lens[:, None] + np.arange(n)
        length = int(prefix_lens.max()) + n
        context = np.arange(length) < prefix_lens[:, None]
        seen = np.repeat(context[:, None], n, axis=1)
        for request, start in enumerate(prefix_lens):
            seen[request, :, start : start + n] = visible[request]

        x, states = self.weights.embedding[tokens], []
        for number, layer in enumerate(self.weights.layers):
            y = rms_norm(x, layer.input_norm, c.rms_norm_eps)
            q, latent = self._queries_and_latents(y, positions, layer.attention)
            cache.write(number, requests, homes, latent)
            latents = cache.read(number, requests, length)
            mixed = attend(q, latents, latents[..., :KV_LORA_RANK], seen, self.scale)
            values = per_head(mixed, layer.attention.absorb_v.swapaxes(1, 2))
            x = x + values.reshape(*tokens.shape, -1) @ layer.attention.o.T
            y = rms_norm(x, layer.post_norm, c.rms_norm_eps)
            x = x + (moe(y, layer.mlp, c) if isinstance(layer.mlp, Moe) else mlp(y, layer.mlp))
            states.append(x)
        return Forward(self.logits(rms_norm(x, self.weights.norm, c.rms_norm_eps)), states)

    def _queries_and_latents(
        self, y: np.ndarray, positions: np.ndarray, w: MlaAttention
    ) -> tuple[np.ndarray, np.ndarray]:
        """Queries `[b, n, h, 576]` and cache rows `[b, n, 576]`: 512 latent, 64 rotary numbers."""
        c = self.config
        low = y if w.q_a is None else rms_norm(y @ w.q_a.T, w.q_a_norm, c.rms_norm_eps)
        q = (low @ w.q_b.T).reshape(*positions.shape, c.num_attention_heads, -1)
        q_nope, q_rope = np.split(q, [c.qk_nope_head_dim], axis=-1)
        q_latent = per_head(q_nope, w.absorb_k)
        q = np.concatenate([q_latent, rotate(q_rope, positions, c.rope)], axis=-1)

        latent, k_rope = np.split(y @ w.kv_a.T, [KV_LORA_RANK], axis=-1)
        latent = rms_norm(latent, w.kv_a_norm, c.rms_norm_eps)
        k_rope = rotate(k_rope[..., None, :], positions, c.rope)[..., 0, :]
        return q, np.concatenate([latent, k_rope], axis=-1)


class GoldenDraft:
    """The DFlash drafter: one forward over `[root, mask, ...]` predicts the positions after it.

    Its context is not its own: keys and values of committed tokens come from the target's states.
    Context and block are seen by every row of the block.
    """

    def __init__(self, config: DraftConfig, weights: DraftWeights, target: GoldenTarget):
        self.config, self.weights, self.target = config, weights, target

    def new_cache(self, requests: int, capacity: int, page_size: int) -> Cache:
        """A row is the keys of all heads, then their values."""
        width = 2 * self.config.num_key_value_heads * self.config.head_dim
        return Cache(self.config.num_hidden_layers, requests, capacity, page_size, width)

    def append(
        self,
        states: list[np.ndarray],
        positions: np.ndarray,
        cache: Cache,
        requests: np.ndarray,
    ) -> None:
        """Caches the context of the target's states `[b, n, H]`, one a layer, at positions."""
        w = self.weights
        features = np.concatenate([states[i] for i in self.config.target_layer_ids], axis=-1)
        context = rms_norm(features @ w.fc.T, w.hidden_norm, self.config.rms_norm_eps)
        for number, layer in enumerate(w.layers):
            rows = self._keys_values(context, positions, layer.attention)
            cache.write(number, requests, positions, rows)

    def logits(
        self, root: np.ndarray, prefix_lens: np.ndarray, cache: Cache, requests: np.ndarray
    ) -> np.ndarray:
        """`[b, B - 1, V]`: row d is for the token d + 1 positions after the root `[b]`."""
        c, w, block = self.config, self.weights, self.config.block_size
        tokens = np.full((len(root), block), c.mask_token_id)
        tokens[:, 0] = root
        positions = prefix_lens[:, None] + np.arange(block)
        length = int(prefix_lens.max())
        context = np.arange(length) < prefix_lens[:, None]
        seen = np.concatenate([context, np.ones((len(root), block), bool)], axis=1)
        seen = np.repeat(seen[:, None], block, axis=1)

        x = self.target.weights.embedding[tokens]
        for number, layer in enumerate(w.layers):
            y = rms_norm(x, layer.input_norm, c.rms_norm_eps)
            own = self._keys_values(y, positions, layer.attention)
            rows = np.concatenate([cache.read(number, requests, length), own], axis=1)
            x = x + self._attend(y, positions, rows, seen, layer.attention)
            x = x + mlp(rms_norm(x, layer.post_norm, c.rms_norm_eps), layer.mlp)
        return self.target.logits(rms_norm(x[:, 1:], w.norm, c.rms_norm_eps))

    def _keys_values(self, x: np.ndarray, positions: np.ndarray, w: GqaAttention) -> np.ndarray:
        heads = (*positions.shape, self.config.num_key_value_heads, self.config.head_dim)
        k = rms_norm((x @ w.k.T).reshape(heads), w.k_norm, self.config.rms_norm_eps)
        k = rotate(k, positions, self.config.rope).reshape(*positions.shape, -1)
        return np.concatenate([k, x @ w.v.T], axis=-1)

    def _attend(
        self,
        y: np.ndarray,
        positions: np.ndarray,
        rows: np.ndarray,
        seen: np.ndarray,
        w: GqaAttention,
    ) -> np.ndarray:
        c = self.config
        q = (y @ w.q.T).reshape(*positions.shape, c.num_attention_heads, c.head_dim)
        q = rotate(rms_norm(q, w.q_norm, c.rms_norm_eps), positions, c.rope)
        keys, values = np.split(rows.reshape(*rows.shape[:2], -1, c.head_dim), 2, axis=2)
        together = c.num_attention_heads // c.num_key_value_heads
        mixed = [
            attend(
                q[:, :, head * together : (head + 1) * together],
                keys[:, :, head],
                values[:, :, head],
                seen,
                c.head_dim**-0.5,
            )
            for head in range(c.num_key_value_heads)
        ]
        return np.concatenate(mixed, axis=2).reshape(*positions.shape, -1) @ w.o.T
