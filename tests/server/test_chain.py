"""A tree forced into a chain is stock DFLASH: the same steps and the same text."""

from __future__ import annotations

import pytest
from server_support import CONCURRENCY, NEW_TOKENS, Setup, assert_same_ids, measure

from kdtree_sglang.live_server import LiveServer, detect_device


@pytest.mark.parametrize("pair", ["mla", "gqa"])
def test_forced_chain_is_stock_dflash(servers, prompts, tmp_path, pair: str) -> None:
    stock = measure(servers, Setup(pair, "DFLASH", page_size=16), prompts)
    servers.close()
    setup = Setup(pair, "ddtree-native", page_size=16, budget=7)
    device = detect_device()
    environment = {"DDTREE_FORCE_CHAIN": "1"}
    with LiveServer(
        setup.flags(device), log_path=tmp_path / "chain.log", device=device, env=environment
    ) as server:
        sampling = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        chain = server.generate_many(prompts, sampling, concurrency=CONCURRENCY)
    assert_same_ids(chain, stock)
    steps = [(mine.verify_steps, theirs.verify_steps) for mine, theirs in zip(chain, stock)]
    assert all(mine == theirs for mine, theirs in steps), steps
