"""Compact PyTorch versions of the two targets and of the DFlash drafter.

They hold the parameters under the names of the published checkpoints, so `state_dict()` is what
goes to disk (experts aside, which are stacked here and split by `export`). Shapes: B sequences,
T tokens, C hidden size, H heads, D head size.
"""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

EPS = 1e-6
BLOCK = 8
MASK_ID = 3
CONTEXT = 2048

_COMMON = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "max_position_embeddings": CONTEXT,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}

TARGETS = {
    # Query, key and value heads are 128 wide although the latent is the 512 + 64 of the large
    # models: prefill runs without absorption, and GPU kernels have no unequal small head sizes.
    "mla": _COMMON
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 512,
        "moe_intermediate_size": 32,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "ep_size": 1,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "rope_interleave": True,
        "rope_scaling": {
            "type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "gqa": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 384,
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 4,
    },
}


def draft_config(arch: str) -> dict:
    layers = TARGETS[arch]["num_hidden_layers"]
    return _COMMON | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": {"mla": 512, "gqa": 256}[arch],
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "layer_types": ["full_attention"] * 2,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
        "block_size": BLOCK,
        "num_target_layers": layers,
        # Servers capture what enters the next layer, so the last layer cannot be named.
        "dflash_config": {
            "mask_token": "<|MASK|>",
            "mask_token_id": MASK_ID,
            "target_layer_ids": list(range(layers - 1)),
        },
    }


