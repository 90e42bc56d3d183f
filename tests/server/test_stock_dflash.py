"""Stock DFLASH on this machine: the ground that ddtree-native is compared on."""

import pytest
from server_support import Setup, assert_same_ids, measure

from kdtree_sglang.live_server import accept_length


@pytest.mark.parametrize("pair", ["mla", "gqa"])
def test_dflash_text_equals_plain(servers, plain_answers, prompts, pair):
    expected = plain_answers(pair)
    answers = measure(servers, Setup(pair, "DFLASH", page_size=16), prompts[:32])
    assert_same_ids(answers, expected[:32])
    assert accept_length(answers) > 1.5
