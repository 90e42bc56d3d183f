"""What config.json says about a target and its DFlash drafter.

Fields keep the names of the published configs. A key whose value the engine does not compute is
refused by name, so that no model runs as another one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# tree_attention is made for these: values are the first 512 of a row's 576 numbers.
KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
LATENT_WIDTH = KV_LORA_RANK + QK_ROPE_HEAD_DIM

_ABSENT = object()
# What a DFlash drafter may say of itself; every other key of dflash_config changes its forward.
_DFLASH_KEYS = {"mask_token", "mask_token_id", "target_layer_ids", "num_target_layers"}


class UnsupportedConfig(ValueError):
    """A config that the engine does not compute; the message names the file and the key."""


@dataclass(frozen=True)
class Yarn:
    """RoPE stretched to a longer context (arXiv 2309.00071).

    DeepSeek's two mscales are both 0 where the config has neither.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of `dim` numbers: pairs are neighbours if `interleaved`, else halves."""

    dim: int
    theta: float
    interleaved: bool
    yarn: Yarn | None


@dataclass(frozen=True)
class TargetConfig:
    """A DeepSeek-V3 target. The first `first_k_dense_replace` layers have no experts."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    first_k_dense_replace: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: Rope


@dataclass(frozen=True)
class DraftConfig:
    """A DFlash drafter: a Qwen3-like GQA stack that borrows the target's embedding and head."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    rope: Rope


