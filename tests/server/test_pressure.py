"""Text under pressure: chunked prefill, a KV pool too small for the batch, no overlap."""

import pytest
from server_support import Setup, assert_idle, assert_same_ids

# 16 requests of up to 200 + 64 tokens and two windows each do not fit in this pool, and the
# scheduler is told to admit them all the same.
TINY_POOL = ("--max-total-tokens", "1536", "--schedule-conservativeness", "0")
CHUNKS = ("--chunked-prefill-size", "48")


@pytest.mark.parametrize("page_size", [1, 16])
def test_retraction_and_chunks_change_no_token(servers, page_size):
    setup = Setup("mla", "ddtree-native", page_size, 16, (*TINY_POOL, *CHUNKS))
    answers = servers.answers(setup)
    assert_same_ids(answers, servers.answers(Setup("mla")))
    assert sum(answer.meta["num_retractions"] for answer in answers) > 0
    # `answers` may have come before the plain server took over.
    server = servers.use(setup)
    server.generate_many(["A list"] * 4, {"max_new_tokens": 8})
    assert_idle(server)


def test_without_overlap_the_text_is_the_same(servers):
    setup = Setup("gqa", "ddtree-native", 16, 16, ("--disable-overlap-schedule",))
    assert_same_ids(servers.answers(setup), servers.answers(Setup("gqa")))
