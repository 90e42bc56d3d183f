"""Stock DFLASH on this machine: the ground that ddtree-native is compared on."""

import pytest
from server_support import Setup, assert_same_ids

from kdtree_sglang.live_server import accept_length


@pytest.mark.parametrize("pair", ["mla", "gqa"])
def test_dflash_text_equals_plain(servers, pair):
    answers = servers.answers(Setup(pair, "DFLASH", page_size=16))
    assert_same_ids(answers, servers.answers(Setup(pair)))
    # An untrained drafter would prove nothing about trees.
    assert accept_length(answers) >= 2.0
