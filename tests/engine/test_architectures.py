"""Other models than the tiny pair: random DeepSeek-V3 configs, saved by transformers."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from engine_support import LOGIT_TOLERANCE, assert_same_texts, golden_prefill, padded, prefill
from safetensors.torch import save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from kdtree_sglang import engine
from kdtree_sglang.engine import config, golden_loops, weights
from kdtree_sglang.engine.golden import GoldenDraft, GoldenTarget

VOCAB, HIDDEN = 97, 48
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 24,
    "v_head_dim": 40,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MODELS = {
    "one group, no q_lora, no yarn": {
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "tied head, two shared experts, no dense layer": {
        "q_lora_rank": 20,
        "n_group": 3,
        "topk_group": 2,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "tie_word_embeddings": True,
    },
    "halved rope, yarn with mscales": {
        "q_lora_rank": 20,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "rope_interleave": False,
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 1.3},
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.7,
    },
    "dense, yarn without mscales": {
        "q_lora_rank": None,
        "n_group": 2,
        "topk_group": 2,
        "first_k_dense_replace": 2,
        "rope_parameters": YARN,
    },
}


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def model(request, tmp_path_factory):
    """transformers' model, and the folder it was saved to, in several files."""
    torch.manual_seed(1)
    theirs = DeepseekV3ForCausalLM(DeepseekV3Config(**COMMON | request.param)).eval()
    for name, tensor in theirs.state_dict().items():
        # Of unit size throughout: with small weights attention is flat and routing all the same.
        if tensor.dim() == 1:
            tensor.normal_(mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
        else:
            tensor.normal_(std=tensor.shape[-1] ** -0.5)
    folder = tmp_path_factory.mktemp("target")
    theirs.save_pretrained(folder, max_shard_size="200KB")
    assert (folder / "model.safetensors.index.json").is_file()
    return theirs, folder


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory):
    """A random drafter: its tokens are seldom the target's, so trees mostly start over."""
    torch.manual_seed(2)
    values = {
        "architectures": ["DFlashDraftModel"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 30,
        "rms_norm_eps": 1e-5,
        "block_size": 5,
        "rope_theta": 1000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        "dflash_config": {"mask_token_id": 96, "target_layer_ids": [1, 0]},
    }
    shapes = {
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "layers.0.input_layernorm.weight": (HIDDEN,),
        "layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "layers.0.self_attn.q_proj.weight": (40, HIDDEN),
        "layers.0.self_attn.k_proj.weight": (20, HIDDEN),
        "layers.0.self_attn.v_proj.weight": (20, HIDDEN),
        "layers.0.self_attn.q_norm.weight": (10,),
        "layers.0.self_attn.k_norm.weight": (10,),
        "layers.0.self_attn.o_proj.weight": (HIDDEN, 40),
        "layers.0.mlp.gate_proj.weight": (30, HIDDEN),
        "layers.0.mlp.up_proj.weight": (30, HIDDEN),
        "layers.0.mlp.down_proj.weight": (HIDDEN, 30),
    }
    folder = tmp_path_factory.mktemp("draft")
    (folder / "config.json").write_text(json.dumps(values))
    tensors = {name: torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def sequences():
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB, length).tolist() for length in (1, 2, 31, 64, 65)]


def golden(folder, draft_folder):
    target_config = config.read_target(folder)
    target = GoldenTarget(target_config, weights.load_target(folder, target_config))
    draft_config = config.read_draft(draft_folder)
    return target, GoldenDraft(draft_config, weights.load_draft(draft_folder, draft_config), target)


def test_logits(model, draft_folder, sequences, device):
    theirs, folder = model
    with torch.no_grad():
        expected = theirs(padded(sequences)).logits
    assert expected.std() > 0.3
    ours = prefill(engine.Target.load(folder, device), sequences, page_size=64)[0].cpu()
    numpy_ours = golden_prefill(golden(folder, draft_folder)[0], sequences, page_size=64).logits
    for row, sequence in enumerate(sequences):
        written = slice(len(sequence))
        assert (ours - expected)[row, written].abs().max() <= LOGIT_TOLERANCE
        difference = numpy_ours[row, written] - expected[row, written].numpy()
        assert np.abs(difference).max() <= LOGIT_TOLERANCE


def test_texts(model, draft_folder, sequences, device):
    theirs, folder = model
    target = engine.Target.load(folder, device)
    draft = engine.Draft.load(draft_folder, target)
    count = 20
    expected = [
        theirs.generate(
            torch.tensor([sequence]), max_new_tokens=count, do_sample=False, eos_token_id=None
        )[0, len(sequence) :].tolist()
        for sequence in sequences
    ]
    numpy_pair = golden(folder, draft_folder)
    texts = {
        "ar": engine.generate(target, sequences, count),
        "chain": engine.generate(target, sequences, count, mode="chain", draft=draft, page_size=3),
        # 3 is narrower than a block, and 100 is more than the vocabulary offers at a depth.
        "tree of 3": engine.generate(
            target, sequences, count, mode="tree", draft=draft, budget=3, page_size=64
        ),
        "tree of 100": engine.generate(
            target, sequences, count, mode="tree", draft=draft, budget=100, page_size=64
        ),
    }
    for generations in texts.values():
        assert_same_texts([generation.tokens for generation in generations], expected)
    assert any(max(text.committed) > 1 for text in texts["tree of 100"])
    golden_texts = golden_loops.tree(*numpy_pair, sequences, count, budget=100, page_size=4)
    assert_same_texts(golden_texts, expected)


def test_draft_logits_equal_the_golden_ones(model, draft_folder, sequences, device):
    """YaRN, grouped queries and layers in another order, through one step of each."""
    _, folder = model
    target = engine.Target.load(folder, device)
    draft = engine.Draft.load(draft_folder, target)
    numpy_target, numpy_draft = golden(folder, draft_folder)
    steps = []
    engine.generate(target, sequences, 2, mode="chain", draft=draft, on_step=steps.append)

    out = golden_prefill(numpy_target, sequences, page_size=1)
    context = numpy_draft.new_cache(len(sequences), 80, page_size=1)
    requests = np.arange(len(sequences))
    positions = np.broadcast_to(np.arange(out.logits.shape[1]), out.logits.shape[:2])
    numpy_draft.append(out.states, positions, context, requests)
    lens = np.array([len(sequence) for sequence in sequences])
    root = steps[0].tensors["root"].cpu().numpy()
    expected = numpy_draft.logits(root, lens, context, requests)
    got = steps[0].tensors["draft_logits"].cpu().numpy()
    assert expected.std() > 0.1
    assert np.abs(got - expected).max() <= LOGIT_TOLERANCE


def test_the_config_is_read_whole(model):
    """Each field of ours is what transformers reads from the same file."""
    theirs, folder = model
    ours = asdict(config.read_target(folder))
    rope = ours.pop("rope")
    assert ours == {name: getattr(theirs.config, name) for name in ours}
    assert rope["interleaved"] == theirs.config.rope_interleave
    assert rope["theta"] == theirs.config.rope_parameters["rope_theta"]
