"""Weights of a checkpoint folder, in float32, as one tree that both models read.

The tree is made of numpy arrays; `map_arrays` turns it into torch tensors. A matrix is `[out, in]`
as in the checkpoint. Every tensor of the checkpoint is used, and one that the config does not
announce is an error: it would belong to another model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from kdtree_sglang.engine.config import KV_LORA_RANK, LATENT_WIDTH, DraftConfig, TargetConfig

# np.ndarray in the golden model, torch.Tensor in the other.
Array = Any

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class CheckpointError(ValueError):
    """A checkpoint without the tensors that its config asks for; the message names the tensor."""


@dataclass(frozen=True)
class Mlp:
    gate: Array
    up: Array
    down: Array


@dataclass(frozen=True)
class Moe:
    """router `[E, H]`, bias `[E]`; gate and up `[E, I, H]`, down `[E, H, I]`."""

    router: Array
    bias: Array
    gate: Array
    up: Array
    down: Array
    shared: Mlp


@dataclass(frozen=True)
class MlaAttention:
    """q_b takes the hidden state itself where there is no q_a.

    absorb_k `[heads, nope, 512]` and absorb_v `[heads, v, 512]` are the two parts of kv_b_proj.
    """

    q_a: Array | None
    q_a_norm: Array | None
    q_b: Array
    kv_a: Array
    kv_a_norm: Array
    absorb_k: Array
    absorb_v: Array
    o: Array


@dataclass(frozen=True)
class GqaAttention:
    q: Array
    k: Array
    v: Array
    q_norm: Array
    k_norm: Array
    o: Array


@dataclass(frozen=True)
class Layer:
    input_norm: Array
    attention: MlaAttention | GqaAttention
    post_norm: Array
    mlp: Mlp | Moe


@dataclass(frozen=True)
class TargetWeights:
    embedding: Array
    layers: tuple[Layer, ...]
    norm: Array
    head: Array


@dataclass(frozen=True)
class DraftWeights:
    fc: Array
    hidden_norm: Array
    layers: tuple[Layer, ...]
    norm: Array


def map_arrays(tree: Any, function: Callable[[Array], Array]) -> Any:
    """The same tree with every array replaced."""
    if tree is None:
        return None
    if isinstance(tree, tuple):
        return tuple(map_arrays(item, function) for item in tree)
    if is_dataclass(tree):
        parts = {f.name: map_arrays(getattr(tree, f.name), function) for f in fields(tree)}
        return type(tree)(**parts)
    return function(tree)


class _Checkpoint:
    """The tensors of model.safetensors, or of the files in its index."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self._file_of = {}
        for path in self._paths():
            try:
                file = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise CheckpointError(f"{path}: {error}") from error
            self._file_of |= dict.fromkeys(file.keys(), file)
        self._unused = set(self._file_of)

    def _paths(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        if not index.is_file():
            return [self.folder / "model.safetensors"]
        try:
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index}: no JSON object with a weight_map") from error
        return [self.folder / file for file in sorted(set(files))]

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def take(self, name: str, *shape: int) -> np.ndarray:
        if name not in self._file_of:
            raise CheckpointError(f"{self.folder}: no tensor {name}, which config.json asks for")
        tensor = self._file_of[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self.folder}: {name} is {tuple(tensor.shape)}, and config.json makes it {shape}"
            )
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{self.folder}: {name} is {tensor.dtype}; take a checkpoint that is not quantised"
            )
        self._unused.discard(name)
        return tensor.float().numpy()

    def linear(self, name: str, out: int, into: int) -> np.ndarray:
        return self.take(f"{name}.weight", out, into)

    def norm(self, name: str, size: int) -> np.ndarray:
        return self.take(f"{name}.weight", size)

    def mlp(self, name: str, hidden: int, inner: int) -> Mlp:
        return Mlp(
            gate=self.linear(f"{name}.gate_proj", inner, hidden),
            up=self.linear(f"{name}.up_proj", inner, hidden),
            down=self.linear(f"{name}.down_proj", hidden, inner),
        )

    def finish(self, ignore: Callable[[str], bool] = lambda name: False) -> None:
        """Raises if a tensor is left over that `ignore` does not excuse."""
        extra = sorted(name for name in self._unused if not ignore(name))
        if extra:
            raise CheckpointError(
                f"{self.folder}: {extra[0]} ({len(extra)} such tensors) has no place in the model "
                "of config.json"
            )