def rope_frequencies(config: dict) -> torch.Tensor:
    """Rotary frequencies; YaRN keeps the fast ones and divides the slow ones by `factor`."""
    dim = config.get("qk_rope_head_dim") or config["head_dim"]
    freq = config["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float) / dim)
    scaling = config["rope_scaling"]
    if scaling is None:
        return freq

    def dimension(rotations):
        turns = scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(config["rope_theta"]))

    low = max(math.floor(dimension(scaling["beta_fast"])), 0)
    high = min(math.ceil(dimension(scaling["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return freq * (1 - ramp) + freq / scaling["factor"] * ramp


def rope_table(config: dict) -> torch.Tensor:
    """[2, CONTEXT + BLOCK, D / 2]: cosines and sines by position."""
    angle = torch.outer(torch.arange(CONTEXT + BLOCK).float(), rope_frequencies(config))
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x, table, interleaved=False):
    """Rotates the last dimension of x [..., T, D] by table [2, T, D/2] (or broadcastable)."""
    cos, sin = table
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), EPS)


def linear(n_in, n_out):
    return nn.Linear(n_in, n_out, bias=False)


class Mlp(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.gate_proj = linear(hidden, inner)
        self.up_proj = linear(hidden, inner)
        self.down_proj = linear(inner, hidden)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid scores; the bias steers the choice of experts but not their weights."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.randn(c["n_routed_experts"], c["hidden_size"]) * 0.02)
        self.register_buffer("e_score_correction_bias", torch.zeros(c["n_routed_experts"]))
        self.register_buffer("load", torch.zeros(c["n_routed_experts"]), persistent=False)

    def forward(self, x):
        """x [N, C] -> combine weights [N, E], zero for experts that are not chosen."""
        c = self.c
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        choice = scores.detach() + self.e_score_correction_bias
        groups = choice.view(len(x), c["n_group"], -1)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(c["topk_group"], dim=-1).indices
        open_group = torch.zeros_like(groups[..., 0]).scatter_(1, best, 1.0).bool()
        choice = groups.masked_fill(~open_group[..., None], -torch.inf).flatten(1)
        picked = choice.topk(c["num_experts_per_tok"], dim=-1).indices
        chosen = torch.zeros_like(scores).scatter_(1, picked, 1.0)
        if self.training:
            self.load += chosen.sum(0)
        weights = scores * chosen
        return weights / weights.sum(-1, keepdim=True) * c["routed_scaling_factor"]

    @torch.no_grad()
    def balance(self, rate):
        self.e_score_correction_bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Moe(nn.Module):
    """Every expert sees every token and the router's zeros drop the rest: three dense products."""

    def __init__(self, c):
        super().__init__()
        e, i, h = c["n_routed_experts"], c["moe_intermediate_size"], c["hidden_size"]
        self.gate = Router(c)
        self.experts = nn.Module()
        self.experts.gate_proj = nn.Parameter(torch.randn(e, i, h) * 0.02)
        self.experts.up_proj = nn.Parameter(torch.randn(e, i, h) * 0.02)
        self.experts.down_proj = nn.Parameter(torch.randn(e, h, i) * 0.02)
        self.shared_experts = Mlp(h, i * c["n_shared_experts"])

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        weights = self.gate(x)
        e, i, h = self.experts.gate_proj.shape
        inner = F.silu(F.linear(x, self.experts.gate_proj.view(e * i, h)))
        inner = inner * F.linear(x, self.experts.up_proj.view(e * i, h))
        inner = inner.view(-1, e, i) * weights[..., None].to(inner.dtype)
        out = F.linear(inner.flatten(1), self.experts.down_proj.permute(1, 0, 2).reshape(h, e * i))
        return (out + self.shared_experts(x)).view(shape)


class Cache:
    """Keys and values of one layer, [B, H, capacity, D], filled from the left."""

    def __init__(self, capacity):
        self.capacity, self.length, self.k, self.v = capacity, 0, None, None

    def append(self, k, v):
        if self.k is None:
            self.k = k.new_empty(*k.shape[:2], self.capacity, k.shape[3])
            self.v = v.new_empty(*v.shape[:2], self.capacity, v.shape[3])
        end = self.length + k.shape[2]
        self.k[:, :, self.length : end], self.v[:, :, self.length : end] = k, v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]


def attend_causally(q, k, v, cache, scale):
    """Prefill (empty cache) or one new token a sequence; no other case is needed here."""
    if cache is not None:
        k, v = cache.append(k, v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=scale)


class MlaAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        h, heads = c["hidden_size"], c["num_attention_heads"]
        self.nope, self.rope, self.v_dim = (
            c[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v")
        )
        self.q_a_proj = linear(h, c["q_lora_rank"])
        self.q_a_layernorm = Norm(c["q_lora_rank"])
        self.q_b_proj = linear(c["q_lora_rank"], heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = linear(h, c["kv_lora_rank"] + self.rope)
        self.kv_a_layernorm = Norm(c["kv_lora_rank"])
        self.kv_b_proj = linear(c["kv_lora_rank"], heads * (self.nope + self.v_dim))
        self.o_proj = linear(heads * self.v_dim, h)
        scaling = c["rope_scaling"]
        mscale = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1
        self.scale = mscale**2 / math.sqrt(self.nope + self.rope)

    def forward(self, x, table, cache):
        b, t, _ = x.shape
        heads = self.c["num_attention_heads"]
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(b, t, heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        sizes = [self.c["kv_lora_rank"], self.rope]
        latent, k_rope = self.kv_a_proj_with_mqa(x).split(sizes, dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(b, t, heads, -1).transpose(1, 2)
        k_nope, v = kv.split([self.nope, self.v_dim], dim=-1)
        q_rope = rotate(q_rope, table, interleaved=True)
        k_rope = rotate(k_rope[:, None], table, interleaved=True).expand(-1, heads, -1, -1)
        q = torch.cat([q_nope, q_rope], dim=-1)
        k = torch.cat([k_nope, k_rope.to(k_nope.dtype)], dim=-1)
        out = attend_causally(q, k, v, cache, self.scale)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


class GqaAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.dim = c["head_dim"]
        self.q_proj = linear(c["hidden_size"], self.heads * self.dim)
        self.k_proj = linear(c["hidden_size"], self.kv_heads * self.dim)
        self.v_proj = linear(c["hidden_size"], self.kv_heads * self.dim)
        self.o_proj = linear(self.heads * self.dim, c["hidden_size"])
        self.q_norm = Norm(self.dim)
        self.k_norm = Norm(self.dim)

    def queries(self, x, table):
        q = self.q_proj(x).view(*x.shape[:2], self.heads, self.dim)
        return rotate(self.q_norm(q).transpose(1, 2), table)

    def keys_values(self, x, table):
        k = self.k_proj(x).view(*x.shape[:2], self.kv_heads, self.dim)
        v = self.v_proj(x).view(*x.shape[:2], self.kv_heads, self.dim)
        k = rotate(self.k_norm(k).transpose(1, 2), table)
        repeat = self.heads // self.kv_heads
        return k.repeat_interleave(repeat, 1), v.transpose(1, 2).repeat_interleave(repeat, 1)

    def forward(self, x, table, cache):
        q = self.queries(x, table)
        k, v = self.keys_values(x, table)
        out = attend_causally(q, k, v, cache, self.dim**-0.5)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        mla = "kv_lora_rank" in c
        self.input_layernorm = Norm(c["hidden_size"])
        self.self_attn = MlaAttention(c) if mla else GqaAttention(c)
        self.post_attention_layernorm = Norm(c["hidden_size"])
        sparse = mla and index >= c["first_k_dense_replace"]
        self.mlp = Moe(c) if sparse else Mlp(c["hidden_size"], c["intermediate_size"])

    def forward(self, x, table, cache, dropout):
        mixed = self.self_attn(self.input_layernorm(x), table, cache)
        x = x + F.dropout(mixed, dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), dropout, self.training)


class Target(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.model.layers = nn.ModuleList(Layer(c, i) for i in range(c["num_hidden_layers"]))
        self.model.norm = Norm(c["hidden_size"])
        self.lm_head = linear(c["hidden_size"], c["vocab_size"])
        self.register_buffer("table", rope_table(c), persistent=False)
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.02)
        if c["tie_word_embeddings"]:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids, caches=None, dropout=0.0, last_only=False):
        """ids [B, T] -> logits and the states after each layer, each [B, T, C]."""
        start = caches[0].length if caches else 0
        table = self.table[:, start : start + ids.shape[1]]
        x = self.model.embed_tokens(ids)
        states = []
        for i, layer in enumerate(self.model.layers):
            x = layer(x, table, caches[i] if caches else None, dropout)
            states.append(x)
        x = self.model.norm(x[:, -1:] if last_only else x)
        return self.lm_head(x), states

    def features(self, states, layer_ids):
        return torch.cat([states[i] for i in layer_ids], dim=-1)

    @torch.no_grad()
    def generate(self, ids, count):
        """Greedy continuation of equally long prompts: [B, P] -> [B, P + count]."""
        caches = [Cache(ids.shape[1] + count) for _ in self.model.layers]
        pieces, new = [ids], ids
        for _ in range(count):
            logits, _ = self(new, caches, last_only=True)
            new = logits.argmax(-1)
            pieces.append(new)
        return torch.cat(pieces, dim=1)


class DraftLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = Norm(c["hidden_size"])
        self.self_attn = GqaAttention(c)
        self.post_attention_layernorm = Norm(c["hidden_size"])
        self.mlp = Mlp(c["hidden_size"], c["intermediate_size"])

    def forward(self, x, context, table, block_table, mask):
        attn = self.self_attn
        y = self.input_layernorm(x)
        # Context keys and values come straight from the projected target states: no layer norm.
        k_ctx, v_ctx = attn.keys_values(context, table)
        k, v = attn.keys_values(y, block_table)
        k, v = torch.cat([k_ctx, k], dim=2), torch.cat([v_ctx, v], dim=2)
        out = F.scaled_dot_product_attention(attn.queries(y, block_table), k, v, attn_mask=mask)
        x = x + attn.o_proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.layer_ids = c["dflash_config"]["target_layer_ids"]
        self.fc = linear(len(self.layer_ids) * c["hidden_size"], c["hidden_size"])
        self.hidden_norm = Norm(c["hidden_size"])
        self.layers = nn.ModuleList(DraftLayer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = Norm(c["hidden_size"])
        self.register_buffer("table", rope_table(c), persistent=False)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, std=0.02)

    def forward(self, target, features, tokens, anchors):
        """Drafts one block at each anchor.

        features [B, T, K*C] are target states of tokens [B, T]; anchors [B, A] are positions whose
        token is known but whose state is not. Returns logits [B, A, BLOCK - 1, V]; row j predicts
        the token at anchor + 1 + j.
        """
        b, t, _ = features.shape
        a = anchors.shape[1]
        position = anchors[..., None] + torch.arange(BLOCK, device=anchors.device)
        block = torch.full_like(position, self.c["dflash_config"]["mask_token_id"])
        block[..., 0] = tokens.gather(1, anchors)
        x = target.model.embed_tokens(block.flatten(1))
        context = self.hidden_norm(self.fc(features))
        before = torch.arange(t, device=anchors.device) < anchors[..., None]
        same = torch.eye(a, dtype=torch.bool, device=anchors.device)
        same = same.repeat_interleave(BLOCK, 1)[None].expand(b, -1, -1)
        mask = torch.cat([before, same], dim=-1).repeat_interleave(BLOCK, 1)[:, None]
        block_table = self.table[:, position.flatten(1)][:, :, None]
        for layer in self.layers:
            x = layer(x, context, self.table[:, :t], block_table, mask)
        x = self.norm(x).view(b, a, BLOCK, -1)[:, :, 1:]
        return target.lm_head(x)


def export(model, config, folder: Path):
    """Writes bf16 weights (the router bias stays fp32, where its steps survive) and config.json."""
    tensors = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if ".experts." in name:
            prefix, proj = name.rsplit(".", 1)
            for i, expert in enumerate(value):
                tensors[f"{prefix}.{i}.{proj}.weight"] = expert.bfloat16().contiguous()
        elif name.endswith("e_score_correction_bias"):
            tensors[name] = value.float()
        else:
            tensors[name] = value.bfloat16().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(folder: Path):
    """The model of a folder that `export` wrote, in fp32 and evaluation mode."""
    config = json.loads((folder / "config.json").read_text())
    model = Draft(config) if "dflash_config" in config else Target(config)
    tensors = load_file(folder / "model.safetensors")
    state = model.state_dict()
    for name in state:
        if ".experts." in name:
            prefix, proj = name.rsplit(".", 1)
            parts = [tensors[f"{prefix}.{i}.{proj}.weight"] for i in range(len(state[name]))]
            state[name] = torch.stack(parts).float()
        elif name == "lm_head.weight" and config["tie_word_embeddings"]:
            state[name] = tensors["model.embed_tokens.weight"].float()
        else:
            state[name] = tensors[name].float()
    model.load_state_dict(state)
    return model.eval()