class _Keys:
    """The values of one JSON object, read with the checks that its errors need."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = ""):
        self.path, self.values, self.prefix = path, values, prefix

    def refusal(self, key: str, supported: str) -> UnsupportedConfig:
        value = repr(self.values[key]) if key in self.values else "absent"
        return UnsupportedConfig(
            f"{self.path}: {self.prefix}{key} is {value}; the engine supports {supported}"
        )

    def only(self, key: str, *supported: Any) -> None:
        """An absent key is fine: the published configs leave out what is the default."""
        if key in self.values and self.values[key] not in supported:
            raise self.refusal(key, " or ".join(map(repr, supported)))

    def exactly(self, key: str, supported: Any) -> None:
        if key not in self.values or self.values[key] != supported:
            raise self.refusal(key, repr(supported))

    def integer(self, key: str, low: int = 1, default: Any = _ABSENT) -> int:
        value = self.values.get(key, default)
        if type(value) is not int or value < low:
            raise self.refusal(key, f"an integer of at least {low}")
        return value

    def number(self, key: str, default: Any = _ABSENT) -> float:
        value = self.values.get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.refusal(key, "a finite number above 0")
        return float(value)

    def flag(self, key: str, default: Any = _ABSENT) -> bool:
        value = self.values.get(key, default)
        if type(value) is not bool:
            raise self.refusal(key, "true or false")
        return value

    def section(self, key: str) -> _Keys | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refusal(key, "an object or null")
        return _Keys(self.path, value, f"{self.prefix}{key}.")


def _read(folder: Path) -> _Keys:
    path = Path(folder) / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedConfig(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UnsupportedConfig(f"{path}: not a JSON object")
    return _Keys(path, values)


def _read_rope(keys: _Keys, dim: int, interleaved: bool) -> Rope:
    """From `rope_theta` and `rope_scaling`, or from the `rope_parameters` of transformers 5."""
    parameters = keys.section("rope_parameters")
    theta = (parameters or keys).number("rope_theta")
    scaling = parameters or keys.section("rope_scaling")
    if scaling is None:
        return Rope(dim, theta, interleaved, yarn=None)
    kind = "type" if "type" in scaling.values else "rope_type"
    scaling.only(kind, "yarn", "default")
    for key in ("attention_factor", "attn_factor", "extrapolation_factor", "partial_rotary_factor"):
        scaling.only(key, None, 1, 1.0)
    scaling.only("truncate", True)
    if scaling.values.get(kind, "default") == "default":
        return Rope(dim, theta, interleaved, yarn=None)
    mscales = [
        scaling.number(key) if scaling.values.get(key) else 0.0
        for key in ("mscale", "mscale_all_dim")
    ]
    if 0.0 in mscales and any(mscales):
        # Implementations disagree on what one of them alone means.
        raise scaling.refusal("mscale", "mscale and mscale_all_dim together, or neither")
    return Rope(
        dim,
        theta,
        interleaved,
        Yarn(
            factor=scaling.number("factor"),
            original_max_position_embeddings=scaling.integer("original_max_position_embeddings"),
            beta_fast=scaling.number("beta_fast", 32),
            beta_slow=scaling.number("beta_slow", 1),
            mscale=mscales[0],
            mscale_all_dim=mscales[1],
        ),
    )


def read_target(folder: Path) -> TargetConfig:
    """Reads `folder`/config.json; raises UnsupportedConfig."""
    keys = _read(folder)
    keys.exactly("architectures", ["DeepseekV3ForCausalLM"])
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    keys.only("quantization_config", None)
    keys.exactly("kv_lora_rank", KV_LORA_RANK)
    keys.exactly("qk_rope_head_dim", QK_ROPE_HEAD_DIM)
    keys.only("topk_method", "noaux_tc")
    keys.only("scoring_func", "sigmoid")
    keys.only("moe_layer_freq", 1)
    keys.only("index_topk", None)
    # For another value implementations disagree: transformers norms the latents with this one all
    # the same, SGLang with the config's.
    keys.exactly("rms_norm_eps", 1e-6)
    q_lora_rank = None
    if keys.values.get("q_lora_rank") is not None:
        q_lora_rank = keys.integer("q_lora_rank")
    config = TargetConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        num_hidden_layers=keys.integer("num_hidden_layers"),
        num_attention_heads=keys.integer("num_attention_heads"),
        q_lora_rank=q_lora_rank,
        qk_nope_head_dim=keys.integer("qk_nope_head_dim"),
        v_head_dim=keys.integer("v_head_dim"),
        intermediate_size=keys.integer("intermediate_size"),
        moe_intermediate_size=keys.integer("moe_intermediate_size"),
        n_routed_experts=keys.integer("n_routed_experts"),
        n_shared_experts=keys.integer("n_shared_experts"),
        num_experts_per_tok=keys.integer("num_experts_per_tok"),
        n_group=keys.integer("n_group"),
        topk_group=keys.integer("topk_group"),
        norm_topk_prob=keys.flag("norm_topk_prob"),
        routed_scaling_factor=keys.number("routed_scaling_factor"),
        first_k_dense_replace=keys.integer("first_k_dense_replace", low=0),
        rms_norm_eps=keys.number("rms_norm_eps"),
        max_position_embeddings=keys.integer("max_position_embeddings"),
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        rope=_read_rope(keys, QK_ROPE_HEAD_DIM, keys.flag("rope_interleave", True)),
    )
    # A group is ranked by its two best experts.
    if config.n_routed_experts % config.n_group or config.n_routed_experts < 2 * config.n_group:
        raise keys.refusal("n_group", "groups of equal size, of at least two experts")
    if config.topk_group > config.n_group:
        raise keys.refusal("topk_group", f"at most n_group, {config.n_group}")
    open_experts = config.n_routed_experts // config.n_group * config.topk_group
    if config.num_experts_per_tok > open_experts:
        raise keys.refusal("num_experts_per_tok", f"at most the open groups' {open_experts}")
    return config


def read_draft(folder: Path) -> DraftConfig:
    """Reads `folder`/config.json; raises UnsupportedConfig."""
    keys = _read(folder)
    keys.exactly("architectures", ["DFlashDraftModel"])
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    keys.only("quantization_config", None)
    keys.only("use_sliding_window", False)
    keys.only("is_causal", None, False)
    keys.only("use_gemma_norm", False)
    keys.only("rope_is_neox_style", True)
    keys.only("partial_rotary_factor", 1, 1.0)
    keys.only("projector_type", None)
    layers = keys.integer("num_hidden_layers")
    keys.only("layer_types", None, ["full_attention"] * layers)
    dflash = keys.section("dflash_config")
    if dflash is None:
        raise keys.refusal("dflash_config", "DFlash drafters, which have one")
    for key in sorted(dflash.values.keys() - _DFLASH_KEYS):
        raise dflash.refusal(key, "DFlash drafters without it")
    ids = dflash.values.get("target_layer_ids")
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
        raise dflash.refusal("target_layer_ids", "a list of the target's layer numbers")
    config = DraftConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=keys.integer("num_attention_heads"),
        num_key_value_heads=keys.integer("num_key_value_heads"),
        head_dim=keys.integer("head_dim"),
        intermediate_size=keys.integer("intermediate_size"),
        rms_norm_eps=keys.number("rms_norm_eps"),
        block_size=keys.integer("block_size", low=2),
        mask_token_id=dflash.integer("mask_token_id", low=0),
        target_layer_ids=tuple(ids),
        rope=_read_rope(keys, keys.integer("head_dim", low=2), interleaved=False),
    )
    if config.block_size > 16:
        raise keys.refusal("block_size", "at most 16: build_tree has 15 depths")
    if config.num_attention_heads % config.num_key_value_heads:
        raise keys.refusal("num_key_value_heads", "a divisor of num_attention_heads")
    if config.head_dim % 2:
        raise keys.refusal("head_dim", "an even number: RoPE turns pairs")
    if config.mask_token_id >= config.vocab_size:
        raise dflash.refusal("mask_token_id", f"a token below vocab_size, {config.vocab_size}")
    return config


def check_pair(target: TargetConfig, draft: DraftConfig) -> None:
    """Raises UnsupportedConfig unless the drafter is made for this target."""
    # The drafter reads the target's embedding and writes through its head.
    for key in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(draft, key), getattr(target, key)
        if ours != theirs:
            raise UnsupportedConfig(f"{key} is {ours} in the draft and {theirs} in the target")
    if max(draft.target_layer_ids) >= target.num_hidden_layers:
        raise UnsupportedConfig(
            f"dflash_config.target_layer_ids of the draft is {list(draft.target_layer_ids)}, and "
            f"the target's num_hidden_layers is {target.num_hidden_layers}"
        )
