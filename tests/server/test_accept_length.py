"""What trees are for: more tokens a verify step, already at the chain's own width."""

import pytest
from server_support import Setup

from kdtree_sglang.live_server import accept_length


@pytest.mark.parametrize("pair", ["mla", "gqa"])
def test_trees_commit_more_than_the_chain(servers, pair):
    chain = accept_length(servers.answers(Setup(pair, "DFLASH", page_size=16)))
    # Verify widths 8, the chain's own, 17 and 33.
    at8, at17, at33 = (
        accept_length(servers.answers(Setup(pair, "ddtree-native", page_size=16, budget=budget)))
        for budget in (7, 16, 32)
    )
    assert chain <= at8 < at17 < at33, (chain, at8, at17, at33)
