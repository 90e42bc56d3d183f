"""What a bf16 answer may differ in: the other of the target's two all but tied tokens."""

import pytest

from kdtree_sglang.live_server import NEAR_TIE, Generation, leaves_at_near_tie

# Per position the two best (log-probability, id, text), as SGLang's meta_info has them.
TOPS = [
    [(-0.1, 5, None), (-3.0, 8, None)],
    [(-0.7, 6, None), (-0.7 - NEAR_TIE / 2, 9, None)],
    [(-0.5, 7, None), (-0.5 - NEAR_TIE * 2, 4, None)],
]
SCORED = Generation([5, 6, 7], "", {"output_top_logprobs": TOPS})


@pytest.mark.parametrize(
    ("ids", "excused"),
    [
        ([5, 9, 3], True),  # the runner-up of a near tie; what follows is another text
        ([5, 8, 7], False),  # neither of the two best
        ([5, 6, 4], False),  # the runner-up, too far behind
        ([8, 6, 7], False),
        ([5, 6], False),  # only shorter
    ],
)
def test_only_the_runner_up_of_a_near_tie_is_excused(ids: list[int], excused: bool) -> None:
    assert leaves_at_near_tie(Generation(ids, "", {}), SCORED) is excused
