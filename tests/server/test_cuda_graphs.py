"""On a GPU: replayed graphs answer as eager forwards do, alone and in a batch, with overlap on."""

from __future__ import annotations

import pytest
from server_support import NEW_TOKENS, Setup, assert_same_ids

from kdtree_sglang.live_server import accept_length, detect_device

pytestmark = pytest.mark.skipif(detect_device() != "cuda", reason="CUDA graphs need a GPU")

SAMPLING = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}


@pytest.mark.parametrize(
    ("pair", "attention"), [("mla", "triton"), ("gqa", "triton"), ("gqa", "flashinfer")]
)
def test_graphs_change_no_token(servers, prompts, pair: str, attention: str) -> None:
    answers = {}
    for graphs in (True, False):
        extra = ("--attention-backend", attention)
        extra += () if graphs else ("--disable-cuda-graph",)
        server = servers.use(Setup(pair, "ddtree-native", 16, 16, extra))
        alone = server.generate_many(prompts[:24], SAMPLING, concurrency=1)
        server.flush_cache()
        together = server.generate_many(prompts, SAMPLING, concurrency=8)
        # SGLang's periodic decode line says which way it went.
        assert ("cuda graph: True" in server.log()) == graphs
        answers[graphs] = [*alone, *together]
    assert_same_ids(answers[True], answers[False])
    assert accept_length(answers[True]) == accept_length(answers[False])
