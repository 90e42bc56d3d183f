"""What the engine does not compute is refused by the name of the key, tensor or argument."""

import json
import shutil

import pytest
import torch
from engine_support import PAIR
from safetensors.torch import load_file, save_file

from kdtree_sglang import engine
from kdtree_sglang.engine import config, weights

ABSENT = object()


def changed(folder, tmp_path, key, value):
    """A copy of the config in which the key, perhaps `section.key`, has another value."""
    values = json.loads((folder / "config.json").read_text())
    *sections, last = key.split(".")
    inner = values
    for section in sections:
        inner = inner[section]
    if value is ABSENT:
        del inner[last]
    else:
        inner[last] = value
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


@pytest.mark.parametrize(
    "key, value",
    [
        ("architectures", ["DeepseekV2ForCausalLM"]),
        ("architectures", ABSENT),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("quantization_config", {"quant_method": "fp8"}),
        ("kv_lora_rank", 256),
        ("kv_lora_rank", ABSENT),
        ("qk_rope_head_dim", 32),
        ("topk_method", "greedy"),
        ("scoring_func", "softmax"),
        ("moe_layer_freq", 2),
        ("index_topk", 2048),
        ("rms_norm_eps", 1e-5),
        ("hidden_size", "256"),
        ("num_hidden_layers", 0),
        ("vocab_size", ABSENT),
        ("norm_topk_prob", 1),
        ("routed_scaling_factor", -1.0),
        ("n_shared_experts", None),
        ("n_group", 3),
        ("n_group", 16),
        ("topk_group", 5),
        ("num_experts_per_tok", 9),
        ("q_lora_rank", 0),
        ("rope_theta", ABSENT),
        ("rope_interleave", "yes"),
        ("rope_scaling", "yarn"),
        ("rope_scaling.type", "linear"),
        ("rope_scaling.factor", ABSENT),
        ("rope_scaling.original_max_position_embeddings", ABSENT),
        ("rope_scaling.mscale", ABSENT),
        ("rope_scaling.attention_factor", 1.5),
        ("rope_scaling.truncate", False),
    ],
)
def test_target_configs(tmp_path, key, value):
    with pytest.raises(engine.UnsupportedConfig, match=rf"config\.json: {key} is .*supports"):
        config.read_target(changed(PAIR / "target", tmp_path, key, value))


@pytest.mark.parametrize(
    "key, value",
    [
        ("architectures", ["DFlashLagunaForCausalLM"]),
        ("attention_bias", True),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("is_causal", True),
        ("use_gemma_norm", True),
        ("rope_is_neox_style", False),
        ("partial_rotary_factor", 0.5),
        ("projector_type", "domino"),
        ("quantization_config", {}),
        ("block_size", 17),
        ("block_size", 1),
        ("num_key_value_heads", 3),
        ("head_dim", 63),
        ("dflash_config", None),
        ("dflash_config.selector_rank", 8),
        ("dflash_config.final_logit_softcapping", 30.0),
        ("dflash_config.mask_token_id", ABSENT),
        ("dflash_config.mask_token_id", 2048),
        ("dflash_config.target_layer_ids", []),
        ("dflash_config.target_layer_ids", [0, -1]),
    ],
)
def test_draft_configs(tmp_path, key, value):
    with pytest.raises(engine.UnsupportedConfig, match=rf"config\.json: {key} is .*supports"):
        config.read_draft(changed(PAIR / "draft", tmp_path, key, value))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_configs_that_are_none(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(engine.UnsupportedConfig, match=r"config\.json: not"):
        config.read_target(tmp_path)


@pytest.mark.parametrize(
    "key, value",
    [("hidden_size", 128), ("vocab_size", 4096), ("dflash_config.target_layer_ids", [0, 3])],
)
def test_a_draft_of_another_target(tmp_path, key, value):
    target = config.read_target(PAIR / "target")
    draft = config.read_draft(changed(PAIR / "draft", tmp_path, key, value))
    with pytest.raises(engine.UnsupportedConfig, match=key):
        config.check_pair(target, draft)


def drop(tensors):
    del tensors["model.layers.1.mlp.experts.7.up_proj.weight"]


def add_bias(tensors):
    tensors["model.layers.2.self_attn.o_proj.bias"] = torch.zeros(256)


def cut(tensors):
    tensors["model.norm.weight"] = torch.zeros(255)


def quantise(tensors):
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "change, message",
    [
        (drop, r"no tensor model\.layers\.1\.mlp\.experts\.7\.up_proj\.weight"),
        (add_bias, r"model\.layers\.2\.self_attn\.o_proj\.bias .* no place"),
        (cut, r"model\.norm\.weight is \(255,\)"),
        (quantise, r"model\.layers\.0\.mlp\.up_proj\.weight is torch\.float8_e4m3fn"),
    ],
)
def test_checkpoints(tmp_path, change, message):
    tensors = load_file(PAIR / "target" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(PAIR / "target" / "config.json", tmp_path)
    with pytest.raises(engine.CheckpointError, match=message):
        engine.Target.load(tmp_path)


def test_broken_files(tmp_path):
    shutil.copy(PAIR / "target" / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        engine.Target.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(engine.CheckpointError, match=r"model\.safetensors"):
        engine.Target.load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(engine.CheckpointError, match=r"model\.safetensors\.index\.json"):
        engine.Target.load(tmp_path)


def test_layers_of_multi_token_prediction_are_left_alone(tmp_path):
    """DeepSeek's checkpoints have one more layer than the config counts."""
    path = PAIR / "target" / "model.safetensors"
    tensors = load_file(path) | {"model.layers.3.eh_proj.weight": torch.zeros(256, 512)}
    save_file(tensors, tmp_path / "model.safetensors")
    target = config.read_target(PAIR / "target")
    weights.load_target(tmp_path, target)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"mode": "beam"}, "mode"),
        ({"mode": "tree"}, "draft"),
        ({"budget": 0}, "budget"),
        ({"budget": 128}, "budget"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2046}, "max_position_embeddings"),
        ({"prompts": []}, "prompts"),
        ({"prompts": [[5], []]}, "prompts"),
        ({"prompts": [[2048]]}, "vocabulary"),
        ({"page_size": 0}, "page_size"),
    ],
)
def test_arguments(pair, arguments, message):
    good = {"prompts": [[5, 6, 7]], "max_new_tokens": 4}
    with pytest.raises(ValueError, match=message):
        engine.generate(pair[0], **good | arguments)