def load_target(folder: Path, config: TargetConfig) -> TargetWeights:
    """Raises CheckpointError for a tensor that is missing, left over or of another shape."""
    tensors = _Checkpoint(folder)
    vocab, hidden = config.vocab_size, config.hidden_size
    embedding = tensors.take("model.embed_tokens.weight", vocab, hidden)
    # A tied checkpoint may hold the head as well.
    tied = config.tie_word_embeddings and "lm_head.weight" not in tensors
    weights = TargetWeights(
        embedding=embedding,
        layers=tuple(
            _target_layer(tensors, config, number) for number in range(config.num_hidden_layers)
        ),
        norm=tensors.norm("model.norm", hidden),
        head=embedding if tied else tensors.linear("lm_head", vocab, hidden),
    )

    def predicts_further_tokens(name: str) -> bool:
        """Layers after the last are DeepSeek's own multi-token prediction."""
        prefix, _, rest = name.partition("model.layers.")
        number = rest.partition(".")[0]
        return prefix == "" and number.isdigit() and int(number) >= config.num_hidden_layers

    tensors.finish(ignore=predicts_further_tokens)
    return weights


def _target_layer(tensors: _Checkpoint, config: TargetConfig, number: int) -> Layer:
    name = f"model.layers.{number}"
    hidden = config.hidden_size
    if number < config.first_k_dense_replace:
        mlp = tensors.mlp(f"{name}.mlp", hidden, config.intermediate_size)
    else:
        mlp = _moe(tensors, config, f"{name}.mlp")
    return Layer(
        input_norm=tensors.norm(f"{name}.input_layernorm", hidden),
        attention=_mla(tensors, config, f"{name}.self_attn"),
        post_norm=tensors.norm(f"{name}.post_attention_layernorm", hidden),
        mlp=mlp,
    )


def _mla(tensors: _Checkpoint, config: TargetConfig, name: str) -> MlaAttention:
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
    nope, v = config.qk_nope_head_dim, config.v_head_dim
    queries = heads * (nope + config.rope.dim)
    if rank is None:
        q_a, q_a_norm = None, None
        q_b = tensors.linear(f"{name}.q_proj", queries, hidden)
    else:
        q_a = tensors.linear(f"{name}.q_a_proj", rank, hidden)
        q_a_norm = tensors.norm(f"{name}.q_a_layernorm", rank)
        q_b = tensors.linear(f"{name}.q_b_proj", queries, rank)
    kv_b = tensors.linear(f"{name}.kv_b_proj", heads * (nope + v), KV_LORA_RANK)
    kv_b = kv_b.reshape(heads, nope + v, KV_LORA_RANK)
    return MlaAttention(
        q_a=q_a,
        q_a_norm=q_a_norm,
        q_b=q_b,
        kv_a=tensors.linear(f"{name}.kv_a_proj_with_mqa", LATENT_WIDTH, hidden),
        kv_a_norm=tensors.norm(f"{name}.kv_a_layernorm", KV_LORA_RANK),
        absorb_k=kv_b[:, :nope],
        absorb_v=kv_b[:, nope:],
        o=tensors.linear(f"{name}.o_proj", hidden, heads * v),
    )


def _moe(tensors: _Checkpoint, config: TargetConfig, name: str) -> Moe:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    experts = [
        tensors.mlp(f"{name}.experts.{number}", hidden, inner)
        for number in range(config.n_routed_experts)
    ]
    return Moe(
        router=tensors.linear(f"{name}.gate", config.n_routed_experts, hidden),
        bias=tensors.take(f"{name}.gate.e_score_correction_bias", config.n_routed_experts),
        gate=np.stack([expert.gate for expert in experts]),
        up=np.stack([expert.up for expert in experts]),
        down=np.stack([expert.down for expert in experts]),
        shared=tensors.mlp(f"{name}.shared_experts", hidden, inner * config.n_shared_experts),
    )


def load_draft(folder: Path, config: DraftConfig) -> DraftWeights:
    """Raises CheckpointError for a tensor that is missing, left over or of another shape."""
    tensors = _Checkpoint(folder)
    hidden = config.hidden_size
    weights = DraftWeights(
        fc=tensors.linear("fc", hidden, len(config.target_layer_ids) * hidden),
        hidden_norm=tensors.norm("hidden_norm", hidden),
        layers=tuple(
            _draft_layer(tensors, config, number) for number in range(config.num_hidden_layers)
        ),
        norm=tensors.norm("norm", hidden),
    )
    tensors.finish()
    return weights


def _draft_layer(tensors: _Checkpoint, config: DraftConfig, number: int) -> Layer:
    name = f"layers.{number}"
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    return Layer(
        input_norm=tensors.norm(f"{name}.input_layernorm", hidden),
        attention=GqaAttention(
            q=tensors.linear(f"{name}.self_attn.q_proj", queries, hidden),
            k=tensors.linear(f"{name}.self_attn.k_proj", keys, hidden),
            v=tensors.linear(f"{name}.self_attn.v_proj", keys, hidden),
            q_norm=tensors.norm(f"{name}.self_attn.q_norm", dim),
            k_norm=tensors.norm(f"{name}.self_attn.k_norm", dim),
            o=tensors.linear(f"{name}.self_attn.o_proj", hidden, queries),
        ),
        post_norm=tensors.norm(f"{name}.post_attention_layernorm", hidden),
        mlp=tensors.mlp(f"{name}.mlp", hidden, config.intermediate_size),
    )
