"""The text with ddtree-native is the text without speculation, token for token, in fp32."""

import pytest
from server_support import Setup, assert_same_ids

from kdtree_sglang.live_server import accept_length

# Budget 4 makes the verify narrower than the draft block of 8, 63 fills one mask word, 16 and 32
# straddle the block size and leave a last mask word in part.
BUDGETS = (4, 16, 32, 63)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("pair", ["mla", "gqa"])
def test_text_equals_plain(servers, pair, page_size, budget):
    answers = servers.answers(Setup(pair, "ddtree-native", page_size, budget))
    assert_same_ids(answers, servers.answers(Setup(pair)))
    # A tree that is never accepted is exact as well, and useless.
    assert accept_length(answers) > 1.5
