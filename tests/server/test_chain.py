"""A tree forced into a chain is stock DFLASH: the same steps and the same text."""

import pytest
from server_support import Setup, assert_same_ids

from kdtree_sglang.live_server import accept_length, detect_device


@pytest.mark.parametrize("pair", ["mla", "gqa"])
def test_forced_chain_is_stock_dflash(servers, pair):
    stock = servers.answers(Setup(pair, "DFLASH", page_size=16))
    chain = servers.answers(Setup(pair, "ddtree-native", page_size=16, budget=7, chain=True))
    if detect_device() == "cuda":  # bf16: another kernel rounds differently
        assert_same_ids(chain, servers.answers(Setup(pair)))
        assert accept_length(chain) == pytest.approx(accept_length(stock), rel=0.03)
    else:
        assert_same_ids(chain, stock)
        assert [a.verify_steps for a in chain] == [a.verify_steps for a in stock]
