"""Devices, the tiny pair on each, and the texts that every other text is compared with."""

from __future__ import annotations

import pytest
import torch
from engine_support import NEW_TOKENS, PAIR, read_prompts
from transformers import AutoModelForCausalLM, PreTrainedModel

from kdtree_sglang import engine
from kdtree_sglang.engine import config, weights
from kdtree_sglang.engine.golden import GoldenDraft, GoldenTarget


@pytest.fixture(
    scope="session",
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ],
)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return read_prompts()


@pytest.fixture(scope="session")
def pair(device: str) -> tuple[engine.Target, engine.Draft]:
    target = engine.Target.load(PAIR / "target", device)
    return target, engine.Draft.load(PAIR / "draft", target)


@pytest.fixture(scope="session")
def golden_pair() -> tuple[GoldenTarget, GoldenDraft]:
    target_config = config.read_target(PAIR / "target")
    draft_config = config.read_draft(PAIR / "draft")
    target = GoldenTarget(target_config, weights.load_target(PAIR / "target", target_config))
    draft = weights.load_draft(PAIR / "draft", draft_config)
    return target, GoldenDraft(draft_config, draft, target)


@pytest.fixture(scope="session")
def transformers_model() -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="session")
def plain_texts(
    pair: tuple[engine.Target, engine.Draft], prompts: list[list[int]]
) -> list[list[int]]:
    """The engine's own text, one token a step, page size 1."""
    return [text.tokens for text in engine.generate(pair[0], prompts, NEW_TOKENS)]
