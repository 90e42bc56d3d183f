"""RoPE, YaRN and expert routing against transformers' own functions, on random configs."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_support import PAIR
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3RotaryEmbedding,
    DeepseekV3TopkRouter,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
    yarn_apply_mscale,
)

from kdtree_sglang.engine import config, golden, model, rope
from kdtree_sglang.engine.weights import Moe


def random_rope(rng: np.random.Generator) -> dict:
    """rope_parameters of a random config, sometimes without YaRN."""
    parameters = {"rope_type": "default", "rope_theta": float(10 ** rng.uniform(3, 6))}
    if rng.random() < 0.2:
        return parameters
    original = int(rng.integers(64, 8192))
    parameters |= {
        "rope_type": "yarn",
        "factor": float(rng.uniform(1.0, 64.0)),
        "original_max_position_embeddings": original,
        "beta_fast": float(rng.uniform(8, 64)),
        "beta_slow": float(rng.uniform(0.5, 4)),
    }
    if rng.random() < 0.7:
        parameters["mscale"] = float(rng.uniform(0.5, 1.5))
        parameters["mscale_all_dim"] = float(rng.uniform(0.5, 1.5))
    return parameters


def both_configs(parameters: dict, tmp_path) -> tuple[DeepseekV3Config, config.TargetConfig]:
    theirs = DeepseekV3Config(rope_parameters=dict(parameters), max_position_embeddings=1 << 20)
    values = json.loads((PAIR / "target" / "config.json").read_text())
    del values["rope_theta"], values["rope_scaling"]
    (tmp_path / "config.json").write_text(json.dumps(values | {"rope_parameters": parameters}))
    return theirs, config.read_target(tmp_path)


@pytest.mark.parametrize("seed", range(25))
def test_rope_numbers(seed, tmp_path):
    theirs, ours = both_configs(random_rope(np.random.default_rng(seed)), tmp_path)
    kind = theirs.rope_parameters["rope_type"]
    if kind == "default":
        frequencies, amplitude = DeepseekV3RotaryEmbedding.compute_default_rope_parameters(theirs)
    else:
        frequencies, amplitude = ROPE_INIT_FUNCTIONS[kind](theirs)
    np.testing.assert_allclose(rope.frequencies(ours.rope), frequencies.numpy(), rtol=2e-6)
    assert rope.amplitude(ours.rope) == pytest.approx(amplitude, rel=1e-12)
    expected = yarn_apply_mscale(theirs.rope_parameters, 192**-0.5)
    assert rope.softmax_scale(192, ours.rope) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_rotation_keeps_transformers_products(seed, interleaved, tmp_path, device):
    """The order of the turned numbers is free; what queries and keys make of them is not."""
    rng = np.random.default_rng(seed)
    theirs, ours = both_configs(random_rope(rng), tmp_path)
    ours = replace(ours.rope, interleaved=interleaved)
    q, k = rng.standard_normal((2, 2, 9, 3, 64), np.float32)
    positions = rng.integers(0, 300, (2, 9))

    table = DeepseekV3RotaryEmbedding(theirs)(torch.zeros(1), torch.from_numpy(positions))
    apply = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
    turned = apply(*(torch.from_numpy(x).transpose(1, 2) for x in (q, k)), *table)
    expected = (turned[0] @ turned[1].transpose(-1, -2)).numpy()

    golden_q, golden_k = (golden.rotate(x, positions, ours).swapaxes(1, 2) for x in (q, k))
    np.testing.assert_allclose(golden_q @ golden_k.swapaxes(-1, -2), expected, atol=1e-3)

    rotary = model.Rotary(ours, device)
    torch_q, torch_k = (
        rotary(torch.from_numpy(x).to(device), torch.from_numpy(positions).to(device))
        for x in (q, k)
    )
    np.testing.assert_allclose(torch_q.cpu().numpy(), golden_q.swapaxes(1, 2), atol=1e-4)
    np.testing.assert_allclose(torch_k.cpu().numpy(), golden_k.swapaxes(1, 2), atol=1e-4)


@pytest.mark.parametrize("seed", range(25))
def test_routing(seed, device):
    rng = np.random.default_rng(seed)
    groups = int(rng.integers(1, 5))
    experts = groups * int(rng.integers(2, 7))
    open_groups = int(rng.integers(1, groups + 1))
    chosen = int(rng.integers(1, experts // groups * open_groups + 1))
    ours = replace(
        config.read_target(PAIR / "target"),
        hidden_size=20,
        n_routed_experts=experts,
        n_group=groups,
        topk_group=open_groups,
        num_experts_per_tok=chosen,
        norm_topk_prob=bool(rng.random() < 0.5),
        routed_scaling_factor=float(rng.uniform(0.5, 3)),
    )
    x = rng.standard_normal((64, 20), np.float32)
    weight = rng.standard_normal((experts, 20), np.float32) / 4
    bias = rng.standard_normal(experts).astype(np.float32) / 4

    router = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=20,
            n_routed_experts=experts,
            n_group=groups,
            topk_group=open_groups,
            num_experts_per_tok=chosen,
            norm_topk_prob=ours.norm_topk_prob,
            routed_scaling_factor=ours.routed_scaling_factor,
        )
    )
    router.weight.data = torch.from_numpy(weight)
    router.e_score_correction_bias.data = torch.from_numpy(bias)
    with torch.no_grad():
        _, weights, ids = router(torch.from_numpy(x))
    expected = torch.zeros(64, experts).scatter_(1, ids, weights).numpy()

    moe = Moe(weight, bias, gate=None, up=None, down=None, shared=None)
    np.testing.assert_allclose(golden.route(x, moe, ours), expected, atol=1e-5)

    moe = Moe(*(torch.from_numpy(a).to(device) for a in (weight, bias)), None, None, None, None)
    ids, weights = model.route(torch.from_numpy(x).to(device), moe, ours)
    got = torch.zeros(64, experts, device=device).scatter_(1, ids, weights)
    np.testing.assert_allclose(got.cpu().numpy(), expected, atol=1e-5)
